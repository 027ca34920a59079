"""Labels that neighbours agree on teach strong views: self-labelling in which every cluster is taught."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F

from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import nearest_neighbours, predict
from constraintmatch.methods.parts.preparation import (
    Bench,
    Context,
    Trained,
    ViewChoice,
    by_epochs,
    check_least,
    check_share,
    evaluate_now,
    prepare,
    quality_judge,
)
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.batches import Shuffled, derive_seed
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import confident, pseudo_label_loss
from constraintmatch.training.views import View

__all__ = ["NEIGHBOUR_LABEL_SETTINGS", "TaughtBatch", "neighbour_label", "reliable_labels"]

NEIGHBOUR_LABEL_SETTINGS = TrainSettings(optimizer="adam", lr=1e-4, weight_decay=1e-4, schedule="cosine-7/16")


@dataclass(frozen=True)
class TaughtBatch:
    """Strong views of reliable images (n, c, h, w) with their labels (n,); plain and strong views of any images."""

    taught: Tensor
    label: Tensor
    plain: Tensor
    strong: Tensor


def neighbour_label(
    model: ClusterModel,
    images: ImageSet,
    *,
    epochs: int = 100,
    images_per_step: int = 256,
    n_neighbours: int = 20,
    reliable: float = 0.5,
    min_confidence: float = 0.95,
    rest_weight: float = 1.0,
    averaged: float = 0.1,
    tolerance: float = 0.05,
    settings: TrainSettings = NEIGHBOUR_LABEL_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained on its own clusters of the images whose neighbours agree on them, the same all the while.

    Of each cluster the `reliable` share takes part (see `reliable_labels`), in a step as many images of each cluster.
    Of all images those that the model is surer of than `min_confidence` teach their strong views too, as in FixMatch,
    with `rest_weight`. Labels that stay as they are cannot drift: self-labelling by confidence alone empties the
    clusters of which few images are sure, where the head never saw a strong view (decision 041). The weights are an
    average over about the last `averaged` of the steps; which are kept is decided as in `self_label`.
    """
    for name, share in (("reliable", reliable), ("averaged", averaged), ("tolerance", tolerance)):
        check_share(name, share)
    check_least("neighbour_label", epochs=(epochs, 1), images_per_step=(images_per_step, 1))
    check_least("neighbour_label", n_neighbours=(n_neighbours, 1), rest_weight=(rest_weight, 0))
    bench = prepare(model, images, settings)
    seen = predict(model, images, features=True, device=bench.device)
    assert seen.features is not None
    few = max(1, len(images) // (4 * model.config.n_clusters))
    near = nearest_neighbours(seen.features, min(n_neighbours, few), device=bench.device)
    rows, labels = reliable_labels(seen.probabilities, near, reliable)
    quality = quality_judge(images, bench.device)
    batches = _TaughtSource(bench, rows, labels, len(images), images_per_step, views.scan_strong(images))
    settings = by_epochs(settings, epochs, batches.rest)
    if settings.ema is None and averaged * settings.steps > 1:
        settings = replace(settings, ema=1 - 1 / (averaged * settings.steps))

    def loss(network: Callable[..., Tensor], batch: TaughtBatch) -> dict[str, Tensor]:
        with torch.no_grad():
            guess = network(batch.plain).float().softmax(-1)
        answer = network(torch.cat((batch.taught, batch.strong))).float()
        taught, rest = torch.split(answer, [len(batch.taught), len(batch.strong)])
        unsure = rest_weight * pseudo_label_loss(rest, guess, confident(guess, min_confidence))
        return {"taught": F.cross_entropy(taught, batch.label), "rest": unsure}

    log = fit(
        model,
        batches,
        loss,
        settings,
        title="neighbour_label",
        run=context.run,
        evaluate=lambda: {**evaluate_now(model, images, context), "quality": quality(model)},
        keep_best="quality",
        tolerance=tolerance,
        prefetch=bench.prefetch,
        reporter=context.reporter,
        stop=context.stop,
    )
    return Trained(model, log)


def reliable_labels(
    probabilities: ArrayLike, neighbours: ArrayLike, share: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows whose neighbours agree on a cluster, and these clusters: of each cluster this share, at least one image.

    An image's cluster is the one that it and its neighbours (n, m) have the highest mean probability (n, k) for; that
    mean tells how far they agree. A cluster with more than its even part of the images gives no more than that part
    would.
    """
    p, near = np.asarray(probabilities, np.float64), np.asarray(neighbours, np.int64)
    mean = (p + p[near].sum(1)) / (near.shape[1] + 1)
    labels, agreed = mean.argmax(1), mean.max(1)
    chosen = []
    for cluster in range(p.shape[1]):
        members = np.flatnonzero(labels == cluster)
        quota = max(1, int(np.ceil(share * min(len(members), len(p) / p.shape[1]))))
        chosen.append(members[np.argsort(-agreed[members], kind="stable")[:quota]])
    rows = np.sort(np.concatenate(chosen))
    return rows, labels[rows]


class _TaughtSource:
    """Batches of reliable images, every cluster as often as every other, and of any images."""

    def __init__(
        self, bench: Bench, rows: NDArray[np.int64], labels: NDArray[np.int64], n_images: int, batch: int, view: View
    ) -> None:
        self.bench, self.view, self.picker = bench, view, torch.Generator(bench.device)
        self.rows, self.labels = (torch.from_numpy(array).to(bench.device) for array in (rows, labels))
        self.weight = torch.from_numpy(1 / np.bincount(labels)[labels]).float().to(bench.device)
        self.rest = Shuffled(n_images, batch, derive_seed(bench.seed, "images"), bench.device)

    def __call__(self, step: int) -> TaughtBatch:
        store, maker = self.bench.store, self.bench.maker
        self.picker.manual_seed(derive_seed(self.bench.seed, "taught", step))
        pick = torch.multinomial(self.weight, self.rest.batch, replacement=True, generator=self.picker)
        taught = maker(self.view, store.take(self.rows[pick]), step, "taught")
        plain = store.take(self.rest(step))
        return TaughtBatch(taught, self.labels[pick], plain, maker(self.view, plain, step, "strong"))
