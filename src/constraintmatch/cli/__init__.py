"""The command line: parses, calls, prints. Progress goes to standard error, results to standard output."""

# A command is listed in the order of its module here.
from constraintmatch.cli import training

# isort: split
from constraintmatch.cli import looking

# isort: split
from constraintmatch.cli import asking, looping, research, searching
from constraintmatch.cli.shared import app

__all__ = ["app", "asking", "looking", "looping", "main", "research", "searching", "training"]


def main() -> None:
    """The entry point `constraintmatch`."""
    app()
