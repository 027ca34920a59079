"""Rounds of asking and training: answers, a short training on their pairs, and what the model then believes.

A round begins with the same start, not with the model of the round before, whose mistakes it would confirm.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal import rng
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.rng import Purpose
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import Floats, Rows
from constraintmatch.constraints.propagation import FOLDS, known_groups, likely_kinds, seeds
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import (
    NONE,
    UNSURE,
    Answer,
    Question,
    constraints_of,
    links_of,
    stated_constraints,
    triplets_of,
)
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.next_question import Choice, Kind, next_questions

if TYPE_CHECKING:
    from constraintmatch.evaluation.judge import Verdict
    from constraintmatch.methods.propagate import Frozen
    from constraintmatch.models.cluster_model import ClusterModel


MOSTLY = 0.5  # the start is right about most known images; a kind has most of the probability
OUTVOTED = 5  # known images for each cluster from which on answers to "which of these?" count as they are
COIN = 0.5  # the most that an annotator errs who does not err everywhere
DOUBTFUL = 0.03  # a rate of wrong answers that 500 right ones do not reach
LIKELIER = 1.0  # standard errors by which hidden answers must be likelier by the others as stated than otherwise
COMPARED = 10_000  # images by which that is found out; with more a round would wait for it
MOST_PAIRS = 1_000_000  # of the closure in one training; 1,400 images that are all settled have as many


@dataclass(frozen=True, eq=False)
class LabelOracle:
    """A simulated annotator with labels (n,): UNSURE with the probability `unsure`, wrong with `error`, else right.

    If several shown images have the right label, it chooses the first. A wrong answer is any other choice, each as
    likely. The answer depends on seed and question only, not on earlier questions. Labels know which image of a triplet
    is nearer if one of the two is of its kind; else the answer is UNSURE.

    With `features` (n, d) it errs where it is easily misled, and then takes what misleads it most: the nearer a wrong
    choice is in the features and the farther the right one, the more often. `error` is then the mean over random
    pairs; no question is worse than a coin. `annotators` are several people by how often each errs, as multiples of
    `error` and relative to their mean; all questions about an image go to the same one.
    """

    labels: NDArray[np.integer]
    error: float = 0.05
    unsure: float = 0.0
    seed: int = 0
    features: NDArray[np.floating] | None = None
    annotators: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if np.ndim(self.labels) != 1:
            raise InputError(f"labels must be one column, not of shape {np.shape(self.labels)}")
        if self.error < 0 or self.unsure < 0 or not self.error + self.unsure <= 1:
            raise InputError(f"error={self.error} and unsure={self.unsure} must be shares that sum to at most 1")
        if self.features is not None and (np.ndim(self.features) != 2 or len(self.features) != len(self.labels)):
            raise InputError(
                f"features of shape {np.shape(self.features)} for {len(self.labels):,} labels; give a row each"
            )
        if self.annotators and not (min(self.annotators) >= 0 < sum(self.annotators) < np.inf):
            raise InputError(f"annotators={self.annotators} must be numbers from 0, and some above it")

    def answer(self, question: Question) -> Answer:
        """The answer to this question; the same whenever it is asked."""
        if max(question.image, *question.shown) >= len(self.labels):
            raise InputError(f"a question about images beyond the {len(self.labels):,} that have labels")
        digest = self._digest(question.image, *question.shown)
        draw, pick = (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53, int.from_bytes(digest[8:], "big")
        if draw < self.unsure:
            return Answer(question, UNSURE)
        right = [at for at, shown in enumerate(question.shown) if self.labels[shown] == self.labels[question.image]]
        if question.nearer and len(right) != 1:  # two of its kind, or none: labels do not say which is nearer
            return Answer(question, UNSURE)
        right = right or [NONE]
        others = range(len(question.shown)) if question.nearer else (NONE, *range(len(question.shown)))
        wrong = [choice for choice in others if choice not in right]
        rate, chosen = self.error, wrong[pick % len(wrong)]
        if self.features is not None and self.error:
            middle, scale, level = self._misled
            near = {NONE: middle, **dict(enumerate(self._cosines(np.array(question.shown), question.image).tolist()))}
            chosen = max(wrong, key=lambda choice: near[choice])
            doubt = (near[chosen] - max(near[choice] for choice in right)) / scale
            rate = math.exp(min(doubt + level, 0))
        if self.annotators:
            who = int.from_bytes(self._digest(question.image), "big") % len(self.annotators)
            rate *= self.annotators[who] / float(np.mean(self.annotators))
        rate = min(rate, max(COIN, self.error))
        return Answer(question, right[0] if draw >= self.unsure + rate else chosen)

    def _digest(self, *images: int) -> bytes:
        return blake2b(",".join(map(str, (self.seed, *images))).encode(), digest_size=16).digest()

    def _cosines(self, left: Rows, right: Rows | int) -> NDArray[np.float64]:
        assert self.features is not None
        one, other = (np.asarray(self.features[rows], np.float64) for rows in (left, right))
        lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
        return np.asarray((one * other).sum(-1) / np.maximum(lengths, 1e-12))

    @cached_property
    def _misled(self) -> tuple[float, float, float]:
        """Of random pairs: the cosine between "same" and "different", half the spread, and a level.

        The level is such that exp(doubt + level), at most a coin's, is `error` on average.
        """
        pairs = Constraints.sample(self.labels, min(5_000, len(self.labels)), seed=0)
        cosine, same = self._cosines(pairs.left, pairs.right), pairs.link > 0.5
        kinds = [cosine[kind].mean() for kind in (same, ~same) if kind.any()]
        middle, scale = float(np.mean(kinds)), float(max(cosine.std() / 2, 1e-12))
        doubt, low, high = np.where(same, middle - cosine, cosine - middle) / scale, -100.0, 100.0
        while high - low > 1e-6:
            level = (low + high) / 2
            enough = np.minimum(np.exp(np.minimum(doubt + level, 0)), max(COIN, self.error)).mean() >= self.error
            low, high = (low, level) if enough else (level, high)
        return middle, scale, high


@dataclass(frozen=True)
class Asking:
    """How questions are chosen, and how many at a time."""

    kind: Kind = "which"
    choose: Choice = "recommended"
    batch: int = 10  # questions chosen at a time from the answers so far; small batches find all kinds sooner
    seed: int = 0
    candidates: Rows | None = None  # the images that a question may be about; None: all


def trusted_constraints(
    answers: Sequence[Answer], n_images: int, beliefs: Floats | None, frozen: "Frozen | None" = None
) -> Constraints:
    """What to learn from the answers: what they state or, if they are few, what is likeliest.

    `beliefs` (n, k) are the start's. While few images of a kind are known, one wrong answer may lead them all astray,
    so answers are weighed against a start that agrees with most of them (`likely_kinds`). Many images outvote a wrong
    answer (decision 057). Answers about pairs join groups more easily; of these, with `frozen`, others decide.
    """
    said = stated_constraints(answers, n_images)
    groups = [] if beliefs is None else known_groups(said)
    if beliefs is None or len(groups) < 2:
        return said
    known = np.concatenate(groups)
    if frozen is not None and all(len(one.question.shown) == 1 for one in answers):
        know_better = predict_each_other(answers, beliefs, frozen)
    elif not (know_better := len(known) >= OUTVOTED * beliefs.shape[1]):
        placed = seeds(groups, beliefs)[known]
        has_cluster = placed.max(1) > 0
        agree = has_cluster & (placed.argmax(1) == beliefs[known].argmax(1))
        know_better = agree.sum() <= MOSTLY * has_cluster.sum()
    return said if know_better else _weigh(answers, said, beliefs)


def _weigh(answers: Sequence[Answer], said: Constraints, beliefs: Floats) -> Constraints:
    """The likeliest kinds of the images by answers and beliefs (n, k); what is `said`, if hardly any seems wrong."""
    pairs, groups = Constraints.from_arrays(*links_of(answers), n_images=said.n_images), known_groups(said)
    many = sum(map(len, groups)) >= OUTVOTED * beliefs.shape[1]
    rows, kinds, wrong = likely_kinds(pairs, beliefs, groups if many else ())
    if wrong < DOUBTFUL:
        return said
    sure = kinds.max(1) > MOSTLY
    rows = rows[sure]
    _, first, number = np.unique(kinds.argmax(1)[sure], return_index=True, return_inverse=True)
    others = np.setdiff1d(np.arange(len(rows)), first)
    must, cannot = np.stack([first[number[others]], others]), first[np.stack(np.triu_indices(len(first), 1))]
    left, right = rows[np.concatenate([must, cannot], axis=1)]
    same = np.repeat([1.0, 0.0], [len(others), cannot.shape[1]])
    return Constraints.from_arrays(left, right, same, n_images=said.n_images)


def predict_each_other(answers: Sequence[Answer], beliefs: Floats, frozen: "Frozen") -> bool:
    """Whether hidden answers are likelier by the others as stated than by the beliefs, and than by both weighed.

    A fifth of the images is hidden at a time, with all answers about them (decision 056).
    """
    from constraintmatch.evaluation.judge import Judge, pool
    from constraintmatch.methods.propagate import choose_rows

    n, found = len(frozen), list[list["Verdict"]]()
    ends = np.array([(one.question.image, one.question.shown[0]) for one in answers])
    rows, part = choose_rows([ends.ravel()], n, COMPARED), np.random.default_rng(0).integers(0, FOLDS, n)
    some_frozen, start = frozen.take(rows), beliefs[rows]

    def spread(groups: Sequence[Rows]) -> Floats:
        return some_frozen.spread([np.searchsorted(rows, group) for group in groups], start) if groups else start

    for number in range(FOLDS):
        hidden = (part[ends] == number).any(1)
        rest = list(compress(answers, ~hidden))
        pairs = Constraints.from_arrays(*links_of(compress(answers, hidden)), n_images=n)
        said = stated_constraints(rest, n)
        groups = known_groups(said)
        if len(groups) > 1 and len(pairs):
            judge = Judge(pairs.merged())
            seen = spread(groups), start, spread(known_groups(_weigh(rest, said, beliefs)))
            stated, *others = (judge.losses(one[np.searchsorted(rows, judge.rows)]) for one in seen)
            found.append([judge.compare(other, stated) for other in others])
    return bool(found) and all(pool(some).surely(LIKELIER) > 0 for some in zip(*found, strict=True))


def closure_pairs(
    answers: Sequence[Answer],
    n_images: int,
    beliefs: Floats | None = None,
    frozen: "Frozen | None" = None,
    *,
    most: int = MOST_PAIRS,
    seed: int = 0,
) -> Constraints:
    """Pairs to train on, over n_images: all that the `trusted_constraints` imply, or an even draw of `most` of them.

    Cannot-links that only follow from the choice of another image are left out: one wrong link would spread over two
    groups. Must-links keep their natural share: with half must-links the pair loss merges clusters (docs/findings.md).
    Triplets come along, without those that contradict each other.
    """
    said = trusted_constraints(answers, n_images, beliefs, frozen)
    component, cannot = said.component_constraints()
    sizes = np.bincount(component, minlength=1)
    within, between = sizes * (sizes - 1) // 2, sizes[cannot].prod(axis=1)
    total = int(within.sum() + between.sum())
    triplets = triplets_of(answers).resolve("drop", n_images)
    if total <= most:
        return replace(said.close(max_pairs=most), triplets=triplets)
    words, n_must = rng.stream(seed, Purpose.CLOSURE), round(most * int(within.sum()) / total)
    members, first = np.argsort(component, kind="stable"), np.cumsum(sizes) - sizes
    group = _draw_by_weight(words, within, n_must)  # a group by its number of pairs, then two of its images
    one = rng.below(words, sizes[group])
    other = rng.below(words, sizes[group] - 1)
    other += other >= one
    edges = cannot[_draw_by_weight(words, between, most - n_must)]  # two groups, then an image of each
    must = [members[first[group] + of_group] for of_group in (one, other)]
    apart = [members[first[side] + rng.below(words, sizes[side])] for side in edges.T]
    left, right = np.concatenate([must, apart], axis=1)
    link = np.repeat([1.0, 0.0], [n_must, most - n_must])
    return replace(Constraints.from_arrays(left, right, link, n_images=n_images), triplets=triplets)


def _draw_by_weight(words: np.random.Philox, weight: Rows, n: int) -> Rows:
    """n numbers of entries, each as likely as its weight."""
    if not n:
        return np.empty(0, np.int64)
    ends = np.cumsum(weight)
    drawn = rng.below(words, np.full(n, ends[-1]))
    return np.searchsorted(ends, drawn, side="right").astype(np.int64)


def ask_until(
    belief: Belief, answers: Sequence[Answer], total: int, annotator: LabelOracle, asking: Asking
) -> list[Answer]:
    """The answers with more up to `total`, or fewer if nothing is left to ask.

    After thousands of answers ten more change little: a batch then has a hundredth of the answers so far.
    """
    found = list(answers)
    how: dict[str, Any] = {name: getattr(asking, name) for name in ("kind", "choose", "seed", "candidates")}
    while len(found) < total:
        n = min(max(asking.batch, len(found) // 100), total - len(found))
        chosen = next_questions(belief, found, n, **how)
        if not chosen:
            break
        found += [annotator.answer(question) for question in chosen]
    return found


def simulate(
    believe: Callable[[Any], Belief],
    train: Callable[[Sequence[Answer]], Any],
    start: Any,
    budgets: Sequence[int],
    annotator: LabelOracle,
    asking: Asking,
    answers: Sequence[Answer] = (),
) -> Iterator[tuple[list[Answer], Any]]:
    """The answers and the model after a round for each budget, in rising order: ask up to it, train, believe the model.

    With the `answers` of earlier rounds it continues there, after a training on them.
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
        yield list(found), model


def inform_start(start: "ClusterModel", frozen: "Frozen", answers: Sequence[Answer]) -> "ClusterModel":
    """A copy of the start (with clusters) with a head that knows the answers; see `propagate`.

    The answers spread to all images before the network is trained, so that pseudo-constraints confirm the answers, not
    the mistakes of the start. `frozen` holds the features of the start's backbone, which are the same in every round.
    """
    from constraintmatch.methods.propagate import teach_groups

    n = len(frozen)
    said = trusted_constraints(answers, n, frozen.probabilities(start), frozen)
    groups = known_groups(said, constraints_of(answers, n))
    return teach_groups(start, frozen, groups) if len(groups) > 1 else copy.deepcopy(start)


def head_belief(model: "ClusterModel", frozen: "Frozen") -> Belief:
    """What a model with this backbone believes, without a pass over the images."""
    return Belief.of(frozen.features, frozen.probabilities(model) if model.config.n_clusters else None)


def image_belief(
    model: Any, images: ImageSet, *, device: Any = None, progress: Callable[[int, int], None] | None = None
) -> Belief:
    """What a model believes about the images, in one pass; without clusters it gives features alone.

    `device` None is the model's own.
    """
    from constraintmatch.evaluation.metrics import embed, predict

    if model.config.n_clusters == 0:
        return Belief.of(embed(model, images, device=device, progress=progress))
    found = predict(model, images, features=True, device=device, progress=progress)
    assert found.features is not None
    return Belief.of(found.features, found.probabilities)
