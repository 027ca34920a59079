"""ProPos: BYOL with clusters. Predictions begin around an image's features, and prototypes of clusters keep apart."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.angular import spherical_k_means
from constraintmatch.methods.preparation import (
    Bench,
    Context,
    Trained,
    ViewChoice,
    check_clusters,
    check_positive,
    check_shares,
)
from constraintmatch.methods.pretext import Follow, OnlineAndTarget, Scatter, bootstrap
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.loop import TrainSettings

PROPOS_SETTINGS = TrainSettings(lr=0.2, weight_decay=5e-4, schedule="cosine-warm")  # as BYOL
EVERY = 5  # epochs between two clusterings: each epoch, as published, costs a pass over the images
SEEN = 1_000  # images in a batch of that pass


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
    settings: TrainSettings = PROPOS_SETTINGS,
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
    check_shares(warm_up=warm_up)
    for name, value in {"prototype_weight": prototype_weight, "noise": noise}.items():
        if not 0 <= value < float("inf"):
            raise InputError(f"{name} is {value}; it must be 0 or more")
    check_positive(temperature=temperature)
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
