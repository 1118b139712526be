"""What TRL 1.12's PPOTrainer gets wrong (each was seen by running it), and that ours gets it right.

Tested elsewhere:
    bf16 and gradient_checkpointing without effect: test_training_run::test_bf16_and_gradient_checkpointing_take_effect
    max_grad_norm never applied: test_trainer::test_critic_gradient_norm_does_not_shrink_policy_step
    a data set smaller than a batch hangs: test_guards::test_guard_rejects_incompatible_arguments
    with PAD = EOS the EOS is never in the loss:
        test_guards::test_guard_rejects_eos_as_pad, test_trainer::test_update_equals_formulas_computed_row_by_row
    no resuming: test_resume::test_resumed_run_equals_uninterrupted_run
    the critic is not saved: test_training_run::test_checkpoint_is_plain_model_with_critic_folder
    evaluate() fails: test_training_run::test_evaluation_is_repeatable_and_does_not_change_training
    should_training_stop is ignored: test_training_run::test_callbacks_and_tensorboard_receive_every_update
    a reward model with a smaller vocabulary is an IndexError:
        test_trainer::test_reward_model_of_another_tokenizer_scores_text_without_critic
    LoRA leaves the critic training in full: test_peft::test_adapters_train_while_bases_stay_fixed
    a string among a data set's columns is an error:
        test_trainer::test_reward_functions_get_grpo_arguments_and_weights
    tables of samples need an account of wandb or Comet:
        test_samples_shown::test_saved_samples_belong_to_the_update_in_their_name
TRL's own numbers where it ignores minibatches: test_trl_parity::test_trl_ignores_minibatches_under_accumulation.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fixture import EOS, PAD, Spy, make_trainer
from transformers import GenerationConfig


@pytest.mark.parametrize("accumulation", [1, 4])
def test_each_minibatch_is_one_optimizer_step_for_any_accumulation(tmp_path: Path, accumulation: int) -> None:
    """TRL makes one step every `gradient_accumulation_steps` micro-batches, so two minibatches become one.

    In the last update of a pass, here the second, it makes one for each micro-batch.
    """
    trainer = make_trainer(
        tmp_path, per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation,
        num_mini_batches=2, num_ppo_epochs=3,
    )  # fmt: skip
    steps = [0, 0]

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Trainer's own step finds no gradients."""
        found = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        steps[trainer.state.global_step] += found

    trainer.create_optimizer().register_step_pre_hook(count)
    trainer.train()
    assert steps == [6, 6]


def test_metrics_average_only_computed_minibatches(tmp_path: Path) -> None:
    """A policy that stands still has the ratio 1; TRL's mean counts slots that it never filled: 1/2 here, 1/4 there."""
    trainer = make_trainer(tmp_path, num_mini_batches=2, gradient_accumulation_steps=2, learning_rate=0.0, max_steps=1)
    trainer.train()
    [metrics] = [row for row in trainer.state.log_history if "policy/ratio" in row]
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6) and metrics["policy/clipfrac"] == 0


def test_saved_model_keeps_eos_when_stop_token_is_none(tmp_path: Path) -> None:
    """TRL writes `eos_token_id: null` into generation_config.json, and what is served later never ends."""
    trainer = make_trainer(tmp_path, stop_token=None, max_steps=1, save_strategy="steps", save_steps=1)
    before = trainer.policy.generation_config.to_dict()
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert trainer.policy.generation_config.to_dict() == before
    for directory in (tmp_path / "checkpoint-1", tmp_path / "final"):
        assert GenerationConfig.from_pretrained(directory).eos_token_id == EOS


def test_sampled_pad_token_does_not_end_completion(tmp_path: Path) -> None:
    """TRL takes the first PAD for the end: what follows leaves the loss, and the score moves to before it."""
    trainer = make_trainer(
        tmp_path, kind=Spy, stop_token=None, max_steps=1, kl_coef=0.0, missing_eos_penalty=1.0,
        reward_funcs=lambda completions, **_: [3.0] * len(completions),
    )  # fmt: skip
    trainer.train()
    [(rollout, advantages, _)] = trainer.updates
    pads = rollout.samples.completion_ids[:, :-1] == PAD
    assert pads.any() and rollout.mask.all() and not rollout.samples.ended.any()
    assert (rollout.logprobs < 0).all()
    assert advantages.rewards[:, -1].tolist() == [2.0] * 8 and not advantages.rewards[:, :-1].any()
    assert (advantages.advantages != 0).all()
