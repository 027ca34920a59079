"""Look and reuse: report, evaluate, embed, join."""

from pathlib import Path
from typing import Annotated, Any

import typer

from constraintmatch._internal.files import check_target, write_json
from constraintmatch.cli.shared import (
    Model,
    QuietFlag,
    Source,
    about,
    add_flags,
    app,
    flag,
    option,
    print_rows,
    reporter,
    shared,
)

__all__ = ["PANEL"]

PANEL = "Look and reuse"


@app.command(**about(PANEL, "constraintmatch report runs/photos"))
@add_flags(how=shared("pictures"))
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="Other images. (the run's own)")] = None,
    *,
    how: dict[str, Any],
    quiet: QuietFlag = False,
) -> None:
    """Write report.html of a run again."""
    from constraintmatch.pipeline import commands

    print_rows([("report", str(commands.write_run_report(run, data, **how, reporter=reporter(quiet))))])


@app.command(
    **about(
        PANEL,
        "constraintmatch evaluate runs/photos labelled",
        "constraintmatch evaluate runs/c10 cifar10 \\",
        "  --data-dir data --json scores.json",
    )
)
@add_flags(
    how={
        "pairs": flag(Path, "Pairs that were not trained on."),
        **shared("columns", "device", "split", "data_dir", "class_folders"),
    }
)
def evaluate(
    model: Model,
    data: Source,
    *,
    how: dict[str, Any],
    json: Annotated[Path | None, option("Write the numbers to this file too.")] = None,
    quiet: QuietFlag = False,
) -> None:
    """Score a model on images.

    With labels: accuracy (Hungarian matching), NMI, ARI and calibration error. With --pairs: the share of must-links
    and of cannot-links it keeps. Always: cluster sizes and warnings of collapse.
    """
    from constraintmatch.pipeline import commands

    if json is not None:
        check_target(json)
    found = commands.evaluate_model(model, data, **how, reporter=reporter(quiet))
    if json is not None:
        write_json(json, found)
    print_rows(commands.evaluation_rows(found))


@app.command(
    **about(
        PANEL,
        "constraintmatch embed timm:resnet50 photos \\",
        "  --out photos.npz",
        "constraintmatch loop photos.npz --pictures photos",
    )
)
@add_flags(
    how={
        "side": flag(int, "Pixels a side to resize images to. (fits MODEL)", panel="Images"),
        **shared("device", "split", "data_dir", "class_folders", "strict"),
    }
)
def embed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or timm:NAME.")],
    data: Source,
    *,
    out: Annotated[Path, option("The .npz file: embeddings, names, labels. (embeddings.npz)")] = Path("embeddings.npz"),
    how: dict[str, Any],
    quiet: QuietFlag = False,
) -> None:
    """Turn images into embeddings: seconds for all that follows.

    Every other command takes the embeddings in the place of images. timm:NAME fetches a pretrained network and takes
    images of the size that it was made for.
    """
    from constraintmatch.pipeline import embedding

    made = embedding.embed_images(model, data, out, **how, reporter=reporter(quiet))
    print_rows([("embeddings", f"{out} ({len(made):,} of {made.shape[1]:,} numbers)")])


@app.command(**about(PANEL, "constraintmatch join starts/photos starts/photos/byol \\", "  photos --out starts/joined"))
@add_flags(
    how={
        "half": flag(bool, "Keep the weights in half precision.", "--half"),
        **shared("device", "split", "data_dir", "strict"),
    }
)
def join(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL", help="Two model or run folders, or more.")],
    data: Source,
    *,
    out: Annotated[Path, option("New model folder.")],
    how: dict[str, Any],
    quiet: QuietFlag = False,
) -> None:
    """Join trained networks into one model.

    Networks that were trained differently see different things; together they need fewer answers. The model has the
    clusters of the first one until answers (loop, annotate) or a training change them. It takes as long as all of them
    together. DATA are images like those they were trained on; labels are not used.
    """
    from constraintmatch.pipeline.joining import join_folders

    config = join_folders(models, data, out, **how, reporter=reporter(quiet)).config
    clusters = f"{config.n_clusters:,}" if config.n_clusters else "none yet"
    print_rows([("model", f"{out} ({config.backbone})"), ("clusters", clusters)])
