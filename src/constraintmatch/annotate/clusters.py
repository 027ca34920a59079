"""The clusters as a person looks at them: galleries, and the question that a doubtful image becomes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from constraintmatch.answers import MAX_SHOWN, Answer, Question, implied_groups
from constraintmatch.errors import InputError
from constraintmatch.questions import Belief

__all__ = ["Gallery", "galleries", "question_about"]

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
    parts = [order[start:end] for start, end in zip(starts, starts[1:], strict=False)]
    return [Gallery(number, rows, confidence[rows]) for number, rows in enumerate(parts) if len(rows)]


def _groups(answers: Sequence[Answer], n_images: int) -> list[Gallery]:
    group = implied_groups(answers, n_images)
    parts = [np.flatnonzero(group == number) for number in range(group.max(initial=-1) + 1)]
    parts.sort(key=lambda rows: (-len(rows), rows[0]))
    return [Gallery(number, rows, None) for number, rows in enumerate(parts)]


def question_about(image: int, belief: Belief, answers: Sequence[Answer]) -> Question:
    """The image held against the most typical images of its likeliest clusters, its own first.

    Without a model: against a member of its own group and of the groups whose images look most like it.
    """
    found = galleries(belief, answers, len(belief.features))
    others = [gallery.rows[gallery.rows != image] for gallery in found]
    ranks = _likeliest(image, belief, found)
    shown = [int(others[place][0]) for place in ranks if len(others[place])][:MAX_SHOWN]
    shown = shown or _nearest(image, belief)
    if not shown:
        raise InputError("there is no other image to hold it against")
    return Question(image, tuple(shown))


def _likeliest(image: int, belief: Belief, found: list[Gallery]) -> list[int]:
    """Places in `found`, the likeliest cluster of the image first."""
    if belief.probabilities is not None:
        scores = [float(belief.probabilities[image, gallery.cluster]) for gallery in found]
    else:
        own = belief.features[image]
        scores = [np.inf if image in g.rows else float((belief.features[g.rows] @ own).mean()) for g in found]
    return sorted(range(len(found)), key=lambda place: -scores[place])


def _nearest(image: int, belief: Belief) -> list[int]:
    nearness = belief.features @ belief.features[image]
    nearness[image] = -np.inf
    return [int(nearness.argmax())] if len(nearness) > 1 else []
