"""A run folder as one self-contained HTML page: curves, clusters and their images, confusion, constraints violated.

The page asks for nothing outside itself (its own content policy forbids it) and has no script.
"""

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, features

from constraintmatch.charts import Series, histogram, line_chart, percent
from constraintmatch.constraints import Constraints
from constraintmatch.errors import InputError
from constraintmatch.evaluation import (
    Predictions,
    agreement,
    cluster_sizes,
    collapse_warnings,
    match_clusters,
    scores,
)
from constraintmatch.files import read_json, write_atomically
from constraintmatch.images import ImageSet
from constraintmatch.runs import read_log

__all__ = ["report_html", "write_report"]

THUMBNAIL = 64  # pixels: what the page shows, so more would only weigh
N_SUREST, N_LEAST_SURE = 12, 6
MAX_THUMBNAILS = 1000  # in all galleries; many clusters get fewer images each
MAX_GALLERIES = 200
MAX_SIZES = 200
MAX_VIOLATED = 24  # pairs shown
MAX_SKIPPED = 200
MAX_CELLS = 6000  # of a confusion matrix that a person can still read

# The lines of each chart: the key in the log and the words for it.
QUALITY = {
    "pseudo_label_accuracy": "pseudo-labels right",
    "pseudo_constraint_accuracy": "pseudo-constraints right",
    "pseudo_constraint_precision": "precision of must-links",
    "pseudo_constraint_recall": "recall of must-links",
    "must_link_share": "share of must-links",
}
SCORES = {"acc": "accuracy", "nmi": "NMI", "ari": "ARI", "ece": "calibration error"}
KEPT = {"must_link": "must-links kept", "cannot_link": "cannot-links kept", "balanced": "mean of the two"}
SELECTED = {"selected": "selected images", "mean_confidence": "mean confidence"}


@dataclass(frozen=True, eq=False)
class _Shown:
    """What the page shows; the clusters and their matched classes (−1: none; None: no labels) worked out once."""

    folder: Path
    record: Mapping[str, Any]
    log: Sequence[Mapping[str, Any]]
    images: ImageSet
    predictions: Predictions
    constraints: Constraints | None
    clusters: NDArray[np.int64]
    confidence: NDArray[np.float32]
    sizes: NDArray[np.int64]
    classes: NDArray[np.int64] | None

    @property
    def request(self) -> Mapping[str, Any]:
        return _mapping(self.record.get("request"))

    def class_name(self, label: int) -> str:
        names = self.images.classes
        return names[label] if names is not None and label < len(names) else str(label)

    def cluster_name(self, cluster: int) -> str:
        """The cluster's number, with its matched class where there is one."""
        if self.classes is None or self.classes[cluster] < 0:
            return str(cluster)
        return f"{cluster} “{self.class_name(int(self.classes[cluster]))}”"

    def right(self) -> NDArray[np.bool_]:
        """Which images lie in the cluster matched to their class."""
        assert self.classes is not None
        return np.asarray(self.classes[self.clusters] == self.images.labels, bool)


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
    shown = _gather(Path(run), images, predictions, constraints)
    title = title or _title(shown)
    sections = [
        ("curves", "Curves", _curves(shown)),
        ("sizes", "Cluster sizes", _sizes(shown)),
        ("clusters", "Clusters", _galleries(shown)),
        ("confusion", "Confusion", _confusion(shown)),
        ("confidence", "Confidence", _confidence(shown)),
        ("constraints", "Constraints violated", _violations(shown)),
        ("skipped", "Skipped images", _skipped(images)),
        ("settings", "Settings", _settings(shown)),
    ]
    sections = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>{content}</section>\n' for name, heading, content in sections
    )
    head = f'<header><p class="kicker">ConstraintMatch run report</p><h1>{_text(title)}</h1>{_facts(shown)}</header>'
    nav = f'<nav aria-label="Sections">{links}</nav>'
    return _page(title, f"{head}\n{_alerts(shown)}{nav}\n<main>{body}</main>{_footer(shown)}")


def _page(title: str, body: str) -> str:
    style = files("constraintmatch").joinpath("report.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{_text(title)}</title>\n<style>\n{style}</style>\n'
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _gather(folder: Path, images: ImageSet, predictions: Predictions, constraints: Constraints | None) -> _Shown:
    if not (folder / "run.json").is_file():
        raise InputError(f"{folder}: not a run folder (it has no run.json); give the folder that training wrote")
    if len(images) == 0:
        raise InputError("no images to report on: give at least one")
    if len(predictions) != len(images):
        raise InputError(f"{len(predictions):,} predictions for {len(images):,} images: predict the same images")
    if constraints is not None and constraints.n_images != len(images):
        raise InputError(
            f"the constraints are over {constraints.n_images:,} images, the report is over {len(images):,}: "
            "give both for the same images"
        )
    clusters = predictions.clusters
    return _Shown(
        folder,
        _mapping(read_json(folder / "run.json")),
        read_log(folder),
        images,
        predictions,
        constraints,
        clusters,
        predictions.confidence,
        cluster_sizes(predictions),
        None if images.labels is None else _matched(images.labels, clusters, predictions.n_clusters),
    )


def _matched(labels: NDArray[np.int64], clusters: NDArray[np.int64], n_clusters: int) -> NDArray[np.int64]:
    """The class of each cluster; −1 too where the matching gave a class none of whose images are in the cluster."""
    classes = match_clusters(labels, clusters, n_clusters, int(labels.max()) + 1)
    met = np.zeros(n_clusters, bool)
    met[clusters[classes[clusters] == labels]] = True
    return np.where(met, classes, -1)


# Words


def _text(value: object) -> str:
    """Any text made safe for HTML, in content and in attributes; what cannot be printed is shown as its escape."""
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))
    return escape(text)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "", caption: str = "") -> str:
    """A table of cells that are HTML already; the first of each row names it."""
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    said = f'<caption class="quiet">{caption}</caption>' if caption else ""
    opened = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="wide">{opened}{said}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _duration(seconds: float) -> str:
    """12.3 s, 4 min 5 s, 2 h 3 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:,.0f} h {seconds % 3600 // 60:.0f} min"


def _when(record: Mapping[str, Any]) -> str:
    """The end of the run (its start, if it has not ended) as 2025-01-31 14:05 UTC."""
    stamp = str(record.get("ended") or record.get("started") or "")
    try:
        time = datetime.fromisoformat(stamp)
    except ValueError:
        return _text(stamp) or "unknown"
    return f'<time datetime="{_text(stamp)}">{time:%Y-%m-%d}<small>{time:%H:%M %Z}</small></time>'


def _data_name(shown: _Shown) -> str:
    data = _mapping(shown.request.get("data"))
    return str(data.get("name") or Path(str(data.get("folder") or data.get("source") or "")).name)


def _title(shown: _Shown) -> str:
    method, data = str(shown.request.get("method", "Run")), _data_name(shown)
    return f"{method} on {data}" if data else f"{method}: {shown.folder.resolve().name}"


# The head


def _facts(shown: _Shown) -> str:
    data = _mapping(shown.request.get("data"))
    same = data.get("fingerprint") == shown.images.fingerprint()
    images = shown.images
    kind = f"{images.side} × {images.side}, {'grey' if images.channels == 1 else 'colour'}"
    empty = int((shown.sizes == 0).sum())
    facts = [
        ("Method", _text(shown.request.get("method", "unknown"))),
        ("Data", _data_fact(shown, data, same)),
        ("Images", _with_note(f"{len(images):,}", kind)),
        ("Clusters", _with_note(f"{shown.predictions.n_clusters:,}", f"{empty:,} empty" if empty else "")),
        ("Pairs", _pairs_fact(shown)),
        *_score_facts(shown),
        ("Duration", _duration_fact(shown)),
        ("When", _when(shown.record)),
    ]
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    said = "the images the model was trained on" if same else "other images than the set the model was trained on"
    note = f'<p class="quiet">Clusters, scores and pictures on this page are of {said}.</p>'
    return f'<dl class="facts">{tiles}</dl>{note if "fingerprint" in data else ""}'


def _with_note(value: str, note: str) -> str:
    return _text(value) + (f"<small>{_text(note)}</small>" if note else "")


def _pairs_fact(shown: _Shown) -> str:
    """The pairs trained on; those given with the page where the record has none."""
    trained = _mapping(shown.request.get("constraints"))
    if "pairs" in trained:
        pairs, must = int(trained["pairs"]), int(trained.get("must_links", 0))
    elif shown.constraints is not None:
        pairs, must = len(shown.constraints), shown.constraints.n_must_links
    else:
        return "none"
    return _with_note(f"{pairs:,}", f"{percent(must / pairs)} must-links" if pairs else "")


def _score_facts(shown: _Shown) -> Iterator[tuple[str, str]]:
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


def _duration_fact(shown: _Shown) -> str:
    seconds, settings = shown.record.get("seconds"), _mapping(shown.request.get("settings"))
    steps = settings.get("steps")
    note = f"{steps:,} steps" if isinstance(steps, int) else ""
    return _with_note(_duration(float(seconds)) if isinstance(seconds, int | float) else "unknown", note)


def _data_fact(shown: _Shown, data: Mapping[str, Any], same: bool) -> str:
    """Where the images trained on came from, with their number where the page shows others."""
    n_images = data.get("images")
    count = f"{n_images:,} images" if isinstance(n_images, int) and not same else ""
    note = ", ".join(part for part in (str(data.get("split") or ""), count) if part)
    return _with_note(_data_name(shown) or "unnamed", note if same or not note else f"trained on {note}")


def _alerts(shown: _Shown) -> str:
    """How the run ended if it did not finish, and signs of collapse: now, and in the log."""
    told = []
    status = shown.record.get("status", "unknown")
    if status != "finished":
        error = f": {shown.record['error']}" if shown.record.get("error") else ""
        told.append(f"The run is not finished; it is {status}{error}")
    now = collapse_warnings(shown.predictions)
    told += now
    told += _past_warnings(shown.log, now)
    if not told:
        return ""
    heading = "Signs of collapse" if len(told) > (status != "finished") else "Unfinished"
    items = "".join(f"<li>{_text(line)}</li>" for line in told)
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
        f"While training, {len(warned):,} of {_plural(len(evaluations), 'evaluation')} warned, "
        f"the last time at step {last.get('step', 0):,}{said or '.'}"
    ]


# Curves


def _curves(shown: _Shown) -> str:
    training = [entry for entry in shown.log if entry.get("kind", "training") == "training"]
    evaluation = [entry for entry in shown.log if entry.get("kind") == "evaluation"]
    terms = {key: key.removeprefix("loss_") for entry in training for key in entry if key.startswith("loss_")}
    losses = {"loss": "total", **(terms if len(terms) > 1 else {})}  # one term alone is the total
    charts = [
        ("Losses", _series(training, losses) + _series(evaluation, {"constraint_loss": "held-out constraints"}), False),
        ("Selected images and confidence", _series(shown.log, SELECTED), True),
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


# Clusters


def _sizes(shown: _Shown) -> str:
    """A bar for each cluster, in the order of their numbers; the largest ones only, where there are very many."""
    total, largest = len(shown.images), max(1, int(shown.sizes.max()))
    chosen = np.sort(np.argsort(-shown.sizes, kind="stable")[:MAX_SIZES])
    pictured = set(_gallery_clusters(shown))
    rows = "".join(_bar(shown, cluster, total, largest, cluster in pictured) for cluster in chosen.tolist())
    left_out = len(shown.sizes) - len(chosen)
    more = f'<p class="quiet">{_plural(left_out, "smaller cluster")} not shown.</p>' if left_out else ""
    matched = ", with the class each is matched to" if shown.classes is not None else ""
    even = f"An even share would be {_plural(round(total / len(shown.sizes)), 'image')} a cluster."
    return f'<p class="quiet">Images in each cluster{matched}. {even}</p><ul class="sizes">{rows}</ul>{more}'


def _bar(shown: _Shown, cluster: int, total: int, largest: int, pictured: bool) -> str:
    name, size = _text(shown.cluster_name(cluster)), int(shown.sizes[cluster])
    link = f'<a href="#cluster-{cluster}">{name}</a>' if pictured else name
    return (
        f'<li><span class="name" title="cluster {name}">{link}</span>'
        f'<span class="track"><i style="--v:{size / largest:.3f}"></i></span>'
        f'<span class="count">{size:,} <small>{percent(size / total)}</small></span></li>'
    )


def _gallery_clusters(shown: _Shown) -> list[int]:
    """The clusters with images (the largest, where there are very many), by number."""
    filled = np.argsort(-shown.sizes, kind="stable")[: min(MAX_GALLERIES, int((shown.sizes > 0).sum()))]
    return [int(cluster) for cluster in np.sort(filled)]


def _galleries(shown: _Shown) -> str:
    chosen = _gallery_clusters(shown)
    each = max(3, min(N_SUREST + N_LEAST_SURE, MAX_THUMBNAILS // len(chosen)))
    n_least = each * N_LEAST_SURE // (N_SUREST + N_LEAST_SURE)
    order = np.lexsort((-shown.confidence, shown.clusters))  # by cluster, the surest first
    starts = np.concatenate([[0], np.cumsum(shown.sizes)])
    cards = "".join(
        _gallery(shown, cluster, order[starts[cluster] : starts[cluster + 1]], each - n_least, n_least)
        for cluster in chosen
    )
    note = "The number under an image is the model's confidence."
    if shown.classes is not None:
        note += " An orange frame marks an image whose label is not the class matched to the cluster."
    left_out = int((shown.sizes > 0).sum()) - len(chosen)
    more = f'<p class="quiet">{_plural(left_out, "smaller cluster")} not shown.</p>' if left_out else ""
    return f'<p class="quiet">{note}</p><div class="clusters">{cards}</div>{more}'


def _gallery(shown: _Shown, cluster: int, rows: NDArray[np.int64], n_surest: int, n_least: int) -> str:
    """A cluster's card; `rows` are its images, the surest first."""
    size = len(rows)
    facts = [
        _plural(size, "image"),
        percent(size / len(shown.images)),
        f"mean confidence {percent(shown.confidence[rows].mean())}",
    ]
    if shown.images.labels is not None:
        label, count = _most_common(shown.images.labels[rows])
        facts.append(f"{percent(count / size)} are {shown.class_name(label)}")
    if size <= n_surest + n_least:
        groups = [("All its images, the surest first", rows)]
    else:
        groups = [("Surest", rows[:n_surest]), ("Least sure", rows[::-1][:n_least])]
    shelves = "".join(
        f'<div><h4>{name}</h4><div class="thumbs">{"".join(_thumb(shown, row) for row in group.tolist())}</div></div>'
        for name, group in groups
    )
    heading = f"Cluster {_text(shown.cluster_name(cluster))} <small>{_text(', '.join(facts))}</small>"
    card = f'<h3>{heading}</h3><div class="rows">{shelves}</div>'
    return f'<article class="cluster" id="cluster-{cluster}">{card}</article>\n'


def _most_common(labels: NDArray[np.int64]) -> tuple[int, int]:
    counts = np.bincount(labels)
    return int(counts.argmax()), int(counts.max())


def _thumb(shown: _Shown, row: int) -> str:
    confidence = percent(shown.confidence[row])
    other = ""
    if shown.images.labels is not None and shown.classes is not None:
        label = int(shown.images.labels[row])
        if shown.classes[shown.clusters[row]] != label:
            name = _text(shown.class_name(label))
            other = f'<span class="label" title="label {name}">{name}</span>'
    kind = "thumb other" if other else "thumb"
    return f'<figure class="{kind}">{_picture(shown, row)}<figcaption>{confidence}{other}</figcaption></figure>'


def _picture(shown: _Shown, row: int) -> str:
    name = _text(shown.images.names[row])
    pixels = ' class="pixels"' if shown.images.side <= THUMBNAIL // 2 else ""
    source = _data_uri(shown.images.images[row])
    said = f"{name}, cluster {shown.clusters[row]}, confidence {percent(shown.confidence[row])}"
    return f'<img{pixels} src="{source}" alt="{said}" title="{name}" width="{THUMBNAIL}" height="{THUMBNAIL}">'


def _data_uri(pixels: NDArray[np.uint8]) -> str:
    """An image of at most THUMBNAIL pixels as a data address: PNG if tiny, else WebP (JPEG where Pillow lacks it)."""
    image = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    if image.width > THUMBNAIL:
        image = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    kind = "PNG" if image.width <= 16 else "WEBP" if features.check("webp") else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"optimize": True} if kind == "PNG" else {"quality": 75}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


# Confusion and confidence


def _confusion(shown: _Shown) -> str:
    """Classes by clusters, each cluster below its matched class; the worst mistakes alone if that is too much."""
    labels, classes = shown.images.labels, shown.classes
    if labels is None or classes is None:
        return ""
    n_classes = int(labels.max()) + 1
    table = np.zeros((n_classes, len(classes)), np.int64)
    np.add.at(table, (labels, shown.clusters), 1)
    rows = np.flatnonzero(table.sum(1))
    columns = np.lexsort((np.arange(len(classes)), np.where(classes < 0, n_classes, classes)))
    found = scores(labels, shown.predictions)
    said = ", ".join(f"{name} {percent(found[key])}" for key, name in SCORES.items())
    how = (
        "Rows are classes, columns are clusters. Each cluster is matched to at most one class, so that the most images "
        "are right (framed). The shade is the share of the class."
    )
    lead = f'<p class="quiet">{how} {said[0].upper()}{said[1:]}.</p>'
    if len(rows) * len(columns) > MAX_CELLS:
        return lead + _mistakes(shown, table)
    return lead + _matrix(shown, table, rows, columns)


def _matrix(shown: _Shown, table: NDArray[np.int64], rows: NDArray[np.int64], columns: NDArray[np.int64]) -> str:
    assert shown.classes is not None
    head = "".join(f'<th scope="col">{cluster}</th>' for cluster in columns.tolist())
    lines = []
    for label in rows.tolist():
        total = int(table[label].sum())
        cells = "".join(_cell(int(table[label, c]), total, bool(shown.classes[c] == label)) for c in columns.tolist())
        name = _text(shown.class_name(label))
        lines.append(f'<tr><th scope="row" title="{name}">{name}</th>{cells}<td>{total:,}</td></tr>')
    caption = '<caption class="quiet">Images by class and cluster</caption>'
    top = f'<tr><th scope="col">class</th>{head}<th scope="col">images</th></tr>'
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Confusion matrix">'
        f'<table class="confusion">{caption}<thead>{top}</thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _cell(count: int, total: int, match: bool) -> str:
    kind = ' class="match"' if match else ""
    shade = f' style="--v:{count / total:.2f}"' if count else ""
    return f"<td{kind}{shade}>{count:,}</td>" if count or match else "<td></td>"


def _mistakes(shown: _Shown, table: NDArray[np.int64]) -> str:
    """The twenty (class, cluster) cells with the most images outside the matching."""
    assert shown.classes is not None
    wrong = np.where(shown.classes[None, :] == np.arange(len(table))[:, None], 0, table)
    order = np.argsort(-wrong, axis=None, kind="stable")[:20]
    cells = [divmod(at, table.shape[1]) for at in order.tolist() if wrong.flat[at]]
    rows = [
        (_text(shown.class_name(label)), _text(shown.cluster_name(cluster)), f"{wrong[label, cluster]:,}")
        for label, cluster in cells
    ]
    return _table(("class", "cluster", "images"), rows, kind="words", caption="The most frequent mistakes")


def _confidence(shown: _Shown) -> str:
    everything = np.ones(len(shown.images), bool)
    parts = [("images", everything)]
    if shown.classes is not None:
        right = shown.right()
        parts = [("in the cluster of their class", right), ("in another cluster", ~right)]
    sure = ", ".join(f"{percent((shown.confidence >= bar).mean())} from {bar:.0%}" for bar in (0.5, 0.9, 0.99))
    said = f"Mean confidence {percent(shown.confidence.mean())}. Images with a confidence {sure} up."
    chart = histogram("Images by confidence", shown.confidence, parts)
    return f'<p class="quiet">{said}</p><div class="charts">{chart}</div>'


# Constraints


def _violations(shown: _Shown) -> str:
    """How many constraints the clusters break, and the pairs where the model is surest of it."""
    constraints = shown.constraints
    if constraints is None or not len(constraints):
        return ""
    together = shown.clusters[constraints.left] == shown.clusters[constraints.right]
    kinds = [
        ("Must-links", "in different clusters", constraints.link > 0.5, ~together),
        ("Cannot-links", "in one cluster", constraints.link < 0.5, together),
    ]
    broken = [_surest(shown, np.flatnonzero(of_kind & violated)) for _, _, of_kind, violated in kinds]
    room = _rooms(len(broken[0]), len(broken[1]))
    lines = [
        (
            name,
            f"{of_kind.sum():,}",
            f"{(of_kind & violated).sum():,}",
            percent(float(violated[of_kind].mean())) if of_kind.any() else "–",
        )
        for name, _, of_kind, violated in kinds
    ]
    table = _table(("kind", "pairs", "violated", "share"), lines)
    cards = "".join(
        _violated(shown, f"{name} {where}", rows, most)
        for (name, where, _, _), rows, most in zip(kinds, broken, room, strict=True)
    )
    return table + cards


def _surest(shown: _Shown, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Violated pairs, each once, those first that the model is surest of: a wrong answer, or a hard image."""
    assert shown.constraints is not None
    left, right = shown.constraints.left[rows], shown.constraints.right[rows]
    keys = np.minimum(left, right) * len(shown.images) + np.maximum(left, right)
    rows = rows[np.sort(np.unique(keys, return_index=True)[1])]
    gap = np.abs(_belief(shown, rows) - shown.constraints.link[rows])
    return rows[np.argsort(-gap, kind="stable")]


def _belief(shown: _Shown, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """The model's probability ⟨p_i, p_j⟩ that the images of these pairs belong together."""
    assert shown.constraints is not None
    left, right = shown.constraints.left[rows], shown.constraints.right[rows]
    beliefs = [
        np.einsum("nk,nk->n", shown.predictions.probabilities[left[part]], shown.predictions.probabilities[right[part]])
        for part in np.array_split(np.arange(len(rows)), len(rows) // 100_000 + 1)  # no copy of all rows at once
    ]
    return np.concatenate(beliefs)


def _rooms(n_first: int, n_second: int) -> tuple[int, int]:
    """How many pairs of each kind to show: half each; what one does not need, the other gets."""
    half = MAX_VIOLATED // 2
    first = min(n_first, max(half, MAX_VIOLATED - n_second))
    return first, min(n_second, MAX_VIOLATED - first)


def _violated(shown: _Shown, heading: str, rows: NDArray[np.int64], most: int) -> str:
    if not len(rows):
        return ""
    beliefs = _belief(shown, rows[:most]).tolist()
    cards = "".join(_pair(shown, row, belief) for row, belief in zip(rows[:most].tolist(), beliefs, strict=True))
    count = (
        f"{most:,} of {len(rows):,}, those the model is surest of" if most < len(rows) else _plural(len(rows), "pair")
    )
    return f'<h3>{heading} <small>{count}</small></h3><div class="pairs">{cards}</div>'


def _pair(shown: _Shown, row: int, belief: float) -> str:
    constraints = shown.constraints
    assert constraints is not None
    link = float(constraints.link[row])
    said = ("must-link" if link > 0.5 else "cannot-link") + (f" ({link:g})" if link not in (0, 1) else "")
    who = constraints.annotator[row] if constraints.annotator else ""
    by = f" by {_text(who)}" if who else ""
    sides = "".join(_side(shown, int(end[row])) for end in (constraints.left, constraints.right))
    return (
        f'<article class="pair"><div>{sides}</div>'
        f"<p>Answer: {said}{by}. The model: {percent(belief)} together.</p></article>"
    )


def _side(shown: _Shown, row: int) -> str:
    label = ""
    if shown.images.labels is not None:
        label = f"<br>label {_text(shown.class_name(int(shown.images.labels[row])))}"
    cluster = f"cluster {_text(shown.cluster_name(int(shown.clusters[row])))}, {percent(shown.confidence[row])}"
    return (
        f'<div>{_picture(shown, row)}<span class="name">{_text(shown.images.names[row])}</span>{cluster}{label}</div>'
    )


# Settings


def _skipped(images: ImageSet) -> str:
    if not images.skipped:
        return ""
    rows = [(_text(skip.name), _text(skip.reason)) for skip in images.skipped[:MAX_SKIPPED]]
    left_out = len(images.skipped) - MAX_SKIPPED
    more = f'<p class="quiet">And {left_out:,} more.</p>' if left_out > 0 else ""
    table = _table(("file", "why it was skipped"), rows, kind="words")
    opened = " open" if len(rows) <= 10 else ""
    return f"<details{opened}><summary>{_plural(len(images.skipped), 'file')} skipped</summary>{table}{more}</details>"


def _settings(shown: _Shown) -> str:
    asked = [*_flat(shown.request), *_flat(_mapping(shown.record.get("environment")), "environment")]
    table = _table(("setting", "value"), [(_text(key), _text(_plain(value))) for key, value in asked], kind="words")
    return f"<details><summary>What was asked, and where it ran</summary>{table}</details>"


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


def _footer(shown: _Shown) -> str:
    made = _mapping(shown.record.get("environment")).get("constraintmatch", "")
    folder = shown.folder.resolve().name
    return f'<footer class="quiet">Made by constraintmatch {_text(made)} from the run folder {_text(folder)}.</footer>'
