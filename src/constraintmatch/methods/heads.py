"""Cluster heads: linear heads found on frozen features, a head trained alone, clusters merged by the pairs.

The start of a head decides which clusters SCAN finds. On frozen features many starts cost seconds: many linear heads
are trained by SCAN's loss at once, and the best ones vote.
"""

import warnings
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter, watched
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed
from constraintmatch.methods.preparation import spread
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_clusters, with_head
from constraintmatch.training.losses import scan_loss

BATCH, JUDGED = 1_000, 10_000  # images in a step, and images that judge the heads
REPEATED = 10_000  # images whose clusters the steady head repeats; after a merge twice as many
STEADY = 0.75  # the share of images, on average, that each of the best heads must place as they do together
AGREEMENTS = 5  # times that the clusters of the voters are matched
LARGEST_RATE = 0.06  # for inputs of length 1
LOWEST = -80.0  # of logits, the largest of the row being 0: e^-80 is 2e-35, still a normal number in fp32
SUREST = 0.98  # highest mean confidence of the head; on digits and CIFAR heads stay below it
SWEEPS = 200  # most turns over the clusters, to find biases that keep sizes
NEVER = -1e3  # bias of a cluster that stays empty
EMPTY = -1  # the group of a cluster without images


class LinearHead(NamedTuple):
    """Weights (k, d) and biases (k,) of the best head, losses (h,) by seed, weights and biases of all, best first."""

    weight: Tensor
    bias: Tensor
    losses: Tensor
    voters: tuple[Tensor, Tensor]


def best_linear_head(
    features: Tensor,
    near: Tensor,
    n_clusters: int,
    *,
    n_heads: int = 40,
    steps: int | None = None,
    entropy_weight: float = 5.0,
    seed: int = 0,
) -> LinearHead:
    """The head with the lowest SCAN loss of `n_heads`, each trained on features (n, d) and their neighbours (n, m).

    The features are centred and scaled to a mean length of 1. Scaling each one would blow up those that hardly vary,
    and these move as soon as the network does. The returned head is for the unscaled features. Its mean confidence is
    at most 98 %.
    """
    mean = features.mean(0)
    scale = (features - mean).norm(dim=1).mean().clamp(min=1e-12)
    inputs = (features - mean) / scale
    steps = steps or min(1_500, max(300, 30 * len(features) // BATCH))  # about 30 passes over the images
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_heads, features.shape[1], n_clusters, generator=generator).to(features.device)
    bias = torch.zeros(n_heads, 1, n_clusters, device=features.device).requires_grad_()
    weight.requires_grad_()
    rate = LARGEST_RATE * features.shape[1] ** 0.5
    optimizer = torch.optim.Adam([weight, bias], lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - 0.95 * step / steps)  # to a twentieth: the last steps only settle
        rows = torch.randint(len(features), (min(BATCH, len(features)),), generator=generator).to(features.device)
        pick = torch.randint(near.shape[1], (len(rows), 1), generator=generator).to(features.device)
        partners = near[rows].gather(1, pick).squeeze(1)
        loss = _losses(inputs[rows], inputs[partners], weight, bias, entropy_weight).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        losses = head_losses(inputs, near, weight.mT, bias[:, 0], entropy_weight=entropy_weight)
        best = losses.argsort(stable=True)
        weights = weight[best].mT / scale
        biases = bias[best, 0] - weights @ mean
        calm = calm_factor(inputs @ weight[best[0]] + bias[best[0]], SUREST)
        return LinearHead(calm * weights[0], calm * biases[0], losses, (weights, biases))


def steady_head(features: Tensor, head: LinearHead) -> tuple[Tensor, Tensor]:
    """Weights (k, d) and biases (k,) that repeat what heads agree on and stay right while the network moves.

    The best eighth of the heads vote, or all where these disagree (decision 028). If they leave a cluster empty, it is
    the best head unchanged.
    """
    rows = torch.linspace(0, len(features) - 1, min(REPEATED, len(features)), device=features.device).long()
    chosen = features[rows]
    votes = torch.stack([(chosen @ weight.T + bias).softmax(-1) for weight, bias in zip(*head.voters, strict=True)])
    agreed, share = agreed_clusters(votes[: max(1, len(votes) // 8)])
    clusters = (agreed if share >= STEADY else agreed_clusters(votes)[0]).cpu().numpy()
    if len(np.unique(clusters)) < len(head.bias):
        return head.weight, head.bias
    return regression_head(chosen.cpu().numpy(), clusters, len(head.bias))


def agreed_clusters(votes: Tensor) -> tuple[Tensor, float]:
    """The clusters (n,) that several clusterings agree on, from their probabilities (v, n, k), and how far they agree.

    Each clustering numbers its clusters in its own way, so each is matched to the mean of all, which begins as the
    first, the best one. The majority is better than the best head (docs/findings.md).
    """
    mean = votes[0]
    for _ in range(AGREEMENTS):
        orders = [linear_sum_assignment(-(mean.T @ vote).cpu().numpy())[1] for vote in votes]
        matched = torch.stack([vote[:, order] for vote, order in zip(votes, orders, strict=True)])
        mean = matched.mean(0)
    clusters = mean.argmax(-1)
    return clusters, float((matched.argmax(-1) == clusters).float().mean())


@torch.no_grad()
def head_losses(
    features: Tensor, near: Tensor, weights: Tensor, biases: Tensor, *, entropy_weight: float = 5.0
) -> Tensor:
    """SCAN's loss (h,) of heads with weights (h, k, d) and biases (h, k) on features (n, d) and neighbours (n, m).

    It is measured on images at even steps over the set, each with five of its neighbours.
    """
    rows = torch.linspace(0, len(features) - 1, min(JUDGED, len(features)), device=features.device).long()
    columns = torch.linspace(0, near.shape[1] - 1, min(5, near.shape[1]), device=features.device).long()
    heads = weights.mT, biases[:, None], entropy_weight
    return torch.stack([_losses(features[rows], features[near[rows, at]], *heads) for at in columns]).mean(0)


def calm_factor(logits: Tensor, surest: float, *, shrink: float = 0.9, least: float = 1e-6) -> float:
    """The factor for logits (n, k) that brings their mean confidence down to at most `surest`; 1 if it is there.

    Kinds that are far apart drive the confidence to 1. The first pair that disagrees then has gradients without bound.
    """
    factor = 1.0
    while float((factor * logits).softmax(-1).amax(-1).mean()) > surest and factor > least:
        factor *= shrink
    return factor


def calm_head(model: ClusterModel, images: ImageSet, surest: float) -> ClusterModel:
    """The model with its head made less sure, in place, if its mean confidence is above `surest`."""
    assert model.head is not None
    seen = torch.from_numpy(embed(model, images.take(spread(len(images), 2_000)))).to(model.device)
    with torch.no_grad():
        factor = calm_factor(model.classify(seen), surest, shrink=0.95, least=1e-3)
        model.head.weight.mul_(factor)
        model.head.bias.mul_(factor)
    return model


def _losses(anchors: Tensor, partners: Tensor, weight: Tensor, bias: Tensor, entropy_weight: float) -> Tensor:
    """SCAN's loss (h,) of each head."""
    n_heads, width, k = weight.shape
    columns = weight.transpose(0, 1).reshape(width, n_heads * k)  # one product for all heads: faster than one for each
    p, q = (
        _bound((side @ columns).view(-1, n_heads, k).transpose(0, 1) + bias).softmax(-1) for side in (anchors, partners)
    )  # (h, n, k)
    each = torch.vmap(lambda one, other: scan_loss(one, other, entropy_weight=entropy_weight))
    return cast(Tensor, each(p, q))


def _bound(logits: Tensor) -> Tensor:
    """Logits at most 80 below the largest of their row: a CPU is several times slower on numbers near 1e-40."""
    return (logits - logits.detach().amax(-1, keepdim=True)).clamp(min=LOWEST)


def regression_head(
    features: NDArray[np.float32],
    clusters: NDArray[np.int64],
    n_clusters: int,
    sure: NDArray[np.float64] | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights (k, d) and biases (k,) that repeat the clusters of the features, by logistic regression.

    Every cluster must have an image; `sure` (n,) says how much each of them counts. The regression is regularised, so
    that the head stays right while the network moves; the head that found the clusters may depend on features that
    hardly vary (docs/findings.md).
    """
    from sklearn.linear_model import LogisticRegression

    mean, scale = features.mean(0), features.std(0) + 1e-6
    with warnings.catch_warnings():  # many clusters for few images, or a fit that could be closer: both are good enough
        warnings.simplefilter("ignore", UserWarning)
        counts = None if sure is None else np.maximum(sure / sure.mean(), 1e-3)
        fitted = LogisticRegression(C=0.1, max_iter=200, tol=1e-3).fit((features - mean) / scale, clusters, counts)
    weight, bias = fitted.coef_, fitted.intercept_
    if n_clusters == 2:  # scikit-learn has one row for two classes; half of it on each side is the same softmax
        weight, bias = np.concatenate((-weight, weight)) / 2, np.concatenate((-bias, bias)) / 2
    weight = weight / scale
    bias = bias - weight @ mean
    return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()  # Apple's GPUs take no float64


def part_head(
    features: NDArray[np.float32], clusters: NDArray[np.int64], k: int, sure: NDArray[np.float64] | None = None
) -> tuple[Tensor, Tensor] | None:
    """The `regression_head` of k clusters, of which those without an image stay empty; None if only one has any."""
    used, numbers = np.unique(clusters, return_inverse=True)
    if len(used) < 2:
        return None
    weight, bias = torch.zeros(k, features.shape[1]), torch.full((k,), NEVER)
    weight[used], bias[used] = regression_head(features, numbers.astype(np.int64), len(used), sure)
    return weight, bias


def correct_head(model: ClusterModel, right: ClusterModel, wrong: ClusterModel, share: float) -> ClusterModel:
    """The model with this share of the way from the wrong head to the right one added to its own head.

    A cluster that one of the three leaves empty stays as it is.
    """
    heads = [[one.state_dict()[f"head.{part}"] for one in (model, right, wrong)] for part in ("weight", "bias")]
    used = torch.stack(heads[1]).amin(0) > NEVER / 2
    weight, bias = (own + share * (good - bad) for own, good, bad in heads)
    return with_head(model, torch.where(used[:, None], weight, heads[0][0]), torch.where(used, bias, heads[1][0]))


def embed_images(
    model: ClusterModel,
    images: ImageSet,
    *,
    device: torch.device | str | None = None,
    reporter: Reporter | None = None,
) -> ImageSet:
    """The embeddings that the model's backbone gives the images, with the same names and labels."""
    with watched(reporter or Reporter(), "embedding", len(images)) as progress:
        features = embed(model, images, device=device, progress=progress)
    return ImageSet.from_arrays(features, names=images.names, labels=images.labels)


def detach_head(model: ClusterModel, seen: ImageSet) -> ClusterModel:
    """The model's head as a model of its own on the embeddings that its backbone gives.

    The embeddings are scaled to one size there. The head predicts the same as before, except for rounding.
    """
    mean, std = seen.moments()
    fresh = build_model(n_clusters=0, side=1, channels=seen.channels, mean=mean, std=std).to(model.device)
    if model.head is None:
        return fresh
    weight, bias = (part.detach().float() for part in (model.head.weight, model.head.bias))
    return with_head(fresh, weight * std[0], bias + weight @ torch.tensor(mean, device=model.device))


def attach_head(model: ClusterModel, alone: ClusterModel) -> ClusterModel:
    """A copy of the model with the head that `detach_head` gave and that was trained since."""
    if alone.head is None:
        placed = with_clusters(model, 0)
    else:
        weight = alone.head.weight.detach() / alone.config.std[0]
        bias = alone.head.bias.detach() - weight @ torch.tensor(alone.config.mean, device=alone.device)
        placed = with_head(model, weight, bias)
    placed.config = replace(placed.config, trained=(*model.config.trained, *alone.config.trained))
    return placed


def bound_sizes(
    model: ClusterModel, images: ImageSet, sizes: NDArray[np.float32], *, device: torch.device | str | None = None
) -> ClusterModel:
    """The model with biases that keep its clusters of these images in the bounds `sizes` (1 or k, 2).

    Bounds for each cluster are given to the clusters by their size, the largest to the largest.
    """
    assert model.head is not None
    features = embed(model, images, device=device)
    weight, bias = (part.detach().float().cpu() for part in (model.head.weight, model.head.bias))
    logits = features @ weight.numpy().T + bias.numpy()
    bounds = size_bounds(sizes, *logits.shape)
    largest_first = np.argsort(-np.bincount(logits.argmax(1), minlength=len(bias)), kind="stable")
    own = np.empty_like(bounds)
    own[largest_first] = bounds[np.argsort(-bounds.sum(1), kind="stable")]
    return with_head(model, weight, bias + torch.from_numpy(size_shifts(logits, own)))


def size_bounds(sizes: NDArray[np.float32], n_images: int, n_clusters: int) -> NDArray[np.int64]:
    """The least and most images (k, 2) of each cluster; sizes that do not fit each other are an InputError."""
    if len(sizes) not in (1, n_clusters):
        fix = "write one line for all of them, or one for each"
        raise InputError(f"{len(sizes):,} lines of sizes for {n_clusters:,} clusters", fix=fix)
    every = np.broadcast_to(np.where(sizes <= 1, sizes * n_images, sizes), (n_clusters, 2)).astype(float)
    least, most = np.floor(every[:, 0] + 1e-3), np.minimum(np.ceil(every[:, 1] - 1e-3), n_images)
    if least.sum() > n_images or most.sum() < n_images:
        side, total = ("least", least.sum()) if least.sum() > n_images else ("most", most.sum())
        problem = f"the {side} sizes of {n_clusters:,} clusters add up to {total:,.0f} images, the set has {n_images:,}"
        raise InputError(problem, fix=f"change {side}")
    return np.stack([least, np.maximum(least, most)], axis=1).astype(np.int64)


def size_shifts(logits: NDArray[np.float32], bounds: NDArray[np.int64]) -> NDArray[np.float32]:
    """What to add to the logits (n, k) of each cluster, so that clusters have the least and most images of (k, 2).

    Of all placements in the bounds, that of the highest sum of logits has such shifts: they are the prices of its
    bounds. One cluster after the other gets its best price until none changes; in a small set a cluster may end with
    an image too many.
    """
    shift = np.zeros(logits.shape[1])
    for _ in range(SWEEPS):
        before = shift.copy()
        for cluster, (least, most) in enumerate(bounds.tolist()):
            others = np.delete(logits + shift, cluster, axis=1).max(1)
            needed = np.sort(others - logits[:, cluster])  # the shift that brings 1, 2, … images
            count = int(np.searchsorted(needed, 0.0))
            edge = least if count < least else most if count > most else None
            around = needed[max(0, (edge or 0) - 1) : (edge or 0) + 1]
            shift[cluster] = 0.0 if edge is None else around.mean() if 0 < edge < len(needed) else needed[-1] + 1.0
        if np.abs(shift - before).max() < 1e-6:
            break
    return shift.astype(np.float32)


def merge_clusters(
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints,
    *,
    device: torch.device | str | None = None,
    reporter: Reporter | None = None,
) -> ClusterModel:
    """The model with one cluster for each group of clusters that the pairs join; the same model if they join none."""
    assert model.head is not None
    reporter = reporter or Reporter()
    features = embed_images(model, images, device=device, reporter=reporter).images.reshape(len(images), -1)
    weight, bias = (part.detach().float().cpu().numpy() for part in (model.head.weight, model.head.bias))
    clusters = np.asarray((features @ weight.T + bias).argmax(1), np.int64)
    groups = group_clusters(clusters, constraints, model.config.n_clusters)
    n_groups, n_used = int(groups.max()) + 1, int((groups != EMPTY).sum())
    reporter.say(f"{n_used:,} clusters have images; merged where the pairs join them: {n_groups:,}")
    if n_groups == n_used:
        return model
    found = groups[clusters]
    first = np.unique(found, return_index=True)[1]  # every cluster needs an image
    rows = np.union1d(spread(len(found), 2 * REPEATED), first)
    return with_head(model, *regression_head(features[rows], found[rows], n_groups))


def group_clusters(clusters: NDArray[np.int64], constraints: Constraints, n_clusters: int) -> NDArray[np.int64]:
    """The group (k,) of each cluster, from the clusters (n,) of the images: the best merge, again and again.

    It ends when no merge makes the pairs likelier, or with two groups. Groups are numbered by their first clusters.
    `must` and `cannot` (k, k) hold the weights of the links between clusters, with each pair on the diagonal twice.
    """
    must, cannot = np.zeros((2, n_clusters, n_clusters))
    for table, share in ((must, constraints.link), (cannot, 1 - constraints.link)):
        np.add.at(table, (clusters[constraints.left], clusters[constraints.right]), share * constraints.weight)
        table += table.T.copy()
    group = np.where(np.bincount(clusters, minlength=n_clusters) > 0, np.arange(n_clusters), EMPTY)
    alive = np.flatnonzero(group >= 0)
    while len(alive) > 2:
        gain = _gains(must, cannot)[np.ix_(alive, alive)]
        np.fill_diagonal(gain, -np.inf)
        best = np.unravel_index(gain.argmax(), gain.shape)
        if not gain[best] > 0:
            break
        kept, gone = sorted(alive[list(best)])
        for table in (must, cannot):
            table[kept] += table[gone]
            table[:, kept] += table[:, gone]
            table[gone] = table[:, gone] = 0
        group[group == gone] = kept
        alive = alive[alive != gone]
    return np.where(group == EMPTY, EMPTY, np.searchsorted(alive, group))


def _gains(must: NDArray[np.float64], cannot: NDArray[np.float64]) -> NDArray[np.float64]:
    """By how much the merge of two clusters makes the pairs likelier (k, k), in natural logarithms.

    With m must-links and c cannot-links between the two it is m log(q / q') + c log((1 - q) / (1 - q')). q is the share
    of must-links among the pairs inside clusters, q' among those between clusters. If q is not above q', the links say
    nothing about kinds, and the gain is 0.
    """
    inside = np.trace(must) / 2, np.trace(cannot) / 2
    between = must.sum() / 2 - inside[0], cannot.sum() / 2 - inside[1]
    q, other = ((1 + same) / (2 + same + different) for same, different in (inside, between))
    if q <= other:
        return np.zeros_like(must)
    return np.asarray(must * np.log(q / other) + cannot * np.log((1 - q) / (1 - other)))
