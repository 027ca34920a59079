"""The scores that the paper prints, and ours: finished cells, read back from JSON and grouped over the folds."""

import csv
import reprlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch.data.datasets import DATASETS
from constraintmatch.paper.grids import Cell, Option
from constraintmatch.training.run_folder import current_arguments

METRICS = ("acc", "nmi", "ari")

# What the paper prints, in percent


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
    scores: Mapping[str, tuple[float, ...]]  # ACC, NMI, ARI
    significant: tuple[str, ...] = ()

    def value(self, dataset: str, metric: str) -> float | None:
        """A score in percent; None where the paper has a dash."""
        scores = self.scores.get(dataset)
        return None if scores is None else scores[METRICS.index(metric)]


def published(rows: Iterable[PublishedRow], split: str, method: str, n_constraints: int | None) -> PublishedRow | None:
    """The printed row of one of our methods, or None."""
    wanted = (split, method, n_constraints)
    return next((row for row in rows if (row.split, row.method, row.n_constraints) == wanted), None)


def _read_published(table: str) -> tuple[PublishedRow, ...]:
    """The rows of a table; `published.csv` has a line for each row and data set."""
    rows: dict[tuple[str, str, str | None, int | None], list[dict[str, str]]] = {}
    with (files("constraintmatch.paper") / "published.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["table"] == table:
                n = int(line["pairs"]) if line["pairs"] else None
                rows.setdefault((line["split"], line["title"], line["method"] or None, n), []).append(line)
    found = []
    for row, lines in rows.items():
        scores = {line["dataset"]: tuple(float(line[metric]) for metric in METRICS) for line in lines}
        found.append(PublishedRow(*row, scores, tuple(line["dataset"] for line in lines if line["star"])))
    return tuple(found)


TABLE_1 = _read_published("1")
TABLE_2 = _read_published("2")  # the ablation
TABLE_3 = _read_published("3")  # overclustering: five outputs for each class


# Ours, read back

FORMAT = 1
FREE_SETTINGS = ("seed", "evaluate_every")  # may differ between the folds of a row
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
    content: Mapping[str, Any]  # all of its JSON


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
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        if (result := read_result(path)) is None:
            continue
        if not (name := result.cell.name) == result.content["name"] == path.stem:
            raise InputError(f"{path}: its settings are those of {name}; name it so, or move it away")
        if bool(cut := result.content.get("cut")) != result.cell.cut:
            raise InputError(f"{path}: says cut is {cut} of {result.cell.steps:,} steps; {_FIX}")
        found.append(result)
    return tuple(found)


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


def read_result(path: Path) -> Result | None:
    """A finished cell; None for results of other kinds. Another form is an InputError that names it."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("kind"), str):
        raise InputError(f"{path}: not a result of format {FORMAT}; {_FIX}")
    if content["kind"] != "cell":
        return None
    try:
        return _result(path, content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({type(error).__name__}: {error}); {_FIX}") from None


def _result(path: Path, content: Mapping[str, Any]) -> Result:
    """The result in its JSON; entries that are missing or of the wrong kind raise."""
    values, peak, start, data = content["cell"], content.get("peak_gib"), content["start"], dict(content["data"])
    if values["dataset"] not in DATASETS:
        raise ValueError(f"data set {values['dataset']!r} is not known")
    if odd := [key for key, value in values["options"].items() if not isinstance(value, Option)]:
        raise ValueError(f"option {odd[0]} is not a number or a text")
    counts = {key: values[key] for key in ("n_constraints", "fold", "n_clusters", "steps")}
    counts |= {f"data.{key}": data[key] for key in ("train", "test")}
    if odd := [key for key, value in counts.items() if type(value) is not int]:
        raise ValueError(f"{odd[0]} is not a whole number")
    if "half" in content:
        _percent("half.scores.test", content["half"]["scores"]["test"])
    return Result(
        path,
        Cell(**{**values, "options": tuple(sorted(values["options"].items()))}),
        str(start["name"]),
        str(start["weights"]),
        {split: _percent(f"scores.{split}", content["scores"][split]) for split in ("test", "train+test")},
        current_arguments(dict(content["arguments"]), path),
        dict(content["settings"]),
        float(content["seconds"]),
        None if peak is None else float(peak),
        dict(content["environment"]),
        data,
        content,
    )


def _percent(place: str, scores: Mapping[str, Any]) -> dict[str, float]:
    """The scores in percent; one out of its bounds raises."""
    for metric, lowest in _LOWEST.items():
        value = scores[metric]
        if type(value) not in (int, float) or not lowest - _ROUNDING <= value <= 1 + _ROUNDING:
            raise ValueError(f"{place}.{metric} is {reprlib.repr(value)}, not a number from {lowest:g} to 1")
    return {metric: 100 * scores[metric] for metric in METRICS}


def _check_alike(first: Result, second: Result) -> None:
    """An InputError if two folds of a row have other arguments or settings."""
    for name in ("arguments", "settings"):
        left, right = getattr(first, name), getattr(second, name)
        if name == "arguments" and left.keys() != right.keys():
            from constraintmatch.pipeline.config import method_arguments  # with torch: seldom needed

            # an argument that is newer than a result had its default there
            before = method_arguments(first.cell.method)
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
