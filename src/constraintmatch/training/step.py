"""One optimisation step: eager, compiled, or replayed as a CUDA graph; the host does not wait for the device in it."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from constraintmatch.training import ranks
from constraintmatch.training.batches import map_tensors, tensors_of

B = TypeVar("B")
FEWEST, SMALL = 16, 8  # channels, and side of a map: elsewhere a forward convolution is no faster way back
WARM_UP = 3  # eager steps before a capture: lazy initialisation, autotuning and momentum buffers happen in them


class Stepper(Generic[B]):
    """Applies one step to the module's weights per call and keeps sums of the loss terms as tensors.

    With `cuda_graph` the first steps run eagerly; then the whole step (network, loss, backward, optimiser) is captured
    once and replayed, so that the host only prepares batches. Batches must keep their shapes. The optimiser's rate is
    then a tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Callable[..., Tensor], B], dict[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        ema: float | None,
        bf16: bool,
        compile: bool,
        cuda_graph: bool,
    ) -> None:
        self.module, self.loss, self.optimizer = module, loss, optimizer
        self.clip_norm, self.ema, self.bf16, self.graphed = clip_norm, ema, bf16, cuda_graph
        self.parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
        self.device = device = self.parameters[0].device
        self.network = cast(
            "Callable[..., Tensor]",
            torch.compile(module, dynamic=False, options=_options(device)) if compile else ranks.replicate(module),
        )
        self.convolves = any(isinstance(part, nn.Conv2d) for part in module.modules())
        self.record = torch.compile(_record, dynamic=False) if compile else _record
        self.average = {k: v.detach().clone() for k, v in module.state_dict().items()} if ema else {}
        self.terms: list[str] = []
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # steps done
        self.sums = torch.zeros(0, device=device)  # of each term since the last reading
        self.summed = torch.zeros((), dtype=torch.int64, device=device)
        self.bad = torch.zeros(0, dtype=torch.int64, device=device)  # first step with a non-finite term; -1: none
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: list[Tensor] = []  # what the graph reads

    def __call__(self, batch: B, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self.graph is not None:
            for held, given in zip(self.static, tensors_of(batch), strict=True):
                held.copy_(given)
            self.graph.replay()
            return
        with self._place(batch) as batch:
            self.optimizer.zero_grad(set_to_none=True)
            # the cache of casts would outlive a capture; compiled code does not use it
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
                terms = self.loss(self.network, batch)
            values = torch.stack([value.float() for value in terms.values()])
            with _quick_backward(self.device) if self.convolves else nullcontext():
                values.sum().backward()  # type: ignore[no-untyped-call]
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
            self.optimizer.step()
            with torch.no_grad():
                self._note(list(terms), values.detach())

    @contextmanager
    def _place(self, batch: B) -> Iterator[B]:
        """Where a step runs: here; on a side stream, as CUDA graphs ask of the steps before a capture; in a capture."""
        self.calls += 1
        if not self.graphed:
            yield batch
        elif self.calls <= WARM_UP:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                yield batch
            torch.cuda.current_stream(self.device).wait_stream(stream)
        else:
            static = map_tensors(batch, torch.clone)
            self.optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            # other threads may go on allocating: one makes the next batch where images are streamed
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                yield static
            graph.replay()  # a capture records the step and does not do it
            self.graph, self.static = graph, tensors_of(static)

    def _note(self, names: list[str], values: Tensor) -> None:
        """Update the average of the weights and the sums of the terms."""
        if self.ema is not None:
            for name, value in self.module.state_dict().items():
                if value.is_floating_point():
                    self.average[name].lerp_(value, 1 - self.ema)
                else:
                    self.average[name].copy_(value)
        if not self.terms:
            self.terms = names
            self.sums = torch.zeros_like(values)
            self.bad = torch.full_like(values, -1, dtype=torch.int64)
        self.record(values, self.count, self.summed, self.sums, self.bad)

    def read_means(self) -> dict[str, float]:
        """Mean of each term since the last reading; the host waits for the device here."""
        means = (self.sums / self.summed.clamp(min=1)).tolist()
        self.sums.zero_()
        self.summed.zero_()
        return dict(zip(self.terms, means, strict=True))

    def first_bad(self) -> tuple[int, str] | None:
        """The first step with a term that was NaN or infinite, and the term."""
        found = zip(self.bad.tolist(), self.terms, strict=True)
        return min(((step, term) for step, term in found if step >= 0), default=None)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a resumed run needs, by name."""
        tensors = {f"module.{name}": value for name, value in self.module.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{k}": v for k, v in entries.items() if isinstance(v, Tensor)}
        return tensors | {"count": self.count, "sums": self.sums, "summed": self.summed}

    def load(self, tensors: Mapping[str, Tensor], terms: list[str]) -> None:
        """Load what `state` returned, and the names of the terms."""
        self.module.load_state_dict(part_of(tensors, "module"))
        for name, value in part_of(tensors, "average").items():
            self.average[name].copy_(value)
        entries = {index: part_of(tensors, f"optimizer.{index}") for index in range(len(self.parameters))}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": entries})
        self.terms = terms
        self.count, self.sums, self.summed = (tensors[k].to(self.device) for k in ("count", "sums", "summed"))
        self.bad = torch.full((len(terms),), -1, dtype=torch.int64, device=self.device)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the module has the averaged weights (where there is an average)."""
        before = {name: value.clone() for name, value in self.module.state_dict().items()} if self.average else {}
        self.keep_average()
        try:
            yield
        finally:
            if before:
                self.module.load_state_dict(before)

    def keep_average(self) -> None:
        """Leave the module with the averaged weights, where there is an average."""
        if self.average:
            self.module.load_state_dict(self.average)

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Put these weights into the module and its average, and reset the optimiser; all in place."""
        self.module.load_state_dict(weights)
        for name, value in self.average.items():
            value.copy_(weights[name])
        for entries in self.optimizer.state.values():
            for value in entries.values():
                if isinstance(value, Tensor):
                    value.zero_()


def part_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors of `part.…` in a checkpoint, by the rest of their names."""
    return {name[len(part) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{part}.")}


def _quick_backward(device: torch.device) -> AbstractContextManager[Any]:
    """Where to go back through a network: on an ARM CPU convolutions take a quicker way."""
    on_arm = device.type == "cpu" and platform.machine() == "aarch64" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return ForwardKernels() if on_arm else nullcontext()  # type: ignore[no-untyped-call]


class ForwardKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, gradients of convolutions come from forward convolutions: on ARM these are up to four times faster.

    The gradient of the input is a convolution of the output's gradient with the turned weights. That of the weights is
    one of the input with the output's gradient, where images and channels change places. Other cases go through
    torch's own kernels; oneDNN's are slower there.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.convolution_backward.default:
            return func(*args, **(kwargs or {}))
        grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = args
        height, width = weight.shape[-2:]
        plain = x.ndim == 4 and set(dilation) == {1} and groups == 1 and not transposed and height * width > 1
        whole = set(stride) == {1}
        turned = plain and whole and weight.shape[1] >= FEWEST and padding[0] < height and padding[1] < width
        plain = plain and (whole or max(grad.shape[2:]) <= SMALL)
        own = turned, plain, False
        found = list(_go_back(args, [want and not ours for want, ours in zip(wanted, own, strict=True)]))
        if turned and wanted[0]:
            around = height - 1 - padding[0], width - 1 - padding[1]
            found[0] = torch.conv2d(grad, weight.flip(2, 3).transpose(0, 1), padding=around)
        if plain and wanted[1]:
            swapped = torch.conv2d(x.transpose(0, 1), grad.transpose(0, 1), padding=padding, dilation=stride)
            found[1] = swapped.transpose(0, 1)[:, :, :height, :width].contiguous()
        return tuple(found)


def _go_back(args: Sequence[Any], wanted: list[bool]) -> Sequence[Tensor | None]:
    """The wanted gradients of a convolution, by torch's own kernels."""
    if not any(wanted):
        return None, None, None
    before = torch.backends.mkldnn.set_flags(False)[0]  # type: ignore[no-untyped-call]
    try:
        return cast(Sequence[Tensor | None], torch.ops.aten.convolution_backward(*args[:-1], wanted))
    finally:
        torch.backends.mkldnn.set_flags(before)  # type: ignore[no-untyped-call]


def _options(device: torch.device) -> dict[str, Any] | None:
    """The options of the compiler on CUDA that this version of torch knows.

    Casts of weights and the like become a few kernels instead of dozens. The kernel that uses joined parts of a batch
    also joins them.
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
