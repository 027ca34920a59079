"""A comparison of systems as text and as a page: their rows, the better ones first, and which one to take."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from constraintmatch._internal.files import write_atomically
from constraintmatch.evaluation.judge import Judge
from constraintmatch.evaluation.report import render_page

Row = dict[str, Any]  # a system, its scores and losses, or its error

OURS = "constraintmatch"
WIDE = 80
TIED = 1.0  # standard errors within which held-out pairs cannot tell two systems apart
COLUMNS = {  # the head of a column, its meaning, and its form
    "acc": ("ACC", "accuracy in % (Hungarian matching)", "{:.1%}"),
    "nmi": ("NMI", "normalized mutual information in %", "{:.1%}"),
    "ari": ("ARI", "adjusted Rand index in %", "{:.1%}"),
    "held_out": ("pairs", "held-out pairs that are kept, in %: the mean of must-links and cannot-links", "{:.1%}"),
    "loss": ("nats", "mean loss of a held-out pair, by its likelihood", "{:.3f}"),
    "kept": ("taught", "the pairs that taught it and that it keeps, in %", "{:.1%}"),
    "seconds": ("s", "seconds to fit", "{:.1f}"),
    "mebibytes": ("MiB", "memory that it took at its peak, beyond the program's own", "{:,.0f}"),
}
BARS = ("acc", "nmi", "held_out", "seconds")


def rank_rows(rows: Sequence[Row], judge: Judge) -> list[Row]:
    """Finished rows with their mean loss, the better ones first: by ACC and NMI where labels are known, else by loss.

    Rows that have an error come last, in their order.
    """
    weight = judge.weight / max(judge.weight.sum(), 1e-300)
    done = [row | {"loss": float(np.dot(row["losses"], weight))} for row in rows if row["error"] is None]
    scored = all("acc" in row for row in done)
    order = sorted(done, key=lambda row: -(row["acc"] + row["nmi"]) if scored else row["loss"])
    return [*order, *(row for row in rows if row["error"] is not None)]


def advise(rows: Sequence[Row], judge: Judge) -> list[str]:
    """Sentences: which system to take and why, which ones are too close to call, and where ours stands."""
    done = [row for row in rank_rows(rows, judge) if row["error"] is None]
    if not done:
        return ["No system finished; the rows say why."]
    best, *others = done
    if "acc" in best:
        found = f"ACC {best['acc']:.1%}, NMI {best['nmi']:.1%}"
        said = [f"Take {best['method']}: it has the best mean of ACC and NMI on images with labels ({found})."]
    else:
        said = [f"Take {best['method']}: held-out pairs are likeliest by it ({best['loss']:.3f} nats a pair)."]
    if not judge.can_judge():
        said.append("There are too few held-out pairs to judge by: take the numbers as a hint.")
    losses = np.array(best["losses"])
    near = [row["method"] for row in others if judge.compare(np.array(row["losses"]), losses).surely(TIED) <= 0]
    if near:
        said.append(f"The held-out pairs cannot tell it from {', '.join(near)}.")
    ours = next((row for row in others if row["method"] == OURS), None)
    if ours is not None:
        by = f"{ours['loss'] - best['loss']:.3f} nats a pair"
        by = f"{best['acc'] - ours['acc']:+.1%} ACC and {best['nmi'] - ours['nmi']:+.1%} NMI" if "acc" in best else by
        tie = "cannot tell the two apart" if OURS in near else "favour it too"
        said.append(f"{OURS} is not first: {best['method']} differs by {by}, and held-out pairs {tie}.")
        if ours.get("note"):
            said.append(f"{OURS} {ours['note']}.")
    return said


def table_text(rows: Sequence[Row], judge: Judge) -> str:
    """The table in 80 columns, what its columns are, and the advice."""
    ranked = rank_rows(rows, judge)
    keys = _columns(ranked)
    lines = [f"{'method':<20}" + "".join(f"{COLUMNS[key][0]:>7}" for key in keys)]
    for row in ranked:
        if row["error"] is None:
            lines.append(f"{row['method']:<20}" + "".join(f"{_cell(row, key).removesuffix('%'):>7}" for key in keys))
        else:
            lines += textwrap.wrap(f"{row['method']:<20} {row['error']}", WIDE, subsequent_indent=" " * 21)
    meanings = "; ".join(f"{COLUMNS[key][0]}: {COLUMNS[key][1]}" for key in keys)
    paragraphs = [*advise(rows, judge), *([meanings[0].upper() + meanings[1:] + "."] if keys else [])]
    return "\n".join([*lines, "", *(line for text in paragraphs for line in textwrap.wrap(text, WIDE))])


def write_page(
    path: Path, rows: Sequence[Row], judge: Judge, facts: Sequence[tuple[str, str]], about: Mapping[str, str]
) -> Path:
    """Write the page of a comparison: advice, table, bars, and what each system is."""
    ranked = rank_rows(rows, judge)
    keys = _columns(ranked)
    done = [row for row in ranked if row["error"] is None]
    bars = []
    for key in (key for key in BARS if key in keys):
        most = max((row[key] or 0 for row in done), default=0) or 1
        lines = [(row["method"], _cell(row, key), f"{(row[key] or 0) / most:.3f}") for row in done]
        bars.append((COLUMNS[key][1], lines))
    page = render_page(
        "comparison.html",
        facts=facts,
        advice=advise(rows, judge),
        head=[COLUMNS[key][:2] for key in keys],
        rows=[(row["method"], [_cell(row, key) for key in keys]) for row in done],
        errors=[(row["method"], row["error"]) for row in ranked if row["error"] is not None],
        bars=bars,
        about=about,
    )
    write_atomically(path, lambda temporary: temporary.write_bytes(page.encode()))
    return path


def _columns(rows: Sequence[Row]) -> list[str]:
    """The columns that some row has a value in."""
    return [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]


def _cell(row: Row, key: str) -> str:
    return "–" if row.get(key) is None else COLUMNS[key][2].format(row[key])
