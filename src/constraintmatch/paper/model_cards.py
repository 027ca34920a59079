"""Model cards: README.md of a model folder, made from the results that have its weights."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_atomically
from constraintmatch.data.datasets import DATASETS
from constraintmatch.models.cluster_model import ClusterModel, load_model, model_folder
from constraintmatch.paper.grids import STEPS
from constraintmatch.paper.results import METRICS, TABLE_1, TABLE_3, is_whole, published, read_content
from constraintmatch.paper.tables import DASH, TITLES, markdown, number
from constraintmatch.pipeline.train import weights_hash

__all__ = ["card_text", "write_card"]

_WHAT = {
    "scan": "The self-supervised start of the trainings on pairs: made from the images alone, without labels or pairs.",
    "constrained": "Trained on pairs alone, the paper's constrained competitor.",
    "pseudo_label": "Trained on pairs, and on the other images with pseudo-labels.",
    "constraintmatch": "Trained with ConstraintMatch: on pairs, and on the other images with pseudo-constraints.",
    "fully_constrained": "The paper's upper bound: trained on all pairs of the training images.",
    "supervised": "The paper's other upper bound: trained on the labels of the training images.",
}
_LABELS = {
    "supervised": "The labels of all training images were used.",
    "fully_constrained": "The labels of all training images were used, to tell which pairs belong together.",
}
_STAGE = "A stage of a self-supervised start: made from the images alone, without labels or pairs."
_NO_LABELS = "Labels were used for nothing but the scores."

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
        what, dataset, parts = _WHAT[cell["cell"]["method"]], cell["cell"]["dataset"], _cell_parts(folder, cell)
    elif stages and stages[-1][2]:
        entry, path, result = stages[-1]
        what, dataset = _STAGE, str(entry["data"]["name"])
        parts = _stage_parts(folder, dataset, result["scores"])
    else:
        raise InputError(
            f"{folder}: no result in {results} has these weights, so there is nothing to state; "
            "run its cell with constraintmatch paper, or name the folder with --results"
        )
    source = f"Made by `constraintmatch card` from `{_shown(path)}`; a test fails when it is stale."
    licence = "The model is under the MIT licence, as the program is. The images are not part of it."
    head = [f"# {folder.name}", f"{what} {DATASETS[dataset].title}: {_architecture(model, folder)}"]
    return "\n\n".join([*head, *parts, _made(stages, cell), f"## Licence\n\n{licence}", source]) + "\n"


def _stage(entry: Mapping[str, Any], pretext: str, folder: Path) -> Stage:
    """The entry with its result, which has the same steps, rate and seed; with an empty one if there is none."""
    start, method = f"start-{entry.get('data', {}).get('name')}", entry["method"]
    for path in (folder / f"{start}-{pretext}-{method}.json", folder / f"{start}-{method}.json"):
        found = read_json(path) if path.is_file() else {}
        settings = {**found.get("settings", {}), **({"steps": found["steps"]} if "steps" in found else {})}
        if found and all(settings.get(key) == entry[key] for key in ("steps", "lr", "seed")):
            return entry, path, found
    return entry, path, {}


def _find_cell(weights: str, results: Path) -> tuple[Path, dict[str, Any] | None]:
    """The result whose half-precision model has these weights, and its file."""
    for path in sorted(results.glob("*.json")):
        found = read_content(path)
        if found is not None and found.get("half", {}).get("weights") == weights:
            return path, found
    return results, None


def _cell_parts(folder: Path, found: Mapping[str, Any]) -> Iterator[str]:
    """The scores, how to check them, and the training."""
    cell, kept = found["cell"], found["half"]["scores"]["test"]
    ours = {"this folder, half precision": kept, "as trained": found["scores"]["test"]}
    lines = [[title, *(f"{100 * scores[metric]:.2f}" for metric in METRICS)] for title, scores in ours.items()]
    yield "## Scores"
    yield markdown(["", *(metric.upper() for metric in METRICS)], [*lines, *_paper_line(found)])
    yield f"In %, on the {found['data']['test']:,} test images."
    if found["cut"]:
        yield f"The training is cut: {cell['steps']:,} of {STEPS:,} steps. It is not comparable with the paper's."
    expected = ", ".join(f"{metric.upper()} {kept[metric]:.4f}" for metric in METRICS)
    yield "To check them, on a CPU or a GPU (`--json FILE` has all digits):"
    yield _command(folder, cell["dataset"])
    yield f"should say {expected}, ACC to ± 0.0005 (a twentieth of a point): machines round differently."
    yield "## How it was made"
    yield _training(found)


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


def _command(folder: Path, dataset: str) -> str:
    where = "" if DATASETS[dataset].bundled else " --data-dir DIR"
    return f"```sh\nconstraintmatch evaluate {_shown(folder)} {dataset}{where}\n```"


def _training(found: Mapping[str, Any]) -> str:
    """Constraints, start, arguments and settings of the last stage."""
    cell = found["cell"]
    method = cell["method"]
    if method == "scan":
        return _NO_LABELS
    said = [f"{found['data']['train']:,} training images."]
    if cell["n_constraints"]:
        whose = "the must-links and as many others" if cell.get("noise_of") == "alike" else "them"
        noise = f", {100 * cell['noise']:g} % of {whose} wrong" if cell["noise"] else ""
        said.append(f"{cell['n_constraints']:,} pairs drawn from their labels (fold {cell['fold']}{noise}).")
    said.append(_LABELS.get(method, f"{_NO_LABELS[:-1]} and these pairs." if cell["n_constraints"] else _NO_LABELS))
    said.append(f"Start: `{found['start']['name']}`, weights `{found['start']['weights']}`.")
    chosen = {**found["arguments"], **found["settings"], "evaluate_every": None}  # which changes nothing
    settings = ", ".join(f"`{key}` {value}" for key, value in chosen.items() if value is not None)
    return f"{TITLES[method]}: {' '.join(said)}\n\nSettings: {settings}."


def _stage_parts(folder: Path, dataset: str, scores: Mapping[str, float]) -> Iterator[str]:
    names = {"knn_acc": "accuracy of the 20 nearest neighbours", "acc": "ACC", "nmi": "NMI", "ari": "ARI"}
    said = ", ".join(f"{title} {100 * scores[key]:.2f}" for key, title in names.items() if key in scores)
    yield "## Scores"
    yield f"On the test images, in %, before rounding to half precision: {said}."
    if "acc" in scores:
        yield _command(folder, dataset)
    yield "## How it was made"
    yield _NO_LABELS


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


def _architecture(model: ClusterModel, folder: Path) -> str:
    config = model.config
    size = (model_folder(folder) / "model.safetensors").stat().st_size / 1e6
    colour = "grey" if config.channels == 1 else "colour"
    clusters = f"{config.n_clusters} clusters" if config.n_clusters else "no clusters yet"
    return f"`{config.backbone}`, {config.side} × {config.side} {colour} images, {clusters}, {size:.1f} MB."


def _shown(path: Path) -> str:
    """The path as given; only the name of an absolute path, which differs on other machines."""
    return path.name if path.is_absolute() else path.as_posix()
