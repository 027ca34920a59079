"""ClusterNet (Shukla, Cheema and Anand 2018): an autoencoder with centres, which a few labels or pairs hold apart."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.methods.others.parts import Floats, Predict, Rows, Setup, k_means, squared_distances
from constraintmatch.training.losses import kcl

COMPACT, LINKED = 0.1, 0.1  # weights of the distance to centres and of the pairs


def clusternet(setup: Setup) -> Predict:
    """Departs from the paper: pairs are taken as they are; labels, where there are some, begin the centres too."""
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
    columns = ((constraints.left, one), (constraints.right, other), (constraints.link, labels[one] == labels[other]))
    left, right, link = (np.concatenate(column) for column in columns)
    weight = np.concatenate((constraints.weight, np.ones(len(one), np.float32)))
    return Constraints.from_arrays(left, right, link, weight=weight, n_images=constraints.n_images)


def _class_means(points: Floats, setup: Setup) -> Floats | None:
    """The means (k, d) of the labelled points; None unless every cluster has one."""
    labels = setup.labels
    if labels is None or len(classes := np.unique(labels[labels >= 0])) != setup.n_clusters:
        return None
    return np.stack([points[labels == label].mean(0) for label in classes])
