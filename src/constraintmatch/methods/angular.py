"""Clusters by direction: k-means on the sphere, and a head that thousands of pairs teach through angles."""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.methods.heads import regression_head
from constraintmatch.methods.preparation import spread
from constraintmatch.training.losses import angular_loss

TRIES, TURNS = 3, 30  # fresh beginnings of k-means, and turns of each
HEAD_TRIES = 20  # where the clusters become a head: with 3, one sample of pairs in two loses two points on 20 kinds
BETTER = 1e-4  # by how much the mean cosine of a fresh one must be higher
STEPS, RATE = 1_500, 3e-3
WIDTHS = 256, 32  # inside the network of the embedding, and of the embedding
BATCH = 128, 256  # must-links and cannot-links in a step
MOST = 20_000  # images whose clusters the head repeats


def angular_head(
    features: NDArray[np.float32], constraints: Constraints, before: NDArray[np.int64], n_clusters: int, *, seed: int
) -> tuple[Tensor, Tensor] | None:
    """Weights (k, d) and biases (k,) of a head that thousands of pairs teach, by an embedding between them and it.

    A small network turns the features so that must-links point the same way and cannot-links do not (`angular_loss`).
    K-means in that embedding finds the clusters, and the head repeats them. On frozen features of 20 kinds 10,000 pairs
    are worth eight points so, and three by the pair loss (docs/findings.md). The clusters keep the numbers of those
    that they overlap in `before` (n,). None if a cluster stays empty.
    """
    inputs = torch.from_numpy(features)
    inputs = 3 * (inputs - inputs.mean(0)) / (inputs - inputs.mean(0)).norm(dim=1).mean().clamp(min=1e-12)
    network = _train_embedding(inputs, constraints, seed)
    some = spread(len(features), MOST)
    with torch.no_grad():
        points = F.normalize(network(inputs[some]), dim=-1)
    found = spherical_k_means(points, n_clusters, seed=seed, tries=HEAD_TRIES).numpy()
    if len(np.unique(found)) < n_clusters:
        return None
    table = np.zeros((n_clusters, n_clusters))
    np.add.at(table, (found, before[some]), 1)
    numbers = linear_sum_assignment(table, maximize=True)[1]
    return regression_head(features[some], numbers[found], n_clusters)


def _train_embedding(inputs: Tensor, constraints: Constraints, seed: int) -> nn.Module:
    """A network from features (n, d) to an embedding, trained on the pairs; as many must-links in every step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # layers draw from the global generator; no other draw may change
        torch.default_generator.manual_seed(seed)
        hidden, width = WIDTHS
        network = nn.Sequential(nn.Linear(inputs.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, width))
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=1e-4)
    columns = (constraints.left, constraints.right, constraints.link, constraints.weight)
    left, right, link, weight = (torch.from_numpy(column.copy()) for column in columns)
    kinds = [torch.nonzero(kind & (weight > 0))[:, 0] for kind in (link > 0.5, link < 0.5)]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / STEPS)
        drawn = [
            kind[torch.multinomial(weight[kind], n, replacement=True, generator=generator)]
            for kind, n in zip(kinds, BATCH, strict=True)
        ]
        rows = torch.cat(drawn)
        one, other = network(inputs[torch.cat((left[rows], right[rows]))]).chunk(2)
        optimizer.zero_grad()
        angular_loss(one, other, link[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network


@torch.no_grad()
def spherical_k_means(points: Tensor, k: int, *, seed: int, begin: Tensor | None = None, tries: int = TRIES) -> Tensor:
    """The clusters (n,) of points of length 1 (n, d) by k-means on the sphere: the best of `tries` beginnings.

    They are drawn as in k-means++; `begin` (n,), clusters from before, wins unless another one is clearly better. A
    cluster that loses all its points takes the one that fits its own least.
    """
    generator = torch.Generator().manual_seed(seed)
    found = [_settle(points, _draw_centres(points, k, generator)) for _ in range(tries)]
    best, tightest = max(found, key=lambda one: one[1])
    if begin is not None and bool((torch.bincount(begin, minlength=k) > 0).all()):
        again, tight = _settle(points, _centres(points, begin, k))
        best = again if tight >= tightest - BETTER * len(points) else best
    return best


def _settle(points: Tensor, centres: Tensor) -> tuple[Tensor, float]:
    """The clusters (n,) that these centres (k, d) end with, and the sum of the points' cosines to their centres."""
    before = points.new_empty(0, dtype=torch.long)
    for _ in range(TURNS):
        cosine, clusters = (points @ centres.mT).max(1)
        empty = torch.bincount(clusters, minlength=len(centres)) == 0
        clusters[cosine.argsort()[: int(empty.sum())]] = empty.nonzero()[:, 0]
        if torch.equal(clusters, before):  # and so will every later turn
            break
        before, centres = clusters, _centres(points, clusters, len(centres))
    cosine, clusters = (points @ centres.mT).max(1)
    return clusters, float(cosine.sum())


def _centres(points: Tensor, clusters: Tensor, k: int) -> Tensor:
    return F.normalize(points.new_zeros(k, points.shape[1]).index_add_(0, clusters, points), dim=-1)


def _draw_centres(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k points, each drawn with a chance that grows with its distance to the nearest of those before."""
    first = int(torch.randint(len(points), (), generator=generator))
    chosen, far = points[first][None], 1 - points @ points[first]
    for _ in range(k - 1):
        upto = far.clamp(min=1e-9).double().cumsum(0)
        drawn = upto[-1] * float(torch.rand((), generator=generator))
        at = int(torch.searchsorted(upto, drawn).clamp(max=len(far) - 1))
        chosen, far = torch.cat((chosen, points[at][None])), torch.minimum(far, 1 - points @ points[at])
    return chosen
