"""What a training is: one `TrainConfig`, made and checked here, recorded in `run.json`."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import DataSet
from constraintmatch.methods import METHODS, ViewChoice
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.pipeline.recipes import Recipe, training_size
from constraintmatch.training.loop import TrainSettings

__all__ = [
    "TrainConfig",
    "default_options",
    "make_config",
    "method_arguments",
    "method_settings",
    "split_options",
]

NOT_ARGUMENTS = {"model", "images", "constraints", "settings", "views", "context"}


@dataclass(frozen=True)
class TrainConfig:
    """What a training is; `make_config` makes and checks it, `run.json` records it."""

    method: str
    arguments: Mapping[str, Any]  # all arguments of the method, by name
    settings: TrainSettings
    start: ClusterModel  # what the training begins with; it is trained in place
    views: ViewChoice = field(default_factory=ViewChoice)
    stages: tuple[str, ...] = ()  # that give the start its clusters first
    stage_options: Recipe = field(default_factory=dict)
    n_clusters: int = 0  # that the stages find


def make_config(
    method: str,
    options: Mapping[str, Any] | None = None,
    *,
    start: ClusterModel,
    views: ViewChoice | None = None,
    stages: Sequence[str] = (),
    stage_options: Recipe | None = None,
    n_clusters: int = 0,
) -> TrainConfig:
    """The configuration of a training; what the method cannot use is an InputError.

    `options` are arguments of the method and training settings, by name; the method's defaults stand for the others.
    """
    arguments, changes = split_options(method, options or {})
    return TrainConfig(
        method,
        _resolved(method, arguments),
        method_settings(method, changes),
        start,
        views or ViewChoice(),
        tuple(stages),
        dict(stage_options or {}),
        n_clusters,
    )


def default_options(method: str, n_images: int, *, cpu: bool, row: DataSet | None = None) -> dict[str, Any]:
    """The options of a training where nothing is asked: by the number of images and the device, or the data set's own.

    The safe recipe is the default of every way in; `recipe="paper"` is the published method.
    """
    known, chosen = method_arguments(method), {"recipe": "safe", **training_size(n_images, cpu=cpu)}
    if row is not None:
        chosen.pop("warm_up")
        chosen |= {"pairs_per_step": row.pairs_per_step, "images_per_step": row.images_per_step}
        chosen |= {**row.tuned.get(method, {}), **({} if cpu else {"steps": method_settings(method).steps})}
    if "pairs_per_step" not in known:  # the bounds have a batch of their own
        chosen.pop("images_per_step")
    return {key: value for key, value in chosen.items() if key in known or key in TrainSettings.__dataclass_fields__}


def method_arguments(name: str) -> dict[str, inspect.Parameter]:
    """The keyword arguments that configure a method, by name."""
    if name not in METHODS:
        raise InputError(f"unknown method {name!r}; known are {', '.join(METHODS)}")
    parameters = inspect.signature(METHODS[name]).parameters
    return {key: value for key, value in parameters.items() if key not in NOT_ARGUMENTS}


def method_settings(name: str, overrides: Mapping[str, Any] | None = None) -> TrainSettings:
    """The method's own training settings with some of them changed; an unknown name is an error."""
    default = cast(TrainSettings, inspect.signature(METHODS[name]).parameters["settings"].default)
    known = {entry.name for entry in fields(TrainSettings)}
    if unknown := sorted((overrides or {}).keys() - known):
        raise InputError(f"unknown training setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
    _check_kinds(name, overrides or {}, asdict(TrainSettings()))
    return replace(default, **(overrides or {}))


def split_options(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a method as its own arguments and its training settings; an unknown name is an error.

    So are steps for a method that counts epochs: they follow from those, and what was asked would be passed over.
    """
    own = method_arguments(name)
    if "steps" in options and "epochs" in own:
        raise InputError(f"{name} counts epochs, not steps; ask for epochs={own['epochs'].default} or another number")
    known = {entry.name for entry in fields(TrainSettings)}
    if unknown := sorted(options.keys() - own.keys() - known):
        raise InputError(f"{name} has no option {unknown[0]!r}; it has {', '.join([*own, *sorted(known)])}")
    arguments = {key: value for key, value in options.items() if key in own}
    return arguments, {key: value for key, value in options.items() if key not in own}


def _check_kinds(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """A value of another kind than its default (a word for a number, half a step) is an InputError."""
    for key, value in values.items():
        if (kind := _KINDS.get(type(defaults.get(key)))) and not isinstance(value, kind.types):
            raise InputError(f"{name}: {key} is {value!r}; it must be {kind.words}")


class _Kind(NamedTuple):
    types: tuple[type, ...]
    words: str


_KINDS = {  # by the type of a default
    bool: _Kind((bool, np.bool_), "True or False"),
    int: _Kind((Integral,), "a whole number"),
    float: _Kind((Real,), "a number"),
    str: _Kind((str,), "a word"),
}


def _resolved(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    known = method_arguments(name)
    if unknown := sorted(arguments.keys() - known.keys()):
        raise InputError(f"{name} has no argument {unknown[0]!r}; it has {', '.join(known)}")
    chosen = {key: arguments.get(key, parameter.default) for key, parameter in known.items()}
    if missing := [key for key, value in chosen.items() if value is inspect.Parameter.empty]:
        raise InputError(f"{name} needs the argument {missing[0]!r}")
    _check_kinds(name, chosen, {key: parameter.default for key, parameter in known.items()})
    return chosen
