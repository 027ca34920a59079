"""The framework of Zhang, Basu and Davidson (2019): embedded clustering with losses for several kinds of knowledge."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.methods.others.parts import BATCH, Floats, Predict, Setup, k_means, squared_distances
from constraintmatch.training.losses import pair_loss

MARGIN = 0.1  # by which the near image of a triplet must be more alike than the far one
EASY = 0.1  # weight of the difficulty


def framework(setup: Setup, *, sizes: Floats | None = None) -> Predict:
    """Departs from the paper: triplets and difficulty come from the pairs, and all terms are in one step.

    An image with a must-link and a cannot-link is the anchor of a triplet; an image is as easy as its links are sure.
    `sizes` (k,) are the shares of the clusters, where they are known.
    """
    encoder, decoder = setup.autoencoder()
    with torch.no_grad():
        centres = nn.Parameter(k_means(encoder(setup.inputs), setup.n_clusters, setup.seed))
    triplets = _triplets(setup.constraints)
    easy = _easiness(setup.constraints)

    def loss() -> Tensor:
        left, right, link = setup.some_pairs()
        some = setup.some_inputs()
        code = encoder(some)
        q = soft_assignment(code, centres)
        one, other = soft_assignment(encoder(setup.inputs[torch.cat((left, right))]), centres).chunk(2)
        total = F.mse_loss(decoder(code), some) + F.kl_div(q.log(), target_distribution(q), reduction="batchmean")
        total = total + pair_loss(one, other, link) + EASY * difficulty_loss(one, easy[left])
        if len(triplets):
            rows = triplets[torch.randint(len(triplets), (BATCH,), generator=setup.draw)]
            anchor, near, far = soft_assignment(encoder(setup.inputs[rows.mT.reshape(-1)]), centres).chunk(3)
            total = total + triplet_loss(anchor, near, far)
        return total if sizes is None else total + size_loss(q, torch.from_numpy(sizes))

    setup.descend([*encoder.parameters(), *decoder.parameters(), centres], loss)
    return setup.by(lambda inputs: soft_assignment(encoder(inputs), centres))


def soft_assignment(points: Tensor, centres: Tensor) -> Tensor:
    """DEC's q (n, k): Student's t of the distances to the centres, with one degree of freedom."""
    near = 1 / (1 + squared_distances(points, centres))
    return near / near.sum(1, keepdim=True)


def target_distribution(q: Tensor) -> Tensor:
    """DEC's p: q² over the size of each cluster, without a gradient; surer than q, and even over clusters."""
    weighed = (q.square() / q.sum(0)).detach()
    return weighed / weighed.sum(1, keepdim=True)


def triplet_loss(anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """max(0, ⟨a, f⟩ − ⟨a, n⟩ + margin): the anchor shares clusters with the near image and not with the far one."""
    return F.relu((anchor * far).sum(-1) - (anchor * near).sum(-1) + MARGIN).mean()


def difficulty_loss(q: Tensor, easy: Tensor) -> Tensor:
    """m (1 − Σ q²) of easy images (m > 0), and −m Σ q² of hard ones: sure of the first, unsure of the second."""
    sure = q.square().sum(-1)
    return torch.where(easy > 0, easy * (1 - sure), -easy * sure).mean()


def size_loss(q: Tensor, sizes: Tensor) -> Tensor:
    """Σ (mean of q − size)² over the clusters, the largest cluster against the largest size."""
    return (q.mean(0).sort(descending=True).values - sizes.sort(descending=True).values).square().sum()


def _easiness(constraints: Constraints) -> Tensor:
    """2 × (the mean over an image's links of how sure they are) − 1, in [−1, 1]; 0 without a link."""
    ends = np.concatenate((constraints.left, constraints.right))
    sure = np.tile(np.abs(2 * constraints.link - 1), 2)
    count = np.bincount(ends, minlength=constraints.n_images)
    mean = np.bincount(ends, sure, minlength=constraints.n_images) / np.maximum(count, 1)
    return torch.from_numpy(np.where(count > 0, 2 * mean - 1, 0)).float()


def _triplets(constraints: Constraints) -> Tensor:
    """Anchor, near and far (m, 3): every must-link with a cannot-link of one of its images."""
    apart: dict[int, list[int]] = {}
    for one, other in zip(*_ends(constraints, constraints.link < 0.5), strict=True):
        apart.setdefault(one, []).append(other)
        apart.setdefault(other, []).append(one)
    found = [
        (anchor, near, far)
        for one, other in zip(*_ends(constraints, constraints.link > 0.5), strict=True)
        for anchor, near in ((one, other), (other, one))
        for far in apart.get(anchor, ())
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 3)


def _ends(constraints: Constraints, of: np.ndarray) -> tuple[list[int], list[int]]:
    return constraints.left[of].tolist(), constraints.right[of].tolist()
