"""Must-links as a graph over the images: components, chains, closure, and which pairs to drop when answers contradict.

Functions on arrays of rows, linear in pairs and images but for those that return more. SciPy is imported at first use.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal import rng
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.rng import Purpose
from constraintmatch.constraints.pair_cells import Places

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]

PARTNERS = 400  # of a labelled image: up to 401 labels make all their pairs


class Conflict(NamedTuple):
    """A cannot-link and the shortest chain of must-links against it; `images` are those of the chain, end to end."""

    pair_row: int
    chain_rows: tuple[int, ...]
    images: tuple[int, ...]

    def describe(self, names: Sequence[str] | None = None, places: Places | None = None) -> str:
        """One sentence with the pair, the chain and their places in the file, else their rows (counted from 0)."""
        chain = [f"image {image}" if names is None else names[image] for image in self.images]
        if len(chain) > 12:
            chain[6:-5] = ["…"]
        at = places or Places(np.arange(max(self.pair_row, *self.chain_rows) + 1))
        ends = f"{chain[0]} and {chain[-1]} are cannot-link ({at.say(self.pair_row)})"
        but = "also must-link" if len(self.chain_rows) == 1 else f"must-link through {' – '.join(chain)}"
        return f"{ends}, but {but} ({at.say(*self.chain_rows)})"


@dataclass(frozen=True, eq=False)
class Triplets:
    """Images of which the first is nearer to the second than to the third."""

    rows: Rows  # (m, 3)
    weight: Floats  # (m,)
    places: Places  # in the file that they were read from

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: NDArray[Any]) -> "Triplets":
        """The triplets at these rows (numbers or a mask)."""
        return Triplets(self.rows[rows], self.weight[rows], self.places.take(rows))

    @classmethod
    def join(cls, parts: "Sequence[Triplets]") -> "Triplets":
        """The triplets of several files, one after the other."""
        some = [part for part in parts if len(part)]
        if len(some) < 2:
            return some[0] if some else NO_TRIPLETS
        rows, weight = (np.concatenate([getattr(part, name) for part in some]) for name in ("rows", "weight"))
        return cls(rows, weight, Places.join([part.places for part in some]))

    def resolve(self, on_conflict: str, n_images: int) -> "Triplets":
        """The triplets without those in a circle; with "error" a circle is an InputError."""
        if on_conflict == "keep" or not len(self) or not len(circle := self.cyclic(n_images)):
            return self
        if on_conflict == "error":
            raise self.error(circle)
        return self.take(np.delete(np.arange(len(self)), circle))

    def error(self, circle: Rows) -> InputError:
        """The error for triplets that contradict each other, with their places."""
        problem, fix = "triplets in a circle cannot all be true", "correct them, or use --set on_conflict=drop or keep"
        return InputError(problem, f"{self.places.path} {self.places.say(*circle)}".strip(), fix)

    def cyclic(self, n_images: int) -> Rows:
        """The triplets that cannot all be true: each says that one pair is nearer than another, round in a circle."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        anchor, *others = self.rows.T
        keys, ends = np.unique([pair_keys(anchor, other, n_images) for other in others], return_inverse=True)
        near, far = ends.reshape(2, -1)
        edges = csr_array((np.ones(len(near)), (near, far)), shape=(len(keys), len(keys)))
        _, circle = connected_components(edges, connection="strong")
        return np.flatnonzero(circle[near] == circle[far])


NO_TRIPLETS = Triplets(np.empty((0, 3), np.int64), np.empty(0, np.float32), Places(np.empty(0, np.int64)))


def pair_keys(left: Rows, right: Rows, n: int) -> Rows:
    """One number per unordered pair of rows below n, the same for (i, j) and (j, i)."""
    return np.minimum(left, right) * n + np.maximum(left, right)


def neighbours(pairs: Rows) -> dict[int, set[int]]:
    """For each number in the pairs (m, 2), those that it is paired with."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for one, other in pairs.tolist():
        found[one].add(other)
        found[other].add(one)
    return dict(found)


def components(left: Rows, right: Rows, n: int) -> Rows:
    """The connected component of each of n images, numbered in the order of their first image."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    graph = csr_array((np.ones(len(left)), (left, right)), shape=(n, n))
    component = connected_components(graph, directed=False)[1]
    _, first, number = np.unique(component, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def shortest_chains(left: Rows, right: Rows, n: int, ends: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """For each two ends the images on a shortest path of the pairs from one to the other, both included."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    both_ways = np.concatenate([left, right]), np.concatenate([right, left])
    graph = csr_array((np.ones(2 * len(left)), both_ways), shape=(n, n))
    for start, end in ends:
        _, before = breadth_first_order(graph, start, directed=True, return_predecessors=True)
        path = [end]
        while path[-1] != start:
            path.append(int(before[path[-1]]))
        yield path[::-1]


def implied_pairs(
    left: Rows, right: Rows, link: Floats, weight: Floats, component: Rows, cannot: Rows
) -> tuple[NDArray[Any], ...]:
    """Left, right, link and weight of what pairs imply beyond themselves: must-links, then cannot-links, each sorted.

    A new pair weighs as little as the lightest of the must-links of both ends' components and, for a cannot-link, of
    the cannot-links between them.
    """
    n, must, apart = max(len(component), 1), link == 1, link == 0
    given, edges = pair_keys(left, right, n), pair_keys(cannot[:, 0], cannot[:, 1], n)
    edge_of = np.searchsorted(edges, pair_keys(component[left], component[right], n)[apart])
    of_component, of_edge = np.full(n, np.inf, np.float32), np.full(len(edges), np.inf, np.float32)  # the lightest
    np.minimum.at(of_component, component[left[must]], weight[must])
    np.minimum.at(of_edge, edge_of, weight[apart])
    found = []
    for kind, every in ((1, _pairs_within(component)), (0, _pairs_between(component, cannot))):
        keys = np.sort(pair_keys(*every, n))
        one, other = np.divmod(np.delete(keys, np.searchsorted(keys, given[link == kind])), n)
        first, second = component[one], component[other]
        lightest = np.minimum(of_component[first], of_component[second])
        if kind == 0:
            lightest = np.minimum(lightest, of_edge[np.searchsorted(edges, pair_keys(first, second, n))])
        found.append((one, other, np.full(len(one), kind, np.float32), lightest))
    return tuple(np.concatenate(columns) for columns in zip(*found, strict=True))


def label_pairs(kinds: Rows) -> tuple[Rows, Rows, Floats]:
    """Left, right and link of the pairs that the kinds (m,) of m images imply: all, or some if there are many images.

    Then each image is paired with some hundreds of others at random and two of its own kind, and all kinds with each
    other: enough to join and separate the same groups.
    """
    m, order = len(kinds), np.argsort(kinds, kind="stable")
    drawn = rng.permutation(rng.stream(0, Purpose.CLOSURE), m)
    steps = range(1, min(m // 2, PARTNERS // 2) + 1)
    found = [np.stack([drawn, np.roll(drawn, -step)]) for step in steps]
    for step in (1, 2):
        near = np.stack([order[:-step], order[step:]])
        found.append(near[:, kinds[near[0]] == kinds[near[1]]])
    first = np.unique(kinds, return_index=True)[1]
    found.append(first[np.stack(np.triu_indices(len(first), 1))])
    one, other = np.concatenate(found, axis=1)
    keys = np.unique(pair_keys(one, other, max(m, 1)))
    left, right = np.divmod(keys, max(m, 1))
    return left, right, (kinds[left] == kinds[right]).astype(np.float32)


def _pairs_within(component: Rows) -> tuple[Rows, Rows]:
    """All unordered pairs of images that share a component."""
    order = np.argsort(component, kind="stable")
    ends = np.cumsum(np.bincount(component))
    at = np.arange(len(order))
    n_later = ends[component[order]] - 1 - at  # members behind each one in its component
    left = np.repeat(at, n_later)
    right = left + 1 + _count_up(n_later)
    return order[left], order[right]


def _pairs_between(component: Rows, cannot: Rows) -> tuple[Rows, Rows]:
    """All pairs of an image of component cannot[k, 0] and one of cannot[k, 1], for every k."""
    order = np.argsort(component, kind="stable")
    sizes = np.bincount(component)
    starts = np.cumsum(sizes) - sizes
    n_pairs = sizes[cannot[:, 0]] * sizes[cannot[:, 1]]
    at, (first, second) = _count_up(n_pairs), np.repeat(cannot, n_pairs, axis=0).T
    return order[starts[first] + at // sizes[second]], order[starts[second] + at % sizes[second]]


def n_pairs(component: Rows, cannot: Rows) -> tuple[int, int]:
    """How many must-links within components and cannot-links between them the closure has."""
    sizes = np.bincount(component)
    return int((sizes * (sizes - 1) // 2).sum()), int(sizes[cannot].prod(axis=1).sum())


def _count_up(lengths: Rows) -> Rows:
    """0 … lengths[0] - 1, 0 … lengths[1] - 1, and so on, in one array."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def keep_consistent(left: Rows, right: Rows, must: NDArray[np.bool_], order: Rows) -> NDArray[np.bool_]:
    """Which pairs stay when they are taken in this order and each one that contradicts those before is left out."""
    from scipy.cluster.hierarchy import DisjointSet

    groups = DisjointSet(np.union1d(left, right).tolist())
    enemies: defaultdict[int, set[int]] = defaultdict(set)  # by the root of a group, the roots of others
    keep = np.zeros(len(left), bool)
    in_order = (column.tolist() for column in (order, left[order], right[order], must[order]))
    for row, i, j, is_must in zip(*in_order, strict=True):
        a, b = groups[i], groups[j]
        if (b in enemies[a]) if is_must else (a == b):
            continue
        keep[row] = True
        if not is_must:
            enemies[a].add(b)
            enemies[b].add(a)
        elif groups.merge(a, b):  # the larger group keeps its root, so every entry moves at most log2(n) times
            root, gone = (a, b) if groups[a] == a else (b, a)
            for enemy in enemies.pop(gone, ()):
                enemies[enemy].discard(gone)
                enemies[enemy].add(root)
                enemies[root].add(enemy)
    return keep
