"""Writes the table of docs/reliability.md from results/torture.json: python docs/make_reliability.py"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- torture table -->\n", "<!-- end of torture table -->\n"
HOW = ("tried", "refused", "survived", "failed")


def table(runs: dict[str, dict[str, Any]]) -> str:
    """A row for each kind of harm: the counts of all runs together; below it, what was run."""
    lines = ["| | tried | refused clearly | survived | failed |", "|---|--:|--:|--:|--:|"]
    for name in dict.fromkeys(name for run in runs.values() for name in run["rows"]):
        counts = [run["rows"].get(name, {}) for run in runs.values()]
        lines.append(f"| {name} | " + " | ".join(f"{sum(one.get(how, 0) for one in counts):,}" for how in HOW) + " |")
    said = [f"{name}, commit `{run['commit']}`, {run['seconds'] / 60:.0f} minutes" for name, run in runs.items()]
    for name, run in runs.items():
        later = [f"{row} at `{counts['commit']}`" for row, counts in run["rows"].items() if "commit" in counts]
        said += [f"of {name} run again after a mend: {', '.join(later)}"] if later else []
    return "\n".join(lines) + f"\n\nThe runs: {'; '.join(said)}.\n"


def page(text: str, runs: dict[str, dict[str, Any]]) -> str:
    """The page with its table made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table(runs) + END + rest.split(END)[1]


if __name__ == "__main__":
    place = ROOT / "docs" / "reliability.md"
    found = json.loads((ROOT / "results" / "torture.json").read_text(encoding="utf-8"))["runs"]
    place.write_text(page(place.read_text(encoding="utf-8"), found), encoding="utf-8")
