"""Operations on batches of pixels, each image with its own parameters; the arithmetic is Pillow's where Pillow has one.

Images are uint8 (n, c, h, w) with h == w and c in {1, 3} unless a function says otherwise; a parameter is a
tensor (n,). Nothing here draws random numbers, reads a value back to the host or has a shape that depends on pixels, so
all of it compiles into one graph and can be captured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def _wide(device: torch.device) -> torch.dtype:
    """Pillow's own precision, float64; float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


# Moving pixels


def _take(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels at integer places, rows and columns broadcasting to (n, h, w)."""
    n, c, h, w = images.shape
    place = (rows * w + columns).to(torch.int64).expand(n, h, w).reshape(n, 1, h * w)
    return images.flatten(2).gather(2, place.expand(n, c, h * w)).reshape(n, c, h, w)


def move(images: Tensor, right: Tensor, down: Tensor, mirrored: Tensor, *, reflect: bool) -> Tensor:
    """Images mirrored left to right where asked, then moved by whole pixels; the gap is reflected or black."""
    side = images.shape[-1]
    along = torch.arange(side, device=images.device)
    columns, rows = along - right[:, None], along - down[:, None]
    inside = ((columns >= 0) & (columns < side))[:, None, :] & ((rows >= 0) & (rows < side))[:, :, None]
    if reflect:  # the edge pixel is not repeated: -1 shows pixel 1
        columns, rows = (side - 1 - (side - 1 - at.abs()).abs() for at in (columns, rows))
    columns, rows = columns.clamp(0, side - 1), rows.clamp(0, side - 1)
    columns = torch.where(mirrored[:, None], side - 1 - columns, columns)
    moved = _take(images, rows[:, :, None], columns[:, None, :])
    return moved if reflect else torch.where(inside[:, None], moved, 0)


def cover(images: Tensor, row: Tensor, column: Tensor, size: Tensor, *, value: int) -> Tensor:
    """Images with a square of `size` pixels centred at (row, column) painted over, cut off at the border."""
    along = torch.arange(images.shape[-1], device=images.device)
    top, left = (row - size // 2)[:, None], (column - size // 2)[:, None]
    high = (along >= top) & (along < top + size[:, None])
    wide = (along >= left) & (along < left + size[:, None])
    return torch.where((high[:, :, None] & wide[:, None, :])[:, None], value, images)


def _warp(images: Tensor, matrix: Tensor) -> Tensor:
    """Nearest-neighbour affine map: output (x, y) shows input (ax + by + c, dx + ey + f), black outside.

    `matrix` is (n, 6), as Pillow's `Image.transform(AFFINE)` takes it. Like Pillow, this starts at pixel centres and
    goes on in 16.16 fixed point, so the pixels agree exactly whenever the rounded coefficients do.
    """
    side = images.shape[-1]
    a, b, c, d, e, f = matrix.unbind(1)
    fixed = torch.stack([a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5], 1)
    fixed = (fixed * 65536.0 + 0.5).floor().to(torch.int32)[:, :, None, None]
    across = torch.arange(side, device=images.device, dtype=torch.int32)
    down = across[:, None]
    columns = (fixed[:, 0] * across + fixed[:, 1] * down + fixed[:, 2]) >> 16
    rows = (fixed[:, 3] * across + fixed[:, 4] * down + fixed[:, 5]) >> 16
    inside = (columns >= 0) & (columns < side) & (rows >= 0) & (rows < side)
    warped = _take(images, rows.clamp(0, side - 1), columns.clamp(0, side - 1))
    return torch.where(inside[:, None], warped, 0)


def resized_crop(images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, mirrored: Tensor) -> Tensor:
    """Boxes stretched to the whole side (bilinear, edges repeated), then mirrored where asked; float32 0–255."""
    side = images.shape[-1]
    along = torch.arange(side, device=images.device, dtype=torch.float32)
    columns = torch.where(mirrored[:, None], side - 1 - along, along)
    y, x = (
        start[:, None] + ((at + 0.5) * (size[:, None] / side) - 0.5).clamp(min=0).minimum(size[:, None] - 1)
        for start, size, at in ((top, height, along), (left, width, columns))
    )
    x, y = ((2 * at + 1) / side - 1 for at in (x, y))  # what grid_sample calls align_corners=False
    shape = (len(images), side, side)
    grid = torch.stack((x[:, None, :].expand(shape), y[:, :, None].expand(shape)), -1)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


# Tables: an operation that looks at one pixel value at a time is 256 entries per image and channel, uint8 (n, c, 256).
# Each is made from the histograms of its images, int32 (n, c, 256), and a value.


def _histograms(images: Tensor) -> Tensor:
    """How often each value occurs, exact in any order of counting because counts are integers."""
    values = images.flatten(2)
    ones = torch.ones((1, 1, 1), device=images.device, dtype=torch.int32).expand(values.shape)
    counts = torch.zeros((*images.shape[:2], 256), device=images.device, dtype=torch.int32)
    return counts.scatter_add(2, values.to(torch.int64), ones)


def _values(counts: Tensor) -> Tensor:
    return torch.arange(256, device=counts.device, dtype=torch.int32)[None, None]


def _highest(counts: Tensor) -> Tensor:
    return torch.where(counts > 0, _values(counts), 0).amax(2, keepdim=True)


def _auto_contrast(counts: Tensor, _: Tensor) -> Tensor:
    """Stretches each channel to 0–255; a channel of one value stays."""
    values, high = _values(counts), _highest(counts)
    low = torch.where(counts > 0, values, 255).amin(2, keepdim=True)
    span = (high - low).clamp(min=1).to(_wide(counts.device))
    scale = torch.full_like(span, 255.0) / span  # 255.0 / span would be 255.0 times a rounded reciprocal
    stretched = (values * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, values.to(torch.uint8))


def _equalize(counts: Tensor, _: Tensor) -> Tensor:
    """Spreads each channel's values evenly; a channel with too few pixels below its brightest value stays."""
    brightest = counts.gather(2, _highest(counts).to(torch.int64))
    step = (counts.sum(2, keepdim=True, dtype=torch.int32) - brightest) // 255
    below = counts.cumsum(2, dtype=torch.int32) - counts
    spread = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255).to(torch.uint8)
    return torch.where(step > 0, spread, _values(counts).to(torch.uint8))


def _posterize(counts: Tensor, bits: Tensor) -> Tensor:
    """Keeps the highest `bits` bits of each value."""
    dropped = (8 - bits.to(torch.int32))[:, None, None]
    return ((_values(counts) >> dropped) << dropped).to(torch.uint8)


def _solarize(counts: Tensor, threshold: Tensor) -> Tensor:
    """Inverts the values from `threshold` upwards."""
    values = _values(counts)
    return torch.where(values < threshold[:, None, None], values, 255 - values).to(torch.uint8)


def _brightness(counts: Tensor, factor: Tensor) -> Tensor:
    """Blends with black: `factor` times each value."""
    return (_values(counts) * factor[:, None, None]).clamp(0, 255).to(torch.uint8)


# Images to blend with: Pillow's enhancements


def _grey(images: Tensor) -> Tensor:
    """Luma in Pillow's 16-bit weights, int32 (n, 1, h, w); a one-channel image is its own."""
    wide = images.to(torch.int32)
    if images.shape[1] == 1:
        return wide
    red, green, blue = wide[:, :1], wide[:, 1:2], wide[:, 2:]
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


def _mean_grey(images: Tensor) -> Tensor:
    """Each image's mean luma rounded half up, (n, 1, 1, 1)."""
    luma = _grey(images)
    pixels = luma.shape[-1] * luma.shape[-2]
    return (2 * luma.sum((1, 2, 3), keepdim=True, dtype=torch.int64) + pixels) // (2 * pixels)


def _smooth(images: Tensor) -> Tensor:
    """The 3 × 3 mean with the middle counted five times, float32 whole numbers; the outermost pixels stay."""
    exact = images.to(torch.float32)
    if images.shape[-1] < 3:
        return exact
    across = exact[..., :-2] + exact[..., 1:-1] + exact[..., 2:]
    total = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :] + 4 * exact[..., 1:-1, 1:-1]
    smoothed = exact.clone()
    smoothed[..., 1:-1, 1:-1] = (total / 13 + 0.5).floor()  # 13 is odd: no ties, so float32 cannot round the wrong way
    return smoothed


# FixMatch's pool


def _matrix(values: Tensor, *entries: Tensor | float) -> Tensor:
    """Six numbers or per-image tensors as one (n, 6) matrix."""
    return torch.stack([e if isinstance(e, Tensor) else torch.full_like(values, e) for e in entries], 1)


def _rotation(degrees: Tensor, side: int) -> Tensor:
    """Counter-clockwise rotation about the image's centre, (n, 6)."""
    angle, centre = degrees * (math.pi / 180), side / 2
    cos, sin = angle.cos(), angle.sin()
    right, down = centre - centre * cos + centre * sin, centre - centre * sin - centre * cos
    return _matrix(angle, cos, -sin, right, sin, cos, down)


def _factor(tenths: Tensor, *_: object) -> Tensor:
    return 0.05 + 0.9 * tenths / 10


def _shear(tenths: Tensor, positive: Tensor, _: int) -> Tensor:
    return torch.where(positive, 0.3 * tenths / 10, -0.3 * tenths / 10)


def _pixels(tenths: Tensor, positive: Tensor, side: int) -> Tensor:
    pixels = (3 * side * tenths / 100).floor()  # whole numbers until the division: 3/10 of the side, exactly
    return torch.where(positive, pixels, -pixels)


@dataclass(frozen=True)
class Operation:
    """One operation of FixMatch's pool: how its strength becomes a value, and one of three ways to use it.

    `value(tenths, positive, side)` gives each image's physical value (degrees, pixels, bits, factor, threshold).
    A `matrix` (n, 6) of values in `_wide` and the side moves pixels, a `table` replaces values, the image that `other`
    makes is blended in; none is the identity.
    """

    value: Callable[[Tensor, Tensor, int], Tensor] = lambda tenths, *_: tenths
    matrix: Callable[[Tensor, int], Tensor] | None = None
    table: Callable[[Tensor, Tensor], Tensor] | None = None
    other: Callable[[Tensor], Tensor] | None = None


OPERATIONS = {
    "auto_contrast": Operation(table=_auto_contrast),
    "equalize": Operation(table=_equalize),
    "identity": Operation(),
    "brightness": Operation(_factor, table=_brightness),
    "color": Operation(_factor, other=_grey),
    "contrast": Operation(_factor, other=_mean_grey),
    "sharpness": Operation(_factor, other=_smooth),
    "posterize": Operation(lambda tenths, *_: 4 + (4 * tenths / 10).floor(), table=_posterize),
    "rotate": Operation(
        lambda tenths, positive, _: torch.where(positive, 30 * tenths / 10, -30 * tenths / 10), matrix=_rotation
    ),
    "shear_x": Operation(_shear, matrix=lambda shear, _: _matrix(shear, 1, shear, 0, 0, 1, 0)),  # the top row stays
    "shear_y": Operation(_shear, matrix=lambda shear, _: _matrix(shear, 1, 0, 0, shear, 1, 0)),  # the left column stays
    "solarize": Operation(lambda tenths, *_: 256 - 256 * tenths / 10, table=_solarize),
    "translate_x": Operation(_pixels, matrix=lambda left, _: _matrix(left, 1, 0, left, 0, 1, 0)),
    "translate_y": Operation(_pixels, matrix=lambda up, _: _matrix(up, 1, 0, 0, 0, 1, up)),
}


def apply_operations(images: Tensor, picks: Sequence[tuple[Operation, Tensor, Tensor]]) -> Tensor:
    """Each image changed by the operation that falls on it, if any; at most one may.

    A pick is an operation, the images it falls on (n,) and its value for each (n,). One warp, one table and one blend
    serve the whole batch: what an image's operation does not use is the identity for it.
    """
    n, side, wide = len(images), images.shape[-1], _wide(images.device)
    if matrices := [(op.matrix, chosen, values) for op, chosen, values in picks if op.matrix]:
        matrix = _matrix(torch.zeros(n, device=images.device, dtype=wide), 1, 0, 0, 0, 1, 0)
        for make_matrix, chosen, values in matrices:
            matrix = torch.where(chosen[:, None], make_matrix(values.to(wide), side), matrix)
        images = _warp(images, matrix)
    if tables := [(op.table, chosen, values) for op, chosen, values in picks if op.table]:
        counts = _histograms(images)
        table = _values(counts).to(torch.uint8).expand(counts.shape)
        for make_table, chosen, values in tables:
            table = torch.where(chosen[:, None, None], make_table(counts, values), table)
        images = table.gather(2, images.flatten(2).to(torch.int64)).reshape(images.shape)
    if others := [(op.other, chosen, values) for op, chosen, values in picks if op.other]:
        other, factor = images.to(torch.float32), torch.ones(n, device=images.device)
        for make_other, chosen, values in others:
            other = torch.where(chosen[:, None, None, None], make_other(images).to(torch.float32), other)
            factor = torch.where(chosen, values.to(torch.float32), factor)
        # factor 0 gives the other image, 1 the image itself; cut off to whole numbers as Pillow does
        images = (other + factor[:, None, None, None] * (images - other)).clamp(0, 255).to(torch.uint8)
    return images


# Colour in floats, for the contrastive view: float32 0–255 in and out


def grey_float(images: Tensor) -> Tensor:
    """Luma .299 .587 .114, (n, 1, h, w); a one-channel image is its own."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Colours turned around the HSV hue circle by a share of a full turn; a one-channel image stays."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    top, low = images.amax(1), images.amin(1)
    spread = top - low
    per_sixth = torch.where(spread > 0, spread, 1.0)
    from_green = torch.where(top == green, 2 + (blue - red) / per_sixth, 4 + (red - green) / per_sixth)
    hue = torch.where(top == red, (green - blue) / per_sixth, from_green) + 6 * turns[:, None, None]
    channels = []
    for offset in (5, 3, 1):  # red, green, blue: the sixths of the circle between the hue and the channel's peak
        place = (hue + offset).remainder(6)
        channels.append(top - spread * place.minimum(4 - place).clamp(0, 1))
    return torch.stack(channels, 1)
