"""The loop for real, on a few digits: labels answer, a person in the terminal answers, the model learns beside them."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from by_name import run_method
from PIL import Image
from sklearn.cluster import KMeans
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch._internal.progress import Reporter
from constraintmatch.annotate import background_training
from constraintmatch.annotate.annotators import ask_labels
from constraintmatch.annotate.background_training import Learner, Learning
from constraintmatch.annotate.commands import Loop, ask_in_terminal
from constraintmatch.annotate.question_queue import (
    FINISHED,
    PREVIOUS,
    Chooser,
    Prompt,
    picture,
    read_choice,
    side_by_side,
)
from constraintmatch.annotate.store import open_store
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import accuracy, embed, predict
from constraintmatch.methods import Context
from constraintmatch.methods.heads import attach_head, detach_head, embed_images, regression_head
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model, save_model, with_head
from constraintmatch.pipeline.config import SHORT_STAGES, TrainConfig, method_settings
from constraintmatch.pipeline.plan import Train
from constraintmatch.pipeline.train import weights_hash
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question
from constraintmatch.questions.rounds import Asking, LabelOracle, ask_until, closure_pairs, image_belief
from constraintmatch.training.run_folder import read_log

pytestmark = pytest.mark.usefixtures("small_batches", "few_digits", "quick_heads_throughout")

BATCHES = {"pairs_per_step": 10, "images_per_step": 20}
SMALL = Learning({**BATCHES, "recipe": "paper"}, {"steps": 2, "device": "cpu"}, every=5)  # which trains in every round
SAFE = replace(SMALL, arguments=BATCHES)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that nobody has trained, whose head repeats k-means: half right, so that answers can help."""
    row, folder = DATASETS["digits"], tmp_path_factory.mktemp("start") / "model"
    size = {"n_clusters": 10, "side": 8, "channels": 1, "backbone": "tiny"}
    model = build_model(mean=row.mean, std=row.std, **size)
    seen = embed(model, load_dataset("digits", "train"))
    unit = seen / np.linalg.norm(seen, axis=1, keepdims=True)
    clusters = KMeans(10, n_init=3, random_state=0).fit_predict(unit).astype(np.int64)
    save_model(with_head(model, *regression_head(seen, clusters, 10)), folder)
    return folder


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return load_dataset("digits", "val")


def a_loop(start: Path, out: Path, **changes: object) -> Loop:
    options: dict[str, object] = {"questions": 12, "model": start, "every": 6, "steps": 2, "device": "cpu"}
    return Loop("digits", out, 10, **{**options, **changes})  # type: ignore[arg-type]


# The learner


def test_triplets_teach_a_round_and_need_a_number_of_clusters(images: ImageSet, start: Path, tmp_path: Path) -> None:
    oracle, asking = LabelOracle(images.labels, error=0.0), Asking("triplet")
    answers = ask_until(image_belief(load_model(start), images), [], 20, oracle, asking)
    learner = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    assert learner.learn()
    assert learner.n_learned == 20
    with pytest.raises(InputError, match="triplets do not show how many kinds there are; add --clusters K"):
        ask_labels(Loop(str(tmp_path), tmp_path / "loop", kind="triplet"))


def answered(images: ImageSet, start: Path, n: int) -> list[Answer]:
    oracle = LabelOracle(images.labels, error=0.0)
    return ask_until(image_belief(load_model(start), images), [], n, oracle, Asking())


def test_a_round_begins_with_the_start_and_leaves_a_model(images: ImageSet, start: Path, tmp_path: Path) -> None:
    answers = answered(images, start, 8)
    learner = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    assert learner.name() == "start"
    assert learner.learn()
    first = weights_hash(load_model(tmp_path / "model"))
    assert first != weights_hash(load_model(start))
    again = Learner(images, load_model(start), lambda: answers, tmp_path / "other", SMALL)
    assert again.learn()
    assert weights_hash(again.newest) == first
    assert learner.n_learned == 8
    assert learner.name() == "round 8"
    assert np.array_equal(learner.belief().probabilities, image_belief(learner.newest, images).probabilities)


def test_a_round_that_cannot_be_judged_keeps_the_head_that_knows_the_answers(
    images: ImageSet, start: Path, tmp_path: Path
) -> None:
    answers, begun = answered(images, start, 60), load_model(start)
    learner = Learner(images, begun, lambda: answers, tmp_path, SAFE)
    assert learner.learn()
    verdict = read_log(tmp_path / "rounds" / "0060")[-1]
    assert (verdict["kind"], verdict["kept"]) == ("verdict", "the head alone")
    found = load_model(tmp_path / "model")
    for name, value in found.state_dict().items():
        assert torch.equal(value, begun.state_dict()[name]) == (not name.startswith("head."))
    before, after = (accuracy(images.labels, predict(one, images).clusters) for one in (begun, found))
    assert after > before + 0.02
    assert (learner.n_learned, learner.is_behind) == (60, False)


def test_questions_know_the_answers_while_the_round_still_trains(images: ImageSet, start: Path, tmp_path: Path) -> None:
    answers = answered(images, start, 60)
    learner = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    seen: list[float] = []

    class Watching(Reporter):
        def start(self, *_: object) -> None:
            seen.append(accuracy(images.labels, learner.belief().probabilities.argmax(1)))

    before = accuracy(images.labels, learner.belief().probabilities.argmax(1))
    assert learner.learn(Watching())
    assert seen[0] > before + 0.02  # the head was told, the network is not trained yet
    assert np.array_equal(learner.belief().probabilities, image_belief(learner.newest, images).probabilities)


def test_all_rounds_share_one_pass_with_the_start(
    images: ImageSet, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []

    def counted(model: ClusterModel, given: ImageSet, **options: object) -> object:
        passes.append(len(given))
        return embed(model, given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules["constraintmatch.methods.propagate"], "embed", counted)
    everything = answered(images, start, 12)
    answers = everything[:6]
    learner = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    learner.belief()
    assert learner.learn()
    answers = everything
    assert learner.learn()
    assert passes == [len(images)]


def test_a_round_that_is_given_up_leaves_what_the_newest_model_says(
    images: ImageSet, start: Path, tmp_path: Path
) -> None:
    answers = answered(images, start, 30)
    learner = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    before = learner.belief().probabilities

    class Failing(Reporter):
        def update(self, *_: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.learn(Failing())
    assert np.array_equal(learner.belief().probabilities, before)


def test_answers_that_say_nothing_are_no_round(images: ImageSet, start: Path, tmp_path: Path) -> None:
    answers = [Answer(Question(0, (1,)), UNSURE)]
    learner = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    assert not learner.learn()
    assert not (tmp_path / "rounds").exists()


def test_a_learner_goes_on_with_the_newest_finished_round(images: ImageSet, start: Path, tmp_path: Path) -> None:
    answers = answered(images, start, 8)
    first = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    first.learn()
    stopped = tmp_path / "rounds" / "0011"
    stopped.mkdir()
    (stopped / "run.json").write_text('{"format": 1, "request": {}, "status": "running"}')
    later = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    assert later.n_learned == 8
    assert weights_hash(later.newest) == weights_hash(first.newest)
    assert not stopped.exists()


def test_the_training_after_the_last_answer_may_be_longer(images: ImageSet, start: Path, tmp_path: Path) -> None:
    answers = answered(images, start, 8)
    Learner(images, load_model(start), lambda: answers[:5], tmp_path, replace(SMALL, total=8)).learn()
    short = Learner(images, load_model(start), lambda: answers, tmp_path, replace(SMALL, total=8))
    assert short.learn()
    assert not short.is_behind
    longer = replace(SMALL, total=8, last_steps=6)
    later = Learner(images, load_model(start), lambda: answers, tmp_path, longer)
    assert (later.n_left, later.is_behind, later.is_due()) == (0, True, True)
    assert weights_hash(later.newest) == weights_hash(short.newest)
    assert later.learn()
    assert later.newest.config.trained[-1]["steps"] == 6
    assert sorted(path.name for path in (tmp_path / "rounds").iterdir()) == ["0005", "0008", "0008-last"]
    for learning in (longer, SMALL):
        again = Learner(images, load_model(start), lambda: answers, tmp_path, learning)
        assert not again.is_behind
        assert weights_hash(again.newest) == weights_hash(later.newest)


class Stopping(Reporter):
    """Presses Ctrl-C after four steps."""

    def update(self, done: int, *_: object) -> None:
        if done > 4:
            raise KeyboardInterrupt


def test_a_finished_training_is_kept_until_the_one_in_its_place_is_there(
    images: ImageSet, start: Path, tmp_path: Path
) -> None:
    answers = answered(images, start, 8)

    def learner(last_steps: int | None) -> Learner:
        settings = {**SMALL.settings, "checkpoint_every": 2, "log_every": 1}
        learning = replace(SMALL, settings=settings, total=8, last_steps=last_steps)
        return Learner(images, load_model(start), lambda: answers, tmp_path, learning)

    first = learner(6)
    assert first.learn()
    with pytest.raises(KeyboardInterrupt):
        learner(12).learn(Stopping())
    names = ["0008-last", "0008-last-old"]
    assert sorted(path.name for path in (tmp_path / "rounds").iterdir()) == names
    for last_steps in (None, 12):  # without the option nothing is lost either
        again = learner(last_steps)
        assert again.n_learned == 8
        assert weights_hash(again.newest) == weights_hash(first.newest)
        assert sorted(path.name for path in (tmp_path / "rounds").iterdir()) == names
    begun = list[int]()

    class Watching(Reporter):
        def start(self, _title: str, _total: int, done: int = 0) -> None:
            begun.append(done)

    assert again.is_behind
    assert again.learn(Watching())
    assert begun == [4]
    assert again.newest.config.trained[-1]["steps"] == 12
    assert [path.name for path in (tmp_path / "rounds").iterdir()] == ["0008-last"]


def test_a_round_waits_for_the_thread_that_was_told_to_stop(
    images: ImageSet, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("constraintmatch.annotate.background_training.LONGEST_STEPS", 0.0)
    answers = answered(images, start, 8)
    learning = replace(SMALL, settings={**SMALL.settings, "steps": 20}, total=8)
    learner = Learner(images, load_model(start), lambda: answers, tmp_path, learning)
    learner.start()
    wait_until(lambda: learner.activity() is not None)
    learner.stop()  # does not wait: the round under way still holds its folder
    assert learner.learn()
    assert learner.n_learned == 8


@pytest.mark.parametrize("same", [True, False])
def test_a_stopped_round_goes_on_unless_something_else_was_answered(
    images: ImageSet, start: Path, tmp_path: Path, same: bool
) -> None:
    learning = replace(SMALL, settings={**SMALL.settings, "steps": 6, "checkpoint_every": 2, "log_every": 1})
    answers, begun = answered(images, start, 8), list[int]()

    class Watching(Reporter):
        def start(self, _title: str, _total: int, done: int = 0) -> None:
            begun.append(done)

    with pytest.raises(KeyboardInterrupt):
        Learner(images, load_model(start), lambda: answers, tmp_path / "loop", learning).learn(Stopping())
    if not same:
        answers[-1] = replace(answers[-1], choice=UNSURE)
    learner = Learner(images, load_model(start), lambda: answers, tmp_path / "loop", learning)
    assert learner.n_learned == 0
    assert learner.learn(Watching())
    assert begun == [4 if same else 0]
    whole = Learner(images, load_model(start), lambda: answers, tmp_path / "whole", learning)
    assert whole.learn()
    assert weights_hash(learner.newest) == weights_hash(whole.newest)


def test_the_learner_learns_in_the_background_while_answers_come(images: ImageSet, start: Path, tmp_path: Path) -> None:
    given, everything = list[Answer](), answered(images, start, 12)
    learner = Learner(images, load_model(start), lambda: list(given), tmp_path, SMALL)
    learner.start()
    seen = set[str | None]()
    for answer in everything:
        given.append(answer)
        time.sleep(0.01)
    until = time.monotonic() + 60
    while learner.n_learned < 8 and time.monotonic() < until:  # the last few may be fewer than make a round
        seen.add(learner.activity())
        time.sleep(0.01)
    learner.stop()
    assert learner.n_learned >= 8
    assert any(line and line.startswith("learning from") for line in seen)


def test_a_round_that_fails_is_told_and_asking_goes_on(images: ImageSet, start: Path, tmp_path: Path) -> None:
    answers = answered(images, start, 8)
    bad = Learning({"pairs_per_step": 10, "images_per_step": 20, "max_entropy": 7.0}, SMALL.settings, every=5)
    learner = Learner(images, load_model(start), lambda: answers, tmp_path, bad)
    learner.start()
    until = time.monotonic() + 30
    while learner.problem is None and time.monotonic() < until:
        time.sleep(0.01)
    assert learner.activity() == "max_entropy is 7.0; it must be in [0, 1]"
    assert learner.name() == "start"


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_stop_gives_up_the_round_under_way(images: ImageSet, start: Path, tmp_path: Path) -> None:
    answers = answered(images, start, 8)
    long = Learning(SMALL.arguments, {"steps": 100_000, "device": "cpu"}, every=5)
    learner = Learner(images, load_model(start), lambda: answers, tmp_path, long)
    learner.start()
    wait_until(lambda: "%" in (learner.activity() or ""))
    assert (learner.activity() or "").startswith("learning from 8 answers (")
    learner.stop()
    assert learner.activity() is None
    assert learner.problem is None
    assert (learner.n_learned, learner.n_left) == (0, 8)
    stopped = tmp_path / "rounds" / "0008"
    assert read_json(stopped / "run.json")["status"] == "interrupted"
    assert (stopped / "checkpoint.safetensors").is_file()  # nothing is lost: the same round would continue there
    later = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    assert later.name() == "start"
    assert later.learn()


def test_the_last_answers_and_those_before_a_pause_are_learnt_however_few(
    images: ImageSet, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = answered(images, start, 3)
    few = Learner(images, load_model(start), lambda: answers, tmp_path, SMALL)
    assert not few.is_due()
    last = Learner(images, load_model(start), lambda: answers, tmp_path, replace(SMALL, total=3))
    assert last.is_due()
    monkeypatch.setattr("constraintmatch.annotate.background_training.PATIENCE", 0.0)
    time.sleep(0.01)
    assert few.is_due()
    assert few.learn()
    assert not few.is_due()


def test_a_round_that_knows_answers_taken_back_since_is_not_gone_on_with(
    images: ImageSet, start: Path, tmp_path: Path
) -> None:
    answers = answered(images, start, 8)
    Learner(images, load_model(start), lambda: answers, tmp_path, SMALL).learn()
    fewer = Learner(images, load_model(start), lambda: answers[:5], tmp_path, SMALL)
    assert fewer.n_learned == 0
    assert (tmp_path / "rounds" / "0008").is_dir()


# Labels answer


def test_labels_answer_until_the_questions_are_used_up(start: Path, tmp_path: Path) -> None:
    rows = dict(ask_labels(a_loop(start, tmp_path / "loop")))
    assert rows["answers"].endswith("(12 of 12)")
    assert rows["model"].endswith("(has learned from 12 answers)")
    assert rows["scores"].startswith("ACC ")
    assert sorted(path.name for path in (tmp_path / "loop" / "rounds").iterdir()) == ["0006", "0012"]
    lines = (tmp_path / "loop" / "clusters.csv").read_text().splitlines()
    assert len(lines) == 1 + len(load_dataset("digits", "train"))


def test_a_loop_that_has_ended_may_end_again_with_a_longer_training(start: Path, tmp_path: Path) -> None:
    ask_labels(a_loop(start, tmp_path))
    rows = dict(ask_labels(a_loop(start, tmp_path, last_steps=5)))
    assert rows["model"].endswith("(has learned from 12 answers)")
    steps = {name: read_json(tmp_path / "rounds" / name / "run.json") for name in ("0006", "0012", "0012-last")}
    assert [run["request"]["settings"]["steps"] for run in steps.values()] == [2, 2, 5]
    again = dict(ask_labels(a_loop(start, tmp_path, last_steps=5)))  # there is nothing left to do
    assert again == rows
    assert {name: read_json(tmp_path / "rounds" / name / "run.json") for name in steps} == steps
    with pytest.raises(InputError, match="last_steps is 0; it must be 1 or more"):
        a_loop(start, tmp_path, last_steps=0)


def test_the_same_command_with_more_questions_goes_on(start: Path, tmp_path: Path) -> None:
    ask_labels(a_loop(start, tmp_path / "loop", questions=6))
    rows = dict(ask_labels(a_loop(start, tmp_path / "loop", questions=12)))
    assert rows["answers"].endswith("(12 of 12)")
    whole = dict(ask_labels(a_loop(start, tmp_path / "whole", questions=12)))
    assert whole["scores"] == rows["scores"]
    assert weights_hash(load_model(tmp_path / "whole" / "model")) == weights_hash(
        load_model(tmp_path / "loop" / "model")
    )


def test_a_frozen_network_keeps_its_weights_and_its_head_learns(start: Path, tmp_path: Path) -> None:
    told = dict(ask_labels(a_loop(start, tmp_path, frozen=True, every=12, steps=20)))
    assert "learned from 12 answers" in told["model"]
    before, after = load_model(start), load_model(tmp_path / "model")
    assert weights_hash(after) != weights_hash(before)
    for name, value in before.backbone.state_dict().items():
        assert torch.equal(after.backbone.state_dict()[name], value)
    assert after.config.trained[-1]["method"] == "constraintmatch"
    rounds = [load_model(path) for path in sorted((tmp_path / "rounds").iterdir())]
    assert [model.config.side for model in rounds] == [1]  # a head on embeddings: kilobytes
    test = load_dataset("digits", "test")
    alone = detach_head(before, embed_images(before, load_dataset("digits", "train")))
    again = attach_head(before, alone)
    np.testing.assert_allclose(predict(again, test).probabilities, predict(before, test).probabilities, atol=1e-5)
    assert f"ACC {100 * accuracy(test.labels, predict(after, test).clusters):.1f}" in told["scores"]


def test_a_loop_may_be_frozen_later_and_thawed(start: Path, tmp_path: Path) -> None:
    ask_labels(a_loop(start, tmp_path, frozen=True, questions=6))
    more = dict(ask_labels(a_loop(start, tmp_path, frozen=True, questions=7)))
    assert sorted(path.name for path in (tmp_path / "rounds").iterdir()) == ["0006-head", "0007-head"]  # it went on
    assert "learned from 7 answers" in more["model"]
    thawed = dict(ask_labels(a_loop(start, tmp_path, questions=8, every=8)))
    assert "learned from 8 answers" in thawed["model"]
    assert load_model(tmp_path / "rounds" / "0008").config.backbone == "tiny"


def test_labels_that_err_give_other_answers(start: Path, tmp_path: Path) -> None:
    images = load_dataset("digits", "train")
    for name, error in (("right", 0.0), ("wrong", 1.0)):
        ask_labels(a_loop(start, tmp_path / name, questions=6), error)
        with open_store(tmp_path / name / "answers.db", images, read_only=True) as store:
            given = store.answers()
        oracle = LabelOracle(images.labels, error=0.0)
        share = np.mean([answer == oracle.answer(answer.question) for answer in given])
        assert share == (1.0 if error == 0 else 0.0)


def test_images_without_labels_cannot_answer(start: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for number, pixels in enumerate(load_dataset("digits", "val").images[:12]):
        Image.fromarray(pixels[..., 0]).save(tmp_path / "photos" / f"{number}.png")
    loop = Loop(str(tmp_path / "photos"), tmp_path / "loop", 10, model=start, device="cpu", images=Train())
    with pytest.raises(InputError, match="has no labels"):
        ask_labels(loop)
    assert not (tmp_path / "loop").exists()


def test_answers_about_other_images_are_refused_before_a_start_is_made(tmp_path: Path) -> None:
    folder, db = class_folders(tmp_path / "digits", 12), tmp_path / "loop" / "answers.db"
    with open_store(db, ImageSet.from_arrays(np.zeros((2, 4, 4), np.uint8), names=["a.png", "b.png"])) as store:
        store.add_questions([Question(0, (1,))])
    with pytest.raises(InputError, match=r"answers\.db: not about the images .*; give its folder or another --out"):
        ask_labels(Loop(str(folder), tmp_path / "loop", 3, device="cpu"))
    assert {path.name for path in db.parent.iterdir()} == {"answers.db", "answers.db.lock"}


def class_folders(place: Path, n: int = 40) -> Path:
    digits = load_dataset("digits", "val")
    assert digits.labels is not None
    for number, (pixels, label) in enumerate(zip(digits.images[:n], digits.labels[:n], strict=True)):
        (place / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[..., 0]).save(place / str(label) / f"{number}.png")
    return place


@pytest.mark.parametrize("frozen", [False, True])
def test_without_a_number_of_clusters_there_are_as_many_as_the_answers_show(tmp_path: Path, frozen: bool) -> None:
    folder = class_folders(tmp_path / "digits")
    save_model(build_model(n_clusters=0, side=8, channels=1, backbone="tiny"), tmp_path / "features")
    small = {"every": 30, "steps": 2, "device": "cpu", "frozen": frozen}
    rows = dict(ask_labels(Loop(str(folder), tmp_path / "loop", None, 30, tmp_path / "features", **small)))  # type: ignore[arg-type]
    found = load_model(tmp_path / "loop" / "model").config.n_clusters
    assert rows["clusters"].endswith(f"({found} clusters)")
    assert 2 < found <= 10


def test_images_that_come_later_need_no_new_start(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "digits", 12)
    save_model(build_model(n_clusters=0, side=8, channels=1, backbone="tiny"), tmp_path / "features")
    small = {"every": 6, "steps": 2, "device": "cpu"}
    ask_labels(Loop(str(folder), tmp_path / "loop", 3, 6, tmp_path / "features", **small))  # type: ignore[arg-type]
    made = (tmp_path / "loop" / "start" / SHORT_STAGES[-1] / "run.json").read_bytes()
    class_folders(folder, 14)
    rows = dict(ask_labels(Loop(str(folder), tmp_path / "loop", 3, 9, **small)))  # type: ignore[arg-type]
    assert rows["answers"].endswith("(9 of 9)")
    assert (tmp_path / "loop" / "start" / SHORT_STAGES[-1] / "run.json").read_bytes() == made
    assert len((tmp_path / "loop" / "clusters.csv").read_text().splitlines()) == 15
    with pytest.raises(InputError, match="has 3 clusters already; leave --clusters out"):
        ask_labels(Loop(str(folder), tmp_path / "loop", 4, 9, **small))  # type: ignore[arg-type]


def test_a_number_of_clusters_may_be_given_later(tmp_path: Path) -> None:
    folder, out = class_folders(tmp_path / "digits", 12), tmp_path / "loop"
    features = build_model(n_clusters=2, side=8, channels=1, backbone="tiny")
    images, context = ImageSet.from_folder(folder), Context(out / "start" / SHORT_STAGES[0])
    quick = method_settings("simclr", {"device": "cpu"})
    run_method(
        "simclr", features, images, arguments={"epochs": 1, "images_per_step": 12}, settings=quick, context=context
    )
    small = {"every": 6, "steps": 2, "device": "cpu"}
    ask_labels(Loop(str(folder), out, None, 6, **small))  # type: ignore[arg-type]
    assert not (out / "start" / SHORT_STAGES[-1]).exists()
    ask_labels(Loop(str(folder), out, 5, 9, **small))  # type: ignore[arg-type]
    assert load_model(out / "model").config.n_clusters == 5


# The terminal


class Person:
    """Types these lines, and keeps what was shown."""

    def __init__(self, lines: list[str]) -> None:
        self.lines: Iterator[str] = iter(lines)
        self.shown: list[str] = []

    def read(self, prompt: str) -> str:
        self.shown.append(prompt)
        line = next(self.lines, None)
        if line is None:
            raise EOFError
        return line


def test_a_person_answers_takes_back_and_finishes_in_the_terminal(start: Path, tmp_path: Path) -> None:
    images, person = load_dataset("digits", "train"), Person(["y", "what?", "n", "p", "u", "f"])
    prompt = Prompt(images, write=person.shown.append, read=person.read, width=60)
    rows = dict(ask_in_terminal(a_loop(start, tmp_path / "loop", kind="pair", last_steps=5), prompt))
    assert rows["last training"] == "not yet; --questions 2 takes these answers for all"
    with open_store(tmp_path / "loop" / "answers.db", images, read_only=True) as store:
        assert [answer.choice for answer in store.answers()] == [0, UNSURE]
        assert store.counts()["withdrawn"] == 1
    assert rows["answers"].endswith("(2 of 12)")
    assert any(line.startswith("that is not an answer") for line in person.shown)


def test_the_end_of_input_finishes(start: Path, tmp_path: Path) -> None:
    images, person = load_dataset("digits", "train"), Person([])
    prompt = Prompt(images, write=person.shown.append, read=person.read, colour=False)
    rows = dict(ask_in_terminal(a_loop(start, tmp_path / "loop"), prompt))
    assert rows["answers"].endswith("(0 of 12)")
    assert "digits/" in person.shown[0]


def test_ctrl_c_in_the_terminal_ends_and_leaves_the_last_answers_for_next_time(start: Path, tmp_path: Path) -> None:
    images, lines = load_dataset("digits", "train"), iter("yn")

    def read(_prompt: str) -> str:
        if (line := next(lines, None)) is None:
            raise KeyboardInterrupt
        return line

    prompt = Prompt(images, write=lambda _text: None, read=read, colour=False)
    rows = dict(ask_in_terminal(a_loop(start, tmp_path / "loop", kind="pair"), prompt))
    assert rows["answers"].endswith("(2 of 12)")
    assert rows["model"].endswith("(has learned from 0 answers; 2 more wait: the same command trains on them)")
    assert (tmp_path / "loop" / "clusters.csv").exists()


def test_a_contradiction_is_told_in_the_terminal(start: Path, tmp_path: Path) -> None:
    images, person = load_dataset("digits", "train"), Person(["y", "y", "n", "p", "p", "p", "p", "f"])
    loop = a_loop(start, tmp_path / "loop", kind="pair")
    with open_store(tmp_path / "loop" / "answers.db", images, source="digits") as store:
        for question in (Question(0, (1,)), Question(1, (2,)), Question(0, (2,))):
            store.add_questions([question], urgent=True)
    prompt = Prompt(images, write=person.shown.append, read=person.read, colour=False)
    ask_in_terminal(loop, prompt)
    assert any("one answer says different, 2 say same; p undoes yours" in line for line in person.shown)
    assert "there is no answer to undo" in person.shown


def test_which_of_these_is_answered_by_numbers_in_the_terminal(start: Path, tmp_path: Path) -> None:
    images, person = load_dataset("digits", "train"), Person(["1", "0", "9", "5", "f"])
    prompt = Prompt(images, write=person.shown.append, read=person.read, width=80)
    ask_in_terminal(a_loop(start, tmp_path / "loop", kind="which"), prompt)
    with open_store(tmp_path / "loop" / "answers.db", images, read_only=True) as store:
        assert [answer.choice for answer in store.answers()] == [0, NONE, 4]


@pytest.mark.parametrize(
    ("text", "pair", "which"),
    [
        ("y", 0, None),
        ("n", NONE, NONE),
        ("2", None, 1),
        ("3", None, None),
        ("0", None, NONE),
        (" U ", UNSURE, UNSURE),
        ("previous", PREVIOUS, PREVIOUS),
        ("f", FINISHED, FINISHED),
        ("", None, None),
        ("x", None, None),
        ("same", 0, None),
        ("Different", NONE, None),
        ("none of these", None, NONE),
        ("²", None, None),
        ("12", None, None),
        ("1.", None, None),
        ("foo", None, None),
        ("please", None, None),
        ("nope", None, None),
    ],
)
def test_what_a_line_means(text: str, pair: int | None, which: int | None) -> None:
    assert read_choice(text, Question(0, (1,))) == pair
    assert read_choice(text, Question(0, (1, 2))) == which
    assert read_choice(text, Question(0, (1, 2), nearer=True)) == (None if which == NONE else which)


def test_a_picture_is_two_pixels_to_a_line_in_their_colours() -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    image[0, 0], image[1, 0] = (255, 0, 0), (0, 0, 255)
    lines = picture(image, 2)
    assert len(lines) == 1
    assert lines[0].startswith("\x1b[38;2;255;0;0m\x1b[48;2;0;0;255m▀")
    assert lines[0].endswith("\x1b[0m")


def test_pictures_stand_under_their_captions() -> None:
    shown = side_by_side([["aa", "bb"], ["cc", "dd"]], ["first", "2"], 2).splitlines()
    assert shown == ["fi  2 ", "aa  cc", "bb  dd"]


# What can go wrong


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--oracle", "people"], "--oracle people: known is labels"),
        (["--oracle", "labels", "--terminal"], "--terminal asks you"),
        (["--set", "wrong=0.1"], "--set wrong goes with --oracle labels"),
        (["--oracle", "labels", "--set", "wrong=2"], "wrong must be 0 to 1"),
        (["--oracle", "labels", "--questions", "0"], "--questions is 0; it must be 1 or more"),
        (["--oracle", "labels", "--set", "steps=0"], "steps must be a whole number, 1 or more"),
    ],
)
def test_bad_words_are_one_line_and_exit_code_2(words: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["loop", "digits", "--out", str(tmp_path / "x"), *words])
    assert done.exit_code == 2
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_the_command_runs_the_loop_with_labels(start: Path, tmp_path: Path) -> None:
    words = ["loop", "digits", "--model", start, "--out", tmp_path / "loop", "--oracle", "labels", "--device", "cpu"]
    more = ["--questions", "6", "--set", "every=6", "--set", "steps=2", "--quiet"]
    done = CliRunner().invoke(cli.app, [*map(str, words), *more])
    assert done.exit_code == 0, done.output
    assert "has learned from 6 answers" in done.output


def test_two_loops_on_one_folder_the_second_says_so(start: Path, tmp_path: Path) -> None:
    images = load_dataset("digits", "train")
    loop = a_loop(start, tmp_path / "loop")
    with (
        open_store(tmp_path / "loop" / "answers.db", images, source="digits"),
        pytest.raises(InputError, match=r"answers\.db: another server uses this database .* choose another --out"),
    ):
        ask_labels(loop)


def test_a_model_of_other_images_is_told_with_the_mend(tmp_path: Path) -> None:
    save_model(build_model(n_clusters=10, side=16, channels=3), tmp_path / "other")
    with pytest.raises(
        InputError, match=r"other: takes colour images of 16 × 16, these are grey images of 8 × 8; name a model"
    ):
        ask_labels(a_loop(tmp_path / "other", tmp_path / "loop"))


def test_a_limited_chooser_counts_what_is_handed_out(images: ImageSet, start: Path) -> None:
    belief = image_belief(load_model(start), images)
    chooser = Chooser(kind="pair", choose="random", total=5)
    first = chooser.next(belief, [], 20, ())
    assert len(first) == 5
    answers = [Answer(question, NONE) for question in first[:3]]
    assert chooser.next(belief, answers, 20, first[3:]) == []
    assert len(chooser.next(belief, answers, 20, ())) == 2


def test_a_round_learns_from_what_the_answers_imply_and_from_nothing_else(
    images: ImageSet, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, model = answered(images, start, 8), load_model(start)
    seen = embed_images(model, images)
    trained: list[int] = []
    train = background_training.train

    def counted(images: ImageSet, pairs: Constraints, config: TrainConfig, context: Context) -> object:
        trained.append(len(pairs))
        return train(images, pairs, config, context)

    monkeypatch.setattr(background_training, "train", counted)
    assert Learner(images, model, lambda: answers, tmp_path / "network", SMALL).learn()
    assert Learner(seen, detach_head(model, seen), lambda: answers, tmp_path / "head", SMALL).learn()
    said = len(closure_pairs(answers, len(images)))
    assert trained == [said, said]


def test_a_head_of_another_network_is_passed_over(images: ImageSet, start: Path, tmp_path: Path) -> None:
    answers, one = answered(images, start, 8), load_model(start)
    other = build_model(n_clusters=10, side=8, channels=1, backbone="tiny", seed=9)

    def learner(model: ClusterModel) -> Learner:
        seen = embed_images(model, images)
        return Learner(seen, detach_head(model, seen), lambda: answers, tmp_path, SMALL)

    assert learner(one).learn()
    assert learner(one).name() == "round 8"
    assert learner(other).name() == "start"


def test_embeddings_have_no_network_to_freeze(start: Path, tmp_path: Path) -> None:
    digits = load_dataset("digits", "val")
    np.savez(tmp_path / "seen.npz", images=embed(load_model(start), digits), labels=digits.labels)
    out, small = tmp_path / "loop", {"every": 6, "steps": 2, "device": "cpu", "frozen": True}
    ask_labels(Loop(str(tmp_path / "seen.npz"), out, 10, 6, **small))  # type: ignore[arg-type]
    begun, learnt = (load_model(out / name).config for name in (f"start/{SHORT_STAGES[-1]}", "rounds/0006-head"))
    assert (learnt.mean, learnt.std) == (begun.mean, begun.std)  # the same model goes on, not a head taken off it
