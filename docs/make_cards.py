"""Writes README.md of model folders from the results that have their weights: python docs/make_cards.py weights/NAME"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_atomically
from constraintmatch.data.datasets import DATASETS
from constraintmatch.models.cluster_model import load_model, model_folder
from constraintmatch.paper.results import METRICS, TABLE_1, TABLE_3, is_whole, published, read_result
from constraintmatch.paper.tables import DASH, TITLES, markdown, number
from constraintmatch.pipeline.train import weights_hash

_CARDS = Environment(
    loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)
_STAGE_SCORES = {"knn_acc": "accuracy of the 20 nearest neighbours", "acc": "ACC", "nmi": "NMI", "ari": "ARI"}
Stage = tuple[Mapping[str, Any], Path, Mapping[str, Any]]  # an entry of a model's history, and the result of that run


def write_card(folder: Path | str, results: Path | str = "results/paper") -> Path:
    """The folder's README.md, written again."""
    target, text = model_folder(folder) / "README.md", card_text(folder, results)
    write_atomically(target, lambda path: path.write_text(text, encoding="utf-8"))
    return target


def card_text(folder: Path | str, results: Path | str = "results/paper") -> str:
    """The card: what the model is, its scores and how to check them, how it was made.

    The scores are of the cell among `results` that has these weights. Seconds of earlier stages come from
    `start-SET-STAGE.json` in the folder above, or `start-SET-PRETEXT-STAGE.json` by the model's first stage; so do the
    scores of a stage that is no cell.
    """
    folder, results = Path(folder), Path(results)
    model = load_model(folder)
    path, cell = _find_cell(weights_hash(model), results)
    trained = model.config.trained
    stages = [_stage(one, str(trained[0]["method"]), results.parent) for one in trained]
    if cell is not None:
        found, values = cell, {**_cell_values(cell), "cell": cell["cell"]}
    elif stages and stages[-1][2]:
        entry, path, found = stages[-1]
        named = {title: found["scores"][key] for key, title in _STAGE_SCORES.items() if key in found["scores"]}
        values = {"scores": ", ".join(f"{title} {100 * value:.2f}" for title, value in named.items())}
        values["cell"] = {"method": "", "dataset": entry["data"]["name"]}
    else:
        raise InputError(
            f"{folder}: no result in {results} has these weights, so there is nothing to state; "
            "run its cell with constraintmatch paper, or name the folder with --results"
        )
    size = (model_folder(folder) / "model.safetensors").stat().st_size / 1e6
    values |= {"name": folder.name, "folder": _shown(folder), "source": _shown(path), "config": model.config}
    values["stages"] = _made(stages, cell)
    row = DATASETS[values["cell"]["dataset"]]
    return _CARDS.get_template("card.jinja").render(found=found, row=row, megabytes=size, **values)


def _stage(entry: Mapping[str, Any], pretext: str, folder: Path) -> Stage:
    """The entry with its result, which has the same steps, rate and seed; with an empty one if there is none."""
    start, method = f"start-{entry.get('data', {}).get('name')}", entry["method"]
    for path in (folder / f"{start}-{pretext}-{method}.json", folder / f"{start}-{method}.json"):
        found = read_json(path) if path.is_file() else {}
        settings = {**found.get("settings", {}), **({"steps": found["steps"]} if "steps" in found else {})}
        if found and all(settings.get(key) == entry[key] for key in ("steps", "lr", "seed")):
            return entry, path, found
    return entry, path, {}


def _find_cell(weights: str, results: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """The result whose half-precision model has these weights, and its file."""
    for path in sorted(results.glob("*.json")):
        found = read_result(path)
        if found is not None and found.content.get("half", {}).get("weights") == weights:
            return path, found.content
    return results, None


def _cell_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """The scores as a table and as they are to be found again, the method's title and its settings."""
    kept, method = found["half"]["scores"]["test"], found["cell"]["method"]
    ours = {"this folder, half precision": kept, "as trained": found["scores"]["test"]}
    lines = [[title, *(f"{100 * scores[metric]:.2f}" for metric in METRICS)] for title, scores in ours.items()]
    chosen = {**found["arguments"], **found["settings"], "evaluate_every": None}  # which changes nothing
    return {
        "title": TITLES[method],
        "scores": markdown(["", *(metric.upper() for metric in METRICS)], [*lines, *_paper_line(found)]),
        "expected": ", ".join(f"{metric.upper()} {kept[metric]:.4f}" for metric in METRICS),
        "settings": ", ".join(f"`{key}` {value}" for key, value in chosen.items() if value is not None),
    }


def _paper_line(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """The paper's values, if it has this cell; none for a cut training or a smaller copy of the set."""
    cell, dataset = found["cell"], found["cell"]["dataset"]
    if found["cut"] or cell["options"] or cell["noise"] or not is_whole(dataset, found["data"]):
        return
    bound = cell["method"] in ("supervised", "fully_constrained")
    table = TABLE_1 if cell["n_clusters"] == DATASETS[dataset].n_clusters else TABLE_3
    row = published(table, "test", cell["method"], None if bound else cell["n_constraints"])
    if row is not None and dataset in row.scores:
        yield ["the paper's", *(number(row.value(dataset, metric)) for metric in METRICS)]


def _made(stages: Sequence[Stage], cell: Mapping[str, Any] | None) -> str:
    """A line for each stage; seconds and hardware where its result is known."""
    lines = []
    for place, (entry, _, result) in enumerate(stages):
        if cell is not None and place == len(stages) - 1 and cell["cell"]["method"] == entry["method"]:
            result = cell
        where = result.get("environment", {})
        seconds = f"{result['seconds']:,.0f}" if result else DASH
        facts = (where.get("gpu") or where.get("platform"), where.get("torch"), where.get("commit"))
        how = [str(entry["method"]), f"{entry['steps']:,}", f"{entry['lr']:g}", seconds]
        lines.append([*how, *(str(fact or DASH) for fact in facts)])
    return markdown(["stage", "steps", "lr", "seconds", "hardware", "torch", "commit"], lines)


def _shown(path: Path) -> str:
    """The path as given; only the name of an absolute path, which differs on other machines."""
    return path.name if path.is_absolute() else path.as_posix()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a model folder")
    parser.add_argument("--results", type=Path, default=Path("results/paper"), help="folder with one JSON per cell")
    asked = parser.parse_args()
    try:
        for folder in asked.folders:
            print(write_card(folder, asked.results))
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
