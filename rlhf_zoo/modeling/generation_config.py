"""Repairs generation configs that transformers refuses to save, and sets how a policy samples by default."""

import copy
import logging
from functools import cache

from transformers import GenerationConfig, PreTrainedModel

from ..errors import ZooError

log = logging.getLogger(__name__)

# Fields that decide which other fields apply. `make_savable` keeps them if they conflict with other fields.
_MODE_FIELDS = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")


def make_savable(model: PreTrainedModel, *, name: str) -> None:
    """Repairs the model's generation config if transformers would not save it, and logs one line about the change.

    A config with `temperature` or `top_p` but without `do_sample` is meant for sampling, so `do_sample` is set. In any
    other case, fields that conflict with others are reset to their defaults.

    Args:
        model: The model. It need not have a generation config.
        name: The model's name in the log.

    Raises:
        ZooError: The config cannot be saved even with all of its fields at their defaults.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    reason = _why_not_savable(config)
    if reason is None:
        return
    sampling_config = copy.deepcopy(config)
    sampling_config.do_sample = True
    if _why_not_savable(sampling_config) is None:
        model.generation_config = sampling_config
        _warn_once(name, reason, "do_sample is set to true")
        return
    defaults = vars(GenerationConfig())
    non_defaults = {key: value for key, value in vars(config).items() if key in defaults and value != defaults[key]}
    repaired_config = copy.deepcopy(config)
    for key in non_defaults:
        setattr(repaired_config, key, defaults[key])
    # Set the fields again one by one, and leave out each that conflicts with those before it.
    mode_fields_first = sorted(non_defaults, key=lambda field: field not in _MODE_FIELDS)
    omitted_fields = []
    for key in mode_fields_first:
        setattr(repaired_config, key, non_defaults[key])
        if _why_not_savable(repaired_config) is not None:
            setattr(repaired_config, key, defaults[key])
            omitted_fields.append(key)
    if _why_not_savable(repaired_config) is not None:
        raise ZooError(
            f"{name} has a generation_config.json that cannot be saved ({reason}): correct it, or delete it."
        )
    model.generation_config = repaired_config
    _warn_once(name, reason, f"{', '.join(omitted_fields)} {'is' if len(omitted_fields) == 1 else 'are'} left out")


def set_sampling(model: PreTrainedModel, *, temperature: float) -> None:
    """Makes `model.generate` and pipelines sample from the full distribution by default, as PPO and evaluations do.

    No length is set, because a limit in the config would take precedence over the caller's `max_length`.

    Args:
        model: The model. Without a generation config, it does not change.
        temperature: The sampling temperature.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    sampling_config = copy.deepcopy(config)
    for key, value in {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}.items():
        setattr(sampling_config, key, value)
    # A config that conflicts with these values, such as a config for beam search, does not change.
    if _why_not_savable(sampling_config) is None:
        model.generation_config = sampling_config


def _why_not_savable(config: GenerationConfig) -> str | None:
    """Returns transformers' reason for not saving a config, in a few words; None if it saves the config."""
    try:
        config.validate(strict=True)
    except (ValueError, TypeError) as error:
        # If there are several lines, the first is a heading.
        lines = [line.strip(" -`") for line in str(error).splitlines() if line.strip()]
        return lines[1 if len(lines) > 1 else 0].replace("`", "").split(". ")[0].rstrip(".")
    return None


@cache
def _warn_once(name: str, reason: str, change: str) -> None:
    log.warning("%s has a generation_config.json that cannot be saved (%s): %s in saved copies.", name, reason, change)
