"""Commands that make models: train, pretrain, import-scan, join, demo."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from constraintmatch.cli.shared import (
    DATA,
    Backbone,
    Channels,
    Clusters,
    Columns,
    DataDir,
    Device,
    Flip,
    Labels,
    Pictures,
    Pretrained,
    QuietFlag,
    Side,
    Source,
    Split,
    Strict,
    Without,
    app,
    class_folders,
    example,
    guarded,
    option,
    print_rows,
    reporter,
    words,
)
from constraintmatch.flags import STAGES, GroupedHelp, add_flags, method_flags, methods, settings_flags, stage_flags

__all__ = ["Conflict"]

METHOD = f"One of {', '.join(name for name in methods() if name not in STAGES)}. (constraintmatch)"


class Conflict(StrEnum):
    """What to do with contradictory pairs."""

    error = "error"
    drop = "drop"
    keep = "keep"


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch train photos --pairs pairs.csv \\",
        "  --clusters 12 --out runs/photos",
        "constraintmatch train --resume --out runs/photos",
    ),
)
@guarded
@add_flags(arguments=method_flags(), settings=settings_flags())
def train(
    data: Annotated[str | None, typer.Argument(metavar="DATA", help=DATA)] = None,
    *,
    pairs: Annotated[Path | None, option("The pairs: left,right,link as CSV, Parquet or JSON lines.")] = None,
    clusters: Clusters = None,
    out: Annotated[Path | None, option("The run folder. (runs/ and the name of DATA; a new one each time)")] = None,
    method: Annotated[str | None, option(METHOD)] = None,
    model: Annotated[Path | None, option("Model or run folder to begin with. (makes a short start)")] = None,
    backbone: Backbone = None,
    pretrained: Pretrained = False,
    resume: Annotated[bool, option("Continue the run in --out.", "--resume")] = False,
    from_run: Annotated[Path | None, option("Repeat the choices of a run.json; flags given here win.")] = None,
    quiet: QuietFlag = False,
    columns: Columns = None,
    on_conflict: Annotated[
        Conflict | None, option("What to do with contradictions: error, drop, keep. (drop)", panel="Pairs")
    ] = None,
    close: Annotated[
        bool, option("Add the pairs that they imply, or not. (no)", "--close/--no-close", panel="Pairs")
    ] = False,
    holdout_pairs: Annotated[float, option("Share set aside to judge the model by. (0)", panel="Pairs")] = 0.0,
    side: Side = None,
    channels: Channels = None,
    test: Annotated[str | None, option("Held-out images, or a data set, for scores.", panel="Images")] = None,
    data_dir: DataDir = None,
    labels: Labels = None,
    strict: Strict = False,
    pictures: Pictures = None,
    flip: Flip = None,
    without: Without = "",
    arguments: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Train a clustering model on images and pairs.

    Without --model it first makes a short self-supervised start of its own. The run folder gets the model,
    clusters.csv, evaluation.json and report.html. A data set of the paper has its own sizes and rates.
    """
    from constraintmatch import workflow
    from constraintmatch.planning import Train

    request = Train(
        data=data,
        pairs=pairs,
        clusters=clusters,
        out=out,
        method=method,
        model=model,
        backbone=backbone,
        pretrained=pretrained,
        side=side,
        channels=channels,
        data_dir=data_dir,
        test=test,
        class_folders=class_folders(labels),
        columns=columns,
        on_conflict=None if on_conflict is None else on_conflict.value,
        close=close,
        holdout_pairs=holdout_pairs,
        flip=flip,
        without=words(without),
        strict=strict,
        pictures=pictures,
        resume=resume,
        from_run=from_run,
        arguments=arguments,
        settings=settings,
    )
    print_rows(workflow.train(request, reporter(quiet)).lines())


STAGE_SETTINGS = (
    "seed device bf16 channels_last compile cuda_graph log_every evaluate_every checkpoint_every tensorboard"
)


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch pretrain photos --clusters 12 \\",
        "  --out starts/photos",
        "constraintmatch train photos --pairs pairs.csv \\",
        "  --model starts/photos --out runs/photos",
    ),
)
@guarded
@add_flags(arguments=stage_flags(), settings=settings_flags(STAGE_SETTINGS.split()))
def pretrain(
    data: Source,
    *,
    out: Annotated[Path, option("Folder for the stages and for the model they leave.")],
    clusters: Clusters = None,
    chain: Annotated[
        str | None,
        option(
            "scan: simclr,scan,self_label, as the paper; byol: byol,scan,self_label,linear_scan; "
            "own: byol,linear_scan,neighbour_label,linear_scan; short: simclr,linear_scan. "
            "(scan for the paper's data sets, else own)"
        ),
    ] = None,
    stages: Annotated[str, option(f"Instead of a chain: some of {', '.join(STAGES)}.")] = "",
    pretext: Annotated[str | None, option("What features are learnt by: simclr, byol. (as in the chain)")] = None,
    backbone: Backbone = None,
    pretrained: Pretrained = False,
    quiet: QuietFlag = False,
    side: Side = None,
    channels: Channels = None,
    data_dir: DataDir = None,
    labels: Labels = None,
    strict: Strict = False,
    flip: Flip = None,
    without: Without = "",
    arguments: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Make a full self-supervised start: a pretext task, clusters, self-labelling.

    The same command again goes on where it stopped.
    """
    from constraintmatch import workflow
    from constraintmatch.planning import Train

    request = Train(
        data=data,
        clusters=clusters,
        out=out,
        backbone=backbone,
        pretrained=pretrained,
        side=side,
        channels=channels,
        data_dir=data_dir,
        class_folders=class_folders(labels),
        flip=flip,
        without=words(without),
        strict=strict,
        settings=settings,
    )
    model = workflow.pretrain_model(request, words(stages), arguments, reporter(quiet), chain=chain, pretext=pretext)
    following = f"constraintmatch train {shlex.quote(data)} --pairs pairs.csv --model {shlex.quote(str(out))}"
    print_rows([("model", str(model)), ("next", following)])


@app.command(
    cls=GroupedHelp,
    epilog=example("constraintmatch import-scan scan.pth.tar \\", "  --data cifar10 --out starts/c10"),
)
@guarded
def import_scan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The checkpoint. Nothing in it is run.")],
    data: Annotated[str, option("Its data set: cifar10, cifar100-20, stl10, imagenet10, imagenet-dogs.")],
    out: Annotated[Path, option("New model folder.")],
    head: Annotated[int | None, option("Which of several cluster heads. (the file's best, or 0)")] = None,
    half: Annotated[bool, option("Keep the weights in half precision.", "--half")] = False,
) -> None:
    """Turn a checkpoint of SCAN's code into a model folder.

    It may be of any stage; after SimCLR alone it has no clusters yet.
    """
    from constraintmatch import scan_import

    config = scan_import.import_scan(file, data, out, head=head, half=half).config
    clusters = f"{config.n_clusters:,}" if config.n_clusters else "none yet"
    print_rows([("model", f"{out} ({config.backbone})"), ("clusters", clusters)])


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch join starts/photos \\",
        "  starts/photos/simclr \\",
        "  --data photos --out starts/joined",
    ),
)
@guarded
def join(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL", help="Two model or run folders, or more.")],
    data: Annotated[str, typer.Option("--data", metavar="DATA", help=DATA)],
    out: Annotated[Path, option("New model folder.")],
    half: Annotated[bool, option("Keep the weights in half precision.", "--half")] = False,
    device: Device = None,
    quiet: QuietFlag = False,
    split: Split = None,
    data_dir: DataDir = None,
    strict: Strict = False,
) -> None:
    """Join trained networks into one model.

    Networks that were trained differently see different things; side by side they need fewer answers. The model has the
    clusters of the first one until answers tell its head (loop, annotate) or a training changes it. It takes as long as
    all of them together. DATA are images like those they were trained on; labels are not looked at.
    """
    from constraintmatch.joining import join_folders

    config = join_folders(
        models,
        data,
        out,
        split=split,
        data_dir=data_dir,
        strict=strict,
        device=device,
        half=half,
        reporter=reporter(quiet),
    ).config
    clusters = f"{config.n_clusters:,}" if config.n_clusters else "none yet"
    print_rows([("model", f"{out} ({config.backbone})"), ("clusters", clusters)])


@app.command(cls=GroupedHelp, epilog=example("constraintmatch demo --out demo"))
@guarded
def demo(
    out: Annotated[Path, option("Folder for the runs and the report. (demo)")] = Path("demo"),
    seed: Annotated[int, option("Seed of everything random. (0)")] = 0,
    quiet: QuietFlag = False,
) -> None:
    """Show what pairs bring, on small digits.

    Trains on scikit-learn's digits from the same start and the same pairs, without and with ConstraintMatch.
    """
    from constraintmatch.demo import run_demo

    typer.echo(run_demo(out, seed=seed, reporter=reporter(quiet)))
