"""The safe recipe: what was there is kept, bit for bit, unless held-out pairs say that the training is better."""

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.propagation import known_groups
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.judge import Judge, Verdict, hide_images
from constraintmatch.evaluation.metrics import predict, scores
from constraintmatch.methods import METHODS, Context, Trained, ViewChoice, prototypes, safe_recipe
from constraintmatch.methods.heads import calm_head
from constraintmatch.methods.pair_training import PairTask
from constraintmatch.methods.propagate import Frozen, teach_groups
from constraintmatch.methods.safe_recipe import PARTS, SUREST, TAUGHT
from constraintmatch.methods.scan import repeats_well
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_head
from constraintmatch.training.loop import TrainSettings
from constraintmatch.training.run_folder import open_run, read_log

N, K = 240, 4
LABELS = np.arange(N) % K
SCAN = sys.modules["constraintmatch.methods.scan"]  # the package has a function of this name
SETTINGS = TrainSettings(steps=30, lr=0.05, device="cpu", log_every=30, evaluate_every=10)
SHORT = replace(SETTINGS, steps=12, evaluate_every=6)
RIGHT = Constraints.sample(LABELS, 300, seed=0)


@pytest.fixture(scope="module", autouse=True)
def one_division() -> Iterator[None]:
    """The images are divided into prototypes once: what several divisions say is tested with the prototypes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prototypes, "DIVISIONS", 1)
        yield


@pytest.fixture(scope="module")
def blobs() -> ImageSet:
    """240 embeddings of four kinds that lie well apart."""
    rng = np.random.default_rng(0)
    numbers = 4 * np.eye(K, 8)[LABELS] + rng.normal(size=(N, 8))
    return ImageSet.from_arrays(numbers.astype(np.float32), labels=LABELS)


def start(images: ImageSet, *, wrong: float = 0.3, sure: float = 3.0, seed: int = 0) -> ClusterModel:
    """A head that points at the kinds, turned away from them by so much noise."""
    mean, std = images.moments()
    model = build_model(n_clusters=K, side=1, channels=8, mean=mean, std=std)
    noise = torch.randn(K, 8, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.head.weight.copy_(sure * torch.eye(K, 8) + wrong * noise)
        model.head.bias.zero_()
    return model


def train(
    model: ClusterModel, images: ImageSet, pairs: Constraints, method: str = "constrained", **more: Any
) -> Trained:
    batch = {"pairs_per_step": 50, **({} if method == "constrained" else {"images_per_step": 40})}
    return METHODS[method](
        copy.deepcopy(model), images, pairs, **{"recipe": "safe", "settings": SETTINGS, **batch, **more}
    )


def acc(model: ClusterModel, images: ImageSet) -> float:
    return scores(LABELS, predict(model, images))["acc"]


def assert_unchanged(trained: ClusterModel, begun: ClusterModel) -> None:
    before, after = begun.state_dict(), trained.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


# Pairs that cannot teach


@pytest.mark.parametrize("method", ["constrained", "pseudo_label", "constraintmatch"])
@pytest.mark.parametrize("link", [0, 1])
def test_pairs_of_one_kind_leave_the_start_as_it_was(blobs: ImageSet, method: str, link: int) -> None:
    begun = start(blobs)
    found, log = train(begun, blobs, RIGHT.take(RIGHT.link == link), method)
    assert_unchanged(found, begun)
    assert (log[-1]["kind"], log[-1]["kept"], log[-1]["kept_step"]) == ("verdict", "the start", 0)
    assert "to judge a training" in log[-1]["why"]


def test_pairs_that_are_all_wrong_leave_the_start_and_it_is_said(blobs: ImageSet) -> None:
    begun = start(blobs)
    found, log = train(begun, blobs, RIGHT.flip(1.0, seed=0))
    assert_unchanged(found, begun)
    assert log[-1]["why"].startswith("the pairs say the opposite of what the images show")


@pytest.mark.parametrize("link", [[1.0] * 100, [0.0] * 100, [0.0, 1.0] * 50])
def test_one_pair_answered_a_hundred_times_is_one_pair(blobs: ImageSet, link: list[float]) -> None:
    begun = start(blobs)
    found, log = train(begun, blobs, Constraints.from_arrays([0] * 100, [1] * 100, link, n_images=N))
    assert_unchanged(found, begun)
    assert "to judge a training" in log[-1]["why"]


def test_annotators_who_contradict_each_other_throughout_do_no_harm(blobs: ImageSet) -> None:
    ends = (np.tile(side, 2) for side in (RIGHT.left, RIGHT.right))
    link, who = np.concatenate([RIGHT.link, 1 - RIGHT.link]), ["one"] * len(RIGHT) + ["other"] * len(RIGHT)
    begun = start(blobs)
    found, log = train(begun, blobs, Constraints.from_arrays(*ends, link, n_images=N, annotator=who))
    assert_unchanged(found, begun)
    assert "no head is surely better" in log[-1]["why"]


def test_answers_at_random_do_no_harm(blobs: ImageSet) -> None:
    begun = start(blobs)
    assert acc(train(begun, blobs, RIGHT.flip(0.5, seed=1)).model, blobs) >= acc(begun, blobs) - 0.01


def test_the_model_of_the_round_before_stays_where_the_pairs_favour_it(blobs: ImageSet) -> None:
    begun, better, few = start(blobs, wrong=1.0), start(blobs), RIGHT.take(np.arange(20))
    found, log = train(begun, blobs, few, context=Context(before=better))
    assert_unchanged(found, better)
    assert log[-1]["kept"] == "the model of the round before"
    wide = with_head(better, torch.cat([head := better.head.weight.detach(), head[:1]]), torch.zeros(K + 1))
    for other in (start(blobs, wrong=3.0), copy.deepcopy(begun), wide):  # worse, the same, with more clusters
        assert_unchanged(train(begun, blobs, few, context=Context(before=other)).model, begun)


# Trainings that ruin


@pytest.mark.parametrize("method", ["constrained", "constraintmatch"])
def test_a_training_that_would_ruin_the_start_keeps_it(
    pictures: ImageSet, fresh: ClusterModel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_recipe._SafeTraining, "first", property(lambda self: self.start))
    ruinous = replace(SETTINGS, lr=1e3)
    found, log = train(fresh, pictures, RIGHT, method, settings=ruinous, views=UPRIGHT)
    assert_unchanged(found, fresh)
    assert log[-1]["kept"] == "the start"
    assert {entry["back_to"] for entry in log if entry["kind"] == "back"} == {0}


def test_only_what_held_out_pairs_were_asked_about_is_kept(blobs: ImageSet) -> None:
    """Of this start the head told by the training pairs is better, the one told by all of them far worse."""
    begun = start(blobs, wrong=1.0)
    found, log = train(begun, blobs, RIGHT, "constraintmatch")
    assert log[-1]["kept"] == "the head alone"
    _, held_out = hide_images(RIGHT)
    judge = Judge(held_out)
    before, after = (judge.losses(predict(model, blobs).probabilities[judge.rows]) for model in (begun, found))
    assert judge.compare(before, after).surely(TAUGHT) > 0
    assert acc(found, blobs) > acc(begun, blobs)


# Trainings that teach


@pytest.mark.parametrize(("wrong", "seed"), [(2.0, 1), (3.0, 0)])
def test_enough_right_pairs_mend_a_bad_start(blobs: ImageSet, wrong: float, seed: int) -> None:
    begun = start(blobs, wrong=wrong, seed=seed)
    before = {name: value.clone() for name, value in begun.state_dict().items()}
    found, log = train(begun, blobs, RIGHT)
    assert acc(found, blobs) > acc(begun, blobs) + 0.2
    assert acc(found, blobs) > 0.95
    verdict = log[-1]
    assert verdict["kept"] == "the head alone"
    assert "better than the start by" in verdict["why"]
    assert all(torch.equal(value, before[name]) for name, value in begun.state_dict().items())


def spy_on(monkeypatch: pytest.MonkeyPatch) -> list[set[tuple[int, int]]]:
    """The pairs that prototypes learn from, one set after the other."""
    seen: list[set[tuple[int, int]]] = []
    learn = safe_recipe.Prototypes.learn

    def spy(self: Any, pairs: Constraints) -> Any:
        seen.append(set(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True)))
        return learn(self, pairs)

    monkeypatch.setattr(safe_recipe.Prototypes, "learn", spy)
    monkeypatch.setattr(safe_recipe._SafeTraining, "_judge_groups", lambda _: (safe_recipe.NO_VERDICT, 0))
    return seen


def test_other_images_judge_a_head_until_it_is_clear_and_all_pairs_teach_the_kept_one(
    blobs: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, begun, pairs = spy_on(monkeypatch), start(blobs), RIGHT.merged()
    everything = set(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True))
    monkeypatch.setattr(safe_recipe, "TAUGHT", 100.0)
    monkeypatch.setattr(safe_recipe, "CAUTION", 100.0)
    assert train(begun, blobs, RIGHT).log[-1]["kept"] == "the start"
    assert len(seen) == PARTS
    hidden = [everything - part for part in seen]
    assert all(20 < len(held) < len(everything) / 3 for held in hidden)
    assert not set.intersection(*hidden)
    assert len(set.union(*hidden)) > 0.6 * len(everything)
    ends = [{image for pair in part for image in pair} for part in seen]
    assert not any({one, other} <= used for held, used in zip(hidden, ends, strict=True) for one, other in held)

    seen.clear()
    monkeypatch.setattr(safe_recipe, "TAUGHT", -100.0)
    monkeypatch.setattr(safe_recipe, "CAUTION", -100.0)
    log = train(begun, blobs, RIGHT).log
    judged, (taught, again) = seen[:-2], seen[-2:]  # those that are not held out teach the head, and then all
    assert 1 <= len(judged) < PARTS
    assert judged[0] == taught != again == everything
    assert log[-1]["kept"] == "the head alone"


def test_the_safe_recipe_tells_whoever_watches_and_the_run_folder(blobs: ImageSet, tmp_path: Any) -> None:
    said: list[str] = []

    class Ears(Reporter):
        def say(self, text: str) -> None:
            said.append(text)

    with open_run(tmp_path, {}) as run:
        log = train(start(blobs), blobs, RIGHT.flip(1.0, seed=0), context=Context(run=run, reporter=Ears())).log
    assert read_log(tmp_path)[-1] == log[-1]
    assert said == [f"kept the start: {log[-1]['why']}"]


# What looks wrong


def test_pairs_that_look_wrong_are_the_planted_ones(blobs: ImageSet) -> None:
    pairs = RIGHT.merged()
    wrong = np.array([3, 50, 101, 200, 222])
    link = pairs.link.copy()
    link[wrong] = 1 - link[wrong]
    verdict = train(start(blobs, sure=5.0, wrong=0.0), blobs, replace(pairs, link=link)).log[-1]
    planted = {(int(pairs.left[at]), int(pairs.right[at]), float(link[at])) for at in wrong}
    found = [tuple(pair.values()) for pair in verdict["doubtful"]]
    assert set(found[: len(wrong)]) == planted
    share = {kind: np.isin(np.flatnonzero(link == kind), wrong).mean() for kind in (0, 1)}
    assert verdict["wrong_must_links"] == pytest.approx(share[1], abs=0.03)
    assert verdict["wrong_cannot_links"] == pytest.approx(share[0], abs=0.03)


def test_right_pairs_do_not_look_wrong(blobs: ImageSet) -> None:
    assert train(start(blobs), blobs, RIGHT).log[-1]["doubtful"] == []


# The head that begins to learn


def test_a_calmed_head_has_the_same_clusters_and_is_less_sure(blobs: ImageSet) -> None:
    begun = start(blobs, sure=8.0, wrong=0.0)
    calm = calm_head(copy.deepcopy(begun), blobs, SUREST)
    before, after = predict(begun, blobs), predict(calm, blobs)
    assert before.confidence.mean() > 0.99
    assert 0.8 < after.confidence.mean() <= 0.85
    np.testing.assert_array_equal(after.clusters, before.clusters)


def test_a_head_that_is_unsure_stays_as_it_is(blobs: ImageSet) -> None:
    unsure = start(blobs, sure=0.2, wrong=0.0)
    assert predict(unsure, blobs).confidence.mean() < 0.85
    assert_unchanged(calm_head(copy.deepcopy(unsure), blobs, SUREST), unsure)


def test_an_unknown_recipe_is_refused(blobs: ImageSet) -> None:
    with pytest.raises(InputError, match="unknown recipe 'brave'; known are safe, paper"):
        train(start(blobs), blobs, RIGHT, recipe="brave")


# Pairs of embeddings


def test_pairs_at_random_teach_a_head_through_prototypes(blobs: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, begun, many = spy_on(monkeypatch), start(blobs, wrong=3.0), Constraints.sample(blobs.labels, 600, seed=3)
    found, log = train(begun, blobs, many.flip(0.1, seed=0))
    assert log[-1]["kept"] == "the head alone"
    assert acc(found, blobs) > acc(begun, blobs) + 0.2
    assert len(seen) > 2


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_pairs_that_somebody_chose_teach_the_kinds_too(blobs: ImageSet, seed: int) -> None:
    """Links between images that look alike, and none between images that do not."""
    begun, everything = start(blobs, wrong=1.0, seed=seed), Constraints.sample(blobs.labels, 4_000, seed=seed)
    p = predict(begun, blobs).probabilities
    order = np.argsort(-(p[everything.left] * p[everything.right]).sum(1))
    chosen = everything.take(np.concatenate([order[everything.link[order] == link][:150] for link in (0, 1)]))
    assert acc(train(begun, blobs, chosen).model, blobs) > acc(begun, blobs) + 0.05


def test_answers_lead_however_many_pairs_they_imply(blobs: ImageSet) -> None:
    """All that 120 known images imply, and an even draw of a third of it; pairs at random do not lead."""
    known = np.arange(120)
    left, right = (known[side] for side in np.triu_indices(120, 1))
    closure = Constraints.from_arrays(left, right, (LABELS[left] == LABELS[right]).astype(np.float32), n_images=N)
    some = closure.take(np.random.default_rng(0).permutation(len(closure))[: len(closure) // 3])
    for pairs in (closure, some):
        assert train(start(blobs), blobs, pairs).log[-1]["why"].startswith("the answers")
    assert not train(start(blobs), blobs, RIGHT).log[-1]["why"].startswith("the answers")


def test_answers_teach_kinds_unless_hidden_ones_refuse_them_or_are_too_few_to_say(
    blobs: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundredth nat for each pair is nothing for ten pairs; four hundred pairs may be in doubt, not against it."""
    begun, said = start(blobs, wrong=1.0), RIGHT.take(np.arange(20))
    cases = ((0.01, 10, "the start"), (0.01, 400, "the head alone"), (-0.01, 400, "the head alone"))
    for gain, count, kept in (*cases, (-0.03, 400, "the start")):
        monkeypatch.setattr(safe_recipe._SafeTraining, "_judged_kinds", (Verdict(gain, 0.02), count))
        monkeypatch.setattr(safe_recipe._SafeTraining, "_kinds", 1, raising=False)
        assert train(begun, blobs, said, context=Context(stated=said)).log[-1]["kept"] == kept


def test_groups_of_too_few_kinds_teach_no_head(blobs: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """All links among images of two kinds in four: where more kinds are asked for, they are no groups to teach."""
    known = np.flatnonzero(LABELS < 2)[:40]
    left, right = (known[side] for side in np.triu_indices(40, 1))
    said = Constraints.from_arrays(left, right, (LABELS[left] == LABELS[right]).astype(np.float32), n_images=N)
    taught: list[int] = []
    monkeypatch.setattr(safe_recipe, "teach_groups", lambda model, *_, **__: (taught.append(1), model)[1])
    for share, times in ((0.5, True), (0.75, False)):
        monkeypatch.setattr(sys.modules["constraintmatch.methods.propagate"], "KNOWN", share)
        taught.clear()
        train(start(blobs, wrong=1.0), blobs, said)
        assert bool(taught) is times


# The network repeats a taught head


UPRIGHT = ViewChoice(flip=False)  # the kinds differ by their corners


@pytest.fixture(scope="module")
def pictures() -> ImageSet:
    """The same kinds as grey images of 8 × 8: a bright spot in one corner, and noise."""
    spots = np.random.default_rng(1).integers(0, 60, (N, 8, 8, 1))
    for at, label in enumerate(LABELS):
        spots[at, 4 * (label // 2) : 4 * (label // 2) + 3, 4 * (label % 2) : 4 * (label % 2) + 3] += 150
    return ImageSet.from_arrays(spots.astype(np.uint8), labels=LABELS)


@pytest.fixture(scope="module")
def fresh(pictures: ImageSet, narrow_networks: None) -> ClusterModel:  # noqa: ARG001
    """A network that has learned nothing but the statistics of the pictures, as its norms keep them."""
    model = build_model(n_clusters=K, side=8, channels=1, seed=3).train()
    pixels = torch.from_numpy(pictures.images.copy()).permute(0, 3, 1, 2)
    with torch.no_grad():
        for _ in range(40):
            model(pixels)
    return model.eval()


def known_images(n: int) -> Constraints:
    """All that answers about the first n images imply."""
    left, right = np.triu_indices(n, 1)
    return Constraints.from_arrays(left, right, (LABELS[left] == LABELS[right]).astype(np.float32), n_images=N)


def test_the_network_repeats_a_head_that_answers_have_taught(
    pictures: ImageSet, fresh: ClusterModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers alone give the labels; pairs at random stay beside them in every step."""
    terms: list[set[str]] = []
    fit = SCAN.fit

    def spy(model: Any, next_batch: Any, loss: Any, *rest: Any) -> Any:
        terms.append(set(loss(model, next_batch(0))))
        if len(terms) > 1:
            raise StopIteration  # the rest is known
        return fit(model, next_batch, loss, *rest)

    monkeypatch.setattr(SCAN, "fit", spy)
    before = acc(fresh, pictures)
    monkeypatch.setattr(safe_recipe, "LEAST_GAIN", -1.0)  # the head is right everywhere: the network gains nothing
    with monkeypatch.context() as only:
        only.setattr(safe_recipe, "build_training", None)  # it would be called
        found, log = train(fresh, pictures, known_images(60), "constraintmatch", views=UPRIGHT, settings=SHORT)
    assert terms == [{"taught", "rest"}]
    assert log[-1]["kept"].startswith("the network of step")
    assert acc(found, pictures) > before + 0.2
    pairs = Constraints.sample(LABELS, 600, seed=3)
    with pytest.raises(StopIteration):
        train(fresh, pictures, pairs, "constraintmatch", views=UPRIGHT, settings=SHORT)
    assert terms[1] == {"taught", "rest", "constrained"}


def test_where_few_pairs_are_held_out_a_network_is_trained_only_to_repeat_a_head(
    pictures: ImageSet, fresh: ClusterModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = Constraints.sample(LABELS, 600, seed=3)
    monkeypatch.setattr(safe_recipe, "FOR_A_NETWORK", N)
    with monkeypatch.context() as only:
        only.setattr(safe_recipe, "repeat_labels", None)  # a head is surely better: it would be called
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            train(fresh, pictures, pairs, views=UPRIGHT)
    monkeypatch.setattr(safe_recipe._SafeTraining, "first", property(lambda self: self.start))
    found, log = train(fresh, pictures, pairs, views=UPRIGHT)
    assert_unchanged(found, fresh)
    assert "too few pairs are held out to judge a network" in log[-1]["why"]


def test_pairs_at_random_teach_a_head_on_the_features_of_images(pictures: ImageSet, fresh: ClusterModel) -> None:
    """The network begins with it if hidden images favour it; its backbone is that of the start."""
    pairs = Constraints.sample(LABELS, 600, seed=3)
    task = PairTask("constrained", pairs, "safe", 0.0, 50, merge=False, head_steps=0)
    safe = safe_recipe._SafeTraining(fresh, pictures, task, SHORT, UPRIGHT, Context(held_out=pictures))
    assert acc(safe.first, pictures) > acc(fresh, pictures) + 0.1
    one, other = (Frozen.of(model, pictures).features for model in (fresh, safe.first))
    assert np.array_equal(one, other)


def test_the_network_begins_with_the_head_of_all_answers_and_does_not_see_held_out_images(
    pictures: ImageSet, fresh: ClusterModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hide some of few known images costs the head of the others much (decision 059)."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(safe_recipe, "repeat_labels", lambda *what, **_: given.update(labels=what[2]))
    pairs = known_images(60)
    task = PairTask("constraintmatch", pairs, "safe", 0.0, 50, merge=False, head_steps=0)
    safe = safe_recipe._SafeTraining(fresh, pictures, task, SHORT, UPRIGHT, Context())
    safe.repeat_head()
    hidden = np.setdiff1d(safe.judge.rows, Judge(safe.task.constraints).rows)
    assert len(hidden) > 5
    assert not np.isin(given["labels"][0], hidden).any()
    seen = Frozen.of(fresh, pictures)
    everything = teach_groups(fresh, Frozen.of(fresh, pictures), known_groups(pairs), informed=fresh)
    assert np.array_equal(seen.probabilities(safe.begun), seen.probabilities(everything))
    assert safe.network_losses.mean() > safe._losses(safe.begun).mean()  # judged against a head that does not know them


def test_a_network_that_begins_with_the_start_is_judged_against_it(pictures: ImageSet, fresh: ClusterModel) -> None:
    """Not against the refused head: a network may be better than that one and worse than the start."""
    task = PairTask("constraintmatch", known_images(60), "safe", 0.0, 50, merge=False, head_steps=0)
    safe = safe_recipe._SafeTraining(fresh, pictures, task, SHORT, UPRIGHT, Context())
    safe.begun = safe.start
    assert np.array_equal(safe.network_losses, safe._losses(safe.network))


@pytest.mark.parametrize(
    ("gain", "qualities", "kept"),
    [
        (0.002, (0.9, 0.8), True),  # held-out pairs favour it
        (0.0, (0.7, 0.8), True),  # they cannot tell, and its clusters became clearer
        (-0.009, (0.7, 0.8), True),
        (-0.011, (0.7, 0.8), False),  # they are against it by more than a standard error
        (0.0, (0.8, 0.805), False),  # clusters as before
        (0.0, (), False),
    ],
)
def test_a_repeated_head_is_kept_if_held_out_pairs_or_clearer_clusters_favour_it(
    gain: float, qualities: tuple[float, ...], kept: bool
) -> None:
    log = [{"step": 50 * at, "quality": quality} for at, quality in enumerate(qualities)]
    assert repeats_well(Verdict(gain, 0.01), log, 50) is kept


def test_a_network_that_repeats_the_start_is_kept_only_if_held_out_answers_favour_it(
    pictures: ImageSet, fresh: ClusterModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_recipe._SafeTraining, "begun", property(lambda self: self.start))
    monkeypatch.setattr(
        safe_recipe, "repeats_well", lambda *_: True
    )  # it would keep a network that repeats a taught head
    short = replace(SETTINGS, steps=5)
    for least, kept in ((100.0, "the start"), (-100.0, "the network of step")):
        monkeypatch.setattr(safe_recipe, "LEAST_GAIN", least)
        log = train(fresh, pictures, known_images(60), "constraintmatch", views=UPRIGHT, settings=short).log
        assert log[-1]["kept"].startswith(kept)


def test_a_network_that_forgets_its_head_is_not_kept(
    pictures: ImageSet, fresh: ClusterModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SCAN, "NEIGHBOUR_LABEL_SETTINGS", replace(SETTINGS, lr=30.0))
    log = train(fresh, pictures, known_images(60), "constraintmatch", views=UPRIGHT).log
    assert log[-1]["kept"] == "the head alone" or log[-1]["kept_step"] == 0


def test_a_network_that_repeats_its_head_goes_on_where_it_was_stopped(
    pictures: ImageSet, fresh: ClusterModel, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_recipe, "LEAST_GAIN", -1.0)  # the head is right everywhere
    pairs = known_images(60)
    how: dict[str, Any] = {
        "method": "constraintmatch",
        "views": UPRIGHT,
        "settings": SHORT,
    }
    whole = train(fresh, pictures, pairs, **how).model
    steps = iter([False] * 8 + [True])
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path, {}) as run:
        train(fresh, pictures, pairs, **how, context=Context(run=run, stop=steps.__next__))
    with open_run(tmp_path, {}, resume=True) as run:
        found, log = train(fresh, pictures, pairs, **how, context=Context(run=run))
    assert log[-1]["kept"].startswith("the network of step")
    assert_unchanged(found, whole)
