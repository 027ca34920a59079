"""Look and reuse: report, evaluate, embed, join. For researchers: sample, search, paper, import-scan."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target, write_json
from constraintmatch._internal.progress import Reporter
from constraintmatch.cli.flags import read_settings, words
from constraintmatch.cli.shared import Flags, Model, Sets, Source, command, flag, on_engine, option, print_rows, shared

_LOOK, _RESEARCH = "Look and reuse", "For researchers"
_NAMES = "One or more of table1, table2, table3, flip, links, selection, entropy, amount and noise."
_SCAN_SETS = "Its data set: cifar10, cifar100-20, stl10, imagenet10 or imagenet-dogs."
_GRID = "Other values of a setting, may be repeated: lr=0.03,0.01. (the paper's)"
_DIGITS = 18  # Python refuses numbers of some thousands


@command(_LOOK, how=shared("pictures"))
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="Other images. (the run's own)")] = None,
    *,
    how: Flags,
    reporter: Reporter,
) -> None:
    """Write report.html of a run again.

    Example:
      constraintmatch report runs/photos
    """
    from constraintmatch.pipeline import commands

    print_rows([("report", str(commands.write_run_report(run, data, **how, reporter=reporter)))])


@command(
    _LOOK,
    how={
        "pairs": flag(Path, "Pairs that were not trained on."),
        **shared("columns", "device", "split", "data_dir", "class_folders"),
        "json": flag(Path, "Write the numbers to this file too."),
    },
)
def evaluate(model: Model, data: Source, *, how: Flags, reporter: Reporter) -> None:
    r"""Score a model on images.

    With labels: accuracy (Hungarian matching), NMI, ARI and calibration error. With --pairs: the share of must-links
    and of cannot-links it keeps. Always: cluster sizes and warnings of collapse.

    Example:
      constraintmatch evaluate runs/photos labelled
      constraintmatch evaluate runs/c10 cifar10 \
        --data-dir data --json scores.json
    """
    from constraintmatch.pipeline import commands

    if (json := how.pop("json", None)) is not None:
        check_target(json)
    found = commands.evaluate_model(model, data, **how, reporter=reporter)
    if json is not None:
        write_json(json, found)
    print_rows(commands.evaluation_rows(found))


@command(
    _LOOK,
    how={
        "side": flag(int, "Pixels a side to resize images to. (fits MODEL)", panel="Images"),
        **shared("device", "split", "data_dir", "class_folders", "strict", "engine"),
    },
)
def embed(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model or run folder, timm:NAME, torchvision:NAME or onnx:FILE.")
    ],
    data: Source,
    *,
    out: Annotated[Path, option("The .npz file: embeddings, names, labels. (embeddings.npz)")] = Path("embeddings.npz"),
    how: Flags,
    reporter: Reporter,
) -> None:
    r"""Turn images into embeddings, which train in seconds.

    Every other command takes the embeddings in the place of images. timm:NAME fetches a pretrained network and takes
    images of the size that it was made for.

    Example:
      constraintmatch embed timm:resnet50 photos \
        --out photos.npz
      constraintmatch loop photos.npz --pictures photos
    """
    from constraintmatch.pipeline import embedding

    if (engine := how.pop("engine", None)) is not None:
        print_rows(on_engine(engine, "embed", model, data, out, **how, reporter=reporter))
        return
    made = embedding.embed_images(model, data, out, **how, reporter=reporter)
    print_rows([("embeddings", f"{out} ({len(made):,} of {made.shape[1]:,} numbers)")])


@command(_LOOK, how=shared("half", "device", "split", "data_dir", "strict"))
def join(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL", help="Two model or run folders, or more.")],
    data: Source,
    *,
    out: Annotated[Path, option("New model folder.")],
    how: Flags,
    reporter: Reporter,
) -> None:
    r"""Join trained networks into one model.

    Networks that were trained differently see different things; together they need fewer answers. The model has the
    clusters of the first one until answers (loop, annotate) or a training change them. It takes as long as all of them
    together. DATA are images like those they were trained on; labels are not used.

    Example:
      constraintmatch join starts/photos starts/photos/byol \
        photos --out starts/joined
    """
    from constraintmatch.pipeline.embedding import join_folders

    _print_model(out, join_folders(models, data, out, **how, reporter=reporter))


@command(_LOOK)
def export(model: Model, *, out: Annotated[Path, option("File: .onnx, or .pt2 for torch.export.")]) -> None:
    """Write a model for other programs, and check it.

    The file takes images as bytes, (n, channels, side, side), and gives the probability of each cluster. ONNX needs
    pip install 'constraintmatch[onnx]'.

    Example:
      constraintmatch export runs/photos --out photos.onnx
    """
    from constraintmatch.pipeline.embedding import export_model

    print_rows([("model", f"{out} (differs from {model} by at most {export_model(model, out):.1g})")])


def _print_model(out: Path, model: Any) -> None:
    clusters = f"{model.config.n_clusters:,}" if model.config.n_clusters else "none yet"
    print_rows([("model", f"{out} ({model.config.backbone})"), ("clusters", clusters)])


@command(
    _RESEARCH,
    how={
        "n": flag(int, "Pairs to draw.", "--n"),
        "per_image": flag(int, "Partners for every image, instead of --n."),
        "balanced": flag(bool, "Half of the pairs are must-links.", "--balanced"),
        "flip": flag(float, "Share of the pairs that are made wrong. (0)", "--wrong"),
        "flip_only": flag(Literal["must-link", "cannot-link"], "Make only these wrong. (both)", "--wrong-only"),
        "seed": flag(int, "The same seed draws the same pairs. (0)"),
        **shared("split", "data_dir"),
        "out": flag(Path, "The pairs file: .csv, .parquet or .jsonl. (pairs.csv)"),
    },
)
def sample(data: Source, *, how: Flags, reporter: Reporter) -> None:
    r"""Draw pairs from the labels of images.

    The images are in class folders, one for each class, or are a data set.

    Example:
      constraintmatch sample photos-by-class --n 1000 \
        --seed 0 --wrong 0.1 --out pairs.csv
    """
    from constraintmatch.pipeline import sources

    out = how.pop("out", Path("pairs.csv"))
    drawn = sources.sample_pairs(data, out, **how, reporter=reporter)
    kinds = f"{drawn.n_must_links:,} must-links, {drawn.n_cannot_links:,} cannot-links"
    print_rows([("pairs", f"{out} ({len(drawn):,}: {kinds})")])


@command(
    _RESEARCH,
    asked={
        "method": flag(str, "constraintmatch, pseudo_label, constrained or fully_constrained. (constraintmatch)"),
        "sampler": flag(
            Literal["grid", "tpe"], "grid: every combination; tpe: --trials draws between the values. (grid)"
        ),
        "trials": flag(int, "Number of trials, with --sampler tpe."),
        "steps": flag(int, "Training steps of a trial; fewer than the paper's mark the search as cut."),
        "storage": flag(str, "SQLite file, or postgresql://… for workers on many machines. (search.db)"),
        "study": flag(str, "Name of the search in the storage. (data set, method and sampler)"),
        "out": flag(Path, "Write trials and best settings to this file too."),
    },
    settings=shared("device"),
    pairs={
        "pairs": flag(Path, "The pairs. (drawn from the labels of a data set)"),
        "n_constraints": flag(int, "Number to draw from a data set's labels. (10,000)", "--constraints"),
        **shared("columns", "data_dir", "flip"),
    },
)
def search(
    data: Source,
    *,
    model: Annotated[Path, option("Model or run folder that every trial begins with.")],
    grid: Annotated[list[str] | None, option(_GRID)] = None,
    pairs: Flags,
    asked: Flags,
    settings: Flags,
    sets: Sets = None,
    reporter: Reporter,
) -> None:
    r"""Search settings by the loss on validation pairs.

    The paper's grid by default. The same command again goes on where it stopped, and several at once share the work. A
    trial whose worker died is run again.

    Example:
      constraintmatch search cifar10 --data-dir data \
        --model weights/scan-cifar10 --out best.json
      constraintmatch search photos --pairs pairs.csv \
        --model starts/photos --grid lr=0.03,0.01 \
        --grid weight_decay=1e-4
    """
    from constraintmatch.pipeline import search as searching

    given = {**asked, **pairs, **read_settings("search", sets), "settings": settings}
    request = searching.Search(data=data, model=model, values=_values(grid or []), **given)
    print_rows(searching.search(request, reporter)[1])


def _values(texts: list[str]) -> dict[str, tuple[float, ...]]:
    """`lr=0.03,0.01` as a name and numbers; the numbers of a repeated name are added."""
    found: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, mark, rest = text.partition("=")
        name = name.strip().replace("-", "_")
        try:
            values = tuple(float(value) for value in words(rest))
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *values)))
        except ValueError:
            mark = ""
        if not mark:
            raise InputError(f"--grid {text}: write a name and numbers, --grid lr=0.03,0.01 for example")
    return found


@command(
    _RESEARCH,
    cuts={
        "sets": flag(str, "Some of its data sets: cifar10,cifar100-20. (all)"),
        "folds": flag(str, "Which folds: 0 or 0-1 or 0,3. (0-4)"),
        "methods": flag(str, "Some of its methods: constrained,constraintmatch. (all)"),
        "n_constraints": flag(str, "Some of its numbers of constraints: 10000. (all)", "--constraints"),
        "steps": flag(int, "Cut the trainings to this number of steps; marked as cut. (20,000)"),
    },
    folders={
        "starts": flag(Path, "Folder with the starts: scan-cifar10 and so on. (weights)"),
        "results": flag(Path, "Folder for one JSON per cell. (results/paper)"),
        "runs": flag(Path, "Folder for the run folders. (runs/paper)", "--out"),
        "models": flag(Path, "Folder for the trained models, in half precision. (not kept)"),
    },
    settings=shared("device"),
    images=shared("data_dir"),
)
def paper(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help=_NAMES)],
    *,
    cuts: Flags,
    list_cells: Annotated[bool, option("Only list the cells and which of them are finished.", "--list")] = False,
    folders: Flags,
    settings: Flags,
    reporter: Reporter,
    images: Flags,
) -> None:
    r"""Run tables and figures of the paper.

    Every cell of the grids becomes one JSON, a cell that several share only once; finished cells are skipped, a stopped
    one goes on from its checkpoint. The same command started several times on one machine shares the cells: once for
    each GPU, with another CUDA_VISIBLE_DEVICES each. Then each table is shown with the paper's values next to ours.
    Without --data-dir what is finished is shown and nothing is run.

    Example:
      constraintmatch paper table1 --sets cifar10 \
        --data-dir data --folds 0
      constraintmatch paper table2 flip links --steps 3000 \
        --sets cifar100-20 --data-dir data --folds 0
      constraintmatch paper table1 --list
    """
    from constraintmatch.paper import runner
    from constraintmatch.paper.grids import FOLDS, grid_cells

    place = runner.Place(**images, **folders, settings=settings, reporter=reporter)
    cuts |= {name: words(cuts[name]) for name in ("sets", "methods") if name in cuts}
    if "folds" in cuts:
        cuts["folds"] = _numbers(cuts["folds"], "--folds", last=FOLDS - 1)
    if "n_constraints" in cuts:
        cuts["n_constraints"] = _numbers(cuts["n_constraints"], "--constraints")
    chosen = grid_cells(*names, **cuts)
    if list_cells:
        print_rows(runner.cell_states(chosen, place))
        return
    runner.run_cells(chosen, place)
    for name in names:
        _show(name, place.results, cuts.get("sets", ()), cuts.get("steps"), titled=len(names) > 1)


def _show(name: str, results: Path, sets: tuple[str, ...], steps: int | None, *, titled: bool) -> None:
    """Print a table or the numbers of a figure: laid out for a terminal, as Markdown in a pipe."""
    from rich.console import Console

    from constraintmatch.paper.grids import GRIDS
    from constraintmatch.paper.tables import for_terminal, part_text

    own = tuple(dataset for dataset in sets if dataset in (*GRIDS[name].sets, "digits"))
    if sets and not own:
        return
    title = f"## {GRIDS[name].title}\n\n" if titled and name.startswith("table") else ""  # a figure has its own
    text = title + part_text(name, results, own or None, steps)
    console = Console()
    typer.echo(for_terminal(text, console.width) if console.is_terminal else text)
    if titled:
        typer.echo()


def _numbers(text: str, flag: str, *, last: int | None = None) -> list[int]:
    """The whole numbers of a list: 0,3; where there is a last one, with ranges too: 0-2."""
    found: list[int] = []
    for word in words(text):
        ends = word.split("-", 1) if last is not None else [word]
        if not all(end.isascii() and end.isdecimal() and len(end) <= _DIGITS for end in ends):
            form = "a number; write 5000,10000" if last is None else "a number or a range; write 0,3 or 0-2"
            raise InputError(f"{flag}: {word!r} is not {form}")
        if last is not None and int(ends[-1]) > last:
            raise InputError(f"{flag}: {word!r} goes too far; there are 0 to {last}")
        found += range(int(ends[0]), int(ends[-1]) + 1)
    return found


_HEAD = flag(int, "Which of several cluster heads. (the file's best, or 0)")


@command(_RESEARCH, how={"head": _HEAD, **shared("half")})
def import_scan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The checkpoint. Nothing in it is run.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help=_SCAN_SETS)],
    out: Annotated[Path, option("New model folder.")],
    how: Flags,
) -> None:
    r"""Turn a checkpoint of SCAN's code into a model folder.

    It may be of any stage; after SimCLR alone it has no clusters yet.

    Example:
      constraintmatch import-scan scan.pth.tar cifar10 \
        --out starts/c10
    """
    from constraintmatch.models import scan_import

    _print_model(out, scan_import.import_scan(file, data, out, **how))
