"""Which model to keep, judged by pairs that it was not trained on.

A pair of images is the same with the probability s = ⟨p, q⟩ that the model gives it. An answer misses "same" with the
rate `missed` and invents it with the rate `invented`, so it says "same" with s (1 − missed) + (1 − s) invented. The two
rates are separate: of 20 kinds, one wrong answer in twenty cannot-links outnumbers the true must-links.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from constraintmatch._internal import rng
from constraintmatch._internal.rng import Purpose
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import pair_keys

Floats = NDArray[np.float64]

SHARE = 0.2  # of the pairs, held out to judge by
FEWEST = 40  # images to judge by, where answers imply many pairs and that is at most a fifth of the images
MANY = 4  # pairs of an image on average, which answers imply: random pairs have one or two
LEAST = 8  # must-links, and cannot-links, that a judge needs
FEW_ANSWERS = 30  # an annotator with at least this many pairs gets an error rate of their own
LEAST_TRIPLETS = 32  # or anchors of triplets: most triplets at random say little
TRIPLETS_WRONG = 0.05  # the share of the triplets that is expected to be wrong
CAUTION = 0.5  # standard errors by which a trained network must be better: of equals the less trained one is kept
UNDECIDED = -1.0  # standard errors by which held-out pairs may be against what other reasons favour
LEAST_GAIN = 0.001  # nats: less is no reason to change anything
IN_DOUBT, IN_ALL = 2.0, 3.0  # nats that all pairs together must show for a head: where doubt may favour it, or not
FALLEN = 2.0  # standard errors by which a model must be worse for a training to go back
MOST_WRONG = 0.4  # of either kind: answers of which half are wrong say nothing
USUAL = 0.02, 50.0  # the rate of wrong answers that is expected before any is seen, and how many answers that weighs
DOUBTED = 12  # pairs that a verdict lists for a second look
TEMPERATURES = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.12)  # of the logits: how sure a model is of itself is not judged


class Rates(NamedTuple):
    """How often an answer says "different" of the same kind, and "same" of different kinds."""

    missed: float = 0.0
    invented: float = 0.0


class Verdict(NamedTuple):
    """By how much a model is better than another, in nats, on the mean over images, and the standard error of that."""

    gain: float
    error: float

    def surely(self, caution: float) -> float:
        """The gain that can be counted on, less this many standard errors."""
        return self.gain - caution * self.error

    def is_enough(self, caution: float, count: int) -> bool:
        """Whether the other model is surely better, as far as this number of pairs can show a gain at all."""
        least = self.surely(caution)
        return least > LEAST_GAIN and least * count > (IN_ALL if caution >= 0 else IN_DOUBT)

    @property
    def has_fallen(self) -> bool:
        """Whether the other model is clearly better."""
        return self.gain + FALLEN * self.error < 0


def pool(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of several judges, as if their errors were independent."""
    gains, errors = zip(*verdicts, strict=True)
    return Verdict(float(np.mean(gains)), float(np.linalg.norm(errors) / len(errors)))


def link_losses(same: Floats, link: Floats, rates: Rates) -> Floats:
    """−log of the likelihood of each link in [0, 1], for pairs that are the same with these probabilities."""
    says_same = np.clip(same * (1 - rates.missed) + (1 - same) * rates.invented, 1e-6, 1 - 1e-6)
    return -(link * np.log(says_same) + (1 - link) * np.log(1 - says_same))


def estimate_rates(same: Floats, link: Floats, weight: Floats | None = None) -> list[Rates]:
    """The rates that make the links (n,) likeliest (EM), for each row of probabilities that pairs are the same (t, n).

    What a model has wrong counts as wrong answers too: on a weak model the rates come out too high, not too low.
    """
    weight = np.ones(len(link)) if weight is None else weight
    expected, strength = USUAL
    missed = invented = np.full((len(same), 1), expected)
    for _ in range(30):
        truly = _truly_same(same, link, missed, invented)
        kinds = ((1 - link) * truly, truly), (link * (1 - truly), 1 - truly)
        sums = [[(weight * of).sum(1, keepdims=True) for of in kind] for kind in kinds]
        missed, invented = (np.minimum((expected * strength + odd) / (strength + of), MOST_WRONG) for odd, of in sums)
    return [Rates(*row) for row in np.hstack([missed, invented]).tolist()]


def repeat_rate(constraints: Constraints, *, least: int = 10) -> float | None:
    """The rate of wrong answers among pairs that were answered more than once; None if they are fewer than `least`.

    Two answers to one pair differ with 2 e (1 − e) where each is wrong with e.
    """
    hard = constraints.take((constraints.link == 0) | (constraints.link == 1))
    _, number = np.unique(pair_keys(hard.left, hard.right, hard.n_images), return_inverse=True)
    asked = np.bincount(number, minlength=1).astype(float)
    same = np.bincount(number, hard.link, minlength=1)
    again = asked > 1
    if again.sum() < least:
        return None
    differ = (same * (asked - same) / np.maximum(asked * (asked - 1) / 2, 1))[again].mean()
    return float(min((1 - np.sqrt(max(1 - 2 * differ, 0))) / 2, MOST_WRONG))


def doubts(same: Floats, link: Floats, rates: Rates) -> Floats:
    """The probability that each link is wrong."""
    truly = _truly_same(same, link, *rates)
    return np.asarray(link * (1 - truly) + (1 - link) * truly)


def trust_annotators(constraints: Constraints, wrong: Floats) -> NDArray[np.float32]:
    """Weights of the pairs: less for annotators whose pairs are wrong more often than those of others."""
    who, number = np.unique(np.array(constraints.annotator), return_inverse=True)
    count = np.bincount(number, minlength=len(who))
    rate = np.where(count >= FEW_ANSWERS, np.bincount(number, wrong) / np.maximum(count, 1), wrong.mean())
    trust = np.maximum(1 - 2 * rate, 0.05) ** 2
    return np.asarray(constraints.weight * trust[number] / trust.max(), np.float32)


def hide_images(
    constraints: Constraints, *, share: float = SHARE, seed: int = 0, part: int = 0
) -> tuple[Constraints, Constraints]:
    """The pairs in two parts: those without hidden images to train on, and about this share of them to judge by.

    Every pair of a hidden image is held out, so nothing that training pairs imply is among them. A pair has two images:
    half the share of the images is hidden, but more where few images have many pairs, because ten images judge by
    chance. An image of many pairs stays: hiding it would hold out most of them. Of triplets the share of the anchors is
    hidden, and the images that are hidden in the pairs. Another `part` hides other images, as long as there are some.
    """
    n = len(constraints)
    ends = np.concatenate([constraints.left, constraints.right])
    rows = np.tile(np.arange(n), 2)
    order = np.argsort(ends, kind="stable")
    images, first, degree = np.unique(ends[order], return_index=True, return_counts=True)
    few = degree <= max(1.0, 4 * degree.mean() if n else 0.0)
    drawn = rng.permutation(rng.stream(seed, Purpose.HOLD_OUT), len(images))
    least = min(FEWEST, len(images) // 5) if n and degree.mean() > MANY else 0
    many = max(least, round(share / 2 * len(images)))
    hidden = drawn[few[drawn]][part * many : (part + 1) * many]
    held = np.zeros(n, bool)
    for at in hidden.tolist():
        held[rows[order[first[at] : first[at] + degree[at]]]] = True
    training, judging, triplets = constraints.take(~held), constraints.take(held), constraints.triplets
    anchors = np.unique(triplets.rows[:, 0])
    many = round(share * len(anchors))
    drawn = rng.permutation(rng.stream(seed, Purpose.HOLD_OUT), len(anchors))[part * many : (part + 1) * many]
    apart = np.isin(triplets.rows[:, 0], np.union1d(anchors[drawn], images[hidden]))
    return replace(training, triplets=triplets.take(~apart)), replace(judging, triplets=triplets.take(apart))


@dataclass(frozen=True, eq=False)
class Judge:
    """Pairs to judge models by; `rows` are their images, and models are judged by what they say of these.

    The pairs of one image are one piece of evidence, however many an answer implies: each image counts once. Triplets
    of one anchor come after the pairs, and are evidence about the anchor.
    """

    pairs: Constraints

    @property
    def triplets(self) -> NDArray[np.int64]:
        return self.pairs.triplets.rows

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        return np.unique(np.concatenate([self.pairs.left, self.pairs.right, self.triplets.ravel()]))

    @cached_property
    def units(self) -> NDArray[np.int64]:
        """The image that each pair is evidence about, numbered from 0: of its two images the one with more pairs."""
        degree = np.bincount(np.concatenate([self.pairs.left, self.pairs.right]), minlength=1)
        left, right = self.pairs.left, self.pairs.right
        units = np.where(degree[left] >= degree[right], left, right)
        return np.unique(np.concatenate([units, self.triplets[:, 0]]), return_inverse=True)[1]

    @cached_property
    def weight(self) -> Floats:
        """The weight of each pair: those of one image have the mean of their weights together."""
        weight = np.concatenate([self.pairs.weight, self.pairs.triplets.weight]).astype(float)
        return weight / np.maximum(np.bincount(self.units, minlength=1), 1)[self.units]

    @property
    def n_must_links(self) -> int:
        """Images with a must-link."""
        return len(np.unique(self.units[: len(self.pairs)][self.pairs.link > 0.5]))

    @property
    def n_cannot_links(self) -> int:
        """Images with a cannot-link."""
        return len(np.unique(self.units[: len(self.pairs)][self.pairs.link < 0.5]))

    @property
    def count(self) -> str:
        """What it judges by, in words."""
        return f"{len(self.pairs):,} held-out pairs" + (f" and {n:,} triplets" if (n := len(self.triplets)) else "")

    def can_judge(self, least: int = LEAST) -> bool:
        """Whether there are enough pairs of both kinds, of different images, or enough triplets."""
        pairs = min(self.n_must_links, self.n_cannot_links) >= least
        return pairs or len(np.unique(self.triplets[:, 0])) >= LEAST_TRIPLETS

    def losses(self, probabilities: NDArray[np.float32]) -> Floats:
        """The loss of each pair, from what a model says of `rows` (m, k), its sureness and the rates fitted to them."""
        return self._fitted(probabilities)[0]

    def rates(self, probabilities: NDArray[np.float32]) -> Rates:
        """How often the pairs are wrong, as far as the model can tell."""
        return self._fitted(probabilities)[1]

    def contradicts(self, probabilities: NDArray[np.float32]) -> bool:
        """Whether a model finds the images of cannot-links clearly more alike than those of must-links."""
        same = self.same(probabilities)
        must, cannot = same[self.pairs.link > 0.5], same[self.pairs.link < 0.5]
        if min(len(must), len(cannot)) < LEAST:
            return False
        error = np.sqrt(must.var() / len(must) + cannot.var() / len(cannot))
        return bool(must.mean() - cannot.mean() < -2 * error)

    def doubts(self, probabilities: NDArray[np.float32]) -> Floats:
        """The probability that each pair is wrong, as sure as the model is or as the links make it: the larger one."""
        _, rates, same = self._fitted(probabilities)
        link = self.pairs.link.astype(float)
        return np.maximum(doubts(same, link, rates), doubts(self.same(probabilities), link, rates))

    def _fitted(self, probabilities: NDArray[np.float32]) -> tuple[Floats, Rates, Floats]:
        """Losses, rates and the probability of "same", with the sureness that makes the links likeliest."""
        link, found = self.pairs.link.astype(float), []
        pairs, triplets = (self.pairs.left, self.pairs.right), (self.triplets[:, :2].T, self.triplets[:, ::2].T)
        ends = np.concatenate([pairs, *triplets], axis=1)
        every = self._same(probabilities, ends, TEMPERATURES)
        each = estimate_rates(every[:, : len(link)], link, self.pairs.weight.astype(float))
        for row, rates in zip(every, each, strict=True):
            same, nearer, further = np.split(row, [len(link), len(link) + len(self.triplets)])
            of_triplets = -np.log(0.5 + (0.5 - TRIPLETS_WRONG) * (nearer - further))  # see `losses.triplet_loss`
            found.append((np.concatenate([link_losses(same, link, rates), of_triplets]), rates, same))
        return min(found, key=lambda one: float(np.dot(one[0], self.weight)))

    def same(self, probabilities: NDArray[np.float32]) -> Floats:
        """The probability that each pair is the same, as sure as the model is."""
        ends = np.stack([self.pairs.left, self.pairs.right])
        return np.asarray(self._same(probabilities, ends, (1.0,))[0])

    def _same(self, probabilities: NDArray[np.float32], ends: NDArray[np.int64], at: Sequence[float]) -> Floats:
        """The same for any two of `rows`, of ends (2, n), with a row for each temperature of the model's sureness."""
        logs = np.log(np.maximum(np.asarray(probabilities, np.float64), 1e-30))
        left, right = np.searchsorted(self.rows, ends)
        found = (softmax(temperature * logs, axis=1) for temperature in at)
        return np.stack([(p[left] * p[right]).sum(1) for p in found])

    def compare(self, before: Floats, after: Floats) -> Verdict:
        """How much better a model is than one before, from the losses of both."""
        total = np.bincount(self.units, self.weight, minlength=1)
        gains = np.bincount(self.units, self.weight * (before - after), minlength=1) / np.maximum(total, 1e-300)
        share = total / max(total.sum(), 1e-300)
        gain = float(np.dot(share, gains))
        return Verdict(gain, float(np.sqrt(np.dot(share**2, (gains - gain) ** 2))))


@dataclass(frozen=True, eq=False)
class Guard:
    """What keeps a training from doing harm: who judges it, what it begins with, and the rates it expects.

    `begun` are the judge's losses of the model that the training begins with, `beliefs` (n, k) what that model says of
    all images: strong views should agree with it, with `hold` times the weight of the pairs.
    """

    rates: Rates
    judge: Judge
    begun: Floats
    beliefs: NDArray[np.float32]
    hold: float


def describe_doubts(pairs: Constraints, wrong: Floats) -> dict[str, Any]:
    """For the log: how likely each kind of link is wrong, from each pair's probability of it, and pairs to look at."""
    order = np.argsort(-wrong, kind="stable")[:DOUBTED]
    doubtful = pairs.take(order[wrong[order] > 0.5])
    columns = {name: getattr(doubtful, name).tolist() for name in ("left", "right", "link")}
    kinds = {"wrong_must_links": pairs.link > 0.5, "wrong_cannot_links": pairs.link < 0.5}
    shares = {name: float(wrong[kind].mean()) if kind.any() else None for name, kind in kinds.items()}
    return {**shares, "doubtful": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]}


def _truly_same(same: Floats, link: Floats, missed: Floats | float, invented: Floats | float) -> Floats:
    """The probability that the images of each pair are the same, now that the link is known."""
    agree = link * (1 - missed) + (1 - link) * missed
    other = link * invented + (1 - link) * (1 - invented)
    return np.asarray(same * agree / np.maximum(same * agree + (1 - same) * other, 1e-300))
