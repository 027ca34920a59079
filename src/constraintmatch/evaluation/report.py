"""A run folder as one self-contained HTML page: curves, clusters and their images, confusion, constraints violated.

The page asks for nothing outside itself (its own content policy forbids it) and has no script. This file and
`evaluation/report_parts.py` prepare plain values; `templates/report.html` draws them and escapes every name.
"""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_atomically
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import pair_keys
from constraintmatch.data.image_set import ImageSet, kind_of
from constraintmatch.evaluation import report_parts
from constraintmatch.evaluation.metrics import Predictions, agreement, collapse_warnings, scores
from constraintmatch.evaluation.report_parts import SCORES, Clustering, line_chart, percent, plural
from constraintmatch.training.run_folder import flat_items, read_log

MAX_SKIPPED = 200  # images shown
MAX_VIOLATED = 24  # pairs shown

# The lines of each chart: the key in the log and the words for it.
QUALITY = {
    "pseudo_label_accuracy": "pseudo-labels right",
    "pseudo_constraint_accuracy": "pseudo-constraints right",
    "pseudo_constraint_precision": "precision of must-links",
    "pseudo_constraint_recall": "recall of must-links",
    "must_link_share": "share of must-links",
}
KEPT = {"must_link": "must-links kept", "cannot_link": "cannot-links kept", "balanced": "mean of the two"}
SELECTED = {"selected": "selected images", "mean_confidence": "mean confidence"}

Log = Sequence[Mapping[str, Any]]
Fact = tuple[str, str, str]  # its name, its value, and a note under it


def check_run(run: Path) -> None:
    """An InputError if the folder holds no run."""
    if not (run / "run.json").is_file():
        raise InputError(f"{run}: not a run folder (it has no run.json); give the folder that training wrote")


def write_report(
    run: Path | str,
    images: ImageSet,
    predictions: Predictions,
    *,
    constraints: Constraints | None = None,
    out: Path | None = None,
) -> Path:
    """The path of `report.html`, which is written to the run or to `out`; see `report_html`."""
    path = (out or Path(run)) / "report.html"
    page = report_html(run, images, predictions, constraints=constraints).encode()
    write_atomically(path, lambda temporary: temporary.write_bytes(page))
    return path


def report_html(
    run: Path | str, images: ImageSet, predictions: Predictions, *, constraints: Constraints | None = None
) -> str:
    """The page of a run: its record and log, and these predictions of these images with the constraints over them.

    Nothing is written. The images may be others than those trained on; the page says so.
    """
    run = Path(run)
    check_run(run)
    record, log = _mapping(read_json(run / "run.json")), read_log(run)
    request, environment = _mapping(record.get("request")), _mapping(record.get("environment"))
    shown, data = Clustering.of(images, predictions, constraints), _mapping(request.get("data"))
    method, name = request.get("method", "unknown"), _data_name(request)
    same = data["fingerprint"] == images.fingerprint() if "fingerprint" in data else None
    heading, alerts = _alerts(record, log, shown)
    skipped = [(skip.name, skip.reason) for skip in images.skipped[:MAX_SKIPPED]]
    settings = [*flat_items(request), *flat_items(environment, "environment")]
    sections = [  # None: there is nothing to show
        ("kept", "What was kept", _kept(log)),
        ("curves", "Curves", _curves(log)),
        ("sizes", "Cluster sizes", report_parts.sizes(shown)),
        ("clusters", "Clusters", report_parts.galleries(shown)),
        ("confusion", "Confusion", report_parts.confusion(shown)),
        ("confidence", "Confidence", report_parts.confidence(shown)),
        ("constraints", "Constraints violated", _violations(shown)),
        ("skipped", "Skipped images", {"files": skipped, "total": len(images.skipped)} if skipped else None),
        ("settings", "Settings", [(key, _plain(value)) for key, value in settings]),
    ]
    return render_page(
        "report.html",
        title=f"{method} on {name}" if name else f"{method}: {run.resolve().name}",
        facts=_facts(record, request, shown, bool(same)),
        same_images=same,
        alert=heading,
        alerts=alerts,
        sections=[section for section in sections if section[2] is not None],
        version=environment.get("constraintmatch", ""),
        folder=run.resolve().name,
    )


def _printable(value: Any) -> Any:
    """Text with what cannot be printed as its escape; markup, which only the template writes, unchanged."""
    if hasattr(value, "__html__"):
        return value
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_PAGES = Environment(  # every value is escaped
    loader=PackageLoader("constraintmatch.evaluation"),
    autoescape=True,
    finalize=_printable,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.filters |= {"percent": percent, "plural": plural, "thousands": "{:,}".format}


def render_page(template: str, **values: Any) -> str:
    """A page of the templates with these values."""
    return _PAGES.get_template(template).render(**values)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# The head


def _data_name(request: Mapping[str, Any]) -> str:
    data = _mapping(request.get("data"))
    return str(data.get("name") or Path(str(data.get("folder") or data.get("source") or "")).name)


def _facts(record: Mapping[str, Any], request: Mapping[str, Any], shown: Clustering, same: bool) -> list[Fact]:
    images, empty = shown.images, int((shown.sizes == 0).sum())
    kind = f"{images.side} × {images.side}, {'grey' if images.channels == 1 else 'colour'}"
    seconds, steps = record.get("seconds"), _mapping(request.get("settings")).get("steps")
    took = _duration(float(seconds)) if isinstance(seconds, int | float) else "unknown"
    return [
        ("Method", str(request.get("method", "unknown")), ""),
        ("Data", _data_name(request) or "unnamed", _data_note(request, same)),
        ("Images", f"{len(images):,}", kind_of(images.side, images.channels) if images.embedded else kind),
        ("Clusters", f"{shown.predictions.n_clusters:,}", f"{empty:,} empty" if empty else ""),
        _pairs_fact(request, shown),
        *_score_facts(shown),
        ("Duration", took, f"{steps:,} steps" if isinstance(steps, int) else ""),
        ("When", *_when(str(record.get("ended") or record.get("started") or ""))),
    ]


def _data_note(request: Mapping[str, Any], same: bool) -> str:
    """The split of the images trained on, and their number where the page shows others."""
    data = _mapping(request.get("data"))
    split, n_images = str(data.get("split") or ""), data.get("images")
    if same:
        return split
    note = ", ".join(filter(None, (split, f"{n_images:,} images" if isinstance(n_images, int) else "")))
    return f"trained on {note}" if note else ""


def _pairs_fact(request: Mapping[str, Any], shown: Clustering) -> Fact:
    """The pairs trained on; those given with the page where the record has none."""
    trained = _mapping(request.get("constraints"))
    if "pairs" in trained:
        pairs, must = int(trained["pairs"]), int(trained.get("must_links", 0))
    elif shown.constraints is not None:
        pairs, must = len(shown.constraints), shown.constraints.n_must_links
    else:
        return "Pairs", "none", ""
    return "Pairs", f"{pairs:,}", f"{percent(must / pairs)} must-links" if pairs else ""


def _score_facts(shown: Clustering) -> list[Fact]:
    """Accuracy where labels exist, else the agreement with the constraints, where there are any."""
    if shown.images.labels is not None:
        found = scores(shown.images.labels, shown.predictions)
        return [("Accuracy", percent(found["acc"]), f"NMI {percent(found['nmi'])}, ARI {percent(found['ari'])}")]
    if shown.constraints is None or not len(shown.constraints):
        return []
    shares = agreement(shown.constraints, shown.predictions)
    kept = {key: percent(value) for key, value in shares.items() if value is not None}
    names = {"must_link": "must-links", "cannot_link": "cannot-links"}
    whole = next((kept[key] for key in ("balanced", *names) if key in kept), "–")
    note = ", ".join(f"{name} {kept[key]}" for key, name in names.items() if key in kept)
    return [("Agreement with constraints", whole, note)]


def _duration(seconds: float) -> str:
    """12.3 s, 4 min 5 s, 2 h 3 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600:,} h {seconds % 3600 // 60} min"


def _when(stamp: str) -> tuple[str, str]:
    """A time as 2025-01-31 and 14:05 UTC."""
    try:
        time = datetime.fromisoformat(stamp)
    except ValueError:
        return stamp or "unknown", ""
    return f"{time:%Y-%m-%d}", f"{time:%H:%M %Z}"


def _alerts(record: Mapping[str, Any], log: Log, shown: Clustering) -> tuple[str, list[str]]:
    """A heading and lines: how the run ended if it did not finish, and signs of collapse, now and in the log."""
    status, error = record.get("status", "unknown"), record.get("error")
    now = collapse_warnings(shown.predictions)
    collapse = [*now, *_past_warnings(log, now)]
    ended = f"The run is not finished; it is {status}" + (f": {error}" if error else "")
    return "Signs of collapse" if collapse else "Unfinished", ([] if status == "finished" else [ended]) + collapse


def _past_warnings(log: Log, now: Sequence[str]) -> list[str]:
    """One sentence on what evaluations during training warned of, unless it is what is seen now."""
    evaluations = [entry for entry in log if entry.get("kind") == "evaluation"]
    warned = [entry for entry in evaluations if entry.get("warnings")]
    if not warned or (len(warned) == 1 and list(warned[0]["warnings"]) == list(now)):
        return []
    last = warned[-1]
    said = "" if list(last["warnings"]) == list(now) else f": {' '.join(map(str, last['warnings']))}"
    return [
        f"While training, {len(warned):,} of {plural(len(evaluations), 'evaluation')} warned, "
        f"the last time at step {last.get('step', 0):,}{said or '.'}"
    ]


# The sections


def _kept(log: Log) -> dict[str, Any] | None:
    """The verdict of the safe recipe, and how many answers look wrong; None for other runs."""
    verdict = next((entry for entry in reversed(log) if entry.get("kind") == "verdict"), None)
    if verdict is None:
        return None
    shares = {"must-links": verdict.get("wrong_must_links"), "cannot-links": verdict.get("wrong_cannot_links")}
    return {
        "kept": str(verdict.get("kept")).capitalize(),
        "why": verdict.get("why"),
        "wrong": " and ".join(f"{of:.1%} of the {kind}" for kind, of in shares.items() if isinstance(of, float)),
        "again": len(verdict.get("doubtful", ())),
    }


def _curves(log: Log) -> list[dict[str, Any]]:
    training = [entry for entry in log if entry.get("kind", "training") == "training"]
    evaluation = [entry for entry in log if entry.get("kind") == "evaluation"]
    terms = {key: key.removeprefix("loss_") for entry in training for key in entry if key.startswith("loss_")}
    losses = {"loss": "total", **(terms if len(terms) > 1 else {})}  # one term alone is the total
    held_out = _lines(evaluation, {"constraint_loss": "held-out constraints"})
    shares = {
        "Selected images and confidence": _lines(log, SELECTED),
        "Quality of pseudo-labels and pseudo-constraints": _lines(training, QUALITY),
        "Scores against labels": _lines(evaluation, SCORES),
        "Held-out constraints kept": _lines(evaluation, KEPT),
    }
    charts = [line_chart("Losses", lines)] if (lines := {**_lines(training, losses), **held_out}) else []
    return charts + [line_chart(title, lines, shares=True) for title, lines in shares.items() if lines]


def _lines(log: Log, names: Mapping[str, str]) -> dict[str, list[tuple[float, float]]]:
    """The points of each key of the log, by its words; keys without a point are left out."""
    found = {
        name: [(entry["step"], entry[key]) for entry in log if _finite(entry.get(key)) and _finite(entry.get("step"))]
        for key, name in names.items()
    }
    return {name: points for name, points in found.items() if points}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _violations(shown: Clustering) -> dict[str, Any] | None:
    """How many constraints the clusters break, and those pairs where the model is surest."""
    constraints = shown.constraints
    if constraints is None or not len(constraints):
        return None
    together = shown.clusters[constraints.left] == shown.clusters[constraints.right]
    kinds = {
        ("Must-links", "in different clusters"): (constraints.link > 0.5, ~together),
        ("Cannot-links", "in one cluster"): (constraints.link < 0.5, together),
    }
    summary, broken = [], []
    for (name, _), (of_kind, violated) in kinds.items():
        rows, n = np.flatnonzero(of_kind & violated), int(of_kind.sum())
        summary.append((name, f"{n:,}", f"{len(rows):,}", f"{len(rows) / n:.1%}" if n else "–"))
        broken.append(_sort_by_gap(shown, constraints, rows))
    first = min(len(broken[0]), max(MAX_VIOLATED // 2, MAX_VIOLATED - len(broken[1])))  # half each, or what is left
    groups = [
        {"heading": f"{name} {where}", "total": len(rows), "pairs": _pairs(shown, constraints, rows[:most])}
        for (name, where), rows, most in zip(kinds, broken, (first, MAX_VIOLATED - first), strict=True)
        if len(rows)
    ]
    return {"summary": summary, "groups": groups}


def _sort_by_gap(shown: Clustering, constraints: Constraints, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Violated pairs, each once, those first that the model is surest of: a wrong answer, or a hard image."""
    keys = pair_keys(constraints.left[rows], constraints.right[rows], len(shown.images))
    rows = rows[np.sort(np.unique(keys, return_index=True)[1])]
    gap = np.abs(_belief(shown, constraints, rows) - constraints.link[rows])
    return rows[np.argsort(-gap, kind="stable")]


def _belief(shown: Clustering, constraints: Constraints, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """The model's probability ⟨p_i, p_j⟩ that the images of these pairs belong together."""
    p, parts = shown.predictions.probabilities, np.array_split(rows, len(rows) // 100_000 + 1)  # no copy of all rows
    return np.concatenate(
        [np.einsum("nk,nk->n", p[constraints.left[part]], p[constraints.right[part]]) for part in parts]
    )


def _pairs(shown: Clustering, constraints: Constraints, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
    found = []
    for row, belief in zip(rows.tolist(), _belief(shown, constraints, rows).tolist(), strict=True):
        link = float(constraints.link[row])
        said = ("must-link" if link > 0.5 else "cannot-link") + (f" ({link:g})" if link not in (0, 1) else "")
        who = constraints.annotator[row] if constraints.annotator else ""
        sides = [shown.image(int(end[row])) for end in (constraints.left, constraints.right)]
        found.append({"sides": sides, "answer": f"{said} by {who}" if who else said, "belief": belief})
    return found


def _plain(value: Any) -> str:
    """A setting in words."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
