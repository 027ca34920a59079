"""A training before its first step: what was asked, completed from records, data set and device, and checked."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_folder, check_target, folder_lock, read_json
from constraintmatch._internal.progress import Reporter
from constraintmatch._internal.rng import check_seed
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, DataSet
from constraintmatch.data.image_set import ImageSet, kind_of
from constraintmatch.methods import METHODS, Context, ViewChoice
from constraintmatch.models.backbones import default_backbone
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model
from constraintmatch.pipeline.config import (
    TrainConfig,
    default_options,
    make_config,
    method_arguments,
    method_settings,
    split_options,
)
from constraintmatch.pipeline.recipes import ORDER, PRETEXTS, SHORT_STAGES, short_start
from constraintmatch.pipeline.sources import ClassFolders, Data, OnConflict, Pairs, open_data, open_pairs
from constraintmatch.pipeline.train import rehearse
from constraintmatch.training.loop import choose_device
from constraintmatch.training.run_folder import current_request
from constraintmatch.training.views import check_operation_names

__all__ = ["Plan", "PretrainPlan", "Train", "plan_pretraining", "plan_training"]

CPU_SIDE = 32  # without a GPU a ResNet step of the published size takes half a minute; this brings a folder to minutes


@dataclass(frozen=True)
class Train:
    """What `train` is asked; None leaves the choice to the recorded run, the data set, the device or the method."""

    data: str | None = None
    pairs: Path | None = None
    clusters: int | None = None
    out: Path | None = None
    method: str | None = None
    model: Path | None = None
    backbone: str | None = None
    pretrained: bool = False
    side: int | None = None
    channels: int | None = None
    data_dir: Path | None = None
    test: str | None = None
    class_folders: ClassFolders = "auto"
    columns: str | None = None
    on_conflict: OnConflict | None = None  # None: drop by the safe recipe, which expects wrong answers, else error
    close: bool = False
    holdout_pairs: float = 0.0
    flip: bool | None = None
    without: tuple[str, ...] = ()
    strict: bool = False
    pictures: Path | None = None
    resume: bool = False
    from_run: Path | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A training with everything checked: what is left is to do it."""

    data: Data
    pairs: Pairs | None
    config: TrainConfig
    context: Context


@dataclass(frozen=True)
class PretrainPlan:
    """The start of a training alone: a fresh or given model and what it is trained on."""

    data: Data
    clusters: int
    model: ClusterModel
    views: ViewChoice
    stages: tuple[str, ...]  # of the short start that the model lacks
    cpu: bool


def plan_pretraining(request: Train, reporter: Reporter) -> PretrainPlan:
    """The images opened, the model given or built, the views chosen; nothing written."""
    _check_clusters(request)
    if request.out is not None:
        _check_start_folder(request.out)
    cpu = choose_device(request.settings.get("device")).type == "cpu"
    views = _views(request, DATASETS.get(str(request.data)))
    given = _given_model(request)
    data = _open_training_data(request, given, cpu, reporter)
    clusters = _clusters(request, data, given)
    seed = int(request.settings.get("seed") or 0)
    check_seed(seed)
    model = given or _fresh_model(request, data, clusters, cpu, seed)
    return PretrainPlan(data, clusters, model, views, _stages(request, data, given), cpu)


def _check_start_folder(out: Path) -> None:
    """An InputError unless the folder is free or holds an earlier start: the model of a run would be overwritten."""
    check_folder(out)
    held = {entry.name for entry in out.iterdir() if not entry.name.startswith(".")} if out.exists() else set()
    odd = sorted(held - {*ORDER, "model"}) or (sorted(held) if held == {"model"} else [])
    if odd:
        raise InputError(f"{out}: not empty ({odd[0]} is there) and not an earlier start; choose another --out")


def plan_training(request: Train, reporter: Reporter) -> Plan:
    """Everything opened, chosen and checked; nothing written."""
    request = _recorded(request)
    method = request.method or "constraintmatch"
    if request.data is None:
        raise InputError("say which images: a folder, a .npy or .npz file, or a data set's name")
    _check_method(method, request)
    _check_clusters(request)
    cpu = choose_device(request.settings.get("device")).type == "cpu"
    row = DATASETS.get(request.data)
    views = _views(request, row)
    out = _out_folder(request)
    given = _given_model(request)
    data = _open_training_data(request, given, cpu, reporter)
    clusters = _clusters(request, data, given)
    config = _configuration(method, request, data, given, views, clusters, cpu)
    pairs = _training_pairs(request, data.images, config, reporter) if request.pairs else None
    context = Context(
        out=out,
        resume=request.resume,
        reporter=reporter,
        held_out=data.held_out,
        held_out_constraints=pairs.held_out if pairs and data.held_out is None else None,
        data=data.record | _start_record(request),
    )
    plan = Plan(data, pairs, config, context)
    _rehearse(plan)
    _say_plan(plan, request, cpu)
    return plan


def _check_method(method: str, request: Train) -> None:
    """The method exists, is one of `train`'s, has the flags that were given, and gets pairs if it needs them."""
    known = method_arguments(method)
    if method in ORDER:
        raise InputError(f"{method} is a stage of the self-supervised start; use constraintmatch pretrain")
    if odd := sorted(request.arguments.keys() - known.keys()):
        raise InputError(f"{method} has no setting {odd[0]!r}; it has {', '.join(known)}")
    needs_pairs = _needs_pairs(method)
    if needs_pairs and request.pairs is None:
        mend = "give --pairs FILE, with the columns left,right,link (constraintmatch sample draws some from labels)"
        raise InputError(f"{method} needs constraints and there are none; {mend}")
    if not needs_pairs and request.pairs is not None:
        raise InputError(f"{method} learns from the labels of all images; leave --pairs out")
    if request.pairs is not None and not request.pairs.exists():
        raise InputError(f"{request.pairs}: no such file")  # before thousands of images are read


def _needs_pairs(method: str) -> bool:
    return method in METHODS and "constraints" in inspect.signature(METHODS[method]).parameters


def _check_clusters(request: Train) -> None:
    if request.clusters is not None and request.clusters < 2:
        raise InputError(f"--clusters {request.clusters}: fewer than 2 clusters tell nothing apart; ask for 2 or more")


def _out_folder(request: Train) -> Path:
    """The run folder, checked: free, or with --resume one that holds a run; held by nobody else."""
    out = request.out or _default_out(Path("runs"), str(request.data), request.resume)
    if not out.is_dir():
        check_target(out)  # no file is in its place or above it
    held = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith(".")) if out.is_dir() else []
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose another --out")
    for place in (out, *sorted(out.glob("start/*/"))) if out.is_dir() else ():
        with folder_lock(place):  # another process may be at work there
            pass
    if request.resume and not {"run.json", "start"} & set(held):
        raise InputError(f"{out}: there is no run to resume; leave --resume out to begin one")
    if held and not request.resume:
        raise InputError(f"{out}: not empty ({held[0]} is there); continue it with --resume or choose another --out")
    return out


def _default_out(parent: Path, source: str, resume: bool) -> Path:
    """runs/NAME, or the first free of runs/NAME-2, runs/NAME-3, …; with `resume` the last that is taken."""
    name = Path(os.path.abspath(source)).name or "run"  # noqa: PTH100
    number = 1
    while (parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    if resume and number > 1:
        number -= 1
    return parent / (name if number == 1 else f"{name}-{number}")


def _given_model(request: Train) -> ClusterModel | None:
    if request.model is None:
        return None
    if request.backbone is not None or request.pretrained:
        raise InputError("--model brings its own backbone; leave backbone and pretrained out")
    return load_model(request.model)


def _open_training_data(request: Train, given: ClusterModel | None, cpu: bool, reporter: Reporter) -> Data:
    """The images at the model's size, or at the size asked for, or at one the device can bear; and held-out images."""
    assert request.data is not None
    side, channels = request.side, request.channels
    if given is not None:
        if side not in (None, given.config.side) or channels not in (None, given.config.channels):
            takes = kind_of(given.config.side, given.config.channels)
            raise InputError(f"the model takes {takes}; leave side and channels out")
        side, channels = given.config.side, given.config.channels

    def opened(
        source: str, side: int | None, channels: int | None, split: str | None = None, pictures: Path | None = None
    ) -> Data:
        return open_data(
            source,
            side=side,
            max_side=CPU_SIDE if cpu and request.backbone is None else None,
            channels=channels,
            split=split,
            data_dir=request.data_dir,
            class_folders=request.class_folders,
            strict=request.strict,
            pictures=pictures,
            reporter=reporter,
        )

    data = opened(request.data, side, channels, pictures=request.pictures)
    if request.test is None:
        return data
    split = "test" if request.test in DATASETS else None
    return replace(data, held_out=opened(request.test, data.images.side, data.images.channels, split).images)


def _clusters(request: Train, data: Data, given: ClusterModel | None) -> int:
    """The number of clusters, from --clusters, the model or the data set's row; checked against the images."""
    of_model = given.config.n_clusters if given is not None else 0
    clusters = request.clusters or of_model or (data.row.n_clusters if data.row else None)
    if clusters is None:
        raise InputError("say how many clusters to find: --clusters 12, for example")
    if of_model and clusters != of_model:
        mend = "leave --clusters out, or pretrain a model for it"
        raise InputError(f"{request.model}: has {of_model} clusters, --clusters says {clusters}; {mend}")
    if clusters > len(data.images):
        raise InputError(
            f"{clusters:,} clusters for {len(data.images):,} images: there must be at least one image each"
        )
    return clusters


def _configuration(
    method: str,
    request: Train,
    data: Data,
    given: ClusterModel | None,
    views: ViewChoice,
    clusters: int,
    cpu: bool,
) -> TrainConfig:
    """The configuration: what is asked, else the data set's own, else what fits the number of images and the device."""
    n_images = len(data.images)
    options = (
        default_options(method, n_images, cpu=cpu, row=data.row) | dict(request.arguments) | dict(request.settings)
    )
    steps = method_settings(method, split_options(method, options)[1]).steps
    often = {"evaluate_every": max(1, steps // 10), "log_every": min(100, max(1, steps // 20))}
    return make_config(
        method,
        often | options,
        start=given or _fresh_model(request, data, clusters, cpu, int(options.get("seed") or 0)),
        views=views,
        stages=_stages(request, data, given),
        stage_options=short_start(n_images, cpu=cpu),
        n_clusters=clusters,
    )


def _training_pairs(request: Train, images: ImageSet, config: TrainConfig, reporter: Reporter) -> Pairs:
    assert request.pairs is not None
    pairs = open_pairs(
        request.pairs,
        images,
        columns=request.columns,
        on_conflict=request.on_conflict or ("drop" if config.arguments.get("recipe") == "safe" else "error"),
        close=request.close,
        holdout=request.holdout_pairs,
        seed=config.settings.seed,
        reporter=reporter,
    )
    if not pairs.training.weight.any():
        raise InputError(f"{request.pairs}: every pair has the weight 0; give some of them a weight above 0")
    aside = request.pairs.with_name("held-out-pairs.csv")
    if request.from_run is None or not aside.is_file():
        return pairs
    return replace(pairs, held_out=Constraints.read(aside, names=images.names))


def _fresh_model(request: Train, data: Data, clusters: int, cpu: bool, seed: int) -> ClusterModel:
    row, side = data.row, data.images.side
    mean, std = (row.mean, row.std) if row else data.images.moments() if data.images.embedded else (None, None)
    by_device = "tiny" if cpu and 1 < side <= CPU_SIDE else default_backbone(side)
    return build_model(
        n_clusters=clusters,
        side=side,
        channels=data.images.channels,
        backbone=request.backbone or (row.backbone if row else by_device),
        mean=mean,
        std=std,
        pretrained=request.pretrained,
        seed=seed,
    )


def _stages(request: Train, data: Data, given: ClusterModel | None) -> tuple[str, ...]:
    """The stages of the start that are still to be made; features that are there are not learnt."""
    if given is not None and given.config.n_clusters:
        return ()
    has_features = given is not None or request.pretrained or data.images.embedded
    return SHORT_STAGES[1:] if has_features else SHORT_STAGES


def _views(request: Train, row: DataSet | None) -> ViewChoice:
    check_operation_names(request.without)
    flip = request.flip if request.flip is not None else row is None or row.flip
    return ViewChoice(flip=flip, without=tuple(sorted({*request.without, *(row.without if row else ())})))


def _start_record(request: Train) -> dict[str, Any]:
    """What `--from-run` needs beside the data to make the same start."""
    model = None if request.model is None else os.path.abspath(request.model)  # noqa: PTH100
    test = request.test if request.test is None or request.test in DATASETS else os.path.abspath(request.test)  # noqa: PTH100
    return {"start": {"model": model, "pretrained": request.pretrained}, "test": test}


def _rehearse(plan: Plan) -> None:
    """One step of the method on a few images, so that a wrong argument shows now and not after the start is made."""
    images = plan.data.images
    rows = np.arange(min(len(images), max(2, plan.config.n_clusters)))
    if images.labels is not None:
        rows = np.union1d(rows, images.labels.argmax())  # the largest label must fit the clusters
    few = images.take(rows)
    rehearse(plan.config, few, Constraints.from_lists(n_images=len(few), must_link=[(0, 1)]) if plan.pairs else None)


def _say_plan(plan: Plan, request: Train, cpu: bool) -> None:
    images, config, reporter = plan.data.images, plan.config, plan.context.reporter
    pairs = (
        f", {len(plan.pairs.training):,} pairs ({plan.pairs.training.n_must_links:,} must-links)" if plan.pairs else ""
    )
    what = kind_of(images.side, images.channels) if images.embedded else "images"
    reporter.say(f"{len(images):,} {what}, {config.n_clusters} clusters{pairs} → {plan.context.out}")
    if images.labels is not None and plan.data.record["kind"] == "folder":
        reporter.say(
            f"sub-folders taken as {len(images.classes or ()):,} classes, for scores only (--set labels=no: not so)"
        )
    if cpu and request.from_run is None and plan.data.row is None and not images.embedded:
        start = config.start.config
        size = f"images of {start.side} px, backbone {start.backbone}, {config.settings.steps:,} steps"
        reporter.say(f"no GPU: {size}; --set side=64, --set backbone=NAME and --steps change that")
    if set(config.stages) & set(PRETEXTS):
        assert plan.context.out is not None
        reporter.say(
            f"no --model: a short self-supervised start is made first, in {plan.context.out / 'start'}; better "
            "clusters come from constraintmatch pretrain, then --model, or from "
            "--set backbone=timm:NAME --set pretrained=yes"
        )


def _recorded(request: Train) -> Train:
    """The request with what it leaves open filled in from a recorded run (--from-run, or --resume without images)."""
    place = request.from_run
    if place is None and request.resume and request.data is None and request.out is not None:
        place = request.out
    if place is None:
        return request
    file = place / "run.json" if place.is_dir() else place
    if request.from_run is None and not file.is_file():
        raise InputError(f"{place}: there is no run.json yet; give the whole command again, with --resume")
    run = read_json(file)
    asked = run.get("request") if isinstance(run, dict) else None
    if not isinstance(asked, dict) or not {"method", "data", "model", "views"} <= asked.keys():
        raise InputError(f"{file}: not the record of a training; name a run folder or its run.json")
    if request.from_run is None and isinstance(how := run.get("how"), dict):  # of this very run
        request = replace(request, settings={**how, **request.settings})
    return _filled(replace(request, from_run=file), current_request(asked, file), file.with_name("pairs.csv"))


def _recorded_arguments(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a recorded run; one of before there were recipes was trained by the paper's."""
    has_recipe = "recipe" in method_arguments(str(asked["method"]))
    return {**({"recipe": "paper"} if has_recipe else {}), **asked["arguments"]}


def _filled(request: Train, asked: Mapping[str, Any], pairs: Path) -> Train:
    data, model, start = asked["data"], asked["model"], asked["data"].get("start", {})
    same_method = request.method in (None, asked["method"])
    method = request.method or asked["method"]
    recorded_pairs = request.pairs is None and pairs.is_file() and _needs_pairs(method)
    own_model = request.model or (Path(start["model"]) if start.get("model") else None)
    return replace(
        request,
        method=method,
        data=request.data or data.get("source"),
        data_dir=request.data_dir or data.get("data_dir"),
        class_folders=request.class_folders if request.class_folders != "auto" else data.get("class_folders", "auto"),
        test=request.test or data.get("test"),
        pictures=request.pictures or data.get("pictures"),
        side=request.side or data.get("side"),
        channels=request.channels or data.get("channels"),
        clusters=request.clusters or model["n_clusters"] or None,
        model=own_model,
        backbone=request.backbone or (None if own_model else model["backbone"]),
        pretrained=request.pretrained or bool(start.get("pretrained")),
        pairs=pairs if recorded_pairs else request.pairs,
        on_conflict="keep" if recorded_pairs else request.on_conflict,  # settled when the run was made
        flip=request.flip if request.flip is not None else asked["views"]["flip"],
        without=request.without or tuple(asked["views"]["without"]),
        arguments={**(_recorded_arguments(asked) if same_method else {}), **request.arguments},
        settings={**asked["settings"], **request.settings},
    )
