"""Labels that neighbours agree on: which they are, and that they keep every cluster."""

import copy
import importlib

import numpy as np
import pytest
import torch

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions, cluster_sizes, predict
from constraintmatch.methods import METHODS, ViewChoice
from constraintmatch.methods.preparation import quality_judge
from constraintmatch.methods.scan import TaughtBatch, reliable_labels
from constraintmatch.models.cluster_model import ClusterModel, build_model
from constraintmatch.training.loop import TrainSettings

pytestmark = pytest.mark.usefixtures("quick_heads_throughout")

CPU = TrainSettings(device="cpu", optimizer="adam", lr=1e-3, schedule="constant")


def stripes(n: int = 60) -> ImageSet:
    """Bright rows, columns or corners: three kinds."""
    rng = np.random.default_rng(0)
    kind = np.arange(n) % 3
    pixels = rng.integers(0, 60, (n, 8, 8, 1))
    pixels[kind == 0, ::2] += 180
    pixels[kind == 1, :, ::2] += 180
    pixels[kind == 2, :4, :4] += 180
    return ImageSet.from_arrays(pixels.astype(np.uint8), labels=kind)


@pytest.fixture(scope="module")
def started() -> ClusterModel:
    """Linear heads on the stripes; a copy is to be trained."""
    model = build_model(n_clusters=0, side=8, channels=1, seed=0)
    return METHODS["linear_scan"](model, stripes(), n_clusters=3, n_tries=8, settings=CPU).model


def test_images_whose_neighbours_disagree_are_not_reliable() -> None:
    p = np.array([[0.9, 0.1]] * 4 + [[0.1, 0.9]] * 4)
    near = np.array([[1, 2], [0, 2], [0, 1], [4, 0], [5, 6], [4, 6], [4, 5], [0, 4]])  # 3 and 7 lie between
    rows, labels = reliable_labels(p, near, 0.75)
    assert rows.tolist() == [0, 1, 2, 4, 5, 6]
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_neighbours_overrule_an_image() -> None:
    p = np.array([[0.9, 0.1]] * 3 + [[0.2, 0.8]] * 3)
    near = np.array([[1, 2], [0, 2], [0, 1], [0, 1], [5, 3], [4, 3]])  # 3 has neighbours of the other cluster
    rows, labels = reliable_labels(p, near, 1.0)
    assert dict(zip(rows.tolist(), labels.tolist(), strict=True))[4] == 1
    assert 3 not in rows or labels[rows.tolist().index(3)] == 0


def test_a_large_cluster_gives_no_more_than_its_even_part_and_a_small_one_something() -> None:
    p = np.eye(3)[[0] * 25 + [1] * 4 + [2]]
    rows, labels = reliable_labels(p, np.arange(30)[:, None], 0.5)  # everybody is their own neighbour
    assert np.bincount(labels).tolist() == [5, 2, 1]
    assert np.array_equal(labels, p[rows].argmax(1))


def test_a_step_teaches_every_cluster_as_often(started: ClusterModel, monkeypatch: pytest.MonkeyPatch) -> None:
    module, images = importlib.import_module("constraintmatch.methods.scan"), stripes()
    seen: list[TaughtBatch] = []

    def watch(_model: object, next_batch: object, *_: object, **__: object) -> list[object]:
        seen.extend(next_batch(step) for step in range(20))  # type: ignore[operator]
        return []

    monkeypatch.setattr(module, "fit", watch)
    kinds = np.array([0] * 30 + [1] * 6)
    monkeypatch.setattr(module, "reliable_labels", lambda *_: (np.arange(36), kinds))
    METHODS["neighbour_label"](copy.deepcopy(started), images, settings=CPU)
    taught = torch.cat([batch.label for batch in seen])
    assert len(taught) == 20 * 60
    assert 0.4 < taught.float().mean() < 0.6  # 6 of 36 would be a sixth
    assert not torch.equal(seen[0].label, seen[1].label)


def test_no_cluster_is_lost_where_confidence_alone_loses_one(started: ClusterModel) -> None:
    images, model = stripes(), copy.deepcopy(started)
    with torch.no_grad():
        assert model.head is not None
        model.head.weight.mul_(20)
        model.head.bias.mul_(20)
        model.head.weight[2].mul_(0.05)  # nobody is sure of the last cluster
        model.head.bias[2].mul_(0.05)
    before = cluster_sizes(predict(model, images))
    how = {"tolerance": 1, "settings": CPU, "views": ViewChoice(flip=False)}
    taught = METHODS["neighbour_label"](copy.deepcopy(model), images, epochs=12, **how).model
    confident = METHODS["self_label"](model, images, epochs=12, **how).model
    assert before.min() > 0
    assert cluster_sizes(predict(taught, images)).min() > 0
    assert cluster_sizes(predict(confident, images)).min() == 0


def test_the_judge_looks_for_neighbours_in_the_model_that_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    from constraintmatch.methods import preparation

    images = stripes()
    kinds = np.eye(3, dtype=np.float32)[np.arange(60) % 3]
    noise = 0.1 * np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    monkeypatch.setattr(preparation, "predict", lambda model, *_, **__: Predictions(kinds, model + noise))
    judge = quality_judge(images, torch.device("cpu"))
    assert judge(kinds) == pytest.approx(1)  # type: ignore[arg-type]
    assert judge(np.roll(kinds, 20, 0)) == pytest.approx(1)  # type: ignore[arg-type]
    scattered = kinds[np.random.default_rng(1).permutation(60)]
    assert judge(scattered) < 0.1  # type: ignore[arg-type]


def test_arguments_are_checked() -> None:
    images, model = stripes(12), build_model(n_clusters=3, side=8, channels=1)
    with pytest.raises(InputError, match=r"reliable is 2; it must be in \[0, 1\]"):
        METHODS["neighbour_label"](model, images, reliable=2)
    with pytest.raises(InputError, match="n_neighbours is 0; neighbour_label needs 1 or more"):
        METHODS["neighbour_label"](model, images, n_neighbours=0)


def test_known_images_are_labelled_by_their_groups_and_count_more_often() -> None:
    p = np.eye(3, dtype=np.float32)[np.arange(30) % 3] * 0.9 + 0.03
    groups = [np.array([0, 3, 7]), np.array([1, 4])]  # 7 is in cluster 1, its group in cluster 0
    rows, labels = reliable_labels(p, np.arange(30)[:, None], 0.5, groups)
    known = {0: 0, 3: 0, 7: 0, 1: 1, 4: 1}
    assert all(labels[rows == row].tolist() == [label] * 3 for row, label in known.items())
    others = ~np.isin(rows, list(known))
    assert len(set(rows[others])) == others.sum() > 0
    assert np.array_equal(labels[others], p[rows[others]].argmax(1))
