"""What the commands share: the app, options that several have, one-line errors, and how results are printed."""

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from constraintmatch.errors import InputError
from constraintmatch.files import mend
from constraintmatch.flags import OneLineErrors
from constraintmatch.progress import Quiet, Reporter, console_reporter, say_error

__all__ = [
    "DATA",
    "Backbone",
    "Browser",
    "Channels",
    "Clusters",
    "Columns",
    "DataDir",
    "Device",
    "Flip",
    "Host",
    "Labels",
    "Model",
    "Pictures",
    "Port",
    "Pretrained",
    "QuietFlag",
    "Side",
    "Source",
    "Split",
    "Strict",
    "Token",
    "Without",
    "app",
    "class_folders",
    "example",
    "guarded",
    "option",
    "print_rows",
    "reporter",
    "words",
]

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


def option(text: str, *names: str, panel: str | None = None) -> Any:
    """An option under a heading of the help; the text says what happens without it."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


DATA = "A folder of images, a .npy or .npz file of images or embeddings, or a data set: digits, cifar10, cifar100-20."
Source = Annotated[str, typer.Argument(metavar="DATA", help=DATA)]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder or a run folder.")]
Clusters = Annotated[int | None, option("How many clusters to find.")]
Columns = Annotated[str | None, option("Names of its columns: i,j,c_ij. (left,right,link)", panel="Pairs")]
Device = Annotated[str | None, option("cuda, mps or cpu. (the first that is there)")]
QuietFlag = Annotated[bool, option("No progress and no remarks.", "--quiet", "-q")]
Split = Annotated[str | None, option("train, val, test, train+val or train+test of a data set.", panel="Images")]
DataDir = Annotated[Path | None, option("Where the data set of that name lies.", panel="Images")]
Labels = Annotated[
    bool | None,
    option("Sub-folders are classes, for scores. (if all images lie in some)", "--labels/--no-labels", panel="Images"),
]
Strict = Annotated[bool, option("Stop at a file that cannot be read. (skip it)", "--strict", panel="Images")]
Side = Annotated[int | None, option("Resize to so many pixels a side. (fits the images)", panel="Images")]
Channels = Annotated[int | None, option("1 for grey, 3 for colour. (fits the images)", panel="Images")]
Pictures = Annotated[Path | None, option("Of embeddings: the folder of their images.", panel="Images")]
Flip = Annotated[
    bool | None, option("A mirrored image means the same, or not. (it does)", "--flip/--no-flip", panel="Images")
]
Without = Annotated[str, option("Changes that would spoil the images: rotate,solarize.", panel="Images")]
Host = Annotated[str, option("Address to listen on. (127.0.0.1: this machine only)", panel="Server")]
Port = Annotated[int, option("Port to listen on, 0 for a free one. (8765)", panel="Server")]
Token = Annotated[
    str | None, option("Secret in the page's address. (none; off this machine a new one)", panel="Server")
]
Browser = Annotated[bool, option("Open the page in the browser. (yes)", "--browser/--no-browser", panel="Server")]
Backbone = Annotated[str | None, option("tiny, resnet18, resnet34 or timm:NAME. (fits the images)")]
Pretrained = Annotated[bool, option("Begin with the weights of a timm backbone.", "--pretrained")]


_NO_PERMISSION = "no permission to read or write it; change that or choose another place"  # which of them is not known


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one line and exit code 2 for what a person can mend, 130 for a stop; bugs show a traceback."""

    @wraps(command)
    def wrapper(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except InputError as error:
            _stop(f"error: {error}", 2)
        except KeyboardInterrupt as stop:
            _stop(str(stop) or "stopped", 130)
        except OSError as error:  # writes that are not atomic (the log), and what is looked at in passing
            helps = _NO_PERMISSION if isinstance(error, PermissionError) else mend(error)
            if helps is None:
                raise
            _stop(f"error: {error.filename}: {helps}" if error.filename else f"error: {helps}", 2)

    return wrapper


def _stop(text: str, code: int) -> None:
    raise typer.Exit(say_error(text, code))


def reporter(quiet: bool) -> Reporter:
    return Quiet() if quiet else console_reporter()


def class_folders(labels: bool | None) -> bool | Literal["auto"]:
    return "auto" if labels is None else labels


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
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


def example(*lines: str) -> str:
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


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
