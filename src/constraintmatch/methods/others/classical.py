"""Other systems without a network of their own: k-means and its constrained kin, and what a few labels give.

Constrained k-means comes from a package that users can install (the extra `classical`).
"""

import warnings
from typing import Any

import numpy as np
import torch

from constraintmatch._internal.errors import InputError
from constraintmatch.methods.others.parts import Floats, Predict, Rows, Setup, place_around, place_by_neighbours
from constraintmatch.methods.others.parts import k_means as fit_centres

MOST = {"PCKMeans": 20_000, "COPKMeans": 20_000, "MPCKMeans": 1_000}  # rows, which it compares one by one, or all pairs
TURNS = 20
FEWER = 16  # principal components for MPCKMeans, which forms a matrix of the features for every row
NEAR = 10  # neighbours
SPREAD_OVER = 20_000  # rows: the distances of all of them are formed


def k_means(setup: Setup) -> Predict:
    """Clusters of the features alone: what pairs must beat."""
    centres = fit_centres(setup.inputs, setup.n_clusters, setup.seed)
    return setup.by(lambda inputs: place_around(inputs, centres))


def pck_means(setup: Setup) -> Predict:
    """PCKMeans (Basu, Banerjee and Mooney 2004): a pair that is not kept has a price."""
    return _fit("PCKMeans", setup)


def mpck_means(setup: Setup) -> Predict:
    """MPCKMeans (Bilenko, Basu and Mooney 2004): the same with a scale of each feature that the pairs teach.

    Departs from the paper: it gets 16 principal components of the features.
    """
    return _fit("MPCKMeans", setup, FEWER)


def cop_k_means(setup: Setup) -> Predict:
    """COP-k-means (Wagstaff et al. 2001): every pair is kept, or there is no result."""
    return _fit("COPKMeans", setup)


def _fit(name: str, setup: Setup, width: int | None = None) -> Predict:
    """One of the package's programs on the hard links without contradictions; new rows go with their neighbours."""
    try:
        with np.errstate():  # the package makes NumPy raise at every small number
            from active_semi_clustering.semi_supervised import pairwise_constraints as programs
    except ImportError:
        raise InputError("not installed: pip install 'constraintmatch[classical]'") from None
    if len(setup.inputs) > MOST[name]:
        raise InputError(f"too many rows: {len(setup.inputs):,}, and it takes {MOST[name]:,}")
    pairs = setup.constraints.resolve("drop")
    kinds = (pairs.link == 1, pairs.link == 0)
    ends = [list(zip(pairs.left[of].tolist(), pairs.right[of].tolist(), strict=True)) for of in kinds]
    inputs = setup.inputs.double()
    if width is not None and width < min(inputs.shape):
        inputs = inputs @ torch.linalg.svd(inputs, full_matrices=False).Vh[:width].mT
    before: Any = np.random.get_state()  # noqa: NPY002 (the package draws from NumPy's global generator)
    np.random.seed(setup.seed % 2**32)  # noqa: NPY002
    try:
        found = getattr(programs, name)(n_clusters=setup.n_clusters, max_iter=TURNS)
        with np.errstate(all="ignore"):
            found.fit(inputs.numpy(), ml=ends[0], cl=ends[1])
    finally:
        np.random.set_state(before)  # noqa: NPY002
    return place_by_neighbours(setup, np.asarray(found.labels_, np.int64))


def logistic_regression(setup: Setup) -> Predict:
    """A linear classifier of the labelled images; it has the classes that the labels have."""
    from sklearn.linear_model import LogisticRegression

    known = _known(setup.labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it could be closer
        fitted = LogisticRegression(max_iter=500).fit(setup.inputs[known >= 0].numpy(), known[known >= 0])
    return lambda rows: np.asarray(fitted.predict_proba(setup.scale(rows).numpy()), np.float32)


def label_spreading(setup: Setup) -> Predict:
    """Labels spread along the ten nearest neighbours of each image (Zhou et al. 2004)."""
    from sklearn.semi_supervised import LabelSpreading

    known = _known(setup.labels)
    if len(setup.inputs) > SPREAD_OVER:
        raise InputError(f"too many rows: {len(setup.inputs):,}, and it takes {SPREAD_OVER:,}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that no label reaches
        fitted = LabelSpreading(kernel="knn", n_neighbors=NEAR).fit(setup.inputs.numpy(), known)

    def predict(rows: Floats) -> Floats:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return np.asarray(np.nan_to_num(fitted.predict_proba(setup.scale(rows).numpy())), np.float32)

    return predict


def _known(labels: Rows | None) -> Rows:
    if labels is None or len(np.unique(labels[labels >= 0])) < 2:
        raise InputError("needs labels of two kinds or more; --n-labels 50 gives it some")
    return labels
