"""Writing so that nothing is lost: the old file or the new one, never half of one; locks that die with their holder."""

import errno
import json
import math
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rights import as_nobody, public_folder

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import (
    check_folder,
    check_new_folder,
    check_target,
    folder_lock,
    read_json,
    remove_leftovers,
    write_atomically,
    write_json,
)

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX")


def failing(error: BaseException) -> Callable[[Path], None]:
    """A writer that fails half-way."""

    def write(temporary: Path) -> None:
        temporary.write_text("half of the ne")
        raise error

    return write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Atomic writes


def test_the_new_content_replaces_the_old_and_nothing_else_is_left(tmp_path: Path) -> None:
    for text in ("old", "new"):
        write_atomically(tmp_path / "deep" / "a.txt", lambda temporary, text=text: temporary.write_text(text))
    assert (tmp_path / "deep" / "a.txt").read_text() == "new"
    assert names(tmp_path / "deep") == ["a.txt"]


def test_the_temporary_file_lies_beside_the_target_and_keeps_its_suffix(tmp_path: Path) -> None:
    seen: list[Path] = []
    write_atomically(tmp_path / "a.npy", lambda temporary: (seen.append(temporary), temporary.write_text("x")))
    assert (seen[0].parent, seen[0].suffix) == (tmp_path, ".npy")
    assert seen[0].name.startswith(".")  # so that a listing of a folder leaves it out


def test_readers_see_the_old_content_until_the_new_is_complete(tmp_path: Path) -> None:
    place = tmp_path / "a.txt"
    place.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("new")
        assert place.read_text() == "old"

    write_atomically(place, write)
    assert place.read_text() == "new"


FAILURES = [ValueError("odd"), OSError(errno.EIO, "Input/output error"), KeyboardInterrupt(), InputError("said so")]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_failed_write_keeps_the_old_content_and_removes_the_half(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(type(error)) as caught:
        write_atomically(tmp_path / "a.txt", failing(error))
    assert caught.value is error
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_get_the_permissions_a_plain_open_gives(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "a.txt", lambda temporary: temporary.write_text("x"))
        (tmp_path / "plain.txt").write_text("x")
        assert os.umask(mask) == mask  # looking at it left it alone
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o666 & ~mask}


class Foreign(Exception):
    """An error of a library that tells the system's error in words only."""


def chained(cause: Exception) -> Exception:
    error = RuntimeError("could not serialise")
    error.__cause__ = cause
    return error


DISK_ERRORS = {
    "no space left on the disk; free some": OSError(errno.ENOSPC, "No space left on device"),
    "the disk quota is used up": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "the disk is read-only; choose another place": OSError(errno.EROFS, "Read-only file system"),
    "no permission to write there": PermissionError(errno.EACCES, "Permission denied"),
    "a.txt: no space left": Foreign(f"I/O error: No space left on device (os error {errno.ENOSPC})"),
    "a.txt: no space": Foreign("disk: No space left on device"),
    "is read-only": Foreign(f"I/O error: Read-only file system (os error {errno.EROFS})"),
    "no space left on the disk": OSError(f"[Errno {errno.ENOSPC}] Error writing bytes to file"),  # pyarrow: no errno
    "no space left": chained(Foreign(f"(os error {errno.ENOSPC})")),
}


@pytest.mark.parametrize("message", DISK_ERRORS)
def test_a_disk_that_takes_nothing_is_one_line_with_the_mend(tmp_path: Path, message: str) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(InputError, match=message) as caught:
        write_atomically(tmp_path / "a.txt", failing(DISK_ERRORS[message]))
    assert str(caught.value).startswith(f"{tmp_path / 'a.txt'}: ")
    assert "\n" not in str(caught.value)
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_an_error_while_another_is_handled_is_not_taken_for_that_one(tmp_path: Path) -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        with pytest.raises(TypeError, match="a bug"):
            write_atomically(tmp_path / "a.txt", failing(TypeError("a bug")))


LIMITED = """
import resource, sys
import numpy as np
from safetensors.numpy import save_file
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import write_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
try:
    write_atomically(sys.argv[1], lambda path: save_file({"a": np.zeros(10_000)}, path))
except InputError as error:
    print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on the size of files")
def test_what_safetensors_says_of_the_disk_is_understood(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path / 'a.safetensors'}: the file is too large for this disk; choose another place\n"
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["file/a.txt", "file/b/a.txt"])
def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="a file is where a folder should be"):
        write_atomically(tmp_path / place, lambda temporary: temporary.write_text("x"))
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        write_atomically(tmp_path, lambda temporary: temporary.write_text("x"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="a device or pipe"):
        write_atomically(tmp_path / "pipe", lambda temporary: temporary.write_text("x"))
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "there" / "a.txt")
    write_atomically(tmp_path / "link.txt", lambda temporary: temporary.write_text("new"))
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "there" / "a.txt").read_text() == "new"
    assert names(tmp_path / "there") == ["a.txt"]


@posix
@pytest.mark.parametrize("place", ["a.txt", "deep/er/a.txt", "there.txt", "../link.txt"])
def test_a_folder_that_cannot_be_written_is_told_before_anything_is_written(place: str) -> None:
    with public_folder() as folder:
        closed = folder / "closed"
        closed.mkdir()
        (closed / "there.txt").write_text("old")
        (folder / "link.txt").symlink_to(closed / "new.txt")
        closed.chmod(0o555)
        said = r"\.txt: no permission to write there; choose another place"
        with as_nobody(), pytest.raises(InputError, match=said):
            check_target(closed / place)


@posix
@pytest.mark.parametrize("check", [check_folder, check_new_folder])
def test_a_folder_for_files_must_take_them(check: Callable[[Path], None]) -> None:
    with public_folder() as folder:
        (folder / "empty").mkdir(mode=0o555)
        for place in (folder / "empty", folder / "new", folder / "new" / "deeper"):
            with as_nobody(), pytest.raises(InputError, match=rf"{place.name}: no permission to write there"):
                check(place)
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        with as_nobody():
            check(folder / "open")
            check(folder / "open" / "new")


def test_a_file_is_no_folder_for_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/in"):
        with pytest.raises(InputError, match="a file is where a folder should be"):
            check_folder(tmp_path / place)


def test_names_of_any_length_the_disk_takes_can_be_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / ("a" * 250), lambda temporary: temporary.write_text("x"))
    with pytest.raises(InputError, match="the name is too long"):
        write_atomically(tmp_path / ("a" * 300), lambda temporary: temporary.write_text("x"))


# JSON


def test_json_comes_back_as_it_went(tmp_path: Path) -> None:
    value = {"é ü": [1, 2.5, None, True], "deep": {"a": "\n"}}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "é ü" in (tmp_path / "a.json").read_text(encoding="utf-8")  # to be read by people too


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_json_without_a_spelling_is_refused_and_the_old_file_stays(tmp_path: Path, number: float) -> None:
    write_json(tmp_path / "a.json", {"loss": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": number})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": 1}


def test_json_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_json_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json: no such file"):
        read_json(tmp_path / "none.json")
    for content in (b"{", b"", b'{"a": "\xff"}'):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(InputError, match=r"a\.json: not valid JSON"):
            read_json(tmp_path / "a.json")


def test_json_beyond_what_python_takes_is_one_line(tmp_path: Path) -> None:
    for content, said in (("[" * 100_000, "too many brackets within brackets"), ("7" * 5_000, "too many digits")):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(InputError, match=rf"a\.json: not valid JSON \(.*{said}\)$"):
            read_json(tmp_path / "a.json")


@posix
def test_json_that_may_not_be_read_is_told_so() -> None:
    with public_folder() as folder:
        write_json(folder / "a.json", {})
        (folder / "a.json").chmod(0o000)
        with as_nobody(), pytest.raises(InputError, match=r"a\.json: cannot be read \(Permission denied\)"):
            read_json(folder / "a.json")


# Locks

HOLD = """
import sys, time
from constraintmatch._internal.files import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@posix
def test_a_folder_is_held_by_one_process_and_freed_when_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(InputError, match=rf"run: in use by another process \(pid {holder.pid}\)"),
            folder_lock(tmp_path / "run"),
        ):
            pytest.fail("two processes hold the folder")
        holder.send_signal(signal.SIGKILL)
    with folder_lock(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text() == str(os.getpid())


def test_a_lock_is_free_again_after_its_block_however_it_ended(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), folder_lock(tmp_path):
        raise ZeroDivisionError
    with folder_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file") as caught, folder_lock(tmp_path / "file"):
        pytest.fail("a file was locked as a folder")
    assert "\n" not in str(caught.value)


# After a kill

KILLED = """
import os, signal, sys
from pathlib import Path
from constraintmatch._internal.files import write_atomically
def write(path):
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path(sys.argv[1]), write)
"""


@posix
def test_what_a_killed_process_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint.safetensors"
    subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".checkpoint.safetensors.")
    own = tmp_path / ".run.json.swp"
    own.write_text("of an editor")
    write_atomically(tmp_path / "other.json", lambda path: path.write_text("x"))
    assert left.exists()  # of another file

    def write(path: Path) -> None:
        path.write_text("in progress")
        write_atomically(target, lambda second: second.write_text("new"))
        remove_leftovers(tmp_path)
        assert path.exists()

    write_atomically(target, write)
    assert sorted(path.name for path in tmp_path.iterdir()) == [own.name, target.name, "other.json"]
    assert target.read_text() == "in progress"


@posix
def test_a_file_that_another_process_takes_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def taken(**how: Any) -> tuple[int, str]:
        handle, name = mkstemp(**how)
        made.append(name)
        if len(made) == 1:
            remove_leftovers(tmp_path)  # before it is held
        return handle, name

    mkstemp = tempfile.mkstemp
    monkeypatch.setattr(tempfile, "mkstemp", taken)
    write_json(tmp_path / "a.json", 1)
    assert len(made) == 2
    assert read_json(tmp_path / "a.json") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
