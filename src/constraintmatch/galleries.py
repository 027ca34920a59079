"""A clustering to look at, as sections of HTML: sizes, galleries, confusion, confidence, constraints violated."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, features

from constraintmatch.charts import histogram
from constraintmatch.constraints import Constraints
from constraintmatch.errors import InputError
from constraintmatch.evaluation import Predictions, cluster_sizes, match_clusters, scores
from constraintmatch.images import ImageSet
from constraintmatch.markup import percent, plural, table, text

__all__ = ["SCORES", "Clustering", "clustering", "confidence", "confusion", "galleries", "sizes", "violations"]

THUMBNAIL = 64  # pixels: what the page shows, so more would only weigh
N_SUREST, N_LEAST_SURE = 12, 6
MAX_THUMBNAILS = 1000  # in all galleries; many clusters get fewer images each
MAX_GALLERIES = 200
MAX_SIZES = 200
MAX_VIOLATED = 24  # pairs shown
MAX_CELLS = 6000  # of a confusion matrix that a person can still read
SCORES = {"acc": "accuracy", "nmi": "NMI", "ari": "ARI", "ece": "calibration error"}


@dataclass(frozen=True, eq=False)
class Clustering:
    """Images, what a model says of them, and the constraints over them; made by `clustering`.

    `classes` has the class matched to each cluster, −1 for none; it is None without labels.
    """

    images: ImageSet
    predictions: Predictions
    constraints: Constraints | None
    clusters: NDArray[np.int64]
    confidence: NDArray[np.float32]
    sizes: NDArray[np.int64]
    classes: NDArray[np.int64] | None

    def class_name(self, label: int) -> str:
        names = self.images.classes
        return names[label] if names is not None and label < len(names) else str(label)

    def cluster_name(self, cluster: int) -> str:
        """The cluster's number, with its matched class where there is one."""
        if self.classes is None or self.classes[cluster] < 0:
            return str(cluster)
        return f"{cluster} “{self.class_name(int(self.classes[cluster]))}”"


def clustering(images: ImageSet, predictions: Predictions, constraints: Constraints | None = None) -> Clustering:
    """The clustering to show; what does not fit together is an InputError."""
    if len(images) == 0:
        raise InputError("no images to report on: give at least one")
    if len(predictions) != len(images):
        raise InputError(f"{len(predictions):,} predictions for {len(images):,} images: predict the same images")
    if constraints is not None and constraints.n_images != len(images):
        raise InputError(
            f"the constraints are over {constraints.n_images:,} images, the report is over {len(images):,}: "
            "give both for the same images"
        )
    clusters, labels = predictions.clusters, images.labels
    classes = None if labels is None else _matched(labels, clusters, predictions.n_clusters)
    sizes = cluster_sizes(predictions)
    return Clustering(images, predictions, constraints, clusters, predictions.confidence, sizes, classes)


def _matched(labels: NDArray[np.int64], clusters: NDArray[np.int64], n_clusters: int) -> NDArray[np.int64]:
    """The class of each cluster; −1 too where the matching gave a class none of whose images are in the cluster."""
    classes = match_clusters(labels, clusters, n_clusters, int(labels.max()) + 1)
    met = np.zeros(n_clusters, bool)
    met[clusters[classes[clusters] == labels]] = True
    return np.where(met, classes, -1)


def sizes(shown: Clustering) -> str:
    """A bar for each cluster, in the order of their numbers; the largest ones only, where there are very many."""
    total, largest = len(shown.images), max(1, int(shown.sizes.max()))
    chosen = np.sort(np.argsort(-shown.sizes, kind="stable")[:MAX_SIZES])
    pictured = set(_gallery_clusters(shown))
    rows = "".join(_bar(shown, cluster, total, largest, cluster in pictured) for cluster in chosen.tolist())
    left_out = len(shown.sizes) - len(chosen)
    more = f'<p class="quiet">{plural(left_out, "smaller cluster")} not shown.</p>' if left_out else ""
    matched = ", with the class each is matched to" if shown.classes is not None else ""
    even = f"An even share would be {plural(round(total / len(shown.sizes)), 'image')} a cluster."
    return f'<p class="quiet">Images in each cluster{matched}. {even}</p><ul class="sizes">{rows}</ul>{more}'


def _bar(shown: Clustering, cluster: int, total: int, largest: int, pictured: bool) -> str:
    name, size = text(shown.cluster_name(cluster)), int(shown.sizes[cluster])
    link = f'<a href="#cluster-{cluster}">{name}</a>' if pictured else name
    return (
        f'<li><span class="name" title="cluster {name}">{link}</span>'
        f'<span class="track"><i style="--v:{size / largest:.3f}"></i></span>'
        f'<span class="count">{size:,} <small>{percent(size / total)}</small></span></li>'
    )


def _gallery_clusters(shown: Clustering) -> list[int]:
    """The clusters with images (the largest, where there are very many), by number."""
    filled = np.argsort(-shown.sizes, kind="stable")[: min(MAX_GALLERIES, int((shown.sizes > 0).sum()))]
    return [int(cluster) for cluster in np.sort(filled)]


def galleries(shown: Clustering) -> str:
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
    more = f'<p class="quiet">{plural(left_out, "smaller cluster")} not shown.</p>' if left_out else ""
    return f'<p class="quiet">{note}</p><div class="clusters">{cards}</div>{more}'


def _gallery(shown: Clustering, cluster: int, rows: NDArray[np.int64], n_surest: int, n_least: int) -> str:
    """A cluster's card; `rows` are its images, the surest first."""
    size = len(rows)
    facts = [
        plural(size, "image"),
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
    heading = f"Cluster {text(shown.cluster_name(cluster))} <small>{text(', '.join(facts))}</small>"
    card = f'<h3>{heading}</h3><div class="rows">{shelves}</div>'
    return f'<article class="cluster" id="cluster-{cluster}">{card}</article>\n'


def _most_common(labels: NDArray[np.int64]) -> tuple[int, int]:
    counts = np.bincount(labels)
    return int(counts.argmax()), int(counts.max())


def _thumb(shown: Clustering, row: int) -> str:
    confidence = percent(shown.confidence[row])
    other = ""
    if shown.images.labels is not None and shown.classes is not None:
        label = int(shown.images.labels[row])
        if shown.classes[shown.clusters[row]] != label:
            name = text(shown.class_name(label))
            other = f'<span class="label" title="label {name}">{name}</span>'
    kind = "thumb other" if other else "thumb"
    return f'<figure class="{kind}">{_picture(shown, row)}<figcaption>{confidence}{other}</figcaption></figure>'


def _picture(shown: Clustering, row: int) -> str:
    name, pictures = text(shown.images.names[row]), shown.images.shown
    if pictures is None:
        return f'<span class="unseen" title="{name}">{name}</span>'
    pixels = ' class="pixels"' if pictures.side <= THUMBNAIL // 2 else ""
    source = _data_uri(pictures.images[row])
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


def confusion(shown: Clustering) -> str:
    """Classes by clusters, each cluster below its matched class; the worst mistakes alone if that is too much."""
    labels, classes = shown.images.labels, shown.classes
    if labels is None or classes is None:
        return ""
    n_classes = int(labels.max()) + 1
    counts = np.zeros((n_classes, len(classes)), np.int64)
    np.add.at(counts, (labels, shown.clusters), 1)
    rows = np.flatnonzero(counts.sum(1))
    columns = np.lexsort((np.arange(len(classes)), np.where(classes < 0, n_classes, classes)))
    found = scores(labels, shown.predictions)
    said = ", ".join(f"{name} {percent(found[key])}" for key, name in SCORES.items())
    how = (
        "Rows are classes, columns are clusters. Each cluster is matched to at most one class, so that the most images "
        "are right (framed). The shade is the share of the class."
    )
    lead = f'<p class="quiet">{how} {said[0].upper()}{said[1:]}.</p>'
    if len(rows) * len(columns) > MAX_CELLS:
        return lead + _mistakes(shown, counts)
    return lead + _matrix(shown, counts, rows, columns)


def _matrix(shown: Clustering, counts: NDArray[np.int64], rows: NDArray[np.int64], columns: NDArray[np.int64]) -> str:
    assert shown.classes is not None
    head = "".join(f'<th scope="col">{cluster}</th>' for cluster in columns.tolist())
    lines = []
    for label in rows.tolist():
        total = int(counts[label].sum())
        cells = "".join(_cell(int(counts[label, c]), total, bool(shown.classes[c] == label)) for c in columns.tolist())
        name = text(shown.class_name(label))
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


def _mistakes(shown: Clustering, counts: NDArray[np.int64]) -> str:
    """The twenty (class, cluster) cells with the most images outside the matching."""
    assert shown.classes is not None
    wrong = np.where(shown.classes[None, :] == np.arange(len(counts))[:, None], 0, counts)
    order = np.argsort(-wrong, axis=None, kind="stable")[:20]
    cells = [divmod(at, counts.shape[1]) for at in order.tolist() if wrong.flat[at]]
    rows = [
        (text(shown.class_name(label)), text(shown.cluster_name(cluster)), f"{wrong[label, cluster]:,}")
        for label, cluster in cells
    ]
    return table(("class", "cluster", "images"), rows, kind="words", caption="The most frequent mistakes")


def confidence(shown: Clustering) -> str:
    everything = np.ones(len(shown.images), bool)
    parts = [("images", everything)]
    if shown.classes is not None:
        right = shown.classes[shown.clusters] == shown.images.labels
        parts = [("in the cluster of their class", right), ("in another cluster", ~right)]
    shares = [(percent((shown.confidence >= bar).mean()), f"at least {bar:.0%}") for bar in (0.5, 0.9, 0.99)]
    said = (
        f"The mean confidence is {percent(shown.confidence.mean())}; {shares[0][0]} of the images have {shares[0][1]}, "
    )
    said += " and ".join(f"{share} {bar}" for share, bar in shares[1:]) + "."
    chart = histogram("Images by confidence", shown.confidence, parts)
    return f'<p class="quiet">{said}</p><div class="charts">{chart}</div>'


# Constraints


def violations(shown: Clustering) -> str:
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
    summary = table(("kind", "pairs", "violated", "share"), lines)
    cards = "".join(
        _violated(shown, f"{name} {where}", rows, most)
        for (name, where, _, _), rows, most in zip(kinds, broken, room, strict=True)
    )
    how = (
        "A must-link is violated when its images lie in different clusters, a cannot-link when they lie in one. "
        "“Together” is the model's probability that both images belong to one cluster."
    )
    return f'<p class="quiet">{how}</p>{summary}{cards}'


def _surest(shown: Clustering, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Violated pairs, each once, those first that the model is surest of: a wrong answer, or a hard image."""
    assert shown.constraints is not None
    left, right = shown.constraints.left[rows], shown.constraints.right[rows]
    keys = np.minimum(left, right) * len(shown.images) + np.maximum(left, right)
    rows = rows[np.sort(np.unique(keys, return_index=True)[1])]
    gap = np.abs(_belief(shown, rows) - shown.constraints.link[rows])
    return rows[np.argsort(-gap, kind="stable")]


def _belief(shown: Clustering, rows: NDArray[np.int64]) -> NDArray[np.float32]:
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


def _violated(shown: Clustering, heading: str, rows: NDArray[np.int64], most: int) -> str:
    if not len(rows):
        return ""
    beliefs = _belief(shown, rows[:most]).tolist()
    cards = "".join(_pair(shown, row, belief) for row, belief in zip(rows[:most].tolist(), beliefs, strict=True))
    count = (
        f"{most:,} of {len(rows):,}, those the model is surest of" if most < len(rows) else plural(len(rows), "pair")
    )
    return f'<h3>{heading} <small>{count}</small></h3><div class="pairs">{cards}</div>'


def _pair(shown: Clustering, row: int, belief: float) -> str:
    constraints = shown.constraints
    assert constraints is not None
    link = float(constraints.link[row])
    said = ("must-link" if link > 0.5 else "cannot-link") + (f" ({link:g})" if link not in (0, 1) else "")
    who = constraints.annotator[row] if constraints.annotator else ""
    by = f" by {text(who)}" if who else ""
    sides = "".join(_side(shown, int(end[row])) for end in (constraints.left, constraints.right))
    return (
        f'<article class="pair"><div>{sides}</div>'
        f"<p>Answer: {said}{by}. The model: {percent(belief)} together.</p></article>"
    )


def _side(shown: Clustering, row: int) -> str:
    label = ""
    if shown.images.labels is not None:
        label = f"<br>label “{text(shown.class_name(int(shown.images.labels[row])))}”"
    cluster = f"cluster {text(shown.cluster_name(int(shown.clusters[row])))}, {percent(shown.confidence[row])}"
    return f'<div>{_picture(shown, row)}<span class="name">{text(shown.images.names[row])}</span>{cluster}{label}</div>'
