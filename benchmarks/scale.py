"""Neighbours, label spreading and the choice of questions for many images: seconds and peak memory.

    python benchmarks/scale.py --out results/scale.json

Rows of 128 numbers lie around 20 centres, in 16 directions of each centre's own and a little in all others, as
embeddings do: they have few directions. Every line is a process of its own, so that its memory is its own: the peak is
what the work adds to the data. FAISS flat and lists are measured if FAISS is installed. Exact search that would take
longer than `--limit` seconds is done for a quarter of that time and scaled, since every asked row costs the same; the
table marks it with ~.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch.constraints.propagation import neighbour_graph, spread_labels
from constraintmatch.evaluation.neighbours import nearest_blocks, nearest_in_lists, unit_rows
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.next_question import next_questions
from constraintmatch.questions.rounds import LabelOracle
from constraintmatch.training.run_folder import environment, write_result

WIDTH, KINDS, DIRECTIONS, NEAR = 128, 20, 16, 20
TASKS = ("exact", "flat", "lists", "spread", "questions")
Floats = NDArray[np.float32]


def rows(n: int) -> tuple[Floats, NDArray[np.int64]]:
    """Features (n, 128) and their kinds."""
    random = np.random.Generator(np.random.Philox(0))
    kinds = random.integers(0, KINDS, n)
    centres = random.standard_normal((KINDS, WIDTH), dtype=np.float32)
    maps = random.standard_normal((KINDS, DIRECTIONS, WIDTH), dtype=np.float32) / 4
    features = 0.1 * random.standard_normal((n, WIDTH), dtype=np.float32)
    for kind in range(KINDS):
        own = np.flatnonzero(kinds == kind)
        features[own] += centres[kind] + random.standard_normal((len(own), DIRECTIONS), dtype=np.float32) @ maps[kind]
    return features, kinds


def exact(n: int, limit: float) -> dict[str, Any]:
    unit = unit_rows(rows(n)[0])
    before = resident()

    def search(m: int) -> None:
        for _ in nearest_blocks(unit[:m], unit, NEAR, itself=False):
            pass

    return timed(search, before, asked_part(n, limit, search), n)


def flat(n: int, limit: float) -> dict[str, Any]:
    import faiss

    unit, index = unit_rows(rows(n)[0]).numpy(), faiss.IndexFlatIP(WIDTH)

    def search(m: int) -> None:
        index.search(unit[:m], NEAR + 1)

    before = resident()
    index.add(unit)
    return timed(search, before, asked_part(n, limit, search), n)


def asked_part(n: int, limit: float, search: Callable[[int], None]) -> int:
    """How many rows exact search is asked for: all, or what a trial says a quarter of the limit is enough for."""
    trial = min(n, 1_000)
    search(64)
    start = time.perf_counter()
    search(trial)
    each = (time.perf_counter() - start) / trial
    return n if each * n <= limit else max(trial, int(limit / 4 / each))


def lists(n: int, limit: float) -> dict[str, Any]:  # noqa: ARG001 (every task takes it)
    unit, said = unit_rows(rows(n)[0]).numpy(), list[str]()
    found = timed(lambda _: nearest_in_lists(unit, NEAR, say=said.append), resident())
    return {**found, "said": said[0]}


def spread(n: int, limit: float) -> dict[str, Any]:  # noqa: ARG001
    """Twenty known images of each kind spread to all; the neighbours are images of the same kind, at random."""
    features, kinds = rows(n)
    random = np.random.Generator(np.random.Philox(1))
    order = np.argsort(kinds, kind="stable")
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    near = order[np.minimum(place[:, None] + random.integers(1, 50, (n, NEAR)), n - 1)]
    first = np.zeros((n, KINDS), np.float32)
    for kind in range(KINDS):
        first[np.flatnonzero(kinds == kind)[:20], kind] = 1 / 20
    return timed(lambda _: spread_labels(neighbour_graph(features, near), first), resident())


def questions(n: int, limit: float) -> dict[str, Any]:  # noqa: ARG001
    """All of the first call, in which exemplars are found and compared, and 100 questions after their answers."""
    features, kinds = rows(n)
    logits = np.random.Generator(np.random.Philox(2)).standard_normal((n, KINDS), dtype=np.float32)
    logits[np.arange(n), kinds] += 3
    shares = np.exp(logits)
    belief, oracle = Belief.of(features, shares / shares.sum(1, keepdims=True)), LabelOracle(kinds)

    def choose(_: int) -> None:
        answers = []
        for _ in range(10):  # the warm-up ends when all exemplars are compared
            asked = next_questions(belief, answers, 100)
            if len(asked) == 100:
                return
            answers += [oracle.answer(question) for question in asked]
        raise AssertionError("no hundred questions")

    return timed(choose, resident())


def timed(work: Callable[[int], Any], before: float, part: int = 1, of: int = 1) -> dict[str, Any]:
    """Seconds, scaled to all rows, and the memory in MiB at most, beyond what was there before."""
    start = time.perf_counter()
    work(part)
    seconds = (time.perf_counter() - start) * of / part
    return {"seconds": round(seconds, 2), "mib": round(max(0, status("VmHWM") - before)), "part": part / of}


def resident() -> float:
    """The memory in MiB that the process holds now; the peak is counted from here on (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, or it would not count when it is used again
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status("VmRSS")


def status(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(task: str, n: int, asked: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own says."""
    command = [sys.executable, __file__, "--task", task, "--rows", str(n), "--limit", str(asked.limit)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(asked.threads))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | threads)
    return {"task": task, "rows": n, **json.loads(done.stdout.splitlines()[-1]), "commit": environment()["commit"]}


def kept(path: Path, tasks: list[str]) -> list[dict[str, Any]]:
    """The lines of an earlier result that are not measured again."""
    before = json.loads(path.read_text(encoding="utf-8"))
    commit = before["environment"]["commit"]
    return [{"commit": commit, **row} for row in before["rows"] if row["task"] not in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10000,100000,1000000")
    parser.add_argument("--task", choices=TASKS, help="one task, in this process; prints JSON")
    parser.add_argument("--tasks", help="some of the tasks; other lines of --out stay, each with its commit")
    parser.add_argument("--limit", type=float, default=120, help="seconds of exact search; beyond, a part is scaled")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    sizes = [int(n) for n in asked.rows.split(",")]
    if asked.task:
        print(json.dumps(globals()[asked.task](sizes[0], asked.limit)))
        return
    tasks = [
        task
        for task in (asked.tasks.split(",") if asked.tasks else TASKS)
        if task not in ("flat", "lists") or find_spec("faiss")
    ]
    print(f"{'rows':>10}  {'task':11}{'s':>10}{'MiB':>8}{'ours / FAISS flat':>19}")
    found = kept(asked.out, tasks) if asked.tasks and asked.out else []
    for n in sizes:
        took: dict[str, float] = {}
        for task in tasks:
            row = measure(task, n, asked)
            found.append(row)
            took[task] = row["seconds"]
            ratio = f"{took['exact'] / row['seconds']:.2f}" if task == "flat" and "exact" in took else ""
            seconds = f"{'~' if row['part'] < 1 else ''}{row['seconds']:,.1f}"
            print(f"{n:10,}  {task:11}{seconds:>10}{row['mib']:8,}{ratio:>19}  {row.get('said', '')}", flush=True)
    if asked.out:
        write_result(asked.out, {"width": WIDTH, "neighbours": NEAR, "threads": asked.threads, "rows": found})


if __name__ == "__main__":
    main()
