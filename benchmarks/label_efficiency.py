"""Test accuracy against the number of answered questions, with a simulated annotator.

    python benchmarks/label_efficiency.py cifar10 --data-dir data --model weights/scan-cifar10 --out results

One JSON for each way of asking and error rate: random-pair, chosen-pair, chosen-which. Every round begins with the
start and trains on all answers so far.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from constraintmatch.datasets import DATASETS, load_dataset
from constraintmatch.evaluation import predict, scores
from constraintmatch.methods import ViewChoice
from constraintmatch.models import ClusterModel, load_model
from constraintmatch.oracle import LabelOracle
from constraintmatch.questions import implied_groups
from constraintmatch.rounds import Asking, closure_pairs, image_belief, simulate
from constraintmatch.running import Around, method_settings, run_method, split_options, weights_hash
from constraintmatch.runs import write_result

WAYS = {
    "random-pair": Asking("pair", "random"),
    "chosen-pair": Asking("pair", "recommended"),
    "chosen-which": Asking("which", "recommended"),
    "random-which": Asking("which", "random"),
}


def run(asked: argparse.Namespace, way: str, error: float) -> dict[str, Any]:
    row = DATASETS[asked.name]
    images = load_dataset(asked.name, "train", asked.data_dir)
    test = load_dataset(asked.name, "test", asked.data_dir)
    assert images.labels is not None
    assert test.labels is not None
    start = load_model(asked.model)
    own = {"pairs_per_step": row.pairs_per_step, "images_per_step": row.images_per_step}
    options = {**own, **row.tuned["constraintmatch"], **dict(word.split("=") for word in asked.set)}
    options = {key: float(value) if isinstance(value, str) else value for key, value in options.items()}
    arguments, changes = split_options("constraintmatch", options)
    settings = method_settings("constraintmatch", {**changes, "steps": asked.steps, "seed": asked.seed})
    settings = replace(settings, log_every=asked.steps)
    around = Around(views=ViewChoice(flip=row.flip, without=tuple(sorted(row.without))))

    def train(answers: Any) -> ClusterModel:
        pairs = closure_pairs(answers, len(images), seed=asked.seed)
        fresh = load_model(asked.model)
        return run_method(
            "constraintmatch", fresh, images, pairs, arguments=arguments, settings=settings, around=around
        ).model

    points, began = [], time.monotonic()
    points.append({"answers": 0, **scores(test.labels, predict(start.to(asked.device), test))})
    oracle = LabelOracle(images.labels, error=error, seed=asked.seed)
    asking = replace(WAYS[way], seed=asked.seed)
    for done in simulate(lambda model: image_belief(model, images), train, start, asked.budgets, oracle, asking):
        told = scores(test.labels, predict(done.model, test))
        groups = implied_groups(done.answers, len(images))
        seconds = round(time.monotonic() - began, 1)
        points.append({"answers": len(done.answers), **told, "groups": int(groups.max()) + 1, "seconds": seconds})
        print(
            f"{asked.name} {way} error {error:g}: {len(done.answers):,} answers, ACC {100 * told['acc']:.2f}",
            flush=True,
        )
    request = {"data": asked.name, "way": way, "error": error, "steps": asked.steps, "seed": asked.seed}
    return {**request, "options": options, "start": weights_hash(load_model(asked.model)), "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("digits", "cifar10", "cifar100-20"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ways", default="random-pair,chosen-pair,chosen-which")
    parser.add_argument("--errors", default="0,0.05,0.1")
    parser.add_argument(
        "--budgets",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[50, 100, 200, 500, 1000, 2000, 5000, 10000],
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--set", nargs="*", default=[], help="other options of the training, such as lr=0.02")
    parser.add_argument("--out", type=Path, default=Path("results"))
    asked = parser.parse_args()
    if asked.device is None:
        import torch

        asked.device = "cuda" if torch.cuda.is_available() else "cpu"
    for error in map(float, asked.errors.split(",")):
        for way in asked.ways.split(","):
            target = asked.out / f"questions-{asked.name}-{way}-error{error:g}.json"
            if target.is_file():
                print(f"{target}: finished before")
                continue
            write_result(target, run(asked, way, error))


if __name__ == "__main__":
    main()
