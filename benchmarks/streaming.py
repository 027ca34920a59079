"""Images from shards: how fast they are decoded, how long a step waits for them, and how much memory they take.

    python benchmarks/streaming.py --out results/streaming.json

JPEGs are generated (200 different ones), written into tar shards of 10,000, and decoded once into the memory map that
training reads. SimCLR then trains on the map, streamed, and on images that are resident; the difference is the wait for
data. On cores with other work that difference is noise; the share of CPU time that goes into reading is not. The
quickest stretch of a training counts. Cold: the map is dropped from the system's page cache first. The floor of
decoding is Pillow in a plain loop on one thread. WebDataset and LitData, which decode anew in every epoch, are measured
where they are installed. Each line is a process of its own; memory is its peak of anonymous pages, since those of a map
can be dropped. Sizes that need more disk than `--disk` GiB, or more time than `--limit`, are extrapolated from the
largest that ran, and say so. On a GPU, CONSTRAINTMATCH_DECODE=cuda measures its JPEG decoder too.
"""

import argparse
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.methods.pretext import Projector
from constraintmatch.models.cluster_model import build_model, with_projection
from constraintmatch.training import batches, views
from constraintmatch.training.loop import TrainSettings, choose_device, fit
from constraintmatch.training.losses import nt_xent
from constraintmatch.training.run_folder import write_result

KINDS, SHARD, READ = 200, 10_000, 5_000  # different JPEGs; images in a shard; images that other readers read


@cache
def jpegs(side: int) -> list[bytes]:
    """Smooth pictures with some noise: about as large as photographs of that size."""
    random, found = np.random.default_rng(0), []
    for _ in range(KINDS):
        coarse = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), np.float32)
        noisy = smooth + random.normal(0, 8, smooth.shape)
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
        found.append(file.getvalue())
    return found


def write_shards(folder: Path, n: int, side: int) -> int:
    """Write n images and return their bytes."""
    pictures, size = jpegs(side), 0
    folder.mkdir(parents=True)
    for start in range(0, n, SHARD):
        with tarfile.open(folder / f"shard-{start // SHARD:06d}.tar", "w") as tar:
            for row in range(start, min(n, start + SHARD)):
                about = tarfile.TarInfo(f"{row:08d}.jpg")
                about.size = len(pictures[row % KINDS])
                tar.addfile(about, io.BytesIO(pictures[row % KINDS]))
                size += about.size
    return size


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Inside, a thread watches the anonymous memory; the function gives its peak in MiB, beyond what was there."""
    first = most = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield lambda: round(max(most, anonymous()) - first)
    done.set()


def anonymous() -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def rate(images: Iterator[Any], n: int, first: int = KINDS) -> float:
    """How many a second; the first ones are for the start of the workers."""
    for _ in itertools.islice(images, first):
        pass
    start = time.perf_counter()
    seen = sum(1 for _ in itertools.islice(images, n))
    return seen / (time.perf_counter() - start)


def plain_loop(side: int) -> tuple[float, float]:
    """Images a second of Pillow alone, on one thread, at best; and its CPU seconds for an image."""
    best = cpu = float("inf")
    for _ in range(5):
        start, spent = time.perf_counter(), time.process_time()
        for picture in jpegs(side):
            np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
        best, cpu = min(best, time.perf_counter() - start), min(cpu, time.process_time() - spent)
    return KINDS / best, cpu / KINDS


def step_ms(images: ImageSet, resident: bool, asked: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of a step of SimCLR on two views, in its quickest stretch; the share of CPU time that reads."""
    device = choose_device(asked.device)
    settings = TrainSettings(steps=asked.steps, device=asked.device, log_every=asked.steps // 8).resolve(device)
    store = batches.ImageStore(images, device, resident=resident)
    shuffled = batches.Shuffled(len(images), asked.batch, 0, device)
    reading: list[float] = []
    view, maker = views.contrastive(), batches.view_maker(0, device, compile=bool(settings.compile))

    def next_batch(step: int) -> batches.Views:
        rows = shuffled(step)
        begun = time.thread_time()
        own = store.take(rows)
        reading.append(time.thread_time() - begun)
        return batches.Views(maker(view, own, step, "one"), maker(view, own, step, "other"), rows)

    def loss(network: Callable[..., torch.Tensor], batch: batches.Views) -> dict[str, torch.Tensor]:
        both = network(torch.cat((batch.weak, batch.strong)))
        return {"contrastive": nt_xent(*both.chunk(2), temperature=0.1)}

    model = with_projection(build_model(n_clusters=0, side=images.side, backbone=asked.backbone), 128)
    spent = time.process_time()
    log = [entry for entry in fit(Projector(model), next_batch, loss, settings) if entry["kind"] == "training"]
    share = sum(reading) / (time.process_time() - spent)
    spans = itertools.pairwise(log[2:])
    return min(1e3 * (b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in spans), share


def drop_pages(cache: Path) -> None:
    for path in cache.rglob("*.npy"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ours(n: int, side: int, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The shards decoded into the map, then trained on: streamed warm, streamed cold, resident."""
    encoded = write_shards(folder / "shards", n, side)
    cache = folder / "cache"
    found: dict[str, Any] = {"jpeg_bytes": encoded // n, "map_bytes": side * side * 3}
    with peak_memory() as peak:
        start, spent = time.perf_counter(), time.process_time()
        load_images(folder / "shards", side=side, channels=3, cache=cache)
        found["decode_cpu_ms"] = round(1e3 * (time.process_time() - spent) / n, 4)
        found |= {"decode_s": round(time.perf_counter() - start, 2), "decode_mib": peak()}
    with peak_memory() as peak:
        start = time.perf_counter()
        images = load_images(folder / "shards", side=side, channels=3, cache=cache)
        found |= {"open_s": round(time.perf_counter() - start, 2)}
        small = images.take(np.arange(min(n, 2_000)))
        for start in range(0, n, 256):  # a write may have left the page cache
            images.images[start : start + 256].sum()
        found["map_rate"] = map_rate(images)
        resident, streamed = step_ms(small, True, asked), step_ms(images, False, asked)
        del images  # pages stay as long as they are mapped
        drop_pages(cache)
        images = load_images(folder / "shards", side=side, channels=3, cache=cache)
        found["cold_map_rate"] = map_rate(images)
        cold = step_ms(images, False, asked)
        found |= {"resident_ms": round(min(resident[0], step_ms(small, True, asked)[0]), 2)}
        found |= {"streamed_ms": round(streamed[0], 2), "cold_ms": round(cold[0], 2)}
        found |= {"read_share": round(streamed[1], 5), "cold_read_share": round(cold[1], 5)}
        found["train_mib"] = peak()
    plain, cpu = plain_loop(side)
    found |= {
        "decode_rate": round(n / found["decode_s"]),
        "plain_rate": round(plain),
        "plain_cpu_ms": round(1e3 * cpu, 4),
    }
    return found


def map_rate(images: ImageSet) -> int:
    """Images a second that are read from the map at random, in steps of 256."""
    rows, store = batches.Shuffled(len(images), 256, 1), batches.ImageStore(images, torch.device("cpu"), resident=False)
    return round(256 * rate((store.take(rows(step)) for step in itertools.count()), 25, 2))


def webdataset(n: int, side: int, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Images a second of its loader: shuffled in a buffer, decoded in worker processes."""
    import webdataset as wds

    write_shards(folder / "shards", min(n, 2 * READ), side)
    urls = [str(path) for path in sorted((folder / "shards").glob("*.tar"))]
    data = wds.WebDataset(urls, shardshuffle=False, nodesplitter=None, workersplitter=None, repeat=True)
    images = wds.WebLoader(
        data.shuffle(1_000).decode("pil").to_tuple("jpg").map_tuple(np.array),
        batch_size=50,
        num_workers=asked.workers,
    )
    return {"rate": round(50 * rate(iter(images), READ // 50, 4))}


def read_jpeg(given: tuple[int, int]) -> dict[str, Any]:
    """The image of a side and row, for LitData's own processes."""
    return {"jpg": jpegs(given[0])[given[1] % KINDS]}


def litdata(n: int, side: int, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Images a second of its loader: chunks of 64 MB, shuffled, decoded in worker processes; and by random row."""
    import litdata as ld

    size = min(n, 2 * READ)
    start = time.perf_counter()
    ld.optimize(
        read_jpeg, [(side, row) for row in range(size)], str(folder / "chunks"), chunk_bytes="64MB", num_workers=1
    )
    written = time.perf_counter() - start

    data = ld.StreamingDataset(str(folder / "chunks"), shuffle=True, transform=decoded)
    loader = ld.StreamingDataLoader(data, batch_size=50, num_workers=asked.workers)
    found = {"rate": round(50 * rate(iter(loader), READ // 50, 4)), "write_s": round(written, 1)}
    drawn = (data[int(row)] for row in np.random.default_rng(0).integers(0, size, 1_200))
    return {**found, "random_rate": round(rate(drawn, 1_000))}


def decoded(sample: dict[str, Any]) -> Any:
    return np.array(Image.open(io.BytesIO(sample["jpg"])).convert("RGB"))


TASKS = {"ours": ours, "webdataset": webdataset, "litdata": litdata}


def measure(task: str, n: int, side: int, asked: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own says, in a folder of its own."""
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        given = {"task": task, "rows": n, "sides": side, "folder": folder}
        shared = ("steps", "batch", "backbone", "device", "workers")
        words = [f"--{name}={value}" for name, value in given.items()]
        words += [f"--{name}={getattr(asked, name)}" for name in shared]
        done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return {"task": task, "images": n, "side": side, **json.loads(done.stdout.splitlines()[-1])}


def extrapolated(row: dict[str, Any], n: int) -> dict[str, Any]:
    """A line for n images from one that was measured: what grows with the images grows, the rest stays."""
    times = n / row["images"]
    grown = {name: round(row[name] * times, 2) for name in ("decode_s", "open_s", "decode_mib")}
    kept = {
        name: row[name]
        for name in ("jpeg_bytes", "map_bytes", "decode_rate", "decode_cpu_ms", "plain_rate", "plain_cpu_ms")
    }
    return {"task": row["task"], "images": n, "side": row["side"], "extrapolated_from": row["images"], **kept, **grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10000,100000,1000000")
    parser.add_argument("--sides", default="64,224")
    parser.add_argument("--task", choices=TASKS, help="one task, in this process; prints JSON")
    parser.add_argument("--steps", type=int, default=40, help="steps of a training")
    parser.add_argument("--batch", type=int, help="images of a step (512 on a GPU, 32 on a CPU)")
    parser.add_argument("--backbone", help="resnet18 on a GPU, tiny on a CPU")
    parser.add_argument("--device")
    parser.add_argument("--workers", type=int, default=2, help="processes of the other readers")
    parser.add_argument("--disk", type=float, default=30, help="GiB that a measurement may take")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a decoding may take, by the size before")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    gpu = choose_device(None if asked.device in (None, "None") else asked.device).type == "cuda"
    asked.device = "cuda" if gpu else "cpu"
    asked.batch, asked.backbone = asked.batch or (512 if gpu else 32), asked.backbone or ("resnet18" if gpu else "tiny")
    sizes, sides = ([int(n) for n in words.split(",")] for words in (asked.rows, asked.sides))
    if asked.task:
        print(json.dumps(TASKS[asked.task](sizes[0], sides[0], asked.folder, asked)))
        return
    found: list[dict[str, Any]] = []
    for side in sides:
        last: dict[str, Any] | None = None
        for n in sizes:
            too_large = n * (side * side * 3 + (last or {}).get("jpeg_bytes", 0)) > asked.disk * 2**30
            too_long = last is not None and n / last["decode_rate"] > asked.limit
            if last is not None and (too_large or too_long):
                found.append(extrapolated(last, n))
            else:
                last = measure("ours", n, side, asked)
                found.append(last)
            print(json.dumps(found[-1]), flush=True)
        for task in ("webdataset", "litdata"):
            if find_spec(task):
                found.append(measure(task, sizes[0], side, asked))
                print(json.dumps(found[-1]), flush=True)
    if asked.out:
        decoder = os.environ.get("CONSTRAINTMATCH_DECODE", "cpu")
        how = {"batch": asked.batch, "backbone": asked.backbone, "workers": asked.workers, "decoder": decoder}
        write_result(asked.out, {**how, "cores": len(os.sched_getaffinity(0)), "rows": found})


if __name__ == "__main__":
    main()
