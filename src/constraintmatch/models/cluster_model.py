"""Networks that place images in clusters, and the folder they are kept in."""

import errno
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_atomically, write_json
from constraintmatch.models.batch_norm import BatchNorm

__all__ = [
    "BACKBONES",
    "ClusterModel",
    "Joined",
    "ModelConfig",
    "build_model",
    "default_backbone",
    "load_model",
    "made_for_side",
    "model_folder",
    "save_model",
    "unfilled_model",
    "with_clusters",
    "with_head",
    "with_projection",
]

FORMAT = 1
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HUB_LIBRARIES = ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3")
BACKBONES = ("tiny", "resnet18", "resnet34", "timm:NAME")
IDENTITY = "identity"  # the backbone of embeddings: they are the features
FLOAT32 = torch.finfo(torch.float32).max
JOIN = "+"  # between the backbones that stand side by side in one model; see `joining`


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

    Embeddings come as images of one pixel, float32 (n, d, 1, 1).
    """

    def __init__(self, config: ModelConfig, *, pretrained: bool = False) -> None:
        super().__init__()
        self.config = config
        self.backbone, width = _backbone(config, pretrained)
        self.width = width
        self.head = nn.Linear(width, config.n_clusters) if config.n_clusters else None
        self.projection = _projection(width, config.projection) if config.projection else None
        shape = (1, config.channels, 1, 1)
        most = 1 if config.side == 1 else 255
        scale = 1 / (most * torch.tensor(config.std, dtype=torch.float32))
        shift = -torch.tensor(config.mean, dtype=torch.float32) / torch.tensor(config.std, dtype=torch.float32)
        self.register_buffer("scale", scale.view(shape), persistent=False)
        self.register_buffer("shift", shift.view(shape), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the model is; one for embeddings may have no weights yet."""
        return cast(Tensor, self.scale).device

    def features(self, images: Tensor) -> Tensor:
        """Backbone features (n, width) of uint8 images (n, c, h, w)."""
        scale, shift = cast(Tensor, self.scale), cast(Tensor, self.shift)
        return cast(Tensor, self.backbone(images.float() * scale + shift))

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


class Joined(nn.Module):
    """Backbones side by side: the features of each, moved and stretched by its own numbers, one after the other.

    `gain` and `offset` (parts, channels) bring images normalised for the first part to what a part was trained on.
    """

    gain: Tensor
    offset: Tensor
    centre: Tensor
    stretch: Tensor

    def __init__(self, parts: Sequence[nn.Module], widths: Sequence[int], channels: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("gain", torch.ones(len(parts), channels))
        self.register_buffer("offset", torch.zeros(len(parts), channels))
        self.register_buffer("centre", torch.zeros(sum(widths)))
        self.register_buffer("stretch", torch.ones(sum(widths)))

    def forward(self, images: Tensor) -> Tensor:
        gain, offset = self.gain[:, :, None, None], self.offset[:, :, None, None]
        found = [part(images * gain[number] + offset[number]) for number, part in enumerate(self.parts)]
        return (torch.cat(found, dim=1) - self.centre) * self.stretch


def default_backbone(side: int) -> str:
    """The backbone for images of this side: the tiny one up to 16 pixels, ResNet-18 above; none for embeddings."""
    if side == 1:
        return IDENTITY
    return "tiny" if side <= 16 else "resnet18"


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
    name = backbone or default_backbone(side)
    if pretrained and not name.startswith("timm:"):
        raise InputError(f"{name} has no pretrained weights here; name a timm backbone, for example timm:resnet18")
    default_mean, default_std = (
        _timm_normalisation(name) if pretrained and channels == 3 else _normalisation(side, channels)
    )
    config = ModelConfig(name, side, channels, mean or default_mean, std or default_std, n_clusters)
    return _seeded(config, seed, pretrained)


def made_for_side(backbone: str) -> int:
    """The side of the images that a pretrained network of timm's was made for; 224 where it does not say."""
    import timm

    found = timm.get_pretrained_cfg(backbone.removeprefix("timm:"))
    return 224 if found is None else int(found.input_size[-1])


def unfilled_model(config: ModelConfig) -> ClusterModel:
    """A model of this shape whose weights are still to come: drawing them first would take longer than loading them."""
    with _Undrawn():
        return ClusterModel(config)


class _Undrawn(TorchFunctionMode):
    """Tensors that layers would fill with random numbers keep what they hold; no generator moves on."""

    drawing = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function in self.drawing:
            return args[0] if args else named["tensor"]
        return function(*args, **named)


def with_clusters(model: ClusterModel, n_clusters: int, *, seed: int = 0) -> ClusterModel:
    """The same backbone under a fresh cluster head, without a projection; the given model is left as it is."""
    config = replace(model.config, n_clusters=n_clusters, projection=0)
    return _on_backbone(model, config, seed)


def with_head(model: ClusterModel, weight: torch.Tensor, bias: torch.Tensor) -> ClusterModel:
    """The same backbone under a linear cluster head of these weights (k, d) and biases (k,)."""
    placed = with_clusters(model, len(bias))
    assert placed.head is not None
    with torch.no_grad():
        placed.head.weight.copy_(weight)
        placed.head.bias.copy_(bias)
    return placed


def with_projection(model: ClusterModel, width: int = 128, *, seed: int = 0) -> ClusterModel:
    """The same backbone under a fresh projection head, without clusters."""
    return _on_backbone(model, replace(model.config, n_clusters=0, projection=width), seed)


def save_model(model: ClusterModel, folder: Path | str, *, half: bool = False) -> None:
    """Write the model folder: `model.safetensors` (fp16 when `half`) and `config.json`, each atomically."""
    from safetensors.torch import save_file

    folder = Path(folder)
    weights = {
        name: (value.half() if half and value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    write_atomically(folder / "model.safetensors", lambda path: save_file(weights, path, {"format": "pt"}))
    write_json(folder / "config.json", {"format": FORMAT, **asdict(model.config), **_ONE_HEAD})


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
    _check_readable(file)
    try:
        weights = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{file}: not a readable safetensors file ({error})") from None
    model = unfilled_model(config)
    _load_strictly(model, weights, str(file))
    return model.to(device)


def _check_readable(file: Path) -> None:
    """An InputError for a file that may not be read: safetensors would say that there is none."""
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error})") from None


def _load_strictly(model: ClusterModel, weights: Mapping[str, Tensor], place: str) -> None:
    expected = model.state_dict()
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    wrong = [
        f"{key} {tuple(weights[key].shape)} instead of {tuple(expected[key].shape)}"
        for key in sorted(expected.keys() & weights.keys())
        if weights[key].shape != expected[key].shape
    ]
    if missing or unexpected or wrong:
        parts = {"missing": missing, "unexpected": unexpected, "wrong shape": wrong}
        said = "; ".join(f"{name}: {_some(keys)}" for name, keys in parts.items() if keys)
        raise InputError(f"{place}: does not fit its configuration ({said})")
    model.load_state_dict(weights)


def _some(keys: list[str], limit: int = 8) -> str:
    return ", ".join(keys[:limit]) + (f" and {len(keys) - limit} more" if len(keys) > limit else "")


_ONE_HEAD = {"n_heads": 1}  # in config.json: versions that knew several ask for it
_MOST = 1_000_000  # of anything that a network has: what is more is a slip, and would fill the memory


def _whole(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: type(value) is int and least <= value <= _MOST, f"a whole number from {least} to {_MOST:,}"


def _numbers(value: Any, least: float = -FLOAT32) -> bool:
    """Whether a value is a list of numbers that a network can hold; NaN compares as false."""
    return isinstance(value, list) and all(type(one) in (int, float) and least <= one <= FLOAT32 for one in value)


# What each entry of config.json must be: how it is told, and in words.
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
        mend = "keep the rows of one of them in head.weight and head.bias, and set n_heads to 1"
        raise InputError(f"{path}: n_heads is {reprlib.repr(heads)}; a model has one cluster head: {mend}")
    known = ModelConfig.__dataclass_fields__.keys()
    if values.keys() != known:
        odd = sorted(values.keys() ^ known)
        raise InputError(f"{path}: missing or unknown entries: {', '.join(odd)}")
    for key, (fits, words) in _FIELDS.items():
        if not fits(values[key]):
            raise InputError(f"{path}: {key} is {reprlib.repr(values[key])}; it must be {words}")
    plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    config = ModelConfig(**plain)
    if len(config.mean) != config.channels or len(config.std) != config.channels:
        raise InputError(f"{path}: mean and std need one number for each of {config.channels} channels")
    return config


def _on_backbone(model: ClusterModel, config: ModelConfig, seed: int) -> ClusterModel:
    fresh = _seeded(config, seed)
    fresh.backbone.load_state_dict(model.backbone.state_dict())
    return fresh.to(model.device)


def _seeded(config: ModelConfig, seed: int, pretrained: bool = False) -> ClusterModel:
    with torch.random.fork_rng(devices=[]):  # layers draw from the global generator; nobody else's draw may change
        torch.manual_seed(seed)
        return ClusterModel(config, pretrained=pretrained)


def _normalisation(side: int, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if side == 1:  # embeddings, as they are
        return (0.0,) * channels, (1.0,) * channels
    if channels == 1:
        return (0.5,), (0.25,)
    return IMAGENET_MEAN, IMAGENET_STD


def _projection(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))


def _backbone(config: ModelConfig, pretrained: bool) -> tuple[nn.Module, int]:
    """The backbone and the width of its features."""
    name = config.backbone
    if (name == IDENTITY) != (config.side == 1):
        what = "is for embeddings" if name == IDENTITY else "takes images, not embeddings"
        raise InputError(f"the backbone {name} {what}; leave backbone out")
    if name == IDENTITY:
        return nn.Flatten(), config.channels
    if JOIN in name:
        found = [_backbone(replace(config, backbone=part), pretrained) for part in name.split(JOIN)]
        parts, widths = zip(*found, strict=True)
        return Joined(parts, widths, config.channels), sum(widths)
    if name == "tiny":
        return _tiny(config.side, config.channels)
    if name in ("resnet18", "resnet34"):
        return _resnet(name, config.side, config.channels)
    if name.startswith("timm:"):
        return _timm(name.removeprefix("timm:"), config, pretrained)
    raise InputError(f"unknown backbone {name!r}; known are {', '.join(BACKBONES)}")


def _tiny(side: int, channels: int) -> tuple[nn.Module, int]:
    """A small convolutional network: halved down to 4 pixels, then read as 2×2 so that places still count."""

    def block(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, BatchNorm(outputs), nn.ReLU()]

    first = 2 if side > 16 else 1  # at 32 pixels the first layer would cost more than all the others
    width, side, layers = 32, -(-side // first), block(channels, 32, stride=first)
    while side > 4:
        wider = min(2 * width, 128)
        layers += block(width, wider, stride=2)
        width, side = wider, (side + 1) // 2
    # of 3 or 4 pixels this is AdaptiveAvgPool2d(2), which Apple's GPUs lack where 2 does not divide the side
    pool = nn.AvgPool2d(2, stride=side - 2) if side > 2 else nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(*layers, *block(width, width), pool, nn.Flatten()), 4 * width


def _resnet(name: str, side: int, channels: int) -> tuple[nn.Module, int]:
    """Torchvision's ResNet with a stem for the side: 3×3 without pooling under 64 pixels, with a 2×2 pool under 128."""
    from torchvision.models import resnet

    network = getattr(resnet, name)(weights=None, norm_layer=BatchNorm)
    if side < 128:
        network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        # padding 1 brings 96 pixels to 7×7 before the last pooling, as in SCAN's STL-10 network
        network.maxpool = nn.Identity() if side < 64 else nn.MaxPool2d(2, 2, padding=1)
    elif channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    network.fc = nn.Identity()
    return cast(nn.Module, network), 512


def _timm(name: str, config: ModelConfig, pretrained: bool) -> tuple[nn.Module, int]:
    import timm

    if name not in timm.list_models() and name not in timm.list_models(pretrained=True):
        near = ", ".join(timm.list_models(f"*{name[:8]}*")[:4]) or "see timm.list_models()"
        raise InputError(f"timm knows no model {name!r} (similar: {near})")
    if pretrained and not timm.is_model_pretrained(name):
        raise InputError(f"timm has no pretrained weights of {name}; name another backbone or leave pretrained out")
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": 0, "in_chans": config.channels}
    try:
        network = _timm_network(name, config.side, options)
    except Exception as error:  # hub, proxy and socket libraries share no class
        reason = _unreachable(error) if pretrained else None
        if reason is None:
            raise
        mend = "run it once with a network, then they are kept; or do without pretrained weights"
        raise InputError(f"timm:{name}: its pretrained weights cannot be fetched ({reason}); {mend}") from error
    return network, int(cast(int, network.num_features))


def _timm_normalisation(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation that the pretrained weights were made with."""
    import timm

    found = timm.get_pretrained_cfg(name.removeprefix("timm:"))
    return (found.mean, found.std) if found is not None else (IMAGENET_MEAN, IMAGENET_STD)


def _timm_network(name: str, side: int, options: Mapping[str, Any]) -> nn.Module:
    import timm

    with suppress(TypeError):  # networks that take any size have no img_size
        return cast(nn.Module, timm.create_model(name, img_size=side, **options))
    return cast(nn.Module, timm.create_model(name, **options))


def _unreachable(error: BaseException | None) -> str | None:
    """Why weights could not be fetched, in one line; None where no network and no missing file led to the error."""
    reason = None
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return None
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in HUB_LIBRARIES:
            reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        error = error.__cause__ or error.__context__
    return reason
