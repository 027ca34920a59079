"""The README's blocks work and its generated parts are current."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

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
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    for line in re.findall(r"^constraintmatch .*$", README, re.MULTILINE):
        _, name, *words = line.split()
        assert name in names
        for word in words:
            assert not word.startswith("--") or word in page


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
