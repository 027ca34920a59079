"""BatchNorm that can keep several batches apart in one pass: each is normed by the statistics of its own images."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

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

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.parts: tuple[int, ...] = ()  # always the module's own: compiled code looks where it lies

    def forward(self, input: Tensor) -> Tensor:
        if self.parts and self.training:
            return self._parted(input)
        mean, var, momentum = self.running_mean, self.running_var, self.momentum or 0.0
        return F.batch_norm(input, mean, var, self.weight, self.bias, self.training, momentum, self.eps)

    def _parted(self, images: Tensor) -> Tensor:
        normed, means, variances = _Parted.apply(images, self.weight, self.bias, self.parts, self.eps)
        for size, mean, var in zip(self.parts, means, variances, strict=True):
            self._follow(mean, var, size * images.shape[2] * images.shape[3])
        return cast(Tensor, normed)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Move the running statistics as a pass of this part alone would."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * (count / (count - 1)), self.momentum)


class _Parted(torch.autograd.Function):
    """Images (n, c, h, w) normed by parts, and the means and variances (parts, c); the gradient is BatchNorm's.

    Sums are taken over pieces, the parts' greatest common size: one kernel does all. Left to autograd, the variance
    would have the images read once more on the way back.
    """

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, parts: tuple[int, ...], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = images.to(weight.dtype)
        var, mean = torch.var_mean(_pieces(values, parts), dim=(1, 3, 4), correction=0)
        means = torch.stack([part.mean(0) for part in _split(mean, parts)])
        variances = torch.stack(
            [
                within.mean(0) + between.var(0, correction=0)
                for within, between in zip(_split(var, parts), _split(mean, parts), strict=True)
            ]
        )
        scales = (variances + eps).rsqrt()
        ctx.save_for_backward(images, weight, means, scales)
        ctx.parts = parts
        normed = (values - _by_image(means, parts)) * _by_image(scales * weight, parts) + bias[:, None, None]
        return normed.to(images.dtype), means, variances

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, means, scales = ctx.saved_tensors
        parts = ctx.parts
        grad = grad.to(weight.dtype)
        # a sum, not the difference of the way there: the compiler would keep that one, in twice the images' precision
        centred = images.to(weight.dtype) + _by_image(-means, parts)
        sums, products = (
            torch.stack([part.sum(0) for part in _split(_pieces(one, parts).sum((1, 3, 4)), parts)])
            for one in (grad, grad * centred)
        )
        factor, pixels = scales * weight, images.shape[2] * images.shape[3]
        shift, tilt = (
            torch.stack([row / (size * pixels) for row, size in zip(-factor * one, parts, strict=True)])
            for one in (sums, scales.square() * products)
        )
        back = grad * _by_image(factor, parts) + centred * _by_image(tilt, parts) + _by_image(shift, parts)
        return back.to(images.dtype), (scales * products).sum(0), sums.sum(0), None, None


def _pieces(images: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The images as pieces (pieces, n, c, h, w) of the parts' greatest common size."""
    return images.view(-1, math.gcd(*parts), *images.shape[1:])


def _split(values: Tensor, parts: tuple[int, ...]) -> Sequence[Tensor]:
    """The rows of each part among values of the pieces (pieces, c)."""
    return torch.split(values, [part // math.gcd(*parts) for part in parts])


def _by_image(values: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Each part's values for its images, (parts, c) to (n, c, 1, 1): chosen by the row, so that nothing is copied."""
    row = torch.arange(sum(parts), device=values.device)[:, None]
    chosen, first = values[0], 0
    for size, value in zip(parts, values[1:], strict=False):
        first += size
        chosen = torch.where(row < first, chosen, value)
    return chosen.expand(len(row), -1)[:, :, None, None]


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
