"""Files beside the package, imported by their path: the generators of the documents, and the benchmarks."""

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["ROOT", "script"]

ROOT = Path(__file__).resolve().parent.parent


def script(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
