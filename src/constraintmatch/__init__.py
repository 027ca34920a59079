"""Images and a few same-or-different answers in, a clustering model out."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read by torch: threads that spin take busy cores from the work

if TYPE_CHECKING:
    from constraintmatch._internal.errors import InputError
    from constraintmatch.constraints.constraint_set import Constraints
    from constraintmatch.data.datasets import load_dataset
    from constraintmatch.data.image_set import ImageSet
    from constraintmatch.estimator import ConstraintMatch
    from constraintmatch.models.cluster_model import ClusterModel, load_model

    __version__: str

__all__ = [
    "ClusterModel",
    "ConstraintMatch",
    "Constraints",
    "ImageSet",
    "InputError",
    "__version__",
    "load_dataset",
    "load_model",
]

# Loaded at first use: `import constraintmatch` stays quick and does not import torch.
_HOMES = {
    "ClusterModel": "models.cluster_model",
    "ConstraintMatch": "estimator",
    "Constraints": "constraints.constraint_set",
    "ImageSet": "data.image_set",
    "InputError": "_internal.errors",
    "load_dataset": "data.datasets",
    "load_model": "models.cluster_model",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("constraintmatch")
    except PackageNotFoundError:  # a copy of the source without an installation
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
