"""Pixels: from encoded images, decoded in parallel, and from arrays."""

import io
import itertools
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageOps

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch.data.image_files import PHONE, ImageFile, Skipped, find_images, read_images

Progress = Callable[[int, int], None]
_Result = TypeVar("_Result")
_Content = Path | io.BytesIO

_PHOTO_SIDES = {3: 32, 1: 64}  # pixels from which on colour and grey images count as photographs (decision 049)
_FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "GIF"]  # tried by content: a PNG named .jpg is still read
_GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"})
_SIDES = (96, 64, 32, 16, 8)  # sides chosen for images of different sizes
_DECODER = "CONSTRAINTMATCH_DECODE"  # the variable that names the GPU which decodes JPEGs
_CHUNK = 16  # files per task: enough to hide what a task costs, few enough for a smooth progress bar


class FolderRequest(NamedTuple):
    """What is asked of a folder or shard: its images, their size and colour (None: chosen by their headers)."""

    folder: Path
    files: tuple[ImageFile, ...]
    side: int | None
    max_side: int | None  # of a chosen side
    channels: int | None
    progress: Progress | None


# Decoding


@contextmanager
def open_decoder(
    request: FolderRequest,
) -> Iterator[tuple[tuple[int, int, int, int], Iterator[NDArray[np.uint8]], list[Skipped]]]:
    """The shape of the images if all can be decoded, their pixels in the order of the files, and the skipped files.

    A file that cannot be decoded joins the skipped ones when its turn comes.
    """
    side, channels, skipped = request.side, request.channels, list[Skipped]()
    with _quiet():
        if side is None or channels is None:  # else no header is read
            sizes, of_files, skipped = _headers(request.folder, request.files)
            side = side or min(_choose_side(sizes), request.max_side or _SIDES[0])
            channels = channels or of_files
        broken = {skip.name for skip in skipped}
        files = [file for file in request.files if file.name not in broken]
        yield (len(files), side, side, channels), _decode(request, files, side, channels, skipped), skipped


def _decode(
    request: FolderRequest, files: Sequence[ImageFile], side: int, channels: int, skipped: list[Skipped]
) -> Iterator[NDArray[np.uint8]]:
    """The pixels of each file, in order, with progress."""
    if request.progress and files:
        request.progress(0, len(files))
    results = _in_parallel(
        lambda content: _decode_file(content, side, channels),
        request.folder,
        files,
        None if decoder() == "cpu" else lambda contents: _decode_jpegs(contents, side, channels, decoder()),
    )
    for done, result in enumerate(results, start=1):
        if isinstance(result, Skipped):
            skipped.append(result)
        else:
            yield result
        if request.progress and (done % _CHUNK == 0 or done == len(files)):
            request.progress(done, len(files))


def _headers(folder: Path, files: Sequence[ImageFile]) -> tuple[list[tuple[int, int]], int, list[Skipped]]:
    """Width and height of each image, the channels of all, and the files whose headers cannot be read."""

    def read(content: _Content) -> tuple[tuple[int, int], bool]:
        with Image.open(content, formats=_FORMATS) as image:
            return image.size, image.mode in _GREY_MODES

    results = list(_in_parallel(read, folder, files))
    headers = [result for result in results if not isinstance(result, Skipped)]
    channels = 1 if all(grey for _, grey in headers) else 3
    return [size for size, _ in headers], channels, [result for result in results if isinstance(result, Skipped)]


def is_photo(side: int, channels: int) -> bool:
    """Whether images of this size count as photographs."""
    return side >= _PHOTO_SIDES.get(channels, 2**31)


def typical_size(folder: Path, most: int = 200) -> tuple[int, int]:
    """The median of the shorter sides, and the channels, by the headers of some of the images; (0, 1) without any."""
    files = find_images(folder)[0]
    some = files[:most] if files and files[0].shard else files[:: max(1, len(files) // most)]
    with _quiet():
        sizes, channels, _ = _headers(folder, some)
    return int(np.median([min(size) for size in sizes] or [0])), channels


def _choose_side(sizes: list[tuple[int, int]]) -> int:
    if not sizes:
        return _SIDES[-1]
    width, height = sizes[0]
    if len(set(sizes)) == 1 and width == height <= _SIDES[0]:
        return max(width, _SIDES[-1])
    median = np.median([min(size) for size in sizes])
    return next((side for side in _SIDES if side <= median), _SIDES[-1])


def _decode_file(content: _Content, side: int, channels: int) -> NDArray[np.uint8]:
    """The file's first picture as (side, side, channels)."""
    with Image.open(content, formats=_FORMATS) as image:
        image.draft(None, (2 * side, 2 * side))  # a JPEG may leave out detail that the resizing would average away
        image.load()  # before the EXIF: in a PNG it may follow the pixels; a TIFF is turned by loading
        with suppress(Exception):  # a broken EXIF block does not spoil the picture
            ImageOps.exif_transpose(image, in_place=True)
        return _fit_square(eight_bits(image), side, channels)


def decoder() -> str:
    """What decodes JPEGs: the GPU that CONSTRAINTMATCH_DECODE names (cuda), else "cpu", which is Pillow.

    A GPU rounds in its own way: a pixel may differ by some levels.
    """
    wanted = os.environ.get(_DECODER) or "cpu"
    if wanted != "cpu":
        import torch

        if not (wanted.startswith("cuda") and torch.cuda.is_available()):
            raise InputError(f"{wanted!r} is no GPU of this machine", _DECODER, "set it to cuda or cpu, or not at all")
    return wanted


def _decode_jpegs(
    contents: Sequence[_Content], side: int, channels: int, device: str
) -> list[NDArray[np.uint8] | None]:
    """JPEGs decoded and resized on a device; None for what Pillow decodes: other formats, turned and odd ones."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    found: list[NDArray[np.uint8] | None] = [None] * len(contents)
    raw = {row: encoded for row, content in enumerate(contents) if (encoded := _plain_jpeg(content))}
    with suppress(RuntimeError):  # one that cannot be decoded spoils them all
        tensors = [torch.frombuffer(bytearray(encoded), dtype=torch.uint8) for encoded in raw.values()]
        mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
        squares = []
        for image in decode_jpeg(tensors, mode, device) if tensors else []:
            height, width = image.shape[1:]
            short = min(height, width)
            top, left = (height - short) // 2, (width - short) // 2
            square = image[None, :, top : top + short, left : left + short]
            if short != side:
                fitted = torch.nn.functional.interpolate(square.float(), (side, side), mode="bicubic", antialias=True)
                square = fitted.round().clamp(0, 255).to(torch.uint8)
            squares.append(square)
        if squares:
            for row, pixels in zip(raw, torch.cat(squares).permute(0, 2, 3, 1).cpu().numpy(), strict=True):
                found[row] = pixels
    return found


def _plain_jpeg(content: _Content) -> bytes:
    """The bytes of a JPEG that is grey or RGB and not turned; else none."""
    with suppress(Exception):  # Pillow will say what is wrong
        encoded = content.read_bytes() if isinstance(content, Path) else content.getvalue()
        with Image.open(io.BytesIO(encoded), formats=["JPEG"]) as image:
            if image.mode in ("L", "RGB") and image.getexif().get(0x0112, 1) == 1:  # its orientation
                return encoded
    return b""


def eight_bits(image: Image.Image) -> Image.Image:
    """The picture as 8-bit grey or RGB, on white where it is transparent, deeper pixels scaled (not clipped)."""
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_scale_deep(np.asarray(image)))
    mode = "L" if image.mode in _GREY_MODES else "RGB"
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return image.convert(mode)


def _scale_deep(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """16-bit, 32-bit or float grey as 8 bits: the type's range onto 0..255.

    32-bit integers within 16 bits count as 16-bit: some versions of Pillow open a 16-bit PNG that way.
    """
    low, high = pixels.min(), pixels.max()
    if pixels.dtype.kind == "f":
        if not (low >= 0 and high <= 1):
            raise ValueError(f"floating-point pixels from {low:g} to {high:g}; only 0 to 1 has a clear meaning")
        full = 1
    else:
        full = 65_535 if high <= 65_535 else 2**31 - 1
    scaled: NDArray[np.float64] = np.rint(np.maximum(pixels, 0) * (255.0 / full))
    return scaled.astype(np.uint8)


def _fit_square(image: Image.Image, side: int, channels: int) -> NDArray[np.uint8]:
    """The central square at the wanted size as (side, side, channels); a square of that size keeps its pixels."""
    image = image.convert("L" if channels == 1 else "RGB")
    width, height = image.size
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    if short == side:
        image = image.crop((int(left), int(top), int(left) + side, int(top) + side))
    else:
        box = (left, top, left + short, top + short)
        image = image.resize((side, side), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return np.asarray(image).reshape(side, side, channels)


def fit_squares(images: NDArray[np.uint8], side: int, channels: int) -> NDArray[np.uint8]:
    """All images of an array at the wanted size."""
    fitted = np.empty((len(images), side, side, channels), np.uint8)
    for row, image in enumerate(images):
        fitted[row] = _fit_square(Image.fromarray(image if image.shape[2] == 3 else image[..., 0]), side, channels)
    return fitted


def _reason(file: ImageFile, error: Exception) -> str:
    """One line that says what is wrong with a file, without its path."""
    if file.size == 0:
        return "the file is empty"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"too large: more than {Image.MAX_IMAGE_PIXELS or 0:,} pixels"
    if isinstance(error, PIL.UnidentifiedImageError):
        from_phone = Path(file.name).suffix.lower() in PHONE
        return "needs a plugin: pip install pillow-heif" if from_phone else "not a picture in a known format"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    return getattr(error, "strerror", None) or one_line(error)


def _in_parallel(
    work: Callable[[_Content], _Result],
    folder: Path,
    files: Sequence[ImageFile],
    together: Callable[[Sequence[_Content]], Sequence[_Result | None]] | None = None,
) -> Iterator[_Result | Skipped]:
    """The results in order; threads work a limited number of files ahead (Pillow frees the interpreter meanwhile).

    `together` gives the results of several files at a time; where it gives None, `work` makes the result.
    """

    def attempt(file: ImageFile, content: _Content) -> _Result | Skipped:
        try:
            return work(content)
        except Exception as error:  # Pillow's plugins raise nearly anything on broken bytes
            passing = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)
            return Skipped(file.name, _reason(file, error), passing)

    def attempt_all(chunk: Sequence[tuple[ImageFile, _Content]]) -> list[_Result | Skipped]:
        made = [None] * len(chunk) if together is None else together([content for _, content in chunk])
        return [attempt(*image) if one is None else one for image, one in zip(chunk, made, strict=True)]

    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_threads = max(1, min(16, n_cores, len(files) // _CHUNK))
    waiting: deque[Future[list[_Result | Skipped]]] = deque()
    pool = ThreadPoolExecutor(n_threads, thread_name_prefix="decode")
    try:
        images = zip(files, read_images(folder, files), strict=True)
        while chunk := list(itertools.islice(images, _CHUNK)):
            waiting.append(pool.submit(attempt_all, chunk))
            if len(waiting) > 4 * n_threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@cache
def _add_formats() -> None:
    """Let Pillow read what phones write, where it can or pillow-heif is installed."""
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    Image.init()
    _FORMATS.extend(name for name in ("AVIF", "HEIF") if name in Image.OPEN)


_filters = threading.RLock()


@contextmanager
def _quiet() -> Iterator[None]:
    """Pillow's warnings stay inside: a too large image raises, the others (odd EXIF, odd palettes) are dropped.

    Warning filters belong to the whole process, so they are set here, around the threads, and by one caller at a time.
    """
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _add_formats()
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


# Arrays


def pixels_of(images: NDArray[Any]) -> NDArray[np.uint8]:
    """An array of images as contiguous uint8 (n, side, side, channels); the channel axis is found by its length.

    Floats in [0, 1] become round(255 x). A mapped uint8 array stays mapped.
    """
    what = f"images of shape {images.shape}"
    if images.ndim == 3:
        images = images[..., None]
    elif images.ndim != 4:
        raise InputError(f"{what}: expected (n, h, w), (n, h, w, c) or (n, c, h, w), or embeddings (n, d)")
    elif not _is_square(images.shape) and images.shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if 0 in images.shape:
        raise InputError(f"{what}: there is no image in it")
    if images.shape[3] not in (1, 3):
        raise InputError(f"{what}: expected 1 or 3 channels", fix="drop alpha with images[..., :3]")
    if not _is_square(images.shape):
        raise InputError(f"{what}: they are not square", fix="crop or resize them first")
    if images.shape[1] == 1:
        raise InputError(f"{what}: they have one pixel each", fix="embeddings are given as (n, d)")
    return np.ascontiguousarray(images) if images.dtype == np.uint8 else _as_bytes(images)


def _is_square(shape: tuple[int, ...]) -> bool:
    return shape[3] in (1, 3) and shape[1] == shape[2]


def _as_bytes(images: NDArray[Any]) -> NDArray[np.uint8]:
    if not np.issubdtype(images.dtype, np.floating):
        raise InputError(f"images of type {images.dtype}: give uint8 (0 to 255) or floats in [0, 1]")
    pixels = np.empty(images.shape, np.uint8)
    low, high = np.inf, -np.inf
    for row, image in enumerate(images):  # one at a time: no float copy of the whole set
        low, high = np.minimum(low, image.min()), np.maximum(high, image.max())
        if low >= 0 and high <= 1:
            pixels[row] = np.rint(image * 255.0)
    if not (low >= 0 and high <= 1):  # NaN fails too
        right = "divide them by the most that a pixel can have (255 as a rule)"  # the same for every batch
        fix = f"{right if low >= 0 and np.isfinite(high) else 'scale them'} or give uint8"
        raise InputError(f"images with values from {low:g} to {high:g}: floats must be in [0, 1]", fix=fix)
    return pixels
