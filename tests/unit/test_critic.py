"""The critic: initialization, its input, warm-up, and resuming."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_ppo_options import count, nothing
from trainer_fixture import (
    SAVED,
    Spy,
    assert_resumes_exactly,
    digests,
    good,
    make_policy,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    prompt_rows,
    rows_of,
    updates_of,
)
from transformers import TrainerCallback

from rlhf_zoo.modeling.value_head import VALUE_HEAD_FILE, ValueHead
from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead
from rlhf_zoo.ppo.base import PPO_STATE
from rlhf_zoo.ppo.trainer import TRAIN_STREAM


def test_critic_initialization_follows_key(tmp_path: Path) -> None:
    """'auto' takes the reward model where there is one that reads the policy's tokens, else the policy."""
    reward_model = make_reward_model()
    policy_trunk, reward_trunk = (digests(model.model) for model in (make_policy(), reward_model))
    for critic, given, trunk in (
        ("auto", {"reward_model": reward_model}, reward_trunk),
        ("auto", {"reward_funcs": good}, policy_trunk),
        ("reward", {"reward_model": reward_model}, reward_trunk),
        ("policy", {"reward_model": reward_model}, policy_trunk),
    ):
        critic_model = make_trainer(tmp_path, critic=critic, **given).value_model
        assert digests(critic_model.model) == trunk, critic
        assert bool(critic_model.score.weight.any()) == (trunk is reward_trunk), critic
    reward_model.save_pretrained(tmp_path / "saved")
    of_a_path = make_trainer(tmp_path, value_model=tmp_path / "saved").value_model
    assert digests(of_a_path.model) == reward_trunk
    assert torch.equal(of_a_path.score.weight, reward_model.score.weight / 0.5)
    shared = make_trainer(tmp_path, critic="shared", reward_model=reward_model)
    assert isinstance(shared.value_model, ValueHead)
    assert [tuple(weight.shape) for weight in shared.value_model.parameters()] == [(1, 32), (1,)]
    groups = shared.create_optimizer().param_groups
    assert sorted({group["lr"] for group in groups}) == [1e-3, 2e-3]


def test_critic_initialization_scales_with_reward_weight(tmp_path: Path) -> None:
    """reward_weights scale its head, so that it explains returns equally well at any weight."""
    make_reward_model().save_pretrained(tmp_path / "reward")
    make_tokenizer().save_pretrained(tmp_path / "reward")
    once: dict[str, Any] = {"max_steps": 1, "num_ppo_epochs": 1, "kl_coef": 0.0}
    explained = {}
    for weight in (1.0, 0.1, -2.0):
        for name, given in {
            "the reward model": {"reward_model": make_reward_model(), "reward_weights": [weight]},
            "behind a function": {"reward_funcs": [nothing, make_reward_model()], "reward_weights": [1.0, weight]},
            "an ensemble": {"reward_model": [make_reward_model(), make_reward_model(seed=5)], "reward_ensemble": "mean",
                            "reward_weights": [weight]},
            "its files": {"reward_model": str(tmp_path / "reward"), "value_model": str(tmp_path / "reward"),
                          "reward_weights": [weight]},
            "loaded twice": {"reward_model": make_reward_model().from_pretrained(tmp_path / "reward"),
                             "value_model": make_reward_model().from_pretrained(tmp_path / "reward"),
                             "reward_weights": [weight]},
        }.items():  # fmt: skip
            trainer = make_trainer(tmp_path, **once, **given)
            assert torch.allclose(trainer.value_model.score.weight, weight * make_reward_model().score.weight / 0.5)
            if name in ("the reward model", "its files"):
                trainer.train()
                explained[name, weight] = trainer.last_metrics["critic/explained_variance"]
    assert list(explained.values()) == pytest.approx([explained["the reward model", 1.0]] * 6, abs=1e-4)
    other = make_trainer(tmp_path, reward_model=make_reward_model(), reward_weights=[0.1],
                         value_model=make_reward_model(seed=3))  # fmt: skip
    assert torch.equal(other.value_model.score.weight, make_reward_model(seed=3).score.weight / 0.5)


def policy_with_value_head(seed: int = 6) -> AutoModelForCausalLMWithValueHead:
    """A policy with a value head of random weights."""
    model = AutoModelForCausalLMWithValueHead(make_policy())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.v_head.summary.weight, std=0.3)
        torch.nn.init.constant_(model.v_head.summary.bias, 0.4)
    return model


@pytest.mark.parametrize("more", [{}, {"response_length_min": 2}, {"recompute_logprobs": True}], ids=str)
def test_shared_critic_reads_and_trains_trunk(more: dict[str, Any], tmp_path: Path) -> None:
    """It reads it while completions are sampled, and no pass is made but where log π is to be of one."""
    model = policy_with_value_head()
    trainer = make_trainer(tmp_path, model=model, **more)
    assert trainer.value_model is model.v_head and trainer.policy is model.pretrained_model
    widths: list[int] = []
    hook = trainer.policy.model.register_forward_pre_hook(
        lambda _, __, given: widths.append(0 if given["use_cache"] else given["input_ids"].shape[1]), with_kwargs=True
    )
    rollout = trainer.rollout(list(trainer.train_dataset)[:8], stream=TRAIN_STREAM)
    hook.remove()
    assert any(widths) == ("recompute_logprobs" in more)
    head = model.v_head.summary
    for row, (prompt, completion) in enumerate(rows_of(rollout)):
        hidden = trainer.policy.model(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
        expected = (hidden @ head.weight[0] + head.bias)[len(prompt) - 1 : -1]
        assert (rollout.values[row, : len(expected)] - expected).abs().max() < 1e-5
    values = trainer.actor(rollout.samples).values
    values.sum().backward()
    assert all(weight.grad is not None for weight in trainer.policy.model.parameters())


def test_run_with_every_stateful_option_resumes_exactly(tmp_path: Path) -> None:
    """Running statistics, texts, a warm-up, several completions of a prompt, evaluation and a critic on the trunk."""

    def build(directory: Path) -> Spy:
        return make_trainer(
            directory, kind=Spy, model=policy_with_value_head(), reward_funcs=count, score_centering="running",
            score_scaling="running", ptx_coef=0.5, ptx_dataset=Dataset.from_dict({"text": ["abc", "gg", "kkkkl"]}),
            critic_warmup_updates=2, num_generations=2, per_device_train_batch_size=2, eval_dataset=prompt_rows(8),
            eval_strategy="steps", eval_steps=1, **SAVED,
        )  # fmt: skip

    whole = assert_resumes_exactly(build, tmp_path)
    state = json.loads((tmp_path / "resumed" / "checkpoint-3" / PPO_STATE).read_text())
    lengths = [float(len(ids)) for rollout, _, _ in whole.updates for ids in rollout.samples.completion_id_lists()]
    assert state["scores_seen"] == [24.0, sum(lengths), sum(n * n for n in lengths)], "of training alone"
    checkpoint = tmp_path / "straight" / "checkpoint-3"
    assert VALUE_HEAD_FILE == "critic/value_head.safetensors"
    assert sorted(path.name for path in (checkpoint / "critic").iterdir()) == ["value_head.safetensors"]
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(checkpoint).eval()
    assert digests(make_trainer(tmp_path / "more", model=loaded)) == digests(whole)


class Steps(TrainerCallback):
    """Digests after each update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen.append(digests(model.state_dict()))


@pytest.mark.parametrize("critic", ["policy", "shared"])
def test_policy_is_frozen_during_critic_warmup(tmp_path: Path, critic: str) -> None:
    """To the last bit, with weight decay and every other term of the loss on; the loss is the critic's alone."""
    steps = Steps()
    trainer = make_trainer(
        tmp_path, critic=critic, critic_warmup_updates=1, weight_decay=0.1, entropy_coef=0.1, kl_in="loss",
        kl_estimator="k2", ref_model=make_policy(seed=5), ptx_coef=0.5, vf_coef=0.3, num_mini_batches=1,
        ptx_dataset=Dataset.from_dict({"text": ["abc"]}), callbacks=[steps], reward_funcs=count,
    )  # fmt: skip
    start = digests(trainer.model.state_dict())
    trainer.train()
    for part, moves in (("policy", [False, True]), ("value_model", [True, True])):
        held = [{k: v for k, v in each.items() if k.startswith(part)} for each in (start, *steps.seen)]
        assert [earlier != other for earlier, other in pairwise(held)] == moves, part
    first, second = updates_of(trainer)
    assert first["grad_norm/policy"] == 0 < second["grad_norm/policy"]
    assert first["loss"] == pytest.approx(0.3 * first["loss/value"], rel=1e-5)
    assert second["loss"] != pytest.approx(0.3 * second["loss/value"], rel=1e-2)
