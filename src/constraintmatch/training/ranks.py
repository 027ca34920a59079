"""Ranks: processes that train one model together, as `torchrun` starts them.

Every rank knows the rows of the whole batch and reads its own share of the images. The outputs of the network are
gathered, so a loss sees what one process would see; losses over all pairs are split by rows. Norms take the statistics
of the whole batch. Every rank ends a step with the same weights; rank 0 alone writes the run folder.

Gradients: each rank has the whole loss, sums over ranks pass gradients back as sums, and DDP takes their mean.
"""

import hashlib
import logging
import os
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import say_error

Value = TypeVar("Value")
FOUND = timedelta(seconds=60)  # to find the other ranks
WAIT = timedelta(hours=6)  # for one of them: rank 0 may decode images first. A rank that is gone is noticed at once
AGAIN = "run the same command again (train: with --resume)"
LAUNCHED = "CONSTRAINTMATCH_GPUS"  # set in the processes that `launch` starts; it says which of them was killed
ENDED = "Connection closed|Connection reset|Broken pipe|Timed out|gloo|NCCL".lower().split("|")

_rank, _size, _joint = 0, 1, False


class Lost(InputError):
    """Another rank has ended."""


def world() -> int:
    """The number of ranks that train together: 1 outside `together`."""
    return _size if _joint else 1


def first() -> bool:
    """Whether this is rank 0, which writes and speaks for all."""
    return _rank == 0


def mine(rows: Tensor, *sizes: int) -> Tensor:
    """This rank's share of the rows; of each part, where they are parts of these sizes."""
    if world() == 1:
        return rows
    parts = torch.split(rows, list(sizes) or len(rows))
    shares = [part[slice(*_bounds(len(part)))] for part in parts]
    return shares[0] if len(shares) == 1 else torch.cat(shares)


def gather(share: Tensor, *sizes: int) -> Tensor:
    """The rows of all ranks, with gradients, from each rank's share of parts of these sizes: the reverse of `mine`."""
    if world() == 1:
        return share
    bounds = [_bounds(n) for n in sizes]
    parts = torch.split(lift(share), [end - begin for begin, end in bounds])
    rest = (0, 0) * (share.ndim - 1)
    placed = [F.pad(part, (*rest, begin, n - end)) for part, (begin, end), n in zip(parts, bounds, sizes, strict=True)]
    return add(torch.cat(placed))


def lift(values: Tensor) -> Tensor:
    """Half precisions as fp32; float64 stays float64."""
    return values if values.dtype == torch.float64 else values.float()


def _bounds(n: int) -> tuple[int, int]:
    return _rank * n // _size, (_rank + 1) * n // _size


def add(value: Tensor) -> Tensor:
    """The sum over ranks, with gradients."""
    return value if world() == 1 else cast(Tensor, _Sum.apply(value))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return add(gradient)


def deviation(values: Tensor) -> Tensor:
    """The standard deviation (d,) of rows (n, d) over all ranks."""
    if world() == 1:
        return values.std(dim=0, correction=0)
    return _moments(values, [0])[1].sqrt()


def replicate(module: nn.Module) -> nn.Module:
    """The module, with gradients that are the mean over ranks, and the weights of rank 0."""
    if world() == 1:
        return module
    warnings.filterwarnings("ignore", "Grad strides do not match")  # of 1×1 convolutions, channels-last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 has another name for the argument
        return nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)


class _JointNorms(TorchFunctionMode):
    """Batch norms in training take the statistics of all ranks."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = _batch_norm if function is F.batch_norm else function
        return called(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if input.is_cuda:
        from torch.nn.modules._functions import SyncBatchNorm

        given = (input, weight, bias, running_mean, running_var, eps, momentum, distributed.group.WORLD, _size)
        return cast(Tensor, SyncBatchNorm.apply(*given))
    values = lift(input)
    mean, var, n = _moments(values, [0, *range(2, input.ndim)])
    with torch.no_grad():
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(var * n / (n - 1).clamp(min=1), momentum)
    shape = (1, -1, *[1] * (input.ndim - 2))
    normed = (values - mean.view(shape)) * (var + eps).rsqrt().view(shape)
    if weight is not None and bias is not None:
        normed = normed * weight.view(shape) + bias.view(shape)
    return normed.to(input.dtype)


def _moments(values: Tensor, over: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (c,) and variance (c,) over these dimensions and all ranks, and the number of values ()."""
    var, mean = torch.var_mean(values, over, correction=0)
    count = mean.new_tensor([values.numel() // len(mean)])
    found = gather(torch.cat((mean, var, count))[None], _size)
    means, vars, counts = torch.split(found, [len(mean), len(mean), 1], dim=1)
    share = counts / counts.sum()
    mean = (share * means).sum(0)
    return mean, (share * (vars + (means - mean) ** 2)).sum(0), counts.sum()


# What ranks tell each other


def agree(value: Value) -> Value:
    """What rank 0 has."""
    if world() == 1:
        return value
    held = [value]
    distributed.broadcast_object_list(held, src=0)
    return held[0]


def everyone(value: Value) -> list[Value]:
    """What each rank has."""
    if world() == 1:
        return [value]
    held: list[Any] = [None] * _size
    distributed.all_gather_object(held, value)
    return held


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; on CPUs, so that no GPU is waited for."""
    if world() == 1:
        return flag
    count = torch.tensor(int(flag))
    distributed.all_reduce(count)
    return bool(count)


# How they start and end


def is_launched() -> bool:
    """Whether `torchrun` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_restarted() -> bool:
    """Whether `torchrun --max-restarts` started this process again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextmanager
def started(device: torch.device) -> Iterator[None]:
    """Inside, this process knows the other ranks that were started with it; one rank reports an error for all."""
    global _rank, _size
    if not is_launched():
        yield
        return
    store = _find_ranks(device)
    _rank, _size = distributed.get_rank(), distributed.get_world_size()
    try:
        with clear_errors():
            yield
        distributed.destroy_process_group()  # not after an error: it would wait for ranks that are gone
    except KeyboardInterrupt:
        if not first():
            raise SystemExit(130) from None
        raise
    except (InputError, OSError) as error:
        lost = isinstance(error, Lost)
        if (lost and LAUNCHED in os.environ) or _is_said(store, unknown=not lost):
            raise SystemExit(2) from None
        raise
    finally:
        _rank, _size = 0, 1


def _is_said(store: Any, *, unknown: bool) -> bool:
    """Whether another rank has reported the error; if not, this one does. `unknown` is for a store that is gone."""
    try:
        return int(store.add("said", 1)) > 1
    except RuntimeError:
        return unknown


def _find_ranks(device: torch.device) -> Any:
    """Join the process group; the store that its ranks share."""
    local, backend = int(os.environ.get("LOCAL_RANK", "0")), "gloo"
    if device.type == "mps":
        raise InputError("several ranks need CUDA or CPUs; add --device cpu")
    if device.type == "cuda":
        if local >= (n := torch.cuda.device_count()):
            raise InputError(f"rank {os.environ['RANK']} has no GPU: there are {n}; start at most {n} ranks here")
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    try:
        store, rank, size = next(distributed.rendezvous("env://", timeout=FOUND))
        store = separate_start(store, rank, size)
        store.set_timeout(WAIT)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=WAIT)
    except (RuntimeError, ValueError) as error:
        why = f"the ranks do not find each other ({str(error).splitlines()[0][:200]})"
        raise InputError(why, place, "check MASTER_ADDR, MASTER_PORT and that every rank was started") from None
    return store


def separate_start(store: distributed.Store, rank: int, size: int) -> distributed.Store:
    """A part of the store that only the ranks of this start know.

    The store of `torchrun` outlives ranks that are started again, and still holds the addresses of those before. So
    each rank writes a new name; all names together are the name of the start, once every rank has read the same ones.
    """
    store.set(f"rank {rank}", uuid.uuid4().hex)
    end = time.monotonic() + FOUND.total_seconds()
    while True:
        names = b" ".join(store.get(f"rank {one}") for one in range(size))
        start = hashlib.blake2b(names, digest_size=16).hexdigest()
        store.set(f"{start} {rank}", "")
        try:
            store.wait([f"{start} {one}" for one in range(size)], timedelta(seconds=1))
        except RuntimeError:  # a name of a rank that was before; the new one comes
            if time.monotonic() > end:
                raise
        else:
            return distributed.PrefixStore(start, store)


@contextmanager
def in_turn() -> Iterator[None]:
    """Rank 0 goes first, then one rank of every other machine, then the rest: they find what the first has decoded."""
    turn = 0 if _rank == 0 else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
    for _ in range(turn):
        _meet()
    yield
    for _ in range(2 - turn):
        _meet()


def _meet() -> None:
    if _size > 1:
        distributed.all_reduce(torch.zeros(1))


@contextmanager
def together() -> Iterator[None]:
    """Inside, the ranks train as one."""
    global _joint
    if _size == 1:
        yield
        return
    _joint = True
    try:
        with _JointNorms():
            yield
    finally:
        _joint = False


@contextmanager
def clear_errors() -> Iterator[None]:
    """A rank that is gone, and a GPU without memory, are an InputError."""
    try:
        yield
    except torch.OutOfMemoryError:
        fix = "lower images_per_step and pairs_per_step with --set, or share a step among more GPUs with --gpus"
        raise InputError("the memory of the GPU is full", "", fix) from None
    except RuntimeError as error:
        if _size == 1 or not any(word in str(error).lower() for word in ENDED):
            raise
        raise Lost("another rank has ended", f"rank {_rank} of {_size}", AGAIN) from None


def launch(n: int, device: torch.device) -> int:
    """Run this command in n processes, one for each GPU, and give back the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if n < 1:
        raise InputError(f"--gpus {n}: ask for 1 or more")
    if device.type != "cpu" and n > (there := torch.cuda.device_count()):
        raise InputError(f"--gpus {n}: there are {there} here; ask for fewer, or for processes with --device cpu")
    os.environ[LAUNCHED] = str(n)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // n)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what is wrong
    config = LaunchConfig(1, 1, n, run_id="constraintmatch", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    config.max_restarts = 0
    try:
        elastic_launch(config, sys.executable)("-m", "constraintmatch", *sys.argv[1:])
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return int(failure.exitcode)
        ended = signal.Signals(-failure.exitcode).name
        return say_error(f"error: rank {rank} was ended by {ended}; {AGAIN}", 1)
    return 0
