"""Images as the page shows them: the file itself where it can be had, else the pixels that the model sees."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from constraintmatch.images import ImageSet

__all__ = ["Picture", "Pictures", "pictures_of"]

LARGEST = 800  # pixels: what a large screen shows of one of two images
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 100_000_000  # decoding more would hold the server up; the model's own pixels are shown instead


@dataclass(frozen=True)
class Picture:
    """An encoded image."""

    content: bytes
    media_type: str


@dataclass(frozen=True)
class Pictures:
    """The image of a row: `large` for questions, `small` for galleries."""

    large: Callable[[int], Picture]
    small: Callable[[int], Picture]


def pictures_of(images: ImageSet, folder: Path | None = None, *, kept: int = 512) -> Pictures:
    """The pictures of a set; with the folder it was read from, large ones come from the files there.

    A file that has gone or cannot be read is no error here: the pixels in memory are shown.
    """

    seen = images.to_look_at()

    @lru_cache(maxsize=kept)
    def small(row: int) -> Picture:
        return _png(seen.images[row])

    @lru_cache(maxsize=kept)
    def large(row: int) -> Picture:
        found = None if folder is None else _from_file(folder / images.names[row])
        return found or small(row)

    return Pictures(large, small)


def _png(pixels: NDArray[np.uint8]) -> Picture:
    return _encode(Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0]), "PNG")


def _from_file(path: Path) -> Picture | None:
    """The whole picture (the model sees its central square), turned as its EXIF says, at most LARGEST pixels wide."""
    try:
        with Image.open(path, formats=FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS or opened.mode[0] in "IF":
                return None  # 16-bit and float grey need the scaling that the image set has done
            opened.draft(None, (2 * LARGEST, 2 * LARGEST))
            image = ImageOps.exif_transpose(opened)
            image = _on_white(image)
    except Exception:  # broken files raise whatever their decoder raises
        return None
    image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return _encode(image, "PNG" if max(image.size) < 256 else "JPEG")


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("L" if image.mode in ("1", "L") else "RGB")
    picture = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def _encode(image: Image.Image, kind: str) -> Picture:
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 88} if kind == "JPEG" else {}))
    return Picture(file.getvalue(), f"image/{kind.lower()}")
