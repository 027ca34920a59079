import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from constraintmatch import demo
from constraintmatch.errors import InputError
from constraintmatch.files import read_json

pytestmark = pytest.mark.usefixtures("small_batches", "few_digits", "quick_heads_throughout")


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """A demo of seconds: two samples, a few small steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "N_SAMPLES", 2)
        patch.setattr(demo, "STEPS", 4)
        recipe = {"simclr": {"epochs": 1}, "linear_scan": {"n_tries": 1, "most_images": 100}}
        patch.setattr(demo, "short_start", lambda *_, **__: recipe)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder, and what it said."""
    out = tmp_path_factory.mktemp("made") / "demo"
    return out, demo.run_demo(out)


def test_the_demo_prints_a_table_and_leaves_a_report(made: tuple[Path, str]) -> None:
    out, said = made
    rows = [line.split("  ")[0] for line in said.splitlines()]
    assert [row for row in rows if row in ("self-supervised start", "constrained", "ConstraintMatch")] == [
        "self-supervised start",
        "constrained",
        "ConstraintMatch",
    ]
    page = Path(said.rsplit("report: ", 1)[1].strip())
    assert page.is_file()
    found = read_json(out / "demo.json")
    assert [len(found[name]) for name in ("start", "constrained", "constraintmatch")] == [1, 2, 2]
    assert f"{100 * found['start'][0]['acc']:.1f}" in said
    gain = sum(
        ours["acc"] - theirs["acc"] for ours, theirs in zip(found["constraintmatch"], found["constrained"], strict=True)
    )
    assert f"{100 * gain / 2:.1f} ±" in said.splitlines()[-3]
    assert max(len(line) for line in said.splitlines()[:-1]) <= 80


def test_the_demo_may_run_again_but_removes_nothing_of_others(made: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "demo"
    shutil.copytree(made[0], out)
    first = (out / "demo.json").stat().st_mtime_ns
    assert demo.run_demo(out).splitlines()[:-1] == made[1].splitlines()[:-1]  # all but the report's place
    assert (out / "demo.json").stat().st_mtime_ns > first
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not an earlier demo"):
        demo.run_demo(out)
    assert (out / "thesis.tex").read_text() == "years of work"
