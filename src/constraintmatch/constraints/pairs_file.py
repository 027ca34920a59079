"""The pairs file: `left,right,link[,weight][,annotator][,time]` as CSV, Parquet or JSON lines.

Files of the same formats say other things, and their columns tell which: triplets are `anchor,near,far[,weight]`, class
labels `image,label`, sizes of clusters `least,most`.

People write these files by hand, in spreadsheets and in scripts. Reading accepts what has one clear meaning (spellings,
blanks, delimiters, names or row numbers); anything else is an error with the line and the fix. Cells are read in bulk,
each distinct text once.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import parse_json, read_errors, write_atomically
from constraintmatch.constraints import pair_cells
from constraintmatch.constraints.graph import Triplets, label_pairs
from constraintmatch.constraints.pair_cells import Places

_REQUIRED = ("left", "right", "link")
_OPTIONAL = ("weight", "annotator", "time")
_TRIPLET, _LABEL, _SIZE = ("anchor", "near", "far"), ("image", "label"), ("least", "most")
_IMAGES = ("left", "right", *_TRIPLET, "image")  # columns of images
_NEEDED = {*_REQUIRED, *_TRIPLET, *_LABEL, *_SIZE}  # columns that a file has, if its kind has them
_Cells = tuple[dict[str, list[str]], Places]
_Rows = Iterator[tuple[int, list[str]]]  # line number and cells
_Format = tuple[Callable[[Path, Mapping[str, str]], _Cells], Callable[[Mapping[str, Any], Path], None]]


def read_pairs(
    path: Path, names: Sequence[str] | None, n_images: int | None, columns: str | None, unread: Mapping[str, str]
) -> dict[str, Any]:
    """What a file says, as fields of `Constraints`; `Constraints.read` explains it."""
    cells, places = _load(path, columns)
    sides = [cells[name] for name in _IMAGES if name in cells]
    rows, n_images = (
        pair_cells.image_rows(sides, places, names, n_images, unread) if sides else ([], len(names or ()) or n_images)
    )
    found: dict[str, Any] = {"left": (), "right": (), "link": (), "n_images": n_images or 0}
    if "least" in cells:
        return found | {"sizes": pair_cells.read_sizes(cells, places)}
    if "anchor" in cells:
        triplets = Triplets(np.stack(rows, axis=1), pair_cells.read_weights(cells, places), places)
        return found | {"triplets": _checked_triplets(triplets)}
    if "label" in cells:
        return found | _pairs_of_labels(rows[0], [text.strip() for text in cells["label"]], places)
    found |= {"left": rows[0], "right": rows[1], "link": pair_cells.read_links(cells, places), "places": places}
    found["weight"] = pair_cells.read_weights(cells, places)
    return found | {"annotator": cells.get("annotator"), "time": cells.get("time")}


def _checked_triplets(triplets: Triplets) -> Triplets:
    for one, other in ((0, 1), (0, 2), (1, 2)):
        equal = np.flatnonzero(triplets.rows[:, one] == triplets.rows[:, other])
        if equal.size:
            error = InputError(f"{_TRIPLET[one]} and {_TRIPLET[other]} are the same image", fix="name three images")
            raise triplets.places.error(int(equal[0]), error)
    return triplets


def _pairs_of_labels(images: NDArray[np.int64], labels: Sequence[str], places: Places) -> dict[str, Any]:
    """The pairs that labels imply; an image without a label says nothing, one with two is an InputError."""
    line_of: dict[int, int] = {}
    for at, (image, label) in enumerate(zip(images.tolist(), labels, strict=True)):
        first = line_of.setdefault(image, at) if label else at
        if labels[first] != label:
            problem = f"one image has the labels {labels[first]!r} and {label!r}"
            raise InputError(problem, f"{places.path} {places.say(first, at)}", "keep one of them")
    lines = np.array(list(line_of.values()), np.int64)
    kinds = np.unique(np.array(labels, object)[lines], return_inverse=True)[1]
    left, right, link = label_pairs(kinds)
    return {
        "left": images[lines[left]],
        "right": images[lines[right]],
        "link": link,
        "places": places.take(lines[left]),
    }


def names_in(path: Path | str, *, columns: str | None = None) -> tuple[str, ...] | None:
    """The image names a pairs file mentions, sorted, to read it without images; None when it has row numbers only."""
    cells, _ = _load(Path(path), columns)
    distinct = {text.strip() for text in chain(*(cells[name] for name in _IMAGES if name in cells))} - {""}
    return None if all(pair_cells.row_number(text) is not None for text in distinct) else tuple(sorted(distinct))


def write_pairs(path: Path, pairs: Mapping[str, Any], names: Sequence[str] | None) -> None:
    """Write the fields of `Constraints` atomically, in the format of the suffix; with `names`, images by name.

    `weight` is written when any differs from 1, `annotator` and `time` when known. Reading gives back the same numbers.
    Triplets without any pairs are written in their place.
    """
    if names is not None and len(names) != pairs["n_images"]:
        raise InputError(f"{len(names):,} names for {pairs['n_images']:,} images", path, "give one name per image")

    def named(rows: NDArray[np.int64]) -> Any:
        return rows if names is None else [names[row] for row in rows.tolist()]

    columns = {name: pairs[name] for name in (*_REQUIRED, *_OPTIONAL) if pairs[name] is not None}
    columns |= {side: named(pairs[side]) for side in ("left", "right")}
    if (columns["weight"] == 1).all():
        del columns["weight"]
    files = {"": columns}  # by the ending of their names
    if len(triplets := pairs["triplets"]):
        images = zip(_TRIPLET, map(named, triplets.rows.T), strict=True)
        files["-triplets" if len(pairs["left"]) else ""] = {**dict(images), "weight": triplets.weight}
    if (sizes := pairs["sizes"]) is not None:
        cells = np.where(np.isfinite(sizes), sizes, np.float32(np.finfo(np.float32).max))
        files["-sizes"] = dict(zip(_SIZE, cells.T, strict=True))
    _, write = _format_of(path)
    for ending, content in files.items():
        write_atomically(_beside(path, ending), partial(write, content))


def files_with(path: Path) -> list[Path]:
    """The files that `write_pairs` makes for this one, as far as they exist."""
    places = (_beside(path, ending) for ending in ("", "-triplets", "-sizes"))
    return [place for place in places if place.is_file()]


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.stem}{ending}{path.suffix}")


# From a file to columns of text


def _load(path: Path, columns: str | None) -> _Cells:
    read, _ = _format_of(path)
    if path.is_dir():
        raise InputError("is a folder, not a pairs file", path)
    wanted = _column_names(columns)
    with read_errors(path):
        if path.stat().st_size == 0:
            raise _empty(path)
        return read(path, wanted)


def _empty(path: Path) -> InputError:
    return InputError("the file is empty", path, f"a pairs file has the columns {','.join(_REQUIRED)}")


def _column_names(columns: str | None) -> dict[str, str]:
    """Our column name -> the file's, from `columns="i,j,c_ij"`."""
    wanted = {name: name for name in (*_REQUIRED, *_OPTIONAL)}
    if columns is None:
        return wanted
    given = [name.strip() for name in next(csv.reader([columns]), [])]
    if not 3 <= len(given) <= len(wanted) or "" in given or len(set(given)) < len(given):
        problem = f"name the columns for {','.join(_REQUIRED)}, for example --columns i,j,c_ij"
        raise InputError(problem, f"columns {columns!r}")
    return wanted | dict(zip(wanted, given, strict=False))


def _choose(path: Path, header: Sequence[str], wanted: Mapping[str, str]) -> dict[str, int]:
    """Our column name -> its position in the header; blanks and case are ignored.

    A header without the columns of pairs may have those of another kind of file.
    """
    found: dict[str, int] = {}
    plain = [name.strip().casefold() for name in header]
    if not {wanted[name].casefold() for name in _REQUIRED} <= set(plain):
        others = ((*_TRIPLET, "weight"), _LABEL, _SIZE)
        wanted = next(({name: name for name in kind} for kind in others if {*kind} & _NEEDED <= {*plain}), wanted)
    for ours, theirs in wanted.items():
        positions = [at for at, name in enumerate(plain) if name == theirs.casefold()]
        if len(positions) > 1:
            raise InputError(f"{len(positions)} columns are named {theirs!r}", path, "rename all but one")
        if positions:
            found[ours] = positions[0]
        elif ours in _NEEDED or ours != theirs:
            raise InputError(f"no column named {theirs!r}", path, _header_fix(header))
    return found


def _header_fix(header: Sequence[str]) -> str:
    found = ", ".join(name.strip() for name in header) or "none"
    if len(header) > 2 and pair_cells.link_value(header[2]) is not None:
        return f"the first line looks like data ({found}); put the header {','.join(_REQUIRED)} above it"
    if len(header) < len(_REQUIRED):
        return f"the columns found are {found}; the file needs {', '.join(_REQUIRED)}"
    example = ",".join(name.strip() for name in header[:3])
    return f"the columns found are {found}; say which are {', '.join(_REQUIRED)}, for example --columns {example}"


def _read_csv(path: Path, wanted: Mapping[str, str]) -> _Cells:
    text = _decode(path)
    first = next((line for line in io.StringIO(text, newline=None) if line.strip()), None)
    if first is None:
        raise _empty(path)
    delimiter = _delimiter(first, wanted)
    rows = _csv_rows(text, delimiter, strict=True)
    try:
        return _collect(path, next(rows)[1], rows, wanted)
    except csv.Error:  # an open quote, or only a blank behind a closing one
        rows = _one_line_rows(path, text, delimiter)
        return _collect(path, next(rows)[1], rows, wanted)


def _decode(path: Path) -> str:
    data = path.read_bytes()
    utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")  # what Excel calls "Unicode text"
    try:
        return data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError("not UTF-8 text", f"{path} line {line}", "save the file again as UTF-8") from None


def _delimiter(header: str, wanted: Mapping[str, str]) -> str:
    """The delimiter that shows most of the columns we want, else the one that makes most fields."""
    names = {name.casefold() for name in wanted.values()} | _NEEDED

    def score(delimiter: str) -> tuple[int, int]:
        fields = next(csv.reader([header[:10_000]], delimiter=delimiter, skipinitialspace=True), [])
        return len(names & {field.strip().casefold() for field in fields}), len(fields)

    return max(",;\t", key=score)


def _csv_rows(text: str, delimiter: str, *, strict: bool) -> _Rows:
    """Line number and fields of each row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=strict)
    for row in reader:
        if row and (row[0] or any(map(str.strip, row))):
            yield reader.line_num, row


def _one_line_rows(path: Path, text: str, delimiter: str) -> _Rows:
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
    raise InputError('a quote (") is opened and not closed', f"{path} line {place + 1}", "close it or double it")


def _collect(path: Path, header: list[str], rows: _Rows, wanted: Mapping[str, str]) -> _Cells:
    """The columns that are wanted, from rows of cells."""
    found = _choose(path, header, wanted)
    needed, width = max(at for name, at in found.items() if name in _NEEDED), len(header)
    columns: dict[str, list[str]] = {name: [] for name in found}
    filling = [(columns[name].append, at) for name, at in found.items()]
    lines = []
    for line, row in rows:  # field by field: a million short-lived lists cost far less than a million kept ones
        if len(row) != width:
            _even_out(f"{path} line {line}", row, width, needed)
        lines.append(line)
        for append, at in filling:
            append(row[at])
    return columns, Places(np.array(lines, np.int64), "line", path)


def _even_out(place: str, row: list[str], width: int, needed: int) -> None:
    """Fill up a row that lacks only optional columns and cut blank fields past the header; the rest is an error."""
    if len(row) <= needed or any(map(str.strip, row[width:])):
        fix = "quote names that contain the delimiter" if len(row) > width else "complete or delete the line"
        raise InputError(f"{len(row)} columns where the header has {width}", place, fix)
    row[width:] = []
    row.extend([""] * (width - len(row)))


def _read_jsonl(path: Path, wanted: Mapping[str, str]) -> _Cells:
    lines = ((number, line) for number, line in enumerate(io.StringIO(_decode(path)), start=1) if line.strip())
    records = [(number, _record(f"{path} line {number}", line)) for number, line in lines]
    if not records:
        raise _empty(path)
    header = list(dict.fromkeys(key for _, record in records for key in record))
    rows = ((number, [_text(record.get(key)) for key in header]) for number, record in records)
    return _collect(path, header, rows, wanted)


def _record(place: str, line: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise InputError(f"not valid JSON ({getattr(error, 'msg', error)})", place) from None
    if not isinstance(record, dict):
        raise InputError('not an object such as {"left": 0, "right": 1, "link": 1}', place)
    return record


def _read_parquet(path: Path, wanted: Mapping[str, str]) -> _Cells:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            header = file.schema_arrow.names
            found = {name: header[at] for name, at in _choose(path, header, wanted).items()}
            table = file.read(columns=list(found.values()))
    except pa.ArrowException:
        raise InputError("not a readable Parquet file", path, "write it again, or use CSV") from None
    try:
        columns = {name: [_text(cell) for cell in table.column(key).to_pylist()] for name, key in found.items()}
    except UnicodeDecodeError as error:
        raise InputError(f"{error.object[:60]!r} is not UTF-8 text", path, "write the file again as UTF-8") from None
    return columns, Places(np.arange(1, table.num_rows + 1), "row", path)


def _text(cell: object) -> str:
    if type(cell) is str:
        return cell
    if cell is None:
        return ""
    if isinstance(cell, bytes):  # what some writers make of text
        return cell.decode("utf-8")
    return cell.isoformat() if hasattr(cell, "isoformat") else str(cell)


# From columns to a file


def _write_csv(columns: Mapping[str, Any], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*map(_as_cells, columns.values()), strict=True))


def _write_jsonl(columns: Mapping[str, Any], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        for row in zip(*map(_as_cells, columns.values()), strict=True):
            file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")


def _write_parquet(columns: Mapping[str, Any], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(dict(columns)), path)


def _as_cells(column: NDArray[Any] | Sequence[str]) -> Sequence[Any]:
    """A column as Python values; float32 numbers as the shortest ones that read back the same, whole ones as int."""
    if not isinstance(column, np.ndarray):
        return column
    if column.dtype != np.float32:
        return list(column.tolist())
    distinct, where = np.unique(column, return_inverse=True)
    short = [int(value) if value == int(value) else float(str(value)) for value in distinct]
    return [short[at] for at in where.tolist()]


_FORMATS: dict[str, _Format] = dict.fromkeys((".csv", ".tsv", ".txt"), (_read_csv, _write_csv))
_FORMATS |= dict.fromkeys((".jsonl", ".ndjson"), (_read_jsonl, _write_jsonl))
_FORMATS |= {".parquet": (_read_parquet, _write_parquet)}


def _format_of(path: Path) -> _Format:
    """How to read and how to write a file with this suffix."""
    if path.suffix.lower() not in _FORMATS:
        raise InputError("not a kind of pairs file", path, f"the name must end in {', '.join(_FORMATS)}")
    return _FORMATS[path.suffix.lower()]
