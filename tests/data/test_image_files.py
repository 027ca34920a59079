"""Shards: tar files and Parquet files serve as a folder does, and what is wrong with one is said in one line."""

import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from commands import run
from image_files import noise, save
from PIL import Image
from pyarrow import parquet

from constraintmatch._internal.errors import InputError
from constraintmatch.data.decoding import typical_size
from constraintmatch.data.image_set import load_images
from constraintmatch.models.cluster_model import build_model, save_model

PIXELS = noise(40, 16, 16, 3)


def encoded(row: int) -> bytes:
    """A picture as the bytes of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(PIXELS[row]).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return path


def write_parquet(path: Path, columns: Mapping[str, Any], note: object = None, rows: int = 7) -> Path:
    table = pa.table(dict(columns))
    if note is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps(note)})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=rows)
    return path


def named(rows: range) -> dict[str, bytes]:
    return {f"{row:05d}.png": encoded(row) for row in rows}


# Each kind of shard


def test_tar_shards_are_read_as_a_folder_of_their_files(tmp_path: Path) -> None:
    for number, rows in enumerate(PARTS):
        write_tar(tmp_path / "shards" / f"shard-{number:06d}.tar", {f"./{row:05d}.png": encoded(row) for row in rows})
    for row in range(40):
        save(tmp_path / "files" / f"{row:05d}.png", PIXELS[row])
    shards, files = load_images(tmp_path / "shards"), load_images(tmp_path / "files")
    np.testing.assert_array_equal(shards.images, files.images)
    assert shards.names == files.names
    assert shards.fingerprint() == files.fingerprint()
    assert isinstance(shards.images.base, np.memmap) or isinstance(shards.images, np.memmap)


PARTS = (range(15), range(15, 30), range(30, 40))


@pytest.mark.parametrize(("marks", "labels", "classes"), [("10", [1, 0], None), (("ox", "ant"), [1, 0], ("ant", "ox"))])
def test_a_tar_file_may_hold_labels(tmp_path: Path, marks: Any, labels: list[int], classes: Any) -> None:
    members = {"b.png": encoded(0), "b.cls": marks[0].encode(), "a.json": b"{}", "a.png": encoded(1)}
    images = load_images(write_tar(tmp_path / "a.tar", {**members, "a.cls": marks[1].encode() + b"\n"}))
    assert images.names == ("b.png", "a.png")
    assert images.labels is not None
    assert images.labels.tolist() == labels
    assert images.classes == classes
    assert load_images(tmp_path / "a.tar", class_folders=False).labels is None


def test_class_folders_in_a_tar_file_are_classes(tmp_path: Path) -> None:
    images = load_images(write_tar(tmp_path / "a.tar", {"cat/1.png": encoded(0), "dog/1.png": encoded(1)}))
    assert images.classes == ("cat", "dog")


@pytest.mark.parametrize("nested", [False, True])
def test_parquet_files_hold_images_as_bytes_or_as_hugging_face_writes_them(tmp_path: Path, nested: bool) -> None:
    contents = [encoded(row) for row in range(40)]
    paths = [f"photos/{row}.png" for row in range(40)]
    pictures = [{"bytes": content, "path": path} for content, path in zip(contents, paths, strict=True)]
    columns = {"image": pictures} if nested else {"name": paths, "jpg": contents}
    classes = {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}
    write_parquet(tmp_path / "a.parquet", {**columns, "label": [row % 2 for row in range(40)]}, classes)
    images = load_images(tmp_path / "a.parquet")
    np.testing.assert_array_equal(images.images, PIXELS)
    assert images.names == tuple(paths)
    assert images.classes == ("no", "yes")
    assert images.labels is not None
    assert images.labels.tolist() == [row % 2 for row in range(40)]
    assert typical_size(tmp_path / "a.parquet") == (16, 3)


def test_rows_without_names_are_numbered_and_labels_below_zero_are_none(tmp_path: Path) -> None:
    columns = {"image": [{"bytes": encoded(row), "path": None} for row in range(3)], "label": [-1, -1, -1]}
    images = load_images(write_parquet(tmp_path / "part-0.parquet", columns))
    assert images.names == ("part-0/00000000", "part-0/00000001", "part-0/00000002")
    assert images.labels is None
    images = load_images(write_parquet(tmp_path / "b" / "part-0.parquet", {"x": [encoded(0), encoded(1)]}))
    assert images.names == ("part-0/00000000", "part-0/00000001")


def test_a_changed_shard_is_decoded_again(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.png": encoded(0)})
    load_images(path)
    write_tar(path, {"a.png": encoded(1)})
    os.utime(path, ns=(1, 1))
    np.testing.assert_array_equal(load_images(path).images[0], PIXELS[1])


def test_a_broken_picture_in_a_shard_is_skipped_and_named(tmp_path: Path) -> None:
    members = {"a.png": encoded(0), "b.png": b"no picture", "c.png": encoded(2), "../d.png": encoded(3)}
    images = load_images(write_tar(tmp_path / "a.tar", members))
    assert images.names == ("a.png", "c.png")
    assert [skip.name for skip in images.skipped] == ["../d.png", "b.png"]


def test_commands_take_shards_and_sort_their_images_as_pictures(tmp_path: Path) -> None:
    write_tar(tmp_path / "shards" / "0.tar", named(range(5)))
    write_tar(tmp_path / "shards" / "1.tar", named(range(5, 40)))  # uneven
    save_model(build_model(n_clusters=3, side=16, backbone="tiny"), tmp_path / "model")
    out = ("--out", tmp_path / "clusters.csv", "--sort-into", tmp_path / "sorted")
    run("predict", tmp_path / "model", tmp_path / "shards", *out)
    assert len((tmp_path / "clusters.csv").read_text().splitlines()) == 41
    assert len(list((tmp_path / "sorted").rglob("*.png"))) == 40


# What is wrong


def torn(path: Path, keep: float) -> Path:
    write_tar(path, named(range(4)))
    with path.open("r+b") as file:
        file.truncate(int(keep))
    return path


@pytest.mark.parametrize("keep", [600, 1_700, 2 * 1_536, 100])
def test_a_torn_tar_is_one_line(tmp_path: Path, keep: int) -> None:
    with pytest.raises(InputError, match=r"a\.tar: is incomplete, or no plain tar file \(.*\); write it again$"):
        load_images(torn(tmp_path / "a.tar", keep))


def test_a_tar_with_a_damaged_middle_is_torn(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", named(range(4)))
    second = path.read_bytes().index(b"00001.png")
    with path.open("r+b") as file:
        file.seek(second)
        file.write(b"\xff" * 512)
    with pytest.raises(InputError, match="is incomplete, or no plain tar file"):
        load_images(path)


def test_a_parquet_file_without_images_names_its_columns(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"x": [1], "words": ["a"]})
    with pytest.raises(InputError, match=r"has no column of encoded images \(columns: x, words\); write the bytes"):
        load_images(path)


def test_a_torn_parquet_file_is_one_line(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"x": [encoded(row) for row in range(40)]})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read \(.*\); write it again$"):
        load_images(path)


def test_two_images_of_one_name_in_two_shards_name_both(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", named(range(3)))
    write_tar(tmp_path / "1.tar", named(range(2, 4)))
    with pytest.raises(InputError, match=r"the image '00002.png' is in 0.tar and in 1.tar; give each image a name of"):
        load_images(tmp_path)


def test_a_shard_without_images_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no images there"):
        load_images(write_tar(tmp_path / "a.tar", {"a.txt": b"text"}))


def test_decoding_into_memory_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", named(range(40)))
    monkeypatch.setattr("constraintmatch._internal.files._memory_left", lambda: 1_000.0)
    with pytest.raises(InputError, match=r"GiB of memory.*make room for the cache on the disk"):
        load_images(path, cache=False)
