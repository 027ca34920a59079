"""Commands that ask people: annotate."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from constraintmatch.cli.shared import (
    Browser,
    DataDir,
    Device,
    Host,
    Pictures,
    Port,
    QuietFlag,
    Source,
    Split,
    Strict,
    Token,
    app,
    example,
    guarded,
    option,
    print_rows,
    reporter,
)
from constraintmatch.errors import InputError
from constraintmatch.flags import GroupedHelp

__all__ = ["Choosing", "QuestionKind"]


class QuestionKind(StrEnum):
    """The two kinds of questions."""

    which = "which"
    pair = "pair"


class Choosing(StrEnum):
    """How questions are chosen."""

    recommended = "recommended"
    uncertain = "uncertain"
    random = "random"


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch annotate photos --model runs/photos",
        "constraintmatch annotate photos --export pairs.csv",
        "constraintmatch train photos --pairs pairs.csv \\",
        "  --model runs/photos --out runs/better",
    ),
)
@guarded
def annotate(
    data: Source,
    model: Annotated[Path | None, option("Model or run folder that chooses the questions. (pixels do)")] = None,
    db: Annotated[Path, option("The database of answers, made if need be. (answers.db)")] = Path("answers.db"),
    kind: Annotated[
        QuestionKind, option("which: which of these is the same? pair: same or different? (which)")
    ] = QuestionKind.which,
    choose: Annotated[
        Choosing, option("How questions are chosen: recommended, uncertain, random. (recommended)")
    ] = Choosing.recommended,
    again: Annotated[Path | None, option("Ask the pairs of this file first: doubtful.csv of a run, say.")] = None,
    seed: Annotated[int, option("Seed of random questions. (0)")] = 0,
    device: Device = None,
    quiet: QuietFlag = False,
    export: Annotated[Path | None, option("Write the answers as a pairs file and end.", panel="Files")] = None,
    import_: Annotated[
        Path | None,
        option("Take in a pairs file or Label Studio's export (.json) and end.", "--import", panel="Files"),
    ] = None,
    columns: Annotated[
        str | None, option("Names of that file's columns: i,j,c_ij. (left,right,link)", panel="Files")
    ] = None,
    same: Annotated[
        str | None, option("What that export calls same, if not same or yes. (the usual words)", panel="Files")
    ] = None,
    different: Annotated[
        str | None, option("What that export calls different. (the usual words)", panel="Files")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    token: Token = None,
    browser: Browser = True,
    split: Split = None,
    data_dir: DataDir = None,
    strict: Strict = False,
    pictures: Pictures = None,
) -> None:
    """Ask people about images, on a page in the browser.

    Every answer is saved as it is given; Ctrl-C ends, and the same command goes on. Several people may answer at once.
    """
    from constraintmatch.annotate import server

    sitting = server.Sitting(
        data,
        db,
        model,
        kind.value,
        choose.value,
        seed,
        split=split,
        data_dir=data_dir,
        strict=strict,
        device=device,
        pictures=pictures,
        again=again,
    )
    if export is not None and import_ is not None:
        raise InputError("--export and --import go one after the other; give one of them")
    if import_ is None and (same is not None or different is not None):
        raise InputError("--same and --different go with --import EXPORT.json")
    if import_ is None and columns is not None:
        raise InputError("--columns goes with --import PAIRS.csv")
    if export is not None:
        print_rows([("pairs", f"{export} ({server.export_answers(sitting, export, reporter(quiet)).describe()})")])
    elif import_ is not None:
        taken = server.import_file(sitting, import_, reporter(quiet), columns=columns, same=same, different=different)
        print_rows([("answers", f"{db} ({taken.describe()})")])
    else:
        print_rows(server.serve_page(sitting, server.Door(host, port, token, browser), reporter(quiet)))
