"""The command that asks, trains and asks again: loop."""

from pathlib import Path
from typing import Annotated, Literal

from constraintmatch.cli.asking import Choosing, QuestionKind
from constraintmatch.cli.shared import (
    Backbone,
    Browser,
    Channels,
    DataDir,
    Device,
    Flip,
    Host,
    Labels,
    Pictures,
    Port,
    QuietFlag,
    Side,
    Source,
    Strict,
    Token,
    Without,
    app,
    class_folders,
    example,
    guarded,
    option,
    print_rows,
    reporter,
    words,
)
from constraintmatch.errors import InputError
from constraintmatch.flags import GroupedHelp

__all__ = ["way_of_asking"]


@app.command(
    cls=GroupedHelp,
    epilog=example(
        "constraintmatch loop photos --clusters 10 \\",
        "  --questions 200 --out loops/photos",
        "constraintmatch loop digits --clusters 10 \\",
        "  --oracle labels --error 0.05",
    ),
)
@guarded
def loop(
    data: Source,
    clusters: Annotated[int | None, option("How many clusters to find. (as many as the answers show)")] = None,
    questions: Annotated[int, option("How many questions in all. (200)")] = 200,
    out: Annotated[Path, option("Folder for the start, the answers and the models. (loop)")] = Path("loop"),
    model: Annotated[Path | None, option("Model or run folder to begin with. (makes a short start)")] = None,
    kind: Annotated[
        QuestionKind | None, option("which: which of these is the same? pair: same or different? (which)")
    ] = None,
    choose: Annotated[
        Choosing, option("How questions are chosen: recommended, uncertain, random. (recommended)")
    ] = Choosing.recommended,
    every: Annotated[int, option("Answers between two rounds of training. (25)")] = 25,
    steps: Annotated[int | None, option("Steps of a round. (300 on a CPU or frozen, else 1,000)")] = None,
    last_steps: Annotated[int | None, option("Steps of the training after the last answer. (as --steps)")] = None,
    frozen: Annotated[
        bool, option("Leave the network as it is; its head alone learns: seconds a round, on a CPU too.", "--frozen")
    ] = False,
    terminal: Annotated[bool, option("Ask in the terminal, not on a page.", "--terminal")] = False,
    oracle: Annotated[str | None, option("labels: let the labels answer, for experiments.")] = None,
    error: Annotated[float, option("Share of wrong answers with --oracle. (0)")] = 0.0,
    test: Annotated[str | None, option("Held-out images, or a data set, for scores.")] = None,
    seed: Annotated[int, option("Seed of everything random. (0)")] = 0,
    device: Device = None,
    quiet: QuietFlag = False,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    token: Token = None,
    browser: Browser = True,
    backbone: Backbone = None,
    side: Side = None,
    channels: Channels = None,
    data_dir: DataDir = None,
    labels: Labels = None,
    strict: Strict = False,
    pictures: Pictures = None,
    flip: Flip = None,
    without: Without = "",
) -> None:
    """Ask, train in the background, and ask better questions.

    A start is made once; then every few answers a short round of training makes a new model, which chooses the next
    questions. Stop at any time: the same command goes on.
    """
    from constraintmatch.annotate import loop as loops
    from constraintmatch.annotate.server import Door
    from constraintmatch.planning import Train

    way = way_of_asking(terminal, oracle, error)
    opened = Train(
        backbone=backbone,
        side=side,
        channels=channels,
        data_dir=data_dir,
        class_folders=class_folders(labels),
        strict=strict,
        pictures=pictures,
        test=test,
        flip=flip,
        without=words(without),
    )
    asked: Literal["pair", "which"] = "which" if kind is None else kind.value
    if kind is None and terminal:
        asked = "pair"  # y and n need no other keys, and two pictures fit a narrow terminal
    request = loops.Loop(
        data=data,
        out=out,
        clusters=clusters,
        questions=questions,
        model=model,
        kind=asked,
        choose=choose.value,
        every=every,
        steps=steps,
        images=opened,
        seed=seed,
        device=device,
        frozen=frozen,
        last_steps=last_steps,
    )
    if way == "labels":
        rows = loops.ask_labels(request, error, reporter(quiet))
    elif way == "terminal":
        rows = loops.ask_in_terminal(request, reporter=reporter(quiet))
    else:
        rows = loops.ask_on_page(request, Door(host, port, token, browser), reporter(quiet))
    print_rows(rows)


def way_of_asking(terminal: bool, oracle: str | None, error: float) -> Literal["page", "terminal", "labels"]:
    """Who answers; what contradicts itself is an InputError."""
    if oracle not in (None, "labels"):
        raise InputError(f"--oracle {oracle}: known is labels")
    if terminal and oracle:
        raise InputError("--terminal asks a person and --oracle does not; give one of them")
    if error and oracle is None:
        raise InputError("--error goes with --oracle labels")
    if not 0 <= error <= 1:
        raise InputError(f"--error is {error}; it is a share, from 0 to 1")
    return "labels" if oracle else "terminal" if terminal else "page"
