"""The safe recipe: a training on pairs that keeps what it began with unless held-out pairs say that it is better.

Candidates, from the least trained to the most: the start as it is, its head told by groups of known images, the network
at every evaluation. The paper's recipe trains and keeps the last weights.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.propagation import known_groups
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.judge import LEAST, LEAST_GAIN, Guard, Judge, Rates, hide_images, repeat_rate
from constraintmatch.evaluation.metrics import embed, predict
from constraintmatch.methods.parts.pair_training import (
    Before,
    PairTask,
    Unconstrained,
    begin,
    checked_task,
    train_on_pairs,
    train_task,
)
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice, spread
from constraintmatch.methods.propagate import Frozen, told
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.loop import TrainSettings, choose_device
from constraintmatch.training.run_folder import read_log

__all__ = ["RECIPES", "calm_head", "train_by_recipe"]

RECIPES = ("safe", "paper")
SUREST = 0.85  # mean confidence of a network that begins to learn: a surer head sends gradients that ruin its features
AVERAGED = 0.1  # share of the steps, the last ones, whose weights are averaged
KNOWN = 0.5  # share of the kinds that answers know apart, from which on they teach the head by themselves
IMPLIED = 0.5  # share of the must-links that groups imply, from which on pairs count as answers to questions
TOLD = 1.0  # standard errors by which a head told by groups must be better than the start,
LEADING = -2.0  # and where they know that many kinds: only a head that is clearly worse is refused, few images judge it
ALIKE = 0.9  # share of the images that two heads must agree on for one to stand for the other
AS_MANY = 100  # pairs that what the start believes weighs as much as
DOUBTED = 12  # pairs that somebody is asked to look at again
FEW_ANSWERS = 30  # pairs of an annotator from which on a rate of their own is estimated


def train_by_recipe(
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints,
    *,
    recipe: str,
    title: str,
    unconstrained: Unconstrained | None,
    error_rate: float,
    pairs_per_step: int,
    before: Before,
    settings: TrainSettings,
    views: ViewChoice,
    context: Context,
) -> Trained:
    """The model trained as the paper does it, or safely."""
    if recipe not in RECIPES:
        raise InputError(f"unknown recipe {recipe!r}; known are {', '.join(RECIPES)}")
    task = checked_task(
        model,
        images,
        constraints,
        title=title,
        unconstrained=unconstrained,
        error_rate=error_rate,
        pairs_per_step=pairs_per_step,
    )
    if recipe == "paper":
        return train_on_pairs(model, images, task, before=before, settings=settings, views=views, context=context)
    start = begin(model, images, task, before, settings, replace(context, run=None))  # anew when resumed: it is judged
    return _Careful(images, task, settings, views, context).train(start)


class _Careful:
    """One training by the safe recipe: its pairs in two parts, and who judges."""

    def __init__(
        self, images: ImageSet, task: PairTask, settings: TrainSettings, views: ViewChoice, context: Context
    ) -> None:
        self.images, self.settings, self.views, self.context = images, settings, views, context
        self.device = choose_device(settings.device)
        self.pairs = task.constraints.merged()
        training, held_out = hide_images(self.pairs, seed=settings.seed)
        self.task, self.judge = replace(task, constraints=training), Judge(held_out)
        self.repeated = repeat_rate(task.constraints)

    def train(self, start: ClusterModel) -> Trained:
        """The best candidate, and the log, whose last entry is the verdict."""
        start = start.to(self.device)
        if (reason := self._reason_to_leave(start)) is not None:
            return self._kept(start, "the start", reason, [], 0)
        leads = self._leads(start)
        if (reason := self._reason_not_to_train()) is not None:
            kept, what = (self._told(start, self.pairs), "the head alone") if leads else (start, "the start")
            return self._kept(kept, what, reason, [], 0)
        first, begun = self._begun(start, leads)
        if leads and first is not start and self.images.embedded:
            return self._kept(self._refined(start, first), begun, "the answers know the kinds apart", [], 0)
        network = calm_head(copy.deepcopy(first), self.images)
        losses = self._losses(network)
        rates = self._rates(network)
        beliefs = self._say(network, np.arange(len(self.images)))
        hold = min(1.0, AS_MANY / len(self.task.constraints))
        context = replace(self.context, guard=Guard(rates, self.judge, losses, beliefs, hold))
        task = self._weighed(network)
        log = train_task(network, self.images, task, self._settings(), self.views, context)
        verdict = self.judge.compare(losses, self._losses(network))
        said = f"{verdict.gain:.3f} ± {verdict.error:.3f} nats, on {len(self.judge.pairs):,} held-out pairs"
        beginning = verdict if first is start else self.judge.compare(self._losses(start), self._losses(network))
        if min(verdict.surely, beginning.surely) > LEAST_GAIN:
            step = next((entry["kept_step"] for entry in log if entry["kind"] == "kept"), log[-1]["step"])
            return self._kept(network, f"the network of step {step:,}", f"better than {begun} by {said}", log, step)
        kept = first if first is start else self._refined(start, first)
        return self._kept(kept, begun, f"no step of the training was surely better ({said})", log, 0)

    def _reason_to_leave(self, start: ClusterModel) -> str | None:
        """Why the pairs say nothing that could be used; None if they do."""
        everything = Judge(self.pairs)
        same = everything.same(self._say(start, everything.rows))
        must, cannot = same[self.pairs.link > 0.5], same[self.pairs.link < 0.5]
        if min(len(must), len(cannot)) < LEAST:
            return None
        apart = must.mean() - cannot.mean()
        if apart < -2 * np.sqrt(must.var() / len(must) + cannot.var() / len(cannot)):
            return "the pairs say the opposite of what the images show; are same and different mixed up?"
        return None

    def _reason_not_to_train(self) -> str | None:
        """Why no training could be judged; None if it could."""
        if self.judge.can_judge and self.task.constraints.weight.any():
            return None
        kinds = f"{self.judge.n_must_links:,} images with a must-link, {self.judge.n_cannot_links:,} with a cannot-link"
        return f"held out are {kinds}; to judge a training takes {LEAST} of each, so nothing more was trained"

    def _leads(self, start: ClusterModel) -> bool:
        """Whether the pairs are answers that know most kinds: the head that they teach is then the better beginning.

        Answers to questions come with all that they imply. Pairs at random do not, and teach a head less.
        """
        groups = known_groups(self.pairs)
        if len(groups) < max(2, KNOWN * start.config.n_clusters):
            return False
        inside = np.isin(self.pairs.left, np.concatenate(groups)) & (self.pairs.link > 0.5)
        return bool(inside.sum() >= IMPLIED * sum(len(rows) * (len(rows) - 1) // 2 for rows in groups))

    def _begun(self, start: ClusterModel, leads: bool) -> tuple[ClusterModel, str]:
        """What the network's training begins with, and its name: the start, or its head told what groups say."""
        if len(known_groups(self.task.constraints)) < 2 or (not leads and self._are_doubtful(start)):
            return start, "the start"
        taught = self._told(start, self.task.constraints)
        verdict = self.judge.compare(self._losses(start), self._losses(taught))
        better = verdict.gain > (LEADING if leads else TOLD) * verdict.error
        return (taught, "the head alone") if better else (start, "the start")

    def _are_doubtful(self, start: ClusterModel) -> bool:
        """Whether most must-links look wrong to the start: groups that they join say nothing then."""
        everything = Judge(self.pairs)
        wrong = _share(everything.doubts(self._say(start, everything.rows)), self.pairs.link > 0.5)
        return wrong is not None and wrong > 0.5

    def _told(self, start: ClusterModel, pairs: Constraints) -> ClusterModel:
        return told(start, self._frozen(start), known_groups(pairs)).to(self.device)

    def _refined(self, start: ClusterModel, first: ClusterModel) -> ClusterModel:
        """The head told by all pairs, if it says nearly the same as the judged one, which was told by some of them."""
        told_all = self._told(start, self.pairs)
        if self._leads(start):
            return told_all
        one, other = (self._frozen(start).probabilities(model).argmax(1) for model in (first, told_all))
        return told_all if (one == other).mean() >= ALIKE else first

    def _frozen(self, start: ClusterModel) -> Frozen:
        if not hasattr(self, "_seen"):
            self._seen = Frozen.of(start, self.images, device=self.device)
        return self._seen

    def _say(self, model: ClusterModel, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return predict(model, self.images.take(rows), device=self.device).probabilities

    def _losses(self, model: ClusterModel) -> NDArray[np.float64]:
        return self.judge.losses(self._say(model, self.judge.rows))

    def _rates(self, model: ClusterModel) -> Rates:
        """How often answers are wrong: by pairs that were asked twice, else by what the model says of all pairs."""
        if self.repeated is not None:
            return Rates(self.repeated, self.repeated)
        everything = Judge(self.pairs)
        return everything.rates(self._say(model, everything.rows))

    def _weighed(self, model: ClusterModel) -> PairTask:
        """The task with less weight on the pairs of annotators who err more often than others."""
        pairs = self.task.constraints
        if pairs.annotator is None or len(set(pairs.annotator)) < 2 or self.task.error_rate:
            return self.task
        of = Judge(pairs)
        wrong = of.doubts(self._say(model, of.rows))
        who, number = np.unique(np.array(pairs.annotator), return_inverse=True)
        count = np.bincount(number, minlength=len(who))
        rate = np.where(count >= FEW_ANSWERS, np.bincount(number, wrong) / np.maximum(count, 1), wrong.mean())
        trust = np.maximum(1 - 2 * rate, 0.05) ** 2
        weight = (pairs.weight * trust[number] / trust.max()).astype(np.float32)
        return replace(self.task, constraints=replace(pairs, weight=weight))

    def _settings(self) -> TrainSettings:
        """Steps of bounded length, and an average of the last weights: a few wrong pairs then move little."""
        asked, average = self.settings, max(1.0, AVERAGED * self.settings.steps)
        decay = asked.ema if asked.ema is not None or average <= 1 else 1 - 1 / average
        return replace(asked, clip_norm=asked.clip_norm or 1.0, ema=decay)

    def _kept(self, model: ClusterModel, what: str, why: str, log: list[dict[str, Any]], step: int) -> Trained:
        """The model and the log with the verdict, which also goes to the run folder and to whoever watches."""
        everything = Judge(self.pairs)
        wrong = everything.doubts(self._say(model, everything.rows))
        order = np.argsort(-wrong, kind="stable")[:DOUBTED]
        entry = {
            "step": log[-1]["step"] if log else 0,
            "kind": "verdict",
            "kept": what,
            "kept_step": step,
            "why": why,
            "wrong_must_links": _share(wrong, self.pairs.link > 0.5),
            "wrong_cannot_links": _share(wrong, self.pairs.link < 0.5),
            "doubtful": [
                {
                    "left": int(self.pairs.left[at]),
                    "right": int(self.pairs.right[at]),
                    "link": float(self.pairs.link[at]),
                }
                for at in order.tolist()
                if wrong[at] > 0.5
            ],
            "seconds": log[-1]["seconds"] if log else 0.0,
        }
        self.context.reporter.say(f"kept {what}: {why}")
        run = self.context.run
        if run is not None and not any(line["kind"] == "verdict" for line in read_log(run.path)):  # resumed at its end
            run.log(entry)
        return Trained(model, [*log, entry])


def calm_head(model: ClusterModel, images: ImageSet) -> ClusterModel:
    """The model with its head made less sure, in place, if it is surer on the mean than a training can begin with."""
    assert model.head is not None
    seen = torch.from_numpy(embed(model, images.take(spread(len(images), 2_000)))).to(model.device)
    with torch.no_grad():
        logs = model.classify(seen)
    factor = 1.0
    while float((factor * logs).softmax(-1).amax(-1).mean()) > SUREST and factor > 1e-3:
        factor *= 0.95
    with torch.no_grad():
        model.head.weight.mul_(factor)
        model.head.bias.mul_(factor)
    return model


def _share(wrong: NDArray[np.float64], kind: NDArray[np.bool_]) -> float | None:
    return float(wrong[kind].mean()) if kind.any() else None
