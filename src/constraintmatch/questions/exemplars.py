"""Exemplars: one image for each kind that is known or presumed, and how well every other image fits each of them.

The model's clusters and the person's groups are different things. A group is what must-links have joined; a cluster
only presumes that a group is there, until an answer says so. A cluster may turn out to hold two groups (the second is
found when "none of these" has been said of all exemplars), and two clusters may be one group (their exemplars get
linked, and one image stands for both).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from constraintmatch.questions.answers import Known
from constraintmatch.questions.belief import Belief, Landscape, ranks, spread

__all__ = ["Exemplars", "affinity", "excluded_exemplars", "find_exemplars"]

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]

_FIRST = 10  # exemplars to begin with where no model names clusters
_MOST = 100  # exemplars at most, or four for each cluster if that is more: thousands of groups of two are no kinds yet
_FLOOR = 1e-4  # probabilities below say nothing any more; the features decide
_SHARPNESS = 10.0  # what a difference in cosine counts against one in log-probability


@dataclass(frozen=True, eq=False)
class Exemplars:
    """g images that each stand for a kind.

    image (g,) rows; home (n,) the number of the exemplar that stands for an image's own group, or -1; and of each
    exemplar's group the mean feature, of length 1, (g, d) and the mean probabilities (g, k), or None without a model.
    """

    image: Rows
    home: Rows
    centre: Floats
    profile: Floats | None

    def __len__(self) -> int:
        return len(self.image)


def find_exemplars(belief: Belief, known: Known, landscape: Landscape) -> Exemplars:
    """One exemplar for each group; for each single image shown as exemplar before; for each cluster that has neither;
    and for each image of which "none of these" was said until no exemplar was left (a new kind).
    """
    groups = _largest_groups(known, _most(belief))
    groups.update((int(known.component[image]), None) for image in known.exemplars)
    for image in _presumed(belief, known, landscape, groups):
        groups.setdefault(int(known.component[image]))
    for image in known.asked:
        if len(groups) < _most(belief) and groups.keys() <= known.excluded(image):
            groups[int(known.component[image])] = None
    return _stand_ins(belief, known, landscape, list(groups)[: _most(belief)])


def affinity(belief: Belief, exemplars: Exemplars, rows: Rows | None = None) -> Floats:
    """How well each image (of the rows) fits each exemplar's group, (n, g): log-probability that the model gives them
    the same cluster, plus the scaled cosine with the group's mean, which decides where the model sees no difference.
    """
    at = slice(None) if rows is None else rows
    fit = np.float32(_SHARPNESS) * (belief.features[at] @ exemplars.centre.T)
    if belief.probabilities is not None and exemplars.profile is not None:
        fit += np.log(np.float32(_FLOOR) + belief.probabilities[at] @ exemplars.profile.T)
    return fit


def excluded_exemplars(known: Known, exemplars: Exemplars) -> NDArray[np.bool_]:
    """Which exemplars are known to be of another kind than an image, (n, g)."""
    number = {int(known.component[image]): at for at, image in enumerate(exemplars.image)}
    of_component = np.zeros((len(known.size), len(exemplars)), bool)
    for component, at in number.items():
        of_component[list(known.apart.get(component, ())), at] = True
    return np.asarray(of_component[known.component])


def _most(belief: Belief) -> int:
    return max(_MOST, 0 if belief.probabilities is None else 4 * belief.probabilities.shape[1])


def _largest_groups(known: Known, most: int) -> dict[int, None]:
    joined = np.flatnonzero(known.size > 1)
    largest = joined[np.argsort(-known.size[joined], kind="stable")[:most]]
    return dict.fromkeys(largest.tolist())


def _presumed(belief: Belief, known: Known, landscape: Landscape, groups: dict[int, None]) -> list[int]:
    """The most central image of each cluster in which no group has a typical member; without a model, dense images."""
    if belief.probabilities is None:
        return [] if groups else _dense_and_apart(belief, landscape)
    clusters, central = belief.probabilities.argmax(1), belief.centrality
    placed = np.isin(known.component, list(groups))
    images = []
    for cluster in range(belief.probabilities.shape[1]):
        members = np.flatnonzero(clusters == cluster)
        if len(members) and not (placed[members] & (central[members] >= np.median(central[members]))).any():
            images.append(int(members[np.argmax(central[members])]))
    return images


def _dense_and_apart(belief: Belief, landscape: Landscape) -> list[int]:
    nothing = belief.features[:0]
    return [int(row) for row in spread(belief.features, ranks(landscape.density), _FIRST, taken=nothing)]


def _stand_ins(belief: Belief, known: Known, landscape: Landscape, groups: list[int]) -> Exemplars:
    """Each group's most typical member: in a dense place and near the group's mean."""
    home_of = np.full(len(known.size), -1, np.int64)
    home_of[groups] = np.arange(len(groups))
    home = home_of[known.component]
    members = np.flatnonzero(home >= 0)
    belongs = np.zeros((len(groups), len(members)), np.float32)
    belongs[home[members], np.arange(len(members))] = 1
    belongs /= belongs.sum(1, keepdims=True)
    centre = _unit(belongs @ belief.features[members])
    typical = landscape.density[members] + np.einsum("md,md->m", belief.features[members], centre[home[members]])
    image = [members[np.argmax(np.where(own > 0, typical, -np.inf))] for own in belongs]
    profile = None if belief.probabilities is None else belongs @ belief.probabilities[members]
    return Exemplars(np.array(image, np.int64), home, centre, profile)


def _unit(rows: Floats) -> Floats:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, np.float32(1)), np.float32)
