"""Prints how long choosing questions takes on random features; or, with --probe, what the answers are worth.

Run: python research/questions.py [--images 50000] [--width 128] [--clusters 100] [--questions 50] [--answers 500]
     python research/questions.py --probe weights/scan-cifar10 --data-dir data

The probe asks about 5,000 training images of CIFAR-10, 10 questions at a time. A simulated annotator answers. A linear
classifier is fitted to features and predictions of the images that the answers have grouped, and judged on all 5,000
(groups matched to labels one to one, so the many small groups that random pairs leave count for little). Nothing is
trained in between: it compares choices, it does not say what the loop reaches.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from constraintmatch.evaluation.metrics import accuracy
from constraintmatch.questions.answers import Answer, implied_groups
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.next_question import next_questions
from constraintmatch.questions.rounds import LabelOracle

WAYS = [(kind, choose) for kind in ("which", "pair") for choose in ("recommended", "uncertain", "random")]
POINTS = (50, 100, 200, 400)


def scattered(n: int, width: int, k: int) -> tuple[Belief, NDArray[np.int64]]:
    """Images around k random centres, a model that is right about most of them, and their labels."""
    random = np.random.Generator(np.random.Philox(0))
    labels = random.integers(k, size=n)
    centres = random.standard_normal((k, width), np.float32)
    features = centres[labels] + 1.5 * random.standard_normal((n, width), np.float32)
    logits = 4 * (np.arange(k) == labels[:, None]) + 1.5 * random.standard_normal((n, k), np.float32)
    shares = np.exp(logits)
    return Belief.of(features, shares / shares.sum(1, keepdims=True)), labels


def embedded(model: Path, data_dir: Path, n: int = 5_000) -> tuple[Belief, NDArray[np.int64]]:
    """What the model believes of n training images of CIFAR-10, and their labels."""
    from constraintmatch.data.datasets import load_dataset
    from constraintmatch.evaluation.metrics import predict
    from constraintmatch.models.cluster_model import load_model

    images = load_dataset("cifar10", "train", data_dir)
    some = images.take(np.random.Generator(np.random.Philox(0)).permutation(len(images))[:n])
    found = predict(load_model(model), some, features=True)
    return Belief.of(found.features, found.probabilities), np.asarray(some.labels, np.int64)


def answered(belief: Belief, oracle: LabelOracle, n: int, batch: int, **way: str) -> list[Answer]:
    """n answers to questions that were chosen so many at a time."""
    answers: list[Answer] = []
    while len(answers) < n:
        chosen = next_questions(belief, answers, min(batch, n - len(answers)), **way)
        answers += map(oracle.answer, chosen)
    return answers


def probe(belief: Belief, labels: NDArray[np.int64], answers: list[Answer]) -> float:
    """The accuracy of a linear classifier fitted to the grouped images."""
    from sklearn.linear_model import LogisticRegression

    group = implied_groups(answers, len(belief))
    inputs = np.hstack([3 * belief.features, belief.probabilities])
    classifier = LogisticRegression(C=3, max_iter=200).fit(inputs[group >= 0], group[group >= 0])
    return accuracy(labels, classifier.predict(inputs))


def print_probes(belief: Belief, labels: NDArray[np.int64]) -> None:
    """One row for each way to ask and rate of wrong answers, one column for each number of answers."""
    print("kind  choice      wrong " + "".join(f"{n:>8,}" for n in POINTS))
    for kind, choose in WAYS:
        for error in (0.0, 0.05):
            oracle = LabelOracle(labels, error=error)
            answers = answered(belief, oracle, POINTS[-1], 10, kind=kind, choose=choose)
            scores = [probe(belief, labels, answers[:n]) for n in POINTS]
            print(f"{kind:5} {choose:11} {error:5.0%} " + "".join(f"{score:8.1%}" for score in scores), flush=True)


def print_times(n_images: int, width: int, k: int, n_questions: int, n_answers: int) -> None:
    """The seconds for the density, and for one batch of each way to ask."""
    belief, labels = scattered(n_images, width, k)
    start = time.perf_counter()
    print(f"{n_images:,} images, {width} features, {k} clusters, {n_answers:,} answers")
    print(f"density, once: {time.perf_counter() - start:.2f} s")
    answers = answered(belief, LabelOracle(labels, error=0), n_answers, 100)
    for kind, choose in WAYS:
        start = time.perf_counter()
        chosen = next_questions(belief, answers, n_questions, kind=kind, choose=choose)
        print(f"{kind:5} {choose:11} {len(chosen):3} questions: {time.perf_counter() - start:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("images", 50_000), ("width", 128), ("clusters", 100), ("questions", 50), ("answers", 500)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--probe", type=Path, help="a model folder")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    asked = parser.parse_args()
    if asked.probe is None:
        print_times(asked.images, asked.width, asked.clusters, asked.questions, asked.answers)
    else:
        print_probes(*embedded(asked.probe, asked.data_dir))


if __name__ == "__main__":
    main()
