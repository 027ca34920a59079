"""CC, PICA, TCC and MiCE: clusters and features at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import predict, scores
from constraintmatch.methods import METHODS, Context, Trained, ViewChoice, cluster_contrast
from constraintmatch.methods.cluster_contrast import Experts, Twin, gate
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_clusters
from constraintmatch.pipeline.config import chain_stages, method_settings
from constraintmatch.pipeline.train import pretrain
from constraintmatch.training.loop import Interrupted
from constraintmatch.training.run_folder import open_run, read_log

pytestmark = pytest.mark.usefixtures("narrow_networks", "quick_heads_throughout", "narrow_heads")

SYSTEMS = ("cc", "pica", "mice", "tcc")
RATES = {"cc": 1e-2, "pica": 1e-2, "mice": 0.3, "tcc": 1e-2}


@pytest.fixture(scope="module")
def narrow_heads() -> Iterator[None]:
    """Projections of 16 numbers, and a copy of the experts that a short training reaches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_contrast, "PROJECTION", 16)
        patch.setattr(cluster_contrast, "MOMENTUM", 0.9)
        yield


def fresh(n_clusters: int = 0) -> ClusterModel:
    return build_model(n_clusters=n_clusters, side=8, channels=1, seed=1)


def run(name: str, images: ImageSet, **arguments: Any) -> Trained:
    settings = method_settings(name, {"device": "cpu", "lr": RATES[name], "log_every": 1})
    given = {"n_clusters": 3, "epochs": 2, "settings": settings, **arguments}
    return METHODS[name](fresh(), images, **given)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def few(stripes: ImageSet) -> ImageSet:
    return stripes.take(np.arange(20))


# What they learn


@pytest.mark.parametrize("name", SYSTEMS)
def test_it_finds_clusters_of_digits(name: str) -> None:
    digits = load_dataset("digits", "train")
    assert digits.labels is not None
    some = digits.take(np.flatnonzero(digits.labels < 3)[:96])
    settings = method_settings(name, {"device": "cpu", "lr": RATES[name], "evaluate_every": 50})
    plain = {"images_per_step": 48, "views": ViewChoice(flip=False), "settings": settings}
    found = run(name, some, epochs=25, **plain).model
    before = scores(some.labels, predict(with_clusters(fresh(), 3), some))["acc"]
    after = scores(some.labels, predict(found, some))["acc"]
    assert after > max(before + 0.1, 0.7)
    assert (found.config.n_clusters, found.config.projection) == (3, 0)


def test_the_gate_has_the_clusters_of_the_head_and_no_more_than_a_cosine() -> None:
    logits = 30 * torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    corners = torch.eye(5) - 0.2
    corners = corners / corners.norm(dim=1, keepdim=True)
    centred = logits - logits.mean(1, keepdim=True)
    torch.testing.assert_close(gate(logits), centred / centred.norm(dim=1, keepdim=True) @ corners.T)
    assert torch.equal(gate(logits).argmax(1), logits.argmax(1))


def test_the_copy_follows_the_experts_and_prototypes_go_to_what_it_sees() -> None:
    experts = Experts(fresh(3), 4, 0.9, seed=0)
    head, key = experts.online.model.head, "projector.0.weight"
    assert head is not None
    with torch.no_grad():
        experts.online.get_parameter(key).add_(1.0)
    before, bias = experts.target.get_parameter(key).clone(), head.bias.clone()
    images = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = experts(images)
    scores, _ = experts.score(rows)
    keys = rows[:, 12:24].detach().view(8, 3, 4)
    own, unit = scores.detach().softmax(-1), keys / keys.norm(dim=-1, keepdim=True)
    mean = (own[:, :, None] * unit).sum(0) / own.sum(0)[:, None]
    torch.testing.assert_close(experts.prototypes, 0.01 * mean)
    experts.move_on()
    torch.testing.assert_close(experts.target.get_parameter(key), before + 0.1)
    torch.testing.assert_close(head.bias, bias - rows[:, 24:].detach().mean(0))


def test_a_drawn_cluster_moves_the_projection_and_nothing_else() -> None:
    twin = Twin(fresh(3), 4, seed=0, drawn=True).eval()
    images = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sure = torch.full((6, 3), -50.0)
    sure[:, 1] = 50.0
    plain, moved, logits = torch.split(twin(images, sure), [4, 4, 3], dim=1)
    assert twin.kinds is not None
    torch.testing.assert_close(moved, plain + twin.kinds.weight[:, 1])
    torch.testing.assert_close(torch.cat((plain, logits), 1), twin(images))


# The machine around them


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_stopped_run_goes_on_to_the_same_result(name: str, few: ImageSet, tmp_path: Path) -> None:
    settings = method_settings(name, {"device": "cpu", "lr": RATES[name], "log_every": 1, "checkpoint_every": 100})

    def go(folder: str, *, stop_after: int = 10**9) -> ClusterModel:
        steps = iter(range(10**9))
        with open_run(tmp_path / folder, {}, resume=(tmp_path / folder).exists()) as kept:
            context = Context(run=kept, stop=lambda: next(steps) + 1 >= stop_after)
            return run(name, few, images_per_step=10, epochs=3, settings=settings, context=context).model

    whole = weights(go("whole"))
    with pytest.raises(Interrupted):
        go("parts", stop_after=3)
    for key, value in weights(go("parts")).items():
        assert torch.equal(value, whole[key]), key
    logs = [read_log(tmp_path / folder) for folder in ("whole", "parts")]
    plain = [[{k: v for k, v in entry.items() if k != "seconds"} for entry in log] for log in logs]
    assert plain[0] == plain[1]


def test_it_leaves_the_given_model_and_the_draws_of_others_alone(few: ImageSet) -> None:
    for name in SYSTEMS:
        start = fresh()
        before = weights(start)
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        settings = method_settings(name, {"device": "cpu"})
        METHODS[name](start, few, n_clusters=3, epochs=1, settings=settings)
        assert torch.equal(torch.rand(3), expected), name
        assert all(torch.equal(value, before[key]) for key, value in weights(start).items()), name


def test_it_is_a_start_whose_clusters_the_next_stage_keeps(few: ImageSet) -> None:
    recipe = {"cc": {"epochs": 2}, "scan": {"epochs": 1, "images_per_step": 20}}
    model = pretrain(fresh(), few, 3, stages=("cc", "scan"), recipe=recipe, settings={"device": "cpu"})
    assert [entry["method"] for entry in model.config.trained] == ["cc", "scan"]
    assert model.config.n_clusters == 3
    assert chain_stages("scan", pretext="tcc") == ("tcc", "scan", "self_label")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("cc", {"epochs": 0}, "epochs is 0; cc needs 1 or more"),
        ("tcc", {"n_clusters": 1}, "n_clusters is 1; ask for 2 or more"),
        ("mice", {"images_per_step": 3}, "images_per_step is 3; mice needs 4 or more"),
        ("pica", {"n_clusters": 1}, "n_clusters is 1; ask for 2 or more"),
        ("pica", {"images_per_step": 3}, "images_per_step is 3; pica needs 4 or more"),
        ("pica", {"epochs": 0}, "epochs is 0; pica needs 1 or more"),
    ],
)
def test_impossible_arguments_get_one_line(few: ImageSet, name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(name, few, **change)
    with pytest.raises(InputError, match=f"{name} compares images with their batch and needs at least 4; there are 3"):
        run(name, few.take(np.arange(3)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_gpu_has_the_losses_of_eager_steps(name: str) -> None:
    """40 steps with a ResNet-18, compiled and captured, and as they are."""
    pixels = np.random.default_rng(0).integers(0, 256, (512, 8, 8, 3), dtype=np.uint8)
    images = ImageSet.from_arrays(pixels.repeat(4, axis=1).repeat(4, axis=2))

    def losses(**how: bool) -> list[float]:
        model = build_model(n_clusters=0, side=32, backbone="resnet18", seed=0)
        settings = method_settings(name, {"device": "cuda", "log_every": 10, "evaluate_every": 1_000, **how})
        log = METHODS[name](model, images, n_clusters=10, epochs=20, settings=settings).log
        return [entry["loss"] for entry in log if entry["kind"] == "training"]

    np.testing.assert_allclose(losses(), losses(compile=False, cuda_graph=False, bf16=False), rtol=0.1)
