"""The paper's figures from finished cells: first as numbers, then drawn as PNG and SVG."""

import hashlib
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import write_atomically
from constraintmatch.data.datasets import DATASETS
from constraintmatch.paper.grids import EXPECTED_ERRORS, STEPS, Cell
from constraintmatch.paper.published import TABLE_1, published
from constraintmatch.paper.results import Row, Summary, check_same_start

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FIGURES", "Curve", "Drawing", "GalleryPair", "Level", "Sweep", "draw", "draw_gallery", "drawing"]

N_CONSTRAINTS = 10_000  # where the figure is not about their number
LARGEST_THUMBNAIL = 64  # pixels: larger images would only make the gallery's files heavy


@dataclass(frozen=True)
class Curve:
    """One line of points (x, score over the folds), in order of x."""

    label: str
    method: str  # whose colours it has, or a variant of it
    points: tuple[tuple[float, Summary], ...]


@dataclass(frozen=True)
class Level:
    """A score that does not depend on x, drawn across the figure."""

    label: str
    method: str
    summary: Summary


@dataclass(frozen=True)
class Drawing:
    """What one figure shows; all of it was trained for the same number of steps."""

    name: str
    dataset: str
    title: str
    x_label: str
    metric: str
    steps: int
    curves: tuple[Curve, ...]
    levels: tuple[Level, ...]
    paper: tuple[tuple[str, float, float], ...] = ()  # (method, x, value) where the paper's tables tell it
    log_x: bool = False

    @property
    def note(self) -> str:
        """Set, constraints and folds: what must be said wherever the figure is shown."""
        counts = sorted({summary.n for curve in self.curves for _, summary in curve.points})
        folds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        pairs = "" if self.name == "amount" else f", {N_CONSTRAINTS:,} pairs"
        return f"{DATASETS[self.dataset].title} test{pairs}, {folds} {'fold' if folds == '1' else 'folds'}"

    @property
    def heading(self) -> str:
        """The title; a cut figure says so in it."""
        return self.title + (f", cut ({self.steps:,} steps)" if self.steps < STEPS else "")

    @property
    def stem(self) -> str:
        """The name of its files, without suffix."""
        return f"{self.name}-{self.dataset}"

    @property
    def digest(self) -> str:
        """Of everything shown: written into the files, so that a stale picture can be told."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Sweep:
    """How a figure is made of cells: the methods with a curve, x of a cell (None: not in it), and what lies across.

    A variant of a method has a curve of its own: `variants` gives its name, its method and its x.
    """

    title: str
    x_label: str
    curves: Mapping[str, str]  # label by method or variant
    x: Callable[[Cell], float | None]
    levels: Callable[[str], Sequence[tuple[str, Cell]]] = lambda _: ()  # of a data set
    metric: str = "acc"
    log_x: bool = False
    variants: Mapping[str, tuple[str, Callable[[Cell], float | None]]] = field(default_factory=dict)

    def place(self, curve: str, cell: Cell) -> float | None:
        """x of the cell on a curve; None: not on it."""
        method, x = self.variants.get(curve, (curve, self.x))
        return x(cell) if cell.method == method else None


def drawing(name: str, rows: Mapping[Cell, Row], dataset: str, steps: int | None = None) -> Drawing | None:
    """The figure's numbers, or None with fewer than two points on every curve.

    Cut and full cells never meet: without a number of steps the one with the most points is shown, the larger of
    equals.
    """
    sweep = FIGURES[name]
    own = [row for row in rows.values() if _on_curve(sweep, row.cell, dataset) and steps in (None, row.cell.steps)]
    if not own:
        return None
    counts = Counter(row.cell.steps for row in own)
    steps = max(counts, key=lambda value: (counts[value], value))
    shown = [row for row in own if row.cell.steps == steps]
    levels = [(label, rows[cell]) for label, cell in _levels(sweep, dataset, steps) if cell in rows]
    check_same_start([*shown, *(row for _, row in levels)])
    curves = [_curve(sweep, curve, label, shown) for curve, label in sweep.curves.items()]
    if all(len(curve.points) < 2 for curve in curves):
        return None
    # of a variant there must be more than the training it shares with its method
    return Drawing(
        name,
        dataset,
        sweep.title,
        sweep.x_label,
        sweep.metric,
        steps,
        tuple(curve for curve in curves if len(curve.points) > (curve.method in sweep.variants)),
        tuple(Level(label, row.cell.method, row.summary("test", sweep.metric)) for label, row in levels),
        _paper_points(sweep, dataset) if name == "amount" and steps == STEPS else (),
        sweep.log_x,
    )


# The figures


def _option(
    key: str, *fixed: tuple[str, str], missing: Callable[[Cell], float | None]
) -> Callable[[Cell], float | None]:
    """x is an option of cells that have the `fixed` options and no others; `missing` gives it for those without any."""

    def x(cell: Cell) -> float | None:
        if cell.n_constraints != N_CONSTRAINTS or cell.noise:
            return None
        options = dict(cell.options)
        if not options:
            return missing(cell)
        if options.keys() != {key, *dict(fixed)} or any(options[name] != value for name, value in fixed):
            return None
        return float(options[key])

    return x


def _expecting(cell: Cell) -> float | None:
    """ρ of trainings that expect wrong pseudo-constraints; without the option it is 0."""
    options = dict(cell.options)
    if options.pop("pseudo_error_rate", None) != EXPECTED_ERRORS:
        return None
    return _option("flip_fraction", missing=lambda _: 0.0)(replace(cell, options=tuple(options.items())))


def _amount(cell: Cell) -> float | None:
    return None if cell.options or cell.noise else float(cell.n_constraints)


def _noise(cell: Cell) -> float | None:
    others = cell.options or cell.n_constraints != N_CONSTRAINTS or cell.noise_of != "all"
    return None if others else cell.noise


def _noise_alike(cell: Cell) -> float | None:
    """Of trainings with as many wrong links of either kind; without wrong ones it is 0."""
    return _noise(replace(cell, noise_of="all")) if cell.noise_of == "alike" or not cell.noise else None


def _expected_noise(cell: Cell) -> float | None:
    """Of trainings that expect wrong annotations."""
    return _noise(replace(cell, options=())) if cell.options == (("error_rate", EXPECTED_ERRORS),) else None


def _own_entropy(cell: Cell) -> float:
    return DATASETS[cell.dataset].tuned["constraintmatch"]["max_entropy"]


def _plain(dataset: str) -> list[tuple[str, Cell]]:
    return [("constrained", Cell(dataset, "constrained", N_CONSTRAINTS)), ("SCAN (the start)", Cell(dataset, "scan"))]


def _soft(dataset: str) -> list[tuple[str, Cell]]:
    return [("soft links", Cell(dataset, "constraintmatch", N_CONSTRAINTS)), *_plain(dataset)]


def _informative(dataset: str) -> list[tuple[str, Cell]]:
    fixed = Cell(dataset, "constraintmatch", N_CONSTRAINTS, options=(("max_entropy", 0.2),))
    return [("informative images, τ = 0.2", fixed), *_plain(dataset)]


_BOTH = {"constraintmatch": "ConstraintMatch", "constrained": "constrained"}
FIGURES: dict[str, Sweep] = {
    "flip": Sweep(
        "Wrong pseudo-labels: two clusters swapped",
        "share ρ of unconstrained images whose pseudo-label is flipped",
        {
            "constraintmatch": "ConstraintMatch",
            "any": "ConstraintMatch, any two (the published code)",
            "expecting": "ConstraintMatch, expecting a tenth (ours)",
            "pseudo_label": "naive pseudo-labelling",
        },
        _option("flip_fraction", missing=lambda _: 0.0),
        _plain,
        variants={
            "any": ("constraintmatch", _option("flip_fraction", ("flip_between", "any"), missing=lambda _: 0.0)),
            "expecting": ("constraintmatch", _expecting),
        },
    ),
    "links": Sweep(
        "Soft against hard pseudo-constraints",
        "threshold μ from which a hard link is a must-link",
        {"constraintmatch": "hard links"},
        _option("hard_threshold", ("links", "hard"), missing=lambda _: None),
        _soft,
    ),
    "selection": Sweep(
        "Informative against confident images",
        "confidence from which an image is selected",
        {"constraintmatch": "confident images"},
        _option("min_confidence", ("selection", "confidence"), missing=lambda _: None),
        _informative,
    ),
    "entropy": Sweep(
        "Sensitivity to τ",
        "largest normalised entropy τ of a selected image",
        {"constraintmatch": "ConstraintMatch"},
        _option("max_entropy", missing=_own_entropy),
        _plain,
    ),
    "amount": Sweep(
        "Number of constraints",
        "constraints",
        _BOTH,
        _amount,
        lambda dataset: [("SCAN (the start)", Cell(dataset, "scan"))],
        metric="nmi",
        log_x=True,
    ),
    "noise": Sweep(
        "Wrong annotations of constraints",
        "share of constraints with the wrong annotation",
        {
            **_BOTH,
            **{f"{method} alike": f"{label}, both kinds alike" for method, label in _BOTH.items()},
            **{f"{method} expecting": f"{label}, expecting a tenth (ours)" for method, label in _BOTH.items()},
        },
        _noise,
        lambda dataset: [("SCAN (the start)", Cell(dataset, "scan"))],
        variants={
            **{f"{method} alike": (method, _noise_alike) for method in _BOTH},
            **{f"{method} expecting": (method, _expected_noise) for method in _BOTH},
        },
    ),
}


def _on_curve(sweep: Sweep, cell: Cell, dataset: str) -> bool:
    plain = cell.dataset == dataset and cell.n_clusters == DATASETS[dataset].n_clusters
    return plain and any(sweep.place(curve, cell) is not None for curve in sweep.curves)


def _levels(sweep: Sweep, dataset: str, steps: int) -> list[tuple[str, Cell]]:
    """What lies across, trained as long as the curves; the start is not trained and fits all of them."""
    named = sweep.levels(dataset)
    return [(label, cell if cell.method == "scan" else replace(cell, steps=steps)) for label, cell in named]


def _curve(sweep: Sweep, name: str, label: str, rows: Sequence[Row]) -> Curve:
    points: dict[float, Summary] = {}
    for row in sorted(rows, key=lambda row: len(row.cell.options)):  # the set's own τ, given as an option: the same
        if (x := sweep.place(name, row.cell)) is not None:
            points.setdefault(x, row.summary("test", sweep.metric))
    return Curve(label, name, tuple(sorted(points.items())))


def _paper_points(sweep: Sweep, dataset: str) -> tuple[tuple[str, float, float], ...]:
    """Of its curves the paper prints what stands in Table I."""
    rows = [(method, n, published(TABLE_1, "test", method, n)) for method in sweep.curves for n in (5_000, 10_000)]
    values = [(method, float(n), row.value(dataset, sweep.metric)) for method, n, row in rows if row is not None]
    return tuple((method, x, value) for method, x, value in values if value is not None)


# Drawing: Okabe and Ito's colours, and another marker and dash for each method, on white: readable on a dark page too

_LOOKS: dict[str, tuple[str, str, Any]] = {
    "constraintmatch": ("#0072B2", "o", "-"),
    "constrained": ("#D55E00", "s", "--"),
    "pseudo_label": ("#009E73", "^", "-."),
    "any": ("#56B4E9", "v", (0, (4, 1.5))),
    "expecting": ("#CC79A7", "D", "-"),
    "constraintmatch alike": ("#009E73", "^", "-"),
    "constrained alike": ("#CC79A7", "X", "--"),
    "constraintmatch expecting": ("#56B4E9", "v", "-"),
    "constrained expecting": ("#E69F00", "D", "--"),
    "scan": ("#555555", "", ":"),
}
_STYLE: Any = {  # Any: the names that stubs of matplotlib allow differ by version
    "svg.hashsalt": "constraintmatch",  # else the ids in an SVG differ from one drawing to the next
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def draw(shown: Drawing, folder: Path | str) -> tuple[Path, Path]:
    """The figure's PNG and SVG, written as `NAME-DATASET` into the folder; the same numbers give the same bytes."""
    with _figure((6.4, 4.0)) as figure:
        axes = figure.subplots()
        for curve in shown.curves:
            _draw_curve(axes, curve)
        for level in shown.levels:
            _draw_level(axes, level, taken={curve.method for curve in shown.curves})
        for method, x, value in shown.paper:
            colour, marker, _ = _LOOKS[method]
            axes.plot(x, value, marker, mfc="none", mec=colour, ms=10, label="_")
        if shown.paper:
            axes.plot([], [], "o", mfc="none", mec="#222222", ms=10, label="hollow: the paper's values")
        _dress(axes, shown)
        return _save(figure, Path(folder) / shown.stem, shown.digest)


def _draw_curve(axes: "Axes", curve: Curve) -> None:
    colour, marker, dash = _LOOKS[curve.method]
    x = [place for place, _ in curve.points]
    means = [summary.mean for _, summary in curve.points]
    spreads = [summary.std or 0.0 for _, summary in curve.points]
    bars = spreads if any(spreads) else None
    axes.errorbar(x, means, bars, color=colour, marker=marker, ls=dash, capsize=3, lw=1.8, ms=6, label=curve.label)


def _draw_level(axes: "Axes", level: Level, taken: set[str]) -> None:
    colour, _, dash = _LOOKS[level.method]
    if level.method in taken:  # ConstraintMatch as the paper has it, across a curve of one of its variants
        colour, dash = "#CC79A7", (0, (6, 1.5))
    axes.axhline(level.summary.mean, color=colour, ls=dash, lw=1.6, label=level.label)


def _dress(axes: "Axes", shown: Drawing) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_title(f"{shown.heading}\n", loc="left", fontsize=11, fontweight="bold")
    axes.text(0, 1.025, shown.note, transform=axes.transAxes, fontsize=9, color="#444444")
    axes.set_xlabel(shown.x_label)
    axes.set_ylabel(f"{shown.metric.upper()} in %")
    if shown.log_x:
        axes.set_xscale("log")
        axes.set_xticks(sorted({x for curve in shown.curves for x, _ in curve.points}))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    names = [curve.label for curve in shown.curves]
    listed = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda entry: entry[1] not in names)
    handles, labels = [handle for handle, _ in listed], [label for _, label in listed]
    if len(listed) > 4:  # would hide points
        axes.figure.legend(handles, labels, fontsize=9, edgecolor="none", loc="outside lower center", ncols=2)
    else:
        axes.legend(handles, labels, fontsize=9, edgecolor="none", framealpha=0.9)


# The gallery


@dataclass(frozen=True, eq=False)
class GalleryPair:
    """Two images (2, h, w, c) with wrong pseudo-labels, and the pseudo-constraint between them, which is right."""

    images: NDArray[np.uint8]
    predicted: tuple[str, str]
    true: tuple[str, str]
    confidence: tuple[float, float]
    link: float  # the soft pseudo-constraint, 1 = must-link

    @property
    def same(self) -> bool:
        return self.true[0] == self.true[1]


def draw_gallery(pairs: Sequence[GalleryPair], folder: Path | str, name: str, note: str) -> tuple[Path, Path]:
    """The gallery's PNG and SVG: pairs in two columns, above each the link, below each image what was guessed."""
    if not pairs:
        raise InputError(f"{name}: no pair to show; choose a lower confidence or an earlier model")
    n_rows = (len(pairs) + 1) // 2
    height = 1.0 + 2.6 * n_rows
    with _figure((7.6, height), layout=None) as figure:  # by hand: long class names would leave images no room
        figure.suptitle("Wrong pseudo-labels, right pseudo-constraints", x=0.02, ha="left", fontsize=11, weight="bold")
        grid = figure.subplots(n_rows, 5, squeeze=False, width_ratios=[1, 1, 0.1, 1, 1])
        figure.subplots_adjust(0.03, 1.15 / height, 0.97, 1 - 0.7 / height, wspace=0.15, hspace=0.6)
        for axes in grid.flat:
            axes.set_axis_off()
        for place, pair in enumerate(pairs):
            row, column = divmod(place, 2)
            _draw_pair(grid[row, 3 * column], grid[row, 3 * column + 1], pair)
        figure.text(0.02, 0.12 / height, textwrap.fill(note, 105), fontsize=9, color="#444444")
        return _save(figure, Path(folder) / name, _gallery_digest(pairs, note))


def _draw_pair(left: "Axes", right: "Axes", pair: GalleryPair) -> None:
    kind, colour = ("must-link", "#0072B2") if pair.same else ("cannot-link", "#D55E00")
    left.set_title(f"pseudo-constraint {pair.link:.2f}: {kind}", loc="left", fontsize=9, color=colour, weight="bold")
    for axes, image, predicted, true, sure in zip(
        (left, right), pair.images, pair.predicted, pair.true, pair.confidence, strict=True
    ):
        axes.imshow(_thumbnail(image), cmap="gray", vmin=0, vmax=255, interpolation="none")
        lines = (f"says {predicted}, {100 * sure:.0f} %", f"is {true}")
        said = "\n".join(textwrap.fill(line.replace("_", " "), 24) for line in lines)  # CIFAR's names have underscores
        axes.text(0.5, -0.04, said, transform=axes.transAxes, ha="center", va="top", fontsize=8)


def _thumbnail(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    picture.thumbnail((LARGEST_THUMBNAIL, LARGEST_THUMBNAIL))  # only ever makes it smaller
    return np.asarray(picture)


def _gallery_digest(pairs: Sequence[GalleryPair], note: str) -> str:
    whole = hashlib.sha256(note.encode())
    for pair in pairs:
        whole.update(np.ascontiguousarray(pair.images).tobytes())
        whole.update(repr((pair.predicted, pair.true, pair.confidence, pair.link)).encode())
    return whole.hexdigest()[:16]


# Files


@contextmanager
def _figure(size: tuple[float, float], layout: Literal["constrained"] | None = "constrained") -> Iterator["Figure"]:
    """A figure without pyplot: no window, no state that outlives it."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the user has set
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=size, layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def _save(figure: "Figure", stem: Path, digest: str) -> tuple[Path, Path]:
    """Both files, without a date or a version in them, with the digest of what they show."""
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    for path, about in ((png, {"Software": None}), (svg, {"Date": None, "Creator": None})):
        _save_one(figure, path, {**about, "Description": digest})
    return png, svg


def _save_one(figure: "Figure", path: Path, about: Mapping[str, str | None]) -> None:
    write_atomically(path, lambda target: figure.savefig(target, format=path.suffix[1:], dpi=120, metadata=dict(about)))
