"""The command `annotate`, once its words are read: questions about images on a page, answers from and to files.

Torch is imported only where a network has to look at the images: photographs that are known are asked about at once.
fastapi and uvicorn, which may be missing, are imported only by what needs them.
"""

import json
import logging
import shlex
import socket
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch._internal.files import check_target, write_atomically
from constraintmatch._internal.progress import QUIET, Reporter, Watched, watched
from constraintmatch.annotate.database import names_in
from constraintmatch.annotate.import_export import (
    check_file,
    export_pairs,
    import_answers,
    open_answers,
    open_model,
    read_answers,
    write_tasks,
)
from constraintmatch.annotate.question_queue import Chooser, Line, QuestionQueue
from constraintmatch.annotate.store import Store
from constraintmatch.annotate.thumbnails import pixel_belief
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.decoding import is_photo
from constraintmatch.data.image_set import ImageSet
from constraintmatch.pipeline.photos import begin_with, embedded_photos, first_photos, known_photos, size_of
from constraintmatch.pipeline.sources import Data, open_at, read_pairs
from constraintmatch.questions.answers import Question
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.next_question import Choice, Kind

if TYPE_CHECKING:  # torch
    from constraintmatch.annotate.background_training import Learner

log = logging.getLogger(__name__)
Finish = Callable[..., tuple[Data, NDArray[np.float32]]]  # opens all photographs, with progress
_FIRST_QUESTION = "first-question.npz"  # in a loop folder
TASKS = 100  # questions for another tool at a time
LONGEST_STEP = 10.0  # seconds that the end of a page waits for the encoder
Rows = list[tuple[str, str]]  # of a table: what was answered, and what to do next
Close = Callable[[QuestionQueue], Rows]
GoOn = Callable[[QuestionQueue], tuple["Learner | None", Close]]


@dataclass(frozen=True)
class Sitting:
    """What is asked about, and where the answers go."""

    data: str
    db: Path
    model: Path | None = None
    kind: Kind = "which"
    choose: Choice = "recommended"
    seed: int = 0
    split: str | None = None
    data_dir: Path | None = None
    strict: bool = False
    device: str | None = None
    pictures: Path | None = None
    again: Path | None = None  # a pairs file whose pairs are asked first


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
        whole = sitting.strict or sitting.again is not None  # which look at all images first
        data, believe, finish = _open(sitting, reporter, in_parts=not whole)
        data.images.to_look_at()
        again = None if sitting.again is None else read_pairs(sitting.again, data.images).merged()
        with open_answers(sitting.db, data, reporter) as store:
            if again is not None and len(again):
                pairs = zip(again.left.tolist(), again.right.tolist(), strict=True)
                questions = (Question(left, (right,)) for left, right in pairs)
                n = store.add_questions(questions, model=str(sitting.again), urgent=True)
                asked = f"{n:,} of the {len(again):,} pairs of {sitting.again} are asked first"
                reporter.say(f"{asked}; the others have answers already")
            late = Late(believe())
            if finish is not None:
                late.progress, late.patience = Watched(reporter), 0.0
                late.go_on = partial(_open_rest, late, late.progress, finish)
            late.close = lambda _: _next_steps(sitting, store, late.noted)
            chooser = Chooser(kind=sitting.kind, choose=sitting.choose, seed=sitting.seed)
            name = None if sitting.model is None else str(sitting.model)
            queue = QuestionQueue(store, late.belief, chooser, lambda: name)
            try:
                serve(sock, door, reporter, data, queue, late.activity, late.begin)
            finally:
                rows = late.end(queue, LONGEST_STEP)
            return rows


def export_answers(sitting: Sitting, out: Path, reporter: Reporter = QUIET) -> str:
    """Write the answers as a pairs file, also while a server runs; an existing file is replaced."""
    check_target(out)
    data = open_images(sitting, reporter)
    with open_answers(sitting.db, data, read_only=True) as store:
        return export_pairs(store, out)


def import_file(sitting: Sitting, file: Path, reporter: Reporter = QUIET, **how: str | None) -> str:
    """Take the answers of a pairs file, or of Label Studio's export (.json), into the database (see `read_answers`)."""
    check_file(file, **how)
    check_target(sitting.db)
    data = open_images(sitting, reporter)
    given, n_left_out = read_answers(file, data.images.names, **how)
    with open_answers(sitting.db, data, reporter) as store:
        return import_answers(store, given, n_left_out)


def export_tasks(sitting: Sitting, out: Path, reporter: Reporter = QUIET) -> str:
    """Write the next questions as tasks for Label Studio; a sentence with their number comes back."""
    check_target(out)
    data, believe, _ = _open(sitting, reporter)
    if data.files is None:
        raise InputError(f"{sitting.data}: has no image files that Label Studio could show; give a folder")
    answers = []
    if sitting.db.exists():
        with open_answers(sitting.db, data, read_only=True) as store:
            answers = store.answers()
    belief = believe()
    chooser, questions = Chooser("pair", sitting.choose, sitting.seed), list[Question]()
    while found := chooser.next(belief, answers, TASKS - len(questions), questions):  # a warm-up gives few at a time
        questions += found
    write_tasks(out, data.images.names, questions)
    return f"{len(questions):,} questions"


def open_images(sitting: Sitting, reporter: Reporter) -> Data:
    """The images, at the size of the model if there is a model."""
    is_dataset, size = sitting.data in DATASETS, None
    if sitting.split is not None and not is_dataset:
        raise InputError(f"--split {sitting.split} goes with a data set ({', '.join(DATASETS)}), not with a folder")
    if sitting.model is not None and not is_dataset:
        config = open_model(sitting.model).config
        size = config.side, config.channels
    how = {name: getattr(sitting, name) for name in ("split", "data_dir", "strict", "pictures")}
    return check_number(sitting, open_at(sitting.data, size, "train", reporter=reporter, **how))


def check_number(sitting: Sitting, data: Data) -> Data:
    """The images, if there are enough to ask about."""
    if len(data.images) < 2:
        raise InputError(f"{sitting.data}: has only one image; questions need two or more")
    return data


def _open(
    sitting: Sitting, reporter: Reporter, *, in_parts: bool = False
) -> tuple[Data, Callable[[], Belief], Finish | None]:
    """The images, and a function that makes the belief, which may take long; all else is checked at once.

    With `in_parts` these are the first of a large folder of photographs, and a function that opens all comes too.
    """
    folder = sitting.model is None and sitting.split is None and sitting.pictures is None
    if folder and sitting.data not in DATASETS and is_photo(*size_of(sitting.data)):
        found = known_photos(sitting.data, reporter=reporter, strict=sitting.strict)
        if found is None:
            from constraintmatch.pipeline.embedding import choose_encoder, encode, open_photos

            model = choose_encoder(sitting.data, say=reporter.say)
            if model is not None:
                finish = partial(open_photos, model, sitting.data, strict=sitting.strict)
                size = model.config.side, model.config.channels
                if in_parts and (first := first_photos(sitting.data, size, names_in(sitting.db))) is not None:
                    seen = encode(model, first.images, reporter=reporter)
                    return first, partial(Belief.of, seen.images[:, 0, 0]), finish
                found = finish(reporter=reporter)
        if found is not None:
            return check_number(sitting, found[0]), partial(Belief.of, found[1]), None
    data = open_images(sitting, reporter)
    return data, _believer(sitting, data.images, reporter), None


def _open_rest(late: "Late", progress: Watched, finish: Finish, queue: QuestionQueue) -> tuple[None, Close]:
    """Open all photographs of a large folder; the page goes on with them, or with the first ones if that fails."""
    try:
        data, features = finish(reporter=progress)
        images, order = begin_with(queue.store.images, data.images)
        belief = Belief.of(features[order])
        queue.store.change_images(images)
        late.noted, late.progress = belief, None
        progress.say(f"all {len(images):,} images are embedded: questions are about all of them")
    except Exception as error:
        log.debug("the rest was not opened", exc_info=True)
        late.problem = f"the other photographs are left out ({one_line(error)})"
        progress.say(late.problem)
    return None, late.close


def _believer(sitting: Sitting, images: ImageSet, reporter: Reporter) -> Callable[[], Belief]:
    if sitting.model is None:
        what = "the embeddings" if images.embedded else "the pixels"
        reporter.say(f"no model: questions are chosen by {what} (--model asks better ones)")
        return lambda: pixel_belief(images)
    from constraintmatch.questions.rounds import image_belief
    from constraintmatch.training.loop import choose_device

    model, device = open_model(sitting.model, (images.side, images.channels)), choose_device(sitting.device)

    def look() -> Belief:
        with watched(reporter, "looking at the images", len(images)) as progress:
            return image_belief(model, images, device=device, progress=progress)

    return look


# A loop whose first question comes before its learner


def note_loop(
    out: Path, words: str, encoder: list[Any], chooser: dict[str, Any], probabilities: NDArray[np.float32] | None
) -> None:
    """Note what the first question of a loop needs: its words, side, channels and digest of the encoder, its belief."""
    arrays: dict[str, Any] = {"note": json.dumps({"words": words, "encoder": encoder, "chooser": chooser})}
    if probabilities is not None:
        arrays["probabilities"] = probabilities
    write_atomically(out / _FIRST_QUESTION, lambda temporary: np.savez(temporary, **arrays))


def serve_known_loop(
    data: str, out: Path, words: str, door: Door, reporter: Reporter, go_on: Callable[..., Any]
) -> Rows | None:
    """Serve the page of a loop that was begun with the same words, until Ctrl-C; None, at once, if it is not known.

    `go_on(store, images)` opens the loop in a thread, when the first question is on the screen; it gives the learner
    and a function that ends the loop.
    """
    try:
        with np.load(out / _FIRST_QUESTION) as kept:
            note, shares = json.loads(str(kept["note"])), kept.get("probabilities")
        *size, digest = note["encoder"] if note["words"] == words else (0, 0, "")
        found = embedded_photos(data, size, digest, reporter=reporter) if digest else None
    except (OSError, ValueError, KeyError, TypeError, BadZipFile):
        return None
    if found is None or (shares is not None and len(shares) != len(found[1])):
        return None
    opened, belief, chooser = found[0], Belief.of(found[1], shares), Chooser(**note["chooser"])
    with open_port(door) as sock, open_answers(out / "answers.db", opened, reporter, flag="--out") as store:
        late = Late(belief, lambda _: go_on(store, opened.images))
        queue = QuestionQueue(store, late.belief, chooser, late.name)
        serve(sock, door, reporter, opened, queue, late.activity, late.begin)
        return late.end(queue)


class Late:
    """What is noted of the images, until a thread has found more: a learner, or the other photographs.

    `go_on(queue)` runs in the thread, once the first question is handed out, or after `patience` seconds. It gives the
    learner, if there is one, and a function that ends the work. If it embeds photographs, `progress` hears how far it
    is, and an end interrupts it. `order` then has the rows that the images of the page have among those of the learner.
    """

    def __init__(self, noted: Belief, go_on: GoOn | None = None, progress: Watched | None = None) -> None:
        self.noted, self.go_on, self.progress, self.patience = noted, go_on, progress, 10.0
        self.learner: Learner | None = None
        self.order: NDArray[np.int64] | None = None
        self.problem: str | None = None
        self.close: Close = lambda _: []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._known: tuple[Belief, Belief] = noted, noted  # of the learner, and in the order of the page

    def belief(self) -> Belief:
        """What the learner knows of the images, or what is noted of them."""
        if self.learner is None:
            return self.noted
        own = self.learner.belief()
        if self.order is None:
            return own
        if own is not self._known[0]:
            shares = own.probabilities
            self._known = own, Belief(own.features[self.order], None if shares is None else shares[self.order])
        return self._known[1]

    def name(self) -> str:
        """The name of the newest model."""
        return "start" if self.learner is None else self.learner.name()

    def activity(self) -> str | None:
        """A line about the thread or the training, or why there is none."""
        if self.problem is not None:
            return self.problem
        if self.learner is not None:
            return self.learner.activity()
        if (now := self.progress) is None:
            return None
        until = f"questions are about {len(self.noted):,} until then"
        return f"{now.title or 'opening all images'}, {now.done:,} of {now.total:,}; {until}"

    def begin(self, queue: QuestionQueue) -> None:
        """Start the thread, if there is something to do."""
        if self.go_on is not None:
            self._thread = threading.Thread(target=self._run, args=(queue, self.go_on), name="late", daemon=True)
            self._thread.start()

    def _run(self, queue: QuestionQueue, go_on: GoOn) -> None:
        queue.asked.wait(self.patience)  # the first question before the network
        try:
            self.learner, self.close = go_on(queue)
            queue.wake()
        except KeyboardInterrupt:  # of `end`
            return
        except Exception as error:
            self._error, self.problem = error, one_line(error)

    def end(self, queue: QuestionQueue, seconds: float | None = None) -> Rows:
        """What the end says, after a wait for the thread's current step; an error of the thread is raised here."""
        if self.progress is not None:
            self.progress.ended = True
        if self._thread is not None:
            self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return self.close(queue)


def _next_steps(sitting: Sitting, store: Store, belief: Belief) -> Rows:
    """Where the answers are and what to do with them."""
    counts, quoted = store.counts(), shlex.quote(sitting.data)
    linked, triplets = counts["same"] + counts["different"], counts["nearer"]
    names = ("same", "different", *(("nearer",) if triplets else ()), "unsure")
    kinds = ", ".join(f"{counts[name]:,} {name}" for name in names)
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
    start = f"--pairs pairs-triplets.csv {start}" if linked and triplets else start
    return [*rows, ("pairs", export), ("then", f"constraintmatch train {quoted} --pairs pairs.csv {start}")]


def open_port(door: Door) -> socket.socket:
    """The socket of the door, before anything else is done: a port in use shows at once."""
    if not all(find_spec(name) for name in ("fastapi", "uvicorn")):
        raise InputError("the page needs fastapi and uvicorn; install them: pip install 'constraintmatch[web]'")
    from constraintmatch.annotate.server import listen

    return listen(door.host, door.port)


def serve(
    sock: socket.socket,
    door: Door,
    reporter: Reporter,
    data: Data,
    queue: QuestionQueue,
    activity: Line,
    begin: Callable[[QuestionQueue], object] = lambda _: None,
) -> None:
    """Serve the page over these images and questions on the socket until Ctrl-C; `begin` is called first."""
    from constraintmatch.annotate import server
    from constraintmatch.annotate.api import Page, create_app

    rules = server.rules_for(door.host, sock.getsockname()[1], door.token)
    place = server.address(sock, door.host, rules.token)
    reporter.say(f"the page is at {place} (Ctrl-C ends; every answer is saved at once)")
    if not server.is_loopback(door.host):
        reporter.say("everybody with this address can see the images and answer; share it with care")
    if door.browse:  # the socket listens already, so the browser waits; some browsers block the call that opens them
        threading.Thread(target=webbrowser.open, args=(place,), daemon=True).start()
    page = Page(queue, data.files, str(data.record["name"]), activity)
    begin(queue)
    server.run_app(create_app(page, rules), sock)
