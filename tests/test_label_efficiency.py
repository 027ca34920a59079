"""The page of the label-efficiency curve is current and says what the results say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_label_efficiency", ROOT / "docs" / "make_label_efficiency.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def curve(way: str, accuracies: list[float], error: float = 0.0, steps: int = 1_000) -> dict[str, object]:
    points = [{"answers": n, "acc": acc} for n, acc in zip((0, 50, 500), accuracies, strict=False)]
    return {"data": "cifar10", "way": way, "error": error, "steps": steps, "points": points}


def test_the_page_is_current(maker: ModuleType) -> None:
    page = (ROOT / "docs" / "label-efficiency.md").read_text(encoding="utf-8")
    assert maker.page(maker.runs()) == page, "run python docs/make_label_efficiency.py"


def test_the_table_has_a_column_for_each_way_and_a_dash_where_nothing_ran(maker: ModuleType) -> None:
    text = maker.page([curve("random-pair", [0.8, 0.85, 0.9]), curve("chosen-which", [0.8, 0.912])])
    assert "| answered | random pairs | chosen “which of these?” |" in text
    assert "| 50 | 85.0 | 91.2 |" in text
    assert "| 500 | 90.0 | – |" in text


def test_a_curve_without_training_is_one_of_its_own(maker: ModuleType) -> None:
    text = maker.page([curve("chosen-which", [0.8, 0.9]), curve("chosen-which", [0.8, 0.85], steps=0)])
    assert "| answered | chosen “which of these?” | chosen “which of these?”, head alone |" in text
    assert "| 50 | 90.0 | 85.0 |" in text


def test_a_curve_from_another_start_is_one_of_its_own(maker: ModuleType) -> None:
    other = {**curve("chosen-which", [0.9, 0.95]), "start_name": "byol"}
    text = maker.page([curve("chosen-which", [0.8, 0.85]), other])
    assert "| answered | chosen “which of these?” | chosen “which of these?”, from BYOL |" in text
    assert "| 50 | 85.0 | 95.0 |" in text


def test_each_set_and_error_rate_has_its_figure(maker: ModuleType, tmp_path: Path) -> None:
    found = [curve("random-pair", [0.8, 0.85]), curve("random-pair", [0.8, 0.83], error=0.05)]
    maker.draw(found, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    stems = ("questions-cifar10-error0", "questions-cifar10-error0.05")
    assert names == sorted(f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg"))
    assert all(f"curves/{name}" in maker.page(found) for name in names if name.endswith("png"))
