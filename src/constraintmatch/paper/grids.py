"""A cell is one training of the paper's protocol; a grid is the list of cells behind a table or a figure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import DATASETS, STEPS

__all__ = [
    "EXPECTED_ERRORS",
    "FOLDS",
    "GRIDS",
    "NOISE_OF",
    "PAPER_SETS",
    "STEPS",
    "Cell",
    "Grid",
    "grid_cells",
]

FOLDS = 5
PAPER_SETS = ("cifar10", "cifar100-20", "stl10", "imagenet10", "imagenet-dogs")
NOISE_OF = ("all", "alike")  # which constraints are annotated wrongly
PAIRED = ("constrained", "constraintmatch", "pseudo_label")  # the methods that take constraints
Option = int | float | str
EXPECTED_ERRORS = 0.1  # of ours, beside the paper's curves: a tenth of the links, however many are wrong
MERGED_FIRST: tuple[tuple[str, Option], ...] = (("merge", True),)  # ours: what the pairs join is merged before
HEAD_FIRST: tuple[tuple[str, Option], ...] = (("head_steps", 1_000),)  # ours: the head learns alone before the network


@dataclass(frozen=True)
class Cell:
    """One training: a data set, a method, a fold, and what differs from the paper's setting of that set.

    A fold is a sample of constraints and the seed of the training. `noise` is the share of constraints with the wrong
    annotation, among "all" of them or among must-links and "alike" many cannot-links (`noise_of`), so that there are as
    many of each as before. `options` are arguments of the method or training settings. Other than 20,000 steps make a
    cell cut.
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
    def name(self) -> str:
        """The name of its result: what differs from Table I's ConstraintMatch, in a fixed order."""
        parts = [self.dataset, self.method]
        parts += [str(self.n_constraints)] if self.n_constraints else []
        parts += [f"k{self.n_clusters}"] if self.n_clusters != DATASETS[self.dataset].n_clusters else []
        parts += [f"noise{self.noise:g}{'' if self.noise_of == 'all' else self.noise_of}"] if self.noise else []
        parts += [f"{key}={value if isinstance(value, str) else f'{value:g}'}" for key, value in sorted(self.options)]
        parts += [] if self.method == "scan" else [f"fold{self.fold}"]
        return "-".join([*parts, *([f"steps{self.steps}"] if self.cut else [])])

    @property
    def start(self) -> str:
        """The model folder it begins with, by name; supervised training begins with random weights."""
        if self.method == "supervised":
            return "random"
        wide = self.n_clusters != DATASETS[self.dataset].n_clusters
        return f"scan-{self.dataset}" + (f"-{self.n_clusters}" if wide else "")

    def request(self) -> dict[str, Any]:
        """The cell as plain values, for its result; `noise_of`, which came later, only where it says something."""
        values = {**asdict(self), "options": dict(self.options)}
        return values if self.noise_of != "all" else {key: values[key] for key in values if key != "noise_of"}


@dataclass(frozen=True)
class Grid:
    """The cells of a table or a figure, as a function of data set and fold, and the sets that the paper shows."""

    title: str
    sets: tuple[str, ...]
    cells: Callable[[str, int], Sequence[Cell]]


def grid_cells(
    *names: str,
    sets: Sequence[str] | None = None,
    folds: Sequence[int] | None = None,
    steps: int | None = None,
    methods: Sequence[str] | None = None,
    n_constraints: Sequence[int] | None = None,
) -> list[Cell]:
    """The cells of one or several grids, fold by fold so that a stopped queue leaves whole folds; each once.

    Each grid takes those of the sets, methods and numbers of constraints that it has; one that no grid has is an error.
    """
    grids = [_grid(name) for name in names]
    _check_sets(names, grids, sets)
    _check_some(sets=sets, folds=folds, methods=methods, constraints=n_constraints)
    _check_numbers(folds, steps)
    found: dict[str, Cell] = {}
    for fold in range(FOLDS) if folds is None else folds:
        for grid in grids:
            for dataset in _sets_of(grid, sets):
                for cell in grid.cells(dataset, fold):
                    ours = cell if steps is None or cell.method == "scan" else replace(cell, steps=steps)
                    found[ours.name] = ours
    cells = list(found.values())
    _check_there("method", methods, dict.fromkeys(cell.method for cell in cells))
    paired = sorted({cell.n_constraints for cell in cells if cell.method in PAIRED})
    _check_there("number of constraints", n_constraints, paired)
    return [cell for cell in cells if _wanted(cell, methods, n_constraints)]


def _grid(name: str) -> Grid:
    if name not in GRIDS:
        raise InputError(f"unknown table or figure {name!r}; known are {', '.join(GRIDS)}, gallery")
    return GRIDS[name]


def _sets_of(grid: Grid, sets: Sequence[str] | None) -> tuple[str, ...]:
    known = (*grid.sets, "digits")  # digits: a rehearsal on a CPU
    return grid.sets if sets is None else tuple(name for name in dict.fromkeys(sets) if name in known)


def _check_sets(names: Sequence[str], grids: Sequence[Grid], sets: Sequence[str] | None) -> None:
    known = dict.fromkeys(name for grid in grids for name in grid.sets)
    if odd := [name for name in sets or () if name not in (*known, "digits")]:
        verb = "has" if len(names) == 1 else "have"
        raise InputError(f"{' and '.join(names)} {verb} no set {odd[0]!r}; there are {', '.join(known)}")


def _check_some(**asked: Sequence[Any] | None) -> None:
    """An InputError for a list without entries, by the flag that it comes from."""
    examples = {"sets": "cifar10", "folds": f"0-{FOLDS - 1}", "methods": "constrained", "constraints": "10000"}
    if empty := [name for name, values in asked.items() if values is not None and not values]:
        raise InputError(f"no {empty[0]} are left; name some: --{empty[0]} {examples[empty[0]]}")


def _check_numbers(folds: Sequence[int] | None, steps: int | None) -> None:
    if folds is not None and (wrong := [fold for fold in folds if not 0 <= fold < FOLDS]):
        raise InputError(f"fold {wrong[0]} does not exist; there are 0 to {FOLDS - 1}")
    if steps is not None and not 1 <= steps <= STEPS:
        raise InputError(f"{steps:,} steps: the paper's trainings have {STEPS:,}; a cut one has 1 or more of them")


def _check_there(what: str, asked: Sequence[Any] | None, known: Collection[Any]) -> None:
    told = [f"{one:,}" if isinstance(one, int) else str(one) for one in known]
    if odd := [one for one in asked or () if one not in known]:
        raise InputError(f"no cell has the {what} {odd[0]!r}; there are {', '.join(told) or 'none'}")


def _wanted(cell: Cell, methods: Sequence[str] | None, n_constraints: Sequence[int] | None) -> bool:
    of_method = methods is None or cell.method in methods
    return of_method and (n_constraints is None or cell.method not in PAIRED or cell.n_constraints in n_constraints)


def _table1(dataset: str, fold: int) -> list[Cell]:
    trained = [
        Cell(dataset, method, amount, fold)
        for amount in (10_000, 5_000)
        for method in ("constraintmatch", "constrained")
    ]
    return [
        Cell(dataset, "scan"),
        *trained,
        *(Cell(dataset, name, 0, fold) for name in ("fully_constrained", "supervised")),
    ]


def _table2(dataset: str, fold: int) -> list[Cell]:
    methods = ("constraintmatch", "constrained", "pseudo_label")
    return [Cell(dataset, "scan"), *(Cell(dataset, method, 10_000, fold) for method in methods)]


def _table3(dataset: str, fold: int) -> list[Cell]:
    """Both methods as the paper has them, with the head first, and with clusters merged first."""
    wide = 5 * DATASETS[dataset].n_clusters
    trained = [Cell(dataset, method, 10_000, fold, n_clusters=wide) for method in ("constraintmatch", "constrained")]
    ours = [replace(cell, options=options) for options in (HEAD_FIRST, MERGED_FIRST) for cell in trained]
    return [Cell(dataset, "scan", n_clusters=wide), *trained, *ours]


def _sweep(method: str, dataset: str, fold: int, name: str, values: Sequence[Option], **fixed: Option) -> list[Cell]:
    """The method at 10,000 constraints over values of one option."""
    return [
        Cell(dataset, method, 10_000, fold, options=tuple(sorted({**fixed, name: value}.items()))) for value in values
    ]


def _flip(dataset: str, fold: int) -> list[Cell]:
    """ρ = 0 is the cell without the option: one training, shared with Table II.

    ConstraintMatch with the two largest swapped, as the paper says; with any two, as its published code does; and ours,
    which expects a tenth of the pseudo-constraints to be wrong.
    """
    rates = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    both = ("constraintmatch", "pseudo_label")
    plain = [Cell(dataset, method, 10_000, fold) for method in both]
    largest = [cell for method in both for cell in _sweep(method, dataset, fold, "flip_fraction", rates)]
    some = (0.1, 0.3, 0.5, 0.7)
    any_two = _sweep("constraintmatch", dataset, fold, "flip_fraction", some, flip_between="any")
    expected = _sweep("constraintmatch", dataset, fold, "flip_fraction", some, pseudo_error_rate=EXPECTED_ERRORS)
    return [
        *plain,
        *largest,
        *any_two,
        *_sweep(both[0], dataset, fold, "pseudo_error_rate", (EXPECTED_ERRORS,)),
        *expected,
    ]


def _links(dataset: str, fold: int) -> list[Cell]:
    hard = _sweep("constraintmatch", dataset, fold, "hard_threshold", (0.1, 0.3, 0.5, 0.7, 0.9), links="hard")
    return [Cell(dataset, "constraintmatch", 10_000, fold), *hard]


def _selection(dataset: str, fold: int) -> list[Cell]:
    """The figure holds τ at 0.2, although the set's own is 0.05."""
    sure = (0.7, 0.8, 0.9, 0.95, 0.99)
    confident = _sweep("constraintmatch", dataset, fold, "min_confidence", sure, selection="confidence")
    return [*_sweep("constraintmatch", dataset, fold, "max_entropy", (0.2,)), *confident]


def _entropy(dataset: str, fold: int) -> list[Cell]:
    own = DATASETS[dataset].tuned["constraintmatch"]["max_entropy"]
    values = [value for value in (0.025, 0.05, 0.1, 0.2, 0.3, 0.4) if value != own]
    return [
        Cell(dataset, "constraintmatch", 10_000, fold),
        *_sweep("constraintmatch", dataset, fold, "max_entropy", values),
    ]


def _amount(dataset: str, fold: int) -> list[Cell]:
    amounts = (2_000, 5_000, 10_000, 20_000, 40_000)
    methods = ("constraintmatch", "constrained")
    return [Cell(dataset, "scan"), *(Cell(dataset, method, n, fold) for n in amounts for method in methods)]


def _noise(dataset: str, fold: int) -> list[Cell]:
    """Both readings of the paper's noise, and ours: a loss that expects a tenth of the links to be wrong."""
    rates, methods = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4), ("constraintmatch", "constrained")
    plain = [Cell(dataset, method, 10_000, fold, noise=rate) for rate in rates for method in methods]
    expecting = [replace(cell, options=(("error_rate", EXPECTED_ERRORS),)) for cell in plain]
    return [*plain, *(replace(cell, noise_of="alike") for cell in plain if cell.noise), *expecting]


_BOTH, _HARD = ("cifar10", "cifar100-20"), ("cifar100-20", "cifar10")
GRIDS: Mapping[str, Grid] = MappingProxyType(
    {
        "table1": Grid(
            "Comparison with the start, the constrained competitor and the upper bounds", PAPER_SETS, _table1
        ),
        "table2": Grid("Ablation: what each part adds", _HARD, _table2),
        "table3": Grid("Overclustering: five times as many clusters as classes", _BOTH, _table3),
        "flip": Grid("Robustness to wrong pseudo-labels: the mode flip ρ", _HARD, _flip),
        "links": Grid("Soft against hard pseudo-constraints over μ", _HARD, _links),
        "selection": Grid("Informative against confident images", _HARD, _selection),
        "entropy": Grid("Sensitivity to τ", _HARD, _entropy),
        "amount": Grid("Number of constraints", _HARD, _amount),
        "noise": Grid("Wrong annotations of constraints", _HARD, _noise),
    }
)
