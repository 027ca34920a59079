"""Training on pairs, with or without a term for unconstrained images: what the paper's three methods share.

The paper's ablation is that term: none (constrained), pseudo-labels, or pseudo-constraints.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_json
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.judge import FALLEN, TRIPLETS_WRONG, Guard
from constraintmatch.evaluation.metrics import predict, pseudo_quality
from constraintmatch.methods.heads import attach_head, detach_head, embed_images, merge_clusters
from constraintmatch.methods.preparation import (
    Bench,
    Context,
    ViewChoice,
    check_images,
    check_range,
    evaluate_now,
    prepare,
    spread,
)
from constraintmatch.models.backbones import frozen_statistics, passes
from constraintmatch.models.cluster_model import ClusterModel, with_clusters
from constraintmatch.training import losses, ranks
from constraintmatch.training.batches import PairBatch, Views, derive_seed, pair_batches
from constraintmatch.training.loop import TrainSettings, choose_device, fit

MERGED = "merged.json"  # in a run folder: the number of clusters after a merge
LOST = 0.25  # a cluster with less than this share of its images counts as lost
LATER = 1.0  # standard errors that a later step may look worse: accuracy still rises while the likelihood is flat
HELD_PER_PAIR = 3  # images in a step, for each pair, that hold the model to the predictions of the start
HEAD_RATE = 0.03  # the learning rate of a head alone, on features of one scale


@dataclass(frozen=True)
class SemiBatch:
    """Constrained pairs, and views of unconstrained images."""

    pairs: PairBatch
    free: Views | None
    flip: Tensor | None  # (n,) which guesses are flipped, or (n, 2) the clusters that they swap
    ramp: Tensor | None  # () the share of λ at this step


@dataclass(frozen=True)
class PairTask:
    """What a model learns from: the pairs, and a term for the unconstrained images where the method has one.

    `loss` is that term, from (logits of strong views, guesses, mask of the selected guesses). None: pairs alone.
    """

    title: str
    constraints: Constraints
    recipe: str
    error_rate: float  # the share of the constraints that may be wrong
    pairs_per_step: int
    merge: bool  # first merge the clusters that the pairs join (decision 038)
    head_steps: int  # then train the head alone for this many steps (decision 034)
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    select: Callable[[Tensor], Tensor] = lambda guess: losses.confident(guess, 0.95)
    links: Callable[[Tensor], Tensor] = losses.soft_links  # of guesses (n, k) to (n, n); for the report on quality
    pseudo_weight: float = 1.0  # λ
    warm_up: float = 0.0  # the share of the steps over which λ rises from zero
    flip_fraction: float = 0.0  # ρ of the robustness study
    flip_between: str = "largest"  # which two clusters are swapped: the likeliest, or "any" two
    images_per_step: int = 600


def choose_selection(by: str, max_entropy: float, min_confidence: float) -> Callable[[Tensor], Tensor]:
    """I^sel, the guesses that take part: entropy below τ = `max_entropy`, or confidence from `min_confidence` on."""
    if by not in ("entropy", "confidence"):
        raise InputError(f"unknown selection {by!r}; known are entropy, confidence")
    check_range("in [0, 1]", max_entropy=max_entropy, min_confidence=min_confidence)
    if by == "entropy":
        return lambda guess: losses.informative(guess, max_entropy)
    return lambda guess: losses.confident(guess, min_confidence)


def check_task(task: PairTask, model: ClusterModel, images: ImageSet) -> None:
    """An InputError if the task has a bad value, or does not fit the model and the images."""
    constraints = task.constraints
    check_range("0 or more", head_steps=task.head_steps)
    weights = constraints.weight, constraints.triplets.weight
    if not any(map(len, weights)):
        raise InputError(f"{task.title} needs constraints and there are none; sample or answer some pairs first")
    if not any(weight.any() for weight in weights):
        raise InputError(f"{task.title}: every constraint has the weight 0; give some of them a weight above 0")
    if constraints.n_images != len(images):
        raise InputError(f"the constraints are over {constraints.n_images:,} images, the set has {len(images):,}")
    check_range("0 or more", pseudo_weight=task.pseudo_weight)
    if not 0 <= task.warm_up <= 1:
        raise InputError(f"warm_up is {task.warm_up}; it is a share of the steps, in [0, 1]")
    check_range("in [0, 1]", flip_fraction=task.flip_fraction)
    if task.flip_between not in ("largest", "any"):
        raise InputError(f"unknown flip_between {task.flip_between!r}; known are largest, any")
    check_error_rate("error_rate", task.error_rate)
    check_images(model, images, need_clusters=True)


def check_error_rate(name: str, value: float) -> None:
    """An InputError if a share of wrong links is not in [0, 0.5)."""
    if not 0 <= value < 0.5:
        raise InputError(f"{name} is {value}; it must be in [0, 0.5): if half of the links are wrong, they say nothing")


def begin(
    model: ClusterModel, images: ImageSet, task: PairTask, settings: TrainSettings, context: Context
) -> ClusterModel:
    """The model that the training of the network begins with; a resumed one has its weights in the checkpoint."""
    run, device, before = context.run, choose_device(settings.device), model.config.n_clusters
    if ranks.agree(run is not None and run.checkpoint.exists()):
        clusters = int(read_json(run.path / MERGED)["clusters"]) if run is not None and task.merge else 0
        return with_clusters(model, ranks.agree(clusters)) if task.merge else model
    if task.merge:
        model = merge_clusters(model, images, task.constraints, device=device, reporter=context.reporter)
        if run is not None:
            write_json(run.path / MERGED, {"clusters": model.config.n_clusters, "before": before})
    if task.head_steps:
        alone = replace(task, title=f"{task.title}, head alone")
        around = Context(reporter=context.reporter, stop=context.stop)
        short = replace(settings, steps=task.head_steps, lr=HEAD_RATE)
        short = replace(short, compile=False, cuda_graph=False, bf16=False)  # no gain for a small head
        seen = embed_images(model, images, device=device)
        head = detach_head(model, seen)
        build_training(head, seen, alone, short, ViewChoice(), around)()
        model = attach_head(model, head)
    return model


def build_training(
    model: ClusterModel, images: ImageSet, task: PairTask, settings: TrainSettings, views: ViewChoice, context: Context
) -> Callable[[], list[dict[str, Any]]]:
    """A function that trains the model on the task in place and returns the log."""
    bench, guard = prepare(model, images, settings), context.guard
    from_pairs = pair_term(bench, task, guard)
    beliefs = torch.from_numpy(guard.beliefs).to(bench.device) if guard else None
    if task.loss is not None:  # the loss alone: a threshold would be compiled in, and each value compiled again
        task = replace(task, loss=bench.speed_up(task.loss))

    def loss(network: Callable[..., Tensor], batch: SemiBatch) -> dict[str, Tensor]:
        pairs, free = batch.pairs, batch.free
        both = torch.cat((pairs.left, pairs.right))
        if free is None:
            paired = ranks.gather(network(both), *pairs.sizes)
            return {"constrained": from_pairs(paired, pairs.link, pairs.weight)}
        if task.loss is not None:
            with torch.no_grad():
                weak = ranks.gather(network(free.weak), len(free.rows))
        paired, strong = passes(network, model, both, free.strong, joint=bench.compile)
        paired, strong = ranks.gather(paired, *pairs.sizes), ranks.gather(strong, len(free.rows))
        terms = {"constrained": from_pairs(paired, pairs.link, pairs.weight)}
        if task.loss is not None:
            assert batch.ramp is not None
            with torch.no_grad():
                guess = _guess(weak, batch.flip, task)
                keep = task.select(guess)
            terms["pseudo"] = batch.ramp * task.pseudo_weight * task.loss(strong, guess, keep)
        if guard is not None and beliefs is not None:
            terms["hold"] = guard.hold * losses.soft_cross_entropy(strong, beliefs[free.rows])
        return terms

    return partial(
        fit,
        model,
        _build_batches(bench, images, task, views, settings.steps, model.config.n_clusters, held=guard is not None),
        loss,
        settings,
        bench.surroundings(
            task.title,
            context,
            measure=None if task.loss is None else partial(_measure, model, images, task),
            evaluate=lambda: {**evaluate_now(model, images, context), **judge_step(model, images, guard)},
            keep_best="held_out" if guard else None,
        ),
    )


def pair_term(bench: Bench, task: PairTask, guard: Guard | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """L^cons from the logits (2n, k) of n pairs, all left images and then all right ones, their links and weights.

    It expects as many wrong links as the task says, or else the guard. Triplets, see `PairBatch`, have a term of their
    own: of pairs and triplets the more numerous ones weigh 1, the others less by their number.
    """
    expected: Any = task.error_rate or ((*guard.rates,) if guard else 0.0)
    if bench.compile and guard and not task.error_rate:  # a number would be compiled in, and each estimate again
        expected = tuple(torch.tensor(rate, device=bench.device) for rate in guard.rates)
    count = len(task.constraints), len(task.constraints.triplets)
    shares = tuple(n / max(count) for n in count)
    return partial(bench.speed_up(_pair_loss), error_rate=expected, shares=shares)


def _pair_loss(logits: Tensor, link: Tensor, weight: Tensor, *, error_rate: Any, shares: tuple[float, ...]) -> Tensor:
    left, right = logits.float().softmax(-1).chunk(2)
    n, m = len(link), len(weight) - len(link)
    loss = shares[0] * losses.pair_loss(left[:n], right[:n], link, weight[:n], error_rate=error_rate)
    if m == 0:
        return loss
    near, far = losses.pair_scores(left[n:], right[n:]).chunk(2)
    return loss + shares[1] * losses.triplet_loss(near, far, weight[n:], error_rate=TRIPLETS_WRONG)


def _guess(weak: Tensor, flip: Tensor | None, task: PairTask) -> Tensor:
    """What the strong views should answer, from the logits of the weak views."""
    guess = weak.float().softmax(-1)
    if flip is None or task.flip_fraction == 0:
        return guess
    return losses.flip_modes(guess, flip) if task.flip_between == "largest" else losses.swap_clusters(guess, flip)


def judge_step(model: ClusterModel, images: ImageSet, guard: Guard | None) -> dict[str, Any]:
    """How much better than its beginning the model is on held-out pairs, and whether it has fallen."""
    if guard is None:
        return {}
    seen = predict(model, images.take(guard.judge.rows))
    verdict = guard.judge.compare(guard.begun, guard.judge.losses(seen.probabilities))
    slack = LATER * verdict.error if verdict.gain > 0 else 0.0
    rows, k = spread(len(images), 2_000), guard.beliefs.shape[1]
    both = guard.beliefs[rows], predict(model, images.take(rows)).probabilities
    before, now = (np.bincount(each.argmax(1), minlength=k) for each in both)
    lost = (before >= len(rows) / (4 * k)) & (now < LOST * before)  # clusters of some size
    fallen = verdict.has_fallen or bool(lost.any() and verdict.surely(FALLEN) < 0)  # some clusters are rightly lost
    return {"held_out": verdict.gain, "held_out_slack": slack, "fallen": fallen}


def _build_batches(
    bench: Bench, images: ImageSet, task: PairTask, views: ViewChoice, steps: int, n_clusters: int, *, held: bool
) -> Callable[[int], SemiBatch]:
    """The batch of step t: pairs, and views of unconstrained images if there is a term for them or they are held."""
    plain, weak, strong = views.pair(images), views.weak(images), views.strong(images)
    pairs = pair_batches(bench.store, task.constraints, task.pairs_per_step, plain, bench.maker, bench.seed)
    if task.loss is None and not held:
        return lambda step: SemiBatch(pairs(step), None, None, None)
    n = HELD_PER_PAIR * task.pairs_per_step if task.loss is None else task.images_per_step
    free = bench.draw_rows(n, "unconstrained")
    rising = task.warm_up * steps

    def next_batch(step: int) -> SemiBatch:
        rows = free(step)
        pixels = bench.store.take(ranks.mine(rows))
        strongly = bench.maker(strong, pixels, step, "strong", len(rows))
        if task.loss is None:
            return SemiBatch(pairs(step), Views(strongly, strongly, rows), None, None)
        both = Views(bench.maker(weak, pixels, step, "weak", len(rows)), strongly, rows)
        ramp = torch.full((), min(1.0, step / rising) if rising else 1.0, device=bench.device)
        return SemiBatch(pairs(step), both, _draw_flips(task, bench, step, len(rows), n_clusters), ramp)

    return next_batch


def _draw_flips(task: PairTask, bench: Bench, step: int, n: int, n_clusters: int) -> Tensor | None:
    """Which of n guesses are flipped (n,), or the two clusters that each of them swaps (n, 2)."""
    if task.flip_fraction == 0:
        return None
    generator = torch.Generator().manual_seed(derive_seed(bench.seed, "flip", step))
    order = torch.randperm(n, generator=generator)  # exactly the fraction ρ of each batch
    flipped = order < round(task.flip_fraction * n)
    if task.flip_between == "any":
        flipped = flipped[:, None] * _draw_two(n_clusters, n, generator)
    return flipped.to(bench.device)


def _draw_two(n_clusters: int, n: int, generator: torch.Generator) -> Tensor:
    """Two different clusters (n, 2) for each of n images; a single cluster comes twice."""
    first = torch.randint(n_clusters, (n,), generator=generator)
    further = torch.randint(1, max(n_clusters, 2), (n,), generator=generator)
    return torch.stack((first, (first + further) % n_clusters), dim=1)


def _measure(model: ClusterModel, images: ImageSet, task: PairTask, batch: SemiBatch) -> dict[str, Any]:
    """The selected share of the guesses of a batch, and their quality where labels are known."""
    assert batch.free is not None
    with torch.no_grad(), frozen_statistics(model):
        guess = _guess(ranks.gather(model(batch.free.weak), len(batch.free.rows)), batch.flip, task)
    keep = task.select(guess)
    values: dict[str, Any] = {"selected": float(keep.float().mean())}
    if images.labels is not None:
        labels = images.labels[batch.free.rows.cpu().numpy()]
        values |= pseudo_quality(guess, keep, task.links(guess), labels)
    return {name: value for name, value in values.items() if value is not None and name != "selected_share"}
