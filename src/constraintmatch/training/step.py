"""One optimisation step: eager, compiled, or replayed as a CUDA graph; no host synchronisation inside it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from constraintmatch.training.batches import map_tensors

__all__ = ["Settings", "Stepper"]

B = TypeVar("B")
WARM_UP = 3  # eager steps before a capture: lazy initialisation, autotuning and momentum buffers happen in them


class Settings(Protocol):
    """What the stepper reads of `TrainSettings`."""

    @property
    def lr(self) -> float: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip_norm(self) -> float | None: ...
    @property
    def ema(self) -> float | None: ...
    @property
    def bf16(self) -> bool | None: ...
    @property
    def compile(self) -> bool | None: ...
    @property
    def cuda_graph(self) -> bool | None: ...


class Stepper(Generic[B]):
    """Applies one step to the module's weights per call and keeps sums of the loss terms as tensors.

    On CUDA the first steps run eagerly; then the whole step (network, loss, backward, optimiser) is captured once and
    replayed, so that the host only prepares batches. Batches must keep their shapes.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Callable[..., Tensor], B], dict[str, Tensor]],
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.module, self.loss, self.settings, self.device = module, loss, settings, device
        self.network = cast(
            "Callable[..., Tensor]",
            torch.compile(module, dynamic=False, options=_options(device)) if settings.compile else module,
        )
        self.graphed = bool(settings.cuda_graph) and device.type == "cuda"
        self.lr = torch.tensor(settings.lr, device=device) if self.graphed else None
        self.parameters = [value for value in module.parameters() if value.requires_grad]
        self.optimizer = _optimizer(self.parameters, settings, device, self.lr)
        self.average = {k: v.detach().clone() for k, v in module.state_dict().items()} if settings.ema else {}
        self.terms: list[str] = []
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # steps done
        self.sums = torch.zeros(0, device=device)  # of each term since the last reading
        self.summed = torch.zeros((), dtype=torch.int64, device=device)
        self.bad = torch.zeros(0, dtype=torch.int64, device=device)  # first step with a non-finite term; -1: none
        self.record = torch.compile(_record, dynamic=False) if settings.compile else _record
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: B | None = None

    def __call__(self, batch: B, lr: float) -> None:
        self._set_lr(lr)
        if not self.graphed:
            self._step(batch)
        elif self.graph is not None:
            assert self.static is not None
            _copy_into(self.static, batch)
            self.graph.replay()
        elif self.calls < WARM_UP:
            self._step_aside(batch)
        else:
            self._capture(batch)
        self.calls += 1

    def read_means(self) -> dict[str, float]:
        """Mean of each term since the last reading; the one place where the host waits for the device."""
        means = (self.sums / self.summed.clamp(min=1)).tolist()
        self.sums.zero_()
        self.summed.zero_()
        return dict(zip(self.terms, means, strict=True))

    def check_finite(self, stop: Callable[[int, str], None]) -> None:
        """Call `stop(step, term)` for the first term that was NaN or infinite."""
        found = [(step, term) for step, term in zip(self.bad.tolist(), self.terms, strict=True) if step >= 0]
        if found:
            stop(*min(found))

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a resumed run needs, by name."""
        tensors = {f"module.{name}": value for name, value in self.module.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{k}": v for k, v in entries.items() if isinstance(v, Tensor)}
        return tensors | {"count": self.count, "sums": self.sums, "summed": self.summed}

    def load(self, tensors: Mapping[str, Tensor], terms: list[str]) -> None:
        """Take over a state that `state` gave; the term names of the log come beside it."""
        self.module.load_state_dict(_under("module.", tensors))
        for name, value in _under("average.", tensors).items():
            self.average[name].copy_(value)
        self._load_optimizer(_under("optimizer.", tensors))
        self.terms = terms
        self.count, self.sums, self.summed = (tensors[k].to(self.device) for k in ("count", "sums", "summed"))
        self.bad = torch.full((len(terms),), -1, dtype=torch.int64, device=self.device)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the module has the averaged weights (where there is an average)."""
        own = self.module.state_dict()
        before = {name: value.clone() for name, value in own.items()} if self.average else {}
        for name, value in self.average.items():
            own[name].copy_(value)
        try:
            yield
        finally:
            for name, value in before.items():
                own[name].copy_(value)

    def keep_average(self) -> None:
        """Leave the module with the averaged weights, where there is an average."""
        own = self.module.state_dict()
        for name, value in self.average.items():
            own[name].copy_(value)

    def begin_anew(self, weights: Mapping[str, Tensor]) -> None:
        """Put these weights into the module and its average, and let the optimiser forget; all in place."""
        with torch.no_grad():
            for place in (self.module.state_dict(), self.average):
                for name, value in place.items():
                    value.copy_(weights[name])
            for entries in self.optimizer.state.values():
                for value in entries.values():
                    if isinstance(value, Tensor):
                        value.zero_()

    def _load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            index, key = name.split(".", 1)
            state.setdefault(int(index), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if self.lr is not None:  # loading put a copy there
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr

    def _set_lr(self, lr: float) -> None:
        if self.lr is not None:
            self.lr.fill_(lr)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _step(self, batch: B) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # the cache of casts would outlive a capture; compiled code does not use it
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bool(self.settings.bf16), cache_enabled=False):
            terms = self.loss(self.network, batch)
        total = torch.stack([value.float() for value in terms.values()])
        total.sum().backward()  # type: ignore[no-untyped-call]
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm)
        self.optimizer.step()
        with torch.no_grad():
            self._update_average()
            self._note(list(terms), total.detach())

    def _note(self, names: list[str], values: Tensor) -> None:
        if not self.terms:
            self.terms = names
            self.sums = torch.zeros_like(values)
            self.bad = torch.full_like(values, -1, dtype=torch.int64)
        self.record(values, self.count, self.summed, self.sums, self.bad)

    def _update_average(self) -> None:
        if self.settings.ema is None:
            return
        for name, value in self.module.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 1 - self.settings.ema)
            else:
                self.average[name].copy_(value)

    def _step_aside(self, batch: B) -> None:
        """A step on a side stream, as CUDA graphs ask of the steps before a capture."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._step(batch)
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _capture(self, batch: B) -> None:
        self.static = map_tensors(batch, torch.clone)
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        # other threads may go on allocating: the next batch is made by one where images are streamed
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._step(self.static)
        self.graph.replay()  # a capture records the step and does not do it


def _options(device: torch.device) -> dict[str, Any] | None:
    """What the compiler is asked for on CUDA, as far as this torch knows it.

    Casts of weights and the like as a few kernels instead of dozens; joined parts of a batch written by the
    kernel that goes on with them, not by one of their own.
    """
    if device.type != "cuda":
        return None
    from torch._inductor import config

    return {name: True for name in ("combo_kernels", "force_pointwise_cat") if hasattr(config, name)}


def _record(values: Tensor, count: Tensor, summed: Tensor, sums: Tensor, bad: Tensor) -> None:
    """Count a step, add its terms to the sums, and keep the first step at which each was not finite; all in place."""
    count += 1
    summed += 1
    sums += values
    bad.copy_(torch.where(~values.isfinite() & (bad < 0), count, bad))


def _optimizer(
    parameters: list[nn.Parameter], settings: Settings, device: torch.device, lr: Tensor | None
) -> torch.optim.Optimizer:
    rate = settings.lr if lr is None else lr
    fused = device.type == "cuda"
    if settings.optimizer == "adam":
        decay, graphed = settings.weight_decay, lr is not None
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, fused=fused, capturable=graphed)
    return torch.optim.SGD(
        parameters, lr=rate, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=fused
    )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _copy_into(target: B, source: B) -> None:
    """Copy every tensor of one batch into the same place of another."""
    sources: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        sources.append(value)
        return value

    map_tensors(source, note)
    waiting = iter(sources)
    map_tensors(target, lambda value: value.copy_(next(waiting)))
