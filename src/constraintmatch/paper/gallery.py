"""The gallery of the paper's appendix: confidently wrong pseudo-labels whose pseudo-constraints are right."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions, match_clusters, predict
from constraintmatch.paper.figures import GalleryPair, draw_gallery
from constraintmatch.paper.grids import Cell
from constraintmatch.paper.results import FORMAT
from constraintmatch.paper.runner import Place, cell_images, train_cell
from constraintmatch.training.losses import soft_links
from constraintmatch.training.run_folder import write_result

__all__ = ["GALLERY_STEPS", "Found", "gallery_cell", "gallery_sets", "make_gallery", "wrong_but_right"]

GALLERY_STEPS = 500  # the paper's, early enough for pseudo-labels to be wrong
MIN_CONFIDENCE = 0.98
Pair = tuple[int, int]


@dataclass(frozen=True)
class Found:
    """Rows of confidently wrong images, and pairs of them whose pseudo-constraint is right, of each kind."""

    wrong: NDArray[np.int64]
    must_links: list[Pair]
    cannot_links: list[Pair]


def gallery_cell(dataset: str) -> Cell:
    """The training that the gallery is taken from."""
    return Cell(dataset, "constraintmatch", 10_000, steps=GALLERY_STEPS)


def gallery_sets(sets: Sequence[str] | None = None) -> tuple[str, ...]:
    """The sets to make galleries of, CIFAR-10 unless some are named; an unknown one is an InputError."""
    if sets is not None and not sets:
        raise InputError("no sets are left; name some: --sets cifar10")
    if odd := [name for name in sets or () if name not in DATASETS]:
        raise InputError(f"the gallery has no set {odd[0]!r}; there are {', '.join(DATASETS)}")
    return tuple(dict.fromkeys(sets or ("cifar10",)))


def make_gallery(dataset: str, place: Place, figures: Path | str, *, seed: int = 0) -> Path:
    """The picture and the JSON of one data set: two must-links above, two cannot-links below; made once."""
    gallery_sets([dataset])
    cell, name = gallery_cell(dataset), f"gallery-{dataset}"
    target = place.results / f"{name}.json"
    if _is_made(target, cell, Path(figures) / f"{name}.png"):
        place.reporter.say(f"{name}: made before")
        return target
    images = _some_images(cell, place, seed)
    predictions = predict(train_cell(cell, place), images)
    assert images.labels is not None
    classes = _matched(predictions, images)
    found = wrong_but_right(predictions, classes, images.labels)
    chosen = [*found.must_links[:2], *found.cannot_links[:2]]
    pairs = [_shown(pair, images, predictions, classes) for pair in chosen]
    note = (
        f"{DATASETS[dataset].title}, ConstraintMatch after {GALLERY_STEPS} steps: {len(found.wrong):,} of "
        f"{len(images):,} training images are wrong with a confidence above {MIN_CONFIDENCE}"
    )
    draw_gallery(pairs, figures, name, note)
    told = [_told(pair, rows, images) for pair, rows in zip(pairs, chosen, strict=True)]
    values = {"format": FORMAT, "kind": "gallery", "name": name, "note": note, "cell": cell.request(), "pairs": told}
    write_result(target, {**values, **_counts(found, images.labels, classes)})
    return target


def _is_made(target: Path, cell: Cell, picture: Path) -> bool:
    """Whether result and picture are there; a result of another format or training is refused by name."""
    if not target.is_file():
        return False
    found = read_json(target)
    if not isinstance(found, dict) or (found.get("format"), found.get("kind")) != (FORMAT, "gallery"):
        raise InputError(f"{target}: not a gallery of format {FORMAT}; move it away or choose another --results")
    if found.get("cell") != cell.request():
        raise InputError(f"{target}: a gallery of another training; move it away or choose another --results")
    return picture.is_file()


def _some_images(cell: Cell, place: Place, seed: int) -> ImageSet:
    """As many training images as ten steps see."""
    everything = cell_images(cell, "train", place)
    drawn = np.random.Generator(np.random.Philox(seed)).permutation(len(everything))
    return everything.take(np.sort(drawn[: 10 * DATASETS[cell.dataset].images_per_step]))


def wrong_but_right(
    predictions: Predictions,
    classes: NDArray[np.int64],
    labels: NDArray[np.int64],
    *,
    confidence: float = MIN_CONFIDENCE,
) -> Found:
    """Images that are surely of the wrong class (n,), and pairs of them that are still linked rightly.

    A must-link: both of one class, both given the same wrong one. A cannot-link: of two classes, given two others. No
    image and no class comes twice among the first pairs of a kind, so that the pictures differ.
    """
    wrong = np.flatnonzero((classes != labels) & (predictions.confidence > confidence))
    order = wrong[np.argsort(-predictions.confidence[wrong], kind="stable")]
    must = list(_partners(order, lambda a, b: bool(labels[a] == labels[b] and classes[a] == classes[b]), labels))
    used = {row for pair in must[:2] for row in pair}
    rest = np.array([row for row in order.tolist() if row not in used], dtype=np.int64)
    cannot = list(_partners(rest, lambda a, b: bool(labels[a] != labels[b] and classes[a] != classes[b]), labels))
    return Found(wrong, must, cannot)


def _partners(order: NDArray[np.int64], fits: Callable[[int, int], bool], labels: NDArray[np.int64]) -> Iterator[Pair]:
    """Pairs that fit, the surest first, each image and each first class once."""
    taken: set[int] = set()
    seen: set[int] = set()
    for place, left in enumerate(order.tolist()):
        if left in taken or int(labels[left]) in seen:
            continue
        for right in order[place + 1 :].tolist():
            if right not in taken and fits(left, right):
                taken |= {left, right}
                seen |= {int(labels[left]), int(labels[right])}
                yield left, right
                break


def _matched(predictions: Predictions, images: ImageSet) -> NDArray[np.int64]:
    """The class (n,) that each image's cluster stands for."""
    assert images.labels is not None
    n_classes = len(images.classes or ()) or int(images.labels.max()) + 1
    mapping = match_clusters(images.labels, predictions.clusters, predictions.n_clusters, n_classes)
    return mapping[predictions.clusters]


def _shown(pair: Pair, images: ImageSet, predictions: Predictions, classes: NDArray[np.int64]) -> GalleryPair:
    rows = list(pair)
    assert images.labels is not None
    names = images.classes or tuple(str(number) for number in range(predictions.n_clusters))
    left, right = predictions.confidence[rows].tolist()
    return GalleryPair(
        np.asarray(images.images[rows]),
        (names[classes[rows[0]]], names[classes[rows[1]]]),
        (names[images.labels[rows[0]]], names[images.labels[rows[1]]]),
        (left, right),
        float(soft_links(torch.from_numpy(predictions.probabilities[rows]))[0, 1]),
    )


def _told(pair: GalleryPair, rows: Pair, images: ImageSet) -> dict[str, Any]:
    parts = {"predicted": pair.predicted, "true": pair.true, "confidence": pair.confidence, "link": pair.link}
    return {"images": [images.names[row] for row in rows], **parts}


def _counts(found: Found, labels: NDArray[np.int64], classes: NDArray[np.int64]) -> dict[str, Any]:
    """How often the pseudo-constraints between confidently wrong images are right: all pairs of them."""
    same_class = labels[found.wrong][:, None] == labels[found.wrong][None, :]
    same_guess = classes[found.wrong][:, None] == classes[found.wrong][None, :]
    above = np.triu(np.ones_like(same_class), 1)
    n = int(above.sum())
    return {
        "wrong": len(found.wrong),
        "pairs_of_wrong": n,
        "right_pairs": int((above & (same_class == same_guess)).sum()),
    }
