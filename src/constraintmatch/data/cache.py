"""Folders and shards decoded once, and embeddings made once, in the user's cache folder.

Images: a memory-mapped cache that serves until a file in the folder changes.

There is one place per request (folder, side, channels); in it DIGEST.npy and then DIGEST.json, whose name stands for
the exact state of all files. Both are renamed into place when complete, so that a reader or a second writer never meets
half of one; a file that vanishes under a reader counts as no cache.

Embeddings: a database for each encoder, in which the pixels of an image name its embedding, so that an image that was
moved or copied is known, and of a changed folder only what changed is embedded again.
"""

import hashlib
import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_memory, read_json, write_atomically, write_json
from constraintmatch.data.decoding import FolderRequest, decoder, open_decoder
from constraintmatch.data.image_files import Skipped

_log = logging.getLogger(__name__)
_CACHE_VERSION = 1  # raise it whenever the same file would come out as other pixels
_DAY = 86_400
_PART = 64  # images that are embedded, and kept, at a time
_Decoded = tuple[NDArray[np.uint8], tuple[str, ...], tuple[Skipped, ...]]


def decode_cached(request: FolderRequest, cache: bool | Path | str = True, suffix: str = "") -> _Decoded:
    """The images, their names and the skipped files: from the cache, or decoded into it, or in memory without one.

    `cache` is its folder (True: the user's cache folder, False: none). A cache holds one state of a folder; the suffix
    makes room for several sets of one folder.
    """
    root = None if cache is False else user_cache() if cache is True else Path(cache)
    if root is None:
        return _decode_into_memory(request)
    place = _place(request, root, suffix)
    decoded = _read_cache(request, place)
    if decoded is not None:
        return decoded
    try:
        _write_cache(request, place)
        decoded = _read_cache(request, place)
    except (OSError, InputError) as error:
        decoded = _read_cache(request, place)  # Windows: another process has it open, so it is complete
        if decoded is None:
            _log.warning("the images are decoded into memory, not into the cache (%s)", error)
    return decoded or _decode_into_memory(request)


def is_decoded(request: FolderRequest) -> bool:
    """Whether the images are in the user's cache folder, as their files are now."""
    root = user_cache()
    return root is not None and _read_cache(request, _place(request, root)) is not None


def _place(request: FolderRequest, root: Path, suffix: str = "") -> Path:
    size = [request.side, request.max_side, request.channels]
    key = json.dumps([str(request.folder.resolve()), *size, _CACHE_VERSION])
    return root / (hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()[:24] + suffix)


def embed_cached(
    pixels: NDArray[np.uint8],
    encoder: str,
    make: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    cache: bool = True,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Rows of the images and their embeddings, part by part: those that are known first, then those that `make` makes.

    `encoder` names the network exactly. What is made is kept at once; where it cannot be kept, all are made.
    """
    keys = [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in pixels]
    root = user_cache() if cache else None
    try:
        with closing(_open_embeddings(root, encoder)) as known:
            rest = []
            for start in range(0, len(keys), _PART):
                part = keys[start : start + _PART]
                marks = ",".join("?" * len(part))
                found = dict(known.execute(f"SELECT key, numbers FROM embeddings WHERE key IN ({marks})", part))
                rows = [row for row, key in enumerate(part, start) if key in found]
                rest += [row for row, key in enumerate(part, start) if key not in found]
                if rows:
                    yield np.array(rows), np.stack([np.frombuffer(found[keys[row]], "<f4") for row in rows])
            for start in range(0, len(rest), _PART):
                chosen = np.array(rest[start : start + _PART])
                made = make(chosen)
                lines = [
                    (keys[row], numbers.astype("<f4").tobytes()) for row, numbers in zip(chosen, made, strict=True)
                ]
                with known:
                    known.executemany("INSERT OR IGNORE INTO embeddings VALUES (?, ?)", lines)
                yield chosen, made
    except (OSError, sqlite3.Error) as error:
        if root is None:
            raise
        _log.warning("the embeddings are not kept for the next time (%s: %s)", root, error)
        yield from embed_cached(pixels, encoder, make, cache=False)


def kept_embeddings(pixels: NDArray[np.uint8], encoder: str) -> NDArray[np.float32] | None:
    """The embeddings (n, d) of all images of a folder as it is in the cache, if they were kept: no pixel is read."""
    try:
        kept = None if (place := _beside(pixels, encoder)) is None else np.load(place)
    except (OSError, ValueError, EOFError):
        return None
    fits = kept is not None and kept.dtype == np.float32 and kept.ndim == 2 and len(kept) == len(pixels)
    return kept if fits else None


def keep_embeddings(pixels: NDArray[np.uint8], encoder: str, embeddings: NDArray[np.float32]) -> None:
    """Keep the embeddings of all images with the cached images of a folder; they are removed together."""
    if (place := _beside(pixels, encoder)) is not None:
        with suppress(OSError, InputError):
            write_atomically(place, lambda temporary: np.save(temporary, embeddings))


def _beside(pixels: NDArray[np.uint8], encoder: str) -> Path | None:
    """The file for the embeddings of mapped images; None for those that are not in the cache."""
    root, mapped = user_cache(), pixels.base
    if root is None or not isinstance(mapped, np.memmap) or mapped.shape != pixels.shape:
        return None
    place = Path(str(mapped.filename))
    return place.with_suffix(f".{encoder}.npy") if root in place.parents else None


def _open_embeddings(root: Path | None, encoder: str) -> sqlite3.Connection:
    if root is not None:
        (root / "embeddings").mkdir(parents=True, exist_ok=True)
    place = ":memory:" if root is None else root / "embeddings" / f"{encoder}.db"
    known = sqlite3.connect(place, timeout=30, check_same_thread=False)
    known.execute("CREATE TABLE IF NOT EXISTS embeddings (key BLOB PRIMARY KEY, numbers BLOB)")
    return known


def user_cache() -> Path | None:
    """The folder for what can be made again; None where the user has no home."""
    given = Path(os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "constraintmatch"
    except RuntimeError:  # no home folder
        return None


def _state(request: FolderRequest) -> str:
    """A digest of all that decides the pixels: each file's path, size and time, and the decoder's version and limit."""
    plugin = (" pillow-heif" if find_spec("pillow_heif") else "") + decoder().partition(":")[0].removeprefix("cpu")
    digest = hashlib.sha256(f"{PIL.__version__} {Image.MAX_IMAGE_PIXELS}{plugin}".encode())
    for file in request.files:
        digest.update(f"\n{file.name}\0{file.size}\0{file.mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _read_cache(request: FolderRequest, place: Path) -> _Decoded | None:
    """The cached images, or None when there are none for the folder's present state."""
    state = _state(request)
    try:
        skipped = [Skipped(*entry) for entry in read_json(place / f"{state}.json")["broken"]]
        images = np.asarray(np.lib.format.open_memmap(place / f"{state}.npy", mode="r"))
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return None
    if images.dtype != np.uint8 or len(images) != len(request.files) - len(skipped):
        return None
    if any(skip.passing and _opens(request.folder / skip.name) for skip in skipped):
        return None
    return _with_names(request, images, skipped)


def _with_names(request: FolderRequest, images: NDArray[np.uint8], skipped: Sequence[Skipped]) -> _Decoded:
    without = {skip.name for skip in skipped}
    return images, tuple(file.name for file in request.files if file.name not in without), tuple(skipped)


def _opens(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False


def _decode_into_memory(request: FolderRequest) -> _Decoded:
    with open_decoder(request) as (shape, decoded, skipped):
        check_memory(math.prod(shape), request.folder, "make room for the cache on the disk, or take a smaller side")
        images = np.empty(shape, np.uint8)
        for row, image in enumerate(decoded):
            images[row] = image
    return _with_names(request, images[: len(request.files) - len(skipped)], skipped)


def _write_cache(request: FolderRequest, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    state = _state(request)
    skipped: list[Skipped] = []
    for leftover in place.glob(".*"):  # of killed decodes; a day old, so that it is not one in progress
        _remove(leftover, before=time.time() - _DAY)
    write_atomically(place / f"{state}.npy", lambda temporary: skipped.extend(_decode_into_file(request, temporary)))
    note = {"folder": str(request.folder.resolve()), "broken": [astuple(skip) for skip in skipped]}
    write_json(place / f"{state}.json", note)
    for old in place.glob("[!.]*"):
        if old.stem != state:
            _remove(old)


def _decode_into_file(request: FolderRequest, path: Path) -> list[Skipped]:
    """Decode into a .npy file and return the skipped files.

    Written front to back rather than through a map: a full disk is then an error instead of a bus error.
    """
    with open_decoder(request) as (shape, decoded, skipped), path.open("wb") as file:
        start = _write_header(file, shape)
        for image in decoded:
            file.write(image.tobytes())
        n = len(request.files) - len(skipped)
        file.seek(0)
        if _write_header(file, (n, *shape[1:])) != start:
            raise OSError("the .npy header changed its length")
    return skipped


def _write_header(file: IO[bytes], shape: tuple[int, ...]) -> int:
    """Write the .npy header at the start and return its length, which NumPy pads so that n does not change it."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.tell()


def _remove(path: Path, before: float = float("inf")) -> None:
    """Remove a file that is older than `before`, if that can be done."""
    with suppress(OSError):  # gone already, or mapped by another process on Windows
        if path.stat().st_mtime < before:
            path.unlink()
