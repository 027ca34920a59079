import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr
from scipy.stats import entropy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from constraintmatch.training import losses
from constraintmatch.training.losses import (
    all_pairs_loss,
    angular_loss,
    balanced_confident_cross_entropy,
    cluster_contrast,
    confident,
    cosine_loss,
    expert_scores,
    flip_modes,
    hard_links,
    informative,
    kcl,
    mean_entropy,
    normalized_entropy,
    nt_xent,
    pair_loss,
    pair_scores,
    partition_loss,
    prototype_loss,
    pseudo_label_loss,
    scan_loss,
    set_contrast,
    soft_cross_entropy,
    soft_links,
    swap_clusters,
    triplet_loss,
)

SIZES = [(0, 3), (1, 2), (1, 1), (2, 2), (2, 5), (7, 10), (5, 2000)]


def rows(n: int, k: int, seed: int = 0, *, sharp: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random probability rows; the sharper, the nearer to one-hot."""
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=dtype).mul(sharp).softmax(-1)


def numbers(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@st.composite
def simplex(draw: st.DrawFn, n: int | None = None, k: int | None = None) -> Tensor:
    """Rows that may be one-hot, even, equal to each other, or hold exact zeros."""
    n = draw(st.integers(0, 6)) if n is None else n
    k = draw(st.integers(2, 6)) if k is None else k
    row = st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1.0)), min_size=k, max_size=k).filter(lambda r: sum(r) > 0)
    table = np.array(draw(st.lists(row, min_size=n, max_size=n)), np.float64).reshape(n, k)
    return torch.from_numpy(table / table.sum(1, keepdims=True))


def extremes(dtype: torch.dtype) -> Tensor:
    """Rows with exact zeros and ones, equal and disjoint supports, an even row, a denormal probability."""
    table = [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0.5, 0.5, 0], [0, 0.5, 0.5], [1 / 3] * 3, [1, 1e-42, 0], [1, 1e-20, 0]]
    return torch.tensor(table, dtype=dtype)


def softmax_gradient(function, logits: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(logits.softmax(-1)), logits)
    return gradient


# The pair losses


@pytest.mark.parametrize(("n", "k"), SIZES[1:])
def test_pair_loss_is_the_binary_cross_entropy_of_inner_products(n: int, k: int) -> None:
    left, right, link, weight = rows(n, k, 1), rows(n, k, 2), numbers(n, 3), numbers(n, 4)
    scores = (left * right).sum(-1).clamp(max=1)
    torch.testing.assert_close(pair_scores(left, right), scores, atol=1e-12, rtol=1e-12)
    if k == 1:
        assert pair_loss(left, right, torch.ones(n)) == 0
        return
    each = F.binary_cross_entropy(scores, link, reduction="none")
    torch.testing.assert_close(pair_loss(left, right, link), each.mean(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(pair_loss(left, right, link, mean=False), each.sum(), atol=1e-9, rtol=1e-9)
    weighted = (each * weight).sum() / weight.sum()
    torch.testing.assert_close(pair_loss(left, right, link, weight), weighted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("rate", [0.01, 0.2, 0.49])
def test_an_error_rate_gives_the_likelihood_of_links_of_which_some_were_turned_round(rate: float) -> None:
    left, right, link = rows(20, 4, 1), rows(20, 4, 2), (numbers(20, 3) < 0.5).double()
    expected = []
    for p, q, said in zip(left.tolist(), right.tolist(), link.tolist(), strict=True):
        same = sum(a * b for a, b in zip(p, q, strict=True))
        true = {1.0: same, 0.0: 1 - same}
        expected.append(-math.log((1 - rate) * true[said] + rate * true[1 - said]))
    found = pair_loss(left, right, link, error_rate=rate)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).mean())
    everything = all_pairs_loss(left, soft_links(right), torch.ones(20), error_rate=rate)
    one, other = (index.flatten() for index in torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij"))
    each = pair_loss(left[one], left[other], soft_links(right).flatten(), error_rate=rate)
    torch.testing.assert_close(everything, each)


@pytest.mark.parametrize(("missed", "invented"), [(0.2, 0.0), (0.0, 0.1), (0.3, 0.05), (0.0, 0.0)])
def test_two_error_rates_give_the_likelihood_of_links_missed_and_invented(missed: float, invented: float) -> None:
    left, right, link = rows(30, 4, 1), rows(30, 4, 2), (numbers(30, 3) < 0.5).double()
    same = (left.numpy() * right.numpy()).sum(1)
    says_same = same * (1 - missed) + (1 - same) * invented
    expected = -np.where(link.numpy() == 1, np.log(says_same), np.log(1 - says_same))
    found = pair_loss(left, right, link, error_rate=(missed, invented))
    assert float(found) == pytest.approx(expected.mean(), rel=1e-9)
    torch.testing.assert_close(found, F.binary_cross_entropy(torch.from_numpy(says_same), link), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.4])
def test_two_equal_error_rates_are_the_one(rate: float) -> None:
    left, right, link = rows(20, 4, 1), rows(20, 4, 2), numbers(20, 3)
    one, two = (pair_loss(left, right, link, error_rate=told) for told in (rate, (rate, rate)))
    torch.testing.assert_close(two, one)


@pytest.mark.parametrize("told", [0.0, 0.1, (0.0, 0.2), (0.3, 0.05)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_rates_may_be_tensors(told: float | tuple[float, float], dtype: torch.dtype) -> None:
    left, right, link = rows(20, 4, 1).to(dtype), rows(20, 4, 2).to(dtype), numbers(20, 3)
    expected = pair_loss(left, right, link, error_rate=told)
    for exact in (True, False):
        precision = torch.float64 if exact else torch.float32
        rates = tuple(torch.tensor(rate, dtype=precision) for rate in (told if isinstance(told, tuple) else (told,)))
        found = pair_loss(left, right, link, error_rate=rates if len(rates) == 2 else rates[0])
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 0}))
        if len(rates) == 1:
            everything = [all_pairs_loss(left, soft_links(right), torch.ones(20), error_rate=e) for e in (told, *rates)]
            torch.testing.assert_close(everything[1], everything[0], rtol=0 if exact else 1e-6, atol=0)


def test_another_error_rate_in_a_tensor_needs_no_other_graph() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    left, right, link = rows(6, 4, 1), rows(6, 4, 2), numbers(6, 3)
    compiled = torch.compile(pair_loss, fullgraph=True, dynamic=False, backend=backend)
    for rates in ((0.1, 0.2), (0.0, 0.3), (0.05, 0.0)):
        tensors = tuple(torch.tensor(rate, dtype=torch.float64) for rate in rates)
        torch.testing.assert_close(
            compiled(left, right, link, error_rate=tensors), pair_loss(left, right, link, error_rate=rates)
        )
    assert len(graphs) == 1


@pytest.mark.parametrize(("told", "link"), [((0.1, 0.0), 0.0), ((0.0, 0.1), 1.0)])
def test_an_error_of_one_kind_is_expected_of_that_kind_only(told: tuple[float, float], link: float) -> None:
    together, apart = (torch.tensor([at], requires_grad=True) for at in ([30.0, 0.0, 0.0], [0.0, 30.0, 0.0]))
    fixed = torch.tensor([[30.0, 0.0, 0.0]]).softmax(-1)
    contradicted, other = (together, apart) if link == 0 else (apart, together)
    for logits, said, pulled in ((contradicted, link, False), (other, 1 - link, True)):
        loss = pair_loss(logits.softmax(-1), fixed, torch.tensor([said]), error_rate=told)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert (gradient.abs().max().item() > 0.3) == pulled


def test_an_expected_error_pulls_no_sure_pair_apart() -> None:
    sure = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)
    for rate, pull in ((0.0, 0.5), (0.1, 0.0)):
        p = sure.softmax(-1)
        (gradient,) = torch.autograd.grad(pair_loss(p, p.detach(), torch.zeros(1), error_rate=rate), sure)
        assert gradient.abs().max().item() == pytest.approx(pull, abs=1e-3)


def test_pair_loss_in_fp32_agrees_with_float64_to_1e_6() -> None:
    left, right, link = rows(500, 10, 1, sharp=6), rows(500, 10, 2, sharp=6), numbers(500)
    difference = pair_loss(left.float(), right.float(), link.float()) - pair_loss(left, right, link)
    assert difference.abs() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", [pair_loss, kcl])
def test_pair_losses_and_gradients_are_finite_for_exact_zeros_and_ones(loss, dtype: torch.dtype) -> None:
    p = extremes(dtype)
    left, right = (
        side.reshape(-1, 3).clone().requires_grad_() for side in (p[:, None].expand(8, 8, 3), p.expand(8, 8, 3))
    )
    for link in (0.0, 0.5, 1.0):
        value = loss(left, right, torch.full((64,), link))
        assert torch.isfinite(value)
        assert value >= 0
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(value, [left, right]))


@pytest.mark.parametrize("gap", [5.0, 20.0, 40.0, 80.0])
def test_a_sure_but_wrong_pair_keeps_a_gradient_of_order_one(gap: float) -> None:
    one, other = torch.tensor([[gap, 0.0, 0.0]]), torch.tensor([[0.0, gap, 0.0]])
    apart = softmax_gradient(lambda p: pair_loss(p, p.detach(), torch.zeros(1)), one)
    together = softmax_gradient(lambda p: pair_loss(p, other.softmax(-1), torch.ones(1)), one)
    assert 0.3 < apart.abs().max() <= 1
    assert 0.3 < together.abs().max() <= 1


@pytest.mark.parametrize("loss", [pair_loss, kcl])
def test_a_mean_over_no_pairs_is_zero_and_has_a_graph(loss) -> None:
    for n, weight in ((0, None), (2, torch.zeros(2))):
        p = rows(n, 3).requires_grad_()
        value = loss(p, p, torch.ones(n), weight)
        assert value == 0
        assert torch.equal(torch.autograd.grad(value, p)[0], torch.zeros(n, 3, dtype=torch.float64))


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_triplet_loss_is_the_likelihood_of_answers_that_are_a_coin_where_kinds_do_not_decide(rate: float) -> None:
    """Summed over the kinds of all three images, one by one."""
    draw = torch.Generator().manual_seed(0)
    anchor, near, far = torch.randn(3, 20, 4, generator=draw, dtype=torch.float64).mul(2).softmax(-1)
    likelihood = torch.zeros(20, dtype=torch.float64)
    for a, n, f in itertools.product(range(4), repeat=3):
        says_near = 0.5 if (a == n) == (a == f) else 1 - rate if a == n else rate
        likelihood += anchor[:, a] * near[:, n] * far[:, f] * says_near
    weight = torch.arange(20.0)
    found = triplet_loss(pair_scores(anchor, near), pair_scores(anchor, far), weight, error_rate=rate)
    assert found.item() == pytest.approx(float((-likelihood.log() * weight).sum() / weight.sum()))


def test_a_sure_but_wrong_triplet_has_a_finite_loss_and_gradient() -> None:
    near, far = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    loss = triplet_loss(near, far, error_rate=0.05)
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(0.05), rel=1e-5)
    assert near.grad.item() == pytest.approx(-9, rel=1e-4)


def test_a_soft_link_in_the_angular_loss_is_both_kinds_in_parts() -> None:
    one, other = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(1))
    both = torch.cat((one, one)), torch.cat((other, other))
    soft = losses.angular_loss(one, other, torch.tensor([0.7]))
    assert soft.item() == pytest.approx(losses.angular_loss(*both, torch.tensor([1.0, 0.0])).item())


def test_kcl_is_symmetric_kl_for_must_links_and_a_hinge_for_cannot_links() -> None:
    left, right, margin = rows(20, 4, 1, sharp=1), rows(20, 4, 2, sharp=1), 2.0
    there = rel_entr(left.numpy(), right.numpy()).sum(1)
    back = rel_entr(right.numpy(), left.numpy()).sum(1)
    hinges = np.maximum(0, margin - there) + np.maximum(0, margin - back)
    assert ((hinges > 0) & (hinges < margin)).any()  # the hinge must bite for some and not for others
    assert float(kcl(left, right, torch.ones(20))) == pytest.approx(np.mean(there + back), abs=1e-9)
    assert float(kcl(left, right, torch.zeros(20))) == pytest.approx(np.mean(hinges), abs=1e-9)
    soft = kcl(left, right, torch.full((20,), 0.25))
    assert float(soft) == pytest.approx(np.mean(0.25 * (there + back) + 0.75 * hinges), abs=1e-9)


@given(simplex(n=4, k=5), simplex(n=4, k=5), st.permutations(range(5)))
@settings(max_examples=30, deadline=None)
def test_pair_losses_are_symmetric_and_do_not_see_the_names_of_clusters(p: Tensor, q: Tensor, order: list[int]) -> None:
    link = torch.tensor([0.0, 0.3, 0.7, 1.0])
    for loss in (pair_loss, kcl):
        value = loss(p, q, link)
        torch.testing.assert_close(loss(q, p, link), value, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(loss(p[:, order], q[:, order], link), value, atol=1e-9, rtol=1e-9)


# Entropy and selection


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_normalized_entropy_is_scipys_over_log_k(n: int, k: int) -> None:
    p = rows(n, k)
    expected = np.zeros(n) if k == 1 else entropy(p.numpy(), axis=1) / math.log(k)
    np.testing.assert_allclose(normalized_entropy(p).numpy(), expected, atol=1e-9)
    np.testing.assert_allclose(normalized_entropy(p.float()).numpy(), expected, atol=1e-6)


@given(simplex())
@settings(max_examples=30, deadline=None)
def test_normalized_entropy_lies_between_zero_and_one_and_is_blind_to_names(p: Tensor) -> None:
    for q in (p, p.float()):
        h = normalized_entropy(q)
        assert ((h >= 0) & (h <= 1)).all()
        torch.testing.assert_close(normalized_entropy(q.flip(-1)), h, atol=1e-6, rtol=0)


@pytest.mark.parametrize("k", [2, 3, 10, 2000])
def test_entropy_is_zero_for_sure_rows_and_one_for_even_rows(k: int) -> None:
    assert (normalized_entropy(torch.eye(k)[:2]) == 0).all()
    torch.testing.assert_close(normalized_entropy(torch.full((1, k), 1 / k)), torch.ones(1), atol=1e-6, rtol=0)


def test_selection_is_strict_for_entropy_and_inclusive_for_confidence() -> None:
    p = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.75, 0.25], [0.5, 0.5]])
    h = normalized_entropy(p)
    assert informative(p, float(h[1])).tolist() == [True, False, False, False]
    assert informative(p, 0.0).tolist() == [False] * 4
    assert confident(p, 0.75).tolist() == [True, True, True, False]
    assert confident(p.bfloat16(), 0.75).tolist() == [True, True, True, False]


def test_two_modes_are_informative_but_not_confident() -> None:
    p = torch.zeros(1, 20)
    p[0, :2] = 0.5
    assert informative(p, 0.3).all()
    assert not confident(p, 0.7).any()


# Soft links


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("sharp", [0.1, 1.0, 10.0])
def test_soft_links_are_one_minus_scipys_jensen_shannon_distance(n: int, k: int, sharp: float) -> None:
    p, q = rows(n, k, 1, sharp=sharp), rows(n + 1, k, 2, sharp=sharp)
    expected = 1 - jensenshannon(p[:, None].numpy(), q[None].numpy(), base=2, axis=-1)
    np.testing.assert_allclose(soft_links(p, q).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(soft_links(p.float(), q.float()).numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("step", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("k", [2, 10, 200])
def test_fp32_links_of_near_equal_rows_are_right_to_1e_6(step: float, k: int) -> None:
    p = rows(8, k, 1, dtype=torch.float32)
    q = (p * (1 + step * torch.randn(8, k, generator=torch.Generator().manual_seed(2)).clamp(-2, 2))).clamp(min=0)
    exact = soft_links(p.double(), q.double())  # the very same numbers: only the arithmetic differs
    assert (soft_links(p, q).double() - exact).abs().max() < 1e-6


@given(simplex())
@settings(max_examples=50, deadline=None)
def test_soft_links_are_symmetric_in_range_blind_to_names_and_one_for_equal_rows(p: Tensor) -> None:
    p = torch.cat([p, p[:1]])  # one row twice
    for q in (p, p.float(), p.bfloat16()):
        links = soft_links(q)
        assert links.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
        assert torch.equal(links, links.T)
        assert ((links >= 0) & (links <= 1)).all()
        assert (links.diagonal() == 1).all()
        assert len(links) == 0 or links[0, -1] == 1
        torch.testing.assert_close(soft_links(q.flip(-1)), links, atol=1e-6, rtol=0)


def test_disjoint_rows_are_cannot_links() -> None:
    links = soft_links(torch.eye(4))
    torch.testing.assert_close(links, torch.eye(4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_soft_links_have_finite_gradients_everywhere(dtype: torch.dtype) -> None:
    p = torch.cat([extremes(dtype), rows(4, 3, dtype=dtype), rows(4, 3, dtype=dtype)]).requires_grad_()
    links = soft_links(p)
    assert torch.isfinite(links).all()
    for seed in range(3):
        direction = torch.randn(links.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        assert torch.isfinite(torch.autograd.grad(links, p, direction, retain_graph=True)[0]).all()


def test_soft_links_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    p = rows(23, 7, dtype=torch.float32)
    whole = soft_links(p)
    for size in (1, 23 * 7, 3 * 23 * 7 + 1):
        monkeypatch.setattr(losses, "_BLOCK_CPU", size)
        torch.testing.assert_close(soft_links(p), whole, atol=1e-7, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(("n", "k"), [(600, 10), (200, 300), (40, 2000)])
def test_no_tensor_of_all_pairs_and_clusters_is_formed(n: int, k: int) -> None:
    p = rows(n, k, dtype=torch.float32)
    with LargestTensor() as largest:
        links = soft_links(p)
        all_pairs_loss(p, links, torch.ones(n))
    assert largest.elements <= max(n * n, losses._BLOCK_CPU) < n * n * k


def test_hard_links_are_ones_from_the_threshold_on() -> None:
    links = torch.tensor([[1.0, 0.5], [0.49, 0.0]])
    assert hard_links(links, 0.5).tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert hard_links(links, 0.5).dtype == links.dtype


# All pairs


@given(simplex(), st.data())
@settings(max_examples=50, deadline=None)
def test_all_pairs_loss_is_the_pair_loss_of_the_selected_pairs(p: Tensor, data: st.DataObject) -> None:
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(p), max_size=len(p))), dtype=torch.bool)
    links, chosen = soft_links(p.flip(0)), p[keep]
    m = len(chosen)
    left, right = chosen.repeat_interleave(m, 0), chosen.repeat(m, 1)
    link = links[keep][:, keep].flatten()
    torch.testing.assert_close(all_pairs_loss(p, links, keep), pair_loss(left, right, link), atol=1e-9, rtol=1e-9)
    other = ~torch.eye(m, dtype=torch.bool).flatten()
    expected = pair_loss(left[other], right[other], link[other])
    torch.testing.assert_close(
        all_pairs_loss(p, links, keep.double(), self_pairs=False), expected, atol=1e-9, rtol=1e-9
    )


def test_all_pairs_loss_of_nothing_is_zero_with_a_graph() -> None:
    for n in (0, 1, 3):
        p = rows(n, 4, dtype=torch.float32).requires_grad_()
        loss = all_pairs_loss(p, torch.ones(n, n), torch.zeros(n, dtype=torch.bool))
        assert loss == 0
        assert torch.equal(torch.autograd.grad(loss, p)[0], torch.zeros(n, 4))


def test_rows_left_out_get_no_gradient() -> None:
    p, keep = rows(6, 4).requires_grad_(), torch.tensor([1, 0, 1, 1, 0, 0])
    (gradient,) = torch.autograd.grad(all_pairs_loss(p, soft_links(p.detach()), keep), p)
    assert (gradient[keep == 0] == 0).all()
    assert (gradient[keep == 1] != 0).any()


def test_all_pairs_loss_is_exact_whatever_the_matmul_precision() -> None:
    p = rows(60, 10, sharp=8)
    exact = all_pairs_loss(p, soft_links(p), torch.ones(60))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        loss = all_pairs_loss(p.float(), soft_links(p).float(), torch.ones(60))
    finally:
        torch.set_float32_matmul_precision(before)
    assert abs(float(loss) - float(exact)) < 1e-6


# The mode flip


@given(simplex(n=5), st.lists(st.booleans(), min_size=5, max_size=5))
@settings(max_examples=50, deadline=None)
def test_flip_modes_swaps_the_two_largest_of_the_flipped_rows(p: Tensor, flip: list[bool]) -> None:
    flipped = flip_modes(p, torch.tensor(flip))
    for before, after, turned in zip(p.numpy(), flipped.numpy(), flip, strict=True):
        expected = before.copy()
        if turned:
            one, two = np.argsort(-before, kind="stable")[:2]
            expected[[one, two]] = before[[two, one]]
        np.testing.assert_array_equal(after, expected)


def test_flipping_twice_gives_the_row_back_and_one_cluster_stays() -> None:
    p, flip = rows(9, 6), torch.arange(9) % 2 == 0
    assert torch.equal(flip_modes(flip_modes(p, flip), flip), p)
    assert torch.equal(flip_modes(torch.ones(3, 1), torch.ones(3, dtype=torch.bool)), torch.ones(3, 1))
    assert flip_modes(rows(0, 4), torch.zeros(0, dtype=torch.bool)).shape == (0, 4)


@given(simplex(n=5), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_swap_clusters_swaps_the_two_of_each_row(p: Tensor, seed: int) -> None:
    swap = torch.randint(p.shape[1], (5, 2), generator=torch.Generator().manual_seed(seed))
    for before, after, (one, two) in zip(p.numpy(), swap_clusters(p, swap).numpy(), swap.tolist(), strict=True):
        expected = before.copy()
        expected[[one, two]] = before[[two, one]]
        np.testing.assert_array_equal(after, expected)


# Pseudo-labels, self-labels


def test_pseudo_label_loss_is_cross_entropy_over_the_batch() -> None:
    logits, guess = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).double(), rows(8, 5, 1)
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1]).bool()
    total = F.cross_entropy(logits[keep], guess[keep].argmax(-1), reduction="sum")
    torch.testing.assert_close(pseudo_label_loss(logits, guess, keep), total / 8)
    logits = logits.requires_grad_()
    nothing = pseudo_label_loss(logits, guess, torch.zeros(8))
    assert nothing == 0
    assert (torch.autograd.grad(nothing, logits)[0] == 0).all()
    assert pseudo_label_loss(logits[:0], guess[:0], keep[:0]) == 0


def test_soft_cross_entropy_is_torchs_with_probabilities_as_targets() -> None:
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    belief = rows(8, 5, 1)
    found = soft_cross_entropy(logits, belief)
    torch.testing.assert_close(found, F.cross_entropy(logits, belief), rtol=1e-12, atol=1e-12)
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    assert float(found) == pytest.approx(-(belief.numpy() * np.log(p)).sum(1).mean())
    hard = torch.eye(5, dtype=torch.float64)[[0, 4, 2, 1, 3, 0, 1, 2]]
    torch.testing.assert_close(soft_cross_entropy(logits, hard), F.cross_entropy(logits, hard.argmax(-1)))


def test_soft_cross_entropy_rests_where_the_belief_is_and_is_zero_for_none() -> None:
    belief = rows(6, 4, 1)
    logits = belief.log().requires_grad_()
    (gradient,) = torch.autograd.grad(soft_cross_entropy(logits, belief), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)
    sure = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    value = soft_cross_entropy(sure, torch.tensor([[0.0, 1.0, 0.0]]))
    assert torch.isfinite(value)
    assert torch.isfinite(torch.autograd.grad(value, sure)[0]).all()
    assert soft_cross_entropy(logits[:0], belief[:0]) == 0


def test_balanced_cross_entropy_weighs_the_clusters_present_equally() -> None:
    guess = torch.tensor([[0.995, 0.005, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0], [0.5, 0.3, 0.2]], dtype=torch.float64)
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    each = F.cross_entropy(logits, guess.argmax(-1), reduction="none")
    expected = (each[:3].mean() + each[3]) / 2
    torch.testing.assert_close(balanced_confident_cross_entropy(logits, guess), expected)
    weight = torch.tensor([1 / 3, 1, 0], dtype=torch.float64)
    again = F.cross_entropy(logits[:4], guess[:4].argmax(-1), weight=weight)
    torch.testing.assert_close(balanced_confident_cross_entropy(logits, guess), again)


def test_balanced_cross_entropy_of_nothing_confident_is_zero_with_a_graph() -> None:
    for n in (0, 1, 4):
        logits = torch.randn(n, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = balanced_confident_cross_entropy(logits, torch.full((n, 3), 1 / 3))
        assert loss == 0
        assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros(n, 3))


# Pretraining


def test_nt_xent_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    z1, z2 = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    z = np.concatenate([z1.numpy(), z2.numpy()])
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    terms = []
    for i in range(10):
        similarity = np.exp(z @ z[i] / 0.2)
        terms.append(-np.log(similarity[(i + 5) % 10] / (similarity.sum() - similarity[i])))
    assert float(nt_xent(z1, z2, temperature=0.2)) == pytest.approx(np.mean(terms), abs=1e-9)
    torch.testing.assert_close(nt_xent(3 * z1, z2 / 5, temperature=0.2), nt_xent(z1, z2, temperature=0.2))
    torch.testing.assert_close(nt_xent(z2, z1, temperature=0.2), nt_xent(z1, z2, temperature=0.2))


def test_nt_xent_of_none_or_one_image_is_zero() -> None:
    for n in (0, 1):
        z = torch.randn(n, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = nt_xent(z, z + 1, temperature=0.1)
        assert loss == 0
        assert torch.isfinite(torch.autograd.grad(loss, z)[0]).all()


def test_nt_xent_has_finite_gradients_for_zero_vectors() -> None:
    z = torch.zeros(3, 4, requires_grad=True)
    assert torch.isfinite(torch.autograd.grad(nt_xent(z, z, temperature=0.1), z)[0]).all()


def test_scan_loss_is_consistency_less_five_entropies() -> None:
    p, q = rows(12, 4, 1), rows(12, 4, 2)
    consistency = -np.mean(np.log((p * q).sum(-1).numpy()))
    assert float(scan_loss(p, q, entropy_weight=0)) == pytest.approx(consistency, abs=1e-9)
    assert float(scan_loss(p, q)) == pytest.approx(consistency - 5 * entropy(p.mean(0).numpy()), abs=1e-9)


def test_scan_loss_is_finite_for_one_hot_rows_and_zero_for_none() -> None:
    p = torch.eye(3).requires_grad_()
    total = scan_loss(p, torch.eye(3).roll(1, 0))
    assert torch.isfinite(total)
    assert torch.isfinite(torch.autograd.grad(total, p)[0]).all()
    assert scan_loss(torch.zeros(0, 3), torch.zeros(0, 3)) == 0


def test_cosine_loss_runs_from_zero_to_four() -> None:
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(cosine_loss(z, 7 * z)) == pytest.approx(0, abs=1e-12)
    assert float(cosine_loss(z, -z)) == pytest.approx(4)
    other = z.roll(1, 0)
    torch.testing.assert_close(cosine_loss(z, other), (2 - 2 * F.cosine_similarity(z, other)).mean())


def test_angular_loss_is_its_definition() -> None:
    """By the angles, with the cannot-link's −log(1 − (1 + cos 2θ) / 2) as published."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(40, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    link = (torch.arange(40) % 3 == 0).double()
    terms: dict[float, list[float]] = {0.0: [], 1.0: []}
    for a, b, same in zip(left.numpy(), right.numpy(), link.tolist(), strict=True):
        theta = math.acos(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        near = -math.log(1 - (1 + math.cos(2 * theta)) / 2) if theta < math.pi / 2 else 0.0
        terms[same].append(-math.log((1 + math.cos(theta)) / 2) if same else near)
    expected = np.mean(terms[1.0]) + np.mean(terms[0.0])
    assert 0.0 in terms[0.0]
    assert float(angular_loss(left, right, link)) == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(angular_loss(3 * left, right / 7, link), angular_loss(left, right, link))


def test_angular_loss_is_finite_for_equal_opposite_and_zero_vectors_and_zero_for_none() -> None:
    a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0]], requires_grad=True)
    b = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    for link in (torch.zeros(4), torch.ones(4)):
        loss = angular_loss(a, b, link)
        assert torch.isfinite(loss)
        assert torch.isfinite(torch.autograd.grad(loss, a)[0]).all()
    assert angular_loss(torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0)) == 0


def test_prototype_loss_is_its_definition() -> None:
    """Written out in NumPy; the third of four clusters has no row."""
    generator = torch.Generator().manual_seed(0)
    online, target = (torch.randn(9, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    clusters = np.array([0, 1, 3, 0, 1, 3, 0, 3, 0])

    def prototypes(z: Tensor) -> dict[int, Any]:
        unit = z.numpy() / np.linalg.norm(z.numpy(), axis=1, keepdims=True)
        sums = {k: unit[clusters == k].sum(0) for k in (0, 1, 3)}
        return {k: value / np.linalg.norm(value) for k, value in sums.items()}

    mine, other = prototypes(online), prototypes(target)
    terms = []
    for k in mine:
        partner = np.exp(mine[k] @ other[k] / 0.5)
        terms.append(-np.log(partner / (partner + sum(np.exp(mine[k] @ mine[j] / 0.5) for j in mine if j != k))))
    found = prototype_loss(online, target, torch.from_numpy(clusters), 4, 0.5)
    assert float(found) == pytest.approx(np.mean(terms), abs=1e-9)
    torch.testing.assert_close(prototype_loss(3 * online, target / 7, torch.from_numpy(clusters), 4, 0.5), found)


def test_prototype_loss_of_one_cluster_or_no_row_is_zero_and_has_finite_gradients() -> None:
    for z in (torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 3), torch.zeros(0, 3)):
        z.requires_grad_()
        loss = prototype_loss(z, z.detach(), torch.zeros(len(z), dtype=torch.int64), 5, 0.5)
        assert loss == 0
        assert torch.isfinite(torch.autograd.grad(loss, z)[0]).all()
    z = torch.zeros(4, 3, requires_grad=True)
    loss = prototype_loss(z, z.detach(), torch.arange(4), 5, 0.5)
    assert torch.isfinite(torch.autograd.grad(loss, z)[0]).all()


def contrast_of(first: Any, second: Any, temperature: float) -> float:
    """NT-Xent of rows in NumPy, row by row."""
    z = np.concatenate([first, second])
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    n, terms = len(first), []
    for i in range(2 * n):
        others = [np.exp(z[i] @ z[j] / temperature) for j in range(2 * n) if j != i]
        terms.append(-np.log(np.exp(z[i] @ z[(i + n) % (2 * n)] / temperature) / sum(others)))
    return float(np.mean(terms))


def test_the_contrast_of_clusters_is_that_of_their_columns_less_both_entropies() -> None:
    p, q = rows(9, 4, 1).numpy(), rows(9, 4, 2).numpy()
    spread = entropy(p.mean(0)) + entropy(q.mean(0))
    found = cluster_contrast(rows(9, 4, 1), rows(9, 4, 2))
    assert float(found) == pytest.approx(contrast_of(p.T, q.T, 1.0) - spread, abs=1e-9)
    assert float(mean_entropy(rows(9, 4, 1))) == pytest.approx(entropy(p.mean(0)), abs=1e-9)


def test_the_partition_loss_is_its_definition_and_lowest_for_sure_even_clusters() -> None:
    p, q = rows(9, 4, 1).numpy(), rows(9, 4, 2).numpy()
    terms = []
    for i in range(4):
        cosines = [p[:, i] @ q[:, j] / np.linalg.norm(p[:, i]) / np.linalg.norm(q[:, j]) for j in range(4)]
        terms.append(-np.log(np.exp(cosines[i]) / np.exp(cosines).sum()))
    expected = np.mean(terms) - 2 * entropy(p.mean(0))
    assert float(partition_loss(rows(9, 4, 1), rows(9, 4, 2))) == pytest.approx(expected, abs=1e-9)
    sure = torch.eye(4, dtype=torch.float64).repeat(3, 1)
    best = math.log(math.e + 3) - 1 - 2 * math.log(4)
    assert float(partition_loss(sure, sure)) == pytest.approx(best, abs=1e-9)
    assert best < expected


def test_the_contrast_of_sets_is_that_of_weighted_sums_of_directions_less_both_entropies() -> None:
    p, q = rows(9, 4, 1).numpy(), rows(9, 4, 2).numpy()
    z, w = (np.random.default_rng(seed).normal(size=(9, 5)) for seed in (0, 1))
    places = [sum(np.outer(own[i], of[i] / np.linalg.norm(of[i])) for i in range(9)) for own, of in ((p, z), (q, w))]
    found = set_contrast(
        (torch.from_numpy(p), torch.from_numpy(z)), (torch.from_numpy(q), torch.from_numpy(w)), temperature=0.5
    )
    expected = contrast_of(*places, 0.5) - entropy(p.mean(0)) - entropy(q.mean(0))
    assert float(found) == pytest.approx(expected, abs=1e-9)


def test_experts_score_the_partner_among_all_other_rows() -> None:
    n, k, d = 3, 4, 5
    draw = np.random.default_rng(0)
    gate, online, target, prototypes = (draw.normal(size=size) for size in ((6, k), (6, k, d), (6, k, d), (k, d)))
    prototypes[1] = 0  # not yet known
    expected = np.empty((6, k))
    for i, expert in itertools.product(range(2 * n), range(k)):
        norm = np.linalg.norm(prototypes[expert])
        seen = online[i, expert] / np.linalg.norm(online[i, expert]) + prototypes[expert] / (norm or 1)
        keys = [target[j, expert] / np.linalg.norm(target[j, expert]) for j in range(2 * n)]
        chances = {j: np.exp(keys[j] @ seen / 0.5) for j in range(2 * n) if j != i}
        opened = np.exp(gate[i, expert]) / np.exp(gate[i]).sum()
        expected[i, expert] = np.log(opened * chances[(i + n) % (2 * n)] / sum(chances.values()))
    found = expert_scores(*(torch.from_numpy(part) for part in (gate, online, target, prototypes)), 0.5)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)


# All of them

P, Q = rows(6, 4, 1, sharp=2), rows(6, 4, 2, sharp=2)
LINK, KEEP = numbers(6, 5), torch.tensor([1, 1, 0, 1, 0, 1])
LINKS = soft_links(rows(6, 4, 7))

EXPERTS = numbers(6 * 4 * 3, 8).view(6, 4, 3) - 0.5
SMOOTH = {
    "pair_loss": lambda x: pair_loss(x.softmax(-1), Q, LINK),
    "pair_loss of both": lambda x: pair_loss(x.softmax(-1), x.roll(1, 0).softmax(-1), LINK, mean=False),
    "pair_loss with two rates": lambda x: pair_loss(x.softmax(-1), Q, LINK, error_rate=(0.2, 0.05)),
    "kcl": lambda x: kcl(x.softmax(-1), Q, LINK),
    "normalized_entropy": lambda x: normalized_entropy(x.softmax(-1)),
    "soft_links": lambda x: soft_links(x.softmax(-1), Q),
    "all_pairs_loss": lambda x: all_pairs_loss(x.softmax(-1), LINKS, KEEP),
    "flip_modes": lambda x: flip_modes(x.softmax(-1), KEEP),
    "pseudo_label_loss": lambda x: pseudo_label_loss(x, Q, KEEP),
    "soft_cross_entropy": lambda x: soft_cross_entropy(x, Q),
    "nt_xent": lambda x: nt_xent(x, Q, temperature=0.5),
    "scan_loss": lambda x: scan_loss(x.softmax(-1), Q),
    "balanced_confident_cross_entropy": lambda x: balanced_confident_cross_entropy(x, Q, min_confidence=0.5),
    "angular_loss": lambda x: angular_loss(x, Q, (torch.arange(len(x)) % 2).to(x.dtype)),
    "cosine_loss": lambda x: cosine_loss(x, Q),
    "prototype_loss": lambda x: prototype_loss(x, Q, torch.arange(len(x)) % 3, 4, 0.5),
    "mean_entropy": lambda x: mean_entropy(x.softmax(-1)),
    "cluster_contrast": lambda x: cluster_contrast(x.softmax(-1), Q),
    "partition_loss": lambda x: partition_loss(x.softmax(-1), Q.to(x.dtype)),
    "set_contrast": lambda x: set_contrast((x.softmax(-1), x), (P, Q), temperature=0.5),
    "expert_scores": lambda x: expert_scores(x, x.unflatten(1, (4, 1)) + EXPERTS, EXPERTS, EXPERTS[0], 0.5),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_the_derivatives(name: str) -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(11), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(SMOOTH[name], logits, fast_mode=True)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_agree_in_fp32_and_float64(name: str) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    exact, single = x.clone().requires_grad_(), x.float().requires_grad_()
    for logits in (exact, single):
        SMOOTH[name](logits).sum().backward()
    torch.testing.assert_close(single.grad.double(), exact.grad, atol=1e-5, rtol=1e-4)


class Batch(NamedTuple):
    """One of everything a function may ask for."""

    p: Tensor
    q: Tensor
    logits: Tensor
    link: Tensor
    links: Tensor
    keep: Tensor

    def to(self, dtype: torch.dtype) -> "Batch":
        return Batch(*(tensor.to(dtype) for tensor in self))


BATCH = Batch(P, Q, 3 * numbers(24, 12).view(6, 4), LINK, LINKS, KEEP).to(torch.float32)

FUNCTIONS = {
    "pair_scores": lambda b: pair_scores(b.p, b.q),
    "pair_loss": lambda b: pair_loss(b.p, b.q, b.link),
    "triplet_loss": lambda b: triplet_loss(b.link, b.p[:, 0], error_rate=0.1),
    "kcl": lambda b: kcl(b.p, b.q, b.link),
    "normalized_entropy": lambda b: normalized_entropy(b.p),
    "informative": lambda b: informative(b.p, 0.5),
    "confident": lambda b: confident(b.p, 0.5),
    "soft_links": lambda b: soft_links(b.p, b.q),
    "hard_links": lambda b: hard_links(soft_links(b.p), 0.5),
    "all_pairs_loss": lambda b: all_pairs_loss(b.p, b.links, b.keep),
    "flip_modes": lambda b: flip_modes(b.p, b.keep),
    "swap_clusters": lambda b: swap_clusters(b.p, torch.stack((b.keep.long(), 2 * b.keep.long()), 1)),
    "pseudo_label_loss": lambda b: pseudo_label_loss(b.logits, b.q, b.keep),
    "soft_cross_entropy": lambda b: soft_cross_entropy(b.logits, b.q),
    "nt_xent": lambda b: nt_xent(b.logits, b.q, temperature=0.1),
    "scan_loss": lambda b: scan_loss(b.p, b.q),
    "balanced_confident_cross_entropy": lambda b: balanced_confident_cross_entropy(b.logits, b.q, min_confidence=0.5),
    "angular_loss": lambda b: angular_loss(b.logits, b.q, (torch.arange(len(b.q), device=b.q.device) % 2).float()),
    "cosine_loss": lambda b: cosine_loss(b.logits, b.q),
    "prototype_loss": lambda b: prototype_loss(b.logits, b.q, torch.arange(len(b.q), device=b.q.device) % 3, 4, 0.5),
    "mean_entropy": lambda b: mean_entropy(b.p),
    "cluster_contrast": lambda b: cluster_contrast(b.p, b.q),
    "partition_loss": lambda b: partition_loss(b.p, b.q),
    "set_contrast": lambda b: set_contrast((b.p, b.logits), (b.q, b.q), temperature=0.5),
    "expert_scores": lambda b: expert_scores(*(b.logits, b.logits[..., None], b.q[..., None], b.q[0, :, None]), 0.5),
}


def test_every_public_function_is_held_to_the_common_rules() -> None:
    own = {name for name, value in vars(losses).items() if getattr(value, "__module__", "") == losses.__name__}
    assert set(FUNCTIONS) == {name for name in own if not name.startswith("_")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_changes_nothing(name: str) -> None:
    plain = FUNCTIONS[name](BATCH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = FUNCTIONS[name](BATCH)
    assert under.dtype == plain.dtype
    assert torch.equal(under, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"flip_modes", "swap_clusters"}))  # they move values
def test_half_precisions_are_lifted_to_fp32(name: str, dtype: torch.dtype) -> None:
    low = BATCH.to(dtype)
    result = FUNCTIONS[name](low)
    assert result.dtype in (torch.float32, torch.bool)
    assert torch.equal(result, FUNCTIONS[name](low.to(torch.float32)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_waits_for_the_values_of_its_tensors(name: str) -> None:
    with FakeTensorMode() as mode:  # tensors without values: .item(), `if tensor` and boolean indexing raise
        fake = Batch(*(mode.from_tensor(tensor) for tensor in BATCH))
        result = FUNCTIONS[name](fake)
    assert result.shape == FUNCTIONS[name](BATCH).shape


def test_the_unconstrained_term_compiles_into_one_graph() -> None:
    def term(b: Batch) -> Tensor:
        return all_pairs_loss(b.q, soft_links(flip_modes(b.p, b.keep)), informative(b.p, 0.5))

    compiled = torch.compile(term, fullgraph=True, dynamic=False, backend="eager")
    torch.testing.assert_close(compiled(BATCH), term(BATCH))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_losses_can_be_captured_in_a_cuda_graph() -> None:
    p, q = rows(600, 10, 1, dtype=torch.float32).cuda(), rows(600, 10, 2, dtype=torch.float32).cuda()

    def step() -> Tensor:
        return all_pairs_loss(q, soft_links(p), informative(p, 0.5))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    torch.testing.assert_close(loss.cpu(), all_pairs_loss(q.cpu(), soft_links(p.cpu()), informative(p.cpu(), 0.5)))
