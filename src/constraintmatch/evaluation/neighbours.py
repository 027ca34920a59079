"""The nearest rows by cosine, for any number of rows: all of them compared in blocks, or those of a few FAISS lists.

Blocks give the exact answer in memory that does not grow with the number of pairs; the time does. Where FAISS is
installed (`pip install constraintmatch[scale]`), more than 131,072 rows on a CPU are sorted into lists first, and a row
is compared with those of the nearest lists only. How many lists is decided by the recall, which is measured, not
assumed: rows of a sample find at least 95 % of their true neighbours (decision 046).
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from constraintmatch._internal.errors import InputError

Say = Callable[[str], None] | None
ROWS = 2000  # that are asked about at once
COLUMNS = 2**16  # rows that a block of rows is compared with; sets up to this size are compared in one go
BLOCK = 2**25  # cosines in one block: 128 MiB in fp32
MOST_EXACT = 2**17  # rows that are all compared even where FAISS is installed: minutes on two cores
RECALL, SAMPLE = 0.95, 500  # the least share of true neighbours that lists find, and the rows that it is measured on
FIRST_SEARCHED = 8  # lists; twice as many while the recall is too low


def nearest_neighbours(
    features: NDArray[np.float32], k: int, *, device: torch.device | str = "cpu", say: Say = None
) -> NDArray[np.int64]:
    """The k rows nearest to each row (n, k) by cosine, itself left out, nearest first; fewer where there are fewer.

    It is exact up to 131,072 rows, on a GPU, and where FAISS is missing; else `nearest_in_lists`, which tells its
    recall to `say`. It holds the features, the result, the rows at length 1, which FAISS copies, and two blocks of
    128 MiB.
    """
    if len(features) < 2:
        raise InputError("neighbours need at least two images")
    unit, few = unit_rows(features, device), min(k, len(features) - 1)
    if len(unit) > MOST_EXACT and unit.device.type == "cpu" and find_spec("faiss") is not None:
        return nearest_in_lists(unit.numpy(), few, say=say)
    if len(unit) > MOST_EXACT and unit.device.type == "cpu" and say is not None:
        say(f"neighbours: all {len(unit):,} rows are compared, which may take hours; FAISS (extra scale) takes minutes")
    return torch.cat([near.cpu() for _, near in nearest_blocks(unit, unit, few, itself=False)]).numpy()


def nearest_blocks(
    asked: torch.Tensor, known: torch.Tensor, k: int, *, itself: bool = True
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and numbers (b, k) of the known rows nearest to b of the asked ones, nearest first; b is at most 2,000.

    Rows have length 1. A block has at most 128 MiB of cosines: the best of one block of known rows meet those of the
    next. Without `itself`, asked and known rows are the same, and none is its own neighbour.
    """
    few, step = min(k, len(known)), max(1, min(ROWS, BLOCK // max(1, min(COLUMNS, len(known)))))
    for start in range(0, len(asked), step):
        rows = asked[start : start + step]
        best, near = rows.new_empty(len(rows), 0), torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device)
        for first in range(0, len(known), COLUMNS):
            cosines = rows @ known[first : first + COLUMNS].T
            if not itself:
                cosines.diagonal(start - first).fill_(-torch.inf)
            found, at = cosines.topk(min(few, cosines.shape[1]), dim=1)
            if first == 0:
                best, near = found, at
                continue
            best, which = torch.cat([best, found], 1).topk(min(few, best.shape[1] + found.shape[1]), dim=1)
            near = torch.cat([near, at + first], 1).gather(1, which)
        yield best, near


def nearest_in_lists(unit: NDArray[np.float32], k: int, *, say: Say = None) -> NDArray[np.int64]:
    """What `nearest_neighbours` gives for rows of length 1, nearly: FAISS compares a row with those of some lists.

    There are 2 √n lists around means of the rows. The number of searched lists doubles until 500 rows of the set find
    95 % of the neighbours that exact search gives them; `say` gets both numbers. The same rows give the same result.
    """
    import faiss

    n, width = unit.shape
    n_lists = max(1, min(int(2 * n**0.5), n // 39))  # FAISS warns of lists with fewer than 39 rows to learn from
    around = faiss.IndexFlatIP(width)
    index = faiss.IndexIVFFlat(around, width, n_lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.max_points_per_centroid, index.cp.niter = 39, 5  # quick: 64 and 10 find 0.01 more
    index.train(unit)
    index.add(unit)

    tensor, sample = torch.from_numpy(unit), np.linspace(0, n - 1, min(n, SAMPLE)).astype(np.int64)

    def search(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return _without_itself(index.search(unit[rows], k + 1)[1], rows, k)

    def compare_all(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        near = torch.cat([near for _, near in nearest_blocks(tensor[rows], tensor, k + 1)]).numpy()
        return _without_itself(near, rows, k)

    wanted = compare_all(sample)

    def recall() -> float:
        return sum(len(np.intersect1d(*two)) for two in zip(search(sample), wanted, strict=True)) / wanted.size

    index.nprobe = min(FIRST_SEARCHED, n_lists)
    while (share := recall()) < RECALL and index.nprobe < n_lists:
        index.nprobe = min(2 * index.nprobe, n_lists)
    if say is not None:
        lists = f"{index.nprobe:,} of {n_lists:,} lists"
        say(f"neighbours: FAISS searches {lists}; recall {share:.3f} on {len(sample):,} rows")
    near = np.concatenate([search(np.arange(i, min(i + COLUMNS, n))) for i in range(0, n, COLUMNS)])
    short = np.flatnonzero((near < 0).any(1))  # the searched lists had too few rows
    for i in range(0, len(short), COLUMNS):
        rows = short[i : i + COLUMNS]
        near[rows] = compare_all(rows)
    return near


def _without_itself(near: NDArray[np.int64], rows: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """The first k of k + 1 neighbours that are not the row; of equal rows, another may have come in its place."""
    first = np.argsort(near == rows[:, None], axis=1, kind="stable")[:, :k]
    return np.take_along_axis(near, first, axis=1)


def unit_rows(values: ArrayLike, device: torch.device | str = "cpu") -> torch.Tensor:
    """The rows at length 1, in fp32; a row of zeros stays one. They are copied block by block: a file may hold them."""
    given = np.asarray(values, np.float32)
    unit = torch.empty(given.shape, device=device)
    for start in range(0, len(given), COLUMNS):
        part = given[start : start + COLUMNS]
        rows = torch.from_numpy(part if part.flags.writeable else part.copy())  # torch warns of read-only arrays
        unit[start : start + COLUMNS] = torch.nn.functional.normalize(rows.to(device), dim=-1)
    return unit
