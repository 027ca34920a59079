"""The loop: a start made once, questions, answers, a round of training in the background, better questions.

A loop folder holds the start, the answers, the rounds and the newest model: the same command goes on with it. Without a
number of clusters the start has none, and each round begins with as many as the answers have shown to be there.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from constraintmatch.annotate.background_training import Learner, Learning
from constraintmatch.annotate.choosing import Choice, Chooser, Kind
from constraintmatch.annotate.contradictions import Clash
from constraintmatch.annotate.question_queue import Refill
from constraintmatch.annotate.records import Asked
from constraintmatch.annotate.server import Door, listening, serve_app
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.annotate.terminal import FINISHED, PREVIOUS, Prompt
from constraintmatch.answers import Answer, Question
from constraintmatch.datasets import DATASETS
from constraintmatch.errors import InputError
from constraintmatch.files import check_target
from constraintmatch.oracle import LabelOracle
from constraintmatch.planning import Train, plan_pretraining
from constraintmatch.progress import Quiet, Reporter
from constraintmatch.questions import Belief

if TYPE_CHECKING:
    from constraintmatch.methods import ViewChoice
    from constraintmatch.models import ClusterModel
    from constraintmatch.sources import Data

__all__ = ["Limited", "Loop", "ask_in_terminal", "ask_labels", "ask_on_page"]


CHECKPOINT_EVERY = 200  # steps of a round that a stop loses at most


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
    frozen: bool = False  # whether the network stays as it is and its head alone learns
    last_steps: int | None = None  # of the training after the last answer

    def __post_init__(self) -> None:
        own = {name: getattr(self, name) for name in ("every", "steps", "last_steps")}
        for name, value in {"--questions": self.questions, **own}.items():
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be 1 or more")


class Limited(Chooser):
    """A chooser that has nothing more to ask once there are so many answers."""

    def __init__(self, total: int, *, kind: Kind, choose: Choice, seed: int) -> None:
        super().__init__(kind=kind, choose=choose, seed=seed)
        self.total = self.wanted = total

    def next(self, belief: Belief, answers: Sequence[Answer], n: int, waiting: Sequence[Question]) -> list[Question]:
        left = self.wanted - len(answers) - len(waiting)
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
    """Serve the page and learn beside it until Ctrl-C, which ends at once: a round under way is left for next time."""
    with listening(door) as sock, _opened(loop, reporter, _can_be_seen) as here:
        here.learner.start()
        serve_app(
            sock,
            door,
            here.reporter,
            images=here.data.images,
            store=here.store,
            belief=here.learner.belief,
            chooser=here.chooser(),
            folder=here.data.files,
            source=str(here.data.record["name"]),
            model=here.learner.name,
            activity=here.learner.activity,
        )
        here.learner.stop()
        return _ended(here)


def ask_in_terminal(
    loop: Loop, prompt: Prompt | None = None, reporter: Reporter | None = None
) -> list[tuple[str, str]]:
    """Ask in the terminal and learn beside it until enough is answered or the person has finished; Ctrl-C ends too."""
    with _opened(loop, reporter, _can_be_seen) as here:
        here.learner.start()
        try:
            _ask_one_by_one(here, prompt or Prompt.of_terminal(here.data.images))
            here.learner.stop()
            _learn_the_rest(here)
        except KeyboardInterrupt:
            here.reporter.say("")  # the prompt's line ends
            here.learner.stop()
        return _ended(here)


def _ask_one_by_one(here: _Open, prompt: Prompt) -> None:
    learner, store, who = here.learner, here.store, "terminal"
    refill = Refill(store, learner.belief, here.chooser(), learner.name)
    while (asked := _claim(refill, who)) is not None:
        began, n_answers = time.monotonic(), store.counts().answered
        heading = f"{n_answers:,} of {here.loop.questions:,} answered; {learner.activity() or 'no round yet'}"
        choice = prompt.ask(asked.question, heading)
        if choice == FINISHED:
            return
        if choice == PREVIOUS:
            store.release(who)
            if store.undo(who) is None:
                prompt.write("there is nothing to take back")
            continue
        spent = round(1e3 * (time.monotonic() - began))
        for clash in store.answer(asked.id, choice, who, spent).contradictions[:1]:
            prompt.write(_clash_line(here, clash))


def _clash_line(here: _Open, clash: Clash) -> str:
    first, last = (here.data.images.names[clash.images[at]] for at in (0, -1))
    return f"{first} and {last}: one answer says different, {len(clash.together):,} say same; p takes yours back"


def ask_labels(loop: Loop, error: float = 0.0, reporter: Reporter | None = None) -> list[tuple[str, str]]:
    """Let the labels answer, some of them wrongly, and learn after every `every` answers: for experiments and tests."""
    with _opened(loop, reporter, lambda data: _oracle(loop, data, error)) as here:
        oracle, chooser = _oracle(loop, here.data, error), here.chooser()
        while True:
            until = min(loop.questions, here.learner.n_learnt + loop.every)
            while (n := len(here.store.answers())) < until:
                chosen = chooser.next(here.learner.belief(), here.store.answers(), min(until - n, 50), ())
                if not chosen:
                    break
                here.store.add_questions(chosen, model=here.learner.name())
                for asked in here.store.claim("labels", len(chosen)):
                    here.store.answer(asked.id, oracle.answer(asked.question).choice, "labels")
            if not here.learner.is_behind or not here.learner.learn(here.reporter):
                break
            _say_round(here)
        return _ended(here)


def _can_be_seen(data: Data) -> None:
    data.images.to_look_at()


def _oracle(loop: Loop, data: Data, error: float) -> LabelOracle:
    if data.images.labels is None:
        raise InputError(f"--oracle labels: {loop.data} has no labels; give class folders or a data set")
    return LabelOracle(data.images.labels, error=error, seed=loop.seed)


def _claim(refill: Refill, who: str) -> Asked | None:
    """The next question, chosen now if none waits or the model is a new one; None when nothing is left."""
    refill.fill()
    held = refill.claim(who, 1)
    if not held:
        refill.fill()
        held = refill.claim(who, 1)
    if not held and refill.problem is not None:
        raise InputError(refill.problem)
    return held[0] if held else None


def _learn_the_rest(here: _Open) -> None:
    if here.learner.is_behind:
        n_left = here.learner.n_left
        said = f"learning from the last answers, {n_left:,}" if n_left else "training longer on all answers"
        here.reporter.say(f"{said} (Ctrl-C leaves that for next time)")
        here.learner.learn(here.reporter)


def _say_round(here: _Open) -> None:
    told = _score_line(here)
    here.reporter.say(f"{here.learner.n_learnt:,} answers" + (f": {told}" if told else ""))


def _score_line(here: _Open) -> str:
    """ACC, NMI and ARI in %, and of which images: of --test, or of those that were asked about; "" without labels."""
    from constraintmatch.evaluation import predict, scores

    held_out = here.data.held_out
    tested = held_out is not None and held_out.labels is not None
    target = held_out if tested and held_out is not None else here.data.images
    if target.labels is None or not here.learner.newest.config.n_clusters:
        return ""
    told = scores(target.labels, predict(here.learner.newest, target))
    where = "held-out images" if tested else "images that it has seen; --test names others"
    said = ", ".join(f"{key.upper()} {100 * told[key]:.1f}" for key in ("acc", "nmi", "ari"))
    return f"{said} (in %, on {len(target):,} {where})"


def _ended(here: _Open) -> list[tuple[str, str]]:
    """Write the newest model and its clusters, and say where everything is."""
    from constraintmatch.evaluation import Predictions
    from constraintmatch.models import save_model
    from constraintmatch.workflow import write_clusters

    out, learner, counts = here.loop.out, here.learner, here.store.counts()
    rows = [("answers", f"{out / 'answers.db'} ({counts.answered:,} of {here.loop.questions:,})")]
    probabilities = learner.belief().probabilities
    if probabilities is None:
        return [*rows, ("next", "the same command goes on; there are no clusters before the first round has learnt")]
    save_model(learner.newest, out / "model")
    write_clusters(out / "clusters.csv", here.data.images.names, Predictions(probabilities))
    left = f"; {learner.n_left:,} more wait: the same command learns them" if learner.n_left else ""
    if learner.is_behind and not left:
        left = "; the last training waits: the same command goes on with it"
    rows += [
        ("model", f"{out / 'model'} (has learnt from {learner.n_learnt:,} answers{left})"),
        ("clusters", f"{out / 'clusters.csv'} ({learner.newest.config.n_clusters:,} clusters)"),
    ]
    if here.loop.last_steps and counts.answered < here.loop.questions:
        rows.append(("last training", f"not yet; --questions {counts.answered} takes these answers for all"))
    if clashes := here.store.n_clashes():
        rows.append(("contradictions", f"{clashes:,}; what contradicts more or heavier answers was left out"))
    if told := _score_line(here):
        rows.append(("scores", told))
    quoted = shlex.quote(str(out / "model"))
    return [*rows, ("next", f"constraintmatch predict {quoted} NEW-IMAGES --out clusters.csv")]


@contextmanager
def _opened(loop: Loop, reporter: Reporter | None, check: Callable[[Data], object]) -> Iterator[_Open]:
    """The loop folder; `check` refuses images that cannot be asked about, before anything is written."""
    reporter = reporter or Quiet()
    check_target(loop.out / "answers.db")  # before minutes are spent on a start
    data, start, views = _start(loop, reporter, check)
    with _store(loop, data) as store:
        if store.notice:
            reporter.say(store.notice)
        frozen = loop.frozen and not data.images.embedded  # of embeddings the head is all that learns
        learner = (
            _head_learner(loop, data, start, store, reporter) if frozen else _learner(loop, data, start, store, views)
        )
        try:
            yield _Open(loop, data, store, learner, reporter)
        finally:
            learner.stop()


@contextmanager
def _store(loop: Loop, data: Data, *, read_only: bool = False) -> Iterator[Store]:
    """The answers of a loop folder; what is wrong with them is mended by another --out, for there is no --db."""
    source, pictures = data.record["source"], data.record.get("pictures", "")
    with ExitStack() as stack:
        try:
            opened = open_store(
                loop.out / "answers.db", data.images, source=source, pictures=pictures, read_only=read_only
            )
            store = stack.enter_context(opened)
        except InputError as error:
            raise InputError(str(error).replace("another --db", "another --out")) from error.__cause__
        yield store


def _start(loop: Loop, reporter: Reporter, check: Callable[[Data], object]) -> tuple[Data, ClusterModel, ViewChoice]:
    """The images and the model that every round begins with: given, or made once by the stages that it lacks."""
    from constraintmatch.models import with_clusters
    from constraintmatch.pretraining import SHORT_STAGES, pretrain, short_start
    from constraintmatch.running import Around
    from constraintmatch.training import choose_device

    request, grows = _request(loop)
    plan = plan_pretraining(request, reporter)
    check(plan.data)
    stages = tuple(stage for stage in plan.stages if not (grows and stage == SHORT_STAGES[-1]))
    answers = loop.out / "answers.db"
    if stages and answers.is_file() and answers.stat().st_size:
        with _store(loop, plan.data, read_only=True):  # those about other images are refused before a start is made
            pass
    if grows:
        reporter.say("no --clusters: there will be as many as your answers show")
    if stages:
        reporter.say(f"{len(plan.data.images):,} images; a short start is made first, once, in {request.out}")
    bare = grows and not stages and plan.model.config.n_clusters  # of embeddings: nothing has to be learnt first
    try:
        made = pretrain(
            with_clusters(plan.model, 0) if bare else plan.model,
            plan.data.images,
            plan.clusters,
            stages=stages,
            recipe=short_start(len(plan.data.images), cpu=plan.cpu),
            settings={key: value for key, value in request.settings.items() if value is not None},
            around=Around(request.out, reporter=reporter, views=plan.views, data=plan.data.record),
        )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"{str(stop) or 'stopped'}; the same command goes on from there") from None
    return plan.data, made.to(choose_device(loop.device)), plan.views


def _request(loop: Loop) -> tuple[Train, bool]:
    """What the start is asked for, and whether its number of clusters is unknown.

    A start that was made before is taken as it is, also when images have come or gone since.
    """
    from constraintmatch.models import load_model
    from constraintmatch.pretraining import SHORT_STAGES
    from constraintmatch.runs import is_finished

    place, model = loop.out / "start", loop.model
    features, clusters = (place / stage for stage in SHORT_STAGES)
    if model is None and is_finished(clusters):
        model = clusters
        known = load_model(model).config.n_clusters
        if loop.clusters not in (None, known):
            raise InputError(
                f"{loop.out}: was begun with {known} clusters; leave --clusters out or choose another --out"
            )
    known = 0 if model is None else _fitting(model, loop).config.n_clusters
    grows = loop.clusters is None and loop.data not in DATASETS and not known
    if model is None and is_finished(features):
        model = features
    request = replace(
        loop.images,
        data=loop.data,
        clusters=2 if grows else loop.clusters,  # for a head that the start does without
        model=model,
        backbone=loop.images.backbone if loop.model is not None or model is None else None,
        out=place,
        settings={"seed": loop.seed, "device": loop.device},
    )
    return request, grows


def _fitting(path: Path, loop: Loop) -> ClusterModel:
    """The model, if it takes the images of the data set; a folder's images are brought to its size."""
    from constraintmatch.models import load_model

    model, row = load_model(path), DATASETS.get(loop.data)
    if row is not None and (model.config.side, model.config.channels) != (row.side, row.channels):
        takes, given = (
            f"{side} px and {channels} channel(s)"
            for side, channels in ((model.config.side, model.config.channels), (row.side, row.channels))
        )
        raise InputError(
            f"{path}: takes images of {takes}, {loop.data} has {given}; name a model that was trained on it"
        )
    return model


def _learner(loop: Loop, data: Data, start: ClusterModel, store: Store, views: ViewChoice) -> Learner:
    """Rounds that train the network."""
    learning = _learning(loop, data, cpu=start.device.type == "cpu")
    return Learner(data.images, start, store.answers, loop.out, learning, views=views, held_out=data.held_out)


def _head_learner(loop: Loop, data: Data, start: ClusterModel, store: Store, reporter: Reporter) -> Learner:
    """Rounds that train its head alone, on what it makes of the images: one pass over them serves all rounds."""
    from constraintmatch.methods.heads import put_back, seen_by, taken_off

    seen = seen_by(start, data.images, reporter=reporter)
    learning = _learning(loop, replace(data, images=seen, row=None), cpu=True)  # so few numbers need no large batches
    whole = partial(put_back, start)
    return Learner(seen, taken_off(start, seen), store.answers, loop.out, learning, whole=whole)


def _learning(loop: Loop, data: Data, *, cpu: bool) -> Learning:
    """A round: the paper's setting for its sets, else what fits the number of images; short in either case."""
    from constraintmatch.pretraining import MOST_LR, round_size

    size = round_size(len(data.images), cpu=cpu)
    arguments = {key: size[key] for key in ("images_per_step", "pairs_per_step", "warm_up")}
    if data.row is not None:
        tuned = data.row.tuned["constraintmatch"]
        arguments.pop("warm_up")
        arguments |= {"pairs_per_step": data.row.pairs_per_step, "images_per_step": data.row.images_per_step}
        arguments |= {key: tuned[key] for key in ("pseudo_weight", "max_entropy")}
    rate = size["lr"] if data.row is None else min(data.row.tuned["constraintmatch"]["lr"], MOST_LR)
    settings = {"steps": loop.steps or size["steps"], "lr": rate}
    settings |= {"seed": loop.seed, "device": loop.device, "checkpoint_every": CHECKPOINT_EVERY}
    return Learning(arguments, settings, loop.every, loop.questions, loop.last_steps)
