"""The self-supervised start: a pretext task, SCAN and self-labelling, one after the other, each a run of its own."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from constraintmatch.errors import InputError
from constraintmatch.evaluation import embed, knn_accuracy, neighbour_consistency, predict, scores
from constraintmatch.images import ImageSet
from constraintmatch.methods.neighbours import nearest_neighbours
from constraintmatch.models import ClusterModel
from constraintmatch.running import Around, method_settings, run_method
from constraintmatch.runs import write_result

__all__ = ["SHORT", "STAGES", "pretrain", "stage_summary"]

STAGES = ("simclr", "scan", "self_label")
# The start that `train` makes by itself: minutes on a CPU for a small folder, a third to a tenth of the full recipe.
SHORT: dict[str, dict[str, Any]] = {
    "simclr": {"epochs": 60, "images_per_step": 256},
    "scan": {"epochs": 15},
    "self_label": {"epochs": 10},
}


def pretrain(
    model: ClusterModel,
    images: ImageSet,
    n_clusters: int,
    *,
    stages: Sequence[str] = STAGES,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    around: Around | None = None,
    results: Path | None = None,
    name: str = "start",
) -> ClusterModel:
    """The model after the stages; `arguments` by stage, `settings` for all. Finished stages are loaded.

    With a folder for `results`, each stage leaves `name-stage.json` there: settings, scores, seconds, environment.
    """
    around = around or Around()
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise InputError(f"unknown stage {unknown[0]!r}; known are {', '.join(STAGES)}")
    _check_variety(images)
    for stage in stages:
        chosen = {**(arguments or {}).get(stage, {}), **({"n_clusters": n_clusters} if stage == "scan" else {})}
        ours = method_settings(stage, settings)
        place = replace(around.within(f"{STAGES.index(stage) + 1}-{stage}"), resume=True)  # of the same command
        began = time.monotonic()
        model, log = run_method(stage, model, images, arguments=chosen, settings=ours, around=place)
        told = stage_summary(model, images, around.held_out)
        around.reporter.say(f"{stage}: " + ", ".join(f"{key} {value:.3g}" for key, value in told.items()))
        if results is not None:
            request = {"stage": stage, "data": dict(around.data), "arguments": chosen, "settings": ours.request()}
            values = _stage_result(request, told, log, time.monotonic() - began)
            write_result(results / f"{name}-{stage}.json", values)
    return model


def stage_summary(model: ClusterModel, images: ImageSet, held_out: ImageSet | None = None) -> dict[str, float]:
    """What a stage has reached, seen without labels, and with them where they are known."""
    rows = np.linspace(0, len(images) - 1, min(len(images), 2000)).astype(np.int64)
    sample = images.take(rows)
    near = nearest_neighbours(embed(model, sample, projected=True), 20)
    told: dict[str, float] = {}
    if model.config.n_clusters == 0:
        if images.labels is not None and held_out is not None and held_out.labels is not None:
            known, asked = embed(model, images), embed(model, held_out)
            told["knn_acc"] = knn_accuracy(known, images.labels, asked, held_out.labels)
        if sample.labels is not None:
            told["neighbour_acc"] = neighbour_consistency(near, sample.labels)
        return told
    predictions = predict(model, sample)
    told["neighbour_consistency"] = neighbour_consistency(near, predictions.clusters)
    told["mean_confidence"] = float(predictions.confidence.mean())
    told["over_0.99"] = float((predictions.confidence > 0.99).mean())
    told["empty_clusters"] = float(len(np.setdiff1d(np.arange(model.config.n_clusters), predictions.clusters)))
    target = held_out if held_out is not None and held_out.labels is not None else None
    if target is not None and target.labels is not None:
        told |= scores(target.labels, predict(model, target))
    return told


def _stage_result(
    request: dict[str, Any], told: dict[str, float], log: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """What a finished stage leaves in `results/`; its steps follow from the epochs, so the log knows them."""
    request["settings"]["steps"] = log[-1]["step"]
    times = {"seconds": round(seconds, 1), "training_seconds": log[-1]["seconds"]}
    return {**request, "scores": told, **times, "curve": [entry for entry in log if entry["kind"] == "evaluation"]}


def _check_variety(images: ImageSet) -> None:
    """Images of one colour each carry nothing to learn from."""
    rows = np.linspace(0, len(images) - 1, min(len(images), 200)).astype(np.int64)
    sample = images.images[rows]
    flat = sample.reshape(len(sample), -1, images.channels)
    if np.all(flat.max(axis=1) == flat.min(axis=1)):
        raise InputError("every image is of one colour: there is nothing to learn from; check the folder and --side")
