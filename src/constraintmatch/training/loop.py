"""The one loop: `fit` trains any module on any loss, with exact resume, checkpoints, a log and progress."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import write_atomically
from constraintmatch._internal.progress import Reporter, Stop, stop_signals
from constraintmatch._internal.rng import check_seed
from constraintmatch.training import ranks
from constraintmatch.training.batches import batches_ahead
from constraintmatch.training.run_folder import RunFolder, read_log
from constraintmatch.training.step import Stepper, part_of

B = TypeVar("B")
Batches = Callable[[int], B]
Loss = Callable[[Callable[..., Tensor], B], dict[str, Tensor]]

# The share of the learning rate at progress t / T in [0, 1].
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine-7/16": lambda t: math.cos(7 * math.pi * t / 16),  # ends at cos(7π/16) ≈ 0.195, not at zero
    "cosine": lambda t: 1e-3 + (1 - 1e-3) * (1 + math.cos(math.pi * t)) / 2,  # down to a thousandth
    "cosine-warm": lambda t: t / 0.05 if t < 0.05 else SCHEDULES["cosine"]((t - 0.05) / 0.95),  # up first, 5 % long
    "constant": lambda _: 1.0,
}

COMPILED = 5_000  # steps from which on a minute of the compiler is earned back (decision 067)
CALMER = 0.3  # the share of the rate with which a training goes on after it has fallen

_HOW = ("device", "log_every", "checkpoint_every", "tensorboard", "compile", "cuda_graph", "channels_last")


@dataclass(frozen=True)
class TrainSettings:
    """How to train; None lets the device decide."""

    steps: int = 20_000
    lr: float = 0.01
    optimizer: str = "sgd"  # or adam
    momentum: float = 0.9
    weight_decay: float = 1e-5
    schedule: str = "cosine-7/16"  # or cosine, cosine-warm, constant
    clip_norm: float | None = None  # largest gradient norm; None: no clipping
    ema: float | None = None  # decay of an average of the weights, kept instead of the last ones; None: none
    seed: int = 0
    device: str | None = None  # cuda, mps or cpu; None: the first of these that is there
    bf16: bool | None = None  # autocast to bfloat16; None: on CUDA
    channels_last: bool | None = None  # None: except on MPS
    compile: bool | None = None  # torch.compile; None: on CUDA if there are many steps
    cuda_graph: bool | None = None  # replay the step as one CUDA graph; None: on CUDA when compiled
    log_every: int = 100
    evaluate_every: int | None = None  # None: at the end only
    checkpoint_every: int = 1_000
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("steps", "log_every", "checkpoint_every", "evaluate_every"):
            value = getattr(self, name)
            if value is None and name == "evaluate_every":
                continue
            if not isinstance(value, Integral) or value < 1:
                raise InputError(f"{name} is {value}; it must be a whole number, 1 or more")
        ranges = {
            "momentum": (0 <= self.momentum < 1, "0 or more and under 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more"),
            "clip_norm": (self.clip_norm is None or self.clip_norm > 0, "positive"),  # else the gradient turns round
            "lr": (0 < self.lr < math.inf, "a positive number"),
            "ema": (self.ema is None or 0 < self.ema < 1, "between 0 and 1"),
        }
        for name, (fits, words) in ranges.items():
            if not fits:
                raise InputError(f"{name} is {getattr(self, name)}; it must be {words}")
        for name, known in (("optimizer", ("sgd", "adam")), ("schedule", tuple(SCHEDULES))):
            if getattr(self, name) not in known:
                raise InputError(f"unknown {name} {getattr(self, name)!r}; known are {', '.join(known)}")

    def request(self) -> dict[str, Any]:
        """What decides the result: the settings a resumed run must share."""
        return {key: value for key, value in asdict(self).items() if key not in _HOW}

    def how(self) -> dict[str, Any]:
        """The other settings."""
        return {key: value for key, value in asdict(self).items() if key in _HOW}

    def resolve(self, device: torch.device) -> "TrainSettings":
        """The same settings with every None that the device decides filled in; several ranks compile nothing."""
        cuda, alone = device.type == "cuda", ranks.world() == 1
        bf16 = cuda if self.bf16 is None else self.bf16
        compiled = alone and (cuda and self.steps >= COMPILED if self.compile is None else self.compile)
        last = device.type != "mps" if self.channels_last is None else self.channels_last  # a third faster on a CPU too
        graph = cuda and alone and (compiled if self.cuda_graph is None else self.cuda_graph)
        return replace(self, device=str(device), bf16=bf16, channels_last=last, compile=compiled, cuda_graph=graph)


class Interrupted(KeyboardInterrupt):
    """A signal or the caller stopped the training; the checkpoint is written."""


class NonFinite(InputError):
    """A loss term is NaN or infinite."""


def choose_device(name: str | None = None) -> torch.device:
    """The named device, or the first of cuda, mps, cpu that is there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    try:
        device = torch.device(next(kind for kind in there if there[kind]) if name is None else name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}; known are cuda, mps, cpu") from None
    if not there.get(device.type, False):
        raise InputError(f"device {name!r} is not on this machine; leave --device out to take what is there")
    if device.type == "cuda" and device.index is None and ranks.world() > 1:
        return torch.device("cuda", torch.cuda.current_device())  # in every thread: each rank has its own
    return device


@dataclass(frozen=True)
class Surroundings(Generic[B]):
    """What is around a training: where it is kept, who watches it, what judges it, what stops it.

    `measure(batch)` adds values to each log line, `evaluate()` to the lines of `evaluate_every` and of the end.
    `keep_best` names a value of the evaluations: the module ends with the weights that had the highest one, not with
    the last. With a `tolerance` it ends with the latest weights that were not lower than the highest by more than that
    share, or by more than the slack that the evaluation names (`…_slack`). The weights at the beginning are judged too:
    a stage that only does harm leaves them. An evaluation that says `fallen` takes the kept weights back and lowers the
    rate; the second one ends the training. With a run folder the loop resumes from its checkpoint. `stop` is asked
    after every step: when it says True, or a signal comes, a checkpoint is written and `Interrupted` is raised.
    """

    title: str = "training"
    run: RunFolder | None = None
    reporter: Reporter = field(default_factory=Reporter)
    stop: Callable[[], bool] = lambda: False
    prefetch: bool = False
    measure: Callable[[B], Mapping[str, float]] | None = None
    evaluate: Callable[[], Mapping[str, Any]] | None = None
    keep_best: str | None = None
    tolerance: float = 0.0


_ALONE = Surroundings[Any]()  # nothing is kept, and nobody watches


def fit(
    module: nn.Module, next_batch: Batches[B], loss: Loss[B], settings: TrainSettings, around: Surroundings[B] = _ALONE
) -> list[dict[str, Any]]:
    """Train `module` in place and give back the log.

    `next_batch(step)` is a pure function of the step; `loss(network, batch)` gives named terms that are summed, where
    `network` is the module, compiled where that pays.
    """
    device = choose_device(settings.device)
    settings = settings.resolve(device)
    layout = torch.channels_last if settings.channels_last else torch.preserve_format
    module.to(device=device, memory_format=layout).train()  # type: ignore[call-overload]
    stepper = _make_stepper(module, loss, settings, device)
    history = _History(stepper, settings, around)
    if around.prefetch or settings.cuda_graph:
        stream = None if around.prefetch else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        next_batch = batches_ahead(next_batch, settings.steps, stream=stream)
    search = {"benchmark": device.type == "cuda", "benchmark_limit": torch.backends.cudnn.benchmark_limit}
    cudnn = torch.backends.cudnn.flags(enabled=True, **search, allow_tf32=True)
    with ranks.clear_errors(), cudnn, history.open() as first, stop_signals(history.stop):
        if (around.keep_best and first == 0) or history.unjudged:
            history.evaluate_at(first)
        if settings.compile and first < settings.steps:
            around.reporter.say(
                "the first step is compiled, which is silent and takes a minute or two; later ones are fast"
            )
        for step in range(first, settings.steps):
            if history.falls > 1:
                break
            batch = next_batch(step)
            history.stop.at_once = step == first  # which may be compiled for a minute, and has nothing to save
            stepper(batch, history.rate(step))
            history.note(step + 1, batch)
            asked = ranks.any_rank(history.stop.asked)
            history.save_when_due(step + 1, asked=asked, stopped=asked or ranks.any_rank(around.stop()))
    return history.log


def _make_stepper(module: nn.Module, loss: Loss[B], settings: TrainSettings, device: torch.device) -> Stepper[B]:
    parameters = [value for value in module.parameters() if value.requires_grad]
    flags = {name: bool(getattr(settings, name)) for name in ("bf16", "compile", "cuda_graph")}
    rate = torch.tensor(settings.lr, device=device) if flags["cuda_graph"] else settings.lr
    shared: dict[str, Any] = {"lr": rate, "weight_decay": settings.weight_decay, "fused": device.type == "cuda"}
    optimizer = (
        torch.optim.Adam(parameters, **shared, capturable=flags["cuda_graph"])
        if settings.optimizer == "adam"
        else torch.optim.SGD(parameters, **shared, momentum=settings.momentum)
    )
    return Stepper(module, loss, optimizer, clip_norm=settings.clip_norm, ema=settings.ema, **flags)


@dataclass
class _History(Generic[B]):
    """The state of a training: its log, its checkpoint, and the weights to keep with their scores."""

    stepper: Stepper[B]
    settings: TrainSettings
    around: Surroundings[B]
    log: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)  # step and score of the kept weights, and the highest score
    warned: set[str] = field(default_factory=set)
    saved: int = 0  # the step of the last checkpoint
    falls: int = 0  # times that the training went back to the kept weights
    began: float = 0.0
    writer: Any = None
    stop: Stop = field(default_factory=lambda: Stop(alone=ranks.world() == 1))
    unjudged: bool = False  # whether the evaluation of the last checkpoint was interrupted

    @contextmanager
    def open(self) -> Iterator[int]:
        """The step to begin with; at the end the module has the weights that are kept."""
        first = self._resume()
        if self.settings.tensorboard and self.around.run is not None:
            self.writer = self.around.run.tensorboard(first)
        self.around.reporter.start(self.around.title, self.settings.steps, first)
        earlier = read_log(self.around.run.path) if self.around.run is not None else []
        self.began = time.monotonic() - (float(earlier[-1].get("seconds", 0.0)) if earlier else 0.0)
        try:
            yield first
        except KeyboardInterrupt as stop:
            raise stop if isinstance(stop, Interrupted) else self._interrupted(self.saved) from None
        finally:
            self.around.reporter.stop()
            if self.writer is not None:
                self.writer.close()
        self.stepper.keep_average()
        if self.best and self.best["step"] != self.settings.steps:
            self.stepper.module.load_state_dict(self.kept)
            self._say_what_is_kept()

    def rate(self, step: int) -> float:
        settings = self.settings
        return settings.lr * CALMER**self.falls * SCHEDULES[settings.schedule](step / settings.steps)

    def note(self, done: int, batch: B) -> None:
        """Log and evaluate where that is due."""
        last = done == self.settings.steps
        if last or done % self.settings.log_every == 0:
            self._check_finite(self.stepper.first_bad())
            terms = self.stepper.read_means()
            values = {"loss": sum(terms.values())} | {f"loss_{name}": value for name, value in terms.items()}
            measured = self.around.measure(batch) if self.around.measure else {}
            self._log(done, {**values, "lr": self.rate(done - 1), **measured})
        elif done % 10 == 0:
            self.around.reporter.update(done)
        every = self.settings.evaluate_every
        if last or (every and done % every == 0):
            self.evaluate_at(done)

    def save_when_due(self, done: int, *, asked: bool, stopped: bool) -> None:
        last = done == self.settings.steps
        if last or stopped or done % self.settings.checkpoint_every == 0:
            self._check_finite(self.stepper.first_bad())
            self._save(done)
        if stopped and (not last or asked):
            raise self._interrupted(done)

    def _interrupted(self, done: int) -> Interrupted:
        return Interrupted(f"stopped after step {done:,} of {self.settings.steps:,}")

    def evaluate_at(self, done: int) -> None:
        """Log the evaluation and keep the weights if they are the best; go back if they have fallen.

        A signal ends it at once: the step is saved, and judged when the run goes on.
        """
        if self.around.evaluate is None:
            return
        self.stop.at_once = True
        try:
            if self.stop.asked and self.stop.alone:
                raise self._interrupted(done)
            with self.stepper.averaged():
                values = ranks.agree(self.around.evaluate())
                if (key := self.around.keep_best) is not None and not (values.get("fallen") and self.best):
                    self._keep(done, float(values[key]), float(values.get(f"{key}_slack", 0.0)))
        except KeyboardInterrupt:
            if done:
                self._save(done, unjudged=True)
            raise self._interrupted(done) from None
        self.stop.at_once = self.unjudged = False
        self._log(done, values, kind="evaluation")
        if values.get("fallen") and 0 < done < self.settings.steps:
            self.falls += 1
            self.stepper.restart(self.kept)
            back = self.best["step"]
            then = f"goes on with {CALMER:g} times the rate" if self.falls == 1 else "ends here"
            self.around.reporter.say(
                f"step {done:,}: {self.around.keep_best} has fallen; the training goes back to step {back:,} and {then}"
            )
            self._log(done, {"back_to": back}, kind="back")

    def _keep(self, done: int, score: float, slack: float) -> None:
        highest = max(score, self.best.get("highest", score))
        if not self.best or score >= highest - (self.around.tolerance * abs(highest) + slack):
            self.best = {"step": done, "score": score, "highest": highest}
            self.kept = {name: value.detach().clone() for name, value in self.stepper.module.state_dict().items()}

    def _say_what_is_kept(self) -> None:
        if any(entry["kind"] == "kept" for entry in self.log):  # resumed after its last step: it is said already
            return
        step, score, highest = (self.best[name] for name in ("step", "score", "highest"))
        where = "was highest" if score == highest else f"was still near its highest, {highest:.3g}"
        last = "; a tolerance of 1 keeps the last ones" if self.around.tolerance else ""
        said = f"kept the weights of step {step:,}, where {self.around.keep_best} {where} ({score:.3g}){last}"
        self.around.reporter.say(f"{self.around.title}: {said}")
        self._log(self.settings.steps, {"kept_step": step, f"kept_{self.around.keep_best}": score}, kind="kept")

    def _log(self, done: int, values: Mapping[str, Any], kind: str = "training") -> None:
        entry = {"step": done, "kind": kind, **values, "seconds": round(time.monotonic() - self.began, 3)}
        self.log.append(entry)
        numbers = {key: value for key, value in values.items() if type(value) in (int, float) and "slack" not in key}
        if self.around.run is not None:
            self.around.run.log(entry)
        if self.writer is not None:
            for key, value in numbers.items():
                self.writer.add_scalar(f"{kind}/{key}", value, done)
        if kind == "evaluation":  # a warning is not said again while it only changes its numbers
            words = {re.sub(r"[\d.,]+", "", warning): warning for warning in values.get("warnings", ())}
            for warning in (words[key] for key in words if key not in self.warned):
                self.around.reporter.say(f"step {done:,}: {warning}")
            self.warned = set(words)
        else:
            numbers.pop("lr", None)
        self.around.reporter.update(done, numbers)

    def _check_finite(self, bad: tuple[int, str] | None) -> None:
        """An error that names the step and the term, if there is a bad one."""
        if bad is None:
            return
        kept = f"the checkpoint of step {self.saved:,} is kept" if self.saved else "no checkpoint was written yet"
        fix = "try a smaller --set lr=VALUE or --set clip_norm=1"
        raise NonFinite(f"step {bad[0]:,}: the loss term {bad[1]!r} is not finite; {kept}; {fix}")

    def _save(self, done: int, *, unjudged: bool = False) -> None:
        tensors = self.stepper.state()
        if not all(bool(torch.isfinite(value).all()) for value in tensors.values() if value.is_floating_point()):
            self._check_finite((done, "weights"))
        if self.around.run is None:
            return
        from safetensors.torch import save_file

        tensors |= {f"best.{name}": value for name, value in self.kept.items()}
        copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        metadata = {"step": str(done), "terms": "\n".join(self.stepper.terms), "falls": str(self.falls)}
        metadata |= {"unjudged": "1"} if unjudged else {}
        metadata |= {f"best_{name}": repr(value) for name, value in self.best.items()}
        write_atomically(self.around.run.checkpoint, lambda path: save_file(copies, path, metadata))
        self.saved = done

    def _resume(self) -> int:
        """The step to go on from; 0 without a checkpoint. Rank 0 reads it for all."""
        from safetensors import safe_open

        run, metadata, tensors = self.around.run, dict[str, str](), dict[str, Tensor]()
        if run is not None and run.checkpoint.is_file():
            with _misfits(run), safe_open(run.checkpoint, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        metadata, tensors = ranks.agree((metadata, tensors))
        with _misfits(run):
            if tensors:
                self.saved, self.falls = int(metadata["step"]), int(metadata.get("falls", "0"))
                self.unjudged = "unjudged" in metadata
                self.stepper.load(tensors, metadata["terms"].split("\n"))
            if "best_step" in metadata:
                score, highest = (float(metadata[name]) for name in ("best_score", "best_highest"))
                self.best = {"step": int(metadata["best_step"]), "score": score, "highest": highest}
                self.kept = part_of(tensors, "best")
        if run is not None:
            run.cut_log(self.saved)
        self.log = ranks.agree(read_log(run.path) if run is not None and tensors else [])
        return self.saved


@contextmanager
def _misfits(run: RunFolder | None) -> Iterator[None]:
    """A checkpoint that is broken, or of something else, is an InputError."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        said, place = str(error).splitlines()[0], run.checkpoint if run is not None else "the checkpoint"
        raise InputError(f"{place}: not a checkpoint of this run ({said}); remove it to start again") from None
