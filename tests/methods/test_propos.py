from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed, predict, scores
from constraintmatch.methods import Context, Trained, pretext
from constraintmatch.methods.pretext import OnlineAndTarget, byol, propos
from constraintmatch.methods.prototypes import spherical_k_means
from constraintmatch.methods.scan import linear_scan
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_projection
from constraintmatch.training.loop import Interrupted, TrainSettings
from constraintmatch.training.run_folder import open_run, read_log

pytestmark = pytest.mark.usefixtures("narrow_networks", "quick_heads_throughout")

QUICK = TrainSettings(device="cpu", lr=1.0, weight_decay=5e-4, schedule="cosine", log_every=1)
SMALL = {"hidden": 64, "projection": 16, "target_momentum": 0.9}


def fresh() -> ClusterModel:
    return build_model(n_clusters=0, side=8, channels=1, seed=1)


def run(images: ImageSet, **arguments: Any) -> Trained:
    return propos(fresh(), images, **{**SMALL, "n_clusters": 3, "epochs": 10, "settings": QUICK, **arguments})


def weights(model: ClusterModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# What it learns


@pytest.fixture(scope="module")
def trained(stripes: ImageSet) -> Trained:
    return run(stripes, epochs=15)


def test_prototypes_take_part_after_the_warm_up_and_move_apart(stripes: ImageSet, trained: Trained) -> None:
    model, log = trained
    terms = [entry["loss_prototypes"] for entry in log if entry["kind"] == "training"]
    first = next(number for number, value in enumerate(terms) if value > 0)
    assert not any(terms[:first])
    assert first >= 5  # the first clusters are found after five epochs
    assert all(value > 0 for value in terms[first:])
    assert terms[-1] < terms[first]
    found, _ = linear_scan(model, stripes, n_clusters=3, n_tries=4, settings=TrainSettings(device="cpu"))
    assert scores(stripes.labels, predict(found, stripes))["acc"] > 0.8


def test_the_log_says_how_many_images_changed_their_cluster(trained: Trained) -> None:
    moved = [entry["moved"] for entry in trained.log if entry["kind"] == "evaluation"]
    assert len(moved) == 3
    assert all(0 <= share <= 1 for share in moved)
    assert moved[0] > 0


def test_without_noise_and_prototypes_it_is_byol(stripes: ImageSet) -> None:
    few = stripes.take(np.arange(20))
    plain = byol(fresh(), few, **SMALL, epochs=6, settings=QUICK).model
    same = run(few, epochs=6, noise=0.0, prototype_weight=0.0).model
    for name, value in weights(plain).items():
        torch.testing.assert_close(value, weights(same)[name], msg=name)
    assert not np.array_equal(embed(run(few, epochs=6, noise=0.1).model, few), embed(plain, few))


def test_noise_moves_the_point_that_a_prediction_begins_at_by_a_share_of_the_spread() -> None:
    torch.manual_seed(0)
    both = OnlineAndTarget(with_projection(fresh(), 0), 32, 8).eval()
    images = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8)
    noise = 0.1 * torch.randn(6, 8)
    prediction, online, target = both(images, noise).unbind()
    spread = (online - online.mean(0)).square().mean(0).sqrt()
    expected = both.predictor(online + noise * spread)
    torch.testing.assert_close(prediction, expected)
    torch.testing.assert_close(both(images)[1:], torch.stack((online, target)))


# The machine around it


def test_a_stopped_run_goes_on_to_the_same_result(stripes: ImageSet, tmp_path: Path) -> None:
    """Clusters and weights too; it stops after the first clusters are found and in the middle of an epoch."""
    few, settings = stripes.take(np.arange(20)), replace(QUICK, checkpoint_every=100)

    def go(name: str, *, stop_after: int = 10**9) -> ClusterModel:
        steps = iter(range(10**9))
        with open_run(tmp_path / name, {}, resume=(tmp_path / name).exists()) as folder:
            context = Context(run=folder, stop=lambda: next(steps) + 1 >= stop_after)
            return run(few, images_per_step=10, epochs=12, settings=settings, context=context).model

    whole = go("whole")
    with pytest.raises(Interrupted):
        go("parts", stop_after=13)
    kept = load_file(tmp_path / "parts" / "checkpoint.safetensors")
    assert len(kept["module.clusters"].unique()) == 3
    for name, value in weights(go("parts")).items():
        assert torch.equal(value, weights(whole)[name]), name
    logs = [read_log(tmp_path / folder) for folder in ("whole", "parts")]
    plain = [[{k: v for k, v in entry.items() if k != "seconds"} for entry in log] for log in logs]
    assert plain[0] == plain[1]


def test_the_features_that_are_grouped_are_the_targets_in_plain_views(
    stripes: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tensor] = []

    def noting(points: Tensor, *args: Any, **more: Any) -> Tensor:
        given.append(points)
        return spherical_k_means(points, *args, **more)

    monkeypatch.setattr(pretext, "spherical_k_means", noting)
    model = run(stripes.take(np.arange(20)), epochs=5, target_momentum=0.0, settings=replace(QUICK, lr=1e-9)).model
    assert len(given) == 1
    features = embed(model, stripes.take(np.arange(20)))
    torch.testing.assert_close(given[0], F.normalize(torch.from_numpy(features), dim=-1), atol=1e-3, rtol=1e-3)
    assert model.training


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_clusters": 1}, "n_clusters is 1; ask for 2 or more"),
        ({"n_clusters": 10**6}, "ask for at most one cluster per image"),
        ({"noise": -1.0}, "noise is -1.0; it must be 0 or more"),
        ({"prototype_weight": float("inf")}, "prototype_weight is inf; it must be 0 or more"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be a positive number"),
        ({"warm_up": 2.0}, "warm_up is 2.0; it must be in"),
        ({"epochs": 0}, "epochs is 0; propos needs 1 or more"),
    ],
)
def test_impossible_arguments_get_one_line(stripes: ImageSet, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(stripes, **change)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_learns_the_same_without_prototypes_as_byol() -> None:
    """400 steps with a ResNet-18: compiled and captured, the losses stay near those of BYOL."""
    pixels = np.random.default_rng(0).integers(0, 256, (2_000, 8, 8, 3), dtype=np.uint8)
    images = ImageSet.from_arrays(pixels.repeat(4, axis=1).repeat(4, axis=2))
    settings = TrainSettings(lr=0.2, weight_decay=5e-4, schedule="cosine-warm", log_every=50, device="cuda")

    def losses(method: Any, **more: Any) -> list[float]:
        model = build_model(n_clusters=0, side=32, backbone="resnet18", seed=0)
        log = method(model, images, epochs=58, settings=settings, **more).log
        return [entry["loss_prediction"] for entry in log if entry["kind"] == "training"]

    expected = losses(byol)
    for noise in (0.0, 0.05):
        found = losses(propos, n_clusters=10, prototype_weight=0.0, noise=noise)
        np.testing.assert_allclose(found, expected, rtol=0.15)
