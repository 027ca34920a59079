"""A method run by name: arguments checked, everything recorded in a run folder, finished runs not done again."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from constraintmatch.constraints import Constraints
from constraintmatch.errors import InputError
from constraintmatch.images import ImageSet
from constraintmatch.methods import METHODS, Job, Trained, ViewChoice
from constraintmatch.models import ClusterModel, build_model, load_model, save_model
from constraintmatch.progress import Quiet, Reporter
from constraintmatch.runs import open_run, read_log
from constraintmatch.training import TrainSettings

__all__ = [
    "QUICK",
    "Around",
    "check_kinds",
    "method_arguments",
    "method_settings",
    "rehearse_step",
    "run_method",
    "small_model",
    "split_options",
    "weights_hash",
]

QUICK: dict[str, Any] = {"device": "cpu", "compile": False, "cuda_graph": False, "bf16": False, "tensorboard": False}
NOT_ARGUMENTS = {"model", "images", "constraints", "settings", "views", "job"}


@dataclass(frozen=True)
class Around:
    """What surrounds a run: where it is kept, who is told, which views are safe, what it is evaluated on."""

    out: Path | None = None
    resume: bool = False
    reporter: Reporter = field(default_factory=Quiet)
    views: ViewChoice = field(default_factory=ViewChoice)
    held_out: ImageSet | None = None
    held_out_constraints: Constraints | None = None
    data: Mapping[str, Any] = field(default_factory=dict)  # where the images came from, for run.json
    stop: Callable[[], bool] = lambda: False  # asked after every step: True ends the training with a checkpoint

    def within(self, folder: str) -> "Around":
        """The same, one folder deeper."""
        return replace(self, out=self.out / folder if self.out else None)


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
    check_kinds(name, overrides or {}, asdict(TrainSettings()))
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


def run_method(
    name: str,
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    settings: TrainSettings | None = None,
    around: Around | None = None,
) -> Trained:
    """The trained model; with `around.out` it is kept there, resumed from there, and loaded from there if finished."""
    around = around or Around()
    chosen = _resolved(name, arguments or {})
    settings = settings or method_settings(name)
    given = {"constraints": constraints} if "constraints" in inspect.signature(METHODS[name]).parameters else {}
    if given and constraints is None:
        raise InputError(f"{name} needs constraints and there are none; sample or answer some pairs first")
    job = Job(None, around.reporter, around.held_out, around.held_out_constraints, stop=around.stop)
    if around.out is None:
        return METHODS[name](model, images, **given, **chosen, settings=settings, views=around.views, job=job)
    request = _request(name, model, images, constraints if given else None, chosen, settings, around)
    with open_run(around.out, request, resume=around.resume, since=_defaults(name), how=settings.how()) as run:
        if run.finished:
            return Trained(load_model(run.model), read_log(run.path))
        if constraints is not None and given:
            constraints.write(run.path / "pairs.csv", names=images.names)
        job = replace(job, run=run)
        trained, log = METHODS[name](model, images, **given, **chosen, settings=settings, views=around.views, job=job)
        if not read_log(run.path):  # a method without steps, like linear_scan, has no loop that would have logged
            for entry in log:
                run.log(entry)
        log = read_log(run.path)  # of earlier parts too, where the run was resumed
        stage = _stage(request, log[-1]["step"])
        trained.config = replace(trained.config, trained=(*trained.config.trained, stage))
        save_model(trained, run.model)
    run.checkpoint.unlink(missing_ok=True)  # not before the run is noted as finished: it would begin anew
    return Trained(trained, log)


def rehearse_step(
    name: str,
    n_clusters: int,
    images: ImageSet,
    constraints: Constraints | None,
    *,
    arguments: Mapping[str, Any],
    settings: TrainSettings,
    views: ViewChoice,
) -> None:
    """One step of a method on a few images with a small network: a wrong argument shows, and nothing is kept."""
    settings, around = replace(settings, steps=1, **QUICK), Around(views=views)
    model = small_model(n_clusters, images)
    run_method(name, model, images, constraints, arguments=arguments, settings=settings, around=around)


def small_model(n_clusters: int, images: ImageSet) -> ClusterModel:
    """A network that takes such images and is good for rehearsals only."""
    backbone = "tiny" if images.side > 1 else None
    return build_model(n_clusters=n_clusters, side=images.side, channels=images.channels, backbone=backbone)


def weights_hash(model: ClusterModel) -> str:
    """A short name of the weights: the same numbers have the same, on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().numpy().tobytes())  # in row order, whatever the memory format
    return digest.hexdigest()


def check_kinds(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
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
    check_kinds(name, chosen, {key: parameter.default for key, parameter in known.items()})
    return chosen


def _defaults(name: str) -> dict[str, Any]:
    """What a request of before an argument came up meant by leaving it out, by the entry's name."""
    known = method_arguments(name).items()
    empty = inspect.Parameter.empty
    return {f"arguments.{key}": parameter.default for key, parameter in known if parameter.default is not empty}


def _request(
    name: str,
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints | None,
    arguments: Mapping[str, Any],
    settings: TrainSettings,
    around: Around,
) -> dict[str, Any]:
    """What decides the result, as plain values: two equal requests give the same model."""
    return {
        "method": name,
        "arguments": dict(arguments),
        "settings": settings.request(),
        "views": around.views.request(),
        "data": {**around.data, "images": len(images), "fingerprint": images.fingerprint()},
        "constraints": _constraints_summary(constraints),
        "model": {"weights": weights_hash(model), **_architecture(model)},
    }


def _architecture(model: ClusterModel) -> dict[str, Any]:
    return {key: value for key, value in asdict(model.config).items() if key != "trained"}


def _constraints_summary(constraints: Constraints | None) -> dict[str, Any] | None:
    if constraints is None:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for part in (constraints.left, constraints.right, constraints.link, constraints.weight):
        digest.update(part.tobytes())
    return {"pairs": len(constraints), "must_links": constraints.n_must_links, "fingerprint": digest.hexdigest()}


def _stage(request: Mapping[str, Any], steps: int) -> dict[str, Any]:
    data = {key: request["data"][key] for key in ("name", "images", "fingerprint") if key in request["data"]}
    settings = {"steps": steps, "lr": request["settings"]["lr"], "seed": request["settings"]["seed"]}
    return {"method": request["method"], "data": data, **settings, "arguments": request["arguments"]}
