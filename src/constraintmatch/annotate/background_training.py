"""Rounds of training in the background, in a thread of their own, while people answer.

folder/
  start/         the self-supervised start, if none was given
  rounds/0120/   the run folder of the round with 120 answers; 0200-last/ of the longer training after all 200,
                 0120-head/ if only a head learns, …-old/ until the one that replaces it is finished
  model/         the newest model
  first-question.npz   what the next start asks first with, before the network is there; it may be removed

A thread is enough: torch releases the interpreter while it computes, and an answer is stored within 0.1 s meanwhile.
"""

import copy
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch._internal.progress import QUIET, Reporter, Watched
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods import Context, ViewChoice
from constraintmatch.methods.propagate import Frozen
from constraintmatch.models.cluster_model import ClusterModel, load_model, save_model
from constraintmatch.pipeline.config import SHORT_STAGES, make_config
from constraintmatch.pipeline.train import train
from constraintmatch.questions.answers import Answer, constraints_of, n_kinds
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.rounds import closure_pairs, head_belief, image_belief, inform_start
from constraintmatch.training.loop import Interrupted
from constraintmatch.training.run_folder import OtherRequest, is_finished

PATIENCE = 20.0  # seconds without a new answer after which fewer answers than a round needs are trained on too
LONGEST_STEPS = 10.0  # seconds that a stop waits for the current step; then the thread ends with the program
# The folder of a round: answers, only a head, the longer training at the end, kept until another replaces it
ROUND = re.compile(r"(\d+)(-head)?(-last)?(-old)?")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learning:
    """How a round is trained: arguments and training settings of the method, and after how many new answers.

    `total` is the largest number of answers: the last of them are trained on at once, even if they are few, and for
    `last_steps` if that is given.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    every: int = 25
    total: int | None = None
    last_steps: int | None = None


@dataclass(eq=False)
class Learner:
    """Trains on the answers so far, from the start each time; `belief` and `newest` give the newest state."""

    images: ImageSet
    start_model: ClusterModel
    answers: Callable[[], Sequence[Answer]]
    folder: Path
    learning: Learning
    views: ViewChoice | None = None
    held_out: ImageSet | None = None
    whole: Callable[[ClusterModel], ClusterModel] = lambda model: model  # of a trained part, if only a part learns

    def __post_init__(self) -> None:
        self.problem: str | None = None
        self.n_learned = 0  # answers that the newest model knows
        self.run: Path | None = None  # the folder of its round
        self._steps = 0  # of its round
        self._training: Watched | None = None  # the current round
        self._newest = self.start_model
        self._belief: Belief | None = None  # of the newest model
        self._ahead: Belief | None = None  # of the model that the current round began with: it knows more answers
        self._stop = threading.Event()
        self._seen, self._seen_at = 0, time.monotonic()  # the last count of answers, and when it changed
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._take_up()

    def belief(self) -> Belief:
        """What the current round knows of the images so far, or without one the newest model."""
        ahead = self._ahead  # the thread may remove it meanwhile
        return self._of_newest() if ahead is None else ahead

    @cached_property
    def frozen(self) -> Frozen:
        """What the backbone of the start makes of the images: all rounds begin with it, so one pass is enough."""
        return Frozen.of(self.start_model, self.images)

    @property
    def newest(self) -> ClusterModel:
        """The model of the last finished round, or the start."""
        return self.whole(self._newest)

    @property
    def n_left(self) -> int:
        """How many answers it was not trained on."""
        return max(0, len(self.answers()) - self.n_learned)

    @property
    def is_behind(self) -> bool:
        """Whether there is something to train without new answers: on some answers, or longer at the end."""
        last_steps = self.learning.last_steps or 0
        return self.n_left > 0 or (self._is_last(len(self.answers())) and self._steps < last_steps)

    def name(self) -> str:
        """The name of the newest model; the store notes it with the questions that the model chose."""
        return f"round {self.n_learned}" if self.n_learned else "start"

    def activity(self) -> str | None:
        """A line about the training, for the page."""
        if self.problem is not None:
            return self.problem
        learned = f"has learned from {self.n_learned:,} answers" if self.n_learned else None
        if (now := self._training) is None:
            return learned
        share = f" ({100 * now.done // now.total} %)" if now.total else ""
        return f"learning from {now.n_answers:,} answers{share}" + (f"; {learned}" if learned else "")

    def is_due(self) -> bool:
        """Whether a round should start: enough new answers, or the last of all, or no new one for a while."""
        n_answers, now = len(self.answers()), time.monotonic()
        if n_answers != self._seen:
            self._seen, self._seen_at = n_answers, now
        if not self.is_behind:
            return False
        enough = n_answers - self.n_learned >= self.learning.every or now - self._seen_at > PATIENCE
        return enough or self._is_all(n_answers)

    def learn(self, reporter: Reporter = QUIET) -> bool:
        """Train one round on all answers so far; False if they say nothing to train on."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()  # after a stop: it ends with its current step
        start, answers, settings = self.start_model, list(self.answers()), dict(self.learning.settings)
        beliefs = self.frozen.probabilities(start) if start.config.n_clusters else None
        pairs = closure_pairs(answers, len(self.images), beliefs, self.frozen)
        if not len(pairs) and not len(pairs.triplets):
            return False
        self._training = watched = Watched(reporter, len(answers))
        if self._is_last(len(answers)):
            settings["steps"] = self.learning.last_steps
        try:
            before = self._of_newest().probabilities
            first = round_start(start, self.frozen, self.images, answers, settings, before)
            self._ahead = head_belief(first, self.frozen)  # better questions while the network is trained
            around: dict[str, Any] = {}
            if start.config.n_clusters:  # the start is judged by answers that it does not know
                first, said = copy.deepcopy(start), constraints_of(answers, len(self.images))
                around = {"before": self._newest, "stated": said}
            model = self._train(first, pairs, settings, watched, around)
            self._belief = image_belief(model.to(start.device), self.images)
            self._newest, self.n_learned, self._steps = model, len(answers), int(settings.get("steps", 0))
            self.run = self._round(len(answers))
            save_model(self.newest, self.folder / "model")
        finally:
            self._training, self._ahead = None, None
        return True

    def _train(
        self,
        first: ClusterModel,
        pairs: Constraints,
        settings: Mapping[str, Any],
        reporter: Watched,
        around: Mapping[str, Any],
    ) -> ClusterModel:
        """One round; a stopped one continues from its checkpoint, unless answers have changed since."""
        place, options = self._round(reporter.n_answers), {"recipe": "safe", **self.learning.arguments, **settings}
        config = make_config("constraintmatch", options, start=first, views=self.views)
        context = Context(place, True, reporter, held_out=self.held_out, stop=self._is_stopped, **around)
        old = place.with_name(f"{place.name}-old")
        try:
            train(self.images, pairs, config, context)
        except OtherRequest:
            if is_finished(place):  # kept until the new one is finished
                shutil.rmtree(old, ignore_errors=True)
                place.rename(old)
            else:
                shutil.rmtree(place)
            train(self.images, pairs, config, context)
        shutil.rmtree(old, ignore_errors=True)
        return load_model(place)

    def start(self) -> None:
        """Start the thread, which trains when a round is due."""
        self.belief()  # before the page asks: one thread at a time uses the device
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; the current round continues from its checkpoint next time."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(LONGEST_STEPS)

    def _is_stopped(self) -> bool:
        """Whether to end the current round; a round that another thread trains after the stop continues."""
        return self._stop.is_set() and threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not (self.is_due() and self.learn()):
                    self._stop.wait(1.0)
        except Interrupted:  # its checkpoint is written: the next start continues it
            return
        except InputError as error:  # people can still answer; the page says why nothing is trained
            self.problem = str(error)
        except Exception:
            log.exception("a round could not be trained")
            self.problem = "a round could not be trained; the output says why"

    def _of_newest(self) -> Belief:
        if self._belief is None:
            begun = self._newest is self.start_model
            self._belief = head_belief(self._newest, self.frozen) if begun else image_belief(self._newest, self.images)
        return self._belief

    def _is_all(self, n_answers: int) -> bool:
        return self.learning.total is not None and n_answers >= self.learning.total

    def _is_last(self, n_answers: int) -> bool:
        """Whether a round with this number of answers is the longer one at the end."""
        return bool(self.learning.last_steps) and self._is_all(n_answers)

    def _round(self, n_answers: int) -> Path:
        alone, last = "-head" if self.images.embedded else "", "-last" if self._is_last(n_answers) else ""
        return self.folder / "rounds" / f"{n_answers:04d}{alone}{last}"

    def _take_up(self) -> None:
        """Continue with the newest finished round that knows no more answers than stand now; remove what cannot.

        A round of another network, or with the network frozen if this one is not, is ignored.
        """
        for n_answers, path in _rounds(self.folder / "rounds"):
            if not is_finished(path):
                if n_answers != len(self.answers()):
                    shutil.rmtree(path, ignore_errors=True)
            elif n_answers <= len(self.answers()):
                model = load_model(path)
                if _kind(model) == _kind(self.start_model):
                    self._newest, self.n_learned, self.run = model.to(self.start_model.device), n_answers, path
                    self._steps = int(read_json(path / "run.json")["request"]["settings"]["steps"])
                    return


def _rounds(folder: Path) -> list[tuple[int, Path]]:
    """The rounds in a folder with their numbers of answers, newest first; of equal numbers the longer training."""
    found = [(match, path) for path in folder.glob("*") if (match := ROUND.fullmatch(path.name))]
    ordered = sorted(found, key=lambda one: (int(one[0][1]), one[0][3] or "", not one[0][4], one[1]), reverse=True)
    return [(int(match[1]), path) for match, path in ordered]


def _kind(model: ClusterModel) -> tuple[object, ...]:
    """What a model is made of and what it takes; heads on two networks differ at least in mean and scale."""
    config = model.config
    return config.backbone, config.side, config.channels, tuple(config.mean), tuple(config.std)


def round_start(
    start: ClusterModel,
    frozen: Frozen,
    images: ImageSet,
    answers: Sequence[Answer],
    settings: Mapping[str, Any],
    before: NDArray[np.float32] | None = None,
) -> ClusterModel:
    """The model that a round begins with: a copy of the start whose head knows the answers.

    A start without clusters gets as many as the answers show. `frozen` is what its backbone makes of the images.
    Clusters do not become fewer, and keep the numbers that the newest model gave them (`before`, what it says of the
    images), because people have named them.
    """
    if start.config.n_clusters:
        return inform_start(start, frozen, answers)
    known = 0 if before is None else before.shape[1]
    wanted = {key: settings[key] for key in ("seed", "device") if key in settings}
    wanted["n_clusters"] = max(2, known, n_kinds(answers, len(images)))
    made = train(images, None, make_config(SHORT_STAGES[-1], wanted, start=copy.deepcopy(start))).model
    made = inform_start(made, frozen, answers)
    if before is not None:
        _renumber(made, frozen.probabilities(made), before)
    return made


def cluster_numbers(now: NDArray[np.int64], before: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """The new number of each of the k clusters (k,), so that most images keep the number of their cluster."""
    count = np.zeros((k, k), np.int64)
    np.add.at(count, (now, before), 1)
    return np.asarray(linear_sum_assignment(count, maximize=True)[1], np.int64)


def _renumber(model: ClusterModel, now: NDArray[np.float32], before: NDArray[np.float32]) -> None:
    assert model.head is not None
    number = cluster_numbers(now.argmax(1), before.argmax(1), model.config.n_clusters)
    order = torch.from_numpy(np.argsort(number))
    with torch.no_grad():
        for part in (model.head.weight, model.head.bias):
            part.copy_(part[order.to(part.device)].clone())
