"""A simulated annotator: answers questions from the labels, with a set share of mistakes, for experiments and tests."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question

__all__ = ["LabelOracle"]


@dataclass(frozen=True, eq=False)
class LabelOracle:
    """Answers each question from labels (n,): with probability `unsure` by UNSURE, with `error` wrongly, else rightly.

    Of several shown images with the right label the first is chosen. A wrong answer is any of the choices that are not
    right, each as likely. The answer depends on seed and question only, not on what was asked before.
    """

    labels: NDArray[np.integer]
    error: float = 0.05
    unsure: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if np.ndim(self.labels) != 1:
            raise InputError(f"labels must be one column, not of shape {np.shape(self.labels)}")
        if self.error < 0 or self.unsure < 0 or not self.error + self.unsure <= 1:
            raise InputError(f"error={self.error} and unsure={self.unsure} must be shares that sum to at most 1")

    def answer(self, question: Question) -> Answer:
        """The answer to this question; the same whenever it is asked."""
        if max(question.image, *question.shown) >= len(self.labels):
            raise InputError(f"a question about images beyond the {len(self.labels):,} that have labels")
        draw, pick = self._words(question)
        if draw < self.unsure:
            return Answer(question, UNSURE)
        right = [at for at, shown in enumerate(question.shown) if self.labels[shown] == self.labels[question.image]]
        right = right or [NONE]
        if draw >= self.unsure + self.error:
            return Answer(question, right[0])
        wrong = [choice for choice in (NONE, *range(len(question.shown))) if choice not in right]
        return Answer(question, wrong[pick % len(wrong)])

    def _words(self, question: Question) -> tuple[float, int]:
        """A number in [0, 1) and a whole one, both from a hash of seed and question."""
        text = ",".join(map(str, (self.seed, question.image, *question.shown)))
        digest = blake2b(text.encode(), digest_size=16).digest()
        return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53, int.from_bytes(digest[8:], "big")
