"""The self-supervised start: a pretext task, clusters (linear heads or SCAN), self-labelling; each a run."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from constraintmatch.errors import InputError
from constraintmatch.evaluation import embed, knn_accuracy, neighbour_consistency, predict, scores
from constraintmatch.files import read_json
from constraintmatch.images import ImageSet
from constraintmatch.methods.neighbours import nearest_neighbours
from constraintmatch.methods.preparation import ViewChoice, spread
from constraintmatch.models import ClusterModel
from constraintmatch.progress import Reporter
from constraintmatch.running import (
    QUICK,
    Around,
    method_arguments,
    method_settings,
    run_method,
    small_model,
    split_options,
)
from constraintmatch.runs import is_finished, write_result
from constraintmatch.training import choose_device

__all__ = [
    "CHAINS",
    "MOST_LR",
    "ORDER",
    "OWN_CHAIN",
    "PRETEXTS",
    "SHORT_STAGES",
    "STAGES",
    "Recipe",
    "chain_stages",
    "pretrain",
    "rehearse",
    "round_size",
    "short_start",
    "stage_summary",
    "training_size",
    "with_pretext",
]

STAGES = ("simclr", "scan", "self_label")  # the paper's start
SHORT_STAGES = ("simclr", "linear_scan")  # the one that a training makes by itself
PRETEXTS = ("simclr", "byol")  # what the features are learnt by; a start has one of them
ORDER = (*PRETEXTS, "linear_scan", "scan", "self_label", "neighbour_label")
CHAINS = {
    "scan": STAGES,
    "byol": ("byol", "scan", "self_label", "linear_scan"),
    "own": ("byol", "linear_scan", "neighbour_label", "linear_scan"),
    "short": SHORT_STAGES,
}
OWN_CHAIN = "own"  # for images that are no data set of the paper: steady on few of them (decisions 023 and 041)
MOST_LR = 0.02  # of a round; with few answers a higher rate is unstable (docs/lab-notes.md: 0.05 on digits)
_LENGTHS = ("epochs", "n_tries")  # arguments that say how long a stage takes
Recipe = Mapping[str, Mapping[str, Any]]  # of each stage its arguments and training settings


def short_start(n_images: int, *, cpu: bool) -> dict[str, dict[str, Any]]:
    """The recipe of the start that a training makes by itself: minutes for a folder, on a CPU too.

    At least 160 steps of SimCLR whatever the number of images, on a CPU not more; then clusters by linear heads on the
    frozen features: seconds, and nothing to tune (decision 014).
    """
    epochs = -(-160 // max(1, n_images // 256))
    return {"simclr": {"epochs": epochs if cpu else max(60, epochs), "images_per_step": 256}, "linear_scan": {}}


def training_size(n_images: int, *, cpu: bool) -> dict[str, Any]:
    """Batches, steps, rate and warm-up of a training on pairs, for a set of this size where nothing else is known.

    An eighth of the images a step, from 150 to the paper's 600 (on a CPU 150), and a third as many pairs; sixty
    passes over the images, from 500 steps to the paper's 20,000 (on a CPU 1,000); the paper's rate of 0.01, since 0.03
    ruins a strong start (decision 042). Pairs come first and pseudo-constraints by and by: a short start is a weak one,
    and pseudo-constraints confirm what it has wrong (docs/lab-notes.md).
    """
    batch = min(150 if cpu else 600, max(150, n_images // 8))
    steps = int(min(1_000 if cpu else 20_000, max(500, 60 * n_images / batch)))
    return {"images_per_step": batch, "pairs_per_step": batch // 3, "steps": steps, "lr": 0.01, "warm_up": 0.5}


def round_size(n_images: int, *, cpu: bool) -> dict[str, Any]:
    """The same for a round between questions: short, for somebody waits."""
    size = training_size(n_images, cpu=cpu)
    return {**size, "steps": 300 if cpu else 1_000, "lr": min(size["lr"], MOST_LR)}


def chain_stages(chain: str) -> tuple[str, ...]:
    """The stages of a chain by name; `scan` is the paper's."""
    if chain not in CHAINS:
        raise InputError(f"unknown chain {chain!r}; known are {', '.join(CHAINS)}")
    return CHAINS[chain]


def with_pretext(stages: Sequence[str], pretext: str) -> tuple[str, ...]:
    """The stages with this pretext task in the place of theirs."""
    if pretext not in PRETEXTS:
        raise InputError(f"unknown pretext task {pretext!r}; known are {', '.join(PRETEXTS)}")
    return tuple(pretext if stage in PRETEXTS else stage for stage in stages)


def pretrain(
    model: ClusterModel,
    images: ImageSet,
    n_clusters: int,
    *,
    stages: Sequence[str] = STAGES,
    recipe: Recipe | None = None,
    settings: Mapping[str, Any] | None = None,
    around: Around | None = None,
    results: Path | None = None,
    name: str = "start",
) -> ClusterModel:
    """The model after the stages; `recipe` by stage, `settings` for all. Finished stages are loaded.

    A stage may come again, as linear heads found anew after self-labelling: its second folder is `stage-2`. With a
    folder for `results`, each stage leaves `name-stage.json` there: settings, scores, seconds, environment.
    """
    around = around or Around()
    if unknown := [stage for stage in stages if stage not in ORDER]:
        raise InputError(f"unknown stage {unknown[0]!r}; known are {', '.join(ORDER)}")
    _check_variety(images)
    told: dict[str, float] = {}
    for number, stage in enumerate(stages):
        folder = _folder_name(stage, list(stages[:number]).count(stage))
        chosen, changes = split_options(stage, (recipe or {}).get(stage, {}))
        chosen |= {"n_clusters": n_clusters} if stage in ("linear_scan", "scan") else {}
        ours = method_settings(stage, {**changes, **(settings or {})})
        place = replace(around.within(folder), resume=True)  # of the same command
        target = None if results is None else results / f"{name}-{folder}.json"
        before, began, again = told, time.monotonic(), place.out is not None and is_finished(place.out)
        model, log = run_method(stage, model, images, arguments=chosen, settings=ours, around=place)
        if again and target is not None and target.is_file():
            told = read_json(target)["scores"]  # as it was measured then
            continue
        model.to(choose_device(ours.device))  # a finished stage comes from its folder
        told = stage_summary(model, images, around.held_out)
        _say(folder, told, before, around.reporter)
        if target is not None:
            request = {"stage": stage, "data": dict(around.data), "arguments": chosen, "settings": ours.request()}
            write_result(target, _stage_result(request, told, log, time.monotonic() - began))
    return model


def rehearse(
    model: ClusterModel,
    images: ImageSet,
    n_clusters: int,
    *,
    stages: Sequence[str],
    recipe: Recipe,
    settings: Mapping[str, Any],
    views: ViewChoice,
) -> None:
    """Every stage on a few images of noise, so that a wrong argument of the last shows before the first is trained."""
    noise = _noise_like(images, max(16, n_clusters))
    short = {stage: _shortened(stage, recipe.get(stage, {})) for stage in stages}
    how: dict[str, Any] = {"stages": stages, "recipe": short, "settings": {**settings, **QUICK}}
    pretrain(small_model(model.config.n_clusters, noise), noise, n_clusters, around=Around(views=views), **how)


def _noise_like(images: ImageSet, most: int) -> ImageSet:
    """Small images, or embeddings of the same length, that are all different: as many as there are, at most `most`."""
    n, side, draw = min(len(images), most), min(images.side, 16), np.random.default_rng(0)
    if images.embedded:
        return ImageSet.from_arrays(draw.normal(size=(n, images.channels)).astype(np.float32))
    size = (n, side, side, images.channels)
    return ImageSet.from_arrays(draw.integers(0, 256, size, dtype=np.uint8))


def _shortened(stage: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with as little to do as they allow: one epoch, one try; what is too little already stays so."""
    known = method_arguments(stage)
    asked = {key: options.get(key, known[key].default) for key in _LENGTHS if key in known}
    right = isinstance(options.get("min_confidence", 0.0), int | float)
    sure = {"min_confidence": 0.0} if stage == "self_label" and right else {}  # else no image of noise is
    return {**options, **{key: min(value, 1) for key, value in asked.items()}, **sure}


def _folder_name(stage: str, before: int) -> str:
    """Of a stage that came so often before."""
    return f"{stage}-{before + 1}" if before else stage


def _say(stage: str, told: Mapping[str, float], before: Mapping[str, float], reporter: Reporter) -> None:
    if told.get("acc", 1.0) < before.get("acc", 0.0) - 0.01:
        reporter.say(f"{stage}: warning: ACC fell from {before['acc']:.3f} to {told['acc']:.3f}")
    if told:
        reporter.say(f"{stage}: " + ", ".join(f"{key} {value:.3g}" for key, value in told.items()))


def stage_summary(model: ClusterModel, images: ImageSet, held_out: ImageSet | None = None) -> dict[str, float]:
    """What a stage has reached, seen without labels, and with them where they are known."""
    target = held_out if held_out is not None and held_out.labels is not None else None
    if model.config.n_clusters == 0:
        return _seen_in_features(model, images, target)
    sample = images.take(spread(len(images), 2_000))
    near = nearest_neighbours(embed(model, sample), 20)
    predictions = predict(model, sample)
    shares = np.bincount(predictions.clusters, minlength=model.config.n_clusters) / len(sample)
    told = {
        "neighbour_consistency": neighbour_consistency(near, predictions.clusters),
        "mean_confidence": float(predictions.confidence.mean()),
        "over_0.99": float((predictions.confidence > 0.99).mean()),
        "smallest_cluster": float(shares.min()),
        "largest_cluster": float(shares.max()),
        "empty_clusters": float((shares == 0).sum()),
    }
    if target is not None and target.labels is not None:
        told |= scores(target.labels, predict(model, target))
    return told


def _seen_in_features(model: ClusterModel, images: ImageSet, target: ImageSet | None) -> dict[str, float]:
    """After a pretext task there are no clusters yet; where labels are known, how often neighbours share them."""
    if images.labels is None:
        return {}
    features = embed(model, images)
    near = nearest_neighbours(features, 20, device=model.device)
    told = {"neighbour_acc": neighbour_consistency(near, images.labels)}
    if target is not None and target.labels is not None:
        told["knn_acc"] = knn_accuracy(features, images.labels, embed(model, target), target.labels)
    return told


def _stage_result(
    request: dict[str, Any], told: dict[str, float], log: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """What a finished stage leaves in `results/`; its steps follow from the epochs, so the log knows them."""
    request["settings"]["steps"] = log[-1]["step"]
    times = {"seconds": round(seconds, 1), "training_seconds": log[-1]["seconds"]}
    return {**request, "scores": told, **times, "curve": [entry for entry in log if entry["kind"] == "evaluation"]}


def _check_variety(images: ImageSet) -> None:
    """Images of one colour each carry nothing to learn from; nor do embeddings that are all the same."""
    sample = images.images[spread(len(images), 200)]
    if images.embedded:
        if np.all(sample == sample[0]):
            raise InputError("every embedding is the same: there is nothing to learn from; check what made them")
        return
    flat = sample.reshape(len(sample), -1, images.channels)
    if np.all(flat.max(axis=1) == flat.min(axis=1)):
        raise InputError("every image is of one colour: there is nothing to learn from; check the folder and --side")
