"""An InputError has a place, a problem and a fix, and is one line of them."""

import copy
import pickle
from pathlib import Path

import pytest

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import InUse

FULL = InputError("no column named 'link'", Path("a") / "b.csv", "rename one")


def fields(error: InputError) -> tuple[str, str, str]:
    return error.place, error.problem, error.fix


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("too few images"), "too few images"),
        (InputError("empty", "a.csv"), "a.csv: empty"),
        (InputError("too few images", fix="add some"), "too few images; add some"),
        (InputError("empty", "a.csv", "write it again"), "a.csv: empty; write it again"),
        (InputError("a.csv: empty; write it again"), "a.csv: empty; write it again"),
    ],
)
def test_the_text_is_one_line_without_the_parts_that_are_empty(error: InputError, line: str) -> None:
    assert str(error) == line


def test_a_bare_text_is_the_problem() -> None:
    assert fields(InputError("a.csv: empty; write it again")) == ("", "a.csv: empty; write it again", "")


def test_a_path_becomes_text() -> None:
    assert fields(FULL) == (str(Path("a/b.csv")), "no column named 'link'", "rename one")


def test_a_place_is_put_in_front_and_the_rest_stays() -> None:
    inner = InputError("link 2 is not known", "line 4", "write 1 or 0")
    assert fields(inner.at(Path("a.csv"))) == ("a.csv: line 4", "link 2 is not known", "write 1 or 0")
    assert str(inner.at("a.csv")) == f"a.csv: {inner}"
    assert str(InputError("empty").at("a.csv")) == "a.csv: empty"
    assert fields(inner) == ("line 4", "link 2 is not known", "write 1 or 0")  # the old one is not changed


def test_an_error_with_a_new_place_is_still_of_its_kind() -> None:
    assert type(InUse("in use").at("out")) is InUse


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_has_the_same_fields(again: object) -> None:
    assert callable(again)
    copied = again(InUse("in use", "out", "wait"))
    assert type(copied) is InUse
    assert fields(copied) == ("out", "in use", "wait")
