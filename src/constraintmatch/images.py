"""Images and their names: from arrays, from .npy/.npz files, from folders of image files decoded once into a cache."""

import hashlib
import json
import logging
import os
import stat
import threading
import time
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

import numpy as np
import PIL
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from constraintmatch.errors import InputError
from constraintmatch.files import read_json, write_atomically, write_json

__all__ = ["ImageSet", "Skipped", "load_images"]

_Progress = Callable[[int, int], None]
_ClassFolders = bool | Literal["auto"]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".tif", ".tiff", ".gif"},
)
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "GIF")  # tried by content: a PNG named .jpg is still read
_GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"})
_SIDES = (96, 64, 32, 16, 8)  # sides chosen for images of different sizes
_CACHE_VERSION = 1  # raise it whenever the same file would come out as other pixels
_CHUNK = 16  # files per task: enough to hide what a task costs, few enough for a smooth progress bar
_DAY = 86_400
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # what undoes each EXIF orientation
_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Skipped:
    """A file that is not among the images, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Square uint8 images with unique names; labels, where known, serve evaluation only.

    `images` is (n, side, side, channels) with 1 or 3 channels, in memory or memory-mapped (then read-only).
    """

    images: NDArray[np.uint8]
    names: tuple[str, ...]
    labels: NDArray[np.int64] | None = None
    classes: tuple[str, ...] | None = None
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        colour = "grey" if self.channels == 1 else "colour"
        labels = "no labels" if self.labels is None else f"{len(np.unique(self.labels)):,} classes"
        return f"ImageSet({len(self):,} {colour} images of {self.side} x {self.side}, {labels})"

    @property
    def side(self) -> int:
        """Height and width in pixels."""
        return int(self.images.shape[1])

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return int(self.images.shape[3])

    def rows(self) -> dict[str, int]:
        """The row of each name."""
        return {name: row for row, name in enumerate(self.names)}

    def take(self, rows: ArrayLike) -> "ImageSet":
        """The images of these rows (numbers or a mask), in memory, with their names, labels and classes."""
        chosen = np.asarray(rows)
        index = np.arange(len(self))[chosen if chosen.size else chosen.astype(np.int64)]
        labels = None if self.labels is None else self.labels[index]
        return ImageSet(np.asarray(self.images[index]), tuple(self.names[row] for row in index), labels, self.classes)

    def split(self, n_second: int, *, seed: int, stratified: bool = True) -> tuple["ImageSet", "ImageSet"]:
        """Two parts in old order, the second of `n_second` images; where labels exist, each class keeps its share."""
        if not 0 <= n_second <= len(self):
            raise InputError(f"cannot split off {n_second:,} images: the set has {len(self):,}")
        random = np.random.default_rng(seed)
        groups = [np.arange(len(self))]
        if stratified and self.labels is not None:
            groups = [np.flatnonzero(self.labels == label) for label in np.unique(self.labels)]
        shares = _shares([len(group) for group in groups], n_second)
        second = np.zeros(len(self), dtype=bool)
        for group, share in zip(groups, shares, strict=True):
            second[random.permutation(group)[:share]] = True
        return self.take(~second), self.take(second)

    def fingerprint(self) -> str:
        """16 hex digits that tell one set of images from another: shape, names and the pixels of up to 64 images."""
        digest = hashlib.sha256(repr(self.images.shape).encode())
        for name in self.names:
            digest.update(name.encode("utf-8", "backslashreplace") + b"\0")
        n_sampled = min(64, len(self))
        for row in range(n_sampled):
            digest.update(np.ascontiguousarray(self.images[row * len(self) // n_sampled]).tobytes())
        return digest.hexdigest()[:16]

    @classmethod
    def from_arrays(
        cls,
        images: ArrayLike,
        *,
        names: Sequence[str] | None = None,
        labels: ArrayLike | None = None,
        classes: Sequence[str] | None = None,
    ) -> "ImageSet":
        """Images from an array (n, h, w), (n, h, w, c) or (n, c, h, w): uint8, or floats in [0, 1].

        Labels are whole numbers from 0, or words, which then become the classes.
        """
        pixels = _as_bytes(_channels_last(np.asarray(images)))
        checked = _checked_names(names, len(pixels))
        if labels is None:
            return cls(pixels, checked)
        numbers, found = _checked_labels(np.asarray(labels), len(pixels), _as_words(classes))
        return cls(pixels, checked, numbers, found)

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        side: int | None = None,
        channels: int | None = None,
        class_folders: _ClassFolders = "auto",
        strict: bool = False,
        cache: bool | Path | str = True,
        progress: _Progress | None = None,
    ) -> "ImageSet":
        """The images below a folder, named by relative path and sorted by name.

        Each image is turned as its EXIF says, laid on white where it is transparent, resized so that its shorter side
        is `side`, and cropped to the central square; one that has that size already keeps its pixels. Without `side`:
        the common size of equal squares of at most 96 pixels, else the largest of 96, 64, 32, 16, 8 not over the median
        shorter side. Without `channels`: 1 when every file is grey, else 3.

        `class_folders`: the first part of each path is the image's class (for evaluation only); "auto" does so when all
        images lie in two or more sub-folders. Files that cannot be read are listed in `skipped`; with `strict` they
        are an error. Decoded images are kept in `cache` (True: the user's cache folder, False: nowhere) until a file in
        the folder changes; `progress(done, total)` is called while files are decoded, not when the cache serves.
        """
        folder = Path(folder)
        _check_request(folder, side, channels)
        files, unread = _walk(folder)
        if not files and not unread:
            raise InputError(f"{folder}: no images there (looked for {', '.join(sorted(_SUFFIXES))} at any depth)")
        request = _Request(folder, tuple(files), side, channels, progress)
        decoded = _decode_cached(request, _cache_place(cache, request))
        skipped = tuple(sorted([*unread, *decoded.skipped()], key=lambda skip: skip.name))
        _check_decoded(folder, len(decoded.names), skipped, strict)
        labels, classes = _labels_from_paths(folder, decoded.names, class_folders)
        return cls(decoded.images, decoded.names, labels, classes, skipped)

    @classmethod
    def from_file(cls, path: Path | str, *, side: int | None = None, channels: int | None = None) -> "ImageSet":
        """Images from a .npy file (memory-mapped) or a .npz file.

        A .npz holds `images` (or x, data) and perhaps `labels` (or y), `names`, `classes`. Images of another size are
        converted to `side` and `channels`.
        """
        path = Path(path)
        _check_size(side, channels)
        arrays = _read_arrays(path)
        try:
            found = cls.from_arrays(arrays.pop("images"), **arrays)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        if side in (None, found.side) and channels in (None, found.channels):
            return found
        images = _fit_all(found.images, side or found.side, channels or found.channels)
        return cls(images, found.names, found.labels, found.classes)


def load_images(
    source: Path | str,
    *,
    side: int | None = None,
    channels: int | None = None,
    class_folders: _ClassFolders = "auto",
    strict: bool = False,
    cache: bool | Path | str = True,
    progress: _Progress | None = None,
) -> ImageSet:
    """The images of a folder, or of a .npy or .npz file (where only `side` and `channels` matter)."""
    if Path(source).is_file():
        return ImageSet.from_file(source, side=side, channels=channels)
    return ImageSet.from_folder(
        source,
        side=side,
        channels=channels,
        class_folders=class_folders,
        strict=strict,
        cache=cache,
        progress=progress,
    )


# Arrays


def _channels_last(images: NDArray[Any]) -> NDArray[Any]:
    """The images as (n, side, side, channels); the channel axis is found by its length."""
    shape = images.shape
    if images.ndim == 3:
        images = images[..., None]
    elif images.ndim != 4:
        raise InputError(f"images of shape {shape}: expected (n, h, w), (n, h, w, c) or (n, c, h, w)")
    elif not _is_square(images.shape) and shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if 0 in images.shape:
        raise InputError(f"images of shape {shape}: there is no image in it")
    if images.shape[3] not in (1, 3):
        raise InputError(f"images of shape {shape}: expected 1 or 3 channels; drop alpha with images[..., :3]")
    if not _is_square(images.shape):
        raise InputError(f"images of shape {shape}: they are not square; crop or resize them first")
    return images


def _is_square(shape: tuple[int, ...]) -> bool:
    return shape[3] in (1, 3) and shape[1] == shape[2]


def _as_bytes(images: NDArray[Any]) -> NDArray[np.uint8]:
    """The images as contiguous uint8; floats in [0, 1] become round(255 x). A mapped uint8 array stays mapped."""
    if images.dtype == np.uint8:
        return np.ascontiguousarray(images)
    if not np.issubdtype(images.dtype, np.floating):
        raise InputError(f"images of type {images.dtype}: give uint8 (0 to 255) or floats in [0, 1]")
    pixels = np.empty(images.shape, np.uint8)
    low, high = np.inf, -np.inf
    for row, image in enumerate(images):  # one at a time: no float copy of the whole set
        low, high = np.minimum(low, image.min()), np.maximum(high, image.max())
        if low >= 0 and high <= 1:
            pixels[row] = np.rint(image * 255.0)
    if not (low >= 0 and high <= 1):  # NaN fails too
        mend = f"divide them by {high:g}" if low >= 0 and np.isfinite(high) else "scale them"
        raise InputError(
            f"images with values from {low:g} to {high:g}: floats must lie in [0, 1]; {mend} or give uint8"
        )
    return pixels


def _checked_names(names: Sequence[str] | None, n_images: int) -> tuple[str, ...]:
    if names is None:
        return tuple(str(row) for row in range(n_images))
    checked = tuple(str(name) for name in names)
    if len(checked) != n_images:
        raise InputError(f"{len(checked):,} names for {n_images:,} images: give one name for each image")
    rows: dict[str, int] = {}
    for row, name in enumerate(checked):
        if rows.setdefault(name, row) != row:
            raise InputError(f"the name {name!r} stands at rows {rows[name]:,} and {row:,}: names must be unique")
    return checked


def _checked_labels(
    labels: NDArray[Any], n_images: int, classes: tuple[str, ...] | None
) -> tuple[NDArray[np.int64], tuple[str, ...] | None]:
    """Labels as int64 and their classes; words are numbered in the order of `classes`, else in alphabetic order."""
    if labels.size != n_images or labels.shape[:1] != (n_images,):  # (n, 1) is taken as (n,)
        raise InputError(f"labels of shape {labels.shape} for {n_images:,} images: give one label for each image")
    labels = labels.reshape(-1)
    if labels.dtype.kind in "US":
        return _number_words([str(word) for word in labels.astype(str)], classes)
    whole = labels.dtype.kind in "iu" or (labels.dtype.kind == "f" and bool(np.all(labels == np.floor(labels))))
    if not whole or labels.min() < 0:
        raise InputError("labels must be whole numbers from 0, or words; leave labels out when they are not known")
    if classes is not None and labels.max() >= len(classes):
        raise InputError(f"label {labels.max():g} has no name: there are {len(classes):,} classes")
    return labels.astype(np.int64), classes


def _as_words(words: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if words is None else tuple(str(word) for word in words)


def _number_words(words: list[str], classes: tuple[str, ...] | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    classes = tuple(sorted(set(words))) if classes is None else classes
    numbers = {word: number for number, word in enumerate(classes)}
    unknown = next((word for word in words if word not in numbers), None)
    if unknown is not None:
        raise InputError(f"label {unknown!r} is not one of the classes {', '.join(classes)}")
    return np.array([numbers[word] for word in words], np.int64), classes


def _shares(sizes: list[int], n_chosen: int) -> list[int]:
    """How many to draw from each group: proportional to its size, with largest remainders, summing to `n_chosen`."""
    total = sum(sizes)
    if total == 0:
        return [0 for _ in sizes]
    shares = [size * n_chosen // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda group: (-(sizes[group] * n_chosen % total), group))
    for group in by_remainder[: n_chosen - sum(shares)]:
        shares[group] += 1
    return shares


def _read_arrays(path: Path) -> dict[str, Any]:
    """The arrays of a file by our names for them; never unpickles."""
    if path.suffix.lower() not in (".npy", ".npz"):
        raise InputError(f"{path}: not a .npy or .npz file; give one of these or a folder of images")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        if path.suffix.lower() == ".npy":
            return {"images": np.load(path, mmap_mode="r", allow_pickle=False)}
        with np.load(path, allow_pickle=False) as arrays:
            return _known_arrays(path, arrays)
    except InputError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: cannot be read as arrays of numbers ({_one_line(error)})") from None


def _known_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    keys = {key.lower(): key for key in arrays}
    spellings = {
        "images": ("images", "x", "data"),
        "labels": ("labels", "y"),
        "names": ("names",),
        "classes": ("classes",),
    }
    found = {ours: next((keys[key] for key in theirs if key in keys), None) for ours, theirs in spellings.items()}
    if found["images"] is None:
        raise InputError(f"{path}: no array named images, x or data in it (it has {', '.join(keys) or 'none'})")
    chosen = {ours: arrays[key] for ours, key in found.items() if key is not None}
    return {ours: array.astype(str) if array.dtype.kind == "S" else array for ours, array in chosen.items()}


def _fit_all(images: NDArray[np.uint8], side: int, channels: int) -> NDArray[np.uint8]:
    fitted = np.empty((len(images), side, side, channels), np.uint8)
    for row, image in enumerate(images):
        fitted[row] = _fit(Image.fromarray(image if image.shape[2] == 3 else image[..., 0]), side, channels)
    return fitted


# Folders: what lies there


class _File(NamedTuple):
    name: str  # relative, with forward slashes
    size: int
    mtime_ns: int


def _check_request(folder: Path, side: int | None, channels: int | None) -> None:
    _check_size(side, channels)
    if folder.is_file():
        raise InputError(f"{folder}: a file; give a folder of images, or a .npy or .npz file")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")


def _check_size(side: int | None, channels: int | None) -> None:
    if side is not None and side < 8:
        raise InputError(f"side {side}: images need at least 8 pixels a side")
    if channels not in (None, 1, 3):
        raise InputError(f"channels {channels}: must be 1 (grey) or 3 (colour)")


def _walk(folder: Path) -> tuple[list[_File], list[Skipped]]:
    """The image files below a folder, sorted by name, and what could not be looked at.

    Every real folder is entered once, through its own path rather than through a link, so that loops of links end.
    """
    files: list[_File] = []
    skipped: list[Skipped] = []
    entered: set[tuple[int, int]] = set()
    real, linked = [""], list[str]()
    while real or linked:
        linked.sort(reverse=True)
        here = real.pop() if real else linked.pop()
        try:
            status = (folder / here).stat()
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            with os.scandir(folder / here) as entries:
                for entry in entries:
                    _sort_entry(entry, here, files, skipped, linked if entry.is_symlink() else real)
        except OSError as error:
            skipped.append(Skipped(_shown(here or str(folder)), _reason(error)))
    return sorted(files), skipped


def _sort_entry(
    entry: os.DirEntry[str], here: str, files: list[_File], skipped: list[Skipped], folders: list[str]
) -> None:
    """Put a folder's entry where it belongs; hidden entries and files that do not claim to be images are left out."""
    if entry.name.startswith("."):
        return
    name = f"{here}/{entry.name}" if here else entry.name
    if _is_folder(entry):
        folders.append(name)
        return
    if os.path.splitext(entry.name)[1].lower() not in _SUFFIXES:  # noqa: PTH122 (Path is ten times slower)
        return
    try:
        name.encode()
        status = entry.stat()
    except UnicodeEncodeError:
        skipped.append(Skipped(_shown(name), "its name is not valid Unicode; rename it"))
    except OSError as error:
        skipped.append(Skipped(name, _reason(error)))
    else:
        if stat.S_ISREG(status.st_mode):
            files.append(_File(name, status.st_size, status.st_mtime_ns))
        else:  # opening a pipe would wait for ever
            skipped.append(Skipped(name, "not a regular file"))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link onto itself
        return False


def _shown(name: str) -> str:
    """A name that can be printed and written: undecodable bytes as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _labels_from_paths(
    folder: Path, names: tuple[str, ...], class_folders: _ClassFolders
) -> tuple[NDArray[np.int64] | None, tuple[str, ...] | None]:
    """Labels and classes from the first part of each path, or none."""
    if class_folders is False:
        return None, None
    outside = next((name for name in names if "/" not in name), None)
    classes = sorted({name.split("/", 1)[0] for name in names})
    if class_folders == "auto" and (outside is not None or len(classes) < 2):
        return None, None
    if outside is not None:
        raise InputError(f"{folder}: {outside} lies in no class folder; move it into one or do without class folders")
    return _number_words([name.split("/", 1)[0] for name in names], tuple(classes))


def _check_decoded(folder: Path, n_images: int, skipped: tuple[Skipped, ...], strict: bool) -> None:
    if skipped and (strict or not n_images):
        first = f"{skipped[0].name}: {skipped[0].reason}"
        others = f" (and {len(skipped) - 1:,} more)" if len(skipped) > 1 else ""
        mend = "mend or remove it, or read without strict" if strict else "no image could be read"
        raise InputError(f"{folder}: {first}{others}; {mend}")


# Folders: decoding


class _Request(NamedTuple):
    folder: Path
    files: tuple[_File, ...]
    side: int | None
    channels: int | None
    progress: _Progress | None


class _Broken(NamedTuple):
    name: str
    reason: str
    passing: bool  # the system's fault (no permission, no memory), so worth another try


@dataclass(frozen=True)
class _Decoded:
    images: NDArray[np.uint8]
    names: tuple[str, ...]
    broken: tuple[_Broken, ...]

    def skipped(self) -> list[Skipped]:
        return [Skipped(broken.name, broken.reason) for broken in self.broken]


class _Header(NamedTuple):
    width: int
    height: int
    grey: bool


def _decode_cached(request: _Request, place: Path | None) -> _Decoded:
    """The decoded images: from the cache, or decoded into it, or in memory where no cache can be written."""
    if place is None:
        return _decode_into_memory(request)
    decoded = _read_cache(request, place)
    if decoded is not None:
        return decoded
    try:
        _write_cache(request, place)
        decoded = _read_cache(request, place)
    except (OSError, InputError) as error:
        decoded = _read_cache(request, place)  # Windows: another process has it open, hence complete
        if decoded is None:
            _log.warning("the images are decoded into memory, not into the cache (%s)", error)
    return decoded or _decode_into_memory(request)


def _decode_into_memory(request: _Request) -> _Decoded:
    with _quiet():
        side, channels, broken = _choose_size(request)
        files = _without(request.files, broken)
        images = np.empty((len(files), side, side, channels), np.uint8)
        names: list[str] = []
        for name, result in _decode(request, files, side, channels):
            if isinstance(result, _Broken):
                broken.append(result)
            else:
                images[len(names)] = result
                names.append(name)
    return _Decoded(images[: len(names)], tuple(names), tuple(broken))


def _decode(
    request: _Request, files: Sequence[_File], side: int, channels: int
) -> Iterator[tuple[str, NDArray[np.uint8] | _Broken]]:
    """Each file's name and pixels, or why there are none; in order, with progress."""

    def decode(file: _File) -> NDArray[np.uint8] | _Broken:
        try:
            return _decode_file(request.folder / file.name, side, channels)
        except Exception as error:  # Pillow's plugins raise nearly anything on broken bytes
            return _broken(file, error)

    if request.progress and files:
        request.progress(0, len(files))
    for done, (file, result) in enumerate(zip(files, _in_parallel(decode, files), strict=True), start=1):
        yield file.name, result
        if request.progress and (done % _CHUNK == 0 or done == len(files)):
            request.progress(done, len(files))


def _choose_size(request: _Request) -> tuple[int, int, list[_Broken]]:
    """Side, channels and the files whose headers cannot be read; headers are read only when something is not given."""
    if request.side is not None and request.channels is not None:
        return request.side, request.channels, []

    def look(file: _File) -> _Header | _Broken:
        try:
            with Image.open(request.folder / file.name, formats=_FORMATS) as image:
                return _Header(image.width, image.height, image.mode in _GREY_MODES)
        except Exception as error:
            return _broken(file, error)

    results = list(_in_parallel(look, request.files))
    headers = [result for result in results if isinstance(result, _Header)]
    side = request.side or _choose_side(headers)
    channels = request.channels or (1 if all(header.grey for header in headers) else 3)
    return side, channels, [result for result in results if isinstance(result, _Broken)]


def _choose_side(headers: list[_Header]) -> int:
    if not headers:
        return _SIDES[-1]
    sizes = {(header.width, header.height) for header in headers}
    width, height = next(iter(sizes))
    if len(sizes) == 1 and width == height <= _SIDES[0]:
        return max(width, _SIDES[-1])
    median = np.median([min(header.width, header.height) for header in headers])
    return next((side for side in _SIDES if side <= median), _SIDES[-1])


def _decode_file(path: Path, side: int, channels: int) -> NDArray[np.uint8]:
    """The file's first picture as (side, side, channels)."""
    with Image.open(path, formats=_FORMATS) as image:
        image.draft(None, (2 * side, 2 * side))  # a JPEG may leave out detail that the resizing would average away
        image.load()  # before the EXIF: in a PNG it may follow the pixels; a TIFF is turned by loading
        turn = _TURNS.get(_orientation(image))
        plain = _eight_bits(image)
        return _fit(plain.transpose(turn) if turn is not None else plain, side, channels)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a broken EXIF block does not spoil the picture
        return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """The picture as 8-bit grey or RGB, laid on white where it is transparent, deeper pixels scaled (not clipped)."""
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_scale_deep(np.asarray(image)))
    grey = image.mode in _GREY_MODES
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("L" if grey else "RGB")
    return image.convert("L" if grey else "RGB")


def _scale_deep(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """16-bit, 32-bit or float grey as 8 bits: the type's range onto 0..255.

    32-bit integers within 16 bits count as 16-bit: some versions of Pillow open a 16-bit PNG that way.
    """
    low, high = pixels.min(), pixels.max()
    if pixels.dtype.kind == "f":
        if not (low >= 0 and high <= 1):
            raise ValueError(f"floating-point pixels from {low:g} to {high:g}; only 0 to 1 has a clear meaning")
        full = 1
    else:
        full = 65_535 if high <= 65_535 else 2**31 - 1
    scaled: NDArray[np.float64] = np.rint(np.maximum(pixels, 0) * (255.0 / full))
    return scaled.astype(np.uint8)


def _fit(image: Image.Image, side: int, channels: int) -> NDArray[np.uint8]:
    """The central square at the wanted size as (side, side, channels); a square of that size keeps its pixels."""
    image = image.convert("L" if channels == 1 else "RGB")
    width, height = image.size
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    if short == side:
        image = image.crop((int(left), int(top), int(left) + side, int(top) + side))
    else:
        box = (left, top, left + short, top + short)
        image = image.resize((side, side), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return np.asarray(image).reshape(side, side, channels)


def _without(files: Sequence[_File], broken: Sequence[_Broken]) -> list[_File]:
    names = {file.name for file in broken}
    return [file for file in files if file.name not in names]


def _broken(file: _File, error: Exception) -> _Broken:
    passing = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)
    return _Broken(file.name, "the file is empty" if file.size == 0 else _reason(error), passing)


def _reason(error: Exception) -> str:
    """One line that says what is wrong with a file, without its path."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"too large: more than {Image.MAX_IMAGE_PIXELS or 0:,} pixels"
    if isinstance(error, PIL.UnidentifiedImageError):
        return "not a picture in a known format"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _in_parallel(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """The results in order, computed by threads a bounded way ahead (Pillow frees the interpreter while it decodes)."""
    n_threads = max(1, min(16, _n_cores(), len(items) // _CHUNK))
    chunks = (items[start : start + _CHUNK] for start in range(0, len(items), _CHUNK))
    waiting: deque[Future[list[_Result]]] = deque()
    pool = ThreadPoolExecutor(n_threads, thread_name_prefix="decode")
    try:
        for chunk in chunks:
            waiting.append(pool.submit(lambda chunk: [work(item) for item in chunk], chunk))
            if len(waiting) > 4 * n_threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _n_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_filters = threading.RLock()


@contextmanager
def _quiet() -> Iterator[None]:
    """Pillow's warnings stay inside: a too large image raises, the others (odd EXIF, odd palettes) are dropped.

    Warning filters belong to the whole process, so they are set here, around the threads, and by one caller at a time.
    """
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


# Folders: the cache. One folder per (folder, side, channels); in it DIGEST.npy and then DIGEST.json, whose name stands
# for the exact state of all files. Both are renamed into place when complete, so that a reader or a second writer never
# meets half of one; a file that vanishes under a reader counts as no cache.


def _cache_place(cache: bool | Path | str, request: _Request) -> Path | None:
    if cache is False:
        return None
    root = _user_cache() if cache is True else Path(cache)
    if root is None:
        return None
    key = json.dumps([str(request.folder.resolve()), request.side, request.channels, _CACHE_VERSION])
    return root / hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()[:24]


def _user_cache() -> Path | None:
    variable = "LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME"
    given = os.environ.get(variable, "")
    try:
        base = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # no home folder
        return None
    return base / "constraintmatch"


def _state(request: _Request) -> str:
    """A digest of all that decides the pixels: each file's path, size and time, and the decoder's version and limit."""
    digest = hashlib.sha256(f"{PIL.__version__} {Image.MAX_IMAGE_PIXELS}".encode())
    for file in request.files:
        digest.update(f"\n{file.name}\0{file.size}\0{file.mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _read_cache(request: _Request, place: Path) -> _Decoded | None:
    """The cached images, or None when there are none for the folder's present state."""
    state = _state(request)
    try:
        note = read_json(place / f"{state}.json")
        broken = tuple(_Broken(*entry) for entry in note["broken"])
        images = np.lib.format.open_memmap(place / f"{state}.npy", mode="r")
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return None
    names = tuple(file.name for file in _without(request.files, broken))
    if images.dtype != np.uint8 or len(images) != len(names):
        return None
    if any(entry.passing and _opens(request.folder / entry.name) for entry in broken):
        return None
    return _Decoded(np.asarray(images), names, broken)


def _opens(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False


def _write_cache(request: _Request, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(place)
    state = _state(request)
    broken: list[_Broken] = []
    write_atomically(place / f"{state}.npy", lambda temporary: broken.extend(_decode_into_file(request, temporary)))
    write_json(place / f"{state}.json", {"folder": str(request.folder.resolve()), "broken": broken})
    for old in place.glob("[!.]*"):
        if old.stem != state:
            _remove(old)


def _decode_into_file(request: _Request, path: Path) -> list[_Broken]:
    """Decode into a .npy file and return the files left out.

    Written front to back rather than through a map: a full disk is then an error instead of a bus error.
    """
    with _quiet(), path.open("wb") as file:
        side, channels, broken = _choose_size(request)
        files = _without(request.files, broken)
        start = _write_header(file, (len(files), side, side, channels))
        n_written = 0
        for _, result in _decode(request, files, side, channels):
            if isinstance(result, _Broken):
                broken.append(result)
            else:
                file.write(result.tobytes())
                n_written += 1
        file.seek(0)
        if _write_header(file, (n_written, side, side, channels)) != start:
            raise OSError("the .npy header changed its length")
    return broken


def _write_header(file: IO[bytes], shape: tuple[int, ...]) -> int:
    """Write the .npy header at the start and return its length, which NumPy pads so that n does not change it."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.tell()


def _remove_leftovers(place: Path) -> None:
    """Remove what killed decodes left; a day old, so that it is not one in progress."""
    for leftover in place.glob(".*"):
        try:
            stale = leftover.stat().st_mtime < time.time() - _DAY
        except OSError:
            continue
        if stale:
            _remove(leftover)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:  # gone already, or mapped by another process on Windows
        return
