"""A run folder as one self-contained HTML page: curves, clusters and their images, confusion, constraints violated.

The page asks for nothing outside itself (its own content policy forbids it) and has no script.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from constraintmatch.charts import Series, line_chart
from constraintmatch.constraints import Constraints
from constraintmatch.errors import InputError
from constraintmatch.evaluation import Predictions, agreement, collapse_warnings, scores
from constraintmatch.files import read_json, write_atomically
from constraintmatch.galleries import (
    SCORES,
    Clustering,
    clustering,
    confidence,
    confusion,
    galleries,
    sizes,
    violations,
)
from constraintmatch.images import ImageSet, kind_of
from constraintmatch.markup import percent, plural, table, text
from constraintmatch.runs import read_log

__all__ = ["report_html", "write_report"]

MAX_SKIPPED = 200

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


@dataclass(frozen=True)
class _Run:
    """A run folder as it was read."""

    folder: Path
    record: Mapping[str, Any]
    log: Sequence[Mapping[str, Any]]

    def asked(self, part: str) -> Mapping[str, Any]:
        """A part of the request; empty where there is none."""
        return _mapping(_mapping(self.record.get("request")).get(part))

    @property
    def method(self) -> str:
        return str(_mapping(self.record.get("request")).get("method", "unknown"))


def write_report(
    run: Path | str,
    images: ImageSet,
    predictions: Predictions,
    *,
    constraints: Constraints | None = None,
    title: str | None = None,
) -> Path:
    """The path of the run's `report.html`, written anew; see `report_html`."""
    path = Path(run) / "report.html"
    page = report_html(run, images, predictions, constraints=constraints, title=title)
    write_atomically(path, lambda temporary: temporary.write_bytes(page.encode()) and None)
    return path


def report_html(
    run: Path | str,
    images: ImageSet,
    predictions: Predictions,
    *,
    constraints: Constraints | None = None,
    title: str | None = None,
) -> str:
    """The page of a run: its record and log, and these predictions of these images beside the constraints over them.

    Nothing is written. The images may be others than those trained on; the page says so.
    """
    read, shown = _read(Path(run)), clustering(images, predictions, constraints)
    title = title or _title(read)
    sections = [
        ("kept", "What was kept", _kept(read.log)),
        ("curves", "Curves", _curves(read.log)),
        ("sizes", "Cluster sizes", sizes(shown)),
        ("clusters", "Clusters", galleries(shown)),
        ("confusion", "Confusion", confusion(shown)),
        ("confidence", "Confidence", confidence(shown)),
        ("constraints", "Constraints violated", violations(shown)),
        ("skipped", "Skipped images", _skipped(images)),
        ("settings", "Settings", _settings(read)),
    ]
    sections = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>{content}</section>\n' for name, heading, content in sections
    )
    head = (
        f'<header><p class="kicker">ConstraintMatch run report</p><h1>{text(title)}</h1>{_facts(read, shown)}</header>'
    )
    nav = f'<nav aria-label="Sections">{links}</nav>'
    return _page(title, f"{head}\n{_alerts(read, shown)}{nav}\n<main>{body}</main>{_footer(read)}")


def _kept(log: Sequence[Mapping[str, Any]]) -> str:
    """The verdict of the safe recipe, and how many answers look wrong; nothing for other runs."""
    verdict = next((entry for entry in reversed(log) if entry.get("kind") == "verdict"), None)
    if verdict is None:
        return ""
    shares = {"must-links": verdict.get("wrong_must_links"), "cannot-links": verdict.get("wrong_cannot_links")}
    said = " and ".join(f"{share:.1%} of the {kind}" for kind, share in shares.items() if isinstance(share, float))
    kept = f"<p>{text(str(verdict.get('kept')).capitalize())}: {text(str(verdict.get('why')))}.</p>"
    doubts = f"<p>About {said} look wrong to this model.</p>" if said else ""
    if n := len(verdict.get("doubtful", ())):
        again = "the first ones under “Constraints violated”, and all of them in doubtful.csv"
        doubts += f"<p>Look at {n} pairs again: {again}.</p>"
    return kept + doubts


def _page(title: str, body: str) -> str:
    style = files("constraintmatch").joinpath("report.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{text(title)}</title>\n<style>\n{style}</style>\n'
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _read(folder: Path) -> _Run:
    if not (folder / "run.json").is_file():
        raise InputError(f"{folder}: not a run folder (it has no run.json); give the folder that training wrote")
    return _Run(folder, _mapping(read_json(folder / "run.json")), read_log(folder))


# Words


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _duration(seconds: float) -> str:
    """12.3 s, 4 min 5 s, 2 h 3 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600:,} h {seconds % 3600 // 60} min"


def _when(record: Mapping[str, Any]) -> str:
    """The end of the run (its start, if it has not ended) as 2025-01-31 14:05 UTC."""
    stamp = str(record.get("ended") or record.get("started") or "")
    try:
        time = datetime.fromisoformat(stamp)
    except ValueError:
        return text(stamp) or "unknown"
    return f'<time datetime="{text(stamp)}">{time:%Y-%m-%d}<small>{time:%H:%M %Z}</small></time>'


def _data_name(run: _Run) -> str:
    data = run.asked("data")
    return str(data.get("name") or Path(str(data.get("folder") or data.get("source") or "")).name)


def _title(run: _Run) -> str:
    data = _data_name(run)
    return f"{run.method} on {data}" if data else f"{run.method}: {run.folder.resolve().name}"


# The head


def _facts(run: _Run, shown: Clustering) -> str:
    data = run.asked("data")
    same = data.get("fingerprint") == shown.images.fingerprint()
    images = shown.images
    kind = f"{images.side} × {images.side}, {'grey' if images.channels == 1 else 'colour'}"
    if images.embedded:
        kind = kind_of(images.side, images.channels)
    empty = int((shown.sizes == 0).sum())
    facts = [
        ("Method", text(run.method)),
        ("Data", _data_fact(run, same)),
        ("Images", _with_note(f"{len(images):,}", kind)),
        ("Clusters", _with_note(f"{shown.predictions.n_clusters:,}", f"{empty:,} empty" if empty else "")),
        ("Pairs", _pairs_fact(run, shown)),
        *_score_facts(shown),
        ("Duration", _duration_fact(run)),
        ("When", _when(run.record)),
    ]
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    said = "the images the model was trained on" if same else "other images than the set the model was trained on"
    note = f'<p class="quiet">Clusters, scores and pictures on this page are of {said}.</p>'
    return f'<dl class="facts">{tiles}</dl>{note if "fingerprint" in data else ""}'


def _with_note(value: str, note: str) -> str:
    return text(value) + (f"<small>{text(note)}</small>" if note else "")


def _pairs_fact(run: _Run, shown: Clustering) -> str:
    """The pairs trained on; those given with the page where the record has none."""
    trained = run.asked("constraints")
    if "pairs" in trained:
        pairs, must = int(trained["pairs"]), int(trained.get("must_links", 0))
    elif shown.constraints is not None:
        pairs, must = len(shown.constraints), shown.constraints.n_must_links
    else:
        return "none"
    return _with_note(f"{pairs:,}", f"{percent(must / pairs)} must-links" if pairs else "")


def _score_facts(shown: Clustering) -> Iterator[tuple[str, str]]:
    """Accuracy where labels exist, else the agreement with the constraints, where there are any."""
    if shown.images.labels is not None:
        found = scores(shown.images.labels, shown.predictions)
        yield "Accuracy", _with_note(percent(found["acc"]), f"NMI {percent(found['nmi'])}, ARI {percent(found['ari'])}")
    elif shown.constraints is not None and len(shown.constraints):
        kept = agreement(shown.constraints, shown.predictions)
        parts = [(name, kept[key]) for key, name in (("must_link", "must-links"), ("cannot_link", "cannot-links"))]
        note = ", ".join(f"{name} {percent(value)}" for name, value in parts if value is not None)
        whole = next((kept[key] for key in ("balanced", "must_link", "cannot_link") if kept[key] is not None), None)
        yield "Agreement with constraints", _with_note("–" if whole is None else percent(whole), note)


def _duration_fact(run: _Run) -> str:
    seconds, steps = run.record.get("seconds"), run.asked("settings").get("steps")
    note = f"{steps:,} steps" if isinstance(steps, int) else ""
    return _with_note(_duration(float(seconds)) if isinstance(seconds, int | float) else "unknown", note)


def _data_fact(run: _Run, same: bool) -> str:
    """Where the images trained on came from, with their number where the page shows others."""
    data = run.asked("data")
    n_images = data.get("images")
    count = f"{n_images:,} images" if isinstance(n_images, int) and not same else ""
    note = ", ".join(part for part in (str(data.get("split") or ""), count) if part)
    return _with_note(_data_name(run) or "unnamed", note if same or not note else f"trained on {note}")


def _alerts(run: _Run, shown: Clustering) -> str:
    """How the run ended if it did not finish, and signs of collapse: now, and in the log."""
    told = []
    status = run.record.get("status", "unknown")
    if status != "finished":
        error = f": {run.record['error']}" if run.record.get("error") else ""
        told.append(f"The run is not finished; it is {status}{error}")
    now = collapse_warnings(shown.predictions)
    told += now
    told += _past_warnings(run.log, now)
    if not told:
        return ""
    heading = "Signs of collapse" if len(told) > (status != "finished") else "Unfinished"
    items = "".join(f"<li>{text(line)}</li>" for line in told)
    return f'<div class="alert" role="alert"><p><strong>{heading}</strong></p><ul>{items}</ul></div>'


def _past_warnings(log: Sequence[Mapping[str, Any]], now: Sequence[str]) -> list[str]:
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


# Curves


def _curves(log: Sequence[Mapping[str, Any]]) -> str:
    training = [entry for entry in log if entry.get("kind", "training") == "training"]
    evaluation = [entry for entry in log if entry.get("kind") == "evaluation"]
    terms = {key: key.removeprefix("loss_") for entry in training for key in entry if key.startswith("loss_")}
    losses = {"loss": "total", **(terms if len(terms) > 1 else {})}  # one term alone is the total
    charts = [
        ("Losses", _series(training, losses) + _series(evaluation, {"constraint_loss": "held-out constraints"}), False),
        ("Selected images and confidence", _series(log, SELECTED), True),
        ("Quality of pseudo-labels and pseudo-constraints", _series(training, QUALITY), True),
        ("Scores against labels", _series(evaluation, SCORES), True),
        ("Held-out constraints kept", _series(evaluation, KEPT), True),
    ]
    drawn = "".join(line_chart(title, series, shares=shares) for title, series, shares in charts if series)
    return f'<div class="charts">{drawn}</div>' if drawn else '<p class="quiet">The log of this run is empty.</p>'


def _series(log: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Series]:
    """The lines that have a point, for keys of the log."""
    found = []
    for key, name in names.items():
        points = tuple(
            (entry["step"], entry[key]) for entry in log if _finite(entry.get(key)) and _finite(entry.get("step"))
        )
        found += [Series(name, points)] if points else []
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Settings


def _skipped(images: ImageSet) -> str:
    if not images.skipped:
        return ""
    rows = [(text(skip.name), text(skip.reason)) for skip in images.skipped[:MAX_SKIPPED]]
    left_out = len(images.skipped) - MAX_SKIPPED
    more = f'<p class="quiet">And {left_out:,} more.</p>' if left_out > 0 else ""
    listed = table(("file", "why it was skipped"), rows, kind="words")
    opened = " open" if len(rows) <= 10 else ""
    return f"<details{opened}><summary>{plural(len(images.skipped), 'file')} skipped</summary>{listed}{more}</details>"


def _settings(run: _Run) -> str:
    asked = [
        *_flat(_mapping(run.record.get("request"))),
        *_flat(_mapping(run.record.get("environment")), "environment"),
    ]
    rows = table(("setting", "value"), [(text(key), text(_plain(value))) for key, value in asked], kind="words")
    return f"<details><summary>What was asked, and where it ran</summary>{rows}</details>"


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value


def _plain(value: Any) -> str:
    """A setting as a person would write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _footer(run: _Run) -> str:
    made = _mapping(run.record.get("environment")).get("constraintmatch", "")
    folder = run.folder.resolve().name
    return f'<footer class="quiet">Made by constraintmatch {text(made)} from the run folder {text(folder)}.</footer>'
