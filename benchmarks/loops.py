"""How `loop` fares on a folder of photographs, round by round: the whole command, with an annotator who may err.

    python benchmarks/loops.py photos/train photos/test --start starts/photos --clusters 10 --name stl10 --out results

Each curve is one command, with its rounds of 25 answers; what it prints is what is recorded. A curve that is in the
result already is not run again, and one that was stopped goes on in its folder under `--keep`.
"""

import argparse
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from constraintmatch._internal.files import read_json
from constraintmatch.training.run_folder import write_result

ROUND = re.compile(r"([\d,]+) answers: ACC ([\d.]+)")
KEPT = re.compile(r"kept (the [^:]+):")


def main() -> None:
    asked = arguments()
    file = asked.out / f"loop-{asked.name}.json"
    curves: list[dict[str, Any]] = read_json(file)["curves"] if file.is_file() else []
    known = {(one["wrong"], one["seed"]) for one in curves}
    jobs = [(wrong, seed) for seed in range(asked.samples) for wrong in asked.wrong if (wrong, seed) not in known]
    with ThreadPoolExecutor(asked.workers) as pool:
        for done in as_completed(pool.submit(curve, asked, *job) for job in jobs):
            curves.append(done.result())
            print(curves[-1], flush=True)
            write_result(file, {"data": asked.name, "curves": curves})


def curve(asked: argparse.Namespace, wrong: float, seed: int) -> dict[str, Any]:
    """What one loop prints of its rounds."""
    began, folder = time.monotonic(), asked.keep / f"{asked.name}-{wrong:g}-{seed}"
    command = [sys.executable, "-m", "constraintmatch", "loop", asked.train, "--test", asked.test, "--oracle", "labels"]
    command += ["--clusters", str(asked.clusters), "--questions", str(asked.questions), "--start", asked.start]
    command += ["--set", f"wrong={wrong}", "--set", f"seed={seed}", "--out", str(folder)]
    done = subprocess.run(command + ["--frozen"] * asked.frozen, text=True, capture_output=True)
    lines, points, kept = done.stdout.splitlines() + done.stderr.splitlines(), list[dict[str, Any]](), ""
    for line in lines:
        if found := KEPT.match(line):
            kept = found[1]
        elif found := ROUND.match(line):
            points.append(
                {"answers": int(found[1].replace(",", "")), "acc": round(float(found[2]) / 100, 4), "kept": kept}
            )
    if done.returncode or not points:
        raise SystemExit("\n".join(lines[-20:]))
    return {"wrong": wrong, "seed": seed, "points": points, "seconds": round(time.monotonic() - began, 1)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="a folder with a folder for each class")
    parser.add_argument("test", help="another, for the scores")
    parser.add_argument("--start", required=True, help="a model folder")
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--wrong", type=float, nargs="*", default=[0.0, 0.1])
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--frozen", action="store_true", help="train only the head")
    parser.add_argument("--workers", type=int, default=1, help="loops side by side")
    parser.add_argument("--keep", type=Path, default=Path("loops"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
