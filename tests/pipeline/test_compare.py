"""Systems side by side: one judge, rows that are kept, failures that are rows, and which to take."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.judge import Judge, advise, rank_rows, table_text
from constraintmatch.methods.others import OTHERS, Predict, Setup
from constraintmatch.pipeline import compare as comparing
from constraintmatch.pipeline.compare import Compare, compare, run_apart, run_system

pytestmark = pytest.mark.usefixtures("quick_heads_throughout")
QUICK = ("constraintmatch", "start", "k_means")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings of three kinds with labels."""
    labels = np.arange(150) % 3
    features = np.random.default_rng(0).normal(size=(150, 6)) + 5 * np.eye(3, 6)[labels]
    path = tmp_path_factory.mktemp("table") / "table.npz"
    np.savez(path, embeddings=features.astype(np.float32), labels=labels)
    return path


@pytest.fixture
def asked(table: Path, tmp_path: Path) -> Compare:
    return Compare(str(table), 3, n_pairs=40, methods=QUICK, out=tmp_path / "out")


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads((out / "comparison.json").read_text())["rows"]}


def test_every_system_is_a_row_with_scores_pairs_seconds_and_a_file_of_clusters(asked: Compare) -> None:
    said = compare(asked, apart=False)
    rows = rows_of(asked.out)
    assert list(rows) == list(QUICK)
    for name, row in rows.items():
        assert row["error"] is None
        assert 0.9 < row["acc"] <= 1
        assert 0.9 < row["held_out"] <= 1
        assert row["seconds"] >= 0
        assert len((asked.out / f"{name}.csv").read_text().splitlines()) == 151
        assert f"\n{name} " in said
    assert max(map(len, said.partition("\n\npage:")[0].splitlines())) <= 80
    page = (asked.out / "comparison.html").read_text()
    assert "Take " in said
    assert "Which to take" in page
    assert "<script" not in page


def test_scores_are_on_images_that_no_pair_names(asked: Compare) -> None:
    task = comparing._open_task(asked, comparing.QUIET)
    named = {task.images.names[row] for row in np.union1d(task.pairs.left, task.pairs.right)}
    assert task.tested is not None
    assert not named & set(task.tested.names)
    assert task.judged is task.tested
    assert len(task.pairs) == 40


def test_pairs_of_a_file_are_judged_by_images_that_no_training_pair_names(asked: Compare, tmp_path: Path) -> None:
    Constraints.sample(np.arange(150) % 3, 60, seed=1).write(tmp_path / "pairs.csv")
    given = Compare(asked.data, 3, pairs=tmp_path / "pairs.csv", out=asked.out)
    task = comparing._open_task(given, comparing.QUIET)
    assert 0 < len(task.judge) < len(task.pairs) < 60
    learnt = np.union1d(task.pairs.left, task.pairs.right)
    assert not (np.isin(task.judge.left, learnt) & np.isin(task.judge.right, learnt)).any()


def test_finished_rows_are_kept_and_failed_ones_run_again(asked: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Setup) -> Predict:
        raise RuntimeError("two\nlines")

    monkeypatch.setitem(OTHERS, "k_means", broken)
    said = compare(asked, apart=False)
    assert "k_means              RuntimeError: two lines" in said
    before = rows_of(asked.out)
    monkeypatch.undo()
    compare(asked, apart=False)
    after = rows_of(asked.out)
    assert after["k_means"]["error"] is None
    assert after["start"] == before["start"]


@pytest.mark.ranks
def test_a_system_whose_process_dies_is_a_row() -> None:
    payload = pickle.dumps(_Deadly())
    row, found = run_apart("start", payload)
    assert found is None
    assert "its process died" in row["error"]


class _Deadly:
    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_system_that_cannot_take_what_is_given_is_a_row_that_says_so(asked: Compare) -> None:
    task = comparing._open_task(asked, comparing.QUIET)
    assert "needs labels" in run_system("logistic_regression", task)[0]["error"]


def test_labels_that_are_given_are_those_of_images_that_are_not_scored(asked: Compare) -> None:
    task = comparing._open_task(Compare(asked.data, 3, n_pairs=20, n_labels=15, out=asked.out), comparing.QUIET)
    assert task.labels is not None
    known = np.flatnonzero(task.labels >= 0)
    assert len(known) == 15
    assert task.tested is not None
    assert not {task.images.names[row] for row in known} & set(task.tested.names)
    assert run_system("logistic_regression", task)[0]["acc"] > 0.9


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--n-pairs 9", "say how many clusters"),
        ("--clusters 3", "say which pairs"),
        ("--clusters 3 --n-pairs 9 --pairs p.csv", "and not both"),
        ("--clusters 3 --n-pairs 0", "--n-pairs 0: no pairs to learn from"),
        ("--clusters 3 --n-pairs 9 --methods dbscan", "--methods dbscan: unknown; known are constraintmatch"),
        ("--clusters 3 --pairs nowhere.csv", "nowhere.csv"),
    ],
)
def test_what_cannot_be_compared_is_one_line(words: str, problem: str, table: Path, tmp_path: Path) -> None:
    done = run("compare", table, *words.split(), "--out", tmp_path / "new", code=2)
    assert problem in done.output
    assert not (tmp_path / "new" / "comparison.json").exists()


def test_a_folder_of_another_comparison_or_of_something_else_is_refused(asked: Compare, tmp_path: Path) -> None:
    compare(asked, apart=False)
    with pytest.raises(InputError, match="holds another comparison"):
        compare(Compare(asked.data, 3, n_pairs=41, methods=QUICK, out=asked.out), apart=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"letter\.txt is there"):
        compare(Compare(asked.data, 3, n_pairs=9, out=tmp_path / "mine"), apart=False)


def test_images_without_labels_need_pairs(tmp_path: Path) -> None:
    np.save(tmp_path / "bare.npy", np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32))
    with pytest.raises(InputError, match="no labels to draw from"):
        compare(Compare(str(tmp_path / "bare.npy"), 2, n_pairs=9, out=tmp_path / "out"), apart=False)


# The advice


def row_of(name: str, losses: list[float], **more: Any) -> dict[str, Any]:
    return {"method": name, "error": None, "losses": losses, "seconds": 1.0, "mebibytes": 2.0, **more}


@pytest.fixture
def judge() -> Judge:
    links = np.arange(40) % 2
    return Judge(Constraints.from_arrays(np.arange(40), np.arange(40, 80), links, n_images=80))


def test_labels_decide_where_they_are_known_and_else_held_out_pairs(judge: Judge) -> None:
    good, bad = [0.1] * 40, [0.5] * 40
    rows = [row_of("a", good), row_of("b", bad), {"method": "c", "error": "needs labels"}]
    assert [row["method"] for row in rank_rows(rows, judge)] == ["a", "b", "c"]
    assert advise(rows, judge)[0].startswith("Take a: held-out pairs are likeliest by it (0.100 nats a pair)")
    scored = [row_of("a", good, acc=0.5, nmi=0.5), row_of("b", bad, acc=0.9, nmi=0.9)]
    assert advise(scored, judge)[0].startswith("Take b: it has the best mean of ACC and NMI")


def test_systems_that_the_pairs_cannot_tell_apart_are_named(judge: Judge) -> None:
    noise = np.random.default_rng(0).normal(size=40) * 0.3
    rows = [row_of("a", [0.3] * 40), row_of("b", (0.31 + noise - noise.mean()).tolist()), row_of("c", [0.9] * 40)]
    assert any("cannot tell it from b." in line for line in advise(rows, judge))


def test_where_ours_is_not_first_the_advice_says_by_how_much_and_why(judge: Judge) -> None:
    rows = [
        row_of("constraintmatch", [0.3] * 40, acc=0.9, nmi=0.8, note="kept the start: too few pairs"),
        row_of("cpac", [0.2] * 40, acc=0.95, nmi=0.9),
    ]
    said = " ".join(advise(rows, judge))
    assert "constraintmatch is not first: cpac differs by +5.0% ACC and +10.0% NMI" in said
    assert "constraintmatch kept the start: too few pairs." in said


def test_the_table_fits_eighty_columns_with_long_errors(judge: Judge) -> None:
    rows = [row_of("logistic_regression", [0.1] * 40, acc=1.0, nmi=1.0, ari=1.0, held_out=1.0, kept=1.0)]
    rows.append({"method": "pcog", "error": "word " * 40})
    assert max(map(len, table_text(rows, judge).splitlines())) <= 80
    assert advise([{"method": "pcog", "error": "word"}], judge) == ["No system finished; the rows say why."]


def test_a_table_without_a_finished_row_says_why(judge: Judge) -> None:
    text = table_text([{"method": "k_means", "error": "its process died"}], judge)
    assert "k_means" in text
    assert "its process died" in text


def test_pictures_of_images_do_not_travel_to_the_processes(asked: Compare) -> None:
    task = comparing._open_task(asked, comparing.QUIET)
    assert isinstance(task.images, ImageSet)
    assert task.images.pictures is None
