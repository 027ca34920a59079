"""The store of answers: nothing acknowledged is lost, nothing is asked twice, contradictions are told and settled."""

import os
import random
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from forks import Fork
from rights import as_nobody

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.database import Given
from constraintmatch.annotate.store import Store, open_store
from constraintmatch.annotate.tables import repair_answers
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question


def image_set(n: int = 30, *, seed: int = 0, prefix: str = "image") -> ImageSet:
    """n random images; the first ones of a larger set are those of a smaller one."""
    rng = np.random.Generator(np.random.Philox(seed))
    blocks = rng.integers(0, 256, (n, 4, 4, 1), dtype=np.uint8)
    return ImageSet.from_arrays(blocks.repeat(2, 1).repeat(2, 2), names=[f"{prefix}{row}.png" for row in range(n)])


IMAGES = image_set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with open_store(path, IMAGES) as store:
        yield store


def pairs(*images: tuple[int, int]) -> list[Question]:
    return [Question(left, (right,)) for left, right in images]


def ask(store: Store, question: Question, choice: int, annotator: str = "ann", milliseconds: int | None = None) -> int:
    """The number of the answer to a question that is queued, claimed and answered."""
    store.add_questions([question], urgent=True)
    asked = next(asked for asked in store.claim(annotator, 9) if asked.question == question)
    return store.answer(asked.id, choice, annotator, milliseconds)[0]


# Durability


def answer_forever(path: Path) -> None:
    """What the server that is killed does: it prints the number of an answer once it is stored."""
    with open_store(path, IMAGES) as store:
        store.add_questions(Question(i, (j,)) for i in range(30) for j in range(i))
        while True:
            for asked in store.claim("ann", 3):
                os.write(1, b"%d\n" % store.answer(asked.id, -2, "ann", 5)[0])


def test_killing_the_server_at_any_moment_loses_no_acknowledged_answer(path: Path) -> None:
    moments = random.Random(0)
    acknowledged: set[int] = set()
    for _ in range(3):
        with Fork(answer_forever, path) as server:
            acknowledged.add(int(server.out.readline()))
            time.sleep(moments.uniform(0, 0.1))
            server.send(signal.SIGKILL)
            acknowledged |= {int(line) for line in server.out.read().split("\n")[:-1]}
        with open_store(path, IMAGES) as store:  # the lock of a killed server is free, its claims are kept
            rows = store.rows()
        assert acknowledged <= {row.id for row in rows}
        assert len({row.question for row in rows}) == len(rows)
    assert len(acknowledged) > 10


def test_an_answer_is_one_row_that_a_reader_sees_while_the_server_runs(path: Path, store: Store) -> None:
    store.add_questions([Question(3, (1, 2))], model="runs/x")
    (asked,) = store.claim("ann")
    store.answer(asked.id, 1, "ann", 1_234)
    with closing(sqlite3.connect(path)) as other:
        (row,) = other.execute("SELECT image, shown, choice, annotator, milliseconds, time, model FROM answered")
    assert row[:5] == ("image3.png", '["image1.png", "image2.png"]', 1, "ann", 1_234)
    assert row[5].startswith("20")
    assert row[6] == "runs/x"
    with open_store(path, IMAGES, read_only=True) as reader:
        assert reader.answers() == store.answers() == [Answer(Question(3, (1, 2)), 1)]
        with pytest.raises(InputError, match="read-only"):
            reader.add_questions(pairs((0, 1)))


def test_the_database_is_in_wal_mode_and_waits_for_the_disk(store: Store) -> None:
    settings = [
        store._database.connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
    ]
    assert settings == ["wal", 2]


def test_what_was_answered_is_there_after_a_restart(path: Path) -> None:
    with open_store(path, IMAGES) as store:
        ask(store, Question(0, (1,)), 0)
        ask(store, Question(1, (2,)), 0)
        ask(store, Question(0, (3,)), UNSURE)
        store.undo("ann")
        store.rename(4, "cats")
        before = store.answers(), store.rows(), store.names(), store.counts()
    with open_store(path, IMAGES) as store:
        assert (store.answers(), store.rows(), store.names(), store.counts()) == before
        assert store.notice is None
        ask(store, Question(0, (2,)), NONE)
        assert len(store.contradictions()) == 1


def test_a_full_disk_is_told_and_leaves_the_store_as_it_was(store: Store) -> None:
    ask(store, Question(0, (1,)), 0)
    pages = store._database.connection.execute("PRAGMA page_count").fetchone()[0]
    store._database.connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(InputError, match=r"answers\.db: no space left on the disk; free some"):
        store.add_questions(Question(i, (j,)) for i in range(30) for j in range(i))
    assert store.claim("ann", 1) == []
    store._database.connection.execute("PRAGMA max_page_count = 1000000")
    ask(store, Question(2, (3,)), NONE)
    assert len(store.answers()) == 2


# Asking


def test_the_same_question_is_queued_once_in_whatever_order_it_shows_its_images(store: Store) -> None:
    assert (
        store.add_questions([*pairs((0, 1), (1, 0)), Question(2, (3, 4)), Question(2, (4, 3)), Question(3, (2, 4))])
        == 3
    )
    ask(store, Question(5, (6,)), 0)
    assert store.add_questions(pairs((6, 5), (0, 1))) == 0


def test_a_question_answered_with_unsure_can_be_asked_again(store: Store) -> None:
    ask(store, Question(0, (1,)), UNSURE)
    assert store.add_questions(pairs((0, 1))) == 1


def test_annotators_get_different_questions_and_the_same_ones_when_they_ask_again(store: Store) -> None:
    store.add_questions(pairs((0, 1), (2, 3), (4, 5)))
    ann, bob = store.claim("ann", 2), store.claim("bob", 2)
    assert [len(ann), len(bob)] == [2, 1]
    assert not {a.id for a in ann} & {b.id for b in bob}
    assert store.claim("ann", 2) == ann
    assert store.claim("eve", 2) == []
    store.release("ann")
    assert store.claim("eve", 2) == ann


def test_a_claim_times_out_and_the_first_answer_counts(path: Path) -> None:
    now = [1_000.0]
    with open_store(path, IMAGES, claim_seconds=60, clock=lambda: now[0]) as store:
        store.add_questions(pairs((0, 1)))
        (asked,) = store.claim("ann")
        now[0] += 59
        assert store.claim("bob") == []
        now[0] += 2
        assert store.claim("bob") == [asked]
        assert store.claim("ann") == []
        store.answer(asked.id, 0, "ann")  # slow, but not in vain
        with pytest.raises(InputError, match=r"question 1 is already answered \(by ann\); undo that first"):
            store.answer(asked.id, NONE, "bob")
        assert len(store.answers()) == 1


def test_many_threads_lose_nothing_and_answer_nothing_twice(store: Store) -> None:
    store.add_questions(Question(i, (j,)) for i in range(12) for j in range(i))
    numbers: list[int] = []

    def work(annotator: str) -> None:
        while asked := store.claim(annotator, 2):
            numbers.extend(store.answer(one.id, UNSURE, annotator, 1)[0] for one in asked)

    threads = [threading.Thread(target=work, args=(f"person {at}",)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = store.rows()
    assert sorted(numbers) == [row.id for row in rows]
    assert len({row.question for row in rows}) == len(rows) == 66
    assert len({(row.image, row.shown) for row in rows}) == 66


def test_what_the_answers_imply_by_now_is_not_asked_unless_a_person_wants_it(store: Store) -> None:
    store.add_questions(pairs((0, 1), (1, 2), (0, 2)))
    for asked in store.claim("ann", 2):
        store.answer(asked.id, 0, "ann")
    assert store.claim("ann") == []
    store.add_questions(pairs((0, 2)), urgent=True)
    assert [asked.question for asked in store.claim("ann")] == pairs((0, 2))


def test_a_question_that_was_settled_when_it_was_chosen_is_asked(store: Store) -> None:
    ask(store, Question(0, (1,)), 0)
    ask(store, Question(1, (2,)), 0)
    store.add_questions(pairs((0, 2)))
    assert [asked.question for asked in store.claim("ann", 2)] == pairs((0, 2))


def test_urgent_questions_come_first_and_a_newer_model_replaces_what_waits(store: Store) -> None:
    store.add_questions(pairs((0, 1), (2, 3), (4, 5)))
    (held,) = store.claim("ann")
    assert store.add_questions(pairs((6, 7), (2, 3)), model="new", replace=True) == 2
    store.add_questions(pairs((2, 3)), urgent=True)
    assert [asked.question for asked in store.claim("ann", 9)] == [*pairs((2, 3)), held.question, *pairs((6, 7))]


def test_a_question_about_an_image_that_is_not_there_is_refused(store: Store) -> None:
    with pytest.raises(InputError, match=r"image 30 does not exist \(the set has 30 images\)"):
        store.add_questions(pairs((0, 30)))


# Answering


def test_the_same_answer_sent_twice_is_stored_once(store: Store) -> None:
    store.add_questions(pairs((0, 1)))
    (asked,) = store.claim("ann")
    assert store.answer(asked.id, 0, "ann", 10) == store.answer(asked.id, 0, "ann", 10)
    assert len(store.rows()) == 1


@pytest.mark.parametrize("number", [0, -1, 7, 2**70])
def test_an_answer_to_no_question_is_refused(store: Store, number: int) -> None:
    with pytest.raises(InputError, match=r"question .* is not in"):
        store.answer(number, 0, "ann")
    with pytest.raises(InputError, match=r"answer .* is not in"):
        store.row(number)
    with pytest.raises(InputError, match=r"answer .* does not stand"):
        store.settle(number, "ann")


def test_a_choice_that_was_not_shown_and_an_annotator_without_a_name_are_refused(store: Store) -> None:
    store.add_questions(pairs((0, 1)))
    (asked,) = store.claim("ann")
    with pytest.raises(InputError, match="choice 1 is none of the 1 shown"):
        store.answer(asked.id, 1, "ann")
    for name in (" ", "x" * 101):
        with pytest.raises(InputError, match="an annotator needs a name of 1 to 100 characters"):
            store.answer(asked.id, 0, name)
    store.answer(asked.id, 0, "\ud800 \n ann", 2**70)
    assert [(row.annotator, row.milliseconds) for row in store.rows()] == [("\ufffd \ufffd ann", 2**53)]


def test_undo_goes_back_any_number_of_own_answers_and_gives_the_questions_back(store: Store) -> None:
    questions = pairs((0, 1), (2, 3), (4, 5))
    for question, who in zip(questions, ("ann", "bob", "ann"), strict=True):
        ask(store, question, 0, who)
    undone = [store.undo("ann"), store.undo("ann"), store.undo("ann")]
    assert [asked and asked.question for asked in undone] == [questions[2], questions[0], None]
    assert [row.withdrawn for row in store.rows()] == ["undo", "", "undo"]
    assert store.claim("bob", 3) == []  # they are ann's to answer again
    again = store.claim("ann", 3)
    assert [asked.question for asked in again] == [questions[0], questions[2]]
    store.answer(again[0].id, NONE, "ann")
    assert [answer.choice for answer in store.answers()] == [0, NONE]


def test_a_contradiction_is_told_at_once_with_the_answers_that_prove_it(store: Store) -> None:
    first, second = ask(store, Question(0, (1,)), 0, "ann"), ask(store, Question(1, (2, 3)), 0, "bob")
    store.add_questions(pairs((2, 0)), urgent=True)
    (asked,) = store.claim("ann")
    number, (clash,) = store.answer(asked.id, NONE, "ann")
    assert (clash.images, clash.together, clash.apart) == ((2, 1, 0), (second, first), number)
    assert [store.row(one).annotator for one in (clash.apart, *clash.together)] == ["ann", "bob", "ann"]
    assert [{one.apart, *one.together} for one in store.contradictions()] == [{first, second, number}]


@pytest.mark.parametrize("choice", [None, 1, UNSURE])
def test_a_contradiction_is_settled_by_withdrawing_or_changing_an_answer(store: Store, choice: int | None) -> None:
    ask(store, Question(0, (1,)), 0)
    wrong = ask(store, Question(1, (2, 3)), 0)
    ask(store, Question(0, (2,)), NONE)
    number, left = store.settle(wrong, "bob", choice)
    assert left == [] == store.contradictions()
    old = store.row(wrong)
    assert (old.choice, old.withdrawn) == (0, "withdrawn" if choice is None else "changed")
    assert (number == wrong) == (choice is None)
    assert [a.choice for a in store.answers()] == [0, NONE] + ([] if choice is None else [choice])
    with pytest.raises(InputError, match=f"answer {wrong} does not stand"):
        store.settle(wrong, "bob")


def test_changing_an_answer_to_what_it_is_changes_nothing(store: Store) -> None:
    number = ask(store, Question(0, (1,)), 0)
    assert store.settle(number, "bob", 0)[0] == number
    assert len(store.rows()) == 1


def test_the_counts_tell_the_kinds_and_the_speed(store: Store) -> None:
    said = [((0, 1), 0), ((2, 3), NONE), ((4, 5, 6), 1), ((7, 8, 9), NONE), ((10, 11), UNSURE), ((12, 13), 0)]
    for at, ((image, *shown), choice) in enumerate(said):
        ask(store, Question(image, tuple(shown)), choice, "ann" if at else "bob", 2_000)
    store.undo("ann")
    found = store.counts()
    assert (found["answered"], found["same"], found["different"], found["unsure"]) == (5, 2, 2, 1)
    assert (found["withdrawn"], found["per_minute"]) == (1, 30.0)
    assert (store.n_set_aside(), store.n_waiting()) == (0, 1)


def test_without_answers_there_is_no_speed(store: Store) -> None:
    assert store.counts()["per_minute"] == 0


def test_a_pause_does_not_spoil_the_speed(store: Store) -> None:
    ask(store, Question(0, (1,)), 0, milliseconds=4 * 3_600_000)
    assert store.counts()["per_minute"] == 1.0


def test_clusters_are_named_and_named_anew(store: Store) -> None:
    store.rename(0, " cats ")
    store.rename(3, "dogs")
    store.rename(0, "tigers")
    store.rename(3, "")
    assert store.names() == {0: "tigers"}
    with pytest.raises(InputError, match="at most 100 characters"):
        store.rename(0, "x" * 101)


# Bad input


def test_a_database_of_another_folder_is_refused_and_its_folder_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    with open_store(path, IMAGES, source=tmp_path / "birds") as store:
        ask(store, Question(0, (1, 2)), 0)
    said = r"images of cars \(3 of its 3 image names are not there\); it belongs to .*birds; give its folder or another"
    with pytest.raises(InputError, match=said), open_store(path, image_set(prefix="car"), source="cars"):
        pass
    said = r"3 of its 3 images look different there\); they have changed since; put them back or give another --db"
    with pytest.raises(InputError, match=said), open_store(path, image_set(seed=1), source=tmp_path / "birds"):
        pass
    said = r"not about the images of this set \(3 of its 3 images look different there\)"
    with pytest.raises(InputError, match=said), open_store(path, image_set(seed=1)):
        pass


def test_answers_about_embeddings_say_whether_they_need_pictures(path: Path, tmp_path: Path) -> None:
    table = np.random.Generator(np.random.Philox(1)).normal(size=(30, 5)).astype(np.float32)
    bare = ImageSet.from_arrays(table, names=IMAGES.names)
    seen, folder = bare.with_pictures(IMAGES), tmp_path / "my photos"
    folder.mkdir()
    with open_store(path, seen, source="e.npz", pictures=folder) as store:
        ask(store, Question(0, (1, 2)), 0)
    said = rf"look different there\); it was made with pictures; give --pictures '{folder}' or another --db"
    for read_only in (True, False):
        with pytest.raises(InputError, match=said), open_store(path, bare, source="e.npz", read_only=read_only):
            pass
    with pytest.raises(InputError, match=r"it belongs to e\.npz; it was made with pict"), open_store(path, bare):
        pass
    with closing(sqlite3.connect(path)) as connection, connection:  # as it was before this was noted
        connection.execute("DELETE FROM about WHERE key = 'pictures'")
    said = "if it was made with pictures, add --pictures FOLDER, else give another --db"
    with pytest.raises(InputError, match=said), open_store(path, bare, source="e.npz"):
        pass
    with open_store(tmp_path / "bare.db", bare, source="e.npz") as store:
        ask(store, Question(0, (1, 2)), 0)
    said, other = "it was made without pictures; leave --pictures out", tmp_path / "bare.db"
    with pytest.raises(InputError, match=said), open_store(other, seen, source="e.npz", pictures=folder):
        pass


def test_a_reader_leaves_nothing_beside_the_database(path: Path) -> None:
    with open_store(path, IMAGES) as store:
        ask(store, Question(0, (1,)), 0)
    before, content = set(path.parent.iterdir()), path.read_bytes()
    with open_store(path, IMAGES, read_only=True) as reader:
        assert len(reader.answers()) == 1
        with pytest.raises(InputError, match="read-only"):
            reader.add_questions(pairs((2, 3)))
    assert set(path.parent.iterdir()) == before
    assert path.read_bytes() == content


def test_a_file_that_is_refused_gets_no_lock_beside_it(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"this is no database" * 100)
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE things (name TEXT)")
    with open_store(tmp_path / "made.db", IMAGES) as store:
        ask(store, Question(0, (1,)), 0)
    (tmp_path / "moved.db").write_bytes((tmp_path / "made.db").read_bytes())
    before = set(tmp_path.iterdir())
    for place in (path, tmp_path / "other.db", tmp_path / "moved.db"):
        with pytest.raises(InputError, match="another --db"), open_store(place, image_set(prefix="car")):
            pass
    assert set(tmp_path.iterdir()) == before


def test_a_moved_image_sets_its_answers_aside_until_it_is_back(path: Path) -> None:
    with open_store(path, IMAGES) as store:
        for question in pairs((0, 1), (2, 3), (0, 4), (5, 6)):
            ask(store, question, 0)
        store.add_questions(pairs((0, 9), (7, 8)))
    with open_store(path, IMAGES.take(np.arange(1, 30))) as store:
        assert store.answers() == [Answer(question, 0) for question in pairs((1, 2), (4, 5))]
        assert store.notice is not None
        assert store.notice.endswith(
            "answers.db: 2 answers are kept but set aside: 1 image (image0.png) moved, renamed or deleted; "
            "put the images back to use them"
        )
        assert store.n_set_aside() == 2
        assert [asked.question for asked in store.claim("ann", 9)] == pairs((6, 7))
        assert [row.answer is None for row in store.rows()] == [True, False, True, False]
    with open_store(path, IMAGES) as store:
        assert len(store.answers()) == 4
        assert store.notice is None


def test_a_replaced_picture_sets_its_answers_aside(path: Path) -> None:
    with open_store(path, IMAGES) as store:
        for question in pairs((0, 1), (2, 3)):
            ask(store, question, 0)
    pixels = IMAGES.images.copy()
    pixels[0] = 255 - pixels[0]
    with open_store(path, ImageSet.from_arrays(pixels, names=IMAGES.names)) as store:
        assert store.answers() == [Answer(Question(2, (3,)), 0)]
        assert "1 image (image0.png) replaced by another picture" in str(store.notice)
        ask(store, Question(0, (1,)), NONE)  # the new picture can be asked about
        assert len(store.answers()) == 2


def test_answers_follow_their_images_when_the_folder_grows_or_is_read_at_another_size(path: Path) -> None:
    with open_store(path, IMAGES) as store:
        ask(store, Question(3, (4,)), 0)
    colour = np.concatenate([image_set(2, seed=5).images, IMAGES.images]).repeat(3, 3).repeat(4, 1).repeat(4, 2)
    grown = ImageSet.from_arrays(colour, names=["a.png", "b.png", *IMAGES.names])
    with open_store(path, grown) as store:
        assert store.answers() == [Answer(Question(5, (6,)), 0)]


@pytest.mark.usefixtures("store")
def test_the_second_server_on_a_database_is_told_so(path: Path) -> None:
    link = path.with_name("other.db")
    link.symlink_to(path)
    for name in (path, link):
        said = rf"{name.name}: another server uses this database \(pid {os.getpid()}\); use its page"
        with pytest.raises(InputError, match=said), open_store(name, IMAGES):
            pass


def test_files_that_are_no_database_of_answers_are_refused(path: Path, tmp_path: Path) -> None:
    path.write_text("left,right,link\n" * 100)
    foreign = tmp_path / "history.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE visits (url TEXT)")
    cases = {path: "not a database of answers", foreign: "a database of another program", tmp_path: "is a folder"}
    for place, said in cases.items():
        before = place.read_bytes() if place.is_file() else b""
        with pytest.raises(InputError, match=said), open_store(place, IMAGES):
            pass
        assert not before or place.read_bytes() == before
    with pytest.raises(InputError, match="no such file"), open_store(tmp_path / "new.db", IMAGES, read_only=True):
        pass


@pytest.mark.parametrize(("version", "mend"), [(7, "update constraintmatch"), (0, "choose another --db")])
def test_a_database_of_another_version_is_refused(path: Path, version: int, mend: str) -> None:
    with open_store(path, IMAGES):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    said = rf"a database of version {version}; this program knows version 2; {mend}"
    with pytest.raises(InputError, match=said), open_store(path, IMAGES):
        pass


def test_a_damaged_database_is_refused(path: Path) -> None:
    with open_store(path, IMAGES) as store:
        store.add_questions(Question(i, (j,)) for i in range(30) for j in range(i))
    content = bytearray(path.read_bytes())
    content[4096 * 3 : -4096] = os.urandom(len(content) - 4096 * 4)
    path.write_bytes(content)
    with (
        pytest.raises(InputError, match="the database is damaged; save what can be read: constraintmatch repair "),
        open_store(path, IMAGES),
    ):
        pass


def test_a_database_that_was_begun_and_never_made_is_made(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # all that a server wrote before it was killed
    assert path.stat().st_size > 0
    with pytest.raises(InputError, match="an empty file, not a database"), open_store(path, IMAGES, read_only=True):
        pass
    with open_store(path, IMAGES) as store:
        assert store.answers() == []


def test_a_database_that_cannot_be_made_is_not_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr("constraintmatch.annotate.tables.create_tables", full)
    with pytest.raises(InputError, match="no space left on the disk"), open_store(path, IMAGES):
        pass
    assert not path.exists()


def test_a_read_only_folder_or_file_is_told() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.db"
        with open_store(path, IMAGES) as store:
            store.add_questions(pairs((0, 1)))
        Path(folder).chmod(0o555)
        new = Path(folder) / "new.db"
        with as_nobody(), pytest.raises(InputError, match=r"new\.db: no permission to write"), open_store(new, IMAGES):
            pass
        Path(folder).chmod(0o777)
        path.chmod(0o444)
        for place in Path(folder).glob("*.lock/.lock"):
            place.chmod(0o666)
        said = r"answers\.db: the file or its disk is read-only; make it writable"
        with as_nobody(), pytest.raises(InputError, match=said), open_store(path, IMAGES):
            pass


# Damage


@pytest.fixture
def answered(path: Path) -> Path:
    """A database with answers 1 to 5 to questions about three images each."""
    with open_store(path, IMAGES) as store:
        for row in range(5):
            ask(store, Question(row, (10 + row, 20 + row)), row % 2)
    return path


def spoil(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


BAD_TEXT = "CAST(x'61ff62' AS TEXT)"


@pytest.mark.parametrize(
    ("statement", "said", "n_saved"),
    [
        (f"UPDATE questions SET image = {BAD_TEXT} WHERE id = 2", "table questions row 2: image is 'a", 4),
        ("UPDATE questions SET shown = 'no json' WHERE id = 2", "table questions row 2: shown is 'no json'", 4),
        ("UPDATE questions SET shown = '7' WHERE id = 3", "table questions row 3: shown is '7'", 4),
        ("UPDATE questions SET shown = '[1, 2]' WHERE id = 3", r"table questions row 3: shown is '\[1, 2\]'", 4),
        ("UPDATE questions SET shown = '[\"\\ud800\"]' WHERE id = 3", "table questions row 3: shown is", 4),
        ("UPDATE questions SET look = x'00' WHERE id = 1", "table questions row 1: look has 1 bytes for 3 images", 4),
        ("UPDATE answers SET choice = 'first' WHERE id = 4", "table answers row 4: choice is 'first'", 4),
        ("UPDATE answers SET choice = 9 WHERE id = 4", "table answers row 4: choice 9 was not shown", 4),
        ("UPDATE answers SET question = 77 WHERE id = 5", "table answers row 5: its question 77 is not there", 4),
        ("UPDATE answers SET annotator = x'ff' WHERE id = 5", "table answers row 5: annotator is b'", 4),
        (f"UPDATE answers SET origin = {BAD_TEXT} WHERE id = 1", "table answers row 1: origin is 'a", 5),
        (f"INSERT INTO clusters VALUES (1, {BAD_TEXT})", "table clusters row 1: name is 'a", 5),
        (f"UPDATE about SET value = {BAD_TEXT}", "table about row opened: value is 'a", 5),
        ("DROP TABLE clusters", "there is no table clusters", 5),
        ("ALTER TABLE answers DROP COLUMN weight", "table answers has no column weight", 0),
    ],
)
def test_a_row_that_cannot_be_is_named_and_the_others_are_saved(
    answered: Path, tmp_path: Path, statement: str, said: str, n_saved: int
) -> None:
    spoil(answered, "DROP VIEW answered", statement)
    before = answered.read_bytes()
    for read_only in (False, True):
        with pytest.raises(InputError, match=said), open_store(answered, IMAGES, read_only=read_only):
            pass
    repaired = tmp_path / "repaired.db"
    if not n_saved:
        with pytest.raises(InputError, match="no answer in it can be read"):
            repair_answers(answered, repaired)
        assert not repaired.exists()
        return
    n, lost = repair_answers(answered, repaired)
    assert n == n_saved
    assert len(lost) == (5 - n_saved) * (2 if "questions" in statement else 1) + ("about" in said or "clusters" in said)
    assert answered.read_bytes() == before
    with open_store(repaired, IMAGES) as store:
        assert len(store.rows()) == n_saved
        assert [row.annotator for row in store.rows()] == ["ann"] * n_saved


def test_what_can_be_read_of_a_file_with_broken_pages_is_saved(path: Path, tmp_path: Path) -> None:
    with open_store(path, IMAGES) as store:
        all_pairs = pairs(*((i, j) for i in range(30) for j in range(i)))
        store.take_in(Given(Answer(question, UNSURE), "ann") for question in all_pairs)
    content = bytearray(path.read_bytes())
    page = content.index(b"ann2") // 4096 * 4096 + 4096  # behind the first answers
    content[page : page + 4096] = bytes(4096)
    path.write_bytes(content)
    with pytest.raises(InputError, match="the database is damaged"), open_store(path, IMAGES):
        pass
    n, lost = repair_answers(path, tmp_path / "repaired.db")
    assert 0 < n < 435
    assert lost
    with open_store(tmp_path / "repaired.db", IMAGES) as store:
        assert store.counts()["unsure"] == n
    with pytest.raises(InputError, match=r"repaired\.db: exists already"):
        repair_answers(path, tmp_path / "repaired.db")


@pytest.mark.parametrize("place", [".", "/"])
def test_a_folder_is_no_database_to_repair(place: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        repair_answers(Path(place), tmp_path / "repaired.db")
    assert not any(tmp_path.iterdir())


# Triplets


def test_a_triplet_is_stored_counted_undone_and_links_nothing(path: Path, store: Store) -> None:
    triplet, which = Question(0, (1, 2), nearer=True), Question(0, (1, 2))
    ask(store, triplet, 1)
    ask(store, which, NONE)  # the same images, another question, and no contradiction
    assert store.answers() == [Answer(triplet, 1), Answer(which, NONE)]
    assert (store.counts()["nearer"], store.counts()["different"], store.counts()["same"]) == (1, 1, 0)
    assert not store.contradictions()
    assert store.add_questions([Question(0, (2, 1), nearer=True)]) == 0
    store.undo("ann")
    undone = store.undo("ann")
    assert undone is not None
    assert undone.question == triplet
    with pytest.raises(InputError, match="a triplet has no answer -1"):
        store.answer(undone.id, NONE, "ann")
    store.answer(undone.id, UNSURE, "ann")
    with open_store(path, IMAGES, read_only=True) as reader:
        assert reader.answers() == [Answer(triplet, UNSURE)]
        assert (reader.counts()["nearer"], reader.counts()["unsure"]) == (0, 1)


def test_a_triplet_whose_answer_is_known_is_not_asked(store: Store) -> None:
    ask(store, Question(0, (1,)), 0)
    for other in (3, 4):
        ask(store, Question(0, (other,)), NONE)
    known = [Question(0, (1, 2), nearer=True), Question(0, (3, 4), nearer=True)]
    store.add_questions([*known, Question(0, (3, 5), nearer=True)])
    assert [asked.question for asked in store.claim("bob", 9)] == [Question(0, (3, 5), nearer=True)]


def test_a_database_without_triplets_is_read_and_brought_up_to_date(path: Path, tmp_path: Path) -> None:
    with open_store(path, IMAGES) as store:
        ask(store, Question(3, (1, 2)), 1)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE questions DROP COLUMN nearer")
        connection.execute("PRAGMA user_version = 1")
    old = path.read_bytes()
    with open_store(path, IMAGES, read_only=True) as reader:
        assert [row.answer for row in reader.rows()] == [Answer(Question(3, (1, 2)), 1)]
    assert path.read_bytes() == old
    assert repair_answers(path, tmp_path / "repaired.db") == (1, [])
    with open_store(path, IMAGES) as store:
        ask(store, Question(4, (5, 6), nearer=True), 0)
    with open_store(path, IMAGES) as store:
        assert [answer.question.kind for answer in store.answers()] == ["which", "triplet"]


@pytest.mark.parametrize(
    "change", ["questions SET shown = '[\"image1.png\"]', look = x'%s'" % ("00" * 32), "answers SET choice = -1"]
)
def test_a_triplet_that_cannot_be_is_refused_and_lost_in_a_repair(path: Path, tmp_path: Path, change: str) -> None:
    with open_store(path, IMAGES) as store:
        ask(store, Question(8, (9,)), 0)
        ask(store, Question(0, (1, 2), nearer=True), 1)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {change} WHERE id = 2")
    with (
        pytest.raises(InputError, match=r"row 2: (a triplet of 2 images|choice -1 was not shown)"),
        open_store(path, IMAGES),
    ):
        pass
    saved, lost = repair_answers(path, tmp_path / "repaired.db")
    assert (saved, bool(lost)) == (1, True)
