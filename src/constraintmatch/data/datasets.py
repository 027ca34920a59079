"""The paper's five data sets and scikit-learn's digits: their table, and the readers of their published files.

A reader gives one part of its set and reads only that part: CIFAR's pickles, STL-10's .bin files, ImageNet's folders.
"""

import pickle
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch._internal.files import read_errors
from constraintmatch.data.cache import decode_cached
from constraintmatch.data.decoding import FolderRequest, Progress
from constraintmatch.data.image_files import ImageFile, find_files
from constraintmatch.data.image_set import ImageSet

STEPS = 20_000  # of each of the paper's trainings

_SPLIT_SEED = 0  # one split for all folds: a fold is a new sample of constraints, never of images
_SPLITS = ("train", "val", "test", "train+val", "train+test", "unlabelled")
_AGAIN = "unpack the archive again"


@dataclass(frozen=True)
class DataSet:
    """A data set as the paper (its appendix) and the published code use it."""

    name: str
    title: str
    n_clusters: int
    splits: tuple[int, int, int]  # train, val, test
    load: Callable[[Path | None, str, Progress | None], ImageSet]  # a published part: train, test, perhaps unlabelled
    tuned: Mapping[str, Mapping[str, float]]  # settings by method
    side: int
    backbone: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pairs_per_step: int
    images_per_step: int
    n_validation_constraints: int
    channels: int = 3
    train_plus_test: bool = True  # whether the paper's Train(+Test) holds the test images
    bundled: bool = False  # whether it comes with scikit-learn and needs no folder
    unlabelled: bool = False  # whether images without labels were published with it
    flip: bool = True  # whether a mirrored image is still of its class
    without: tuple[str, ...] = ()  # operations of the strong view that spoil these images
    folders: tuple[str, ...] = ()  # of its classes, in a tree of ImageNet


def load_dataset(
    name: str, split: str, data_dir: Path | str | None = None, *, progress: Progress | None = None
) -> ImageSet:
    """The images of one split, with labels.

    "train" and "val" are parts of the published training images, class by class and always the same; "train+val" is all
    of them, "test" the published test images. "train+test" is what the paper's Train(+Test) figures are computed on:
    all training and test images (60,000 of CIFAR, 13,000 of STL-10); of the ImageNet sets, which the field evaluates
    without test images, all training images. "unlabelled" (STL-10 only) has no labels. Only the files of the split are
    read; `progress(done, total)` is called while files are decoded, not when they come from the cache.
    """
    if name not in DATASETS:
        raise InputError(f"data set {name!r} is not known", fix=f"there are {', '.join(DATASETS)}")
    row = DATASETS[name]
    known = _SPLITS if row.unlabelled else _SPLITS[:-1]
    if split not in known:
        raise InputError(f"split {split!r} is not known", fix=f"there are {', '.join(known)} of {name}")
    folder = None if data_dir is None else Path(data_dir)
    if split in ("test", "unlabelled"):
        return row.load(folder, split, progress)
    train = row.load(folder, "train", progress)
    if split == "train+test" and row.train_plus_test:
        return _join(train, row.load(folder, "test", progress))
    if split in ("train+val", "train+test"):
        return train
    n_train, n_val, _ = row.splits
    val = train.draw(len(train) * n_val // (n_train + n_val), seed=_SPLIT_SEED)  # a smaller copy keeps the share
    return train.take(val if split == "val" else ~val)


def _join(first: ImageSet, second: ImageSet) -> ImageSet:
    assert first.labels is not None
    assert second.labels is not None
    images, labels = (np.concatenate(both) for both in ((first.images, second.images), (first.labels, second.labels)))
    return ImageSet(images, first.names + second.names, labels, first.classes)


def _load_digits(_: Path | None, part: str, __: Progress | None = None) -> ImageSet:
    """scikit-learn's 1,797 digits of 8 x 8 as 1,297 and 500: they have no test set of their own."""
    from sklearn.datasets import load_digits

    bundled = load_digits()
    pixels = np.rint(bundled.images * (255 / 16)).astype(np.uint8)[..., None]  # ink from 0 to 16
    names = tuple(f"digits/{row:05d}" for row in range(len(pixels)))
    everything = ImageSet(pixels, names, bundled.target.astype(np.int64), tuple("0123456789"))
    return everything.split(500, seed=_SPLIT_SEED)[part == "test"]


def _data_folder(name: str, data_dir: Path | None, layout: str) -> Path:
    if data_dir is None:
        raise InputError(f"say where it is (--data-dir): the folder that holds {layout}", name)
    return data_dir


def _find(name: str, data_dir: Path | None, folder: str, files: tuple[str, ...]) -> Path:
    """The folder that holds all these files: `data_dir/folder` or `data_dir` itself."""
    layout = f"{folder} with {', '.join(files)}"
    data_dir = _data_folder(name, data_dir, layout)
    places = [data_dir / folder, data_dir]
    place = next((place for place in places if any((place / file).is_file() for file in files)), places[0])
    missing = [file for file in files if not (place / file).is_file()]
    if len(missing) == len(files):
        raise InputError(f"{name} is not there", data_dir, f"looked for {layout}, in it or below it")
    if missing:
        raise InputError(f"{', '.join(missing)} missing", place, f"{name} needs {layout}")
    return place


def _number(part: str, images: NDArray[np.uint8], *labels_and_classes: Any) -> ImageSet:
    return ImageSet(images, tuple(f"{part}/{row:05d}" for row in range(len(images))), *labels_and_classes)


# CIFAR


def _read_cifar10(data_dir: Path | None, part: str, _: Progress | None = None) -> ImageSet:
    files = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
    folder = _find("cifar10", data_dir, "cifar-10-batches-py", (*files["train"], *files["test"], "batches.meta"))
    return _cifar_images(folder, files[part], "labels", part, _class_names(folder / "batches.meta", "label_names"))


def _read_cifar100_20(data_dir: Path | None, part: str, _: Progress | None = None) -> ImageSet:
    """CIFAR-100 with its 20 superclasses as labels."""
    folder = _find("cifar100-20", data_dir, "cifar-100-python", ("train", "test", "meta"))
    return _cifar_images(folder, (part,), "coarse_labels", part, _class_names(folder / "meta", "coarse_label_names"))


def _cifar_images(
    folder: Path, files: tuple[str, ...], label_key: str, part: str, classes: tuple[str, ...]
) -> ImageSet:
    """The images of some files in CIFAR's form: rows of 3,072 bytes, 1,024 for each channel."""
    batches = [_cifar_batch(folder / file, label_key, len(classes)) for file in files]
    images = np.concatenate([pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for pixels, _ in batches])
    return _number(part, np.ascontiguousarray(images), np.concatenate([labels for _, labels in batches]), classes)


def _cifar_batch(path: Path, label_key: str, n_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = _unpickle(path)
    pixels, labels = _pixels(content.get("data")), content.get(label_key)
    if pixels is None or not isinstance(labels, list) or not labels:
        raise InputError(f"not in the published form (no data or {label_key} in it)", path, _AGAIN)
    if len(labels) != len(pixels) or not all(type(label) is int and 0 <= label < n_classes for label in labels):
        raise InputError(f"{label_key} and data do not fit together", path, _AGAIN)
    return pixels, np.array(labels, np.int64)


def _pixels(data: object) -> NDArray[np.uint8] | None:
    """The bytes (n, 3072) of a pickled array; None if it is anything else."""
    match data:
        case Pickled(state=(_, (int(n), 3072), Pickled(given=(b"u1" | "u1", *_)), fortran, bytes(raw))):
            if len(raw) == 3072 * n:
                return np.frombuffer(raw, np.uint8).reshape((n, 3072), order="F" if fortran else "C")
    return None


def _class_names(path: Path, key: str) -> tuple[str, ...]:
    names = _unpickle(path).get(key)
    if not isinstance(names, list) or not names:
        raise InputError(f"not in the published form (no {key} in it)", path, _AGAIN)
    return tuple(map(_text, names))


def _unpickle(path: Path) -> dict[str, Any]:
    """The dictionary of a published pickle; a foreign pickle runs nothing and is an InputError."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # broken bytes make the unpickler raise nearly anything
        raise InputError(f"cannot be read ({one_line(error)})", path, _AGAIN) from None
    if not isinstance(content, dict):
        raise InputError("not in the published form", path, _AGAIN)
    return {_text(key): value for key, value in content.items()}


def _text(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


class Pickled:
    """Replaces a pickled array or NumPy type and keeps what the file says of it, so that not even NumPy acts on it."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[Pickled]:
        known = {"numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct"}
        if f"{module}.{name}".replace("._core.", ".core.") not in known:  # NumPy 2 writes _core
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data set needs")
        return Pickled


# STL-10

_STL10_FILES = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")
_STL10_IMAGE = 3 * 96 * 96


def _read_stl10(data_dir: Path | None, part: str, _: Progress | None = None) -> ImageSet:
    """The 100,000 unlabelled images take 2.8 GB of memory; their file may be missing and is read only for them."""
    folder = _find("stl10", data_dir, "stl10_binary", _STL10_FILES)
    if part == "unlabelled":
        return _number(part, _stl10_pixels(folder / "unlabeled_X.bin"))
    labels = _stl10_labels(folder / f"{part}_y.bin")
    path = folder / "class_names.txt"
    with read_errors(path):
        classes = tuple(_text(path.read_bytes()).split())
    if len(classes) != 10:
        raise InputError(f"{len(classes):,} names, not 10", path, _AGAIN)
    return _number(part, _stl10_pixels(folder / f"{part}_X.bin", len(labels)), labels, classes)


def _stl10_pixels(path: Path, n_expected: int | None = None) -> NDArray[np.uint8]:
    """The images (n, 96, 96, 3) of a file that holds (n, channel, column, row): MATLAB wrote it, columns first."""
    if not path.is_file():
        raise InputError("missing", path, "unpack stl10_binary.tar.gz again, which holds it")
    size = path.stat().st_size
    n_images, rest = divmod(size, _STL10_IMAGE)
    if rest or not n_images:
        whole = f"not a whole number of images of {_STL10_IMAGE:,} bytes (3 x 96 x 96)"
        raise InputError(f"{size:,} bytes, {whole}", path, _AGAIN)
    if n_expected not in (None, n_images):
        raise InputError(f"{n_images:,} images, but {n_expected:,} labels", path, _AGAIN)
    with read_errors(path):  # mapped: the copy is then the only one in memory
        planes = np.memmap(path, np.uint8, mode="r", shape=(n_images, 3, 96, 96))
        return np.ascontiguousarray(planes.transpose(0, 3, 2, 1))


def _stl10_labels(path: Path) -> NDArray[np.int64]:
    """The labels from 0; the file counts from 1."""
    with read_errors(path):
        numbers = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64)
    if not len(numbers):
        raise InputError("empty", path, _AGAIN)
    wrong = np.flatnonzero((numbers < 1) | (numbers > 10))
    if len(wrong):
        raise InputError(f"label {numbers[wrong[0]]} of image {wrong[0]:,} is not one of 1 to 10", path, _AGAIN)
    return numbers - 1


# ImageNet

_LEVELS = {"train": "train", "test": "val"}  # ImageNet's val images are the papers' test images


def _read_imagenet(name: str, data_dir: Path | None, part: str, progress: Progress | None = None) -> ImageSet:
    """The images of some classes of an ImageNet tree, 224 pixels a side, memory-mapped.

    The tree is train/CLASS/*.JPEG and val/CLASS/*.JPEG. Only these classes are decoded, once: later calls find them in
    the user's cache folder.
    """
    classes = DATASETS[name].folders
    root = _find_tree(name, classes, data_dir, _LEVELS[part])
    by_class = [_class_files(root, f"{_LEVELS[part]}/{label}") for label in classes]
    request = FolderRequest(root, tuple(file for files in by_class for file in files), 224, None, 3, progress)
    images, names, skipped = decode_cached(request, suffix=f"-{name}-{part}")
    if skipped:
        count = f"{len(skipped):,} of {len(request.files):,} images cannot be read"
        raise InputError(f"{skipped[0].reason} ({count})", root / skipped[0].name, _AGAIN)
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in by_class])
    return ImageSet(images, names, labels.astype(np.int64), classes)


def _find_tree(name: str, classes: tuple[str, ...], data_dir: Path | None, level: str) -> Path:
    """The root of the tree, in which the level (train or val) has all the classes."""
    layout = f"train/CLASS/*.JPEG and val/CLASS/*.JPEG, where CLASS is {', '.join(classes)}"
    data_dir = _data_folder(name, data_dir, layout)
    roots = [
        root
        for root in (data_dir, data_dir / "imagenet")
        if any((root / place / label).is_dir() for place in _LEVELS.values() for label in classes)
    ]
    if not roots:
        raise InputError(f"{name} is not there", data_dir, f"looked for {layout}, in it or in imagenet below it")
    folder = roots[0] / level
    missing = [label for label in classes if not (folder / label).is_dir()]
    if len(missing) == len(classes):
        hint = "; the archive of val images has none: sort them by class" if level == "val" else ""
        raise InputError("no class folders there", folder, f"{name} needs {layout}{hint}")
    if missing:
        raise InputError(f"class folder {', '.join(missing)} missing", folder, f"{name} needs {layout}")
    return roots[0]


def _class_files(root: Path, folder: str) -> list[ImageFile]:
    """The files of a class, named from the root of the tree."""
    found, unread = find_files(root / folder)
    if unread:
        raise InputError(f"{unread[0].name}: {unread[0].reason}", root / folder, _AGAIN)
    if not found:
        raise InputError("no images in this class folder", root / folder, _AGAIN)
    return [file._replace(name=f"{folder}/{file.name}") for file in found]


# The table


def _make(name: str, row: dict[str, Any]) -> DataSet:
    """A data set of datasets.toml, with settings by method from those published for ConstraintMatch.

    For the other two only CIFAR-100-20's pseudo_label values are published (the same lr and weight, confidence 0.95);
    elsewhere they take ConstraintMatch's, and the paper's search grid holds them all.
    """
    lr, pseudo_weight, max_entropy = row.pop("tuned")
    tuned = {
        "constrained": {"lr": lr},
        "pseudo_label": {"lr": lr, "pseudo_weight": pseudo_weight, "min_confidence": 0.95},
        "constraintmatch": {"lr": lr, "pseudo_weight": pseudo_weight, "max_entropy": max_entropy},
    }
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return DataSet(name=name, load=_READERS.get(name) or partial(_read_imagenet, name), tuned=tuned, **plain)


_READERS = {"digits": _load_digits, "cifar10": _read_cifar10, "cifar100-20": _read_cifar100_20, "stl10": _read_stl10}
_TABLE = files("constraintmatch.data").joinpath("datasets.toml").read_text(encoding="utf-8")
DATASETS = {name: _make(name, row) for name, row in tomllib.loads(_TABLE).items()}
