"""The command `loop`, once its words are read: what it asks about, and who is asked.

A loop folder holds the start, the answers, the rounds and the newest model: the same command continues it. Without a
number of clusters the start has none, and each round begins with as many as the answers have shown so far.
"""

import shlex
import socket
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import QUIET, Reporter, Watched
from constraintmatch.annotate.background_training import Learner, Learning
from constraintmatch.annotate.database import names_in
from constraintmatch.annotate.import_export import open_answers, open_model
from constraintmatch.annotate.question_queue import Chooser, Prompt, QuestionQueue, ask_one_by_one
from constraintmatch.annotate.sitting import Door, Late, Rows, note_loop, open_port, serve
from constraintmatch.annotate.store import Store
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions
from constraintmatch.methods import Context, ViewChoice
from constraintmatch.methods.heads import attach_head, detach_head, embed_images
from constraintmatch.models.cluster_model import ClusterModel, save_model, with_clusters
from constraintmatch.pipeline.commands import check_sort_folder, finish_loop, score_line
from constraintmatch.pipeline.config import MOST_LR, SHORT_STAGES, round_size
from constraintmatch.pipeline.embedding import choose_encoder, digest_of, encode
from constraintmatch.pipeline.photos import begin_with, embedded_photos, first_photos
from constraintmatch.pipeline.plan import Train, plan_pretraining
from constraintmatch.pipeline.sources import Data
from constraintmatch.pipeline.train import pretrain
from constraintmatch.questions.answers import Answer, in_order
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.next_question import Choice, Kind
from constraintmatch.questions.rounds import closure_pairs
from constraintmatch.training.loop import choose_device
from constraintmatch.training.run_folder import is_finished

CHECKPOINT_EVERY = 200  # steps of a round that a crash loses at most
Answers = Callable[[], Sequence[Answer]]


# The loop: a start made once, questions, answers, a round of training in the background, better questions


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
    images: Train | None = None  # how the images are opened, and the backbone
    seed: int = 0
    device: str | None = None
    frozen: bool = False  # whether only the head learns, and the network does not change
    last_steps: int | None = None  # of the training after the last answer
    sort: Path | None = None  # the folder for one folder of images per cluster

    def __post_init__(self) -> None:
        own = {name: getattr(self, name) for name in ("every", "steps", "last_steps")}
        for name, value in {"--questions": self.questions, **own}.items():
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be 1 or more")


def ask_on_page(loop: Loop, door: Door, reporter: Reporter = QUIET, words: str = "") -> Rows:
    """Serve the page and train in the background until Ctrl-C; the same command continues, by its words at once."""
    with open_port(door) as sock:
        if (first := _first_photos(loop, reporter)) is not None:
            return _ask_about_first(loop, door, sock, reporter, words, *first)
        with open_loop(loop, reporter) as (data, queue, learner):
            learner.start()
            serve(sock, door, reporter, data, queue, learner.activity)
            return end_page(loop, door, data, queue, learner, words)


def _first_photos(loop: Loop, reporter: Reporter) -> tuple[Data, Belief] | None:
    """Some photographs of a large folder and what an encoder makes of them; None: all are there soon, or a start is."""
    request, _ = _request(loop)
    own = request.backbone is not None or request.pretrained or (request.side, request.channels) != (None, None)
    if own or request.model is not None or request.pictures is not None or loop.data in DATASETS:
        return None
    _check_places(loop)
    if (model := choose_encoder(loop.data, request.start)) is None:
        return None
    size, asked = (model.config.side, model.config.channels), names_in(loop.out / "answers.db")
    if embedded_photos(loop.data, size, digest_of(model)) is not None:
        return None
    if (first := first_photos(loop.data, size, asked)) is None:
        return None
    return first, Belief.of(encode(model, first.images, reporter=reporter).images[:, 0, 0])


def _ask_about_first(
    loop: Loop, door: Door, sock: socket.socket, reporter: Reporter, words: str, first: Data, belief: Belief
) -> Rows:
    """Ask about the first photographs while the others are embedded in a thread; then about all, and train."""
    with open_answers(loop.out / "answers.db", first, reporter, flag="--out") as store:

        def go_on(_queue: QuestionQueue) -> tuple[Learner, Callable[[QuestionQueue], Rows]]:
            data, start, views = _start(loop, progress, lambda data: data.images.to_look_at())
            images, order = begin_with(first.images, data.images)
            learner = _learner(loop, data, start, lambda: in_order(store.answers(), order), views, progress)
            learner.start()
            store.change_images(images)
            late.order = order
            progress.say(f"all {len(images):,} images are embedded: questions are about all of them")
            return learner, lambda queue: end(data, queue, learner)

        def end(data: Data, queue: QuestionQueue, learner: Learner) -> Rows:
            learner.stop()
            store.change_images(data.images)  # in their own order, as the learner has them
            learner.answers = store.answers
            return end_page(loop, door, data, queue, learner, words)

        progress = Watched(reporter)
        late = Late(belief, go_on, progress)
        late.close = lambda _: _end_early(loop, store)
        queue = QuestionQueue(store, late.belief, _chooser(loop), late.name)
        serve(sock, door, reporter, first, queue, late.activity, late.begin)
        return late.end(queue)


def _end_early(loop: Loop, store: Store) -> Rows:
    answered = f"{loop.out / 'answers.db'} ({store.counts()['answered']:,} of {loop.questions:,})"
    return [("answers", answered), ("next", "the same command continues; what is embedded is kept")]


def end_page(loop: Loop, door: Door, data: Data, queue: QuestionQueue, learner: Learner, words: str) -> Rows:
    """End the rounds, write what was found, and note what the next start needs for its first question."""
    learner.stop()
    rows, model = end_loop(loop, data, queue.store, learner), learner.newest
    if words and model.is_encoder and data.files is not None:
        size, about = (model.config.side, model.config.channels), asdict(queue.chooser)
        note_loop(loop.out, words, [*size, digest_of(model)], about, learner.belief().probabilities)
    if door.browse and (report := dict(rows).get("report")):
        webbrowser.open(Path(report).resolve().as_uri())
    return rows


def go_on(loop: Loop, reporter: Reporter, store: Store, images: ImageSet) -> tuple[Data, Learner]:
    """The learner of a loop whose page asks already about these images."""
    data, start, views = _start(loop, reporter, lambda data: data.images.to_look_at())
    if data.images.names != images.names:
        raise InputError("its images have changed meanwhile", loop.data, "start again")
    learner = _learner(loop, data, start, store.answers, views, reporter)
    learner.start()
    return data, learner


def ask_in_terminal(loop: Loop, prompt: Prompt | None = None, reporter: Reporter = QUIET) -> Rows:
    """Ask in the terminal and train in the background until enough is answered or the user finishes."""
    with open_loop(loop, reporter) as (data, queue, learner):
        learner.start()
        try:
            ask_one_by_one(queue, prompt or Prompt.of_terminal(data.images), learner.activity)
            learner.stop()
            if learner.is_behind:
                n_left = learner.n_left
                what = f"training on the last answers, {n_left:,}" if n_left else "training longer on all answers"
                reporter.say(f"{what} (Ctrl-C leaves that for next time)")
                learner.learn(reporter)
        except KeyboardInterrupt:
            reporter.say("")  # ends the line of the prompt
            learner.stop()
        return end_loop(loop, data, queue.store, learner)


def end_loop(loop: Loop, data: Data, store: Store, learner: Learner) -> Rows:
    """Write the newest model and what it finds, and say where everything is."""
    out, answered = loop.out, store.counts()["answered"]
    rows = [("answers", f"{out / 'answers.db'} ({answered:,} of {loop.questions:,})")]
    probabilities = learner.belief().probabilities
    if probabilities is None:
        return [*rows, ("next", "the same command continues; the first clusters come with the first round of training")]
    save_model(learner.newest, out / "model")
    pairs = closure_pairs(store.answers(), len(data.images))
    left = f"; {learner.n_left:,} more wait: the same command trains on them" if learner.n_left else ""
    if learner.is_behind and not left:
        left = "; the last training waits: the same command continues it"
    rows.append(("model", f"{out / 'model'} (has learned from {learner.n_learned:,} answers{left})"))
    rows += finish_loop(data, learner.images, Predictions(probabilities), pairs, out, learner.run, loop.sort)
    if loop.last_steps and answered < loop.questions:
        rows.append(("last training", f"not yet; --questions {answered} takes these answers for all"))
    if n := store.n_contradictions():
        rows.append(("contradictions", f"{n:,}; answers that contradict more or heavier ones were left out"))
    if scores := score_line(data, learner.newest):
        rows.append(("scores", scores))
    quoted = shlex.quote(str(out / "model"))
    return [*rows, ("next", f"constraintmatch predict {quoted} NEW-IMAGES --out clusters.csv")]


@contextmanager
def open_loop(
    loop: Loop, reporter: Reporter, check: Callable[[Data], object] = lambda data: data.images.to_look_at()
) -> Iterator[tuple[Data, QuestionQueue, Learner]]:
    """The loop folder; `check` refuses images that cannot be asked about, before anything is written."""
    _check_places(loop)
    data, start, views = _start(loop, reporter, check)
    with open_answers(loop.out / "answers.db", data, reporter, flag="--out") as store:
        learner = _learner(loop, data, start, store.answers, views, reporter)
        try:
            yield data, QuestionQueue(store, learner.belief, _chooser(loop), learner.name), learner
        finally:
            learner.stop()


def _check_places(loop: Loop) -> None:
    """An InputError if the answers cannot be written or the images not be sorted, before a start is made."""
    check_target(loop.out / "answers.db")
    if loop.sort is not None:
        check_sort_folder(loop.sort, loop.data, loop.out)


def _chooser(loop: Loop) -> Chooser:
    return Chooser(kind=loop.kind, choose=loop.choose, seed=loop.seed, total=loop.questions)


def _start(loop: Loop, reporter: Reporter, check: Callable[[Data], object]) -> tuple[Data, ClusterModel, ViewChoice]:
    """The images and the model that every round begins with: given, or made once by the missing stages."""
    request, grows = _request(loop)
    plan = plan_pretraining(request, reporter)
    check(plan.data)
    stages = tuple(stage for stage in plan.config.stages if not (grows and stage == SHORT_STAGES[-1]))
    answers = loop.out / "answers.db"
    if stages and answers.is_file() and answers.stat().st_size:
        with open_answers(answers, plan.data, read_only=True, flag="--out"):
            pass  # of other images: refused before a start is made
    if grows:
        reporter.say("no --clusters: the loop finds as many as your answers show")
    if stages:
        reporter.say(f"{len(plan.data.images):,} images; first a short start is trained, once, in {request.out}")
    fresh = plan.config.start
    bare = grows and not stages and fresh.config.n_clusters  # of embeddings: nothing to train first
    try:
        made = pretrain(
            with_clusters(fresh, 0) if bare else fresh,
            plan.seen,
            plan.config.n_clusters,
            stages=stages,
            recipe=plan.config.stage_options,
            settings={key: value for key, value in request.settings.items() if value is not None},
            views=plan.config.views,
            context=Context(request.out, reporter=reporter, data=plan.data.record),
        )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"{str(stop) or 'stopped'}; the same command continues from there") from None
    return plan.data, made.to(choose_device(loop.device)), plan.config.views


def _request(loop: Loop) -> tuple[Train, bool]:
    """The request for the start, and whether its number of clusters is unknown.

    A start that is there already is used, even if images have come or gone since.
    """
    place, images = loop.out / "start", loop.images or Train()
    features, clusters = (place / stage for stage in SHORT_STAGES)
    model = clusters if loop.model is None and is_finished(clusters) else loop.model
    row = DATASETS.get(loop.data)  # the images of a folder are brought to the size of the model
    size = None if row is None else (row.side, row.channels)
    known = 0 if model is None else open_model(model, size).config.n_clusters
    if model is clusters and loop.clusters not in (None, known):
        raise InputError(f"{loop.out}: has {known} clusters already; leave --clusters out or choose another --out")
    grows = loop.clusters is None and row is None and not known
    if grows and loop.kind == "triplet":
        raise InputError("triplets do not show how many kinds there are; add --clusters K, or ask with --kind which")
    if model is None and is_finished(features):
        model = features
    begun = loop.model is None and model is not None
    request = replace(
        images,
        data=loop.data,
        clusters=2 if grows else loop.clusters,  # for a head that the start does not use
        model=model,
        start=None if begun else images.start,
        frozen=True,  # of a pretrained encoder: people wait for a round
        backbone=None if begun else images.backbone,
        out=place,
        settings={"seed": loop.seed, "device": loop.device},
    )
    return request, grows


def _learner(
    loop: Loop, data: Data, start: ClusterModel, answers: Answers, views: ViewChoice, reporter: Reporter
) -> Learner:
    """Rounds that train the network, or with `frozen` only the head, on what the network makes of the images."""
    if not (loop.frozen or start.is_encoder) or data.images.embedded:  # of embeddings, only a head learns anyway
        learning = _learning(loop, data, cpu=start.device.type == "cpu")
        return Learner(data.images, start, answers, loop.out, learning, views=views, held_out=data.held_out)
    look = encode if start.is_encoder else embed_images
    seen = look(start, data.images, reporter=reporter)  # one pass serves all rounds
    learning = _learning(loop, replace(data, images=seen, row=None), cpu=True)  # a head needs no large batches
    whole = partial(attach_head, start)
    return Learner(seen, detach_head(start, seen), answers, loop.out, learning, whole=whole)


def _learning(loop: Loop, data: Data, *, cpu: bool) -> Learning:
    """A round: the setting of the paper for its data sets, else what fits the number of images; always short."""
    size = round_size(len(data.images), cpu=cpu)
    arguments = {key: size[key] for key in ("images_per_step", "pairs_per_step", "warm_up")}
    rate = size["lr"]
    if (row := data.row) is not None:
        tuned = row.tuned["constraintmatch"]
        arguments = {"images_per_step": row.images_per_step, "pairs_per_step": row.pairs_per_step}
        arguments |= {key: tuned[key] for key in ("pseudo_weight", "max_entropy")}
        rate = min(tuned["lr"], MOST_LR)
    settings = {"steps": loop.steps or size["steps"], "lr": rate}
    settings |= {"seed": loop.seed, "device": loop.device, "checkpoint_every": CHECKPOINT_EVERY}
    return Learning(arguments, settings, loop.every, loop.questions, loop.last_steps)
