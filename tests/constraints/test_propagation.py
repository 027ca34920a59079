"""Known groups carried along neighbours, held against dense linear algebra and images whose kinds are plain."""

import importlib
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.propagation import (
    find_hidden,
    known_groups,
    likely_kinds,
    neighbour_graph,
    pass_messages,
    seeds,
    spread_labels,
)
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import nearest_neighbours, predict, scores
from constraintmatch.methods import METHODS, Context
from constraintmatch.methods.heads import regression_head
from constraintmatch.methods.propagate import Frozen, teach_groups
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_clusters, with_head
from constraintmatch.pipeline.train import weights_hash
from constraintmatch.questions.answers import Answer, Question, stated_constraints
from constraintmatch.training.loop import TrainSettings

CPU = TrainSettings(device="cpu")


def blobs(n: int = 90, k: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % k
    return (5 * np.eye(k, 6)[labels] + rng.normal(size=(n, 6))).astype(np.float32), labels


def links(must: list[tuple[int, int]], cannot: list[tuple[int, int]], n: int = 90) -> Constraints:
    return Constraints.from_lists(n_images=n, must_link=must, cannot_link=cannot)


def test_spreading_solves_the_equation_of_label_spreading() -> None:
    features, _ = blobs()
    graph = neighbour_graph(features, nearest_neighbours(features, 5))
    begun = np.zeros((90, 3), np.float32)
    begun[[0, 1, 2, 5], [0, 1, 2, 2]] = [1, 1, 0.5, 0.5]
    for reach in (0.0, 0.5, 0.99):
        wanted = np.linalg.solve(np.eye(90) - reach * graph.toarray().astype(float), begun.astype(float))
        wanted /= wanted.sum(0)
        total = wanted.sum(1, keepdims=True)
        wanted = np.divide(wanted, total, out=np.zeros_like(wanted), where=total > 1e-9)
        np.testing.assert_allclose(spread_labels(graph, begun, reach=reach), wanted, atol=2e-3)


def test_the_graph_is_symmetric_and_its_greatest_eigenvalue_is_one() -> None:
    features, _ = blobs()
    graph = neighbour_graph(features, nearest_neighbours(features, 5)).toarray()
    np.testing.assert_allclose(graph, graph.T, atol=1e-6)
    assert np.linalg.eigvalsh(graph.astype(float)).max() == pytest.approx(1, abs=1e-4)
    assert not graph.diagonal().any()


def test_weights_do_not_depend_on_the_scale_of_the_features() -> None:
    features, _ = blobs()
    near = nearest_neighbours(features, 5)
    one, other = (neighbour_graph(factor * features, near).toarray() for factor in (1, 1000))
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_an_image_that_no_path_leads_to_stays_without_a_cluster() -> None:
    features = np.repeat(np.eye(2, 4, dtype=np.float32), 5, axis=0) + 0.01 * np.eye(10, 4, dtype=np.float32)
    begun = np.zeros((10, 2), np.float32)
    begun[0, 0] = begun[1, 1] = 1
    shares = spread_labels(neighbour_graph(features, nearest_neighbours(features, 3)), begun)
    assert shares[:5].sum(1) == pytest.approx(np.ones(5), abs=1e-5)
    assert not shares[5:].any()


def test_three_known_images_a_kind_place_all() -> None:
    features, labels = blobs()
    begun = np.zeros((90, 3), np.float32)
    begun[np.arange(9), labels[:9]] = 1 / 3
    found = spread_labels(neighbour_graph(features, nearest_neighbours(features, 10)), begun).argmax(1)
    assert (found == labels).mean() > 0.95


def test_a_large_cluster_loses_nothing_to_a_small_one() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], [270, 30])
    features = (4 * np.eye(2, 6)[labels] + rng.normal(size=(300, 6))).astype(np.float32)
    begun = np.zeros((300, 2), np.float32)
    begun[[0, 1, 2], 0] = begun[[270, 271, 272], 1] = 1 / 3
    found = spread_labels(neighbour_graph(features, nearest_neighbours(features, 10)), begun).argmax(1)
    assert (found == labels).mean() > 0.95


def test_groups_are_told_apart_and_the_largest_come_first() -> None:
    pairs = links([(0, 3), (3, 6), (1, 4), (2, 5), (5, 8), (8, 11)], [(0, 1), (1, 2), (0, 2)])
    assert [rows.tolist() for rows in known_groups(pairs)] == [[2, 5, 8, 11], [0, 3, 6], [1, 4]]


def test_a_group_that_is_not_known_to_differ_is_left_out() -> None:
    pairs = links([(0, 3), (3, 6), (1, 4), (20, 23)], [(0, 1)])
    assert [rows.tolist() for rows in known_groups(pairs)] == [[0, 3, 6], [1, 4]]


def test_a_large_group_counts_if_it_differs_from_the_smaller_ones() -> None:
    must = [(0, 1), (0, 2), (0, 3), (0, 4), (10, 11), (10, 12), (10, 13), (20, 21), (20, 22), (30, 31)]
    cannot = [(10, 20), (10, 30), (20, 0), (30, 0), (30, 20)]  # of 0 and 10 nothing is known
    assert [rows[0] for rows in known_groups(links(must, cannot))] == [0, 10, 20, 30]


def test_a_hint_tells_groups_apart_and_joins_nothing() -> None:
    must = [(0, 3), (3, 6), (1, 4)]
    hints = links([(6, 9)], [(3, 4)])
    assert [rows.tolist() for rows in known_groups(links(must, []))] == [[0, 3, 6]]
    assert [rows.tolist() for rows in known_groups(links(must, []), hints)] == [[0, 3, 6], [1, 4]]


def test_pairs_at_random_give_hardly_any_groups() -> None:
    labels = np.arange(5_000) % 10
    pairs = Constraints.sample(labels, 1_000, seed=0)
    assert len(known_groups(pairs)) < 5  # of about a hundred must-links


def test_answers_to_which_of_these_give_a_group_for_each_kind() -> None:
    labels = np.arange(60) % 3
    asked = [Answer(Question(image, (0, 1, 2)), int(labels[image])) for image in range(3, 30)]
    told = [Answer(Question(1, (0,)), -1), Answer(Question(2, (0, 1)), -1)]
    groups = known_groups(stated_constraints([*told, *asked], 60))
    assert sorted(map(len, groups)) == [10, 10, 10]
    assert all(len(set(labels[rows])) == 1 for rows in groups)


def test_groups_take_the_clusters_that_the_model_sees_them_in() -> None:
    probabilities = np.full((12, 3), 0.1, np.float32)
    probabilities[np.arange(12), np.array([2, 2, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])] = 0.8
    probabilities[6, 1] = 0.9
    begun = seeds([np.array([0, 1, 4]), np.array([2, 3])], probabilities)
    np.testing.assert_allclose(begun.sum(0), 1, atol=1e-6)
    assert begun[:, 2].nonzero()[0].tolist() == [0, 1, 4]
    assert begun[:, 0].nonzero()[0].tolist() == [2, 3]
    assert begun[:, 1].nonzero()[0].tolist() == [5, 6]  # no group: a quarter of its seven other images, the surest


@pytest.mark.parametrize("size", [2, 4, 12])
def test_what_the_model_believes_counts_less_the_more_is_known(size: int) -> None:
    probabilities = np.full((60, 2), 0.1, np.float32)
    probabilities[np.arange(60), np.repeat([0, 1], 30)] = 0.9
    group, other = np.arange(size), np.arange(30, 33)
    probabilities[[20, 21], 0] = 0.95  # the surest of those that nothing is known of
    begun = seeds([group, other], probabilities)
    believed = (4 / (4 + size)) ** 2
    np.testing.assert_allclose(begun[group, 0], (1 - believed) / size, rtol=1e-5)
    sure = np.setdiff1d(begun[:, 0].nonzero()[0], group)
    assert {20, 21} < set(sure.tolist())
    np.testing.assert_allclose(begun[sure, 0].sum(), believed, rtol=1e-5)


def groups_in(begun: np.ndarray, groups: list[np.ndarray]) -> list[list[int]]:
    """Of each cluster the known images that it begins with."""
    known = np.concatenate(groups)
    return [np.intersect1d(column.nonzero()[0], known).tolist() for column in begun.T]


def test_of_more_groups_than_clusters_the_second_of_a_kind_is_left_out() -> None:
    probabilities = np.full((30, 3), 0.1, np.float32)
    probabilities[np.arange(30), np.repeat([0, 1, 2], 10)] = 0.8
    main, again = np.arange(6), np.arange(6, 10)  # of one kind, told apart by mistake
    seldom, other = np.array([10, 11]), np.array([20, 21, 22])
    groups = [main, again, other, seldom]
    assert groups_in(seeds(groups, probabilities), groups) == [main.tolist(), seldom.tolist(), other.tolist()]


@pytest.mark.parametrize("size", [2, 5])
def test_a_small_group_that_is_seen_elsewhere_takes_no_cluster_until_it_grows(size: int) -> None:
    probabilities = np.full((40, 4), 0.02, np.float32)
    probabilities[np.arange(40), np.repeat([0, 1, 2, 3], 10)] = 0.94
    again = np.arange(size)  # a second group of the first kind; nothing was asked about the fourth
    groups = [np.arange(5, 10), np.arange(11, 17), np.arange(21, 27), again]
    fourth = groups_in(seeds(groups, probabilities), groups)[3]
    assert len(fourth) == (0 if size == 2 else 5)  # of two groups of one size either may be the first


def test_reach_must_be_less_than_one() -> None:
    features, _ = blobs()
    graph = neighbour_graph(features, nearest_neighbours(features, 5))
    with pytest.raises(InputError, match=r"reach is 1.0; it must be in \[0, 1\)"):
        spread_labels(graph, np.zeros((90, 3), np.float32), reach=1.0)


def n_found_densely(graph: np.ndarray, first: np.ndarray, known: np.ndarray, reach: float) -> int:
    """Known images that the others find when a fifth of them at a time is hidden, by dense linear algebra."""
    found = 0
    for number in range(5):
        hidden, rest = known[number::5], first.copy()
        rest[hidden] = 0
        shares = np.linalg.solve(np.eye(len(graph)) - reach * graph, rest)
        shares /= shares.sum(0)
        found += int((shares[hidden].argmax(1) == first[hidden].argmax(1)).sum())
    return found


def test_hidden_known_images_are_found_as_by_dense_algebra() -> None:
    rng, labels = np.random.default_rng(2), np.arange(150) % 3
    features = (1.5 * np.eye(3, 6)[labels] + rng.normal(size=(150, 6))).astype(np.float32)
    graph = neighbour_graph(features, nearest_neighbours(features, 8))
    groups = [np.flatnonzero(labels == kind)[:15] for kind in range(3)]
    first, rows = seeds(groups, np.eye(3, dtype=np.float32)[labels]), np.concatenate(groups)
    counts = {reach: int(find_hidden(graph, first, rows, reach).sum()) for reach in (0.99, 0.5)}
    assert counts == {reach: n_found_densely(graph.toarray(), first, rows, reach) for reach in (0.99, 0.5)}
    assert 20 < min(counts.values()) < max(counts.values()) < 45


@pytest.mark.parametrize("strength", [0.0, 4.0])
def test_groups_that_say_what_the_model_says_move_it_by_a_quarter_of_what_they_teach(strength: float) -> None:
    """A head without weights knows nothing; one that points at the kinds knows them all."""
    features, labels = blobs()
    head = torch.zeros(3, features.shape[1])
    for kind in range(3):
        head[kind] = strength * torch.from_numpy(features[labels == kind].mean(0))
    images = ImageSet.from_arrays(features, labels=labels)
    model = with_head(build_model(n_clusters=0, side=1, channels=features.shape[1]), head, torch.zeros(3))
    frozen = Frozen.of(model, images)
    groups = [np.flatnonzero(labels == kind)[:6] for kind in range(3)]
    knows = (frozen.probabilities(model).argmax(1) == labels).mean() > 0.9
    assert knows == (strength > 0)
    taught, cautious = teach_groups(model, frozen, groups), teach_groups(model, frozen, groups, informed=model)
    own, alone, kept = (one.state_dict()["head.weight"] for one in (model, taught, cautious))
    torch.testing.assert_close(kept, (alone + 3 * own) / 4 if knows else alone)  # half, less a quarter of the control


@pytest.mark.parametrize(("bias", "counts"), [(0.0, True), (-100.0, False)])
def test_an_informed_model_that_has_lost_a_kind_does_not_count(bias: float, counts: bool) -> None:
    features, labels = blobs(300)
    images = ImageSet.from_arrays(features)
    weight, none = 0.2 * torch.eye(3, 6), torch.zeros(3)
    model = with_head(build_model(n_clusters=0, side=1, channels=6), weight, none)
    informed = with_head(model, 2 * weight, torch.tensor([0.0, 0.0, bias]))
    frozen, groups = Frozen.of(model, images), [np.flatnonzero(labels == kind)[:6] for kind in range(3)]
    found, without = (teach_groups(model, frozen, groups, informed=one) for one in (informed, model))
    one, other = (model.state_dict() for model in (found, without))
    assert all(torch.equal(one[part], other[part]) for part in one) == (not counts)


def test_if_most_images_are_known_they_keep_their_kind_whatever_their_neighbours_say() -> None:
    """Features that say little, as wide as those of an encoder: a head can repeat any answer."""
    rng, labels = np.random.default_rng(0), np.arange(60) % 3
    images = ImageSet.from_arrays(rng.normal(size=(60, 300)).astype(np.float32))
    model = with_head(build_model(n_clusters=0, side=1, channels=300), torch.zeros(3, 300), torch.zeros(3))
    frozen, groups = Frozen.of(model, images), [np.flatnonzero(labels == kind) for kind in range(3)]
    found = frozen.probabilities(teach_groups(model, frozen, groups)).argmax(1)
    assert len(set(zip(labels.tolist(), found.tolist(), strict=True))) == 3
    knows = with_head(model, *regression_head(frozen.features[2:], labels[2:], 3))  # all but the first two
    again = frozen.probabilities(teach_groups(knows, frozen, groups, informed=knows)).argmax(1)
    assert len(set(zip(labels.tolist(), again.tolist(), strict=True))) == 3


# The method


def shades(n: int = 120) -> ImageSet:
    """Three kinds by brightness, with noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 3
    pixels = 40 + 80 * labels[:, None, None, None] + rng.integers(-20, 21, (n, 8, 8, 1))
    return ImageSet.from_arrays(pixels.astype(np.uint8), labels=labels)


def model_of(k: int = 3) -> ClusterModel:
    return with_clusters(build_model(n_clusters=k, side=8, channels=1, backbone="tiny", seed=0), k, seed=1)


def known(n: int = 120, each: int = 4) -> Constraints:
    must = [(kind, kind + 3 * step) for kind in range(3) for step in range(1, each)]
    return links(must, [(0, 1), (1, 2), (0, 2)], n)


def test_a_few_known_images_make_a_head_and_leave_the_backbone() -> None:
    images, model = shades(), model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    placed, log = METHODS["propagate"](model, images, known(), settings=CPU)
    assert scores(images.labels, predict(placed, images))["acc"] > 0.95
    assert scores(images.labels, predict(model, images))["acc"] < 0.9
    assert (log[-1]["groups"], log[-1]["known"]) == (3, 12)
    for name, value in placed.state_dict().items():
        assert name.startswith("head") or torch.equal(value, before[name])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_few_images_take_part_and_the_known_ones_always_do() -> None:
    images = shades()
    placed, _ = METHODS["propagate"](model_of(), images, known(), most_images=30, settings=CPU)
    assert scores(images.labels, predict(placed, images))["acc"] > 0.95


def test_pairs_that_tell_nothing_apart_leave_the_model_as_it_was() -> None:
    class Said(Reporter):
        text = ""

        def say(self, text: str) -> None:
            self.text += text

    said, model = Said(), model_of()
    pairs = links([(0, 3), (1, 4)], [], 120)
    placed, _ = METHODS["propagate"](model, shades(), pairs, settings=CPU, context=Context(reporter=said))
    assert placed is model
    assert "separate no two groups" in said.text


def test_a_cluster_without_answers_keeps_its_place() -> None:
    images = shades()
    first, _ = METHODS["propagate"](model_of(), images, known(), settings=CPU)
    before = predict(first, images).clusters
    two = links([(0, 3), (0, 6), (1, 4), (1, 7)], [(0, 1)], 120)  # nothing of the third kind
    second, log = METHODS["propagate"](first, images, two, settings=CPU)
    assert log[-1]["groups"] == 2
    assert (predict(second, images).clusters == before).mean() > 0.95


def test_a_cluster_that_was_empty_stays_so_and_the_others_are_told() -> None:
    images, model = shades(), model_of(4)
    with torch.no_grad():
        model.head.bias[3] = -1e3
    placed, _ = METHODS["propagate"](model, images, known(), settings=CPU)
    found = predict(placed, images)
    assert scores(images.labels, found)["acc"] > 0.95
    assert len(set(found.clusters.tolist())) == 3
    assert np.isfinite(found.probabilities).all()


@pytest.mark.parametrize(
    ("change", "said"), [({"n_neighbours": 0}, "n_neighbours is 0"), ({"reach": 1.0}, "reach is 1.0")]
)
def test_impossible_arguments_are_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        METHODS["propagate"](model_of(), shades(), known(), settings=CPU, **change)


def test_constraints_over_other_images_are_refused() -> None:
    with pytest.raises(InputError, match="over 90 images, not 120"):
        METHODS["propagate"](model_of(), shades(), known(90), settings=CPU)


def test_what_was_seen_once_gives_the_same_head_as_the_method() -> None:
    images, model = shades(), model_of()
    frozen = Frozen.of(model, images)
    groups = known_groups(known())
    for most in (50_000, 30):
        placed, _ = METHODS["propagate"](model, images, known(), most_images=most, settings=CPU)
        again = teach_groups(model, frozen, groups, most_images=most)
        assert weights_hash(again) == weights_hash(placed)
    np.testing.assert_allclose(frozen.probabilities(again), predict(again, images).probabilities, atol=1e-5)


def test_the_scores_of_the_log_are_those_of_a_pass_over_the_images() -> None:
    images = shades()
    placed, log = METHODS["propagate"](model_of(), images, known(), settings=CPU)
    assert log[-1]["acc"] == scores(images.labels, predict(placed, images))["acc"]


def test_what_known_images_gain_is_weighed_by_how_sure_the_model_is_of_others() -> None:
    """Eight unsure known images gain two; where the model is sure nobody asked, and a change counts against it."""
    gain = importlib.import_module("constraintmatch.methods.propagate")._gain
    n, known = 100, np.arange(8)
    sure = np.linspace(0.5, 0.99, n).astype(np.float32)
    probabilities = np.stack([sure, 1 - sure], 1)
    truth, hits = np.array([1, 1, 0, 0, 0, 0, 0, 0]), np.ones(8, bool)
    same = np.tile(np.array([1.0, 0.0], np.float32), (n, 1))
    assert gain(probabilities, same, known, hits, truth) == pytest.approx(0.92 * 2 / (8 + 2) / 5 + 2 / n)
    other = same.copy()
    other[90:] = other[90:, ::-1]  # half of the surest fifth
    expected = (2 / (8 + 2) - 2 * (6 / 8) * 0.5 / 2) / 5
    assert gain(probabilities, other, known, hits, truth) == pytest.approx(0.92 * expected + 2 / n)


# Kinds from pairs of which some are wrong


@pytest.mark.parametrize("rates", [(0.02, 0.02), (0.3, 0.1)])
def test_messages_on_a_tree_give_the_exact_posterior(rates: tuple[float, float]) -> None:
    prior = np.random.default_rng(0).dirichlet(np.ones(3), 5)
    ends, same = np.array([[0, 1, 1, 3], [1, 2, 3, 4]]), np.array([True, False, True, True])
    exact, alike, total = np.zeros((5, 3)), np.zeros(4), 0.0
    for kinds in product(range(3), repeat=5):
        z = np.array(kinds)
        equal = z[ends[0]] == z[ends[1]]
        wrong = np.where(equal, rates[0], rates[1])
        likely = prior[np.arange(5), z].prod() * np.where(equal == same, 1 - wrong, wrong).prod()
        exact[np.arange(5), z] += likely
        alike += likely * equal
        total += likely
    found, one_kind, _ = pass_messages(np.log(prior), ends, same, rates, np.zeros((2, 4, 3)), 60)
    np.testing.assert_allclose(found, exact / total, atol=1e-6)
    np.testing.assert_allclose(one_kind, alike / total, atol=1e-6)


def test_one_wrong_same_does_not_join_two_groups_that_the_model_tells_apart() -> None:
    beliefs = np.repeat(np.array([[0.9, 0.1], [0.1, 0.9]], np.float32), 5, axis=0)
    must = [(0, i) for i in range(1, 5)] + [(5, i) for i in range(6, 10)]
    pairs = Constraints.from_lists(n_images=10, must_link=[*must, (2, 7)], cannot_link=[(0, 5)])
    rows, kinds, _ = likely_kinds(pairs, beliefs)
    np.testing.assert_array_equal(rows, np.arange(10))
    np.testing.assert_array_equal(kinds.argmax(1), np.repeat([0, 1], 5))


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_pairs_and_a_model_together_are_more_often_right_than_the_model(wrong: float) -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 400)
    seen = np.where(rng.random(400) < 0.75, labels, rng.integers(0, 4, 400))
    beliefs = np.full((400, 4), 0.02, np.float32)
    beliefs[np.arange(400), seen] = 0.94
    centres = np.array([np.flatnonzero((labels == k) & (seen == k))[0] for k in range(4)])
    images = np.setdiff1d(np.arange(400), centres)
    left, right = np.tile(images, 2), np.concatenate([centres[seen[images]], centres[(seen[images] + 1) % 4]])
    link = (labels[left] == labels[right]) ^ (rng.random(len(left)) < wrong)
    pairs = Constraints.from_arrays(left, right, link.astype(float), n_images=400)
    rows, kinds, missed = likely_kinds(pairs, beliefs)
    found = (kinds.argmax(1) == labels[rows]).mean()
    assert found > (seen == labels).mean() + (0.02 if wrong else 0.1)
    assert wrong or missed < 0.04


def test_groups_help_to_find_two_kinds_that_the_clusters_take_for_one() -> None:
    labels = np.arange(150) % 3
    seen = np.where(np.eye(3, dtype=bool)[np.minimum(labels, 1)], np.float32(0.94), np.float32(0.03))
    right: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(4):
        pairs = Constraints.sample(labels, 200, seed=seed)
        named = np.unique(np.concatenate([pairs.left, pairs.right]))
        groups = [named[labels[named] == kind] for kind in range(3)]
        for helped in right:
            rows, kinds, _ = likely_kinds(pairs, seen, groups if helped else ())
            table = np.zeros((3, 3))
            np.add.at(table, (kinds.argmax(1), labels[rows]), 1)
            right[helped].append(table[linear_sum_assignment(table, maximize=True)].sum() / len(rows))
    assert np.mean(right[True]) > np.mean(right[False]) + 0.05
