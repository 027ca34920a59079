"""What the features of a model without clusters are worth: neighbours, linear heads, and answers to chosen questions.

    python research/features.py cifar100-20 weights/propos-cifar100-20 --against weights/scan-cifar100-20

All is measured on frozen features of some training and test images, with one sample of questions.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from grid import accuracy, curve

from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.heads import embed_images
from constraintmatch.methods.preparation import spread
from constraintmatch.methods.scan import linear_scan
from constraintmatch.models.cluster_model import build_model, load_model
from constraintmatch.training.loop import TrainSettings
from constraintmatch.training.run_folder import write_result


def main() -> None:
    asked = arguments()
    train, test = parts = [some_of(asked, part) for part in ("train", "test")]
    found: dict[str, Any] = {"model": str(asked.model), "train_images": len(train), "test_images": len(test)}
    seen = [embed_images(load_model(asked.model), images) for images in parts]
    found["knn20"] = neighbours(*seen)
    if asked.against is not None:
        other = load_model(asked.against)
        found |= {"against": str(asked.against), "knn20_against": neighbours(*(embed_images(other, x) for x in parts))}
    mean, std = seen[0].moments()
    fresh = build_model(n_clusters=0, side=1, channels=seen[0].channels, mean=mean, std=std)
    settings = TrainSettings(device="cpu")
    start, _ = linear_scan(fresh, seen[0], n_clusters=DATASETS[asked.data].n_clusters, settings=settings)
    found["linear_heads"] = accuracy(start, seen[1])
    found["which"] = curve((start, *seen), ("which", "none", 0), [200, 500, 1_000])["points"]
    model = LogisticRegression(max_iter=300).fit(flat(seen[0]), seen[0].labels)
    found["logistic_regression_on_all_labels"] = round(model.score(flat(seen[1]), seen[1].labels), 4)
    write_result(asked.out / f"features-{asked.model.name}.json", found)
    print(found)


def some_of(asked: argparse.Namespace, part: str) -> ImageSet:
    images = load_dataset(asked.data, part, asked.data_dir)
    return images.take(spread(len(images), asked.images[part == "test"]))


def flat(images: ImageSet) -> Any:
    return images.images.reshape(len(images), -1)


def neighbours(train: ImageSet, test: ImageSet) -> float:
    """The share of test images whose class is that of most of the 20 nearest training images."""
    nearest = KNeighborsClassifier(20, metric="cosine").fit(flat(train), train.labels)
    return round(float(np.mean(nearest.predict(flat(test)) == test.labels)), 4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=list(DATASETS))
    parser.add_argument("model", type=Path)
    parser.add_argument("--against", type=Path, help="another model, for its neighbours")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--images", type=int, nargs=2, default=[5_000, 3_000], help="training and test images")
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
