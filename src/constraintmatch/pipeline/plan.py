"""A training before its first step: what was asked, completed from records, data set and device, and checked."""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_folder, check_target, folder_lock, read_json
from constraintmatch._internal.progress import Reporter
from constraintmatch._internal.rng import check_seed
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.pairs_file import files_with
from constraintmatch.data.datasets import DATASETS, DataSet
from constraintmatch.data.image_set import ImageSet, kind_of
from constraintmatch.methods import METHODS, Context, ViewChoice
from constraintmatch.models.backbones import ENCODER, default_backbone
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model
from constraintmatch.pipeline.config import (
    ORDER,
    PRETEXTS,
    SHORT_STAGES,
    TrainConfig,
    complete_options,
    default_options,
    make_config,
    method_arguments,
    short_start,
)
from constraintmatch.pipeline.embedding import OWN, choose_encoder, encode
from constraintmatch.pipeline.sources import ClassFolders, Data, open_data, open_pairs, path_list
from constraintmatch.pipeline.train import rehearse
from constraintmatch.training import ranks
from constraintmatch.training.loop import choose_device
from constraintmatch.training.run_folder import current_request
from constraintmatch.training.views import check_operation_names

CPU_SIDE = 32  # without a GPU a ResNet step of the published size takes half a minute; this brings a folder to minutes


@dataclass(frozen=True)
class Train:
    """What `train` is asked; None leaves the choice to the recorded run, the data set, the device or the method."""

    data: str | None = None
    pairs: Path | Sequence[Path] | None = None
    clusters: int | None = None
    out: Path | None = None
    method: str | None = None
    model: Path | None = None
    start: str | None = None  # without a model: pretrained, own or timm:NAME
    frozen: bool = False  # a pretrained encoder stays as it is on a GPU too
    backbone: str | None = None
    pretrained: bool = False
    side: int | None = None
    channels: int | None = None
    data_dir: Path | None = None
    test: str | None = None
    class_folders: ClassFolders = "auto"
    columns: str | None = None
    on_conflict: Literal["error", "drop", "keep"] | None = None  # None: drop with the safe recipe, else error
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
    """A training with everything checked: what is left is to do it. For the start alone there are no pairs yet."""

    data: Data
    seen: ImageSet  # what is learned from: the images, or what a pretrained encoder makes of them
    config: TrainConfig  # its stages are those of the short start that the model lacks
    pairs: Constraints | None = None
    held_out_pairs: Constraints | None = None
    context: Context = field(default_factory=Context)


def plan_pretraining(request: Train, reporter: Reporter) -> Plan:
    """The images opened, the model given or built, the views chosen; nothing written.

    An InputError unless the folder is free or holds an earlier start: the model of a run would be overwritten.
    """
    if (out := request.out) is not None:
        check_folder(out)
        held = visible_names(out)
        if odd := [name for name in held if name not in (*ORDER, "model")] or (held if held == ["model"] else []):
            raise InputError(f"{out}: not empty ({odd[0]} is there) and not an earlier start; choose another --out")
    return _open_start(request, reporter)


def visible_names(folder: Path) -> list[str]:
    """What a folder holds, in order, without hidden files; nothing if there is no folder."""
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(name for name in names if not name.startswith("."))


def plan_training(request: Train, reporter: Reporter) -> Plan:
    """Everything opened, chosen and checked; nothing is written but the pairs that are set aside."""
    request = _complete(request)
    method = request.method or "constraintmatch"
    if request.data is None:
        raise InputError("say which images: a folder, a .npy or .npz file, or a data set's name")
    _check_method(method, request)
    out = _out_folder(request) if ranks.first() else request.out or Path()  # only rank 0 writes
    plan = _open_start(request, reporter)
    data, config = plan.data, plan.config
    pairs, held_out = _open_pairs(request, data, config, reporter) if request.pairs else (None, None)
    model, test = request.model and os.path.abspath(request.model), request.test  # noqa: PTH100
    test = test if test is None or test in DATASETS else os.path.abspath(test)  # noqa: PTH100
    context = Context(
        out=out,
        resume=request.resume,
        reporter=reporter,
        held_out=data.held_out,
        held_out_constraints=held_out if data.held_out is None else None,
        # with what --from-run needs to make the same start
        data={**data.record, "start": {"model": model, "pretrained": request.pretrained}, "test": test},
    )
    plan = replace(plan, pairs=pairs, held_out_pairs=held_out, context=context)
    rehearse(config, plan.seen)  # before the start is made
    _say_plan(plan, out, repeated=request.from_run is not None)
    if held_out is not None and ranks.first():
        held_out.write(out / "held-out-pairs.csv", names=data.images.names)
    return plan


def _check_method(method: str, request: Train) -> None:
    """The method exists, is one of `train`'s, has the settings that are given, and gets pairs if it needs them."""
    known = method_arguments(method)
    if method in ORDER:
        raise InputError(f"{method} is a stage of the self-supervised start; use constraintmatch pretrain")
    if odd := sorted(request.arguments.keys() - known.keys()):
        raise InputError(f"{method} has no setting {odd[0]!r}; it has {', '.join(known)}")
    if _needs_pairs(method) and request.pairs is None:
        fix = "give --pairs FILE, with the columns left,right,link (constraintmatch sample draws some from labels)"
        raise InputError(f"{method} needs constraints and there are none; {fix}")
    if not _needs_pairs(method) and request.pairs is not None:
        raise InputError(f"{method} learns from the labels of all images; leave --pairs out")
    for file in path_list(request.pairs or ()):
        if not file.exists():
            raise InputError(f"{file}: no such file")  # before thousands of images are read


def _needs_pairs(method: str) -> bool:
    return method in METHODS and "constraints" in inspect.signature(METHODS[method]).parameters


def _out_folder(request: Train) -> Path:
    """The run folder, checked: free, or with --resume one that holds a run; no other process uses it."""
    out = request.out or _default_out(Path("runs"), str(request.data), request.resume)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose another --out")
    if out.is_dir():
        for place in (out, *sorted(out.glob("start/*/"))):
            with folder_lock(place):  # another process may be at work there
                pass
    else:
        check_target(out)  # no file is above it
    held = visible_names(out)
    if request.resume and not {"run.json", "start"} & set(held):
        raise InputError(f"{out}: there is no run to resume; leave --resume out to begin one")
    if held and not request.resume:
        raise InputError(f"{out}: not empty ({held[0]} is there); continue it with --resume or choose another --out")
    return out


def _default_out(parent: Path, source: str, resume: bool) -> Path:
    """runs/NAME, or the first free of runs/NAME-2, runs/NAME-3, …; with `resume` the last that is taken."""
    name = Path(os.path.abspath(source)).name or "run"  # noqa: PTH100
    places = [parent / name]
    while places[-1].exists():
        places.append(parent / f"{name}-{len(places) + 1}")
    return places[-2] if resume and len(places) > 1 else places[-1]


# The start


def _open_start(request: Train, reporter: Reporter) -> Plan:
    if request.clusters is not None and request.clusters < 2:
        raise InputError(f"--clusters {request.clusters}: fewer than 2 clusters separate nothing; ask for 2 or more")
    device = choose_device(request.settings.get("device"))
    cpu = device.type == "cpu"
    views = choose_views(request.flip, request.without, DATASETS.get(str(request.data)))
    seed = int(request.settings.get("seed") or 0)
    check_seed(seed)
    given = _given_model(request, reporter)
    data = _open_images(request, given, cpu, reporter)
    seen = data.images
    if given is not None and given.is_encoder and (cpu or request.frozen):
        how: dict[str, Any] = {"device": device, "reporter": reporter}
        seen, held_out = encode(given, seen, **how), data.held_out
        data = replace(data, held_out=None if held_out is None else encode(given, held_out, **how))
    clusters = _clusters(request, data, given)
    stages: tuple[str, ...] = SHORT_STAGES
    if given is not None or request.pretrained or data.images.embedded:  # the features are there
        stages = () if given is not None and given.config.n_clusters else SHORT_STAGES[1:]
    model = given or _fresh_model(request, data, clusters, cpu, seed)
    return Plan(
        data, seen, _configure(request, data, cpu, start=model, views=views, stages=stages, n_clusters=clusters)
    )


def _given_model(request: Train, reporter: Reporter) -> ClusterModel | None:
    """The model to begin with: a folder that is named, or a pretrained encoder; None: a fresh one."""
    start, own = request.start, request.backbone is not None or request.pretrained
    if own and request.model is not None:
        raise InputError("--model brings its own backbone; leave backbone and pretrained out")
    if request.model is not None:
        return load_model(request.model)
    if own or (request.side, request.channels) != (None, None):
        if start in (None, OWN):
            return None
        raise InputError(f"--start {start} brings its own network; leave backbone, pretrained, side and channels out")
    return choose_encoder(str(request.data), start, ask=True, say=reporter.say)


def choose_views(flip: bool | None, without: tuple[str, ...], row: DataSet | None) -> ViewChoice:
    """The views as asked, else as the data set has them."""
    check_operation_names(without)
    flip = flip if flip is not None else row is None or row.flip
    return ViewChoice(flip=flip, without=tuple(sorted({*without, *(row.without if row else ())})))


def _open_images(request: Train, given: ClusterModel | None, cpu: bool, reporter: Reporter) -> Data:
    """The images at the model's size, the size asked for, or one that the device can bear; and held-out images."""
    assert request.data is not None
    side, channels = request.side, request.channels
    if given is not None:
        if side not in (None, given.config.side) or channels not in (None, given.config.channels):
            takes = kind_of(given.config.side, given.config.channels)
            raise InputError(f"the model takes {takes}; leave side and channels out")
        side, channels = given.config.side, given.config.channels
    most = CPU_SIDE if cpu and request.backbone is None else None
    how: dict[str, Any] = {"max_side": most, "data_dir": request.data_dir, "class_folders": request.class_folders}
    how |= {"strict": request.strict, "reporter": reporter}
    data = open_data(request.data, side=side, channels=channels, pictures=request.pictures, **how)
    if request.test is None:
        return data
    split, size = "test" if request.test in DATASETS else None, (data.images.side, data.images.channels)
    return replace(data, held_out=open_data(request.test, side=size[0], channels=size[1], split=split, **how).images)


def _clusters(request: Train, data: Data, given: ClusterModel | None) -> int:
    """The number of clusters, from --clusters, the model or the data set's row; checked against the images."""
    of_model = given.config.n_clusters if given is not None else 0
    clusters = request.clusters or of_model or (data.row.n_clusters if data.row else None)
    if clusters is None:
        raise InputError("say how many clusters to find: --clusters 12, for example")
    if of_model and clusters != of_model:
        fix = "leave --clusters out, or pretrain a model for it"
        raise InputError(f"{request.model}: has {of_model} clusters, --clusters says {clusters}; {fix}")
    if (n := len(data.images)) < clusters:
        raise InputError(f"{clusters:,} clusters for {n:,} images: there must be at least one image each")
    return clusters


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


# The training


def _configure(request: Train, data: Data, cpu: bool, **start: Any) -> TrainConfig:
    """The configuration: what is asked, else the data set's own, else what fits the number of images and the device."""
    method, n_images = request.method or "constraintmatch", len(data.images)
    options = default_options(method, n_images, cpu=cpu, row=data.row) | {**request.arguments, **request.settings}
    steps = complete_options(method, options)[1].steps
    often = {"evaluate_every": max(1, steps // 10), "log_every": min(100, max(1, steps // 20))}
    return make_config(method, often | options, stage_options=short_start(n_images, cpu=cpu), **start)


def _open_pairs(
    request: Train, data: Data, config: TrainConfig, reporter: Reporter
) -> tuple[Constraints, Constraints | None]:
    assert request.pairs is not None
    pairs, held_out = open_pairs(
        request.pairs,
        data.images,
        columns=request.columns,
        on_conflict=request.on_conflict or ("drop" if config.arguments.get("recipe") == "safe" else "error"),
        close=request.close,
        holdout=request.holdout_pairs,
        seed=config.settings.seed,
        reporter=reporter,
    )
    files = path_list(request.pairs)
    if not pairs.weight.any() and not pairs.triplets.weight.any():
        raise InputError(f"{files[0]}: every pair has the weight 0; give some of them a weight above 0")
    aside = files[0].with_name("held-out-pairs.csv")
    if request.from_run is not None and aside.is_file():
        held_out = Constraints.read(aside, names=data.images.names)
    return pairs, held_out


def _say_plan(plan: Plan, out: Path, *, repeated: bool) -> None:
    images, config, say = plan.data.images, plan.config, plan.context.reporter.say
    pairs = ""
    if plan.pairs is not None:
        pairs = f", {len(plan.pairs):,} pairs ({plan.pairs.n_must_links:,} must-links)"
        pairs += f", {len(plan.pairs.triplets):,} triplets" if len(plan.pairs.triplets) else ""
    what = kind_of(images.side, images.channels) if images.embedded else "images"
    say(f"{len(images):,} {what}, {config.n_clusters} clusters{pairs} → {out}")
    if images.labels is not None and plan.data.record["kind"] == "folder":
        say(f"sub-folders taken as {len(images.classes or ()):,} classes, for scores only (--set labels=no: not so)")
    automatic = not repeated and plan.data.row is None and not plan.seen.embedded
    if automatic and choose_device(config.settings.device).type == "cpu":
        start = config.start.config
        size = f"images of {start.side} px, backbone {start.backbone}, {config.settings.steps:,} steps"
        say(f"no GPU: {size}; --set side=64, --set backbone=NAME and --steps change that")
    if set(config.stages) & set(PRETEXTS):
        say(
            f"no --model: a short self-supervised start is made first, in {out / 'start'}; better clusters come from "
            "constraintmatch pretrain, then --model, or from --set backbone=timm:NAME --set pretrained=yes"
        )


# Records


def _complete(request: Train) -> Train:
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
    return _fill(replace(request, from_run=file), current_request(asked, file), file.with_name("pairs.csv"))


def _fill(request: Train, asked: Mapping[str, Any], pairs: Path) -> Train:
    data, model, start = asked["data"], asked["model"], asked["data"].get("start", {})
    method = request.method or asked["method"]
    if request.model is None and request.start is None and start.get("model"):
        request = replace(request, model=Path(start["model"]))
    if encoder := request.model is None and str(model["backbone"]).startswith(ENCODER):
        request = replace(request, start=request.start or model["backbone"].removeprefix(ENCODER))
    if request.pairs is None and pairs.is_file() and _needs_pairs(method):
        request = replace(request, pairs=files_with(pairs), on_conflict="keep")  # settled when the run was made
    arguments: dict[str, Any] = {}
    if method == asked["method"]:
        has_recipe = "recipe" in method_arguments(method)  # a run of before there were recipes has the paper's
        arguments = ({"recipe": "paper"} if has_recipe else {}) | asked["arguments"]
    sizes = () if encoder else ("side", "channels")
    recorded = {name: data.get(name) for name in ("data_dir", "test", "pictures", *sizes)} | {
        "data": data.get("source"),
        "clusters": model["n_clusters"] or None,
        "backbone": None if request.model or encoder else model["backbone"],
        "pretrained": bool(start.get("pretrained")),
        "without": tuple(asked["views"]["without"]),
    }
    return replace(
        request,
        **{name: getattr(request, name) or value for name, value in recorded.items()},
        method=method,
        class_folders=request.class_folders if request.class_folders != "auto" else data.get("class_folders", "auto"),
        flip=request.flip if request.flip is not None else asked["views"]["flip"],
        arguments={**arguments, **request.arguments},
        settings={**asked["settings"], **request.settings},
    )
