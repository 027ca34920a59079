"""One sitting: images, model, database and port opened and checked, the page served, the next step told."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from constraintmatch.annotate.beliefs import open_model, pixel_belief
from constraintmatch.annotate.choosing import Choice, Chooser, Kind
from constraintmatch.annotate.exchange import (
    Exported,
    Imported,
    export_pairs,
    import_answers,
    is_label_studio,
    read_answers,
)
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.datasets import DATASETS
from constraintmatch.errors import InputError
from constraintmatch.files import check_target
from constraintmatch.progress import Quiet, Reporter, watched
from constraintmatch.questions import Belief, Question
from constraintmatch.rounds import image_belief
from constraintmatch.sources import Data, open_at, read_pairs

if TYPE_CHECKING:
    from constraintmatch.images import ImageSet

__all__ = [
    "Door",
    "Sitting",
    "export_answers",
    "following",
    "import_file",
    "listening",
    "serve_app",
    "serve_page",
]

NEEDS = "the page needs fastapi and uvicorn; install them: pip install 'constraintmatch[web]'"


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
    with listening(door) as sock:
        check_target(sitting.db)
        data = _open_images(sitting, reporter)
        data.images.to_look_at()
        again = [] if sitting.again is None else _questions_of(sitting.again, data.images)
        believe = _believer(sitting, data.images, reporter)
        with _opened_store(sitting, data, reporter) as store:
            if again:
                n = store.add_questions(again, model=str(sitting.again), urgent=True)
                reporter.say(
                    f"{n:,} of the {len(again):,} pairs of {sitting.again} are asked first; the others are known"
                )
            belief = believe()
            serve_app(
                sock,
                door,
                reporter,
                images=data.images,
                store=store,
                belief=lambda: belief,
                chooser=Chooser(kind=sitting.kind, choose=sitting.choose, seed=sitting.seed),
                folder=data.files,
                source=str(data.record["name"]),
                model=lambda: None if sitting.model is None else str(sitting.model),
            )
            return following(sitting, store, belief)


def _questions_of(file: Path, images: ImageSet) -> list[Question]:
    """The pairs of a file as questions: same or different?"""
    pairs = read_pairs(file, images).merged()
    return [Question(left, (right,)) for left, right in zip(pairs.left.tolist(), pairs.right.tolist(), strict=True)]


def listening(door: Door) -> socket.socket:
    """The door's socket, before anything else is done: a port in use is said at once."""
    try:
        from constraintmatch.annotate.serving import listen
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn"):
            raise
        raise InputError(NEEDS) from None
    return listen(door.host, door.port)


def serve_app(sock: socket.socket, door: Door, reporter: Reporter, **parts: Any) -> None:
    """Serve the app that these parts make (see `create_app`) on the socket until Ctrl-C."""
    from constraintmatch.annotate.api import create_app
    from constraintmatch.annotate.security import is_loopback, rules_for
    from constraintmatch.annotate.serving import address, serve

    rules = rules_for(door.host, sock.getsockname()[1], door.token)
    place = address(sock, door.host, rules.token)
    reporter.say(f"the page is at {place} (Ctrl-C ends; every answer is saved as it is given)")
    if not is_loopback(door.host):
        reporter.say("whoever has this address can see the images and answer; do not pass it on further than meant")
    serve(create_app(**parts, rules=rules), sock, browse=place if door.browse else None)


def export_answers(sitting: Sitting, out: Path, reporter: Reporter | None = None) -> Exported:
    """Write the answers as a pairs file, also while a server runs; an existing file is replaced."""
    check_target(out)
    data = _open_images(sitting, reporter or Quiet())
    with _opened_store(sitting, data, read_only=True) as store:
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
    """Take the answers of a pairs file, or of Label Studio's export (.json), into the database.

    `columns` names those of the pairs file; `same` and `different` are what the choices are called in that export,
    where they are not the usual words.
    """
    reporter = reporter or Quiet()
    if file.is_dir():
        raise InputError(f"{file}: is a folder; name a pairs file or Label Studio's export (.json)")
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    if not is_label_studio(file) and (same is not None or different is not None):
        raise InputError(f"--same and --different go with an export of Label Studio (.json), not with {file}")
    if is_label_studio(file) and columns is not None:
        raise InputError(f"--columns goes with a pairs file, not with {file}; leave it out")
    check_target(sitting.db)
    data = _open_images(sitting, reporter)
    said = read_answers(file, data.images.names, columns=columns, same=same, different=different)
    with _opened_store(sitting, data, reporter) as store:
        return import_answers(store, said)


@contextmanager
def _opened_store(
    sitting: Sitting, data: Data, reporter: Reporter | None = None, *, read_only: bool = False
) -> Iterator[Store]:
    """The database, made if need be: it is opened last, so that a command which is refused leaves none behind."""
    source, pictures = data.record["source"], data.record.get("pictures", "")
    with open_store(sitting.db, data.images, source=source, pictures=pictures, read_only=read_only) as store:
        if store.notice and reporter is not None:
            reporter.say(store.notice)
        yield store


def _open_images(sitting: Sitting, reporter: Reporter) -> Data:
    """The images, at the model's size where there is a model."""
    is_dataset, size = sitting.data in DATASETS, None
    if sitting.split is not None and not is_dataset:
        raise InputError(f"--split {sitting.split} goes with a data set ({', '.join(DATASETS)}), not with a folder")
    if sitting.model is not None and not is_dataset:
        from constraintmatch.models import load_model

        config = load_model(sitting.model).config
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
        raise InputError(f"{sitting.data}: has one image only; questions need two or more")
    return data


def _believer(sitting: Sitting, images: ImageSet, reporter: Reporter) -> Callable[[], Belief]:
    """What makes the belief, which may take long; the model and the device are checked at once."""
    if sitting.model is None:
        what = "where the embeddings lie" if images.embedded else "what the pixels look like"
        reporter.say(f"no model: questions are chosen by {what} (--model asks better ones)")
        return lambda: pixel_belief(images)
    from constraintmatch.training import choose_device

    model, device = open_model(sitting.model, images), choose_device(sitting.device)

    def look() -> Belief:
        with watched(reporter, "looking at the images", len(images)) as progress:
            return image_belief(model, images, device=device, progress=progress)

    return look


def following(sitting: Sitting, store: Store, belief: Belief) -> list[tuple[str, str]]:
    """Where the answers are and what to do with them."""
    counts, quoted = store.counts(), shlex.quote(sitting.data)
    kinds = (
        f"{counts.same + counts.which:,} same, {counts.different + counts.none:,} different, {counts.unsure:,} unsure"
    )
    rows = [("answers", f"{sitting.db} ({counts.answered:,}: {kinds})")]
    if clashes := store.n_clashes():
        rows.append(("contradictions", f"{clashes:,}; settle them on the page, or train leaves some of them out"))
    if not counts.answered:
        return rows
    split = "" if sitting.split is None else f" --split {sitting.split}"
    split += "" if sitting.pictures is None else f" --pictures {shlex.quote(str(sitting.pictures))}"
    export = f"constraintmatch annotate {quoted}{split} --db {shlex.quote(str(sitting.db))} --export pairs.csv"
    has_clusters = belief.probabilities is not None and sitting.model is not None
    start = f"--model {shlex.quote(str(sitting.model))}" if has_clusters else "--clusters K"
    return [*rows, ("pairs", export), ("then", f"constraintmatch train {quoted} --pairs pairs.csv {start}")]
