"""PPOConfig: TRL's names, and a sentence for each value that cannot be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.ppo.config import PPOConfig

# Every field that TRL 1.12's PPOConfig and its parent OnPolicyConfig added to TrainingArguments and that has a meaning
# here.
TRL_FIELDS = {
    "total_episodes", "num_ppo_epochs", "num_mini_batches", "response_length", "temperature", "stop_token",
    "stop_token_id", "missing_eos_penalty", "kl_coef", "kl_estimator", "gamma", "lam", "whiten_rewards", "cliprange",
    "cliprange_value", "vf_coef", "local_rollout_forward_batch_size",
}  # fmt: skip


def config(directory: Path, **given: Any) -> PPOConfig:
    return PPOConfig(output_dir=str(directory), use_cpu=True, report_to="none", **given)


def test_trl_names_are_fields(tmp_path: Path) -> None:
    made = config(tmp_path)
    assert all(hasattr(made, name) for name in TRL_FIELDS)
    assert (made.learning_rate, made.logging_steps, made.remove_unused_columns) == (3e-6, 1, False)
    assert (made.num_ppo_epochs, made.kl_coef, made.gamma, made.lam, made.cliprange, made.vf_coef) == (
        4, 0.05, 1.0, 0.95, 0.2, 0.1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_ppo_epochs": 0}, "num_ppo_epochs is 0"),
        ({"num_mini_batches": 0}, "num_mini_batches is 0"),
        ({"response_length": 0}, "response_length is 0"),
        ({"kl_horizon": 0}, "kl_horizon is 0"),
        ({"local_rollout_forward_batch_size": 0}, "local_rollout_forward_batch_size is 0"),
        ({"total_episodes": 0}, "total_episodes is 0"),
        ({"total_episodes": -8}, "total_episodes is -8"),
        ({"total_episodes": 64, "max_steps": 3}, "total_episodes 64 makes 8 updates and max_steps is 3"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"kl_estimator": "k2"}, "kl_estimator 'k2' does not work in the reward, as"),
        ({"kl_coef": -0.1}, "kl_coef is -0.1"),
        ({"kl_target": 0.0}, "kl_target is 0.0"),
        ({"kl_target": 6.0, "kl_horizon": 1}, "kl_horizon 1 is below a fifth of an update's 8 episodes"),
        ({"gamma": 0.0}, "gamma is 0.0: give a positive number"),
        ({"gamma": 1.5}, "gamma is 1.5: give at most 1"),
        ({"lam": -0.1}, "lam is -0.1: give at least 0"),
        ({"lam": 1.1}, "lam is 1.1: give at most 1"),
        ({"cliprange": 0.0}, "cliprange is 0.0"),
        ({"cliprange_value": -0.2}, "cliprange_value is -0.2"),
        ({"score_clip": 0.0}, "score_clip is 0.0"),
        ({"vf_coef": -0.1}, "vf_coef is -0.1"),
        ({"stop_token": "</s>"}, "stop_token is '</s>'"),
        ({"num_mini_batches": 3}, "num_mini_batches 3 does not divide the rollout of 8"),
        ({"fp16": True}, "fp16"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message) as caught:
        config(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, **given)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "given",
    [
        {"kl_coef": 0.0}, {"lam": 0.0}, {"lam": 1.0}, {"gamma": 1.0}, {"cliprange_value": None}, {"score_clip": None},
        {"vf_coef": 0.0}, {"stop_token": None}, {"kl_target": 6.0}, {"kl_target": 6.0, "kl_horizon": 2},
        {"num_mini_batches": 8}, {"kl_estimator": "k3"}, {"bf16": True}, {"total_episodes": 16, "max_steps": 2},
    ],
)  # fmt: skip
def test_the_edge_of_what_is_right_is_accepted(tmp_path: Path, given: dict[str, Any]) -> None:
    made = config(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, **given)
    assert all(getattr(made, name) == value for name, value in given.items())


@pytest.mark.parametrize(("episodes", "updates"), [(1, 1), (8, 1), (9, 2), (64, 8)])
def test_total_episodes_sets_max_steps(tmp_path: Path, episodes: int, updates: int) -> None:
    made = config(
        tmp_path, total_episodes=episodes, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )  # fmt: skip
    assert made.max_steps == updates
