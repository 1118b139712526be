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
    """A checkpoint to start from: where it lies, and its name for run.json and cards."""

    path: Path
    lineage: Mapping[str, Any]


def model_from_elsewhere(name: str, hub: Hub, *, recipe: str, whole: bool = False) -> ParentCheckpoint:
    """Finds a model that is no stage of the recipe.

    Args:
        name: A folder, or a Hub id.
        hub: Where Hub ids are looked up.
        recipe: The name of the recipe, for the message.
        whole: Fetch every file, since a loader of the user's own may read any of them.

    Raises:
        ZooError: There is no such model.
    """
    try:
        found = resolve(name, hub, but=() if whole else NOT_LOADED)
    except ZooError as error:
        what = f"{name!r} is no stage of {recipe}, no folder, and no model that can be had"
        raise ZooError(f"{what}. {error}") from error.__cause__
    if found.hub is None:
        files = {"folder": found.path.resolve().name, "files": model_digest(found.path)}
        return ParentCheckpoint(found.path, {"repo": None, "commit": None, "path": name, "fingerprint": name, **files})
    lineage = {"repo": found.repo, "commit": found.commit, "path": None, "fingerprint": found.commit}
    return ParentCheckpoint(found.path, lineage | came_from(found.hub, hub))
