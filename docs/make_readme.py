"""Fills the generated tables of README.md and docs/ from results/: python docs/make_readme.py

A table stands between `<!-- NAME table -->` and `<!-- end of NAME table -->`; text outside of them is not touched.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from constraintmatch.paper.grids import Cell
from constraintmatch.paper.results import TABLE_1, TABLE_3, Row, check_same_start, find_rows, published, read_results
from constraintmatch.paper.tables import NOT_YET, markdown, signed, spread
from constraintmatch.pipeline.config import PRETEXTS

ROOT = Path(__file__).resolve().parent.parent
GRIDS = {  # files of results/, by how they begin
    "cifar10-scan": "CIFAR-10, SCAN",
    "cifar10-byol": "CIFAR-10, BYOL",
    "cifar100-20-scan": "CIFAR-100-20, SCAN",
    "cifar100-20-propos": "CIFAR-100-20, ProPos",
    "stl10": "STL-10 photographs, the own chain of `pretrain`",
}
OTHERS = {  # made by research/other_sets.py
    "fine-15": "15 classes, 100 to 500 images each, by `weights/scan-cifar100-20`",
    "fine-10": "10 classes, 450 images each, by `weights/byol-cifar10`",
    "fine-8": "8 classes, 250 to 500 images each, by `weights/scan-cifar10`",
}
NETWORKS = {name: title for name, title in GRIDS.items() if name != "stl10"}
ASKED = {"random": "random pairs", "pair": "chosen pairs", "which": "which of these?"}
WRONG_KINDS = {"all": " of all", "both": ", alike in both kinds", "same": ', only "same"'}
UNEVEN = {"none": "none", "all": "anywhere", "near": "where the features mislead", "people": "by three annotators"}
DEMO = {  # titles of the demo's rows; a row without one is called as the file calls it
    "k_means": "k-means on the pixels",
    "start": "self-supervised start",
    "constrained": "{pairs} random pairs, constrained",
    "constraintmatch": "{pairs} random pairs, **ConstraintMatch**",
    "chosen": "{answers} chosen answers",
}


def demo_table() -> str:
    """A row for each list of scores in the demo's result, in its order."""
    found = json.loads((ROOT / "results" / "demo-digits.json").read_text(encoding="utf-8"))
    lines = ["| | ACC | NMI | ARI |", "|---|--:|--:|--:|"]
    for name, rows in found.items():
        if isinstance(rows, list) and rows and "acc" in rows[0]:
            cells = [_mean([100 * row[metric] for row in rows]) for metric in ("acc", "nmi", "ari")]
            lines.append(f"| {DEMO.get(name, name).format_map(found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


RESULTS: dict[str, str | dict[str, str]] = {  # rows of the README: a cell of the paper, or another result of each set
    "the start, no answers": "scan",
    "constrained, 10,000 random pairs": "constrained-10000",
    "**ConstraintMatch**, 10,000 random pairs": "constraintmatch-10000",
    "10,000 random pairs, default recipe, better start": {
        "cifar10": "safety-cifar10-byol-network",
        "cifar100-20": "safety-cifar100-20-propos-network",
    },
    "500 chosen questions, head alone, on a CPU": "chosen-which-head",
    "500 chosen questions, default recipe, better start": {
        "cifar10": "questions-cifar10-chosen-which-byol-safe-last2000-error0",
        "cifar100-20": "questions-cifar100-20-chosen-which-propos-voted-safe-last4500-error0",
    },
    "500 chosen questions, BYOL start, long training at the end": "chosen-which-byol-anchored-last10000",
    "supervised, all labels": "supervised",
}


def results_table() -> str:
    """Test ACC in % on both CIFAR sets, the paper's next to ours."""
    heads = [text for title in SETS.values() for text in (title, "paper")]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for title, way in RESULTS.items():
        cells = []
        for name in SETS:
            if isinstance(way, dict):
                cells += [_measured(way[name]), "–"]
                continue
            method, _, pairs = way.partition("-")
            known = {"10000": 10_000, "": 0 if method == "scan" else None}
            printed = published(TABLE_1, "test", method, known[pairs]) if pairs in known else None
            theirs = printed.value(name, "acc") if printed else None
            cells += [_ours(name, way), "–" if theirs is None else f"{theirs:.2f}"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ours(name: str, way: str) -> str:
    """Test ACC of full trainings, the mean over the folds; or of a curve after 500 answers."""
    place = ROOT / "results"
    folds = [path for fold in ("", "-fold[0-9]") for path in (place / "paper").glob(f"{name}-{way}{fold}.json")]
    if folds:
        return _mean([100 * json.loads(path.read_text("utf-8"))["scores"]["test"]["acc"] for path in sorted(folds)])
    return _measured(f"questions-{name}-{way}-error0")


def _measured(result: str) -> str:
    """Test ACC after 500 answers, the mean over the seeds; or after 10,000 right pairs, over the samples."""
    names = (result, result.replace("-error0", "-seed*-error0"))
    paths = {path for name in names for path in (ROOT / "results").glob(f"{name}.json")}
    points = []
    for found in (json.loads(path.read_text("utf-8")) for path in sorted(paths)):
        points += [cell for cell in found.get("cells", ()) if (cell["pairs"], cell["wrong"]) == (10_000, "none")]
        points += [point for point in found.get("points", ()) if point["answers"] == 500]
    return _mean([100 * point["acc"] for point in points]) if points else "–"


SETS = {"cifar10": "CIFAR-10", "cifar100-20": "CIFAR-100-20"}
STAGES = {"simclr": "SimCLR", "byol": "BYOL", "scan": "SCAN", "self_label": "self-labelling"}
CHAINS = {  # what their results' names begin with, and their stages in order
    "": {**STAGES, "linear_scan": "linear heads anew"},
    "byol-": {**STAGES, "linear_scan": "linear heads anew"},
}
SCORES = {"knn_acc": "kNN", "acc": "ACC", "nmi": "NMI", "ari": "ARI"}


def stage_results() -> list[tuple[str, str, str, dict[str, Any]]]:
    """Every finished stage as (set, stage, its title, result), in the order of the chains: the paper's, then BYOL's."""
    found = []
    for name in SETS:
        for chain, stages in CHAINS.items():
            for stage, title in stages.items():
                file = ROOT / "results" / f"start-{name}-{chain}{stage}.json"
                if file.is_file():
                    name_of_row = title + (", from BYOL" if chain and stage not in PRETEXTS else "")
                    found.append((name, stage, name_of_row, json.loads(file.read_text(encoding="utf-8"))))
    return found


def stage_table() -> str:
    """Settings, scores and seconds of each stage, for docs/start.md."""
    head = ["set", "stage", "epochs", "batch", "optimiser", "lr", *SCORES.values(), "s", "ms/step", "commit"]
    lines = [
        f"| {' | '.join(head)} |",
        "|" + "|".join(["---"] * 2 + ["--:"] * 2 + ["---"] + ["--:"] * 7 + ["---"]) + "|",
    ]
    for name, stage, title, result in stage_results():
        scores = [f"{100 * result['scores'][key]:.1f}" if key in result["scores"] else "–" for key in SCORES]
        commit = str(result["environment"]["commit"])[:8]
        how, speed = _training_cells(stage, result)
        lines.append(f"| {' | '.join([SETS[name], title, *how, *scores, _seconds(result), speed, commit])} |")
    return "\n".join(lines)


def _seconds(result: dict[str, Any]) -> str:
    return f"{result['seconds']:,.0f}" + ("" if result["environment"]["gpu"] else " (CPU)")


def _training_cells(stage: str, result: dict[str, Any]) -> tuple[list[str], str]:
    """Epochs, batch, optimiser and rate, and ms a step; dashes for a stage that trains no network."""
    defaults = {"simclr": (500, 512), "byol": (500, 256), "scan": (50, 128), "self_label": (200, 1000)}
    if stage not in defaults:
        return ["–"] * 4, "–"
    asked, how = result["arguments"], result["settings"]
    epochs, batch = (
        asked.get(key, value) for key, value in zip(("epochs", "images_per_step"), defaults[stage], strict=True)
    )
    steps = result.get("steps") or how["steps"]
    speed = f"{1e3 * result['training_seconds'] / steps:.1f}" if "training_seconds" in result else "–"
    ema = f", EMA {how['ema']}" if how.get("ema") else ""
    return [str(epochs), str(batch), f"{how['optimizer']}{ema}", f"{how['lr']:g}"], speed


def pretext_table() -> str:
    """Pretext tasks and what their features are worth to a clustering."""
    lines = [
        "| set | task | epochs | batch | s | kNN | neighbours right | k-means ACC | best linear head ACC |",
        "|---|---|" + "--:|" * 7,
    ]
    for path in sorted((ROOT / "results" / "pretext").glob("*.json"), key=lambda path: path.stem, reverse=True):
        found = json.loads(path.read_text(encoding="utf-8"))
        keys = ("knn", "neighbours_features", "k_means_features", "scan_head_features")
        scores = [f"{100 * found['scores'][key]:.1f}" for key in keys]
        batch = str(found["arguments"]["images_per_step"])
        cells = [SETS[found["data"]["name"]], found["method"], str(found["epochs"]), batch, f"{found['seconds']:,.0f}"]
        lines.append(f"| {' | '.join([*cells, *scores])} |")
    return "\n".join(lines)


ANSWERS = {  # a curve's file, and what it is called
    "random-pair": "random pairs, network trained",
    "chosen-which": "chosen, network trained",
    "chosen-which-anchored": "chosen, network trained, held apart",
    "chosen-which-byol-anchored-last10000": "chosen, network trained from BYOL, held apart, "
    "10,000 steps at the end (`--set last_steps=10000`)",
    "chosen-which-byol-safe-last2000": "chosen, default recipe, from BYOL",
    "chosen-which-propos-voted-safe-last4500": "chosen, default recipe, from ProPos",
    "chosen-which-head": "chosen, head alone",
    "chosen-which-head-byol": "chosen, head alone, from BYOL",
    "chosen-which-trained-head-joined": "chosen, head alone (`--frozen`), two networks joined",
}


def answers_table() -> str:
    """Test ACC against answered questions, no wrong answers."""
    budgets = (0, 50, 200, 500, 2_000, 10_000)
    lines = [f"| answered questions | {' | '.join(f'{n:,}' for n in budgets)} |", "|---|" + "--:|" * len(budgets)]
    for name, title in SETS.items():
        for way, called in ANSWERS.items():
            file = ROOT / "results" / f"questions-{name}-{way}-error0.json"
            if file.is_file():
                points = json.loads(file.read_text(encoding="utf-8"))["points"]
                told = {point["answers"]: f"{100 * point['acc']:.1f}" for point in points}
                lines.append(f"| {title}, {called} | {' | '.join(told.get(n, '–') for n in budgets)} |")
    return "\n".join(lines)


def embeddings_table() -> str:
    """Test ACC of a linear head on embeddings, by the number of pairs."""
    found = [json.loads((ROOT / "results" / f"embeddings-{name}.json").read_text(encoding="utf-8")) for name in SETS]
    sizes = sorted({row["pairs"] for row in found[0]["rows"]})
    lines = [
        f"| | start | {' | '.join(f'{n:,} pairs' for n in sizes)} | seconds |",
        f"|---|{'--:|' * (len(sizes) + 2)}",
    ]
    for result in found:
        for method, title in (("constrained", "constrained"), ("constraintmatch", "**ConstraintMatch**")):
            rows = {row["pairs"]: row for row in result["rows"] if row["method"] == method}
            cells = [_mean([100 * one["acc"] for one in rows[n]["scores"]]) for n in sizes]
            first, seconds = 100 * result["start"]["acc"], rows[sizes[-1]]["seconds"]
            lines.append(f"| {SETS[result['data']]}, {title} | {first:.1f} | {' | '.join(cells)} | {seconds:.0f} |")
    starts = " and ".join(f"{result['start']['seconds']:.0f}" for result in found)
    where = found[0]["environment"]
    how = f"{found[0]['rows'][0]['steps']:,} steps, {where['cpu_threads']} threads, {where['platform']}"
    note = f"Seconds are of one training with {sizes[-1]:,} pairs ({how}); the start took {starts} s, once."
    return "\n".join([*lines, "", note])


SYSTEMS = {  # those of benchmarks/compare.py
    "constraintmatch": "**ConstraintMatch**, safe recipe",
    "constrained": "MCL on the pairs alone",
    "start": "the start, no pairs",
    "k_means": "k-means, no pairs",
    "s3c2": "S³C²",
    "cpac": "CPAC",
    "clusternet": "ClusterNet",
    "framework": "deep constrained clustering framework",
    "volmax": "VolMaxDCC",
    "spherepair": "SpherePair",
}


def compare_table() -> str:
    """Test ACC / NMI of every system on embeddings, by the number of pairs, and seconds with the most."""
    names = {"cifar10": "CIFAR-10, BYOL", "cifar100-20": "CIFAR-100-20, ProPos"}
    parts = []
    for name, title in names.items():
        by_method: dict[str, list[dict[str, Any]]] = {}
        for path in sorted((ROOT / "results").glob(f"compare-{name}[.-]*json"), key=lambda path: len(path.name)):
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            for method in {row["method"] for row in rows}:  # a system that was run again has the longer name
                by_method[method] = [row for row in rows if row["method"] == method]
        sizes = sorted({row["pairs"] for row in by_method["start"]})
        lines = [f"| {title} | {' | '.join(f'{n:,} pairs' for n in sizes)} | s |", f"|---|{'--:|' * (len(sizes) + 1)}"]
        for method, system in SYSTEMS.items():
            own = [[row for row in by_method[method] if row["pairs"] == n] for n in sizes]
            means = [[100 * statistics.fmean(row[score] for row in rows) for score in ("acc", "nmi")] for rows in own]
            cells = [" / ".join(f"{mean:.1f}" for mean in pair) for pair in means]
            seconds = statistics.fmean(row["seconds"] for row in own[-1])
            lines.append(f"| {system} | {' | '.join(cells)} | {seconds:.0f} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


PHOTO_ROWS = {  # those of benchmarks/photos.py, by ACC
    "loop": "**`loop`**, chosen questions",
    "PCKMeans": "PCKMeans on the same answers",
    "COBRAS": "COBRAS, as many pairs of its choice",
    "COBRAS, 5 times": "COBRAS, five times as many pairs",
    "logistic regression": "logistic regression on as many labelled images",
    "label spreading": "label spreading on as many labelled images",
}
FREE_ROWS = {  # by the number of clusters found, and ARI
    ("clusters found", "ARI with them"): "`loop` without `--clusters`",
    ("COBRAS: clusters", "COBRAS: ARI"): "COBRAS, as many pairs",
    ("COBRAS, 5 times: clusters", "COBRAS, 5 times: ARI"): "COBRAS, five times as many pairs",
}


def photo_answers_table() -> str:
    """Test ACC after answers about photographs, by set, and what is found where the number of clusters is unknown."""
    found = json.loads((ROOT / "results" / "photos-answers.json").read_text(encoding="utf-8"))
    budgets = sorted({int(row["answers"]) for row in found["rows"]})
    parts = []
    for name in dict.fromkeys(row["set"] for row in found["rows"]):
        rows = {int(row["answers"]): row for row in found["rows"] if row["set"] == name}
        first = rows[budgets[0]]
        lines = [
            f"**{name}**: k-means {100 * first['k-means']:.1f}, the start {100 * first['start']:.1f}",
            "",
            f"| answers | {' | '.join(map(str, budgets))} |",
            f"|---|{'--:|' * len(budgets)}",
        ]
        for key, title in ((key, title) for key, title in PHOTO_ROWS.items() if key in first):
            lines.append(f"| {title} | {' | '.join(f'{100 * rows[n][key]:.1f}' for n in budgets)} |")
        for (number, score), title in ((keys, title) for keys, title in FREE_ROWS.items() if keys[0] in first):
            cells = [f"{rows[n][number]:.0f} ({100 * rows[n][score]:.1f})" for n in budgets]
            lines.append(f"| clusters found (ARI): {title} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


MERGING = {  # the ways of benchmarks/merging.py
    "constrained": "constrained",
    "constraintmatch": "ConstraintMatch",
    "merged": "merged, not trained",
    "merged, constrained": "merged, constrained",
    "merged, constraintmatch": "merged, **ConstraintMatch**",
}


def merging_table() -> str:
    """Test ACC of a head with too many clusters, with and without a merge first, and how many clusters are left."""
    names = {"cifar10-50": "CIFAR-10, 50 clusters", "cifar100-20-100": "CIFAR-100-20, 100 clusters"}
    found = {name: json.loads((ROOT / "results" / f"merging-{name}.json").read_text("utf-8")) for name in names}
    sizes = sorted({row["pairs"] for row in found["cifar10-50"]["rows"]})
    columns = [f"{title}, {n:,} pairs" for title in names.values() for n in sizes]
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    starts = [_score(found[name]["start"]) for name in names for _ in sizes]
    lines.append(f"| the start | {' | '.join(starts)} |")
    for way, title in MERGING.items():
        cells = []
        for name in names:
            rows = {row["pairs"]: row["scores"] for row in found[name]["rows"] if row["way"] == way}
            cells += [_merged(rows[n], many=name.rsplit("-", 1)[-1]) for n in sizes]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_networks(names, sizes)])


def _merged(scores: list[dict[str, float]], many: str) -> str:
    """The mean of several samples; where clusters were merged, how many are left of so many."""
    left = sorted({int(one["clusters"]) for one in scores})
    told = "" if left == [int(many)] else f"; {left[0]}" if len(left) == 1 else f"; {left[0]}–{left[-1]}"
    nmi = statistics.mean(100 * one["nmi"] for one in scores)
    return f"{_mean([100 * one['acc'] for one in scores])} ({nmi:.1f}{told})"


def _score(told: dict[str, float]) -> str:
    return f"{100 * told['acc']:.1f} ({100 * told['nmi']:.1f})"


def _networks(names: Iterable[str], sizes: Sequence[int]) -> list[str]:
    """Rows of the merging table: whole networks from the same starts, from Table III's cells, and the paper's."""
    ways = {way: title for way, title in MERGING.items() if way != "merged"}
    lines = []
    for way, title in ways.items():
        method, marks = way.removeprefix("merged, "), "-merge=1" if way.startswith("merged, ") else ""
        cells = []
        for dataset, outputs in (name.rsplit("-", 1) for name in names):
            for n in sizes:
                path = ROOT / "results" / "paper" / f"{dataset}-{method}-{n}-k{outputs}{marks}-fold0.json"
                told = json.loads(path.read_text("utf-8"))["scores"]["test"] if path.is_file() else None
                cells.append(_score(told) if told else "–")
        lines.append(f"| {title}, the network | {' | '.join(cells)} |")
    for method in ("constrained", "constraintmatch"):
        rows = {n: published(TABLE_3, "test", method, n) for n in sizes}
        sets = [name.rsplit("-", 1)[0] for name in names]
        cells = [
            f"{row.value(one, 'acc')} ({row.value(one, 'nmi')})" if (row := rows[n]) else "–"
            for one in sets
            for n in sizes
        ]
        lines.append(f"| {MERGING[method]}, the paper's network | {' | '.join(cells)} |")
    return lines


def safety_table() -> str:
    """Test ACC by the safe and the paper's recipe, with right and wrong pairs."""
    found = json.loads((ROOT / "results" / "safety-cifar100-20-features.json").read_text(encoding="utf-8"))
    cells: dict[tuple[str, str, int], list[float]] = {}
    for cell in found["cells"]:
        cells.setdefault((cell["recipe"], cell["wrong"], cell["pairs"]), []).append(100 * cell["acc"])
    sizes = sorted({key[2] for key in cells})
    titles = {"none": "all right", "all:0.1": "a tenth of all wrong", "both:0.1": "a tenth wrong, alike"}
    lines = [f"| | {' | '.join(f'{n:,} pairs' for n in sizes)} |", "|---|" + "--:|" * len(sizes)]
    start = f"{100 * found['start']:.1f}"
    lines.append(f"| the start | {' | '.join([start] * len(sizes))} |")
    for wrong, said in titles.items():
        for recipe, name in (("paper", "the paper's recipe"), ("safe", "**safe**")):
            row = [_mean(cells[recipe, wrong, n]) if (recipe, wrong, n) in cells else "–" for n in sizes]
            lines.append(f"| {said}, {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def photographs_table() -> str:
    """Test ACC of networks trained on photographs by the safe recipe, by the number of right pairs."""
    sizes, lines = (300, 1_000, 3_000), []
    for method, name in (("constrained", "constrained"), ("constraintmatch", "ConstraintMatch")):
        found = json.loads((ROOT / "results" / f"safety-stl10-own-{method}.json").read_text(encoding="utf-8"))
        start = f"{100 * found['start']:.1f}"
        lines = lines or [
            f"| | {' | '.join(f'{n:,} pairs' for n in sizes)} |",
            "|---|" + "--:|" * len(sizes),
            f"| the start | {' | '.join([start] * len(sizes))} |",
        ]
        rows = [[100 * cell["acc"] for cell in found["cells"] if cell["pairs"] == n] for n in sizes]
        lines.append(f"| {name} | {' | '.join(f'{_mean(row)} (lowest {min(row):.1f})' for row in rows)} |")
    return "\n".join(lines)


def loop_table() -> str:
    """Test ACC of `loop` on photographs, the network trained in every round: mean and lowest of the samples."""
    rows: dict[float, list[list[float]]] = {}
    for path in sorted((ROOT / "results").glob("loop-stl10*"), key=lambda path: len(path.name)):
        curves = json.loads(path.read_text(encoding="utf-8"))["curves"]
        for wrong in {one["wrong"] for one in curves}:  # a row that was run again has the longer name
            rows[wrong] = [[100 * point["acc"] for point in one["points"]] for one in curves if one["wrong"] == wrong]
    sizes = [point["answers"] for point in curves[0]["points"]]
    lines = [f"| answers | {' | '.join(map(str, sizes))} |", "|---|" + "--:|" * len(sizes)]
    for wrong, samples in sorted(rows.items()):
        cells = [f"{statistics.fmean(column):.1f} ({min(column):.1f})" for column in zip(*samples, strict=True)]
        lines.append(f"| {f'{100 * wrong:g} % wrong' if wrong else 'all right'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def networks_table() -> str:
    """Test ACC of networks that ConstraintMatch trains by the safe recipe, with random pairs, from several starts."""
    columns = ((1_000, "none"), (10_000, "none"), (10_000, "all:0.1"))
    lines = ["| | the start | 1,000 pairs | 10,000 pairs | a tenth of 10,000 wrong |", "|---|--:|--:|--:|--:|"]
    for name, title in NETWORKS.items():
        row = ["–"] * len(columns)
        paths = (ROOT / "results").glob(f"safety-{name}-network*.json")
        for path in sorted(paths, key=lambda path: len(path.name)):  # a part that was run again has the longer name
            found = json.loads(path.read_text(encoding="utf-8"))
            for at, key in enumerate(columns):
                cells = [100 * cell["acc"] for cell in found["cells"] if (cell["pairs"], cell["wrong"]) == key]
                row[at] = _mean(cells) if cells else row[at]
        lines.append(f"| {title} | {100 * found['start']:.1f} | {' | '.join(row)} |")
    return "\n".join(lines)


def grid_tables(names: Mapping[str, str] = GRIDS) -> str:
    """Test ACC of a head on frozen features for every way of asking, coloured by its distance from the start."""
    parts = []
    for name, title in names.items():
        paths = sorted((ROOT / "results").glob(f"grid-{name}*"), key=lambda path: len(path.name))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if not found:
            continue
        start = 100 * found[0]["start"]
        cells: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}  # scores, and how far from the start
        for grid in found:  # rows that were run again have the longer name
            rows: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}
            for curve in grid["curves"]:
                row = rows.setdefault((curve["way"], curve["wrong"]), {})
                for point in curve["points"]:
                    scored = 100 * point["acc"], 100 * (point["acc"] - grid["start"])
                    row.setdefault(point["answers"], []).append(scored)
            cells |= rows
        sizes = sorted({n for row in cells.values() for n in row})
        head = "".join(f"<th>{n:,}</th>" for n in sizes)
        body = "\n".join(_grid_row(key, cells[key], sizes) for key in sorted(cells, key=_grid_order))
        parts.append(f"### {title}: the start has {start:.1f}\n")
        parts.append(f'<table class="grid"><tr><th>answers</th>{head}</tr>\n{body}\n</table>\n')
    return "\n".join(parts)


def _grid_order(key: tuple[str, str]) -> tuple[int, str]:
    return list(ASKED).index(key[0]), key[1].replace("none", "")


def _grid_row(key: tuple[str, str], row: Mapping[int, list[tuple[float, float]]], sizes: Sequence[int]) -> str:
    kind, _, share = key[1].partition(":")
    wrong = f"{100 * float(share):g} % wrong{WRONG_KINDS[kind] if key[0] == 'random' else ''}" if share else "all right"
    shown = []
    for n in sizes:
        if n not in row:
            shown.append("<td></td>")
            continue
        mean, least = statistics.fmean(score for score, _ in row[n]), min(score for score, _ in row[n])
        gain = round(statistics.fmean(gain for _, gain in row[n]), 1)
        colour = (
            f' style="background:rgba({"0,150,90" if gain > 0 else "220,50,30"},{min(abs(gain) / 10, 1) * 0.6:.2f})"'
        )
        shown.append(f'<td{colour if gain else ""} title="lowest {least:.1f}">{mean:.1f}</td>')
    return f"<tr><td>{ASKED[key[0]]}, {wrong}</td>{''.join(shown)}</tr>"


def uneven_table() -> str:
    """Test ACC of a head on frozen features when the simulated annotator errs in other ways, and how often it did."""
    found = json.loads((ROOT / "results" / "grid-uneven-cifar10-scan.json").read_text(encoding="utf-8"))
    rows: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}  # scores, and how many answers were wrong
    for one in found["curves"]:
        for point in one["points"]:
            row = rows.setdefault((one["way"], one["wrong"]), {})
            row.setdefault(point["answers"], []).append((100 * point["acc"], point["wrong"]))
    order = [(way, kind) for way in ASKED for kind in UNEVEN]
    sizes = sorted({n for row in rows.values() for n in row})
    lines = [f"| errors | {' | '.join(f'{n:,} answers' for n in sizes)} |", "|---|" + "--:|" * len(sizes)]
    lines.append("| the start" + f" | {100 * found['start']:.1f}" * len(sizes) + " |")
    for way, wrong in sorted(rows, key=lambda key: (order.index((key[0], key[1].partition(":")[0])), key[1])):
        cells = [_uneven_cell(rows[way, wrong].get(n, [])) for n in sizes]
        lines.append(f"| {ASKED[way]}, {UNEVEN[wrong.partition(':')[0]]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _uneven_cell(samples: Sequence[tuple[float, float]]) -> str:
    if not samples:
        return "–"
    scores, wrong = zip(*samples, strict=True)
    lowest = f", lowest {min(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.1f} ({statistics.fmean(wrong):.0%} wrong{lowest})"


def wrong_table() -> str:
    """Test ACC on the digits with some pairs wrong; the loss knows how many, or does not."""
    found = json.loads((ROOT / "results" / "wrong-pairs-digits.json").read_text(encoding="utf-8"))
    rows = [row for row in found["rows"] if "error_rate" in row]
    shares = sorted({row["wrong"] for row in rows})
    lines = [
        f"| pairs that are wrong | {' | '.join(f'{share:.0%}' for share in shares)} |",
        "|---|" + "--:|" * len(shares),
    ]
    for method, title in (("constrained", "constrained"), ("constraintmatch", "ConstraintMatch")):
        own = [row for row in rows if row["method"] == method]
        for told in (False, True):
            chosen = {row["wrong"]: row["acc"] for row in own if (row["error_rate"] > 0) == told}
            cells = [f"{100 * statistics.fmean(chosen[share]):.1f}" for share in shares]
            lines.append(f"| {title}{', error rate given' * told} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"The start, before any pair, has {100 * found['start']:.1f}."])


def speed_table() -> str:
    """Milliseconds a step beside the bare network's, from one process."""
    found = json.loads((ROOT / "results" / "speed-h200.json").read_text(encoding="utf-8"))
    lines = ["| step | ms | bare network, ms | ratio | images/s |", "|---|--:|--:|--:|--:|"]
    for name, row in found["rows"].items():
        batch = found["batches"][name]
        seen = 2 * batch.get("pairs_per_step", 0) + batch.get("images_per_step", 0)
        size = " + ".join(f"{count} {kind.split('_')[0]}" for kind, count in batch.items())
        rate = f"{1e3 * seen / row['ms']:,.0f}"
        lines.append(f"| {name} ({size}) | {row['ms']:.2f} | {row['floor_ms']:.2f} | {row['ratio']:.2f} | {rate} |")
    return "\n".join(lines)


def scale_table() -> str:
    """Seconds and added memory of neighbours, label spreading and questions, by the number of images."""
    found = json.loads((ROOT / "results" / "scale.json").read_text(encoding="utf-8"))
    heads = ("exact, s", "MiB", "exact / FAISS flat", "FAISS lists, s", "MiB", "recall")
    heads += ("label spreading, s", "MiB", "100 questions, s", "MiB")
    lines = [f"| images | {' | '.join(heads)} |", "|--:|" + "--:|" * len(heads)]
    for n in sorted({row["rows"] for row in found["rows"]}):
        own = {row["task"]: row for row in found["rows"] if row["rows"] == n}
        cost = {
            task: [f"{'~' * (row['part'] < 1)}{row['seconds']:,.1f}", f"{row['mib']:,}"] for task, row in own.items()
        }
        ratio = f"{own['exact']['seconds'] / own['flat']['seconds']:.2f}" if "flat" in own else "–"
        recall = own["lists"]["said"].split("recall ")[1].split()[0] if "lists" in own else "–"
        lists = cost.get("lists", ["–", "–"])
        cells = [*cost["exact"], ratio, *lists, recall, *cost["spread"], *cost["questions"]]
        lines.append(f"| {n:,} | {' | '.join(cells)} |")
    where = found["environment"]
    data = f"{found['width']} numbers a row, {found['neighbours']} neighbours"
    note = f"{found['threads']} threads, {where['platform']}, {data}. With ~ a part was measured and scaled."
    return "\n".join([*lines, "", note])


def streaming_table() -> str:
    """Decoding, waiting and memory of images from shards, by their number and side, one table for each machine."""
    heads = ("images", "side", "decoded a second", "CPU of a plain loop", "s for all", "MiB", "map, GB")
    heads += ("step, ms", "of resident", "cold", "CPU that reads", "cold")
    parts = []
    for path in sorted((ROOT / "results").glob("streaming*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        lines = [f"| {' | '.join(heads)} |", "|--:|" + "--:|" * (len(heads) - 1)]
        lines += [_streaming_row(row) for row in found["rows"] if row["task"] == "ours"]
        where = found["environment"]
        made = f"{where['gpu'] or where['platform']}, {found['cores']} cores, JPEGs decoded on the {found['decoder']}"
        parts += ["\n".join(lines), f"{made}; steps of {found['batch']} images, {found['backbone']}."]
        parts += [_readers(found["rows"])]
    return "\n\n".join(filter(None, parts))


def _streaming_row(row: Mapping[str, Any]) -> str:
    """A line of the table; ~ where it was extrapolated."""
    far = "~" * ("extrapolated_from" in row)
    cells = [f"{row['images']:,}", str(row["side"]), f"{row['decode_rate']:,}"]
    cells += [f"{row['decode_cpu_ms'] / row['plain_cpu_ms']:.2f}"]
    cells += [f"{far}{row['decode_s']:,.0f}", f"{far}{row['decode_mib']:,.0f}"]
    cells += [f"{row['images'] * row['map_bytes'] / 1e9:,.1f}"]
    if "streamed_ms" not in row:
        return f"| {' | '.join([*cells, *'–––––'])} |"
    base, streamed = row["resident_ms"], row["streamed_ms"]
    cells += [f"{streamed:,.0f}", f"{streamed / base:.2f}", f"{row['cold_ms'] / base:.2f}"]
    cells += [f"{row[name]:.2%}" for name in ("read_share", "cold_read_share")]
    return f"| {' | '.join(cells)} |"


def _readers(rows: Sequence[Mapping[str, Any]]) -> str:
    """Images a second of an epoch: our map, and readers that decode anew."""
    titles = {"map_rate": "the map", "cold_map_rate": "the map, cold", "webdataset": "WebDataset", "litdata": "LitData"}
    lines = ["| reader | images | side | images/s | of a plain loop |", "|---|--:|--:|--:|--:|"]
    floor = {row["side"]: row["plain_rate"] for row in reversed(rows) if row["task"] == "ours"}
    for row in rows:
        names = {"rate": row["task"]} if "rate" in row else {name: name for name in titles if name in row}
        for name, title in names.items():
            ratio = f"{row[name] / floor[row['side']]:.1f}"
            lines.append(f"| {titles[title]} | {row['images']:,} | {row['side']} | {row[name]:,} | {ratio} |")
    return "\n".join(lines)


def speed_line() -> str:
    """A step and a whole training of ConstraintMatch, in one sentence."""
    speed = json.loads((ROOT / "results" / "speed-h200.json").read_text(encoding="utf-8"))
    row, commit = speed["rows"]["constraintmatch"], speed["environment"]["commit"][:7]
    cells = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "results" / "paper").glob("*.json"))
    ]
    alone = [
        found["seconds"]
        for found in cells
        if found["kind"] == "cell"
        and found["cell"]["method"] == "constraintmatch"
        and found["cell"]["n_constraints"] == 10_000
        and not (found["cut"] or found["cell"]["options"] or found["cell"]["noise"])
        and found["cell"]["dataset"] in SETS
        and found["environment"]["gpu"] == "NVIDIA H200"
    ]
    whole = " to ".join(f"{seconds:,.0f}" for seconds in sorted({min(alone), max(alone)}))
    step = f"{row['ms']:.2f} ms, {row['ratio']:.2f} times its bare network (commit {commit})"
    return (
        f"On one H200 a step of ConstraintMatch takes {step}, and a training of 20,000 steps {whole} s, all included."
    )


CELLS = (("scan", 0), ("constrained", 10_000), ("constraintmatch", 10_000))  # rows of the reproduction table


def reproduction_part(folder: Path) -> str:
    """The reproduction table with its remark, or a line that says how to fill it."""
    rows = find_rows(read_results(folder))
    if not any(Cell(name, method, n) in rows for name in SETS for method, n in CELLS):
        return "The trainings of the paper's tables have not been run yet; `constraintmatch paper table1` runs them."
    own = [f"{_printed(name, 'scan', 0, 'train+test'):.2f}" for name in SETS]
    starts = [rows.get(Cell(name, "scan")) for name in SETS]
    ours = [spread(row.summary("train+test", "acc")) if row else NOT_YET for row in starts]
    return (
        f"Test accuracy in % with 10,000 pairs:\n\n{reproduction_table(rows)}\n\n"
        "The paper's test scores of SCAN are quoted from the literature. On train and test images together it measured "
        f"SCAN itself, probably the weights that it began with: {' and '.join(own)}; our starts there: "
        f"{' and '.join(ours)}."
    )


def reproduction_table(rows: Mapping[Cell, Row]) -> str:
    """Test ACC at 10,000 constraints on both CIFAR sets, the paper's next to ours; full trainings only.

    The gains are those of the last row over the first: on the test images, and on all, where the paper measured SCAN
    itself.
    """
    lines = [["SCAN (our start; the paper's)"], ["Constrained"], ["**ConstraintMatch**"]]
    gains = {"test": ["gain over the start"], "train+test": ["the same on train and test images together"]}
    for name in SETS:
        ours = [rows.get(Cell(name, method, n)) for method, n in CELLS]
        check_same_start(row for row in ours if row)
        for line, row, (method, n) in zip(lines, ours, CELLS, strict=True):
            folds = "" if row is None or method == "scan" else f" (n = {len(row.results)})"
            shown = spread(row.summary("test", "acc")) + folds if row else NOT_YET
            line += [shown, f"{_printed(name, method, n):.2f}"]
        for split, line in gains.items():
            start, last = (row.summary(split, "acc").mean if row else None for row in (ours[0], ours[-1]))
            theirs = _printed(name, *CELLS[-1], split) - _printed(name, "scan", 0, split)
            line += [signed(None if start is None or last is None else last - start), signed(theirs)]
    header = ["", *(text for title in SETS.values() for text in (title, "paper"))]
    return markdown(header, [*lines, *gains.values()])


def _printed(name: str, method: str, n_constraints: int, split: str = "test") -> float:
    row = published(TABLE_1, split, method, n_constraints)
    assert row is not None
    return row.scores[name][0]


def decisions_list() -> str:
    """A link to every decision, by its title."""
    lines = []
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        number, title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").split(" ", 1)
        lines.append(f"- [{number.rstrip(':')}]({path.name}): {title}")
    return "\n".join(lines)


def filled(text: str) -> str:
    """The page with its generated parts made anew; it has some of them."""
    parts = {
        "demo table": demo_table,
        "results table": results_table,
        "answers table": answers_table,
        "safety table": safety_table,
        "photographs table": photographs_table,
        "loop table": loop_table,
        "networks table": networks_table,
        "grid": grid_tables,
        "other sets": lambda: grid_tables(OTHERS),
        "uneven table": uneven_table,
        "wrong table": wrong_table,
        "merging table": merging_table,
        "embeddings table": embeddings_table,
        "compare table": compare_table,
        "photo answers table": photo_answers_table,
        "stage table": stage_table,
        "pretext table": pretext_table,
        "speed table": speed_table,
        "scale table": scale_table,
        "streaming table": streaming_table,
        "speed line": speed_line,
        "decisions list": decisions_list,
        "reproduction table": lambda: reproduction_part(ROOT / "results" / "paper"),
    }
    for name, make in parts.items():
        if f"<!-- {name} -->\n" in text:
            before, rest = text.split(f"<!-- {name} -->\n")
            after = rest.split(f"<!-- end of {name} -->")[1]
            text = f"{before}<!-- {name} -->\n{make()}\n<!-- end of {name} -->{after}"
    return text


def _mean(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
