"""Other systems for clustering with pairs, by name: rows of `constraintmatch compare`.

A system takes a `Setup` (features, pairs, K) and gives a function that places features, new ones too. What it cannot
take is an InputError.
"""

from collections.abc import Callable

from constraintmatch.methods.others.classical import (
    cop_k_means,
    k_means,
    label_spreading,
    logistic_regression,
    mpck_means,
    pck_means,
    pcog,
)
from constraintmatch.methods.others.networks import clusternet, cpac, framework, s3c2, spherepair, volmax
from constraintmatch.methods.others.parts import Predict, Setup

__all__ = ["OTHERS", "Predict", "Setup"]

OTHERS: dict[str, Callable[..., Predict]] = {
    "k_means": k_means,
    "s3c2": s3c2,
    "cpac": cpac,
    "pcog": pcog,
    "clusternet": clusternet,
    "framework": framework,
    "volmax": volmax,
    "spherepair": spherepair,
    "pck_means": pck_means,
    "mpck_means": mpck_means,
    "cop_k_means": cop_k_means,
    "label_spreading": label_spreading,
    "logistic_regression": logistic_regression,
}
