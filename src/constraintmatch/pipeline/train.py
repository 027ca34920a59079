"""The front door: `train` runs what a `TrainConfig` says; `pretrain` the stages of a start, each a training too."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

import constraintmatch
from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation import metrics
from constraintmatch.methods import METHODS, Context, Trained, ViewChoice
from constraintmatch.methods.heads import attach_head, bound_sizes, detach_head, size_bounds
from constraintmatch.methods.preparation import spread
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model, save_model
from constraintmatch.pipeline.config import ORDER, STAGES, Recipe, TrainConfig, make_config, method_arguments
from constraintmatch.training import ranks
from constraintmatch.training.loop import choose_device
from constraintmatch.training.run_folder import flat_items, open_run, read_log

_ALONE = Context()  # nothing is kept, and nobody watches
_QUICK: dict[str, Any] = {"device": "cpu", "compile": False, "cuda_graph": False, "bf16": False, "tensorboard": False}
_SHARED = ("seed", "device", "bf16", "channels_last", "compile", "cuda_graph")  # settings that the start shares


def train(images: ImageSet, constraints: Constraints | None, config: TrainConfig, context: Context = _ALONE) -> Trained:
    """The trained model and its log; with a folder `context.out` the run is kept there, continued, or loaded.

    Of a network whose own embeddings are given in place of the images, the head is trained.
    """
    if (sizes := None if constraints is None else constraints.sizes) is not None:  # before anything is trained
        size_bounds(sizes, len(images), config.n_clusters or config.start.config.n_clusters)
    if config.stages:  # they are kept under `start` in the run folder
        asked: dict[str, Any] = {"stages": config.stages, "recipe": config.stage_options, "views": config.views}
        asked["settings"] = {key: getattr(config.settings, key) for key in _SHARED}
        place = replace(context.within("start"), held_out_constraints=None)
        start = pretrain(config.start, images, config.n_clusters, context=place, **asked)
        config = replace(config, start=start, stages=())
    method = METHODS[config.method]
    given: dict[str, Any] = {**config.arguments, "settings": config.settings, "views": config.views}
    if "constraints" in inspect.signature(method).parameters:
        if constraints is None:
            raise InputError(f"{config.method} needs constraints and there are none; sample or answer some pairs first")
        given["constraints"] = constraints
    request = _request(config, images, given.get("constraints"), context)
    _check_ranks(request)
    whole = config.start if images.embedded and config.start.config.side > 1 else None
    start = config.start if whole is None else detach_head(whole, images)
    if (before := context.before) is not None and images.embedded and before.config.side > 1:
        context = replace(context, before=detach_head(before, images))
    known = method_arguments(config.method).items()  # what older requests meant by those that they do not have
    since = {f"arguments.{key}": value for key, value in known if value is not inspect.Parameter.empty}
    how: dict[str, Any] = {"resume": context.resume, "since": since, "how": config.settings.how()}
    kept = context.out if ranks.first() else None
    with nullcontext() if kept is None else open_run(kept, request, **how) as run:
        if found := ranks.agree(Trained(load_model(run.model), read_log(run.path)) if run and run.finished else None):
            return found
        if run is not None and "constraints" in given:
            given["constraints"].write(run.path / "pairs.csv", names=images.names)
        trained, log = method(start, images, **given, context=replace(context, run=run))
        if sizes is not None:
            trained = bound_sizes(trained, images, sizes, device=config.settings.device)
        if run is not None:
            if not read_log(run.path):  # a method without steps, like linear_scan, has no loop that would have logged
                for entry in log:
                    run.log(entry)
            log = read_log(run.path)  # of earlier parts too, where the run was resumed
        trained = _note(trained, request, log, whole)
        if run is not None:
            save_model(trained, run.model)
    if run is not None:  # not before the run is noted as finished: it would begin again
        run.checkpoint.unlink(missing_ok=True)
    return Trained(trained, log)


def _request(
    config: TrainConfig, images: ImageSet, constraints: Constraints | None, context: Context
) -> dict[str, Any]:
    """What decides the result, as plain values: two equal requests give the same model."""
    pairs: dict[str, Any] | None = None
    if constraints is not None:
        pairs = {"pairs": len(constraints), "must_links": constraints.n_must_links}
        pairs |= {"triplets": len(constraints.triplets)} if len(constraints.triplets) else {}
        pairs["fingerprint"] = pairs_hash(constraints)
    seen = images.pictures if images.pictures is not None and config.start.config.side > 1 else images
    architecture = {key: value for key, value in asdict(config.start.config).items() if key != "trained"}
    return {
        "method": config.method,
        "arguments": dict(config.arguments),
        "settings": config.settings.request(),
        "views": config.views.request(),
        "data": {**context.data, "images": len(images), "fingerprint": seen.fingerprint()},
        "constraints": pairs,
        "model": {"weights": weights_hash(config.start), **architecture},
    }


def _check_ranks(request: Mapping[str, Any]) -> None:
    """An InputError if the ranks are not asked for the same, or have different images or versions."""
    facts = {**request, "data": {key: request["data"][key] for key in ("images", "fingerprint")}}
    facts |= {"constraintmatch": constraintmatch.__version__, "torch": torch.__version__}
    here, *others = (dict(flat_items(each)) for each in ranks.everyone(facts))
    for number, other in enumerate(others, 1):
        for key in here | other:
            if here.get(key) != other.get(key):
                said = f"{key} is {other.get(key)!r}, on rank 0 {here.get(key)!r}"
                raise InputError(said, f"rank {number}", "give every rank the same command, images and versions")


def pairs_hash(constraints: Constraints) -> str:
    """A short name of the pairs, their links and their weights, and of triplets and sizes where there are some."""
    parts = [getattr(constraints, part) for part in ("left", "right", "link", "weight")]
    parts += [constraints.triplets.rows, constraints.triplets.weight]  # without triplets, no bytes
    return _hash(part.tobytes() for part in (*parts, *([] if constraints.sizes is None else [constraints.sizes])))


def weights_hash(model: ClusterModel) -> str:
    """A short name of the weights: the same numbers have the same, on every machine and in every memory format."""
    weights = sorted(model.state_dict().items())
    return _hash(part for name, value in weights for part in (name.encode(), value.detach().cpu().numpy().tobytes()))


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _note(
    model: ClusterModel, request: Mapping[str, Any], log: Sequence[Mapping[str, Any]], whole: ClusterModel | None = None
) -> ClusterModel:
    """The model with this training in its configuration; a head on the network that it was trained for."""
    if whole is not None:
        model = attach_head(whole, model)
    data = {key: request["data"][key] for key in ("name", "images", "fingerprint") if key in request["data"]}
    settings = {"steps": log[-1]["step"], "lr": request["settings"]["lr"], "seed": request["settings"]["seed"]}
    stage = {"method": request["method"], "data": data, **settings, "arguments": request["arguments"]}
    model.config = replace(model.config, trained=(*model.config.trained, stage))
    return model


# The start


def pretrain(
    model: ClusterModel,
    images: ImageSet,
    n_clusters: int,
    *,
    stages: Sequence[str] = STAGES,
    recipe: Recipe | None = None,
    settings: Mapping[str, Any] | None = None,
    views: ViewChoice | None = None,
    context: Context = _ALONE,
) -> ClusterModel:
    """The model after the stages; `recipe` has options of each stage, `settings` of all. Finished stages are loaded.

    A stage may come again: its second folder is `stage-2`.
    """
    if unknown := [stage for stage in stages if stage not in ORDER]:
        raise InputError(f"unknown stage {unknown[0]!r}; known are {', '.join(ORDER)}")
    _check_variety(images)
    found: dict[str, float] = {}
    for number, stage in enumerate(stages):
        times = list(stages[: number + 1]).count(stage)
        folder = stage if times == 1 else f"{stage}-{times}"
        finds = {"n_clusters": n_clusters} if "n_clusters" in method_arguments(stage) else {}
        options = {**(recipe or {}).get(stage, {}), **finds, **(settings or {})}
        config = make_config(stage, options, start=model, views=views)
        place = replace(context.within(folder), resume=True)  # of the same command
        model = train(images, None, config, place).model
        model.to(choose_device(config.settings.device))  # a finished stage comes from its folder
        before, found = found, stage_summary(model, images, context.held_out, say=context.reporter.say)
        if found.get("acc", 1.0) < before.get("acc", 0.0) - 0.01:
            context.reporter.say(f"{folder}: warning: ACC fell from {before['acc']:.3f} to {found['acc']:.3f}")
        if found:
            context.reporter.say(f"{folder}: " + ", ".join(f"{key} {value:.3g}" for key, value in found.items()))
    return model


def stage_summary(
    model: ClusterModel, images: ImageSet, held_out: ImageSet | None = None, *, say: Callable[[str], None] | None = None
) -> dict[str, float]:
    """How good a stage is, seen without labels, and with them where they are known; `say`: see `nearest_neighbours`."""
    target = held_out if held_out is not None and held_out.labels is not None else None
    if model.config.n_clusters == 0:
        return _judge_features(model, images, target, say)
    sample = images.take(spread(len(images), 2_000))
    near = metrics.nearest_neighbours(metrics.embed(model, sample), 20)
    predictions = metrics.predict(model, sample)
    shares = metrics.cluster_sizes(predictions) / len(sample)
    found = {
        "neighbour_consistency": metrics.neighbour_consistency(near, predictions.clusters),
        "mean_confidence": float(predictions.confidence.mean()),
        "over_0.99": float((predictions.confidence > 0.99).mean()),
        "smallest_cluster": float(shares.min()),
        "largest_cluster": float(shares.max()),
        "empty_clusters": float((shares == 0).sum()),
    }
    if target is not None and target.labels is not None:
        found |= metrics.scores(target.labels, metrics.predict(model, target))
    return found


def _judge_features(
    model: ClusterModel, images: ImageSet, target: ImageSet | None, say: Callable[[str], None] | None
) -> dict[str, float]:
    """After a pretext task there are no clusters yet; where labels are known, how often neighbours share them."""
    if images.labels is None:
        return {}
    features = metrics.embed(model, images)
    near = metrics.nearest_neighbours(features, 20, device=model.device, say=say)
    found = {"neighbour_acc": metrics.neighbour_consistency(near, images.labels)}
    if target is not None and target.labels is not None:
        found["knn_acc"] = metrics.knn_accuracy(features, images.labels, metrics.embed(model, target), target.labels)
    return found


def _check_variety(images: ImageSet) -> None:
    """Images of one colour each, or embeddings that are all the same, are an InputError."""
    sample = images.images[spread(len(images), 200)]
    if images.embedded and np.all(sample == sample[0]):
        raise InputError("every embedding is the same: there is nothing to learn from; check what made them")
    flat = sample.reshape(len(sample), -1, images.channels)
    if not images.embedded and np.all(flat.max(axis=1) == flat.min(axis=1)):
        raise InputError("every image is of one colour: there is nothing to learn from; check the folder and the side")


# Rehearsals


def rehearse(config: TrainConfig, images: ImageSet) -> None:
    """One step of a training on a few images with a small network: a wrong argument shows, and nothing is kept."""
    n_clusters = config.n_clusters or config.start.config.n_clusters
    rows = np.arange(min(len(images), max(2, n_clusters)))
    if images.labels is not None:
        rows = np.union1d(rows, images.labels.argmax())  # the largest label must fit the clusters
    few = images.take(rows)
    most = {"pairs_per_step": 4, "images_per_step": 4, "head_steps": 1}
    arguments = {key: min(value, most[key]) if key in most else value for key, value in config.arguments.items()}
    arguments.pop("merge", None)  # too few images for that
    if arguments.get("recipe") == "safe":
        arguments["recipe"] = "paper"  # which trains, however few the pairs
    settings = replace(config.settings, steps=1, **_QUICK)
    short = replace(config, arguments=arguments, settings=settings, start=_small_model(n_clusters, few), stages=())
    train(few, Constraints.from_lists(n_images=len(few), must_link=[(0, 1)]), short)  # which a method may leave alone


def rehearse_stages(
    model: ClusterModel, images: ImageSet, n_clusters: int, *, recipe: Recipe, settings: Mapping[str, Any], **how: Any
) -> None:
    """Every stage on a few images of noise, so that a wrong argument of the last shows before the first is trained."""
    noise = _noise_like(images, max(16, n_clusters))
    short = {stage: _shorten(stage, recipe.get(stage, {})) for stage in how["stages"]}
    small = _small_model(model.config.n_clusters, noise)
    pretrain(small, noise, n_clusters, recipe=short, settings={**settings, **_QUICK}, **how)


def _small_model(n_clusters: int, images: ImageSet) -> ClusterModel:
    """A network that takes such images and is good for rehearsals only."""
    backbone = "tiny" if images.side > 1 else None
    return build_model(n_clusters=n_clusters, side=images.side, channels=images.channels, backbone=backbone)


def _noise_like(images: ImageSet, most: int) -> ImageSet:
    """Small images, or embeddings of the same length, that are all different: as many as there are, at most `most`."""
    n, side, draw = min(len(images), most), min(images.side, 16), np.random.default_rng(0)
    if images.embedded:
        return ImageSet.from_arrays(draw.normal(size=(n, images.channels)).astype(np.float32))
    return ImageSet.from_arrays(draw.integers(0, 256, (n, side, side, images.channels), dtype=np.uint8))


def _shorten(stage: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with one epoch and one try; a number that is too small already stays."""
    known = method_arguments(stage)
    asked = {key: options.get(key, known[key]) for key in ("epochs", "n_tries") if key in known}
    right = isinstance(options.get("min_confidence", 0.0), int | float)
    sure = {"min_confidence": 0.0} if stage == "self_label" and right else {}  # no image of noise is surer
    return {**options, **{key: min(value, 1) for key, value in asked.items()}, **sure}
