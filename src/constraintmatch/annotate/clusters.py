"""The clusters as a person looks at them: galleries."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from constraintmatch.answers import Answer, implied_groups
from constraintmatch.questions import Belief

__all__ = ["Gallery", "galleries"]

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Gallery:
    """A cluster's images, the typical ones first, and how sure the model is of each (None without a model)."""

    cluster: int
    rows: Rows
    confidence: NDArray[np.float32] | None

    def ordered(self, order: str) -> "Gallery":
        """The same images, "typical" or "doubtful" ones first."""
        if order == "typical":
            return self
        return Gallery(self.cluster, self.rows[::-1], None if self.confidence is None else self.confidence[::-1])


def galleries(belief: Belief | None, answers: Sequence[Answer], n_images: int) -> list[Gallery]:
    """The model's clusters that have images; without a model the groups that answers make, largest first."""
    if belief is None or belief.probabilities is None:
        return _groups(answers, n_images)
    clusters, confidence = belief.probabilities.argmax(1), belief.probabilities.max(1)
    order = np.lexsort((-confidence, clusters))
    starts = np.searchsorted(clusters[order], np.arange(belief.probabilities.shape[1] + 1))
    parts = [order[start:end] for start, end in pairwise(starts)]
    return [Gallery(number, rows, confidence[rows]) for number, rows in enumerate(parts) if len(rows)]


def _groups(answers: Sequence[Answer], n_images: int) -> list[Gallery]:
    group = implied_groups(answers, n_images)
    parts = [np.flatnonzero(group == number) for number in range(group.max(initial=-1) + 1)]
    parts.sort(key=lambda rows: (-len(rows), rows[0]))
    return [Gallery(number, rows, None) for number, rows in enumerate(parts)]
