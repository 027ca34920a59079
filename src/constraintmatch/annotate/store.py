"""The answers in SQLite: one row each, on the disk before it is acknowledged, never deleted.

One server holds a database and keeps what stands in memory beside it; any number of threads may use one store. Images
are stored by name, with a tiny thumbnail: a moved or replaced image is noticed, and its answers are set aside.
"""

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from constraintmatch.annotate.contradictions import Clash, LinkGraph
from constraintmatch.annotate.image_identity import Kept, Looks, Place
from constraintmatch.annotate.records import (
    LONGEST,
    AnswerRow,
    Asked,
    Counts,
    Given,
    Recorded,
    Standing,
    TakenIn,
    annotator_name,
    clean,
    facts_of,
    kind_of,
    speed,
    standing_of,
)
from constraintmatch.annotate.schema import connect, sole_server, told
from constraintmatch.answers import UNSURE, Answer, Question
from constraintmatch.errors import InputError
from constraintmatch.images import ImageSet

__all__ = ["AnswerRow", "Asked", "Counts", "Given", "Recorded", "Store", "TakenIn", "open_store"]


@contextmanager
def open_store(
    path: Path | str,
    images: ImageSet,
    *,
    source: Path | str = "",
    pictures: Path | str = "",
    read_only: bool = False,
    claim_seconds: float = 300.0,
    clock: Callable[[], float] = time.time,
) -> Iterator["Store"]:
    """The answers about these images, made when the file is not there.

    `source` is the folder the images come from, and `pictures` that of embeddings' pictures, for messages. A database
    that belongs to other images, is of another version or held by another server is an InputError. `read_only`: to look
    or export while a server runs. A question that an annotator took and did not answer is given to others after
    `claim_seconds`.
    """
    path, place = Path(path), Place(_absolute(source), _absolute(pictures) if images.embedded else None)
    looks = Looks(images)
    if not read_only and path.is_file() and path.stat().st_size:  # what is refused gets no lock beside it
        with closing(connect(path, read_only=True)) as connection:
            Store(connection, path, looks, claim_seconds=claim_seconds, clock=clock).check(place)
    with ExitStack() as stack:
        if not read_only:
            stack.enter_context(sole_server(path))
        connection = stack.enter_context(closing(connect(path, read_only=read_only)))
        store = Store(connection, path, looks, claim_seconds=claim_seconds, clock=clock)
        store.load(place, read_only=read_only)
        yield store


class Store:
    """Open it with `open_store`. Every method may be called from any thread."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        looks: Looks,
        *,
        claim_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.path = path
        self.image_names = looks.image_names
        self.notice: str | None = None  # what was set aside and why, in one line
        self._connection = connection
        self._looks = looks
        self._claim_seconds = claim_seconds
        self._clock = clock
        self._lock = threading.RLock()
        self._graph = LinkGraph()
        self._standing: dict[int, Standing] = {}
        self._kinds: Counter[tuple[str, str]] = Counter()  # (annotator, kind) of those that stand

    # Opening

    def check(self, place: Place) -> tuple[list[dict[str, Any]], Kept]:
        """The questions and which of their images are here; a database of other images is an InputError."""
        with self._lock, told(self.path):
            questions = self._select("SELECT id, image, shown, look FROM questions")
            about = {row["key"]: row["value"] for row in self._select("SELECT key, value FROM about")}
        kept = self._looks.check(questions)
        if kept.is_another_set:
            made = Place(about.get("folder", ""), about.get("pictures"))
            raise InputError(f"{self.path}: {kept.refusal(made, place)}")
        return questions, kept

    def load(self, place: Place, *, read_only: bool) -> None:
        """Check that the database belongs to these images, and take what stands into memory."""
        with self._lock, told(self.path):
            questions, kept = self.check(place)
            here = {row["id"]: self._looks.question(row) for row in questions}
            for row in self._select("SELECT * FROM answers WHERE withdrawn = '' ORDER BY id"):
                if (question := here[row["question"]]) is not None:
                    self._remember(row["id"], standing_of(row, question), check=False)
            self.notice = self._set_aside_line(kept.reason())
        if not read_only:
            self._settle_in(place, [number for number, question in here.items() if question is None])

    def _settle_in(self, place: Place, unaskable: list[int]) -> None:
        retire = "UPDATE questions SET state = 'retired' WHERE id = ? AND state = 'waiting'"
        with self._writing() as connection:
            connection.executemany(retire, [(number,) for number in unaskable])
            about = {
                "opened": self._now()
            }  # written in any case: a read-only file is told now, not at the first answer
            if place.source:
                about["folder"] = place.source
            if place.pictures is not None:
                about["pictures"] = place.pictures
            connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about.items())

    def _set_aside_line(self, reason: str) -> str | None:
        n = self._n_set_aside()
        return (
            f"{self.path}: {n:,} {'answer is' if n == 1 else 'answers are'} kept but set aside: {reason}" if n else None
        )

    def _n_set_aside(self) -> int:
        return self._number("SELECT count(*) FROM answers WHERE withdrawn = ''") - len(self._standing)

    # Asking

    def add_questions(
        self, questions: Iterable[Question], *, model: str = "", urgent: bool = False, replace: bool = False
    ) -> int:
        """Queue questions for asking; how many were new.

        A question (same image, same shown images in any order) that waits or is answered is not queued again; one
        answered with unsure or withdrawn is. `urgent`: asked first, and even if the answers imply it. `replace`: those
        that wait and that nobody holds are dropped first, because a newer model chose better ones.
        """
        with self._writing() as connection:
            if replace:
                connection.execute(
                    "UPDATE questions SET state = 'retired' WHERE state = 'waiting' AND NOT urgent "
                    "AND (holder IS NULL OR held_until <= ?)",
                    (self._clock(),),
                )
            return sum(self._queue(question, model, urgent) for question in questions)

    def _queue(self, question: Question, model: str, urgent: bool) -> bool:
        key = self._looks.key(question)
        alike = self._select(
            "SELECT questions.* FROM questions LEFT JOIN answers ON question = questions.id AND withdrawn = '' "
            "WHERE key = ? AND (state = 'waiting' OR (state = 'answered' AND choice != ?))",
            (key, UNSURE),
        )
        known = any(self._looks.question(row) is not None for row in alike)  # else it is about replaced pictures
        if urgent and known:  # waiting: sooner now
            self._connection.execute("UPDATE questions SET urgent = 1 WHERE key = ? AND state = 'waiting'", (key,))
        if known:
            return False
        self._insert_question(question, model, "waiting", urgent=urgent)
        return True

    def _insert_question(self, question: Question, model: str, state: str, *, urgent: bool = False) -> int:
        image, shown = self._looks.names(question)
        values = (image, json.dumps(shown, ensure_ascii=False), self._looks.look(question), self._looks.key(question))
        made = self._connection.execute(
            "INSERT INTO questions (image, shown, look, key, model, added, urgent, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, clean(model), self._now(), urgent, state),
        )
        return int(made.lastrowid or 0)

    def claim(self, annotator: str, n: int = 1) -> list[Asked]:
        """Up to n questions for this annotator, who holds them until they are answered or the claim times out.

        After urgent ones those held already come first, so asking again (a page loaded anew) gives the same. Questions
        that the answers imply by now are retired on the way.
        """
        who, now = annotator_name(annotator), self._clock()
        claimed: list[Asked] = []
        with self._writing() as connection:
            for row in self._askable(who, now):
                if len(claimed) == n:
                    break
                question = self._looks.question(row)
                if question is None or (not row["urgent"] and self._graph.settles(question)):
                    connection.execute("UPDATE questions SET state = 'retired' WHERE id = ?", (row["id"],))
                else:
                    claimed.append(Asked(row["id"], question))
            held = [(who, now + self._claim_seconds, asked.id) for asked in claimed]
            connection.executemany("UPDATE questions SET holder = ?, held_until = ? WHERE id = ?", held)
        return claimed

    def _askable(self, who: str, now: float) -> list[dict[str, Any]]:
        return self._select(
            "SELECT id, image, shown, look, urgent FROM questions WHERE state = 'waiting' "
            "AND (holder IS NULL OR holder = :who OR held_until <= :now) "
            "ORDER BY urgent DESC, (holder IS :who AND held_until > :now) DESC, id",
            {"who": who, "now": now},
        )

    def unanswered(self, asked: Iterable[Asked]) -> list[Asked]:
        """Those questions that no answer which stands has answered."""
        with self._lock:
            answered = {standing.question for standing in self._standing.values()}
        return [one for one in asked if one.id not in answered]

    def release(self, annotator: str) -> None:
        """Give back what this annotator holds, for others to answer."""
        with self._writing() as connection:
            connection.execute("UPDATE questions SET holder = NULL WHERE holder = ?", (annotator_name(annotator),))

    # Answering

    def answer(self, asked_id: int, choice: int, annotator: str, milliseconds: int | None = None) -> Recorded:
        """Store an answer; it is on the disk when this returns.

        The same answer sent twice (a lost reply) is stored once; another answer to an answered question is an
        InputError, whoever gives it: the first one counts until it is undone or settled.
        """
        who, pace = annotator_name(annotator), _milliseconds(milliseconds)
        with self._lock:
            question, state = self._asked(asked_id)
            answer = Answer(question, choice)
            if state == "answered":
                return self._again(asked_id, answer, who)
            standing = Standing(answer, asked_id, who, pace, "")
            with self._writing() as connection:
                number = self._insert_answer(standing)
                connection.execute("UPDATE questions SET state = 'answered', holder = NULL WHERE id = ?", (asked_id,))
            return Recorded(number, self._remember(number, standing))

    def _again(self, asked_id: int, answer: Answer, who: str) -> Recorded:
        for number, known in reversed(self._standing.items()):
            if known.question == asked_id:
                if (known.answer, known.annotator) == (answer, who):
                    return Recorded(number, self._graph.clashes_of(number, answer))
                raise InputError(f"question {asked_id:,} is already answered (by {known.annotator}); undo that first")
        raise InputError(f"question {asked_id:,} is already answered")

    def _asked(self, asked_id: int) -> tuple[Question, str]:
        found = self._select("SELECT * FROM questions WHERE id = ?", (asked_id,)) if 0 < asked_id < 2**63 else []
        question = self._looks.question(found[0]) if found else None
        if question is None:
            raise InputError(f"question {asked_id} is not in {self.path}; reload the page")
        return question, found[0]["state"]

    def _insert_answer(
        self, standing: Standing, *, at: str = "", weight: float = 1.0, replaces: int | None = None
    ) -> int:
        made = self._connection.execute(
            "INSERT INTO answers (question, choice, annotator, milliseconds, time, weight, origin, replaces) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                standing.question,
                standing.answer.choice,
                standing.annotator,
                standing.milliseconds,
                at or self._now(),
                weight,
                standing.origin,
                replaces,
            ),
        )
        return int(made.lastrowid or 0)

    def undo(self, annotator: str) -> Asked | None:
        """Take back this annotator's last answer that stands and give the question back; None when there is none.

        Answers that came from a file are not reached.
        """
        who = annotator_name(annotator)
        with self._lock:
            last = next((n for n, s in reversed(self._standing.items()) if s.annotator == who and not s.origin), None)
            if last is None:
                return None
            standing = self._standing[last]
            with self._writing() as connection:
                self._withdraw(last, who, "undo")
                connection.execute(
                    "UPDATE questions SET state = 'waiting', urgent = 1, holder = ?, held_until = ? WHERE id = ?",
                    (who, self._clock() + self._claim_seconds, standing.question),
                )
            self._forget(last)
            return Asked(standing.question, standing.answer.question)

    def settle(self, answer_id: int, annotator: str, choice: int | None = None) -> Recorded:
        """Settle a contradiction by withdrawing an answer, or by changing it to another choice.

        The old row stays, marked; a change is a new row. Comes back with the number of the answer that stands now (the
        withdrawn one's where none does) and the contradictions that are left.
        """
        who = annotator_name(annotator)
        with self._lock:
            old = self._standing.get(answer_id)
            if old is None:
                raise InputError(f"answer {answer_id} does not stand in {self.path}; reload the page")
            answer = None if choice is None else Answer(old.answer.question, choice)
            if answer == old.answer:
                return Recorded(answer_id, self.clashes())
            number = answer_id
            with self._writing() as connection:
                self._withdraw(answer_id, who, "withdrawn" if answer is None else "changed")
                if answer is None:
                    connection.execute("UPDATE questions SET state = 'retired' WHERE id = ?", (old.question,))
                else:
                    new = Standing(answer, old.question, who, None, "")
                    number = self._insert_answer(new, replaces=answer_id)
            self._forget(answer_id)
            if answer is not None:
                self._remember(number, new)
            return Recorded(number, self.clashes())

    def _withdraw(self, answer_id: int, who: str, why: str) -> None:
        self._connection.execute(
            "UPDATE answers SET withdrawn = ?, withdrawn_by = ?, withdrawn_at = ? WHERE id = ?",
            (why, who, self._now(), answer_id),
        )

    def take_in(self, given: Iterable[Given], origin: str) -> TakenIn:
        """Store answers that come from a file, all of them or none.

        What the same annotator has said of the same images, even if withdrawn since, is known and not stored again: a
        file can be imported twice.
        """
        with self._lock:
            said = {fact for row in self.rows() for fact in facts_of(row.image, row.shown, row.choice, row.annotator)}
            taken: list[tuple[int, Standing]] = []
            n_known = 0
            with self._writing():
                for one in given:
                    who = annotator_name(one.annotator)
                    image, shown = self._looks.names(one.answer.question)
                    facts = facts_of(image, shown, one.answer.choice, who)
                    if facts <= said:
                        n_known += 1
                        continue
                    said |= facts
                    question = self._insert_question(one.answer.question, "", "answered")
                    standing = Standing(one.answer, question, who, _milliseconds(one.milliseconds), clean(origin))
                    taken.append((self._insert_answer(standing, at=clean(one.time), weight=one.weight), standing))
            for number, standing in taken:
                self._remember(number, standing, check=False)
            return TakenIn(len(taken), n_known)

    # Looking

    def answers(self) -> list[Answer]:
        """The answers that stand, in their order; those set aside are not among them."""
        with self._lock:
            return [standing.answer for standing in self._standing.values()]

    def rows(self) -> list[AnswerRow]:
        """Every answer ever given, withdrawn ones and those set aside too, in their order."""
        with self._lock, told(self.path):
            return [self._row(row) for row in self._select(f"{_ROWS} ORDER BY answers.id")]

    def row(self, answer_id: int) -> AnswerRow:
        """One answer, whether it stands or not."""
        with self._lock, told(self.path):
            found = self._select(f"{_ROWS} WHERE answers.id = ?", (answer_id,)) if 0 < answer_id < 2**63 else []
            if not found:
                raise InputError(f"answer {answer_id} is not in {self.path}; reload the page")
            return self._row(found[0])

    def _row(self, row: dict[str, Any]) -> AnswerRow:
        question = self._looks.question(row)
        answer = None if question is None else Answer(question, row["choice"])
        values = row | {"shown": tuple(json.loads(row["shown"])), "answer": answer}
        return AnswerRow(**{name: value for name, value in values.items() if name != "look"})

    def clashes(self, limit: int | None = 10) -> list[Clash]:
        """The contradictions that stand, oldest first; all of many (limit=None) may take long."""
        with self._lock:
            return self._graph.clashes(limit)

    def n_clashes(self) -> int:
        """How many contradictions stand."""
        with self._lock:
            return self._graph.n_clashes()

    def counts(self, annotator: str | None = None) -> Counts:
        """How many answers of each kind stand, of everybody or of one annotator."""
        who = None if annotator is None else annotator_name(annotator)
        with self._lock, told(self.path):
            kinds: Counter[str] = Counter()
            for (name, kind), n in self._kinds.items():
                kinds[kind] += n if who in (None, name) else 0
            by = ("", ()) if who is None else (" AND annotator = ?", (who,))
            withdrawn = self._number(f"SELECT count(*) FROM answers WHERE withdrawn != ''{by[0]}", by[1])
            unwithdrawn = self._number(f"SELECT count(*) FROM answers WHERE withdrawn = ''{by[0]}", by[1])
            return Counts(
                answered=kinds.total(),
                same=kinds["same"],
                different=kinds["different"],
                which=kinds["which"],
                none=kinds["none"],
                unsure=kinds["unsure"],
                withdrawn=withdrawn,
                set_aside=unwithdrawn - kinds.total(),
                waiting=self._number("SELECT count(*) FROM questions WHERE state = 'waiting'"),
                per_minute=speed(s for s in reversed(self._standing.values()) if who in (None, s.annotator)),
            )

    def names(self) -> dict[int, str]:
        """The names that people gave to clusters."""
        with self._lock, told(self.path):
            return {row["cluster"]: row["name"] for row in self._select("SELECT cluster, name FROM clusters")}

    def rename(self, cluster: int, text: str) -> None:
        """Give a cluster a name; an empty one takes the name away."""
        name = clean(text).strip()
        if not 0 <= cluster < 2**31 or len(name) > LONGEST:
            raise InputError(
                f"cluster {cluster}: a name has at most {LONGEST} characters, a cluster's number counts from 0"
            )
        with self._writing() as connection:
            connection.execute("DELETE FROM clusters WHERE cluster = ?", (cluster,))
            if name:
                connection.execute("INSERT INTO clusters VALUES (?, ?)", (cluster, name))

    # Inside

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: on the disk when the block ends, undone when it fails."""
        with self._lock, told(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk may have rolled it back already
                    self._connection.execute("ROLLBACK")
                raise

    def _remember(self, number: int, standing: Standing, *, check: bool = True) -> list[Clash]:
        self._standing[number] = standing
        self._kinds[standing.annotator, kind_of(standing.answer)] += 1
        if check:
            return self._graph.add_checked(number, standing.answer)
        self._graph.add(number, standing.answer)
        return []

    def _forget(self, number: int) -> None:
        standing = self._standing.pop(number)
        self._kinds[standing.annotator, kind_of(standing.answer)] -= 1
        self._graph.remove(number, standing.answer)

    def _select(self, query: str, values: Sequence[Any] | dict[str, Any] = ()) -> list[dict[str, Any]]:
        cursor = self._connection.cursor()
        cursor.row_factory = sqlite3.Row
        return [dict(row) for row in cursor.execute(query, values)]

    def _number(self, query: str, values: Sequence[Any] = ()) -> int:
        return int(self._connection.execute(query, values).fetchone()[0])

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")


_ROWS = (
    "SELECT answers.id, question, image, shown, look, choice, annotator, milliseconds, time, model, weight, origin, "
    "withdrawn FROM answers JOIN questions ON questions.id = question"
)


def _absolute(place: Path | str) -> str:
    """A folder or file as it is noted and told; a data set's name stays."""
    return clean(str(Path(place).resolve())) if str(place) and Path(place).exists() else clean(str(place))


def _milliseconds(value: int | None) -> int | None:
    return None if value is None else min(max(value, 0), 2**53)
