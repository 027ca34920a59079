"""Embedding and predicting on Ray: every image once, whatever dies; parts that are there are not made again."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from commands import run
from image_files import noise, save
from pyarrow import parquet

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_files import find_images
from constraintmatch.data.image_set import load_images
from constraintmatch.evaluation.metrics import embed, predict
from constraintmatch.models.cluster_model import build_model, save_model
from constraintmatch.pipeline import cluster
from constraintmatch.pipeline.cluster import do_part, run_on_cluster

MODEL = build_model(n_clusters=3, side=16, backbone="tiny")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Sixty images, one of them broken, and a model beside them."""
    for row in range(60):
        save(tmp_path / "photos" / f"{row:03d}.png", noise(16, 16, 3, seed=row))
    (tmp_path / "photos" / "007.png").write_bytes(b"no picture")
    save_model(MODEL, tmp_path / "model")
    return tmp_path / "photos"


def test_a_part_has_a_row_for_each_image_as_one_process_predicts(photos: Path, tmp_path: Path) -> None:
    save_model(MODEL, tmp_path / "out" / "_job" / "model")
    files = find_images(photos)[0][:20]
    do_part("predict", photos, False, "cpu", tmp_path / "out" / "part-000000.parquet", files)
    table = parquet.read_table(tmp_path / "out").to_pydict()
    assert table["name"] == [file.name for file in files]
    assert [name for name, problem in zip(table["name"], table["problem"], strict=True) if problem] == ["007.png"]
    images = load_images(photos)
    expected = predict(MODEL, images.take(np.arange(19)))
    assert [cluster for cluster in table["cluster"] if cluster is not None] == expected.clusters.tolist()
    assert table["cluster"][7] is None


def test_embeddings_in_parquet_files_serve_in_the_place_of_images(photos: Path, tmp_path: Path) -> None:
    save_model(MODEL, tmp_path / "out" / "_job" / "model")
    files = [
        file._replace(label="even" if number % 2 == 0 else "odd") for number, file in enumerate(find_images(photos)[0])
    ]
    for start in (0, 30):
        do_part("embed", photos, True, "cpu", tmp_path / "out" / f"part-{start:06d}.parquet", files[start : start + 30])
    found, images = load_images(tmp_path / "out"), load_images(photos)
    assert found.embedded
    assert found.names == images.names
    assert found.classes == ("even", "odd")
    np.testing.assert_allclose(found.images[:, 0, 0], embed(MODEL, images), atol=1e-5)
    with pytest.raises(InputError, match="not images of 16 px"):
        load_images(tmp_path / "out", side=16)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engine", "spark"), "--engine spark is not known"),
        (("--engine", "ray", "--out", "x.csv"), "give --out a name without a suffix"),
        (("--engine", "ray", "--sort-into", "y"), "--sort-into does not go with --engine ray"),
        (("--engine", "ray", "--out", "x"), "needs Ray; install it: pip install 'constraintmatch[cluster]'"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    before = sorted(tmp_path.iterdir())
    assert said in run("predict", "model", photos, *words, code=2).stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_of_another_job_is_refused(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is left out: what is noted before it starts decides."""
    monkeypatch.setattr(cluster, "_load_ray", lambda: None)
    monkeypatch.setattr(cluster, "_work", lambda *_: None)
    out = tmp_path / "out"
    assert run_on_cluster("predict", str(tmp_path / "model"), photos, out) == 60
    assert run_on_cluster("predict", str(tmp_path / "model"), photos, out) == 60
    with pytest.raises(InputError, match=r"holds another job \(kind was predict, is embed\); choose another --out"):
        run_on_cluster("embed", str(tmp_path / "model"), photos, out)
    save(photos / "060.png", noise(16, 16, 3))
    with pytest.raises(InputError, match=r"another job \(images was 60, is 61"):
        run_on_cluster("predict", str(tmp_path / "model"), photos, out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        run_on_cluster("predict", str(tmp_path / "model"), photos, tmp_path / "other")


# A real cluster


def workers() -> list[int]:
    """The processes that are at a part: Ray names them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::do_part"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_and_a_killed_machine_lose_nothing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three machines of one core each, as Ray has them in tests; a worker is killed, then the machine of another."""
    pytest.importorskip("ray", reason="needs Ray: make test-cluster")
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(cluster, "PART", 2)
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}  # a machine that is gone shows sooner
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": quick}
    machines = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", machines.address)
    killed: list[object] = []

    def kill() -> None:
        while not workers() or len(list((tmp_path / "out").glob("part-*"))) < 2:
            time.sleep(0.01)
        while not killed:
            for worker in workers()[:1]:
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
        machines.remove_node(last, allow_graceful=False)
        killed.append(last)

    try:
        machines.add_node(num_cpus=1)
        last = machines.add_node(num_cpus=1)
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        done = run_on_cluster("embed", str(tmp_path / "model"), photos, tmp_path / "out", device="cpu")
        killer.join(30)
    finally:
        machines.shutdown()
    assert done == 60
    assert len(killed) == 2
    table = parquet.read_table(tmp_path / "out").to_pydict()
    assert sorted(table["name"]) == [f"{row:03d}.png" for row in range(60)]
    images = load_images(photos)
    made = {name: row for name, row in zip(table["name"], table["embedding"], strict=True) if row is not None}
    expected = dict(zip(images.names, embed(MODEL, images), strict=True))
    assert made.keys() == expected.keys()
    assert all(np.allclose(made[name], expected[name], atol=1e-5) for name in made)


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")
def test_one_machine_without_a_cluster_goes_on_after_a_stop(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs Ray: make test-cluster")
    monkeypatch.setattr(cluster, "PART", 16)
    out = tmp_path / "out"
    run("predict", tmp_path / "model", photos, "--engine", "ray", "--out", out, "--device", "cpu")
    first = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert len(first) == 4
    (out / "part-000002.parquet").unlink()
    (out / ".part-000001.parquet.half").write_bytes(b"of a killed worker")
    run("predict", tmp_path / "model", photos, "--engine", "ray", "--out", out, "--device", "cpu")
    again = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert {name for name in again if again[name] != first[name]} == {"part-000002.parquet"}
    assert parquet.read_table(out).num_rows == 60
