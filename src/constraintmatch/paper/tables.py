"""The paper's tables and figures with our numbers next to its own, as Markdown, for a page or a terminal."""

import statistics
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby, product
from pathlib import Path
from typing import Any

from constraintmatch.data.datasets import DATASETS, STEPS
from constraintmatch.paper import results
from constraintmatch.paper.grids import GRIDS, HEAD_FIRST, MERGED_FIRST, PAIRED, Cell
from constraintmatch.paper.results import METRICS, PublishedRow, Row, Summary

TABLES = {"table1": results.TABLE_1, "table2": results.TABLE_2, "table3": results.TABLE_3}
TITLES = {
    "scan": "SCAN (the start)",
    "constrained": "Constrained",
    "pseudo_label": "Pseudo-labelling",
    "constraintmatch": "ConstraintMatch",
    "fully_constrained": "Fully constrained",
    "supervised": "Supervised",
}
DASH = "–"
NOT_YET = "not run yet"
_NOT_RUN = "not run here"
_VARIANTS = {HEAD_FIRST: ", the head first (ours)", MERGED_FIRST: ", clusters merged first (ours)"}  # by options

Rows = Mapping[Cell, Row]
Line = tuple[str, Row | None, PublishedRow | None]  # title, our row if it was run, the paper's if it has one


def part_text(
    name: str, results_folder: Path | str, sets: Sequence[str] | None = None, steps: int | None = None
) -> str:
    """One table or figure as Markdown; a figure as its numbers, from trainings of this number of steps."""
    rows = results.find_rows(results.read_results(results_folder))
    if name in TABLES:
        return table(name, rows, sets)
    found = [drawing(name, rows, dataset, steps) for dataset in sets or GRIDS[name].sets]
    shown = [f"{one.heading}; {one.note}\n\n{figure_numbers(one)}" for one in found if one is not None]
    return "\n\n".join(shown) or not_run(name)


def not_run(name: str) -> str:
    return f"{NOT_YET.capitalize()} (`constraintmatch paper {name}`)."


# Forms


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with aligned columns in plain text too; the first `left` of them are left-aligned."""
    widths = [max(3, *map(len, column)) for column in zip(header, *lines, strict=True)]
    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    form = " | ".join(f"{{:{'<' if column < left else '>'}{width}}}" for column, width in enumerate(widths))
    return "\n".join(f"| {form.format(*line)} |" for line in (header, rule, *lines))


def spread(summary: Summary) -> str:
    """Mean ± standard deviation; one fold has no ±."""
    return f"{summary.mean:.2f}" + ("" if summary.std is None else f" ± {summary.std:.2f}")


def signed(value: float | None) -> str:
    """A difference with its sign, a dash for none."""
    return DASH if value is None else f"{value + 0.0:+.2f}"


def number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


# The tables


def table(name: str, rows: Rows, sets: Sequence[str] | None = None) -> str:
    """A table, set by set: Table I on the test images and on Train(+Test), II and III on the test images.

    Table II, the ablation, is in the paper for CIFAR-100-20 only. Table III, overclustering, has five times as many
    outputs as classes. Other sets than the paper's appear when they were run.
    """
    parts: list[str] = []
    splits = dict.fromkeys(printed.split for printed in TABLES[name])
    for dataset, split in product(sets or GRIDS[name].sets, splits):
        n_clusters = (5 if name == "table3" else 1) * DATASETS[dataset].n_clusters
        printed_here = [printed for printed in TABLES[name] if printed.split == split]
        lines = [line for printed in printed_here for line in _lines(rows, dataset, printed, n_clusters)]
        if split == "train+test":  # the paper has no upper bounds here
            bounds = [(TITLES[bound], rows.get(Cell(dataset, bound))) for bound in ("supervised", "fully_constrained")]
            lines = [*((title, row, None) for title, row in bounds if row), *lines]
        part = {"test": ", Test", "train+test": ", Train(+Test)"}[split] if name == "table1" else ""
        part = f", {n_clusters} outputs" if name == "table3" else part
        parts += _part(DATASETS[dataset].title + part, lines, dataset, split)
    return "\n\n".join(parts)


def _lines(rows: Rows, dataset: str, printed: PublishedRow, n_clusters: int) -> list[Line]:
    """The line of a printed row, one more for each cut run of its cell, and those of the variants that were run."""
    if printed.method is None:
        return [(printed.title, None, printed)]
    title, plain = TITLES[printed.method], Cell(dataset, printed.method, printed.n_constraints or 0, 0, n_clusters)
    lines: list[Line] = []
    for options, variant in {(): "", **_VARIANTS}.items():
        wanted = replace(plain, options=options)
        if wanted in rows or not options:
            lines.append((title + variant, rows.get(wanted), printed))
        cut = [row for cell, row in rows.items() if cell.cut and replace(cell, steps=wanted.steps) == wanted]
        longest_first = sorted(cut, key=lambda row: -row.cell.steps)
        lines += [(f"{title}{variant}, cut ({row.cell.steps:,} steps)", row, printed) for row in longest_first]
    return lines


def _part(title: str, lines: Sequence[Line], dataset: str, split: str) -> Iterator[str]:
    """A table with its heading and comparisons; only the paper's values if nothing was run."""
    if any(row for _, row, _ in lines):
        yield f"### {title}"
        yield from _compared(lines, dataset, split)
        return
    printed = [line for line in lines if _paper(line, dataset, METRICS[0]) is not None]
    yield f"### {title}: {_NOT_RUN}" + ("" if printed else ", and not in the paper")
    if printed:
        header = ["the paper's values", "pairs", *(metric.upper() for metric in METRICS)]
        shown = [[line[0], _amount(line), *(_starred(line, dataset, name) for name in METRICS)] for line in printed]
        yield markdown(header, shown)


def _compared(lines: Sequence[Line], dataset: str, split: str) -> Iterator[str]:
    results.check_same_start(row for _, row, _ in lines if row)
    header = ["", "pairs", "folds", *(name for metric in METRICS for name in (metric.upper(), "paper", "diff."))]
    yield markdown(header, [_compared_line(line, dataset, split) for line in lines])
    start = next((line for line in lines if line[1] and line[1].cell.method == "scan"), None)
    if start and (gains := [gain for line in lines if (gain := _gain_line(line, start, dataset, split))]):
        names = [name for metric in METRICS for name in (metric.upper(), "paper")]
        yield "Over the start, in points (ours over our start, the paper's over its SCAN row):"
        yield markdown(["", "pairs", *names], gains)
    if tested := [f"- {sentence}" for sentence in _wilcoxon(lines, split)]:
        yield "ConstraintMatch over constrained on the same folds (Wilcoxon signed-rank, one-sided):"
        yield "\n".join(tested)


def _compared_line(line: Line, dataset: str, split: str) -> list[str]:
    title, row, printed = line
    if row is None:
        folds = _NOT_RUN if printed and printed.method else DASH
    else:
        folds = DASH if row.cell.method == "scan" else str(len(row.results))
    cells = [title, _amount(line), folds]
    for metric in METRICS:
        ours, paper = row.summary(split, metric) if row else None, _paper(line, dataset, metric)
        difference = ours.mean - paper if ours and paper is not None else None
        cells += [spread(ours) if ours else DASH, _starred(line, dataset, metric), signed(difference)]
    return cells


def _gain_line(line: Line, start: Line, dataset: str, split: str) -> list[str]:
    """What a row gains over the start; nothing for the start and for supervised training, which does not use it."""
    row, first = line[1], start[1]
    if row is None or first is None or row.cell.method in ("scan", "supervised"):
        return []
    cells = [line[0], _amount(line)]
    for metric in METRICS:
        ours = row.summary(split, metric).mean - first.summary(split, metric).mean
        paper, before = _paper(line, dataset, metric), _paper(start, dataset, metric)
        cells += [signed(ours), signed(None if paper is None or before is None else paper - before)]
    return cells


def _wilcoxon(lines: Sequence[Line], split: str) -> Iterator[str]:
    """One sentence for each training that both methods have."""
    rows = {row.cell: row for _, row, _ in lines if row}
    for cell in [cell for cell in rows if cell.method == "constraintmatch"]:
        theirs = rows.get(replace(cell, method="constrained"))
        tested = [(name, results.compare(rows[cell], theirs, split, name)) for name in METRICS] if theirs else []
        found = [(name, *both) for name, both in tested if both]
        if not found:
            continue
        n = len(found[0][1])
        said = ", ".join(f"{name.upper()} {statistics.fmean(gains):+.2f} (p = {p:.3f})" for name, gains, p in found)
        cut = f", cut ({cell.steps:,} steps)" if cell.cut else ""
        if n < 5:  # p is 1 / 2^n at best: below five folds that is over 0.05
            said += f". With n = {n} the smallest p possible is {0.5**n:.4g}: significance at 0.05 cannot be reached"
        yield f"{cell.n_constraints:,} pairs{_VARIANTS.get(cell.options, '')}{cut}, n = {n}: {said}"


def _paper(line: Line, dataset: str, metric: str) -> float | None:
    """The paper's value; a cut row or one of a smaller copy of the set is not compared with it."""
    _, row, printed = line
    unlike = row is not None and (row.cell.cut or not results.is_whole(dataset, row.results[0].data))
    return None if unlike or printed is None else printed.value(dataset, metric)


def _starred(line: Line, dataset: str, metric: str) -> str:
    """The paper's value with its mark of significance."""
    value, printed = _paper(line, dataset, metric), line[2]
    return number(value) + ("*" if value is not None and printed and dataset in printed.significant else "")


def _amount(line: Line) -> str:
    return "all" if line[2] is None or line[2].n_constraints is None else f"{line[2].n_constraints:,}"


# The figures, as numbers

FIGURES: dict[str, Any] = tomllib.loads(files("constraintmatch.paper").joinpath("figures.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Curve:
    """One line of points (x, score over the folds), in order of x; of a level, drawn across, one point at 0."""

    label: str
    method: str  # or a variant of it: its colours
    points: tuple[tuple[float, Summary], ...]


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
    levels: tuple[Curve, ...]
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
    figure, metric = FIGURES[name], "nmi" if name == "amount" else "acc"
    points = [point for point in GRIDS[name].points_of(dataset) if point[0]]
    own = {cell for _, _, cell in points}
    counts = Counter(cell.steps for cell in rows if replace(cell, steps=STEPS) in own and steps in (None, cell.steps))
    if not counts:
        return None
    steps = max(counts, key=lambda value: (counts[value], value))
    shown = [(curve, x, rows[cut]) for curve, x, cell in points if (cut := replace(cell, steps=steps)) in rows]
    known = _levels(dataset, steps)
    levels = [(label, rows[known[label]]) for label in figure["across"] if known[label] in rows]
    results.check_same_start([*(row for _, _, row in shown), *(row for _, row in levels)])
    curves = []
    for curve, label in figure["curves"].items():
        found = sorted((x, row.summary("test", metric)) for its, x, row in shown if its == curve)
        curves.append(Curve(label, curve, tuple(found)))
    if all(len(curve.points) < 2 for curve in curves):
        return None
    return Drawing(
        name,
        dataset,
        figure["title"],
        figure["x"],
        metric,
        steps,
        # a variant is shown if it has more than the training that it shares with its method
        tuple(curve for curve in curves if len(curve.points) > (curve.method not in PAIRED)),
        tuple(Curve(label, row.cell.method, ((0.0, row.summary("test", metric)),)) for label, row in levels),
        _paper_points(dataset, metric) if name == "amount" and steps == STEPS else (),
        log_x=name == "amount",
    )


def _levels(dataset: str, steps: int) -> dict[str, Cell]:
    """The cells that may be across a figure, trained as long as its curves; the start is not trained."""
    plain = Cell(dataset, "constraintmatch", 10_000, steps=steps)
    return {
        "soft links": plain,
        "informative images, τ = 0.2": replace(plain, options=(("max_entropy", 0.2),)),
        "constrained": replace(plain, method="constrained"),
        TITLES["scan"]: Cell(dataset, "scan"),
    }


def _paper_points(dataset: str, metric: str) -> tuple[tuple[str, float, float], ...]:
    """The points of the curves over the number of constraints that Table I has."""
    points = product(FIGURES["amount"]["curves"], (5_000, 10_000))
    rows = [(method, float(n), results.published(results.TABLE_1, "test", method, n)) for method, n in points]
    values = [(method, x, row.value(dataset, metric)) for method, x, row in rows if row]
    return tuple((method, x, value) for method, x, value in values if value is not None)


def figure_numbers(shown: Drawing) -> str:
    """The figure's points as a table, x across, and a line with what does not depend on x."""
    places = sorted({x for curve in shown.curves for x, _ in curve.points})
    lines = []
    for curve in shown.curves:
        known = dict(curve.points)
        lines.append([curve.label, *(spread(known[x]) if x in known else DASH for x in places)])
    table = markdown([f"{shown.metric.upper()} in %", *(f"{x:,g}" for x in places)], lines)
    across = ", ".join(f"{level.label} {spread(level.points[0][1])}" for level in shown.levels)
    return table + (f"\n\nFor comparison: {across}." if across else "")


# For a terminal

_NARROWEST = 16  # letters of a title that are not broken: ConstraintMatch and a comma


def for_terminal(text: str, width: int) -> str:
    """Markdown in lines of at most `width` letters: tables without bars, wide ones in parts below each other.

    Numbers are never broken, so the width must be 40 or more.
    """
    blocks = []
    for is_table, found in groupby(text.splitlines(), lambda line: line.startswith("|")):
        lines = list(found)
        blocks += [_narrow_table(lines, width)] if is_table else [_prose(line, width) for line in lines]
    return "\n".join(blocks)


def _prose(line: str, width: int) -> str:
    plain = line.lstrip("#").strip() if line.startswith("#") else line.replace("`", "")
    indent = "  " if plain.startswith("- ") else ""
    return textwrap.fill(plain, width, subsequent_indent=indent, break_on_hyphens=False)


def _narrow_table(lines: Sequence[str], width: int) -> str:
    """The first columns say what a line is: every part has them, then as many groups of columns as fit."""
    header, rule, *rows = [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    n_keys = 1 + sum(name in ("", "pairs") for name in header[1:])
    groups: list[list[int]] = []
    for column in range(n_keys, len(header)):
        if groups and header[column] in ("paper", "diff."):  # mean nothing without the column before
            groups[-1].append(column)
        else:
            groups.append([column])
    keys = list(range(n_keys))
    parts = [keys]
    for group in groups:
        wider = [*parts[-1], *group]
        taken = min(widths[0], _NARROWEST) + sum(2 + widths[column] for column in wider[1:])
        if parts[-1] == keys or taken <= width:
            parts[-1] = wider
        else:
            parts.append([*keys, *group])
    left = [not cell.endswith(":") for cell in rule]
    return "\n\n".join(_columns([header, *rows], widths, left, part[1:], width) for part in parts)


def _columns(
    lines: Sequence[Sequence[str]], widths: Sequence[int], left: Sequence[bool], others: Sequence[int], width: int
) -> str:
    """Some columns of a table; the first one is wrapped to what the others leave."""
    first = min(widths[0], max(_NARROWEST, width - sum(2 + widths[column] for column in others)))
    drawn = []
    for line in lines:
        *before, title = textwrap.wrap(line[0], first) or [""]
        drawn += before
        cells = [line[c].ljust(widths[c]) if left[c] else line[c].rjust(widths[c]) for c in others]
        drawn.append("  ".join([title.ljust(first), *cells]))
    return "\n".join(text.rstrip() for text in drawn)
