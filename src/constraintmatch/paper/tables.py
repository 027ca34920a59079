"""The paper's tables with our numbers beside its own, as Markdown."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from constraintmatch.data.datasets import DATASETS
from constraintmatch.paper.grids import HEAD_FIRST, MERGED_FIRST, Cell
from constraintmatch.paper.published import METRICS, SETS, TABLE_1, TABLE_2, TABLE_3, PublishedRow
from constraintmatch.paper.results import Row, Summary, check_same_start, compare

__all__ = ["DASH", "TITLES", "markdown", "signed", "spread", "table1", "table2", "table3"]

_SPLIT_TITLES = {"test": "Test", "train+test": "Train(+Test)"}
TITLES = {
    "scan": "SCAN (the start)",
    "constrained": "Constrained",
    "pseudo_label": "Pseudo-labelling",
    "constraintmatch": "ConstraintMatch",
    "fully_constrained": "Fully constrained",
    "supervised": "Supervised",
}
DASH = "–"
NOT_RUN = "not run here"
_VARIANTS = {  # by options
    HEAD_FIRST: ", the head first (ours)",
    MERGED_FIRST: ", clusters merged first (ours)",
}
_BOUNDS = ("supervised", "fully_constrained")

Rows = Mapping[Cell, Row]


@dataclass(frozen=True)
class _Line:
    """One line of a table: what it is called, our row if it was run, the paper's if it is printed."""

    title: str
    amount: int | None
    row: Row | None
    printed: PublishedRow | None

    def paper(self, dataset: str, metric: str) -> float | None:
        """The paper's value; a cut row or one of a smaller copy of the set is not compared, so it has none."""
        other = self.row is not None and (self.row.cell.cut or not self.row.results[0].whole)
        return None if other or self.printed is None else self.printed.value(dataset, metric)

    def star(self, dataset: str) -> str:
        """The paper's mark of significance."""
        printed = self.printed if self.paper(dataset, METRICS[0]) is not None else None
        return "*" if printed is not None and dataset in printed.significant else ""


def table1(rows: Rows, sets: Sequence[str] = SETS) -> str:
    """Table I: each set, on the test images and on Train(+Test)."""
    return "\n\n".join(part for dataset in sets for part in _table1_of(rows, dataset))


def table2(rows: Rows, sets: Sequence[str] = ("cifar100-20", "cifar10")) -> str:
    """Table II, the ablation; the paper has it for CIFAR-100-20 only, other sets appear when they were run."""
    return "\n\n".join(_small_table(rows, TABLE_2, dataset) for dataset in sets)


def table3(rows: Rows, sets: Sequence[str] = ("cifar10", "cifar100-20")) -> str:
    """Table III, overclustering with five times as many outputs as classes."""
    return "\n\n".join(_small_table(rows, TABLE_3, dataset, times=5) for dataset in sets)


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose columns stand one below the other in plain text too; the first `left` are left-aligned."""
    every = [header, *lines]
    widths = [max(3, *(len(line[column]) for line in every)) for column in range(len(header))]
    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    padded = [[_pad(cell, widths[column], column < left) for column, cell in enumerate(line)] for line in every]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def spread(summary: Summary) -> str:
    """Mean ± standard deviation; one fold has no ±."""
    return f"{summary.mean:.2f}" + ("" if summary.std is None else f" ± {summary.std:.2f}")


def signed(value: float | None) -> str:
    """A difference with its sign, a dash for none."""
    return DASH if value is None else f"{value + 0.0:+.2f}"


# What stands in a table


def _table1_of(rows: Rows, dataset: str) -> Iterator[str]:
    title = DATASETS[dataset].title
    for split, split_title in _SPLIT_TITLES.items():
        lines = [line for printed in TABLE_1 if printed.split == split for line in _lines(rows, dataset, printed)]
        if split == "train+test":  # the paper has no upper bounds here
            lines = [*_bounds(rows, dataset), *lines]
        if any(line.row for line in lines):
            yield f"### {title}, {split_title}"
            yield from _compared(lines, dataset, split)
        else:
            yield f"### {title}, {split_title}: {NOT_RUN}"
            yield _printed_only(lines, dataset)


def _small_table(rows: Rows, printed: Sequence[PublishedRow], dataset: str, times: int = 1) -> str:
    """Table II or III of one set, with so many outputs for each class."""
    n_clusters = times * DATASETS[dataset].n_clusters
    lines = [line for row in printed for line in _lines(rows, dataset, row, n_clusters)]
    title = f"### {DATASETS[dataset].title}" + (f", {n_clusters} outputs" if times > 1 else "")
    if any(line.row for line in lines):
        return "\n\n".join([title, *_compared(lines, dataset, "test")])
    if dataset not in printed[0].scores:
        return f"{title}: {NOT_RUN}, and not in the paper"
    return f"{title}: {NOT_RUN}\n\n{_printed_only(lines, dataset)}"


def _lines(rows: Rows, dataset: str, printed: PublishedRow, n_clusters: int = 0) -> list[_Line]:
    """The line of a printed row, one more for each cut run of its cell, and those of the variants that were run."""
    if printed.method is None:
        return [_Line(printed.title, printed.n_constraints, None, printed)]
    title, wanted = TITLES[printed.method], Cell(dataset, printed.method, printed.n_constraints or 0, 0, n_clusters)
    found: list[tuple[str, Row | None]] = [(title, rows.get(wanted)), *_cut_rows(rows, wanted, title)]
    for options, said in _VARIANTS.items():
        variant = replace(wanted, options=options)
        found += [(title + said, rows[variant])] if variant in rows else []
        found += _cut_rows(rows, variant, title + said)
    return [_Line(said, printed.n_constraints, row, printed) for said, row in found]


def _cut_rows(rows: Rows, full: Cell, title: str) -> list[tuple[str, Row]]:
    """The cut runs of a cell, the longest first, and what they are called."""
    cut = sorted((row for cell, row in rows.items() if _is_cut_of(cell, full)), key=lambda row: -row.cell.steps)
    return [(f"{title}, cut ({row.cell.steps:,} steps)", row) for row in cut]


def _is_cut_of(cell: Cell, full: Cell) -> bool:
    return cell.cut and replace(cell, steps=full.steps) == full


def _bounds(rows: Rows, dataset: str) -> list[_Line]:
    found = [(method, rows.get(Cell(dataset, method))) for method in _BOUNDS]
    return [_Line(TITLES[method], None, row, None) for method, row in found if row is not None]


# How it is written


def _compared(lines: Sequence[_Line], dataset: str, split: str) -> Iterator[str]:
    check_same_start(line.row for line in lines if line.row)
    header = ["", "pairs", "folds", *(name for metric in METRICS for name in (metric.upper(), "paper", "diff."))]
    yield markdown(header, [_compared_line(line, dataset, split) for line in lines])
    start = next((line for line in lines if line.row and line.row.cell.method == "scan"), None)
    gains = [_gain_line(line, start, dataset, split) for line in lines if start and _has_gain(line)]
    if gains:
        names = [name for metric in METRICS for name in (metric.upper(), "paper")]
        yield "Over the start, in points (ours over our start, the paper's over its SCAN row):"
        yield markdown(["", "pairs", *names], gains)
    if tested := _wilcoxon(lines, split):
        yield "ConstraintMatch over constrained on the same folds (Wilcoxon signed-rank, one-sided):"
        yield "\n".join(f"- {sentence}" for sentence in tested)


def _compared_line(line: _Line, dataset: str, split: str) -> list[str]:
    if line.row is not None:
        folds = str(len(line.row.results)) if line.row.cell.method != "scan" else DASH
    else:
        folds = DASH if line.printed is None or line.printed.method is None else NOT_RUN
    cells = [line.title, _amount(line.amount), folds]
    for metric in METRICS:
        summary = line.row.summary(split, metric) if line.row else None
        paper = line.paper(dataset, metric)
        difference = summary.mean - paper if summary and paper is not None else None
        cells += [spread(summary) if summary else DASH, _number(paper) + line.star(dataset), signed(difference)]
    return cells


def _has_gain(line: _Line) -> bool:
    return line.row is not None and line.row.cell.method not in ("scan", "supervised")


def _gain_line(line: _Line, start: _Line, dataset: str, split: str) -> list[str]:
    assert line.row is not None
    assert start.row is not None
    cells = [line.title, _amount(line.amount)]
    for metric in METRICS:
        ours = line.row.summary(split, metric).mean - start.row.summary(split, metric).mean
        paper, before = line.paper(dataset, metric), start.paper(dataset, metric)
        cells += [signed(ours), signed(None if paper is None or before is None else paper - before)]
    return cells


def _wilcoxon(lines: Sequence[_Line], split: str) -> list[str]:
    """One sentence for each number of constraints at which both methods were run."""
    rows = {line.row.cell: line.row for line in lines if line.row}
    ours = [row for cell, row in rows.items() if cell.method == "constraintmatch"]
    both = [(row, rows.get(replace(row.cell, method="constrained"))) for row in ours]
    told = [_tested(row, theirs, split) for row, theirs in both if theirs is not None]
    return [sentence for sentence in told if sentence is not None]


def _tested(ours: Row, theirs: Row, split: str) -> str | None:
    compared = {metric: compare(ours, theirs, split, metric) for metric in METRICS}
    found = {metric: one for metric, one in compared.items() if one is not None}
    if not found:
        return None
    told = [f"{name.upper()} {statistics.fmean(one.gains):+.2f} (p = {one.p:.3f})" for name, one in found.items()]
    first, cut = found[METRICS[0]], f", cut ({ours.cell.steps:,} steps)" if ours.cell.cut else ""
    n = len(first.gains)
    # With n folds p is 1 / 2^n at best: below five folds that is over 0.05.
    limit = (
        ""
        if n >= 5
        else f". With n = {n} the smallest p possible is {first.smallest_p:.4g}: significance at 0.05 cannot be reached"
    )
    variant = _VARIANTS.get(ours.cell.options, "")
    return f"{ours.cell.n_constraints:,} pairs{variant}{cut}, n = {n}: {', '.join(told)}{limit}"


def _printed_only(lines: Sequence[_Line], dataset: str) -> str:
    header = ["the paper's values", "pairs", *(metric.upper() for metric in METRICS)]
    shown = [line for line in lines if line.paper(dataset, METRICS[0]) is not None]
    values = [[_number(line.paper(dataset, metric)) + line.star(dataset) for metric in METRICS] for line in shown]
    named = [[line.title, _amount(line.amount)] for line in shown]
    return markdown(header, [[*name, *value] for name, value in zip(named, values, strict=True)])


def _amount(amount: int | None) -> str:
    return "all" if amount is None else f"{amount:,}"


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _pad(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)
