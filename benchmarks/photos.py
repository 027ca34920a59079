"""What a pretrained encoder is worth on photographs, without a GPU, and where the own start is better.

    python benchmarks/photos.py start PHOTOS --cifar DATA_DIR --out results
    python benchmarks/photos.py answers PHOTOS --cifar DATA_DIR --cobras OTHER/bin/python --out results

PHOTOS has one folder for each class. `start`: accuracy of new images by k-means on the features, by the start that
`train` makes of the encoder, and by its own start, for photographs that are made smaller or grey, CIFAR-10 and digits.
`answers`: the same after answers to chosen questions, which a simulated annotator gives, with a known and an unknown
number of clusters, against other uses of the same answers (PCKMeans), against COBRAS, which asks about pairs of its own
choice, as many as there are answers or five times as many (an answer to "which of these?" is about five pairs), and
against as many labels (logistic regression, label spreading), all on the same features; means over --seeds.
`cobras_ts` 0.1.3 needs NumPy 1.23, so --cobras names a Python that has both and scikit-learn. It clusters the images
that it asks about and finds the number of clusters itself; others join the clusters of their ten nearest neighbours.
"""

import argparse
import copy
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.semi_supervised import LabelSpreading

from constraintmatch.annotate.background_training import round_start
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import load_dataset
from constraintmatch.data.decoding import fit_squares
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.evaluation.metrics import accuracy, predict
from constraintmatch.methods import Context
from constraintmatch.methods.propagate import Frozen
from constraintmatch.models.backbones import ENCODER, made_for_side
from constraintmatch.models.cluster_model import ClusterModel, build_model
from constraintmatch.pipeline.config import SHORT_STAGES, make_config, round_size, short_start
from constraintmatch.pipeline.embedding import DEFAULT, encode
from constraintmatch.pipeline.train import pretrain, train
from constraintmatch.questions.answers import Answer, constraints_of
from constraintmatch.questions.rounds import Asking, LabelOracle, closure_pairs, head_belief, simulate
from constraintmatch.training.run_folder import write_result

Split = tuple[ImageSet, ImageSet]  # to learn from, and others for scores
N_TRAIN, N_TEST = 500, 500
BUDGETS = (25, 50, 100, 200)
CPU: dict[str, Any] = {"device": "cpu", "seed": 0}


def resized(images: ImageSet, side: int, channels: int) -> ImageSet:
    pixels = images.images if images.channels == channels or channels == 1 else np.repeat(images.images, 3, axis=3)
    return ImageSet.from_arrays(fit_squares(np.asarray(pixels), side, channels), labels=images.labels)


def split_of(images: ImageSet) -> Split:
    some, rest = images.split(min(N_TRAIN + N_TEST, len(images)), seed=0)[::-1]
    del rest
    return some.split(len(some) - N_TRAIN, seed=1)


def sets_of(asked: argparse.Namespace) -> Iterator[tuple[str, Split]]:
    """Each set by name, at the size that its files would have."""
    photos = split_of(load_images(asked.photos, side=96, channels=3))
    yield "digits, 8 px, grey", split_of(load_dataset("digits", "train+test"))
    yield "photos, 96 px, grey", (resized(photos[0], 96, 1), resized(photos[1], 96, 1))
    if asked.cifar:
        yield "cifar10, 32 px", split_of(load_dataset("cifar10", "train", asked.cifar))
        coarse = load_dataset("cifar100-20", "train", asked.cifar)
        yield "cifar100-20, 8 kinds, 32 px", split_of(coarse.take(coarse.labels < 8))
    for side in (96, 48, 32, 16):
        yield f"photos, {side} px", (resized(photos[0], side, 3), resized(photos[1], side, 3))


def encoder() -> ClusterModel:
    return build_model(n_clusters=0, side=made_for_side(DEFAULT), backbone=ENCODER + DEFAULT, pretrained=True)


def seen_by(model: ClusterModel, images: ImageSet) -> ImageSet:
    colour = resized(images, images.side, 3) if images.channels == 1 else images
    return encode(model, resized(colour, model.config.side, 3))


def compare_starts(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = encoder()
    for name, (first, test) in sets_of(asked):
        labels, k = test.labels, len(np.unique(test.labels))
        seen, new = seen_by(model, first), seen_by(model, test)
        flat, others = (part.images.reshape(len(part), -1) for part in (seen, new))
        means = [KMeans(k, n_init=10, random_state=seed).fit(flat).predict(others) for seed in range(5)]
        row = {"set": name, "images": len(first), "k-means": float(np.mean([accuracy(labels, m) for m in means]))}
        given: dict[str, Any] = {"settings": CPU, "stages": SHORT_STAGES[1:]}
        row["pretrained"] = accuracy(labels, predict(pretrain(model, seen, k, **given), new).clusters)
        if first.side <= asked.own:
            fresh = build_model(n_clusters=0, side=first.side, channels=first.channels, backbone="tiny")
            given |= {"stages": SHORT_STAGES, "recipe": short_start(len(first), cpu=True)}
            row["own"] = accuracy(labels, predict(pretrain(fresh, first, k, **given), test).clusters)
        yield row


def in_rounds(start: ClusterModel, seen: ImageSet) -> Iterator[tuple[list[Answer], ClusterModel]]:
    """The answers and the model after each budget, as `loop` trains it; a start without clusters finds their number.

    Questions are chosen, not drawn, and the answers are right: another seed would change nothing.
    """
    assert seen.labels is not None
    frozen, newest = Frozen.of(start, seen), start
    size = round_size(len(seen), cpu=True)

    def learn(answers: Sequence[Answer]) -> ClusterModel:
        nonlocal newest
        before = frozen.probabilities(newest) if newest.config.n_clusters else None
        first = round_start(start, frozen, seen, answers, CPU, before)
        beliefs, around = None, Context()
        if start.config.n_clusters:
            first, beliefs = copy.deepcopy(start), frozen.probabilities(start)
            around = Context(before=newest, stated=constraints_of(answers, len(seen)))
        config = make_config("constraintmatch", {"recipe": "safe", **size, **CPU}, start=first)
        newest = train(seen, closure_pairs(answers, len(seen), beliefs, frozen), config, around).model
        return newest

    oracle = LabelOracle(seen.labels, error=0.0, seed=0)
    yield from simulate(lambda model: head_belief(model, frozen), learn, start, BUDGETS, oracle, Asking(seed=0))


def pck_means(features: NDArray[np.float32], k: int, pairs: Constraints, seed: int) -> NDArray[np.float32]:
    """The centres of PCKMeans (Basu and others, 2004): a violated pair costs as much as two images at right angles."""
    draw, groups = np.random.default_rng(seed), pairs.components()
    sizes = np.bincount(groups)
    largest = [features[groups == one].mean(0) for one in np.argsort(-sizes)[:k] if sizes[one] > 1]
    spare = draw.choice(len(features), k - len(largest), replace=False)
    centres, clusters = np.stack([*largest, *features[spare]]), np.full(len(features), -1)
    links = np.full((len(features), len(features)), 0.0, np.float32)
    signs = np.where(pairs.link > 0.5, 1.0, -1.0)
    links[pairs.left, pairs.right] = links[pairs.right, pairs.left] = signs
    for _ in range(20):
        distance = ((features[:, None] - centres) ** 2).sum(2)
        for row in draw.permutation(len(features)):
            known = clusters >= 0
            same = np.bincount(clusters[known], links[row][known], minlength=k)
            clusters[row] = (distance[row] - 2 * same).argmin()
        filled = np.unique(clusters)
        centres[filled] = np.stack([features[clusters == one].mean(0) for one in filled])
    return centres


COBRAS = """
import random, sys, numpy
from cobras_ts.cobras_kmeans import COBRAS_kmeans
given = numpy.load(sys.argv[1])
labels = given["labels"]
class Labels:  # the package's own brings a browser along
    def query_points(self, one, other):
        return labels[one] == labels[other]
    def update_clustering(self, clustering): pass
    def continue_cluster_process(self): return True
random.seed(int(given["seed"])), numpy.random.seed(int(given["seed"]))
found = COBRAS_kmeans(given["features"], Labels(), int(given["n"])).cluster()
numpy.save(sys.argv[2], [*found[1], found[0].construct_cluster_labeling()])
"""


def cobras(python: Path, features: NDArray[np.float32], labels: NDArray[np.int64], n: int, seed: int) -> NDArray[Any]:
    """The clusters (questions, images) that COBRAS (Van Craenendonck and others, 2018) has after each pair question."""
    with tempfile.TemporaryDirectory() as place:
        given, made = Path(place, "given.npz"), Path(place, "made.npy")
        np.savez(given, features=features, labels=labels, n=n, seed=seed)
        subprocess.run([python, "-W", "ignore", "-c", COBRAS, given, made], check=True)
        return np.asarray(np.load(made))


def compare_answers(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = encoder()
    for name, (train_set, test) in sets_of(asked):
        if name not in asked.sets:
            continue
        seen, new, labels = seen_by(model, train_set), seen_by(model, test), train_set.labels
        flat, others = (part.images.reshape(len(part), -1) for part in (seen, new))
        k, found = len(np.unique(labels)), list[dict[str, Any]]()
        start = pretrain(model, seen, k, settings=CPU, stages=SHORT_STAGES[1:])
        means = [KMeans(k, n_init=10, random_state=seed).fit(flat).predict(others) for seed in range(5)]
        first = {"k-means": float(np.mean([accuracy(test.labels, one) for one in means]))}
        first["start"] = accuracy(test.labels, predict(start, new).clusters)
        rounds = list(zip(in_rounds(start, seen), in_rounds(model, seen), strict=False))
        for seed in range(asked.seeds):
            other = cobras(asked.cobras, flat, labels, 5 * BUDGETS[-1], seed) if asked.cobras else np.empty(0)
            for (answers, made), (_, free) in rounds:
                n, draw = len(answers), np.random.default_rng([seed, len(answers)]).permutation(len(flat))
                known = draw[:n]
                some = np.full(len(flat), -1)
                some[known] = labels[known]
                spread = LabelSpreading(kernel="knn", n_neighbors=10, max_iter=100).fit(flat, some)
                regression = LogisticRegression(C=100, max_iter=500).fit(flat[known], labels[known])
                centres = pck_means(flat, k, closure_pairs(answers, len(seen)), seed)
                told = {"answers": n, "loop": accuracy(test.labels, predict(made, new).clusters)}
                told["logistic regression"] = float((regression.predict(others) == test.labels).mean())
                told["label spreading"] = float((spread.predict(others) == test.labels).mean())
                told["PCKMeans"] = accuracy(test.labels, ((others[:, None] - centres) ** 2).sum(2).argmin(1))
                for called, times in (("COBRAS", 1), ("COBRAS, 5 times", 5)) if asked.cobras else ():
                    clusters = np.unique(other[min(times * n, len(other)) - 1], return_inverse=True)[1]
                    placed = KNeighborsClassifier(10).fit(flat, clusters).predict(others)
                    told[called] = accuracy(test.labels, placed)
                    told[f"{called}: ARI"] = adjusted_rand_score(test.labels, placed)
                    told[f"{called}: clusters"] = len(np.unique(clusters))
                told["clusters found"] = free.config.n_clusters
                told["ARI with them"] = adjusted_rand_score(test.labels, predict(free, new).clusters)
                found.append(told)
                print(name, seed, told, flush=True)
        for n in BUDGETS:
            same = [one for one in found if one["answers"] == n]
            yield {"set": name, **first, **{key: float(np.mean([one[key] for one in same])) for key in found[0]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["start", "answers"])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--cifar", type=Path, help="the folder of CIFAR-10 and CIFAR-100")
    parser.add_argument(
        "--sets",
        nargs="*",
        default=["photos, 96 px", "cifar10, 32 px", "cifar100-20, 8 kinds, 32 px"],
        help="for answers",
    )
    parser.add_argument("--cobras", type=Path, help="a Python with cobras_ts, for answers")
    parser.add_argument("--seeds", type=int, default=3, help="for answers")
    parser.add_argument("--own", type=int, default=16, help="the largest side for which the own start is made too")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows, began = list[dict[str, Any]](), time.monotonic()
    if asked.what == "answers" and asked.out and (before := asked.out / "photos-answers.json").is_file():
        rows += [row for row in json.loads(before.read_text())["rows"] if row["set"] not in asked.sets]
    for row in compare_starts(asked) if asked.what == "start" else compare_answers(asked):
        rows.append(row)
        print(row, flush=True)
        if asked.out:
            found: dict[str, Any] = {"encoder": DEFAULT, "rows": rows, "seconds": round(time.monotonic() - began)}
            found |= {"seeds": asked.seeds} if asked.what == "answers" else {}
            write_result(asked.out / f"photos-{asked.what}.json", found)


if __name__ == "__main__":
    main()
