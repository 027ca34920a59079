"""Clusters that the pairs say are one, merged: a start with more clusters than kinds gets nearly as many as there are.

A must-link between two clusters speaks for one kind, a cannot-link against it. How strongly is counted: q is the share
of must-links among the pairs inside clusters, q' among those between them. A merge of two clusters with m must-links
and c cannot-links between them makes the pairs likelier by m log(q / q') + c log((1 - q) / (1 - q')).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from constraintmatch._internal.progress import Quiet, Reporter, watched
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed
from constraintmatch.methods.parts.linear_heads import regression_head
from constraintmatch.models.cluster_model import ClusterModel, with_head

__all__ = ["EMPTY", "merge_clusters", "merged_groups"]

EMPTY = -1  # the group of a cluster without images
REPEATED = 20_000  # images from which the head of the merged clusters is found


def merge_clusters(
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints,
    *,
    device: torch.device | str | None = None,
    reporter: Reporter | None = None,
) -> ClusterModel:
    """The model under a head with a cluster for each group that the pairs leave; the same model if none is merged."""
    reporter = reporter or Quiet()
    with watched(reporter, "embedding", len(images)) as progress:
        features = embed(model, images, device=device, progress=progress)
    clusters = _clusters(model, features)
    groups = merged_groups(clusters, constraints, model.config.n_clusters)
    n_groups, n_used = int(groups.max()) + 1, int((groups != EMPTY).sum())
    reporter.say(f"{n_used:,} clusters have images; merged where the pairs join them: {n_groups:,}")
    if n_groups == n_used:
        return model
    found = groups[clusters]
    spread = np.linspace(0, len(found) - 1, min(REPEATED, len(found))).astype(np.int64)
    rows = np.union1d(spread, np.unique(found, return_index=True)[1])  # every cluster has an image among them
    return with_head(model, *regression_head(features[rows], found[rows], n_groups))


def merged_groups(clusters: NDArray[np.int64], constraints: Constraints, n_clusters: int) -> NDArray[np.int64]:
    """The group (k,) of each cluster, from the clusters (n,) of the images: the best merge again and again.

    It ends when no merge makes the pairs likelier, or with two groups. Groups are numbered by their first clusters.
    """
    must, cannot = _counts(clusters, constraints, n_clusters)
    group = np.where(np.bincount(clusters, minlength=n_clusters) > 0, np.arange(n_clusters), EMPTY)
    alive = np.flatnonzero(group >= 0)
    while len(alive) > 2:
        gain = _gains(must, cannot)[np.ix_(alive, alive)]
        np.fill_diagonal(gain, -np.inf)
        best = np.unravel_index(gain.argmax(), gain.shape)
        if not gain[best] > 0:
            break
        kept, gone = sorted(alive[list(best)])
        for table in (must, cannot):
            table[kept] += table[gone]
            table[:, kept] += table[:, gone]
            table[gone] = table[:, gone] = 0
        group[group == gone] = kept
        alive = alive[alive != gone]
    return np.where(group == EMPTY, EMPTY, np.searchsorted(alive, group))


def _counts(
    clusters: NDArray[np.int64], constraints: Constraints, n_clusters: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Must-links and cannot-links between clusters (k, k), by weight, symmetric: on the diagonal every pair twice."""
    ends = clusters[constraints.left], clusters[constraints.right]
    tables = []
    for share in (constraints.link, 1 - constraints.link):
        table = np.zeros((n_clusters, n_clusters))
        np.add.at(table, ends, share * constraints.weight)
        tables.append(table + table.T)
    return tables[0], tables[1]


def _gains(must: NDArray[np.float64], cannot: NDArray[np.float64]) -> NDArray[np.float64]:
    """By how much a merge of two clusters makes the pairs likelier (k, k), in natural logarithms.

    Nothing, where must-links are no more frequent inside clusters than between them: then they say nothing of kinds.
    """
    inside = np.trace(must) / 2, np.trace(cannot) / 2
    between = must.sum() / 2 - inside[0], cannot.sum() / 2 - inside[1]
    q, other = ((1 + same) / (2 + same + different) for same, different in (inside, between))
    if q <= other:
        return np.zeros_like(must)
    return np.asarray(must * np.log(q / other) + cannot * np.log((1 - q) / (1 - other)))


def _clusters(model: ClusterModel, features: NDArray[np.float32]) -> NDArray[np.int64]:
    assert model.head is not None
    weight, bias = (part.detach().float().cpu().numpy() for part in (model.head.weight, model.head.bias))
    return np.asarray((features @ weight.T + bias).argmax(1), np.int64)
