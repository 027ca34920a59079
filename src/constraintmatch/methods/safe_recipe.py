"""Training on pairs by one of two recipes. The safe one keeps its start unless held-out pairs favour another model.

It has three candidates, from the least trained to the most: the start; the start with a head that pairs have taught;
the network. If the head is better than the start, or the pairs are answers that know the kinds, the network learns to
repeat it on strong views; if not, it learns from the pairs. The paper's recipe trains and keeps the last weights.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.propagation import known_groups
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.judge import (
    CAUTION,
    LEAST,
    LEAST_GAIN,
    UNDECIDED,
    Guard,
    Judge,
    Rates,
    Verdict,
    describe_doubts,
    hide_images,
    pool,
    repeat_rate,
    trust_annotators,
)
from constraintmatch.evaluation.metrics import predict
from constraintmatch.methods.heads import REPEATED, calm_head, part_head
from constraintmatch.methods.pair_training import PairTask, begin, build_training, check_task
from constraintmatch.methods.preparation import Context, Trained, ViewChoice, find_neighbours, spread
from constraintmatch.methods.propagate import Frozen, answers_lead, are_few, choose_rows, teach_groups
from constraintmatch.methods.prototypes import Prototypes
from constraintmatch.methods.scan import reliable_labels, repeat_labels, repeats_well
from constraintmatch.models.cluster_model import ClusterModel, with_head
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.loop import TrainSettings, choose_device
from constraintmatch.training.ranks import agree
from constraintmatch.training.run_folder import read_log

NO_VERDICT = Verdict(0.0, 0.0)
Teacher = Callable[[bool], ClusterModel]  # of all pairs, or without those that are held out

RECIPES = ("safe", "paper")
SUREST = 0.85  # highest mean confidence at the first step: the gradients of a surer head ruin the features
AVERAGED = 0.1  # the share of the steps, at the end, whose weights are averaged
TAUGHT = 1.0  # standard errors by which the head alone must be better than the start
LEADING = -2.0  # the same where the answers lead: they are cross-checked, so refuse only a clearly worse head
KNOWN_EACH = 8  # known images for each cluster from which on answers train the network: few hold out few, and alike
ALIKE = 0.9  # one head may replace another if they agree on at least this share of the images
AS_MANY = 100  # the predictions of the start weigh as much as this many pairs
FOR_A_NETWORK = 12  # held-out images of either kind of link that it takes to judge one that pairs alone train
PARTS, SOME_PARTS = 5, 3  # of the images, hidden in turn to judge a head; fewer may do
LINKED = 2  # images with a must-link for each cluster: fewer say nothing of the kinds of prototypes
MOST = 20_000  # images that are divided among prototypes, and those of the pairs
RELIABLE, NEAR = 0.8, 20  # the share of each cluster that teaches the network: those whose neighbours agree most


def train_pairs(
    model: ClusterModel, images: ImageSet, task: PairTask, settings: TrainSettings, views: ViewChoice, context: Context
) -> Trained:
    """The model trained on the pairs by the recipe of the task; a task with bad values is an InputError."""
    if task.recipe not in RECIPES:
        raise InputError(f"unknown recipe {task.recipe!r}; known are {', '.join(RECIPES)}")
    check_task(task, model, images)
    if task.recipe == "paper":
        model = begin(model, images, task, settings, context)
        return Trained(model, build_training(model, images, task, settings, views, context)())
    start = begin(model, images, task, settings, replace(context, run=None))  # again if resumed: it is a candidate
    safe = _SafeTraining(start, images, task, settings, views, context)
    if (kept := safe.choose_before()) is not None:
        return kept
    if images.embedded or not safe.judge.can_judge(LEAST if safe.is_taught else FOR_A_NETWORK):
        return safe.choose_head()
    return safe.choose_after(safe.repeat_head() if safe.is_taught else safe.train_network())


class _SafeTraining:
    """One training by the safe recipe: its candidates, its pairs in two parts, and the judge."""

    def __init__(
        self,
        start: ClusterModel,
        images: ImageSet,
        task: PairTask,
        settings: TrainSettings,
        views: ViewChoice,
        context: Context,
    ) -> None:
        self.images, self.settings, self.views, self.context = images, settings, views, context
        self.device = choose_device(settings.device)
        self.start = start.to(self.device)
        self.pairs = task.constraints.merged()
        self.all_pairs = Judge(self.pairs)
        training, held_out = hide_images(self.pairs, seed=settings.seed)
        self.task, self.judge = replace(task, constraints=training), Judge(held_out)
        self.stated = None if context.stated is None else context.stated.merged()
        self.repeated, self._n_known = repeat_rate(task.constraints), sum(map(len, known_groups(self.pairs)))
        self._teach: Teacher = cache(self._teach_groups)
        self._teacher: Teacher = self._teach  # of `first`, and of `begun`
        self._judged = "no head"  # the best head, or the last one tried

    def choose_before(self) -> Trained | None:
        """What to keep without a training of the network; None if the network should be trained."""
        if self.all_pairs.contradicts(self._predict(self.start, self.all_pairs.rows)):
            why = "the pairs say the opposite of what the images show; are same and different mixed up?"
            return self._keep(self.start, "the start", why)
        pairs = self.task.constraints
        if not (self.all_pairs.can_judge() and (pairs.weight.any() or pairs.triplets.weight.any())):
            must, cannot = self.all_pairs.n_must_links, self.all_pairs.n_cannot_links
            there = f"{must:,} images have a must-link, {cannot:,} a cannot-link"
            why = f"{there}; to judge a training takes {LEAST} of each, so nothing more was trained"
            model = self._teach(False) if self.leads else self.informed
            return self._keep(model, self._name(model), why)
        if self.leads and (self.images.embedded or self._n_known < KNOWN_EACH * self.start.config.n_clusters):
            said = "do not place known images better" if self.begun is self.informed else "separate the kinds"
            return self._keep(self.begun, self._name(self.begun), f"the answers {said}")
        return None

    def choose_head(self) -> Trained:
        """What to keep of heads alone: one that all pairs teach or train, if it is better than the start."""
        if self.first is self.start:
            few = "" if self.images.embedded else ", and too few pairs are held out to judge a network"
            return self._keep(self.start, "the start", f"no head is surely better ({self._judged}){few}")
        return self._keep(self._refine(self.first), "the head alone", self._judged)

    def train_network(self) -> list[dict[str, Any]]:
        """Train the network on the pairs, and return the log."""
        around = self.weigh_annotators(), self.adapt_settings(), self.views, self.guard()
        return build_training(self.network, self.images, *around)()

    def choose_after(self, log: list[dict[str, Any]]) -> Trained:
        """What to keep after the training of the network, with its log."""
        begun, name = self.begun, self._name(self.begun)
        after = self._losses(self.network)
        verdict = self.judge.compare(self.network_losses, after)
        said = f"{verdict.gain:.3f} ± {verdict.error:.3f} nats, on {self.judge.count}"
        beginning = verdict if begun is self.start else self._compare(self.network)
        better = min(verdict.surely(CAUTION), beginning.surely(CAUTION)) > LEAST_GAIN
        step = int(next((entry["kept_step"] for entry in log if entry["kind"] == "kept"), log[-1]["step"]))
        if better or (begun is not self.start and self.is_taught and repeats_well(verdict, log, step)):
            why = f"better than {name} by {said}" if better else f"it repeats {name} on strong views ({said})"
            return self._keep(self.network, f"the network of step {step:,}", why, log, step)
        kept = begun if begun is self.start or self.leads else self._refine(begun)
        return self._keep(kept, self._name(kept), f"no step of the training was surely better ({said})", log)

    @cached_property
    def leads(self) -> bool:
        """Whether the pairs are answers that separate enough kinds to teach the head."""
        return answers_lead(self.pairs, self.start.config.n_clusters)

    @cached_property
    def first(self) -> ClusterModel:
        """The start, or the start with the better of the heads that the training pairs teach."""
        found, what = self.start, "pairs and triplets" if len(self.pairs.triplets) else "pairs"
        for teach, judge, caution in (
            (self._teach, self._judge_groups, TAUGHT),
            (self._teach_kinds, lambda: self._judged_kinds, CAUTION if self.stated is None else UNDECIDED),
        ):
            verdict, count = judge()
            said = f"{verdict.gain:.3f} ± {verdict.error:.3f} nats, on {count:,} held-out {what}"
            if verdict.is_enough(caution, count):
                taught = teach(True)
                if self.judge.compare(self._losses(found), self._losses(taught)).gain > 0 or found is self.start:
                    sure = "better" if verdict.surely(CAUTION) > LEAST_GAIN else "not surely worse"
                    found, self._teacher, self._judged = taught, teach, f"{sure} than the start by {said}"
            elif found is self.start and count:
                self._judged = said
        return found

    @cached_property
    def begun(self) -> ClusterModel:
        """The model that the network begins with: the first, or where answers lead the head that all of them teach.

        To hide a fifth of few known images costs up to twelve points: it only asks if answers do harm (decision 059).
        """
        if not self.leads:
            return self.first
        worse = self._compare(self._teach(True)).surely(LEADING) < 0
        refused = worse and 2 * self._n_known < len(self.images)  # most images known: they are right in any case
        if refused:
            self._teacher = self._inform
        return self.informed if refused else self._teach(False)

    def _judge_groups(self) -> tuple[Verdict, int]:
        """How much better than the start a head is that the groups of training pairs teach, and by how many pairs."""
        groups = known_groups(self.task.constraints)
        if are_few(groups, self.start.config.n_clusters) or self._are_doubtful():
            return NO_VERDICT, 0
        return self._compare(self._teach(True)), len(self.judge.pairs)

    @cached_property
    def _judged_kinds(self) -> tuple[Verdict, int]:
        """How much better pairs make the kinds of prototypes, and by how many pairs; `_kinds` becomes what to take.

        What the pairs change is judged apart from the prototypes, which may be steadier than the start, or coarser.
        A fifth of the pairs often cannot tell a gain from chance, so other images are hidden in turn (decision 054).
        Few answers cannot tell rounds apart: of what they state the last round is taken.
        """
        found, count, best = list[list[Verdict]](), 0, NO_VERDICT
        pairs, k = self._state(), self.start.config.n_clusters
        few = self.stated is None and self.all_pairs.n_must_links < LINKED * k and not len(pairs.triplets)
        for part in range(0 if few or not len(pairs) + len(pairs.triplets) else PARTS):
            training, hidden = hide_images(pairs, seed=self.settings.seed, part=part)
            judge = Judge(hidden)
            if not len(judge.rows):
                break
            at, count = np.searchsorted(self._prototypes.rows, judge.rows), count + len(hidden) + len(hidden.triplets)
            before, *after = [judge.losses(beliefs[at]) for beliefs in self._learn_kinds(training)]
            found.append([judge.compare(before, one) for one in after])
            pooled = [pool(some) for some in zip(*found, strict=True)]
            best = max(pooled, key=lambda one: one.surely(CAUTION)) if self.stated is None else pooled[-2]
            self._kinds = 1 + pooled.index(best)
            if part + 1 >= SOME_PARTS and best.surely(TAUGHT) > LEAST_GAIN and best.is_enough(CAUTION, count):
                break
        return best, count

    def _name(self, model: ClusterModel) -> str:
        return "the start" if model is self.start else "the head alone"

    def _are_doubtful(self) -> bool:
        """Whether most must-links look wrong to the start: then the groups that they join say nothing."""
        wrong = describe_doubts(self.pairs, self._doubts(self.start))["wrong_must_links"]
        return wrong is not None and wrong > 0.5

    def _refine(self, first: ClusterModel) -> ClusterModel:
        """A head that all pairs teach, if it predicts nearly the same as the judged one, which some of them taught.

        Of prototypes any head may replace it: most pairs have judged one in turn.
        """
        taught = self._teacher(False)
        if self._teacher == self._teach_kinds:
            return taught
        one, other = (self._frozen.probabilities(model).argmax(1) for model in (first, taught))
        return taught if agree(bool((one == other).mean() >= ALIKE)) else first

    @cached_property
    def is_taught(self) -> bool:
        """Whether the network learns to repeat its first head; embeddings have no strong views."""
        return not self.images.embedded and (self.leads or self.first is not self.start)

    @cached_property
    def network(self) -> ClusterModel:
        """The model that is trained."""
        return calm_head(copy.deepcopy(self.begun), self.images, SUREST)

    def repeat_head(self) -> list[dict[str, Any]]:
        """Train the network on the clusters that its head gives, and return the log (decision 052).

        Strong views of the images whose neighbours agree, and of the known ones, learn their clusters; pairs that are
        no answers to questions go on teaching it too.
        """
        context, seen = self.guard(), self._frozen.probabilities(self.begun)
        near = find_neighbours(self._frozen.features, NEAR, seen.shape[1], self.device)
        pairs = self.task.constraints
        kept = (known_groups(pairs), np.setdiff1d(self.judge.rows, Judge(pairs).rows)) if self.leads else ()
        labels = agree(reliable_labels(seen, near, RELIABLE, *kept))
        given = self.weigh_annotators(), self.adapt_settings(), self.views, context
        return repeat_labels(self.network, self.images, labels, *given, from_pairs=not self.leads)

    @cached_property
    def network_losses(self) -> NDArray[np.float64]:
        """The losses of the network before its training, or of a head of the answers that are not held out."""
        return self._losses(self._teacher(True) if self.leads and self.begun is not self.start else self.network)

    def guard(self) -> Context:
        """The context with the guard of the training."""
        net, rate = self.network, self.repeated  # the rate of wrong answers, by pairs that have two
        rates = Rates(rate, rate) if rate is not None else self.all_pairs.rates(self._predict(net, self.all_pairs.rows))
        beliefs = self._predict(net, np.arange(len(self.images)))
        n = max(len(self.task.constraints), len(self.task.constraints.triplets))
        return replace(
            self.context, guard=Guard(rates, self.judge, self.network_losses, beliefs, min(1.0, AS_MANY / n))
        )

    def weigh_annotators(self) -> PairTask:
        """The task with less weight on the pairs of annotators who are wrong more often than others."""
        return replace(self.task, constraints=self._weigh(self.task.constraints, self.network))

    def _weigh(self, pairs: Constraints, model: ClusterModel) -> Constraints:
        """The pairs with less weight on those of annotators whom the model finds wrong more often than others."""
        if pairs.annotator is None or len(set(pairs.annotator)) < 2 or self.task.error_rate:
            return pairs
        judge = Judge(pairs)
        return replace(pairs, weight=trust_annotators(pairs, judge.doubts(self._predict(model, judge.rows))))

    def adapt_settings(self) -> TrainSettings:
        """Steps of bounded length, and an average of the last weights: then a few wrong pairs change little."""
        asked, average = self.settings, max(1.0, AVERAGED * self.settings.steps)
        decay = asked.ema if asked.ema is not None or average <= 1 else 1 - 1 / average
        return replace(asked, clip_norm=asked.clip_norm or 1.0, ema=decay)

    @cached_property
    def _frozen(self) -> Frozen:
        return Frozen.of(self.start, self.images, device=self.device)

    def _teach_groups(self, hiding: bool) -> ClusterModel:
        """The start with a head that repeats the groups of all pairs, or of those that are not held out."""
        groups = known_groups(self.task.constraints if hiding else self.pairs)
        if len(groups) < 2:  # those that are not held out may separate fewer kinds than all
            return self.start
        informed = None if not self.leads else self._inform(True) if hiding else self.informed
        return teach_groups(self.start, self._frozen, groups, informed=informed).to(self.device)

    @cached_property
    def informed(self) -> ClusterModel:
        """The start that knows what all answers state."""
        return self._inform(False)

    def _inform(self, hiding: bool) -> ClusterModel:
        """The start, or the same with the kinds that answers state, unless hidden ones refuse them or are too few."""
        verdict, count = self._judged_kinds if self.stated is not None else (NO_VERDICT, 0)
        return self._teach_kinds(hiding) if verdict.is_enough(UNDECIDED, count) else self.start

    def _teach_kinds(self, hiding: bool) -> ClusterModel:
        """The same of what the pairs say of the kinds of prototypes."""
        pairs = self._state(hiding)
        rows, some = self._prototypes.rows, spread(len(self._prototypes.rows), REPEATED)
        clusters = self._learn_kinds(pairs)[self._kinds].argmax(1)
        head = part_head(self._frozen.features[rows[some]], clusters[some], self.start.config.n_clusters)
        return self.start if head is None else with_head(self.start, *head).to(self.device)

    def _state(self, hiding: bool = False) -> Constraints:
        """What the answers state, of which the pairs are the closure, or the pairs; `hiding` what is held out."""
        given = self.task.constraints if hiding else self.pairs
        if self.stated is None:
            return given
        hidden = np.setdiff1d(self.judge.rows, Judge(given).rows)
        ends = np.stack([self.stated.left, self.stated.right])
        return replace(self.stated.take(~np.isin(ends, hidden).any(0)), triplets=given.triplets)

    def _learn_kinds(self, pairs: Constraints) -> list[NDArray[np.float32]]:
        return agree(self._prototypes.learn(self._weigh(pairs, self.start)))

    @cached_property
    def _prototypes(self) -> Prototypes:
        rows = choose_rows([Judge(self._state()).rows], len(self.images), MOST)
        seed = derive_seed(self.settings.seed, "prototypes")
        beliefs = self._frozen.probabilities(self.start)[rows]
        return Prototypes.of(self._frozen.features[rows], rows, beliefs, seed=seed)

    def _predict(self, model: ClusterModel, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """What the model says of some images; with several ranks what rank 0 finds, so that all keep the same."""
        return agree(predict(model, self.images.take(rows), device=self.device).probabilities)

    def _losses(self, model: ClusterModel) -> NDArray[np.float64]:
        return self.judge.losses(self._predict(model, self.judge.rows))

    def _compare(self, model: ClusterModel) -> Verdict:
        """How much better than the start a model is on held-out pairs."""
        return self.judge.compare(self._losses(self.start), self._losses(model))

    def _is_behind(self, model: ClusterModel, before: ClusterModel) -> bool:
        """Whether what the answers state is likelier by the model of the round before."""
        judge = Judge(self._state())
        if before.config.n_clusters != model.config.n_clusters or not len(judge.rows):
            return False
        losses = (judge.losses(self._predict(one, judge.rows)) for one in (model, before))
        return judge.compare(*losses).gain > LEAST_GAIN

    def _doubts(self, model: ClusterModel) -> NDArray[np.float64]:
        return self.all_pairs.doubts(self._predict(model, self.all_pairs.rows))

    def _keep(
        self, model: ClusterModel, what: str, why: str, log: Sequence[dict[str, Any]] = (), step: int = 0
    ) -> Trained:
        """The model, and the log with the verdict, which also goes to the run folder and the reporter.

        A head is not kept where the answers favour the model of the round before, if there is one (decision 055).
        """
        before = self.context.before
        if before is not None and not step and self._is_behind(model, before):
            model, what = copy.deepcopy(before).to(self.device), "the model of the round before"
        entry = {
            "step": log[-1]["step"] if log else 0,
            "kind": "verdict",
            "kept": what,
            "kept_step": step,
            "why": why,
            **describe_doubts(self.pairs, self._doubts(model)),
            "seconds": log[-1]["seconds"] if log else 0.0,
        }
        self.context.reporter.say(f"kept {what}: {why}")
        run = self.context.run
        if run is not None and not any(line["kind"] == "verdict" for line in read_log(run.path)):  # resumed at its end
            run.log(entry)
        return Trained(model, [*log, entry])
