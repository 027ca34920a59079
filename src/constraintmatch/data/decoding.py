"""The files below a folder of images, and their pixels: walking it, reading headers, decoding in parallel."""

import os
import stat
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

__all__ = [
    "SUFFIXES",
    "Broken",
    "Decoded",
    "FolderRequest",
    "ImageFile",
    "Progress",
    "Skipped",
    "decode_into_memory",
    "find_files",
    "fit_square",
    "one_line",
    "open_decoder",
    "without",
]

Progress = Callable[[int, int], None]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".tif", ".tiff", ".gif"},
)
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "GIF")  # tried by content: a PNG named .jpg is still read
_GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"})
_SIDES = (96, 64, 32, 16, 8)  # sides chosen for images of different sizes
_CHUNK = 16  # files per task: enough to hide what a task costs, few enough for a smooth progress bar
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # what undoes each EXIF orientation
_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Skipped:
    """A file that is not among the images, and why."""

    name: str
    reason: str


# What lies there


class ImageFile(NamedTuple):
    """A file that claims to be an image, as it lay there."""

    name: str  # relative, with forward slashes
    size: int
    mtime_ns: int


def find_files(folder: Path) -> tuple[list[ImageFile], list[Skipped]]:
    """The image files below a folder, sorted by name, and what could not be looked at.

    Every real folder is entered once, through its own path rather than through a link, so that loops of links end.
    """
    files: list[ImageFile] = []
    skipped: list[Skipped] = []
    entered: set[tuple[int, int]] = set()
    real, linked = [""], list[str]()
    while real or linked:
        linked.sort(reverse=True)
        here = real.pop() if real else linked.pop()
        try:
            status = (folder / here).stat()
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            with os.scandir(folder / here) as entries:
                for entry in entries:
                    _sort_entry(entry, here, files, skipped, linked if entry.is_symlink() else real)
        except OSError as error:
            skipped.append(Skipped(_shown(here or str(folder)), _reason(error)))
    return sorted(files), skipped


def _sort_entry(
    entry: os.DirEntry[str], here: str, files: list[ImageFile], skipped: list[Skipped], folders: list[str]
) -> None:
    """Put a folder's entry where it belongs; hidden entries and files that do not claim to be images are left out."""
    if entry.name.startswith("."):
        return
    name = f"{here}/{entry.name}" if here else entry.name
    if _is_folder(entry):
        folders.append(name)
        return
    if os.path.splitext(entry.name)[1].lower() not in SUFFIXES:  # noqa: PTH122 (Path is ten times slower)
        return
    try:
        name.encode()
        status = entry.stat()
    except UnicodeEncodeError:
        skipped.append(Skipped(_shown(name), "its name is not valid Unicode; rename it"))
    except OSError as error:
        skipped.append(Skipped(name, _reason(error)))
    else:
        if stat.S_ISREG(status.st_mode):
            files.append(ImageFile(name, status.st_size, status.st_mtime_ns))
        else:  # opening a pipe would wait for ever
            skipped.append(Skipped(name, "not a regular file"))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link onto itself
        return False


def _shown(name: str) -> str:
    """A name that can be printed and written: undecodable bytes as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


# Decoding


class FolderRequest(NamedTuple):
    """What is asked of a folder: its files, their size and colour (None: chosen by their headers)."""

    folder: Path
    files: tuple[ImageFile, ...]
    side: int | None
    max_side: int | None  # of a chosen side
    channels: int | None
    progress: Progress | None


class Broken(NamedTuple):
    """A file without pixels, and why."""

    name: str
    reason: str
    passing: bool  # the system's fault (no permission, no memory), so worth another try


@dataclass(frozen=True)
class Decoded:
    """Decoded images, their names, and the files left out."""

    images: NDArray[np.uint8]
    names: tuple[str, ...]
    broken: tuple[Broken, ...]

    def skipped(self) -> list[Skipped]:
        return [Skipped(broken.name, broken.reason) for broken in self.broken]


class _Header(NamedTuple):
    width: int
    height: int
    grey: bool


def decode_into_memory(request: FolderRequest) -> Decoded:
    """The images of all files that can be read."""
    broken: list[Broken] = []
    n_decoded = 0
    with open_decoder(request) as (shape, results):
        images = np.empty(shape, np.uint8)
        for result in results:
            if isinstance(result, Broken):
                broken.append(result)
            else:
                images[n_decoded] = result
                n_decoded += 1
    return Decoded(images[:n_decoded], tuple(file.name for file in without(request.files, broken)), tuple(broken))


@contextmanager
def open_decoder(
    request: FolderRequest,
) -> Iterator[tuple[tuple[int, int, int, int], Iterator[NDArray[np.uint8] | Broken]]]:
    """The shape of the images if all can be decoded, and one by one their pixels, in the order of their files.

    A file that cannot be read comes as `Broken`; those known by their headers come first.
    """
    with _quiet():
        side, channels, broken = _choose_size(request)
        files = without(request.files, broken)
        yield (len(files), side, side, channels), chain(broken, _decode(request, files, side, channels))


def _decode(
    request: FolderRequest, files: Sequence[ImageFile], side: int, channels: int
) -> Iterator[NDArray[np.uint8] | Broken]:
    """Each file's pixels, or why there are none; in order, with progress."""

    def decode(file: ImageFile) -> NDArray[np.uint8] | Broken:
        try:
            return _decode_file(request.folder / file.name, side, channels)
        except Exception as error:  # Pillow's plugins raise nearly anything on broken bytes
            return _broken(file, error)

    if request.progress and files:
        request.progress(0, len(files))
    for done, result in enumerate(_in_parallel(decode, files), start=1):
        yield result
        if request.progress and (done % _CHUNK == 0 or done == len(files)):
            request.progress(done, len(files))


def _choose_size(request: FolderRequest) -> tuple[int, int, list[Broken]]:
    """Side, channels and the files whose headers cannot be read; headers are read only when something is not given."""
    if request.side is not None and request.channels is not None:
        return request.side, request.channels, []

    def look(file: ImageFile) -> _Header | Broken:
        try:
            with Image.open(request.folder / file.name, formats=_FORMATS) as image:
                return _Header(image.width, image.height, image.mode in _GREY_MODES)
        except Exception as error:
            return _broken(file, error)

    results = list(_in_parallel(look, request.files))
    headers = [result for result in results if isinstance(result, _Header)]
    side = request.side or min(_choose_side(headers), request.max_side or _SIDES[0])
    channels = request.channels or (1 if all(header.grey for header in headers) else 3)
    return side, channels, [result for result in results if isinstance(result, Broken)]


def _choose_side(headers: list[_Header]) -> int:
    if not headers:
        return _SIDES[-1]
    sizes = {(header.width, header.height) for header in headers}
    width, height = next(iter(sizes))
    if len(sizes) == 1 and width == height <= _SIDES[0]:
        return max(width, _SIDES[-1])
    median = np.median([min(header.width, header.height) for header in headers])
    return next((side for side in _SIDES if side <= median), _SIDES[-1])


def _decode_file(path: Path, side: int, channels: int) -> NDArray[np.uint8]:
    """The file's first picture as (side, side, channels)."""
    with Image.open(path, formats=_FORMATS) as image:
        image.draft(None, (2 * side, 2 * side))  # a JPEG may leave out detail that the resizing would average away
        image.load()  # before the EXIF: in a PNG it may follow the pixels; a TIFF is turned by loading
        turn = _TURNS.get(_orientation(image))
        plain = _eight_bits(image)
        return fit_square(plain.transpose(turn) if turn is not None else plain, side, channels)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a broken EXIF block does not spoil the picture
        return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """The picture as 8-bit grey or RGB, laid on white where it is transparent, deeper pixels scaled (not clipped)."""
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_scale_deep(np.asarray(image)))
    grey = image.mode in _GREY_MODES
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("L" if grey else "RGB")
    return image.convert("L" if grey else "RGB")


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


def fit_square(image: Image.Image, side: int, channels: int) -> NDArray[np.uint8]:
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


def without(files: Sequence[ImageFile], broken: Sequence[Broken]) -> list[ImageFile]:
    """The files that are not among the broken ones."""
    names = {file.name for file in broken}
    return [file for file in files if file.name not in names]


def _broken(file: ImageFile, error: Exception) -> Broken:
    passing = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)
    return Broken(file.name, "the file is empty" if file.size == 0 else _reason(error), passing)


def _reason(error: Exception) -> str:
    """One line that says what is wrong with a file, without its path."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"too large: more than {Image.MAX_IMAGE_PIXELS or 0:,} pixels"
    if isinstance(error, PIL.UnidentifiedImageError):
        return "not a picture in a known format"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)


def one_line(error: Exception) -> str:
    """What an exception says, without line breaks; never empty."""
    return " ".join(str(error).split()) or type(error).__name__


def _in_parallel(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """The results in order, computed by threads a bounded way ahead (Pillow frees the interpreter while it decodes)."""
    n_threads = max(1, min(16, _n_cores(), len(items) // _CHUNK))
    chunks = (items[start : start + _CHUNK] for start in range(0, len(items), _CHUNK))
    waiting: deque[Future[list[_Result]]] = deque()
    pool = ThreadPoolExecutor(n_threads, thread_name_prefix="decode")
    try:
        for chunk in chunks:
            waiting.append(pool.submit(lambda chunk: [work(item) for item in chunk], chunk))
            if len(waiting) > 4 * n_threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _n_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_filters = threading.RLock()


@contextmanager
def _quiet() -> Iterator[None]:
    """Pillow's warnings stay inside: a too large image raises, the others (odd EXIF, odd palettes) are dropped.

    Warning filters belong to the whole process, so they are set here, around the threads, and by one caller at a time.
    """
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
