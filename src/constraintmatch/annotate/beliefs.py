"""What is believed of the images before anybody is asked: by a model, or without one by their pixels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from constraintmatch.errors import InputError
from constraintmatch.questions import Belief

if TYPE_CHECKING:
    from constraintmatch.images import ImageSet
    from constraintmatch.models import ClusterModel

__all__ = ["open_model", "pixel_belief"]

BLOCK = 4_096  # images whose pixels are turned into numbers at once


def pixel_belief(images: ImageSet, *, side: int = 12, width: int = 48) -> Belief:
    """Features without a model: the images made small, their principal components, rows of length 1.

    Good enough to find near-duplicates and the dense places; 50,000 images take a few seconds. Embeddings are features
    already; their mean is taken off.
    """
    if images.embedded:
        given = images.images.reshape(len(images), -1)
        return Belief(_directions(given - given.mean(0)))
    cells = np.concatenate([_small(images.images[at : at + BLOCK], side) for at in range(0, len(images), BLOCK)])
    cells -= cells.mean(0)
    directions = np.linalg.eigh(cells.T @ cells)[1][:, ::-1]
    return Belief(_directions(cells @ directions[:, :width].astype(np.float32)))


def _directions(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1; they are changed in place."""
    features[:, 0] += 1e-6  # an image that is the mean of all has no direction of its own
    return np.asarray(features / np.linalg.norm(features, axis=1, keepdims=True), np.float32)


def _small(images: NDArray[np.uint8], side: int) -> NDArray[np.float32]:
    """Images (n, h, w, c) as means over at most side × side cells: (n, cells)."""
    edges = np.linspace(0, images.shape[1], min(side, images.shape[1]) + 1).astype(np.int64)
    sums = np.add.reduceat(np.add.reduceat(images.astype(np.float32), edges[:-1], axis=1), edges[:-1], axis=2)
    area = np.diff(edges)[:, None] * np.diff(edges)
    return np.asarray(sums / (255 * area[..., None]), np.float32).reshape(len(images), -1)


def open_model(path: Path | str, images: ImageSet) -> ClusterModel:
    """The model of a model or run folder, if it takes such images."""
    from constraintmatch.images import kind_of
    from constraintmatch.models import load_model

    model = load_model(path)
    takes, given = (model.config.side, model.config.channels), (images.side, images.channels)
    if takes != given:
        said = [kind_of(*size) for size in (takes, given)]
        raise InputError(f"{path}: takes {said[0]}, these are {said[1]}; name a model that was trained on such")
    return model
