"""Naive pseudo-labelling: the pair loss on the constraints, and FixMatch's cross-entropy on confident guesses."""

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.pair_training import PairTask, choose_selection
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice
from constraintmatch.methods.safe_recipe import train_pairs
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.loop import TrainSettings
from constraintmatch.training.losses import pseudo_label_loss

__all__ = ["pseudo_label"]


def pseudo_label(
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints,
    *,
    pseudo_weight: float = 1.0,
    min_confidence: float = 0.95,
    warm_up: float = 0.0,
    flip_fraction: float = 0.0,
    flip_between: str = "largest",
    error_rate: float = 0.0,
    merge: bool = False,
    head_steps: int = 0,
    recipe: str = "paper",
    pairs_per_step: int = 200,
    images_per_step: int = 600,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained with L = L^cons + λ L^CE; λ is `pseudo_weight`, τ is `min_confidence`, ρ is `flip_fraction`.

    L^CE is the mean over all images of a step, as in FixMatch. The other arguments: see `constraintmatch`.
    """
    task = PairTask(
        "pseudo_label",
        constraints,
        recipe,
        error_rate,
        pairs_per_step,
        merge,
        head_steps,
        loss=lambda guess, logits, keep: pseudo_label_loss(logits, guess, keep),
        select=choose_selection("confidence", 1.0, min_confidence),
        pseudo_weight=pseudo_weight,
        warm_up=warm_up,
        flip_fraction=flip_fraction,
        flip_between=flip_between,
        images_per_step=images_per_step,
    )
    return train_pairs(model, images, task, settings, views, context)
