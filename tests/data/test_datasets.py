"""Data sets: the rows agree with the paper; loaders read the published forms and nothing else."""

import io
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import STL10

from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet

OPERATIONS = {
    *("auto_contrast", "equalize", "identity", "brightness", "color", "contrast", "sharpness", "posterize"),
    *("rotate", "shear_x", "shear_y", "solarize", "translate_x", "translate_y"),
}


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, which is the form the archives were published in."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, text: bytes) -> None:
        self.write(pickle.BINSTRING + len(text).to_bytes(4, "little") + text)
        self.memoize(text)

    dispatch[bytes] = save_bytes


def write_published(path: Path, content: object) -> None:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def batch(n: int, seed: int, key: bytes, n_classes: int) -> dict[bytes, object]:
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (n, 3072), dtype=np.uint8)
    return {b"data": data, key: [row % n_classes for row in range(n)], b"filenames": [b"x.png"] * n}


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-py"
    for number in range(1, 6):
        write_published(folder / f"data_batch_{number}", batch(20, number, b"labels", 10))
    write_published(folder / "test_batch", batch(30, 6, b"labels", 10))
    write_published(folder / "batches.meta", {b"label_names": [b"class%d" % i for i in range(10)], b"num_vis": 3072})
    return tmp_path


@pytest.fixture
def cifar100(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-100-python"
    for part, n in (("train", 200), ("test", 40)):
        content = batch(n, n, b"coarse_labels", 20)
        content[b"fine_labels"] = [row % 100 for row in range(n)]
        write_published(folder / part, content)
    names = {b"coarse_label_names": [b"group%d" % i for i in range(20)], b"fine_label_names": [b"f"] * 100}
    write_published(folder / "meta", names)
    return tmp_path


def stl10_images(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 96, 96, 3), dtype=np.uint8)


def write_stl10(folder: Path) -> None:
    """50 training, 30 test and 7 unlabelled images: channel by channel, each column by column; labels from 1."""
    folder.mkdir()
    for part, n in (("train", 50), ("test", 30), ("unlabeled", 7)):
        (folder / f"{part}_X.bin").write_bytes(stl10_images(n, n).transpose(0, 3, 2, 1).tobytes())
        if part != "unlabeled":
            (folder / f"{part}_y.bin").write_bytes(bytes(row % 10 + 1 for row in range(n)))
    (folder / "class_names.txt").write_text("".join(f"class{number}\n" for number in range(10)))


@pytest.fixture
def stl10(tmp_path: Path) -> Path:
    write_stl10(tmp_path / "stl10_binary")
    return tmp_path


@pytest.fixture(scope="module")
def stl10_to_look_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stl10")
    write_stl10(folder / "stl10_binary")
    return folder


WNIDS = {
    "imagenet10": "n02056570 n02085936 n02128757 n02690373 n02692877 n03095699 n04254680 n04285008 n04467665 n07747607",
    "imagenet-dogs": "n02085936 n02086646 n02088238 n02091467 n02097130 n02099601 n02101388 n02101556 n02102177 "
    "n02105056 n02105412 n02105855 n02107142 n02110958 n02112137",
}
PENGUIN, SHARED = "n02056570", "n02085936"  # the first class of ImageNet-10; the class that both sets have


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """4 training images and 1 val image of each class of both sets, and a class of neither."""
    random = np.random.default_rng(0)
    for place, wnid in enumerate(sorted({"n01440764", *" ".join(WNIDS.values()).split()})):
        names = [f"train/{wnid}/{wnid}_{number}.JPEG" for number in (18, 7, 100, 9)]
        for name in [*names, f"val/{wnid}/ILSVRC2012_val_{place:08d}.JPEG"]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (3, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((50, 40)).save(tmp_path / name, "JPEG")
    return tmp_path


def parts(name: str, data_dir: Path | None = None) -> dict[str, ImageSet]:
    return {split: load_dataset(name, split, data_dir) for split in ("train", "val", "test", "train+val", "train+test")}


def test_rows_carry_the_paper_s_sizes() -> None:
    table = {name: (row.n_clusters, row.splits, row.n_validation_constraints) for name, row in DATASETS.items()}
    assert table == {
        "digits": (10, (1_197, 100, 500), 200),
        "cifar10": (10, (45_000, 5_000, 10_000), 10_000),
        "cifar100-20": (20, (45_000, 5_000, 10_000), 10_000),
        "stl10": (10, (4_000, 1_000, 8_000), 5_000),
        "imagenet10": (10, (12_000, 1_000, 500), 1_000),
        "imagenet-dogs": (15, (18_500, 1_000, 750), 1_000),
    }


def test_rows_carry_the_published_settings() -> None:
    settings = {name: tuple(row.tuned["constraintmatch"].values()) for name, row in DATASETS.items()}
    assert settings == {
        "digits": (0.05, 1.0, 0.2),
        "cifar10": (0.01, 1.0, 0.2),
        "cifar100-20": (0.01, 1.0, 0.05),
        "stl10": (0.01, 0.5, 0.1),
        "imagenet10": (0.03, 0.1, 0.05),
        "imagenet-dogs": (0.001, 1.0, 0.1),
    }
    assert DATASETS["cifar100-20"].tuned["pseudo_label"] == {"lr": 0.01, "pseudo_weight": 1.0, "min_confidence": 0.95}


@pytest.mark.parametrize("row", DATASETS.values(), ids=lambda row: row.name)
def test_each_row_is_complete(row) -> None:
    assert len(row.mean) == len(row.std) == row.channels
    assert set(row.tuned) == {"constrained", "pseudo_label", "constraintmatch"}
    assert {*row.without} <= OPERATIONS
    assert row.images_per_step == 3 * row.pairs_per_step
    assert row.backbone in {"resnet18", "resnet34", "tiny"}
    assert row.train_plus_test == (not row.name.startswith("imagenet"))


def test_digits_need_no_files_and_have_the_stated_splits() -> None:
    sets = parts("digits")
    assert tuple(len(sets[split]) for split in ("train", "val", "test")) == DATASETS["digits"].splits
    assert (sets["train"].side, sets["train"].channels) == (8, 1)
    assert np.ptp(np.bincount(sets["val"].labels)) == 0
    assert np.ptp(np.bincount(sets["test"].labels)) <= 3


def test_digits_use_the_whole_range_of_a_byte() -> None:
    everything = load_dataset("digits", "train+test")
    order = np.argsort(everything.names)
    np.testing.assert_array_equal(everything.images[order][..., 0], np.round(load_digits().images * 255 / 16))
    np.testing.assert_array_equal(everything.labels[order], load_digits().target)


def test_digits_constants_are_those_of_the_training_images() -> None:
    pixels = load_dataset("digits", "train").images / 255
    assert DATASETS["digits"].mean == (round(pixels.mean(), 4),)
    assert DATASETS["digits"].std == (round(pixels.std(), 4),)


def test_a_split_is_the_same_each_time() -> None:
    assert (
        load_dataset("digits", "val").fingerprint() == load_dataset("digits", "val").fingerprint() == "2dba71806857fbe3"
    )


@pytest.mark.parametrize("name", ["digits", "cifar10", "cifar100-20", "stl10"])
def test_splits_part_the_images(name: str, request: pytest.FixtureRequest) -> None:
    folder = {"digits": None, "cifar10": "cifar10", "cifar100-20": "cifar100", "stl10": "stl10"}[name]
    sets = parts(name, request.getfixturevalue(folder) if folder else None)
    train, val, test = (set(sets[split].names) for split in ("train", "val", "test"))
    assert len(train | val | test) == len(train) + len(val) + len(test)
    assert set(sets["train+val"].names) == train | val
    assert set(sets["train+test"].names) == train | val | test
    assert len(sets["train+test"]) == len(train) + len(val) + len(test)
    everything = sets["train+test"].rows()
    for part in sets.values():
        rows = [everything[image] for image in part.names]
        np.testing.assert_array_equal(sets["train+test"].images[rows], part.images)
        np.testing.assert_array_equal(sets["train+test"].labels[rows], part.labels)


def test_cifar10_pixels_labels_and_names_are_in_place(cifar10: Path) -> None:
    train = load_dataset("cifar10", "train+val", cifar10)
    first, third = batch(20, 1, b"labels", 10)[b"data"], batch(20, 3, b"labels", 10)[b"data"]
    assert train.images.shape == (100, 32, 32, 3)
    np.testing.assert_array_equal(train.images[0, :, :, 1].ravel(), first[0, 1024:2048])
    np.testing.assert_array_equal(train.images[47, :, :, 2].ravel(), third[7, 2048:])
    assert train.labels[47] == 7
    assert (train.names[0], train.names[99]) == ("train/00000", "train/00099")
    assert train.classes[:2] == ("class0", "class1")
    assert load_dataset("cifar10", "test", cifar10).names[0] == "test/00000"


def test_cifar_validation_images_are_a_tenth_of_each_class(cifar10: Path) -> None:
    assert np.bincount(load_dataset("cifar10", "val", cifar10).labels).tolist() == [1] * 10


def test_cifar100_20_has_the_superclasses(cifar100: Path) -> None:
    train = load_dataset("cifar100-20", "train+val", cifar100)
    assert np.unique(train.labels).tolist() == list(range(20))
    assert train.classes == tuple(f"group{number}" for number in range(20))


def test_the_folder_itself_will_do(cifar10: Path) -> None:
    inside = load_dataset("cifar10", "test", cifar10 / "cifar-10-batches-py")
    assert inside.fingerprint() == load_dataset("cifar10", "test", str(cifar10)).fingerprint()


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickles_written_again_by_python_3_are_read_or_refused_plainly(cifar10: Path, protocol: int) -> None:
    expected = load_dataset("cifar10", "test", cifar10)
    path = cifar10 / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(pickle.dumps(batch(30, 6, b"labels", 10), protocol))
    if protocol == 2:  # needs a codec function, which the unpickler does not hand out
        with pytest.raises(InputError, match="which no data set needs"):
            load_dataset("cifar10", "test", cifar10)
    else:
        np.testing.assert_array_equal(load_dataset("cifar10", "test", cifar10).images, expected.images)


def test_missing_files_are_named(cifar10: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cifar10: say where it is .* cifar-10-batches-py with data_batch_1, "):
        load_dataset("cifar10", "train")
    with pytest.raises(InputError, match="looked for cifar-100-python with train, test, meta"):
        load_dataset("cifar100-20", "train", tmp_path / "nowhere")
    (cifar10 / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(InputError, match="data_batch_4 missing"):
        load_dataset("cifar10", "train", cifar10)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_foreign_pickle_runs_nothing(cifar10: Path, tmp_path: Path, protocol: int) -> None:
    harm = tmp_path / "harm"
    content = pickle.dumps({"data": Bomb(harm), "labels": [1]}, protocol)
    (cifar10 / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    with pytest.raises(InputError, match=r"test_batch: cannot be read \(it asks for (posix|nt)\.mkdir"):
        load_dataset("cifar10", "test", cifar10)
    assert not harm.exists()


FOREIGN = {
    "another type": {b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]},
    "objects": {b"data": np.array([[None]]), b"labels": [0]},
    "another shape": {b"data": np.zeros((2, 1024), np.uint8), b"labels": [0, 1]},
    "too few labels": {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
    "a label without a class": {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]},
    "no data": {b"labels": [0, 1]},
    "a list": [1, 2],
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_pickles_of_another_form_are_refused(cifar10: Path, content: object) -> None:
    write_published(cifar10 / "cifar-10-batches-py" / "test_batch", content)
    with pytest.raises(InputError, match=r"test_batch: .*unpack the archive again"):
        load_dataset("cifar10", "test", cifar10)


@pytest.mark.parametrize("length", [0, 1, 100, 5000])
def test_a_cut_pickle_is_refused(cifar10: Path, length: int) -> None:
    path = cifar10 / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(InputError, match="data_batch_2: cannot be read"):
        load_dataset("cifar10", "train", cifar10)


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
def test_the_published_sizes_give_the_paper_s_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = DATASETS[name]
    n_train, n_val, n_test = row.splits

    def without_pixels(_: object, part: str, __: object) -> ImageSet:
        n = {"train": n_train + n_val, "test": n_test}[part]
        return ImageSet(
            np.empty((n, 0, 0, 3), np.uint8), tuple(f"{part}/{i}" for i in range(n)), np.arange(n) % row.n_clusters
        )

    monkeypatch.setitem(DATASETS, name, replace(row, load=without_pixels))
    sets = parts(name)
    assert tuple(len(sets[split]) for split in ("train", "val", "test")) == row.splits
    assert np.ptp(np.bincount(sets["val"].labels)) <= 1
    assert not set(sets["train"].names) & set(sets["val"].names)
    assert len(sets["train+test"]) == n_train + n_val + (0 if name.startswith("imagenet") else n_test)


# STL-10


@pytest.mark.parametrize("part", ["train", "test", "unlabeled"])
def test_stl10_is_read_as_torchvision_reads_it(stl10: Path, part: str) -> None:
    theirs = STL10.__new__(STL10)  # its constructor wants the checksums of the real files
    theirs.root = str(stl10)
    images, labels = theirs._STL10__loadfile(f"{part}_X.bin", None if part == "unlabeled" else f"{part}_y.bin")
    ours = load_dataset("stl10", {"train": "train+val", "test": "test", "unlabeled": "unlabelled"}[part], stl10)
    np.testing.assert_array_equal(ours.images, images.transpose(0, 2, 3, 1))
    assert ours.images.flags.c_contiguous
    if labels is None:
        assert ours.labels is None
    else:
        np.testing.assert_array_equal(ours.labels, labels)


@settings(max_examples=25, deadline=None)
@given(image=st.integers(0, 29), channel=st.integers(0, 2), row=st.integers(0, 95), column=st.integers(0, 95))
def test_stl10_bytes_go_by_image_channel_column_row(
    stl10_to_look_at: Path, image: int, channel: int, row: int, column: int
) -> None:
    raw = (stl10_to_look_at / "stl10_binary" / "test_X.bin").read_bytes()
    test = load_dataset("stl10", "test", stl10_to_look_at)
    assert test.images[image, row, column, channel] == raw[((image * 3 + channel) * 96 + column) * 96 + row]


def test_stl10_labels_classes_and_names_are_in_place(stl10: Path) -> None:
    train = load_dataset("stl10", "train+val", stl10 / "stl10_binary")
    np.testing.assert_array_equal(train.images, stl10_images(50, 50))
    assert train.labels.tolist() == [row % 10 for row in range(50)]
    assert train.classes == tuple(f"class{number}" for number in range(10))
    assert (train.names[0], train.names[49]) == ("train/00000", "train/00049")


def test_stl10_validation_images_are_a_fifth_of_each_class(stl10: Path) -> None:
    assert np.bincount(load_dataset("stl10", "val", stl10).labels).tolist() == [1] * 10


def test_the_unlabelled_images_are_read_only_when_asked_for(stl10: Path) -> None:
    path = stl10 / "stl10_binary" / "unlabeled_X.bin"
    unlabelled = load_dataset("stl10", "unlabelled", stl10)
    assert (unlabelled.labels, unlabelled.classes, unlabelled.names[6]) == (None, None, "unlabelled/00006")
    before = {split: images.fingerprint() for split, images in parts("stl10", stl10).items()}
    path.write_bytes(path.read_bytes()[:-1])
    assert {split: images.fingerprint() for split, images in parts("stl10", stl10).items()} == before
    with pytest.raises(InputError, match=r"unlabeled_X.bin: 193,535 bytes, not a whole number of images of 27,648"):
        load_dataset("stl10", "unlabelled", stl10)
    path.unlink()
    assert load_dataset("stl10", "train", stl10).fingerprint() == before["train"]
    with pytest.raises(InputError, match=r"unlabeled_X.bin: missing; unpack stl10_binary.tar.gz again"):
        load_dataset("stl10", "unlabelled", stl10)


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "stl10"])
def test_the_other_sets_have_no_unlabelled_images(name: str) -> None:
    with pytest.raises(InputError, match=rf"'unlabelled' is not known; there are train, .*, train\+test of {name}$"):
        load_dataset(name, "unlabelled")


HARM = {
    "cut within an image": ("train_X.bin", lambda raw: raw[:-5], "1,382,395 bytes, not a whole number of .*"),
    "cut after an image": ("train_X.bin", lambda raw: raw[:-27_648], "49 images, but 50 labels"),
    "no image": ("train_X.bin", lambda raw: raw[:0], "0 bytes, not a whole number of .*"),
    "too few labels": ("train_y.bin", lambda raw: raw[:-1], "50 images, but 49 labels"),
    "no label": ("train_y.bin", lambda raw: raw[:0], "empty"),
    "a label 0": ("train_y.bin", lambda raw: raw[:17] + b"\0" + raw[18:], "label 0 of image 17 is not one of 1 to 10"),
    "a label 11": ("train_y.bin", lambda raw: raw[:-1] + b"\x0b", "label 11 of image 49 is not one of 1 to 10"),
    "too few classes": ("class_names.txt", lambda raw: raw[:-7], "9 names, not 10"),
}


@pytest.mark.parametrize(("file", "harm", "reason"), HARM.values(), ids=HARM)
def test_damaged_stl10_files_are_refused(stl10: Path, file: str, harm, reason: str) -> None:
    path = stl10 / "stl10_binary" / file
    path.write_bytes(harm(path.read_bytes()))
    named = "train_X.bin" if "images, but" in reason else file
    with pytest.raises(InputError, match=f"{named}: {reason}; unpack the archive again"):
        load_dataset("stl10", "train", stl10)


def test_missing_stl10_files_are_named(stl10: Path, tmp_path: Path) -> None:
    layout = "stl10_binary with train_X.bin, train_y.bin, test_X.bin, test_y.bin, class_names.txt"
    with pytest.raises(InputError, match=f"stl10: say where it is .*: the folder that holds {layout}$"):
        load_dataset("stl10", "train")
    with pytest.raises(InputError, match=f"nowhere: stl10 is not there; looked for {layout}, in it or below it$"):
        load_dataset("stl10", "train", tmp_path / "nowhere")
    (stl10 / "stl10_binary" / "test_y.bin").unlink()
    with pytest.raises(InputError, match=f"stl10_binary: test_y.bin missing; stl10 needs {layout}$"):
        load_dataset("stl10", "train", stl10)


# ImageNet


@pytest.mark.parametrize("name", WNIDS)
def test_imagenet_sets_hold_their_classes_and_no_others(imagenet: Path, name: str) -> None:
    sets, wnids = parts(name, imagenet), tuple(WNIDS[name].split())
    everything, test = sets["train+val"], sets["test"]
    assert everything.classes == test.classes == wnids
    assert everything.images.shape == (4 * len(wnids), 224, 224, 3)
    assert [wnids[label] for label in everything.labels] == [image.split("/")[1] for image in everything.names]
    assert [wnids[label] for label in test.labels] == [image.split("/")[1] for image in test.names] == list(wnids)
    assert set(everything.names) == {f"train/{w}/{w}_{n}.JPEG" for w in wnids for n in (7, 9, 18, 100)}
    assert all(image.startswith("val/") for image in test.names)
    assert sets["train+test"].names == everything.names  # the paper's Train(+Test) is train only
    assert {*sets["train"].names, *sets["val"].names} == set(everything.names)
    n_train, n_val, _ = DATASETS[name].splits
    assert len(sets["val"]) == len(everything) * n_val // (n_train + n_val) > 0


def test_imagenet_pixels_are_those_of_the_folders(imagenet: Path) -> None:
    train = load_dataset("imagenet10", "train+val", imagenet)
    for wnid in (PENGUIN, "n07747607"):
        folder = ImageSet.from_folder(imagenet / "train" / wnid, side=224, channels=3, cache=False)
        rows = [train.rows()[f"train/{wnid}/{image}"] for image in folder.names]
        np.testing.assert_array_equal(train.images[rows], folder.images)


def test_an_image_of_the_right_size_keeps_its_pixels_whatever_its_format(imagenet: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(imagenet / "train" / PENGUIN / "n02056570_9.JPEG", "PNG")  # ImageNet has such a file
    train = load_dataset("imagenet10", "train+val", imagenet)
    np.testing.assert_array_equal(train.images[train.rows()["train/n02056570/n02056570_9.JPEG"]], pixels)


def test_imagenet_is_decoded_once_and_two_sets_keep_their_caches(imagenet: Path) -> None:
    decoded: list[int] = []
    wanted = [("imagenet10", "train"), ("imagenet-dogs", "train"), ("imagenet10", "test"), ("imagenet10", "val")]
    for _ in range(2):
        for name, split in wanted:
            load_dataset(name, split, imagenet, progress=lambda done, total: decoded.append(total if done == 0 else 0))
    assert [total for total in decoded if total] == [40, 60, 10]  # train and val are parts of one decoding
    assert isinstance(load_dataset("imagenet10", "train+val", imagenet).images.base, np.memmap)


def test_other_classes_and_the_other_part_are_not_touched(imagenet: Path) -> None:
    before = load_dataset("imagenet10", "test", imagenet).fingerprint()
    for place in ("val/n01440764", "val/n02086646", f"train/{PENGUIN}"):  # neither's, the other set's, the other part's
        (imagenet / place / "broken.JPEG").write_bytes(b"no picture")
    assert load_dataset("imagenet10", "test", imagenet).fingerprint() == before


def test_a_broken_image_is_named_not_skipped(imagenet: Path) -> None:
    (imagenet / "val" / SHARED / "ILSVRC2012_val_00000099.JPEG").write_bytes(b"no picture")
    for name, count in (("imagenet10", 11), ("imagenet-dogs", 16)):
        reason = f"00000099.JPEG: not a picture in a known format \\(1 of {count} images cannot be read\\); unpack"
        with pytest.raises(InputError, match=reason):
            load_dataset(name, "test", imagenet)


def test_a_missing_or_empty_class_folder_is_named(imagenet: Path) -> None:
    shutil.rmtree(imagenet / "train" / PENGUIN)
    with pytest.raises(InputError, match=rf"train: class folder {PENGUIN} missing; imagenet10 needs train/CLASS/"):
        load_dataset("imagenet10", "train", imagenet)
    assert len(load_dataset("imagenet-dogs", "train+val", imagenet)) == 60
    (imagenet / "train" / PENGUIN).mkdir()
    (imagenet / "train" / PENGUIN / "readme.txt").write_text("no image")
    with pytest.raises(InputError, match=rf"{PENGUIN}: no images in this class folder; unpack the archive again"):
        load_dataset("imagenet10", "train", imagenet)


@pytest.mark.parametrize("name", WNIDS)
def test_a_wrong_folder_says_which_layout_was_looked_for(name: str, tmp_path: Path) -> None:
    layout = rf"train/CLASS/\*\.JPEG and val/CLASS/\*\.JPEG, where CLASS is {', '.join(WNIDS[name].split())}"
    with pytest.raises(InputError, match=rf"^{name}: say where it is .*: the folder that holds {layout}$"):
        load_dataset(name, "train")
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match=rf"{wrong.name}: {name} is not there; looked for {layout}, in it or in"):
            load_dataset(name, "train", wrong)


def test_val_images_that_are_not_sorted_by_class_are_explained(imagenet: Path) -> None:
    shutil.rmtree(imagenet / "val")
    (imagenet / "val").mkdir()
    Image.new("RGB", (9, 9)).save(imagenet / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(InputError, match=r"val: no class folders there; .* has none: sort them by class$"):
        load_dataset("imagenet10", "test", imagenet)
    assert len(load_dataset("imagenet10", "train+val", imagenet)) == 40


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="'mnist' is not known; there are digits, cifar10"):
        load_dataset("mnist", "train")
    with pytest.raises(InputError, match="'all' is not known; there are train, val"):
        load_dataset("digits", "all")


def test_the_folder_above_train_and_val_is_asked_for(imagenet: Path) -> None:
    with pytest.raises(InputError, match=r"train: imagenet10 is not there; looked for train/CLASS"):
        load_dataset("imagenet10", "train+val", imagenet / "train")
