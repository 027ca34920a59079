"""Features without labels: SimCLR, BYOL and ProPos.

In SimCLR two views of an image are each other's nearest. BYOL predicts what a slower copy of the network sees in
another view; no image is pushed away. ProPos is BYOL with clusters: predictions begin around an image's features, and
prototypes of clusters keep apart.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.preparation import (
    Bench,
    Context,
    Trained,
    ViewChoice,
    check_clusters,
    check_least,
    check_range,
    prepare,
)
from constraintmatch.methods.prototypes import spherical_k_means
from constraintmatch.models.cluster_model import ClusterModel, with_projection
from constraintmatch.training.batches import Shuffled, derive_seed
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import cosine_loss, nt_xent, prototype_loss
from constraintmatch.training.ranks import deviation, gather, mine
from constraintmatch.training.views import View

SIMCLR_SETTINGS = TrainSettings(lr=0.4, weight_decay=1e-4, schedule="cosine")
# Published for ResNet-18 on CIFAR: 0.1 for 512 images a step and 1,000 epochs, the same decay, a predictor ten times as
# fast. Under BatchNorm and a cosine, weights turn as far as rate · decay · steps: half the epochs, twice the rate.
# With 256 images a step it beats SimCLR in less time (results/pretext); public benchmarks have it better than with 512.
BYOL_SETTINGS = TrainSettings(lr=0.2, weight_decay=5e-4, schedule="cosine-warm")
EVERY = 5  # epochs between two clusterings of ProPos: each epoch, as published, costs a pass over the images
SEEN = 1_000  # images in a batch of that pass
PROJECTION = 128  # the width of SimCLR's projection head


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
    settings: TrainSettings = SIMCLR_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A copy of the model with a backbone trained by NT-Xent, and a projection head.

    The learning rate is for 512 images a step and is scaled to the actual batch. The steps follow from `epochs`.
    """
    if len(images) < 4:
        raise InputError(f"simclr compares images with each other and needs at least 4; there are {len(images)}")
    check_least("simclr", epochs=(epochs, 1), images_per_step=(images_per_step, 2))
    check_range("a positive number", temperature=temperature)
    bench = prepare(model, images, settings, need_clusters=False, epochs=(epochs, images_per_step))
    rows = bench.draw_rows(images_per_step)
    settings = replace(settings, steps=epochs * rows.steps_per_epoch, lr=settings.lr * rows.batch / 512)
    trained = with_projection(model, PROJECTION, seed=derive_seed(settings.seed, "projection"))
    view = views.contrastive(images)

    def next_batch(step: int) -> tuple[Tensor, Tensor]:
        return bench.two_views(view, rows(step), step)

    def loss(network: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        both = network(torch.cat(batch))
        first, second = gather(both, rows.batch, rows.batch).chunk(2)
        return {"contrast": nt_xent(first, second, temperature=temperature)}

    around = bench.surroundings("simclr", context)
    return Trained(trained, fit(Projector(trained), next_batch, loss, settings, around))


def check_batches(title: str, images: ImageSet, epochs: int, images_per_step: int) -> None:
    """An InputError without epochs, or with fewer than four images in all or in a step: BatchNorm is of no use then."""
    if len(images) < 4:
        raise InputError(f"{title} compares images with their batch and needs at least 4; there are {len(images)}")
    check_least(title, epochs=(epochs, 1), images_per_step=(images_per_step, 4))


@dataclass(frozen=True)
class TargetBatch:
    """Two views of the same images (n, c, h, w) uint8, and the share 1 − τ () of the way that the target moves."""

    first: Tensor
    second: Tensor
    share: Tensor
    rows: Tensor | None = None  # (n,) of the images in the set
    noise: Tensor | None = None  # (2n, d) that moves the projections to points around them
    ramp: Tensor | None = None  # () the weight of the prototypes


class Follow(NamedTuple):
    """How BYOL learns, and what ProPos adds to it where there are clusters: see `byol` and `propos`."""

    epochs: int
    images_per_step: int
    hidden: int
    projection: int
    target_momentum: float
    predictor_rate: float
    n_clusters: int = 0
    prototype_weight: float = 0.0
    temperature: float = 1.0
    noise: float = 0.0
    warm_up: float = 0.0


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, share: Tensor) -> None:
    """Move the target's weights this share () of the way to the online ones: ξ ← ξ + (1 − τ)(θ − ξ), in place.

    No change at all while they are equal. The share is a tensor: a captured step reads it at each replay.
    """
    weights, leading = (tuple[Tensor, ...](side.parameters()) for side in (target, online))
    changes = torch._foreach_sub(leading, weights)
    torch._foreach_mul_(changes, share)
    torch._foreach_add_(weights, changes)


class OnlineAndTarget(nn.Module):
    """The online network with its predictor, and the target: a copy that follows it and has no gradient.

    The target's BatchNorm uses the statistics of the batch, so only its weights follow, not its buffers. `clusters` are
    those of all images, for ProPos; a checkpoint keeps them.
    """

    clusters: Tensor

    def __init__(self, model: ClusterModel, hidden: int, projection: int, n_images: int = 0) -> None:
        super().__init__()
        if n_images:
            self.register_buffer("clusters", torch.zeros(n_images, dtype=torch.int64))
        self.online = Projector(model, _perceptron(model.width, hidden, projection))
        self.predictor = _perceptron(projection, hidden, projection)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def hurry_predictor(self, times: float, weight_decay: float) -> None:
        """Let SGD move the predictor's weights as if their learning rate were this many times higher.

        This is exact, with decay and momentum: the gradient becomes times · (g + decay · w) − decay · w, and SGD adds
        the last term again. The decay matters: under BatchNorm and a cosine only the turning of weights counts, and its
        speed settles by rate · decay at any scale of the gradient.
        """

        def hurry(weight: Tensor) -> None:
            assert weight.grad is not None
            weight.grad.mul_(times).add_(weight.detach(), alpha=(times - 1) * weight_decay)

        for weight in self.predictor.parameters():
            weight.register_post_accumulate_grad_hook(hurry)  # type: ignore[no-untyped-call]

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Predictions of the online network, its projections and, without a graph, those of the target: (3, n, d).

        With `noise` (n, d) the predictions are from points around the projections. Its unit is the standard deviation
        of each number over the images: at first projections are nearly the same, and more noise would hide them.
        """
        online = self.online(images)
        around = online if noise is None else online + noise * deviation(online.detach().float())
        prediction = self.predictor(around)
        with torch.no_grad():
            target = self.target(images)
        return torch.stack((prediction, online, target))


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
    """A copy of the model with a backbone trained by BYOL, without a head. Rate and steps: see `simclr`.

    The loss is the mean of 2 − 2 cos(q(z_θ(v)), z_ξ(v')) over both views as v. The target's momentum τ goes from
    `target_momentum` to 1 on a cosine: 0.996 is for 1,000 epochs, a shorter training needs a nearer target. The
    predictor learns at `predictor_rate` times the learning rate, so that it is near its best for the current online
    network; the paper holds that this prevents a collapse. `hidden` is the width inside projector and predictor,
    `projection` that of their outputs, both as in the paper.

    Both views are SimCLR's, in one batch; the paper's are blurred or solarised too, cropped down to 8 % of the area
    instead of 20 %, and in two batches. Projector and predictor have BatchNorm, unlike the projection of a
    `ClusterModel`, so they are dropped: neighbours are found in the features.
    """
    how = Follow(epochs, images_per_step, hidden, projection, target_momentum, predictor_rate)
    return bootstrap("byol", model, images, how, settings, views, context)


def propos(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    prototype_weight: float = 0.1,
    temperature: float = 0.5,
    noise: float = 0.05,
    warm_up: float = 0.1,
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
    """A copy of the model with a backbone trained by ProPos (Huang et al. 2022), without a head.

    It is `byol`, whose arguments it has, with two additions. A prediction begins at a point drawn around the online
    projection; `noise` is its standard deviation, as a share of that over the images of a step. After the share
    `warm_up` of the steps the prototypes of `n_clusters` clusters keep apart, with `prototype_weight` and `temperature`
    (see `prototype_loss`). The clusters are those of spherical k-means on the target's features, every few epochs.
    """
    check_clusters(n_clusters, images)
    check_range("in [0, 1]", warm_up=warm_up)
    check_range("0 or more", prototype_weight=prototype_weight, noise=noise)
    check_range("a positive number", temperature=temperature)
    as_byol = (epochs, images_per_step, hidden, projection, target_momentum, predictor_rate)
    how = Follow(*as_byol, n_clusters, prototype_weight, temperature, noise, warm_up)
    return bootstrap("propos", model, images, how, settings, views, context)


def bootstrap(
    title: str,
    model: ClusterModel,
    images: ImageSet,
    how: Follow,
    settings: TrainSettings,
    views: ViewChoice,
    context: Context,
) -> Trained:
    """BYOL, with what ProPos adds if there are clusters."""
    check_batches(title, images, how.epochs, how.images_per_step)
    check_least(title, hidden=(how.hidden, 1), projection=(how.projection, 2))  # of one number only the sign is left
    check_range("in [0, 1]", target_momentum=how.target_momentum)
    check_range("a positive number", predictor_rate=how.predictor_rate)
    if settings.optimizer != "sgd" and how.predictor_rate != 1:
        problem = f"predictor_rate is {how.predictor_rate} and needs the optimizer sgd"
        raise InputError(problem, fix=f"set it to 1 for {settings.optimizer}")
    bench = prepare(model, images, settings, need_clusters=False, epochs=(how.epochs, how.images_per_step))
    rows = bench.draw_rows(how.images_per_step)
    settings = replace(settings, steps=how.epochs * rows.steps_per_epoch, lr=settings.lr * rows.batch / 512)
    trained = with_projection(model, 0)
    with torch.random.fork_rng(devices=[]):  # layers draw from the global generator; no other draw may change
        torch.default_generator.manual_seed(derive_seed(settings.seed, "projection"))
        both = OnlineAndTarget(trained, how.hidden, how.projection, len(images) if how.n_clusters else 0)
    if how.predictor_rate != 1:
        both.hurry_predictor(how.predictor_rate, settings.weight_decay)
    next_batch = _build_batches(bench, rows, views.contrastive(images), how, settings.steps)

    def loss(network: Callable[..., Tensor], batch: TargetBatch) -> dict[str, Tensor]:
        follow(
            both.target, both.online, batch.share
        )  # with the weights of the step before; part of the step, not of the network
        found = network(torch.cat((batch.first, batch.second)), batch.noise).unbind()
        prediction, online, target = (gather(part, rows.batch, rows.batch) for part in found)
        partner = target.detach().roll(rows.batch, 0)  # first views with second ones, and back
        terms = {"prediction": cosine_loss(prediction, partner)}
        if how.n_clusters:
            assert batch.ramp is not None
            clusters = both.clusters[batch.rows]
            sides = zip(online.chunk(2), partner.chunk(2), strict=True)
            # not compiled: with torch 2.11 on an H200 its compiled gradient ruins the features (docs/findings.md)
            apart = [prototype_loss(*side, clusters, how.n_clusters, how.temperature) for side in sides]
            terms["prototypes"] = batch.ramp * (apart[0] + apart[1]) / 2
        return terms

    regroup = None
    if how.n_clusters:
        settings = replace(settings, evaluate_every=EVERY * rows.steps_per_epoch)
        regroup = partial(_regroup, both, bench, how.n_clusters)
    around = bench.surroundings(title, context, evaluate=regroup)
    return Trained(trained, fit(both, next_batch, loss, settings, around))


def _build_batches(bench: Bench, rows: Shuffled, view: View, how: Follow, steps: int) -> Callable[[int], TargetBatch]:
    draw = torch.Generator(bench.device)

    def fill(value: float) -> Tensor:
        return torch.full((), value, device=bench.device)  # no copy to wait for

    def next_batch(step: int) -> TargetBatch:
        chosen, progress = rows(step), step / steps
        first, second = bench.two_views(view, chosen, step)
        share = fill(1 - momentum_at(progress, how.target_momentum))
        if not how.n_clusters:
            return TargetBatch(first, second, share)
        draw.manual_seed(derive_seed(bench.seed, "noise", step))
        n = len(chosen)
        noise = mine(how.noise * torch.randn(2 * n, how.projection, generator=draw, device=bench.device), n, n)
        ramp = fill(how.prototype_weight if progress >= how.warm_up else 0.0)
        return TargetBatch(first, second, share, chosen, noise, ramp)

    return next_batch


def momentum_at(progress: float, first: float) -> float:
    """τ = 1 − (1 − first) · (1 + cos(π t / T)) / 2: `first` at progress t / T = 0, and 1, no move, at the end."""
    return 1 - (1 - first) * (1 + math.cos(math.pi * progress)) / 2


def _regroup(both: OnlineAndTarget, bench: Bench, n_clusters: int) -> dict[str, float]:
    """Renew the clusters of all images, in place; the share of the images that are in another one than before."""
    points, seed = _features(both.target.model, bench, len(both.clusters)), derive_seed(bench.seed, "clusters")
    found = spherical_k_means(points, n_clusters, seed=seed, begin=both.clusters)
    moved = float((found != both.clusters).float().mean())
    both.clusters.copy_(found)
    return {"moved": moved}


@torch.no_grad()
def _features(model: ClusterModel, bench: Bench, n_images: int) -> Tensor:
    """The directions (n, d) of the features of all images as they are."""
    model.eval()
    with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.device.type == "cuda"):
        rows = torch.arange(n_images, device=bench.device).split(SEEN)  # type: ignore[no-untyped-call]
        parts = [F.normalize(model.features(bench.store.take(part)).float(), dim=-1) for part in rows]
    model.train()
    return torch.cat(parts)


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )
