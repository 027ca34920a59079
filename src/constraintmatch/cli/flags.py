"""Every setting that `--set name=value` takes: what it means, what it may be, and its default.

Names and defaults are the methods' own. They are read from the source text, because importing torch takes seconds and
help should not. Tests hold that what is read here is what the methods have, and that the ranges are those they check.
"""

import ast
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from constraintmatch._internal.errors import InputError
from constraintmatch.training.run_folder import GONE

__all__ = [
    "METHODS",
    "SETTINGS",
    "STAGES",
    "Range",
    "Setting",
    "check_names",
    "method_defaults",
    "new_spelling",
    "read_settings",
    "setting_tables",
    "settings_of",
    "split_settings",
    "training_defaults",
]

METHODS = ("constraintmatch", "pseudo_label", "constrained", "propagate", "fully_constrained", "supervised")
STAGES = ("simclr", "byol", "linear_scan", "scan", "self_label", "neighbour_label")


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; `above` and `below` leave an end out."""

    low: float
    high: float = math.inf
    whole: bool = False
    above: bool = False
    below: bool = False

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"{self.low:g}"
        if math.isinf(self.low):
            return "any number"
        if math.isinf(self.high):
            return low if self.above else f"{low} or more"
        high = f"2**{int(self.high).bit_length()} - 1" if self.whole else f"{self.high:g}"
        return f"{low} to below {high}" if self.below else f"{low} to {high}"

    def read(self, text: str) -> float:
        """The number; a ValueError where it is none or outside."""
        number = int(text) if self.whole else float(text)
        inside = (self.low < number if self.above else self.low <= number) and number <= self.high
        if not inside or math.isinf(number) or (self.below and number == self.high):
            raise ValueError(text)
        return number


class Setting(NamedTuple):
    """What a setting may be (numbers, some words, or any text), its meaning, and what `train` takes by itself."""

    allowed: Range | Mapping[str, Any] | str
    meaning: str
    default: str = ""

    @property
    def form(self) -> str:
        """What is allowed, in words."""
        if not isinstance(self.allowed, Mapping):
            return str(self.allowed)
        *words, last = self.allowed
        return f"{', '.join(words)} or {last}"

    def read(self, text: str) -> Any:
        """The value of a text; a ValueError where it is not allowed."""
        if isinstance(self.allowed, Range):
            return self.allowed.read(text)
        if isinstance(self.allowed, str):
            return text
        word = {"true": "yes", "false": "no"}.get(text.lower(), text)
        if word not in self.allowed:
            raise ValueError(text)
        return self.allowed[word]


def _words(*words: str) -> dict[str, str]:
    return {word: word for word in words}


_SHARE, _COUNT, _POSITIVE = Range(0, 1), Range(1, whole=True), Range(0, above=True)
_YES = {"yes": True, "no": False}

# The arguments of the methods, of pretrain's stages too.
_ARGUMENTS = {
    "averaged": Setting(_SHARE, "Share of the steps, the last ones, whose weights are averaged."),
    "entropy_weight": Setting(Range(-math.inf), "Weight of the term that spreads images over clusters."),
    "epochs": Setting(_COUNT, "Passes over the images."),
    "error_rate": Setting(Range(0, 0.5, below=True), "Share of the pairs that are wrong.", "safe recipe: estimated"),
    "flip_between": Setting(_words("largest", "any"), "Which two clusters flip_fraction swaps."),
    "flip_fraction": Setting(_SHARE, "ρ: share of guesses with two clusters swapped (robustness study)."),
    "hard_threshold": Setting(_SHARE, "μ: with links=hard, links from here on are must-links."),
    "head_steps": Setting(Range(0, whole=True), "Steps in which the head learns alone, before the network does."),
    "hidden": Setting(_COUNT, "Width inside projector and predictor."),
    "images_per_step": Setting(_COUNT, "Images in a step.", "fits the images: 150 to 600"),
    "links": Setting(_words("soft", "hard"), "Pseudo-constraints: probabilities, or yes and no."),
    "max_entropy": Setting(_SHARE, "τ: images with a normalized entropy below it take part."),
    "merge": Setting(_YES, "First merge clusters that the pairs join. For a number of clusters that is too high."),
    "min_confidence": Setting(_SHARE, "τ: images with this confidence or more take part."),
    "most_images": Setting(Range(2, whole=True), "Use at most this number of images."),
    "n_neighbours": Setting(_COUNT, "Neighbours of an image."),
    "n_tries": Setting(_COUNT, "Linear heads to try on the frozen features."),
    "pairs_per_step": Setting(_COUNT, "Constrained pairs in a step.", "1/3 of the images in a step"),
    "predictor_rate": Setting(_POSITIVE, "Learning rate of the predictor, as a multiple of lr."),
    "projection": Setting(_COUNT, "Width of the projection head."),
    "pseudo_weight": Setting(Range(0), "λ: weight of the loss on images without pairs."),
    "reach": Setting(Range(0, 1, below=True), "How far an answer spreads: further the nearer to 1."),
    "recipe": Setting(
        _words("safe", "paper"),
        "safe: keep the start unless held-out pairs say that training is better. paper: as published.",
        "safe",
    ),
    "reliable": Setting(_SHARE, "Share of each cluster that teaches: the images whose neighbours agree most."),
    "rest_weight": Setting(Range(0), "Weight of the other images that the model is sure of."),
    "selection": Setting(_words("entropy", "confidence"), "How the images that take part are selected."),
    "target_momentum": Setting(_SHARE, "τ: momentum of the target network at first; it rises to 1."),
    "temperature": Setting(_POSITIVE, "Temperature of the contrast."),
    "tolerance": Setting(_SHARE, "How far the label-free quality may fall below its best; 1 keeps the last weights."),
    "warm_up": Setting(_SHARE, "Share of the steps over which λ rises from zero.", "0.5"),
}
# Where a stage allows less than others, or more.
_STAGE_ARGUMENTS = {
    "byol.images_per_step": _ARGUMENTS["images_per_step"]._replace(allowed=Range(4, whole=True)),
    "byol.projection": _ARGUMENTS["projection"]._replace(allowed=Range(2, whole=True)),
    "scan.n_tries": Setting(Range(0, whole=True), "As linear_scan.n_tries; 0: begin with a random head."),
    "simclr.images_per_step": _ARGUMENTS["images_per_step"]._replace(allowed=Range(2, whole=True)),
}
# The fields of TrainSettings.
_TRAINING = {
    "steps": Setting(_COUNT, "Training steps.", "fits the images: 500 to 20,000"),
    "lr": Setting(_POSITIVE, "Learning rate."),
    "optimizer": Setting(_words("sgd", "adam"), "Optimizer."),
    "momentum": Setting(Range(0, 1, below=True), "Momentum of sgd."),
    "weight_decay": Setting(Range(0), "Weight decay."),
    "schedule": Setting(_words("cosine-7/16", "cosine", "cosine-warm", "constant"), "Learning rate over time."),
    "clip_norm": Setting(_POSITIVE, "Largest gradient norm."),
    "ema": Setting(Range(0, 1, above=True, below=True), "Keep an average of the weights with this decay."),
    "seed": Setting(Range(0, 2**64 - 1, whole=True), "Seed of everything random."),
    "device": Setting("cuda, mps or cpu", "Where to compute.", "the first there is"),
    "bf16": Setting(_YES, "Compute in bfloat16 where that is safe.", "on CUDA"),
    "channels_last": Setting(_YES, "Keep channels last in memory.", "not on MPS"),
    "compile": Setting(_YES, "Compile the network with torch.compile.", "on CUDA"),
    "cuda_graph": Setting(_YES, "Replay a step as one CUDA graph.", "on CUDA"),
    "log_every": Setting(_COUNT, "Steps between lines of log.jsonl.", "1/20 of the steps, at most 100"),
    "evaluate_every": Setting(_COUNT, "Steps between evaluations.", "1/10 of the steps; pretrain: none"),
    "checkpoint_every": Setting(_COUNT, "Steps between checkpoints."),
    "tensorboard": Setting(_YES, "Write TensorBoard files too."),
}
# How images and pairs are read, and which network begins.
_IMAGES = {
    "backbone": Setting("tiny, resnet18, resnet34 or timm:NAME", "The network.", "fits the images"),
    "pretrained": Setting(_YES, "Begin with the weights of a timm backbone.", "no"),
    "side": Setting(_COUNT, "Resize images to this number of pixels a side.", "fits the images"),
    "channels": Setting({"1": 1, "3": 3}, "1 for grey images, 3 for colour.", "fits the images"),
    "labels": Setting(_YES, "Sub-folders are classes, for scores.", "if all images are in some"),
    "strict": Setting(_YES, "Stop at a file that cannot be read.", "no: skip it"),
    "without": Setting("rotate or others, with commas", "Changes that would spoil the images.", "none"),
}
_PAIRS = {
    "on_conflict": Setting(
        _words("error", "drop", "keep"), "What to do with contradictions.", "drop; recipe=paper: error"
    ),
    "close": Setting(_YES, "Add the pairs that the pairs imply.", "no"),
    "holdout_pairs": Setting(Range(0, 1, below=True), "Share of the pairs set aside to judge the model.", "0"),
}
_ROUNDS = {
    "every": Setting(_COUNT, "Answers between two rounds of training.", "25"),
    "last_steps": Setting(_COUNT, "Training steps after the last answer.", "as steps"),
    "choose": Setting(_words("recommended", "uncertain", "random"), "How questions are chosen.", "recommended"),
}
SETTINGS: Mapping[str, Setting] = {**_ARGUMENTS, **_STAGE_ARGUMENTS, **_TRAINING, **_IMAGES, **_PAIRS, **_ROUNDS}

_EVERY_STAGE = (
    *("seed", "device", "bf16", "channels_last", "compile", "cuda_graph"),
    *("log_every", "evaluate_every", "checkpoint_every", "tensorboard"),
)
_LOOP = (*_IMAGES, *_ROUNDS, "steps", "seed")
_SEARCH = ("without", "holdout_pairs")


# Names and defaults, from the source


@cache
def method_defaults(method: str) -> dict[str, Any]:
    """The arguments of a method and their defaults."""
    function = _function(method)
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {arg.arg: ast.literal_eval(value) for arg, value in pairs if value is not None and arg.arg in _ARGUMENTS}


@cache
def training_defaults(method: str = "constraintmatch") -> dict[str, Any]:
    """The training settings of a method."""
    tree = _parsed("training", "loop.py")
    group = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainSettings")
    fields = [node for node in group.body if isinstance(node, ast.AnnAssign) and node.value is not None]
    found = {ast.unparse(node.target): ast.literal_eval(node.value) for node in fields if node.value}
    arguments = _function(method).args
    default = dict(zip([arg.arg for arg in arguments.kwonlyargs], arguments.kw_defaults, strict=True))["settings"]
    if isinstance(default, ast.Name):  # SETTINGS = TrainSettings(lr=…) in the same file
        named = [node for node in _parsed(*_folder(method), f"{method}.py").body if isinstance(node, ast.Assign)]
        default = next(node.value for node in named if ast.unparse(node.targets[0]) == default.id)
    assert isinstance(default, ast.Call)
    return found | {str(word.arg): ast.literal_eval(word.value) for word in default.keywords}


def _function(method: str) -> ast.FunctionDef:
    if method not in (*METHODS, *STAGES):
        raise InputError(f"unknown method {method!r}; known are {', '.join((*METHODS, *STAGES))}")
    tree = _parsed(*_folder(method), f"{method}.py")
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == method)


@cache
def _parsed(*path: str) -> ast.Module:
    return ast.parse(files("constraintmatch").joinpath(*path).read_text(encoding="utf-8"))


# What a command takes


def settings_of(command: str, method: str | None = None) -> list[str]:
    """The names that `--set` of a command takes; `train` without a method has those of all."""
    if command == "loop":
        return list(_LOOP)
    if command == "search":
        return list(_SEARCH)
    if command == "pretrain":
        return [*_IMAGES, *_EVERY_STAGE, *(f"{stage}.{name}" for stage in STAGES for name in _stage_settings(stage))]
    if command != "train":
        return []
    own = dict.fromkeys(name for known in (METHODS if method is None else (method,)) for name in method_defaults(known))
    return [*own, *_TRAINING, *_IMAGES, *_PAIRS]


def _stage_settings(stage: str) -> dict[str, Any]:
    """The arguments and training settings of a stage; one that counts epochs has no steps."""
    own = method_defaults(stage)
    return own | {
        name: value for name, value in training_defaults(stage).items() if name != "steps" or "epochs" not in own
    }


def read_settings(texts: Iterable[str], known: Sequence[str], title: str) -> dict[str, Any]:
    """The values of `name=value` texts by name, checked; of a name that comes again the last."""
    found: dict[str, Any] = {}
    for text in texts:
        name, mark, value = (part.strip() for part in text.partition("="))
        if not mark:
            raise InputError(f"--set {text}: write a name, = and a value, for example --set {known[0]}=VALUE")
        name = name.replace("-", "_")
        check_names([name], known, title)
        setting = _setting(name)
        try:
            found[name] = setting.read(value)
        except ValueError:
            kind = "a whole number, " if isinstance(setting.allowed, Range) and setting.allowed.whole else ""
            raise InputError(f"--set {name}={value}: {name} must be {kind}{setting.form}") from None
    return found


def split_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The arguments of a method, the training settings, and what is left: how images and pairs are read."""
    groups = [{name: given[name] for name in group if name in given} for group in (_ARGUMENTS, _TRAINING)]
    return groups[0], groups[1], {name: given[name] for name in given if name not in groups[0] | groups[1]}


def _setting(name: str) -> Setting:
    return SETTINGS.get(name) or SETTINGS[name.rpartition(".")[2]]


def check_names(names: Iterable[str], known: Sequence[str], title: str) -> None:
    """A name that is not known is an InputError that names the nearest ones."""
    for name in names:
        if name not in known:
            near = [one for one in known if one.endswith(f".{name}")] or difflib.get_close_matches(name, known, n=1)
            lists = f"constraintmatch settings{f' {title}' if title in METHODS else ''} lists what there is"
            raise InputError(
                f"{title} has no setting {name!r}; " + (f"did you mean {' or '.join(near)}?" if near else lists)
            )


# Flags of before

_MOVED = {
    ("loop", "--error"): "--wrong",
    ("sample", "--flip"): "--wrong",
    ("sample", "--flip-only"): "--wrong-only",
    ("train", "--pseudo-error-rate"): "--error-rate",
    ("", "--flip"): "--mirror",
    ("", "--no-flip"): "--no-mirror",
}
_GONE = {  # of earlier versions, and what there is now
    **{name: said for name, (_, said) in GONE.items()},
    "k_means": "the stage linear_scan finds better clusters as fast",
    "simsiam": "the stage byol learns better features",
}


def new_spelling(command: str, flag: str, words: Sequence[str]) -> str | None:
    """How a flag of before is spelled now, with the value that it has among the words; None for one that never was."""
    value, known = _value_of(flag, words), settings_of(command)
    if flag == "--data" or (command, flag) == ("check", "--images"):
        return f"{flag} {value} is now {value} alone"
    if moved := _MOVED.get((command, flag)) or (_MOVED.get(("", flag)) if known else None):
        return f"{flag} is now {moved}"
    name = flag.removeprefix("--").replace("-", "_")
    if known and (said := next((said for gone, said in _GONE.items() if f"_{gone}_" in f"_{name}_"), None)):
        return f"{flag} is gone: {said}"
    stage = max((one for one in STAGES if command == "pretrain" and name.endswith(f"_{one}")), key=len, default="")
    plain = name.removesuffix(f"_{stage}")
    for own, said in ((plain, value), (plain.removeprefix("no_"), "no")):
        spelled = f"{stage}.{own}" if stage else own
        if spelled in known:
            yes = _setting(spelled).allowed is _YES and said != "no"
            return f"{flag} is now --set {spelled}={'yes' if yes else said}"
    return None


def _value_of(flag: str, words: Sequence[str]) -> str:
    for word, following in zip(words, [*words[1:], "VALUE"], strict=False):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and not following.startswith("--"):
            return following
    return "VALUE"


# The tables that `constraintmatch settings` shows


def setting_tables(method: str | None = None) -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """Titles, and rows of name, default, what is allowed, meaning: of one method or stage, or of all."""
    for one in METHODS if method is None else (method,):
        if one not in STAGES:
            fitted = "pairs_per_step" in method_defaults(one)  # the bounds have a batch of their own
            yield f"Method {one}", list(_rows(method_defaults(one), fitted=fitted))
    if method not in STAGES:
        yield "Every training", list(_rows(training_defaults(), fitted=True))
        yield "Images: train, pretrain and loop", list(_rows(dict.fromkeys(_IMAGES), fitted=True))
        yield "Pairs: train", list(_rows(dict.fromkeys(_PAIRS), fitted=True))
    if method is None:
        yield "Rounds: loop, which has steps and seed too", list(_rows(dict.fromkeys(_ROUNDS), fitted=True))
    for stage in STAGES if method is None else (method,):
        if stage in STAGES:
            own = method_defaults(stage) if method is None else _stage_settings(stage)
            title = f"Stage {stage}: pretrain --set {stage}.NAME=VALUE"
            yield title, list(_rows(own, fitted=False, stage=stage))


def _rows(defaults: Mapping[str, Any], *, fitted: bool, stage: str = "") -> Iterator[tuple[str, str, str, str]]:
    for name, default in defaults.items():
        setting = _setting(f"{stage}.{name}")
        text = setting.default if fitted or default is None else ""
        yield name, text or _shown(default), setting.form, setting.meaning


def _shown(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return {None: "none", True: "yes", False: "no"}[default]
    return f"{default:,}" if isinstance(default, int) else str(default)


def _folder(method: str) -> tuple[str, ...]:
    return ("methods", "starts") if method in STAGES else ("methods",)
