"""Prototypes: k-means on the sphere, and what pairs say about the kind of each prototype.

A linear head has thousands of numbers, and a few hundred pairs lead it anywhere. K-means divides the images among a
hundred prototypes, and pairs only have to say which kind each of them is. Some of the pairs may be wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.evaluation.judge import TRIPLETS_WRONG, Rates, doubts, estimate_rates
from constraintmatch.training.batches import derive_seed

TRIES, TURNS = 3, 30  # fresh beginnings of k-means, and turns of each
BETTER = 1e-4  # by how much the mean cosine of a fresh one must be higher
DIVISIONS = 4  # of the images into prototypes; their mean is steadier than each of them
PROTOTYPES, EACH, SMALLEST = 100, 5, 20  # in a division; at least for each kind; images of each, at least
WIDTH = 0.05  # of a prototype, in cosines
ROUNDS = 5  # in which the divisions learn, each from what all of them found before
HELD = 6.0  # images of a prototype that say before a round what is known by then
CALM = 20.0  # the same, or all pairs if they are more, where only the rates of wrong pairs are asked for
STEPS, RATE, BENT_RATE = 60, 0.4, 0.08
STIFF = 0.1  # what bending costs
FLOOR = 0.01  # share of any kind at the beginning
CAPS = 2.0, 4.0  # the most that the must-links, and the cannot-links, of one image weigh


@dataclass(frozen=True)
class _Links:
    """Pairs and triplets; `at` (u,) are the places of their images, which the other numbers count."""

    at: Tensor
    left: Tensor
    right: Tensor
    link: Tensor
    weight: Tensor
    triplets: Tensor
    triplet_weight: Tensor

    @classmethod
    def of(cls, pairs: Constraints, rows: NDArray[np.int64]) -> "_Links":
        """Those with a weight, of images in these rows."""
        pairs, triplets = pairs.take(pairs.weight > 0), pairs.triplets.take(pairs.triplets.weight > 0)
        ends = np.stack([pairs.left, pairs.right])
        images, number = np.unique(np.concatenate([ends.ravel(), triplets.rows.ravel()]), return_inverse=True)
        left, right = number[: ends.size].reshape(ends.shape)
        weight = pairs.weight.astype(np.float32)
        for kind, cap in zip((pairs.link > 0.5, pairs.link <= 0.5), CAPS, strict=True):
            often = np.bincount(np.concatenate([left[kind], right[kind]]), minlength=1)
            weight[kind] *= np.minimum(1, cap / np.minimum(often[left[kind]], often[right[kind]]))
        parts = [np.searchsorted(rows, images), left, right, pairs.link.astype(np.float32), weight]
        parts += [number[ends.size :].reshape(triplets.rows.shape), triplets.weight.astype(np.float32)]
        return cls(*map(torch.from_numpy, parts))

    def same(self, found: Tensor) -> Tensor:
        """The probability (…, p) that both images of a pair are of one kind, from the share of each kind (…, u, k)."""
        return (found.index_select(-2, self.left) * found.index_select(-2, self.right)).sum(-1)

    def loss(self, found: Tensor, rates: Rates) -> Tensor:
        """−log of the likelihood of all links, summed over all beliefs (…, u, k)."""
        same = self.same(found)
        says_same = (same * (1 - rates.missed) + (1 - same) * rates.invented).clamp(1e-6, 1 - 1e-6)
        of_pairs = self.link * says_same.log() + (1 - self.link) * (1 - says_same).log()
        anchor, near, far = (found.index_select(-2, rows) for rows in self.triplets.unbind(1))
        of_triplets = (0.5 + (0.5 - TRIPLETS_WRONG) * (anchor * (near - far)).sum(-1)).log()
        return -(of_pairs @ self.weight).sum() - (of_triplets @ self.triplet_weight).sum()


@dataclass(frozen=True)
class Prototypes:
    """Images (n), what a model believes of them, and their divisions into prototypes."""

    rows: NDArray[np.int64]
    beliefs: Tensor  # (n, k)
    points: Tensor  # (n, d), of length 1
    shares: Tensor  # (v, n, m) of m prototypes in an image, for each division

    @classmethod
    def of(
        cls, features: NDArray[np.float32], rows: NDArray[np.int64], beliefs: NDArray[np.float32], *, seed: int
    ) -> "Prototypes":
        """Those of the images of these rows, with their features (n, d)."""
        points = torch.from_numpy(features)
        points = F.normalize(points - points.mean(0), dim=-1)
        m = max(2, min(max(PROTOTYPES, EACH * beliefs.shape[1]), len(points) // SMALLEST))
        found = (spherical_k_means(points, m, seed=derive_seed(seed, "division", n), tries=1) for n in range(DIVISIONS))
        divisions = [(points @ _centres(points, clusters, m).mT / WIDTH).softmax(-1) for clusters in found]
        return cls(rows, torch.from_numpy(beliefs), points, torch.stack(divisions))

    def learn(self, pairs: Constraints) -> list[NDArray[np.float32]]:
        """Beliefs (n, k) about the images: before the pairs, after each round, and what the last one bends them to.

        The kinds of the prototypes begin with what the model believes of them. They become those that make the links
        likeliest, which miss "same" and invent it at rates that are estimated, and that stay near what was known
        before. The mean of several divisions, half bent to the links, begins the next round: a mistake of one of them
        goes no further. More rounds learn more from many pairs, and more mistakes from wrong ones.
        """
        links = _Links.of(pairs, self.rows)
        rates = _find_rates(self.shares[:1], _known(self.shares[:1], self.beliefs), links)
        held = HELD / (1 - rates.missed - rates.invented) ** 2  # what noisy links say falls with this square
        mean = (self.shares @ _known(self.shares, self.beliefs)).mean(0)
        first, found = mean.argmax(1), [(self.beliefs + mean) / 2]
        for _ in range(ROUNDS):
            mean = (self.shares @ _learn(self.shares, _known(self.shares, mean), links, rates, held)).mean(0)
            as_before = (mean.argmax(1) == first)[:, None]  # prototypes are coarser than a good start
            mean = torch.where(as_before, (self.beliefs + mean) / 2, mean)
            bent = _bend(self.points, mean, links, rates)
            mean = (mean + bent) / 2
            found.append(mean)
        return [one.numpy() for one in (*found, bent)]


def _known(shares: Tensor, beliefs: Tensor) -> Tensor:
    """The mean beliefs (v, m, k) of the images of each prototype."""
    return F.normalize(shares.mT @ beliefs + 1e-6, p=1, dim=-1)


def _learn(shares: Tensor, known: Tensor, links: _Links, rates: Rates, held: float) -> Tensor:
    """The kinds (v, m, k) of prototypes that make the links likeliest; `held` images say what is known of each.

    Divisions learn side by side, each as it would alone.
    """
    some = shares.index_select(1, links.at)

    def loss(logits: Tensor) -> Tensor:
        return links.loss(some @ logits.softmax(-1), rates) - held * (known * logits.log_softmax(-1)).sum()

    return _minimise(loss, (known + FLOOR).log(), RATE).softmax(-1)


def _bend(points: Tensor, mean: Tensor, links: _Links, rates: Rates) -> Tensor:
    """The beliefs (n, k) times a linear function of the points (n, d): the one that makes the links likeliest.

    Prototypes are coarse, and many links say more than their kinds. A link counts as far as the beliefs trust it,
    because a linear function can explain mistakes too.
    """
    same, link = (one.numpy().astype(float) for one in (links.same(mean[links.at]), links.link))
    trust = torch.from_numpy(1 - doubts(same, link, rates)).float()
    links, base = replace(links, weight=links.weight * trust), (mean + FLOOR).log()
    some, before = points[links.at], base[links.at]

    def loss(weight: Tensor) -> Tensor:
        return links.loss((before + some @ weight).softmax(-1), rates) + STIFF * weight.square().sum()

    weight = _minimise(loss, points.new_zeros(points.shape[1], mean.shape[1]), BENT_RATE)
    return (base + points @ weight).softmax(-1)


def _minimise(loss: Callable[[Tensor], Tensor], begin: Tensor, rate: float) -> Tensor:
    numbers = begin.requires_grad_()
    optimizer = torch.optim.Adam([numbers], lr=rate)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(numbers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return numbers.detach()


def _find_rates(shares: Tensor, known: Tensor, links: _Links) -> Rates:
    """How often the links are wrong, as far as kinds tell that hardly follow them."""
    rates, some = Rates(0.1, 0.01), shares.index_select(1, links.at)
    calm = max(CALM, float(links.weight.sum()) / shares.shape[-1])
    link, weight = links.link.numpy().astype(float), links.weight.numpy().astype(float)
    for _ in range(2):
        same = links.same(some @ _learn(shares, known, links, rates, calm))
        rates = estimate_rates(same.numpy().astype(float), link, weight)[0]
    return rates


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
