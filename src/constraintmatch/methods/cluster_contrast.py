"""Clusters and features learned at once, from two views of each image: CC, PICA, TCC and MiCE.

Their cluster heads are linear, on the features: a model has no other. The published ones of CC and TCC are not.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.preparation import Context, Trained, ViewChoice, check_clusters, evaluate_now, prepare
from constraintmatch.methods.pretext import PROJECTION, Projector, check_batches, follow
from constraintmatch.models.cluster_model import ClusterModel, with_clusters
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.loop import TrainSettings, fit
from constraintmatch.training.losses import (
    cluster_contrast,
    expert_scores,
    mean_entropy,
    nt_xent,
    partition_loss,
    set_contrast,
)
from constraintmatch.training.ranks import gather, mine

CC_SETTINGS = TrainSettings(optimizer="adam", lr=3e-4, weight_decay=0.0, schedule="constant")  # and of TCC
PICA_SETTINGS = TrainSettings(optimizer="adam", lr=1e-4, weight_decay=0.0, schedule="constant")
MICE_SETTINGS = TrainSettings(lr=1.0, weight_decay=5e-4, schedule="cosine")
TEMPERATURE = 0.5  # of the contrast between images in CC and TCC; between clusters it is 1, and in MiCE
MOMENTUM = 0.999  # of the copy of the network that MiCE's experts find views in
KEPT = 0.99  # of MiCE's prototypes in a step; published: found anew after each epoch
SOFTNESS = 0.8  # of TCC's draws of a cluster
TINY = 1e-30  # a draw of 0 has no logarithm
# two views of the same images (n, c, h, w) uint8, and Gumbel's noise (2n, k) for both where clusters are drawn
TwinBatch = tuple[Tensor, Tensor, Tensor | None]
Terms = Callable[[Tensor, Tensor], dict[str, Tensor]]  # of what the module makes of the first and second views


class Plan(NamedTuple):
    """What a system trains on, how long, and around what."""

    images: ImageSet
    epochs: int
    images_per_step: int
    settings: TrainSettings
    views: ViewChoice
    context: Context


class Twin(nn.Module):
    """Projections (n, d) and cluster logits (n, k) of images, side by side: (n, d + k).

    With `noise` (n, k) there are also the projections moved by what the module has learned of a cluster, which is drawn
    for each image: (n, 2d + k).
    """

    def __init__(self, model: ClusterModel, projection: int, seed: int, *, drawn: bool = False) -> None:
        super().__init__()
        self.model = model
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator; no other draw may change
            torch.default_generator.manual_seed(seed)
            self.projector = perceptron(model.width, projection)
            self.kinds = nn.Linear(model.config.n_clusters, projection, bias=False) if drawn else None

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        features = self.model.features(images)
        projections, logits = self.projector(features), self.model.classify(features)
        if self.kinds is None or noise is None:
            return torch.cat((projections, logits), 1)
        drawn = ((logits.float().log_softmax(-1) + noise) / SOFTNESS).softmax(-1)
        return torch.cat((projections, projections + self.kinds(drawn), logits), 1)


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """Two layers without BatchNorm."""
    return nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, outputs))


def cc(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    epochs: int = 1_000,
    images_per_step: int = 256,
    settings: TrainSettings = CC_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model with clusters by contrastive clustering (Li et al. 2021): of images, and of clusters in a batch.

    SimCLR's loss tells images apart by their projections, and clusters by their columns of probabilities over the
    batch (`cluster_contrast`). The steps follow from `epochs`.
    """
    plan = Plan(images, epochs, images_per_step, settings, views, context)
    trained = place_head("cc", model, n_clusters, plan)

    def terms(first: Tensor, second: Tensor) -> dict[str, Tensor]:
        (z1, p1), (z2, p2) = (_split(side, PROJECTION, n_clusters) for side in (first, second))
        return {"contrast": nt_xent(z1, z2, temperature=TEMPERATURE), "clusters": cluster_contrast(p1, p2)}

    module = Twin(trained, PROJECTION, derive_seed(settings.seed, "projection"))
    return learn("cc", module, trained, plan, terms)


def pica(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    epochs: int = 200,
    images_per_step: int = 256,
    settings: TrainSettings = PICA_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model with the clusters that are surest as a partition (Huang et al. 2020); see `partition_loss`."""
    plan = Plan(images, epochs, images_per_step, settings, views, context)
    trained = place_head("pica", model, n_clusters, plan)

    def terms(first: Tensor, second: Tensor) -> dict[str, Tensor]:
        sides = (side.float().softmax(-1) for side in (first, second))
        return {"partition": partition_loss(*sides)}

    return learn("pica", trained, trained, plan, terms)


def tcc(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    epochs: int = 1_000,
    images_per_step: int = 256,
    settings: TrainSettings = CC_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model with clusters by twin contrast (Shen et al. 2021): of images that know their cluster, and of clusters.

    A cluster is the set of its images, so its place is the mean of their projections (`set_contrast`). An image's
    projection is moved by a vector of its cluster, which is drawn anew in each step (Gumbel's softmax). Others of the
    batch are what each is compared with; the published system keeps earlier ones too.
    """
    plan = Plan(images, epochs, images_per_step, settings, views, context)
    trained = place_head("tcc", model, n_clusters, plan)

    def terms(first: Tensor, second: Tensor) -> dict[str, Tensor]:
        (z1, e1, p1), (z2, e2, p2) = (_split(side, PROJECTION, PROJECTION, n_clusters) for side in (first, second))
        sets = set_contrast((p1, z1), (p2, z2), temperature=1.0)
        return {"contrast": nt_xent(e1, e2, temperature=TEMPERATURE), "sets": sets}

    module = Twin(trained, PROJECTION, derive_seed(settings.seed, "projection"), drawn=True)
    return learn("tcc", module, trained, plan, terms, noise=n_clusters)


class Experts(nn.Module):
    """What the experts of a network and of a copy that follows it see in images, and the network's cluster logits."""

    prototypes: Tensor
    middle: Tensor
    share: Tensor

    def __init__(self, model: ClusterModel, projection: int, target_momentum: float, seed: int) -> None:
        super().__init__()
        k = model.config.n_clusters
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator; no other draw may change
            torch.default_generator.manual_seed(seed)
            self.online = Projector(model, perceptron(model.width, k * projection))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("prototypes", torch.zeros(k, projection))
        self.register_buffer("middle", torch.zeros(k))
        self.register_buffer("share", torch.tensor(1 - target_momentum), persistent=False)

    @torch.no_grad()
    def move_on(self) -> None:
        """Let the copy follow, and the head keep its mean logits at 0, as the gate has them."""
        follow(self.target, self.online, self.share)
        assert self.online.model.head is not None
        self.online.model.head.bias.sub_(self.middle)

    def forward(self, images: Tensor) -> Tensor:
        """(n, k d) of the network, (n, k d) of the copy, without a graph, and (n, k) logits, side by side."""
        features = self.online.model.features(images)
        assert self.online.projector is not None
        seen, logits = self.online.projector(features), self.online.model.classify(features)
        with torch.no_grad():
            keys = self.target(images)
        return torch.cat((seen, keys, logits), 1)

    def score(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`expert_scores` (2n, k) of what `forward` gives for both views, and the gate's logits; prototypes move on.

        A prototype goes to the mean of what its expert of the copy sees in the images that are probably its own.
        """
        k, d = self.prototypes.shape
        seen, keys, logits = torch.split(rows.float(), [k * d, k * d, k], dim=1)
        online, target = seen.reshape(-1, k, d), keys.detach().reshape(-1, k, d)
        opened = gate(logits - logits.mean(0))
        scores = expert_scores(opened, online, target, self.prototypes.clone(), 1.0)
        with torch.no_grad():
            weight = scores.softmax(-1)
            sums = torch.einsum("il,ild->ld", weight, F.normalize(target, dim=-1))
            self.prototypes.lerp_(sums / weight.sum(0)[:, None].clamp(min=1e-12), 1 - KEPT)
            self.middle.copy_(logits.mean(0))
        return scores, opened


def gate(logits: Tensor) -> Tensor:
    """The cosines (n, k) of centred logits with the corners of a regular simplex.

    These corners are the published gate's fixed prototypes, as far from each other as k points on a sphere can be. The
    largest cosine is that of the largest logit, so a linear head has the gate's clusters.
    """
    k = logits.shape[-1]
    return math.sqrt(k / (k - 1)) * F.normalize(logits - logits.mean(-1, keepdim=True), dim=-1)


def mice(
    model: ClusterModel,
    images: ImageSet,
    *,
    n_clusters: int,
    epochs: int = 1_000,
    images_per_step: int = 256,
    settings: TrainSettings = MICE_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model with clusters by a mixture of contrastive experts (Tsai et al. 2021).

    A gate, the model's head, says which expert an image belongs to; each expert finds the image's other view among
    those of the batch, as a copy of the network sees them that follows it. The loss is −log of the
    probability of the right view, over all experts: its gradient is that of an EM step (`expert_scores`). The published
    system keeps 16,384 earlier views to find it among, and names clusters by the posterior, not by the gate. It
    has no term that spreads images over clusters, and a gate that is not centred over the batch: then one expert has
    nearly all images at first, and in short trainings to the end.
    """
    plan = Plan(images, epochs, images_per_step, settings, views, context)
    trained = place_head("mice", model, n_clusters, plan)
    experts = Experts(trained, PROJECTION, MOMENTUM, derive_seed(settings.seed, "projection"))

    def terms(first: Tensor, second: Tensor) -> dict[str, Tensor]:
        scores, opened = experts.score(torch.cat((first, second)))
        return {"evidence": -scores.logsumexp(-1).mean(), "spread": -mean_entropy(opened.softmax(-1))}

    return learn("mice", experts, trained, plan, terms, before=experts.move_on)


def place_head(title: str, model: ClusterModel, n_clusters: int, plan: Plan) -> ClusterModel:
    """The model's backbone under a fresh cluster head; an InputError where a system cannot begin."""
    check_clusters(n_clusters, plan.images)
    check_batches(title, plan.images, plan.epochs, plan.images_per_step)
    return with_clusters(model, n_clusters, seed=derive_seed(plan.settings.seed, "head"))


def learn(
    title: str,
    module: nn.Module,
    trained: ClusterModel,
    plan: Plan,
    terms: Terms,
    *,
    noise: int = 0,
    before: Callable[[], None] = lambda: None,
) -> Trained:
    """The model after a training of the module around it; `before` is part of each step.

    With a `noise` the module also gets this many of Gumbel's numbers for each view.
    """
    images, context = plan.images, plan.context
    bench = prepare(trained, images, plan.settings, epochs=(plan.epochs, plan.images_per_step))
    rows, settings = bench.draw_epochs(plan.settings, plan.epochs, plan.images_per_step)
    view, draw, n = plan.views.contrastive(images), torch.Generator(bench.device), rows.batch

    def next_batch(step: int) -> TwinBatch:
        first, second = bench.two_views(view, rows(step), step)
        if not noise:
            return first, second, None
        draw.manual_seed(derive_seed(bench.seed, "noise", step))
        waits = torch.empty(2 * n, noise, device=bench.device).exponential_(generator=draw)
        return first, second, mine(-waits.clamp(min=TINY).log(), n, n)

    def loss(network: Callable[..., Tensor], batch: TwinBatch) -> dict[str, Tensor]:
        before()
        *views, drawn = batch
        both = network(torch.cat(views)) if drawn is None else network(torch.cat(views), drawn)
        first, second = gather(both, n, n).chunk(2)
        return terms(first, second)

    around = bench.surroundings(title, context, evaluate=partial(evaluate_now, trained, images, context))
    return Trained(trained, fit(module, next_batch, loss, settings, around))


def _split(rows: Tensor, *widths: int) -> list[Tensor]:
    """The parts of these widths, the last one as probabilities."""
    *parts, logits = torch.split(rows.float(), list(widths), dim=1)
    return [*parts, logits.softmax(-1)]
