"""The loop: a start made once, questions, answers, a round of training in the background, better questions.

A loop folder holds the start, the answers, the rounds and the newest model: the same command goes on with it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from constraintmatch.annotate.choosing import Choice, Chooser, Kind
from constraintmatch.annotate.learning import Learner, Learning
from constraintmatch.annotate.refill import Refill
from constraintmatch.annotate.session import Door, image_folder, listening, serve_app
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.annotate.terminal import FINISHED, PREVIOUS, Prompt
from constraintmatch.answers import Answer, Question
from constraintmatch.errors import InputError
from constraintmatch.oracle import LabelOracle
from constraintmatch.planning import Train, plan_pretraining
from constraintmatch.progress import Quiet, Reporter
from constraintmatch.questions import Belief

if TYPE_CHECKING:
    from constraintmatch.methods import ViewChoice
    from constraintmatch.models import ClusterModel
    from constraintmatch.sources import Data

__all__ = ["Limited", "Loop", "ask_in_terminal", "ask_labels", "ask_on_page"]


@dataclass(frozen=True)
class Loop:
    """What is asked about, how many questions, and how a round is trained."""

    data: str
    out: Path
    clusters: int | None = None
    questions: int = 200
    model: Path | None = None
    kind: Kind = "which"
    choose: Choice = "recommended"
    every: int = 25
    steps: int | None = None
    images: Train = field(default_factory=Train)  # how the images are opened, and the backbone
    seed: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("questions", "every"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} is {getattr(self, name)}; it must be 1 or more")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"--steps is {self.steps}; it must be 1 or more")


class Limited(Chooser):
    """A chooser that has nothing more to ask once there are so many answers."""

    def __init__(self, total: int, *, kind: Kind, choose: Choice, seed: int) -> None:
        super().__init__(kind=kind, choose=choose, seed=seed)
        self.total = total

    def next(self, belief: Belief, answers: Sequence[Answer], n: int, waiting: Sequence[Question]) -> list[Question]:
        left = self.total - len(answers) - len(waiting)
        return super().next(belief, answers, min(n, left), waiting) if left > 0 else []


@dataclass(frozen=True)
class _Open:
    """A loop folder that is open: images, answers, the learner."""

    loop: Loop
    data: Data
    store: Store
    learner: Learner
    reporter: Reporter

    def chooser(self) -> Limited:
        loop = self.loop
        return Limited(loop.questions, kind=loop.kind, choose=loop.choose, seed=loop.seed)


def ask_on_page(loop: Loop, door: Door, reporter: Reporter | None = None) -> list[tuple[str, str]]:
    """Serve the page and learn beside it until Ctrl-C; then learn the rest, and say what to do next."""
    with listening(door) as sock, _opened(loop, reporter) as here:
        here.learner.start()
        serve_app(
            sock,
            door,
            here.reporter,
            images=here.data.images,
            store=here.store,
            belief=here.learner.belief,
            chooser=here.chooser(),
            folder=image_folder(here.data),
            source=str(here.data.record["name"]),
            model=here.learner.name,
            activity=here.learner.activity,
        )
        return _ended(here)


def ask_in_terminal(
    loop: Loop, prompt: Prompt | None = None, reporter: Reporter | None = None
) -> list[tuple[str, str]]:
    """Ask in the terminal and learn beside it until enough is answered or the person has finished."""
    with _opened(loop, reporter) as here:
        shown = prompt or Prompt(here.data.images)
        refill = Refill(here.store, here.learner.belief, here.chooser(), here.learner.name)
        here.learner.start()
        while (asked := _claim(refill)) is not None:
            began, counts = time.monotonic(), here.store.counts()
            heading = f"{counts.answered:,} of {loop.questions:,} answered; {here.learner.activity() or 'no round yet'}"
            choice = shown.ask(asked.question, heading)
            if choice == FINISHED:
                break
            if choice == PREVIOUS:
                here.store.release("terminal")
                here.store.undo("terminal")
                continue
            spent = round(1e3 * (time.monotonic() - began))
            for clash in here.store.answer(asked.id, choice, "terminal", spent).contradictions:
                here.reporter.say(
                    f"this contradicts earlier answers ({', '.join(map(str, clash.answers))}); p takes it back"
                )
        return _ended(here)


def ask_labels(loop: Loop, error: float = 0.0, reporter: Reporter | None = None) -> list[tuple[str, str]]:
    """Let the labels answer, some of them wrongly, and learn after every `every` answers: for experiments and tests."""
    with _opened(loop, reporter) as here:
        labels = here.data.images.labels
        if labels is None:
            raise InputError(f"--oracle labels: {loop.data} has no labels; give class folders or a data set")
        oracle, chooser = LabelOracle(labels, error=error, seed=loop.seed), here.chooser()
        while True:
            until = min(loop.questions, here.learner.n_learnt + loop.every)
            before = len(here.store.answers())
            while (n := len(here.store.answers())) < until:
                chosen = chooser.next(here.learner.belief(), here.store.answers(), min(until - n, 50), ())
                if not chosen:
                    break
                here.store.add_questions(chosen, model=here.learner.name())
                for asked in here.store.claim("labels", len(chosen)):
                    here.store.answer(asked.id, oracle.answer(asked.question).choice, "labels")
            if len(here.store.answers()) in (before, here.learner.n_learnt) or not here.learner.learn():
                break
            _say_round(here)
        return _ended(here)


def _claim(refill: Refill) -> Any:
    """The next question for the terminal, chosen now if none waits; None when nothing is left."""
    held = refill.claim("terminal", 1)
    if not held:
        refill.fill()
        held = refill.claim("terminal", 1)
    return held[0] if held else None


def _say_round(here: _Open) -> None:
    told = ", ".join(f"{key.upper()} {100 * value:.1f}" for key, value in _scores(here).items())
    here.reporter.say(f"{here.learner.n_learnt:,} answers" + (f": {told}" if told else ""))


def _scores(here: _Open) -> dict[str, float]:
    """ACC, NMI and ARI on held-out images, or on all, where labels are known."""
    from constraintmatch.evaluation import predict, scores

    held_out = here.data.held_out
    target = held_out if held_out is not None and held_out.labels is not None else here.data.images
    if target.labels is None:
        return {}
    told = scores(target.labels, predict(here.learner.newest, target))
    return {key: told[key] for key in ("acc", "nmi", "ari")}


def _ended(here: _Open) -> list[tuple[str, str]]:
    """Learn what has not been learnt, write the clusters, and say where everything is."""
    from constraintmatch.evaluation import predict
    from constraintmatch.models import save_model
    from constraintmatch.workflow import write_clusters

    here.learner.stop()
    if len(here.store.answers()) > here.learner.n_learnt:
        here.reporter.say("learning from the last answers (Ctrl-C leaves that for the next time)")
        try:
            here.learner.learn()
        except KeyboardInterrupt:
            here.reporter.say("left for the next time; every answer is kept")
    out, counts = here.loop.out, here.store.counts()
    save_model(here.learner.newest, out / "model")
    write_clusters(out / "clusters.csv", here.data.images.names, predict(here.learner.newest, here.data.images))
    rows = [
        ("answers", f"{out / 'answers.db'} ({counts.answered:,} of {here.loop.questions:,})"),
        ("model", f"{out / 'model'} (has learnt from {here.learner.n_learnt:,} answers)"),
        ("clusters", str(out / "clusters.csv")),
    ]
    if clashes := here.store.n_clashes():
        rows.append(("contradictions", f"{clashes:,}; what contradicts more or heavier answers was left out"))
    if told := _scores(here):
        rows.append(("scores", ", ".join(f"{key.upper()} {100 * value:.1f}" for key, value in told.items())))
    quoted = shlex.quote(str(out / "model"))
    return [*rows, ("next", f"constraintmatch predict {quoted} NEW-IMAGES --out clusters.csv")]


@contextmanager
def _opened(loop: Loop, reporter: Reporter | None) -> Iterator[_Open]:
    reporter = reporter or Quiet()
    request = replace(
        loop.images,
        data=loop.data,
        clusters=loop.clusters,
        model=loop.model,
        out=loop.out / "start",
        settings={"seed": loop.seed, "device": loop.device},
    )
    data, start, views = _start(loop, request, reporter)
    with open_store(loop.out / "answers.db", data.images, source=str(data.record["source"])) as store:
        if store.notice:
            reporter.say(store.notice)
        learner = Learner(
            data.images,
            start,
            store.answers,
            loop.out,
            _learning(loop, data, start),
            views=views,
            held_out=data.held_out,
        )
        try:
            yield _Open(loop, data, store, learner, reporter)
        finally:
            learner.stop()


def _start(loop: Loop, request: Train, reporter: Reporter) -> tuple[Data, ClusterModel, ViewChoice]:
    """The images and the model that every round begins with: given, or made once by the stages that it lacks."""
    from constraintmatch.pretraining import pretrain, short_start
    from constraintmatch.running import Around
    from constraintmatch.training import choose_device

    plan = plan_pretraining(request, reporter)
    if plan.stages:
        reporter.say(f"{len(plan.data.images):,} images; a short start is made first, in {request.out}")
    made = pretrain(
        plan.model,
        plan.data.images,
        plan.clusters,
        stages=plan.stages,
        recipe=short_start(len(plan.data.images), cpu=plan.cpu),
        settings={key: value for key, value in request.settings.items() if value is not None},
        around=Around(request.out, reporter=reporter, views=plan.views, data=plan.data.record),
    )
    return plan.data, made.to(choose_device(loop.device)), plan.views


def _learning(loop: Loop, data: Data, start: ClusterModel) -> Learning:
    """A round: the paper's setting for its sets, else what fits the number of images; short in either case."""
    from constraintmatch.pretraining import training_size

    cpu = next(start.parameters()).device.type == "cpu"
    size = training_size(len(data.images), cpu=cpu)
    arguments = {key: size[key] for key in ("images_per_step", "pairs_per_step")}
    if data.row is not None:
        tuned = data.row.tuned["constraintmatch"]
        arguments |= {"pairs_per_step": data.row.pairs_per_step, "images_per_step": data.row.images_per_step}
        arguments |= {key: tuned[key] for key in ("pseudo_weight", "max_entropy")}
    steps = loop.steps or (200 if cpu else 1_000)
    settings = {"steps": steps, "lr": size["lr"] if data.row is None else data.row.tuned["constraintmatch"]["lr"]}
    return Learning(arguments, {**settings, "seed": loop.seed, "device": loop.device}, loop.every)
