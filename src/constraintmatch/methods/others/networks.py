"""Other systems that train a network on features and pairs: autoencoders with centres, and classifiers."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import pair_keys
from constraintmatch.evaluation.neighbours import nearest_neighbours
from constraintmatch.methods.others.parts import (
    BATCH,
    EMBEDDING,
    WIDTH,
    Floats,
    Predict,
    Rows,
    Setup,
    k_means,
    place_around,
    squared_distances,
)
from constraintmatch.methods.prototypes import spherical_k_means
from constraintmatch.training.losses import angular_loss, kcl, pair_loss

COMPACT, LINKED = 0.1, 0.1  # ClusterNet: weights of the distance to centres and of the pairs
MUTUAL = 10  # CPAC: neighbours, of which the mutual ones are linked
SURE = 0.1  # S³C²: weight of the term that makes the network sure of pairs without a link
FEW = 64  # S³C²: images of a step whose pairs are all linked
TINY = 1e-6
FARTHEST = 80.0  # e^-80 is still a normal number in fp32; others are slow
REPEAT = 0.02  # SpherePair: weight of the reconstruction
SHARPNESS = 10.0  # SpherePair: of the cosines
VOLUME = 0.01  # VolMaxDCC: weight of the volume
CONFUSION = 3.0  # VolMaxDCC: logits of the confusion at first: ± 3 is a chance of 0.95 or 0.05
MARGIN = 0.1  # framework: by which the near image of a triplet must be more alike than the far one
EASY = 0.1  # framework: weight of the difficulty


def clusternet(setup: Setup) -> Predict:
    """ClusterNet (Shukla, Cheema and Anand 2018): an autoencoder with centres, which a few labels or pairs hold apart.

    Departs from the paper: pairs are taken as they are; labels, where there are some, begin the centres too.
    """
    if setup.labels is not None:
        setup.use_pairs(_with_labels(setup.constraints, setup.labels))
    encoder, decoder = setup.autoencoder()
    with torch.no_grad():
        embedded = encoder(setup.inputs)
        found = k_means(embedded, setup.n_clusters, setup.seed, _class_means(embedded.numpy(), setup))
        unit = centre_loss(embedded, found)  # of distances: else a softmax of them is all but 0 or 1
    centres = nn.Parameter(found)

    def place(inputs: Tensor) -> Tensor:
        return (-squared_distances(encoder(inputs), centres) / unit).softmax(-1)

    def loss() -> Tensor:
        left, right, link = setup.some_pairs()
        some = setup.some_inputs()
        code = encoder(some)
        one, other = place(setup.inputs[torch.cat((left, right))]).chunk(2)
        return F.mse_loss(decoder(code), some) + COMPACT * centre_loss(code, centres) + LINKED * kcl(one, other, link)

    setup.descend([*encoder.parameters(), *decoder.parameters(), centres], loss)
    return setup.by(place)


def centre_loss(points: Tensor, centres: Tensor) -> Tensor:
    """The mean squared distance of points to their nearest centre: what k-means makes small."""
    return squared_distances(points, centres).min(1).values.mean()


def _with_labels(constraints: Constraints, labels: Rows) -> Constraints:
    """The pairs, and all pairs of images whose labels are known (not −1)."""
    known = np.flatnonzero(labels >= 0)
    one, other = (known[at] for at in np.triu_indices(len(known), 1))
    same = (labels[one] == labels[other]).astype(np.float32)
    return Constraints.join([constraints, Constraints.from_arrays(one, other, same, n_images=constraints.n_images)])


def _class_means(points: Floats, setup: Setup) -> Floats | None:
    """The means (k, d) of the labelled points; None unless every cluster has one."""
    labels = setup.labels
    if labels is None or len(classes := np.unique(labels[labels >= 0])) != setup.n_clusters:
        return None
    return np.stack([points[labels == label].mean(0) for label in classes])


def cpac(setup: Setup) -> Predict:
    """CPAC (Fogel, Averbuch-Elor, Goldberger and Cohen-Or 2019): an autoencoder that pulls linked neighbours together.

    Departs from the paper: K is given, so k-means in the embedding places images, not connected components.
    """
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
    n, near = len(inputs), nearest_neighbours(inputs, MUTUAL)
    ends = np.repeat(np.arange(n), near.shape[1]), near.ravel()
    keys, times = np.unique(pair_keys(*ends, n), return_counts=True)
    given = pair_keys(constraints.left, constraints.right, n)
    mutual = np.setdiff1d(keys[times == 2], given[constraints.link < 0.5])
    left, right = np.divmod(np.union1d(mutual, given[constraints.link > 0.5]), n)
    degree = np.bincount(np.concatenate((left, right)), minlength=n)
    weight = degree[degree > 0].mean() / np.sqrt(degree[left] * degree[right])
    return torch.from_numpy(left), torch.from_numpy(right), torch.from_numpy(weight).float()


def s3c2(setup: Setup) -> Predict:
    """S³C² (Śmieja, Struski and Figueiredo 2020): a siamese network links all pairs, a classifier learns from them.

    Departs from the paper: one classifier for all data sets, and the links count by how sure the siamese one is.
    """
    siamese = setup.network(WIDTH, EMBEDDING)

    def first() -> Tensor:
        left, right, link = setup.some_pairs()
        rows = torch.cat((left, right, setup.some_rows(), setup.some_rows()))
        one, other, some, more = siamese(setup.inputs[rows]).chunk(4)
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


def spherepair(setup: Setup) -> Predict:
    """SpherePair (2025): an embedding whose angles keep the pairs, an autoencoder for the rest, then k-means on angles.

    Departs from the paper: K is given, not inferred, and the network is small (`parts`).
    """
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
    return setup.by(lambda inputs: (SHARPNESS * F.normalize(encoder(inputs), dim=-1) @ centres.mT).softmax(-1))


def volmax(setup: Setup) -> Predict:
    """VolMaxDCC (Nguyen, Ibrahim and Fu 2023): a classifier, a confusion of answers, and the volume of its predictions.

    Departs from the paper: the volume is that of a batch of all images, and its weight is not tuned.
    """
    classifier = setup.network(WIDTH, setup.n_clusters)
    confusion = nn.Parameter(CONFUSION * (2 * torch.eye(setup.n_clusters) - 1))

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
    return torch.logdet(p.mT @ p / len(p) + TINY * torch.eye(p.shape[1]))


def framework(setup: Setup, *, sizes: Floats | None = None) -> Predict:
    """The framework of Zhang, Basu and Davidson (2019): embedded clustering with losses for several kinds of knowledge.

    Departs from the paper: triplets and difficulty come from the pairs, and all terms are in one step.

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
    ends, apart = np.stack((constraints.left, constraints.right), 1), dict[int, list[int]]()
    for one, other in ends[constraints.link < 0.5].tolist():
        apart.setdefault(one, []).append(other)
        apart.setdefault(other, []).append(one)
    found = [
        (anchor, near, far)
        for one, other in ends[constraints.link > 0.5].tolist()
        for anchor, near in ((one, other), (other, one))
        for far in apart.get(anchor, ())
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 3)
