"""Whole runs of a method: interrupted at bad moments, streamed, with averaged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from by_name import run_method

from constraintmatch._internal.files import read_json, write_json
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods import METHODS, Context, Trained
from constraintmatch.models.cluster_model import ClusterModel, build_model
from constraintmatch.pipeline.config import method_arguments, method_settings
from constraintmatch.pipeline.train import weights_hash
from constraintmatch.training import batches
from constraintmatch.training.loop import Interrupted, TrainSettings
from constraintmatch.training.run_folder import OtherRequest, RunFolder
from constraintmatch.training.step import Stepper

pytestmark = pytest.mark.usefixtures("narrow_networks")

SETTINGS = TrainSettings(
    steps=9, lr=0.05, device="cpu", ema=0.9, log_every=4, evaluate_every=2, checkpoint_every=3, optimizer="adam"
)
ARGUMENTS = {"pairs_per_step": 5, "images_per_step": 8, "max_entropy": 0.99, "flip_fraction": 0.3, "warm_up": 0.5}


def run(images: ImageSet, out: Path | None = None, *, resume: bool = False) -> Trained:
    assert images.labels is not None
    return run_method(
        "constraintmatch",
        build_model(n_clusters=3, side=8, channels=1, seed=1),
        images,
        Constraints.sample(images.labels, 40, seed=0),
        arguments=ARGUMENTS,
        settings=SETTINGS,
        context=Context(out, resume=resume),
    )


@pytest.fixture(scope="module")
def whole(stripes: ImageSet) -> Trained:
    """The same training without a break and without a folder."""
    return run(stripes)


def assert_same(left: Trained, right: Trained) -> None:
    for name, value in left.model.state_dict().items():
        assert torch.equal(value, right.model.state_dict()[name]), name
    logs = [[{k: v for k, v in entry.items() if k != "seconds"} for entry in each.log] for each in (left, right)]
    assert logs[0] == logs[1]


def test_a_broken_off_run_of_a_method_goes_on_bit_for_bit(
    stripes: ImageSet, whole: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Stepper.__call__

    def failing(self: Stepper[Any], batch: Any, lr: float) -> None:
        if int(self.count) == 7:
            raise OSError("the machine went away")
        step(self, batch, lr)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "__call__", failing)
        with pytest.raises(OSError, match="went away"):
            run(stripes, tmp_path)
    assert_same(run(stripes, tmp_path, resume=True), whole)


def test_a_run_that_ends_before_it_is_noted_as_finished_is_not_trained_again(
    stripes: ImageSet, whole: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = RunFolder.note

    def failing(self: RunFolder, **changes: Any) -> None:
        if changes.get("status") == "finished":
            raise OSError("the machine went away")
        note(self, **changes)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "note", failing)
        with pytest.raises(OSError, match="went away"):
            run(stripes, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "__call__", lambda *_: pytest.fail("a step was done again"))
        again = run(stripes, tmp_path, resume=True)
    assert_same(again, whole)
    assert not (tmp_path / "checkpoint.safetensors").exists()


WITHOUT_STEPS = {"k_means", "linear_scan", "propagate"}


@pytest.mark.parametrize("name", sorted(METHODS.keys() - WITHOUT_STEPS))
def test_every_method_stops_when_it_is_asked_to(stripes: ImageSet, name: str) -> None:
    assert stripes.labels is not None
    model = build_model(n_clusters=3, side=8, channels=1, backbone="tiny")
    small = {"n_clusters": 3, "images_per_step": 8, "pairs_per_step": 8, "min_confidence": 0.1}
    arguments = {key: value for key, value in small.items() if key in method_arguments(name)}
    pairs = Constraints.sample(stripes.labels, 40, seed=0)
    settings, context = method_settings(name, {"device": "cpu"}), Context(stop=lambda: True)
    with pytest.raises(Interrupted, match="stopped after step 1 of"):
        run_method(name, model, stripes, pairs, arguments=arguments, settings=settings, context=context)


def test_streamed_images_train_the_same_model(
    stripes: ImageSet, whole: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_fits", lambda *_: False)
    assert_same(run(stripes), whole)


def test_a_run_of_before_an_argument_came_up_is_the_same_run(stripes: ImageSet, tmp_path: Path) -> None:
    assert stripes.labels is not None
    pairs = Constraints.sample(stripes.labels, 50, seed=0)
    settings = TrainSettings(steps=1, device="cpu")

    def again(**arguments: object) -> ClusterModel:
        start = build_model(n_clusters=3, side=8, channels=1, seed=2)
        given = {"arguments": {"pairs_per_step": 5, **arguments}, "settings": settings}
        return run_method("constrained", start, stripes, pairs, context=Context(tmp_path, resume=True), **given).model

    first = again()
    record = read_json(tmp_path / "run.json")
    del record["request"]["arguments"]["merge"]
    write_json(tmp_path / "run.json", record)
    assert weights_hash(again()) == weights_hash(first)
    with pytest.raises(OtherRequest, match=r"arguments\.merge was False, is True"):
        again(merge=True)
