"""Runs cells: one training, one JSON; finished cells are skipped, interrupted ones go on from their checkpoint."""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from constraintmatch.batches import derive_seed
from constraintmatch.constraints import Constraints
from constraintmatch.datasets import DATASETS, load_dataset
from constraintmatch.errors import InputError
from constraintmatch.evaluation import agreement, predict, scores
from constraintmatch.files import read_json
from constraintmatch.images import ImageSet
from constraintmatch.methods import Trained, ViewChoice
from constraintmatch.models import ClusterModel, build_model, load_model, save_model
from constraintmatch.paper.cells import Cell
from constraintmatch.paper.results import FORMAT
from constraintmatch.progress import Quiet, Reporter
from constraintmatch.running import Around, method_settings, run_method, split_options, weights_hash
from constraintmatch.runs import write_result

__all__ = ["Place", "cell_constraints", "cell_images", "is_finished", "run_cell", "run_cells", "train_cell"]

# A supervised training begins with random weights and is no part of the paper's search: the field's usual setting.
SUPERVISED = {"lr": 0.1, "weight_decay": 5e-4, "schedule": "cosine"}


@dataclass(frozen=True)
class Place:
    """Where a queue finds its data and starts, and where it leaves results, runs and models."""

    data_dir: Path | None = None
    starts: Path = Path("weights")
    results: Path = Path("results/paper")
    runs: Path = Path("runs/paper")
    models: Path | None = None  # None: trained models are not kept beside the run folder
    settings: Mapping[str, Any] = field(default_factory=dict)  # how to train, not what: device, compile …
    reporter: Reporter = field(default_factory=Quiet)


def run_cells(cells: Sequence[Cell], place: Place) -> list[Path]:
    """The results of the cells, in order; what is finished is not run again."""
    found = []
    for number, cell in enumerate(cells, start=1):
        if is_finished(cell, place):
            place.reporter.say(f"{number} of {len(cells)}: {cell.name}: finished before")
        else:
            place.reporter.say(f"{number} of {len(cells)}: {cell.name}")
            told = run_cell(cell, place)["scores"]["test"]
            _forget_compiled()
            place.reporter.say(f"{cell.name}: " + ", ".join(f"{key} {100 * told[key]:.2f}" for key in told))
        found.append(_target(cell, place))
    return found


def is_finished(cell: Cell, place: Place) -> bool:
    """Whether the cell's result is there; a result of another format, setting or start is refused by name."""
    path = _target(cell, place)
    if not path.is_file():
        return False
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("kind") != "cell":
        raise InputError(f"{path}: not a result of format {FORMAT}; move it away or choose another --results")
    if differing := [key for key, value in cell.request().items() if found["cell"].get(key) != value]:
        key = differing[0]
        raise InputError(
            f"{path}: a result of other settings ({key} is {found['cell'].get(key)!r}, asked is "
            f"{cell.request()[key]!r}); move it away or choose another --results"
        )
    if cell.start != "random" and not (place.starts / cell.start).is_dir():
        return True  # a result may be looked at without its start
    weights = weights_hash(_start(cell, place))
    if found["start"]["weights"] != weights:
        raise InputError(
            f"{path}: a result from another start ({found['start']['weights']}, {cell.start} is {weights}); "
            "move it away or choose another --results"
        )
    return True


def run_cell(cell: Cell, place: Place) -> dict[str, Any]:
    """The cell's result, which is written too."""
    began = time.monotonic()
    start = _start(cell, place)
    start_hash = weights_hash(start)
    _forget_peak()
    trained, request = _trained(cell, start, place)
    if place.models is not None and cell.method != "scan":
        save_model(trained.model, place.models / cell.name, half=True)
    result = {
        "format": FORMAT,
        "kind": "cell",
        "name": cell.name,
        "cell": cell.request(),
        "cut": cell.cut,
        "start": {"name": cell.start, "weights": start_hash},
        **request,
        "seed": cell.fold,
        "scores": {split: _scores(trained.model, cell, split, place) for split in ("test", "train+test")},
        "validation": _validation(trained.model, cell, place),
        "curve": [entry for entry in trained.log if entry["kind"] == "evaluation"],
        "seconds": round(time.monotonic() - began, 1),
        "training_seconds": trained.log[-1]["seconds"] if trained.log else 0.0,
        "peak_gib": _peak(),
    }
    write_result(_target(cell, place), result)
    return result


def cell_constraints(cell: Cell, images: ImageSet) -> Constraints | None:
    """Fold i is sample i of the constraints, some of them wrong where the cell says so; None for other methods."""
    if not cell.n_constraints:
        return None
    assert images.labels is not None
    sample = Constraints.sample(images.labels, cell.n_constraints, seed=cell.fold)
    return sample.flip(cell.noise, seed=derive_seed(cell.fold, "noise")) if cell.noise else sample


def train_cell(cell: Cell, place: Place) -> ClusterModel:
    """The trained model of a cell, from its run folder if it is finished; no result is written."""
    return _trained(cell, _start(cell, place), place)[0].model


def cell_images(cell: Cell, split: str, place: Place) -> ImageSet:
    """One split of the cell's data set; the last few are kept in memory."""
    return _images(cell.dataset, split, place.data_dir)


def _trained(cell: Cell, start: ClusterModel, place: Place) -> tuple[Trained, dict[str, Any]]:
    """The model of the cell, and how it was trained."""
    if cell.method == "scan":
        return Trained(start, []), {"arguments": {}, "settings": {}}
    images, row = cell_images(cell, "train", place), DATASETS[cell.dataset]
    arguments, changes = split_options(cell.method, _options(cell))
    every = max(1, cell.steps // 10)
    watched = {"evaluate_every": every, "checkpoint_every": max(1_000, every), "log_every": max(1, every // 4)}
    settings = method_settings(
        cell.method, {**watched, **changes, "steps": cell.steps, "seed": cell.fold, **place.settings}
    )
    around = Around(
        out=place.runs / cell.name,
        resume=True,
        reporter=place.reporter,
        views=ViewChoice(flip=row.flip, without=tuple(sorted(row.without))),
        held_out=cell_images(cell, "test", place),
        data={"name": cell.dataset, "split": "train", "kind": "dataset"},
    )
    pairs = cell_constraints(cell, images)
    trained = run_method(cell.method, start, images, pairs, arguments=arguments, settings=settings, around=around)
    return trained, {"arguments": arguments, "settings": settings.request()}


def _options(cell: Cell) -> dict[str, Any]:
    """The paper's setting of the set, with what the cell changes."""
    row = DATASETS[cell.dataset]
    sizes: dict[str, Any] = {}
    if cell.method in ("constraintmatch", "pseudo_label"):
        sizes = {"pairs_per_step": row.pairs_per_step, "images_per_step": row.images_per_step}
    elif cell.method == "constrained":
        sizes = {"pairs_per_step": row.pairs_per_step}
    elif cell.method in ("fully_constrained", "supervised"):
        sizes = {"images_per_step": 2 * row.pairs_per_step}
    tuned = row.tuned.get(cell.method, {"lr": row.tuned["constrained"]["lr"]})
    return {**sizes, **tuned, **(SUPERVISED if cell.method == "supervised" else {}), **dict(cell.options)}


def _start(cell: Cell, place: Place) -> ClusterModel:
    row = DATASETS[cell.dataset]
    if cell.start == "random":
        return build_model(
            n_clusters=cell.n_clusters,
            side=row.side,
            channels=row.channels,
            backbone=row.backbone,
            mean=row.mean,
            std=row.std,
            seed=derive_seed(cell.fold, "model"),
        )
    folder = place.starts / cell.start
    if not folder.is_dir():
        raise InputError(f"{folder}: the start of {cell.name} is not there; make it with constraintmatch pretrain")
    model = load_model(folder)
    if model.config.n_clusters != cell.n_clusters:
        raise InputError(f"{folder}: has {model.config.n_clusters} clusters, {cell.name} needs {cell.n_clusters}")
    return model


@functools.lru_cache(maxsize=4)  # a queue goes over the same splits again and again
def _images(dataset: str, split: str, data_dir: Path | None) -> ImageSet:
    return load_dataset(dataset, split, data_dir)


def _scores(model: ClusterModel, cell: Cell, split: str, place: Place) -> dict[str, float]:
    images = cell_images(cell, split, place)
    assert images.labels is not None
    told = scores(images.labels, predict(model, images))
    return {key: told[key] for key in ("acc", "nmi", "ari")}


def _validation(model: ClusterModel, cell: Cell, place: Place) -> dict[str, Any]:
    """The paper's criterion for its search: the loss on constraints between validation images, the same for all."""
    images = cell_images(cell, "val", place)
    assert images.labels is not None
    pairs = Constraints.sample(images.labels, DATASETS[cell.dataset].n_validation_constraints, seed=0)
    told = agreement(pairs, predict(model, images))
    return {"loss": told["constraint_loss"], "balanced": told["balanced"], "constraints": len(pairs)}


def _target(cell: Cell, place: Place) -> Path:
    return place.results / f"{cell.name}.json"


def _forget_compiled() -> None:
    """A long queue would else reach the compiler's limit of versions of one function, and go on uncompiled."""
    import torch

    torch.compiler.reset()


def _forget_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> float | None:
    import torch

    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None
