"""The command line: parses, calls, prints. Progress goes to standard error, results to standard output."""

import sys

try:
    # a command is listed in the order of its module here
    from constraintmatch.cli import training, looking, asking, looping, research, searching  # noqa: I001
    from constraintmatch.cli.shared import app
except KeyboardInterrupt:  # the program has hardly begun: it ends as it does later
    print("stopped", file=sys.stderr)
    sys.exit(130)

__all__ = ["app", "asking", "looking", "looping", "main", "research", "searching", "training"]


def main() -> None:
    """The entry point `constraintmatch`."""
    app()
