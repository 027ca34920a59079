import copy
import inspect
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import nearest_neighbours, predict, scores
from constraintmatch.methods import METHODS, Trained, ViewChoice, preparation
from constraintmatch.methods.pair_training import _draw_two, choose_selection
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_projection
from constraintmatch.training import views as view_functions
from constraintmatch.training.loop import TrainSettings
from constraintmatch.training.losses import all_pairs_loss, informative, pair_loss, soft_links

pytestmark = pytest.mark.usefixtures("narrow_networks", "quick_heads_throughout")

QUICK = TrainSettings(steps=6, device="cpu", log_every=2, lr=0.05)
SHORT = replace(QUICK, steps=3, log_every=1)
PAIR_METHODS = ("constrained", "pseudo_label", "constraintmatch")
EXPECTING: tuple[dict[str, float], ...] = ({}, {"pseudo_error_rate": 0.2}, {"pseudo_error_rate": 0.0})
UNWEIGHTED = Constraints.from_arrays([0, 1], [2, 3], [1, 0], n_images=60, weight=[0, 0])


def model(n_clusters: int = 3) -> ClusterModel:
    return build_model(n_clusters=n_clusters, side=8, channels=1, seed=1)


def pairs(images: ImageSet, n: int = 40, seed: int = 0) -> Constraints:
    assert images.labels is not None
    return Constraints.sample(images.labels, n, seed=seed)


def run(name: str, images: ImageSet, **arguments: object) -> Trained:
    given = {"constraints": pairs(images)} if "constraints" in inspect.signature(METHODS[name]).parameters else {}
    batch = {"pairs_per_step": 10} if name in PAIR_METHODS else {}
    return METHODS[name](model(), images, **{**given, **batch, "settings": QUICK, **arguments})


STAGES: dict[str, dict[str, object]] = {
    "simclr": {},
    "byol": {"hidden": 16, "projection": 8},
    "cc": {"n_clusters": 3},
    "scan": {"n_clusters": 3, "n_neighbours": 5, "n_tries": 0},
    "self_label": {"min_confidence": 0.34},
    "neighbour_label": {"n_neighbours": 5},
}


@pytest.mark.parametrize("name", STAGES)
def test_views_are_compiled_where_the_network_is(stripes: ImageSet, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether to compile depends on the steps; in a stage of epochs the settings do not have them."""
    asked: list[int] = []
    resolve = TrainSettings.resolve

    def noting(self: TrainSettings, device: torch.device) -> TrainSettings:
        asked.append(self.steps)
        return resolve(self, device)

    monkeypatch.setattr(TrainSettings, "resolve", noting)
    run(name, stripes, epochs=3, images_per_step=25, **STAGES[name])
    assert len(asked) == 2  # for the views, and for the network
    assert set(asked) == {3 * (len(stripes) // 25)}


@pytest.mark.parametrize("name", PAIR_METHODS)
def test_pair_methods_log_their_terms(stripes: ImageSet, name: str) -> None:
    more = {} if name == "constrained" else {"images_per_step": 20}
    log = run(name, stripes, **more).log
    training = [entry for entry in log if entry["kind"] == "training"]
    assert [entry["step"] for entry in training] == [2, 4, 6]
    assert ("loss_pseudo" in training[0]) == (name != "constrained")
    assert ("pseudo_constraint_precision" in training[-1]) or name == "constrained" or training[-1]["selected"] == 0
    assert {"acc", "nmi", "ari"} <= log[-1].keys()


@pytest.mark.parametrize("name", ["constraintmatch", "pseudo_label", "scan"])
def test_a_joint_pass_trains_as_separate_ones_do(stripes: ImageSet, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {
        "constraintmatch": {"max_entropy": 0.99},
        "pseudo_label": {"min_confidence": 0.4},
        "scan": {"n_clusters": 3},
    }
    arguments = {"images_per_step": 20, **more[name], **({"epochs": 1, "n_tries": 0} if name == "scan" else {})}
    sizes = []

    def watched(function: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        """In the compiler's place: what would be compiled goes through in one pass, and its batches are noted."""

        def call(*inputs: Tensor) -> Tensor:
            sizes.append(len(inputs[0]))
            return function(*inputs)

        return call if isinstance(function, nn.Module) else function

    monkeypatch.setattr(torch, "compile", watched)
    separate, together = (
        run(name, stripes, settings=replace(SHORT, compile=joint), **arguments) for joint in (False, True)
    )
    assert max(sizes) == 40
    losses = [[entry["loss"] for entry in one.log if entry["kind"] == "training"] for one in (separate, together)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    found = together.model.state_dict()
    for key, value in separate.model.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


def test_the_first_step_is_the_papers_equation(stripes: ImageSet) -> None:
    """ConstraintMatch's logged terms equal the equations written out on the same views."""
    choice = ViewChoice(own_weak=view_functions.plain(), own_strong=view_functions.plain())
    settings = replace(QUICK, steps=1, log_every=1)
    start = model()
    network = copy.deepcopy(start).train()
    constraints = pairs(stripes, 10)
    log = METHODS["constraintmatch"](
        start,
        stripes,
        constraints,
        pseudo_weight=0.5,
        max_entropy=0.99,
        pairs_per_step=10,
        images_per_step=60,
        settings=settings,
        views=choice,
    ).log
    pixels = torch.from_numpy(stripes.images.copy()).permute(0, 3, 1, 2)
    both = torch.cat((pixels[constraints.left.tolist()], pixels[constraints.right.tolist()]))
    left, right = network(both).softmax(-1).chunk(2)
    expected = pair_loss(left, right, torch.from_numpy(constraints.link.copy()))
    guess = network(pixels).softmax(-1)  # all 60 images: their order changes neither BatchNorm nor the mean over pairs
    pseudo = 0.5 * all_pairs_loss(guess, soft_links(guess), informative(guess, 0.99))
    assert log[0]["loss_constrained"] == pytest.approx(expected.item(), rel=1e-4)
    assert log[0]["loss_pseudo"] == pytest.approx(pseudo.item(), rel=1e-4)


LOOSE: dict[str, object] = {"images_per_step": 20, "max_entropy": 0.999, "settings": SHORT}


@pytest.fixture(scope="module")
def plain(stripes: ImageSet) -> Trained:
    return run("constraintmatch", stripes, **LOOSE)


@pytest.mark.parametrize(
    "change",
    [
        {"links": "hard", "hard_threshold": 0.4},
        {"selection": "confidence", "min_confidence": 0.4},
        {"flip_fraction": 0.5},
        {"flip_fraction": 0.5, "flip_between": "any"},
        {"error_rate": 0.1},
        {"pseudo_error_rate": 0.1},
        {"pseudo_weight": 0.1},
        {"warm_up": 0.5},
    ],
)
def test_each_argument_of_constraintmatch_changes_the_training(
    stripes: ImageSet, plain: Trained, change: dict[str, object]
) -> None:
    other = run("constraintmatch", stripes, **{**LOOSE, **change})
    assert not torch.equal(plain.model.head.weight, other.model.head.weight)
    assert all(np.isfinite(entry["loss"]) for entry in other.log if entry["kind"] == "training")


def test_pseudo_constraints_expect_as_many_errors_as_the_pairs_unless_told(stripes: ImageSet) -> None:
    noisy = {**LOOSE, "error_rate": 0.2}
    both, same, other = (run("constraintmatch", stripes, **noisy, **more).model.head.weight for more in EXPECTING)
    assert torch.equal(both, same)
    assert not torch.equal(both, other)


def test_any_two_clusters_are_different_ones_and_all_of_them_come_up() -> None:
    two = _draw_two(4, 500, torch.Generator().manual_seed(0))
    assert (two[:, 0] != two[:, 1]).all()
    assert {tuple(pair) for pair in two.tolist()} == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert _draw_two(1, 3, torch.Generator()).tolist() == [[0, 0]] * 3


def test_a_warm_up_brings_the_pseudo_loss_in_slowly(stripes: ImageSet) -> None:
    every = replace(QUICK, log_every=1, steps=4, lr=1e-9)
    plain, rising = (
        run("constraintmatch", stripes, images_per_step=20, max_entropy=0.999, warm_up=share, settings=every).log
        for share in (0.0, 0.75)
    )
    shares = [new["loss_pseudo"] / old["loss_pseudo"] for old, new in zip(plain[:-1], rising[:-1], strict=True)]
    assert shares == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=1e-3)
    with pytest.raises(InputError, match="warm_up is 2"):
        run("constraintmatch", stripes, warm_up=2)


def test_without_selected_images_constraintmatch_trains_on_pairs_alone(stripes: ImageSet) -> None:
    log = run("constraintmatch", stripes, images_per_step=20, max_entropy=0.0).log
    assert [entry["loss_pseudo"] for entry in log if entry["kind"] == "training"] == [0.0, 0.0, 0.0]
    assert log[-2]["selected"] == 0


@pytest.fixture(scope="module")
def taught(stripes: ImageSet) -> ClusterModel:
    settings = replace(QUICK, steps=30, lr=0.1, log_every=30)
    return run("constrained", stripes, settings=settings, pairs_per_step=15, constraints=pairs(stripes, 60)).model


def test_pairs_teach_the_classes(stripes: ImageSet, taught: ClusterModel) -> None:
    assert scores(stripes.labels, predict(taught, stripes))["acc"] > 0.9


@pytest.mark.parametrize("name", ["constrained", "constraintmatch"])
def test_told_error_rates_keep_what_wrong_pairs_would_spoil(stripes: ImageSet, taught: ClusterModel, name: str) -> None:
    own = {"images_per_step": 12} if name == "constraintmatch" else {}
    told = {"error_rate": 0.3, **({"pseudo_error_rate": 0.1} if name == "constraintmatch" else {})}
    arguments = {"pairs_per_step": 12, "settings": replace(QUICK, steps=20, log_every=20), **own}
    wrong = pairs(stripes, 60, seed=1).flip(0.3, seed=2)
    plain, knowing = (
        scores(
            stripes.labels,
            predict(METHODS[name](copy.deepcopy(taught), stripes, wrong, **arguments, **more).model, stripes),
        )
        for more in ({}, told)
    )
    assert knowing["acc"] > plain["acc"] + 0.05
    assert knowing["acc"] > 0.9


@pytest.mark.parametrize("name", ["supervised", "fully_constrained"])
def test_the_bounds_learn_the_labels(stripes: ImageSet, name: str) -> None:
    settings = replace(QUICK, steps=20, lr=0.1, log_every=20)
    fitted = run(name, stripes, settings=settings, images_per_step=20).model
    assert scores(stripes.labels, predict(fitted, stripes))["acc"] > 0.95


def test_the_start_finds_the_stripes_without_labels(stripes: ImageSet) -> None:
    quiet = replace(QUICK, optimizer="adam", lr=3e-3, schedule="constant")
    choice = ViewChoice(flip=True, own_strong=view_functions.weak())
    features = METHODS["simclr"](model(), stripes, epochs=6, settings=replace(QUICK, lr=0.2), views=choice).model
    assert features.config.projection == 128
    assert features.config.n_clusters == 0
    clustered = METHODS["scan"](
        features, stripes, n_clusters=3, epochs=10, n_neighbours=5, n_tries=2, settings=quiet, views=choice
    ).model
    before = scores(stripes.labels, predict(clustered, stripes))["acc"]
    assert before > 0.6
    after = METHODS["self_label"](clustered, stripes, epochs=3, min_confidence=0.5, settings=quiet, views=choice).model
    assert scores(stripes.labels, predict(after, stripes))["acc"] > 0.6


@pytest.mark.parametrize("name", ["scan", "self_label", "neighbour_label"])
def test_a_falling_quality_keeps_earlier_weights_unless_it_is_tolerated(
    name: str, stripes: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse_and_worse(*_: object) -> Callable[[ClusterModel], float]:
        values = iter([1.0, 0.8, 0.6, 0.4, 0.2])
        return lambda _: next(values)

    monkeypatch.setattr(preparation, "quality_judge", worse_and_worse)
    own = {"scan": {"n_clusters": 3, "n_tries": 0}, "self_label": {"min_confidence": 0.1}}
    asked = own.get(name, {})
    settings, few = replace(QUICK, evaluate_every=1), stripes.take(np.arange(15))
    kept = []
    for tolerance in ({}, {"tolerance": 0.5}, {"tolerance": 1.0}):
        done = METHODS[name](model(), few, epochs=4, images_per_step=15, settings=settings, **asked, **tolerance)
        kept.append(next((entry["kept_step"] for entry in done.log if entry["kind"] == "kept"), 4))
    assert kept == [0, 2, 4]
    with pytest.raises(InputError, match=r"tolerance is 1.5; it must be in \[0, 1\]"):
        METHODS[name](model(), stripes, tolerance=1.5, **asked)


def test_neighbours_are_those_of_brute_force() -> None:
    features = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    similar = unit @ unit.T
    np.fill_diagonal(similar, -np.inf)
    expected = np.argsort(-similar, axis=1)[:, :7]
    assert np.array_equal(nearest_neighbours(features, 7), expected)
    assert nearest_neighbours(features[:3], 20).shape == (3, 2)


def test_selection_is_by_entropy_or_confidence() -> None:
    guess = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.05, 0.05], [0.34, 0.33, 0.33]])
    assert choose_selection("entropy", 0.7, 0.95)(guess).tolist() == [True, True, False]
    assert choose_selection("confidence", 0.2, 0.8)(guess).tolist() == [False, True, False]
    with pytest.raises(InputError, match="unknown selection"):
        choose_selection("margin", 0.2, 0.95)


def test_the_same_seed_gives_the_same_weights(stripes: ImageSet, plain: Trained) -> None:
    again = run("constraintmatch", stripes, **LOOSE)
    assert torch.equal(plain.model.head.weight, again.model.head.weight)
    other = run("constraintmatch", stripes, **{**LOOSE, "settings": replace(SHORT, seed=1)})
    assert not torch.equal(plain.model.head.weight, other.model.head.weight)


def test_views_of_ones_own_are_used(stripes: ImageSet) -> None:
    calls = []

    def negative(images: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        calls.append(len(images))
        return 255 - images

    own = ViewChoice(own_strong=view_functions.from_function("negative", negative))
    run("constraintmatch", stripes, images_per_step=20, views=own)
    assert calls == [20] * 6
    assert own.request()["own"] == {"strong": "negative"}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("constrained", {"constraints": Constraints.from_lists(n_images=60)}, "needs constraints and there are none"),
        ("constrained", {"constraints": Constraints.from_lists(n_images=9, must_link=[(0, 1)])}, "over 9 images"),
        ("constraintmatch", {"links": "firm"}, "unknown links 'firm'"),
        ("constraintmatch", {"flip_fraction": 1.5}, "flip_fraction is 1.5"),
        ("constrained", {"error_rate": 0.5}, r"error_rate is 0.5; it must be in \[0, 0.5\)"),
        ("constraintmatch", {"pseudo_error_rate": -0.1}, "pseudo_error_rate is -0.1"),
        ("constraintmatch", {"flip_between": "some"}, "unknown flip_between 'some'; known are largest, any"),
        ("scan", {"n_clusters": 61}, "61 clusters for 60 images"),
        ("constrained", {"constraints": UNWEIGHTED}, "every constraint has the weight 0"),
        ("constrained", {"pairs_per_step": 0}, "0 images or pairs a step"),
        ("supervised", {"images_per_step": -3}, "-3 images or pairs a step"),
        ("constraintmatch", {"pseudo_weight": -1.0}, "pseudo_weight is -1.0"),
        ("constraintmatch", {"pseudo_weight": float("nan")}, "pseudo_weight is nan"),
        ("constraintmatch", {"max_entropy": -0.1}, "max_entropy is -0.1"),
        ("constraintmatch", {"links": "hard", "hard_threshold": 7.0}, "hard_threshold is 7.0"),
        ("pseudo_label", {"min_confidence": 95.0}, "min_confidence is 95.0"),
        ("simclr", {"images_per_step": 1}, "needs 2 or more"),
        ("simclr", {"temperature": 0.0}, "temperature is 0.0"),
        ("linear_scan", {"n_clusters": 3, "n_tries": 0}, "n_tries is 0; linear_scan needs 1"),
        ("scan", {"n_clusters": 1}, "2 or more"),
        ("scan", {"n_clusters": 3, "n_neighbours": 0}, "n_neighbours is 0; scan needs 1"),
        ("scan", {"n_clusters": 3, "n_tries": -1}, "n_tries is -1; scan needs 0"),
    ],
)
def test_bad_requests_get_one_line(stripes: ImageSet, name: str, arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(name, stripes, **arguments)


def test_images_that_do_not_fit_the_model_are_refused(stripes: ImageSet) -> None:
    large = ImageSet.from_arrays(np.zeros((5, 16, 16, 3), dtype=np.uint8))
    with pytest.raises(InputError, match=r"takes grey images of 8 × 8, these are colour images of 16 × 16"):
        METHODS["simclr"](model(), large, settings=QUICK)
    with pytest.raises(InputError, match="3 clusters for 2 images"):
        METHODS["self_label"](model(), stripes.take([0, 1]), settings=QUICK)
    with pytest.raises(InputError, match="needs the label of every image"):
        METHODS["supervised"](model(), replace(stripes, labels=None), settings=QUICK)
    with pytest.raises(InputError, match="no cluster head"):
        METHODS["self_label"](with_projection(model()), stripes, settings=QUICK)
