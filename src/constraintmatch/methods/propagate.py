"""Answers carried along neighbours: a cluster head from a few groups of known images, in seconds."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.propagation import (
    best_reach,
    carried,
    check_reach,
    known_groups,
    neighbour_graph,
    seeds,
)
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions, embed, nearest_neighbours
from constraintmatch.methods.parts.linear_heads import REPEATED, regression_head
from constraintmatch.methods.parts.preparation import (
    Context,
    Trained,
    ViewChoice,
    check_least,
    evaluate_now,
    prepare,
    spread,
)
from constraintmatch.models.cluster_model import ClusterModel, with_head
from constraintmatch.training.loop import TrainSettings

__all__ = ["Frozen", "propagate", "told"]

NEVER = -1e3  # bias of a cluster that nothing is known of
NEARER = 5  # times fewer steps from neighbour to neighbour, where that finds more of the known images
JUDGED = 10_000  # images up to which both reaches are tried: of more it would take minutes
LEAST_NEAR = 5  # neighbours of an image in a small set


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
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model whose head repeats what the constraints' groups say, carried to all images; the backbone stays as it is.

    Made for answers to "which of these?", which gather in one group for each kind. Where they tell fewer than two
    groups apart (pairs drawn at random), the model stays as it was. At most `most_images` images carry, those of the
    groups among them; of small sets each has fewer neighbours, a tenth of what a cluster has on average. `reach` is how
    far at most: of up to 10,000 images known ones decide between it and a fifth of its steps.
    """
    check_least("propagate", n_neighbours=(n_neighbours, 1), most_images=(most_images, 2))
    check_reach(reach)
    device = prepare(model, images, settings).device
    if constraints.n_images != len(images):
        raise InputError(f"the constraints are over {constraints.n_images:,} images, not {len(images):,}")
    groups = known_groups(constraints)
    if len(groups) < 2:
        said = "propagate: the pairs tell no two groups apart; the model is kept as it was"
        context.reporter.say(said)
        return Trained(model, [{"step": 0, "kind": "evaluation", "warnings": [said], "seconds": 0.0}])
    rows = _taking_part(groups, len(images), most_images)
    inside = [np.searchsorted(rows, group) for group in groups]
    frozen = Frozen.of(model, images.take(rows), device=device)
    placed = told(model, frozen, inside, n_neighbours=n_neighbours, reach=reach, most_images=len(rows))
    seen = Predictions(frozen.probabilities(placed)) if len(rows) == len(images) else None
    entry = {"step": 1, "kind": "evaluation", **evaluate_now(placed, images, context, seen), "seconds": 0.0}
    return Trained(placed, [{**entry, "groups": len(groups), "known": int(sum(map(len, groups)))}])


class Frozen:
    """The images as a backbone that stays as it is sees them: one pass over them, for any number of heads."""

    def __init__(self, features: NDArray[np.float32], *, device: torch.device | str = "cpu") -> None:
        self.features, self.device = features, device
        self._graph: tuple[int, csr_array] | None = None  # the last one, and its number of neighbours
        self._part: tuple[NDArray[np.int64], Frozen] | None = None  # the last one, and its rows

    @classmethod
    def of(cls, model: ClusterModel, images: ImageSet, *, device: torch.device | str | None = None) -> "Frozen":
        """What the model's backbone makes of the images; `device` None is its own."""
        place = model.device if device is None else device
        return cls(embed(model, images, device=place), device=place)

    def __len__(self) -> int:
        return len(self.features)

    def probabilities(self, model: ClusterModel) -> NDArray[np.float32]:
        """What a model with this backbone says of the images (n, k)."""
        assert model.head is not None
        weight, bias = (part.detach().float().cpu() for part in (model.head.weight, model.head.bias))
        return (torch.from_numpy(self.features) @ weight.T + bias).softmax(-1).numpy()

    def graph(self, n_neighbours: int) -> csr_array:
        """The `neighbour_graph` of the features."""
        if self._graph is None or self._graph[0] != n_neighbours:
            near = nearest_neighbours(self.features, n_neighbours, device=self.device)
            self._graph = n_neighbours, neighbour_graph(self.features, near)
        return self._graph[1]

    def take(self, rows: NDArray[np.int64]) -> "Frozen":
        """Some of the images, in rising order; all of them are this one."""
        if len(rows) == len(self):
            return self
        if self._part is None or not np.array_equal(self._part[0], rows):
            self._part = rows, Frozen(self.features[rows], device=self.device)
        return self._part[1]


def told(
    model: ClusterModel,
    frozen: Frozen,
    groups: Sequence[NDArray[np.int64]],
    *,
    n_neighbours: int = 20,
    reach: float = 0.99,
    most_images: int = 50_000,
) -> ClusterModel:
    """The model under a head that repeats what two groups or more say of the images that its backbone sees so."""
    rows = _taking_part(groups, len(frozen), most_images)
    part, inside = frozen.take(rows), [np.searchsorted(rows, group) for group in groups]
    graph = part.graph(min(n_neighbours, _few(len(rows) / model.config.n_clusters)))
    return with_head(model, *_told_head(part.features, part.probabilities(model), inside, graph, reach=reach))


def _few(size: float) -> int:
    """How many neighbours an image has at most, where a cluster has this many images on average.

    A tenth of them, but five where a quarter is as many: more lead from one kind to the next (docs/findings.md).
    """
    return max(1, min(int(size / 4), max(LEAST_NEAR, int(size / 10))))


def _taking_part(groups: Sequence[NDArray[np.int64]], n_images: int, most: int) -> NDArray[np.int64]:
    """The images that carry: those of the groups, and others up to about `most`."""
    return np.union1d(np.concatenate(groups), spread(n_images, most))


def _told_head(
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
    known = np.concatenate(groups)
    known = known[begun[known].max(1) > 0]  # of more groups than clusters some are left out
    nearer = 1 - NEARER * (1 - reach)
    if len(features) <= JUDGED and nearer >= 0:
        reach = best_reach(graph, begun, known, (nearer, reach))
    shares = carried(graph, begun, reach=reach)
    reached = np.flatnonzero(shares.max(1) > 0)
    chosen = np.union1d(known, reached[spread(len(reached), REPEATED)])
    used, clusters = np.unique(shares[chosen].argmax(1), return_inverse=True)
    weight, bias = regression_head(features[chosen], clusters.astype(np.int64), len(used))
    all_weights = torch.zeros(probabilities.shape[1], features.shape[1])
    all_biases = torch.full((probabilities.shape[1],), NEVER)
    all_weights[used], all_biases[used] = weight, bias
    return all_weights, all_biases
