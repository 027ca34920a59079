"""Answers from and to files: the pairs file round trip, Label Studio's tasks and exports, FiftyOne's tags."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.database import Given
from constraintmatch.annotate.import_export import export_pairs, import_answers, read_answers
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question

NAMES = ("a/cat.png", "b/cat.png", "b/dog.png", "b/my owl (1).jpg", "fox.png", "elk.png", "bee.png", "ant.png")
PIXELS = np.random.Generator(np.random.Philox(0)).integers(0, 256, (len(NAMES), 4, 4), dtype=np.uint8)
IMAGES = ImageSet.from_arrays(PIXELS, names=NAMES)
CAT, OTHER_CAT, DOG, OWL, FOX, ELK, BEE, ANT = range(8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "answers.db", IMAGES) as store:
        yield store


def said(image: int, *shown: int, choice: int) -> Answer:
    return Answer(Question(image, shown), choice)


def taken_in(store: Store, path: Path, **words: str) -> str:
    return import_answers(store, *read_answers(path, store.images.names, **words))


# The pairs file


def test_an_export_has_a_pair_for_each_image_shown_and_nothing_of_the_unsure(store: Store, tmp_path: Path) -> None:
    answers = [said(CAT, DOG, FOX, choice=1), said(ELK, BEE, choice=NONE), said(ANT, BEE, choice=UNSURE)]
    store.take_in([Given(answer, "ann", time="2026-01-02", origin="old.csv") for answer in answers])
    done = export_pairs(store, tmp_path / "pairs.csv")
    assert (tmp_path / "pairs.csv").read_text() == (
        "left,right,link,annotator,time\n"
        "a/cat.png,b/dog.png,0,ann,2026-01-02\n"
        "a/cat.png,fox.png,1,ann,2026-01-02\n"
        "elk.png,bee.png,0,ann,2026-01-02\n"
    )
    assert done == "3 pairs from 2 answers (left out: 1 unsure)"


def test_sizes_are_no_answers_of_the_page(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "sizes.csv"
    path.write_text("least,most\n0.1,0.5\n")
    with pytest.raises(InputError, match=r"sizes\.csv: has sizes.*give it to train, as --pairs"):
        taken_in(store, path)


def test_triplets_are_exported_alone_or_beside_the_pairs_and_imported_once(store: Store, tmp_path: Path) -> None:
    path, beside = tmp_path / "pairs.csv", tmp_path / "pairs-triplets.csv"
    path.write_text("anchor,near,far,weight\na/cat.png,fox.png,elk.png,0.5\nelk.png,bee.png,ant.png,0\n")
    assert taken_in(store, path).startswith("1 answers imported, 1 left out")
    assert taken_in(store, path).startswith("0 answers imported, 1 known already")
    assert export_pairs(store, path) == "1 triplets from 1 answers"
    assert path.read_text() == "anchor,near,far,weight\na/cat.png,fox.png,elk.png,0.5\n"
    assert not beside.exists()
    store.take_in([Given(said(ELK, BEE, choice=0), "ann"), Given(said(CAT, FOX, ELK, choice=UNSURE), "ann")])
    assert export_pairs(store, path) == "1 pairs, 1 triplets from 2 answers (left out: 1 unsure)"
    assert path.read_text().startswith("left,right,link,annotator,time\nelk.png,bee.png,1,")
    both = Constraints.join([Constraints.read(place, names=NAMES) for place in (path, beside)])
    assert (len(both), both.triplets.rows.tolist()) == (1, [[CAT, FOX, ELK]])


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    images = draw(st.lists(st.integers(0, len(NAMES) - 1), min_size=2, max_size=4, unique=True))
    return Answer(Question(images[0], tuple(images[1:])), draw(st.integers(UNSURE, len(images) - 2)))


def test_a_cannot_link_that_only_follows_is_given_up_when_the_two_turn_out_to_be_the_same(
    store: Store, tmp_path: Path
) -> None:
    for answer, n_pairs in ((said(CAT, DOG, OWL, FOX, choice=0), 3), (said(OWL, DOG, choice=0), 3)):
        store.take_in([Given(answer, "ann")])
        assert export_pairs(store, tmp_path / "pairs.csv").startswith(f"{n_pairs} pairs from ")
    assert links(Constraints.read(tmp_path / "pairs.csv", names=NAMES)) == {(CAT, DOG, 1), (CAT, FOX, 0), (DOG, OWL, 1)}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(answers(), st.sampled_from(["ann", "bob"])), max_size=8))
def test_what_the_answers_say_survives_export_and_import(
    tmp_path_factory: pytest.TempPathFactory, given_answers: list[tuple[Answer, str]]
) -> None:
    folder = tmp_path_factory.mktemp("round")
    with open_store(folder / "one.db", IMAGES) as one, open_store(folder / "two.db", IMAGES) as two:
        one.take_in([Given(answer, who) for answer, who in given_answers])
        if export_pairs(one, folder / "pairs.csv").startswith("0 pairs"):
            return
        taken_in(two, folder / "pairs.csv")
        export_pairs(two, folder / "again.csv")
        before, after = (Constraints.read(folder / name, names=NAMES) for name in ("pairs.csv", "again.csv"))
        assert links(before) == links(after)
        assert one.n_contradictions() == two.n_contradictions()
        assert taken_in(one, folder / "pairs.csv").startswith("0 answers imported")  # it knows all that


def links(pairs: Constraints) -> set[tuple[int, int, float]]:
    sides = (np.minimum(pairs.left, pairs.right), np.maximum(pairs.left, pairs.right), pairs.link)
    return set(zip(*(side.tolist() for side in sides), strict=True))


def test_importing_a_file_twice_changes_nothing_even_after_an_answer_was_withdrawn(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(
        "left,right,link,weight,annotator\nfox.png,elk.png,1,2.5,ann\nfox.png,elk.png,1,1,bob\nelk.png,bee.png,0,1,\n"
    )
    assert taken_in(store, path) == "3 answers imported"
    assert [(row.annotator, row.weight, row.origin) for row in store.rows()] == [
        ("ann", 2.5, "pairs.csv"),
        ("bob", 1.0, "pairs.csv"),
        ("unknown", 1.0, "pairs.csv"),
    ]
    store.settle(1, "bob")
    assert taken_in(store, path) == "0 answers imported, 3 known already"
    assert store.undo("bob") is None  # what came from a file is settled, not undone


def test_soft_and_weightless_pairs_are_left_out_and_contradictions_counted(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("left,right,link,weight\n0,1,1,1\n1,2,1,1\n0,2,0,1\n3,4,0.7,1\n4,5,1,0\n6,6,1,1\n")
    left_out = "3 left out (skipped, soft or without weight)"
    clashes = "1 contradictions in the store now; settle them on the page"
    assert taken_in(store, path) == f"3 answers imported, {left_out}, {clashes}"


def test_a_file_with_an_unknown_image_is_refused_whole(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("left,right,link\nfox.png,elk.png,1\nfox.png,wolf.png,1\n")
    with pytest.raises(InputError, match=r"pairs\.csv line 3: no image is named 'wolf\.png'"):
        taken_in(store, path)
    path.write_text(f"left,right,link,annotator\nfox.png,elk.png,1,ann\nfox.png,bee.png,1,{'x' * 101}\n")
    with pytest.raises(InputError, match=r"pairs\.csv: an annotator needs a name"):
        taken_in(store, path)
    assert store.rows() == []


def test_answers_set_aside_are_not_exported(store: Store, tmp_path: Path) -> None:
    store.take_in([Given(said(*pair, choice=0), "ann") for pair in ((FOX, ELK), (DOG, OWL), (DOG, ANT))])
    with open_store(tmp_path / "answers.db", IMAGES.take(np.arange(7)), read_only=True) as reader:
        done = export_pairs(reader, tmp_path / "pairs.jsonl")
    assert done == "2 pairs from 2 answers (left out: 1 set aside)"


# Label Studio


def annotation(*choices: str, **more: Any) -> dict[str, Any]:
    result = [
        {"from_name": "kind", "to_name": "one", "type": "choices", "value": {"choices": [one]}} for one in choices
    ]
    return {"id": 7, "completed_by": 3, "result": result, "was_cancelled": False, **more}


def task(left: str, right: str, *annotations: dict[str, Any], number: int = 1) -> dict[str, Any]:
    return {"id": number, "data": {"image1": left, "image2": right}, "annotations": list(annotations), "project": 1}


def written(folder: Path, content: Any) -> Path:
    (folder / "export.json").write_text(json.dumps(content))
    return folder / "export.json"


def test_a_label_studio_export_becomes_answers_with_person_time_and_pace(store: Store, tmp_path: Path) -> None:
    who = {"id": 4, "email": "bob@example.org"}
    content = [
        task("fox.png", "elk.png", annotation("Same", lead_time=4.288, created_at="2021-03-09T22:16:08.728353Z")),
        task("bee.png", "ant.png", annotation("Different", completed_by=who), annotation("Not sure"), number=2),
    ]
    assert taken_in(store, written(tmp_path, content)) == "3 answers imported"
    assert store.answers() == [
        said(FOX, ELK, choice=0),
        said(BEE, ANT, choice=NONE),
        said(BEE, ANT, choice=UNSURE),
    ]
    first, second, _ = store.rows()
    assert (first.annotator, first.milliseconds, first.time) == (
        "Label Studio user 3",
        4_288,
        "2021-03-09T22:16:08.728353Z",
    )
    assert (second.annotator, second.milliseconds, second.origin) == ("bob@example.org", None, "export.json")


def test_skipped_and_empty_annotations_are_left_out(store: Store, tmp_path: Path) -> None:
    skipped = [annotation("Same", was_cancelled=True), annotation(), {"result": None}]
    content = [
        task("fox.png", "elk.png", *skipped),
        task("nowhere.png", "gone.png"),
        task("fox.png", "elk.png", annotation("no")),
    ]
    assert taken_in(store, written(tmp_path, content)).startswith("1 answers imported, 3 left out")


def test_the_short_form_is_refused_with_the_fix_and_a_single_task_is_understood(store: Store, tmp_path: Path) -> None:
    short = [{"id": 1, "image1": "fox.png", "image2": "elk.png", "kind": "Same", "annotator": 2, "lead_time": 1.5}]
    with pytest.raises(InputError, match=r"task 1: not a task with its annotations; export .* as JSON, not JSON-MIN"):
        taken_in(store, written(tmp_path, short))
    single = task("bee.png", "elk.png", annotation("Must-link"))
    assert taken_in(store, written(tmp_path, single)) == "1 answers imported"


@pytest.mark.parametrize(
    ("reference", "image"),
    [
        ("b/dog.png", DOG),
        ("dog.png", DOG),
        ("/data/upload/3/0a1b2c3d-dog.png", DOG),
        ("/data/upload/3/0a1b2c3d-my_owl_1.jpg", OWL),
        ("/data/local-files/?d=photos/b/my%20owl%20(1).jpg", OWL),
        ("/data/local-files/?d=photos\\b\\cat.png", OTHER_CAT),
        ("https://example.org/x/a/cat.png?token=1#top", CAT),
        ("s3://bucket/b/cat.png", OTHER_CAT),
        ("C:\\photos\\a\\cat.png", CAT),
        ("gs://bucket/elsewhere/fox.png", FOX),
    ],
)
def test_images_are_found_by_file_name_whatever_the_reference(
    store: Store, tmp_path: Path, reference: str, image: int
) -> None:
    taken_in(store, written(tmp_path, [task(reference, "ant.png", annotation("Same"))]))
    assert store.answers() == [said(image, ANT, choice=0)]


def test_other_words_are_understood_when_they_are_told(store: Store, tmp_path: Path) -> None:
    content = [
        task("fox.png", "elk.png", annotation("gleich", "good light")),
        task("fox.png", "bee.png", annotation("anders")),
    ]
    path = written(tmp_path, content)
    said_so = r"export\.json task 1: the choice 'gleich', 'good light' is not understood; say what it means with --same"
    with pytest.raises(InputError, match=said_so):
        taken_in(store, path)
    taken_in(store, path, same="Gleich", different="anders")
    assert [answer.choice for answer in store.answers()] == [0, NONE]


@pytest.mark.parametrize(
    ("same", "different"),
    [("👍", "👎"), ("+", "-"), ("A+", "A-"), ("yes!", "yes?"), (" = ", "≠"), ("no", "yes"), ("same kind", "same-kind")],
)
def test_choices_that_differ_in_symbols_only_are_told_apart(
    store: Store, tmp_path: Path, same: str, different: str
) -> None:
    content = [
        task("fox.png", "elk.png", annotation(same.upper())),
        task("fox.png", "bee.png", annotation(f" {different}", "🌞")),
    ]
    taken_in(store, written(tmp_path, content), same=same, different=different)
    assert [answer.choice for answer in store.answers()] == [0, NONE]


@pytest.mark.parametrize(("told", "word"), [("yes!", "Yes"), ("+1", "-1"), ("👍", "👎"), ("no", "no?")])
def test_a_word_that_only_resembles_one_that_was_told_is_not_understood(tmp_path: Path, told: str, word: str) -> None:
    path = written(tmp_path, [task("fox.png", "elk.png", annotation(word))])
    with pytest.raises(InputError, match=rf"the choice {re.escape(repr(word))} is not understood"):
        read_answers(path, NAMES, same=told)


@pytest.mark.parametrize(("same", "different"), [("X", "X"), ("👍", "👍 "), ("Equal", "equal")])
def test_one_word_for_same_and_different_is_refused(tmp_path: Path, same: str, different: str) -> None:
    path = written(tmp_path, [task("fox.png", "elk.png", annotation("Same"))])
    with pytest.raises(InputError, match="--same and --different are both '"):
        read_answers(path, NAMES, same=same, different=different)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [task("cat.png", "fox.png", annotation("Same"))],
            r"task 1: cat\.png could be a/cat\.png or b/cat\.png; give the",
        ),
        (
            [task("wolf.png", "fox.png", annotation("Same"), number=9)],
            r"task 9: no image is named 'wolf\.png' \(the set",
        ),
        ([task("fox.png", "-", annotation("Same"))], "task 1: its data names 1 images, not two"),
        ([task("fox.png", "elk.png", annotation("Same", "Different"))], "contradict each other"),
        ({"id": 5, "data": 3, "annotations": []}, "task 5: not a task with its annotations"),
        ([1, 2], "not an export of Label Studio"),
        ("text", "not an export of Label Studio"),
    ],
)
def test_what_cannot_be_understood_is_told_and_nothing_is_stored(
    store: Store, tmp_path: Path, content: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        taken_in(store, written(tmp_path, content))
    assert store.rows() == []


def test_a_file_that_is_no_json_and_a_folder_are_told(store: Store, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    for name, message in {"bad": "not valid JSON", "folder": "is a folder", "gone": "no such file"}.items():
        with pytest.raises(InputError, match=rf"{name}\.json: {message}"):
            taken_in(store, tmp_path / f"{name}.json")


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.sampled_from(["Same", "fox.png", "elk.png", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "data", "annotations", "result", "type", "value", "choices"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


annotations = values | st.lists(st.fixed_dictionaries({"result": values, "completed_by": values, "lead_time": values}))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.lists(st.fixed_dictionaries({"annotations": annotations, "data": values, "image1": values}), max_size=2)
)
def test_whatever_the_export_holds_it_is_read_or_told(store: Store, tmp_path: Path, content: Any) -> None:
    path, before = written(tmp_path, content), len(store.rows())
    told = ""
    try:
        taken_in(store, path)
    except InputError as error:
        told = str(error)
    assert "\n" not in told
    assert len(store.rows()) == before or not told  # a file that is refused leaves nothing behind


def test_tasks_go_to_label_studio_and_come_back_as_answers(tmp_path: Path) -> None:
    for row, pixels in enumerate(PIXELS):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"my {row}.png")
    words = ["annotate", tmp_path / "photos", "--db", tmp_path / "answers.db"]
    done = run(*words, "--export", tmp_path / "tasks.json")
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    assert f"({len(tasks)} questions)" in done.output
    assert not (tmp_path / "answers.db").exists()
    assert set(tasks[0]["data"]) == {"left", "right"}
    assert tasks[0]["data"]["left"].startswith("/data/local-files/?d=my%20")
    assert len({frozenset(task["data"].values()) for task in tasks}) == len(tasks)
    for at, task in enumerate(tasks):
        chosen = {"type": "choices", "value": {"choices": ["same" if at % 2 else "different"]}}
        task["annotations"] = [{"result": [chosen], "completed_by": 3}]
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    assert f"{len(tasks)} answers imported" in run(*words, "--import", tmp_path / "export.json").output
    again = run(*words, "--export", tmp_path / "more.json")
    asked = {frozenset(task["data"].values()) for task in json.loads((tmp_path / "more.json").read_text())}
    assert not asked & {frozenset(task["data"].values()) for task in tasks}, again.output
    assert "has no image files" in run("annotate", "digits", "--export", tmp_path / "x.json", code=2).output


# FiftyOne


def test_images_with_one_tag_are_the_same_and_those_with_others_differ(store: Store, tmp_path: Path) -> None:
    rows = ["/home/me/b/cat.png,birds", "/home/me/b/dog.png,birds", "/home/me/fox.png,fish", "/home/me/elk.png,"]
    rows += ["/home/me/bee.png,birds", "/home/me/a/cat.png,plants"]
    (tmp_path / "labels.csv").write_text("\n".join(["filepath,tags", *rows]) + "\n")
    assert taken_in(store, tmp_path / "labels.csv").startswith("5 answers imported, 1 left out")
    links = {(*sorted((one.question.image, *one.question.shown)), one.choice) for one in store.answers()}
    together, different = {(OTHER_CAT, DOG, 0), (OTHER_CAT, BEE, 0)}, {(OTHER_CAT, FOX, NONE), (CAT, FOX, NONE)}
    assert links == together | different | {(CAT, OTHER_CAT, NONE)}
    assert {row.annotator for row in store.rows()} == {"tags"}
    assert taken_in(store, tmp_path / "labels.csv").startswith("0 answers imported, 5 known already")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('filepath,tags\nfox.png,"a,b"', r"line 2: has the tags a, b; leave one tag on an image, its kind"),
        ("filepath,tags\nfox.png,a\nyak.png,a", r"line 3: no image is named 'yak.png'"),
        ("id,tags\n7,a", r"line 2: names no image; export the fields filepath and tags"),
    ],
)
def test_tags_that_cannot_be_used_are_named_by_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(InputError, match=said):
        read_answers(tmp_path / "labels.csv", NAMES)
