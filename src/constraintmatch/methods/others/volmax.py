"""VolMaxDCC (Nguyen, Ibrahim and Fu 2023): a classifier, a confusion of answers, and the volume of its predictions."""

import torch
from torch import Tensor, nn

from constraintmatch.methods.others.parts import WIDTH, Predict, Setup

VOLUME = 0.01  # weight of the volume
SHARP = 3.0  # logits of the confusion at first: ± 3 is a chance of 0.95 or 0.05
TINY = 1e-6


def volmax(setup: Setup) -> Predict:
    """Departs from the paper: the volume is that of a batch of all images, and its weight is not tuned."""
    classifier = setup.network(WIDTH, setup.n_clusters)
    confusion = nn.Parameter(SHARP * (2 * torch.eye(setup.n_clusters) - 1))

    def loss() -> Tensor:
        left, right, link = setup.some_pairs()
        rows = torch.cat((left, right, setup.some_rows()))
        one, other, some = classifier(setup.inputs[rows]).softmax(-1).chunk(3)
        chances = ((confusion + confusion.mT) / 2).sigmoid()
        return confused_loss(one, other, link, chances) - VOLUME * log_volume(some)

    setup.descend([*classifier.parameters(), confusion], loss)
    return setup.by(lambda inputs: classifier(inputs).softmax(-1))


def confused_loss(left: Tensor, right: Tensor, link: Tensor, chances: Tensor) -> Tensor:
    """The logistic loss of n pairs (n, k) whose answer is "same" with pᵀ B q; B (k, k) holds the chances."""
    same = ((left @ chances) * right).sum(-1).clamp(TINY, 1 - TINY)
    return -(link * same.log() + (1 - link) * (1 - same).log()).mean()


def log_volume(p: Tensor) -> Tensor:
    """log det(PᵀP / n) of predictions (n, k): the more they reach into all corners, the larger."""
    k = p.shape[1]
    return torch.logdet(p.mT @ p / len(p) + TINY * torch.eye(k))
