"""Images and a few same-or-different answers in, a clustering model out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from constraintmatch.constraints import Constraints
    from constraintmatch.datasets import load_dataset
    from constraintmatch.errors import InputError
    from constraintmatch.estimator import ConstraintMatch
    from constraintmatch.images import ImageSet
    from constraintmatch.models import ClusterModel, load_model

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
    "ClusterModel": "models",
    "ConstraintMatch": "estimator",
    "Constraints": "constraints",
    "ImageSet": "images",
    "InputError": "errors",
    "load_dataset": "datasets",
    "load_model": "models",
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
