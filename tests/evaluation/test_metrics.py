import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation import metrics, neighbours
from constraintmatch.evaluation.metrics import (
    Predictions,
    accuracy,
    agreement,
    calibration_error,
    cluster_sizes,
    collapse_warnings,
    embed,
    knn_accuracy,
    match_clusters,
    neighbour_consistency,
    predict,
    pseudo_quality,
    scores,
)


class Toy(nn.Module):
    """A network with what `predict` needs, and modes that can be told apart."""

    def __init__(self, side: int, channels: int, k: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(channels * side * side, k)
        self.layouts: list[bool] = []

    def features(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8
        self.layouts.append(images.is_contiguous(memory_format=torch.channels_last))
        return self.drop(self.norm(images.float() / 255)).flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))


def toy(side: int = 4, channels: int = 3, k: int = 5) -> Toy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Toy(side, channels, k)


def some_images(n: int, side: int = 4, channels: int = 3) -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 256, (n, side, side, channels), dtype=np.uint8)
    return ImageSet(pixels, tuple(f"{i}.png" for i in range(n)))


def one_hot(clusters: list[int] | NDArray[np.int64], k: int) -> Predictions:
    return Predictions(np.eye(k, dtype=np.float32)[np.asarray(clusters, np.int64)])


def constraints_of(*pairs: tuple[int, int, float], n_images: int = 3, weight: list[float] | None = None) -> Constraints:
    left, right, link = (np.array(column) for column in zip(*pairs, strict=True)) if pairs else ([], [], [])
    weights = np.ones(len(pairs)) if weight is None else weight
    return Constraints(
        np.array(left, np.int64),
        np.array(right, np.int64),
        np.array(link, np.float32),
        np.array(weights, np.float32),
        n_images,
    )


partitions = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 30)).flatmap(
    lambda sizes: st.tuples(
        hnp.arrays(np.int64, sizes[2], elements=st.integers(0, sizes[0] - 1)),
        hnp.arrays(np.int64, sizes[2], elements=st.integers(0, sizes[1] - 1)),
        st.just(sizes[0]),
        st.just(sizes[1]),
    )
)


# Predictions


@pytest.mark.parametrize("batch_size", [1, 3, 7, 500])
def test_predict_gives_softmax_in_order_whatever_the_batch_size(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "BATCH", batch_size)
    model, images = toy(), some_images(7)
    model.eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(images.images).permute(0, 3, 1, 2)).softmax(-1).numpy()
    found = predict(model, images)
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-6)
    assert found.features is None
    assert found.probabilities.dtype == np.float32
    np.testing.assert_array_equal(found.clusters, expected.argmax(1))
    np.testing.assert_allclose(found.confidence, expected.max(1), atol=1e-6)
    assert (len(found), found.n_clusters, found.clusters.dtype) == (7, 5, np.int64)


def test_features_come_in_the_same_pass_and_classify_to_the_same_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "BATCH", 3)
    model, images = toy(), some_images(7)
    found = predict(model, images, features=True)
    assert len(model.layouts) == 3
    np.testing.assert_allclose(found.probabilities, predict(model, images).probabilities, atol=1e-6)
    np.testing.assert_allclose(embed(model, images), found.features, atol=1e-6)
    assert found.features.shape == (7, 48)


def test_images_travel_channels_last_and_the_set_may_be_read_only() -> None:
    model, images = toy(), some_images(5)
    images.images.flags.writeable = False
    predict(model, images)
    assert all(model.layouts)


def test_predict_puts_every_modules_mode_back_even_after_an_error() -> None:
    model = toy().train()
    model.norm.eval()  # frozen, as in fine-tuning
    before = {name: value.clone() for name, value in model.state_dict().items()}
    predict(model, some_images(5))
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError):
        predict(model, some_images(5, side=6))
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)


def test_what_a_module_keeps_for_evaluation_is_dropped_when_training_goes_on() -> None:
    class Caching(torch.nn.Module):
        """Scales by its parameter; in eval by a copy of it that `train` drops, as attention biases of LeViT are."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))
            self.kept: torch.Tensor | None = None

        def train(self, mode: bool = True) -> "Caching":
            self.kept = None if mode else self.kept
            return super().train(mode)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                return x * self.scale
            self.kept = self.scale.detach().clone() if self.kept is None else self.kept
            return x * self.kept

    model, images = torch.nn.Sequential(toy(), Caching()).train(), some_images(5)
    before = predict(model, images).probabilities
    with torch.no_grad():
        model[1].scale.mul_(3.0)
    assert not np.allclose(predict(model, images).probabilities, before)


def test_progress_counts_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "BATCH", 3)
    calls: list[tuple[int, int]] = []
    predict(toy(), some_images(7), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(3, 7), (6, 7), (7, 7)]


def test_no_images_give_no_rows() -> None:
    assert predict(toy(), some_images(0)).probabilities.shape == (0, 5)


def test_half_precision_models_give_fp32_probabilities() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = predict(toy(), some_images(4), features=True)
    assert found.probabilities.dtype == found.features.dtype == np.float32
    np.testing.assert_allclose(found.probabilities.sum(1), 1, atol=1e-6)


# Scores against labels


@given(partitions)
@settings(max_examples=50, deadline=None)
def test_matching_is_the_best_of_all_one_to_one_maps(
    case: tuple[NDArray[np.int64], NDArray[np.int64], int, int],
) -> None:
    labels, clusters, n_classes, n_clusters = case
    width = max(n_classes, n_clusters)
    tables = np.array(list(itertools.permutations(range(width))))  # 720 at most; classes ≥ n_classes do not exist
    best = (tables[:, clusters] == labels).mean(1).max()
    mapping = match_clusters(labels, clusters, n_clusters, n_classes)
    assert np.mean(mapping[clusters] == labels) == pytest.approx(best)
    assert accuracy(labels, clusters) == pytest.approx(best)
    matched = mapping[mapping >= 0]
    assert len(set(matched)) == len(matched) == min(n_classes, n_clusters)


@given(partitions, st.permutations(range(6)))
@settings(max_examples=30, deadline=None)
def test_scores_do_not_see_the_names_of_clusters(
    case: tuple[NDArray[np.int64], NDArray[np.int64], int, int], names: list[int]
) -> None:
    labels, clusters, _, _ = case
    plain, renamed, right = (
        scores(labels, one_hot(given, 6)) for given in (clusters, np.array(names)[clusters], labels)
    )
    for name in ("acc", "nmi", "ari"):
        assert renamed[name] == pytest.approx(plain[name])
        assert right[name] == pytest.approx(1)
        assert plain[name] <= 1


def test_unmatched_clusters_are_errors() -> None:
    labels, clusters = [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 2, 2]
    assert match_clusters(labels, clusters, 4, 2).tolist() == [0, -1, 1, -1]
    assert accuracy(labels, clusters) == pytest.approx(5 / 6)


def test_scores_agree_with_scikit_learn_and_hold_the_calibration_of_matched_clusters() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 200)
    probabilities = random.dirichlet(np.full(6, 0.3), 200).astype(np.float32)
    probabilities[np.arange(200), labels] += 0.7
    found = Predictions(probabilities / probabilities.sum(1, keepdims=True))
    values = scores(labels, found)
    assert values["nmi"] == pytest.approx(normalized_mutual_info_score(labels, found.clusters))
    assert values["ari"] == pytest.approx(adjusted_rand_score(labels, found.clusters))
    assert values["acc"] == pytest.approx(accuracy(labels, found.clusters))
    correct = match_clusters(labels, found.clusters, 6, 4)[found.clusters] == labels
    assert values["ece"] == pytest.approx(calibration_error(found.confidence, correct))
    assert 0.5 < values["acc"] < 1


def test_calibration_error_by_hand() -> None:
    confidence = [0.95, 0.95, 0.95, 0.95, 0.55, 0.55, 0.0, 1.0]
    correct = [1, 1, 1, 0, 0, 0, 0, 1]
    by_hand = 5 / 8 * abs(4 / 5 - 4.8 / 5) + 2 / 8 * 0.55 + 1 / 8 * 0  # bins (14/15, 1], (8/15, 9/15], [0, 1/15]
    assert calibration_error(confidence, correct) == pytest.approx(by_hand)
    assert calibration_error([1.0, 1.0], [True, True]) == 0
    assert calibration_error([1.0, 1.0], [False, False]) == 1
    assert calibration_error([], []) == 0


def test_labels_may_be_large_numbers() -> None:
    labels = np.array([10**15, 10**15, 7])
    assert accuracy(labels, [0, 0, 1]) == 1
    assert scores(labels, one_hot([0, 0, 1], 2))["acc"] == 1


def test_labels_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(InputError, match=r"1,200 labels for 3 predictions"):
        scores(np.zeros(1200), one_hot([0, 1, 1], 2))
    with pytest.raises(InputError, match="no images to score"):
        accuracy([], [])
    with pytest.raises(InputError, match="image 1 has the label -1"):
        accuracy([0, -1], [0, 1])


# Agreement with constraints


@pytest.mark.parametrize(
    ("labels", "clusters", "message"),
    [
        ([0.2, 0.7, 1.5], [0, 1, 2], "labels of type float64 that are no whole numbers"),
        ([0.0, float("nan"), 1.0], [0, 1, 2], "labels of type float64 that are no whole numbers"),
        (["a", "b", "c"], [0, 1, 2], "labels of type <U1 that are no whole numbers"),
        ([0, 1, 2], [0, -1, 2], "image 1 has the cluster -1: clusters count from 0"),
        (np.eye(3), [0, 1, 2], r"labels of shape \(3, 3\)"),
    ],
)
def test_what_are_no_numbers_of_classes_is_refused(labels: Any, clusters: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        accuracy(labels, clusters)


def test_clusters_may_be_large_numbers_and_labels_whole_floats() -> None:
    assert accuracy([0, 1, 1], [10**10, 5, 5]) == 1
    assert accuracy([0.0, 1.0, 1.0], [2, 5, 5]) == 1


def test_knn_needs_a_label_for_each_image() -> None:
    with pytest.raises(InputError, match="1 labels for 3 images"):
        knn_accuracy(np.eye(3), [0, 1, 2], np.eye(3), [0])
    with pytest.raises(InputError, match="2 labels for 3 images"):
        knn_accuracy(np.eye(3), [0, 1], np.eye(3), [0, 1, 2])


def test_agreement_by_hand() -> None:
    found = one_hot([0, 0, 1, 1, 2], 3)
    kept_must, broken_must, kept_cannot, broken_cannot = (0, 1, 1.0), (1, 2, 0.8), (0, 2, 0.0), (2, 3, 0.2)
    values = agreement(
        constraints_of(kept_must, broken_must, kept_cannot, (0, 4, 0.0), broken_cannot, (0, 4, 0.5), n_images=5), found
    )
    assert values["must_link"] == 0.5
    assert values["cannot_link"] == pytest.approx(2 / 3)
    assert values["balanced"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    weighted = agreement(constraints_of(kept_must, broken_must, n_images=5, weight=[3.0, 1.0]), found)
    assert weighted["must_link"] == 0.75


def test_constraints_over_other_images_are_refused() -> None:
    with pytest.raises(InputError, match="over 4 images, the predictions over 3"):
        agreement(constraints_of((0, 1, 1.0), n_images=4), one_hot([0, 0, 1], 2))


def test_one_kind_of_constraint_alone_has_no_balance_and_none_at_all_says_nothing() -> None:
    found = one_hot([0, 0, 0], 2)
    values = agreement(constraints_of((0, 1, 1.0)), found)
    assert (values["must_link"], values["cannot_link"], values["balanced"]) == (1.0, None, None)
    assert set(agreement(constraints_of(), found).values()) == {None}


def test_the_constraint_loss_is_the_weighted_cross_entropy_of_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    p = random.dirichlet(np.ones(4), 30)
    pairs = [
        (int(i), int(j), float(c)) for i, j, c in zip(*random.integers(0, 30, (2, 50)), random.random(50), strict=True)
    ]
    weight = random.random(50)
    left, right, link = (np.array(column) for column in zip(*pairs, strict=True))
    score = (p[left] * p[right]).sum(1)
    expected = np.average(-link * np.log(score) - (1 - link) * np.log(1 - score), weights=weight)
    constraints = constraints_of(*pairs, n_images=30, weight=list(weight))
    for block in (2**22, 28):
        monkeypatch.setattr(metrics, "_BLOCK", block)
        values = agreement(constraints, Predictions(p.astype(np.float32)))
        assert values["constraint_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_constraint_loss_of_sure_and_wrong_predictions_is_finite() -> None:
    loss = agreement(constraints_of((0, 1, 1.0), (0, 2, 0.0)), one_hot([0, 1, 0], 2))["constraint_loss"]
    assert loss is not None
    assert 50 < loss < 100


# Collapse


def test_sizes_count_empty_clusters_too() -> None:
    assert cluster_sizes(one_hot([0, 2, 2], 4)).tolist() == [1, 0, 2, 0]


def test_a_healthy_clustering_gets_no_warning() -> None:
    assert collapse_warnings(one_hot(np.arange(1000) % 10, 10)) == []
    assert collapse_warnings(one_hot([0] * 85 + [1] * 15, 2)) == []
    assert collapse_warnings(one_hot([], 10)) == []
    assert collapse_warnings(one_hot([3, 3, 3], 10)) == []  # three images say nothing about ten clusters


def test_empty_and_dominating_clusters_are_named_with_numbers() -> None:
    empty, dominating = collapse_warnings(one_hot([1] * 1900 + [0] * 100, 4))
    assert empty == "2 of 4 clusters are empty (2, 3); 2,000 images share the others."
    assert dominating == "Cluster 1 holds 1,900 of 2,000 images (95%)."
    (single,) = collapse_warnings(one_hot(np.arange(900) % 9, 10))
    assert single.startswith("1 of 10 clusters is empty (9)")
    (dominating,) = collapse_warnings(one_hot([0] * 40, 20))  # too few images to blame empty clusters, not to blame one
    assert dominating == "Cluster 0 holds 40 of 40 images (100%)."
    many = collapse_warnings(one_hot(np.arange(500) % 60, 100))[0]
    assert "(60, 61, 62, 63, 64, 65, 66, 67, 68, 69, …)" in many


# Pseudo-labels


def test_pseudo_quality_by_brute_force() -> None:
    random = np.random.default_rng(0)
    guess, labels = random.dirichlet(np.full(3, 0.5), 25), random.integers(0, 3, 25)
    keep, links = random.random(25) < 0.6, random.random((25, 25))
    hits = {"tp": 0, "fp": 0, "fn": 0, "tn": 0}
    for i, j in itertools.permutations(np.flatnonzero(keep), 2):
        said, true = links[i, j] >= 0.5, labels[i] == labels[j]
        hits[("t" if said == true else "f") + ("p" if said else "n")] += 1
    for wrap in (np.asarray, torch.from_numpy):
        values = pseudo_quality(wrap(guess), wrap(keep), wrap(links), wrap(labels))
        assert values["selected_share"] == pytest.approx(keep.mean())
        assert values["pseudo_label_accuracy"] == pytest.approx(accuracy(labels[keep], guess.argmax(1)[keep]))
        assert values["pseudo_constraint_precision"] == pytest.approx(hits["tp"] / (hits["tp"] + hits["fp"]))
        assert values["pseudo_constraint_recall"] == pytest.approx(hits["tp"] / (hits["tp"] + hits["fn"]))
        assert values["pseudo_constraint_accuracy"] == pytest.approx((hits["tp"] + hits["tn"]) / sum(hits.values()))
        assert values["must_link_share"] == pytest.approx((hits["tp"] + hits["fp"]) / sum(hits.values()))


def test_swapped_clusters_spoil_neither_pseudo_labels_nor_pseudo_constraints() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2])
    values = pseudo_quality(np.eye(3)[(labels + 1) % 3], np.ones(6), labels[:, None] == labels[None], labels)
    assert values["pseudo_label_accuracy"] == 1
    assert values["pseudo_constraint_accuracy"] == values["pseudo_constraint_recall"] == 1


def test_pseudo_quality_takes_tensors_of_half_precision() -> None:
    guess = torch.eye(3, dtype=torch.bfloat16)
    values = pseudo_quality(guess, torch.ones(3, dtype=torch.bool), guess @ guess.T, torch.arange(3))
    assert values["pseudo_label_accuracy"] == values["pseudo_constraint_accuracy"] == 1


def test_pseudo_quality_of_nothing_selected_is_none() -> None:
    values = pseudo_quality(np.eye(3), np.zeros(3), np.eye(3), np.arange(3))
    assert values.pop("selected_share") == 0
    assert set(values.values()) == {None}


# Features


def test_knn_accuracy_agrees_with_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(4, 8))
    labels, test_labels = random.integers(0, 4, 120), random.integers(0, 4, 60)
    features, test_features = (centres[which] + random.normal(size=(len(which), 8)) for which in (labels, test_labels))

    def unit(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    oracle = KNeighborsClassifier(20, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.1))
    expected = np.mean(oracle.fit(unit(features), labels).predict(unit(test_features)) == test_labels)
    assert 0.5 < expected < 1
    for block in (2**25, 1):
        monkeypatch.setattr(neighbours, "BLOCK", block)
        assert knn_accuracy(features, labels, test_features, test_labels) == pytest.approx(expected)


def test_knn_uses_all_images_when_there_are_fewer_than_k() -> None:
    assert knn_accuracy([[1.0, 0], [0, 1]], [0, 1], [[2.0, 1], [1, 3]], [0, 1], k=20) == 1


def test_neighbour_consistency_is_the_share_of_equal_labels() -> None:
    assert neighbour_consistency([[1, 2], [0, 2], [0, 1]], [5, 5, 7]) == pytest.approx(2 / 6)


def test_cluster_quality_is_what_neighbours_tell_times_clusters_in_use() -> None:
    from sklearn.metrics import mutual_info_score

    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), size=30)
    near = rng.integers(0, 30, (30, 3))
    clusters = p.argmax(1)
    one, other = np.repeat(clusters, 3), clusters[near].ravel()
    told = mutual_info_score(np.concatenate((one, other)), np.concatenate((other, one))) / np.log(4)
    shares = np.bincount(clusters, minlength=4) / 30
    used = np.exp(-sum(share * np.log(share) for share in shares)) / 4
    assert metrics.cluster_quality(p, near) == pytest.approx(told * used)
    alone = np.tile([0.0, 1.0, 0.0, 0.0], (30, 1))
    assert metrics.cluster_quality(alone, near) == 0  # collapsed
    even = np.eye(4)[np.arange(28) % 4]
    same = (np.arange(28)[:, None] + [4, 8]) % 28
    assert metrics.cluster_quality(even, same) == pytest.approx(1)
    assert metrics.cluster_quality(0.2 * even + 0.2, same) == pytest.approx(1)  # how sure they are does not count
    lost = np.eye(4)[np.arange(28) % 4 // 2]
    assert metrics.cluster_quality(lost, same) == pytest.approx(1 / 4)  # half the information, half in use
