"""A cell is one training of the paper's protocol; a grid is the list of cells behind a table or a figure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import DATASETS, STEPS

FOLDS = 5
PAPER_SETS = ("cifar10", "cifar100-20", "stl10", "imagenet10", "imagenet-dogs")
NOISE_OF = ("all", "alike")  # which constraints are annotated wrongly
PAIRED = ("constrained", "constraintmatch", "pseudo_label")  # the methods that take constraints
Option = int | float | str
EXPECTED_ERRORS = 0.1  # not in the paper: the loss expects a tenth of the links to be wrong
MERGED_FIRST: tuple[tuple[str, Option], ...] = (("merge", True),)  # not in the paper: clusters are merged first
HEAD_FIRST: tuple[tuple[str, Option], ...] = (("head_steps", 1_000),)  # not in the paper: the head trains alone first


@dataclass(frozen=True)
class Cell:
    """One training: a data set, a method, a fold, and what differs from the paper's setting of that set.

    A fold is a sample of constraints and the seed of the training. `noise` is the share of wrong constraints.
    `noise_of` says whether it is a share of "all" of them, or of the must-links with "alike" many cannot-links, which
    keeps the number of each kind. `options` are arguments of the method or training settings. A cell with other than
    20,000 steps is cut.
    """

    dataset: str
    method: str  # or "scan": the start itself, evaluated
    n_constraints: int = 0
    fold: int = 0
    n_clusters: int = 0  # 0: as many as classes
    noise: float = 0.0
    options: tuple[tuple[str, Option], ...] = ()
    steps: int = STEPS
    noise_of: str = "all"

    def __post_init__(self) -> None:
        if self.noise_of not in NOISE_OF:
            raise InputError(f"unknown noise_of {self.noise_of!r}; known are {', '.join(NOISE_OF)}")
        if not self.noise:
            object.__setattr__(self, "noise_of", "all")
        if not self.n_clusters:
            object.__setattr__(self, "n_clusters", DATASETS[self.dataset].n_clusters)

    @property
    def cut(self) -> bool:
        return self.steps != STEPS and self.method != "scan"

    @property
    def wide(self) -> bool:
        """Whether there are more clusters than classes."""
        return self.n_clusters != DATASETS[self.dataset].n_clusters

    @property
    def name(self) -> str:
        """The name of its result: what differs from Table I's ConstraintMatch, in a fixed order."""
        parts = [self.dataset, self.method]
        parts += [str(self.n_constraints)] if self.n_constraints else []
        parts += [f"k{self.n_clusters}"] if self.wide else []
        parts += [f"noise{self.noise:g}{'' if self.noise_of == 'all' else self.noise_of}"] if self.noise else []
        parts += [f"{key}={value if isinstance(value, str) else f'{value:g}'}" for key, value in sorted(self.options)]
        parts += [] if self.method == "scan" else [f"fold{self.fold}"]
        return "-".join([*parts, *([f"steps{self.steps}"] if self.cut else [])])

    @property
    def start(self) -> str:
        """The name of the model folder it begins with; supervised training begins with random weights."""
        if self.method == "supervised":
            return "random"
        return f"scan-{self.dataset}" + (f"-{self.n_clusters}" if self.wide else "")

    def request(self) -> dict[str, Any]:
        """The cell as plain values, for its result; `noise_of`, which is newer, only if it is not "all"."""
        values = {**asdict(self), "options": dict(self.options)}
        return values if self.noise_of != "all" else {key: values[key] for key in values if key != "noise_of"}


Points = list[tuple[str, float, Cell]]


@dataclass(frozen=True)
class Grid:
    """The sets that the paper shows, and the cells of a table or a figure.

    `points` takes the plain cell of a set and a fold: ConstraintMatch with 10,000 constraints. It gives (curve, x,
    cell) for each point of a figure; the curve of a cell that is no point is "".
    """

    title: str
    sets: tuple[str, ...]
    points: Callable[[Cell], Points]

    def points_of(self, dataset: str, fold: int = 0) -> Points:
        return self.points(Cell(dataset, "constraintmatch", 10_000, fold))


def grid_cells(
    *names: str,
    sets: Sequence[str] | None = None,
    folds: Sequence[int] | None = None,
    steps: int = STEPS,
    methods: Sequence[str] | None = None,
    n_constraints: Sequence[int] | None = None,
) -> list[Cell]:
    """The cells of one or several grids, each once, fold by fold: a stopped queue leaves whole folds.

    Each grid takes those of the sets, methods and numbers of constraints that it has; one that no grid has is an error.
    """
    _check_asked(names, steps, sets=sets, folds=folds, methods=methods, constraints=n_constraints)
    found: dict[str, Cell] = {}
    for fold in range(FOLDS) if folds is None else folds:
        for grid in (GRIDS[name] for name in names):
            known = (*grid.sets, "digits")  # digits: a rehearsal on a CPU
            for dataset in grid.sets if sets is None else (name for name in dict.fromkeys(sets) if name in known):
                for _, _, cell in grid.points_of(dataset, fold):
                    ours = cell if cell.method == "scan" else replace(cell, steps=steps)
                    found[ours.name] = ours
    cells = list(found.values())
    _check_there("method", methods, dict.fromkeys(cell.method for cell in cells))
    amounts = sorted({cell.n_constraints for cell in cells if cell.method in PAIRED})
    _check_there("number of constraints", n_constraints, amounts)
    return [
        cell
        for cell in cells
        if (methods is None or cell.method in methods)
        and (n_constraints is None or cell.method not in PAIRED or cell.n_constraints in n_constraints)
    ]


def _check_asked(names: Sequence[str], steps: int, **lists: Sequence[Any] | None) -> None:
    """An InputError for what no grid has, and for an empty list, by the flag that it comes from."""
    if odd := [name for name in names if name not in GRIDS]:
        fix = "python docs/make_gallery.py SET makes it" if odd[0] == "gallery" else f"known are {', '.join(GRIDS)}"
        raise InputError(f"unknown table or figure {odd[0]!r}; {fix}")
    examples = {"sets": "cifar10", "folds": f"0-{FOLDS - 1}", "methods": "constrained", "constraints": "10000"}
    if empty := [name for name, values in lists.items() if values is not None and not values]:
        raise InputError(f"no {empty[0]} are left; name some: --{empty[0]} {examples[empty[0]]}")
    known = dict.fromkeys(dataset for name in names for dataset in GRIDS[name].sets)
    if odd := [dataset for dataset in lists["sets"] or () if dataset not in (*known, "digits")]:
        verb = "has" if len(names) == 1 else "have"
        raise InputError(f"{' and '.join(names)} {verb} no set {odd[0]!r}; there are {', '.join(known)}")
    if wrong := [fold for fold in lists["folds"] or () if not 0 <= fold < FOLDS]:
        raise InputError(f"fold {wrong[0]} does not exist; there are 0 to {FOLDS - 1}")
    if not 1 <= steps <= STEPS:
        raise InputError(f"{steps:,} steps: the paper's trainings have {STEPS:,}; a cut one has 1 or more of them")


def _check_there(what: str, asked: Sequence[Any] | None, known: Collection[Any]) -> None:
    shown = [f"{one:,}" if isinstance(one, int) else str(one) for one in known]
    if odd := [one for one in asked or () if one not in known]:
        raise InputError(f"no cell has the {what} {odd[0]!r}; there are {', '.join(shown) or 'none'}")


# The grids

_COMPARED = ("constraintmatch", "constrained")


def _no_points(*cells: Cell) -> Points:
    return [("", 0.0, cell) for cell in cells]


def _with(cell: Cell, **options: Option) -> Cell:
    return replace(cell, options=tuple(sorted(options.items())))


def _sweep(curve: str, cell: Cell, name: str, values: Sequence[float], **fixed: Option) -> Points:
    """The cell over values of one option."""
    return [(curve, value, _with(cell, **{**fixed, name: value})) for value in values]


def _table1(plain: Cell) -> Points:
    pairs = [replace(plain, method=method, n_constraints=n) for n in (10_000, 5_000) for method in _COMPARED]
    bounds = [replace(plain, method=method, n_constraints=0) for method in ("fully_constrained", "supervised")]
    return _no_points(Cell(plain.dataset, "scan"), *pairs, *bounds)


def _table2(plain: Cell) -> Points:
    return _no_points(
        Cell(plain.dataset, "scan"), *(replace(plain, method=name) for name in (*_COMPARED, "pseudo_label"))
    )


def _table3(plain: Cell) -> Points:
    """Both methods as the paper has them, with the head first, and with clusters merged first."""
    wide = 5 * plain.n_clusters
    trained = [replace(plain, method=method, n_clusters=wide) for method in _COMPARED]
    ours = [replace(cell, options=options) for options in (HEAD_FIRST, MERGED_FIRST) for cell in trained]
    return _no_points(Cell(plain.dataset, "scan", n_clusters=wide), *trained, *ours)


def _flip(plain: Cell) -> Points:
    """The two largest probabilities swapped, as the paper says; any two, as its published code does; and ours.

    Ours expects a tenth of the pseudo-constraints to be wrong. ρ = 0 is the plain cell, which Table II has too.
    """
    rates, some = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), (0.1, 0.3, 0.5, 0.7)
    naive = replace(plain, method="pseudo_label")
    return [
        ("constraintmatch", 0.0, plain),
        ("pseudo_label", 0.0, naive),
        *_sweep("constraintmatch", plain, "flip_fraction", rates),
        *_sweep("pseudo_label", naive, "flip_fraction", rates),
        ("any", 0.0, plain),
        *_sweep("any", plain, "flip_fraction", some, flip_between="any"),
        ("expecting", 0.0, _with(plain, pseudo_error_rate=EXPECTED_ERRORS)),
        *_sweep("expecting", plain, "flip_fraction", some, pseudo_error_rate=EXPECTED_ERRORS),
    ]


def _links(plain: Cell) -> Points:
    hard = _sweep("constraintmatch", plain, "hard_threshold", (0.1, 0.3, 0.5, 0.7, 0.9), links="hard")
    return [*_no_points(plain), *hard]


def _selection(plain: Cell) -> Points:
    """The figure has τ = 0.2, although the set's own may be 0.05."""
    sure = (0.7, 0.8, 0.9, 0.95, 0.99)
    confident = _sweep("constraintmatch", plain, "min_confidence", sure, selection="confidence")
    return [*_no_points(_with(plain, max_entropy=0.2)), *confident]


def _entropy(plain: Cell) -> Points:
    own = DATASETS[plain.dataset].tuned["constraintmatch"]["max_entropy"]
    others = [value for value in (0.025, 0.05, 0.1, 0.2, 0.3, 0.4) if value != own]
    return [("constraintmatch", own, plain), *_sweep("constraintmatch", plain, "max_entropy", others)]


def _amount(plain: Cell) -> Points:
    amounts = (2_000, 5_000, 10_000, 20_000, 40_000)
    trained = [(name, float(n), replace(plain, method=name, n_constraints=n)) for n in amounts for name in _COMPARED]
    return [*_no_points(Cell(plain.dataset, "scan")), *trained]


def _noise(plain: Cell) -> Points:
    """Both readings of the paper's noise, and ours: a loss that expects a tenth of the links to be wrong."""
    rates = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)
    noisy = [(method, rate, replace(plain, method=method, noise=rate)) for rate in rates for method in _COMPARED]
    alike = [(f"{method} alike", rate, replace(cell, noise_of="alike")) for method, rate, cell in noisy]
    ours = [(f"{method} expecting", rate, _with(cell, error_rate=EXPECTED_ERRORS)) for method, rate, cell in noisy]
    return [*noisy, *alike, *ours]


_BOTH, _HARD = ("cifar10", "cifar100-20"), ("cifar100-20", "cifar10")
GRIDS = {
    "table1": Grid("Comparison with the start, the constrained competitor and the upper bounds", PAPER_SETS, _table1),
    "table2": Grid("Ablation: what each part adds", _HARD, _table2),
    "table3": Grid("Overclustering: five times as many clusters as classes", _BOTH, _table3),
    "flip": Grid("Robustness to wrong pseudo-labels: the mode flip ρ", _HARD, _flip),
    "links": Grid("Soft against hard pseudo-constraints over μ", _HARD, _links),
    "selection": Grid("Informative against confident images", _HARD, _selection),
    "entropy": Grid("Sensitivity to τ", _HARD, _entropy),
    "amount": Grid("Number of constraints", _HARD, _amount),
    "noise": Grid("Wrong annotations of constraints", _HARD, _noise),
}
