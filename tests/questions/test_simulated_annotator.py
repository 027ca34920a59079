"""The simulated annotator: right by the labels, wrong and unsure at the set rates, the same whenever asked."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constraintmatch._internal.errors import InputError
from constraintmatch.questions.answers import NONE, UNSURE, Question
from constraintmatch.questions.rounds import LabelOracle

LABELS = np.array([0, 1, 2, 3, 4, 5, 0, 1, 2, 3])


def many_questions(n: int, n_shown: int) -> list[Question]:
    random = np.random.Generator(np.random.Philox(0))
    drawn = [random.permutation(1_000)[: n_shown + 1].tolist() for _ in range(n)]
    return [Question(image, tuple(shown)) for image, *shown in drawn]


def test_without_mistakes_it_chooses_the_shown_image_of_the_same_label() -> None:
    oracle = LabelOracle(LABELS, error=0)
    assert oracle.answer(Question(0, (1, 2, 6))).choice == 2
    assert oracle.answer(Question(0, (1, 2, 3))).choice == NONE
    assert oracle.answer(Question(0, (6,))).choice == 0
    assert oracle.answer(Question(0, (7,))).choice == NONE


def test_of_two_that_fit_it_chooses_the_first() -> None:
    assert LabelOracle(np.array([0, 1, 0, 0]), error=0).answer(Question(0, (1, 3, 2))).choice == 1


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(10)), st.integers(1, 5), st.integers(0, 2**32))
def test_with_error_1_no_answer_is_right(rows: list[int], n_shown: int, seed: int) -> None:
    question = Question(rows[0], tuple(rows[1 : n_shown + 1]))
    choice = LabelOracle(LABELS, error=1, seed=seed).answer(question).choice
    fits = [LABELS[shown] == LABELS[question.image] for shown in question.shown]
    assert choice != UNSURE
    assert any(fits) if choice == NONE else not fits[choice]


def test_mistakes_and_doubts_come_at_their_rates() -> None:
    labels = np.random.Generator(np.random.Philox(1)).integers(5, size=1_000)
    right, oracle = LabelOracle(labels, error=0), LabelOracle(labels, error=0.1, unsure=0.2)
    pairs = [(right.answer(question).choice, oracle.answer(question).choice) for question in many_questions(4_000, 5)]
    assert np.mean([said == UNSURE for _, said in pairs]) == pytest.approx(0.2, abs=0.02)
    assert np.mean([said not in (UNSURE, true) for true, said in pairs]) == pytest.approx(0.1, abs=0.015)


def test_a_wrong_answer_is_any_of_the_others_alike() -> None:
    labels = np.arange(1_000)  # nothing fits: the five shown are the five wrong choices
    oracle = LabelOracle(labels, error=1)
    counts = np.bincount([oracle.answer(question).choice for question in many_questions(2_000, 5)], minlength=5)
    assert counts.min() > 340  # 400 each; four standard deviations are 72


def test_the_same_question_gets_the_same_answer_and_another_seed_other_mistakes() -> None:
    labels = np.zeros(1_000, np.int64)
    questions = many_questions(300, 3)

    def choices(seed: int) -> list[int]:
        return [LabelOracle(labels, error=0.3, seed=seed).answer(question).choice for question in questions]

    assert choices(0) == choices(0)
    assert choices(0) != choices(1)


@pytest.mark.parametrize(("error", "unsure"), [(-0.1, 0.5), (0.5, -0.1), (0.7, 0.4), (np.nan, 0.0)])
def test_rates_that_are_no_shares_are_refused(error: float, unsure: float) -> None:
    with pytest.raises(InputError, match="sum to at most 1"):
        LabelOracle(LABELS, error, unsure)


def test_a_question_beyond_the_labels_is_refused() -> None:
    with pytest.raises(InputError, match="beyond the 10"):
        LabelOracle(LABELS).answer(Question(3, (10,)))
    with pytest.raises(InputError, match="one column"):
        LabelOracle(LABELS.reshape(2, 5))


# Errors that are not the same everywhere

KINDS = np.repeat([0, 1, 2], 200)
CENTRES = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])  # the first two are easily confused
POINTS = CENTRES[KINDS] + 0.1 * np.random.Generator(np.random.Philox(2)).standard_normal((600, 3))


def wrong_share(oracle: LabelOracle, pairs: list[tuple[int, int]]) -> float:
    right = LabelOracle(oracle.labels, error=0)
    asked = [Question(one, (other,)) for one, other in pairs]
    return float(np.mean([oracle.answer(question).choice != right.answer(question).choice for question in asked]))


def some_pairs(one: int, other: int, n: int = 1_500) -> list[tuple[int, int]]:
    random = np.random.Generator(np.random.Philox(3))
    left, right = (200 * kind + random.integers(200, size=n) for kind in (one, other))
    return [(int(a), int(b)) for a, b in zip(left, right, strict=True) if a != b]


def test_features_mislead_it_most_about_kinds_that_are_near_each_other() -> None:
    oracle = LabelOracle(KINDS, error=0.1, features=POINTS)
    near, far = wrong_share(oracle, some_pairs(0, 1)), wrong_share(oracle, some_pairs(0, 2))
    assert near > 4 * far
    assert near <= 0.55  # a coin's
    random = np.random.Generator(np.random.Philox(4)).integers(600, size=(3_000, 2))
    mean = wrong_share(oracle, [(int(a), int(b)) for a, b in random if a != b])
    assert mean == pytest.approx(0.1, abs=0.03)


def test_it_is_misled_by_the_nearest_of_the_wrong_ones() -> None:
    oracle = LabelOracle(KINDS, error=1, features=POINTS)
    said = [oracle.answer(Question(image, (image + 400, image + 200, image + 40))).choice for image in range(40)]
    assert said.count(0) == 0  # of a kind that is far away
    assert said.count(1) > 5


def test_some_annotators_err_more_than_others_and_the_mean_stays() -> None:
    oracle = LabelOracle(np.arange(600), error=0.1, annotators=(0.0, 1.0, 5.0))
    shares = [wrong_share(oracle, [(image, (image + step) % 600) for step in range(1, 40)]) for image in range(150)]
    assert np.mean(shares) == pytest.approx(0.1, abs=0.02)
    by_rate = np.histogram(shares, [0, 0.001, 0.15, 1])[0]  # 0, 5 % and 25 %
    assert by_rate.min() > 30


@pytest.mark.parametrize(
    ("uneven", "said"),
    [
        ({"features": np.zeros((3, 2))}, r"features of shape \(3, 2\) for 10 labels"),
        ({"annotators": (0.0, 0.0)}, "must be numbers from 0, and some above it"),
        ({"annotators": (-1.0, 3.0)}, "must be numbers from 0, and some above it"),
    ],
)
def test_features_and_annotators_that_do_not_fit_are_refused(uneven: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        LabelOracle(LABELS, **uneven)
