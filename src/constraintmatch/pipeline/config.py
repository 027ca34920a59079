"""What a training is: one `TrainConfig`, made and checked here; the stages of a start; sizes by default."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from typing import Any, cast

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import STEPS, DataSet
from constraintmatch.methods import METHODS, ViewChoice
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.loop import TrainSettings

STAGES = ("simclr", "scan", "self_label")  # the paper's start
SHORT_STAGES = ("simclr", "linear_scan")  # the start that a training makes when it has none
PRETEXTS = ("simclr", "byol", "propos", "cc", "pica", "mice", "tcc")  # ways to learn features; a start has one of them
ORDER = (*PRETEXTS, "linear_scan", "scan", "self_label", "neighbour_label")
CHAINS = {
    "scan": STAGES,
    "byol": ("byol", "scan", "self_label", "linear_scan"),
    "propos": ("propos", "scan", "self_label", "linear_scan"),
    "own": ("byol", "linear_scan", "neighbour_label", "linear_scan"),  # steady on few images (decisions 023 and 041)
    "short": SHORT_STAGES,
}
MOST_LR = 0.02  # of a round; with few answers a higher rate is unstable (docs/findings.md: 0.05 on digits)
Recipe = Mapping[str, Mapping[str, Any]]  # the arguments and training settings of each stage

_LARGEST = float(np.finfo(np.float32).max)
_BATCHES = ("images_per_step", "pairs_per_step", "n_neighbours", "n_tries", "hidden", "projection")
_MOST = 1_000_000  # of these: more is a mistake, and would fill the memory
_NOT_ARGUMENTS = {"model", "images", "constraints", "settings", "views", "context"}
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {  # by the type of a default
    bool: ((bool, np.bool_), "True or False"),
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    str: ((str,), "a word"),
}


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

    `options` are arguments of the method and training settings, by name; the others have the method's defaults.
    """
    arguments, settings = complete_options(method, options or {})
    recipe = dict(stage_options or {})
    return TrainConfig(method, arguments, settings, start, views or ViewChoice(), tuple(stages), recipe, n_clusters)


def complete_options(method: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], TrainSettings]:
    """All arguments of a method and its training settings, with these options; wrong ones are an InputError."""
    (given, changes), known = split_options(method, options), method_arguments(method)
    arguments = known | given
    if missing := [key for key, value in arguments.items() if value is inspect.Parameter.empty]:
        raise InputError(f"{method} needs the argument {missing[0]!r}")
    _check_kinds(method, arguments, known)
    return arguments, method_settings(method, changes)


def method_arguments(name: str) -> dict[str, Any]:
    """The keyword arguments that configure a method, with their defaults; `inspect.Parameter.empty` for none."""
    if name not in METHODS:
        raise InputError(f"unknown method {name!r}; known are {', '.join(METHODS)}")
    parameters = inspect.signature(METHODS[name]).parameters
    return {key: value.default for key, value in parameters.items() if key not in _NOT_ARGUMENTS}


def method_settings(name: str, overrides: Mapping[str, Any] | None = None) -> TrainSettings:
    """The method's own training settings with some of them changed; an unknown name is an error."""
    default = cast(TrainSettings, inspect.signature(METHODS[name]).parameters["settings"].default)
    known, overrides = asdict(TrainSettings()), overrides or {}
    if unknown := sorted(overrides.keys() - known.keys()):
        raise InputError(f"unknown training setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
    _check_kinds(name, overrides, known)
    return replace(default, **overrides)


def split_options(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a method as its own arguments and its training settings; an unknown name is an error.

    So are steps for a method that counts epochs: they follow from the epochs.
    """
    own, known = method_arguments(name), asdict(TrainSettings())
    if "steps" in options and "epochs" in own:
        raise InputError(f"{name} counts epochs, not steps; ask for epochs={own['epochs']} or another number")
    if unknown := sorted(options.keys() - own.keys() - known.keys()):
        raise InputError(f"{name} has no option {unknown[0]!r}; it has {', '.join([*own, *sorted(known)])}")
    arguments = {key: value for key, value in options.items() if key in own}
    return arguments, {key: value for key, value in options.items() if key not in own}


def _check_kinds(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """A value of another kind than its default (a word for a number, half a step) is an InputError."""
    for key, value in values.items():
        types, words = _KINDS.get(type(defaults[key]), ((object,), ""))
        if not isinstance(value, types):
            raise InputError(f"{name}: {key} is {value!r}; it must be {words}")
        if isinstance(value, float) and not abs(value) <= _LARGEST:  # NaN neither
            raise InputError(f"{name}: {key} is {value}; it must be a number that 32 bits hold")
        if key in _BATCHES and isinstance(value, int) and value > _MOST:
            raise InputError(f"{name}: {key} is {value:,}; it must be at most {_MOST:,}")


def check_neighbours(stage: str, options: Mapping[str, Any], n_images: int) -> None:
    """More neighbours than an image has others, where somebody asks for them, are an InputError."""
    if (n := options.get("n_neighbours", 0)) >= n_images:
        raise InputError(f"{stage}: n_neighbours is {n:,}; an image has {n_images - 1:,} others", fix="ask for fewer")


# Where nothing is asked


def default_options(method: str, n_images: int, *, cpu: bool, row: DataSet | None = None) -> dict[str, Any]:
    """The options of a training where nothing is asked: by the number of images and the device, or the data set's own.

    The safe recipe is the default of every way in; `recipe="paper"` is the published method.
    """
    known, chosen = method_arguments(method), {"recipe": "safe", **training_size(n_images, cpu=cpu, row=row)}
    if row is not None:
        chosen |= row.tuned.get(method, {})
    if "pairs_per_step" not in known:  # the bounds have a batch of their own
        chosen.pop("images_per_step")
    return {key: value for key, value in chosen.items() if key in known or key in TrainSettings.__dataclass_fields__}


def own_start(n_images: int, asked: Recipe, *, cpu: bool) -> Recipe:
    """The recipe of the short start with what is asked of its stages; another pretext task keeps its epochs."""
    settings = TrainSettings.__dataclass_fields__.keys() - {"device", "seed", "steps"}  # steps follow from the epochs
    for stage, options in asked.items():
        if not isinstance(options, Mapping):
            raise InputError(f"options: {stage} is {options!r}; give a dictionary, such as {{'epochs': 20}}")
        known = method_arguments(stage).keys() - {"n_clusters"} | settings
        if unknown := sorted(options.keys() - known):
            raise InputError(f"options: {stage} knows no {unknown[0]!r}; it knows {', '.join(sorted(known))}")
    short: Recipe = short_start(n_images, cpu=cpu)
    if other := [stage for stage in asked if stage in PRETEXTS and stage not in short]:
        short = {other[0] if stage in PRETEXTS else stage: options for stage, options in short.items()}
    return {stage: {**short.get(stage, {}), **asked.get(stage, {})} for stage in ORDER if stage in {*short, *asked}}


def training_size(n_images: int, *, cpu: bool, row: DataSet | None = None) -> dict[str, Any]:
    """Batches, steps, rate and warm-up of a training on pairs, for a set of this size where nothing else is known.

    An eighth of the images a step, from 150 to the paper's 600 (on a CPU 150), and a third as many pairs; sixty
    passes over the images, from 500 steps to the paper's 20,000 (on a CPU 1,000); the paper's rate of 0.01, since 0.03
    ruins a strong start (decision 042). Pairs come first and pseudo-constraints later: a short start is a weak one,
    and pseudo-constraints confirm what it has wrong (docs/findings.md). A data set of the paper has its batches and,
    but on a CPU, its steps; no warm-up.
    """
    batch = min(150 if cpu else 600, max(150, n_images // 8))
    steps = int(min(1_000 if cpu else 20_000, max(500, 60 * n_images / batch)))
    size = {"images_per_step": batch, "pairs_per_step": batch // 3, "steps": steps, "lr": 0.01, "warm_up": 0.5}
    if row is not None:
        size.pop("warm_up")
        size |= {"images_per_step": row.images_per_step, "pairs_per_step": row.pairs_per_step}
        size |= {} if cpu else {"steps": STEPS}
    return size


def round_size(n_images: int, *, cpu: bool) -> dict[str, Any]:
    """The same for a round between questions, which is short because people wait."""
    return training_size(n_images, cpu=cpu) | {"steps": 300 if cpu else 1_000}


def short_start(n_images: int, *, cpu: bool) -> dict[str, dict[str, Any]]:
    """The recipe of the start that a training makes when it has none: minutes for a folder, on a CPU too.

    At least 160 steps of SimCLR for any number of images, on a CPU not more; then clusters by linear heads on the
    frozen features: seconds, and nothing to tune (decision 014).
    """
    epochs = -(-160 // max(1, n_images // 256))
    return {"simclr": {"epochs": epochs if cpu else max(60, epochs), "images_per_step": 256}, "linear_scan": {}}


def chain_stages(chain: str, stages: Sequence[str] = (), pretext: str | None = None) -> tuple[str, ...]:
    """The stages of a chain by its name, or the given ones; `pretext` takes the place of their pretext task."""
    if not stages and chain not in CHAINS:
        raise InputError(f"unknown chain {chain!r}; known are {', '.join(CHAINS)}")
    if pretext not in (None, *PRETEXTS):
        raise InputError(f"unknown pretext task {pretext!r}; known are {', '.join(PRETEXTS)}")
    return tuple(pretext if pretext and stage in PRETEXTS else stage for stage in stages or CHAINS[chain])
