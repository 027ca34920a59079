"""Pairs in every form that people have them become the same constraints; labels are never taken for pairs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import coo_array

from constraintmatch import Constraints, ImageSet, InputError
from constraintmatch.pipeline.sources import as_constraints, choose_pairs


def test_all_forms_of_the_same_pairs_are_the_same_constraints(stripes: ImageSet, tmp_path: Path) -> None:
    left, right, link = [0, 1, 2], [3, 4, 4], [1, 1, 0]
    matrix = coo_array(([1, 1, -1], (left, right)), shape=(60, 60))
    wanted = Constraints.from_arrays(left, right, link, n_images=60)
    wanted.write(tmp_path / "pairs.csv", names=stripes.names)
    forms: list[Any] = [
        wanted,
        (left, right, link),
        [np.array(left), np.array(right), np.array(link)],
        [(0, 3, 1), (1, 4, 1), (2, 4, 0)],
        np.array([(0, 3, 1), (1, 4, 1), (2, 4, 0)]),
        np.array([(0, 3, 1.0), (1, 4, 1), (2, 4, 0)]),
        np.asarray(wanted),  # with weights
        {"must_link": [(0, 3), (1, 4)], "cannot_link": [(2, 4)]},
        matrix,
        matrix.toarray(),
        tmp_path / "pairs.csv",
        str(tmp_path / "pairs.csv"),
    ]
    for form in forms:
        made = as_constraints(form, stripes)
        assert made is not None
        for name in ("left", "right", "link", "weight"):
            np.testing.assert_array_equal(getattr(made, name), getattr(wanted, name))
        assert made.n_images == 60


def test_triples_of_any_number_are_pairs(stripes: ImageSet) -> None:
    for triples in ([(0, 3, 1)], [[0, 3, 1], [2, 4, 0]], [(0, 3, 1)] * 4):
        made = as_constraints(triples, stripes)
        assert made is not None
        assert list(zip(made.left, made.right, made.link, strict=True)) == list(map(tuple, triples))


def test_contradictions_are_refused_unless_they_come_as_constraints(stripes: ImageSet) -> None:
    lists = {"must_link": [(0, 1), (1, 2)], "cannot_link": [(0, 2)]}
    with pytest.raises(InputError, match="must-link through"):
        as_constraints(lists, stripes)
    given = Constraints.from_lists(n_images=60, **lists)
    assert as_constraints(given, stripes) is given


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"must": [(0, 1)]}, "unknown key 'must'"),
        ((0, 1), "constraints must be"),
        ([[0, 3, 1], [1, 4, 1], [2, 4, 0]], "three columns or three triples"),
        (((0, 3, 1), (1, 4, 1), (2, 4, 0)), "three columns or three triples"),
        (np.zeros((4, 5)), "must be square"),
        (np.array([[0.5, 3, 1], [1, 2, 0]]), "left must hold row numbers"),
        (np.array([[np.inf, 3, 1]]), "left must hold row numbers"),
        (([0], [99], [1]), "image 99 does not exist"),
        ("missing.csv", "missing.csv"),
    ],
)
def test_what_are_no_constraints_is_said(form: Any, message: str, stripes: ImageSet) -> None:
    with pytest.raises(InputError, match=message):
        as_constraints(form, stripes)


def test_soft_links_and_weights_are_kept_in_a_table(stripes: ImageSet) -> None:
    made = as_constraints(np.array([[0, 3, 0.25, 2.0], [1, 4, 1.0, 0.5]]), stripes)
    assert made is not None
    assert (made.link.tolist(), made.weight.tolist()) == ([0.25, 1.0], [2.0, 0.5])
    np.testing.assert_array_equal(np.asarray(made), [[0, 3, 0.25, 2.0], [1, 4, 1.0, 0.5]])


def test_three_by_three_is_a_matrix_only_of_three_images(stripes: ImageSet) -> None:
    square = np.array([[0, 1, -1], [1, 0, 0], [-1, 0, 0]])
    of_three = as_constraints(square, stripes.take([0, 1, 2]))
    assert of_three is not None
    assert list(zip(of_three.left, of_three.right, of_three.link, strict=True)) == [(0, 1, 1), (0, 2, 0)]
    of_sixty = as_constraints(np.array([[0, 1, 1], [1, 2, 0], [5, 6, 1]]), stripes)
    assert of_sixty is not None
    assert of_sixty.right.tolist() == [1, 2, 6]


LABELS = np.arange(60) % 3


@pytest.mark.parametrize(
    "y",
    [
        None,
        LABELS,
        LABELS.tolist(),
        LABELS[:, None],
        np.array(["a", "b", "c"])[LABELS],
        ["a", "b", "c"],
        [0, 1, 2],
        np.eye(2)[LABELS % 2],
        7,
    ],
)
def test_labels_in_second_place_are_ignored(y: Any) -> None:
    assert choose_pairs(y, None) is None
    assert choose_pairs(y, "pairs.csv") == "pairs.csv"


@pytest.mark.parametrize(
    "y",
    [
        Constraints.from_lists(n_images=60, must_link=[(0, 1)]),
        Path("pairs.csv"),
        "pairs.csv",
        [(0, 1, 1)],
        ([0, 1], [2, 3], [1, 0]),
        np.array([[0, 1, 1], [2, 3, 0]]),
        {"must_link": [(0, 1)]},
        coo_array((60, 60)),
        np.zeros((60, 60)),
    ],
    ids=lambda y: type(y).__name__,
)
def test_pairs_in_second_place_are_constraints(y: Any) -> None:
    assert choose_pairs(y, None) is y
    with pytest.raises(InputError, match="given twice"):
        choose_pairs(y, [(0, 1, 1)])
