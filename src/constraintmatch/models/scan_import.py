"""Checkpoints in SCAN's key layout (after SCAN, self-labelling or SimCLR), turned into model folders.

A file is opened with weights-only unpickling, so nothing in it can run. Names in errors are the file's own.
"""

import pickle
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_new_folder
from constraintmatch.data.datasets import DATASETS, DataSet, Pickled
from constraintmatch.models.cluster_model import ClusterModel, ModelConfig, list_misfits, save_model, unfilled_model

_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_NORMALISATIONS = {"cifar10": _CIFAR, "cifar100-20": _CIFAR}  # SCAN's where it is not the data set's row that has it
_DEPTHS: dict[tuple[int, ...], str] = {(2, 2, 2, 2): "resnet18", (3, 4, 6, 3): "resnet34"}  # by blocks in each layer


def import_scan(
    file: Path | str, data: str, out: Path | str, *, head: int | None = None, half: bool = False
) -> ClusterModel:
    """The model in a SCAN-format checkpoint of a data set, also written to a new model folder (fp16 when `half`).

    Of several cluster heads it takes `head`; without one the head that the file calls the best, or the first.
    """
    known = {name: row for name, row in DATASETS.items() if row.backbone in _DEPTHS.values()}
    if data not in known:
        raise InputError(f"{data}: SCAN checkpoints can be imported for {', '.join(known)}")
    file, out, row = Path(file), Path(out), known[data]
    check_new_folder(out)
    weights, heads, chosen = _read_head(file, head)
    projects = any(name.startswith("contrastive_head.") for name in weights)
    method = "simclr" if projects and not heads else "scan"
    model = _make_unfilled(file, row, weights, None if method == "simclr" else f"cluster_head.{chosen}.weight")
    names = {name: _scan_name(name, chosen) for name in model.state_dict()}
    expected = {names[name]: value for name, value in model.state_dict().items()}
    for name, value in expected.items():
        # counts of batches, which old files lack and fp16 has rounded; nothing is computed from them
        if name.endswith(".num_batches_tracked") and getattr(weights.get(name), "dtype", None) != torch.int64:
            weights[name] = torch.zeros_like(value)
    broken = [name for name in sorted(expected.keys() & weights.keys()) if not _finite(weights[name], expected[name])]
    if misfits := list_misfits(expected, weights, {"not finite numbers": broken}):
        raise InputError(f"{file}: not the network of a SCAN checkpoint ({misfits})")
    model.load_state_dict({name: weights[theirs] for name, theirs in names.items()})
    stage: dict[str, Any] = {"method": f"{method} (imported)", "file": file.name}
    model.config = replace(model.config, trained=({**stage, "head": chosen} if len(heads) > 1 else stage,))
    save_model(model, out, half=half)
    return model.eval()


def _unpickle(file: Path) -> Any:
    """What torch's weights-only unpickler makes of the file."""
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    numbers = [(_number, "numpy.core.multiarray.scalar"), (_number, "numpy._core.multiarray.scalar")]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([*numbers, (Pickled, "numpy.dtype")]):
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


def _number(kind: Pickled, raw: bytes) -> int | float:
    """The value of a pickled NumPy number: a best head or a best loss is often one."""
    if kind.given[0] not in ("i4", "i8", "f4", "f8"):
        raise pickle.UnpicklingError("not a plain number")
    value: int | float = np.frombuffer(raw, f"<{kind.given[0]}").item()
    return value


def _read_head(file: Path, head: int | None) -> tuple[dict[str, Any], list[int], int]:
    """The weights of one head by SCAN's names, all heads, and which it is; files put `module.` before names, or not."""
    content = _unpickle(file)
    nested = isinstance(content, dict) and isinstance(content.get("model"), dict)
    state = content["model"] if nested else content
    if not isinstance(state, dict) or not state:
        raise InputError(f"{file}: no weights by name in it, neither at its top nor under 'model'")
    keys = [key for key in state if nested or key != "head"]
    weights = {str(key).removeprefix("module.").replace(".downsample.", ".shortcut."): state[key] for key in keys}
    if len(weights) < len(keys):
        raise InputError(f"{file}: names some weights twice, with and without 'module.' or as shortcut and downsample")
    heads = sorted({int(match[1]) for name in weights if (match := re.match(r"cluster_head\.(\d+)\.", name))})
    wanted = content.get("head") if head is None else head
    wanted = wanted.tolist() if isinstance(wanted, Tensor) else wanted
    if wanted is not None and wanted not in heads:
        there = f"choose --head among {', '.join(map(str, heads))}" if heads else "it has no cluster heads"
        raise InputError(f"{file}: cluster head {wanted} is not in it; {there}")
    chosen = int(wanted or 0)
    others = {f"cluster_head.{other}.{part}" for other in heads if other != chosen for part in ("weight", "bias")}
    return {name: value for name, value in weights.items() if name not in others}, heads, chosen


def _make_unfilled(file: Path, row: DataSet, weights: Mapping[str, Any], head: str | None) -> ClusterModel:
    """A model of the right shape for the checkpoint, without its weights; `head` names those of its cluster head."""
    depth = _depth(weights)
    if depth not in (None, row.backbone):
        raise InputError(f"{file}: holds a {depth}, but {row.name} goes with {row.backbone}; name its own data set")
    mean, std = _NORMALISATIONS.get(row.name, (row.mean, row.std))
    clusters = 0 if head is None else _rows(weights, head, row.n_clusters)
    if clusters == 1:
        raise InputError(f"{file}: its cluster head has a single cluster, which holds everything")
    projection = 0 if clusters else _rows(weights, "contrastive_head.2.weight", 128)
    return unfilled_model(ModelConfig(row.backbone, row.side, row.channels, mean, std, clusters, projection), file)


def _depth(names: Collection[str]) -> str | None:
    """The network that the blocks form; None if they form none: the missing names then say more."""
    if any(".conv3." in name for name in names):
        return "ResNet-50 or deeper"
    blocks = {match[0] for name in names if (match := re.match(r"backbone\.layer([1-4])\.\d+\.", name))}
    return _DEPTHS.get(tuple(sum(f".layer{layer}." in block for block in blocks) for layer in range(1, 5)))


def _rows(weights: Mapping[str, Any], name: str, otherwise: int) -> int:
    """How many outputs a layer has; its other problems are listed with those of all keys."""
    weight = weights.get(name)
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) else otherwise


def _scan_name(name: str, head: int) -> str:
    name = re.sub(r"^head\.", f"cluster_head.{head}.", name)
    return re.sub(r"^projection\.", "contrastive_head.", name).replace(".downsample.", ".shortcut.")


def _finite(value: Any, like: Tensor) -> bool:
    plain = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    if plain and value.shape != like.shape:  # which is said of it; to look at it could take all memory
        return True
    return plain and value.is_floating_point() == like.is_floating_point() and bool(value.isfinite().all())
