"""The published forms of the data sets, read as they were unpacked.

CIFAR's pickles, STL-10's .bin files and ImageNet's class folders; each reader gives one part of its set, and reads or
decodes only that part.
"""

import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch.data.cache import cache_place, decode_cached
from constraintmatch.data.decoding import FolderRequest, ImageFile, Progress, find_files, one_line
from constraintmatch.data.image_set import ImageSet

__all__ = ["read_cifar10", "read_cifar100_20", "read_imagenet", "read_stl10"]


def _find(name: str, data_dir: Path | None, folder: str, files: tuple[str, ...]) -> Path:
    """The folder that holds all these files: `data_dir/folder` or `data_dir` itself."""
    layout = f"{folder} with {', '.join(files)}"
    if data_dir is None:
        raise InputError(f"{name}: say where it lies (--data-dir): the folder that holds {layout}")
    places = [data_dir / folder, data_dir]
    place = next((place for place in places if any((place / file).is_file() for file in files)), places[0])
    missing = [file for file in files if not (place / file).is_file()]
    if len(missing) == len(files):
        raise InputError(f"{data_dir}: {name} is not there; looked for {layout}, in it or below it")
    if missing:
        raise InputError(f"{place}: {', '.join(missing)} missing; {name} needs {layout}")
    return place


def _numbered(part: str, n_images: int) -> tuple[str, ...]:
    return tuple(f"{part}/{row:05d}" for row in range(n_images))


# CIFAR


def read_cifar10(data_dir: Path | None, part: str, _: Progress | None = None) -> ImageSet:
    """CIFAR-10's "train" or "test" images."""
    files = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
    folder = _find("cifar10", data_dir, "cifar-10-batches-py", (*files["train"], *files["test"], "batches.meta"))
    return _cifar_images(folder, files[part], "labels", part, _class_names(folder / "batches.meta", "label_names"))


def read_cifar100_20(data_dir: Path | None, part: str, _: Progress | None = None) -> ImageSet:
    """CIFAR-100's "train" or "test" images with the 20 superclasses as labels."""
    folder = _find("cifar100-20", data_dir, "cifar-100-python", ("train", "test", "meta"))
    return _cifar_images(folder, (part,), "coarse_labels", part, _class_names(folder / "meta", "coarse_label_names"))


def _cifar_images(
    folder: Path, files: tuple[str, ...], label_key: str, part: str, classes: tuple[str, ...]
) -> ImageSet:
    """The images of some files in CIFAR's form: rows of 3,072 bytes, one channel after the other."""
    batches = [_cifar_batch(folder / file, label_key, len(classes)) for file in files]
    images = np.concatenate([pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for pixels, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    return ImageSet(np.ascontiguousarray(images), _numbered(part, len(images)), labels, classes)


def _cifar_batch(path: Path, label_key: str, n_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = _unpickle(path)
    pixels, labels = content.get("data"), content.get(label_key)
    if not isinstance(pixels, _PickledArray) or not isinstance(labels, list) or not labels:
        raise InputError(f"{path}: not in the published form (no data or {label_key} in it); unpack the archive again")
    whole = all(type(label) is int and 0 <= label < n_classes for label in labels)
    if not whole or pixels.shape != (len(labels), 3072) or len(pixels.raw) != 3072 * len(labels):
        raise InputError(f"{path}: {label_key} and data do not fit together; unpack the archive again")
    order = "F" if pixels.fortran else "C"
    rows = np.frombuffer(pixels.raw, np.uint8).reshape(pixels.shape, order=order)  # type: ignore[call-overload]
    return rows, np.array(labels, np.int64)


def _class_names(path: Path, key: str) -> tuple[str, ...]:
    names = _unpickle(path).get(key)
    if not isinstance(names, list) or not names:
        raise InputError(f"{path}: not in the published form (no {key} in it); unpack the archive again")
    return tuple(_text(name) for name in names)


def _unpickle(path: Path) -> dict[str, Any]:
    """The dictionary of a published pickle; a foreign pickle runs nothing and is an InputError."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # broken bytes make the unpickler raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: cannot be read ({reason}); unpack the archive again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: not in the published form; unpack the archive again")
    return {_text(key): value for key, value in content.items()}


def _text(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


class _PickledArray:
    """Takes the place of a pickled array and keeps its parts, so that not even NumPy acts on what the file says."""

    def __init__(self, *_: object) -> None:
        self.shape: tuple[int, ...] = ()
        self.fortran = False
        self.raw = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _PickledType) or dtype.name not in (b"u1", "u1") or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it holds an array that is not of bytes")
        self.shape, self.fortran, self.raw = tuple(shape), bool(fortran), raw


class _PickledType:
    """Takes the place of a pickled NumPy type."""

    def __init__(self, name: object, *_: object) -> None:
        self.name = name

    def __setstate__(self, _: object) -> None:
        return


class _Unpickler(pickle.Unpickler):
    _KNOWN = MappingProxyType(
        {
            ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
            ("numpy._core.multiarray", "_reconstruct"): _PickledArray,  # written again by NumPy 2
            ("numpy", "ndarray"): _PickledArray,
            ("numpy", "dtype"): _PickledType,
        }
    )

    def find_class(self, module: str, name: str) -> type[_PickledArray] | type[_PickledType]:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data set needs")
        return self._KNOWN[module, name]


# STL-10

_STL10_FILES = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")
_STL10_CLASSES = 10
_STL10_IMAGE = 3 * 96 * 96


def read_stl10(data_dir: Path | None, part: str, _: Progress | None = None) -> ImageSet:
    """STL-10's "train", "test" or "unlabelled" images.

    The 100,000 unlabelled ones take 2.8 GB of memory; their file may be missing and is not touched for other parts.
    """
    folder = _find("stl10", data_dir, "stl10_binary", _STL10_FILES)
    if part == "unlabelled":
        images = _stl10_pixels(folder / "unlabeled_X.bin")
        return ImageSet(images, _numbered(part, len(images)))
    labels = _stl10_labels(folder / f"{part}_y.bin")
    images = _stl10_pixels(folder / f"{part}_X.bin", len(labels))
    return ImageSet(images, _numbered(part, len(images)), labels, _stl10_classes(folder / "class_names.txt"))


def _stl10_pixels(path: Path, n_expected: int | None = None) -> NDArray[np.uint8]:
    """The images (n, 96, 96, 3) of a file that holds (n, channel, column, row): MATLAB wrote it, columns first."""
    if not path.is_file():
        raise InputError(f"{path}: missing; unpack stl10_binary.tar.gz again, which holds it")
    size = path.stat().st_size
    n_images, rest = divmod(size, _STL10_IMAGE)
    if rest or not n_images:
        whole = f"not a whole number of images of {_STL10_IMAGE:,} bytes (3 x 96 x 96)"
        raise InputError(f"{path}: {size:,} bytes, {whole}; unpack the archive again")
    if n_expected not in (None, n_images):
        raise InputError(f"{path}: {n_images:,} images, but {n_expected:,} labels beside it; unpack the archive again")
    try:  # mapped: the copy below is then the only one in memory
        planes = np.memmap(path, np.uint8, mode="r", shape=(n_images, 3, 96, 96))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)})") from None
    return np.ascontiguousarray(planes.transpose(0, 3, 2, 1))


def _stl10_labels(path: Path) -> NDArray[np.int64]:
    """The labels from 0; the file counts from 1."""
    numbers = np.frombuffer(_bytes(path), np.uint8).astype(np.int64)
    if not len(numbers):
        raise InputError(f"{path}: empty; unpack the archive again")
    wrong = np.flatnonzero((numbers < 1) | (numbers > _STL10_CLASSES))
    if len(wrong):
        where = f"label {numbers[wrong[0]]} of image {wrong[0]:,}"
        raise InputError(f"{path}: {where} is not one of 1 to {_STL10_CLASSES}; unpack the archive again")
    return numbers - 1


def _stl10_classes(path: Path) -> tuple[str, ...]:
    names = tuple(_text(_bytes(path)).split())
    if len(names) != _STL10_CLASSES:
        raise InputError(f"{path}: {len(names):,} names, not {_STL10_CLASSES}; unpack the archive again")
    return names


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)})") from None


# ImageNet

_IMAGENET_SIDE = 224
_LEVELS = MappingProxyType({"train": "train", "test": "val"})  # ImageNet's val images are the papers' test images
_VAL_FILE = "ILSVRC2012_val_"  # how the names of val images begin, those of train images with their class


def read_imagenet(
    name: str, classes: tuple[str, ...], data_dir: Path | None, part: str, progress: Progress | None = None
) -> ImageSet:
    """The "train" or "test" (ImageNet's val) images of some classes of an ImageNet tree, 224 pixels a side, mapped.

    The tree is train/CLASS/*.JPEG and val/CLASS/*.JPEG, or CLASS/*.JPEG with both kinds, told apart by file names. Only
    these classes are walked and decoded, once: later calls find them in the user's cache folder.
    """
    root, level = _find_tree(name, classes, data_dir, part)
    by_class = [_class_files(root, f"{level}{label}", part, flat=not level) for label in classes]
    files = tuple(file for files in by_class for file in files)
    request = FolderRequest(root, files, _IMAGENET_SIDE, None, 3, progress)
    place = cache_place(True, request)
    if place is not None:  # a cache holds one state of its folder, and several sets live in this one
        place = place.with_name(f"{place.name}-{name}-{part}")
    decoded = decode_cached(request, place)
    if decoded.broken:
        first = decoded.broken[0]
        count = f"{len(decoded.broken):,} of {len(files):,} images cannot be read"
        raise InputError(f"{root / first.name}: {first.reason} ({count}); unpack the archive again")
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in by_class])
    return ImageSet(decoded.images, decoded.names, labels.astype(np.int64), classes)


def _find_tree(name: str, classes: tuple[str, ...], data_dir: Path | None, part: str) -> tuple[Path, str]:
    """The root of the tree and what stands before the class in its paths: "train/", "val/" or nothing."""
    layout = f"train/CLASS/*.JPEG and val/CLASS/*.JPEG, where CLASS is {', '.join(classes)}"
    if data_dir is None:
        raise InputError(f"{name}: say where it lies (--data-dir): the folder that holds {layout}")
    trees = [
        (root, level)
        for root in (data_dir, data_dir / "imagenet")
        for level in ("train/", "val/", "")
        if any((root / level / label).is_dir() for label in classes)
    ]
    if not trees:
        where = "in it or in imagenet below it (CLASS/*.JPEG will do if the val images keep their published names)"
        raise InputError(f"{data_dir}: {name} is not there; looked for {layout}, {where}")
    root, found = trees[0]
    level = f"{_LEVELS[part]}/" if found else ""
    missing = [label for label in classes if not (root / level / label).is_dir()]
    if len(missing) == len(classes):
        hint = "; the archive of val images has none: sort them by class" if part == "test" else ""
        raise InputError(f"{root / level}: no class folders there; {name} needs {layout}{hint}")
    if missing:
        raise InputError(f"{root / level}: class folder {', '.join(missing)} missing; {name} needs {layout}")
    return root, level


def _class_files(root: Path, folder: str, part: str, *, flat: bool) -> list[ImageFile]:
    """The files of a class, named from the root of the tree; in a flat tree only those of the part."""
    found, unread = find_files(root / folder)
    if unread:
        raise InputError(f"{root / folder}: {unread[0].name}: {unread[0].reason}; unpack the archive again")
    if not found:
        raise InputError(f"{root / folder}: no images in this class folder; unpack the archive again")
    if flat:
        found = [file for file in found if file.name.startswith(_VAL_FILE) == (part == "test")]
    if not found:
        kind, mend = f"{_LEVELS[part]} images", "name the folder that holds train and val"
        raise InputError(f"{root / folder}: no {kind} in this class folder; {mend}")
    return [file._replace(name=f"{folder}/{file.name}") for file in found]
