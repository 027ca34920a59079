"""Systems side by side: the same features, pairs and judge for each; one table, one page, and which to take."""

import copy
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import constraintmatch
from constraintmatch._internal import rng
from constraintmatch._internal.errors import InputError, one_line
from constraintmatch._internal.files import check_folder, folder_lock, read_json, write_json
from constraintmatch._internal.progress import QUIET, Reporter
from constraintmatch._internal.rng import Purpose
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.comparison import Row, table_text, write_page
from constraintmatch.evaluation.judge import Judge, hide_images
from constraintmatch.evaluation.metrics import Predictions, agreement, predict, scores
from constraintmatch.methods import Context
from constraintmatch.methods.heads import detach_head
from constraintmatch.methods.others import OTHERS, Setup
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.pipeline.commands import write_clusters
from constraintmatch.pipeline.config import default_options, make_config
from constraintmatch.pipeline.embedding import encode
from constraintmatch.pipeline.plan import Plan, Train, plan_pretraining, visible_names
from constraintmatch.pipeline.sources import open_pairs, path_list
from constraintmatch.pipeline.train import pairs_hash, pretrain, train, weights_hash

OWN = {
    "constraintmatch": "ConstraintMatch by the safe recipe: the start, a head that the pairs teach, or a trained head.",
    "constrained": "MCL on the pairs alone, as the paper compares itself with: the head is trained, the last one kept.",
    "start": "The clusters of the start, without pairs.",
}
SYSTEMS = (*OWN, *OTHERS)
JUDGED = 2_000  # pairs to judge by where labels give as many as one likes
FILE = "comparison.json"
Place = Callable[[ImageSet], Predictions]


@dataclass(frozen=True, eq=False)
class Task:
    """What every system gets, and what judges it; all images are embeddings."""

    images: ImageSet
    pairs: Constraints
    start: ClusterModel  # of embeddings
    judged: ImageSet  # the images of the pairs that judge
    judge: Constraints
    tested: ImageSet | None  # with labels, for scores
    labels: NDArray[np.int64] | None  # of the images, −1 where a system may not know it
    seed: int

    @property
    def n_clusters(self) -> int:
        return self.start.config.n_clusters

    @property
    def n_labels(self) -> int:
        """The number of images whose labels a system may know."""
        return 0 if self.labels is None else int((self.labels >= 0).sum())

    def request(self) -> dict[str, Any]:
        """What decides the rows."""
        return {
            "images": self.images.fingerprint(),
            "pairs": pairs_hash(self.pairs),
            "judge": pairs_hash(self.judge),
            "start": weights_hash(self.start),
            "tested": None if self.tested is None else self.tested.fingerprint(),
            "clusters": self.n_clusters,
            "labels": self.n_labels,
            "seed": self.seed,
            "constraintmatch": constraintmatch.__version__,
        }


def compare(
    request: Train,
    reporter: Reporter = QUIET,
    *,
    n_pairs: int | None = None,
    n_labels: int = 0,
    methods: Sequence[str] = (),
    apart: bool = True,
) -> str:
    """The table and the advice as text; rows, page and clusters are in the folder, where finished rows are kept.

    The pairs are those of the request, or `n_pairs` drawn from labels; `n_labels` images have their labels given too.
    Without `methods` all systems are compared. A system runs in a process of its own, whose memory is measured and
    whose death is a row; not so without `apart`.
    """
    names, out = methods or SYSTEMS, request.out or Path("comparison")
    if odd := [name for name in names if name not in SYSTEMS]:
        raise InputError(f"--methods {odd[0]}: unknown; known are {', '.join(SYSTEMS)}")
    if (request.pairs is None) == (n_pairs is None):
        raise InputError("say which pairs: --pairs FILE, or --n-pairs NUMBER to draw some from labels, and not both")
    check_folder(out)
    held = visible_names(out)
    if held and not {FILE, "start"} & set(held):
        raise InputError(f"not empty ({held[0]} is there) and not an earlier comparison", out, "choose another --out")
    with folder_lock(out):
        task = _open_task(replace(request, out=out), n_pairs, n_labels, reporter)
        rows = _load_rows(out, task.request())
        for number, name in enumerate(names, 1):
            if rows.get(name, {}).get("error", "") is None:
                reporter.say(f"{name}: finished earlier")
                continue
            reporter.say(f"{name}: {number} of {len(names)}")
            rows[name], found = run_apart(name, task) if apart else run_system(name, task)
            if found is not None:
                write_clusters(out / f"{name}.csv", task.images.names, found)
            write_json(out / FILE, {"request": task.request(), "rows": list(rows.values())})
        shown: list[Row] = [rows[name] for name in names]
        about = {name: OWN.get(name) or " ".join(str(OTHERS[name].__doc__).split()) for name in names}
        facts = _facts(Path(str(request.data)).name, task)
        page = write_page(out / "comparison.html", shown, Judge(task.judge), facts, about)
    return f"{table_text(shown, Judge(task.judge))}\n\npage: {page}"


# One system


def run_apart(name: str, task: Task, threads: int | None = None) -> tuple[Row, Predictions | None]:
    """What `run_system` gives, in a process of its own, with as many threads or torch's usual number."""
    context = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
    if hasattr(context, "set_forkserver_preload"):
        context.set_forkserver_preload([__name__])  # torch is imported once
    first: dict[str, Any] = {} if threads is None else {"initializer": torch.set_num_threads, "initargs": (threads,)}
    with ProcessPoolExecutor(1, mp_context=context, **first) as pool:
        try:
            return pool.submit(run_system, name, task).result()
        except BrokenProcessPool:
            return {"method": name, "error": "its process died; was there too little memory?"}, None


def run_system(name: str, task: Task) -> tuple[Row, Predictions | None]:
    """A system's row, and its clusters of the images; whatever it raises is the row's `error`."""
    began, before = time.monotonic(), _peak_memory()
    try:
        place, note = _fit(name, task)
        seconds = time.monotonic() - began
        found = place(task.images)
        judged = found if task.judged is task.images else place(task.judged)
        row: Row = {"method": name, "error": None, "note": note, "seconds": round(seconds, 2)}
        row["mebibytes"] = None if before is None else round(max(0.0, (_peak_memory() or 0) - before), 1)
        judge = Judge(task.judge)
        row["losses"] = np.round(judge.losses(judged.probabilities[judge.rows]), 4).tolist()
        row["held_out"] = _kept(task.judge, judged)
        row["kept"] = _kept(task.pairs, found)
        if task.tested is not None and task.tested.labels is not None:
            measured = scores(task.tested.labels, place(task.tested))
            row |= {key: round(measured[key], 4) for key in ("acc", "nmi", "ari")}
        return row, found
    except InputError as error:
        return {"method": name, "error": str(error)}, None
    except Exception as error:  # of any kind: the others still run
        return {"method": name, "error": f"{type(error).__name__}: {one_line(error)}"}, None


def _fit(name: str, task: Task) -> tuple[Place, str | None]:
    """What places images by a system, and what the safe recipe says of its choice."""
    if name in OTHERS:
        setup = Setup(_features(task.images), task.pairs, task.n_clusters, seed=task.seed, labels=task.labels)
        place = OTHERS[name](setup)
        return lambda images: Predictions(place(_features(images))), None
    model, note = copy.deepcopy(task.start), None  # it is trained in place
    if name != "start":
        options = default_options(name, len(task.images), cpu=True) | {"device": "cpu", "seed": task.seed}
        options |= {"recipe": "paper"} if name == "constrained" else {}
        model, log = train(task.images, task.pairs, make_config(name, options, start=model))
        if log[-1].get("kind") == "verdict":
            note = f"kept {log[-1]['kept']}: {log[-1]['why']}"
    return lambda images: predict(model, images), note


def _features(images: ImageSet) -> NDArray[np.float32]:
    return np.asarray(images.images[:, 0, 0], np.float32)


def _kept(pairs: Constraints, found: Predictions) -> float | None:
    """The share of the pairs that the clusters keep: the mean of both kinds, or that of the only one."""
    shares = agreement(pairs, found)
    known = [share for share in (shares["must_link"], shares["cannot_link"]) if share is not None]
    return round(sum(known) / len(known), 4) if known else None


def _peak_memory() -> float | None:
    """The most memory that this process has had, in MiB; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 2**20 if os.uname().sysname == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# The task


def _load_rows(out: Path, request: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of an earlier call; an InputError if it compared something else."""
    if not (out / FILE).is_file():
        return {}
    earlier = read_json(out / FILE)
    try:
        differ = [key for key, value in request.items() if earlier["request"].get(key) != value]
        rows = {row["method"]: row for row in earlier["rows"]}
    except (TypeError, KeyError, AttributeError):
        raise InputError("not the record of a comparison", out / FILE, "choose another --out") from None
    if differ:
        raise InputError(f"holds another comparison ({', '.join(differ)} differ)", out, "choose another --out")
    return rows


def _open_task(request: Train, n_pairs: int | None, n_labels: int, reporter: Reporter) -> Task:
    plan = plan_pretraining(replace(request, out=None, frozen=True), reporter)
    seed, images = plan.config.settings.seed, plan.data.images
    if images.labels is None and (n_pairs or n_labels):
        raise InputError(f"{request.data}: has no labels to draw from", fix="give --pairs FILE, and no --n-labels")
    if request.pairs is None:
        if not n_pairs or n_pairs < 1:
            raise InputError(f"--n-pairs {n_pairs}: no pairs to learn from; ask for 1 or more")
        assert images.labels is not None
        pairs, held = Constraints.sample(images.labels, n_pairs, seed=seed), None
    else:
        how: dict[str, Any] = {"columns": request.columns, "on_conflict": "drop", "reporter": reporter}
        given = open_pairs(request.pairs, images, **how)[0]
        pairs, held = hide_images(given.merged(), seed=seed)
        if not pairs.weight.any() or not len(held):
            place = path_list(request.pairs)[0]
            raise InputError(f"{len(given):,} pairs are too few: some must be held out", place, "answer more")
    context = Context(request.out, reporter=reporter, data=plan.data.record).within("start")
    return make_task(*_embedded(plan, context), pairs, held, n_labels, seed=seed)


def _embedded(plan: Plan, context: Context) -> tuple[ClusterModel, ImageSet, ImageSet | None]:
    """The start as a model of embeddings, and what it makes of the images and of those held out."""
    config = plan.config
    how: dict[str, Any] = {"recipe": config.stage_options, "settings": {"seed": config.settings.seed}}
    how |= {"stages": config.stages, "views": config.views, "context": context}
    model = pretrain(config.start, plan.seen, config.n_clusters, **how)

    def embedded(images: ImageSet) -> ImageSet:
        seen = images if images.embedded else encode(model, images, reporter=context.reporter)
        return replace(seen, pictures=None)

    seen, tested = embedded(plan.seen), plan.data.held_out
    start = detach_head(model, seen) if model.config.side > 1 else model
    return start.cpu(), seen, None if tested is None else embedded(tested)


def make_task(
    start: ClusterModel,
    images: ImageSet,
    tested: ImageSet | None,
    pairs: Constraints,
    held: Constraints | None = None,
    n_labels: int = 0,
    *,
    seed: int,
) -> Task:
    """The task for a start of embeddings. Pairs that are held out judge, or else pairs of labels, of other images.

    Scores are on the tested images, or on the images without a pair and a label that a system knows.
    """
    labels, known = None, np.empty(0, np.int64)
    if n_labels and images.labels is not None:
        known = rng.permutation(rng.stream(seed, Purpose.ANCHORS), len(images))[:n_labels]
        labels = np.full(len(images), -1)
        labels[known] = images.labels[known]
    if tested is None or tested.labels is None:
        rest = np.setdiff1d(np.arange(len(images)), np.concatenate([pairs.left, pairs.right, known]))
        tested = images.take(rest) if images.labels is not None and len(rest) > 1 else None
    judged = images if held is not None or tested is None else tested
    if held is None:
        if judged.labels is None:
            raise InputError("no image is left to judge by", fix="draw fewer pairs, or name other images with --test")
        held = Constraints.sample(judged.labels, JUDGED, seed=seed + 1)
    return Task(images, pairs, start, judged, held, tested, labels, seed)


def _facts(name: str, task: Task) -> list[tuple[str, str]]:
    return [
        ("Data", name),
        ("Images", f"{len(task.images):,} of {task.images.channels:,} numbers"),
        ("Clusters", f"{task.n_clusters:,}"),
        ("Pairs", f"{len(task.pairs):,} ({task.pairs.n_must_links:,} must-links)"),
        ("Held-out pairs", f"{len(task.judge):,} ({task.judge.n_must_links:,} must-links)"),
        ("Labels given", f"{task.n_labels:,}"),
        ("Scores on", "none" if task.tested is None else f"{len(task.tested):,} images"),
        ("Seed", str(task.seed)),
    ]
