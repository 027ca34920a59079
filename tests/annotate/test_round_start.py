"""What a round begins with: the start itself, or as many clusters as the answers show, numbered as before."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from constraintmatch.annotate.background_training import cluster_numbers, round_start
from constraintmatch.data.datasets import load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.propagate import Frozen, teach_groups
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_head
from constraintmatch.pipeline.train import weights_hash
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question, n_kinds
from constraintmatch.questions.rounds import LabelOracle, image_belief

CPU = {"seed": 0, "device": "cpu"}
labels_lists = st.lists(st.integers(0, 4), min_size=2, max_size=12).map(np.array)


def pairs_answered(labels: NDArray[np.int64]) -> list[Answer]:
    """Every pair of images, answered rightly."""
    oracle = LabelOracle(labels, error=0.0)
    return [oracle.answer(Question(one, (other,))) for other in range(len(labels)) for one in range(other)]


@settings(max_examples=40, deadline=None)
@given(labels_lists)
def test_all_kinds_are_counted_when_every_pair_is_answered(labels: NDArray[np.int64]) -> None:
    assert n_kinds(pairs_answered(labels), len(labels)) == len(np.unique(labels))


@settings(max_examples=40, deadline=None)
@given(labels_lists, st.data())
def test_fewer_right_answers_never_show_more_kinds_than_there_are(
    labels: NDArray[np.int64], data: st.DataObject
) -> None:
    some = data.draw(st.lists(st.sampled_from(pairs_answered(labels)), max_size=15))
    assert 1 <= n_kinds(some, len(labels)) <= len(np.unique(labels))


def test_unsure_answers_show_no_kinds() -> None:
    assert n_kinds([], 5) == 1
    assert n_kinds([Answer(Question(0, (1, 2)), UNSURE)], 5) == 1
    assert n_kinds([Answer(Question(0, (1,)), NONE)], 5) == 2


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(5)), st.integers(1, 40))
def test_clusters_that_only_swapped_numbers_get_the_old_ones_back(order: list[int], n_each: int) -> None:
    before = np.repeat(np.arange(5), n_each)
    now = np.array(order)[before]
    number = cluster_numbers(now, before, 5)
    assert np.array_equal(number[now], before)


def test_a_cluster_that_is_new_gets_a_number_that_was_free() -> None:
    before, now = np.array([0, 0, 1, 1, 1]), np.array([2, 2, 0, 0, 1])
    assert cluster_numbers(now, before, 3).tolist() == [1, 2, 0]


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return load_dataset("digits", "val").take(np.arange(60))


def featureless(images: ImageSet) -> ClusterModel:
    return build_model(n_clusters=0, side=images.side, channels=images.channels, backbone="tiny")


def test_a_start_with_clusters_is_taken_as_it_is(digits: ImageSet) -> None:
    start = build_model(n_clusters=7, side=8, channels=1, backbone="tiny")
    made = round_start(start, Frozen.of(start, digits), digits, [], CPU)
    assert made is not start
    assert weights_hash(made) == weights_hash(start)


@pytest.mark.usefixtures("quick_heads")
def test_a_start_without_clusters_grows_with_the_answers_and_keeps_their_numbers(digits: ImageSet) -> None:
    start = featureless(digits)
    frozen = Frozen.of(start, digits)

    def after(before: ClusterModel | None, answers: list[Answer]) -> ClusterModel:
        said = None if before is None else image_belief(before, digits).probabilities
        return round_start(start, frozen, digits, answers, CPU, said)

    two = after(None, [])
    assert two.config.n_clusters == 2
    assert digits.labels is not None
    answers = pairs_answered(np.asarray(digits.labels[:20], np.int64))
    kinds = len(np.unique(digits.labels[:20]))
    grown = after(two, answers)
    assert grown.config.n_clusters == kinds
    assert after(grown, []).config.n_clusters == kinds  # never fewer: names would be lost
    said = image_belief(grown, digits).probabilities
    assert said is not None
    order = np.roll(np.arange(kinds), 1)  # as if the newest model had numbered them otherwise
    again = round_start(start, frozen, digits, answers, CPU, said[:, order])
    kept = image_belief(again, digits).probabilities
    assert kept is not None
    assert np.array_equal(kept.argmax(1), said[:, order].argmax(1))


@pytest.mark.parametrize("rare", [True, False])
def test_a_small_group_gets_a_cluster_if_hidden_images_favour_it(rare: bool) -> None:
    """The start has no cluster for the rare kind, and two for the first one."""
    rng, kinds = np.random.default_rng(0), np.repeat([0, 1, 2, 3], [150, 100, 100, 40])
    features = (4 * np.eye(4, 8)[kinds] + rng.normal(size=(len(kinds), 8))).astype(np.float32)
    start = build_model(n_clusters=4, side=1, channels=8)
    weight = 3 * torch.eye(4, 8)
    weight[2, 3], weight[3, 3], weight[3, 0], weight[3, 7], weight[0, 7] = 3, 0, 3, 3, -3
    start = with_head(start, weight, torch.zeros(4))
    groups = [np.flatnonzero(kinds == kind)[:30] for kind in range(3)]
    small = np.flatnonzero(kinds == 3)[:10] if rare else np.flatnonzero(kinds == 0)[100:110]
    taught = teach_groups(start, Frozen(features), [*groups, small])
    clusters = Frozen(features).probabilities(taught).argmax(1)
    own = np.bincount(clusters[kinds == 3], minlength=4).argmax()
    assert bool((kinds[clusters == own] == 3).mean() > 0.8) == rare
