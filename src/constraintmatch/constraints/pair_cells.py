"""The cells of a pairs file: from text to rows of the image set, links, weights, sizes, or the line that is wrong."""

import difflib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from constraintmatch._internal.errors import InputError

_Columns = Mapping[str, list[str]]  # the texts of a file's columns under our names

_SPELLINGS = dict.fromkeys(("mustlink", "ml", "same", "yes", "true"), 1.0)
_SPELLINGS |= dict.fromkeys(("cannotlink", "cl", "different", "no", "false"), 0.0)
_ACCEPTED = "1/0, 1/-1, must-link/cannot-link, same/different, yes/no, true/false or a number in [0, 1]"
_ROW_NUMBER = re.compile(r"([0-9]{1,18})(?:\.0*)?")  # "7.0": a spreadsheet or pandas made floats of the integers
_UNKNOWN, _TWICE = -1, -2  # in place of a row: no such image; a name of several images
MAX_IMAGES = 1_000_000_000  # three answers for each of n² pairs must have a number below 2**63
_NEAR_MATCH_LIMIT = 20_000  # difflib compares about 100,000 names a second


@dataclass(frozen=True, eq=False)
class Places:
    """Where in its file each pair is: `line` 2 and so on, or `row` 1 and so on of a table.

    Of pairs from several files the numbers are texts with the file in front, and there is no word.
    """

    numbers: NDArray[Any]
    word: str = "row"
    path: Path | str = ""

    def take(self, rows: NDArray[np.int64]) -> "Places":
        return Places(self.numbers[rows], self.word, self.path)

    def say(self, *rows: int) -> str:
        """For example `lines 4, 5`; twelve at most."""
        some = ", ".join(str(self.numbers[row]) for row in rows[:12]) + (", …" if len(rows) > 12 else "")
        return f"{self.word}{'s' if len(rows) > 1 and self.word else ''} {some}".strip()

    def error(self, row: int, error: InputError) -> InputError:
        """The error with the file and the line in front."""
        return error.at(f"{self.path} {self.say(row)}".strip())

    @classmethod
    def join(cls, parts: "Sequence[Places]") -> "Places":
        """The places of several files, one after the other."""
        texts = [[f"{part.path} {part.word} {number}" for number in part.numbers.tolist()] for part in parts]
        return cls(np.array([text for part in texts for text in part], object), "")


# Images


def image_rows(
    sides: Sequence[list[str]],
    places: Places,
    names: Sequence[str] | None,
    n_images: int | None,
    unread: Mapping[str, str],
) -> tuple[list[NDArray[np.int64]], int]:
    """The rows of the images in each of these columns, and the number of images they belong to."""
    if names is None and all(map(_all_digits, sides)):  # many times faster than cell by cell
        rows = [np.fromiter(map(int, side), np.int64, len(side)) for side in sides]
        numbers: set[str] = set()
    else:
        row_of, numbers = _look_up(dict.fromkeys(chain(*sides)), names)
        rows = [np.fromiter(map(row_of.__getitem__, side), np.int64, len(side)) for side in sides]
    if names is not None:
        n_images = len(names)
    elif n_images is None:
        n_images = min(max(int(column.max(initial=-1)) for column in rows) + 1, MAX_IMAGES)
    bad = np.array([(column < 0) | (column >= n_images) for column in rows])
    if bad.any():
        at = int(bad.any(0).argmax())
        side = int(bad[:, at].argmax())
        cell, row = sides[side][at].strip(), int(rows[side][at])
        raise places.error(at, _no_such_image(cell, row, names, n_images, unread))
    if names is not None and numbers:
        _refuse_two_meanings(sides, places, row_of, numbers)
    return rows, n_images


def _all_digits(column: Sequence[str]) -> bool:
    together = "".join(column)
    return together.isdecimal() and together.isascii() and min(map(len, column)) > 0 and max(map(len, column)) <= 18


def _look_up(texts: Iterable[str], names: Sequence[str] | None) -> tuple[dict[str, int], set[str]]:
    """Each text's row or a negative code, and the texts that are row numbers.

    By name; else by name up to blanks, slashes and Unicode form; else as a row number.
    """
    exact = _index(names or ())
    row_of = {text: exact.get(text, _UNKNOWN) for text in texts}
    missing = [text for text, row in row_of.items() if row == _UNKNOWN]
    loose = _index(map(_plain_name, names)) if names and missing else {}
    numbers = set()
    for text in missing:
        row_of[text] = loose.get(_plain_name(text), _UNKNOWN)
        if row_of[text] == _UNKNOWN and (row := row_number(text)) is not None:
            row_of[text] = row
            numbers.add(text)
    return row_of, numbers


def _index(names: Iterable[str]) -> dict[str, int]:
    names = list(names)
    index = {name: row for row, name in enumerate(names)}
    if len(index) < len(names):
        index |= {name: _TWICE for name, count in Counter(names).items() if count > 1}
    return index


def _plain_name(name: str) -> str:
    return unicodedata.normalize("NFC", name.strip().replace("\\", "/")).removeprefix("./")


def _refuse_two_meanings(
    sides: Sequence[list[str]], places: Places, row_of: Mapping[str, int], numbers: set[str]
) -> None:
    """Where some whole numbers are names of other rows and some are no names, all may be meant as row numbers."""
    names = [text for text in row_of.keys() - numbers if row_number(text) not in (None, row_of[text])]
    if not names:
        return
    at, number = next(
        (at, text) for at, texts in enumerate(zip(*sides, strict=True)) for text in texts if text in numbers
    )
    clash = f"{number} is no image's name but could be a row number, while {min(names)} is an image's name"
    raise places.error(at, InputError(clash, fix="use names or row numbers throughout"))


def _no_such_image(
    cell: str, row: int, names: Sequence[str] | None, n_images: int, unread: Mapping[str, str]
) -> InputError:
    if not cell:
        return InputError("an image is missing", fix="complete or delete the line")
    if row == _TWICE:
        return InputError(f"several images are named {cell!r}", fix="use row numbers")
    if row >= 0:
        counted = ", counted from 0" if row == n_images else ""
        return InputError(f"image {cell} does not exist (the set has {n_images:,} images{counted})")
    if names is None:
        fix = "for names, give the images too (names=…, or check PAIRS DATA)"
        return InputError(f"{cell[:80]!r} is not a row number", fix=fix)
    if cell in unread:
        return InputError(f"image {cell!r} could not be read ({unread[cell]})", fix="repair it, or leave out its pairs")
    near = _near_match(_plain_name(cell), names)
    problem = f"no image is named {cell[:80]!r} (the set has {n_images:,} images)"
    return InputError(problem, fix=f"did you mean {near!r}?" if near else "")


def _near_match(name: str, names: Sequence[str]) -> str | None:
    """The one name with the same file name in another folder or with another suffix, else the most similar one."""
    for part in ("name", "stem"):
        wanted = getattr(PurePosixPath(name), part)
        same = [other for other in names if wanted in other and getattr(PurePosixPath(other), part) == wanted]
        if len(same) == 1:
            return same[0]
    close = difflib.get_close_matches(name, names, n=1) if len(names) <= _NEAR_MATCH_LIMIT else []
    return close[0] if close else None


def row_number(text: str) -> int | None:
    """The row number that a cell can mean: 7, or 7.0 as spreadsheets write it."""
    match = _ROW_NUMBER.fullmatch(text.strip())
    return int(match[1]) if match else None


# Links and weights


def read_links(columns: _Columns, places: Places) -> NDArray[np.float32]:
    """The links in [0, 1]; -1 means 0 in a file without 0 and fractions."""
    column = columns["link"]
    links = _read_column(column, places, _link)
    if (links < 0).any():
        _refuse_mixed_links(column, places)
    return np.maximum(links, np.float32(0))


def read_weights(columns: _Columns, places: Places) -> NDArray[np.float32]:
    """The weights, 1 where the column or the cell is empty."""
    column = columns.get("weight")
    return np.ones(len(places.numbers), np.float32) if column is None else _read_column(column, places, _weight)


def read_sizes(columns: _Columns, places: Places) -> NDArray[np.float32]:
    """The least and the most images (m, 2) of one cluster in each line; up to 1 it is a share of all.

    An empty cell is no limit: 0, or infinity. An InputError if the shares of several clusters leave none for the last,
    or do not reach all.
    """
    least, most = (_read_column(columns[name], places, _size) for name in ("least", "most"))
    least, most = np.nan_to_num(least), np.where(np.isnan(most), np.float32(np.inf), most)
    alike = (least > 1) == (most > 1)  # else a share against a number
    if (wrong := np.flatnonzero((least > most) & alike)).size:
        problem = f"least {least[wrong[0]]:g} is above most {most[wrong[0]]:g}"
        raise places.error(int(wrong[0]), InputError(problem, fix="swap them"))
    if not len(least):
        raise InputError("there are no sizes in it", places.path, "add a line such as 0.05,0.2")
    sizes = np.stack([least, most], axis=1)
    at_least, at_most = np.where(sizes <= 1, sizes, [[0, np.inf]]).sum(0)  # numbers are checked with the images
    if len(sizes) > 1 and (at_least > 1 + 1e-6 or at_most < 1 - 1e-6):
        side, total = ("least", at_least) if at_least > 1 else ("most", at_most)
        problem = f"the {side} shares add up to {total:g}, {'more' if at_least > 1 else 'less'} than all images"
        raise InputError(problem, f"{places.path} {places.say(*range(len(sizes)))}", f"change {side}")
    return sizes


def _read_column(column: list[str], places: Places, read: Callable[[str], float]) -> NDArray[np.float32]:
    """The numbers of a column; each distinct text is read once."""
    value_of: dict[str, float] = {}
    for text in dict.fromkeys(column):
        try:
            value_of[text] = read(text)
        except InputError as error:
            raise places.error(column.index(text), error) from None
    return np.fromiter(map(value_of.__getitem__, column), np.float32, len(column))


def _link(text: str) -> float:
    value = link_value(text)
    if not text.strip():
        raise InputError("the link is missing", fix="answer it or delete the line")
    if value is None or not (0 <= value <= 1 or value == -1):
        reason = "is not understood" if value is None else "is outside [0, 1]"
        raise InputError(f"link {text.strip()[:80]!r} {reason}", fix=f"write {_ACCEPTED}")
    return value


def _weight(text: str) -> float:
    value = _number(text) if text.strip() else 1.0
    if value is None or not 0 <= value <= float(np.finfo(np.float32).max):
        problem = f"weight {text.strip()[:80]!r} is not a number from 0 up"
        raise InputError(problem, fix="write 1 for a plain answer")
    return value


def _size(text: str) -> float:
    value = _number(text) if text.strip() else math.nan
    if value is None or value < 0:
        fix = "write a share such as 0.05, or a number of images such as 500"
        raise InputError(f"size {text.strip()[:80]!r} is not a number from 0 up", fix=fix)
    return value


def link_value(text: str) -> float | None:
    """The number or the accepted spelling of a link in a cell; None if it is neither."""
    number = _number(text)
    return _SPELLINGS.get(re.sub(r"[\s_-]", "", text).casefold()) if number is None else number


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _refuse_mixed_links(column: list[str], places: Places) -> None:
    value_of = {text: _number(text) for text in dict.fromkeys(column)}
    other = next((text for text, value in value_of.items() if value not in (None, -1.0, 1.0)), None)
    if other is None:
        return
    minus = next(text for text, value in value_of.items() if value == -1.0)
    at = sorted(int(places.numbers[column.index(text)]) for text in (minus, other))
    doubt = "is the scale [0, 1] or [-1, 1]? write all links in [0, 1]"
    if value_of[other] == 0:
        doubt = "0 may mean cannot-link or unknown; write cannot-links as 0 or as -1, not both"
    problem = f"links -1 and {other.strip()} have no clear meaning together ({doubt})"
    raise InputError(problem, f"{places.path} {places.word}s {at[0]} and {at[1]}")


# What is in memory already


def column_of(values: Any, name: str, dtype: type) -> NDArray[Any]:
    """One column of numbers; anything else is an InputError."""
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, dtype)
    if array.ndim != 1:
        raise InputError(f"{name} must be one column, not of shape {array.shape}")
    if dtype is np.int64 and array.dtype.kind not in "iu":
        raise InputError(f"{name} must hold row numbers (integers), not {array.dtype}")
    if array.dtype.kind not in "iufb":
        raise InputError(f"{name} must hold numbers, not {array.dtype}")
    with np.errstate(over="ignore"):  # becomes infinity, which the next check refuses
        return array.astype(dtype)


def pair_list(pairs: Iterable[tuple[int, int]], name: str) -> NDArray[np.int64]:
    """Pairs of row numbers (m, 2); anything else is an InputError."""
    array = np.asarray(list(pairs)) if isinstance(pairs, Iterable) else np.asarray(pairs)
    if array.size == 0:
        return np.empty((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise InputError(f"{name} must be a list of pairs of row numbers, such as [(0, 1), (4, 7)]")
    return array.astype(np.int64)


def class_numbers(labels: ArrayLike) -> NDArray[np.int64]:
    """Labels of any kind as numbers from 0 on."""
    array = np.asarray(labels)
    if array.ndim != 1:
        raise InputError(f"labels must be one column, not of shape {array.shape}")
    return np.unique(array, return_inverse=True)[1].astype(np.int64)
