"""Rounds of asking and training: pairs from the answers so far, a short training, what the model then believes.

A round begins with the same start again, not with the model of the round before: what that one had wrong it would
confirm, and a start with more answers is what a person expects of more answers.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal import rng
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.rng import Purpose
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.propagation import known_groups
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import Answer, Question, constraints_of, stated_constraints
from constraintmatch.questions.belief import Belief, landscape_of
from constraintmatch.questions.next_question import Choice, Kind, next_questions

if TYPE_CHECKING:
    from constraintmatch.methods.propagate import Frozen
    from constraintmatch.models.cluster_model import ClusterModel

__all__ = [
    "Annotator",
    "Asking",
    "Round",
    "add_anchors",
    "ask_until",
    "closure_pairs",
    "head_belief",
    "image_belief",
    "inform_start",
    "simulate",
]

Rows = NDArray[np.int64]

ANCHORS = 10_000  # pairs that hold a round where it began: as many as images, and so many at most
SURE = 0.9  # of an image that is in one of them
MOST_PAIRS = 1_000_000  # of the closure in one training; 1,400 images that are all settled have as many


class Annotator(Protocol):
    """Somebody who answers: a person behind a page, or labels."""

    def answer(self, question: Question) -> Answer:
        """The answer to a question."""


@dataclass(frozen=True)
class Asking:
    """How questions are chosen, and after how many of them somebody looks at the model again."""

    kind: Kind = "which"
    choose: Choice = "recommended"
    batch: int = 10  # questions chosen at a time from the answers so far; small batches find all kinds sooner
    seed: int = 0
    candidates: Rows | None = None  # the images that may be asked about; None: all


@dataclass(frozen=True)
class Round:
    """What one round left: the answers so far, and the model that was trained on them."""

    answers: tuple[Answer, ...]
    model: Any  # a ClusterModel; this module needs no torch


def closure_pairs(answers: Sequence[Answer], n_images: int, *, most: int = MOST_PAIRS, seed: int = 0) -> Constraints:
    """Pairs to train on, over n_images: all that the answers imply, or `most` of them drawn evenly.

    Of what was said, not of what only follows from the choice of another image: one wrong link would spread over two
    groups. Must-links keep their natural share: half of the pairs being must-links makes the pair loss merge clusters
    (docs/findings.md).
    """
    said = stated_constraints(answers, n_images)
    view = said.component_constraints()
    sizes = np.bincount(view.component, minlength=1)
    within, between = sizes * (sizes - 1) // 2, sizes[view.cannot[:, 0]] * sizes[view.cannot[:, 1]]
    total = int(within.sum() + between.sum())
    if total <= most:
        return said.close(max_pairs=most)
    words = rng.stream(seed, Purpose.CLOSURE)
    members = np.argsort(view.component, kind="stable")
    first = np.cumsum(sizes) - sizes
    n_must = round(most * int(within.sum()) / total)
    must = _within(words, within, sizes, first, members, n_must)
    cannot = _between(words, between, view.cannot, sizes, first, members, most - n_must)
    left, right = np.concatenate([must[0], cannot[0]]), np.concatenate([must[1], cannot[1]])
    link = np.repeat([1.0, 0.0], [n_must, most - n_must])
    return Constraints.from_arrays(left, right, link, n_images=n_images)


def add_anchors(pairs: Constraints, probabilities: NDArray[np.float32], *, seed: int = 0) -> Constraints:
    """The pairs, and cannot-links between what the model is sure of that a round begins with (n, k).

    After 50 answers the network ended far below the start without them: so few pairs are soon learnt by heart, and
    pseudo-constraints alone merge clusters (decision 036). As many are drawn as there are images, if those are few;
    images that answers are about take no part. Must-links are left out: too many of them are wrong.
    """
    free = probabilities.max(1) >= SURE
    free[pairs.left] = free[pairs.right] = False
    rows, cluster = np.flatnonzero(free), probabilities.argmax(1)
    if len(rows) < 2:
        return pairs
    words, n = rng.stream(seed, Purpose.ANCHORS), min(ANCHORS, len(free))
    one = rng.below(words, np.full(n, len(rows)))
    drawn = np.stack([rows[one], rows[rng.another(words, one, len(rows))]])
    left, right = drawn[:, cluster[drawn[0]] != cluster[drawn[1]]]
    columns = (pairs.left, left), (pairs.right, right), (pairs.link, np.zeros(len(left)))
    together = [np.concatenate(column) for column in columns]
    weight = np.concatenate([pairs.weight, np.ones(len(left), np.float32)])
    return Constraints.from_arrays(*together, n_images=pairs.n_images, weight=weight)


def _within(
    words: np.random.Philox, weight: Rows, sizes: Rows, first: Rows, members: Rows, n: int
) -> tuple[Rows, Rows]:
    """n must-links: a group by its number of pairs, then two of its images."""
    group = _by_weight(words, weight, n)
    one = rng.below(words, sizes[group])
    other = rng.below(words, sizes[group] - 1)
    other += other >= one
    return members[first[group] + one], members[first[group] + other]


def _between(
    words: np.random.Philox, weight: Rows, edges: Rows, sizes: Rows, first: Rows, members: Rows, n: int
) -> tuple[Rows, Rows]:
    """n cannot-links: two groups by their number of pairs, then an image of each."""
    chosen = edges[_by_weight(words, weight, n)]
    ends = [members[first[group] + rng.below(words, sizes[group])] for group in chosen.T]
    return ends[0], ends[1]


def _by_weight(words: np.random.Philox, weight: Rows, n: int) -> Rows:
    """n numbers of entries, each as likely as its weight."""
    if not n:
        return np.empty(0, np.int64)
    ends = np.cumsum(weight)
    drawn = rng.below(words, np.full(n, ends[-1]))
    return np.searchsorted(ends, drawn, side="right").astype(np.int64)


def ask_until(
    belief: Belief, answers: Sequence[Answer], total: int, annotator: Annotator, asking: Asking
) -> list[Answer]:
    """The answers with so many more that there are `total`, or fewer where nothing is left to ask.

    After thousands of answers ten more change little: a batch then has a hundredth of the answers so far.
    """
    found, landscape = list(answers), landscape_of(belief.features)
    while len(found) < total:
        n = min(max(asking.batch, len(found) // 100), total - len(found))
        chosen = next_questions(
            belief,
            found,
            n,
            kind=asking.kind,
            choose=asking.choose,
            seed=asking.seed,
            candidates=asking.candidates,
            landscape=landscape,
        )
        if not chosen:
            break
        found += [annotator.answer(question) for question in chosen]
    return found


def simulate(
    believe: Callable[[Any], Belief],
    train: Callable[[Sequence[Answer]], Any],
    start: Any,
    budgets: Sequence[int],
    annotator: Annotator,
    asking: Asking,
    answers: Sequence[Answer] = (),
) -> Iterator[Round]:
    """A round for each budget, in rising order: ask until it is reached, train on all answers, believe that model.

    With the `answers` of a round before it goes on from there, after a training on them.
    """
    if list(budgets) != sorted(set(budgets)) or not budgets or budgets[0] < 1:
        raise InputError(f"budgets {list(budgets)} must rise, from 1 up")
    found = list(answers)
    belief = believe(train(found) if found else start)
    for budget in budgets:
        before = len(found)
        found = ask_until(belief, found, budget, annotator, asking)
        if len(found) == before:
            return
        model = train(found)
        belief = believe(model)
        yield Round(tuple(found), model)


def inform_start(start: "ClusterModel", frozen: "Frozen", answers: Sequence[Answer]) -> "ClusterModel":
    """A copy of the start (with clusters) whose head knows the answers already; see `propagate`.

    What the answers say of some images is carried to all before the network is trained: pseudo-constraints then confirm
    what a person said, not what the start had wrong. `frozen` is what the start's backbone makes of the images: it is
    the same in every round.
    """
    from constraintmatch.methods.propagate import teach_groups

    n = len(frozen)
    groups = known_groups(stated_constraints(answers, n), constraints_of(answers, n))
    return teach_groups(start, frozen, groups) if len(groups) > 1 else copy.deepcopy(start)


def head_belief(model: "ClusterModel", frozen: "Frozen") -> Belief:
    """What a model with that backbone believes, without a pass over the images."""
    return Belief.of(frozen.features, frozen.probabilities(model) if model.config.n_clusters else None)


def image_belief(
    model: Any, images: ImageSet, *, device: Any = None, progress: Callable[[int, int], None] | None = None
) -> Belief:
    """What a model believes of the images, in one pass; one that has no clusters yet gives features alone.

    `device` None is the model's own.
    """
    from constraintmatch.evaluation.metrics import embed, predict

    if model.config.n_clusters == 0:
        return Belief.of(embed(model, images, device=device, progress=progress))
    found = predict(model, images, features=True, device=device, progress=progress)
    assert found.features is not None
    return Belief.of(found.features, found.probabilities)
