"""All systems on embeddings, for several numbers of pairs and seeds, by the code of `constraintmatch compare`.

    constraintmatch embed weights/scan-cifar10 cifar10 --data-dir data --out train.npz
    constraintmatch embed weights/scan-cifar10 cifar10 --split test --data-dir data --out test.npz
    python benchmarks/compare.py train.npz test.npz --clusters 10 --name cifar10 --workers 16 --out results

A seed draws the pairs and everything else. Scores are on the images of the second file. Every cell runs in a process
of its own with one thread, `--workers` of them at a time; finished cells are not run again. `--rows` takes some of the
images. The table has the mean of ACC and NMI over the seeds.
"""

import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from embedded import parser_of

from constraintmatch._internal.files import read_json
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.methods.preparation import spread
from constraintmatch.models.cluster_model import ClusterModel, build_model
from constraintmatch.pipeline.compare import SYSTEMS, make_task, run_apart
from constraintmatch.pipeline.train import pretrain
from constraintmatch.training.run_folder import write_result

Cell = tuple[int, int, str]  # pairs, seed, system


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.set_defaults(pairs=[300, 1_000, 3_000, 10_000], out=Path("results"))
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--methods", default=",".join(SYSTEMS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=int, help="take this number of the images")
    asked = parser.parse_args()
    train, test = (load_images(path) for path in (asked.train, asked.test))
    if asked.rows:
        train, test = (images.take(spread(len(images), asked.rows)) for images in (train, test))
    start = linear_start(train, asked.clusters)
    file = asked.out / f"compare-{asked.name}.json"
    rows: list[dict[str, Any]] = read_json(file)["rows"] if file.is_file() else []
    done = {(row["pairs"], row["seed"], row["method"]) for row in rows if row["error"] is None}
    rows = [row for row in rows if row["error"] is None]
    cells = [(n, seed, name) for n in asked.pairs for seed in range(asked.samples) for name in asked.methods.split(",")]
    sizes = {"data": asked.name, "images": len(train), "width": train.channels, "clusters": asked.clusters}
    lock = threading.Lock()

    def run(cell: Cell) -> None:
        n, seed, name = cell
        pairs = Constraints.sample(train.labels, n, seed=seed)
        row, _ = run_apart(name, make_task(start, train, test, pairs, seed=seed), threads=1)
        row.pop("losses", None)
        with lock:
            rows.append({"pairs": n, "seed": seed, **row})
            print(rows[-1], flush=True)
            write_result(file, {**sizes, "samples": asked.samples, "rows": rows})

    with ThreadPoolExecutor(asked.workers) as pool:
        for future in [pool.submit(run, cell) for cell in cells if cell not in done]:
            future.result()
    print(table(rows, asked.pairs))


def linear_start(images: ImageSet, n_clusters: int) -> ClusterModel:
    """The start that `train` makes of embeddings."""
    mean, std = images.moments()
    fresh = build_model(n_clusters=0, side=1, channels=images.channels, mean=mean, std=std)
    return pretrain(fresh, images, n_clusters, stages=["linear_scan"], settings={"device": "cpu", "seed": 0}).cpu()


def table(rows: list[dict[str, Any]], columns: list[int]) -> str:
    """ACC / NMI in %, the mean over seeds: a line for each system, a column for each number of pairs."""
    lines = [f"{'':<20}" + "".join(f"{n:>15,}" for n in columns)]
    for name in SYSTEMS:
        cells = []
        for n in columns:
            own = [row for row in rows if (row["method"], row["pairs"], row["error"]) == (name, n, None)]
            means = [100 * statistics.mean(row[key] for row in own) for key in ("acc", "nmi")] if own else []
            cells.append(" / ".join(f"{mean:.1f}" for mean in means) or "–")
        if set(cells) != {"–"}:
            lines.append(f"{name:<20}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
