"""ProPos: BYOL with clusters. Predictions begin around an image's features, and prototypes of clusters keep apart."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.preparation import Bench, Context, Trained, ViewChoice, check_clusters, check_shares
from constraintmatch.methods.pretext import Follow, OnlineAndTarget, Scatter, bootstrap
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.loop import TrainSettings

__all__ = ["propos", "spherical_k_means"]

PROPOS_SETTINGS = TrainSettings(lr=0.2, weight_decay=5e-4, schedule="cosine-warm")  # as BYOL
EVERY = 5  # epochs between two clusterings: each epoch, as published, costs a pass over the images
SEEN = 1_000  # images in a batch of that pass
TRIES, TURNS = 3, 30  # fresh beginnings of k-means, and turns of each
BETTER = 1e-4  # by how much the mean cosine of a fresh one must be higher


def propos(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    prototype_weight: float = 0.1,
    temperature: float = 0.5,
    noise: float = 0.001,
    warm_up: float = 0.1,
    epochs: int = 500,
    images_per_step: int = 256,
    hidden: int = 4096,
    projection: int = 256,
    target_momentum: float = 0.99,
    predictor_rate: float = 10.0,
    settings: TrainSettings = PROPOS_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A copy of the model with a backbone trained by ProPos (Huang et al. 2022), without a head.

    It is `byol`, whose arguments it has, with two additions. A prediction begins at a point drawn around the online
    projection; `noise` is the standard deviation of each number, as a share of the projection's length. After the share
    `warm_up` of the steps the prototypes of `n_clusters` clusters keep apart, with `prototype_weight` and `temperature`
    (see `prototype_loss`). The clusters are those of spherical k-means on the target's features, every few epochs.
    """
    check_clusters(n_clusters, images)
    check_shares(warm_up=warm_up)
    for name, value in {"prototype_weight": prototype_weight, "noise": noise}.items():
        if not 0 <= value < float("inf"):
            raise InputError(f"{name} is {value}; it must be 0 or more")
    if not temperature > 0:
        raise InputError(f"temperature is {temperature}; it must be positive")
    how = Follow(epochs, images_per_step, hidden, projection, target_momentum, predictor_rate)
    regroup = partial(_regroup, n_clusters=n_clusters, seed=derive_seed(settings.seed, "clusters"))
    scatter = Scatter(n_clusters, prototype_weight, temperature, noise, warm_up, regroup, EVERY)
    return bootstrap("propos", model, images, how, scatter, settings, views, context)


def _regroup(both: OnlineAndTarget, bench: Bench, *, n_clusters: int, seed: int) -> dict[str, float]:
    """Renew the clusters of all images, in place; the share of the images that are in another one than before."""
    points = _features(both.target.model, bench, len(both.clusters))
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


@torch.no_grad()
def spherical_k_means(points: Tensor, k: int, *, seed: int, begin: Tensor | None = None) -> Tensor:
    """The clusters (n,) of points of length 1 (n, d) by k-means on the sphere: the best of a few beginnings.

    They are drawn as in k-means++; `begin` (n,), clusters from before, wins unless another one is clearly better. A
    cluster that loses all its points takes the one that fits its own least.
    """
    generator = torch.Generator().manual_seed(seed)
    found = [_settle(points, _draw_centres(points, k, generator)) for _ in range(TRIES)]
    best, tightest = max(found, key=lambda one: one[1])
    if begin is not None and bool((torch.bincount(begin, minlength=k) > 0).all()):
        again, tight = _settle(points, _centres(points, begin, k))
        best = again if tight >= tightest - BETTER * len(points) else best
    return best


def _settle(points: Tensor, centres: Tensor) -> tuple[Tensor, float]:
    """The clusters (n,) that these centres (k, d) end with, and the sum of the points' cosines to their centres."""
    for _ in range(TURNS):
        cosine, clusters = (points @ centres.mT).max(1)
        empty = torch.bincount(clusters, minlength=len(centres)) == 0
        clusters[cosine.argsort()[: int(empty.sum())]] = empty.nonzero()[:, 0]
        centres = _centres(points, clusters, len(centres))
    cosine, clusters = (points @ centres.mT).max(1)
    return clusters, float(cosine.sum())


def _centres(points: Tensor, clusters: Tensor, k: int) -> Tensor:
    return F.normalize(points.new_zeros(k, points.shape[1]).index_add_(0, clusters, points), dim=-1)


def _draw_centres(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k points, each drawn with a chance that grows with its distance to the nearest of those before."""
    first = int(torch.randint(len(points), (), generator=generator))
    chosen, far = points[first][None], 1 - points @ points[first]
    for _ in range(k - 1):
        upto = far.clamp(min=1e-9).double().cumsum(0)
        at = int(
            torch.searchsorted(upto, upto[-1] * float(torch.rand((), generator=generator))).clamp(max=len(far) - 1)
        )
        chosen, far = torch.cat((chosen, points[at][None])), torch.minimum(far, 1 - points @ points[at])
    return chosen
