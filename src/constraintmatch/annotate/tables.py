"""The tables of a database of answers: made, checked row by row, and saved from a damaged file as far as it is read."""

import math
import re
import reprlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch._internal.files import check_target, parse_json, read_errors, write_atomically
from constraintmatch.questions.answers import MAX_SHOWN, NONE, UNSURE

APPLICATION = 0x434D4131  # "CMA1": sets our databases apart from those of other programs
VERSION = 2
LOOK_BYTES = 16  # of the thumbnail of one image
_SURROGATE = re.compile(r"[\ud800-\udfff]")
Row = Mapping[str, Any]


def connect(address: str) -> sqlite3.Connection:
    """An open database; bytes in a text that are no UTF-8 become lone surrogates, which `odd_rows` finds."""
    connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    return connection


def create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables, inside a transaction of the caller's."""
    for statement in (files("constraintmatch.annotate") / "schema.sql").read_text("utf-8").split(";"):
        connection.execute(statement)  # not executescript, which would end the transaction
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def upgrade_tables(connection: sqlite3.Connection, *, read_only: bool) -> None:
    """Bring tables of version 1, which knows no triplets, to this one; to read them, for this connection alone."""
    if "nearer" in (there := {row[1] for row in connection.execute("PRAGMA table_info(questions)")}) or not there:
        return
    if read_only:
        connection.execute("CREATE TEMP VIEW questions AS SELECT *, 0 AS nearer FROM main.questions")
    else:
        connection.execute("ALTER TABLE questions ADD COLUMN nearer INTEGER NOT NULL DEFAULT 0")
        connection.execute(f"PRAGMA user_version = {VERSION}")


_NUMBERS = {"about": "key", "questions": "id", "answers": "id", "clusters": "cluster"}
_TYPES: dict[str, tuple[type, ...]] = {"TEXT": (str,), "INTEGER": (int,), "REAL": (int, float), "BLOB": (bytes,)}
_ALSO: dict[str, Callable[[Any], bool]] = {  # what a column must hold besides the right type
    "image": bool,
    "shown": lambda value: bool(_names(value)),
    "state": lambda value: value in ("waiting", "answered", "retired"),
    "nearer": lambda value: value in (0, 1),
    "annotator": bool,
    "weight": lambda value: bool(value >= 0),
    "withdrawn": lambda value: value in ("", "undo", "withdrawn", "changed"),
}
_SPARE: dict[str, dict[str, Any]] = {  # what can be lost without losing an answer, and what stands for it then
    "questions": {"key": "", "model": "", "added": "", "urgent": 0, "holder": None, "held_until": None},
    "answers": {"milliseconds": None, "time": "", "origin": "", "replaces": None}
    | {"withdrawn_by": None, "withdrawn_at": None},
}


@cache
def _columns() -> dict[str, dict[str, Callable[[Any], bool]]]:
    """The columns of each table, as the schema has them, with what says whether a value may stand in it."""
    with closing(connect(":memory:")) as connection:
        create_tables(connection)
        found = {table: connection.execute(f"PRAGMA table_info({table})").fetchall() for table in _NUMBERS}
    return {table: {column["name"]: _check_of(column) for column in columns} for table, columns in found.items()}


def _check_of(column: sqlite3.Row) -> Callable[[Any], bool]:
    types, also = _TYPES[column["type"]], _ALSO.get(column["name"], lambda _: True)
    needed = column["notnull"] or column["pk"]

    def fits(value: Any) -> bool:
        if value is None:
            return not needed
        return type(value) in types and not _is_broken(value) and also(value)

    return fits


def _is_broken(value: Any) -> bool:
    """Whether it is a text that is no UTF-8, or no finite number."""
    if type(value) is str:
        return not value.isascii() and _SURROGATE.search(value) is not None
    return type(value) is float and not math.isfinite(value)


def _names(shown: str) -> list[str]:
    """The names in the column `shown`; none if it is no list of 1 to 5 names."""
    try:
        found = parse_json(shown)
    except ValueError:
        return []
    good = isinstance(found, list) and len(found) <= MAX_SHOWN
    return found if good and all(isinstance(name, str) and name and not _is_broken(name) for name in found) else []


def odd_columns(connection: sqlite3.Connection) -> str:
    """The table that is missing, or that lacks a column, in words; "" if all are there."""
    for table, columns in _columns().items():
        there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if lacking := sorted(columns.keys() - there):
            return f"table {table} has no column {lacking[0]}" if there else f"there is no table {table}"
    return ""


def odd_rows(tables: Mapping[str, Sequence[Row]]) -> dict[tuple[str, Any], str]:
    """What is wrong with rows, by table and number: a value of another kind, or an answer to no question."""
    odd: dict[tuple[str, Any], str] = {}
    n_shown: dict[Any, tuple[int, bool]] = {}  # and whether it is a triplet
    for table, rows in tables.items():
        for row in rows:
            number = row.get(_NUMBERS[table])
            if problem := _problem(table, row, n_shown):
                odd[table, number] = problem
            elif table == "questions":
                n_shown[number] = len(_names(row["shown"])), row["nearer"] == 1
    return odd


def _problem(table: str, row: Row, n_shown: Mapping[Any, tuple[int, bool]]) -> str:
    """What is wrong with a row, in words; "" if nothing is. Answers come after all questions."""
    for name, fits in _columns()[table].items():
        if not fits(row.get(name)):
            return f"{name} is {reprlib.repr(row.get(name))}"
    if table == "questions":
        shown = _names(row["shown"])
        images = {row["image"], *shown}
        if len(images) != 1 + len(shown):
            return "an image is in it twice"
        if len(row["look"]) != LOOK_BYTES * len(images):
            return f"look has {len(row['look']):,} bytes for {len(images)} images"
        if row["nearer"] and len(images) != 3:
            return f"a triplet of {len(images)} images"
    if table == "answers":
        if row["question"] not in n_shown:
            return f"its question {row['question']} is not there, or damaged"
        n, nearer = n_shown[row["question"]]
        if not UNSURE <= row["choice"] < n or (nearer and row["choice"] == NONE):
            return f"choice {row['choice']} was not shown"
    return ""


def read_tables(connection: sqlite3.Connection, lost: list[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables; with a list `lost`, a row that SQLite cannot read is noted there and left out."""
    tables = {}
    for table, number in _NUMBERS.items():
        try:
            tables[table] = list(map(dict, connection.execute(f"SELECT * FROM {table}")))
        except sqlite3.Error as error:
            if lost is None:
                raise
            tables[table] = [] if table == "about" else _read_one_by_one(connection, table, number, lost)
            lost += [] if tables[table] else [f"table {table}: {one_line(error)}"]
    return tables


def _read_one_by_one(connection: sqlite3.Connection, table: str, number: str, lost: list[str]) -> list[dict[str, Any]]:
    last, rows = 0, list[dict[str, Any]]()
    for query in (f"SELECT seq FROM sqlite_sequence WHERE name = '{table}'", f"SELECT max({number}) FROM {table}"):
        with suppress(sqlite3.Error, TypeError, ValueError):
            last = max(last, int(connection.execute(query).fetchone()[0]))
    for at in range(1, min(last, 10_000_000) + 1):
        try:
            rows += map(dict, connection.execute(f"SELECT * FROM {table} WHERE {number} = {at}"))
        except sqlite3.Error as error:
            lost.append(f"table {table} row {at}: {one_line(error)}")
    return rows


def repair_answers(path: Path, out: Path) -> tuple[int, list[str]]:
    """Write what can be read to a new database; how many answers that are, and a line for each row that is lost.

    The damaged file is copied first, with what is still in its journal: it stays as it is.
    """
    if out.exists():
        raise InputError("exists already", out, "remove it or choose another --out")
    check_target(out)
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "answers.db"
        for end in ("", "-wal"):
            source = Path(f"{path}{end}")
            with read_errors(source):
                if not end or source.is_file():
                    shutil.copyfile(source, copy.with_name(copy.name + end))
        with closing(connect(copy.as_uri())) as connection:
            tables = read_tables(connection, lost)
    tables["questions"] = [{"nearer": 0, **row} for row in tables["questions"]]  # version 1
    for table, spare in _SPARE.items():
        tables[table] = [_mended(table, row, spare) for row in tables[table]]
    odd = odd_rows(tables)
    lost += [f"table {table} row {number}: {problem}" for (table, number), problem in odd.items()]
    kept = {
        table: [row for row in rows if (table, row.get(_NUMBERS[table])) not in odd] for table, rows in tables.items()
    }
    if not kept["answers"]:
        raise InputError("no answer in it can be read", path, "restore a copy")
    write_atomically(out, lambda temporary: _write(temporary, kept))
    return len(kept["answers"]), lost


def _mended(table: str, row: Row, spare: Mapping[str, Any]) -> dict[str, Any]:
    """The row with what stands for the values that can be lost."""
    fits = _columns()[table]
    return {**row, **{name: other for name, other in spare.items() if not (name in row and fits[name](row[name]))}}


def _write(path: Path, tables: Mapping[str, list[dict[str, Any]]]) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("BEGIN")
        create_tables(connection)
        for table, rows in tables.items():
            columns = _columns()[table]
            places = ", ".join(f":{name}" for name in columns)
            connection.executemany(f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({places})", rows)
        connection.commit()
        path.write_bytes(connection.serialize())  # a plain write: what the disk says against it is known
