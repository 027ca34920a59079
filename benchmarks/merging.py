"""Too many clusters, and pairs that say which are one: a head alone, with clusters merged first and without, on a CPU.

    constraintmatch embed starts/scan-cifar10-50 cifar10 --data-dir data --out train.npz
    constraintmatch embed starts/scan-cifar10-50 cifar10 --split test --data-dir data --out test.npz
    python benchmarks/merging.py train.npz test.npz --model starts/scan-cifar10-50 --name cifar10-50 --out results

The model whose embeddings these are gives its head, with more clusters than there are kinds. Scores are on the images
of the second file, for several samples of pairs.
"""

import time
from pathlib import Path
from typing import Any

from embedded import parser_of, trained

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.evaluation.metrics import predict, scores
from constraintmatch.methods.heads import detach_head, merge_clusters
from constraintmatch.models.cluster_model import ClusterModel, load_model
from constraintmatch.training.run_folder import write_result

WAYS = ("merged", "constrained", "constraintmatch", "merged, constrained", "merged, constraintmatch")


def learnt(way: str, start: ClusterModel, train: ImageSet, pairs: Constraints) -> ClusterModel:
    """The head after the pairs: merged, trained, or both."""
    if way == "merged":
        return merge_clusters(start, train, pairs)
    method = way.removeprefix("merged, ")
    return trained(method, start, train, pairs, merge=method != way)[0]


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--model", type=Path, required=True, help="whose embeddings these are")
    asked = parser.parse_args()
    train, test = load_images(asked.train), load_images(asked.test)
    assert train.labels is not None
    assert test.labels is not None
    start = detach_head(load_model(asked.model), train)
    first = {**scores(test.labels, predict(start, test)), "clusters": start.config.n_clusters}
    print("start", first, flush=True)
    rows: list[dict[str, Any]] = []
    for n in asked.pairs:
        for way in WAYS:
            found, began = [], time.monotonic()
            for sample in range(asked.samples):
                model = learnt(way, start, train, Constraints.sample(train.labels, n, seed=sample))
                told = scores(test.labels, predict(model, test))
                found.append({key: round(told[key], 4) for key in ("acc", "nmi", "ari")})
                found[-1]["clusters"] = model.config.n_clusters
            seconds = round((time.monotonic() - began) / asked.samples, 1)
            rows.append({"pairs": n, "way": way, "scores": found, "seconds": seconds})
            print(rows[-1], flush=True)
    if asked.out:
        write_result(asked.out / f"merging-{asked.name}.json", {"data": asked.name, "start": first, "rows": rows})


if __name__ == "__main__":
    main()
