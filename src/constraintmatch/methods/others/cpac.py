"""CPAC (Fogel, Averbuch-Elor, Goldberger and Cohen-Or 2019): an autoencoder that pulls linked neighbours together."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import pair_keys
from constraintmatch.evaluation.neighbours import nearest_neighbours
from constraintmatch.methods.others.parts import BATCH, Floats, Predict, Setup, k_means, place_around

NEAR = 10  # neighbours, of which the mutual ones are linked


def cpac(setup: Setup) -> Predict:
    """Departs from the paper: K is given, so k-means in the embedding places images, not connected components."""
    encoder, decoder = setup.autoencoder()
    left, right, weight = neighbour_pairs(setup.inputs.numpy(), setup.constraints)
    apart = torch.nonzero(setup.link < 0.5)[:, 0]
    with torch.no_grad():
        embedded = encoder(setup.inputs)
        scale = (embedded[left] - embedded[right]).square().sum(-1).mean()
        margin = (encoder(setup.some_inputs()) - encoder(setup.some_inputs())).norm(dim=-1).mean()

    def loss() -> Tensor:
        at = torch.randint(len(left), (BATCH,), generator=setup.draw)
        inputs = setup.inputs[torch.cat((left[at], right[at]))]
        code = encoder(inputs)
        one, other = code.chunk(2)
        total: Tensor = F.mse_loss(decoder(code), inputs)
        total = total + (weight[at] * geman_mcclure((one - other).square().sum(-1), scale)).mean() / scale
        if len(apart):
            at = apart[torch.randint(len(apart), (BATCH,), generator=setup.draw)]
            near = (encoder(setup.inputs[setup.left[at]]) - encoder(setup.inputs[setup.right[at]])).norm(dim=-1)
            total = total + (F.relu(margin - near) / margin).square().mean()
        return total

    setup.descend([*encoder.parameters(), *decoder.parameters()], loss)
    with torch.no_grad():
        centres = k_means(encoder(setup.inputs), setup.n_clusters, setup.seed)
    return setup.by(lambda inputs: place_around(encoder(inputs), centres))


def geman_mcclure(squared: Tensor, scale: Tensor | float) -> Tensor:
    """μ d² / (μ + d²), the robust loss of squared distances: a link that is far longer than others hardly pulls."""
    return scale * squared / (scale + squared)


def neighbour_pairs(inputs: Floats, constraints: Constraints) -> tuple[Tensor, Tensor, Tensor]:
    """The mutual neighbours without cannot-links, and the must-links: both rows and a weight of each pair.

    The weight is the mean degree / √(both degrees), so that an image of many pairs does not outweigh others.
    """
    n, near = len(inputs), nearest_neighbours(inputs, NEAR)
    ends = np.repeat(np.arange(n), near.shape[1]), near.ravel()
    keys, times = np.unique(pair_keys(*ends, n), return_counts=True)
    given = pair_keys(constraints.left, constraints.right, n)
    mutual = np.setdiff1d(keys[times == 2], given[constraints.link < 0.5])
    left, right = np.divmod(np.union1d(mutual, given[constraints.link > 0.5]), n)
    degree = np.bincount(np.concatenate((left, right)), minlength=n)
    weight = degree[degree > 0].mean() / np.sqrt(degree[left] * degree[right])
    return torch.from_numpy(left), torch.from_numpy(right), torch.from_numpy(weight).float()
