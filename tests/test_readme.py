"""README and documentation: their commands and links work, and their generated parts are current."""

import ast
import functools
import json
import re
import shlex
from pathlib import Path

import pytest
from scripts import ROOT, script
from typer.main import get_command
from typer.testing import CliRunner

from constraintmatch import cli

README = (ROOT / "README.md").read_text(encoding="utf-8")
# pages that people write; decisions keep the words of their time, cli.md and api.md have tests of their own
PAGES = sorted(
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if path.parent.name != "decisions" and path.name not in ("cli.md", "api.md")
)


def test_the_readme_has_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120


def test_the_generated_parts_are_current() -> None:
    maker = script("docs", "make_readme")
    marked = [page for page in maker.PAGES if "<!-- end of " in page.read_text(encoding="utf-8")]
    assert ROOT / "README.md" in marked
    for page in marked:
        text = page.read_text(encoding="utf-8")
        assert maker.filled(text) == text, f"{page.name}: run python docs/make_readme.py"


def test_the_python_reference_is_current() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert script("docs", "make_api_docs").api_docs() == text, "run python docs/make_api_docs.py"


def test_the_results_table_has_at_most_eight_rows() -> None:
    table = README.split("<!-- results table -->\n")[1].split("<!-- end of")[0]
    assert 3 <= len(table.splitlines()) - 2 <= 8


def test_the_first_commands_are_make_demo_and_make_test() -> None:
    commands = re.findall(r"^(make \w+|constraintmatch \w+)", README, re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in commands if command.startswith("make")} <= targets


def commands_in(text: str) -> list[str]:
    """Every `constraintmatch …` of a page: lines of code, and code inside a sentence."""
    return re.findall(r"(?:^ *|`)constraintmatch ([a-z][^`\n]*)", text.replace("\\\n", " "), re.MULTILINE)


@functools.cache
def commands_and_flags() -> dict[str, set[str]]:
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    return {
        name: {flag for one in command.params for flag in (*one.opts, *one.secondary_opts) if flag.startswith("-")}
        for name, command in commands.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_command_and_flag_of_a_page_exists(page: Path) -> None:
    known = commands_and_flags()
    for line in commands_in(page.read_text(encoding="utf-8")):
        name, *words = shlex.split(line, comments=True)
        assert name in known, line
        flags = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert flags <= known[name], f"{line}: {name} has no {sorted(flags - known[name])}"


def test_the_pages_have_commands() -> None:
    found = [line for page in PAGES for line in commands_in(page.read_text(encoding="utf-8"))]
    assert len(found) > 40
    assert {"train", "loop", "embed", "pretrain", "search"} <= {line.split()[0] for line in found}


def test_every_flag_in_a_sentence_belongs_to_a_command() -> None:
    known = set().union(*commands_and_flags().values())
    for page in PAGES:
        told = set(re.findall(r"`(?:[a-z]+ )?(--[a-z][a-z-]+)", page.read_text(encoding="utf-8")))
        assert told <= known, f"{page.name}: no command has {sorted(told - known)}"


def test_every_setting_of_a_page_exists() -> None:
    listed = CliRunner().invoke(cli.app, ["settings"], env={"COLUMNS": "200"}).stdout
    titles = re.findall(r"^Stage (\w+)", listed, re.MULTILINE)
    names = set(re.findall(r"^  (\w+)  ", listed, re.MULTILINE)) - {"name"}
    assert len(names) > 30
    used = {name for page in PAGES for name in re.findall(r"--set ([a-z_.]+)=", page.read_text(encoding="utf-8"))}
    assert {"merge", "linear_scan.entropy_weight"} <= used
    for name in used:
        stage, _, setting = name.rpartition(".")
        assert setting in names, name
        assert not stage or stage in titles, name


@pytest.mark.parametrize("name", ["train", "loop"])
def test_flags_that_a_command_lacks_are_not_among_those_it_has(name: str) -> None:
    assert "--out" in commands_and_flags()[name]
    assert not {"--", "--ou", "--output"} & commands_and_flags()[name]


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).is_file()]


def test_the_tree_of_the_readme_names_the_package() -> None:
    block = README.split("src/constraintmatch/\n")[1].split("```")[0]
    told = {line.split()[0] for line in block.splitlines()}
    package = ROOT / "src" / "constraintmatch"
    found = {f"{path.name}/" if path.is_dir() else path.name for path in package.iterdir() if path.name[0] not in "_."}
    assert told == found - {"py.typed"}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # three steps make poor clusters
@pytest.mark.usefixtures("narrow_networks")
def test_the_python_block_has_at_most_six_lines_of_code_and_runs(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    code = [line for line in block.group(1).splitlines() if line.strip()]
    assert len(code) <= 6
    quick = block.group(1).replace(
        "random_state=0", 'random_state=0, steps=3, options={"simclr": {"epochs": 1}, "linear_scan": {"n_tries": 1}}'
    )
    assert quick != block.group(1)
    fewer = quick.replace(
        'digits = load_dataset("digits", "train")', 'digits = load_dataset("digits", "train").take(range(300))'
    )
    assert fewer != quick
    lines = ast.parse(fewer)
    scope: dict[str, object] = {"print": lambda score: scope.update(score=score)}
    exec(compile(lines, str(tmp_path), "exec"), scope)
    assert 0 < float(str(scope["score"])) <= 1


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebooks_were_run_and_stay_small(path: Path) -> None:
    assert path.stat().st_size < 300_000
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    assert path.name in (ROOT / "docs" / "tutorials" / "python.md").read_text(encoding="utf-8")
