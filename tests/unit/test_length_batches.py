"""`train_sampling_strategy: group_by_length`: batches with little padding, a new order each epoch, exact resuming."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trainer_fixture import digests, make_policy, make_reward_model, make_tokenizer
from transformers import Trainer
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from rlhf_zoo.modeling.length_grouping import LengthGroupingMixin, SeededLengthSampler

LENGTHS = [1 + (7 * row) % 23 for row in range(1030)]


def test_length_sampler_groups_rows_and_shuffles_by_seed_and_epoch() -> None:
    sampler = SeededLengthSampler(LENGTHS, 8, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(1030)) and list(sampler) == first
    batches = [[LENGTHS[row] for row in first[at : at + 8]] for at in range(0, 1024, 8)]
    padded = sum(8 * max(batch) for batch in batches)
    assert padded < 1.05 * sum(map(sum, batches))
    widths = [max(batch) for batch in batches]
    assert widths[:20] != sorted(widths[:20]) and widths[:20] != sorted(widths[:20], reverse=True)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(SeededLengthSampler(LENGTHS, 8, seed=4)) != first


TEXTS = {"text": ["ab" * (1 + row % 7) for row in range(26)]}
PAIRS = {"chosen": TEXTS["text"], "rejected": ["cab"] * 25 + ["abc" * 9]}


@pytest.mark.parametrize(
    ("kind", "config", "make", "rows"),
    [(SFTTrainer, SFTConfig, make_policy, TEXTS), (RewardTrainer, RewardConfig, make_reward_model, PAIRS)],
    ids=["sft", "reward"],
)
def test_run_resumed_within_epoch_reads_same_rows(kind: Any, config: Any, make: Any, rows: Any, tmp_path: Path) -> None:
    def build(folder: Path) -> Any:
        tokenizer = make_tokenizer()
        args = config(
            output_dir=str(folder), max_steps=5, save_steps=1, use_cpu=True, per_device_train_batch_size=4,
            train_sampling_strategy="group_by_length", bf16=False, report_to=[],
        )  # fmt: skip
        trainer_class: Any = type(kind.__name__, (LengthGroupingMixin, kind), {})
        return trainer_class(
            model=make(tokenizer), args=args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer
        )

    whole, again = build(tmp_path / "whole"), build(tmp_path / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert digests(again.model) == digests(whole.model)
    lengths = next(iter(whole.get_train_dataloader()))["attention_mask"].sum(1)
    assert lengths.max() - lengths.min() <= 4


def test_transformers_trainer_has_expected_sampler_hook() -> None:
    assert list(inspect.signature(Trainer._get_train_sampler).parameters) == ["self", "train_dataset"]
    assert "_get_train_sampler" in inspect.getsource(Trainer.get_train_dataloader)
