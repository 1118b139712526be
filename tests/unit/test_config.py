"""PPOConfig rejects invalid values with readable errors. test_limits.py has the bounds of every number."""

import math
from pathlib import Path
from typing import Any

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.ppo.config import PPOConfig

SERVER = {"rollout_engine": "vllm", "vllm_mode": "server", "vllm_server_base_url": "http://x"}


def make_config(directory: Path, **options: Any) -> PPOConfig:
    return PPOConfig(output_dir=str(directory), use_cpu=True, report_to="none", **options)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"total_episodes": 64, "max_steps": 3}, "total_episodes 64 makes 8 updates, but max_steps is 3"),
        ({"kl_estimator": "k2"}, "'k2' does not work in the reward, because .*biased"),
        ({"kl_estimator": "full"}, "'full' does not work in the reward, because .*not a property of the sampled token"),
        (
            {"kl_estimator": "k3_reverse"},
            "'k3_reverse' does not work in the reward, because it is meaningful only in the loss",
        ),
        ({"kl_in": "loss", "kl_estimator": "k1"}, "'k1' does not work in the loss, because .*not constrain the policy"),
        (
            {"kl_in": "loss", "kl_estimator": "k9"},
            "kl_estimator 'k9' does not exist: use ",
        ),
        ({"kl_coef": math.nan}, "kl_coef is nan"),
        ({"reward_weights": [math.nan]}, "reward_weights is"),
        ({"missing_eos_penalty": 1.0, "missing_eos_score": -1.0}, "penalty subtracts and missing_eos_score replaces"),
        ({"critic": "mine"}, "critic is 'mine': choose one of 'auto'"),
        ({"kl_target": 6.0, "kl_horizon": 1}, "kl_horizon 1 is less than a fifth of an update's 8 episodes"),
        ({"lam": 1.1}, "lam is 1.1: give at most 1"),
        ({"stop_token": "</s>"}, "stop_token is '</s>'"),
        ({"num_mini_batches": 3}, "num_mini_batches 3 does not divide the rollout of 8"),
        ({"fp16": True}, "fp16"),
        # what completions are
        (
            {"response_length": 10, "response_length_min": 11},
            "response_length_min is 11, but response_length is only 10",
        ),
        ({"response_length_min": 0}, "response_length_min is 0: give at least 1"),
        ({"truncate_text": ""}, "truncate_text is empty"),
        ({"truncate_after": 3}, "truncate_after is 3, but there is no truncate_text"),
        ({"response_length": 10, "truncate_text": ".", "truncate_after": 10}, "so nothing would be cut: lower"),
        ({"skip_equal_scores": True}, "num_generations is 1: set it to at least 2"),
        ({"reward_output": "logprob"}, "reward_output is 'logprob', which needs a label: set reward_label"),
        ({"reward_output": "odds", "reward_label": "A"}, "reward_output is 'odds': choose one of 'logit', 'logprob'"),
        # what samples them
        ({"rollout_engine": "sglang"}, "rollout_engine is 'sglang': choose one of 'native', 'transformers', 'vllm'"),
        ({"importance_sampling_cap": 2.0}, "rollout_engine is 'native', whose log-probabilities are the trainer's"),
        ({"rollout_engine": "vllm", "importance_sampling_cap": 0.5}, "importance_sampling_cap is 0.5: give at least 1"),
        ({"rollout_engine": "vllm", "max_rollout_batch_tokens": 99}, "use vllm_gpu_memory_utilization for vLLM"),
        ({"vllm_gpu_memory_utilization": 0.5}, "vllm_gpu_memory_utilization is for vLLM"),
        ({"rollout_engine": "vllm", "vllm_mode": "server"}, "vllm_server_base_url is None: set the URL"),
        (SERVER | {"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode is for a colocated vLLM"),
    ],
)
def test_ppo_config_rejects_invalid_values(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message) as caught:
        make_config(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, **keys)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "keys",
    [
        {"kl_coef": 0.0}, {"lam": 0.0}, {"lam": 1.0}, {"gamma": 1.0}, {"cliprange_value": None}, {"score_clip": None},
        {"vf_coef": 0.0}, {"stop_token": None}, {"kl_target": 6.0}, {"kl_target": 6.0, "kl_horizon": 2},
        {"num_mini_batches": 8}, {"kl_estimator": "k3"}, {"bf16": True}, {"total_episodes": 16, "max_steps": 2},
    ],
)  # fmt: skip
def test_ppo_config_accepts_boundary_values(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = make_config(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, **keys)
    assert all(getattr(config, name) == value for name, value in keys.items())
