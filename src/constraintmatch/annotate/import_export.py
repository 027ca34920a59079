"""Answers from and to files: the pairs file both ways, and Label Studio's export of a choice about two images.

Label Studio's JSON has tasks with `data` and `annotations`, each with the `result` of its controls. Images are
references (an upload, a local file, a bucket, a web address), found by file name.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target, read_json
from constraintmatch._internal.progress import QUIET, Reporter
from constraintmatch.annotate.database import Given
from constraintmatch.annotate.store import Store, annotator_name, open_store
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.decoding import SUFFIXES
from constraintmatch.data.image_set import kind_of
from constraintmatch.pipeline.sources import Data, open_at
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question, links_of
from constraintmatch.questions.next_question import Choice, Kind

if TYPE_CHECKING:  # torch
    from constraintmatch.models.cluster_model import ClusterModel

_SAME = "same, same kind, same class, match, similar, yes, true, must-link"
_DIFFERENT = "different, different kind, different class, no match, not similar, dissimilar, not the same, not same"
_DIFFERENT += ", no, false, cannot-link"
_UNSURE = "unsure, not sure, unclear, unknown, don't know, cannot tell, can't tell, skip, maybe"

Meaning = Callable[[str], int | None]
Annotation = tuple[list[str], dict[str, Any]]  # the words of its choices; annotator, time and milliseconds


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
    data = open_at(sitting.data, size, "train", reporter=reporter, **how)
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
    one. Contradictions are written too: training decides what to do with them.
    """
    rows = [row for row in store.rows() if not row.withdrawn]
    here = [(row, row.answer) for row in rows if row.answer is not None]
    sure = [(row, answer) for row, answer in here if answer.choice != UNSURE]
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
    pairs.write(path, names=store.image_names)
    without = _count([(len(here) - len(sure), "unsure"), (len(rows) - len(here), "set aside")])
    return f"{len(pairs):,} pairs from {len(sure):,} answers" + (f" (left out: {without})" if without else "")


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

    A file that ends in .json is an export of Label Studio, any other a pairs file. `columns` names those of a pairs
    file; `same` and `different` are the choices in an export that does not use the usual words. Bad input is refused
    here, before a database is made.
    """
    if _check_file(path, **how):
        given, n_left_out = _read_label_studio(path, names, _meanings(how.get("same"), how.get("different")))
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
    """Pairs as answers to pair questions; those with a link in between or with weight 0 are left out."""
    table = Constraints.read(path, names=names, columns=columns)
    numbers = (column.tolist() for column in (table.left, table.right, table.link, table.weight))
    unknown, given = ("",) * len(table.left), list[Given]()
    said = zip(*numbers, table.annotator or unknown, table.time or unknown, strict=True)
    for left, right, link, weight, who, time in said:
        if link in (0, 1) and weight > 0:
            answer = Answer(Question(left, (right,)), 0 if link == 1 else NONE)
            given.append(Given(answer, who.strip() or "unknown", time.strip(), weight=weight, origin=path.name))
    return given, len(table.left) - len(given) + table.ignored_self_links


# Label Studio


def _read_label_studio(path: Path, names: Sequence[str], meaning: Meaning) -> tuple[list[Given], int]:
    """The answers in an export, and how many annotations are skipped or empty; an InputError names its task."""
    content = read_json(path)
    tasks = [content] if isinstance(content, dict) else content  # a bucket holds one file per task
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise InputError(f"{path}: not an export of Label Studio; export the project as JSON")
    finder, given, n_left_out = _Finder(names), list[Given](), 0
    for at, task in enumerate(tasks, start=1):
        try:
            found, skipped = _answers(task, finder, meaning, path.name)
        except InputError as error:
            raise error.at(f"{path} task {task.get('id', at)}") from None
        given += found
        n_left_out += skipped
    return given, n_left_out


def _meanings(same: str | None, different: str | None) -> Meaning:
    """The choice that a word means, None if it is unknown: own words but for case, usual ones by their letters."""
    given = [(word, choice) for word, choice in ((same, 0), (different, NONE)) if word is not None]
    own = {word.strip().casefold(): choice for word, choice in given}
    if len(own) < len(given):
        raise InputError(f"--same and --different are both {same!r}; give the two choices as the export has them")
    all_usual = ((_SAME, 0), (_DIFFERENT, NONE), (_UNSURE, UNSURE))
    usual = {_letters(word): choice for words, choice in all_usual for word in words.split(",")}
    for word in own:  # "yes!" as a word of the user's own leaves open what "yes?" means
        usual.pop(_letters(word), None)
    return lambda word: own.get(word.strip().casefold(), usual.get(_letters(word)))


def _answers(task: Mapping[str, Any], finder: "_Finder", meaning: Meaning, file: str) -> tuple[list[Given], int]:
    """The answers of one task and the number of its annotations that say nothing."""
    data, annotations = task.get("data"), task.get("annotations")
    if not isinstance(data, dict) or not isinstance(annotations, list):
        raise InputError("not a task with its annotations; export the project from Label Studio as JSON, not JSON-MIN")
    read = [_read_annotation(one) for one in annotations]
    said = [one for one in read if one is not None]
    if not said:
        return [], len(read)
    left, right = finder.two_images(data)
    if left == right:
        return [], len(read)
    question = Question(left, (right,))
    given = [Given(Answer(question, _choice(words, meaning)), origin=file, **who) for words, who in said]
    return given, len(read) - len(said)


def _read_annotation(annotation: Any) -> Annotation | None:
    """What an annotation says; None if it was skipped or has no choice in it."""
    if not isinstance(annotation, dict):
        raise InputError("an annotation is not an object; export the project again")
    results = annotation.get("result")
    listed = results if isinstance(results, list) else []
    chosen = [one.get("value") for one in listed if isinstance(one, dict) and one.get("type") == "choices"]
    words = [word for value in chosen for word in _words(value)]
    if annotation.get("was_cancelled") or annotation.get("skipped") or not words:
        return None
    return words, _circumstances(annotation, annotation.get("completed_by"))


def _words(value: Any) -> list[str]:
    choices = value.get("choices", []) if isinstance(value, dict) else value
    listed = choices if isinstance(choices, list) else [choices]
    return [word for word in listed if isinstance(word, str) and word.strip()]


def _circumstances(record: Mapping[str, Any], who: Any) -> dict[str, Any]:
    """Annotator, time and milliseconds. Users are numbers, addresses, or records of both."""
    if isinstance(who, dict):
        names = f"{who.get('first_name') or ''} {who.get('last_name') or ''}".strip()
        who = who.get("email") or names or who.get("id")
    if not isinstance(who, str) or not who.strip():
        who = f"Label Studio user {who}" if isinstance(who, int) else "Label Studio"
    seconds, created = record.get("lead_time"), record.get("created_at")
    known = isinstance(seconds, int | float) and math.isfinite(seconds)
    spent = int(1000 * seconds) if seconds is not None and known else None
    return {"annotator": who.strip(), "time": created if isinstance(created, str) else "", "milliseconds": spent}


def _choice(words: Sequence[str], meaning: Meaning) -> int:
    """The one meaning among the words; words without one (of other controls) are ignored."""
    found = {choice for word in words if (choice := meaning(word)) is not None}
    if len(found) == 1:
        return found.pop()
    shown = ", ".join(repr(word[:40]) for word in words[:4])
    if found:
        raise InputError(f"the choices {shown} contradict each other; correct the annotation in Label Studio")
    raise InputError(f"the choice {shown} is not understood; say what it means with --same TEXT and --different TEXT")


def _letters(word: str) -> str:
    return re.sub(r"[\W_]", "", word).casefold()


class _Finder:
    """Finds images by the references of Label Studio."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.exact = names, {name: row for row, name in enumerate(names)}
        self.by_file: defaultdict[str, list[int]] = defaultdict(list)
        for row, name in enumerate(names):
            file = PurePosixPath(name).name
            uploaded = re.sub(r"[^-\w.]", "", file.strip().replace(" ", "_"))  # as Label Studio names an upload
            for known_as in {file, uploaded}:
                self.by_file[known_as].append(row)

    def is_image(self, text: str) -> bool:
        """Whether a text refers to an image, known or not."""
        return text in self.exact or PurePosixPath(_path(text)).suffix.lower() in SUFFIXES

    def two_images(self, data: Mapping[str, Any]) -> tuple[int, int]:
        """The rows of the two images in the data of a task, in the order of its fields."""
        values = [value for entry in data.values() for value in (entry if isinstance(entry, list) else [entry])]
        found = [value for value in values if isinstance(value, str) and self.is_image(value)]
        if len(found) != 2:
            raise InputError(f"its data names {len(found)} images, not two; export the project that compares two")
        return self.row(found[0]), self.row(found[1])

    def row(self, reference: str) -> int:
        """The image that a reference means: by name, else by file name and as many folders above it as agree."""
        path = _path(reference)
        for name in (reference, path):
            if name in self.exact:
                return self.exact[name]
        file = PurePosixPath(path).name
        original = re.sub(r"[0-9a-f]{8}-", "", file, count=1)  # Label Studio puts this before the name of an upload
        rows = self.by_file.get(file) or self.by_file.get(original) or []
        if not rows:
            raise InputError(f"no image is named {file!r} (the set has {len(self.names):,} images)")
        shared = [_n_shared(path, self.names[row]) for row in rows]
        best = [row for row, n in zip(rows, shared, strict=True) if n == max(shared)]
        if len(best) > 1:
            several = f"{self.names[best[0]]} or {self.names[best[1]]}" + (" or another" if len(best) > 2 else "")
            raise InputError(f"{file} could be {several}; give the files different names, or write a pairs file")
        return best[0]


def _path(reference: str) -> str:
    """The path in a reference: …/data/local-files/?d=PATH, https://host/PATH?…, s3://bucket/PATH, a plain path."""
    try:
        parts = urlsplit(reference.strip())
    except ValueError:  # brackets in a plain path
        return reference.strip()
    if parts.path.rstrip("/").endswith("local-files") and (local := parse_qs(parts.query).get("d")):
        return local[0].replace("\\", "/").lstrip("/")
    path = unquote(parts.path) if parts.scheme or parts.path.startswith("/") else reference.strip()
    return path.replace("\\", "/").lstrip("/")


def _n_shared(path: str, name: str) -> int:
    """How many parts of two paths agree, from the end."""
    pairs = zip(reversed(PurePosixPath(path).parts), reversed(PurePosixPath(name).parts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
