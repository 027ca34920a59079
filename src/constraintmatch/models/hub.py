"""Models on the Hugging Face hub: fetched by name, put there with a card."""

import re
import tempfile
from pathlib import Path

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch.models.cluster_model import ClusterModel, save_model

_CARD = """---
library_name: constraintmatch
pipeline_tag: image-classification
tags: [clustering, constrained-clustering]
---

# {name}

Places images in {clusters} clusters, which have numbers and no names. Made by ConstraintMatch from images and a few
answers to "same or different?".

```python
from constraintmatch import ConstraintMatch

model = ConstraintMatch.from_pretrained("{name}")
clusters = model.predict("folder-of-images")
```

| | |
|---|---|
| network | `{backbone}`, {numbers:,} numbers |
| takes | {takes} |
{stages}
"""


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
    """Put the model folder and a card on the hub as `owner/name`; its address there."""
    _check_hub_name(name)
    from huggingface_hub import HfApi

    config, what = model.config, "embeddings of {1} numbers" if model.config.side == 1 else "images of {0} × {0} pixels"
    lines = [f"| trained by | {one['method']}, {one.get('steps', 0):,} steps |" for one in config.trained]
    card = _CARD.format(
        name=name,
        clusters=config.n_clusters,
        backbone=config.backbone,
        numbers=sum(part.numel() for part in model.parameters()),
        takes=what.format(config.side, config.channels),
        stages="\n".join(lines),
    )
    with tempfile.TemporaryDirectory() as place:
        save_model(model, place, half=half)
        (Path(place) / "README.md").write_text(card, encoding="utf-8")
        try:
            hub = HfApi()
            address = str(hub.create_repo(name, private=private, exist_ok=True))
            hub.upload_folder(repo_id=name, folder_path=place, commit_message=message)
        except Exception as error:  # as above
            fix = "log in with hf auth login, and check the name and the network"
            raise InputError(f"the hub did not take it ({one_line(error)[:200]})", name, fix) from None
    return address


def _check_hub_name(name: str) -> None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{name}: no such model or run folder (and not a hub name such as owner/model)")
