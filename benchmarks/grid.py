"""Is any number of answers, right or wrong, worse than none? A head on frozen features, trained by the default recipe.

    python benchmarks/grid.py cifar10 --data-dir data --start weights/scan-cifar10 --name cifar10-scan --workers 14

Rows are ways of asking and shares of wrong answers, columns numbers of answers: test accuracy, and what was kept. Pairs
at random come from `Constraints.sample`. Chosen pairs and "which of these?" questions are asked in rounds, as by
`loop --frozen`: each is about what the model of the round before believes, and about nine images in ten, which a sample
draws. Finished curves are not run again. `--wrong near:0.1 people:0.1` asks annotators whose errors are uneven instead
(`safety.py` says how); the data may then be a folder with `train.npz` and `test.npz`, embeddings that the start made.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safety import drawn, person

from constraintmatch._internal.files import read_json
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.evaluation.metrics import predict, scores
from constraintmatch.methods import Context
from constraintmatch.methods.heads import detach_head, embed_images
from constraintmatch.methods.preparation import spread
from constraintmatch.methods.propagate import Frozen
from constraintmatch.models.cluster_model import ClusterModel, load_model
from constraintmatch.pipeline.config import make_config, training_size
from constraintmatch.pipeline.train import train
from constraintmatch.questions.answers import Answer, constraints_of
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.next_question import Kind
from constraintmatch.questions.rounds import Asking, closure_pairs, image_belief, simulate
from constraintmatch.training.loop import choose_device
from constraintmatch.training.run_folder import write_result

SHARES = (0.05, 0.1, 0.2)
WRONG = {
    "random": ["none", *(f"{kind}:{share}" for kind in ("all", "both", "same") for share in SHARES)],
    "pair": ["none", *(f"all:{share}" for share in SHARES)],
    "which": ["none", *(f"all:{share}" for share in SHARES)],
}
Task = tuple[ClusterModel, ImageSet, ImageSet]
Curve = tuple[str, str, int]  # way of asking, wrong answers, sample


def main() -> None:
    asked = arguments()
    task = features(asked)
    file = asked.out / f"grid-{asked.name}.json"
    done: dict[str, Any] = read_json(file) if file.is_file() else {"start": accuracy(*task[::2]), "curves": []}
    known = {(one["way"], one["wrong"], one["sample"]) for one in done["curves"]}
    ways = {way: asked.wrong or WRONG[way] for way in asked.ways.split(",")}
    jobs = [(way, wrong, sample) for sample in range(asked.samples) for way in ways for wrong in ways[way]]
    print(f"start {100 * done['start']:.1f}; {len(jobs)} curves, {len(known)} of them before", flush=True)
    fresh = multiprocessing.get_context("spawn")  # a fork of a process that has used CUDA cannot use it
    with ProcessPoolExecutor(asked.workers, fresh, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        going = [pool.submit(curve, task, job, asked.budgets) for job in jobs if job not in known]
        for one in as_completed(going):
            if one.exception() is not None:
                print(f"a curve failed: {one.exception()}", flush=True)
                continue
            done["curves"].append(one.result())
            print(one.result(), flush=True)
            sizes = {"data": asked.name, "images": len(task[1]), "test_images": len(task[2])}
            write_result(file, {**sizes, **{key: done[key] for key in ("start", "curves")}})


def curve(task: Task, job: Curve, budgets: list[int]) -> dict[str, Any]:
    """The points of one row of the grid: for each number of answers the accuracy and what was kept."""
    (start, images, test), (way, wrong, sample) = task, job
    began, kept = time.monotonic(), [""]

    def learn(pairs: Constraints, **around: Any) -> ClusterModel:
        options = {**training_size(len(images), cpu=True), "recipe": "safe", "device": "cpu"}
        config = make_config("constraintmatch", options, start=start)
        model, log = train(images, pairs, config, Context(**around))
        kept[0] = log[-1].get("kept", "")
        return model

    models = (
        drawn_models(images, budgets, wrong, sample, learn)
        if way == "random"
        else asked_models(task, job, budgets, learn)
    )
    points = [{"answers": n, "acc": accuracy(model, test), "kept": kept[0], **more} for n, model, more in models]
    seconds = round(time.monotonic() - began, 1)
    return {"way": way, "wrong": wrong, "sample": sample, "points": points, "seconds": seconds}


def drawn_models(
    images: ImageSet, budgets: list[int], wrong: str, sample: int, learn: Callable[[Constraints], ClusterModel]
) -> Iterator[tuple[int, ClusterModel, dict[str, float]]]:
    """The model after each number of pairs at random, and the share of them that is wrong."""
    assert images.labels is not None
    for n in budgets:
        pairs = drawn(images, n, wrong, sample)
        right = images.labels[pairs.left] == images.labels[pairs.right]
        yield n, learn(pairs), {"wrong": round(float((right != (pairs.link > 0.5)).mean()), 4)}


def asked_models(
    task: Task, job: Curve, budgets: list[int], learn: Callable[..., ClusterModel]
) -> Iterator[tuple[int, ClusterModel, dict[str, float]]]:
    """The model after each number of answers to chosen questions, and the share of them that is wrong."""
    (start, images, _), (way, wrong, sample) = task, job
    oracle, knowing = (person(images, kind, sample) for kind in (wrong, "none"))

    def believe(model: ClusterModel) -> Belief:
        return image_belief(model, images)

    beliefs, frozen, newest = predict(start, images).probabilities, Frozen.of(start, images), start

    def learn_answers(answers: tuple[Answer, ...]) -> ClusterModel:
        nonlocal newest
        pairs = closure_pairs(answers, len(images), beliefs, frozen)
        newest = learn(pairs, before=newest, stated=constraints_of(answers, len(images)))
        return newest

    some = np.random.default_rng(sample).permutation(len(images))[len(images) // 10 :]  # so that samples differ
    kind: Kind = "which" if way == "which" else "pair"
    asking = Asking(kind=kind, batch=25, seed=sample, candidates=np.sort(some))
    for answers, model in simulate(believe, learn_answers, start, [n for n in budgets if n <= 2_000], oracle, asking):
        missed = [one.choice != knowing.answer(one.question).choice for one in answers]
        yield len(answers), model, {"wrong": round(float(np.mean(missed)), 4)}


def features(asked: argparse.Namespace) -> Task:
    """The start's head as a model of its own, and what its backbone makes of training and test images."""
    parts = [
        load_dataset(asked.data, part, asked.data_dir)
        if asked.data in DATASETS
        else load_images(place if (place := Path(asked.data) / part).exists() else place.with_suffix(".npz"))
        for part in ("train", "test")
    ]
    model = load_model(asked.start, device=choose_device())
    seen = [embed_images(model, images.take(spread(len(images), asked.images))) for images in parts]
    return detach_head(model, seen[0]).to("cpu"), seen[0], seen[1]


def accuracy(model: ClusterModel, images: ImageSet) -> float:
    assert images.labels is not None
    return round(scores(images.labels, predict(model, images))["acc"], 4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a data set, or a folder with the folders train and test")
    parser.add_argument("--start", type=Path, required=True, help="a model folder")
    parser.add_argument("--name", required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--images", type=int, default=12_000, help="training images at most")
    parser.add_argument("--budgets", type=int, nargs="*", default=[50, 100, 200, 500, 1_000, 2_000, 10_000])
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--ways", default="random,pair,which")
    parser.add_argument("--wrong", nargs="*", help="kinds of wrong answers and their shares; those of the page")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
