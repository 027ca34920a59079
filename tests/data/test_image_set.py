"""Image sets: from arrays, files and folders, with names and labels that fit; parts and splits."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import noise, save
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet, load_images

few = settings(max_examples=30, deadline=None)


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
    "values from 0 to 16: floats must be in .0, 1.; divide them by the most": np.linspace(0, 16, 128).reshape(2, 8, 8),
    "values from -1 to 1: .* scale them": np.linspace(-1, 1, 128).reshape(2, 8, 8),
    "values from nan": np.full((2, 8, 8), np.nan),
    "type int64: give uint8": np.zeros((2, 8, 8), np.int64),
    "not square; crop or resize": np.zeros((2, 8, 9, 3), np.uint8),
    "expected 1 or 3 channels; drop alpha": np.zeros((2, 8, 8, 4), np.uint8),
    "no image in it": np.zeros((0, 8, 8), np.uint8),
    r"shape \(8,\): expected": np.zeros(8, np.uint8),
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
    with pytest.raises(InputError, match="'a' is at rows 0 and 2"):
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


@pytest.mark.parametrize("name", ["", "a\0b", "a\ud800", "..", "../x", "a/../b", "a\\..\\b"])
def test_a_name_that_no_file_could_have_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"row 1: .* is no name of an image; leave out empty names, \.\. and NUL"):
        ImageSet.from_arrays(noise(2, 8, 8), names=["a", name])


def test_odd_names_that_a_file_could_have_are_kept() -> None:
    names = ("..a", "a..", "/x/1.png", " ", "ü\n")
    assert ImageSet.from_arrays(noise(5, 8, 8), names=names).names == names


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
)
def test_a_split_parts_the_images_and_keeps_each_class_s_share(sizes: list[int], share: float, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    images = ImageSet.from_arrays(np.zeros((len(labels), 2, 2), np.uint8), labels=labels)
    n_second = round(share * len(labels))
    first, second = images.split(n_second, seed=seed)
    assert len(second) == n_second
    assert sorted(map(int, first.names + second.names)) == list(range(len(labels)))
    assert list(map(int, second.names)) == sorted(map(int, second.names))
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
    assert shown == "ImageSet(1,000 grey images of 8 × 8, 4 classes)"


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


def test_files_of_arrays_are_shrunk_to_the_largest_side_allowed_and_never_grow(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", noise(2, 16, 16, 3))
    at_most = {side: load_images(tmp_path / "x.npy", max_side=side) for side in (8, 16, 32)}
    assert [images.side for images in at_most.values()] == [8, 16, 16]
    np.testing.assert_array_equal(at_most[8].images, load_images(tmp_path / "x.npy", side=8).images)
    assert load_images(tmp_path / "x.npy", side=12, max_side=8).side == 12


class Pickled:
    ran = False

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return setattr, (Pickled, "ran", True)


def test_pickled_arrays_are_refused_and_run_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([Pickled()], object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", images=np.array([Pickled()], object))
    for name in ("x.npy", "x.npz"):
        with pytest.raises(InputError, match=rf"{name}: cannot be read as arrays of numbers \(it holds Python objects"):
            load_images(tmp_path / name)
    assert not Pickled.ran


def test_a_file_of_arrays_under_the_suffix_of_the_other_kind_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", noise(2, 8, 8))
    np.savez(tmp_path / "more.npz", images=noise(2, 8, 8))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    (tmp_path / "more.npz").rename(tmp_path / "more.npy")
    for name, maker in (("one.npz", "numpy.savez"), ("more.npy", "numpy.save")):
        with pytest.raises(InputError, match=rf"it is no {Path(name).suffix} file; write it with {maker}$"):
            load_images(tmp_path / name)


def test_files_that_hold_no_images_are_refused(tmp_path: Path) -> None:
    for name in ("x.npy", "x.npz"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(InputError, match=f"{name}: cannot be read") as told:
            load_images(tmp_path / name)
        assert "pickle" not in str(told.value)
        assert f"it is no {Path(name).suffix} file" in str(told.value)
    np.savez(tmp_path / "y.npz", pictures=noise(1, 8, 8))
    with pytest.raises(InputError, match=r"no array named images, embeddings, x or data in it \(it has pictures\)"):
        load_images(tmp_path / "y.npz")
    np.save(tmp_path / "z.npy", noise(2, 8, 9))
    with pytest.raises(InputError, match=r"z\.npy: images of shape \(2, 8, 9\): they are not square"):
        load_images(tmp_path / "z.npy")
    with pytest.raises(InputError, match="no such file"):
        ImageSet.from_file(tmp_path / "none.npy")
    with pytest.raises(InputError, match=r"not a \.npy or \.npz file"):
        load_images(save(tmp_path / "a.png", noise(8, 8)))


def npz_that_says(path: Path, shape: str, content: bytes = bytes(64)) -> Path:
    """A .npz file whose header claims a shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("embeddings.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content)
    return path


def test_a_file_that_claims_more_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ("(1000000, 16000000)", f"({10**22}, 16)"):
        with pytest.raises(InputError, match=r"x\.npz: (claims more data than fits|cannot be read as)"):
            load_images(npz_that_says(tmp_path / "x.npz", shape))
    full = npz_that_says(tmp_path / "y.npz", "(1024, 1024)", bytes(4 * 2**20))
    monkeypatch.setattr("constraintmatch._internal.files._memory_left", lambda: 2.0**20)
    with pytest.raises(InputError, match=r"y\.npz: needs 0\.0 GiB of memory, and 0\.0 GiB are free; write the images"):
        load_images(full)
    monkeypatch.undo()
    assert len(load_images(full)) == 1024


# Folders


@pytest.mark.parametrize(
    ("option", "value"), [("side", 7), ("side", 0), ("max_side", 7), ("channels", 2), ("channels", 4)]
)
def test_impossible_sizes_are_refused(tmp_path: Path, option: str, value: int) -> None:
    save(tmp_path / "a.png", noise(16, 16))
    with pytest.raises(InputError, match=f"{option} {value}"):
        load_images(tmp_path, **{option: value})


def test_strict_stops_at_a_broken_file_cached_or_not(tmp_path: Path) -> None:
    save(tmp_path / "good.png", noise(16, 16))
    (tmp_path / "bad.png").write_text("hello")
    for _ in range(2):
        with pytest.raises(InputError, match=r"bad\.png: not a picture in a known format; repair or remove it"):
            load_images(tmp_path, strict=True)
    assert len(load_images(tmp_path)) == 1


def test_folders_without_images_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_images(tmp_path / "none")
    with pytest.raises(InputError, match=r"no images there \(looked for .avif"):
        load_images(tmp_path)
    (tmp_path / "a.png").write_text("hello")
    (tmp_path / "b.png").write_text("hello")
    for _ in range(2):
        with pytest.raises(InputError, match=r"a.png: not a picture .* \(and 1 more\); no image could be read"):
            load_images(tmp_path)
    with pytest.raises(InputError, match="a file; give a folder"):
        ImageSet.from_folder(tmp_path / "a.png")


def test_class_folders_give_labels(tmp_path: Path) -> None:
    for name in ("dog/1.png", "cat/deep/2.png", "dog/3.png"):
        save(tmp_path / name, noise(16, 16))
    images = load_images(tmp_path)
    assert (images.names[0], images.labels.tolist()) == ("cat/deep/2.png", [0, 1, 1])
    assert images.classes == ("cat", "dog")
    assert load_images(tmp_path, class_folders=False).labels is None
    save(tmp_path / "loose.png", noise(16, 16))
    assert load_images(tmp_path).labels is None
    with pytest.raises(InputError, match=r"loose\.png is in no class folder"):
        load_images(tmp_path, class_folders=True)


def test_one_class_folder_gives_labels_only_when_asked(tmp_path: Path) -> None:
    save(tmp_path / "dog" / "1.png", noise(16, 16))
    assert load_images(tmp_path).classes is None
    assert load_images(tmp_path, class_folders=True).classes == ("dog",)
