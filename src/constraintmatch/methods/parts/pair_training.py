"""Training on pairs, with or without a term for unconstrained images: what the paper's three methods share.

The paper's ablation is the `unconstrained` argument: none (constrained), pseudo-labels, pseudo-constraints.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_json
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.judge import Guard
from constraintmatch.evaluation.metrics import predict, pseudo_quality
from constraintmatch.methods.parts.cluster_merging import merge_clusters
from constraintmatch.methods.parts.head_training import teach_head
from constraintmatch.methods.parts.preparation import (
    Bench,
    Context,
    Trained,
    ViewChoice,
    check_model,
    check_share,
    evaluate_now,
    prepare,
    spread,
)
from constraintmatch.models.backbones import frozen_statistics, passes
from constraintmatch.models.cluster_model import ClusterModel, with_clusters
from constraintmatch.training.batches import PairBatch, Shuffled, Views, derive_seed, pair_batches
from constraintmatch.training.loop import TrainSettings, choose_device, fit
from constraintmatch.training.losses import (
    confident,
    flip_modes,
    informative,
    pair_loss,
    soft_cross_entropy,
    swap_clusters,
)

__all__ = [
    "Before",
    "PairTask",
    "Selection",
    "SemiBatch",
    "Unconstrained",
    "begin",
    "check_error_rate",
    "checked_task",
    "constrained_term",
    "has_lost_a_cluster",
    "judged",
    "train_on_pairs",
    "train_task",
    "unconstrained_term",
]

Network = Callable[..., Tensor]
MERGED = "merged.json"  # in a run folder: how many clusters there are after a merge
LOST = 0.25  # share of its images under which a cluster counts as lost
LATER = 1.0  # standard errors by which a later step may look worse: accuracy rises on while the likelihood is flat
HELD_PER_PAIR = 3  # images a step, for each pair, that are held to what the start says of them
HEAD_RATE = 0.03  # the learning rate of a head alone, on features of one scale


@dataclass(frozen=True)
class SemiBatch:
    """Constrained pairs, and views of unconstrained images with the rows whose modes are flipped (n,).

    `ramp` () is the share of λ that counts at this step.
    """

    pairs: PairBatch
    free: Views | None
    flip: Tensor | None
    ramp: Tensor | None


@dataclass(frozen=True)
class Selection:
    """I^sel: which guesses take part: entropy under τ = `max_entropy`, or confidence from `min_confidence`."""

    by: str = "entropy"
    max_entropy: float = 0.2
    min_confidence: float = 0.95

    def __post_init__(self) -> None:
        if self.by not in ("entropy", "confidence"):
            raise InputError(f"unknown selection {self.by!r}; known are entropy, confidence")
        for name in ("max_entropy", "min_confidence"):
            check_share(name, getattr(self, name))

    def __call__(self, guess: Tensor) -> Tensor:
        return informative(guess, self.max_entropy) if self.by == "entropy" else confident(guess, self.min_confidence)


@dataclass(frozen=True)
class Unconstrained:
    """The term of the unconstrained images: its loss from (guess, strong logits, keep), its selection and its links."""

    name: str
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    select: Selection
    links: Callable[[Tensor], Tensor]  # of guesses (n, k) to (n, n); for the report on quality
    weight: float = 1.0  # λ
    flip_fraction: float = 0.0  # ρ of the robustness study
    images_per_step: int = 600
    warm_up: float = 0.0  # share of the steps over which λ rises from zero
    flip_between: str = "largest"  # which two clusters are swapped: the likeliest, or "any" two


@dataclass(frozen=True)
class Before:
    """What comes before the network is trained: clusters that the pairs join are merged (decision 038), then the head
    learns alone for so many steps, from the features as they are (decision 034)."""

    merge: bool = False
    head_steps: int = 0

    def __post_init__(self) -> None:
        if self.head_steps < 0:
            raise InputError(f"head_steps is {self.head_steps}; it must be 0 or more")


@dataclass(frozen=True)
class PairTask:
    """What is learnt from: the pairs, and how; the term of the unconstrained images, where there is one."""

    title: str
    constraints: Constraints
    unconstrained: Unconstrained | None
    error_rate: float
    pairs_per_step: int


def checked_task(
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints,
    *,
    title: str,
    unconstrained: Unconstrained | None,
    error_rate: float,
    pairs_per_step: int,
) -> PairTask:
    """What is learnt from; what cannot be used is an InputError."""
    _check(constraints, images, unconstrained, title)
    check_error_rate("error_rate", error_rate)
    check_model(model, images)
    return PairTask(title, constraints, unconstrained, error_rate, pairs_per_step)


def train_on_pairs(
    model: ClusterModel,
    images: ImageSet,
    task: PairTask,
    *,
    before: Before,
    settings: TrainSettings,
    views: ViewChoice,
    context: Context,
) -> Trained:
    """The model trained on the pairs, and on the unconstrained images where there is a term for them."""
    model = begin(model, images, task, before, settings, context)
    return Trained(model, train_task(model, images, task, settings, views, context))


def begin(
    model: ClusterModel, images: ImageSet, task: PairTask, before: Before, settings: TrainSettings, context: Context
) -> ClusterModel:
    """The model that the network's training begins with; a resumed one has its weights in the checkpoint."""
    resumes, device = context.run is not None and context.run.checkpoint.exists(), choose_device(settings.device)
    if before.merge:
        model = _merged_before(model, context) if resumes else _merged(model, images, task.constraints, context, device)
    if before.head_steps and not resumes:
        alone, own = replace(task, title=f"{task.title}, head alone"), _of_head(settings, before.head_steps)
        around = Context(reporter=context.reporter, stop=context.stop)
        teach_head(
            model, images, lambda head, seen: train_task(head, seen, alone, own, ViewChoice(), around), device=device
        )
    return model


def train_task(
    model: ClusterModel, images: ImageSet, task: PairTask, settings: TrainSettings, views: ViewChoice, context: Context
) -> list[dict[str, Any]]:
    """Train the model in place; the log."""
    bench = prepare(model, images, settings)
    unconstrained = task.unconstrained
    batches = _Batches(
        bench, images, task, views, settings.steps, model.config.n_clusters, held=context.guard is not None
    )
    told = _expected(task.error_rate, context.guard)
    from_pairs = bench.compiled(constrained_term)
    hold = context.guard.hold if context.guard else 0.0
    beliefs = torch.from_numpy(context.guard.beliefs).to(bench.device) if context.guard else None
    if unconstrained is not None:  # its loss alone: thresholds would be compiled in, each value anew
        unconstrained = replace(unconstrained, loss=bench.compiled(unconstrained.loss))

    def loss(network: Network, batch: SemiBatch) -> dict[str, Tensor]:
        pairs, free = batch.pairs, batch.free
        both = torch.cat((pairs.left, pairs.right))
        if free is None:
            return {"constrained": from_pairs(network(both), pairs.link, pairs.weight, **told)}
        if unconstrained is not None:
            with torch.no_grad():
                weak = network(free.weak)
        paired, strong = passes(network, model, both, free.strong, joint=bench.compile)
        terms = {"constrained": from_pairs(paired, pairs.link, pairs.weight, **told)}
        if unconstrained is not None:
            assert batch.ramp is not None
            pseudo = unconstrained_term(weak, strong, batch.flip, unconstrained)
            terms["pseudo"] = batch.ramp * unconstrained.weight * pseudo
        if beliefs is not None:
            terms["hold"] = hold * soft_cross_entropy(strong, beliefs[free.rows])
        return terms

    return fit(
        model,
        batches,
        loss,
        settings,
        title=task.title,
        run=context.run,
        measure=_measure(model, images, unconstrained) if unconstrained else None,
        evaluate=lambda: {**evaluate_now(model, images, context), **judged(model, images, context.guard)},
        keep_best="held_out" if context.guard else None,
        prefetch=bench.prefetch,
        reporter=context.reporter,
        stop=context.stop,
    )


def _expected(error_rate: float, guard: Guard | None) -> dict[str, Any]:
    """The share of wrong links that the pair loss expects: as asked, or as the guard has estimated."""
    if error_rate or guard is None:
        return {"error_rate": error_rate} if error_rate else {}
    return {"error_rate": tuple(guard.rates)}


def judged(model: ClusterModel, images: ImageSet, guard: Guard | None) -> dict[str, Any]:
    """How much better held-out pairs say the model is than what it began with, and whether it has fallen."""
    if guard is None:
        return {}
    seen = predict(model, images.take(guard.judge.rows))
    verdict = guard.judge.compare(guard.begun, guard.judge.losses(seen.probabilities))
    slack = LATER * verdict.error if verdict.gain > 0 else 0.0
    fallen = verdict.has_fallen or has_lost_a_cluster(model, images, guard.beliefs)
    return {"held_out": verdict.gain, "held_out_slack": slack, "fallen": fallen}


def has_lost_a_cluster(model: ClusterModel, images: ImageSet, beliefs: NDArray[np.float32]) -> bool:
    """Whether a cluster of some size in the beliefs (n, k) has lost most of its images to others."""
    rows, k = spread(len(images), 2_000), beliefs.shape[1]
    before, now = (
        np.bincount(said.argmax(1), minlength=k)
        for said in (beliefs[rows], predict(model, images.take(rows)).probabilities)
    )
    return bool(((before >= len(rows) / (4 * k)) & (now < LOST * before)).any())


def _merged(
    model: ClusterModel, images: ImageSet, constraints: Constraints, context: Context, device: torch.device
) -> ClusterModel:
    """The model with fewer clusters, whose number is noted in the run folder."""
    merged = merge_clusters(model, images, constraints, device=device, reporter=context.reporter)
    if context.run is not None:
        write_json(context.run.path / MERGED, {"clusters": merged.config.n_clusters, "before": model.config.n_clusters})
    return merged


def _merged_before(model: ClusterModel, context: Context) -> ClusterModel:
    """The model with as many clusters as it had when the run was stopped; the checkpoint has their weights."""
    assert context.run is not None
    return with_clusters(model, int(read_json(context.run.path / MERGED)["clusters"]))


def _of_head(settings: TrainSettings, steps: int) -> TrainSettings:
    """For so few numbers nothing is compiled, and nothing rounded."""
    return replace(settings, steps=steps, lr=HEAD_RATE, compile=False, cuda_graph=False, bf16=False)


def constrained_term(
    logits: Tensor, link: Tensor, weight: Tensor, *, error_rate: float | tuple[float, float] = 0.0
) -> Tensor:
    """L^cons on the logits (2n, k) of n pairs: all left ones, then all right ones."""
    left, right = logits.float().softmax(-1).chunk(2)
    return pair_loss(left, right, link, weight, error_rate=error_rate)


def unconstrained_term(weak: Tensor, strong: Tensor, flip: Tensor | None, term: Unconstrained) -> Tensor:
    """L^pseudo: guesses from the logits of weak views (no graph) decide what the strong views should answer."""
    with torch.no_grad():
        guess = _guess(weak, flip, term)
        keep = term.select(guess)
    return term.loss(guess, strong, keep)


def _guess(weak: Tensor, flip: Tensor | None, term: Unconstrained) -> Tensor:
    guess = weak.float().softmax(-1)
    if flip is None or term.flip_fraction == 0:
        return guess
    return flip_modes(guess, flip) if term.flip_between == "largest" else swap_clusters(guess, flip)


class _Batches:
    """The batch of step t: pairs, and views of unconstrained images where the method has a term for them."""

    def __init__(
        self,
        bench: Bench,
        images: ImageSet,
        task: PairTask,
        views: ViewChoice,
        steps: int,
        n_clusters: int,
        *,
        held: bool,
    ) -> None:
        unconstrained, constraints = task.unconstrained, task.constraints
        self.bench, self.unconstrained, self.steps = bench, unconstrained, steps
        self.n_clusters, self.free = n_clusters, None
        pair_view = views.pair(images)
        self.pairs = pair_batches(bench.store, constraints, task.pairs_per_step, pair_view, bench.maker, bench.seed)
        self.weak, self.strong = views.weak(images), views.strong(images)
        if unconstrained is not None or held:
            n = HELD_PER_PAIR * task.pairs_per_step if unconstrained is None else unconstrained.images_per_step
            self.free = Shuffled(len(images), n, derive_seed(bench.seed, "unconstrained"), bench.device)

    def __call__(self, step: int) -> SemiBatch:
        pairs = self.pairs(step)
        if self.free is None:
            return SemiBatch(pairs, None, None, None)
        rows = self.free(step)
        images = self.bench.store.take(rows)
        maker = self.bench.maker
        strong = maker(self.strong, images, step, "strong")
        if self.unconstrained is None:
            return SemiBatch(pairs, Views(strong, strong, rows), None, None)
        free = Views(maker(self.weak, images, step, "weak"), strong, rows)
        return SemiBatch(pairs, free, self._flip(step, len(rows)), self._ramp(step))

    def _ramp(self, step: int) -> Tensor:
        assert self.unconstrained is not None
        rising = self.unconstrained.warm_up * self.steps
        return torch.full((), min(1.0, step / rising) if rising else 1.0, device=self.bench.device)

    def _flip(self, step: int, n: int) -> Tensor | None:
        assert self.unconstrained is not None
        if self.unconstrained.flip_fraction == 0:
            return None
        generator = torch.Generator().manual_seed(derive_seed(self.bench.seed, "flip", step))
        order = torch.randperm(n, generator=generator)  # exactly the fraction ρ of each batch
        flipped = order < round(self.unconstrained.flip_fraction * n)
        if self.unconstrained.flip_between == "any":
            flipped = flipped[:, None] * _two_of(self.n_clusters, n, generator)
        return flipped.to(self.bench.device)


def _two_of(n_clusters: int, n: int, generator: torch.Generator) -> Tensor:
    """Two different clusters (n, 2) for each of n images; of one cluster it twice."""
    first = torch.randint(n_clusters, (n,), generator=generator)
    further = torch.randint(1, max(n_clusters, 2), (n,), generator=generator)
    return torch.stack((first, (first + further) % n_clusters), dim=1)


def _measure(model: ClusterModel, images: ImageSet, term: Unconstrained) -> Callable[[SemiBatch], Mapping[str, Any]]:
    """How good the guesses of a batch are: the selected share, and their quality where labels are known."""

    def measure(batch: SemiBatch) -> Mapping[str, Any]:
        assert batch.free is not None
        with torch.no_grad(), frozen_statistics(model):
            guess = _guess(model(batch.free.weak), batch.flip, term)
        keep = term.select(guess)
        values: dict[str, Any] = {"selected": float(keep.float().mean())}
        if images.labels is not None:
            labels = images.labels[batch.free.rows.cpu().numpy()]
            quality = pseudo_quality(guess, keep, term.links(guess), labels)
            values |= {name: value for name, value in quality.items() if name != "selected_share"}
        return {name: value for name, value in values.items() if value is not None}

    return measure


def check_error_rate(name: str, value: float) -> None:
    """A share of wrong links that does not lie in [0, 0.5) is an InputError."""
    if not 0 <= value < 0.5:
        raise InputError(f"{name} is {value}; it must lie in [0, 0.5): links of which half are wrong say nothing")


def _check(constraints: Constraints, images: ImageSet, unconstrained: Unconstrained | None, title: str) -> None:
    if len(constraints) == 0:
        raise InputError(f"{title} needs constraints and there are none; sample or answer some pairs first")
    if not constraints.weight.any():
        raise InputError(f"{title}: every constraint has the weight 0; give some of them a weight above 0")
    if constraints.n_images != len(images):
        raise InputError(f"the constraints are over {constraints.n_images:,} images, the set has {len(images):,}")
    if unconstrained is not None:
        _check_term(unconstrained)


def _check_term(term: Unconstrained) -> None:
    if not 0 <= term.weight < math.inf:
        raise InputError(f"pseudo_weight is {term.weight}; it must be 0 or more")
    if not 0 <= term.warm_up <= 1:
        raise InputError(f"warm_up is {term.warm_up}; it is a share of the steps, in [0, 1]")
    check_share("flip_fraction", term.flip_fraction)
    if term.flip_between not in ("largest", "any"):
        raise InputError(f"unknown flip_between {term.flip_between!r}; known are largest, any")
