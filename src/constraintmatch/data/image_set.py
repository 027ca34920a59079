"""Images or embeddings with names: from arrays, .npy/.npz files, folders and shards decoded once into a cache."""

import hashlib
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch._internal.files import check_memory
from constraintmatch.data import image_files
from constraintmatch.data.cache import decode_cached
from constraintmatch.data.decoding import FolderRequest, Progress, fit_squares, pixels_of
from constraintmatch.data.image_files import SHARDS, SUFFIXES, Skipped

_ClassFolders = bool | Literal["auto"]
_ARRAYS = {".npy": (b"\x93NUMPY", "numpy.save"), ".npz": (b"PK", "numpy.savez")}  # how it begins, what writes it


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
    pictures: "ImageSet | None" = None  # of embeddings: the images that they were made of, row by row

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        labels = "no labels" if self.labels is None else f"{len(np.unique(self.labels)):,} classes"
        return f"ImageSet({len(self):,} {kind_of(self.side, self.channels)}, {labels})"

    @property
    def side(self) -> int:
        """Height and width in pixels."""
        return int(self.images.shape[1])

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return int(self.images.shape[3])

    @property
    def embedded(self) -> bool:
        """Whether these are embeddings."""
        return self.side == 1

    @property
    def shown(self) -> "ImageSet | None":
        """What can be shown: the images themselves, or the pictures of embeddings where they are known."""
        return self.pictures if self.embedded else self

    def to_look_at(self) -> "ImageSet":
        """What can be shown; an InputError where there is nothing."""
        if self.shown is None:
            raise InputError("embeddings cannot be looked at: name the folder of their images with --pictures")
        return self.shown

    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean of each number of the embeddings, and their common standard deviation, once for each number.

        It is a common one because what varies little in an embedding matters little, and should stay small. A deviation
        beyond the range of 32 bits is an InputError.
        """
        flat = self.images.reshape(len(self), -1)
        mean = flat.mean(axis=0, dtype=np.float64)
        variance = sum(float(np.square(flat[at : at + 4_096] - mean).sum()) for at in range(0, len(flat), 4_096))
        spread = (variance / flat.size) ** 0.5 or 1.0
        if not 1e-37 < spread < 1e37:
            problem = f"the embeddings have a standard deviation of {spread:.0e}, beyond 32 bits"
            raise InputError(problem, fix="scale them")
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
            raise InputError("pictures go with embeddings", fix="these are images, and are shown themselves")
        numbered = self.names == image_files.check_names(None, len(self))
        if numbered and len(self) != len(pictures):
            fix = "give one picture for each, or a .npz file with their names"
            raise InputError(f"{len(self):,} embeddings without names and {len(pictures):,} pictures", fix=fix)
        if not numbered and self.names != pictures.names:
            rows = pictures.rows()
            if (odd := next((name for name in self.names if name not in rows), None)) is not None:
                raise InputError(
                    f"there is no picture named {odd!r}", fix="names are paths below the folder of pictures"
                )
            pictures = pictures.take([rows[name] for name in self.names])
        labelled = pictures if self.labels is None else self
        found = replace(self, names=pictures.names, pictures=pictures)
        return replace(found, labels=labelled.labels, classes=labelled.classes)

    def resized(self, side: int, channels: int) -> "ImageSet":
        """The images at this size; the same set if they have it."""
        if (side, channels) == (self.side, self.channels):
            return self
        return ImageSet(fit_squares(self.images, side, channels), self.names, self.labels, self.classes)

    def draw(self, n: int, *, seed: int) -> NDArray[np.bool_]:
        """A mask of n images drawn at random; where labels exist, each class gives its share."""
        if not 0 <= n <= len(self):
            raise InputError(f"cannot draw {n:,} images: the set has {len(self):,}")
        random = np.random.default_rng(seed)
        labels = np.zeros(len(self), np.int64) if self.labels is None else self.labels
        kinds, sizes = np.unique(labels, return_counts=True)
        shares, rest = np.divmod(sizes * n, max(len(self), 1))
        shares[np.argsort(-rest, kind="stable")[: n - shares.sum()]] += 1  # the largest remainders
        drawn = np.zeros(len(self), dtype=bool)
        for kind, share in zip(kinds, shares, strict=True):
            drawn[random.permutation(np.flatnonzero(labels == kind))[:share]] = True
        return drawn

    def split(self, n_second: int, *, seed: int) -> tuple["ImageSet", "ImageSet"]:
        """Two parts, the second of `n_second` images; the order stays, and of known classes each part has its share."""
        second = self.draw(n_second, seed=seed)
        return self.take(~second), self.take(second)

    def fingerprint(self) -> str:
        """16 hex digits of the shape, the names and the pixels of up to 64 images; other images give other digits."""
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
        pixels = _as_embeddings(given) if given.ndim == 2 else pixels_of(given)
        words = image_files.check_names(names, len(pixels))
        if labels is None:
            return cls(pixels, words)
        of_classes = None if classes is None else tuple(map(str, classes))
        return cls(pixels, words, *_check_labels(np.asarray(labels), len(pixels), of_classes))

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
        """The images below a folder, named by relative path and sorted by name; or in tar or Parquet shards, in order.

        Each image is turned as its EXIF says, put on white where it is transparent, resized so that its shorter side is
        `side`, and cropped to the central square; one that has that size already keeps its pixels. Without `side`: the
        common size of equal squares of at most 96 pixels, else the largest of 96, 64, 32, 16, 8 not over the median
        shorter side; at most `max_side`, where given. Without `channels`: 1 when every file is grey, else 3.

        `class_folders`: the first part of each path is the image's class (for evaluation only); "auto" does so when all
        images are in two or more sub-folders; labels in shards go first. Files that cannot be read are in `skipped`;
        with `strict` they are an error. Decoded images are kept in `cache` (True: the user's cache folder, False:
        nowhere) until a file changes; `progress(done, total)` is called while files are decoded.
        """
        folder = Path(folder)
        _check_size(side, max_side, channels)
        files, unread = image_files.find_images(folder)
        if not files and not unread:
            raise InputError(f"no images there (looked for {', '.join(sorted(SUFFIXES))} at any depth)", folder)
        request = FolderRequest(folder, tuple(files), side, None if side else max_side, channels, progress)
        images, names, broken = decode_cached(request, cache)
        skipped = tuple(sorted([*unread, *broken], key=lambda skip: skip.name))
        if skipped and (strict or not names):
            others = f" (and {len(skipped) - 1:,} more)" if len(skipped) > 1 else ""
            fix = "repair or remove it, or read without strict" if strict else "no image could be read"
            raise InputError(f"{skipped[0].name}: {skipped[0].reason}{others}", folder, fix)
        marks = {file.name: file.label for file in files if file.label is not None}
        if class_folders and all(name in marks for name in names):
            return cls(images, names, *_check_labels(np.array([*map(marks.get, names)]), len(names), None), skipped)
        return cls(images, names, *_labels_from_paths(folder, names, class_folders), skipped)

    @classmethod
    def from_file(
        cls, path: Path | str, *, side: int | None = None, max_side: int | None = None, channels: int | None = None
    ) -> "ImageSet":
        """Images or embeddings from a .npy file (memory-mapped) or a .npz file, or embeddings from Parquet files.

        A .npz holds `images` or `embeddings` (or x, data) and perhaps `labels` (or y), `names`, `classes`. Images of
        another size are converted to `side` (or, where they are larger, to `max_side`) and `channels`.
        """
        path = Path(path)
        shards = image_files.embeddings_in(path)
        arrays = image_files.read_embeddings(shards) if shards else _read_arrays(path)
        try:
            found = cls.from_arrays(arrays.pop("images"), **arrays)
        except InputError as error:
            raise error.at(path) from None
        if found.embedded:
            has = f"has {kind_of(1, found.channels)}"
            if side not in (None, 1):
                raise InputError(f"{has}, not images of {side} px", path, "leave side out, or give images")
            if side == 1 and channels not in (None, found.channels):
                raise InputError(f"{has}, the model takes {channels:,}", path, "give those it was trained on")
            return found
        _check_size(side, max_side, channels)
        return found.resized(side or min(found.side, max_side or found.side), channels or found.channels)


def load_images(source: Path | str, **how: Any) -> ImageSet:
    """The images of a folder or shard, or of a .npy or .npz file, for which only the size of `from_folder` counts."""
    path = Path(source)
    folder = path.is_dir() or path.suffix in SHARDS or (path.suffix.lower() not in _ARRAYS and not path.exists())
    if folder and not image_files.embeddings_in(path):
        return ImageSet.from_folder(path, **how)
    return ImageSet.from_file(path, **{name: how[name] for name in ("side", "max_side", "channels") if name in how})


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
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes infinite, an error below
        numbers = np.ascontiguousarray(embeddings, dtype=np.float32)
    for start in range(0, n, 4_096):
        odd = np.flatnonzero(~np.isfinite(numbers[start : start + 4_096]).all(axis=1))
        if len(odd):
            row = start + int(odd[0])
            finite = bool(np.isfinite(embeddings[row]).all())
            what = ("too large for 32 bits", "scale them down") if finite else ("NaN or infinite", "leave it out")
            raise InputError(f"the embedding in row {row:,} has a number that is {what[0]}", fix=what[1])
    return numbers.reshape(n, 1, 1, width)


def _check_labels(
    labels: NDArray[Any], n_images: int, classes: tuple[str, ...] | None
) -> tuple[NDArray[np.int64], tuple[str, ...] | None]:
    """Labels as int64 and their classes; words are numbered in the order of `classes`, else in alphabetic order."""
    if labels.size != n_images or labels.shape[:1] != (n_images,):  # (n, 1) is taken as (n,)
        raise InputError(f"labels of shape {labels.shape} for {n_images:,} images: give one label for each image")
    labels = labels.reshape(-1)
    if labels.dtype.kind in "US":
        return _number_words(labels.astype(str).tolist(), classes)
    whole = labels.dtype.kind in "iu" or (labels.dtype.kind == "f" and bool(np.all(labels == np.floor(labels))))
    if not whole or labels.min() < 0:
        fix = "leave labels out when they are not known"
        raise InputError("labels must be whole numbers from 0, or words", fix=fix)
    if classes is not None and labels.max() >= len(classes):
        raise InputError(f"label {labels.max():g} has no name: there are {len(classes):,} classes")
    return labels.astype(np.int64), classes


def _number_words(words: list[str], classes: tuple[str, ...] | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    classes = tuple(sorted(set(words))) if classes is None else classes
    numbers = {word: number for number, word in enumerate(classes)}
    if (unknown := next((word for word in words if word not in numbers), None)) is not None:
        raise InputError(f"label {unknown!r} is not one of the classes {', '.join(classes)}")
    return np.array([numbers[word] for word in words], np.int64), classes


# Files and folders


def _read_arrays(path: Path) -> dict[str, Any]:
    """The arrays of a file by our names for them; never unpickles."""
    suffix = path.suffix.lower()
    if suffix not in _ARRAYS:
        raise InputError("not a .npy or .npz file", path, "give one, a .tar or .parquet file, or a folder of images")
    if not path.is_file():
        raise InputError("no such file", path)
    begins, made_by = _ARRAYS[suffix]
    try:
        with path.open("rb") as file:
            known = file.read(6).startswith(begins)
        if not known:  # NumPy would take it for a pickle
            raise InputError(f"cannot be read: it is no {suffix} file", path, f"write it with {made_by}")
        if suffix == ".npy":
            return {"images": np.load(path, mmap_mode="r", allow_pickle=False)}
        with np.load(path, allow_pickle=False) as arrays:
            return _known_arrays(path, arrays)
    except InputError:
        raise
    except (MemoryError, OverflowError):
        raise InputError("claims more data than fits into memory", path, f"write it with {made_by}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        if "allow_pickle" in reason or "Python objects" in reason:  # without the advice to unpickle
            reason = "it holds Python objects"
        raise InputError(f"cannot be read as arrays of numbers ({reason})", path) from None


def _known_arrays(path: Path, arrays: Any) -> dict[str, Any]:
    keys = {key.lower(): key for key in arrays}
    spellings = {"images": ("images", "embeddings", "features", "x", "data"), "labels": ("labels", "y")}
    spellings |= {"names": ("names",), "classes": ("classes",)}
    found = {ours: next((keys[key] for key in theirs if key in keys), None) for ours, theirs in spellings.items()}
    if found["images"] is None:
        has = ", ".join(keys) or "none"
        raise InputError(f"no array named images, embeddings, x or data in it (it has {has})", path)
    sizes = {info.filename: info.file_size for info in arrays.zip.infolist()}
    wanted = sum(sizes.get(f"{key}.npy", sizes.get(key, 0)) for key in found.values() if key is not None)
    check_memory(wanted, path, "write the images alone to a .npy file, which is read as needed")
    chosen = {ours: arrays[key] for ours, key in found.items() if key is not None}
    return {ours: array.astype(str) if array.dtype.kind == "S" else array for ours, array in chosen.items()}


def _check_size(side: int | None, max_side: int | None, channels: int | None) -> None:
    if side == 1 and channels is not None:  # a model's size
        raise InputError(f"the model takes {kind_of(1, channels)}", fix="give a .npy or .npz file of them, not images")
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
    outside = next((name for name in names if "/" not in name), None)
    words = [name.split("/", 1)[0] for name in names]
    if class_folders is False or (class_folders == "auto" and (outside is not None or len(set(words)) < 2)):
        return None, None
    if outside is not None:
        raise InputError(f"{outside} is in no class folder", folder, "move it into one or do without class folders")
    return _number_words(words, None)
