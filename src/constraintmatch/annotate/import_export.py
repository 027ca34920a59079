"""Answers from and to files: the pairs file both ways, and what other tools write (`other_tools`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import QUIET, Reporter
from constraintmatch.annotate.database import Given, annotator_name
from constraintmatch.annotate.other_tools import has_tags, meanings, read_label_studio, read_tags
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.image_set import kind_of
from constraintmatch.pipeline.sources import Data, open_at
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question, links_of, triplets_of
from constraintmatch.questions.next_question import Choice, Kind

if TYPE_CHECKING:  # torch
    from constraintmatch.models.cluster_model import ClusterModel


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


def export_answers(sitting: Sitting, out: Path, reporter: Reporter = QUIET) -> str:
    """Write the answers as a pairs file, also while a server runs; an existing file is replaced."""
    check_target(out)
    data = open_images(sitting, reporter)
    with open_answers(sitting.db, data, read_only=True) as store:
        return export_pairs(store, out)


def import_file(sitting: Sitting, file: Path, reporter: Reporter = QUIET, **how: str | None) -> str:
    """Take the answers of a pairs file, or of Label Studio's export (.json), into the database (see `read_answers`)."""
    _check_file(file, **how)
    check_target(sitting.db)
    data = open_images(sitting, reporter)
    given, n_left_out = read_answers(file, data.images.names, **how)
    with open_answers(sitting.db, data, reporter) as store:
        return import_answers(store, given, n_left_out)


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


def open_model(path: Path | str, size: tuple[int, int] | None = None) -> "ClusterModel":
    """The model of a model or run folder; with a size (side, channels), only if it takes such images."""
    from constraintmatch.models.cluster_model import load_model

    model = load_model(path)
    takes = model.config.side, model.config.channels
    if size not in (None, takes):
        raise InputError(
            f"{path}: takes {kind_of(*takes)}, these are {kind_of(*size)}; name a model that was trained on such images"
        )
    return model


@contextmanager
def open_answers(
    path: Path, data: Data, reporter: Reporter = QUIET, *, read_only: bool = False, flag: str = "--db"
) -> Iterator[Store]:
    """The database, made if needed. It is opened last, so that a refused command leaves none."""
    source, pictures = data.record["source"], data.record.get("pictures", "")
    with open_store(path, data.images, source=source, pictures=pictures, read_only=read_only, flag=flag) as store:
        if store.notice:
            reporter.say(store.notice)
        yield store


def export_pairs(store: Store, path: Path | str) -> str:
    """Write what the answers say as a pairs file, with annotator and time; a sentence with the counts comes back.

    A "which of these?" answer makes a pair for each image shown, except for those that other answers join to the chosen
    one. Contradictions are written too: training decides what to do with them. Triplets go to a file next to it,
    pairs-triplets.csv, or to this one if there are no pairs.
    """
    rows = [row for row in store.rows() if not row.withdrawn]
    here = [(row, row.answer) for row in rows if row.answer is not None]
    sure = [(row, answer) for row, answer in here if answer.choice != UNSURE]
    triplets = triplets_of(answer for _, answer in sure)
    weights = np.array([row.weight for row, answer in sure if answer.question.nearer], np.float32)
    sure = [(row, answer) for row, answer in sure if not answer.question.nearer]
    source = [row for row, answer in sure for _ in answer.question.shown]
    left, right, link = links_of(answer for _, answer in sure)
    pairs = Constraints.from_arrays(
        left,
        right,
        link,
        n_images=len(store.image_names),
        weight=[row.weight for row in source],
        annotator=[row.annotator for row in source],
        time=[row.time for row in source],
    )
    # who chooses one image does not say that the others shown are different: it only follows if no two are of a kind
    follows = [answer.choice not in (NONE, at) for _, answer in sure for at in range(len(answer.question.shown))]
    component = pairs.components()
    pairs = pairs.take(~(np.array(follows, bool) & (component[left] == component[right])))
    pairs = replace(pairs, triplets=replace(triplets, weight=weights))
    pairs.write(path, names=store.image_names)
    n_sure = len(sure) + len(triplets)
    without = _count([(len(here) - n_sure, "unsure"), (len(rows) - len(here), "set aside")])
    found = _count([(len(pairs), "pairs"), (len(triplets), "triplets")]) or "0 pairs"
    return f"{found} from {n_sure:,} answers" + (f" (left out: {without})" if without else "")


def import_answers(store: Store, given: Sequence[Given], n_left_out: int) -> str:
    """Take the answers of a file into the database, all of them or none; a sentence with the counts comes back."""
    n_new = store.take_in(given)
    more = [
        (len(given) - n_new, "known already"),
        (n_left_out, "left out (skipped, soft or without weight)"),
        (store.n_contradictions(), "contradictions in the store now; settle them on the page"),
    ]
    return ", ".join(filter(None, [f"{n_new:,} answers imported", _count(more)]))


def _count(parts: list[tuple[int, str]]) -> str:
    return ", ".join(f"{n:,} {what}" for n, what in parts if n)


def read_answers(path: Path, names: Sequence[str], **how: str | None) -> tuple[list[Given], int]:
    """The answers of a file about images with these names, and how many entries were left out.

    A file that ends in .json is an export of Label Studio, a .csv with a column `tags` one of FiftyOne, any other a
    pairs file. `columns` names those of a pairs file; `same` and `different` are the choices in an export that does
    not use the usual words. Bad input is refused here, before a database is made.
    """
    if _check_file(path, **how):
        given, n_left_out = read_label_studio(path, names, meanings(how.get("same"), how.get("different")))
    elif how.get("columns") is None and has_tags(path):
        given, n_left_out = read_tags(path, names)
    else:
        given, n_left_out = _read_pairs_file(path, names, how.get("columns"))
    try:
        for one in given:
            annotator_name(one.annotator)
    except InputError as error:
        raise error.at(path) from None
    return given, n_left_out


def _check_file(path: Path, columns: str | None = None, same: str | None = None, different: str | None = None) -> bool:
    """Whether the file is an export of Label Studio; an InputError if there is none or the flags do not fit it."""
    label_studio = path.suffix.lower() == ".json"
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a pairs file or Label Studio's export (.json)")
    if not path.is_file():
        raise InputError(f"{path}: no such file; check the name")
    if not label_studio and (same is not None or different is not None):
        raise InputError(f"--same and --different go with an export of Label Studio (.json), not with {path}")
    if label_studio and columns is not None:
        raise InputError(f"--columns goes with a pairs file, not with {path}; leave it out")
    return label_studio


def _read_pairs_file(path: Path, names: Sequence[str], columns: str | None) -> tuple[list[Given], int]:
    """Pairs and triplets as answers to questions; those with a link in between or with weight 0 are left out."""
    table = Constraints.read(path, names=names, columns=columns)
    if table.sizes is not None:
        raise InputError("has sizes, and the page does not ask for them", path, "give it to train, as --pairs")
    numbers = (column.tolist() for column in (table.left, table.right, table.link, table.weight))
    unknown, triplets = ("",) * len(table.left), table.triplets
    named = zip(triplets.rows.tolist(), triplets.weight.tolist(), strict=True)
    asked = [
        (Question(anchor, (near, far), nearer=True), weight) for (anchor, near, far), weight in named if weight > 0
    ]
    given = [Given(Answer(one, 0), "unknown", weight=weight, origin=path.name) for one, weight in asked]
    said = zip(*numbers, table.annotator or unknown, table.time or unknown, strict=True)
    for left, right, link, weight, who, time in said:
        if link in (0, 1) and weight > 0:
            answer = Answer(Question(left, (right,)), 0 if link == 1 else NONE)
            given.append(Given(answer, who.strip() or "unknown", time.strip(), weight=weight, origin=path.name))
    return given, len(table.left) + len(triplets) - len(given) + table.ignored_self_links
