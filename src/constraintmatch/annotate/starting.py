"""The model that a round begins with: the start with a head that knows the answers; for an unknown number of clusters
with as many as the answers have shown so far.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from constraintmatch.answers import Answer, n_kinds
from constraintmatch.rounds import informed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from constraintmatch.images import ImageSet
    from constraintmatch.methods.propagate import Frozen
    from constraintmatch.models import ClusterModel

__all__ = ["begun", "renumbered"]


def begun(
    start: ClusterModel,
    frozen: Frozen,
    images: ImageSet,
    answers: Sequence[Answer],
    settings: Mapping[str, Any],
    before: NDArray[np.float32] | None = None,
) -> ClusterModel:
    """A copy of the start whose head knows the answers; if it has no clusters, with as many as kinds were answered.

    `frozen` is what its backbone makes of the images. Clusters do not become fewer, and keep the numbers that the
    newest model gave them (`before`, what it says of the images): people have named them.
    """
    if start.config.n_clusters:
        return informed(start, frozen, answers)
    from constraintmatch.pretraining import SHORT_STAGES
    from constraintmatch.running import method_settings, run_method

    finds_clusters = SHORT_STAGES[-1]
    known = 0 if before is None else before.shape[1]
    wanted = {key: settings[key] for key in ("seed", "device") if key in settings}
    made = run_method(
        finds_clusters,
        copy.deepcopy(start),
        images,
        arguments={"n_clusters": max(2, known, n_kinds(answers, len(images)))},
        settings=method_settings(finds_clusters, wanted),
    ).model
    made = informed(made, frozen, answers)
    if before is not None:
        _renumber(made, frozen.probabilities(made), before)
    return made


def renumbered(now: NDArray[np.int64], before: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """The new number of each of the k clusters (k,), so that most images keep the number they had before."""
    from scipy.optimize import linear_sum_assignment

    count = np.zeros((k, k), np.int64)
    np.add.at(count, (now, before), 1)
    return np.asarray(linear_sum_assignment(count, maximize=True)[1], np.int64)


def _renumber(model: ClusterModel, now: NDArray[np.float32], before: NDArray[np.float32]) -> None:
    import torch

    assert model.head is not None
    number = renumbered(now.argmax(1), before.argmax(1), model.config.n_clusters)
    order = torch.from_numpy(np.argsort(number))
    with torch.no_grad():
        for part in (model.head.weight, model.head.bias):
            part.copy_(part[order.to(part.device)].clone())
