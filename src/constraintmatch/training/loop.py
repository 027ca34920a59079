"""The one loop: `fit` trains any module on any loss, with exact resume, checkpoints, a log and progress."""

import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import write_atomically
from constraintmatch._internal.progress import Quiet, Reporter
from constraintmatch._internal.rng import check_seed
from constraintmatch.training.batches import map_tensors
from constraintmatch.training.run_folder import RunFolder, read_log
from constraintmatch.training.step import Stepper

__all__ = ["SCHEDULES", "Interrupted", "NonFinite", "TrainSettings", "choose_device", "fit", "frozen_statistics"]

B = TypeVar("B")
Loss = Callable[[Callable[..., Tensor], B], dict[str, Tensor]]

# The share of the learning rate at progress t / T in [0, 1].
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine-7/16": lambda t: math.cos(7 * math.pi * t / 16),  # ends at cos(7π/16) ≈ 0.195, not at zero
    "cosine": lambda t: 1e-3 + (1 - 1e-3) * (1 + math.cos(math.pi * t)) / 2,  # down to a thousandth
    "cosine-warm": lambda t: t / 0.05 if t < 0.05 else SCHEDULES["cosine"]((t - 0.05) / 0.95),  # up first, 5 % long
    "constant": lambda t: 1.0,  # noqa: ARG005 (all schedules take the progress)
}

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
    compile: bool | None = None  # torch.compile; None: on CUDA
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
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum is {self.momentum}; it must be 0 or more and under 1")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay is {self.weight_decay}; it must be 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:  # a negative one would turn the gradient round
            raise InputError(f"clip_norm is {self.clip_norm}; it must be positive")
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise InputError(f"lr is {self.lr}; it must be a positive number")
        if self.optimizer not in ("sgd", "adam"):
            raise InputError(f"unknown optimizer {self.optimizer!r}; known are sgd, adam")
        if self.schedule not in SCHEDULES:
            raise InputError(f"unknown schedule {self.schedule!r}; known are {', '.join(SCHEDULES)}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise InputError(f"ema is {self.ema}; it must lie between 0 and 1")

    def request(self) -> dict[str, Any]:
        """What decides the result: the settings a resumed run must share."""
        return {key: value for key, value in asdict(self).items() if key not in _HOW}

    def how(self) -> dict[str, Any]:
        """The others, which decide how the result is come by."""
        return {key: value for key, value in asdict(self).items() if key in _HOW}

    def resolved(self, device: torch.device) -> "TrainSettings":
        """The same settings with every None that the device decides filled in."""
        cuda = device.type == "cuda"
        values = asdict(self)
        for name in ("bf16", "compile"):
            values[name] = cuda if values[name] is None else values[name]
        if self.channels_last is None:
            values["channels_last"] = device.type != "mps"  # a third faster on a CPU too
        graph = values["compile"] if self.cuda_graph is None else self.cuda_graph
        return TrainSettings(**{**values, "device": str(device), "cuda_graph": cuda and graph})


class Interrupted(KeyboardInterrupt):
    """Somebody asked to stop; the checkpoint is written."""


class NonFinite(InputError):
    """A loss term is NaN or infinite."""


def choose_device(name: str | None = None) -> torch.device:
    """The named device, or the first of cuda, mps, cpu that is there."""
    mps = torch.backends.mps.is_available()
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}; known are cuda, mps, cpu") from None
    there = {"cuda": torch.cuda.is_available(), "mps": mps, "cpu": True}
    if not there.get(device.type, False):
        raise InputError(f"device {name!r} is not on this machine; leave --device out to take what is there")
    return device


def fit(
    module: nn.Module,
    next_batch: Callable[[int], B],
    loss: Loss[B],
    settings: TrainSettings,
    *,
    title: str = "training",
    run: RunFolder | None = None,
    measure: Callable[[B], Mapping[str, float]] | None = None,
    evaluate: Callable[[], Mapping[str, Any]] | None = None,
    keep_best: str | None = None,
    tolerance: float = 0.0,
    prefetch: bool = False,
    reporter: Reporter | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Train `module` in place and give back the log.

    `next_batch(step)` is a pure function of the step; `loss(network, batch)` gives named terms that are summed, where
    `network` is the module, compiled where that pays. `measure(batch)` adds values to each log line, `evaluate()` to
    the lines of `evaluate_every` and of the end. `keep_best` names a value of the evaluations: the weights that had the
    highest one are left in the module, not the last ones; with a `tolerance`, the latest weights that were not lower
    than the highest by more than that share, or by more than the slack that the evaluation names (`…_slack`). The
    weights at the beginning are judged too: a stage that only does harm leaves them. An evaluation that says `fallen`
    takes the kept weights back and lowers the rate; the second one ends the training. With a run folder the loop
    resumes from its checkpoint. `stop` is asked after every step: when it says True, or a signal comes, a checkpoint is
    written and `Interrupted` is raised.
    """
    device = choose_device(settings.device)
    settings = settings.resolved(device)
    layout = torch.channels_last if settings.channels_last else torch.preserve_format
    module.to(device=device, memory_format=layout).train()  # type: ignore[call-overload]
    loop = _Loop(module, loss, settings, device, run, reporter or Quiet(), keep_best, tolerance)
    search = {"benchmark": device.type == "cuda", "benchmark_limit": torch.backends.cudnn.benchmark_limit}
    with torch.backends.cudnn.flags(enabled=True, **search, allow_tf32=True):
        ahead = next_batch
        if prefetch:
            ahead = _prefetched(next_batch, settings.steps)
        elif settings.cuda_graph:
            ahead = _beside(next_batch, settings.steps, device)
        return loop.run(title, ahead, measure, evaluate, stop)


@dataclass(frozen=True)
class _Best:
    """The weights to be kept so far, their score, when that was, and the highest score of all."""

    score: float
    highest: float
    step: int
    weights: dict[str, Tensor]


class _Loop(Generic[B]):
    """The state of one `fit`: the stepper, the log so far, when to log, evaluate and save."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss[B],
        settings: TrainSettings,
        device: torch.device,
        run: RunFolder | None,
        reporter: Reporter,
        keep_best: str | None,
        tolerance: float,
    ) -> None:
        self.module, self.settings, self.run_folder, self.reporter = module, settings, run, reporter
        self.keep_best, self.tolerance = keep_best, tolerance
        self.best: _Best | None = None
        self.warned: set[str] = set()
        self.stepper: Stepper[B] = Stepper(module, loss, settings, device)
        self.log: list[dict[str, Any]] = []
        self.saved = 0
        self.falls = 0  # times that the training went back to the kept weights
        self.writer: Any = None

    def run(
        self,
        title: str,
        next_batch: Callable[[int], B],
        measure: Callable[[B], Mapping[str, float]] | None,
        evaluate: Callable[[], Mapping[str, Any]] | None,
        stop: Callable[[], bool],
    ) -> list[dict[str, Any]]:
        settings, first = self.settings, self._resume()
        if settings.tensorboard and self.run_folder is not None:
            self.writer = _tensorboard(self.run_folder, first)
        self.reporter.start(title, settings.steps, first)
        self.began = time.monotonic() - self._seconds_before()
        try:
            with _stop_signals() as signalled:
                if evaluate and self.keep_best and first == 0:
                    self._evaluate(0, evaluate)
                for step in range(first, settings.steps):
                    if self.falls > 1:
                        break
                    batch = next_batch(step)
                    self.stepper(batch, self._rate(step))
                    self._after(step + 1, batch, measure, evaluate, lambda: signalled.is_set() or stop())
        finally:
            self.reporter.stop()
            if self.writer is not None:
                self.writer.close()
        self.stepper.keep_average()
        self._put_best_back(title)
        return self.log

    def _after(
        self,
        done: int,
        batch: B,
        measure: Callable[[B], Mapping[str, float]] | None,
        evaluate: Callable[[], Mapping[str, Any]] | None,
        stop: Callable[[], bool],
    ) -> None:
        settings, last = self.settings, done == self.settings.steps
        due = last or done % settings.log_every == 0
        if due:
            self._log(done, {**self._means(done), **(measure(batch) if measure else {})})
        elif done % 10 == 0:
            self.reporter.update(done)
        every = settings.evaluate_every
        if evaluate and (last or (every and done % every == 0)):
            self._evaluate(done, evaluate)
        stopped = stop()
        if last or stopped or done % settings.checkpoint_every == 0:
            if not due:
                self.stepper.check_finite(self._stop_for)
            self._save(done)
        if stopped and not last:
            raise Interrupted(f"stopped after step {done:,} of {settings.steps:,}")

    def _evaluate(self, done: int, evaluate: Callable[[], Mapping[str, Any]]) -> None:
        with self.stepper.averaged():
            values = evaluate()
            self._note_best(done, values)
        self._log(done, values, kind="evaluation")
        if values.get("fallen") and done and done < self.settings.steps:
            self._go_back(done)

    def _go_back(self, done: int) -> None:
        """Take the kept weights up again, and go on more slowly; the second time no further step is made."""
        assert self.best is not None
        self.falls += 1
        self.stepper.begin_anew(self.best.weights)
        then = f"goes on with {CALMER:g} times the rate" if self.falls == 1 else "ends here"
        said = (
            f"step {done:,}: {self.keep_best} has fallen; the training goes back to step {self.best.step:,} and {then}"
        )
        self.reporter.say(said)
        self._log(done, {"back_to": self.best.step}, kind="back")

    def _rate(self, step: int) -> float:
        settings = self.settings
        return settings.lr * CALMER**self.falls * SCHEDULES[settings.schedule](step / settings.steps)

    def _note_best(self, done: int, values: Mapping[str, Any]) -> None:
        if self.keep_best is None or (values.get("fallen") and self.best is not None):
            return
        score = float(values[self.keep_best])
        highest = score if self.best is None else max(score, self.best.highest)
        slack = self.tolerance * abs(highest) + float(values.get(f"{self.keep_best}_slack", 0.0))
        if self.best is None or score >= highest - slack:
            weights = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
            self.best = _Best(score, highest, done, weights)

    def _put_best_back(self, title: str) -> None:
        best = self.best
        if best is None or best.step == self.settings.steps:
            return
        self.module.load_state_dict(best.weights)
        if any(entry["kind"] == "kept" for entry in self.log):  # resumed after its last step: it is said already
            return
        where = "was highest" if best.score == best.highest else f"was still near its highest, {best.highest:.3g}"
        said = f"{title}: kept the weights of step {best.step:,}, where {self.keep_best} {where} ({best.score:.3g})"
        self.reporter.say(f"{said}; a tolerance of 1 keeps the last ones" if self.tolerance else said)
        self._log(self.settings.steps, {"kept_step": best.step, f"kept_{self.keep_best}": best.score}, kind="kept")

    def _seconds_before(self) -> float:
        """Seconds of the log that a resumed run goes on with."""
        earlier = read_log(self.run_folder.path) if self.run_folder is not None else []
        return float(earlier[-1].get("seconds", 0.0)) if earlier else 0.0

    def _means(self, done: int) -> dict[str, float]:
        self.stepper.check_finite(self._stop_for)
        terms = self.stepper.read_means()
        values = {"loss": sum(terms.values())} | {f"loss_{name}": value for name, value in terms.items()}
        return {**values, "lr": self._rate(done - 1)}

    def _stop_for(self, step: int, term: str) -> None:
        kept = f"the checkpoint of step {self.saved:,} is kept" if self.saved else "no checkpoint was written yet"
        raise NonFinite(
            f"step {step:,}: the loss term {term!r} is not finite; {kept}; try a smaller --lr or --set clip_norm=1"
        )

    def _log(self, done: int, values: Mapping[str, Any], kind: str = "training") -> None:
        entry = {"step": done, "kind": kind, **values, "seconds": round(time.monotonic() - self.began, 3)}
        self.log.append(entry)
        numbers = {key: value for key, value in values.items() if type(value) in (int, float) and "slack" not in key}
        if self.run_folder is not None:
            self.run_folder.log(entry)
        if self.writer is not None:
            for key, value in numbers.items():
                self.writer.add_scalar(f"{kind}/{key}", value, done)
        if kind == "evaluation":
            self._warn(done, values.get("warnings", ()))
        shown = numbers if kind == "evaluation" else {k: v for k, v in numbers.items() if k != "lr"}
        self.reporter.update(done, shown)

    def _warn(self, done: int, warnings: Sequence[str]) -> None:
        """Say a warning when it comes up, not again while it only changes its numbers."""
        words = {re.sub(r"[\d.,]+", "", warning): warning for warning in warnings}
        for key, warning in words.items():
            if key not in self.warned:
                self.reporter.say(f"step {done:,}: {warning}")
        self.warned = set(words)

    def _save(self, done: int) -> None:
        tensors = self.stepper.state()
        if not all(bool(torch.isfinite(value).all()) for value in tensors.values() if value.is_floating_point()):
            self._stop_for(done, "weights")
        if self.run_folder is None:
            return
        from safetensors.torch import save_file

        saved = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        metadata = {"step": str(done), "terms": "\n".join(self.stepper.terms), "falls": str(self.falls)}
        if self.best is not None:
            saved |= {f"best.{name}": value.cpu().contiguous().clone() for name, value in self.best.weights.items()}
            scores = {"best_score": repr(self.best.score), "best_highest": repr(self.best.highest)}
            metadata |= {"best_step": str(self.best.step), **scores}
        write_atomically(self.run_folder.checkpoint, lambda path: save_file(saved, path, metadata))
        self.saved = done

    def _resume(self) -> int:
        """The step to go on from; 0 without a checkpoint."""
        run = self.run_folder
        if run is None or not run.checkpoint.is_file():
            if run is not None:
                run.cut_log(0)
            return 0
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(run.checkpoint, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            step, self.falls = int(metadata["step"]), int(metadata.get("falls", "0"))
            self.stepper.load(tensors, metadata["terms"].split("\n"))
            if "best_step" in metadata:
                weights = {name[5:]: value for name, value in tensors.items() if name.startswith("best.")}
                score, highest = (float(metadata[name]) for name in ("best_score", "best_highest"))
                self.best = _Best(score, highest, int(metadata["best_step"]), weights)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            raise InputError(
                f"{run.checkpoint}: not a checkpoint of this run ({said}); remove it to start anew"
            ) from None
        run.cut_log(step)
        self.log = read_log(run.path)
        self.saved = step
        return step


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, passes in training mode leave no trace in the buffers (BatchNorm's running statistics)."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])


def _prefetched(next_batch: Callable[[int], B], steps: int) -> Callable[[int], B]:
    """The same batches, each made by a thread while the step before it runs, and none after the last step."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
    waiting: dict[int, Future[B]] = {}

    def take(step: int) -> B:
        future = waiting.pop(step, None) or executor.submit(next_batch, step)
        batch = future.result()
        if step + 1 < steps:
            waiting[step + 1] = executor.submit(next_batch, step + 1)
        return batch

    return take


def _beside(next_batch: Callable[[int], B], steps: int, device: torch.device) -> Callable[[int], B]:
    """The same batches, each made on a stream of its own while the step before it runs, and none after the last step.

    Views are many small kernels: they fit into the gaps between those of the step.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # the images may still be on their way
    waiting: dict[int, tuple[B, torch.cuda.Event]] = {}

    def make(step: int) -> tuple[B, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return next_batch(step), stream.record_event()

    def take(step: int) -> B:
        batch, made = waiting.pop(step) if step in waiting else make(step)
        if step + 1 < steps:
            waiting[step + 1] = make(step + 1)
        here = torch.cuda.current_stream(device)
        here.wait_event(made)

        def keep(tensor: Tensor) -> Tensor:
            tensor.record_stream(here)  # its memory is not given away before this stream is done with it
            return tensor

        return map_tensors(batch, keep)

    return take


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second signal ends the process at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: Any) -> None:  # noqa: ARG001 (the handler's signature)
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tensorboard(run: RunFolder, done: int) -> Any:
    """A writer of scalars; what an interrupted run wrote after the step it goes on from is taken back."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("tensorboard needs its package: pip install constraintmatch[tensorboard]") from None
    return SummaryWriter(str(run.path / "tensorboard"), purge_step=done + 1 if done else None)
