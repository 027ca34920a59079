"""Decoding: every kind of file comes out right, at the right size and in order, and broken ones are named."""

import importlib.util
import os
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import noise, save
from PIL import Image, PngImagePlugin, TiffImagePlugin, features

from constraintmatch._internal.errors import InputError
from constraintmatch.data import decoding
from constraintmatch.data.image_set import ImageSet, Skipped, load_images


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


@pytest.mark.parametrize(("size", "max_side", "side"), [(48, 32, 32), (300, 40, 40), (20, 32, 16), (3, 32, 8)])
def test_a_chosen_side_is_at_most_the_largest_allowed(tmp_path: Path, size: int, max_side: int, side: int) -> None:
    for number in range(2):
        save(tmp_path / f"{number}.png", noise(size, size + number))
    images = load_images(tmp_path, max_side=max_side)
    np.testing.assert_array_equal(images.images, load_images(tmp_path, side=images.side, cache=False).images)
    assert images.side == side
    assert load_images(tmp_path, side=20, max_side=8).side == 20


def test_colour_is_chosen_when_one_image_has_it(tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(16, 16))
    assert ImageSet.from_folder(tmp_path).channels == 1
    save(tmp_path / "b.png", noise(16, 16, 3))
    images = ImageSet.from_folder(tmp_path)
    assert images.channels == 3
    np.testing.assert_array_equal(images.images[0], noise(16, 16)[..., None].repeat(3, 2))
    grey = ImageSet.from_folder(tmp_path, channels=1)
    np.testing.assert_array_equal(grey.images[1, ..., 0], Image.fromarray(noise(16, 16, 3)).convert("L"))


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


def test_what_phones_write_is_read_where_it_can_be_and_else_named_with_the_plugin(tmp_path: Path) -> None:
    save(tmp_path / "0.png", noise(16, 16))
    (tmp_path / "1.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    if features.check("avif"):
        Image.new("RGB", (16, 16), "red").save(tmp_path / "2.avif")
    images = load_images(tmp_path)
    assert images.names == (("0.png", "2.avif") if features.check("avif") else ("0.png",))
    if importlib.util.find_spec("pillow_heif") is None:
        assert (images.skipped[0].name, images.skipped[0].reason) == (
            "1.heic",
            "needs a plugin: pip install pillow-heif",
        )


def test_many_files_keep_their_order(tmp_path: Path) -> None:
    for number in range(200):
        save(tmp_path / f"{number:03d}.png", np.full((8, 8), number, np.uint8))
    images = load_images(tmp_path)
    np.testing.assert_array_equal(images.images[:, 0, 0, 0], np.arange(200))
    assert images.names == tuple(f"{number:03d}.png" for number in range(200))


# JPEGs on a GPU


def test_jpegs_decoded_by_torch_are_near_to_pillows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the GPU, on the CPU: the right image in the right place, what is not plain left to Pillow."""
    for row in range(20):
        smooth = Image.fromarray(noise(6, 4, 3, seed=row)).resize((64, 80 + row), Image.Resampling.BICUBIC)
        save(tmp_path / f"{row:02d}.jpg", smooth, quality=95)
    turned = Image.Exif()
    turned[0x0112] = 6
    save(tmp_path / "20.jpg", quadrants(), exif=turned)
    save(tmp_path / "21.png", quadrants())
    (tmp_path / "22.jpg").write_bytes((tmp_path / "00.jpg").read_bytes()[:-500])
    plain = ImageSet.from_folder(tmp_path, side=32, cache=False)
    made: list[int] = []

    def on_cpu(contents: list[Path], side: int, channels: int, _: str) -> list[np.ndarray | None]:
        found = decode_jpegs(contents, side, channels, "cpu")
        made.append(sum(one is not None for one in found))
        return found

    decode_jpegs = decoding._decode_jpegs
    monkeypatch.setattr(decoding, "decoder", lambda: "cuda")
    monkeypatch.setattr(decoding, "_decode_jpegs", on_cpu)
    other = ImageSet.from_folder(tmp_path, side=32, cache=False)
    assert sum(made) >= 16
    assert other.names == plain.names
    assert other.skipped == plain.skipped
    assert np.abs(other.images.astype(int) - plain.images).mean() < 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_jpegs_decoded_by_a_gpu_are_near_to_pillows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in range(40):
        smooth = Image.fromarray(noise(6, 4, 3, seed=row)).resize((300, 280), Image.Resampling.BICUBIC)
        save(tmp_path / f"{row:02d}.jpg", smooth, quality=95)
    plain = ImageSet.from_folder(tmp_path, side=224)
    monkeypatch.setenv("CONSTRAINTMATCH_DECODE", "cuda")
    other = ImageSet.from_folder(tmp_path, side=224)
    assert 0 < np.abs(other.images.astype(int) - plain.images).mean() < 2


def test_a_decoder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.png", noise(16, 16, 3))
    monkeypatch.setenv("CONSTRAINTMATCH_DECODE", "tpu")
    with pytest.raises(InputError, match="CONSTRAINTMATCH_DECODE: 'tpu' is no GPU of this machine; set it to cuda"):
        ImageSet.from_folder(tmp_path)
