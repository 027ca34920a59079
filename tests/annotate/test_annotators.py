"""A vision-language model answers: a real server that speaks OpenAI's protocol, errs, is slow, and dies."""

import base64
import functools
import io
import json
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run
from PIL import Image
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import QUIET
from constraintmatch.annotate.annotators import VisionModel, ask_vision_model, disagreement, read_reply
from constraintmatch.annotate.commands import Loop
from constraintmatch.annotate.database import Given
from constraintmatch.annotate.import_export import open_answers
from constraintmatch.annotate.sitting import Sitting, open_images
from constraintmatch.annotate.store import open_store
from constraintmatch.data.image_set import ImageSet
from constraintmatch.pipeline.plan import Train
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question

pytestmark = [
    pytest.mark.usefixtures("quick_heads"),
    pytest.mark.skipif(find_spec("openai") is None, reason="the extra vlm is not installed"),
]
Reply = Callable[[int, dict[str, Any]], tuple[int, dict[str, str], str]]  # status, headers and body of a request
SOON = {"retry-after-ms": "5"}


class Endpoint:
    """A server whose model tells images by their brightness, unless `misbehave` answers a request in its place."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.misbehave: Reply | None = None
        self.usage: dict[str, int] | None = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        handler = type("Handler", (_Handler,), {"endpoint": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def reply(self, request: dict[str, Any]) -> str:
        """What a model that sees brightness says, in the words that were asked for."""
        parts = request["messages"][0]["content"]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        first, *others = (brightness(url) for url in urls)
        same = [at for at, other in enumerate(others, start=1) if abs(other - first) < 40]
        if "same, different or unsure" in parts[0]["text"]:
            return "same" if same else "different"
        return str(same[0]) if same else "0"

    def body(self, said: str | None) -> str:
        return json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}], "usage": self.usage})

    def die(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    endpoint: Endpoint

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.endpoint.requests.append(request)
        self.endpoint.keys.append(self.headers["Authorization"])
        odd = self.endpoint.misbehave
        number = len(self.endpoint.requests)
        status, headers, body = (
            odd(number, request) if odd else (200, {}, self.endpoint.body(self.endpoint.reply(request)))
        )
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None: ...


def brightness(url: str) -> float:
    kind, content = url.split(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        assert max(image.size) >= 224
        return float(np.asarray(image.convert("L")).mean())


@pytest.fixture(scope="module", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Each round has a client of its own, which reads the certificates of all authorities; none is used here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.die()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """24 grey images of three brightnesses, in class folders that no annotator sees."""
    rng = np.random.Generator(np.random.Philox(0))
    for row in range(24):
        folder = tmp_path / "photos" / f"kind{row % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 20, (8, 8)) + 100 * (row % 3)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{row:02d}.png")
    return tmp_path / "photos"


def a_loop(photos: Path, out: Path, questions: int = 6) -> Loop:
    embedded = out.parent / "photos.npz"
    if not embedded.is_file():
        names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
        pixels = [np.asarray(Image.open(photos / name), np.float32) for name in names]
        features = [[one.mean() / 100, one.std() / 100, 1.0] for one in pixels]
        np.savez(embedded, embeddings=np.array(features, np.float32), names=np.array(names))
    return Loop(str(embedded), out, 3, questions, every=6, steps=2, device="cpu", images=Train(pictures=photos))


def vision(endpoint: Endpoint, **changes: Any) -> VisionModel:
    return VisionModel(endpoint.url, "brightness-7b", **{"seconds": 5.0, "retries": 2, **changes})


def rows_of(out: Path, photos: Path) -> list[Any]:
    data = open_images(Sitting(str(out.parent / "photos.npz"), out / "answers.db", pictures=photos), QUIET)
    with open_answers(out / "answers.db", data, read_only=True) as store:
        return store.rows()


def is_right(row: Any) -> bool:
    kinds = [name[4] for name in (row.image, *row.shown)]
    return kinds[0] == kinds[row.choice + 1] if row.choice >= 0 else kinds[0] not in kinds[1:]


def test_a_model_answers_the_questions_of_the_loop_as_an_annotator_of_its_own(
    endpoint: Endpoint, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    rows = dict(ask_vision_model(a_loop(photos, tmp_path / "loop", 12), vision(endpoint, criterion="by brightness")))
    stored = rows_of(tmp_path / "loop", photos)
    assert len(stored) == 12
    assert {row.annotator for row in stored} == {"openai:brightness-7b"}
    assert all(map(is_right, stored))
    assert rows["answers"].endswith("(12 of 12)")
    assert rows["tokens"] == "1,300"  # with the question that tries the endpoint
    assert "not known" in rows["errors"]
    assert "What counts: by brightness." in endpoint.requests[0]["messages"][0]["content"][0]["text"]
    assert set(endpoint.keys) == {"Bearer secret"}
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_errors_and_rate_limits_are_waited_for(endpoint: Endpoint, photos: Path, tmp_path: Path) -> None:
    def stumble(number: int, request: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        if number in (2, 5):
            return (429 if number == 2 else 503), SOON, json.dumps({"error": {"message": "later"}})
        return 200, {}, endpoint.body(endpoint.reply(request))

    endpoint.misbehave = stumble
    ask_vision_model(a_loop(photos, tmp_path / "loop"), vision(endpoint))
    assert len(rows_of(tmp_path / "loop", photos)) == 6
    assert len(endpoint.requests) == 1 + 6 + 2


def test_a_person_takes_over_when_the_endpoint_dies_and_the_model_goes_on_later(
    endpoint: Endpoint, photos: Path, tmp_path: Path
) -> None:
    def die(number: int, request: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        if number > 6:
            return 500, SOON, "{}"
        return 200, {}, endpoint.body(endpoint.reply(request))

    endpoint.misbehave = die
    loop = a_loop(photos, tmp_path / "loop", 20)
    with pytest.raises(
        InputError, match=r"brightness-7b does not answer \(InternalServerError.* kept; the same command"
    ):
        ask_vision_model(loop, vision(endpoint))
    assert len(rows_of(tmp_path / "loop", photos)) == 5
    words = ["loop", loop.data, "--pictures", photos, "--clusters", 3, "--out", loop.out, "--device", "cpu"]
    more = ["--questions", 20, "--set", "every=20", "--set", "steps=2", "--quiet"]
    typed = [str(word) for word in (*words, *more, "--terminal")]
    answered = CliRunner().invoke(cli.app, typed, input="n\nn\ny\nf\n")
    assert answered.exit_code == 0, answered.output
    endpoint.misbehave = None
    rows = dict(ask_vision_model(loop, vision(endpoint)))
    stored = rows_of(tmp_path / "loop", photos)
    people = [row for row in stored if row.annotator == "terminal"]
    assert len(people) == 3
    compared = [row for row in stored if row.withdrawn]
    assert [row.annotator for row in compared] == ["openai:brightness-7b"] * 2  # a tenth of 20
    assert {(row.image, row.shown) for row in compared} < {(row.image, row.shown) for row in people}
    assert sum(not row.withdrawn for row in stored) == 20
    wrong = sum(not is_right(row) for row in people if (row.image, row.shown) in {(r.image, r.shown) for r in compared})
    assert f"about {wrong} of 2: {wrong / 2:.0%}" in rows["errors"]


@pytest.mark.parametrize("how", ["gone", "slow"])
def test_an_endpoint_that_does_not_answer_is_one_line_before_anything_is_written(
    how: str, endpoint: Endpoint, photos: Path, tmp_path: Path
) -> None:
    url = endpoint.url
    if how == "gone":
        other = Endpoint()
        url = other.url
        other.die()
    else:
        endpoint.misbehave = lambda *_: time.sleep(0.5) or (200, {}, endpoint.body("same"))  # type: ignore[func-returns-value]
    model = VisionModel(url, "m", seconds=0.2, retries=0)
    with pytest.raises(InputError, match=r"127\.0\.0\.1.*: m does not answer \(API(Connection|Timeout)Error") as caught:
        ask_vision_model(a_loop(photos, tmp_path / "loop"), model)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "loop").exists()


def test_a_reply_that_is_not_understood_is_asked_once_more_and_then_left_to_a_person(
    endpoint: Endpoint, photos: Path, tmp_path: Path
) -> None:
    def mumble(_: int, request: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        hard = request["messages"][0] == endpoint.requests[min(2, len(endpoint.requests) - 1)]["messages"][0]
        first = len(request["messages"]) == 1
        return 200, {}, endpoint.body("They are not the same" if hard or first else endpoint.reply(request))

    endpoint.misbehave = mumble
    ask_vision_model(a_loop(photos, tmp_path / "loop"), vision(endpoint))
    stored = rows_of(tmp_path / "loop", photos)
    assert len(stored) == 5
    assert all(map(is_right, stored))
    assert "was not understood" in endpoint.requests[-1]["messages"][-1]["content"]
    with sqlite3.connect(tmp_path / "loop" / "answers.db") as connection:
        waiting = connection.execute("SELECT holder FROM questions WHERE state = 'waiting'").fetchall()
    connection.close()
    assert waiting == [(None,)]  # nobody holds it


@pytest.mark.parametrize("body", ["", '{"choices": null}', "<html>"])
def test_a_model_that_never_says_what_is_understood_ends_in_one_line(
    body: str, endpoint: Endpoint, photos: Path, tmp_path: Path
) -> None:
    endpoint.misbehave = lambda *_: (200, {}, body)
    with pytest.raises(InputError, match=r"127\.0\.0\.1.*: m (gives no answers that are understood|does not answer)"):
        ask_vision_model(a_loop(photos, tmp_path / "loop"), VisionModel(endpoint.url, "m", retries=0))


def test_the_budget_of_tokens_is_kept(endpoint: Endpoint, photos: Path, tmp_path: Path) -> None:
    rows = dict(ask_vision_model(a_loop(photos, tmp_path / "loop", 12), vision(endpoint, tokens=777)))
    assert rows["tokens"] == "700 of 777"
    assert len(rows_of(tmp_path / "loop", photos)) == 6
    endpoint.usage = None
    with pytest.raises(InputError, match="does not say how many tokens it uses; leave --vlm-tokens out"):
        ask_vision_model(a_loop(photos, tmp_path / "other"), vision(endpoint, tokens=777))


def test_the_command_says_where_images_go(endpoint: Endpoint, photos: Path, tmp_path: Path) -> None:
    loop = a_loop(photos, tmp_path / "loop")
    words = ["loop", loop.data, "--pictures", photos, "--clusters", 3, "--out", loop.out, "--device", "cpu"]
    more = ["--questions", 6, "--set", "every=6", "--set", "steps=2"]
    done = run(*words, *more, "--annotator", f"openai:{endpoint.url}", "--vlm-model", "m")
    assert f"the images of every question are sent to {endpoint.url}" in " ".join(done.output.split())
    assert "6 of 6" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--annotator", "http://x"], "--annotator http://x: write openai:URL"),
        (["--annotator", "openai:x", "--vlm-model", "m"], "names no endpoint"),
        (["--annotator", "openai:http://me:key@x/v1", "--vlm-model", "m"], "OPENAI_API_KEY"),
        (["--annotator", "openai:http://x/v1"], "add --vlm-model NAME"),
        (["--annotator", "openai:http://x/v1", "--vlm-model", "m", "--terminal"], "leave --terminal and --oracle out"),
        (["--annotator", "openai:http://x/v1", "--vlm-model", "m", "--vlm-tokens", "0"], "--vlm-tokens is 0"),
        (["--criterion", "by species"], "--criterion goes with --annotator openai:URL"),
    ],
)
def test_bad_words_are_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    done = run("loop", "digits", "--out", tmp_path / "x", *words, code=2)
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "pair", "which"),
    [
        ("same", 0, None),
        ("Different.", NONE, None),
        ('```json\n{"answer": "unsure"}\n```', UNSURE, UNSURE),
        ("<think>same? no.</think>\n\n**different**", NONE, None),
        ("They are not the same", None, None),
        ("2", None, 1),
        ("The answer is: image 1", None, 0),
        ("None of these.", None, NONE),
        ("0", None, NONE),
        ("3", None, None),
        ("1 or 2", None, None),
        ("p", None, None),
        ("finished", None, None),
        ("", None, None),
    ],
)
def test_what_a_reply_means(text: str, pair: int | None, which: int | None) -> None:
    assert read_reply(text, Question(0, (1,))) == pair
    assert read_reply(text, Question(0, (1, 2))) == which


def test_unsure_is_no_disagreement(stripes: ImageSet, tmp_path: Path) -> None:
    with open_store(tmp_path / "a.db", stripes) as store:
        questions = [Question(0, (at,)) for at in (1, 2, 3)]
        people = [Given(Answer(question, NONE), "ann") for question in questions]
        model = [Given(Answer(q, choice), "openai:m") for q, choice in zip(questions, (NONE, 0, UNSURE), strict=True)]
        store.take_in([*people, *model])
        assert disagreement(store, "openai:m").startswith(
            "openai:m says something else than a person about 1 of 2: 50% (95 % interval 9% to 91%), and is unsure"
        )
