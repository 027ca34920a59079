"""Folders decoded once: a memory-mapped cache that serves until a file in the folder changes.

There is one place per request (folder, side, channels); in it DIGEST.npy and then DIGEST.json, whose name stands for
the exact state of all files. Both are renamed into place when complete, so that a reader or a second writer never meets
half of one; a file that vanishes under a reader counts as no cache.
"""

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import IO

import numpy as np
import PIL
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_atomically, write_json
from constraintmatch.data.decoding import Broken, Decoded, FolderRequest, decode_into_memory, open_decoder, without

__all__ = ["cache_place", "decode_cached"]

_log = logging.getLogger(__name__)

_CACHE_VERSION = 1  # raise it whenever the same file would come out as other pixels
_DAY = 86_400


def decode_cached(request: FolderRequest, place: Path | None) -> Decoded:
    """The decoded images: from the cache, or decoded into it, or in memory where no cache can be written."""
    if place is None:
        return decode_into_memory(request)
    decoded = _read_cache(request, place)
    if decoded is not None:
        return decoded
    try:
        _write_cache(request, place)
        decoded = _read_cache(request, place)
    except (OSError, InputError) as error:
        decoded = _read_cache(request, place)  # Windows: another process has it open, hence complete
        if decoded is None:
            _log.warning("the images are decoded into memory, not into the cache (%s)", error)
    return decoded or decode_into_memory(request)


def cache_place(cache: bool | Path | str, request: FolderRequest) -> Path | None:
    """Where this request's images are cached; None: nowhere."""
    if cache is False:
        return None
    root = _user_cache() if cache is True else Path(cache)
    if root is None:
        return None
    size = [request.side, request.max_side, request.channels]
    key = json.dumps([str(request.folder.resolve()), *size, _CACHE_VERSION])
    return root / hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()[:24]


def _user_cache() -> Path | None:
    variable = "LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME"
    given = os.environ.get(variable, "")
    try:
        base = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # no home folder
        return None
    return base / "constraintmatch"


def _state(request: FolderRequest) -> str:
    """A digest of all that decides the pixels: each file's path, size and time, and the decoder's version and limit."""
    digest = hashlib.sha256(f"{PIL.__version__} {Image.MAX_IMAGE_PIXELS}".encode())
    for file in request.files:
        digest.update(f"\n{file.name}\0{file.size}\0{file.mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _read_cache(request: FolderRequest, place: Path) -> Decoded | None:
    """The cached images, or None when there are none for the folder's present state."""
    state = _state(request)
    try:
        note = read_json(place / f"{state}.json")
        broken = tuple(Broken(*entry) for entry in note["broken"])
        images = np.lib.format.open_memmap(place / f"{state}.npy", mode="r")
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return None
    names = tuple(file.name for file in without(request.files, broken))
    if images.dtype != np.uint8 or len(images) != len(names):
        return None
    if any(entry.passing and _opens(request.folder / entry.name) for entry in broken):
        return None
    return Decoded(np.asarray(images), names, broken)


def _opens(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False


def _write_cache(request: FolderRequest, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(place)
    state = _state(request)
    broken: list[Broken] = []
    write_atomically(place / f"{state}.npy", lambda temporary: broken.extend(_decode_into_file(request, temporary)))
    write_json(place / f"{state}.json", {"folder": str(request.folder.resolve()), "broken": broken})
    for old in place.glob("[!.]*"):
        if old.stem != state:
            _remove(old)


def _decode_into_file(request: FolderRequest, path: Path) -> list[Broken]:
    """Decode into a .npy file and return the files left out.

    Written front to back rather than through a map: a full disk is then an error instead of a bus error.
    """
    broken: list[Broken] = []
    with open_decoder(request) as (shape, results), path.open("wb") as file:
        start = _write_header(file, shape)
        n_written = 0
        for result in results:
            if isinstance(result, Broken):
                broken.append(result)
            else:
                file.write(result.tobytes())
                n_written += 1
        file.seek(0)
        if _write_header(file, (n_written, *shape[1:])) != start:
            raise OSError("the .npy header changed its length")
    return broken


def _write_header(file: IO[bytes], shape: tuple[int, ...]) -> int:
    """Write the .npy header at the start and return its length, which NumPy pads so that n does not change it."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.tell()


def _remove_leftovers(place: Path) -> None:
    """Remove what killed decodes left; a day old, so that it is not one in progress."""
    for leftover in place.glob(".*"):
        try:
            stale = leftover.stat().st_mtime < time.time() - _DAY
        except OSError:
            continue
        if stale:
            _remove(leftover)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:  # gone already, or mapped by another process on Windows
        return
