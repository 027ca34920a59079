"""Hyperparameter search as in the paper's appendix: its grid, or TPE, chosen by the loss on validation constraints."""

import copy
import hashlib
import json
import multiprocessing
import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import Quiet, Reporter, say_error
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, STEPS, DataSet, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import agreement, predict, scores
from constraintmatch.methods import Context, ViewChoice
from constraintmatch.models.cluster_model import ClusterModel, load_model
from constraintmatch.pipeline.config import TrainConfig, make_config, method_arguments, split_options
from constraintmatch.pipeline.recipes import training_size
from constraintmatch.pipeline.sources import Data, open_data, open_pairs
from constraintmatch.pipeline.train import rehearse, train, weights_hash
from constraintmatch.pipeline.trials import (
    PAPER_VALUES,
    Space,
    Tried,
    load_optuna,
    open_storage,
    open_study,
    runs_folder,
    search_space,
    work,
)
from constraintmatch.training.loop import NonFinite, choose_device
from constraintmatch.training.run_folder import write_result
from constraintmatch.training.views import check_operation_names

__all__ = ["Found", "Search", "search"]

FORMAT = 1
_FLAGS = ("data_dir", "model", "method", "columns", "pairs", "n", "out", "steps", "device")  # others go by --set


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
    data = request.data if request.data in DATASETS else Path(os.path.abspath(request.data)).name  # noqa: PTH100
    name = request.study or f"{data}-{request.method}-{request.sampler}"
    protocol = _protocol(task, request)

    with open_storage(request.storage) as storage:
        study = open_study(storage, name, protocol, request.storage)
        runs, trial = runs_folder(request.storage, name, protocol), partial(_train, task, request.method)
        try:
            with _helpers(request):
                tried = tuple(work(study, task.space, trial, runs=runs, reporter=reporter))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; the same command goes on with what is left") from None
    found = Found(request, name, task.config.settings.steps, task.full_steps, tried, _shared(request, task))
    if request.out is not None:
        _write(found, task, protocol, request.out)
    return found


# What is searched, on what, judged by what


@dataclass(frozen=True)
class _Task:
    """A search before its first trial: everything opened and checked."""

    space: Space
    data: Data
    constraints: Constraints
    judged: ImageSet
    judges: Constraints  # over the rows of `judged`
    config: TrainConfig
    arguments: dict[str, Any]  # those of the configuration that are asked for
    full_steps: int
    usual_steps: int  # of `train` on this device


def _open_task(request: Search, reporter: Reporter) -> _Task:
    """Everything a trial needs; whatever can be wrong with the request is found here."""
    space = search_space(request.method, request.values, request.sampler, request.trials)
    if request.workers < 1:
        raise InputError(f"--workers {request.workers}: at least one has to work")
    check_operation_names(request.without)
    cpu = choose_device(request.settings.get("device")).type == "cpu"
    model = load_model(request.model)
    if not model.config.n_clusters:
        raise InputError(f"{request.model}: has no clusters yet; give one that has (constraintmatch pretrain)")
    row = DATASETS.get(request.data)
    opened = _from_labels(request, row) if request.pairs is None else _from_pairs(request, model, reporter)
    data, constraints, judged, judges = opened
    options, full_steps = _base_options(request, row, len(data.images), cpu)
    usual_steps = options["steps"]
    options["steps"] = usual_steps if request.steps is None else request.steps
    flip = request.flip if request.flip is not None else row is None or row.flip
    without = tuple(sorted({*request.without, *(row.without if row else ())}))
    task = _Task(
        space=space,
        data=data,
        constraints=constraints,
        judged=judged,
        judges=judges,
        config=make_config(
            request.method, {**options, **request.settings}, start=model, views=ViewChoice(flip=flip, without=without)
        ),
        arguments=split_options(request.method, options)[0],
        full_steps=full_steps,
        usual_steps=usual_steps,
    )
    _rehearse(task, request.method)
    return task


def _rehearse(task: _Task, method: str) -> None:
    """One step on a few images for each value of the method's own arguments, so that a wrong one shows before a trial.

    One argument at a time, and not with the paper's values: those are known to be right.
    """
    own = {name: values for name, values in task.space.values.items() if name in method_arguments(method)}
    new = [(name, value) for name, of in own.items() for value in of if value not in PAPER_VALUES[method].get(name, ())]
    if not new:
        return
    few = task.data.images.take(np.arange(min(len(task.data.images), 4)))
    pairs = Constraints.from_lists(n_images=len(few), must_link=[(0, 1)])
    batches = {key: min(value, 4) for key, value in task.arguments.items()}
    for name, value in new:
        arguments = {**task.config.arguments, **batches, name: value}
        with suppress(NonFinite):  # a trial that diverges is part of a search
            rehearse(replace(task.config, arguments=arguments, n_clusters=2), few, pairs)


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
    size: dict[str, Any] = {"side": model.config.side, "channels": model.config.channels}
    split = "train" if request.data in DATASETS else None
    data = open_data(request.data, **size, split=split, data_dir=request.data_dir, reporter=reporter)
    how: dict[str, Any] = {"columns": request.columns, "holdout": request.holdout_pairs, "reporter": reporter}
    pairs = open_pairs(request.pairs, data.images, **how)
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
    settings = {key: value for key, value in request.settings.items() if key not in task.space.values}
    steps = {"steps": task.config.settings.steps} if task.config.settings.steps > task.usual_steps else {}
    of_bound = {key: value for key, value in task.arguments.items() if "pairs_per_step" not in task.arguments}
    return {**settings, **steps, **of_bound}


def _protocol(task: _Task, request: Search) -> dict[str, Any]:
    """What must be the same for trials to be compared, as JSON gives it back."""
    chosen = {
        "format": FORMAT,
        "data": request.data if request.data in DATASETS else task.data.record["kind"],
        "images": task.data.images.fingerprint(),
        "constraints": _mark(task.constraints),
        "validation_images": task.judged.fingerprint(),
        "validation_constraints": _mark(task.judges),
        "model": weights_hash(task.config.start),
        "method": request.method,
        "sampler": request.sampler,
        "values": dict(task.space.values),
        "arguments": task.arguments,
        "views": task.config.views.request(),
        "settings": {
            key: value for key, value in task.config.settings.request().items() if key not in task.space.values
        },
    }
    return dict(json.loads(json.dumps(chosen)))


def _mark(constraints: Constraints) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (constraints.left, constraints.right, constraints.link, constraints.weight):
        digest.update(part.tobytes())
    return f"{len(constraints):,} pairs, {digest.hexdigest()}"


# The work


def _train(
    task: _Task, method: str, settings: Mapping[str, float], folder: Path | None, reporter: Reporter
) -> dict[str, Any]:
    """What a training with these settings reaches on the validation constraints; the loss is None if it diverged."""
    own, changes = split_options(method, settings)
    arguments, asked = {**task.config.arguments, **own}, replace(task.config.settings, **changes)
    config = replace(task.config, arguments=arguments, settings=asked, start=copy.deepcopy(task.config.start))
    context = Context(folder, True, reporter, task.judged, task.judges, task.data.record)
    try:
        trained = train(task.data.images, task.constraints, config, context)
    except NonFinite as error:
        return {"loss": None, "note": str(error)}
    found = predict(trained.model, task.judged)
    kept = agreement(task.judges, found)
    labels = task.judged.labels
    return {"loss": kept.pop("constraint_loss"), **kept, **(scores(labels, found) if labels is not None else {})}


@contextmanager
def _helpers(request: Search) -> Iterator[None]:
    """Inside, the other workers of --workers are at it: the same request, each in a process of its own."""
    context = multiprocessing.get_context("spawn")  # a fork would share CUDA and the storage's connections
    ours = replace(request, workers=1, out=None)
    helpers = [context.Process(target=_help, args=(ours,)) for _ in range(request.workers - 1)]
    for helper in helpers:
        helper.start()
    try:
        yield
    finally:  # there is no work left, or they put their trials back
        for helper in helpers:
            helper.terminate()
        for helper in helpers:
            helper.join()


def _help(request: Search) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a helper that is ended puts its trial back
    try:
        search(request)
    except InputError as error:
        raise SystemExit(say_error(f"a helper stopped: {error}", 2)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


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
        "paper_values": papers == dict(task.space.values),
        "best": None if best is None else {"settings": best.settings, "loss": best.loss, "flags": best.flags},
        "trials": [{"settings": one.settings, "loss": one.loss, **one.told} for one in found.tried],
        "protocol": dict(protocol),
    }
    write_result(out, values)
