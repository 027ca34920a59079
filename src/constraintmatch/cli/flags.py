"""Every setting that `--set name=value` takes: what it means, what it may be, and its default.

`settings.csv` has a row for each. Which of them a method takes, and its defaults, are read from the source text of the
methods: importing torch takes seconds, and help should not. Tests compare all of it with what the methods have and
check.
"""

import ast
import csv
import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from constraintmatch._internal.errors import InputError
from constraintmatch.training.run_folder import GONE

METHODS = ("constraintmatch", "pseudo_label", "constrained", "propagate", "fully_constrained", "supervised")
PRETEXTS = ("simclr", "byol", "propos", "cc", "pica", "mice", "tcc")
STAGES = (*PRETEXTS, "linear_scan", "scan", "self_label", "neighbour_label")


class Setting(NamedTuple):
    """A row of settings.csv; `default` is what `train` chooses where the method leaves it open."""

    group: str
    name: str
    kind: str  # number, whole, word or text
    values: str  # what is allowed
    default: str
    meaning: str

    @property
    def words(self) -> dict[str, Any]:
        """The words that are allowed, and what they stand for."""
        words = re.split(", | or ", self.values) if self.kind == "word" else []
        return {word: _WORDS.get(word, word) for word in words}

    @property
    def bounds(self) -> tuple[float, bool, float, bool]:
        """The lowest number, whether it is excluded itself, the highest number, and whether that is excluded."""
        found = _RANGE.fullmatch(self.values)
        if found is None:
            return -math.inf, True, math.inf, True
        above, low, below, high = found.groups()
        most = math.inf if high is None else 2**64 - 1 if high == "2**64 - 1" else float(high)
        return float(low), above is not None, most, below is not None or high is None

    def read(self, text: str) -> Any:
        """The value of a text; a ValueError where it is not allowed."""
        if self.kind == "text":
            if text or self.default == "none":
                return text
        elif self.kind == "word":
            if (word := {"true": "yes", "false": "no"}.get(text.lower(), text)) in self.words:
                return self.words[word]
        else:
            number = int(text) if self.kind == "whole" else float(text)
            low, above, high, below = self.bounds
            if (low < number if above else low <= number) and (number < high if below else number <= high):
                return number
        raise ValueError(text)


_WORDS: dict[str, Any] = {"yes": True, "no": False, "1": 1, "3": 3}
_RANGE = re.compile(r"(above )?([\d.]+)(?: or more| to (below )?(.+))?")
_TABLE = files("constraintmatch.cli").joinpath("settings.csv").read_text(encoding="utf-8")
SETTINGS = {row["name"]: Setting(**row) for row in csv.DictReader(_TABLE.splitlines())}
# arguments of the methods and stages, fields of TrainSettings, how images and pairs are read, and the rounds of a loop
_ARGUMENTS, _TRAINING, _IMAGES, _PAIRS, _ROUNDS = (
    [name for name, setting in SETTINGS.items() if setting.group == group]
    for group in ("argument", "training", "images", "pairs", "rounds")
)
_EVERY_STAGE = _TRAINING[_TRAINING.index("seed") :]
_RENAMED = {"labels": "class_folders"}  # settings that have another name in the library


# Names and defaults, from the source


def method_defaults(method: str) -> dict[str, Any]:
    """The arguments of a method and their defaults."""
    known = _keywords(method).items()
    return {name: ast.literal_eval(value) for name, value in known if value is not None and name in _ARGUMENTS}


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
    """The values of `name=value` texts, checked, by the library's names; the last value of a name counts.

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
            kind = "a whole number, " if setting.kind == "whole" else ""
            raise InputError(f"--set {name}={value}: {name} must be {kind}{setting.values}") from None
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
    if name in GONE:
        raise InputError(f"{title} has no setting {name!r}: {GONE[name][1]}", fix="leave it out")
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
    if f"{stage}.{plain}" in GONE:
        return f"{flag} is gone: {GONE[f'{stage}.{plain}'][1]}"
    for own, said in ((plain, "VALUE"), (plain.removeprefix("no_"), "no")):
        spelled = f"{stage}.{own}" if stage else own
        if spelled in known:
            yes = _setting(spelled).values == "yes or no" and said != "no"
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
        rows.append((name, chosen or _show(default), setting.values, setting.meaning))
    return rows


def _show(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return {None: "none", True: "yes", False: "no"}[default]
    return f"{default:,}" if isinstance(default, int) else str(default)
