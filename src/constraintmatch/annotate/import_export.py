"""Answers from and to files: the pairs file both ways, annotations and tasks of Label Studio, tags of FiftyOne.

Label Studio's JSON has tasks with `data` and `annotations`, each with the `result` of its controls. Images are
references (an upload, a local file, a bucket, a web address), found by file name. FiftyOne's CSV has a row for each
image: `filepath` and `tags`. It reads clusters.csv as it is.
"""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, takewhile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_errors, read_json, write_json
from constraintmatch._internal.progress import QUIET, Reporter
from constraintmatch.annotate.database import Given, annotator_name
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_files import SUFFIXES
from constraintmatch.data.image_set import kind_of
from constraintmatch.pipeline.sources import Data
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question, constraints_of, triplets_of

if TYPE_CHECKING:  # torch
    from constraintmatch.models.cluster_model import ClusterModel

_SAME = "same, same kind, same class, match, similar, yes, true, must-link"
_DIFFERENT = "different, different kind, different class, no match, not similar, dissimilar, not the same, not same"
_DIFFERENT += ", no, false, cannot-link"
_UNSURE = "unsure, not sure, unclear, unknown, don't know, cannot tell, can't tell, skip, maybe"

Meaning = Callable[[str], int | None]
Annotation = tuple[list[str], dict[str, Any]]  # the words of its choices; annotator, time and milliseconds


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


# The pairs file


def export_pairs(store: Store, path: Path | str) -> str:
    """Write what the answers say as a pairs file, with annotator and time; a sentence with the counts comes back.

    A "which of these?" answer makes a pair for each image shown, except for those that other answers join to the chosen
    one. Contradictions are written too: training decides what to do with them. Triplets go to a file next to it,
    pairs-triplets.csv, or to this one if there are no pairs.
    """
    rows = [row for row in store.rows() if not row.withdrawn]
    here = [(row, row.answer) for row in rows if row.answer is not None]
    sure = [(row, answer) for row, answer in here if answer.choice != UNSURE]
    answers = [answer for _, answer in sure]
    source = [row for row, answer in sure if not answer.question.nearer for _ in answer.question.shown]
    pairs = constraints_of(
        answers,
        len(store.images),
        weight=[row.weight for row in source],
        annotator=[row.annotator for row in source],
        time=[row.time for row in source],
    )
    weights = np.array([row.weight for row, answer in sure if answer.question.nearer], np.float32)
    triplets = replace(triplets_of(answers), weight=weights)
    replace(pairs, triplets=triplets).write(path, names=store.images.names)
    without = _count([(len(here) - len(sure), "unsure"), (len(rows) - len(here), "set aside")])
    found = _count([(len(pairs), "pairs"), (len(triplets), "triplets")]) or "0 pairs"
    return f"{found} from {len(sure):,} answers" + (f" (left out: {without})" if without else "")


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
    if check_file(path, **how):
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


def check_file(path: Path, columns: str | None = None, same: str | None = None, different: str | None = None) -> bool:
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


# FiftyOne


def has_tags(path: Path) -> bool:
    """Whether a file is a table of images with a column `tags`."""
    if path.suffix.lower() != ".csv":
        return False
    with read_errors(path), path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return "tags" in next(csv.reader([file.readline(10_000)]), [])


def read_tags(path: Path, names: Sequence[str]) -> tuple[list[Given], int]:
    """Images with the same tag are the same, others differ; and how many images have no tag."""
    tagged, finder = defaultdict[str, list[int]](list), _Finder(names)
    n_without = 0
    with read_errors(path), path.open(encoding="utf-8-sig", newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            place = f"{path} line {line}"
            tags = [tag for tag in (row["tags"] or "").split(",") if tag.strip()]
            image = row.get("filepath") or row.get("name")
            if image is None:
                raise InputError("names no image", place, "export the fields filepath and tags")
            if len(tags) > 1:
                raise InputError(f"has the tags {', '.join(tags[:4])}", place, "leave one tag on an image, its kind")
            n_without += not tags
            for tag in tags:
                tagged[tag.strip()].append(finder.row(image, place))
    firsts = [min(rows) for rows in tagged.values()]
    same = [(row, min(rows), 0) for rows in tagged.values() for row in sorted(set(rows)) if row != min(rows)]
    apart = [(one, other, NONE) for one, other in combinations(firsts, 2) if one != other]
    said = [Answer(Question(one, (other,)), choice) for one, other, choice in same + apart]
    return [Given(answer, "tags", origin=path.name) for answer in said], n_without


# Label Studio


def write_tasks(path: Path, names: Sequence[str], questions: Sequence[Question]) -> None:
    """Questions about two images as tasks for Label Studio, which finds the images below its root for local files."""
    place = "/data/local-files/?d="
    pairs = [(place + quote(names[one.image]), place + quote(names[one.shown[0]])) for one in questions]
    write_json(path, [{"data": {"left": left, "right": right}} for left, right in pairs])


def read_label_studio(path: Path, names: Sequence[str], meaning: Meaning) -> tuple[list[Given], int]:
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


def meanings(same: str | None, different: str | None) -> Meaning:
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
    return words, _circumstances(annotation)


def _words(value: Any) -> list[str]:
    choices = value.get("choices", []) if isinstance(value, dict) else value
    listed = choices if isinstance(choices, list) else [choices]
    return [word for word in listed if isinstance(word, str) and word.strip()]


def _circumstances(annotation: Mapping[str, Any]) -> dict[str, Any]:
    """Annotator, time and milliseconds. Users are numbers, addresses, or records of both."""
    who, seconds, created = (annotation.get(name) for name in ("completed_by", "lead_time", "created_at"))
    if isinstance(who, dict):
        names = f"{who.get('first_name') or ''} {who.get('last_name') or ''}".strip()
        who = who.get("email") or names or who.get("id")
    if not isinstance(who, str) or not who.strip():
        who = f"Label Studio user {who}" if isinstance(who, int) else "Label Studio"
    spent = int(1000 * seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else None
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

    def two_images(self, data: Mapping[str, Any]) -> tuple[int, int]:
        """The rows of the two images in the data of a task, in the order of its fields."""
        values = [value for entry in data.values() for value in (entry if isinstance(entry, list) else [entry])]
        texts = [value for value in values if isinstance(value, str)]
        found = [text for text in texts if text in self.exact or PurePosixPath(_path(text)).suffix.lower() in SUFFIXES]
        if len(found) != 2:
            raise InputError(f"its data names {len(found)} images, not two; export the project that compares two")
        return self.row(found[0]), self.row(found[1])

    def row(self, reference: str, place: str = "") -> int:
        """The image that a reference means: by name, else by file name and as many folders above it as agree."""
        path = _path(reference)
        for name in (reference, path):
            if name in self.exact:
                return self.exact[name]
        file = PurePosixPath(path).name
        original = re.sub(r"[0-9a-f]{8}-", "", file, count=1)  # Label Studio puts this before the name of an upload
        rows = self.by_file.get(file) or self.by_file.get(original) or []
        if not rows:
            raise InputError(f"no image is named {file!r} (the set has {len(self.names):,} images)", place)
        shared = [_n_shared(path, self.names[row]) for row in rows]
        best = [row for row, n in zip(rows, shared, strict=True) if n == max(shared)]
        if len(best) > 1:
            several = f"{self.names[best[0]]} or {self.names[best[1]]}" + (" or another" if len(best) > 2 else "")
            fix = "give the files different names, or write a pairs file"
            raise InputError(f"{file} could be {several}", place, fix)
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
