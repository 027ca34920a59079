"""Systems side by side: one judge, rows that are kept, and failures that are rows."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.others import OTHERS, Predict, Setup
from constraintmatch.pipeline import compare as comparing
from constraintmatch.pipeline.compare import compare, run_apart, run_system
from constraintmatch.pipeline.plan import Train

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
def asked(table: Path, tmp_path: Path) -> Train:
    return Train(str(table), clusters=3, out=tmp_path / "out")


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads((out / "comparison.json").read_text())["rows"]}


def test_every_system_is_a_row_with_scores_pairs_seconds_and_a_file_of_clusters(asked: Train, tmp_path: Path) -> None:
    said = compare(asked, n_pairs=40, methods=QUICK, apart=False)
    rows = rows_of(tmp_path / "out")
    assert list(rows) == list(QUICK)
    for name, row in rows.items():
        assert row["error"] is None
        assert 0.9 < row["acc"] <= 1
        assert 0.9 < row["held_out"] <= 1
        assert row["seconds"] >= 0
        assert len((tmp_path / "out" / f"{name}.csv").read_text().splitlines()) == 151
        assert f"\n{name} " in said
    assert max(map(len, said.partition("\n\npage:")[0].splitlines())) <= 80
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "Take " in said
    assert "Which to take" in page
    assert "<script" not in page


def test_scores_are_on_images_that_no_pair_names(asked: Train) -> None:
    task = comparing._open_task(asked, 40, 0, comparing.QUIET)
    named = {task.images.names[row] for row in np.union1d(task.pairs.left, task.pairs.right)}
    assert task.tested is not None
    assert not named & set(task.tested.names)
    assert task.judged is task.tested
    assert len(task.pairs) == 40


def test_pairs_of_a_file_are_judged_by_images_that_no_training_pair_names(asked: Train, tmp_path: Path) -> None:
    Constraints.sample(np.arange(150) % 3, 60, seed=1).write(tmp_path / "pairs.csv")
    given = replace(asked, pairs=tmp_path / "pairs.csv")
    task = comparing._open_task(given, None, 0, comparing.QUIET)
    assert 0 < len(task.judge) < len(task.pairs) < 60
    learnt = np.union1d(task.pairs.left, task.pairs.right)
    assert not (np.isin(task.judge.left, learnt) & np.isin(task.judge.right, learnt)).any()


def test_finished_rows_are_kept_and_failed_ones_run_again(
    asked: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Setup) -> Predict:
        raise RuntimeError("two\nlines")

    monkeypatch.setitem(OTHERS, "k_means", broken)
    said = compare(asked, n_pairs=40, methods=QUICK, apart=False)
    assert "k_means              RuntimeError: two lines" in said
    before = rows_of(tmp_path / "out")
    monkeypatch.undo()
    compare(asked, n_pairs=40, methods=QUICK, apart=False)
    after = rows_of(tmp_path / "out")
    assert after["k_means"]["error"] is None
    assert after["start"] == before["start"]


@pytest.mark.ranks
def test_a_system_whose_process_dies_is_a_row() -> None:
    task: Any = _Deadly()
    row, found = run_apart("start", task)
    assert found is None
    assert "its process died" in row["error"]


class _Deadly:
    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_system_that_cannot_take_what_is_given_is_a_row_that_says_so(asked: Train) -> None:
    task = comparing._open_task(asked, 40, 0, comparing.QUIET)
    assert "needs labels" in run_system("logistic_regression", task)[0]["error"]


def test_labels_that_are_given_are_those_of_images_that_are_not_scored(asked: Train) -> None:
    task = comparing._open_task(asked, 20, 15, comparing.QUIET)
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


def test_a_folder_of_another_comparison_or_of_something_else_is_refused(asked: Train, tmp_path: Path) -> None:
    compare(asked, n_pairs=40, methods=QUICK, apart=False)
    with pytest.raises(InputError, match="holds another comparison"):
        compare(asked, n_pairs=41, methods=QUICK, apart=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"letter\.txt is there"):
        compare(replace(asked, out=tmp_path / "mine"), n_pairs=9, apart=False)


def test_images_without_labels_need_pairs(tmp_path: Path) -> None:
    np.save(tmp_path / "bare.npy", np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32))
    with pytest.raises(InputError, match="no labels to draw from"):
        compare(Train(str(tmp_path / "bare.npy"), clusters=2, out=tmp_path / "out"), n_pairs=9, apart=False)


def test_pictures_of_images_do_not_travel_to_the_processes(asked: Train) -> None:
    task = comparing._open_task(asked, 40, 0, comparing.QUIET)
    assert isinstance(task.images, ImageSet)
    assert task.images.pictures is None
