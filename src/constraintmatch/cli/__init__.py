"""The command line: parses, calls, prints. Progress goes to standard error, results to standard output."""

# A command is listed in the order of its module here.
from constraintmatch.cli import training

# isort: split
from constraintmatch.cli import looking, research
from constraintmatch.cli.shared import app

__all__ = ["app", "looking", "main", "research", "training"]


def main() -> None:
    """The entry point `constraintmatch`."""
    app()
