"""Hyperparameter search as in the paper's appendix: its grid, or TPE, chosen by the loss on validation constraints."""

import copy
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import QUIET, Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import agreement, predict, scores
from constraintmatch.methods import Context
from constraintmatch.models.cluster_model import ClusterModel, load_model
from constraintmatch.pipeline import trials
from constraintmatch.pipeline.config import make_config, method_arguments, split_options, training_size
from constraintmatch.pipeline.embedding import encode
from constraintmatch.pipeline.plan import Plan, choose_views
from constraintmatch.pipeline.sources import Data, open_data, open_pairs
from constraintmatch.pipeline.train import pairs_hash, rehearse, train, weights_hash
from constraintmatch.pipeline.trials import PAPER_VALUES, Space
from constraintmatch.training.loop import NonFinite, choose_device
from constraintmatch.training.run_folder import write_result

FORMAT = 1
_FLAGS = ("data_dir", "model", "method", "columns", "pairs", "n", "out", "steps", "device")  # others go by --set
Rows = list[tuple[str, str]]


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
    out: Path | None = None
    data_dir: Path | None = None
    columns: str | None = None
    flip: bool | None = None
    without: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # how to train: device, compile …


def search(request: Search, reporter: Reporter = QUIET) -> tuple[dict[str, Any], Rows]:
    """The finished search, as `request.out` gets it, with its trials, the best first; and as rows of a table.

    The same request again, at the same time or later, takes part in the search or shows it.
    """
    trials.load_optuna()
    if request.out is not None:
        check_target(request.out)
    plan, space, base = _open_task(request, reporter)
    data = request.data if request.data in DATASETS else Path(os.path.abspath(request.data)).name  # noqa: PTH100
    name = request.study or f"{data}-{request.method}-{request.sampler}"
    protocol = _protocol(request, plan, space, base)
    with trials.open_storage(request.storage) as storage:
        study = trials.open_study(storage, name, protocol, request.storage)
        runs = trials.runs_folder(request.storage, name, protocol)
        try:
            tried = trials.work(study, space, partial(_train, plan), runs=runs, reporter=reporter)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; the same command goes on with what is left") from None
    steps, row = plan.config.settings.steps, DATASETS.get(request.data)
    full_steps = training_size(len(plan.data.images), cpu=False, row=row)["steps"]
    best = tried[0] if tried and tried[0]["loss"] is not None else None
    found = {
        "format": FORMAT,
        "kind": "search",
        "study": name,
        "method": request.method,
        "sampler": request.sampler,
        "cut": steps < full_steps,
        "steps": steps,
        "full_steps": full_steps,
        "paper_values": dict(PAPER_VALUES[request.method]) == dict(space.values),
        "best": best and {"settings": best["settings"], "loss": best["loss"], "flags": _as_flags(best["settings"])},
        "trials": tried,
        "protocol": protocol,
    }
    rows = _rows(found) + (_next_commands(request, plan, base, best) if best else [])
    if request.out is not None:
        write_result(request.out, found)
        rows.append(("written", str(request.out)))
    return found, rows


# What is searched, on what, judged by what


def _open_task(request: Search, reporter: Reporter) -> tuple[Plan, Space, dict[str, Any]]:
    """A trial before its first step, the values to try, and the options of all trials; all that can be wrong shows."""
    space = trials.search_space(request.method, request.values, request.sampler, request.trials)
    row = DATASETS.get(request.data)
    views = choose_views(request.flip, request.without, row)
    cpu = choose_device(request.settings.get("device")).type == "cpu"
    model = load_model(request.model)
    if not model.config.n_clusters:
        raise InputError(f"{request.model}: has no clusters yet; give one that has (constraintmatch pretrain)")
    opened = _draw_pairs(request) if request.pairs is None else _read_pairs(request, model, reporter)
    data, constraints, judged, judges = opened
    seen = data.images
    if model.is_encoder and cpu:
        seen, judged = (None if part is None else encode(model, part, reporter=reporter) for part in (seen, judged))
    base = _base_options(request, len(data.images), cpu)
    steps = {} if request.steps is None else {"steps": request.steps}
    config = make_config(request.method, base | steps | dict(request.settings), start=model, views=views)
    context = Context(None, True, reporter, judged, judges, data.record)
    plan = Plan(data, seen, config, constraints, judges, context)
    for name, value in [(name, value) for name, values in space.values.items() for value in values]:
        if name in config.arguments and value not in PAPER_VALUES[request.method].get(name, ()):  # those are right
            with suppress(NonFinite):  # a trial that diverges is part of a search
                rehearse(replace(config, arguments={**config.arguments, name: value}), seen)
    return plan, space, base


def _draw_pairs(request: Search) -> tuple[Data, Constraints, ImageSet, Constraints]:
    """Constraints of fold 0 from the labels of a data set, and the paper's number from its validation split."""
    if request.data not in DATASETS:
        raise InputError("a folder needs --pairs FILE to train on and to judge by; data sets have labels to draw from")
    if request.n_constraints < 1:
        raise InputError(f"--constraints {request.n_constraints}: at least one is needed")
    data = open_data(request.data, split="train", data_dir=request.data_dir)
    judged = load_dataset(request.data, "val", request.data_dir)
    assert data.images.labels is not None
    assert judged.labels is not None
    constraints = Constraints.sample(data.images.labels, request.n_constraints, seed=0)
    n_judges = DATASETS[request.data].n_validation_constraints
    return data, constraints, judged, Constraints.sample(judged.labels, n_judges, seed=0)


def _read_pairs(
    request: Search, model: ClusterModel, reporter: Reporter
) -> tuple[Data, Constraints, ImageSet, Constraints]:
    """The pairs of a file, a share of them held out to judge by."""
    assert request.pairs is not None
    if not request.pairs.exists():
        raise InputError(f"{request.pairs}: no such file")  # before thousands of images are read
    if not request.holdout_pairs:
        raise InputError("holdout_pairs=0 leaves no pairs to judge by; try --set holdout_pairs=0.2")
    how: dict[str, Any] = {"side": model.config.side, "channels": model.config.channels, "reporter": reporter}
    split = "train" if request.data in DATASETS else None
    data = open_data(request.data, split=split, data_dir=request.data_dir, **how)
    share, columns = request.holdout_pairs, request.columns
    pairs, held_out = open_pairs(request.pairs, data.images, columns=columns, holdout=share, reporter=reporter)
    assert held_out is not None
    return data, pairs, data.images, held_out


def _base_options(request: Search, n_images: int, cpu: bool) -> dict[str, Any]:
    """What all trials share, as `train` would choose it."""
    known, chosen = method_arguments(request.method), training_size(n_images, cpu=cpu, row=DATASETS.get(request.data))
    if "pairs_per_step" not in known:  # the bound has the images of all pairs in one batch
        chosen["images_per_step"] = 2 * chosen["pairs_per_step"]
    return {name: value for name, value in chosen.items() if name in known or name == "steps"} | {"seed": 0}


def _protocol(request: Search, plan: Plan, space: Space, base: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for trials to be compared, as JSON gives it back."""
    judged, judges = plan.context.held_out, plan.held_out_pairs
    assert judged is not None
    marks = [f"{len(pairs):,} pairs, {pairs_hash(pairs)}" for pairs in (plan.pairs, judges) if pairs is not None]
    settings = plan.config.settings.request()
    chosen = {
        "format": FORMAT,
        "data": request.data if request.data in DATASETS else plan.data.record["kind"],
        "images": plan.data.images.fingerprint(),
        "constraints": marks[0],
        "validation_images": judged.fingerprint(),
        "validation_constraints": marks[1],
        "model": weights_hash(plan.config.start),
        "method": request.method,
        "sampler": request.sampler,
        "values": dict(space.values),
        "arguments": split_options(request.method, base)[0],
        "views": plan.config.views.request(),
        "settings": {key: value for key, value in settings.items() if key not in space.values},
    }
    return dict(json.loads(json.dumps(chosen)))


# The work


def _train(plan: Plan, settings: Mapping[str, float], folder: Path | None) -> dict[str, Any]:
    """What a training with these settings reaches on the validation constraints; the loss is None if it diverged."""
    own, changes = split_options(plan.config.method, settings)
    arguments, asked = {**plan.config.arguments, **own}, replace(plan.config.settings, **changes)
    config = replace(plan.config, arguments=arguments, settings=asked, start=copy.deepcopy(plan.config.start))
    judged, judges = plan.context.held_out, plan.held_out_pairs
    assert judged is not None
    assert judges is not None
    try:
        trained = train(plan.seen, plan.pairs, config, replace(plan.context, out=folder))
    except NonFinite as error:
        return {"loss": None, "note": str(error)}
    found = predict(trained.model, judged)
    kept = agreement(judges, found)
    labelled = {} if judged.labels is None else scores(judged.labels, found)
    return {"loss": kept.pop("constraint_loss"), **kept, **labelled}


# The report


def _rows(found: Mapping[str, Any]) -> Rows:
    """The trials by validation loss."""
    rows = [("validation loss", "settings")]
    rows += [
        ("diverged" if one["loss"] is None else f"{one['loss']:.5f}", _as_flags(one["settings"]))
        for one in found["trials"]
    ]
    if found["cut"]:
        said = f"{found['steps']:,} of {found['full_steps']:,} steps: the best at full length may differ"
        rows.append(("cut", said))
    none = "none: every training diverged; try smaller values: --grid lr=0.001,0.0001"
    return [*rows, ("best", found["best"]["flags"] if found["best"] else none)]


def _next_commands(request: Search, plan: Plan, base: Mapping[str, Any], best: Mapping[str, Any]) -> Rows:
    """The commands that train as the best trial did, with all of the pairs."""
    where, bound = {"data_dir": request.data_dir}, request.method == "fully_constrained"
    data = shlex.quote(request.data)
    shared = {name: value for name, value in request.settings.items() if name not in best["settings"]}
    if plan.config.settings.steps > base["steps"]:  # fewer than `train` takes are for the search alone
        shared["steps"] = plan.config.settings.steps
    shared |= {name: value for name, value in base.items() if bound and name in plan.config.arguments}
    shared |= {"flip": request.flip, "without": ",".join(request.without) or None}
    if not bound:
        named = request.columns if request.pairs else None  # those of a file that `sample` writes are the usual ones
        shared |= {"columns": named, "pairs": request.pairs or "pairs.csv"}
    words = _as_flags({**where, "model": request.model, "method": request.method, **shared})
    rows = [("next", f"constraintmatch train {data} {words} {_as_flags(best['settings'])}")]
    if request.pairs or bound:
        return rows
    drawn = _as_flags({**where, "n": request.n_constraints, "out": "pairs.csv"})
    return [("pairs", f"constraintmatch sample {data} {drawn}"), *rows]


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
