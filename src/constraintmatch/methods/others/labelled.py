"""What a few labels give without pairs: logistic regression, and labels spread along neighbours."""

import warnings

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch.methods.others.parts import Floats, Predict, Rows, Setup

NEAR = 10  # neighbours
SPREAD_OVER = 20_000  # rows: the distances of all of them are formed


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
