"""The functions behind the commands: opening, sampling, checking, sorting, and what a training chooses by itself."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import folder_lock
from constraintmatch._internal.progress import Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import Predictions
from constraintmatch.models.cluster_model import build_model, load_model, save_model
from constraintmatch.pipeline import commands, sources
from constraintmatch.pipeline import plan as planning
from constraintmatch.pipeline.plan import Train, plan_training
from constraintmatch.pipeline.sources import open_data, open_pairs
from constraintmatch.pipeline.train import train


def write_images(folder: Path, images: ImageSet, n: int, suffix: str = "png") -> None:
    for row in range(n):
        path = folder / f"{row:02d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.images[row, ..., 0]).save(path)


def write_pairs(path: Path, rows: list[tuple[object, object, object]]) -> Path:
    path.write_text("left,right,link\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows), encoding="utf-8")
    return path


class Told(Reporter):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


# Opening


def test_a_data_set_gives_training_images_and_holds_the_test_images_out() -> None:
    data = open_data("digits")
    assert (len(data.images), len(data.held_out or ())) == (1197, 500)
    assert data.row is not None
    assert data.record["source"] == "digits"


def test_a_split_of_a_data_set_holds_nothing_out() -> None:
    data = open_data("digits", split="test")
    assert (len(data.images), data.held_out) == (500, None)


def test_a_data_set_of_another_side_is_refused() -> None:
    with pytest.raises(InputError, match="8 px"):
        open_data("digits", side=32)


def test_a_folder_with_the_name_of_a_data_set_is_opened_by_its_path(
    tmp_path: Path, stripes: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "digits", stripes, 4)
    monkeypatch.chdir(tmp_path)
    assert len(open_data("./digits").images) == 4
    assert len(open_data("digits").images) == 1197


def test_skipped_files_are_told_with_their_reason(tmp_path: Path, stripes: ImageSet) -> None:
    write_images(tmp_path / "a", stripes, 3)
    (tmp_path / "a" / "broken.png").write_bytes(b"no")
    told = Told()
    open_data(tmp_path / "a", reporter=told)
    assert any("broken.png" in line for line in told.lines)


def test_a_record_is_plain_json(tmp_path: Path, stripes: ImageSet) -> None:
    write_images(tmp_path / "a", stripes, 3)
    record = open_data(tmp_path / "a").record
    assert json.loads(json.dumps(record)) == record
    assert Path(record["source"]).is_absolute()


def test_pairs_set_aside_are_in_no_other_part(stripes: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    assert stripes.labels is not None
    Constraints.sample(stripes.labels, 200, seed=0).write(path)
    pairs, held_out = open_pairs(path, stripes, holdout=0.25, close=False)
    assert held_out is not None
    keys = [{(min(a, b), max(a, b)) for a, b in zip(c.left, c.right, strict=True)} for c in (pairs, held_out)]
    assert not keys[0] & keys[1]
    assert len(held_out) == round(0.25 * (len(pairs) + len(held_out)))


def test_closing_happens_after_pairs_are_set_aside(stripes: ImageSet, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "p.csv", [(i, i + 1, 1) for i in range(10)])
    pairs, _ = open_pairs(path, stripes, holdout=0.1, close=True)
    kept, _ = open_pairs(path, stripes, holdout=0.1)
    assert len(pairs) == len(kept.close()) > len(kept)


def test_a_share_that_leaves_no_pairs_is_refused(stripes: ImageSet, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "p.csv", [(0, 1, 1), (1, 2, 1)])
    for share in (0.01, 0.99, 1.5, -0.5, float("nan"), float("inf")):
        with pytest.raises(InputError, match="holdout_pairs="):
            open_pairs(path, stripes, holdout=share)


def test_a_pair_with_an_image_that_was_skipped_says_why(stripes: ImageSet, tmp_path: Path) -> None:
    write_images(tmp_path / "in", stripes, 2)
    (tmp_path / "in" / "broken.png").write_bytes(b"")
    path = write_pairs(tmp_path / "p.csv", [("00.png", "01.png", 1), ("00.png", "broken.png", 0)])
    with pytest.raises(InputError, match=r"line 3: image 'broken.png' could not be read \(the file is empty\); repair"):
        open_pairs(path, open_data(tmp_path / "in").images)


def test_a_folder_that_is_not_there_may_be_a_data_set_misspelt(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cifar-10: no such folder; .* a data set: digits, cifar10"):
        open_data(tmp_path / "cifar-10")


def test_dropped_contradictions_are_told(stripes: ImageSet, tmp_path: Path) -> None:
    path, told = write_pairs(tmp_path / "p.csv", [(0, 1, 1), (1, 2, 1), (0, 2, 0)]), Told()
    assert len(open_pairs(path, stripes, on_conflict="drop", reporter=told)[0]) == 2
    assert told.lines == ["1 of 3 pairs contradict others and are left out"]


# Sampling and checking


def test_sampled_pairs_are_the_papers_sample(tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    sources.sample_pairs("digits", out, n=50, seed=3)
    images = open_data("digits").images
    assert images.labels is not None
    ours, papers = Constraints.read(out, names=images.names), Constraints.sample(images.labels, 50, seed=3)
    for name in ("left", "right", "link"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(papers, name))


def test_sampling_never_overwrites_a_pairs_file(tmp_path: Path) -> None:
    out = write_pairs(tmp_path / "p.csv", [(0, 1, 1)])
    with pytest.raises(InputError, match="exists already"):
        sources.sample_pairs("digits", out, n=5)
    assert out.read_text().count("\n") == 2


@pytest.mark.parametrize("number", [0, -4])
def test_a_sample_of_no_pairs_is_refused(tmp_path: Path, number: int) -> None:
    with pytest.raises(InputError, match=f"--n {number}: a file without pairs is of no use; ask for 1 or more"):
        sources.sample_pairs("digits", tmp_path / "p.csv", n=number)
    with pytest.raises(InputError, match=f"--per-image {number}: "):
        sources.sample_pairs("digits", tmp_path / "p.csv", per_image=number)
    assert not (tmp_path / "p.csv").exists()


def test_flipped_samples_have_wrong_must_links_only(tmp_path: Path) -> None:
    plain = sources.sample_pairs("digits", tmp_path / "a.csv", n=200, balanced=True)
    noisy = sources.sample_pairs("digits", tmp_path / "b.csv", n=200, balanced=True, flip=0.5, flip_only="must-link")
    assert plain.n_must_links == 100
    assert noisy.n_must_links == 50
    assert not (noisy.link > plain.link).any()


def test_a_check_counts_what_a_file_holds(tmp_path: Path, stripes: ImageSet) -> None:
    write_images(tmp_path / "a", stripes, 6)
    rows = [("00.png", "01.png", 1), ("01.png", "00.png", 1), ("02.png", "02.png", 1), ("03.png", "04.png", 0)]
    path = write_pairs(tmp_path / "p.csv", [*rows, ("01.png", "03.png", 1)])
    found, contradictions = sources.check_pairs(path, tmp_path / "a", close=True)
    assert (found["pairs"], found["must-links"], found["cannot-links"]) == ("4", "3", "1")
    assert (found["duplicates"], found["links to itself, ignored"]) == ("1", "1")
    assert (found["images"], found["images without a constraint"]) == ("6", "2")
    assert (found["must-link groups"], found["contradictions"]) == ("1 (largest: 3 images)", "0")
    assert found["after closing"] == "3 must-links, 3 cannot-links"
    assert contradictions == []


def test_a_check_without_images_shows_the_chain_of_a_contradiction(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "p.csv", [("a", "b", "same"), ("b", "c", "same"), ("a", "c", "different")])
    found, contradictions = sources.check_pairs(path)
    assert found["contradictions"] == "1"
    assert "a – b – c" in contradictions[0]


def test_a_check_counts_every_kind_of_knowledge_and_names_triplets_in_a_circle(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "p.csv", [("a", "b", 1), ("a", "c", 0.7), ("a", "d", 0.5)])
    more = {
        "labels": "image,label\nb,x\nd,y\n",
        "triplets": "anchor,near,far\na,b,c\nc,a,b\nb,c,a\na,e,d\n",
        "sizes": "least,most\n1,3\n",
    }
    for name, text in more.items():
        (tmp_path / f"{name}.csv").write_text(text)
    found, contradictions = sources.check_pairs([pairs, *(tmp_path / f"{name}.csv" for name in more)])
    kinds = "must-links", "cannot-links", "soft links, between 0 and 1", "triplets", "sizes of clusters", "images"
    assert [found[kind] for kind in kinds] == ["1", "1", "2", "4", "1", "5"]
    assert found["images without a constraint"] == "0"
    assert len(contradictions) == 1
    assert "triplets.csv lines 2, 3, 4: triplets in a circle cannot all be true" in contradictions[0]


# Sorting


def predictions(clusters: list[int], k: int) -> Predictions:
    return Predictions(np.eye(k, dtype=np.float32)[clusters])


def test_sorted_images_never_collide(tmp_path: Path, stripes: ImageSet) -> None:
    for name in ("a/b.png", "a__b.png", "A__b.png"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(stripes.images[0, ..., 0]).save(path)
    data = open_data(tmp_path / "in")
    commands.sort_images(data, predictions([1, 1, 1], 11), tmp_path / "out")
    links = sorted((tmp_path / "out" / "cluster-01").iterdir())
    assert len(links) == 3
    assert {link.resolve() for link in links} == {tmp_path / "in" / name for name in data.images.names}


def test_copies_are_files_of_their_own(tmp_path: Path, stripes: ImageSet) -> None:
    write_images(tmp_path / "in", stripes, 2)
    commands.sort_images(open_data(tmp_path / "in"), predictions([0, 1], 2), tmp_path / "out", link=False)
    copy = tmp_path / "out" / "cluster-1" / "01.png"
    assert not copy.is_symlink()
    assert copy.read_bytes() == (tmp_path / "in" / "01.png").read_bytes()


def test_images_of_an_array_are_sorted_as_pictures(tmp_path: Path, stripes: ImageSet) -> None:
    np.save(tmp_path / "x.npy", stripes.images[:2])
    commands.sort_images(open_data(tmp_path / "x.npy"), predictions([0, 1], 2), tmp_path / "out")
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out/cluster-1/1.png")), stripes.images[1, ..., 0])


def test_a_sorting_that_fails_leaves_nothing_behind(
    tmp_path: Path, stripes: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "in", stripes, 2)

    def full(*_: object) -> None:
        if any((tmp_path / "out").rglob("*.png")):
            raise OSError(errno.ENOSPC, "No space left on device")
        (tmp_path / "out/cluster-0/00.png").write_bytes(b"x")

    monkeypatch.setattr(commands, "_place_image", full)
    with pytest.raises(InputError, match="out: no space left"):
        commands.sort_images(open_data(tmp_path / "in"), predictions([0, 1], 2), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("place", ["sorted", "a/sorted"])
def test_images_are_not_sorted_into_their_own_folder(tmp_path: Path, stripes: ImageSet, place: str) -> None:
    write_images(tmp_path / "in", stripes, 2)
    with pytest.raises(InputError, match="is among the images"):
        commands.sort_images(open_data(tmp_path / "in"), predictions([0, 1], 2), tmp_path / "in" / place)


@pytest.mark.parametrize(("folder", "out"), [("s", "s/c.csv"), ("s", "s/deep/c.csv"), ("s", "s"), ("s/in", "s")])
def test_the_file_of_clusters_lies_outside_the_sorted_images(tmp_path: Path, folder: str, out: str) -> None:
    with pytest.raises(InputError, match="only sorted images go there; choose another --out"):
        commands.check_sort_folder(tmp_path / folder, "digits", tmp_path / out)
    commands.check_sort_folder(tmp_path / "s", "digits", tmp_path / "s.csv")


def test_a_folder_that_holds_something_is_not_sorted_into(tmp_path: Path, stripes: ImageSet) -> None:
    write_images(tmp_path / "in", stripes, 2)
    with pytest.raises(InputError, match="not an empty folder"):
        commands.sort_images(open_data(tmp_path / "in"), predictions([0, 1], 2), tmp_path / "in")


# Choices of a training


def run(request: Train) -> list[tuple[str, str]]:
    """What the command `train` does and prints."""
    plan = plan_training(request, Reporter())
    return commands.finish_training(plan, train(plan.data.images, plan.pairs, plan.config, plan.context))


@pytest.fixture
def asked(tmp_path: Path, stripes: ImageSet) -> Train:
    """A folder of 24 grey 8-pixel images, pairs over them, three clusters."""
    write_images(tmp_path / "in", stripes, 24)
    rows = [
        (f"{i:02d}.png", f"{j:02d}.png", int(i % 3 == j % 3)) for i, j in zip(range(12), range(12, 24), strict=True)
    ]
    pairs = write_pairs(tmp_path / "p.csv", rows)
    return Train(data=str(tmp_path / "in"), pairs=pairs, clusters=3, out=tmp_path / "run", settings={"device": "cpu"})


def test_without_a_gpu_a_folder_gets_small_images_and_a_tiny_backbone(asked: Train, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    for row in range(6):
        Image.new("RGB", (70 + row, 80), (40 * row, 0, 0)).save(tmp_path / "large" / f"{row:02d}.png")
    pairs = write_pairs(tmp_path / "q.csv", [("00.png", "01.png", 1)])
    told, asked = Told(), replace(asked, start="own")
    plan = plan_training(replace(asked, data=str(tmp_path / "large"), pairs=pairs), told)
    assert (plan.config.start.config.side, plan.config.start.config.backbone, plan.config.settings.steps) == (
        32,
        "tiny",
        500,
    )
    assert any(line.startswith("no GPU: images of 32 px, backbone tiny") for line in told.lines)
    plan = plan_training(replace(asked, data=str(tmp_path / "large"), pairs=pairs, side=40, backbone="tiny"), told)
    assert plan.config.start.config.side == 40


class Started(Reporter):
    """Keeps the titles of the jobs."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def start(self, title: str, total: int, done: int = 0) -> None:  # noqa: ARG002 (the reporter's signature)
        self.titles.append(title)


def test_without_a_gpu_a_folder_is_decoded_once(asked: Train, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    for row in range(6):
        Image.new("RGB", (70 + row, 80), (40 * row, 0, 0)).save(tmp_path / "large" / f"{row:02d}.png")
    pairs = write_pairs(tmp_path / "q.csv", [("00.png", "01.png", 1)])
    started = Started()
    plan_training(replace(asked, data=str(tmp_path / "large"), pairs=pairs), started)
    assert started.titles.count("reading images") == 1


def test_a_data_sets_row_gives_clusters_views_and_tuned_settings(tmp_path: Path) -> None:
    sources.sample_pairs("digits", tmp_path / "p.csv", n=20)
    plan = plan_training(
        Train("digits", tmp_path / "p.csv", out=tmp_path / "run", settings={"device": "cpu"}), Reporter()
    )
    assert plan.config.n_clusters == 10
    assert plan.config.views.request() == {"flip": False, "without": ["solarize"]}
    assert (plan.config.arguments["pairs_per_step"], plan.config.arguments["images_per_step"]) == (50, 150)
    assert (plan.config.start.config.mean, plan.config.settings.lr) == ((0.3054,), 0.05)


def test_what_was_given_wins_over_the_row(tmp_path: Path) -> None:
    sources.sample_pairs("digits", tmp_path / "p.csv", n=20)
    request = Train("digits", tmp_path / "p.csv", 12, tmp_path / "run", flip=True, without=("rotate",))
    given = {"arguments": {"max_entropy": 0.1}, "settings": {"device": "cpu", "lr": 0.5, "steps": 7}}
    plan = plan_training(replace(request, **given), Reporter())
    assert (plan.config.n_clusters, plan.config.arguments["max_entropy"]) == (12, 0.1)
    assert (plan.config.settings.lr, plan.config.settings.steps) == (0.5, 7)
    assert plan.config.views.request() == {"flip": True, "without": ["rotate", "solarize"]}


def test_planning_writes_nothing(asked: Train, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    plan_training(asked, Reporter())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"links": "firm"}, "unknown links"),
        ({"selection": "luck"}, "unknown selection"),
        ({"flip_fraction": 2.0}, "flip_fraction"),
    ],
)
def test_a_wrong_argument_shows_before_the_start_is_made(
    asked: Train, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        plan_training(replace(asked, arguments=arguments), Reporter())


def test_labels_that_do_not_fit_the_clusters_show_before_the_start_is_made(tmp_path: Path, stripes: ImageSet) -> None:
    np.savez(tmp_path / "x.npz", images=stripes.images, labels=stripes.labels)
    request = Train(str(tmp_path / "x.npz"), clusters=2, out=tmp_path / "run", method="supervised")
    with pytest.raises(InputError, match="3 classes for 2 outputs"):
        plan_training(replace(request, settings={"device": "cpu"}), Reporter())


def test_a_model_for_other_clusters_is_refused(asked: Train, tmp_path: Path) -> None:
    save_model(build_model(n_clusters=5, side=8, channels=1), tmp_path / "m")
    with pytest.raises(InputError, match="has 5 clusters, --clusters says 3"):
        plan_training(replace(asked, model=tmp_path / "m"), Reporter())


def test_a_model_without_clusters_still_needs_some(asked: Train, tmp_path: Path) -> None:
    save_model(build_model(n_clusters=0, side=16, channels=3), tmp_path / "m")
    plan = plan_training(replace(asked, model=tmp_path / "m"), Reporter())
    assert plan.config.stages == ("linear_scan",)
    assert (plan.data.images.side, plan.data.images.channels) == (16, 3)


def test_a_run_whose_start_is_being_made_is_in_use(asked: Train, tmp_path: Path) -> None:
    start = tmp_path / "run" / "start" / "simclr"
    start.mkdir(parents=True)
    with folder_lock(start), pytest.raises(InputError, match="in use by another process"):
        plan_training(asked, Reporter())


def test_a_run_folder_under_a_file_is_refused(asked: Train, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a file is where a folder should be"):
        plan_training(replace(asked, out=tmp_path / "p.csv" / "run"), Reporter())


@pytest.mark.parametrize("arguments", [{"recipe": "paper"}, {"recipe": "paper", "error_rate": 0.1}, {}])
def test_merged_clusters_raise_the_question_of_wrong_pairs(
    asked: Train, tmp_path: Path, arguments: dict[str, object]
) -> None:
    merged = build_model(n_clusters=3, side=8, channels=1, seed=0)
    with torch.no_grad():
        merged.head.weight.zero_()
        merged.head.bias.copy_(torch.tensor([9.0, 0.0, 0.0]))
    save_model(merged, tmp_path / "merged")
    still = {"device": "cpu", "steps": 1, "lr": 1e-9}
    request = replace(asked, model=tmp_path / "merged", method="constrained", arguments=arguments, settings=still)
    rows = run(request)
    assert any("2 of 3 clusters are empty" in text for _, text in rows)
    said = any("leave --recipe out" in text for name, text in rows if name == "warning")
    assert said == (arguments == {"recipe": "paper"})


def test_pairs_that_look_wrong_are_written_as_a_pairs_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 3
    numbers = (6 * np.eye(3, 4)[labels] + rng.normal(size=(120, 4))).astype(np.float32)
    names = [f"image, {row}" for row in range(120)]
    np.savez(tmp_path / "x.npz", images=numbers, names=names)
    right = Constraints.sample(labels, 200, seed=0)
    turned = right.flip(0.02, seed=1)
    turned.write(tmp_path / "p.csv", names=names)
    head = build_model(n_clusters=3, side=1, channels=4)
    with torch.no_grad():
        head.head.weight.copy_(3 * torch.eye(3, 4))
        head.head.bias.zero_()
    save_model(head, tmp_path / "start")
    request = Train(str(tmp_path / "x.npz"), tmp_path / "p.csv", 3, tmp_path / "run", model=tmp_path / "start")
    rows = dict(run(replace(request, settings={"device": "cpu", "steps": 2, "lr": 1e-9}, on_conflict="keep")))
    doubtful = Constraints.read(tmp_path / "run" / "doubtful.csv", names=names)
    wrong = np.flatnonzero(right.link != turned.link)
    planted, found = (
        set(zip(pairs.left.tolist(), pairs.right.tolist(), pairs.link.tolist(), strict=True))
        for pairs in (turned.take(wrong), doubtful)
    )
    assert planted == found
    assert rows["kept"].startswith("the start: no head is surely better")
    assert "doubtful.csv" in rows["look again"]
    told = json.loads((tmp_path / "run" / "evaluation.json").read_text())["verdict"]
    assert told["kept"] == "the start"
    assert f"the start: {told['why']}" == rows["kept"]


@pytest.mark.usefixtures("few_digits", "small_batches")
def test_training_on_digits_says_what_was_kept(tmp_path: Path) -> None:
    sources.sample_pairs("digits", tmp_path / "p.csv", n=60)
    model = build_model(n_clusters=10, side=8, channels=1, backbone="tiny")
    save_model(model, tmp_path / "start")
    request = Train("digits", tmp_path / "p.csv", out=tmp_path / "run", model=tmp_path / "start")
    rows = dict(run(replace(request, settings={"device": "cpu", "steps": 2})))
    assert rows["kept"].startswith("the start: ")
    assert "to judge a training" in rows["kept"]
    assert "(in %, on " in rows["scores"]
    for name, value in load_model(tmp_path / "run").state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    paper = {"arguments": {"recipe": "paper"}, "out": tmp_path / "paper"}
    request = replace(request, **paper, settings={"device": "cpu", "steps": 1})
    assert "kept" not in dict(run(request))


def test_contradictions_are_dropped_by_the_safe_recipe_alone(asked: Train, tmp_path: Path) -> None:
    rows = [("00.png", "01.png", 1), ("01.png", "02.png", 1), ("00.png", "02.png", 0)]
    asked, told = replace(asked, pairs=write_pairs(tmp_path / "q.csv", rows)), Told()
    plan = plan_training(asked, told)
    assert plan.config.arguments["recipe"] == "safe"
    assert plan.pairs is not None
    assert len(plan.pairs) == 2
    assert "1 of 3 pairs contradict others and are left out" in told.lines
    for strict in ({"arguments": {"recipe": "paper"}}, {"on_conflict": "error"}):
        with pytest.raises(InputError, match="--set on_conflict=drop"):
            plan_training(replace(asked, **strict), Reporter())
    with pytest.raises(InputError, match="unknown recipe 'quick'; known are safe, paper"):
        plan_training(replace(asked, arguments={"recipe": "quick"}, on_conflict="drop"), Reporter())


def test_default_run_folders_count_up(tmp_path: Path) -> None:
    assert planning._default_out(tmp_path, "x/photos", False) == tmp_path / "photos"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos-2").mkdir()
    assert planning._default_out(tmp_path, "photos", False) == tmp_path / "photos-3"
    assert planning._default_out(tmp_path, "photos", True) == tmp_path / "photos-2"


def test_an_evaluation_is_plain_json(stripes: ImageSet) -> None:
    assert stripes.labels is not None
    found = predictions(stripes.labels.tolist(), 3)
    told = commands.evaluate_images(stripes, found, Constraints.sample(stripes.labels, 30, seed=0))
    assert json.loads(json.dumps(told)) == told
    assert told["scores"]["acc"] == told["agreement"]["balanced"] == 1
    assert told["cluster_sizes"] == [20, 20, 20]


def test_clusters_are_written_with_names_that_need_quotes(tmp_path: Path) -> None:
    commands.write_clusters(tmp_path / "c.csv", ["a, b.png"], predictions([1], 2))
    assert (tmp_path / "c.csv").read_text() == 'name,cluster,confidence\n"a, b.png",1,1.000000\n'


# Clusters within clusters


def placed(folder: Path, clusters: dict[str, int]) -> Path:
    folder.mkdir(parents=True)
    commands.write_clusters(folder / "clusters.csv", list(clusters), predictions(list(clusters.values()), 9))
    return folder


def test_a_cluster_lies_in_the_coarse_one_that_has_most_of_its_images(tmp_path: Path) -> None:
    fine = placed(tmp_path / "fine", {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 2, "only here": 3})
    coarse = placed(tmp_path / "coarse", {"f": 7, "e": 5, "d": 4, "c": 4, "b": 5, "a": 5, "only there": 4})
    found = commands.coarse_clusters(fine / "model", coarse)  # of equal votes the smaller number
    assert found == {0: 5, 1: 4, 2: 7}
    commands.write_clusters(tmp_path / "c.csv", ["x", "y"], predictions([2, 3], 9), found)
    assert (tmp_path / "c.csv").read_text() == "name,cluster,confidence,coarse\nx,2,1.000000,7\ny,3,1.000000,\n"


def test_runs_without_clusters_or_of_other_images_are_refused(tmp_path: Path) -> None:
    fine, other = placed(tmp_path / "fine", {"a": 0}), placed(tmp_path / "other", {"b": 0})
    with pytest.raises(InputError, match=r"other: none of its images are those of .*fine; train both on the same"):
        commands.coarse_clusters(fine, other)
    with pytest.raises(InputError, match=r"nowhere: has no clusters\.csv; give the folder of a training"):
        commands.coarse_clusters(fine, tmp_path / "nowhere")
    (other / "clusters.csv").write_text("name,cluster\na,first\n")
    with pytest.raises(InputError, match=r"other/clusters\.csv: not a file of name,cluster,confidence"):
        commands.coarse_clusters(fine, other)
