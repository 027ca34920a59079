"""What the same seeds give: sampled pairs to the last bit, first losses of every method, the clusters of a small run.

A change here means that results published before cannot be repeated. Losses and clusters allow for the rounding of
another platform; pairs do not.
"""

import csv
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import script
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.judge import hide_images
from constraintmatch.methods import METHODS, cluster_contrast, pretext, safe_recipe
from constraintmatch.models.cluster_model import build_model
from constraintmatch.pipeline import config
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.rounds import Asking, LabelOracle, ask_until, closure_pairs
from constraintmatch.training.loop import TrainSettings

LABELS = np.arange(300) % 7
add_anchors = script("benchmarks", "label_efficiency").add_anchors


def digest(pairs: Constraints) -> str:
    """The first digits of the SHA-256 of the pairs, in one byte order and width."""
    columns = (
        pairs.left.astype("<i8"),
        pairs.right.astype("<i8"),
        pairs.link.astype("<f4"),
        pairs.weight.astype("<f4"),
    )
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()[:16]


def answered(kind: Any, choose: Any, n: int, *, seed: int = 0) -> Constraints:
    """What a simulated annotator's answers to chosen questions imply, of 300 images in seven clear clusters."""
    belief = Belief.of(
        np.eye(7)[LABELS] + 0.2 * np.random.Generator(np.random.Philox(seed)).standard_normal((300, 7)),
        0.9 * np.eye(7)[LABELS] + 0.1 / 7,
    )
    oracle = LabelOracle(LABELS, error=0.1, seed=seed)
    answers = ask_until(belief, [], n, oracle, Asking(kind=kind, choose=choose, seed=seed))
    return closure_pairs(answers, 300, most=400, seed=seed)


PAIRS: dict[str, tuple[Callable[[], Constraints], str]] = {
    "10": (lambda: Constraints.sample(LABELS, 10, seed=0), "be9ebe8cc8add4a9"),
    "10 of seed 1": (lambda: Constraints.sample(LABELS, 10, seed=1), "f8d42aef144140f5"),
    "2,000": (lambda: Constraints.sample(LABELS, 2_000, seed=5), "f2baf5eb341f21d2"),
    "60, half of them must-links": (lambda: Constraints.sample(LABELS, 60, seed=0, balanced=True), "95ec47609f290fda"),
    "3 partners for each image": (lambda: Constraints.sample_partners(LABELS, 3, seed=2), "a5ec42c5a2b3cb56"),
    "a fifth flipped": (lambda: Constraints.sample(LABELS, 200, seed=0).flip(0.2, seed=3), "19a48aa2ad0d72d9"),
    "held out": (lambda: hide_images(Constraints.sample(LABELS, 200, seed=0), seed=4)[1], "c33abca8598a0bac"),
    "split off": (lambda: Constraints.sample(LABELS, 200, seed=0).split(30, seed=6)[1], "2d9fb9280207019d"),
    "anchors": (
        lambda: add_anchors(Constraints.sample(LABELS, 9, seed=0), np.eye(7, dtype=np.float32)[LABELS], seed=1),
        "dfb6a0af42bd2971",
    ),
    "random questions": (lambda: answered("pair", "random", 40), "06ba25e993d03225"),
    "random questions of seed 1": (lambda: answered("which", "random", 40, seed=1), "38f4d0b6d5b22552"),
    "chosen pairs": (lambda: answered("pair", "recommended", 60), "8922317fc7abd748"),
    "chosen which": (lambda: answered("which", "recommended", 60), "599e0c5a7da8999d"),
    "chosen which of seed 1": (lambda: answered("which", "recommended", 25, seed=1), "d2bd1e55c06fe3b7"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_seeds_draw_the_same_pairs(name: str) -> None:
    make, expected = PAIRS[name]
    assert digest(make()) == expected


SHORT = TrainSettings(steps=3, lr=0.05, log_every=1, device="cpu", seed=3)
PAIRED = {"pairs_per_step": 10, "settings": SHORT}
SEMI = {**PAIRED, "images_per_step": 12}
CLOSE = {**SEMI, "max_entropy": 0.99}
STAGE = {"epochs": 1, "images_per_step": 40, "settings": SHORT}
LOSSES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constrained": (PAIRED, [0.836693, 0.560076, 0.525838]),
    "constrained, a tenth wrong": ({**PAIRED, "error_rate": 0.1}, [0.800013, 0.565914, 0.561714]),
    "pseudo_label": ({**SEMI, "min_confidence": 0.4}, [1.65293, 1.83839, 1.10935]),
    "constraintmatch": (CLOSE, [1.80805, 1.36627, 1.36123]),
    "constraintmatch, a tenth wrong": ({**CLOSE, "error_rate": 0.1}, [1.70593, 1.36924, 1.36153]),
    "constraintmatch, by confidence": (
        {**SEMI, "selection": "confidence", "min_confidence": 0.4, "links": "hard"},
        [1.87806, 1.38926, 1.34308],
    ),
    "constraintmatch, flipped": ({**CLOSE, "flip_fraction": 0.5, "warm_up": 0.9}, [0.836693, 0.854337, 1.14458]),
    "constraintmatch, safe": ({**CLOSE, "recipe": "safe"}, [19.5637, 26.7793]),
    "fully_constrained": ({"images_per_step": 20, "settings": SHORT}, [0.6463, 0.621771, 0.631937]),
    "supervised": ({"images_per_step": 20, "settings": SHORT}, [1.10636, 0.736119, 0.333013]),
    "simclr": (STAGE, [4.66727, 4.12434, 4.2282]),
    "byol": ({**STAGE, "hidden": 16, "projection": 8}, [2.29857, 2.11428, 1.62104]),
    "propos": ({**STAGE, "n_clusters": 3, "hidden": 16, "projection": 8, "noise": 0.5}, [2.3116, 2.13858, 1.70176]),
    "cc": ({**STAGE, "n_clusters": 4}, [3.54166, 3.20375, 3.54819]),
    "pica": ({**STAGE, "n_clusters": 4}, [-1.33387, -1.38274, -1.33379]),
    "mice": ({**STAGE, "n_clusters": 4}, [2.9528, 2.93612, 2.98219]),
    "tcc": ({**STAGE, "n_clusters": 4}, [3.55641, 3.58992, 3.60404]),
    "scan": ({**STAGE, "n_clusters": 4, "n_neighbours": 5, "n_tries": 0}, [-5.49736, -5.50752, -5.46799]),
    "self_label": ({**STAGE, "min_confidence": 0.35}, [0.988847, 0.82781, 0.705547]),
    "neighbour_label": ({**STAGE, "min_confidence": 0.35, "n_neighbours": 5}, [1.91307, 1.40553, 1.09998]),
}


@pytest.fixture(scope="module")
def images(stripes: ImageSet) -> ImageSet:
    """The stripes and their negatives: 120 images of 8×8 in three classes."""
    assert stripes.labels is not None
    return ImageSet.from_arrays(
        np.concatenate([stripes.images, 255 - stripes.images]), labels=np.tile(stripes.labels, 2)
    )


@pytest.mark.parametrize("name", LOSSES)
def test_the_first_losses_of_a_method_are_those_they_were(
    images: ImageSet, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any change of sampling, views, network or loss shows here."""
    for module in (pretext, cluster_contrast):
        monkeypatch.setattr(module, "PROJECTION", 8)
    monkeypatch.setattr(safe_recipe, "FOR_A_NETWORK", 8)  # few images hold out few
    arguments, expected = LOSSES[name]
    method = METHODS[name.partition(",")[0]]
    assert images.labels is not None
    pairs = {"constraints": Constraints.sample(images.labels, 150, seed=0)}
    given = pairs if "constraints" in inspect.signature(method).parameters else {}
    model = build_model(n_clusters=3, side=8, channels=1, seed=1)
    log = method(model, images, **given, **arguments).log
    assert [entry["loss"] for entry in log if "loss" in entry] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_every_method_that_has_losses_is_among_them() -> None:
    without = {"propagate", "linear_scan"}  # heads from a solver
    assert {name.partition(",")[0] for name in LOSSES} == set(METHODS) - without


@pytest.mark.usefixtures("quick_heads")
def test_a_small_run_finds_the_same_clusters(
    stripes: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its start; of every image the cluster by its number, and the run is sure of it: rounding changes none."""
    monkeypatch.setattr(config, "short_start", lambda *_, **__: {"simclr": {"epochs": 15}, "linear_scan": {}})
    images = stripes.take(np.arange(36))
    assert images.labels is not None
    np.save(tmp_path / "stripes.npy", images.images)
    Constraints.sample(images.labels, 60, seed=0).write(tmp_path / "pairs.csv")
    words = f"train {tmp_path}/stripes.npy --pairs {tmp_path}/pairs.csv --clusters 3 --recipe paper --steps 20 --seed 1"
    done = CliRunner().invoke(cli.app, [*words.split(), "--out", str(tmp_path / "run"), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    with (tmp_path / "run" / "clusters.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert "".join(row["cluster"] for row in rows) == 12 * "102"
    assert min(float(row["confidence"]) for row in rows) > 0.9
