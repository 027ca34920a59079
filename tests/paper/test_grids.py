"""The grids as data: what the paper's tables and figures are made of."""

from typing import Any

import pytest

from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import DATASETS
from constraintmatch.methods import METHODS
from constraintmatch.paper.grids import GRIDS, PAPER_SETS, STEPS, Cell, grid_cells
from constraintmatch.pipeline.config import split_options


def test_table_1_has_seven_rows_a_set_and_its_start_only_once() -> None:
    cells = grid_cells("table1", sets=["cifar10"])
    assert len(cells) == 1 + 5 * 6
    assert sum(cell.method == "scan" for cell in cells) == 1
    assert {cell.n_constraints for cell in cells} == {0, 5_000, 10_000}


def test_table_1_is_of_the_papers_five_sets() -> None:
    assert {cell.dataset for cell in grid_cells("table1", folds=[0])} == set(PAPER_SETS)


def test_overclustering_asks_for_five_times_as_many_clusters() -> None:
    wide = {cell.dataset: cell.n_clusters for cell in grid_cells("table3", folds=[0])}
    assert wide == {"cifar10": 50, "cifar100-20": 100}


@pytest.mark.parametrize("name", GRIDS)
def test_no_two_cells_of_a_grid_have_the_same_name(name: str) -> None:
    cells = grid_cells(name, folds=[0, 1])
    assert len({cell.name for cell in cells}) == len(cells) == len(set(cells))


@pytest.mark.parametrize("name", GRIDS)
def test_every_option_of_a_grid_is_one_that_its_method_has(name: str) -> None:
    cells = grid_cells(name, folds=[0])
    assert cells
    for cell in cells:
        if cell.options:
            assert cell.method in METHODS
            split_options(cell.method, dict(cell.options))


def test_a_cut_grid_has_other_names_than_a_full_one_except_for_the_start() -> None:
    full, cut = grid_cells("table2", folds=[0]), grid_cells("table2", folds=[0], steps=3_000)
    assert {cell.name for cell in full} & {cell.name for cell in cut} == {"cifar100-20-scan", "cifar10-scan"}
    assert {cell.cut for cell in cut if cell.method != "scan"} == {True}
    assert not any(cell.cut for cell in full)
    assert {cell.steps for cell in full} == {STEPS}


def test_the_same_training_is_one_cell_in_every_grid_that_shows_it() -> None:
    plain = Cell("cifar100-20", "constraintmatch", 10_000, 0)
    for name in ("table1", "table2", "flip", "links", "entropy", "amount", "noise"):
        assert plain in grid_cells(name, sets=["cifar100-20"], folds=[0])


def test_a_kind_of_noise_is_part_of_a_cell_only_where_there_is_noise() -> None:
    plain = Cell("cifar10", "constrained", 5_000)
    assert Cell("cifar10", "constrained", 5_000, noise_of="alike") == plain
    assert "noise_of" not in plain.request()  # results from before it came up are the same cells
    assert Cell("cifar10", "constrained", 5_000, noise=0.1, noise_of="alike").request()["noise_of"] == "alike"
    with pytest.raises(InputError, match="unknown noise_of 'some'; known are all, alike"):
        Cell("cifar10", "constrained", 5_000, noise=0.1, noise_of="some")


def test_names_say_what_differs_from_the_papers_setting() -> None:
    assert Cell("cifar10", "constraintmatch", 10_000, 2).name == "cifar10-constraintmatch-10000-fold2"
    assert Cell("cifar10", "constrained", 5_000, noise=0.1).name == "cifar10-constrained-5000-noise0.1-fold0"
    alike = Cell("cifar10", "constrained", 5_000, noise=0.1, noise_of="alike")
    assert alike.name == "cifar10-constrained-5000-noise0.1alike-fold0"
    odd = Cell("cifar10", "constraintmatch", 10_000, options=(("max_entropy", 0.1),), n_clusters=50, steps=300)
    assert odd.name == "cifar10-constraintmatch-10000-k50-max_entropy=0.1-fold0-steps300"


def test_a_grid_can_be_cut_by_method_and_number_of_constraints() -> None:
    cells = grid_cells("table1", sets=["cifar10"], folds=[0], methods=["constrained"], n_constraints=[5_000])
    assert [cell.name for cell in cells] == ["cifar10-constrained-5000-fold0"]


def test_folds_come_one_after_the_other() -> None:
    folds = [cell.fold for cell in grid_cells("table1", sets=["cifar10"], folds=[0, 1])]
    assert folds == sorted(folds)


def test_several_grids_are_one_queue_without_repetition() -> None:
    names = [cell.name for cell in grid_cells("table1", "table2", "flip", sets=["cifar100-20"], folds=[0, 1])]
    each = [cell.name for name in ("table1", "table2", "flip") for cell in grid_cells(name, sets=["cifar100-20"])]
    assert len(names) == len(set(names))
    assert set(names) == {name for name in each if "fold" not in name or name[-5:] in ("fold0", "fold1")}
    assert [name[-1] for name in names if "fold" in name] == sorted(name[-1] for name in names if "fold" in name)


def test_a_queue_takes_of_each_grid_the_sets_that_it_has() -> None:
    cells = grid_cells("table1", "table3", sets=["stl10", "cifar10"], folds=[0])
    assert {(cell.dataset, cell.n_clusters) for cell in cells} == {("stl10", 10), ("cifar10", 10), ("cifar10", 50)}


@pytest.mark.parametrize(
    ("names", "cuts", "said"),
    [
        ("table9", {}, "unknown table or figure 'table9'; known are table1"),
        ("table3", {"sets": ["stl10"]}, "table3 has no set 'stl10'; there are cifar10, cifar100-20"),
        ("table2 table3", {"sets": ["stl10"]}, "table2 and table3 have no set 'stl10'"),
        ("table1", {"folds": [-1]}, "fold -1 does not exist"),
        ("table1", {"folds": [5]}, "fold 5 does not exist; there are 0 to 4"),
        ("table1", {"folds": []}, "no folds are left; name some: --folds 0-4"),
        ("table1", {"sets": []}, "no sets are left; name some: --sets cifar10"),
        ("table1", {"methods": []}, "no methods are left; name some: --methods constrained"),
        ("table1", {"n_constraints": []}, "no constraints are left; name some: --constraints 10000"),
        ("table1", {"steps": 0}, "0 steps: the paper's trainings have 20,000"),
        ("table1", {"steps": 30_000}, "30,000 steps: the paper's trainings have 20,000"),
        ("table1", {"methods": ["simclr"]}, "no cell has the method 'simclr'; there are scan, constraintmatch"),
        ("table1", {"n_constraints": [7]}, "no cell has the number of constraints 7; there are 5,000, 10,000"),
    ],
)
def test_what_is_not_there_is_one_clear_line(names: str, cuts: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        grid_cells(*names.split(), **cuts)


def test_a_longer_training_does_not_take_the_name_of_a_full_one() -> None:
    assert Cell("cifar10", "constrained", 10, steps=STEPS + 1).name.endswith(f"-steps{STEPS + 1}")


def test_the_start_of_a_cell_is_named_by_set_and_clusters() -> None:
    assert Cell("cifar10", "constrained", 10).start == "scan-cifar10"
    assert Cell("cifar100-20", "scan", n_clusters=100).start == "scan-cifar100-20-100"
    assert Cell("cifar10", "supervised").start == "random"
    assert Cell("digits", "scan").n_clusters == DATASETS["digits"].n_clusters
