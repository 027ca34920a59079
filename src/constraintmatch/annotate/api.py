"""The app of the page: what each route takes and gives. `server` says who may call them."""

import hashlib
import json
import mimetypes
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate import server
from constraintmatch.annotate.database import Asked, Contradiction, StoredAnswer
from constraintmatch.annotate.import_export import export_pairs
from constraintmatch.annotate.question_queue import Line, QuestionQueue
from constraintmatch.annotate.thumbnails import Gallery, Picture, galleries, large_picture, small_picture
from constraintmatch.questions.answers import NONE, UNSURE
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.next_question import certain_share

LOCAL = server.Rules(frozenset({"localhost"}))
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

Json = dict[str, Any]  # an object that the page gets
Order = Annotated[Literal["typical", "doubtful"], Query(description="Which images come first.")]
Count = Annotated[int, Query(ge=1, le=500, description="How many images.")]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]
RowInPath = Annotated[int, InPath(ge=0, le=2**31 - 1)]


@dataclass(eq=False)
class Page:
    """The routes, and what they work on. `activity` gives a line about the training in the background, or None."""

    queue: QuestionQueue
    folder: Path | None = None  # with the image files, for pictures larger than the model's
    source: str = "the images"
    activity: Line = lambda: None

    def __post_init__(self) -> None:
        self.store, self.belief = self.queue.store, self.queue.belief
        self.store.images.to_look_at()  # refused here, before anything is served
        self._implied = lru_cache(maxsize=1)(self._imply)

    @cached_property
    def database(self) -> str:
        """A name for these images and this database: the browser keeps unsent answers and pictures under it."""
        text = f"{self.store.path.resolve()}\0{self.store.images.fingerprint()}"
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]

    # Questions and answers

    def state(self) -> Json:
        """Where the work stands."""
        counts = self.store.counts()
        certain, n_contradictions = self._implied(self.belief(), counts["answered"], counts["withdrawn"])
        return {
            "database": self.database,
            "source": self.source,
            "model": self.queue.model(),
            "images": len(self.store.images),
            "counts": counts,
            "wanted": self.queue.chooser.total,
            "certain": certain,
            "contradictions": n_contradictions,
            "activity": self.activity(),
        }

    def _imply(self, belief: Belief, *_counts: int) -> tuple[float, int]:
        """What follows from the answers; it is kept until the belief or the counts of answers change."""
        return certain_share(belief, self.store.answers()), self.store.n_contradictions()

    def claim(self, wanted: server.ClaimRequest) -> Json:
        """Hold questions: those held before come first, and nobody else gets them meanwhile."""
        return self._held(self.queue.claim(wanted.annotator, wanted.hold))

    def answer(self, given: server.AnswerRequest) -> Json:
        """Store an answer; it is on the disk when the response comes."""
        number, found = self.store.answer(given.question, given.choice, given.annotator, given.milliseconds)
        held = self._hold_more(given)
        clashes = [self._contradiction(one) for one in found]
        return {"answer": number, "contradictions": clashes, "held": held, "state": self.state()}

    def undo(self, wanted: server.UndoRequest) -> Json:
        """Undo the last answer of this annotator; its question comes back, or null if there is none."""
        undone = self.store.undo(wanted.annotator)
        held = self._hold_more(wanted)
        question = None if undone is None else self._question(undone)
        return {"question": question, "held": held, "state": self.state()}

    def _hold_more(self, wanted: server.UndoRequest) -> Json:
        held = self.queue.claim(wanted.annotator, wanted.hold) if wanted.hold else []
        self.queue.wake()
        return self._held(held)

    def _held(self, held: Iterable[Asked]) -> Json:
        questions = [self._question(asked) for asked in held]
        return {"questions": questions, "done": self.queue.done and not questions, "problem": self.queue.problem}

    def _question(self, asked: Asked) -> Json:
        """A question as the page shows it; images of clusters with a name carry the name."""
        names, shares, question = self.store.names(), self.belief().probabilities, asked.question
        of = {row: int(shares[row].argmax()) for row in question.shown} if names and shares is not None else {}
        shown = [self._image(row, names.get(of.get(row, -1))) for row in question.shown]
        return {"id": asked.id, "kind": question.kind, "image": self._image(question.image), "shown": shown}

    def _image(self, row: int, cluster: str | None = None) -> Json:
        return {"row": row, "name": self.store.images.names[row], "cluster": cluster}

    # Contradictions

    def contradictions(self) -> Json:
        """The open contradictions, oldest first."""
        clashes = [self._contradiction(one) for one in self.store.contradictions()]
        return {"contradictions": clashes, "state": self.state()}

    def settle(self, wanted: server.SettleRequest) -> Json:
        """Withdraw an answer, or change it; the contradictions that are left come back."""
        _, left = self.store.settle(wanted.answer, wanted.annotator, wanted.choice)
        self.queue.wake()
        return {"contradictions": [self._contradiction(one) for one in left], "state": self.state()}

    def _contradiction(self, found: Contradiction) -> Json:
        ends = found.images[0], found.images[-1]
        steps = [(*ends, False), *((*step, True) for step in pairwise(found.images))]
        numbers = (found.apart, *found.together)
        said = [self._say(self.store.row(number), *step) for number, step in zip(numbers, steps, strict=True)]
        first, last = (self.store.images.names[row] for row in ends)
        others = "another says same" if len(said) == 2 else f"{len(said) - 1:,} others together say same"
        return {"text": f"{first} and {last}: one answer says different, {others}.", "answers": said}

    def _say(self, row: StoredAnswer, one: int, other: int, link: bool) -> Json:
        """What an answer says of two images."""
        change_to = NONE
        if not link and row.answer is not None:
            question = row.answer.question
            change_to = question.shown.index(other if question.image == one else one)
        return {
            "answer": row.id,
            "kind": "pair" if len(row.shown) == 1 else "which",
            "left": self._image(one),
            "right": self._image(other),
            "link": link,
            "change_to": change_to,
            "annotator": row.annotator,
            "time": row.time,
        }

    # Clusters

    def clusters(self, order: Order = "typical", n: Count = 24) -> Json:
        """The first images of every cluster."""
        found = galleries(self.belief(), self.store.answers(), len(self.store.images))
        shown = [self._cluster(gallery, order, 0, n) for gallery in found]
        return {"model": any(sure is not None for _, _, sure in found), "clusters": shown}

    def cluster(self, cluster: RowInPath, order: Order = "typical", offset: Offset = 0, n: Count = 96) -> Json:
        """More images of a cluster."""
        for gallery in galleries(self.belief(), self.store.answers(), len(self.store.images)):
            if gallery[0] == cluster:
                return self._cluster(gallery, order, offset, n)
        raise HTTPException(404, f"cluster {cluster} has no images now; reload the page")

    def _cluster(self, gallery: Gallery, order: str, offset: int, n: int) -> Json:
        """A part of a gallery; a group that answers make has no name of its own."""
        number, rows, sure = gallery
        name = f"Group {number + 1}" if sure is None else self._name(number)
        mean = None if sure is None else round(float(sure.mean()), 4)
        part = np.arange(len(rows))[:: 1 if order == "typical" else -1][offset : offset + n]
        images = [
            {
                "row": int(rows[at]),
                "name": self.store.images.names[rows[at]],
                "confidence": None if sure is None else round(float(sure[at]), 4),
            }
            for at in part
        ]
        return {"cluster": number, "name": name, "size": len(rows), "confidence": mean, "images": images}

    def _name(self, cluster: int) -> str:
        return self.store.names().get(cluster, f"Cluster {cluster}")

    def rename(self, cluster: RowInPath, given: server.NameRequest) -> Json:
        """Name a cluster; its number and its name now come back."""
        probabilities = self.belief().probabilities
        known = 0 if probabilities is None else probabilities.shape[1]
        if cluster >= known:
            raise HTTPException(404, f"there is no cluster {cluster}: the model has {known:,}")
        self.store.rename(cluster, given.name)
        return {"cluster": cluster, "name": self._name(cluster)}

    def ask(self, wanted: server.AskRequest) -> Json:
        """Make an image the next question of this annotator; if answers place it already, those come back."""
        if (image := wanted.image) >= len(self.store.images):
            raise HTTPException(404, f"there is no image {image} to ask about")
        question = self.queue.chooser.about(self.belief(), self.store.answers(), image)
        if question is None:
            asked, held = None, self.queue.claim(wanted.annotator, wanted.hold)
        else:
            asked, held = self.queue.claim_first(question, wanted.annotator, max(wanted.hold, 1))
        if asked is not None:
            return {"question": self._question(asked), "said": [], "held": self._held(held)}
        said = [one for row in self.store.rows() for one in self._statements(row, image)]
        said.sort(key=lambda one: not one["link"])  # links first
        return {"question": None, "said": said[:12], "held": self._held(held)}

    def _statements(self, row: StoredAnswer, image: int) -> list[Json]:
        """What an answer says of an image; nothing if it is a triplet, unsure, withdrawn or set aside."""
        if row.answer is None or row.withdrawn or row.nearer or row.choice == UNSURE:
            return []
        asked, shown = row.answer.question.image, row.answer.question.shown
        pairs = [(asked, other, at == row.choice) for at, other in enumerate(shown)]
        return [self._say(row, *pair) for pair in pairs if image in pair[:2]]

    # Files

    def large(self, row: RowInPath) -> Response:
        """An image as large as its file, up to 800 pixels."""
        return self._picture(partial(large_picture, self.store.images, self.folder), row)

    def small(self, row: RowInPath) -> Response:
        """An image as the model sees it."""
        return self._picture(partial(small_picture, self.store.images), row)

    def _picture(self, picture: Callable[[int], Picture], row: int) -> Response:
        if row >= len(self.store.images):
            raise HTTPException(404, f"there is no image {row}")
        content, media_type = picture(row)
        return Response(content, headers={"Cache-Control": "private, max-age=86400, immutable"}, media_type=media_type)

    def pairs(self) -> Response:
        """What the answers say, as a pairs file for training; only triplets, if there are no pairs."""
        return self._export("pairs.csv")

    def triplets(self) -> Response:
        """The triplets of the answers; the pairs, if there are none."""
        return self._export("pairs-triplets.csv")

    def _export(self, name: str) -> Response:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "pairs.csv"
            export_pairs(self.store, path)
            other = Path(place) / name
            content = (other if other.is_file() else path).read_bytes()
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(content, headers=headers, media_type="text/csv")


def create_app(page: Page, rules: server.Rules = LOCAL) -> FastAPI:
    """The app that serves a page to those whom the rules let in."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        page.queue.start()
        yield
        page.queue.stop()

    app = FastAPI(
        title="constraintmatch annotate",
        description="Questions about images, answers, contradictions, clusters.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
        responses=PROBLEMS,
        exception_handlers={InputError: _refuse, RequestValidationError: _explain},
    )
    server.protect(app, rules)
    _add_routes(app, page)
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
        "triplets.csv": (page.triplets, ("text/csv",)),
    }
    for name, (send, kinds) in sent.items():
        content: dict[int | str, dict[str, Any]] = {200: {"content": {kind: {} for kind in kinds}}}
        app.add_api_route(f"/api/{name}", send, response_class=Response, responses=content)
    mimetypes.add_type("text/javascript", ".js")  # Windows may know it as plain text, which browsers do not run
    app.mount("/", StaticFiles(packages=[("constraintmatch.annotate", "page")], html=True))


async def _explain(_request: Request, error: Exception) -> Response:
    """What does not fit the description; not the input itself, which may hold what JSON or UTF-8 cannot."""
    assert isinstance(error, RequestValidationError)
    found = [{key: one[key] for key in ("type", "loc", "msg")} for one in error.errors()]
    return Response(json.dumps({"detail": found}), 422, media_type="application/json")  # beyond ASCII as escapes


async def _refuse(_request: Request, error: Exception) -> JSONResponse:
    """Bad input: 503 if the disk failed (the page sends it again), else 409."""
    failed = isinstance(error.__cause__, sqlite3.Error)
    return JSONResponse({"detail": str(error)}, 503 if failed else 409)
