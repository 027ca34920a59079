"""Questions between row numbers and names, and whether an image is still the one that was asked about."""

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch.answers import Question
from constraintmatch.errors import InputError
from constraintmatch.images import ImageSet

__all__ = ["Kept", "Looks", "Place"]

_CELLS = 4  # a look is 4 × 4 grey means: one byte each
_TOLERANCE = 32  # of 255: decoders, sizes and colour conversions differ by less, other pictures by more


@dataclass(frozen=True)
class Place:
    """Where images come from: a folder, a file or a data set, and of embeddings their pictures ("": none)."""

    source: str = ""
    pictures: str | None = None  # None: not known, or these are images themselves


@dataclass(frozen=True)
class Kept:
    """Which of the images that a database mentions are here: all, and those missing or with other pixels."""

    n_mentioned: int
    missing: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def is_another_set(self) -> bool:
        """Whether most of the images are not here."""
        return 2 * (len(self.missing) + len(self.changed)) > self.n_mentioned

    def refusal(self, made: Place, here: Place) -> str:
        """Why the database, made with other images, cannot be used with those here, and what to do."""
        what = []
        if self.missing:
            what.append(f"{len(self.missing):,} of its {self.n_mentioned:,} image names are not there")
        if self.changed:
            what.append(f"{len(self.changed):,} of its {self.n_mentioned:,} images look different there")
        mend = _mend(made, here, same_names=not self.missing)
        return f"not about the images of {here.source or 'this set'} ({', '.join(what)}); {mend}"

    def reason(self) -> str:
        """What happened to the images whose answers are set aside, and the mend; "" when all are here."""
        parts = []
        if self.missing:
            parts.append(f"{_listed(self.missing)} moved, renamed or deleted")
        if self.changed:
            parts.append(f"{_listed(self.changed)} replaced by another picture")
        return f"{' and '.join(parts)}; put the images back to use them" if parts else ""


def _mend(made: Place, here: Place, *, same_names: bool) -> str:
    owner = f"it belongs to {made.source}; " if made.source not in ("", here.source) else ""
    how, flag = ("without", "leave --pictures out") if here.pictures else ("with", "add --pictures FOLDER")
    if here.pictures is not None and (same_names or not owner):  # the embeddings it was made with, presumably
        if made.pictures is None:
            return f"{owner}if it was made {how} pictures, {flag}, else give another --db"
        if made.pictures and made.pictures != here.pictures:
            return f"{owner}it was made with pictures; give --pictures {shlex.quote(made.pictures)} or another --db"
        if here.pictures and not made.pictures:
            return f"{owner}it was made without pictures; {flag} or give another --db"
    if made.source and not owner:
        return "they have changed since; put them back or give another --db"
    return f"{owner}give its folder or another --db"


def _listed(names: tuple[str, ...]) -> str:
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names):,} {'image' if len(names) == 1 else 'images'} ({listed})"


class Looks:
    """The names of a set's images and, made as they are needed, their looks."""

    def __init__(self, images: ImageSet) -> None:
        self._images = (images.shown or images).images
        self.image_names = images.names
        self._rows = images.rows()
        self._made: dict[int, bytes] = {}

    def names(self, question: Question) -> tuple[str, tuple[str, ...]]:
        """The names of the asked image and of those shown; an InputError for rows that do not exist."""
        if (last := max(question.image, *question.shown)) >= len(self.image_names):
            raise InputError(f"image {last} does not exist (the set has {len(self.image_names):,} images)")
        return self.image_names[question.image], tuple(self.image_names[row] for row in question.shown)

    def key(self, question: Question) -> str:
        """A text that is the same for the same question: shown images in any order, a pair either way round."""
        image, shown = self.names(question)
        parts = sorted((image, *shown)) if question.kind == "pair" else [image, *sorted(shown)]
        return json.dumps(parts, ensure_ascii=False)

    def look(self, question: Question) -> bytes:
        """The looks of the asked image and of those shown, 16 bytes each."""
        return b"".join(self._look(row) for row in (question.image, *question.shown))

    def question(self, row: Mapping[str, Any]) -> Question | None:
        """A stored question by row numbers; None when one of its images is missing or has other pixels."""
        stored = list(_stored(row))
        rows = [self._rows.get(name) for name, _ in stored]
        if None in rows or any(self._is_changed(name, look) for name, look in stored):
            return None
        image, *shown = (number for number in rows if number is not None)
        return Question(image, tuple(shown))

    def check(self, questions: Iterable[Mapping[str, Any]]) -> Kept:
        """Which of the images that these stored questions mention are here."""
        mentioned = dict.fromkeys(pair for row in questions for pair in _stored(row))
        names = dict.fromkeys(name for name, _ in mentioned)
        missing = tuple(name for name in names if name not in self._rows)
        changed = dict.fromkeys(name for name, look in mentioned if name in self._rows and self._is_changed(name, look))
        return Kept(len(names), missing, tuple(changed))

    def _is_changed(self, name: str, stored: bytes) -> bool:
        now = self._look(self._rows[name])
        if now == stored or len(now) != len(stored):
            return now != stored
        difference = np.frombuffer(now, np.uint8).astype(int) - np.frombuffer(stored, np.uint8)
        return bool(np.abs(difference).max() > _TOLERANCE)

    def _look(self, row: int) -> bytes:
        if row not in self._made:
            self._made[row] = _look_of(self._images[row])
        return self._made[row]


def _stored(row: Mapping[str, Any]) -> Iterable[tuple[str, bytes]]:
    """Name and look of each image of a stored question, the asked one first."""
    names, look = [row["image"], *json.loads(row["shown"])], row["look"]
    size = _CELLS * _CELLS
    return ((name, look[at * size : (at + 1) * size]) for at, name in enumerate(names))


def _look_of(image: NDArray[Any]) -> bytes:
    """Grey means of a 4 × 4 grid (an image of fewer pixels is stretched); of an embedding 16 bytes of its own."""
    if image.dtype != np.uint8:
        return hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=_CELLS * _CELLS).digest()
    while len(image) < _CELLS:
        image = image.repeat(2, axis=0).repeat(2, axis=1)
    side, _, channels = image.shape
    edges = np.arange(_CELLS) * side // _CELLS
    counts = np.diff(np.append(edges, side))
    rows = np.add.reduceat(image, edges, axis=0, dtype=np.uint32)  # rows first: long additions, not short ones
    sums = np.add.reduceat(rows, edges, axis=1).sum(axis=2)
    return bytes(np.rint(sums / (np.outer(counts, counts) * channels)).astype(np.uint8).tobytes())
