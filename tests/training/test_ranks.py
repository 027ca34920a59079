"""Several ranks train as one process would: the same losses for every method, one run folder, one line of an error."""

import functools
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods import METHODS, Context, safe_recipe
from constraintmatch.models.cluster_model import build_model, save_model
from constraintmatch.pipeline.config import make_config
from constraintmatch.pipeline.train import train
from constraintmatch.training import ranks
from constraintmatch.training.batches import Shuffled
from constraintmatch.training.loop import Interrupted, TrainSettings
from constraintmatch.training.run_folder import read_log
from tests.forks import Fork

pytestmark = pytest.mark.usefixtures("narrow_networks", "quick_heads_throughout")
CPU = torch.device("cpu")
# 25 images or 7 pairs a step: no number of ranks divides them
IMAGES: dict[str, Any] = {"images_per_step": 25}
PAIRS: dict[str, Any] = {"pairs_per_step": 7}
BOTH: dict[str, Any] = {**PAIRS, **IMAGES}
EPOCHS: dict[str, Any] = {**IMAGES, "epochs": 2}
NARROW: dict[str, Any] = {**EPOCHS, "hidden": 32, "projection": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "constrained": ("constrained", PAIRS),
    "pseudo_label": ("pseudo_label", {**BOTH, "min_confidence": 0.3}),
    "constraintmatch": ("constraintmatch", {**BOTH, "max_entropy": 1.0, "flip_fraction": 0.2}),
    "head first": ("constraintmatch", {**BOTH, "max_entropy": 0.99, "links": "hard", "head_steps": 2}),
    "safe recipe": ("constraintmatch", {**BOTH, "max_entropy": 1.0, "recipe": "safe"}),
    "fully_constrained": ("fully_constrained", IMAGES),
    "supervised": ("supervised", IMAGES),
    "simclr": ("simclr", EPOCHS),
    "byol": ("byol", NARROW),
    "propos": ("propos", {**NARROW, "n_clusters": 3, "warm_up": 0.0}),
    "cc": ("cc", {**EPOCHS, "n_clusters": 3}),
    "pica": ("pica", {**EPOCHS, "n_clusters": 3}),
    "mice": ("mice", {**EPOCHS, "n_clusters": 3}),
    "tcc": ("tcc", {**EPOCHS, "n_clusters": 3}),
    "scan": ("scan", {**EPOCHS, "n_clusters": 3}),
    "self_label": ("self_label", {**EPOCHS, "min_confidence": 0.34}),
    "neighbour_label": ("neighbour_label", EPOCHS),
}
SOME = ("constraintmatch", "simclr", "byol", "scan")  # pairs, all of a batch, a second network, neighbours


def labels_of(images: ImageSet) -> NDArray[np.int64]:
    assert images.labels is not None
    return images.labels


def losses_of(images: ImageSet, case: str) -> list[float]:
    """The loss of every step of a short training."""
    method, given = CASES[case]
    settings = TrainSettings(steps=4, lr=0.05, evaluate_every=2)
    if "epochs" in given:
        settings = inspect.signature(METHODS[method]).parameters["settings"].default
    if method in ("constrained", "pseudo_label", "constraintmatch"):
        given = {**given, "constraints": Constraints.sample(labels_of(images), 200, seed=0, balanced=True)}
    model = build_model(n_clusters=3, side=8, channels=1, seed=3)
    log = METHODS[method](model, images, **given, settings=replace(settings, log_every=1, device="cpu")).log
    return [entry["loss"] for entry in log if entry["kind"] == "training"]


def all_losses(images: ImageSet, cases: Sequence[str]) -> dict[str, list[float]]:
    return {case: losses_of(images, case) for case in cases}


def keep_run(images: ImageSet, out: Path, *, stop_at: int = 99, seeds: tuple[int, ...] = (0,), steps: int = 6) -> str:
    """A training in a run folder, which goes on where an earlier one stopped; the last rank may ask to stop."""
    rank = int(os.environ.get("RANK", "0"))
    asked = iter(range(1, steps + 1))
    stop = (lambda: next(asked) >= stop_at) if rank == len(seeds) - 1 else (lambda: False)
    options = {**BOTH, "steps": steps, "lr": 0.05, "ema": 0.5, "device": "cpu", "log_every": 1}
    options |= {"checkpoint_every": 3, "seed": seeds[rank]}
    config = make_config("constraintmatch", options, start=build_model(n_clusters=3, side=8, channels=1, seed=3))
    pairs = Constraints.sample(labels_of(images), 100, seed=0)
    try:
        trained = train(images, pairs, config, Context(out, resume=(out / "run.json").exists(), stop=stop))
    except Interrupted as stopped:
        return str(stopped)
    return str(trained.log[-1]["kind"])


def run_rank(rank: int, size: int, port: int, call: Callable[[], Any]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under torchrun: the store is with the one who started them
    try:
        with ranks.started(CPU), ranks.together():
            print(json.dumps(call()), flush=True)
    except InputError as error:
        print(json.dumps(f"error: {error}"), flush=True)
    except SystemExit:
        print(json.dumps("silent"), flush=True)


def start_ranks(stack: ExitStack, size: int, call: Callable[..., Any], *given: Any, **named: Any) -> list[Fork]:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        port = held.getsockname()[1]
    work = functools.partial(call, *given, **named)
    forks = [stack.enter_context(Fork(run_rank, rank, size, port, work)) for rank in range(size)]
    stack.callback(
        lambda _: None, torch.distributed.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    )
    return forks


def as_ranks(size: int, call: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
    """What the call gives on each rank."""
    with ExitStack() as stack:
        forks = start_ranks(stack, size, call, *given, **named)
        found = [json.loads(fork.out.readline()) for fork in forks]
        assert [fork.wait() for fork in forks] == [0] * size
    return found


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first)


def test_every_method_with_steps_is_compared() -> None:
    assert {method for method, _ in CASES.values()} == METHODS.keys() - {"linear_scan", "propagate"}


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, SOME), *(pytest.param(size, tuple(CASES), marks=pytest.mark.ranks, id=f"{size}-all") for size in (2, 4))],
)
def test_ranks_have_the_losses_of_one_process(
    stripes: ImageSet, size: int, cases: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_recipe, "FOR_A_NETWORK", 8)  # few images hold out few
    alone = all_losses(stripes, cases)
    for found in as_ranks(size, all_losses, stripes, cases):
        for case, losses in alone.items():
            assert len(losses) == len(set(losses)) == 4, case
            assert np.allclose(found[case], losses, atol=1e-5, rtol=0), case


@pytest.mark.ranks
def test_a_run_goes_on_with_another_number_of_ranks(stripes: ImageSet, tmp_path: Path) -> None:
    whole, fewer, more = (tmp_path / name for name in ("whole", "fewer", "more"))
    keep_run(stripes, whole)
    said = as_ranks(3, keep_run, stripes, fewer, stop_at=4, seeds=(0, 0, 0))
    assert said == ["stopped after step 4 of 6"] * 3  # one rank asked for it
    assert keep_run(stripes, fewer) == "evaluation"
    assert keep_run(stripes, more, stop_at=2) == "stopped after step 2 of 6"
    assert as_ranks(2, keep_run, stripes, more, seeds=(0, 0)) == ["evaluation"] * 2
    for other in (fewer, more):
        assert largest_difference(whole, other) < 1e-5
        steps = [[entry["step"] for entry in read_log(run)] for run in (whole, other)]
        assert steps[0] == steps[1]
    assert as_ranks(2, keep_run, stripes, more, seeds=(0, 0)) == ["evaluation"] * 2  # a finished run is only loaded


def test_a_killed_rank_ends_the_others_at_once(stripes: ImageSet, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ExitStack() as stack:
        forks = start_ranks(stack, 3, keep_run, stripes, out, seeds=(0, 0, 0), steps=2_000)
        wait_for(lambda: len(read_log(out)) > 3)
        forks[2].send(signal.SIGKILL)
        killed = time.monotonic()
        said = [json.loads(fork.out.readline()) for fork in forks[:2]]
        assert time.monotonic() - killed < 20
    one, other = sorted(said)
    assert one.startswith("error: rank ")
    assert one.endswith(": another rank has ended; run the same command again (train: with --resume)")
    assert other == "silent"
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "failed"
    assert "another rank has ended" in record["error"]


def test_ranks_that_are_asked_for_different_things_say_so_once(stripes: ImageSet, tmp_path: Path) -> None:
    said = as_ranks(2, keep_run, stripes, tmp_path / "run", seeds=(0, 1))
    fix = "give every rank the same command, images and versions"
    assert sorted(said) == [f"error: rank 1: settings.seed is 1, on rank 0 0; {fix}", "silent"]
    assert not (tmp_path / "run").exists()


def test_ranks_with_different_images_say_so_once(stripes: ImageSet, tmp_path: Path) -> None:
    said = as_ranks(2, keep_uneven_run, stripes, tmp_path / "run")
    assert sorted(said)[0].startswith("error: rank 1: data.images is 50, on rank 0 60; give every rank the same")
    assert sorted(said)[1] == "silent"


def keep_uneven_run(images: ImageSet, out: Path) -> str:
    return keep_run(images.take(np.arange(60 - 10 * (os.environ["RANK"] == "1"))), out, seeds=(0, 0))


def test_a_full_disk_is_said_once_and_the_run_goes_on(stripes: ImageSet, tmp_path: Path) -> None:
    out = tmp_path / "run"
    one, other = sorted(as_ranks(2, keep_large_run, stripes, out))
    assert one == f"error: {out / 'checkpoint.safetensors'}: the file is too large for this disk; choose another place"
    assert other == "silent"
    assert as_ranks(2, keep_run, stripes, out, seeds=(0, 0)) == ["evaluation"] * 2


def keep_large_run(images: ImageSet, out: Path) -> str:
    """A training of which rank 0 can write the log and not the checkpoint."""
    if ranks.first():
        resource = pytest.importorskip("resource")
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return keep_run(images, out, seeds=(0, 0))


def test_a_rank_without_images_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "world", lambda: 4)
    with pytest.raises(InputError, match="3 images or pairs a step for 4 ranks: some have none; start fewer ranks"):
        Shuffled(60, 3, 0)


@pytest.mark.ranks
def test_ranks_that_do_not_find_each_other_say_where_they_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("localhost", 0))  # nobody listens there
        port = held.getsockname()[1]
        found = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(ranks, "FOUND", ranks.FOUND / 60)
        with pytest.raises(InputError, match=f"localhost:{port}: the ranks do not find each other"), ranks.started(CPU):
            pass


def test_ranks_that_are_started_again_do_not_read_what_those_before_have_written() -> None:
    store = torch.distributed.HashStore()
    store.set("rank 0", "of a rank that was killed before it read another's name")
    with ThreadPoolExecutor(3) as pool:
        for start in ("first", "second"):
            parts = list(pool.map(lambda rank: ranks.separate_start(store, rank, 3), range(3)))
            assert not parts[2].check(["address"])
            parts[0].set("address", start)
            assert [part.get("address").decode() for part in parts] == [start] * 3


def test_a_full_gpu_is_one_line() -> None:
    with pytest.raises(InputError, match="the memory of the GPU is full; lower images_per_step"), ranks.clear_errors():
        raise torch.OutOfMemoryError("CUDA out of memory")


def wait_for(ready: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


# The command line


@pytest.fixture(scope="module")
def command(stripes: ImageSet, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What trains a head on embeddings for 300 steps."""
    place = tmp_path_factory.mktemp("stripes")
    np.save(place / "embeddings.npy", stripes.images.reshape(len(stripes), -1).astype(np.float32))
    Constraints.sample(labels_of(stripes), 100, seed=0).write(place / "pairs.csv")
    save_model(build_model(n_clusters=3, side=1, channels=64, seed=3), place / "model")
    named = ["--pairs", str(place / "pairs.csv"), "--model", str(place / "model"), "--device", "cpu"]
    often = ["--set", "checkpoint_every=5", "--set", "log_every=1", "--steps", "300", "--recipe", "paper"]
    return ["train", str(place / "embeddings.npy"), *named, *often]


def begin(*arguments: str | Path, mark: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "CONSTRAINTMATCH_TEST": mark, "OMP_NUM_THREADS": "1"}
    given = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.Popen(given, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    wait_for(lambda: (out / "checkpoint.safetensors").exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]


def kill_rank_one(mark: str) -> None:
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"RANK=1" in words and f"CONSTRAINTMATCH_TEST={mark}".encode() in words:
            os.kill(int(place.parent.name), signal.SIGKILL)
            return
    raise AssertionError("rank 1 does not run")


@pytest.mark.ranks
def test_gpus_starts_ranks_and_says_in_one_line_that_one_was_killed(command: list[str], tmp_path: Path) -> None:
    mark, out = uuid.uuid4().hex, tmp_path / "run"
    with begin("constraintmatch", *command, "--out", out, "--gpus", "2", mark=mark) as process:
        wait_for_checkpoint(process, out)
        kill_rank_one(mark)
        killed = time.monotonic()
        said = process.communicate(timeout=60)[1]
    assert time.monotonic() - killed < 20
    assert process.returncode == 1
    assert (
        said.splitlines()[-1] == "error: rank 1 was ended by SIGKILL; run the same command again (train: with --resume)"
    )
    assert said.count("error") == 1
    with begin("constraintmatch", *command, "--out", out, "--resume") as process:
        assert "report.html" in process.communicate(timeout=120)[0]
    assert [entry["step"] for entry in read_log(out) if entry["kind"] == "training"] == list(range(1, 301))


@pytest.mark.ranks
def test_torchrun_starts_a_killed_run_again_and_it_ends_the_same(command: list[str], tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    mark, killed, whole = uuid.uuid4().hex, tmp_path / "killed", tmp_path / "whole"
    with begin(*launcher, "-m", "constraintmatch", *command, "--out", killed, mark=mark) as process:
        wait_for_checkpoint(process, killed)
        kill_rank_one(mark)
        assert "report.html" in process.communicate(timeout=240)[0]
    with begin(*launcher, "-m", "constraintmatch", *command, "--out", whole) as process:
        assert "report.html" in process.communicate(timeout=120)[0]
    assert largest_difference(killed, whole) == 0


@pytest.mark.ranks
def test_a_signal_stops_all_ranks_with_a_checkpoint(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with begin("constraintmatch", *command, "--out", out, "--gpus", "2") as process:
        wait_for_checkpoint(process, out)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("stopped after step ")
    assert said.count("stopped") == 1
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.ranks
def test_an_error_of_all_ranks_is_said_once(command: list[str], tmp_path: Path) -> None:
    with begin("constraintmatch", *command, "--out", tmp_path / "run", "--gpus", "2", "--lr", "1e38") as process:
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert said.count("error") == 1
    assert "is not finite" in said.splitlines()[-1]
    with begin("constraintmatch", *command, "--out", tmp_path / "run", "--gpus", "0") as process:
        assert process.communicate(timeout=120)[1] == "error: --gpus 0: ask for 1 or more\n"
