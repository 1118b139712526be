"""How the scores of a run's reward models are read, by its settings or by its card's, which are a stranger's words."""

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


def reading_of(settings: Any) -> dict[str, Any]:
    """The keywords of `rewards.loading.load_reward` that differ from its defaults.

    A single model's scores are shown in units of SFT's, whatever PPO made of them; those of several are put together as
    PPO put them.
    """
    given = settings if isinstance(settings, Mapping) else {}
    label, how = given.get("reward_label"), given.get("reward_ensemble")
    read: dict[str, Any] = {}
    if isinstance(label, str):
        read |= {"label": label, "output": "logprob" if given.get("reward_output") == "logprob" else "logit"}
    if isinstance(given.get("reward_pad_token"), str):
        read["pad_token"] = given["reward_pad_token"]
    if how in ENSEMBLES:
        read |= {"ensemble": how, "penalty": number(given.get("reward_ensemble_lambda"))}
        for name, key in (("center", "score_centering"), ("scale", "score_scaling")):
            read[name] = given.get(key, "stored") == "stored"
    return read
