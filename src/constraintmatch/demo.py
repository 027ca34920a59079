"""The demo: digits without labels, a few hundred pairs, and what unconstrained images add to them."""

import copy
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

from constraintmatch.batches import derive_seed
from constraintmatch.constraints import Constraints
from constraintmatch.datasets import DATASETS, load_dataset
from constraintmatch.errors import InputError
from constraintmatch.evaluation import predict, scores
from constraintmatch.images import ImageSet
from constraintmatch.methods import ViewChoice
from constraintmatch.models import ClusterModel, build_model
from constraintmatch.pretraining import SHORT_STAGES, pretrain, short_start
from constraintmatch.progress import Quiet, Reporter
from constraintmatch.report import why_no_report, write_report
from constraintmatch.running import Around, method_settings, run_method, split_options
from constraintmatch.runs import write_result

__all__ = ["run_demo"]

# Chosen on the training and validation images alone; the test images are only scored.
N_PAIRS, N_SAMPLES, STEPS = 200, 3, 500
METHODS = ("constrained", "constraintmatch")
METRICS = ("acc", "nmi", "ari")


def run_demo(out: Path, *, seed: int = 0, reporter: Reporter | None = None) -> str:
    """The demo's table and the place of its report, as text; everything it made lies under `out`."""
    reporter = reporter or Quiet()
    _clear(out)
    row = DATASETS["digits"]
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    assert train.labels is not None
    around = Around(
        out, reporter=reporter, views=ViewChoice(row.flip, tuple(sorted(row.without))), data={"name": "digits"}
    )
    fresh = build_model(
        n_clusters=0, side=row.side, channels=row.channels, mean=row.mean, std=row.std, seed=derive_seed(seed, "model")
    )
    recipe, settings = short_start(len(train), cpu=True), {"device": "cpu", "seed": seed}
    start = pretrain(
        fresh,
        train,
        row.n_clusters,
        stages=SHORT_STAGES,
        recipe=recipe,
        settings=settings,
        around=around.within("start"),
    )
    found: dict[str, list[dict[str, float]]] = {"start": [_scores(start, test)], **{name: [] for name in METHODS}}
    for sample in range(N_SAMPLES):
        pairs = Constraints.sample(train.labels, N_PAIRS, seed=derive_seed(seed, "pairs", sample))
        for name in METHODS:
            model = _train(name, start, train, pairs, seed, around.within(f"{name}-{sample}"))
            found[name].append(_scores(model, test))
    last = out / f"constraintmatch-{N_SAMPLES - 1}"
    page = why_no_report(last) or write_report(last, train, predict(model, train), constraints=pairs)
    write_result(out / "demo.json", {"pairs": N_PAIRS, "samples": N_SAMPLES, "steps": STEPS, "seed": seed, **found})
    return _table(found, len(train), len(test)) + f"\nreport: {page}\n"


def _train(
    name: str, start: ClusterModel, images: ImageSet, pairs: Constraints, seed: int, around: Around
) -> ClusterModel:
    row = DATASETS["digits"]
    batch = {"pairs_per_step": row.pairs_per_step}
    if name == "constraintmatch":
        batch["images_per_step"] = row.images_per_step
    arguments, changes = split_options(name, {**row.tuned[name], **batch})
    often = {"log_every": 20, "evaluate_every": 100}
    settings = method_settings(name, {**changes, "steps": STEPS, "device": "cpu", "seed": seed, **often})
    model = copy.deepcopy(start)
    return run_method(name, model, images, pairs, arguments=arguments, settings=settings, around=around).model


def _scores(model: ClusterModel, images: ImageSet) -> dict[str, float]:
    assert images.labels is not None
    found = scores(images.labels, predict(model, images))
    return {name: round(found[name], 4) for name in METRICS}


def _table(found: dict[str, list[dict[str, float]]], n_train: int, n_test: int) -> str:
    titles = {"start": "self-supervised start", "constrained": "constrained", "constraintmatch": "ConstraintMatch"}
    lines = [
        f"{n_train:,} digits without labels, {N_PAIRS} pairs; scores in % on {n_test} other images,",
        f"mean ± standard deviation over {N_SAMPLES} samples of pairs",
        "",
        f"{'':22}{'ACC':>12}{'NMI':>12}{'ARI':>12}",
    ]
    for name, rows in found.items():
        cells = [_mean([100 * row[metric] for row in rows]) for metric in METRICS]
        lines.append(f"{titles[name]:22}" + "".join(f"{cell:>12}" for cell in cells))
    both = list(zip(found["constraintmatch"], found["constrained"], strict=True))
    gains = [_mean([100 * (ours[metric] - theirs[metric]) for ours, theirs in both]) for metric in METRICS]
    lines.append(f"{'gain on the same pairs':22}" + "".join(f"{gain:>12}" for gain in gains))
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean + " " * 6


def _clear(out: Path) -> None:
    """Remove an earlier demo; anything else at that place is left alone."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    known = {"demo.json", "start"} | {f"{name}-{sample}" for name in METHODS for sample in range(N_SAMPLES)}
    if not out.is_dir() or {entry.name for entry in out.iterdir()} - known:
        raise InputError(f"{out}: not empty and not an earlier demo; choose another --out")
    shutil.rmtree(out)
