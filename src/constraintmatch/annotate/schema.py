"""The database file: its tables, who may open it, and what SQLite's errors mean to a person."""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from constraintmatch.errors import InputError
from constraintmatch.files import check_target, folder_lock, mend

__all__ = ["connect", "sole_server", "told"]

_APPLICATION = 0x434D4131  # "CMA1": tells our databases from those of other programs
_VERSION = 1
_TABLES = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE questions (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        image TEXT NOT NULL,            -- by name: row numbers change when a folder grows
        shown TEXT NOT NULL,            -- JSON list of names
        look BLOB NOT NULL,             -- a tiny thumbnail of each image, the asked one first
        key TEXT NOT NULL,              -- the same for the same question in another order
        model TEXT NOT NULL,            -- who chose it
        added TEXT NOT NULL,
        urgent INTEGER NOT NULL,        -- 1: asked first, and even if the answers imply it
        state TEXT NOT NULL CHECK (state IN ('waiting', 'answered', 'retired')),
        holder TEXT,                    -- the annotator who has it on the screen
        held_until REAL)""",
    "CREATE INDEX questions_by_key ON questions (key)",
    "CREATE INDEX questions_by_state ON questions (state, urgent, id)",
    """CREATE TABLE answers (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        question INTEGER NOT NULL REFERENCES questions (id),
        choice INTEGER NOT NULL,        -- place in shown, -1 none of these (a pair: different), -2 unsure
        annotator TEXT NOT NULL,
        milliseconds INTEGER,
        time TEXT NOT NULL,             -- ISO 8601, UTC
        weight REAL NOT NULL DEFAULT 1,
        origin TEXT NOT NULL DEFAULT '',    -- the file it was imported from
        replaces INTEGER REFERENCES answers (id),
        withdrawn TEXT NOT NULL DEFAULT '', -- why it no longer stands: undo, withdrawn, changed
        withdrawn_by TEXT,
        withdrawn_at TEXT)""",
    "CREATE INDEX answers_by_question ON answers (question)",
    "CREATE TABLE clusters (cluster INTEGER PRIMARY KEY, name TEXT NOT NULL)",
    """CREATE VIEW answered AS
        SELECT answers.id, image, shown, choice, annotator, milliseconds, time, model, weight, origin, withdrawn
        FROM answers JOIN questions ON questions.id = answers.question""",
)
_KEPT = "what was acknowledged before is kept"
_MENDS = {
    sqlite3.SQLITE_FULL: f"no space left on the disk; free some and answer again ({_KEPT})",
    sqlite3.SQLITE_IOERR: f"the disk cannot be written or read; check its space and health and start again ({_KEPT})",
    sqlite3.SQLITE_READONLY: "the file or its disk is read-only; make it writable or choose another --db",
    sqlite3.SQLITE_PERM: "no permission to write there; choose another --db",
    sqlite3.SQLITE_AUTH: "no permission to write there; choose another --db",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened there; check the folder's permissions or choose another --db",
    sqlite3.SQLITE_NOTADB: "not a database of answers; choose another --db",
    sqlite3.SQLITE_CORRUPT: "the database is damaged; restore a copy or choose another --db",
    sqlite3.SQLITE_BUSY: "another program is writing to this database; close it and try again",
    sqlite3.SQLITE_LOCKED: "another program is writing to this database; close it and try again",
}


@contextmanager
def told(path: Path | str) -> Iterator[None]:
    """SQLite's errors as an InputError that names the file and the mend."""
    try:
        yield
    except sqlite3.Error as error:
        helps = _MENDS.get(
            (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        )  # extended codes end in the plain one
        if helps is None:
            raise
        raise InputError(f"{path}: {helps}") from error


@contextmanager
def sole_server(path: Path) -> Iterator[None]:
    """Hold a database for this process; a second server gets an InputError. The kernel frees it after a crash."""
    check_target(path)
    target = Path(os.path.realpath(path))
    with ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(target.with_name(f"{target.name}.lock")))
        except InputError as error:
            raise _reworded(path, str(error)) from None
        except OSError as error:  # the lock's own file found the disk full
            raise InputError(f"{path}: {mend(error) or error.strerror}") from None
        yield


def _reworded(path: Path, message: str) -> InputError:
    if holder := re.search(r"in use by another process \(pid (\w+)\)", message):
        return InputError(
            f"{path}: another server is at work on this database (pid {holder[1]}); "
            "use its page, stop it, or choose another --db"
        )
    return InputError(f"{path}: {message.rpartition(': ')[2]}")


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """An open, checked database of answers, made when it is not there; transactions are begun by hand.

    WAL: readers are not held up. synchronous=FULL: a commit is on the disk before it returns, power cut or not.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give the database in it, for example --db {path / 'answers.db'}")
    if read_only and not path.is_file():
        raise InputError(f"{path}: no such file")
    with told(path):
        address = f"{Path(os.path.realpath(path)).as_uri()}?mode={'rw' if read_only else 'rwc'}"
        connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path, read_only)
        except BaseException:
            connection.close()
            raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, read_only: bool) -> None:
    application, version, n_tables = (
        connection.execute(query).fetchone()[0]
        for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    )
    fresh = (application, version, n_tables) == (0, 0, 0)
    if not fresh and application != _APPLICATION:
        raise InputError(f"{path}: a database of another program; choose another --db")
    if not fresh and version != _VERSION:
        helps = "update constraintmatch" if version > _VERSION else "choose another --db"
        raise InputError(f"{path}: a database of version {version}, and this program knows {_VERSION}; {helps}")
    if fresh and read_only:
        raise InputError(f"{path}: an empty file, not a database of answers")
    if read_only:  # by this and not by mode=ro, which would leave the -wal and -shm files beside the database
        connection.execute("PRAGMA query_only = ON")
    else:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    if fresh:
        _create(connection)
    if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
        raise InputError(f"{path}: {_MENDS[sqlite3.SQLITE_CORRUPT]}")


def _create(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute(f"PRAGMA user_version = {_VERSION}")
    connection.execute("COMMIT")
