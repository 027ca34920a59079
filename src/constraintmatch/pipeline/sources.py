"""Opening what a person names: images from a folder, a file or a data set, and the pairs over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Quiet, Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, DataSet, load_dataset
from constraintmatch.data.image_set import ImageSet, load_images

__all__ = ["ClassFolders", "Data", "OnConflict", "Pairs", "open_at", "open_data", "open_pairs", "read_pairs"]

ClassFolders = bool | Literal["auto"]
OnConflict = Literal["error", "drop", "keep"]


@dataclass(frozen=True)
class Data:
    """Opened images: those to work on, those held out for scores, the data set's row, and what opens them again."""

    images: ImageSet
    held_out: ImageSet | None
    row: DataSet | None
    record: dict[str, Any]

    @property
    def files(self) -> Path | None:
        """The folder with the images' files; None for arrays and data sets."""
        place = self.record["source"] if self.record["kind"] == "folder" else self.record.get("pictures")
        return None if place is None else Path(place)


def open_data(
    source: Path | str,
    *,
    side: int | None = None,
    max_side: int | None = None,
    channels: int | None = None,
    split: str | None = None,
    data_dir: Path | str | None = None,
    class_folders: ClassFolders = "auto",
    strict: bool = False,
    pictures: Path | str | None = None,
    reporter: Reporter | None = None,
) -> Data:
    """The images of a folder, of a .npy or .npz file, or of a data set by name (`./digits` means a folder).

    A file may hold embeddings instead; `pictures` is then the folder of the images that they stand for.

    A data set without `split` gives its training images, with the test images held out. `max_side` bounds a side that
    is left to the images; a data set keeps its own.
    """
    reporter = reporter or Quiet()
    if str(source) in DATASETS:
        if pictures is not None:
            raise InputError(f"--pictures goes with embeddings; {source} has images of its own")
        return _open_dataset(str(source), side, channels, split, data_dir, reporter)
    path = Path(os.path.abspath(source))  # noqa: PTH100 (resolve would follow links)
    if not path.exists():
        raise InputError(f"{path}: no such folder; name one that exists, or a data set: {', '.join(DATASETS)}")
    with _decoding(reporter) as progress:
        images = load_images(
            path,
            side=side,
            max_side=max_side,
            channels=channels,
            class_folders=class_folders,
            strict=strict,
            progress=progress,
        )
    if pictures is not None:
        images = _with_pictures(path, images, Path(pictures), class_folders, reporter)
    _say_skipped(images, reporter)
    record: dict[str, Any] = {"kind": "file" if path.is_file() else "folder", "name": path.name, "source": str(path)}
    record |= {"side": images.side, "channels": images.channels, "class_folders": class_folders}
    if pictures is not None:
        record["pictures"] = os.path.abspath(pictures)  # noqa: PTH100
    return Data(images, None, None, record)


def open_at(
    source: Path | str, size: tuple[int, int] | None, part: str, *, split: str | None = None, **how: Any
) -> Data:
    """The images at a model's side and channels, `open_data` told `how`.

    A data set has a size of its own, and of it `split` is taken, or without one `part`.
    """
    is_dataset = str(source) in DATASETS
    side, channels = (None, None) if is_dataset or size is None else size
    return open_data(source, side=side, channels=channels, split=(split or part) if is_dataset else None, **how)


def _with_pictures(
    path: Path, images: ImageSet, folder: Path, class_folders: ClassFolders, reporter: Reporter
) -> ImageSet:
    if not images.embedded:
        raise InputError(f"{path}: has images, which are shown themselves; --pictures goes with embeddings")
    with _decoding(reporter) as progress:
        pictures = ImageSet.from_folder(folder, class_folders=class_folders, progress=progress)
    _say_skipped(pictures, reporter)
    try:
        return images.with_pictures(pictures)
    except InputError as error:
        raise error.at(f"{path} and {folder}") from None


def _open_dataset(
    name: str,
    side: int | None,
    channels: int | None,
    split: str | None,
    data_dir: Path | str | None,
    reporter: Reporter,
) -> Data:
    row = DATASETS[name]
    if side not in (None, row.side) or channels not in (None, row.channels):
        size = f"{row.side} px and {row.channels} channel(s)"
        raise InputError(f"{name} has images of {size}, not {side or row.side} px and {channels or row.channels}")
    folder = None if data_dir is None else os.path.abspath(data_dir)  # noqa: PTH100
    with _decoding(reporter) as progress:
        images = load_dataset(name, split or "train", folder, progress=progress)
        held_out = load_dataset(name, "test", folder, progress=progress) if split is None else None
    record = {"kind": "dataset", "name": name, "source": name, "split": split, "data_dir": folder}
    return Data(images, held_out, row, record | {"side": row.side, "channels": row.channels})


@contextmanager
def _decoding(reporter: Reporter) -> Iterator[Callable[[int, int], None]]:
    """Shows the decoding of a folder's files; nothing when the cache serves."""

    def progress(done: int, total: int) -> None:
        if done == 0:
            reporter.start("reading images", total)
        reporter.update(done)

    try:
        yield progress
    finally:
        reporter.stop()


def _say_skipped(images: ImageSet, reporter: Reporter, limit: int = 10) -> None:
    if not images.skipped:
        return
    reporter.say(f"{len(images.skipped):,} files skipped (--strict, or --set strict=yes, stops instead):")
    for skip in images.skipped[:limit]:
        reporter.say(f"  {skip.name}: {skip.reason}")
    if len(images.skipped) > limit:
        reporter.say(f"  … and {len(images.skipped) - limit:,} more")


@dataclass(frozen=True)
class Pairs:
    """Constraints to train on, and those set aside to judge the model by."""

    training: Constraints
    held_out: Constraints | None = None


def open_pairs(
    path: Path | str,
    images: ImageSet,
    *,
    columns: str | None = None,
    on_conflict: OnConflict = "error",
    close: bool = False,
    holdout: float = 0.0,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> Pairs:
    """The pairs of a file over these images, without contradictions; a share set aside, then the rest closed."""
    read = read_pairs(path, images, columns=columns)
    try:
        kept = read.resolve(on_conflict, names=images.names)
    except InputError as error:
        raise error.at(path) from None
    if len(kept) < len(read) and reporter is not None:
        reporter.say(f"{len(read) - len(kept):,} of {len(read):,} pairs contradict others and are left out")
    held_out = None
    if holdout:
        kept, held_out = _set_aside(kept, holdout, seed)
    return Pairs(kept.close() if close else kept, held_out)


def read_pairs(path: Path | str, images: ImageSet, *, columns: str | None = None) -> Constraints:
    """The pairs of a file over these images, at least one; a pair with an image that was skipped says so."""
    unread = {skip.name: skip.reason for skip in images.skipped}
    read = Constraints.read(path, names=images.names, columns=columns, unread=unread)
    if not len(read):
        raise InputError(f"{path}: there are no pairs in it; sample or answer some first")
    return read


def _set_aside(constraints: Constraints, share: float, seed: int) -> tuple[Constraints, Constraints]:
    merged = constraints.merged()  # else a pair may stand in both parts
    n = round(share * len(merged)) if 0 < share < 1 else 0
    if not 0 < n < len(merged):
        raise InputError(f"holdout_pairs={share:g} of {len(merged):,} pairs leaves none on one side; try 0.2")
    return merged.split(n, seed=seed)
