"""A cluster head found on frozen features: many linear heads are trained by SCAN's loss at once, the best ones vote.

Which clusters SCAN ends with is decided by where its head begins; on frozen features many beginnings cost seconds.
"""

import warnings
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from constraintmatch.training.losses import scan_loss

__all__ = ["LinearHead", "agreed_clusters", "best_linear_head", "head_losses", "regression_head", "steady_head"]

BATCH, JUDGED = 1_000, 10_000  # anchors of a step, and anchors by which the heads are judged
REPEATED = 10_000  # images whose clusters the steady head is fitted to
AGREEMENTS = 5  # times that the voters' clusters are matched
LARGEST_RATE = 0.06  # for inputs of length 1
LOWEST = -80.0  # of logits, the largest of the row being 0: e^-80 is 2e-35, still a normal number in fp32
SUREST = 0.98  # mean confidence of the head; on digits and CIFAR heads are less sure by themselves


class LinearHead(NamedTuple):
    """Weights (k, d) and biases (k,) of the best head, and the loss of every head (h,), in the order of their seeds.

    `voters` are the weights (v, k, d) and biases (v, k) of the best eighth, the best first.
    """

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

    The features are centred and brought to length 1 on the mean, not standardised one by one: that would blow up
    those that hardly vary, which move as soon as the network does. The head is given back for the features as they
    are, and less sure where it would be surer than 98 % on the mean.
    """
    mean = features.mean(0)
    scale = (features - mean).norm(dim=1).mean().clamp(min=1e-12)
    inputs = (features - mean) / scale
    steps = steps or min(1_500, max(300, 30 * len(features) // BATCH))  # about 30 passes over the images
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_heads, features.shape[1], n_clusters, generator=generator).to(features.device)
    bias = torch.zeros(n_heads, 1, n_clusters, device=features.device)
    weight.requires_grad_()
    bias.requires_grad_()
    rate = LARGEST_RATE * features.shape[1] ** 0.5
    optimizer = torch.optim.Adam([weight, bias], lr=rate)
    for step in range(steps):
        for group in optimizer.param_groups:  # to a twentieth: the last steps only settle
            group["lr"] = rate * (1 - 0.95 * step / steps)
        rows = torch.randint(len(features), (min(BATCH, len(features)),), generator=generator).to(features.device)
        pick = torch.randint(near.shape[1], (len(rows), 1), generator=generator).to(features.device)
        partners = near[rows].gather(1, pick).squeeze(1)
        loss = _losses(inputs[rows], inputs[partners], weight, bias, entropy_weight).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        losses = _judge(inputs, near, weight, bias, entropy_weight)
        best = losses.argsort(stable=True)[: max(1, n_heads // 8)]
        weights = weight[best].mT / scale
        biases = bias[best, 0] - weights @ mean
        calm = _calming(inputs @ weight[best[0]] + bias[best[0]])
        return LinearHead(calm * weights[0], calm * biases[0], losses, (weights, biases))


def steady_head(features: Tensor, head: LinearHead) -> tuple[Tensor, Tensor]:
    """Weights (k, d) and biases (k,) that say what the voters agree on and stay right while the network moves.

    Where they leave a cluster empty the best head is given back as it is.
    """
    rows = torch.linspace(0, len(features) - 1, min(REPEATED, len(features)), device=features.device).long()
    chosen = features[rows]
    votes = torch.stack([(chosen @ weight.T + bias).softmax(-1) for weight, bias in zip(*head.voters, strict=True)])
    clusters = agreed_clusters(votes).cpu().numpy()
    if len(np.unique(clusters)) < len(head.bias):
        return head.weight, head.bias
    return regression_head(chosen.cpu().numpy(), clusters, len(head.bias))


def agreed_clusters(votes: Tensor) -> Tensor:
    """The clusters (n,) that several clusterings agree on, from their probabilities (v, n, k), the best first.

    The numbers of a clustering mean nothing to another one: each is matched to the mean of all, which begins as the
    first, and the mean is taken again, a few times over. Heads of about the same loss differ in some of their clusters,
    each in others; what most of them say is better than what the best says (docs/findings.md).
    """
    mean = votes[0]
    for _ in range(AGREEMENTS):
        orders = [linear_sum_assignment(-(mean.T @ vote).cpu().numpy())[1] for vote in votes]
        mean = torch.stack([vote[:, order] for vote, order in zip(votes, orders, strict=True)]).mean(0)
    return mean.argmax(-1)


def head_losses(
    features: Tensor, near: Tensor, weights: Tensor, biases: Tensor, *, entropy_weight: float = 5.0
) -> Tensor:
    """SCAN's loss (h,) of heads with weights (h, k, d) and biases (h, k) on features (n, d) and neighbours (n, m)."""
    with torch.no_grad():
        return _judge(features, near, weights.transpose(1, 2), biases[:, None], entropy_weight)


def _calming(logits: Tensor) -> float:
    """What to multiply logits (n, k) with so that the mean confidence is at most SUREST; 1 if it is.

    Kinds that lie far apart drive it to 1, and a network that begins so sure gets gradients without bound from the
    first pair that says otherwise.
    """
    factor = 1.0
    while float((factor * logits).softmax(-1).amax(-1).mean()) > SUREST and factor > 1e-6:
        factor *= 0.9
    return factor


def _losses(anchors: Tensor, partners: Tensor, weight: Tensor, bias: Tensor, entropy_weight: float) -> Tensor:
    """SCAN's loss (h,) of each head."""
    n_heads, width, k = weight.shape
    columns = weight.transpose(0, 1).reshape(width, n_heads * k)  # one product for all heads: faster than one for each
    p, q = (
        _bounded((side @ columns).view(-1, n_heads, k).transpose(0, 1) + bias).softmax(-1)
        for side in (anchors, partners)
    )  # (h, n, k)
    each = torch.vmap(lambda one, other: scan_loss(one, other, entropy_weight=entropy_weight))
    return cast(Tensor, each(p, q))


def _bounded(logits: Tensor) -> Tensor:
    """Logits at most 80 under the largest of their row: a CPU takes several times as long for those near 1e-40."""
    return (logits - logits.detach().amax(-1, keepdim=True)).clamp(min=LOWEST)


def _judge(inputs: Tensor, near: Tensor, weight: Tensor, bias: Tensor, entropy_weight: float) -> Tensor:
    """The loss (h,) on images spread over the set, each with five of its neighbours in turn."""
    count = min(JUDGED, len(inputs))
    rows = torch.linspace(0, len(inputs) - 1, count, device=inputs.device).long()
    columns = torch.linspace(0, near.shape[1] - 1, min(5, near.shape[1]), device=inputs.device).long()
    each = [_losses(inputs[rows], inputs[near[rows, column]], weight, bias, entropy_weight) for column in columns]
    return torch.stack(each).mean(0)


def regression_head(
    features: NDArray[np.float32], clusters: NDArray[np.int64], n_clusters: int
) -> tuple[Tensor, Tensor]:
    """Weights (k, d) and biases (k,) that repeat the clusters of the features, by logistic regression.

    Every cluster must have an image. The regression is held back, so that the head stays right while the network moves;
    the head that found the clusters may hang on what hardly varies (docs/findings.md).
    """
    from sklearn.linear_model import LogisticRegression

    mean, scale = features.mean(0), features.std(0) + 1e-6
    with warnings.catch_warnings():  # of many clusters for few images, or of a fit that could be closer: both will do
        warnings.simplefilter("ignore", UserWarning)
        fitted = LogisticRegression(C=0.1, max_iter=200, tol=1e-3).fit((features - mean) / scale, clusters)
    weight, bias = fitted.coef_, fitted.intercept_
    if n_clusters == 2:  # scikit-learn keeps one row for two classes; half of it on each side is the same softmax
        weight, bias = np.concatenate((-weight, weight)) / 2, np.concatenate((-bias, bias)) / 2
    weight = weight / scale
    bias = bias - weight @ mean
    return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()  # Apple's GPUs take no float64
