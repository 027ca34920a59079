"""Clusters that the pairs join: the gain against the likelihood itself, what is merged, runs that are stopped."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from by_name import run_method
from sklearn.cluster import KMeans

from constraintmatch._internal.files import read_json
from constraintmatch._internal.progress import Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import accuracy, embed, predict
from constraintmatch.methods import Context
from constraintmatch.methods.heads import EMPTY, group_clusters, merge_clusters, regression_head
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_head
from constraintmatch.training.loop import TrainSettings

pytestmark = pytest.mark.usefixtures("narrow_networks")


def split(labels: np.ndarray, parts: int, seed: int = 0) -> np.ndarray:
    """Every class in so many clusters, by chance."""
    return np.asarray(labels * parts + np.random.default_rng(seed).integers(parts, size=len(labels)))


def likelihood(clusters: np.ndarray, pairs: Constraints, inside: float, between: float) -> float:
    """The logarithm, pair by pair."""
    total = 0.0
    for left, right, link in zip(pairs.left, pairs.right, pairs.link, strict=True):
        share = inside if clusters[left] == clusters[right] else between
        total += math.log(share if link else 1 - share)
    return total


def best_by_hand(clusters: np.ndarray, pairs: Constraints) -> tuple[float, tuple[int, int]]:
    """The merge that makes the pairs likeliest, by trying each, with the shares of before."""
    same = clusters[pairs.left] == clusters[pairs.right]
    inside, between = ((1 + pairs.link[part].sum()) / (2 + part.sum()) for part in (same, ~same))
    now = likelihood(clusters, pairs, inside, between)
    numbers = np.unique(clusters).tolist()
    found = [
        (likelihood(np.where(clusters == b, a, clusters), pairs, inside, between) - now, (a, b))
        for a in numbers
        for b in numbers
        if a < b
    ]
    return max(found, key=lambda one: one[0])


def test_merges_are_those_that_make_the_pairs_likeliest() -> None:
    labels = np.random.default_rng(1).integers(3, size=60)
    clusters, pairs = split(labels, 3), Constraints.sample(labels, 120, seed=2)
    by_hand = clusters.copy()
    while len(np.unique(by_hand)) > 2:
        gain, (kept, gone) = best_by_hand(by_hand, pairs)
        if gain <= 1e-12:
            break
        by_hand[by_hand == gone] = kept
    found = group_clusters(clusters, pairs, 9)[clusters]
    assert len(np.unique(found)) == len(np.unique(by_hand))
    assert len(np.unique(np.stack([found, by_hand]), axis=1).T) == len(np.unique(by_hand))  # the same partition


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_kinds_that_were_split_come_together_though_some_pairs_are_wrong(wrong: float) -> None:
    labels = np.random.default_rng(1).integers(5, size=2_000)
    clusters, pairs = split(labels, 4), Constraints.sample(labels, 3_000, seed=2)
    turned = np.random.default_rng(3).random(len(pairs)) < wrong
    pairs = Constraints.from_arrays(
        pairs.left, pairs.right, np.where(turned, 1 - pairs.link, pairs.link), n_images=len(labels)
    )
    groups = group_clusters(clusters, pairs, 20)
    assert groups.tolist() == np.repeat(np.arange(5), 4).tolist()


def test_clusters_without_images_have_no_group_and_two_are_left_at_least() -> None:
    labels = np.random.default_rng(1).integers(2, size=300)
    clusters = split(labels, 2) + 1  # the first of six and the last have no image
    groups = group_clusters(clusters, Constraints.sample(labels, 500, seed=2), 6)
    assert groups.tolist() == [EMPTY, 0, 0, 1, 1, EMPTY]
    inside = [(a, b) for a, b in zip(range(299), range(1, 300), strict=True) if clusters[a] == clusters[b]]
    between = [(a, b) for a, b in zip(range(40), range(1, 41), strict=True) if clusters[a] != clusters[b]]
    together = Constraints.from_lists(n_images=300, must_link=inside + between)
    assert group_clusters(clusters, together, 6).max() == 1


def test_nothing_is_merged_where_pairs_say_nothing_of_clusters() -> None:
    labels = np.random.default_rng(1).integers(3, size=300)
    clusters = np.random.default_rng(2).integers(4, size=300)
    apart = Constraints.from_lists(n_images=300, cannot_link=[(0, i) for i in range(1, 300)])
    assert group_clusters(clusters, apart, 4).tolist() == [0, 1, 2, 3]
    exact = Constraints.sample(labels, 2_000, seed=2)
    assert group_clusters(labels, exact, 3).tolist() == [0, 1, 2]


def test_weights_and_soft_links_count() -> None:
    clusters = np.array([0, 0, 1, 1, 2, 2])
    said = [(0, 1, 1), (2, 3, 1), (4, 5, 1), (0, 4, 0), (1, 5, 0), (2, 4, 0), (3, 5, 0)]
    left, right, link = zip(*said, (0, 2, 1), (1, 3, 0), strict=True)

    def groups(last: float, weight: float) -> list[int]:
        pairs = Constraints.from_arrays(
            left, right, [*link[:-2], last, 0], n_images=6, weight=[*[1.0] * len(said), 1.0, weight]
        )
        return group_clusters(clusters, pairs, 3).tolist()

    assert groups(1.0, 0.1) == [0, 0, 1]
    assert groups(1.0, 4.0) == [0, 1, 2]  # the cannot-link weighs more
    assert groups(0.2, 0.1) == [0, 1, 2]  # hardly a must-link


@pytest.fixture(scope="module")
def wide(stripes: ImageSet) -> ClusterModel:
    """A model that has the three kinds of stripes in nine clusters."""
    plain = build_model(n_clusters=0, side=8, channels=1, seed=2)
    features = embed(plain, stripes, device="cpu")
    clusters = KMeans(9, n_init=3, random_state=0).fit_predict(features).astype(np.int64)
    return with_head(plain, *regression_head(features, clusters, 9))


def test_a_merged_model_has_fewer_clusters_and_finds_the_kinds(stripes: ImageSet, wide: ClusterModel) -> None:
    assert stripes.labels is not None
    before = predict(wide, stripes).clusters
    pairs = Constraints.sample(stripes.labels, 400, seed=1)
    merged = merge_clusters(wide, stripes, pairs)
    groups = group_clusters(before, pairs, 9)
    assert merged.config.n_clusters == groups.max() + 1 < 9
    after = predict(merged, stripes).clusters
    assert (after == groups[before]).mean() > 0.9  # the new head says what the groups say
    assert accuracy(stripes.labels, after) > accuracy(stripes.labels, before) + 0.2


def test_a_model_stays_as_it_is_where_nothing_is_merged(stripes: ImageSet, wide: ClusterModel) -> None:
    apart = Constraints.from_lists(n_images=60, cannot_link=[(0, 1), (0, 2), (1, 2)])
    assert merge_clusters(wide, stripes, apart) is wide


@pytest.mark.parametrize("method", ["constrained", "pseudo_label", "constraintmatch"])
def test_a_training_merges_first_and_goes_on_with_as_many_clusters(
    stripes: ImageSet, wide: ClusterModel, method: str, tmp_path: Path
) -> None:
    assert stripes.labels is not None
    pairs = Constraints.sample(stripes.labels, 400, seed=1)
    arguments = {"pairs_per_step": 5, "merge": True, **({} if method == "constrained" else {"images_per_step": 8})}
    settings = TrainSettings(steps=6, device="cpu", checkpoint_every=2, log_every=1)

    class Stopping(Reporter):
        def update(self, done: int, values: Mapping[str, float] | None = None) -> None:
            if values and done == 4:
                raise KeyboardInterrupt

    def run(out: str, reporter: Reporter, *, resume: bool = False) -> ClusterModel:
        context = Context(out=tmp_path / out, resume=resume, reporter=reporter)
        given = {"arguments": arguments, "settings": settings, "context": context}
        return run_method(method, copy.deepcopy(wide), stripes, pairs, **given).model

    whole = run("whole", Reporter())
    n_clusters = merge_clusters(wide, stripes, pairs).config.n_clusters
    assert whole.config.n_clusters == n_clusters
    assert read_json(tmp_path / "whole" / "merged.json") == {"clusters": n_clusters, "before": 9}
    with pytest.raises(KeyboardInterrupt):
        run("parts", Stopping())
    again = run("parts", Reporter(), resume=True)
    np.testing.assert_array_equal(predict(again, stripes).probabilities, predict(whole, stripes).probabilities)
