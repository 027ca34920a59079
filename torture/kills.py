"""Kills and stops: at the n-th file operation, at any moment, by signals, and of a server that four people use."""

import http.client
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from ground import PATIENCE, Ended, Row, act, commands, files_of, fork, wait
from safetensors.numpy import load_file

from constraintmatch.annotate.store import open_store
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import Question

__all__ = ["kill_at_file_operations", "kill_the_server", "stop_by_signals"]

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "sqlite3.connect"}
RESUMED = {"train": ["--resume"]}
RESULTS = {  # what must be the same after a kill
    "train": ["out/model/model.safetensors", "out/clusters.csv"],
    "pretrain": ["out/model/model.safetensors"],
    "loop": ["out/model/model.safetensors", "out/clusters.csv"],
    "annotate": ["pairs"],
}


def kill_at_file_operations(ground: Path, work: Path, draw: random.Random, n_kills: int) -> list[Row]:
    """Commands killed before each of some file operations, or at any moment, and run again."""
    rows = []
    for name in RESULTS:
        row = Row(f"killed: {name}")
        whole = fresh(ground, work)
        log = work.with_name("operations")
        ended = act(commands(name), whole, partial(count_operations, whole, note=log))
        assert ended.code == 0, ended.said
        n = int(log.read_text())
        expected = results(name, whole)
        moments = sorted(draw.sample(range(1, n + 1), min(n_kills, n)))
        for at in moments:
            place = fresh(ground, work)
            first = act(commands(name), place, partial(count_operations, place, kill_at=at))
            if first.code not in (0, -signal.SIGKILL):
                row.add("failed", f"{name} before operation {at}: ended with {first.code}: {first.said[-400:]}")
                continue
            judge(row, name, place, expected, f"killed before operation {at} of {n}")
        rows.append(row)
    return rows


def judge(row: Row, name: str, place: Path, expected: dict[str, Any], what: str) -> None:
    """Run a command again, and compare what it leaves with what an undisturbed one leaves."""
    begun = (place / "out" / "run.json").exists() or (place / "out" / "start").exists()
    again = act(commands(name, *(RESUMED.get(name, []) if begun else [])), place)
    found = results(name, place) if again.code == 0 else {}
    odd = [key for key in expected if expected[key] != found.get(key)]
    left = [path for path in files_of(place) if Path(path).name.startswith(".")] if again.code == 0 else []
    if again.code or odd or left:
        row.add("failed", f"{name} {what}: code {again.code}, differs in {odd}, left {left}: {again.said[-600:]}")
    else:
        row.add("survived")


def results(name: str, place: Path) -> dict[str, Any]:
    """What a command is for: weights number by number, clusters, the answers as pairs."""
    if name == "annotate":
        ended = act(["annotate", "photos", "--db", "answers.db", "--export", "exported.csv"], place)
        lines = (place / "exported.csv").read_text().splitlines() if ended.code == 0 else [ended.said]
        return {"pairs": sorted(line.rsplit(",", 1)[0] for line in lines)}  # without the time
    found: dict[str, Any] = {}
    for file in RESULTS[name]:
        path = place / file
        if path.suffix == ".safetensors":
            found |= {key: value.tobytes() for key, value in load_file(path).items()} if path.exists() else {}
        else:
            found[file] = path.read_bytes() if path.exists() else None
    return found


def count_operations(place: Path, kill_at: int = 0, note: Path | None = None) -> None:
    """Count the operations on files below a place; kill this process before one of them, or note their number."""
    inside, done = str(place), [0]

    def hook(event: str, words: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or not words or isinstance(words[0], int):
            return
        path = os.path.abspath(os.fsdecode(words[0]))  # noqa: PTH100
        writes = event != "open" or (len(words) > 2 and isinstance(words[2], int) and words[2] & 3)
        if not writes or not path.startswith(inside):
            return
        done[0] += 1
        if done[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if note is not None:
            handle = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(handle, str(done[0]).encode())
            os.close(handle)

    sys.addaudithook(hook)


def fresh(ground: Path, work: Path) -> Path:
    """A new copy of the inputs, always at the same place: records hold paths."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(ground, work)
    return work


# Signals


def stop_by_signals(ground: Path, work: Path, draw: random.Random, n_stops: int) -> Row:
    """SIGINT and SIGTERM at any moment end a command within two seconds of CPU time; then it goes on to the same."""
    row = Row("stopped by a signal")
    for name in ("train", "pretrain", "loop"):
        whole = fresh(ground, work)
        began = time.process_time() + sum(os.times()[2:4])
        assert act(commands(name), whole).code == 0
        long = time.process_time() + sum(os.times()[2:4]) - began
        expected = results(name, whole)
        for _ in range(n_stops):
            place, kind = fresh(ground, work), draw.choice([signal.SIGINT, signal.SIGTERM])
            ended = act(commands(name), place, stop_at=draw.uniform(0.0, long), kind=kind)
            quick = ended.late is None or ended.late <= PATIENCE
            if not quick or ended.code not in (0, 130) or "Traceback" in ended.said:
                said = f"{name}: code {ended.code}, {ended.late} s of CPU after {kind.name}: {ended.said[-600:]}"
                row.add("failed", said)
            elif ended.code == 130:
                judge(row, name, place, expected, f"stopped by {kind.name}")
            else:
                row.add("survived")
    return row


# The server


def kill_the_server(ground: Path, work: Path, draw: random.Random, n_answers: int, n_kills: int) -> Row:
    """Four people answer while the server is killed: every acknowledged answer is there once, and none besides."""
    row, place = Row("answers while the server is killed"), fresh(ground, work)
    images = ImageSet.from_folder(place / "photos")
    several = [(i, j, k) for i in range(24) for j in range(24) for k in range(j) if i not in (j, k)]
    draw.shuffle(several)
    with open_store(place / "new.db", images) as store:
        store.add_questions((Question(i, (j, k)) for i, j, k in several[: n_answers + 60]), urgent=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ["annotate", "photos", "--db", "new.db", "--port", str(port), "--no-browser", "-q"]
    log, said = place / "server.log", dict[int, tuple[int, int, str]]()
    lock, over = threading.Lock(), threading.Event()

    def person(name: str, choices: random.Random) -> None:
        while not over.is_set():
            told = send(port, "/api/questions", {"annotator": name, "hold": 1}, over)
            for question in (told or {}).get("questions", []):
                body = {"question": question["id"], "choice": choices.choice([-1, -2, 0]), "annotator": name}
                reply = send(port, "/api/answers", {**body, "milliseconds": 5}, over)
                if reply is not None and "answer" in reply:
                    with lock:
                        said[reply["answer"]] = (question["id"], body["choice"], name)
                        if len(said) >= n_answers:
                            over.set()

    people = [threading.Thread(target=person, args=(f"p{n}", random.Random(draw.random()))) for n in range(4)]
    server = fork(words, place, log)
    for one in people:
        one.start()
    per_kill = n_answers / (n_kills + 1)
    for kill in range(n_kills):
        until = time.monotonic() + 120
        while len(said) < per_kill * (kill + 1) and time.monotonic() < until and not over.is_set():
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.02))
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        row.counts["kills"] += 1
        server = fork(words, place, log)
    over.wait(timeout=300)
    over.set()
    for one in people:
        one.join()
    os.kill(server, signal.SIGTERM)
    ended = wait(server, log)
    compare(row, place, images, said, ended)
    return row


def compare(row: Row, place: Path, images: ImageSet, said: dict[int, tuple[int, int, str]], ended: Ended) -> None:
    with open_store(place / "new.db", images, read_only=True) as store:
        stored = {one.id: (one.question, one.choice, one.annotator) for one in store.rows()}
    questions = [question for question, _, _ in stored.values()]
    for number, what in said.items():
        row.add("survived") if stored.get(number) == what else row.add("failed", f"answer {number} {what} is lost")
    if len(set(questions)) != len(questions):
        row.add("failed", "a question has two answers")
    if len(stored) - len(said) > 4:  # one of each person may be stored and not acknowledged
        row.add("failed", f"{len(stored) - len(said)} answers that nobody knows of")
    if ended.code != 0 or "Traceback" in ended.said:
        row.add("failed", f"the server ended with {ended.code}: {ended.said[-600:]}")


def send(port: int, path: str, body: dict[str, Any], over: threading.Event) -> dict[str, Any] | None:
    """Post a body until an answer comes, as the page does; None when all is over or it is refused."""
    while not over.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            content = json.loads(reply.read())
            if reply.status != 503:
                return dict(content) if reply.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            time.sleep(0.02)
        finally:
            connection.close()
    return None
