"""Cells run for real, on digits from an untrained start: results, skipping, refusing, resuming, the command."""

import json
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper_results import write_cells
from scripts import script
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import folder_lock
from constraintmatch._internal.progress import Reporter
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.evaluation.metrics import Predictions, predict, scores
from constraintmatch.models.cluster_model import build_model, load_model, save_model
from constraintmatch.paper import runner
from constraintmatch.paper.grids import Cell, grid_cells
from constraintmatch.paper.runner import Place, cell_pairs, cell_states, is_finished, run_cell, run_cells
from constraintmatch.pipeline.train import weights_hash
from constraintmatch.training.loop import Interrupted
from constraintmatch.training.step import Stepper

CELL = Cell("digits", "constraintmatch", 300, steps=4)
gallery = script("docs", "make_gallery")

pytestmark = pytest.mark.usefixtures("small_batches")


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


@pytest.fixture(scope="module")
def trained(starts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with results, runs and models of the cell, and what the training told."""
    made = tmp_path_factory.mktemp("made")
    place = Place(starts=starts, results=made / "results", runs=made / "runs", settings={"device": "cpu"})
    return made, run_cell(CELL, replace(place, models=made / "models"))


@pytest.fixture
def finished(place: Place, trained: tuple[Path, dict[str, Any]]) -> Place:
    """A place of the test's own where the cell is finished; its model is not kept."""
    shutil.copytree(trained[0] / "results", place.results)
    shutil.copytree(trained[0] / "runs", place.runs)
    return place


def test_a_result_says_what_was_trained_and_what_came_out(trained: tuple[Path, dict[str, Any]]) -> None:
    made, told = trained
    stored = json.loads((made / "results" / f"{CELL.name}.json").read_text())
    assert stored["cell"] == CELL.request()
    assert stored["cut"] is True
    assert stored["seed"] == 0
    assert stored["arguments"]["max_entropy"] == DATASETS["digits"].tuned["constraintmatch"]["max_entropy"]
    assert stored["settings"]["lr"] == DATASETS["digits"].tuned["constraintmatch"]["lr"]
    assert stored["environment"]["torch"]
    assert stored["seconds"] > 0
    assert (stored["data"]["train"], stored["data"]["test"]) == DATASETS["digits"].splits[::2]
    assert len(stored["curve"]) == 4
    model = load_model(made / "models" / CELL.name)
    images = load_dataset("digits", "test")
    kept = scores(images.labels, predict(model, images))
    assert told["half"]["weights"] == weights_hash(model)
    assert {key: kept[key] for key in ("acc", "nmi", "ari")} == told["half"]["scores"]["test"]
    trained = scores(images.labels, predict(load_model(made / "runs" / CELL.name), images))
    assert {key: trained[key] for key in ("acc", "nmi", "ari")} == told["scores"]["test"]


def test_finished_cells_are_not_run_again(finished: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (finished.results / f"{CELL.name}.json").read_bytes()
    monkeypatch.setattr(runner, "run_cell", lambda *_: pytest.fail("ran again"))
    run_cells([CELL], finished)
    assert (finished.results / f"{CELL.name}.json").read_bytes() == before


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
    first, again, other = (cell_pairs(Cell("digits", "constrained", 50, fold), images) for fold in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert other is not None
    assert np.array_equal(first.left, again.left)
    assert not np.array_equal(first.left, other.left)


def test_noise_turns_round_exactly_its_share_and_the_same_pairs_stay() -> None:
    images = load_dataset("digits", "train")
    clean = cell_pairs(Cell("digits", "constrained", 200), images)
    noisy = cell_pairs(Cell("digits", "constrained", 200, noise=0.2), images)
    assert clean is not None
    assert noisy is not None
    assert np.array_equal(clean.left, noisy.left)
    assert int((clean.link != noisy.link).sum()) == 40


def test_noise_of_both_kinds_alike_leaves_their_numbers() -> None:
    images = load_dataset("digits", "train")
    clean = cell_pairs(Cell("digits", "constrained", 400), images)
    noisy = cell_pairs(Cell("digits", "constrained", 400, noise=0.25, noise_of="alike"), images)
    assert clean is not None
    assert noisy is not None
    assert np.array_equal(clean.left, noisy.left)
    wrong = round(0.25 * int(clean.link.sum()))
    assert wrong > 5
    assert int(noisy.link[clean.link == 1].size - noisy.link[clean.link == 1].sum()) == wrong
    assert int(noisy.link[clean.link == 0].sum()) == wrong


def test_a_result_of_other_settings_is_refused_by_name(finished: Place) -> None:
    path = finished.results / f"{CELL.name}.json"
    content = json.loads(path.read_text())
    content["cell"]["n_constraints"] = 299
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"{CELL.name}.json: a result of other settings \(n_constraints is 299"):
        is_finished(CELL, finished)


@pytest.mark.parametrize("part", ["arguments", "settings"])
def test_a_result_of_a_tuning_that_is_no_longer_ours_is_refused_by_name(finished: Place, part: str) -> None:
    path, key = finished.results / f"{CELL.name}.json", {"arguments": "max_entropy", "settings": "lr"}[part]
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, part: {**content[part], key: 0.77}}))
    with pytest.raises(InputError, match=rf"{CELL.name}.json: a result of other settings \({key} is 0.77, asked is"):
        is_finished(CELL, finished)
    without = {name: value for name, value in content[part].items() if name != key}
    path.write_text(json.dumps({**content, part: without}))
    assert is_finished(CELL, finished)  # of a version that did not know it yet


def test_a_result_of_another_format_is_refused_by_name(place: Place) -> None:
    place.results.mkdir()
    (place.results / f"{CELL.name}.json").write_text('{"format": 99, "kind": "cell"}')
    with pytest.raises(InputError, match=f"{CELL.name}.json: not a result of format 1"):
        is_finished(CELL, place)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cell": []}, "cannot be read (TypeError"),
        ({"arguments": None}, "cannot be read (TypeError"),
        ({"settings": [1]}, "cannot be read (TypeError"),
        ({"start": None}, "cannot be read (TypeError"),
        ({"data": None}, "cannot be read (TypeError"),
        ({"kind": "gallery"}, "not the result of a cell"),
        (
            {"scores": {"test": {"acc": float("nan")}, "train+test": {}}},
            "cannot be read (ValueError: scores.test.acc is nan",
        ),
    ],
)
def test_a_result_with_an_entry_of_the_wrong_kind_is_refused_by_name(
    finished: Place, changes: dict[str, Any], said: str
) -> None:
    path = finished.results / f"{CELL.name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(
        InputError, match=rf"{CELL.name}.json: {re.escape(said)}.*; move it away or choose another --results"
    ):
        is_finished(CELL, finished)


def test_a_result_from_another_start_is_refused_by_name(finished: Place, tmp_path: Path) -> None:
    row = DATASETS["digits"]
    size = {"n_clusters": 10, "side": 8, "channels": 1, "backbone": "tiny", "seed": 5}
    save_model(build_model(mean=row.mean, std=row.std, **size), tmp_path / "others" / "scan-digits")
    with pytest.raises(InputError, match="from another start"):
        is_finished(CELL, replace(finished, starts=tmp_path / "others"))


def test_a_missing_or_wrong_start_is_one_clear_line(place: Place, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scan-digits: the start of .* is not there; make it with"):
        run_cell(CELL, replace(place, starts=tmp_path / "none"))
    with pytest.raises(InputError, match=r"scan-digits: has 12 clusters, .* needs 10"):
        run_cell(CELL, replace(place, starts=place.starts / "wrong"))


def test_an_interrupted_cell_goes_on_from_its_checkpoint(
    place: Place, trained: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert run_cell(CELL, place)["scores"] == trained[1]["scores"]


class Listener(Reporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_what_a_later_cell_would_miss_is_found_before_the_first_training(place: Place, tmp_path: Path) -> None:
    listener = Listener()
    cells = [CELL, replace(CELL, n_clusters=30)]
    with pytest.raises(InputError, match=r"scan-digits-30: the start of .* is not there"):
        run_cells(cells, replace(place, reporter=listener))
    with pytest.raises(
        InputError, match=r"none: cifar10 is not there; looked for cifar-10-batches-py with data_batch_1"
    ):
        run_cells([CELL, Cell("cifar10", "scan")], replace(place, data_dir=tmp_path / "none"))
    assert listener.said == []
    assert not place.runs.exists()


def test_a_training_that_diverges_does_not_stop_the_queue(place: Place) -> None:
    wild, tame = Cell("digits", "constrained", 300, options=(("lr", 1e30),), steps=20), replace(CELL, steps=1)
    with pytest.raises(InputError, match="1 of 2 cells diverged, the others are finished; digits-constrained-300-lr"):
        run_cells([wild, tame], place)
    assert [state for state, _ in cell_states([wild, tame], place)] == ["missing", "finished", "in all"]


def test_cells_share_compiled_code_until_shapes_change_or_versions_run_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def noted(cell: Cell, _: Place) -> dict[str, object]:
        events.append(str(cell.n_clusters))
        return {"scores": {"test": {"acc": 0.5}}}

    monkeypatch.setattr(runner, "run_cell", noted)
    monkeypatch.setattr("torch.compiler.reset", lambda: events.append("forgot"))
    monkeypatch.setattr(runner, "SHARING", 3)
    narrow = [replace(CELL, fold=fold) for fold in range(4)]
    wide = [replace(CELL, n_clusters=50, fold=fold) for fold in range(2)]
    run_cells([*narrow, *wide], place)
    assert events == ["10", "10", "10", "forgot", "10", "forgot", "50", "50"]


def test_two_queues_at_once_share_the_cells_and_train_each_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Cell] = []

    def noted(cell: Cell, place: Place) -> dict[str, Any]:
        begun.append(cell)
        return run_cell(cell, place)

    monkeypatch.setattr(runner, "run_cell", noted)
    cells = [replace(CELL, method="constrained", fold=fold, steps=1) for fold in range(4)]
    with ThreadPoolExecutor() as queues:
        for queue in [queues.submit(run_cells, cells, place) for _ in range(2)]:
            queue.result()
    assert sorted(cell.fold for cell in begun) == [0, 1, 2, 3]
    assert all(is_finished(cell, place) for cell in cells)


def test_a_cell_that_another_process_works_at_is_left_to_it(place: Place) -> None:
    listener, short = Listener(), replace(CELL, steps=1)
    other = replace(short, fold=1)
    with folder_lock(place.runs / short.name / "cell"):
        made = run_cells([short, other], replace(place, reporter=listener))
    assert listener.said[0] == f"1 of 2: {short.name}: another process is working at it"
    assert made == [place.results / f"{other.name}.json"]
    assert run_cells([short, other], place)[0].is_file()


def test_a_queue_that_is_stopped_says_how_to_go_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise Interrupted("stopped after step 2 of 4")

    monkeypatch.setattr(runner, "run_cell", stopped)
    with pytest.raises(KeyboardInterrupt, match=f"{CELL.name}: stopped after step 2 of 4; the same command goes on"):
        run_cells([CELL], place)


def test_a_queue_that_is_stopped_before_the_first_step_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_cell", stopped)
    with pytest.raises(KeyboardInterrupt, match=f"{CELL.name}: stopped; the same command goes on"):
        run_cells([CELL], place)


def test_a_model_can_be_kept_later_while_its_run_is_there(finished: Place, tmp_path: Path) -> None:
    listener = Listener()
    later = replace(finished, models=tmp_path / "models", reporter=listener)
    run_cells([CELL], replace(later, runs=tmp_path / "gone"))
    assert listener.said[-1].endswith(f"its model is not kept: there is no run in {tmp_path / 'gone' / CELL.name}")
    run_cells([CELL], later)
    stored = json.loads((finished.results / f"{CELL.name}.json").read_text())
    assert weights_hash(load_model(tmp_path / "models" / CELL.name)) == stored["half"]["weights"]
    assert (tmp_path / "models" / CELL.name / "config.json").is_file()


def test_without_a_data_folder_what_is_finished_is_shown(tmp_path: Path) -> None:
    cells = grid_cells("table1", sets=["cifar10"], folds=[0, 1])
    results = write_cells(tmp_path / "results", cells[:5])
    words = ["paper", "table1", "--sets", "cifar10", "--starts", str(tmp_path), "--results", str(results)]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert "26 of 31 cells are missing; --data-dir DIR runs them" in done.stderr
    assert "| 93.17*" in done.stdout
    none = CliRunner().invoke(cli.app, [*words[:-1], str(tmp_path / "none")])
    assert none.exit_code == 2
    assert "cifar10: say where it is (--data-dir)" in none.stderr


def test_the_command_runs_a_cut_grid_and_shows_the_paper_beside_it(place: Place) -> None:
    where = ["--starts", place.starts, "--results", place.results, "--out", place.runs, "--device", "cpu"]
    words = ["paper", "table2", "--sets", "digits", "--folds", "0", "--steps", "2", "--methods", "scan,constrained"]
    done = CliRunner().invoke(cli.app, [*words, *map(str, where), "--quiet"])
    assert done.exit_code == 0, done.output
    assert "cut (2 steps)" in done.output
    listed = CliRunner().invoke(cli.app, [*words, *map(str, where), "--list"])
    assert [line.split() for line in listed.output.splitlines()] == [
        ["finished", "digits-scan"],
        ["finished", "digits-constrained-10000-fold0-steps2"],
        ["in", "all", "2", "finished"],
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("table9", "unknown table or figure 'table9'; known are table1"),
        ("table1 --sets mnist", "table1 has no set 'mnist'; there are cifar10"),
        ("table1 --sets ,", "no sets are left; name some: --sets cifar10"),
        ("table1 --sets digits --methods ,", "no methods are left; name some: --methods constrained"),
        ("table1 --sets digits --constraints ,", "no constraints are left; name some: --constraints 10000"),
        ("table1 --sets digits --constraints 0-99999999", "--constraints: '0-99999999' is not a number; write"),
        ("table1 --sets digits --folds ,", "no folds are left; name some: --folds 0-4"),
        ("table1 --sets digits --folds ²", "--folds: '²' is not a number or a range; write 0,3 or 0-2"),
        ("table1 --sets digits --folds ٣", "--folds: '٣' is not a number or a range; write 0,3 or 0-2"),
        ("table1 --sets digits --folds 0-99999999", "--folds: '0-99999999' goes too far; there are 0 to 4"),
        (f"table1 --sets digits --folds {'9' * 5_000}", "is not a number or a range; write 0,3 or 0-2"),
        ("gallery", "unknown table or figure 'gallery'; python docs/make_gallery.py SET makes it"),
        ("table1 --figures figures", "--figures is now the folder docs/figures of python docs/make_gallery.py"),
    ],
)
def test_a_list_of_cells_that_are_not_there_is_refused(words: str, said: str) -> None:
    done = CliRunner().invoke(cli.app, ["paper", *words.split(), "--list"])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert len(done.output.strip().splitlines()) == 1


def test_the_gallery_finds_pairs_that_are_wrong_and_rightly_linked() -> None:
    rng = np.random.Generator(np.random.Philox(0))
    labels, classes = rng.integers(0, 4, 200), rng.integers(0, 4, 200)
    sure = rng.uniform(0.9, 1, 200)
    probabilities = np.full((200, 4), 0.0, np.float32)
    probabilities[np.arange(200), classes] = sure
    wrong, must_links, cannot_links = gallery.wrong_but_right(Predictions(probabilities), classes, labels)
    assert set(wrong) == set(np.flatnonzero((labels != classes) & (probabilities.max(1) > 0.98)))
    assert must_links
    assert cannot_links
    for left, right in must_links:
        assert labels[left] == labels[right]
        assert classes[left] == classes[right] != labels[left]
    for left, right in cannot_links:
        assert labels[left] != labels[right]
        assert classes[left] != classes[right]
    rows = [row for pair in (*must_links[:2], *cannot_links[:2]) for row in pair]
    assert len(set(rows)) == len(rows)


def test_a_gallery_is_made_once_and_one_of_another_training_is_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "GALLERY_STEPS", 2)
    sure = load_model(place.starts / "scan-digits")
    assert sure.head is not None
    sure.head.weight.data *= 1e4  # untrained and sure of itself: wrong nearly everywhere
    save_model(sure, tmp_path / "starts" / "scan-digits")
    place = replace(place, starts=tmp_path / "starts")
    made = gallery.make_gallery("digits", place, tmp_path / "figures")
    told = json.loads(made.read_text())
    assert told["pairs"]
    for pair in told["pairs"]:
        assert (pair["link"] > 0.5) == (pair["true"][0] == pair["true"][1])
        assert pair["predicted"][0] != pair["true"][0]
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".svg"}
    monkeypatch.setattr(gallery, "train_cell", lambda *_: pytest.fail("trained again"))
    assert gallery.make_gallery("digits", place, tmp_path / "figures") == made
    monkeypatch.setattr(gallery, "GALLERY_STEPS", 3)
    with pytest.raises(InputError, match=r"gallery-digits.json: a gallery of another training"):
        gallery.make_gallery("digits", place, tmp_path / "figures")
