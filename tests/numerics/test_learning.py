"""PPO learns: a random two-layer policy, one rewarded letter, one seed, and bounds with a wide margin."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fixture import GOOD, make_tokenizer, make_trainer, prompt_rows

from rlhf_zoo.ppo.trainer import PPOTrainer

UPDATES = 25


def learn(directory: Path, **overrides: Any) -> PPOTrainer:
    settings: dict[str, Any] = {
        "train_dataset": prompt_rows(64),
        "max_steps": UPDATES,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "response_length": 8,
        "critic_learning_rate": 3e-3,
        "kl_coef": 0.0,
        "vf_coef": 1.0,
        "cliprange_value": None,
    }
    trainer = make_trainer(directory, **settings | overrides)
    trainer.train()
    return trainer


def good_probability(trainer: PPOTrainer) -> float:
    """Returns the probability of GOOD as the first letter of a completion, averaged over 16 prompts."""
    [token] = make_tokenizer()(GOOD)["input_ids"]
    prompts = torch.tensor([[3 + i % 12, 3 + (i * 7) % 12] for i in range(16)])
    with torch.no_grad():
        return float(trainer.policy(input_ids=prompts).logits[:, -1].softmax(-1)[:, token].mean())


def metric_history(trainer: PPOTrainer, name: str) -> list[float]:
    """Returns a metric of every update."""
    return [row[name] for row in trainer.state.log_history if "loss" in row]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


@pytest.fixture(scope="module")
def unpenalized(tmp_path_factory: pytest.TempPathFactory) -> PPOTrainer:
    """Trained without a KL penalty."""
    return learn(tmp_path_factory.mktemp("free"), reference=True)


def test_rewarded_letter_becomes_likely(unpenalized: PPOTrainer, tmp_path: Path) -> None:
    scores = metric_history(unpenalized, "objective/score")
    assert mean(scores[:3]) < 0.15 and mean(scores[-3:]) > 0.6
    assert good_probability(make_trainer(tmp_path)) < 0.1 and good_probability(unpenalized) > 0.4


def test_large_kl_coef_keeps_policy_at_reference(unpenalized: PPOTrainer, tmp_path: Path) -> None:
    """A β with the wrong sign would reward the policy for leaving the reference."""
    pinned = learn(tmp_path, kl_coef=10.0, max_steps=UPDATES // 2)
    assert mean(metric_history(unpenalized, "objective/kl")[-5:]) > 8
    assert mean(metric_history(pinned, "objective/kl")[-5:]) < 0.8
    assert mean(metric_history(pinned, "objective/score")[-5:]) < 0.15 and good_probability(pinned) < 0.1


def test_critic_learns_value_that_depends_on_prompt(tmp_path: Path) -> None:
    """The score depends on the prompt alone and the policy is frozen, so the critic can explain every return."""

    def first_letter(prompts: list[str], **_: Any) -> list[float]:
        return [1.0 if prompt[0] < "g" else -1.0 for prompt in prompts]

    trainer = learn(tmp_path, reward_funcs=first_letter, learning_rate=0.0, lam=1.0)
    explained, losses = metric_history(trainer, "critic/explained_variance"), metric_history(trainer, "loss/value")
    assert explained[0] == pytest.approx(0, abs=0.01) and min(explained[-5:]) > 0.6
    assert mean(losses[-3:]) < 0.2 * mean(losses[:3])
