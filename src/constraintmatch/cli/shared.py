"""What the commands share: the app, options that several have, one-line errors, and how results are printed."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import constraintmatch
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import write_error
from constraintmatch._internal.progress import Reporter, console_reporter, say_error
from constraintmatch.cli.flags import new_spelling

Flags = dict[str, Any]  # those of a group that are given


class _Command(TyperCommand):
    """A command whose help has a heading for each panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None and parameter.name != "help":  # who reads this has found it
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=26)


class _Commands(TyperGroup):
    """The commands under a heading for what people want; an error that a user can fix is one line and exit code 2."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 (click's)
        groups: dict[str, list[tuple[str, str]]] = {}
        longest = max(map(len, self.commands))
        for name, command in self.commands.items():
            line = (f"{name:<{longest}}", command.get_short_help_str(formatter.width - longest - 6))
            groups.setdefault(str(getattr(command, "rich_help_panel", "")), []).append(line)
        for heading, lines in groups.items():
            with formatter.section(heading):
                formatter.write_dl(lines)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "card":  # of earlier versions
            raise InputError("card is now python docs/make_cards.py FOLDER, in a copy of the source")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:  # typer says nothing
            raise typer.Exit(say_error(str(stop) or "stopped", 130)) from None

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:  # typer ends by itself if the reader had enough, as head has
            code = super().main(*arguments, **{**options, "standalone_mode": False})
        except typer.Abort:
            code = say_error("stopped", 130)
        except InputError as error:
            code = say_error(f"error: {error}", 2)
        except OSError as error:  # writes that are not atomic (the log), and small reads
            place = error.filename or ""
            permitted = not isinstance(error, PermissionError)
            found = write_error(error, place) if permitted else InputError(_NO_PERMISSION, place)
            if found is None and not error.strerror:
                raise
            code = say_error(f"error: {found or InputError(str(error.strerror), place)}", 2)
        except Exception as error:
            code = _usage_error(error)
        sys.exit(code if isinstance(code, int) else 0)


# what torch, the libraries below it and the loader of libraries say
_MEMORY = re.compile(r"not enough memory|out of memory|can't alloc|bad_alloc|failed to map segment|allocate memory")
_SMALLER = "use smaller images (--set side=32), fewer a step (--set images_per_step=64) or another machine"
_NO_PERMISSION = "no permission to read or write it; change that or choose another place"  # which of them is not known


def _usage_error(error: Exception) -> int:
    """Say that memory is full, or a usage error of typer's parser, and its exit code; a bug is raised again.

    A flag of earlier versions is answered with its new spelling.
    """
    if isinstance(error, MemoryError) or _MEMORY.search(str(error)):
        return say_error(f"error: not enough memory ({str(error).partition(chr(10))[0][:200]}); {_SMALLER}", 2)
    said = getattr(error, "format_message", None)
    if said is None:
        raise error
    context, kind = getattr(error, "ctx", None), type(error).__name__
    if kind == "NoArgsIsHelpError":
        typer.echo(said(), err=True)
        return 2
    flag = getattr(error, "option_name", "") if kind == "NoSuchOption" else ""
    if context is not None and context.parent and (new := new_spelling(context.command.name, flag)):
        takes = [one.metavar for one in context.command.params if one.param_type_name == "argument"]
        usage = f": {' '.join([context.command_path, *takes])}" if new.endswith("alone") else ""
        return say_error(f"error: {new}{usage}", 2)
    more = f" (see {context.command_path} --help)" if context is not None else ""
    text = said().strip().rstrip(".")
    return say_error(f"error: {text[:1].lower()}{text[1:]}{more}", 2)


app = typer.Typer(
    name="constraintmatch",
    cls=_Commands,
    help="Turn images and a few same-or-different answers into a clustering model that also places new images.",
    epilog="Start here: constraintmatch demo. Help: constraintmatch train --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def command(panel: str, **groups: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds a command to the app, under a heading of the help.

    Each group of flags arrives as one dictionary of the flags that are given, `--quiet` as a reporter. The docstring
    ends with an example.
    """
    groups = {**groups, "reporter": {"quiet": flag(bool, "Show no progress and no remarks.", "--quiet", "-q")}}

    def add(function: Callable[..., None]) -> Callable[..., None]:
        kind, parameters = inspect.Parameter.KEYWORD_ONLY, list[inspect.Parameter]()
        own = inspect.signature(function, eval_str=True).parameters
        for name, parameter in own.items():
            flags = groups.get(name, {}).items()
            parameters += [inspect.Parameter(name, kind, default=None, annotation=a) for name, a in flags]
            parameters += [] if name in groups else [parameter.replace(kind=kind)]

        def run(**values: Any) -> None:
            _check_places(values)
            for group in groups.keys() & own:
                given = {name: value for name in groups[group] if (value := values.pop(name)) is not None}
                values[group] = (
                    given if group != "reporter" else Reporter() if given.get("quiet") else console_reporter()
                )
            function(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        text, mark, example = str(inspect.getdoc(function)).partition("\n\nExample:\n")
        name = function.__name__.replace("_", "-")
        app.command(name, cls=_Command, rich_help_panel=panel, help=text, epilog=f"\b{mark[1:]}{example}")(run)
        return function

    return add


def _check_places(values: Mapping[str, Any]) -> None:
    """Flags of data sets, which would change nothing about a folder or a file, are an InputError."""
    data, split, data_dir, test = (values.get(name) for name in ("data", "split", "data_dir", "test"))
    if split is None and data_dir is None:
        return
    from constraintmatch.data.datasets import DATASETS

    if data_dir is not None and not data_dir.is_dir():
        raise InputError("no such folder", f"--data-dir {data_dir}", "name the folder that holds the data set")
    for name, given, sources in (("--split", split, (data,)), ("--data-dir", data_dir, (data, test))):
        if given is not None and data is not None and not DATASETS.keys() & set(sources):
            known = ", ".join(DATASETS)
            raise InputError(f"{name} {given} goes with a data set ({known}), not with {data}", fix="leave it out")


def option(text: str, *names: str, panel: str | None = None, hidden: bool = False) -> Any:
    """An option under a heading of the help, which a hidden one is not in; the text says what happens without it."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, hidden=hidden)


def flag(kind: Any, text: str, *names: str, panel: str | None = None, hidden: bool = False) -> Any:
    """A flag of a group of `command`, which may be left out."""
    return Annotated[kind | None, option(text, *names, panel=panel, hidden=hidden)]


def shared(*names: str) -> dict[str, Any]:
    """These of the flags that several commands have."""
    return {name: _SHARED[name] for name in names}


def named_start(given: Flags) -> Flags:
    """The flags with a model or run folder that is given as start under its own name."""
    start = given.get("start")
    if start is None or start in ("own", "pretrained") or start.startswith(("timm:", "torchvision:", "onnx:")):
        return given
    return {**{name: value for name, value in given.items() if name != "start"}, "model": Path(start)}


_START = "A model or run folder, own, pretrained, timm:NAME, torchvision:NAME or onnx:FILE. "
_START += "(pretrained for photographs, else own)"
_SHARED = {
    "columns": flag(str, "Names of the columns of the pairs: i,j,c_ij. (left,right,link)"),
    "device": flag(str, "cuda, mps or cpu. (the first that is there)"),
    "seed": flag(int, "Seed of everything random. (0)"),
    "half": flag(bool, "Keep the weights in half precision.", "--half"),
    "start": flag(str, _START, "--start", "--model"),
    "test": flag(str, "Held-out images, or a data set, for scores.", panel="Images"),
    "split": flag(str, "train, val, test, train+val or train+test of a data set.", panel="Images"),
    "data_dir": flag(Path, "Folder that holds the data set.", panel="Images"),
    "class_folders": flag(
        bool, "Sub-folders are classes, for scores. (if all images are in some)", "--labels/--no-labels", panel="Images"
    ),
    "strict": flag(bool, "Stop at a file that cannot be read. (skip it)", "--strict", panel="Images"),
    "pictures": flag(Path, "For embeddings: the folder of their images.", panel="Images"),
    "engine": flag(str, "ray: on all machines of a Ray cluster; --out is a Parquet folder. (this process)"),
    "flip": flag(
        bool, "Whether a mirrored image belongs to the same cluster. (yes)", "--mirror/--no-mirror", panel="Images"
    ),
}
_DATA = (
    "A folder of images, tar or Parquet shards of them, a .npy or .npz file of images or embeddings, or a data set: "
    "digits, cifar10, cifar100-20."
)
_SET = "Any other setting; may be repeated. (constraintmatch settings lists them)"
Source = Annotated[str, typer.Argument(metavar="DATA", help=_DATA)]
Images = Annotated[str | None, typer.Argument(metavar="DATA", help=_DATA)]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder or a run folder.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=_SET, show_default=False)]


def on_engine(engine: str, kind: Any, model: str, data: str, out: Path, **given: Any) -> list[tuple[str, str]]:
    """Embed or predict on another engine than this process: the rows to print."""
    from constraintmatch.pipeline.cluster import run_on_cluster

    if engine != "ray":
        raise InputError(f"--engine {engine} is not known", fix="give ray, or leave it out")
    if odd := sorted(given.keys() - {"side", "device", "reporter"}):
        raise InputError(f"--{odd[0].replace('_', '-')} does not go with --engine ray", fix="leave one of them out")
    return [("written", f"{run_on_cluster(kind, model, data, out, **given):,} images in {out}")]


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print two columns: names, and values that wrap in a terminal and stay whole in a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"constraintmatch {constraintmatch.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""
