"""The answers in SQLite: one row each, on the disk before it is acknowledged, never deleted.

One server holds a database and keeps the answers that stand in memory too; any number of threads may use one store.
Images are stored by name, with a tiny thumbnail: the answers about a moved or replaced image are set aside.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.database import (
    LONGEST,
    Asked,
    Contradiction,
    Database,
    Given,
    LinkGraph,
    StoredAnswer,
    annotator_name,
    clean,
    facts_of,
)
from constraintmatch.annotate.thumbnails import ImageIdentity
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question

_RECENT = 50  # answers that decide the speed
_COUNTED = {"same": 0, "different": NONE, "nearer": 1, "unsure": UNSURE}  # 1: both choices of a triplet
_PAUSE = 60_000  # milliseconds; longer is a pause
# Every answer with its question
_ANSWERS = (
    "SELECT answers.id, question, image, shown, look, choice, annotator, milliseconds, time, weight, origin, nearer, "
    "withdrawn FROM answers JOIN questions ON questions.id = question"
)
# The questions with a key that wait, or whose answer has another choice than the given one (unsure)
_ALIKE = (
    "SELECT questions.* FROM questions LEFT JOIN answers ON question = questions.id AND withdrawn = '' "
    "WHERE key = ? AND (state = 'waiting' OR (state = 'answered' AND choice != ?))"
)
# What an annotator may get now: urgent questions first, then those that the annotator holds
_ASKABLE = (
    "SELECT id, image, shown, look, urgent, nearer FROM questions WHERE state = 'waiting' "
    "AND (holder IS NULL OR holder = :who OR held_until <= :now) "
    "ORDER BY urgent DESC, (holder IS :who AND held_until > :now) DESC, id"
)
_DROP_WAITING = (  # those that nobody holds
    "UPDATE questions SET state = 'retired' WHERE state = 'waiting' AND NOT urgent "
    "AND (holder IS NULL OR held_until <= ?)"
)


@contextmanager
def open_store(
    path: Path | str,
    images: ImageSet,
    *,
    source: Path | str = "",
    pictures: Path | str = "",
    read_only: bool = False,
    flag: str = "--db",
    claim_seconds: float = 300.0,
    clock: Callable[[], float] = time.time,
) -> Iterator["Store"]:
    """The answers about these images; a new file if there is none.

    For messages: `source` is the folder of the images, `pictures` that of embeddings, `flag` the option that names the
    database. One of other images or another version, or that another server holds, is an InputError. `read_only`: to
    read while a server runs. After `claim_seconds` others get a question that an annotator took and did not answer.
    """
    path, identity = Path(path), ImageIdentity(images, source, pictures)
    if not read_only and path.is_file() and path.stat().st_size:  # a refused database gets no lock
        with closing(Database(path, flag=flag, read_only=True)) as found:
            identity.check(found)
    with closing(Database(path, flag=flag, read_only=read_only)) as database:
        if database.fresh and read_only:
            raise InputError(f"{path}: an empty file, not a database of answers; check {flag}")
        yield Store(database, identity, claim_seconds, clock)


class Store:
    """Open it with `open_store`. Every method may be called from any thread."""

    def __init__(
        self, database: Database, identity: ImageIdentity, claim_seconds: float, clock: Callable[[], float]
    ) -> None:
        self.path, self.images = database.path, identity.images
        self.notice: str | None = None  # what is set aside and why, in one line
        self._database, self._identity = database, identity
        self._claim_seconds, self._clock = claim_seconds, clock
        here, reason = self._read()
        if n := self.n_set_aside():
            self.notice = f"{self.path}: {n:,} {'answer is' if n == 1 else 'answers are'} kept but set aside: {reason}"
        if database.read_only:
            return
        about = {"opened": self._now(), "folder": identity.source or None, "pictures": identity.pictures}
        with database.transaction() as connection:  # a read-only file shows here, not later
            unaskable = [(number,) for number, question in here.items() if question is None]
            retire = "UPDATE questions SET state = 'retired' WHERE id = ? AND state = 'waiting'"
            connection.executemany(retire, unaskable)
            noted = [(key, value) for key, value in about.items() if value is not None]
            connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", noted)

    def _read(self) -> tuple[dict[int, Question | None], str]:
        """Take the answers that stand from the file; the questions by number, and why some are set aside."""
        self._graph = LinkGraph()
        self._standing: dict[int, Given] = {}
        here, reason = self._identity.check(self._database)
        for row in self._database.select("SELECT * FROM answers WHERE withdrawn = '' ORDER BY id"):
            if (question := here[row["question"]]) is not None:
                columns = {name: row[name] for name in ("annotator", "milliseconds", "origin", "question")}
                self._take_up(row["id"], Given(Answer(question, row["choice"]), **columns))
        return here, reason

    def _take_up(self, number: int, given: Given) -> None:
        self._standing[number] = given
        self._graph.add(number, given.answer)

    def _forget(self, number: int) -> None:
        self._graph.remove(number, self._standing.pop(number).answer)

    def change_images(self, images: ImageSet) -> None:
        """Take more images, or the same in another order."""
        with self._database.lock:
            known = self._identity
            self._identity = ImageIdentity(images, known.source, known.pictures or "")
            self.images = images
            self._read()

    # Ask

    def add_questions(
        self, questions: Iterable[Question], *, model: str = "", urgent: bool = False, replace: bool = False
    ) -> int:
        """Queue questions; how many were new.

        A question (same image, same shown images in any order) that waits or is answered is not queued again; one
        answered with unsure or withdrawn is. `urgent`: asked first, and even if the answers imply it. `replace`: those
        that wait and that nobody holds are dropped first, because a newer model chose better ones.
        """
        with self._database.transaction() as connection:
            if replace:
                connection.execute(_DROP_WAITING, (self._clock(),))
            return sum(self._queue(question, model, urgent) for question in questions)

    def _queue(self, question: Question, model: str, urgent: bool) -> bool:
        key = self._identity.columns(question)[-1]
        alike = self._database.select(_ALIKE, (key, UNSURE))
        known = any(self._identity.question(row) is not None for row in alike)  # else it is about replaced images
        if not known:
            again = not question.nearer and self._graph.settles(question)  # it is to compare two groups again
            self._insert_question(question, model, "waiting", urgent=urgent or again)
        elif urgent:  # waiting: sooner now
            sooner = "UPDATE questions SET urgent = 1 WHERE key = ? AND state = 'waiting'"
            self._database.connection.execute(sooner, (key,))
        return not known

    def _insert_question(self, question: Question, model: str, state: str, *, urgent: bool = False) -> int:
        return self._insert(
            "questions (image, shown, look, key, model, added, urgent, state, nearer)",
            (*self._identity.columns(question), clean(model), self._now(), urgent, state, question.nearer),
        )

    def claim(self, annotator: str, n: int = 1) -> list[Asked]:
        """Up to n questions for this annotator, who holds them until they are answered or the claim times out.

        First urgent ones, then those the annotator holds already, so a page that is loaded again gets the same.
        Questions that the answers imply now are retired on the way.
        """
        who, now = annotator_name(annotator), self._clock()
        claimed: list[Asked] = []
        with self._database.transaction() as connection:
            for row in self._database.select(_ASKABLE, {"who": who, "now": now}):
                if len(claimed) == n:
                    break
                question = self._identity.question(row)
                if question is None or (not row["urgent"] and self._graph.settles(question)):
                    connection.execute("UPDATE questions SET state = 'retired' WHERE id = ?", (row["id"],))
                else:
                    claimed.append(Asked(row["id"], question))
            held = [(who, now + self._claim_seconds, asked.id) for asked in claimed]
            connection.executemany("UPDATE questions SET holder = ?, held_until = ? WHERE id = ?", held)
        return claimed

    def n_waiting(self) -> int:
        """How many questions wait for an answer, held or not."""
        return self._database.number("SELECT count(*) FROM questions WHERE state = 'waiting'")

    def unanswered(self, asked: Iterable[Asked]) -> list[Asked]:
        """The questions that no standing answer has answered."""
        with self._database.lock:
            answered = {given.question for given in self._standing.values()}
        return [one for one in asked if one.id not in answered]

    def release(self, annotator: str) -> None:
        """Give back the questions that this annotator holds."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE questions SET holder = NULL WHERE holder = ?", (annotator_name(annotator),))

    # Answer

    def answer(
        self, asked_id: int, choice: int, annotator: str, milliseconds: int | None = None
    ) -> tuple[int, list[Contradiction]]:
        """Store an answer; it is on the disk when its number and the contradictions that it makes come back.

        The same answer sent twice (a lost reply) is stored once. Another answer to an answered question is an
        InputError for every annotator: the first one counts until it is undone or settled.
        """
        who = annotator_name(annotator)
        with self._database.lock:
            found = self._find("SELECT * FROM questions WHERE id = ?", asked_id)
            question = self._identity.question(found[0]) if found else None
            if question is None:
                raise InputError(f"question {asked_id} is not in {self.path}; reload the page")
            given = Given(Answer(question, choice), who, milliseconds=milliseconds, question=asked_id)
            if found[0]["state"] == "answered":
                return self._again(given)
            with self._database.transaction() as connection:
                number = self._insert_answer(given)
                connection.execute("UPDATE questions SET state = 'answered', holder = NULL WHERE id = ?", (asked_id,))
            self._take_up(number, given)
            return number, self._graph.contradictions_of(number, given.answer)

    def _again(self, given: Given) -> tuple[int, list[Contradiction]]:
        for number, known in reversed(self._standing.items()):
            if known.question == given.question:
                if (known.answer, known.annotator) == (given.answer, given.annotator):
                    return number, self._graph.contradictions_of(number, given.answer)
                by = f"(by {known.annotator}); undo that first"
                raise InputError(f"question {given.question:,} is already answered {by}")
        raise InputError(f"question {given.question:,} is already answered; reload the page")

    def _insert_answer(self, given: Given, replaces: int | None = None) -> int:
        spent = None if given.milliseconds is None else min(max(given.milliseconds, 0), 2**53)
        what = (given.question, given.answer.choice, given.annotator, spent, given.time or self._now(), given.weight)
        columns = "question, choice, annotator, milliseconds, time, weight, origin, replaces"
        return self._insert(f"answers ({columns})", (*what, given.origin, replaces))

    def undo(self, annotator: str) -> Asked | None:
        """Undo the last standing answer of this annotator, who gets the question back; None if there is none.

        Answers that came from a file stay.
        """
        who = annotator_name(annotator)
        with self._database.lock:
            own = (n for n, one in reversed(self._standing.items()) if one.annotator == who and not one.origin)
            if (last := next(own, None)) is None:
                return None
            given = self._standing[last]
            with self._database.transaction() as connection:
                self._withdraw(last, who, "undo")
                connection.execute(
                    "UPDATE questions SET state = 'waiting', urgent = 1, holder = ?, held_until = ? WHERE id = ?",
                    (who, self._clock() + self._claim_seconds, given.question),
                )
            self._forget(last)
            return Asked(given.question, given.answer.question)

    def settle(self, answer_id: int, annotator: str, choice: int | None = None) -> tuple[int, list[Contradiction]]:
        """Settle a contradiction: withdraw an answer, or change it to another choice.

        The old row stays, marked; a change is a new row. Returns the number of the answer that stands now (of the
        withdrawn one if none does) and the contradictions that are left.
        """
        who = annotator_name(annotator)
        with self._database.lock:
            old, number = self._standing.get(answer_id), answer_id
            if old is None:
                raise InputError(f"answer {answer_id} does not stand in {self.path}; reload the page")
            if choice is None:
                with self._database.transaction() as connection:
                    self._withdraw(answer_id, who, "withdrawn")
                    connection.execute("UPDATE questions SET state = 'retired' WHERE id = ?", (old.question,))
                self._forget(answer_id)
            elif choice != old.answer.choice:
                new = Given(Answer(old.answer.question, choice), who, question=old.question)
                with self._database.transaction():
                    self._withdraw(answer_id, who, "changed")
                    number = self._insert_answer(new, replaces=answer_id)
                self._forget(answer_id)
                self._take_up(number, new)
            return number, self.contradictions()

    def _withdraw(self, answer_id: int, who: str, why: str) -> None:
        self._database.connection.execute(
            "UPDATE answers SET withdrawn = ?, withdrawn_by = ?, withdrawn_at = ? WHERE id = ?",
            (why, who, self._now(), answer_id),
        )

    def take_in(self, given: Iterable[Given]) -> int:
        """Store answers that come from a file, all of them or none; how many were new.

        What the same annotator has said of the same images, even if withdrawn since, is not stored again: a file can
        be imported twice.
        """
        with self._database.lock:
            known = ((row.image, row.shown, row.choice, row.annotator, row.nearer) for row in self.rows())
            said = {fact for row in known for fact in facts_of(*row)}
            taken: dict[int, Given] = {}
            with self._database.transaction():
                for one in given:
                    who, asked = annotator_name(one.annotator), one.answer.question
                    image, shown, *_ = self._identity.columns(asked)
                    facts = facts_of(image, json.loads(shown), one.answer.choice, who, asked.nearer)
                    if facts <= said:
                        continue
                    said |= facts
                    number = self._insert_question(asked, "", "answered")
                    new = replace(one, annotator=who, time=clean(one.time), origin=clean(one.origin), question=number)
                    taken[self._insert_answer(new)] = new
            for number, new in taken.items():
                self._take_up(number, new)
            return len(taken)

    # Look

    def answers(self) -> list[Answer]:
        """The answers that stand, in their order, without those set aside."""
        with self._database.lock:
            return [given.answer for given in self._standing.values()]

    def rows(self) -> list[StoredAnswer]:
        """Every answer ever given, withdrawn ones and those set aside too, in their order."""
        return [self._row(row) for row in self._database.select(f"{_ANSWERS} ORDER BY answers.id")]

    def row(self, answer_id: int) -> StoredAnswer:
        """One answer, whether it stands or not."""
        found = self._find(f"{_ANSWERS} WHERE answers.id = ?", answer_id)
        if not found:
            raise InputError(f"answer {answer_id} is not in {self.path}; reload the page")
        return self._row(found[0])

    def _row(self, row: dict[str, Any]) -> StoredAnswer:
        question = self._identity.question(row)
        answer = None if question is None else Answer(question, row["choice"])
        del row["look"]
        return StoredAnswer(**row | {"shown": tuple(json.loads(row["shown"])), "answer": answer})

    def contradictions(self) -> list[Contradiction]:
        """The oldest open contradictions, at most ten."""
        with self._database.lock:
            return self._graph.contradictions()

    def n_contradictions(self) -> int:
        """How many contradictions are open."""
        with self._database.lock:
            return self._graph.n_contradictions()

    def n_set_aside(self) -> int:
        """How many answers are set aside because their images are not here."""
        with self._database.lock:
            n_kept = self._database.number("SELECT count(*) FROM answers WHERE withdrawn = ''")
            return n_kept - len(self._standing)

    def counts(self) -> dict[str, Any]:
        """How many answers of each kind stand (`nearer`: triplets), and answers per minute of late, without pauses."""
        with self._database.lock:
            standing = list(self._standing.values())
            withdrawn = self._database.number("SELECT count(*) FROM answers WHERE withdrawn != ''")
        said = [given.answer for given in standing]
        kinds = Counter(1 if one.question.nearer and one.choice >= 0 else min(one.choice, 0) for one in said)
        times = (given.milliseconds for given in reversed(standing) if given.milliseconds is not None)
        recent = [min(max(one, 0), _PAUSE) for one in islice(times, _RECENT)]
        speed = round(60_000 * len(recent) / max(sum(recent), 1), 1)
        counts = {name: kinds[kind] for name, kind in _COUNTED.items()}
        return {"answered": len(said), **counts, "withdrawn": withdrawn, "per_minute": speed}

    def names(self) -> dict[int, str]:
        """The names that people gave to clusters."""
        return {row["cluster"]: row["name"] for row in self._database.select("SELECT cluster, name FROM clusters")}

    def rename(self, cluster: int, text: str) -> None:
        """Give a cluster a name; an empty one takes the name away."""
        name = clean(text).strip()
        if not 0 <= cluster < 2**31 or len(name) > LONGEST:
            raise InputError(f"cluster {cluster}: use a name of at most {LONGEST} characters, and a number from 0 up")
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM clusters WHERE cluster = ?", (cluster,))
            if name:
                connection.execute("INSERT INTO clusters VALUES (?, ?)", (cluster, name))

    def _find(self, query: str, number: int) -> list[dict[str, Any]]:
        return self._database.select(query, (number,)) if 0 < number < 2**63 else []

    def _insert(self, columns: str, values: tuple[Any, ...]) -> int:
        """Insert a row; its number."""
        places = ", ".join("?" * len(values))
        return int(self._database.connection.execute(f"INSERT INTO {columns} VALUES ({places})", values).lastrowid or 0)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
