"""How a sitting's questions are chosen: one kind, one way, and the density of the images found once."""

from collections.abc import Sequence
from typing import Literal

from constraintmatch.answers import MAX_SHOWN, Answer, Question, implied_groups
from constraintmatch.questions import Belief, Landscape, landscape_of, next_questions, question_about

__all__ = ["Choice", "Chooser", "Kind"]

Kind = Literal["which", "pair"]
Choice = Literal["recommended", "uncertain", "random"]


class Chooser:
    """The next questions, and the question about an image that a person points at."""

    total: int | None = None  # how many answers are wanted in all; None: as many as come

    def __init__(self, *, kind: Kind = "which", choose: Choice = "recommended", seed: int = 0) -> None:
        self.kind, self.choose, self.seed = kind, choose, seed
        self._seen: tuple[Belief, Landscape] | None = None

    def next(self, belief: Belief, answers: Sequence[Answer], n: int, waiting: Sequence[Question]) -> list[Question]:
        """At most n questions; `waiting` are handed out and not answered yet."""
        return next_questions(
            belief,
            answers,
            n,
            kind=self.kind,
            choose=self.choose,
            seed=self.seed,
            waiting=waiting,
            landscape=self._landscape(belief),
        )

    def about(self, belief: Belief, answers: Sequence[Answer], image: int) -> Question | None:
        """The question that places an image; None for one that answers have placed: then an answer is wrong."""
        if implied_groups(answers, len(belief.features))[image] >= 0:
            return None
        width = 1 if self.kind == "pair" else MAX_SHOWN
        landscape = self._landscape(belief)
        return question_about(belief, answers, image, n_images_per_question=width, landscape=landscape)

    def _landscape(self, belief: Belief) -> Landscape:
        """The density of the images; of 50,000 it takes seconds, so it is kept while the belief stays."""
        seen = self._seen
        if seen is None or seen[0] is not belief:
            self._seen = seen = (belief, landscape_of(belief.features))
        return seen[1]
