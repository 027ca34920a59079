import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from torch.nn import functional as F

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.methods.angular import angular_head, spherical_k_means


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


# A head from pairs


@pytest.fixture(scope="module")
def hidden_kinds() -> tuple[np.ndarray, np.ndarray]:
    """Features of four kinds, with a direction of no meaning in which they vary three times as much."""
    rng = np.random.default_rng(0)
    labels = np.arange(600) % 4
    features = rng.normal(size=(600, 12)) + 3 * np.eye(4, 12)[labels]
    features[:, -2:] *= 6
    return features.astype(np.float32), labels


def taught(features: np.ndarray, pairs: Constraints, before: np.ndarray) -> tuple[Tensor, Tensor]:
    head = angular_head(features, pairs, before, 4, seed=0)
    assert head is not None
    return head


def test_features_that_are_all_the_same_teach_nothing() -> None:
    labels = np.arange(40) % 4
    same, pairs = np.ones((40, 3), np.float32), Constraints.sample(labels, 200, seed=0)
    assert angular_head(same, pairs, labels, 4, seed=0) is None


def test_pairs_find_kinds_that_the_features_alone_do_not_show(hidden_kinds: tuple[np.ndarray, np.ndarray]) -> None:
    features, labels = hidden_kinds
    before = spherical_k_means(F.normalize(torch.from_numpy(features), dim=-1), 4, seed=0).numpy()
    weight, bias = taught(features, Constraints.sample(labels, 3_000, seed=0), before)
    found = (torch.from_numpy(features) @ weight.T + bias).argmax(1).numpy()
    assert adjusted_rand_score(labels, before) < 0.3
    assert adjusted_rand_score(labels, found) > 0.6


def test_clusters_keep_the_numbers_that_they_had(hidden_kinds: tuple[np.ndarray, np.ndarray]) -> None:
    features, labels = hidden_kinds
    state = torch.random.get_rng_state()
    weight, bias = taught(features, Constraints.sample(labels, 3_000, seed=0), (labels + 2) % 4)
    found = (torch.from_numpy(features) @ weight.T + bias).argmax(1).numpy()
    assert (found == (labels + 2) % 4).mean() > 0.8
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's draws are changed


def test_pairs_without_weight_say_nothing(hidden_kinds: tuple[np.ndarray, np.ndarray]) -> None:
    features, labels = hidden_kinds
    right = Constraints.sample(labels, 2_000, seed=0)
    wrong = Constraints.sample(labels, 2_000, seed=1).flip(1.0, seed=0)
    both = Constraints.from_arrays(
        *(np.concatenate([getattr(pairs, name) for pairs in (right, wrong)]) for name in ("left", "right", "link")),
        n_images=600,
        weight=np.repeat([1.0, 0.0], 2_000).astype(np.float32),
    )
    weight, bias = taught(features, both, labels)
    assert ((torch.from_numpy(features) @ weight.T + bias).argmax(1).numpy() == labels).mean() > 0.8
