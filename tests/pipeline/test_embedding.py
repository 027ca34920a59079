"""Several networks as one model: `join` and its command."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from constraintmatch._internal.errors import InputError
from constraintmatch.cli import app
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed, predict
from constraintmatch.methods import constraintmatch, propagate
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model, save_model
from constraintmatch.pipeline.embedding import join
from constraintmatch.training.loop import TrainSettings

CPU = TrainSettings(device="cpu", steps=3)


def network(seed: int, n_clusters: int = 10, side: int = 8) -> ClusterModel:
    return build_model(n_clusters=n_clusters, side=side, channels=1, seed=seed).eval()


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return load_dataset("digits", "train").take(np.arange(300))


def test_it_places_images_as_the_first_one_does(digits: ImageSet) -> None:
    first, second = network(0), network(1)
    joined = join([first, second], digits)
    assert joined.config.backbone == "tiny+tiny"
    before, after = predict(first, digits), predict(joined, digits)
    np.testing.assert_allclose(after.probabilities, before.probabilities, atol=1e-5)


def test_features_are_those_of_each_part_centred_and_of_length_one(digits: ImageSet) -> None:
    models = [network(0), network(1), network(2)]
    joined = join(models, digits)
    found = embed(joined, digits)
    widths = np.cumsum([0, *(model.width for model in models)])
    assert joined.width == found.shape[1] == widths[-1]
    for model, begin, end in zip(models, widths[:-1], widths[1:], strict=True):
        own = embed(model, digits)
        own = own - own.mean(0)
        own /= np.linalg.norm(own, axis=1).mean()
        np.testing.assert_allclose(found[:, begin:end], own, atol=1e-4)


def test_each_part_sees_images_as_it_was_trained_to(digits: ImageSet) -> None:
    first = network(0)
    second = ClusterModel(replace(network(1).config, mean=(0.2,), std=(0.7,))).eval()
    found = embed(join([first, second], digits), digits)[:, first.width :]
    own = embed(second, digits)
    own = (own - own.mean(0)) / np.linalg.norm(own - own.mean(0), axis=1).mean()
    np.testing.assert_allclose(found, own, atol=1e-4)
    blind = ClusterModel(first.config).eval()  # the same weights, images normalised for the first one
    blind.load_state_dict(second.state_dict())
    other = embed(blind, digits)
    other = (other - other.mean(0)) / np.linalg.norm(other - other.mean(0), axis=1).mean()
    assert not np.allclose(found, other, atol=1e-2)


def test_it_is_kept_and_loaded(digits: ImageSet, tmp_path: Path) -> None:
    joined = join([network(0), network(1, n_clusters=3)], digits)
    save_model(joined, tmp_path / "joined")
    again = load_model(tmp_path / "joined")
    np.testing.assert_array_equal(predict(again, digits).probabilities, predict(joined, digits).probabilities)


def test_networks_without_clusters_can_be_joined(digits: ImageSet) -> None:
    joined = join([network(0, n_clusters=0), network(1)], digits)
    assert joined.head is None
    assert embed(joined, digits).shape == (300, joined.width)


def test_methods_take_it(digits: ImageSet) -> None:
    joined = join([network(0), network(1)], digits)
    assert digits.labels is not None
    pairs = Constraints.sample(digits.labels, 60, seed=0)
    before = {name: value.clone() for name, value in joined.state_dict().items()}
    trained = constraintmatch(joined, digits, pairs, pairs_per_step=10, images_per_step=20, settings=CPU).model
    for part in (0, 1):  # both networks learn
        name = f"backbone.parts.{part}.0.weight"
        assert not torch.equal(trained.state_dict()[name], before[name])
    assert torch.equal(trained.state_dict()["backbone.stretch"], before["backbone.stretch"])
    groups = [np.flatnonzero(digits.labels == kind)[:5] for kind in range(10)]
    left = np.concatenate([*(group[:-1] for group in groups), *(np.full(10, group[0]) for group in groups)])
    right = np.concatenate([*(group[1:] for group in groups), *([[other[0] for other in groups]] * 10)])
    kind = digits.labels
    apart = left != right
    link = (kind[left] == kind[right]).astype(float)[apart]
    told = propagate(
        trained, digits, Constraints.from_arrays(left[apart], right[apart], link, n_images=300), settings=CPU
    ).model
    assert told.head is not None
    assert told.head.weight.shape == (10, joined.width)


def test_what_cannot_be_joined_is_told(digits: ImageSet) -> None:
    with pytest.raises(InputError, match="two models or more"):
        join([network(0)], digits)
    with pytest.raises(InputError, match="8 and 12 pixels"):
        join([network(0), network(1, side=12)], digits)
    with pytest.raises(InputError, match="name all its networks at once"):
        join([join([network(0), network(1)], digits), network(2)], digits)
    grey = ImageSet.from_arrays(np.full((20, 8, 8), 7, dtype=np.uint8))
    with pytest.raises(InputError, match="no difference between the images"):
        join([network(0), network(1)], grey)


def test_the_command(tmp_path: Path) -> None:
    for seed in (0, 1):
        save_model(network(seed), tmp_path / str(seed))
    words = ["join", str(tmp_path / "0"), str(tmp_path / "1"), "digits", "--out", str(tmp_path / "joined")]
    done = CliRunner().invoke(app, [*words, "--device", "cpu", "--half"])
    assert done.exit_code == 0, done.output
    assert "tiny+tiny" in done.output
    assert load_model(tmp_path / "joined").config.n_clusters == 10
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
    assert "exists already" in again.output
    alone = CliRunner().invoke(app, [*words[:2], *words[3:-1], str(tmp_path / "other")])
    assert alone.exit_code == 2
    assert "two models or more" in alone.output


# For other programs


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_an_exported_model_predicts_as_ours_for_any_number_of_images(
    name: str, digits: ImageSet, tmp_path: Path
) -> None:
    if name.endswith("onnx"):
        pytest.importorskip("onnxscript", reason="needs the extra onnx")
        onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    model = network(0)
    save_model(model, tmp_path / "model")
    out = tmp_path / name
    done = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    images = digits.images[:7].transpose(0, 3, 1, 2).copy()
    if name.endswith("onnx"):
        given = onnxruntime.InferenceSession(out).run(None, {"images": images})[0]
    else:
        given = torch.export.load(out).module()(torch.from_numpy(images)).detach().numpy()
    np.testing.assert_allclose(given, predict(model, digits.take(np.arange(7))).probabilities, atol=1e-5)


def test_a_model_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    save_model(network(0, n_clusters=0), tmp_path / "model")
    for out, said in (("x.pt", "exported as .onnx or .pt2"), ("x.pt2", "has no clusters yet")):
        done = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--out", str(tmp_path / out)])
        assert done.exit_code == 2
        assert said in done.output
        assert not (tmp_path / out).exists()
