"""Photographs that a pretrained encoder has seen: found again without the network, and without torch."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch import __version__
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_json
from constraintmatch._internal.progress import QUIET, Reporter
from constraintmatch.data.cache import is_decoded, kept_embeddings, user_cache
from constraintmatch.data.decoding import FolderRequest, typical_size
from constraintmatch.data.image_files import SHARDS, embeddings_in, find_images
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.pipeline.sources import Data, open_data

DEFAULT = "timm:tf_efficientnet_lite0"  # the encoder that the extra `photos` brings
_NOTE = "photos.json"  # beside the embeddings in the user's cache


def size_of(source: ImageSet | Path | str) -> tuple[int, int]:
    """The typical side and the channels of the images, from a look at some; (0, 1) where there are none."""
    if not isinstance(source, ImageSet):
        if (Path(source).is_dir() or Path(source).suffix in SHARDS) and not embeddings_in(Path(source)):
            return typical_size(Path(source))
        if not Path(source).exists():
            return 0, 1
        source = load_images(source)
    return source.side, source.channels


def start_line(encoder: str) -> str:
    """A line that says which encoder is taken."""
    others = "--start timm:NAME takes another, --start own learns from these images"
    return f"start: the pretrained encoder {encoder}; {others}"


def note_encoder(weights: Path | None, digest: str, size: tuple[int, int]) -> None:
    """Note what names the encoder for photographs, the file of its weights, and what it takes, for `known_photos`."""
    if weights is not None and (root := user_cache()) is not None:
        note = {"about": [DEFAULT, __version__], "weights": _file_state(weights), "digest": digest, "size": size}
        with suppress(OSError, InputError):
            write_json(root / "embeddings" / _NOTE, note)


def known_photos(
    source: Path | str, *, reporter: Reporter = QUIET, **how: Any
) -> tuple[Data, NDArray[np.float32]] | None:
    """Photographs whose embeddings are kept, and these, as `open_photos` gives them; None if a network has to look.

    Torch is not imported: a second start asks at once. `how` is for `open_data`.
    """
    try:
        note = read_json((user_cache() or Path()) / "embeddings" / _NOTE)
        same = note["about"] == [DEFAULT, __version__] and note["weights"] == _file_state(Path(note["weights"][0]))
        size, digest = note["size"], str(note["digest"])
    except (InputError, OSError, KeyError, TypeError, ValueError, IndexError):
        return None
    place = Path(source)
    if not same or not place.is_dir():
        return None
    if not is_decoded(FolderRequest(place, tuple(find_images(place)[0]), size[0], None, size[1], None)):
        return None
    data = open_data(source, side=size[0], channels=size[1], reporter=reporter, **how)
    kept = kept_embeddings(data.images.images, digest)
    if kept is not None:
        reporter.say(start_line(DEFAULT))
    return None if kept is None else (data, kept)


def _file_state(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]
