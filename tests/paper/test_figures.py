"""The paper's figures: which cells a figure shows, and the files drawn of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper_results import content, write, write_cells
from PIL import Image
from scripts import script

from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import DATASETS, STEPS
from constraintmatch.paper.grids import GRIDS, Cell, grid_cells
from constraintmatch.paper.results import TABLE_1, Row, find_rows, published, read_results
from constraintmatch.paper.tables import FIGURES, Drawing, drawing

SET = "cifar100-20"
maker = script("docs", "make_reproduction")
draw, digest, draw_gallery = maker.draw, maker.digest, script("docs", "make_gallery").draw_gallery
PLAIN = Cell(SET, "constraintmatch", 10_000)


def rows_of(folder: Path, cells: list[Cell]) -> dict[Cell, Row]:
    return find_rows(read_results(write_cells(folder, cells)))


def shown(folder: Path, name: str, cells: list[Cell], dataset: str = SET) -> Drawing:
    found = drawing(name, rows_of(folder, cells), dataset)
    assert found is not None
    return found


def places(figure: Drawing) -> dict[str, list[float]]:
    return {curve.method: [x for x, _ in curve.points] for curve in figure.curves}


# What a figure shows


def test_the_figures_are_the_grids_that_are_no_tables() -> None:
    assert set(FIGURES) == {name for name in GRIDS if not name.startswith("table")}


@pytest.mark.parametrize("dataset", ["cifar10", SET])
@pytest.mark.parametrize("name", FIGURES)
def test_every_cell_of_a_grid_is_in_its_figure(tmp_path: Path, name: str, dataset: str) -> None:
    cells = grid_cells(name, sets=[dataset], folds=[0])
    figure = shown(tmp_path, name, cells, dataset)
    shared = {"flip": 1, "noise": 2}.get(name, 0)  # what is 0 is the same for two curves, of a method or of both
    assert sum(map(len, places(figure).values())) + len(figure.levels) - shared == len(cells)


def test_curves_have_the_options_of_their_cells_as_places(tmp_path: Path) -> None:
    flips = [replace(PLAIN, options=(("flip_fraction", rate),)) for rate in (0.5, 0.1)]
    assert places(shown(tmp_path / "flip", "flip", [PLAIN, *flips])) == {"constraintmatch": [0.0, 0.1, 0.5]}
    swapped = [replace(one, options=(("flip_between", "any"), *one.options)) for one in flips]
    assert places(shown(tmp_path / "any", "flip", [PLAIN, *flips, *swapped[:1]])) == {
        "constraintmatch": [0.0, 0.1, 0.5],
        "any": [0.0, 0.5],
    }
    taus = [replace(PLAIN, options=(("max_entropy", tau),)) for tau in (0.3, 0.1)]
    assert places(shown(tmp_path / "tau", "entropy", [PLAIN, *taus])) == {"constraintmatch": [0.05, 0.1, 0.3]}


def test_a_sets_own_threshold_given_as_an_option_is_one_point(tmp_path: Path) -> None:
    plain = Cell("cifar10", "constraintmatch", 10_000)
    assert DATASETS["cifar10"].tuned["constraintmatch"]["max_entropy"] == 0.2
    cells = [plain, *(replace(plain, options=(("max_entropy", tau),)) for tau in (0.1, 0.2))]
    assert places(shown(tmp_path, "entropy", cells, "cifar10")) == {"constraintmatch": [0.1, 0.2]}


def test_cells_of_other_figures_and_of_overclustering_stay_out(tmp_path: Path) -> None:
    own = grid_cells("noise", sets=[SET], folds=[0])
    others = [
        cell for name in ("flip", "links", "amount", "table3") for cell in grid_cells(name, sets=[SET], folds=[0])
    ]
    alone = shown(tmp_path / "alone", "noise", [Cell(SET, "scan"), *own])
    assert shown(tmp_path / "all", "noise", [*own, *others]) == alone


def test_cut_and_full_results_never_meet_in_a_figure(tmp_path: Path) -> None:
    cut = grid_cells("flip", sets=[SET], folds=[0], steps=3_000)
    full = [
        cell for cell in grid_cells("flip", sets=[SET], folds=[0]) if dict(cell.options).get("flip_fraction", 0) < 0.3
    ]
    contents = [content(cell, 0.3) for cell in cut] + [content(cell, 0.6) for cell in full]
    figure = drawing("flip", find_rows(read_results(write(tmp_path, *contents))), SET)
    assert figure is not None
    assert {round(summary.mean, 9) for curve in figure.curves for _, summary in curve.points} == {30.0}
    assert "cut (3,000 steps)" in figure.heading


def test_a_full_figure_is_preferred_to_a_cut_one_of_as_many_points(tmp_path: Path) -> None:
    cells = [cell for steps in (3_000, STEPS) for cell in grid_cells("noise", sets=[SET], folds=[0], steps=steps)]
    figure = shown(tmp_path, "noise", cells)
    assert figure.steps == 20_000
    assert "cut" not in figure.heading + figure.note


def test_noise_of_both_kinds_alike_has_curves_of_its_own(tmp_path: Path) -> None:
    cells = grid_cells("noise", sets=[SET], folds=[0])
    contents = [content(cell, 0.5 if cell.noise_of == "alike" else 0.3) for cell in cells]
    figure = drawing("noise", find_rows(read_results(write(tmp_path, *contents))), SET)
    assert figure is not None
    for method in ("constraintmatch", "constrained"):
        curve = next(curve for curve in figure.curves if curve.method == f"{method} alike")
        assert [(x, round(summary.mean, 6)) for x, summary in curve.points] == [
            (0.0, 30.0),  # the training without wrong links is of both curves
            *((x, 50.0) for x in (0.05, 0.1, 0.2, 0.3, 0.4)),
        ]


def test_a_level_is_trained_as_long_as_the_curve(tmp_path: Path) -> None:
    cut = grid_cells("links", sets=[SET], folds=[0], steps=3_000)
    figure = shown(tmp_path, "links", [*cut, PLAIN, Cell(SET, "constrained", 10_000), Cell(SET, "scan")])
    assert [level.label for level in figure.levels] == ["soft links", "SCAN (the start)"]


def test_one_point_is_no_figure(tmp_path: Path) -> None:
    assert drawing("flip", rows_of(tmp_path, [PLAIN]), SET) is None
    assert drawing("flip", {}, SET) is None


def test_points_from_other_starts_are_refused(tmp_path: Path) -> None:
    other = content(replace(PLAIN, noise=0.1), start={"name": f"scan-{SET}", "weights": "ffff0000"})
    rows = find_rows(read_results(write(tmp_path, content(PLAIN), other)))
    with pytest.raises(InputError, match="from other weights"):
        drawing("noise", rows, SET)


def test_the_number_of_constraints_is_shown_in_nmi_with_the_papers_points(tmp_path: Path) -> None:
    figure = shown(tmp_path / "full", "amount", grid_cells("amount", sets=[SET], folds=[0]))
    row = published(TABLE_1, "test", "constraintmatch", 5_000)
    assert row is not None
    assert figure.metric == "nmi"
    assert ("constraintmatch", 5_000.0, row.value(SET, "nmi")) in figure.paper
    cut = shown(tmp_path / "cut", "amount", grid_cells("amount", sets=[SET], folds=[0], steps=3_000))
    assert cut.paper == ()


def test_the_note_counts_the_folds(tmp_path: Path) -> None:
    assert "10,000 pairs, 2 folds" in shown(tmp_path / "2", "noise", grid_cells("noise", sets=[SET], folds=[0, 1])).note
    uneven = [*grid_cells("noise", sets=[SET], folds=[0]), replace(PLAIN, fold=1)]
    assert "1 to 2 folds" in shown(tmp_path / "12", "noise", uneven).note


# The files


@pytest.fixture(scope="module")
def figure(tmp_path_factory: pytest.TempPathFactory) -> Drawing:
    return shown(tmp_path_factory.mktemp("amount"), "amount", grid_cells("amount", sets=[SET], folds=[0, 1]))


@pytest.fixture(scope="module")
def drawn(figure: Drawing, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Its PNG and its SVG."""
    return list(draw(figure, tmp_path_factory.mktemp("drawn")))


def test_the_same_numbers_give_the_same_bytes_whatever_the_user_has_set(
    figure: Drawing, drawn: list[Path], tmp_path: Path
) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.labelcolor": "red"}):
        second = draw(figure, tmp_path / "second")
        assert matplotlib.rcParams["font.size"] == 30
    for one, other in zip(drawn, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert one.stat().st_size < 200_000


def test_the_files_tell_which_numbers_they_show_and_no_date(figure: Drawing, drawn: list[Path]) -> None:
    png, svg = drawn
    assert (png.name, svg.name) == ("amount-cifar100-20.png", "amount-cifar100-20.svg")
    assert digest(figure) in svg.read_text(encoding="utf-8")
    assert "<dc:date>" not in svg.read_text(encoding="utf-8")
    with Image.open(png) as picture:
        assert picture.info["Description"] == digest(figure)
        assert "Software" not in picture.info
    assert digest(replace(figure, steps=3_000)) != digest(figure)


def test_a_picture_is_opaque_so_that_a_dark_page_does_not_swallow_it(drawn: list[Path]) -> None:
    png, _ = drawn
    with Image.open(png) as picture:
        assert picture.getpixel((0, 0)) == (255, 255, 255, 255)
        assert picture.convert("RGBA").getextrema()[3] == (255, 255)


def pair(predicted: str, *true: str) -> dict[str, Any]:
    return {"predicted": (predicted, predicted), "true": true, "confidence": (0.99, 0.98), "link": 0.97}


PAIRS = [pair("people", "fish", "fish"), pair("people", "fish", "trees")] * 2


def pictures(side: int, channels: int) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(0))
    small = rng.integers(0, 256, (4, 2, 8, 8, channels), dtype=np.uint8)
    return small.repeat(side // 8, axis=2).repeat(side // 8, axis=3)


@pytest.mark.parametrize(("n", "side", "channels"), [(4, 224, 3), (3, 8, 1)])
def test_a_gallery_is_drawn_small_from_images_of_any_size(tmp_path: Path, n: int, side: int, channels: int) -> None:
    png, svg = draw_gallery(PAIRS[:n], pictures(side, channels)[:n], tmp_path, "gallery-toy", "toy images")
    assert png.stat().st_size < 200_000
    assert svg.stat().st_size < 200_000
    with Image.open(png) as picture:
        assert picture.width > 600


def test_long_class_names_leave_the_images_their_room(tmp_path: Path) -> None:
    """Red images still cover as much of the picture as with short names; a warning of the layout is an error here."""
    red = np.zeros((2, 8, 8, 3), np.uint8)
    red[..., 0] = 255
    shares = []
    for name in ("fish", "large_omnivores_and_herbivores"):
        png, _ = draw_gallery([pair(name, name, name)] * 4, [red] * 4, tmp_path, name, "")
        with Image.open(png) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        shares.append((pixels == (255, 0, 0)).all(-1).mean())
    assert shares[1] == pytest.approx(shares[0], abs=1e-3)
    assert shares[0] > 0.25


def test_a_gallery_without_pairs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no pair to show"):
        draw_gallery([], [], tmp_path, "none", "")
