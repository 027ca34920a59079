"""The model that learns beside the person: rounds of training in a thread of its own, the newest model believed.

folder/
  start/         the self-supervised start, where none was given
  rounds/0120/   the run folder of the round with 120 answers
  model/         the newest model
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from constraintmatch.answers import Answer
from constraintmatch.errors import InputError
from constraintmatch.landscape import Belief
from constraintmatch.progress import Quiet, Reporter
from constraintmatch.rounds import closure_pairs, image_belief

if TYPE_CHECKING:
    from constraintmatch.images import ImageSet
    from constraintmatch.methods import ViewChoice
    from constraintmatch.models import ClusterModel

__all__ = ["Learner", "Learning"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learning:
    """How a round is trained: the method's arguments and training settings, and after how many new answers."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    every: int = 25


class Learner:
    """Trains on the answers so far, from the start each time; `belief` and `model` give the newest state."""

    def __init__(
        self,
        images: ImageSet,
        start: ClusterModel,
        answers: Callable[[], Sequence[Answer]],
        folder: Path,
        learning: Learning,
        *,
        views: ViewChoice | None = None,
        held_out: ImageSet | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.images, self.start_model, self.answers, self.folder = images, start, answers, folder
        self.learning, self.views, self.held_out = learning, views, held_out
        self.reporter = reporter or Quiet()
        self.problem: str | None = None
        self._learnt = 0  # answers that the newest model knows
        self._training = 0  # answers of the round that is being trained; 0: none is
        self._newest: ClusterModel = start
        self._belief: Belief | None = None
        self._event, self._stop = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._take_up()

    def belief(self) -> Belief:
        """What the newest model says of the images."""
        if self._belief is None:
            self._belief = image_belief(self._newest, self.images)
        return self._belief

    @property
    def newest(self) -> ClusterModel:
        """The model of the last finished round, or the start."""
        return self._newest

    @property
    def n_learnt(self) -> int:
        """How many answers the newest model was trained on."""
        return self._learnt

    def name(self) -> str:
        """The newest model, as the store notes it beside the questions it asked."""
        return f"round {self._learnt}" if self._learnt else "start"

    def activity(self) -> str | None:
        """A line about what goes on, for the page."""
        if self.problem is not None:
            return self.problem
        if self._training:
            return f"learning from {self._training:,} answers"
        return f"has learnt from {self._learnt:,} answers" if self._learnt else None

    def is_due(self) -> bool:
        """Whether enough has been answered since the newest model."""
        return len(self.answers()) - self._learnt >= self.learning.every

    def learn(self) -> bool:
        """Train one round on all answers so far; False where they say nothing that could be trained on."""
        from constraintmatch.methods import ViewChoice
        from constraintmatch.models import load_model
        from constraintmatch.running import Around, method_settings, run_method

        answers = list(self.answers())
        pairs = closure_pairs(answers, len(self.images))
        if not len(pairs):
            return False
        self._training = len(answers)
        place = self._round(len(answers))
        shutil.rmtree(place, ignore_errors=True)  # of a round that was stopped, with other answers perhaps
        around = Around(place, reporter=self.reporter, views=self.views or ViewChoice(), held_out=self.held_out)
        try:
            run_method(
                "constraintmatch",
                _copy(self.start_model),
                self.images,
                pairs,
                arguments=self.learning.arguments,
                settings=method_settings("constraintmatch", self.learning.settings),
                around=around,
            )
            self._believe(load_model(place), len(answers))
        finally:
            self._training = 0
        return True

    def start(self) -> None:
        """Begin to learn in the background whenever a round is due."""
        self._thread.start()

    def stop(self) -> None:
        """No more rounds; one that is under way is left unfinished, and its answers are learnt next time."""
        self._stop = True
        self._event.set()

    def _run(self) -> None:
        while not self._stop:
            if not self.is_due():
                self._event.wait(1.0)
                continue
            try:
                if not self.learn():
                    self._event.wait(1.0)
            except InputError as error:  # the person goes on answering; the page says why nothing is learnt
                self.problem = str(error)
                return
            except Exception:
                log.exception("a round could not be trained")
                self.problem = "a round could not be trained; the output says why"
                return

    def _believe(self, model: ClusterModel, n_answers: int) -> None:
        from constraintmatch.models import save_model

        belief = image_belief(model.to(_device(self.start_model)), self.images)
        self._newest, self._belief, self._learnt = model, belief, n_answers
        save_model(model, self.folder / "model")

    def _round(self, n_answers: int) -> Path:
        return self.folder / "rounds" / f"{n_answers:04d}"

    def _take_up(self) -> None:
        """Go on with the newest round that was finished before; unfinished ones are cleared away."""
        from constraintmatch.models import load_model
        from constraintmatch.runs import is_finished

        rounds = sorted((self.folder / "rounds").glob("[0-9]*"), key=lambda path: int(path.name))
        for path in reversed(rounds):
            if is_finished(path):
                self._newest, self._learnt = load_model(path).to(_device(self.start_model)), int(path.name)
                return
            shutil.rmtree(path, ignore_errors=True)


def _copy(model: ClusterModel) -> ClusterModel:
    import copy

    return copy.deepcopy(model)


def _device(model: ClusterModel) -> Any:
    return next(model.parameters()).device
