"""Writes docs/reproduction.md and docs/figures/ from results/paper/: python docs/make_reproduction.py"""

import functools
import hashlib
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from constraintmatch._internal.files import read_json, write_atomically
from constraintmatch.data.datasets import DATASETS
from constraintmatch.paper.grids import GRIDS, STEPS, Cell, grid_cells
from constraintmatch.paper.results import METRICS, TABLE_1, TABLE_3, Result, Row, find_rows, published, read_results
from constraintmatch.paper.tables import (
    DASH,
    FIGURES,
    NOT_YET,
    TITLES,
    Drawing,
    drawing,
    figure_numbers,
    markdown,
    not_run,
    number,
    spread,
    table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = {  # what the paper's text says of its figures, whose points it does not print
    "flip": "naive pseudo-labelling degrades from ρ = 0.1 on, ConstraintMatch copes with ρ up to 0.5.",
    "links": "hard links are still above the constrained competitor; soft links are better, and need no μ.",
    "selection": "informative images (τ = 0.2) serve better than confident ones.",
    "entropy": "the sensitivity is within a reasonable margin; 0.025 to 0.2 is the range to tune in.",
    "amount": "in NMI the constrained competitor is below SCAN up to 10,000 constraints; ConstraintMatch is above from "
    "5,000 on and gains more the more there are; 2,000 are too few for it.",
    "noise": "ConstraintMatch is more robust to higher levels of wrong annotations than the constrained competitor.",
}
REMARKS = {  # what a reader has to know about a table or figure
    "table3": "The authors' code names starts with 50 and 100 outputs and does not say where to get them. Our "
    "start with 100 is made to resemble the one that the paper scores (SCAN's rows; decision 039). Our start with 50 "
    "is weaker, so the gain over the start counts. *The head first* (decision 034) and *clusters merged first* "
    "(decision 038) are not in the paper. After a merge fewer clusters are left, which raises ACC by itself. One "
    "fold; a head alone on the features of the start with 100 outputs has ConstraintMatch above constrained in each "
    "of five samples of pairs (`results/merging-cifar100-20-100.json`). Cells from other starts are in "
    "`research/experiments`; [findings](findings.md#too-many-clusters) has more.",
    "flip": "The authors' code (their commit 47b2d73) swaps the two largest probabilities for naive "
    "pseudo-labelling only. For ConstraintMatch it swaps two random clusters: of 20 clusters, a sure guess keeps its "
    "largest nine times in ten. If the paper's figure was made with it, its two curves do not have the same noise. "
    "*Any two* does as that code does; the other rows swap the two largest, as the paper says. *Expecting a tenth*: "
    "the loss expects a tenth of the pseudo-constraints to be wrong, whatever ρ is (decision 032); this is not in "
    "the paper.",
    "noise": "The authors' code has no such noise, and the paper does not say of which links the share is. If "
    "it is a share of all links: random pairs of 20 classes have one must-link in twenty, so with a tenth of the "
    "links wrong, two of three must-links are wrong, and there are three times as many. *Both kinds alike*: the "
    "share of the must-links is wrong, and as many cannot-links, so the number of each kind stays (decision 040). "
    "*Expecting a tenth*: the loss expects a tenth of the links to be wrong, whatever their share is (decision 032); "
    "this is not in the paper.",
}
HEAD = """\
# The paper, reproduced

`python docs/make_reproduction.py` makes this page from `results/paper/`, which has one JSON file for each finished
training (a *cell*). A test fails when the page is stale. The paper is *ConstraintMatch for Semi-constrained
Clustering* (Goschenhofer, Bischl, Kira, 2023).

- Scores are in %, mean ± standard deviation (n − 1) over the folds. A fold is a sample of constraints and the seed of
  the training. One fold has no ±.
- *paper* is the printed value. A star means that the paper found p < 0.05 against the constrained competitor.
- *diff.* is ours minus the paper's.
- A training of fewer than 20,000 steps is *cut*. It has its own rows and figures and is never averaged or compared
  with full ones.
- What is missing is at the end.

```sh
# all five folds; finished cells are skipped
constraintmatch paper table1 --sets cifar10 --data-dir data
# one fold of 3,000 steps: cut, and marked as such
constraintmatch paper flip --sets cifar100-20 --data-dir data --folds 0 --steps 3000
# this page and its figures
python docs/make_reproduction.py
```"""
QUOTED = """\
The paper quotes these systems, which use no pairs, from their papers: a ResNet-34, train and test images together. Ours
are stages of `pretrain`, written from the papers (decision 050), on the training images, and scored on the test images.
*Minutes* are those of the training on the named hardware."""
START = """\
The paper begins with the weights that SCAN's authors released. Our starts are made from the images alone, so the gain
over the start says more than the score. The paper's Test row for SCAN (87.60, 45.90) is quoted from the literature. Its
Train(+Test) row (88.53, 50.67) is its own measurement, probably of the weights that it started from. On CIFAR-100-20
our start has linear heads found anew after self-labelling (decisions 027 and 028)."""


def write_reproduction(results_folder: Path | str, docs_folder: Path | str) -> Path:
    """The page's path; its figures go to `figures/` in the same folder, those whose results are gone are removed."""
    docs, text = Path(docs_folder), reproduction(results_folder)
    shown = {stem(one): one for one in drawings(find_rows(read_results(results_folder)))}
    for one in shown.values():
        draw(one, docs / "figures")
    for gone in {f"{name}-{dataset}" for name in FIGURES for dataset in GRIDS[name].sets} - shown.keys():
        for suffix in (".png", ".svg"):
            (docs / "figures" / f"{gone}{suffix}").unlink(missing_ok=True)
    write_atomically(docs / "reproduction.md", lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return docs / "reproduction.md"


def reproduction(results_folder: Path | str) -> str:
    """The page: tables, figures, what ran where, and what is missing."""
    results = read_results(results_folder)
    rows = find_rows(results)
    shown = drawings(rows)
    parts = [HEAD, "## The start", START, _start_table(rows)]
    for name, numeral in {"table1": "I", "table2": "II", "table3": "III"}.items():
        parts += [f"## Table {numeral}. {GRIDS[name].title}", *_remark(name), table(name, rows)]
        parts += (
            ["### Systems without pairs", QUOTED, _systems(Path(results_folder).parent)] if name == "table1" else []
        )
    for name in FIGURES:
        parts += [f"## Figure. {GRIDS[name].title}", f"The paper: {CLAIMS[name]}", *_remark(name)]
        parts += [_figure(one) for one in shown if one.name == name] or [not_run(name)]
    parts += ["## Gallery. Confidently wrong pseudo-labels, right pseudo-constraints", *_gallery_texts(results_folder)]
    parts += ["## What ran, and where", *_ran(results), "## What is missing", _missing(results)]
    return "\n\n".join(parts) + "\n"


def drawings(rows: Mapping[Cell, Row]) -> list[Drawing]:
    """Every figure that has points to show, set by set."""
    found = [drawing(name, rows, dataset) for name in FIGURES for dataset in GRIDS[name].sets]
    return [shown for shown in found if shown is not None]


def stem(shown: Drawing) -> str:
    """The name of its files, without suffix."""
    return f"{shown.name}-{shown.dataset}"


def digest(shown: Drawing) -> str:
    """The digest of all that is shown. It is in the files: a test then finds a stale picture."""
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def _remark(name: str) -> list[str]:
    return [REMARKS[name]] if name in REMARKS else []


def _start_table(rows: Mapping[Cell, Row]) -> str:
    scores = [name for metric in METRICS for name in (metric.upper(), "paper")]
    lines = []
    starts = [row for cell, row in rows.items() if cell.method == "scan"]
    for row in sorted(starts, key=lambda row: (row.cell.dataset, row.cell.n_clusters)):
        printed = published(TABLE_3 if row.cell.wide else TABLE_1, "test", "scan", 0)
        line = [DATASETS[row.cell.dataset].title, f"{row.cell.n_clusters}"]
        for metric in METRICS:
            paper = printed.value(row.cell.dataset, metric) if printed else None
            line += [spread(row.summary("test", metric)), number(paper)]
        lines.append([*line, f"`{row.results[0].weights[:12]}`"])
    header = ["our starts, Test", "outputs", *scores, "weights"]
    return markdown(header, lines) if lines else f"Our starts: {NOT_YET}."


def _systems(folder: Path) -> str:
    """PICA, MiCE, CC and TCC: the quoted scores, and those of our trainings, which are in `start-SET-…SYSTEM.json`."""
    lines = []
    for printed in (row for row in TABLE_1 if row.split == "train+test" and row.method is None):
        for dataset in ("cifar10", "cifar100-20"):
            quoted = [number(printed.value(dataset, metric)) for metric in METRICS]
            row = [f"{DATASETS[dataset].title}, {printed.title}", *quoted]
            found = [read_json(path) for path in sorted(folder.glob(f"start-{dataset}-*{printed.title.lower()}.json"))]
            ran = [one for one in found if one["stage"] == printed.title.lower()]
            lines += [[*row, *_ours(one)] for one in ran] or [[*row, NOT_YET, *[DASH] * 6]]
    scores = [metric.upper() for metric in METRICS]
    header = ["", *(f"quoted {name}" for name in scores), *scores, "network", "epochs", "minutes", "hardware"]
    return markdown(header, lines)


def _ours(result: Mapping[str, Any]) -> list[str]:
    scores = [number(100 * result["scores"][metric]) for metric in METRICS]
    where = result["environment"].get("gpu") or result["environment"].get("platform") or "unknown"
    how = [str(result["backbone"]), f"{result['arguments']['epochs']:,}", f"{result['training_seconds'] / 60:.0f}"]
    return [*scores, *how, str(where)]


def _figure(shown: Drawing) -> str:
    place, caption = f"figures/{stem(shown)}", f"{shown.heading}; {shown.note}"
    return f"![{caption}]({place}.png)\n\n{caption} ([SVG]({place}.svg)):\n\n{figure_numbers(shown)}"


def _gallery_texts(folder: Path | str) -> list[str]:
    """The galleries among the results: pictures, notes and pairs."""
    contents = [read_json(path) for path in sorted(Path(folder).glob("*.json"))]
    return [_gallery(content) for content in contents if content["kind"] == "gallery"] or [
        f"{NOT_YET.capitalize()} (`python docs/make_gallery.py SET`)."
    ]


def _gallery(content: Mapping[str, Any]) -> str:
    place, note = f"figures/{content['name']}", content["note"]
    lines = []
    for pair in content["pairs"]:
        sure = " and ".join(f"{value:.2f}" for value in pair["confidence"])
        lines.append([f"{pair['link']:.2f}", *pair["predicted"], *pair["true"], sure])
    table = markdown(["pseudo-constraint", "says", "says", "is", "is", "confidence"], lines, 6)
    share = ""
    if n := content.get("pairs_of_wrong", 0):
        right = 100 * content["right_pairs"] / n
        share = f"\n\nOf the {n:,} pairs of such images {right:.1f} % have the right pseudo-constraint."
    return f"![{note}]({place}.png)\n\n{note} ([SVG]({place}.svg)):\n\n{table}{share}"


# Drawing: Okabe and Ito's colours, a marker and a dash for each method, on white, which a dark page needs too

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


def draw(shown: Drawing, folder: Path | str) -> tuple[Path, Path]:
    """The figure's PNG and SVG, written as `NAME-DATASET` into the folder; the same numbers give the same bytes."""
    with new_figure((6.4, 4.0)) as figure:
        axes = figure.subplots()
        for curve in shown.curves:
            colour, marker, dash = _LOOKS[curve.method]
            x, summaries = zip(*curve.points, strict=True)
            spreads = [summary.std or 0.0 for summary in summaries]
            look: Any = {"color": colour, "marker": marker, "ls": dash, "capsize": 3, "lw": 1.8, "ms": 6}
            means, bars = [summary.mean for summary in summaries], spreads if any(spreads) else None
            axes.errorbar(x, means, bars, label=curve.label, **look)
        for level in shown.levels:
            colour, _, dash = _LOOKS[level.method]
            if level.method in {curve.method for curve in shown.curves}:  # plain ConstraintMatch across its variants
                colour, dash = "#CC79A7", (0, (6, 1.5))
            axes.axhline(level.points[0][1].mean, color=colour, ls=dash, lw=1.6, label=level.label)
        for method, place, value in shown.paper:
            colour, marker, _ = _LOOKS[method]
            axes.plot(place, value, marker, mfc="none", mec=colour, ms=10, label="_")
        if shown.paper:
            axes.plot([], [], "o", mfc="none", mec="#222222", ms=10, label="hollow: the paper's values")
        _dress(axes, shown)
        return save_figure(figure, Path(folder) / stem(shown), digest(shown))


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


_STYLE: Any = {  # Any: the names that stubs of matplotlib allow differ by version
    "svg.hashsalt": "constraintmatch",  # without it the ids in an SVG differ from one drawing to the next
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


@contextmanager
def new_figure(size: tuple[float, float], layout: Literal["constrained"] | None = "constrained") -> Iterator["Figure"]:
    """A figure without pyplot: no window, and no state is left."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the user has set
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=size, layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def save_figure(figure: "Figure", stem: Path, digest: str) -> tuple[Path, Path]:
    """Both files, without a date or a version in them, with the digest of what they show."""
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    for path, about in ((png, {"Software": None}), (svg, {"Date": None, "Creator": None})):
        how: Any = {"format": path.suffix[1:], "dpi": 120, "metadata": {**about, "Description": digest}}
        write_atomically(path, functools.partial(figure.savefig, **how))
    return png, svg


# What ran, and what did not


def _ran(results: Sequence[Result]) -> Iterator[str]:
    if not results:
        yield f"{NOT_YET.capitalize()}."
        return
    hours, n_cut = sum(result.seconds for result in results) / 3600, sum(result.cell.cut for result in results)
    yield f"{len(results):,} cells ({n_cut:,} of them cut), {hours:.1f} hours of training and scoring in all."
    places = Counter(tuple(_fact(result, key) for key in ("gpu", "torch", "commit")) for result in results)
    lines = [[*place, f"{count:,}"] for place, count in sorted(places.items())]
    yield markdown(["hardware", "torch", "commit", "cells"], lines, left=3)
    yield _costs(results)
    yield "<details markdown>\n<summary>Every cell</summary>\n\n" + _every_cell(results) + "\n\n</details>"


def _costs(results: Sequence[Result]) -> str:
    groups: dict[tuple[str, str, int, str], list[Result]] = {}
    for result in results:
        cell = result.cell
        groups.setdefault((cell.dataset, cell.method, cell.steps, _fact(result, "gpu")), []).append(result)
    lines = []
    for (dataset, method, steps, gpu), found in sorted(groups.items()):
        peaks = [result.peak_gib for result in found if result.peak_gib is not None]
        seconds = f"{statistics.median(result.seconds for result in found):,.0f}"
        length, peak = DASH if method == "scan" else f"{steps:,}", f"{max(peaks):.1f}" if peaks else DASH
        title = f"{DATASETS[dataset].title}, {TITLES[method]}"
        lines.append([title, length, f"{len(found):,}", seconds, peak, gpu])
    return markdown(["", "steps", "cells", "seconds (median)", "peak GiB", "hardware"], lines)


def _every_cell(results: Sequence[Result]) -> str:
    lines = []
    for result in results:
        name = f"`{result.cell.name}`" + (" (cut)" if result.cell.cut else "")
        scores = [f"{result.scores['test'][metric]:.2f}" for metric in METRICS]
        lines.append([name, *scores, f"{result.seconds:,.0f}", _fact(result, "commit"), _fact(result, "gpu")])
    return markdown(["cell", *(metric.upper() for metric in METRICS), "seconds", "commit", "hardware"], lines)


def _fact(result: Result, key: str) -> str:
    """A fact of the environment; without a GPU the platform is the hardware."""
    value = result.environment.get(key) or (result.environment.get("platform") if key == "gpu" else None)
    return str(value or "unknown")


def _missing(results: Sequence[Result]) -> str:
    """Finished cells of each grid and set: a cell of two grids counts in both."""
    full = {result.cell.name for result in results if not result.cell.cut}
    cut = {replace(result.cell, steps=STEPS).name for result in results if result.cell.cut}
    lines = []
    for name, grid in GRIDS.items():
        for dataset in grid.sets:
            names = {cell.name for cell in grid_cells(name, sets=[dataset])}
            counts = [f"{len(names & full)} of {len(names)}", f"{len(names - full)}", f"{len(names & cut)}"]
            lines.append([f"`{name}`", DATASETS[dataset].title, *counts])
    table = markdown(["", "", "finished", "missing", "run, but cut"], lines, left=2)
    return f"Over five folds (`constraintmatch paper NAME --list` names them):\n\n{table}"


if __name__ == "__main__":
    print(write_reproduction(ROOT / "results" / "paper", ROOT / "docs").relative_to(ROOT))
