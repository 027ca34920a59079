"""Embeddings in the place of images: sets, views, models, training, questions, and the commands that take them."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_name import run_method
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from typer.testing import CliRunner

from constraintmatch import ConstraintMatch, Constraints, cli
from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.thumbnails import pixel_belief, small_picture
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.evaluation.metrics import accuracy, embed, predict
from constraintmatch.methods import METHODS, ViewChoice
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model, save_model
from constraintmatch.pipeline.config import method_settings
from constraintmatch.pipeline.embedding import embed_images, write_embeddings
from constraintmatch.training import views
from constraintmatch.training.batches import ImageStore
from constraintmatch.training.loop import TrainSettings

pytestmark = pytest.mark.usefixtures("quick_heads_throughout")


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    """400 digits as 20 numbers each, in a scale and around a middle of their own."""
    bundled = load_digits()
    made = PCA(20, random_state=0).fit_transform(bundled.data[:400])
    return ImageSet.from_arrays(7 + 3 * made, labels=bundled.target[:400])


@pytest.fixture(scope="module")
def begun(digits: ImageSet) -> ClusterModel:
    """Linear heads found on the digits."""
    mean, std = digits.moments()
    fresh = build_model(n_clusters=0, side=1, channels=20, mean=mean, std=std)
    return run_method("linear_scan", fresh, digits, arguments={"n_clusters": 10, "n_tries": 4}).model


@pytest.fixture
def photos(tmp_path: Path, stripes: ImageSet) -> Path:
    """The stripes as files in class folders."""
    assert stripes.labels is not None
    for row, label in enumerate(stripes.labels):
        folder = tmp_path / "photos" / "abc"[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(stripes.images[row, ..., 0]).save(folder / f"{row:02d}.png")
    return tmp_path / "photos"


@pytest.fixture
def npz(photos: Path) -> Path:
    """What a network could have made of them: the means of their rows, of their columns and of their checks."""
    images = load_images(photos)
    pixels = images.images[..., 0].astype(np.float32) / 255
    grid = np.indices((8, 8))
    masks = np.stack([grid[0] % 2, grid[1] % 2, grid.sum(0) % 2]).astype(np.float32)
    write_embeddings(photos.with_name("made.npz"), np.einsum("nhw,khw->nk", pixels, masks), images)
    return photos.with_name("made.npz")


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


# Sets


def test_a_table_of_numbers_is_a_set_of_embeddings() -> None:
    given = np.arange(12, dtype=np.float64).reshape(4, 3)
    made = ImageSet.from_arrays(given, labels=["x", "y", "x", "y"])
    assert made.embedded
    assert made.images.shape == (4, 1, 1, 3)
    assert made.images.dtype == np.float32
    assert (made.side, made.channels, made.classes, made.shown) == (1, 3, ("x", "y"), None)
    assert repr(made) == "ImageSet(4 embeddings of 3 numbers, 2 classes)"
    np.testing.assert_array_equal(made.take([2, 0]).images.reshape(2, 3), given[[2, 0]])
    assert not ImageSet.from_arrays(np.zeros((2, 8, 8), np.uint8)).embedded


def test_what_is_no_embedding_is_named() -> None:
    holed = np.zeros((9, 2))
    holed[5, 1] = np.nan
    large = np.zeros((9, 2))
    large[3, 0] = -1e300
    for message, given in {
        "the embedding in row 5 has a number that is NaN": holed,
        "the embedding in row 3 has a number that is too large for 32 bits": large,
        r"shape \(0, 4\): there is none": np.zeros((0, 4)),
        "of type <U1: give numbers": np.array([["a", "b"]]),
        "they have one pixel each; embeddings are given as": np.zeros((4, 1, 1, 3), np.uint8),
    }.items():
        with pytest.raises(InputError, match=message):
            ImageSet.from_arrays(given)


def test_a_large_file_stays_on_the_disk(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.ones((50, 4), np.float32))
    found: Any = load_images(tmp_path / "e.npy").images
    assert not found.flags.writeable
    while found is not None and not isinstance(found, np.memmap):
        found = found.base
    assert found is not None


def test_moments_are_those_of_numpy(digits: ImageSet) -> None:
    flat = digits.images.reshape(len(digits), -1).astype(np.float64)
    mean, spread = digits.moments()
    np.testing.assert_allclose(mean, flat.mean(0), rtol=1e-6)
    np.testing.assert_allclose(spread, np.full(20, np.sqrt(((flat - flat.mean(0)) ** 2).mean())), rtol=1e-6)
    assert ImageSet.from_arrays(np.full((3, 2), 5.0)).moments() == ((5.0, 5.0), (1.0, 1.0))


@pytest.mark.parametrize("factor", [1e-42, 1e-39, 3e37])
def test_embeddings_that_32_bits_cannot_scale_are_refused(digits: ImageSet, factor: float) -> None:
    flat = digits.images.reshape(len(digits), -1).astype(np.float64)
    with pytest.raises(InputError, match=r"a standard deviation of \de[+-]\d+, beyond 32 bits; scale them"):
        ImageSet.from_arrays(flat / np.abs(flat).max() * 10 * factor).moments()


def test_embeddings_find_their_pictures(stripes: ImageSet) -> None:
    numbers = np.arange(60.0)[:, None].repeat(2, 1)
    by_order = ImageSet.from_arrays(numbers).with_pictures(
        ImageSet(stripes.images, tuple(f"{n}.png" for n in range(60)))
    )
    assert by_order.names[3] == "3.png"
    assert by_order.shown is by_order.pictures
    named = ImageSet.from_arrays(numbers[:2], names=["7", "4"]).with_pictures(stripes)
    assert named.pictures is not None
    assert named.labels is not None
    assert stripes.labels is not None
    np.testing.assert_array_equal(named.pictures.images, stripes.images[[7, 4]])
    assert named.labels.tolist() == stripes.labels[[7, 4]].tolist()
    with pytest.raises(InputError, match="there is no picture named 'x'"):
        ImageSet.from_arrays(numbers[:2], names=["x", "4"]).with_pictures(stripes)
    with pytest.raises(InputError, match="59 embeddings without names and 60 pictures"):
        ImageSet.from_arrays(numbers[:59]).with_pictures(ImageSet(stripes.images, tuple(f"{n}.png" for n in range(60))))
    with pytest.raises(InputError, match="pictures go with embeddings"):
        stripes.with_pictures(stripes)


# Views and models


def test_the_strong_view_leaves_numbers_out_and_keeps_the_mean() -> None:
    mean = torch.tensor([1.0, -2.0, 5.0])
    given = torch.tensor([[3.0, -2.5, 5.0]]).repeat(4000, 1)
    view = views.without_numbers(mean.tolist(), share=0.25)
    uniforms = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0))
    seen = view.apply(given[:, :, None, None], uniforms)[:, :, 0, 0]
    left_out = uniforms < 0.25
    expected = torch.where(left_out, mean, mean + (given - mean) / 0.75)
    torch.testing.assert_close(seen, expected)
    torch.testing.assert_close(seen.mean(0), given[0], atol=0.05, rtol=0)
    with pytest.raises(InputError, match=r"share is a share between 0 and 0\.9"):
        views.without_numbers([0.0], share=1.0)


def test_a_model_of_embeddings_is_a_linear_head_on_what_it_was_scaled_to(digits: ImageSet, tmp_path: Path) -> None:
    mean, std = digits.moments()
    model = build_model(n_clusters=4, side=1, channels=20, mean=mean, std=std)
    flat = digits.images.reshape(len(digits), -1)
    scaled = (flat - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(embed(model, digits), scaled, atol=1e-5)
    assert abs(float(embed(model, digits).std()) - 1) < 1e-3
    assert model.head is not None
    weight, bias = (part.detach().double().numpy() for part in (model.head.weight, model.head.bias))
    logits = scaled @ weight.T + bias
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(predict(model, digits).probabilities, expected, atol=1e-5)
    save_model(model, tmp_path / "m")
    np.testing.assert_array_equal(
        predict(load_model(tmp_path / "m"), digits).probabilities, predict(model, digits).probabilities
    )


def test_backbones_and_embeddings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InputError, match="the backbone tiny takes images, not embeddings"):
        build_model(n_clusters=2, side=1, channels=5, backbone="tiny")
    with pytest.raises(InputError, match="the backbone identity is for embeddings"):
        build_model(n_clusters=2, side=8, backbone="identity")


@pytest.mark.parametrize("stage", ["simclr", "byol"])
def test_pretext_tasks_are_refused(digits: ImageSet, stage: str) -> None:
    with pytest.raises(InputError, match="embeddings have no views for a pretext task"):
        METHODS[stage](build_model(n_clusters=0, side=1, channels=20), digits, epochs=1)


# Training


@pytest.mark.parametrize(
    "method", ["constraintmatch", "constrained", "pseudo_label", "supervised", "fully_constrained"]
)
def test_every_method_learns_from_embeddings(digits: ImageSet, begun: ClusterModel, method: str) -> None:
    assert digits.labels is not None
    before = accuracy(digits.labels, predict(begun, digits).clusters)
    by_pairs = method in ("constraintmatch", "constrained", "pseudo_label")
    pairs = Constraints.sample(digits.labels, 3000, seed=0) if by_pairs else None
    settings = method_settings(method, {"steps": 80, "lr": 0.1, "device": "cpu"})
    size = {} if method == "constrained" else {"images_per_step": 100}
    trained = run_method(method, copy.deepcopy(begun), digits, pairs, arguments=size, settings=settings).model
    assert accuracy(digits.labels, predict(trained, digits).clusters) > before + 0.01


def test_views_of_ones_own_are_taken(digits: ImageSet) -> None:
    own = views.plain()
    assert ViewChoice(own_strong=own).strong(digits) is own
    assert ViewChoice().weak(digits).name == ViewChoice().pair(digits).name == "plain"
    assert ViewChoice().strong(digits).name == ViewChoice().scan_strong(digits).name == "without numbers"


def test_the_store_hands_out_the_numbers_of_rows(digits: ImageSet) -> None:
    store = ImageStore(digits, torch.device("cpu"))
    taken = store.take(torch.tensor([5, 2]))
    assert taken.dtype == torch.float32
    assert tuple(taken.shape) == (2, 20, 1, 1)
    np.testing.assert_array_equal(taken[:, :, 0, 0].numpy(), digits.images[[5, 2], 0, 0])


def test_the_estimator_takes_a_table(digits: ImageSet, tmp_path: Path) -> None:
    table: NDArray[np.float32] = digits.images.reshape(len(digits), -1)
    assert digits.labels is not None
    pairs = Constraints.sample(digits.labels[:300], 400, seed=1)
    quick: dict[str, Any] = {"images_per_step": 60, "steps": 60, "options": {"linear_scan": {"n_tries": 8}}}
    model = ConstraintMatch(n_clusters=10, random_state=0, device="cpu", **quick).fit(table[:300], constraints=pairs)
    assert model.n_features_in_ == 20
    assert model.score(table[300:], digits.labels[300:]) > 0.8
    assert model.transform(table[300:]).shape == (100, 20)
    model.save_pretrained(tmp_path / "kept")
    again = ConstraintMatch.from_pretrained(tmp_path / "kept")
    np.testing.assert_array_equal(again.predict(table[300:]), model.predict(table[300:]))
    with pytest.raises(InputError, match="X has 5 features, but ConstraintMatch is expecting 20 features"):
        model.predict(table[:, :5])
    with pytest.raises(InputError, match="takes embeddings of 20 numbers, these are grey images of 8 × 8"):
        model.predict(np.zeros((3, 8, 8), np.uint8))


def test_embeddings_that_are_all_the_same_are_refused() -> None:
    with pytest.raises(InputError, match="every embedding is the same"):
        ConstraintMatch(n_clusters=2, steps=1).fit(np.ones((9, 3)), {"must_link": [(0, 1)]})


def test_a_scale_of_their_own_does_not_matter(digits: ImageSet) -> None:
    assert digits.labels is not None
    pairs = Constraints.sample(digits.labels, 300, seed=1)
    settings, size = TrainSettings(steps=20, lr=0.05, device="cpu"), {"images_per_step": 60}
    found = []
    for factor in (1.0, 1000.0):
        moved = ImageSet.from_arrays(digits.images.reshape(len(digits), -1) * factor - factor)
        mean, std = moved.moments()
        model = build_model(n_clusters=10, side=1, channels=20, mean=mean, std=std)
        found.append(
            predict(run_method("constraintmatch", model, moved, pairs, arguments=size, settings=settings).model, moved)
        )
    np.testing.assert_allclose(found[0].probabilities, found[1].probabilities, atol=1e-3)


# Files and commands


@pytest.mark.usefixtures("quick_heads")
def test_the_commands_go_from_embeddings_to_a_report_with_pictures(npz: Path, photos: Path, tmp_path: Path) -> None:
    pairs, out = tmp_path / "pairs.csv", tmp_path / "run"
    run("sample", npz, "--n", 120, "--out", pairs)
    said = run("train", npz, "--pairs", pairs, "--clusters", 3, "--steps", 60, "--out", out, "--pictures", photos)
    assert "60 embeddings of 3 numbers, 3 clusters, 120 pairs" in said
    assert "ACC 100.0" in said
    assert not (out / "start" / "simclr").exists()
    report = (out / "report.html").read_text()
    assert "embeddings of 3 numbers" in report
    assert report.count("<img") >= 50
    assert "ACC 100.0" in run("evaluate", out, npz)
    run("predict", out, npz, "--out", tmp_path / "c.csv", "--sort-into", tmp_path / "sorted", "--pictures", photos)
    links = sorted((tmp_path / "sorted").glob("*/*.png"))
    assert len(links) == 60
    assert links[0].resolve().is_relative_to(photos.resolve())
    (out / "report.html").unlink()
    run("report", out)  # it remembers the pictures
    assert (out / "report.html").read_text().count("<img") >= 50
    again = tmp_path / "again"
    run("train", "--from-run", out, "--out", again)
    assert (again / "clusters.csv").read_text() == (out / "clusters.csv").read_text()
    assert json.loads((again / "run.json").read_text())["request"]["data"]["pictures"] == str(photos)


@pytest.mark.usefixtures("quick_heads")
def test_without_pictures_a_report_has_names_and_nothing_can_be_sorted(npz: Path, tmp_path: Path) -> None:
    pairs, out = tmp_path / "pairs.csv", tmp_path / "run"
    run("sample", npz, "--n", 120, "--out", pairs)
    run("train", npz, "--pairs", pairs, "--clusters", 3, "--steps", 20, "--out", out)
    report = (out / "report.html").read_text()
    assert 'class="unseen"' in report
    assert "<img" not in report
    said = run("predict", out, npz, "--out", tmp_path / "c.csv", "--sort-into", tmp_path / "sorted", code=2)
    assert "embeddings cannot be looked at: name the folder of their images with --pictures" in said


def test_a_model_and_what_it_does_not_take(npz: Path, photos: Path, tmp_path: Path) -> None:
    save_model(build_model(n_clusters=3, side=1, channels=3), tmp_path / "vectors")
    save_model(build_model(n_clusters=3, side=8, channels=1), tmp_path / "pixels")
    np.save(tmp_path / "wide.npy", np.ones((4, 9), np.float32))
    predicting = ("predict", tmp_path / "vectors")
    assert "the model takes embeddings of 3 numbers; give a .npy or .npz file" in run(*predicting, photos, code=2)
    assert "has embeddings of 9 numbers, the model takes 3" in run(*predicting, tmp_path / "wide.npy", code=2)
    assert "has embeddings of 3 numbers, not images of 8 px" in run("predict", tmp_path / "pixels", npz, code=2)
    both = ("join", tmp_path / "vectors", tmp_path / "vectors", npz, "--out", tmp_path / "joined")
    assert "models of embeddings have no networks to join" in run(*both, code=2)
    words = ("pretrain", npz, "--clusters", 3, "--out", tmp_path / "start")
    assert "embeddings have no views for a pretext task" in run(*words, "--chain", "short", code=2)
    assert "settings of scan, which does not run" in run(*words, "--set", "scan.epochs=5", code=2)
    assert "goes with embeddings" in run("annotate", photos, "--pictures", photos, code=2)
    assert "goes with embeddings" in run("predict", tmp_path / "pixels", "digits", "--pictures", photos, code=2)


@pytest.mark.usefixtures("quick_heads")
def test_a_start_of_embeddings_is_linear_heads(npz: Path, tmp_path: Path) -> None:
    run("pretrain", npz, "--clusters", 3, "--out", tmp_path / "start")
    assert sorted(path.name for path in (tmp_path / "start").iterdir() if path.is_dir()) == ["linear_scan", "model"]
    assert "ACC 100.0" in run("evaluate", tmp_path / "start", npz)


def test_embed_writes_what_the_network_makes_of_images(photos: Path, tmp_path: Path) -> None:
    network = build_model(n_clusters=0, side=8, channels=1, seed=3)
    save_model(network, tmp_path / "m")
    said = run("embed", tmp_path / "m", photos, "--out", tmp_path / "e.npz")
    assert "(60 of 256 numbers)" in said
    made, images = load_images(tmp_path / "e.npz"), load_images(photos)
    assert made.names == images.names
    assert made.classes == ("a", "b", "c")
    np.testing.assert_array_equal(made.labels, images.labels)  # type: ignore[arg-type]
    np.testing.assert_allclose(made.images.reshape(60, -1), embed(network, images), rtol=1e-6)
    assert "takes images of 8 px; leave --side out" in run("embed", tmp_path / "m", photos, "--side", 16, code=2)
    assert "digits has images of 8 px; leave --side out" in run("embed", tmp_path / "m", "digits", "--side", 16, code=2)
    assert "embeddings are written as .npz" in run("embed", tmp_path / "m", photos, "--out", tmp_path / "e.csv", code=2)


def test_embed_takes_a_network_of_timm_at_its_own_size(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm

    real, asked = timm.create_model, []

    def without_fetching(name: str, **options: object) -> object:
        asked.append(options.pop("pretrained"))
        return real(name, pretrained=False, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(timm, "create_model", without_fetching)
    made = embed_images("timm:test_vit", photos, tmp_path / "e.npz", device="cpu")
    assert made.shape == (60, 64)
    assert asked[0] is True
    side = timm.get_pretrained_cfg("test_vit").input_size[-1]
    model = build_model(n_clusters=0, side=side, backbone="timm:test_vit", pretrained=True)
    assert model.config.mean == tuple(timm.get_pretrained_cfg("test_vit").mean)


# Questions


@pytest.mark.usefixtures("quick_heads")
def test_labels_answer_questions_about_embeddings(npz: Path, tmp_path: Path) -> None:
    words = ("loop", npz, "--oracle", "labels", "--questions", 12, "--set", "every=12", "--set", "steps=30")
    assert "ACC 100.0" in run(*words, "--clusters", 3, "--out", tmp_path / "known")
    said = run(*words, "--out", tmp_path / "unknown")
    assert "no --clusters" in said
    assert "(3 clusters)" in said
    assert "(12 of 12)" in run(*words, "--out", tmp_path / "unknown")  # goes on where it was


def test_a_person_needs_pictures(npz: Path, photos: Path, tmp_path: Path) -> None:
    asking = (("loop", npz, "--out", tmp_path / "l"), ("annotate", npz, "--db", tmp_path / "a.db"))
    for words in (*asking, (*asking[0], "--terminal")):
        said = run(*words, *(() if "--terminal" in words else ("--port", 0, "--no-browser")), code=2)
        assert "embeddings cannot be looked at: name the folder of their images with --pictures" in said
    assert not (tmp_path / "l" / "start").exists()
    bare = load_images(npz)
    with pytest.raises(InputError, match="cannot be looked at"):
        small_picture(bare, 0)
    assert small_picture(bare.with_pictures(load_images(photos)), 0)[1] == "image/png"
    belief = pixel_belief(bare)
    np.testing.assert_allclose(np.linalg.norm(belief.features, axis=1), 1, rtol=1e-5)


def test_answers_about_embeddings_are_kept_with_them(npz: Path, photos: Path, tmp_path: Path) -> None:
    pairs, db = tmp_path / "pairs.csv", tmp_path / "a.db"
    pairs.write_text("left,right,link\na/00.png,a/03.png,1\na/00.png,b/01.png,0\n")
    assert "2" in run("annotate", npz, "--pictures", photos, "--db", db, "--import", pairs)
    run("annotate", npz, "--pictures", photos, "--db", db, "--export", tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3
