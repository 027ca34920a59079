"""A function in a process of its own: a copy of this one, which has imported already what takes seconds to import."""

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch

__all__ = ["Fork"]


class Fork:
    """Runs `call(*arguments)` elsewhere, for tests that kill it or send it signals; `out` has its lines."""

    def __init__(self, call: Callable[..., Any], *arguments: Any, errors: Path | None = None) -> None:
        # autograd has threads where there is a GPU, and a copy would be without them
        context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        reading, writing = context.Pipe(duplex=False)
        with warnings.catch_warnings(), reading, writing:
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for a fork in spite of threads
            self.process = context.Process(target=_run, args=(call, arguments, writing, errors))
            self.process.start()
            self.out: TextIO = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        self.pid: int = self.process.pid

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.out.close()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60.0) -> int | None:
        """Its exit code; the number of the signal that killed it, with a minus; None if it still runs."""
        self.process.join(seconds)
        code: int | None = self.process.exitcode
        return code


def _run(call: Callable[..., Any], arguments: tuple[Any, ...], writing: Connection, errors: Path | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(writing.fileno(), 1)
    writing.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    if errors is not None:
        sys.stderr = errors.open("w", buffering=1, encoding="utf-8")
    call(*arguments)
