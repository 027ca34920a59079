"""The page's server, in process: questions, answers, contradictions, clusters, pictures, and who is refused."""

import io
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.api import Page, create_app
from constraintmatch.annotate.import_export import open_model
from constraintmatch.annotate.question_queue import Chooser, QuestionQueue
from constraintmatch.annotate.server import MAX_BODY, Rules, address, is_loopback, listen, rules_for
from constraintmatch.annotate.sitting import Door, open_port
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.annotate.thumbnails import galleries, large_picture, pixel_belief, small_picture
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.models.cluster_model import build_model, save_model
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.rounds import image_belief

PAGE = Path(__file__).parents[2] / "src" / "constraintmatch" / "annotate" / "page"
LABELS = np.arange(60) % 3


@dataclass
class Place:
    """A running server: its client, its store and what it believes."""

    client: TestClient
    store: Store

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        reply = self.client.post(path, json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def get(self, path: str, status: int = 200) -> Any:
        reply = self.client.get(path)
        assert reply.status_code == status, reply.text
        return reply.json()

    def claim(self, annotator: str = "anna", hold: int = 1) -> list[dict[str, Any]]:
        """So many questions, or all there are when nothing is left."""
        for _ in range(200):
            told = self.post("/api/questions", {"annotator": annotator, "hold": hold})
            if told["done"] or len(told["questions"]) >= hold:
                break
            time.sleep(0.01)
        return list(told["questions"])

    def answer(self, question: dict[str, Any] | int, choice: int, annotator: str = "anna", hold: int = 0) -> Any:
        number = question if isinstance(question, int) else question["id"]
        body = {"question": number, "choice": choice, "annotator": annotator, "milliseconds": 900, "hold": hold}
        return self.post("/api/answers", body)

    def ask(self, *questions: Question) -> list[int]:
        """The numbers of these questions, asked before all others."""
        self.store.release("anna")
        numbers = []
        for question in questions:
            self.store.add_questions([question], urgent=True)
            held = self.store.claim("anna", 100)
            numbers.append(next(one.id for one in held if one.question == question))
        return numbers


def belief_of(images: ImageSet, *, model: bool = True) -> Belief:
    """Features by class with noise; a model that is sure of most images, unsure of every tenth."""
    random = np.random.Generator(np.random.Philox(3))
    features = np.eye(3)[LABELS] + random.normal(0, 0.2, (60, 3))
    sharp = np.where(np.arange(60) % 10 == 0, 0.5, 9.0)
    logits = sharp[:, None] * np.eye(3)[LABELS] + random.normal(0, 0.2, (60, 3))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    assert len(images) == 60
    return Belief(unit.astype(np.float32), shares.astype(np.float32) if model else None)


@contextmanager
def serving(
    path: Path, images: ImageSet, belief: Belief, chooser: Chooser | None = None, **options: Any
) -> Iterator[Place]:
    with open_store(path, images) as store:
        rules = {"rules": options.pop("rules")} if "rules" in options else {}
        app = create_app(Page(QuestionQueue(store, lambda: belief, chooser or Chooser()), **options), **rules)
        with TestClient(app, base_url="http://localhost:8765") as client:
            yield Place(client, store)


@pytest.fixture
def place(tmp_path: Path, stripes: ImageSet) -> Iterator[Place]:
    """With a model, asking "which of these?"."""
    with serving(tmp_path / "answers.db", stripes, belief_of(stripes)) as found:
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, stripes: ImageSet) -> Iterator[Place]:
    """The same, for tests that leave no answer."""
    with serving(tmp_path_factory.mktemp("shared") / "answers.db", stripes, belief_of(stripes)) as found:
        yield found


@pytest.fixture
def pairs(tmp_path: Path, stripes: ImageSet) -> Iterator[Place]:
    """Without a model, asking about pairs."""
    chooser = Chooser(kind="pair")
    with serving(tmp_path / "answers.db", stripes, belief_of(stripes, model=False), chooser=chooser) as found:
        yield found


def right(question: dict[str, Any]) -> int:
    """What a person who knows the labels says."""
    own, shown = LABELS[question["image"]["row"]], [LABELS[image["row"]] for image in question["shown"]]
    return shown.index(own) if own in shown else NONE


# Questions and answers


def test_a_budget_is_told_and_ends_the_questions(tmp_path: Path, stripes: ImageSet) -> None:
    chooser = Chooser(total=3)
    with serving(tmp_path / "a.db", stripes, belief_of(stripes), chooser=chooser) as place:
        assert place.get("/api/state")["wanted"] == 3
        for _ in range(3):
            question = place.claim(hold=1)[0]
            place.answer(question, right(question))
        assert place.claim(hold=1) == []
        assert place.post("/api/questions", {"annotator": "anna", "hold": 1})["done"]
        assert place.get("/api/state")["counts"]["answered"] == 3


def test_triplets_are_asked_answered_undone_and_downloaded(tmp_path: Path, stripes: ImageSet) -> None:
    with serving(tmp_path / "a.db", stripes, belief_of(stripes), chooser=Chooser(kind="triplet")) as place:
        first, second = place.claim(hold=2)[:2]
        assert (first["kind"], len(first["shown"])) == ("triplet", 2)
        state = place.answer(first, 1)["state"]
        assert (state["counts"]["nearer"], state["counts"]["same"], state["certain"]) == (1, 0, 0)
        assert place.post("/api/undo", {"annotator": "anna"})["question"]["id"] == first["id"]
        place.answer(first, 0)
        assert (
            "no answer -1"
            in place.post(
                "/api/answers", {"question": second["id"], "choice": NONE, "annotator": "anna", "milliseconds": 1}, 409
            )["detail"]
        )
        place.answer(second, UNSURE)
        named = ",".join(image["name"] for image in (first["image"], *first["shown"]))
        for name in ("pairs.csv", "triplets.csv"):  # there are no pairs
            assert place.client.get(f"/api/{name}").text == f"anchor,near,far,weight\n{named},1\n"
        place.answer(place.ask(Question(50, (53,)))[0], 0)
        assert place.client.get("/api/pairs.csv").text.startswith("left,right,link")
        assert place.client.get("/api/triplets.csv").text.startswith("anchor,near,far")
        image = next(row for row in range(60) if row not in (50, 53, first["image"]["row"], second["image"]["row"]))
        asked = place.post("/api/ask", {"image": image, "annotator": "anna"})["question"]
        assert asked["kind"] == "which"  # a triplet would not place it


def test_without_a_budget_none_is_told(shared: Place) -> None:
    assert shared.get("/api/state")["wanted"] is None


def test_an_answer_is_counted_and_survives_the_server(tmp_path: Path, stripes: ImageSet) -> None:
    with serving(tmp_path / "a.db", stripes, belief_of(stripes)) as place:
        question = place.claim()[0]
        told = place.answer(question, right(question))
        assert told["state"]["counts"]["answered"] == 1
        assert told["contradictions"] == []
    with open_store(tmp_path / "a.db", stripes) as store:
        (answer,) = store.answers()
    assert answer.question.image == question["image"]["row"]
    assert answer.choice == right(question)


def test_an_answer_that_is_sent_twice_is_stored_once(place: Place) -> None:
    question = place.claim()[0]
    first, second = place.answer(question, 0), place.answer(question, 0)
    assert first["answer"] == second["answer"]
    assert second["state"]["counts"]["answered"] == 1


def test_another_answer_to_an_answered_question_is_refused(place: Place) -> None:
    question = place.claim()[0]
    place.answer(question, 0)
    body = {"question": question["id"], "choice": NONE, "annotator": "bert", "milliseconds": 1}
    assert "already answered" in place.post("/api/answers", body, 409)["detail"]


def test_undo_gives_the_question_back(place: Place) -> None:
    question = place.claim()[0]
    place.answer(question, UNSURE)
    told = place.post("/api/undo", {"annotator": "anna", "hold": 3})
    assert told["question"]["id"] == question["id"] == told["held"]["questions"][0]["id"]
    assert told["state"]["counts"]["answered"] == 0
    assert place.post("/api/undo", {"annotator": "anna"})["question"] is None


def test_two_annotators_never_hold_the_same_question(place: Place) -> None:
    anna, bert = place.claim("anna", 4), place.claim("bert", 4)
    assert len(anna) == len(bert) == 4
    assert not {one["id"] for one in anna} & {one["id"] for one in bert}
    assert [one["id"] for one in place.claim("anna", 4)] == [one["id"] for one in anna]


def test_a_page_that_is_loaded_anew_gets_the_questions_it_held(place: Place) -> None:
    held = place.claim("anna", 3)
    assert place.claim("anna", 3) == held


def test_what_an_answer_settles_is_no_longer_held(pairs: Place) -> None:
    first, second, third = pairs.ask(Question(0, (3,)), Question(3, (6,)), Question(9, (12,)))
    asked, found = Question(6, (0,)), list[int]()
    while not found:  # newer questions may take its place before it is claimed
        pairs.store.add_questions([asked])
        found = [one.id for one in pairs.store.claim("anna", 100) if one.question == asked]
    pairs.answer(first, 0)
    held = {one["id"] for one in pairs.answer(second, 0, hold=50)["held"]["questions"]}
    assert third in held
    assert found[0] not in held


def test_answering_all_questions_ends_with_nothing_left_and_the_truth(pairs: Place) -> None:
    for _ in range(600):
        held = pairs.claim()
        if not held:
            break
        pairs.answer(held[0], right(held[0]))
    assert pairs.post("/api/questions", {"annotator": "anna", "hold": 1})["done"]
    state = pairs.get("/api/state")
    assert state["certain"] == 1
    assert state["contradictions"] == 0
    found = pairs.get("/api/clusters?n=60")["clusters"]
    assert sorted(tuple(LABELS[image["row"]] for image in one["images"]) for one in found) == [
        (label,) * 20 for label in range(3)
    ]


def test_new_questions_come_while_answers_go_on(place: Place) -> None:
    seen = set()
    for _ in range(30):
        question = place.claim(hold=2)[0]
        seen.add(question["id"])
        place.answer(question, right(question))
    assert len(seen) == 30
    assert place.get("/api/state")["certain"] > 0.5


def test_a_server_that_still_chooses_waits_without_being_done(tmp_path: Path, stripes: ImageSet) -> None:
    chosen, belief = threading.Event(), belief_of(stripes, model=False)

    class Slow(Chooser):
        def next(self, *given: Any) -> list[Question]:
            chosen.wait(10)
            return super().next(*given)

    with serving(tmp_path / "a.db", stripes, belief, Slow(), activity=lambda: "training, round 1") as place:
        told = place.post("/api/questions", {"annotator": "anna", "hold": 2})
        assert (told["questions"], told["done"]) == ([], False)
        assert place.get("/api/state")["activity"] == "training, round 1"
        assert place.get("/api/clusters")["clusters"] == []
        chosen.set()
        assert len(place.claim(hold=2)) == 2


class _Failing(Chooser):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def next(self, *_: Any) -> list[Question]:
        raise self.error


@pytest.mark.parametrize(("error", "told"), [(InputError("give more"), "give more"), (RuntimeError("x"), "could be")])
def test_a_failing_choice_is_told_and_the_server_goes_on(
    tmp_path: Path, stripes: ImageSet, error: Exception, told: str
) -> None:
    with serving(tmp_path / "a.db", stripes, belief_of(stripes), chooser=_Failing(error)) as place:
        for _ in range(100):
            problem = place.post("/api/questions", {"annotator": "anna", "hold": 1})["problem"]
            if problem:
                break
            time.sleep(0.01)
        assert told in problem
        assert place.get("/api/state")["counts"]["answered"] == 0


def test_a_disk_that_fails_is_told_as_try_again(place: Place) -> None:
    question = place.claim()[0]
    place.store._database.connection.execute("PRAGMA query_only = ON")
    body = {"question": question["id"], "choice": 0, "annotator": "anna", "milliseconds": 1}
    assert "read-only" in place.post("/api/answers", body, 503)["detail"]
    place.store._database.connection.execute("PRAGMA query_only = OFF")
    assert place.answer(question, 0)["state"]["counts"]["answered"] == 1


# Contradictions


def contradict(place: Place) -> Any:
    """Two must-links and the cannot-link against them."""
    first, second, third = place.ask(Question(0, (3,)), Question(3, (6,)), Question(0, (6,)))
    place.answer(first, 0)
    place.answer(second, 0)
    return place.answer(third, NONE)


def test_a_contradiction_comes_at_once_with_the_earlier_answers(pairs: Place) -> None:
    told = contradict(pairs)
    (clash,) = told["contradictions"]
    assert [(one["left"]["row"], one["right"]["row"], one["link"]) for one in clash["answers"]] == [
        (0, 6, False),
        (0, 3, True),
        (3, 6, True),
    ]
    assert clash["answers"][0]["answer"] == told["answer"]
    assert "2 others" in clash["text"]
    assert told["state"]["contradictions"] == 1 == len(pairs.get("/api/contradictions")["contradictions"])


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("how", ["withdraw", "change"])
def test_a_contradiction_is_settled_by_any_of_its_answers(pairs: Place, which: int, how: str) -> None:
    said = contradict(pairs)["contradictions"][0]["answers"][which]
    choice = said["change_to"] if how == "change" else None
    told = pairs.post("/api/settle", {"answer": said["answer"], "choice": choice, "annotator": "anna"})
    assert told["contradictions"] == []
    assert told["state"]["contradictions"] == 0
    assert told["state"]["counts"]["answered"] == (3 if how == "change" else 2)


def test_a_chosen_image_can_be_changed_to_another_or_to_none(place: Place) -> None:
    first, second = place.ask(Question(3, (6,)), Question(0, (3, 6, 1)))
    place.answer(first, NONE)
    place.answer(second, 0)
    (third,) = place.ask(Question(9, (0, 6)))
    place.answer(third, 0)
    (fourth,) = place.ask(Question(9, (6,)))
    (clash, *_) = place.answer(fourth, 0)["contradictions"]
    apart = clash["answers"][0]
    question = place.store.row(apart["answer"]).answer
    assert question is not None
    assert question.question.shown[apart["change_to"]] in (apart["left"]["row"], apart["right"]["row"])
    assert {one["change_to"] for one in clash["answers"][1:]} == {NONE}


# Parts of replies


def parts(value: Any) -> Any:
    """The names in an object and in the objects in it; of a list those of its first entry."""
    if isinstance(value, dict):
        return {name: parts(one) for name, one in value.items()}
    return [parts(one) for one in value[:1]] if isinstance(value, list) else None


IMAGE = dict.fromkeys(("row", "name", "cluster"))
QUESTION = {"id": None, "kind": None, "image": IMAGE, "shown": [IMAGE]}
HELD = {"questions": [QUESTION], "done": None, "problem": None}
SAID = dict.fromkeys(("answer", "kind", "link", "change_to", "annotator", "time")) | {"left": IMAGE, "right": IMAGE}
CLASH = {"text": None, "answers": [SAID]}
COUNTS = dict.fromkeys(("answered", "same", "different", "nearer", "unsure", "withdrawn", "per_minute"))
STATE = dict.fromkeys(("database", "source", "model", "images", "wanted", "certain", "contradictions", "activity"))
STATE |= {"counts": COUNTS}
CLUSTER = dict.fromkeys(("cluster", "name", "size", "confidence")) | {
    "images": [dict.fromkeys(("row", "name", "confidence"))]
}


def test_replies_have_exactly_the_parts_that_the_page_reads(pairs: Place) -> None:
    clash = contradict(pairs)
    assert parts(clash) == {"answer": None, "contradictions": [CLASH], "held": HELD | {"questions": []}, "state": STATE}
    assert parts(pairs.get("/api/state")) == STATE
    assert parts(pairs.get("/api/contradictions")) == {"contradictions": [CLASH], "state": STATE}
    assert parts(pairs.get("/api/clusters")) == {"model": None, "clusters": [CLUSTER]}
    assert parts(pairs.get("/api/clusters/0")) == CLUSTER
    assert pairs.claim()  # which waits until a question is chosen
    placed = pairs.post("/api/ask", {"image": 0, "annotator": "anna"})
    assert parts(placed) == {"question": None, "said": [SAID], "held": HELD}
    asked = pairs.post("/api/ask", {"image": 20, "annotator": "anna"})
    assert parts(asked) == {"question": QUESTION, "said": [], "held": HELD}
    undone = pairs.post("/api/undo", {"annotator": "anna", "hold": 1})
    assert parts(undone) == {"question": QUESTION, "held": HELD, "state": STATE}
    settled = pairs.post("/api/settle", {"answer": 1, "annotator": "anna"})
    assert parts(settled) == {"contradictions": [], "state": STATE}
    assert parts(pairs.post("/api/questions", {"annotator": "anna", "hold": 1})) == HELD


# Clusters


def test_the_galleries_show_what_the_model_believes(place: Place, stripes: ImageSet) -> None:
    told = place.get("/api/clusters?n=5")
    assert told["model"]
    assert [one["size"] for one in told["clusters"]] == np.bincount(belief_of(stripes).probabilities.argmax(1)).tolist()
    sure = [image["confidence"] for image in told["clusters"][0]["images"]]
    assert sure == sorted(sure, reverse=True)
    doubtful = place.get("/api/clusters/0?order=doubtful&n=500")["images"]
    typical = place.get("/api/clusters/0?n=500")["images"]
    assert [image["row"] for image in doubtful] == [image["row"] for image in typical][::-1]
    assert place.get("/api/clusters/0?offset=3&n=2")["images"] == typical[3:5]


def test_a_name_stays_and_is_shown_with_the_question(place: Place) -> None:
    assert place.client.put("/api/clusters/1/name", json={"name": " tabby cats "}).json()["name"] == "tabby cats"
    assert place.get("/api/clusters")["clusters"][1]["name"] == "tabby cats"
    question = place.claim()[0]
    by_row = {image["row"]: image["cluster"] for image in question["shown"]}
    clusters = belief_of_cluster(place)
    assert by_row == {row: "tabby cats" if clusters[row] == 1 else None for row in by_row}
    assert place.client.put("/api/clusters/1/name", json={"name": ""}).json()["name"] == "Cluster 1"
    assert place.client.put("/api/clusters/3/name", json={"name": "x"}).status_code == 404


def belief_of_cluster(place: Place) -> Any:
    return {
        tile["row"]: one["cluster"] for one in place.get("/api/clusters?n=60")["clusters"] for tile in one["images"]
    }


def test_a_wrong_image_becomes_the_next_question(place: Place) -> None:
    held = place.claim(hold=4)
    told = place.post("/api/ask", {"image": 59, "annotator": "anna", "hold": 4})
    assert told["question"]["image"]["row"] == 59
    assert told["question"] in told["held"]["questions"]
    assert {one["id"] for one in held} & {one["id"] for one in told["held"]["questions"]}


def test_an_image_that_answers_have_placed_shows_these_answers(pairs: Place) -> None:
    numbers = pairs.ask(Question(0, (3,)), Question(0, (1,)))
    pairs.answer(numbers[0], 0)
    pairs.answer(numbers[1], NONE)
    told = pairs.post("/api/ask", {"image": 0, "annotator": "anna"})
    assert told["question"] is None
    assert [(one["right"]["row"], one["link"]) for one in told["said"]] == [(3, True), (1, False)]


def test_without_a_model_the_groups_of_answers_are_shown(pairs: Place) -> None:
    assert pairs.get("/api/clusters") == {"model": False, "clusters": []}
    pairs.answer(pairs.ask(Question(4, (7,)))[0], 0)
    (group,) = pairs.get("/api/clusters")["clusters"]
    assert [image["row"] for image in group["images"]] == [4, 7]
    assert pairs.client.put("/api/clusters/0/name", json={"name": "x"}).status_code == 404


@limits(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(0.01, 1), min_size=4, max_size=4), min_size=1, max_size=30))
def test_every_image_is_in_one_gallery(shares: list[list[float]]) -> None:
    probabilities = np.array(shares, np.float32)
    probabilities /= probabilities.sum(1, keepdims=True)
    found = galleries(Belief(np.eye(len(shares), dtype=np.float32), probabilities), [], len(shares))
    assert sorted(row for _, rows, _ in found for row in rows) == list(range(len(shares)))
    for cluster, rows, confidence in found:
        assert (probabilities[rows].argmax(1) == cluster).all()
        assert (np.diff(confidence) <= 0).all()


# Files


def test_the_pairs_file_is_what_training_reads(pairs: Place, stripes: ImageSet, tmp_path: Path) -> None:
    contradict(pairs)
    reply = pairs.client.get("/api/pairs.csv")
    assert "attachment" in reply.headers["content-disposition"]
    (tmp_path / "pairs.csv").write_bytes(reply.content)
    read = Constraints.read(tmp_path / "pairs.csv", names=stripes.names)
    assert list(zip(read.left, read.right, read.link, strict=True)) == [(0, 3, 1), (3, 6, 1), (0, 6, 0)]
    assert read.annotator == ("anna",) * 3


def test_small_pictures_are_the_pixels_of_the_model(place: Place, stripes: ImageSet) -> None:
    reply = place.client.get("/api/images/7/small")
    assert reply.headers["content-type"] == "image/png"
    assert (np.asarray(Image.open(io.BytesIO(reply.content))) == stripes.images[7, ..., 0]).all()
    assert place.client.get("/api/images/7").content == reply.content
    assert place.client.get("/api/images/60").status_code == 404


def test_large_pictures_come_from_the_file_turned_and_bounded(tmp_path: Path) -> None:
    tall = Image.new("RGB", (1200, 600), "red")
    exif = tall.getexif()
    exif[0x0112] = 6
    tall.save(tmp_path / "tall.jpg", exif=exif)
    Image.new("RGBA", (50, 50), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    images = ImageSet.from_folder(tmp_path, side=16, cache=False)
    clear, tall = (Image.open(io.BytesIO(large_picture(images, tmp_path, row)[0])) for row in (0, 1))
    assert (tall.size, tall.format) == ((400, 800), "JPEG")
    assert (clear.size, clear.convert("RGB").getpixel((9, 9))) == ((50, 50), (255, 255, 255))


@pytest.mark.parametrize("harm", ["gone", "broken"])
def test_an_image_file_that_has_gone_is_shown_as_the_model_sees_it(tmp_path: Path, harm: str) -> None:
    Image.new("L", (40, 40), 90).save(tmp_path / "a.png")
    images = ImageSet.from_folder(tmp_path, side=16, channels=1, cache=False)
    if harm == "gone":
        (tmp_path / "a.png").unlink()
    else:
        (tmp_path / "a.png").write_bytes(b"no image")
    shown = large_picture(images, tmp_path, 0)
    assert shown == small_picture(images, 0)
    assert Image.open(io.BytesIO(shown[0])).size == (16, 16)


# Who is refused


def test_the_page_and_everything_else_allow_nothing_from_elsewhere(shared: Place) -> None:
    for path in ("/", "/style.css", "/script.js", "/icon.svg", "/api/state", "/api/images/0", "/nothing"):
        headers = shared.client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert not re.search(r"unsafe|\*|http", policy)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"


def test_the_page_needs_nothing_that_its_policy_forbids() -> None:
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=", html)
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.|@import|eval\(|innerHTML|\.style\.", text), path.name


def test_every_image_of_the_page_has_an_alternative_and_every_button_a_type() -> None:
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    pictures, buttons = (re.findall(rf"<{tag}\b[^>]*>", html) for tag in ("img", "button"))
    assert pictures
    assert all("alt=" in tag for tag in pictures)
    assert buttons
    assert all("type=" in tag for tag in buttons)
    assert 'aria-live="polite"' in html
    assert '<html lang="en">' in html


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/page/../app.py",
        "/api/images/..%2f..%2fetc%2fpasswd",
        "/api/images/-1",
        "/script.js/../../app.py",
        "/docs",
        "/redoc",
    ],
)
def test_a_path_out_of_the_page_leads_nowhere(shared: Place, path: str) -> None:
    reply = shared.client.get(path)
    assert reply.status_code in (404, 422)
    assert "root:" not in reply.text


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_foreign_page_is_refused(shared: Place, headers: dict[str, str]) -> None:
    body = {"annotator": "anna", "hold": 1}
    assert shared.client.post("/api/questions", json=body, headers=headers).status_code == 403
    assert shared.client.get("/api/images/0", headers=headers).status_code == 403
    assert shared.client.post("/api/questions", json=body, headers={"Origin": "http://localhost:8765"}).is_success


def test_a_link_to_the_page_may_stand_on_another_site(shared: Place) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert shared.client.get("/", headers=headers).is_success
    assert shared.client.get("/api/state", headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "evil.example:8765", "", "[::1", "a b"])
def test_a_foreign_name_bound_to_our_address_is_refused(shared: Place, host: str) -> None:
    reply = shared.client.get("/api/state", headers={"Host": host})
    assert reply.status_code == 421
    assert "open the address" in reply.json()["detail"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8765", "127.0.0.1:8765", "[::1]:8765", "192.168.7.7"])
def test_our_own_names_are_let_in(shared: Place, host: str) -> None:
    assert shared.client.get("/api/state", headers={"Host": host}).is_success


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_request_is_refused(shared: Place, chunked: bool) -> None:
    body = b'{"annotator": "' + b"a" * MAX_BODY + b'"}'
    content: Any = (body[at : at + 1000] for at in range(0, len(body), 1000)) if chunked else body
    reply = shared.client.post("/api/undo", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 413
    assert reply.json()["detail"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_foreign_form_could_send_is_refused(shared: Place, kind: str) -> None:
    reply = shared.client.post("/api/undo", content=b'{"annotator": "anna"}', headers={"Content-Type": kind})
    assert reply.status_code == 415


@pytest.mark.parametrize(
    "change",
    [
        {"choice": 5},
        {"choice": -3},
        {"choice": True},
        {"choice": "0"},
        {"annotator": " "},
        {"annotator": "a" * 41},
        {"question": 0},
        {"milliseconds": -1},
        {"more": 1},
    ],
)
def test_a_malformed_answer_is_refused(shared: Place, change: dict[str, Any]) -> None:
    body = {"question": 1, "choice": 0, "annotator": "anna", "milliseconds": 1} | change
    shared.post("/api/answers", body, 422)
    assert shared.get("/api/state")["counts"]["answered"] == 0


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.sampled_from(["\ud800"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "\ud800"]), inner, max_size=2),
    max_leaves=4,
)


@limits(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["annotator", "hold", "choice", "\ud800"]), ODD))
def test_no_json_makes_the_server_fail(shared: Place, body: dict[str, Any]) -> None:
    for path in ("/api/questions", "/api/answers"):
        reply = shared.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert reply.status_code in (200, 409, 422)
        assert reply.json()


def test_a_question_that_does_not_exist_is_told(place: Place) -> None:
    body = {"question": 10**9, "choice": 0, "annotator": "anna", "milliseconds": 1}
    assert "reload the page" in place.post("/api/answers", body, 409)["detail"]
    place.post("/api/settle", {"answer": 10**9, "annotator": "anna"}, 409)
    place.post("/api/ask", {"image": 60, "annotator": "anna"}, 404)


# The token


@pytest.fixture
def locked(tmp_path: Path, stripes: ImageSet) -> Iterator[Place]:
    rules = Rules(frozenset({"localhost"}), "sesame", "constraintmatch-8765")
    with serving(tmp_path / "answers.db", stripes, belief_of(stripes), rules=rules) as found:
        yield found


def test_without_the_token_only_the_empty_page_is_given(locked: Place) -> None:
    assert locked.client.get("/").is_success
    for path in ("/api/state", "/api/images/0", "/api/pairs.csv", "/api/openapi.json", "/api/state?token=wrong"):
        assert locked.client.get(path).status_code == 401
    assert locked.client.get("/?token=wrong").cookies.get("constraintmatch-8765") is None
    assert locked.client.get("/api/state", headers={"Authorization": "Bearer sesam"}).status_code == 401
    assert locked.client.get("/api/state", headers={"Cookie": "constraintmatch-8765=wrong"}).status_code == 401


def test_opening_the_page_with_the_token_lets_the_browser_in(locked: Place) -> None:
    cookie = locked.client.get("/?token=sesame").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()  # browsers ignore case here
    assert locked.client.get("/api/state").is_success  # the client keeps the cookie


def test_a_program_may_send_the_token_as_a_header(locked: Place) -> None:
    assert locked.client.get("/api/state", headers={"Authorization": "Bearer sesame"}).is_success


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_a_server_on_this_machine_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    assert rules_for(host, 80).token is None
    assert rules_for(host, 80, "x").token == "x"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_server_for_others_always_has_a_token(host: str) -> None:
    first, second = rules_for(host, 80).token, rules_for(host, 80).token
    assert first is not None
    assert len(first) >= 20
    assert first != second


# The port


def test_a_page_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(
        InputError, match=r"needs fastapi and uvicorn; install them: pip install 'constraintmatch\[web\]'"
    ):
        open_port(Door(port=0))


def test_a_port_in_use_is_told_with_a_free_one() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} is in use; .* --port \d+$"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        ("127.0.0.1", 70_000, "ports go from 1"),
        ("no such host", 0, "no such host"),
        ("192.0.2.1", 0, "not an address of this machine"),
    ],
)
def test_an_impossible_address_is_told(host: str, port: int, told: str) -> None:
    with pytest.raises(InputError, match=told):
        listen(host, port)


def test_the_address_can_be_opened() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert address(sock, "127.0.0.1") == f"http://127.0.0.1:{port}/"
        assert address(sock, "::1", "a/b") == f"http://[::1]:{port}/?token=a/b"
        assert address(sock, "0.0.0.0") == f"http://{socket.gethostname()}:{port}/"


# Beliefs


def test_pixels_put_images_that_look_alike_together(stripes: ImageSet) -> None:
    features = pixel_belief(stripes).features
    assert np.allclose(np.linalg.norm(features, axis=1), 1, atol=1e-5)
    nearness = features @ features.T
    np.fill_diagonal(nearness, -1)
    assert (LABELS[nearness.argmax(1)] == LABELS).all()


@pytest.mark.parametrize("side", [8, 9, 32])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_of_any_size_and_of_equal_images_give_finite_features(side: int, channels: int) -> None:
    images = ImageSet.from_arrays(np.full((5, side, side, channels), 7, np.uint8))
    features = pixel_belief(images).features
    assert np.isfinite(features).all()
    assert np.allclose(features, features[0])


def test_a_model_says_what_it_predicts(tmp_path: Path, stripes: ImageSet) -> None:
    save_model(build_model(n_clusters=3, side=8, channels=1), tmp_path / "m")
    belief = image_belief(open_model(tmp_path / "m", (8, 1)), stripes, device="cpu")
    assert belief.probabilities is not None
    assert np.allclose(belief.probabilities.sum(1), 1, atol=1e-5)
    assert np.allclose(np.linalg.norm(belief.features, axis=1), 1, atol=1e-5)


def test_a_model_for_other_images_is_refused(tmp_path: Path, stripes: ImageSet) -> None:
    save_model(build_model(n_clusters=3, side=16, channels=3), tmp_path / "m")
    with pytest.raises(
        InputError, match="takes colour images of 16 × 16, these are grey images of 8 × 8; name a model"
    ):
        open_model(tmp_path / "m", (stripes.side, stripes.channels))


def test_the_chooser_never_asks_about_what_answers_have_placed(stripes: ImageSet) -> None:
    belief, answers = belief_of(stripes), [Answer(Question(0, (3,)), 0)]
    assert Chooser().about(belief, answers, 3) is None
    found = Chooser(kind="pair").about(belief, answers, 5)
    assert found is not None
    assert (found.image, found.kind) == (5, "pair")
