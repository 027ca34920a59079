"""Answers carried along neighbours: a cluster head from a few groups of known images, in seconds."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from constraintmatch.constraints import Constraints
from constraintmatch.errors import InputError
from constraintmatch.evaluation import predict
from constraintmatch.images import ImageSet
from constraintmatch.methods.linear_heads import REPEATED, regression_head
from constraintmatch.methods.neighbours import nearest_neighbours
from constraintmatch.methods.preparation import Job, Trained, ViewChoice, evaluate_now, prepare, spread
from constraintmatch.models import ClusterModel, with_head
from constraintmatch.propagation import carried, known_groups, neighbour_graph, seeds
from constraintmatch.training import TrainSettings

__all__ = ["propagate", "told_head"]

NEVER = -1e3  # bias of a cluster that nothing is known of


def propagate(
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints,
    *,
    n_neighbours: int = 20,
    reach: float = 0.99,
    most_images: int = 50_000,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008, ARG001 (frozen; every method takes it)
    job: Job = Job(),  # noqa: B008 (frozen)
) -> Trained:
    """A model whose head repeats what the constraints' groups say, carried to all images; the backbone stays as it is.

    Made for answers to "which of these?", which gather in one group for each kind. Where they tell fewer than two
    groups apart (pairs drawn at random), the model stays as it was. At most `most_images` images carry, those of the
    groups among them; of small sets each has fewer neighbours, a quarter of what a cluster has on average.
    """
    if n_neighbours < 1:
        raise InputError(f"n_neighbours is {n_neighbours}; propagate needs one at least")
    device = prepare(model, images, settings).device
    if constraints.n_images != len(images):
        raise InputError(f"the constraints are over {constraints.n_images:,} images, not {len(images):,}")
    groups = known_groups(constraints, model.config.n_clusters)
    if len(groups) < 2:
        said = "propagate: the pairs tell no two groups apart; the model is kept as it was"
        job.reporter.say(said)
        return Trained(model, [{"step": 0, "kind": "evaluation", "warnings": [said], "seconds": 0.0}])
    rows = np.union1d(np.concatenate(groups), spread(len(images), most_images))
    seen = predict(model, images.take(rows), features=True, device=device)
    assert seen.features is not None
    few = max(1, len(rows) // (4 * model.config.n_clusters))
    near = nearest_neighbours(seen.features, min(n_neighbours, few), device=device)
    graph = neighbour_graph(seen.features, near)
    inside = [np.searchsorted(rows, group) for group in groups]
    placed = with_head(model, *told_head(seen.features, seen.probabilities, inside, graph, reach=reach))
    entry = {"step": 1, "kind": "evaluation", **evaluate_now(placed, images, job), "seconds": 0.0}
    return Trained(placed, [{**entry, "groups": len(groups), "known": int(sum(map(len, groups)))}])


def told_head(
    features: NDArray[np.float32],
    probabilities: NDArray[np.float32],
    groups: Sequence[NDArray[np.int64]],
    graph: csr_array,
    *,
    reach: float = 0.99,
) -> tuple[Tensor, Tensor]:
    """Weights (k, d) and biases (k,) that repeat what two groups or more say of all images.

    features (n, d) and probabilities (n, k) are the model's, graph (n, n) the `neighbour_graph` of the features. A
    cluster that no answer is about and that has no image either stays empty.
    """
    begun = seeds(groups, probabilities)
    shares = carried(graph, begun, reach=reach)
    reached = np.flatnonzero(shares.max(1) > 0)
    chosen = np.union1d(np.flatnonzero(begun.max(1) > 0), reached[spread(len(reached), REPEATED)])
    used, clusters = np.unique(shares[chosen].argmax(1), return_inverse=True)
    weight, bias = regression_head(features[chosen], clusters.astype(np.int64), len(used))
    all_weights = torch.zeros(probabilities.shape[1], features.shape[1])
    all_biases = torch.full((probabilities.shape[1],), NEVER)
    all_weights[used], all_biases[used] = weight, bias
    return all_weights, all_biases
