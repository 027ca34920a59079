"""The command line: the way from a folder to clusters, every bad input of a person, help and its page."""

import csv
import errno
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch.cli.flags import METHODS, STAGES, read_settings, setting_tables, settings_of
from constraintmatch.data.image_set import ImageSet
from constraintmatch.models.cluster_model import load_model
from constraintmatch.pipeline import config
from constraintmatch.training.run_folder import RunFolder, read_log

COMMANDS = list(get_command(cli.app).commands)  # type: ignore[attr-defined]
DOCS = Path(__file__).parents[2] / "docs"
SUFFIXES = ("png", "jpg", "webp", "bmp", "gif", "tiff")

pytestmark = pytest.mark.usefixtures("narrow_networks", "quick_heads_throughout")


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def refused(*words: object) -> str:
    """The one line with which a command refuses its input."""
    said = run(*words, code=2).stderr.strip().splitlines()
    said = [line for line in said if line.startswith("error: ")]
    assert len(said) == 1
    return str(said[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, stripes: ImageSet) -> Path:
    """40 small images in six formats, some of them deeper, and two files that are broken; pairs.csv beside it."""
    place = tmp_path_factory.mktemp("photos")
    names = []
    for row in range(40):
        name = f"{'deep/' if row % 4 == 0 else ''}{row:02d}.{SUFFIXES[row % 6]}"
        names.append(name)
        (place / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(stripes.images[row, ..., 0]).resize((16, 16), 0).save(place / "in" / name)
    (place / "in" / "broken.jpg").write_bytes(b"not an image")
    (place / "in" / "cut.png").write_bytes((place / "in" / names[6]).read_bytes()[:60])
    random = np.random.Generator(np.random.Philox(1))
    pairs = [(a, b) for a, b in random.integers(0, 40, (60, 2)).tolist() if a != b]
    lines = [f"{names[a]},{names[b]},{'same' if a % 3 == b % 3 else 'different'}" for a, b in pairs]
    (place / "pairs.csv").write_text("\n".join(["left,right,link", *lines]) + "\n")
    return place


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """A short start of three epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "short_start", lambda *_, **__: {"simclr": {"epochs": 3}, "linear_scan": {"n_tries": 2}})
        yield


@pytest.fixture(scope="module")
def trained(quick_heads_throughout: None, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:  # noqa: ARG001
    """A run folder from `train`, made with its own start by the paper's recipe, and what the command printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        out = folder / "run"
        data = ("train", folder / "in", "--pairs", folder / "pairs.csv", "--clusters", 3, "--out", out)
        sizes = ("side=8", "pairs_per_step=10", "images_per_step=20", "holdout_pairs=0.2")
        sets = [word for size in sizes for word in ("--set", size)]
        return out, run(*data, *sets, "--steps", 12, "--recipe", "paper", "--device", "cpu")


# The main way


def test_train_leaves_everything_in_the_run_folder(trained: tuple[Path, Any]) -> None:
    out, _ = trained
    held = {path.name for path in out.iterdir()}
    assert {"run.json", "log.jsonl", "model", "pairs.csv", "clusters.csv", "evaluation.json", "report.html"} <= held
    rows = read_rows(out / "clusters.csv")
    assert len(rows) == 40
    assert {int(row["cluster"]) for row in rows} <= {0, 1, 2}
    assert all(1 / 3 <= float(row["confidence"]) <= 1 for row in rows)


def test_train_says_what_it_skips_and_what_it_makes_by_itself(trained: tuple[Path, Any]) -> None:
    said = trained[1].stderr
    assert "broken.jpg: " in said
    assert "cut.png: " in said
    assert said.count("no --model: a short self-supervised start is made first") == 1
    assert "--set pretrained=yes" in said
    assert said.count("no GPU: images of 8 px, backbone tiny, 12 steps") == 1


def test_train_ends_with_where_things_are_and_the_next_command(trained: tuple[Path, Any]) -> None:
    out, result = trained
    rows = dict(line.split(None, 1) for line in result.stdout.strip().splitlines())
    assert rows["clusters"] == f"{out / 'clusters.csv'} (40 images in 3 clusters)"
    assert rows["model"] == str(out / "model")
    assert rows["report"] == str(out / "report.html")
    assert rows["next"].startswith(f"constraintmatch predict {out} ")
    assert rows["agreement"].startswith("must-link ")


def test_the_evaluation_lists_scores_agreement_sizes_and_skipped_files(trained: tuple[Path, Any]) -> None:
    told = json.loads((trained[0] / "evaluation.json").read_text())
    assert sum(told["cluster_sizes"]) == told["images"] == 40
    assert told["scores"] is None
    assert told["agreement"]["balanced"] is not None
    assert [skip["name"] for skip in told["skipped"]] == ["broken.jpg", "cut.png"]


def test_the_record_can_open_the_images_again(trained: tuple[Path, Any], folder: Path) -> None:
    record = json.loads((trained[0] / "run.json").read_text())["request"]["data"]
    assert record["kind"] == "folder"
    assert (record["source"], record["side"], record["channels"]) == (str(folder / "in"), 8, 3)


def test_predict_places_new_images_and_sorts_them(trained: tuple[Path, Any], tmp_path: Path, stripes: ImageSet) -> None:
    for row in range(40, 46):
        path = tmp_path / "new" / f"{row}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(stripes.images[row, ..., 0]).resize((30, 20)).convert("RGB").save(path)
    out, into = tmp_path / "c.csv", tmp_path / "sorted"
    result = run(
        *("predict", trained[0], tmp_path / "new", "--out", out, "--sort-into", into, "--copy", "--device", "cpu"),
        *("--within", trained[0]),
    )
    rows = read_rows(out)
    assert [row["name"] for row in rows] == [f"{row}.png" for row in range(40, 46)]
    for row in rows:
        assert (into / f"cluster-{row['cluster']}" / row["name"]).is_file()
        assert row["coarse"] == row["cluster"]
    assert "6 images in 3 clusters" in result.stdout


def test_predict_gives_the_clusters_that_training_wrote(
    trained: tuple[Path, Any], folder: Path, tmp_path: Path
) -> None:
    run("predict", trained[0] / "model", folder / "in", "--out", tmp_path / "c.csv", "--device", "cpu", "-q")
    assert (tmp_path / "c.csv").read_text() == (trained[0] / "clusters.csv").read_text()


def test_report_writes_the_page_anew(trained: tuple[Path, Any]) -> None:
    page = trained[0] / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert run("report", trained[0], "-q").stdout.split() == ["report", str(page)]
    assert len(page.read_bytes()) > len(before) / 2


def test_report_of_other_images_leaves_the_pairs_out(trained: tuple[Path, Any], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 255, (12, 8, 8), dtype=np.uint8))
    assert "leaves its pairs out" in run("report", trained[0], tmp_path / "x.npy").stderr
    run("report", trained[0], "-q")


def test_evaluate_prints_scores_and_writes_json(trained: tuple[Path, Any], tmp_path: Path, stripes: ImageSet) -> None:
    np.savez(tmp_path / "x.npz", images=stripes.images, labels=stripes.labels)
    (tmp_path / "p.csv").write_text("left,right,link\n0,3,1\n0,1,0\n")
    words = (tmp_path / "x.npz", "--pairs", tmp_path / "p.csv", "--json", tmp_path / "e.json", "-q")
    shown = run("evaluate", trained[0], *words).stdout
    told = json.loads((tmp_path / "e.json").read_text())
    for name in ("ACC", "NMI", "ARI", "ECE"):
        assert f"{name} {100 * told['scores'][name.lower()]:.1f}  " in shown
    assert "(in %, on 60 images)" in shown
    assert "(on 2 pairs)" in shown
    assert re.search(r"^sizes +0: \d+  1: \d+  2: \d+$", shown, re.MULTILINE)


def test_a_finished_run_is_resumed_without_training_again(trained: tuple[Path, Any]) -> None:
    out, first = trained
    weights = (out / "model" / "model.safetensors").stat().st_mtime_ns
    (out / "clusters.csv").unlink()
    again = run("train", "--resume", "--out", out, "--device", "cpu")
    assert again.stdout == first.stdout
    assert (out / "clusters.csv").is_file()
    assert (out / "model" / "model.safetensors").stat().st_mtime_ns == weights


def old_record(out: Path, place: Path, **arguments: object) -> Path:
    """A copy of a finished run as an earlier version wrote it, with arguments that there were then."""
    shutil.copytree(out, place)
    record = json.loads((place / "run.json").read_text())
    record["request"]["arguments"] |= {"objective": "mcl", "pool": "all", **arguments}
    record["request"]["model"]["n_heads"] = 1
    (place / "run.json").write_text(json.dumps(record))
    return place


def test_a_run_of_an_earlier_version_is_opened(trained: tuple[Path, Any], tmp_path: Path) -> None:
    out, first = trained
    old = old_record(out, tmp_path / "old")
    assert run("train", "--resume", "--out", old, "--device", "cpu").stdout.replace(str(old), str(out)) == first.stdout
    words = ("train", "--from-run", old_record(out, tmp_path / "older"), "--out", tmp_path / "again", "--steps", 1)
    run(*words, "--device", "cpu", "-q")
    assert "pool" not in json.loads((tmp_path / "again" / "run.json").read_text())["request"]["arguments"]


def test_a_run_that_used_what_is_gone_says_so(trained: tuple[Path, Any], tmp_path: Path) -> None:
    old = old_record(trained[0], tmp_path / "old", pool="combined")
    before = (old / "run.json").read_bytes()
    for words in (("--resume", "--out", old), ("--from-run", old, "--out", tmp_path / "again")):
        said = refused("train", *words, "--device", "cpu")
        assert "run.json: made with pool = 'combined', which is gone: unconstrained images are drawn from all" in said
    assert (old / "run.json").read_bytes() == before
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train x --pool combined", "--pool is gone: unconstrained images are drawn from all images"),
        ("train x --objective kcl", "--objective is gone: pairs are learned by the paper's loss, MCL"),
        ("train x --no-over-selected", "--no-over-selected is gone: pseudo-labels are averaged over all images"),
        ("train x --pseudo-error-rate 0.1", "--pseudo-error-rate is now --error-rate"),
        ("pretrain x --out y --n-heads-scan 3", "--n-heads-scan is gone: --set scan.n_tries=20 tries several"),
        ("pretrain x --out y --least-share-self-label 0.1", "is gone: the stage neighbour_label teaches"),
        ("pretrain x --out y --restarts-k-means 3", "--restarts-k-means is gone: the stage linear_scan"),
        ("pretrain x --out y --epochs-simsiam 3", "--epochs-simsiam is gone: the stage byol"),
    ],
)
def test_a_flag_of_an_earlier_version_says_what_there_is_now(words: str, said: str) -> None:
    assert said in refused(*words.split())


def test_from_run_repeats_a_run_to_the_same_weights(trained: tuple[Path, Any], tmp_path: Path) -> None:
    run("train", "--from-run", trained[0] / "run.json", "--out", tmp_path / "again", "--device", "cpu", "-q")
    first, second = (load_model(place).state_dict() for place in (trained[0], tmp_path / "again"))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert (tmp_path / "again" / "clusters.csv").read_text() == (trained[0] / "clusters.csv").read_text()


def test_a_flag_wins_over_the_repeated_run(trained: tuple[Path, Any], tmp_path: Path) -> None:
    words = (
        "--from-run",
        trained[0],
        "--out",
        tmp_path / "r",
        "--model",
        trained[0],
        "--steps",
        2,
        "--set",
        "max_entropy=0.5",
    )
    run("train", *words, "--device", "cpu", "-q")
    asked = json.loads((tmp_path / "r" / "run.json").read_text())["request"]
    assert (asked["settings"]["steps"], asked["arguments"]["max_entropy"]) == (2, 0.5)


def test_an_interrupted_run_says_how_to_go_on_and_goes_on(
    trained: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train", "--from-run", trained[0], "--model", trained[0], "--out", tmp_path / "r", "--device", "cpu")
    log = RunFolder.log

    def log_and_stop(self: RunFolder, entry: Any) -> None:
        log(self, entry)
        if entry["step"] == 3 and entry["kind"] == "training":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunFolder, "log", log_and_stop)
    result = run(*words, "-q", code=130)
    assert f"with --resume --out {tmp_path / 'r'}" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    monkeypatch.setattr(RunFolder, "log", log)
    run("train", "--resume", "--out", tmp_path / "r", "--device", "cpu", "-q")
    assert read_log(tmp_path / "r")[-1]["step"] == 12


def test_class_folders_are_scored_by_their_names(tmp_path: Path, stripes: ImageSet) -> None:
    for row in range(12):
        path = tmp_path / "in" / "abc"[row % 3] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(stripes.images[row, ..., 0]).save(path)
    run("sample", tmp_path / "in", "--per-image", 1, "--out", tmp_path / "p.csv", "-q")
    words = ("train", tmp_path / "in", "--pairs", tmp_path / "p.csv", "--clusters", 3, "--steps", 2, "--device", "cpu")
    assert "scores" in run(*words, "--out", tmp_path / "a").stdout
    assert "scores" not in run(*words, "--out", tmp_path / "b", "--set", "labels=no").stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--set", "linear_scan.n_tries=0"), "linear_scan.n_tries must be a whole number, 1 or more"),
        (("--set", "byol.predictor_rate=2", "--set", "byol.optimizer=adam"), "needs the optimizer sgd"),
        (("--seed", 2**64), "seed 18446744073709551616 is not a whole number from 0 to 2**64 - 1"),
    ],
)
def test_a_wrong_argument_of_a_late_stage_is_found_before_the_first(
    flags: tuple[object, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    words = ("pretrain", folder / "in", "--clusters", 3, "--out", tmp_path / "s", "--set", "side=8", "--device", "cpu")
    assert message in refused(*words, *flags)
    assert not (tmp_path / "s").exists()


def test_a_reach_that_cannot_be_is_found_before_the_start_is_made(folder: Path, tmp_path: Path) -> None:
    words = ("train", folder / "in", "--pairs", folder / "pairs.csv", "--clusters", 3, "--method", "propagate")
    assert "reach must be 0 to below 1" in refused(*words, "--set", "reach=2", "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_pairs_that_weigh_nothing_are_refused_by_the_name_of_their_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "light.csv").write_text("left,right,link,weight\n0,1,1,0\n1,2,0,0\n")
    words = ("train", folder / "in", "--pairs", tmp_path / "light.csv", "--clusters", 3, "--out", tmp_path / "r")
    assert "light.csv: every pair has the weight 0" in refused(*words)
    assert not (tmp_path / "r").exists()


def test_a_resumed_run_goes_on_as_it_was_told(trained: tuple[Path, Any], tmp_path: Path) -> None:
    words = ("train", "--from-run", trained[0], "--model", trained[0], "--device", "cpu", "-q")
    run(*words, "--steps", 6, "--set", "checkpoint_every=2", "--set", "log_every=3", "--out", tmp_path / "r")
    record = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (record["how"]["checkpoint_every"], record["how"]["log_every"]) == (2, 3)
    (tmp_path / "r" / "run.json").write_text(json.dumps({**record, "status": "interrupted"}))
    (tmp_path / "r" / "log.jsonl").unlink()
    run("train", "--resume", "--out", tmp_path / "r", "-q")
    lines = [json.loads(line) for line in (tmp_path / "r" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [3, 6]
    again = json.loads((tmp_path / "r" / "run.json").read_text())["how"]
    assert (again["checkpoint_every"], again["log_every"], again["device"]) == (2, 3, "cpu")


def test_pretrain_leaves_a_model_that_train_takes(folder: Path, tmp_path: Path) -> None:
    sizes = ("side=8", "byol.epochs=2", "byol.hidden=64", "neighbour_label.epochs=2", "linear_scan.n_tries=2")
    words = ("pretrain", folder / "in", "--clusters", 3, "--out", tmp_path / "s", "--device", "cpu")
    result = run(*words, *(word for size in sizes for word in ("--set", size)))
    assert {path.name for path in (tmp_path / "s").glob("[!.]*")} == {
        "byol",
        "linear_scan",
        "neighbour_label",
        "linear_scan-2",
        "model",
    }
    assert f"--model {tmp_path / 's'}" in result.stdout
    words = ("train", folder / "in", "--pairs", folder / "pairs.csv", "--model", tmp_path / "s", "--steps", 2)
    run(*words, "--out", tmp_path / "r", "--device", "cpu", "-q")


def test_answers_in_groups_tell_the_head_without_training(
    trained: tuple[Path, Any], folder: Path, tmp_path: Path
) -> None:
    names = sorted(row["name"] for row in read_rows(trained[0] / "clusters.csv"))
    kind = {name: int(Path(name).stem) % 3 for name in names}
    first = {kind[name]: name for name in reversed(names)}
    links = [f"{name},{first[kind[name]]},1" for name in names[:24] if name != first[kind[name]]]
    links += [f"{first[a]},{first[b]},0" for a, b in ((0, 1), (1, 2), (0, 2))]
    (tmp_path / "pairs.csv").write_text("\n".join(["left,right,link", *links]) + "\n")
    words = ("train", folder / "in", "--pairs", tmp_path / "pairs.csv", "--model", trained[0], "--device", "cpu")
    run(*words, "--method", "propagate", "--out", tmp_path / "r", "-q")
    before, after = (load_model(place).state_dict() for place in (trained[0], tmp_path / "r"))
    assert {name for name, value in after.items() if not value.equal(before[name])} == {"head.weight", "head.bias"}
    assert [(entry["groups"], entry["known"]) for entry in read_log(tmp_path / "r")] == [(3, 24)]


def test_a_chain_is_chosen_by_its_name(folder: Path, tmp_path: Path) -> None:
    words = ("pretrain", folder / "in", "--clusters", 3, "--set", "side=8", "--device", "cpu", "-q")
    few = ("--set", "simclr.epochs=2", "--set", "linear_scan.n_tries=2")
    run(*words, "--out", tmp_path / "s", "--chain", "short", *few)
    assert {path.name for path in (tmp_path / "s").glob("[!.]*")} == {"simclr", "linear_scan", "model"}
    mistaken = refused(*words, "--out", tmp_path / "t", "--set", "simclr.epochs=2")
    assert "settings of simclr, which does not run; the stages are byol, linear_scan, neighbour_label" in mistaken
    assert "known are scan, byol, propos, own, short" in refused(*words, "--out", tmp_path / "t", "--chain", "swav")
    assert not (tmp_path / "t").exists()


def test_a_start_is_not_made_over_a_run(trained: tuple[Path, Any], folder: Path) -> None:
    weights = (trained[0] / "model" / "model.safetensors").read_bytes()
    assert "not an earlier start" in refused("pretrain", folder / "in", "--clusters", 3, "--out", trained[0])
    assert "not an earlier start" in refused("pretrain", folder / "in", "--clusters", 3, "--out", trained[0] / "model")
    assert "a file is where" in refused(
        "pretrain", folder / "in", "--clusters", 3, "--out", folder / "pairs.csv" / "start"
    )
    assert (trained[0] / "model" / "model.safetensors").read_bytes() == weights


def test_check_ends_with_2_for_contradictions(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("left,right,link\na,b,1\nb,c,1\n")
    bad.write_text("left,right,link\na,b,1\nb,c,1\na,c,0\n")
    assert re.search(r"^must-links +2$", run("check", good).stdout, re.MULTILINE)
    assert "contradiction: a and c are cannot-link" in run("check", bad, code=2).stdout


def test_sample_draws_the_same_pairs_for_the_same_seed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run("sample", "digits", "--n", 30, "--seed", 5, "--out", tmp_path / f"{name}.csv")
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


# What people get wrong


@pytest.fixture
def words(folder: Path, tmp_path: Path, trained: tuple[Path, Any]) -> Callable[..., list[object]]:
    """The words of a training that would work, with some options changed."""

    def words(data: object = folder / "in", **changes: object) -> list[object]:
        options = {"pairs": folder / "pairs.csv", "out": tmp_path / "new", "model": trained[0], "steps": 2} | changes
        flags = {"pairs", "out", "model", "steps", "clusters", "method", "recipe"}
        given = [
            (f"--{name}", value) if name in flags else ("--set", f"{name}={value}")
            for name, value in options.items()
            if value is not None
        ]
        return ["train", data, "--device", "cpu", *(word for option in given for word in option)]

    return words


def test_a_missing_folder_is_refused(words: Callable[..., list[object]], tmp_path: Path) -> None:
    assert "no such folder" in refused(*words(tmp_path / "nowhere"))
    assert not (tmp_path / "new").exists()


def test_a_folder_without_images_is_refused(words: Callable[..., list[object]], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no images there" in refused(*words(tmp_path / "empty"))


def test_an_unknown_image_in_the_pairs_is_refused(words: Callable[..., list[object]], tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("left,right,link\ndeep/00.png,ghost.png,1\n")
    said = refused(*words(pairs=tmp_path / "p.csv"))
    assert "p.csv line 2" in said
    assert "ghost.png" in said
    assert not (tmp_path / "new").exists()


def test_contradictory_pairs_are_refused_with_their_chain(words: Callable[..., list[object]], tmp_path: Path) -> None:
    a, b, c = "deep/00.png", "01.jpg", "02.webp"
    (tmp_path / "p.csv").write_text(f"left,right,link\n{a},{b},1\n{b},{c},1\n{a},{c},0\n")
    for strict in ({"recipe": "paper"}, {"on_conflict": "error"}):
        said = refused(*words(pairs=tmp_path / "p.csv", **strict))
        assert f"{a} – {b} – {c}" in said
        assert "--set on_conflict=drop" in said
    run(*words(pairs=tmp_path / "p.csv", recipe="paper", on_conflict="drop", out=tmp_path / "dropped"))
    assert "1 of 3 pairs contradict others and are left out" in run(*words(pairs=tmp_path / "p.csv")).stderr


def test_fewer_images_than_clusters_are_refused(words: Callable[..., list[object]]) -> None:
    assert "50 clusters for 40 images" in refused(*words(clusters=50, model=None))


def test_one_cluster_is_refused(words: Callable[..., list[object]]) -> None:
    assert "ask for 2 or more" in refused(*words(clusters=1, model=None))
    assert "how many clusters" in refused(*words(model=None))


@pytest.mark.parametrize("harm", ["corrupt", "foreign", "missing", "cut"])
def test_a_corrupt_or_foreign_model_is_refused(
    words: Callable[..., list[object]], trained: tuple[Path, Any], tmp_path: Path, harm: str
) -> None:
    model = tmp_path / "m"
    model.mkdir()
    config, weights = (trained[0] / "model" / name for name in ("config.json", "model.safetensors"))
    if harm != "missing":
        (model / "config.json").write_text('{"hello": 1}' if harm == "foreign" else config.read_text())
        (model / "model.safetensors").write_bytes(b"x" * 99 if harm == "corrupt" else weights.read_bytes()[:5000])
    assert str(model) in refused(*words(model=model))
    assert str(model) in refused("predict", model, "digits")


def test_a_corrupt_checkpoint_is_refused_and_kept(
    words: Callable[..., list[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("constraintmatch.pipeline.train.save_model", fail)
        run(*words(recipe="paper"), code=130)
    checkpoint = tmp_path / "new" / "checkpoint.safetensors"
    checkpoint.write_bytes(b"broken")
    assert "not a checkpoint of this run" in refused(*words(recipe="paper"), "--resume")
    assert checkpoint.read_bytes() == b"broken"


def test_a_run_folder_in_use_is_refused(words: Callable[..., list[object]], tmp_path: Path) -> None:
    code = "import sys, time; from constraintmatch._internal.files import folder_lock\n"
    code += "with folder_lock(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path / "new")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert f"in use by another process (pid {holder.pid})" in refused(*words())
        holder.kill()


def test_a_run_folder_that_holds_something_is_refused(words: Callable[..., list[object]], tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "thesis.txt").write_text("mine")
    assert "not empty (thesis.txt is there)" in refused(*words())
    assert "no run to resume" in refused(*words(), "--resume")


def test_a_full_disk_is_told_and_loses_nothing(
    words: Callable[..., list[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", full)
        assert "no space left on the disk" in refused(*words())
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert "no space left on the disk" in refused(*words(), "--resume")
    run(*words(), "--resume")
    assert (tmp_path / "new" / "clusters.csv").is_file()


def test_a_full_disk_that_a_library_reports_in_words_is_told_too(
    words: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert "no space left on the disk" in refused(*words())


def test_a_run_goes_on_after_its_images_were_moved(
    words: Callable[..., list[object]], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    shutil.copytree(folder / "in", tmp_path / "before")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", stop)
        run(*words(tmp_path / "before"), code=130)
    (tmp_path / "before").rename(tmp_path / "after")
    (tmp_path / "after" / "broken.jpg").unlink()  # never among the images
    run(*words(tmp_path / "after"), "--resume")
    record = json.loads((tmp_path / "new" / "run.json").read_text())
    assert (record["status"], record["request"]["data"]["source"]) == ("finished", str(tmp_path / "after"))


def test_a_method_that_needs_pairs_says_so(words: Callable[..., list[object]], tmp_path: Path) -> None:
    assert "constraintmatch needs constraints and there are none; give --pairs" in refused(*words(pairs=None))
    (tmp_path / "p.csv").write_text("left,right,link\n")
    assert "there are no pairs in it" in refused(*words(pairs=tmp_path / "p.csv"))
    assert "no such file" in refused(*words(pairs=tmp_path / "none.csv"))


def test_a_setting_of_another_method_is_refused(words: Callable[..., list[object]], trained: tuple[Path, Any]) -> None:
    assert "constrained has no setting 'max_entropy'" in refused(*words(method="constrained", max_entropy=0.1))
    assert "propagate has no setting 'recipe'" in refused(*words(method="propagate", recipe="safe"))
    said = refused(*words(out=None, pairs=None, steps=None), "--from-run", trained[0], "--set", "reach=0.5")
    assert "constraintmatch has no setting 'reach'; it has pseudo_weight" in said  # the run says which method it is


def test_a_setting_is_given_by_its_flag_or_by_set_and_not_by_both(words: Callable[..., list[object]]) -> None:
    assert "--steps and --set steps: give one of them" in refused(*words(), "--set", "steps=3")


def test_a_flag_of_before_is_one_line_with_its_new_spelling(words: Callable[..., list[object]], tmp_path: Path) -> None:
    assert refused(*words(), "--max-entropy", 0.3) == "error: --max-entropy is now --set max_entropy=VALUE"
    said = refused("evaluate", tmp_path, "--data", "cifar10")
    assert re.fullmatch(r"error: --data is gone: its value is given alone: \S+ evaluate MODEL DATA", said)
    assert not (tmp_path / "new").exists()


def test_unknown_names_are_refused_with_the_known_ones(words: Callable[..., list[object]]) -> None:
    assert "known are" in refused(*words(method="magic"))
    assert "use constraintmatch pretrain" in refused(*words(method="scan"))
    assert "known: auto_contrast" in refused(*words(without="sepia"))
    assert "unknown backbone" in refused(*words(model=None, clusters=3, backbone="vgg"))
    assert "schedule must be cosine-7/16, cosine, " in refused(*words(schedule="soon"))
    assert "unknown device" in refused(*words(), "--device", "toaster")


def test_images_are_asked_for_when_none_are_named() -> None:
    assert "say which images" in refused("train", "--clusters", 3)


def test_labels_are_needed_where_a_method_learns_from_them(words: Callable[..., list[object]]) -> None:
    assert "needs the label of every image" in refused(*words(pairs=None, method="supervised"))
    assert "leave --pairs out" in refused(*words(method="supervised"))


def test_sampling_without_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "in" / "a.png")
    assert "sampling needs labels" in refused("sample", tmp_path / "in", "--n", 5, "--out", tmp_path / "p.csv")
    assert "not both" in refused("sample", "digits", "--out", tmp_path / "p.csv")


def test_a_broken_file_stops_a_strict_training(words: Callable[..., list[object]]) -> None:
    assert "broken.jpg" in refused(*words(strict="yes"))


def test_what_is_no_run_is_not_reported(tmp_path: Path) -> None:
    assert "not a run folder" in refused("report", tmp_path)
    (tmp_path / "run.json").write_text('{"format": 1}')
    assert "nor a run that left one" in refused("report", tmp_path)
    assert "not the record of a training" in refused(
        "train", "--from-run", tmp_path / "run.json", "--out", tmp_path / "o"
    )


def test_a_run_that_does_not_say_where_its_images_lie_is_reported_with_data(
    trained: tuple[Path, Any], tmp_path: Path, folder: Path
) -> None:
    shutil.copytree(trained[0] / "model", tmp_path / "model")
    (tmp_path / "run.json").write_text('{"format": 1, "request": {}}')
    assert f"name them: constraintmatch report {tmp_path} DATA" in refused("report", tmp_path)
    run("report", tmp_path, folder / "in", "-q")


def test_resuming_a_run_that_was_stopped_in_its_start_asks_for_the_whole_command(tmp_path: Path) -> None:
    (tmp_path / "r" / "start").mkdir(parents=True)
    assert "give the whole command again" in refused("train", "--resume", "--out", tmp_path / "r")


def test_sorting_into_a_folder_with_files_is_refused_before_predicting(trained: tuple[Path, Any], folder: Path) -> None:
    out = folder / "never.csv"
    assert "not an empty folder" in refused("predict", trained[0], folder / "in", "--out", out, "--sort-into", folder)
    assert not out.exists()


def test_a_file_of_clusters_among_the_sorted_images_is_refused_before_predicting(tmp_path: Path) -> None:
    place = tmp_path / "s"
    said = refused("predict", "no-model", "no-images", "--out", place / "c.csv", "--sort-into", place)
    assert "only sorted images go there; choose another --out" in said
    assert not place.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chek"], "no such command 'chek'"),
        (["check"], "missing argument 'PAIRS'"),
        (["train", "--stepps", "5"], "no such option: --stepps"),
        (["train", "x", "--clusters", "abc"], "invalid value for '--clusters'"),
        (["train", "x", "--recipe", "best"], "invalid value for '--recipe'"),
    ],
)
def test_a_mistake_in_the_words_is_one_line_that_names_the_help(words: list[str], said: str) -> None:
    told = run(*words, code=2).stderr.splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"error: {said}")
    assert told[0].endswith("--help)")


def test_without_a_command_the_help_is_shown() -> None:
    assert "From a folder to clusters:" in run(code=2).stderr


def test_an_output_that_cannot_be_written_is_refused_before_the_images_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place, said in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.csv", "a file is where a folder should be")):
        assert said in refused("predict", "no-model", "no-images", "--out", place)
        assert said in refused("evaluate", "no-model", "no-images", "--json", place)
    assert "a file is where" in refused("sample", "no-images", "--n", 5, "--out", tmp_path / "file" / "x.csv")


def test_a_folder_that_cannot_be_written_is_refused_before_the_images_are_opened(
    tmp_path: Path, trained: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    access, closed = os.access, (str(tmp_path), str(trained[0]))

    def may(path: Any, mode: int, **options: Any) -> bool:  # root may write everywhere, so the answer is made up
        return access(path, mode, **options) and not (mode & os.W_OK and str(path) in closed)

    monkeypatch.setattr(os, "access", may)
    monkeypatch.setattr(os, "supports_effective_ids", {may})
    new, said = tmp_path / "new.npz", "no permission to write there; choose another place"
    for words in (
        ("predict", "no-model", "no-images", "--out", new),
        ("predict", "no-model", "no-images", "--out", trained[0].parent / "c.csv", "--sort-into", tmp_path),
        ("embed", "no-model", "no-images", "--out", new),
        ("evaluate", "no-model", "no-images", "--json", new),
        ("join", "no-model", "no-model", "no-images", "--out", new),
        ("sample", "no-images", "--n", 5, "--out", tmp_path / "p.csv"),
        ("train", "no-images", "--method", "supervised", "--clusters", 3, "--out", new),
        ("pretrain", "no-images", "--clusters", 3, "--out", new),
        ("report", trained[0], "no-images"),
    ):
        assert said in refused(*words), words
    assert list(tmp_path.iterdir()) == []


def test_what_may_not_be_read_is_not_called_unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "runs/a")

    monkeypatch.setattr("constraintmatch.pipeline.sources.check_pairs", closed)
    assert "error: runs/a: no permission to read or write it; change that" in refused("check", "pairs.csv")


def test_a_pairs_file_without_pairs_judges_nothing(trained: tuple[Path, Any], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("left,right,link\n")
    said = refused("evaluate", trained[0], folder / "in", "--pairs", tmp_path / "none.csv")
    assert "there are no pairs in it" in said


def test_flipping_one_kind_needs_a_share(tmp_path: Path) -> None:
    said = refused("sample", "digits", "--n", 5, "--wrong-only", "must-link", "--out", tmp_path / "p.csv")
    assert "goes with --wrong" in said


def test_a_side_by_a_slip_of_the_keys_is_refused(words: Callable[..., list[object]]) -> None:
    assert "at most 4,096 pixels" in refused(*words(model=None, clusters=3, side=3_200_000))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--lr 1e308", "lr is 1e+308; it must be a number that 32 bits hold"),
        ("--lr nan", "lr is nan; it must be a number that 32 bits hold"),
        ("--set pairs_per_step=1000000000000", "pairs_per_step is 1,000,000,000,000; it must be at most 1,000,000"),
        ("--data-dir nowhere", "--data-dir nowhere: no such folder; name the folder that holds the data set"),
        ("--data-dir .", "--data-dir . goes with a data set (digits, cifar10"),
        ("--set backbone=", "backbone must be tiny, resnet18, resnet34 or timm:NAME"),
        ("--method propagate --set n_neighbours=100000", "n_neighbours is 100,000; an image has 39 others"),
    ],
)
def test_a_value_that_cannot_be_is_refused_and_nothing_is_left(
    trained: tuple[Path, Any], folder: Path, tmp_path: Path, more: str, said: str
) -> None:
    asked = ("train", folder / "in", "--pairs", folder / "pairs.csv", "--model", trained[0], "--device", "cpu")
    assert said in refused(*asked, "--out", tmp_path / "r", *more.split())
    assert not (tmp_path / "r").exists()


def test_a_split_goes_with_a_data_set_only(trained: tuple[Path, Any], folder: Path, tmp_path: Path) -> None:
    said = refused("predict", trained[0], folder / "in", "--split", "train", "--out", tmp_path / "c.csv")
    assert (
        "--split train goes with a data set (digits, cifar10, cifar100-20, stl10, imagenet10, imagenet-dogs), not "
        in said
    )
    assert not (tmp_path / "c.csv").exists()


def test_more_neighbours_than_images_are_refused_before_a_stage_begins(folder: Path, tmp_path: Path) -> None:
    words = ("pretrain", folder / "in", "--clusters", 3, "--out", tmp_path / "r", "--device", "cpu")
    late = ("--stages", "simclr,scan", "--set", "scan.n_neighbours=40")
    assert "scan: n_neighbours is 40; an image has 39" in refused(*words, *late)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("data", [1]),
        ("data.side", "x"),
        ("data.start.model", 7),
        ("model.n_clusters", "q"),
        ("views.without", [5]),
        ("settings", None),
    ],
)
def test_a_record_with_other_kinds_is_refused(
    trained: tuple[Path, Any], tmp_path: Path, place: str, value: object
) -> None:
    record = json.loads((trained[0] / "run.json").read_text())
    inside, *above = place.split(".")[::-1]
    group = functools.reduce(dict.get, above[::-1], record["request"])
    group[inside] = value
    (tmp_path / "run.json").write_text(json.dumps(record))
    said = refused("train", "--from-run", tmp_path / "run.json", "--out", tmp_path / "r", "--device", "cpu")
    assert f"run.json: {place} is {value!r}, which no training writes; name another run" in said
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("Unable to allocate 58 TiB"), "not enough memory (Unable to allocate 58 TiB); use smaller images"),
        (RuntimeError("CUDA out of memory. Tried\nmore"), "not enough memory (CUDA out of memory. Tried); use smaller"),
        (RuntimeError("can't alloc"), "not enough memory (can't alloc); use smaller images"),
        (OSError(errno.EMFILE, "Too many", "a"), "a: too many files are open; raise the limit: ulimit -n 4096"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/x"), "/proc/x: No such file or directory"),
    ],
)
def test_what_the_machine_cannot_do_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("constraintmatch.pipeline.sources.check_pairs", fail)
    assert said in refused("check", "pairs.csv")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names are bytes there")
def test_a_name_that_is_no_text_does_not_break_the_output(tmp_path: Path) -> None:
    pairs = os.path.join(os.fsencode(tmp_path), b"p\xff.csv")  # noqa: PTH118 (bytes)
    command = [sys.executable, "-m", "constraintmatch", "check", pairs]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "p\\udcff.csv: no such file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs a pipe that is closed")
def test_a_reader_that_had_enough_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("left,right,link\na,b,1\n")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "constraintmatch", "check", str(tmp_path / "p.csv")]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("constraintmatch.pipeline.sources.check_pairs", bug)
    with pytest.raises(ZeroDivisionError):
        run("check", "pairs.csv")


STOPPED_EARLY = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("program", [("-m", "constraintmatch"), ("-c", "from constraintmatch.cli import main; main()")])
def test_a_stop_during_the_imports_ends_as_a_later_one(tmp_path: Path, program: tuple[str, str]) -> None:
    (tmp_path / "typer.py").write_text(STOPPED_EARLY)
    paths = [str(tmp_path), str(Path(cli.__file__).parents[2])]
    command = [sys.executable, *program, "--help"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_a_signal_before_the_command_begins_is_a_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stop)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


# Help


def test_importing_the_command_line_does_not_import_torch() -> None:
    code = "import sys, constraintmatch.cli as cli\nfrom typer.testing import CliRunner\n"
    code += "CliRunner().invoke(cli.app, ['--help'])\n"
    code += "print([name for name in ('numpy', 'pydantic', 'rich') if name in sys.modules])\n"
    code += (
        "for words in (['train', '--help'], ['settings'], ['check', 'none.csv']): CliRunner().invoke(cli.app, words)\n"
    )
    code += "print([name for name in ('torch', 'sklearn', 'timm', 'matplotlib') if name in sys.modules])"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"], f"after {time.monotonic() - began:.1f} s"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [60, 80])
def test_help_fits_narrow_terminals_and_has_an_example(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = CliRunner().invoke(cli.app, [command, "--help"], terminal_width=width).stdout
    assert "Example:" in shown
    assert f"constraintmatch {command}" in shown.split("Example:")[1]
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("command", ["train", "pretrain", "loop", "search"])
def test_a_command_has_at_most_twenty_flags(command: str) -> None:
    shown = run(command, "--help").stdout
    listed = [line for line in shown.split("Example:")[0].splitlines() if line.startswith("  -")]
    assert 0 < len(listed) <= 20
    assert "--set NAME=VALUE" in shown


def test_pretrain_names_the_stages_of_its_chains() -> None:
    said = " ".join(CliRunner().invoke(cli.app, ["pretrain", "--help"], env={"COLUMNS": "200"}).stdout.split())
    for chain, stages in config.CHAINS.items():
        assert f"{chain}: {','.join(stages)}" in said


@pytest.mark.parametrize("words", [(), *((name,) for name in (*METHODS, *STAGES))])
def test_the_settings_are_listed_in_80_columns(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("settings", *words).stdout.splitlines()
    assert max(len(line.rstrip()) for line in shown) <= 80
    assert not [line for line in shown if "…" in line]
    names = [name for _, rows in setting_tables(*words) for name, *_ in rows]
    assert [line.split()[0] for line in shown if re.match(r"  (?!name )\w", line)] == names


def test_the_settings_of_what_is_no_method_are_asked_for_with_the_known_ones() -> None:
    assert "unknown method 'scam'; known are constraintmatch, " in refused("settings", "scam")


def test_the_program_runs_as_a_module_and_knows_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "constraintmatch", "--version"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"constraintmatch \d+\.\d+\.\d+\n", done.stdout)


def test_the_page_of_the_command_line_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from make_cli_docs import cli_docs

    assert (DOCS / "cli.md").read_text(encoding="utf-8") == cli_docs(), "run python docs/make_cli_docs.py"


def commands_in_the_documents() -> list[str]:
    """Every command line that README, docs, model cards or the help itself show, continued lines joined."""
    root = DOCS.parent
    pages = [root / "README.md", *DOCS.glob("*.md"), *root.glob("weights/*/README.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    blocks = re.findall(r"^ *(constraintmatch [a-z].*)$", text, re.MULTILINE)
    return sorted({line for line in blocks + re.findall(r"`(constraintmatch [a-z][^`]*)`", text) if "…" not in line})


def test_every_command_line_of_the_documents_can_be_typed() -> None:
    lines = commands_in_the_documents()
    assert len(lines) > 40
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    for line in lines:
        _, name, *words = shlex.split(line, comments=True)
        command = commands[name]
        if len(words) > 1:  # else the command is only named
            given = command.make_context(name, list(words)).params
            read_settings(name, given.get("sets") if settings_of(name) else [])


def test_demo_prints_what_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from types import ModuleType

    fake = ModuleType("constraintmatch.pipeline.demo")
    fake.run_demo = lambda out, **given: f"table {out.name} {given['seed']}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "constraintmatch.pipeline.demo", fake)
    assert run("demo", "--out", tmp_path / "d", "--seed", 3).stdout == "table d 3\n"
