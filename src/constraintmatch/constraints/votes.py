"""Which kind each image is, if some pairs are wrong and a model is mostly right. Arrays, no torch.

The kind of an image is unknown. The model's cluster is evidence of it, and so is each pair with another image, which is
wrong at some rate. Belief propagation weighs all of it together: a wrong "same" does not join two groups, as it does in
the closure of must-links. The rate, and how the clusters differ from the kinds, are estimated on the way (EM).
"""

import numpy as np
from numpy.typing import NDArray

from constraintmatch.constraints.constraint_set import Constraints

__all__ = ["likely_kinds", "pass_messages"]

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDS = 15  # of estimation
SWEEPS = 3  # of messages in a round
OWN, ANY = 60.0, 0.3  # images that say, before any pair, that a cluster is its own kind, or any other one
EXPECTED = 0.05, 20.0  # the rate of wrong pairs that is expected before any is seen, and how many pairs that weighs
MOST_WRONG = 0.4


def likely_kinds(pairs: Constraints, probabilities: NDArray[np.float32]) -> tuple[Rows, Floats]:
    """The images of the pairs (m,), and the probability of each kind (m, k), numbered as the clusters (n, k) are."""
    rows, ends = np.unique(np.stack([pairs.left, pairs.right]), return_inverse=True)
    ends, same = ends.reshape(2, -1), pairs.link > 0.5
    seen, k = probabilities[rows].astype(float), probabilities.shape[1]
    known = np.eye(k) * OWN + ANY
    counts, error, messages = known, EXPECTED[0], np.zeros((2, len(same), k))
    kinds = seen
    for _ in range(ROUNDS):
        prior = np.log(np.maximum(seen @ (counts / counts.sum(1, keepdims=True)), 1e-9))
        kinds, wrong, messages = pass_messages(prior, ends, same, error, messages, SWEEPS)
        rate, strength = EXPECTED
        error = min((wrong.sum() + rate * strength) / (len(same) + strength), MOST_WRONG)
        counts = seen.T @ kinds + known
    return rows, kinds


def pass_messages(
    prior: Floats, ends: Rows, same: NDArray[np.bool_], error: float, messages: Floats, sweeps: int
) -> tuple[Floats, Floats, Floats]:
    """The probability of each kind (m, k), that each pair is wrong (p,), and the messages (2, p, k), after some sweeps.

    `prior` (m, k) are log-probabilities, `ends` (2, p) the two images of each pair, and a pair is wrong with `error`.
    It is exact where the pairs form no cycle.
    """
    kinds, wrong = _normalise(prior), np.zeros(len(same))
    for _ in range(sweeps):
        total = prior.copy()
        np.add.at(total, ends, messages)
        kinds, cavity = _normalise(total), _normalise(total[ends] - messages)  # without what a pair itself said
        fits = np.where(same[:, None], cavity[::-1], 1 - cavity[::-1])
        messages = (messages + np.log((1 - error) * fits + error * (1 - fits))) / 2  # half a step: cycles settle
        alike = (cavity[0] * cavity[1]).sum(1)
        right = np.where(same, alike, 1 - alike)
        wrong = error * (1 - right) / np.maximum((1 - error) * right + error * (1 - right), 1e-300)
    return kinds, wrong, messages


def _normalise(logs: Floats) -> Floats:
    shares = np.exp(logs - logs.max(-1, keepdims=True))
    return np.asarray(shares / shares.sum(-1, keepdims=True))
