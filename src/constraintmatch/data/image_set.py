"""Images or embeddings with names: from arrays, .npy/.npz files, folders of image files decoded once into a cache."""

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch.data.cache import cache_place, decode_cached
from constraintmatch.data.decoding import SUFFIXES, FolderRequest, Progress, Skipped, find_files, fit_square, one_line

__all__ = ["ImageSet", "Skipped", "kind_of", "load_images"]

_ClassFolders = bool | Literal["auto"]
_ARRAYS = {".npy": b"\x93NUMPY", ".npz": b"PK"}  # and how such a file begins


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Square uint8 images with unique names; labels, where known, serve evaluation only.

    `images` is (n, side, side, channels) with 1 or 3 channels, in memory or memory-mapped (then read-only). Embeddings
    take the place of images as float32 (n, 1, 1, d): one pixel with a channel for each of their numbers.
    """

    images: NDArray[Any]
    names: tuple[str, ...]
    labels: NDArray[np.int64] | None = None
    classes: tuple[str, ...] | None = None
    skipped: tuple[Skipped, ...] = ()
    pictures: "ImageSet | None" = None  # of embeddings: the images that they stand for, row by row

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        labels = "no labels" if self.labels is None else f"{len(np.unique(self.labels)):,} classes"
        return f"ImageSet({len(self):,} {kind_of(self.side, self.channels)}, {labels})"

    @property
    def embedded(self) -> bool:
        """Whether these are embeddings."""
        return self.side == 1

    @property
    def shown(self) -> "ImageSet | None":
        """What a person can look at: the images themselves, or the pictures of embeddings where they are known."""
        return self.pictures if self.embedded else self

    def to_look_at(self) -> "ImageSet":
        """What a person can look at; an InputError where there is nothing."""
        if self.shown is None:
            raise InputError("embeddings cannot be looked at: name the folder of their images with --pictures")
        return self.shown

    @property
    def side(self) -> int:
        """Height and width in pixels."""
        return int(self.images.shape[1])

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return int(self.images.shape[3])

    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean of each number of the embeddings, and one standard deviation for all of them, as often.

        One for all: what varies little in an embedding matters little, and stays small. A deviation that 32 bits cannot
        divide by is an InputError.
        """
        flat = self.images.reshape(len(self), -1)
        mean = flat.mean(axis=0, dtype=np.float64)
        variance = sum(float(np.square(flat[at : at + 4_096] - mean).sum()) for at in range(0, len(flat), 4_096))
        spread = (variance / flat.size) ** 0.5 or 1.0
        if not 1e-37 < spread < 1e37:
            raise InputError(f"the embeddings have a standard deviation of {spread:.0e}, beyond 32 bits; scale them")
        return tuple(mean.tolist()), (spread,) * flat.shape[1]

    def rows(self) -> dict[str, int]:
        """The row of each name."""
        return {name: row for row, name in enumerate(self.names)}

    def take(self, rows: ArrayLike) -> "ImageSet":
        """The images of these rows (numbers or a mask), in memory, with names, labels and classes; no pictures."""
        chosen = np.asarray(rows)
        index = np.arange(len(self))[chosen if chosen.size else chosen.astype(np.int64)]
        labels = None if self.labels is None else self.labels[index]
        return ImageSet(np.asarray(self.images[index]), tuple(self.names[row] for row in index), labels, self.classes)

    def with_pictures(self, pictures: "ImageSet") -> "ImageSet":
        """These embeddings with the pictures of the same names, or, where they are only numbered, in the same order.

        Numbered ones take the pictures' names; those without labels their labels.
        """
        if not self.embedded:
            raise InputError("pictures go with embeddings; these are images, and are shown themselves")
        if self.names == tuple(map(str, range(len(self)))) and self.names != pictures.names:
            if len(self) != len(pictures):
                mend = "give one picture for each, or a .npz file with their names"
                raise InputError(f"{len(self):,} embeddings without names and {len(pictures):,} pictures; {mend}")
            names, matched = pictures.names, pictures
        elif self.names == pictures.names:
            names, matched = self.names, pictures
        else:
            names, rows = self.names, pictures.rows()
            if (odd := next((name for name in names if name not in rows), None)) is not None:
                raise InputError(f"there is no picture named {odd!r}; names are paths below the folder of pictures")
            matched = pictures.take([rows[name] for name in names])
        labels, classes = (self.labels, self.classes) if self.labels is not None else (matched.labels, matched.classes)
        return replace(self, names=names, labels=labels, classes=classes, pictures=matched)

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

        An array (n, d) has embeddings, one a row. Labels are whole numbers from 0, or words, which become the classes.
        """
        if isinstance(images, np.ma.MaskedArray):
            raise InputError("a masked array: fill its gaps, or leave their images out")
        try:
            given = np.asarray(images)
        except ValueError:  # of rows that differ in length
            raise InputError("the images differ in size: give an array (n, h, w, c), or a folder") from None
        pixels = _as_embeddings(given) if given.ndim == 2 else _as_bytes(_channels_last(given))
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
        max_side: int | None = None,
        channels: int | None = None,
        class_folders: _ClassFolders = "auto",
        strict: bool = False,
        cache: bool | Path | str = True,
        progress: Progress | None = None,
    ) -> "ImageSet":
        """The images below a folder, named by relative path and sorted by name.

        Each image is turned as its EXIF says, laid on white where it is transparent, resized so that its shorter side
        is `side`, and cropped to the central square; one that has that size already keeps its pixels. Without `side`:
        the common size of equal squares of at most 96 pixels, else the largest of 96, 64, 32, 16, 8 not over the median
        shorter side; `max_side`, where given, if it would be larger. Without `channels`: 1 when every file is grey,
        else 3.

        `class_folders`: the first part of each path is the image's class (for evaluation only); "auto" does so when all
        images lie in two or more sub-folders. Files that cannot be read are listed in `skipped`; with `strict` they
        are an error. Decoded images are kept in `cache` (True: the user's cache folder, False: nowhere) until a file in
        the folder changes; `progress(done, total)` is called while files are decoded, not when the cache serves.
        """
        folder = Path(folder)
        _check_size(side, max_side, channels)
        _check_folder(folder)
        files, unread = find_files(folder)
        if not files and not unread:
            raise InputError(f"{folder}: no images there (looked for {', '.join(sorted(SUFFIXES))} at any depth)")
        request = FolderRequest(folder, tuple(files), side, None if side else max_side, channels, progress)
        decoded = decode_cached(request, cache_place(cache, request))
        skipped = tuple(sorted([*unread, *decoded.skipped()], key=lambda skip: skip.name))
        _check_decoded(folder, len(decoded.names), skipped, strict)
        labels, classes = _labels_from_paths(folder, decoded.names, class_folders)
        return cls(decoded.images, decoded.names, labels, classes, skipped)

    @classmethod
    def from_file(
        cls, path: Path | str, *, side: int | None = None, max_side: int | None = None, channels: int | None = None
    ) -> "ImageSet":
        """Images or embeddings from a .npy file (memory-mapped) or a .npz file.

        A .npz holds `images` or `embeddings` (or x, data) and perhaps `labels` (or y), `names`, `classes`. Images of
        another size are converted to `side` (or, where they are larger, to `max_side`) and `channels`.
        """
        path = Path(path)
        arrays = _read_arrays(path)
        try:
            found = cls.from_arrays(arrays.pop("images"), **arrays)
        except InputError as error:
            raise error.at(path) from None
        if found.embedded:
            _check_embedded(path, found.channels, side, channels)
            return found
        _check_size(side, max_side, channels)
        side = side or min(found.side, max_side or found.side)
        channels = channels or found.channels
        if (side, channels) == (found.side, found.channels):
            return found
        return cls(_fit_all(found.images, side, channels), found.names, found.labels, found.classes)


def load_images(
    source: Path | str,
    *,
    side: int | None = None,
    max_side: int | None = None,
    channels: int | None = None,
    class_folders: _ClassFolders = "auto",
    strict: bool = False,
    cache: bool | Path | str = True,
    progress: Progress | None = None,
) -> ImageSet:
    """The images of a folder, or of a .npy or .npz file (where only `side`, `max_side` and `channels` matter)."""
    if Path(source).is_file() or (Path(source).suffix.lower() in _ARRAYS and not Path(source).exists()):
        return ImageSet.from_file(source, side=side, max_side=max_side, channels=channels)
    return ImageSet.from_folder(
        source,
        side=side,
        max_side=max_side,
        channels=channels,
        class_folders=class_folders,
        strict=strict,
        cache=cache,
        progress=progress,
    )


def kind_of(side: int, channels: int) -> str:
    """What images of this size are, in words: for messages."""
    if side == 1:
        return f"embeddings of {channels:,} numbers"
    return f"{'grey' if channels == 1 else 'colour'} images of {side} × {side}"


# Arrays


def _as_embeddings(embeddings: NDArray[Any]) -> NDArray[np.float32]:
    """Embeddings (n, d) as images of one pixel: float32 (n, 1, 1, d). A mapped float32 array stays mapped."""
    n, width = embeddings.shape
    if 0 in embeddings.shape:
        raise InputError(f"embeddings of shape {embeddings.shape}: there is none in it")
    if embeddings.dtype.kind not in "fiu":
        raise InputError(f"embeddings of type {embeddings.dtype}: give numbers, one row for each image")
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes infinite, and is told
        numbers = np.ascontiguousarray(embeddings, dtype=np.float32)
    for start in range(0, n, 4_096):
        odd = np.flatnonzero(~np.isfinite(numbers[start : start + 4_096]).all(axis=1))
        if len(odd):
            row = start + int(odd[0])
            finite = bool(np.isfinite(embeddings[row]).all())
            what = "too large for 32 bits; scale them down" if finite else "NaN or infinite; leave it out"
            raise InputError(f"the embedding in row {row:,} has a number that is {what}")
    return numbers.reshape(n, 1, 1, width)


def _check_embedded(path: Path, width: int, side: int | None, channels: int | None) -> None:
    """An InputError unless embeddings are what is asked for."""
    if side not in (None, 1):
        raise InputError(f"{path}: has {kind_of(1, width)}, not images of {side} px; leave side out, or give images")
    if side == 1 and channels not in (None, width):
        raise InputError(f"{path}: has {kind_of(1, width)}, the model takes {channels:,}; give those it was trained on")


def _channels_last(images: NDArray[Any]) -> NDArray[Any]:
    """The images as (n, side, side, channels); the channel axis is found by its length."""
    shape = images.shape
    if images.ndim == 3:
        images = images[..., None]
    elif images.ndim != 4:
        raise InputError(
            f"images of shape {shape}: expected (n, h, w), (n, h, w, c) or (n, c, h, w), or embeddings (n, d)"
        )
    elif not _is_square(images.shape) and shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if 0 in images.shape:
        raise InputError(f"images of shape {shape}: there is no image in it")
    if images.shape[3] not in (1, 3):
        raise InputError(f"images of shape {shape}: expected 1 or 3 channels; drop alpha with images[..., :3]")
    if not _is_square(images.shape):
        raise InputError(f"images of shape {shape}: they are not square; crop or resize them first")
    if images.shape[1] == 1:
        raise InputError(f"images of shape {shape}: they have one pixel each; embeddings are given as (n, d)")
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
        right = "divide them by the most that a pixel can have (255 as a rule)"  # the same for every batch
        mend = right if low >= 0 and np.isfinite(high) else "scale them"
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
    if path.suffix.lower() not in _ARRAYS:
        raise InputError(f"{path}: not a .npy or .npz file; give one of these or a folder of images")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        _check_beginning(path)
        if path.suffix.lower() == ".npy":
            return {"images": np.load(path, mmap_mode="r", allow_pickle=False)}
        with np.load(path, allow_pickle=False) as arrays:
            return _known_arrays(path, arrays)
    except InputError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: cannot be read as arrays of numbers ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    """Why NumPy gave up, without its advice to unpickle."""
    if any(said in str(error) for said in ("allow_pickle", "Python objects")):
        return "it holds Python objects"
    return getattr(error, "strerror", None) or one_line(error)


def _check_beginning(path: Path) -> None:
    """An InputError where a file is not what its suffix says; NumPy would take it for a pickle."""
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        if not file.read(6).startswith(_ARRAYS[suffix]):
            made_by = "numpy.save" if suffix == ".npy" else "numpy.savez"
            raise InputError(f"{path}: cannot be read: it is no {suffix} file; write it with {made_by}")


def _known_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    keys = {key.lower(): key for key in arrays}
    spellings = {
        "images": ("images", "embeddings", "features", "x", "data"),
        "labels": ("labels", "y"),
        "names": ("names",),
        "classes": ("classes",),
    }
    found = {ours: next((keys[key] for key in theirs if key in keys), None) for ours, theirs in spellings.items()}
    if found["images"] is None:
        raise InputError(
            f"{path}: no array named images, embeddings, x or data in it (it has {', '.join(keys) or 'none'})"
        )
    chosen = {ours: arrays[key] for ours, key in found.items() if key is not None}
    return {ours: array.astype(str) if array.dtype.kind == "S" else array for ours, array in chosen.items()}


def _fit_all(images: NDArray[np.uint8], side: int, channels: int) -> NDArray[np.uint8]:
    fitted = np.empty((len(images), side, side, channels), np.uint8)
    for row, image in enumerate(images):
        fitted[row] = fit_square(Image.fromarray(image if image.shape[2] == 3 else image[..., 0]), side, channels)
    return fitted


# Folders


def _check_folder(folder: Path) -> None:
    if folder.is_file():
        raise InputError(f"{folder}: a file; give a folder of images, or a .npy or .npz file")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")


def _check_size(side: int | None, max_side: int | None, channels: int | None) -> None:
    if side == 1 and channels is not None:  # a model's size
        raise InputError(f"the model takes {kind_of(1, channels)}; give a .npy or .npz file of them, not images")
    for name, pixels in (("side", side), ("max_side", max_side)):
        if pixels is not None and pixels < 8:
            raise InputError(f"{name} {pixels}: images need at least 8 pixels a side")
        if pixels is not None and pixels > 4_096:  # 50 MB an image: a slip of the keys would fill memory and disk
            raise InputError(f"{name} {pixels:,}: images can have at most 4,096 pixels a side")
    if channels not in (None, 1, 3):
        raise InputError(f"channels {channels}: must be 1 (grey) or 3 (colour)")


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
