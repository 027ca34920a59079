"""The database file: its tables, who may open it, and what SQLite's errors mean."""

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import InUse, check_target, folder_lock, write_error

__all__ = ["ALIKE", "ANSWERS", "ASKABLE", "DROP_WAITING", "Database", "one_server"]

# Every answer with its question
ANSWERS = (
    "SELECT answers.id, question, image, shown, look, choice, annotator, milliseconds, time, model, weight, origin, "
    "withdrawn FROM answers JOIN questions ON questions.id = question"
)
# The questions with a key that wait, or whose answer has another choice than the given one (unsure)
ALIKE = (
    "SELECT questions.* FROM questions LEFT JOIN answers ON question = questions.id AND withdrawn = '' "
    "WHERE key = ? AND (state = 'waiting' OR (state = 'answered' AND choice != ?))"
)
# What an annotator may get now: urgent questions first, then those that the annotator holds
ASKABLE = (
    "SELECT id, image, shown, look, urgent FROM questions WHERE state = 'waiting' "
    "AND (holder IS NULL OR holder = :who OR held_until <= :now) "
    "ORDER BY urgent DESC, (holder IS :who AND held_until > :now) DESC, id"
)
DROP_WAITING = (  # those that nobody holds
    "UPDATE questions SET state = 'retired' WHERE state = 'waiting' AND NOT urgent "
    "AND (holder IS NULL OR held_until <= ?)"
)

_APPLICATION = 0x434D4131  # "CMA1": sets our databases apart from those of other programs
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
_KEPT = "every saved answer is kept"
_DAMAGED = "the database is damaged; restore a copy or choose another {flag}"
_BUSY = "another program writes to this database; close it and try again"
_FORBIDDEN = "no permission to write there; choose another {flag}"
_FIXES = {
    sqlite3.SQLITE_FULL: f"no space left on the disk; free some and answer again ({_KEPT})",
    sqlite3.SQLITE_IOERR: f"the disk cannot be written or read; check its space and health and start again ({_KEPT})",
    sqlite3.SQLITE_READONLY: "the file or its disk is read-only; make it writable or choose another {flag}",
    sqlite3.SQLITE_PERM: _FORBIDDEN,
    sqlite3.SQLITE_AUTH: _FORBIDDEN,
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; check the permissions of its folder or choose another {flag}",
    sqlite3.SQLITE_NOTADB: "not a database of answers; choose another {flag}",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
}


@contextmanager
def one_server(path: Path, flag: str) -> Iterator[None]:
    """Hold a database for this process; a second server gets an InputError. The kernel frees it after a crash."""
    check_target(path)
    target = Path(os.path.realpath(path))
    lock = target.with_name(f"{target.name}.lock")
    with ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(lock))
        except InUse:
            holder = (lock / ".lock").read_text(encoding="utf-8").strip() or "unknown"
            raise InputError(
                f"{path}: another server uses this database (pid {holder}); "
                f"use its page, stop it, or choose another {flag}"
            ) from None
        except OSError as error:  # the disk is full: the lock's own file does not fit
            raise write_error(error, path) or InputError(str(error.strerror), path) from None
        yield


class Database:
    """An open, checked database of answers, created if it does not exist. Any thread may use it.

    `flag` is the option that names the database, for messages. WAL: readers do not wait. synchronous=FULL: a commit is
    on the disk before it returns, even if the power fails.
    """

    def __init__(self, path: Path, *, flag: str = "--db", read_only: bool = False) -> None:
        self.path, self.flag, self.lock = path, flag, threading.RLock()
        if path.is_dir():
            raise InputError(f"{path}: is a folder; give the database in it, for example --db {path / 'answers.db'}")
        if read_only and not path.is_file():
            raise InputError(f"{path}: no such file; check {flag}")
        address = f"{Path(os.path.realpath(path)).as_uri()}?mode={'rw' if read_only else 'rwc'}"
        with self.access():
            self.connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(read_only)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    @contextmanager
    def access(self) -> Iterator[None]:
        """Alone on this database; SQLite's errors are InputErrors that name the file and the fix."""
        try:
            with self.lock:
                yield
        except sqlite3.Error as error:
            code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF  # extended codes end in the plain one
            if (fix := _FIXES.get(code)) is None:
                raise
            raise self._refusal(fix) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction: on the disk when the block ends, undone when it fails."""
        with self.access():
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:  # a full disk may have rolled it back already
                    self.connection.execute("ROLLBACK")
                raise

    def select(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        """The rows that a query finds, by column name."""
        with self.access():
            cursor = self.connection.cursor()
            cursor.row_factory = sqlite3.Row
            return [dict(row) for row in cursor.execute(query, values)]

    def number(self, query: str, values: Sequence[Any] = ()) -> int:
        """The one number that a query finds."""
        with self.access():
            return int(self.connection.execute(query, values).fetchone()[0])

    def _refusal(self, text: str) -> InputError:
        return InputError(f"{self.path}: {text.format(flag=self.flag)}")

    def _prepare(self, read_only: bool) -> None:
        queries = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        application, version, n_tables = (self.number(query) for query in queries)
        fresh = (application, version, n_tables) == (0, 0, 0)
        if not fresh and application != _APPLICATION:
            raise self._refusal("a database of another program; choose another {flag}")
        if not fresh and version != _VERSION:
            fix = "update constraintmatch" if version > _VERSION else "choose another {flag}"
            raise self._refusal(f"a database of version {version}; this program knows version {_VERSION}; {fix}")
        if fresh and read_only:
            raise self._refusal("an empty file, not a database of answers; check {flag}")
        if read_only:  # not mode=ro: that would leave the -wal and -shm files next to the database
            self.connection.execute("PRAGMA query_only = ON")
        else:
            for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                self.connection.execute(f"PRAGMA {setting}")
        if fresh:
            with self.transaction():
                for statement in _TABLES:
                    self.connection.execute(statement)
                self.connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                self.connection.execute(f"PRAGMA user_version = {_VERSION}")
        if self.connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise self._refusal(_DAMAGED)
