"""From a folder to clusters: demo, train, predict, pretrain, compare, settings."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import Reporter
from constraintmatch.cli import flags
from constraintmatch.cli.flags import METHODS, PRETEXTS, STAGES
from constraintmatch.cli.shared import (
    Flags,
    Images,
    Model,
    Sets,
    Source,
    command,
    flag,
    named_start,
    on_engine,
    option,
    print_rows,
    shared,
)

_PANEL = "From a folder to clusters"
_CLUSTERS = {"clusters": flag(int, "Number of clusters to find.")}
_METHOD = f"{', '.join(METHODS)}; or a stage: {', '.join(STAGES)}."
_PAIRS = "The pairs: left,right,link as CSV, Parquet or JSON lines; or triplets, labels, sizes. May be repeated."
_GPUS = "Train on this number of GPUs. (1; on several machines: torchrun -m constraintmatch)"
_RECIPE = "safe: keep the start unless held-out pairs say that training is better; paper: as published. (safe)"
_ERRORS = "Share of the pairs that are wrong. (the safe recipe estimates it)"


@command(_PANEL)
def demo(
    out: Annotated[Path, option("Folder for the runs and the report. (demo)")] = Path("demo"),
    seed: Annotated[int, option("Seed of everything random. (0)")] = 0,
    *,
    reporter: Reporter,
) -> None:
    """Show what pairs bring, on small digits.

    Trains on scikit-learn's digits from the same start and the same pairs, without and with ConstraintMatch.

    Example:
      constraintmatch demo --out demo
    """
    from constraintmatch.pipeline.demo import run_demo

    typer.echo(run_demo(out, seed=seed, reporter=reporter))


@command(
    _PANEL,
    request={
        "pairs": flag(list[Path], _PAIRS),
        **shared("columns"),
        **_CLUSTERS,
        "out": flag(Path, "The run folder. (runs/ and the name of DATA; a new one each time)"),
        "method": flag(str, f"One of {', '.join(METHODS)}. (constraintmatch)"),
        **shared("start"),
        "resume": flag(bool, "Continue the run in --out.", "--resume"),
        "from_run": flag(Path, "Repeat the choices of a run.json; flags given here win."),
    },
    images=shared("test", "data_dir", "pictures", "flip"),
    chosen={
        "recipe": flag(Literal["safe", "paper"], _RECIPE, panel="Training"),
        "error_rate": flag(float, _ERRORS, panel="Training"),
        "steps": flag(int, "Training steps. (500 to 20,000, by the number of images)", panel="Training"),
        "lr": flag(float, "As --set lr=VALUE.", panel="Training", hidden=True),
        "seed": flag(int, "Seed of everything random. (0)", panel="Training"),
        "device": flag(str, "cuda, mps or cpu. (the first that is there)", panel="Training"),
    },
)
def train(
    data: Images = None,
    *,
    request: Flags,
    sets: Sets = None,
    reporter: Reporter,
    chosen: Flags,
    images: Flags,
    gpus: Annotated[int | None, option(_GPUS, panel="Training")] = None,
) -> None:
    r"""Train a clustering model on images and pairs.

    Photographs begin with a pretrained encoder, and only a head is trained, in seconds. Other images begin with a short
    self-supervised start. The run folder gets the model, clusters.csv, evaluation.json and report.html. A data set of
    the paper has its own sizes and rates.

    Example:
      constraintmatch train photos --pairs pairs.csv \
        --clusters 12 --out runs/photos
      constraintmatch train photos --pairs pairs.csv \
        --clusters 50 --set merge=yes --set max_entropy=0.3
      constraintmatch train --resume --out runs/photos
    """
    from constraintmatch.pipeline import commands, plan
    from constraintmatch.pipeline.config import check_neighbours
    from constraintmatch.pipeline.train import train
    from constraintmatch.training import ranks
    from constraintmatch.training.loop import Interrupted

    recorded = request.keys() & {"resume", "from_run"}  # a method that is known only when the record is read
    method = request.get("method", None if recorded else "constraintmatch")
    arguments, settings, more = flags.split_settings(flags.read_settings("train", sets, method, chosen))
    with _ranks(gpus, settings.get("device"), reporter) as reporter:
        out = request.get("out")
        if ranks.is_restarted() and (out is None or (out / "run.json").exists() or (out / "start").exists()):
            request["resume"] = True
        asked = plan.Train(data=data, **named_start(request), **images, **more, arguments=arguments, settings=settings)
        with ranks.in_turn():
            job = plan.plan_training(asked, reporter)
        check_neighbours(job.config.method, arguments, len(job.data.images))
        try:
            with ranks.together():
                trained = train(job.seen, job.pairs, job.config, job.context)
        except Interrupted as stop:
            said = f"{stop}; the same command with --resume --out {job.context.out} goes on from there"
            raise Interrupted(said) from None
        if ranks.first():
            print_rows(commands.finish_training(job, trained))


@contextmanager
def _ranks(gpus: int | None, device: str | None, reporter: Reporter) -> Iterator[Reporter]:
    """One of the processes that train together, or the only one; rank 0 reports. With --gpus they are started first."""
    from constraintmatch.training import ranks
    from constraintmatch.training.loop import choose_device

    place = choose_device(device)
    if gpus not in (None, 1) and not ranks.is_launched():
        raise typer.Exit(ranks.launch(gpus, place))
    with ranks.started(place):
        yield reporter if ranks.first() else Reporter()


@command(
    _PANEL,
    files={
        "out": flag(Path, "File for name,cluster,confidence. (clusters.csv)"),
        "sort_into": flag(Path, "New folder for one folder of images per cluster."),
        "link": flag(bool, "Sorted images are links or copies. (links)", "--link/--copy"),
        "within": flag(Path, "Folder of a training on coarser kinds: the column coarse says in which a cluster is."),
    },
    how=shared("device", "split", "data_dir", "strict", "pictures", "engine"),
)
def predict(model: Model, data: Source, *, files: Flags, how: Flags, reporter: Reporter) -> None:
    r"""Place images in the clusters of a trained model.

    Example:
      constraintmatch predict runs/photos new-photos \
        --out clusters.csv --sort-into sorted
      constraintmatch predict runs/species new-photos \
        --within runs/families
    """
    from constraintmatch.pipeline import commands

    out, sort_into = files.get("out", Path("clusters.csv")), files.get("sort_into")
    if (engine := how.pop("engine", None)) is not None:
        print_rows(on_engine(engine, "predict", str(model), data, **{**files, "out": out}, **how, reporter=reporter))
        return
    check_target(out)
    if sort_into is not None:
        commands.check_sort_folder(sort_into, data, out)
    coarse = None if (within := files.get("within")) is None else commands.coarse_clusters(model, within)
    images, found = commands.predict_images(model, data, **how, reporter=reporter)
    commands.write_clusters(out, images.images.names, found, coarse)
    rows = [("clusters", f"{out} ({len(found):,} images in {found.n_clusters} clusters)")]
    if coarse is not None:
        rows.append(("coarse", f"{len(set(coarse.values()))} clusters of {within}"))
    if sort_into is not None:
        commands.sort_images(images, found, sort_into, link=files.get("link", True))
        rows.append(("sorted", str(sort_into)))
    print_rows(rows)


_CHAINS = (
    "scan: simclr,scan,self_label, as the paper; byol: byol,scan,self_label,linear_scan; "
    "propos: propos,scan,self_label,linear_scan; "
    "own: byol,linear_scan,neighbour_label,linear_scan; short: simclr,linear_scan. "
    "(scan for the paper's data sets, else own)"
)


@command(
    _PANEL,
    start={
        "chain": flag(str, _CHAINS),
        "stages": flag(str, f"Instead of a chain: some of {', '.join(STAGES)}."),
        "pretext": flag(str, f"How features are learned: {', '.join(PRETEXTS)}. (as in the chain)"),
    },
    chosen=shared("seed", "device"),
    images={**_CLUSTERS, **shared("data_dir", "flip")},
)
def pretrain(
    data: Source,
    *,
    out: Annotated[Path, option("Folder for the stages and for the model they leave.")],
    images: Flags,
    start: Flags,
    chosen: Flags,
    sets: Sets = None,
    reporter: Reporter,
    gpus: Annotated[int | None, option(_GPUS)] = None,
) -> None:
    r"""Make a full self-supervised start for train.

    Its stages learn features, find clusters and label images by them. The same command again goes on where it stopped.

    Example:
      constraintmatch pretrain photos --clusters 12 \
        --out starts/photos --set byol.epochs=200
      constraintmatch train photos --pairs pairs.csv \
        --model starts/photos --out runs/photos
    """
    from constraintmatch.pipeline import commands
    from constraintmatch.pipeline.plan import Train
    from constraintmatch.training import ranks

    given = flags.read_settings("pretrain", sets, flags=chosen)
    recipe: dict[str, dict[str, Any]] = {}
    for name in [name for name in given if "." in name]:
        stage, _, own = name.partition(".")
        recipe.setdefault(stage, {})[own] = given.pop(name)
    _, settings, more = flags.split_settings(given)
    asked = Train(data=data, out=out, **images, **more, settings=settings)
    stages = flags.words(start.pop("stages", ""))
    with _ranks(gpus, settings.get("device"), reporter) as reporter:
        model = commands.pretrain_model(asked, stages, recipe, reporter, **start)
        if not ranks.first():
            return
    following = f"constraintmatch train {shlex.quote(data)} --pairs pairs.csv --model {shlex.quote(str(out))}"
    print_rows([("model", str(model)), ("next", following)])


@command(
    _PANEL,
    how={
        **_CLUSTERS,
        "pairs": flag(Path, "The pairs; a fifth of them is held out to judge."),
        "n_pairs": flag(int, "Instead of --pairs: number to draw from labels."),
        "n_labels": flag(int, "Labels that systems may use in addition to the pairs. (0)"),
        "methods": flag(str, "Some systems: constraintmatch,spherepair. (all)"),
        "out": flag(Path, "Folder for rows, page and clusters. (comparison)"),
        **shared("columns", "seed", "start", "test", "data_dir"),
    },
)
def compare(data: Source, *, how: Flags, reporter: Reporter) -> None:
    r"""Compare systems on the same images and pairs.

    Ours and others, on the same features: those of --start, or of the start that train makes. Held-out pairs judge
    them, and labels where they are known; the last lines say which to take. Finished rows are kept in --out. A system
    that fails is a row that says why.

    Example:
      constraintmatch compare digits --n-pairs 300 \
        --clusters 10
      constraintmatch compare photos --pairs pairs.csv \
        --clusters 12 --methods constraintmatch,k_means
    """
    from constraintmatch.pipeline import compare as comparing
    from constraintmatch.pipeline.plan import Train

    more = {name: how.pop(name) for name in ("n_pairs", "n_labels") if name in how}
    methods, settings = flags.words(how.pop("methods", "")), {"seed": how.pop("seed", 0)}
    asked = Train(data, **named_start(how), settings=settings)
    typer.echo(comparing.compare(asked, reporter, methods=methods, **more))


@command(_PANEL)
def settings(method: Annotated[str | None, typer.Argument(metavar="METHOD", help=_METHOD)] = None) -> None:
    """List what --set changes: name, default, values, meaning.

    Without METHOD the settings of all methods and stages are shown.

    Example:
      constraintmatch settings constraintmatch
      constraintmatch settings linear_scan
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, rows in flags.setting_tables(method):
        console.print(Text(f"\n{title}", style="bold"))
        table = Table(box=None, padding=(0, 0, 0, 2), width=min(console.width, 80), header_style="dim")
        for heading, width in (("name", 16), ("default", 14), ("values", 14), ("meaning", None)):
            table.add_column(heading, width=width)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
