"""Checkpoints in SCAN's layout: made by a network of the test's own, imported, and compared with it bit for bit."""

import copy
import csv
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from constraintmatch import cli
from constraintmatch._internal.errors import InputError
from constraintmatch.models.cluster_model import ClusterModel, load_model
from constraintmatch.models.scan_import import import_scan

State = dict[str, Any]
CIFAR = ([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010])
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


# The reference: residual networks as SCAN's checkpoints name their parts


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs or stride != 1:
            self.shortcut.extend([nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)])

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class Backbone(nn.Module):
    def __init__(self, blocks: tuple[int, ...], stem: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False) if stem == "224" else nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        pools = {"32": nn.Identity(), "96": nn.MaxPool2d(2, 2, 1), "224": nn.MaxPool2d(3, 2, 1)}
        self.pool = pools[stem]
        widths = (64, 64, 128, 256, 512)
        for layer, number in enumerate(blocks, start=1):
            first = Block(widths[layer - 1], widths[layer], 1 if layer == 1 else 2)
            rest = [Block(widths[layer], widths[layer], 1) for _ in range(number - 1)]
            setattr(self, f"layer{layer}", nn.Sequential(first, *rest))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.bn1(self.conv1(x))))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return x.mean((2, 3))


class Clusterer(nn.Module):
    def __init__(self, clusters: int = 10, heads: int = 1, blocks: tuple[int, ...] = (2, 2, 2, 2), stem: str = "32"):
        super().__init__()
        self.backbone = Backbone(blocks, stem)
        self.cluster_head = nn.ModuleList([nn.Linear(512, clusters) for _ in range(heads)])

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        logits: Tensor = self.cluster_head[head](self.backbone(x))
        return logits


def made(make: Callable[[], Any]) -> Any:
    """A network whose every weight and statistic is its own draw, so that no two can be mixed up unseen."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        network = make().eval()
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(6**0.5)  # variance 2 / inputs: the image is still felt after all layers
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                assert module.num_batches_tracked is not None
                for values in (module.weight, module.running_var):
                    values.uniform_(0.5, 1.5)
                for values in (module.bias, module.running_mean):
                    values.normal_(0, 0.2)
                module.num_batches_tracked.fill_(48_500)
    return network


@pytest.fixture(scope="module")
def scan() -> Clusterer:
    network: Clusterer = made(lambda: Clusterer(heads=3))
    return network


@pytest.fixture(scope="module")
def state(scan: Clusterer) -> State:
    """A checkpoint of one head, as self-labelling leaves it."""
    return {
        name: value
        for name, value in scan.state_dict().items()
        if not name.startswith(("cluster_head.1", "cluster_head.2"))
    }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: checkpoints are large."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def pixels(side: int = 16, n: int = 3) -> Tensor:
    """Images smaller than those of the data sets: the networks take any side and pool what is left."""
    return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def normalised(model: ClusterModel, images: Tensor) -> Tensor:
    """The network's input, which is (x / 255 - mean) / std up to rounding."""
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (model.config.mean, model.config.std)
    )
    seen = images.float() * model.scale + model.shift
    torch.testing.assert_close(seen.double(), (images.double() / 255 - mean) / std, atol=1e-5, rtol=0)
    return seen


@torch.no_grad()
def same_logits(model: ClusterModel, network: nn.Module, side: int = 16, **options: int) -> bool:
    images = pixels(side)
    expected = network(normalised(model, images), **options)
    assert expected.std(0).mean() > 0.1, "all images look alike to the reference"
    return torch.equal(model.eval()(images), expected)


def saved(content: Any, place: Path, name: str = "scan.pth.tar", **options: Any) -> Path:
    torch.save(content, place / name, **options)
    return place / name


def light(state: State) -> State:
    """The same names and shapes in a small file: one number, seen from everywhere."""
    return {name: torch.ones((), dtype=value.dtype).expand(value.shape) for name, value in state.items()}


def prefixed(state: State) -> State:
    return {f"module.{name}": value for name, value in state.items()}


# What is in the file


@pytest.mark.parametrize(
    ("name", "wrapped", "options"),
    [
        ("flat.pth", lambda state: state, {}),
        ("nested.pth.tar", lambda state: {"model": state, "epoch": 50, "optimizer": {"state": {}}}, {}),
        ("prefixed.pt", prefixed, {}),
        ("both", lambda state: {"model": prefixed(state), "head": 0}, {}),
        ("old.pth.tar", lambda state: state, {"_use_new_zipfile_serialization": False}),
    ],
)
def test_the_imported_model_gives_the_same_logits(
    name: str, wrapped: Callable[[State], Any], options: State, scan: Clusterer, state: State, place: Path
) -> None:
    model = import_scan(saved(wrapped(state), place, name, **options), "cifar10", place / "model")
    assert same_logits(model, scan)
    assert (model.config.n_clusters, model.config.side, model.config.backbone) == (10, 32, "resnet18")
    assert model.config.trained == ({"method": "scan (imported)", "file": name},)


def test_half_precision_in_the_file_is_kept_exactly(scan: Clusterer, state: State, place: Path) -> None:
    # everything made half, the counts of batches too, as a careless script does it
    model = import_scan(saved({k: v.half() for k, v in state.items()}, place), "cifar10", place / "model")
    rounded = copy.deepcopy(scan)
    rounded.cluster_head = rounded.cluster_head[:1]
    rounded.load_state_dict({name: value.half().float() for name, value in state.items()})
    assert same_logits(model, rounded)
    with torch.no_grad():
        torch.testing.assert_close(model(pixels()), scan(normalised(model, pixels())), atol=0.02, rtol=0.02)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}


def test_half_writes_a_folder_of_half_the_size(state: State, place: Path) -> None:
    file = saved(state, place)
    exact = import_scan(file, "cifar10", place / "model", half=True)
    assert (place / "model" / "model.safetensors").stat().st_size < 0.51 * file.stat().st_size
    torch.testing.assert_close(load_model(place / "model").eval()(pixels()), exact(pixels()), atol=0.02, rtol=0.02)


def test_old_files_without_counts_of_batches_are_filled_with_0(scan: Clusterer, state: State, place: Path) -> None:
    old = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    model = import_scan(saved(old, place), "cifar10", place / "model")
    assert same_logits(model, scan)
    counts = [value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert len(counts) == 20
    assert not any(counts)


def numbers_of_numpy_1(file: Path) -> Path:
    """The file with NumPy 1's place of its numbers."""
    content = file.read_bytes()
    assert b"cnumpy._core.multiarray\nscalar" in content
    file.write_bytes(content.replace(b"cnumpy._core.multiarray\nscalar", b"cnumpy.core.multiarray\nscalar"))
    return file


@pytest.mark.parametrize(
    ("said", "asked", "taken"),
    [
        ({}, None, 0),
        ({"head": 2}, 1, 1),
        ({"head": torch.tensor(2)}, None, 2),
        ({"head": np.int64(2), "best_loss": np.float64(-7.5)}, None, 2),
    ],
)
def test_one_head_of_several_is_taken(said: State, asked: int | None, taken: int, scan: Clusterer, place: Path) -> None:
    heads = {name: value for name, value in scan.state_dict().items() if name.startswith("cluster_head.")}
    content = {"model": light(scan.state_dict()) | heads, **said}
    file = saved(content, place, _use_new_zipfile_serialization=False)
    if isinstance(said.get("head"), np.int64) and np.__version__ >= "2":
        file = numbers_of_numpy_1(file)
    model = import_scan(file, "cifar10", place / "model", head=asked)
    assert model.head is not None
    assert torch.equal(model.head.weight, scan.cluster_head[taken].weight)
    assert torch.equal(model.head.bias, scan.cluster_head[taken].bias)
    assert model.config.trained == ({"method": "scan (imported)", "file": "scan.pth.tar", "head": taken},)


def test_the_best_head_may_be_a_number_of_this_numpy(scan: Clusterer, place: Path) -> None:
    file = saved({**scan.state_dict(), "head": np.int64(1)}, place)
    assert same_logits(import_scan(file, "cifar10", place / "model"), scan, head=1)


def test_a_simclr_checkpoint_gives_a_model_without_clusters(scan: Clusterer, state: State, place: Path) -> None:
    projection = made(lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 96)))
    backbone = {name: value for name, value in state.items() if name.startswith("backbone.")}
    simclr = backbone | {f"contrastive_head.{name}": value for name, value in projection.state_dict().items()}
    import_scan(saved(simclr, place), "cifar10", place / "model")
    model = load_model(place / "model").eval()
    assert (model.config.n_clusters, model.config.projection) == (0, 96)
    assert model.config.trained == ({"method": "simclr (imported)", "file": "scan.pth.tar"},)
    with torch.no_grad():
        assert torch.equal(model.project(pixels()), projection(scan.backbone(normalised(model, pixels()))))


def torchvision_names(state: State) -> State:
    return {name.replace(".shortcut.", ".downsample."): value for name, value in state.items()}


@pytest.mark.parametrize(
    ("data", "network", "renamed", "side", "normalisation"),
    [
        ("cifar100-20", lambda: Clusterer(clusters=100), dict, 32, CIFAR),
        ("stl10", lambda: Clusterer(stem="96"), dict, 96, IMAGENET),
        ("imagenet-dogs", lambda: Clusterer(15, 1, (3, 4, 6, 3), "224"), torchvision_names, 224, IMAGENET),
    ],
)
def test_each_data_set_has_its_network_its_clusters_and_scans_normalisation(
    data: str,
    network: Callable[[], Clusterer],
    renamed: Callable[[State], State],
    side: int,
    normalisation: Any,
    place: Path,
) -> None:
    reference = made(network)
    model = import_scan(saved(renamed(reference.state_dict()), place), data, place / "model")
    assert same_logits(model, reference, side=side // 3)
    config = json.loads((place / "model" / "config.json").read_text())
    assert (config["mean"], config["std"]) == normalisation
    assert (config["side"], config["n_clusters"]) == (side, reference.cluster_head[0].out_features)


# Bad input


def refused(file: Path, data: str = "cifar10", **options: Any) -> str:
    """The one line with which a file is refused; nothing is written."""
    out = file.parent / "model"
    with pytest.raises(InputError) as caught:
        import_scan(file, data, out, **options)
    assert not out.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{file}: ")


def test_files_that_are_no_checkpoints_are_refused(state: State, place: Path) -> None:
    assert refused(place / "none.pth") == "no such file"
    assert refused(place) == "no such file"
    broken = "not a torch checkpoint, or a broken one; fetch it again"
    for content in (b"", b"hello, world", bytes(range(256)) * 9, pickle.dumps({"a": 1}), pickle.dumps({"a": 1}, 2)):
        (place / "file.pth").write_bytes(content)
        assert refused(place / "file.pth") == broken
    whole = saved(light(state), place).read_bytes()
    (place / "file.pth").write_bytes(whole[: len(whole) // 2])
    assert refused(place / "file.pth") == broken
    for content in ([1, 2], {}, torch.zeros(2), {"model": {}}):
        assert refused(saved(content, place)).startswith("no weights by name in it")


class Code:
    """Makes a folder where it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place / "it ran"),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_not_run(zipped: bool, state: State, place: Path) -> None:
    file = saved({**light(state), "x": Code(place)}, place, _use_new_zipfile_serialization=zipped)
    assert "holds more than weights (posix.mkdir) and is not opened" in refused(file).replace("nt.mkdir", "posix.mkdir")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        file.write_bytes(pickle.dumps(Code(place), protocol))
        refused(file)
    assert not (place / "it ran").exists()
    pickle.loads(pickle.dumps(Code(place)))  # it would have
    assert (place / "it ran").exists()


def test_a_whole_network_and_arrays_are_more_than_weights(place: Path) -> None:
    assert "(torch.nn.modules.linear.Linear)" in refused(saved(nn.Linear(2, 2), place))
    assert "numpy" in refused(saved({"model": {"backbone.conv1.weight": np.zeros(3)}}, place))
    assert "not a torch checkpoint" in refused(saved({"head": np.complex128(1j)}, place))


def test_missing_and_unexpected_keys_are_listed_in_one_line(state: State, place: Path) -> None:
    wrong = light(state)
    for name in ("backbone.bn1.bias", "backbone.layer2.0.shortcut.0.weight", "cluster_head.0.bias"):
        wrong[f"strange.{name}"] = wrong.pop(name)
    assert refused(saved({**wrong, "epoch": 3}, place)) == (
        "not the network of a SCAN checkpoint (missing: backbone.bn1.bias, backbone.layer2.0.shortcut.0.weight, "
        "cluster_head.0.bias; unexpected: epoch, strange.backbone.bn1.bias, "
        "strange.backbone.layer2.0.shortcut.0.weight, strange.cluster_head.0.bias)"
    )
    few = refused(saved({"weight": torch.ones(2)}, place))
    assert "missing: backbone.bn1.bias," in few
    assert "more; unexpected: weight)" in few
    headless = {name: value for name, value in light(state).items() if not name.startswith("cluster_head")}
    assert "(missing: cluster_head.0.bias, cluster_head.0.weight)" in refused(saved(headless, place))


def test_shapes_and_values_that_do_not_fit_are_named(state: State, place: Path) -> None:
    changes = {
        "backbone.conv1.weight": torch.ones(64, 3, 7, 7),
        "backbone.bn1.bias": torch.ones(64, dtype=torch.int64),
        "backbone.bn1.weight": torch.full((64,), torch.nan),
        "cluster_head.0.weight": torch.ones(()),
        "cluster_head.0.bias": "ten",
    }
    said = refused(saved(light(state) | changes, place))
    assert "wrong shape: backbone.conv1.weight (64, 3, 7, 7) instead of (64, 3, 3, 3), cluster_head.0.bias ()" in said
    assert "not finite numbers: backbone.bn1.bias, backbone.bn1.weight, cluster_head.0.bias)" in said
    single = {"cluster_head.0.weight": torch.ones(1, 512), "cluster_head.0.bias": torch.ones(1)}
    assert "a single cluster" in refused(saved(light(state) | single, place))


def test_a_head_with_more_clusters_than_the_file_has_bytes_is_refused(state: State, place: Path) -> None:
    many = {"cluster_head.0.weight": torch.zeros(1, 512).expand(10**7, 512)}
    assert refused(saved({**light(state), **many}, place)).startswith("smaller than the network of its configuration")


def test_names_that_fall_together_are_refused(state: State, place: Path) -> None:
    assert "twice" in refused(saved(light(state) | {"module.backbone.bn1.bias": torch.ones(64)}, place))
    other = {"backbone.layer2.0.downsample.0.weight": torch.ones(128, 64, 1, 1)}
    assert "twice" in refused(saved(light(state) | other, place))


def test_a_network_of_another_depth_is_refused(state: State, place: Path) -> None:
    with torch.device("meta"):
        network = Clusterer(10, 1, (3, 4, 6, 3))
    deep = light(network.state_dict())
    file = saved(deep, place)
    assert refused(file) == "holds a resnet34, but cifar10 goes with resnet18; name its own data set"
    assert "wrong shape: backbone.conv1.weight (64, 3, 3, 3) instead of (64, 3, 7, 7))" in refused(file, "imagenet10")
    assert refused(saved(light(state), place), "imagenet10").startswith("holds a resnet18, but imagenet10 goes with")
    bottleneck = {"backbone.layer1.0.conv3.weight": torch.ones(256, 64, 1, 1)}
    assert refused(saved(light(state) | bottleneck, place)).startswith("holds a ResNet-50 or deeper")


@pytest.mark.parametrize("data", ["cifar", "digits", ""])
def test_data_sets_without_a_scan_network_are_refused_with_those_that_have_one(data: str, place: Path) -> None:
    said = refused(place / "none.pth", data)
    assert (
        said == f"{data}: SCAN checkpoints can be imported for cifar10, cifar100-20, stl10, imagenet10, imagenet-dogs"
    )


def test_a_head_that_is_not_there_is_refused_with_those_that_are(scan: Clusterer, state: State, place: Path) -> None:
    file = saved({"model": light(scan.state_dict()), "head": "best"}, place)
    assert refused(file, head=3) == "cluster head 3 is not in it; choose --head among 0, 1, 2"
    assert refused(file) == "cluster head best is not in it; choose --head among 0, 1, 2"
    simclr = {name: value for name, value in light(state).items() if name.startswith("backbone.")}
    assert refused(saved(simclr, place), head=0) == "cluster head 0 is not in it; it has no cluster heads"


def test_what_lies_in_the_way_is_not_overwritten(state: State, place: Path) -> None:
    file = saved(light(state), place)
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text("mine")
    for out in (place / "model", file):
        with pytest.raises(InputError, match="exists already; remove it or choose another --out"):
            import_scan(file, "cifar10", out)
    assert [path.name for path in (place / "model").iterdir()] == ["config.json"]
    assert (place / "model" / "config.json").read_text() == "mine"


# The command


def test_the_command_leaves_a_model_that_predict_takes(scan: Clusterer, place: Path) -> None:
    images = pixels(32, n=12)
    np.save(place / "images.npy", images.permute(0, 2, 3, 1).numpy())
    state, out, clusters = scan.state_dict(), place / "model", place / "clusters.csv"
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in CIFAR)
    with torch.no_grad():
        logits = scan((images / 255 - mean) / std, head=1)
    centred = {"cluster_head.1.bias": state["cluster_head.1.bias"] - logits.mean(0)}  # or one cluster has them all
    expected = (logits - logits.mean(0)).softmax(1)
    words = ["import-scan", saved(state | centred, place), "cifar10", "--out", out, "--head", 1]
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [f"model     {out} (resnet18)", "clusters  10"]
    words = ["predict", out, place / "images.npy", "--out", clusters, "--device", "cpu", "--quiet"]
    assert CliRunner().invoke(cli.app, [str(word) for word in words]).exit_code == 0
    with clusters.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["cluster"]) for row in rows] == expected.argmax(1).tolist()
    assert [float(row["confidence"]) for row in rows] == pytest.approx(expected.amax(1).tolist(), abs=1e-3)
    assert len(set(expected.argmax(1).tolist())) > 3


def test_the_command_refuses_in_one_line(place: Path) -> None:
    (place / "scan.pth").write_bytes(b"hello, world")
    words = ["import-scan", place / "scan.pth", "cifar10", "--out", place / "model"]
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == 2
    assert done.stderr == f"error: {place / 'scan.pth'}: not a torch checkpoint, or a broken one; fetch it again\n"
