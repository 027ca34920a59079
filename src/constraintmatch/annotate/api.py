"""The server of the page: what each route takes and gives. `security` says who may call them."""

import hashlib
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.api_types import (
    AnswerReply,
    Asked,
    AskReply,
    Cluster,
    ClusterName,
    Clusters,
    Held,
    Image,
    OpenContradictions,
    ShownContradiction,
    ShownQuestion,
    State,
    Tile,
    UndoReply,
    shown_contradiction,
)
from constraintmatch.annotate.contradictions import Contradiction
from constraintmatch.annotate.import_export import export_pairs
from constraintmatch.annotate.question_queue import QuestionQueue
from constraintmatch.annotate.security import Rules, protect
from constraintmatch.annotate.thumbnails import Gallery, Thumbnails, galleries
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import MAX_SHOWN, NONE, UNSURE
from constraintmatch.questions.next_question import Belief, certain_share

__all__ = [
    "AnswerRequest",
    "AskRequest",
    "ClaimRequest",
    "NameRequest",
    "Page",
    "SettleRequest",
    "UndoRequest",
    "create_app",
]

LOCAL = Rules(frozenset({"localhost"}))
PAGE_FILES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "script.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_DETAIL = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _DETAIL}}}
    for status, text in {
        400: "The body is not JSON.",
        401: "The token is missing or wrong.",
        403: "The request comes from another site.",
        404: "There is no such image or cluster.",
        409: "It does not fit what is stored: answered already, withdrawn, no such question.",
        413: "The request is too large.",
        415: "The content type is not JSON.",
        421: "The host is not this server.",
        503: "It could not be saved; send it again.",
    }.items()
}


# What the page sends


def _whole(value: object) -> object:
    """7.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)
Annotator = Annotated[str, Field(min_length=1, max_length=40, pattern=r"\S", description="Who answers.")]
Number = Annotated[int, Field(ge=1, le=2**53), Whole]
Row = Annotated[int, Field(ge=0, le=2**31 - 1, description="The row of the image in the set."), Whole]
Hold = Annotated[int, Field(ge=0, le=50, description="How many questions the page wants to hold."), Whole]
_CHOICES = f"The place of the chosen image (of a pair: 0, same), {NONE} none (different), {UNSURE} unsure."
Choice = Annotated[int, Field(ge=UNSURE, lt=MAX_SHOWN, description=_CHOICES), Whole]
Order = Annotated[Literal["typical", "doubtful"], Query(description="Which images come first.")]
Count = Annotated[int, Query(ge=1, le=500, description="How many images.")]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]
RowInPath = Annotated[int, InPath(ge=0, le=2**31 - 1)]
STRICT = ConfigDict(extra="forbid", strict=True)


class UndoRequest(BaseModel):
    """Whose last answer to undo, and how many questions to hold."""

    model_config = STRICT
    annotator: Annotator
    hold: Hold = 0


class AnswerRequest(UndoRequest):
    """An answer; sent again, it is stored once."""

    question: Number
    choice: Choice
    milliseconds: Annotated[int, Field(ge=0, le=86_400_000), Whole]


class ClaimRequest(UndoRequest):
    """Who wants questions, and how many to hold."""

    hold: Hold = 1


class AskRequest(ClaimRequest):
    """An image to ask about."""

    image: Row


class SettleRequest(BaseModel):
    """An answer to withdraw (no choice) or to change."""

    model_config = STRICT
    answer: Number
    choice: Choice | None = None
    annotator: Annotator


class NameRequest(BaseModel):
    """The name of a cluster; an empty one takes the name away."""

    model_config = STRICT
    name: Annotated[str, Field(max_length=80)]


class Page:
    """The routes, and what they work on. `activity` gives a line about the training in the background, or None."""

    def __init__(
        self,
        images: ImageSet,
        queue: QuestionQueue,
        folder: Path | None,
        source: str,
        activity: Callable[[], str | None],
    ) -> None:
        self.images, self.queue, self.source, self.activity = images, queue, source, activity
        self.store, self.belief = queue.store, queue.belief
        self.thumbnails = Thumbnails(images, folder)
        self._implied: tuple[tuple[int, int], Belief | None, float, int] | None = None

    @cached_property
    def database(self) -> str:
        """A name for these images and this database: the browser keeps unsent answers and pictures under it."""
        text = f"{self.store.path.resolve()}\0{self.images.fingerprint()}"
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]

    # Questions and answers

    def state(self) -> State:
        """Where the work stands."""
        counts, belief = self.store.counts(), self.belief()
        key, known = (counts.answered, counts.withdrawn), self._implied
        if known is None or known[0] != key or known[1] is not belief:  # kept until an answer or the belief changes
            certain = 0.0 if belief is None else certain_share(belief, self.store.answers())
            self._implied = known = key, belief, certain, self.store.n_contradictions()
        return State(
            database=self.database,
            source=self.source,
            model=self.queue.model(),
            images=len(self.images),
            counts=counts,
            wanted=self.queue.chooser.total,
            certain=known[2],
            contradictions=known[3],
            activity=self.activity(),
        )

    def claim(self, wanted: ClaimRequest) -> Held:
        """Hold questions: those held before come first, and nobody else gets them meanwhile."""
        return self._held(self.queue.claim(wanted.annotator, wanted.hold))

    def answer(self, given: AnswerRequest) -> AnswerReply:
        """Store an answer; it is on the disk when the response comes."""
        recorded = self.store.answer(given.question, given.choice, given.annotator, given.milliseconds)
        return AnswerReply(recorded.id, self._shown(recorded.contradictions), self._hold_more(given), self.state())

    def undo(self, wanted: UndoRequest) -> UndoReply:
        """Undo the last answer of this annotator; its question comes back."""
        undone = self.store.undo(wanted.annotator)
        held = self._hold_more(wanted)
        return UndoReply(None if undone is None else self._question(undone), held, self.state())

    def _hold_more(self, wanted: UndoRequest) -> Held:
        held = self.queue.claim(wanted.annotator, wanted.hold) if wanted.hold else []
        self.queue.wake()
        return self._held(held)

    def _held(self, held: Iterable[Asked]) -> Held:
        questions = [self._question(asked) for asked in held]
        return Held(questions, self.queue.done and not questions, self.queue.problem)

    def _question(self, asked: Asked) -> ShownQuestion:
        """A question as the page shows it; images of clusters with a name carry the name."""
        names, belief, question = self.store.names(), self.belief(), asked.question
        probabilities = None if belief is None or not names else belief.probabilities
        of = {} if probabilities is None else {row: int(probabilities[row].argmax()) for row in question.shown}
        shown = [Image(row, self.images.names[row], names.get(of.get(row, -1))) for row in question.shown]
        return ShownQuestion(asked.id, question.kind, Image(question.image, self.images.names[question.image]), shown)

    # Contradictions

    def contradictions(self) -> OpenContradictions:
        """The open contradictions, oldest first."""
        return OpenContradictions(self._shown(self.store.contradictions()), self.state())

    def settle(self, wanted: SettleRequest) -> OpenContradictions:
        """Withdraw an answer, or change it; the contradictions that are left come back."""
        left = self.store.settle(wanted.answer, wanted.annotator, wanted.choice).contradictions
        self.queue.wake()
        return OpenContradictions(self._shown(left), self.state())

    def _shown(self, found: Iterable[Contradiction]) -> list[ShownContradiction]:
        rows = self.store.row
        return [
            shown_contradiction(one, [rows(number) for number in (one.apart, *one.together)], self.images.names)
            for one in found
        ]

    # Clusters

    def clusters(self, order: Order = "typical", n: Count = 24) -> Clusters:
        """The first images of every cluster."""
        found = self._galleries()
        shown = [self._cluster(gallery, order, 0, n) for gallery in found]
        return Clusters(any(gallery.confidence is not None for gallery in found), shown)

    def cluster(self, cluster: RowInPath, order: Order = "typical", offset: Offset = 0, n: Count = 96) -> Cluster:
        """More images of a cluster."""
        found = next((gallery for gallery in self._galleries() if gallery.cluster == cluster), None)
        if found is None:
            raise HTTPException(404, f"cluster {cluster} has no images now; reload the page")
        return self._cluster(found, order, offset, n)

    def _galleries(self) -> list[Gallery]:
        return galleries(self.belief(), self.store.answers(), len(self.images))

    def _cluster(self, gallery: Gallery, order: str, offset: int, n: int) -> Cluster:
        """A part of a gallery; a group that answers make has no name of its own."""
        part = slice(offset, offset + n)
        way = 1 if order == "typical" else -1
        rows, sure = gallery.rows[::way][part].tolist(), gallery.confidence
        confidences = [None] * len(rows) if sure is None else [round(float(one), 4) for one in sure[::way][part]]
        tiles = [Tile(row, self.images.names[row], one) for row, one in zip(rows, confidences, strict=True)]
        number, size = gallery.cluster, len(gallery.rows)
        if sure is None:
            return Cluster(number, f"Group {number + 1}", size, None, tiles)
        return Cluster(number, self._name(number), size, round(float(sure.mean()), 4), tiles)

    def _name(self, cluster: int) -> str:
        return self.store.names().get(cluster, f"Cluster {cluster}")

    def rename(self, cluster: RowInPath, given: NameRequest) -> ClusterName:
        """Name a cluster."""
        belief = self.belief()
        known = 0 if belief is None or belief.probabilities is None else belief.probabilities.shape[1]
        if cluster >= known:
            raise HTTPException(404, f"there is no cluster {cluster}: the model has {known:,}")
        self.store.rename(cluster, given.name)
        return ClusterName(cluster, self._name(cluster))

    def ask(self, wanted: AskRequest) -> AskReply:
        """Make an image the next question of this annotator; if answers place it already, those come back."""
        belief, names = self.belief(), self.images.names
        if wanted.image >= len(names) or belief is None:
            raise HTTPException(404, f"there is no image {wanted.image} to ask about")
        question = self.queue.chooser.about(belief, self.store.answers(), wanted.image)
        if question is None:
            asked, held = None, self.queue.claim(wanted.annotator, wanted.hold)
        else:
            asked, held = self.queue.claim_first(question, wanted.annotator, max(wanted.hold, 1))
        if asked is not None:
            return AskReply(self._question(asked), [], self._held(held))
        said = [one for row in self.store.rows() for one in row.statements_about(wanted.image, names)]
        said.sort(key=lambda one: not one.link)  # links first
        return AskReply(None, said[:12], self._held(held))

    # Files

    def large(self, row: RowInPath) -> Response:
        """An image as large as it is there, up to 800 pixels."""
        return self._picture(self.thumbnails.large, row)

    def small(self, row: RowInPath) -> Response:
        """An image as the model sees it."""
        return self._picture(self.thumbnails.small, row)

    def _picture(self, picture: Callable[[int], tuple[bytes, str]], row: int) -> Response:
        if row >= len(self.images):
            raise HTTPException(404, f"there is no image {row}")
        content, media_type = picture(row)
        return Response(content, headers={"Cache-Control": "private, max-age=86400, immutable"}, media_type=media_type)

    def pairs(self) -> Response:
        """What the answers say, as a pairs file for training."""
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "pairs.csv"
            export_pairs(self.store, path)
            content = path.read_bytes()
        headers = {"Content-Disposition": 'attachment; filename="pairs.csv"'}
        return Response(content, headers=headers, media_type="text/csv")


def create_app(
    images: ImageSet,
    queue: QuestionQueue,
    *,
    folder: Path | None = None,
    source: str = "the images",
    activity: Callable[[], str | None] = lambda: None,
    rules: Rules = LOCAL,
) -> FastAPI:
    """The page over these images and this queue. `folder` has the image files, for pictures larger than the model's."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        queue.start()
        yield
        queue.stop()

    app = FastAPI(
        title="constraintmatch annotate",
        description="Questions about images, answers, contradictions, clusters.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
        responses=PROBLEMS,
    )
    protect(app, rules)
    app.exception_handler(InputError)(_refuse)
    _add_routes(app, Page(images, queue, folder, source, activity))
    return app


def _add_routes(app: FastAPI, page: Page) -> None:
    routes: dict[str, Callable[..., Any]] = {
        "GET /api/state": page.state,
        "POST /api/questions": page.claim,
        "POST /api/answers": page.answer,
        "POST /api/undo": page.undo,
        "GET /api/contradictions": page.contradictions,
        "POST /api/settle": page.settle,
        "GET /api/clusters": page.clusters,
        "GET /api/clusters/{cluster}": page.cluster,
        "PUT /api/clusters/{cluster}/name": page.rename,
        "POST /api/ask": page.ask,
    }
    for route, handler in routes.items():
        method, path = route.split()
        app.add_api_route(path, handler, methods=[method])
    sent: dict[str, tuple[Callable[..., Response], tuple[str, ...]]] = {
        "images/{row}": (page.large, ("image/png", "image/jpeg")),
        "images/{row}/small": (page.small, ("image/png", "image/jpeg")),
        "pairs.csv": (page.pairs, ("text/csv",)),
    }
    for name, (send, kinds) in sent.items():
        content: dict[int | str, dict[str, Any]] = {200: {"content": {kind: {} for kind in kinds}}}
        app.add_api_route(f"/api/{name}", send, response_class=Response, responses=content)
    for name, media_type in PAGE_FILES.items():
        content_of_file = (files("constraintmatch.annotate") / "page" / name).read_bytes()
        path = "/" if name == "index.html" else f"/{name}"
        handler = _fixed(content_of_file, media_type)
        app.add_api_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False)


def _fixed(content: bytes, media_type: str) -> Callable[[], Response]:
    def send() -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return send


async def _refuse(_request: Request, error: Exception) -> JSONResponse:
    """Bad input: 503 if the disk failed (the page sends it again), else 409."""
    failed = isinstance(error.__cause__, sqlite3.Error)
    return JSONResponse({"detail": str(error)}, 503 if failed else 409)
