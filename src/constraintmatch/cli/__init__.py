"""The command line: parses, calls, prints. Progress goes to standard error, results to standard output."""

import io
import signal
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was begun is put in order
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name may be no text
    try:
        app()
    except KeyboardInterrupt:  # before a command begins, which says more
        print("stopped", file=sys.stderr)
        sys.exit(130)
