"""Label spreading along neighbours: a cluster head from a few groups of known images, in seconds."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.propagation import (
    check_reach,
    find_hidden,
    known_groups,
    neighbour_graph,
    seeds,
    spread_labels,
)
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions, embed, nearest_neighbours
from constraintmatch.methods.heads import REPEATED, correct_head, part_head
from constraintmatch.methods.preparation import (
    Context,
    Trained,
    ViewChoice,
    check_least,
    evaluate_now,
    keep_model,
    prepare,
    spread,
)
from constraintmatch.models.cluster_model import ClusterModel, mean_head, with_head
from constraintmatch.training.loop import TrainSettings

NEARER = 5  # the shorter reach has this many times fewer steps
SHORT = 0.95  # a reach for a first look
JUDGED = 10_000  # both reaches are tried up to this many images; with more it takes minutes
PARTS, FEW = 5, 2  # parts of the images by how sure the model is, and images of each for which the model is believed
SURELY = 0.015  # the share of all images that must be gained: questions are about hard ones, and few say little
CHANCE = 4.5  # known images that the gain must be worth: of few, one or two more are found by chance
KNOWN = 0.5  # the answers lead if they separate at least this share of the kinds
IMPLIED = 0.5  # pairs are answers to questions if they have at least this share of the must-links that groups imply
EACH = 2  # or this many must-links for each known image: a draw of a large closure has them, pairs at random have not
CONTROLLED = 0.25  # of what spreading changes where the groups say nothing new: more costs what they do say
LOST = 0.1  # a model that gives a kind less than this share of what the groups give it has lost it
SURER = 1.0  # times the root of the images in question, by which more must be found by firm groups than by clusters
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
    """A model whose head repeats what the groups of the constraints say, spread to all images; the backbone stays.

    It is made for answers to "which of these?", which give one group for each kind. If the pairs separate fewer than
    two groups (pairs at random), the model stays unchanged. Labels spread over at most `most_images` images, with those
    of the groups among them; a million takes minutes (docs/speed.md). In small sets an image has fewer neighbours: a
    tenth of the mean size of a cluster. `reach` is how far labels spread at most: with up to 10,000 images, known ones
    decide between it and a fifth of its steps.
    """
    check_least("propagate", n_neighbours=(n_neighbours, 1), most_images=(most_images, 2))
    check_reach(reach)
    device = prepare(model, images, settings).device
    if constraints.n_images != len(images):
        raise InputError(f"the constraints are over {constraints.n_images:,} images, not {len(images):,}")
    groups = known_groups(constraints)
    if len(groups) < 2:
        return keep_model(model, "propagate: the pairs separate no two groups; the model is unchanged", context)
    rows = choose_rows(groups, len(images), most_images)
    inside = [np.searchsorted(rows, group) for group in groups]
    frozen = Frozen.of(model, images.take(rows), device=device)
    frozen.say = context.reporter.say
    placed = teach_groups(model, frozen, inside, n_neighbours=n_neighbours, reach=reach, most_images=len(rows))
    seen = Predictions(frozen.probabilities(placed)) if len(rows) == len(images) else None
    entry = {"step": 1, "kind": "evaluation", **evaluate_now(placed, images, context, seen), "seconds": 0.0}
    return Trained(placed, [{**entry, "groups": len(groups), "known": int(sum(map(len, groups)))}])


class Frozen:
    """The features that an unchanging backbone gives the images: one pass over them, for any number of heads."""

    def __init__(self, features: NDArray[np.float32], *, device: torch.device | str = "cpu") -> None:
        self.features, self.device = features, device
        self.say: Callable[[str], None] | None = None  # gets the recall where neighbours are not exact
        self._graph: tuple[int, csr_array] | None = None  # the last one, and its number of neighbours
        self._part: tuple[NDArray[np.int64], Frozen] | None = None  # the last one, and its rows

    @classmethod
    def of(cls, model: ClusterModel, images: ImageSet, *, device: torch.device | str | None = None) -> "Frozen":
        """The features that the model's backbone gives the images; `device` None is its own."""
        place = model.device if device is None else device
        return cls(embed(model, images, device=place), device=place)

    def __len__(self) -> int:
        return len(self.features)

    def probabilities(self, model: ClusterModel) -> NDArray[np.float32]:
        """What a model with this backbone predicts for the images (n, k)."""
        assert model.head is not None
        weight, bias = (part.detach().float().cpu() for part in (model.head.weight, model.head.bias))
        return (torch.from_numpy(self.features) @ weight.T + bias).softmax(-1).numpy()

    def graph(self, n_neighbours: int) -> csr_array:
        """The `neighbour_graph` of the features."""
        if self._graph is None or self._graph[0] != n_neighbours:
            near = nearest_neighbours(self.features, n_neighbours, device=self.device, say=self.say)
            self._graph = n_neighbours, neighbour_graph(self.features, near)
        return self._graph[1]

    def spread(self, groups: Sequence[NDArray[np.int64]], probabilities: NDArray[np.float32]) -> NDArray[np.float32]:
        """What groups say about all images (n, k), along neighbours; what the model says where they do not reach."""
        graph = self.graph(_count_neighbours(*probabilities.shape))
        shares = spread_labels(graph, seeds(groups, probabilities), reach=SHORT)
        total = shares.sum(1, keepdims=True)
        return np.where(total > 0, shares / np.maximum(total, 1e-30), probabilities).astype(np.float32)

    def take(self, rows: NDArray[np.int64]) -> "Frozen":
        """Some of the images, in rising order."""
        if len(rows) == len(self):
            return self
        if self._part is None or not np.array_equal(self._part[0], rows):
            self._part = rows, Frozen(self.features[rows], device=self.device)
        return self._part[1]


def teach_groups(
    model: ClusterModel,
    frozen: Frozen,
    groups: Sequence[NDArray[np.int64]],
    *,
    n_neighbours: int = 20,
    reach: float = 0.99,
    most_images: int = 50_000,
    informed: ClusterModel | None = None,
) -> ClusterModel:
    """The model with a head that repeats what two groups or more say about the images, spread along neighbours.

    With an `informed` model it is careful, unless most images are known. If the model places images nearly as well as
    known ones, hidden in turn, place each other (`_gain`), the head is half of the result; the other half are the model
    and the informed one, if that has kept each kind (decisions 062, 065). What spreading itself changes is known from
    groups that say what the model says; a quarter of it is taken back (decision 064).
    """
    rows, k = choose_rows(groups, len(frozen), most_images), model.config.n_clusters
    part, inside = frozen.take(rows), [np.searchsorted(rows, group) for group in groups]
    probabilities = part.probabilities(model)
    graph, nearer = part.graph(_count_neighbours(len(rows), k, n_neighbours)), 1 - NEARER * (1 - reach)
    clearer = probabilities if informed is None else part.probabilities(informed)
    begun, hide = [seeds(inside, clearer)], informed is not None or len(rows) <= JUDGED
    if informed is not None and informed is not model:
        begun.append(seeds(inside, probabilities))
    if hide and not begun[0][np.concatenate(inside)].any(1).all():  # a group without a cluster: mistaken, or rare
        numbers = _firmest_and_largest(graph, inside, k, nearer if nearer >= 0 else reach)
        begun += [seeds(inside, clearer, some) for some in numbers]
    reaches = (nearer, reach) if len(rows) <= JUDGED and nearer >= 0 else (reach,)
    ways = [(first, _placed(first, inside), one) for first in begun for one in reaches]
    tried = [find_hidden(graph, *way) for way in ways] if hide else [np.empty(0, bool)]
    doubt = [SURER * np.sqrt(len(np.setxor1d(way[1], ways[0][1]))) for way in ways]
    best = int(np.argmax([hits.sum() - less for hits, less in zip(tried, doubt, strict=True)]))
    (first, known, best_reach), hits = ways[best], tried[best]
    shares, clusters = spread_labels(graph, first, reach=best_reach), first[known].argmax(1)
    most = 2 * len(known) > len(rows)  # then the answers are right; with few, neighbours correct a wrong group
    if most:
        shares[known] = first[known]
    taught = _repeat(model, part.features, shares, known)
    if informed is None or most:
        return taught
    gained = _gain(probabilities, shares, known, hits, clusters) >= max(SURELY, CHANCE / len(known))
    seen, every = probabilities.argmax(1), np.concatenate(inside)
    as_seen = sorted((every[seen[every] == cluster] for cluster in np.unique(seen[every])), key=len, reverse=True)
    control = teach_groups(model, part, as_seen, n_neighbours=n_neighbours, reach=reach, most_images=len(rows))
    by_groups, by_informed = (np.bincount(one.argmax(1), minlength=k) for one in (part.probabilities(taught), clearer))
    other = model if (by_informed < LOST * by_groups).any() else informed
    return correct_head(taught if gained else mean_head([taught, taught, other, model]), model, control, CONTROLLED)


def _repeat(
    model: ClusterModel, features: NDArray[np.float32], shares: NDArray[np.float32], known: NDArray[np.int64]
) -> ClusterModel:
    """The model with a head that repeats the largest of the shares (n, k); the model itself if all have the same.

    A known image counts as much as others on average, and each of them by how clearly its neighbours place it: between
    two kinds, what was spread is a guess. A cluster without answers and without images stays empty.
    """
    reached = np.flatnonzero(shares.max(1) > 0)
    chosen = np.union1d(known, reached[spread(len(reached), REPEATED)])
    sure, given = _margins(shares[chosen]), np.isin(chosen, known)
    if not given.all():
        sure /= max(float(sure[~given].mean()), 1e-9)
    sure[given] = 1.0
    head = part_head(features[chosen], shares[chosen].argmax(1), shares.shape[1], sure)
    return model if head is None else with_head(model, *head)


def _count_neighbours(n: int, k: int, most: int = 20) -> int:
    """The neighbours of an image: a tenth of a cluster, or five if a quarter is as much (docs/findings.md)."""
    return min(most, max(1, min(int(n / k / 4), max(LEAST_NEAR, int(n / k / 10)))))


def _firmest_and_largest(
    graph: csr_array, groups: Sequence[NDArray[np.int64]], k: int, reach: float
) -> list[NDArray[np.int64]]:
    """The numbers of k groups: those of which most images, hidden in turn, are found by the rest, and the largest."""
    number, alone = np.repeat(np.arange(len(groups)), [len(rows) for rows in groups]), np.concatenate(groups)
    size, first = np.bincount(number), np.zeros((graph.shape[0], len(groups)), np.float32)
    first[alone, number] = 1 / size[number]
    found = np.bincount(number, find_hidden(graph, first, alone, reach), minlength=len(groups))
    return [np.sort(np.argsort(-by, kind="stable")[:k]) for by in (found, size)]


def _placed(first: NDArray[np.float32], groups: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The images of the groups that have a cluster in `first` (n, k): of more groups than clusters, some have none."""
    known: NDArray[np.int64] = np.concatenate(groups)
    return np.asarray(known[first[known].max(1) > 0])


def answers_lead(pairs: Constraints, n_clusters: int) -> bool:
    """Whether the pairs are answers that separate enough kinds to teach a head.

    Answers to questions come with all that they imply. Pairs at random do not, and teach a head less.
    """
    groups = known_groups(pairs)
    if are_few(groups, n_clusters):
        return False
    known = np.concatenate(groups)
    inside = np.isin(pairs.left, known) & (pairs.link > 0.5)
    implied = sum(len(rows) * (len(rows) - 1) // 2 for rows in groups)
    return bool(inside.sum() >= min(IMPLIED * implied, EACH * len(known)))


def are_few(groups: Sequence[NDArray[np.int64]], n_clusters: int) -> bool:
    """Whether groups separate so few kinds that a head of theirs would divide all images among those."""
    return len(groups) < max(2, KNOWN * n_clusters)


def _margins(shares: NDArray[np.float32]) -> NDArray[np.float64]:
    """By how much the largest share of each image (n, k) is above the next one, of all its shares."""
    second, first = np.sort(shares / shares.sum(1, keepdims=True), axis=1)[:, -2:].T
    return np.asarray(first - second, np.float64)


def _gain(
    probabilities: NDArray[np.float32],
    shares: NDArray[np.float32],
    known: NDArray[np.int64],
    hits: NDArray[np.bool_],
    clusters: NDArray[np.int64],
) -> float:
    """How many images more, as a share of all, are right by the shares (n, k) than by the model's probabilities (n, k).

    The known images are right by the shares. Questions are about images that the model is unsure of, so for the others
    the known ones alone would favour any change. The images are parted by how sure the model is, and each part counts
    alike: by its known images (their hidden hits against the model's), and a few more for which the model is as often
    right as for all known ones, and the shares where both agree.
    """
    before, sure = probabilities.argmax(1), probabilities.max(1)
    part, order = np.empty(len(sure), np.int64), np.lexsort((np.random.default_rng(0).permutation(len(sure)), sure))
    part[order] = np.arange(len(sure)) * PARTS // len(sure)  # equally sure images are in any part
    right = before[known] == clusters
    other = np.setdiff1d(np.arange(len(sure)), known)
    moved = np.bincount(part[other], (shares.argmax(1) != before)[other], minlength=PARTS)
    changed = moved / np.maximum(np.bincount(part[other], minlength=PARTS), 1)
    n, better = (np.bincount(part[known], values, minlength=PARTS) for values in (None, hits * 1.0 - right))
    of_others = ((better - FEW * right.mean() * changed) / (n + FEW)).mean()
    return float((len(other) * of_others + (~right).sum()) / len(sure))


def choose_rows(groups: Sequence[NDArray[np.int64]], n_images: int, most: int) -> NDArray[np.int64]:
    """The images that labels spread over, in rising order: those of the groups, and others up to about `most`."""
    return np.union1d(np.concatenate(groups), spread(n_images, most))
