"""Finished cells, read back from their JSON: grouped to rows over the folds, averaged, compared fold by fold."""

import reprlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch.data.datasets import DATASETS
from constraintmatch.paper.grids import Cell, Option
from constraintmatch.paper.published import METRICS, SPLITS
from constraintmatch.training.run_folder import current_arguments

__all__ = [
    "FORMAT",
    "FREE_SETTINGS",
    "Comparison",
    "Result",
    "Row",
    "Summary",
    "check_same_start",
    "compare",
    "find_rows",
    "read_content",
    "read_results",
]

FORMAT = 1
_KEYS = ("name", "cell", "data", "start", "arguments", "settings", "scores", "seconds", "environment")
_OBJECTS = ("cell", "cell.options", "data", "start", "arguments", "settings", "scores", "scores.test")
_ENTRIES = (  # what they must be, in words and in Python, and where they stand
    ("an object", (dict,), (*_OBJECTS, "scores.train+test", "environment")),
    ("a text", (str,), ("name", "cell.dataset", "cell.method", "start.name", "start.weights")),
    ("a whole number", (int,), ("cell.n_constraints", "cell.fold", "cell.n_clusters", "cell.steps")),
    ("a whole number", (int,), ("data.train", "data.test")),
    ("a number", (int, float), ("cell.noise", "seconds")),
)
_LOWEST = {"acc": 0.0, "nmi": 0.0, "ari": -1.0}
_ROUNDING = 1e-6  # by so much a score may go beyond its bounds
_MEND = "move it away or choose another --results"
FREE_SETTINGS = ("seed", "evaluate_every")  # may differ between the folds of a row


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

    @property
    def whole(self) -> bool:
        """Whether the set had as many images as the paper's: a smaller copy is not set beside its values."""
        n_train, _, n_test = DATASETS[self.cell.dataset].splits
        return (self.data["train"], self.data["test"]) == (n_train, n_test)


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

    def values(self, split: str, metric: str) -> list[float]:
        return [result.scores[split][metric] for result in self.results]

    def summary(self, split: str, metric: str) -> Summary:
        values = self.values(split, metric)
        return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Comparison:
    """Gains on the folds that two rows share, in points, and p of the one-sided Wilcoxon signed-rank test."""

    gains: tuple[float, ...]
    p: float

    @property
    def smallest_p(self) -> float:
        """What p would be if every fold gained: with fewer than five folds no result is significant at 0.05."""
        return 0.5 ** len(self.gains)


def read_results(folder: Path | str) -> tuple[Result, ...]:
    """The finished cells of a folder, by name; results of other kinds are passed over, of other formats refused."""
    found = (_read(path) for path in sorted(Path(folder).glob("*.json")))
    return tuple(result for result in found if result is not None)


def find_rows(results: Iterable[Result]) -> dict[Cell, Row]:
    """The rows, by their cell at fold 0; folds that were not trained alike are an InputError that names the files."""
    folds: dict[Cell, list[Result]] = {}
    for result in results:
        folds.setdefault(replace(result.cell, fold=0), []).append(result)
    return {cell: _row(cell, found) for cell, found in folds.items()}


def check_same_start(rows: Iterable[Row]) -> None:
    """An InputError that names two files where rows that stand side by side began with other weights or images."""
    rows = list(rows)
    _check_same_data(result for row in rows for result in row.results)
    seen: dict[str, Result] = {}
    for result in (result for row in rows for result in row.results if result.start != "random"):
        first = seen.setdefault(result.start, result)
        if first.weights != result.weights:
            raise InputError(
                f"{first.path} and {result.path}: from other weights of {result.start} ({first.weights}, "
                f"{result.weights}), so they are not compared; run one of them again or move it away"
            )


def _check_same_data(results: Iterable[Result]) -> None:
    seen: dict[str, Result] = {}
    for result in results:
        first = seen.setdefault(result.cell.dataset, result)
        if first.data != result.data:
            raise InputError(
                f"{first.path} and {result.path}: of other images of {result.cell.dataset} "
                f"({_other_data(first.data, result.data)}), "
                "so they are not compared; run one of them again or move it away"
            )


def _other_data(left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    """What differs: how many there are, or else which."""
    kinds = {"train": "training", "test": "test"}
    told = [f"{left[key]:,} and {right[key]:,} {kind} images" for key, kind in kinds.items() if left[key] != right[key]]
    return ", ".join(told) or f"fingerprints {left.get('fingerprint')} and {right.get('fingerprint')}"


def compare(ours: Row, theirs: Row, split: str, metric: str) -> Comparison | None:
    """`ours` against `theirs` on the folds that both have; None where there are none. Cut and full never meet.

    Scores that differ by rounding alone are equal; equal folds say nothing and are left out, as Wilcoxon has it.
    """
    if ours.cell.steps != theirs.cell.steps:
        return None
    other = {result.cell.fold: result.scores[split][metric] for result in theirs.results}
    both = [(result.scores[split][metric], result.cell.fold) for result in ours.results if result.cell.fold in other]
    gains = tuple(round(value - other[fold], 9) for value, fold in both)
    return Comparison(gains, _signed_rank_p(gains)) if gains else None


def _signed_rank_p(gains: Sequence[float]) -> float:
    """p of "greater" over all 2^n signs, which is exact with ties too (SciPy's own exact method is not)."""
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
        raise InputError(f"{path}: not a result of format {FORMAT}; {_MEND}")
    if content["kind"] != "cell":
        return None
    if missing := [key for key in _KEYS if key not in content]:
        raise InputError(f"{path}: {', '.join(missing)} missing; {_MEND}")
    if wrong := next(_wrong_entries(content), None):
        raise InputError(f"{path}: {wrong}; {_MEND}")
    return content


def _wrong_entries(content: Mapping[str, Any]) -> Iterator[str]:
    """What is said of entries of the wrong kind, and of scores that are none."""
    for words, kinds, places in _ENTRIES:
        yield from (f"{place} is not {words}" for place in places if type(_entry(content, place)) not in kinds)
    half = content.get("half", {})
    if not isinstance(half, dict):
        yield "half is not an object"
    for place in ("scores.test", "scores.train+test", *(["half.scores.test"] if half else [])):
        for metric in METRICS:
            value, lowest = _entry(content, f"{place}.{metric}"), _LOWEST[metric]
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
        raise InputError(f"{path}: cannot be read ({reason}); {_MEND}") from None
    if not name == content["name"] == path.stem:
        raise InputError(f"{path}: its settings are those of {name}; name it so, or move it away")
    if bool(content.get("cut")) != result.cell.cut:
        raise InputError(f"{path}: says cut is {content.get('cut')} of {result.cell.steps:,} steps; {_MEND}")
    return result


def _result(path: Path, content: Mapping[str, Any]) -> Result:
    peak = content.get("peak_gib")
    return Result(
        path,
        _cell(content["cell"]),
        str(content["start"]["name"]),
        str(content["start"]["weights"]),
        {split: {metric: 100 * float(content["scores"][split][metric]) for metric in METRICS} for split in SPLITS},
        current_arguments(content["arguments"], path),
        content["settings"],
        float(content["seconds"]),
        None if peak is None else float(peak),
        content["environment"],
        content["data"],
    )


def _cell(values: Mapping[str, Any]) -> Cell:
    if values["dataset"] not in DATASETS:
        raise ValueError(f"data set {values['dataset']!r} is not known")
    if odd := [key for key, value in values["options"].items() if not isinstance(value, Option)]:
        raise ValueError(f"option {odd[0]} is not a number or a text")
    return Cell(**{**values, "options": tuple(sorted(values["options"].items()))})


def _row(cell: Cell, results: Sequence[Result]) -> Row:
    ordered = tuple(sorted(results, key=lambda result: result.cell.fold))
    row = Row(cell, ordered)
    check_same_start([row])
    for result in ordered[1:]:
        for name in ("arguments", "settings"):
            _check_alike(ordered[0], result, name)
    return row


def _check_alike(first: Result, second: Result, name: str) -> None:
    left, right = getattr(first, name), getattr(second, name)
    if name == "arguments" and left.keys() != right.keys():
        before = _defaults(first.cell.method)  # of an argument that came up later: what was done before
        left, right = {**before, **left}, {**before, **right}
    for key in sorted((left.keys() | right.keys()) - {*FREE_SETTINGS}):
        if left.get(key) != right.get(key):
            raise InputError(
                f"{first.path} and {second.path}: {key} is {left.get(key)!r} in one, {right.get(key)!r} in the other, "
                "so they are not averaged; run one of them again or move it away"
            )


def _defaults(method: str) -> dict[str, Any]:
    from constraintmatch.pipeline.config import method_arguments  # with torch: seldom needed

    return {name: parameter.default for name, parameter in method_arguments(method).items()}
