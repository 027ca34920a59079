"""What wrong pairs and wrong pseudo-labels cost on the digits, and what it helps to tell the loss how many there are.

    python benchmarks/wrong_pairs.py --out results/wrong-pairs-digits.json

The demo's start, 500 pairs, short trainings. First a share of the pairs is wrong, and the loss is told nothing or
that share (a tenth where none is wrong); then all pairs are right, a share ρ of the pseudo-labels is flipped, and the
loss expects none or a tenth of the pseudo-constraints to be wrong, whatever ρ is. Scores are on the test images.
"""

import argparse
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.evaluation.metrics import predict, scores
from constraintmatch.methods import ViewChoice
from constraintmatch.models.cluster_model import build_model
from constraintmatch.pipeline import train as running
from constraintmatch.pipeline.config import SHORT_STAGES, make_config, short_start
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.run_folder import write_result

SHARES, FLIPS = (0.0, 0.1, 0.2), (0.2, 0.4)


def trainings() -> Iterator[tuple[str, float, dict[str, float]]]:
    """Method, share of wrong pairs, and what else is asked of the training."""
    for wrong in SHARES:
        for method in ("constrained", "constraintmatch"):
            for told in (0.0, wrong or 0.1):
                yield method, wrong, {"error_rate": told}
    for flipped in FLIPS:
        for expected in (0.0, 0.1):
            yield "constraintmatch", 0.0, {"flip_fraction": flipped, "pseudo_error_rate": expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    row, train, test = DATASETS["digits"], load_dataset("digits", "train"), load_dataset("digits", "test")
    assert train.labels is not None
    views = ViewChoice(row.flip, tuple(sorted(row.without)))
    shape = {"side": row.side, "channels": row.channels, "mean": row.mean, "std": row.std}
    fresh = build_model(n_clusters=0, **shape, seed=derive_seed(0, "model"))
    settings: dict[str, Any] = {"device": "cpu", "seed": 0}
    recipe = short_start(len(train), cpu=True)
    start = running.pretrain(fresh, train, 10, stages=SHORT_STAGES, recipe=recipe, settings=settings, views=views)
    first = scores(test.labels, predict(start, test))["acc"]
    print(f"start {first:.3f}", flush=True)
    found = []
    for method, wrong, more in trainings():
        sizes = {"pairs_per_step": row.pairs_per_step}
        sizes |= {"images_per_step": row.images_per_step} if method == "constraintmatch" else {}
        options = {**row.tuned[method], **sizes, **more, **settings, "steps": asked.steps}
        accuracies, began = [], time.monotonic()
        for sample in range(asked.samples):
            pairs = Constraints.sample(train.labels, asked.pairs, seed=sample).flip(wrong, seed=sample)
            config = make_config(method, options, start=copy.deepcopy(start), views=views)
            model = running.train(train, pairs, config).model
            accuracies.append(round(scores(test.labels, predict(model, test))["acc"], 4))
        seconds = round(time.monotonic() - began, 1)
        found.append({"method": method, "wrong": wrong, **more, "acc": accuracies, "seconds": seconds})
        print(found[-1], flush=True)
    if asked.out:
        asking = {"data": "digits", "pairs": asked.pairs, "steps": asked.steps}
        write_result(asked.out, {**asking, "start": first, "rows": found})


if __name__ == "__main__":
    main()
