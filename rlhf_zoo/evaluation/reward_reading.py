"""How the scores of a run's reward models are read: by its settings, or by its card's, which are a stranger's words."""

from collections.abc import Mapping
from typing import Any

from ..fileio import number

#: As in `functional`, which needs torch.
ENSEMBLES = ("worst", "mean", "mean_minus_variance")
#: The settings that say it.
READ = (
    "reward_label", "reward_output", "reward_pad_token", "reward_ensemble", "reward_ensemble_lambda",
    "score_centering", "score_scaling",
)  # fmt: skip


def reading_of(settings: object) -> dict[str, Any]:
    """Translates settings into keywords of `rewards.loading.load_reward` that differ from its defaults.

    A single model's scores are shown in units of SFT's, whatever PPO made of them. Those of several models are combined
    the way PPO combined them.

    Args:
        settings: PPO's settings, or what a card says they are; values of a wrong type are ignored.

    Returns:
        The keywords.
    """
    values = settings if isinstance(settings, Mapping) else {}
    label, how = values.get("reward_label"), values.get("reward_ensemble")
    keywords: dict[str, object] = {}
    if isinstance(label, str):
        keywords |= {"label": label, "output": "logprob" if values.get("reward_output") == "logprob" else "logit"}
    if isinstance(values.get("reward_pad_token"), str):
        keywords["pad_token"] = values["reward_pad_token"]
    if how in ENSEMBLES:
        keywords |= {"ensemble": how, "penalty": number(values.get("reward_ensemble_lambda"))}
        for name, key in (("center", "score_centering"), ("scale", "score_scaling")):
            keywords[name] = values.get(key, "stored") == "stored"
    return keywords
