"""What pairs say about images, and how it spreads to all images. No torch.

Groups of images that must-links join become the seeds of clusters. The share of a seed reaches every image by steps
from neighbour to neighbour and shrinks with each step (label spreading, Zhou et al., 2003). The equation is solved, not
iterated.

If some pairs are wrong and a model is mostly right, belief propagation tells the kind of each image: the model's
cluster is evidence of it, and so is each pair. A wrong "same" does not join two groups, as it does in the closure.
"""

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import softmax

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import Floats, Rows, neighbours

Doubles = NDArray[np.float64]

APART = 0.5  # a group must be known to differ from at least this share of the other groups
SUREST = 0.25  # the share of a cluster's images, the surest ones, that carry what the model believes
BELIEVED = 4  # the model's belief weighs as much as this many known images of a kind (squared: it fades quickly)
SMALL = 0.5  # a group under this share of the mean size may be a mistake
FOLDS = 5  # parts of the known images, each hidden once
RELATIVE, MOST_ITERATIONS = 1e-4, 500  # of the solution by conjugate gradients
NUMBERS = 2**25  # in one array of the work on many images, 128 MiB; up to 65,536 images and 512 clusters, all at once
ROUNDS = 20  # of estimation
SWEEPS = 3  # of messages in a round
OWN, ANY = 20.0, 0.3  # images, no more than a cluster has, that say before any pair: it is its own kind, or another
EXPECTED = 0.1, 30.0  # the rate of wrong pairs that is expected before any is seen, and how many pairs that weighs
MOST_WRONG = 0.4
SUGGESTED = 0.9  # the probability of the kind that a group suggests, at first
SEEN = 0.5  # with less than this share of the probability in its likeliest cluster, a group is seen elsewhere


def known_groups(constraints: Constraints, hints: Constraints | None = None) -> list[Rows]:
    """The rows of each group of images that are known to be of one kind, the largest group first.

    A group counts if it is known to differ from half of the others that count. The largest are tried first, and all
    again until none is added. Cannot-links of `hints`, which may be less sure, count as differences too. Pairs at
    random separate hardly any groups, so they give hardly any: two groups of one kind would become two clusters.
    """
    component, cannot = constraints.component_constraints()
    size = np.bincount(component, minlength=1)
    if hints is not None:
        ends = component[np.stack([hints.left, hints.right], 1)[hints.link < 0.5]]
        cannot = np.concatenate([cannot, ends[ends[:, 0] != ends[:, 1]]])
    apart = neighbours(cannot)
    joined = np.flatnonzero(size > 1)
    order = joined[np.argsort(-size[joined], kind="stable")].tolist()
    taken: set[int] = set()
    before = -1
    while len(taken) > before:
        before = len(taken)
        for group in order:
            if group not in taken and len(taken & apart.get(group, set())) >= APART * len(taken):
                taken.add(group)
    return [np.flatnonzero(component == group) for group in order if group in taken]


def seeds(groups: Sequence[Rows], probabilities: Floats, chosen: Rows | None = None) -> Floats:
    """The share (n, k) of each cluster that begins at each image; the columns sum to 1.

    A group gets the cluster that its images are likeliest in, one group for each cluster. If there are more groups than
    clusters, some get none; `chosen` are the numbers of those that may get one. The quarter of a cluster's images that
    the model is surest of, without those of groups, take part too: alone in a cluster without a group, else with less
    weight the larger the group is. The model is more often right than two or three known images.
    """
    n, k = probabilities.shape
    numbers = _clusters_of(groups, probabilities, chosen)
    clusters, free = probabilities.argmax(1), np.ones(n, bool)
    for rows in groups:
        free[rows] = False
    first = np.zeros((n, k), np.float32)
    for cluster in range(k):
        own = np.flatnonzero(free & (clusters == cluster))
        sure = np.argsort(-probabilities[own, cluster], kind="stable")
        believed = own[sure[: max(1, round(SUREST * len(own)))]]
        known = groups[numbers[cluster]] if cluster in numbers else own[:0]
        weight = (BELIEVED / (BELIEVED + len(known))) ** 2 if len(believed) else 0.0
        first[known, cluster] = (1 - weight) / max(len(known), 1)
        first[believed, cluster] = weight / max(len(believed), 1)
    return first


def _clusters_of(groups: Sequence[Rows], probabilities: Floats, chosen: Rows | None) -> dict[int, int]:
    """The number of the group that each cluster gets.

    Groups count by the root of their size: a larger one counts more, and two small ones count more than a large one.
    A wrong "different" begins a second group of a kind, and it would take the cluster of a kind that no answer is about
    yet. So a small group that the model sees in the cluster of another group gets none, unless it was `chosen`.
    """
    k, size = probabilities.shape[1], np.array([len(rows) for rows in groups])
    seen = np.array([probabilities[rows].mean(0) for rows in groups]).reshape(-1, k)
    weight, left, going = seen * np.sqrt(size)[:, None], np.arange(len(groups)) if chosen is None else chosen, True
    while going:  # those that are left out make room for others
        found, clusters = linear_sum_assignment(weight[left], maximize=True)
        numbers = left[found]
        elsewhere = seen[numbers, clusters] < SEEN * seen[numbers].max(1)
        mistakes = numbers[elsewhere & (size[numbers] < SMALL * size.mean())]
        left, going = np.setdiff1d(left, mistakes), len(mistakes) > 0 and chosen is None
    return dict(zip(clusters.tolist(), numbers.tolist(), strict=True))


def neighbour_graph(features: Floats, near: Rows) -> sp.csr_array:
    """Weights (n, n) between images and their neighbours (n, m), normalised on both sides: D^-1/2 W D^-1/2.

    A weight falls with the cosine distance, by 1/e over the mean distance of neighbours; W is symmetric.
    """
    n, m = near.shape
    distance = np.empty((n, m), np.float32)
    length = np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    step = max(1, NUMBERS // max(1, features.shape[1]))
    for part in (slice(start, start + step) for start in range(0, n, step)):
        unit = features[part] / length[part]
        for column in range(m):
            other = near[part, column]
            distance[part, column] = 1 - np.einsum("nd,nd->n", unit, features[other] / length[other])
    weight = np.exp(-distance / max(float(distance.mean()), 1e-12)).astype(np.float32)
    small = np.int32 if n * m <= np.iinfo(np.int32).max else np.int64
    ends = np.arange(0, n * m + 1, m, dtype=small)
    one_way = sp.csr_array((weight.ravel(), near.ravel().astype(small), ends), shape=(n, n))
    one_way.sum_duplicates()
    both = sp.csr_array(one_way.maximum(one_way.T))
    root = (1 / np.sqrt(np.maximum(both.sum(1), 1e-12))).astype(np.float32)
    both.data *= np.repeat(root, np.diff(both.indptr))
    both.data *= root[both.indices]
    return both


def check_reach(reach: float) -> None:
    """An InputError if the reach is not in [0, 1): the shares would grow without end."""
    if not 0 <= reach < 1:
        raise InputError(f"reach is {reach}; it must be in [0, 1)")


def spread_labels(graph: sp.csr_array, first: Floats, *, reach: float = 0.99) -> Floats:
    """The shares (n, k) of the clusters at each image; a row stays zero if no path leads to it from a seed.

    They solve F = reach · graph · F + first. Where kinds are connected, one column could win everywhere by its mass
    alone, so all columns get the same mass before the rows are scaled to sum to 1. Large clusters lose nothing: a
    separate cluster has the same mass at any size.
    """
    check_reach(reach)
    found, step = np.empty_like(first), max(1, NUMBERS // max(1, len(first)))
    for start in range(0, first.shape[1], step):  # columns do not depend on each other
        columns = slice(start, start + step)
        found[:, columns] = np.maximum(_solve(graph, np.ascontiguousarray(first[:, columns]), reach), 0)
    mass = found.sum(0)
    found /= np.where(mass > 0, mass, 1)
    return np.asarray(found / np.where(found.sum(1) > 0, found.sum(1), 1)[:, None], np.float32)


def _solve(graph: sp.csr_array, first: Floats, reach: float) -> Floats:
    """F (n, m) of F = reach · graph · F + first: conjugate gradients, all columns in one product."""
    found, rest = np.zeros_like(first), first.copy()
    direction, square = rest.copy(), (rest**2).sum(0)
    enough = RELATIVE**2 * square
    for _ in range(MOST_ITERATIONS):
        if (square <= enough).all():
            break
        image = direction - np.float32(reach) * (graph @ direction)
        step = square / np.maximum((direction * image).sum(0), 1e-30)
        found += step * direction
        rest -= step * image
        before, square = square, (rest**2).sum(0)
        direction = rest + square / np.maximum(before, 1e-30) * direction
    return found


def find_hidden(graph: sp.csr_array, first: Floats, known: Rows, reach: float) -> NDArray[np.bool_]:
    """Which known images, a fifth of them hidden at a time, the others find in their cluster.

    `known` (m,) are rows with a share in `first` (n, k), ordered by kind.
    """
    part, truth, found = np.arange(len(known)) % FOLDS, first[known].argmax(1), np.zeros(len(known), bool)
    for number in range(FOLDS):
        hidden, rest = known[part == number], first.copy()
        rest[hidden] = 0
        shares = spread_labels(graph, rest, reach=reach)[hidden]
        found[part == number] = (shares.argmax(1) == truth[part == number]) & (shares.max(1) > 0)
    return found


def likely_kinds(pairs: Constraints, probabilities: Floats, groups: Sequence[Rows] = ()) -> tuple[Rows, Doubles, float]:
    """The images of the pairs (m,), the probability of each kind (m, k), and how often one kind is called different.

    Kinds are numbered as the clusters (n, k). Both rates of wrong pairs, and how clusters differ from kinds, are
    estimated on the way (EM). It begins with the kinds that groups of these images suggest, and that fades: without it,
    two kinds that the clusters take for one stay one.
    """
    rows, ends = np.unique(np.stack([pairs.left, pairs.right]), return_inverse=True)
    ends, same = ends.reshape(2, -1), pairs.link > 0.5
    seen, k = probabilities[rows].astype(float), probabilities.shape[1]
    known, kinds, hint = np.eye(k) * min(OWN, len(probabilities) / k) + ANY, seen, np.zeros_like(seen)
    for cluster, number in (_clusters_of(groups, probabilities, None) if groups else {}).items():
        at = np.searchsorted(rows, groups[number])
        hint[at], hint[at, cluster] = np.log((1 - SUGGESTED) / max(k - 1, 1)), np.log(SUGGESTED)
    counts, messages = known, np.zeros((2, len(same), k))
    missed = invented = EXPECTED[0]
    for turn in range(ROUNDS):
        prior = np.log(np.maximum(seen @ (counts / counts.sum(1, keepdims=True)), 1e-9))
        prior += max(0.0, 1 - 2 * turn / ROUNDS) * hint
        kinds, alike, messages = pass_messages(prior, ends, same, (missed, invented), messages, SWEEPS)
        missed, invented = _rate(alike, ~same), _rate(1 - alike, same)
        counts = seen.T @ kinds + known
    return rows, kinds, missed


def _rate(weight: Doubles, wrong: NDArray[np.bool_]) -> float:
    expected, strength = EXPECTED
    return float(min((weight[wrong].sum() + expected * strength) / (weight.sum() + strength), MOST_WRONG))


def pass_messages(
    prior: Doubles, ends: Rows, same: NDArray[np.bool_], rates: tuple[float, float], messages: Doubles, sweeps: int
) -> tuple[Doubles, Doubles, Doubles]:
    """The probability of each kind (m, k), that the images of each pair are of one (p,), and the messages (2, p, k).

    `prior` (m, k) are log-probabilities, `ends` (2, p) the two images of each pair. `rates` are how often the same kind
    is called different, and different kinds the same. It is exact after some sweeps where the pairs form no cycle.
    """
    missed, invented = rates
    of_same, of_other = np.where(same, 1 - missed, missed), np.where(same, invented, 1 - invented)
    kinds, alike = softmax(prior, axis=-1), np.zeros(len(same))
    for _ in range(sweeps):
        total = prior.copy()
        np.add.at(total, ends, messages)
        kinds = softmax(total, axis=-1)
        cavity = softmax(total[ends] - messages, axis=-1)  # without what a pair itself said
        other = cavity[::-1]
        said = np.log(of_same[:, None] * other + of_other[:, None] * (1 - other))
        messages = (messages + said) / 2  # half a step: cycles settle
        alike = (cavity[0] * cavity[1]).sum(1)
        alike = alike * of_same / np.maximum(alike * of_same + (1 - alike) * of_other, 1e-300)
    return kinds, alike, messages
