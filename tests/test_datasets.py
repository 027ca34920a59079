"""Data sets: the rows agree with the paper; loaders read the published forms and nothing else."""

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from sklearn.datasets import load_digits

from constraintmatch.datasets import DATASETS, load_dataset
from constraintmatch.errors import InputError
from constraintmatch.images import ImageSet

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
    assert row.without <= OPERATIONS
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


@pytest.mark.parametrize("name", ["digits", "cifar10", "cifar100-20"])
def test_splits_part_the_images(name: str, request: pytest.FixtureRequest) -> None:
    folder = {"digits": None, "cifar10": "cifar10", "cifar100-20": "cifar100"}[name]
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
    with pytest.raises(InputError, match=r"cifar10: say where it lies .* cifar-10-batches-py with data_batch_1, "):
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


@pytest.mark.parametrize("name", ["stl10", "imagenet10", "imagenet-dogs"])
def test_sets_without_a_loader_say_so(name: str) -> None:
    with pytest.raises(InputError, match="give its images as a folder"):
        load_dataset(name, "train")


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="'mnist' is not known; there are digits, cifar10"):
        load_dataset("mnist", "train")
    with pytest.raises(InputError, match="'all' is not known; there are train, val"):
        load_dataset("digits", "all")


def test_torch_is_not_imported() -> None:
    code = "import sys, constraintmatch.datasets; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
