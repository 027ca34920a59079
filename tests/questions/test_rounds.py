"""Rounds of asking and training: the pairs that answers imply, asking until a budget, simulated rounds."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import script

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import load_dataset
from constraintmatch.evaluation.metrics import predict
from constraintmatch.methods.propagate import Frozen
from constraintmatch.models.cluster_model import build_model
from constraintmatch.questions import rounds
from constraintmatch.questions.answers import UNSURE, Answer, Question, confirm_merges, stated_constraints
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.rounds import (
    Asking,
    LabelOracle,
    ask_until,
    closure_pairs,
    image_belief,
    predict_each_other,
    simulate,
    trusted_constraints,
)

RNG = np.random.Generator(np.random.Philox(0))
LABELS = RNG.integers(0, 4, 120)
FEATURES = np.eye(4, 16, dtype=np.float32)[LABELS] + 0.15 * RNG.standard_normal((120, 16)).astype(np.float32)
BELIEF = Belief.of(FEATURES)
ORACLE = LabelOracle(LABELS, error=0.0)
add_anchors = script("benchmarks", "label_efficiency").add_anchors


def answered(n: int, kind: str = "which") -> list[Answer]:
    return ask_until(BELIEF, [], n, ORACLE, Asking(kind, "recommended", batch=5))  # type: ignore[arg-type]


def test_a_small_closure_is_taken_whole() -> None:
    answers = answered(20)
    whole = stated_constraints(answers, 120).close()
    pairs = closure_pairs(answers, 120)
    assert np.array_equal(pairs.left, whole.left)
    assert np.array_equal(pairs.link, whole.link)
    assert len(pairs) > len(answers)


def test_hidden_answers_decide_whether_answers_about_pairs_know_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start takes two kinds for one, and is right about the other two."""
    mixed, frozen = np.where(LABELS == 3, 2, LABELS), Frozen(FEATURES)
    beliefs = np.full((120, 4), 0.02, np.float32)
    beliefs[np.arange(120), mixed] = 0.94
    asked = [Question(int(one), (int(other),)) for one, other in RNG.integers(0, 120, (400, 2)) if one != other]
    right, random = ([LabelOracle(LABELS, error=error).answer(one) for one in asked] for error in (0.0, 0.5))
    assert not predict_each_other(right, beliefs, frozen)  # weighed, they say the same
    monkeypatch.setattr(rounds, "_weigh", lambda *_: Constraints.sample(mixed, 400, seed=0))  # the start overrules them
    assert predict_each_other(right, beliefs, frozen)
    assert not predict_each_other(random, beliefs, frozen)
    stated = confirm_merges(stated_constraints(right, 120))
    found = (trusted_constraints(some, 120, beliefs, frozen).components() for some in (right, random))
    assert [np.array_equal(one, stated.components()) for one in found] == [True, False]


@pytest.mark.parametrize("most", [50, 10**6])
def test_triplets_come_with_the_pairs_unless_they_contradict_each_other(most: int) -> None:
    round_about = [((0, 1, 2), 0), ((1, 2, 0), 0), ((2, 0, 1), 0), ((5, 6, 7), 1), ((8, 6, 7), UNSURE)]
    triplets = [Answer(Question(one, (two, three), nearer=True), said) for (one, two, three), said in round_about]
    pairs = closure_pairs([*answered(40), *triplets], 120, most=most)
    assert pairs.triplets.rows.tolist() == [[5, 7, 6]]
    assert np.array_equal(pairs.link, closure_pairs(answered(40), 120, most=most).link)


@given(seed=st.integers(0, 1000), n=st.integers(5, 60))
@settings(max_examples=20, deadline=None)
def test_pairs_of_right_answers_agree_with_the_labels(seed: int, n: int) -> None:
    answers = answered(n)
    pairs = closure_pairs(answers, 120, most=50, seed=seed)
    assert len(pairs) <= 50
    assert np.array_equal(LABELS[pairs.left] == LABELS[pairs.right], pairs.link == 1)
    assert (pairs.left != pairs.right).all()


def test_a_drawn_closure_keeps_the_share_of_must_links_and_depends_on_the_seed() -> None:
    answers = answered(80)
    whole, drawn, other = (closure_pairs(answers, 120, most=m, seed=s) for m, s in ((10**6, 0), (400, 0), (400, 1)))
    assert len(drawn) == 400
    assert drawn.n_must_links / 400 == pytest.approx(whole.n_must_links / len(whole), abs=0.002)
    assert not np.array_equal(drawn.left, other.left)


def test_a_drawn_closure_takes_every_implied_pair_as_often() -> None:
    answers = answered(40)
    whole = closure_pairs(answers, 120)
    n = 60 * len(whole)
    drawn = closure_pairs(answers, 120, most=len(whole) - 1, seed=0)
    keys = set(
        zip(np.minimum(whole.left, whole.right).tolist(), np.maximum(whole.left, whole.right).tolist(), strict=True)
    )
    counts: dict[tuple[int, int], int] = dict.fromkeys(keys, 0)
    for seed in range(60):
        drawn = closure_pairs(answers, 120, most=len(whole) - 1, seed=seed)
        for one, two in zip(drawn.left.tolist(), drawn.right.tolist(), strict=True):
            counts[min(one, two), max(one, two)] += 1  # a pair that is not implied is a KeyError
    expected = n / len(whole)
    spread = np.std(list(counts.values())) / np.sqrt(expected)
    assert 0.8 < spread < 1.2  # as of independent draws


def test_no_answers_imply_no_pairs() -> None:
    assert len(closure_pairs([], 10)) == 0


def test_asking_goes_on_from_the_answers_and_stops_at_the_total() -> None:
    first = answered(10)
    more = ask_until(BELIEF, first, 25, ORACLE, Asking(batch=5))
    assert more[:10] == first
    assert len(more) == 25


def test_asking_ends_when_nothing_is_left_to_ask() -> None:
    small = Belief.of(FEATURES[:6])
    answers = ask_until(small, [], 100, LabelOracle(LABELS[:6], error=0.0), Asking("pair", "random"))
    assert len(answers) < 100
    assert len({(a.question.image, a.question.shown) for a in answers}) == len(answers)


def test_each_round_has_the_answers_of_the_ones_before_and_is_asked_by_the_newest_model() -> None:
    seen: list[object] = []
    sizes: list[int] = []

    def believe(model: object) -> Belief:
        seen.append(model)
        return BELIEF

    def train(answers: Sequence[Answer]) -> str:
        sizes.append(len(answers))
        return f"model {len(answers)}"

    rounds = list(simulate(believe, train, "start", [4, 10, 12], ORACLE, Asking(batch=3)))
    assert seen == ["start", "model 4", "model 10", "model 12"]
    assert [len(answers) for answers, _ in rounds] == sizes == [4, 10, 12]
    assert rounds[1][0][:4] == rounds[0][0]


def test_a_stopped_simulation_goes_on_as_if_it_had_not_stopped() -> None:
    def believe(model: int) -> Belief:  # another one after each training, by the number of answers
        return Belief.of(np.roll(FEATURES, model, axis=0))

    def go(budgets: list[int], answers: Sequence[Answer] = ()) -> list[list[Answer]]:
        return [found for found, _ in simulate(believe, len, 0, budgets, ORACLE, Asking(batch=3), answers)]

    whole = go([4, 10, 12])
    assert go([10, 12], whole[0]) == whole[1:]
    assert go([10, 12], [])[0] != whole[1]  # the model of the first round chose the next questions


@pytest.mark.parametrize("budgets", [[], [0, 5], [5, 5], [9, 3]])
def test_budgets_that_do_not_rise_are_refused(budgets: list[int]) -> None:
    with pytest.raises(InputError, match="must rise"):
        next(simulate(lambda _: BELIEF, lambda _: None, None, budgets, ORACLE, Asking()))


def test_a_belief_of_images_has_the_models_own_features_and_probabilities() -> None:
    images = load_dataset("digits", "val")
    model = build_model(n_clusters=10, side=8, channels=1, backbone="tiny")
    belief = image_belief(model, images)
    found = predict(model, images, features=True)
    assert found.features is not None
    assert np.allclose(
        belief.features, found.features / np.linalg.norm(found.features, axis=1, keepdims=True), atol=1e-6
    )
    assert np.array_equal(belief.probabilities, found.probabilities)  # type: ignore[arg-type]


def test_a_question_of_the_simulation_is_a_question_like_any_other() -> None:
    assert [type(answer.question) for answer in answered(7)] == [Question] * 7


def test_anchors_hold_apart_sure_images_that_no_answer_is_about() -> None:
    sure = np.array([0, 1, 2] * 30, np.int64)  # by number of the image
    probabilities = np.full((90, 3), 0.02, np.float32)
    probabilities[np.arange(90), sure] = 0.96
    probabilities[80:] = 1 / 3
    said = Constraints.from_arrays([0, 1], [3, 2], [1, 0], n_images=90, weight=[0.5, 1.0])
    found = add_anchors(said, probabilities, seed=4)
    assert 2 + 45 < len(found) <= 2 + 75  # of 90 pairs two thirds are of different clusters
    assert (found.left[:2].tolist(), found.right[:2].tolist()) == ([0, 1], [3, 2])
    assert found.weight.tolist() == [0.5, *[1.0] * (len(found) - 1)]
    left, right, link = found.left[2:], found.right[2:], found.link[2:]
    used = np.union1d(left, right)
    assert used.min() > 3
    assert used.max() < 80
    assert len(used) > 45
    assert (sure[left] != sure[right]).all()
    assert not link.any()
    again, other = add_anchors(said, probabilities, seed=4), add_anchors(said, probabilities, seed=5)
    assert np.array_equal(again.left, found.left)
    assert not np.array_equal(other.left, found.left)


def test_without_sure_images_there_are_no_anchors() -> None:
    said = Constraints.from_arrays([0], [1], [1], n_images=3)
    assert add_anchors(said, np.full((3, 2), 0.5, np.float32)) is said
    probabilities = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    assert add_anchors(said, probabilities) is said  # one image is left, and it takes two


def beliefs_of(labels: np.ndarray) -> np.ndarray:
    return np.where(np.eye(4, dtype=bool)[labels], np.float32(0.94), np.float32(0.02))


def purity(pairs: Constraints) -> float:
    """The share of must-links that the labels confirm."""
    must = pairs.link > 0.5
    return float((LABELS[pairs.left[must]] == LABELS[pairs.right[must]]).mean())


def test_a_start_that_is_mostly_right_outvotes_few_wrong_answers() -> None:
    asking, found = Asking("pair", "recommended", batch=5), []
    for seed in range(8):
        wrong = ask_until(BELIEF, [], 30, LabelOracle(LABELS, error=0.2, seed=seed), asking)
        found.append([purity(closure_pairs(wrong, 120, beliefs)) for beliefs in (None, beliefs_of(LABELS))])
    stated, trusted = np.mean(found, 0)
    assert trusted > stated + 0.02


def test_many_answers_count_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    beliefs, asking = beliefs_of(np.where(LABELS == 3, 2, LABELS)), Asking("which", "recommended", batch=5)
    answers = ask_until(BELIEF, [], 60, LabelOracle(LABELS, error=0.2, seed=0), asking)
    stated = closure_pairs(answers, 120)
    assert np.array_equal(closure_pairs(answers, 120, beliefs).left, stated.left)
    monkeypatch.setattr(rounds, "OUTVOTED", 100)  # that many are few
    assert not np.array_equal(closure_pairs(answers, 120, beliefs).left, stated.left)


def test_a_start_that_is_mostly_wrong_does_not_outvote_few_answers() -> None:
    answers, mixed = answered(15), np.random.default_rng(0).permutation(LABELS)
    stated, trusted = closure_pairs(answers, 120), closure_pairs(answers, 120, beliefs_of(mixed))
    for name in ("left", "right", "link"):
        np.testing.assert_array_equal(getattr(trusted, name), getattr(stated, name))
