"""SCAN and what follows it: a cluster head that gives an image and its neighbours one cluster, then self-labelling.

`linear_scan` finds a head on frozen features: it takes seconds, has no rate to tune, and is better than k-means. `scan`
trains the network too. Then the model's own clusters of some images teach strong views of them: `self_label` takes the
images that the model is sure of, `neighbour_label` those whose neighbours agree.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F

from constraintmatch.constraints.propagation import seeds
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.judge import LEAST_GAIN, UNDECIDED, Verdict
from constraintmatch.evaluation.metrics import embed, nearest_neighbours, predict
from constraintmatch.methods.heads import best_linear_head, head_losses, steady_head
from constraintmatch.methods.pair_training import PairTask, judge_step, pair_term
from constraintmatch.methods.preparation import (
    Bench,
    Context,
    Trained,
    ViewChoice,
    check_clusters,
    check_least,
    check_range,
    evaluate_now,
    find_neighbours,
    keep_model,
    keep_quality,
    prepare,
    quality_judge,
    spread,
)
from constraintmatch.models.backbones import passes
from constraintmatch.models.cluster_model import ClusterModel, with_clusters, with_head
from constraintmatch.training.batches import PairBatch, Shuffled, Views, derive_seed, pair_batches
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import balanced_confident_cross_entropy, confident, pseudo_label_loss, scan_loss
from constraintmatch.training.ranks import gather, mine
from constraintmatch.training.views import View

NEIGHBOURS = 20  # of an image, for `linear_scan`
MOST = 50_000  # images among which `linear_scan` finds neighbours
SCAN_SETTINGS = TrainSettings(optimizer="adam", lr=1e-4, weight_decay=1e-4, schedule="constant")  # and of self_label
NEIGHBOUR_LABEL_SETTINGS = TrainSettings(optimizer="adam", lr=1e-4, weight_decay=1e-4, schedule="cosine-7/16")
KNOWN = 3  # times that a known image counts
NEIGHBOURLY = 256  # images in a step of each kind when a network repeats its head
TOLERANCE = 0.05  # by how much the label-free quality may fall meanwhile
CLEARER = 0.01  # by how much it must rise where held-out pairs do not decide: on CIFAR by 0.08, on digits it falls


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
    check_range("in [0, 1]", tolerance=tolerance)
    check_clusters(n_clusters, images)
    check_least("scan", epochs=(epochs, 1), images_per_step=(images_per_step, 1), n_neighbours=(n_neighbours, 1))
    check_least("scan", n_tries=(n_tries, 0))
    seed = derive_seed(settings.seed, "head")
    bench = prepare(model, images, settings, need_clusters=False, epochs=(epochs, images_per_step))
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


def self_label(
    model: ClusterModel,
    images: ImageSet,
    *,
    epochs: int = 200,
    images_per_step: int = 1000,
    min_confidence: float = 0.99,
    averaged: float = 0.1,
    tolerance: float = 0.05,
    settings: TrainSettings = SCAN_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained on its own predictions above `min_confidence`, clusters weighted by inverse frequency.

    The weights are an average over about the last `averaged` of the steps (a tenth of 10,000: a decay of 0.999), if
    the settings name no other. They are those of the last of ten evaluations whose `cluster_quality` is below the best
    by at most this `tolerance` (1: always the last). If no image is that sure, the model stays unchanged: without a
    loss, Adam would only decay its weights.
    """
    check_range("in [0, 1]", averaged=averaged, tolerance=tolerance)
    check_least("self_label", epochs=(epochs, 1), images_per_step=(images_per_step, 1))
    view = views.scan_strong(images)
    bench = prepare(model, images, settings, epochs=(epochs, images_per_step))
    sure = predict(model, images.take(spread(len(images), 5_000)), device=bench.device).confidence > min_confidence
    if not sure.any():
        why = f"self_label: no image is surer than {min_confidence}; the model is unchanged"
        return keep_model(model, why, context)
    rows, settings = bench.draw_epochs(settings, epochs, images_per_step, averaged=averaged)

    def next_batch(step: int) -> Views:
        chosen = rows(step)
        pixels = bench.store.take(mine(chosen))
        return Views(pixels, bench.maker(view, pixels, step, "strong", rows.batch), chosen)

    def loss(network: Callable[..., Tensor], batch: Views) -> dict[str, Tensor]:
        with torch.no_grad():
            guess = gather(network(batch.weak), rows.batch).float().softmax(-1)
        answer = gather(network(batch.strong), rows.batch)
        return {"self_label": balanced_confident_cross_entropy(answer, guess, min_confidence=min_confidence)}

    around = keep_quality("self_label", model, images, bench, context, tolerance)
    return Trained(model, fit(model, next_batch, loss, settings, around))


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
    """The model trained on its first clusters of the images whose neighbours agree on them.

    The `reliable` share of each cluster takes part (see `reliable_labels`), with each cluster as often in a step. Any
    image that the model is surer of than `min_confidence` teaches its strong view too, as in FixMatch, with
    `rest_weight`. Fixed labels cannot drift: self-labelling by confidence alone empties the clusters that are sure of
    few images, because the head never saw a strong view (decision 041). `averaged` and `tolerance`: see `self_label`.
    """
    check_range("in [0, 1]", reliable=reliable, averaged=averaged, tolerance=tolerance)
    check_least("neighbour_label", epochs=(epochs, 1), images_per_step=(images_per_step, 1))
    check_least("neighbour_label", n_neighbours=(n_neighbours, 1), rest_weight=(rest_weight, 0))
    view = views.scan_strong(images)
    bench = prepare(model, images, settings, epochs=(epochs, images_per_step))
    seen = predict(model, images, features=True, device=bench.device)
    assert seen.features is not None
    near = find_neighbours(seen.features, n_neighbours, model.config.n_clusters, bench.device)
    rows, settings = bench.draw_epochs(settings, epochs, images_per_step, averaged=averaged)
    next_batch = label_batches(bench, view, rows, *reliable_labels(seen.probabilities, near, reliable))
    loss = partial(label_loss, n=rows.batch, min_confidence=min_confidence, rest_weight=rest_weight)
    around = keep_quality("neighbour_label", model, images, bench, context, tolerance)
    return Trained(model, fit(model, next_batch, loss, settings, around))


@dataclass(frozen=True)
class TaughtBatch:
    """Strong views of reliable images (n, c, h, w) with their labels (n,); plain and strong views of any images."""

    taught: Tensor
    label: Tensor
    plain: Tensor
    strong: Tensor


def repeat_labels(
    model: ClusterModel,
    images: ImageSet,
    labels: tuple[NDArray[np.int64], NDArray[np.int64]],
    task: PairTask,
    settings: TrainSettings,
    views: ViewChoice,
    context: Context,
    *,
    from_pairs: bool,
) -> list[dict[str, Any]]:
    """Train the model on rows and their clusters as `neighbour_label` does, or on the pairs too, and return the log.

    The weights are the last ones whose label-free quality is near the best; the guard of the context takes back a fall.
    """
    same = {name: getattr(NEIGHBOUR_LABEL_SETTINGS, name) for name in ("optimizer", "lr", "weight_decay", "schedule")}
    settings = replace(settings, **same, evaluate_every=settings.evaluate_every or max(1, settings.steps // 10))
    bench, n = prepare(model, images, settings), min(NEIGHBOURLY, task.images_per_step)
    rows = bench.draw_rows(n)
    taught = label_batches(bench, views.scan_strong(images), rows, *labels)
    plain, many = views.pair(images), task.pairs_per_step
    pairs = pair_batches(bench.store, task.constraints, many, plain, bench.maker, bench.seed)
    pair_loss, quality = pair_term(bench, task, context.guard), quality_judge(images, bench.device)

    def next_batch(step: int) -> tuple[TaughtBatch, PairBatch | None]:
        return taught(step), pairs(step) if from_pairs else None

    def loss(network: Callable[..., Tensor], batch: tuple[TaughtBatch, PairBatch | None]) -> dict[str, Tensor]:
        terms, given = label_loss(network, batch[0], n=rows.batch), batch[1]
        if given is not None:
            logits = gather(network(torch.cat((given.left, given.right))), *given.sizes)
            terms["constrained"] = pair_loss(logits, given.link, given.weight)
        return terms

    def evaluate() -> dict[str, Any]:
        fallen = judge_step(model, images, context.guard)["fallen"]
        return {**evaluate_now(model, images, context), "quality": quality(model), "fallen": fallen}

    around = bench.surroundings(task.title, context, evaluate=evaluate, keep_best="quality", tolerance=TOLERANCE)
    return fit(model, next_batch, loss, settings, around)


def label_loss(
    network: Callable[..., Tensor],
    batch: TaughtBatch,
    *,
    n: int,
    min_confidence: float = 0.95,
    rest_weight: float = 1.0,
) -> dict[str, Tensor]:
    """Cross-entropy of n labels, and of the labels that the model gives to n plain images that it is sure of."""
    with torch.no_grad():
        guess = gather(network(batch.plain), n).float().softmax(-1)
    taught, rest = gather(network(torch.cat((batch.taught, batch.strong))), n, n).float().chunk(2)
    sure = rest_weight * pseudo_label_loss(rest, guess, confident(guess, min_confidence))
    return {"taught": F.cross_entropy(taught, batch.label), "rest": sure}


def label_batches(
    bench: Bench, view: View, rows: Shuffled, reliable: NDArray[np.int64], clusters: NDArray[np.int64]
) -> Callable[[int], TaughtBatch]:
    """The batch of step t: images with labels, each cluster as often as any other, and any images."""
    chosen, labels = (torch.from_numpy(array).to(bench.device) for array in (reliable, clusters))
    weight = torch.from_numpy(1 / np.bincount(clusters)[clusters]).float().to(bench.device)
    picker = torch.Generator(bench.device)

    def next_batch(step: int) -> TaughtBatch:
        picker.manual_seed(derive_seed(bench.seed, "taught", step))
        pick = torch.multinomial(weight, rows.batch, replacement=True, generator=picker)
        taught = bench.maker(view, bench.store.take(chosen[mine(pick)]), step, "taught", rows.batch)
        plain = bench.store.take(mine(rows(step)))
        return TaughtBatch(taught, labels[pick], plain, bench.maker(view, plain, step, "strong", rows.batch))

    return next_batch


def reliable_labels(
    probabilities: ArrayLike,
    neighbours: ArrayLike,
    share: float,
    groups: Sequence[NDArray[np.int64]] = (),
    hidden: ArrayLike = (),
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows whose neighbours agree on a cluster, and these clusters: this share of each cluster, at least one image.

    An image's cluster is the one for which it and its neighbours (n, m) have the highest mean probability (n, k); that
    mean is their agreement. A cluster with more than its even part of the images gives no more than that part would.
    Images of known groups come `KNOWN` times each, in the cluster of their group; those that are `hidden` do not come.
    """
    p, near = np.asarray(probabilities, np.float64), np.asarray(neighbours, np.int64)
    mean = (p + p[near].sum(1)) / (near.shape[1] + 1)
    labels, agreed = mean.argmax(1), mean.max(1)
    chosen = []
    for cluster in range(p.shape[1]):
        members = np.flatnonzero(labels == cluster)
        quota = max(1, int(np.ceil(share * min(len(members), len(p) / p.shape[1]))))
        chosen.append(members[np.argsort(-agreed[members], kind="stable")[:quota]])
    rows = np.setdiff1d(np.concatenate(chosen), hidden)
    if not groups:
        return rows, labels[rows]
    known, first = np.concatenate(groups), seeds(groups, np.asarray(probabilities, np.float32))
    known = known[first[known].max(1) > 0]  # with more groups than clusters, some have no cluster
    others = rows[~np.isin(rows, known)]
    clusters = np.concatenate([labels[others], np.tile(first[known].argmax(1), KNOWN)])
    return np.concatenate([others, np.tile(known, KNOWN)]), clusters


def repeats_well(verdict: Verdict, log: Sequence[dict[str, Any]], step: int) -> bool:
    """Whether to keep a network that repeats the judged head: held-out pairs favour it, or they cannot tell.

    Then its own neighbours must agree more on the clusters than at its first step. Views that cost more than they teach
    do not bring that about.
    """
    quality = {entry["step"]: entry["quality"] for entry in log if "quality" in entry}
    clearer = step in quality and quality[step] > quality[min(quality)] + CLEARER
    return verdict.gain > LEAST_GAIN or (clearer and verdict.surely(UNDECIDED) > 0)
