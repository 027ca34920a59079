"""The search: points tried by workers that race, die and come back; the paper's criterion; what is refused."""

import functools
import inspect
import itertools
import json
import shlex
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import sqlalchemy
import typer
from by_name import run_method
from forks import Fork
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import predict
from constraintmatch.methods import ViewChoice
from constraintmatch.models.cluster_model import build_model, load_model, save_model
from constraintmatch.pipeline import trials
from constraintmatch.pipeline.config import method_arguments, method_settings
from constraintmatch.pipeline.search import Search, _next_commands, _open_task, search
from constraintmatch.pipeline.trials import (
    PAPER_VALUES,
    Space,
    _round,
    finished_trials,
    open_storage,
    open_study,
    work,
)

GRID = Space({"lr": (0.1, 0.01), "weight_decay": (1e-3, 1e-4)})
Train = Callable[[dict[str, float], Path | None], dict[str, Any]]


pytestmark = pytest.mark.usefixtures("small_batches", "impatient", "quick_storage")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that look and show signs of life often."""
    monkeypatch.setattr(trials, "BEAT", 1)
    monkeypatch.setattr(trials, "LOOK", 0.05)


@pytest.fixture(scope="module")
def quick_storage() -> Iterator[None]:
    """Storages that do not wait for the disk and know the newest version of their tables: finding it takes longest."""
    manager = optuna.storages._rdb.storage._VersionManager
    find, newest = manager.get_head_version, list[str]()

    def find_once(self: Any) -> str:
        newest[:] = newest or [find(self)]
        return newest[0]

    def hurry(link: sqlite3.Connection, _: object) -> None:
        if isinstance(link, sqlite3.Connection):
            link.execute("PRAGMA synchronous = OFF")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", hurry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "get_head_version", find_once)
        yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", hurry)


@functools.cache
def empty_storage() -> bytes:
    """A storage without studies: making its tables takes longer than most of these tests."""
    with tempfile.TemporaryDirectory() as folder:
        with open_storage(str(Path(folder) / "s.db")):
            pass
        return (Path(folder) / "s.db").read_bytes()


@contextmanager
def study_at(place: Path, protocol: dict[str, Any] | None = None) -> Iterator[Any]:
    if not place.exists():
        place.write_bytes(empty_storage())
    with open_storage(str(place)) as storage:
        yield open_study(storage, "s", protocol or {"steps": 1}, str(place))


def work_at(place: Path, space: Space, train: Train) -> list[dict[str, Any]]:
    with study_at(place) as study:
        return work(study, space, train, runs=None, reporter=Reporter())


def squares(settings: dict[str, float], *_: Any) -> dict[str, Any]:
    return {"loss": sum(np.log(value) ** 2 for value in settings.values())}


def points(space: Space) -> list[dict[str, float]]:
    return [dict(zip(space.values, point, strict=True)) for point in itertools.product(*space.values.values())]


# Points


def test_the_grids_are_the_papers() -> None:
    assert {method: len(Space(dict(of))) for method, of in PAPER_VALUES.items()} == {
        "constrained": 15,
        "pseudo_label": 300,
        "constraintmatch": 240,
        "fully_constrained": 15,
    }
    for name, row in DATASETS.items():  # what the authors chose lies on their grid
        for method, tuned in row.tuned.items() if name != "digits" else ():
            assert all(value in PAPER_VALUES[method][key] for key, value in tuned.items()), (name, method)


def test_workers_that_race_finish_every_point(tmp_path: Path) -> None:
    tried: list[dict[str, float]] = []
    start = threading.Barrier(3)

    def worker() -> None:
        with open_storage(str(tmp_path / "s.db")) as storage:  # all three may be the one that makes it
            study = open_study(storage, "s", {"steps": 1}, str(tmp_path / "s.db"))
            start.wait()
            work(study, GRID, train, runs=None, reporter=Reporter())

    def train(chosen: dict[str, float], *_: Any) -> dict[str, Any]:
        tried.append(chosen)
        time.sleep(0.1)
        return squares(chosen)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(worker) for _ in range(3)]:
            done.result()
    assert {str(point) for point in tried} == {str(point) for point in points(GRID)}
    assert len(tried) <= 4 + 2  # who looks at the same moment as another may get a point that is begun
    with study_at(tmp_path / "s.db") as study:
        found = finished_trials(study, GRID)
    assert [one["loss"] for one in found] == sorted(squares(point)["loss"] for point in points(GRID))


@pytest.mark.filterwarnings("ignore:Heartbeat of storage is supposed")
def test_a_trial_in_the_queue_is_given_to_one_of_many(tmp_path: Path) -> None:
    with study_at(tmp_path / "s.db") as study:
        for lr in range(8):
            study.enqueue_trial({"lr": float(lr)})
    start = threading.Barrier(4)

    def take(_: int) -> list[int]:
        with study_at(tmp_path / "s.db") as study:
            start.wait()
            return [study.ask().number for _ in range(2)]

    with ThreadPoolExecutor(4) as pool:
        taken = [number for numbers in pool.map(take, range(4)) for number in numbers]
    assert sorted(taken) == list(range(8))


def test_what_stops_a_training_puts_its_point_back(tmp_path: Path) -> None:
    calls: list[dict[str, float]] = []

    def breaks_at_third(chosen: dict[str, float], *_: Any) -> dict[str, Any]:
        calls.append(chosen)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return squares(chosen)

    with pytest.raises(KeyboardInterrupt):
        work_at(tmp_path / "s.db", GRID, breaks_at_third)
    assert len(work_at(tmp_path / "s.db", GRID, breaks_at_third)) == 4
    assert len(calls) == 5
    assert calls[2] == calls[3]
    assert {str(point) for point in calls} == {str(point) for point in points(GRID)}


# Workers elsewhere


def begin_elsewhere(study: Any, beat: bool = True) -> Any:
    """A trial that a worker elsewhere has begun; without a `beat` it is of a version that gave no sign of life."""
    study.sampler = GRID.sampler()
    trial = study.ask()
    GRID.suggest(trial)
    if beat:
        study._storage.record_heartbeat(trial._trial_id)
    else:
        trial.set_user_attr("slot", 0)
    return trial


@pytest.mark.filterwarnings("ignore:Heartbeat of storage is supposed")
@pytest.mark.parametrize("beat", [True, False])
def test_a_trial_whose_worker_died_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beat: bool) -> None:
    monkeypatch.setattr(trials, "GRACE", 1)
    with study_at(tmp_path / "s.db") as study:
        begin_elsewhere(study, beat)
    assert len(work_at(tmp_path / "s.db", GRID, squares)) == 4


@pytest.mark.filterwarnings("ignore:Heartbeat of storage is supposed")
def test_a_worker_waits_for_trials_that_others_are_at(tmp_path: Path) -> None:
    said: list[str] = []

    class Listener(Reporter):
        def say(self, text: str) -> None:
            said.append(text)
            if "waiting" in text:  # now the other worker ends
                other.set_user_attr("told", {"settings": other.params, "loss": -5.0})
                with study_at(tmp_path / "s.db") as theirs:
                    theirs.tell(other.number, -5.0)

    with study_at(tmp_path / "s.db") as study:
        other = begin_elsewhere(study)
        found = work(study, GRID, squares, runs=None, reporter=Listener())
        assert said[-1].startswith("nothing is left to begin; waiting for trials at work (1); one without a sign")
        assert found[0]["loss"] == -5.0
        assert len(study.get_trials()) == 4


def test_a_worker_whose_trial_was_taken_up_keeps_its_late_result_to_itself(tmp_path: Path) -> None:
    said: list[str] = []

    class Listener(Reporter):
        def say(self, text: str) -> None:
            said.append(text)

    def slow(chosen: dict[str, float], *_: Any) -> dict[str, Any]:
        if not late:
            late.append(chosen)
            with study_at(tmp_path / "s.db") as study:  # what another worker does that misses our signs of life
                again = optuna.storages.RetryHeartbeatStaleTrialCallback()
                study.tell(0, state=optuna.trial.TrialState.FAIL)
                again(study, study.trials[0])
            return {"loss": -1.0}
        return squares(chosen)

    late: list[Any] = []
    with study_at(tmp_path / "s.db") as study:
        found = work(study, GRID, slow, runs=None, reporter=Listener())
    assert len(found) == 4
    assert all(one["loss"] != -1.0 for one in found)
    assert any("another worker took it up" in text for text in said)


def test_a_search_of_the_version_with_slots_goes_on(tmp_path: Path) -> None:
    kinds = {name: optuna.distributions.CategoricalDistribution(of) for name, of in GRID.values.items()}
    done, trained = points(GRID)[1], list[dict[str, float]]()
    with study_at(tmp_path / "s.db") as study:
        told = {"settings": done, "loss": -3.0, "seconds": 1.0}
        attrs = {"slot": 1, "host": "h", "pid": 1, "token": "t", "beat": 3, "told": told}
        study.add_trial(optuna.trial.create_trial(value=-3.0, params=done, distributions=kinds, user_attrs=attrs))

    def train(chosen: dict[str, float], *_: Any) -> dict[str, Any]:
        trained.append(chosen)
        return squares(chosen)

    found = work_at(tmp_path / "s.db", GRID, train)
    assert found[0] == {"settings": done, "loss": -3.0, "seconds": 1.0}
    assert sorted(map(str, trained)) == sorted(str(point) for point in points(GRID) if point != done)


# TPE


def test_tpe_makes_as_many_trials_as_asked_the_same_ones_again_and_more_when_more_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = inspect.unwrap(optuna.samplers.TPESampler.__init__).__kwdefaults__
    monkeypatch.setitem(usual, "n_startup_trials", 3)  # the draws at random that come first; ten take long
    values = {"lr": (1e-4, 0.03), "max_entropy": (0.05, 0.3)}
    stops = iter([False, False, True])

    def stopped_once(chosen: dict[str, float], *_: Any) -> dict[str, Any]:
        if next(stops, False):
            raise KeyboardInterrupt
        return squares(chosen)

    whole = work_at(tmp_path / "whole.db", Space(values, 6), squares)
    assert len(whole) == 6
    assert len({one["settings"]["lr"] for one in whole}) == 6
    assert all(1e-4 <= one["settings"]["lr"] <= 0.03 and 0.05 <= one["settings"]["max_entropy"] <= 0.3 for one in whole)
    with pytest.raises(KeyboardInterrupt):
        work_at(tmp_path / "parts.db", Space(values, 4), stopped_once)
    with study_at(tmp_path / "parts.db") as study:
        broken_off = study.trials[2].params
    parts = work_at(tmp_path / "parts.db", Space(values, 4), stopped_once)
    assert len(parts) == 4
    again = [one for one in parts if one["settings"] in [other["settings"] for other in whole]]
    assert len(again) >= 3  # two, and the one that was broken off
    assert any(one["settings"]["lr"] == pytest.approx(broken_off["lr"], rel=0.01) for one in parts)
    assert len(work_at(tmp_path / "parts.db", Space(values, 6), stopped_once)) == 6


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-6, 10), st.floats(0, 1), st.floats(0, 1))
def test_a_rounded_draw_stays_in_its_range_and_near_what_was_drawn(low: float, width: float, at: float) -> None:
    high = low + width * low
    value = min(low + at * (high - low), high)
    rounded = _round(value, low, high)
    assert low <= rounded <= high
    assert abs(rounded - value) <= (high - low) / 100


def test_a_draw_of_a_wide_range_is_rounded_to_three_digits_and_a_single_value_is_kept() -> None:
    assert _round(0.0123456, 1e-4, 0.03) == 0.0123
    assert _round(0.99976543, 0.9996, 0.9999) == 0.999765
    assert _round(0.123456, 0.123456, 0.123456) == 0.123456


def test_tpe_draws_from_a_narrow_range_and_not_beside_it(stripes: ImageSet, tmp_path: Path) -> None:
    (tmp_path / "search.db").write_bytes(empty_storage())
    values = {"momentum": [0.9996, 0.9999], "lr": [0.1], "weight_decay": [0.0]}
    tpe = {"sampler": "tpe", "trials": 3, "steps": 1}
    found, _ = search(stripes_search(stripes, tmp_path, method="constrained", values=values, **tpe))
    drawn = {one["settings"]["momentum"] for one in found["trials"]}
    assert len(drawn) == 3
    assert all(0.9996 <= momentum <= 0.9999 for momentum in drawn)


# Storages and studies


def test_a_study_of_another_search_is_refused_by_what_differs(tmp_path: Path) -> None:
    with study_at(tmp_path / "s.db", {"settings": {"steps": 100}, "method": "constrained"}):
        pass
    with (
        pytest.raises(InputError, match=r"study 's' is of another search \(settings.steps was 100, is 5\); choose"),
        study_at(tmp_path / "s.db", {"settings": {"steps": 5}, "method": "constrained"}),
    ):
        pass


def test_a_study_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_bytes(empty_storage())
    with open_storage(str(tmp_path / "s.db")) as storage:
        theirs = optuna.create_study(storage=storage, study_name="s")
        theirs.add_trial(optuna.trial.create_trial(value=1.0))
        theirs.sampler = None
    with pytest.raises(InputError, match="of another program"), study_at(tmp_path / "s.db"):
        pass


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "postgresql+pg8000://me:secret@host/db",
            r"postgresql\+pg8000://me@host/db: no driver.*constraintmatch\[postg",
        ),
        ("nosuch://me:secret@host/db", "nosuch://me@host/db: no storage for a search"),
    ],
)
def test_a_storage_that_cannot_be_opened_says_so_without_its_password(place: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as told, open_storage(place):
        pass
    assert "secret" not in str(told.value)


def test_a_file_that_is_no_storage_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"no database" * 1000)
    with (
        pytest.raises(InputError, match=r"photo.jpg: no storage for a search"),
        open_storage(str(tmp_path / "photo.jpg")),
    ):
        pass
    assert (tmp_path / "photo.jpg").read_bytes() == b"no database" * 1000


# The whole search, on digits


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    row, folder = DATASETS["digits"], tmp_path_factory.mktemp("starts") / "digits"
    save_model(build_model(n_clusters=10, side=8, channels=1, mean=row.mean, std=row.std, seed=3), folder)
    return folder


VALUES = {"weight_decay": [1e-4], "lr": [0.1, 0.01], "pseudo_weight": [1.0], "max_entropy": [0.3, 0.9]}


def digits(start: Path, place: Path, **changes: Any) -> Search:
    if not (place / "search.db").exists():
        (place / "search.db").write_bytes(empty_storage())
    asked = Search(
        "digits",
        start,
        n_constraints=300,
        values=VALUES,
        steps=2,
        storage=str(place / "search.db"),
        settings={"device": "cpu"},
    )
    return replace(asked, **changes)


def search_half(request: Search) -> None:
    """What the worker that is killed does: its first trial is finished, its second is not."""
    trained = 0

    def train(_plan: Any, _settings: Any, folder: Path) -> dict[str, Any]:
        nonlocal trained
        trained += 1
        folder.mkdir(parents=True)
        time.sleep(0 if trained == 1 else 60)
        return {"loss": 1.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("constraintmatch.pipeline.search._train", train)
        search(request)


def n_completed(place: Path) -> int:
    """How many trials are finished, as the database has them."""
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(place / "search.db")) as database:
        return int(database.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0])
    return 0  # no such tables yet


def stripes_search(stripes: ImageSet, place: Path, **changes: Any) -> Search:
    """A search over images and pairs of a person; without labels nothing slow has to be imported."""
    assert stripes.labels is not None
    np.save(place / "images.npy", stripes.images)
    Constraints.sample(stripes.labels, 40, seed=1).write(place / "pairs.csv")
    save_model(build_model(n_clusters=3, side=8, channels=1, seed=1), place / "start")
    asked = Search(
        str(place / "images.npy"),
        place / "start",
        pairs=place / "pairs.csv",
        values=VALUES,
        steps=3,
        storage=str(place / "search.db"),
        settings={"device": "cpu"},
    )
    return replace(asked, **changes)


def test_two_workers_share_a_grid_and_one_that_is_killed_leaves_no_gap(
    stripes: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "GRACE", 5)
    request = stripes_search(stripes, tmp_path)
    killed_after: list[int] = []
    with Fork(search_half, request) as other:

        class Killer(Reporter):
            def say(self, text: str) -> None:  # noqa: ARG002 (at our first trial: the other worker is at its second)
                until = time.monotonic() + 60
                while other.process.is_alive() and not n_completed(tmp_path) and time.monotonic() < until:
                    time.sleep(0.02)
                if not killed_after:
                    killed_after.append(n_completed(tmp_path))
                    other.send(signal.SIGKILL)
                    assert other.wait() == -signal.SIGKILL

        found, _ = search(request, Killer())
    assert killed_after == [1]  # by the other: we had none
    assert len({str(one["settings"]) for one in found["trials"]}) == 4
    assert [one["loss"] for one in found["trials"]].count(1.0) == 1
    assert not (tmp_path / "search.db.runs").exists()


def test_the_loss_is_the_papers_on_constraints_of_the_validation_split(start: Path, tmp_path: Path) -> None:
    found, _ = search(digits(start, tmp_path, values={**VALUES, "lr": [0.1]}, out=tmp_path / "best.json"))
    images, judged, row = load_dataset("digits", "train"), load_dataset("digits", "val"), DATASETS["digits"]
    batch = {"pairs_per_step": row.pairs_per_step, "images_per_step": row.images_per_step}
    assert images.labels is not None
    assert judged.labels is not None
    trained = run_method(
        "constraintmatch",
        load_model(start),
        images,
        Constraints.sample(images.labels, 300, seed=0),
        arguments={"pseudo_weight": 1.0, "max_entropy": 0.9, **batch},
        settings=method_settings("constraintmatch", {"steps": 2, "lr": 0.1, "weight_decay": 1e-4, "device": "cpu"}),
        views=ViewChoice(flip=row.flip, without=tuple(row.without)),
    )
    p = predict(trained.model, judged).probabilities.astype(np.float64)
    asked = Constraints.sample(judged.labels, row.n_validation_constraints, seed=0)
    same = (p[asked.left] * p[asked.right]).sum(1)
    expected = -np.mean(np.where(asked.link == 1, np.log(same), np.log(1 - same)))
    ours = next(one for one in found["trials"] if one["settings"]["max_entropy"] == 0.9)
    assert ours["loss"] == pytest.approx(expected, rel=1e-5)
    written = json.loads((tmp_path / "best.json").read_text())
    assert written["best"]["loss"] == found["best"]["loss"] == min(one["loss"] for one in found["trials"])
    assert written["cut"] is True
    assert written["paper_values"] is False
    assert len(written["trials"]) == 2
    assert {"commit", "gpu"} <= written["environment"].keys()


def test_a_trial_that_was_broken_off_goes_on_from_its_checkpoint(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from constraintmatch.training.step import Stepper

    step, steps = Stepper.__call__, []

    def counting(self: Any, batch: Any, lr: float) -> None:
        steps.append(lr)
        if len(steps) == 4:
            raise OSError("the machine went away")
        step(self, batch, lr)

    monkeypatch.setattr(Stepper, "__call__", counting)
    one = {**VALUES, "lr": [0.1], "max_entropy": [0.3]}
    request = digits(start, tmp_path, steps=5, values=one, settings={"device": "cpu", "checkpoint_every": 2})
    with pytest.raises(OSError, match="went away"):
        search(request)
    resumed, _ = search(request)
    assert len(steps) == 4 + 3  # from step 2
    (tmp_path / "whole.db").write_bytes(empty_storage())
    whole, _ = search(replace(request, storage=str(tmp_path / "whole.db")))
    assert resumed["trials"][0]["loss"] == whole["trials"][0]["loss"]


def test_a_search_that_diverges_goes_on_and_ranks_it_last(start: Path, tmp_path: Path) -> None:
    request = digits(start, tmp_path, method="constrained", values={"weight_decay": [0.0], "lr": [1e30, 0.01]}, steps=4)
    found, lines = search(request)
    assert [one["loss"] is None for one in found["trials"]] == [False, True]
    assert "not finite" in found["trials"][1]["note"]
    rows = dict(lines)
    assert rows["diverged"] == "--set weight_decay=0.0 --set lr=1e+30"
    assert rows["best"] == "--set weight_decay=0.0 --set lr=0.01"
    assert rows["pairs"] == "constraintmatch sample digits --n 300 --out pairs.csv"


def test_a_finished_search_is_shown_and_not_run_again(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = digits(start, tmp_path, values={**VALUES, "lr": [0.1], "max_entropy": [0.3]})
    first, _ = search(request)
    monkeypatch.setattr("constraintmatch.pipeline.search.train", lambda *_, **__: pytest.fail("trained again"))
    assert search(request)[0]["trials"] == first["trials"]


def test_another_start_is_another_search(start: Path, tmp_path: Path) -> None:
    one = digits(start, tmp_path, values={**VALUES, "lr": [0.1], "max_entropy": [0.3]})
    search(one)
    save_model(build_model(n_clusters=10, side=8, channels=1, seed=4), tmp_path / "other")
    with pytest.raises(InputError, match=r"study 'digits-constraintmatch-grid' is of another search \(model was"):
        search(replace(one, model=tmp_path / "other"))
    with pytest.raises(InputError, match=r"settings.steps was 2, is 3"):
        search(replace(one, steps=3))


# The command


def test_the_command_searches_a_persons_own_images_and_pairs(tmp_path: Path, stripes: ImageSet) -> None:
    stripes_search(stripes, tmp_path)
    (tmp_path / "s.db").write_bytes(empty_storage())
    words = ["search", str(tmp_path / "images.npy"), "--pairs", str(tmp_path / "pairs.csv")]
    words += ["--model", str(tmp_path / "start"), "--storage", str(tmp_path / "s.db"), "--device", "cpu", "--quiet"]
    words += ["--steps", "2", "--sampler", "tpe", "--trials", "2", "--out", str(tmp_path / "best.json")]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "best.json").read_text())
    held_out, training = (written["protocol"][key] for key in ("validation_constraints", "constraints"))
    assert int(held_out.split()[0]) == round(0.2 * (int(held_out.split()[0]) + int(training.split()[0])))
    assert written["best"]["flags"] in done.stdout
    assert f"--pairs {tmp_path / 'pairs.csv'} {written['best']['flags']}" in done.stdout


def asked_by(command: str) -> dict[str, Any]:
    """What `train` reads in a command that was printed to be pasted into a shell."""
    program, name, *words = shlex.split(command)
    assert (program, name) == ("constraintmatch", "train")
    parser = typer.main.get_command(cli.app).commands["train"]  # type: ignore[attr-defined]
    return {key: value for key, value in parser.make_context("train", words).params.items() if value is not None}


def test_the_next_command_asks_for_all_that_decided_the_trials(tmp_path: Path, stripes: ImageSet) -> None:
    place = tmp_path / "it's here"
    place.mkdir()
    request = stripes_search(stripes, place)
    pairs = place / "odd names.csv"
    pairs.write_text((place / "pairs.csv").read_text().replace("left,right,link", "i,j,c ij", 1))
    (place / "s.db").write_bytes(empty_storage())
    words = ["search", request.data, "--model", str(request.model), "--method", "constrained", "--device", "cpu", "-q"]
    words += ["--pairs", str(pairs), "--columns", "i,j,c ij", "--no-mirror", "--set", "without=rotate,solarize"]
    words += ["--steps", "1", "--grid", "lr=0.01", "--grid", "weight_decay=0", "--storage", str(place / "s.db")]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    asked = asked_by(done.stdout.splitlines()[-1].removeprefix("next").strip())
    expected = {
        "data": request.data,
        "start": str(request.model),
        "method": "constrained",
        "device": "cpu",
        "flip": False,
    }
    expected |= {"pairs": [pairs], "columns": "i,j,c ij"}
    assert {key: asked[key] for key in expected} == expected
    assert asked["sets"] == ["without=rotate,solarize", "weight_decay=0.0", "lr=0.01"]
    assert "steps" not in asked  # a cut search is for a training at full length


def test_the_next_command_has_the_batch_of_a_bound_and_steps_beyond_the_usual(start: Path, tmp_path: Path) -> None:
    values = {"weight_decay": [0.0], "lr": [0.01]}
    request = digits(start, tmp_path, method="fully_constrained", values=values, data_dir=Path("my data"), flip=True)
    found, rows = search(request)
    asked = asked_by(dict(rows)["next"])
    assert (asked["sets"][0], asked["data_dir"], asked["flip"]) == ("images_per_step=20", Path("my data"), True)
    assert not asked.get("pairs")
    plan, _, base = _open_task(request, Reporter())
    longer = _next_commands(request, plan, {**base, "steps": 1}, found["best"])
    assert asked_by(dict(longer)["next"])["steps"] == 2


def test_values_of_a_grid_that_comes_again_are_added(start: Path, tmp_path: Path) -> None:
    (tmp_path / "s.db").write_bytes(empty_storage())
    words = ["search", "digits", "--model", str(start), "--method", "constrained", "--steps", "1", "--device", "cpu"]
    words += [
        "--constraints",
        "100",
        "--grid",
        "lr=0.1,0.03",
        "--grid",
        "weight_decay=0",
        "--grid",
        "lr=0.01,0.1",
        "-q",
    ]
    words += ["--storage", str(tmp_path / "s.db"), "--out", str(tmp_path / "best.json")]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    tried = [one["settings"]["lr"] for one in json.loads((tmp_path / "best.json").read_text())["trials"]]
    assert sorted(tried) == [0.01, 0.03, 0.1]


def test_the_papers_values_which_are_not_rehearsed_are_right(stripes: ImageSet) -> None:
    few, pairs = stripes.take(np.arange(4)), Constraints.from_lists(n_images=4, must_link=[(0, 1)])
    for method, values in PAPER_VALUES.items():
        own = method_arguments(method)
        sizes: dict[str, Any] = {key: 4 for key in own if key.endswith("_per_step")}
        for name, value in [(key, value) for key, of in values.items() if key in own for value in of]:
            model, how = build_model(n_clusters=3, side=8, channels=1, seed=1), {"steps": 1, "device": "cpu"}
            settings = method_settings(method, how)
            done = run_method(method, model, few, pairs, arguments={**sizes, name: value}, settings=settings)
            assert done.log[-1]["step"] == 1


def test_a_value_that_may_diverge_is_tried_all_the_same(start: Path, tmp_path: Path) -> None:
    values = {name: [of[0]] for name, of in VALUES.items()} | {"pseudo_weight": [1e300], "max_entropy": [1.0]}
    found, _ = search(digits(start, tmp_path, values=values))
    assert [one["loss"] for one in found["trials"]] == [None]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grid error_rate=0.1,0.7", "error_rate is 0.7; it must be in [0, 0.5)"),
        ("--grid max_entropy=0.2,1.5", "max_entropy is 1.5; it must be in [0, 1]"),
        ("--grid warm_up=0.1,nan", "warm_up is nan; it is a share of the steps"),
        ("--grid lr", "--grid lr: write a name and numbers"),
        ("--grid lr=a", "--grid lr=a: write a name and numbers"),
        ("--grid lr=", "no values for lr"),
        ("--grid lr=-1", "lr is -1.0; it must be a positive number"),
        ("--grid links=1", "cannot search over 'links'; constraintmatch has error_rate, flip_fraction"),
        ("--method scan", "no search for 'scan'; there is one for constrained, pseudo_label"),
        ("--trials 5", "--trials goes with --sampler tpe; the grid has 240 points"),
        ("--sampler tpe", "say how many trials"),
        ("--workers 2", "--workers is now the same command, started once for each worker"),
        ("--constraints 0", "--constraints 0: at least one"),
        ("--pairs nothing.csv", "nothing.csv: no such file"),
        ("--set without=smudge", "smudge"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(start: Path, tmp_path: Path, words: str, said: str) -> None:
    command = ["search", "digits", "--model", str(start), "--storage", str(tmp_path / "s.db"), *words.split()]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "s.db").exists()


def test_a_folder_without_pairs_says_what_is_missing(start: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a folder needs --pairs FILE"):
        search(Search(str(tmp_path), start))


def test_a_model_without_clusters_is_refused(tmp_path: Path) -> None:
    save_model(build_model(n_clusters=0, side=8, channels=1, seed=1), tmp_path / "start")
    with pytest.raises(InputError, match="has no clusters yet"):
        search(digits(tmp_path / "start", tmp_path))


def test_without_optuna_the_mend_is_named(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"pip install 'constraintmatch\[search\]'"):
        search(digits(start, tmp_path))
