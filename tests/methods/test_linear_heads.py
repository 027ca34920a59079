"""Linear cluster heads on frozen features: what they find, how the best is chosen, how it begins a training."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import accuracy, nearest_neighbours, predict
from constraintmatch.methods import METHODS, heads
from constraintmatch.methods.heads import (
    NEVER,
    LinearHead,
    _bound,
    agreed_clusters,
    best_linear_head,
    correct_head,
    head_losses,
    regression_head,
    steady_head,
)
from constraintmatch.models.cluster_model import build_model, with_head
from constraintmatch.training.loop import TrainSettings
from constraintmatch.training.losses import scan_loss

RNG = np.random.Generator(np.random.Philox(3))
LABELS = RNG.integers(0, 5, 400)
POINTS = (3 * np.eye(5, 12)[LABELS] + RNG.standard_normal((400, 12)) + 50).astype(np.float32)  # far from the origin
FEATURES = torch.from_numpy(POINTS)
NEAR = torch.from_numpy(nearest_neighbours(POINTS - POINTS.mean(0), 10))


def found(n_heads: int, steps: int = 150, seed: int = 0) -> tuple[float, torch.Tensor]:
    head = best_linear_head(FEATURES, NEAR, 5, n_heads=n_heads, steps=steps, seed=seed)
    clusters = (FEATURES @ head.weight.T + head.bias).argmax(-1).numpy()
    return accuracy(LABELS, clusters), head.losses


def test_the_best_head_finds_groups_without_labels() -> None:
    score, losses = found(8)
    assert score > 0.9
    assert losses.shape == (8,)


def test_the_loss_of_the_head_that_is_given_back_is_the_lowest() -> None:
    head = best_linear_head(FEATURES, NEAR, 5, n_heads=6, steps=40)
    p = (FEATURES @ head.weight.T + head.bias).softmax(-1)
    columns = torch.linspace(0, 9, 5).long()
    judged = torch.stack([scan_loss(p, p[NEAR[:, column]]) for column in columns]).mean()
    assert float(judged) == pytest.approx(float(head.losses.min()), abs=1e-3)


def test_no_head_is_surer_than_it_may_be() -> None:
    apart = torch.from_numpy((1_000 * np.eye(5, 12)[LABELS] + RNG.standard_normal((400, 12))).astype(np.float32))
    head = best_linear_head(apart, NEAR, 5, n_heads=4, steps=200)
    sure = (apart @ head.weight.T + head.bias).softmax(-1).amax(-1).mean()
    assert 0.9 < float(sure) <= 0.981


@pytest.mark.parametrize(("n_heads", "n_voters"), [(1, 1), (9, 1), (24, 3), (24, 24)])
def test_a_steady_head_says_what_the_voters_say(n_heads: int, n_voters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best eighth, or all heads where these do not agree on enough images."""
    monkeypatch.setattr(heads, "STEADY", 1.01 if n_voters == n_heads else 0.0)
    head = best_linear_head(FEATURES, NEAR, 5, n_heads=n_heads, steps=100)
    said = torch.stack([(FEATURES @ w.T + b).softmax(-1) for w, b in zip(*head.voters, strict=True)])
    weight, bias = steady_head(FEATURES, head)
    agreed, share = agreed_clusters(said[:n_voters])
    assert float((agreed == (FEATURES @ weight.T + bias).argmax(-1)).float().mean()) > 0.97
    assert (share == 1.0) == (n_voters == 1)
    assert float(weight.norm()) < 10 * float(head.weight.norm())


def test_all_heads_may_vote_and_the_best_is_first() -> None:
    head = best_linear_head(FEATURES, NEAR, 5, n_heads=17, steps=20)
    judged = head_losses(FEATURES, NEAR, *head.voters)
    torch.testing.assert_close(judged, head.losses.sort().values, rtol=0, atol=2e-3)
    clusters, first = ((FEATURES @ w.T + b).argmax(-1) for w, b in (head[:2], (part[0] for part in head.voters)))
    assert torch.equal(clusters, first)


def test_a_head_that_leaves_a_cluster_empty_is_given_back_as_it_is() -> None:
    head = best_linear_head(FEATURES, NEAR, 5, n_heads=1, steps=1)
    full = torch.tensor([[1e9, 0, 0, 0, 0]])
    weight, bias = steady_head(FEATURES, head._replace(voters=(head.voters[0], full)))
    assert torch.equal(weight, head.weight)
    assert torch.equal(bias, head.bias)


def test_clusterings_with_other_numbers_agree_on_what_most_say() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(6, (500,), generator=generator)
    votes = []
    for _ in range(9):  # each is wrong about 30 % of the images, and numbers the clusters in its own way
        wrong = torch.rand(500, generator=generator) < 0.3
        said = torch.where(wrong, torch.randint(6, (500,), generator=generator), truth)
        votes.append(torch.eye(6)[torch.randperm(6, generator=generator)[said]])
    agreed, share = agreed_clusters(torch.stack(votes))
    assert 0.7 < share < 0.8
    assert max(accuracy(truth.numpy(), vote.argmax(-1).numpy()) for vote in votes) < 0.8
    assert accuracy(truth.numpy(), agreed.numpy()) > 0.98
    own = votes[0].argmax(-1)
    assert torch.equal(agreed_clusters(votes[0][None])[0], own)  # one alone is as it is
    assert accuracy(own.numpy(), agreed.numpy()) == pytest.approx(float((own == agreed).float().mean()))  # its numbers


def test_the_same_seed_finds_the_same_head_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (best_linear_head(FEATURES, NEAR, 5, n_heads=2, steps=5, seed=1) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first.weight, best_linear_head(FEATURES, NEAR, 5, n_heads=2, steps=5, seed=2).weight)


@pytest.mark.usefixtures("quick_heads")
def test_scan_begins_with_the_best_head(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["constraintmatch.methods.scan"]
    seen: list[torch.Tensor] = []
    real = module.steady_head

    def noting(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = real(*arguments)
        seen.append(weight.clone())
        return weight, bias

    monkeypatch.setattr(module, "steady_head", noting)
    pixels = RNG.integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
    model = build_model(n_clusters=0, side=8, channels=1, backbone="tiny")
    still = TrainSettings(steps=1, lr=1e-30, optimizer="adam", schedule="constant", device="cpu")
    images = ImageSet.from_arrays(pixels)
    options = {"n_clusters": 3, "epochs": 1, "images_per_step": 60, "n_neighbours": 4, "settings": still}
    trained = METHODS["scan"](model, images, n_tries=2, **options).model
    assert torch.allclose(trained.head.weight, seen[0], atol=1e-6)
    METHODS["scan"](model, images, n_tries=0, **options)
    METHODS["scan"](trained, images, n_tries=2, **options)  # it has this many clusters already
    assert len(seen) == 1


def bars() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A bright bar at one of three heights."""
    labels = np.repeat(np.arange(3), 40)
    pixels = np.zeros((120, 8, 8, 1), np.uint8)
    for row, label in enumerate(labels):
        pixels[row, 2 * label : 2 * label + 2] = 200
    return pixels + RNG.integers(0, 30, pixels.shape, dtype=np.uint8), labels


def test_losses_of_given_heads_are_those_of_their_training() -> None:
    features = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    near = torch.from_numpy(nearest_neighbours(features.numpy(), 5))
    weights, biases = torch.randn(3, 4, 5), torch.randn(3, 4)
    for at, loss in enumerate(head_losses(features, near, weights, biases, entropy_weight=2.0)):
        p = (features @ weights[at].T + biases[at]).softmax(-1)
        each = [scan_loss(p, p[near[:, column]], entropy_weight=2.0) for column in range(5)]
        assert float(loss) == pytest.approx(float(torch.stack(each).mean()), abs=1e-4)


def test_linear_scan_gives_up_a_head_only_for_a_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, labels = bars()
    images, settings = ImageSet.from_arrays(pixels, labels=labels), TrainSettings(device="cpu")
    unlearnt = build_model(n_clusters=3, side=8, channels=1, backbone="tiny", seed=2)
    good = METHODS["linear_scan"](unlearnt, images, n_clusters=3, n_tries=6, settings=settings).model
    assert accuracy(labels, predict(good, images).clusters) > 0.95
    module = sys.modules["constraintmatch.methods.scan"]

    def unlucky(*arguments: Any, **options: Any) -> LinearHead:
        head = best_linear_head(*arguments, **options, steps=5)
        return head._replace(losses=head.losses + 5)

    monkeypatch.setattr(module, "best_linear_head", unlucky)
    assert METHODS["linear_scan"](good, images, n_clusters=3, n_tries=1, settings=settings).model is good


def test_linear_scan_leaves_the_backbone_and_finds_what_the_features_tell_apart() -> None:
    pixels, labels = bars()
    model = build_model(n_clusters=0, side=8, channels=1, backbone="tiny", seed=2)
    settings = TrainSettings(device="cpu")
    placed, log = METHODS["linear_scan"](
        model, ImageSet.from_arrays(pixels), n_clusters=3, n_tries=6, settings=settings
    )
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, placed.backbone.state_dict()[name])
    with torch.no_grad():
        found = placed.eval()(torch.from_numpy(pixels).permute(0, 3, 1, 2)).argmax(-1).numpy()
    assert accuracy(labels, found) > 0.95
    assert log[-1]["kind"] == "evaluation"


def test_linear_scan_needs_a_head() -> None:
    images = ImageSet.from_arrays(RNG.integers(0, 256, (30, 8, 8, 1), dtype=np.uint8))
    model = build_model(n_clusters=0, side=8, channels=1, backbone="tiny")
    with pytest.raises(InputError, match="n_tries is 0; linear_scan needs 1 or more"):
        METHODS["linear_scan"](model, images, n_clusters=3, n_tries=0)


def test_sure_heads_give_no_subnormal_numbers_and_the_same_probabilities() -> None:
    logits = torch.linspace(-120, 0, 400).repeat(2, 1).requires_grad_()
    plain = logits.softmax(-1)
    assert bool(((plain > 0) & (plain < torch.finfo(torch.float32).tiny)).any())  # what makes a CPU slow
    bounded = _bound(logits).softmax(-1)
    assert float(bounded.detach().min()) >= torch.finfo(torch.float32).tiny
    torch.testing.assert_close(bounded, plain, rtol=1e-6, atol=1e-33)
    ours, theirs = (torch.autograd.grad((p * torch.arange(400)).sum(), logits)[0] for p in (bounded, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30)


def test_images_that_count_little_hardly_change_a_head() -> None:
    rng, kinds = np.random.default_rng(0), np.arange(90) % 3
    features = (4 * np.eye(3, 6)[kinds] + rng.normal(size=(90, 6))).astype(np.float32)
    wrong = np.arange(90) >= 60
    given = np.where(wrong, (kinds + 1) % 3, kinds)

    def right(sure: np.ndarray | None) -> float:
        weight, bias = regression_head(features, given, 3, sure)
        return float(((torch.from_numpy(features) @ weight.T + bias).argmax(1).numpy() == kinds).mean())

    assert right(np.where(wrong, 0.0, 1.0)) == 1
    assert right(np.where(wrong, 1.0, 0.0)) == 0
    same = (regression_head(features, given, 3, sure) for sure in (None, np.full(90, 0.3)))
    one, other = (weight.numpy() for weight, _ in same)
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_corrected_head_has_a_share_of_a_difference_and_its_empty_clusters_stay_empty() -> None:
    rng, model = np.random.default_rng(0), build_model(n_clusters=0, side=1, channels=4)
    heads = [torch.from_numpy(rng.normal(size=(3, 4))).float() for _ in range(3)]
    biases = [torch.from_numpy(rng.normal(size=3)).float() for _ in range(3)]
    biases[2][1] = NEVER
    found = correct_head(*(with_head(model, *one) for one in zip(heads, biases, strict=True)), 0.25).state_dict()
    expected = heads[0] + (heads[1] - heads[2]) / 4
    torch.testing.assert_close(found["head.weight"][[0, 2]], expected[[0, 2]])
    torch.testing.assert_close(found["head.weight"][1], heads[0][1])
    assert found["head.bias"][1] == biases[0][1]
