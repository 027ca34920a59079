"""The paper's two upper bounds, which learn from the labels of all images."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice, evaluate_now, prepare
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.batches import LabelBatch, Shuffled, derive_seed
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import all_pairs_loss

__all__ = ["fully_constrained", "supervised"]

Network = Callable[..., Tensor]


def fully_constrained(
    model: ClusterModel,
    images: ImageSet,
    *,
    images_per_step: int = 400,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained by the MCL on all pairs of each batch, linked as the labels say; no self-pairs."""

    def loss(network: Network, batch: LabelBatch) -> dict[str, Tensor]:
        p = network(batch.images).float().softmax(-1)
        links = (batch.label[:, None] == batch.label[None, :]).float()
        everything = torch.ones_like(batch.label, dtype=torch.bool)
        return {"constrained": all_pairs_loss(p, links, everything, self_pairs=False)}

    next_batch, watch = _prepare("fully_constrained", model, images, images_per_step, settings, views, context)
    return Trained(model, fit(model, next_batch, loss, settings, **watch))


def supervised(
    model: ClusterModel,
    images: ImageSet,
    *,
    images_per_step: int = 400,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained by cross-entropy on the labels of all images."""

    def loss(network: Network, batch: LabelBatch) -> dict[str, Tensor]:
        return {"supervised": F.cross_entropy(network(batch.images).float(), batch.label)}

    if images.labels is not None and int(images.labels.max()) >= model.config.n_clusters:
        raise InputError(f"supervised: {int(images.labels.max()) + 1} classes for {model.config.n_clusters} outputs")
    next_batch, watch = _prepare("supervised", model, images, images_per_step, settings, views, context)
    return Trained(model, fit(model, next_batch, loss, settings, **watch))


def _prepare(
    title: str,
    model: ClusterModel,
    images: ImageSet,
    images_per_step: int,
    settings: TrainSettings,
    views: ViewChoice,
    context: Context,
) -> tuple[Callable[[int], LabelBatch], dict[str, Any]]:
    """The batch of step t, weak views of any images with their labels, and the other arguments of `fit`."""
    if images.labels is None:
        raise InputError(f"{title} needs the label of every image and the set has none; use class folders")
    bench = prepare(model, images, settings)
    rows = Shuffled(len(images), images_per_step, derive_seed(settings.seed, "images"), bench.device)
    labels, view = torch.from_numpy(images.labels.copy()).to(bench.device), views.pair(images)

    def next_batch(step: int) -> LabelBatch:
        chosen = rows(step)
        return LabelBatch(bench.maker(view, bench.store.take(chosen), step, "images"), labels[chosen])

    evaluate = partial(evaluate_now, model, images, context)
    return next_batch, {"title": title, "evaluate": evaluate, **bench.surroundings(context)}
