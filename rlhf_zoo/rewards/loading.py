"""Loads reward models for PPO: a classifier, one label of a classifier, or a model from the user's own loader."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError
from ..modeling.loading import AS_SAVED, LoadOptions, load_model, load_tokenizer
from ..modeling.models import load_classifier
from ..plugins import REWARDS, load_object
from .ensemble import RewardEnsemble
from .model import RewardModel


def find_loader(name: str) -> Any:
    """Finds the class or function that `reward_model_loader` names.

    Args:
        name: "module:attribute", or an entry point.

    Raises:
        ZooError: The object does not exist, or cannot be called.
    """
    loader = load_object(name, group=REWARDS)
    if not callable(loader):
        raise ZooError(
            f"reward_model_loader {name!r} is an object of the class {type(loader).__name__}: name a class with "
            "from_pretrained, or a function that takes a path and returns a model."
        )
    return loader


def load_reward_model(
    path: str | Path, *, label: str | None = None, loader: str | None = None, options: LoadOptions = AS_SAVED
) -> PreTrainedModel:
    """Loads a reward model, by default in the precision in which it was saved, because it is not trained.

    Args:
        path: A folder or a Hub id.
        label: For a classifier with several labels, the label whose output is the score.
        loader: "module:attribute" or an entry point: a class whose `from_pretrained` loads the model, or a function
            that is called with the path; None for a classifier. The name must come from the user, not a download.
        options: Precision, attention and quantization.

    Raises:
        ZooError: The model cannot be loaded, or the loader does not return a PreTrainedModel.
    """
    if loader is None:
        return load_classifier(path, label=label, options=options)
    load, subject = find_loader(loader), f"The reward model {path}"
    if inspect.isclass(load) and hasattr(load, "from_pretrained"):
        return load_model(load, path, subject=subject, options=options)
    try:
        model = load(str(path))
    except ZooError:
        raise
    except Exception as error:
        raise ZooError(
            f"{subject} cannot be loaded: reward_model_loader {loader!r} raised {type(error).__name__} "
            f"({error}): fix the loader."
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise ZooError(
            f"reward_model_loader {loader!r} returned a {type(model).__name__} for {path}: return a PreTrainedModel."
        )
    return model


def load_reward(
    paths: Sequence[str | Path],
    policy_tokenizer: PreTrainedTokenizerBase,
    *,
    move: Callable[[PreTrainedModel], Any],
    label: str | None = None,
    output: str = "logit",
    pad_token: str | None = None,
    loader: str | None = None,
    ensemble: str | None = None,
    penalty: float | None = None,
    center: bool = True,
    scale: bool = True,
    options: LoadOptions = AS_SAVED,
) -> RewardModel | RewardEnsemble:
    """Loads one reward model, or several as an ensemble.

    Args:
        paths: Folders or Hub ids.
        policy_tokenizer: The policy's tokenizer.
        move: Moves a model to its device.
        label: As for `RewardModel`. Ignored for a model with one output.
        output: As for `RewardModel`. Ignored for a model with one output.
        pad_token: As for `RewardModel`.
        loader: As for `load_reward_model`.
        ensemble: `how` of `RewardEnsemble`. Ignored for a single model.
        penalty: As for `RewardEnsemble`. Ignored for a single model.
        center: As for `RewardModel`.
        scale: As for `RewardModel`.
        options: Precision, attention and quantization.

    Raises:
        ZooError: As for `load_reward_model` and `RewardEnsemble`.
    """
    models = []
    for path in paths:
        model = load_reward_model(path, label=label, loader=loader, options=options)
        move(model)
        arguments: dict[str, Any] = {"label": label, "output": output} if model.config.num_labels != 1 else {}
        arguments |= {"center": center, "scale": scale, "pad_token": pad_token}
        models.append(RewardModel(model, load_tokenizer(path), policy_tokenizer, **arguments))
    return models[0] if len(models) == 1 else RewardEnsemble(models, how=ensemble, penalty=penalty)
