"""The settings of `--set`: as the methods have them, with the ranges that they check, and flags of before."""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from inspect import signature
from typing import Any

import numpy as np
import pytest

from constraintmatch._internal.errors import InputError
from constraintmatch.cli import flags
from constraintmatch.cli.flags import SETTINGS, STAGES, Setting, new_spelling, read_settings
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods import METHODS
from constraintmatch.methods.heads import best_linear_head
from constraintmatch.models.cluster_model import build_model
from constraintmatch.pipeline.config import ORDER, method_arguments, method_settings
from constraintmatch.training.loop import TrainSettings, fit

NO_SETTINGS = {"n_clusters", "pseudo_error_rate"}
KNOWN = (*flags.METHODS, *STAGES)


def test_the_names_are_those_of_the_methods() -> None:
    assert set(KNOWN) == set(METHODS)
    assert set(STAGES) == set(ORDER)


@pytest.mark.parametrize("method", KNOWN)
def test_settings_and_defaults_are_read_as_the_methods_have_them(method: str) -> None:
    real = {name: value for name, value in method_arguments(method).items() if name not in NO_SETTINGS}
    assert flags.method_defaults(method) == real
    assert flags.training_defaults(method) == asdict(method_settings(method))
    known = {**real, **flags.training_defaults(method)}
    for name, default in known.items():
        said = {True: "yes", False: "no"}.get(default, str(default)) if isinstance(default, bool) else str(default)
        if default is not None:
            assert repr(SETTINGS[name].read(said)) == repr(default)


# Ranges


class TrainingBegins(Exception):
    """Every check was passed."""


@pytest.fixture
def accepts(monkeypatch: pytest.MonkeyPatch, stripes: ImageSet) -> Callable[[str, str, Any], bool]:
    """Whether a method's own checks let a value of an argument pass."""

    def begin(*_: object, **__: object) -> None:
        raise TrainingBegins

    for module in [module for name, module in sys.modules.items() if name.startswith("constraintmatch.methods.")]:
        for work in (fit, best_linear_head):
            if getattr(module, work.__name__, None) is work:
                monkeypatch.setattr(module, work.__name__, begin)
    images, model = stripes.take(np.arange(12)), build_model(n_clusters=3, side=8, channels=1, backbone="tiny", seed=0)
    pairs = Constraints.from_lists(n_images=12, must_link=[(0, 3)], cannot_link=[(0, 1)])

    def accepts(method: str, name: str, value: Any) -> bool:
        takes = signature(METHODS[method]).parameters
        usual = {"n_clusters": 3, "n_tries": 1, "constraints": pairs, name: value}
        given = {key: value for key, value in usual.items() if key in takes}
        try:
            METHODS[method](model, images, settings=method_settings(method, {"device": "cpu"}), **given)
        except InputError as error:
            return name not in str(error) and "images or pairs a step" not in str(error)
        except TrainingBegins:
            pass
        return True

    return accepts


def inside_and_outside(allowed: Setting) -> tuple[list[Any], list[Any]]:
    """Values at the ends of what is allowed, and just beyond."""
    if allowed.words:
        return list(allowed.words.values()), ["another"]
    whole, (low, above, high, below) = allowed.kind == "whole", allowed.bounds
    step, low = (1, int(low)) if whole else (1e-9, low)
    inside, outside = [low + step * above], [low - step * (not above)]
    if math.isinf(low):
        return [-1.0, 1.0], []
    if not math.isinf(high):
        inside.append(high - step * below)
        outside.append(high + step * (not below))
    return inside, outside


UNCHECKED = [("self_label", "min_confidence"), ("neighbour_label", "min_confidence")]  # of no use, and harmless
CASES = [(method, name) for method in KNOWN for name in flags.method_defaults(method) if name != "merge"]


@pytest.mark.parametrize(("method", "name"), CASES, ids=[".".join(case) for case in CASES])
def test_what_is_allowed_is_what_the_method_checks(
    method: str, name: str, accepts: Callable[[str, str, Any], bool]
) -> None:
    setting = SETTINGS.get(f"{method}.{name}") or SETTINGS[name]
    inside, outside = inside_and_outside(setting)
    assert [value for value in inside if not accepts(method, name, value)] == []
    if (method, name) not in UNCHECKED:
        assert [value for value in outside if accepts(method, name, value)] == []
    command, spelled = ("pretrain", f"{method}.{name}") if method in STAGES else ("train", name)
    for value in outside:
        with pytest.raises(InputError, match=f"{spelled} must be "):
            read_settings(command, [f"{spelled}={value}"], method)


@pytest.mark.parametrize("name", [name for name, value in asdict(TrainSettings()).items() if name != "device"])
def test_what_is_allowed_is_what_the_training_settings_check(name: str) -> None:
    allowed = SETTINGS[name]
    if set(allowed.words) == {"yes", "no"}:
        assert isinstance(getattr(TrainSettings(), name), bool | None)
        return
    inside, outside = inside_and_outside(allowed)
    for value in inside:
        TrainSettings(**{name: value})
    for value in outside:
        with pytest.raises(InputError, match=name):
            TrainSettings(**{name: value})
        with pytest.raises(InputError, match=f"{name} must be "):
            read_settings("train", [f"{name}={value}"])


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "abc", ""])
def test_what_is_no_number_is_refused(text: str) -> None:
    for name in ("lr", "weight_decay", "max_entropy", "steps", "entropy_weight"):
        with pytest.raises(ValueError):
            SETTINGS[name].read(text)


# Reading


def test_values_have_the_kind_of_their_setting_and_the_last_one_counts() -> None:
    texts = ["steps=5", "lr = 1e-3", "merge=yes", "compile=False", "links=hard", "head-steps=3", "steps=7"]
    assert read_settings("train", texts, "constraintmatch") == {
        **{"steps": 7, "lr": 1e-3, "merge": True, "compile": False},
        **{"links": "hard", "head_steps": 3},
    }


@pytest.mark.parametrize(
    ("command", "method", "text", "said"),
    [
        ("train", "constraintmatch", "max_entropi=0.3", "no setting 'max_entropi'; did you mean max_entropy?"),
        ("train", "constrained", "max_entropy=0.3", "constraintmatch settings constrained lists"),
        ("train", None, "foo", "--set foo: write a name, = and a value"),
        ("train", None, "max_entropy=3", "--set max_entropy=3: max_entropy must be 0 to 1"),
        ("train", None, "steps=1.5", "steps must be a whole number, 1 or more"),
        ("train", None, "on_conflict=ask", "on_conflict must be error, drop or keep"),
        ("train", None, "strict=maybe", "strict must be yes or no"),
        ("pretrain", None, "epochs=3", "did you mean simclr.epochs or byol.epochs or "),
        ("pretrain", None, "byol.epoch=3", "did you mean byol.epochs?"),
        ("pretrain", None, "byol.steps=3", "pretrain has no setting 'byol.steps'"),
        ("pretrain", None, "cc.temperature=1", "no setting 'cc.temperature': it is always 0.5; leave it out"),
        ("loop", None, "max_entropy=0.1", "loop has no setting 'max_entropy'"),
        ("search", None, "lr=0.1", "search has no setting 'lr'"),
    ],
)
def test_a_wrong_setting_is_answered_with_what_is_right(command: str, method: str | None, text: str, said: str) -> None:
    with pytest.raises(InputError) as refusal:
        read_settings(command, [text], method)
    assert said in str(refusal.value)


# Flags of before


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("train --max-entropy 0.3", "--max-entropy is now --set max_entropy=VALUE"),
        ("train --merge --lr 1", "--merge is now --set merge=yes"),
        ("train --no-compile", "--no-compile is now --set compile=no"),
        ("train --no-labels", "--no-labels is now --set labels=no"),
        ("train --backbone timm:resnet18", "--backbone is now --set backbone=VALUE"),
        ("train --no-flip", "--no-flip is now --no-mirror"),
        ("train --pool all", "--pool is gone: unconstrained images"),
        ("train --no-over-selected", "--no-over-selected is gone: "),
        ("train --pseudo-error-rate 0.1", "--pseudo-error-rate is now --error-rate"),
        ("pretrain --entropy-weight-linear-scan 1.2", "is now --set linear_scan.entropy_weight=VALUE"),
        ("pretrain --epochs-scan 5", "--epochs-scan is now --set scan.epochs=VALUE"),
        ("pretrain --bf16", "--bf16 is now --set bf16=yes"),
        ("pretrain --epochs-simsiam 5", "--epochs-simsiam is gone: "),
        ("pretrain --restarts-k-means 5", "--restarts-k-means is gone: "),
        ("pretrain --projection-simclr 64", "--projection-simclr is gone: it is always 128"),
        ("loop --error 0.1", "--error is now --set wrong=VALUE"),
        ("loop --last-steps 9", "--last-steps is now --set last_steps=VALUE"),
        ("search --without rotate", "--without is now --set without=VALUE"),
        ("sample --flip 0.1", "--flip is now --wrong"),
        ("evaluate --data cifar10", "--data is gone: its value is given alone"),
        ("check --images photos", "--images is gone: its value is given alone"),
    ],
)
def test_a_flag_of_before_is_answered_with_its_new_spelling(typed: str, said: str) -> None:
    command, *words = typed.split()
    assert said in str(new_spelling(command, words[0]))


@pytest.mark.parametrize("typed", ["train --every", "train --foo", "predict --flip", "predict --side", "loop --epochs"])
def test_a_flag_that_never_was_is_not_explained(typed: str) -> None:
    command, *words = typed.split()
    assert new_spelling(command, words[0]) is None
