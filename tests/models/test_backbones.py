"""BatchNorm that keeps batches apart: the same as torch's on each batch by itself, values, gradients and statistics."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed
from constraintmatch.models.backbones import BatchNorm, apart, can_keep_apart, passes
from constraintmatch.models.cluster_model import build_model, wrap_encoder

SIZES = [(4, 6), (4, 4), (2, 6, 5), (5,), (6, 2)]


def images(n: int, seed: int, channels: int = 3, side: int = 5) -> Tensor:
    """Images far from zero, as sums of squares would lose them."""
    made = torch.randn((n, channels, side, side), generator=torch.Generator().manual_seed(seed))
    return (2 * made + 30).contiguous(memory_format=torch.channels_last)


def norm_like(own: BatchNorm) -> nn.BatchNorm2d:
    theirs = nn.BatchNorm2d(own.num_features)
    theirs.load_state_dict(own.state_dict())
    return theirs


def fresh_norm() -> BatchNorm:
    norm = BatchNorm(3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 1.0, -2.0]))
        norm.bias.copy_(torch.tensor([1.0, 0.0, 3.0]))
    return norm


@pytest.mark.parametrize("sizes", SIZES)
def test_parts_are_normed_like_batches_of_their_own(sizes: tuple[int, ...]) -> None:
    ours = fresh_norm().double()
    theirs = norm_like(ours).double()
    joint = images(sum(sizes), 0).double().requires_grad_()
    single = joint.detach().clone().requires_grad_()
    weights = images(sum(sizes), 1)
    with apart(ours, sizes):
        found = ours(joint)
    expected = torch.cat([theirs(part) for part in single.split(sizes)])
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(found, expected), (joint.grad, single.grad), (ours.weight.grad, theirs.weight.grad)]
    pairs += [(ours.bias.grad, theirs.bias.grad)]
    pairs += [(getattr(ours, name), getattr(theirs, name)) for name in ("running_mean", "running_var")]
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_one_batch_is_normed_as_by_torch() -> None:
    ours = fresh_norm()
    theirs = norm_like(ours)
    for step in range(3):
        assert torch.equal(ours(images(8, step)), theirs(images(8, step)))
    with apart(ours.eval(), (3, 5)):  # parts matter while training only
        assert torch.equal(ours(images(8, 9)), theirs.eval()(images(8, 9)))
    assert torch.equal(ours.running_var, theirs.running_var)


def test_halves_and_layout_survive() -> None:
    norm = fresh_norm()
    with apart(norm, (2, 6)):
        found = norm(images(8, 0).bfloat16())
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("backbone", ["tiny", "resnet18"])
def test_a_joint_pass_says_what_single_passes_say(backbone: str) -> None:
    joint = build_model(n_clusters=3, side=8, backbone=backbone).train().double()
    single = copy.deepcopy(joint)
    batches = [torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8) for n in (4, 8)]
    found = passes(joint, joint, *batches, joint=True)
    expected = passes(single, single, *batches, joint=False)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
    for left, right in zip(joint.buffers(), single.buffers(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
    mixed = joint(torch.cat(batches))  # outside nothing is kept apart
    assert not torch.allclose(mixed[:4], found[0], atol=1e-2)


def test_a_joint_pass_takes_one_call_of_the_network() -> None:
    model = build_model(n_clusters=3, side=8, backbone="tiny").train()
    sizes = []

    def network(batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        return model(batch)

    batches = [torch.zeros((n, 3, 8, 8), dtype=torch.uint8) for n in (4, 8)]
    passes(network, model, *batches, joint=True)
    passes(network, model, *batches, joint=False)
    model.backbone.append(nn.BatchNorm1d(model.width))  # not ours: its statistics would be mixed
    passes(network, model, *batches, joint=True)
    assert sizes == [12, 4, 8, 4, 8]


def test_norms_of_others_are_not_kept_apart() -> None:
    assert can_keep_apart(nn.Sequential(nn.Conv2d(3, 3, 1), BatchNorm(3)))
    assert can_keep_apart(nn.LayerNorm(3))
    assert not can_keep_apart(nn.Sequential(BatchNorm(3), nn.BatchNorm1d(3)))
    assert not can_keep_apart(nn.BatchNorm2d(3))


def test_parts_are_forgotten_when_a_pass_fails() -> None:
    norm = fresh_norm()
    with pytest.raises(RuntimeError), apart(norm, (2, 2)):
        norm(images(7, 0))
    assert norm.parts == ()


def test_both_kinds_of_pass_are_compiled_once() -> None:
    model = build_model(n_clusters=3, side=8, backbone="tiny").train()
    plain, graphs = copy.deepcopy(model), list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=keep)
    batches = [torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8) for n in (4, 8)]
    for _ in range(3):  # a single pass before the first joint one, as in a step
        found = [compiled(batches[1]), *passes(compiled, model, *batches, joint=True)]
        expected = [plain(batches[1]), *passes(plain, plain, *batches, joint=True)]
        for left, right in zip(found, expected, strict=True):
            torch.testing.assert_close(left, right)
    assert len(graphs) == 2


@pytest.mark.parametrize("pretrained", [True, False])
def test_the_norms_of_a_pretrained_network_keep_their_statistics_while_it_learns(pretrained: bool) -> None:
    """Those of a few views in their place cost three points before the first weight has changed."""
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
    network = wrap_encoder(body, "module:Small", 8) if pretrained else build_model(n_clusters=0, side=8, channels=3)
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in network.named_buffers() if "running" in name}
    network.train().features(images)[:, 0].sum().backward()
    after = dict(network.named_buffers())
    assert {torch.equal(after[name], value) for name, value in before.items()} == {pretrained}
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in network.parameters())
    assert body[2].training  # everything else learns as usual
    embed(network, ImageSet.from_arrays(images.permute(0, 2, 3, 1).numpy()))  # as an evaluation between two steps
    norms = [part for part in network.modules() if isinstance(part, nn.BatchNorm2d)]
    assert {norm.training for norm in norms} == {not pretrained}
    assert not any(part.training for part in network.eval().modules())
