"""A search in a real PostgreSQL server: two workers, one of them killed, finish every point once."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from constraintmatch.models.cluster_model import build_model, save_model

BINARIES = [Path(shutil.which("postgres") or "").parent, *sorted(Path("/usr/lib/postgresql").glob("*/bin"))]
SERVER = next((folder for folder in BINARIES if (folder / "initdb").is_file()), None)
POINTS = ("0.1", "0.03", "0.01", "0.003")
# signs of life come sooner than for people
WORKER = "import sys; from constraintmatch.pipeline import trials; trials.BEAT, trials.GRACE, trials.LOOK = 1, 4, 0.5; "
WORKER += "from constraintmatch.cli import main; main()"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(SERVER is None, reason="needs a PostgreSQL server: apt install postgresql"),
]


@pytest.fixture
def database() -> Iterator[str]:
    """The URL of a server of its own, in a new folder; it does not run as root."""
    pytest.importorskip("psycopg2", reason="needs its driver: make test-cluster")
    assert SERVER is not None
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        owner: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            owner = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(folder, user.pw_uid, user.pw_gid)
        control = [SERVER / "pg_ctl", "-D", f"{folder}/data", "-w", "-l", f"{folder}/log"]
        how: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL, "cwd": "/", **owner}
        subprocess.run([SERVER / "initdb", "-D", f"{folder}/data", "-U", "me", "-A", "trust", "-N"], **how)
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        subprocess.run([*control, "-o", options, "start"], **how)
        try:
            yield f"postgresql://me@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **how)


def states(url: str) -> list[tuple[str, str]]:
    """The state and the learning rate of every trial, as the server has them; none before its tables are there."""
    import psycopg2

    link = psycopg2.connect(url)
    try:
        with link.cursor() as cursor:
            cursor.execute(
                "SELECT state::text, coalesce(param_value::text, '') FROM trials "
                "LEFT JOIN trial_params USING (trial_id) ORDER BY trials.trial_id"
            )
            return list(cursor.fetchall())
    except psycopg2.errors.UndefinedTable:
        return []
    finally:
        link.close()


def test_two_workers_share_a_search_and_one_that_is_killed_leaves_no_gap(database: str, tmp_path: Path) -> None:
    save_model(build_model(n_clusters=10, side=8, channels=1, backbone="tiny"), tmp_path / "model")
    words = ["search", "digits", "--model", tmp_path / "model", "--storage", database, "--constraints", "100"]
    words += ["--method", "constrained", "--grid", f"lr={','.join(POINTS)}", "--grid", "weight_decay=1e-4"]
    words += ["--steps", "60", "--device", "cpu"]
    command = [sys.executable, "-c", WORKER, *map(str, words)]
    with (tmp_path / "said").open("w") as said:
        first = subprocess.Popen(command, stderr=said)
        second = subprocess.Popen([*command, "--out", str(tmp_path / "best.json")], stderr=said)
        try:
            until = time.monotonic() + 300
            while sum(state == "RUNNING" for state, _ in states(database)) < 2:
                assert time.monotonic() < until
                assert first.poll() is None
                assert second.poll() is None
                time.sleep(0.05)
            first.send_signal(signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
            assert second.wait(300) == 0, (tmp_path / "said").read_text()
        finally:
            for worker in (first, second):
                worker.kill()
    found = states(database)
    complete = sorted(point for state, point in found if state == "COMPLETE")
    assert len(set(complete)) == len(POINTS)
    assert "FAIL" in {state for state, _ in found}  # the trial of the killed worker, which another took up
    assert (tmp_path / "best.json").exists()
