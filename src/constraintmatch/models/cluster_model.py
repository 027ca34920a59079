"""Networks that place images in clusters, and where they are kept: a folder, or the Hugging Face hub."""

import copy
import math
import re
import reprlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch._internal.files import read_errors, read_json, write_atomically, write_json
from constraintmatch.models import backbones
from constraintmatch.models.backbones import ENCODER

FORMAT = 1
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOAT32 = torch.finfo(torch.float32).max
_SPARE = 64_000_000  # numbers that any network may have: less than 256 MB


@dataclass(frozen=True)
class ModelConfig:
    """What `config.json` holds: enough to build the network again and to feed it."""

    backbone: str
    side: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    n_clusters: int = 0  # 0: no cluster head yet (a model fresh from its pretext task)
    projection: int = 0  # width of the projection head of a pretext task; 0: none
    trained: tuple[Mapping[str, Any], ...] = ()  # one entry a stage: method, data, steps


class ClusterModel(nn.Module):
    """Cluster logits (n, k) for uint8 images (n, c, h, w); normalisation is part of the network.

    Embeddings come as images of one pixel, float32 (n, d, 1, 1). A network takes those that it made itself, too.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, config: ModelConfig, *, pretrained: bool = False, made: tuple[nn.Module, int] | None = None
    ) -> None:
        """`made` is a ready backbone and its width."""
        super().__init__()
        self.config = config
        self.backbone, self.width = made or backbones.make_backbone(
            config.backbone, config.side, config.channels, pretrained=pretrained
        )
        self.head = nn.Linear(self.width, config.n_clusters) if config.n_clusters else None
        hidden = nn.Linear(self.width, self.width) if config.projection else None
        self.projection = nn.Sequential(hidden, nn.ReLU(), nn.Linear(self.width, config.projection)) if hidden else None
        mean, std = (torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (config.mean, config.std))
        self.register_buffer("scale", 1 / ((1 if config.side == 1 else 255) * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the model is; one for embeddings may have no weights yet."""
        return self.scale.device

    @property
    def is_encoder(self) -> bool:
        """Whether its network is a pretrained one whose features are used as they are."""
        return self.config.backbone.startswith(ENCODER)

    def features(self, images: Tensor) -> Tensor:
        """Backbone features (n, width) of uint8 images (n, c, h, w)."""
        if images.shape[-1] == 1 < self.config.side:
            return images.flatten(1).float()  # the backbone made them
        return cast(Tensor, self.backbone(images.float() * self.scale + self.shift))

    def classify(self, features: Tensor) -> Tensor:
        """Cluster logits (n, k) of features."""
        if self.head is None:
            raise InputError(
                "this model has no cluster head yet: train it with scan, constrained or constraintmatch first"
            )
        return cast(Tensor, self.head(features))

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))

    def project(self, images: Tensor) -> Tensor:
        """Projections (n, d) for the pretext task; features where the model has no projection head."""
        features = self.features(images)
        return features if self.projection is None else cast(Tensor, self.projection(features))


def build_model(
    *,
    n_clusters: int,
    side: int,
    channels: int = 3,
    backbone: str | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    pretrained: bool = False,
    seed: int = 0,
) -> ClusterModel:
    """A fresh model; its initial weights depend on the seed alone. `pretrained` fetches a timm backbone's weights."""
    if n_clusters == 1:
        raise InputError("n_clusters is 1: one cluster holds everything; ask for 2 or more")
    if n_clusters < 0:
        raise InputError(f"n_clusters is {n_clusters}; ask for 2 or more")
    name = backbones.default_backbone(side) if backbone is None else backbone
    if not isinstance(name, str):
        raise InputError(f"backbone is {reprlib.repr(name)}; give the name of one, such as resnet18")
    if backbones.JOIN in name:
        raise InputError(f"backbone {name}: trained models are joined, not new ones; use constraintmatch join")
    if pretrained and not name.removeprefix(ENCODER).startswith(backbones.NAMED):
        raise InputError(f"{name} has no pretrained weights here; name a timm backbone, for example timm:resnet18")
    usual: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET_MEAN, IMAGENET_STD
    if pretrained and channels == 3 and (made := backbones.timm_config(name)) is not None:
        usual = made.mean, made.std
    elif side == 1:  # embeddings stay what they are
        usual = (0.0,) * channels, (1.0,) * channels
    elif channels == 1:
        usual = (0.5,), (0.25,)
    config = ModelConfig(name, side, channels, mean or usual[0], std or usual[1], n_clusters)
    return _build(config, seed, pretrained)


def wrap_encoder(body: nn.Module, name: str, side: int, channels: int = 3) -> ClusterModel:
    """A model without clusters whose features are what a given network makes of images, brought to length 1.

    The network gets images (n, c, side, side), normalised as those of ImageNet if they have colours.
    """
    usual = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.25,) * channels)
    return _wrap(body, ModelConfig(ENCODER + name, side, channels, *usual))


def _wrap(body: nn.Module, config: ModelConfig) -> ClusterModel:
    """A model around a network; a pass of empty images shows its width."""
    whole, side = backbones.Encoder(body).eval(), config.side
    try:
        with torch.no_grad():
            width = int(whole(torch.zeros(2, config.channels, side, side)).shape[1])
    except Exception as error:  # a network of a user may raise anything
        problem = f"does not make features of images of {side} × {side} ({one_line(error)[:120]})"
        raise InputError(problem, config.backbone.removeprefix(ENCODER)) from None
    return ClusterModel(config, made=(whole, width))


def unfilled_model(config: ModelConfig, file: Path | None = None) -> ClusterModel:
    """A model of this shape without its weights: drawing them first would take longer than loading them.

    A network that is far larger than the file of its weights is an InputError, before it takes memory.
    """
    with _Undrawn(file):
        return ClusterModel(config)


class _Undrawn(TorchFunctionMode):
    """Inside, layers do not fill their tensors with random numbers, and no generator is used."""

    drawing = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)
    making = (torch.empty, torch.zeros, torch.ones)

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self.file = file
        self.left = math.inf if file is None else file.stat().st_size // 2 + _SPARE  # numbers of 2 bytes, or of more

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function in self.drawing:
            return args[0] if args else named["tensor"]
        if function in self.making:
            size = named.get("size", args[0] if args and not isinstance(args[0], int) else args)
            self.left -= math.prod(size)
            if self.left < 0:
                raise InputError(f"{self.file}: smaller than the network of its configuration; check or fetch it again")
        return function(*args, **named)


def with_clusters(model: ClusterModel, n_clusters: int, *, seed: int = 0) -> ClusterModel:
    """The same backbone under a fresh cluster head, without a projection; the given model does not change."""
    return _on_backbone(model, replace(model.config, n_clusters=n_clusters, projection=0), seed)


def with_head(model: ClusterModel, weight: Tensor, bias: Tensor) -> ClusterModel:
    """The same backbone under a linear cluster head of these weights (k, d) and biases (k,)."""
    placed = _on_backbone(model, replace(model.config, n_clusters=len(bias), projection=0), None)
    assert placed.head is not None
    placed.head.load_state_dict({"weight": weight, "bias": bias})
    return placed


def mean_head(models: Sequence[ClusterModel]) -> ClusterModel:
    """The first model with a head whose logits are the mean of theirs: the product of what they believe."""
    heads = [[model.state_dict()[f"head.{part}"] for model in models] for part in ("weight", "bias")]
    return with_head(models[0], *(torch.stack(each).mean(0) for each in heads))


def with_projection(model: ClusterModel, width: int = 128, *, seed: int = 0) -> ClusterModel:
    """The same backbone under a fresh projection head, without clusters."""
    return _on_backbone(model, replace(model.config, n_clusters=0, projection=width), seed)


def save_model(model: ClusterModel, folder: Path | str, *, half: bool = False) -> None:
    """Write the model folder: `model.safetensors` (fp16 when `half`) and `config.json`, each atomically."""
    from safetensors.torch import save_file

    folder = Path(folder)
    if model.config.backbone.startswith(ENCODER + backbones.MODULE):
        fix = "keep the estimator with pickle"
        raise InputError("a network of your own cannot be built again from a model folder", folder, fix)
    weights = {
        name: (value.half() if half and value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    write_atomically(folder / "model.safetensors", lambda path: save_file(weights, path, {"format": "pt"}))
    old = {"n_heads": 1}  # versions that knew several heads ask for it
    write_json(folder / "config.json", {"format": FORMAT, **asdict(model.config), **old})


def model_folder(path: Path | str) -> Path:
    """The model folder that `path` names: itself, or `model/` inside a run folder."""
    path = Path(path)
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            return folder
    if not path.exists():
        raise InputError(f"{path}: no such model or run folder")
    raise InputError(f"{path}: neither a model folder (config.json, model.safetensors) nor a run that left one")


def load_model(path: Path | str, *, device: torch.device | str = "cpu") -> ClusterModel:
    """The model of a model folder or run folder; keys that are missing or too many are an error that lists them."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = model_folder(path)
    config, file = _read_config(folder / "config.json"), folder / "model.safetensors"
    with read_errors(file):
        file.open("rb").close()  # of a file that may not be read safetensors says that there is none
        try:
            weights = load_file(file)
        except (SafetensorError, ValueError) as error:
            raise InputError(f"{file}: not a readable safetensors file ({error})") from None
    if config.backbone.startswith(ENCODER + backbones.ONNX) and "backbone.body.content" in weights:
        model = _wrap(backbones.OnnxNetwork(weights["backbone.body.content"], str(file)), config)
    else:
        model = unfilled_model(config, file)
    if misfits := list_misfits(model.state_dict(), weights):
        raise InputError(f"{file}: does not fit its configuration ({misfits})")
    model.load_state_dict(weights)
    return model.to(device)


def fetch_model(name: str, revision: str | None = None) -> Path:
    """The model folder that the hub has as `owner/name`, in its cache."""
    _check_hub_name(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # not found, no network, no permission: each comes as another exception
        said = one_line(error)[:200]
        raise InputError(f"{name}: no such folder, and the Hugging Face hub did not give it ({said})") from None


def push_model(model: ClusterModel, name: str, *, private: bool, half: bool, message: str) -> str:
    """Put the model folder and a card on the hub as `owner/name`, and return its address."""
    _check_hub_name(name)
    from huggingface_hub import HfApi

    side, channels = model.config.side, model.config.channels
    takes = f"embeddings of {channels} numbers" if side == 1 else f"images of {side} × {side} pixels"
    lines = [f"| trained by | {one['method']}, {one.get('steps', 0):,} steps |" for one in model.config.trained]
    numbers = sum(part.numel() for part in model.parameters())
    card = (files("constraintmatch.models") / "card.md").read_text(encoding="utf-8")
    card = card.format(name=name, config=model.config, numbers=numbers, takes=takes, stages="\n".join(lines))
    with tempfile.TemporaryDirectory() as place:
        save_model(model, place, half=half)
        (Path(place) / "README.md").write_text(card, encoding="utf-8")
        try:
            hub = HfApi()
            address = str(hub.create_repo(name, private=private, exist_ok=True))
            hub.upload_folder(repo_id=name, folder_path=place, commit_message=message)
        except Exception as error:  # as above
            fix = "log in with hf auth login, and check the name and the network"
            raise InputError(f"the hub refused it ({one_line(error)[:200]})", name, fix) from None
    return address


def _check_hub_name(name: str) -> None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{name}: no such model or run folder (and not a hub name such as owner/model)")


def list_misfits(
    expected: Mapping[str, Tensor], weights: Mapping[str, Any], further: Mapping[str, list[str]] | None = None
) -> str:
    """The keys that are missing, unexpected or of a wrong shape, and further lists, in one line; empty if they fit."""
    both = sorted(expected.keys() & weights.keys())
    shapes = [(key, tuple(getattr(weights[key], "shape", ())), tuple(expected[key].shape)) for key in both]
    lists = {
        "missing": sorted(expected.keys() - weights.keys()),
        "unexpected": sorted(weights.keys() - expected.keys()),
        "wrong shape": [f"{key} {shape} instead of {right}" for key, shape, right in shapes if shape != right],
        **(further or {}),
    }
    more = {what: f" and {len(keys) - 8} more" if len(keys) > 8 else "" for what, keys in lists.items()}
    return "; ".join(f"{what}: {', '.join(keys[:8])}{more[what]}" for what, keys in lists.items() if keys)


_MOST = 1_000_000  # of anything that a network has: more is a mistake, and would fill the memory


def _whole(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: type(value) is int and least <= value <= _MOST, f"a whole number from {least} to {_MOST:,}"


def _numbers(value: Any, least: float = -FLOAT32) -> bool:
    """Whether a value is a list of numbers that a network can hold; NaN compares as false."""
    return isinstance(value, list) and all(type(one) in (int, float) and least <= one <= FLOAT32 for one in value)


# What each entry of config.json must be: a check, and words for it.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "backbone": (lambda value: isinstance(value, str), "the name of a backbone"),
    "side": _whole(1),
    "channels": _whole(1),
    "mean": (_numbers, "a list of numbers"),
    "std": (lambda value: _numbers(value, 1 / FLOAT32), "a list of numbers over 0"),
    "n_clusters": _whole(0),
    "projection": _whole(0),
    "trained": (
        lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
        "a list with an object for each stage",
    ),
}


def _read_config(path: Path) -> ModelConfig:
    values = read_json(path)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise InputError(f"{path}: not a model configuration of format {FORMAT}")
    if (heads := values.pop("n_heads", 1)) != 1:
        fix = "keep the rows of one of them in head.weight and head.bias, and set n_heads to 1"
        raise InputError(f"{path}: n_heads is {reprlib.repr(heads)}; a model has one cluster head: {fix}")
    if odd := sorted(values.keys() ^ _FIELDS.keys()):
        raise InputError(f"{path}: missing or unknown entries: {', '.join(odd)}")
    for key, (fits, words) in _FIELDS.items():
        if not fits(values[key]):
            raise InputError(f"{path}: {key} is {reprlib.repr(values[key])}; it must be {words}")
    plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    config = ModelConfig(**plain)
    if len(config.mean) != config.channels or len(config.std) != config.channels:
        raise InputError(f"{path}: mean and std need one number for each of {config.channels} channels")
    return config


def _on_backbone(model: ClusterModel, config: ModelConfig, seed: int | None) -> ClusterModel:
    """A copy of the model's backbone under what the configuration says; without a seed the head is not drawn."""
    if model.is_encoder:  # to build one anew takes a second
        return _build(config, seed or 0, made=(copy.deepcopy(model.backbone), model.width)).to(model.device)
    fresh = unfilled_model(config) if seed is None else _build(config, seed)
    fresh.backbone.load_state_dict(model.backbone.state_dict())
    return fresh.to(model.device)


def _build(config: ModelConfig, seed: int, pretrained: bool = False, **made: Any) -> ClusterModel:
    with torch.random.fork_rng(devices=[]):  # layers draw from the global generator; no other draw may change
        torch.manual_seed(seed)
        return ClusterModel(config, pretrained=pretrained, **made)
