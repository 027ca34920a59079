"""The commands `annotate` and `loop`, once their words are read: what they ask about, and who is asked.

A loop folder holds the start, the answers, the rounds and the newest model: the same command continues it. Without a
number of clusters the start has none, and each round begins with as many as the answers have shown so far. fastapi and
uvicorn, which may be missing, are imported only by what needs them.
"""

import shlex
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import QUIET, Reporter, watched
from constraintmatch.annotate.background_training import Learner, Learning
from constraintmatch.annotate.import_export import Sitting, open_answers, open_images, open_model
from constraintmatch.annotate.other_tools import write_tasks
from constraintmatch.annotate.question_queue import Chooser, Line, Prompt, QuestionQueue, ask_one_by_one, pixel_belief
from constraintmatch.annotate.store import Store
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.decoding import is_photo
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions
from constraintmatch.methods import Context, ViewChoice
from constraintmatch.methods.heads import attach_head, detach_head, embed_images
from constraintmatch.models.cluster_model import ClusterModel, save_model, with_clusters
from constraintmatch.pipeline.commands import check_sort_folder, finish_loop, score_line
from constraintmatch.pipeline.config import MOST_LR, SHORT_STAGES, round_size, short_start
from constraintmatch.pipeline.embedding import encode, photo_features
from constraintmatch.pipeline.plan import Train, plan_pretraining
from constraintmatch.pipeline.sources import Data, read_pairs
from constraintmatch.pipeline.train import pretrain
from constraintmatch.questions.answers import Question
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.next_question import Choice, Kind
from constraintmatch.questions.rounds import closure_pairs, image_belief
from constraintmatch.training.loop import choose_device
from constraintmatch.training.run_folder import is_finished

TASKS = 100  # questions for another tool at a time
CHECKPOINT_EVERY = 200  # steps of a round that a crash loses at most
Rows = list[tuple[str, str]]  # of a table: what was answered, and what to do next
Open = tuple[Data, QuestionQueue, Learner]


# The page


@dataclass(frozen=True)
class Door:
    """Where the server listens, and whether the browser is opened."""

    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = None
    browse: bool = True


def serve_page(sitting: Sitting, door: Door, reporter: Reporter = QUIET) -> Rows:
    """Serve the page until Ctrl-C."""
    with open_port(door) as sock:
        check_target(sitting.db)
        data = open_images(sitting, reporter)
        data.images.to_look_at()
        again = None if sitting.again is None else read_pairs(sitting.again, data.images).merged()
        believe = _believer(sitting, data.images, reporter)
        with open_answers(sitting.db, data, reporter) as store:
            if again is not None and len(again):
                pairs = zip(again.left.tolist(), again.right.tolist(), strict=True)
                questions = (Question(left, (right,)) for left, right in pairs)
                n = store.add_questions(questions, model=str(sitting.again), urgent=True)
                asked = f"{n:,} of the {len(again):,} pairs of {sitting.again} are asked first"
                reporter.say(f"{asked}; the others have answers already")
            belief = believe()
            chooser = Chooser(kind=sitting.kind, choose=sitting.choose, seed=sitting.seed)
            name = None if sitting.model is None else str(sitting.model)
            _serve(sock, door, reporter, data, QuestionQueue(store, lambda: belief, chooser, lambda: name))
            return _next_steps(sitting, store, belief)


def export_tasks(sitting: Sitting, out: Path, reporter: Reporter = QUIET) -> str:
    """Write the next questions as tasks for Label Studio; a sentence with their number comes back."""
    check_target(out)
    data = open_images(sitting, reporter)
    if data.files is None:
        raise InputError(f"{sitting.data}: has no image files that Label Studio could show; give a folder")
    answers = []
    if sitting.db.exists():
        with open_answers(sitting.db, data, read_only=True) as store:
            answers = store.answers()
    belief = _believer(sitting, data.images, reporter)()
    chooser, questions = Chooser("pair", sitting.choose, sitting.seed), list[Question]()
    while found := chooser.next(belief, answers, TASKS - len(questions), questions):  # a warm-up gives few at a time
        questions += found
    write_tasks(out, data.images.names, questions)
    return f"{len(questions):,} questions"


def _believer(sitting: Sitting, images: ImageSet, reporter: Reporter) -> Callable[[], Belief]:
    """A function that makes the belief, which may take long; the model and the device are checked at once."""
    photos = sitting.model is None and is_photo(images.side, images.channels)
    if photos and (seen := photo_features(sitting.data, images, reporter)) is not None:
        return partial(Belief.of, seen)
    if sitting.model is None:
        what = "the embeddings" if images.embedded else "the pixels"
        reporter.say(f"no model: questions are chosen by {what} (--model asks better ones)")
        return lambda: pixel_belief(images)
    model, device = open_model(sitting.model, (images.side, images.channels)), choose_device(sitting.device)

    def look() -> Belief:
        with watched(reporter, "looking at the images", len(images)) as progress:
            return image_belief(model, images, device=device, progress=progress)

    return look


def _next_steps(sitting: Sitting, store: Store, belief: Belief) -> Rows:
    """Where the answers are and what to do with them."""
    counts, quoted = store.counts(), shlex.quote(sitting.data)
    kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("same", "different", "unsure"))
    rows = [("answers", f"{sitting.db} ({counts['answered']:,}: {kinds})")]
    if n := store.n_contradictions():
        rows.append(("contradictions", f"{n:,}; settle them on the page, or train leaves some of them out"))
    if not counts["answered"]:
        return rows
    split = "" if sitting.split is None else f" --split {sitting.split}"
    split += "" if sitting.pictures is None else f" --pictures {shlex.quote(str(sitting.pictures))}"
    export = f"constraintmatch annotate {quoted}{split} --db {shlex.quote(str(sitting.db))} --export pairs.csv"
    has_clusters = belief.probabilities is not None and sitting.model is not None
    start = f"--model {shlex.quote(str(sitting.model))}" if has_clusters else "--clusters K"
    return [*rows, ("pairs", export), ("then", f"constraintmatch train {quoted} --pairs pairs.csv {start}")]


def open_port(door: Door) -> socket.socket:
    """The socket of the door, before anything else is done: a port in use shows at once."""
    if not all(find_spec(name) for name in ("fastapi", "uvicorn")):
        raise InputError("the page needs fastapi and uvicorn; install them: pip install 'constraintmatch[web]'")
    from constraintmatch.annotate.server import listen

    return listen(door.host, door.port)


def _serve(
    sock: socket.socket, door: Door, reporter: Reporter, data: Data, queue: QuestionQueue, activity: Line = lambda: None
) -> None:
    """Serve the page over these images and questions on the socket until Ctrl-C."""
    from constraintmatch.annotate import server
    from constraintmatch.annotate.api import Page, create_app

    rules = server.rules_for(door.host, sock.getsockname()[1], door.token)
    place = server.address(sock, door.host, rules.token)
    reporter.say(f"the page is at {place} (Ctrl-C ends; every answer is saved at once)")
    if not server.is_loopback(door.host):
        reporter.say("everybody with this address can see the images and answer; share it with care")
    if door.browse:  # the socket listens already, so the browser waits; some browsers block the call that opens them
        threading.Thread(target=webbrowser.open, args=(place,), daemon=True).start()
    page = Page(data.images, queue, data.files, str(data.record["name"]), activity)
    server.run_app(create_app(page, rules), sock)


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


def ask_on_page(loop: Loop, door: Door, reporter: Reporter = QUIET) -> Rows:
    """Serve the page and train in the background until Ctrl-C; the same command continues."""
    with open_port(door) as sock, open_loop(loop, reporter) as (data, queue, learner):
        learner.start()
        _serve(sock, door, reporter, data, queue, learner.activity)
        learner.stop()
        rows = end_loop(loop, data, queue.store, learner)
        if door.browse and (report := dict(rows).get("report")):
            webbrowser.open(Path(report).resolve().as_uri())
        return rows


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
) -> Iterator[Open]:
    """The loop folder; `check` refuses images that cannot be asked about, before anything is written."""
    answers = loop.out / "answers.db"
    check_target(answers)  # before minutes are spent on a start
    if loop.sort is not None:
        check_sort_folder(loop.sort, loop.data, loop.out)
    data, start, views = _start(loop, reporter, check)
    with open_answers(answers, data, reporter, flag="--out") as store:
        learner = _learner(loop, data, start, store, views, reporter)
        chooser = Chooser(kind=loop.kind, choose=loop.choose, seed=loop.seed, total=loop.questions)
        try:
            yield data, QuestionQueue(store, learner.belief, chooser, learner.name), learner
        finally:
            learner.stop()


def _start(loop: Loop, reporter: Reporter, check: Callable[[Data], object]) -> tuple[Data, ClusterModel, ViewChoice]:
    """The images and the model that every round begins with: given, or made once by the missing stages."""
    request, grows = _request(loop)
    plan = plan_pretraining(request, reporter)
    check(plan.data)
    stages = tuple(stage for stage in plan.stages if not (grows and stage == SHORT_STAGES[-1]))
    answers = loop.out / "answers.db"
    if stages and answers.is_file() and answers.stat().st_size:
        with open_answers(answers, plan.data, read_only=True, flag="--out"):
            pass  # of other images: refused before a start is made
    if grows:
        reporter.say("no --clusters: the loop finds as many as your answers show")
    if stages:
        reporter.say(f"{len(plan.data.images):,} images; first a short start is trained, once, in {request.out}")
    bare = grows and not stages and plan.model.config.n_clusters  # of embeddings: nothing to train first
    try:
        made = pretrain(
            with_clusters(plan.model, 0) if bare else plan.model,
            plan.seen,
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

    A start that is there already is used, even if images have come or gone since.
    """
    place, model, images = loop.out / "start", loop.model, loop.images or Train()
    features, clusters = (place / stage for stage in SHORT_STAGES)
    if model is None and is_finished(clusters):
        model = clusters
        known = open_model(model).config.n_clusters
        if loop.clusters not in (None, known):
            raise InputError(f"{loop.out}: has {known} clusters already; leave --clusters out or choose another --out")
    row = DATASETS.get(loop.data)  # the images of a folder are brought to the size of the model
    size = None if row is None else (row.side, row.channels)
    known = 0 if model is None else open_model(model, size).config.n_clusters
    grows = loop.clusters is None and row is None and not known
    if model is None and is_finished(features):
        model = features
    request = replace(
        images,
        data=loop.data,
        clusters=2 if grows else loop.clusters,  # for a head that the start does not use
        model=model,
        start=images.start if loop.model is not None or model is None else None,
        frozen=True,  # of a pretrained encoder: people wait for a round
        backbone=images.backbone if loop.model is not None or model is None else None,
        out=place,
        settings={"seed": loop.seed, "device": loop.device},
    )
    return request, grows


def _learner(
    loop: Loop, data: Data, start: ClusterModel, store: Store, views: ViewChoice, reporter: Reporter
) -> Learner:
    """Rounds that train the network, or with `frozen` only the head, on what the network makes of the images."""
    if not (loop.frozen or start.is_encoder) or data.images.embedded:  # of embeddings, only a head learns anyway
        learning = _learning(loop, data, cpu=start.device.type == "cpu")
        return Learner(data.images, start, store.answers, loop.out, learning, views=views, held_out=data.held_out)
    look = encode if start.is_encoder else embed_images
    seen = look(start, data.images, reporter=reporter)  # one pass serves all rounds
    learning = _learning(loop, replace(data, images=seen, row=None), cpu=True)  # a head needs no large batches
    whole = partial(attach_head, start)
    return Learner(seen, detach_head(start, seen), store.answers, loop.out, learning, whole=whole)


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
