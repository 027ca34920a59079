"""The page's server: routes that parse, call the desk, and answer. See `security` for who may call them."""

import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import JSONResponse

from constraintmatch.annotate.choosing import Chooser
from constraintmatch.annotate.desk import Desk
from constraintmatch.annotate.exchange import export_pairs
from constraintmatch.annotate.question_queue import Refill
from constraintmatch.annotate.security import Guard, Rules
from constraintmatch.annotate.store import Store
from constraintmatch.annotate.thumbnails import Picture, pictures_of
from constraintmatch.annotate.types import (
    AnswerIn,
    AskIn,
    AskOut,
    ClaimIn,
    ClashesOut,
    ClusterOut,
    ClustersOut,
    NameIn,
    NameOut,
    Problem,
    QuestionsOut,
    RecordedOut,
    SettleIn,
    StateOut,
    UndoIn,
    UndoOut,
)
from constraintmatch.errors import InputError
from constraintmatch.images import ImageSet
from constraintmatch.questions import Belief

__all__ = ["create_app"]

LOCAL = Rules(frozenset({"localhost"}))
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "The body is no JSON.",
        401: "The token is missing or wrong.",
        403: "The request comes from another site.",
        404: "There is no such image or cluster.",
        409: "It does not fit what is stored: answered already, withdrawn, no such question.",
        413: "The request is too large.",
        415: "The body is not JSON.",
        421: "The host is not this server.",
        503: "It could not be saved; send it again.",
    }.items()
}
Order = Annotated[Literal["typical", "doubtful"], Query(description="Which images come first.")]
Count = Annotated[int, Query(ge=1, le=500, description="How many images.")]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]
RowInPath = Annotated[int, InPath(ge=0, le=2**31 - 1)]


def create_app(
    images: ImageSet,
    store: Store,
    belief: Callable[[], Belief | None],
    *,
    chooser: Chooser | None = None,
    folder: Path | None = None,
    source: str = "the images",
    model: Callable[[], str | None] = lambda: None,
    activity: Callable[[], str | None] = lambda: None,
    rules: Rules = LOCAL,
) -> FastAPI:
    """The page over these images and this store.

    `belief` gives what the model says now (None: not yet), `model` its name, `activity` a line about what goes on in
    the background; they are asked again and again, so a loop that trains replaces what they give. `folder` is where
    the image files lie, for pictures larger than the model's.
    """
    refill = Refill(store, belief, chooser or Chooser(), model)
    desk = Desk(images, store, belief, pictures_of(images, folder), refill, source, model, activity)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        refill.start()
        yield
        refill.stop()

    app = FastAPI(
        title="constraintmatch annotate",
        description="Questions about images, answers, contradictions, clusters.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
        responses=PROBLEMS,
    )
    app.add_middleware(Guard, rules=rules)
    app.exception_handler(InputError)(_told)
    _page_routes(app)
    _question_routes(app, desk)
    _contradiction_routes(app, desk)
    _cluster_routes(app, desk)
    _file_routes(app, desk)
    return app


async def _told(_request: Request, error: Exception) -> JSONResponse:
    """What a person can mend: 503 where the disk failed (the page sends it again), else 409."""
    failed = isinstance(error.__cause__, sqlite3.Error)
    return JSONResponse({"detail": str(error)}, 503 if failed else 409)


def _page_routes(app: FastAPI) -> None:
    kinds = {
        "index.html": "text/html",
        "style.css": "text/css",
        "script.js": "text/javascript",
        "icon.svg": "image/svg+xml",
    }
    place = files("constraintmatch.annotate") / "page"
    for name, media_type in kinds.items():
        content = (place / name).read_bytes()
        path = "/" if name == "index.html" else f"/{name}"
        app.add_api_route(path, _fixed(content, media_type), methods=["GET", "HEAD"], include_in_schema=False)


def _fixed(content: bytes, media_type: str) -> Callable[[], Response]:
    def route() -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return route


def _question_routes(app: FastAPI, desk: Desk) -> None:
    @app.get("/api/state")
    def state() -> StateOut:
        """Where the work stands."""
        return desk.state()

    @app.post("/api/questions")
    def claim(wanted: ClaimIn) -> QuestionsOut:
        """Hold questions: those held before come first, and nobody else gets them meanwhile."""
        return desk.held(desk.refill.claim(wanted.annotator, wanted.hold))

    @app.post("/api/answers")
    def answer(given: AnswerIn) -> RecordedOut:
        """Store an answer; it is on the disk when the response comes."""
        recorded = desk.store.answer(given.question, given.choice, given.annotator, given.milliseconds)
        held = desk.refill.claim(given.annotator, given.hold) if given.hold else []
        desk.refill.wake()
        return RecordedOut(
            answer=recorded.id,
            contradictions=desk.clashes(recorded.contradictions),
            held=desk.held(held),
            state=desk.state(),
        )

    @app.post("/api/undo")
    def undo(wanted: UndoIn) -> UndoOut:
        """Take back this annotator's last answer; its question comes back."""
        taken = desk.store.undo(wanted.annotator)
        held = desk.refill.claim(wanted.annotator, wanted.hold) if wanted.hold else []
        desk.refill.wake()
        question = None if taken is None else desk.asked(taken)
        return UndoOut(question=question, held=desk.held(held), state=desk.state())


def _contradiction_routes(app: FastAPI, desk: Desk) -> None:
    @app.get("/api/contradictions")
    def contradictions() -> ClashesOut:
        """The contradictions that stand, oldest first."""
        return ClashesOut(contradictions=desk.clashes(desk.store.clashes()), state=desk.state())

    @app.post("/api/settle")
    def settle(wanted: SettleIn) -> ClashesOut:
        """Withdraw an answer, or change it; what contradictions are left comes back."""
        left = desk.store.settle(wanted.answer, wanted.annotator, wanted.choice).contradictions
        desk.refill.wake()
        return ClashesOut(contradictions=desk.clashes(left), state=desk.state())


def _cluster_routes(app: FastAPI, desk: Desk) -> None:
    @app.get("/api/clusters")
    def clusters(order: Order = "typical", n: Count = 24) -> ClustersOut:
        """The first images of every cluster."""
        found, names = desk.galleries(order), desk.store.names()
        told = [desk.cluster(gallery, names, 0, n) for gallery in found]
        return ClustersOut(model=any(gallery.confidence is not None for gallery in found), clusters=told)

    @app.get("/api/clusters/{cluster}")
    def one_cluster(cluster: RowInPath, order: Order = "typical", offset: Offset = 0, n: Count = 96) -> ClusterOut:
        """More images of a cluster."""
        found = next((gallery for gallery in desk.galleries(order) if gallery.cluster == cluster), None)
        if found is None:
            raise HTTPException(404, f"cluster {cluster} has no images now; reload the page")
        return desk.cluster(found, desk.store.names(), offset, n)

    @app.put("/api/clusters/{cluster}/name")
    def rename(cluster: RowInPath, given: NameIn) -> NameOut:
        """Name a cluster."""
        belief = desk.belief()
        known = 0 if belief is None or belief.probabilities is None else belief.probabilities.shape[1]
        if cluster >= known:
            raise HTTPException(404, f"there is no cluster {cluster}: the model has {known:,}")
        desk.store.rename(cluster, given.name)
        return NameOut(cluster=cluster, name=desk.store.names().get(cluster, f"Cluster {cluster}"))

    @app.post("/api/ask")
    def ask(wanted: AskIn) -> AskOut:
        """Turn an image into this annotator's next question; where answers place it already, those come back."""
        belief = desk.belief()
        if wanted.image >= len(desk.images) or belief is None:
            raise HTTPException(404, f"there is no image {wanted.image} to ask about")
        question = desk.refill.chooser.about(belief, desk.store.answers(), wanted.image)
        if question is None:
            held, asked = desk.refill.claim(wanted.annotator, wanted.hold), None
        else:
            asked, held = desk.refill.claim_first(question, wanted.annotator, max(wanted.hold, 1))
        said = desk.said_about(wanted.image) if asked is None else []
        return AskOut(question=None if asked is None else desk.asked(asked), said=said, held=desk.held(held))


def _file_routes(app: FastAPI, desk: Desk) -> None:
    def send(picture: Callable[[int], Picture], row: int) -> Response:
        if row >= len(desk.images):
            raise HTTPException(404, f"there is no image {row}")
        found = picture(row)
        return Response(
            found.content, media_type=found.media_type, headers={"Cache-Control": "private, max-age=86400, immutable"}
        )

    pictures: dict[int | str, dict[str, Any]] = {200: {"content": {"image/png": {}, "image/jpeg": {}}}}

    @app.get("/api/images/{row}", response_class=Response, responses=pictures)
    def large(row: RowInPath) -> Response:
        """An image as large as it is there, up to 800 pixels."""
        return send(desk.pictures.large, row)

    @app.get("/api/images/{row}/small", response_class=Response, responses=pictures)
    def small(row: RowInPath) -> Response:
        """An image as the model sees it."""
        return send(desk.pictures.small, row)

    @app.get("/api/pairs.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
    def pairs() -> Response:
        """What the answers say, as a pairs file for training."""
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "pairs.csv"
            export_pairs(desk.store, path)
            content = path.read_bytes()
        headers = {"Content-Disposition": 'attachment; filename="pairs.csv"'}
        return Response(content, media_type="text/csv", headers=headers)
