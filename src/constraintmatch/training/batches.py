"""Endless batches: which images a step sees, and their views, as a pure function of the step.

Nothing here has a state that a checkpoint would have to keep: the rows of step t and the draws of its views follow from
the seed and t alone, so a run that resumes at t sees what an uninterrupted one would have seen.
"""

import hashlib
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.training import ranks
from constraintmatch.training.views import View

B = TypeVar("B")
ViewMaker = Callable[..., Tensor]  # of a view, images, the step, a name and sizes: see `view_maker`


@dataclass(frozen=True)
class PairBatch:
    """Constrained pairs: views of both images (n, c, h, w) uint8, the link in [0, 1] and the weight of each (n,).

    With m triplets the sides have 2 m images more: the anchor with the near image of each, then with the far one. They
    have m weights more and no links.

    With several ranks the images of a batch are the share of this rank; all else is of the whole batch.
    """

    left: Tensor
    right: Tensor
    link: Tensor
    weight: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        """The images left and right, of all ranks."""
        n = 2 * len(self.weight) - len(self.link)
        return n, n


@dataclass(frozen=True)
class Views:
    """Two views of the same images (n, c, h, w) uint8, and the images' rows in the set (n,)."""

    weak: Tensor
    strong: Tensor
    rows: Tensor


def derive_seed(seed: int, *path: str | int) -> int:
    """A 63-bit seed for a named stream of a run: the same on every platform, unrelated between names."""
    text = "/".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same batch, a tensor, a tuple or a dataclass, with `function` applied to every tensor in it."""
    if batch is None or isinstance(batch, Tensor):
        return None if batch is None else function(batch)
    if isinstance(batch, tuple):
        return tuple(map_tensors(value, function) for value in batch)
    return replace(batch, **{field.name: map_tensors(getattr(batch, field.name), function) for field in fields(batch)})


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor in a batch, always in the same order."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


class ImageStore:
    """Images by row as uint8 (n, c, h, w): resident on the device when they fit, else streamed from (mapped) memory."""

    def __init__(self, images: ImageSet, device: torch.device, *, resident: bool | None = None) -> None:
        self.images = images.images
        self.device = device
        self.resident = _fits(images.images.nbytes, device) if resident is None else resident
        self._tensor = torch.from_numpy(np.array(images.images)).to(device) if self.resident else None

    def take(self, rows: Tensor) -> Tensor:
        """Images (n, c, h, w), channels-last in memory as the set stores them."""
        if self._tensor is not None:
            return self._tensor.index_select(0, rows).permute(0, 3, 1, 2)
        here = rows.cpu().numpy()
        _read_ahead(self.images, here)
        chosen = torch.from_numpy(self.images[here])
        if self.device.type == "cuda":
            chosen = chosen.pin_memory()
        return chosen.to(self.device, non_blocking=True).permute(0, 3, 1, 2)


def _read_ahead(images: NDArray[Any], rows: NDArray[np.int64]) -> None:
    """Ask the disk for all these rows of a map at once; else a page is asked for when the one before it is there."""
    whole = images if isinstance(images, np.memmap) else images.base
    if not isinstance(whole, np.memmap) or not isinstance(whole.base, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):
        return
    first, size = whole.offset % mmap.ALLOCATIONGRANULARITY, images[:1].nbytes
    if images.ctypes.data != whole.ctypes.data or not images.flags.c_contiguous:
        return
    for start in (first + rows * size).tolist():
        page = start - start % mmap.PAGESIZE
        whole.base.madvise(mmap.MADV_WILLNEED, page, start + size - page)


def _fits(size: int, device: torch.device) -> bool:
    """Whether `size` bytes may be kept on the device: up to a third of what is free on a GPU, 2 GiB on a CPU."""
    if device.type == "cuda":
        return size < torch.cuda.mem_get_info(device)[0] / 3
    return size < 2**31  # a CPU reads a memory map as well as a copy; small sets are copied, large ones stay mapped


class Shuffled:
    """The rows of step t, out of n: epoch after epoch in random order, without the incomplete last batch of an epoch.

    With fewer rows than `batch` a step sees all of them.
    """

    def __init__(self, n: int, batch: int, seed: int, device: torch.device | str = "cpu") -> None:
        if n == 0:
            raise InputError("there is nothing to draw batches from: the set is empty")
        if batch < 1:
            raise InputError(f"{batch} images or pairs a step: ask for 1 or more")
        batch = min(batch, n)
        if batch < (size := ranks.world()):
            raise InputError(f"{batch} images or pairs a step for {size} ranks: some have none; start fewer ranks")
        self.n, self.batch, self.seed, self.device = n, batch, seed, device
        self.steps_per_epoch = n // batch
        self._epoch, self._order = -1, torch.empty(0)

    def __call__(self, step: int) -> Tensor:
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:  # one upload an epoch, none in between
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
            self._order, self._epoch = torch.randperm(self.n, generator=generator).to(self.device), epoch
        return self._order[position * self.batch : (position + 1) * self.batch]


def view_maker(seed: int, device: torch.device, *, compile: bool = False) -> ViewMaker:
    """A function that applies views with the draws of a step; each view is compiled once where that pays.

    It gives the view of each image (n, c, h, w); two views of one step have two names. The images are this rank's share
    of parts of these sizes: the draws are those of the whole batch.
    """
    generator = torch.Generator(device)
    function = cache(lambda view: torch.compile(view.apply, dynamic=False) if compile else view.apply)

    def make(view: View, images: Tensor, step: int, name: str, *sizes: int) -> Tensor:
        if view.n_draws == 0:
            return view.apply(images, images.new_empty((len(images), 0), dtype=torch.float32))
        generator.manual_seed(derive_seed(seed, "view", name, step))
        draws = torch.rand((sum(sizes) or len(images), view.n_draws), generator=generator, device=images.device)
        with torch.no_grad():
            made: Tensor = function(view)(images, ranks.mine(draws, *sizes))
            return made

    return make


def pair_batches(
    store: ImageStore, constraints: Constraints, batch: int, view: View, maker: ViewMaker, seed: int
) -> Callable[[int], PairBatch]:
    """Batches of constrained pairs under one view, by the step; with as many triplets, or all that there are."""
    columns: list[Any] = [constraints.left, constraints.right, constraints.link, constraints.weight]
    kinds, triplets = [("pairs", len(constraints))] * bool(len(constraints)), constraints.triplets
    if len(triplets):
        columns += [*triplets.rows.T, triplets.weight]
        kinds.append(("triplets", len(triplets)))
    draws = {kind: Shuffled(n, batch, derive_seed(seed, kind), store.device) for kind, n in kinds}
    left, right, link, weight, *more = (torch.from_numpy(column.copy()).to(store.device) for column in columns)
    none = torch.empty(0, dtype=torch.int64, device=store.device)

    def next_batch(step: int) -> PairBatch:
        chosen = draws["pairs"](step) if "pairs" in draws else none
        lefts, rights, weights = left[chosen], right[chosen], weight[chosen]
        if "triplets" in draws:
            anchor, near, far, triplet_weight = (column[draws["triplets"](step)] for column in more)
            lefts, rights = torch.cat((lefts, anchor, anchor)), torch.cat((rights, near, far))
            weights = torch.cat((weights, triplet_weight))
        both = len(lefts), len(lefts)
        images = store.take(ranks.mine(torch.cat((lefts, rights)), *both))
        one, other = maker(view, images, step, "pairs", *both).chunk(2)
        return PairBatch(one, other, link[chosen], weights)

    return next_batch


def batches_ahead(
    next_batch: Callable[[int], B], steps: int, *, stream: torch.cuda.Stream | None
) -> Callable[[int], B]:
    """The same batches, each made while the step before it runs, and none after the last step.

    A thread makes them, or the given stream: views are many small kernels, which fit into the gaps between those of the
    step.
    """
    begin = _in_thread(next_batch) if stream is None else _on_stream(next_batch, stream)
    begun: dict[int, Callable[[], B]] = {}

    def take(step: int) -> B:
        batch = (begun.pop(step, None) or begin(step))()
        if step + 1 < steps:
            begun[step + 1] = begin(step + 1)
        return batch

    return take


def _in_thread(next_batch: Callable[[int], B]) -> Callable[[int], Callable[[], B]]:
    executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
    return lambda step: executor.submit(next_batch, step).result


def _on_stream(next_batch: Callable[[int], B], stream: torch.cuda.Stream) -> Callable[[int], Callable[[], B]]:
    stream.wait_stream(torch.cuda.current_stream(stream.device))  # the images may still be on their way

    def begin(step: int) -> Callable[[], B]:
        with torch.cuda.stream(stream):
            batch, made = next_batch(step), stream.record_event()

        def finish() -> B:
            here = torch.cuda.current_stream(stream.device)
            here.wait_event(made)
            for tensor in tensors_of(batch):
                tensor.record_stream(here)  # its memory is not given away before this stream is done with it
            return batch

        return finish

    return begin
