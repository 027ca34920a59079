"""The README's blocks work and its generated parts are current."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from typer.main import get_command

from constraintmatch import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_generated_parts_are_current() -> None:
    spec = importlib.util.spec_from_file_location("make_readme", ROOT / "docs" / "make_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in module.PAGES:
        text = page.read_text(encoding="utf-8")
        assert module.filled(text) == text, "run python docs/make_readme.py"


def test_the_first_commands_are_make_demo_and_make_test() -> None:
    commands = re.findall(r"^(make \w+|constraintmatch \w+)", README, re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in commands if command.startswith("make")} <= targets


def test_every_command_and_flag_of_the_readme_exists() -> None:
    known = commands_and_flags()
    lines = re.findall(r"(?:^|`)constraintmatch ([a-z][^`\n]*)", README.replace("\\\n", " "), re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        name, *words = line.split("#")[0].split()
        assert name in known, line
        flags = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert flags <= known[name], f"{line}: {name} has no {sorted(flags - known[name])}"


def commands_and_flags() -> dict[str, set[str]]:
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    return {
        name: {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        for name, command in commands.items()
    }


@pytest.mark.parametrize("name", ["train", "loop"])
def test_flags_that_a_command_lacks_are_not_among_those_it_has(name: str) -> None:
    assert "--out" in commands_and_flags()[name]
    assert not {"--", "--ou", "--output"} & commands_and_flags()[name]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # three steps make poor clusters
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
