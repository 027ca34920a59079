"""Which question to ask next: pairs and "which of these?", at random, the least certain, or the recommended ones.

Pure functions from what the model believes and what was answered to the next questions: same inputs, same questions.
What the closure of the answers already says is never asked.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from constraintmatch.answers import (
    MAX_SHOWN,
    NONE,
    UNSURE,
    Answer,
    Known,
    Question,
    constraints_of,
    implied_groups,
    known_from,
    links_of,
)
from constraintmatch.errors import InputError
from constraintmatch.exemplars import Exemplars, affinity, excluded_exemplars, find_exemplars
from constraintmatch.landscape import Belief, Landscape, landscape_of, ranks, spread

__all__ = [
    "NONE",
    "UNSURE",
    "Answer",
    "Belief",
    "Landscape",
    "Question",
    "certain_share",
    "constraints_of",
    "implied_groups",
    "landscape_of",
    "links_of",
    "next_questions",
    "question_about",
]

Kind = Literal["which", "pair"]
Choice = Literal["recommended", "uncertain", "random"]
Rows = NDArray[np.int64]
Floats = NDArray[np.float32]

SOON = 200  # answers until an image that made somebody unsure may come again
_POOL = 10_000  # the best by hardness and density; distances are measured among these only
_ROUNDS = 64  # of random pairs, each with every image once, before the search for an unsettled one ends


@dataclass(frozen=True, eq=False)
class _Scene:
    """All that choosing looks at. fit (n, g) is -inf where an exemplar is excluded or rests; width is how many to show."""

    belief: Belief
    landscape: Landscape
    known: Known
    exemplars: Exemplars
    fit: Floats
    askable: NDArray[np.bool_]  # (n,) images that may be asked about
    width: int
    planned: set[tuple[int, int]]  # pairs of exemplars that this batch or a waiting question already asks about
    waiting: tuple[Question, ...]


def next_questions(
    belief: Belief,
    answers: Sequence[Answer],
    n: int,
    *,
    kind: Kind = "which",
    choose: Choice = "recommended",
    n_images_per_question: int = MAX_SHOWN,
    seed: int = 0,
    soon: int = SOON,
    candidates: ArrayLike | None = None,
    waiting: Sequence[Question] = (),
    landscape: Landscape | None = None,
) -> list[Question]:
    """At most n questions, the most useful first; none when nothing is left to ask.

    "recommended" first gets the exemplars to know each other (the warm-up) and returns no others until that has been
    asked; then it follows up images of which "none of these" was said, and chooses images that are hard, representative
    and diverse. `candidates` are the rows that may be asked about (exemplars come from all). `waiting` are questions
    that have been handed out and not answered yet: they and their images are left alone. `landscape` spares finding
    the density again as long as the features are the same. `soon`: see `known_from`.
    """
    _check(belief, n, kind, choose, n_images_per_question, soon)
    known = known_from(answers, len(belief), soon=soon)
    askable = _askable(known, candidates, waiting)
    if n == 0 or len(belief) < 2:
        return []
    if choose == "random" and kind == "pair":
        return list(_first(n, _random_pairs(known, askable, seed)))
    width = 1 if kind == "pair" else n_images_per_question
    scene = _look(belief, known, landscape, askable, width, tuple(waiting))
    if choose == "random":
        return _questions(scene, _in_random_order(scene, seed)[:n])
    if choose == "uncertain":
        open_rows = _open_rows(scene)
        return _questions(scene, open_rows[np.argsort(_margin(scene.fit[open_rows]), kind="stable")][:n])
    return _introductions(scene, n) or _recommended(scene, n)


def question_about(
    belief: Belief,
    answers: Sequence[Answer],
    image: int,
    *,
    n_images_per_question: int = MAX_SHOWN,
    landscape: Landscape | None = None,
) -> Question | None:
    """The question that places this image, as a person wants to ask it; None if the answers already say all."""
    if not 0 <= image < len(belief):
        raise InputError(f"image {image} does not exist (the set has {len(belief):,} images)")
    known = known_from(answers, len(belief), soon=0)
    scene = _look(belief, known, landscape, np.ones(len(belief), bool), n_images_per_question, ())
    home = int(scene.exemplars.home[image])
    if home >= 0:
        return _introduction(scene, home) if scene.exemplars.image[home] == image else None
    made = _questions(scene, np.array([image]))
    return made[0] if made else None


def certain_share(belief: Belief, answers: Sequence[Answer], *, min_confidence: float = 0.95) -> float:
    """The share of images whose kind is certain now.

    Those that answers have joined to a group; and, with a model, those put with at least min_confidence into a cluster
    in which the members of exactly one such group are the majority of all grouped images there.
    """
    group = implied_groups(answers, len(belief))
    certain = group >= 0
    if belief.probabilities is not None and certain.any():
        clusters, k = belief.probabilities.argmax(1), belief.probabilities.shape[1]
        count = np.zeros((k, int(group.max()) + 1), np.int64)
        np.add.at(count, (clusters[certain], group[certain]), 1)
        known_clusters = 2 * count.max(1) > count.sum(1)
        certain |= known_clusters[clusters] & (belief.probabilities.max(1) >= min_confidence)
    return float(certain.mean()) if len(belief) else 0.0


def _check(belief: Belief, n: int, kind: str, choose: str, n_shown: int, soon: int) -> None:
    if kind not in ("which", "pair"):
        raise InputError(f"kind={kind!r} is no kind of question; use which or pair")
    if choose not in ("recommended", "uncertain", "random"):
        raise InputError(f"choose={choose!r} is no way to choose; use recommended, uncertain or random")
    if n < 0 or soon < 0:
        raise InputError(f"n={n} and soon={soon} must be whole numbers from 0 up")
    if not 1 <= n_shown <= MAX_SHOWN:
        raise InputError(f"n_images_per_question={n_shown} is not from 1 to {MAX_SHOWN}")
    if belief.probabilities is not None and len(belief.probabilities) != len(belief.features):
        raise InputError(
            f"{len(belief.probabilities):,} images have probabilities and {len(belief.features):,} have features; "
            "give both of the same images"
        )


def _askable(known: Known, candidates: ArrayLike | None, waiting: Iterable[Question]) -> NDArray[np.bool_]:
    n = len(known.component)
    askable = np.ones(n, bool)
    if candidates is not None:
        rows = np.asarray(candidates, np.int64)
        if rows.size and not (0 <= rows.min() and rows.max() < n):
            raise InputError(f"candidates name images that do not exist (the set has {n:,} images)")
        askable[:] = False
        askable[rows] = True
    askable[list(known.resting)] = False
    askable[[question.image for question in waiting]] = False
    return askable


def _look(
    belief: Belief,
    known: Known,
    landscape: Landscape | None,
    askable: NDArray[np.bool_],
    width: int,
    waiting: tuple[Question, ...],
) -> _Scene:
    seen = landscape_of(belief.features) if landscape is None else landscape
    exemplars = find_exemplars(belief, known, seen)
    fit = affinity(belief, exemplars)
    fit[excluded_exemplars(known, exemplars)] = -np.inf
    number = {int(image): at for at, image in enumerate(exemplars.image)}
    for pair in known.unsure:
        for one, other in (pair, pair[::-1]):
            if other in number:
                fit[one, number[other]] = -np.inf
    planned = {_pair(question.image, shown) for question in waiting for shown in question.shown}
    return _Scene(belief, seen, known, exemplars, fit, askable, width, planned, waiting)


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)


def _first(n: int, questions: Iterator[Question]) -> Iterator[Question]:
    return (question for question, _ in zip(questions, range(n), strict=False))


# Questions about images


def _open_rows(scene: _Scene) -> Rows:
    """Images that may be asked about and have an exemplar left: one for each component, in no exemplar's group."""
    is_open = scene.askable & (scene.exemplars.home < 0) & np.isfinite(scene.fit).any(1)
    busy = scene.known.component[[question.image for question in scene.waiting]]
    rows = np.flatnonzero(is_open & ~np.isin(scene.known.component, busy))
    return np.sort(rows[np.unique(scene.known.component[rows], return_index=True)[1]])


def _margin(fit: Floats) -> Floats:
    """How far the best exemplar is ahead of the second, (n,); without a second, as far as the furthest of all."""
    if fit.shape[1] < 2:
        return np.zeros(len(fit), np.float32)
    second, best = np.partition(fit, -2, axis=1)[:, -2:].T
    margin = best - second
    finite = margin[np.isfinite(margin)]
    return np.where(np.isfinite(margin), margin, finite.max() if finite.size else 0).astype(np.float32)


def _questions(scene: _Scene, rows: Rows) -> list[Question]:
    """Each image beside its likeliest exemplars that are left, the likeliest first."""
    made = []
    for row in rows.tolist():
        order = np.argsort(-scene.fit[row], kind="stable")[: scene.width]
        shown = scene.exemplars.image[order[np.isfinite(scene.fit[row, order])]]
        if len(shown):
            made.append(Question(row, tuple(shown.tolist())))
    return made


def _in_random_order(scene: _Scene, seed: int) -> Rows:
    """Open images in a random order that is the same for each call, those never asked about first."""
    order = np.argsort(_words(seed).random_raw(len(scene.belief)), kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    place[list(scene.known.asked)] += len(order)
    rows = _open_rows(scene)
    return rows[np.argsort(place[rows], kind="stable")]


def _random_pairs(known: Known, askable: NDArray[np.bool_], seed: int) -> Iterator[Question]:
    """Unsettled pairs: rounds with every image once in random order, each beside any other image."""
    words, n = _words(seed), len(askable)
    taken: set[tuple[int, int]] = set()
    for _ in range(_ROUNDS):
        first = np.argsort(words.random_raw(n), kind="stable")
        second = (words.random_raw(n) % np.uint64(n - 1)).astype(np.int64)
        second += second >= first
        for one, other in zip(first.tolist(), second.tolist(), strict=True):
            if askable[one] and _pair(one, other) not in taken and known.may_ask(one, other):
                taken.add(_pair(one, other))
                yield Question(one, (other,))


def _words(seed: int) -> np.random.Philox:
    if not 0 <= seed < 2**64:
        raise InputError(f"seed {seed} is not a whole number from 0 to 2**64 - 1")
    return np.random.Philox(key=np.array([seed, 5], np.uint64))  # 5: draws.Purpose has 1 to 4


# The recommended choice


def _introductions(scene: _Scene, n: int) -> list[Question]:
    """The warm-up: exemplars that have been compared with too few others, each beside its nearest."""
    made: list[Question] = []
    for at in range(len(scene.exemplars)):
        if len(made) < n and not _introduced(scene, at) and (question := _introduction(scene, at)) is not None:
            made.append(question)
            scene.planned.update(_pair(question.image, shown) for shown in question.shown)
    return made


def _introduced(scene: _Scene, at: int) -> bool:
    """Whether an exemplar is settled, or about to be, against as many others as one question shows."""
    image = int(scene.exemplars.image[at])
    others = [int(other) for other in scene.exemplars.image if other != image]
    compared = sum(_pair(image, other) in scene.planned or scene.known.settled(image, other) for other in others)
    return compared >= min(scene.width, len(others))


def _introduction(scene: _Scene, at: int) -> Question | None:
    """An exemplar beside the nearest others that it has not been compared with."""
    image = int(scene.exemplars.image[at])
    if not scene.askable[image]:
        return None
    near = affinity_between(scene, at)
    order = scene.exemplars.image[np.argsort(-near, kind="stable")].tolist()
    left = [other for other in order if other != image and _may_meet(scene, image, other)]
    return Question(image, tuple(left[: scene.width])) if left else None


def affinity_between(scene: _Scene, at: int) -> Floats:
    own = scene.exemplars.image[at]
    return affinity(scene.belief, scene.exemplars, np.array([own]))[0]


def _may_meet(scene: _Scene, one: int, other: int) -> bool:
    return _pair(one, other) not in scene.planned and scene.known.may_ask(one, other)


def _recommended(scene: _Scene, n: int) -> list[Question]:
    """Follow-ups for up to half of the questions, then hard, representative and diverse images."""
    rows = _open_rows(scene)
    begun = np.isin(scene.known.component[rows], scene.known.component[list(scene.known.asked)])
    again = _follow_ups(scene, rows[begun], -(-n // 2))
    fresh = rows[~begun]
    chosen = np.concatenate([again, _hard_dense_spread(scene, fresh, again, n - len(again))])
    if len(chosen) < n:
        rest = np.setdiff1d(rows[begun], again)
        chosen = np.concatenate([chosen, rest[: n - len(chosen)]])
    return _questions(scene, chosen)


def _follow_ups(scene: _Scene, rows: Rows, n: int) -> Rows:
    """Images that fitted none of what was shown, nearest to their end first, one for each place they seemed to fit.

    One, because if it turns out to be of a new kind, its neighbours will be shown to it.
    """
    n_left = np.isfinite(scene.fit[rows]).sum(1)
    order = rows[np.lexsort((-scene.landscape.density[rows], n_left))]
    seemed = affinity(scene.belief, scene.exemplars, order).argmax(1)
    first = np.sort(np.unique(seemed, return_index=True)[1])
    return np.asarray(order[first[:n]])


def _hard_dense_spread(scene: _Scene, rows: Rows, again: Rows, n: int) -> Rows:
    hard = ranks(-_margin(scene.fit[rows]))
    dense = ranks(scene.landscape.density[rows])
    best = np.sort(np.argsort(-(hard + dense), kind="stable")[:_POOL])
    pool, score = rows[best], (hard + dense)[best]
    before = [*scene.known.asked, *(question.image for question in scene.waiting), *again, *scene.exemplars.image]
    taken = scene.belief.features[np.unique(np.array(before, np.int64))]
    return pool[spread(scene.belief.features[pool], score, n, taken=taken)]
