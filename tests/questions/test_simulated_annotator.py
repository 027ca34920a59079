"""The simulated annotator: right by the labels, wrong and unsure at the set rates, the same whenever asked."""

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
