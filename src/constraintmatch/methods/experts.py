"""MiCE: a mixture of contrastive experts, one for each cluster."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.cluster_contrast import Plan, learn, perceptron, place_head
from constraintmatch.methods.preparation import Context, Trained, ViewChoice, check_least, check_positive, check_shares
from constraintmatch.methods.pretext import Projector, follow
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.loop import TrainSettings
from constraintmatch.training.losses import expert_scores, mean_entropy

MICE_SETTINGS = TrainSettings(lr=1.0, weight_decay=5e-4, schedule="cosine")
KEPT = 0.99  # of the prototypes in a step; published: found anew after each epoch


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

    def score(self, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`expert_scores` (2n, k) of what `forward` gives for both views, and the gate's logits; prototypes move on.

        A prototype goes to the mean of what its expert of the copy sees in the images that are probably its own.
        """
        k, d = self.prototypes.shape
        seen, keys, logits = torch.split(rows.float(), [k * d, k * d, k], dim=1)
        online, target = seen.reshape(-1, k, d), keys.detach().reshape(-1, k, d)
        opened = gate(logits - logits.mean(0))
        scores = expert_scores(opened, online, target, self.prototypes.clone(), temperature)
        with torch.no_grad():
            weight = scores.softmax(-1)
            means = torch.einsum("il,ild->ld", weight, F.normalize(target, dim=-1)) / weight.sum(0)[:, None].clamp(
                min=1e-12
            )
            self.prototypes.lerp_(means, 1 - KEPT)
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
    temperature: float = 1.0,
    entropy_weight: float = 1.0,
    target_momentum: float = 0.999,
    projection: int = 128,
    epochs: int = 1_000,
    images_per_step: int = 256,
    settings: TrainSettings = MICE_SETTINGS,
    views: ViewChoice = ViewChoice(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
) -> Trained:
    """A model with clusters by a mixture of contrastive experts (Tsai et al. 2021).

    A gate, the model's head, says which expert an image belongs to; each expert finds the image's other view among
    those of the batch, as a copy of the network sees them that follows with `target_momentum`. The loss is −log of the
    probability of the right view, over all experts: its gradient is that of an EM step (`expert_scores`). The published
    system keeps 16,384 earlier views to find it among, and names clusters by the posterior, not by the gate. It
    has an `entropy_weight` of 0, and a gate that is not centred over the batch: then one expert has nearly all images
    at first, and in short trainings to the end.
    """
    check_positive(temperature=temperature)
    check_shares(target_momentum=target_momentum)
    check_least("mice", projection=(projection, 2))  # of one number only the sign is left
    plan = Plan(images, epochs, images_per_step, settings, views, context)
    trained = place_head("mice", model, n_clusters, plan)
    experts = Experts(trained, projection, target_momentum, derive_seed(settings.seed, "projection"))

    def terms(first: Tensor, second: Tensor) -> dict[str, Tensor]:
        scores, opened = experts.score(torch.cat((first, second)), temperature)
        spread = entropy_weight * mean_entropy(opened.softmax(-1))
        return {"evidence": -scores.logsumexp(-1).mean(), "spread": -spread}

    return learn("mice", experts, trained, plan, terms, before=experts.move_on)
