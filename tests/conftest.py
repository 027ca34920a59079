"""What all tests share: one torch thread per worker (two workers on two cores), and small image sets."""

import functools
import gc
import importlib
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from constraintmatch.data.datasets import DATASETS
from constraintmatch.data.image_set import ImageSet


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork of a process that has such threads waits for them forever
    gc.set_threshold(20_000, 20, 20)  # to look for cycles among all that torch has takes a twentieth of the time
    if not config.getoption("numprocesses", None):  # the process that only hands out tests needs no torch
        # all tests together need all of it: two workers that begin with the same would both compile it, at first
        halves = ("torch._dynamo",), ("sklearn.linear_model", "scipy.stats", "matplotlib.pyplot", "optuna", "fastapi")
        for name in halves[os.environ.get("PYTEST_XDIST_WORKER") == "gw1"]:
            importlib.import_module(name)

        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_waiting() -> Iterator[None]:
    """Nothing waits for the disk, git or a GPU that is not there; the digits and the command line are made once.

    Two divisions into prototypes, not four, learn for 25 larger steps, not 150: few kinds need no more.
    """
    import torch
    import typer.testing

    from constraintmatch.methods import prototypes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONSTRAINTMATCH_COMMIT", "0123456789ab")
        if not torch.cuda.is_available():  # each seed would be kept for it, with the stack at that moment
            patch.setattr(torch.cuda, "manual_seed_all", lambda _: None)
            patch.setattr(torch.xpu, "manual_seed_all", lambda _: None)
        patch.setattr("os.fsync", lambda _: None)
        patch.setattr(prototypes, "STEPS", 12)
        patch.setattr(prototypes, "BENT_RATE", 0.25)
        patch.setattr(prototypes, "RATE", 0.7)
        patch.setattr(prototypes, "DIVISIONS", 2)
        patch.setattr(prototypes, "ROUNDS", 2)
        digits = functools.cache(functools.partial(DATASETS["digits"].load, None))
        once = replace(DATASETS["digits"], load=lambda _, part, __=None: digits(part))  # whoever watches
        patch.setitem(DATASETS, "digits", once)
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders that are not there yet: to make one for each test would take longer than many tests."""
    place = tmp_path_factory.mktemp("caches")
    return (place / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_cache(caches: Iterator[Path]) -> None:
    """Decoded images go to a folder of the test, never to the user's cache; a patch for each test would take longer."""
    os.environ["XDG_CACHE_HOME"] = str(next(caches))


@pytest.fixture(scope="module")
def narrow_networks() -> Iterator[None]:
    """The tiny network with 16 channels a layer, for tests of what is around a training and not of what it learns."""
    from torch import nn

    from constraintmatch.models import backbones

    def block(inputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 16, 3, stride=stride, padding=1, bias=False), backbones.BatchNorm(16), nn.ReLU()]

    def narrow(side: int, channels: int) -> tuple[nn.Module, int]:
        layers = [*block(channels, max(side // 4, 1)), *block(16, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        return nn.Sequential(*layers), 64

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbones, "_tiny", narrow)
        yield


@pytest.fixture(scope="module")
def small_batches(narrow_networks: None) -> Iterator[None]:  # noqa: ARG001
    """Digits in batches a fifth of their size, for tests of what is around a training and not of what it learns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "digits", replace(DATASETS["digits"], pairs_per_step=10, images_per_step=30))
        yield


@pytest.fixture(scope="module")
def few_digits() -> Iterator[None]:
    """Every third digit, with as many validation images as ever, for tests that go through all images often."""
    row = DATASETS["digits"]

    def load(*given: Any) -> ImageSet:
        whole = row.load(*given)
        return whole.take(np.arange(0, len(whole), 3))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "digits", replace(row, load=load, splits=(333, 100, 167)))
        yield


@contextmanager
def fewer_heads() -> Iterator[None]:
    """Starts that try 4 linear heads for 20 steps, not 40 for 300, for tests of what is around a start.

    Pairs teach one division of prototypes, in one round of 8 steps, and images are hidden twice to judge it.
    """
    from constraintmatch.methods import METHODS, prototypes, safe_recipe
    from constraintmatch.methods.heads import best_linear_head

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS["linear_scan"].__kwdefaults__, "n_tries", 4)
        patch.setitem(METHODS["scan"].__kwdefaults__, "n_tries", 4)
        patch.setitem(best_linear_head.__kwdefaults__, "steps", 20)
        patch.setattr(prototypes, "STEPS", 8)
        patch.setattr(prototypes, "RATE", 1.2)
        patch.setattr(prototypes, "BENT_RATE", 0.4)
        patch.setattr(prototypes, "DIVISIONS", 1)
        patch.setattr(prototypes, "ROUNDS", 1)
        patch.setattr(safe_recipe, "PARTS", 2)
        patch.setattr(safe_recipe, "SOME_PARTS", 1)
        yield


@pytest.fixture
def quick_heads() -> Iterator[None]:
    with fewer_heads():
        yield


@pytest.fixture(scope="module")
def quick_heads_throughout() -> Iterator[None]:
    """The same for all tests of a module and the fixtures they share."""
    with fewer_heads():
        yield


@pytest.fixture(scope="session")
def stripes() -> ImageSet:
    """60 images of 8×8 in three classes that differ in the direction of their stripes, with noise."""
    rng = np.random.Generator(np.random.Philox(0))
    grid = np.indices((8, 8))
    patterns = [grid[0] % 2, grid[1] % 2, (grid[0] + grid[1]) % 2]
    labels = np.arange(60) % 3
    clean = np.stack([patterns[label] for label in labels]) * 160 + 40
    noisy = clean + rng.integers(-20, 21, clean.shape)
    return ImageSet.from_arrays(noisy.astype(np.uint8), labels=labels)
