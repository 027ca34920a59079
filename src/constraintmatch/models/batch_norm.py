"""BatchNorm that can keep several batches apart in one pass: each is normed by the statistics of its own images."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BatchNorm", "apart", "can_keep_apart", "frozen_statistics", "passes"]


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm over images (n, c, h, w); inside `apart` over each part of the batch by itself.

    Steps are not counted: the counter serves an average over all steps, which nobody uses here, and costs a kernel.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.parts: tuple[int, ...] = ()  # always the module's own: compiled code looks where it lies

    def forward(self, input: Tensor) -> Tensor:
        if self.parts and self.training:
            return torch.cat([self._normed(part) for part in torch.split(input, list(self.parts))])
        return self._normed(input)

    def _normed(self, images: Tensor) -> Tensor:
        assert self.momentum is not None
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(images, mean, var, self.weight, self.bias, self.training, self.momentum, self.eps)


@contextmanager
def apart(module: nn.Module, sizes: Sequence[int]) -> Iterator[None]:
    """Inside, a batch that goes through the module counts as parts of these sizes, in this order."""
    norms = [norm for norm in module.modules() if isinstance(norm, BatchNorm)]
    for norm in norms:
        norm.parts = tuple(sizes)
    try:
        yield
    finally:
        for norm in norms:
            norm.parts = ()


def can_keep_apart(module: nn.Module) -> bool:
    """Whether `apart` reaches all statistics of the module."""
    return not any(isinstance(part, _BatchNorm) and not isinstance(part, BatchNorm) for part in module.modules())


def passes(network: Callable[..., Tensor], module: nn.Module, *batches: Tensor, joint: bool) -> Sequence[Tensor]:
    """What the network says of each batch, each normed by its own statistics; `joint`: in one pass, where that can be.

    One pass costs a GPU less than two (decision 026). `network` is `module`, compiled or not.
    """
    if not joint or not can_keep_apart(module):
        return [network(batch) for batch in batches]
    sizes = [len(batch) for batch in batches]
    with apart(module, sizes):
        return torch.split(network(torch.cat(batches)), sizes)


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, passes in training mode leave no trace in the buffers (running statistics)."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
