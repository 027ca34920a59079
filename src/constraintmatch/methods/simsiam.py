"""SimSiam: features that foretell what the same network sees in another view; neither a teacher nor a contrast."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from constraintmatch.batches import Shuffled, Views, derive_seed
from constraintmatch.errors import InputError
from constraintmatch.images import ImageSet
from constraintmatch.methods.preparation import Job, Trained, ViewChoice, check_least, prepare
from constraintmatch.models import ClusterModel, with_projection
from constraintmatch.objectives import cosine_loss
from constraintmatch.training import TrainSettings, fit

__all__ = ["SIMSIAM_SETTINGS", "Siamese", "simsiam"]

SIMSIAM_SETTINGS = TrainSettings(lr=0.06, weight_decay=5e-4, schedule="cosine")  # the paper's for CIFAR-10


class Siamese(nn.Module):
    """Images to predictions and projections (2, n, d): BYOL's online network, which is its own target.

    As in the paper's CIFAR network the projections are standardised, and the predictor is narrow: four times.
    """

    def __init__(self, model: ClusterModel, projection: int) -> None:
        super().__init__()
        self.model = model
        inner = max(1, projection // 4)
        self.projector = nn.Sequential(
            *_hidden(model.width, projection),
            nn.Linear(projection, projection, bias=False),
            nn.BatchNorm1d(projection, affine=False),
        )
        self.predictor = nn.Sequential(*_hidden(projection, inner), nn.Linear(inner, projection))

    def forward(self, images: Tensor) -> Tensor:
        projection = cast(Tensor, self.projector(self.model.features(images)))
        return torch.stack((self.predictor(projection), projection))


def simsiam(
    model: ClusterModel,
    images: ImageSet,
    *,
    epochs: int = 500,
    images_per_step: int = 512,
    projection: int = 2048,
    settings: TrainSettings = SIMSIAM_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    job: Job = Job(),  # noqa: B008 (frozen)
) -> Trained:
    """A model whose backbone was trained by SimSiam, without a head; the given one is left as it is.

    The loss is BYOL's, 2 − 2 cos(q(z(v)), z(v')) over both views as v, where z(v') of the same pass has no gradient: no
    second network, and a step costs what SimCLR's does. Projector and predictor stay behind: neighbours and k-means are
    found in the features. The learning rate is for 512 images a step and is scaled to the batch that is used. The steps
    follow from `epochs`.
    """
    _check_arguments(len(images), epochs, images_per_step, projection)
    bench = prepare(model, images, settings, need_clusters=False)
    rows = Shuffled(len(images), images_per_step, derive_seed(settings.seed, "images"), bench.device)
    settings = replace(settings, steps=epochs * rows.steps_per_epoch, lr=settings.lr * rows.batch / 512)
    trained = with_projection(model, 0)
    network = _seeded(trained, projection, derive_seed(settings.seed, "projection"))
    view = views.contrastive(images)

    def next_batch(step: int) -> Views:
        chosen = rows(step)
        pixels = bench.store.take(chosen)
        return Views(bench.maker(view, pixels, step, "first"), bench.maker(view, pixels, step, "second"), chosen)

    def loss(network: Callable[..., Tensor], batch: Views) -> dict[str, Tensor]:
        prediction, projection = network(torch.cat((batch.weak, batch.strong))).unbind()
        partner = projection.detach().roll(len(batch.weak), 0)  # of the first views the second ones, and back
        return {"prediction": cosine_loss(prediction, partner)}

    log = fit(
        network,
        next_batch,
        loss,
        settings,
        title="simsiam",
        run=job.run,
        prefetch=bench.prefetch,
        reporter=job.reporter,
        stop=job.stop,
    )
    return Trained(trained, log)


def _check_arguments(n_images: int, epochs: int, images_per_step: int, projection: int) -> None:
    if n_images < 4:
        raise InputError(f"simsiam compares images with their batch and needs at least 4; there are {n_images}")
    check_least("simsiam", epochs=(epochs, 1), images_per_step=(images_per_step, 4), projection=(projection, 2))


def _seeded(model: ClusterModel, projection: int, seed: int) -> Siamese:
    with torch.random.fork_rng(devices=[]):  # layers draw from the global generator; nobody else's draw may change
        torch.manual_seed(seed)
        return Siamese(model, projection)


def _hidden(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()
