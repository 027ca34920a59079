"""Embeddings and pairs, without a GPU: the start by linear heads, then constrained and ConstraintMatch from it.

    constraintmatch embed weights/scan-cifar100-20 cifar100-20 --data-dir data --out train.npz
    constraintmatch embed weights/scan-cifar100-20 cifar100-20 --split test --data-dir data --out test.npz
    python benchmarks/embeddings.py train.npz test.npz --clusters 20 --name cifar100-20 --out results

What `constraintmatch train` does with a table of numbers, in seconds, for several samples of pairs; scores are on the
images of the second file.
"""

import argparse
import copy
import time
from pathlib import Path
from typing import Any

from constraintmatch.constraints import Constraints
from constraintmatch.evaluation import predict, scores
from constraintmatch.images import load_images
from constraintmatch.models import build_model
from constraintmatch.pretraining import pretrain, training_size
from constraintmatch.running import method_settings, run_method, split_options
from constraintmatch.runs import write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--name", required=True, help="of the data, for the result")
    parser.add_argument("--pairs", type=lambda text: [int(n) for n in text.split(",")], default=[1000, 5000, 10000])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    train, test = load_images(asked.train), load_images(asked.test)
    assert train.labels is not None
    assert test.labels is not None
    labels, (mean, std), began = test.labels, train.moments(), time.monotonic()
    fresh = build_model(n_clusters=0, side=1, channels=train.channels, mean=mean, std=std)
    start = pretrain(fresh, train, asked.clusters, stages=["linear_scan"], settings={"device": "cpu", "seed": 0})
    first = {**scores(labels, predict(start, test)), "seconds": round(time.monotonic() - began, 1)}
    print("start", first, flush=True)
    rows: list[dict[str, Any]] = []
    for n in asked.pairs:
        for method in ("constrained", "constraintmatch"):
            size = training_size(len(train), cpu=True)
            if method == "constrained":
                size = {key: value for key, value in size.items() if key not in ("images_per_step", "warm_up")}
            arguments, changes = split_options(method, size)
            settings = method_settings(method, {**changes, "device": "cpu"})
            found, began = [], time.monotonic()
            for sample in range(asked.samples):
                pairs = Constraints.sample(train.labels, n, seed=sample)
                given = {"arguments": arguments, "settings": settings}
                model = run_method(method, copy.deepcopy(start), train, pairs, **given).model
                told = scores(labels, predict(model, test))
                found.append({key: round(told[key], 4) for key in ("acc", "nmi", "ari")})
            seconds = round((time.monotonic() - began) / asked.samples, 1)
            rows.append({"pairs": n, "method": method, "scores": found, "seconds": seconds, "steps": settings.steps})
            print(rows[-1], flush=True)
    if asked.out:
        sizes = {"data": asked.name, "images": len(train), "width": train.channels, "clusters": asked.clusters}
        write_result(asked.out / f"embeddings-{asked.name}.json", {**sizes, "start": first, "rows": rows})


if __name__ == "__main__":
    main()
