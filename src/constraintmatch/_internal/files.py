"""Writing so that nothing is lost: atomic replacement, locks on folders, disks that are full."""

import errno
import json
import math
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from constraintmatch._internal.errors import InputError


class InUse(InputError):
    """Another process holds the folder."""


_AGAIN, _ELSEWHERE = "free some and run the same command again (train: with --resume)", "choose another place"
_WRITE_ERRORS = {  # problem and fix
    errno.ENOSPC: ("no space left on the disk", _AGAIN),
    errno.EDQUOT: ("the disk quota is used up", _AGAIN),
    errno.EFBIG: ("the file is too large for this disk", _ELSEWHERE),
    errno.EROFS: ("the disk is read-only", _ELSEWHERE),
    errno.EACCES: ("no permission to write there", _ELSEWHERE),
    errno.EPERM: ("no permission to write there", _ELSEWHERE),
    errno.EISDIR: ("is a folder", "name a file in it"),
    errno.ENOTDIR: ("a file is where a folder should be", _ELSEWHERE),
    errno.EEXIST: ("a file is where a folder should be", _ELSEWHERE),  # what mkdir says
    errno.EMFILE: ("too many files are open", "raise the limit: ulimit -n 4096"),
    errno.ENFILE: ("too many files are open on this machine", "close some programs"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
}
_NUMBER_IN_WORDS = re.compile(r"\b(?:os error|errno) (\d+)|No space left on device", re.IGNORECASE)


def write_error(error: BaseException, place: Path | str) -> InputError | None:
    """The InputError for a failed write, with what helps against it; None if that is not known."""
    number = error.errno if isinstance(error, OSError) else None
    if not number and (words := _NUMBER_IN_WORDS.search(str(error))):  # of libraries in other languages (safetensors)
        number = int(words[1] or errno.ENOSPC)
    return _refusal(number, place) if number in _WRITE_ERRORS else None


def _refusal(number: int, place: Path | str) -> InputError:
    problem, fix = _WRITE_ERRORS[number]
    return InputError(problem, place, fix)


def write_atomically(path: Path | str, write: Callable[[Path], object]) -> None:
    """Write a file through `write(temporary path)`, then rename it onto `path`: readers see the old file or the new.

    The temporary file is in the same folder, is flushed to the disk before the rename, and is removed on failure.
    A link stays one: what it points to is replaced.
    """
    check_target(path)
    path, target = Path(path), Path(os.path.realpath(path))
    temporary, handle, outer = None, -1, sys.exception()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent, target.name)
        temporary, handle = _make_temporary(target, path.suffix)
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp gives 0600; a plain open would have given this
        temporary.replace(target)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        cause: BaseException | None = error if isinstance(error, Exception) else None
        while cause is not None and cause is not outer and not isinstance(error, InputError):
            if found := write_error(cause, path):
                raise found from error
            cause = cause.__cause__ or cause.__context__
        raise
    finally:
        if handle >= 0:
            os.close(handle)


def _make_temporary(target: Path, suffix: str) -> tuple[Path, int]:
    """A new file next to the target, and a handle that holds it until it has its name; -1 where files are not held."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=suffix, dir=target.parent)
        for pause in (0, 0.01, 0.1):  # another process may just look at it
            time.sleep(pause)
            if held := os.name != "nt" and _try_lock(handle):
                break
        if not held or os.fstat(handle).st_nlink:
            break
        os.close(handle)  # another process has just taken it for a leftover
    if not held:
        os.close(handle)
    return Path(name), handle if held else -1


_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}(\.[^.]*)?")


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove temporary files of killed processes from a folder, or only those of one file; files in use stay."""
    if os.name == "nt":  # where they are not held
        return
    with suppress(OSError):
        for entry in os.scandir(folder):
            made = _TEMPORARY.fullmatch(entry.name)
            if made is None or (name and made[1] != name[:100]) or not entry.is_file(follow_symlinks=False):
                continue
            with open(entry, "rb") as file:  # noqa: PTH123 (an entry is no Path)
                if _try_lock(file.fileno()):
                    os.unlink(entry)  # noqa: PTH108


def check_new_folder(path: Path | str) -> None:
    """An InputError if the path is a file or a folder with content: nothing is overwritten."""
    path = Path(path)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise InputError("exists already", path, "remove it or choose another --out")
    check_folder(path)


def check_target(path: Path | str) -> None:
    """An InputError unless a file can be written there: no folder, no device or pipe, and its folder takes files.

    Replacing /dev/null by a file would harm the whole machine.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG  # what it would be
    except OSError as error:
        raise write_error(error, path) or InputError(str(error.strerror), path) from None
    if stat.S_ISDIR(mode):
        raise _refusal(errno.EISDIR, path)
    if not stat.S_ISREG(mode):
        raise InputError("is a device or pipe, not a file", path, "name a file")
    check_folder(path, Path(os.path.realpath(path)).parent)


def check_folder(path: Path | str, folder: Path | None = None) -> None:
    """An InputError about the path unless the folder (else the path), or the nearest above it, takes new files."""
    folder = folder or Path(os.path.realpath(path))
    nearest = next((place for place in (folder, *folder.parents) if _may(place, os.F_OK)), None)
    if nearest is None:
        return
    if not nearest.is_dir():
        raise _refusal(errno.ENOTDIR, path)
    if not _may(nearest, os.W_OK | os.X_OK):  # which does not say why
        read_only = hasattr(os, "statvfs") and bool(os.statvfs(nearest).f_flag & os.ST_RDONLY)
        raise _refusal(errno.EROFS if read_only else errno.EACCES, path)


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def write_json(path: Path | str, value: Any) -> None:
    """Write a value as indented JSON, atomically; NaN is refused (JSON has none)."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def read_errors(path: Path | str) -> Iterator[None]:
    """Inside, a file that is missing or cannot be read is an InputError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise InputError("no such file", path) from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or error})", path) from None


def read_json(path: Path | str) -> Any:
    """The value in a JSON file; one that is missing, broken or not readable is an InputError that names it."""
    with read_errors(path):
        try:
            return parse_json(Path(path).read_text(encoding="utf-8-sig"))  # some editors put a mark first
        except ValueError as error:
            raise InputError(f"not valid JSON ({error})", path) from None


def parse_json(text: str) -> Any:
    """The value of a JSON text; a ValueError where it is broken, or goes beyond what Python takes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("too many brackets within brackets") from None
    except ValueError:  # more digits than Python turns into a number
        raise ValueError("a number has too many digits") from None


def check_memory(wanted: int, place: Path | str, fix: str) -> None:
    """An InputError about the place if it needs more bytes than this process may still take, where that is known."""
    if wanted > (left := _memory_left()):
        problem = f"needs {wanted / 2**30:,.1f} GiB of memory, and {left / 2**30:,.1f} GiB are free"
        raise InputError(problem, place, fix)


def _memory_left() -> float:
    left = math.inf
    with suppress(OSError, ValueError, ImportError):  # not on Linux
        import resource

        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        left = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), math.inf)
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            left = min(left, limit - taken)
    return left


@contextmanager
def folder_lock(folder: Path | str) -> Iterator[None]:
    """Hold a folder for this process; a second one gets an InUse that names the holder. The kernel frees it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise write_error(error, folder) or InputError(str(error.strerror), folder) from error
    with file:
        if not _try_lock(file.fileno()):
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise InUse(f"in use by another process (pid {holder})", folder, "wait for it or choose another --out")
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
