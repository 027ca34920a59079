"""Ask people: loop, annotate, check, repair."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter, print_line
from constraintmatch.cli.flags import read_settings
from constraintmatch.cli.shared import Flags, Images, Sets, Source, command, flag, named_start, print_rows, shared

if TYPE_CHECKING:  # torch
    from constraintmatch.annotate.commands import Loop

_PANEL = "Ask people"
_KIND = flag(
    Literal["which", "pair", "triplet"],
    "which: which of these is the same? pair: same or different? triplet: which is nearer? (which)",
)
_SERVER = {
    "host": flag(str, "Address to listen on. (127.0.0.1: this machine only)", panel="Server"),
    "port": flag(int, "Port to listen on, 0 for a free one. (8765)", panel="Server"),
    "token": flag(str, "Secret in the page's address. (none; a new one if other machines can connect)", panel="Server"),
    "browse": flag(bool, "Open the page in the browser. (yes)", "--browser/--no-browser", panel="Server"),
}


@command(
    _PANEL,
    asked={
        "clusters": flag(int, "Number of clusters. (as many as the answers show)"),
        "questions": flag(int, "Number of questions in all. (200)"),
        "out": flag(Path, "Folder for the start, the answers and the models. (loop)"),
        **shared("start"),
        "kind": _KIND,
        "sort": flag(Path, "At the end, write one folder of links to images per cluster there."),
        "frozen": flag(bool, "Train only the head: a round takes seconds, on a CPU too.", "--frozen"),
        **shared("device"),
    },
    who={
        "terminal": flag(bool, "Ask in the terminal, not on a page.", "--terminal"),
        "oracle": flag(str, "labels: the labels answer, for experiments.", hidden=True),
        "annotator": flag(str, "openai:URL: the model --vlm-model there answers, and is sent the images."),
        "vlm_model": flag(str, "The name of that model.", hidden=True),
        "criterion": flag(str, "What counts as the same, in your words.", hidden=True),
        "vlm_tokens": flag(int, "Tokens that it may use in this run.", hidden=True),
    },
    images=shared("test", "data_dir", "pictures", "flip"),
    door=_SERVER,
)
def loop(
    data: Source, *, asked: Flags, who: Flags, sets: Sets = None, reporter: Reporter, door: Flags, images: Flags
) -> None:
    r"""Ask, train in the background, and ask better questions.

    A start is made once; then every few answers a short round of training makes a new model, which chooses the next
    questions. Stop at any time: the same command goes on.

    Example:
      constraintmatch loop photos --clusters 10 \
        --questions 200 --out loops/photos
      constraintmatch loop digits --clusters 10 \
        --oracle labels --set wrong=0.05
      constraintmatch loop photos --criterion "by species" \
        --annotator openai:http://127.0.0.1:11434/v1 \
        --vlm-model qwen3-vl
    """
    from constraintmatch.annotate import sitting

    words = repr((data, *(sorted(group.items()) for group in (asked, images)), sorted(sets or ())))
    place, out = sitting.Door(**door), asked.get("out", Path("loop"))

    def go_on(*opened: Any) -> Any:
        """The learner of a loop that is there, and what ends it; torch is imported here."""
        from constraintmatch.annotate import commands

        request = _loop(data, asked, images, read_settings("loop", sets))
        found, learner = commands.go_on(request, reporter, *opened)
        return learner, lambda queue: commands.end_page(request, place, found, queue, learner, words)

    if not who and "sort" not in asked:  # a folder to sort into is checked first
        rows = sitting.serve_known_loop(data, out, words, place, reporter, go_on)
        if rows is not None:
            print_rows(rows)
            return
    from constraintmatch.annotate import annotators, commands

    given = read_settings("loop", sets)
    wrong = given.pop("wrong", 0.0)
    _check_who(who, wrong)
    vision = None
    if "annotator" in who:
        url, name = who["annotator"].removeprefix("openai:"), who["vlm_model"]
        vision = annotators.VisionModel(url, name, who.get("criterion", ""), who.get("vlm_tokens"))
    if "terminal" in who:
        asked.setdefault("kind", "pair")  # y and n need no other keys, and two pictures fit a narrow terminal
    request = _loop(data, asked, images, given)
    if vision is not None:
        rows = annotators.ask_vision_model(request, vision, reporter)
    elif "oracle" in who:
        rows = annotators.ask_labels(request, wrong, reporter)
    elif "terminal" in who:
        rows = commands.ask_in_terminal(request, reporter=reporter)
    else:
        rows = commands.ask_on_page(request, place, reporter, words)
    print_rows(rows)


def _loop(data: str, asked: Flags, images: Flags, given: Flags) -> "Loop":
    from constraintmatch.annotate.commands import Loop
    from constraintmatch.pipeline.plan import Train

    rounds = {name: given.pop(name) for name in ("every", "steps", "last_steps", "choose", "seed") if name in given}
    asked = {"out": Path("loop"), **named_start(asked)}
    begun = Train(**images, **given, start=asked.pop("start", None))
    return Loop(data=data, images=begun, **asked, **rounds)


def _check_who(who: Flags, wrong: float) -> None:
    """Flags that contradict each other are an InputError."""
    if (oracle := who.get("oracle")) not in (None, "labels"):
        raise InputError(f"--oracle {oracle}: known is labels")
    if "terminal" in who and oracle:
        raise InputError("--terminal asks you and --oracle asks the labels; give one of them")
    if wrong and oracle is None:
        raise InputError("--set wrong goes with --oracle labels")
    if (annotator := who.get("annotator")) is None:
        if odd := sorted(who.keys() & {"vlm_model", "vlm_tokens", "criterion"}):
            raise InputError(f"--{odd[0].replace('_', '-')} goes with --annotator openai:URL")
    elif not annotator.startswith("openai:"):
        raise InputError(f"--annotator {annotator}: write openai:URL, openai:http://127.0.0.1:8000/v1 for example")
    elif "terminal" in who or oracle:
        raise InputError("--annotator asks a model; leave --terminal and --oracle out")
    elif "vlm_model" not in who:
        raise InputError("--annotator needs the name of the model; add --vlm-model NAME")


@command(
    _PANEL,
    asked={
        "db": flag(Path, "The database of answers; it is made if it does not exist. (answers.db)"),
        "model": flag(Path, "Model or run folder that chooses the questions. (pixels do)"),
        "kind": _KIND,
        "choose": flag(Literal["recommended", "uncertain", "random"], "How questions are chosen. (recommended)"),
        "again": flag(Path, "Ask the pairs of this file first, for example doubtful.csv of a run."),
        "seed": flag(int, "Seed of random questions. (0)"),
        **shared("device"),
    },
    door=_SERVER,
    exchange={
        "export": flag(
            Path, "Write the answers as a pairs file, or new tasks for Label Studio (.json), and exit.", panel="Files"
        ),
        "import_": flag(
            Path,
            "Import pairs, Label Studio's export (.json) or tags of FiftyOne (.csv), and exit.",
            "--import",
            panel="Files",
        ),
        "columns": flag(str, "Names of that file's columns: i,j,c_ij. (left,right,link)", panel="Files"),
        "same": flag(str, "What that export calls same, if not same or yes. (the usual words)", panel="Files"),
        "different": flag(str, "What that export calls different. (the usual words)", panel="Files"),
    },
    images=shared("split", "data_dir", "strict", "pictures"),
)
def annotate(data: Source, *, asked: Flags, reporter: Reporter, exchange: Flags, door: Flags, images: Flags) -> None:
    r"""Ask people about images, on a page in the browser.

    Every answer is saved as it is given; Ctrl-C ends, and the same command goes on. Several people may answer at once.

    Example:
      constraintmatch annotate photos --model runs/photos
      constraintmatch annotate photos --export pairs.csv
      constraintmatch train photos --pairs pairs.csv \
        --model runs/photos --out runs/better
    """
    from constraintmatch.annotate import sitting as page

    export, import_ = (exchange.pop(name, None) for name in ("export", "import_"))
    if export is not None and import_ is not None:
        raise InputError("--export and --import do not go together; give one of them")
    if import_ is None and exchange.keys() & {"same", "different"}:
        raise InputError("--same and --different go with --import EXPORT.json")
    if import_ is None and "columns" in exchange:
        raise InputError("--columns goes with --import PAIRS.csv")
    sitting = page.Sitting(data, **{"db": Path("answers.db"), **asked}, **images)
    if import_ is not None:
        print_rows([("answers", f"{sitting.db} ({page.import_file(sitting, import_, reporter, **exchange)})")])
    elif export is None:
        print_rows(page.serve_page(sitting, page.Door(**door), reporter))
    elif export.suffix == ".json":
        print_rows([("tasks", f"{export} ({page.export_tasks(sitting, export, reporter)})")])
    else:
        print_rows([("pairs", f"{export} ({page.export_answers(sitting, export, reporter)})")])


@command(
    _PANEL,
    how={
        **shared("columns", "split", "data_dir"),
        "close": flag(bool, "Count the pairs that these imply.", "--close"),
        "more": flag(list[Path], "Another file to check with it; may be repeated.", "--with"),
    },
)
def check(
    pairs: Annotated[Path, typer.Argument(metavar="PAIRS", help="The pairs file.")],
    data: Images = None,
    *,
    how: Flags,
    reporter: Reporter,
) -> None:
    r"""Look at a pairs file, and for contradictions in it.

    Shows counts, duplicates, groups of must-links, images without a pair, and contradictions with the chains that prove
    them. The exit code is 2 when there are contradictions. Triplets, labels and sizes of clusters are understood too.

    Example:
      constraintmatch check pairs.csv photos
      constraintmatch check pairs.csv photos \
        --with triplets.csv --with labels.csv
    """
    from constraintmatch.pipeline import sources

    files = [pairs, *how.pop("more", ())]
    counts, contradictions = sources.check_pairs(files, data, **how, reporter=reporter)
    print_rows(counts.items())
    for text in contradictions:
        print_line(f"contradiction: {text}")
    if contradictions:
        raise typer.Exit(2)


@command(_PANEL)
def repair(
    db: Annotated[Path, typer.Argument(metavar="DB", help="A damaged database of answers.")],
    *,
    out: Annotated[Path, typer.Option(help="The new database.", show_default=False)],
    reporter: Reporter,
) -> None:
    """Save the answers of a damaged database.

    Every answer that can be read goes to a new database; the rows that cannot are listed. The old file does not change.

    Example:
      constraintmatch repair answers.db --out repaired.db
    """
    from constraintmatch.annotate.tables import repair_answers

    n, lost = repair_answers(db, out)
    for line in lost:
        reporter.say(f"lost: {line}")
    print_rows([("answers", f"{out} ({n:,} saved)"), ("lost", f"{len(lost):,} rows")])
