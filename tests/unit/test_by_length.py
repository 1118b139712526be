"""`train_sampling_strategy: group_by_length`: tight batches, another order each pass, and runs that go on alike."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trainer_fixture import digests, make_policy, make_reward_model, make_tokenizer
from transformers import Trainer
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from rlhf_zoo.stages.by_length import ByLength, batches_by_length

LENGTHS = [1 + (7 * row) % 23 for row in range(1030)]


def test_each_row_once_in_tight_batches_whose_order_is_of_seed_and_pass() -> None:
    sampler = ByLength(LENGTHS, 8, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(1030)) and list(sampler) == first
    batches = [[LENGTHS[row] for row in first[at : at + 8]] for at in range(0, 1024, 8)]
    padded = sum(8 * max(batch) for batch in batches)
    assert padded < 1.05 * sum(map(sum, batches))
    widths = [max(batch) for batch in batches]
    assert widths[:20] != sorted(widths[:20]) and widths[:20] != sorted(widths[:20], reverse=True)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(ByLength(LENGTHS, 8, seed=4)) != first


def sft(folder: Path) -> Any:
    tokenizer, given = make_tokenizer(), {"output_dir": str(folder), "max_steps": 5, "save_steps": 1, "use_cpu": True}
    rows = Dataset.from_dict({"text": ["ab" * (1 + row % 7) for row in range(26)]})
    args = SFTConfig(
        **given, per_device_train_batch_size=4, train_sampling_strategy="group_by_length", bf16=False, report_to=[]
    )
    return batches_by_length(SFTTrainer)(
        model=make_policy(tokenizer), args=args, train_dataset=rows, processing_class=tokenizer
    )


def reward(folder: Path) -> Any:
    tokenizer, given = make_tokenizer(), {"output_dir": str(folder), "max_steps": 5, "save_steps": 1, "use_cpu": True}
    rows = Dataset.from_dict(
        {"chosen": ["ab" * (1 + row % 7) for row in range(26)], "rejected": ["cab"] * 25 + ["abc" * 9]}
    )
    args = RewardConfig(
        **given, per_device_train_batch_size=4, train_sampling_strategy="group_by_length", bf16=False, report_to=[]
    )
    return batches_by_length(RewardTrainer)(
        model=make_reward_model(tokenizer), args=args, train_dataset=rows, processing_class=tokenizer
    )


@pytest.mark.parametrize("build", [sft, reward])
def test_a_run_resumed_within_a_pass_reads_the_same_rows(build: Any, tmp_path: Path) -> None:
    whole, again = build(tmp_path / "whole"), build(tmp_path / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert digests(again.model) == digests(whole.model)
    rows = next(iter(whole.get_train_dataloader()))["attention_mask"].sum(1)
    assert rows.max() - rows.min() <= 4


def test_trainer_asks_for_its_sampler_by_this_name() -> None:
    assert list(inspect.signature(Trainer._get_train_sampler).parameters) == ["self", "train_dataset"]
    assert "_get_train_sampler" in inspect.getsource(Trainer.get_train_dataloader)
