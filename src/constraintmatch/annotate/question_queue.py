"""What is asked next: a chooser of questions, and a queue that a thread of its own keeps filled, so nobody waits."""

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.api_types import Asked
from constraintmatch.annotate.store import Store
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import MAX_SHOWN, Answer, Question, implied_groups
from constraintmatch.questions.next_question import (
    Belief,
    Choice,
    Kind,
    Landscape,
    landscape_of,
    next_questions,
    question_about,
)

__all__ = ["Chooser", "QuestionQueue", "pixel_belief"]

FRESH = 5  # answers after which waiting questions are chosen again: they know less than what was answered
BLOCK = 4_096  # images whose pixels become numbers at once
log = logging.getLogger(__name__)


class Chooser:
    """Chooses questions: of one kind, in one way, until there are `total` answers (None: without an end)."""

    def __init__(
        self, *, kind: Kind = "which", choose: Choice = "recommended", seed: int = 0, total: int | None = None
    ) -> None:
        self.kind, self.choose, self.seed, self.total = kind, choose, seed, total
        self._seen: tuple[Belief, Landscape] | None = None

    def next(self, belief: Belief, answers: Sequence[Answer], n: int, waiting: Sequence[Question]) -> list[Question]:
        """At most n questions; `waiting` are handed out and not answered yet."""
        if self.total is not None:
            n = min(n, self.total - len(answers) - len(waiting))
        if n < 1:
            return []
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
        """The question that places an image; None if answers place it already: then one of them is wrong."""
        if implied_groups(answers, len(belief.features))[image] >= 0:
            return None
        width = 1 if self.kind == "pair" else MAX_SHOWN
        landscape = self._landscape(belief)
        return question_about(belief, answers, image, n_images_per_question=width, landscape=landscape)

    def _landscape(self, belief: Belief) -> Landscape:
        """The density of the images. It takes seconds for 50,000, so it is kept as long as the belief."""
        seen = self._seen
        if seen is None or seen[0] is not belief:
            self._seen = seen = (belief, landscape_of(belief.features))
        return seen[1]


class QuestionQueue:
    """Hands questions out and chooses new ones in time. `done` says that nothing is left to ask.

    `belief` gives what the model says now (None: nothing yet) and `model` its name. Both are called again and again, so
    a training may change what they give.
    """

    def __init__(
        self,
        store: Store,
        belief: Callable[[], Belief | None],
        chooser: Chooser | None = None,
        model: Callable[[], str | None] = lambda: None,
        *,
        low: int = 4,
    ) -> None:
        self.store, self.belief, self.chooser, self.model, self.low = store, belief, chooser or Chooser(), model, low
        self.done = False
        self.problem: str | None = None
        self._held: dict[str, list[Asked]] = {}
        self._short = False
        self._chosen_at: tuple[int, Belief | None] = (-1, None)  # answers and belief of the last choice
        self._claiming, self._event, self._stop = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="question queue", daemon=True)

    def start(self) -> None:
        """Start the thread; the first questions come at once."""
        self.wake()
        self._thread.start()

    def wake(self) -> None:
        """Check whether questions are needed: after an answer, an undo, a new belief."""
        self._event.set()

    def stop(self) -> None:
        """End the thread after its current work."""
        self._stop = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=3)  # a choice among very many images may take longer; it is then dropped

    def claim(self, annotator: str, n: int) -> list[Asked]:
        """The questions that this annotator holds now, filled up to n; those that answers have settled are gone."""
        with self._claiming:
            return self._claim(annotator, n)

    def claim_first(self, question: Question, annotator: str, n: int) -> tuple[Asked | None, list[Asked]]:
        """This question for this annotator before all others, and all that the annotator holds now.

        None if it is answered already. What the annotator held goes back first, because the store hands out held
        questions before urgent ones.
        """
        with self._claiming:
            self.store.add_questions([question], model=self.model() or "", urgent=True)
            self.store.release(annotator)
            held = self._claim(annotator, n)
        same = (one for one in held if one.question.image == question.image)
        return next((one for one in same if set(one.question.shown) == set(question.shown)), None), held

    def _claim(self, annotator: str, n: int) -> list[Asked]:
        held = self.store.claim(annotator, n)
        self._held[annotator] = held
        self._short = self._short or len(held) < n
        self.wake()
        return held

    def fill(self) -> None:
        """Choose questions if few are waiting; bad input is noted in `problem`."""
        try:
            self._fill()
            self.problem = None
        except InputError as error:
            self.problem = str(error)

    def _fill(self) -> None:
        belief, answers = self.belief(), self.store.answers()
        with self._claiming:
            held = [asked.question for one in self._held.values() for asked in self.store.unanswered(one)]
            short, self._short = self._short, False
        if belief is None or not (short or self._is_stale(belief, len(answers), len(held))):
            return
        chosen = self.chooser.next(belief, answers, 2 * self.low, held)
        if self._stop:
            return
        self.store.add_questions(chosen, model=self.model() or "", replace=True)
        self._chosen_at = (len(answers), belief)
        self.done = not chosen and self.store.n_waiting() == 0

    def _is_stale(self, belief: Belief, n_answers: int, n_held: int) -> bool:
        answered, believed = self._chosen_at
        if believed is not belief or abs(n_answers - answered) >= FRESH:
            return True
        return not self.done and self.store.n_waiting() - n_held < self.low

    def _run(self) -> None:
        while True:
            self._event.wait()
            self._event.clear()
            if self._stop:
                return
            try:
                self.fill()
            except Exception:  # the page must go on with the questions it has
                if self._stop:
                    return
                log.exception("no new questions could be chosen")
                self.problem = "no new questions could be chosen; the output of the server says why"


def pixel_belief(images: ImageSet, *, side: int = 12, width: int = 48) -> Belief:
    """Features without a model: the principal components of small copies of the images, rows of length 1.

    Good enough to find near-duplicates and the dense places; 50,000 images take a few seconds. Embeddings are features
    already; their mean is subtracted.
    """
    if images.embedded:
        given = images.images.reshape(len(images), -1)
        return Belief(_directions(given - given.mean(0)))
    cells = np.concatenate([_small(images.images[at : at + BLOCK], side) for at in range(0, len(images), BLOCK)])
    cells -= cells.mean(0)
    directions = np.linalg.eigh(cells.T @ cells)[1][:, ::-1]
    return Belief(_directions(cells @ directions[:, :width].astype(np.float32)))


def _directions(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1; the features are changed in place."""
    features[:, 0] += 1e-6  # an image that is the mean of all has no direction of its own
    return np.asarray(features / np.linalg.norm(features, axis=1, keepdims=True), np.float32)


def _small(images: NDArray[np.uint8], side: int) -> NDArray[np.float32]:
    """Images (n, h, w, c) as means over at most side × side cells: (n, cells)."""
    edges = np.linspace(0, images.shape[1], min(side, images.shape[1]) + 1).astype(np.int64)
    sums = np.add.reduceat(np.add.reduceat(images.astype(np.float32), edges[:-1], axis=1), edges[:-1], axis=2)
    area = np.diff(edges)[:, None] * np.diff(edges)
    return np.asarray(sums / (255 * area[..., None]), np.float32).reshape(len(images), -1)
