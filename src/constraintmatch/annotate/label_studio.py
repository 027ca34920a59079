"""Label Studio's export of a choice about two images, in both of its JSON forms, as answers.

JSON: tasks with `data` and `annotations`, each with the `result` of its controls. JSON_MIN: flat tasks, where the
choice stands under the name of its control. Images are references (an upload, a local file, a bucket, a web address),
found by file name.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from constraintmatch.annotate.records import Given
from constraintmatch.answers import NONE, UNSURE, Answer, Question
from constraintmatch.decoding import SUFFIXES
from constraintmatch.errors import InputError
from constraintmatch.files import read_json

__all__ = ["read_label_studio"]

_SAME = "same, same kind, same class, match, similar, yes, true, must-link"
_DIFFERENT = "different, different kind, different class, no match, not similar, dissimilar, not the same, not same"
_DIFFERENT += ", no, false, cannot-link"
_UNSURE = "unsure, not sure, unclear, unknown, don't know, cannot tell, can't tell, skip, maybe"
_UPLOAD = re.compile(r"[0-9a-f]{8}-")  # Label Studio puts this before the name of an uploaded file
_ABOUT_THE_ANNOTATION = {"id", "annotator", "annotation_id", "created_at", "updated_at", "lead_time"}


@dataclass(frozen=True)
class _Spoken:
    """One annotation: the words of its choices, and who said them when."""

    words: tuple[str, ...]
    annotator: str
    time: str
    milliseconds: int | None


def read_label_studio(
    path: Path | str, names: Sequence[str], *, same: str | None = None, different: str | None = None
) -> tuple[list[Given], int]:
    """The answers in an export, and how many annotations were left out because they are skipped or empty.

    `names` are the images' names. Words that are not understood, images that are not found or could be several, and
    tasks without two images are an InputError that names the task.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name the file of Label Studio's JSON export")
    meanings, finder = _Meanings(same, different), _Finder(names)
    given: list[Given] = []
    n_left_out = 0
    for place, task in _tasks(path):
        try:
            found, skipped = _answers(task, finder, meanings)
        except InputError as error:
            raise InputError(f"{path} {place}: {error}") from None
        given += found
        n_left_out += skipped
    return given, n_left_out


class _Meanings:
    """What the words of choices mean: those told as they stand but for case, the usual ones by their letters."""

    def __init__(self, same: str | None, different: str | None) -> None:
        told = [(word, choice) for word, choice in ((same, 0), (different, NONE)) if word is not None]
        self.told = {_stripped(word): choice for word, choice in told}
        if len(self.told) < len(told):
            raise InputError(f"--same and --different are both {same!r}; give the two choices as the export has them")
        usual = ((_SAME, 0), (_DIFFERENT, NONE), (_UNSURE, UNSURE))
        self.usual = {_plain(word): choice for words, choice in usual for word in words.split(",")}
        for word in self.told:  # who tells "yes!" has not said what "yes?" means
            self.usual.pop(_plain(word), None)

    def of(self, word: str) -> int | None:
        """The choice that a word means; None for one that is not known."""
        return self.told.get(_stripped(word), self.usual.get(_plain(word)))


def _tasks(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    content = read_json(path)
    tasks = [content] if isinstance(content, dict) else content  # a bucket holds one file per task
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise InputError(f"{path}: not an export of Label Studio; export the project as JSON or JSON-MIN")
    for at, task in enumerate(tasks, start=1):
        yield f"task {task.get('id', at)}", task


def _answers(task: Mapping[str, Any], finder: "_Finder", meanings: _Meanings) -> tuple[list[Given], int]:
    """The answers of one task and the number of its annotations that say nothing."""
    annotations = task.get("annotations", task.get("completions"))
    data = task.get("data", {}) if annotations is not None else task
    if not isinstance(data, dict) or not isinstance(annotations or [], list):
        raise InputError("not a task of Label Studio; export the project again")
    spoken = [_spoken(one) for one in annotations or []] if annotations is not None else [_spoken_flat(task, finder)]
    said = [one for one in spoken if one is not None]
    if not said:
        return [], len(spoken)
    left, right = finder.two_images(data)
    if left == right:
        return [], len(spoken)
    question = Question(left, (right,))
    given = [
        Given(Answer(question, _meaning(one.words, meanings)), one.annotator, one.time, one.milliseconds)
        for one in said
    ]
    return given, len(spoken) - len(said)


def _spoken(annotation: Any) -> _Spoken | None:
    """What an annotation of the full form says; None when it was skipped or has no choice in it."""
    if not isinstance(annotation, dict):
        raise InputError("an annotation is not an object; export the project again")
    results = annotation.get("result")
    listed = results if isinstance(results, list) else []
    chosen = [one.get("value") for one in listed if isinstance(one, dict) and one.get("type") == "choices"]
    words = tuple(word for value in chosen for word in _words(value))
    if annotation.get("was_cancelled") or annotation.get("skipped") or not words:
        return None
    return _Spoken(words, *_circumstances(annotation, "completed_by"))


def _spoken_flat(task: Mapping[str, Any], finder: "_Finder") -> _Spoken | None:
    """What a task of the short form says: every field that is neither an image nor about the annotation."""
    fields = [value for name, value in task.items() if name not in _ABOUT_THE_ANNOTATION]
    choices = [value for value in fields if isinstance(value, dict)]  # several choices allowed: {"choices": […]}
    texts = [value for value in fields if isinstance(value, str) and not finder.is_image(value)]
    words = tuple(word for value in choices or texts for word in _words(value))
    return _Spoken(words, *_circumstances(task, "annotator")) if words else None


def _words(value: Any) -> list[str]:
    choices = value.get("choices", []) if isinstance(value, dict) else value
    listed = choices if isinstance(choices, list) else [choices]
    return [word for word in listed if isinstance(word, str) and word.strip()]


def _circumstances(record: Mapping[str, Any], key: str) -> tuple[str, str, int | None]:
    """Annotator, time and milliseconds."""
    seconds, created = record.get("lead_time"), record.get("created_at")
    known = isinstance(seconds, int | float) and math.isfinite(seconds)
    pace = int(1000 * seconds) if seconds is not None and known else None
    return _person(record.get(key)), created if isinstance(created, str) else "", pace


def _person(who: Any) -> str:
    """A name: users are numbers, addresses, or records of both."""
    if isinstance(who, dict):
        names = f"{who.get('first_name') or ''} {who.get('last_name') or ''}".strip()
        who = who.get("email") or names or who.get("id")
    if isinstance(who, str) and who.strip():
        return who.strip()
    return f"Label Studio user {who}" if isinstance(who, int) else "Label Studio"


def _meaning(words: Sequence[str], meanings: _Meanings) -> int:
    """The one meaning among the words; words without one (other controls) are passed over."""
    found = {choice for word in words if (choice := meanings.of(word)) is not None}
    if len(found) == 1:
        return found.pop()
    shown = ", ".join(repr(word[:40]) for word in words[:4])
    if found:
        raise InputError(f"the choices {shown} contradict each other; mend the annotation in Label Studio")
    raise InputError(f"the choice {shown} is not understood; say what it means with --same TEXT and --different TEXT")


def _stripped(word: str) -> str:
    return word.strip().casefold()


def _plain(word: str) -> str:
    return re.sub(r"[\W_]", "", word).casefold()


class _Finder:
    """Finds images by what Label Studio calls them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.exact = {name: row for row, name in enumerate(names)}
        self.by_file: defaultdict[str, list[int]] = defaultdict(list)
        for row, name in enumerate(names):
            file = PurePosixPath(name).name
            for known_as in {file, _uploaded(file)}:
                self.by_file[known_as].append(row)

    def is_image(self, text: str) -> bool:
        """Whether a text refers to an image, known or not."""
        return text in self.exact or PurePosixPath(_path(text)).suffix.lower() in SUFFIXES

    def two_images(self, data: Mapping[str, Any]) -> tuple[int, int]:
        """The rows of the two images in a task's data, in the order of its fields."""
        values = [value for entry in data.values() for value in (entry if isinstance(entry, list) else [entry])]
        found = [value for value in values if isinstance(value, str) and self.is_image(value)]
        if len(found) != 2:
            raise InputError(f"two images are compared, but its data names {len(found)}; export the two-image project")
        return self.row(found[0]), self.row(found[1])

    def row(self, reference: str) -> int:
        """The image a reference means: by name, else by file name and as many folders above it as agree."""
        path = _path(reference)
        for name in (reference, path):
            if name in self.exact:
                return self.exact[name]
        file = PurePosixPath(path).name
        rows = self.by_file.get(file) or self.by_file.get(_UPLOAD.sub("", file, count=1)) or []
        if not rows:
            raise InputError(f"no image is named {file!r} (the set has {len(self.names):,} images)")
        shared = [_n_shared(path, self.names[row]) for row in rows]
        best = [row for row, n in zip(rows, shared, strict=True) if n == max(shared)]
        if len(best) > 1:
            several = f"{self.names[best[0]]} or {self.names[best[1]]}" + (" or another" if len(best) > 2 else "")
            raise InputError(f"{file} could be {several}; give the files names of their own, or write a pairs file")
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


def _uploaded(file: str) -> str:
    """What Label Studio makes of a file's name when it is uploaded."""
    return re.sub(r"[^-\w.]", "", file.strip().replace(" ", "_"))


def _n_shared(path: str, name: str) -> int:
    """How many parts of two paths agree, from the end."""
    pairs = zip(reversed(PurePosixPath(path).parts), reversed(PurePosixPath(name).parts), strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(path.count("/"), name.count("/")) + 1
    )
