"""Questions and their answers, and what the answers say: links, constraints, groups of images.

NumPy only. Images are row numbers of an ImageSet.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import Rows, Triplets, neighbours
from constraintmatch.constraints.pair_cells import Places

Votes = tuple[Constraints, NDArray[np.bool_]]  # see `votes_of`

NONE = -1  # "none of these"; for a pair: different
UNSURE = -2
MERGED = 3  # images of a group, from which on one answer does not merge it with another such group
CONFIRMED = 2  # votes by which one side must lead: two groups are one, or differ
MAX_SHOWN = 5  # they fit next to the image, and have the keys 1-5


@dataclass(frozen=True)
class Question:
    """One image and the images shown with it: one (same or different?) or up to five (which of these?).

    With `nearer` there are two, and the question is to which of them it is nearer: a triplet.
    """

    image: int
    shown: tuple[int, ...]
    nearer: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.shown) <= MAX_SHOWN:
            raise InputError(f"a question shows 1 to {MAX_SHOWN} images with its own, not {len(self.shown)}")
        if len({self.image, *self.shown}) != len(self.shown) + 1:
            raise InputError(f"image {self.image} shown with {list(self.shown)}: each image may be there once")
        if min(self.image, *self.shown) < 0:
            raise InputError(f"image {self.image} shown with {list(self.shown)}: row numbers count from 0")
        if self.nearer and len(self.shown) != 2:
            raise InputError(f"a triplet shows 2 images with its own, not {len(self.shown)}")

    @property
    def kind(self) -> Literal["pair", "which", "triplet"]:
        """ "pair" if one image is shown: same or different?"""
        return "triplet" if self.nearer else "pair" if len(self.shown) == 1 else "which"


@dataclass(frozen=True)
class Answer:
    """The index of the shown image that is of the same kind (of a triplet: that is nearer), or NONE, or UNSURE."""

    question: Question
    choice: int

    def __post_init__(self) -> None:
        n_shown = len(self.question.shown)
        if not UNSURE <= self.choice < n_shown:
            raise InputError(
                f"choice {self.choice} is none of the {n_shown} shown images; use 0 to {n_shown - 1}, "
                f"{NONE} (none of these) or {UNSURE} (unsure)"
            )
        if self.question.nearer and self.choice == NONE:
            raise InputError(f"a triplet has no answer {NONE}; use 0, 1 or {UNSURE} (unsure)")


def in_order(answers: Iterable[Answer], order: Rows) -> list[Answer]:
    """The answers about other rows: what was row i is now row order[i]."""
    places = order.tolist()
    asked = ((answer, answer.question) for answer in answers)
    return [
        replace(answer, question=replace(one, image=places[one.image], shown=tuple(places[row] for row in one.shown)))
        for answer, one in asked
    ]


def links_of(answers: Iterable[Answer]) -> tuple[Rows, Rows, NDArray[np.float32]]:
    """(left, right, link) of what the answers say, in their order; left is the image of the question.

    The chosen image is a must-link, the others shown are cannot-links; "none of these" is a cannot-link with each;
    unsure says nothing, and a triplet links no images.
    """
    left, right, link, *_ = _links(answers)
    return left, right, link.astype(np.float32)


def triplets_of(answers: Iterable[Answer]) -> Triplets:
    """The triplets among the answers, in their order."""
    said = [
        (answer.question, answer.choice) for answer in answers if answer.question.nearer and answer.choice != UNSURE
    ]
    rows = [(one.image, one.shown[choice], one.shown[1 - choice]) for one, choice in said]
    at = np.arange(len(rows))
    return Triplets(np.array(rows, np.int64).reshape(-1, 3), np.ones(len(rows), np.float32), Places(at))


def constraints_of(answers: Sequence[Answer], n_images: int, **columns: Any) -> Constraints:
    """The answers as constraints over n_images, one row per link, with repetitions and contradictions.

    `columns` are more of them, with a value for each link: weight, annotator, time.

    One kind is left out: the choice of an image makes the others different only if no two shown images are of the same
    kind. If must-links join one of them to the chosen image, its cannot-link is dropped.
    """
    left, right, link, follows, _ = _links(answers)
    given = Constraints.from_arrays(left, right, link, n_images=n_images, **columns)
    component = given.components()
    return given.take(~(follows & (component[left] == component[right])))


def stated_constraints(answers: Sequence[Answer], n_images: int) -> Constraints:
    """What the answers state directly, without contradictions: same as the chosen image, or different from all shown.

    If the shown images are known to differ, the other cannot-links are in the closure of these. If not, they would
    keep two exemplars of one kind apart forever. Whether two groups are one is a vote (`votes_of`).
    """
    return decide(votes_of(answers, n_images))


def confirm_merges(said: Constraints) -> Constraints:
    """The constraints, in the order of the answers, without single must-links between two groups of three or more.

    One wrong answer there would join two kinds. A second one between the same groups confirms the first.
    """
    from scipy.cluster.hierarchy import DisjointSet

    groups = DisjointSet(np.union1d(said.left, said.right).tolist())
    waiting, keep = dict[frozenset[int], int](), np.ones(len(said), bool)
    for row in np.flatnonzero(said.link > 0.5).tolist():
        ends = frozenset(groups[int(side[row])] for side in (said.left, said.right))
        if len(ends) == 2 and min(map(groups.subset_size, ends)) >= MERGED:
            if ends not in waiting:
                waiting[ends], keep[row] = row, False
                continue
            keep[waiting.pop(ends)] = True
        groups.merge(int(said.left[row]), int(said.right[row]))
    return said.take(keep)


def votes_of(answers: Sequence[Answer], n_images: int) -> Votes:
    """What the answers state, in their order, with contradictions: votes on whether two groups are of one kind.

    A wrong "none of these" begins a second group of a kind. If later answers compare the two groups, most decide. With
    each vote comes whether the image of the question was in a group before the answer.
    """
    left, right, link, follows, number = _links(answers)
    given, joined = Constraints.from_arrays(left, right, link, n_images=n_images), np.full(n_images, len(answers))
    for side in (left, right):
        np.minimum.at(joined, side[link > 0], number[link > 0])
    return given.take(~follows), (joined[left] < number)[~follows]


def _ends(given: Constraints, component: Rows) -> Rows:
    """The components (m, 2) that each vote is about, the smaller first."""
    return np.sort(np.stack([component[given.left], component[given.right]], 1), axis=1)


def count_votes(votes: Votes, component: Rows) -> tuple[Rows, Rows, Rows]:
    """Each two components that votes are about (p, 2), and how many call them the same (p,), and different (p,).

    An image that is none of what it was shown with is shown with other exemplars, and joins a second group of its kind,
    if there is one. So those votes are not independent of each other, and count as one.
    """
    given, again = votes
    ends, same = _ends(given, component), given.link > 0.5
    across = ends[:, 0] != ends[:, 1]
    pairs, number = np.unique(ends[across], axis=0, return_inverse=True)
    kinds = (same, ~same & again, ~same & ~again)
    yes, no, first = (np.bincount(number.ravel()[kind[across]], minlength=len(pairs)) for kind in kinds)
    return pairs, yes, no + np.minimum(first, 1)


def decide(votes: Votes) -> Constraints:
    """The votes without contradictions: two groups are one if two votes more say so than otherwise."""
    given, said = votes[0], confirm_merges(votes[0].resolve("drop"))
    while True:
        component = said.components()
        pairs, same, different = count_votes(votes, component)
        one = pairs[same - different >= CONFIRMED][:1]
        if not len(one):
            return said
        joins = (_ends(given, component) == one).all(1) & (given.link > 0.5)
        both = Constraints.join([said, given.take(joins)])
        component = both.components()
        said = both.take((both.link > 0.5) | (component[both.left] != component[both.right]))


def implied_groups(answers: Sequence[Answer], n_images: int) -> Rows:
    """The group of each image (n_images,): images that must-links join share a number from 0 up; -1: no group.

    Groups are numbered by their first images. Contradictions are dropped as in `Constraints.resolve("drop")`.
    """
    component = stated_constraints(answers, n_images).components()
    joined = np.bincount(component, minlength=1)[component] > 1
    group = np.full(n_images, -1, np.int64)
    group[joined] = np.unique(component[joined], return_inverse=True)[1]
    return group


def _links(answers: Iterable[Answer]) -> tuple[Rows, Rows, Rows, NDArray[np.bool_], Rows]:
    """Columns left, right, link, whether it only follows from the choice of another image, and the answer's number."""
    rows = [
        (answer.question.image, shown, at == answer.choice, answer.choice not in (NONE, at), number)
        for number, answer in enumerate(answers)
        if answer.choice != UNSURE and not answer.question.nearer
        for at, shown in enumerate(answer.question.shown)
    ]
    left, right, link, follows, number = np.array(rows, np.int64).reshape(-1, 5).T.copy()
    return left, right, link, follows.astype(bool), number


def pair_of(one: int, other: int) -> tuple[int, int]:
    """The two images, the smaller row first."""
    return (one, other) if one < other else (other, one)


@dataclass(frozen=True, eq=False)
class Known:
    """What the answers say together: the closure of what they state, and what rests for a while.

    `component` (n,) is the must-link component of each image, `size` (c,) the number of images in each, `apart` the
    components that are known to differ from a component.
    """

    component: Rows
    size: Rows
    apart: Mapping[int, Set[int]]
    asked: tuple[int, ...]  # images of questions with an answer, in order, each once
    exemplars: tuple[int, ...]  # images shown in "which of these?", in order, each once
    resting: frozenset[int]  # images of recent questions with the answer "unsure"
    unsure: frozenset[tuple[int, int]]  # the pairs of those questions, smaller row first
    votes: Mapping[tuple[int, int], tuple[int, int]]  # for two components, smaller first: same and different
    compared: Rows  # images that votes compare with another component
    chosen: Rows  # (n,) how often each image was chosen in "which of these?"

    def different(self, image: int) -> Set[int]:
        """The components that differ from the image's."""
        return self.apart.get(int(self.component[image]), frozenset())

    def settles(self, one: int, other: int) -> bool:
        """Whether the closure says that the two images are the same, or different."""
        return bool(self.component[one] == self.component[other]) or int(self.component[other]) in self.different(one)

    def may_ask(self, one: int, other: int) -> bool:
        """Whether a question may compare the two: not settled, and not unsure recently."""
        return not self.settles(one, other) and pair_of(one, other) not in self.unsure


def find_known(answers: Sequence[Answer], n_images: int, *, soon: int) -> Known:
    """What the answers say; an "unsure" rests until there are `soon` more answers."""
    votes = votes_of(answers, n_images)
    component, cannot = decide(votes).component_constraints()
    pairs, *counts = (column.tolist() for column in count_votes(votes, component))
    ends = np.stack([votes[0].left, votes[0].right])
    across = component[ends[0]] != component[ends[1]]
    chosen = [one.question.shown[one.choice] for one in answers if one.choice >= 0 and one.question.kind == "which"]
    linked = [answer for answer in answers if not answer.question.nearer]
    said = [answer.question for answer in linked if answer.choice != UNSURE]
    doubtful = [answer.question for answer in linked[-soon:] if answer.choice == UNSURE] if soon else []
    return Known(
        component,
        np.bincount(component).astype(np.int64),
        neighbours(cannot),
        tuple(dict.fromkeys(question.image for question in said)),
        tuple(dict.fromkeys(image for question in said if question.kind == "which" for image in question.shown)),
        frozenset(question.image for question in doubtful),
        frozenset(pair_of(one.image, shown) for one in doubtful for shown in one.shown),
        dict(zip(map(tuple, pairs), zip(*counts, strict=True), strict=True)),
        np.unique(ends[:, across]),
        np.bincount(np.array(chosen, np.int64), minlength=n_images),
    )


def n_kinds(answers: Sequence[Answer], n_images: int) -> int:
    """The number of kinds that the answers prove: groups and images that all differ from each other.

    The search is greedy, the largest groups first, so it may miss a few; 1 while no two images are known to differ.
    """
    known = find_known(answers, n_images, soon=0)
    different: list[int] = []
    for component in sorted(known.apart, key=lambda one: (-known.size[one], one)):
        if known.apart[component] >= set(different):
            different.append(component)
    return max(1, len(different))
