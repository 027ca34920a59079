"""The run folder: one run each, resumed only as it was asked for, and always saying how it ended."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch.training.run_folder import environment, open_run, read_log, write_result


def request(**changes: Any) -> dict[str, Any]:
    """A request as `method_run` makes it, with some entries changed: `data__source="/b"`."""
    made: dict[str, Any] = {
        "method": "constraintmatch",
        "arguments": {"max_entropy": 0.2},
        "settings": {"steps": 10, "seed": 0},
        "data": {
            "kind": "folder",
            "name": "birds",
            "source": "/a/birds",
            "side": 32,
            "start": {"model": "/a/model", "pretrained": False},
            "test": None,
            "images": 100,
            "fingerprint": "0123456789abcdef",
        },
        "model": {"weights": "fedcba", "backbone": "tiny"},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = made
        for parent in parents:
            place = place[parent]
        place[last] = value
    return made


def leave(path: Path, asked: Mapping[str, Any], error: BaseException | None = None) -> None:
    """A run that ended: well, or by this error."""
    with open_run(path, asked):
        if error is not None:
            raise error


def recorded(path: Path) -> dict[str, Any]:
    return dict(read_json(path / "run.json"))


# How a run ends


def test_a_run_says_that_it_runs_and_that_it_finished(tmp_path: Path) -> None:
    with open_run(tmp_path / "r", request()) as run:
        assert recorded(run.path)["status"] == "running"
        assert not run.finished
    record = recorded(tmp_path / "r")
    assert record["status"] == "finished"
    assert record["request"] == request()
    assert record["seconds"] >= 0
    assert record["started"] <= record["ended"]
    assert record["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("the disk melted"), "failed"), (KeyboardInterrupt("stopped"), "interrupted")]
)
def test_a_run_that_stops_says_why_and_the_error_goes_on(tmp_path: Path, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)) as caught:
        leave(tmp_path, request(), error)
    assert caught.value is error
    record = recorded(tmp_path)
    assert (record["status"], record["error"]) == (status, str(error))
    assert "ended" not in record


def test_a_run_that_is_refused_before_its_first_step_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="reach is 2"):
        leave(tmp_path / "runs" / "a", request(), InputError("reach is 2"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "note.txt").write_text("mine")
    with pytest.raises(InputError, match="reach is 2"):
        leave(tmp_path / "b", request(), InputError("reach is 2"))
    assert {path.name for path in (tmp_path / "b").glob("[!.]*")} == {"note.txt"}
    leave(tmp_path / "b", request(arguments__max_entropy=0.1))


def test_a_run_that_has_logged_something_stays_whatever_ends_it(tmp_path: Path) -> None:
    def end_in_the_middle() -> None:
        with open_run(tmp_path / "a", request()) as run:
            run.log({"step": 1, "kind": "training"})
            raise InputError("the disk is full")

    with pytest.raises(InputError, match="the disk is full"):
        end_in_the_middle()
    assert recorded(tmp_path / "a")["status"] == "failed"


def test_a_resumed_run_that_ends_well_forgets_its_error_and_adds_up_its_seconds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"):
        leave(tmp_path, request(), ValueError("no"))
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "seconds": 1_000.0}))
    with open_run(tmp_path, request(), resume=True):
        pass
    record = recorded(tmp_path)
    assert (record["status"], "error" in record) == ("finished", False)
    assert 1_000 <= record["seconds"] < 1_100


def test_why_a_run_failed_is_not_hidden_when_even_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise InputError("no space left")

    def fail_on_a_full_disk() -> None:
        with open_run(tmp_path, request()):
            monkeypatch.setattr("constraintmatch._internal.files.write_json", full)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_on_a_full_disk()


# Which runs go on


def test_a_folder_that_holds_a_run_is_refused_without_resume(tmp_path: Path) -> None:
    leave(tmp_path, request())
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(InputError, match="holds a run already; continue it with --resume"):
        leave(tmp_path, request())
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_finished_run_is_handed_out_as_it_is(tmp_path: Path) -> None:
    leave(tmp_path, request())
    before = (tmp_path / "run.json").read_bytes()
    with open_run(tmp_path, request(), resume=True) as run:
        assert run.finished
    assert (tmp_path / "run.json").read_bytes() == before


def test_requests_are_compared_as_json_keeps_them(tmp_path: Path) -> None:
    leave(tmp_path, request(arguments={"without": ("rotate",), "place": Path("x")}))
    with open_run(tmp_path, request(arguments={"without": ["rotate"], "place": "x"}), resume=True) as run:
        assert run.finished


def test_another_request_is_refused_and_its_entries_are_named(tmp_path: Path) -> None:
    leave(tmp_path, request())
    other = request(settings__steps=20, arguments={"max_entropy": 0.2, "pseudo_weight": 1.0})
    with (
        pytest.raises(InputError, match="cannot resume with another request") as caught,
        open_run(tmp_path, other, resume=True),
    ):
        pytest.fail("opened")
    assert "arguments.pseudo_weight was None, is 1.0; settings.steps was 10, is 20" in str(caught.value)
    assert recorded(tmp_path)["request"] == request()


MOVES = {
    "a folder": {"data__source": "/b/fowl", "data__name": "fowl"},
    "the first model": {"data__start__model": "/b/model"},
    "both": {"data__source": "/b/birds", "data__start__model": "/b/model"},
}


@pytest.mark.parametrize("status", ["finished", "failed"])
@pytest.mark.parametrize("move", MOVES)
def test_what_was_moved_is_known_by_its_fingerprint_and_its_new_place_is_noted(
    tmp_path: Path, move: str, status: str
) -> None:
    leave(tmp_path, request())
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**recorded(tmp_path), "status": status}))
    moved = request(**MOVES[move])
    with open_run(tmp_path, moved, resume=True) as run:
        assert run.finished == (status == "finished")
        assert recorded(tmp_path)["request"] == moved
    assert recorded(tmp_path)["status"] == "finished"


def test_a_data_set_may_lie_elsewhere_but_not_be_another(tmp_path: Path) -> None:
    same = {"kind": "dataset", "name": "cifar10", "source": "cifar10", "data_dir": "/a", "fingerprint": "01"}
    leave(tmp_path, request(data=same))
    with open_run(tmp_path, request(data=same | {"data_dir": "/b"}), resume=True) as run:
        assert run.finished
    # the 100 classes and the 20 superclasses have the same images
    with (
        pytest.raises(InputError, match=r"data\.name was 'cifar10', is 'other'"),
        open_run(tmp_path, request(data=same | {"name": "other"}), resume=True),
    ):
        pytest.fail("opened")


CHANGES = {
    r"data\.fingerprint was '0123456789abcdef', is 'ff'": {"data__fingerprint": "ff"},
    r"data\.source was '/a/birds', is '/b/birds'": {"data__source": "/b/birds", "data__fingerprint": "ff"},
    r"data\.start\.model was '/a/model', is '/b/model'": {"data__start__model": "/b/model", "model__weights": "ff"},
    r"data\.start\.model was '/a/model', is None": {"data__start__model": None},
    r"data\.side was 32, is 64": {"data__side": 64, "data__source": "/b/birds"},
    r"data\.test was None, is '/b/test'": {"data__test": "/b/test"},
    r"data\.kind was 'folder', is 'file'": {"data__kind": "file"},
}


@pytest.mark.parametrize("message", CHANGES)
def test_what_changed_is_not_taken_for_moved(tmp_path: Path, message: str) -> None:
    leave(tmp_path, request())
    with pytest.raises(InputError, match=message), open_run(tmp_path, request(**CHANGES[message]), resume=True):
        pytest.fail("opened")


def test_requests_without_fingerprints_must_be_equal_everywhere(tmp_path: Path) -> None:
    leave(tmp_path, {"data": {"source": "/a"}})
    with (
        pytest.raises(InputError, match=r"data\.source was '/a', is '/b'"),
        open_run(tmp_path, {"data": {"source": "/b"}}, resume=True),
    ):
        pytest.fail("opened")


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 99, "request": {}}', '{"format": 1}'])
def test_a_foreign_record_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError, match=r"run\.json: not a run of format 1"), open_run(tmp_path, {}, resume=True):
        pytest.fail("opened")


HOLD = """
import sys, time
from constraintmatch._internal.files import folder_lock  # the lock of a run, without the seconds that torch takes
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_that_another_process_holds_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"pid {holder.pid}"), open_run(tmp_path, {}, resume=True):
            pytest.fail("two processes hold the run")
        holder.kill()
    leave(tmp_path, {})  # free again
    assert recorded(tmp_path)["status"] == "finished"


# The log


def test_a_log_gives_its_entries_back_and_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    assert read_log(tmp_path) == []
    entries = [{"step": 1, "loss": 0.5}, {"step": 2, "text": "é"}]
    with open_run(tmp_path, {}) as run:
        for entry in entries:
            run.log(entry)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write('{"step": 3, "text": "é'.encode()[:-1])
    assert read_log(tmp_path) == entries


def test_a_cut_log_keeps_what_came_up_to_the_step(tmp_path: Path) -> None:
    with open_run(tmp_path, {}) as run:
        for step in (1, 2, 2, 3):
            run.log({"step": step})
        run.log({"remark": "of no step"})
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write('{"step": 4')
        run.cut_log(2)
        run.log({"step": 3, "again": True})
    kept = [{"step": 1}, {"step": 2}, {"step": 2}, {"remark": "of no step"}, {"step": 3, "again": True}]
    assert read_log(tmp_path) == kept


# What a result carries


def test_a_shared_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 4 << 30)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (135 << 30, 140 << 30))
    monkeypatch.delenv("CONSTRAINTMATCH_GPU_SHARED", raising=False)
    assert environment()["gpu"] == "NVIDIA H200"
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (131 << 30, 140 << 30))
    assert environment()["gpu"] == "NVIDIA H200, shared"
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (135 << 30, 140 << 30))
    monkeypatch.setenv("CONSTRAINTMATCH_GPU_SHARED", "1")
    assert environment()["gpu"] == "NVIDIA H200, shared"


def test_the_environment_tells_versions_hardware_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONSTRAINTMATCH_COMMIT", raising=False)
    found = environment()
    assert found.keys() == {"constraintmatch", "commit", "python", "torch", "platform", "cpu_threads", "gpu"}
    assert found["python"] == platform.python_version()
    assert found["cpu_threads"] == torch.get_num_threads()
    assert json.loads(json.dumps(found)) == found


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONSTRAINTMATCH_COMMIT", raising=False)
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not head:
        pytest.skip("not a checkout")
    assert head.startswith(str(environment()["commit"]).removesuffix("+"))
    assert len(str(environment()["commit"])) >= 12


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSTRAINTMATCH_COMMIT", "abc123")
    assert environment()["commit"] == "abc123"


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONSTRAINTMATCH_COMMIT", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    assert environment()["commit"] is None


def test_a_result_lies_beside_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSTRAINTMATCH_COMMIT", "abc123")
    write_result(tmp_path / "results" / "a.json", {"accuracy": 0.9, "place": Path("x")})
    result = read_json(tmp_path / "results" / "a.json")
    assert (result["accuracy"], result["place"]) == (0.9, "x")
    assert result["environment"] == environment()
    assert result["environment"]["commit"] == "abc123"
    assert result["written"].startswith("20")


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX locks")
def test_what_a_killed_run_left_is_removed_when_it_goes_on(tmp_path: Path) -> None:
    with open_run(tmp_path / "r", {"a": 1}) as run:
        run.model.mkdir()
        left = [run.path / ".checkpoint.safetensors.ab_12345.safetensors", run.model / ".config.json.12345678.json"]
        for path in left:
            path.touch()
    with open_run(tmp_path / "r", {"a": 1}, resume=True):
        assert not any(path.exists() for path in left)
