"""Pretrain on CIFAR and keep what each stage reached.

    python benchmarks/pretrain.py cifar10 --data-dir data --out runs/scan-cifar10

A system of the paper's Table I, for about 15 minutes of an H200 (`docs/make_reproduction.py` shows the result):

    python benchmarks/pretrain.py cifar10 --data-dir data --stages cc --set cc.epochs=600 --out runs/cc-cifar10

`--smoke N` trains N steps of every stage on random images of the same shapes instead: it fills the compiler's cache and
prints ms per step.
"""

import argparse
import ast
import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from constraintmatch._internal.files import read_json
from constraintmatch._internal.progress import Lines
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import DATASETS, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods import Context
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model, save_model
from constraintmatch.pipeline.config import STAGES, make_config, method_arguments, method_settings, split_options
from constraintmatch.pipeline.train import pretrain, stage_summary, train
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.run_folder import read_log, write_result


def recipe_of(options: list[str]) -> dict[str, dict[str, Any]]:
    """Options by stage from words like simclr.epochs=500."""
    recipe: dict[str, dict[str, Any]] = {}
    for word in options:
        name, value = word.split("=")
        stage, option = name.split(".")
        recipe.setdefault(stage, {})[option] = ast.literal_eval(value)
    return recipe


def smoke(stages: list[str], n_clusters: int, steps: int, recipe: dict[str, dict[str, Any]], backbone: str) -> None:
    """A few steps of each stage on random images, and the time of one when all is warm."""
    rng = np.random.Generator(np.random.Philox(0))
    for stage in stages:
        model = build_model(n_clusters=n_clusters, side=32, backbone=backbone)
        own, changes = split_options(stage, recipe.get(stage, {}))
        known, arguments = method_arguments(stage), dict(own)
        n = steps * own["images_per_step"] if "images_per_step" in own else 4000
        labels = np.arange(n) % n_clusters
        images = ImageSet.from_arrays(rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), labels=labels)
        if "epochs" in known:
            batch = own.get("images_per_step", known["images_per_step"])
            arguments["epochs"] = -(-steps // (len(images) // batch))
        if "n_clusters" in known:
            arguments["n_clusters"] = n_clusters
        if stage == "self_label":
            arguments["min_confidence"] = 0.0  # a fresh network is sure of nothing
        settings = replace(method_settings(stage, changes), log_every=max(steps // 4, 1), steps=steps)
        constraints = Constraints.sample(images.labels, 1000, seed=0)
        began = time.monotonic()
        config = replace(make_config(stage, arguments, start=model), settings=settings)
        log = train(images, constraints, config).log
        lines = [entry for entry in log if entry["kind"] == "training"]
        late = lines[-3:] if len(lines) > 3 else lines
        ms = 1e3 * (late[-1]["seconds"] - late[0]["seconds"]) / max(late[-1]["step"] - late[0]["step"], 1)
        print(
            f"{stage}: {ms:.2f} ms/step, first {lines[0]['seconds']:.1f} s, all {time.monotonic() - began:.1f} s",
            flush=True,
        )


def keep_stages(
    model: ClusterModel, images: ImageSet, n_clusters: int, results: Path, *, context: Context, **how: Any
) -> ClusterModel:
    """What `pretrain` gives; each stage leaves `results-stage.json`: settings, scores, seconds, environment.

    A result that is there stays as it was measured.
    """
    stages, start = list(how.pop("stages")), model
    for n, stage in enumerate(stages, start=1):  # those before are finished, and loaded
        model = pretrain(copy.deepcopy(start), images, n_clusters, stages=stages[:n], context=context, **how)
        times = stages[:n].count(stage)
        folder = stage if times == 1 else f"{stage}-{times}"
        target = results.with_name(f"{results.name}-{folder}.json")
        if target.is_file():
            continue
        record, log = read_json(context.out / folder / "run.json"), read_log(context.out / folder)
        request = record["request"]
        settings = request["settings"] | {"steps": log[-1]["step"]}  # which follow from the epochs
        told = {"stage": stage, "data": dict(context.data), "arguments": request["arguments"], "settings": settings}
        told["backbone"] = model.config.backbone
        scores = stage_summary(model, images, context.held_out)
        spent = {"seconds": record["seconds"], "training_seconds": log[-1]["seconds"]}
        curve = [entry for entry in log if entry["kind"] == "evaluation"]
        write_result(target, {**told, "scores": scores, **spent, "curve": curve})
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("cifar10", "cifar100-20"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/scan"))
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument(
        "--set", nargs="*", default=[], help="by stage, for example simclr.epochs=500 self_label.ema=0.999"
    )
    parser.add_argument("--clusters", type=int, help="how many; as many as the set has classes")
    parser.add_argument("--backbone", help="resnet34, for example; the set's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results-name", dest="name_of_results", help="what the results' names begin with; start-SET")
    parser.add_argument("--model", type=Path, help="model folder to start from, for example a finished SimCLR stage")
    parser.add_argument("--smoke", type=int)
    arguments = parser.parse_args()
    stages = arguments.stages.split(",")
    row = DATASETS[arguments.name]
    n_clusters = arguments.clusters or row.n_clusters
    if arguments.smoke:
        smoke(stages, n_clusters, arguments.smoke, recipe_of(arguments.set), arguments.backbone or row.backbone)
        return
    images = load_dataset(arguments.name, "train+val", arguments.data_dir)
    test = load_dataset(arguments.name, "test", arguments.data_dir)
    model = (
        load_model(arguments.model)
        if arguments.model
        else build_model(
            n_clusters=n_clusters,
            side=row.side,
            backbone=arguments.backbone or row.backbone,
            mean=row.mean,
            std=row.std,
            seed=derive_seed(arguments.seed, "model"),
        )
    )
    context = Context(
        out=arguments.out,
        reporter=Lines(Console(width=200), every=20),
        held_out=test,
        data={"name": arguments.name, "split": "train+val"},
    )
    done = keep_stages(
        model,
        images,
        n_clusters,
        arguments.out / "results" / (arguments.name_of_results or f"start-{arguments.name}"),
        stages=stages,
        recipe=recipe_of(arguments.set),
        settings={"seed": arguments.seed, "checkpoint_every": 5000, "log_every": 500},
        context=context,
    )
    save_model(done, arguments.out / "model", half=True)


if __name__ == "__main__":
    main()
