"""The queue of questions, kept filled from a thread of its own: nobody waits while the next ones are chosen."""

import logging
import threading
from collections.abc import Callable

from constraintmatch.annotate.choosing import Chooser
from constraintmatch.annotate.records import Asked
from constraintmatch.annotate.store import Store
from constraintmatch.answers import Question
from constraintmatch.errors import InputError
from constraintmatch.questions import Belief

__all__ = ["Refill"]

FRESH = 5  # answers after which the questions that wait are chosen anew: they know less than the person has said
log = logging.getLogger(__name__)


class Refill:
    """Hands questions out and chooses new ones in time. `done` says that nothing is left to ask."""

    def __init__(
        self,
        store: Store,
        belief: Callable[[], Belief | None],
        chooser: Chooser,
        model: Callable[[], str | None],
        *,
        low: int = 4,
    ) -> None:
        self.store, self.belief, self.chooser, self.model, self.low = store, belief, chooser, model, low
        self.done = False
        self.problem: str | None = None
        self._held: dict[str, list[Asked]] = {}
        self._short = False
        self._chosen_at: tuple[int, Belief | None] = (-1, None)  # answers and belief of the last choice
        self._claiming, self._event, self._stop = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="refill", daemon=True)

    def start(self) -> None:
        """Begin; the first questions come at once."""
        self.wake()
        self._thread.start()

    def wake(self) -> None:
        """Look again whether questions are needed: after an answer, an undo, a new belief."""
        self._event.set()

    def stop(self) -> None:
        """End the thread after what it is at."""
        self._stop = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=3)  # a choice among very many images may take longer; it is then thrown away

    def claim(self, annotator: str, n: int) -> list[Asked]:
        """The questions that this annotator holds now, filled up to n; those that answers have settled are gone."""
        with self._claiming:
            return self._claim(annotator, n)

    def claim_first(self, question: Question, annotator: str, n: int) -> tuple[Asked | None, list[Asked]]:
        """This question for this annotator before all others, and all that the annotator holds now.

        None where it was answered already. What the annotator held goes back first, since the store hands out held
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
        """Choose questions if few are waiting; what a person can mend is told in `problem`."""
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
        self.done = not chosen and self.store.counts().waiting == 0

    def _is_stale(self, belief: Belief, n_answers: int, n_held: int) -> bool:
        answered, believed = self._chosen_at
        if believed is not belief or abs(n_answers - answered) >= FRESH:
            return True
        return not self.done and self.store.counts().waiting - n_held < self.low

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
                self.problem = "no new questions could be chosen; the server's output says why"
