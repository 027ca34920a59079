"""The head of a network taught alone: what its backbone makes of the images takes their place."""

from collections.abc import Callable

import torch

from constraintmatch.evaluation import embed
from constraintmatch.images import ImageSet
from constraintmatch.models import ClusterModel, build_model, with_head

__all__ = ["teach_head"]


def teach_head(
    model: ClusterModel,
    images: ImageSet,
    learn: Callable[[ClusterModel, ImageSet], object],
    *,
    device: torch.device | str | None = None,
) -> None:
    """Let `learn` change the model's head, in place, as a model of its own on the embeddings of the images.

    There the features have one scale, whatever the network's is; the head says the same before and after it is carried
    over, but for rounding.
    """
    assert model.head is not None
    seen = ImageSet.from_arrays(embed(model, images, device=device), names=images.names, labels=images.labels)
    mean, std = seen.moments()
    scale, middle = std[0], torch.tensor(mean, device=model.device)
    weight, bias = (part.detach().float() for part in (model.head.weight, model.head.bias))
    fresh = build_model(n_clusters=0, side=1, channels=seen.channels, mean=mean, std=std).to(model.device)
    alone = with_head(fresh, weight * scale, bias + weight @ middle)
    learn(alone, seen)
    assert alone.head is not None
    with torch.no_grad():
        taught = alone.head.weight.to(model.device) / scale
        model.head.weight.copy_(taught)
        model.head.bias.copy_(alone.head.bias.to(model.device) - taught @ middle)
