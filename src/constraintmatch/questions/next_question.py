"""Which question to ask next: pairs, "which of these?" and triplets, at random, uncertain or recommended ones.

Pure functions from the belief of the model and the answers to the next questions: same inputs, same questions. They
do not ask what follows from the answers, except to compare groups again where there are more groups than clusters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from constraintmatch._internal import rng
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.rng import Purpose
from constraintmatch.constraints.graph import Floats, Rows
from constraintmatch.questions.answers import (
    CONFIRMED,
    MAX_SHOWN,
    Answer,
    Known,
    Question,
    find_known,
    implied_groups,
    pair_of,
)
from constraintmatch.questions.belief import (
    ALL_COMPARED,
    CANDIDATES,
    Belief,
    Exemplars,
    affinity,
    at_equal_steps,
    blocks,
    excluded_exemplars,
    find_exemplars,
    ranks,
    spread,
)

Kind = Literal["which", "pair", "triplet"]
Choice = Literal["recommended", "uncertain", "random"]

Pairs = set[tuple[int, int]]  # smaller row first

SOON = 200  # answers until an image with the answer "unsure" may come again
_POOL = 10_000  # images with the best hardness and density; distances are measured among these only
_ROUNDS = 64  # of random pairs, each with every image once, before the search for an unsettled one ends
# The weight of distance against hardness and density. After 400 answers the linear probe of research/questions.py is
# right on 88.4 % of the images with 2, 87.8 % with 4, 87.0 % with 1; on 65.3 % with 1/2 and on 52.1 % with 0.
_DIVERSITY = 2.0


@dataclass(frozen=True, eq=False)
class _Scene:
    """All that a choice depends on."""

    belief: Belief
    known: Known
    exemplars: Exemplars
    rows: Rows  # (m,) the images that are looked at, in rising order: all, or the candidates of a large set
    askable: NDArray[np.bool_]  # (n,) images that a question may be about
    kind: Kind
    waiting: Sequence[Question]

    @property
    def width(self) -> int:
        """The exemplars in one question."""
        return {"pair": 1, "triplet": 2}.get(self.kind, MAX_SHOWN)

    @cached_property
    def fit(self) -> Floats:
        """How well each image that is looked at fits an exemplar (m, g)."""
        return self.measure_fit(self.rows)

    def fit_of(self, rows: Rows) -> Floats:
        """The fit of some of the images that are looked at."""
        return np.asarray(self.fit[np.searchsorted(self.rows, rows)])

    def measure_fit(self, rows: Rows) -> Floats:
        """The affinity of any images, in rising order, to each exemplar, or -inf where a question may not ask."""
        fit = affinity(self.belief, self.exemplars, None if len(rows) == len(self.belief) else rows)
        fit[excluded_exemplars(self.known, self.exemplars, rows)] = -np.inf
        number = {image: at for at, image in enumerate(self.exemplars.image.tolist())}
        for pair in self.known.unsure:
            for one, other in (pair, pair[::-1]):
                if other in number:
                    fit[rows == one, number[other]] = -np.inf
        return fit


def next_questions(
    belief: Belief,
    answers: Sequence[Answer],
    n: int,
    *,
    kind: Kind = "which",
    choose: Choice = "recommended",
    seed: int = 0,
    candidates: ArrayLike | None = None,
    waiting: Sequence[Question] = (),
) -> list[Question]:
    """At most n questions, in the order to ask them; none if nothing is left to ask.

    "recommended" begins with a warm-up that compares the exemplars, and returns nothing else until that is done. Then
    it compares groups if there are more of them than clusters, follows up images with the answer "none of these", and
    chooses images that are hard, representative and diverse. When all are placed, it compares the exemplars that are
    still unsettled. Small batches (5 to 10) find new kinds sooner, because each answer decides what is shown next.

    A triplet is about an image between two exemplars, which it shows; there is one for each image, and no warm-up.

    In a set of more than 65,536 images only candidates are compared with each other, about 20,000: the images with the
    least margin between two exemplars, as many at equal steps, and those of earlier questions.

    `candidates` are the rows that a question may be about; exemplars come from all. `waiting` are questions without an
    answer yet: they do not come again. An image with the answer "unsure" rests for a while. `seed` is for "random".
    """
    _check(belief, n, kind, choose)
    known = find_known(answers, len(belief), soon=SOON)
    askable = _askable(known, candidates, waiting)
    if n == 0 or len(belief) < 2:
        return []
    if choose == "random" and kind == "pair":
        return list(islice(_random_pairs(known, askable, _pairs_in(waiting), seed), n))
    scene = _Scene(belief, known, find_exemplars(belief, known), np.arange(0), askable, kind, waiting)
    if kind == "triplet":  # it places no image, so the same one would be asked again
        askable[[answer.question.image for answer in answers if answer.question.nearer]] = False
    elif choose == "recommended" and (warm_up := _introductions(scene, n, enough=scene.width)):
        return warm_up  # it looks at no other images
    order = _random_order(known, seed) if choose == "random" else None
    scene = replace(scene, rows=_candidates(scene, n, order))
    if choose != "recommended":
        rows = _open_rows(scene)
        late = _margin(scene.fit_of(rows)) if order is None else order[rows]
        return _questions(scene, rows[np.argsort(late, kind="stable")[:n]])
    if kind == "triplet":
        return _questions(scene, _hard_dense_spread(scene, _open_rows(scene), np.arange(0), n))
    doubles = _doubles(scene, -(-n // 10))
    images = _questions(scene, _recommend(scene, n - len(doubles)))
    return [*doubles, *images] or _introductions(scene, n)


def question_about(belief: Belief, answers: Sequence[Answer], image: int, *, kind: Kind = "which") -> Question | None:
    """The question that places this image; None if the answers place it already."""
    if not 0 <= image < len(belief):
        raise InputError(f"image {image} does not exist (the set has {len(belief):,} images)")
    _check(belief, 1, kind, "recommended")
    known, askable = find_known(answers, len(belief), soon=0), np.ones(len(belief), bool)
    rows = np.arange(len(belief)) if len(belief) <= ALL_COMPARED else np.array([image])
    scene = _Scene(belief, known, find_exemplars(belief, known), rows, askable, kind, ())
    home = int(scene.exemplars.home[image])
    if home < 0:
        return next(iter(_questions(scene, np.array([image]))), None)
    return _introduction(scene, home, set()) if scene.exemplars.image[home] == image else None


def certain_share(belief: Belief, answers: Sequence[Answer], *, min_confidence: float = 0.95) -> float:
    """The share of images with a certain kind: those in a group of the answers, and with a model those that it puts,
    with at least min_confidence, into a cluster where more than half of the grouped images are of one group.
    """
    group = implied_groups(answers, len(belief))
    certain = group >= 0
    if belief.probabilities is not None and certain.any():
        clusters, k = belief.probabilities.argmax(1), belief.probabilities.shape[1]
        count = np.zeros((k, int(group.max()) + 1), np.int64)
        np.add.at(count, (clusters[certain], group[certain]), 1)
        clear = 2 * count.max(1) > count.sum(1)
        certain |= clear[clusters] & (belief.probabilities.max(1) >= min_confidence)
    return float(certain.mean()) if len(belief) else 0.0


def _check(belief: Belief, n: int, kind: str, choose: str) -> None:
    if kind not in ("which", "pair", "triplet"):
        raise InputError(f"kind={kind!r} is no kind of question; use which, pair or triplet")
    if choose not in ("recommended", "uncertain", "random"):
        raise InputError(f"choose={choose!r} is no way to choose; use recommended, uncertain or random")
    if n < 0:
        raise InputError(f"n={n} must be a whole number from 0 up")
    if belief.probabilities is not None and (n_rows := len(belief.probabilities)) != len(belief):
        raise InputError(f"{n_rows:,} images have probabilities and {len(belief):,} have features; give both for all")


def _askable(known: Known, candidates: ArrayLike | None, waiting: Sequence[Question]) -> NDArray[np.bool_]:
    n = len(known.component)
    rows = np.arange(n) if candidates is None else np.asarray(candidates, np.int64)
    if rows.size and not (rows.min() >= 0 and rows.max() < n):
        raise InputError(f"candidates name images that do not exist (the set has {n:,} images)")
    askable = np.isin(np.arange(n), rows)
    askable[list(known.resting)] = False
    busy = known.component[[question.image for question in waiting]]
    askable[np.isin(known.component, busy)] = False
    return askable


def _candidates(scene: _Scene, n: int, order: Rows | None) -> Rows:
    """The images that are looked at: all of a small set; else the first in a given order, or those that are worth it.

    These are the images of earlier questions, those with the least margin, and as many at equal steps, because the
    images of one doubtful place should not be all that there is to choose from.
    """
    belief, known, exemplars = scene.belief, scene.known, scene.exemplars
    if len(belief) <= ALL_COMPARED:
        return np.arange(len(belief))
    rows, half = np.flatnonzero(scene.askable & (exemplars.home < 0)), max(n, CANDIDATES // 2)
    if order is not None:
        return np.sort(rows[np.argsort(order[rows], kind="stable")[: 2 * half]])
    margin = np.empty(len(rows), np.float32)
    for part in blocks(len(rows), max(len(exemplars), belief.features.shape[1])):
        margin[part] = _margin(scene.measure_fit(rows[part]))
    hard = rows[np.argsort(margin, kind="stable")[:half]]
    asked = rows[np.isin(known.component[rows], known.component[list(known.asked)])]
    return np.unique(np.concatenate([hard, rows[at_equal_steps(len(rows), half)], asked]))


def _pairs_in(questions: Sequence[Question]) -> Pairs:
    return {pair_of(question.image, shown) for question in questions for shown in question.shown}


def _open_rows(scene: _Scene) -> Rows:
    """Images that a question may be about, in no exemplar's group and with an exemplar left; one for each component."""
    free = scene.askable[scene.rows] & (scene.exemplars.home[scene.rows] < 0)
    rows = scene.rows[free & np.isfinite(scene.fit).any(1)]
    return np.sort(rows[np.unique(scene.known.component[rows], return_index=True)[1]])


def _margin(fit: Floats) -> Floats:
    """How far the best exemplar is ahead of the second, (n,); without a second, the greatest distance of all."""
    if fit.shape[1] < 2:
        return np.zeros(len(fit), np.float32)
    second, best = np.partition(fit, -2, axis=1)[:, -2:].T
    margin: Floats = best - second
    finite = np.isfinite(margin)
    margin[~finite] = margin[finite].max(initial=0)
    return margin


def _questions(scene: _Scene, rows: Rows) -> list[Question]:
    """Each image with its likeliest exemplars that are left, that of the largest group first.

    A wrong "none of these" makes a second exemplar of a kind. Then the first one that fits is that of the group with
    more answers. (The probe of _DIVERSITY with 5 % wrong answers: 86.9 % against 83.9 % with the likeliest first, means
    of five annotators.)
    """
    made = []
    size = scene.known.size[scene.known.component[scene.exemplars.image]]
    for row, fit in zip(rows.tolist(), scene.fit_of(rows), strict=True):
        likeliest = np.argsort(-fit, kind="stable")[: scene.width]
        left = likeliest[np.isfinite(fit[likeliest])]
        shown = scene.exemplars.image[left[np.argsort(-size[left], kind="stable")]]
        if len(shown) >= (2 if scene.kind == "triplet" else 1):
            made.append(Question(row, tuple(shown.tolist()), nearer=scene.kind == "triplet"))
    return made


def _random_order(known: Known, seed: int) -> Rows:
    """The place of each image in a random order that stays the same from call to call, asked ones last."""
    place = rng.permutation(rng.stream(seed, Purpose.QUESTIONS), len(known.component))
    place[list(known.asked)] += len(place)
    return place


def _random_pairs(known: Known, askable: NDArray[np.bool_], taken: Pairs, seed: int) -> Iterator[Question]:
    """Unsettled pairs: rounds of every image once in random order, each with any other image."""
    words, n = rng.stream(seed, Purpose.QUESTIONS), len(askable)
    for _ in range(_ROUNDS):
        first = rng.permutation(words, n)
        second = rng.another(words, first, n)
        for one, other in zip(first.tolist(), second.tolist(), strict=True):
            if askable[one] and pair_of(one, other) not in taken and known.may_ask(one, other):
                taken.add(pair_of(one, other))
                yield Question(one, (other,))


def _introductions(scene: _Scene, n: int, *, enough: int | None = None) -> list[Question]:
    """At most n questions with exemplars, each with the nearest others that are left.

    An exemplar that was compared with `enough` others is left out. In the warm-up one question's width is enough: all
    others would be K² / 10 questions, and most of what there is to learn is that it is none of its nearest ones.
    """
    planned, images = _pairs_in(scene.waiting), scene.exemplars.image.tolist()
    made: list[Question] = []
    for at, image in enumerate(images):
        if len(made) >= n:
            break
        others = (other for other in images if other != image)
        done = (pair_of(image, other) in planned or scene.known.settles(image, other) for other in others)
        if enough is not None and sum(done) >= enough:
            continue
        if (question := _introduction(scene, at, planned)) is not None:
            made.append(question)
            planned |= _pairs_in([question])
    return made


def _doubles(scene: _Scene, n: int) -> list[Question]:
    """Groups with others that may be the same kind, the smallest first, if there are more groups than clusters.

    Then two of them are of one kind, and a rare kind would get no cluster. Each question is about another image of the
    group, so a wrong answer can be outvoted (`votes_of`). There are few at a time, and no more than surplus groups.
    """
    if scene.belief.probabilities is None:
        return []
    known, made = scene.known, list[Question]()
    component = known.component[scene.exemplars.image]
    groups = np.flatnonzero(known.size[component] > 1)
    n = min(n, len(groups) - scene.belief.probabilities.shape[1])
    planned = {pair_of(*known.component[list(pair)]) for pair in _pairs_in(scene.waiting)}
    for at in groups[np.argsort(known.size[component[groups]], kind="stable")].tolist():
        if len(made) >= n:
            break
        members = np.setdiff1d(np.flatnonzero(known.component == component[at]), known.compared)
        members = members[scene.askable[members]]
        same = _perhaps_same(scene, at, groups)
        others = [other for other in same if pair_of(component[at], component[other]) not in planned][: scene.width]
        if len(members) and others:
            image = members[np.argmax(scene.belief.features[members] @ scene.exemplars.centre[at])]
            made.append(Question(int(image), tuple(scene.exemplars.image[others].tolist())))
            planned |= {pair_of(component[at], component[other]) for other in others}
    return made


def _perhaps_same(scene: _Scene, at: int, groups: Rows) -> list[int]:
    """Groups that may be of the kind of this one, the nearest first: no two answers more call them different than same.

    They are among the nearest, or an answer calls them the same.
    """
    component = scene.known.component[scene.exemplars.image]
    near = affinity(scene.belief, scene.exemplars, scene.exemplars.image[[at]])[0]
    found = []
    for rank, other in enumerate(groups[np.argsort(-near[groups], kind="stable")].tolist()):
        same, different = scene.known.votes.get(pair_of(component[at], component[other]), (0, 0))
        if other != at and different - same < CONFIRMED and (same or rank <= MAX_SHOWN):
            found.append(other)
    return found


def _introduction(scene: _Scene, at: int, planned: Pairs) -> Question | None:
    """An exemplar with the nearest others that it was not compared with."""
    image = int(scene.exemplars.image[at])
    if not scene.askable[image]:
        return None
    near = affinity(scene.belief, scene.exemplars, np.array([image]))[0]
    others = scene.exemplars.image[np.argsort(-near, kind="stable")].tolist()
    left = [other for other in others if pair_of(image, other) not in planned and scene.known.may_ask(image, other)]
    return Question(image, tuple(left[: scene.width])) if left else None


def _recommend(scene: _Scene, n: int) -> Rows:
    """Images to follow up, at most half while there are others, then hard, representative and diverse ones."""
    rows = _open_rows(scene)
    asked = np.isin(scene.known.component[rows], scene.known.component[list(scene.known.asked)])
    again = _follow_ups(scene, rows[asked], -(-n // 2))
    fresh = _hard_dense_spread(scene, rows[~asked], again, n - len(again))
    rest = np.setdiff1d(rows[asked], again)
    return np.concatenate([again, fresh, rest])[:n]


def _follow_ups(scene: _Scene, rows: Rows, n: int) -> Rows:
    """Images that fitted no shown exemplar, those with the fewest exemplars left first.

    There is one for each exemplar that they seemed to fit best: if one is of a new kind, its neighbours are asked next.
    """
    n_left = np.isfinite(scene.fit_of(rows)).sum(1)
    order = rows[np.lexsort((-scene.belief.density_at(rows), n_left))]
    seemed = affinity(scene.belief, scene.exemplars, order).argmax(1)
    first = np.sort(np.unique(seemed, return_index=True)[1])
    return np.asarray(order[first[:n]])


def _hard_dense_spread(scene: _Scene, rows: Rows, again: Rows, n: int) -> Rows:
    """Images between two exemplars' groups, in dense places, far from each other and from all asked ones."""
    score = ranks(-_margin(scene.fit_of(rows))) + ranks(scene.belief.density_at(rows))
    best = np.sort(np.argsort(-score, kind="stable")[:_POOL])
    waiting = [question.image for question in scene.waiting]
    before = np.unique(np.array([*scene.known.asked, *waiting, *again, *scene.exemplars.image], np.int64))
    features = scene.belief.features
    return rows[best][spread(features[rows[best]], score[best], n, taken=features[before], weight=_DIVERSITY)]
