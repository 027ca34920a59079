"""BYOL: features that foretell what a slower copy of the network sees in another view; no image is pushed away."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice, check_least, prepare
from constraintmatch.models.cluster_model import ClusterModel, with_projection
from constraintmatch.training.batches import Shuffled, derive_seed
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import cosine_loss

__all__ = ["BYOL_SETTINGS", "Encoder", "OnlineAndTarget", "TargetBatch", "byol", "momentum_at"]

# Published for ResNet-18 on CIFAR: 0.1 for 512 images a step and 1,000 epochs, the same decay, a predictor ten times as
# fast. Under BatchNorm and a cosine, rate · decay · steps tells how far weights turn: half the epochs, twice the rate.
# With 256 images a step it beats SimCLR in less time (results/pretext); public benchmarks have it better than with 512.
BYOL_SETTINGS = TrainSettings(lr=0.2, weight_decay=5e-4, schedule="cosine-warm")


@dataclass(frozen=True)
class TargetBatch:
    """Two views of the same images (n, c, h, w) uint8, and the share 1 − τ of the way that the target moves now ()."""

    first: Tensor
    second: Tensor
    share: Tensor


class Encoder(nn.Module):
    """Images to projections (n, d): the model's features under a projector with BatchNorm."""

    def __init__(self, model: ClusterModel, hidden: int, projection: int) -> None:
        super().__init__()
        self.model = model
        self.projector = _perceptron(model.width, hidden, projection)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.projector(self.model.features(images)))


class OnlineAndTarget(nn.Module):
    """The online network with its predictor, and the target: its copy, which follows it and has no gradient.

    The target's BatchNorm takes the statistics of the batch, so that only its weights follow, not its buffers.
    """

    def __init__(self, model: ClusterModel, hidden: int, projection: int) -> None:
        super().__init__()
        self.online = Encoder(model, hidden, projection)
        self.predictor = _perceptron(projection, hidden, projection)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def follow(self, share: Tensor) -> None:
        """Move the target's weights this share () of the way to the online ones: ξ ← ξ + (1 − τ)(θ − ξ), in place.

        Exactly nothing while they are equal. The share is a tensor: a captured step reads it anew at each replay.
        """
        weights, leading = (tuple[Tensor, ...](side.parameters()) for side in (self.target, self.online))
        changes = torch._foreach_sub(leading, weights)
        torch._foreach_mul_(changes, share)
        torch._foreach_add_(weights, changes)

    def hurry_predictor(self, times: float, weight_decay: float) -> None:
        """Let SGD move the predictor's weights as if the learning rate were this many times as high for them.

        Exactly so, decay and momentum included: the gradient comes to times · (g + decay · w) − decay · w, and SGD adds
        the last term again. The decay matters: under BatchNorm and a cosine only the turning of weights counts, which
        settles at a speed by rate · decay whatever the gradient's scale.
        """

        def hurry(weight: Tensor) -> None:
            assert weight.grad is not None
            weight.grad.mul_(times).add_(weight.detach(), alpha=(times - 1) * weight_decay)

        for weight in self.predictor.parameters():
            weight.register_post_accumulate_grad_hook(hurry)  # type: ignore[no-untyped-call]

    def forward(self, images: Tensor) -> Tensor:
        """Predictions of the online network and, without a graph, projections of the target: (2, n, d)."""
        prediction = self.predictor(self.online(images))
        with torch.no_grad():
            projection = self.target(images)
        return torch.stack((prediction, projection))


def byol(
    model: ClusterModel,
    images: ImageSet,
    *,
    epochs: int = 500,
    images_per_step: int = 256,
    hidden: int = 4096,
    projection: int = 256,
    target_momentum: float = 0.99,
    predictor_rate: float = 10.0,
    settings: TrainSettings = BYOL_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model whose backbone was trained by BYOL, without a head; the given one is left as it is.

    The loss is the mean of 2 − 2 cos(q(z_θ(v)), z_ξ(v')) over both views as v. The target's momentum τ goes from
    `target_momentum` to 1 on a cosine: 0.996 is for 1,000 epochs, a shorter training needs a nearer target. The
    predictor learns at `predictor_rate` times the learning rate, so that it is near its best for the online network of
    the moment; the paper takes that to be what prevents a collapse. `hidden` is the width inside projector and
    predictor, `projection` that of their outputs, both as in the paper.

    Both views are SimCLR's, through the networks in one batch: the paper's are blurred or solarised too, cropped down
    to 8 % of the area instead of 20 %, and go through one by one. Projector and predictor have BatchNorm, which the
    projection of a `ClusterModel` has not: they stay behind, and neighbours and k-means are found in the features. The
    learning rate is for 512 images a step and is scaled to the batch that is used. The steps follow from `epochs`.
    """
    _check_arguments(len(images), epochs, images_per_step, hidden, projection)
    _check_rates(target_momentum, predictor_rate, settings.optimizer)
    bench = prepare(model, images, settings, need_clusters=False)
    rows = Shuffled(len(images), images_per_step, derive_seed(settings.seed, "images"), bench.device)
    settings = replace(settings, steps=epochs * rows.steps_per_epoch, lr=settings.lr * rows.batch / 512)
    trained = with_projection(model, 0)
    both = _seeded(trained, hidden, projection, derive_seed(settings.seed, "projection"))
    if predictor_rate != 1:
        both.hurry_predictor(predictor_rate, settings.weight_decay)
    view = views.contrastive(images)

    def next_batch(step: int) -> TargetBatch:
        pixels = bench.store.take(rows(step))
        share = 1 - momentum_at(step / settings.steps, target_momentum)
        first, second = (bench.maker(view, pixels, step, name) for name in ("first", "second"))
        return TargetBatch(first, second, torch.full((), share, device=bench.device))  # a fill: nothing waits for it

    def loss(network: Callable[..., Tensor], batch: TargetBatch) -> dict[str, Tensor]:
        both.follow(batch.share)  # with the weights that the step before left; part of the step, not of the network
        prediction, target = network(torch.cat((batch.first, batch.second))).unbind()
        partner = target.detach().roll(len(batch.first), 0)  # of the first views the second ones, and back
        return {"prediction": cosine_loss(prediction, partner)}

    log = fit(
        both,
        next_batch,
        loss,
        settings,
        title="byol",
        run=context.run,
        prefetch=bench.prefetch,
        reporter=context.reporter,
        stop=context.stop,
    )
    return Trained(trained, log)


def momentum_at(progress: float, first: float) -> float:
    """τ = 1 − (1 − first) · (1 + cos(π t / T)) / 2: `first` at progress t / T = 0, and 1, no move, at the end."""
    return 1 - (1 - first) * (1 + math.cos(math.pi * progress)) / 2


def _check_arguments(n_images: int, epochs: int, images_per_step: int, hidden: int, projection: int) -> None:
    if n_images < 4:
        raise InputError(f"byol compares images with their batch and needs at least 4; there are {n_images}")
    check_least(
        "byol",
        epochs=(epochs, 1),
        images_per_step=(images_per_step, 4),  # BatchNorm over fewer says little
        hidden=(hidden, 1),
        projection=(projection, 2),  # one number has no direction but its sign
    )


def _check_rates(target_momentum: float, predictor_rate: float, optimizer: str) -> None:
    if not 0 <= target_momentum <= 1:
        raise InputError(f"target_momentum is {target_momentum}; it must lie between 0 and 1")
    if not 0 < predictor_rate < math.inf:
        raise InputError(f"predictor_rate is {predictor_rate}; it must be a positive number")
    if optimizer != "sgd" and predictor_rate != 1:
        raise InputError(
            f"predictor_rate is {predictor_rate}, which needs the optimizer sgd; set it to 1 for {optimizer}"
        )


def _seeded(model: ClusterModel, hidden: int, projection: int, seed: int) -> OnlineAndTarget:
    with torch.random.fork_rng(devices=[]):  # layers draw from the global generator; nobody else's draw may change
        torch.manual_seed(seed)
        return OnlineAndTarget(model, hidden, projection)


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )
