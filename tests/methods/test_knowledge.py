"""Knowledge beside pairs: triplets in a training, and clusters of given sizes."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import Triplets
from constraintmatch.constraints.pair_cells import Places
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import predict, scores
from constraintmatch.methods.heads import size_bounds, size_shifts
from constraintmatch.methods.preparation import Context
from constraintmatch.models.cluster_model import ClusterModel, build_model
from constraintmatch.pipeline.config import make_config
from constraintmatch.pipeline.train import train
from constraintmatch.training.batches import ImageStore, pair_batches, view_maker
from constraintmatch.training.views import plain

N, K = 240, 4
LABELS = np.arange(N) % K
NOTHING = Constraints.from_lists(n_images=N)


@pytest.fixture(scope="module")
def blobs() -> ImageSet:
    numbers = 3 * np.eye(K, 8)[LABELS] + np.random.default_rng(0).normal(size=(N, 8))
    return ImageSet.from_arrays(numbers.astype(np.float32), labels=LABELS)


def start(images: ImageSet) -> ClusterModel:
    """A head that points at the kinds, but not well."""
    mean, std = images.moments()
    model = build_model(n_clusters=K, side=1, channels=8, mean=mean, std=std)
    noise = torch.randn(K, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.head.weight.copy_(2 * torch.eye(K, 8) + 0.9 * noise)
        model.head.bias.zero_()
    return model


def triplets(n: int = 400, seed: int = 0) -> Triplets:
    draw = np.random.default_rng(seed)
    anchor, step = draw.integers(0, N, n), draw.integers(1, K, n)
    near, far = (anchor + K * draw.integers(1, 50, n)) % N, (anchor + step + K * draw.integers(0, 50, n)) % N
    return Triplets(np.stack([anchor, near, far], 1), np.ones(n, np.float32), Places(np.arange(n)))


def options(**more: object) -> dict[str, object]:
    return {"steps": 60, "lr": 0.05, "device": "cpu", "pairs_per_step": 50, "evaluate_every": 20, **more}


@pytest.mark.parametrize("recipe", ["safe", "paper"])
def test_triplets_alone_teach_a_head(blobs: ImageSet, recipe: str) -> None:
    model = start(blobs)
    before = scores(LABELS, predict(model, blobs))["acc"]
    config = make_config("constrained", options(recipe=recipe), start=copy.deepcopy(model))
    trained = train(blobs, replace(NOTHING, triplets=triplets()), config).model
    assert scores(LABELS, predict(trained, blobs))["acc"] > before + 0.03


def test_triplets_without_weight_are_refused(blobs: ImageSet) -> None:
    given = replace(triplets(), weight=np.zeros(400, np.float32))
    config = make_config("constrained", options(), start=start(blobs))
    with pytest.raises(InputError, match="every constraint has the weight 0"):
        train(blobs, replace(NOTHING, triplets=given), config)


def test_a_batch_has_pairs_first_then_anchors_with_near_and_with_far_images() -> None:
    images = ImageSet.from_arrays(np.arange(N, dtype=np.float32)[:, None])
    store, given = ImageStore(images, torch.device("cpu")), triplets(6)
    pairs = replace(Constraints.sample(LABELS, 8, seed=0), triplets=given)
    batch = pair_batches(store, pairs, 4, plain(), view_maker(0, torch.device("cpu")), seed=0)(0)
    left, right = (side.flatten().long().tolist() for side in (batch.left, batch.right))
    assert batch.sizes == (12, 12)
    assert (len(left), len(batch.link), len(batch.weight)) == (12, 4, 8)
    known = {(int(a), int(b)): float(c) for a, b, c in zip(pairs.left, pairs.right, pairs.link, strict=True)}
    assert [known[pair] for pair in zip(left[:4], right[:4], strict=True)] == batch.link.tolist()
    assert left[4:8] == left[8:]
    chosen = zip(left[4:8], right[4:8], right[8:], strict=True)
    assert set(chosen) <= set(map(tuple, given.rows.tolist()))


def test_shifts_give_the_best_placement_in_the_bounds() -> None:
    """Linear programming finds the same."""
    for seed in range(12):
        draw = np.random.default_rng(seed)
        n, k = 40, int(draw.integers(2, 5))
        logits = (draw.normal(size=(n, k)) + 2 * draw.normal(size=k)).astype(np.float32)
        bounds = np.stack([np.full(k, n // k - draw.integers(0, 3)), np.full(k, n // k + draw.integers(1, 4))], 1)
        clusters = (logits + size_shifts(logits, bounds)).argmax(1)
        counts = np.bincount(clusters, minlength=k)
        assert ((counts >= bounds[:, 0]) & (counts <= bounds[:, 1])).all()
        each = np.tile(np.eye(k), n)
        limits = np.concatenate([each, -each]), np.concatenate([bounds[:, 1], -bounds[:, 0]])
        best = linprog(-logits.ravel(), *limits, np.repeat(np.eye(n), k, axis=1), np.ones(n), bounds=(0, 1))
        assert logits[np.arange(n), clusters].sum() == pytest.approx(-best.fun, abs=1e-3)


def test_clusters_that_keep_their_bounds_get_no_shift() -> None:
    logits = np.eye(3, dtype=np.float32)[np.arange(30) % 3]
    assert (size_shifts(logits, np.full((3, 2), 10)) == 0).all()


def test_a_training_with_sizes_keeps_them_and_its_folder_has_them(blobs: ImageSet, tmp_path) -> None:
    sizes = np.array([[0.3, 0.35], [0.3, 0.35], [100, 110], [0, 0.05]], np.float32)
    sizes[:2] = [0.2, 0.25]
    pairs = replace(Constraints.sample(LABELS, 100, seed=0), sizes=sizes)
    config = make_config("constrained", options(steps=10, recipe="paper"), start=start(blobs))
    trained = train(blobs, pairs, config, Context(out=tmp_path / "run")).model
    counts = np.sort(np.bincount(predict(trained, blobs).clusters, minlength=K))
    assert counts[0] <= 12
    assert counts[3] in range(100, 111)
    assert (tmp_path / "run" / "pairs-sizes.csv").is_file()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([[0.3, 1]], "the least sizes of 4 clusters add up to 288 images, the set has 240; change least"),
        ([[0, 50]], "the most sizes of 4 clusters add up to 200 images, the set has 240; change most"),
        ([[0, 1], [0, 1]], "2 lines of sizes for 4 clusters; write one line for all of them, or one for each"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_before_the_training(sizes, said, blobs: ImageSet) -> None:
    given = replace(NOTHING, triplets=triplets(), sizes=np.array(sizes, np.float32))
    with pytest.raises(InputError) as error:
        train(blobs, given, make_config("constrained", options(), start=start(blobs)))
    assert str(error.value) == said


def test_equal_shares_leave_room_for_an_image_that_is_left_over() -> None:
    assert size_bounds(np.array([[0.25, 0.25]], np.float32), 242, 4).tolist() == [[60, 61]] * 4
