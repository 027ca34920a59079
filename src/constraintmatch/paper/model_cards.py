"""Model cards: README.md of a model folder, made from the results that have its weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_atomically
from constraintmatch.data.datasets import DATASETS
from constraintmatch.models.cluster_model import ClusterModel, load_model, model_folder
from constraintmatch.paper.grids import STEPS
from constraintmatch.paper.published import METRICS, TABLE_1, TABLE_3, PublishedRow, published
from constraintmatch.paper.results import read_content
from constraintmatch.paper.tables import DASH, TITLES, markdown
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


def write_card(folder: Path | str, results: Path | str = "results/paper") -> Path:
    """The folder's README.md, written anew."""
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
    elif stages and stages[-1].result:
        what, dataset, path = _STAGE, stages[-1].dataset, stages[-1].path
        parts = _stage_parts(folder, stages[-1])
    else:
        raise InputError(
            f"{folder}: no result in {results} has these weights, so there is nothing to state; "
            "run its cell with constraintmatch paper, or name the folder with --results"
        )
    source = f"Made by `constraintmatch card` from `{_shown(path)}`; a test fails when it is stale."
    licence = "The model is under the MIT licence, as the program is. The images are not part of it."
    head = [f"# {folder.name}", f"{what} {DATASETS[dataset].title}: {_architecture(model, folder)}"]
    return "\n\n".join([*head, *parts, _made(stages, cell), f"## Licence\n\n{licence}", source]) + "\n"


# Where the numbers come from


@dataclass(frozen=True)
class _Stage:
    """One entry of a model's history, and the result of that stage where it is of the same run, else nothing."""

    told: Mapping[str, Any]
    path: Path
    result: Mapping[str, Any]

    @property
    def dataset(self) -> str:
        return str(self.told["data"]["name"])


def _stage(told: Mapping[str, Any], pretext: str, folder: Path) -> _Stage:
    start, method = f"start-{told.get('data', {}).get('name')}", told["method"]
    for path in (folder / f"{start}-{pretext}-{method}.json", folder / f"{start}-{method}.json"):
        found = read_json(path) if path.is_file() else {}
        settings = {**found.get("settings", {}), **({"steps": found["steps"]} if "steps" in found else {})}
        if found and all(settings.get(key) == told[key] for key in ("steps", "lr", "seed")):
            return _Stage(told, path, found)
    return _Stage(told, path, {})


def _find_cell(weights: str, results: Path) -> tuple[Path, dict[str, Any] | None]:
    """The result whose half-precision model has these weights, and its file."""
    for path in sorted(results.glob("*.json")):
        found = read_content(path)
        if found is not None and found.get("half", {}).get("weights") == weights:
            return path, found
    return results, None


# What is said


def _cell_parts(folder: Path, found: Mapping[str, Any]) -> Iterator[str]:
    """The scores, how to check them, and the training."""
    cell = found["cell"]
    yield "## Scores"
    yield _score_table(found)
    yield f"In %, on the {found['data']['test']:,} test images."
    if found["cut"]:
        yield f"The training is cut: {cell['steps']:,} of {STEPS:,} steps. It is not comparable with the paper's."
    yield _check(folder, cell["dataset"], found["half"]["scores"]["test"])
    yield "## How it was made"
    yield _training(found)


def _score_table(found: Mapping[str, Any]) -> str:
    ours = {"this folder, half precision": found["half"]["scores"]["test"], "as trained": found["scores"]["test"]}
    lines = [[title, *(f"{100 * told[metric]:.2f}" for metric in METRICS)] for title, told in ours.items()]
    if (paper := _paper(found)) is not None:
        values = [paper.value(found["cell"]["dataset"], metric) for metric in METRICS]
        lines.append(["the paper's", *(DASH if value is None else f"{value:.2f}" for value in values)])
    return markdown(["", *(metric.upper() for metric in METRICS)], lines)


def _paper(found: Mapping[str, Any]) -> PublishedRow | None:
    """The printed row of this cell, if the paper has it; none for a cut training or a smaller copy of the set."""
    cell = found["cell"]
    whole = (found["data"]["train"], found["data"]["test"]) == DATASETS[cell["dataset"]].splits[::2]
    if found["cut"] or cell["options"] or cell["noise"] or not whole:
        return None
    bound = cell["method"] in ("supervised", "fully_constrained")
    wide = cell["n_clusters"] != DATASETS[cell["dataset"]].n_clusters
    row = published(TABLE_3 if wide else TABLE_1, "test", cell["method"], None if bound else cell["n_constraints"])
    return row if row is not None and cell["dataset"] in row.scores else None


def _check(folder: Path, dataset: str, told: Mapping[str, float]) -> str:
    where = "" if DATASETS[dataset].bundled else " --data-dir DIR"
    expected = ", ".join(f"{metric.upper()} {told[metric]:.4f}" for metric in METRICS)
    return f"""To check them, on a CPU or a GPU (`--json FILE` has all digits):

```sh
constraintmatch evaluate {_shown(folder)} {dataset}{where}
```

should say {expected}, ACC to ± 0.0005 (a twentieth of a point): machines round differently."""


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
    told = ", ".join(f"`{key}` {value}" for key, value in chosen.items() if value is not None)
    return f"{TITLES[method]}: {' '.join(said)}\n\nSettings: {told}."


def _stage_parts(folder: Path, stage: _Stage) -> Iterator[str]:
    names = {"knn_acc": "accuracy of the 20 nearest neighbours", "acc": "ACC", "nmi": "NMI", "ari": "ARI"}
    told = [
        f"{title} {100 * stage.result['scores'][key]:.2f}"
        for key, title in names.items()
        if key in stage.result["scores"]
    ]
    yield "## Scores"
    yield f"On the test images, in %, before rounding to half precision: {', '.join(told)}."
    if "acc" in stage.result["scores"]:
        where = "" if DATASETS[stage.dataset].bundled else " --data-dir DIR"
        yield f"```sh\nconstraintmatch evaluate {_shown(folder)} {stage.dataset}{where}\n```"
    yield "## How it was made"
    yield _NO_LABELS


def _made(stages: Sequence[_Stage], cell: Mapping[str, Any] | None) -> str:
    """A line for each stage; seconds and hardware where its result is known."""
    lines = []
    for place, stage in enumerate(stages):
        last = place == len(stages) - 1 and cell is not None and cell["cell"]["method"] == stage.told["method"]
        result = cell if last and cell is not None else stage.result
        where = result.get("environment", {})
        lines.append(
            [
                str(stage.told["method"]),
                f"{stage.told['steps']:,}",
                f"{stage.told['lr']:g}",
                f"{result['seconds']:,.0f}" if result else DASH,
                str(where.get("gpu") or where.get("platform") or DASH),
                str(where.get("torch") or DASH),
                str(where.get("commit") or DASH),
            ]
        )
    return markdown(["stage", "steps", "lr", "seconds", "hardware", "torch", "commit"], lines)


def _architecture(model: ClusterModel, folder: Path) -> str:
    config = model.config
    size = (model_folder(folder) / "model.safetensors").stat().st_size / 1e6
    colour = "grey" if config.channels == 1 else "colour"
    clusters = f"{config.n_clusters} clusters" if config.n_clusters else "no clusters yet"
    return f"`{config.backbone}`, {config.side} × {config.side} {colour} images, {clusters}, {size:.1f} MB."


def _shown(path: Path) -> str:
    """As it was given; of an absolute path, which is nobody else's, the name."""
    return path.name if path.is_absolute() else path.as_posix()
