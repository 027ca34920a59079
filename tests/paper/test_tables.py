"""The paper's printed numbers, results read back and grouped, and the tables made of both."""

import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_results import content, write, write_cells

from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import DATASETS
from constraintmatch.paper.grids import PAPER_SETS, Cell, grid_cells
from constraintmatch.paper.results import (
    METRICS,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    PublishedRow,
    Result,
    Row,
    compare,
    find_rows,
    published,
    read_results,
)
from constraintmatch.paper.tables import markdown, table

OURS, THEIRS = Cell("cifar10", "constraintmatch", 10_000), Cell("cifar10", "constrained", 10_000)


# What the paper prints


def printed(table: tuple[PublishedRow, ...], method: str, n: int | None, split: str = "test") -> PublishedRow:
    row = published(table, split, method, n)
    assert row is not None
    return row


def gains(table: tuple[PublishedRow, ...], dataset: str) -> Iterator[tuple[float, float]]:
    """(points, per cent) of ConstraintMatch over constrained at 10,000, for ACC, NMI and ARI."""
    ours, theirs = printed(table, "constraintmatch", 10_000), printed(table, "constrained", 10_000)
    for metric in METRICS:
        high, low = ours.value(dataset, metric), theirs.value(dataset, metric)
        assert high is not None
        assert low is not None
        yield high - low, 100 * (high - low) / low


def test_the_gains_of_table_1_are_those_of_the_papers_text() -> None:
    stated = [(4.70, 8.96), (7.80, 16.75), (6.80, 20.12)]
    assert list(gains(TABLE_1, "cifar100-20")) == [pytest.approx(pair, abs=0.0051) for pair in stated]


def test_the_gains_of_table_3_are_those_of_the_papers_text() -> None:
    (acc, acc_share), (nmi, nmi_share), _ = gains(TABLE_3, "cifar100-20")
    assert (acc, nmi) == pytest.approx((4.24, 8.03), abs=1e-9)
    assert (acc_share, nmi_share) == pytest.approx((10.75, 18.11), abs=0.01)  # the text cuts 10.759 instead of rounding


def test_table_1_has_every_row_and_the_dashes_where_the_paper_has_them() -> None:
    assert [row.title for row in TABLE_1 if row.split == "train+test"][:5] == ["PICA", "MICE", "CC", "TCC", "SCAN"]
    assert len(TABLE_1) == 16
    dashes = [(row.title, name) for row in TABLE_1 for name in PAPER_SETS if row.value(name, "acc") is None]
    assert dashes == [("Supervised", "imagenet10"), ("Supervised", "imagenet-dogs"), ("MICE", "imagenet10")]


def test_constraintmatch_is_above_constrained_wherever_the_paper_prints_both() -> None:
    for split, n, dataset, metric in itertools.product(("test", "train+test"), (5_000, 10_000), PAPER_SETS, METRICS):
        ours, theirs = (
            printed(TABLE_1, name, n, split).value(dataset, metric) for name in (OURS.method, THEIRS.method)
        )
        assert ours is not None
        assert theirs is not None
        assert ours > theirs


def test_the_ablation_repeats_table_1_and_rises_with_every_part() -> None:
    for row in TABLE_2:
        if row.method != "pseudo_label":
            same = printed(TABLE_1, row.method or "", row.n_constraints)
            assert row.scores["cifar100-20"] == same.scores["cifar100-20"]
    accuracies = [row.scores["cifar100-20"][0] for row in TABLE_2]
    assert accuracies == sorted(accuracies)


def test_one_set_of_the_paper_carries_no_star_at_10000() -> None:
    unstarred = [
        (row.split, row.n_constraints, name)
        for row in TABLE_1
        if row.method == "constraintmatch"
        for name in PAPER_SETS
        if name not in row.significant
    ]
    assert unstarred == [("test", 10_000, "imagenet10")]
    assert {name for row in TABLE_1 if row.method != "constraintmatch" for name in row.significant} == set()


def test_the_papers_sets_are_known() -> None:
    assert set(PAPER_SETS) <= set(DATASETS)


# Results read back


def test_a_result_comes_back_as_its_cell_with_scores_in_percent(tmp_path: Path) -> None:
    cell = Cell("cifar100-20", "constraintmatch", 10_000, 2, options=(("hard_threshold", 0.5), ("links", "hard")))
    (result,) = read_results(write(tmp_path, content(cell, 0.5715)))
    assert result.cell == cell
    assert result.scores["test"]["acc"] == pytest.approx(57.15)
    assert result.scores["train+test"]["nmi"] == pytest.approx(53.15)


def test_a_folder_that_is_not_there_has_no_results(tmp_path: Path) -> None:
    assert read_results(tmp_path / "nowhere") == ()


def test_other_kinds_of_results_are_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path, content(OURS), {"format": 1, "kind": "search", "name": "search-cifar10"})
    assert [result.cell for result in read_results(folder)] == [OURS]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "not a result of format 1"),
        ({"kind": None}, "not a result of format 1"),
        (
            {"cell": {**OURS.request(), "noise": 0.1}},
            "its settings are those of cifar10-constraintmatch-10000-noise0.1",
        ),
        ({"cell": {**OURS.request(), "dataset": "mnist"}}, "data set 'mnist' is not known"),
        ({"cell": {**OURS.request(), "colour": "red"}}, "cannot be read (TypeError"),
        ({"cell": {**OURS.request(), "options": {"merge": [1]}}}, "option merge is not a number or a text"),
        ({"cell": {**OURS.request(), "noise": 0.1, "noise_of": "x"}}, "cannot be read (InputError: unknown noise_of"),
        ({"peak_gib": "much"}, "cannot be read (ValueError"),
        ({"cut": True}, "says cut is True of 20,000 steps"),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = write(tmp_path, content(OURS, **changes))
    with pytest.raises(InputError) as caught:
        read_results(folder)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(folder / f"{OURS.name}.json"))
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(str(folder)) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cell": []}, "TypeError"),
        ({"cell": {**OURS.request(), "fold": "0"}}, "ValueError: fold is not a whole number"),
        ({"cell": {**OURS.request(), "n_constraints": True}}, "ValueError: n_constraints is not a whole number"),
        ({"arguments": None}, "TypeError"),
        ({"settings": [1]}, "TypeError"),
        ({"start": None}, "TypeError"),
        ({"start": {"name": "scan-cifar10"}}, "KeyError: 'weights'"),
        ({"data": None}, "TypeError"),
        ({"data": {"train": 45_000}}, "KeyError: 'test'"),
        ({"seconds": "long"}, "ValueError"),
        ({"half": None}, "TypeError"),
        ({"scores": {"test": {"acc": 0.9}}}, "KeyError: 'nmi'"),
    ],
)
def test_an_entry_of_the_wrong_kind_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = write(tmp_path, content(OURS, **changes))
    with pytest.raises(InputError) as caught:
        read_results(folder)
    assert str(caught.value).startswith(f"{folder / OURS.name}.json: cannot be read ({said}")
    assert str(caught.value).endswith("; move it away or choose another --results")


@pytest.mark.parametrize(
    ("metric", "value", "said"),
    [
        ("acc", float("nan"), "is nan, not a number from 0 to 1"),
        ("acc", 1.1, "is 1.1, not a number from 0 to 1"),
        ("nmi", -0.2, "is -0.2, not a number from 0 to 1"),
        ("nmi", None, "is None, not a number from 0 to 1"),
        ("ari", -1.5, "is -1.5, not a number from -1 to 1"),
        ("ari", "0.5", "is '0.5', not a number from -1 to 1"),
    ],
)
def test_a_score_that_is_none_is_refused(tmp_path: Path, metric: str, value: Any, said: str) -> None:
    scores = content(OURS)["scores"]
    wrong = {**scores, "train+test": {**scores["train+test"], metric: value}}
    with pytest.raises(InputError) as caught:
        read_results(write(tmp_path, content(OURS, scores=wrong)))
    assert f"{OURS.name}.json: cannot be read (ValueError: scores.train+test.{metric} {said})" in str(caught.value)


def test_a_score_at_its_bounds_is_taken(tmp_path: Path) -> None:
    bounds = {"acc": 1.0, "nmi": 1 + 2e-16, "ari": -0.5}
    (result,) = read_results(write(tmp_path, content(OURS, scores={"test": bounds, "train+test": bounds})))
    assert result.scores["test"]["ari"] == -50


def test_a_copy_under_another_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path, content(OURS))
    (tmp_path / "copy.json").write_bytes((tmp_path / f"{OURS.name}.json").read_bytes())
    with pytest.raises(InputError, match=r"copy\.json: its settings are those of cifar10-constraintmatch-10000-fold0"):
        read_results(tmp_path)


@given(st.lists(st.floats(0.1, 0.9), min_size=2, max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_row_averages_its_folds_with_the_sample_deviation(scores: list[float]) -> None:
    row = row_of(OURS, scores)
    summary = row.summary("test", "acc")
    assert summary.mean == pytest.approx(100 * np.mean(scores))
    assert summary.std == pytest.approx(100 * np.std(scores, ddof=1), abs=1e-9)
    assert summary.n == len(scores)


def row_of(cell: Cell, scores: list[float]) -> Row:
    """A row with one fold for each ACC."""
    with tempfile.TemporaryDirectory() as folder:
        contents = [content(replace(cell, fold=fold), acc) for fold, acc in enumerate(scores)]
        return find_rows(read_results(write(Path(folder), *contents)))[cell]


def test_one_fold_has_no_deviation() -> None:
    assert row_of(OURS, [0.9]).summary("test", "acc").std is None


def test_cut_and_full_results_are_rows_of_their_own(tmp_path: Path) -> None:
    cut = replace(OURS, steps=3_000)
    rows = find_rows(read_results(write_cells(tmp_path, [OURS, cut, replace(cut, fold=1)])))
    assert {cell.steps: len(row.results) for cell, row in rows.items()} == {20_000: 1, 3_000: 2}


def test_folds_from_other_weights_are_not_averaged(tmp_path: Path) -> None:
    other = content(replace(OURS, fold=1), start={"name": "scan-cifar10", "weights": "ffff0000"})
    results = read_results(write(tmp_path, content(OURS), other))
    with pytest.raises(
        InputError, match=r"fold0\.json and .*fold1\.json: from other weights of scan-cifar10 \(ab12cd34"
    ):
        find_rows(results)


def test_folds_of_supervised_training_each_have_their_own_random_start(tmp_path: Path) -> None:
    cells = [Cell("cifar10", "supervised", 0, fold) for fold in range(3)]
    (row,) = find_rows(read_results(write_cells(tmp_path, cells))).values()
    assert len({result.weights for result in row.results}) == len(row.results) == 3


@pytest.mark.parametrize("changes", [{"arguments": {"pairs_per_step": 100}}, {"settings": {"lr": 0.1, "seed": 1}}])
def test_folds_of_other_settings_are_not_averaged(tmp_path: Path, changes: dict[str, Any]) -> None:
    results = read_results(write(tmp_path, content(OURS), content(replace(OURS, fold=1), **changes)))
    with pytest.raises(InputError, match=r"fold0\.json and .*(pairs_per_step is 200|lr is 0\.01) in one"):
        find_rows(results)


def test_an_argument_that_came_up_later_had_its_default_before(tmp_path: Path) -> None:
    def found(value: float) -> list[Result]:
        later = content(replace(OURS, fold=1), arguments={"pairs_per_step": 200, "error_rate": value})
        return read_results(write(tmp_path, content(OURS), later))

    (row,) = find_rows(found(0.0)).values()
    assert len(row.results) == 2
    with pytest.raises(InputError, match=r"error_rate is 0\.0 in one, 0\.1 in the other"):
        find_rows(found(0.1))


# Fold against fold


def brute_force_p(differences: list[float]) -> float:
    """Over all signs: how often is the sum of positive ranks as large as the one observed?"""
    from scipy.stats import rankdata

    ranks = rankdata(np.abs(differences))
    seen = ranks[np.array(differences) > 0].sum()
    signs = itertools.product((0, 1), repeat=len(ranks))
    return statistics.fmean(float(np.dot(sign, ranks) >= seen - 1e-9) for sign in signs)


@given(st.lists(st.integers(-5, 5).filter(bool), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_p_is_exact_with_ties_too(steps: list[int]) -> None:
    ours, theirs = row_of(OURS, [0.5 + step / 100 for step in steps]), row_of(THEIRS, [0.5] * len(steps))
    found = compare(ours, theirs, "test", "acc")
    assert found is not None
    gains, p = found
    assert p == pytest.approx(brute_force_p([float(step) for step in steps]))
    assert gains == pytest.approx(steps)
    assert p >= 0.5 ** len(steps)


def test_p_without_ties_is_scipys() -> None:
    from scipy.stats import wilcoxon

    gain = [0.01, 0.02, -0.03, 0.04, 0.05]
    found = compare(row_of(OURS, [0.5 + value for value in gain]), row_of(THEIRS, [0.5] * 5), "test", "nmi")
    assert found is not None
    assert found[1] == pytest.approx(wilcoxon(gain, alternative="greater", method="exact").pvalue)


def test_five_better_folds_are_significant_and_four_cannot_be() -> None:
    better = [compare(row_of(OURS, [0.6] * n), row_of(THEIRS, [0.5] * n), "test", "acc") for n in (4, 5)]
    assert [p for _, p in filter(None, better)] == pytest.approx([1 / 16, 1 / 32])


def test_equal_folds_say_nothing() -> None:
    found = compare(row_of(OURS, [0.5, 0.5]), row_of(THEIRS, [0.5, 0.5]), "test", "acc")
    assert found == ((0.0, 0.0), 1.0)


def test_only_shared_folds_of_equal_length_are_compared(tmp_path: Path) -> None:
    cells = [OURS, replace(OURS, fold=1), replace(THEIRS, fold=1), replace(THEIRS, steps=3_000)]
    rows = find_rows(read_results(write_cells(tmp_path, cells)))
    found = compare(rows[OURS], rows[THEIRS], "test", "acc")
    assert found is not None
    assert found[0] == pytest.approx([7.0])
    assert compare(rows[OURS], rows[replace(THEIRS, steps=3_000)], "test", "acc") is None


# The tables


def table_cells(text: str, first: str) -> list[str]:
    """The cells of the first line that begins with this."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_has_ours_the_papers_and_the_difference(tmp_path: Path) -> None:
    contents = [content(replace(OURS, fold=fold), acc) for fold, acc in enumerate((0.93, 0.932))]
    text = table("table1", find_rows(read_results(write(tmp_path, *contents))), ["cifar10"])
    rows = [line for line in text.splitlines() if line.startswith("| ConstraintMatch") and "93.10 ± 0.14" in line]
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[:6] == ["ConstraintMatch", "10,000", "2", "93.10 ± 0.14", "93.17*", "-0.07"]


def test_the_gain_over_the_start_stands_beside_the_papers(tmp_path: Path) -> None:
    cells = [Cell("cifar100-20", "scan"), replace(OURS, dataset="cifar100-20", n_clusters=20)]
    text = table("table2", find_rows(read_results(write_cells(tmp_path, cells))), ["cifar100-20"])
    gain = text[text.index("Over the start") :]
    assert table_cells(gain, "ConstraintMatch")[:4] == ["ConstraintMatch", "10,000", "+17.00", "+11.25"]


def test_overclustering_with_the_head_first_is_a_row_and_a_comparison_of_its_own(tmp_path: Path) -> None:
    cells = [cell for cell in grid_cells("table3", sets=["cifar10"], folds=[0, 1]) if cell.method != "scan"]
    text = table("table3", find_rows(read_results(write_cells(tmp_path, cells))), ["cifar10"])
    for method, acc in (("Constrained", "50.05 ± 0.07"), ("ConstraintMatch", "57.05 ± 0.07")):
        assert (
            table_cells(text, method)[2:4] == table_cells(text, f"{method}, the head first (ours)")[2:4] == ["2", acc]
        )
    assert "- 10,000 pairs, n = 2: ACC +7.00" in text
    assert "- 10,000 pairs, the head first (ours), n = 2: ACC +7.00" in text


def test_a_cut_row_is_marked_and_not_set_beside_the_papers(tmp_path: Path) -> None:
    text = table("table1", find_rows(read_results(write_cells(tmp_path, [replace(OURS, steps=3_000)]))), ["cifar10"])
    cells = table_cells(text, "ConstraintMatch, cut (3,000 steps)")
    assert cells[1:6] == ["10,000", "1", "57.00", "–", "–"]


def test_cut_variants_are_rows_of_their_own(tmp_path: Path) -> None:
    cells = grid_cells("table2", "table3", sets=["digits"], folds=[0], steps=3)
    rows = find_rows(read_results(write_cells(tmp_path, cells)))
    plain = table_cells(table("table2", rows, ["digits"]), "Pseudo-labelling, cut (3 steps)")
    assert plain[2:4] == ["1", "53.00"]
    wide = table("table3", rows, ["digits"])
    for said in ("the head first (ours)", "clusters merged first (ours)"):
        assert table_cells(wide, f"ConstraintMatch, {said}, cut (3 steps)")[2:6] == ["1", "57.00", "–", "–"]
        assert f"- 10,000 pairs, {said}, cut (3 steps), n = 1: ACC +7.00" in wide


def test_a_smaller_copy_of_a_set_is_not_set_beside_the_papers_nor_mixed_with_the_set(tmp_path: Path) -> None:
    small = {"train": 270, "test": 60, "fingerprint": "ab"}
    rows = find_rows(read_results(write(tmp_path / "small", content(OURS, 0.9, data=small))))
    text = table("table1", rows, ["cifar10"])
    line = next(line for line in text.splitlines() if line.startswith("| ConstraintMatch") and "90.00" in line)
    assert [cell.strip() for cell in line.strip("|").split("|")][3:6] == ["90.00", "–", "–"]
    both = read_results(write(tmp_path / "both", content(OURS, data=small), content(replace(OURS, fold=1))))
    with pytest.raises(InputError, match=r"of other images of cifar10 \(270 and 45,000 training images, 60 and "):
        find_rows(both)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": 40_000}, "40,000 and 45,000 training images"),
        ({"test": 60}, "60 and 10,000 test images"),
        ({"fingerprint": "cd"}, "fingerprints cd and ab"),
    ],
)
def test_of_other_images_it_is_said_what_differs(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    data = {"train": 45_000, "test": 10_000, "fingerprint": "ab"}
    cells = content(OURS, data={**data, **changes}), content(replace(OURS, fold=1), data=data)
    with pytest.raises(InputError, match=rf"of other images of cifar10 \({said}\), so they are not compared"):
        find_rows(read_results(write(tmp_path, *cells)))


def test_a_set_without_results_shows_the_papers_values() -> None:
    text = table("table1", {}, ["stl10"])
    assert "### STL-10, Test: not run here" in text
    assert table_cells(text, "Fully constrained") == ["Fully constrained", "all", "90.49", "80.94", "80.47"]


def test_few_folds_are_said_to_prove_nothing(tmp_path: Path) -> None:
    cells = [replace(cell, fold=fold) for cell in (OURS, THEIRS) for fold in range(5)]
    some = table(
        "table1", find_rows(read_results(write_cells(tmp_path / "2", [c for c in cells if c.fold < 2]))), ["cifar10"]
    )
    full = table("table1", find_rows(read_results(write_cells(tmp_path / "5", cells))), ["cifar10"])
    assert "n = 2: ACC +7.00 (p = 0.250)" in some
    assert "the smallest p possible is 0.25: significance at 0.05 cannot be reached" in some
    assert "n = 5: ACC +7.00 (p = 0.031)" in full
    assert "cannot be reached" not in full


def test_rows_from_other_starts_do_not_stand_in_one_table(tmp_path: Path) -> None:
    other = content(THEIRS, start={"name": "scan-cifar10", "weights": "ffff0000"})
    rows = find_rows(read_results(write(tmp_path, content(OURS), other)))
    with pytest.raises(InputError, match="so they are not compared; run one of them again"):
        table("table1", rows, ["cifar10"])
    assert "not run here" in table("table1", rows, ["cifar100-20"])


def test_overclustering_does_not_take_rows_with_as_many_clusters_as_classes(tmp_path: Path) -> None:
    wide = Cell("cifar10", "constraintmatch", 10_000, n_clusters=50)
    text = table(
        "table3", find_rows(read_results(write(tmp_path, content(OURS, 0.9), content(wide, 0.88)))), ["cifar10"]
    )
    assert table_cells(text, "ConstraintMatch")[2:5] == ["1", "88.00", "88.89"]
    assert "90.00" not in text


def test_every_cell_of_the_tables_finds_its_line(tmp_path: Path) -> None:
    cells = [cell for name in ("table1", "table2", "table3") for cell in grid_cells(name, sets=["cifar10"], folds=[0])]
    rows = find_rows(read_results(write_cells(tmp_path, cells)))
    text = "\n".join(
        (table("table1", rows, ["cifar10"]), table("table2", rows, ["cifar10"]), table("table3", rows, ["cifar10"]))
    )
    assert "not run here" not in text


@given(st.lists(st.lists(st.text("ab –±", max_size=9), min_size=3, max_size=3), max_size=4), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_the_columns_of_a_table_stand_below_each_other(lines: list[list[str]], left: int) -> None:
    drawn = markdown(["", "ACC", "paper"], lines, left).splitlines()
    assert len(drawn) == len(lines) + 2
    assert len({len(line) for line in drawn}) == 1
    places = [[place for place, letter in enumerate(line) if letter == "|"] for line in drawn]
    assert all(place == places[0] for place in places)
