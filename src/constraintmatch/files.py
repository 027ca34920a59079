"""Writing so that nothing is lost: atomic replacement, locks on folders, disks that are full."""

import errno
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from constraintmatch.errors import InputError

__all__ = ["folder_lock", "read_json", "write_atomically", "write_json"]

_MENDS = {
    errno.ENOSPC: "no space left on the disk; free some and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EFBIG: "files there may not be so large; choose another place",
    errno.EROFS: "the disk is read-only; choose another place",
    errno.EACCES: "no permission to write there; choose another place",
    errno.EPERM: "no permission to write there; choose another place",
}
_TOLD_NUMBER = re.compile(r"\b(?:os error|errno) (\d+)", re.IGNORECASE)


def write_atomically(path: Path | str, write: Callable[[Path], object]) -> None:
    """Write a file through `write(temporary path)`, then rename it onto `path`: readers see the old file or the new.

    The temporary file lies in the same folder, is flushed to the disk before the rename, and is removed on failure.
    """
    path = Path(path)
    temporary, outer = None, sys.exception()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp gives 0600; a plain open would have given this
        temporary.replace(path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        mend = _mend(error, outer) if isinstance(error, Exception) else None
        if mend is None or isinstance(error, InputError):
            raise
        raise InputError(f"{path}: {mend}") from error


def write_json(path: Path | str, value: Any) -> None:
    """Write a value as indented JSON, atomically; NaN is refused (JSON has none)."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path | str) -> Any:
    """The value in a JSON file; a missing or broken one is an InputError that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


@contextmanager
def folder_lock(folder: Path | str) -> Iterator[None]:
    """Hold a folder for this process; a second one gets an InputError that names the holder. The kernel frees it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        mend = _MENDS.get(error.errno or 0, error.strerror)
        raise InputError(f"{folder}: {mend}") from error
    with file:
        if not _try_lock(file.fileno()):
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise InputError(f"{folder}: in use by another process (pid {holder}); wait for it or choose another --out")
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def _mend(error: BaseException | None, outer: BaseException | None) -> str | None:
    """What helps against a failed write, by the exceptions that led to it (up to the one handled outside); or None."""
    while error is not None and error is not outer:
        if mend := _MENDS.get(_error_number(error)):
            return mend
        error = error.__cause__ or error.__context__
    return None


def _error_number(error: BaseException) -> int:
    """The system's number for an error, else 0; libraries in other languages (safetensors) give it in words only."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if told := _TOLD_NUMBER.search(str(error)):
        return int(told[1])
    return errno.ENOSPC if "No space left on device" in str(error) else 0


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
