"""Must-links as a graph over the images: components, chains, closure, and what to give up when answers contradict.

Functions on arrays of rows, linear in pairs and images but for those that return more. SciPy is imported at first use.
"""

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "components",
    "consistent",
    "least",
    "n_pairs_between",
    "n_pairs_within",
    "pair_keys",
    "pairs_between",
    "pairs_within",
    "shortest_chain",
    "symmetric_graph",
]

Rows = NDArray[np.int64]


def pair_keys(left: Rows, right: Rows, n: int) -> Rows:
    """One number per unordered pair of rows below n, the same for (i, j) and (j, i)."""
    return np.minimum(left, right) * n + np.maximum(left, right)


def symmetric_graph(left: Rows, right: Rows, n: int) -> Any:
    """The (n, n) sparse adjacency matrix of the pairs, both ways round."""
    from scipy.sparse import csr_array

    ends = np.concatenate([left, right]), np.concatenate([right, left])
    return csr_array((np.ones(len(ends[0])), ends), shape=(n, n))


def components(left: Rows, right: Rows, n: int) -> Rows:
    """The connected component of each of n images, numbered in the order of their first image."""
    from scipy.sparse.csgraph import connected_components

    _, component = connected_components(symmetric_graph(left, right, n), directed=False)
    _, first, number = np.unique(component, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[number]


def shortest_chain(graph: Any, start: int, end: int) -> list[int]:
    """The images on a shortest path of the graph from start to end, both included."""
    from scipy.sparse.csgraph import breadth_first_order

    _, before = breadth_first_order(graph, start, directed=True, return_predecessors=True)
    path = [end]
    while path[-1] != start:
        path.append(int(before[path[-1]]))
    return path[::-1]


def pairs_within(component: Rows) -> tuple[Rows, Rows]:
    """All unordered pairs of images that share a component."""
    order = np.argsort(component, kind="stable")
    ends = np.cumsum(np.bincount(component))
    at = np.arange(len(order))
    n_later = ends[component[order]] - 1 - at  # members behind each one in its component
    left = np.repeat(at, n_later)
    right = left + 1 + _count_up(n_later)
    return order[left], order[right]


def pairs_between(component: Rows, cannot: Rows) -> tuple[Rows, Rows]:
    """All pairs of an image of component cannot[k, 0] and one of cannot[k, 1], for every k."""
    order = np.argsort(component, kind="stable")
    sizes = np.bincount(component)
    starts = np.cumsum(sizes) - sizes
    n_pairs = sizes[cannot[:, 0]] * sizes[cannot[:, 1]]
    at, (first, second) = _count_up(n_pairs), np.repeat(cannot, n_pairs, axis=0).T
    return order[starts[first] + at // sizes[second]], order[starts[second] + at % sizes[second]]


def n_pairs_within(component: Rows) -> int:
    """How many pairs `pairs_within` would make."""
    sizes = np.bincount(component)
    return int((sizes * (sizes - 1) // 2).sum())


def n_pairs_between(component: Rows, cannot: Rows) -> int:
    """How many pairs `pairs_between` would make."""
    sizes = np.bincount(component)
    return int((sizes[cannot[:, 0]] * sizes[cannot[:, 1]]).sum())


def least(keys: Rows, values: NDArray[np.float32], wanted: Rows) -> NDArray[np.float32]:
    """For each wanted key the least of the values under that key, infinity where there is none."""
    known, number = np.unique(np.append(keys, -1), return_inverse=True)
    lowest = np.full(len(known), np.inf, np.float32)
    np.minimum.at(lowest, number[:-1], values)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, lowest[at], np.float32(np.inf))


def _count_up(lengths: Rows) -> Rows:
    """0 … lengths[0] - 1, 0 … lengths[1] - 1, and so on, in one array."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def consistent(left: Rows, right: Rows, must: NDArray[np.bool_], order: Rows) -> NDArray[np.bool_]:
    """Which pairs stay when they are taken in this order and each one that contradicts those before is left out."""
    parent: dict[int, int] = {}
    enemies: defaultdict[int, set[int]] = defaultdict(set)
    keep = np.zeros(len(left), bool)
    in_order = (column.tolist() for column in (order, left[order], right[order], must[order]))
    for row, i, j, is_must in zip(*in_order, strict=True):
        a, b = _root(parent, i), _root(parent, j)
        if is_must:
            if b in enemies[a]:
                continue
            _join(parent, enemies, a, b)
        elif a == b:
            continue
        else:
            enemies[a].add(b)
            enemies[b].add(a)
        keep[row] = True
    return keep


def _root(parent: dict[int, int], image: int) -> int:
    while (above := parent.setdefault(image, image)) != image:
        parent[image] = parent[above]
        image = above
    return image


def _join(parent: dict[int, int], enemies: defaultdict[int, set[int]], a: int, b: int) -> None:
    if a == b:
        return
    if len(enemies[a]) < len(enemies[b]):
        a, b = b, a
    parent[b] = a
    for enemy in enemies.pop(b):  # the smaller set moves, so every entry moves at most log2(n) times
        enemies[enemy].discard(b)
        enemies[enemy].add(a)
        enemies[a].add(enemy)
