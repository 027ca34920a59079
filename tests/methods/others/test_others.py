"""The other systems: their losses against direct computations, and each of them on three blobs."""

import importlib
import importlib.util

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.methods.others import OTHERS, Setup, classical, parts
from constraintmatch.methods.others.classical import carry_pairs, neighbour_affinity, project_to_simplex
from constraintmatch.methods.others.networks import (
    MARGIN,
    SURE,
    TINY,
    centre_loss,
    confused_loss,
    difficulty_loss,
    geman_mcclure,
    log_volume,
    neighbour_pairs,
    siamese_loss,
    siamese_same,
    size_loss,
    soft_assignment,
    target_distribution,
    triplet_loss,
)
from constraintmatch.methods.others.parts import place_around, place_by_neighbours

CLASSICAL = ("pck_means", "mpck_means", "cop_k_means")
LABELLED = ("label_spreading", "logistic_regression")
installed = importlib.util.find_spec("active_semi_clustering") is not None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STEPS", 80)
    monkeypatch.setattr(parts, "WIDTH", 32)


def blobs(n: int = 120, apart: float = 6.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(n) % 3
    noise = np.random.default_rng(seed).normal(size=(n, 6))
    return (noise + apart * np.eye(3, 6)[labels]).astype(np.float32), labels


def setup_of(n: int = 120, n_pairs: int = 60, labels: bool = False) -> tuple[Setup, np.ndarray]:
    features, truth = blobs(n)
    known = np.where(np.arange(n) < 12, truth, -1) if labels else None
    return Setup(features, Constraints.sample(truth, n_pairs, seed=0), 3, seed=0, labels=known), truth


def rows(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.05


def probabilities(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return rows(n, k, seed) / rows(n, k, seed).sum(1, keepdim=True)


# Each system


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", [name for name in OTHERS if installed or name not in CLASSICAL])
def test_each_system_finds_three_blobs_and_places_new_images(name: str) -> None:
    setup, truth = setup_of(labels=name in LABELLED)
    place = OTHERS[name](setup)
    new, new_truth = blobs(60, seed=1)
    found = place(new)
    assert found.shape == (60, 3)
    assert found.dtype == np.float32
    assert np.allclose(found.sum(1), 1, atol=1e-4)
    assert adjusted_rand_score(new_truth, found.argmax(1)) > (0.5 if name in ("s3c2", "volmax") else 0.9)
    assert adjusted_rand_score(truth, place(blobs()[0]).argmax(1)) > 0.5


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["k_means", "volmax", "pcog"])
def test_the_same_seed_gives_the_same_clusters(name: str) -> None:
    first, second = (OTHERS[name](setup_of()[0])(blobs()[0]) for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", LABELLED)
def test_a_system_that_needs_labels_says_so(name: str) -> None:
    with pytest.raises(InputError, match="needs labels"):
        OTHERS[name](setup_of()[0])


def test_a_graph_of_too_many_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(classical.MOST, "pcog", 100)
    with pytest.raises(InputError, match="too many rows: 120, and a graph of all pairs takes 100"):
        OTHERS["pcog"](setup_of()[0])


@pytest.mark.skipif(installed, reason="the extra classical is installed")
@pytest.mark.parametrize("name", CLASSICAL)
def test_a_system_of_a_package_that_is_missing_names_the_extra(name: str) -> None:
    with pytest.raises(InputError, match=r"not installed: pip install 'constraintmatch\[classical\]'"):
        OTHERS[name](setup_of()[0])


@pytest.mark.usefixtures("quick")
def test_known_sizes_make_clusters_of_these_sizes() -> None:
    """Where one heap is cut, the sizes decide."""
    features = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    pair = Constraints.from_lists(n_images=200, cannot_link=[(0, 1)])
    even, uneven = (
        OTHERS["framework"](Setup(features, pair, 2, seed=0), sizes=np.array(sizes, np.float32))(features).mean(0).max()
        for sizes in ((0.5, 0.5), (0.95, 0.05))
    )
    assert uneven > even + 0.03


# What they share


def test_inputs_have_mean_zero_and_mean_variance_one() -> None:
    setup, _ = setup_of()
    assert setup.inputs.mean(0).abs().max() < 1e-5
    assert float(setup.inputs.var(0, correction=0).mean()) == pytest.approx(1, abs=1e-5)


def test_pairs_are_drawn_by_their_weight() -> None:
    features, _ = blobs(6)
    pairs = Constraints.from_arrays([0, 2], [1, 3], [1.0, 0.0], weight=[3.0, 0.0], n_images=6)
    left, right, link = Setup(features, pairs, 3).some_pairs(50)
    assert (set(left.tolist()), set(right.tolist()), set(link.tolist())) == ({0}, {1}, {1.0})


def test_a_point_belongs_to_the_nearest_centre() -> None:
    points, centres = rows(40, 3), rows(5, 3, 1)
    direct = np.array([[float(((p - c) ** 2).sum()) for c in centres] for p in points])
    found = place_around(points, centres).numpy()
    assert np.array_equal(found.argmax(1), direct.argmin(1))
    unit = direct.min(1).mean()
    assert np.allclose(found, np.exp(-direct / unit) / np.exp(-direct / unit).sum(1, keepdims=True))


def test_a_training_row_keeps_its_own_cluster_among_other_neighbours() -> None:
    setup, truth = setup_of()
    clusters = truth.copy()
    clusters[0] = (truth[0] + 1) % 3
    assert place_by_neighbours(setup, clusters)(blobs()[0]).argmax(1)[0] == clusters[0]


# Their losses


def test_the_siamese_loss_is_the_cross_entropy_of_exp_of_minus_the_squared_distance() -> None:
    squared, without, link = rows(20, 1)[:, 0] * 2, rows(20, 1, 1)[:, 0], (torch.arange(20) % 2).double()
    same, loose = torch.exp(-squared), torch.exp(-without)
    direct = torch.nn.functional.binary_cross_entropy(same, link)
    entropy = torch.distributions.Bernoulli(probs=loose).entropy().mean()
    assert torch.allclose(siamese_loss(squared, link, without), direct + SURE * entropy)
    assert torch.allclose(siamese_same(squared), same)


def test_a_must_link_far_away_still_pulls() -> None:
    far = torch.tensor([500.0], requires_grad=True)
    siamese_loss(far, torch.ones(1), torch.ones(1)).backward()
    assert float(far.grad) == 1  # type: ignore[arg-type]


def test_the_robust_loss_is_the_square_near_zero_and_flat_far_away() -> None:
    squared = torch.tensor([0.0, 1e-3, 2.0, 1e6], dtype=torch.float64)
    assert torch.allclose(geman_mcclure(squared, 2.0), torch.tensor([0, 2e-3 / 2.001, 1.0, 2.0]).double(), atol=1e-5)


def test_neighbours_are_linked_if_mutual_and_pairs_overrule_them() -> None:
    features, _ = blobs(30)
    all_pairs = {tuple(pair) for pair in np.stack(neighbour_pairs(features, _none(30))[:2], 1).tolist()}
    cannot = min(all_pairs)
    pairs = Constraints.from_lists(n_images=30, must_link=[(0, 1)], cannot_link=[cannot])
    left, right, weight = neighbour_pairs(features, pairs)
    linked = {tuple(pair) for pair in torch.stack((left, right), 1).tolist()}
    assert (0, 1) in linked
    assert (0, 1) not in all_pairs
    assert linked == all_pairs - {cannot} | {(0, 1)}
    degree = np.bincount(np.concatenate((left, right)), minlength=30)
    assert float(weight[0]) == pytest.approx(degree[degree > 0].mean() / np.sqrt(degree[left[0]] * degree[right[0]]))


def _none(n: int) -> Constraints:
    return Constraints.from_lists(n_images=n)


def test_pairs_are_carried_to_the_neighbours_of_both_ends() -> None:
    """Two groups with one cannot-link, and one must-link, between them: all affinities across follow."""
    features = np.concatenate([np.random.default_rng(0).normal(size=(10, 3)) + shift for shift in (0, 3)])
    affinity = neighbour_affinity(features.astype(np.float32), 6)
    for link, sign in ((0.0, -1), (1.0, 1)):
        pair = Constraints.from_arrays([0], [10], [link], n_images=20)
        moved = carry_pairs(affinity, pair) - affinity
        across = moved[:10, 10:]
        assert (sign * across >= -1e-12).all()
        assert (sign * across).max() > 0
        assert np.allclose(moved, moved.T)
        assert carry_pairs(affinity, pair)[0, 10] == link


def test_the_affinity_falls_with_the_distance_and_ends_after_the_neighbours() -> None:
    features = np.array([[0.0], [1.0], [3.0], [10.0], [11.0]], np.float32)
    affinity = neighbour_affinity(features, 2)
    # of row 0: neighbours at 1 and 9, the next one at 100
    assert affinity[0, 1] == pytest.approx((1 + 1) / 2)
    assert affinity[0, 3] == 0


def test_rows_are_projected_to_the_nearest_point_of_the_simplex() -> None:
    given = np.random.default_rng(0).normal(size=(20, 4))
    found = project_to_simplex(given)
    assert np.allclose(found.sum(1), 1)
    assert (found >= 0).all()
    others = np.random.default_rng(1).dirichlet(np.ones(4), size=2_000)
    nearest = ((others[None] - given[:, None]) ** 2).sum(-1).min(1)
    assert (((found - given) ** 2).sum(1) <= nearest + 1e-9).all()


def test_the_confused_loss_is_the_pair_loss_without_confusion() -> None:
    p, q, link = probabilities(30, 4), probabilities(30, 4, 1), (torch.arange(30) % 2).double()
    direct = torch.nn.functional.binary_cross_entropy((p * q).sum(1), link)
    assert torch.allclose(confused_loss(p, q, link, torch.eye(4).double()), direct)
    half = confused_loss(p, q, link, torch.full((4, 4), 0.5).double())
    assert float(half) == pytest.approx(np.log(2))  # answers by chance


def test_the_volume_is_that_of_the_predictions_and_largest_in_all_corners() -> None:
    p = probabilities(50, 3)
    direct = np.linalg.slogdet((p.T @ p / 50).numpy() + TINY * np.eye(3))[1]
    assert float(log_volume(p)) == pytest.approx(direct)
    assert float(log_volume(torch.eye(3).repeat(4, 1).double())) > float(log_volume(p))


def test_soft_assignments_are_students_t_and_their_targets_are_surer() -> None:
    points, centres = rows(25, 2), rows(4, 2, 1)
    q = soft_assignment(points, centres)
    direct = np.array([[1 / (1 + float(((p - c) ** 2).sum())) for c in centres] for p in points])
    assert np.allclose(q.numpy(), direct / direct.sum(1, keepdims=True))
    target = target_distribution(q).numpy()
    weighed = q.numpy() ** 2 / q.numpy().sum(0)
    assert np.allclose(target, weighed / weighed.sum(1, keepdims=True))


def test_triplets_difficulty_and_sizes_are_what_they_say() -> None:
    a, n, f = (probabilities(12, 3, seed) for seed in range(3))
    direct = [max(0.0, float(a[i] @ f[i] - a[i] @ n[i]) + MARGIN) for i in range(12)]
    assert float(triplet_loss(a, n, f)) == pytest.approx(np.mean(direct))
    easy = torch.linspace(-1, 1, 12).double()
    sure = (a**2).sum(1)
    hard = [float(m * (1 - s)) if m > 0 else float(-m * s) for m, s in zip(easy, sure, strict=True)]
    assert float(difficulty_loss(a, easy)) == pytest.approx(np.mean(hard))
    shares = np.sort(a.mean(0).numpy())
    assert float(size_loss(a, a.mean(0).flip(0))) == pytest.approx(0)
    even = ((shares - 1 / 3) ** 2).sum()
    assert float(size_loss(a, torch.full((3,), 1 / 3).double())) == pytest.approx(even)


def test_the_centre_loss_is_the_mean_squared_distance_to_the_nearest_centre() -> None:
    points, centres = rows(25, 2), rows(4, 2, 1)
    direct = np.mean([min(float(((p - c) ** 2).sum()) for c in centres) for p in points])
    assert float(centre_loss(points, centres)) == pytest.approx(direct)
