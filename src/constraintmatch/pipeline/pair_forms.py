"""The forms in which people have pairs, as constraints: files, tables, triples, lists, matrices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet

__all__ = ["Pairs", "as_constraints", "choose_pairs"]

Pairs = Constraints | Mapping[str, Any] | Sequence[Any] | Path | str | Any  # Any: an array or a sparse matrix


def as_constraints(constraints: Pairs, images: ImageSet) -> Constraints | None:
    """Constraints over the images from any form that `ConstraintMatch.fit` takes; None stays None.

    `Constraints` are used as they are; in all other forms a contradiction is an InputError.
    """
    if constraints is None or isinstance(constraints, Constraints):
        return constraints
    n = len(images)
    if isinstance(constraints, Path | str):
        made = Constraints.read(constraints, names=images.names, n_images=n)
    elif isinstance(constraints, Mapping):
        if odd := sorted(map(str, constraints.keys() - {"must_link", "cannot_link"})):
            raise InputError(f"constraints: unknown key {odd[0]!r}; known are must_link, cannot_link")
        made = Constraints.from_lists(n_images=n, **constraints)
    elif issparse(constraints):
        made = Constraints.from_matrix(constraints)
    elif hasattr(constraints, "__array__"):
        array = np.asarray(constraints)
        is_table = _is_table(array) and array.shape != (n, n)
        made = _from_table(array, n) if is_table else Constraints.from_matrix(array)
    elif isinstance(constraints, list | tuple) and (columns := _columns(constraints)) is not None:
        made = Constraints.from_arrays(*columns, n_images=n)
    else:
        raise InputError(
            "constraints must be Constraints, a pairs file, a table or columns (left, right, link), a list of such "
            "triples, a dict with must_link and cannot_link, or a square matrix of 1, -1 and 0"
        )
    return made.resolve("error", names=images.names)


def choose_pairs(y: Any, constraints: Pairs) -> Pairs:
    """The constraints, by name or in second place, where a label for each row is ignored, as clusterers do."""
    if isinstance(y, Constraints | Mapping | Path | str) or issparse(y):
        in_second_place = True
    elif isinstance(y, list | tuple):
        in_second_place = _columns(y) is not None
    else:
        array = np.asarray(y)
        in_second_place = _is_table(array) or (array.ndim == 2 and array.shape[0] == array.shape[1])
    if in_second_place and constraints is not None:
        raise InputError("constraints are given twice, in second place and by name; leave one out")
    return y if in_second_place else constraints


def _is_table(array: NDArray[Any]) -> bool:
    """Whether this is an array of pairs: left, right, link, and perhaps weight."""
    return array.ndim == 2 and array.shape[1] in (3, 4)


def _from_table(table: NDArray[Any], n_images: int) -> Constraints:
    rows = table[:, :2]
    if rows.dtype.kind == "f" and np.isfinite(rows).all() and (rows == np.floor(rows)).all():
        rows = rows.astype(np.int64)  # an array of one type has to hold soft links or weights too
    weight = table[:, 3] if table.shape[1] == 4 else None
    return Constraints.from_arrays(rows[:, 0], rows[:, 1], table[:, 2], weight=weight, n_images=n_images)


def _columns(given: Sequence[Any]) -> Sequence[Any] | None:
    """Left, right and link as columns, from columns or from triples; None: neither. Three by three may be both."""
    triples = len(given) > 0 and all(isinstance(item, list | tuple) and len(item) == 3 for item in given)
    if triples and len(given) == 3:
        as_tuples = [isinstance(item, tuple) for item in given]
        if isinstance(given, tuple) == all(as_tuples) or any(as_tuples) != all(as_tuples):
            raise InputError(
                "constraints: three columns or three triples (left, right, link)? give a tuple of lists for columns, "
                "a list of tuples for triples"
            )
        triples = all(as_tuples)
    if triples:
        return list(zip(*given, strict=True))
    return given if len(given) == 3 and all(np.ndim(column) == 1 for column in given) else None
