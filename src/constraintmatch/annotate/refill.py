"""The queue of questions, kept filled from a thread of its own: nobody waits while the next ones are chosen."""

import logging
import threading
from collections.abc import Callable, Sequence

from constraintmatch.answers import Answer, Question
from constraintmatch.annotate.store import Store
from constraintmatch.errors import InputError
from constraintmatch.questions import Belief

__all__ = ["Choose", "Refill"]

Choose = Callable[[Belief, Sequence[Answer], int], list[Question]]
log = logging.getLogger(__name__)


class Refill:
    """Chooses questions when few are waiting. `wake` after every answer; `done` says that nothing is left to ask."""

    def __init__(
        self, store: Store, belief: Callable[[], Belief | None], choose: Choose, *, model: str = "", low: int = 8
    ) -> None:
        self.store, self.belief, self.choose, self.model, self.low = store, belief, choose, model, low
        self.done = False
        self.problem: str | None = None
        self._event, self._stop = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="refill", daemon=True)

    def start(self) -> None:
        """Begin; the first questions come at once."""
        self._event.set()
        self._thread.start()

    def wake(self) -> None:
        """Look again whether questions are needed."""
        self._event.set()

    def stop(self) -> None:
        """End the thread after what it is at."""
        self._stop = True
        self._event.set()
        if self._thread.is_alive():
            self._thread.join()

    def fill(self) -> None:
        """Choose questions until enough are waiting or none is left; what a person can mend is told in `problem`."""
        try:
            self._fill()
            self.problem = None
        except InputError as error:
            self.problem = str(error)

    def _fill(self) -> None:
        belief = self.belief()
        if belief is None or (waiting := self.store.n_waiting()) >= self.low:
            return
        wanted = 2 * self.low - waiting
        added = self.store.add_questions(self.choose(belief, self.store.answers(), wanted), model=self.model)
        self.done = added == 0 and waiting == 0

    def _run(self) -> None:
        while True:
            self._event.wait()
            self._event.clear()
            if self._stop:
                return
            try:
                self.fill()
            except Exception:  # the page must go on with the questions it has
                log.exception("no new questions could be chosen")
                self.problem = "no new questions could be chosen; the server's output says why"
