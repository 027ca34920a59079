"""The demo: digits without labels, what a few hundred pairs bring, and what as many chosen answers bring."""

import copy
import multiprocessing
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import QUIET, Reporter, watched
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions, embed, predict, scores
from constraintmatch.evaluation.report import write_report
from constraintmatch.methods import Context
from constraintmatch.methods.heads import regression_head
from constraintmatch.methods.propagate import Frozen
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_head
from constraintmatch.pipeline.config import make_config
from constraintmatch.pipeline.plan import choose_views
from constraintmatch.pipeline.train import pretrain, train
from constraintmatch.questions.rounds import Asking, LabelOracle, head_belief, inform_start, simulate
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.run_folder import write_result

# Values were compared on training and validation images; test scores of earlier settings were seen on the way.
N_PAIRS, N_SAMPLES = 200, 3
PROCESSES = min(2, os.cpu_count() or 1)  # with a thread each: networks of 8 x 8 images keep no two threads busy
BUDGETS = (25, 50, 75, 100)  # answers after which the head learns
START = {"simclr": {"epochs": 40, "images_per_step": 256}}  # 160 steps, as `train` makes by itself
TRAINING = {"steps": 200, "lr": 0.05, "ema": 0.95, "pairs_per_step": 50, "head_steps": 200, "log_every": 20}
FREE = {"images_per_step": 100, "warm_up": 0.25}  # of ConstraintMatch: images without pairs, which count by and by
TITLES = {
    "k_means": "k-means on pixels",
    "start": "self-supervised start",
    "constrained": "{pairs} random pairs, constrained",
    "constraintmatch": "{pairs} random pairs, ConstraintMatch",
    "chosen": '{answers} chosen answers, "which of these?"',
}
NEXT = f"your own photos:\n  constraintmatch loop PHOTOS --clusters 10 --questions {BUDGETS[-1]} --frozen"
METHODS = ("constrained", "constraintmatch")
VIEWS = choose_views(None, (), DATASETS["digits"])
METRICS = ("acc", "nmi", "ari")
Found = dict[str, list[dict[str, float]]]
Job = Callable[[], ClusterModel]


def run_demo(out: Path, *, seed: int = 0, reporter: Reporter = QUIET) -> str:
    """The demo's table, the place of its report and what to try next, as text; all that it made is under `out`."""
    _clear(out)
    images, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    assert images.labels is not None
    context = Context(out, reporter=reporter, data={"name": "digits"})
    start = _start(images, seed, context.within("start"))
    found: Found = {name: [] for name in TITLES}
    found["start"] = [_scores(test, predict(start, test))]
    seeds = [derive_seed(seed, "pairs", sample) for sample in range(N_SAMPLES)]
    found["k_means"] = [_scores(test, _pixel_clusters(images, test, own)) for own in seeds]
    pairs = [Constraints.sample(images.labels, N_PAIRS, seed=own) for own in seeds]
    jobs: dict[tuple[str, int], Job] = {
        (name, sample): partial(_train, name, start, images, own, seed, out / f"{name}-{sample}")
        for name in reversed(METHODS)  # the longest first
        for sample, own in enumerate(pairs)
    }
    jobs |= {("chosen", sample): partial(_asked, start, images, own, BUDGETS) for sample, own in enumerate(seeds)}
    models = dict(zip(jobs, _work(list(jobs.values()), reporter), strict=True))
    for name, sample in sorted(models):
        found[name].append(_scores(test, predict(models[name, sample], test)))
    last = "constraintmatch", N_SAMPLES - 1
    page = write_report(out / f"{last[0]}-{last[1]}", images, predict(models[last], images), constraints=pairs[-1])
    settings = {"pairs": N_PAIRS, "answers": BUDGETS[-1], "samples": N_SAMPLES, "seed": seed}
    recipes = {"start_recipe": START, "training": TRAINING, "free": FREE}
    write_result(out / "demo.json", {**settings, **recipes, **found})
    return f"{_table(found, len(images), len(test))}\nreport: {page}\n{NEXT}\n"


def _start(images: ImageSet, seed: int, context: Context) -> ClusterModel:
    """SimCLR, and a head that repeats the k-means clusters of its projections: the quickest start that there is."""
    row = DATASETS["digits"]
    fresh = build_model(
        n_clusters=0, side=row.side, channels=row.channels, mean=row.mean, std=row.std, seed=derive_seed(seed, "model")
    )
    how: dict[str, Any] = {"stages": tuple(START), "recipe": START, "settings": {"device": "cpu", "seed": seed}}
    model = pretrain(fresh, images, row.n_clusters, context=context, views=VIEWS, **how)
    projected = embed(model, images, projected=True)
    unit = projected / np.linalg.norm(projected, axis=1, keepdims=True)
    clusters = _k_means(unit, derive_seed(seed, "k-means")).labels_.astype(np.int64)
    return with_head(model, *regression_head(embed(model, images), clusters, row.n_clusters))


def _k_means(points: NDArray[np.floating[Any]], seed: int) -> KMeans:
    return KMeans(DATASETS["digits"].n_clusters, n_init=10, random_state=seed % 2**32).fit(points)


def _pixel_clusters(images: ImageSet, others: ImageSet, seed: int) -> Predictions:
    """Where k-means on the pixels of some images puts others."""
    flat, new = (part.images.reshape(len(part), -1) / 255 for part in (images, others))
    clusters = _k_means(flat, seed).predict(new)
    return Predictions(np.eye(DATASETS["digits"].n_clusters, dtype=np.float32)[clusters])


def _work(jobs: Sequence[Job], reporter: Reporter) -> list[ClusterModel]:
    """What the jobs give, in their order."""
    fresh = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(PROCESSES, fresh, initializer=torch.set_num_threads, initargs=(1,)) as pool,
        watched(reporter, "pairs and answers", len(jobs)) as progress,
    ):
        going = [pool.submit(job) for job in jobs]
        for job in going:
            job.add_done_callback(lambda _: progress(sum(one.done() for one in going), len(going)))
        return [job.result() for job in going]


def _train(name: str, start: ClusterModel, images: ImageSet, pairs: Constraints, seed: int, out: Path) -> ClusterModel:
    options = {**TRAINING, **(FREE if name == "constraintmatch" else {}), "device": "cpu", "seed": seed}
    config = make_config(name, options, start=copy.deepcopy(start), views=VIEWS)
    return train(images, pairs, config, Context(out, data={"name": "digits"})).model


def _asked(start: ClusterModel, images: ImageSet, seed: int, budgets: Sequence[int]) -> ClusterModel:
    """The start with a head that knows right answers to "which of these?", about nine images in ten that are drawn."""
    assert images.labels is not None
    frozen, order = Frozen.of(start, images), np.random.default_rng(seed).permutation(len(images))
    rounds = simulate(
        lambda model: head_belief(model, frozen),
        lambda answers: inform_start(start, frozen, answers),
        start,
        budgets,
        LabelOracle(images.labels, error=0.0),
        Asking(candidates=np.sort(order[len(order) // 10 :])),
    )
    *_, (_, model) = rounds
    return cast(ClusterModel, model)


def _scores(images: ImageSet, predictions: Predictions) -> dict[str, float]:
    assert images.labels is not None
    found = scores(images.labels, predictions)
    return {name: round(found[name], 4) for name in METRICS}


def _table(found: Found, n_train: int, n_test: int) -> str:
    lines = [
        f"{n_train:,} digits without labels; scores in % on {n_test} other images,",
        f"mean ± standard deviation of {N_SAMPLES} samples",
        "",
        f"{'':38}{'ACC':>12}{'NMI':>12}{'ARI':>12}",
    ]
    for name, rows in found.items():
        title = TITLES[name].format(pairs=N_PAIRS, answers=BUDGETS[-1])
        cells = [_mean([100 * row[metric] for row in rows]) for metric in METRICS]
        lines.append(f"{title:38}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean + " " * 6


def _clear(out: Path) -> None:
    """Remove an earlier demo; anything else at that place is left alone."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    known = {"demo.json", "start"} | {f"{name}-{sample}" for name in METHODS for sample in range(N_SAMPLES)}
    if not out.is_dir() or {entry.name for entry in out.iterdir()} - known:
        raise InputError(f"{out}: not empty and not an earlier demo; choose another --out")
    shutil.rmtree(out)
