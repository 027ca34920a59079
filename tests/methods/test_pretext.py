import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed, predict, scores
from constraintmatch.methods import METHODS, Context, Trained, ViewChoice
from constraintmatch.methods.pretext import OnlineAndTarget, TargetBatch, byol, follow, momentum_at
from constraintmatch.methods.scan import linear_scan
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_projection
from constraintmatch.pipeline.train import pretrain
from constraintmatch.training import views as view_functions
from constraintmatch.training.batches import map_tensors
from constraintmatch.training.loop import TrainSettings
from constraintmatch.training.losses import cosine_loss
from constraintmatch.training.run_folder import open_run, read_log

pytestmark = pytest.mark.usefixtures("narrow_networks", "quick_heads_throughout")

QUICK = TrainSettings(device="cpu", lr=1.0, weight_decay=5e-4, schedule="cosine", log_every=5)
SMALL = {"hidden": 64, "projection": 16, "target_momentum": 0.9}


def fresh(n_clusters: int = 0) -> ClusterModel:
    return build_model(n_clusters=n_clusters, side=8, channels=1, seed=1)


def run(images: ImageSet, **arguments: Any) -> Trained:
    return byol(fresh(), images, **{**SMALL, "epochs": 10, "settings": QUICK, **arguments})


def pair(model: ClusterModel | None = None) -> OnlineAndTarget:
    torch.manual_seed(0)
    return OnlineAndTarget(model or with_projection(fresh(), 0), 32, 8)


def some_images(n: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def spread(model: ClusterModel, images: ImageSet) -> float:
    """0 where all images have the same direction in the features, 1 where the directions cancel out."""
    features = embed(model, images)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    return float(np.sqrt(unit.var(axis=0).sum()))


@pytest.fixture(scope="module")
def few(stripes: ImageSet) -> ImageSet:
    """Images for tests of the steps, not of what they lead to."""
    return stripes.take(np.arange(20))


# What it learns


@pytest.fixture(scope="module")
def trained(stripes: ImageSet) -> Trained:
    return run(stripes, epochs=15, settings=replace(QUICK, log_every=1))


def test_the_loss_falls_and_the_features_do_not_collapse(stripes: ImageSet, trained: Trained) -> None:
    model, log = trained
    losses = [entry["loss_prediction"] for entry in log]
    assert losses[-1] < 0.85 * losses[0]
    assert losses[-1] > 0.05  # of a collapse it would be nothing
    assert spread(model, stripes) > 0.3
    same = ImageSet.from_arrays(np.repeat(stripes.images[:1], 20, axis=0))
    assert spread(model, same) < 0.01


def test_linear_heads_after_it_find_the_stripes(stripes: ImageSet, trained: Trained) -> None:
    model, _ = linear_scan(trained.model, stripes, n_clusters=3, n_tries=4, settings=TrainSettings(device="cpu"))
    assert scores(stripes.labels, predict(model, stripes))["acc"] > 0.8


def test_features_forget_what_the_views_change() -> None:
    """Where two views differ in brightness alone, training makes the features of dark and bright images alike."""
    rng = np.random.default_rng(0)
    images = ImageSet.from_arrays(rng.integers(40, 120, (30, 8, 8), dtype=np.uint8))
    brighter = ImageSet.from_arrays(np.minimum(images.images[..., 0].astype(int) * 2, 255).astype(np.uint8))

    def scaled(pixels: Tensor, uniforms: Tensor) -> Tensor:
        return (pixels * (1 + uniforms[:, 0, None, None, None])).clamp(0, 255).to(torch.uint8)

    views = ViewChoice(own_contrastive=view_functions.from_function("brightness", scaled, n_draws=1))

    def alike(model: ClusterModel) -> float:
        dark, bright = (embed(model, of) for of in (images, brighter))
        dark, bright = (x - x.mean(0) for x in (dark, bright))
        nearest = (dark @ bright.T / np.linalg.norm(bright, axis=1)).argmax(1)
        return float((nearest == np.arange(30)).mean())

    before, after = fresh(), byol(fresh(), images, **SMALL, epochs=20, settings=QUICK, views=views).model
    assert alike(after) > alike(before) + 0.1


# What is left behind


def test_the_model_has_the_trained_backbone_and_no_head(stripes: ImageSet) -> None:
    start = fresh(3)
    before = weights(start)
    model = byol(start, stripes, **SMALL, epochs=2, settings=QUICK).model
    assert_equal(weights(start), before)
    assert all(value.requires_grad for value in start.parameters())
    assert (model.config.n_clusters, model.config.projection, model.head, model.projection) == (0, 0, None, None)
    assert all(value.requires_grad for value in model.parameters())
    assert not torch.equal(model.backbone[0].weight, start.backbone[0].weight)
    assert np.array_equal(embed(model, stripes, projected=True), embed(model, stripes))


def test_it_is_a_stage_of_pretraining(few: ImageSet, tmp_path: Path) -> None:
    recipe = {"byol": {**SMALL, "epochs": 2}, "scan": {"epochs": 1, "images_per_step": 30, "n_tries": 0}}
    settings = {"device": "cpu", "seed": 3}
    model = pretrain(
        fresh(), few, 3, stages=("byol", "scan"), recipe=recipe, settings=settings, context=Context(tmp_path)
    )
    assert [entry["method"] for entry in model.config.trained] == ["byol", "scan"]
    assert model.config.n_clusters == 3


def test_the_same_seed_gives_the_same_weights(few: ImageSet) -> None:
    torch.manual_seed(5)
    first, expected = run(few, epochs=2).model, torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)  # nobody else's draws are changed
    assert_equal(weights(first), weights(run(few, epochs=2).model))
    other = run(few, epochs=2, settings=replace(QUICK, seed=1)).model
    assert not torch.equal(first.backbone[0].weight, other.backbone[0].weight)


# The target


@pytest.mark.parametrize("first", [0.0, 0.9, 0.996, 1.0])
def test_the_momentum_rises_on_a_cosine_from_its_first_value_to_one(first: float) -> None:
    found = [momentum_at(t / 100, first) for t in range(101)]
    assert found[0] == pytest.approx(first, abs=1e-12)
    assert found[50] == pytest.approx((1 + first) / 2)
    assert found[100] == 1
    assert found == sorted(found)


class Recorder:
    """Takes the place of `fit` and notes the weights of both networks around each loss."""

    def __init__(self, fit: Callable[..., Any]) -> None:
        self.fit = fit
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []
        self.batches: list[TargetBatch] = []

    def __call__(self, module: OnlineAndTarget, next_batch: Any, loss: Any, *args: Any, **more: Any) -> Any:
        self.module = module
        self.first, self.start = parameters(module), parameters(module.online)
        assert_equal(self.start, parameters(module.target))

        def noting(network: Any, batch: TargetBatch) -> dict[str, Tensor]:
            self.before.append(parameters(module.online))
            self.batches.append(map_tensors(batch, torch.clone))
            terms = loss(network, batch)
            self.after.append(parameters(module.target))
            assert_equal(self.before[-1], parameters(module.online))
            return terms

        return self.fit(module, next_batch, noting, *args, **more)


def parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    file = importlib.import_module("constraintmatch.methods.pretext")
    found = Recorder(file.fit)
    monkeypatch.setattr(file, "fit", found)
    return found


def test_the_target_is_the_moving_average_of_the_online_weights(few: ImageSet, recorder: Recorder) -> None:
    """ξ ← τ ξ + (1 − τ) θ, written out in float64 over the online weights of each step."""
    run(few, epochs=9, images_per_step=10)
    steps = len(recorder.before)
    assert steps == 18
    average = {name: value.double() for name, value in recorder.start.items()}
    assert_equal(recorder.after[0], recorder.start)  # target and online are equal, so nothing moves
    for step, (online, target) in enumerate(zip(recorder.before, recorder.after, strict=True)):
        tau = 1 - 0.1 * (1 + math.cos(math.pi * step / steps)) / 2
        for name, value in online.items():
            average[name] = tau * average[name] + (1 - tau) * value.double()
            torch.testing.assert_close(target[name].double(), average[name], atol=1e-6, rtol=1e-5)
    name = "model.backbone.0.weight"
    assert (recorder.before[-1][name] - recorder.after[-1][name]).abs().max() > 1e-3  # it lags behind


def test_a_momentum_of_one_keeps_the_first_target_and_of_zero_copies(few: ImageSet, recorder: Recorder) -> None:
    run(few, epochs=3, target_momentum=1.0)
    assert_equal(recorder.after[-1], recorder.start)
    both = pair()
    with torch.no_grad():
        for value in both.online.parameters():
            value.add_(1.0)
    follow(both.target, both.online, torch.ones(()))
    for name, value in parameters(both.target).items():
        torch.testing.assert_close(value, parameters(both.online)[name])


def test_no_gradient_reaches_the_target(few: ImageSet, recorder: Recorder) -> None:
    run(few, epochs=1)
    assert all(value.grad is None and not value.requires_grad for value in recorder.module.target.parameters())
    both = pair().train()
    both.target.requires_grad_(True)  # even then
    both(some_images()).square().sum().backward()
    assert all(value.grad is None for value in both.target.parameters())
    assert all(value.grad is not None for value in both.online.parameters())
    assert all(value.grad is not None for value in both.predictor.parameters())


def test_the_loss_is_the_papers_distance_averaged_over_both_directions(stripes: ImageSet, recorder: Recorder) -> None:
    """‖q/‖q‖ − z/‖z‖‖² between the prediction from one view and the target's projection of the other, in float64."""
    still = replace(QUICK, lr=1e-12, weight_decay=0.0)  # so that the networks after the step are those before it
    log = run(stripes, epochs=1, settings=still).log
    both, (batch,) = recorder.module, recorder.batches
    n = len(batch.first)
    assert not torch.equal(batch.first, batch.second)
    with torch.no_grad():
        images = torch.cat((batch.first, batch.second))
        q, z = both.predictor(both.online(images)).double(), both.target(images).double()
    across = [*zip(q[:n], z[n:], strict=True), *zip(q[n:], z[:n], strict=True)]
    distances = [float((a / a.norm() - b / b.norm()).square().sum()) for a, b in across]
    assert log[-1]["loss_prediction"] == pytest.approx(sum(distances) / (2 * n), rel=1e-4)


@tries(max_examples=8, deadline=None)
@given(
    times=st.floats(0.1, 20),
    rate=st.floats(1e-3, 0.3),
    decay=st.sampled_from([0.0, 5e-4, 0.05]),
    seed=st.integers(0, 9),
)
def test_a_hurried_predictor_has_a_higher_learning_rate_for_sgd(
    times: float, rate: float, decay: float, seed: int
) -> None:
    """Three steps with momentum and decay in one group equal those with a group of times the rate, in float64."""
    hurried, grouped = (pair().double().train() for _ in range(2))
    hurried.hurry_predictor(times, decay)
    one = torch.optim.SGD([*hurried.online.parameters(), *hurried.predictor.parameters()])
    two = torch.optim.SGD(
        [{"params": [*grouped.online.parameters()]}, {"params": [*grouped.predictor.parameters()], "lr": times * rate}]
    )
    for optimizer in (one, two):
        for group, own in zip(optimizer.param_groups, (rate, times * rate), strict=False):
            group |= {"lr": own, "momentum": 0.9, "weight_decay": decay}
    images = some_images(6, seed=seed)
    for both, optimizer in ((hurried, one), (grouped, two)):
        for _ in range(3):
            optimizer.zero_grad()
            distance(both, images).backward()
            optimizer.step()
    for name, value in parameters(hurried).items():
        torch.testing.assert_close(value, parameters(grouped)[name], rtol=1e-6, atol=1e-9)
    still = parameters(pair().double())
    assert not torch.equal(still["predictor.0.weight"], parameters(hurried)["predictor.0.weight"])


def distance(both: OnlineAndTarget, images: Tensor) -> Tensor:
    prediction, _, target = both(images).unbind()
    return cosine_loss(prediction, target.roll(len(images) // 2, 0))


def test_the_predictor_learns_at_its_own_rate_in_the_method(few: ImageSet, recorder: Recorder) -> None:
    """After the first step the predictor has moved ten times as far, the online network as far as without."""
    moved = []
    for times in (1.0, 10.0):
        run(few, epochs=1, predictor_rate=times, settings=replace(QUICK, lr=1e-3))
        now = parameters(recorder.module)
        moved.append({name: now[name] - recorder.first[name] for name in now})
    slow, fast = moved
    torch.testing.assert_close(slow["online.projector.0.weight"], fast["online.projector.0.weight"])
    for name in ("predictor.0.weight", "predictor.3.weight", "predictor.3.bias"):
        torch.testing.assert_close(10 * slow[name], fast[name], rtol=1e-3, atol=1e-7)


def test_batches_are_pure_functions_of_the_step_and_carry_the_momentum(few: ImageSet, recorder: Recorder) -> None:
    for _ in range(2):
        run(few, epochs=4)
    first, second = recorder.batches[:4], recorder.batches[4:]
    for left, right in zip(first, second, strict=True):
        for name in ("first", "second", "share"):
            assert torch.equal(getattr(left, name), getattr(right, name))
    assert [tuple(batch.share.shape) for batch in first] == [()] * 4
    assert float(first[0].share) == pytest.approx(0.1)
    assert float(first[2].share) == pytest.approx(0.05)


# The machine around it


def test_a_resumed_run_equals_an_uninterrupted_one(few: ImageSet, tmp_path: Path) -> None:
    settings = replace(QUICK, checkpoint_every=5, log_every=4)
    calls = {"left": 10**9}

    def dying(pixels: Tensor, uniforms: Tensor) -> Tensor:  # noqa: ARG001
        calls["left"] -= 1
        if calls["left"] < 0:
            raise OSError("the machine went away")
        return 255 - pixels.roll(int(pixels[0, 0, 0, 0]) % 3, -1)

    views = ViewChoice(own_contrastive=view_functions.from_function("dying", dying))

    def go(name: str, *, resume: bool = False) -> ClusterModel:
        with open_run(tmp_path / name, {}, resume=resume) as folder:
            return run(few, settings=settings, views=views, context=Context(run=folder)).model

    whole = go("whole")
    calls["left"] = 2 * 8
    with pytest.raises(OSError, match="went away"):
        go("parts")
    kept = load_file(tmp_path / "parts" / "checkpoint.safetensors")
    assert int(kept["count"]) == 5
    name = "model.backbone.0.weight"
    assert not torch.equal(kept[f"module.target.{name}"], kept[f"module.online.{name}"])
    calls["left"] = 10**9
    assert_equal(weights(go("parts", resume=True)), weights(whole))
    checkpoints = [load_file(tmp_path / folder / "checkpoint.safetensors") for folder in ("whole", "parts")]
    assert_equal(*checkpoints)  # target, predictor and momenta too
    logs = [read_log(tmp_path / folder) for folder in ("whole", "parts")]
    plain = [[{k: v for k, v in entry.items() if k != "seconds"} for entry in log] for log in logs]
    assert plain[0] == plain[1]


def test_the_network_compiles_in_one_piece_and_says_the_same() -> None:
    eager, traced = pair().train(), pair().train()
    for both in (eager, traced):
        both.hurry_predictor(10.0, 0.01)
    compiled = torch.compile(traced, dynamic=False, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(both.parameters(), lr=0.01, weight_decay=0.01) for both in (eager, traced)]
    for step in range(2):  # the second call reads weights that were changed in place
        for both, network, optimizer in zip((eager, traced), (eager, compiled), optimizers, strict=True):
            follow(both.target, both.online, torch.tensor(0.5))
            optimizer.zero_grad()
            prediction, _, target = network(some_images(seed=step)).unbind()
            (prediction * target.detach()).mean().backward()
            optimizer.step()
    for left, right in zip(eager.state_dict().values(), traced.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right)
    assert not torch.equal(eager.predictor[0].weight, pair().predictor[0].weight)


@pytest.mark.parametrize("n", [7, 61])
def test_sets_smaller_than_a_batch_are_taken_whole_and_the_rate_fits(stripes: ImageSet, n: int) -> None:
    rows = np.arange(n) % len(stripes)
    log = run(stripes.take(rows), epochs=1, settings=replace(QUICK, lr=0.512)).log
    assert log[-1]["step"] == 1
    assert log[-1]["lr"] == pytest.approx(n / 1000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 0}, "epochs is 0; byol needs 1 or more"),
        ({"images_per_step": 1}, "images_per_step is 1; byol needs 4 or more"),
        ({"hidden": 0}, "hidden is 0; byol needs 1 or more"),
        ({"projection": 1}, "projection is 1; byol needs 2 or more"),
        ({"target_momentum": 1.5}, "target_momentum is 1.5; it must be in"),
        ({"target_momentum": math.nan}, "target_momentum is nan"),
        ({"predictor_rate": 0.0}, "predictor_rate is 0.0; it must be a positive number"),
        ({"predictor_rate": math.inf}, "predictor_rate is inf"),
        ({"settings": replace(QUICK, optimizer="adam")}, "needs the optimizer sgd; set it to 1 for adam"),
    ],
)
def test_impossible_arguments_get_one_line(stripes: ImageSet, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(stripes, **change)


def test_images_it_cannot_use_get_one_line(stripes: ImageSet) -> None:
    with pytest.raises(InputError, match="needs at least 4; there are 3"):
        run(stripes.take([0, 1, 2]))
    large = ImageSet.from_arrays(np.zeros((5, 16, 16, 3), dtype=np.uint8))
    with pytest.raises(InputError, match=r"takes grey images of 8 × 8, these are colour images of 16 × 16"):
        METHODS["byol"](fresh(), large, settings=QUICK)
