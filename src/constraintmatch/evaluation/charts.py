"""Small charts as plain values: places, ticks and words. The report's template draws them as inline SVG."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["histogram", "line_chart", "nice_ticks", "percent", "plural", "short_number"]

_Item = TypeVar("_Item")

WIDTH, HEIGHT = 480, 230  # of the drawing; the page scales it to the width that is there
LEFT, RIGHT, TOP, BOTTOM = 52, 468, 12, 200  # of the area that holds the data
EMPTY = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "step": None, "bars": (), "lines": ()}
MAX_POINTS = 300  # per line: more than the pixels that could show them
DOTS_UP_TO = 40  # points that get a dot, which shows its value on hover
TABLE_ROWS = 12
SMALLEST = 1e-200  # a span under it is none: its logarithm may not exist


def percent(value: float) -> str:
    """A fraction as 93.1%."""
    return f"{value:.1%}"


def plural(count: int, word: str) -> str:
    """1 image, 1,200 images."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def short_number(value: float) -> str:
    """A number with three or four digits that count: 0.0213, 1.204, 15,300."""
    if value == 0 or 1e-4 <= abs(value) < 10:
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.3f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, in steps of 1, 2 or 5 times a power of ten."""
    if not high - low > SMALLEST:
        high = low + (abs(low) if abs(low) > SMALLEST else 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def line_chart(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, shares: bool = False
) -> dict[str, Any]:
    """A chart with one line per name over (step, value) points, its last values and its numbers.

    `shares` are fractions, drawn from 0 to 100%. Each line has a point; where none has two, only the values remain.
    """
    say = percent if shares else short_number
    legend = [(name, say(points[-1][1])) for name, points in lines.items()]
    chart = {**EMPTY, "title": title, "legend": legend}
    last = max(points[-1][0] for points in lines.values())
    if all(len(points) < 2 for points in lines.values()):
        return {**chart, "step": f"{last:,.0f}"}
    thinned = {name: _thin(points, MAX_POINTS) for name, points in lines.items()}
    ends = ", ".join(f"{name} {say(points[0][1])} to {say(points[-1][1])}" for name, points in lines.items())
    return {
        **chart,
        "label": f"{title} over steps 0 to {max(1.0, last):,.0f}: {ends}",
        **_drawing(thinned, shares, say),
        "numbers": _numbers(lines, say),
    }


def _drawing(
    lines: Mapping[str, Sequence[tuple[float, float]]], shares: bool, say: Callable[[float], str]
) -> dict[str, Any]:
    """The ticks, the lines and, where there are few points, a dot for each."""
    values = [value for points in lines.values() for _, value in points]
    last = max(1.0, *(step for points in lines.values() for step, _ in points))
    ticks = nice_ticks(min(0.0, *values), max(1.0 if shares else 0.0, *values))
    drawn = []
    for name, points in lines.items():
        places = [(_across(step, last), _up(value, ticks)) for step, value in points]
        told = [f"{name} {say(value)} at step {step:,.0f}" for step, value in points]
        dots = list(zip(places, told, strict=True)) if len(points) <= DOTS_UP_TO else []
        drawn.append({"points": " ".join(f"{x},{y}" for x, y in places), "dots": dots})
    steps = [(tick, _across(tick, last)) for tick in nice_ticks(0, last) if tick <= last]
    return {
        "lines": drawn,
        "y_ticks": _y_ticks(ticks, ticks, shares),
        "x_ticks": [(x, "end" if x > RIGHT - 12 else "middle", f"{tick:,.6g}") for tick, x in steps],  # none sticks out
    }


def _across(value: float, last: float) -> float:
    return round(LEFT + value / last * (RIGHT - LEFT), 1)


def _up(value: float, ticks: Sequence[float]) -> float:
    return round(BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (BOTTOM - TOP), 1)


def _y_ticks(shown: Sequence[float], ticks: Sequence[float], shares: bool = False) -> list[tuple[float, str]]:
    """Places and words: all with as many digits as their distance needs, short enough for the margin."""
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    largest = max(map(abs, ticks))
    spelled = f",.{digits}f"
    if shares:
        spelled = ".0%"
    elif digits > 3 or largest >= 1e7:
        spelled = ".2g"
    elif largest >= 1e4:
        return [(_up(tick, ticks), f"{tick / 1000:,g}k") for tick in shown]
    return [(_up(tick, ticks), f"{tick:{spelled}}") for tick in shown]


def _numbers(
    lines: Mapping[str, Sequence[tuple[float, float]]], say: Callable[[float], str]
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table: the values at up to a dozen steps."""
    columns = [dict(points) for points in lines.values()]
    steps = _thin(sorted({step for column in columns for step in column}), TABLE_ROWS)
    rows = [[f"{step:,.0f}", *(say(of[step]) if step in of else "" for of in columns)] for step in steps]
    return ["step", *lines], rows


def _thin(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    """At most this many of the items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[index] for index in np.linspace(0, len(items) - 1, most).round().astype(int)]


def histogram(
    title: str, values: ArrayLike, parts: Mapping[str, NDArray[np.bool_]], *, n_bins: int = 20
) -> dict[str, Any]:
    """A chart with the counts of values in [0, 1], stacked from disjoint masks that name the parts."""
    array = np.asarray(values, np.float64)
    counts = np.array([np.histogram(array[mask], n_bins, (0, 1))[0] for mask in parts.values()])
    tops = counts.cumsum(axis=0)
    ticks = nice_ticks(0, int(max(1, tops.max(initial=0))))
    width = (RIGHT - LEFT) / n_bins
    bars = [
        {
            "part": part + 1,
            "x": round(LEFT + index * width + 1, 1),
            "y": (y := _up(tops[part, index], ticks)),
            "width": round(width - 2, 1),
            "height": round(_up(tops[part, index] - counts[part, index], ticks) - y, 1),
            "said": f"{counts[part, index]:,} {name}, confidence {index / n_bins:.0%} to {(index + 1) / n_bins:.0%}",
        }
        for part, name in enumerate(parts)
        for index in np.flatnonzero(counts[part]).tolist()
    ]
    anchors = {0.0: "start", 0.25: "middle", 0.5: "middle", 0.75: "middle", 1.0: "end"}
    return {
        **EMPTY,
        "title": title,
        "label": f"{title}: {len(array):,} images, mean {percent(float(array.mean()))}",
        "bars": bars,
        "y_ticks": _y_ticks([tick for tick in ticks if tick == int(tick)], ticks),
        "x_ticks": [(_across(share, 1), anchor, f"{share:.0%}") for share, anchor in anchors.items()],
        "legend": [(name, f"{mask.sum():,}") for name, mask in parts.items()],
    }
