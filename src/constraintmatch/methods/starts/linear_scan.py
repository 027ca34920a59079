"""A cluster head by SCAN's loss on frozen features: seconds, no rate to tune, and better than k-means."""

import math

import torch
from torch import Tensor

from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed, nearest_neighbours
from constraintmatch.methods.parts.linear_heads import best_linear_head, head_losses, steady_head
from constraintmatch.methods.parts.preparation import (
    Context,
    Trained,
    ViewChoice,
    check_clusters,
    check_least,
    evaluate_now,
    prepare,
    spread,
)
from constraintmatch.models.cluster_model import ClusterModel, with_head
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.loop import TrainSettings

__all__ = ["linear_scan"]


def linear_scan(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    n_tries: int = 40,
    n_neighbours: int = 20,
    entropy_weight: float = 5.0,
    most_images: int = 50_000,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008, ARG001 (frozen; every method takes it)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model whose head repeats what the best eighth of `n_tries` linear ones, by SCAN's loss, agree on.

    The backbone stays as it is. A head that the model has already is kept if its loss is lower than all of theirs.
    Neighbours are mined in the features of at most `most_images` images; of small sets each image gets fewer of them, a
    quarter of what a cluster has on average.
    """
    check_clusters(n_clusters, images)
    check_least("linear_scan", n_tries=(n_tries, 1), n_neighbours=(n_neighbours, 1), most_images=(most_images, 2))
    device = prepare(model, images, settings, need_clusters=False).device
    sample = images.take(spread(len(images), most_images))
    few = max(1, len(sample) // (4 * n_clusters))
    features = embed(model, sample, device=device)
    near = torch.from_numpy(nearest_neighbours(features, min(n_neighbours, few), device=device)).to(device)
    inputs = torch.from_numpy(features).to(device)
    best = best_linear_head(
        inputs,
        near,
        n_clusters,
        n_heads=n_tries,
        entropy_weight=entropy_weight,
        seed=derive_seed(settings.seed, "head"),
    )
    own, new = _own_loss(model, n_clusters, inputs, near, entropy_weight), float(best.losses.min())
    if own < new:
        context.reporter.say(
            f"linear_scan: the head that was there has the lower loss ({own:.3f}, not {new:.3f}) and is kept"
        )
    placed = model if own < new else with_head(model, *steady_head(inputs, best))
    entry = {"step": 1, "kind": "evaluation", **evaluate_now(placed, images, context), "seconds": 0.0}
    return Trained(placed, [entry])


def _own_loss(model: ClusterModel, n_clusters: int, inputs: Tensor, near: Tensor, entropy_weight: float) -> float:
    """SCAN's loss of the head that the model has; infinite without one for this many clusters."""
    if model.head is None or model.config.n_clusters != n_clusters:
        return math.inf
    weight, bias = (getattr(model.head, name).detach().to(inputs)[None] for name in ("weight", "bias"))
    return float(head_losses(inputs, near, weight, bias, entropy_weight=entropy_weight))
