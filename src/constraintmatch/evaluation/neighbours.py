"""The nearest neighbours of every image in the features of a model."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from constraintmatch._internal.errors import InputError

__all__ = ["nearest_neighbours"]


def nearest_neighbours(
    features: NDArray[np.float32], k: int, *, device: torch.device | str = "cpu", chunk: int = 2000
) -> NDArray[np.int64]:
    """The k rows nearest to each row (n, k) by cosine, itself left out, nearest first; fewer where there are fewer."""
    if len(features) < 2:
        raise InputError("neighbours need at least two images")
    k = min(k, len(features) - 1)
    unit = F.normalize(torch.from_numpy(features).to(device), dim=-1)
    parts = []
    for start in range(0, len(unit), chunk):
        scores = unit[start : start + chunk] @ unit.T
        rows = torch.arange(len(scores), device=scores.device)
        scores[rows, rows + start] = -torch.inf
        parts.append(scores.topk(k, dim=1).indices.cpu())
    return torch.cat(parts).numpy()
