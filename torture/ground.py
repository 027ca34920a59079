"""The ground of the torture test: small inputs of every kind, commands in processes of their own, and their judgement.

The libraries are loaded once; each command runs in a fork of this process, which may be limited, killed or signalled.
"""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from constraintmatch.cli import main as program

__all__ = ["BASE", "Ended", "Row", "act", "commands", "files_of", "fork", "limit", "load", "make", "on_disk", "wait"]

CPU = 25.0  # seconds that a command may take before it is told to stop
PATIENCE = 2.0  # seconds of CPU time within which a stop must end it


def _sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


BASE: dict[str, list[str]] = {  # a valid call of each command, without where its results go
    "train": [
        *("photos", "--pairs", "pairs.csv", "--model", "model", "--steps", "6", "--recipe", "paper"),
        *_sets("images_per_step=8", "pairs_per_step=8", "checkpoint_every=2", "evaluate_every=2"),
    ],
    "pretrain": [
        *("photos", "--clusters", "3", "--stages", "simclr,linear_scan"),
        *_sets("side=8", "simclr.epochs=2", "simclr.images_per_step=8", "linear_scan.n_tries=2", "checkpoint_every=1"),
    ],
    "loop": [
        *("photos", "--model", "model", "--oracle", "labels", "--questions", "6"),
        *_sets("every=3", "steps=2"),
    ],
    "predict": ["model", "photos", "--sort-into", "sorted", "--copy"],
    "embed": ["model", "photos"],
    "evaluate": ["model", "photos", "--pairs", "pairs.csv"],
    "compare": [
        *("set.npz", "--pairs", "rows.csv", "--clusters", "3", "--model", "flat"),
        *("--methods", "k_means,start"),
    ],
    "export": ["model"],
    "sample": ["photos", "--n", "20"],
    "check": ["pairs.csv", "photos"],
    "report": ["run"],
    "join": ["model", "model", "photos"],
    "import-scan": ["scan.pt", "cifar10"],
    "annotate": ["photos", "--db", "answers.db", "--import", "more.csv"],
    "repair": ["answers.db"],
    "demo": [],
}
_OUT = {
    "predict": "out.csv",
    "embed": "out.npz",
    "evaluate": "out.json",
    "sample": "out.csv",
    "repair": "out.db",
    "export": "out.pt2",
}
_ON_CPU = ("train", "pretrain", "loop", "predict", "embed", "evaluate")


@dataclass
class Row:
    """One line of the table: what was tried, and how each try ended."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, how: str, what: str = "") -> None:
        """Count a try: `refused`, `survived` or `failed`, the last with what happened."""
        self.counts["tried"] += 1
        self.counts[how] += 1
        if how == "failed":
            self.failures.append(what[:1500])
            print(f"FAILED {self.name}: {what[:1500]}", file=sys.stderr, flush=True)


@dataclass
class Ended:
    """How a command ended; `late` is the CPU time that it took after it was told to stop, where it was told."""

    code: int
    said: str
    late: float | None = None

    @property
    def clear(self) -> bool:
        """Whether it says in one line what is wrong."""
        return "Traceback" not in self.said and sum(line.startswith("error: ") for line in self.said.splitlines()) == 1


def commands(name: str, *more: str, out: str | None = None) -> list[str]:
    """The valid call of a command, with further words."""
    place = out or _OUT.get(name, "out")
    flag = {"evaluate": "--json", "check": None, "report": None, "annotate": None}.get(name, "--out")
    device = ["--device", "cpu"] if name in _ON_CPU else []
    return [name, *BASE[name], *device, *([flag, place] if flag else []), *more]


# What the commands read


def make(place: Path) -> None:
    """Inputs of every kind below a folder."""
    import pyarrow.csv
    import pyarrow.parquet
    import torch

    from constraintmatch.models.cluster_model import build_model, save_model

    random = np.random.Generator(np.random.Philox(0))
    grid = np.indices((16, 16)) // 2
    names = []
    for row in range(24):
        kind = "abc"[row % 3]
        pattern = [grid[0] % 2, grid[1] % 2, (grid[0] + grid[1]) % 2][row % 3] * 160 + 40
        noise = random.integers(-20, 21, (16, 16, 3))
        names.append(f"{kind}/{row:02d}.png")
        (place / "photos" / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray((pattern[..., None] + noise).astype(np.uint8)).save(place / "photos" / names[-1])
    several = [(a, b) for a, b in random.integers(0, 24, (60, 2)).tolist() if a != b]
    for file, some in (("pairs.csv", several[:40]), ("more.csv", several[40:])):
        lines = [f"{names[a]},{names[b]},{int(names[a][0] == names[b][0])}" for a, b in some]
        (place / file).write_text("\n".join(["left,right,link", *lines]) + "\n")
    lines = [f"{a},{b},{int(a % 3 == b % 3)}" for a, b in several]
    (place / "rows.csv").write_text("\n".join(["left,right,link", *lines]) + "\n")
    encoded = [(place / "photos" / name).read_bytes() for name in names]
    pyarrow.parquet.write_table(
        pyarrow.table({"image": encoded, "label": [row % 3 for row in range(24)]}), place / "images.parquet"
    )
    (place / "shards").mkdir()
    with tarfile.open(place / "shards" / "0.tar", "w") as tar:
        for name in names:
            tar.add(place / "photos" / name, name.replace("/", "-"))
    table = pyarrow.csv.read_csv(place / "pairs.csv")
    pyarrow.parquet.write_table(table, place / "pairs.parquet")
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    data = {"left": names[0], "right": names[3]}
    said = {"type": "choices", "value": {"choices": ["same"]}}
    (place / "export.json").write_text(json.dumps([{"id": 1, "data": data, "annotations": [{"result": [said]}]}]))
    np.savez(place / "set.npz", embeddings=random.normal(size=(24, 8)).astype(np.float32), names=names)
    np.save(place / "set.npy", random.normal(size=(24, 8)).astype(np.float32))
    save_model(build_model(n_clusters=3, side=8, channels=3, backbone="tiny"), place / "model")
    save_model(build_model(n_clusters=3, side=1, channels=8), place / "flat")
    torch.save({"state_dict": {"module.backbone.conv1.weight": torch.zeros(64, 3, 3, 3)}}, place / "scan.pt")
    for words in (["annotate", "photos", "--db", "answers.db", "--import", "pairs.csv"], commands("train", out="run")):
        ended = act(words, place)
        assert ended.code == 0, ended.said


def files_of(place: Path) -> dict[str, str]:
    """The files below a folder by relative path, with their content, but for locks and what SQLite keeps beside."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_file() and not path.name.endswith((".lock", "-wal", "-shm")) and ".db.lock" not in name:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


# Processes


def load() -> None:
    """Load what the commands would load by and by, with one thread, so that a fork is safe and begins at once."""
    import matplotlib.pyplot
    import pydantic
    import sklearn.cluster
    import sklearn.linear_model
    import timm
    import torch
    import torch._dynamo
    import torchvision

    assert all((matplotlib, pydantic, sklearn, timm, torchvision))
    torch.set_num_threads(1)


def fork(words: Sequence[str], cwd: Path, log: Path, before: Callable[[], object] | None = None) -> int:
    """Begin a command in a process of its own, which calls `before` first; its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        os.chdir(cwd)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["constraintmatch", *words]
        if before is not None:
            before()
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(number: int, log: Path, *, stop_at: float = CPU, kind: int = signal.SIGTERM) -> Ended:
    """How a process ends; after `stop_at` seconds of CPU time it is told to."""
    told: float | None = None
    since, taken = time.monotonic(), 0.0
    while True:
        done, status, used = os.wait4(number, os.WNOHANG)
        if done:
            taken = used.ru_utime + used.ru_stime
            break
        try:
            entries = Path(f"/proc/{number}/stat").read_text().rsplit(") ", 1)[1].split()
            taken = (int(entries[11]) + int(entries[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError):
            pass
        if told is None and (taken > stop_at or time.monotonic() - since > 20 * CPU):
            told = taken
            os.kill(number, kind)
        elif told is not None and (taken - told > 4 * PATIENCE or time.monotonic() - since > 25 * CPU):
            os.kill(number, signal.SIGKILL)
        time.sleep(0.01)
    text = log.read_text(errors="replace") if log.exists() else ""
    return Ended(os.waitstatus_to_exitcode(status), text, None if told is None else taken - told)


def act(words: Sequence[str], cwd: Path, before: Callable[[], object] | None = None, **how: Any) -> Ended:
    """A command to its end."""
    log = cwd.with_name(f"{cwd.name}.log")
    log.unlink(missing_ok=True)
    return wait(fork(words, cwd, log, before), log, **how)


@contextmanager
def on_disk(place: Path, options: str):  # type: ignore[no-untyped-def]
    """A disk of its own at a place (`size=64k`, `ro`); False where this user cannot mount one."""
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, check=False
    )
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(place)], check=False)
        shutil.rmtree(place, ignore_errors=True)


def limit(kind: int, more: int) -> Callable[[], None]:
    """Sets a limit in a fork: memory beyond what it has, or another resource."""

    def set_it() -> None:
        most = more
        if kind == resource.RLIMIT_AS:
            most += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(kind, (most, most))

    return set_it
