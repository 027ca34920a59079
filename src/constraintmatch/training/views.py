"""Views: functions from a batch of uint8 images to a batch of changed images, every image with its own draw.

A view first draws all its randomness as one tensor of uniforms, then hands it to a pure function. So an image's view
never depends on its neighbours in the batch, and the same uniforms give the same view eager, compiled or captured in a
CUDA graph (compiled for a GPU, one pixel in some thousands may be rounded the other way). Nothing is normalised here:
uint8 in, uint8 of the same shape out.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch.training import pixel_ops
from constraintmatch.training.pixel_ops import OPERATIONS, Operation

_GREY = 127  # the cutout's colour: about zero once the model has normalised the image
_CROP_ATTEMPTS = 10  # boxes drawn before a random resized crop gives up and takes the whole image


@dataclass(frozen=True)
class View:
    """A random change of images: `apply` is a pure function of uint8 images (n, c, h, w) and uniforms (n, n_draws).

    The result has the shape, layout and device of the images.
    """

    name: str
    n_draws: int
    apply: Callable[[Tensor, Tensor], Tensor]


def chain(name: str, *views: View) -> View:
    """One view that applies the given ones in turn, each with its own share of the uniforms."""
    draws = [view.n_draws for view in views]

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        result = images
        for view, share in zip(views, torch.split(uniforms, draws, dim=1), strict=True):
            result = view.apply(result, share)
        last = not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
        return result.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

    return View(name, sum(draws), apply)


def _whole(uniforms: Tensor, n: int | Tensor) -> Tensor:
    """Whole numbers 0 … n − 1, uniform; the clamp is for the uniforms that times n round up to n."""
    return (uniforms * n).floor().clamp(max=n - 1)


def _check_share(view: str, name: str, value: float, *, most: float = 1.0) -> None:
    if not 0 <= value <= most:
        raise InputError(f"{view}: {name} is a share between 0 and {most:g}, not {value:g}")


def plain() -> View:
    """The images as they are."""
    return View("plain", 0, lambda images, _: images)


def without_numbers(mean: Sequence[float], *, share: float = 0.5) -> View:
    """The strong view of embeddings (n, d, 1, 1): a random share of the numbers of each is the mean over all.

    What is left is stretched away from the mean, so that it says as much on average (dropout).
    """
    _check_share("without_numbers", "share", share, most=0.9)
    centre = torch.tensor(mean, dtype=torch.float32)[:, None, None]

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        kept = (uniforms[:, :, None, None] >= share).float() / (1 - share)
        middle = centre.to(images.device)
        return middle + (images - middle) * kept

    return View("without numbers", len(mean), apply)


def weak(*, flip: bool = True) -> View:
    """Mirrored with probability 1/2 and moved by up to an eighth of the side, in whole pixels.

    The gap is filled by reflection, as FixMatch does; the paper does not say how.
    """
    return chain("weak", _move(flip=flip, reflect=True))


def crop(*, flip: bool = True) -> View:
    """The constrained branch's view: a random crop of the image padded with black (4 px at 32), mirrored or not."""
    return chain("crop", _move(flip=flip, reflect=False))


def _move(*, flip: bool, reflect: bool) -> View:
    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        reach = round(images.shape[-1] / 8)
        right, down = (_whole(uniforms[:, 1:], 2 * reach + 1).to(torch.int64) - reach).unbind(1)
        mirrored = uniforms[:, 0] < (0.5 if flip else 0.0)
        return pixel_ops.move(images, right, down, mirrored, reflect=reflect)

    return View("move", 3, apply)


def _flip() -> View:
    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        return torch.where((uniforms < 0.5)[:, :, None, None], images.flip(-1), images)

    return View("flip", 1, apply)


def from_function(name: str, function: Callable[[Tensor, Tensor], Tensor], *, n_draws: int = 0) -> View:
    """A user's own view: `function(images, uniforms)` gives uint8 images of the same shape.

    It gets images (n, c, h, w) and uniforms (n, n_draws) in [0, 1). Randomness taken from the uniforms, not from
    a global seed, keeps runs repeatable and resumable.
    """

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        result = function(images, uniforms)
        if result.dtype != torch.uint8 or result.shape != images.shape:
            got, wanted = tuple(result.shape), tuple(images.shape)
            raise InputError(f"view {name}: the function returned {result.dtype} of shape {got}, not uint8 of {wanted}")
        return result

    return View(name, n_draws, apply)


def check_operation_names(names: Iterable[str]) -> None:
    """An InputError if a name is unknown; it lists the known ones."""
    if unknown := [name for name in names if name not in OPERATIONS]:
        raise InputError(f"no such operation: {', '.join(unknown)} (known: {', '.join(OPERATIONS)})")


def _random_operation(pool: Mapping[str, Operation], probability: float) -> View:
    """One operation of the pool per image, applied with a probability at a strength of 1 … 9 tenths."""
    operations = list(pool.values())

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        which, tenths = _whole(uniforms[:, 0], len(operations)), 1 + _whole(uniforms[:, 1], 9)
        positive, applied = uniforms[:, 2] < 0.5, uniforms[:, 3] < probability
        picks = [
            (operation, (which == i) & applied, operation.value(tenths, positive, images.shape[-1]))
            for i, operation in enumerate(operations)
        ]
        return pixel_ops.apply_operations(images, picks)

    return View("operation", 4, apply)


def _pool(without: Collection[str]) -> dict[str, Operation]:
    names = [without] if isinstance(without, str) else without
    check_operation_names(names)
    pool = {name: operation for name, operation in OPERATIONS.items() if name not in names}
    if not pool:
        raise InputError("every operation is excluded: leave at least one (identity does nothing)")
    return pool


def _cutout(*, random_size: bool) -> View:
    """A grey square centred anywhere, cut off at the border; its side is half of the image's, or drawn up to it."""

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        side = images.shape[-1]
        most = round(side / 2)
        row, column = _whole(uniforms[:, :2], side).unbind(1)
        size = 1 + _whole(uniforms[:, 2], max(most, 1)) if random_size else torch.full_like(row, most)
        return pixel_ops.cover(images, row, column, size.to(torch.int64), value=_GREY)

    return View("cutout", 3 if random_size else 2, apply)


def strong(*, flip: bool = True, without: Collection[str] = (), style: str = "fixmatch") -> View:
    """Mirrored or not, then two random operations of FixMatch's pool, then a grey cutout: the strong view A().

    Per image and slot an operation is drawn from the pool minus `without` and applied or not, 1 : 1, at a strength
    of 1 … 9 tenths of its range: factor 0.05–0.95 (brightness, color, contrast, sharpness), 4–8 bits (posterize), ±30°
    (rotate), ±0.3 (shear), threshold 256 × (1 − strength) (solarize), ±0.3 of the side (translate). What rotation,
    shear and translation uncover is black, Pillow's default. The cutout is always there.

    The published ConstraintMatch code differs from FixMatch in one operation: its solarize threshold is rounded to 0,
    so the image is inverted; `style="published"` repeats that. FixMatch also moves the image first.
    """
    if style not in ("fixmatch", "published"):
        raise InputError(f"strong: no style {style!r} (known: fixmatch, published)")
    pool = _pool(without)
    if style == "published" and "solarize" in pool:
        pool["solarize"] = replace(pool["solarize"], value=lambda tenths, *_: torch.zeros_like(tenths))
    return chain("strong", *[_flip()] * flip, *[_random_operation(pool, 0.5)] * 2, _cutout(random_size=False))


def scan_strong(*, flip: bool = True, without: Collection[str] = ()) -> View:
    """SCAN's strong view: mirrored or not, padded random crop, four operations, one cutout of random size.

    The four are drawn from FixMatch's pool and always applied, at the strengths of `strong`. The cutout is of 1 pixel
    up to half of the side (16 px at 32).
    """
    four = [_random_operation(_pool(without), 1.0)] * 4
    return chain("scan_strong", _move(flip=flip, reflect=False), *four, _cutout(random_size=True))


def contrastive(
    *,
    flip: bool = True,
    scale: tuple[float, float] = (0.2, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1),
    jitter_probability: float = 0.8,
    grey_probability: float = 0.2,
) -> View:
    """SimCLR's view: random resized crop (bilinear), mirrored or not, colour jitter, grey.

    `scale` is the crop's share of the area and `ratio` its width over its height, drawn as torchvision draws them: up
    to ten boxes, the first that fits. `jitter` is brightness, contrast, saturation and hue (in turns), applied with
    `jitter_probability` in an order drawn per image. Between the steps nothing is rounded.
    """
    if not 0 < scale[0] <= scale[1] <= 1:
        raise InputError(f"contrastive: scale is two shares of the area, smaller first, not {scale}")
    if not 0 < ratio[0] <= ratio[1]:
        raise InputError(f"contrastive: ratio is two positive numbers, smaller first, not {ratio}")
    if min(jitter) < 0 or jitter[3] > 0.5:
        raise InputError(f"contrastive: jitter is four numbers from 0 upwards, the last up to 0.5, not {jitter}")
    _check_share("contrastive", "jitter_probability", jitter_probability)
    _check_share("contrastive", "grey_probability", grey_probability)
    draws = [2 * _CROP_ATTEMPTS + 2, 1, 9, 1]

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        boxes, mirror, colours, grey = torch.split(uniforms, draws, dim=1)
        top, left, height, width = _boxes(boxes, images.shape[-1], scale, ratio)
        mirrored = mirror[:, 0] < (0.5 if flip else 0.0)
        result = pixel_ops.resized_crop(images, top, left, height, width, mirrored)
        result = _jitter(result, colours, jitter, jitter_probability)
        greyed = (grey < grey_probability)[:, :, None, None]
        result = torch.where(greyed, pixel_ops.grey_float(result), result)
        return result.round().clamp(0, 255).to(torch.uint8)

    return chain("contrastive", View("contrastive", sum(draws), apply))


def _boxes(
    uniforms: Tensor, side: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width (n,) of a box per image: the first of the drawn shapes that fits, else everything."""
    area = side**2 * (scale[0] + (scale[1] - scale[0]) * uniforms[:, :_CROP_ATTEMPTS])
    span = math.log(ratio[1] / ratio[0])
    stretch = ratio[0] * (span * uniforms[:, _CROP_ATTEMPTS:-2]).exp()
    widths, heights = (area * stretch).sqrt().round().clamp(min=1), (area / stretch).sqrt().round().clamp(min=1)
    fits = (widths <= side) & (heights <= side)
    first = fits.to(torch.int32).argmax(1, keepdim=True)
    found = fits.any(1)
    width, height = (torch.where(found, sizes.gather(1, first)[:, 0], side) for sizes in (widths, heights))
    return _whole(uniforms[:, -2], side - height + 1), _whole(uniforms[:, -1], side - width + 1), height, width


def _jitter(images: Tensor, uniforms: Tensor, most: Sequence[float], probability: float) -> Tensor:
    """Float images with brightness, contrast, saturation and hue changed, each image in an order of its own."""
    order = uniforms[:, :4].argsort(1)
    jittered = uniforms[:, 8] < probability
    brightness, contrast, saturation = (
        low + (1 + most[i] - low) * uniforms[:, 4 + i] for i, low in enumerate(max(0.0, 1 - m) for m in most[:3])
    )
    turns = most[3] * (2 * uniforms[:, 7] - 1)
    for slot in range(4):
        which = torch.where(jittered, order[:, slot], 4)  # 4: nothing
        luma = pixel_ops.grey_float(images)
        mean = luma.mean((1, 2, 3), keepdim=True)
        factor = torch.where(which == 0, brightness, torch.where(which == 1, contrast, saturation))
        factor = torch.where(which < 3, factor, 1.0)[:, None, None, None]
        is_contrast, is_saturation, is_hue = ((which == i)[:, None, None, None] for i in (1, 2, 3))
        other = torch.where(is_contrast, mean, torch.where(is_saturation, luma, 0.0))
        turned = torch.where(is_hue, pixel_ops.turn_hue(images, turns), images)
        images = (factor * turned + (1 - factor) * other).clamp(0, 255)
    return images
