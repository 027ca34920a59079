"""What a store is made of: the file with its tables, the rows in Python, and the graph of the links they state."""

import json
import os
import shlex
import sqlite3
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unicodedata import category

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import InUse, check_target, folder_lock, write_error
from constraintmatch.annotate import tables
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question

_Edges = defaultdict[int, dict[int, list[int]]]  # image -> the other image -> answers that say so, oldest first
_Tree = dict[int, int]  # image -> the image before it on the way from the root; the root -> itself

LONGEST = 100  # characters of an annotator's or a cluster's name
_KEPT = "every saved answer is kept"
_SAVE = "save what can be read: constraintmatch repair {path} --out repaired.db"
_DAMAGED = f"the database is damaged; {_SAVE}"
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


@dataclass(frozen=True)
class Asked:
    """A question with its number in the store."""

    id: int
    question: Question


@dataclass(frozen=True)
class Given:
    """An answer and who gave it. `origin` is the file it comes from; without a time it gets that of its arrival."""

    answer: Answer
    annotator: str
    time: str = ""
    milliseconds: int | None = None
    weight: float = 1.0
    origin: str = ""
    question: int = 0  # its number in the store


@dataclass(frozen=True)
class StoredAnswer:
    """One row of the store, images by name. `answer` has them by row number; None if it is set aside."""

    id: int
    question: int
    image: str
    shown: tuple[str, ...]
    choice: int
    annotator: str
    milliseconds: int | None
    time: str
    weight: float
    origin: str
    nearer: int
    withdrawn: Literal["", "undo", "withdrawn", "changed"]
    answer: Answer | None


@dataclass(frozen=True)
class Contradiction:
    """Two images that one answer keeps apart and a chain of answers holds together.

    `images` is the way from one to the other, `together[k]` the answer that links images[k] and images[k + 1], `apart`
    the answer against it. Images are rows, answers ids.
    """

    images: tuple[int, ...]
    together: tuple[int, ...]
    apart: int


def clean(text: str) -> str:
    """The text without control characters and without what UTF-8 cannot hold."""
    return "".join("\N{REPLACEMENT CHARACTER}" if category(letter) in ("Cc", "Cs") else letter for letter in text)


def annotator_name(text: str) -> str:
    """The name of an annotator as it is stored; an empty or very long one is an InputError."""
    name = clean(text).strip()
    if not 0 < len(name) <= LONGEST:
        raise InputError(f"an annotator needs a name of 1 to {LONGEST} characters, not {len(name):,}")
    return name


def facts_of(image: str, shown: Sequence[str], choice: int, annotator: str, nearer: int) -> set[tuple[Any, ...]]:
    """What an answer says of each pair of images, or of a triplet, and who says it."""
    if nearer:
        return {(annotator, image, *sorted(shown), UNSURE if choice == UNSURE else shown[choice])}
    says = [UNSURE if choice == UNSURE else int(at == choice) for at in range(len(shown))]
    return {(annotator, says[at], *sorted((image, other))) for at, other in enumerate(shown)}


class Database:
    """An open, checked database of answers, created if it does not exist. Any thread may use it.

    `flag` is the option that names the database, for messages. WAL: readers do not wait. synchronous=FULL: a commit is
    on the disk before it returns, even if the power fails.
    """

    def __init__(self, path: Path, *, flag: str = "--db", read_only: bool = False) -> None:
        self.path, self.flag, self.read_only, self.lock = path, flag, read_only, threading.RLock()
        file = Path(os.path.realpath(path))
        if path.is_dir():
            raise InputError(f"{path}: is a folder; give the database in it, for example --db {path / 'answers.db'}")
        if read_only and not path.is_file():
            raise InputError(f"{path}: no such file; check {flag}")
        with self.access(), ExitStack() as stack:
            if not read_only:
                check_target(path)
                self._hold(file.with_name(f"{file.name}.lock"), stack)
            new = not path.exists()
            self.connection = tables.connect(f"{file.as_uri()}?mode={'rw' if read_only else 'rwc'}")
            stack.callback(self.connection.close)
            try:
                self._prepare()
            except BaseException:
                self.connection.close()
                if new:  # not left half made
                    file.unlink(missing_ok=True)
                raise
            self.close = stack.pop_all().close

    def _hold(self, lock: Path, stack: ExitStack) -> None:
        """Hold the file for this process; a second server gets an InputError. The kernel frees it after a crash."""
        try:
            stack.enter_context(folder_lock(lock))
        except InUse:
            holder = (lock / ".lock").read_text(encoding="utf-8").strip() or "unknown"
            fix = "use its page, stop it, or choose another {flag}"
            raise self._refusal(f"another server uses this database (pid {holder}); {fix}") from None
        except OSError as error:  # the disk is full: the lock's own file does not fit
            raise write_error(error, self.path) or InputError(str(error.strerror), str(self.path)) from None

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
        with self.access(), self.connection:  # which commits, or rolls back what is not rolled back already
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection

    def select(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        """The rows that a query finds, by column name."""
        with self.access():
            return [dict(row) for row in self.connection.execute(query, values)]

    def number(self, query: str, values: Sequence[Any] = ()) -> int:
        """The one number that a query finds."""
        with self.access():
            return int(self.connection.execute(query, values).fetchone()[0])

    def _refusal(self, text: str) -> InputError:
        return InputError(f"{self.path}: {text.format(flag=self.flag, path=shlex.quote(str(self.path)))}")

    def _prepare(self) -> None:
        queries = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        application, version, n_tables = (self.number(query) for query in queries)
        self.fresh = fresh = (application, version, n_tables) == (0, 0, 0)
        if not fresh and application != tables.APPLICATION:
            raise self._refusal("a database of another program; choose another {flag}")
        if version == 1 and application == tables.APPLICATION:
            with nullcontext() if self.read_only else self.transaction():
                tables.upgrade_tables(self.connection, read_only=self.read_only)
        elif not fresh and version != tables.VERSION:
            fix = "update constraintmatch" if version > tables.VERSION else "choose another {flag}"
            raise self._refusal(f"a database of version {version}; this program knows version {tables.VERSION}; {fix}")
        if fresh and self.read_only:
            return
        if self.read_only:  # not mode=ro: that would leave the -wal and -shm files next to the database
            self.connection.execute("PRAGMA query_only = ON")
        else:
            for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                self.connection.execute(f"PRAGMA {setting}")
        if fresh:
            with self.transaction():
                tables.create_tables(self.connection)
            self.fresh = False
        self._check()

    def _check(self) -> None:
        """An InputError for a damaged file, a table that is not ours, or a row with a value that cannot be."""
        if self.connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
            raise self._refusal(_DAMAGED)
        if problem := tables.odd_columns(self.connection):
            raise self._refusal(f"{problem}; choose another {{flag}}")
        for (table, number), problem in tables.odd_rows(tables.read_tables(self.connection)).items():
            said = f"table {table} row {number}: {problem}".replace("{", "{{").replace("}", "}}")
            raise self._refusal(f"{said}; {_SAVE}")


def names_in(path: Path) -> set[str]:
    """The images that a database has questions about; none if there is no database yet."""
    if not path.is_file() or not path.stat().st_size:
        return set()
    with closing(Database(path, read_only=True)) as database:
        rows = database.select("SELECT image, shown FROM questions")
    return {name for row in rows for name in (row["image"], *json.loads(row["shown"]))}


class LinkGraph:
    """The links of the answers that stand, what follows from them, and contradictions, found when an answer comes.

    A union-find is faster but cannot forget, and answers are undone and withdrawn. A breadth-first search over a group
    takes about 3 ms at 10,000 images, and an answer needs one to three of them.
    """

    def __init__(self) -> None:
        self._must: _Edges = defaultdict(dict)
        self._cannot: _Edges = defaultdict(dict)

    def add(self, number: int, answer: Answer) -> None:
        """Add the links of an answer."""
        for edges, i, j in self._links(answer):
            edges[i].setdefault(j, []).append(number)
            edges[j][i] = edges[i][j]

    def remove(self, number: int, answer: Answer) -> None:
        """Remove the links of an answer."""
        for edges, i, j in self._links(answer):
            edges[i][j].remove(number)
            if not edges[i][j]:
                del edges[i][j], edges[j][i]

    def _links(self, answer: Answer) -> list[tuple[_Edges, int, int]]:
        """What the answer states: same as the chosen image, or different from all shown.

        The other shown images are different only if no two of them are of one kind. An annotator who sees two that fit
        picks one of them, and that is no contradiction.
        """
        image, shown = answer.question.image, answer.question.shown
        if answer.question.nearer:
            return []
        if answer.choice >= 0:
            return [(self._must, image, shown[answer.choice])]
        return [(self._cannot, image, other) for other in shown] if answer.choice == NONE else []

    def contradictions_of(self, number: int, answer: Answer) -> list[Contradiction]:
        """What the other answers say against this one, which is in the graph: the shortest proof for each of its links.

        A must-link between two groups that were one already brings no new contradiction.
        """
        found = []
        tree = self._tree(answer.question.image)
        for edges, i, j in self._links(answer):
            if edges is self._must:
                found += self._against_must(number, i, j)
            elif j in tree:
                found.append(self._proof(_way(tree, j)[::-1], number))
        return found

    def _against_must(self, number: int, i: int, j: int) -> list[Contradiction]:
        """The nearest earlier cannot-link between the groups that the must-link i–j joins, if there is one."""
        here = self._tree(i, without=j)
        if j in here or self._must[i][j] != [number]:
            return []
        apart = [(a, b) for a in here for b in self._cannot.get(a, ())]
        there = self._tree(j, without=i) if apart else {}  # mostly not: the image is new
        ways = {(a, b): _way(here, a) + _way(there, b)[::-1] for a, b in apart if b in there}
        if not ways:
            return []
        a, b = min(ways, key=lambda ends: (len(ways[ends]), ends))
        return [self._proof(ways[a, b], self._cannot[a][b][0])]

    def n_contradictions(self) -> int:
        """How many pairs of images one answer keeps apart and others hold together."""
        return len(self._find_torn())

    def contradictions(self, limit: int | None = 10) -> list[Contradiction]:
        """The open contradictions, in the order of the answers that keep apart, each pair of images once.

        Each image needs a search of its own: all of many (limit=None) may take long; `n_contradictions` is fast.
        """
        torn = self._find_torn()[:limit]
        often = Counter(image for _, i, j in torn for image in (i, j))
        ways = [(j, i, apart) if often[i] < often[j] else (i, j, apart) for apart, i, j in torn]
        tree = cache(self._tree)
        return [self._proof(_way(tree(root), end)[::-1], apart) for root, end, apart in ways]

    def _find_torn(self) -> list[tuple[int, int, int]]:
        """(answer, i, j) of each cannot-link inside a group, sorted."""
        group: dict[int, int] = {}
        for image in self._must:
            if image not in group:
                group |= dict.fromkeys(self._tree(image), image)
        return sorted(
            (said[0], i, j)
            for i, others in self._cannot.items()
            if i in group
            for j, said in others.items()
            if i < j and group[i] == group.get(j)
        )

    def settles(self, question: Question) -> bool:
        """Whether the answers imply this one: one of the shown images is of the same group, or all are kept apart.

        Then a triplet is known too, or says nothing of groups.
        """
        group = self._tree(question.image)
        if not group.keys().isdisjoint(question.shown):
            return True
        apart = {other for image in group for other in self._cannot.get(image, ())}
        return bool(apart) and all(not apart.isdisjoint(self._tree(shown)) for shown in question.shown)

    def _tree(self, root: int, *, without: int | None = None) -> _Tree:
        """The group of an image by breadth-first search; `without`: not over the link from the root to that image."""
        tree, queue = {root: root}, [root]
        for image in queue:
            for other in self._must.get(image, ()):
                if other not in tree and not (image == root and other == without):
                    tree[other] = image
                    queue.append(other)
        return tree

    def _proof(self, way: list[int], apart: int) -> Contradiction:
        return Contradiction(tuple(way), tuple(self._must[i][j][0] for i, j in pairwise(way)), apart)


def _way(tree: _Tree, end: int) -> list[int]:
    """The images from `end` back to the tree's root."""
    way = [end]
    while way[-1] != tree[way[-1]]:
        way.append(tree[way[-1]])
    return way
