"""SCAN: a cluster head that gives an image and its neighbours the same cluster, and uses all clusters.

`linear_scan` finds a head on frozen features: it takes seconds, has no rate to tune, and is better than k-means. `scan`
trains the network too.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed, nearest_neighbours
from constraintmatch.methods.heads import best_linear_head, head_losses, steady_head
from constraintmatch.methods.preparation import (
    Context,
    Trained,
    ViewChoice,
    check_clusters,
    check_least,
    check_shares,
    evaluate_now,
    find_neighbours,
    keep_quality,
    prepare,
    spread,
)
from constraintmatch.models.backbones import passes
from constraintmatch.models.cluster_model import ClusterModel, with_clusters, with_head
from constraintmatch.training.batches import Views, derive_seed
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import scan_loss
from constraintmatch.training.ranks import gather, mine

NEIGHBOURS = 20  # of an image, for `linear_scan`
MOST = 50_000  # images among which `linear_scan` finds neighbours
SCAN_SETTINGS = TrainSettings(optimizer="adam", lr=1e-4, weight_decay=1e-4, schedule="constant")


def linear_scan(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    n_tries: int = 40,
    entropy_weight: float = 5.0,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008, ARG001 (frozen; every method takes it)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model with a head that repeats what the best eighth of `n_tries` linear heads, by SCAN's loss, agree on.

    The backbone stays unchanged. If the model has a head with a lower loss already, it keeps that. Neighbours are found
    in the features of at most 50,000 images; in small sets an image has fewer of them (`find_neighbours`).
    """
    check_clusters(n_clusters, images)
    check_least("linear_scan", n_tries=(n_tries, 1))
    device = prepare(model, images, settings, need_clusters=False).device
    features = embed(model, images.take(spread(len(images), MOST)), device=device)
    near = torch.from_numpy(find_neighbours(features, NEIGHBOURS, n_clusters, device)).to(device)
    inputs, seed = torch.from_numpy(features).to(device), derive_seed(settings.seed, "head")
    best = best_linear_head(inputs, near, n_clusters, n_heads=n_tries, entropy_weight=entropy_weight, seed=seed)
    own, new = math.inf, float(best.losses.min())
    if model.head is not None and model.config.n_clusters == n_clusters:
        weight, bias = (part.detach().to(inputs)[None] for part in (model.head.weight, model.head.bias))
        own = float(head_losses(inputs, near, weight, bias, entropy_weight=entropy_weight))
    if own < new:
        context.reporter.say(f"linear_scan: the model keeps its head: its loss is lower ({own:.3f}, not {new:.3f})")
    placed = model if own < new else with_head(model, *steady_head(inputs, best))
    entry = {"step": 1, "kind": "evaluation", **evaluate_now(placed, images, context), "seconds": 0.0}
    return Trained(placed, [entry])


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

    The weights are those of the last of ten evaluations whose `cluster_quality` is below the best by at most this
    `tolerance` (1: always the last). Neighbours are found once, in the features of the given model (decision 022). The
    head begins with what the best of `n_tries` linear ones on these features agree on (0: at random); a model that has
    this many clusters already keeps its own head. The steps follow from `epochs`.
    """
    check_shares(tolerance=tolerance)
    check_clusters(n_clusters, images)
    check_least("scan", epochs=(epochs, 1), images_per_step=(images_per_step, 1), n_neighbours=(n_neighbours, 1))
    check_least("scan", n_tries=(n_tries, 0))
    bench, seed = prepare(model, images, settings, need_clusters=False), derive_seed(settings.seed, "head")
    features, view = embed(model, images, device=bench.device), views.scan_strong(images)
    found = nearest_neighbours(features, n_neighbours, device=bench.device, say=context.reporter.say)
    near = torch.from_numpy(found).to(bench.device)
    rows, settings = bench.draw_epochs(settings, epochs, images_per_step)
    trained, picker = model, torch.Generator(bench.device)
    if n_tries and model.config.n_clusters != n_clusters:
        inputs = torch.from_numpy(features).to(bench.device)
        best = best_linear_head(inputs, near, n_clusters, n_heads=n_tries, entropy_weight=entropy_weight, seed=seed)
        trained = with_head(model, *steady_head(inputs, best))
    elif model.config.n_clusters != n_clusters:
        trained = with_clusters(model, n_clusters, seed=seed)

    def next_batch(step: int) -> Views:
        chosen = rows(step)
        picker.manual_seed(derive_seed(settings.seed, "neighbour", step))
        pick = torch.randint(near.shape[1], (len(chosen), 1), generator=picker, device=bench.device)
        others = near[chosen].gather(1, pick).squeeze(1)
        anchor = bench.maker(view, bench.store.take(mine(chosen)), step, "anchor", rows.batch)
        other = bench.maker(view, bench.store.take(mine(others)), step, "neighbour", rows.batch)
        return Views(anchor, other, chosen)

    def loss(network: Callable[..., Tensor], batch: Views) -> dict[str, Tensor]:
        # each side has its own BatchNorm statistics, as published
        sides = passes(network, trained, batch.weak, batch.strong, joint=bench.compile)
        anchor, other = (gather(side, rows.batch).float().softmax(-1) for side in sides)
        return {"head0": scan_loss(anchor, other, entropy_weight=entropy_weight)}  # the name that old logs have

    around = keep_quality("scan", trained, images, bench, context, tolerance)
    return Trained(trained, fit(trained, next_batch, loss, settings, around))
