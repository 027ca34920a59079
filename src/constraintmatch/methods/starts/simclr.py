"""SimCLR: features in which two views of an image are each other's nearest."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice, check_least, prepare
from constraintmatch.models.cluster_model import ClusterModel, with_projection
from constraintmatch.training.batches import Shuffled, Views, derive_seed
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import nt_xent

__all__ = ["SIMCLR_SETTINGS", "Projector", "simclr"]

SIMCLR_SETTINGS = TrainSettings(lr=0.4, weight_decay=1e-4, schedule="cosine")


class Projector(nn.Module):
    """Images to projections, as a pretext task needs them: by the model's own projection, or by a given projector."""

    def __init__(self, model: ClusterModel, projector: nn.Module | None = None) -> None:
        super().__init__()
        self.model, self.projector = model, projector

    def forward(self, images: Tensor) -> Tensor:
        if self.projector is None:
            return self.model.project(images)
        return cast(Tensor, self.projector(self.model.features(images)))


def simclr(
    model: ClusterModel,
    images: ImageSet,
    *,
    epochs: int = 500,
    images_per_step: int = 512,
    temperature: float = 0.1,
    projection: int = 128,
    settings: TrainSettings = SIMCLR_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A copy of the model with a backbone trained by NT-Xent, and a projection head.

    The learning rate is for 512 images a step and is scaled to the actual batch. The steps follow from `epochs`.
    """
    if len(images) < 4:
        raise InputError(f"simclr compares images with each other and needs at least 4; there are {len(images)}")
    check_least("simclr", epochs=(epochs, 1), images_per_step=(images_per_step, 2), projection=(projection, 1))
    if not temperature > 0:
        raise InputError(f"temperature is {temperature}; it must be positive")
    bench = prepare(model, images, settings, need_clusters=False)
    rows = Shuffled(len(images), images_per_step, derive_seed(settings.seed, "images"), bench.device)
    settings = replace(settings, steps=epochs * rows.steps_per_epoch, lr=settings.lr * rows.batch / 512)
    trained = with_projection(model, projection, seed=derive_seed(settings.seed, "projection"))
    view = views.contrastive(images)

    def next_batch(step: int) -> Views:
        chosen = rows(step)
        pixels = bench.store.take(chosen)
        return Views(bench.maker(view, pixels, step, "first"), bench.maker(view, pixels, step, "second"), chosen)

    def loss(network: Callable[..., Tensor], batch: Views) -> dict[str, Tensor]:
        first, second = network(torch.cat((batch.weak, batch.strong))).chunk(2)
        return {"contrast": nt_xent(first, second, temperature=temperature)}

    log = fit(Projector(trained), next_batch, loss, settings, title="simclr", **bench.surroundings(context))
    return Trained(trained, log)
