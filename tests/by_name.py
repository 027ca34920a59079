"""A method run by its name, for tests that give its arguments and settings apart."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods import Context, Trained, ViewChoice
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.pipeline.config import make_config
from constraintmatch.pipeline.train import train
from constraintmatch.training.loop import TrainSettings

__all__ = ["run_method"]


def run_method(
    name: str,
    model: ClusterModel,
    images: ImageSet,
    pairs: Constraints | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    settings: TrainSettings | None = None,
    views: ViewChoice | None = None,
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """What `train` gives for this configuration."""
    config = make_config(name, arguments, start=model, views=views)
    return train(images, pairs, replace(config, settings=settings or config.settings), context)
