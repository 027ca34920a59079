"""Commands for researchers: the paper's tables and figures, and model cards."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from constraintmatch.cli.shared import (
    DataDir,
    Device,
    Model,
    QuietFlag,
    app,
    example,
    guarded,
    option,
    print_rows,
    reporter,
    words,
)
from constraintmatch.errors import InputError
from constraintmatch.flags import GroupedHelp

__all__ = ["numbers"]

_DIGITS = 18  # Python refuses numbers of some thousands


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch paper table1 --sets cifar10 \\",
        "  --data-dir data --folds 0",
        "constraintmatch paper table2 flip links --steps 3000 \\",
        "  --sets cifar100-20 --data-dir data --folds 0",
        "constraintmatch paper table1 --list",
    ),
)
@guarded
def paper(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="One or more of table1, table2, table3, flip, links, selection, entropy, amount, noise and gallery.",
        ),
    ],
    sets: Annotated[str, option("Some of its data sets: cifar10,cifar100-20. (all)")] = "",
    folds: Annotated[str, option("Which folds: 0 or 0-1 or 0,3. (0-4)")] = "",
    methods: Annotated[str, option("Some of its methods: constrained,constraintmatch. (all)")] = "",
    constraints: Annotated[str, option("Some of its numbers of constraints: 10000. (all)")] = "",
    steps: Annotated[int | None, option("Cut the trainings to so many steps; marked as cut. (20,000)")] = None,
    list_cells: Annotated[bool, option("Only say which cells there are and which are finished.", "--list")] = False,
    data_dir: DataDir = None,
    starts: Annotated[Path, option("Folder with the starts: scan-cifar10 and so on. (weights)")] = Path("weights"),
    results: Annotated[Path, option("Folder for one JSON per cell. (results/paper)")] = Path("results/paper"),
    out: Annotated[Path, option("Folder for the run folders. (runs/paper)")] = Path("runs/paper"),
    models: Annotated[
        Path | None, option("Folder for the trained models, in half precision, with cards. (not kept)")
    ] = None,
    figures: Annotated[Path, option("Folder for the gallery's picture. (docs/figures)")] = Path("docs/figures"),
    device: Device = None,
    quiet: QuietFlag = False,
) -> None:
    """Run tables and figures of the paper.

    Every cell of the grids becomes one JSON, a cell that several share only once; finished cells are skipped, a stopped
    one goes on from its checkpoint. The same command started several times on one machine shares the cells: once for
    each GPU, with another CUDA_VISIBLE_DEVICES each. Then each table is shown with the paper's values beside ours.
    Without --data-dir what is finished is shown and nothing is run.
    """
    from constraintmatch.paper import runner
    from constraintmatch.paper.cells import FOLDS, grid_cells
    from constraintmatch.paper.gallery import gallery_sets, make_gallery

    place = runner.Place(data_dir, starts, results, out, models, {"device": device} if device else {}, reporter(quiet))
    cuts: dict[str, Any] = {
        "sets": words(sets) if sets else None,
        "folds": numbers(folds, "--folds", last=FOLDS - 1) if folds else None,
        "steps": steps,
        "methods": words(methods) if methods else None,
        "n_constraints": numbers(constraints, "--constraints") if constraints else None,
    }
    grids = [name for name in names if name != "gallery"]
    chosen = grid_cells(*grids, **cuts) if grids else []
    galleries = gallery_sets(cuts["sets"]) if "gallery" in names else ()
    if list_cells:
        shown = [results / f"gallery-{dataset}.json" for dataset in galleries]
        made = [("finished" if path.is_file() else "missing", path.stem) for path in shown]
        print_rows([*made, *(runner.cell_states(chosen, place) if chosen else [])])
        return
    runner.run_missing(chosen, place)
    for name in grids:
        _show(name, results, words(sets), steps, titled=len(grids) > 1)
    if galleries:
        print_rows([("gallery", str(make_gallery(dataset, place, figures))) for dataset in galleries])


@app.command(
    cls=GroupedHelp,
    epilog=example("constraintmatch card weights/constraintmatch-cifar10"),
)
@guarded
def card(
    model: Model,
    results: Annotated[Path, option("Folder with one JSON per cell. (results/paper)")] = Path("results/paper"),
) -> None:
    """Write the model card of a model folder.

    README.md with its scores, how to check them and how it was made, from the result that has the same weights.
    """
    from constraintmatch.paper.cards import write_card

    print_rows([("card", str(write_card(model, results)))])


def _show(name: str, results: Path, sets: tuple[str, ...], steps: int | None, *, titled: bool) -> None:
    """Print a table or the numbers of a figure: laid out for a terminal, as Markdown in a pipe."""
    from constraintmatch.paper import reproduction, terminal
    from constraintmatch.paper.cells import GRIDS

    own = tuple(dataset for dataset in sets if dataset in (*GRIDS[name].sets, "digits"))
    if sets and not own:
        return
    title = f"## {GRIDS[name].title}\n\n" if titled and name.startswith("table") else ""  # a figure has its own
    text = title + reproduction.part_text(name, results, own or None, steps)
    console = Console()
    typer.echo(terminal.for_terminal(text, console.width) if console.is_terminal else text)
    if titled:
        typer.echo()


def numbers(text: str, flag: str, *, last: int | None = None) -> list[int]:
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
