"""How deep a training is: the Python frames from the command to the step of the optimizer."""

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.models.cluster_model import build_model, save_model

pytestmark = pytest.mark.usefixtures("narrow_networks")

FRAMES = 8  # with the command, without the step itself


class FirstStepError(Exception):
    """The first step of the training begins; what follows is of no interest."""


@pytest.mark.parametrize("recipe", ["paper", "safe"])
def test_a_step_is_few_frames_below_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    found = list[str]()

    def watched(self: torch.optim.Optimizer, *given: Any, **how: Any) -> Any:
        stack = [f"{Path(frame.filename).stem}.{frame.name}" for frame in traceback.extract_stack()[:-1]]
        if {"train.rehearse", "prototypes._minimise"} & {*stack}:  # a head on frozen features learns first
            return steps[type(self)](self, *given, **how)
        found.extend(stack[stack.index("training.train") :])
        raise FirstStepError

    watched.hooked = True  # type: ignore[attr-defined]  # torch would put a frame around it
    steps = {kind: kind.step for kind in (torch.optim.SGD, torch.optim.Adam)}
    for kind in steps:
        monkeypatch.setattr(kind, "step", watched)
    labels = np.arange(400) % 3
    noise = np.random.default_rng(0).integers(0, 60, (400, 8, 8, 1))
    np.save(tmp_path / "images.npy", (80 * labels[:, None, None, None] + noise).astype(np.uint8))
    Constraints.sample(labels, 1_000, seed=0, balanced=True).write(tmp_path / "pairs.csv")
    save_model(build_model(n_clusters=3, side=8, channels=1, seed=1), tmp_path / "start")
    words = ["train", tmp_path / "images.npy", "--pairs", tmp_path / "pairs.csv", "--model", tmp_path / "start", "-q"]
    words += ["--recipe", recipe, "--steps", 1, "--device", "cpu", "--out", tmp_path / "run"]
    done = CliRunner().invoke(cli.app, list(map(str, words)))
    assert isinstance(done.exception, FirstStepError)
    assert found[:3] == ["training.train", "train.train", "constraintmatch.constraintmatch"]
    assert len(found) <= FRAMES, found
