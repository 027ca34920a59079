"""The command line: parses, calls `workflow`, prints. Progress goes to standard error, results to standard output."""

import shlex
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from constraintmatch.errors import InputError
from constraintmatch.files import check_target, mend, write_json
from constraintmatch.flags import (
    STAGES,
    GroupedHelp,
    OneLineErrors,
    add_flags,
    method_flags,
    methods,
    settings_flags,
    stage_flags,
)
from constraintmatch.progress import Quiet, Reporter, console_reporter, print_line, say_error

__all__ = ["app", "main"]


app = typer.Typer(
    name="constraintmatch",
    cls=OneLineErrors,
    help="Turn images and a few same-or-different answers into a clustering model that also places new images.",
    epilog="Start here: constraintmatch demo. Help on a command: constraintmatch train --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> None:
    """The entry point `constraintmatch`."""
    app()


# What commands share


class _Conflict(StrEnum):
    """What to do with contradictory pairs."""

    error = "error"
    drop = "drop"
    keep = "keep"


class _Kind(StrEnum):
    """The two kinds of constraints."""

    must_link = "must-link"
    cannot_link = "cannot-link"


def _option(text: str, *names: str, panel: str | None = None) -> Any:
    """An option under a heading of the help; the text says what happens without it."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


DATA = "A folder of images, a .npy or .npz file, or a data set: digits, cifar10, cifar100-20."
Source = Annotated[str, typer.Argument(metavar="DATA", help=DATA)]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder or a run folder.")]
Clusters = Annotated[int | None, _option("How many clusters to find.")]
Columns = Annotated[str | None, _option("Names of its columns: i,j,c_ij. (left,right,link)", panel="Pairs")]
Device = Annotated[str | None, _option("cuda, mps or cpu. (the first that is there)")]
QuietFlag = Annotated[bool, _option("No progress and no remarks.", "--quiet", "-q")]
Split = Annotated[str | None, _option("train, val, test, train+val or train+test of a data set.", panel="Images")]
DataDir = Annotated[Path | None, _option("Where the data set of that name lies.", panel="Images")]
Labels = Annotated[
    bool | None,
    _option("Sub-folders are classes, for scores. (if all images lie in some)", "--labels/--no-labels", panel="Images"),
]
Strict = Annotated[bool, _option("Stop at a file that cannot be read. (skip it)", "--strict", panel="Images")]
Side = Annotated[int | None, _option("Resize to so many pixels a side. (fits the images)", panel="Images")]
Channels = Annotated[int | None, _option("1 for grey, 3 for colour. (fits the images)", panel="Images")]
Flip = Annotated[
    bool | None, _option("A mirrored image means the same, or not. (it does)", "--flip/--no-flip", panel="Images")
]
Without = Annotated[str, _option("Changes that would spoil the images: rotate,solarize.", panel="Images")]
Backbone = Annotated[str | None, _option("tiny, resnet18, resnet34 or timm:NAME. (fits the images)")]
Pretrained = Annotated[bool, _option("Begin with the weights of a timm backbone.", "--pretrained")]
CHAIN = "simclr,scan,self_label"  # the paper's start
METHOD = f"One of {', '.join(name for name in methods() if name not in STAGES)}. (constraintmatch)"


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one line and exit code 2 for what a person can mend, 130 for a stop; bugs show a traceback."""

    @wraps(command)
    def wrapper(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except InputError as error:
            _stop(f"error: {error}", 2)
        except KeyboardInterrupt as stop:
            _stop(str(stop) or "stopped", 130)
        except OSError as error:  # writes that are not atomic: the log
            if (helps := mend(error)) is None:
                raise
            _stop(f"error: {error.filename}: {helps}" if error.filename else f"error: {helps}", 2)

    return wrapper


def _stop(text: str, code: int) -> None:
    raise typer.Exit(say_error(text, code))


def _reporter(quiet: bool) -> Reporter:
    return Quiet() if quiet else console_reporter()


def _class_folders(labels: bool | None) -> bool | Literal["auto"]:
    return "auto" if labels is None else labels


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Two columns: names, and values that wrap beside them in a terminal and stay whole in a pipe."""
    console, rows = Console(), list(rows)
    if not console.is_terminal:
        width = max(len(name) for name, _ in rows)
        typer.echo("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))  # as they are: a path may hold brackets
    console.print(table)


def _example(*lines: str) -> str:
    """An epilog that keeps its lines."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"constraintmatch {version('constraintmatch')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""


# The commands


@app.command(
    cls=GroupedHelp,
    epilog=_example(
        "constraintmatch train photos --pairs pairs.csv \\",
        "  --clusters 12 --out runs/photos",
        "constraintmatch train --resume --out runs/photos",
    ),
)
@_guarded
@add_flags(arguments=method_flags(), settings=settings_flags())
def train(
    data: Annotated[str | None, typer.Argument(metavar="DATA", help=DATA)] = None,
    *,
    pairs: Annotated[Path | None, _option("The pairs: left,right,link as CSV, Parquet or JSON lines.")] = None,
    clusters: Clusters = None,
    out: Annotated[Path | None, _option("The run folder. (runs/ and the name of DATA)")] = None,
    method: Annotated[str | None, _option(METHOD)] = None,
    model: Annotated[Path | None, _option("Model or run folder to begin with. (makes a short start)")] = None,
    backbone: Backbone = None,
    pretrained: Pretrained = False,
    resume: Annotated[bool, _option("Continue the run in --out.", "--resume")] = False,
    from_run: Annotated[Path | None, _option("Repeat the choices of a run.json; flags given here win.")] = None,
    quiet: QuietFlag = False,
    columns: Columns = None,
    on_conflict: Annotated[
        _Conflict, _option("What to do with contradictions. (error)", panel="Pairs")
    ] = _Conflict.error,
    close: Annotated[
        bool, _option("Add the pairs that they imply, or not. (no)", "--close/--no-close", panel="Pairs")
    ] = False,
    holdout_pairs: Annotated[float, _option("Share set aside to judge the model by. (0)", panel="Pairs")] = 0.0,
    side: Side = None,
    channels: Channels = None,
    test: Annotated[str | None, _option("Held-out images, or a data set, for scores.", panel="Images")] = None,
    data_dir: DataDir = None,
    labels: Labels = None,
    strict: Strict = False,
    flip: Flip = None,
    without: Without = "",
    arguments: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Train a clustering model on images and pairs.

    Without --model it first makes a short self-supervised start of its own. The run folder gets the model,
    clusters.csv, evaluation.json and report.html.
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
        class_folders=_class_folders(labels),
        columns=columns,
        on_conflict=on_conflict.value,
        close=close,
        holdout_pairs=holdout_pairs,
        flip=flip,
        without=_words(without),
        strict=strict,
        resume=resume,
        from_run=from_run,
        arguments=arguments,
        settings=settings,
    )
    _print_rows(workflow.train(request, _reporter(quiet)).lines())


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@app.command(
    cls=GroupedHelp,
    epilog=_example(
        "constraintmatch predict runs/photos new-photos \\",
        "  --out clusters.csv --sort-into sorted",
    ),
)
@_guarded
def predict(
    model: Model,
    data: Source,
    out: Annotated[Path, _option("File for name,cluster,confidence. (clusters.csv)")] = Path("clusters.csv"),
    sort_into: Annotated[Path | None, _option("New folder for one folder of images per cluster.")] = None,
    link: Annotated[bool, _option("Sorted images are links or copies. (links)", "--link/--copy")] = True,
    device: Device = None,
    quiet: QuietFlag = False,
    split: Split = None,
    data_dir: DataDir = None,
    strict: Strict = False,
) -> None:
    """Place images in the clusters of a trained model."""
    from constraintmatch import sorting, workflow

    check_target(out)
    if sort_into is not None:
        sorting.check_sort_folder(sort_into, data)
    opened, found = workflow.predict_images(
        model, data, split=split, data_dir=data_dir, strict=strict, device=device, reporter=_reporter(quiet)
    )
    workflow.write_clusters(out, opened.images.names, found)
    rows = [("clusters", f"{out} ({len(found):,} images in {found.n_clusters} clusters)")]
    if sort_into is not None:
        sorting.sort_images(opened, found, sort_into, link=link)
        rows.append(("sorted", str(sort_into)))
    _print_rows(rows)


@app.command(
    cls=GroupedHelp,
    epilog=_example(
        "constraintmatch evaluate runs/photos --data labelled",
        "constraintmatch evaluate runs/c10 --data cifar10 \\",
        "  --data-dir data --json scores.json",
    ),
)
@_guarded
def evaluate(
    model: Model,
    data: Annotated[str, typer.Option(metavar="DATA", help=DATA)],
    pairs: Annotated[Path | None, _option("Pairs that were not trained on.")] = None,
    json: Annotated[Path | None, _option("Write the numbers to this file too.")] = None,
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
        class_folders=_class_folders(labels),
        reporter=_reporter(quiet),
    )
    if json is not None:
        write_json(json, told)
    _print_rows(workflow.evaluation_rows(told))


@app.command(
    cls=GroupedHelp,
    epilog=_example(
        "constraintmatch sample photos-by-class --n 1000 \\",
        "  --seed 0 --out pairs.csv",
    ),
)
@_guarded
def sample(
    data: Source,
    n: Annotated[int | None, _option("Pairs to draw.", "--n")] = None,
    out: Annotated[Path, _option("The pairs file: .csv, .parquet or .jsonl. (pairs.csv)")] = Path("pairs.csv"),
    seed: Annotated[int, _option("The same seed draws the same pairs. (0)")] = 0,
    balanced: Annotated[bool, _option("Half of them must-links.", "--balanced")] = False,
    per_image: Annotated[int | None, _option("Partners for every image, instead of --n.")] = None,
    flip: Annotated[float | None, _option("Share of the pairs to turn round: wrong answers. (0)")] = None,
    flip_only: Annotated[_Kind | None, _option("Turn round only these. (both)")] = None,
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
        reporter=_reporter(quiet),
    )
    kinds = f"{drawn.n_must_links:,} must-links, {drawn.n_cannot_links:,} cannot-links"
    _print_rows([("pairs", f"{out} ({len(drawn):,}: {kinds})")])


@app.command(cls=GroupedHelp, epilog=_example("constraintmatch check pairs.csv --images photos"))
@_guarded
def check(
    pairs: Annotated[Path, typer.Argument(metavar="PAIRS", help="The pairs file.")],
    images: Annotated[str | None, typer.Option(metavar="DATA", help=DATA)] = None,
    columns: Columns = None,
    close: Annotated[bool, _option("Count the pairs that these imply.", "--close")] = False,
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
        pairs, images, columns=columns, close=close, split=split, data_dir=data_dir, reporter=_reporter(quiet)
    )
    _print_rows(found.lines())
    for text in found.contradictions:
        print_line(f"contradiction: {text}")
    if found.n_contradictions:
        raise typer.Exit(2)


@app.command(cls=GroupedHelp, epilog=_example("constraintmatch report runs/photos"))
@_guarded
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[str | None, typer.Option(metavar="DATA", help="Other images. (the run's own)")] = None,
    quiet: QuietFlag = False,
) -> None:
    """Write report.html of a run anew."""
    from constraintmatch import workflow

    _print_rows([("report", str(workflow.write_run_report(run, data, reporter=_reporter(quiet))))])


STAGE_SETTINGS = (
    "seed device bf16 channels_last compile cuda_graph log_every evaluate_every checkpoint_every tensorboard"
)


@app.command(
    cls=GroupedHelp,
    epilog=_example(
        "constraintmatch pretrain photos --clusters 12 \\",
        "  --out starts/photos",
        "constraintmatch train photos --pairs pairs.csv \\",
        "  --model starts/photos --out runs/photos",
    ),
)
@_guarded
@add_flags(arguments=stage_flags(), settings=settings_flags(STAGE_SETTINGS.split()))
def pretrain(
    data: Source,
    *,
    out: Annotated[Path, _option("Folder for the stages and for the model they leave.")],
    clusters: Clusters = None,
    stages: Annotated[str, _option(f"Which of {', '.join(STAGES)}. ({CHAIN})")] = CHAIN,
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
    """Make a full self-supervised start: SimCLR, SCAN, self-labelling.

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
        class_folders=_class_folders(labels),
        flip=flip,
        without=_words(without),
        strict=strict,
        settings=settings,
    )
    model = workflow.pretrain_model(request, _words(stages), arguments, _reporter(quiet))
    following = f"constraintmatch train {shlex.quote(data)} --pairs pairs.csv --model {shlex.quote(str(out))}"
    _print_rows([("model", str(model)), ("next", following)])


@app.command(
    cls=GroupedHelp,
    epilog=_example("constraintmatch import-scan scan.pth.tar \\", "  --data cifar10 --out starts/c10"),
)
@_guarded
def import_scan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The checkpoint. Nothing in it is run.")],
    data: Annotated[str, _option("Its data set: cifar10, cifar100-20, stl10, imagenet10, imagenet-dogs.")],
    out: Annotated[Path, _option("New model folder.")],
    head: Annotated[int | None, _option("Which of several cluster heads. (the file's best, or 0)")] = None,
    half: Annotated[bool, _option("Keep the weights in half precision.", "--half")] = False,
) -> None:
    """Turn a checkpoint of SCAN's code into a model folder.

    It may be of any stage; after SimCLR alone it has no clusters yet.
    """
    from constraintmatch import scan_import

    config = scan_import.import_scan(file, data, out, head=head, half=half).config
    clusters = f"{config.n_clusters:,}" if config.n_clusters else "none yet"
    _print_rows([("model", f"{out} ({config.backbone})"), ("clusters", clusters)])


@app.command(cls=GroupedHelp, epilog=_example("constraintmatch demo --out demo"))
@_guarded
def demo(
    out: Annotated[Path, _option("Folder for the runs and the report. (demo)")] = Path("demo"),
    seed: Annotated[int, _option("Seed of everything random. (0)")] = 0,
    quiet: QuietFlag = False,
) -> None:
    """Show what pairs bring, on small digits.

    Trains on scikit-learn's digits from the same start and the same pairs, without and with ConstraintMatch.
    """
    from constraintmatch.demo import run_demo

    typer.echo(run_demo(out, seed=seed, reporter=_reporter(quiet)))
