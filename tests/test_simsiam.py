import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from constraintmatch.batches import Views, map_tensors
from constraintmatch.errors import InputError
from constraintmatch.evaluation import embed, predict, scores
from constraintmatch.images import ImageSet
from constraintmatch.methods.k_means import k_means
from constraintmatch.methods.preparation import Trained
from constraintmatch.methods.simsiam import Siamese, simsiam
from constraintmatch.models import ClusterModel, build_model, with_projection
from constraintmatch.training import TrainSettings

QUICK = TrainSettings(device="cpu", lr=1.0, weight_decay=5e-4, schedule="cosine", log_every=5)


def fresh(n_clusters: int = 0) -> ClusterModel:
    return build_model(n_clusters=n_clusters, side=8, channels=1, seed=1)


def run(images: ImageSet, **arguments: Any) -> Trained:
    return simsiam(fresh(), images, **{"projection": 32, "epochs": 6, "settings": QUICK, **arguments})


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def siamese(projection: int = 32) -> Siamese:
    torch.manual_seed(0)
    return Siamese(with_projection(fresh(), 0), projection)


def some_images(n: int = 12) -> Tensor:
    return torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_the_loss_falls_and_the_features_do_not_collapse(stripes: ImageSet) -> None:
    model, log = run(stripes, epochs=15)
    losses = [entry["loss_prediction"] for entry in log]
    assert losses[-1] < 0.85 * losses[0]
    features = embed(model, stripes)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    assert np.sqrt(unit.var(axis=0).sum()) > 0.3  # 0 where all images have one direction
    clustered, _ = k_means(model, stripes, n_clusters=3, settings=TrainSettings(device="cpu"))
    assert scores(stripes.labels, predict(clustered, stripes))["acc"] > 0.8


def test_the_model_has_the_trained_backbone_and_no_head(stripes: ImageSet) -> None:
    start = fresh(3)
    before = weights(start)
    model = simsiam(start, stripes, projection=16, epochs=2, settings=QUICK).model
    assert_equal(weights(start), before)
    assert (model.config.n_clusters, model.config.projection, model.head, model.projection) == (0, 0, None, None)
    assert not torch.equal(model.backbone[0].weight, start.backbone[0].weight)


def test_the_same_seed_gives_the_same_weights(stripes: ImageSet) -> None:
    few = stripes.take(np.arange(20))
    first = run(few, epochs=2).model
    torch.rand(3)  # somebody else's draw changes nothing
    assert_equal(weights(first), weights(run(few, epochs=2).model))
    other = run(few, epochs=2, settings=replace(QUICK, seed=1)).model
    assert not torch.equal(first.backbone[0].weight, other.backbone[0].weight)


class Recorder:
    """Takes the place of `fit` and notes the module, its loss and the first batch."""

    def __init__(self, fit: Callable[..., Any]) -> None:
        self.fit = fit

    def __call__(self, module: Siamese, next_batch: Any, loss: Any, *args: Any, **more: Any) -> Any:
        self.module, self.loss, self.batch = module, loss, map_tensors(next_batch(0), torch.clone)
        return self.fit(module, next_batch, loss, *args, **more)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    file = importlib.import_module("constraintmatch.methods.simsiam")
    found = Recorder(file.fit)
    monkeypatch.setattr(file, "fit", found)
    return found


def test_the_loss_is_the_distance_to_the_other_view_averaged_over_both_directions(
    stripes: ImageSet, recorder: Recorder
) -> None:
    """‖p/‖p‖ − z/‖z‖‖² between the prediction from one view and the projection of the other, in float64."""
    still = replace(QUICK, lr=1e-12, weight_decay=0.0)  # so that the network after the step is the one before it
    log = run(stripes, epochs=1, settings=still).log
    batch: Views = recorder.batch
    n = len(batch.weak)
    assert not torch.equal(batch.weak, batch.strong)
    with torch.no_grad():
        p, z = recorder.module(torch.cat((batch.weak, batch.strong))).double()
    across = [*zip(p[:n], z[n:], strict=True), *zip(p[n:], z[:n], strict=True)]
    distances = [float((a / a.norm() - b / b.norm()).square().sum()) for a, b in across]
    assert log[-1]["loss_prediction"] == pytest.approx(sum(distances) / (2 * n), rel=1e-4)


def test_projections_are_standardised_and_the_predictor_is_narrow() -> None:
    network = siamese(32).train()
    prediction, projection = network(some_images(64)).detach()
    assert prediction.shape == projection.shape == (64, 32)
    torch.testing.assert_close(projection.mean(0), torch.zeros(32), atol=1e-5, rtol=0)
    torch.testing.assert_close(projection.var(0, unbiased=False), torch.ones(32), atol=1e-2, rtol=0)
    assert network.predictor[0].weight.shape == (8, 32)


def test_the_other_view_only_gives_the_aim_and_has_no_gradient(stripes: ImageSet, recorder: Recorder) -> None:
    """The gradient is that of the distance to fixed vectors, the projections of a pass without a graph."""
    run(stripes, epochs=1)
    network, batch = recorder.module.train(), recorder.batch
    images = torch.cat((batch.weak, batch.strong))
    network.zero_grad()
    recorder.loss(network, batch)["prediction"].backward()
    found = {name: value.grad.clone() for name, value in network.named_parameters()}
    network.zero_grad()
    with torch.no_grad():
        aim = torch.nn.functional.normalize(network(images)[1].roll(len(batch.weak), 0), dim=1)
    (2 - 2 * torch.nn.functional.cosine_similarity(network(images)[0], aim)).mean().backward()
    for name, value in network.named_parameters():
        torch.testing.assert_close(found[name], value.grad, atol=1e-6, rtol=1e-4)
    assert found["projector.0.weight"].abs().max() > 1e-5


def test_the_network_compiles_in_one_piece() -> None:
    network = siamese().train()
    images = some_images()
    expected = network(images)
    found = torch.compile(network, dynamic=False, fullgraph=True, backend="aot_eager")(images)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("n", [7, 61])
def test_sets_smaller_than_a_batch_are_taken_whole_and_the_rate_fits(stripes: ImageSet, n: int) -> None:
    log = run(stripes.take(np.arange(n) % len(stripes)), epochs=1, settings=replace(QUICK, lr=0.512)).log
    assert log[-1]["step"] == 1
    assert log[-1]["lr"] == pytest.approx(n / 1000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 0}, "epochs is 0; simsiam needs 1 or more"),
        ({"images_per_step": 3}, "images_per_step is 3; simsiam needs 4 or more"),
        ({"projection": 1}, "projection is 1; simsiam needs 2 or more"),
    ],
)
def test_impossible_arguments_get_one_line(stripes: ImageSet, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(stripes, **change)


def test_images_it_cannot_use_get_one_line(stripes: ImageSet) -> None:
    with pytest.raises(InputError, match="needs at least 4; there are 3"):
        run(stripes.take([0, 1, 2]))
