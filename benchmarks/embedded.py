"""What the benchmarks on embeddings share: their files, samples of pairs, and a training of the head."""

import argparse
import copy
from pathlib import Path

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.models.cluster_model import ClusterModel
from constraintmatch.pipeline import train as running
from constraintmatch.pipeline.config import make_config, training_size

__all__ = ["parser_of", "trained"]


def parser_of(text: str) -> argparse.ArgumentParser:
    """The arguments that all of them take."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--name", required=True, help="of the data, for the result")
    parser.add_argument("--pairs", type=lambda text: [int(n) for n in text.split(",")], default=[1000, 5000, 10000])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser


def trained(
    method: str, start: ClusterModel, train: ImageSet, pairs: Constraints, *, merge: bool = False
) -> tuple[ClusterModel, int]:
    """A copy of the start trained on a CPU by the paper's recipe, and in how many steps."""
    size = training_size(len(train), cpu=True)
    if method == "constrained":
        size = {key: value for key, value in size.items() if key not in ("images_per_step", "warm_up")}
    config = make_config(method, {**size, "merge": merge, "device": "cpu"}, start=copy.deepcopy(start))
    return running.train(train, pairs, config).model, config.settings.steps
