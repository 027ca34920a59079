"""Training on the labels of all images: what the paper's two upper bounds share."""

from collections.abc import Callable

import torch
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice, evaluate_now, prepare
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.batches import LabelBatch, Shuffled, derive_seed
from constraintmatch.training.loop import TrainSettings, fit

__all__ = ["Network", "train_on_labels"]

Network = Callable[..., Tensor]


def train_on_labels(
    title: str,
    model: ClusterModel,
    images: ImageSet,
    loss: Callable[[Network, LabelBatch], dict[str, Tensor]],
    images_per_step: int,
    settings: TrainSettings,
    views: ViewChoice,
    context: Context,
) -> Trained:
    """The model trained with `loss` on weak views of all images and their labels."""
    if images.labels is None:
        raise InputError(f"{title} needs the label of every image and the set has none; use class folders")
    bench = prepare(model, images, settings)
    rows = Shuffled(len(images), images_per_step, derive_seed(settings.seed, "images"), bench.device)
    labels, view = torch.from_numpy(images.labels.copy()).to(bench.device), views.pair(images)

    def next_batch(step: int) -> LabelBatch:
        chosen = rows(step)
        return LabelBatch(bench.maker(view, bench.store.take(chosen), step, "images"), labels[chosen])

    log = fit(
        model,
        next_batch,
        loss,
        settings,
        title=title,
        run=context.run,
        evaluate=lambda: evaluate_now(model, images, context),
        prefetch=bench.prefetch,
        reporter=context.reporter,
        stop=context.stop,
    )
    return Trained(model, log)
