"""The label-efficiency curve: its page is current and says what the results say; its benchmark loses nothing."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import ROOT, script

from constraintmatch._internal.files import folder_lock, read_json
from constraintmatch.models.cluster_model import build_model, save_model

pytestmark = pytest.mark.usefixtures("narrow_networks")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return script("docs", "make_label_efficiency")


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
    trained = {**curve("chosen-which", [0.8, 0.87], steps=0), "options": {"steps": 300}}
    text = maker.page([curve("chosen-which", [0.8, 0.85], steps=0), trained])
    assert "| answered | chosen “which of these?”, head alone | chosen “which of these?”, head alone, trained |" in text


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


def test_a_curve_goes_on_to_larger_budgets_and_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = script("benchmarks", "label_efficiency")
    save_model(build_model(n_clusters=10, side=8, channels=1, backbone="tiny", seed=3), tmp_path / "start")

    def points(out: str, budgets: str, *more: str) -> list[dict[str, float]]:
        fixed = [
            "digits",
            "--model",
            str(tmp_path / "start"),
            "--steps",
            "0",
            "--ways",
            "chosen-which",
            "--errors",
            "0",
        ]
        place = ["--budgets", budgets, "--out", str(tmp_path / out), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["label_efficiency.py", *fixed, *place, *more])
        benchmark.main()
        found = read_json(tmp_path / out / "questions-digits-chosen-which-head-error0.json")["points"]
        return [{key: value for key, value in point.items() if key != "seconds"} for point in found]

    assert [point["answers"] for point in points("parts", "15,30")] == [0, 15, 30]
    benchmark.features_of.cache_clear()  # as another process would find it
    with monkeypatch.context() as patch:
        patch.setattr(benchmark.Frozen, "of", lambda *_, **__: pytest.fail("the features are kept"))
        longer = points("parts", "15,30,40")
    assert longer == points("whole", "15,30,40")
    before = (tmp_path / "parts" / "questions-digits-chosen-which-head-error0.json").read_bytes()
    capsys.readouterr()
    points("parts", "15,30,40")
    assert "finished before" in capsys.readouterr().out
    save_model(build_model(n_clusters=10, side=8, channels=1, backbone="tiny", seed=4), tmp_path / "other")
    with pytest.raises(SystemExit, match="a curve with another start"):
        points("parts", "15", "--model", str(tmp_path / "other"))
    with folder_lock(tmp_path / "parts" / "answers" / "questions-digits-chosen-which-head-error0"):
        points("parts", "15,30,40,50")
    assert "another process is working at it" in capsys.readouterr().out
    assert (tmp_path / "parts" / "questions-digits-chosen-which-head-error0.json").read_bytes() == before


def test_a_head_alone_is_trained_where_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script("benchmarks", "label_efficiency")
    save_model(build_model(n_clusters=10, side=8, channels=1, backbone="tiny", seed=3), tmp_path / "start")
    asked = ["digits", "--model", str(tmp_path / "start"), "--steps", "0", "--ways", "chosen-which", "--errors", "0"]
    place = ["--budgets", "30", "--out", str(tmp_path), "--device", "cpu"]
    found = {}
    for kind, more in (("head", []), ("trained-head", ["--head-steps", "40"])):
        monkeypatch.setattr(sys, "argv", ["label_efficiency.py", *asked, *place, *more])
        benchmark.main()
        found[kind] = read_json(tmp_path / f"questions-digits-chosen-which-{kind}-error0.json")
    told, trained = found["head"], found["trained-head"]
    assert told["options"] == {}
    assert trained["options"]["steps"] == 40
    assert [point["answers"] for point in trained["points"]] == [0, 30]
    assert trained["points"][0]["acc"] == told["points"][0]["acc"]
    one, other = ([point["points"][1][key] for key in ("acc", "nmi", "ari")] for point in (trained, told))
    assert one != other


def test_the_last_training_of_a_curve_may_be_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script("benchmarks", "label_efficiency")
    save_model(build_model(n_clusters=10, side=8, channels=1, backbone="tiny", seed=3), tmp_path / "start")
    steps: list[int] = []
    train = benchmark.train

    def watched(images: Any, pairs: Any, *around: Any) -> Any:
        steps.append(around[0].settings.steps)
        return train(images, pairs, *around)

    monkeypatch.setattr(benchmark, "train", watched)
    asked = ["digits", "--model", str(tmp_path / "start"), "--ways", "chosen-which", "--errors", "0", "--anchors"]
    place = ["--steps", "1", "--last-steps", "2", "--budgets", "8,16", "--out", str(tmp_path), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["label_efficiency.py", *asked, *place])
    benchmark.main()
    assert steps == [1, 2]
    found = read_json(tmp_path / "questions-digits-chosen-which-anchored-last2-error0.json")
    assert (found["anchors"], found["last_steps"], found["budgets"]) == ("apart", 2, [8, 16])
    monkeypatch.setattr(sys, "argv", ["label_efficiency.py", *asked, *place, "--steps", "0"])
    with pytest.raises(SystemExit):
        benchmark.main()
