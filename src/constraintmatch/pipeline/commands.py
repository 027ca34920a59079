"""What the commands do with a model: predict, evaluate, report, sort; and what comes before and after a training."""

import csv
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from constraintmatch._internal import files
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import QUIET, Reporter, watched
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation import metrics as evaluation
from constraintmatch.evaluation.metrics import Predictions
from constraintmatch.evaluation.report import check_run, write_report
from constraintmatch.methods import Context, Trained
from constraintmatch.methods.preparation import check_images
from constraintmatch.models.cluster_model import ClusterModel, load_model, model_folder, save_model
from constraintmatch.pipeline.config import Recipe, chain_stages, check_neighbours
from constraintmatch.pipeline.embedding import OWN, encode
from constraintmatch.pipeline.plan import Plan, Train, plan_pretraining
from constraintmatch.pipeline.sources import Data, open_at, read_pairs
from constraintmatch.pipeline.train import pretrain, rehearse_stages
from constraintmatch.training import ranks
from constraintmatch.training.loop import Interrupted, choose_device
from constraintmatch.training.run_folder import read_log

Rows = list[tuple[str, str]]  # of a table that a command prints
UNSURE = 0.5  # the confidence below which an image is named as uncertain

# A trained model


def predict_images(
    model: Path | str, source: Path | str, *, device: str | None = None, reporter: Reporter = QUIET, **how: Any
) -> tuple[Data, Predictions]:
    """The images, opened at the model's size, and their clusters; the model is a model folder or a run folder.

    `how` is for `open_data`, here and below.
    """
    place = choose_device(device)
    network = load_model(model)
    if network.config.n_clusters == 0:
        raise InputError(f"{model}: has no clusters yet (it comes from a pretext task); train it first")
    data = open_at(source, (network.config.side, network.config.channels), "test", reporter=reporter, **how)
    check_images(network, data.images)
    if network.is_encoder:
        seen = encode(network, data.images, device=place, reporter=reporter)
        return data, evaluation.predict(network, seen, device=place)
    with watched(reporter, "predicting", len(data.images)) as progress:
        return data, evaluation.predict(network, data.images, device=place, progress=progress)


def write_clusters(
    path: Path | str, names: Sequence[str], predictions: Predictions, coarse: Mapping[int, int] | None = None
) -> None:
    """Write `name,cluster,confidence`, atomically; with the coarse cluster of each cluster, `coarse` too."""
    clusters = predictions.clusters.tolist()
    columns = [names, clusters, [f"{value:.6f}" for value in predictions.confidence.tolist()]]
    if coarse is not None:
        columns.append([coarse.get(cluster, "") for cluster in clusters])

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("name", "cluster", "confidence", "coarse")[: len(columns)])
            writer.writerows(zip(*columns, strict=True))

    files.write_atomically(path, write)


def coarse_clusters(run: Path | str, within: Path | str) -> dict[int, int]:
    """The coarse cluster of each cluster of a run: the one in which the run `within` has most of its images."""
    fine, coarse = _placed(Path(run)), _placed(Path(within))
    votes = Counter((fine[name], coarse[name]) for name in fine.keys() & coarse.keys())
    if not votes:
        raise InputError(f"none of its images are those of {run}", within, "train both on the same images")
    rising = sorted(votes, key=lambda pair: (votes[pair], -pair[1]))
    return dict(rising)  # the last of a cluster counts


def _placed(run: Path) -> dict[str, int]:
    """The cluster of each image that a training, or a loop, wrote next to its model."""
    path = (run.parent if run.name == "model" else run) / "clusters.csv"
    if not path.is_file():
        raise InputError("has no clusters.csv", run, "give the folder of a training, or of a loop")
    with files.read_errors(path), path.open(encoding="utf-8", newline="") as file:
        try:
            return {row["name"]: int(row["cluster"]) for row in csv.DictReader(file)}
        except (KeyError, TypeError, ValueError, csv.Error):
            raise InputError("not a file of name,cluster,confidence", path, "train again") from None


def evaluate_model(
    model: Path | str, source: Path | str, *, pairs: Path | str | None = None, columns: str | None = None, **how: Any
) -> dict[str, Any]:
    """How good the model's clusters of the images are: scores with labels, agreement with pairs, signs of collapse."""
    if pairs is not None and not Path(pairs).exists():
        raise InputError(f"{pairs}: no such file")
    data, predictions = predict_images(model, source, **how)
    constraints = None if pairs is None else read_pairs(pairs, data.images, columns=columns)
    return evaluate_images(data.images, predictions, constraints)


def evaluate_images(
    images: ImageSet, predictions: Predictions, constraints: Constraints | None = None
) -> dict[str, Any]:
    """Predictions judged: plain values that JSON can hold."""
    return {
        "images": len(images),
        "clusters": predictions.n_clusters,
        "scores": None if images.labels is None else evaluation.scores(images.labels, predictions),
        "scored_on": None if images.labels is None else f"{len(images):,} images",
        "agreement": None if constraints is None else evaluation.agreement(constraints, predictions),
        "pairs": None if constraints is None else len(constraints),
        "mean_confidence": float(predictions.confidence.mean()),
        "cluster_sizes": evaluation.cluster_sizes(predictions).tolist(),
        "warnings": evaluation.collapse_warnings(predictions),
    }


def evaluation_rows(found: Mapping[str, Any], *, short: bool = False) -> Rows:
    """An evaluation as rows of a table; a short one has the range of the sizes, and no row without a number."""
    rows = [] if short else [("images", f"{found['images']:,} in {found['clusters']} clusters")]
    if found["scores"]:
        said = "  ".join(f"{name.upper()} {100 * value:.1f}" for name, value in found["scores"].items())
        rows.append(("scores", f"{said}  (in %, on {found['scored_on']})"))
    elif not short:
        rows.append(("scores", "none: the images have no labels"))
    if found["agreement"] and found["pairs"]:
        parts = {key: found["agreement"][key] for key in ("must_link", "cannot_link", "balanced")}
        said = ", ".join(f"{k.replace('_', '-')} {v:.3f}" for k, v in parts.items() if v is not None)
        rows.append(("agreement", f"{said}  (on {found['pairs']:,} pairs)"))
    sizes = found["cluster_sizes"]
    each = "  ".join(f"{cluster}: {size:,}" for cluster, size in enumerate(sizes))
    rows.append(("sizes", f"{min(sizes):,} to {max(sizes):,} images in a cluster" if short else each))
    return rows + [("warning", text) for text in found["warnings"]]


def write_run_report(
    run: Path | str, source: Path | str | None = None, *, pictures: Path | str | None = None, reporter: Reporter = QUIET
) -> Path:
    """Write report.html again from a run folder and its images, or other images."""
    run = Path(run)
    check_run(run)
    model_folder(run)
    record = files.read_json(run / "run.json")
    for key in ("request", "data"):
        record = record.get(key) if isinstance(record, dict) else None
    record = record if isinstance(record, dict) else {}
    place = str(source) if source is not None else record.get("source")
    if place is None:
        fix = f"name them: constraintmatch report {run} DATA"
        raise InputError("the run does not say where its images are", run, fix)
    files.check_target(run / "report.html")
    how = {"split": record.get("split") or "train", "data_dir": record.get("data_dir")}
    how["class_folders"] = record.get("class_folders", "auto")
    how["pictures"] = pictures or (record.get("pictures") if source is None else None)
    data, predictions = predict_images(run, place, reporter=reporter, **how)
    same = data.images.fingerprint() == record.get("fingerprint")
    if not same:
        reporter.say(f"{place}: not the images of the run, or changed since; the report leaves its pairs out")
    pairs = run / "pairs.csv"
    constraints = Constraints.read(pairs, names=data.images.names) if same and pairs.is_file() else None
    return write_report(run, data.images, predictions, constraints=constraints)


# Images in one folder per cluster


def check_sort_folder(folder: Path, source: Path | str, out: Path | None = None) -> None:
    """An InputError unless the folder is new or empty, can be written, and is apart from `out` and from the images.

    Among the images, the sorted ones would be counted twice. Links of an earlier sorting count as nothing.
    """
    if folder.exists() and not (folder.is_dir() and all(map(_is_sorted, folder.iterdir()))):
        raise InputError(f"{folder}: not an empty folder; choose another --sort-into")
    files.check_folder(folder)
    place, other = folder.resolve(), None if out is None else out.resolve()
    if other is not None and (place in (other, *other.parents) or other in place.parents):
        raise InputError(f"{out}: is in {folder} or above it, and only sorted images go there; choose another --out")
    if str(source) not in DATASETS and Path(source).resolve() in (place, *place.parents):
        raise InputError(f"{folder}: is among the images, which would be found twice; choose another --sort-into")


def sort_images(data: Data, predictions: Predictions, folder: Path, *, link: bool = True) -> None:
    """Put each image into a folder for its cluster: as a link, as a copy, or (from arrays) as a PNG; all or none."""
    check_sort_folder(folder, data.record["source"])
    data.images.to_look_at()
    for earlier in folder.glob("cluster-*/"):
        shutil.rmtree(earlier)
    width, taken = len(str(predictions.n_clusters - 1)), set[str]()
    try:
        for row, (name, cluster) in enumerate(zip(data.images.names, predictions.clusters.tolist(), strict=True)):
            flat = name.replace("/", "__").replace(os.sep, "__") + ("" if data.files else ".png")
            target = folder / _free_name(f"cluster-{cluster:0{width}d}/{flat}", taken)
            target.parent.mkdir(parents=True, exist_ok=True)
            _place_image(data, row, target, link)
    except BaseException as error:
        for begun in folder.glob("cluster-*/"):
            shutil.rmtree(begun, ignore_errors=True)
        if isinstance(error, OSError) and (found := files.write_error(error, folder)):
            raise found from None
        raise


def _is_sorted(place: Path) -> bool:
    """Whether this is a folder of a cluster with links alone."""
    return place.name.startswith("cluster-") and place.is_dir() and all(entry.is_symlink() for entry in place.iterdir())


def _free_name(file: str, taken: set[str]) -> str:
    """The name, with a number before its suffix where it is taken; case is ignored, as some disks do."""
    stem, suffix = os.path.splitext(file)  # noqa: PTH122 (the folder must stay in the stem)
    number, free = 1, file
    while free.casefold() in taken:
        number += 1
        free = f"{stem}-{number}{suffix}"
    taken.add(free.casefold())
    return free


def _place_image(data: Data, row: int, target: Path, link: bool) -> None:
    """Put one image at `target`: a link to its file or a copy of it; an image of an array becomes a PNG."""
    if data.files is None:
        from PIL import Image

        pixels = np.asarray(data.images.images[row])
        Image.fromarray(pixels[..., 0] if data.images.channels == 1 else pixels).save(target)
        return
    source = data.files / data.images.names[row]
    if not link:
        shutil.copy2(source, target)
        return
    try:
        target.symlink_to(source)
    except (NotImplementedError, PermissionError) as error:  # Windows without the right to make links
        raise InputError(f"{target}: no links can be made there ({error}); use --copy") from None


# Trainings


def finish_training(plan: Plan, trained: Trained) -> Rows:
    """Write what the run found: clusters.csv, evaluation.json and, last, the report; its summary as rows of a table."""
    model, images, held_out, out = trained.model, plan.data.images, plan.data.held_out, plan.context.out
    assert out is not None
    device = choose_device(plan.config.settings.device)
    predictions = evaluation.predict(model, plan.seen, device=device)
    found = evaluate_images(images, predictions, plan.held_out_pairs)
    if held_out is not None and held_out.labels is not None:
        scores = evaluation.scores(held_out.labels, evaluation.predict(model, held_out, device=device))
        found |= {"scores": scores, "scored_on": f"{len(held_out):,} held-out images"}
    found["skipped"] = [{"name": skip.name, "reason": skip.reason} for skip in images.skipped]
    asked = plan.config.arguments
    if found["warnings"] and asked.get("recipe") == "paper" and not asked.get("error_rate"):
        found["warnings"].append("The paper's recipe is not safe with wrong pairs; leave --recipe out.")
    found["verdict"] = _verdict(trained.log, images, out)
    write_clusters(out / "clusters.csv", images.names, predictions)
    files.write_json(out / "evaluation.json", found)
    report = write_report(out, images, predictions, constraints=plan.pairs)
    kept = []
    if verdict := found["verdict"]:
        kept = [("kept", f"{verdict['kept']}: {verdict['why']}")]
        if n := verdict["doubtful"]:
            kept.append(("look again", f"{n} pairs look wrong: annotate DATA --again {out / 'doubtful.csv'}"))
    return [
        ("clusters", f"{out / 'clusters.csv'} ({found['images']:,} images in {found['clusters']} clusters)"),
        ("model", str(out / "model")),
        ("report", str(report)),
        *kept,
        *evaluation_rows(found, short=True),
        ("next", f"constraintmatch predict {shlex.quote(str(out))} NEW_IMAGES --out new.csv"),
    ]


def finish_loop(
    data: Data,
    seen: ImageSet,
    predictions: Predictions,
    pairs: Constraints,
    out: Path,
    run: Path | None,
    sort: Path | None = None,
) -> Rows:
    """Write what a question loop found: clusters.csv, report.html, the sorted images; its summary as rows of a table.

    `seen` is what was learned from, and `run` the folder of the round that made the model.
    """
    images, found = data.images, evaluate_images(data.images, predictions, pairs)
    write_clusters(out / "clusters.csv", images.names, predictions)
    rows = [("clusters", f"{out / 'clusters.csv'} ({found['clusters']:,} clusters)")]
    if run is not None:
        shown = replace(seen, pictures=images) if seen.shown is None and not images.embedded else seen
        rows.append(("report", str(write_report(run, shown, predictions, constraints=pairs, out=out))))
        if (log := read_log(run)) and log[-1].get("kind") == "verdict":
            rows.append(("kept", f"{log[-1]['kept']}: {log[-1]['why']}"))
    if sort is not None:
        sort_images(data, predictions, sort)
        rows.append(("sorted", str(sort)))
    rows += evaluation_rows(found | {"scores": None}, short=True)
    if n := int((predictions.confidence < UNSURE).sum()):
        least = np.argsort(predictions.confidence, kind="stable")[: min(n, 3)]
        names = ", ".join(images.names[row] for row in least)
        said = f"{n:,} images are in their cluster with less than 50 %: {names}"
        rows.append(("unsure", said + (" …" if n > 3 else "")))
    return rows


def score_line(data: Data, model: ClusterModel) -> str:
    """ACC, NMI and ARI in %, of the images of --test or of those that were asked about; "" without labels."""
    tested = data.held_out is not None and data.held_out.labels is not None
    target = data.held_out if tested and data.held_out is not None else data.images
    if target.labels is None or not model.config.n_clusters:
        return ""
    seen = encode(model, target) if model.is_encoder and not target.embedded else target
    found = evaluation.scores(target.labels, evaluation.predict(model, seen))
    where = "held-out images" if tested else "images that it was trained on; --test names others"
    values = ", ".join(f"{key.upper()} {100 * found[key]:.1f}" for key in ("acc", "nmi", "ari"))
    return f"{values} (in %, on {len(target):,} {where})"


def _verdict(log: Sequence[Mapping[str, Any]], images: ImageSet, out: Path) -> dict[str, Any] | None:
    """What the safe recipe kept and why; the pairs that look wrong are written to doubtful.csv."""
    if log[-1].get("kind") != "verdict":
        return None
    (out / "doubtful.csv").unlink(missing_ok=True)
    if found := log[-1]["doubtful"]:
        columns = ([pair[key] for pair in found] for key in ("left", "right", "link"))
        Constraints.from_arrays(*columns, n_images=len(images)).write(out / "doubtful.csv", names=images.names)
    verdict = {key: log[-1][key] for key in ("kept", "why", "wrong_must_links", "wrong_cannot_links")}
    return verdict | {"doubtful": len(found)}


def pretrain_model(
    request: Train,
    stages: Sequence[str],
    recipe: Recipe,
    reporter: Reporter = QUIET,
    *,
    chain: str | None = None,
    pretext: str | None = None,
) -> Path:
    """The full self-supervised start; goes on where an earlier call stopped, and leaves OUT/model.

    No `stages`: those of the chain; no chain: the paper's for its data sets, the stronger one for others. `pretext`
    takes the place of theirs. `recipe` has the settings of each stage.
    """
    chosen = chain_stages(chain or ("scan" if request.data in DATASETS else "own"), stages, pretext)
    assert request.out is not None
    with ranks.in_turn():
        plan = plan_pretraining(replace(request, start=OWN), reporter)
    data, config = plan.data, plan.config
    if data.images.embedded and not (stages or chain or pretext):
        chosen = config.stages  # features are there: only clusters are missing
    if idle := [stage for stage in recipe if stage not in chosen]:
        runs = f"the stages are {', '.join(chosen)} (--chain, --stages or --pretext choose others)"
        raise InputError(f"there are settings of {idle[0]}, which does not run; {runs}")
    for stage, options in recipe.items():
        check_neighbours(stage, options, len(data.images))
    context = Context(request.out, reporter=reporter, held_out=data.held_out, data=data.record)
    how: dict[str, Any] = {"stages": chosen, "recipe": recipe, "settings": request.settings, "views": config.views}
    rehearse_stages(config.start, data.images, config.n_clusters, **how)
    try:
        with ranks.together():
            model = pretrain(config.start, data.images, config.n_clusters, context=context, **how)
    except Interrupted as stop:
        raise Interrupted(f"{stop}; run the same command again to go on from there") from None
    if ranks.first():
        save_model(model, request.out / "model")
    return request.out / "model"
