"""Runs cells: one training, one JSON; finished cells are skipped, interrupted ones go on from their checkpoint."""

import copy
import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import InUse, folder_lock
from constraintmatch._internal.progress import Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions, agreement, predict, scores
from constraintmatch.methods import Context, Trained
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model, model_folder, save_model
from constraintmatch.paper.grids import PAIRED, Cell
from constraintmatch.paper.results import FORMAT, FREE_SETTINGS, METRICS, Result, read_result
from constraintmatch.pipeline.config import complete_options, make_config
from constraintmatch.pipeline.plan import choose_views
from constraintmatch.pipeline.train import train, weights_hash
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.loop import NonFinite, choose_device
from constraintmatch.training.run_folder import is_finished as run_is_finished
from constraintmatch.training.run_folder import write_result

# A supervised training begins with random weights and is no part of the paper's search: the field's usual setting.
SUPERVISED = {"lr": 0.1, "weight_decay": 5e-4, "schedule": "cosine"}
SHARING = 6  # cells in a row that share compiled code; the compiler keeps eight versions of a function
_FIX = "move it away or choose another --results"
_images = functools.lru_cache(maxsize=8)(load_dataset)  # a queue uses the four splits of two sets again and again


@dataclass(frozen=True)
class Place:
    """Where a queue finds its data and starts, and where it leaves results, runs and models."""

    data_dir: Path | None = None
    starts: Path = Path("weights")
    results: Path = Path("results/paper")
    runs: Path = Path("runs/paper")
    models: Path | None = None  # None: a trained model is kept in its run folder only
    settings: Mapping[str, Any] = field(default_factory=dict)  # how to train, not what: device, compile …
    reporter: Reporter = field(default_factory=Reporter)

    def result(self, cell: Cell) -> Path:
        """The file of the cell's result."""
        return self.results / f"{cell.name}.json"

    def images(self, cell: Cell, split: str) -> ImageSet:
        """One split of the cell's data set; the last few are kept in memory."""
        return _images(cell.dataset, split, self.data_dir)


def run_cells(cells: Sequence[Cell], place: Place) -> list[Path]:
    """The results of the cells, in order; what is finished is not run again.

    Results, data and starts are checked before the first training. Without a data folder the finished cells are enough,
    and the others are counted. Several processes of a machine may share the cells, one for each GPU: each leaves the
    others' cells alone. A training that diverges does not stop the queue: it is named at the end.
    """
    missing = [cell for cell in cells if not is_finished(cell, place)]
    away = [cell for cell in missing if place.data_dir is None and not DATASETS[cell.dataset].bundled]
    if 0 < len(away) < len(cells):
        counts = f"{len(away):,} of {len(cells):,} cells are missing"
        place.reporter.say(f"{counts}; --data-dir DIR runs them, --list names them")
        cells, missing = ([cell for cell in some if cell not in away] for some in (cells, missing))
    for cell in {cell.dataset: cell for cell in missing}.values():
        place.images(cell, "test")
    for cell in {cell.start: cell for cell in missing}.values():
        _start(cell, place)
    diverged, elsewhere = [], []
    compiled: list[tuple[str, int]] = []  # the shapes of the networks since the compiler was reset
    for number, cell in enumerate(cells, start=1):
        name = f"{number} of {len(cells)}: {cell.name}"
        try:
            if is_finished(cell, place):
                place.reporter.say(f"{name}: finished before{_keep_later(cell, place)}")
                continue
            with folder_lock(place.runs / cell.name / "cell"):
                if not is_finished(cell, place):  # another process may have finished it just now
                    place.reporter.say(name)
                    _prepare_compiler(compiled, (cell.dataset, cell.n_clusters))
                    found = run_cell(cell, place)["scores"]["test"]
                    place.reporter.say(f"{cell.name}: " + ", ".join(f"{key} {100 * found[key]:.2f}" for key in found))
        except InUse:
            place.reporter.say(f"{name}: another process is working at it")
            elsewhere.append(cell)
        except NonFinite as error:
            diverged.append(str(error.at(cell.name)))
            place.reporter.say(diverged[-1])
        except KeyboardInterrupt as stop:
            reason = str(stop) or "stopped"
            raise KeyboardInterrupt(f"{cell.name}: {reason}; the same command goes on from there") from stop
    if diverged:
        raise InputError(f"{len(diverged)} of {len(cells)} cells diverged, the others are finished; {diverged[0]}")
    return [place.result(cell) for cell in cells if cell not in elsewhere]


def cell_states(cells: Sequence[Cell], place: Place) -> list[tuple[str, str]]:
    """Finished, begun or missing, and the cell's name; in the last row how many there are of each."""
    rows = []
    for cell in cells:
        begun = (place.runs / cell.name / "checkpoint.safetensors").is_file()
        rows.append(("finished" if is_finished(cell, place) else "begun" if begun else "missing", cell.name))
    counts = Counter(state for state, _ in rows)
    return [*rows, ("in all", ", ".join(f"{n:,} {state}" for state, n in counts.items()))]


def is_finished(cell: Cell, place: Place) -> bool:
    """Whether the cell's result is there; a result of another form, setting or start is refused by name."""
    path = place.result(cell)
    if not path.is_file():
        return False
    found = read_result(path)
    if found is None:
        raise InputError(f"{path}: not the result of a cell; {_FIX}")
    if other := next(_differences(cell, found, place), None):
        raise InputError(f"{path}: a result of other settings ({other}); {_FIX}")
    if cell.start == "random":
        weights = weights_hash(_start(cell, place))
    elif (place.starts / cell.start).is_dir():
        folder = model_folder(place.starts / cell.start)
        weights = _hash_of(folder, (folder / "model.safetensors").stat().st_mtime_ns)
    else:
        return True  # a result can be read without its start
    if (before := found.weights) != weights:
        raise InputError(f"{path}: a result from another start ({before}, {cell.start} is {weights}); {_FIX}")
    return True


def run_cell(cell: Cell, place: Place) -> dict[str, Any]:
    """The cell's result, which is written too."""
    began, gpu = time.monotonic(), torch.cuda.is_available()
    start = _start(cell, place)
    start_hash = weights_hash(start)  # before the training, which is in place
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    model, log = _train(cell, start, place)
    kept = _rounded(model)
    arguments, settings = _asked(cell, place)
    train_set, test_set = (place.images(cell, split) for split in ("train", "test"))
    training_seconds = log[-1]["seconds"] if log else 0.0
    result = {
        "format": FORMAT,
        "kind": "cell",
        "name": cell.name,
        "cell": cell.request(),
        "cut": cell.cut,
        # how many images and which: a smaller copy of a set is not taken for the set
        "data": {"train": len(train_set), "test": len(test_set), "fingerprint": test_set.fingerprint()},
        "start": {"name": cell.start, "weights": start_hash},
        "arguments": arguments,
        "settings": settings,
        "seed": cell.fold,
        "scores": {split: _scores(model, place.images(cell, split)) for split in ("test", "train+test")},
        "half": {"weights": weights_hash(kept), "scores": {"test": _scores(kept, test_set)}},
        "validation": _validation(model, cell, place),
        "curve": [entry for entry in log if entry["kind"] == "evaluation"],
        "seconds": round(max(time.monotonic() - began, training_seconds), 1),  # a resumed one began earlier
        "training_seconds": training_seconds,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if gpu else None,
    }
    write_result(place.result(cell), result)
    if place.models is not None and cell.method != "scan":  # a start has its own folder
        save_model(kept, place.models / cell.name, half=True)
    return result


def cell_pairs(cell: Cell, images: ImageSet) -> Constraints | None:
    """Fold i is sample i of the constraints, with the cell's share of wrong ones; None for methods without them."""
    if not cell.n_constraints:
        return None
    assert images.labels is not None
    sample = Constraints.sample(images.labels, cell.n_constraints, seed=cell.fold)
    seed = derive_seed(cell.fold, "noise")
    if cell.noise_of == "all":
        return sample.flip(cell.noise, seed=seed)
    apart = sample.flip(cell.noise, seed=seed, only="must-link")
    wrong = apart.link != sample.link
    share = np.count_nonzero(wrong) / np.count_nonzero(sample.link < 0.5)  # as many cannot-links
    together = sample.flip(share, seed=seed, only="cannot-link")
    return replace(sample, link=np.where(wrong, apart.link, together.link))


def train_cell(cell: Cell, place: Place) -> ClusterModel:
    """The trained model of a cell, from its run folder if it is finished; no result is written."""
    return _train(cell, _start(cell, place), place).model


def _train(cell: Cell, start: ClusterModel, place: Place) -> Trained:
    """The model of the cell and its log, on the device where it is scored."""
    device = choose_device(place.settings.get("device"))
    if cell.method == "scan":
        return Trained(start.to(device), [])
    images = place.images(cell, "train")
    context = Context(
        out=place.runs / cell.name,
        resume=True,
        reporter=place.reporter,
        held_out=place.images(cell, "test"),
        data={"name": cell.dataset, "split": "train", "kind": "dataset"},
    )
    views = choose_views(None, (), DATASETS[cell.dataset])
    config = make_config(cell.method, _options(cell, place), start=start, views=views)
    trained = train(images, cell_pairs(cell, images), config, context)
    trained.model.to(device)  # a finished run comes from its folder
    return trained


def _options(cell: Cell, place: Place) -> dict[str, Any]:
    """The paper's setting of the set, how often the training is watched, and what the cell and the place change."""
    row, every = DATASETS[cell.dataset], max(1, cell.steps // 10)
    options = {"evaluate_every": every, "checkpoint_every": 1_000, "log_every": max(1, every // 4)}
    if cell.method in PAIRED:
        options["pairs_per_step"] = row.pairs_per_step
    if cell.method != "constrained":
        options["images_per_step"] = row.images_per_step if cell.method in PAIRED else 2 * row.pairs_per_step
    tuned = row.tuned.get(cell.method, {"lr": row.tuned["constrained"]["lr"]})
    bound = SUPERVISED if cell.method == "supervised" else {}
    return {**options, **tuned, **bound, **dict(cell.options), "steps": cell.steps, "seed": cell.fold, **place.settings}


def _asked(cell: Cell, place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """All arguments and settings that decide the result, with the defaults, as its JSON has them."""
    if cell.method == "scan":
        return {}, {}
    arguments, settings = complete_options(cell.method, _options(cell, place))
    return arguments, settings.request()


def _differences(cell: Cell, found: Result, place: Place) -> Iterator[str]:
    """Where a result has other settings than are asked for now; an entry that only one has does not count."""
    arguments, settings = _asked(cell, place)
    for name, values in (("cell", cell.request()), ("arguments", arguments), ("settings", settings)):
        before = found.content[name]
        for key in sorted(values.keys() & before.keys() - {*FREE_SETTINGS}):
            if before[key] != values[key]:
                yield f"{key} is {before[key]!r}, asked is {values[key]!r}"


def _keep_later(cell: Cell, place: Place) -> str:
    """Keep the model of a finished cell, if it was not kept and its run is still there; what to say about it."""
    if place.models is None or cell.method == "scan" or (place.models / cell.name).is_dir():
        return ""
    if not run_is_finished(place.runs / cell.name):
        return f"; its model is not kept: there is no run in {place.runs / cell.name}"
    save_model(load_model(place.runs / cell.name), place.models / cell.name, half=True)
    return ""


def _start(cell: Cell, place: Place) -> ClusterModel:
    """The model that the training begins with; a missing or unfit one is an InputError."""
    row, folder = DATASETS[cell.dataset], place.starts / cell.start
    if cell.start == "random":
        how = {name: getattr(row, name) for name in ("side", "channels", "backbone", "mean", "std")}
        return build_model(n_clusters=cell.n_clusters, seed=derive_seed(cell.fold, "model"), **how)
    if not folder.is_dir():
        raise InputError(
            f"{folder}: the start of {cell.name} is not there; make it with "
            f"constraintmatch pretrain {cell.dataset} --clusters {cell.n_clusters}, or name its folder with --starts"
        )
    model = load_model(folder)
    if model.config.n_clusters != cell.n_clusters:
        raise InputError(f"{folder}: has {model.config.n_clusters} clusters, {cell.name} needs {cell.n_clusters}")
    return model


@functools.lru_cache(maxsize=16)
def _hash_of(folder: Path, _: int) -> str:
    """The hash of a model folder, by the time of its last change."""
    return weights_hash(load_model(folder))


def _rounded(model: ClusterModel) -> ClusterModel:
    """The model as a half-precision folder gives it back: the mean and spread of the images stay as they are."""
    weights = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    rounded = copy.deepcopy(model)
    rounded.load_state_dict(weights)
    return rounded


def _scores(model: ClusterModel, images: ImageSet) -> dict[str, float]:
    assert images.labels is not None
    found = scores(images.labels, _predict_exactly(model, images))
    return {key: found[key] for key in METRICS}


def _validation(model: ClusterModel, cell: Cell, place: Place) -> dict[str, Any]:
    """The paper's criterion for its search: the loss on constraints between validation images, the same for all."""
    images = place.images(cell, "val")
    assert images.labels is not None
    pairs = Constraints.sample(images.labels, DATASETS[cell.dataset].n_validation_constraints, seed=0)
    found = agreement(pairs, _predict_exactly(model, images))
    return {"loss": found["constraint_loss"], "balanced": found["balanced"], "constraints": len(pairs)}


def _predict_exactly(model: ClusterModel, images: ImageSet) -> Predictions:
    """Predictions in full fp32 on a GPU too: TF32 would move a few images that a CPU places elsewhere."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return predict(model, images)


def _prepare_compiler(compiled: list[tuple[str, int]], shape: tuple[str, int]) -> None:
    """Reset the compiler before its limit of versions of one function: beyond it a long queue runs uncompiled.

    Cells of one set and one number of clusters share compiled code; a loss with another threshold is one more version.
    """
    if compiled and (shape not in compiled or len(compiled) == SHARING):
        torch.compiler.reset()
        compiled.clear()
    compiled.append(shape)
