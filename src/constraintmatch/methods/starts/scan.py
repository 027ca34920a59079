"""SCAN: a cluster head that gives an image and its neighbours the same cluster, and all clusters a share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed, nearest_neighbours
from constraintmatch.methods.parts.linear_heads import best_linear_head, steady_head
from constraintmatch.methods.parts.preparation import (
    Bench,
    Context,
    Trained,
    ViewChoice,
    by_epochs,
    check_clusters,
    check_least,
    check_share,
    evaluate_now,
    prepare,
    quality_judge,
)
from constraintmatch.models.backbones import passes
from constraintmatch.models.cluster_model import ClusterModel, with_clusters, with_head
from constraintmatch.training.batches import Shuffled, derive_seed
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import scan_loss
from constraintmatch.training.views import View

__all__ = ["SCAN_SETTINGS", "NeighbourBatch", "scan"]

SCAN_SETTINGS = TrainSettings(optimizer="adam", lr=1e-4, weight_decay=1e-4, schedule="constant")


@dataclass(frozen=True)
class NeighbourBatch:
    """Strong views of images and of one neighbour of each (n, c, h, w)."""

    anchor: Tensor
    neighbour: Tensor


def scan(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    epochs: int = 50,
    images_per_step: int = 128,
    n_neighbours: int = 20,
    n_tries: int = 40,
    entropy_weight: float = 5.0,
    tolerance: float = 0.1,
    settings: TrainSettings = SCAN_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model with a cluster head, from one trained on a pretext task.

    The last of ten evaluations whose `cluster_quality` is lower than the best by at most this `tolerance` gives the
    weights (1: the last, whatever it is). Neighbours are mined once, in the features of the given model (decision 022).
    The head begins with what the best of `n_tries` linear ones on these features agree on (0: at random); a model that
    has this many clusters already keeps its own. The steps follow from `epochs`.
    """
    check_share("tolerance", tolerance)
    check_clusters(n_clusters, images)
    check_least("scan", epochs=(epochs, 1), images_per_step=(images_per_step, 1), n_neighbours=(n_neighbours, 1))
    check_least("scan", n_tries=(n_tries, 0))
    bench = prepare(model, images, settings, need_clusters=False)
    quality = quality_judge(images, bench.device)
    features = torch.from_numpy(embed(model, images, device=bench.device))
    batches = _NeighbourSource(bench, features, n_neighbours, images_per_step, views.scan_strong(images))
    settings = by_epochs(settings, epochs, batches.rows)
    kept = model.config.n_clusters == n_clusters  # a head of linear_scan, say, is a start
    seed = derive_seed(settings.seed, "head")
    trained = model if kept else with_clusters(model, n_clusters, seed=seed)
    if n_tries and not kept:
        inputs = features.to(bench.device)
        best = best_linear_head(
            inputs, batches.near, n_clusters, n_heads=n_tries, entropy_weight=entropy_weight, seed=seed
        )
        trained = with_head(model, *steady_head(inputs, best))

    def loss(network: Callable[..., Tensor], batch: NeighbourBatch) -> dict[str, Tensor]:
        # each side has its own BatchNorm statistics, as published
        sides = passes(network, trained, batch.anchor, batch.neighbour, joint=bench.compile)
        anchor, other = (side.float().softmax(-1) for side in sides)
        return {"head0": scan_loss(anchor, other, entropy_weight=entropy_weight)}  # as logs have always named it

    log = fit(
        trained,
        batches,
        loss,
        settings,
        title="scan",
        run=context.run,
        evaluate=lambda: {**evaluate_now(trained, images, context), "quality": quality(trained)},
        keep_best="quality",
        tolerance=tolerance,  # a collapse costs more; within it, longer training is better
        prefetch=bench.prefetch,
        reporter=context.reporter,
        stop=context.stop,
    )
    return Trained(trained, log)


class _NeighbourSource:
    """Batches of images, each with one of its nearest neighbours, under one view."""

    def __init__(self, bench: Bench, features: Tensor, n_neighbours: int, batch: int, view: View) -> None:
        device = bench.device
        near = nearest_neighbours(features.numpy(), n_neighbours, device=device)
        self.near = torch.from_numpy(near).to(device)
        self.rows = Shuffled(len(features), batch, derive_seed(bench.seed, "images"), device)
        self.bench, self.view, self.picker = bench, view, torch.Generator(device)

    def __call__(self, step: int) -> NeighbourBatch:
        chosen, maker = self.rows(step), self.bench.maker
        self.picker.manual_seed(derive_seed(self.bench.seed, "neighbour", step))
        size = (len(chosen), 1)
        pick = torch.randint(self.near.shape[1], size, generator=self.picker, device=self.bench.device)
        anchor = self.bench.store.take(chosen)
        other = self.bench.store.take(self.near[chosen].gather(1, pick).squeeze(1))
        return NeighbourBatch(maker(self.view, anchor, step, "anchor"), maker(self.view, other, step, "neighbour"))
