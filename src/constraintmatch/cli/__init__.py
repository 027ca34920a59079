"""The command line: parses, calls, prints. Progress goes to standard error, results to standard output."""

import os
import sys

try:
    # a module has the commands under one heading of the help, which lists them in this order
    from constraintmatch.cli import training, asking, research  # noqa: I001
    from constraintmatch.cli.shared import app
except KeyboardInterrupt:  # as later in a run
    print("stopped", file=sys.stderr)
    sys.exit(130)

__all__ = ["app", "asking", "main", "research", "training"]


def main() -> None:
    """The entry point `constraintmatch`."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin take busy cores from the work
    app()
