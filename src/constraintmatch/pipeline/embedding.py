"""What a network makes of images, kept in a file that every command takes in the place of the images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target, write_atomically
from constraintmatch._internal.progress import Quiet, Reporter, watched
from constraintmatch.data.datasets import DATASETS, DataSet
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed
from constraintmatch.methods.parts.preparation import check_images
from constraintmatch.models.backbones import made_for_side
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model
from constraintmatch.pipeline.sources import ClassFolders, open_at
from constraintmatch.training.loop import choose_device

__all__ = ["embed_images", "write_embeddings"]

TIMM = "timm:"


def embed_images(
    model: str,
    source: Path | str,
    out: Path,
    *,
    side: int | None = None,
    split: str | None = None,
    data_dir: Path | str | None = None,
    class_folders: ClassFolders = "auto",
    strict: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
) -> NDArray[np.float32]:
    """The embeddings (n, d) of the images, which are written to `out` with names and labels.

    The model is a model folder, a run folder or a pretrained network of timm's, `timm:NAME`, which takes images of
    `side`, or of the side that it was made for. Of a data set without `split` the training images are taken.
    """
    place, reporter = choose_device(device), reporter or Quiet()
    if out.suffix != ".npz":
        raise InputError(f"{out}: embeddings are written as .npz; give --out a name that ends so")
    check_target(out)
    network = _network(model, side, DATASETS.get(str(source)))
    data = open_at(
        source,
        (network.config.side, network.config.channels),
        "train",
        split=split,
        data_dir=data_dir,
        class_folders=class_folders,
        strict=strict,
        reporter=reporter,
    )
    check_images(network, data.images)
    with watched(reporter, "embedding", len(data.images)) as progress:
        made = embed(network, data.images, device=place, progress=progress)
    write_embeddings(out, made, data.images)
    return made


def write_embeddings(path: Path, embeddings: NDArray[np.float32], images: ImageSet) -> None:
    """Write embeddings with the names of their images, and the labels where they are known, atomically."""
    arrays: dict[str, Any] = {"embeddings": embeddings, "names": np.array(images.names)}
    if images.labels is not None:
        arrays["labels"] = images.labels
    if images.classes is not None:
        arrays["classes"] = np.array(images.classes)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, **arrays)

    write_atomically(path, write)


def _network(model: str, side: int | None, row: DataSet | None) -> ClusterModel:
    if row is not None and side not in (None, row.side):
        raise InputError(f"{row.name} has images of {row.side} px; leave --side out")
    if model.startswith(TIMM):
        wanted = side or (row.side if row is not None else made_for_side(model))
        return build_model(n_clusters=0, side=wanted, backbone=model, pretrained=True)
    found = load_model(model)
    if side not in (None, found.config.side):
        raise InputError(f"{model}: takes images of {found.config.side} px; leave --side out")
    return found
