"""The constrained competitor: the pair loss on the given constraints and nothing else."""

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.parts.pair_training import PairTask
from constraintmatch.methods.parts.preparation import Context, Trained, ViewChoice
from constraintmatch.methods.safe_recipe import train_pairs
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

    `error_rate` is the share of the constraints that may be wrong; the loss then expects them (decision 032). `merge`
    first merges clusters that the pairs join (decision 038). `head_steps` trains the head alone first (decision 034).
    `recipe` is paper, or safe: the start is kept unless held-out pairs favour another model (decision 042).
    """
    task = PairTask("constrained", constraints, recipe, error_rate, pairs_per_step, merge, head_steps)
    return train_pairs(model, images, task, settings, views, context)
