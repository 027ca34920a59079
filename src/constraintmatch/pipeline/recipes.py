"""Which stages make a start, and how long: chains by name, sizes by the number of images and the device."""

from collections.abc import Mapping, Sequence
from typing import Any

from constraintmatch._internal.errors import InputError

__all__ = [
    "CHAINS",
    "MOST_LR",
    "ORDER",
    "OWN_CHAIN",
    "PRETEXTS",
    "SHORT_STAGES",
    "STAGES",
    "Recipe",
    "chain_stages",
    "round_size",
    "short_start",
    "training_size",
    "with_pretext",
]

STAGES = ("simclr", "scan", "self_label")  # the paper's start
SHORT_STAGES = ("simclr", "linear_scan")  # the one that a training makes by itself
PRETEXTS = ("simclr", "byol")  # what the features are learnt by; a start has one of them
ORDER = (*PRETEXTS, "linear_scan", "scan", "self_label", "neighbour_label")
CHAINS = {
    "scan": STAGES,
    "byol": ("byol", "scan", "self_label", "linear_scan"),
    "own": ("byol", "linear_scan", "neighbour_label", "linear_scan"),
    "short": SHORT_STAGES,
}
OWN_CHAIN = "own"  # for images that are no data set of the paper: steady on few of them (decisions 023 and 041)
MOST_LR = 0.02  # of a round; with few answers a higher rate is unstable (docs/findings.md: 0.05 on digits)
Recipe = Mapping[str, Mapping[str, Any]]  # of each stage its arguments and training settings


def short_start(n_images: int, *, cpu: bool) -> dict[str, dict[str, Any]]:
    """The recipe of the start that a training makes by itself: minutes for a folder, on a CPU too.

    At least 160 steps of SimCLR whatever the number of images, on a CPU not more; then clusters by linear heads on the
    frozen features: seconds, and nothing to tune (decision 014).
    """
    epochs = -(-160 // max(1, n_images // 256))
    return {"simclr": {"epochs": epochs if cpu else max(60, epochs), "images_per_step": 256}, "linear_scan": {}}


def training_size(n_images: int, *, cpu: bool) -> dict[str, Any]:
    """Batches, steps, rate and warm-up of a training on pairs, for a set of this size where nothing else is known.

    An eighth of the images a step, from 150 to the paper's 600 (on a CPU 150), and a third as many pairs; sixty
    passes over the images, from 500 steps to the paper's 20,000 (on a CPU 1,000); the paper's rate of 0.01, since 0.03
    ruins a strong start (decision 042). Pairs come first and pseudo-constraints by and by: a short start is a weak one,
    and pseudo-constraints confirm what it has wrong (docs/findings.md).
    """
    batch = min(150 if cpu else 600, max(150, n_images // 8))
    steps = int(min(1_000 if cpu else 20_000, max(500, 60 * n_images / batch)))
    return {"images_per_step": batch, "pairs_per_step": batch // 3, "steps": steps, "lr": 0.01, "warm_up": 0.5}


def round_size(n_images: int, *, cpu: bool) -> dict[str, Any]:
    """The same for a round between questions: short, for somebody waits."""
    size = training_size(n_images, cpu=cpu)
    return {**size, "steps": 300 if cpu else 1_000, "lr": min(size["lr"], MOST_LR)}


def chain_stages(chain: str) -> tuple[str, ...]:
    """The stages of a chain by name; `scan` is the paper's."""
    if chain not in CHAINS:
        raise InputError(f"unknown chain {chain!r}; known are {', '.join(CHAINS)}")
    return CHAINS[chain]


def with_pretext(stages: Sequence[str], pretext: str) -> tuple[str, ...]:
    """The stages with this pretext task in the place of theirs."""
    if pretext not in PRETEXTS:
        raise InputError(f"unknown pretext task {pretext!r}; known are {', '.join(PRETEXTS)}")
    return tuple(pretext if stage in PRETEXTS else stage for stage in stages)
