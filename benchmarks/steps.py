"""How much of a training step is the network: ms per step of each method, and of the bare network on the same shapes.

    python benchmarks/steps.py --out results/speed-h200.json

The floor has the same network, precision, compilation and optimiser, no views, and a sum as its loss; all images that
have gradients are one batch. Both are measured in one process, one right after the other; the ratio is what counts.

`--profile 30` lists the kernels that a method spends its time in; `--separate` gives each batch a pass of its own.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods.starts.pretext import Projector
from constraintmatch.models import backbones
from constraintmatch.models.cluster_model import ClusterModel, build_model, with_projection
from constraintmatch.pipeline.config import make_config, method_settings
from constraintmatch.pipeline.train import train
from constraintmatch.training.loop import TrainSettings, choose_device, fit
from constraintmatch.training.run_folder import write_result

BATCHES = {
    "simclr": {"images_per_step": 512},
    "byol": {"images_per_step": 512},
    "constrained": {"pairs_per_step": 200},
    "pseudo_label": {"pairs_per_step": 200, "images_per_step": 600},
    "constraintmatch": {"pairs_per_step": 200, "images_per_step": 600},
}


@dataclass(frozen=True)
class Inputs:
    """Images for a pass with gradients, and for one without."""

    trained: Tensor
    guessed: Tensor | None = None


def bare_loss(network: Callable[..., Tensor], batch: Inputs) -> dict[str, Tensor]:
    """The passes of a method with a sum in place of its loss."""
    total = network(batch.trained).float().sum()
    if batch.guessed is not None:
        with torch.no_grad():
            network(batch.guessed)
    return {"sum": 1e-6 * total}


def ms_per_step(log: list[dict[str, Any]]) -> float:
    """Milliseconds a step: the median stretch from the first log line on, when all is compiled and captured."""
    lines = [entry for entry in log if entry["kind"] == "training"]
    stretches = itertools.pairwise(lines)
    return statistics.median(1e3 * (b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in stretches)


def ours(name: str, model: ClusterModel, images: ImageSet, settings: TrainSettings) -> float:
    arguments: dict[str, Any] = dict(BATCHES[name])
    constraints = None
    if "pairs_per_step" in arguments:
        constraints = Constraints.sample(images.labels, min(len(images), 5_000), seed=0)
    else:
        arguments["epochs"] = -(-settings.steps // (len(images) // min(arguments["images_per_step"], len(images))))
    config = replace(make_config(name, arguments, start=model), settings=settings)
    return ms_per_step(train(images, constraints, config).log)


def floor(name: str, model: ClusterModel, settings: TrainSettings) -> float:
    batch, device = BATCHES[name], choose_device(settings.device)
    config = model.config

    def pixels(n: int) -> Tensor:
        shape = (n, config.side, config.side, config.channels)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device).permute(0, 3, 1, 2)

    if "pairs_per_step" not in batch:
        inputs, module = Inputs(pixels(2 * batch["images_per_step"])), projector(model)
    else:
        free = batch.get("images_per_step", 0)
        inputs, module = Inputs(pixels(2 * batch["pairs_per_step"] + free), pixels(free) if free else None), model
    still = replace(settings, lr=1e-12)  # a sum has no minimum: at the method's rate it would run away
    return ms_per_step(fit(module, lambda _: inputs, bare_loss, still))


def fresh_model(asked: argparse.Namespace) -> ClusterModel:
    return build_model(n_clusters=10, side=asked.side, backbone=asked.backbone)


def kernels(name: str, model: ClusterModel, images: ImageSet, settings: TrainSettings, most: int) -> Iterator[str]:
    """A line for each of the longest kernels of the method: microseconds and calls a step; the warm-up counts too."""
    device = choose_device(settings.device).type
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as seen:
        ours(name, model, images, settings)
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = sorted(seen.key_averages(), key=lambda row: -getattr(row, key))
    total = sum(getattr(row, key) for row in rows)
    yield f"{name}: {total / settings.steps:,.0f} µs a step in {len(rows)} kernels"
    for row in rows[:most]:
        yield f"{getattr(row, key) / settings.steps:10,.1f} µs {row.count / settings.steps:7.2f} ×  {row.key[:110]}"


def projector(model: ClusterModel) -> nn.Module:
    return Projector(with_projection(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="simclr,constrained,constraintmatch")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--separate", action="store_true", help="a pass for each batch, not one for pairs and views")
    parser.add_argument("--profile", type=int, metavar="N", help="print the N longest kernels of each method")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.separate:
        backbones.can_keep_apart = lambda module: False  # noqa: ARG005 (the function's signature)
    rng = np.random.Generator(np.random.Philox(0))
    pixels = rng.integers(0, 256, (asked.images, asked.side, asked.side, 3), dtype=np.uint8)
    images = ImageSet.from_arrays(pixels, labels=np.arange(asked.images) % 10)
    print(f"{'method':18}{'ours, ms':>10}{'floor, ms':>11}{'ratio':>8}{'images/s':>11}")
    rows = {}
    for name in asked.methods.split(","):
        model = fresh_model(asked)
        settings = replace(method_settings(name), steps=asked.steps, log_every=max(1, asked.steps // 10))
        bare, own = floor(name, model, settings), ours(name, model, images, settings)
        batch = BATCHES[name]
        seen = 2 * batch["pairs_per_step"] if "pairs_per_step" in batch else 0
        rate = (seen + batch.get("images_per_step", 0)) / own * 1e3
        rows[name] = {"ms": round(own, 3), "floor_ms": round(bare, 3), "ratio": round(own / bare, 3)}
        print(f"{name:18}{own:10.2f}{bare:11.2f}{own / bare:8.2f}{rate:11,.0f}", flush=True)
        if asked.profile:
            print("\n".join(kernels(name, fresh_model(asked), images, settings, asked.profile)), flush=True)
    if asked.out:
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        request = {"steps": asked.steps, "side": asked.side, "backbone": asked.backbone, "batches": BATCHES}
        request["separate"] = asked.separate
        write_result(asked.out, {**request, "rows": rows, "peak_gib": peak})


if __name__ == "__main__":
    main()
