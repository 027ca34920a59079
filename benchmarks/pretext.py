"""Which pretext task leaves the best features in the same GPU time.

    python benchmarks/pretext.py cifar10 --data-dir data --tasks simclr byol --seconds 60 --out results/pretext
    python benchmarks/pretext.py cifar10 --data-dir data --tasks byol --epochs byol=370 --models runs/pretext \\
        --variant "byol-wide:byol.lr=0.4,byol.target_momentum=0.98,views.scale=(0.1,1.0)"

Each task is timed for some steps, then trained for as many epochs as fill the seconds, so that its schedule ends with
them; compilation does not count. A variant is a task of another name with other options: of its method, or of the view
(`views.contrastive`). The features are then judged as clustering needs them: kNN, how often neighbours share a label,
k-means, and the best of 20 linear heads trained by SCAN's loss on the frozen features; these three in the projections
too, where a model has them. One JSON a task and seed; what is finished is not done again. `--held-out val` keeps the
test images out of a choice.

`--kept MODEL --record RESULT` judges a model that was trained before (a stage of `pretrain`) instead of training one;
steps and seconds are those of its result, the environment is that of the judgement.
"""

import argparse
import ast
import inspect
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json
from constraintmatch._internal.progress import Lines
from constraintmatch.data.datasets import DATASETS, DataSet, load_dataset
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import accuracy, embed, knn_accuracy, nearest_neighbours, neighbour_consistency
from constraintmatch.methods import Context, Trained, ViewChoice
from constraintmatch.methods.heads import best_linear_head
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model, save_model
from constraintmatch.pipeline import train as running
from constraintmatch.pipeline.config import PRETEXTS, make_config, method_arguments, method_settings, split_options
from constraintmatch.training import views
from constraintmatch.training.batches import Shuffled, derive_seed
from constraintmatch.training.loop import choose_device
from constraintmatch.training.run_folder import write_result

TRAINED_ON = {"test": "train+val", "val": "train"}
COLUMNS = {"knn": 7, "neighbours": 11, "k_means": 9, "scan_head": 10, "epochs": 8, "steps": 9, "ms": 8, "seconds": 9}


@dataclass(frozen=True)
class Task:
    """A pretext method with options of its own and of its view, under a name."""

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    view: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sets:
    """The images to learn from and those to judge by, with what is known of the data set."""

    row: DataSet
    images: ImageSet
    held_out: ImageSet
    split: str

    def views(self, task: Task) -> ViewChoice:
        own = views.contrastive(**{"flip": self.row.flip, **task.view}) if task.view else None
        return ViewChoice(self.row.flip, tuple(sorted(self.row.without)), own_contrastive=own)


# What is asked


def tasks_of(names: Sequence[str], variants: Sequence[str]) -> list[Task]:
    """The plain tasks, then the variants; two of one name are an error."""
    tasks = [Task(name, name) for name in names] + [variant(words) for words in variants]
    for task in tasks:
        check(task)
    if len({task.name for task in tasks}) < len(tasks):
        raise InputError("two tasks have the same name; give each variant one of its own")
    return tasks


def check(task: Task) -> None:
    """A method that is no pretext task, an unknown option or an impossible setting is told before any training."""
    own = method_arguments(task.method)
    if not {"epochs", "images_per_step"} <= own.keys() or "n_clusters" in own or "min_confidence" in own:
        raise InputError(f"{task.method} is no pretext task; simclr and byol are")
    if "epochs" in task.options:
        raise InputError(f"{task.name}: give its epochs by --epochs {task.name}={task.options['epochs']}")
    method_settings(task.method, split_options(task.method, task.options)[1])
    known = inspect.signature(views.contrastive).parameters
    if unknown := sorted(task.view.keys() - known.keys()):
        raise InputError(f"{task.name}: the view has no option {unknown[0]!r}; it has {', '.join(known)}")
    views.contrastive(**task.view)


def variant(words: str) -> Task:
    """The task of words like byol-fast:byol.lr=0.2,views.scale=(0.1,1.0)."""
    name, _, rest = words.partition(":")
    method, options, view = "", {}, {}
    for word in filter(None, re.split(r",(?=\w+\.\w+=)", rest)):
        found = re.fullmatch(r"(\w+)\.(\w+)=(.+)", word)
        if found is None or found[1] not in ("views", method or found[1]):
            raise InputError(
                f"variant {words!r}: {word!r} is not METHOD.OPTION=VALUE of one method, or views.OPTION=VALUE"
            )
        if found[1] == "views":
            view[found[2]] = literal(found[3])
        else:
            method = found[1]
            options[found[2]] = literal(found[3])
    if not name or not method:
        raise InputError(f"variant {words!r}: write NAME:METHOD.OPTION=VALUE, with an option of a method at least")
    return Task(name, method, options, view)


def literal(text: str) -> Any:
    """A number, tuple or truth value; other words stand for themselves."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def epochs_given(words: Sequence[str], tasks: Sequence[Task]) -> dict[str, int]:
    """Epochs by task from words like 370 (for all) or byol=370."""
    given: dict[str, int] = {}
    for word in words:
        name, equals, number = word.rpartition("=")
        if not number.isdigit() or int(number) < 1 or (equals and name not in {task.name for task in tasks}):
            raise InputError(f"--epochs {word}: write a number, or the name of a task, = and a number")
        given |= {task.name: int(number) for task in tasks if not equals or task.name == name}
    return given


# The training


def train(task: Task, sets: Sets, images: ImageSet, epochs: int, changes: Mapping[str, Any]) -> Trained:
    """The task on these images from fresh weights; what was compiled for another is forgotten first.

    Without that the ninth network of a process would run uncompiled: the compiler keeps eight of a kind.
    """
    torch.compiler.reset()
    row = sets.row
    seed = derive_seed(changes["seed"], "model")
    model = build_model(
        n_clusters=0,
        side=row.side,
        channels=row.channels,
        backbone=row.backbone,
        mean=row.mean,
        std=row.std,
        seed=seed,
    )
    options = {**task.options, "epochs": epochs, **changes}
    config = make_config(task.method, options, start=model, views=sets.views(task))
    return running.train(images, None, config, Context(reporter=Lines(Console(width=200), every=30)))


def batch_of(task: Task, n_images: int) -> Shuffled:
    """The batches that the task will see: their size and their number in an epoch."""
    default = method_arguments(task.method)["images_per_step"]
    return Shuffled(n_images, task.options.get("images_per_step", default), seed=0)


def warm_ms(task: Task, sets: Sets, steps: int, changes: Mapping[str, Any]) -> float:
    """Milliseconds of a step when everything is compiled and captured; the first half of the steps is not counted."""
    rows = batch_of(task, len(sets.images))
    few = sets.images.take(np.arange(min(len(sets.images), steps * rows.batch)))  # an epoch begins with an upload
    epochs = -(-steps // batch_of(task, len(few)).steps_per_epoch)
    log = train(task, sets, few, epochs, {**changes, "log_every": max(1, steps // 2)}).log
    return ms_per_step(log)


def ms_per_step(log: Sequence[Mapping[str, Any]]) -> float:
    """Milliseconds of a step between the first line of the log and the last."""
    lines = [entry for entry in log if entry["kind"] == "training"]
    return float(1e3 * (lines[-1]["seconds"] - lines[0]["seconds"]) / max(1, lines[-1]["step"] - lines[0]["step"]))


# The judgement


def judge(model: ClusterModel, sets: Sets, n_clusters: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Scores of the held-out images, and the share of neighbours with one label among the images learnt from.

    Both for the features and, where the model has them, for the projections: neighbours and k-means may be better in
    the one or in the other, and every head reads the features.
    """
    labels, asked = sets.images.labels, sets.held_out.labels
    assert labels is not None  # every data set by name has them
    assert asked is not None
    features, others = (embed(model, of, device=device) for of in (sets.images, sets.held_out))
    found: dict[str, Any] = {"knn": knn_accuracy(features, labels, others, asked, device=device)}
    for space, known, test in spaces(model, features, others, device):
        near = nearest_neighbours(known, 20, device=device)
        found[f"neighbours_{space}"] = neighbour_consistency(near, labels)
        found[f"k_means_{space}"] = k_means_accuracy(test, asked, n_clusters, seed)
        head = scan_head(features, near, n_clusters, seed, device)
        found[f"scan_head_{space}"] = accuracy(asked, (others @ head[0].T + head[1]).argmax(1))
    return found


def spaces(
    model: ClusterModel, features: NDArray[np.float32], others: NDArray[np.float32], device: torch.device
) -> Iterator[tuple[str, NDArray[np.float32], NDArray[np.float32]]]:
    """The features and, of a model that has a projection head, its outputs."""
    yield "features", features, others
    if model.projection is not None:
        with torch.inference_mode():
            known, test = (model.projection(torch.from_numpy(x).to(device)).cpu().numpy() for x in (features, others))
        yield "projections", known, test


def k_means_accuracy(features: NDArray[np.float32], labels: Any, n_clusters: int, seed: int, inits: int = 10) -> float:
    """ACC of the k-means clusters of the normalised features: the tightest of ten."""
    from sklearn.cluster import KMeans

    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    return accuracy(labels, KMeans(n_clusters, n_init=inits, random_state=seed).fit_predict(unit))


def scan_head(
    features: NDArray[np.float32], near: NDArray[np.int64], n_clusters: int, seed: int, device: torch.device
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Weights (k, d) and biases (k,) of the head that SCAN would begin with."""
    steps = min(1_500, max(300, 30 * len(features) // 1_000))  # as SCAN's
    inputs, partners = (torch.from_numpy(x).to(device) for x in (features, near))
    best = best_linear_head(inputs, partners, n_clusters, n_heads=20, steps=steps, seed=seed)
    return best.weight.cpu().numpy(), best.bias.cpu().numpy()


# One task after the other


def run_task(task: Task, sets: Sets, epochs: int | None, asked: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The task timed, trained and judged: what its JSON holds."""
    device = choose_device(asked.device)
    changes = {"seed": seed, "device": str(device)}
    rows = batch_of(task, len(sets.images))
    began = time.monotonic()
    warm = None if epochs else warm_ms(task, sets, asked.warm_steps, changes)
    if warm is not None:
        epochs = max(1, round(1e3 * asked.seconds / warm / rows.steps_per_epoch))
    assert epochs is not None
    steps = epochs * rows.steps_per_epoch
    print(f"{task.name}: {epochs:,} epochs, {steps:,} steps" + (f" of {warm:.2f} ms" if warm else ""), flush=True)
    timed = time.monotonic()
    model, log = train(task, sets, sets.images, epochs, {**changes, "log_every": max(1, min(500, steps // 4))})
    trained = time.monotonic()
    ms = ms_per_step(log)
    if asked.models:
        keep(model, asked.models / file_name(task, sets, seed), request_of(task, sets, epochs, asked, seed), steps)
    found = judge(model.to(device), sets, sets.row.n_clusters, seed, device)
    times = {
        "ms_warm": None if warm is None else round(warm, 3),
        "ms": round(ms, 3),
        "seconds": round(ms * steps / 1e3, 1),  # of the steps alone
        "training_seconds": round(trained - timed, 1),  # with compilation
        "timing_seconds": round(timed - began, 1),
        "judging_seconds": round(time.monotonic() - trained, 1),
    }
    curve = [{key: entry[key] for key in ("step", "loss", "lr")} for entry in log if entry["kind"] == "training"]
    return {"epochs": epochs, "steps": steps, "scores": found, **times, "curve": curve}


def judge_kept(sets: Sets, asked: argparse.Namespace) -> tuple[Task, dict[str, Any]]:
    """A finished model's task and what its JSON holds: judged now, timed by the record of its training."""
    record, model = read_json(asked.record), load_model(asked.kept)
    last, steps = model.config.trained[-1], record.get("steps", record["settings"]["steps"])  # where it stood at first
    if (record["stage"], steps) != (last["method"], last["steps"]) or last["data"]["name"] != sets.row.name:
        raise InputError(f"{asked.record}: is not the record of {asked.kept}, or not of {sets.row.name}")
    if record["data"]["split"] != TRAINED_ON[sets.split]:
        raise InputError(f"{asked.kept}: was trained on {record['data']['split']}, which is not judged by {sets.split}")
    task = Task(last["method"], last["method"])
    epochs = steps // batch_of(task, len(sets.images)).steps_per_epoch
    device = choose_device(asked.device)
    seconds = record["training_seconds"]
    result = {
        **request_of(task, sets, epochs, asked, last["seed"]),
        "epochs": epochs,
        "steps": steps,
        "scores": judge(model.to(device), sets, sets.row.n_clusters, last["seed"], device),
        "ms": round(1e3 * seconds / steps, 3),
        "seconds": seconds,  # with compilation: the record has no other
        "training_seconds": seconds,
        "trained_in": record["environment"],
    }
    return task, result


def keep(model: ClusterModel, folder: Path, request: Mapping[str, Any], steps: int) -> None:
    """Write the model folder in half precision, with what it was trained by."""
    settings = {name: request["settings"][name] for name in ("lr", "seed")}
    stage = {"method": request["method"], "data": request["data"], "steps": steps, **settings}
    model.config = replace(model.config, trained=({**stage, "arguments": request["arguments"]},))
    save_model(model, folder, half=True)


def request_of(task: Task, sets: Sets, epochs: int | None, asked: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Everything that decides the result, as JSON gives it back."""
    own, changes = split_options(task.method, task.options)
    defaults = {name: value for name, value in method_arguments(task.method).items() if name != "epochs"}
    settings = method_settings(task.method, {**changes, "seed": seed}).request()
    settings.pop("steps")  # they follow from the epochs
    return {
        "task": task.name,
        "method": task.method,
        "arguments": {**defaults, **own},
        "settings": settings,
        "view": {name: list(value) if isinstance(value, tuple) else value for name, value in task.view.items()},
        "data": {"name": sets.row.name, "images": len(sets.images), "held_out": sets.split},
        "asked": {"epochs": epochs} if epochs else {"seconds": asked.seconds},
    }


def file_name(task: Task, sets: Sets, seed: int) -> str:
    return f"pretext-{sets.row.name}-{task.name}-seed{seed}"


def finished(path: Path, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the file holds; None if it is not there, and an error where it is the result of something else."""
    if not path.is_file():
        return None
    stored = read_json(path)
    if odd := [key for key, value in request.items() if stored.get(key) != value]:
        said = f"{odd[0]} was {stored.get(odd[0])}, is {request[odd[0]]}"
        raise InputError(f"{path}: is of another request ({said}); choose another --out, or name the variant anew")
    return dict(stored)


def shown(task: Task, seed: int, result: Mapping[str, Any]) -> Iterator[str]:
    """A line of the table for each space."""
    scores = result["scores"]
    for space in ("features", "projections"):
        if f"neighbours_{space}" not in scores:
            continue
        values = [scores["knn"], *(scores[f"{name}_{space}"] for name in ("neighbours", "k_means", "scan_head"))]
        cells = "".join(f"{100 * value:{width}.1f}" for value, width in zip(values, COLUMNS.values(), strict=False))
        yield (
            f"{task.name:20}{seed:5}  {space:12}{cells}"
            f"{result['epochs']:8,}{result['steps']:9,}{result['ms']:8.2f}{result['seconds']:9.1f}"
        )


def compare(asked: argparse.Namespace) -> None:
    tasks = tasks_of(asked.tasks, asked.variant)
    epochs = epochs_given(asked.epochs, tasks)
    given = {"data_dir": asked.data_dir} if asked.data_dir else {}
    images, held_out = (
        load_dataset(asked.name, part, **given) for part in (TRAINED_ON[asked.held_out], asked.held_out)
    )
    sets = Sets(DATASETS[asked.name], images, held_out, asked.held_out)
    rows: list[str] = []
    if asked.kept:
        task, result = judge_kept(sets, asked)
        write_result(asked.out / f"{file_name(task, sets, result['settings']['seed'])}.json", result)
        rows += shown(task, result["settings"]["seed"], result)
    for seed in asked.seeds:
        for task in tasks:
            target = asked.out / f"{file_name(task, sets, seed)}.json"
            request = request_of(task, sets, epochs.get(task.name), asked, seed)
            result = finished(target, request)
            if result is None:
                result = {**request, **run_task(task, sets, epochs.get(task.name), asked, seed)}
                write_result(target, result)
                print("\n".join(shown(task, seed, result)), flush=True)
            rows += shown(task, seed, result)
    print(f"{'task':20}{'seed':>5}  {'in':12}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    print("\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(DATASETS))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tasks", nargs="*", default=[], help=f"of {', '.join(PRETEXTS)}")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME:METHOD.OPTION=VALUE,…")
    parser.add_argument("--seconds", type=float, default=60.0, help="of steps, for each task")
    parser.add_argument("--epochs", nargs="*", default=[], help="instead of seconds: a number, or task=number")
    parser.add_argument("--warm-steps", type=int, default=60, help="to time a step by")
    parser.add_argument("--held-out", choices=sorted(TRAINED_ON), default="test")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=Path("results/pretext"))
    parser.add_argument("--models", type=Path, help="folder for the models, in half precision")
    parser.add_argument("--kept", type=Path, help="model folder to judge, with --record: the JSON of its stage")
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    if not asked.tasks and not asked.variant and not asked.kept:
        parser.error("name --tasks or a --variant")
    if (asked.kept is None) != (asked.record is None):
        parser.error("--kept and --record go together")
    if not asked.seconds > 0 or asked.warm_steps < 2:
        parser.error("--seconds must be positive and --warm-steps 2 or more")
    try:
        compare(asked)
    except InputError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
