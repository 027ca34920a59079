"""What triplets, labels and sizes bring beside pairs, on embeddings, by the safe recipe.

    constraintmatch embed weights/scan-cifar10 cifar10 --data-dir data --out train.npz
    constraintmatch embed weights/scan-cifar10 cifar10 --split test --data-dir data --out test.npz
    python benchmarks/knowledge.py train.npz test.npz --clusters 10 --name cifar10 --samples 3 --out results

A seed draws the pairs, the triplets and the labels. Of `triplets` one other image is of the anchor's kind. Those of
`any triplets` are three images at random: where both others are of its kind, or none, the answer is the image whose
embedding is nearer. `uneven` is a set of which half of the kinds have a third of their images, with sizes as they are.
Scores are on the images of the second file, thinned in the same way.
"""

import copy
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from compare import linear_start
from embedded import parser_of

from constraintmatch._internal.files import read_json
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import Triplets, label_pairs
from constraintmatch.constraints.pair_cells import Places
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.evaluation.metrics import predict, scores
from constraintmatch.methods.heads import bound_sizes
from constraintmatch.methods.preparation import spread
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.pipeline.config import default_options, make_config
from constraintmatch.pipeline.train import train
from constraintmatch.training.run_folder import write_result

PAIRS, TRIPLETS, LABELS = 1_000, 1_000, 200


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
    for part, of_part, scored in (("", images, test), ("uneven, ", thin(images), thin(test))):
        start = linear_start(of_part, asked.clusters)
        for name, seed, constraints in cells(part, of_part, asked.samples):
            if (name, seed) in done:
                continue
            model, kept = taught(start, of_part, constraints, seed)
            told = {key: round(value, 4) for key, value in scores(scored.labels, predict(model, scored)).items()}
            rows.append({"knowledge": name, "seed": seed, **told, "kept": kept})
            print(rows[-1], flush=True)
            sizes = {"pairs": PAIRS, "triplets": TRIPLETS, "labels": LABELS}
            write_result(file, {"data": asked.name, "images": len(images), **sizes, "rows": rows})
    for name in dict.fromkeys(row["knowledge"] for row in rows):
        own = [[row[key] for row in rows if row["knowledge"] == name] for key in ("acc", "nmi")]
        print(f"{name:<40}" + "".join(f"{100 * statistics.mean(values):>7.1f}" for values in own))


def cells(part: str, images: ImageSet, samples: int) -> Iterator[tuple[str, int, Constraints | None]]:
    """What is known in each cell, by name and seed; a start without anything comes first."""
    y = np.asarray(images.labels)
    shares = np.sort(np.bincount(y) / len(y))[:, None].astype(np.float32)
    sizes = np.concatenate([shares, shares], axis=1)
    nothing = Constraints.from_lists(n_images=len(y))
    yield f"{part}start", 0, None
    yield f"{part}sizes", 0, replace(nothing, sizes=sizes)
    for seed in range(samples):
        pairs = Constraints.sample(y, PAIRS, seed=seed)
        yield f"{part}pairs", seed, pairs
        yield f"{part}pairs and sizes", seed, replace(pairs, sizes=sizes)
        if part:
            continue
        triplets = {name: draw_triplets(images, seed, mixed=bool(name)) for name in ("", "any ")}
        labels = draw_labels(y, seed)
        for name, drawn in triplets.items():
            yield f"{name}triplets", seed, replace(nothing, triplets=drawn)
            yield f"pairs and {name}triplets", seed, replace(pairs, triplets=drawn)
        yield "labels", seed, labels
        yield "pairs and labels", seed, Constraints.join([pairs, labels])
        soft = np.where(pairs.link == 1, np.float32(0.8), np.float32(0.05))
        yield "pairs of soft links 0.8 and 0.05", seed, replace(pairs, link=soft)


def thin(images: ImageSet) -> ImageSet:
    """The images without two thirds of those of every second kind."""
    y = np.asarray(images.labels)
    drop = np.zeros(len(y), bool)
    for kind in range(0, y.max() + 1, 2):
        rows = np.flatnonzero(y == kind)
        drop[rows[len(rows) // 3 :]] = True
    return images.take(np.flatnonzero(~drop))


def draw_triplets(images: ImageSet, seed: int, *, mixed: bool) -> Triplets:
    y, draw = np.asarray(images.labels), np.random.default_rng(seed)
    rows = draw.integers(0, len(y), (60 * TRIPLETS, 3))
    rows = rows[(rows[:, 0] != rows[:, 1]) & (rows[:, 0] != rows[:, 2]) & (rows[:, 1] != rows[:, 2])]
    same = y[rows[:, :1]] == y[rows[:, 1:]]
    if not mixed:
        rows, same = (part[same[:, 0] != same[:, 1]] for part in (rows, same))
    rows, same = rows[:TRIPLETS], same[:TRIPLETS]
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
) -> tuple[ClusterModel, str]:
    model = copy.deepcopy(start)
    if constraints is None:
        return model, "the start"
    if not len(constraints) and not len(constraints.triplets):
        assert constraints.sizes is not None
        return bound_sizes(model, images, constraints.sizes), "the start"
    options = default_options("constraintmatch", len(images), cpu=True) | {"device": "cpu", "seed": seed}
    model, log = train(images, constraints, make_config("constraintmatch", options, start=model))
    return model, log[-1]["kept"]


if __name__ == "__main__":
    main()
