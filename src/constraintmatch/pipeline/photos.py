"""Photographs that a pretrained encoder has seen: found again without the network, and without torch."""

import hashlib
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constraintmatch import __version__
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import read_json, write_json
from constraintmatch._internal.progress import QUIET, Reporter
from constraintmatch.data.cache import decode_cached, is_decoded, kept_embeddings, user_cache
from constraintmatch.data.decoding import FolderRequest, typical_size
from constraintmatch.data.image_files import SHARDS, embeddings_in, find_images
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.pipeline.sources import Data, open_data

DEFAULT = "timm:tf_efficientnet_lite0"  # the encoder that the extra `photos` brings
FIRST = 256  # photographs of a large folder that are asked about while the others are embedded
_NOTE = "photos.json"  # with the embeddings in the user's cache


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
    found = embedded_photos(source, size, digest, reporter=reporter, **how) if same else None
    if found is not None:
        reporter.say(start_line(DEFAULT))
    return found


def embedded_photos(
    source: Path | str, size: Sequence[int], encoder: str, **how: Any
) -> tuple[Data, NDArray[np.float32]] | None:
    """The images of a folder, and the kept embeddings of a network that its digest names; None if some are missing."""
    place = Path(source)
    files = tuple(find_images(place)[0]) if place.is_dir() else ()
    if not files or not is_decoded(FolderRequest(place, files, size[0], None, size[1], None)):
        return None
    data = open_data(source, side=size[0], channels=size[1], **how)
    kept = kept_embeddings(data.images.images, encoder)
    return None if kept is None else (data, kept)


def first_photos(source: Path | str, size: tuple[int, int], asked: Collection[str] = ()) -> Data | None:
    """Some photographs of a large folder, drawn by their names, and those that are `asked` about; None: it is small.

    The draw is the same each time. A photograph that cannot be read is left out without a word: all are read later.
    """
    folder = Path(os.path.abspath(source))  # noqa: PTH100 (resolve would follow links)
    files = find_images(folder)[0]
    if len(files) <= 2 * FIRST or files[0].shard:
        return None
    drawn = sorted(files, key=lambda file: hashlib.blake2b(file.name.encode()).digest())[:FIRST]
    names = {file.name for file in drawn} | set(asked)
    request = FolderRequest(folder, tuple(file for file in files if file.name in names), size[0], None, size[1], None)
    pixels, known, _ = decode_cached(request, suffix="-first")
    record = {"kind": "folder", "name": folder.name, "source": str(folder), "side": size[0], "channels": size[1]}
    return Data(ImageSet(pixels, known), None, None, record) if len(known) > 1 else None


class _Reordered:
    """The rows of an array in another order, without a copy: one at a time."""

    def __init__(self, rows: NDArray[np.uint8], order: NDArray[np.int64]) -> None:
        self._rows, self._order, self.shape, self.dtype = rows, order, rows.shape, rows.dtype

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, row: int) -> Any:
        return self._rows[self._order[row]]


def begin_with(first: ImageSet, images: ImageSet) -> tuple[ImageSet, NDArray[np.int64]]:
    """All images in an order that begins with the first ones, one row at a time, and the rows that they had."""
    rows, known = images.rows(), set(first.names)
    if gone := next((name for name in first.names if name not in rows), None):
        raise InputError(f"{gone} was moved or changed meanwhile", fix="start again to ask about all photographs")
    order = np.array([rows[name] for name in first.names] + [row for name, row in rows.items() if name not in known])
    pixels: Any = _Reordered(images.images, order)
    return ImageSet(pixels, tuple(images.names[row] for row in order)), order


def _file_state(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]
