"""`make torture`: what a hostile user, a bad disk and a power cut do to the program, counted in one table."""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import ground
import inputs
import kills

from constraintmatch._internal.files import read_json
from constraintmatch.training.run_folder import environment, write_result

HOW = ("tried", "refused", "survived", "failed")


def main() -> int:
    """Run all, print the table, write it; 1 if anything failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=float, default=1.0, help="share of the tries: 0.1 is a quick look")
    parser.add_argument("--only", default="", help="rows whose part has this in its name")
    parser.add_argument("--out", type=Path, default=Path("results/torture.json"))
    asked = parser.parse_args()
    began = time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="torture-"))
    os.environ["XDG_CACHE_HOME"] = str(base / "cache")
    os.environ["CONSTRAINTMATCH_COMMIT"] = environment()["commit"] or "unknown"  # asked once, not by every fork
    ground.load()
    (base / "ground").mkdir()
    ground.make(base / "ground")
    draw, rows = random.Random(asked.seed), list[ground.Row]()

    def n(usual: int) -> int:
        return max(1, round(usual * asked.size))

    place = (base / "ground", base / "work", draw)
    parts = {
        "kills": lambda: kills.kill_at_file_operations(*place, n(6)),
        "signals": lambda: [kills.stop_by_signals(*place, n(4))],
        "server": lambda: [kills.kill_the_server(*place, n(1000), n(30))],
        "words": lambda: [inputs.bad_words(*place, n(150))],
        "python": lambda: [inputs.bad_values(asked.seed, n(90))],
        "http": lambda: [inputs.bad_requests(*place, n(160))],
        "limits": lambda: inputs.bad_machines(*place, n(2)),
        "damage": lambda: inputs.bad_files(*place, n(4)),
    }
    for name, part in parts.items():
        if asked.only in name:
            rows += part()
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  " + "  ".join(f"{how:>8}" for how in HOW))
    for row in rows:
        print(f"{row.name:{width}}  " + "  ".join(f"{row.counts[how]:8,}" for how in HOW))
    table = {row.name: {how: row.counts[how] for how in HOW} for row in rows}
    runs = read_json(asked.out)["runs"] if asked.out.exists() else {}
    name, commit = f"seed {asked.seed}", os.environ["CONSTRAINTMATCH_COMMIT"]
    if not asked.only:
        runs[name] = {"commit": commit, "size": asked.size, "seconds": round(time.monotonic() - began), "rows": table}
    elif runs.get(name, {}).get("size") == asked.size:  # a part of a run, made again: its rows name their commit
        runs[name]["rows"] |= {row: {**counts, "commit": commit} for row, counts in table.items()}
    if runs:
        write_result(asked.out, {"runs": runs})
    shutil.rmtree(base, ignore_errors=True)
    return int(any(row.counts["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
