"""Opening images (a folder, a file, a data set) and the pairs over them, in all the forms that people have them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import QUIET, Reporter, watched
from constraintmatch.constraints import graph
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.pairs_file import names_in
from constraintmatch.data.datasets import DATASETS, DataSet, load_dataset
from constraintmatch.data.image_set import ImageSet, load_images

ClassFolders = bool | Literal["auto"]
_SELDOM = ("triplets", "sizes of clusters")  # not counted where there are none
Pairs = Constraints | Mapping[str, Any] | Sequence[Any] | Path | str | Any  # Any: an array or a sparse matrix


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


# Images


def open_data(
    source: Path | str,
    *,
    split: str | None = None,
    data_dir: Path | str | None = None,
    pictures: Path | str | None = None,
    class_folders: ClassFolders = "auto",
    reporter: Reporter = QUIET,
    **how: Any,
) -> Data:
    """The images of a folder or shard, of a .npy or .npz file, or of a data set by name (`./digits` means a folder).

    A file may hold embeddings instead; `pictures` is then the folder of their images. A data set without `split` gives
    its training images, with the test images held out. `how` has the side, max_side, channels and strict of
    `load_images`; `max_side` bounds a side that is not asked for, and a data set keeps its own.
    """
    if str(source) in DATASETS:
        if pictures is not None:
            raise InputError(f"--pictures goes with embeddings; {source} has images of its own")
        return _open_dataset(DATASETS[str(source)], how, split, data_dir, reporter)
    path = Path(os.path.abspath(source))  # noqa: PTH100 (resolve would follow links)
    if not path.exists():
        raise InputError(f"{path}: no such folder; name one that exists, or a data set: {', '.join(DATASETS)}")
    with watched(reporter, "reading images") as progress:
        images = load_images(path, class_folders=class_folders, progress=progress, **how)
    kind = "folder" if (path / images.names[0]).is_file() else "file"  # shards have no files of images
    record: dict[str, Any] = {"kind": kind, "name": path.name, "source": str(path)}
    record |= {"side": images.side, "channels": images.channels, "class_folders": class_folders}
    if pictures is not None:
        if not images.embedded:
            raise InputError(f"{path}: has images, which are shown themselves; --pictures goes with embeddings")
        record["pictures"] = os.path.abspath(pictures)  # noqa: PTH100
        with watched(reporter, "reading images") as progress:
            shown = ImageSet.from_folder(pictures, class_folders=class_folders, progress=progress)
        _say_skipped(shown, reporter)
        try:
            images = images.with_pictures(shown)
        except InputError as error:
            raise error.at(f"{path} and {pictures}") from None
    _say_skipped(images, reporter)
    return Data(images, None, None, record)


def open_at(
    source: Path | str, size: tuple[int, int] | None, part: str, *, split: str | None = None, **how: Any
) -> Data:
    """The images at a model's side and channels; `how` is for `open_data`.

    A data set has a size of its own, and of it `split` is taken, or without one `part`.
    """
    if str(source) in DATASETS:
        return open_data(source, split=split or part, **how)
    side, channels = size or (None, None)
    return open_data(source, side=side, channels=channels, **how)


def _open_dataset(
    row: DataSet, how: Mapping[str, Any], split: str | None, data_dir: Path | str | None, reporter: Reporter
) -> Data:
    side, channels = how.get("side"), how.get("channels")
    if side not in (None, row.side) or channels not in (None, row.channels):
        size = f"{row.side} px and {row.channels} channel(s)"
        raise InputError(f"{row.name} has images of {size}, not {side or row.side} px and {channels or row.channels}")
    folder = None if data_dir is None else os.path.abspath(data_dir)  # noqa: PTH100
    with watched(reporter, "reading images") as progress:
        images = load_dataset(row.name, split or "train", folder, progress=progress)
        held_out = load_dataset(row.name, "test", folder, progress=progress) if split is None else None
    record = {"kind": "dataset", "name": row.name, "source": row.name, "split": split, "data_dir": folder}
    return Data(images, held_out, row, record | {"side": row.side, "channels": row.channels})


def _say_skipped(images: ImageSet, reporter: Reporter, limit: int = 10) -> None:
    if not images.skipped:
        return
    reporter.say(f"{len(images.skipped):,} files skipped (--strict, or --set strict=yes, stops instead):")
    for skip in images.skipped[:limit]:
        reporter.say(f"  {skip.name}: {skip.reason}")
    if len(images.skipped) > limit:
        reporter.say(f"  … and {len(images.skipped) - limit:,} more")


# Pairs of a file


def open_pairs(
    path: Path | str | Sequence[Path | str],
    images: ImageSet,
    *,
    columns: str | None = None,
    on_conflict: Literal["error", "drop", "keep"] = "error",
    close: bool = False,
    holdout: float = 0.0,
    seed: int = 0,
    reporter: Reporter = QUIET,
) -> tuple[Constraints, Constraints | None]:
    """The pairs of a file over these images, without contradictions, and the share `holdout` of them, set aside first.

    `close` adds what the others imply. Several files are read as one; triplets, labels and sizes come along.
    """
    files = path_list(path)
    read = Constraints.join([_read(file, images, columns) for file in files])
    if not len(read) and not len(read.triplets):
        raise InputError(f"{files[0]}: there are no pairs in it; sample or answer some first")
    try:
        kept = read.resolve(on_conflict, names=images.names)
    except InputError as error:
        raise (error.at(files[0]) if len(files) == 1 and not error.place else error) from None
    if len(kept) < len(read):
        reporter.say(f"{len(read) - len(kept):,} of {len(read):,} pairs contradict others and are left out")
    if len(kept.triplets) < len(read.triplets):
        found = read.triplets.error(read.triplets.cyclic(len(images)))
        reporter.say(f"{found.place}: {found.problem} and are left out")
    held_out = None
    if holdout:
        kept = kept.merged()  # else a pair may be in both parts
        n = round(holdout * len(kept)) if 0 < holdout < 1 else 0
        if not 0 < n < len(kept):
            raise InputError(f"holdout_pairs={holdout:g} of {len(kept):,} pairs leaves none on one side; try 0.2")
        kept, held_out = kept.split(n, seed=seed)
    return kept.close() if close else kept, held_out


def path_list(path: Path | str | Sequence[Path | str]) -> list[Path]:
    """One path or several as a list."""
    return [Path(path)] if isinstance(path, Path | str) else [Path(one) for one in path]


def _read(path: Path | str, images: ImageSet, columns: str | None) -> Constraints:
    unread = {skip.name: skip.reason for skip in images.skipped}
    return Constraints.read(path, names=images.names, columns=columns, unread=unread)


def read_pairs(path: Path | str, images: ImageSet, *, columns: str | None = None) -> Constraints:
    """The pairs of a file over these images, at least one; a pair with an image that was skipped says so."""
    read = _read(path, images, columns)
    if not len(read):
        raise InputError(f"{path}: there are no pairs in it; sample or answer some first")
    return read


# Pairs of labels, and what a file of pairs holds


def sample_pairs(
    source: Path | str,
    out: Path | str,
    *,
    n: int | None = None,
    per_image: int | None = None,
    balanced: bool = False,
    seed: int = 0,
    flip: float | None = None,
    flip_only: Literal["must-link", "cannot-link"] | None = None,
    **how: Any,
) -> Constraints:
    """Pairs drawn from the labels of images, written by name; an existing file is not overwritten.

    `how` is for `open_data`.
    """
    if (n is None) == (per_image is None):
        raise InputError("say how many pairs: --n PAIRS or --per-image PARTNERS, and not both")
    if (few := (n or 0) + (per_image or 0)) < 1:
        flag = "--n" if per_image is None else "--per-image"
        raise InputError(f"{flag} {few}: a file without pairs is of no use; ask for 1 or more")
    if balanced and per_image is not None:
        raise InputError("--balanced goes with --n; --per-image draws its partners from all images")
    if flip_only is not None and flip is None:
        raise InputError(f"--wrong-only {flip_only} goes with --wrong SHARE")
    if Path(out).exists():
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    check_target(out)
    images = open_at(source, None, "train", **how).images
    if images.labels is None:
        raise InputError(f"{source}: sampling needs labels; give one sub-folder for each class, or a data set")
    if per_image is not None:
        drawn = Constraints.sample_partners(images.labels, per_image, seed=seed)
    else:
        drawn = Constraints.sample(images.labels, n or 0, seed=seed, balanced=balanced)
    if flip is not None:
        drawn = drawn.flip(flip, seed=seed, only=flip_only)
    drawn.write(out, names=images.names)
    return drawn


def check_pairs(
    path: Path | str | Sequence[Path | str],
    source: Path | str | None = None,
    *,
    columns: str | None = None,
    close: bool = False,
    **how: Any,
) -> tuple[dict[str, str], list[str]]:
    """Counts of pairs files, alone or over images, and their first contradictions with their chains."""
    files = path_list(path)
    if source is None:
        named = [names_in(file, columns=columns) for file in files]
        names: Sequence[str] | None = sorted({name for one in named for name in one or ()}) or None
        parts = [Constraints.read(file, names=names, columns=columns) for file in files]
    else:
        images = open_at(source, None, "train", **how).images
        names, parts = images.names, [_read(file, images, columns) for file in files]
    pairs = Constraints.join(parts)
    if source is not None and not any((len(pairs), len(pairs.triplets), pairs.sizes is not None)):
        raise InputError(f"{files[0]}: there are no pairs in it; sample or answer some first")
    circle, soft = pairs.triplets.cyclic(pairs.n_images), (pairs.link > 0) & (pairs.link < 1)
    sizes = np.bincount(pairs.components()) if pairs.n_images else np.zeros(1, np.int64)  # of groups by must-links
    used = np.concatenate([pairs.left, pairs.right, pairs.triplets.rows.ravel()])
    counts = {
        "pairs": len(pairs),
        "must-links": int((pairs.link == 1).sum()),
        "cannot-links": int((pairs.link == 0).sum()),
        "soft links, between 0 and 1": int(soft.sum()),
        "triplets": len(pairs.triplets),
        "sizes of clusters": 0 if pairs.sizes is None else len(pairs.sizes),
        "duplicates": len(pairs) - len(pairs.merged()),
        "links to itself, ignored": pairs.ignored_self_links,
        "must-link groups": int((sizes > 1).sum()),
        "images": pairs.n_images,
        "images without a constraint": pairs.n_images - len(np.unique(used)),
        "contradictions": len(pairs.conflict_rows()) + bool(len(circle)),
    }
    rows = {name: f"{count:,}" for name, count in counts.items() if count or name not in _SELDOM}
    rows["must-link groups"] += f" (largest: {sizes.max():,} images)"
    if close:
        closed = graph.n_pairs(*pairs.component_constraints())
        rows["after closing"] = f"{closed[0]:,} must-links, {closed[1]:,} cannot-links"
    said = [conflict.describe(names, pairs.places) for conflict in pairs.conflicts(limit=10)]
    return rows, said + [str(pairs.triplets.error(circle))] * bool(len(circle))


# Pairs in memory


def as_constraints(constraints: Pairs, images: ImageSet) -> Constraints | None:
    """Constraints over the images from any form that `ConstraintMatch.fit` takes; None stays None.

    `Constraints` are used without a change; in all other forms a contradiction is an InputError.
    """
    if constraints is None or isinstance(constraints, Constraints):
        return constraints
    n = len(images)
    if isinstance(constraints, Path | str):
        made = Constraints.read(constraints, names=images.names, n_images=n)
    elif isinstance(constraints, Mapping):
        if odd := sorted(map(str, constraints.keys() - {"must_link", "cannot_link"})):
            raise InputError(f"constraints: unknown key {odd[0]!r}; known are must_link, cannot_link")
        made = Constraints.from_lists(n_images=n, **constraints)
    elif _is_sparse(constraints):
        made = Constraints.from_matrix(constraints)
    elif hasattr(constraints, "__array__"):
        array = np.asarray(constraints)
        is_table = _is_table(array) and array.shape != (n, n)
        made = _from_table(array, n) if is_table else Constraints.from_matrix(array)
    elif isinstance(constraints, list | tuple) and (columns := _columns(constraints)) is not None:
        made = Constraints.from_arrays(*columns, n_images=n)
    else:
        raise InputError(
            "constraints must be Constraints, a pairs file, a table or columns (left, right, link), a list of such "
            "triples, a dict with must_link and cannot_link, or a square matrix of 1, -1 and 0"
        )
    return made.resolve("error", names=images.names)


def choose_pairs(y: Any, constraints: Pairs) -> Pairs:
    """The constraints, by name or in second place, where a label for each row is ignored, as clusterers do."""
    if isinstance(y, Constraints | Mapping | Path | str) or _is_sparse(y):
        in_second_place = True
    elif isinstance(y, list | tuple):
        in_second_place = _columns(y) is not None
    else:
        array = np.asarray(y)
        in_second_place = _is_table(array) or (array.ndim == 2 and array.shape[0] == array.shape[1])
    if in_second_place and constraints is not None:
        raise InputError("constraints are given twice, in second place and by name; leave one out")
    return y if in_second_place else constraints


def _is_sparse(given: Any) -> bool:
    """Whether this is a sparse matrix: then SciPy's part for them is imported already."""
    sparse = sys.modules.get("scipy.sparse")
    return sparse is not None and bool(sparse.issparse(given))


def _is_table(array: NDArray[Any]) -> bool:
    """Whether this is an array of pairs: left, right, link, and perhaps weight."""
    return array.ndim == 2 and array.shape[1] in (3, 4)


def _from_table(table: NDArray[Any], n_images: int) -> Constraints:
    rows = table[:, :2]
    if rows.dtype.kind == "f" and np.isfinite(rows).all() and (rows == np.floor(rows)).all():
        rows = rows.astype(np.int64)  # an array of one type has to hold soft links or weights too
    weight = table[:, 3] if table.shape[1] == 4 else None
    return Constraints.from_arrays(rows[:, 0], rows[:, 1], table[:, 2], weight=weight, n_images=n_images)


def _columns(given: Sequence[Any]) -> Sequence[Any] | None:
    """Left, right and link as columns, from columns or from triples; None: neither. Three by three may be both."""
    triples = len(given) > 0 and all(isinstance(item, list | tuple) and len(item) == 3 for item in given)
    if triples and len(given) == 3:
        as_tuples = [isinstance(item, tuple) for item in given]
        if isinstance(given, tuple) == all(as_tuples) or any(as_tuples) != all(as_tuples):
            raise InputError(
                "constraints: three columns or three triples (left, right, link)? give a tuple of lists for columns, "
                "a list of tuples for triples"
            )
        triples = all(as_tuples)
    if triples:
        return list(zip(*given, strict=True))
    return given if len(given) == 3 and all(np.ndim(column) == 1 for column in given) else None
