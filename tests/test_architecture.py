"""The order of the rooms: who may import whom, what each module offers, and that docs/architecture.md says so."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "constraintmatch"
DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"

# From the ground up: a module imports only modules that stand before it. A folder is one room; INSIDE has its order.
# The table in docs/architecture.md is the same list: a new module gets a line here and a row there.
ROOMS = [
    "errors",
    "files",
    "progress",
    "draws",
    "decoding",
    "image_cache",
    "images",
    "dataset_files",
    "datasets",
    "pair_cells",
    "pairs_file",
    "pair_graph",
    "constraints",
    "judging",
    "answers",
    "landscape",
    "propagation",
    "exemplars",
    "questions",
    "oracle",
    "pixel_ops",
    "views",
    "batches",
    "norms",
    "models",
    "scan_import",
    "objectives",
    "runs",
    "stepping",
    "training",
    "evaluation",
    "methods",
    "running",
    "pretraining",
    "rounds",
    "markup",
    "charts",
    "galleries",
    "report",
    "estimator",
    "sources",
    "joining",
    "embedding",
    "sorting",
    "planning",
    "workflow",
    "demo",
    "annotate",
    "paper",
    "flags",
    "cli",
    "__main__",
]
INSIDE = {
    "methods": [
        "neighbours",
        "linear_heads",
        "preparation",
        "heads",
        "merging",
        "labels",
        "pairs",
        "simclr",
        "byol",
        "linear_scan",
        "scan",
        "self_label",
        "neighbour_label",
        "propagate",
        "careful",
        "constrained",
        "pseudo_label",
        "constraintmatch",
        "supervised",
        "fully_constrained",
        "__init__",
    ],
    "annotate": [
        "__init__",
        "choosing",
        "clashes",
        "records",
        "database",
        "looks",
        "store",
        "label_studio",
        "exchange",
        "beliefs",
        "clusters",
        "messages",
        "pictures",
        "security",
        "serving",
        "refill",
        "desk",
        "app",
        "session",
        "starting",
        "learning",
        "terminal",
        "loop",
    ],
    "paper": [
        "__init__",
        "published",
        "cells",
        "results",
        "tables",
        "terminal",
        "cards",
        "figures",
        "runner",
        "gallery",
        "reproduction",
        "trials",
        "search",
    ],
    "cli": [
        "shared",
        "training",
        "looking",
        "research",
        "searching",
        "asking",
        "looping",
        "__init__",
    ],
}
FOUNDATION = {"errors", "files"}  # everybody may use them; the table does not repeat them
STRANGERS = [("images", "constraints", "views", "models", "objectives"), ("annotate", "paper")]
LONGEST_MODULE, LONGEST_BODY = 520, 50

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
NAMES = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path in MODULES]
assert NAMES[0] == "__main__"  # a script: it offers nothing
every_module = pytest.mark.parametrize("path", MODULES, ids=NAMES)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(name: str) -> str:
    return name.split("/")[0]


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """The package's modules that a file imports, anywhere in it, as paths below the package without suffix."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: import by full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from filter(None, map(module_of, names))


@functools.cache
def module_of(name: str) -> str | None:
    """`constraintmatch.methods.pairs.Selection` is of `methods/pairs`; what is not of the package is None."""
    parts = name.split(".")
    if parts[0] != "constraintmatch":
        return None
    for end in range(len(parts), 1, -1):
        place = PACKAGE.joinpath(*parts[1:end])
        if place.with_suffix(".py").is_file():
            return "/".join(parts[1:end])
        if (place / "__init__.py").is_file():
            return "/".join((*parts[1:end], "__init__"))
    return "__init__"


@functools.cache
def rooms_of(path: Path) -> frozenset[str]:
    """The rooms a file reaches into, other than its own."""
    own = room_of(path.relative_to(PACKAGE).with_suffix("").as_posix())
    return frozenset(room_of(name) for name in imported(path)) - {own, "__init__"}


def files_of(room: str) -> list[Path]:
    return [path for path, name in zip(MODULES, NAMES, strict=True) if room_of(name) == room]


def reachable(room: str) -> set[str]:
    """Every room that importing this one may bring along."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        for path in files_of(waiting.pop()):
            new = rooms_of(path) - found
            found |= new
            waiting.extend(new)
    return found


def test_every_module_has_a_room_and_every_room_a_module() -> None:
    assert sorted({room_of(name) for name in NAMES}) == sorted(ROOMS)


@every_module
def test_a_module_imports_only_what_stands_below_it(path: Path) -> None:
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    below = set(ROOMS[: ROOMS.index(room_of(name))])
    assert rooms_of(path) <= below, f"{name} reaches up to {sorted(rooms_of(path) - below)}"


@pytest.mark.parametrize("room", INSIDE)
def test_a_folder_keeps_its_own_order(room: str) -> None:
    order = INSIDE[room]
    assert sorted(path.stem for path in files_of(room)) == sorted(order)
    for path in files_of(room):
        inner = {Path(name).name for name in imported(path) if room_of(name) == room}
        assert inner <= set(order[: order.index(path.stem)]), f"{path.stem} reaches up"


@pytest.mark.parametrize("group", STRANGERS, ids=" ".join)
def test_rooms_that_can_be_replaced_alone_know_nothing_of_each_other(group: tuple[str, ...]) -> None:
    assert set(group) <= set(ROOMS)
    for room in group:
        assert not reachable(room) & (set(group) - {room}), f"{room} knows of others"


@every_module
def test_no_module_takes_a_private_name_of_another(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and module_of(node.module or ""):
            private = [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"]
            assert not private, f"line {node.lineno}: {private}"


@pytest.mark.parametrize("path", MODULES[1:], ids=NAMES[1:])
def test_all_names_exactly_what_is_public_and_is_sorted(path: Path) -> None:
    tree = tree_of(path)
    listed = listed_names(tree)
    assert listed is not None, "the module has no __all__"
    defined = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not command(node)
    }
    public = {name for name in defined if not name.startswith("_")}
    assert public <= set(listed), f"public but not in __all__: {sorted(public - set(listed))}"
    assert set(listed) <= defined | set(assigned_or_imported(tree)), "__all__ names what is not there"
    assert listed == sorted(set(listed), key=lambda name: (not name.isupper(), name[:1].islower(), name))


def command(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a function belongs to the command line's app, which then offers it."""
    return any(ast.unparse(decorator).startswith("app.") for decorator in node.decorator_list)


def listed_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return None


def assigned_or_imported(tree: ast.Module) -> Iterator[str]:
    tried = [inner for node in tree.body if isinstance(node, ast.Try) for inner in node.body]
    for node in (*tree.body, *tried):
        if isinstance(node, ast.Assign):
            yield from (ast.unparse(target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)


@every_module
def test_modules_and_functions_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_MODULE, f"{lines} lines: part the module"
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {node.name: body_lines(node) for node in functions if body_lines(node) > LONGEST_BODY}
    assert not long, f"part these functions: {long}"


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines after the signature, which is left out: a method's or command's signature is its configuration."""
    assert node.end_lineno is not None
    return node.end_lineno - node.body[0].lineno + 1


def test_importing_the_light_modules_does_not_import_torch() -> None:
    light = ("images", "datasets", "constraints", "questions", "cli")
    modules = ["constraintmatch", *(f"constraintmatch.{name}" for name in light)]
    code = f"import sys, {', '.join(modules)}; print([name for name in ('torch', 'sklearn') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The document


def table_rows() -> list[tuple[str, str]]:
    """(module, imports) of each row of the table of rooms."""
    rows = re.findall(
        r"^\| \d+ \| `(\w+)(?:\.py|/)` \|.*\| ([^|]*) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [(name, imports) for name, imports in rows]


def test_the_document_has_the_rooms_in_their_order() -> None:
    assert [name for name, _ in table_rows()] == ROOMS


def test_the_document_says_who_imports_whom() -> None:
    said = {name: set(re.findall(r"\w+", imports)) for name, imports in table_rows()}
    true = {room: set().union(*map(rooms_of, files_of(room))) - FOUNDATION for room in ROOMS}
    wrong = {
        room: ", ".join(sorted(true[room], key=[*ROOMS, *sorted(true[room])].index)) or "–"
        for room in ROOMS
        if said.get(room) != true[room]
    }
    assert not wrong, "the last column of the table should be: " + "; ".join(f"{k} | {v}" for k, v in wrong.items())


def test_the_files_the_document_names_exist() -> None:
    named = set(
        re.findall(r"`((?:docs|tests|benchmarks|research|src)/[\w./-]+)`", DOCUMENT.read_text(encoding="utf-8"))
    )
    assert named
    missing = [name for name in sorted(named) if not (PACKAGE.parents[1] / name).exists()]
    assert not missing
