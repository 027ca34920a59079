"""The fully constrained bound: the pair loss on every pair that the labels imply."""

import torch
from torch import Tensor

from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.label_training import Network, train_on_labels
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.batches import LabelBatch
from constraintmatch.training.loop import TrainSettings
from constraintmatch.training.losses import all_pairs_loss

__all__ = ["fully_constrained"]


def fully_constrained(
    model: ClusterModel,
    images: ImageSet,
    *,
    images_per_step: int = 400,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained by the MCL on all pairs of each batch, linked as the labels say; no self-pairs."""

    def loss(network: Network, batch: LabelBatch) -> dict[str, Tensor]:
        p = network(batch.images).float().softmax(-1)
        links = (batch.label[:, None] == batch.label[None, :]).float()
        everything = torch.ones_like(batch.label, dtype=torch.bool)
        return {"constrained": all_pairs_loss(p, links, everything, self_pairs=False)}

    return train_on_labels("fully_constrained", model, images, loss, images_per_step, settings, views, context)
