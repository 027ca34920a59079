"""`constraintmatch annotate`: files in and out, what a person can get wrong, and an end by Ctrl-C."""

import json
import os
import re
import signal
import sqlite3
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import Fork
from PIL import Image
from typer.testing import CliRunner

from constraintmatch.annotate.server import listen
from constraintmatch.annotate.store import open_store
from constraintmatch.cli import app, asking
from constraintmatch.data.image_set import ImageSet
from constraintmatch.models.cluster_model import build_model, save_model

assert asking.annotate  # its import brings the command


def run(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def refused(*words: object) -> str:
    """The one line with which the command refuses its input."""
    said = [line for line in run("annotate", *words, code=2).stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    return str(said[0])


@pytest.fixture
def folder(tmp_path: Path, stripes: ImageSet) -> Path:
    place = tmp_path / "photos"
    place.mkdir()
    for row in range(12):
        Image.fromarray(stripes.images[row, ..., 0]).save(place / f"{row:02d}.png")
    return place


def write_pairs(folder: Path, *lines: str) -> Path:
    path = folder.parent / "in.csv"
    path.write_text("\n".join(("left,right,link", *lines)) + "\n")
    return path


def import_some(folder: Path) -> Path:
    db = folder.parent / "answers.db"
    pairs = write_pairs(folder, "00.png,03.png,1", "00.png,01.png,0")
    said = run("annotate", folder, "--db", db, "--import", pairs).stdout
    assert "2 answers imported" in said
    return db


def test_answers_go_in_and_out_as_a_pairs_file(folder: Path) -> None:
    db, out = import_some(folder), folder.parent / "out.csv"
    assert "2 pairs from 2 answers" in run("annotate", folder, "--db", db, "--export", out).stdout
    lines = [line.split(",")[:3] for line in out.read_text().splitlines()]
    assert [line[:2] for line in lines[1:]] == [["00.png", "03.png"], ["00.png", "01.png"]]
    assert [float(line[2]) for line in lines[1:]] == [1, 0]
    assert run("check", out, folder).exit_code == 0


def test_answers_are_exported_while_a_server_holds_the_database(folder: Path) -> None:
    db, out = import_some(folder), folder.parent / "out.csv"
    with open_store(db, ImageSet.from_folder(folder)):
        run("annotate", folder, "--db", db, "--export", out)
    assert out.exists()


def test_a_second_server_on_one_database_is_told_so(folder: Path) -> None:
    db = import_some(folder)
    with open_store(db, ImageSet.from_folder(folder)):
        said = refused(folder, "--db", db, "--port", 0, "--no-browser")
    assert "another server uses this database" in said
    assert "choose another --db" in said


def test_a_database_of_another_folder_is_told_so(folder: Path, tmp_path: Path) -> None:
    db = import_some(folder)
    (tmp_path / "other").mkdir()
    for row in range(3):
        Image.new("L", (8, 8), 80 * row).save(tmp_path / "other" / f"x{row}.png")
    said = refused(tmp_path / "other", "--db", db, "--port", 0, "--no-browser")
    assert "not about the images" in said
    assert "another --db" in said


def test_a_moved_image_is_told_and_its_answers_are_kept(folder: Path) -> None:
    db = import_some(folder)
    (folder / "03.png").rename(folder / "elsewhere.png")
    said = run("annotate", folder, "--db", db, "--import", write_pairs(folder, "04.png,07.png,1")).stderr
    assert "1 answer is kept but set aside" in said
    assert "03.png" in said
    (folder / "elsewhere.png").rename(folder / "03.png")
    out = folder.parent / "out.csv"
    assert "3 pairs from 3 answers" in run("annotate", folder, "--db", db, "--export", out).stdout


def test_a_port_in_use_is_told_before_anything_is_opened(folder: Path, tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        said = refused(folder, "--db", tmp_path / "new.db", "--port", port, "--no-browser")
    assert said.startswith(f"error: port {port} is in use; stop what uses it or choose another")
    assert not (tmp_path / "new.db").exists()


def test_a_model_that_does_not_match_is_told(tmp_path: Path) -> None:
    save_model(build_model(n_clusters=3, side=16, channels=3), tmp_path / "m")
    said = refused("digits", "--model", tmp_path / "m", "--db", tmp_path / "a.db", "--port", 0, "--no-browser")
    assert "takes colour images of 16 × 16, these are grey images of 8 × 8" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "nothing"), "no such model or run folder"),
        (("--db", "."), "is a folder"),
        (("--db", "not-a-database.db"), "not a database"),
        (("--export", "out.csv", "--db", "missing.db"), "no such file"),
        (("--export", "out.csv", "--db", "photos"), "is a folder; give the database in it, for example --db photos/"),
        (("--import", "photos"), "is a folder; name a pairs file or Label Studio's export"),
        (("--columns", "i,j,c_ij"), "--columns goes with --import"),
        (
            ("--columns", "i,j,c_ij", "--import", "export.json"),
            "--columns goes with a pairs file, not with export.json",
        ),
        (("--same", "", "--import", "in.csv"), "go with an export of Label Studio"),
        (("--export", "a.csv", "--import", "b.csv"), "do not go together"),
        (("--import", "missing.csv"), "no such file"),
        (("--split", "test"), "goes with a data set"),
        (("--port", "99999"), "ports go from"),
        (("--host", "192.0.2.1"), "not an address of this machine"),
    ],
)
def test_what_a_person_can_mend_is_one_line(
    folder: Path, words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("not-a-database.db").write_bytes(b"this is no database" * 100)
    Path("export.json").write_text("[]")
    write_pairs(folder)
    before = set(folder.parent.rglob("*"))
    assert told in refused("photos", "--no-browser", *words)
    assert set(folder.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "lines", [("00.png,03.png,2",), ("00.png,99.png,1",), ("00.png,03.png",), ("00.png,00.png,0",)]
)
def test_a_pairs_file_that_is_refused_leaves_no_database_and_changes_none(folder: Path, lines: tuple[str]) -> None:
    pairs, new = write_pairs(folder, "00.png,01.png,1", *lines), folder.parent / "new.db"
    refused(folder, "--db", new, "--import", pairs)
    assert not list(folder.parent.glob("new.db*"))
    db = import_some(folder)
    before = db.read_bytes()
    refused(folder, "--db", db, "--import", write_pairs(folder, "00.png,01.png,1", *lines))
    assert db.read_bytes() == before


def test_an_annotator_without_a_proper_name_leaves_no_database(folder: Path) -> None:
    (folder.parent / "in.csv").write_text(f"left,right,link,annotator\n00.png,03.png,1,{'x' * 101}\n")
    said = refused(folder, "--db", folder.parent / "a" / "new.db", "--import", folder.parent / "in.csv")
    assert "in.csv: an annotator needs a name of 1 to 100 characters" in said
    assert not (folder.parent / "a").exists()


def test_a_page_that_cannot_be_shown_leaves_no_database(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.eye(6, dtype=np.float32))
    save_model(build_model(n_clusters=3, side=8, channels=1), tmp_path / "m")
    place = ("--db", tmp_path / "new.db", "--port", 0, "--no-browser")
    assert "embeddings cannot be looked at" in refused(tmp_path / "e.npy", *place)
    assert "unknown device 'abacus'" in refused(folder, "--model", tmp_path / "m", "--device", "abacus", *place)
    assert not list(tmp_path.glob("new.db*"))


def test_columns_of_other_names_are_told_by_a_flag(folder: Path) -> None:
    file, db = folder.parent / "in.tsv", folder.parent / "a.db"
    file.write_text("a\tb\tsame_kind\n00.png\t03.png\tyes\n")
    said = refused(folder, "--db", db, "--import", file)
    assert said.endswith("for example --columns a,b,same_kind")
    words = ("annotate", folder, "--db", db, "--import", file, "--columns", "a,b,same_kind")
    assert "1 answers imported" in run(*words).stdout


def test_words_of_label_studio_are_explained_by_flags(folder: Path) -> None:
    task, other = (
        {
            "data": {"a": "00.png", "b": image},
            "annotations": [{"result": [{"type": "choices", "value": {"choices": [word]}}], "completed_by": "anna"}],
        }
        for image, word in (("03.png", "gleich"), ("01.png", "verschieden"))
    )
    file, db, out = (folder.parent / name for name in ("export.json", "a.db", "out.csv"))
    file.write_text(json.dumps([task, other]))
    assert "say what it means with --same TEXT and --different TEXT" in refused(folder, "--db", db, "--import", file)
    words = ("--same", "gleich", "--different", "verschieden")
    assert "2 answers imported" in run("annotate", folder, "--db", db, "--import", file, *words).stdout
    run("annotate", folder, "--db", db, "--export", out)
    links = [line.split(",")[:3] for line in out.read_text().splitlines()[1:]]
    assert [(left, right, float(link)) for left, right, link in links] == [
        ("00.png", "03.png", 1.0),
        ("00.png", "01.png", 0.0),
    ]
    assert "go with --import" in refused(folder, "--db", db, "--same", "gleich")
    pairs = write_pairs(folder, "00.png,03.png,1")
    assert "go with an export of Label Studio" in refused(folder, "--db", db, "--import", pairs, "--same", "gleich")


def test_a_folder_with_one_image_has_nothing_to_compare(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "one" / "a.png")
    assert "two or more" in refused(tmp_path / "one", "--db", tmp_path / "a.db", "--port", 0, "--no-browser")


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_pairs_are_asked_again_first_and_ctrl_c_ends_cleanly_and_tells_what_to_do_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(build_model(n_clusters=3, side=8, channels=1), folder.parent / "m")
    words = ["annotate", "photos", "--model", "m", "--db", "a b.db", "--port", "0", "--no-browser", "--kind", "pair"]
    words += ["--again", str(write_pairs(folder, "03.png,07.png,1"))]
    monkeypatch.chdir(folder.parent)
    errors = folder.parent / "errors.txt"
    with Fork(app, words, errors=errors) as server:
        until = time.monotonic() + 60
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/", errors.read_text() if errors.exists() else "")):
            assert server.wait(0.02) is None, errors.read_text()
            assert time.monotonic() < until
        question = ask(found[0])
        assert {"03.png", "07.png"} == set(re.findall(r"\d+\.png", json.dumps(question)))  # asked first
        body = {"question": question["id"], "choice": 0, "annotator": "anna", "milliseconds": 10}
        assert post(found[0] + "api/answers", body)["state"]["counts"]["same"] == 1
        server.send(signal.SIGINT)
        out = server.out.read()
        assert server.wait() == 0
    assert "Traceback" not in errors.read_text()
    assert "a b.db (1: 1 same, 0 different, 0 unsure)" in out
    assert "constraintmatch annotate photos --db 'a b.db' --export pairs.csv" in out
    assert "constraintmatch train photos --pairs pairs.csv --model m" in out


def post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def ask(address: str) -> Any:
    for _ in range(200):
        if held := post(address + "api/questions", {"annotator": "anna", "hold": 1})["questions"]:
            return held[0]
        time.sleep(0.02)
    raise AssertionError("no question came")


def test_repair_saves_the_answers_that_can_be_read_and_lists_the_others(folder: Path) -> None:
    db, repaired = import_some(folder), folder.parent / "repaired.db"
    with closing(sqlite3.connect(db, isolation_level=None)) as connection:
        connection.execute("UPDATE answers SET choice = 'same' WHERE id = 1")
    said = refused(folder, "--db", db, "--export", folder.parent / "out.csv")
    assert said == f"error: {db}: table answers row 1: choice is 'same'; save what can be read: " + (
        f"constraintmatch repair {db} --out repaired.db"
    )
    told = run("repair", db, "--out", repaired)
    assert "lost: table answers row 1: choice is 'same'" in told.stderr
    assert "1 saved" in told.stdout
    assert (
        "1 pairs from 1 answers"
        in run("annotate", folder, "--db", repaired, "--export", folder.parent / "o.csv").stdout
    )
