"""Commands that look at images, pairs and models: predict, embed, evaluate, sample, check, report."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from constraintmatch.cli.shared import (
    DATA,
    Columns,
    DataDir,
    Device,
    Labels,
    Model,
    Pictures,
    QuietFlag,
    Side,
    Source,
    Split,
    Strict,
    app,
    class_folders,
    example,
    guarded,
    option,
    print_rows,
    reporter,
)
from constraintmatch.files import check_target, write_json
from constraintmatch.flags import GroupedHelp
from constraintmatch.progress import print_line

__all__ = ["Kind"]


class Kind(StrEnum):
    """The two kinds of constraints."""

    must_link = "must-link"
    cannot_link = "cannot-link"


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch predict runs/photos new-photos \\",
        "  --out clusters.csv --sort-into sorted",
    ),
)
@guarded
def predict(
    model: Model,
    data: Source,
    out: Annotated[Path, option("File for name,cluster,confidence. (clusters.csv)")] = Path("clusters.csv"),
    sort_into: Annotated[Path | None, option("New folder for one folder of images per cluster.")] = None,
    link: Annotated[bool, option("Sorted images are links or copies. (links)", "--link/--copy")] = True,
    device: Device = None,
    quiet: QuietFlag = False,
    split: Split = None,
    data_dir: DataDir = None,
    strict: Strict = False,
    pictures: Pictures = None,
) -> None:
    """Place images in the clusters of a trained model."""
    from constraintmatch import sorting, workflow

    check_target(out)
    if sort_into is not None:
        sorting.check_sort_folder(sort_into, data, out)
    opened, found = workflow.predict_images(
        model,
        data,
        split=split,
        data_dir=data_dir,
        strict=strict,
        pictures=pictures,
        device=device,
        reporter=reporter(quiet),
    )
    workflow.write_clusters(out, opened.images.names, found)
    rows = [("clusters", f"{out} ({len(found):,} images in {found.n_clusters} clusters)")]
    if sort_into is not None:
        sorting.sort_images(opened, found, sort_into, link=link)
        rows.append(("sorted", str(sort_into)))
    print_rows(rows)


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch embed timm:resnet50 photos \\",
        "  --out photos.npz",
        "constraintmatch loop photos.npz --pictures photos",
    ),
)
@guarded
def embed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or timm:NAME.")],
    data: Source,
    out: Annotated[Path, option("The .npz file: embeddings, names, labels. (embeddings.npz)")] = Path("embeddings.npz"),
    device: Device = None,
    quiet: QuietFlag = False,
    side: Side = None,
    split: Split = None,
    data_dir: DataDir = None,
    labels: Labels = None,
    strict: Strict = False,
) -> None:
    """Write what a network makes of images.

    With embeddings in the place of images every other command takes seconds: train, predict, loop. timm:NAME fetches a
    pretrained network and takes images of the size that it was made for.
    """
    from constraintmatch import embedding

    made = embedding.embed_images(
        model,
        data,
        out,
        side=side,
        split=split,
        data_dir=data_dir,
        class_folders=class_folders(labels),
        strict=strict,
        device=device,
        reporter=reporter(quiet),
    )
    print_rows([("embeddings", f"{out} ({len(made):,} of {made.shape[1]:,} numbers)")])


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch evaluate runs/photos --data labelled",
        "constraintmatch evaluate runs/c10 --data cifar10 \\",
        "  --data-dir data --json scores.json",
    ),
)
@guarded
def evaluate(
    model: Model,
    data: Annotated[str, typer.Option("--data", metavar="DATA", help=DATA)],
    pairs: Annotated[Path | None, option("Pairs that were not trained on.")] = None,
    json: Annotated[Path | None, option("Write the numbers to this file too.")] = None,
    device: Device = None,
    quiet: QuietFlag = False,
    columns: Columns = None,
    split: Split = None,
    data_dir: DataDir = None,
    labels: Labels = None,
) -> None:
    """Score a model on images.

    With labels: accuracy (Hungarian matching), NMI, ARI and calibration error. With --pairs: the share of must-links
    and of cannot-links it keeps. Always: cluster sizes and warnings of collapse.
    """
    from constraintmatch import workflow

    if json is not None:
        check_target(json)
    told = workflow.evaluate_model(
        model,
        data,
        pairs=pairs,
        columns=columns,
        split=split,
        data_dir=data_dir,
        device=device,
        class_folders=class_folders(labels),
        reporter=reporter(quiet),
    )
    if json is not None:
        write_json(json, told)
    print_rows(workflow.evaluation_rows(told))


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch sample photos-by-class --n 1000 \\",
        "  --seed 0 --out pairs.csv",
    ),
)
@guarded
def sample(
    data: Source,
    n: Annotated[int | None, option("Pairs to draw.", "--n")] = None,
    out: Annotated[Path, option("The pairs file: .csv, .parquet or .jsonl. (pairs.csv)")] = Path("pairs.csv"),
    seed: Annotated[int, option("The same seed draws the same pairs. (0)")] = 0,
    balanced: Annotated[bool, option("Half of them must-links.", "--balanced")] = False,
    per_image: Annotated[int | None, option("Partners for every image, instead of --n.")] = None,
    flip: Annotated[float | None, option("Share of the pairs to turn round: wrong answers. (0)")] = None,
    flip_only: Annotated[Kind | None, option("Turn round only these. (both)")] = None,
    quiet: QuietFlag = False,
    split: Split = None,
    data_dir: DataDir = None,
) -> None:
    """Draw pairs from the labels of images.

    The images lie in class folders, one for each class, or are a data set.
    """
    from constraintmatch import workflow

    drawn = workflow.sample_pairs(
        data,
        out,
        n=n,
        per_image=per_image,
        balanced=balanced,
        seed=seed,
        flip=flip,
        flip_only=flip_only.value if flip_only else None,
        split=split,
        data_dir=data_dir,
        reporter=reporter(quiet),
    )
    kinds = f"{drawn.n_must_links:,} must-links, {drawn.n_cannot_links:,} cannot-links"
    print_rows([("pairs", f"{out} ({len(drawn):,}: {kinds})")])


@app.command(cls=GroupedHelp, epilog=example("constraintmatch check pairs.csv --images photos"))
@guarded
def check(
    pairs: Annotated[Path, typer.Argument(metavar="PAIRS", help="The pairs file.")],
    images: Annotated[str | None, typer.Option("--images", metavar="DATA", help=DATA)] = None,
    columns: Columns = None,
    close: Annotated[bool, option("Count the pairs that these imply.", "--close")] = False,
    quiet: QuietFlag = False,
    split: Split = None,
    data_dir: DataDir = None,
) -> None:
    """Look at a pairs file.

    Shows counts, duplicates, groups of must-links, images without a pair, and contradictions with the chains that prove
    them. The exit code is 2 when there are contradictions.
    """
    from constraintmatch import workflow

    found = workflow.check_pairs(
        pairs, images, columns=columns, close=close, split=split, data_dir=data_dir, reporter=reporter(quiet)
    )
    print_rows(found.lines())
    for text in found.contradictions:
        print_line(f"contradiction: {text}")
    if found.n_contradictions:
        raise typer.Exit(2)


@app.command(cls=GroupedHelp, epilog=example("constraintmatch report runs/photos"))
@guarded
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[str | None, typer.Option("--data", metavar="DATA", help="Other images. (the run's own)")] = None,
    quiet: QuietFlag = False,
    pictures: Pictures = None,
) -> None:
    """Write report.html of a run anew."""
    from constraintmatch import workflow

    print_rows([("report", str(workflow.write_run_report(run, data, pictures=pictures, reporter=reporter(quiet))))])
