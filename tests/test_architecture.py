"""The house: which folder may import which, what each module offers, what stays light, and how large it may grow."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "constraintmatch"

# A folder imports only folders above it.
ORDER = [
    "_internal",
    "data",
    "constraints",
    "models",
    "training",
    "evaluation",
    "methods",
    "methods/others",
    "questions",
    "pipeline",
    "estimator",
    "annotate",
    "paper",
    "cli",
    "__main__",
]
STRANGERS = [("constraints", "data"), ("paper", "annotate")]  # the first does not import the second
LIGHT = ["_internal", "data", "constraints", "questions", "cli"]  # without torch and scikit-learn

VISIBLE_NAMES = 12  # modules and folders in the package whose names do not begin with an underscore
FILES_IN_A_FOLDER = 14
FILES = 97
LINES = 24_066  # goal: 17_500
LINES_OF_A_FILE = 400
CLASSES = 126  # goal: 110
LINES_OF_A_FUNCTION = 60  # with its signature
FUNCTIONS_OF_MANY_PARAMETERS = 10  # the methods and the estimator
MANY = 8  # parameters

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
NAMES = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path in MODULES]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> list[ast.Import | ast.ImportFrom | ast.ClassDef | Function]:
    """The imports, classes and functions of a file, wherever they are in it."""
    wanted = ast.Import | ast.ImportFrom | ast.ClassDef | Function
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, wanted)]


def folder_of(path: Path) -> str:
    """The folder of a file; a file at the top is a folder of its own."""
    folder = path.parent.relative_to(PACKAGE).as_posix()
    return path.stem if folder == "." else folder


@functools.cache
def imported(path: Path) -> frozenset[Path]:
    """The package's files that a file imports, anywhere in it; the package's own `__init__` is left out."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: import by full name"
            found |= {file_of(f"{node.module}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
    return frozenset(file for file in found if file not in (None, PACKAGE / "__init__.py", path))


def file_of(name: str) -> Path | None:
    """The file of `constraintmatch.methods.METHODS` is that of `methods`; None for what is not of the package."""
    parts = name.split(".")
    if parts[0] != "constraintmatch":
        return None
    for end in range(len(parts), 0, -1):
        place = PACKAGE.joinpath(*parts[1:end])
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                return file
    raise AssertionError(f"no file for {name}")


# Who imports whom


def test_every_folder_has_its_place_in_the_order() -> None:
    assert {folder_of(path) for path in MODULES} == set(ORDER)


def test_a_module_imports_only_folders_above_its_own() -> None:
    for path, name in zip(MODULES, NAMES, strict=True):
        above = ORDER[: ORDER.index(folder_of(path)) + 1]
        assert {folder_of(file) for file in imported(path)} <= set(above), name


@pytest.mark.parametrize("folder", ORDER)
def test_the_files_of_a_folder_import_each_other_in_one_direction(folder: str) -> None:
    own = {path for path in MODULES if folder_of(path) == folder}
    assert own
    TopologicalSorter({path: imported(path) & own for path in own}).prepare()  # raises CycleError


@pytest.mark.parametrize(("one", "other"), STRANGERS)
def test_folders_that_are_used_alone_know_nothing_of_each_other(one: str, other: str) -> None:
    for path in (path for path in MODULES if folder_of(path) == one):
        assert other not in {folder_of(file) for file in imported(path)}, path.name


def test_no_module_takes_a_private_name_of_another() -> None:
    for path in MODULES:
        froms = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom) and file_of(node.module or "")]
        for node in froms:
            private = [name.name for name in node.names if name.name.startswith("_") and name.name != "__version__"]
            assert set(private) <= {"_internal"}, f"{path} line {node.lineno}: {private}"


def test_importing_the_light_folders_does_not_import_torch_or_scikit_learn() -> None:
    """Nor do constraints alone import what reads tables."""
    light = [name for path, name in zip(MODULES, NAMES, strict=True) if folder_of(path) in LIGHT]
    assert {Path(name).parent.as_posix() for name in light} == set(LIGHT)
    modules = ", ".join(f"constraintmatch.{name.removesuffix('/__init__').replace('/', '.')}" for name in light)
    code = f"""
import sys, constraintmatch.constraints.constraint_set
print({{"torch", "pyarrow", "scipy", "pandas"}} & set(sys.modules))
import constraintmatch, {modules}
print({{"torch", "sklearn"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "set()"]


# What a module offers


def test_a_list_of_public_names_is_exact_and_sorted() -> None:
    """A module needs no `__all__`: what begins with an underscore is its own. One that has it keeps it right."""
    lists = {path: listed for path in MODULES if (listed := listed_names(tree_of(path))) is not None}
    assert lists
    for path, listed in lists.items():
        tree = tree_of(path)
        defined = {node.name for node in tree.body if isinstance(node, Function | ast.ClassDef) and not command(node)}
        public = {name for name in defined if not name.startswith("_")}
        assert public <= set(listed), f"{path}: public but not in __all__: {sorted(public - set(listed))}"
        assert set(listed) <= defined | set(assigned_or_imported(tree)), f"{path}: __all__ names what is not there"
        in_order = sorted(set(listed), key=lambda name: (not name.isupper(), name[:1].islower(), name))
        assert listed == in_order, path


def command(node: Function | ast.ClassDef) -> bool:
    """Whether a function belongs to the command line's app, which then offers it."""
    return any(ast.unparse(decorator).startswith("app.") for decorator in node.decorator_list)


def listed_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [ast.unparse(target) for target in targets] == ["__all__"]:
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


# How large it may grow


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions() -> Iterator[tuple[str, Function]]:
    for path, name in zip(MODULES, NAMES, strict=True):
        yield from ((f"{name}.{node.name}", node) for node in nodes_of(path) if isinstance(node, Function))


def parameters(node: Function) -> list[str]:
    given = node.args
    return [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs) if arg.arg not in ("self", "cls")]


def test_the_package_fits_on_a_page() -> None:
    visible = [path for path in PACKAGE.iterdir() if not path.name.startswith(("_", "."))]
    assert len([path for path in visible if path.is_dir() or path.suffix == ".py"]) <= VISIBLE_NAMES
    folders = {path.parent for path in MODULES}
    crowded = {folder_of(folder / "x.py"): len(list(folder.glob("*.py"))) for folder in folders}
    assert max(crowded.values()) <= FILES_IN_A_FOLDER, crowded
    assert len(MODULES) + 1 <= FILES


def test_files_and_the_whole_stay_short() -> None:
    lines = {name: lines_of(path) for path, name in zip(MODULES, NAMES, strict=True)}
    assert {name: n for name, n in lines.items() if n > LINES_OF_A_FILE} == {}
    assert sum(lines.values()) + lines_of(PACKAGE / "__init__.py") <= LINES
    assert sum(isinstance(node, ast.ClassDef) for path in MODULES for node in nodes_of(path)) <= CLASSES


def test_functions_stay_short_and_take_few_parameters() -> None:
    length = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert {name: n for name, n in length.items() if n > LINES_OF_A_FUNCTION} == {}
    many = [name for name, node in functions() if len(parameters(node)) > MANY]
    assert len(many) <= FUNCTIONS_OF_MANY_PARAMETERS, many
