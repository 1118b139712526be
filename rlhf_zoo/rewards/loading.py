"""Reward models as PPO is given them: a classifier, one label of one, or a model that its user loads."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import ZooError
from ..model_files import AS_SAVED, Loading, load_model
from ..models import load_classifier
from ..plugins import REWARDS, load_object

__all__ = ["find_loader", "load_reward_model"]


def find_loader(name: str) -> Any:
    """The class or function that `reward_model_loader` names. Raises ZooError where there is none."""
    found = load_object(name, group=REWARDS)
    if not callable(found):
        raise ZooError(
            f"reward_model_loader {name!r} is a {type(found).__name__}: name a class with from_pretrained, or a "
            "function of a path that returns a model."
        )
    return found


def load_reward_model(
    path: str | Path, *, label: str | None = None, loader: str | None = None, how: Loading = AS_SAVED
) -> PreTrainedModel:
    """The reward model at a path or Hub id, which stands still and so is held as it was saved.

    label: of a classifier of several labels, the one whose output is the score. loader: "module:attribute" of a class
    whose `from_pretrained` loads it, or of a function that is called with the path; it must come from the user, never
    from a download. Raises ZooError for what cannot be loaded, and for a loader that gives no model of transformers.
    """
    if loader is None:
        return load_classifier(path, label=label, how=how)
    found, what = find_loader(loader), f"The reward model {path}"
    if inspect.isclass(found) and hasattr(found, "from_pretrained"):
        return load_model(found, path, what=what, how=how)
    try:
        model = found(str(path))
    except ZooError:
        raise
    except Exception as error:
        raise ZooError(
            f"{what} cannot be loaded: reward_model_loader {loader!r} raised {type(error).__name__} ({error}); mend it."
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise ZooError(
            f"reward_model_loader {loader!r} gave a {type(model).__name__} for {path}: let it return a PreTrainedModel."
        )
    return model
