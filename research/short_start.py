"""Which short start is better on the digits: linear heads, k-means or a short SCAN, after the same SimCLR.

    python research/short_start.py --out results/short-start-digits.json

Scores are on the training and validation images; the test images stay out of it.
"""

import argparse
import copy
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.cluster import KMeans

from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed, predict, scores
from constraintmatch.methods import ViewChoice
from constraintmatch.methods.heads import regression_head
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_head
from constraintmatch.pipeline.config import short_start
from constraintmatch.pipeline.train import pretrain
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.run_folder import write_result

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_scan": ("linear_scan", {}),
    "scan, 540 steps, lr 1e-4": ("scan", {"epochs": 60, "lr": 1e-4, "n_tries": 0}),
    "scan, 540 steps, lr 3e-3": ("scan", {"epochs": 60, "lr": 3e-3, "n_tries": 0}),
}


def k_means_start(model: ClusterModel, images: ImageSet, seed: int) -> ClusterModel:
    """The baseline: a head that repeats the k-means clusters of the projections."""
    unit = embed(model, images, projected=True)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    clusters = KMeans(10, n_init=10, random_state=seed).fit_predict(unit).astype(np.int64)
    return with_head(model, *regression_head(embed(model, images), clusters, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    row, parts = DATASETS["digits"], {split: load_dataset("digits", split) for split in ("train", "val")}
    views = ViewChoice(row.flip, tuple(sorted(row.without)))

    def accuracies(model: ClusterModel) -> dict[str, float]:
        return {split: round(scores(part.labels, predict(model, part))["acc"], 4) for split, part in parts.items()}

    found = []
    for seed in range(asked.seeds):
        settings = {"device": "cpu", "seed": seed}
        fresh = build_model(
            n_clusters=0, side=8, channels=1, mean=row.mean, std=row.std, seed=derive_seed(seed, "model")
        )
        simclr = short_start(len(parts["train"]), cpu=True)["simclr"]
        given = {"settings": settings, "views": views}
        features = pretrain(fresh, parts["train"], 10, stages=("simclr",), recipe={"simclr": simclr}, **given)
        starts = {"k_means": partial(k_means_start, images=parts["train"], seed=seed)}
        for name, (stage, options) in RECIPES.items():
            how = {"stages": (stage,), "recipe": {stage: options}, **given}
            starts[name] = partial(pretrain, images=parts["train"], n_clusters=10, **how)
        for name, make in starts.items():
            began = time.monotonic()
            model = make(copy.deepcopy(features))
            found.append({"seed": seed, "start": name, "acc": accuracies(model), "seconds": time.monotonic() - began})
            print(found[-1], flush=True)
    if asked.out:
        write_result(asked.out, {"data": "digits", "simclr": simclr, "rows": found})


if __name__ == "__main__":
    main()
