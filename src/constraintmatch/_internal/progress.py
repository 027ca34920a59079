"""What users see while something runs: a bar in a terminal, plain lines elsewhere; and how signals stop it."""

# ruff: noqa: ARG002 (a reporter may leave out what it is given)

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported where it is used: help should be quick
    from rich.console import Console
    from rich.live import Live


class Reporter:
    """Takes the state of a long job: `start` once a job, `update` often, `say` for lines that stay.

    This one shows nothing.
    """

    def start(self, title: str, total: int, done: int = 0) -> None:
        return

    def update(self, done: int, values: Mapping[str, float] | None = None) -> None:
        return

    def say(self, text: str) -> None:
        return

    def stop(self) -> None:
        return


QUIET = Reporter()


class Watched(Reporter):
    """Passes everything on and knows how far the job is; `n_answers` are those that a round of training learns from."""

    def __init__(self, reporter: Reporter, n_answers: int = 0) -> None:
        self.reporter, self.n_answers, self.title, self.total, self.done = reporter, n_answers, "", 0, 0
        self.ended = False  # set it, and the job is interrupted at its next update

    def say(self, text: str) -> None:
        self.reporter.say(text)

    def stop(self) -> None:
        self.reporter.stop()

    def start(self, title: str, total: int, done: int = 0) -> None:
        self.title, self.total, self.done = title, total, done
        self.reporter.start(title, total, done)

    def update(self, done: int, values: Mapping[str, float] | None = None) -> None:
        self.done = done
        self.reporter.update(done, values)
        if self.ended:
            raise KeyboardInterrupt


@contextmanager
def watched(reporter: Reporter, title: str, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Shows a job until it ends: call what this gives with (done, total).

    Without a total it begins at each call with 0: files are decoded, or the cache serves and there is nothing to show.
    """

    def progress(done: int, of: int) -> None:
        if total is None and done == 0:
            reporter.start(title, of)
        reporter.update(done)

    if total is not None:
        reporter.start(title, total)
    try:
        yield progress
    finally:
        reporter.stop()


class Lines(Reporter):
    """Plain lines for logs and pipes: one when values come, at most every `every` seconds."""

    def __init__(self, console: Console, *, every: float = 10.0) -> None:
        self.console, self.every = console, every
        self.start("", 0)

    def start(self, title: str, total: int, done: int = 0) -> None:
        self.title, self.total, self.first = title, total, done
        self.began = self.shown = time.monotonic()

    def update(self, done: int, values: Mapping[str, float] | None = None) -> None:
        now = time.monotonic()
        if done < self.total and now - self.shown < self.every:
            return
        self.shown = now
        rate = (done - self.first) / max(now - self.began, 1e-9)
        left = (self.total - done) / rate if rate > 0 else 0.0
        rest = f"  {_values(values)}" if values else ""
        self.say(f"{self.title}: {done:,}/{self.total:,}  {rate:.1f}/s  {left:.0f} s left{rest}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bar(Reporter):
    """A bar with the speed and the time left, and below it a line with the newest values, cut to the width."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None

    def start(self, title: str, total: int, done: int = 0) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        self.stop()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.completed:,}/{task.total:,} {task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            auto_refresh=False,
            expand=True,
        )
        self.task = self.progress.add_task(title, total=total, completed=done, rate="")
        self.values = Text(style="dim", no_wrap=True, overflow="ellipsis")
        self.began, self.first = time.monotonic(), done
        group = Group(self.progress, self.values)
        self.live = Live(group, console=self.console, transient=True, refresh_per_second=4)
        self.live.start()

    def update(self, done: int, values: Mapping[str, float] | None = None) -> None:
        if self.live is None:
            return
        rate = (done - self.first) / max(time.monotonic() - self.began, 1e-9)
        self.progress.update(self.task, completed=done, rate=f"{rate:.1f}/s")
        if values:
            self.values.plain = _values(values)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)  # wraps between words; a terminal would within them

    def stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


@dataclass
class Stop:
    """Whether a signal has asked to stop, and whether one may interrupt what runs now, as it can be repeated."""

    asked: bool = False
    at_once: bool = True
    alone: bool = True  # else other processes must stop at the same step: nothing is interrupted


@contextmanager
def stop_signals(stop: Stop) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM ask to stop; a second signal ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(*_: Any) -> None:
        again, stop.asked = stop.asked, True
        if stop.alone and (again or stop.at_once):
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def console_reporter(console: Console | None = None) -> Bar | Lines:
    """A bar when standard error is a terminal, plain lines otherwise."""
    from rich.console import Console

    console = console or Console(file=sys.stderr)
    return Bar(console) if console.is_terminal else Lines(console)


def say_error(text: str, code: int) -> int:
    """Print one line and give back the exit code."""
    print_line(" ".join(text.split()), err=True)
    return code


def print_line(text: str, *, err: bool = False) -> None:
    """Print a line that a terminal wraps between words and a pipe gets whole."""
    from rich.console import Console

    console = Console(stderr=err)
    if console.is_terminal:
        console.print(text, markup=False, highlight=False)
    else:
        print(text, file=console.file, flush=True)


def _values(values: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.3g}" for name, value in values.items())
