"""Sorting images into one folder per cluster, all of them or none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_folder, write_error
from constraintmatch.data.datasets import DATASETS
from constraintmatch.evaluation.metrics import Predictions
from constraintmatch.pipeline.sources import Data

__all__ = ["check_sort_folder", "sort_images"]


def check_sort_folder(folder: Path, source: Path | str, out: Path | None = None) -> None:
    """An InputError unless the folder is new or empty, can be written, holds not `out`, and is not among the images.

    Among them, they would be counted twice.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: not an empty folder; choose another --sort-into")
    check_folder(folder)
    if out is not None and _overlap(folder.resolve(), out.resolve()):
        raise InputError(
            f"{out}: lies in {folder} or in its way, and only sorted images go there; choose another --out"
        )
    if str(source) not in DATASETS and Path(source).resolve() in (folder.resolve(), *folder.resolve().parents):
        raise InputError(f"{folder}: lies among the images, which would be found twice; choose another --sort-into")


def _overlap(one: Path, other: Path) -> bool:
    return one == other or one in other.parents or other in one.parents


def sort_images(data: Data, predictions: Predictions, folder: Path, *, link: bool = True) -> None:
    """Put each image into a folder for its cluster: as a link, as a copy, or (from arrays) as a PNG; all or none."""
    check_sort_folder(folder, data.record["source"])
    data.images.to_look_at()
    try:
        _place_all(data, predictions, folder, link)
    except BaseException as error:
        for begun in folder.glob("cluster-*/"):
            shutil.rmtree(begun, ignore_errors=True)
        if isinstance(error, OSError) and (found := write_error(error, folder)):
            raise found from None
        raise


def _place_all(data: Data, predictions: Predictions, folder: Path, link: bool) -> None:
    width, taken = len(str(predictions.n_clusters - 1)), set[str]()
    for row, (name, cluster) in enumerate(zip(data.images.names, predictions.clusters.tolist(), strict=True)):
        flat = name.replace("/", "__").replace(os.sep, "__")
        file = f"cluster-{cluster:0{width}d}/" + (flat if data.files else f"{flat}.png")
        target = folder / _untaken(file, taken)
        target.parent.mkdir(parents=True, exist_ok=True)
        _place_image(data, row, target, link)


def _untaken(file: str, taken: set[str]) -> str:
    """The name, with a number before its suffix where it is taken; case is ignored, as some disks do."""
    stem, suffix = os.path.splitext(file)  # noqa: PTH122 (the folder must stay in the stem)
    number, free = 1, file
    while free.casefold() in taken:
        number += 1
        free = f"{stem}-{number}{suffix}"
    taken.add(free.casefold())
    return free


def _place_image(data: Data, row: int, target: Path, link: bool) -> None:
    """Put one image at `target`: a link to its file or a copy of it; an image of an array becomes a PNG."""
    if data.files is None:
        from PIL import Image

        pixels = np.asarray(data.images.images[row])
        Image.fromarray(pixels[..., 0] if data.images.channels == 1 else pixels).save(target)
        return
    source = data.files / data.images.names[row]
    if not link:
        shutil.copy2(source, target)
        return
    try:
        target.symlink_to(source)
    except (NotImplementedError, PermissionError) as error:  # Windows without the right to make links
        raise InputError(f"{target}: no links can be made there ({error}); use --copy") from None
