"""Every setting that `--set name=value` takes: what it means, what it may be, and its default.

Names and defaults are read from the source text of the methods: importing torch takes seconds, and help should not.
Tests compare them, and the ranges, with what the methods have and check.
"""

import ast
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from typing import Any

from constraintmatch._internal.errors import InputError
from constraintmatch.training.run_folder import GONE

METHODS = ("constraintmatch", "pseudo_label", "constrained", "propagate", "fully_constrained", "supervised")
STAGES = ("simclr", "byol", "propos", "linear_scan", "scan", "self_label", "neighbour_label")


@dataclass(frozen=True)
class Setting:
    """A setting: its meaning, the default that `train` chooses, and what it may be: words, numbers or any text."""

    meaning: str
    default: str = ""
    text: str = ""  # what the text may be
    words: Mapping[str, Any] = field(default_factory=dict)  # and their values
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above: bool = False  # `low` itself is not allowed
    below: bool = False  # `high` itself is not allowed

    @property
    def form(self) -> str:
        """What is allowed, in words."""
        if self.text or self.words:
            *words, last = self.words or [self.text]
            return f"{', '.join(words)} or {last}" if words else last
        if math.isinf(self.low):
            return "any number"
        low = f"above {self.low:g}" if self.above else f"{self.low:g}"
        if math.isinf(self.high):
            return low if self.above else f"{low} or more"
        high = f"2**{int(self.high).bit_length()} - 1" if self.whole else f"{self.high:g}"
        return f"{low} to below {high}" if self.below else f"{low} to {high}"

    def read(self, text: str) -> Any:
        """The value of a text; a ValueError where it is not allowed."""
        if self.text:
            if not text and self.default != "none":
                raise ValueError(text)
            return text
        if self.words:
            word = {"true": "yes", "false": "no"}.get(text.lower(), text)
            if word not in self.words:
                raise ValueError(text)
            return self.words[word]
        number = int(text) if self.whole else float(text)
        inside = (self.low < number if self.above else self.low <= number) and number <= self.high
        if not inside or math.isinf(number) or (self.below and number == self.high):
            raise ValueError(text)
        return number


def _choice(meaning: str, *words: str, default: str = "") -> Setting:
    return Setting(meaning, default, words={word: word for word in words})


_YES = {"yes": True, "no": False}
_yes_or_no = partial(Setting, words=_YES)
_share = partial(Setting, low=0, high=1)
_count = partial(Setting, low=1, whole=True)
_positive = partial(Setting, low=0, above=True)

# The arguments of the methods, of pretrain's stages too.
_ARGUMENTS = {
    "averaged": _share("Share of the steps, the last ones, whose weights are averaged."),
    "entropy_weight": Setting("Weight of the term that spreads images over clusters."),
    "epochs": _count("Passes over the images."),
    "error_rate": Setting("Share of the pairs that are wrong.", "safe recipe: estimated", low=0, high=0.5, below=True),
    "flip_between": _choice("Which two clusters flip_fraction swaps.", "largest", "any"),
    "flip_fraction": _share("ρ: share of guesses with two clusters swapped (robustness study)."),
    "hard_threshold": _share("μ: with links=hard, links from here on are must-links."),
    "head_steps": Setting("Steps in which the head learns alone, before the network does.", low=0, whole=True),
    "hidden": _count("Width inside projector and predictor."),
    "images_per_step": _count("Images in a step.", "fits the images: 150 to 600"),
    "links": _choice("Pseudo-constraints: probabilities, or yes and no.", "soft", "hard"),
    "max_entropy": _share("τ: images with a normalized entropy below it take part."),
    "merge": _yes_or_no("First merge clusters that the pairs join. For a number of clusters that is too high."),
    "min_confidence": _share("τ: images with this confidence or more take part."),
    "most_images": Setting("Use at most this number of images.", low=2, whole=True),
    "n_neighbours": _count("Neighbours of an image."),
    "n_tries": _count("Linear heads to try on the frozen features."),
    "noise": Setting(
        "How far from a projection a prediction begins, as a share of the standard deviation over images.", low=0
    ),
    "pairs_per_step": _count("Constrained pairs in a step.", "1/3 of the images in a step"),
    "predictor_rate": _positive("Learning rate of the predictor, as a multiple of lr."),
    "projection": _count("Width of the projection head."),
    "prototype_weight": Setting("Weight of the contrast between prototypes.", low=0),
    "pseudo_weight": Setting("λ: weight of the loss on images without pairs.", low=0),
    "reach": Setting("How far an answer spreads: further the nearer to 1.", low=0, high=1, below=True),
    "recipe": _choice(
        "safe: keep the start unless held-out pairs say that training is better. paper: as published.",
        "safe",
        "paper",
        default="safe",
    ),
    "reliable": _share("Share of each cluster that teaches: the images whose neighbours agree most."),
    "rest_weight": Setting("Weight of the other images that the model is sure of.", low=0),
    "selection": _choice("How the images that take part are selected.", "entropy", "confidence"),
    "target_momentum": _share("τ: momentum of the target network at first; it rises to 1."),
    "temperature": _positive("Temperature of the contrast."),
    "tolerance": _share("How far the label-free quality may fall below its best; 1 keeps the last weights."),
    "warm_up": _share("Share of the steps over which λ rises from zero.", "0.5"),
}
# Where a stage allows less than others, or more.
_STAGE_ARGUMENTS = {
    "byol.images_per_step": replace(_ARGUMENTS["images_per_step"], low=4),
    "byol.projection": replace(_ARGUMENTS["projection"], low=2),
    "propos.images_per_step": replace(_ARGUMENTS["images_per_step"], low=4),
    "propos.projection": replace(_ARGUMENTS["projection"], low=2),
    "propos.warm_up": _share("Share of the steps before the prototypes take part."),
    "scan.n_tries": Setting("As linear_scan.n_tries; 0: begin with a random head.", low=0, whole=True),
    "simclr.images_per_step": replace(_ARGUMENTS["images_per_step"], low=2),
}
# The fields of TrainSettings.
_TRAINING = {
    "steps": _count("Training steps.", "fits the images: 500 to 20,000"),
    "lr": _positive("Learning rate."),
    "optimizer": _choice("Optimizer.", "sgd", "adam"),
    "momentum": Setting("Momentum of sgd.", low=0, high=1, below=True),
    "weight_decay": Setting("Weight decay.", low=0),
    "schedule": _choice("Learning rate over time.", "cosine-7/16", "cosine", "cosine-warm", "constant"),
    "clip_norm": _positive("Largest gradient norm."),
    "ema": Setting("Keep an average of the weights with this decay.", low=0, high=1, above=True, below=True),
    "seed": Setting("Seed of everything random.", low=0, high=2**64 - 1, whole=True),
    "device": Setting("Where to compute.", "the first there is", "cuda, mps or cpu"),
    "bf16": _yes_or_no("Compute in bfloat16 where that is safe.", "on CUDA"),
    "channels_last": _yes_or_no("Keep channels last in memory.", "not on MPS"),
    "compile": _yes_or_no("Compile the network with torch.compile.", "on CUDA"),
    "cuda_graph": _yes_or_no("Replay a step as one CUDA graph.", "on CUDA"),
    "log_every": _count("Steps between lines of log.jsonl.", "1/20 of the steps, at most 100"),
    "evaluate_every": _count("Steps between evaluations.", "1/10 of the steps; pretrain: none"),
    "checkpoint_every": _count("Steps between checkpoints."),
    "tensorboard": _yes_or_no("Write TensorBoard files too."),
}
# How images and pairs are read, and which network begins.
_IMAGES = {
    "backbone": Setting("The network.", "fits the images", "tiny, resnet18, resnet34 or timm:NAME"),
    "pretrained": _yes_or_no("Begin with the weights of a timm backbone.", "no"),
    "side": _count("Resize images to this number of pixels a side.", "fits the images"),
    "channels": Setting("1 for grey images, 3 for colour.", "fits the images", words={"1": 1, "3": 3}),
    "labels": _yes_or_no("Sub-folders are classes, for scores.", "if all images are in some"),
    "strict": _yes_or_no("Stop at a file that cannot be read.", "no: skip it"),
    "without": Setting("Changes that would spoil the images.", "none", "rotate or others, with commas"),
}
_PAIRS = {
    "on_conflict": _choice(
        "What to do with contradictions.", "error", "drop", "keep", default="drop; recipe=paper: error"
    ),
    "close": _yes_or_no("Add the pairs that the pairs imply.", "no"),
    "holdout_pairs": Setting("Share of the pairs set aside to judge the model.", "0", low=0, high=1, below=True),
}
_ROUNDS = {
    "every": _count("Answers between two rounds of training.", "25"),
    "last_steps": _count("Training steps after the last answer.", "as steps"),
    "choose": _choice("How questions are chosen.", "recommended", "uncertain", "random", default="recommended"),
    "wrong": _share("Share of wrong answers with --oracle.", "0"),
}
SETTINGS: Mapping[str, Setting] = {**_ARGUMENTS, **_STAGE_ARGUMENTS, **_TRAINING, **_IMAGES, **_PAIRS, **_ROUNDS}

_RENAMED = {"labels": "class_folders"}  # settings that have another name in the library
_EVERY_STAGE = list(_TRAINING)[list(_TRAINING).index("seed") :]


# Names and defaults, from the source


@cache
def method_defaults(method: str) -> dict[str, Any]:
    """The arguments of a method and their defaults."""
    known = _keywords(method).items()
    return {name: ast.literal_eval(value) for name, value in known if value is not None and name in _ARGUMENTS}


@cache
def training_defaults(method: str = "constraintmatch") -> dict[str, Any]:
    """The training settings of a method."""
    body = _parse("training", "loop.py").body
    group = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == "TrainSettings")
    fields = [node for node in group.body if isinstance(node, ast.AnnAssign)]
    found = {ast.unparse(node.target): ast.literal_eval(node.value) for node in fields if node.value}
    default = _keywords(method)["settings"]
    if isinstance(default, ast.Name):  # SETTINGS = TrainSettings(lr=…) in the same file
        named = [node for node in _parse(*_file(method)).body if isinstance(node, ast.Assign)]
        default = next(node.value for node in named if ast.unparse(node.targets[0]) == default.id)
    assert isinstance(default, ast.Call)
    return found | {str(word.arg): ast.literal_eval(word.value) for word in default.keywords}


def _keywords(method: str) -> dict[str, ast.expr | None]:
    """The keyword arguments of a method's function, with the code of their defaults."""
    if method not in (*METHODS, *STAGES):
        raise InputError(f"unknown method {method!r}; known are {', '.join((*METHODS, *STAGES))}")
    body = _parse(*_file(method)).body
    given = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == method).args
    return dict(zip([arg.arg for arg in given.kwonlyargs], given.kw_defaults, strict=True))


def _file(method: str) -> list[str]:
    """The path of the file that `methods` imports the method from."""
    imports = (node for node in _parse("methods", "__init__.py").body if isinstance(node, ast.ImportFrom))
    module = next(str(node.module) for node in imports if method in [alias.name for alias in node.names])
    *folders, name = module.split(".")[1:]
    return [*folders, f"{name}.py"]


@cache
def _parse(*path: str) -> ast.Module:
    return ast.parse(files("constraintmatch").joinpath(*path).read_text(encoding="utf-8"))


# What a command takes


def settings_of(command: str, method: str | None = None) -> list[str]:
    """The names that `--set` of a command takes; `train` without a method has those of all."""
    if command == "train":
        own = dict.fromkeys(name for known in ([method] if method else METHODS) for name in method_defaults(known))
        return [*own, *_TRAINING, *_IMAGES, *_PAIRS]
    if command == "pretrain":
        return [*_IMAGES, *_EVERY_STAGE, *(f"{stage}.{name}" for stage in STAGES for name in _stage_settings(stage))]
    return {"loop": [*_IMAGES, *_ROUNDS, "steps", "seed"], "search": ["without", "holdout_pairs"]}.get(command, [])


def _stage_settings(stage: str) -> dict[str, Any]:
    """The arguments and training settings of a stage; one that counts epochs has no steps."""
    own, training = method_defaults(stage), training_defaults(stage)
    return own | {name: value for name, value in training.items() if name != "steps" or "epochs" not in own}


def read_settings(
    command: str, texts: Iterable[str] | None, method: str | None = None, flags: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The values of `name=value` texts, checked, by the library's names; of a name that comes again the last.

    `flags` are settings that have a flag of their own; a setting is given once.
    """
    known, title, found = settings_of(command, method), method or command, dict[str, Any]()
    for text in texts or ():
        name, mark, value = (part.strip() for part in text.partition("="))
        if not mark:
            raise InputError(f"--set {text}: write a name, = and a value, for example --set {known[0]}=VALUE")
        name = name.replace("-", "_")
        _check_name(name, known, title)
        setting = _setting(name)
        try:
            read = setting.read(value)
        except ValueError:
            kind = "a whole number, " if setting.whole else ""
            raise InputError(f"--set {name}={value}: {name} must be {kind}{setting.form}") from None
        found[_RENAMED.get(name, name)] = words(read) if name == "without" else read
    for name in flags or ():
        _check_name(name, known, title)
        if name in found:
            raise InputError(f"--{name.replace('_', '-')} and --set {name}: give one of them")
    return {**(flags or {}), **found}


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def split_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The arguments of a method, the training settings, and what is left: how images and pairs are read."""
    own, training = ({name: given[name] for name in group if name in given} for group in (_ARGUMENTS, _TRAINING))
    return own, training, {name: given[name] for name in given if name not in own | training}


def _setting(name: str) -> Setting:
    return SETTINGS.get(name) or SETTINGS[name.rpartition(".")[2]]


def _check_name(name: str, known: Sequence[str], title: str) -> None:
    """A name that is not known is an InputError that names the nearest ones."""
    if name not in known:
        near = [one for one in known if one.endswith(f".{name}")] or difflib.get_close_matches(name, known, n=1)
        lists = f"constraintmatch settings{f' {title}' if title in METHODS else ''} lists what there is"
        said = f"did you mean {' or '.join(near)}?" if near else lists
        raise InputError(f"{title} has no setting {name!r}; {said}")


# Flags of earlier versions

_MOVED = {
    ("loop", "--error"): "--set wrong=VALUE",
    ("paper", "--figures"): "the folder docs/figures of python docs/make_gallery.py",
    ("sample", "--flip"): "--wrong",
    ("search", "--workers"): "the same command, started once for each worker",
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


def new_spelling(command: str, flag: str) -> str | None:
    """How a flag of earlier versions is spelled now; None for one that never was."""
    known = settings_of(command)
    if flag == "--data" or (command, flag) == ("check", "--images"):
        return f"{flag} is gone: its value is given alone"
    if moved := _MOVED.get((command, flag)) or (_MOVED.get(("", flag)) if known else None):
        return f"{flag} is now {moved}"
    name = flag.removeprefix("--").replace("-", "_")
    if known and (said := next((said for gone, said in _GONE.items() if f"_{gone}_" in f"_{name}_"), None)):
        return f"{flag} is gone: {said}"
    stage = max((one for one in STAGES if command == "pretrain" and name.endswith(f"_{one}")), key=len, default="")
    plain = name.removesuffix(f"_{stage}")
    for own, said in ((plain, "VALUE"), (plain.removeprefix("no_"), "no")):
        spelled = f"{stage}.{own}" if stage else own
        if spelled in known:
            yes = _setting(spelled).words is _YES and said != "no"
            return f"{flag} is now --set {spelled}={'yes' if yes else said}"
    return None


# The tables that `constraintmatch settings` shows


def setting_tables(method: str | None = None) -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """Titles, and rows of name, default, what is allowed, meaning: of one method or stage, or of all."""
    for one in METHODS if method is None else (method,):
        if one not in STAGES:
            fitted = "pairs_per_step" in method_defaults(one)  # the bounds have a batch of their own
            yield f"Method {one}", _rows(method_defaults(one), fitted=fitted)
    if method not in STAGES:
        yield "Every training", _rows(training_defaults())
        yield "Images: train, pretrain and loop", _rows(dict.fromkeys(_IMAGES))
        yield "Pairs: train", _rows(dict.fromkeys(_PAIRS))
    if method is None:
        yield "Rounds: loop, which has steps and seed too", _rows(dict.fromkeys(_ROUNDS))
    for stage in STAGES if method is None else (method,):
        if stage in STAGES:
            own = method_defaults(stage) if method is None else _stage_settings(stage)
            yield f"Stage {stage}: pretrain --set {stage}.NAME=VALUE", _rows(own, fitted=False, stage=stage)


def _rows(defaults: Mapping[str, Any], *, fitted: bool = True, stage: str = "") -> list[tuple[str, str, str, str]]:
    rows = []
    for name, default in defaults.items():
        setting = _setting(f"{stage}.{name}")
        chosen = setting.default if fitted or default is None else ""
        rows.append((name, chosen or _show(default), setting.form, setting.meaning))
    return rows


def _show(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return {None: "none", True: "yes", False: "no"}[default]
    return f"{default:,}" if isinstance(default, int) else str(default)
