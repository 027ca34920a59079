"""Small charts as inline SVG: sharp at every size, coloured by the page's CSS variables, readable without a script."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from constraintmatch.markup import percent, short_number, text

__all__ = ["Series", "histogram", "line_chart", "nice_ticks"]

_Item = TypeVar("_Item")

WIDTH, HEIGHT = 480, 230  # of the drawing; the page scales it to the width that is there
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 30
MAX_POINTS = 300  # per line: more than the pixels that could show them
DOTS_UP_TO = 40  # points that get a dot, which tells its value on hover
TABLE_ROWS = 12
SMALLEST = 1e-200  # a span under it is none: its logarithm may not exist


@dataclass(frozen=True)
class Series:
    """One line: its name and its (step, value) points in order."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class _Scale:
    """From values to places in the drawing."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, in steps of 1, 2 or 5 times a power of ten."""
    if not high - low > SMALLEST:
        high = low + (abs(low) if abs(low) > SMALLEST else 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def line_chart(title: str, series: Sequence[Series], *, shares: bool = False) -> str:
    """A figure with one line per series over steps, its legend with the last values, and its numbers, folded.

    `shares` are fractions, drawn from 0 to 100%. Each series has a point; where none has two, only the values stand.
    """
    say = percent if shares else short_number
    heading = f"<h3>{text(title)}</h3>"
    if all(len(line.points) < 2 for line in series):
        step = max(line.points[-1][0] for line in series)
        return (
            f'<figure class="chart">{heading}{_legend(series, say)}<p class="quiet">At step {step:,.0f}.</p></figure>'
        )
    thinned = [Series(line.name, _thin(line.points, MAX_POINTS)) for line in series]
    drawing = _drawing(title, thinned, shares, say)
    return f'<figure class="chart">{heading}{drawing}{_legend(series, say)}{_numbers(series, say)}</figure>'


def _drawing(title: str, series: Sequence[Series], shares: bool, say: Callable[[float], str]) -> str:
    steps = [step for line in series for step, _ in line.points]
    values = [value for line in series for _, value in line.points]
    y_ticks = nice_ticks(min(0.0, *values), max(1.0, *values) if shares else max(0.0, *values))
    last = max(1.0, *steps)
    x_ticks = [tick for tick in nice_ticks(0, last) if tick <= last]
    scale = _Scale((0, last), (y_ticks[0], y_ticks[-1]))
    ends = ", ".join(
        f"{line.name} {say(line.points[0][1])} to {say(line.points[-1][1])}" for line in series if line.points
    )
    label = f"{title} over steps 0 to {last:,.0f}: {ends}"
    lines = "".join(_line(number, line, scale, say) for number, line in enumerate(series, 1))
    return _svg(label, _grid(scale, x_ticks, y_ticks, _tick_text(y_ticks, shares)) + lines)


def _tick_text(ticks: Sequence[float], shares: bool) -> Callable[[float], str]:
    """How to write the ticks: all with as many digits as their distance needs, short enough for the margin."""
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    if shares:
        return lambda value: f"{value:.0%}"
    if digits > 3 or max(map(abs, ticks)) >= 1e7:
        return lambda value: f"{value:.2g}"
    if max(map(abs, ticks)) >= 1e4:
        return lambda value: f"{value / 1000:,g}k"
    return lambda value: f"{value:,.{digits}f}"


def _svg(label: str, content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(label)}">{content}</svg>'


def _grid(scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], tick_text: Callable[[float], str]) -> str:
    parts = []
    for tick in y_ticks:
        _, y = scale.place(scale.x[0], tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    for tick in x_ticks:
        x, _ = scale.place(tick, scale.y[0])
        anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"  # the last one would stick out
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">{tick:,.6g}</text>')
    return "".join(parts)


def _line(number: int, line: Series, scale: _Scale, say: Callable[[float], str]) -> str:
    places = [scale.place(*point) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline class="line s{number}" points="{path}"/>'
    if len(places) > DOTS_UP_TO:
        return drawn
    return drawn + "".join(
        f'<circle class="dot s{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.6">'
        f"<title>{text(line.name)} {say(value)} at step {step:,.0f}</title></circle>"
        for (x, y), (step, value) in zip(places, line.points, strict=True)
    )


def _legend(series: Sequence[Series], say: Callable[[float], str]) -> str:
    entries = "".join(
        f'<li><svg class="key" viewBox="0 0 24 8" aria-hidden="true"><path class="line s{number}" d="M0 4H24"/></svg> '
        f"{text(line.name)} <b>{say(line.points[-1][1])}</b></li>"
        for number, line in enumerate(series, 1)
    )
    return f'<ul class="legend">{entries}</ul>'


def _numbers(series: Sequence[Series], say: Callable[[float], str]) -> str:
    """The values at up to a dozen steps as a folded table."""
    steps = _thin(tuple(sorted({step for line in series for step, _ in line.points})), TABLE_ROWS)
    columns = [dict(line.points) for line in series]
    head = "".join(f'<th scope="col">{text(line.name)}</th>' for line in series)
    rows = "".join(
        f'<tr><th scope="row">{step:,.0f}</th>'
        + "".join(f"<td>{say(column[step]) if step in column else ''}</td>" for column in columns)
        + "</tr>"
        for step in steps
    )
    table = f'<table><thead><tr><th scope="col">step</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<details><summary>Numbers</summary><div class="wide">{table}</div></details>'


def _thin(items: Sequence[_Item], most: int) -> tuple[_Item, ...]:
    """At most this many of the items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return tuple(items)
    return tuple(items[index] for index in np.linspace(0, len(items) - 1, most).round().astype(int))


def histogram(
    title: str, values: ArrayLike, parts: Sequence[tuple[str, NDArray[np.bool_]]], *, n_bins: int = 20
) -> str:
    """A figure with the counts of values in [0, 1], stacked from disjoint masks that name the parts."""
    array = np.asarray(values, np.float64)
    counts = [np.histogram(array[mask], n_bins, (0, 1))[0] for _, mask in parts]
    y_ticks = nice_ticks(0, int(max(1, np.sum(counts, axis=0).max(initial=0))))
    scale = _Scale((0, 1), (0, y_ticks[-1]))
    bars = "".join(
        _stack(index, n_bins, [(name, count[index]) for (name, _), count in zip(parts, counts, strict=True)], scale)
        for index in range(n_bins)
    )
    grid = _grid(scale, (), [tick for tick in y_ticks if tick == int(tick)], _tick_text(y_ticks, False))
    names = "".join(
        f'<text x="{scale.place(share, 0)[0]:.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">{share:.0%}</text>'
        for share, anchor in ((0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1, "end"))
    )
    legend = "".join(
        f'<li><span class="swatch s{number}"></span> {text(name)} <b>{int(mask.sum()):,}</b></li>'
        for number, (name, mask) in enumerate(parts, 1)
    )
    label = f"{title}: {len(array):,} images, mean {percent(float(array.mean()))}"
    drawing = _svg(label, grid + names + bars)
    return f'<figure class="chart"><h3>{text(title)}</h3>{drawing}<ul class="legend">{legend}</ul></figure>'


def _stack(index: int, n_bins: int, heights: Sequence[tuple[str, int]], scale: _Scale) -> str:
    below, drawn = 0, []
    left, right = scale.place(index / n_bins, 0)[0] + 1, scale.place((index + 1) / n_bins, 0)[0] - 1
    for number, (name, height) in enumerate(heights, 1):
        top, foot = scale.place(0, below + height)[1], scale.place(0, below)[1]
        said = f"{height:,} {name}, confidence {index / n_bins:.0%} to {(index + 1) / n_bins:.0%}"
        if height:
            drawn.append(
                f'<rect class="bar s{number}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                f'height="{foot - top:.1f}"><title>{text(said)}</title></rect>'
            )
        below += height
    return "".join(drawn)
