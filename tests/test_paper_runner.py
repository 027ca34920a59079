"""Cells run for real, on digits from an untrained start: results, skipping, refusing, resuming, the command."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch.datasets import DATASETS, load_dataset
from constraintmatch.errors import InputError
from constraintmatch.evaluation import Predictions, predict, scores
from constraintmatch.models import build_model, load_model, save_model
from constraintmatch.paper import runner
from constraintmatch.paper.cells import Cell
from constraintmatch.paper.gallery import wrong_but_right
from constraintmatch.paper.runner import Place, cell_constraints, is_finished, run_cell, run_cells
from constraintmatch.stepping import Stepper
from constraintmatch.training import Interrupted

CELL = Cell("digits", "constraintmatch", 300, steps=4)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, row = tmp_path_factory.mktemp("starts"), DATASETS["digits"]
    for name, n, seed in (("scan-digits", 10, 0), ("scan-digits-50", 50, 0), ("wrong/scan-digits", 12, 0)):
        size = {"n_clusters": n, "side": 8, "channels": 1, "seed": seed}
        save_model(build_model(backbone="tiny", mean=row.mean, std=row.std, **size), folder / name)
    return folder


@pytest.fixture
def place(starts: Path, tmp_path: Path) -> Place:
    return Place(starts=starts, results=tmp_path / "results", runs=tmp_path / "runs", settings={"device": "cpu"})


def test_a_result_says_what_was_trained_and_what_came_out(place: Place) -> None:
    told = run_cell(CELL, replace(place, models=place.results.parent / "models"))
    stored = json.loads((place.results / f"{CELL.name}.json").read_text())
    assert stored["cell"] == CELL.request()
    assert stored["cut"] is True
    assert stored["seed"] == 0
    assert stored["arguments"]["max_entropy"] == DATASETS["digits"].tuned["constraintmatch"]["max_entropy"]
    assert stored["settings"]["lr"] == DATASETS["digits"].tuned["constraintmatch"]["lr"]
    assert stored["environment"]["torch"]
    assert stored["seconds"] > 0
    assert len(stored["curve"]) == 4
    model = load_model(place.results.parent / "models" / CELL.name)  # in half precision: a digit may change sides
    images = load_dataset("digits", "test")
    assert scores(images.labels, predict(model, images))["acc"] == pytest.approx(
        told["scores"]["test"]["acc"], abs=0.01
    )


def test_finished_cells_are_not_run_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cells([CELL], place)
    before = (place.results / f"{CELL.name}.json").read_bytes()
    monkeypatch.setattr(runner, "run_cell", lambda *_: pytest.fail("ran again"))
    run_cells([CELL], place)
    assert (place.results / f"{CELL.name}.json").read_bytes() == before


def test_the_start_itself_is_a_cell_without_a_training(place: Place) -> None:
    told = run_cell(Cell("digits", "scan"), place)
    model = load_model(place.starts / "scan-digits")
    images = load_dataset("digits", "train+test")
    assert told["scores"]["train+test"]["acc"] == scores(images.labels, predict(model, images))["acc"]
    assert told["curve"] == []


def test_overclustering_begins_with_the_wide_start(place: Place) -> None:
    told = run_cell(Cell("digits", "constrained", 100, n_clusters=50, steps=2), place)
    assert told["start"]["name"] == "scan-digits-50"


def test_supervised_training_needs_no_start(place: Place, tmp_path: Path) -> None:
    told = run_cell(Cell("digits", "supervised", steps=2), replace(place, starts=tmp_path / "none"))
    assert told["settings"]["lr"] == 0.1


def test_a_fold_is_a_sample_of_constraints() -> None:
    images = load_dataset("digits", "train")
    first, again, other = (cell_constraints(Cell("digits", "constrained", 50, fold), images) for fold in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert other is not None
    assert np.array_equal(first.left, again.left)
    assert not np.array_equal(first.left, other.left)


def test_noise_turns_round_exactly_its_share_and_the_same_pairs_stay() -> None:
    images = load_dataset("digits", "train")
    clean = cell_constraints(Cell("digits", "constrained", 200), images)
    noisy = cell_constraints(Cell("digits", "constrained", 200, noise=0.2), images)
    assert clean is not None
    assert noisy is not None
    assert np.array_equal(clean.left, noisy.left)
    assert int((clean.link != noisy.link).sum()) == 40


def test_a_result_of_other_settings_is_refused_by_name(place: Place) -> None:
    path = place.results / f"{CELL.name}.json"
    run_cell(CELL, place)
    content = json.loads(path.read_text())
    content["cell"]["n_constraints"] = 299
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"{CELL.name}.json: a result of other settings \(n_constraints is 299"):
        is_finished(CELL, place)


def test_a_result_of_another_format_is_refused_by_name(place: Place) -> None:
    place.results.mkdir()
    (place.results / f"{CELL.name}.json").write_text('{"format": 99, "kind": "cell"}')
    with pytest.raises(InputError, match=f"{CELL.name}.json: not a result of format 1"):
        is_finished(CELL, place)


def test_a_result_from_another_start_is_refused_by_name(place: Place, tmp_path: Path) -> None:
    run_cell(CELL, place)
    row = DATASETS["digits"]
    size = {"n_clusters": 10, "side": 8, "channels": 1, "backbone": "tiny", "seed": 5}
    save_model(build_model(mean=row.mean, std=row.std, **size), tmp_path / "others" / "scan-digits")
    with pytest.raises(InputError, match="from another start"):
        is_finished(CELL, replace(place, starts=tmp_path / "others"))


def test_a_missing_or_wrong_start_is_one_clear_line(place: Place, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scan-digits: the start of .* is not there; make it with"):
        run_cell(CELL, replace(place, starts=tmp_path / "none"))
    with pytest.raises(InputError, match=r"scan-digits: has 12 clusters, .* needs 10"):
        run_cell(CELL, replace(place, starts=place.starts / "wrong"))


def test_an_interrupted_cell_goes_on_from_its_checkpoint(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_cell(CELL, replace(place, results=place.results / "whole", runs=place.runs / "whole"))
    step = Stepper.__call__

    def signalling(self: Stepper, batch: object, lr: float) -> None:  # type: ignore[type-arg]
        step(self, batch, lr)
        if self.calls == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "__call__", signalling)
        with pytest.raises(Interrupted, match="stopped after step 2 of 4"):
            run_cell(CELL, place)
    assert not (place.results / f"{CELL.name}.json").exists()
    assert run_cell(CELL, place)["scores"] == whole["scores"]


def test_the_command_runs_a_cut_grid_and_shows_the_paper_beside_it(place: Place) -> None:
    where = ["--starts", place.starts, "--results", place.results, "--out", place.runs, "--device", "cpu"]
    words = ["paper", "table2", "--sets", "digits", "--folds", "0", "--steps", "2", "--methods", "scan,constrained"]
    done = CliRunner().invoke(cli.app, [*words, *map(str, where), "--quiet"])
    assert done.exit_code == 0, done.output
    assert "cut (2 steps)" in done.output
    listed = CliRunner().invoke(cli.app, [*words, *map(str, where), "--list"])
    assert [line.split() for line in listed.output.splitlines()] == [
        ["digits-scan", "finished"],
        ["digits-constrained-10000-fold0-steps2", "finished"],
    ]


@pytest.mark.parametrize("words", [["table9"], ["table1", "--folds", "x"], ["table1", "--sets", "mnist"]])
def test_bad_words_are_one_line_and_exit_code_2(words: list[str]) -> None:
    done = CliRunner().invoke(cli.app, ["paper", *words])
    assert done.exit_code == 2
    assert len(done.output.strip().splitlines()) == 1


def test_the_gallery_finds_pairs_that_are_wrong_and_rightly_linked() -> None:
    rng = np.random.Generator(np.random.Philox(0))
    labels, classes = rng.integers(0, 4, 200), rng.integers(0, 4, 200)
    sure = rng.uniform(0.9, 1, 200)
    probabilities = np.full((200, 4), 0.0, np.float32)
    probabilities[np.arange(200), classes] = sure
    found = wrong_but_right(Predictions(probabilities), classes, labels)
    assert set(found.wrong) == set(np.flatnonzero((labels != classes) & (probabilities.max(1) > 0.98)))
    assert found.must_links
    assert found.cannot_links
    for left, right in found.must_links:
        assert labels[left] == labels[right]
        assert classes[left] == classes[right] != labels[left]
    for left, right in found.cannot_links:
        assert labels[left] != labels[right]
        assert classes[left] != classes[right]
    rows = [row for pair in (*found.must_links[:2], *found.cannot_links[:2]) for row in pair]
    assert len(set(rows)) == len(rows)
