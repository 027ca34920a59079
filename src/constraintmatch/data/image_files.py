"""Encoded images: files below a folder, members of tar shards, rows of Parquet files; found and read in order."""

import io
import itertools
import json
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from constraintmatch._internal.errors import InputError, one_line

PHONE = frozenset({".heic", ".heif", ".avif"})  # need a plugin, or a Pillow that has it built in
SUFFIXES = PHONE | {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".tif", ".tiff", ".gif"}
SHARDS = (".tar", ".parquet")
ODD_NAME = re.compile(r"[\0\ud800-\udfff]|(^|[/\\])\.\.([/\\]|$)")  # no file has it, or it leads out of its folder
_PART = 64  # rows of a Parquet file that are in memory at a time
_NAMES = ("name", "file_name", "filename", "path", "image_path", "__key__")  # columns of Parquet files
_LABELS = ("label", "labels", "cls", "class")


@dataclass(frozen=True)
class Skipped:
    """A file that is not among the images, and why."""

    name: str
    reason: str
    passing: bool = field(default=False, compare=False)  # no permission, no memory: another try may work


class ImageFile(NamedTuple):
    """An encoded image: a file, or a part of a shard."""

    name: str  # relative, with forward slashes
    size: int  # of a row of a Parquet file: that of the file
    mtime_ns: int
    shard: str = ""
    at: int = 0  # its first byte in a tar file, or its row in a Parquet file
    label: str | int | None = None  # that the shard has


def find_images(place: Path) -> tuple[list[ImageFile], list[Skipped]]:
    """The images of a shard, or below a folder: its image files, else those in the shards below it, shard by shard.

    A shard is a tar file with NAME.jpg and perhaps NAME.cls, its label (the layout of WebDataset), or a Parquet file
    with a column of encoded images.
    """
    if not place.exists():
        raise InputError("no such folder", place)
    if place.is_file() and place.suffix not in SHARDS:
        raise InputError("a file", place, "give a folder of images, a .tar, .parquet, .npy or .npz file")
    paths, skipped = [place], list[Skipped]()
    if place.is_dir():
        files, skipped = find_files(place)
        paths = [] if files else sorted(path for suffix in SHARDS for path in place.rglob(f"[!.]*{suffix}"))
        if not paths:
            return files, skipped
    found: dict[str, ImageFile] = {}
    for path in paths:
        with _shard_errors(path):
            listed = (_list_tar if path.suffix == ".tar" else _list_parquet)(path)
        shard = path.relative_to(_base(place)).as_posix()
        for file in listed:
            if ODD_NAME.search(file.name):
                skipped.append(Skipped(_escape(file.name), f"no name for an image, in {shard}; rename it"))
                continue
            file = file._replace(shard=shard)
            if (known := found.setdefault(file.name, file)) is not file:
                both = f"twice in {shard}" if known.shard == shard else f"in {known.shard} and in {shard}"
                raise InputError(f"the image {file.name!r} is {both}", place, "give each image a name of its own")
    return list(found.values()), skipped


def read_images(place: Path, files: Sequence[ImageFile]) -> Iterator[Path | io.BytesIO]:
    """What to decode of each image, in the order in which they were found: its file, or its bytes from a shard."""
    for shard, group in itertools.groupby(files, key=lambda file: file.shard):
        own, path = list(group), _base(place) / shard
        if not shard:
            yield from (place / file.name for file in own)
            continue
        with _shard_errors(path):
            yield from (_read_tar if path.suffix == ".tar" else _read_parquet)(path, own)


def embeddings_in(place: Path) -> list[Path]:
    """The Parquet files of a folder, or the one at the place, if they hold embeddings, as `embed` writes them."""
    paths = sorted(place.glob("[!._]*.parquet")) if place.is_dir() else [place] if place.suffix == ".parquet" else []
    if not paths or not paths[0].is_file():
        return []
    from pyarrow.parquet import read_schema

    with _shard_errors(paths[0]):
        return paths if "embedding" in read_schema(paths[0]).names else []


def read_embeddings(paths: Sequence[Path]) -> dict[str, Any]:
    """The arrays in Parquet files of embeddings: embeddings (n, d), names, and labels where all have them."""
    from pyarrow import compute, parquet

    with _shard_errors(paths[0]):
        table = parquet.read_table(paths)
        table = table.filter(compute.is_valid(table["embedding"]))  # of an image that could not be read there is none
        flat = compute.list_flatten(table["embedding"]).to_numpy()
        found = {"images": flat.reshape(table.num_rows, -1), "names": table["name"].to_pylist()}
        return found | ({"labels": table["label"].to_numpy().astype(str)} if "label" in table.column_names else {})


def _base(place: Path) -> Path:
    return place if place.is_dir() else place.parent


@contextmanager
def _shard_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except tarfile.TarError as error:
        raise InputError(f"is incomplete, or no plain tar file ({one_line(error)})", path, "write it again") from None
    except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
        raise InputError(f"cannot be read ({one_line(error)[:200]})", path, "write it again") from None


# Names


def check_names(names: Sequence[str] | None, n_images: int) -> tuple[str, ...]:
    """The names as words, unique, one for each image; without any, row numbers."""
    if names is None:
        return tuple(map(str, range(n_images)))
    words = tuple(map(str, names))
    if len(words) != n_images:
        raise InputError(f"{len(words):,} names for {n_images:,} images: give one name for each image")
    rows: dict[str, int] = {}
    for row, name in enumerate(words):
        if not name or ODD_NAME.search(name):
            raise InputError(f"row {row:,}: {name!r} is no name of an image", fix="leave out empty names, .. and NUL")
        if rows.setdefault(name, row) != row:
            raise InputError(f"the name {name!r} is at rows {rows[name]:,} and {row:,}: names must be unique")
    return words


# Tar shards


def _list_tar(path: Path) -> list[ImageFile]:
    """The images of a tar file that is complete: it ends with a block of zeros."""
    found: list[ImageFile] = []
    labels: dict[str, str | int] = {}
    with tarfile.open(path, "r:") as tar, path.open("rb") as content:
        modified = os.fstat(content.fileno()).st_mtime_ns
        while (member := tar.next()) is not None:
            vars(tar)["members"].clear()  # it would keep all of them
            name = posixpath.normpath(member.name).lstrip("/")
            base = posixpath.basename(name)
            if not member.isreg() or base.startswith("."):
                continue
            if base.partition(".")[2] == "cls":
                content.seek(member.offset_data)
                text = content.read(min(member.size, 1_000)).decode("utf-8", "replace").strip()
                labels[_key(name)] = int(text) if text.isdecimal() else text
            elif posixpath.splitext(base)[1].lower() in SUFFIXES:
                found.append(ImageFile(name, member.size, modified, at=member.offset_data))
        content.seek(tar.offset)
        if content.read(512) != bytes(512):
            raise tarfile.ReadError(f"it ends early, at byte {tar.offset:,}")
    return [file._replace(label=labels.get(_key(file.name))) for file in found] if labels else found


def _key(name: str) -> str:
    """What the files of one sample share: their name up to the first dot."""
    folder, base = posixpath.split(name)
    return posixpath.join(folder, base.partition(".")[0])


def _read_tar(path: Path, files: Sequence[ImageFile]) -> Iterator[io.BytesIO]:
    with path.open("rb") as shard:
        for file in files:
            shard.seek(file.at)
            yield io.BytesIO(shard.read(file.size))


# Parquet files


def _list_parquet(path: Path) -> list[ImageFile]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as shard:
        schema, status = shard.schema_arrow, path.stat()
        image, nested = _image_column(path, schema)
        named = next((name for name in _NAMES if name in schema.names and _is(schema, name, "string")), None)
        if nested and schema.field(image).type.get_field_index("path") >= 0:
            named = f"{image}.path"
        label = next((name for name in _LABELS if name in schema.names and _is(schema, name, "string", "int")), None)
        classes = _class_names(schema, label)
        names: list[Any] = [None] * shard.metadata.num_rows
        labels = names.copy()
        if named is not None:
            column = shard.read([named]).column(0).to_pylist()
            names = [value["path"] if isinstance(value, dict) else value for value in column]
        if label is not None:
            labels = shard.read([label]).column(0).to_pylist()
    found = []
    for row, (name, mark) in enumerate(zip(names, labels, strict=True)):
        if isinstance(mark, int):  # one below 0 is not known
            mark = None if mark < 0 else classes[mark] if mark < len(classes) else mark
        shown = posixpath.normpath(name).lstrip("/") if name else f"{path.stem}/{row:08d}"
        found.append(ImageFile(shown, status.st_size, status.st_mtime_ns, at=row, label=mark))
    return found


def _is(schema: Any, name: str, *kinds: str) -> bool:
    return any(kind in str(schema.field(name).type) for kind in kinds)


def _image_column(path: Path, schema: Any) -> tuple[str, bool]:
    """The first column of bytes, and whether the bytes are a part of it, as Hugging Face's datasets write them."""
    for column in schema:
        if str(column.type) in ("binary", "large_binary"):
            return column.name, False
        if str(column.type).startswith("struct") and "bytes: binary" in str(column.type):
            return column.name, True
    has = ", ".join(schema.names) or "none"
    raise InputError(f"has no column of encoded images (columns: {has})", path, "write the bytes of each image file")


def _class_names(schema: Any, label: str | None) -> Sequence[str]:
    """The names of numbered classes, where Hugging Face's datasets noted them."""
    with suppress(KeyError, TypeError, ValueError):
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    return ()


def _read_parquet(path: Path, files: Sequence[ImageFile]) -> Iterator[io.BytesIO]:
    """The bytes of some rows; groups of rows without any of them are passed over."""
    from pyarrow.parquet import ParquetFile

    rows = {file.at for file in files}
    with ParquetFile(path) as shard:
        image, nested = _image_column(path, shard.schema_arrow)
        first = 0
        for group in range(shard.num_row_groups):
            n = shard.metadata.row_group(group).num_rows
            if not rows.isdisjoint(range(first, first + n)):
                batches = shard.iter_batches(_PART, [group], columns=[f"{image}.bytes" if nested else image])
                columns = (batch.column(0).field("bytes") if nested else batch.column(0) for batch in batches)
                for row, value in enumerate(itertools.chain.from_iterable(columns), first):
                    if row in rows:
                        yield io.BytesIO(value.as_py() or b"")
            first += n


# Files below a folder


def find_files(folder: Path) -> tuple[list[ImageFile], list[Skipped]]:
    """The image files below a folder, sorted by name, and what could not be read.

    Every real folder is entered once, by its own path rather than by a link, so that loops of links end.
    """
    files: list[ImageFile] = []
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
            skipped.append(Skipped(_escape(here or str(folder)), error.strerror or one_line(error)))
    return sorted(files), skipped


def _sort_entry(
    entry: os.DirEntry[str], here: str, files: list[ImageFile], skipped: list[Skipped], folders: list[str]
) -> None:
    """Put a folder's entry where it belongs; hidden entries and files without the suffix of an image are left out."""
    if entry.name.startswith("."):
        return
    name = f"{here}/{entry.name}" if here else entry.name
    with suppress(OSError):  # a link onto itself is no folder
        if entry.is_dir():
            folders.append(name)
            return
    if os.path.splitext(entry.name)[1].lower() not in SUFFIXES:  # noqa: PTH122 (Path is ten times slower)
        return
    try:
        name.encode()
        status = entry.stat()
    except UnicodeEncodeError:
        skipped.append(Skipped(_escape(name), "its name is not valid Unicode; rename it"))
    except OSError as error:
        skipped.append(Skipped(name, error.strerror or one_line(error)))
    else:
        if stat.S_ISREG(status.st_mode):
            files.append(ImageFile(name, status.st_size, status.st_mtime_ns))
        else:  # opening a pipe would wait without end
            skipped.append(Skipped(name, "not a regular file"))


def _escape(name: str) -> str:
    """A name that can be printed and written: undecodable bytes as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()
