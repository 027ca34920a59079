"""Commands for researchers: the paper's tables and figures."""

from pathlib import Path
from typing import Annotated

import typer

from constraintmatch.cli.shared import (
    DataDir,
    Device,
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


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch paper table1 --sets cifar10 \\",
        "  --data-dir data --folds 0",
        "constraintmatch paper table1 --list",
    ),
)
@guarded
def paper(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="table1, table2, table3, flip, links, selection, entropy, amount, noise or gallery.",
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
    models: Annotated[Path | None, option("Folder for the trained models, in half precision. (not kept)")] = None,
    figures: Annotated[Path, option("Folder for the gallery's picture. (docs/figures)")] = Path("docs/figures"),
    device: Device = None,
    quiet: QuietFlag = False,
) -> None:
    """Run a table or figure of the paper.

    Every cell of the grid becomes one JSON; finished cells are skipped, a stopped one goes on from its checkpoint.
    Then the table is shown with the paper's values beside ours.
    """
    from constraintmatch.paper import cells as grids
    from constraintmatch.paper import gallery, reproduction, runner

    settings = {"device": device} if device else {}
    place = runner.Place(data_dir, starts, results, out, models, settings, reporter(quiet))
    if name == "gallery":
        made = [gallery.make_gallery(dataset, place, figures) for dataset in words(sets) or ("cifar10",)]
        print_rows([("gallery", str(path)) for path in made])
        return
    chosen = grids.grid_cells(
        name,
        sets=words(sets) or None,
        folds=numbers(folds, "--folds") if folds else None,
        steps=steps,
        methods=words(methods) or None,
        n_constraints=numbers(constraints, "--constraints") if constraints else None,
    )
    if list_cells:
        print_rows([(cell.name, "finished" if runner.is_finished(cell, place) else "missing") for cell in chosen])
        return
    runner.run_cells(chosen, place)
    typer.echo(reproduction.part_text(name, results, words(sets) or None))


def numbers(text: str, flag: str) -> list[int]:
    """The whole numbers of a list with ranges: 0,3 or 0-2."""
    found: list[int] = []
    for word in words(text):
        first, dash, last = word.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise InputError(f"{flag}: {word!r} is not a number or a range; write 0,3 or 0-2")
        found += range(int(first), int(last if dash else first) + 1)
    return found
