"""Pairs as judges: the likelihood that expects wrong answers, its rates, what is held out, and what is compared."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr
from scipy.stats import bernoulli

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import Triplets
from constraintmatch.constraints.pair_cells import Places
from constraintmatch.evaluation.judge import (
    CAUTION,
    FALLEN,
    LEAST,
    UNDECIDED,
    Judge,
    Rates,
    Verdict,
    doubts,
    estimate_rates,
    hide_images,
    link_losses,
    repeat_rate,
)

LABELS = np.arange(300) % 5
TRIPLETS = Triplets(
    np.array([[i, (i + 5) % 300, (i + 6) % 300] for i in range(0, 300, 2)]),
    np.ones(150, np.float32),
    Places(np.arange(150)),
)


def sure(labels: np.ndarray, k: int = 5, confidence: float = 0.96) -> np.ndarray:
    """A model that is right and this sure of it."""
    rest = (1 - confidence) / (k - 1)
    return np.where(np.eye(k)[labels] > 0, confidence, rest).astype(np.float32)


def fuzzy(labels: np.ndarray, k: int = 5, seed: int = 0) -> np.ndarray:
    """A model that is right of most images, and unsure of many."""
    noise = np.random.default_rng(seed).normal(size=(len(labels), k))
    logits = 2 * np.eye(k)[labels] + noise
    return (np.exp(logits) / np.exp(logits).sum(1, keepdims=True)).astype(np.float32)


def sharpened(probabilities: np.ndarray, power: float) -> np.ndarray:
    raised = probabilities.astype(float) ** power
    return (raised / raised.sum(1, keepdims=True)).astype(np.float32)


def judge(n: int = 200, *, seed: int = 0) -> Judge:
    return Judge(Constraints.sample(LABELS, n, seed=seed, balanced=True))


# The likelihood


@pytest.mark.parametrize("rates", [Rates(), Rates(0.1, 0.0), Rates(0.0, 0.2), Rates(0.05, 0.3)])
def test_losses_are_the_likelihood_of_links_of_which_some_were_missed_or_invented(rates: Rates) -> None:
    rng = np.random.default_rng(0)
    same, link = rng.uniform(0.01, 0.99, 50), rng.integers(0, 2, 50).astype(float)
    expected = []
    for s, said in zip(same.tolist(), link.tolist(), strict=True):
        answered = {1.0: {1: 1 - rates.missed, 0: rates.invented}, 0.0: {1: rates.missed, 0: 1 - rates.invented}}
        expected.append(-math.log(s * answered[said][1] + (1 - s) * answered[said][0]))
    np.testing.assert_allclose(link_losses(same, link, rates), expected, rtol=1e-9)
    says_same = same * (1 - rates.missed) + (1 - same) * rates.invented
    np.testing.assert_allclose(link_losses(same, link, rates), -bernoulli.logpmf(link, says_same), rtol=1e-9)


def test_a_soft_link_loses_the_cross_entropy_of_both_answers() -> None:
    same, link = np.linspace(0.1, 0.9, 9), np.linspace(0.9, 0.2, 9)
    divergence = rel_entr(link, same) + rel_entr(1 - link, 1 - same)
    entropy = -(link * np.log(link) + (1 - link) * np.log(1 - link))
    np.testing.assert_allclose(link_losses(same, link, Rates()), divergence + entropy, rtol=1e-9)


def test_losses_of_sure_and_wrong_pairs_are_finite() -> None:
    same, link = np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 0.0, 0.0, 1.0])
    found = link_losses(same, link, Rates())
    assert np.isfinite(found).all()
    assert found[:2].min() > 10 > 1e-5 > found[2:].max() >= 0


# The rates


def answered(rng: np.random.Generator, truth: np.ndarray, rates: Rates) -> np.ndarray:
    wrong = rng.random(len(truth)) < np.where(truth, rates.missed, rates.invented)
    return np.where(wrong, ~truth, truth).astype(float)


@pytest.mark.parametrize("rates", [Rates(0.02, 0.02), Rates(0.15, 0.01), Rates(0.01, 0.15), Rates(0.3, 0.2)])
def test_planted_rates_are_found_each_kind_apart(rates: Rates) -> None:
    rng = np.random.default_rng(1)
    same = np.where(rng.random(4_000) < 0.4, 0.97, 0.03)
    truth = rng.random(4_000) < same
    (found,) = estimate_rates(same[None], answered(rng, truth, rates))
    assert tuple(found) == pytest.approx(tuple(rates), abs=0.025)


def test_answers_of_no_weight_say_nothing_of_the_rates() -> None:
    truth = np.arange(1_000) % 2 == 0
    link, weight = truth.astype(float), np.ones(1_000)
    link[:300], weight[:300] = 1 - link[:300], 0
    same = np.where(truth, 0.97, 0.03)
    (heavy,) = estimate_rates(same[None, 300:], link[300:])
    assert tuple(estimate_rates(same[None], link, weight)[0]) == pytest.approx(tuple(heavy), abs=1e-6)
    assert max(estimate_rates(same[None], link)[0]) > 0.2


def test_few_answers_leave_the_rates_that_are_usual_and_no_rate_reaches_a_half() -> None:
    assert tuple(estimate_rates(np.zeros((1, 0)), np.zeros(0))[0]) == pytest.approx((0.02, 0.02))
    (every_one_wrong,) = estimate_rates(np.repeat([[0.97, 0.03]], 2_000, 1), np.repeat([0.0, 1.0], 2_000))
    assert max(every_one_wrong) <= 0.4


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.25])
def test_the_rate_of_repeated_questions_is_that_of_a_simulation(rate: float) -> None:
    rng = np.random.default_rng(2)
    pairs = np.stack([np.arange(0, 4_000, 2), np.arange(1, 4_000, 2)])
    truth = rng.random(2_000) < 0.3
    times = rng.integers(1, 5, 2_000)  # some are asked once only
    row = np.repeat(np.arange(2_000), times)
    turned = rng.random(len(row)) < 0.5  # (j, i) is the same question
    left, right = np.where(turned, pairs[::-1][:, row], pairs[:, row])
    link = answered(rng, truth[row], Rates(rate, rate))
    found = repeat_rate(Constraints.from_arrays(left, right, link, n_images=4_000))
    assert found == pytest.approx(rate, abs=0.02)


def test_without_repeated_questions_there_is_no_rate_from_them() -> None:
    assert repeat_rate(Constraints.from_lists(n_images=0)) is None
    assert repeat_rate(Constraints.sample(LABELS, 100, seed=0)) is None
    nine = Constraints.from_lists(n_images=20, must_link=[(i, i + 1) for i in range(9)] * 2)
    assert repeat_rate(nine) is None
    assert repeat_rate(nine, least=9) == 0


def test_answers_that_contradict_each_other_throughout_are_as_wrong_as_any_can_be() -> None:
    pairs = [(i, i + 1) for i in range(0, 40, 2)]
    both = Constraints.from_lists(n_images=40, must_link=pairs, cannot_link=pairs)
    assert repeat_rate(both) == pytest.approx(0.4)


def test_doubts_are_those_of_bayes_and_turned_links_are_doubted_most() -> None:
    same, link, rates = np.array([0.9, 0.9, 0.1, 0.1]), np.array([1.0, 0.0, 1.0, 0.0]), Rates(0.1, 0.05)
    wrong = [
        0.1 * 0.05 / (0.9 * 0.9 + 0.1 * 0.05),
        0.9 * 0.1 / (0.9 * 0.1 + 0.1 * 0.95),
        0.9 * 0.05 / (0.1 * 0.9 + 0.9 * 0.05),
        0.1 * 0.1 / (0.1 * 0.1 + 0.9 * 0.95),
    ]
    np.testing.assert_allclose(doubts(same, link, rates), wrong, rtol=1e-9)


# What is held out


@given(st.integers(2, 60), st.integers(1, 150), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_every_held_out_pair_has_an_image_that_no_training_pair_has(n_images: int, n_pairs: int, seed: int) -> None:
    pairs = Constraints.sample(LABELS[:n_images], n_pairs, seed=seed)
    training, held_out = hide_images(pairs, seed=seed)
    assert len(training) + len(held_out) == len(pairs)
    seen = set(training.left.tolist()) | set(training.right.tolist())
    for left, right in zip(held_out.left.tolist(), held_out.right.tolist(), strict=True):
        assert left not in seen or right not in seen


def test_the_same_pairs_are_held_out_every_time_and_about_the_share() -> None:
    pairs = Constraints.sample(LABELS, 400, seed=0)
    (one, held), (same, again), (_, other) = (hide_images(pairs, seed=seed) for seed in (0, 0, 1))
    for name in ("left", "right", "link"):
        np.testing.assert_array_equal(getattr(held, name), getattr(again, name))
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(held.left, other.left)
    for share in (0.1, 0.2, 0.5):
        assert len(hide_images(pairs, share=share)[1]) / len(pairs) == pytest.approx(1 - (1 - share / 2) ** 2, abs=0.04)


def test_an_image_of_many_pairs_stays() -> None:
    star = Constraints.from_lists(n_images=101, cannot_link=[(0, i) for i in range(1, 101)])
    for seed in range(20):
        training, held_out = hide_images(star, seed=seed)
        assert len(held_out) == 10
        assert (training.left == 0).all()


def test_pairs_of_a_few_images_that_are_all_known_can_be_held_out() -> None:
    """What answers about 30 images imply: every pair of them."""
    left, right = np.triu_indices(30, 1)
    closed = Constraints.from_arrays(left, right, LABELS[left] == LABELS[right], n_images=30)
    training, held_out = hide_images(closed)
    assert 0 < len(held_out) < 0.4 * len(closed)
    seen = {*training.left.tolist(), *training.right.tolist()}
    assert not any({one, other} <= seen for one, other in zip(held_out.left, held_out.right, strict=True))


# What is judged


def test_how_sure_a_model_is_of_itself_is_not_judged() -> None:
    by = judge()
    p = fuzzy(LABELS)[by.rows]
    began = by.losses(p)
    for power in (3.0, 0.4):
        verdict = by.compare(began, by.losses(sharpened(p, power)))
        assert abs(verdict.gain) < 0.02
        assert not verdict.has_fallen


def test_a_model_is_better_the_more_pairs_it_has_right() -> None:
    by = judge()
    weak, strong = fuzzy(LABELS)[by.rows], sure(LABELS)[by.rows]
    verdict = by.compare(by.losses(weak), by.losses(strong))
    assert verdict.gain > 0.1
    assert verdict.surely(CAUTION) > 0
    back = by.compare(by.losses(strong), by.losses(weak))
    assert back.has_fallen
    assert back.gain == pytest.approx(-verdict.gain)


@pytest.mark.parametrize("collapsed", ["one cluster", "two clusters merged", "knows nothing"])
def test_a_collapsed_model_is_judged_worse(collapsed: str) -> None:
    by, p = judge(), sure(LABELS, confidence=0.8)
    after = {
        "one cluster": sure(np.zeros(300, int)),
        "two clusters merged": np.stack([p[:, 0] + p[:, 1], 0 * p[:, 0], *p.T[2:]], 1),
        "knows nothing": np.full((300, 5), 0.2, np.float32),
    }[collapsed]
    verdict = by.compare(by.losses(p[by.rows]), by.losses(after[by.rows]))
    assert verdict.gain < 0
    assert verdict.surely(CAUTION) < 0
    assert verdict.has_fallen


def test_wrong_links_do_not_make_a_right_model_look_worse_than_a_weak_one() -> None:
    by = Judge(judge(400).pairs.flip(0.2, seed=1))
    weak, strong = fuzzy(LABELS)[by.rows], sure(LABELS, confidence=0.9999)[by.rows]
    assert by.compare(by.losses(weak), by.losses(strong)).surely(CAUTION) > 0
    assert tuple(by.rates(strong)) == pytest.approx((0.2, 0.2), abs=0.06)


def test_a_verdict_is_the_weighted_mean_and_its_error() -> None:
    pairs = Constraints.from_lists(n_images=8, must_link=[(0, 1), (2, 3)], cannot_link=[(4, 5), (6, 7)])
    before, after = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, 2.5, 1.0, 4.0])
    verdict = Judge(pairs).compare(before, after)
    gains = before - after
    assert verdict.gain == pytest.approx(gains.mean())
    assert verdict.error == pytest.approx(gains.std() / 2)
    assert verdict.surely(CAUTION) == pytest.approx(gains.mean() - CAUTION * gains.std() / 2)
    doubled = pairs.take([0, 1, 2, 3])
    doubled.weight[:] = 7  # the unit of the weights is nobody's business
    assert tuple(Judge(doubled).compare(before, after)) == pytest.approx(tuple(verdict))


@pytest.mark.parametrize(("gain", "fallen"), [(-1.0, True), (-0.1, False), (0.3, False)])
def test_only_a_clear_loss_is_a_fall(gain: float, fallen: bool) -> None:
    assert Verdict(gain, 0.1 * FALLEN).has_fallen == fallen


def test_a_gain_must_be_worth_something_to_all_pairs_together() -> None:
    doubted = Verdict(0.0, 0.01)  # may gain a hundredth nat each
    assert [doubted.is_enough(UNDECIDED, count) for count in (100, 400)] == [False, True]
    assert not doubted.is_enough(CAUTION, 300)
    assert [Verdict(0.02, 0.01).is_enough(CAUTION, count) for count in (150, 250)] == [False, True]
    assert not Verdict(-0.02, 0.01).is_enough(UNDECIDED, 10_000)


@pytest.mark.parametrize(
    ("must", "cannot", "can"),
    [(40, 0, False), (0, 40, False), (LEAST - 1, 40, False), (40, LEAST - 1, False), (LEAST, LEAST, True)],
)
def test_a_judge_needs_pairs_of_both_kinds(must: int, cannot: int, can: bool) -> None:
    links = [(i, i + 1) for i in range(0, 160, 2)]
    pairs = Constraints.from_lists(n_images=160, must_link=links[:must], cannot_link=links[must : must + cannot])
    assert Judge(pairs).can_judge() == can


def test_the_pairs_of_one_image_are_one_piece_of_evidence() -> None:
    star = [(0, i) for i in range(1, 41)]
    few = [(i, i + 1) for i in range(50, 66, 2)]
    by = Judge(Constraints.from_lists(n_images=70, must_link=few, cannot_link=star))
    assert (by.n_must_links, by.n_cannot_links) == (8, 1)
    assert not by.can_judge()
    gains = np.concatenate([np.ones(8), np.full(40, -1.0)])
    assert by.compare(gains, np.zeros(48)).gain == pytest.approx((8 - 1) / 9)


def test_triplets_alone_tell_a_right_model_from_one_that_mixes_kinds_up() -> None:
    only = Judge(replace(Constraints.from_lists(n_images=300), triplets=TRIPLETS))
    assert only.can_judge()
    assert only.can_judge(1_000)  # pairs are not asked for
    mixed = LABELS.copy()
    mixed[:100] = np.random.default_rng(0).permutation(mixed[:100])
    right, wrong = (only.losses(sure(kinds)[only.rows]) for kinds in (LABELS, mixed))
    assert only.compare(wrong, right).surely(2) > 0


def test_pairs_are_judged_the_same_with_triplets_beside_them() -> None:
    pairs, model = judge().pairs, fuzzy(LABELS)
    alone, both = Judge(pairs), Judge(replace(pairs, triplets=TRIPLETS.take(np.arange(1))))
    losses = both.losses(model[both.rows])
    assert len(losses) == len(pairs) + 1
    assert losses[:-1] == pytest.approx(alone.losses(model[alone.rows]))


def test_an_anchor_is_on_one_side_only() -> None:
    training, held = hide_images(replace(judge().pairs, triplets=TRIPLETS))
    sides = [set(part.triplets.rows[:, 0].tolist()) for part in (training, held)]
    assert not sides[0] & sides[1]
    assert sum(map(len, sides)) == 150
    assert len(sides[1]) >= 30
