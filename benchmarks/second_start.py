"""How long a person waits for the first question about photographs that were embedded before. Linux.

    python benchmarks/second_start.py PHOTOS --out results

Runs `annotate` and `loop` on some of the photographs as a person does, once to embed them, then again and again, each
time until the page hands out a question; and `python -c "import torch"` in turn with them, as a measure of the
machine. Wall and CPU seconds are medians.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from constraintmatch.training.run_folder import write_result

COMMANDS = {
    "annotate": ["annotate", "photos", "--db", "answers.db"],
    "loop": ["loop", "photos", "--out", "loop", "--clusters", "6"],
}
SERVER = ["--port", "0", "--no-browser"]


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_question(command: list[str], place: Path) -> dict[str, float]:
    """Seconds from the command to a question, of the clock and of the processor."""
    began = time.monotonic()
    words = [sys.executable, "-m", "constraintmatch", *command, *SERVER]
    with subprocess.Popen(words, cwd=place, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            page = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+?(?=[\s(]|$)", line)))
            body = json.dumps({"annotator": "me", "hold": 1}).encode()
            kind = {"Content-Type": "application/json"}
            asked = urllib.request.Request(f"{page.rstrip('/')}/api/questions", body, kind)
            urllib.request.urlopen(f"{page.rstrip('/')}/api/state").read()
            while not json.load(urllib.request.urlopen(asked))["questions"]:
                time.sleep(0.01)
            return {"wall": time.monotonic() - began, "cpu": cpu_seconds(process.pid)}
        finally:
            process.send_signal(signal.SIGINT)


def torch_alone() -> dict[str, float]:
    began, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": time.monotonic() - began, "cpu": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"import torch": [], **{name: [] for name in COMMANDS}}
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        (place / "photos").mkdir()
        files = sorted(path for path in asked.photos.rglob("*.*") if path.is_file())
        for number, path in enumerate(files[:: max(1, len(files) // asked.n)][: asked.n]):
            (place / "photos" / f"{number:04d}{path.suffix}").write_bytes(path.read_bytes())
        for name, command in COMMANDS.items():
            first[name] = first_question(command, place)
        for _ in range(asked.repeats):
            found["import torch"].append(torch_alone())
            for name, command in COMMANDS.items():
                found[name].append(first_question(command, place))
    rows = []
    for name, times in found.items():
        median = {kind: round(statistics.median(one[kind] for one in times), 2) for kind in ("wall", "cpu")}
        ratio = {f"{kind} of import torch": median[kind] / rows[0][kind] for kind in median} if rows else {}
        rows.append({"what": name, **median, **{key: round(value, 2) for key, value in ratio.items()}})
        if name in first:
            rows[-1]["first start"] = round(first[name]["wall"], 1)
        print(rows[-1], flush=True)
    if asked.out:
        write_result(asked.out / "second-start.json", {"images": asked.n, "repeats": asked.repeats, "rows": rows})


if __name__ == "__main__":
    main()
