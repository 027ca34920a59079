"""Several trained networks as one model: what each of them sees, side by side.

Two networks that were trained differently on the same images err on different ones. Neighbours in the features of both
are of one kind more often than in the features of either, so answers are carried further (docs/findings.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_new_folder
from constraintmatch._internal.progress import Quiet, Reporter, watched
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import embed
from constraintmatch.methods.parts.preparation import check_images, spread
from constraintmatch.models.backbones import JOIN, Joined
from constraintmatch.models.cluster_model import ClusterModel, load_model, save_model, unfilled_model
from constraintmatch.pipeline.sources import open_at
from constraintmatch.training.loop import choose_device

__all__ = ["join", "join_folders"]

MEASURED = 10_000  # images by which the features of the networks are brought to one length


def join(
    models: Sequence[ClusterModel],
    images: ImageSet,
    *,
    device: torch.device | str | None = None,
    reporter: Reporter | None = None,
) -> ClusterModel:
    """One model of two networks or more. It places images as the first one does, until its head is told or trained.

    The features of each are centred on those of the images, at most 10,000 of them, and brought to length 1 on the
    mean, so that none of them outweighs the others. Heads of the others and projections are left out.
    """
    _check(models)
    sample = images.take(spread(len(images), MEASURED))
    first = models[0].config
    config = replace(
        first,
        backbone=JOIN.join(model.config.backbone for model in models),
        projection=0,
        trained=tuple(stage for model in models for stage in model.config.trained),
    )
    joined = unfilled_model(config)
    backbone = joined.backbone
    assert isinstance(backbone, Joined)
    with torch.no_grad():
        for number, (model, part) in enumerate(zip(models, backbone.parts, strict=True)):
            part.load_state_dict(model.backbone.state_dict())
            own = torch.tensor(model.config.std)
            backbone.gain[number] = torch.tensor(first.std) / own
            backbone.offset[number] = (torch.tensor(first.mean) - torch.tensor(model.config.mean)) / own
        measured = [_measured(model, sample, device, reporter or Quiet()) for model in models]
        backbone.centre.copy_(torch.cat([centre for centre, _ in measured]))
        backbone.stretch.copy_(torch.cat([torch.full_like(centre, stretch) for centre, stretch in measured]))
        _take_head(joined, models[0], *measured[0])
    return joined


def join_folders(
    folders: Sequence[Path | str],
    source: Path | str,
    out: Path | str,
    *,
    split: str | None = None,
    data_dir: Path | str | None = None,
    strict: bool = False,
    device: str | None = None,
    half: bool = False,
    reporter: Reporter | None = None,
) -> ClusterModel:
    """The model that `join` makes of model or run folders, written to the new model folder `out`."""
    place, out = choose_device(device), Path(out)
    check_new_folder(out)
    models = [load_model(folder) for folder in folders]
    _check(models)
    size = models[0].config.side, models[0].config.channels
    data = open_at(source, size, "train", split=split, data_dir=data_dir, strict=strict, reporter=reporter or Quiet())
    check_images(models[0], data.images)
    joined = join(models, data.images, device=place, reporter=reporter)
    save_model(joined, out, half=half)
    return joined


def _measured(
    model: ClusterModel, images: ImageSet, device: torch.device | str | None, reporter: Reporter
) -> tuple[Tensor, float]:
    """The mean of a network's features (d,), and what brings them to length 1 around it."""
    with watched(reporter, f"measuring {model.config.backbone}", len(images)) as progress:
        features = torch.from_numpy(embed(model, images, device=device, progress=progress))
    centre = features.mean(0)
    length = float((features - centre).norm(dim=1).mean())
    if not length > 1e-5 * float(centre.norm()):
        raise InputError("a network sees no difference between the images: it cannot be joined to another one")
    return centre, 1 / length


def _take_head(joined: ClusterModel, first: ClusterModel, centre: Tensor, stretch: float) -> None:
    """The first model's head on its part of the features, as they are now."""
    if joined.head is None or first.head is None:
        return
    weight, bias = (part.detach().cpu() for part in (first.head.weight, first.head.bias))
    joined.head.weight.zero_()
    joined.head.weight[:, : first.width] = weight / stretch
    joined.head.bias.copy_(bias + weight @ centre)


def _check(models: Sequence[ClusterModel]) -> None:
    if len(models) < 2:
        raise InputError("join needs two models or more")
    first = models[0].config
    if any(model.config.side == 1 for model in models):
        raise InputError("models of embeddings have no networks to join; put the embeddings side by side instead")
    if any(JOIN in model.config.backbone for model in models):
        raise InputError("a joined model cannot be joined again; name all its networks at once")
    for other in (model.config for model in models[1:]):
        if (other.side, other.channels) != (first.side, first.channels):
            raise InputError(
                f"models for {first.side} and {other.side} pixels, {first.channels} and {other.channels} channels "
                "cannot be joined: they must take the same images"
            )
