"""Operations on batches of pixels, each image with its own parameters; the arithmetic is Pillow's where Pillow has one.

Images are uint8 (n, c, h, w) with h == w and c in {1, 3} unless a function says otherwise; a parameter is a
tensor (n,). Nothing here draws random numbers, reads a value back to the host or has a shape that depends on pixels, so
all of it compiles into one graph and can be captured.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "Levels",
    "auto_contrast_table",
    "blend",
    "blend_float",
    "brightness_table",
    "cover",
    "equalize_table",
    "grey",
    "grey_float",
    "identity_matrix",
    "identity_table",
    "levels_of",
    "look_up",
    "mean_grey",
    "move",
    "posterize_table",
    "resized_crop",
    "rotate_matrix",
    "shear_x_matrix",
    "shear_y_matrix",
    "smooth",
    "solarize_table",
    "to_bytes",
    "translate_x_matrix",
    "translate_y_matrix",
    "turn_hue",
    "warp",
]


def _wide(device: torch.device) -> torch.dtype:
    """Pillow's own precision, float64; float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def to_bytes(images: Tensor) -> Tensor:
    """Float images (0–255) rounded to uint8."""
    return images.round().clamp(0, 255).to(torch.uint8)


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


def warp(images: Tensor, matrix: Tensor) -> Tensor:
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


def _matrix(values: Tensor, entries: Sequence[Tensor | float]) -> Tensor:
    """Six numbers or per-image tensors as one (n, 6) matrix."""
    return torch.stack([e if isinstance(e, Tensor) else torch.full_like(values, e) for e in entries], 1)


def identity_matrix(images: Tensor) -> Tensor:
    """The map that leaves every image as it is, (n, 6)."""
    start = torch.zeros(len(images), device=images.device, dtype=_wide(images.device))
    return _matrix(start, (1.0, 0.0, 0.0, 0.0, 1.0, 0.0))


def rotate_matrix(degrees: Tensor, side: int) -> Tensor:
    """Counter-clockwise rotation about the image's centre, (n, 6)."""
    angle = degrees.to(_wide(degrees.device)) * (math.pi / 180)
    cos, sin, centre = angle.cos(), angle.sin(), side / 2
    return _matrix(
        angle, (cos, -sin, centre - centre * cos + centre * sin, sin, cos, centre - centre * sin - centre * cos)
    )


def shear_x_matrix(shear: Tensor, side: int) -> Tensor:  # noqa: ARG001
    """Rows pushed sideways by `shear` times their height, (n, 6); the top row stays."""
    shear = shear.to(_wide(shear.device))
    return _matrix(shear, (1.0, shear, 0.0, 0.0, 1.0, 0.0))


def shear_y_matrix(shear: Tensor, side: int) -> Tensor:  # noqa: ARG001
    """Columns pushed up by `shear` times their distance from the left, (n, 6); the left column stays."""
    shear = shear.to(_wide(shear.device))
    return _matrix(shear, (1.0, 0.0, 0.0, shear, 1.0, 0.0))


def translate_x_matrix(pixels: Tensor, side: int) -> Tensor:  # noqa: ARG001
    """A move to the left by `pixels`, (n, 6)."""
    pixels = pixels.to(_wide(pixels.device))
    return _matrix(pixels, (1.0, 0.0, pixels, 0.0, 1.0, 0.0))


def translate_y_matrix(pixels: Tensor, side: int) -> Tensor:  # noqa: ARG001
    """A move upwards by `pixels`, (n, 6)."""
    pixels = pixels.to(_wide(pixels.device))
    return _matrix(pixels, (1.0, 0.0, 0.0, 0.0, 1.0, pixels))


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


# Tables: an operation that looks at one pixel value at a time is 256 entries per image and channel, uint8 (n, c, 256)


class Levels(NamedTuple):
    """How often each value occurs per image and channel (n, c, 256), the lowest and the highest (n, c, 1); int32."""

    counts: Tensor
    low: Tensor
    high: Tensor


def levels_of(images: Tensor) -> Levels:
    """The histograms of the images, exact in any order of counting because they are integers."""
    values = images.flatten(2)
    ones = torch.ones((1, 1, 1), device=images.device, dtype=torch.int32).expand(values.shape)
    counts = torch.zeros((*images.shape[:2], 256), device=images.device, dtype=torch.int32)
    low, high = (end.to(torch.int32) for end in (values.amin(2, keepdim=True), values.amax(2, keepdim=True)))
    return Levels(counts.scatter_add(2, values.to(torch.int64), ones), low, high)


def look_up(images: Tensor, table: Tensor) -> Tensor:
    """Images with every value replaced by its entry in the table of its image and channel."""
    return table.gather(2, images.flatten(2).to(torch.int64)).reshape(images.shape)


def _values(device: torch.device) -> Tensor:
    return torch.arange(256, device=device, dtype=torch.int32)[None, None]


def identity_table(levels: Levels) -> Tensor:
    """Each value for itself."""
    return _values(levels.low.device).to(torch.uint8).expand(levels.counts.shape)


def auto_contrast_table(levels: Levels, strength: Tensor) -> Tensor:  # noqa: ARG001
    """Stretches each channel to 0–255; a channel of one value stays."""
    values = _values(levels.low.device)
    span = (levels.high - levels.low).clamp(min=1).to(_wide(levels.low.device))
    scale = torch.full_like(span, 255.0) / span  # 255.0 / span would be 255.0 times a rounded reciprocal
    stretched = (values * scale - levels.low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(levels.high > levels.low, stretched, values.to(torch.uint8))


def equalize_table(levels: Levels, strength: Tensor) -> Tensor:  # noqa: ARG001
    """Spreads each channel's values evenly; a channel with too few pixels below its brightest value stays."""
    counts = levels.counts
    step = (counts.sum(2, keepdim=True, dtype=torch.int32) - counts.gather(2, levels.high.to(torch.int64))) // 255
    below = counts.cumsum(2, dtype=torch.int32) - counts
    spread = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255).to(torch.uint8)
    return torch.where(step > 0, spread, identity_table(levels))


def posterize_table(levels: Levels, bits: Tensor) -> Tensor:
    """Keeps the highest `bits` bits of each value."""
    dropped = (8 - bits.to(torch.int32))[:, None, None]
    return ((_values(levels.low.device) >> dropped) << dropped).to(torch.uint8)


def solarize_table(levels: Levels, threshold: Tensor) -> Tensor:
    """Inverts the values from `threshold` upwards."""
    values = _values(levels.low.device)
    return torch.where(values < threshold[:, None, None], values, 255 - values).to(torch.uint8)


def brightness_table(levels: Levels, factor: Tensor) -> Tensor:
    """Blends with black: `factor` times each value."""
    return (_values(levels.low.device) * factor[:, None, None]).clamp(0, 255).to(torch.uint8)


# Blends: factor 0 gives the other image, 1 the image itself


def blend(other: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """other + factor × (images − other), cut off to whole numbers as Pillow does."""
    other = other.to(torch.float32)
    return (other + _per_image(factor) * (images - other)).clamp(0, 255).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """Luma in Pillow's 16-bit weights, int32 (n, 1, h, w); a one-channel image is its own."""
    wide = images.to(torch.int32)
    if images.shape[1] == 1:
        return wide
    red, green, blue = wide[:, :1], wide[:, 1:2], wide[:, 2:]
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


def mean_grey(images: Tensor) -> Tensor:
    """Each image's mean luma rounded half up, (n, 1, 1, 1)."""
    luma = grey(images)
    pixels = luma.shape[-1] * luma.shape[-2]
    return (2 * luma.sum((1, 2, 3), keepdim=True, dtype=torch.int64) + pixels) // (2 * pixels)


def smooth(images: Tensor) -> Tensor:
    """The 3 × 3 mean with the middle counted five times, float32 whole numbers; the outermost pixels stay."""
    exact = images.to(torch.float32)
    if images.shape[-1] < 3:
        return exact
    across = exact[..., :-2] + exact[..., 1:-1] + exact[..., 2:]
    total = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :] + 4 * exact[..., 1:-1, 1:-1]
    smoothed = exact.clone()
    smoothed[..., 1:-1, 1:-1] = (total / 13 + 0.5).floor()  # 13 is odd: no ties, so float32 cannot round the wrong way
    return smoothed


# Colour in floats, for the contrastive view: float32 0–255 in and out


def blend_float(other: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """other + factor × (images − other), kept within 0–255."""
    factor = _per_image(factor)
    return (factor * images + (1 - factor) * other).clamp(0, 255)


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
