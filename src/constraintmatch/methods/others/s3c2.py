"""S³C² (Śmieja, Struski and Figueiredo 2020): a siamese network links all pairs, a classifier learns from them."""

import torch
from torch import Tensor

from constraintmatch.methods.others.parts import EMBEDDING, WIDTH, Predict, Setup
from constraintmatch.training.losses import pair_loss

SURE = 0.1  # weight of the term that makes the network sure of pairs without a link
FEW = 64  # images of a step whose pairs are all linked
TINY = 1e-6
FARTHEST = 80.0  # e^-80 is still a normal number in fp32; others are slow


def s3c2(setup: Setup) -> Predict:
    """Departs from the paper: one classifier for all data sets, and the links count by how sure the siamese one is."""
    siamese = setup.network(WIDTH, EMBEDDING)

    def first() -> Tensor:
        left, right, link = setup.some_pairs()
        one, other, some, more = siamese(
            setup.inputs[torch.cat((left, right, setup.some_rows(), setup.some_rows()))]
        ).chunk(4)
        return siamese_loss(_squared(one, other), link, _squared(some, more))

    setup.descend(siamese.parameters(), first)
    classifier = setup.network(WIDTH, setup.n_clusters)
    ends = torch.triu_indices(FEW, FEW, 1)

    def second() -> Tensor:
        left, right, link = setup.some_pairs()
        some = setup.some_inputs(FEW)
        with torch.no_grad():
            embedded = siamese(some)
            same = siamese_same(_squared(embedded[ends[0]], embedded[ends[1]]))
        p, q = classifier(setup.inputs[torch.cat((left, right))]).softmax(-1).chunk(2)
        each = classifier(some).softmax(-1)
        found = pair_loss(each[ends[0]], each[ends[1]], same.round(), (2 * same - 1).abs())
        return pair_loss(p, q, link) + found

    setup.descend(classifier.parameters(), second)
    return setup.by(lambda inputs: classifier(inputs).softmax(-1))


def siamese_same(squared: Tensor) -> Tensor:
    """The probability exp(−d²) that the images of a pair are the same, of squared distances."""
    return (-squared.clamp(max=FARTHEST)).exp()


def siamese_loss(squared: Tensor, link: Tensor, without: Tensor) -> Tensor:
    """Cross-entropy of pairs at squared distances against their links, and a tenth of the entropy of pairs without."""
    given = link * squared - (1 - link) * torch.log1p(-siamese_same(squared).clamp(max=1 - TINY))
    same = siamese_same(without).clamp(max=1 - TINY)
    entropy = same * without.clamp(max=FARTHEST) - (1 - same) * torch.log1p(-same)
    return given.mean() + SURE * entropy.mean()


def _squared(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).square().sum(-1)
