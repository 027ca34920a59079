import io
import time

import pytest
from rich.console import Console

from constraintmatch._internal.progress import Bar, Lines, Reporter, console_reporter


def written(width: int, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width, force_terminal=terminal, color_system=None, legacy_windows=False), stream


@pytest.mark.parametrize("width", [40, 60, 120])
def test_a_bar_shows_title_count_speed_and_values_at_any_width(width: int) -> None:
    console, stream = written(width, terminal=True)
    bar = Bar(console)
    bar.start("constraintmatch", 2_000)
    bar.update(500, {"loss": 0.51234, "selected": 0.25, "pseudo_label_accuracy": 0.9})
    assert bar.live is not None
    bar.live.refresh()
    bar.say("a line that stays")
    bar.stop()
    shown = stream.getvalue()
    assert "constraintmatch" in shown
    assert "500/2,000" in shown
    assert "loss 0.512" in shown
    assert "a line that stays\n" in shown
    bar.update(600)  # after the end nothing is drawn
    assert stream.getvalue() == shown


def test_a_terminal_gets_lines_that_break_between_words() -> None:
    console, stream = written(40, terminal=True)
    Bar(console).say("a line that is longer than the terminal is wide --and-holds-a-flag")
    assert "--and-holds-a-flag" in stream.getvalue()
    assert max(map(len, stream.getvalue().splitlines())) <= 40


def test_lines_are_plain_and_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    console, stream = written(200, terminal=False)
    lines = Lines(console, every=10)
    lines.start("scan", 100, 20)
    for now, done in ((1, 30), (11, 40), (12, 50), (20, 100)):
        clock[0] = now
        lines.update(done, {"loss": 1.5})
    assert stream.getvalue().splitlines() == [
        "scan: 40/100  1.8/s  33 s left  loss 1.5",
        "scan: 100/100  4.0/s  0 s left  loss 1.5",
    ]


def test_the_reporter_fits_the_stream() -> None:
    assert isinstance(console_reporter(written(80, terminal=True)[0]), Bar)
    assert isinstance(console_reporter(written(80, terminal=False)[0]), Lines)


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Reporter()
    quiet.start("x", 3)
    quiet.update(1, {"loss": 1.0})
    quiet.say("hidden")
    quiet.stop()
    assert capsys.readouterr() == ("", "")
