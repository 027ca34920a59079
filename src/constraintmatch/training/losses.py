"""The paper's equations, and the losses of the stages before it, as pure functions of probabilities or logits.

Conventions: n rows (images or pairs), k clusters, rows of `p` sum to one, every link is in [0, 1] with 1 = must-link.
Half precisions are lifted to fp32 and autocast is kept out; float64 stays float64. A selection is a mask `keep` that
weighs rows, never an index: shapes are static and nothing waits for the device, so all of it compiles and can be
captured in a CUDA graph. A mean over nothing is 0 and still has a graph.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from constraintmatch.training.ranks import add, lift, mine

# Elements of one (rows, m, k) block in soft_links: what stays in a CPU's cache; what keeps a GPU's launches few; and,
# where a compiler fuses the block into its sum and forms none of it, what keeps the kernels (and their compiling) few.
_BLOCK_CPU, _BLOCK_GPU, _BLOCK_COMPILED = 2**19, 2**21, 2**27

Rate = float | Tensor  # a tensor () is not compiled in as a constant: another value needs no other graph


def pair_scores(left: Tensor, right: Tensor) -> Tensor:
    """The alignment scores ĉ_ij = ⟨ŷ_i, ŷ_j⟩ of n pairs; (n, k) and (n, k) to (n,)."""
    return (lift(left) * lift(right)).sum(-1)


def pair_loss(
    left: Tensor,
    right: Tensor,
    link: Tensor,
    weight: Tensor | None = None,
    *,
    mean: bool = True,
    error_rate: Rate | tuple[Rate, Rate] = 0.0,
) -> Tensor:
    """The MCL of n pairs: −c_ij log ĉ_ij − (1 − c_ij) log(1 − ĉ_ij), ĉ_ij = ⟨ŷ_i, ŷ_j⟩, c_ij = `link`, hard or soft.

    The weighted mean over pairs, as the published code has it; `mean=False` gives the paper's sum. Both logarithms are
    clamped at the smallest normal number (log ≥ −87.4 in fp32): rows of exact zeros and ones give finite losses and
    gradients. 1 − ĉ_ij is summed from small parts, not subtracted from one: a sure but wrong pair keeps its gradient.
    With ε = `error_rate` of the links wrong, a link says "same" with the probability ε + (1 − 2ε) ĉ_ij, which replaces
    ĉ_ij. Two rates (missed, invented) are those of "same" answered "different" and of "different" answered "same":
    then it is (1 − missed) ĉ_ij + invented (1 − ĉ_ij). Rates are numbers, or tensors () on the device of the rows.
    """
    left, right = lift(left), lift(right)
    same, different = pair_scores(left, right), pair_scores(left, _complements(right))
    return _weigh(_binary_cross_entropy(same, different, link, error_rate), weight, mean=mean)


def triplet_loss(near: Tensor, far: Tensor, weight: Tensor | None = None, *, error_rate: Rate = 0.0) -> Tensor:
    """−log(1/2 + (1/2 − ε)(ĉ_an − ĉ_af)) of n triplets, from the scores of anchor and near, and of anchor and far.

    ĉ_an − ĉ_af is the probability that only the near image is of the anchor's kind, less that only the far one is. In
    the first case the answer is right but for ε = `error_rate`; if both are of that kind, or none, it is a coin's. So
    a triplet of three kinds, which says nothing of clusters, does little harm. The weighted mean over triplets.
    """
    return _weigh(-_log(0.5 + (0.5 - error_rate) * (lift(near) - lift(far))), weight)


def angular_loss(left: Tensor, right: Tensor, link: Tensor) -> Tensor:
    """SpherePair's loss on the angle θ between the embeddings (n, d) of n pairs; links are in [0, 1].

    A must-link has −log((1 + cos θ) / 2), a cannot-link below 90° −log(sin² θ) and beyond it nothing: cannot-links are
    many, and those that are kept say no more. A soft link counts as both, with its value and with the rest. The
    mean over must-links and the mean over cannot-links are added.
    """
    cosine = (F.normalize(lift(left), dim=-1) * F.normalize(lift(right), dim=-1)).sum(-1)
    must, cannot = -_log((1 + cosine) / 2), -_log(1 - cosine.clamp(min=0) ** 2)
    return _weigh(must, link) + _weigh(cannot, 1 - link)


def kcl(left: Tensor, right: Tensor, link: Tensor, weight: Tensor | None = None) -> Tensor:
    """The KCL of n pairs (Hsu & Kira 2016): c · d + (1 − c) · max(0, 2 − d), for KL(p‖q) and KL(q‖p) added.

    The weighted mean over pairs. Soft links blend the two cases linearly. Both arguments of each KL carry gradients;
    zeros are clamped as in `pair_loss`.
    """
    left, right = lift(left), lift(right)
    link = link.to(left.dtype)
    ratios = _log(left) - _log(right)
    there, back = (left * ratios).sum(-1), -(right * ratios).sum(-1)
    must, cannot = there + back, F.relu(2 - there) + F.relu(2 - back)
    return _weigh(link * must + (1 - link) * cannot, weight)


def normalized_entropy(p: Tensor) -> Tensor:
    """Eq. 1: H_n(ŷ) = −Σ_l ŷ_l log ŷ_l / log k, in [0, 1]; (…, k) to (…).

    0 for a row that is sure (and for k = 1), 1 for an even one.
    """
    p = lift(p)
    largest = math.log(max(p.shape[-1], 2))  # k = 1: the entropy is 0 whatever divides it
    return (_entropy(p) / largest).clamp(0, 1)


def informative(p: Tensor, max_entropy: float) -> Tensor:
    """Eq. 2, I^sel: the mask of rows with H_n(ŷ) < τ, τ = `max_entropy`. (n, k) to bool (n,)."""
    return normalized_entropy(p) < max_entropy


def confident(p: Tensor, min_confidence: float) -> Tensor:
    """I^conf: the mask of rows with max_l ŷ_l ≥ τ, τ = `min_confidence`; ≥ as in FixMatch. (n, k) to bool (n,)."""
    return lift(p).amax(-1) >= min_confidence


def soft_links(p: Tensor, q: Tensor | None = None) -> Tensor:
    """I^map, Eq. 3: the pseudo-constraints c̃_ij = 1 − JSD(p_i, q_j), base 2; (n, k) and (m, k) to (n, m).

    q = p if not given. Exactly 1 for equal rows, exactly symmetric, in [0, 1], never NaN. A cluster's share of JSD² is
    (a + b) · f(|a − b| / (a + b)) with f(d) = ((1 + d) log₂(1 + d) + (1 − d) log₂(1 − d)) / 4 ≥ 0, not a difference of
    entropies: near-equal rows come out to rounding (1e-6 in fp32), where a difference is off by its root (3e-4). Rows
    are taken in blocks: memory is O(n m) plus a constant, no (n, n, k) tensor is formed (gradients, if wanted, keep
    what they need). Where the slope is infinite (equal rows, exact zeros) the gradient is finite.
    """
    p = lift(p)
    q = p if q is None else lift(q)
    square = torch.cat([_squared_distances(block, q) for block in torch.split(p, _block_rows(q))])
    if q is p:
        square = (square + square.mT) / 2  # changes nothing, unless compiled blocks sum in different orders
    apart = square > 0
    distance = torch.where(apart, square, 1).sqrt()  # √ has no slope at 0: equal rows take the constant branch
    return 1 - torch.where(apart, distance, 0).clamp(max=1)


def hard_links(links: Tensor, threshold: float) -> Tensor:
    """Hard pseudo-constraints: 1 where c̃_ij ≥ μ, else 0, μ = `threshold`; same shape and type."""
    return (links >= threshold).to(links.dtype)


def all_pairs_loss(
    p: Tensor, links: Tensor, keep: Tensor, *, self_pairs: bool = True, error_rate: Rate = 0.0
) -> Tensor:
    """L^pseudo: the MCL of all ordered pairs of selected rows against `links`, mean over those pairs.

    p is (n, k), links (n, n), keep (n,); of several ranks each has the rows of links that are its share. Self-pairs
    (i, i) count, as in the published code, unless `self_pairs` is false. 0 with a graph if nothing is selected. λ
    (`pseudo_weight`) is applied outside. `error_rate`: see `pair_loss`.
    """
    p = lift(p)
    keep, rows = keep.to(p.dtype), mine(p)
    pair_weight = mine(keep)[:, None] * keep[None, :]
    if not self_pairs:
        pair_weight = pair_weight * mine(1 - torch.eye(len(p), dtype=p.dtype, device=p.device))
    losses = _binary_cross_entropy(_inner_products(rows, p), _inner_products(rows, _complements(p)), links, error_rate)
    return _weigh(losses, pair_weight, split=True)


def flip_modes(p: Tensor, flip: Tensor) -> Tensor:
    """The paper's m(ŷ): the two largest probabilities swapped in the rows where `flip` (n,) is true.

    `flip` is true for a fraction ρ of the rows. Of equal probabilities the first cluster counts as the larger. Values
    are moved, not changed; k = 1 has nothing to swap.
    """
    if p.shape[-1] < 2:
        return p
    cluster = torch.arange(p.shape[-1], device=p.device)
    first = cluster == p.argmax(-1, keepdim=True)
    second = cluster == p.masked_fill(first, -1).argmax(-1, keepdim=True)
    largest, next_largest = (torch.where(mask, p, 0).sum(-1, keepdim=True) for mask in (first, second))
    flipped = torch.where(first, next_largest, torch.where(second, largest, p))
    return torch.where(flip.bool()[:, None], flipped, p)


def swap_clusters(p: Tensor, swap: Tensor) -> Tensor:
    """The probabilities of two clusters swapped in each row: those of `swap` (n, 2); twice the same one: none."""
    return p.scatter(-1, swap, p.gather(-1, swap.flip(-1)))


def pseudo_label_loss(logits: Tensor, guess: Tensor, keep: Tensor) -> Tensor:
    """Naive pseudo-labelling, L^CE: cross-entropy of the strong views' logits against argmax of `guess` on kept rows.

    Both are (n, k). Divided by all n rows, as FixMatch does, so that few sure rows pull little.
    """
    losses = _cross_entropies(logits, guess.argmax(-1))
    return (losses * keep.to(losses.dtype)).sum() / max(1, len(losses))


def soft_cross_entropy(logits: Tensor, belief: Tensor) -> Tensor:
    """The mean of −Σ_l b_l log ŷ_l for logits and beliefs (n, k) whose rows sum to one."""
    return _weigh(-(lift(belief) * lift(logits).log_softmax(-1)).sum(-1))


def nt_xent(z1: Tensor, z2: Tensor, *, temperature: float) -> Tensor:
    """SimCLR's loss: each of the 2n views finds its partner among the 2n − 1 others by cosine / temperature.

    z1 and z2 are (n, d) and are normalised here. The product is fp32 as torch.set_float32_matmul_precision has it.
    """
    n = len(z1)
    z = F.normalize(torch.cat([lift(z1), lift(z2)]), dim=-1)
    itself = mine(torch.eye(2 * n, dtype=torch.bool, device=z.device))
    with torch.autocast(z.device.type, enabled=False):
        similarity = (mine(z) @ z.mT / temperature).masked_fill(itself, -math.inf)
    partner = mine(torch.arange(2 * n, device=z.device).roll(n))
    return _weigh(_cross_entropies(similarity, partner), split=True)


def mean_entropy(p: Tensor) -> Tensor:
    """H(mean p) of rows (n, k), in nats: highest when they use all clusters alike."""
    return _entropy(lift(p).sum(0) / max(1, len(p)))


def scan_loss(p_anchor: Tensor, p_neighbour: Tensor, *, entropy_weight: float = 5.0) -> Tensor:
    """SCAN's loss: −mean log⟨p, q⟩ of anchors and neighbours (n, k) − `entropy_weight` · H(mean p), in nats."""
    return _weigh(-_log(pair_scores(p_anchor, p_neighbour))) - entropy_weight * mean_entropy(p_anchor)


def balanced_confident_cross_entropy(logits: Tensor, guess: Tensor, *, min_confidence: float = 0.99) -> Tensor:
    """Self-labelling: cross-entropy of strong logits against argmax of `guess` on confident rows, clusters balanced.

    Both are (n, k). A row weighs 1 / (confident rows with its target); the weighted mean is then the mean over the
    clusters present of their mean losses. 0 with a graph if no row is confident.
    """
    target = guess.argmax(-1)
    losses = _cross_entropies(logits, target)
    keep = confident(guess, min_confidence).to(losses.dtype)
    clusters = torch.arange(guess.shape[-1], device=guess.device)
    counts = ((target[:, None] == clusters) * keep[:, None]).sum(0)
    return _weigh(losses, keep / counts.clamp(min=1)[target])


def cosine_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """BYOL's loss: the mean of 2 − 2 cos(prediction, target), in [0, 4]; (n, d) each.

    Detaching the target is the caller's part.
    """
    cosine = (F.normalize(lift(prediction), dim=-1) * F.normalize(lift(target), dim=-1)).sum(-1)
    return _weigh(2 - 2 * cosine)


def prototype_loss(online: Tensor, target: Tensor, clusters: Tensor, n_clusters: int, temperature: float) -> Tensor:
    """ProPos's contrast: a cluster's prototype is near that of the target network, and far from the other clusters'.

    A prototype is the mean direction of the rows of a cluster, of `online` or `target` (n, d); `clusters` (n,) says
    whose they are. Each finds its partner in the other network among the other clusters of its own, by cosine /
    temperature. The mean is over the clusters that have rows.
    """
    here = clusters[:, None] == torch.arange(n_clusters, device=clusters.device)
    with torch.autocast(online.device.type, enabled=False):
        units = (F.normalize(lift(z), dim=-1) for z in (online, target))
        mine, other = (F.normalize(here.to(unit.dtype).mT @ unit, dim=-1) for unit in units)
        among = mine @ mine.mT / temperature
    used, itself = here.any(0), torch.eye(n_clusters, dtype=torch.bool, device=online.device)
    partner = ((mine * other).sum(-1) / temperature).diag_embed()
    similarity = torch.where(itself, partner, among.masked_fill(~used, -math.inf))
    return _weigh(_cross_entropies(similarity, torch.arange(n_clusters, device=online.device)), used)


def cluster_contrast(p: Tensor, q: Tensor) -> Tensor:
    """CC's contrast of clusters: `nt_xent` of the columns of two views' probabilities (n, k), less their entropies.

    A cluster is what it holds: its column of one view finds that of the other among all columns. The entropies, in
    nats, are those of both mean rows; they spread images over clusters.
    """
    return nt_xent(p.mT, q.mT, temperature=1.0) - (mean_entropy(p) + mean_entropy(q))


def partition_loss(p: Tensor, q: Tensor) -> Tensor:
    """PICA's loss: cross-entropy of the cosines of clusters in two views, less 2 H(mean p).

    The cosine of columns i of p and j of q (n, k) is the partition's uncertainty about i and j: 1 on the diagonal and
    0 elsewhere if every row is sure and the same in both views. Each i finds itself among the j, at temperature 1.
    """
    first, second = (F.normalize(lift(side).mT, dim=-1) for side in (p, q))
    with torch.autocast(p.device.type, enabled=False):
        cosines = first @ second.mT
    itself = torch.arange(p.shape[-1], device=p.device)
    return _weigh(_cross_entropies(cosines, itself)) - 2 * mean_entropy(p)


def set_contrast(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], *, temperature: float) -> Tensor:
    """TCC's contrast of clusters as sets: `nt_xent` of their places in two views, less the entropies as CC has them.

    Each view is its probabilities (n, k) and projections (n, d). The place of a cluster is the sum of the directions of
    all images, each weighted by the probability that it belongs there; `nt_xent` takes its direction.
    """
    with torch.autocast(first[0].device.type, enabled=False):
        places = [lift(p).mT @ F.normalize(lift(z), dim=-1) for p, z in (first, second)]
    return nt_xent(*places, temperature=temperature) - (mean_entropy(first[0]) + mean_entropy(second[0]))


def expert_scores(gate: Tensor, online: Tensor, target: Tensor, prototypes: Tensor, temperature: float) -> Tensor:
    """MiCE's log p(l | x) + log p(partner | x, l) of experts l, (2n, k); its loss is −mean logsumexp over l.

    Rows are n first views and then n second ones of the same images; `gate` (2n, k) has logits. Expert l sees a row as
    `online` (2n, k, d) and finds its partner, the other view, among all other rows of `target` by
    ⟨target, online + prototype⟩ / temperature, all normalised. The softmax of the scores is EM's posterior.
    """
    seen, keys, centres = (F.normalize(lift(part), dim=-1) for part in (online, target, prototypes))
    with torch.autocast(gate.device.type, enabled=False):
        found = torch.einsum("ild,jld->lij", seen + centres, keys) / temperature
    itself = torch.eye(len(gate), dtype=torch.bool, device=gate.device)
    chances = found.masked_fill(itself, -math.inf).log_softmax(-1)
    partner = torch.arange(len(gate), device=gate.device).roll(len(gate) // 2)
    picked = chances.gather(2, partner[None, :, None].expand(len(chances), -1, 1))
    return lift(gate).log_softmax(-1) + picked.squeeze(2).mT


def _log(x: Tensor) -> Tensor:
    return x.clamp(torch.finfo(x.dtype).tiny, None).log()


def _entropy(p: Tensor) -> Tensor:
    return -(p * _log(p)).sum(-1)


def _binary_cross_entropy(
    same: Tensor, different: Tensor, link: Tensor, error_rate: Rate | tuple[Rate, Rate]
) -> Tensor:
    """−c log ĉ − (1 − c) log(1 − ĉ) from ĉ = `same` and 1 − ĉ = `different`; rounding above one is cut off."""
    link = link.to(same.dtype)
    if isinstance(error_rate, tuple):
        missed, invented = error_rate
        same, different = (1 - missed) * same + invented * different, (1 - invented) * different + missed * same
    elif isinstance(error_rate, Tensor) or error_rate:
        same, different = (error_rate + (1 - 2 * error_rate) * score for score in (same, different))
    return -(link * _log(same.clamp(max=1)) + (1 - link) * _log(different.clamp(max=1)))


def _complements(p: Tensor) -> Tensor:
    """1 − p, with the largest entry's complement summed from the others: 1 − 0.99999999 keeps its digits.

    Then ⟨p, 1 − q⟩ = 1 − ⟨p, q⟩ is right to relative precision, and its gradient through a softmax stays of order one.
    """
    largest = torch.arange(p.shape[-1], device=p.device) == p.argmax(-1, keepdim=True)
    others = torch.where(largest, 0, p).sum(-1, keepdim=True)
    return torch.where(largest, others, 1 - p)


def _inner_products(left: Tensor, right: Tensor) -> Tensor:
    """left @ rightᵀ whatever the autocast; in float64 where the device has it, which no TF32 setting reaches."""
    exact = left.dtype if left.device.type == "mps" else torch.float64
    with torch.autocast(left.device.type, enabled=False):
        return (left.to(exact) @ right.to(exact).mT).to(left.dtype)


def _block_rows(q: Tensor) -> int:
    eager = _BLOCK_CPU if q.device.type == "cpu" else _BLOCK_GPU
    elements = _BLOCK_COMPILED if torch.compiler.is_compiling() else eager
    return max(1, elements // max(1, q.numel()))


def _squared_distances(p: Tensor, q: Tensor) -> Tensor:
    """JSD² to base 2 of each row of p with each row of q: (r, k) and (m, k) to (r, m); see `soft_links`."""
    finfo = torch.finfo(p.dtype)
    a, b = p[:, None, :], q[None, :, :]
    total = a + b
    d = (a - b).abs() / total.clamp(min=finfo.tiny)
    # The clamp moves no value (no number is between it and 1, where the factor 1 − d is 0), only the slope at d = 1.
    shares = (1 + d) * torch.log1p(d) + (1 - d) * torch.log1p(-d.clamp(max=1 - finfo.eps / 2))
    return (total * shares).sum(-1) / (4 * math.log(2))


def _cross_entropies(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(lift(logits), target, reduction="none")


def _weigh(losses: Tensor, weight: Tensor | None = None, *, mean: bool = True, split: bool = False) -> Tensor:
    """Σ weight · loss, by default over Σ weight; 0 with a graph when there is nothing to weigh.

    `split`: each rank has losses of its own.
    """
    weight = torch.ones_like(losses) if weight is None else weight.to(losses.dtype)
    total = (losses * weight).sum()
    weights = weight.sum()
    if split:
        total, weights = add(total), add(weights)
    return total / torch.where(weights > 0, weights, 1) if mean else total
