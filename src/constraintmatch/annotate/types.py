"""What the page and the server say to each other, as OpenAPI describes it."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from constraintmatch.answers import MAX_SHOWN, NONE, UNSURE

__all__ = [
    "AnswerIn",
    "AskIn",
    "AskOut",
    "AskedOut",
    "ClaimIn",
    "ClashOut",
    "ClashesOut",
    "ClusterOut",
    "ClustersOut",
    "CountsOut",
    "ImageOut",
    "NameIn",
    "NameOut",
    "Problem",
    "QuestionsOut",
    "RecordedOut",
    "SaidOut",
    "SettleIn",
    "StateOut",
    "TileOut",
    "UndoIn",
    "UndoOut",
]


def _whole(value: object) -> object:
    """7.0 is a whole number to JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)
Annotator = Annotated[str, Field(min_length=1, max_length=40, pattern=r"\S", description="Who answers.")]
Number = Annotated[int, Field(ge=1, le=2**53), Whole]
Row = Annotated[int, Field(ge=0, le=2**31 - 1, description="The image's row in the set."), Whole]
Hold = Annotated[int, Field(ge=0, le=50, description="How many questions the page wants to hold."), Whole]
Choice = Annotated[
    int,
    Field(
        ge=UNSURE,
        lt=MAX_SHOWN,
        description=f"The place of the chosen image (of a pair: 0, same), {NONE} none (different), {UNSURE} unsure.",
    ),
    Whole,
]


class _In(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ClaimIn(_In):
    """Who wants questions, and how many to hold."""

    annotator: Annotator
    hold: Hold = 1


class AnswerIn(_In):
    """An answer; sent again, it is stored once."""

    question: Number
    choice: Choice
    annotator: Annotator
    milliseconds: Annotated[int, Field(ge=0, le=86_400_000), Whole]
    hold: Hold = 0


class UndoIn(_In):
    """Whose last answer to take back."""

    annotator: Annotator
    hold: Hold = 0


class SettleIn(_In):
    """An answer to withdraw (no choice) or to change."""

    answer: Number
    choice: Choice | None = None
    annotator: Annotator


class AskIn(_In):
    """An image to ask about."""

    image: Row
    annotator: Annotator
    hold: Hold = 1


class NameIn(_In):
    """A cluster's name; an empty one takes the name away."""

    name: Annotated[str, Field(max_length=80)]


class Problem(BaseModel):
    """What is wrong and what to do about it."""

    detail: str


class ImageOut(BaseModel):
    """An image and, where a person has named it, its cluster."""

    row: int
    name: str
    cluster: str | None = None


class AskedOut(BaseModel):
    """A question with its number."""

    id: int
    kind: str
    image: ImageOut
    shown: list[ImageOut]


class CountsOut(BaseModel):
    """Answers that stand; `same` and `different` count both kinds of questions."""

    answered: int
    same: int
    different: int
    unsure: int
    withdrawn: int
    per_minute: float


class StateOut(BaseModel):
    """Where the work stands."""

    database: str
    source: str
    model: str | None
    images: int
    counts: CountsOut
    wanted: int | None
    certain: float
    contradictions: int
    activity: str | None


class QuestionsOut(BaseModel):
    """The questions this annotator holds now; `done` when nothing is left to ask."""

    questions: list[AskedOut]
    done: bool
    problem: str | None


class SaidOut(BaseModel):
    """What an answer says of two images, and what changing it would make of it."""

    answer: int
    kind: str
    left: ImageOut
    right: ImageOut
    link: bool
    change_to: int
    annotator: str
    time: str


class ClashOut(BaseModel):
    """Answers that cannot all be right: the one that keeps apart first, then the chain that holds together."""

    text: str
    answers: list[SaidOut]


class RecordedOut(BaseModel):
    """An answer that is on the disk."""

    answer: int
    contradictions: list[ClashOut]
    held: QuestionsOut
    state: StateOut


class UndoOut(BaseModel):
    """The question that was given back, if any."""

    question: AskedOut | None
    held: QuestionsOut
    state: StateOut


class ClashesOut(BaseModel):
    """The contradictions that stand, up to ten."""

    contradictions: list[ClashOut]
    state: StateOut


class AskOut(BaseModel):
    """The question about an image, or else the answers that place it already."""

    question: AskedOut | None
    said: list[SaidOut]
    held: QuestionsOut


class TileOut(BaseModel):
    """An image in a gallery."""

    row: int
    name: str
    confidence: float | None


class ClusterOut(BaseModel):
    """A part of a cluster's gallery."""

    cluster: int
    name: str
    size: int
    confidence: float | None
    images: list[TileOut]


class ClustersOut(BaseModel):
    """The galleries: the model's clusters, or without a model the groups that answers make."""

    model: bool
    clusters: list[ClusterOut]


class NameOut(BaseModel):
    """A cluster's name now."""

    cluster: int
    name: str
