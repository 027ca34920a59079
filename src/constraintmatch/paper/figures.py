"""The paper's figures from finished cells, as numbers."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from constraintmatch.data.datasets import DATASETS
from constraintmatch.paper.grids import GRIDS, PAIRED, STEPS, Cell
from constraintmatch.paper.results import TABLE_1, Row, Summary, check_same_start, published

__all__ = ["FIGURES", "Curve", "Drawing", "Level", "drawing"]

_BOTH = {"constraintmatch": "ConstraintMatch", "constrained": "constrained"}
_START = "SCAN (the start)"

# of each figure its title, its x, the label of each curve, and the levels across it
FIGURES: dict[str, tuple[str, str, Mapping[str, str], tuple[str, ...]]] = {
    "flip": (
        "Wrong pseudo-labels: two clusters swapped",
        "share ρ of unconstrained images whose pseudo-label is flipped",
        {
            "constraintmatch": "ConstraintMatch",
            "any": "ConstraintMatch, any two (the published code)",
            "expecting": "ConstraintMatch, expecting a tenth (ours)",
            "pseudo_label": "naive pseudo-labelling",
        },
        ("constrained", _START),
    ),
    "links": (
        "Soft against hard pseudo-constraints",
        "threshold μ from which a hard link is a must-link",
        {"constraintmatch": "hard links"},
        ("soft links", "constrained", _START),
    ),
    "selection": (
        "Informative against confident images",
        "confidence from which an image is selected",
        {"constraintmatch": "confident images"},
        ("informative images, τ = 0.2", "constrained", _START),
    ),
    "entropy": (
        "Sensitivity to τ",
        "largest normalised entropy τ of a selected image",
        {"constraintmatch": "ConstraintMatch"},
        ("constrained", _START),
    ),
    "amount": ("Number of constraints", "constraints", _BOTH, (_START,)),
    "noise": (
        "Wrong annotations of constraints",
        "share of constraints with the wrong annotation",
        {
            **_BOTH,
            **{f"{method} alike": f"{label}, both kinds alike" for method, label in _BOTH.items()},
            **{f"{method} expecting": f"{label}, expecting a tenth (ours)" for method, label in _BOTH.items()},
        },
        (_START,),
    ),
}


@dataclass(frozen=True)
class Curve:
    """One line of points (x, score over the folds), in order of x."""

    label: str
    method: str  # or a variant of it: its colours
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
    paper: tuple[tuple[str, float, float], ...] = ()  # (method, x, value) that the paper's tables print
    log_x: bool = False

    @property
    def note(self) -> str:
        """Set, constraints and folds, which belong to the figure wherever it is shown."""
        counts = sorted({summary.n for curve in self.curves for _, summary in curve.points})
        folds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        pairs = "" if self.name == "amount" else ", 10,000 pairs"
        return f"{DATASETS[self.dataset].title} test{pairs}, {folds} {'fold' if folds == '1' else 'folds'}"

    @property
    def heading(self) -> str:
        """The title; that of a cut figure says so."""
        return self.title + (f", cut ({self.steps:,} steps)" if self.steps < STEPS else "")


def drawing(name: str, rows: Mapping[Cell, Row], dataset: str, steps: int | None = None) -> Drawing | None:
    """The figure's numbers, or None with fewer than two points on every curve.

    Cut and full cells never meet: without a number of steps the one with the most points is shown, the larger of
    equals.
    """
    title, x_label, labels, across = FIGURES[name]
    metric = "nmi" if name == "amount" else "acc"
    points = [point for point in GRIDS[name].points_of(dataset) if point[0]]
    own = {cell for _, _, cell in points}
    counts = Counter(cell.steps for cell in rows if replace(cell, steps=STEPS) in own and steps in (None, cell.steps))
    if not counts:
        return None
    steps = max(counts, key=lambda value: (counts[value], value))
    shown = [(curve, x, rows[cut]) for curve, x, cell in points if (cut := replace(cell, steps=steps)) in rows]
    levels = [(label, rows[cell]) for label, cell in _levels(across, dataset, steps) if cell in rows]
    check_same_start([*(row for _, _, row in shown), *(row for _, row in levels)])
    curves = []
    for curve, label in labels.items():
        found = sorted((x, row.summary("test", metric)) for its, x, row in shown if its == curve)
        curves.append(Curve(label, curve, tuple(found)))
    if all(len(curve.points) < 2 for curve in curves):
        return None
    return Drawing(
        name,
        dataset,
        title,
        x_label,
        metric,
        steps,
        # a variant is shown if it has more than the training that it shares with its method
        tuple(curve for curve in curves if len(curve.points) > (curve.method not in PAIRED)),
        tuple(Level(label, row.cell.method, row.summary("test", metric)) for label, row in levels),
        _paper_points(dataset, metric) if name == "amount" and steps == STEPS else (),
        log_x=name == "amount",
    )


def _levels(labels: Sequence[str], dataset: str, steps: int) -> Iterator[tuple[str, Cell]]:
    """The cells across a figure, trained as long as its curves; the start is not trained."""
    plain = Cell(dataset, "constraintmatch", 10_000, steps=steps)
    known = {
        "soft links": plain,
        "informative images, τ = 0.2": replace(plain, options=(("max_entropy", 0.2),)),
        "constrained": replace(plain, method="constrained"),
        _START: Cell(dataset, "scan"),
    }
    yield from ((label, known[label]) for label in labels)


def _paper_points(dataset: str, metric: str) -> tuple[tuple[str, float, float], ...]:
    """The points of the curves over the number of constraints that Table I has."""
    rows = [(method, n, published(TABLE_1, "test", method, n)) for method in _BOTH for n in (5_000, 10_000)]
    values = [(method, float(n), row.value(dataset, metric)) for method, n, row in rows if row is not None]
    return tuple((method, x, value) for method, x, value in values if value is not None)
