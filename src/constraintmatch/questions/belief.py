"""What a model believes about the images, how dense they are, and an exemplar for each kind. Arrays, no torch.

Must-links join a group of images; a cluster of the model only suggests a group. A cluster may hold two groups: the
second is found when the answer is "none of these" for all exemplars. Two clusters may be one group: then answers link
their exemplars, and one image is shown for both.

Up to 65,536 images, all are compared. In larger sets only candidates are. Then work and memory, apart from the features
and probabilities, do not grow with the number of pairs, and hardly with the number of images.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.graph import Floats, Rows
from constraintmatch.questions.answers import Known

ALL_COMPARED = 2**16  # images of a set in which all are compared; the published curves have up to 50,000
CANDIDATES = 20_000  # images that are compared in a larger set
_SAMPLE = 10_000  # larger sets are compared with this many of their images: all 50,000 would take five times as long
_NEIGHBOURS = 20  # of an image, for its density
_BLOCK = 2**24  # similarities at a time: 64 MiB
_FIRST = 10  # exemplars at the beginning if there is no model
_MOST = 100  # exemplars at most, or four for each cluster if that is more: thousands of groups of two are no kinds yet
_FLOOR = 1e-4  # lower probabilities say nothing; the features decide
_SHARPNESS = 10.0  # the weight of a difference in cosine against one in log-probability


@dataclass(frozen=True, eq=False)
class Belief:
    """What the model predicts for the images; `Belief.of` makes it from any arrays.

    features (n, d) float32 are rows of length 1; probabilities (n, k) float32 are None while there is no model.
    """

    features: Floats
    probabilities: Floats | None = None

    @classmethod
    def of(cls, features: ArrayLike, probabilities: ArrayLike | None = None) -> "Belief":
        """A belief from features of any length and scale; a row of zeros stays one."""
        given = np.asarray(features, np.float32)
        if given.ndim != 2 or not _all_finite(given):
            raise InputError(f"features must be finite numbers of shape (images, width), not of shape {given.shape}")
        shares = None if probabilities is None else np.asarray(probabilities, np.float32)
        if shares is not None and (shares.ndim != 2 or len(shares) != len(given) or not shares.shape[1]):
            raise InputError(f"probabilities of shape {shares.shape} do not fit {len(given):,} images' features")
        if shares is not None and not _all_finite(shares):
            raise InputError("the probabilities are not all finite numbers; look at the model's training")
        return cls(_unit(given), shares)

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def centrality(self) -> Floats:
        """The cosine (n,) of each image with the mean of its likeliest cluster, in which sure images count more."""
        assert self.probabilities is not None
        found = np.empty(len(self), np.float32)
        for cluster, rows in enumerate(self.members):
            parts = [rows[part] for part in _steps(len(rows), ALL_COMPARED)]
            mean = sum((self.probabilities[part, cluster] @ self.features[part] for part in parts), np.float32(0))
            length = np.linalg.norm(mean)
            for part in parts:
                found[part] = self.features[part] @ (mean / (length if length > 0 else np.float32(1)))
        return found

    @cached_property
    def members(self) -> list[Rows]:
        """The rows of each cluster of the model, in rising order."""
        assert self.probabilities is not None
        clusters = self.probabilities.argmax(1)
        ends = np.cumsum(np.bincount(clusters, minlength=self.probabilities.shape[1]))
        return np.split(np.argsort(clusters, kind="stable"), ends[:-1])

    def density_at(self, rows: Rows) -> Floats:
        """The mean cosine of each of these rows with its 20 nearest neighbours; for 50,000 it takes seconds.

        It is exact up to 10,000 images. In larger sets every image is compared with 10,000 of them at equal steps, and
        with proportionally fewer nearest ones. In a set of more than 65,536 images it is found for no other rows.
        """
        wanted = rows if len(self) > ALL_COMPARED else np.arange(len(self))
        new = np.unique(wanted[np.isnan(self._densities[wanted])])
        self._densities[new] = self._find_densities(new)
        return np.asarray(self._densities[rows])

    @cached_property
    def _densities(self) -> Floats:
        """The densities (n,) that were found so far; others are NaN."""
        return np.full(len(self), np.nan, np.float32)

    def _find_densities(self, rows: Rows) -> Floats:
        features, n = self.features, len(self)
        reference = at_equal_steps(n, _SAMPLE)
        nearest = min(max(round(_NEIGHBOURS * len(reference) / max(n, 1)), 1), len(reference) - 1)
        density = np.zeros(len(rows), np.float32)
        if nearest < 1:
            return density
        others = np.ascontiguousarray(features[reference].T)
        itself = np.full(n, -1, np.int64)
        itself[reference] = np.arange(len(reference))
        for part in blocks(len(rows), len(reference)):
            similar = features[rows[part]] @ others
            own = itself[rows[part]]
            similar[np.flatnonzero(own >= 0), own[own >= 0]] = -np.inf
            if nearest == 1:
                density[part] = similar.max(1)
            else:
                density[part] = np.partition(similar, -nearest, axis=1)[:, -nearest:].mean(1)
        return density


def at_equal_steps(n: int, most: int) -> Rows:
    """At most `most` of the numbers below n, at equal steps."""
    return np.linspace(0, n - 1, min(n, most)).astype(np.int64)


def _all_finite(values: Floats) -> bool:
    return all(bool(np.isfinite(values[rows]).all()) for rows in blocks(len(values), max(values.shape[-1], 1)))


def _unit(rows: Floats) -> Floats:
    unit = np.empty(rows.shape, np.float32)
    for part in blocks(len(rows), max(rows.shape[1], 1)):
        length = np.linalg.norm(rows[part], axis=1, keepdims=True)
        np.divide(rows[part], np.where(length > 0, length, np.float32(1)), out=unit[part])
    return unit


def ranks(values: Floats) -> Floats:
    """Each value's place from 0 (least) to 1 (greatest); equal values share the mean of their places."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    place = np.cumsum(count) - (count + 1) / 2
    return (place[number] / max(len(values) - 1, 1)).astype(np.float32)


def spread(features: Floats, score: Floats, n: int, *, taken: Floats, weight: float = 1.0) -> Rows:
    """n rows in order: each has the greatest score + weight · distance from all rows before it.

    The distance is 1 - the greatest cosine with `taken` (m, d) and the chosen rows, as a share of the greatest distance
    at that step; so it counts as much for the first row as for the last.
    """
    closest = np.full(len(features), -1, np.float32)
    for rows in blocks(len(features), max(len(taken), 1)) if len(taken) else ():
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


def blocks(n: int, width: int) -> Iterator[slice]:
    """Slices of n rows, each of at most 2^24 numbers if a row has this width."""
    return _steps(n, max(_BLOCK // width, 1))


def _steps(n: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, n, step))


# Exemplars


@dataclass(frozen=True, eq=False)
class Exemplars:
    """g images, one for each kind.

    image (g,) are rows; home (n,) is the number of the exemplar of an image's own group, or -1. centre (g, d) is the
    mean feature of each exemplar's group, of length 1; profile (g, k) the mean probabilities, or None without a model.
    """

    image: Rows
    home: Rows
    centre: Floats
    profile: Floats | None

    def __len__(self) -> int:
        return len(self.image)


def find_exemplars(belief: Belief, known: Known) -> Exemplars:
    """One exemplar for each group; for each single image shown as exemplar before; for each cluster that has neither;
    and for each image that is "none of these" for all exemplars (a new kind).
    """
    most = max(_MOST, 0 if belief.probabilities is None else 4 * belief.probabilities.shape[1])
    joined = np.flatnonzero(known.size > 1)
    largest = joined[np.argsort(-known.size[joined], kind="stable")[:most]]
    groups: dict[int, None] = dict.fromkeys(largest.tolist())
    groups.update((int(known.component[image]), None) for image in known.exemplars)
    for image in _suggest_images(belief, known, groups):
        groups.setdefault(int(known.component[image]))
    for image in known.asked:
        if len(groups) < most and groups.keys() <= known.different(image):
            groups[int(known.component[image])] = None
    return _represent(belief, known, list(groups)[:most])


def affinity(belief: Belief, exemplars: Exemplars, rows: Rows | None = None) -> Floats:
    """How well each image (of the rows) fits each exemplar's group, (n, g): log-probability that the model gives them
    the same cluster, plus the scaled cosine with the group's mean, which decides where the model sees no difference.
    """
    at = slice(None) if rows is None else rows
    fit = np.float32(_SHARPNESS) * (belief.features[at] @ exemplars.centre.T)
    if belief.probabilities is not None and exemplars.profile is not None:
        fit += np.log(np.float32(_FLOOR) + belief.probabilities[at] @ exemplars.profile.T)
    return fit


def excluded_exemplars(known: Known, exemplars: Exemplars, rows: Rows) -> NDArray[np.bool_]:
    """Which exemplars are known to be of another kind than an image of the rows (m,), (m, g)."""
    apart = [sorted(known.apart.get(component, ())) for component in known.component[exemplars.image].tolist()]
    named = np.unique(np.array([one for others in apart for one in others], np.int64))
    of_named = np.zeros((len(named) + 1, len(exemplars)), bool)  # the last row: a component that differs from none
    for at, others in enumerate(apart):
        of_named[np.searchsorted(named, others), at] = True
    own = known.component[rows]
    place = np.searchsorted(named, own)
    place[~np.isin(own, named)] = len(named)
    return np.asarray(of_named[place])


def _suggest_images(belief: Belief, known: Known, groups: dict[int, None]) -> list[int]:
    """The most central image of each cluster in which no group has a typical member; without a model, dense images."""
    if belief.probabilities is None:
        rows = at_equal_steps(len(belief), CANDIDATES if len(belief) > ALL_COMPARED else len(belief))
        score, features = ranks(belief.density_at(rows)), belief.features[rows]
        return [int(row) for row in rows[spread(features, score, 0 if groups else _FIRST, taken=features[:0])]]
    central, placed = belief.centrality, np.isin(known.component, list(groups))
    return [
        int(members[np.argmax(central[members])])
        for members in belief.members
        if len(members) and not (placed[members] & (central[members] >= np.median(central[members]))).any()
    ]


def _represent(belief: Belief, known: Known, groups: list[int]) -> Exemplars:
    """Each group's member that was chosen most often, if twice or more: none that was placed wrongly stands for it.

    Else the most typical one: in a dense place and near the group's mean.
    """
    home_of = np.full(len(known.size), -1, np.int64)
    home_of[groups] = np.arange(len(groups))
    home = home_of[known.component]
    members = np.flatnonzero(home >= 0)
    belongs = np.zeros((len(groups), len(members)), np.float32)
    belongs[home[members], np.arange(len(members))] = 1
    belongs /= belongs.sum(1, keepdims=True)
    centre = _unit(belongs @ belief.features[members])
    typical = belief.density_at(members) + np.einsum("md,md->m", belief.features[members], centre[home[members]])
    chosen = np.where(known.chosen[members] > 1, known.chosen[members], 0)
    best = np.lexsort((typical, chosen, home[members]))  # of each group the last one
    image = members[best[np.flatnonzero(np.diff(home[members][best], append=-1))]]
    profile = None if belief.probabilities is None else belongs @ belief.probabilities[members]
    return Exemplars(image, home, centre, profile)
