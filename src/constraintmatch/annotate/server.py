"""The command `annotate`: images, model, database and port are opened and checked, and the page is served.

fastapi and uvicorn are imported only when a page is served: import and export work without them.
"""

from __future__ import annotations

import errno
import logging
import shlex
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import Quiet, Reporter, watched
from constraintmatch.annotate.import_export import (
    Exported,
    Imported,
    export_pairs,
    import_answers,
    is_label_studio,
    read_answers,
)
from constraintmatch.annotate.question_queue import Chooser, QuestionQueue, pixel_belief
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.image_set import kind_of
from constraintmatch.pipeline.sources import Data, open_at, read_pairs
from constraintmatch.questions.next_question import Belief, Choice, Kind, Question
from constraintmatch.questions.rounds import image_belief

if TYPE_CHECKING:
    from constraintmatch.data.image_set import ImageSet
    from constraintmatch.models.cluster_model import ClusterModel

__all__ = [
    "Door",
    "Sitting",
    "address",
    "export_answers",
    "import_file",
    "listen",
    "open_model",
    "open_port",
    "serve_app",
    "serve_page",
]


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


def serve_page(sitting: Sitting, door: Door, reporter: Reporter | None = None) -> list[tuple[str, str]]:
    """Serve the page until Ctrl-C; what was answered and what to do next, as rows of a table."""
    reporter = reporter or Quiet()
    with open_port(door) as sock:
        check_target(sitting.db)
        data = _open_images(sitting, reporter)
        data.images.to_look_at()
        again = [] if sitting.again is None else _questions_of(sitting.again, data.images)
        believe = _believer(sitting, data.images, reporter)
        with _open_answers(sitting, data, reporter) as store:
            if again:
                n = store.add_questions(again, model=str(sitting.again), urgent=True)
                asked = f"{n:,} of the {len(again):,} pairs of {sitting.again} are asked first"
                reporter.say(f"{asked}; the others have answers already")
            belief = believe()
            chooser = Chooser(kind=sitting.kind, choose=sitting.choose, seed=sitting.seed)
            name = None if sitting.model is None else str(sitting.model)
            serve_app(sock, door, reporter, data, QuestionQueue(store, lambda: belief, chooser, lambda: name))
            return _next_steps(sitting, store, belief)


def export_answers(sitting: Sitting, out: Path, reporter: Reporter | None = None) -> Exported:
    """Write the answers as a pairs file, also while a server runs; an existing file is replaced."""
    check_target(out)
    data = _open_images(sitting, reporter or Quiet())
    with _open_answers(sitting, data, read_only=True) as store:
        return export_pairs(store, out)


def import_file(
    sitting: Sitting,
    file: Path,
    reporter: Reporter | None = None,
    *,
    columns: str | None = None,
    same: str | None = None,
    different: str | None = None,
) -> Imported:
    """Take the answers of a pairs file, or of Label Studio's export (.json), into the database (see `read_answers`)."""
    reporter = reporter or Quiet()
    if file.is_dir():
        raise InputError(f"{file}: is a folder; name a pairs file or Label Studio's export (.json)")
    if not file.is_file():
        raise InputError(f"{file}: no such file; check the name")
    if not is_label_studio(file) and (same is not None or different is not None):
        raise InputError(f"--same and --different go with an export of Label Studio (.json), not with {file}")
    if is_label_studio(file) and columns is not None:
        raise InputError(f"--columns goes with a pairs file, not with {file}; leave it out")
    check_target(sitting.db)
    data = _open_images(sitting, reporter)
    given, n_left_out = read_answers(file, data.images.names, columns=columns, same=same, different=different)
    with _open_answers(sitting, data, reporter) as store:
        return import_answers(store, given, n_left_out)


def _questions_of(file: Path, images: ImageSet) -> list[Question]:
    """The pairs of a file as questions: same or different?"""
    pairs = read_pairs(file, images).merged()
    return [Question(left, (right,)) for left, right in zip(pairs.left.tolist(), pairs.right.tolist(), strict=True)]


@contextmanager
def _open_answers(
    sitting: Sitting, data: Data, reporter: Reporter | None = None, *, read_only: bool = False
) -> Iterator[Store]:
    """The database, made if needed. It is opened last, so that a refused command leaves none."""
    source, pictures = data.record["source"], data.record.get("pictures", "")
    with open_store(sitting.db, data.images, source=source, pictures=pictures, read_only=read_only) as store:
        if store.notice and reporter is not None:
            reporter.say(store.notice)
        yield store


def _open_images(sitting: Sitting, reporter: Reporter) -> Data:
    """The images, at the size of the model if there is a model."""
    is_dataset, size = sitting.data in DATASETS, None
    if sitting.split is not None and not is_dataset:
        raise InputError(f"--split {sitting.split} goes with a data set ({', '.join(DATASETS)}), not with a folder")
    if sitting.model is not None and not is_dataset:
        config = open_model(sitting.model).config
        size = config.side, config.channels
    data = open_at(
        sitting.data,
        size,
        "train",
        split=sitting.split,
        data_dir=sitting.data_dir,
        strict=sitting.strict,
        pictures=sitting.pictures,
        reporter=reporter,
    )
    if len(data.images) < 2:
        raise InputError(f"{sitting.data}: has only one image; questions need two or more")
    return data


def open_model(path: Path | str, size: tuple[int, int] | None = None) -> ClusterModel:
    """The model of a model or run folder; with a size (side, channels), only if it takes such images."""
    from constraintmatch.models.cluster_model import load_model

    model = load_model(path)
    takes = model.config.side, model.config.channels
    if size not in (None, takes):
        raise InputError(
            f"{path}: takes {kind_of(*takes)}, these are {kind_of(*size)}; name a model that was trained on such images"
        )
    return model


def _believer(sitting: Sitting, images: ImageSet, reporter: Reporter) -> Callable[[], Belief]:
    """A function that makes the belief, which may take long; the model and the device are checked at once."""
    if sitting.model is None:
        what = "the embeddings" if images.embedded else "the pixels"
        reporter.say(f"no model: questions are chosen by {what} (--model asks better ones)")
        return lambda: pixel_belief(images)
    from constraintmatch.training.loop import choose_device

    model, device = open_model(sitting.model, (images.side, images.channels)), choose_device(sitting.device)

    def look() -> Belief:
        with watched(reporter, "looking at the images", len(images)) as progress:
            return image_belief(model, images, device=device, progress=progress)

    return look


def _next_steps(sitting: Sitting, store: Store, belief: Belief) -> list[tuple[str, str]]:
    """Where the answers are and what to do with them."""
    counts, quoted = store.counts(), shlex.quote(sitting.data)
    kinds = f"{counts.same:,} same, {counts.different:,} different, {counts.unsure:,} unsure"
    rows = [("answers", f"{sitting.db} ({counts.answered:,}: {kinds})")]
    if n := store.n_contradictions():
        rows.append(("contradictions", f"{n:,}; settle them on the page, or train leaves some of them out"))
    if not counts.answered:
        return rows
    split = "" if sitting.split is None else f" --split {sitting.split}"
    split += "" if sitting.pictures is None else f" --pictures {shlex.quote(str(sitting.pictures))}"
    export = f"constraintmatch annotate {quoted}{split} --db {shlex.quote(str(sitting.db))} --export pairs.csv"
    has_clusters = belief.probabilities is not None and sitting.model is not None
    start = f"--model {shlex.quote(str(sitting.model))}" if has_clusters else "--clusters K"
    return [*rows, ("pairs", export), ("then", f"constraintmatch train {quoted} --pairs pairs.csv {start}")]


# The port and the server


def open_port(door: Door) -> socket.socket:
    """The socket of the door, before anything else is done: a port in use shows at once."""
    if not all(find_spec(name) for name in ("fastapi", "uvicorn")):
        raise InputError("the page needs fastapi and uvicorn; install them: pip install 'constraintmatch[web]'")
    return listen(door.host, door.port)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; a port in use, forbidden or of another machine is an InputError with the fix."""
    if not 0 <= port <= 65_535:
        raise InputError(f"--port {port}: ports go from 1 to 65,535 (0: any free one)")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise InputError(f"--host {host}: no such host; use 127.0.0.1 (this machine) or 0.0.0.0 (all)") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise InputError(_why_not(host, port, error)) from None
    return sock


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; stop what uses it or choose another, for example --port {_free_port(host)}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} needs more rights than you have; choose one above 1,023, for example --port 8765"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: not an address of this machine; use 127.0.0.1 or 0.0.0.0"
    return f"--host {host} --port {port}: cannot listen there ({error.strerror}); choose another"


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def address(sock: socket.socket, host: str, token: str | None = None) -> str:
    """The address to open in the browser; for a server on all addresses, with the name of this machine."""
    port = sock.getsockname()[1]
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={quote(token)}" if token else "")


def serve_app(
    sock: socket.socket,
    door: Door,
    reporter: Reporter,
    data: Data,
    queue: QuestionQueue,
    activity: Callable[[], str | None] = lambda: None,
) -> None:
    """Serve the page over these images and questions on the socket until Ctrl-C."""
    from constraintmatch.annotate.api import create_app
    from constraintmatch.annotate.security import is_loopback, rules_for

    rules = rules_for(door.host, sock.getsockname()[1], door.token)
    place = address(sock, door.host, rules.token)
    reporter.say(f"the page is at {place} (Ctrl-C ends; every answer is saved at once)")
    if not is_loopback(door.host):
        reporter.say("everybody with this address can see the images and answer; share it with care")
    if door.browse:  # the socket listens already, so the browser waits; some browsers block the call that opens them
        threading.Thread(target=webbrowser.open, args=(place,), daemon=True).start()
    source = str(data.record["name"])
    app = create_app(data.images, queue, folder=data.files, source=source, activity=activity, rules=rules)
    _run(app, sock)


def _run(app: Any, sock: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM, and return."""
    import uvicorn

    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=3, lifespan="on", ws="none", **quiet))

    def stop(_number: int, _frame: Any) -> None:
        server.force_exit = server.should_exit  # the second Ctrl-C does not wait
        server.should_exit = True
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # requests that are cut short need no message

    server.handle_exit = stop  # type: ignore[method-assign,assignment]  # uvicorn's own raises it again at the end
    server.run(sockets=[sock])
