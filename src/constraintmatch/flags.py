"""Command-line flags from the signatures of the methods and the fields of `TrainSettings`.

The signatures are read from the source text, not by importing it: torch takes seconds to import, and help should not. A
test holds that what is read here is what `running.method_arguments` says.
"""

import ast
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from constraintmatch.progress import say_error
from constraintmatch.runs import GONE

__all__ = [
    "Argument",
    "GroupedHelp",
    "OneLineErrors",
    "add_flags",
    "flag",
    "method_flags",
    "methods",
    "settings_flags",
    "stage_flags",
]

# What `pretrain` can run; `train` runs the other methods.
STAGES = ("simclr", "byol", "linear_scan", "scan", "self_label", "neighbour_label")
_NOT_FLAGS = {"n_clusters", "settings", "views", "job", "pseudo_error_rate"}  # n_clusters is --clusters
_INSTEAD = {  # what there is in the place of flags that there were
    **{name: said for name, (_, said) in GONE.items()},
    "k_means": "the stage linear_scan finds better clusters as fast",
    "pseudo_error_rate": "--error-rate is for pairs and pseudo-constraints alike",
    "simsiam": "the stage byol learns better features",
}
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
_MEANINGS = {
    "averaged": "Share of the steps, the last ones, whose weights are averaged.",
    "bf16": "Compute in bfloat16 where that is safe.",
    "channels_last": "Keep channels last in memory.",
    "checkpoint_every": "Steps between checkpoints.",
    "clip_norm": "Largest gradient norm.",
    "compile": "Compile the network with torch.compile.",
    "cuda_graph": "Replay a step as one CUDA graph.",
    "device": "cuda, mps or cpu.",
    "ema": "Keep an average of the weights with this decay.",
    "entropy_weight": "Weight of the term that spreads images over clusters.",
    "epochs": "Passes over the images.",
    "error_rate": "Share of the pairs thought to be wrong. (estimated, by the safe recipe)",
    "head_steps": "Steps in which the head alone learns, before the network does.",
    "evaluate_every": "Steps between evaluations.",
    "flip_between": "Which two clusters are swapped: largest or any.",
    "flip_fraction": "ρ: share of guesses with two clusters swapped (robustness study).",
    "hard_threshold": "μ: links from here on are must-links, with --links hard.",
    "hidden": "Width inside projector and predictor.",
    "images_per_step": "Images in a step.",
    "links": "Pseudo-constraints: soft or hard.",
    "log_every": "Steps between lines of log.jsonl.",
    "lr": "Learning rate.",
    "max_entropy": "τ: images with a normalized entropy under it take part.",
    "merge": "First merge clusters that the pairs say are one: for --clusters that are too many.",
    "min_confidence": "τ: guesses with this confidence or more take part.",
    "momentum": "Momentum of sgd.",
    "most_images": "Images that take part at most.",
    "n_neighbours": "Neighbours of an image.",
    "n_tries": "Linear heads tried on the frozen features; 0: begin at random.",
    "optimizer": "sgd or adam.",
    "pairs_per_step": "Constrained pairs in a step.",
    "projection": "Width of the projection head.",
    "predictor_rate": "The predictor's learning rate as a multiple of the others'.",
    "pseudo_weight": "λ: weight of the unconstrained images' loss.",
    "recipe": "safe: keep the start unless held-out pairs say that training is better; paper: as published.",
    "reach": "How far what is known of an image counts: nearer to 1, further.",
    "reliable": "Share of each cluster's images whose labels teach: those whose neighbours agree.",
    "rest_weight": "Weight of the images that the model is sure of.",
    "schedule": "Learning rate over time: cosine-7/16, cosine, cosine-warm or constant.",
    "seed": "Seed of everything random in the run.",
    "selection": "Images that take part, by entropy or confidence.",
    "steps": "Training steps; at most 1,000 without a GPU.",
    "target_momentum": "τ: the target network's momentum at first; it rises to 1.",
    "temperature": "Temperature of the contrast.",
    "tensorboard": "Write TensorBoard files too.",
    "tolerance": "How far the label-free quality may fall under its best; 1 keeps the last weights.",
    "warm_up": "Share of the steps over which λ rises from zero.",
    "weight_decay": "Weight decay.",
}


# What `train` chooses by the number of images where nothing else is asked; a data set of the paper has its own.
_FITTED = {
    "evaluate_every": "a tenth of the steps",
    "images_per_step": "an eighth of the images, 150 to 600",
    "log_every": "a twentieth of the steps, at most 100",
    "lr": "0.01",
    "pairs_per_step": "a third of the images in a step",
    "recipe": "safe",
    "steps": "500 to 20,000, by the number of images",
    "warm_up": "0.5",
}


class GroupedHelp(TyperCommand):
    """A command whose plain help has a heading for each panel; rich's boxes cut names short in a narrow terminal."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=26)


class OneLineErrors(TyperGroup):
    """The commands, where a mistake in the words of a command is one line too, and not four."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            code = super().main(*arguments, **{**options, "standalone_mode": False})
        except typer.Abort:
            code = say_error("stopped", 130)
        except BrokenPipeError:  # the reader had enough, as head has
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 (else Python complains when it flushes at the end)
            code = 1
        except Exception as error:
            code = _usage_error(error)
        sys.exit(code if isinstance(code, int) else 0)


def _usage_error(error: Exception) -> int:
    """Say a usage error of typer's parser (old ones have click's own), and its exit code; a bug is raised again."""
    said = getattr(error, "format_message", None)
    if said is None:
        raise error
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(said(), err=True)
        return 2
    more = f" (see {context.command_path} --help)" if context is not None else ""
    flag = str(getattr(error, "option_name", ""))
    if instead := _instead(flag):
        return say_error(f"error: {flag} is gone: {instead}{more}", 2)
    text = said().strip().rstrip(".")
    return say_error(f"error: {text[:1].lower()}{text[1:]}{more}", 2)


def _instead(flag: str) -> str | None:
    """What there is in the place of a flag of earlier versions; None for one that never was."""
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    return next((said for gone, said in _INSTEAD.items() if name.startswith(gone) or name.endswith(f"_{gone}")), None)


@dataclass(frozen=True)
class Argument:
    """A keyword argument as its source has it: the type (int, float, str, bool) and the default (... for none)."""

    name: str
    kind: type
    default: Any


@cache
def methods() -> dict[str, dict[str, Argument]]:
    """The arguments of every method, by method and name."""
    tree = ast.parse(_source("methods", "__init__.py"))
    table = next(node for node in tree.body if isinstance(node, ast.AnnAssign))  # METHODS = {"name": function, …}
    assert isinstance(table.value, ast.Dict)
    names = [str(key.value) for key in table.value.keys if isinstance(key, ast.Constant)]
    return {name: _arguments(name) for name in names}


def _arguments(method: str) -> dict[str, Argument]:
    tree = ast.parse(_source("methods", f"{method}.py"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == method)
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {arg.arg: _argument(arg.arg, arg.annotation, value) for arg, value in pairs if arg.arg not in _NOT_FLAGS}


@cache
def _settings() -> dict[str, Argument]:
    tree = ast.parse(_source("training.py"))
    group = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainSettings")
    fields = [node for node in group.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: _argument(node.target.id, node.annotation, node.value) for node in fields}  # type: ignore[union-attr]


def _argument(name: str, annotation: ast.expr | None, default: ast.expr | None) -> Argument:
    kind = ast.unparse(annotation).removesuffix(" | None") if annotation else "str"
    return Argument(name, _TYPES[kind], ... if default is None else ast.literal_eval(default))


def _source(*path: str) -> str:
    return files("constraintmatch").joinpath(*path).read_text(encoding="utf-8")


def method_flags() -> dict[str, Any]:
    """One flag for each argument that a method of `train` has; the help names the methods and their defaults."""
    owners: dict[str, dict[str, Argument]] = {}
    for method, arguments in methods().items():
        for name, argument in arguments.items() if method not in STAGES else ():
            owners.setdefault(name, {})[method] = argument
    return {
        name: flag(name, next(iter(of.values())).kind, _owned(name, of), "Method", meaning=name)
        for name, of in owners.items()
    }


def _owned(name: str, owners: Mapping[str, Argument]) -> str:
    """`constraintmatch, pseudo_label: 1.0`, grouped by default; where that is nothing, the methods alone."""
    groups: dict[str, list[str]] = {}
    for method, argument in owners.items():
        fitted = _FITTED.get(name) if "pairs_per_step" in methods()[method] else None
        groups.setdefault(fitted or _shown(argument.default), []).append(method)
    return "; ".join(", ".join(names) + (f": {default}" if default else "") for default, names in groups.items())


def _shown(default: Any) -> str:
    if default is None or default is False:
        return ""
    return f"{default:,}" if isinstance(default, int) else str(default)


def settings_flags(names: Iterable[str] | None = None) -> dict[str, Any]:
    """One flag for each training setting, with what `train` makes of it; or for these."""
    chosen = {name: _settings()[name] for name in names or _settings()}
    shown = {name: _shown(value.default) for name, value in chosen.items()} | ({} if names else _FITTED)
    return {name: flag(name, value.kind, shown[name], "Training", meaning=name) for name, value in chosen.items()}


def stage_flags() -> dict[str, Any]:
    """`epochs_simclr` and so on: one flag for each argument of each stage of `pretrain`."""
    found = {}
    for stage in STAGES:
        for name, argument in methods()[stage].items():
            full, shown = f"{name}_{stage}", _shown(argument.default)
            found[full] = flag(full, argument.kind, shown, f"Stage {stage}", meaning=name)
    return found


def flag(name: str, kind: type, shown: str, panel: str, *, meaning: str) -> Any:
    """The annotation of an optional flag; None, when it is not given, leaves the method its own value."""
    spelled = "--" + name.replace("_", "-")
    names = [f"{spelled}/--no-{spelled[2:]}"] if kind is bool else [spelled]
    said = " ".join(filter(None, (_MEANINGS.get(meaning, ""), f"({shown})" if shown else "")))
    return Annotated[kind | None, typer.Option(*names, help=said, rich_help_panel=panel, show_default=False)]


def add_flags(**groups: Mapping[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator that gives a command more flags; each group of those that were given arrives as one dictionary."""

    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in groups]
        kind = inspect.Parameter.KEYWORD_ONLY
        new = [inspect.Parameter(n, kind, default=None, annotation=a) for of in groups.values() for n, a in of.items()]

        def wrapper(**values: Any) -> None:
            given = {
                group: {name: value for name in of if (value := values.pop(name)) is not None}
                for group, of in groups.items()
            }
            command(**values, **given)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature([p.replace(kind=kind) for p in own] + new)  # type: ignore[attr-defined]
        return wrapper

    return decorate
