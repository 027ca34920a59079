from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.training import views
from constraintmatch.training.batches import ImageStore, Shuffled, derive_seed, map_tensors, pair_batches, view_maker

CPU = torch.device("cpu")


def test_derived_seeds_are_pinned_and_differ_by_name() -> None:
    assert derive_seed(0, "views") == 8470495754614844001
    assert len({derive_seed(0, "a"), derive_seed(1, "a"), derive_seed(0, "b"), derive_seed(0, "a", 1)}) == 4


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_an_epoch_shows_every_row_at_most_once(n: int, batch: int, seed: int) -> None:
    shuffled = Shuffled(n, batch, seed)
    for epoch in range(2):
        steps = range(epoch * shuffled.steps_per_epoch, (epoch + 1) * shuffled.steps_per_epoch)
        rows = torch.cat([shuffled(step) for step in steps])
        assert len(rows) == (n // min(batch, n)) * min(batch, n)
        assert len(rows.unique()) == len(rows)
        assert 0 <= int(rows.min()) <= int(rows.max()) < n


def test_rows_are_a_pure_function_of_the_step() -> None:
    forward, jumping = Shuffled(50, 7, 3), Shuffled(50, 7, 3)
    expected = [forward(step) for step in range(40)]
    for step in (39, 0, 21, 20, 5):
        assert torch.equal(jumping(step), expected[step])
    assert not torch.equal(expected[0], expected[7])  # another epoch, another order


def test_of_no_rows_none_can_be_drawn() -> None:
    with pytest.raises(InputError, match="empty"):
        Shuffled(0, 5, 0)


def test_resident_and_streamed_images_are_the_same(stripes: ImageSet) -> None:
    rows = torch.tensor([5, 0, 59, 5])
    resident, streamed = (ImageStore(stripes, CPU, resident=flag).take(rows) for flag in (True, False))
    assert torch.equal(resident, streamed)
    assert resident.shape == (4, 1, 8, 8)
    assert np.array_equal(resident[2, 0].numpy(), stripes.images[59, :, :, 0])


def test_views_follow_from_seed_name_and_step(stripes: ImageSet) -> None:
    images = ImageStore(stripes, CPU).take(torch.arange(20))
    view, maker = views.weak(), view_maker(4, CPU)
    first = maker(view, images, 12, "weak")
    maker(view, images, 13, "weak")
    assert torch.equal(first, view_maker(4, CPU)(view, images, 12, "weak"))
    assert not torch.equal(first, maker(view, images, 13, "weak"))
    assert not torch.equal(first, maker(view, images, 12, "strong"))
    assert torch.equal(maker(views.plain(), images, 0, "plain"), images)


def test_pairs_carry_their_images_links_and_weights(stripes: ImageSet) -> None:
    pairs = Constraints.from_arrays([0, 3, 6], [1, 4, 9], [1.0, 0.0, 0.25], n_images=60, weight=[1.0, 2.0, 3.0])
    store, seen = ImageStore(stripes, CPU), set()
    next_batch = pair_batches(store, pairs, 2, views.plain(), view_maker(0, CPU), seed=0)
    for step in range(4):
        batch = next_batch(step)
        assert len(batch.left) == len(batch.right) == 2
        for left, right, link, weight in zip(batch.left, batch.right, batch.link, batch.weight, strict=True):
            rows = {1.0: (0, 1), 2.0: (3, 4), 3.0: (6, 9)}[float(weight)]
            assert float(link) == {1.0: 1.0, 2.0: 0.0, 3.0: 0.25}[float(weight)]
            assert torch.equal(torch.stack((left, right)), store.take(torch.tensor(rows)))
            seen.add(rows)
    assert len(seen) == 3


def test_every_tensor_of_a_nested_batch_is_mapped() -> None:
    @dataclass(frozen=True)
    class Inner:
        x: torch.Tensor

    @dataclass(frozen=True)
    class Outer:
        inner: Inner
        y: torch.Tensor
        nothing: Inner | None

    batch = Outer(Inner(torch.ones(2)), torch.zeros(1), None)
    mapped = map_tensors(batch, lambda value: value + 1)
    assert mapped.inner.x.tolist() == [2, 2]
    assert mapped.y.tolist() == [1]
    assert mapped.nothing is None


@pytest.mark.parametrize("header", [0, 128, 5_000])
def test_rows_of_a_map_are_asked_for_ahead_and_come_as_they_are(tmp_path: Path, header: int) -> None:
    """Rows of 300 bytes begin anywhere in a page; one that was asked for outside the file would be an error."""
    pixels = np.random.default_rng(0).integers(0, 256, (500, 10, 10, 3), dtype=np.uint8)
    (tmp_path / "map").write_bytes(bytes(header) + pixels.tobytes())
    mapped = np.memmap(tmp_path / "map", np.uint8, mode="r", offset=header, shape=pixels.shape)
    names = tuple(map(str, range(500)))
    for images in (mapped, np.asarray(mapped), np.asarray(mapped)[100:]):
        store = ImageStore(ImageSet(images, names[: len(images)]), torch.device("cpu"), resident=False)
        rows = torch.tensor([0, len(images) - 1, 7, 7, 123])
        np.testing.assert_array_equal(store.take(rows).permute(0, 2, 3, 1).numpy(), images[rows.numpy()])
