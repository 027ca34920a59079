"""What the other systems share: inputs of one scale, small networks, batches of pairs, clusters around centres."""

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.evaluation.neighbours import nearest_blocks, unit_rows

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Predict = Callable[[Floats], Floats]  # the probabilities of the clusters (n, k) of features (n, d)

STEPS, RATE, BATCH = 1_000, 1e-3, 128
NEAR = 15  # neighbours that place a new row
WIDTH, EMBEDDING = 256, 16  # inside a network, and of an embedding; the papers' 500-500-2000-10 is for pixels


class Setup:
    """What a system gets: features as inputs of mean 0 and mean variance 1, pairs, K, a seed, and perhaps labels.

    Labels (n,) are −1 where they are not known. What a system draws, it draws from here.
    """

    def __init__(
        self, features: Floats, constraints: Constraints, n_clusters: int, *, seed: int = 0, labels: Rows | None = None
    ) -> None:
        self.mean = torch.from_numpy(features.mean(0, dtype=np.float64).astype(np.float32))
        self.size = max(float(np.sqrt(features.var(0, dtype=np.float64).mean())), 1e-12)
        self.inputs, self.n_clusters, self.seed, self.labels = self.scale(features), n_clusters, seed, labels
        self.draw = torch.Generator().manual_seed(seed)
        self.use_pairs(constraints)

    def use_pairs(self, constraints: Constraints) -> None:
        self.constraints = constraints
        columns = (constraints.left, constraints.right, constraints.link, constraints.weight)
        self.left, self.right, self.link, self.weight = (torch.from_numpy(column.copy()) for column in columns)

    def scale(self, features: Floats) -> Tensor:
        return (torch.from_numpy(np.array(features, np.float32)) - self.mean) / self.size

    def network(self, *widths: int) -> nn.Sequential:
        """Linear layers of these widths after the inputs', with ReLU between them."""
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator
            torch.default_generator.manual_seed(int(torch.randint(2**31, (), generator=self.draw)))
            for one, other in pairwise((self.inputs.shape[1], *widths)):
                layers += [nn.Linear(one, other), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def autoencoder(self) -> tuple[nn.Sequential, nn.Sequential]:
        """An encoder and a decoder that are trained to repeat the inputs."""
        whole = self.network(WIDTH, EMBEDDING, WIDTH, self.inputs.shape[1])
        encoder, decoder = whole[:3], nn.Sequential(*whole[4:])  # no ReLU on the embedding

        def loss() -> Tensor:
            some = self.some_inputs()
            return F.mse_loss(decoder(encoder(some)), some)

        self.descend([*encoder.parameters(), *decoder.parameters()], loss)
        return encoder, decoder

    def some_rows(self, n: int = BATCH) -> Tensor:
        return torch.randint(len(self.inputs), (n,), generator=self.draw)

    def some_inputs(self, n: int = BATCH) -> Tensor:
        return self.inputs[self.some_rows(n)]

    def some_pairs(self, n: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of both ends of n pairs, which their weights draw, and their links."""
        at = torch.multinomial(self.weight, n, replacement=True, generator=self.draw)
        return self.left[at], self.right[at], self.link[at]

    def descend(self, parameters: Iterable[Tensor], loss: Callable[[], Tensor]) -> None:
        """Adam with a rate that falls to zero."""
        optimizer = torch.optim.Adam(list(parameters), lr=RATE)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
            optimizer.zero_grad()
            loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def by(self, place: Callable[[Tensor], Tensor]) -> Predict:
        """What places inputs, as a function of features."""

        def predict(features: Floats) -> Floats:
            with torch.no_grad():
                return np.asarray(place(self.scale(features)).float().numpy())

        return predict


def k_means(points: Tensor, n_clusters: int, seed: int, begin: Floats | None = None) -> Tensor:
    """The centres (k, d) of the points, from these or the best of a few beginnings."""
    from sklearn.cluster import KMeans

    how = {"n_init": 5} if begin is None else {"n_init": 1, "init": begin}
    found = KMeans(n_clusters, random_state=seed % 2**32, **how).fit(points.detach().numpy())
    return torch.from_numpy(found.cluster_centers_).float()


def squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    """Of n points to k centres: (n, k)."""
    return (points[:, None] - centres[None]).square().sum(-1)


def place_around(points: Tensor, centres: Tensor) -> Tensor:
    """Probabilities (n, k) that fall with the squared distance; its unit is the mean distance to the nearest centre."""
    far = torch.cat([squared_distances(block, centres) for block in torch.split(points, 4096)])
    return (-far / far.min(1).values.mean().clamp(min=1e-12)).softmax(-1)


def place_by_neighbours(setup: Setup, clusters: Rows) -> Predict:
    """Rows go with the clusters (n,) of their nearest training rows, by cosine; a training row is its own nearest."""
    known, votes = unit_rows(setup.inputs.numpy()), np.eye(setup.n_clusters, dtype=np.float32)[clusters]

    def predict(features: Floats) -> Floats:
        found = []
        for cosine, at in nearest_blocks(unit_rows(setup.scale(features).numpy()), known, NEAR):
            itself = (cosine[:, :1] > 1 - 1e-5).float().numpy()
            found.append((votes[at.numpy()].mean(1) + itself * votes[at[:, 0].numpy()]) / (1 + itself))
        return np.concatenate(found)

    return predict
