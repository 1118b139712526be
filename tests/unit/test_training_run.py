"""A run of PPOTrainer around its updates: evaluation, callbacks, checkpoints, and what must not matter to it."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trainer_fixture import (
    EOS,
    digests,
    distance,
    good,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    prompt_rows,
    rows_of,
    snapshot,
    trained,
    updates_of,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    TrainerCallback,
)

from rlhf_zoo.hub.client.publish import checkpoint_files
from rlhf_zoo.modeling.prompts import PROMPT_TOKENS
from rlhf_zoo.ppo.base import PPO_STATE
from rlhf_zoo.ppo.trainer import TRAIN_STREAM


def test_metrics_are_finite_and_averaged_over_logged_updates(tmp_path: Path) -> None:
    each = updates_of(trained(tmp_path, max_steps=4))
    both = updates_of(trained(tmp_path, max_steps=4, logging_steps=2))
    assert len(each) == 4 and len(both) == 2 and [row["step"] for row in both] == [2, 4]
    assert all(math.isfinite(value) for row in each for value in row.values())
    for name in ("loss", "objective/score", "policy/clipfrac", "kl_coef", "rewards/good"):
        assert both[1][name] == pytest.approx((each[2][name] + each[3][name]) / 2, abs=1e-12), name
    assert [row["episodes"] for row in each] == [8, 16, 24, 32]
    assert [row["learning_rate"] for row in each] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert "grad_norm" not in each[0]


def test_gradient_accumulation_does_not_change_results(tmp_path: Path) -> None:
    """1×8 ≡ 4×2: the same completions, and the same weights up to rounding."""
    first, other = (
        trained(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, max_steps=2, optim="sgd",
            learning_rate=0.2, critic_learning_rate=0.2, missing_eos_penalty=1.0,
        )
        for size in (8, 2)
    )  # fmt: skip
    assert distance(snapshot(first), first.before) > 1e-2
    assert len({len(row) for rollout, _, _ in first.updates for row in rollout.samples.completion_id_lists()}) > 1
    assert distance(snapshot(first), snapshot(other)) < 1e-6
    for (one, _, _), (two, _, _) in zip(first.updates, other.updates, strict=True):
        assert rows_of(one) == rows_of(two)
    for one, two in zip(updates_of(first), updates_of(other), strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)


def test_text_and_token_id_prompts_train_alike(tmp_path: Path) -> None:
    tokenizer, texts = make_tokenizer(), prompt_rows()
    ids = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in texts["prompt"]]})
    seen: list[list[str]] = []

    def keep(prompts: list[str], completions: list[str], **rest: Any) -> list[float]:
        seen.append(list(prompts))
        return good(completions)

    one, two = (trained(tmp_path, train_dataset=data, reward_funcs=keep) for data in (texts, ids))
    assert digests(one) == digests(two) != digests(one.before)
    assert seen[:2] == seen[2:] and set(seen[0]) <= set(texts["prompt"])


def test_last_batch_of_an_epoch_may_be_smaller(tmp_path: Path) -> None:
    """13 prompts in batches of 8: each second update has 5, fewer than the minibatches, and trains as usual."""
    trainer = trained(
        tmp_path, train_dataset=prompt_rows(13), max_steps=3, num_mini_batches=8, num_ppo_epochs=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=4,
    )  # fmt: skip
    assert [len(rollout.samples) for rollout, _, _ in trainer.updates] == [8, 5, 8]
    assert [row["episodes"] for row in updates_of(trainer)] == [8, 13, 21]
    assert all(math.isfinite(value) for row in updates_of(trainer) for value in row.values())


@pytest.mark.parametrize("settings", [{"bf16": True}, {"gradient_checkpointing": True}], ids=["bf16", "checkpointing"])
def test_bf16_and_gradient_checkpointing_take_effect(tmp_path: Path, settings: dict[str, bool]) -> None:
    """TRL's PPO ignored both."""
    plain, other = trained(tmp_path, max_steps=1), trained(tmp_path, max_steps=1, **settings)
    if "bf16" in settings:
        assert digests(plain) != digests(other)
        assert abs(updates_of(other)[0]["objective/kl"]) < 0.1
        assert all(p.dtype == torch.float32 for p in other.model.parameters())
    else:
        assert all(part.is_gradient_checkpointing for part in (other.policy, other.value_model))
        assert distance(snapshot(plain), snapshot(other)) < 1e-6


def test_evaluation_is_repeatable_and_does_not_change_training(tmp_path: Path) -> None:
    held_out = prompt_rows(12)
    without = trained(tmp_path)
    within = trained(tmp_path, eval_dataset=held_out, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    assert digests(without) == digests(within)
    assert updates_of(without) == updates_of(within)
    rows = [row for row in within.state.log_history if "eval_objective/score" in row]
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[0]["eval_objective/kl"] == pytest.approx(0, abs=1e-6)
    once, again = within.evaluate(), within.evaluate()
    assert once == again and once["eval_objective/score"] == rows[-1]["eval_objective/score"]
    assert once.keys() - {"epoch"} == {
        f"eval_{name}"
        for name in ("objective/score", "objective/shaped_score", "objective/kl", "rewards/good", "completions/length",
                     "completions/eos_rate")
    }  # fmt: skip
    batched = copy.copy(within.args)
    batched.per_device_eval_batch_size = 5
    within.args = batched
    assert within.evaluate() == pytest.approx(once, abs=1e-5)
    assert within.evaluate(prompt_rows(6), metric_key_prefix="test").keys() == {
        name.replace("eval_", "test_", 1) for name in once
    }


def test_evaluation_samples_are_the_same_at_every_step(tmp_path: Path) -> None:
    """With the policy standing still, every evaluation is the same, and differs from what training sampled."""
    trainer = trained(
        tmp_path, learning_rate=0.0, train_dataset=prompt_rows(8), eval_dataset=prompt_rows(8),
        eval_strategy="steps", eval_steps=1, missing_eos_penalty=1.0,
    )  # fmt: skip
    rows = [row["eval_objective/shaped_score"] for row in trainer.state.log_history if "eval_objective/score" in row]
    assert len(rows) == 2 and len(set(rows)) == 1
    assert rows[0] not in [row["objective/shaped_score"] for row in updates_of(trainer)]


def test_callbacks_and_tensorboard_receive_every_update(tmp_path: Path) -> None:
    class ProgressCallback(TrainerCallback):
        def __init__(self) -> None:
            self.heard: list[tuple[str, int]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.heard.append(("step", state.global_step))
            control.should_training_stop = state.global_step == 2

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            self.heard += [("log", state.global_step)] if logs and "objective/kl" in logs else []

    follow = ProgressCallback()
    trained(tmp_path, max_steps=5, callbacks=[follow], report_to=["tensorboard"])
    assert follow.heard == [("step", 1), ("log", 1), ("step", 2), ("log", 2)]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    read = EventAccumulator(str(events)).Reload()
    assert "train/objective/kl" in read.Tags()["scalars"]
    assert [event.step for event in read.Scalars("train/objective/score")] == [1, 2]


def test_checkpoint_is_plain_model_with_critic_folder(tmp_path: Path) -> None:
    trainer = trained(tmp_path, save_strategy="steps", save_steps=1, reward_model=make_reward_model())
    checkpoint = tmp_path / "checkpoint-2"
    policy = AutoModelForCausalLM.from_pretrained(checkpoint)
    critic = AutoModelForTokenClassification.from_pretrained(checkpoint / "critic")
    assert digests(policy) == digests(trainer.policy) and digests(critic) == digests(trainer.value_model)
    assert policy.generation_config.eos_token_id == EOS
    assert AutoTokenizer.from_pretrained(checkpoint).get_vocab() == trainer.processing_class.get_vocab()
    # Nothing that unpickles is sent: neither by its name nor by its first bytes (a zip, or pickle protocol 2 on).
    sent = checkpoint_files(checkpoint)
    assert {"tokenizer.json", PPO_STATE, "critic/config.json", "critic/model.safetensors"} <= sent.keys()
    for path in sent.values():
        assert path.suffix in {".safetensors", ".json", ".jinja"}, path
        assert not path.read_bytes().startswith((b"PK", b"\x80")), path
    assert any(path.read_bytes().startswith((b"PK", b"\x80")) for path in checkpoint.rglob("*.pt"))
    assert json.loads((checkpoint / PPO_STATE).read_text())["kl_coef"] == 0.05
    elsewhere = tmp_path / "elsewhere"
    trainer.save_model(str(elsewhere))
    assert digests(AutoModelForCausalLM.from_pretrained(elsewhere)) == digests(trainer.policy)
    again = make_trainer(tmp_path, model=str(checkpoint), value_model=str(checkpoint / "critic"))
    assert digests(again) == digests(trainer)


def test_row_samples_depend_only_on_update_and_prompt(tmp_path: Path) -> None:
    """A row's stream is keyed by update and prompt, so that no two updates sample a prompt alike."""
    trainer = trained(tmp_path, max_steps=3, train_dataset=prompt_rows(8), learning_rate=0.0, critic_learning_rate=0.0)
    drawn = [{tuple(p): tuple(c) for p, c in rows_of(rollout)} for rollout, _, _ in trainer.updates]
    assert all(one.keys() == drawn[0].keys() for one in drawn)
    assert len({tuple(sorted(one.items())) for one in drawn}) == 3
    rows = list(trainer.train_dataset)
    trainer.state.global_step = 2
    shuffled = trainer.rollout(rows[::-1], stream=TRAIN_STREAM)
    assert {tuple(p): tuple(c) for p, c in rows_of(shuffled)} == drawn[2]
    assert all(PROMPT_TOKENS in row for row in rows)
