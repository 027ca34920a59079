"""The constrained competitor: the pair loss on the given constraints and nothing else."""

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.pair_training import Before
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice
from constraintmatch.methods.safe_recipe import train_by_recipe
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.loop import TrainSettings

__all__ = ["constrained"]


def constrained(
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints,
    *,
    error_rate: float = 0.0,
    merge: bool = False,
    head_steps: int = 0,
    recipe: str = "paper",
    pairs_per_step: int = 200,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained with L^cons alone.

    `error_rate` is the share of the constraints thought to be wrong: the loss then expects them (decision 032).
    With `merge` clusters that the pairs join are merged first (decision 038), with `head_steps` the head alone learns
    first (decision 034). `recipe` is paper, or safe: the start is kept unless held-out pairs say otherwise (042).
    """
    return train_by_recipe(
        model,
        images,
        constraints,
        recipe=recipe,
        title="constrained",
        unconstrained=None,
        error_rate=error_rate,
        pairs_per_step=pairs_per_step,
        before=Before(merge, head_steps),
        settings=settings,
        views=views,
        context=context,
    )
