"""How the images lie in the space of features: what a model believes, how dense it is, a choice that spreads."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from constraintmatch._internal.errors import InputError

__all__ = ["Belief", "Landscape", "landscape_of", "ranks", "spread"]

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]

_SAMPLE = 10_000  # more images are held against this many of them: 50,000 against all would take five times as long
_BLOCK = 2**24  # similarities at a time: 64 MiB


@dataclass(frozen=True, eq=False)
class Belief:
    """What the model says of the images: arrays, no torch.

    features (n, d) float32, rows of length 1: neighbours and density are found here.
    probabilities (n, k) float32, or None while there is no model. `Belief.of` makes both so from any arrays.
    """

    features: Floats
    probabilities: Floats | None = None

    @classmethod
    def of(cls, features: ArrayLike, probabilities: ArrayLike | None = None) -> "Belief":
        """A belief from features of any length and scale; a row of zeros stays one."""
        given = np.asarray(features, np.float32)
        if given.ndim != 2 or not np.isfinite(given).all():
            raise InputError(f"features must be finite numbers of shape (images, width), not of shape {given.shape}")
        length = np.linalg.norm(given, axis=1, keepdims=True)
        shares = None if probabilities is None else np.asarray(probabilities, np.float32)
        if shares is not None and (shares.ndim != 2 or len(shares) != len(given) or not shares.shape[1]):
            raise InputError(f"probabilities of shape {shares.shape} do not fit {len(given):,} images' features")
        if shares is not None and not np.isfinite(shares).all():
            raise InputError("the probabilities are not all finite numbers; look at the model's training")
        return cls(np.asarray(given / np.where(length > 0, length, 1), np.float32), shares)

    def __len__(self) -> int:
        return len(self.features)

    @property
    def clusters(self) -> Rows | None:
        """The likeliest cluster of each image (n,), or None while there is no model."""
        return None if self.probabilities is None else self.probabilities.argmax(1).astype(np.int64)

    @cached_property
    def centrality(self) -> Floats:
        """The cosine (n,) of each image with the mean of its likeliest cluster, where sure images count more."""
        clusters, found = self.clusters, np.empty(len(self), np.float32)
        assert clusters is not None
        assert self.probabilities is not None
        for cluster in range(self.probabilities.shape[1]):
            rows = np.flatnonzero(clusters == cluster)
            own = self.features[rows]
            mean = self.probabilities[rows, cluster] @ own
            length = np.linalg.norm(mean)
            found[rows] = own @ (mean / (length if length > 0 else np.float32(1)))
        return found


@dataclass(frozen=True, eq=False)
class Landscape:
    """What is slow to find and only depends on the features: keep it from one choice to the next.

    density (n,) float32: the mean cosine with the 20 nearest neighbours.
    """

    density: Floats


def landscape_of(features: Floats, *, n_neighbours: int = 20) -> Landscape:
    """The density around each image.

    Exact up to 10,000 images; of more, every image is held against 10,000 of them at equal steps, and against
    proportionally fewer nearest ones.
    """
    n = len(features)
    reference = np.linspace(0, n - 1, min(n, _SAMPLE)).astype(np.int64)
    nearest = min(max(round(n_neighbours * len(reference) / max(n, 1)), 1), len(reference) - 1)
    if nearest < 1:
        return Landscape(np.zeros(n, np.float32))
    others = np.ascontiguousarray(features[reference].T)
    itself = np.full(n, -1, np.int64)
    itself[reference] = np.arange(len(reference))
    density = np.empty(n, np.float32)
    for rows in _blocks(n, len(reference)):
        similar = features[rows] @ others
        own = itself[rows]
        similar[np.flatnonzero(own >= 0), own[own >= 0]] = -np.inf
        density[rows] = np.partition(similar, -nearest, axis=1)[:, -nearest:].mean(1)
    return Landscape(density)


def ranks(values: Floats) -> Floats:
    """Each value's place from 0 (least) to 1 (greatest); equal values share the mean of their places."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    place = np.cumsum(count) - (count + 1) / 2
    return (place[number] / max(len(values) - 1, 1)).astype(np.float32)


def spread(features: Floats, score: Floats, n: int, *, taken: Floats, weight: float = 1.0) -> Rows:
    """n rows, one after the other that with the greatest score + weight · distance from all rows before it.

    The distance is 1 - the greatest cosine with `taken` (m, d) and the rows chosen, as a share of the greatest there
    is at that step; so it counts as much for the first row as for the last.
    """
    closest = np.full(len(features), -1, np.float32)
    for rows in _blocks(len(features), max(len(taken), 1)) if len(taken) else ():
        closest[rows] = (features[rows] @ taken.T).max(1)
    free = np.ones(len(features), bool)
    chosen: list[int] = []
    for _ in range(min(n, len(features))):
        distance = 1 - closest
        share = distance / max(float(distance[free].max()), 1e-6)
        best = int(np.argmax(np.where(free, score + np.float32(weight) * share, -np.inf)))
        free[best] = False
        chosen.append(best)
        np.maximum(closest, features @ features[best], out=closest)
    return np.array(chosen, np.int64)


def _blocks(n: int, width: int) -> Iterator[slice]:
    step = max(_BLOCK // width, 1)
    return (slice(start, start + step) for start in range(0, n, step))
