"""What the vote of linear heads is worth on frozen features, and what bounding their logits saves.

    python research/heads.py cifar100-20 --data-dir data --model weights/scan-cifar100-20 --out results/heads.json

For several seeds: the test accuracy of the best of forty heads by SCAN's loss, and of what the best of them agree on,
both as the steady head that a training begins with. Then ms a step with bounded and with unbounded logits, in turns.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.evaluation.metrics import Predictions, embed, nearest_neighbours, scores
from constraintmatch.methods.parts import heads
from constraintmatch.methods.parts.heads import best_linear_head, steady_head
from constraintmatch.methods.parts.preparation import spread
from constraintmatch.models.cluster_model import load_model
from constraintmatch.training.run_folder import write_result


def ms_per_step(features: Tensor, near: Tensor, n_clusters: int, lowest: float, steps: int) -> float:
    """Of a training of that many steps; logits are the farther apart the longer it goes."""
    usual, heads.LOWEST = heads.LOWEST, lowest
    try:
        began = time.monotonic()
        best_linear_head(features, near, n_clusters, steps=steps)
        return 1e3 * (time.monotonic() - began) / steps
    finally:
        heads.LOWEST = usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("cifar10", "cifar100-20"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=int, default=20_000, help="training images, spread over the set")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200, help="of the trainings that are timed")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    n_clusters, model = DATASETS[asked.name].n_clusters, load_model(asked.model)
    train, test = (load_dataset(asked.name, part, asked.data_dir) for part in ("train", "test"))
    train, test = train.take(spread(len(train), asked.images)), test.take(spread(len(test), asked.test_images))
    features, others = (torch.from_numpy(embed(model, part)) for part in (train, test))
    near = torch.from_numpy(nearest_neighbours(features.numpy(), 20))

    def accuracy(weight: Tensor, bias: Tensor) -> float:
        probabilities = (others @ weight.T + bias).softmax(-1).numpy()
        return round(scores(test.labels, Predictions(probabilities))["acc"], 4)

    rows = []
    for seed in range(asked.seeds):
        head = best_linear_head(features, near, n_clusters, seed=seed)
        alone = head._replace(voters=tuple(part[:1] for part in head.voters))
        found = {name: accuracy(*steady_head(features, voting)) for name, voting in (("best", alone), ("vote", head))}
        rows.append({"seed": seed, **found, "voters": len(head.voters[1]), "loss": float(head.losses.min())})
        print(rows[-1], flush=True)
    timed = {"bounded": heads.LOWEST, "unbounded": -math.inf}
    given = (features, near, n_clusters)
    turns = [{name: ms_per_step(*given, low, asked.steps) for name, low in timed.items()} for _ in range(asked.turns)]
    ms = {name: round(statistics.median(turn[name] for turn in turns), 2) for name in timed}
    print(f"ms a step: {ms}, ratio {ms['unbounded'] / ms['bounded']:.1f}")
    if asked.out:
        request = {"data": asked.name, "model": asked.model.name, "images": len(train), "test_images": len(test)}
        ratio = round(ms["unbounded"] / ms["bounded"], 2)
        write_result(asked.out, {**request, "rows": rows, "ms": ms, "timed_steps": asked.steps, "ratio": ratio})


if __name__ == "__main__":
    main()
