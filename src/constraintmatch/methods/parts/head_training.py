"""The head of a network as a model of its own: what the backbone makes of the images takes their place.

There the features have one scale, whatever the network's is; the head says the same before and after it is carried
over, but for rounding.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from constraintmatch._internal.progress import Quiet, Reporter, watched
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_clusters, with_head

__all__ = ["put_back", "seen_by", "taken_off", "teach_head"]


def seen_by(
    model: ClusterModel,
    images: ImageSet,
    *,
    device: torch.device | str | None = None,
    reporter: Reporter | None = None,
) -> ImageSet:
    """The images as the model's backbone sees them: embeddings, with the same names and labels."""
    with watched(reporter or Quiet(), "embedding", len(images)) as progress:
        features = embed(model, images, device=device, progress=progress)
    return ImageSet.from_arrays(features, names=images.names, labels=images.labels)


def taken_off(model: ClusterModel, seen: ImageSet) -> ClusterModel:
    """The model's head on the embeddings that its backbone makes; without clusters where the model has none."""
    mean, std = seen.moments()
    fresh = build_model(n_clusters=0, side=1, channels=seen.channels, mean=mean, std=std).to(model.device)
    if model.head is None:
        return fresh
    weight, bias = (part.detach().float() for part in (model.head.weight, model.head.bias))
    return with_head(fresh, weight * std[0], bias + weight @ torch.tensor(mean, device=model.device))


def put_back(model: ClusterModel, alone: ClusterModel) -> ClusterModel:
    """The model's backbone under the head that was taken off and has learnt meanwhile; the model is left as it is."""
    placed = with_clusters(model, 0) if alone.head is None else with_head(model, *_on_features(alone))
    placed.config = replace(placed.config, trained=(*model.config.trained, *alone.config.trained))
    return placed


def teach_head(
    model: ClusterModel,
    images: ImageSet,
    learn: Callable[[ClusterModel, ImageSet], object],
    *,
    device: torch.device | str | None = None,
) -> None:
    """Let `learn` change the model's head, in place, as a model of its own on the embeddings of the images."""
    assert model.head is not None
    seen = seen_by(model, images, device=device)
    alone = taken_off(model, seen)
    learn(alone, seen)
    with torch.no_grad():
        for part, taught in zip((model.head.weight, model.head.bias), _on_features(alone), strict=True):
            part.copy_(taught)


def _on_features(alone: ClusterModel) -> tuple[Tensor, Tensor]:
    """Weight and bias of a head that was taken off, for the features as the backbone gives them."""
    assert alone.head is not None
    weight = alone.head.weight.detach() / alone.config.std[0]
    return weight, alone.head.bias.detach() - weight @ torch.tensor(alone.config.mean, device=alone.device)
