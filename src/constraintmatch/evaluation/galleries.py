"""A clustering to look at, as plain values for the report: sizes, galleries, confusion, confidence, broken pairs."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, features

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.charts import histogram
from constraintmatch.evaluation.metrics import Predictions, cluster_sizes, match_clusters, scores

__all__ = ["SCORES", "Clustering", "clustering", "confidence", "confusion", "galleries", "sizes", "violations"]

THUMBNAIL = 64  # pixels: what the page shows, so more would only weigh
N_SUREST, N_LEAST_SURE = 12, 6
MAX_THUMBNAILS = 1000  # in all galleries; many clusters get fewer images each
MAX_CLUSTERS = 200  # that the page shows
MAX_VIOLATED = 24  # pairs shown
MAX_CELLS = 6000  # of a confusion matrix that one can still read
SCORES = {"acc": "accuracy", "nmi": "NMI", "ari": "ARI", "ece": "calibration error"}


@dataclass(frozen=True, eq=False)
class Clustering:
    """Images, what a model says of them, and the constraints over them; made by `clustering`.

    `classes` has the class matched to each cluster, −1 for none; it is None without labels.
    """

    images: ImageSet
    predictions: Predictions
    constraints: Constraints | None
    clusters: NDArray[np.int64]
    confidence: NDArray[np.float32]
    sizes: NDArray[np.int64]
    classes: NDArray[np.int64] | None

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


def clustering(images: ImageSet, predictions: Predictions, constraints: Constraints | None = None) -> Clustering:
    """The clustering to show; what does not fit together is an InputError."""
    if len(images) == 0:
        raise InputError("no images to report on: give at least one")
    if len(predictions) != len(images):
        raise InputError(f"{len(predictions):,} predictions for {len(images):,} images: predict the same images")
    if constraints is not None and constraints.n_images != len(images):
        raise InputError(
            f"the constraints are over {constraints.n_images:,} images, the report is over {len(images):,}: "
            "give both for the same images"
        )
    clusters, labels = predictions.clusters, images.labels
    classes = None if labels is None else _matched(labels, clusters, predictions.n_clusters)
    sizes = cluster_sizes(predictions)
    return Clustering(images, predictions, constraints, clusters, predictions.confidence, sizes, classes)


def _matched(labels: NDArray[np.int64], clusters: NDArray[np.int64], n_clusters: int) -> NDArray[np.int64]:
    """The class of each cluster; −1 too where the matching gave a class none of whose images are in the cluster."""
    classes = match_clusters(labels, clusters, n_clusters, int(labels.max()) + 1)
    met = np.zeros(n_clusters, bool)
    met[clusters[classes[clusters] == labels]] = True
    return np.where(met, classes, -1)


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
    pictured = set(shown.filled())
    bars = [
        {
            "name": shown.cluster_name(cluster),
            "link": f"#cluster-{cluster}" if cluster in pictured else None,
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


# Confusion and confidence


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
    """The mean, the shares above three bars, and a histogram; with labels it tells right from wrong."""
    parts = {"images": np.ones(len(shown.images), bool)}
    if shown.classes is not None:
        right = shown.classes[shown.clusters] == shown.images.labels
        parts = {"in the cluster of their class": right, "in another cluster": ~right}
    return {
        "mean": shown.confidence.mean(),
        "shares": [(shown.confidence >= bar).mean() for bar in (0.5, 0.9, 0.99)],
        "chart": histogram("Images by confidence", shown.confidence, parts),
    }


# Constraints


def violations(shown: Clustering) -> dict[str, Any] | None:
    """How many constraints the clusters break, and the pairs where the model is surest of it."""
    constraints = shown.constraints
    if constraints is None or not len(constraints):
        return None
    together = shown.clusters[constraints.left] == shown.clusters[constraints.right]
    kinds = {
        ("Must-links", "in different clusters"): (constraints.link > 0.5, ~together),
        ("Cannot-links", "in one cluster"): (constraints.link < 0.5, together),
    }
    broken = [_surest(shown, constraints, np.flatnonzero(of_kind & violated)) for of_kind, violated in kinds.values()]
    room = _rooms(len(broken[0]), len(broken[1]))
    summary = []
    for (name, _), (of_kind, violated) in kinds.items():
        n, n_broken = int(of_kind.sum()), int((of_kind & violated).sum())
        summary.append((name, f"{n:,}", f"{n_broken:,}", f"{n_broken / n:.1%}" if n else "–"))
    groups = [
        {"heading": f"{name} {where}", "total": len(rows), "pairs": _pairs(shown, constraints, rows[:most])}
        for (name, where), rows, most in zip(kinds, broken, room, strict=True)
        if len(rows)
    ]
    return {"summary": summary, "groups": groups}


def _surest(shown: Clustering, constraints: Constraints, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Violated pairs, each once, those first that the model is surest of: a wrong answer, or a hard image."""
    left, right = constraints.left[rows], constraints.right[rows]
    keys = np.minimum(left, right) * len(shown.images) + np.maximum(left, right)
    rows = rows[np.sort(np.unique(keys, return_index=True)[1])]
    gap = np.abs(_belief(shown, constraints, rows) - constraints.link[rows])
    return rows[np.argsort(-gap, kind="stable")]


def _belief(shown: Clustering, constraints: Constraints, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """The model's probability ⟨p_i, p_j⟩ that the images of these pairs belong together."""
    left, right = constraints.left[rows], constraints.right[rows]
    beliefs = [
        np.einsum("nk,nk->n", shown.predictions.probabilities[left[part]], shown.predictions.probabilities[right[part]])
        for part in np.array_split(np.arange(len(rows)), len(rows) // 100_000 + 1)  # no copy of all rows at once
    ]
    return np.concatenate(beliefs)


def _rooms(n_first: int, n_second: int) -> tuple[int, int]:
    """How many pairs of each kind to show: half each; what one does not need, the other gets."""
    half = MAX_VIOLATED // 2
    first = min(n_first, max(half, MAX_VIOLATED - n_second))
    return first, min(n_second, MAX_VIOLATED - first)


def _pairs(shown: Clustering, constraints: Constraints, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
    found = []
    for row, belief in zip(rows.tolist(), _belief(shown, constraints, rows).tolist(), strict=True):
        link = float(constraints.link[row])
        said = ("must-link" if link > 0.5 else "cannot-link") + (f" ({link:g})" if link not in (0, 1) else "")
        who = constraints.annotator[row] if constraints.annotator else ""
        sides = [shown.image(int(end[row])) for end in (constraints.left, constraints.right)]
        found.append({"sides": sides, "answer": f"{said} by {who}" if who else said, "belief": belief})
    return found
