"""Test accuracy against the number of answered questions, with a simulated annotator.

    python benchmarks/label_efficiency.py cifar10 --data-dir data --model weights/scan-cifar10 --out results

One JSON for each way of asking and error rate: random-pair, chosen-pair, chosen-which. Every round begins with the
start, whose head is told all answers so far (`propagate`), and trains on them by the paper's recipe. `--plain` leaves
the head as it was. `--safe` trains each round by the default recipe, as `loop` does.
`--steps 0` leaves the network as it is: the features are found once, and the head alone is told; minutes on a CPU. With
`--head-steps` it is then trained on them for so many steps, as by `loop --frozen`. `--last-steps` makes the training
after the last answer longer than those between. A stopped curve goes on after its last round, a finished one to larger
budgets, while its answers lie in `answers/` beside the result; what the start sees lies there too, for its other
curves. The same command started several times shares the curves.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from constraintmatch._internal import rng
from constraintmatch._internal.files import InUse, folder_lock, read_json, write_atomically, write_json
from constraintmatch._internal.rng import Purpose
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions, predict, scores
from constraintmatch.methods import Context, ViewChoice
from constraintmatch.methods.heads import attach_head, detach_head
from constraintmatch.methods.propagate import Frozen
from constraintmatch.models.cluster_model import ClusterModel, load_model, save_model
from constraintmatch.pipeline.config import make_config, round_size
from constraintmatch.pipeline.train import train, weights_hash
from constraintmatch.questions.answers import Answer, Question, constraints_of, implied_groups
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.rounds import (
    Asking,
    LabelOracle,
    closure_pairs,
    head_belief,
    image_belief,
    inform_start,
    simulate,
)
from constraintmatch.training.run_folder import write_result

WAYS = {
    "random-pair": Asking("pair", "random"),
    "chosen-pair": Asking("pair", "recommended"),
    "chosen-which": Asking("which", "recommended"),
    "random-which": Asking("which", "random"),
}
ANCHORS = 10_000  # pairs at most that hold a round to its start; there are as many as images
SURE = 0.9  # the least confidence of an image in one of them


def pairs_of(asked: argparse.Namespace, answers: Sequence[Answer], frozen: Frozen, begun: ClusterModel) -> Constraints:
    """What a round is trained on, from the model that it begins with."""
    pairs = closure_pairs(answers, len(frozen), seed=asked.seed)
    return add_anchors(pairs, frozen.probabilities(begun), seed=asked.seed) if asked.anchors else pairs


def add_anchors(pairs: Constraints, probabilities: NDArray[np.float32], *, seed: int = 0) -> Constraints:
    """The pairs, and cannot-links between images that the first model of a round (n, k) is sure of.

    Without them the network after 50 answers ended far below the start: it memorises few pairs soon, and
    pseudo-constraints alone merge clusters (decision 036). Images with answers take no part. There are no must-links,
    because too many of them would be wrong.
    """
    free = probabilities.max(1) >= SURE
    free[pairs.left] = free[pairs.right] = False
    rows, cluster = np.flatnonzero(free), probabilities.argmax(1)
    if len(rows) < 2:
        return pairs
    words, n = rng.stream(seed, Purpose.ANCHORS), min(ANCHORS, len(free))
    one = rng.below(words, np.full(n, len(rows)))
    drawn = np.stack([rows[one], rows[rng.another(words, one, len(rows))]])
    left, right = drawn[:, cluster[drawn[0]] != cluster[drawn[1]]]
    columns = (pairs.left, left), (pairs.right, right), (pairs.link, np.zeros(len(left)))
    weight = np.concatenate([pairs.weight, np.ones(len(left), np.float32)])
    together = [np.concatenate(column) for column in columns]
    return Constraints.from_arrays(*together, n_images=pairs.n_images, weight=weight)


class HeadAlone:
    """Rounds that leave the network as it is: its head is told, and trained if asked, on features found once."""

    def __init__(self, asked: argparse.Namespace, kept: Path, options: dict[str, Any]) -> None:
        found = features_of(asked.model, asked.name, asked.data_dir, asked.device, kept)
        self.asked, self.options = asked, options
        self.start, self.frozen, self.test = found
        self.seen = ImageSet.from_arrays(self.frozen.features)

    def believe(self, model: ClusterModel) -> Belief:
        return head_belief(model, self.frozen)

    def train(self, answers: Sequence[Answer]) -> ClusterModel:
        begun = inform_start(self.start, self.frozen, answers)
        if not self.options:
            return begun
        pairs = pairs_of(self.asked, answers, self.frozen, begun)
        config = make_config("constraintmatch", self.options, start=detach_head(begun, self.seen))
        return attach_head(begun, train(self.seen, pairs, config).model)

    def score(self, model: ClusterModel, labels: Any) -> dict[str, float]:
        return scores(labels, Predictions(self.test.probabilities(model)))


class WholeNetwork:
    """Rounds that train the network from the start each time."""

    def __init__(self, asked: argparse.Namespace, images: ImageSet, test: ImageSet, options: dict[str, Any]) -> None:
        self.asked, self.images, self.test = asked, images, test
        self.start = load_model(asked.model).to(asked.device)
        self.frozen = Frozen.of(self.start, images, device=asked.device)
        self.last, self.newest = asked.last_steps or asked.steps, self.start
        self.options = {**options, "seed": asked.seed, "log_every": self.last}
        row = DATASETS[asked.name]
        self.views = ViewChoice(flip=row.flip, without=tuple(sorted(row.without)))

    def believe(self, model: ClusterModel) -> Belief:
        return image_belief(model, self.images)

    def train(self, answers: Sequence[Answer]) -> ClusterModel:
        asked = self.asked
        plain = asked.plain or asked.safe
        begun = load_model(asked.model) if plain else inform_start(self.start, self.frozen, answers)
        pairs = (
            closure_pairs(
                answers, len(self.frozen), self.frozen.probabilities(self.start), self.frozen, seed=asked.seed
            )
            if asked.safe
            else pairs_of(asked, answers, self.frozen, begun)
        )
        options = {**self.options, "steps": self.last if len(answers) >= asked.budgets[-1] else asked.steps}
        options |= {"recipe": "safe"} if asked.safe else {}
        config = make_config("constraintmatch", options, start=begun, views=self.views)
        said = Context(before=self.newest, stated=constraints_of(answers, len(self.frozen)))
        model, log = train(self.images, pairs, config, said if asked.safe else Context())
        self.newest = model
        if asked.safe:
            print(f"{len(answers):,} answers: kept {log[-1]['kept']}: {log[-1]['why']}", flush=True)
        if asked.keep:
            save_model(model, asked.keep / str(len(answers)), half=True)
        return model

    def score(self, model: ClusterModel, labels: Any) -> dict[str, float]:
        return scores(labels, predict(model, self.test))


@cache
def features_of(
    model: Path, name: str, data_dir: Path | None, device: str, kept: Path
) -> tuple[ClusterModel, Frozen, Frozen]:
    """A start and what it sees of both parts, for all ways of asking: that takes minutes on a CPU and is kept."""
    start, seen = load_model(model), []
    for part in ("train", "test"):
        path = kept / f"features-{weights_hash(start)}-{name}-{part}.npy"
        if not path.is_file():
            found = Frozen.of(start, load_dataset(name, part, data_dir), device=device).features
            write_atomically(path, lambda place, found=found: np.save(place, found))
        seen.append(Frozen(np.load(path), device=device))
    return start, seen[0], seen[1]


def run(asked: argparse.Namespace, way: str, error: float, request: dict[str, Any], kept: Path) -> list[dict[str, Any]]:
    """The points of one curve. What a round leaves goes to `kept`, so that a stopped curve goes on from there."""
    images = load_dataset(asked.name, "train", asked.data_dir)
    test = load_dataset(asked.name, "test", asked.data_dir)
    assert images.labels is not None
    points, answers = read_kept(kept)
    began = time.monotonic() - (points[-1].get("seconds", 0) if points else 0)
    rounds: HeadAlone | WholeNetwork = (
        WholeNetwork(asked, images, test, request["options"])
        if asked.steps
        else HeadAlone(asked, kept.parent, request["options"])
    )
    points = points or [{"answers": 0, **rounds.score(rounds.start, test.labels)}]
    oracle = LabelOracle(images.labels, error=error, seed=asked.seed)
    asking = replace(WAYS[way], seed=asked.seed)
    rest = [budget for budget in asked.budgets if budget > len(answers)]
    going = simulate(rounds.believe, rounds.train, rounds.start, rest, oracle, asking, answers)
    for answers, model in going if rest else ():
        found = rounds.score(model, test.labels)
        groups = implied_groups(answers, len(images))
        seconds = round(time.monotonic() - began, 1)
        points.append({"answers": len(answers), **found, "groups": int(groups.max()) + 1, "seconds": seconds})
        given = [[one.question.image, one.question.shown, one.choice] for one in answers]
        write_json(kept, {"request": request, "points": points, "answers": given})
        print(
            f"{asked.name} {way} error {error:g}: {len(answers):,} answers, ACC {100 * found['acc']:.2f}",
            flush=True,
        )
    return points


def training_options(asked: argparse.Namespace) -> dict[str, Any]:
    """The options of the training: the set's own, for a head alone those of its size, and those that were asked for."""
    row, given = DATASETS[asked.name], dict(word.split("=") for word in asked.set)
    if asked.steps:
        own = {
            "pairs_per_step": row.pairs_per_step,
            "images_per_step": row.images_per_step,
            **row.tuned["constraintmatch"],
        }
    elif asked.head_steps:
        own = {**round_size(row.splits[0], cpu=True), "steps": asked.head_steps, "seed": asked.seed}
    else:
        return {}
    return {key: float(value) if isinstance(value, str) else value for key, value in {**own, **given}.items()}


def request_of(asked: argparse.Namespace, way: str, error: float) -> dict[str, Any]:
    """What decides a curve."""
    request = {"data": asked.name, "way": way, "error": error, "steps": asked.steps, "seed": asked.seed}
    request["head"] = "the start's" if asked.plain else "told the answers"
    request |= {"start_name": asked.start} if asked.start else {}
    request |= {"anchors": "apart"} if asked.anchors else {}
    request |= {"recipe": "safe"} if asked.safe else {}
    request |= {"last_steps": asked.last_steps, "budgets": asked.budgets} if asked.last_steps else {}
    return {**request, "options": training_options(asked), "start": weights_hash(load_model(asked.model))}


def read_kept(path: Path) -> tuple[list[dict[str, Any]], list[Answer]]:
    """Points and answers of the rounds before; nothing where there are none."""
    if not path.is_file():
        return [], []
    found = read_json(path)
    return found["points"], [Answer(Question(image, tuple(shown)), choice) for image, shown, choice in found["answers"]]


def is_finished(target: Path, kept: Path, request: dict[str, Any], budget: int) -> bool:
    """Whether the curve reaches the budget; a file of another curve in the way is named and stops the program."""
    for path, found in ((path, read_json(path)) for path in (kept, target) if path.is_file()):
        other = next((key for key, value in request.items() if found.get("request", found).get(key) != value), None)
        if other is not None:
            raise SystemExit(f"{path}: a curve with another {other}; move it away or choose another --out")
    if not target.is_file():
        return False
    return not kept.is_file() or read_json(target)["points"][-1]["answers"] >= budget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("digits", "cifar10", "cifar100-20"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--start", default="", help="a name for the start, for its results: byol")
    parser.add_argument("--ways", default="random-pair,chosen-pair,chosen-which")
    parser.add_argument("--errors", default="0,0.05,0.1")
    parser.add_argument(
        "--budgets",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[50, 100, 200, 500, 1000, 2000, 5000, 10000],
    )
    parser.add_argument("--steps", type=int, default=1000, help="of the network in a round; 0: only the head is told")
    parser.add_argument("--last-steps", type=int, default=0, help="of the network after the last answer; as --steps")
    parser.add_argument("--head-steps", type=int, default=0, help="of the head alone in a round, with --steps 0")
    parser.add_argument("--anchors", action="store_true", help="hold clusters apart in a round, as loop does")
    parser.add_argument("--safe", action="store_true", help="train the network of a round by the default recipe")
    parser.add_argument("--keep", type=Path, help="a folder for the network of each round")
    parser.add_argument("--plain", action="store_true", help="begin with the start's head as it is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--set", nargs="*", default=[], help="other options of the training, such as lr=0.02")
    parser.add_argument("--out", type=Path, default=Path("results"))
    asked = parser.parse_args()
    if asked.steps and asked.head_steps:
        parser.error("--head-steps is for a head alone: give --steps 0 too")
    if (asked.anchors or asked.set) and not (asked.steps or asked.head_steps):
        parser.error("--anchors and --set are for a training: give --steps or --head-steps")
    if (asked.safe or asked.keep) and not asked.steps:
        parser.error("--safe and --keep are for a network: give --steps too")
    if asked.last_steps and not asked.steps:
        parser.error("--last-steps is for a network: give --steps too")
    if asked.device is None:
        asked.device = "cuda" if torch.cuda.is_available() else "cpu"
    for error in map(float, asked.errors.split(",")):
        for way in asked.ways.split(","):
            kind = "" if asked.steps else "-trained-head" if asked.head_steps else "-head"
            kind += (f"-{asked.start}" if asked.start else "") + ("-anchored" if asked.anchors else "")
            kind += "-safe" if asked.safe else ""
            kind += f"-last{asked.last_steps}" if asked.last_steps else ""
            kind += f"-seed{asked.seed}" if asked.seed else ""
            target = asked.out / f"questions-{asked.name}-{way}{kind}-error{error:g}.json"
            kept, request = asked.out / "answers" / target.name, request_of(asked, way, error)
            try:
                with folder_lock(kept.with_suffix("")):
                    if is_finished(target, kept, request, asked.budgets[-1]):
                        print(f"{target}: finished before")
                        continue
                    write_result(target, {**request, "points": run(asked, way, error, request, kept)})
            except InUse:
                print(f"{target}: another process is working at it")


if __name__ == "__main__":
    main()
