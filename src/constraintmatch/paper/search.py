"""Hyperparameter search as in the paper's appendix: its grid, or TPE, chosen by the loss on validation constraints."""

import copy
import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from constraintmatch.constraints import Constraints
from constraintmatch.datasets import DATASETS, DataSet, load_dataset
from constraintmatch.errors import InputError
from constraintmatch.evaluation import agreement, predict, scores
from constraintmatch.files import check_target
from constraintmatch.images import ImageSet
from constraintmatch.methods import ViewChoice
from constraintmatch.models import ClusterModel, load_model
from constraintmatch.paper.cells import STEPS
from constraintmatch.paper.trials import (
    Patience,
    Slots,
    Tried,
    finished_trials,
    load_optuna,
    open_storage,
    open_study,
    sqlite_file,
    work,
)
from constraintmatch.pretraining import training_size
from constraintmatch.progress import Quiet, Reporter, say_error
from constraintmatch.running import (
    Around,
    method_arguments,
    method_settings,
    rehearse_step,
    run_method,
    split_options,
    weights_hash,
)
from constraintmatch.runs import write_result
from constraintmatch.sources import Data, open_data, open_pairs
from constraintmatch.training import NonFinite, TrainSettings, choose_device
from constraintmatch.views import check_operation_names

__all__ = ["PAPER_VALUES", "Found", "Search", "search"]

FORMAT = 1
_FLAGS = ("data_dir", "model", "method", "columns", "pairs", "n", "out", "steps", "device")  # others go by --set
_SHARED = {"weight_decay": (1e-3, 1e-4, 1e-5), "lr": (0.03, 0.01, 0.003, 0.001, 0.0001)}
_WEIGHTS = (1.0, 0.5, 0.1, 0.05)
# The paper's table of search values, by method: 15, 300, 240 and 15 points.
PAPER_VALUES: Mapping[str, Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "constrained": _SHARED,
        "pseudo_label": {**_SHARED, "pseudo_weight": _WEIGHTS, "min_confidence": (0.7, 0.8, 0.9, 0.95, 0.99)},
        "constraintmatch": {**_SHARED, "pseudo_weight": _WEIGHTS, "max_entropy": (0.05, 0.1, 0.2, 0.3)},
        "fully_constrained": _SHARED,
    }
)


@dataclass(frozen=True)
class Search:
    """What `search` is asked; None leaves the choice to the data, the device or the paper."""

    data: str
    model: Path
    method: str = "constraintmatch"
    pairs: Path | None = None  # None: drawn from the labels of a data set
    n_constraints: int = 10_000  # of fold 0, where they are drawn
    holdout_pairs: float = 0.2  # of the pairs file, to judge by
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)  # in place of the paper's
    sampler: Literal["grid", "tpe"] = "grid"
    trials: int | None = None  # of tpe
    steps: int | None = None
    storage: str = "search.db"  # a SQLite file, or the URL of a database
    study: str | None = None
    workers: int = 1
    out: Path | None = None
    data_dir: Path | None = None
    columns: str | None = None
    flip: bool | None = None
    without: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # how to train: device, compile …
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True)
class Found:
    """A finished search: its trials, the best first."""

    request: Search
    study: str
    steps: int
    full_steps: int
    tried: tuple[Tried, ...]
    shared: Mapping[str, Any]  # what `train` would not choose by itself and every trial had

    @property
    def cut(self) -> bool:
        return self.steps < self.full_steps

    @property
    def best(self) -> Tried | None:
        return self.tried[0] if self.tried and self.tried[0].loss is not None else None

    def lines(self) -> list[tuple[str, str]]:
        """The trials by validation loss, and the command that trains with the best settings."""
        rows = [("validation loss", "settings")]
        rows += [("diverged" if one.loss is None else f"{one.loss:.5f}", one.flags) for one in self.tried]
        if self.cut:
            rows.append(("cut", f"{self.steps:,} of {self.full_steps:,} steps: the best at full length may differ"))
        if self.best is None:
            return [*rows, ("best", "none: every training diverged; try smaller values: --grid lr=0.001,0.0001")]
        return [*rows, ("best", self.best.flags), *self._next(self.best.flags)]

    def _next(self, flags: str) -> list[tuple[str, str]]:
        """The commands that train as the trials did, with these settings and all of the pairs."""
        asked, data = self.request, shlex.quote(self.request.data)
        where = _as_flags({"data_dir": asked.data_dir})
        words = ["constraintmatch train", data, where, _as_flags({"model": asked.model, "method": asked.method})]
        words.append(_as_flags({**self.shared, "flip": asked.flip, "without": ",".join(asked.without) or None}))
        if asked.method != "fully_constrained":
            named = asked.columns if asked.pairs else None  # those of a file that `sample` writes are the usual ones
            words.append(_as_flags({"columns": named, "pairs": asked.pairs or "pairs.csv"}))
        rows = [("next", " ".join(filter(None, [*words, flags])))]
        if asked.pairs or asked.method == "fully_constrained":
            return rows
        drawn = ["constraintmatch sample", data, where, _as_flags({"n": asked.n_constraints, "out": "pairs.csv"})]
        return [("pairs", " ".join(filter(None, drawn))), *rows]


def _as_flags(values: Mapping[str, Any]) -> str:
    """Values as words for a shell, without those that are None: a flag, or --set where there is none."""
    words: list[str] = []
    for name, value in values.items():
        if name == "flip" and value is not None:
            words.append("--mirror" if value else "--no-mirror")
        elif name in _FLAGS and value is not None:
            words += [f"--{name.replace('_', '-')}", shlex.quote(str(value))]
        elif value is not None:
            words += ["--set", shlex.quote(f"{name}={value}")]
    return " ".join(words)


def search(request: Search, reporter: Reporter | None = None) -> Found:
    """The finished search. The same request again, at the same time or later, takes part in it or shows it."""
    reporter = reporter or Quiet()
    load_optuna()
    if request.out is not None:
        check_target(request.out)
    task = _open_task(request, reporter)
    name = request.study or "-".join((_data_name(request), request.method, request.sampler))
    protocol = _protocol(task, request)

    def train(settings: dict[str, float], folder: Path | None, reporter: Reporter) -> dict[str, Any]:
        return _train(task, request.method, settings, folder, reporter)

    with open_storage(request.storage) as storage:
        study = open_study(storage, name, protocol, request.storage)
        runs = _runs_folder(request.storage, name, protocol)
        helpers = _start_helpers(request)
        try:
            work(study, task.slots, train, runs=runs, patience=request.patience, reporter=reporter)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; the same command goes on with what is left") from None
        finally:
            _end_helpers(helpers)
        tried = tuple(finished_trials(study, task.slots))
    _clear(runs)
    found = Found(request, name, task.settings.steps, task.full_steps, tried, _shared(request, task))
    if request.out is not None:
        _write(found, task, protocol, request.out)
    return found


# What is searched, on what, judged by what


@dataclass(frozen=True)
class _Task:
    """A search before its first trial: everything opened and checked."""

    slots: Slots
    images: ImageSet
    constraints: Constraints
    judged: ImageSet
    judges: Constraints  # over the rows of `judged`
    model: ClusterModel
    views: ViewChoice
    arguments: dict[str, Any]
    settings: TrainSettings
    full_steps: int
    usual_steps: int  # of `train` on this device
    record: dict[str, Any]


def _open_task(request: Search, reporter: Reporter) -> _Task:
    """Everything a trial needs; whatever can be wrong with the request is found here."""
    slots = _slots(request)
    if request.workers < 1:
        raise InputError(f"--workers {request.workers}: at least one has to work")
    check_operation_names(request.without)
    cpu = choose_device(request.settings.get("device")).type == "cpu"
    model = load_model(request.model)
    if not model.config.n_clusters:
        raise InputError(
            f"{request.model}: has no clusters yet; begin with a model that has (constraintmatch pretrain)"
        )
    row = DATASETS.get(request.data)
    by_pairs = request.pairs is not None
    data, constraints, judged, judges = (
        _from_pairs(request, model, reporter) if by_pairs else _from_labels(request, row)
    )
    options, full_steps = _base_options(request, row, len(data.images), cpu)
    usual_steps = options["steps"]
    options["steps"] = usual_steps if request.steps is None else request.steps
    arguments, changes = split_options(request.method, options)
    flip = request.flip if request.flip is not None else row is None or row.flip
    without = tuple(sorted({*request.without, *(row.without if row else ())}))
    task = _Task(
        slots=slots,
        images=data.images,
        constraints=constraints,
        judged=judged,
        judges=judges,
        model=model,
        views=ViewChoice(flip=flip, without=without),
        arguments=arguments,
        settings=method_settings(request.method, {**changes, **request.settings}),
        full_steps=full_steps,
        usual_steps=usual_steps,
        record=data.record,
    )
    _rehearse(task, request.method)
    return task


def _slots(request: Search) -> Slots:
    values = _values(request)
    if request.sampler == "grid":
        grid = Slots(values)
        if request.trials is not None:
            raise InputError(f"--trials goes with --sampler tpe; the grid has {len(grid):,} points, --grid cuts it")
        return grid
    if request.trials is None or request.trials < 1:
        raise InputError("--sampler tpe: say how many trials, --trials 50 for example")
    return Slots(values, "tpe", request.trials)


def _values(request: Search) -> dict[str, tuple[float, ...]]:
    """The values of each parameter, the paper's where nothing else is asked."""
    if request.method not in PAPER_VALUES:
        raise InputError(f"no search for {request.method!r}; there is one for {', '.join(PAPER_VALUES)}")
    defaults = {name: value.default for name, value in method_arguments(request.method).items()}
    defaults |= vars(method_settings(request.method))
    numbers = sorted(name for name, value in defaults.items() if isinstance(value, float))
    if odd := sorted(request.values.keys() - set(numbers)):
        raise InputError(f"cannot search over {odd[0]!r}; {request.method} has {', '.join(numbers)}")
    asked = {**PAPER_VALUES[request.method], **request.values}
    if empty := [name for name, values in asked.items() if not values]:
        raise InputError(f"no values for {empty[0]}; give some: --grid {empty[0]}=0.1,0.01")
    for name, values in asked.items():
        for value in values:
            _check_value(request.method, name, float(value))
    return {name: tuple(dict.fromkeys(float(value) for value in values)) for name, values in asked.items()}


def _check_value(method: str, name: str, value: float) -> None:
    """Training settings are checked now; a method checks its own arguments when it is rehearsed."""
    _, changes = split_options(method, {name: value})
    method_settings(method, changes)


def _rehearse(task: _Task, method: str) -> None:
    """One step on a few images for each value of the method's own arguments, so that a wrong one shows before a trial.

    One argument at a time, and not with the paper's values: those are known to be right.
    """
    own = {name: values for name, values in task.slots.values.items() if name in method_arguments(method)}
    new = [(name, value) for name, of in own.items() for value in of if value not in PAPER_VALUES[method].get(name, ())]
    if not new:
        return
    few = task.images.take(np.arange(min(len(task.images), 4)))
    pairs = Constraints.from_lists(n_images=len(few), must_link=[(0, 1)])
    arguments = {key: min(value, 4) for key, value in task.arguments.items()}  # batches
    for name, value in new:
        how: dict[str, Any] = {"arguments": {**arguments, name: value}, "settings": task.settings, "views": task.views}
        with suppress(NonFinite):  # a trial that diverges is part of a search
            rehearse_step(method, 2, few, pairs, **how)


def _from_labels(request: Search, row: DataSet | None) -> tuple[Data, Constraints, ImageSet, Constraints]:
    """Constraints of fold 0 from the labels of a data set, and the paper's number from its validation split."""
    if row is None:
        raise InputError("a folder needs --pairs FILE to train on and to judge by; data sets have labels to draw from")
    if request.n_constraints < 1:
        raise InputError(f"--constraints {request.n_constraints}: at least one is needed")
    data = open_data(request.data, split="train", data_dir=request.data_dir)
    judged = load_dataset(request.data, "val", request.data_dir)
    assert data.images.labels is not None
    assert judged.labels is not None
    constraints = Constraints.sample(data.images.labels, request.n_constraints, seed=0)
    return data, constraints, judged, Constraints.sample(judged.labels, row.n_validation_constraints, seed=0)


def _from_pairs(
    request: Search, model: ClusterModel, reporter: Reporter
) -> tuple[Data, Constraints, ImageSet, Constraints]:
    """The pairs of a file, a share of them held out to judge by."""
    assert request.pairs is not None
    if not request.pairs.exists():
        raise InputError(f"{request.pairs}: no such file")  # before thousands of images are read
    if not request.holdout_pairs:
        raise InputError("holdout_pairs=0 leaves no pairs to judge by; try --set holdout_pairs=0.2")
    config, split = model.config, "train" if request.data in DATASETS else None
    data = open_data(
        request.data,
        side=config.side,
        channels=config.channels,
        split=split,
        data_dir=request.data_dir,
        reporter=reporter,
    )
    pairs = open_pairs(
        request.pairs, data.images, columns=request.columns, holdout=request.holdout_pairs, reporter=reporter
    )
    assert pairs.held_out is not None
    return data, pairs.training, data.images, pairs.held_out


def _base_options(request: Search, row: DataSet | None, n_images: int, cpu: bool) -> tuple[dict[str, Any], int]:
    """What all trials share, as `train` would choose it, and the steps of a training at full length."""
    known = method_arguments(request.method)
    chosen = training_size(n_images, cpu=cpu)
    full_steps = STEPS if row is not None else training_size(n_images, cpu=False)["steps"]
    if row is not None:
        chosen.pop("warm_up")
        chosen |= {"pairs_per_step": row.pairs_per_step, "images_per_step": row.images_per_step}
        chosen |= {} if cpu else {"steps": STEPS}
    if "pairs_per_step" not in known:  # the bound has the images of all pairs in one batch
        chosen["images_per_step"] = 2 * chosen["pairs_per_step"]
    sizes = {name: value for name, value in chosen.items() if name in known}
    return {**sizes, "steps": chosen["steps"], "seed": 0}, full_steps


def _shared(request: Search, task: _Task) -> dict[str, Any]:
    """What decides the training of every trial, where `train` would choose otherwise.

    Steps only where they are more than `train` takes: fewer are for the search, and what it finds is for a whole run.
    """
    settings = {key: value for key, value in request.settings.items() if key not in task.slots.values}
    steps = {"steps": task.settings.steps} if task.settings.steps > task.usual_steps else {}
    of_bound = {key: value for key, value in task.arguments.items() if "pairs_per_step" not in task.arguments}
    return {**settings, **steps, **of_bound}


def _protocol(task: _Task, request: Search) -> dict[str, Any]:
    """What must be the same for trials to be compared, as JSON gives it back."""
    chosen = {
        "format": FORMAT,
        "data": request.data if request.data in DATASETS else task.record["kind"],
        "images": task.images.fingerprint(),
        "constraints": _mark(task.constraints),
        "validation_images": task.judged.fingerprint(),
        "validation_constraints": _mark(task.judges),
        "model": weights_hash(task.model),
        "method": request.method,
        "sampler": request.sampler,
        "values": dict(task.slots.values),
        "arguments": task.arguments,
        "views": task.views.request(),
        "settings": {key: value for key, value in task.settings.request().items() if key not in task.slots.values},
    }
    return dict(json.loads(json.dumps(chosen)))


def _mark(constraints: Constraints) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (constraints.left, constraints.right, constraints.link, constraints.weight):
        digest.update(part.tobytes())
    return f"{len(constraints):,} pairs, {digest.hexdigest()}"


def _data_name(request: Search) -> str:
    return request.data if request.data in DATASETS else Path(os.path.abspath(request.data)).name  # noqa: PTH100


# The work


def _train(
    task: _Task, method: str, settings: Mapping[str, float], folder: Path | None, reporter: Reporter
) -> dict[str, Any]:
    """What a training with these settings reaches on the validation constraints; the loss is None if it diverged."""
    own, changes = split_options(method, settings)
    around = Around(folder, True, reporter, task.views, task.judged, task.judges, task.record)
    try:
        trained = run_method(
            method,
            copy.deepcopy(task.model),
            task.images,
            task.constraints,
            arguments={**task.arguments, **own},
            settings=replace(task.settings, **changes),
            around=around,
        )
    except NonFinite as error:
        return {"loss": None, "note": str(error)}
    found = predict(trained.model, task.judged)
    kept = agreement(task.judges, found)
    labels = task.judged.labels
    return {"loss": kept.pop("constraint_loss"), **kept, **(scores(labels, found) if labels is not None else {})}


def _runs_folder(storage: str, study: str, protocol: Mapping[str, Any]) -> Path | None:
    """Where trials at work keep their checkpoints: beside a SQLite file. Other storages have no place of their own."""
    file = sqlite_file(storage)
    if file is None:
        return None
    told = f"{study}\n{json.dumps(protocol, sort_keys=True)}"
    return file.with_name(f"{file.name}.runs") / hashlib.blake2b(told.encode(), digest_size=6).hexdigest()


def _clear(runs: Path | None) -> None:
    """Remove the checkpoints of a finished search; nothing in them is needed any more."""
    if runs is not None:
        shutil.rmtree(runs, ignore_errors=True)
        with suppress(OSError):  # another search is at work there
            runs.parent.rmdir()


def _start_helpers(request: Search) -> list[Any]:
    """The other workers of --workers: the same request, each in a process of its own."""
    context = multiprocessing.get_context("spawn")  # a fork would share CUDA and the storage's connections
    ours = replace(request, workers=1, out=None)
    helpers = [context.Process(target=_help, args=(ours,)) for _ in range(request.workers - 1)]
    for helper in helpers:
        helper.start()
    return helpers


def _help(request: Search) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a helper that is ended gives its trial back
    try:
        search(request)
    except InputError as error:
        raise SystemExit(say_error(f"a helper stopped: {error}", 2)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _end_helpers(helpers: Sequence[Any]) -> None:
    """Stop the helpers: there is no work left, or they give their trials back."""
    for helper in helpers:
        helper.terminate()
    for helper in helpers:
        helper.join()


# The report


def _write(found: Found, task: _Task, protocol: Mapping[str, Any], out: Path) -> None:
    best = found.best
    papers = {name: tuple(values) for name, values in PAPER_VALUES[found.request.method].items()}
    values = {
        "format": FORMAT,
        "kind": "search",
        "study": found.study,
        "method": found.request.method,
        "sampler": found.request.sampler,
        "cut": found.cut,
        "steps": found.steps,
        "full_steps": found.full_steps,
        "paper_values": papers == dict(task.slots.values),
        "best": None if best is None else {"settings": best.settings, "loss": best.loss, "flags": best.flags},
        "trials": [{"settings": one.settings, "loss": one.loss, **one.told} for one in found.tried],
        "protocol": dict(protocol),
    }
    write_result(out, values)
