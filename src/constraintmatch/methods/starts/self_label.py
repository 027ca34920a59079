"""Self-labelling: confident clusters of plain images teach their strong views."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import predict
from constraintmatch.methods.parts.preparation import (
    Context,
    Trained,
    ViewChoice,
    by_epochs,
    check_least,
    check_share,
    evaluate_now,
    prepare,
    quality_judge,
    spread,
)
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.batches import Shuffled, Views, derive_seed
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import balanced_confident_cross_entropy

__all__ = ["SELF_LABEL_SETTINGS", "self_label"]

SELF_LABEL_SETTINGS = TrainSettings(optimizer="adam", lr=1e-4, weight_decay=1e-4, schedule="constant")


def self_label(
    model: ClusterModel,
    images: ImageSet,
    *,
    epochs: int = 200,
    images_per_step: int = 1000,
    min_confidence: float = 0.99,
    averaged: float = 0.1,
    tolerance: float = 0.05,
    settings: TrainSettings = SELF_LABEL_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained on its own predictions above `min_confidence`, clusters weighted by inverse frequency.

    The weights are an average over about the last `averaged` of the steps (a tenth of 10,000: a decay of 0.999), if
    the settings name no other; the last of ten evaluations whose `cluster_quality` is lower than the best by at most
    this `tolerance` gives them (1: the last, whatever it is). When no image is that sure the model stays as it is: with
    no loss, Adam would only decay its weights.
    """
    for name, share in (("averaged", averaged), ("tolerance", tolerance)):
        check_share(name, share)
    check_least("self_label", epochs=(epochs, 1), images_per_step=(images_per_step, 1))
    bench = prepare(model, images, settings)
    sure = predict(model, images.take(spread(len(images), 5_000)), device=bench.device).confidence > min_confidence
    if not sure.any():
        said = f"self_label: no image is surer than {min_confidence}; the model is kept as it was"
        context.reporter.say(said)
        return Trained(model, [{"step": 0, "kind": "evaluation", "warnings": [said], "seconds": 0.0}])
    quality, view = quality_judge(images, bench.device), views.scan_strong(images)
    rows = Shuffled(len(images), images_per_step, derive_seed(settings.seed, "images"), bench.device)
    settings = by_epochs(settings, epochs, rows)
    if settings.ema is None and averaged * settings.steps > 1:
        settings = replace(settings, ema=1 - 1 / (averaged * settings.steps))

    def next_batch(step: int) -> Views:
        chosen = rows(step)
        pixels = bench.store.take(chosen)
        return Views(pixels, bench.maker(view, pixels, step, "strong"), chosen)

    def loss(network: Callable[..., Tensor], batch: Views) -> dict[str, Tensor]:
        with torch.no_grad():
            guess = network(batch.weak).float().softmax(-1)
        answer = network(batch.strong)
        return {"self_label": balanced_confident_cross_entropy(answer, guess, min_confidence=min_confidence)}

    log = fit(
        model,
        next_batch,
        loss,
        settings,
        title="self_label",
        run=context.run,
        evaluate=lambda: {**evaluate_now(model, images, context), "quality": quality(model)},
        keep_best="quality",
        tolerance=tolerance,
        prefetch=bench.prefetch,
        reporter=context.reporter,
        stop=context.stop,
    )
    return Trained(model, log)
