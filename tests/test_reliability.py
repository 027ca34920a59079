"""The page about reliability shows what the torture test has written, nothing failed in it, and all licences."""

import json

from scripts import ROOT, script


def test_the_table_is_current_and_nothing_failed_with_two_seeds() -> None:
    maker = script("docs", "make_reliability")
    runs = json.loads((ROOT / "results" / "torture.json").read_text(encoding="utf-8"))["runs"]
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert maker.page(text, runs) == text, "run python docs/make_reliability.py"
    assert len(runs) >= 2
    assert [name for run in runs.values() for name, counts in run["rows"].items() if counts["failed"]] == []


def test_every_pinned_package_has_its_licence_on_the_page() -> None:
    maker = script("docs", "make_reliability")
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = text.split(maker.LICENCES[0])[1].split(maker.LICENCES[1])[0].splitlines()[2:]
    listed = sorted(name for row in rows for name in row.split(" | ")[1].rstrip(" |").split(", "))
    assert listed == maker.pinned(), "run python docs/make_reliability.py"
