import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from torch.nn import functional as F

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import Places, Triplets
from constraintmatch.evaluation.metrics import Predictions, scores
from constraintmatch.methods.prototypes import Prototypes, spherical_k_means

module = importlib.import_module("constraintmatch.methods.prototypes")


def cones(n: int, k: int, width: int = 16, seed: int = 0) -> tuple[Tensor, np.ndarray]:
    """Points of length 1 around k directions, and which one."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % k
    points = 4 * rng.normal(size=(k, width))[labels] + rng.normal(size=(n, width))
    return F.normalize(torch.from_numpy(points).float(), dim=-1), labels


# K-means on the sphere


@pytest.mark.parametrize("k", [2, 5])
def test_k_means_finds_groups_that_are_apart(k: int) -> None:
    points, labels = cones(200, k)
    assert adjusted_rand_score(labels, spherical_k_means(points, k, seed=0).numpy()) == 1


def test_no_move_of_a_point_makes_the_clusters_tighter() -> None:
    """At a fixed point each point is nearest to the mean direction of its own cluster."""
    points = F.normalize(torch.randn(150, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = spherical_k_means(points, 4, seed=0)
    centres = torch.stack([F.normalize(points[found == k].mean(0), dim=-1) for k in range(4)])
    assert ((points @ centres.T).argmax(1) == found).float().mean() > 0.98


def test_k_means_goes_on_from_clusters_that_are_right_and_keeps_their_numbers() -> None:
    points, labels = cones(90, 3)
    begin = torch.from_numpy((labels + 1) % 3)
    begin[:5] = 0  # nearly right
    assert np.array_equal(spherical_k_means(points, 3, seed=0, begin=begin).numpy(), (labels + 1) % 3)


def test_every_cluster_has_a_point_even_of_equal_ones() -> None:
    points = F.normalize(torch.ones(12, 4), dim=-1)
    assert len(spherical_k_means(points, 3, seed=0)) == 12
    far, _ = cones(6, 6)
    assert sorted(spherical_k_means(far, 6, seed=1).tolist()) == list(range(6))


# The kinds of prototypes

Merged = tuple[Prototypes, np.ndarray]


def known(points: np.ndarray, beliefs: np.ndarray) -> Prototypes:
    return Prototypes.of(points, np.arange(len(points)), beliefs, seed=0)


@pytest.fixture(scope="module")
def merged() -> Merged:
    """Prototypes of 600 images of four kinds for a start that takes the last two for one, and the kinds."""
    points, labels = cones(600, 4)
    beliefs = np.full((600, 4), 0.02, np.float32)
    beliefs[np.arange(600), np.minimum(labels, 2)] = 0.94
    return known(points.numpy(), beliefs), labels


def mistaken(merged: Merged) -> Prototypes:
    """Those for a start that has one prototype in a wrong cluster."""
    prototypes, labels = merged
    number = prototypes.shares[0].argmax(1).numpy()
    beliefs = np.eye(4, dtype=np.float32)[np.where(number == number[labels == 3][0], 0, labels)]
    return replace(prototypes, beliefs=torch.from_numpy(beliefs))


def right(shares: np.ndarray, labels: np.ndarray) -> float:
    return float(scores(labels, Predictions(shares))["acc"])


def test_pairs_tell_two_kinds_of_one_cluster_apart(merged: Merged) -> None:
    prototypes, labels = merged
    state = torch.random.get_rng_state()
    before, *rounds = prototypes.learn(Constraints.sample(labels, 300, seed=0))
    assert right(before, labels) == 0.75
    assert len(rounds) == module.ROUNDS + 1
    assert min(right(rounds[turn], labels) for turn in (-3, -2, -1)) > 0.98
    assert np.allclose(rounds[-1].sum(1), 1, atol=1e-5)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's draws are changed


def test_prototypes_learn_from_pairs_of_which_a_fifth_is_wrong(merged: Merged) -> None:
    prototypes, labels = mistaken(merged), merged[1]
    pairs = Constraints.sample(labels, 1_000, seed=0).flip(0.2, seed=0)
    assert right(prototypes.learn(pairs)[-1], labels) > right(prototypes.beliefs.numpy(), labels) + 0.02


def test_pairs_that_the_start_explains_change_nothing(merged: Merged) -> None:
    prototypes, labels = merged
    before, *rounds = prototypes.learn(Constraints.sample(np.minimum(labels, 2), 300, seed=0))
    assert all(np.array_equal(kinds.argmax(1), before.argmax(1)) for kinds in rounds)


def test_pairs_without_weight_say_nothing_about_prototypes(merged: Merged) -> None:
    prototypes, labels = merged
    pairs = Constraints.sample(labels, 300, seed=0)
    weight = (pairs.link < 0.5).astype(np.float32)
    all_of_them = prototypes.learn(replace(pairs, weight=weight))
    some = prototypes.learn(pairs.take(pairs.link < 0.5))
    assert all(np.array_equal(one, other) for one, other in zip(all_of_them, some, strict=True))


def test_triplets_teach_prototypes_too(merged: Merged) -> None:
    prototypes, labels = mistaken(merged), merged[1]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 600, (20_000, 3))
    rows = rows[(labels[rows[:, 0]] == labels[rows[:, 1]]) & (labels[rows[:, 0]] != labels[rows[:, 2]])][:2_000]
    triplets = Triplets(rows, np.ones(len(rows), np.float32), Places(np.arange(len(rows))))
    none = Constraints.from_lists(n_images=600)
    assert right(prototypes.beliefs.numpy(), labels) < 0.98
    assert right(prototypes.learn(replace(none, triplets=triplets))[-1], labels) > 0.98


def test_the_links_of_one_image_weigh_no_more_than_a_few() -> None:
    """Image 0 has ten must-links and ten cannot-links with images that have no others."""
    others = np.arange(1, 21)
    pairs = Constraints.from_arrays(np.zeros(20, int), others, others <= 10, n_images=21)
    alone = module._Links.of(pairs, np.arange(21))
    assert torch.equal(alone.weight, torch.ones(20))  # a pair is rare to one of its images
    both = Constraints.from_arrays(*np.triu_indices(6, 1), np.ones(15), n_images=6)  # all pairs of six images
    closed = module._Links.of(both, np.arange(6))
    assert float(closed.weight.sum()) == pytest.approx(6 * 2 / 2)  # two for each image, and a pair has two images


def test_features_that_are_all_the_same_have_prototypes_that_say_what_the_start_says() -> None:
    labels = np.arange(40) % 4
    beliefs = np.eye(4, dtype=np.float32)[np.zeros(40, int)]
    prototypes = known(np.ones((40, 3), np.float32), beliefs)
    assert not prototypes.learn(Constraints.sample(labels, 200, seed=0))[-1].argmax(1).any()


def test_an_image_whose_kind_no_pair_changes_is_halfway_between_the_start_and_its_prototypes(merged: Merged) -> None:
    prototypes, labels = merged
    odd, pairs = prototypes.beliefs.clone(), Constraints.sample(labels, 9, seed=0)
    odd[0] = torch.eye(4)[1]  # image 0 is of kind 0, and so are its prototypes
    before, *_ = replace(prototypes, beliefs=odd).learn(pairs)
    np.testing.assert_allclose(before[0], [0.5, 0.5, 0, 0], atol=0.04)


def test_many_pairs_cut_prototypes_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds lie across the only two prototypes, so the kinds of these say nothing."""
    for name, value in {"PROTOTYPES": 2, "EACH": 1, "STEPS": 60}.items():
        monkeypatch.setattr(module, name, value)
    rng = np.random.default_rng(0)
    points = np.concatenate([2 * rng.choice([-1, 1], (800, 1)), 0.6 * rng.normal(size=(800, 4))], 1).astype(np.float32)
    labels = (points[:, 1] > 0).astype(int)
    doubtful = np.stack([0.5 - 0.02 * (2 * labels - 1), 0.5 + 0.02 * (2 * labels - 1)], 1).astype(np.float32)
    doubtful[rng.random(800) < 0.4] = 0.5
    pairs = Constraints.sample(labels, 4_000, seed=0)
    bent = known(points, doubtful).learn(pairs)
    assert right(bent[1], labels) > 0.95
    monkeypatch.setattr(module, "_bend", lambda _, mean, *__: mean)
    assert right(known(points, doubtful).learn(pairs)[1], labels) < 0.85
