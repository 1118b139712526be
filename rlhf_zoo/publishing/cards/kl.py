"""Describes KL on the card of a PPO stage: the estimator, where the penalty is applied, the temperature, β."""

from typing import Any

from ...runs.settings.declared import default_of
from .facts import StageFacts

_KEYS = (
    "temperature", "kl_coef", "reference", "kl_estimator", "kl_in", "kl_target", "kl_horizon", "action_level",
    "response_length", "ptx_coef",
)  # fmt: skip
_REWARD_FORMULAS = {
    "k1": "k1 = log π − log π_ref, as reported",
    "k3": "k3 = π_ref/π − 1 − log(π_ref/π), which is never negative and has the same mean as k1; its gradient through "
    "the reward is not that of the KL",
}
_LOSS_FORMULAS = {
    "k2": "k2 = ½(log π − log π_ref)², whose gradient is that of KL(π‖π_ref)",
    "k3": "k3 = π_ref/π − 1 − log(π_ref/π) times the ratio π/π_old, whose gradient is that of KL(π‖π_ref)",
    "k3_reverse": "k3 = π_ref/π − 1 − log(π_ref/π) as in GRPO, whose gradient is that of the reverse KL(π_ref‖π)",
    "full": "the exact KL of each next-token distribution over the whole vocabulary",
}


def kl_settings(facts: StageFacts) -> dict[str, Any]:
    """Returns the settings of PPO that define its KL, with defaults filled in.

    Args:
        facts: The facts of the stage.

    Returns:
        Key -> value, plus `formula`: the estimator's formula and properties; None for an unknown estimator.
    """
    settings = {key: facts.setting(key, default_of("ppo", key)) for key in _KEYS}
    if settings["reference"] is None:  # training decided, and logged the KL if it loaded a reference
        settings["reference"] = not facts.metrics or any("objective/kl" in row for row in facts.metrics)
    formulas = _REWARD_FORMULAS if settings["kl_in"] == "reward" else _LOSS_FORMULAS
    return {**settings, "formula": formulas.get(settings["kl_estimator"])}


def penalty_varies(facts: StageFacts) -> bool:
    """Whether β changes during training, according to the settings or the logged values.

    Args:
        facts: The facts of the stage.
    """
    logged_values = {row["kl_coef"] for row in facts.metrics if row.get("kl_coef") is not None}
    return facts.setting("kl_target") is not None or len(logged_values) > 1
