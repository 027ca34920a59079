"""Embeddings and pairs, without a GPU: the start by linear heads, then constrained and ConstraintMatch from it.

    constraintmatch embed weights/scan-cifar100-20 cifar100-20 --data-dir data --out train.npz
    constraintmatch embed weights/scan-cifar100-20 cifar100-20 --split test --data-dir data --out test.npz
    python benchmarks/embeddings.py train.npz test.npz --clusters 20 --name cifar100-20 --out results

What `constraintmatch train` does with a table of numbers, in seconds, for several samples of pairs; scores are on the
images of the second file. Another start is named like `--set linear_scan.entropy_weight=1.2`.
"""

import time
from typing import Any

from embedded import parser_of, trained
from pretrain import recipe_of

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import load_images
from constraintmatch.evaluation.metrics import predict, scores
from constraintmatch.models.cluster_model import build_model
from constraintmatch.pipeline.train import pretrain
from constraintmatch.training.run_folder import write_result


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="options of the start, like linear_scan.n_tries=8")
    asked = parser.parse_args()
    recipe = recipe_of(asked.set)
    train, test = load_images(asked.train), load_images(asked.test)
    assert train.labels is not None
    assert test.labels is not None
    labels, (mean, std), began = test.labels, train.moments(), time.monotonic()
    fresh = build_model(n_clusters=0, side=1, channels=train.channels, mean=mean, std=std)
    given = {"stages": ["linear_scan"], "recipe": recipe, "settings": {"device": "cpu", "seed": 0}}
    start = pretrain(fresh, train, asked.clusters, **given)
    first = {**scores(labels, predict(start, test)), "seconds": round(time.monotonic() - began, 1)}
    print("start", first, flush=True)
    rows: list[dict[str, Any]] = []
    for n in asked.pairs:
        for method in ("constrained", "constraintmatch"):
            found, steps, began = [], 0, time.monotonic()
            for sample in range(asked.samples):
                model, steps = trained(method, start, train, Constraints.sample(train.labels, n, seed=sample))
                told = scores(labels, predict(model, test))
                found.append({key: round(told[key], 4) for key in ("acc", "nmi", "ari")})
            seconds = round((time.monotonic() - began) / asked.samples, 1)
            rows.append({"pairs": n, "method": method, "scores": found, "seconds": seconds, "steps": steps})
            print(rows[-1], flush=True)
    if asked.out:
        sizes = {"data": asked.name, "images": len(train), "width": train.channels, "clusters": asked.clusters}
        result = {**sizes, "recipe": recipe, "start": first, "rows": rows}
        write_result(asked.out / f"embeddings-{asked.name}.json", result)


if __name__ == "__main__":
    main()
