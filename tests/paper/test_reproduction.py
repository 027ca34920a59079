"""docs/reproduction.md: it is current, complete, and says what is missing."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from paper_results import content, write, write_cells
from scripts import ROOT, script

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import write_json
from constraintmatch.data.datasets import STEPS
from constraintmatch.paper.grids import GRIDS, Cell, grid_cells
from constraintmatch.paper.results import find_rows, read_results
from constraintmatch.paper.tables import FIGURES, part_text

RESULTS, DOCS = ROOT / "results" / "paper", ROOT / "docs"
ADVICE = "run python docs/make_reproduction.py"


maker, readme = script("docs", "make_reproduction"), script("docs", "make_readme")


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folds of Table I on CIFAR-10, one of the ablation, and one figure cut."""
    cells = grid_cells("table1", sets=["cifar10"], folds=[0, 1]) + grid_cells("table2", sets=["cifar100-20"], folds=[0])
    cells += grid_cells("noise", sets=["cifar100-20"], folds=[0], steps=3_000)
    return write_cells(tmp_path_factory.mktemp("some"), cells)


@pytest.fixture(scope="module")
def page(some: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their page, with its figures beside it."""
    return maker.write_reproduction(some, tmp_path_factory.mktemp("docs") / "made")


# The committed page


def test_the_page_is_current() -> None:
    assert (DOCS / "reproduction.md").read_text(encoding="utf-8") == maker.reproduction(RESULTS), ADVICE


def test_its_figures_show_the_numbers_of_the_results() -> None:
    """By the digest in the files: the bytes differ between versions of matplotlib."""
    every = maker.drawings(find_rows(read_results(RESULTS)))
    assert every
    for shown in every:
        for suffix in (".png", ".svg"):
            path = DOCS / "figures" / f"{maker.stem(shown)}{suffix}"
            assert path.is_file(), ADVICE
            assert maker.digest(shown).encode() in path.read_bytes(), ADVICE


def test_every_picture_the_page_shows_is_there_and_none_is_left_over() -> None:
    named = set(re.findall(r"\((figures/[^)]+)\)", (DOCS / "reproduction.md").read_text(encoding="utf-8")))
    there = {path.relative_to(DOCS).as_posix() for path in (DOCS / "figures").glob("*.*")}
    assert named == there, ADVICE


# The page of any results


def test_without_results_the_page_has_the_papers_values_and_says_so(tmp_path: Path) -> None:
    text = maker.write_reproduction(tmp_path / "none", tmp_path / "docs").read_text(encoding="utf-8")
    for name in FIGURES:
        assert f"Not run yet (`constraintmatch paper {name}`)." in text
    assert "### CIFAR-100-20, Test: not run here" in text
    assert "57.15*" in text
    assert not (tmp_path / "docs" / "figures").exists()


def test_the_page_shows_what_ran_where_and_what_is_cut(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"\((figures/[^)]+)\)", text):
        assert (page.parent / path).is_file()
    assert "![Wrong annotations of constraints, cut (3,000 steps); CIFAR-100-20 test, 10,000 pairs, 1 fold]" in text
    assert "51 cells (34 of them cut)" in text
    assert re.search(r"\| NVIDIA H200 +\| 2\.11\.0 +\| 0123456789ab +\| +51 \|", text)
    assert re.search(r"\| `table1` +\| CIFAR-10 +\| 13 of 31 \| +18 \| +0 \|", text)
    assert re.search(r"\| `noise` +\| CIFAR-100-20 +\| +2 of 170 \| +168 \| +34 \|", text)


def test_every_result_is_listed_on_the_page(some: Path) -> None:
    text = maker.reproduction(some)
    listed = re.findall(r"^\| `([^`]+)`(?: \(cut\))? ", text, re.MULTILINE)
    names = {path.stem for path in some.glob("*.json")}
    assert names <= set(listed)
    assert set(listed) - names == set(GRIDS)


def test_the_page_is_the_same_when_it_is_made_again(some: Path, page: Path) -> None:
    assert maker.reproduction(some) == page.read_text(encoding="utf-8")


def test_a_figure_whose_results_are_gone_is_removed_and_nothing_else(page: Path, tmp_path: Path) -> None:
    shutil.copytree(page.parent, tmp_path, dirs_exist_ok=True)
    assert list((tmp_path / "figures").iterdir())
    (tmp_path / "figures" / "gallery-cifar10.png").touch()
    maker.write_reproduction(tmp_path / "none", tmp_path)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["gallery-cifar10.png"]


def test_a_gallery_among_the_results_is_shown(tmp_path: Path) -> None:
    pair = {"predicted": ["ship", "ship"], "true": ["truck", "truck"], "confidence": [0.99, 0.98], "link": 0.97}
    gallery = {"format": 1, "kind": "gallery", "name": "gallery-cifar10", "note": "CIFAR-10", "pairs": [pair]}
    gallery |= {"pairs_of_wrong": 2_000, "right_pairs": 1_500}
    text = maker.reproduction(write(tmp_path, gallery))
    assert "![CIFAR-10](figures/gallery-cifar10.png)" in text
    assert "Of the 2,000 pairs of such images 75.0 % have the right pseudo-constraint." in text
    assert re.search(r"\| 0\.97 +\| ship +\| ship +\| truck +\| truck +\| 0\.99 and 0\.98 +\|", text)


def test_a_results_file_of_another_version_stops_the_page(some: Path, tmp_path: Path) -> None:
    old = {**json.loads(next(iter(sorted(some.glob("*.json")))).read_text(encoding="utf-8")), "format": 0}
    with pytest.raises(InputError, match=r"fold0\.json: not a result of format 1"):
        maker.write_reproduction(write(tmp_path / "old", old), tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


# Its parts


def test_the_readmes_table_has_ours_the_papers_and_the_gain(tmp_path: Path) -> None:
    ours = [Cell("cifar10", "constraintmatch", 10_000, fold) for fold in (0, 1)]
    contents = [
        content(Cell("cifar10", "scan"), 0.88),
        *(content(cell, acc) for cell, acc in zip(ours, (0.931, 0.933), strict=True)),
    ]
    lines = readme.reproduction_table(find_rows(read_results(write(tmp_path, *contents)))).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["", "CIFAR-10", "paper", "CIFAR-100-20", "paper"]
    assert cells[2][1:] == ["88.00", "87.60", "not run yet", "45.90"]
    assert cells[3][1:] == ["not run yet", "90.89", "not run yet", "52.45"]
    assert cells[4] == ["**ConstraintMatch**", "93.20 ± 0.14 (n = 2)", "93.17", "not run yet", "57.15"]
    assert cells[5][1:] == ["+5.20", "+5.57", "–", "+11.25"]
    assert cells[6][2::2] == ["+5.08", "+6.51"]  # 93.61 − 88.53 and 57.18 − 50.67


def test_the_readmes_table_has_no_cut_results(tmp_path: Path) -> None:
    cut = replace(Cell("cifar10", "constraintmatch", 10_000), steps=3_000)
    assert readme.reproduction_table(
        find_rows(read_results(write_cells(tmp_path, [cut])))
    ) == readme.reproduction_table({})


def test_the_readmes_part_says_so_when_nothing_was_run(tmp_path: Path) -> None:
    assert "have not been run yet; `constraintmatch paper table1`" in readme.reproduction_part(tmp_path)
    write_cells(tmp_path, [Cell("cifar10", "scan")])
    assert readme.reproduction_table(find_rows(read_results(tmp_path))) in readme.reproduction_part(tmp_path)


def test_a_figure_can_be_had_of_one_length_and_of_a_rehearsal(tmp_path: Path) -> None:
    both = [cell for steps in (3_000, STEPS) for cell in grid_cells("noise", sets=["digits"], folds=[0], steps=steps)]
    folder = write_cells(tmp_path, both)
    assert "cut (3,000 steps); Digits test" in part_text("noise", folder, ["digits"], 3_000)
    assert "cut" not in part_text("noise", folder, ["digits"])


def test_one_part_can_be_had_alone(some: Path) -> None:
    assert part_text("table1", some, ["cifar10"]).startswith("### CIFAR-10, Test\n")
    assert "STL-10" not in part_text("table1", some, ["cifar10"])
    assert part_text("noise", some).startswith("Wrong annotations of constraints, cut (3,000 steps); CIFAR-100-20")
    assert part_text("flip", some) == "Not run yet (`constraintmatch paper flip`)."


def test_a_quoted_system_has_our_scores_beside_it_where_it_was_trained(tmp_path: Path) -> None:
    scores = {"acc": 0.7912, "nmi": 0.7, "ari": 0.6404}
    ours = {"stage": "cc", "scores": scores, "backbone": "resnet18", "arguments": {"epochs": 600}}
    ours |= {"training_seconds": 905.0, "environment": {"gpu": "H200"}}
    write_json(tmp_path / "start-cifar10-cc.json", ours)
    write_json(tmp_path / "start-cifar10-tcc.json", {**ours, "stage": "tcc", "scores": {**scores, "acc": 0.9}})
    lines = maker.reproduction(tmp_path / "paper").splitlines()
    cells = {line.split(" | ")[0].strip(" |"): line for line in lines if line.startswith("| CIFAR-10")}
    assert [cell.strip() for cell in cells["CIFAR-10, CC"].split("|")[2:-1]] == [
        *("79.00", "70.50", "63.70", "79.12", "70.00", "64.04"),
        *("resnet18", "600", "15", "H200"),
    ]
    assert "90.00" in cells["CIFAR-10, TCC"]
    assert "not run yet" in cells["CIFAR-10, PICA"]
