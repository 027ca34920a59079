"""Small sets that no rule was chosen on: some of CIFAR-100's fine classes, uneven, as a shipped network sees them.

    python research/other_sets.py data --out sets
    python benchmarks/grid.py sets/fine-15 --start sets/fine-15/start --name fine-15 --budgets 50 100 200 500 1000 2000

A set is a folder with `train.npz`, `test.npz` and `start`, a model of linear heads that was made without labels.
"""

import argparse
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed
from constraintmatch.models.cluster_model import build_model, load_model, save_model
from constraintmatch.pipeline.train import pretrain

# The network, the first class in an order that is drawn, the classes, the images of the largest and the smallest one
SETS = {
    "fine-15": ("scan-cifar100-20", 24, 15, 500, 100),
    "fine-10": ("byol-cifar10", 39, 10, 450, 450),
    "fine-8": ("scan-cifar10", 49, 8, 500, 250),
}
TEST = 80  # images of each class


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with cifar-100-python")
    parser.add_argument("--weights", type=Path, default=Path("weights"))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    for number, (name, (weights, first, k, most, least)) in enumerate(SETS.items()):
        classes = np.random.default_rng(7).permutation(100)[first : first + k]
        sizes = {"train": np.linspace(most, least, k).astype(int), "test": np.full(k, TEST)}
        for part, counts in sizes.items():
            rows = draw(asked.data, part, classes, counts, np.random.default_rng(number))
            write(asked.out / name / f"{part}.npz", load_model(asked.weights / weights), *rows)
        learn_start(asked.out / name, k)


def draw(
    data: Path, part: str, classes: NDArray[np.int64], counts: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and labels, in any order."""
    with (data / "cifar-100-python" / part).open("rb") as file:
        content: dict[str, Any] = pickle.load(file, encoding="latin1")
    fine = np.array(content["fine_labels"])
    rows = [rng.permutation(np.flatnonzero(fine == one))[:n] for one, n in zip(classes, counts, strict=True)]
    order = rng.permutation(sum(map(len, rows)))
    labels = np.repeat(np.arange(len(rows)), [len(some) for some in rows])[order]
    pixels = content["data"][np.concatenate(rows)[order]].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), labels


def write(file: Path, model: Any, pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, embeddings=embed(model, ImageSet.from_arrays(pixels)), labels=labels)


def learn_start(folder: Path, k: int) -> None:
    with np.load(folder / "train.npz") as content:
        seen = ImageSet.from_arrays(content["embeddings"])
    mean, std = seen.moments()
    fresh = build_model(n_clusters=0, side=1, channels=seen.channels, mean=mean, std=std)
    model = pretrain(fresh, seen, k, stages=["linear_scan"], settings={"device": "cpu", "seed": 0})
    save_model(model, folder / "start")


if __name__ == "__main__":
    main()
