"""The methods of the paper: ConstraintMatch, its two competitors, and two bounds that learn from all labels."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.pair_training import PairTask, check_error_rate, choose_selection
from constraintmatch.methods.preparation import Context, Trained, ViewChoice, check_range, evaluate_now, prepare
from constraintmatch.methods.safe_recipe import train_pairs
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import all_pairs_loss, hard_links, pseudo_label_loss, soft_links
from constraintmatch.training.ranks import gather, mine

Network = Callable[..., Tensor]
Labelled = tuple[Tensor, Tensor]  # weak views and their labels


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
    pairs = (constraints, recipe, error_rate, pairs_per_step, merge, head_steps)
    term = (pseudo_weight, warm_up, flip_fraction, flip_between, images_per_step)
    select = choose_selection("confidence", 1.0, min_confidence)
    task = PairTask("pseudo_label", *pairs, pseudo_label_loss, select, soft_links, *term)
    return train_pairs(model, images, task, settings, views, context)


def constraintmatch(
    model: ClusterModel,
    images: ImageSet,
    constraints: Constraints,
    *,
    pseudo_weight: float = 1.0,
    selection: str = "entropy",
    max_entropy: float = 0.2,
    min_confidence: float = 0.95,
    links: str = "soft",
    hard_threshold: float = 0.5,
    warm_up: float = 0.0,
    flip_fraction: float = 0.0,
    flip_between: str = "largest",
    error_rate: float = 0.0,
    pseudo_error_rate: float | None = None,
    merge: bool = False,
    head_steps: int = 0,
    recipe: str = "paper",
    pairs_per_step: int = 200,
    images_per_step: int = 600,
    settings: TrainSettings = TrainSettings(),  # noqa: B008 (frozen)
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """The model trained with L = L^cons + λ L^pseudo.

    λ is `pseudo_weight`. `selection` is by entropy under τ = `max_entropy` (the paper's) or by confidence from
    `min_confidence`. `links` are soft, 1 − JSD, or hard: 1 from μ = `hard_threshold` on. λ rises from zero over the
    share `warm_up` of the steps (the paper has none): pairs first, where the start is weak. ρ = `flip_fraction` of the
    guesses have two clusters swapped: `flip_between` the two largest, as in the paper, or any two, as in its published
    code. `pseudo_error_rate` is the share of the pseudo-constraints that may be wrong (None: as `error_rate`).
    `error_rate`, `merge`, `head_steps` and `recipe`: see `constrained`.
    """
    expected = error_rate if pseudo_error_rate is None else pseudo_error_rate
    check_error_rate("error_rate" if pseudo_error_rate is None else "pseudo_error_rate", expected)
    if links not in ("soft", "hard"):
        raise InputError(f"unknown links {links!r}; known are soft, hard")
    check_range("in [0, 1]", hard_threshold=hard_threshold)

    def pseudo_links(guess: Tensor, others: Tensor | None = None) -> Tensor:
        soft = soft_links(guess, others)
        return soft if links == "soft" else hard_links(soft, hard_threshold)

    def loss(logits: Tensor, guess: Tensor, keep: Tensor) -> Tensor:
        return all_pairs_loss(logits.float().softmax(-1), pseudo_links(mine(guess), guess), keep, error_rate=expected)

    pairs = (constraints, recipe, error_rate, pairs_per_step, merge, head_steps)
    term = (pseudo_weight, warm_up, flip_fraction, flip_between, images_per_step)
    select = choose_selection(selection, max_entropy, min_confidence)
    task = PairTask("constraintmatch", *pairs, loss, select, pseudo_links, *term)
    return train_pairs(model, images, task, settings, views, context)


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

    def loss(network: Network, batch: Labelled) -> dict[str, Tensor]:
        images, label = batch
        p = gather(network(images), len(label)).float().softmax(-1)
        links = (mine(label)[:, None] == label[None, :]).float()
        everything = torch.ones_like(label, dtype=torch.bool)
        return {"constrained": all_pairs_loss(p, links, everything, self_pairs=False)}

    return _learn_labels("fully_constrained", loss, model, images, images_per_step, settings, views, context)


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

    def loss(network: Network, batch: Labelled) -> dict[str, Tensor]:
        images, label = batch
        return {"supervised": F.cross_entropy(gather(network(images), len(label)).float(), label)}

    if images.labels is not None and int(images.labels.max()) >= model.config.n_clusters:
        raise InputError(f"supervised: {int(images.labels.max()) + 1} classes for {model.config.n_clusters} outputs")
    return _learn_labels("supervised", loss, model, images, images_per_step, settings, views, context)


def _learn_labels(
    title: str,
    loss: Callable[[Network, Labelled], dict[str, Tensor]],
    model: ClusterModel,
    images: ImageSet,
    images_per_step: int,
    settings: TrainSettings,
    views: ViewChoice,
    context: Context,
) -> Trained:
    """The model after a training on weak views of any images with their labels."""
    if images.labels is None:
        raise InputError(f"{title} needs the label of every image and the set has none; use class folders")
    bench = prepare(model, images, settings)
    rows = bench.draw_rows(images_per_step)
    labels, view = torch.from_numpy(images.labels.copy()).to(bench.device), views.pair(images)

    def next_batch(step: int) -> Labelled:
        chosen = rows(step)
        return bench.maker(view, bench.store.take(mine(chosen)), step, "images", len(chosen)), labels[chosen]

    around = bench.surroundings(title, context, evaluate=partial(evaluate_now, model, images, context))
    return Trained(model, fit(model, next_batch, loss, settings, around))
