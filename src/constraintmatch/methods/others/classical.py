"""Other systems without a network: k-means and its constrained kin, PCOG, and what a few labels give.

Constrained k-means comes from a package that users can install (the extra `classical`).
"""

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, eye_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import eigsh

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.methods.others.parts import Floats, Predict, Rows, Setup, place_around, place_by_neighbours
from constraintmatch.methods.others.parts import k_means as fit_centres

Matrix = NDArray[np.float64]
# rows: some compare them one by one, others form the distances of all pairs
MOST = {"PCKMeans": 20_000, "COPKMeans": 20_000, "MPCKMeans": 1_000, "LabelSpreading": 20_000, "pcog": 5_000}
TURNS = 20
FEWER = 16  # principal components for MPCKMeans, which forms a matrix of the features for every row
SPREAD_NEAR, PCOG_NEAR = 10, 15  # neighbours
REACH = 0.9  # how far PCOG carries pairs along the graph
NONE = 1e-6  # an eigenvalue below it is zero


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
    _check_rows(setup, MOST[name])
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
    _check_rows(setup, MOST["LabelSpreading"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that no label reaches
        fitted = LabelSpreading(kernel="knn", n_neighbors=SPREAD_NEAR).fit(setup.inputs.numpy(), known)

    def predict(rows: Floats) -> Floats:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return np.asarray(np.nan_to_num(fitted.predict_proba(setup.scale(rows).numpy())), np.float32)

    return predict


def _known(labels: Rows | None) -> Rows:
    if labels is None or len(np.unique(labels[labels >= 0])) < 2:
        raise InputError("needs labels of two kinds or more; --n-labels 50 gives it some")
    return labels


def _check_rows(setup: Setup, most: int, what: str = "it") -> None:
    if len(setup.inputs) > most:
        raise InputError(f"too many rows: {len(setup.inputs):,}, and {what} takes {most:,}")


def pcog(setup: Setup) -> Predict:
    """PCOG (Nie, Zhang, Wang and Li 2020): a graph with one component for each cluster, in which the pairs are kept.

    Departs from the paper: pairs are carried to both ends' neighbours first; new rows go with their neighbours.
    """
    _check_rows(setup, MOST["pcog"], "a graph of all pairs")
    affinity = carry_pairs(neighbour_affinity(setup.inputs.numpy(), PCOG_NEAR), setup.constraints)
    return place_by_neighbours(setup, _components(affinity, setup.n_clusters, setup.seed))


def neighbour_affinity(inputs: Floats, near: int) -> Matrix:
    """The symmetric affinity (n, n) in [0, 1]: of a row's neighbours by how much nearer they are than the next one."""
    x = inputs.astype(np.float64)
    squared = np.maximum((x**2).sum(1)[:, None] + (x**2).sum(1)[None] - 2 * x @ x.T, 0)
    np.fill_diagonal(squared, np.inf)
    few = min(near, len(x) - 2)
    limit = np.partition(squared, few, axis=1)[:, few]
    gap = np.maximum(limit[:, None] - squared, 0)
    gap /= np.maximum(gap.max(1, keepdims=True), 1e-12)
    return np.asarray((gap + gap.T) / 2)


def carry_pairs(affinity: Matrix, constraints: Constraints) -> Matrix:
    """The affinity with what the pairs say of both ends' neighbours: label propagation over rows, then columns.

    Z = (I − αS)⁻¹ C (I − αS)⁻¹ with C = ±1 of the links, brought to [−1, 1]; a positive z raises an affinity to
    1 − (1 − z)(1 − a), a negative one lowers it to (1 + z) a. The pairs themselves become 1 and 0.
    """
    n = len(affinity)
    root = 1 / np.sqrt(np.maximum(affinity.sum(1), 1e-12))
    links = np.zeros((n, n))
    ends = (constraints.left, constraints.right)
    links[ends] = links[ends[::-1]] = 2 * constraints.link - 1
    system = np.eye(n) - REACH * root[:, None] * affinity * root[None]
    carried = np.linalg.solve(system, np.linalg.solve(system, links).T)
    carried /= max(np.abs(carried).max(), 1e-12)
    moved = np.where(carried > 0, 1 - (1 - carried) * (1 - affinity), (1 + carried) * affinity)
    moved[links != 0] = np.maximum(links, 0)[links != 0]
    return np.asarray((moved + moved.T) / 2)


def project_to_simplex(rows: Matrix) -> Matrix:
    """The nearest point of the simplex to each row (n, m): entries that are not negative and sum to one."""
    ordered = -np.sort(-rows, axis=1)
    sums = np.cumsum(ordered, axis=1) - 1
    count = np.arange(1, rows.shape[1] + 1)
    last = (ordered * count > sums).sum(1)
    return np.asarray(np.maximum(rows - (sums[np.arange(len(rows)), last - 1] / last)[:, None], 0))


def _components(affinity: Matrix, n_clusters: int, seed: int) -> Rows:
    """The clusters: min ‖S − A‖² + λ tr(FᵀLF), S by rows on the simplex, F eigenvectors of its Laplacian, in turns.

    λ doubles while the graph has too few components and halves where it has too many. K-means on F decides if the
    turns end with another number.
    """
    from sklearn.cluster import KMeans

    n = len(affinity)
    at = np.argsort(-affinity, axis=1, kind="stable")[:, : min(2 * PCOG_NEAR, n - 1)]
    wanted = np.take_along_axis(affinity, at, axis=1)
    wanted /= np.maximum(wanted.sum(1, keepdims=True), 1e-12)
    share, strength, vectors = project_to_simplex(wanted), 1.0, np.zeros((n, n_clusters))
    for _ in range(TURNS):
        rows = np.repeat(np.arange(n), at.shape[1])
        graph = csr_array((share.ravel(), (rows, at.ravel())), shape=(n, n))
        graph = (graph + graph.T) / 2
        laplacian = diags_array(np.asarray(graph.sum(1)).ravel()) - graph
        begin = np.random.default_rng(seed).normal(size=n)
        shifted = (laplacian + 1e-4 * eye_array(n)).tocsc()
        values, vectors = eigsh(shifted, n_clusters + 1, sigma=0, v0=begin)
        values, vectors = values - 1e-4, vectors[:, np.argsort(values)]
        empty = int((values < NONE).sum())
        if empty == n_clusters:
            return np.asarray(connected_components(graph > 0, directed=False)[1], np.int64)
        strength = strength * 2 if empty < n_clusters else strength / 2
        first = vectors[:, :n_clusters] * np.sqrt(n)
        far = ((first[:, None] - first[at]) ** 2).sum(-1)
        share = project_to_simplex(wanted - strength / 2 * far / at.shape[1])
    found = KMeans(n_clusters, n_init=10, random_state=seed % 2**32).fit(vectors[:, :n_clusters])
    return np.asarray(found.labels_, np.int64)
