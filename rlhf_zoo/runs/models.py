"""Models that a stage loads: a checkpoint of an earlier stage, or a model from elsewhere."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ZooError, as_clause
from ..hub.client.connect import Hub
from ..hub.client.refs import NOT_LOADED, hub_lineage, resolve
from ..modeling.gguf import gguf_source
from .data.digests import MODEL_FILES, digest_of


@dataclass(frozen=True)
class ParentCheckpoint:
    """A checkpoint that a stage loads: to train it further, or as a reward model.

    Attributes:
        path: Folder of the checkpoint.
        lineage: What identifies the checkpoint in run.json and cards: repository, commit, path and fingerprint.
    """

    path: Path
    lineage: Mapping[str, Any]


def folder_lineage(folder: Path) -> dict[str, Any]:
    """Identifies the model in a local folder, for run.json and cards.

    Args:
        folder: The model's folder.

    Returns:
        {folder: its name, files: the digest of the files that are loaded}, and {gguf: the file's sha256} if the folder
        was unpacked from a GGUF file. The path is left out, because other machines do not have it.
    """
    return {"folder": folder.resolve().name, "files": _model_digest(folder), **_gguf_lineage(folder)}


def _gguf_lineage(folder: Path) -> dict[str, str]:
    """Returns {gguf: the sha256 of the GGUF file from which a model was unpacked}; {} for other models."""
    digest = gguf_source(folder).get("sha256")
    return {"gguf": digest} if isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) else {}


def _model_digest(folder: Path) -> str:
    """Returns the sha256 over the names and bytes of all files that a model and its tokenizer are loaded from."""
    return digest_of(folder, {path for pattern in MODEL_FILES for path in folder.glob(pattern)})


def model_from_elsewhere(name: str, hub: Hub, *, recipe: str, all_files: bool = False) -> ParentCheckpoint:
    """Finds a model that no stage of the recipe trains.

    Args:
        name: A folder or a Hub id.
        hub: Where Hub ids are looked up.
        recipe: Name of the recipe, for the message.
        all_files: Whether to download every file, because a custom loader may read any of them.

    Raises:
        ZooError: There is no such model.
    """
    try:
        checkpoint = resolve(name, hub, ignore=() if all_files else NOT_LOADED)
    except ZooError as error:
        problem = f"{name!r} is neither a stage of {recipe}, nor a folder, nor a model that can be loaded"
        raise ZooError(f"{problem}; {as_clause(error)}") from error.__cause__
    if checkpoint.hub is None:
        lineage = {"repo": None, "commit": None, "path": name, "fingerprint": name}
        return ParentCheckpoint(checkpoint.path, lineage | folder_lineage(checkpoint.path))
    lineage = {"repo": checkpoint.repo, "commit": checkpoint.commit, "path": None, "fingerprint": checkpoint.commit}
    lineage |= hub_lineage(checkpoint.hub, hub) | _gguf_lineage(checkpoint.path)
    return ParentCheckpoint(checkpoint.path, lineage)
