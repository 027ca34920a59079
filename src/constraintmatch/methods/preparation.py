"""What every method needs before its first step: views, images on the device, checks, evaluations."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet, kind_of
from constraintmatch.evaluation.judge import Guard
from constraintmatch.evaluation.metrics import (
    Predictions,
    agreement,
    cluster_quality,
    collapse_warnings,
    nearest_neighbours,
    predict,
    scores,
)
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training import views
from constraintmatch.training.batches import ImageStore, Shuffled, ViewMaker, derive_seed, view_maker
from constraintmatch.training.loop import Surroundings, TrainSettings, choose_device
from constraintmatch.training.ranks import mine
from constraintmatch.training.run_folder import RunFolder
from constraintmatch.training.views import View

Function = TypeVar("Function", bound=Callable[..., Any])
RANGES: dict[str, Callable[[float], bool]] = {
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "0 or more": lambda value: 0 <= value < math.inf,
    "a positive number": lambda value: 0 < value < math.inf,
}


@dataclass(frozen=True)
class ViewChoice:
    """Which views are safe for the images: no flips for digits, fewer operations, or the user's own functions."""

    flip: bool = True
    without: tuple[str, ...] = ()
    own_weak: View | None = None
    own_strong: View | None = None
    own_contrastive: View | None = None

    def weak(self, images: ImageSet) -> View:
        """For the images that the model guesses."""
        return self.own_weak or (views.plain() if images.embedded else views.weak(flip=self.flip))

    def pair(self, images: ImageSet) -> View:
        """For the images of constraints."""
        return self.own_weak or (views.plain() if images.embedded else views.crop(flip=self.flip))

    def strong(self, images: ImageSet) -> View:
        """For the images on which the model must repeat its guesses."""
        return self.own_strong or _embedding_view(images) or views.strong(flip=self.flip, without=self.without)

    def scan_strong(self, images: ImageSet) -> View:
        """The strong views of SCAN."""
        return self.own_strong or _embedding_view(images) or views.scan_strong(flip=self.flip, without=self.without)

    def contrastive(self, images: ImageSet) -> View:
        """For pretext tasks, which learn what the views of an image share; embeddings know that already."""
        if images.embedded and self.own_contrastive is None:
            raise InputError("embeddings have no views for a pretext task; leave it out and begin with linear_scan")
        return self.own_contrastive or views.contrastive(flip=self.flip)

    def request(self) -> dict[str, Any]:
        """The choice as plain values, for `run.json`."""
        own = {name: view.name for name in ("weak", "strong", "contrastive") if (view := getattr(self, f"own_{name}"))}
        return {"flip": self.flip, "without": sorted(self.without), **({"own": own} if own else {})}


def _embedding_view(images: ImageSet) -> View | None:
    return views.without_numbers(images.moments()[0]) if images.embedded else None


@dataclass(frozen=True)
class Context:
    """What surrounds a training: where it is kept, who watches it, what evaluates it, what stops it."""

    out: Path | None = None  # the run folder; None keeps nothing
    resume: bool = False
    reporter: Reporter = field(default_factory=Reporter)
    held_out: ImageSet | None = None  # images to evaluate on; labels where known
    held_out_constraints: Constraints | None = None  # over the rows of held_out, or of the training images without it
    data: Mapping[str, Any] = field(default_factory=dict)  # where the images came from, for run.json
    stop: Callable[[], bool] = lambda: False  # asked after every step: True ends the training with a checkpoint
    run: RunFolder | None = None  # the open run folder
    guard: Guard | None = None  # of the safe recipe; None: train as published
    before: ClusterModel | None = None  # of the round before: the safe recipe keeps it where the answers favour it
    stated: Constraints | None = None  # what the answers say themselves, if the constraints are what follows from them

    def within(self, folder: str) -> "Context":
        """The same, one folder deeper."""
        return replace(self, out=self.out / folder if self.out else None)


class Trained(NamedTuple):
    """A trained model and the log of its training."""

    model: ClusterModel
    log: list[dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """The images on their device, and the maker of their views."""

    device: torch.device
    store: ImageStore
    maker: ViewMaker
    seed: int
    compile: bool

    def surroundings(self, title: str, context: Context, **judges: Any) -> Surroundings[Any]:
        """What is around a training with this title; what judges it is the method's own."""
        watch: dict[str, Any] = {"run": context.run, "reporter": context.reporter, "stop": context.stop}
        return Surroundings(title, **watch, prefetch=not self.store.resident, **judges)

    def draw_rows(self, n: int, stream: str = "images") -> Shuffled:
        """The rows of n images for each step."""
        return Shuffled(len(self.store.images), n, derive_seed(self.seed, stream), self.device)

    def draw_epochs(
        self, settings: TrainSettings, epochs: int, n: int, *, averaged: float = 0.0
    ) -> tuple[Shuffled, TrainSettings]:
        """The rows of n images for each step, and the settings with the steps of these epochs.

        They have ten evaluations, and an average of weights over the share `averaged`, if they name no others.
        """
        rows, ema = self.draw_rows(n), settings.ema
        steps = epochs * rows.steps_per_epoch
        if ema is None and averaged * steps > 1:
            ema = 1 - 1 / (averaged * steps)
        every = settings.evaluate_every or max(1, steps // 10)
        return rows, replace(settings, steps=steps, evaluate_every=every, ema=ema)

    def two_views(self, view: View, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """This rank's share of two views of the images of these rows."""
        pixels, n = self.store.take(mine(rows)), len(rows)
        return self.maker(view, pixels, step, "first", n), self.maker(view, pixels, step, "second", n)

    def speed_up(self, function: Function) -> Function:
        """The function, compiled where the network is: else an all-pairs loss makes a dozen passes over (n, n)."""
        return cast(Function, torch.compile(function, dynamic=False)) if self.compile else function


def prepare(
    model: ClusterModel,
    images: ImageSet,
    settings: TrainSettings,
    *,
    need_clusters: bool = True,
    epochs: tuple[int, int] | None = None,
) -> Bench:
    """The bench for a training; an InputError if the model does not take the images.

    `epochs` are passes over the images, and the images of a step, where the steps follow from them.
    """
    check_images(model, images, need_clusters=need_clusters)
    device = choose_device(settings.device)
    if epochs is not None:
        settings = replace(settings, steps=epochs[0] * max(1, len(images) // epochs[1]))
    compiles = bool(settings.resolve(device).compile)
    maker = view_maker(derive_seed(settings.seed, "views"), device, compile=compiles)
    return Bench(device, ImageStore(images, device), maker, settings.seed, compiles)


def keep_model(model: ClusterModel, why: str, context: Context) -> Trained:
    """The model without a training, and a log that says why."""
    context.reporter.say(why)
    return Trained(model, [{"step": 0, "kind": "evaluation", "warnings": [why], "seconds": 0.0}])


def check_clusters(n_clusters: int, images: ImageSet) -> None:
    """An InputError for fewer than two clusters, or more clusters than images."""
    if n_clusters < 2:
        raise InputError(f"n_clusters is {n_clusters}; ask for 2 or more")
    if n_clusters > len(images):
        raise InputError(f"{n_clusters} clusters for {len(images)} images; ask for at most one cluster per image")


def check_range(words: str, **values: float) -> None:
    """An InputError if a number is not what the words, of `RANGES`, say."""
    for name, value in values.items():
        if not RANGES[words](value):
            raise InputError(f"{name} is {value}; it must be {words}")


def check_least(title: str, **least: tuple[float, float]) -> None:
    """An InputError if an argument is too small; each is given as (value, smallest)."""
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise InputError(f"{name} is {value}; {title} needs {smallest} or more")


def check_images(model: ClusterModel, images: ImageSet, *, need_clusters: bool = False) -> None:
    """An InputError if the model does not take images of this size, or has no clusters and needs them."""
    config = model.config
    if (images.side, images.channels) != (config.side, config.channels):
        takes, given = kind_of(config.side, config.channels), kind_of(images.side, images.channels)
        embedded = 1 in (config.side, images.side)
        fix = "give the kind that it was trained on" if embedded else f"load them with side={config.side}"
        raise InputError(f"the model takes {takes}, these are {given}; {fix}")
    if need_clusters and config.n_clusters == 0:
        raise InputError("this model has no cluster head; add one with with_clusters(model, n), or train scan first")
    if need_clusters:
        check_clusters(config.n_clusters, images)


def find_neighbours(
    features: NDArray[np.float32], n_neighbours: int, n_clusters: int, device: torch.device
) -> NDArray[np.int64]:
    """The nearest neighbours (n, m) of each image: at most a quarter of the images that a cluster has on average."""
    few = max(1, len(features) // (4 * n_clusters))
    return nearest_neighbours(features, min(n_neighbours, few), device=device)


def quality_judge(images: ImageSet, device: torch.device) -> Callable[[ClusterModel], float]:
    """A function that gives the `cluster_quality` of a model, by the neighbours in its own features.

    Neighbours in the features of an earlier model would favour that model (decision 041).
    """
    sample = images.take(spread(len(images), 5_000))

    def quality(model: ClusterModel) -> float:
        seen = predict(model, sample, features=True)
        assert seen.features is not None
        return cluster_quality(seen.probabilities, find_neighbours(seen.features, 20, seen.n_clusters, device))

    return quality


def keep_quality(
    title: str, model: ClusterModel, images: ImageSet, bench: Bench, context: Context, tolerance: float
) -> Surroundings[Any]:
    """What is around a training that keeps its weights by `cluster_quality`.

    It keeps the last evaluation whose quality is below the best by at most `tolerance`: a collapse costs more, and
    within it longer training is better.
    """
    quality = quality_judge(images, bench.device)

    def evaluate() -> Mapping[str, Any]:
        return {**evaluate_now(model, images, context), "quality": quality(model)}

    return bench.surroundings(title, context, evaluate=evaluate, keep_best="quality", tolerance=tolerance)


def spread(n_images: int, most: int) -> NDArray[np.int64]:
    """Rows of at most `most` images, at even steps over the set."""
    return np.linspace(0, n_images - 1, min(n_images, most)).astype(np.int64)


def evaluate_now(
    model: ClusterModel, images: ImageSet, context: Context, seen: Predictions | None = None
) -> Mapping[str, Any]:
    """Scores where labels are known, agreement with held-out constraints, warnings; `seen` saves a pass over images."""
    target = context.held_out if context.held_out is not None else images
    predictions = seen if seen is not None and target is images else predict(model, target)
    values: dict[str, Any] = {"mean_confidence": float(predictions.confidence.mean())}
    if target.labels is not None:
        values |= scores(target.labels, predictions)
    if context.held_out_constraints is not None:
        values |= agreement(context.held_out_constraints, predictions)
    if warnings := collapse_warnings(predictions):
        values["warnings"] = warnings
    return values
