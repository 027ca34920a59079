"""Model cards: current for the folders that ship, true for any model, refused without a result."""

import json
import re
from pathlib import Path

import pytest
from paper_results import content, write
from scripts import ROOT, script
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch._internal.errors import InputError
from constraintmatch.data.datasets import DATASETS
from constraintmatch.models.cluster_model import build_model, save_model
from constraintmatch.paper.grids import Cell
from constraintmatch.paper.runner import Place, run_cell
from constraintmatch.pipeline.train import weights_hash

maker = script("docs", "make_cards")
card_text, write_card = maker.card_text, maker.write_card
FOLDERS = sorted(path.parent for path in (ROOT / "weights").glob("*/config.json"))
CARDS = [path / "README.md" for path in FOLDERS if "make_cards.py" in (path / "README.md").read_text("utf-8")]


@pytest.mark.parametrize("card", CARDS, ids=[path.parent.name for path in CARDS])
def test_the_card_of_a_shipped_model_is_current(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = card.parent.relative_to(ROOT)
    assert card.read_text(encoding="utf-8") == card_text(folder), f"run python docs/make_cards.py {folder}"


@pytest.fixture(scope="module")
def trained(small_batches: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    """A folder with results/ and models/ of one cell of digits."""
    folder, row = tmp_path_factory.mktemp("cards"), DATASETS["digits"]
    start = build_model(n_clusters=10, side=8, channels=1, backbone="tiny", mean=row.mean, std=row.std)
    save_model(start, folder / "starts" / "scan-digits")
    place = Place(None, folder / "starts", folder / "results", folder / "runs", folder / "models", {"device": "cpu"})
    run_cell(Cell("digits", "constraintmatch", 300, steps=3), place)
    run_cell(Cell("digits", "scan"), place)
    return folder


NAME = "digits-constraintmatch-300-fold0-steps3"


def test_the_stated_scores_are_those_that_evaluate_finds(trained: Path, tmp_path: Path) -> None:
    card = card_text(trained / "models" / NAME, trained / "results")
    stated = re.search(r"should say ACC (\S+), NMI (\S+), ARI (\S+),", card)
    assert stated
    words = ["evaluate", str(trained / "models" / NAME), "digits", "--json", str(tmp_path / "s.json")]
    assert CliRunner().invoke(cli.app, [*words, "--device", "cpu", "--quiet"]).exit_code == 0
    found = json.loads((tmp_path / "s.json").read_text())["scores"]
    assert [float(value) for value in stated.groups()] == [round(found[key], 4) for key in ("acc", "nmi", "ari")]
    assert f"constraintmatch evaluate {NAME} digits\n" in card


def test_the_card_says_what_the_model_was_made_of_and_no_path_of_this_machine(trained: Path) -> None:
    card = card_text(trained / "models" / NAME, trained / "results")
    assert "300 pairs drawn from their labels (fold 0)" in card
    assert "The training is cut: 3 of 20,000 steps." in card
    assert "`max_entropy` 0.2" in card
    assert re.search(r"\| constraintmatch +\| +3 \| +0\.05 \| +\d+ \|", card)
    assert "MIT" in card
    assert str(trained) not in card


def test_the_script_writes_the_card_of_a_start(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["make_cards.py", "--results", str(trained / "results")]
    monkeypatch.setattr("sys.argv", [*words, str(trained / "starts" / "scan-digits")])
    with pytest.raises(SystemExit):  # in full precision: not the weights that the result is of
        maker.main()
    half = trained / "half" / "scan-digits"
    row = DATASETS["digits"]
    start = build_model(n_clusters=10, side=8, channels=1, backbone="tiny", mean=row.mean, std=row.std)
    save_model(start, half, half=True)
    monkeypatch.setattr("sys.argv", [*words, str(half)])
    maker.main()
    assert "without labels or pairs" in (half / "README.md").read_text(encoding="utf-8")


def test_the_command_of_earlier_versions_names_the_script() -> None:
    refused = CliRunner().invoke(cli.app, ["card", "weights/scan-cifar10"])
    assert refused.exit_code == 2
    assert "card is now python docs/make_cards.py FOLDER" in refused.stderr


def test_a_full_cell_of_the_paper_has_its_values_beside_ours(tmp_path: Path) -> None:
    model = build_model(n_clusters=10, side=32, backbone="tiny")
    save_model(model, tmp_path / "model")
    cell = Cell("cifar10", "constraintmatch", 10_000)
    half = {"weights": weights_hash(model), "scores": {"test": {"acc": 0.9312, "nmi": 0.8571, "ari": 0.8588}}}
    results = write(tmp_path / "results" / "paper", content(cell, 0.9313, half=half))
    card = write_card(tmp_path / "model", results).read_text(encoding="utf-8")
    assert re.search(r"\| this folder, half precision \| 93\.12 \| 85\.71 \| 85\.88 \|", card)
    assert re.search(r"\| as trained +\| 93\.13 \|", card)
    assert re.search(r"\| the paper's +\| 93\.17 \| 85\.88 \| 85\.92 \|", card)
    assert " cifar10 --data-dir DIR" in card


def test_a_stage_of_a_start_is_known_by_its_steps_rate_and_seed(tmp_path: Path) -> None:
    stage = {"method": "simclr", "data": {"name": "cifar10"}, "steps": 7, "lr": 0.4, "seed": 0, "arguments": {}}
    model = build_model(n_clusters=0, side=32, backbone="tiny")
    object.__setattr__(model.config, "trained", (stage,))
    save_model(model, tmp_path / "simclr")
    told = {"settings": {"steps": 7, "lr": 0.4, "seed": 0}, "scores": {"knn_acc": 0.8815}, "seconds": 558.0}
    path = tmp_path / "results" / "start-cifar10-simclr.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**told, "environment": {"gpu": "NVIDIA H200"}}))
    card = card_text(tmp_path / "simclr", tmp_path / "results" / "paper")
    assert "nearest neighbours 88.15" in card
    assert re.search(r"\| simclr \| +7 \| 0\.4 \| +558 \| NVIDIA H200 \|", card)
    path.write_text(json.dumps({**told, "settings": {"steps": 8, "lr": 0.4, "seed": 0}}))
    with pytest.raises(InputError, match=r"no result in .* has these weights"):
        card_text(tmp_path / "simclr", tmp_path / "results" / "paper")


def test_a_stage_after_another_pretext_task_has_that_tasks_result(tmp_path: Path) -> None:
    stages = [
        {"method": method, "data": {"name": "cifar10"}, "steps": 7, "lr": 0.4, "seed": 0, "arguments": {}}
        for method in ("byol", "scan")
    ]
    model = build_model(n_clusters=10, side=32, backbone="tiny")
    object.__setattr__(model.config, "trained", tuple(stages))
    save_model(model, tmp_path / "model")
    (tmp_path / "results").mkdir()
    for name, acc in (("byol-scan", 0.9), ("scan", 0.8)):
        told = {"settings": {"steps": 7, "lr": 0.4, "seed": 0}, "scores": {"acc": acc}, "seconds": 1.0}
        (tmp_path / "results" / f"start-cifar10-{name}.json").write_text(json.dumps(told))
    assert "ACC 90.00" in card_text(tmp_path / "model", tmp_path / "results" / "paper")
