"""What KL means on the card of a PPO stage: the estimator, where the penalty is applied, the temperature, β."""

from typing import Any

from .facts import Facts

#: Defaults of PPOConfig. They stand here too because the card is made without importing it.
DEFAULTS: dict[str, Any] = {
    "temperature": 0.7,
    "kl_coef": 0.05,
    "reference": None,
    "kl_estimator": "k1",
    "kl_in": "reward",
    "kl_horizon": 10_000,
    "action_level": "token",
    "response_length": 53,
    "ptx_coef": 0.0,
}
_IN_REWARD = {
    "k1": "k1 = log π − log π_ref, the same as is reported",
    "k3": "k3 = π_ref/π − 1 − log(π_ref/π), which is never negative and has the same mean as k1; its gradient through "
    "the reward is not that of the KL",
}
_IN_LOSS = {
    "k2": "k2 = ½(log π − log π_ref)², whose gradient is that of KL(π‖π_ref)",
    "k3": "k3 = π_ref/π − 1 − log(π_ref/π) times the ratio π/π_old, whose gradient is that of KL(π‖π_ref)",
    "k3_reverse": "k3 = π_ref/π − 1 − log(π_ref/π) as in GRPO, whose gradient is that of the reverse KL(π_ref‖π)",
    "full": "the exact KL of each next-token distribution over the whole vocabulary",
}


def kl_settings(facts: Facts) -> dict[str, Any]:
    """Returns the settings of PPO that define its KL, with defaults filled in.

    Args:
        facts: The facts of the stage.

    Returns:
        Key -> value, and the estimator in words as `formula`.
    """
    settings = {key: facts.setting(key, default) for key, default in DEFAULTS.items()}
    if settings["reference"] is None:  # decided by the run: a reference was held where its KL is logged
        settings["reference"] = not facts.metrics or any("objective/kl" in row for row in facts.metrics)
    formulas = _IN_REWARD if settings["kl_in"] == "reward" else _IN_LOSS
    return {**settings, "kl_target": facts.setting("kl_target"), "formula": formulas.get(settings["kl_estimator"])}


def penalty_varies(facts: Facts) -> bool:
    """Whether β is adapted, by the settings or by the logged values.

    Args:
        facts: The facts of the stage.

    Returns:
        True where it is.
    """
    logged = {row["kl_coef"] for row in facts.metrics if row.get("kl_coef") is not None}
    return facts.setting("kl_target") is not None or len(logged) > 1
