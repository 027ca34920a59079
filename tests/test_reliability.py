"""The page about reliability shows what the torture test has written, and nothing failed in it."""

import json

from scripts import ROOT, script


def test_the_table_is_current_and_nothing_failed_with_two_seeds() -> None:
    maker = script("docs", "make_reliability")
    runs = json.loads((ROOT / "results" / "torture.json").read_text(encoding="utf-8"))["runs"]
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert maker.page(text, runs) == text, "run python docs/make_reliability.py"
    assert len(runs) >= 2
    assert [name for run in runs.values() for name, counts in run["rows"].items() if counts["failed"]] == []
