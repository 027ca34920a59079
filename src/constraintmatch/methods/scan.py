"""SCAN: a cluster head that gives an image and its neighbours the same cluster, and all clusters a share."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from constraintmatch.batches import Shuffled, derive_seed
from constraintmatch.errors import InputError
from constraintmatch.evaluation import embed
from constraintmatch.images import ImageSet
from constraintmatch.methods.neighbours import nearest_neighbours
from constraintmatch.methods.preparation import Job, Trained, ViewChoice, evaluate_now, prepare
from constraintmatch.models import ClusterModel, with_clusters
from constraintmatch.objectives import scan_loss
from constraintmatch.training import TrainSettings, fit

__all__ = ["SCAN_SETTINGS", "NeighbourBatch", "best_head", "scan"]

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
    n_heads: int = 1,
    entropy_weight: float = 5.0,
    settings: TrainSettings = SCAN_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    job: Job = Job(),  # noqa: B008 (frozen)
) -> Trained:
    """A model with a cluster head, from one trained on a pretext task; of several heads the one with the lowest loss.

    Neighbours are mined once, in the projections of the given model. A model that has this many clusters already keeps
    its head. The steps follow from `epochs`.
    """
    if n_clusters < 2:
        raise InputError(f"n_clusters is {n_clusters}; ask for 2 or more")
    if n_clusters > len(images):
        raise InputError(f"{n_clusters} clusters for {len(images)} images: there must be at least one image each")
    bench = prepare(model, images, settings, need_clusters=False)
    found = nearest_neighbours(
        embed(model, images, projected=True, device=bench.device), n_neighbours, device=bench.device
    )
    near = torch.from_numpy(found).to(bench.device)
    rows = Shuffled(len(images), images_per_step, derive_seed(settings.seed, "images"), bench.device)
    settings = replace(settings, steps=epochs * rows.steps_per_epoch)
    seed = derive_seed(settings.seed, "head")
    kept = n_heads == 1 and model.config.n_clusters == n_clusters  # a head of k-means, say, is a start
    trained = model if kept else with_clusters(model, n_clusters, n_heads=n_heads, seed=seed)
    view, picker = views.scan_strong(), torch.Generator(bench.device)

    def next_batch(step: int) -> NeighbourBatch:
        chosen = rows(step)
        picker.manual_seed(derive_seed(settings.seed, "neighbour", step))
        pick = torch.randint(near.shape[1], (len(chosen), 1), generator=picker, device=bench.device)
        neighbour = near[chosen].gather(1, pick).squeeze(1)
        anchor, other = bench.store.take(chosen), bench.store.take(neighbour)
        return NeighbourBatch(bench.maker(view, anchor, step, "anchor"), bench.maker(view, other, step, "neighbour"))

    def loss(network: Callable[..., Tensor], batch: NeighbourBatch) -> dict[str, Tensor]:
        # two passes, as published: each has its own BatchNorm statistics
        shape = (-1, n_heads, n_clusters)
        anchor, other = (network(side).float().view(shape).softmax(-1) for side in (batch.anchor, batch.neighbour))
        heads = [scan_loss(anchor[:, h], other[:, h], entropy_weight=entropy_weight).total for h in range(n_heads)]
        return {f"head{h}": value for h, value in enumerate(heads)}

    log = fit(
        trained,
        next_batch,
        loss,
        settings,
        title="scan",
        run=job.run,
        evaluate=(lambda: evaluate_now(trained, images, job)) if n_heads == 1 else None,
        prefetch=bench.prefetch,
        reporter=job.reporter,
    )
    return Trained(trained if n_heads == 1 else best_head(trained, log), log)


def best_head(model: ClusterModel, log: list[dict[str, float]]) -> ClusterModel:
    """The model with only the head whose loss in the last log line is lowest."""
    last = next(entry for entry in reversed(log) if "loss_head0" in entry)
    losses = [last[f"loss_head{h}"] for h in range(model.config.n_heads)]
    best, k = losses.index(min(losses)), model.config.n_clusters
    single = with_clusters(model, k)
    assert model.head is not None
    assert single.head is not None
    with torch.no_grad():
        single.head.weight.copy_(model.head.weight[best * k : (best + 1) * k])
        single.head.bias.copy_(model.head.bias[best * k : (best + 1) * k])
    return single
