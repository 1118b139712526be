"""Baseline trainers: DPO and RLOO get PPO's settings under their own names, PPO's score, and a token count."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from toy_run import make_context, make_recipe
from trainer_fixture import EOS, good, make_tokenizer

from rlhf_zoo.cli.baseline import read_betas
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.head_to_head import read_json_lines
from rlhf_zoo.pipeline.experiments.baseline import default_betas
from rlhf_zoo.pipeline.experiments.baseline_trainers import (
    TokenCounter,
    TrainerSetup,
    dpo_arguments,
    ppo_reward,
    rloo_arguments,
    train_rloo,
)
from rlhf_zoo.rewards import Rewards
from rlhf_zoo.runs.record import StageRecord


def rloo_settings(
    folder: Path, *, episodes: int = 2352, learning_rate: float | None = None, **keys: Any
) -> dict[str, Any]:
    make_recipe(folder, ppo={"max_steps": -1, "total_episodes": 2560, **keys})
    settings = make_context(folder).settings("ppo")
    return rloo_arguments(settings, episodes=episodes, learning_rate=learning_rate)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # A rollout of 64 in batches of 32, two passes of two optimizer steps: 37 rollouts hold 2352 completions.
        (
            {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "num_mini_batches": 2},
            {
                "per_device_train_batch_size": 32, "steps_per_generation": 2, "gradient_accumulation_steps": 1,
                "num_generations": 4, "num_iterations": 2, "max_steps": 37 * 2 * 2, "max_completion_length": 10,
                "temperature": 2.0, "learning_rate": 3e-3, "use_cpu": True,
            },
        ),
        # The groups that PPO has: one rollout of 64, two epochs.
        (
            {"per_device_train_batch_size": 8, "num_generations": 8, "num_mini_batches": 1, "episodes": 64},
            {"num_generations": 8, "steps_per_generation": 8, "gradient_accumulation_steps": 8, "max_steps": 2},
        ),
        # Minibatches below a batch are batches of their own.
        (
            {"per_device_train_batch_size": 32, "num_mini_batches": 4, "num_ppo_epochs": 1, "episodes": 320},
            {"per_device_train_batch_size": 8, "steps_per_generation": 4, "gradient_accumulation_steps": 1,
             "max_steps": 40},
        ),
    ],
)  # fmt: skip
def test_rloo_arguments_match_ppo_rollouts_epochs_and_steps(tmp_path: Path, keys: dict, expected: dict) -> None:
    assert expected.items() <= rloo_settings(tmp_path, **keys).items()


def test_rloo_warmup_is_in_updates_or_a_fraction(tmp_path: Path) -> None:
    shape = {"per_device_train_batch_size": 8, "num_ppo_epochs": 3, "num_mini_batches": 1}
    assert rloo_settings(tmp_path / "a", warmup_steps=5, **shape)["warmup_steps"] == 15
    assert rloo_settings(tmp_path / "b", warmup_steps=0.05, **shape)["warmup_steps"] == 0.05


def test_rloo_rejects_unsupported_rollouts(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"RLOO compares 4 completions of a prompt, but a rollout has 6"):
        rloo_settings(tmp_path / "a", per_device_train_batch_size=6)
    with pytest.raises(ZooError, match=r"PPO truncates its completions .* but RLOO cannot"):
        rloo_settings(tmp_path / "b", truncate_text=".")


def test_rloo_rejects_prompts_with_open_assistant_turn(tmp_path: Path) -> None:
    begun = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    setup = TrainerSetup(tmp_path, make_tokenizer(), 0.1, 1, StageRecord(tmp_path), "")
    terms: Any = {"arguments": {}, "matrix_sizes": {}, "missing_eos": {}, "score_clip": None}
    with pytest.raises(ZooError, match=r"PPO continues that turn, but trl's RLOO would close it .* compare with dpo"):
        train_rloo(setup, Dataset.from_list([{"prompt": begun}]), Rewards([good]), **terms)


def test_baselines_accept_own_learning_rate(tmp_path: Path) -> None:
    assert rloo_settings(tmp_path / "a", learning_rate=1e-5)["learning_rate"] == 1e-5
    make_recipe(tmp_path / "b")
    context = make_context(tmp_path / "b")
    ppo, reward = context.settings("ppo"), context.settings("reward")
    assert dpo_arguments(ppo, reward, learning_rate=None)["learning_rate"] == 3e-3
    arguments = dpo_arguments(ppo, reward, learning_rate=1e-5)
    assert arguments["learning_rate"] == 1e-5
    assert arguments["num_train_epochs"] == reward.trainer.num_train_epochs and arguments["max_length"] == 1024
    assert arguments["per_device_train_batch_size"] == reward.trainer.per_device_train_batch_size


@pytest.mark.parametrize(
    ("missing", "clip", "expected"),
    [
        ({"penalty": None, "score": None}, None, [1.0, 0.5]),
        ({"penalty": 2.0, "score": None}, None, [1.0, -1.5]),
        ({"penalty": None, "score": -1.0}, None, [1.0, -1.0]),
        ({"penalty": 2.0, "score": None}, 0.25, [0.25, -1.75]),
    ],
)
def test_baseline_reward_equals_ppo_score_and_counts_tokens(
    missing: dict[str, float | None], clip: float | None, expected: list[float]
) -> None:
    """Prompt of three tokens with an ended completion; prompt of one token with a truncated completion."""
    tokenizer, meter = make_tokenizer(), TokenCounter()
    reward = ppo_reward(Rewards([good]), tokenizer, meter, missing_eos=missing, score_clip=clip)
    ids = [[*tokenizer("gg")["input_ids"], EOS], tokenizer("ag")["input_ids"]]
    ignored = {"row": [1, 2], "log_metric": print, "log_extra": print}
    rewards = reward(prompts=["abc", "d"], completions=["gg", "ag"], completion_ids=ids, **ignored)
    assert rewards == expected
    assert (meter.prompt_tokens, meter.completion_tokens) == (4, 5)
    reward(prompts=["d"], completions=["ag"], completion_ids=ids[1:])
    assert (meter.prompt_tokens, meter.completion_tokens) == (5, 7)


def test_read_json_lines_splits_at_newline_only(tmp_path: Path) -> None:
    rows = [{"completion": "one\u2028two\x85three"}, {"completion": "four"}]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert read_json_lines(path) == rows


def test_read_betas_drops_duplicates_and_rejects_invalid(tmp_path: Path) -> None:
    assert read_betas("0.05, 0.1,5e-2,0", "rloo") == [0.05, 0.1, 0.0], "each once, in the order given"
    with pytest.raises(ZooError, match="--beta lists"):
        read_betas("a", "rloo")
    with pytest.raises(ZooError, match="DPO learns nothing with it"):
        read_betas("0.1,0", "dpo")
    make_recipe(tmp_path, ppo={"kl_coef": 0.2})
    assert default_betas(make_context(tmp_path)) == [0.1, 0.2, 0.4]
