"""The scores that the paper prints, and ours: finished cells, read back from JSON and grouped over the folds."""

import reprlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch.data.datasets import DATASETS
from constraintmatch.paper.grids import PAPER_SETS, Cell, Option
from constraintmatch.training.run_folder import current_arguments

__all__ = [
    "FORMAT",
    "FREE_SETTINGS",
    "METRICS",
    "TABLE_1",
    "TABLE_2",
    "TABLE_3",
    "PublishedRow",
    "Result",
    "Row",
    "Summary",
    "check_same_start",
    "compare",
    "find_rows",
    "is_whole",
    "published",
    "read_content",
    "read_results",
]

METRICS = ("acc", "nmi", "ari")

# What the paper prints, in percent

_Scores = tuple[float, float, float]  # ACC, NMI, ARI


@dataclass(frozen=True)
class PublishedRow:
    """One printed row: a model at one number of constraints, and its scores by data set.

    `method` is our name for it; the baselines that the paper quotes have none. `n_constraints` is None for the upper
    bounds, which have every label or every pair. `significant` are the sets with a star: p < 0.05 against the
    constrained competitor in all three scores.
    """

    split: str
    title: str
    method: str | None
    n_constraints: int | None
    scores: Mapping[str, _Scores]
    significant: tuple[str, ...] = ()

    def value(self, dataset: str, metric: str) -> float | None:
        """A score in percent; None where the paper has a dash."""
        scores = self.scores.get(dataset)
        return None if scores is None else scores[METRICS.index(metric)]


def published(rows: Iterable[PublishedRow], split: str, method: str, n_constraints: int | None) -> PublishedRow | None:
    """The printed row of one of our methods, or None."""
    wanted = (split, method, n_constraints)
    return next((row for row in rows if (row.split, row.method, row.n_constraints) == wanted), None)


def _row(split: str, title: str, method: str | None, n: int | None, *scores: _Scores | None) -> PublishedRow:
    """A row of Table I, with the scores in its order of columns; None is its dash."""
    found = {name: row for name, row in zip(PAPER_SETS, scores, strict=True) if row is not None}
    starred: tuple[str, ...] = PAPER_SETS if method == "constraintmatch" else ()
    if (split, n) == ("test", 10_000):  # the text says "all data sets"; this one has no star in the table
        starred = tuple(name for name in starred if name != "imagenet10")
    return PublishedRow(split, title, method, n, found, starred)


# fmt: off
TABLE_1 = (
  _row("test", "Supervised", "supervised", None,
    (93.80, 86.20, 87.00), (80.00, 68.00, 63.20), (80.60, 65.90, 63.10), None, None),
  _row("test", "Fully constrained", "fully_constrained", None,
    (94.86, 88.39, 89.11), (77.99, 68.37, 61.94), (90.49, 80.94, 80.47), (96.64, 93.45, 92.60), (67.10, 73.52, 58.13)),
  _row("test", "SCAN", "scan", 0,
    (87.60, 78.70, 75.80), (45.90, 46.80, 30.10), (76.70, 68.00, 61.60), (86.20, 81.57, 75.71), (47.20, 55.42, 35.87)),
  _row("test", "Constrained", "constrained", 5_000,
    (90.12, 80.52, 80.02), (50.99, 46.23, 32.63), (85.90, 74.62, 72.51), (93.12, 87.43, 85.49), (44.08, 43.27, 28.92)),
  _row("test", "ConstraintMatch", "constraintmatch", 5_000,
    (92.23, 84.64, 84.27), (54.19, 52.74, 37.84), (88.20, 78.20, 76.68), (94.68, 90.43, 88.61), (49.43, 55.23, 38.12)),
  _row("test", "Constrained", "constrained", 10_000,
    (90.89, 81.73, 81.47), (52.45, 46.57, 33.79), (88.21, 77.63, 76.38), (94.90, 90.42, 89.04), (45.52, 44.44, 30.10)),
  _row("test", "ConstraintMatch", "constraintmatch", 10_000,
    (93.17, 85.88, 85.92), (57.15, 54.37, 40.59), (90.08, 80.57, 79.81), (95.68, 92.09, 90.70), (50.73, 54.92, 38.34)),
  _row("train+test", "PICA", None, 0,
    (69.60, 59.10, 51.20), (33.70, 31.00, 17.10), (71.30, 61.10, 53.10), (87.00, 80.20, 76.10), (35.20, 35.20, 20.10)),
  _row("train+test", "MICE", None, 0,
    (83.50, 73.70, 69.80), (44.00, 43.60, 28.00), (75.20, 63.50, 57.50), None, (43.90, 42.30, 28.60)),
  _row("train+test", "CC", None, 0,
    (79.00, 70.50, 63.70), (42.90, 43.10, 26.60), (85.00, 76.40, 72.60), (89.30, 85.90, 82.20), (42.90, 44.50, 27.40)),
  _row("train+test", "TCC", None, 0,
    (90.60, 79.00, 73.30), (49.10, 47.90, 31.20), (81.40, 73.20, 68.90), (89.70, 84.80, 82.50), (59.50, 55.40, 41.70)),
  _row("train+test", "SCAN", "scan", 0,
    (88.53, 80.09, 77.72), (50.67, 47.72, 33.07), (81.28, 70.15, 65.22), (91.63, 84.00, 82.93), (44.06, 45.09, 30.75)),
  _row("train+test", "Constrained", "constrained", 5_000,
    (91.14, 82.30, 82.05), (51.63, 46.58, 33.37), (80.51, 68.38, 63.68), (95.09, 88.42, 89.49), (43.25, 38.82, 28.93)),
  _row("train+test", "ConstraintMatch", "constraintmatch", 5_000,
    (92.67, 85.12, 84.98), (54.16, 52.68, 37.79), (82.97, 71.13, 67.80), (95.61, 89.64, 90.59), (47.63, 47.82, 35.95)),
  _row("train+test", "Constrained", "constrained", 10_000,
    (92.21, 83.07, 84.08), (53.13, 47.20, 34.86), (89.90, 80.12, 79.49), (96.47, 91.18, 92.36), (44.17, 40.07, 30.13)),
  _row("train+test", "ConstraintMatch", "constraintmatch", 10_000,
    (93.61, 86.55, 86.80), (57.18, 53.37, 40.30), (91.30, 82.42, 82.13), (96.68, 91.59, 92.80), (49.34, 49.16, 37.37)),
)
# fmt: on


def _test_row(title: str, method: str, n: int, **scores: _Scores) -> PublishedRow:
    return PublishedRow("test", title, method, n, {name.replace("_", "-"): row for name, row in scores.items()})


TABLE_2 = (  # the ablation
    _test_row("SCAN", "scan", 0, cifar100_20=(45.90, 46.80, 30.10)),
    _test_row("+ constrained", "constrained", 10_000, cifar100_20=(52.45, 46.57, 33.79)),
    _test_row("+ pseudo-labelling", "pseudo_label", 10_000, cifar100_20=(55.38, 53.49, 39.98)),
    _test_row("+ pseudo-constraining", "constraintmatch", 10_000, cifar100_20=(57.15, 54.37, 40.59)),
)
TABLE_3 = (  # overclustering: five outputs for each class
    _test_row("SCAN", "scan", 0, cifar10=(34.68, 61.56, 34.52), cifar100_20=(29.88, 47.35, 23.23)),
    _test_row("Constrained", "constrained", 10_000, cifar10=(82.24, 75.40, 73.80), cifar100_20=(39.41, 44.34, 27.86)),
    _test_row(
        "ConstraintMatch", "constraintmatch", 10_000, cifar10=(88.89, 83.04, 82.06), cifar100_20=(43.65, 52.37, 34.88)
    ),
)


# Ours, read back

FORMAT = 1
FREE_SETTINGS = ("seed", "evaluate_every")  # may differ between the folds of a row
_OBJECTS = ("cell", "cell.options", "data", "start", "arguments", "settings", "scores", "scores.test")
_ENTRIES = (  # what an entry must be, in words and in Python, and its places
    ("an object", (dict,), (*_OBJECTS, "scores.train+test", "environment")),
    ("a text", (str,), ("name", "cell.dataset", "cell.method", "start.name", "start.weights")),
    ("a whole number", (int,), ("cell.n_constraints", "cell.fold", "cell.n_clusters", "cell.steps")),
    ("a whole number", (int,), ("data.train", "data.test")),
    ("a number", (int, float), ("cell.noise", "seconds")),
)
_LOWEST = {"acc": 0.0, "nmi": 0.0, "ari": -1.0}
_ROUNDING = 1e-6  # how far a score may be outside its bounds
_FIX = "move it away or choose another --results"


@dataclass(frozen=True)
class Result:
    """One finished cell. Scores are in percent, by split and metric; supervised training has no start in common."""

    path: Path
    cell: Cell
    start: str
    weights: str
    scores: Mapping[str, Mapping[str, float]]
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    seconds: float
    peak_gib: float | None
    environment: Mapping[str, Any]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n − 1) over folds; one fold has none."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """The folds of one cell, in order; `cell` is that of fold 0."""

    cell: Cell
    results: tuple[Result, ...]

    def summary(self, split: str, metric: str) -> Summary:
        values = [result.scores[split][metric] for result in self.results]
        return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def read_results(folder: Path | str) -> tuple[Result, ...]:
    """The finished cells of a folder, by name; results of other kinds are skipped, of other formats refused."""
    found = (_read(path) for path in sorted(Path(folder).glob("*.json")))
    return tuple(result for result in found if result is not None)


def find_rows(results: Iterable[Result]) -> dict[Cell, Row]:
    """The rows, by their cell at fold 0; folds that were not trained alike are an InputError that names the files."""
    folds: dict[Cell, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.cell.fold):
        folds.setdefault(replace(result.cell, fold=0), []).append(result)
    rows = {cell: Row(cell, tuple(found)) for cell, found in folds.items()}
    for row in rows.values():
        check_same_start([row])
        for result in row.results[1:]:
            _check_alike(row.results[0], result)
    return rows


def is_whole(dataset: str, data: Mapping[str, Any]) -> bool:
    """Whether the set had as many images as the paper's: a smaller copy is not compared with its values."""
    return (data["train"], data["test"]) == DATASETS[dataset].splits[::2]


def check_same_start(rows: Iterable[Row]) -> None:
    """An InputError that names two files if rows to be compared began with other weights or have other images."""
    sets: dict[str, Result] = {}
    starts: dict[str, Result] = {}
    for result in (result for row in rows for result in row.results):
        first, name = sets.setdefault(result.cell.dataset, result), result.cell.dataset
        if first.data != result.data:
            images = f"of other images of {name} ({_other_data(first.data, result.data)})"
            raise _unlike(first, result, images, "compared")
        first = result if result.start == "random" else starts.setdefault(result.start, result)
        if first.weights != result.weights:
            weights = f"from other weights of {result.start} ({first.weights}, {result.weights})"
            raise _unlike(first, result, weights, "compared")


def compare(ours: Row, theirs: Row, split: str, metric: str) -> tuple[tuple[float, ...], float] | None:
    """Gains in points on the folds that both rows have, and p of the one-sided Wilcoxon signed-rank test.

    None if they share no fold or differ in steps. Scores that differ by rounding alone are equal.
    """
    if ours.cell.steps != theirs.cell.steps:
        return None
    other = {result.cell.fold: result.scores[split][metric] for result in theirs.results}
    both = [(result.scores[split][metric], result.cell.fold) for result in ours.results if result.cell.fold in other]
    gains = tuple(round(value - other[fold], 9) for value, fold in both)
    return (gains, _signed_rank_p(gains)) if gains else None


def _signed_rank_p(gains: Sequence[float]) -> float:
    """p of "greater" over all 2^n signs, which is exact with ties too; equal folds do not count, as Wilcoxon has it."""
    from scipy.stats import PermutationMethod, wilcoxon

    moved = [gain for gain in gains if gain]
    if len(moved) < 2:
        return 0.5 if moved and moved[0] > 0 else 1.0
    every_sign = PermutationMethod(n_resamples=2 ** len(moved))
    return float(wilcoxon(moved, alternative="greater", method=every_sign).pvalue)


def read_content(path: Path) -> dict[str, Any] | None:
    """A finished cell's JSON; None for results of other kinds. Another form is an InputError that names it."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("kind"), str):
        raise InputError(f"{path}: not a result of format {FORMAT}; {_FIX}")
    if content["kind"] != "cell":
        return None
    if wrong := next(_wrong_entries(content), None):
        raise InputError(f"{path}: {wrong}; {_FIX}")
    return content


def _wrong_entries(content: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each entry of the wrong kind, and for each score out of its bounds."""
    for words, kinds, places in _ENTRIES:
        yield from (f"{place} is not {words}" for place in places if type(_entry(content, place)) not in kinds)
    half = content.get("half", {})
    if not isinstance(half, dict):
        yield "half is not an object"
    for place in ("scores.test", "scores.train+test", *(["half.scores.test"] if half else [])):
        for metric, lowest in _LOWEST.items():
            value = _entry(content, f"{place}.{metric}")
            if type(value) not in (int, float) or not lowest - _ROUNDING <= value <= 1 + _ROUNDING:
                yield f"{place}.{metric} is {reprlib.repr(value)}, not a number from {lowest:g} to 1"


def _entry(content: Mapping[str, Any], place: str) -> Any:
    """The value at a place such as "cell.fold"; None where there is none."""
    value: Any = content
    for key in place.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _read(path: Path) -> Result | None:
    content = read_content(path)
    if content is None:
        return None
    try:
        result = _result(path, content)
        name = result.cell.name
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path}: cannot be read ({reason}); {_FIX}") from None
    if not name == content["name"] == path.stem:
        raise InputError(f"{path}: its settings are those of {name}; name it so, or move it away")
    if bool(content.get("cut")) != result.cell.cut:
        raise InputError(f"{path}: says cut is {content.get('cut')} of {result.cell.steps:,} steps; {_FIX}")
    return result


def _result(path: Path, content: Mapping[str, Any]) -> Result:
    values, peak = content["cell"], content.get("peak_gib")
    if values["dataset"] not in DATASETS:
        raise ValueError(f"data set {values['dataset']!r} is not known")
    if odd := [key for key, value in values["options"].items() if not isinstance(value, Option)]:
        raise ValueError(f"option {odd[0]} is not a number or a text")
    return Result(
        path,
        Cell(**{**values, "options": tuple(sorted(values["options"].items()))}),
        content["start"]["name"],
        content["start"]["weights"],
        {
            split: {metric: 100 * content["scores"][split][metric] for metric in METRICS}
            for split in ("test", "train+test")
        },
        current_arguments(content["arguments"], path),
        content["settings"],
        content["seconds"],
        None if peak is None else float(peak),
        content["environment"],
        content["data"],
    )


def _check_alike(first: Result, second: Result) -> None:
    """An InputError if two folds of a row have other arguments or settings."""
    for name in ("arguments", "settings"):
        left, right = getattr(first, name), getattr(second, name)
        if name == "arguments" and left.keys() != right.keys():
            from constraintmatch.pipeline.config import method_arguments  # with torch: seldom needed

            # an argument that is newer than a result had its default there
            before = {key: parameter.default for key, parameter in method_arguments(first.cell.method).items()}
            left, right = {**before, **left}, {**before, **right}
        for key in sorted((left.keys() | right.keys()) - {*FREE_SETTINGS}):
            if left.get(key) != right.get(key):
                problem = f"{key} is {left.get(key)!r} in one, {right.get(key)!r} in the other"
                raise _unlike(first, second, problem, "averaged")


def _other_data(left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    """What differs: how many images there are, or else which."""
    kinds = {"train": "training", "test": "test"}
    counts = [
        f"{left[key]:,} and {right[key]:,} {kind} images" for key, kind in kinds.items() if left[key] != right[key]
    ]
    return ", ".join(counts) or f"fingerprints {left.get('fingerprint')} and {right.get('fingerprint')}"


def _unlike(first: Result, second: Result, problem: str, verb: str) -> InputError:
    both = f"{first.path} and {second.path}"
    return InputError(f"{both}: {problem}, so they are not {verb}; run one of them again or move it away")
