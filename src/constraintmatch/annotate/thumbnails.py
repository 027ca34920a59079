"""Small copies of images: by which they are known again or compared without a model; pictures for the page."""

import hashlib
import io
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.database import Database, clean
from constraintmatch.annotate.tables import LOOK_BYTES
from constraintmatch.data.decoding import eight_bits
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import Answer, Question, implied_groups
from constraintmatch.questions.belief import Belief

LARGEST = 800  # pixels: what a large screen shows of one of two images
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 100_000_000  # larger files would block the server; the pixels of the model are shown instead

Picture = tuple[bytes, str]  # content and media type
# The number of a cluster, its images, typical ones first, and how sure the model is of each (None without a model)
Gallery = tuple[int, NDArray[np.int64], NDArray[np.float32] | None]
_BELIEF_CELLS, _COMPONENTS = 12, 48  # sides of a copy that an image is known by, and numbers that its pixels become
_BLOCK = 4_096  # images whose pixels become numbers at once
_CELLS = 4  # a thumbnail is 4 × 4 grey means: one byte each, LOOK_BYTES in all
_TOLERANCE = 32  # of 255: decoders, sizes and colour conversions differ by less, other images by more


# The same image as before?


class ImageIdentity:
    """Turns questions into names and tiny thumbnails and back; knows a moved or replaced image.

    `source` is where the images come from (a folder, a file or a data set), `pictures` where those of embeddings do.
    """

    def __init__(self, images: ImageSet, source: Path | str, pictures: Path | str) -> None:
        self.images, self._rows, pixels = images, images.rows(), (images.shown or images).images
        self.source = _absolute(source)
        self.pictures = _absolute(pictures) if images.embedded else None  # "": no pictures; None: images themselves
        self._look = cache(lambda row: _thumbnail(pixels[row]))  # made when it is needed

    def columns(self, question: Question) -> tuple[str, str, bytes, str]:
        """The columns image, shown, look and key of a question; an InputError for rows that do not exist."""
        rows = (question.image, *question.shown)
        if (last := max(rows)) >= len(self.images):
            raise InputError(f"image {last} does not exist (the set has {len(self.images):,} images)")
        image, *shown = (self.images.names[row] for row in rows)
        ordered = sorted((image, *shown)) if question.kind == "pair" else [image, *sorted(shown)]
        key = {"nearer": ordered} if question.nearer else ordered
        look = b"".join(map(self._look, rows))
        return image, json.dumps(shown, ensure_ascii=False), look, json.dumps(key, ensure_ascii=False)

    def question(self, row: Mapping[str, Any]) -> Question | None:
        """A stored question by row numbers; None if one of its images is missing or has other pixels."""
        stored = list(_stored(row))
        if any(name not in self._rows or self._is_changed(name, look) for name, look in stored):
            return None
        image, *shown = (self._rows[name] for name, _ in stored)
        return Question(image, tuple(shown), nearer=bool(row["nearer"]))

    def check(self, database: Database) -> tuple[dict[int, Question | None], str]:
        """The stored questions by number, and why some are set aside; a database of other images is an InputError."""
        rows = "SELECT id, image, shown, look, nearer FROM questions"
        questions = [] if database.fresh else database.select(rows)  # fresh: a server was killed when it made it
        stored = dict.fromkeys(pair for row in questions for pair in _stored(row))
        names = dict.fromkeys(name for name, _ in stored)
        missing = [name for name in names if name not in self._rows]
        here = [pair for pair in stored if pair[0] in self._rows]
        changed = list(dict.fromkeys(name for name, look in here if self._is_changed(name, look)))
        if 2 * (len(missing) + len(changed)) > len(names):
            what = [(len(missing), "image names are not"), (len(changed), "images look different")]
            why = ", ".join(f"{n:,} of its {len(names):,} {how} there" for n, how in what if n)
            fix = self._fix(database, same_names=not missing)
            raise InputError(f"{database.path}: not about the images of {self.source or 'this set'} ({why}); {fix}")
        gone = [(missing, "moved, renamed or deleted"), (changed, "replaced by another picture")]
        why = " and ".join(f"{_list(images)} {how}" for images, how in gone if images)
        return {row["id"]: self.question(row) for row in questions}, f"{why}; put the images back to use them"

    def _fix(self, database: Database, *, same_names: bool) -> str:
        about = {row["key"]: row["value"] for row in database.select("SELECT key, value FROM about")}
        source, pictures, other = about.get("folder", ""), about.get("pictures"), f"another {database.flag}"
        owner = f"it belongs to {source}; " if source not in ("", self.source) else ""
        how, flag = ("without", "leave --pictures out") if self.pictures else ("with", "add --pictures FOLDER")
        if self.pictures is not None and (same_names or not owner):  # probably the embeddings that it was made with
            if pictures is None:  # not known
                return f"{owner}if it was made {how} pictures, {flag}, else give {other}"
            if pictures and pictures != self.pictures:
                return f"{owner}it was made with pictures; give --pictures {shlex.quote(pictures)} or {other}"
            if self.pictures and not pictures:
                return f"{owner}it was made without pictures; {flag} or give {other}"
        if source and not owner:
            return f"they have changed since; put them back or give {other}"
        return f"{owner}give its folder or {other}"

    def _is_changed(self, name: str, stored: bytes) -> bool:
        now = self._look(self._rows[name])
        if now == stored or len(now) != len(stored):
            return now != stored
        difference = np.frombuffer(now, np.uint8).astype(int) - np.frombuffer(stored, np.uint8)
        return bool(np.abs(difference).max() > _TOLERANCE)


def _absolute(place: Path | str) -> str:
    """A file by its whole path, a data set by its name."""
    return clean(str(Path(place).resolve() if str(place) and Path(place).exists() else place))


def _list(names: list[str]) -> str:
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names):,} {'image' if len(names) == 1 else 'images'} ({listed})"


def _stored(row: Mapping[str, Any]) -> Iterable[tuple[str, bytes]]:
    """Name and thumbnail of each image of a stored question, the asked one first."""
    names, look = [row["image"], *json.loads(row["shown"])], row["look"]
    return ((name, look[at * LOOK_BYTES : (at + 1) * LOOK_BYTES]) for at, name in enumerate(names))


def _thumbnail(image: NDArray[Any]) -> bytes:
    """Grey means of a 4 × 4 grid (an image of fewer pixels is stretched); of an embedding 16 bytes of its own."""
    if image.dtype != np.uint8:
        return hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=LOOK_BYTES).digest()
    while len(image) < _CELLS:
        image = image.repeat(2, axis=0).repeat(2, axis=1)
    sums, counts = _cell_sums(image, _CELLS)
    return bytes(np.rint(sums.sum(axis=2) / (counts * image.shape[2])).astype(np.uint8).tobytes())


def _cell_sums(images: NDArray[np.uint8], cells: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The sums of images (…, side, side, c) over cells × cells parts (…, cells, cells, c), and the pixels in each."""
    side = images.shape[-2]
    edges = np.arange(cells) * side // cells
    lengths = np.diff(np.append(edges, side))
    rows = np.add.reduceat(images, edges, axis=-3, dtype=np.uint32)  # rows first: long additions, not short ones
    return np.add.reduceat(rows, edges, axis=-2), np.outer(lengths, lengths)


def pixel_belief(images: ImageSet) -> Belief:
    """Features without a model: the principal components of small copies of the images, rows of length 1.

    Good enough to find near-duplicates and the dense places; 50,000 images take a few seconds. Embeddings are features
    already; their mean is subtracted.
    """
    if images.embedded:
        given = images.images.reshape(len(images), -1)
        features = given - given.mean(0)
    else:
        copies = list[NDArray[np.float32]]()
        for at in range(0, len(images), _BLOCK):
            sums, counts = _cell_sums(images.images[at : at + _BLOCK], min(_BELIEF_CELLS, images.side))
            copies.append(np.asarray(sums / (255 * counts[..., None]), np.float32).reshape(len(sums), -1))
        cells = np.concatenate(copies)
        cells -= cells.mean(0)
        directions = np.linalg.eigh(cells.T @ cells)[1][:, ::-1]
        features = cells @ directions[:, :_COMPONENTS].astype(np.float32)
    features[:, 0] += 1e-6  # an image that is the mean of all has no direction of its own
    return Belief(np.asarray(features / np.linalg.norm(features, axis=1, keepdims=True), np.float32))


# What the page shows


@lru_cache(maxsize=512)
def small_picture(images: ImageSet, row: int) -> Picture:
    """An image as the model sees it."""
    pixels = images.to_look_at().images[row]
    return _encode(Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0]), "PNG")


@lru_cache(maxsize=512)
def large_picture(images: ImageSet, folder: Path | None, row: int) -> Picture:
    """An image from its file in the folder; without one, or if it cannot be read, what the model sees."""
    found = None if folder is None else _from_file(folder / images.names[row])
    return found or small_picture(images, row)


def _from_file(path: Path) -> Picture | None:
    """The whole picture (the model sees its central square), turned as its EXIF says, at most LARGEST pixels wide."""
    try:
        with Image.open(path, formats=FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS or opened.mode[0] in "IF":
                return None  # 16-bit and float grey need the scaling that the image set has done
            opened.draft(None, (2 * LARGEST, 2 * LARGEST))
            image = eight_bits(ImageOps.exif_transpose(opened))
    except Exception:  # broken files raise whatever their decoder raises
        return None
    image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return _encode(image, "PNG" if max(image.size) < 256 else "JPEG")


def _encode(image: Image.Image, kind: str) -> Picture:
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 88} if kind == "JPEG" else {}))
    return file.getvalue(), f"image/{kind.lower()}"


def galleries(belief: Belief, answers: Sequence[Answer], n_images: int) -> list[Gallery]:
    """The clusters of the model that have images; without a model the groups that answers make, largest first."""
    if belief.probabilities is None:
        group = implied_groups(answers, n_images)
        parts = [np.flatnonzero(group == number) for number in range(group.max(initial=-1) + 1)]
        parts.sort(key=lambda rows: (-len(rows), rows[0]))
        return [(number, rows, None) for number, rows in enumerate(parts)]
    confidence = belief.probabilities.max(1)
    parts = [rows[np.argsort(-confidence[rows], kind="stable")] for rows in belief.members]
    return [(number, rows, confidence[rows]) for number, rows in enumerate(parts) if len(rows)]
