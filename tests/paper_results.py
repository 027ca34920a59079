"""Made-up results of the paper's cells, in the form that the runner writes."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from constraintmatch.data.datasets import DATASETS
from constraintmatch.paper.grids import Cell

BASE = {
    "scan": 0.40,
    "constrained": 0.50,
    "pseudo_label": 0.53,
    "constraintmatch": 0.57,
    "fully_constrained": 0.78,
    "supervised": 0.80,
}


def content(cell: Cell, acc: float | None = None, /, **changes: Any) -> dict[str, Any]:
    """The JSON of one cell; without a score each fold is a tenth of a point better than the one before."""
    acc = BASE[cell.method] + cell.fold / 1000 if acc is None else acc
    scores = {"acc": acc, "nmi": acc - 0.05, "ari": acc - 0.1}
    whole = {
        "format": 1,
        "kind": "cell",
        "name": cell.name,
        "cell": cell.request(),
        "cut": cell.cut,
        "data": dict(zip(("train", "test"), DATASETS[cell.dataset].splits[::2], strict=True)),
        "start": {"name": cell.start, "weights": f"{cell.fold}" if cell.start == "random" else "ab12cd34"},
        "arguments": {} if cell.method == "scan" else {"pairs_per_step": 200},
        "settings": {} if cell.method == "scan" else {"lr": 0.01, "seed": cell.fold, "steps": cell.steps},
        "seed": cell.fold,
        "scores": {"test": scores, "train+test": {key: value + 0.01 for key, value in scores.items()}},
        "validation": {"loss": 0.3},
        "curve": [],
        "seconds": 100.0 + cell.fold,
        "training_seconds": 90.0,
        "peak_gib": 3.1,
        "environment": {"commit": "0123456789ab", "gpu": "NVIDIA H200", "torch": "2.11.0"},
        "written": "2026-01-01T00:00:00+00:00",
    }
    return {**whole, **changes}


def write(folder: Path, *contents: Mapping[str, Any]) -> Path:
    """The folder, with one file for each."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in contents:
        (folder / f"{one['name']}.json").write_text(json.dumps(one), encoding="utf-8")
    return folder


def write_cells(folder: Path, cells: Iterable[Cell]) -> Path:
    return write(folder, *map(content, cells))
