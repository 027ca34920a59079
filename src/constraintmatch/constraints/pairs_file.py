"""The pairs file: `left,right,link[,weight][,annotator][,time]` as CSV, Parquet or JSON lines.

People write these files by hand, in spreadsheets and in scripts, so reading is generous where a meaning is certain
(spellings, blanks, delimiters, names or row numbers) and stops with the line and the mend where it is not. Cells are
read in bulk, each distinct text once; the offending line is looked for only when there is one.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import parse_json, write_atomically
from constraintmatch.constraints.pair_cells import (
    Cells,
    Places,
    image_rows,
    is_row_number,
    looks_like_link,
    read_links,
    read_weights,
)

__all__ = ["PairTable", "names_in", "read_pairs", "write_pairs"]

_REQUIRED = ("left", "right", "link")
_OPTIONAL = ("weight", "annotator", "time")


@dataclass(frozen=True, eq=False)
class PairTable:
    """The columns of a pairs file, one entry per pair; `left` and `right` are rows of a set of `n_images` images."""

    left: NDArray[np.int64]
    right: NDArray[np.int64]
    link: NDArray[np.float32]
    weight: NDArray[np.float32]
    n_images: int
    annotator: tuple[str, ...] | None = None
    time: tuple[str, ...] | None = None
    ignored_self_links: int = 0
    places: Places | None = None  # in the file that they were read from


def read_pairs(
    path: Path | str,
    *,
    names: Sequence[str] | None = None,
    n_images: int | None = None,
    columns: str | None = None,
    unread: Mapping[str, str] | None = None,
) -> PairTable:
    """The pairs in a CSV, Parquet or JSON lines file, told apart by the suffix.

    Images may be given by name or by row number (counted from 0). A cell that is a name means that image; any other
    whole number is a row number. Where some whole numbers are names and others only row numbers, the file is refused.
    Without `names` all cells are row numbers; without `n_images` too, the largest one tells how many images there are.
    `columns="i,j,c_ij"` says which columns of the file are left, right, link and, if more are given, weight, annotator,
    time. Must-links of an image with itself are ignored and counted. `unread` has the reasons by the names of images
    that are missing because their files could not be read; an error about such a name gives the reason.
    """
    cells = _load(Path(path), columns)
    left, right, n_images = image_rows(cells, names, n_images, unread or {})
    link, weight = read_links(cells), read_weights(cells)
    itself = left == right
    refused = np.flatnonzero(itself & (link <= 0.5))
    if refused.size:
        raise cells.error(int(refused[0]), "an image cannot be different from itself; delete the line")
    keep = np.flatnonzero(~itself)
    annotator, time = (_taken(cells.columns.get(name), keep) for name in ("annotator", "time"))
    n_itself = len(left) - len(keep)
    places = Places(np.asarray(cells.places, np.int64)[keep], cells.word)
    return PairTable(left[keep], right[keep], link[keep], weight[keep], n_images, annotator, time, n_itself, places)


def _taken(column: list[str] | None, rows: NDArray[np.int64]) -> tuple[str, ...] | None:
    return None if column is None else tuple(column[row] for row in rows.tolist())


def names_in(path: Path | str, *, columns: str | None = None) -> tuple[str, ...] | None:
    """The image names a pairs file mentions, sorted; None when it has row numbers only.

    For looking at a file without its images: `read_pairs(path, names=names_in(path))`.
    """
    cells = _load(Path(path), columns).columns
    distinct = {text.strip() for text in chain(cells["left"], cells["right"])} - {""}
    return None if all(map(is_row_number, distinct)) else tuple(sorted(distinct))


def write_pairs(path: Path | str, table: PairTable, *, names: Sequence[str] | None = None) -> None:
    """Write the pairs atomically, as CSV, Parquet or JSON lines by the suffix; with `names`, images by name.

    `weight` is written when any differs from 1, `annotator` and `time` when known. Reading gives back the same numbers.
    """
    path = Path(path)
    if names is not None and len(names) != table.n_images:
        raise InputError(f"{path}: {len(names):,} names for {table.n_images:,} images; give one name per image")
    columns: dict[str, Any] = {side: _images_as_cells(getattr(table, side), names) for side in ("left", "right")}
    columns["link"] = table.link
    if (table.weight != 1).any():
        columns["weight"] = table.weight
    for name in ("annotator", "time"):
        if (texts := getattr(table, name)) is not None:
            columns[name] = list(texts)
    writer = _format_of(path).write
    write_atomically(path, lambda temporary: writer(temporary, columns))


# Formats: from a file to columns of text, and back.


def _load(path: Path, columns: str | None) -> Cells:
    read = _format_of(path).read
    if path.is_dir():
        raise InputError(f"{path}: is a folder, not a pairs file")
    wanted = _wanted(columns)
    try:
        if path.stat().st_size == 0:
            raise _empty(path)
        return read(path, wanted)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def _wanted(columns: str | None) -> dict[str, str]:
    """Our column name -> the file's, from `columns="i,j,c_ij"`."""
    wanted = {name: name for name in (*_REQUIRED, *_OPTIONAL)}
    if columns is None:
        return wanted
    given = [name.strip() for name in next(csv.reader([columns]), [])]
    if not 3 <= len(given) <= len(wanted) or "" in given or len(set(given)) < len(given):
        raise InputError(
            f"columns {columns!r}: name the columns for {','.join(_REQUIRED)}, for example --columns i,j,c_ij"
        )
    return wanted | dict(zip(wanted, given, strict=False))


def _choose(path: Path, header: Sequence[str], wanted: Mapping[str, str]) -> dict[str, int]:
    """Our column name -> its position in the header; blanks and case are ignored."""
    found: dict[str, int] = {}
    plain = [name.strip().casefold() for name in header]
    for ours, theirs in wanted.items():
        positions = [at for at, name in enumerate(plain) if name == theirs.casefold()]
        if len(positions) > 1:
            raise InputError(f"{path}: {len(positions)} columns are named {theirs!r}; rename all but one")
        if positions:
            found[ours] = positions[0]
        elif ours in _REQUIRED or ours != theirs:
            raise InputError(f"{path}: no column named {theirs!r}; {_header_mend(header)}")
    return found


def _header_mend(header: Sequence[str]) -> str:
    found = ", ".join(name.strip() for name in header) or "none"
    if any(map(looks_like_link, header[2:3])):
        return f"the first line looks like data ({found}); put the header {','.join(_REQUIRED)} above it"
    if len(header) < len(_REQUIRED):
        return f"the columns found are {found}; the file needs {', '.join(_REQUIRED)}"
    example = ",".join(name.strip() for name in header[:3])
    return f"the columns found are {found}; say which are {', '.join(_REQUIRED)}, for example --columns {example}"


def _read_csv(path: Path, wanted: Mapping[str, str]) -> Cells:
    text = _decode(path)
    first = next((line for line in io.StringIO(text, newline=None) if line.strip()), None)
    if first is None:
        raise _empty(path)
    delimiter = _delimiter(first, wanted)
    try:
        return _csv_cells(path, _csv_rows(text, delimiter, strict=True), wanted)
    except csv.Error:  # an open quote, or only a blank behind a closing one
        return _csv_cells(path, _one_line_rows(path, text, delimiter), wanted)


def _empty(path: Path) -> InputError:
    return InputError(f"{path}: the file is empty; a pairs file has the columns {','.join(_REQUIRED)}")


def _decode(path: Path) -> str:
    data = path.read_bytes()
    utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")  # what Excel calls "Unicode text"
    try:
        return data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path} line {line}: not UTF-8 text; save the file again as UTF-8") from None


def _delimiter(header: str, wanted: Mapping[str, str]) -> str:
    """The delimiter that shows most of the columns we want, else the one that makes most fields."""
    names = {name.casefold() for name in wanted.values()}

    def score(delimiter: str) -> tuple[int, int]:
        fields = next(csv.reader([header[:10_000]], delimiter=delimiter, skipinitialspace=True), [])
        return len(names & {field.strip().casefold() for field in fields}), len(fields)

    return max(",;\t", key=score)


def _csv_rows(text: str, delimiter: str, *, strict: bool) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of each row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=strict)
    for row in reader:
        if row and (row[0] or any(map(str.strip, row))):
            yield reader.line_num, row


def _one_line_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Rows of a file that strict parsing refuses; a field over several lines is an open quote that swallows them."""
    place = 0
    try:
        for end, row in _csv_rows(text, delimiter, strict=False):
            if any("\n" in field for field in row):
                break
            place = end
            yield end, row
        else:
            return
    except csv.Error:  # a field too long to be one
        pass
    raise InputError(f'{path} line {place + 1}: a quote (") is opened and not closed; close it or double it')


def _csv_cells(path: Path, rows: Iterator[tuple[int, list[str]]], wanted: Mapping[str, str]) -> Cells:
    header = next(rows)[1]
    found = _choose(path, header, wanted)
    needed, width = max(found[name] for name in _REQUIRED), len(header)
    columns: dict[str, list[str]] = {name: [] for name in found}
    filling = [(columns[name].append, at) for name, at in found.items()]
    places = []
    for place, row in rows:  # field by field: a million short-lived lists cost far less than a million kept ones
        if len(row) != width:
            _even_out(path, place, row, width, needed)
        places.append(place)
        for append, at in filling:
            append(row[at])
    return Cells(path, columns, places)


def _even_out(path: Path, place: int, row: list[str], width: int, needed: int) -> None:
    """Fill up a row that lacks only optional columns and cut blank fields past the header; the rest is an error."""
    if len(row) <= needed or any(map(str.strip, row[width:])):
        mend = "quote names that contain the delimiter" if len(row) > width else "complete or delete the line"
        raise InputError(f"{path} line {place}: {len(row)} columns where the header has {width}; {mend}")
    row[width:] = []
    row.extend([""] * (width - len(row)))


def _read_jsonl(path: Path, wanted: Mapping[str, str]) -> Cells:
    places: list[int] = []
    columns: dict[str, list[str]] = {}
    for place, line in enumerate(io.StringIO(_decode(path)), start=1):
        if line.strip():
            record = _record(path, place, line)
            for key in record.keys() - columns.keys():
                columns[key] = [""] * len(places)
            for key, column in columns.items():
                column.append(_text(record.get(key)))
            places.append(place)
    if not places:
        raise _empty(path)
    header = list(columns)
    found = _choose(path, header, wanted)
    return Cells(path, {name: columns[header[at]] for name, at in found.items()}, places)


def _record(path: Path, place: int, line: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise InputError(f"{path} line {place}: not valid JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(record, dict):
        raise InputError(f'{path} line {place}: not an object such as {{"left": 0, "right": 1, "link": 1}}')
    return record


def _read_parquet(path: Path, wanted: Mapping[str, str]) -> Cells:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            header = file.schema_arrow.names
            found = {name: header[at] for name, at in _choose(path, header, wanted).items()}
            table = file.read(columns=list(found.values()))
    except pa.ArrowException:
        raise InputError(f"{path}: not a readable Parquet file; write it again, or use CSV") from None
    try:
        columns = {name: [_text(cell) for cell in table.column(key).to_pylist()] for name, key in found.items()}
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: {error.object[:60]!r} is not UTF-8 text; write the file again as UTF-8") from None
    return Cells(path, columns, range(1, table.num_rows + 1), "row")


def _text(cell: object) -> str:
    if type(cell) is str:
        return cell
    if cell is None:
        return ""
    if isinstance(cell, bytes):  # what some writers make of text
        return cell.decode("utf-8")
    return cell.isoformat() if hasattr(cell, "isoformat") else str(cell)


def _write_csv(path: Path, columns: Mapping[str, Any]) -> None:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*map(_as_cells, columns.values()), strict=True))


def _write_jsonl(path: Path, columns: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        for row in zip(*map(_as_cells, columns.values()), strict=True):
            file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")


def _write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(dict(columns)), path)


@dataclass(frozen=True)
class _Format:
    read: Callable[[Path, Mapping[str, str]], Cells]
    write: Callable[[Path, Mapping[str, Any]], None]


_CSV, _JSONL, _PARQUET = (
    _Format(_read_csv, _write_csv),
    _Format(_read_jsonl, _write_jsonl),
    _Format(_read_parquet, _write_parquet),
)
_FORMATS = {".csv": _CSV, ".tsv": _CSV, ".txt": _CSV, ".jsonl": _JSONL, ".ndjson": _JSONL, ".parquet": _PARQUET}


def _format_of(path: Path) -> _Format:
    try:
        return _FORMATS[path.suffix.lower()]
    except KeyError:
        raise InputError(f"{path}: not a kind of pairs file; the name must end in {', '.join(_FORMATS)}") from None


def _images_as_cells(rows: NDArray[np.int64], names: Sequence[str] | None) -> Any:
    return rows if names is None else [names[row] for row in rows.tolist()]


def _as_cells(column: Any) -> list[Any]:
    """A column as Python values; float32 numbers as the shortest ones that read back the same, whole ones as int."""
    if isinstance(column, list):
        return column
    if column.dtype != np.float32:
        return list(column.tolist())
    distinct, where = np.unique(column, return_inverse=True)
    short = [int(value) if value == int(value) else float(str(value)) for value in distinct]
    return [short[at] for at in where.tolist()]
