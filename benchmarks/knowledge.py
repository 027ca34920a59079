"""What triplets, labels and sizes bring beside pairs, on embeddings, by the safe recipe.

    constraintmatch embed weights/scan-cifar10 cifar10 --data-dir data --out train.npz
    constraintmatch embed weights/scan-cifar10 cifar10 --split test --data-dir data --out test.npz
    python benchmarks/knowledge.py train.npz test.npz --clusters 10 --name cifar10 --samples 3 --out results

A seed draws the pairs, the triplets and the labels. Of a triplet one other image is of the anchor's kind. Those
"of any images" are three at random: where both others are of its kind, or none, the answer is the one whose embedding
is nearer. "uneven" is a set of which half of the kinds have a third of their images. Sizes are those of the kinds, with
some slack. Scores are on the images of the second file, thinned in the same way. `forms` in the result compares ways to
learn from triplets: a linear head, without a judge.
"""

import copy
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from compare import linear_start
from embedded import parser_of
from torch import Tensor

from constraintmatch._internal.files import read_json
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import Triplets, label_pairs
from constraintmatch.constraints.pair_cells import Places
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.evaluation.metrics import accuracy, predict, scores
from constraintmatch.methods.heads import bound_sizes
from constraintmatch.methods.others.networks import triplet_loss as hinge_loss
from constraintmatch.methods.preparation import spread
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.pipeline.config import default_options, make_config
from constraintmatch.pipeline.train import train
from constraintmatch.training.losses import pair_loss, pair_scores, soft_cross_entropy, triplet_loss
from constraintmatch.training.run_folder import write_result

PAIRS, TRIPLETS, LABELS = 1_000, 1_000, 200
Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # the loss of the probabilities of anchors, near and far images


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--rows", type=int, default=12_000, help="take this number of the images")
    asked = parser.parse_args()
    images, test = (load_images(path) for path in (asked.train, asked.test))
    images = images.take(spread(len(images), asked.rows))
    file = asked.out / f"knowledge-{asked.name}.json"
    rows: list[dict[str, Any]] = read_json(file)["rows"] if file.is_file() else []
    done = {(row["knowledge"], row["seed"]) for row in rows}
    facts = {"data": asked.name, "images": len(images), "pairs": PAIRS, "labels": LABELS}
    for part, of_part, scored in (("", images, test), ("uneven, ", thin(images), thin(test))):
        start = linear_start(of_part, asked.clusters)
        for name, seed, constraints in cells(part, of_part, asked.samples):
            if (name, seed) in done:
                continue
            model, kept, why = taught(start, of_part, constraints, seed)
            told = {key: round(value, 4) for key, value in scores(scored.labels, predict(model, scored)).items()}
            rows.append({"knowledge": name, "seed": seed, **told, "kept": kept, "why": why})
            print(rows[-1], flush=True)
            write_result(file, {**facts, "rows": rows})
        if not part:
            forms = compare_forms(start, images, test, asked.samples)
    write_result(file, {**facts, "rows": rows, "forms": forms})
    print(forms)
    for name in dict.fromkeys(row["knowledge"] for row in rows):
        own = [[row[key] for row in rows if row["knowledge"] == name] for key in ("acc", "nmi")]
        print(f"{name:<40}" + "".join(f"{100 * statistics.mean(values):>7.1f}" for values in own))


def cells(part: str, images: ImageSet, samples: int) -> Iterator[tuple[str, int, Constraints | None]]:
    """What is known in each cell, by name and seed; the start alone comes first."""
    y = np.asarray(images.labels)
    nothing = Constraints.from_lists(n_images=len(y))
    yield f"{part}start", 0, None
    for slack in (0.0, 0.1, 0.25):
        shares = (np.bincount(y) / len(y))[:, None] * [[1 - slack, 1 + slack]]
        yield f"{part}sizes ± {slack:.0%}", 0, replace(nothing, sizes=shares.astype(np.float32))
    for seed in range(0 if part else samples):
        pairs, labels = Constraints.sample(y, PAIRS, seed=seed), draw_labels(y, seed)
        yield "pairs", seed, pairs
        yield "labels", seed, labels
        yield "pairs and labels", seed, Constraints.join([pairs, labels])
        for n, mixed in ((TRIPLETS, False), (3 * TRIPLETS, False), (TRIPLETS, True)):
            name = f"{n:,} triplets" + (" of any images" if mixed else "")
            yield f"pairs and {name}", seed, replace(pairs, triplets=draw_triplets(images, n, seed, mixed=mixed))


def thin(images: ImageSet) -> ImageSet:
    """The images without two thirds of those of every second kind."""
    y = np.asarray(images.labels)
    drop = np.zeros(len(y), bool)
    for kind in range(0, y.max() + 1, 2):
        rows = np.flatnonzero(y == kind)
        drop[rows[len(rows) // 3 :]] = True
    return images.take(np.flatnonzero(~drop))


def draw_triplets(images: ImageSet, n: int, seed: int, *, mixed: bool) -> Triplets:
    y, draw = np.asarray(images.labels), np.random.default_rng(seed)
    rows = draw.integers(0, len(y), (60 * n, 3))
    rows = rows[(rows[:, 0] != rows[:, 1]) & (rows[:, 0] != rows[:, 2]) & (rows[:, 1] != rows[:, 2])]
    same = y[rows[:, :1]] == y[rows[:, 1:]]
    if not mixed:
        rows, same = (part[same[:, 0] != same[:, 1]] for part in (rows, same))
    rows, same = rows[:n], same[:n]
    unit = images.images[:, 0, 0] / np.linalg.norm(images.images[:, 0, 0], axis=1, keepdims=True)
    alike = np.stack([(unit[rows[:, 0]] * unit[rows[:, at]]).sum(1) for at in (1, 2)], axis=1)
    second = (same + 1e-3 * alike).argmax(1) == 1
    rows[second] = rows[second][:, [0, 2, 1]]
    return Triplets(rows, np.ones(len(rows), np.float32), Places(np.arange(len(rows))))


def draw_labels(y: np.ndarray, seed: int) -> Constraints:
    known = np.random.default_rng(seed).choice(len(y), LABELS, replace=False)
    left, right, link = label_pairs(np.unique(y[known], return_inverse=True)[1])
    return Constraints.from_arrays(known[left], known[right], link, n_images=len(y))


def taught(
    start: ClusterModel, images: ImageSet, constraints: Constraints | None, seed: int
) -> tuple[ClusterModel, str, str]:
    model = copy.deepcopy(start)
    if constraints is None:
        return model, "the start", ""
    if not len(constraints) and not len(constraints.triplets):
        assert constraints.sizes is not None
        return bound_sizes(model, images, constraints.sizes), "the start", ""
    options = default_options("constraintmatch", len(images), cpu=True) | {"device": "cpu", "seed": seed}
    model, log = train(images, constraints, make_config("constraintmatch", options, start=model))
    return model, log[-1]["kept"], log[-1]["why"]


def compare_forms(start: ClusterModel, images: ImageSet, test: ImageSet, samples: int) -> list[dict[str, Any]]:
    """ACC of a linear head that begins as the start and learns from triplets only, held to the start's predictions."""
    rows = []
    for mixed, form, seed in itertools.product((False, True), FORMS, range(samples)):
        drawn = torch.from_numpy(draw_triplets(images, TRIPLETS, seed, mixed=mixed).rows)
        acc = round(accuracy(np.asarray(test.labels), by_form(start, images, test, drawn, FORMS[form])), 4)
        rows.append({"form": form, "any_images": mixed, "seed": seed, "acc": acc})
        print(rows[-1], flush=True)
    return rows


def by_form(start: ClusterModel, images: ImageSet, test: ImageSet, triplets: Tensor, loss: Form) -> np.ndarray:
    inputs, tested = (torch.from_numpy(np.array(each.images[:, 0, 0], np.float32)) for each in (images, test))
    mean, scale = inputs.mean(0), inputs.std()
    inputs, tested = (inputs - mean) / scale, (tested - mean) / scale
    beliefs = torch.from_numpy(predict(start, images).probabilities)
    head, draw = torch.nn.Linear(inputs.shape[1], beliefs.shape[1]), torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for step in range(400):
        some = torch.randint(len(inputs), (1_000,), generator=draw)
        total = (1.0 if step < 100 else 0.1) * soft_cross_entropy(head(inputs[some]), beliefs[some])
        if step >= 100:
            optimizer.param_groups[0]["lr"] = 0.003
            anchor, near, far = head(inputs[triplets.mT.reshape(-1)]).softmax(-1).chunk(3)
            total = total + loss(anchor, near, far)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    with torch.no_grad():
        return head(tested).argmax(1).numpy()


def as_pairs(together: float, apart: float) -> Form:
    """Triplets as two pairs with these links."""

    def loss(anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        links = torch.tensor([together, apart]).repeat_interleave(len(anchor))
        return pair_loss(torch.cat((anchor, anchor)), torch.cat((near, far)), links, error_rate=0.02)

    return loss


def by_ratio(anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
    one, other = pair_scores(anchor, near) + 0.02, pair_scores(anchor, far) + 0.02
    return -(one / (one + other)).log().mean()


FORMS: dict[str, Form] = {
    "likelihood": lambda a, n, f: triplet_loss(pair_scores(a, n), pair_scores(a, f), error_rate=0.05),
    "ratio": by_ratio,
    "hinge": hinge_loss,
    "must-link and cannot-link": as_pairs(1.0, 0.0),
    "soft links": as_pairs(0.19, 0.01),  # what a triplet of any three images says, of ten kinds
}


if __name__ == "__main__":
    main()
