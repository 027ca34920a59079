"""Random draws that are the same on every platform and with every version of NumPy.

A new version of NumPy may change what a Generator's methods draw. Philox is a published function of key and counter;
all draws here are integer arithmetic on its raw words.
"""

from enum import IntEnum
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError


class Purpose(IntEnum):
    """One stream per purpose, so that equal seeds for two purposes do not give related draws."""

    SAMPLE = 1
    PARTNERS = 2
    FLIP = 3
    SPLIT = 4
    QUESTIONS = 5
    CLOSURE = 6
    ANCHORS = 7
    HOLD_OUT = 8


def check_seed(seed: int) -> None:
    """A seed that is no whole number of 64 bits is an InputError."""
    if not isinstance(seed, Integral) or not 0 <= seed < 2**64:
        raise InputError(f"seed {seed} is not a whole number from 0 to 2**64 - 1")


def stream(seed: int, purpose: Purpose) -> np.random.Philox:
    """The raw words that belong to a seed and a purpose."""
    check_seed(seed)
    return np.random.Philox(key=np.array([seed, purpose], np.uint64))


def permutation(words: np.random.Philox, n: int) -> NDArray[np.int64]:
    """0 … n - 1 in random order."""
    return np.argsort(words.random_raw(n), kind="stable").astype(np.int64)


def below(words: np.random.Philox, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every k a number from 0 to bounds[k] - 1, exactly uniform (words past the last full round are redrawn)."""
    limits = bounds.astype(np.uint64)
    drawn = words.random_raw(len(limits))
    last = ~((~limits + np.uint64(1)) % limits)  # 2**64 - 1 - (2**64 mod bound)
    while (late := np.flatnonzero(drawn > last)).size:
        drawn[late] = words.random_raw(len(late))
    return (drawn % limits).astype(np.int64)


def another(words: np.random.Philox, first: NDArray[np.int64], n_images: int) -> NDArray[np.int64]:
    """For each first member, another image, uniformly."""
    drawn = below(words, np.full(len(first), n_images - 1))
    return drawn + (drawn >= first)


def balanced_partners(
    words: np.random.Philox, classes: NDArray[np.int64], first: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Partners of the same class for half of the first members, of other classes for the rest."""
    sizes = np.bincount(classes)
    own = classes[first]
    able = np.flatnonzero(sizes[own] > 1)
    n_must = len(first) // 2
    if len(able) < n_must or (len(sizes) < 2 and len(first) > n_must):
        problem = "balanced pairs need two classes and enough images with a second one of their class"
        raise InputError(problem, fix="use fewer pairs")
    must = np.zeros(len(first), bool)
    must[able[permutation(words, len(able))[:n_must]]] = True
    by_class = np.argsort(classes, kind="stable")
    rank = np.empty(len(classes), np.int64)
    rank[by_class] = np.arange(len(classes))
    start, size = (np.cumsum(sizes) - sizes)[own], sizes[own]
    drawn = below(words, np.where(must, size - 1, len(classes) - size))
    same = start + drawn + (start + drawn >= rank[first])
    different = drawn + np.where(drawn >= start, size, 0)
    return by_class[np.where(must, same, different)]
