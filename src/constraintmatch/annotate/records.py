"""What the store of answers hands out and takes in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal
from unicodedata import category

from constraintmatch.annotate.contradictions import Clash
from constraintmatch.answers import NONE, UNSURE, Answer, Question
from constraintmatch.errors import InputError

__all__ = [
    "LONGEST",
    "AnswerRow",
    "Asked",
    "Counts",
    "Given",
    "Recorded",
    "Standing",
    "TakenIn",
    "annotator_name",
    "clean",
    "facts_of",
    "kind_of",
    "speed",
    "standing_of",
]

LONGEST = 100  # characters of an annotator's or a cluster's name
_RECENT = 50  # answers that tell the speed
_PAUSE = 60_000  # milliseconds; who takes longer has left the desk


@dataclass(frozen=True)
class Asked:
    """A question with its number in the store."""

    id: int
    question: Question


@dataclass(frozen=True)
class Recorded:
    """An answer's number in the store, and what the other answers say against it."""

    id: int
    contradictions: list[Clash]


@dataclass(frozen=True)
class Counts:
    """How many answers stand, by kind; `answered` is the sum of the next five."""

    answered: int
    same: int
    different: int
    which: int
    none: int
    unsure: int
    withdrawn: int
    set_aside: int
    waiting: int
    per_minute: float


@dataclass(frozen=True)
class AnswerRow:
    """One row of the store, images by name; `answer` has them by row number, None where it is set aside."""

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


@dataclass(frozen=True)
class Given:
    """An answer that comes from a file; without a time, that of its arrival."""

    answer: Answer
    annotator: str
    time: str = ""
    milliseconds: int | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class TakenIn:
    """What became of answers from a file: new ones, and ones that the store had."""

    n_new: int
    n_known: int


@dataclass(frozen=True)
class Standing:
    """What memory keeps of an answer that stands."""

    answer: Answer
    question: int
    annotator: str
    milliseconds: int | None
    origin: str


def standing_of(row: Mapping[str, Any], question: Question) -> Standing:
    """A stored answer that stands, with its question by row numbers."""
    answer = Answer(question, row["choice"])
    return Standing(answer, row["question"], row["annotator"], row["milliseconds"], row["origin"])


def kind_of(answer: Answer) -> str:
    """What `Counts` counts it as."""
    if answer.choice == UNSURE:
        return "unsure"
    pair = answer.question.kind == "pair"
    if answer.choice == NONE:
        return "different" if pair else "none"
    return "same" if pair else "which"


def facts_of(image: str, shown: Sequence[str], choice: int, annotator: str) -> set[tuple[Any, ...]]:
    """What an answer says of each pair of images, and who says it."""
    says = [UNSURE if choice == UNSURE else int(at == choice) for at in range(len(shown))]
    return {(annotator, says[at], *sorted((image, other))) for at, other in enumerate(shown)}


def speed(latest: Iterable[Standing]) -> float:
    """Answers per minute of one person over the last ones (given newest first), pauses cut short."""
    timed = (min(one.milliseconds, _PAUSE) for one in latest if one.milliseconds is not None)
    paces = list(islice(timed, _RECENT))
    return round(60_000 * len(paces) / max(sum(paces), 1), 1) if paces else 0.0


def clean(text: str) -> str:
    """The text without control characters and without what UTF-8 cannot hold."""
    return "".join("\N{REPLACEMENT CHARACTER}" if category(letter) in ("Cc", "Cs") else letter for letter in text)


def annotator_name(text: str) -> str:
    """An annotator's name as it is stored; an empty or very long one is an InputError."""
    name = clean(text).strip()
    if not 0 < len(name) <= LONGEST:
        raise InputError(f"an annotator needs a name of 1 to {LONGEST} characters, not {len(name):,}")
    return name
