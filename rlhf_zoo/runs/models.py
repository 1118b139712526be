"""Models that a run starts from: a checkpoint of a stage, or a model from elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..hub.client.connect import Hub
from ..hub.client.refs import NOT_LOADED, came_from, resolve
from .data.sources import model_digest


@dataclass(frozen=True)
class ParentCheckpoint:
    """A checkpoint to start from.

    Attributes:
        path: Its folder.
        lineage: How run.json and cards name it: repository, commit, path and fingerprint.
    """

    path: Path
    lineage: Mapping[str, Any]


def model_from_elsewhere(name: str, hub: Hub, *, recipe: str, all_files: bool = False) -> ParentCheckpoint:
    """Finds a model that is not a stage of the recipe.

    Args:
        name: A folder or a Hub id.
        hub: Where Hub ids are looked up.
        recipe: Name of the recipe, for the message.
        all_files: Whether to download every file, because a custom loader may read any of them.

    Returns:
        The model and its lineage.

    Raises:
        ZooError: There is no such model.
    """
    try:
        checkpoint = resolve(name, hub, ignore=() if all_files else NOT_LOADED)
    except ZooError as error:
        problem = f"{name!r} is no stage of {recipe}, no folder, and no model that can be loaded"
        raise ZooError(f"{problem}. {error}") from error.__cause__
    if checkpoint.hub is None:
        files = {"folder": checkpoint.path.resolve().name, "files": model_digest(checkpoint.path)}
        return ParentCheckpoint(
            checkpoint.path, {"repo": None, "commit": None, "path": name, "fingerprint": name, **files}
        )
    lineage = {"repo": checkpoint.repo, "commit": checkpoint.commit, "path": None, "fingerprint": checkpoint.commit}
    return ParentCheckpoint(checkpoint.path, lineage | came_from(checkpoint.hub, hub))
