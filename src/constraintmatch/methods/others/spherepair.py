"""SpherePair (2025): an embedding whose angles keep the pairs, an autoencoder for the rest, then k-means on angles."""

import torch
from torch import Tensor
from torch.nn import functional as F

from constraintmatch.methods.angular import spherical_k_means
from constraintmatch.methods.others.parts import Predict, Setup
from constraintmatch.training.losses import angular_loss

REPEAT = 0.02  # weight of the reconstruction
SHARP = 10.0  # of the cosines


def spherepair(setup: Setup) -> Predict:
    """Departs from the paper: K is given, not inferred, and the network is small (`parts`)."""
    encoder, decoder = setup.autoencoder()

    def loss() -> Tensor:
        left, right, link = setup.some_pairs()
        some = setup.some_inputs()
        one, other = encoder(setup.inputs[torch.cat((left, right))]).chunk(2)
        return angular_loss(one, other, link.round()) + REPEAT * F.mse_loss(decoder(encoder(some)), some)

    setup.descend([*encoder.parameters(), *decoder.parameters()], loss)
    with torch.no_grad():
        points = F.normalize(encoder(setup.inputs), dim=-1)
    found = spherical_k_means(points, setup.n_clusters, seed=setup.seed)
    sums = torch.zeros(setup.n_clusters, points.shape[1]).index_add_(0, found, points)
    centres = F.normalize(sums, dim=-1)
    return setup.by(lambda inputs: (SHARP * F.normalize(encoder(inputs), dim=-1) @ centres.mT).softmax(-1))
