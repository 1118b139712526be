"""Reward models as PPO is given them: a classifier, one label of one, or a model that its user loads."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError
from ..modeling.loading import AS_SAVED, Loading, load_model, load_tokenizer
from ..modeling.models import load_classifier
from ..plugins import REWARDS, load_object
from .ensemble import RewardEnsemble
from .model import RewardModel


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


def load_reward(
    paths: Sequence[str | Path],
    policy_tokenizer: PreTrainedTokenizerBase,
    *,
    place: Callable[[PreTrainedModel], Any],
    label: str | None = None,
    output: str = "logit",
    pad_token: str | None = None,
    loader: str | None = None,
    ensemble: str | None = None,
    penalty: float | None = None,
    center: bool = True,
    scale: bool = True,
    how: Loading = AS_SAVED,
) -> RewardModel | RewardEnsemble:
    """The reward that the models at `paths` give: that of a single one, or of several by `ensemble` and λ = penalty.

    place: brings a model to its device. label, output, pad_token: as RewardModel takes them. A model of one output, as
    one given in place of the run's may be, needs no label, and a single one makes no ensemble. Raises ZooError as
    `load_reward_model` and `RewardEnsemble` do.
    """
    models = []
    for path in paths:
        model = load_reward_model(path, label=label, loader=loader, how=how)
        place(model)
        read: dict[str, Any] = {"label": label, "output": output} if model.config.num_labels != 1 else {}
        tokenizer = load_tokenizer(path)
        read |= {"center": center, "scale": scale, "pad_token": pad_token}
        models.append(RewardModel(model, tokenizer, policy_tokenizer, **read))
    return models[0] if len(models) == 1 else RewardEnsemble(models, how=ensemble, penalty=penalty)
