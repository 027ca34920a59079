from pathlib import Path

import pytest

from constraintmatch import demo
from constraintmatch.errors import InputError
from constraintmatch.files import read_json


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo of seconds: two samples, a few steps."""
    monkeypatch.setattr(demo, "N_SAMPLES", 2)
    monkeypatch.setattr(demo, "STEPS", 4)
    monkeypatch.setattr(demo, "short_start", lambda *_, **__: {"simclr": {"epochs": 2}, "linear_scan": {"n_tries": 2}})


@pytest.mark.usefixtures("short")
def test_the_demo_prints_a_table_and_leaves_a_report(tmp_path: Path) -> None:
    said = demo.run_demo(tmp_path / "demo")
    rows = [line.split("  ")[0] for line in said.splitlines()]
    assert [row for row in rows if row in ("self-supervised start", "constrained", "ConstraintMatch")] == [
        "self-supervised start",
        "constrained",
        "ConstraintMatch",
    ]
    page = Path(said.rsplit("report: ", 1)[1].strip())
    assert page.is_file()
    found = read_json(tmp_path / "demo" / "demo.json")
    assert [len(found[name]) for name in ("start", "constrained", "constraintmatch")] == [1, 2, 2]
    assert f"{100 * found['start'][0]['acc']:.1f}" in said
    gain = sum(
        ours["acc"] - theirs["acc"] for ours, theirs in zip(found["constraintmatch"], found["constrained"], strict=True)
    )
    assert f"{100 * gain / 2:.1f} ±" in said.splitlines()[-3]
    assert all(len(line) <= 80 for line in said.splitlines()[:-1])


@pytest.mark.usefixtures("short")
def test_the_demo_may_run_again_but_removes_nothing_of_others(tmp_path: Path) -> None:
    demo.run_demo(tmp_path / "demo")
    first = (tmp_path / "demo" / "demo.json").stat().st_mtime_ns
    demo.run_demo(tmp_path / "demo")
    assert (tmp_path / "demo" / "demo.json").stat().st_mtime_ns > first
    (tmp_path / "demo" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not an earlier demo"):
        demo.run_demo(tmp_path / "demo")
    assert (tmp_path / "demo" / "thesis.tex").read_text() == "years of work"
