"""How to load a run's reward models, by PPO's settings in run.json or on a card; neither is trusted."""

from collections.abc import Mapping
from typing import Any

from ..fileio import float_or_none

#: A copy of `functional.ENSEMBLES`, because reading a card must not import torch.
ENSEMBLES = ("worst", "mean", "mean_minus_variance")
#: The settings of PPO that `reward_load_kwargs` uses.
REWARD_LOAD_KEYS = (
    "reward_label", "reward_output", "reward_pad_token", "reward_ensemble", "reward_ensemble_lambda",
    "score_centering", "score_scaling",
)  # fmt: skip


def reward_load_kwargs(settings: object) -> dict[str, Any]:
    """Translates settings into those keywords of `rewards.loading.load_reward` that differ from its defaults.

    The scores of a single model keep the centering and scaling stored with it, whatever PPO used. The scores of several
    models are combined as in PPO.

    Args:
        settings: PPO's settings, from run.json or a card; values of a wrong type are ignored.
    """
    values = settings if isinstance(settings, Mapping) else {}
    label, ensemble = values.get("reward_label"), values.get("reward_ensemble")
    keywords: dict[str, object] = {}
    if isinstance(label, str):
        keywords |= {"label": label, "output": "logprob" if values.get("reward_output") == "logprob" else "logit"}
    if isinstance(values.get("reward_pad_token"), str):
        keywords["pad_token"] = values["reward_pad_token"]
    if ensemble in ENSEMBLES:
        keywords |= {"ensemble": ensemble, "penalty": float_or_none(values.get("reward_ensemble_lambda"))}
        for name, key in (("center", "score_centering"), ("scale", "score_scaling")):
            keywords[name] = values.get(key, "stored") == "stored"
    return keywords
