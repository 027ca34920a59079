"""Embedding and predicting on many machines: workers of a Ray cluster read images and write Parquet files, by parts.

A part is a run of images; it is finished when its file is there, which is renamed into place complete. So a part that
is done twice is the same file, and what is missing after a stop is what has no file. Only names travel between the
machines, which share the folders of the images and of the results.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch._internal.files import folder_lock, read_json, remove_leftovers, write_atomically, write_json
from constraintmatch._internal.progress import QUIET, Reporter, watched
from constraintmatch.data.cache import decode_cached
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.decoding import FolderRequest
from constraintmatch.data.image_files import ImageFile, find_images
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation import metrics
from constraintmatch.models.cluster_model import ClusterModel, load_model, save_model
from constraintmatch.pipeline.embedding import open_network
from constraintmatch.pipeline.train import weights_hash
from constraintmatch.training.loop import choose_device

Kind = Literal["embed", "predict"]
PART = 1_024  # images of a part: 150 MB of pixels at 224 px
TRIES = 5  # after the first, of a part whose worker died
AHEAD = 256  # parts that are handed to Ray at a time
_NOTES = "_job"  # readers of Parquet folders leave names with _ out


def run_on_cluster(
    kind: Kind,
    model: str,
    source: Path | str,
    out: Path,
    *,
    side: int | None = None,
    device: str | None = None,
    reporter: Reporter = QUIET,
) -> int:
    """Write a row for each image into Parquet files in the folder `out`, and return how many images there are.

    A row has the name, the label where shards have one, the embedding or the cluster and its confidence, and the
    problem of an image that cannot be read. The same call goes on after a stop. Ray's cluster is the one that
    RAY_ADDRESS names or that runs here; else this machine is one.
    """
    if out.suffix:
        raise InputError("a folder of Parquet files is written; give --out a name without a suffix", out)
    if str(source) in DATASETS:
        raise InputError(f"--engine ray reads a folder or shards, not the data set {source}; leave it out")
    ray = _load_ray()
    network = open_network(model, side, None)
    if kind == "predict" and not network.config.n_clusters:
        raise InputError(f"{model}: has no clusters yet (it comes from a pretext task); train it first")
    source, out = Path(source).resolve(), out.resolve()
    files, unread = find_images(source)
    if not files or network.config.side == 1:
        raise InputError("no images there", source, "give a folder of images, or tar or Parquet shards")
    if unread:
        reporter.say(f"{len(unread):,} entries skipped, the first: {unread[0].name}: {unread[0].reason}")
    labelled = all(file.label is not None for file in files)
    wanted = choose_device(device).type if device else ""  # of each worker: the best that it has
    out.mkdir(parents=True, exist_ok=True)
    with folder_lock(out):
        _begin(kind, out, network, files)
        starts = range(0, len(files), PART)
        parts = {out / f"part-{start // PART:06d}.parquet": files[start : start + PART] for start in starts}
        left = {path: own for path, own in parts.items() if not path.exists()}
        _work(ray, (kind, source, labelled, wanted), left, len(files), reporter)
    return len(files)


def _load_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
    try:
        import ray
    except ImportError:
        raise InputError("--engine ray needs Ray; install it: pip install 'constraintmatch[cluster]'") from None
    return ray


def _begin(kind: Kind, out: Path, network: ClusterModel, files: Sequence[ImageFile]) -> None:
    """Note what the folder is for, with the model; a folder of another job is refused."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(repr(file).encode())
    now = {"kind": kind, "images": len(files), "files": digest.hexdigest(), "part": PART}
    now |= {"model": weights_hash(network)}
    note = out / _NOTES / "job.json"
    if note.exists():
        before = read_json(note)
        if odd := [name for name in now if before.get(name) != now[name]]:
            said = "; ".join(f"{name} was {before.get(name)}, is {now[name]}" for name in odd)
            raise InputError(f"holds another job ({said})", out, "choose another --out")
        remove_leftovers(out)
        return
    if any(not entry.name.startswith((".", _NOTES)) for entry in out.iterdir()):
        raise InputError("is not empty, and not of this command", out, "choose another --out")
    save_model(network, out / _NOTES / "model")
    write_json(note, now)


def _work(
    ray: Any, how: tuple[Any, ...], left: Mapping[Path, Sequence[ImageFile]], total: int, reporter: Reporter
) -> None:
    """Do the parts that are left; each is tried again on another worker if its own dies."""
    done, device = total - sum(map(len, left.values())), how[-1]
    with watched(reporter, "working on Ray", total) as progress, _connected(ray):
        gpus = 1 if ray.cluster_resources().get("GPU") and device in ("", "cuda") else 0
        remote = ray.remote(max_retries=TRIES, num_cpus=1, num_gpus=gpus)(do_part)
        todo, waiting = iter(left.items()), dict[Any, int]()
        while True:
            progress(done, total)
            for path, own in islice(todo, AHEAD - len(waiting)):
                waiting[remote.remote(*how, path, own)] = len(own)
            if not waiting:
                return
            finished, _ = ray.wait(list(waiting), num_returns=1)
            ray.get(finished)
            done += sum(waiting.pop(one) for one in finished)


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Inside, Ray runs; what ends a part is one line."""
    again = "the same command goes on with what is left"
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"Ray's cluster does not answer ({one_line(error)[:200]})", fix="see RAY_ADDRESS") from None
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(cause := error.cause, InputError):
            raise cause from None
        raise InputError(f"a part failed ({type(cause).__name__}: {one_line(cause)[:200]}); {again}") from None
    except ray.exceptions.RayError as error:
        raise InputError(f"a worker of a part died {TRIES + 1} times ({one_line(error)[:200]}); {again}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {again}") from None
    finally:
        ray.shutdown()


# On a worker


_model = cache(load_model)


def do_part(kind: Kind, source: Path, labelled: bool, device: str, path: Path, files: Sequence[ImageFile]) -> None:
    """Read the images of a part and write its file."""
    import pyarrow as pa
    import torch
    from pyarrow import parquet

    torch.set_num_threads(1)  # as many workers as cores
    model = _model(path.parent / _NOTES / "model")
    request = FolderRequest(source, tuple(files), model.config.side, None, model.config.channels, None)
    pixels, names, broken = decode_cached(request, cache=False)
    images, place = ImageSet(pixels, names), choose_device(device or None)
    if kind == "embed":
        made = metrics.embed(model, images, device=place)
        found = {"embedding": pa.FixedSizeListArray.from_arrays(made.ravel(), made.shape[1])}
    else:
        seen = metrics.predict(model, images, device=place)
        found = {"cluster": pa.array(seen.clusters, pa.int32()), "confidence": pa.array(seen.confidence)}
    rows, problems = images.rows(), {skip.name: skip.reason for skip in broken}
    order = pa.array([rows.get(file.name) for file in files], pa.int64())  # without a row where it cannot be read
    columns: dict[str, Any] = {"name": pa.array([file.name for file in files])}
    if labelled:
        columns["label"] = pa.array([str(file.label) for file in files])
    columns |= {name: values.take(order) for name, values in found.items()}
    columns["problem"] = pa.array([problems.get(file.name) for file in files], pa.string())
    table = pa.table(columns)
    write_atomically(path, lambda temporary: parquet.write_table(table, temporary))
