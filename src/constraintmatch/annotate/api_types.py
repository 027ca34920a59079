"""The models that the store, the question queue and the page share. The page gets them as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Literal
from unicodedata import category

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.contradictions import Contradiction
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question

__all__ = [
    "LONGEST",
    "AnswerReply",
    "AskReply",
    "Asked",
    "Cluster",
    "ClusterName",
    "Clusters",
    "Counts",
    "Given",
    "Held",
    "Image",
    "OpenContradictions",
    "Recorded",
    "ShownContradiction",
    "ShownQuestion",
    "State",
    "Statement",
    "StoredAnswer",
    "Tile",
    "UndoReply",
    "annotator_name",
    "clean",
    "facts_of",
    "shown_contradiction",
    "speed",
]

LONGEST = 100  # characters of an annotator's or a cluster's name
_RECENT = 50  # answers that decide the speed
_PAUSE = 60_000  # milliseconds; who takes longer has left


# What the store takes and gives


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
    model: str
    weight: float
    origin: str
    withdrawn: Literal["", "undo", "withdrawn", "changed"]
    answer: Answer | None

    def statement(self, one: int, other: int, link: bool, names: Sequence[str]) -> "Statement":
        """What this answer says of two images, as the page shows it."""
        change_to = NONE
        if not link and self.answer is not None:
            question = self.answer.question
            change_to = question.shown.index(other if question.image == one else one)
        return Statement(
            answer=self.id,
            kind="pair" if len(self.shown) == 1 else "which",
            left=Image(one, names[one]),
            right=Image(other, names[other]),
            link=link,
            change_to=change_to,
            annotator=self.annotator,
            time=self.time,
        )

    def statements_about(self, image: int, names: Sequence[str]) -> "list[Statement]":
        """What this answer says of an image; nothing if it is unsure, withdrawn or set aside."""
        if self.answer is None or self.withdrawn or self.choice == UNSURE:
            return []
        asked, shown = self.answer.question.image, self.answer.question.shown
        pairs = [(asked, other, at == self.choice) for at, other in enumerate(shown)]
        return [self.statement(*pair, names) for pair in pairs if image in pair[:2]]


@dataclass(frozen=True)
class Recorded:
    """The number of an answer in the store, and the contradictions that it makes or leaves."""

    id: int
    contradictions: list[Contradiction]


# What the page gets


@dataclass(frozen=True)
class Counts:
    """The answers that stand; `same` and `different` count both kinds of questions."""

    answered: int
    same: int
    different: int
    unsure: int
    withdrawn: int
    per_minute: float


@dataclass(frozen=True)
class State:
    """Where the work stands."""

    database: str
    source: str
    model: str | None
    images: int
    counts: Counts
    wanted: int | None
    certain: float
    contradictions: int
    activity: str | None


@dataclass(frozen=True)
class Image:
    """An image and the name of its cluster, if somebody gave it one."""

    row: int
    name: str
    cluster: str | None = None


@dataclass(frozen=True)
class ShownQuestion:
    """A question as the page shows it."""

    id: int
    kind: str
    image: Image
    shown: list[Image]


@dataclass(frozen=True)
class Held:
    """The questions that this annotator holds now; `done` if nothing is left to ask."""

    questions: list[ShownQuestion]
    done: bool
    problem: str | None


@dataclass(frozen=True)
class Statement:
    """What an answer says of two images, and the choice that says the opposite."""

    answer: int
    kind: str
    left: Image
    right: Image
    link: bool
    change_to: int
    annotator: str
    time: str


@dataclass(frozen=True)
class ShownContradiction:
    """Answers that cannot all be right: first the one that keeps apart, then the chain that holds together."""

    text: str
    answers: list[Statement]


@dataclass(frozen=True)
class AnswerReply:
    """An answer that is on the disk."""

    answer: int
    contradictions: list[ShownContradiction]
    held: Held
    state: State


@dataclass(frozen=True)
class UndoReply:
    """The question of the answer that was undone; null if there was none."""

    question: ShownQuestion | None
    held: Held
    state: State


@dataclass(frozen=True)
class OpenContradictions:
    """The open contradictions, up to ten."""

    contradictions: list[ShownContradiction]
    state: State


@dataclass(frozen=True)
class AskReply:
    """The question about an image, or the answers that place it already."""

    question: ShownQuestion | None
    said: list[Statement]
    held: Held


@dataclass(frozen=True)
class Tile:
    """An image in a gallery."""

    row: int
    name: str
    confidence: float | None


@dataclass(frozen=True)
class Cluster:
    """A part of the gallery of a cluster."""

    cluster: int
    name: str
    size: int
    confidence: float | None
    images: list[Tile]


@dataclass(frozen=True)
class Clusters:
    """The galleries: the clusters of the model, or without a model the groups that answers make."""

    model: bool
    clusters: list[Cluster]


@dataclass(frozen=True)
class ClusterName:
    """The name of a cluster now."""

    cluster: int
    name: str


def shown_contradiction(found: Contradiction, rows: Sequence[StoredAnswer], names: Sequence[str]) -> ShownContradiction:
    """A contradiction as the page shows it. `rows` are its answers: the one that keeps apart, then each link."""
    ends = found.images[0], found.images[-1]
    steps = [(*ends, False), *((*step, True) for step in pairwise(found.images))]
    said = [row.statement(*step, names) for row, step in zip(rows, steps, strict=True)]
    first, last = (names[row] for row in ends)
    others = "another says same" if len(said) == 2 else f"{len(said) - 1:,} others together say same"
    return ShownContradiction(f"{first} and {last}: one answer says different, {others}.", said)


def facts_of(image: str, shown: Sequence[str], choice: int, annotator: str) -> set[tuple[Any, ...]]:
    """What an answer says of each pair of images, and who says it."""
    says = [UNSURE if choice == UNSURE else int(at == choice) for at in range(len(shown))]
    return {(annotator, says[at], *sorted((image, other))) for at, other in enumerate(shown)}


def speed(milliseconds: Iterable[int | None]) -> float:
    """Answers per minute over the last answers (their times, newest first), pauses cut short."""
    timed = list(islice((min(max(one, 0), _PAUSE) for one in milliseconds if one is not None), _RECENT))
    return round(60_000 * len(timed) / max(sum(timed), 1), 1) if timed else 0.0


def clean(text: str) -> str:
    """The text without control characters and without what UTF-8 cannot hold."""
    return "".join("\N{REPLACEMENT CHARACTER}" if category(letter) in ("Cc", "Cs") else letter for letter in text)


def annotator_name(text: str) -> str:
    """The name of an annotator as it is stored; an empty or very long one is an InputError."""
    name = clean(text).strip()
    if not 0 < len(name) <= LONGEST:
        raise InputError(f"an annotator needs a name of 1 to {LONGEST} characters, not {len(name):,}")
    return name
