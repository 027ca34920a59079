"""Writes docs/label-efficiency.md and its figures from results/: python docs/make_label_efficiency.py"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TITLES = {"cifar10": "CIFAR-10", "cifar100-20": "CIFAR-100-20", "digits": "Digits"}
WAYS = {
    "random-pair": ("random pairs", "#D55E00", "o"),
    "chosen-pair": ("chosen pairs", "#0072B2", "s"),
    "chosen-which": ("chosen “which of these?”", "#009E73", "^"),
    "chosen-which-anchored": ("chosen “which of these?”, anchored", "#332288", "X"),
    "chosen-which-safe": ("chosen “which of these?”, default recipe", "#882255", "*"),
    "chosen-which-head": ("chosen “which of these?”, head alone", "#E69F00", "D"),
    "chosen-which-trained-head": ("chosen “which of these?”, head alone, trained", "#56B4E9", "P"),
    "random-which": ("random “which of these?”", "#CC79A7", "v"),
}
# what is said of a start, and how its curves are drawn
STARTS = {
    "": ("", "-"),
    "byol": (", from BYOL", "--"),
    "propos": (", from ProPos by its first head", (0, (5, 1))),
    "propos-voted": (", from ProPos", (0, (5, 1))),
    "joined": (", two networks joined", "-."),
}
BELOW = 15  # points under the start that a figure shows
PAPER = {"cifar10": 93.17, "cifar100-20": 57.15}  # ConstraintMatch with 10,000 random pairs, test ACC
HEAD = """\
# Test accuracy against answered questions

`docs/make_label_efficiency.py` makes this page from `results/questions-*.json` (`benchmarks/label_efficiency.py`). A
simulated annotator answers from the labels of the training images; a title says how many answers are wrong. Every
point is one round from the same start on all answers so far, scored on the test images, with one seed. A round first
carries the answers along neighbours in the start's features and fits the cluster head to the result (`propagate`).
Then it trains the network by ConstraintMatch.

- *Head alone*: the network stays as it is. The whole curve takes minutes on a CPU. *Trained*: the head also learns by
  ConstraintMatch, as with `loop --frozen`.
- *Anchored*: clusters that the head was sure of at the beginning of the round are held apart (decision 036).
- *Default recipe*: as `loop` trains. If the head that the answers have taught is better than the start, the network
  learns to repeat it on strong views (decision 052).
- *Long end*: more steps after the last answer, as with `loop --set last_steps=N`.
- *From BYOL*, *from ProPos*: the start is `weights/byol-*` or `weights/propos-*`; for the other curves of CIFAR it is
  `weights/scan-*`. The *first head* of ProPos is that of the best eighth of the linear heads (decision 028).
- *Two networks joined*: the start and the network of its first stage, SimCLR, as one model (`constraintmatch join`).
- The dotted line is the paper's ConstraintMatch with 10,000 random pairs, from the authors' start.

The results name their commits; later programs may choose other questions."""


def runs() -> list[dict[str, Any]]:
    """Every finished curve, those of the paper's start first."""
    paths = sorted((ROOT / "results").glob("questions-*.json"))
    return sorted((json.loads(path.read_text(encoding="utf-8")) for path in paths), key=_start)


def page(found: Sequence[dict[str, Any]]) -> str:
    """The page: per data set and error rate the figure and its numbers."""
    parts = [HEAD]
    for name, error in _groups(found):
        chosen = [run for run in found if (run["data"], run["error"]) == (name, error)]
        title = f"{TITLES[name]}, {'no' if not error else f'{100 * error:g} %'} wrong answers"
        parts += [f"## {title}", f"![{title}](curves/{_stem(name, error)}.png)", _table(chosen)]
    return "\n\n".join(parts if len(parts) > 1 else [HEAD, "Not run yet."]) + "\n"


def _groups(found: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    return sorted(
        {(run["data"], run["error"]) for run in found}, key=lambda group: (list(TITLES).index(group[0]), group[1])
    )


def _way(run: dict[str, Any]) -> str:
    """The way of asking, whether the head alone was told, or trained too, and whether rounds were anchored."""
    alone = "" if run["steps"] else "-trained-head" if run.get("options") else "-head"
    return (
        str(run["way"]) + alone + ("-anchored" if run.get("anchors") else "") + ("-safe" if run.get("recipe") else "")
    )


def _start(run: dict[str, Any]) -> str:
    return str(run.get("start_name", ""))


def _title(run: dict[str, Any]) -> str:
    end = f", long end ({run['last_steps']:,} steps)" if run.get("last_steps") else ""
    return WAYS[_way(run)][0] + end + STARTS[_start(run)][0]


def _stem(name: str, error: float) -> str:
    return f"questions-{name}-error{error:g}"


def _table(chosen: Sequence[dict[str, Any]]) -> str:
    budgets = sorted({point["answers"] for run in chosen for point in run["points"]})
    lines = [f"| answered | {' | '.join(map(_title, chosen))} |", "|--:|" + "--:|" * len(chosen)]
    for budget in budgets:
        cells = [[100 * point["acc"] for point in run["points"] if point["answers"] == budget] for run in chosen]
        lines.append(f"| {budget:,} | {' | '.join(f'{cell[0]:.1f}' if cell else '–' for cell in cells)} |")
    return "\n".join(lines)


def draw(found: Sequence[dict[str, Any]], folder: Path) -> None:
    """One PNG and one SVG per data set and error rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "constraintmatch"
    for name, error in _groups(found):
        figure, axes = plt.subplots(figsize=(10.4, 5.6), layout="constrained")
        chosen = [run for run in found if (run["data"], run["error"]) == (name, error)]
        low = min(100 * run["points"][0]["acc"] for run in chosen) - BELOW
        for run in chosen:
            _, colour, marker = WAYS[_way(run)]
            points = [point for point in run["points"] if point["answers"]]
            axes.plot(
                [p["answers"] for p in points],
                [100 * p["acc"] for p in points],
                color=colour,
                marker=marker,
                linestyle=STARTS[_start(run)][1],
                fillstyle="none" if run.get("last_steps") else "full",
                label=_title(run),
            )
            for p in points:
                if 100 * p["acc"] < low:  # under the edge: its number stands there
                    axes.annotate(
                        f"↓ {100 * p['acc']:.0f}",
                        (p["answers"], low),
                        (-2, 3),
                        textcoords="offset points",
                        color=colour,
                    )
        for start in dict.fromkeys(map(_start, chosen)):
            first = next(run["points"][0] for run in chosen if _start(run) == start)
            said, style = STARTS[start]
            label = f"start, no answers{said}"
            axes.axhline(100 * first["acc"], color="#777777", linewidth=1, linestyle=style, label=label)
        if name in PAPER:
            axes.axhline(PAPER[name], color="black", linewidth=1, linestyle=":", label="paper, 10,000 random pairs")
        axes.set(xscale="log", xlabel="answered questions", ylabel="test ACC, %")
        axes.set_ylim(bottom=max(axes.get_ylim()[0], low))
        budgets = sorted({point["answers"] for run in chosen for point in run["points"] if point["answers"]})
        axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
        axes.set_xticks([], minor=True)
        axes.set_title(f"{TITLES[name]}, {100 * error:g} % wrong answers", loc="left", fontsize=11, weight="bold")
        axes.grid(alpha=0.3)
        figure.legend(
            loc="outside lower center", ncols=2, fontsize=8.5, frameon=False
        )  # beside the curves, not on them
        for suffix, about in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            figure.savefig(folder / f"{_stem(name, error)}.{suffix}", dpi=120, metadata=about)
        plt.close(figure)


if __name__ == "__main__":
    draw(runs(), ROOT / "docs" / "curves")
    (ROOT / "docs" / "label-efficiency.md").write_text(page(runs()), encoding="utf-8")
