"""The command that looks for good settings: search."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from constraintmatch.cli.shared import (
    Columns,
    DataDir,
    Device,
    Flip,
    QuietFlag,
    Source,
    Without,
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

__all__ = ["Sampler"]


class Sampler(StrEnum):
    """How settings are chosen."""

    grid = "grid"
    tpe = "tpe"


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch search cifar10 --data-dir data \\",
        "  --model weights/scan-cifar10 --out best.json",
        "constraintmatch search photos --pairs pairs.csv \\",
        "  --model starts/photos --grid lr=0.03,0.01 \\",
        "  --grid weight_decay=1e-4 --workers 2",
    ),
)
@guarded
def search(
    data: Source,
    model: Annotated[Path, option("Model or run folder that every trial begins with.")],
    method: Annotated[
        str, option("constraintmatch, pseudo_label, constrained or fully_constrained. (constraintmatch)")
    ] = "constraintmatch",
    grid: Annotated[
        list[str] | None, option("Other values of a setting, may be repeated: lr=0.03,0.01. (the paper's)")
    ] = None,
    sampler: Annotated[Sampler, option("grid: every combination; tpe: --trials draws between the values. (grid)")] = (
        Sampler.grid
    ),
    trials: Annotated[int | None, option("How many trials, with --sampler tpe.")] = None,
    steps: Annotated[
        int | None, option("Training steps of a trial; fewer than the paper's mark the search as cut.")
    ] = (None),
    storage: Annotated[
        str, option("SQLite file, or postgresql://… for workers on many machines. (search.db)")
    ] = "search.db",
    study: Annotated[str | None, option("Name of the search in the storage. (data set, method and sampler)")] = None,
    workers: Annotated[int, option("Processes to work here; the same command elsewhere is one more. (1)")] = 1,
    out: Annotated[Path | None, option("Write trials and best settings to this file too.")] = None,
    device: Device = None,
    quiet: QuietFlag = False,
    pairs: Annotated[Path | None, option("The pairs. (drawn from the labels of a data set)", panel="Pairs")] = None,
    holdout_pairs: Annotated[float, option("Share of the pairs to judge by. (0.2)", panel="Pairs")] = 0.2,
    constraints: Annotated[int, option("How many to draw from a data set's labels. (10,000)", panel="Pairs")] = 10_000,
    columns: Columns = None,
    data_dir: DataDir = None,
    flip: Flip = None,
    without: Without = "",
) -> None:
    """Search settings by the loss on validation pairs.

    The paper's grid by default. The same command again goes on where it stopped, and several at once share the work; a
    trial whose worker died is taken up again.
    """
    from constraintmatch.paper.search import Search
    from constraintmatch.paper.search import search as run_search

    request = Search(
        data=data,
        model=model,
        method=method,
        pairs=pairs,
        n_constraints=constraints,
        holdout_pairs=holdout_pairs,
        values=_values(grid or []),
        sampler=sampler.value,
        trials=trials,
        steps=steps,
        storage=storage,
        study=study,
        workers=workers,
        out=out,
        data_dir=data_dir,
        columns=columns,
        flip=flip,
        without=words(without),
        settings={} if device is None else {"device": device},
    )
    found = run_search(request, reporter(quiet))
    print_rows(found.lines() + ([("written", str(out))] if out is not None else []))


def _values(texts: list[str]) -> dict[str, tuple[float, ...]]:
    """`lr=0.03,0.01` as a name and numbers; those of a name that comes again are added."""
    found: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, mark, rest = text.partition("=")
        name = name.strip().replace("-", "_")
        try:
            numbers = tuple(float(value) for value in words(rest))
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *numbers)))
        except ValueError:
            mark = ""
        if not mark:
            raise InputError(f"--grid {text}: write a name and numbers, --grid lr=0.03,0.01 for example")
    return found
