"""Images and a few same-or-different answers in, a clustering model out."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from constraintmatch.constraints import Constraints
    from constraintmatch.errors import InputError
    from constraintmatch.estimator import ConstraintMatch
    from constraintmatch.images import ImageSet
    from constraintmatch.models import ClusterModel, load_model

__all__ = ["ClusterModel", "ConstraintMatch", "Constraints", "ImageSet", "InputError", "__version__", "load_model"]

try:
    __version__ = version("constraintmatch")
except PackageNotFoundError:  # a copy of the source without an installation
    __version__ = "0+unknown"

# Loaded when first asked for: `import constraintmatch` stays quick and without torch.
_HOMES = {
    "ClusterModel": "models",
    "ConstraintMatch": "estimator",
    "Constraints": "constraints",
    "ImageSet": "images",
    "InputError": "errors",
    "load_model": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
