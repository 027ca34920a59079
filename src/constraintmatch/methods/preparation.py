"""What every method needs before its first step: views, the device and its images, and what is watched."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from constraintmatch import views
from constraintmatch.batches import ImageStore, ViewMaker, derive_seed
from constraintmatch.constraints import Constraints
from constraintmatch.errors import InputError
from constraintmatch.evaluation import agreement, collapse_warnings, predict, scores
from constraintmatch.images import ImageSet
from constraintmatch.models import ClusterModel
from constraintmatch.progress import Quiet, Reporter
from constraintmatch.runs import RunFolder
from constraintmatch.training import TrainSettings, choose_device
from constraintmatch.views import View

__all__ = ["Bench", "Job", "Trained", "ViewChoice", "check_images", "evaluate_now", "prepare"]


@dataclass(frozen=True)
class ViewChoice:
    """Which views are safe for the images: no flips for digits, fewer operations, or a user's own functions."""

    flip: bool = True
    without: tuple[str, ...] = ()
    own_weak: View | None = None
    own_strong: View | None = None
    own_contrastive: View | None = None

    def weak(self) -> View:
        return self.own_weak or views.weak(flip=self.flip)

    def pair(self) -> View:
        return self.own_weak or views.crop(flip=self.flip)

    def strong(self) -> View:
        return self.own_strong or views.strong(flip=self.flip, without=self.without)

    def scan_strong(self) -> View:
        return self.own_strong or views.scan_strong(flip=self.flip, without=self.without)

    def contrastive(self) -> View:
        return self.own_contrastive or views.contrastive(flip=self.flip)

    def request(self) -> dict[str, Any]:
        """The choice as plain values, for `run.json`."""
        own = {name: view.name for name in ("weak", "strong", "contrastive") if (view := getattr(self, f"own_{name}"))}
        return {"flip": self.flip, "without": sorted(self.without), **({"own": own} if own else {})}


@dataclass(frozen=True)
class Job:
    """What goes on around a training: where it is kept, who is told, what it is evaluated on."""

    run: RunFolder | None = None
    reporter: Reporter = field(default_factory=Quiet)
    held_out: ImageSet | None = None  # images to evaluate on; labels where known
    held_out_constraints: Constraints | None = None  # over the rows of held_out, or of the training images without it


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

    @property
    def prefetch(self) -> bool:
        return not self.store.resident


def prepare(model: ClusterModel, images: ImageSet, settings: TrainSettings, *, need_clusters: bool = True) -> Bench:
    """The bench for a training; images that the model was not built for are an error."""
    check_images(model, images)
    if need_clusters and model.config.n_clusters == 0:
        raise InputError(
            "this model has no cluster head: give it one with with_clusters(model, n), or train scan first"
        )
    if need_clusters and len(images) < model.config.n_clusters:
        raise InputError(
            f"{model.config.n_clusters} clusters for {len(images)} images: there must be at least one image each"
        )
    device = choose_device(settings.device)
    maker = ViewMaker(derive_seed(settings.seed, "views"), device, compile=bool(settings.resolved(device).compile))
    return Bench(device, ImageStore(images, device), maker, settings.seed)


def check_images(model: ClusterModel, images: ImageSet) -> None:
    """Images of another side or with other channels than the model's are an InputError."""
    config = model.config
    if (images.side, images.channels) != (config.side, config.channels):
        raise InputError(
            f"the model takes {config.side}×{config.side} images with {config.channels} channel(s), "
            f"these are {images.side}×{images.side} with {images.channels}; load them with --side {config.side}"
        )


def evaluate_now(model: ClusterModel, images: ImageSet, job: Job) -> Mapping[str, Any]:
    """Scores where labels are known, agreement with held-out constraints, and warnings of collapse."""
    target = job.held_out if job.held_out is not None else images
    predictions = predict(model, target)
    values: dict[str, Any] = {"mean_confidence": float(predictions.confidence.mean())}
    if target.labels is not None:
        values |= scores(target.labels, predictions)
    if job.held_out_constraints is not None:
        values |= agreement(job.held_out_constraints, predictions)
    if warnings := collapse_warnings(predictions):
        values["warnings"] = warnings
    return values
