"""Checkpoints of hdet 0.1: a folder of torch's distributed checkpoint, without checksums."""

import json
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from hdet.checkpoint.manifest import FILE_NAME
from hdet.checkpoint.sharded import INDEX, Reader, read_texts

SCHEDULER = "hdet"
TEXTS = {"optimizer": "optimizer.others", "outer": "outer.others"}
"""The entries with the settings of the optimizers."""


def is_at(path: Path) -> bool:
    """Whether a folder is such a checkpoint."""
    if (path / FILE_NAME).exists() or not (path / INDEX).exists():
        return False
    return SCHEDULER in Reader(str(path)).read_metadata().state_dict_metadata


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plain data of each part, and nothing of single processes."""
    known = Reader(str(path)).read_metadata().state_dict_metadata
    others = [name for name, about in known.items() if isinstance(about, BytesStorageMetadata)]
    texts = read_texts(path, others)
    plain: dict[str, Any] = {part: texts[name] for part, name in TEXTS.items() if name in texts}
    plain["scheduler"] = json.loads(texts[SCHEDULER])
    start = "model."
    plain["model"] = {n.removeprefix(start): v for n, v in texts.items() if n.startswith(start)}
    return plain, {}
