"""Tables in a terminal: nothing wider than it, nothing lost."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_results import write_cells

from constraintmatch.paper.grids import grid_cells
from constraintmatch.paper.tables import for_terminal, markdown, part_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = grid_cells("table1", "flip", sets=["cifar10"], folds=[0, 1])
    cells += [replace(cell, steps=3_000) for cell in cells if cell.method == "constraintmatch"]
    folder = write_cells(tmp_path_factory.mktemp("results"), cells)
    return "\n\n".join(part_text(name, folder, ["cifar10"]) for name in ("table1", "flip"))


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_lost(text: str, width: int) -> None:
    shown = for_terminal(text, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "|" not in shown
    numbers = r"\d+\.\d\d(?: ± \d+\.\d\d)?\*?"
    assert set(re.findall(numbers, text)) == set(re.findall(numbers, " ".join(shown.split())))


def test_every_part_of_a_table_says_what_its_lines_are(text: str) -> None:
    shown = for_terminal(text, 60)
    header = [line.split() for line in shown.splitlines() if re.search(r"\b(ACC|NMI|ARI) +paper +diff\.$", line)]
    assert [line[0] for line in header] == ["pairs"] * 6
    assert len(re.findall(r"^ConstraintMatch +10,000 ", shown, re.MULTILINE)) >= 6


def test_a_wide_terminal_has_each_table_in_one_part() -> None:
    table = markdown(["", "pairs", "ACC", "paper"], [["Constrained", "10,000", "52.40", "52.45"]])
    assert for_terminal(table, 80).splitlines() == [
        "              pairs    ACC  paper",
        "Constrained  10,000  52.40  52.45",
    ]


def test_headings_lists_and_code_lose_their_marks() -> None:
    assert for_terminal("### CIFAR-10, Test\n\nNot run yet (`constraintmatch paper flip`).", 40).splitlines() == [
        "CIFAR-10, Test",
        "",
        "Not run yet (constraintmatch paper",
        "flip).",
    ]


words = st.text("abc", min_size=1, max_size=12)


@given(st.lists(st.lists(words, min_size=5, max_size=5), min_size=1, max_size=4), st.integers(40, 90))
@settings(max_examples=30, deadline=None)
def test_all_cells_of_any_table_are_shown(rows: list[list[str]], width: int) -> None:
    shown = for_terminal(markdown(["", "A", "paper", "B", "paper"], rows), width)
    assert max(map(len, shown.splitlines())) <= width
    assert {cell for row in rows for cell in row} <= set(shown.split())
