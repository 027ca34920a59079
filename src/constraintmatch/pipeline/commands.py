"""What the commands do, as plain functions: open images, train, predict, evaluate, sample, check, report, pretrain.

Everything that can be wrong with a request is found before the first step of training. torch is imported by the
functions that need it, so that drawing and checking pairs start at once.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target, read_json, write_atomically, write_json
from constraintmatch._internal.progress import Quiet, Reporter, watched
from constraintmatch.constraints import graph
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.pairs_file import names_in
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation import metrics as evaluation
from constraintmatch.evaluation.metrics import Predictions
from constraintmatch.pipeline.sources import ClassFolders, Data, open_at, read_pairs

if TYPE_CHECKING:
    from constraintmatch.methods import Trained
    from constraintmatch.pipeline.plan import Plan, Train

__all__ = [
    "Check",
    "TrainResult",
    "check_pairs",
    "evaluate_images",
    "evaluate_model",
    "evaluation_rows",
    "predict_images",
    "pretrain_model",
    "sample_pairs",
    "score_lines",
    "train",
    "write_clusters",
    "write_run_report",
]

DOUBTFUL, VERDICT = "doubtful.csv", ("kept", "why", "wrong_must_links", "wrong_cannot_links")


# Pairs


def sample_pairs(
    source: Path | str,
    out: Path | str,
    *,
    n: int | None = None,
    per_image: int | None = None,
    balanced: bool = False,
    seed: int = 0,
    flip: float | None = None,
    flip_only: Literal["must-link", "cannot-link"] | None = None,
    split: str | None = None,
    data_dir: Path | str | None = None,
    reporter: Reporter | None = None,
) -> Constraints:
    """Pairs drawn from the labels of images, written by name; an existing file is not overwritten."""
    if (n is None) == (per_image is None):
        raise InputError("say how many pairs: --n PAIRS or --per-image PARTNERS, and not both")
    if (few := (n or 0) + (per_image or 0)) < 1:
        flag = "--n" if per_image is None else "--per-image"
        raise InputError(f"{flag} {few}: a file without pairs is of no use; ask for 1 or more")
    if balanced and per_image is not None:
        raise InputError("--balanced goes with --n; --per-image draws its partners from all images")
    if flip_only is not None and flip is None:
        raise InputError(f"--wrong-only {flip_only} goes with --wrong SHARE")
    if Path(out).exists():
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    check_target(out)
    images = open_at(source, None, "train", split=split, data_dir=data_dir, reporter=reporter).images
    if images.labels is None:
        raise InputError(
            f"{source}: sampling needs labels; give class folders (one sub-folder per class) or a data set"
        )
    if per_image is not None:
        drawn = Constraints.sample_partners(images.labels, per_image, seed=seed)
    else:
        drawn = Constraints.sample(images.labels, n or 0, seed=seed, balanced=balanced)
    if flip is not None:
        drawn = drawn.flip(flip, seed=seed, only=flip_only)
    drawn.write(out, names=images.names)
    return drawn


@dataclass(frozen=True)
class Check:
    """What a pairs file holds; `contradictions` has the first ones with their chains."""

    n_pairs: int
    n_must_links: int
    n_cannot_links: int
    n_duplicates: int
    n_self_links: int
    n_groups: int  # of two or more images that must-links join
    largest_group: int
    n_images: int
    n_unconstrained: int
    n_contradictions: int
    contradictions: tuple[str, ...]
    closed: tuple[int, int] | None = None  # must-links and cannot-links after closing

    def lines(self) -> list[tuple[str, str]]:
        """The counts as rows of a table."""
        rows = [
            ("pairs", f"{self.n_pairs:,}"),
            ("must-links", f"{self.n_must_links:,}"),
            ("cannot-links", f"{self.n_cannot_links:,}"),
            ("soft links at 1/2", f"{self.n_pairs - self.n_must_links - self.n_cannot_links:,}"),
            ("duplicates", f"{self.n_duplicates:,}"),
            ("links to itself, ignored", f"{self.n_self_links:,}"),
            ("must-link groups", f"{self.n_groups:,} (largest: {self.largest_group:,} images)"),
            ("images", f"{self.n_images:,}"),
            ("images without a constraint", f"{self.n_unconstrained:,}"),
            ("contradictions", f"{self.n_contradictions:,}"),
        ]
        if self.closed is not None:
            rows.append(("after closing", f"{self.closed[0]:,} must-links, {self.closed[1]:,} cannot-links"))
        return rows


def check_pairs(
    path: Path | str,
    source: Path | str | None = None,
    *,
    columns: str | None = None,
    close: bool = False,
    split: str | None = None,
    data_dir: Path | str | None = None,
    reporter: Reporter | None = None,
) -> Check:
    """What a pairs file holds, by itself or over images."""
    if source is None:
        names: Sequence[str] | None = names_in(path, columns=columns)
        pairs = Constraints.read(path, names=names, columns=columns)
    else:
        images = open_at(source, None, "train", split=split, data_dir=data_dir, reporter=reporter).images
        names, pairs = images.names, read_pairs(path, images, columns=columns)
    groups = np.bincount(pairs.components()) if pairs.n_images else np.zeros(1, np.int64)
    seen = len(np.union1d(pairs.left, pairs.right))
    return Check(
        n_pairs=len(pairs),
        n_must_links=pairs.n_must_links,
        n_cannot_links=pairs.n_cannot_links,
        n_duplicates=len(pairs) - len(pairs.merged()),
        n_self_links=pairs.ignored_self_links,
        n_groups=int((groups > 1).sum()),
        largest_group=int(groups.max()),
        n_images=pairs.n_images,
        n_unconstrained=pairs.n_images - seen,
        n_contradictions=len(pairs.conflict_rows()),
        contradictions=tuple(conflict.describe(names, pairs.places) for conflict in pairs.conflicts(limit=10)),
        closed=_closed_counts(pairs) if close else None,
    )


def _closed_counts(pairs: Constraints) -> tuple[int, int]:
    return graph.n_pairs(*pairs.component_constraints())


# Training


@dataclass(frozen=True)
class TrainResult:
    """A finished training: where it lies and what it reached."""

    out: Path
    evaluation: dict[str, Any]
    report: str  # its path, or why it was left out

    def lines(self) -> list[tuple[str, str]]:
        """The closing summary as rows of a table."""
        told, kept = self.evaluation, []
        if verdict := told.get("verdict"):
            kept = [("kept", f"{verdict['kept']}: {verdict['why']}")]
            if n := verdict["doubtful"]:
                kept.append(("look again", f"{n} pairs look wrong: annotate DATA --again {self.out / DOUBTFUL}"))
        return [
            ("clusters", f"{self.out / 'clusters.csv'} ({told['images']:,} images in {told['clusters']} clusters)"),
            ("model", str(self.out / "model")),
            ("report", self.report),
            *kept,
            *score_lines(told),
            ("next", f"constraintmatch predict {shlex.quote(str(self.out))} NEW_IMAGES --out new.csv"),
        ]


def train(request: Train, reporter: Reporter | None = None) -> TrainResult:
    """Train as asked and leave the run folder with model, clusters.csv, evaluation.json and report.html."""
    from constraintmatch.pipeline import train as running
    from constraintmatch.pipeline.plan import plan_training
    from constraintmatch.training.loop import Interrupted

    plan = plan_training(request, reporter or Quiet())
    pairs, out = plan.pairs, plan.context.out
    assert out is not None
    if pairs is not None and pairs.held_out is not None:
        pairs.held_out.write(out / "held-out-pairs.csv", names=plan.data.images.names)
    try:
        trained = running.train(plan.data.images, pairs.training if pairs else None, plan.config, plan.context)
    except Interrupted as stop:
        raise Interrupted(f"{stop}; the same command with --resume --out {out} goes on from there") from None
    return _finish(plan, trained, out)


def _finish(plan: Plan, trained: Trained, out: Path) -> TrainResult:
    """Write what the run found: clusters.csv, evaluation.json and, last, the report."""
    from constraintmatch.evaluation.report import why_no_report, write_report
    from constraintmatch.training.loop import choose_device

    model, images, held_out = trained.model, plan.data.images, plan.data.held_out
    device = choose_device(plan.config.settings.device)
    predictions = evaluation.predict(model, images, device=device)
    told = evaluate_images(images, predictions, plan.pairs.held_out if plan.pairs else None)
    if held_out is not None and held_out.labels is not None:
        found = evaluation.predict(model, held_out, device=device)
        told |= {"scores": evaluation.scores(held_out.labels, found), "scored_on": f"{len(held_out):,} held-out images"}
    told["skipped"] = [{"name": skip.name, "reason": skip.reason} for skip in images.skipped]
    if (
        told["warnings"]
        and plan.config.arguments.get("recipe") == "paper"
        and not plan.config.arguments.get("error_rate")
    ):
        told["warnings"].append("The paper's recipe is not safe with wrong pairs; leave --recipe out.")
    told["verdict"] = _judged(trained.log, images, out)
    write_clusters(out / "clusters.csv", images.names, predictions)
    write_json(out / "evaluation.json", told)
    pairs = plan.pairs.training if plan.pairs else None
    report = why_no_report(out) or write_report(out, images, predictions, constraints=pairs)
    return TrainResult(out, told, str(report))


def _judged(log: Sequence[Mapping[str, Any]], images: ImageSet, out: Path) -> dict[str, Any] | None:
    """What the safe recipe kept and why; the pairs that look wrong are written to doubtful.csv."""
    if log[-1].get("kind") != "verdict":
        return None
    (out / DOUBTFUL).unlink(missing_ok=True)
    if found := log[-1]["doubtful"]:
        columns = ([pair[key] for pair in found] for key in ("left", "right", "link"))
        Constraints.from_arrays(*columns, n_images=len(images)).write(out / DOUBTFUL, names=images.names)
    return {key: log[-1][key] for key in VERDICT} | {"doubtful": len(found)}


# A trained model


def predict_images(
    model: Path | str,
    source: Path | str,
    *,
    split: str | None = None,
    data_dir: Path | str | None = None,
    device: str | None = None,
    strict: bool = False,
    class_folders: ClassFolders = "auto",
    pictures: Path | str | None = None,
    reporter: Reporter | None = None,
) -> tuple[Data, Predictions]:
    """The images, opened at the model's size, and their clusters; the model is a model folder or a run folder."""
    from constraintmatch.methods.parts.preparation import check_images
    from constraintmatch.models.cluster_model import load_model
    from constraintmatch.training.loop import choose_device

    place, reporter = choose_device(device), reporter or Quiet()
    network = load_model(model)
    if network.config.n_clusters == 0:
        raise InputError(f"{model}: has no clusters yet (it comes from a pretext task); train it first")
    data = open_at(
        source,
        (network.config.side, network.config.channels),
        "test",
        split=split,
        data_dir=data_dir,
        class_folders=class_folders,
        strict=strict,
        pictures=pictures,
        reporter=reporter,
    )
    check_images(network, data.images)
    with watched(reporter, "predicting", len(data.images)) as progress:
        return data, evaluation.predict(network, data.images, device=place, progress=progress)


def write_clusters(path: Path | str, names: Sequence[str], predictions: Predictions) -> None:
    """Write `name,cluster,confidence`, atomically."""
    rows = zip(names, predictions.clusters.tolist(), predictions.confidence.tolist(), strict=True)

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("name", "cluster", "confidence"))
            writer.writerows((name, cluster, f"{confidence:.6f}") for name, cluster, confidence in rows)

    write_atomically(path, write)


def evaluate_model(
    model: Path | str,
    source: Path | str,
    *,
    pairs: Path | str | None = None,
    columns: str | None = None,
    split: str | None = None,
    data_dir: Path | str | None = None,
    device: str | None = None,
    class_folders: ClassFolders = "auto",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """How good the model's clusters of the images are: scores with labels, agreement with pairs, signs of collapse."""
    if pairs is not None and not Path(pairs).exists():
        raise InputError(f"{pairs}: no such file")
    data, predictions = predict_images(
        model, source, split=split, data_dir=data_dir, device=device, class_folders=class_folders, reporter=reporter
    )
    constraints = None
    if pairs is not None:
        constraints = read_pairs(pairs, data.images, columns=columns)
    return evaluate_images(data.images, predictions, constraints)


def evaluate_images(
    images: ImageSet, predictions: Predictions, constraints: Constraints | None = None
) -> dict[str, Any]:
    """Predictions judged: plain values that JSON can hold."""
    labelled = images.labels is not None
    return {
        "images": len(images),
        "clusters": predictions.n_clusters,
        "scores": evaluation.scores(images.labels, predictions) if images.labels is not None else None,
        "scored_on": f"{len(images):,} images" if labelled else None,
        "agreement": None if constraints is None else evaluation.agreement(constraints, predictions),
        "pairs": None if constraints is None else len(constraints),
        "mean_confidence": float(predictions.confidence.mean()),
        "cluster_sizes": evaluation.cluster_sizes(predictions).tolist(),
        "warnings": evaluation.collapse_warnings(predictions),
    }


def evaluation_rows(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """An evaluation in full, as rows of a table."""
    rows = [("images", f"{told['images']:,} in {told['clusters']} clusters")]
    if told["scores"] is None:
        rows.append(("scores", "none: the images have no labels"))
    sizes = "  ".join(f"{cluster}: {size:,}" for cluster, size in enumerate(told["cluster_sizes"]))
    return [*rows, *(("sizes", sizes) if name == "sizes" else (name, said) for name, said in score_lines(told))]


def score_lines(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """An evaluation as rows of a table."""
    rows = []
    if told["scores"]:
        said = "  ".join(f"{name.upper()} {100 * value:.1f}" for name, value in told["scores"].items())
        rows.append(("scores", f"{said}  (in %, on {told['scored_on']})"))
    if told["agreement"]:
        parts = {key: told["agreement"][key] for key in ("must_link", "cannot_link", "balanced")}
        said = ", ".join(f"{k.replace('_', '-')} {v:.3f}" for k, v in parts.items() if v is not None)
        rows.append(("agreement", f"{said}  (on {told['pairs']:,} pairs)"))
    sizes = told["cluster_sizes"]
    rows.append(("sizes", f"{min(sizes):,} to {max(sizes):,} images in a cluster"))
    return rows + [("warning", text) for text in told["warnings"]]


def write_run_report(
    run: Path | str,
    source: Path | str | None = None,
    *,
    pictures: Path | str | None = None,
    reporter: Reporter | None = None,
) -> Path:
    """Write report.html anew from a run folder and its images, or other images."""
    from constraintmatch.evaluation.report import check_run, write_report
    from constraintmatch.models.cluster_model import model_folder

    run, reporter = Path(run), reporter or Quiet()
    check_run(run)
    model_folder(run)
    record = _data_record(run / "run.json")
    place = str(source) if source is not None else record.get("source")
    if place is None:
        raise InputError(
            f"{run}: the run does not say where its images are; name them: constraintmatch report {run} DATA"
        )
    check_target(run / "report.html")
    data, predictions = predict_images(
        run,
        place,
        split=record.get("split") or "train",
        data_dir=record.get("data_dir"),
        class_folders=record.get("class_folders", "auto"),
        pictures=pictures or (record.get("pictures") if source is None else None),
        reporter=reporter,
    )
    same = data.images.fingerprint() == record.get("fingerprint")
    if not same:
        reporter.say(f"{place}: not the images of the run, or changed since; the report leaves its pairs out")
    pairs = run / "pairs.csv"
    constraints = Constraints.read(pairs, names=data.images.names) if same and pairs.is_file() else None
    return write_report(run, data.images, predictions, constraints=constraints)


def _data_record(file: Path) -> dict[str, Any]:
    """Where a run's images came from; empty where it does not say."""
    record = read_json(file)
    for key in ("request", "data"):
        record = record.get(key) if isinstance(record, dict) else None
    return record if isinstance(record, dict) else {}


# Pretraining


def pretrain_model(
    request: Train,
    stages: Sequence[str] = (),
    recipe: Mapping[str, Mapping[str, Any]] | None = None,
    reporter: Reporter | None = None,
    *,
    chain: str | None = None,
    pretext: str | None = None,
) -> Path:
    """The full self-supervised start; goes on where an earlier call stopped, and leaves OUT/model.

    No `stages`: those of the chain; no chain: the paper's for its data sets, the stronger one for others. `pretext`
    takes the place of theirs. `recipe` has the settings of each stage.
    """
    from constraintmatch.methods import Context
    from constraintmatch.models.cluster_model import save_model
    from constraintmatch.pipeline.plan import plan_pretraining
    from constraintmatch.pipeline.recipes import OWN_CHAIN, chain_stages, with_pretext
    from constraintmatch.pipeline.train import pretrain, rehearse_stages
    from constraintmatch.training.loop import Interrupted

    chosen = stages or chain_stages(chain or ("scan" if request.data in DATASETS else OWN_CHAIN))
    chosen = with_pretext(chosen, pretext) if pretext else chosen
    assert request.out is not None
    reporter = reporter or Quiet()
    plan = plan_pretraining(request, reporter)
    data = plan.data
    if data.images.embedded and not (stages or chain or pretext):
        chosen = plan.stages  # features are there: clusters are all that is missing
    if idle := [stage for stage in recipe or {} if stage not in chosen]:
        raise InputError(
            f"there are settings of {idle[0]}, which does not run; the stages are {', '.join(chosen)} "
            "(--chain, --stages or --pretext choose others)"
        )
    context = Context(request.out, reporter=reporter, held_out=data.held_out, data=data.record)
    how: dict[str, Any] = {"stages": chosen, "recipe": recipe or {}, "settings": request.settings, "views": plan.views}
    rehearse_stages(plan.model, data.images, plan.clusters, **how)
    try:
        model = pretrain(plan.model, data.images, plan.clusters, context=context, **how)
    except Interrupted as stop:
        raise Interrupted(f"{stop}; run the same command again to go on from there") from None
    save_model(model, request.out / "model")
    return request.out / "model"
