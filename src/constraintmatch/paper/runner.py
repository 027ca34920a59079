"""Runs cells: one training, one JSON; finished cells are skipped, interrupted ones go on from their checkpoint."""

import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import InUse, folder_lock
from constraintmatch._internal.progress import Quiet, Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions, agreement, predict, scores
from constraintmatch.methods import Context, Trained, ViewChoice
from constraintmatch.models.cluster_model import (
    ClusterModel,
    build_model,
    load_model,
    model_folder,
    save_model,
    unfilled_model,
)
from constraintmatch.paper.grids import Cell
from constraintmatch.paper.model_cards import write_card
from constraintmatch.paper.results import FORMAT, FREE_SETTINGS, read_content
from constraintmatch.pipeline.config import make_config, method_arguments, method_settings, split_options
from constraintmatch.pipeline.train import train, weights_hash
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.loop import NonFinite, choose_device
from constraintmatch.training.run_folder import is_finished as run_is_finished
from constraintmatch.training.run_folder import write_result

__all__ = [
    "Place",
    "cell_constraints",
    "cell_images",
    "cell_states",
    "is_finished",
    "run_cell",
    "run_cells",
    "run_missing",
    "train_cell",
]

# A supervised training begins with random weights and is no part of the paper's search: the field's usual setting.
SUPERVISED = {"lr": 0.1, "weight_decay": 5e-4, "schedule": "cosine"}


SHARING = 6  # cells in a row that share compiled code; the compiler keeps eight versions of a function


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
    """The results of the cells, in order; what is finished is not run again.

    Results, data and starts are looked at before the first training. Several processes of a machine may share the
    cells, one for each GPU: what another one is working at is left to it. A training that diverges does not stop the
    queue: it is named at the end.
    """
    _check_doors([cell for cell in cells if not is_finished(cell, place)], place)
    diverged, elsewhere = [], []
    compiled: list[tuple[str, int]] = []  # the shapes of the networks since the compiler forgot
    for number, cell in enumerate(cells, start=1):
        name = f"{number} of {len(cells)}: {cell.name}"
        try:
            if is_finished(cell, place):
                place.reporter.say(f"{name}: finished before{_kept_now(cell, place)}")
                continue
            with folder_lock(place.runs / cell.name / "cell"):
                if not is_finished(cell, place):  # another process may have come to its end just now
                    place.reporter.say(name)
                    _prepare_compiler(compiled, (cell.dataset, cell.n_clusters))
                    told = run_cell(cell, place)["scores"]["test"]
                    place.reporter.say(f"{cell.name}: " + ", ".join(f"{key} {100 * told[key]:.2f}" for key in told))
        except InUse:
            place.reporter.say(f"{name}: another process is working at it")
            elsewhere.append(cell)
        except NonFinite as error:
            diverged.append(str(error.at(cell.name)))
            place.reporter.say(diverged[-1])
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(
                f"{cell.name}: {str(stop) or 'stopped'}; the same command goes on from there"
            ) from stop
    if diverged:
        raise InputError(f"{len(diverged)} of {len(cells)} cells diverged, the others are finished; {diverged[0]}")
    return [_target(cell, place) for cell in cells if cell not in elsewhere]


def run_missing(cells: Sequence[Cell], place: Place) -> None:
    """Runs the cells; without a data folder those that are finished are enough, and the others are counted."""
    missing = [cell for cell in cells if not is_finished(cell, place)]
    away = [cell for cell in missing if not DATASETS[cell.dataset].bundled]
    if place.data_dir is None and away and len(away) < len(cells):
        place.reporter.say(
            f"{len(away):,} of {len(cells):,} cells are missing; --data-dir DIR runs them, --list names them"
        )
        cells = [cell for cell in cells if cell not in away]
    run_cells(cells, place)


def cell_states(cells: Sequence[Cell], place: Place) -> list[tuple[str, str]]:
    """Finished, begun or missing, and the cell's name; at last how many there are of each."""
    rows = [(_state(cell, place), cell.name) for cell in cells]
    counts = Counter(state for state, _ in rows)
    return [*rows, ("in all", ", ".join(f"{n:,} {state}" for state, n in counts.items()))]


def _state(cell: Cell, place: Place) -> str:
    if is_finished(cell, place):
        return "finished"
    return "begun" if (place.runs / cell.name / "checkpoint.safetensors").is_file() else "missing"


def is_finished(cell: Cell, place: Place) -> bool:
    """Whether the cell's result is there; a result of another form, setting or start is refused by name."""
    path = _target(cell, place)
    if not path.is_file():
        return False
    found = read_content(path)
    if found is None:
        raise InputError(f"{path}: not the result of a cell; move it away or choose another --results")
    if other := next(_differences(cell, found, place), None):
        raise InputError(f"{path}: a result of other settings ({other}); move it away or choose another --results")
    if cell.start != "random" and not (place.starts / cell.start).is_dir():
        return True  # a result may be looked at without its start
    before, weights = found["start"]["weights"], _start_hash(cell, place)
    if before != weights:
        raise InputError(
            f"{path}: a result from another start ({before}, {cell.start} is {weights}); "
            "move it away or choose another --results"
        )
    return True


def run_cell(cell: Cell, place: Place) -> dict[str, Any]:
    """The cell's result, which is written too."""
    began = time.monotonic()
    start = _start(cell, place)
    start_hash = weights_hash(start)
    _forget_peak()
    trained = _trained(cell, start, place)
    kept = _rounded(trained.model)
    if place.models is not None and cell.method != "scan":  # a start lies in its own folder
        save_model(kept, place.models / cell.name, half=True)
    arguments, settings = _asked(cell, place)
    training_seconds = trained.log[-1]["seconds"] if trained.log else 0.0
    result = {
        "format": FORMAT,
        "kind": "cell",
        "name": cell.name,
        "cell": cell.request(),
        "cut": cell.cut,
        "data": _data(cell, place),
        "start": {"name": cell.start, "weights": start_hash},
        "arguments": arguments,
        "settings": settings,
        "seed": cell.fold,
        "scores": {split: _scores(trained.model, cell, split, place) for split in ("test", "train+test")},
        "half": {"weights": weights_hash(kept), "scores": {"test": _scores(kept, cell, "test", place)}},
        "validation": _validation(trained.model, cell, place),
        "curve": [entry for entry in trained.log if entry["kind"] == "evaluation"],
        "seconds": round(max(time.monotonic() - began, training_seconds), 1),  # a resumed one began earlier
        "training_seconds": training_seconds,
        "peak_gib": _peak(),
    }
    write_result(_target(cell, place), result)
    if place.models is not None and cell.method != "scan":
        write_card(place.models / cell.name, place.results)
    return result


def cell_constraints(cell: Cell, images: ImageSet) -> Constraints | None:
    """Fold i is sample i of the constraints, some of them wrong where the cell says so; None for other methods."""
    if not cell.n_constraints:
        return None
    assert images.labels is not None
    sample = Constraints.sample(images.labels, cell.n_constraints, seed=cell.fold)
    seed = derive_seed(cell.fold, "noise")
    if not cell.noise:
        return sample
    return sample.flip(cell.noise, seed=seed) if cell.noise_of == "all" else _flip_alike(sample, cell.noise, seed)


def _flip_alike(sample: Constraints, share: float, seed: int) -> Constraints:
    """The share of the must-links turned round, and as many cannot-links: there are as many of each as before."""
    apart = sample.flip(share, seed=seed, only="must-link")
    n = np.count_nonzero(apart.link != sample.link)
    n_cannot = np.count_nonzero(sample.link < 0.5)
    together = sample.flip(n / n_cannot, seed=seed, only="cannot-link")
    return replace(sample, link=np.where(apart.link != sample.link, apart.link, together.link))


def train_cell(cell: Cell, place: Place) -> ClusterModel:
    """The trained model of a cell, from its run folder if it is finished; no result is written."""
    return _trained(cell, _start(cell, place), place).model


def cell_images(cell: Cell, split: str, place: Place) -> ImageSet:
    """One split of the cell's data set; the last few are kept in memory."""
    return _images(cell.dataset, split, place.data_dir)


def _trained(cell: Cell, start: ClusterModel, place: Place) -> Trained:
    """The model of the cell and its log, on the device where it is scored."""
    device = choose_device(place.settings.get("device"))
    if cell.method == "scan":
        return Trained(start.to(device), [])
    images, row = cell_images(cell, "train", place), DATASETS[cell.dataset]
    context = Context(
        out=place.runs / cell.name,
        resume=True,
        reporter=place.reporter,
        held_out=cell_images(cell, "test", place),
        data={"name": cell.dataset, "split": "train", "kind": "dataset"},
    )
    views = ViewChoice(flip=row.flip, without=tuple(sorted(row.without)))
    config = make_config(cell.method, _all_options(cell, place), start=start, views=views)
    trained = train(images, cell_constraints(cell, images), config, context)
    trained.model.to(device)  # a finished run comes from its folder
    return trained


def _all_options(cell: Cell, place: Place) -> dict[str, Any]:
    """The options of the cell, with how often it is watched, how long it is, and what the place says."""
    every = max(1, cell.steps // 10)
    watched = {"evaluate_every": every, "checkpoint_every": 1_000, "log_every": max(1, every // 4)}
    return {**watched, **_options(cell), "steps": cell.steps, "seed": cell.fold, **place.settings}


def _asked(cell: Cell, place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """All arguments and settings that decide the result, the defaults too, as its JSON has them."""
    if cell.method == "scan":
        return {}, {}
    arguments, changes = split_options(cell.method, _all_options(cell, place))
    defaults = {name: parameter.default for name, parameter in method_arguments(cell.method).items()}
    return {**defaults, **arguments}, method_settings(cell.method, changes).request()


def _differences(cell: Cell, found: Mapping[str, Any], place: Place) -> Iterator[str]:
    """What a result was made with and is not asked for now; an entry that only one of them knows is passed over."""
    arguments, settings = _asked(cell, place)
    for name, values in (("cell", cell.request()), ("arguments", arguments), ("settings", settings)):
        before = found[name]
        for key in sorted(values.keys() & before.keys() - {*FREE_SETTINGS}):
            if before[key] != values[key]:
                yield f"{key} is {before[key]!r}, asked is {values[key]!r}"


def _check_doors(cells: Sequence[Cell], place: Place) -> None:
    """An InputError for data or a start that a later cell would miss."""
    for cell in {cell.dataset: cell for cell in cells}.values():
        cell_images(cell, "test", place)
    for cell in {cell.start: cell for cell in cells}.values():
        _start(cell, place)


def _kept_now(cell: Cell, place: Place) -> str:
    """Keeps the model of a finished cell, if it was not and its run is still there; what to say of it."""
    if place.models is None or cell.method == "scan" or (place.models / cell.name).is_dir():
        return ""
    if not run_is_finished(place.runs / cell.name):
        return f"; its model is not kept: there is no run in {place.runs / cell.name}"
    save_model(load_model(place.runs / cell.name), place.models / cell.name, half=True)
    write_card(place.models / cell.name, place.results)
    return ""


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
        raise InputError(
            f"{folder}: the start of {cell.name} is not there; make it with "
            f"constraintmatch pretrain {cell.dataset} --clusters {cell.n_clusters}, or name its folder with --starts"
        )
    model = load_model(folder)
    if model.config.n_clusters != cell.n_clusters:
        raise InputError(f"{folder}: has {model.config.n_clusters} clusters, {cell.name} needs {cell.n_clusters}")
    return model


def _start_hash(cell: Cell, place: Place) -> str:
    if cell.start == "random":
        return weights_hash(_start(cell, place))
    folder = model_folder(place.starts / cell.start)
    return _hash_of(folder, (folder / "model.safetensors").stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _hash_of(folder: Path, _: int) -> str:
    """The hash of a model folder that was changed then."""
    return weights_hash(load_model(folder))


@functools.lru_cache(maxsize=8)  # a queue goes over the four splits of two sets again and again
def _images(dataset: str, split: str, data_dir: Path | None) -> ImageSet:
    return load_dataset(dataset, split, data_dir)


def _data(cell: Cell, place: Place) -> dict[str, Any]:
    """How many images there are and which, so that a smaller copy of a set is not taken for the set."""
    train, test = (cell_images(cell, split, place) for split in ("train", "test"))
    return {"train": len(train), "test": len(test), "fingerprint": test.fingerprint()}


def _rounded(model: ClusterModel) -> ClusterModel:
    """The model as a half-precision folder gives it back."""
    weights = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    rounded = unfilled_model(model.config)
    rounded.load_state_dict(weights)
    return rounded.to(model.device)


def _scores(model: ClusterModel, cell: Cell, split: str, place: Place) -> dict[str, float]:
    images = cell_images(cell, split, place)
    assert images.labels is not None
    told = scores(images.labels, _predicted(model, images))
    return {key: told[key] for key in ("acc", "nmi", "ari")}


def _predicted(model: ClusterModel, images: ImageSet) -> Predictions:
    """Predictions in full fp32 on a GPU too: TF32 would move a few images that a CPU places elsewhere."""
    import torch

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return predict(model, images)


def _validation(model: ClusterModel, cell: Cell, place: Place) -> dict[str, Any]:
    """The paper's criterion for its search: the loss on constraints between validation images, the same for all."""
    images = cell_images(cell, "val", place)
    assert images.labels is not None
    pairs = Constraints.sample(images.labels, DATASETS[cell.dataset].n_validation_constraints, seed=0)
    told = agreement(pairs, _predicted(model, images))
    return {"loss": told["constraint_loss"], "balanced": told["balanced"], "constraints": len(pairs)}


def _target(cell: Cell, place: Place) -> Path:
    return place.results / f"{cell.name}.json"


def _prepare_compiler(compiled: list[tuple[str, int]], shape: tuple[str, int]) -> None:
    """A long queue would else reach the compiler's limit of versions of one function, and go on uncompiled.

    Cells of one set and one number of clusters share what was compiled for the first; a loss with another threshold is
    one version more.
    """
    import torch

    if compiled and (shape not in compiled or len(compiled) == SHARING):
        torch.compiler.reset()
        compiled.clear()
    compiled.append(shape)


def _forget_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> float | None:
    import torch

    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None
