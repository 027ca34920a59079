"""Checkpoints in SCAN's key layout (after SCAN, self-labelling or SimCLR), turned into model folders.

A file is opened with weights-only unpickling, so nothing in it can run. Names in errors are the file's own.
"""

import pickle
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_new_folder
from constraintmatch.data.datasets import DATASETS, DataSet
from constraintmatch.models.cluster_model import ClusterModel, ModelConfig, save_model, unfilled_model

__all__ = ["import_scan"]

_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_NORMALISATIONS = {"cifar10": _CIFAR, "cifar100-20": _CIFAR}  # SCAN's where it is not the data set's row that has it
_DEPTHS: dict[tuple[int, ...], str] = {(2, 2, 2, 2): "resnet18", (3, 4, 6, 3): "resnet34"}  # by blocks in each layer


def import_scan(
    file: Path | str, data: str, out: Path | str, *, head: int | None = None, half: bool = False
) -> ClusterModel:
    """The model in a SCAN-format checkpoint of a data set, also written to a new model folder (fp16 when `half`).

    Of several cluster heads it takes `head`; without one the head that the file calls the best, or the first.
    """
    file, out, row = Path(file), Path(out), _row(data)
    check_new_folder(out)
    found = _checkpoint(file, _unpickle(file), head)
    model = _unfilled(file, row, found)
    names = {name: _scan_name(name, found.head) for name in model.state_dict()}
    expected = {names[name]: value for name, value in model.state_dict().items()}
    weights = {**found.weights, **_fresh_counters(found.weights, expected)}
    _check_fit(file, weights, expected)
    model.load_state_dict({name: weights[theirs] for name, theirs in names.items()})
    stage: dict[str, Any] = {"method": f"{found.method} (imported)", "file": file.name}
    model.config = replace(model.config, trained=({**stage, "head": found.head} if found.n_heads > 1 else stage,))
    save_model(model, out, half=half)
    return model.eval()


def _row(data: str) -> DataSet:
    known = [name for name, row in DATASETS.items() if row.backbone in _DEPTHS.values()]
    if data not in known:
        raise InputError(f"{data}: SCAN checkpoints can be imported for {', '.join(known)}")
    return DATASETS[data]


def _fresh_counters(weights: Mapping[str, Any], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros for the counts of batches that old files lack and fp16 has rounded; nothing is computed from them."""
    counters = [name for name in expected if name.endswith(".num_batches_tracked")]
    fresh = [name for name in counters if getattr(weights.get(name), "dtype", None) != torch.int64]
    return {name: torch.zeros_like(expected[name]) for name in fresh}


@dataclass(frozen=True)
class _Checkpoint:
    """The weights by SCAN's names, those of other cluster heads left out."""

    weights: Mapping[str, Any]
    head: int
    n_heads: int

    @property
    def method(self) -> str:
        projects = any(name.startswith("contrastive_head.") for name in self.weights)
        return "simclr" if projects and not self.n_heads else "scan"


def _unpickle(file: Path) -> Any:
    """What torch's weights-only unpickler makes of the file."""
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    numbers = [(_number, "numpy.core.multiarray.scalar"), (_number, "numpy._core.multiarray.scalar")]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([*numbers, (_NumberType, "numpy.dtype")]):
            warnings.simplefilter("ignore")  # of foreign pickles, which are refused anyway
            return torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError:
        raise InputError(f"{file}: no permission to read it") from None
    except Exception as error:  # broken bytes make the unpickler raise nearly anything
        asked = re.search(r"GLOBAL ([\w.]+)|(TorchScript)", str(error))
        if asked is None:
            raise InputError(f"{file}: not a torch checkpoint, or a broken one; fetch it again") from None
        raise InputError(
            f"{file}: holds more than weights ({asked[1] or asked[2]}) and is not opened, as it could run code; "
            "where it was made, save the state_dict() alone"
        ) from None


class _NumberType:
    """Takes the place of a pickled NumPy type, so that not even NumPy acts on what the file says."""

    def __init__(self, name: object, *_: object) -> None:
        self.name = name

    def __setstate__(self, _: object) -> None:
        return


def _number(kind: _NumberType, raw: bytes) -> int | float:
    """The value of a pickled NumPy number: a best head or a best loss is often one."""
    if kind.name not in ("i4", "i8", "f4", "f8"):
        raise pickle.UnpicklingError("not a plain number")
    value: int | float = np.frombuffer(raw, f"<{kind.name}").item()
    return value


def _checkpoint(file: Path, content: Any, head: int | None) -> _Checkpoint:
    """The weights of one head: flat or under `model`, with `module.` before the names or not."""
    nested = isinstance(content, dict) and isinstance(content.get("model"), dict)
    state = content["model"] if nested else content
    if not isinstance(state, dict) or not state:
        raise InputError(f"{file}: no weights by name in it, neither at its top nor under 'model'")
    best = content.get("head")
    keys = [key for key in state if nested or key != "head"]
    weights = {str(key).removeprefix("module.").replace(".downsample.", ".shortcut."): state[key] for key in keys}
    if len(weights) < len(keys):
        raise InputError(f"{file}: names some weights twice, with and without 'module.' or as shortcut and downsample")
    heads = sorted({int(match[1]) for name in weights if (match := re.match(r"cluster_head\.(\d+)\.", name))})
    chosen = _choose_head(file, heads, best if head is None else head)
    others = {f"cluster_head.{other}.{part}" for other in heads if other != chosen for part in ("weight", "bias")}
    return _Checkpoint({name: weights[name] for name in weights.keys() - others}, chosen, len(heads))


def _choose_head(file: Path, heads: list[int], wanted: Any) -> int:
    wanted = wanted.tolist() if isinstance(wanted, Tensor) else wanted
    if wanted is not None and wanted not in heads:
        there = f"choose --head among {', '.join(map(str, heads))}" if heads else "it has no cluster heads"
        raise InputError(f"{file}: cluster head {wanted} is not in it; {there}")
    return int(wanted or 0)


def _unfilled(file: Path, row: DataSet, found: _Checkpoint) -> ClusterModel:
    """A model of the right shape for the checkpoint, with weights still to come."""
    depth = _depth(found.weights)
    if depth not in (None, row.backbone):
        raise InputError(f"{file}: holds a {depth}, but {row.name} goes with {row.backbone}; name its own data set")
    mean, std = _NORMALISATIONS.get(row.name, (row.mean, row.std))
    clusters = 0 if found.method == "simclr" else _rows(found, f"cluster_head.{found.head}.weight", row.n_clusters)
    if clusters == 1:
        raise InputError(f"{file}: its cluster head has a single cluster, which holds everything")
    projection = 0 if clusters else _rows(found, "contrastive_head.2.weight", 128)
    return unfilled_model(
        ModelConfig(row.backbone, row.side, row.channels, mean, std, n_clusters=clusters, projection=projection)
    )


def _depth(names: Collection[str]) -> str | None:
    """The network that the blocks make up; None where they make up none, and the missing names say more."""
    if any(".conv3." in name for name in names):
        return "ResNet-50 or deeper"
    blocks = {match[0] for name in names if (match := re.match(r"backbone\.layer([1-4])\.\d+\.", name))}
    return _DEPTHS.get(tuple(sum(f".layer{layer}." in block for block in blocks) for layer in range(1, 5)))


def _rows(found: _Checkpoint, name: str, otherwise: int) -> int:
    """How many outputs a layer has; what else is wrong with it is told with all other keys."""
    weight = found.weights.get(name)
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) else otherwise


def _scan_name(name: str, head: int) -> str:
    name = re.sub(r"^head\.", f"cluster_head.{head}.", name)
    return re.sub(r"^projection\.", "contrastive_head.", name).replace(".downsample.", ".shortcut.")


def _check_fit(file: Path, weights: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    both = sorted(expected.keys() & weights.keys())
    shapes = {name: tuple(getattr(weights[name], "shape", ())) for name in both}
    wrong = {
        "missing": sorted(expected.keys() - weights.keys()),
        "unexpected": sorted(weights.keys() - expected.keys()),
        "wrong shape": [f"{name} {shapes[name]}" for name in both if shapes[name] != tuple(expected[name].shape)],
        "not finite numbers": [name for name in both if not _finite(weights[name], expected[name])],
    }
    said = [f"{what}: {_some(keys)}" for what, keys in wrong.items() if keys]
    if said:
        raise InputError(f"{file}: not the network of a SCAN checkpoint ({'; '.join(said)})")


def _some(keys: list[str], limit: int = 8) -> str:
    return ", ".join(keys[:limit]) + (f" and {len(keys) - limit} more" if len(keys) > limit else "")


def _finite(value: Any, like: Tensor) -> bool:
    plain = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    return plain and value.is_floating_point() == like.is_floating_point() and bool(value.isfinite().all())
