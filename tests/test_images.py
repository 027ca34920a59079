"""Images: every kind of file comes out right, broken ones are named, the cache serves and never lies."""

import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin, TiffImagePlugin

from constraintmatch.errors import InputError
from constraintmatch.images import ImageSet, Skipped, load_images

few = settings(max_examples=30, deadline=None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    monkeypatch.setenv("LOCALAPPDATA", str(place))
    return place


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, pixels: np.ndarray | Image.Image, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)
    return path


def only(folder: Path, **options: object) -> np.ndarray:
    """The pixels of the one image in a folder."""
    images = ImageSet.from_folder(folder, cache=False, **options)
    assert len(images) == 1, images.skipped
    return images.images[0]


def quadrants(side: int = 16, channels: int = 3) -> np.ndarray:
    """Four flat quadrants, all different: shows every turn, and survives JPEG."""
    values = np.array([[[200, 30, 30], [30, 200, 30]], [[30, 30, 200], [220, 220, 220]]], np.uint8)
    large = values.repeat(side // 2, 0).repeat(side // 2, 1)
    return large if channels == 3 else large @ np.array([1, 2, 3], np.uint16) // 6


# Arrays


@few
@given(n=st.integers(1, 4), side=st.integers(2, 9).filter(lambda side: side != 3), channels=st.sampled_from([1, 3]))
def test_channels_first_and_last_give_the_same_images(n: int, side: int, channels: int) -> None:
    pixels = noise(n, side, side, channels)
    last, first = ImageSet.from_arrays(pixels), ImageSet.from_arrays(pixels.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(last.images, pixels)
    np.testing.assert_array_equal(first.images, pixels)
    assert first.images.flags.c_contiguous
    assert (len(first), first.side, first.channels) == (n, side, channels)


def test_three_axes_are_grey_images() -> None:
    pixels = noise(5, 8, 8)
    np.testing.assert_array_equal(ImageSet.from_arrays(pixels).images, pixels[..., None])


def test_bytes_survive_the_way_through_floats() -> None:
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    for kind in (np.float16, np.float32, np.float64):
        np.testing.assert_array_equal(ImageSet.from_arrays((pixels / 255).astype(kind)).images[..., 0], pixels)


BAD_ARRAYS = {
    "values from 0 to 16: floats must lie in .0, 1.; divide them by 16": np.linspace(0, 16, 128).reshape(2, 8, 8),
    "values from -1 to 1: .* scale them": np.linspace(-1, 1, 128).reshape(2, 8, 8),
    "values from nan": np.full((2, 8, 8), np.nan),
    "type int64: give uint8": np.zeros((2, 8, 8), np.int64),
    "not square; crop or resize": np.zeros((2, 8, 9, 3), np.uint8),
    "expected 1 or 3 channels; drop alpha": np.zeros((2, 8, 8, 4), np.uint8),
    "no image in it": np.zeros((0, 8, 8), np.uint8),
    r"shape \(8, 8\): expected": np.zeros((8, 8), np.uint8),
}


@pytest.mark.parametrize("message", BAD_ARRAYS)
def test_arrays_that_are_no_images_are_refused_with_the_mend(message: str) -> None:
    with pytest.raises(InputError, match=message):
        ImageSet.from_arrays(BAD_ARRAYS[message])


def test_names_are_row_numbers_unless_given() -> None:
    assert ImageSet.from_arrays(noise(3, 8, 8)).names == ("0", "1", "2")
    assert ImageSet.from_arrays(noise(2, 8, 8), names=["b", "a"]).rows() == {"b": 0, "a": 1}


def test_names_and_labels_must_fit() -> None:
    with pytest.raises(InputError, match="3 names for 2 images"):
        ImageSet.from_arrays(noise(2, 8, 8), names=["a", "b", "c"])
    with pytest.raises(InputError, match="'a' stands at rows 0 and 2"):
        ImageSet.from_arrays(noise(3, 8, 8), names=["a", "b", "a"])
    with pytest.raises(InputError, match=r"labels of shape \(3,\) for 2 images"):
        ImageSet.from_arrays(noise(2, 8, 8), labels=[0, 1, 2])
    for labels in ([0, -1], [0.5, 1], [np.nan, 0]):
        with pytest.raises(InputError, match="whole numbers from 0"):
            ImageSet.from_arrays(noise(2, 8, 8), labels=labels)
    with pytest.raises(InputError, match="label 2 has no name: there are 2 classes"):
        ImageSet.from_arrays(noise(2, 8, 8), labels=[0, 2], classes=["cat", "dog"])
    with pytest.raises(InputError, match="'cow' is not one of the classes cat, dog"):
        ImageSet.from_arrays(noise(2, 8, 8), labels=["cat", "cow"], classes=["cat", "dog"])


def test_labels_may_be_a_column_or_words() -> None:
    column = ImageSet.from_arrays(noise(3, 8, 8), labels=np.array([[2], [0], [1]], np.uint8))
    assert column.labels.tolist() == [2, 0, 1]
    assert column.labels.dtype == np.int64
    words = ImageSet.from_arrays(noise(3, 8, 8), labels=["dog", "cat", "dog"])
    assert (words.labels.tolist(), words.classes) == ([1, 0, 1], ("cat", "dog"))


# Parts


@pytest.mark.parametrize("rows", [[2, 0], np.array([2, 0]), [-1, 0], [], np.array([], np.int64)])
def test_taken_rows_keep_names_labels_and_classes(rows: list[int]) -> None:
    images = ImageSet.from_arrays(noise(3, 8, 8), names=["a", "b", "c"], labels=[0, 1, 2], classes=["x", "y", "z"])
    part = images.take(rows)
    expected = [int(row) % 3 for row in rows]
    np.testing.assert_array_equal(part.images, images.images[expected])
    assert part.names == tuple("abc"[row] for row in expected)
    assert part.labels.tolist() == expected
    assert part.classes == ("x", "y", "z")


def test_a_mask_takes_too() -> None:
    assert ImageSet.from_arrays(noise(3, 8, 8)).take([True, False, True]).names == ("0", "2")


@few
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
    stratified=st.booleans(),
)
def test_a_split_parts_the_images_and_keeps_each_class_s_share(
    sizes: list[int], share: float, seed: int, stratified: bool
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    images = ImageSet.from_arrays(np.zeros((len(labels), 2, 2), np.uint8), labels=labels)
    n_second = round(share * len(labels))
    first, second = images.split(n_second, seed=seed, stratified=stratified)
    assert len(second) == n_second
    assert sorted(map(int, first.names + second.names)) == list(range(len(labels)))
    assert list(map(int, second.names)) == sorted(map(int, second.names))
    if stratified:
        counts = np.bincount(second.labels, minlength=len(sizes))
        assert np.all(np.abs(counts - np.array(sizes) * n_second / len(labels)) < 1)


def test_a_split_depends_on_its_seed_alone() -> None:
    images = ImageSet.from_arrays(np.zeros((40, 2, 2), np.uint8), labels=np.arange(40) % 4)
    one, again, other = (images.split(8, seed=seed)[1].names for seed in (1, 1, 2))
    assert one == again != other
    assert one == ("1", "3", "5", "6", "14", "16", "31", "32")  # the same on every platform


def test_a_split_without_labels_is_plain() -> None:
    first, second = ImageSet.from_arrays(noise(10, 2, 2)).split(3, seed=0)
    assert (len(first), len(second), second.labels) == (7, 3, None)


@pytest.mark.parametrize("n_second", [-1, 11])
def test_more_images_than_there_are_cannot_be_split_off(n_second: int) -> None:
    with pytest.raises(InputError, match="the set has 10"):
        ImageSet.from_arrays(noise(10, 2, 2)).split(n_second, seed=0)


def test_the_fingerprint_tells_sets_apart() -> None:
    pixels = noise(5, 8, 8)
    images = ImageSet.from_arrays(pixels)
    changed = pixels.copy()
    changed[3, 4, 4] ^= 1
    others = [
        ImageSet.from_arrays(changed),
        ImageSet.from_arrays(pixels, names=list("abcde")),
        ImageSet.from_arrays(pixels[:4]),
        ImageSet.from_arrays(pixels.reshape(20, 4, 4)),
    ]
    assert images.fingerprint() == ImageSet.from_arrays(pixels.copy()).fingerprint()
    assert len({image.fingerprint() for image in [images, *others]}) == 5
    assert (
        ImageSet.from_arrays(noise(1_000, 2, 2)).fingerprint() != ImageSet.from_arrays(noise(999, 2, 2)).fingerprint()
    )


def test_a_set_is_shown_in_one_short_line() -> None:
    shown = repr(ImageSet.from_arrays(noise(1_000, 8, 8), labels=np.arange(1_000) % 4))
    assert shown == "ImageSet(1,000 grey images of 8 x 8, 4 classes)"


# Files of arrays


def test_npy_files_are_mapped_not_read(tmp_path: Path) -> None:
    pixels = noise(4, 8, 8, 3)
    np.save(tmp_path / "x.npy", pixels)
    images = load_images(tmp_path / "x.npy")
    np.testing.assert_array_equal(images.images, pixels)
    assert not images.images.flags.writeable
    assert isinstance(images.images.base, np.memmap)


@pytest.mark.parametrize("keys", [("images", "labels"), ("x", "y"), ("X", "Y"), ("data", "labels")])
def test_npz_files_are_read_by_the_usual_keys(tmp_path: Path, keys: tuple[str, str]) -> None:
    pixels = noise(3, 8, 8)
    np.savez(tmp_path / "x.npz", **{keys[0]: pixels, keys[1]: np.array([2, 0, 1])}, names=np.array([b"a", b"b", b"c"]))
    images = ImageSet.from_file(tmp_path / "x.npz")
    np.testing.assert_array_equal(images.images[..., 0], pixels)
    assert (images.names, images.labels.tolist()) == (("a", "b", "c"), [2, 0, 1])


def test_files_of_arrays_are_converted_on_request(tmp_path: Path) -> None:
    pixels = noise(2, 16, 16, 3)
    np.savez(tmp_path / "x.npz", images=pixels, labels=[0, 1], classes=["a", "b"])
    images = load_images(str(tmp_path / "x.npz"), side=8, channels=1)
    grey = Image.fromarray(pixels[1]).convert("L").resize((8, 8), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(images.images[1, ..., 0], grey)
    assert (images.labels.tolist(), images.classes) == ([0, 1], ("a", "b"))
    assert load_images(tmp_path / "x.npz", channels=3).images.shape == pixels.shape


class Pickled:
    ran = False

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return setattr, (Pickled, "ran", True)


def test_pickled_arrays_are_refused_and_run_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([Pickled()], object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", images=np.array([Pickled()], object))
    for name in ("x.npy", "x.npz"):
        with pytest.raises(InputError, match=f"{name}: cannot be read as arrays"):
            load_images(tmp_path / name)
    assert not Pickled.ran


def test_files_that_hold_no_images_are_refused(tmp_path: Path) -> None:
    for name in ("x.npy", "x.npz"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(InputError, match=f"{name}: cannot be read"):
            load_images(tmp_path / name)
    np.savez(tmp_path / "y.npz", pictures=noise(1, 8, 8))
    with pytest.raises(InputError, match=r"no array named images, x or data in it \(it has pictures\)"):
        load_images(tmp_path / "y.npz")
    np.save(tmp_path / "z.npy", noise(2, 8, 9))
    with pytest.raises(InputError, match=r"z\.npy: images of shape \(2, 8, 9\): they are not square"):
        load_images(tmp_path / "z.npy")
    with pytest.raises(InputError, match="no such file"):
        ImageSet.from_file(tmp_path / "none.npy")
    with pytest.raises(InputError, match=r"not a \.npy or \.npz file"):
        load_images(save(tmp_path / "a.png", noise(8, 8)))


# Kinds of image files


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".tiff", ".PNG"])
@pytest.mark.parametrize("channels", [1, 3])
def test_lossless_files_of_the_right_size_keep_their_bytes(tmp_path: Path, suffix: str, channels: int) -> None:
    pixels = noise(32, 32, 3)[..., :channels]
    save(tmp_path / f"a{suffix}", pixels.squeeze())
    np.testing.assert_array_equal(only(tmp_path), pixels)


def test_webp_keeps_its_bytes_when_lossless(tmp_path: Path) -> None:
    save(tmp_path / "a.webp", noise(32, 32, 3), lossless=True)
    np.testing.assert_array_equal(only(tmp_path), noise(32, 32, 3))


def test_jpeg_comes_out_as_pillow_decodes_it(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", noise(32, 32, 3))
    np.testing.assert_array_equal(only(tmp_path), np.asarray(Image.open(path)))


def test_a_large_jpeg_comes_out_close_to_the_full_decoding(tmp_path: Path) -> None:
    smooth = Image.fromarray(noise(12, 9, 3)).resize((900, 1200), Image.Resampling.BICUBIC)
    path = save(tmp_path / "a.jpg", smooth, quality=95)
    full = Image.open(path).crop((0, 150, 900, 1050)).resize((96, 96), Image.Resampling.BICUBIC)
    assert np.abs(only(tmp_path).astype(int) - np.asarray(full)).mean() < 1.5


def test_a_gif_gives_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "lime")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(only(tmp_path), np.full((16, 16, 3), [255, 0, 0]))


def test_the_suffix_need_not_tell_the_format(tmp_path: Path) -> None:
    save(tmp_path / "a.jpg", noise(16, 16, 3), format="PNG")
    np.testing.assert_array_equal(only(tmp_path), noise(16, 16, 3))


def test_transparent_pixels_lie_on_white(tmp_path: Path) -> None:
    pixels = noise(16, 16, 4)
    save(tmp_path / "a.png", pixels)
    alpha = pixels[..., 3:] / 255
    expected = pixels[..., :3] * alpha + 255 * (1 - alpha)
    assert np.abs(only(tmp_path) - expected).max() <= 1


def test_grey_with_alpha_stays_grey_on_white(tmp_path: Path) -> None:
    pixels = noise(16, 16, 2)
    save(tmp_path / "a.png", Image.merge("LA", _planes(pixels)))
    alpha = pixels[..., 1] / 255
    expected = pixels[..., 0] * alpha + 255 * (1 - alpha)
    assert np.abs(only(tmp_path)[..., 0] - expected).max() <= 1


def _planes(pixels: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(pixels, -1, 0)]


def _palette_image() -> Image.Image:
    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16) % 4)
    image.putpalette([10, 20, 30, 200, 0, 0, 0, 200, 0, 0, 0, 200])
    return image


def test_palette_images_show_their_colours(tmp_path: Path) -> None:
    save(tmp_path / "a.png", _palette_image())
    table = np.array([[10, 20, 30], [200, 0, 0], [0, 200, 0], [0, 0, 200]])
    np.testing.assert_array_equal(only(tmp_path), table[np.arange(256).reshape(16, 16) % 4])


@pytest.mark.parametrize("transparency", [1, bytes([255, 0, 255, 255])])
def test_a_transparent_palette_entry_is_white(tmp_path: Path, transparency: int | bytes) -> None:
    save(tmp_path / "a.png", _palette_image(), transparency=transparency)
    table = np.array([[10, 20, 30], [255, 255, 255], [0, 200, 0], [0, 0, 200]])
    np.testing.assert_array_equal(only(tmp_path), table[np.arange(256).reshape(16, 16) % 4])


def test_a_transparent_colour_is_white(tmp_path: Path) -> None:
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = [10, 20, 30]
    save(tmp_path / "a.png", pixels, transparency=(10, 20, 30))
    np.testing.assert_array_equal(only(tmp_path), np.where(pixels == 0, 0, 255))


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, suffix: str) -> None:
    deep = np.linspace(0, 65_535, 256).astype(np.uint16).reshape(16, 16)
    save(tmp_path / f"a{suffix}", deep)
    np.testing.assert_array_equal(only(tmp_path)[..., 0], np.arange(256).reshape(16, 16))


def test_dark_sixteen_bit_images_stay_dark(tmp_path: Path) -> None:
    save(tmp_path / "a.png", np.full((16, 16), 257 * 3, np.uint16))
    np.testing.assert_array_equal(only(tmp_path), 3)


def test_big_endian_sixteen_bit_tiffs_are_scaled(tmp_path: Path) -> None:
    deep = np.linspace(0, 65_535, 256).astype(">u2").reshape(16, 16)
    save(tmp_path / "a.tif", Image.frombytes("I;16B", (16, 16), deep.tobytes()))
    np.testing.assert_array_equal(only(tmp_path)[..., 0], np.arange(256).reshape(16, 16))


def test_thirty_two_bit_tiffs_count_as_sixteen_where_they_fit(tmp_path: Path) -> None:
    save(tmp_path / "a.tif", (np.arange(256, dtype=np.int32) * 257).reshape(16, 16))
    np.testing.assert_array_equal(only(tmp_path)[..., 0], np.arange(256).reshape(16, 16))
    save(tmp_path / "a.tif", np.full((16, 16), 2**30, np.int32))
    np.testing.assert_array_equal(only(tmp_path), 128)


def test_float_tiffs_are_read_from_zero_to_one_only(tmp_path: Path) -> None:
    save(tmp_path / "a.tif", (np.arange(256) / 255).astype(np.float32).reshape(16, 16))
    np.testing.assert_array_equal(only(tmp_path)[..., 0], np.arange(256).reshape(16, 16))
    save(tmp_path / "b.tif", np.full((16, 16), 7, np.float32))
    skipped = ImageSet.from_folder(tmp_path).skipped
    assert [skip.name for skip in skipped] == ["b.tif"]
    assert "from 7 to 7" in skipped[0].reason


def test_one_bit_images_are_black_and_white(tmp_path: Path) -> None:
    bits = noise(16, 16) > 127
    save(tmp_path / "a.png", bits)
    np.testing.assert_array_equal(only(tmp_path)[..., 0], bits * 255)


@pytest.mark.parametrize("suffix", [".tif", ".jpg"])
def test_cmyk_becomes_the_same_colours(tmp_path: Path, suffix: str) -> None:
    save(tmp_path / f"a{suffix}", Image.fromarray(quadrants()).convert("CMYK"))
    assert np.abs(only(tmp_path).astype(int) - quadrants()).max() <= 6


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
def test_turned_images_are_turned_back(tmp_path: Path, suffix: str, orientation: int) -> None:
    upright = quadrants(32)
    flip, transpose, turn = np.fliplr, lambda x: x.transpose(1, 0, 2), np.rot90
    stored = {  # how a camera held this way lays the upright picture down
        1: upright,
        2: flip(upright),
        3: turn(upright, 2),
        4: np.flipud(upright),
        5: transpose(upright),
        6: turn(upright, 1),
        7: turn(transpose(upright), 2),
        8: turn(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if suffix == ".webp" else {"subsampling": 0} if suffix == ".jpg" else {}
    if suffix == ".tif":
        tags = TiffImagePlugin.ImageFileDirectory_v2()
        tags[0x0112] = orientation
        options = {"tiffinfo": tags}
    else:
        options["exif"] = exif
    save(tmp_path / f"a{suffix}", np.ascontiguousarray(stored), **options)
    assert np.abs(only(tmp_path).astype(int) - upright).max() <= 12


def test_broken_exif_does_not_spoil_a_picture(tmp_path: Path) -> None:
    save(tmp_path / "a.jpg", quadrants(), exif=b"Exif\0\0II*\0\xff\xff\xff\x7f nonsense", subsampling=0)
    assert np.abs(only(tmp_path).astype(int) - quadrants()).max() <= 12


# Sizes


def test_images_of_different_sizes_are_resized_and_cropped_in_the_middle(tmp_path: Path) -> None:
    wide = Image.fromarray(noise(96, 192, 3))
    save(tmp_path / "a.png", wide)
    expected = wide.resize((64, 32), Image.Resampling.BICUBIC).crop((16, 0, 48, 32))
    np.testing.assert_array_equal(only(tmp_path, side=32), expected)
    np.testing.assert_array_equal(only(tmp_path, side=96), wide.crop((48, 0, 144, 96)))
    larger = wide.resize((256, 128), Image.Resampling.BICUBIC).crop((64, 0, 192, 128))
    np.testing.assert_array_equal(only(tmp_path, side=128), larger)


def test_shrinking_averages(tmp_path: Path) -> None:
    stripes = np.tile(np.array([0, 255], np.uint8), (64, 32))
    save(tmp_path / "a.png", stripes)
    assert np.abs(only(tmp_path, side=16).astype(int) - 127).max() <= 20


@pytest.mark.parametrize(
    ("sizes", "side"),
    [
        ([(28, 28)] * 3, 28),
        ([(96, 96)] * 2, 96),
        ([(5, 5)] * 2, 8),
        ([(100, 100)] * 2, 96),
        ([(300, 200), (97, 500), (120, 96)], 96),
        ([(640, 95)] * 2, 64),
        ([(32, 32), (33, 33), (500, 500)], 32),
        ([(20, 30), (31, 31)], 16),
        ([(9, 12)], 8),
        ([(3, 4)], 8),
        ([(1, 50)], 8),
    ],
)
def test_the_side_follows_from_the_sizes(tmp_path: Path, sizes: list[tuple[int, int]], side: int) -> None:
    for number, (width, height) in enumerate(sizes):
        save(tmp_path / f"{number}.png", noise(height, width))
    images = ImageSet.from_folder(tmp_path, cache=False)
    assert images.images.shape == (len(sizes), side, side, 1)


def test_colour_is_chosen_when_one_image_has_it(tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(16, 16))
    assert ImageSet.from_folder(tmp_path).channels == 1
    save(tmp_path / "b.png", noise(16, 16, 3))
    images = ImageSet.from_folder(tmp_path)
    assert images.channels == 3
    np.testing.assert_array_equal(images.images[0], noise(16, 16)[..., None].repeat(3, 2))
    grey = ImageSet.from_folder(tmp_path, channels=1)
    np.testing.assert_array_equal(grey.images[1, ..., 0], Image.fromarray(noise(16, 16, 3)).convert("L"))


@pytest.mark.parametrize(("option", "value"), [("side", 7), ("side", 0), ("channels", 2), ("channels", 4)])
def test_impossible_sizes_are_refused(tmp_path: Path, option: str, value: int) -> None:
    save(tmp_path / "a.png", noise(16, 16))
    with pytest.raises(InputError, match=f"{option} {value}"):
        load_images(tmp_path, **{option: value})


# Folders


def test_names_are_relative_paths_in_plain_order(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/10.png", "a/deep/er/x.JPG", "Z.png", "é ü.png"):
        save(tmp_path / name, noise(16, 16))
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "model.bin").write_bytes(b"\0")
    save(tmp_path / ".hidden.png", noise(16, 16))
    save(tmp_path / ".cache" / "x.png", noise(16, 16))
    images = load_images(tmp_path, cache=tmp_path / "our-cache")
    assert images.names == ("Z.png", "a/deep/er/x.JPG", "b/10.png", "b/2.png", "é ü.png")
    assert images.skipped == ()
    assert load_images(tmp_path, cache=tmp_path / "our-cache").names == images.names


def test_broken_files_are_listed_with_their_reason(tmp_path: Path) -> None:
    good = save(tmp_path / "good.jpg", noise(64, 64, 3)).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(good[: len(good) // 2])
    whole = save(tmp_path / "cut.png", noise(64, 64, 3)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("hello")
    images = ImageSet.from_folder(tmp_path)
    assert images.names == ("good.jpg",)
    reasons = {skip.name: skip.reason for skip in images.skipped}
    assert list(reasons) == ["cut.jpg", "cut.png", "empty.png", "text.png"]
    assert "truncated" in reasons["cut.jpg"]
    assert reasons["empty.png"] == "the file is empty"
    assert reasons["text.png"] == "not a picture in a known format"
    assert all(str(tmp_path) not in reason and "\n" not in reason for reason in reasons.values())
    assert ImageSet.from_folder(tmp_path).skipped == images.skipped  # from the cache
    assert ImageSet.from_folder(tmp_path, side=64, channels=3, cache=False).skipped == images.skipped


def test_strict_stops_at_a_broken_file_cached_or_not(tmp_path: Path) -> None:
    save(tmp_path / "good.png", noise(16, 16))
    (tmp_path / "bad.png").write_text("hello")
    for _ in range(2):
        with pytest.raises(InputError, match=r"bad\.png: not a picture in a known format; mend or remove it"):
            load_images(tmp_path, strict=True)
    assert len(load_images(tmp_path)) == 1


def test_folders_without_images_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_images(tmp_path / "none")
    with pytest.raises(InputError, match=r"no images there \(looked for .bmp"):
        load_images(tmp_path)
    (tmp_path / "a.png").write_text("hello")
    (tmp_path / "b.png").write_text("hello")
    for _ in range(2):
        with pytest.raises(InputError, match=r"a.png: not a picture .* \(and 1 more\); no image could be read"):
            load_images(tmp_path)
    with pytest.raises(InputError, match="a file; give a folder"):
        ImageSet.from_folder(tmp_path / "a.png")


@pytest.mark.parametrize("factor", [1, 3])  # Pillow warns over its limit and raises over twice of it
def test_too_large_images_are_skipped_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: int
) -> None:
    save(tmp_path / "good.png", noise(16, 16))
    save(tmp_path / "large.png", noise(40 * factor, 40))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_500)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sized = load_images(tmp_path, side=16, channels=1, cache=False)
        assert load_images(tmp_path).skipped == sized.skipped
    assert sized.skipped == (Skipped("large.png", "too large: more than 1,500 pixels"),)
    assert caught == []
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 15_000)
    assert len(load_images(tmp_path)) == 2


def test_pillow_s_other_warnings_stay_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.png", noise(16, 16))
    load = PngImagePlugin.PngImageFile.load

    def warn_and_load(image: PngImagePlugin.PngImageFile) -> object:
        warnings.warn("odd metadata", UserWarning, stacklevel=1)
        return load(image)

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", warn_and_load)
    images = load_images(tmp_path, cache=False)
    assert images.skipped == ()


posix = pytest.mark.skipif(os.name == "nt", reason="links and pipes need POSIX")


@posix
def test_loops_of_links_end_and_each_folder_counts_once(tmp_path: Path) -> None:
    save(tmp_path / "z" / "1.png", noise(16, 16))
    save(tmp_path / "y" / "2.png", noise(16, 16))
    (tmp_path / "a").symlink_to(tmp_path / "z")
    (tmp_path / "z" / "up").symlink_to(tmp_path)
    (tmp_path / "z" / "y").symlink_to(tmp_path / "y")
    (tmp_path / "y" / "z").symlink_to(tmp_path / "z")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    images = load_images(tmp_path)
    assert images.names == ("y/2.png", "z/1.png")


@posix
def test_linked_files_and_folders_elsewhere_are_read(tmp_path: Path) -> None:
    save(tmp_path / "store" / "1.png", noise(16, 16))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "store")
    (tmp_path / "in" / "file.png").symlink_to(tmp_path / "store" / "1.png")
    assert load_images(tmp_path / "in").names == ("file.png", "folder/1.png")


@posix
def test_links_to_nothing_pipes_and_odd_names_are_skipped(tmp_path: Path) -> None:
    save(tmp_path / "good.png", noise(16, 16))
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    os.mkfifo(tmp_path / "pipe.png")
    with open(os.fsencode(tmp_path) + b"/odd\xff.png", "wb") as file:  # noqa: PTH123
        file.write(b"x")
    images = load_images(tmp_path)
    assert images.names == ("good.png",)
    names = [skip.name for skip in images.skipped]
    assert names == ["gone.png", "loop.png", "odd\\udcff.png", "pipe.png"]
    assert images.skipped[0].reason == "No such file or directory"
    assert images.skipped[3].reason == "not a regular file"


def test_class_folders_give_labels(tmp_path: Path) -> None:
    for name in ("dog/1.png", "cat/deep/2.png", "dog/3.png"):
        save(tmp_path / name, noise(16, 16))
    images = load_images(tmp_path)
    assert (images.names[0], images.labels.tolist()) == ("cat/deep/2.png", [0, 1, 1])
    assert images.classes == ("cat", "dog")
    assert load_images(tmp_path, class_folders=False).labels is None
    save(tmp_path / "loose.png", noise(16, 16))
    assert load_images(tmp_path).labels is None
    with pytest.raises(InputError, match=r"loose\.png lies in no class folder"):
        load_images(tmp_path, class_folders=True)


def test_one_class_folder_gives_labels_only_when_asked(tmp_path: Path) -> None:
    save(tmp_path / "dog" / "1.png", noise(16, 16))
    assert load_images(tmp_path).classes is None
    assert load_images(tmp_path, class_folders=True).classes == ("dog",)


def test_progress_counts_to_the_end_in_the_main_thread(tmp_path: Path) -> None:
    for number in range(40):
        save(tmp_path / f"{number}.png", noise(16, 16))
    calls: list[tuple[int, int]] = []
    threads = set()

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        threads.add(threading.current_thread())

    load_images(tmp_path, progress=progress)
    assert calls[0] == (0, 40)
    assert calls[-1] == (40, 40)
    assert calls == sorted(set(calls))
    assert threads == {threading.main_thread()}
    calls.clear()
    load_images(tmp_path, progress=progress)
    assert calls == []


def test_many_files_keep_their_order(tmp_path: Path) -> None:
    for number in range(200):
        save(tmp_path / f"{number:03d}.png", np.full((8, 8), number, np.uint8))
    images = load_images(tmp_path)
    np.testing.assert_array_equal(images.images[:, 0, 0, 0], np.arange(200))
    assert images.names == tuple(f"{number:03d}.png" for number in range(200))


# The cache


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


def test_a_spoilt_cache_is_decoded_again(tmp_path: Path, own_cache: Path) -> None:
    save(tmp_path / "a.png", noise(16, 16))
    for suffix, spoil in [(".npy", b"nonsense"), (".npy", None), (".json", b"{"), (".json", b"[]"), (".npy", b"")]:
        load_images(tmp_path)
        file = next(own_cache.rglob(f"*{suffix}"))
        file.write_bytes(file.read_bytes()[:-1] if spoil is None else spoil)
        np.testing.assert_array_equal(load_images(tmp_path).images[0, ..., 0], noise(16, 16))


def test_a_cache_that_cannot_be_written_leaves_the_images_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "in" / "a.png", noise(16, 16))
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        images = load_images(tmp_path / "in", cache=tmp_path / "file")
    np.testing.assert_array_equal(images.images[0, ..., 0], noise(16, 16))
    assert "into memory" in caplog.text


def test_a_full_disk_leaves_the_images_in_memory_and_no_rest(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a.png", noise(16, 16))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("constraintmatch.images._write_header", full)
    with caplog.at_level(logging.WARNING):
        assert len(load_images(tmp_path)) == 1
    assert "no space left" in caplog.text
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


DECODE = """
import sys
from constraintmatch.images import load_images
images = load_images(sys.argv[1], progress=lambda done, total: print(done, flush=True))
print("sum", int(images.images.sum()), len(images))
"""


def test_a_killed_decode_leaves_no_half_cache(tmp_path: Path, own_cache: Path) -> None:
    content = save(tmp_path / "0.png", noise(48, 48, 3)).read_bytes()
    for number in range(1, 500):
        (tmp_path / f"{number}.png").write_bytes(content)
    process = subprocess.Popen([sys.executable, "-c", DECODE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "0\n"
        assert process.stdout.readline() == "16\n"
        process.kill()
    assert process.returncode != 0
    assert not [path for path in own_cache.rglob("[!.]*") if path.is_file()]
    images = load_images(tmp_path)
    np.testing.assert_array_equal(images.images, load_images(tmp_path, cache=False).images)


def test_two_processes_decode_the_same_folder_at_once(tmp_path: Path, own_cache: Path) -> None:
    for number in range(50):
        save(tmp_path / f"{number}.png", noise(32, 32, 3, seed=number), compress_level=1)
    command = [sys.executable, "-c", DECODE, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate()[0].splitlines()[-1] for process in processes]
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
