import errno
import json
import os
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from rights import as_nobody, public_folder
from safetensors.torch import load_file, save_file

from constraintmatch._internal.errors import InputError
from constraintmatch.models.backbones import default_backbone
from constraintmatch.models.cluster_model import (
    build_model,
    load_model,
    model_folder,
    save_model,
    with_clusters,
    with_projection,
)


def pixels(n: int, channels: int, side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    ("backbone", "side", "channels", "features_before_pooling"),
    [("resnet18", 32, 3, 4), ("resnet18", 96, 3, 7), ("resnet34", 32, 1, 4), ("resnet18", 224, 3, 7)],
)
def test_resnets_have_the_stem_for_their_side(
    backbone: str, side: int, channels: int, features_before_pooling: int
) -> None:
    with torch.device("meta"):  # shapes without numbers
        model = build_model(n_clusters=5, side=side, channels=channels, backbone=backbone).eval()
    seen: list[torch.Size] = []
    model.backbone.layer4.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape))
    assert model(pixels(1, channels, side).to("meta")).shape == (1, 5)
    assert seen[0][-2:] == (features_before_pooling, features_before_pooling)


def test_tiny_and_timm_backbones_give_logits() -> None:
    assert build_model(n_clusters=3, side=8, channels=1)(pixels(2, 1, 8)).shape == (2, 3)
    assert build_model(n_clusters=3, side=32, backbone="timm:resnet10t").eval()(pixels(2, 3, 32)).shape == (2, 3)
    assert build_model(n_clusters=3, side=32, backbone="timm:test_vit").eval()(pixels(2, 3, 32)).shape == (2, 3)


@pytest.mark.parametrize("side", [2, 3, 5, 8, 9, 12, 17, 33])
def test_the_tiny_backbone_reads_any_side_as_two_by_two(side: int) -> None:
    model = build_model(n_clusters=3, side=side, channels=1, backbone="tiny").eval()
    *layers, pool, flatten = model.backbone
    maps = torch.nn.Sequential(*layers)(torch.rand(2, 1, side, side))
    torch.testing.assert_close(flatten(pool(maps)), torch.nn.functional.adaptive_avg_pool2d(maps, 2).flatten(1))
    # Apple's GPUs pool adaptively only where the output divides the input
    assert not isinstance(pool, torch.nn.AdaptiveAvgPool2d) or side <= 2


def test_the_default_backbone_follows_the_side() -> None:
    assert [default_backbone(side) for side in (1, 8, 16, 17, 224)] == [
        "identity",
        "tiny",
        "tiny",
        "resnet18",
        "resnet18",
    ]


def test_normalisation_is_part_of_the_network() -> None:
    mean, std = (0.2, 0.4, 0.6), (0.1, 0.2, 0.3)
    model = build_model(n_clusters=2, side=8, mean=mean, std=std, backbone="tiny").eval()
    images = pixels(3, 3, 8)
    expected = (images.double() / 255 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    torch.testing.assert_close(model.features(images), model.backbone(expected.float()), atol=1e-5, rtol=1e-5)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = build_model(n_clusters=4, side=8, channels=1, seed=7)
    before = torch.random.get_rng_state()
    second = build_model(n_clusters=4, side=8, channels=1, seed=7)
    assert torch.equal(before, torch.random.get_rng_state())
    other = build_model(n_clusters=4, side=8, channels=1, seed=8)
    assert torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_new_heads_keep_the_backbone_and_leave_the_given_model_alone() -> None:
    model = build_model(n_clusters=4, side=8, channels=1)
    projected = with_projection(model, 16)
    assert projected.project(pixels(2, 1, 8)).shape == (2, 16)
    clustered = with_clusters(projected, 6).eval()
    assert clustered(pixels(2, 1, 8)).shape == (2, 6)
    assert clustered.projection is None
    for ours, theirs in zip(model.backbone.parameters(), clustered.backbone.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert model.head.out_features == 4


def test_a_model_without_clusters_says_so() -> None:
    with pytest.raises(InputError, match="no cluster head"):
        with_projection(build_model(n_clusters=4, side=8, channels=1))(pixels(2, 1, 8))


@pytest.mark.parametrize("half", [False, True])
def test_a_model_folder_gives_the_model_back(tmp_path: Path, half: bool) -> None:
    model = build_model(n_clusters=4, side=8, channels=1, seed=3).eval()
    save_model(model, tmp_path / "m", half=half)
    again = load_model(tmp_path / "m").eval()
    assert again.config == model.config
    images = pixels(5, 1, 8)
    tolerance = 2e-2 if half else 0
    np.testing.assert_allclose(again(images).detach(), model(images).detach(), atol=tolerance)
    stored = load_file(tmp_path / "m" / "model.safetensors")["head.weight"].dtype
    assert stored == (torch.float16 if half else torch.float32)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"model.safetensors", "config.json"}


def test_a_run_folder_stands_for_its_model(tmp_path: Path) -> None:
    save_model(build_model(n_clusters=4, side=8, channels=1), tmp_path / "run" / "model")
    assert model_folder(tmp_path / "run") == tmp_path / "run" / "model"


def test_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    save_model(build_model(n_clusters=4, side=8, channels=1), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["extra.weight"] = weights.pop("backbone.0.weight")
    weights["head.bias"] = torch.zeros(9)
    save_file(weights, file)
    with pytest.raises(InputError) as caught:
        load_model(tmp_path)
    said = str(caught.value)
    assert "missing: backbone.0.weight" in said
    assert "unexpected: extra.weight" in said
    assert "head.bias (9,) instead of (4,)" in said
    assert "\n" not in said


def test_broken_model_folders_get_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such model"):
        load_model(tmp_path / "nothing")
    with pytest.raises(InputError, match="neither a model folder"):
        load_model(tmp_path)
    save_model(build_model(n_clusters=4, side=8, channels=1), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04 a pickle, say")
    with pytest.raises(InputError, match="not a readable safetensors"):
        load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "colour": "red"}))
    with pytest.raises(InputError, match="colour"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(InputError, match="format 1"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "claimed", [{"n_clusters": 10**6}, {"projection": 10**6}, {"backbone": "+".join(["resnet34"] * 10**4)}]
)
def test_a_network_far_larger_than_its_file_is_refused_before_it_takes_memory(
    tmp_path: Path, claimed: dict[str, object]
) -> None:
    save_model(build_model(n_clusters=4, side=8, channels=1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **claimed}))
    with pytest.raises(InputError, match=r"model\.safetensors: smaller than the network of its configuration"):
        load_model(tmp_path)


WRONG_FIELDS = {
    "backbone": [7, None],
    "side": ["x", 8.0, True, 0, -1, 10**12],
    "channels": ["1", [1]],
    "mean": [0.5, ["a"], [float("nan")], [10**400]],
    "std": [0.25, [0], [-1.0], [float("inf")]],
    "n_clusters": ["4", -1, 10**12],
    "projection": [{}, 1.5],
    "trained": [{}, ["simclr"], "scan"],
}


def test_a_model_of_before_with_one_head_opens_and_one_with_several_says_what_to_do(tmp_path: Path) -> None:
    save_model(build_model(n_clusters=4, side=8, channels=1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("n_heads") == 1  # versions that knew several heads ask for it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path).config.n_clusters == 4
    for heads in (3, 0, None):
        (tmp_path / "config.json").write_text(json.dumps({**config, "n_heads": heads}))
        with pytest.raises(InputError, match=rf"config\.json: n_heads is {heads}; a model has one cluster head: keep"):
            load_model(tmp_path)


@pytest.mark.parametrize("field", WRONG_FIELDS)
def test_a_field_of_the_wrong_kind_is_named_with_its_file(tmp_path: Path, field: str) -> None:
    save_model(build_model(n_clusters=4, side=8, channels=1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for value in WRONG_FIELDS[field]:
        (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
        with pytest.raises(InputError, match=rf"config\.json: {field} is .+; it must be ") as caught:
            load_model(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_that_may_not_be_read_is_told_so(name: str) -> None:
    with public_folder() as folder:
        save_model(build_model(n_clusters=4, side=8, channels=1), folder)
        load_model(folder)
        (folder / name).chmod(0o000)
        with as_nobody(), pytest.raises(InputError, match=rf"{name}: cannot be read \(Permission denied\)"):
            load_model(folder)


def offline() -> Exception:
    """What timm raises without a network: the hub's error on top of what the system said."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    error = LocalEntryNotFoundError("we cannot find the requested files\nin the local cache")
    error.__cause__ = OSError(-2, "Name or service not known")
    return error


def refused() -> Exception:
    """What newer hubs let through from their web library, which need not be installed here."""
    return type("ConnectError", (Exception,), {"__module__": "httpx"})("connection refused")


UNREACHABLE = {
    "Name or service not known": offline,
    "offline mode is enabled": lambda: ConnectionError("Cannot reach the hub: offline mode is enabled"),
    "connection refused": refused,
    "no route": lambda: URLError("no route"),
    "TimeoutError": TimeoutError,
}


@pytest.mark.parametrize("reason", UNREACHABLE)
def test_weights_that_cannot_be_fetched_get_one_line_with_the_mend(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def create(*_: object, **options: object) -> None:
        if "img_size" in options:
            raise TypeError("unexpected keyword argument 'img_size'")
        raise UNREACHABLE[reason]()

    monkeypatch.setattr("timm.create_model", create)
    with pytest.raises(
        InputError, match=rf"timm:resnet10t: .* cannot be fetched .*{reason}.* or do without pretrained"
    ) as e:
        build_model(n_clusters=2, side=32, backbone="timm:resnet10t", pretrained=True)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(errno.ENOSPC, "No space left on device")], ids=str)
def test_other_errors_of_timm_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch, error: Exception, pretrained: bool
) -> None:
    def create(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("timm.create_model", create)
    with pytest.raises(type(error)) as caught:
        build_model(n_clusters=2, side=32, backbone="timm:resnet10t", pretrained=pretrained)
    assert caught.value is error


def test_impossible_models_are_refused() -> None:
    with pytest.raises(InputError, match="one cluster"):
        build_model(n_clusters=1, side=8)
    with pytest.raises(InputError, match="unknown backbone 'vgg'"):
        build_model(n_clusters=2, side=8, backbone="vgg")
    with pytest.raises(InputError, match=r"backbone tiny\+tiny: trained models are joined"):
        build_model(n_clusters=2, side=8, backbone="tiny+tiny")
    with pytest.raises(InputError, match=r"backbone is \[7\]; give the name of one, such as resnet18"):
        build_model(n_clusters=2, side=8, backbone=[7])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown backbone ''"):
        build_model(n_clusters=2, side=8, backbone="")
    with pytest.raises(InputError, match="timm knows no model 'resnet1'"):
        build_model(n_clusters=2, side=32, backbone="timm:resnet1")
    with pytest.raises(InputError, match=r"no pretrained weights of botnet50ts_256; .* leave pretrained out"):
        build_model(n_clusters=2, side=32, backbone="timm:botnet50ts_256", pretrained=True)


def test_loading_gives_what_was_saved_and_draws_nothing(tmp_path: Path) -> None:
    saved = build_model(n_clusters=4, side=32, backbone="resnet18", seed=7)
    save_model(saved, tmp_path / "model")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loaded = load_model(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)
    for (name, mine), theirs in zip(saved.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
