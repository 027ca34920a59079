"""Naive pseudo-labelling: the pair loss on the constraints, and FixMatch's cross-entropy on confident guesses."""

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.pair_training import Before, Selection, Unconstrained
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice
from constraintmatch.methods.safe_recipe import train_by_recipe
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.loop import TrainSettings
from constraintmatch.training.losses import pseudo_label_loss, soft_links

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

    λ rises from zero over the share `warm_up` of the steps (the paper has none). L^CE is the mean over all images of a
    step, as FixMatch has it. `flip_between`, `error_rate`, `merge`, `head_steps`: see `constraintmatch`.
    """
    term = Unconstrained(
        "pseudo-labels",
        lambda guess, logits, keep: pseudo_label_loss(logits, guess, keep),
        Selection("confidence", min_confidence=min_confidence),
        soft_links,
        pseudo_weight,
        flip_fraction,
        images_per_step,
        warm_up,
        flip_between,
    )
    return train_by_recipe(
        model,
        images,
        constraints,
        recipe=recipe,
        title="pseudo_label",
        unconstrained=term,
        error_rate=error_rate,
        pairs_per_step=pairs_per_step,
        before=Before(merge, head_steps),
        settings=settings,
        views=views,
        context=context,
    )
