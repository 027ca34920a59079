import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import typer

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch._internal.progress import QUIET
from constraintmatch.cli import app
from constraintmatch.pipeline import demo

pytestmark = pytest.mark.usefixtures("small_batches", "few_digits", "quick_heads_throughout")


WORK = demo._work
ROWS = {
    "k_means": "k-means on pixels",
    "start": "self-supervised start",
    "constrained": "200 random pairs, constrained",
    "constraintmatch": "200 random pairs, ConstraintMatch",
    "chosen": '20 chosen answers, "which of these?"',
}


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """A demo of seconds: two samples, a few small steps, few answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "N_SAMPLES", 2)
        patch.setattr(demo, "BUDGETS", (10, 20))
        patch.setattr(demo, "START", {"simclr": {"epochs": 1, "images_per_step": 64}})
        patch.setattr(demo, "TRAINING", {**demo.TRAINING, "steps": 4, "head_steps": 8})
        patch.setattr(demo, "_work", lambda jobs, _: [job() for job in jobs])  # new processes know no quick settings
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder, and what it said."""
    out = tmp_path_factory.mktemp("made") / "demo"
    return out, demo.run_demo(out)


def test_the_demo_prints_a_row_for_each_step_and_leaves_a_report(made: tuple[Path, str]) -> None:
    out, said = made
    lines = said.splitlines()
    table = [line for line in lines if line.startswith(tuple(ROWS.values()))]
    assert [line[:38].strip() for line in table] == list(ROWS.values())
    page = next(line for line in lines if line.startswith("report: ")).removeprefix("report: ")
    assert Path(page).is_file()
    found = read_json(out / "demo.json")
    assert [len(found[name]) for name in ROWS] == [2, 1, 2, 2, 2]
    for name, line in zip(ROWS, table, strict=True):
        means = [f"{100 * sum(row[metric] for row in found[name]) / len(found[name]):.1f}" for metric in demo.METRICS]
        assert line[38:].split()[:: 1 if name == "start" else 3] == means
    assert all(len(line) <= 80 for line in lines if not line.startswith("report: "))


def test_jobs_run_in_another_process_with_one_thread_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROCESSES", 1)
    jobs: list[Any] = [os.getpid, torch.get_num_threads, partial(abs, -3)]
    process, *rest = cast(list[Any], WORK(jobs, QUIET))
    assert process != os.getpid()
    assert rest == [1, 3]


def test_the_command_that_the_demo_ends_with_is_one(made: tuple[Path, str]) -> None:
    name, command, *words = made[1].splitlines()[-1].split()
    assert (name, command) == ("constraintmatch", "loop")
    known = typer.main.get_command(app).commands["loop"]  # type: ignore[attr-defined]
    known.make_context("loop", words)  # an unknown option would be an error


def test_the_demo_may_run_again_but_removes_nothing_of_others(made: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "demo"
    shutil.copytree(made[0], out)
    first = (out / "demo.json").stat().st_mtime_ns
    again, before = (
        [line for line in said.splitlines() if not line.startswith("report: ")]
        for said in (demo.run_demo(out), made[1])
    )
    assert again == before
    assert (out / "demo.json").stat().st_mtime_ns > first
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not an earlier demo"):
        demo.run_demo(out)
    assert (out / "thesis.tex").read_text() == "years of work"
