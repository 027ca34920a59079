"""The cache of decoded images: it serves, it never lies, and killed or crowded writers leave it whole."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forks import Fork
from image_files import noise, save
from PIL import Image

from constraintmatch.data.image_set import Skipped, load_images


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    monkeypatch.setenv("LOCALAPPDATA", str(place))
    return place


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The warnings that are logged meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield lines
    logging.getLogger().removeHandler(handler)


posix = pytest.mark.skipif(os.name == "nt", reason="needs a home folder as POSIX has it")


def counting(calls: list[int]) -> object:
    return lambda done, _: calls.append(done)


def test_the_cache_is_a_map_equal_to_the_decoding(tmp_path: Path, own_cache: Path) -> None:
    for number in range(5):
        save(tmp_path / f"{number}.png", noise(20, 20 + number, 3, seed=number))
    (tmp_path / "bad.png").write_text("hello")
    plain, first, second = (load_images(tmp_path, cache=cache) for cache in (False, True, True))
    for images in (first, second):
        np.testing.assert_array_equal(images.images, plain.images)
        assert (images.names, images.skipped) == (plain.names, plain.skipped)
        assert isinstance(images.images.base, np.memmap)
    assert plain.images.base is None or not isinstance(plain.images.base, np.memmap)
    kept = sorted(path.suffix for path in own_cache.rglob("*") if path.is_file())
    assert kept == [".json", ".npy"]


def change_content(folder: Path) -> None:
    save(folder / "b.png", noise(16, 16, seed=7))


def touch(folder: Path) -> None:
    os.utime(folder / "b.png", ns=(1, 1))


def add(folder: Path) -> None:
    save(folder / "sub" / "c.png", noise(16, 16, seed=8))


def remove(folder: Path) -> None:
    (folder / "b.png").unlink()


def rename(folder: Path) -> None:
    (folder / "b.png").rename(folder / "d.png")


@pytest.mark.parametrize("change", [change_content, touch, add, remove, rename])
def test_a_changed_folder_is_decoded_again(tmp_path: Path, own_cache: Path, change) -> None:
    save(tmp_path / "a.png", noise(16, 16, seed=1))
    save(tmp_path / "b.png", noise(16, 16, seed=2))
    load_images(tmp_path)
    change(tmp_path)
    calls: list[int] = []
    changed, plain = load_images(tmp_path, progress=counting(calls)), load_images(tmp_path, cache=False)
    assert calls
    assert changed.names == plain.names
    np.testing.assert_array_equal(changed.images, plain.images)
    assert len([path for path in own_cache.rglob("*") if path.is_file()]) == 2  # the old state is gone


@posix
@pytest.mark.parametrize("given", ["", "relative/cache"])
def test_the_cache_lies_in_the_home_folder_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    save(tmp_path / "in" / "a.png", noise(16, 16))
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_images(tmp_path / "in")
    assert len(list((tmp_path / "home" / ".cache" / "constraintmatch").glob("*/*.npy"))) == 1


def test_other_sizes_have_their_own_cache(tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(40, 40, 3))
    shapes = [(side, channels) for side in (None, 16) for channels in (None, 1)] * 2
    found = [load_images(tmp_path, side=side, channels=channels).images.shape[2:] for side, channels in shapes]
    assert found == [(40, 3), (40, 1), (16, 3), (16, 1)] * 2
    sides = [load_images(tmp_path, side=side, max_side=32).side for side in (None, 16, None)]
    assert sides == [32, 16, 32]


def test_a_spoilt_cache_is_decoded_again(tmp_path: Path, own_cache: Path) -> None:
    save(tmp_path / "a.png", noise(16, 16))
    for suffix, spoil in [(".npy", b"nonsense"), (".npy", None), (".json", b"{"), (".json", b"[]"), (".npy", b"")]:
        load_images(tmp_path)
        file = next(own_cache.rglob(f"*{suffix}"))
        file.write_bytes(file.read_bytes()[:-1] if spoil is None else spoil)
        np.testing.assert_array_equal(load_images(tmp_path).images[0, ..., 0], noise(16, 16))


def test_a_cache_that_cannot_be_written_leaves_the_images_in_memory(tmp_path: Path, logged: list[str]) -> None:
    save(tmp_path / "in" / "a.png", noise(16, 16))
    (tmp_path / "file").write_text("in the way")
    images = load_images(tmp_path / "in", cache=tmp_path / "file")
    np.testing.assert_array_equal(images.images[0, ..., 0], noise(16, 16))
    assert "into memory" in logged[0]


def test_a_full_disk_leaves_the_images_in_memory_and_no_rest(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    save(tmp_path / "a.png", noise(16, 16))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("constraintmatch.data.cache._write_header", full)
    assert len(load_images(tmp_path)) == 1
    assert "no space left" in logged[0]
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_a_file_that_may_be_read_again_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.png", noise(16, 16))
    save(tmp_path / "b.png", noise(16, 16))
    state = {"locked": True}
    open_image, opens = Image.open, Path.open

    def refuse(path: Path) -> None:
        if state["locked"] and Path(path).name == "b.png":
            raise PermissionError(13, "Permission denied", str(path))

    def guarded_image(path: Path, *arguments: object, **options: object) -> Image.Image:
        refuse(path)
        return open_image(path, *arguments, **options)

    def guarded(path: Path, *arguments: object, **options: object) -> object:
        refuse(path)
        return opens(path, *arguments, **options)

    monkeypatch.setattr(Image, "open", guarded_image)
    monkeypatch.setattr(Path, "open", guarded)
    calls: list[int] = []
    assert load_images(tmp_path).skipped == (Skipped("b.png", "Permission denied"),)
    assert len(load_images(tmp_path, progress=counting(calls))) == 1
    assert calls == []  # still locked: the cache holds
    state["locked"] = False
    assert load_images(tmp_path).names == ("a.png", "b.png")


def test_leftovers_of_killed_decodes_are_removed_after_a_day(tmp_path: Path, own_cache: Path) -> None:
    save(tmp_path / "a.png", noise(16, 16))
    load_images(tmp_path)
    place = next(own_cache.rglob("*.npy")).parent
    for name, age in (("old", 2 * 86_400), ("new", 60)):
        (place / f".{name}.npy").write_bytes(b"x")
        os.utime(place / f".{name}.npy", (time.time() - age, time.time() - age))
    touch_a = tmp_path / "a.png"
    os.utime(touch_a, ns=(5, 5))
    load_images(tmp_path)
    assert sorted(path.name for path in place.glob(".*")) == [".new.npy"]


def decode(folder: Path) -> None:
    images = load_images(folder, progress=lambda done, _: print(done))
    print("sum", int(images.images.sum()), len(images))


def test_a_killed_decode_leaves_no_half_cache(tmp_path: Path, own_cache: Path) -> None:
    content = save(tmp_path / "0.png", noise(48, 48, 3)).read_bytes()
    for number in range(1, 500):
        (tmp_path / f"{number}.png").write_bytes(content)
    with Fork(decode, tmp_path) as process:
        assert process.out.readline() == "0\n"
        assert process.out.readline() == "16\n"
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not [path for path in own_cache.rglob("[!.]*") if path.is_file()]
    images = load_images(tmp_path)
    np.testing.assert_array_equal(images.images, load_images(tmp_path, cache=False).images)


def test_two_processes_decode_the_same_folder_at_once(tmp_path: Path, own_cache: Path) -> None:
    for number in range(50):
        save(tmp_path / f"{number}.png", noise(32, 32, 3, seed=number), compress_level=1)
    with Fork(decode, tmp_path) as one, Fork(decode, tmp_path) as other:
        answers = [process.out.read().splitlines()[-1] for process in (one, other)]
    expected = int(load_images(tmp_path, cache=False).images.sum())
    assert answers == [f"sum {expected} 50"] * 2
    assert len([path for path in own_cache.rglob("*") if path.is_file()]) == 2


def test_an_interrupted_decode_stops_at_once(tmp_path: Path, own_cache: Path) -> None:
    for number in range(50):
        save(tmp_path / f"{number}.png", noise(16, 16))

    def interrupt(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_images(tmp_path, progress=interrupt)
    assert not [path for path in own_cache.rglob("*") if path.is_file()]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]
