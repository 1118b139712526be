"""Generation configs that contradict themselves: transformers loads such a config, and then refuses to save it."""

import copy
import logging
from functools import cache

from transformers import GenerationConfig, PreTrainedModel

from ..errors import ZooError

log = logging.getLogger(__name__)

#: Fields that say in which mode the others count.
MODES = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")


def make_savable(model: PreTrainedModel, *, name: str) -> None:
    """Repairs the model's generation config if it could not be saved, and logs one line about it.

    A config with `temperature` or `top_p` and without `do_sample` is meant for sampling, so `do_sample` is set. For any
    other contradiction the fields that conflict with the rest are left out.

    Args:
        model: The model, which need not have a generation config.
        name: What the line calls it.

    Raises:
        ZooError: It cannot be saved whatever is left out.
    """
    config = getattr(model, "generation_config", None)
    if config is None or (reason := _refusal(config)) is None:
        return
    sampled = copy.deepcopy(config)
    sampled.do_sample = True
    if _refusal(sampled) is None:
        model.generation_config = sampled
        _warn_once(name, reason, "do_sample is set to true")
        return
    standard = vars(GenerationConfig())
    changed = {key: value for key, value in vars(config).items() if key in standard and value != standard[key]}
    kept = copy.deepcopy(config)
    for key in changed:
        setattr(kept, key, standard[key])
    left_out = []
    for key in sorted(changed, key=lambda key: key not in MODES):
        setattr(kept, key, changed[key])
        if _refusal(kept) is not None:
            setattr(kept, key, standard[key])
            left_out.append(key)
    if _refusal(kept) is not None:
        raise ZooError(
            f"{name} has a generation_config.json that cannot be saved ({reason}): correct it, or delete it."
        )
    model.generation_config = kept
    _warn_once(name, reason, f"{', '.join(left_out)} {'is' if len(left_out) == 1 else 'are'} left out")


def _refusal(config: GenerationConfig) -> str | None:
    """Why transformers would not save a config, in a few words; None where it would."""
    try:
        config.validate(strict=True)
    except (ValueError, TypeError) as error:
        lines = [line.strip(" -`") for line in str(error).splitlines() if line.strip()]
        return lines[1 if len(lines) > 1 else 0].replace("`", "").split(". ")[0].rstrip(".")
    return None


@cache
def _warn_once(name: str, reason: str, change: str) -> None:
    log.warning("%s has a generation_config.json that cannot be saved (%s): %s in what is saved.", name, reason, change)
