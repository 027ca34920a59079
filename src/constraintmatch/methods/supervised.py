"""The supervised bound: cross-entropy on every label."""

from torch import Tensor
from torch.nn import functional as F

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.label_training import Network, train_on_labels
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.batches import LabelBatch
from constraintmatch.training.loop import TrainSettings

__all__ = ["supervised"]


def supervised(
    model: ClusterModel,
    images: ImageSet,
    *,
    images_per_step: int = 400,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained by cross-entropy on the labels of all images."""

    def loss(network: Network, batch: LabelBatch) -> dict[str, Tensor]:
        return {"supervised": F.cross_entropy(network(batch.images).float(), batch.label)}

    if images.labels is not None and int(images.labels.max()) >= model.config.n_clusters:
        raise InputError(f"supervised: {int(images.labels.max()) + 1} classes for {model.config.n_clusters} outputs")
    return train_on_labels("supervised", model, images, loss, images_per_step, settings, views, context)
