"""The estimator keeps scikit-learn's contract, takes what people have, and says clearly what it cannot take."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from PIL import Image
from sklearn.base import clone, is_clusterer
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from constraintmatch import ConstraintMatch, Constraints, ImageSet, InputError, load_model
from constraintmatch.models.cluster_model import build_model, save_model
from constraintmatch.pipeline.config import SHORT_STAGES, short_start, training_size
from constraintmatch.training.views import from_function

SHA = "0123456789" * 4  # of a commit on a hub
SMALL = {"pairs_per_step": 10, "images_per_step": 20, "recipe": "paper"}  # which trains on any pairs
QUICK: dict[str, Any] = {"n_clusters": 3, "start": None, "steps": 3, "device": "cpu", "random_state": 0, "flip": False}
QUICK |= {"options": SMALL}

# after three steps a model may still put everything into one cluster: that is what the warning is for
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.usefixtures("narrow_networks"),
]


@pytest.fixture(scope="module")
def pairs(stripes: ImageSet) -> Constraints:
    return Constraints.sample(stripes.labels, 40, seed=0)


@pytest.fixture(scope="module")
def fitted(stripes: ImageSet, pairs: Constraints) -> ConstraintMatch:
    return ConstraintMatch(**QUICK).fit(stripes, pairs)


@pytest.fixture(scope="module")
def good(stripes: ImageSet, pairs: Constraints) -> ConstraintMatch:
    """One real training: the short self-supervised start and enough steps to find the stripes."""
    stages = {"simclr": {"epochs": 5}, "linear_scan": {"n_tries": 4}, "scan": {"epochs": 10, "lr": 3e-3}}
    options = {**stages, "self_label": {"epochs": 1}, "lr": 0.03}
    return ConstraintMatch(**QUICK | {"start": "self-supervised", "steps": 10, "options": options}).fit(stripes, pairs)


# What it learns


def test_it_finds_the_classes_of_easy_images(good: ConstraintMatch, stripes: ImageSet) -> None:
    assert good.score(stripes) > 0.9


def test_images_it_has_not_seen_are_placed_too(good: ConstraintMatch, stripes: ImageSet) -> None:
    rng = np.random.default_rng(7)
    moved = stripes.images.astype(np.int64) + rng.integers(-20, 21, stripes.images.shape)
    fresh = np.clip(moved, 0, 255).astype(np.uint8)[:30]
    assert good.score(fresh, stripes.labels[:30]) > 0.9


def test_labels_are_the_predictions_on_the_training_images(fitted: ConstraintMatch, stripes: ImageSet) -> None:
    np.testing.assert_array_equal(fitted.labels_, fitted.predict(stripes))
    assert fitted.labels_.dtype == np.int64


def test_fit_predict_and_fit_transform_are_fit_and_then_the_other(
    fitted: ConstraintMatch, stripes: ImageSet, pairs: Constraints
) -> None:
    np.testing.assert_array_equal(ConstraintMatch(**QUICK).fit_predict(stripes, pairs), fitted.labels_)
    features = ConstraintMatch(**QUICK).fit_transform(stripes, pairs)
    np.testing.assert_array_equal(features, fitted.transform(stripes))


def test_probabilities_are_rows_that_sum_to_one_and_name_the_cluster(
    fitted: ConstraintMatch, stripes: ImageSet
) -> None:
    probabilities = fitted.predict_proba(stripes)
    assert probabilities.shape == (60, 3)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(probabilities.argmax(1), fitted.predict(stripes))


def test_transform_gives_the_features_under_the_head(fitted: ConstraintMatch, stripes: ImageSet) -> None:
    features = fitted.transform(stripes)
    assert features.shape == (60, fitted.model_.width)
    head = fitted.model_.head
    assert head is not None
    logits = features @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    np.testing.assert_array_equal(logits.argmax(1), fitted.predict(stripes))


def test_score_takes_labels_as_numbers_words_or_from_the_set(good: ConstraintMatch, stripes: ImageSet) -> None:
    words = np.array(["rows", "columns", "checks"])[stripes.labels]
    assert good.score(stripes) == good.score(stripes.images, stripes.labels) == good.score(stripes.images, words)


def test_every_method_for_clusters_can_be_named(stripes: ImageSet, pairs: Constraints) -> None:
    by_pairs, by_images = ({name: SMALL[name]} for name in ("pairs_per_step", "images_per_step"))
    for method, given, options in (
        ("constrained", pairs, by_pairs),
        ("pseudo_label", pairs, SMALL),
        ("supervised", None, by_images),
        ("fully_constrained", None, by_images),
    ):
        made = ConstraintMatch(**QUICK | {"method": method, "options": options}).fit(stripes, given)
        assert made.labels_.shape == (60,)
        assert made.model_.config.trained[-1]["method"] == method


def test_one_cluster_for_everything_is_a_warning(stripes: ImageSet, pairs: Constraints) -> None:
    start = build_model(n_clusters=3, side=8, channels=1)
    assert start.head is not None
    with torch.no_grad():
        start.head.bias.copy_(torch.tensor([50.0, 0.0, 0.0]))
    with pytest.warns(ConvergenceWarning, match="Cluster 0 holds 60 of 60 images"):
        ConstraintMatch(**QUICK | {"start": start, "steps": 1}).fit(stripes, pairs)


# The contract


def test_a_clone_has_the_same_parameters_and_is_not_fitted(fitted: ConstraintMatch) -> None:
    twin = clone(fitted)
    assert twin.get_params() == fitted.get_params()
    assert not hasattr(twin, "model_")


def test_parameters_are_kept_as_they_were_given() -> None:
    options, without = {"lr": 0.1}, ["rotate"]
    made = ConstraintMatch(5, options=options, without=without, random_state=3)
    assert made.options is options
    assert made.without is without
    assert made.get_params()["random_state"] == 3
    assert made.set_params(n_clusters=7, options=None).n_clusters == 7
    assert made.options is None
    with pytest.raises(ValueError, match="Invalid parameter"):
        made.set_params(colour="red")


def test_fitting_leaves_the_parameters_alone(stripes: ImageSet, pairs: Constraints) -> None:
    options = {"lr": 0.02, "max_entropy": 0.3, "simclr": {"epochs": 2}}
    made = ConstraintMatch(**QUICK | {"options": options, "without": ["rotate"]})
    before = made.get_params()
    made.fit(stripes, pairs)
    assert made.get_params() == before
    assert options == {"lr": 0.02, "max_entropy": 0.3, "simclr": {"epochs": 2}}


def test_what_fit_learns_ends_with_an_underscore(fitted: ConstraintMatch) -> None:
    learned = vars(fitted).keys() - fitted.get_params().keys()
    assert learned == {"gallery_", "labels_", "log_", "model_", "n_features_in_", "n_iter_", "seed_"}
    assert (fitted.n_features_in_, fitted.n_iter_, fitted.seed_) == (64, 3, 0)


def test_the_repr_names_what_differs_from_the_defaults() -> None:
    assert repr(ConstraintMatch(n_clusters=4, flip=False)) == "ConstraintMatch(flip=False, n_clusters=4)"


def test_it_is_a_clusterer_that_fits_into_a_pipeline(stripes: ImageSet, pairs: Constraints) -> None:
    line = make_pipeline(FunctionTransformer(lambda images: 255 - images), ConstraintMatch(**QUICK))
    assert is_clusterer(line)
    assert line.fit(stripes.images, pairs).predict(stripes.images).shape == (60,)


@pytest.mark.parametrize("name", ["predict", "predict_proba", "transform", "score", "save_pretrained"])
def test_nothing_can_be_asked_before_fit(name: str, stripes: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        getattr(ConstraintMatch(3), name)(tmp_path / "model" if name == "save_pretrained" else stripes)


def test_equal_seeds_give_equal_models(fitted: ConstraintMatch, stripes: ImageSet, pairs: Constraints) -> None:
    again = ConstraintMatch(**QUICK).fit(stripes, pairs)
    np.testing.assert_array_equal(again.predict_proba(stripes), fitted.predict_proba(stripes))
    other = ConstraintMatch(**QUICK | {"random_state": 1}).fit(stripes, pairs)
    assert not np.array_equal(other.predict_proba(stripes), fitted.predict_proba(stripes))


@pytest.mark.usefixtures("quick_heads")
def test_the_whole_start_depends_on_the_seed_alone(stripes: ImageSet, pairs: Constraints) -> None:
    heads = {"linear_scan": {"n_tries": 2}}
    stages = {"simclr": {"epochs": 1}, **heads, "scan": {"epochs": 1}, "self_label": {"epochs": 1}}
    changes = {"start": "self-supervised", "options": {**stages, **SMALL}, "steps": 1}
    first, second = (ConstraintMatch(**QUICK | changes).fit(stripes, pairs).transform(stripes) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_random_state_is_drawn_from_and_the_seed_is_kept(stripes: ImageSet, pairs: Constraints) -> None:
    seeds = {}
    for name, state in {"RandomState": np.random.RandomState(5), "Generator": np.random.default_rng(5)}.items():
        made = [ConstraintMatch(**QUICK | {"random_state": state, "steps": 1}).fit(stripes, pairs) for _ in range(2)]
        seeds[name] = [one.seed_ for one in made]
        assert seeds[name][0] != seeds[name][1]
    assert seeds["RandomState"][0] == np.random.RandomState(5).randint(2**31 - 1)


def test_without_a_random_state_the_kept_seed_repeats_the_fit(stripes: ImageSet, pairs: Constraints) -> None:
    made = ConstraintMatch(**QUICK | {"random_state": None, "steps": 1}).fit(stripes, pairs)
    again = ConstraintMatch(**QUICK | {"random_state": made.seed_, "steps": 1}).fit(stripes, pairs)
    np.testing.assert_array_equal(made.predict_proba(stripes), again.predict_proba(stripes))


# Starts


def test_a_model_given_as_start_is_used_and_left_as_it_was(stripes: ImageSet, pairs: Constraints) -> None:
    start = build_model(n_clusters=3, side=8, channels=1, seed=4)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    made = ConstraintMatch(**QUICK | {"start": start, "steps": 1, "options": {"lr": 1e-9}}).fit(stripes, pairs)
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())
    for name, value in made.model_.backbone.named_parameters():  # the pairs may teach the head, whatever the rate
        torch.testing.assert_close(value, before[f"backbone.{name}"])


@pytest.mark.usefixtures("quick_heads")
def test_a_start_without_clusters_takes_the_place_of_simclr(
    stripes: ImageSet, pairs: Constraints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(build_model(n_clusters=0, side=8, channels=1, seed=4), tmp_path / "backbone")
    stages = {"scan": {"epochs": 1, "n_tries": 2}, "self_label": {"epochs": 1}, **SMALL}
    changes = {"start": tmp_path / "backbone", "options": stages, "verbose": True}
    made = ConstraintMatch(**QUICK | changes).fit(stripes, pairs)
    assert made.predict_proba(stripes).shape == (60, 3)
    said = capsys.readouterr().err
    assert "scan: " in said
    assert "simclr" not in said


def test_the_clusters_of_a_start_need_not_be_counted(stripes: ImageSet, pairs: Constraints) -> None:
    start = build_model(n_clusters=5, side=8, channels=1)
    made = ConstraintMatch(**QUICK | {"n_clusters": None, "start": start, "steps": 1}).fit(stripes, pairs)
    assert made.predict_proba(stripes).shape == (60, 5)


def test_a_start_that_does_not_fit_is_refused(stripes: ImageSet, pairs: Constraints, tmp_path: Path) -> None:
    cases = {
        "no such model or run folder": {"start": str(tmp_path / "nothing")},
        "takes grey images of 16 × 16": {"start": build_model(n_clusters=3, side=16, channels=1)},
        "the start has 5 clusters, n_clusters is 3": {"start": build_model(n_clusters=5, side=8, channels=1)},
        "leave one out": {"start": build_model(n_clusters=3, side=8, channels=1), "backbone": "resnet18"},
    }
    for message, changes in cases.items():
        with pytest.raises(InputError, match=message):
            ConstraintMatch(**QUICK | changes).fit(stripes, pairs)


# Images as people have them


def test_a_folder_is_read_at_the_size_of_the_model(fitted: ConstraintMatch, stripes: ImageSet, tmp_path: Path) -> None:
    for row in range(4):
        Image.fromarray(stripes.images[row, ..., 0]).resize((16, 16), Image.Resampling.NEAREST).save(
            tmp_path / f"{row}.png"
        )
    assert fitted.predict(tmp_path).shape == (4,)
    assert fitted.predict(str(tmp_path)).shape == (4,)


def test_arrays_with_and_without_a_channel_axis_are_the_same_images(fitted: ConstraintMatch, stripes: ImageSet) -> None:
    flat = stripes.images[..., 0]
    np.testing.assert_array_equal(fitted.predict_proba(flat), fitted.predict_proba(stripes))
    np.testing.assert_array_equal(fitted.predict_proba(flat / 255.0), fitted.predict_proba(stripes))


# What cannot be


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.eye(60)[:, :3], r"y has the shape \(60, 3\)"),
        (1, r"y has the shape \(\)"),
        ([float("nan")] + [0.0] * 59, "image 0 has no label in y"),
        (["a"] * 59 + [None], "image 59 has no label in y"),
    ],
)
def test_labels_that_are_none_are_refused(y: Any, message: str, fitted: ConstraintMatch, stripes: ImageSet) -> None:
    with pytest.raises(InputError, match=message):
        fitted.score(stripes.images, y)


def test_a_column_of_labels_scores_as_the_labels_do(fitted: ConstraintMatch, stripes: ImageSet) -> None:
    assert stripes.labels is not None
    wanted = fitted.score(stripes.images, stripes.labels)
    assert fitted.score(stripes.images, stripes.labels[:, None]) == wanted
    assert fitted.score(stripes.images, np.array([f"kind {label}" for label in stripes.labels], object)) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_clusters": 1}, "n_clusters is 1; it must be a whole number, 2 or more"),
        ({"n_clusters": 2.5}, "whole number"),
        ({"n_clusters": None}, "n_clusters is None; it must be"),
        ({"n_clusters": 61}, "n_clusters is 61 and X has 60 samples; ask for fewer"),
        ({"method": "magic"}, "unknown method 'magic'; known are propagate, constrained"),
        ({"method": "simclr"}, "unknown method 'simclr'"),
        ({"backbone": "resnet99"}, "unknown backbone 'resnet99'"),
        ({"without": ["spin"]}, "spin"),
        ({"without": "spin"}, "spin"),
        ({"device": "abacus"}, "abacus"),
        ({"random_state": -1}, "random_state is -1"),
        ({"random_state": "x"}, "random_state is 'x'"),
        ({"steps": 0}, "steps is 0"),
        (
            {"options": {"learning_rate": 1}},
            "constraintmatch has no option 'learning_rate'; it has .*max_entropy",
        ),
        ({"options": {"seed": 1}}, "'seed' has a parameter of its own, random_state"),
        ({"options": {"simclr": {"n_clusters": 3}}}, "simclr knows no 'n_clusters'"),
        ({"method": "constrained", "options": None, "max_entropy": 0.1}, "constrained has no option 'max_entropy'"),
        ({"options": {"lr": 0.1}, "lr": 0.2}, "lr is given twice, as a parameter and in options"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": "a"}, "lr is 'a'; it must be a number"),
        ({"recipe": "bold", "options": None}, "unknown recipe 'bold'; known are safe, paper"),
        ({"error_rate": 1.5}, "error_rate"),
        ({"options": {"lr": -1.0}}, "lr is -1.0"),
        ({"options": {"lr": "a"}}, "lr is 'a'; it must be a number"),
        ({"options": {"pseudo_weight": "x"}}, "pseudo_weight is 'x'; it must be a number"),
        ({"options": {"max_entropy": None}}, "max_entropy is None; it must be a number"),
        ({"options": {"pairs_per_step": 2.5}}, "pairs_per_step is 2.5; it must be a whole number"),
        ({"options": {"simclr": 3}}, "simclr is 3; give a dictionary"),
        ({"options": "lr"}, "options is 'lr'; give a dictionary"),
        ({"options": {"own_strong": 3}}, "own_strong is 3; make a view"),
        ({"start": 3}, "start is 3; give a model"),
        ({"without": 3}, "without is 3; name the operations"),
        ({"steps": 2.5}, "steps is 2.5; it must be a whole number"),
    ],
)
def test_a_parameter_that_cannot_be_is_an_input_error(
    changes: dict[str, Any], message: str, stripes: ImageSet, pairs: Constraints
) -> None:
    with pytest.raises(InputError, match=message):
        ConstraintMatch(**QUICK | changes).fit(stripes, pairs)


def test_no_constraints_or_those_of_other_images_are_refused(stripes: ImageSet) -> None:
    with pytest.raises(InputError, match=r"none; give some: fit\(X, constraints=pairs\)$"):
        ConstraintMatch(**QUICK).fit(stripes)
    for given in (None, Constraints.from_lists(n_images=60), {}):
        with pytest.raises(InputError, match="needs constraints and there are none"):
            ConstraintMatch(**QUICK).fit(stripes, given)
    with pytest.raises(InputError, match="over 50 images, the set has 60"):
        ConstraintMatch(**QUICK).fit(stripes, Constraints.from_lists(n_images=50, must_link=[(0, 1)]))


def test_mistakes_are_found_before_the_long_start(
    stripes: ImageSet, pairs: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the start was made")

    monkeypatch.setattr("constraintmatch.pipeline.train.pretrain", never)
    slow = QUICK | {"start": "self-supervised"}
    for changes in ({"options": {"nonsense": 1}}, {"without": ["spin"]}, {"steps": 0}, {"method": "magic"}):
        with pytest.raises(InputError):
            ConstraintMatch(**slow | changes).fit(stripes, pairs)
    with pytest.raises(InputError):
        ConstraintMatch(**slow).fit(stripes, None)
    with pytest.raises(AssertionError, match="the start was made"):
        ConstraintMatch(**slow).fit(stripes, pairs)


def test_images_of_another_size_are_refused_when_asked_for_clusters(fitted: ConstraintMatch) -> None:
    with pytest.raises(InputError, match="takes grey images of 8 × 8"):
        fitted.predict(np.zeros((2, 16, 16), np.uint8))


def test_score_without_labels_says_what_is_missing(fitted: ConstraintMatch, stripes: ImageSet) -> None:
    with pytest.raises(InputError, match="score needs the labels"):
        fitted.score(stripes.images)
    with pytest.raises(InputError, match="give one label for each image"):
        fitted.score(stripes.images, [0, 1])


# Options


def test_options_reach_the_method_the_settings_and_the_views(stripes: ImageSet, pairs: Constraints) -> None:
    seen = []

    def black(images: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        seen.append(len(images))
        return torch.zeros_like(images)

    options = {
        "recipe": "paper",
        "images_per_step": 17,
        "lr": 0.5,
        "log_every": 1,
        "own_strong": from_function("black", black),
    }
    made = ConstraintMatch(**QUICK | {"options": options}).fit(stripes, pairs)
    assert set(seen) == {17}
    training = [entry for entry in made.log_ if entry["kind"] == "training"]
    assert [entry["step"] for entry in training] == [1, 2, 3]
    assert training[0]["lr"] == 0.5
    assert made.model_.config.trained[-1]["arguments"]["images_per_step"] == 17


def test_batches_steps_and_rate_suit_the_size_of_the_set() -> None:
    def plan(n: int, **changes: Any) -> Any:
        pixels = np.broadcast_to(np.uint8(0), (n, 8, 8, 1))
        return ConstraintMatch(10, **changes)._configuration(None, ImageSet(pixels, tuple(map(str, range(n)))), 10, 0)

    sizes = training_size(1_200, cpu=True)
    small = plan(1_200, device="cpu")
    own = {name: sizes[name] for name in ("images_per_step", "pairs_per_step", "warm_up")}
    assert {name: small.arguments[name] for name in ("recipe", *own)} == {"recipe": "safe", **own}
    assert (small.settings.steps, small.settings.lr) == (sizes["steps"], sizes["lr"])
    assert (small.stages, small.stage_options) == (SHORT_STAGES, short_start(1_200, cpu=True))
    asked = plan(1_200, steps=7, lr=0.5, images_per_step=9, options={"scan": {"lr": 0.1, "epochs": 2}})
    assert (asked.settings.steps, asked.settings.lr, asked.arguments["images_per_step"]) == (7, 0.5, 9)
    assert asked.stage_options["scan"] == {"lr": 0.1, "epochs": 2}
    assert plan(1_200, recipe="paper").arguments["recipe"] == "paper"
    assert {training_size(n, cpu=cpu)["lr"] for n in (60, 50_000) for cpu in (False, True)} == {0.01}


def test_pairs_that_can_teach_nothing_safely_leave_the_start_as_it_was(stripes: ImageSet) -> None:
    start = build_model(n_clusters=3, side=8, channels=1, seed=4)
    must = Constraints.from_lists(n_images=60, must_link=[(i, i + 3) for i in range(57)])
    options = {name: value for name, value in SMALL.items() if name != "recipe"}
    made = ConstraintMatch(**QUICK | {"start": start, "options": options}).fit(stripes, must)
    for name, value in made.model_.state_dict().items():
        assert torch.equal(value, start.state_dict()[name])
    assert made.log_[-1]["kept"] == "the start"
    assert "to judge a training" in made.log_[-1]["why"]


def test_verbose_shows_progress_and_quiet_shows_none(
    stripes: ImageSet, pairs: Constraints, capsys: pytest.CaptureFixture[str]
) -> None:
    ConstraintMatch(**QUICK).fit(stripes, pairs)
    assert capsys.readouterr() == ("", "")
    ConstraintMatch(**QUICK | {"verbose": True}).fit(stripes, pairs)
    assert "constraintmatch" in capsys.readouterr().err


# Keeping


def test_a_saved_model_predicts_the_same_and_holds_no_pickle(
    fitted: ConstraintMatch, stripes: ImageSet, tmp_path: Path
) -> None:
    fitted.save_pretrained(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    again = ConstraintMatch.from_pretrained(tmp_path / "model", device="cpu")
    np.testing.assert_array_equal(again.predict_proba(stripes), fitted.predict_proba(stripes))
    assert again.n_clusters == 3
    assert load_model(tmp_path / "model").config.trained[-1]["seed"] == 0


def test_a_loaded_model_can_be_trained_on(
    fitted: ConstraintMatch, stripes: ImageSet, pairs: Constraints, tmp_path: Path
) -> None:
    fitted.save_pretrained(tmp_path)
    made = ConstraintMatch(**QUICK | {"start": str(tmp_path)}).fit(stripes, pairs)
    assert [stage["method"] for stage in made.model_.config.trained] == ["constraintmatch"] * 2


def test_a_name_that_is_no_folder_is_asked_of_the_hub(
    fitted: ConstraintMatch, stripes: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted.save_pretrained(tmp_path / "snapshot")
    asked = []

    def download(name: str, **how: Any) -> str:
        asked.append((name, how["revision"], how["allow_patterns"]))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    again = ConstraintMatch.from_pretrained("somebody/stripes", device="cpu", revision="v1")
    np.testing.assert_array_equal(again.predict(stripes), fitted.labels_)
    assert asked == [("somebody/stripes", "v1", ["config.json", "model.safetensors"])]


def test_a_model_that_is_nowhere_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError("404: no\nsuch repository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(InputError, match=r"nobody/nothing: no such folder, and .* \(404: no such repository\)"):
        ConstraintMatch.from_pretrained("nobody/nothing")
    with pytest.raises(InputError, match="no such model or run folder"):
        ConstraintMatch.from_pretrained(tmp_path / "nothing")
    save_model(build_model(n_clusters=0, side=8, channels=1), tmp_path / "headless")
    with pytest.raises(InputError, match="no clusters yet"):
        ConstraintMatch.from_pretrained(tmp_path / "headless", device="cpu")


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as it takes to keep a model and to give it back."""

    files: dict[str, bytes] = {}  # noqa: RUF012 (the server makes an instance for each request)
    private = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        place = f"http://{self.headers['Host']}/somebody/stripes"
        if self.headers["Authorization"] != "Bearer hf_token":
            return self.give(b'{"error": "who are you?"}', 401)
        if self.path == "/api/repos/create":
            made = json.loads(body)
            Hub.private = made.get("private") or made.get("visibility") == "private"
            return self.give(json.dumps({"url": place}).encode())
        if self.path.endswith("/preupload/main"):
            found = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self.give(json.dumps({"files": found}).encode())
        if self.path == "/api/validate-yaml":
            return self.give(b'{"errors": [], "warnings": []}')
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                Hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.give(json.dumps({"commitUrl": f"{place}/commit/{SHA}", "commitOid": SHA}).encode())

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if "/tree/" in self.path:
            known = [{"type": "file", "path": one, "size": len(Hub.files[one]), "oid": SHA} for one in Hub.files]
            return self.give(json.dumps(known).encode())
        if self.path.startswith("/api/"):
            known = [{"rfilename": one} for one in Hub.files]
            return self.give(json.dumps({"id": "somebody/stripes", "sha": SHA, "siblings": known}).encode())
        return self.give(Hub.files.get(name, b""), 200 if name in Hub.files else 404)

    do_HEAD = do_GET

    def give(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        etag = f'"{hashlib.sha1(body).hexdigest()}"'
        for name, value in {"Content-Length": str(len(body)), "ETag": etag, "X-Repo-Commit": SHA}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_a_model_goes_to_the_hub_with_a_card_and_comes_back(
    fitted: ConstraintMatch, stripes: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    known: dict[str, Any] = {"ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_DISABLE_XET": True}
    known["HUGGINGFACE_CO_URL_TEMPLATE"] = address + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in known.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    assert fitted.push_to_hub("somebody/stripes") == f"{address}/somebody/stripes"
    assert Hub.private
    assert sorted(Hub.files) == ["README.md", "config.json", "model.safetensors"]
    card = Hub.files["README.md"].decode()
    assert 'ConstraintMatch.from_pretrained("somebody/stripes")' in card
    assert "in 3 clusters" in card
    again = ConstraintMatch.from_pretrained("somebody/stripes", device="cpu")
    np.testing.assert_array_equal(again.predict(stripes), fitted.labels_)
    monkeypatch.setenv("HF_TOKEN", "another")
    with pytest.raises(InputError, match=r"somebody/stripes: the hub refused it \(.*\); log in with hf auth login"):
        fitted.push_to_hub("somebody/stripes")
    server.shutdown()
    server.server_close()


# In a notebook


def test_a_notebook_shows_the_clusters_of_a_fitted_estimator(good: ConstraintMatch) -> None:
    shown = good._repr_mimebundle_()["text/html"]
    sizes = np.bincount(good.labels_)
    assert shown.count("<img ") == np.minimum(sizes, 12).sum()
    assert all(f"· {size} images</div>" in shown for size in sizes if size > 1)
    assert good._repr_html_().count("<img ") == shown.count("<img ")
    assert "<img" not in ConstraintMatch(3)._repr_mimebundle_()["text/html"]
    with sklearn.config_context(display="text"):
        assert "text/html" not in good._repr_mimebundle_()


def test_a_file_of_triplets_is_enough_to_fit(tmp_path: Path) -> None:
    numbers = (4 * np.eye(3)[np.arange(90) % 3] + np.random.default_rng(0).normal(size=(90, 3))).astype(np.float32)
    path = tmp_path / "triplets.csv"
    path.write_text("anchor,near,far\n" + "".join(f"{i},{(i + 3) % 90},{(i + 4) % 90}\n" for i in range(90)))
    model = ConstraintMatch(n_clusters=3, recipe="paper", steps=20, device="cpu", random_state=0).fit(
        numbers, str(path)
    )
    assert len(np.unique(model.labels_)) == 3
