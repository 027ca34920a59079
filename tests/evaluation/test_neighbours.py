"""Neighbours: blocks give what brute force gives, at every size and border; FAISS gives nearly the same."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scripts import script

from constraintmatch.evaluation import neighbours
from constraintmatch.evaluation.metrics import knn_accuracy
from constraintmatch.evaluation.neighbours import nearest_blocks, nearest_in_lists, nearest_neighbours, unit_rows

few = settings(max_examples=40, deadline=None)


def points(n: int, width: int = 8, seed: int = 0) -> NDArray[np.float32]:
    """Rows around ten centres."""
    random = np.random.Generator(np.random.Philox(seed))
    centres = random.standard_normal((10, width))
    return (centres[np.arange(n) % 10] + 0.5 * random.standard_normal((n, width))).astype(np.float32)


def brute_force(features: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    unit = features.astype(np.float64) / np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    similar = unit @ unit.T
    np.fill_diagonal(similar, -np.inf)
    return np.argsort(-similar, axis=1)[:, : min(k, len(features) - 1)]


@few
@given(st.integers(2, 70), st.integers(1, 12), st.integers(1, 75), st.integers(1, 600), st.integers(1, 80))
def test_blocks_of_any_size_give_the_neighbours_of_brute_force(
    n: int, k: int, columns: int, block: int, rows: int
) -> None:
    features = points(n, seed=n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "COLUMNS", columns)
        patch.setattr(neighbours, "BLOCK", block)
        patch.setattr(neighbours, "ROWS", rows)
        assert np.array_equal(nearest_neighbours(features, k), brute_force(features, k))


@pytest.mark.parametrize("n", [31, 32, 33, 64, 65])
def test_borders_of_blocks_lose_no_neighbour(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "COLUMNS", 32)
    features = points(n)
    assert np.array_equal(nearest_neighbours(features, 40), brute_force(features, 40))


def test_blocks_give_the_cosines_too_and_an_asked_row_may_be_its_own_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "COLUMNS", 7)
    monkeypatch.setattr(neighbours, "ROWS", 5)
    unit = unit_rows(points(30))
    found = list(nearest_blocks(unit[:11], unit, 4))
    assert [len(near) for _, near in found] == [5, 5, 1]
    cosines, near = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert near[:, 0].tolist() == list(range(11))
    torch.testing.assert_close(cosines, (unit[:11, None] * unit[near]).sum(-1))


def test_of_equal_rows_none_is_its_own_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "COLUMNS", 4)
    near = nearest_neighbours(np.ones((11, 3), np.float32), 5)
    assert not (near == np.arange(11)[:, None]).any()
    assert all(len(set(row)) == 5 for row in near.tolist())


def test_the_vote_of_the_neighbours_does_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = points(90), np.arange(90) % 10
    whole = knn_accuracy(features[20:], labels[20:], features[:20], labels[:20])
    monkeypatch.setattr(neighbours, "COLUMNS", 9)
    monkeypatch.setattr(neighbours, "BLOCK", 50)
    assert knn_accuracy(features[20:], labels[20:], features[:20], labels[:20]) == whole


def test_the_rows_of_a_file_are_brought_to_length_1_and_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "COLUMNS", 4)
    features = points(10)
    features[3] = 0
    features.flags.writeable = False
    length = unit_rows(features).norm(dim=1)
    torch.testing.assert_close(length, (torch.arange(10) != 3).float())


def test_no_block_of_cosines_is_larger_than_128_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, product = [], torch.Tensor.__matmul__

    def watched(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        sizes.append(len(one) * other.shape[1])
        return product(one, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    for n in (3_000, 50_000, 150_000):
        known = torch.ones(n, 2)
        next(nearest_blocks(known, known, 3))
    assert 2**24 <= max(sizes) <= 2**25


# FAISS


@pytest.fixture
def faiss() -> Any:
    return pytest.importorskip("faiss", reason="faiss-cpu is not installed: pip install constraintmatch[scale]")


def test_all_lists_give_what_exact_search_gives(faiss: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(neighbours, "FIRST_SEARCHED", 1_000)
    features = points(800)
    said: list[str] = []
    near = nearest_in_lists(unit_rows(features).numpy(), 7, say=said.append)
    assert np.array_equal(near, brute_force(features, 7))
    assert said == ["neighbours: FAISS searches 20 of 20 lists; recall 1.000 on 500 rows"]


def test_few_lists_give_the_recall_that_they_promise(faiss: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(neighbours, "FIRST_SEARCHED", 1)
    monkeypatch.setattr(neighbours, "COLUMNS", 700)
    unit = unit_rows(points(2_000)).numpy()
    near, exact = nearest_in_lists(unit, 10), brute_force(unit, 10)
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(near.tolist(), exact.tolist(), strict=True)]) > 0.93
    assert near.min() >= 0
    assert not (near == np.arange(2_000)[:, None]).any()
    assert np.array_equal(near, nearest_in_lists(unit, 10))


def test_rows_whose_lists_are_too_short_are_searched_exactly(faiss: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(neighbours, "FIRST_SEARCHED", 2)
    monkeypatch.setattr(neighbours, "RECALL", 0.0001)
    features = points(200)
    near = nearest_in_lists(unit_rows(features).numpy(), 190)
    assert near.min() >= 0
    assert all(len(set(row)) == 190 for row in near.tolist())


def test_many_rows_on_a_cpu_go_to_faiss(faiss: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(neighbours, "MOST_EXACT", 500)
    said: list[str] = []
    features = points(501)
    nearest_neighbours(features[:500], 3, say=said.append)
    assert not said
    nearest_neighbours(features, 3, say=said.append)
    assert len(said) == 1


def test_without_faiss_many_rows_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "MOST_EXACT", 40)
    monkeypatch.setattr(neighbours, "find_spec", lambda _: None)
    features, said = points(60), list[str]()
    assert np.array_equal(nearest_neighbours(features, 5, say=said.append), brute_force(features, 5))
    assert said == ["neighbours: all 60 rows are compared, which may take hours; FAISS (extra scale) takes minutes"]


# The benchmark


def test_the_benchmark_scales_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script("benchmarks", "scale")
    asked: list[int] = []
    clock = iter(np.cumsum([0, 2.0, 0, 2.0]))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    assert benchmark.asked_part(3_000, 6, asked.append) == 3_000  # 2 ms a row
    assert benchmark.asked_part(1_000_000, 60, asked.append) == 7_500
    assert asked == [64, 1_000] * 2
