"""BatchNorm that can keep several batches apart in one pass: each is normed by the statistics of its own images."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BatchNorm", "apart", "can_keep_apart", "passes"]

MOST_PIECES = 16  # statistics are taken of equal pieces first; many small ones cost more than a pass saves


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm over images (n, c, h, w); inside `apart` over each part of the batch by itself.

    Steps are not counted: the counter serves an average over all steps, which nobody uses here, and costs a kernel.
    """

    parts: tuple[int, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        if self.parts and self.training:
            return self._parted(input)
        # a ready-made function for one batch
        mean, var, momentum = self.running_mean, self.running_var, self.momentum or 0.0
        return F.batch_norm(input, mean, var, self.weight, self.bias, self.training, momentum, self.eps)

    def _parted(self, images: Tensor) -> Tensor:
        """Each part normed like a batch of its own. The pieces are their greatest common size: one kernel does all."""
        piece = math.gcd(*self.parts)
        pieces = images.to(self.weight.dtype).view(-1, piece, *images.shape[1:])
        var, mean = torch.var_mean(pieces, dim=(1, 3, 4), correction=0)
        middles, scales, first = [], [], 0
        for size in self.parts:
            rows = slice(first, first := first + size // piece)
            middle = mean[rows].mean(0)
            spread = var[rows].mean(0) + (mean[rows] - middle).square().mean(0)
            self._follow(middle, spread, size * images.shape[2] * images.shape[3])
            middles.append(middle.expand(size // piece, -1))
            scales.append((self.weight * (spread + self.eps).rsqrt()).expand(size // piece, -1))
        middle, scale = (torch.cat(values)[:, None, :, None, None] for values in (middles, scales))
        normed = (pieces - middle) * scale + self.bias[:, None, None]
        return normed.to(images.dtype).flatten(0, 1)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Move the running statistics as a pass of this part alone would."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * (count / (count - 1)), self.momentum)


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


def can_keep_apart(module: nn.Module, sizes: Sequence[int]) -> bool:
    """Whether `apart` reaches all statistics of the module, and the sizes have a large common piece."""
    foreign = any(isinstance(part, _BatchNorm) and not isinstance(part, BatchNorm) for part in module.modules())
    return not foreign and sum(sizes) <= MOST_PIECES * math.gcd(*sizes)


def passes(network: Callable[..., Tensor], module: nn.Module, *batches: Tensor, joint: bool) -> Sequence[Tensor]:
    """What the network says of each batch, each normed by its own statistics; `joint`: in one pass, where that can be.

    One pass costs the GPU less than two: of an H200's time for 400 small images a quarter does not depend on how many
    they are. `network` is `module`, compiled or not.
    """
    sizes = [len(batch) for batch in batches]
    if not joint or not can_keep_apart(module, sizes):
        return [network(batch) for batch in batches]
    with apart(module, sizes):
        return torch.split(network(torch.cat(batches)), sizes)
