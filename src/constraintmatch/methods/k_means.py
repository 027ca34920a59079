"""A cluster head from k-means: the quickest start with clusters, and a steady one."""

import warnings

import numpy as np
from numpy.typing import NDArray

from constraintmatch.batches import derive_seed
from constraintmatch.errors import InputError
from constraintmatch.evaluation import embed
from constraintmatch.images import ImageSet
from constraintmatch.methods.linear_heads import regression_head
from constraintmatch.methods.preparation import (
    Job,
    Trained,
    ViewChoice,
    check_clusters,
    check_least,
    evaluate_now,
    prepare,
    spread,
)
from constraintmatch.models import ClusterModel, with_head
from constraintmatch.training import TrainSettings

__all__ = ["k_means"]


def k_means(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    restarts: int = 10,
    most_images: int = 10_000,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008, ARG001 (frozen; every method takes it)
    job: Job = Job(),  # noqa: B008 (frozen)
) -> Trained:
    """A model whose head answers with the k-means clusters of its projections; the backbone stays as it is.

    The clusters are found in the normalised projections (at most `most_images` of them), where they lie apart most; the
    head, which reads the features before them, is a logistic regression on these clusters.
    """
    check_clusters(n_clusters, images)
    check_least("k_means", restarts=(restarts, 1), most_images=(most_images, 2))
    device = prepare(model, images, settings, need_clusters=False).device
    sample = images.take(spread(len(images), most_images))
    seed = derive_seed(settings.seed, "k-means") % 2**32
    clusters = _clusters(embed(model, sample, projected=True, device=device), n_clusters, restarts, seed)
    weight, bias = regression_head(embed(model, sample, device=device), clusters, n_clusters)
    placed = with_head(model, weight, bias)
    entry = {"step": 1, "kind": "evaluation", **evaluate_now(placed, images, job), "seconds": 0.0}
    return Trained(placed, [entry])


def _clusters(features: NDArray[np.float32], n_clusters: int, restarts: int, seed: int) -> NDArray[np.int64]:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    _refuse_equal(len(np.unique(unit.round(5), axis=0)), n_clusters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of fewer clusters than asked for: refused below
        clusters = KMeans(n_clusters, n_init=restarts, random_state=seed).fit_predict(unit)
    _refuse_equal(len(np.unique(clusters)), n_clusters)
    return np.asarray(clusters, np.int64)


def _refuse_equal(distinct: int, n_clusters: int) -> None:
    if distinct < n_clusters:
        raise InputError(f"{n_clusters} clusters, but the model tells only {distinct} kinds of images apart")
