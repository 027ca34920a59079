"""How good a clustering is: predictions, neighbours, scores against labels, agreement with constraints, collapse.

Every share and score is a fraction in [0, 1]; what cannot be said (no must-links, nothing selected) is None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.neighbours import nearest_blocks, unit_rows
from constraintmatch.evaluation.neighbours import nearest_neighbours as nearest_neighbours  # offered here too
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.losses import pair_loss

Device = torch.device | str | None
Progress = Callable[[int, int], None] | None
Outputs = Callable[[torch.Tensor], list[torch.Tensor]]
BATCH = 500  # images in one pass
_BLOCK = 2**22  # numbers in one block of pairs: 16 MiB in fp32


@dataclass(frozen=True, eq=False)
class Predictions:
    """Cluster probabilities (n, k) of n images, and their features (n, d) where they were asked for."""

    probabilities: NDArray[np.float32]
    features: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.probabilities)

    @property
    def n_clusters(self) -> int:
        return int(self.probabilities.shape[1])

    @property
    def clusters(self) -> NDArray[np.int64]:
        """The most probable cluster of each image; the first of equals."""
        return np.asarray(self.probabilities.argmax(1), np.int64)

    @property
    def confidence(self) -> NDArray[np.float32]:
        """The probability of that cluster."""
        return np.asarray(self.probabilities.max(1), np.float32)


def predict(
    model: ClusterModel, images: ImageSet, *, features: bool = False, device: Device = None, progress: Progress = None
) -> Predictions:
    """Cluster probabilities of all images, in order, from plain views; with `features`, those too, in the same pass.

    Runs in eval mode and puts every module's mode back. `device` None is the model's own; another one moves the model
    there. `progress(done, total)` is called after each batch.
    """

    def outputs(batch: torch.Tensor) -> list[torch.Tensor]:
        if not features:
            return [model(batch).float().softmax(-1)]
        found = model.features(batch)
        return [model.classify(found).float().softmax(-1), found]

    return Predictions(*_forward(model, outputs, images, device, progress))


def embed(
    model: ClusterModel, images: ImageSet, *, projected: bool = False, device: Device = None, progress: Progress = None
) -> NDArray[np.float32]:
    """The features (n, d) of all images, or the outputs of the projection head if `projected`; see `predict`."""
    function = model.project if projected else model.features
    return _forward(model, lambda batch: [function(batch)], images, device, progress)[0]


def match_clusters(labels: ArrayLike, clusters: ArrayLike, n_clusters: int, n_classes: int) -> NDArray[np.int64]:
    """The class of each cluster in the one-to-one (Hungarian) matching with the most images right, −1 for no class.

    With more clusters than classes the clusters left over are −1: their images count as errors.
    """
    cells = np.asarray(clusters, np.int64) * n_classes + np.asarray(labels, np.int64)
    table = np.bincount(cells, minlength=n_clusters * n_classes).reshape(n_clusters, n_classes)
    rows, columns = linear_sum_assignment(table, maximize=True)
    mapping = np.full(n_clusters, -1, np.int64)
    mapping[rows] = columns
    return mapping


def accuracy(labels: ArrayLike, clusters: ArrayLike) -> float:
    """ACC: the share of images whose matched cluster is their class; see `match_clusters`."""
    labels, clusters = _same_length(labels, clusters)
    mapping = match_clusters(labels, clusters, _count(clusters), _count(labels))
    return float(np.mean(mapping[clusters] == labels))


def calibration_error(confidence: ArrayLike, correct: ArrayLike, *, n_bins: int = 15) -> float:
    """ECE: Σ_b (n_b / n) |share right − mean confidence| over bins of equal width; a bin holds its upper edge."""
    confidence, correct = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    bins = np.clip(np.ceil(confidence * n_bins).astype(np.int64) - 1, 0, n_bins - 1)
    surplus = np.bincount(bins, weights=confidence - correct, minlength=n_bins)
    return float(np.abs(surplus).sum() / max(1, len(confidence)))


def scores(labels: ArrayLike, predictions: Predictions) -> dict[str, float]:
    """`acc`, `nmi`, `ari` of the clusters against labels, and `ece` of the confidence in the matched clusters."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    labels, clusters = _same_length(labels, predictions.clusters)
    mapping = match_clusters(labels, clusters, predictions.n_clusters, _count(labels))
    correct = mapping[clusters] == labels
    return {
        "acc": float(correct.mean()),
        "nmi": float(np.clip(normalized_mutual_info_score(labels, clusters), 0, 1)),  # rounding can leave it above one
        "ari": float(adjusted_rand_score(labels, clusters)),
        "ece": calibration_error(predictions.confidence, correct),
    }


def agreement(constraints: Constraints, predictions: Predictions) -> dict[str, float | None]:
    """How far predictions keep constraints that they were not trained on: needs no labels.

    `must_link`: the share (by weight) of must-links (above 1/2) whose images share a cluster; `cannot_link`: of
    cannot-links (below) whose images do not; `balanced`: the mean of the two, None unless there are both, since a
    collapsed model meets one alone. `constraint_loss`: the mean MCL, the paper's validation criterion.
    """
    n, there = constraints.n_images, len(predictions)
    if n != there:
        raise InputError(f"the constraints are over {n:,} images, the predictions over {there:,}")
    clusters = predictions.clusters
    together = clusters[constraints.left] == clusters[constraints.right]
    must = _share(together, constraints.weight * (constraints.link > 0.5))
    cannot = _share(~together, constraints.weight * (constraints.link < 0.5))
    return {
        "must_link": must,
        "cannot_link": cannot,
        "balanced": None if must is None or cannot is None else (must + cannot) / 2,
        "constraint_loss": _constraint_loss(constraints, predictions.probabilities),
    }


def cluster_sizes(predictions: Predictions) -> NDArray[np.int64]:
    """The number of images in each of the k clusters."""
    return np.bincount(predictions.clusters, minlength=predictions.n_clusters).astype(np.int64)


def collapse_warnings(predictions: Predictions) -> list[str]:
    """One sentence for each sign of collapse: empty clusters, one cluster that holds most images.

    With fewer than five images a cluster, empty clusters are no sign; with fewer than ten images nothing is.
    """
    sizes, n, k = cluster_sizes(predictions), len(predictions), predictions.n_clusters
    warnings = []
    empty = np.flatnonzero(sizes == 0)
    if len(empty) and n >= 5 * k:
        which = ", ".join(map(str, empty[:10])) + (", …" if len(empty) > 10 else "")
        verb = "is" if len(empty) == 1 else "are"
        warnings.append(f"{len(empty):,} of {k:,} clusters {verb} empty ({which}); {n:,} images share the others.")
    largest = int(sizes.argmax())
    # 0.8 / k: two clusters may stand 9 to 1, three 3 to 1, many must only stay near half
    if n >= 10 and sizes[largest] > (0.5 + 0.8 / k) * n:
        warnings.append(f"Cluster {largest} holds {sizes[largest]:,} of {n:,} images ({sizes[largest] / n:.0%}).")
    return warnings


def pseudo_quality(guess: Any, keep: Any, links: Any, labels: Any) -> dict[str, float | None]:
    """How right a batch's pseudo-labels and pseudo-constraints are; arrays or tensors.

    guess is (n, k), keep (n,), links (n, n), labels (n,). `pseudo_label_accuracy` of kept rows goes through their own
    matching. Pseudo-constraints are the links between kept images, self-pairs left out; must-links are those ≥ 1/2.
    """
    given = (torch.as_tensor(values).detach().cpu() for values in (guess, keep, links, labels))
    guess, keep, links, labels = (values.double().numpy() for values in given)  # NumPy has no bf16
    kept = np.flatnonzero(keep)
    clusters, labels = guess.argmax(1)[kept], labels[kept].astype(np.int64)
    mapping = match_clusters(labels, clusters, guess.shape[1], _count(labels))
    others = ~np.eye(len(kept), dtype=bool)
    said = (links[np.ix_(kept, kept)] >= 0.5)[others]
    true = (labels[:, None] == labels[None, :])[others]
    return {
        "selected_share": _share(keep.astype(bool)),
        "pseudo_label_accuracy": _share(mapping[clusters] == labels),
        "must_link_share": _share(said),
        "pseudo_constraint_accuracy": _share(said == true),
        "pseudo_constraint_precision": _share(true[said]),
        "pseudo_constraint_recall": _share(said[true]),
    }


def knn_accuracy(
    features: ArrayLike,
    labels: ArrayLike,
    test_features: ArrayLike,
    test_labels: ArrayLike,
    k: int = 20,
    *,
    device: torch.device | str = "cpu",
) -> float:
    """The share of test images whose k nearest images vote for the right label; each votes with exp(cosine / 0.1)."""
    labels, test_labels = _whole(labels, "label"), _whole(test_labels, "label")
    known, asked = unit_rows(features, device), unit_rows(test_features, device)
    for given, of in ((labels, known), (test_labels, asked)):
        if len(given) != len(of):
            raise InputError(f"{len(given):,} labels for {len(of):,} images: give one for each")
    votable = torch.as_tensor(labels, device=device)
    named = []
    for cosine, nearest in nearest_blocks(asked, known, k):
        votes = torch.zeros(len(cosine), _count(labels), device=device)
        votes.scatter_add_(1, votable[nearest], ((cosine - cosine[:, :1]) / 0.1).exp())
        named.append(votes.argmax(1).cpu().numpy())
    return float(np.mean(np.concatenate(named) == test_labels))


def cluster_quality(probabilities: ArrayLike, neighbours: ArrayLike) -> float:
    """How good a clustering is without labels, in [0, 1]: what neighbours tell × clusters in use.

    I(c; c') / log k, the mutual information of the clusters of an image (n, k) and of its neighbours (n, m), times
    exp(H(c)) / k: one for clusters of even size that neighbours share, 0 for one cluster that holds everything. The
    clusters count, not how sure they are (decision 041).
    """

    def entropy(shares: NDArray[np.float64]) -> float:
        return float(-(shares * np.log(np.maximum(shares, 1e-300))).sum())

    p, near = np.asarray(probabilities), np.asarray(neighbours, np.int64)
    clusters, k = p.argmax(1), p.shape[1]
    pairs = np.bincount((clusters[:, None] * k + clusters[near]).ravel(), minlength=k * k).reshape(k, k) / near.size
    joint = (pairs + pairs.T) / 2  # neighbours need not be mutual
    sizes = np.bincount(clusters, minlength=k) / len(p)
    information = 2 * entropy(joint.sum(0)) - entropy(joint)
    return float(max(0.0, information) / np.log(k) * np.exp(entropy(sizes)) / k)


def neighbour_consistency(neighbours: ArrayLike, labels: ArrayLike) -> float:
    """The share of (image, neighbour) pairs with equal labels or clusters; neighbours are row numbers (n, m)."""
    labels = np.asarray(labels)
    return float(np.mean(labels[np.asarray(neighbours)] == labels[:, None]))


def _forward(
    model: ClusterModel, function: Outputs, images: ImageSet, device: Device, progress: Progress
) -> list[NDArray[np.float32]]:
    """The outputs of `function` on all images as fp32 arrays, joined; the images travel as channels-last views."""
    if device is not None:
        model.to(device)
    device = next(model.parameters(), torch.empty(0, device=device)).device
    total, parts = len(images.images), []
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for start in range(0, max(1, total), BATCH):  # no images: one empty batch still tells the widths
            batch = np.array(images.images[start : start + BATCH])  # a copy: the set may be a read-only file
            with torch.inference_mode():
                outputs = function(torch.from_numpy(batch).to(device).permute(0, 3, 1, 2))
            parts.append([output.float().cpu().numpy() for output in outputs])
            if progress is not None:
                progress(min(start + BATCH, total), total)
    finally:  # each module gets its own mode back (some may have been frozen), outer ones first
        for module, training in modes:
            module.train(training)  # not the flag alone: some (LeViT) cache in eval mode and drop that here
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _same_length(labels: ArrayLike, clusters: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    labels, clusters = _whole(labels, "label"), _whole(clusters, "cluster")
    if len(labels) != len(clusters):
        raise InputError(f"{len(labels):,} labels for {len(clusters):,} predictions: give one label for each image")
    if len(labels) == 0:
        raise InputError("no images to score: give at least one")
    if _count(clusters) > 10 * len(clusters) + 1_000:  # numbers such as 1,000,000 would make a huge table
        clusters = np.unique(clusters, return_inverse=True)[1]
    return np.unique(labels, return_inverse=True)[1], clusters


def _whole(values: ArrayLike, what: str) -> NDArray[np.int64]:
    """The whole numbers from 0 in a column; anything else is an InputError."""
    given = np.asarray(values)
    column = given[:, 0] if given.ndim == 2 and given.shape[1] == 1 else given
    if column.ndim != 1:
        raise InputError(f"{what}s of shape {given.shape}: give one {what} for each image")
    whole = column.dtype.kind in "iub" or (column.dtype.kind == "f" and np.isfinite(column).all())
    if column.size and not (whole and (column == np.rint(column)).all()):
        raise InputError(f"{what}s of type {column.dtype} that are no whole numbers: number them from 0")
    numbers = column.astype(np.int64)
    if numbers.size and numbers.min() < 0:
        raise InputError(f"image {int(numbers.argmin()):,} has the {what} {numbers.min()}: {what}s count from 0")
    return numbers


def _count(numbers: NDArray[np.int64]) -> int:
    return int(numbers.max(initial=0)) + 1


def _share(hits: NDArray[np.bool_], weight: NDArray[Any] | None = None) -> float | None:
    """The share of hits, by weight; None if the weights sum to 0."""
    weight = np.ones(len(hits)) if weight is None else weight
    total = float(weight.sum(dtype=np.float64))
    return float((hits * weight).sum(dtype=np.float64)) / total if total > 0 else None


def _constraint_loss(constraints: Constraints, probabilities: NDArray[np.float32]) -> float | None:
    """The weighted mean MCL of the constraints, in blocks of pairs; None without any."""
    weight = float(constraints.weight.sum(dtype=np.float64))
    block, total = max(1, _BLOCK // probabilities.shape[1]), 0.0
    for start in range(0, len(constraints.left), block):
        part = slice(start, start + block)
        sides = (probabilities[rows[part]] for rows in (constraints.left, constraints.right))
        arrays = (*sides, constraints.link[part], constraints.weight[part])
        left, right, link, weights = (torch.from_numpy(np.array(array, np.float32)) for array in arrays)
        total += float(pair_loss(left, right, link, weights, mean=False))
    return total / weight if weight > 0 else None


def as_labels(y: ArrayLike) -> NDArray[Any]:
    """Labels as numbers, from numbers or words; a label that is missing is an InputError."""
    labels = np.asarray(y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise InputError(f"y has the shape {labels.shape}; give one label for each image")
    missing = np.array([label is None or label != label for label in labels.tolist()], bool)  # NaN is not itself
    if missing.any():
        raise InputError(f"image {int(missing.argmax()):,} has no label in y; leave it out")
    words = labels.astype(str) if labels.dtype.kind == "O" else labels
    return labels if labels.dtype.kind in "iu" else np.unique(words, return_inverse=True)[1]
