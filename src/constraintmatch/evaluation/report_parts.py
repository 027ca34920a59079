"""The parts of a report as plain values, which its template draws: charts, and a clustering to look at."""

import base64
import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, features

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions, cluster_sizes, match_clusters, scores

_Item = TypeVar("_Item")
Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 480, 230  # of the drawing; the page scales it to the width that is there
LEFT, RIGHT, TOP, BOTTOM = 52, 468, 12, 200  # of the area that holds the data
EMPTY = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "step": None, "bars": (), "lines": ()}
MAX_POINTS = 300  # per line: more than the pixels that could show them
DOTS_UP_TO = 40  # points that get a dot, which shows its value on hover
TABLE_ROWS = 12
SMALLEST = 1e-200  # a span under it is none: its logarithm may not exist
THUMBNAIL = 64  # pixels: what the page shows, so more would only weigh
N_SUREST, N_LEAST_SURE = 12, 6
MAX_THUMBNAILS = 1000  # in all galleries; many clusters get fewer images each
MAX_CLUSTERS = 200  # that the page shows
MAX_ROWS = 20  # clusters that a notebook shows
MAX_CELLS = 6000  # of a confusion matrix that one can still read
SCORES = {"acc": "accuracy", "nmi": "NMI", "ari": "ARI", "ece": "calibration error"}


# Charts


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


def line_chart(title: str, lines: Mapping[str, Points], *, shares: bool = False) -> dict[str, Any]:
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


def _drawing(lines: Mapping[str, Points], shares: bool, say: Callable[[float], str]) -> dict[str, Any]:
    """The ticks, the lines and, where there are few points, a dot for each."""
    values = [value for points in lines.values() for _, value in points]
    last = max(1.0, *(step for points in lines.values() for step, _ in points))
    ticks = nice_ticks(min(0.0, *values), max(1.0 if shares else 0.0, *values))
    drawn = []
    for name, points in lines.items():
        places = [(_across(step, last), _up(value, ticks)) for step, value in points]
        words = [f"{name} {say(value)} at step {step:,.0f}" for step, value in points]
        dots = list(zip(places, words, strict=True)) if len(points) <= DOTS_UP_TO else []
        drawn.append({"points": " ".join(f"{x},{y}" for x, y in places), "dots": dots})
    steps = [(tick, _across(tick, last)) for tick in nice_ticks(0, last) if tick <= last]
    return {
        "lines": drawn,
        "y_ticks": _y_ticks(ticks, ticks, shares),
        "x_ticks": [(x, "end" if x > RIGHT - 12 else "middle", f"{tick:,.6g}") for tick, x in steps],
    }


def _across(value: float, last: float) -> float:
    return round(LEFT + value / last * (RIGHT - LEFT), 1)


def _up(value: float, ticks: Sequence[float]) -> float:
    return round(BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (BOTTOM - TOP), 1)


def _y_ticks(shown: Sequence[float], ticks: Sequence[float], shares: bool = False) -> list[tuple[float, str]]:
    """Places and words: all with as many digits as their distance needs, short enough for the margin."""
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    largest = max(map(abs, ticks))
    if not shares and digits <= 3 and 1e4 <= largest < 1e7:
        return [(_up(tick, ticks), f"{tick / 1000:,g}k") for tick in shown]
    spelled = ".0%" if shares else ".2g" if digits > 3 or largest >= 1e7 else f",.{digits}f"
    return [(_up(tick, ticks), f"{tick:{spelled}}") for tick in shown]


def _numbers(lines: Mapping[str, Points], say: Callable[[float], str]) -> tuple[list[str], list[list[str]]]:
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


def histogram(title: str, values: ArrayLike, parts: Mapping[str, NDArray[np.bool_]]) -> dict[str, Any]:
    """A chart with the counts of values in [0, 1], stacked from disjoint masks that name the parts."""
    array, n_bins = np.asarray(values, np.float64), 20
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


# A clustering


@dataclass(frozen=True, eq=False)
class Clustering:
    """Images, what a model says of them, and the constraints over them; made by `of`.

    `classes` has the class matched to each cluster, −1 for none; it is None without labels.
    """

    images: ImageSet
    predictions: Predictions
    constraints: Constraints | None
    clusters: NDArray[np.int64]
    confidence: NDArray[np.float32]
    sizes: NDArray[np.int64]
    classes: NDArray[np.int64] | None

    @classmethod
    def of(cls, images: ImageSet, predictions: Predictions, constraints: Constraints | None = None) -> "Clustering":
        """The clustering to show; parts that do not fit together are an InputError."""
        if len(images) == 0:
            raise InputError("no images to report on: give at least one")
        if len(predictions) != len(images):
            raise InputError(f"{len(predictions):,} predictions for {len(images):,} images: predict the same images")
        if constraints is not None and constraints.n_images != len(images):
            n, fix = constraints.n_images, "give both for the same images"
            raise InputError(f"the constraints are over {n:,} images, the report is over {len(images):,}: {fix}")
        clusters, labels, classes = predictions.clusters, images.labels, None
        if labels is not None:
            classes = match_clusters(labels, clusters, predictions.n_clusters, int(labels.max()) + 1)
            met = np.isin(np.arange(len(classes)), clusters[classes[clusters] == labels])
            classes = np.where(met, classes, -1)  # the matching may give a class without an image in the cluster
        sizes = cluster_sizes(predictions)
        return cls(images, predictions, constraints, clusters, predictions.confidence, sizes, classes)

    def class_name(self, label: int) -> str:
        names = self.images.classes
        return names[label] if names is not None and label < len(names) else str(label)

    def cluster_name(self, cluster: int) -> str:
        """The cluster's number, with its matched class where there is one."""
        if self.classes is None or self.classes[cluster] < 0:
            return str(cluster)
        return f"{cluster} “{self.class_name(int(self.classes[cluster]))}”"

    def filled(self) -> list[int]:
        """The clusters with images (the largest, where there are very many), by number."""
        largest = np.argsort(-self.sizes, kind="stable")[: min(MAX_CLUSTERS, int((self.sizes > 0).sum()))]
        return [int(cluster) for cluster in np.sort(largest)]

    def image(self, row: int) -> dict[str, Any]:
        """What the page shows of an image; `other` is its label where that is not the class of its cluster."""
        cluster, pictures = int(self.clusters[row]), self.images.shown
        label = None if self.images.labels is None else int(self.images.labels[row])
        name = None if label is None else self.class_name(label)
        return {
            "name": self.images.names[row],
            "source": None if pictures is None else _data_uri(pictures.images[row]),
            "pixels": pictures is not None and pictures.side <= THUMBNAIL // 2,
            "cluster": self.cluster_name(cluster),
            "confidence": self.confidence[row],
            "label": name,
            "other": name if self.classes is not None and self.classes[cluster] != label else None,
        }


def _data_uri(pixels: NDArray[np.uint8]) -> str:
    """An image of at most THUMBNAIL pixels as a data address: PNG if tiny, else WebP (JPEG where Pillow lacks it)."""
    image = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    if image.width > THUMBNAIL:
        image = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    kind = "PNG" if image.width <= 16 else "WEBP" if features.check("webp") else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"optimize": True} if kind == "PNG" else {"quality": 75}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def sizes(shown: Clustering) -> dict[str, Any]:
    """A bar for each cluster, in the order of their numbers; the largest ones only, where there are very many."""
    total, largest = len(shown.images), int(shown.sizes.max())
    chosen = np.sort(np.argsort(-shown.sizes, kind="stable")[:MAX_CLUSTERS]).tolist()
    bars = [
        {
            "name": shown.cluster_name(cluster),
            "link": f"#cluster-{cluster}" if shown.sizes[cluster] else None,
            "size": int(shown.sizes[cluster]),
            "share": shown.sizes[cluster] / total,
            "length": f"{shown.sizes[cluster] / largest:.3f}",
        }
        for cluster in chosen
    ]
    return {
        "bars": bars,
        "matched": shown.classes is not None,
        "even": round(total / len(shown.sizes)),
        "left_out": len(shown.sizes) - len(chosen),
    }


def galleries(shown: Clustering) -> dict[str, Any]:
    """A card for each cluster with its surest and its least sure images."""
    chosen = shown.filled()
    each = max(3, min(N_SUREST + N_LEAST_SURE, MAX_THUMBNAILS // len(chosen)))
    n_least = each * N_LEAST_SURE // (N_SUREST + N_LEAST_SURE)
    order = np.lexsort((-shown.confidence, shown.clusters))  # by cluster, the surest first
    starts = np.concatenate([[0], np.cumsum(shown.sizes)])
    cards = [
        _gallery(shown, cluster, order[starts[cluster] : starts[cluster + 1]], each - n_least, n_least)
        for cluster in chosen
    ]
    left_out = int((shown.sizes > 0).sum()) - len(chosen)
    return {"cards": cards, "matched": shown.classes is not None, "left_out": left_out}


def _gallery(shown: Clustering, cluster: int, rows: NDArray[np.int64], n_surest: int, n_least: int) -> dict[str, Any]:
    """A cluster's card; `rows` are its images, the surest first."""
    groups = {"Surest": rows[:n_surest], "Least sure": rows[::-1][:n_least]}
    if len(rows) <= n_surest + n_least:
        groups = {"All its images, the surest first": rows}
    common = None
    if shown.images.labels is not None:
        counts = np.bincount(shown.images.labels[rows])
        common = (counts.max() / len(rows), shown.class_name(int(counts.argmax())))
    return {
        "number": cluster,
        "name": shown.cluster_name(cluster),
        "size": len(rows),
        "share": len(rows) / len(shown.images),
        "confidence": shown.confidence[rows].mean(),
        "common": common,
        "groups": {name: [shown.image(row) for row in group.tolist()] for name, group in groups.items()},
    }


def gallery_html(shown: Clustering) -> str:
    """The surest images of each cluster as a piece of a page, for notebooks; nothing without pictures."""
    if shown.images.shown is None:
        return ""
    rows = []
    for cluster in shown.filled()[:MAX_ROWS]:
        own = np.flatnonzero(shown.clusters == cluster)
        surest = own[np.argsort(-shown.confidence[own], kind="stable")[:N_SUREST]]
        seen = [shown.image(row) for row in surest.tolist()]
        size = f'width="{THUMBNAIL}" height="{THUMBNAIL}"'
        drawn = "".join(f'<img src="{one["source"]}" title="{html.escape(one["name"])}" {size}>' for one in seen)
        name = html.escape(shown.cluster_name(cluster))
        rows.append(f"<div><b>{name}</b> · {plural(len(own), 'image')}</div><div>{drawn}</div>")
    left = int((shown.sizes > 0).sum()) - len(rows)
    return "".join(rows) + (f"<div>and {plural(left, 'more cluster')}</div>" if left else "")


def confusion(shown: Clustering) -> dict[str, Any] | None:
    """Classes by clusters, each cluster below its matched class; the worst mistakes alone if that is too much."""
    labels, classes = shown.images.labels, shown.classes
    if labels is None or classes is None:
        return None
    n_classes = int(labels.max()) + 1
    counts = np.zeros((n_classes, len(classes)), np.int64)
    np.add.at(counts, (labels, shown.clusters), 1)
    rows = np.flatnonzero(counts.sum(1)).tolist()
    columns = np.lexsort((np.arange(len(classes)), np.where(classes < 0, n_classes, classes))).tolist()
    found = scores(labels, shown.predictions)
    said = {"scores": [(name, found[key]) for key, name in SCORES.items()]}
    if len(rows) * len(columns) > MAX_CELLS:
        return {**said, "rows": None, "mistakes": _mistakes(shown, counts, classes)}
    lines = [
        {
            "name": shown.class_name(label),
            "cells": [
                (int(counts[label, c]), counts[label, c] / counts[label].sum(), classes[c] == label) for c in columns
            ],
            "images": int(counts[label].sum()),
        }
        for label in rows
    ]
    return {**said, "clusters": columns, "rows": lines}


def _mistakes(shown: Clustering, counts: NDArray[np.int64], classes: NDArray[np.int64]) -> list[tuple[str, str, str]]:
    """The twenty (class, cluster) cells with the most images outside the matching."""
    wrong = np.where(classes[None, :] == np.arange(len(counts))[:, None], 0, counts)
    order = np.argsort(-wrong, axis=None, kind="stable")[:20]
    cells = [divmod(at, counts.shape[1]) for at in order.tolist() if wrong.flat[at]]
    return [(shown.class_name(of), shown.cluster_name(at), f"{wrong[of, at]:,}") for of, at in cells]


def confidence(shown: Clustering) -> dict[str, Any]:
    """The mean, the shares above three bars, and a histogram; with labels its parts are right and wrong."""
    parts = {"images": np.ones(len(shown.images), bool)}
    if shown.classes is not None:
        right = shown.classes[shown.clusters] == shown.images.labels
        parts = {"in the cluster of their class": right, "in another cluster": ~right}
    return {
        "mean": shown.confidence.mean(),
        "shares": [(shown.confidence >= bar).mean() for bar in (0.5, 0.9, 0.99)],
        "chart": histogram("Images by confidence", shown.confidence, parts),
    }
