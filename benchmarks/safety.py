"""Is a training ever worse than what it began with? Pairs at random, right or wrong, by the safe or the paper's recipe.

    python benchmarks/safety.py photos/train photos/test --start starts/photos --name stl10 --out results
    python benchmarks/safety.py photos/train photos/test --start pretrained --name stl10-encoder --wrong none all:0.1
    python benchmarks/safety.py train.npz test.npz --start scan --name cifar10-features --wrong all:0.1 both:0.1

Every cell is what `constraintmatch train` does with the same pairs: test accuracy, what was kept, seconds. A cell that
is in the result already is not run again. `--wrong` names which links are wrong and their share: `all` of them alike,
`both` as many must-links as cannot-links, `same` only wrong must-links; of embeddings also `near`, where they mislead,
and `people`, by three annotators of whom one never errs and one errs five times as often as the other.
"""

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import numpy as np

from constraintmatch._internal.files import read_json
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.evaluation.metrics import predict, scores
from constraintmatch.methods import ViewChoice
from constraintmatch.models.backbones import ENCODER, made_for_side
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model
from constraintmatch.pipeline import train as running
from constraintmatch.pipeline.config import make_config, training_size
from constraintmatch.pipeline.embedding import DEFAULT, PRETRAINED
from constraintmatch.questions.answers import Question
from constraintmatch.questions.rounds import LabelOracle
from constraintmatch.training.loop import choose_device
from constraintmatch.training.run_folder import write_result

PEOPLE = (0.0, 0.5, 2.5)  # how often each errs, beside their mean


def main() -> None:
    asked = arguments()
    train, test = (opened(source, part, asked) for source, part in ((asked.train, "train"), (asked.test, "test")))
    assert train.labels is not None
    start, cpu = started(asked, train), choose_device().type == "cpu"
    file = asked.out / f"safety-{asked.name}.json"
    done: dict[str, Any] = read_json(file) if file.is_file() else {"start": accuracy(start, test), "cells": []}
    known = {key_of(cell) for cell in done["cells"]}
    print(f"start {100 * done['start']:.1f}", flush=True)
    for recipe in asked.recipes.split(","):
        for method in asked.methods.split(","):
            for wrong in asked.wrong:
                for n in asked.pairs:
                    for sample in range(asked.samples):
                        cell: dict[str, Any] = {"recipe": recipe, "method": method, "wrong": wrong, "pairs": n}
                        cell["sample"] = sample
                        if key_of(cell) in known:
                            continue
                        pairs = drawn(train, n, wrong, sample)
                        cell |= trained(cell, start, train, test, pairs, asked, cpu)
                        done["cells"].append(cell)
                        print(cell, flush=True)
                        sizes = {"data": asked.name, "images": len(train), "test_images": len(test)}
                        write_result(file, {**sizes, **{key: done[key] for key in ("start", "cells")}})


def key_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a cell apart from the others."""
    return tuple(cell[key] for key in ("recipe", "method", "wrong", "pairs", "sample"))


def drawn(images: ImageSet, n: int, wrong: str, sample: int) -> Constraints:
    """A sample of pairs, some of them turned round."""
    assert images.labels is not None
    pairs = Constraints.sample(images.labels, n, seed=sample)
    kind, _, share = wrong.partition(":")
    if kind == "all" and float(share or 0):
        return pairs.flip(float(share), seed=sample)
    if kind == "both":  # as many must-links as cannot-links: a share of the must-links
        part = float(share) * pairs.n_must_links
        pairs = pairs.flip(float(share), seed=sample, only="must-link")
        return pairs.flip(part / max(pairs.n_cannot_links, 1), seed=sample + 1_000, only="cannot-link")
    if kind in ("near", "people"):
        asked = (Question(int(one), (int(other),)) for one, other in zip(pairs.left, pairs.right, strict=True))
        who = person(images, wrong, sample)
        same = [float(who.answer(question).choice == 0) for question in asked]
        return Constraints.from_arrays(pairs.left, pairs.right, np.array(same), n_images=len(images))
    if kind == "same":  # wrong "same" alone: so many of all pairs
        return pairs.flip(float(share), seed=sample, only="cannot-link")
    return pairs


def person(images: ImageSet, wrong: str, sample: int) -> LabelOracle:
    """A simulated annotator who errs anywhere, where features mislead, or more on some images than on others."""
    assert images.labels is not None
    kind, _, share = wrong.partition(":")
    more: dict[str, Any] = {"features": images.images[:, 0, 0]} if kind == "near" else {}
    more |= {"annotators": PEOPLE} if kind == "people" else {}
    return LabelOracle(images.labels, error=float(share or 0), seed=sample, **more)


def trained(
    cell: dict[str, Any],
    start: ClusterModel,
    train: ImageSet,
    test: ImageSet,
    pairs: Constraints,
    asked: argparse.Namespace,
    cpu: bool,
) -> dict[str, Any]:
    """The scores of one training."""
    size = training_size(len(train), cpu=cpu or train.embedded)
    if asked.steps:
        size["steps"] = asked.steps
    if cell["method"] == "constrained":
        size = {key: value for key, value in size.items() if key not in ("images_per_step", "warm_up")}
    options = {**size, "recipe": cell["recipe"], "evaluate_every": max(1, size["steps"] // 10)}
    row, began = DATASETS.get(asked.train), time.monotonic()
    views = ViewChoice(flip=row is None or row.flip, without=tuple(sorted(row.without)) if row else ())
    config = make_config(cell["method"], options, start=copy.deepcopy(start), views=views)
    model, log = running.train(train, pairs, config)
    verdict = log[-1] if log[-1]["kind"] == "verdict" else {}
    found = {
        "acc": accuracy(model, test),
        "seconds": round(time.monotonic() - began, 1),
        "steps": config.settings.steps,
    }
    said = {key: verdict.get(key) for key in ("kept", "why", "wrong_must_links", "wrong_cannot_links")}
    return {**found, **(said if verdict else {})}


def accuracy(model: ClusterModel, images: ImageSet) -> float:
    assert images.labels is not None
    return round(scores(images.labels, predict(model, images, device=choose_device()))["acc"], 4)


def opened(source: str, part: str, asked: argparse.Namespace) -> ImageSet:
    if source in DATASETS:
        return load_dataset(source, part, asked.data_dir)
    if asked.start == PRETRAINED:
        return load_images(source, side=made_for_side(DEFAULT), channels=3)
    return load_images(source, side=None if asked.start == "scan" else load_model(asked.start).config.side)


def started(asked: argparse.Namespace, train: ImageSet) -> ClusterModel:
    """The model of a folder, or linear heads: on embeddings, or on a pretrained encoder."""
    if asked.start not in ("scan", PRETRAINED):
        return load_model(asked.start, device=choose_device())
    settings: dict[str, Any] = {"seed": 0}
    if asked.start == PRETRAINED:
        fresh = build_model(n_clusters=0, side=train.side, backbone=ENCODER + DEFAULT, pretrained=True)
    else:
        mean, std = train.moments()
        fresh = build_model(n_clusters=0, side=1, channels=train.channels, mean=mean, std=std)
        settings["device"] = "cpu"
    return running.pretrain(fresh, train, asked.clusters, stages=["linear_scan"], settings=settings)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="a folder, a file of embeddings or a data set")
    parser.add_argument("test")
    parser.add_argument(
        "--start", required=True, help="a model folder, pretrained, or scan: linear heads on embeddings"
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--pairs", type=int, nargs="*", default=[300, 1000, 3000])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--methods", default="constrained,constraintmatch")
    parser.add_argument("--recipes", default="safe")
    parser.add_argument("--wrong", nargs="*", default=["none"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
