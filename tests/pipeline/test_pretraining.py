import functools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_name import run_method
from scripts import script

from constraintmatch._internal.errors import InputError
from constraintmatch.data.image_set import ImageSet
from constraintmatch.methods import METHODS, Context, Trained, ViewChoice
from constraintmatch.methods.scan import linear_scan
from constraintmatch.models.cluster_model import ClusterModel, build_model, load_model, with_clusters, with_projection
from constraintmatch.pipeline.config import (
    CHAINS,
    ORDER,
    SHORT_STAGES,
    STAGES,
    chain_stages,
    method_arguments,
    short_start,
    split_options,
    training_size,
)
from constraintmatch.pipeline.train import pretrain, stage_summary
from constraintmatch.training.loop import TrainSettings

FEW = {
    "simclr": {"epochs": 2},
    "scan": {"epochs": 2, "images_per_step": 30, "lr": 1e-3, "n_tries": 2},
    "self_label": {"epochs": 1},
}
CPU = {"device": "cpu", "seed": 3}

pytestmark = pytest.mark.usefixtures("narrow_networks", "quick_heads_throughout")


def fresh(n_clusters: int = 0) -> ClusterModel:
    return build_model(n_clusters=n_clusters, side=8, channels=1, seed=1)


def pretrained(stripes: ImageSet, place: Path, stages: tuple[str, ...] = STAGES) -> ClusterModel:
    context = Context(place / "runs", held_out=stripes, data={"name": "stripes"})
    keep = script("benchmarks", "pretrain").keep_stages
    options = {"stages": stages, "recipe": FEW, "settings": CPU, "context": context}
    return keep(fresh(), stripes, 3, place / "results" / "x", **options)


@pytest.fixture(scope="module")
def made(
    quick_heads_throughout: None,  # noqa: ARG001
    stripes: ImageSet,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, ClusterModel]:
    """A folder with the runs and the results of the whole chain, and its model."""
    place = tmp_path_factory.mktemp("made")
    return place, pretrained(stripes, place)


def test_the_chain_leaves_a_model_with_clusters_and_results(made: tuple[Path, ClusterModel]) -> None:
    place, model = made
    assert model.config.n_clusters == 3
    assert [entry["method"] for entry in model.config.trained] == list(STAGES)
    assert [entry["steps"] for entry in model.config.trained] == [2, 4, model.config.trained[-1]["steps"]]
    results = {path.name: json.loads(path.read_text()) for path in (place / "results").iterdir()}
    assert sorted(results) == ["x-scan.json", "x-self_label.json", "x-simclr.json"]
    assert results["x-simclr.json"]["settings"]["steps"] == 2
    assert {"knn_acc", "neighbour_acc"} <= results["x-simclr.json"]["scores"].keys()
    assert {"acc", "neighbour_consistency", "over_0.99", "smallest_cluster", "largest_cluster"} <= results[
        "x-scan.json"
    ]["scores"].keys()
    assert {"commit", "torch", "gpu"} <= results["x-scan.json"]["environment"].keys()


def test_finished_stages_are_loaded_and_not_trained_again(
    stripes: ImageSet, made: tuple[Path, ClusterModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an earlier version too, unless an argument that there was then had another value than it has now."""
    shutil.copytree(made[0], place := tmp_path / "old")
    record = json.loads((file := place / "runs" / "simclr" / "run.json").read_text())
    for stage in STAGES:
        monkeypatch.setitem(METHODS, stage, replace_with_failure(METHODS[stage]))
    for arguments in ({}, {"projection": 128}):
        record["request"]["arguments"] |= arguments
        file.write_text(json.dumps(record))
        second = pretrained(stripes, place)
        for name, value in made[1].state_dict().items():
            assert torch.equal(value, second.state_dict()[name])
    record["request"]["arguments"]["projection"] = 64
    file.write_text(json.dumps(record))
    with pytest.raises(InputError, match="made with projection = 64, which is gone: it is always 128"):
        pretrained(stripes, place)


def test_results_of_finished_stages_stay_as_they_were_measured(
    stripes: ImageSet, made: tuple[Path, ClusterModel], tmp_path: Path
) -> None:
    place, results = tmp_path / "place", tmp_path / "place" / "results"
    shutil.copytree(made[0], place)  # as it was before the last stage
    shutil.rmtree(place / "runs" / STAGES[2])
    (results / "x-self_label.json").unlink()
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    assert len(before) == 2
    pretrained(stripes, place)
    assert sorted(path.name for path in results.iterdir()) == sorted([*before, "x-self_label.json"])
    assert all((results / name).read_bytes() == content for name, content in before.items())


def test_another_pretext_task_takes_the_place_of_the_first() -> None:
    assert chain_stages("scan", pretext="byol") == ("byol", "scan", "self_label")
    assert chain_stages("scan", ("linear_scan",), "byol") == ("linear_scan",)
    with pytest.raises(InputError, match="unknown pretext task 'moco'; known are simclr, byol"):
        chain_stages("scan", pretext="moco")


def test_chains_have_names_and_scan_is_the_papers() -> None:
    assert chain_stages("scan") == STAGES == ("simclr", "scan", "self_label")
    assert all(set(stages) <= set(ORDER) for stages in CHAINS.values())
    with pytest.raises(InputError, match="unknown chain 'swav'; known are scan, byol, propos, own, short"):
        chain_stages("swav")


def replace_with_failure(method: Callable[..., Trained]) -> Callable[..., None]:
    @functools.wraps(method)
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a finished stage was trained again")

    return fail


def test_self_labelling_averages_its_weights_over_the_last_tenth(
    stripes: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrainSettings] = []

    def watched(*given: Any, **_: object) -> list[dict[str, Any]]:
        seen.append(given[3])
        return []

    monkeypatch.setattr(sys.modules["constraintmatch.methods.scan"], "fit", watched)
    for epochs, ema in ((20, None), (20, 0.5), (1, None)):
        settings = TrainSettings(device="cpu", ema=ema)
        METHODS["self_label"](
            with_clusters(fresh(), 3), stripes, epochs=epochs, images_per_step=30, min_confidence=0.0, settings=settings
        )
    assert [one.ema for one in seen] == [pytest.approx(1 - 10 / seen[0].steps), 0.5, None]
    assert seen[0].steps > 10 >= seen[2].steps


def test_scan_keeps_a_head_that_fits(stripes: ImageSet) -> None:
    start = with_clusters(fresh(), 3)
    before = start.head.weight.clone()
    still = TrainSettings(device="cpu", optimizer="sgd", lr=1e-12, weight_decay=0.0)
    after = METHODS["scan"](start, stripes, n_clusters=3, epochs=1, settings=still).model
    torch.testing.assert_close(after.head.weight, before)


def test_self_labelling_with_nobody_sure_changes_nothing(stripes: ImageSet) -> None:
    model = fresh(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, log = METHODS["self_label"](model, stripes, min_confidence=0.9999, settings=TrainSettings(device="cpu"))
    assert "no image is surer" in log[-1]["warnings"][0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_resumed_chain_says_the_same(stripes: ImageSet, made: tuple[Path, ClusterModel], tmp_path: Path) -> None:
    whole = load_model(made[0] / "runs" / "scan")
    pretrained(stripes, tmp_path, ("simclr",))
    parts = pretrained(stripes, tmp_path, ("simclr", "scan"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name])


def test_a_stage_that_comes_again_is_made_anew_in_a_folder_of_its_own(stripes: ImageSet, tmp_path: Path) -> None:
    twice = ("linear_scan", "self_label", "linear_scan")
    quick = {"self_label": {"min_confidence": 0.3, "epochs": 2}, "linear_scan": {"n_tries": 1}}
    options = {"recipe": quick, "settings": CPU}
    plain = pretrain(fresh(), stripes, 3, stages=twice, **options)
    kept = {**options, "context": Context(tmp_path / "runs"), "stages": twice}
    for _ in range(2):  # the second time all is finished
        model = script("benchmarks", "pretrain").keep_stages(fresh(), stripes, 3, tmp_path / "results/start", **kept)
        assert [entry["method"] for entry in model.config.trained] == list(twice)
        for name, value in plain.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
    names = ["start-linear_scan-2.json", "start-linear_scan.json", "start-self_label.json"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == names


@pytest.mark.parametrize("n_images", [8, 300, 5_000, 1_000_000])
def test_a_short_start_has_enough_steps_and_no_more(n_images: int) -> None:
    recipe = short_start(n_images, cpu=True)
    assert tuple(recipe) == SHORT_STAGES
    per_epoch = max(1, n_images // 256)
    assert 160 <= recipe["simclr"]["epochs"] * per_epoch < 160 + per_epoch


def test_training_sizes_stay_in_their_bounds() -> None:
    for n in (2, 100, 2_000, 50_000, 1_000_000):
        for cpu in (True, False):
            size = training_size(n, cpu=cpu)
            assert 150 <= size["images_per_step"] <= (150 if cpu else 600)
            assert 500 <= size["steps"] <= (1_000 if cpu else 20_000)
            assert 0.01 <= size["lr"] <= 0.03
    assert training_size(50_000, cpu=False)["images_per_step"] == 600


def test_a_summary_needs_no_labels(stripes: ImageSet) -> None:
    told = stage_summary(fresh(3), replace(stripes, labels=None))
    sizes = {"smallest_cluster", "largest_cluster", "empty_clusters"}
    assert set(told) == {"neighbour_consistency", "mean_confidence", "over_0.99", *sizes}
    assert told["smallest_cluster"] <= 1 / 3 <= told["largest_cluster"]
    assert stage_summary(with_projection(fresh()), replace(stripes, labels=None)) == {}


def test_bad_requests_get_one_line(stripes: ImageSet) -> None:
    with pytest.raises(InputError, match="unknown stage 'dino'"):
        pretrain(fresh(), stripes, 3, stages=("dino",))
    grey = ImageSet.from_arrays(np.full((20, 8, 8), 7, dtype=np.uint8))
    with pytest.raises(InputError, match="of one colour"):
        pretrain(fresh(), grey, 3)
    with pytest.raises(InputError, match="61 clusters for 60 images"):
        linear_scan(fresh(), stripes, n_clusters=61, settings=TrainSettings(device="cpu"))
    with pytest.raises(InputError, match="scan has no option 'epoch'"):
        split_options("scan", {"epoch": 3})
    with pytest.raises(InputError, match="scan counts epochs, not steps"):
        split_options("scan", {"steps": 100})
    with pytest.raises(InputError, match="unknown method 'magic'"):
        method_arguments("magic")
    with pytest.raises(InputError, match="scan needs the argument 'n_clusters'"):
        run_method("scan", fresh(), stripes)
    with pytest.raises(InputError, match="constrained has no option 'tau'"):
        run_method("constrained", fresh(3), stripes, arguments={"tau": 1})


def test_views_of_the_run_reach_the_methods(stripes: ImageSet) -> None:
    plain = pretrain(fresh(), stripes, 3, stages=("simclr",), recipe=FEW, settings=CPU)
    other = pretrain(fresh(), stripes, 3, stages=("simclr",), recipe=FEW, settings=CPU, views=ViewChoice(flip=False))
    assert not torch.equal(plain.backbone[0].weight, other.backbone[0].weight)
