"""The gallery of the paper's appendix: confidently wrong pseudo-labels whose pseudo-constraints are right.

Trains for 500 steps and writes results/paper/gallery-SET.json and its picture in docs/figures:
python docs/make_gallery.py cifar10 --data-dir data
"""

import argparse
import hashlib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from make_reproduction import ROOT, new_figure, save_figure
from numpy.typing import NDArray
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch._internal.progress import console_reporter
from constraintmatch.data.datasets import DATASETS
from constraintmatch.evaluation.metrics import Predictions, match_clusters, predict
from constraintmatch.paper.grids import Cell
from constraintmatch.paper.results import FORMAT
from constraintmatch.paper.runner import Place, train_cell
from constraintmatch.training.losses import soft_links
from constraintmatch.training.run_folder import write_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GALLERY_STEPS = 500  # the paper's, early enough for pseudo-labels to be wrong
MIN_CONFIDENCE = 0.98
LARGEST_THUMBNAIL = 64  # pixels: larger images only make the files heavy
Pair = tuple[int, int]


def make_gallery(dataset: str, place: Place, figures: Path | str) -> Path:
    """The JSON of one data set, with its picture: two must-links above, two cannot-links below; made once."""
    cell, name = Cell(dataset, "constraintmatch", 10_000, steps=GALLERY_STEPS), f"gallery-{dataset}"
    target = place.results / f"{name}.json"
    if _is_made(target, cell) and (Path(figures) / f"{name}.png").is_file():
        place.reporter.say(f"{name}: made before")
        return target
    images = place.images(cell, "train")
    drawn = np.random.Generator(np.random.Philox(0)).permutation(len(images))
    images = images.take(np.sort(drawn[: 10 * DATASETS[dataset].images_per_step]))  # as many as ten steps see
    predictions = predict(train_cell(cell, place), images)
    assert images.labels is not None
    names = images.classes or tuple(str(number) for number in range(predictions.n_clusters))
    matches = match_clusters(images.labels, predictions.clusters, predictions.n_clusters, len(names))
    classes = matches[predictions.clusters]  # (n,) of each image the class that its cluster is matched with
    wrong, must_links, cannot_links = wrong_but_right(predictions, classes, images.labels)
    chosen = [list(pair) for pair in (*must_links[:2], *cannot_links[:2])]
    pairs = [
        {
            "images": [images.names[row] for row in rows],
            "predicted": tuple(names[classes[row]] for row in rows),
            "true": tuple(names[images.labels[row]] for row in rows),
            "confidence": tuple(predictions.confidence[rows].tolist()),
            "link": float(soft_links(torch.from_numpy(predictions.probabilities[rows]))[0, 1]),
        }
        for rows in chosen
    ]
    shares = f"{len(wrong):,} of {len(images):,} training images are wrong with a confidence above {MIN_CONFIDENCE}"
    note = f"{DATASETS[dataset].title}, ConstraintMatch after {GALLERY_STEPS} steps: {shares}"
    draw_gallery(pairs, [np.asarray(images.images[rows]) for rows in chosen], figures, name, note)
    values = {"format": FORMAT, "kind": "gallery", "name": name, "note": note, "cell": cell.request(), "pairs": pairs}
    write_result(target, {**values, **_counts(images.labels[wrong], classes[wrong])})
    return target


def _is_made(target: Path, cell: Cell) -> bool:
    """Whether the result is there; one of another format or training is refused by name."""
    if not target.is_file():
        return False
    found = read_json(target)
    if not isinstance(found, dict) or (found.get("format"), found.get("kind")) != (FORMAT, "gallery"):
        raise InputError(f"{target}: not a gallery of format {FORMAT}; move it away or choose another --results")
    if found.get("cell") != cell.request():
        raise InputError(f"{target}: a gallery of another training; move it away or choose another --results")
    return True


def _counts(labels: NDArray[np.int64], classes: NDArray[np.int64]) -> dict[str, int]:
    """How many pairs of confidently wrong images there are, and how many have the right pseudo-constraint."""
    right = (labels[:, None] == labels) == (classes[:, None] == classes)
    n = len(labels)
    return {"wrong": n, "pairs_of_wrong": n * (n - 1) // 2, "right_pairs": int(np.triu(right, 1).sum())}


def wrong_but_right(
    predictions: Predictions, classes: NDArray[np.int64], labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[Pair], list[Pair]]:
    """Rows of confidently wrong images, and must-links and cannot-links between them that are right.

    A must-link: both of one class, both given the same wrong one. A cannot-link: of two classes, given two others. The
    first pairs of each kind share no image and no class, so that the pictures differ.
    """
    wrong = np.flatnonzero((classes != labels) & (predictions.confidence > MIN_CONFIDENCE))
    order = wrong[np.argsort(-predictions.confidence[wrong], kind="stable")]
    must = list(_partners(order, lambda a, b: bool(labels[a] == labels[b] and classes[a] == classes[b]), labels))
    rest = order[~np.isin(order, must[:2])]
    cannot = list(_partners(rest, lambda a, b: bool(labels[a] != labels[b] and classes[a] != classes[b]), labels))
    return wrong, must, cannot


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


def draw_gallery(
    pairs: Sequence[Mapping[str, Any]], images: Sequence[NDArray[np.uint8]], folder: Path | str, name: str, note: str
) -> tuple[Path, Path]:
    """The gallery's PNG and SVG: pairs in two columns, above each the link, below each image what was guessed.

    Each of the pairs has two images (2, h, w, c), the two classes `predicted` and `true`, the two values of
    `confidence`, and the soft pseudo-constraint `link` (1 = must-link).
    """
    if not pairs:
        raise InputError(f"{name}: no pair to show; choose a lower confidence or an earlier model")
    n_rows = (len(pairs) + 1) // 2
    height = 1.0 + 2.6 * n_rows
    digest = hashlib.sha256(note.encode())
    with new_figure((7.6, height), layout=None) as figure:  # by hand: long class names would leave images no room
        figure.suptitle("Wrong pseudo-labels, right pseudo-constraints", x=0.02, ha="left", fontsize=11, weight="bold")
        grid = figure.subplots(n_rows, 5, squeeze=False, width_ratios=[1, 1, 0.1, 1, 1])
        figure.subplots_adjust(0.03, 1.15 / height, 0.97, 1 - 0.7 / height, wspace=0.15, hspace=0.6)
        for axes in grid.flat:
            axes.set_axis_off()
        for place, (pair, two) in enumerate(zip(pairs, images, strict=True)):
            row, column = divmod(place, 2)
            _draw_pair(grid[row, 3 * column : 3 * column + 2], pair, two)
            digest.update(two.tobytes())
            digest.update(repr(tuple(pair[key] for key in ("predicted", "true", "confidence", "link"))).encode())
        figure.text(0.02, 0.12 / height, textwrap.fill(note, 105), fontsize=9, color="#444444")
        return save_figure(figure, Path(folder) / name, digest.hexdigest()[:16])


def _draw_pair(places: Sequence["Axes"], pair: Mapping[str, Any], images: NDArray[np.uint8]) -> None:
    same = pair["true"][0] == pair["true"][1]
    title = f"pseudo-constraint {pair['link']:.2f}: {'must-link' if same else 'cannot-link'}"
    colour = "#0072B2" if same else "#D55E00"
    places[0].set_title(title, loc="left", fontsize=9, color=colour, weight="bold")
    said = zip(pair["predicted"], pair["confidence"], pair["true"], strict=True)
    for axes, image, (predicted, sure, true) in zip(places, images, said, strict=True):
        picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        picture.thumbnail((LARGEST_THUMBNAIL, LARGEST_THUMBNAIL))  # never makes it larger
        axes.imshow(np.asarray(picture), cmap="gray", vmin=0, vmax=255, interpolation="none")
        lines = (f"says {predicted}, {100 * sure:.0f} %", f"is {true}")
        text = "\n".join(textwrap.fill(line.replace("_", " "), 24) for line in lines)  # CIFAR's names have underscores
        axes.text(0.5, -0.04, text, transform=axes.transAxes, ha="center", va="top", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="+", choices=DATASETS, metavar="SET", help=", ".join(DATASETS))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device")
    asked = parser.parse_args()
    folders = {"starts": ROOT / "weights", "results": ROOT / "results" / "paper", "runs": ROOT / "runs" / "paper"}
    settings = {} if asked.device is None else {"device": asked.device}
    place = Place(asked.data_dir, **folders, settings=settings, reporter=console_reporter())
    try:
        for dataset in dict.fromkeys(asked.sets):
            print(make_gallery(dataset, place, ROOT / "docs" / "figures").relative_to(ROOT))
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
