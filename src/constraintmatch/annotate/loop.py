"""The command `loop`: a start made once, questions, answers, a round of training in the background, better questions.

A loop folder holds the start, the answers, the rounds and the newest model: the same command continues it. Without a
number of clusters the start has none, and each round begins with as many as the answers have shown so far.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import Quiet, Reporter
from constraintmatch.annotate.background_training import Learner, Learning
from constraintmatch.annotate.question_queue import Chooser, QuestionQueue
from constraintmatch.annotate.server import Door, open_model, open_port, serve_app
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.annotate.terminal import Prompt, ask_one_by_one
from constraintmatch.data.datasets import DATASETS
from constraintmatch.pipeline.plan import Train, plan_pretraining
from constraintmatch.questions.next_question import Choice, Kind
from constraintmatch.questions.simulated_annotator import LabelOracle

if TYPE_CHECKING:
    from constraintmatch.methods import ViewChoice
    from constraintmatch.models.cluster_model import ClusterModel
    from constraintmatch.pipeline.sources import Data

__all__ = ["Loop", "ask_in_terminal", "ask_labels", "ask_on_page"]


CHECKPOINT_EVERY = 200  # steps of a round that a crash loses at most


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
    frozen: bool = False  # whether the network stays as it is and only its head learns
    last_steps: int | None = None  # of the training after the last answer

    def __post_init__(self) -> None:
        own = {name: getattr(self, name) for name in ("every", "steps", "last_steps")}
        for name, value in {"--questions": self.questions, **own}.items():
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be 1 or more")


@dataclass(frozen=True)
class _Open:
    """An open loop folder: images, answers, the learner."""

    loop: Loop
    data: Data
    store: Store
    learner: Learner
    reporter: Reporter

    def queue(self) -> QuestionQueue:
        """The questions that the newest model chooses."""
        loop = self.loop
        chooser = Chooser(kind=loop.kind, choose=loop.choose, seed=loop.seed, total=loop.questions)
        return QuestionQueue(self.store, self.learner.belief, chooser, self.learner.name)


def ask_on_page(loop: Loop, door: Door, reporter: Reporter | None = None) -> list[tuple[str, str]]:
    """Serve the page and train in the background until Ctrl-C; the same command continues."""
    with open_port(door) as sock, _open(loop, reporter, _check_pictures) as here:
        here.learner.start()
        serve_app(sock, door, here.reporter, here.data, here.queue(), here.learner.activity)
        here.learner.stop()
        return _end(here)


def ask_in_terminal(
    loop: Loop, prompt: Prompt | None = None, reporter: Reporter | None = None
) -> list[tuple[str, str]]:
    """Ask in the terminal and train in the background until enough is answered or the user finishes."""
    with _open(loop, reporter, _check_pictures) as here:
        here.learner.start()
        try:
            ask_one_by_one(here.queue(), prompt or Prompt.of_terminal(here.data.images), here.learner.activity)
            here.learner.stop()
            _learn_the_rest(here)
        except KeyboardInterrupt:
            here.reporter.say("")  # ends the line of the prompt
            here.learner.stop()
        return _end(here)


def ask_labels(loop: Loop, error: float = 0.0, reporter: Reporter | None = None) -> list[tuple[str, str]]:
    """Let the labels answer, some of them wrongly, and train after every `every` answers: for experiments and tests."""
    with _open(loop, reporter, lambda data: _oracle(loop, data, error)) as here:
        oracle, queue = _oracle(loop, here.data, error), here.queue()
        while True:
            until = min(loop.questions, here.learner.n_learnt + loop.every)
            while (n := len(here.store.answers())) < until:
                chosen = queue.chooser.next(here.learner.belief(), here.store.answers(), min(until - n, 50), ())
                if not chosen:
                    break
                here.store.add_questions(chosen, model=here.learner.name())
                for asked in here.store.claim("labels", len(chosen)):
                    here.store.answer(asked.id, oracle.answer(asked.question).choice, "labels")
            if not here.learner.is_behind or not here.learner.learn(here.reporter):
                break
            scores = _score_line(here)
            here.reporter.say(f"{here.learner.n_learnt:,} answers" + (f": {scores}" if scores else ""))
        return _end(here)


def _check_pictures(data: Data) -> None:
    data.images.to_look_at()


def _oracle(loop: Loop, data: Data, error: float) -> LabelOracle:
    if data.images.labels is None:
        raise InputError(f"--oracle labels: {loop.data} has no labels; give class folders or a data set")
    return LabelOracle(data.images.labels, error=error, seed=loop.seed)


def _learn_the_rest(here: _Open) -> None:
    if here.learner.is_behind:
        n_left = here.learner.n_left
        what = f"training on the last answers, {n_left:,}" if n_left else "training longer on all answers"
        here.reporter.say(f"{what} (Ctrl-C leaves that for next time)")
        here.learner.learn(here.reporter)


def _score_line(here: _Open) -> str:
    """ACC, NMI and ARI in %, and of which images: of --test, or of those that were asked about; "" without labels."""
    from constraintmatch.evaluation.metrics import predict, scores

    held_out = here.data.held_out
    tested = held_out is not None and held_out.labels is not None
    target = held_out if tested and held_out is not None else here.data.images
    if target.labels is None or not here.learner.newest.config.n_clusters:
        return ""
    found = scores(target.labels, predict(here.learner.newest, target))
    where = "held-out images" if tested else "images that it was trained on; --test names others"
    values = ", ".join(f"{key.upper()} {100 * found[key]:.1f}" for key in ("acc", "nmi", "ari"))
    return f"{values} (in %, on {len(target):,} {where})"


def _end(here: _Open) -> list[tuple[str, str]]:
    """Write the newest model and its clusters, and say where everything is."""
    from constraintmatch.evaluation.metrics import Predictions
    from constraintmatch.models.cluster_model import save_model
    from constraintmatch.pipeline.commands import write_clusters

    out, learner, counts = here.loop.out, here.learner, here.store.counts()
    rows = [("answers", f"{out / 'answers.db'} ({counts.answered:,} of {here.loop.questions:,})")]
    probabilities = learner.belief().probabilities
    if probabilities is None:
        return [*rows, ("next", "the same command continues; the first clusters come with the first round of training")]
    save_model(learner.newest, out / "model")
    write_clusters(out / "clusters.csv", here.data.images.names, Predictions(probabilities))
    left = f"; {learner.n_left:,} more wait: the same command trains on them" if learner.n_left else ""
    if learner.is_behind and not left:
        left = "; the last training waits: the same command continues it"
    rows += [
        ("model", f"{out / 'model'} (has learned from {learner.n_learnt:,} answers{left})"),
        ("clusters", f"{out / 'clusters.csv'} ({learner.newest.config.n_clusters:,} clusters)"),
    ]
    if here.loop.last_steps and counts.answered < here.loop.questions:
        rows.append(("last training", f"not yet; --questions {counts.answered} takes these answers for all"))
    if n := here.store.n_contradictions():
        rows.append(("contradictions", f"{n:,}; answers that contradict more or heavier ones were left out"))
    if scores := _score_line(here):
        rows.append(("scores", scores))
    quoted = shlex.quote(str(out / "model"))
    return [*rows, ("next", f"constraintmatch predict {quoted} NEW-IMAGES --out clusters.csv")]


@contextmanager
def _open(loop: Loop, reporter: Reporter | None, check: Callable[[Data], object]) -> Iterator[_Open]:
    """The loop folder; `check` refuses images that cannot be asked about, before anything is written."""
    reporter = reporter or Quiet()
    check_target(loop.out / "answers.db")  # before minutes are spent on a start
    data, start, views = _start(loop, reporter, check)
    with _answers(loop, data) as store:
        if store.notice:
            reporter.say(store.notice)
        frozen = loop.frozen and not data.images.embedded  # of embeddings, only a head learns anyway
        learner = (
            _head_learner(loop, data, start, store, reporter) if frozen else _learner(loop, data, start, store, views)
        )
        try:
            yield _Open(loop, data, store, learner, reporter)
        finally:
            learner.stop()


def _answers(loop: Loop, data: Data, *, read_only: bool = False) -> AbstractContextManager[Store]:
    """The answers of a loop folder."""
    source, pictures = data.record["source"], data.record.get("pictures", "")
    place = loop.out / "answers.db"
    return open_store(place, data.images, source=source, pictures=pictures, read_only=read_only, flag="--out")


def _start(loop: Loop, reporter: Reporter, check: Callable[[Data], object]) -> tuple[Data, ClusterModel, ViewChoice]:
    """The images and the model that every round begins with: given, or made once by the missing stages."""
    from constraintmatch.methods import Context
    from constraintmatch.models.cluster_model import with_clusters
    from constraintmatch.pipeline.config import SHORT_STAGES, short_start
    from constraintmatch.pipeline.train import pretrain
    from constraintmatch.training.loop import choose_device

    request, grows = _request(loop)
    plan = plan_pretraining(request, reporter)
    check(plan.data)
    stages = tuple(stage for stage in plan.stages if not (grows and stage == SHORT_STAGES[-1]))
    answers = loop.out / "answers.db"
    if stages and answers.is_file() and answers.stat().st_size:
        with _answers(loop, plan.data, read_only=True):  # of other images: refused before a start is made
            pass
    if grows:
        reporter.say("no --clusters: the loop finds as many as your answers show")
    if stages:
        reporter.say(f"{len(plan.data.images):,} images; first a short start is trained, once, in {request.out}")
    bare = grows and not stages and plan.model.config.n_clusters  # of embeddings: nothing to train first
    try:
        made = pretrain(
            with_clusters(plan.model, 0) if bare else plan.model,
            plan.data.images,
            plan.clusters,
            stages=stages,
            recipe=short_start(len(plan.data.images), cpu=plan.cpu),
            settings={key: value for key, value in request.settings.items() if value is not None},
            views=plan.views,
            context=Context(request.out, reporter=reporter, data=plan.data.record),
        )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"{str(stop) or 'stopped'}; the same command continues from there") from None
    return plan.data, made.to(choose_device(loop.device)), plan.views


def _request(loop: Loop) -> tuple[Train, bool]:
    """The request for the start, and whether its number of clusters is unknown.

    A start that is there already is used as it is, even if images have come or gone since.
    """
    from constraintmatch.pipeline.config import SHORT_STAGES
    from constraintmatch.training.run_folder import is_finished

    place, model = loop.out / "start", loop.model
    features, clusters = (place / stage for stage in SHORT_STAGES)
    if model is None and is_finished(clusters):
        model = clusters
        known = open_model(model).config.n_clusters
        if loop.clusters not in (None, known):
            raise InputError(f"{loop.out}: has {known} clusters already; leave --clusters out or choose another --out")
    row = DATASETS.get(loop.data)  # the images of a folder are brought to the size of the model
    size = None if row is None else (row.side, row.channels)
    known = 0 if model is None else open_model(model, size).config.n_clusters
    grows = loop.clusters is None and loop.data not in DATASETS and not known
    if model is None and is_finished(features):
        model = features
    request = replace(
        loop.images,
        data=loop.data,
        clusters=2 if grows else loop.clusters,  # for a head that the start does not use
        model=model,
        backbone=loop.images.backbone if loop.model is not None or model is None else None,
        out=place,
        settings={"seed": loop.seed, "device": loop.device},
    )
    return request, grows


def _learner(loop: Loop, data: Data, start: ClusterModel, store: Store, views: ViewChoice) -> Learner:
    """Rounds that train the network."""
    learning = _learning(loop, data, cpu=start.device.type == "cpu")
    return Learner(data.images, start, store.answers, loop.out, learning, views=views, held_out=data.held_out)


def _head_learner(loop: Loop, data: Data, start: ClusterModel, store: Store, reporter: Reporter) -> Learner:
    """Rounds that train only the head, on what the network makes of the images: one pass serves all rounds."""
    from constraintmatch.methods.parts.head_training import put_back, seen_by, taken_off

    seen = seen_by(start, data.images, reporter=reporter)
    learning = _learning(
        loop, replace(data, images=seen, row=None), cpu=True
    )  # a head is small and needs no large batches
    whole = partial(put_back, start)
    return Learner(seen, taken_off(start, seen), store.answers, loop.out, learning, whole=whole)


def _learning(loop: Loop, data: Data, *, cpu: bool) -> Learning:
    """A round: the setting of the paper for its data sets, else what fits the number of images; always short."""
    from constraintmatch.pipeline.config import MOST_LR, round_size

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
