"""More SFT as a baseline: the stage again for twice as long, or from the SFT policy on what the reward likes of its own
completions (rejection fine-tuning: Yuan et al. 2023, arXiv:2308.01825).

Both are the SFT stage of the recipe under other flags, in a folder of their own, so that they resume, and leave a
checkpoint, as it does.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ...errors import ZooError
from ...evaluation.measure import Evaluator, repeated
from ...fileio import write_text
from ...modeling.chat import tokenize_for_reward, wrap_completion
from ...runs.context import RunContext
from ...runs.data.layout import sft_text
from ...runs.record import checkpoint_step
from ...runs.settings.parse import StageSettings
from ..run_recipe import run_stage
from .baseline_trainers import in_optimizer_steps, rollout_of

LINES = "lines"
_STREAM = 10
_BLOCK = 1024  # completions that are sampled and scored at once


def longer_arguments(sft: StageSettings, *, learning_rate: float | None) -> dict[str, Any]:
    """Flags of SFT by which it takes twice the steps."""
    args = sft.trainer
    key = "max_steps" if args.max_steps > 0 else "num_train_epochs"
    return {key: 2 * getattr(args, key), **({} if learning_rate is None else {"learning_rate": learning_rate})}


def liked_arguments(
    ppo: StageSettings, sft: StageSettings, *, updates: int, learning_rate: float | None
) -> dict[str, Any]:
    """Flags of SFT by which it takes PPO's optimizer steps, each over a minibatch of PPO's, at PPO's learning rate."""
    args = ppo.trainer
    rollout, steps = rollout_of(args)
    batch = rollout // steps
    micro = math.gcd(batch, sft.trainer.per_device_train_batch_size)
    most = updates * steps * args.num_ppo_epochs
    return {
        "learning_rate": args.learning_rate if learning_rate is None else learning_rate,
        "lr_scheduler_type": args.lr_scheduler_type,
        "warmup_steps": in_optimizer_steps(args),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": batch // micro,
        "max_steps": most,
        "save_strategy": "steps",
        "save_steps": most,
        "eval_strategy": "no",
        "metric_for_best_model": None,
        "release": "last",
        "push_steps": None,
        "dataset_revision": None,
        "dataset_config": None,
        "dataset_train_split": "train",
        "dataset_test_split": None,
        "held_out_share": None,
        "columns": {},
        "keep_above": {},
    }


@dataclass(frozen=True)
class RejectionSamples:
    """Of `sampled` completions: as lines of SFT those that ended and were paid more than the mean of all."""

    lines: list[dict[str, Any]]
    sampled: int
    prompt_tokens: int
    completion_tokens: int

    def write(self, folder: Path) -> None:
        written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines)
        write_text(folder / LINES / "train.jsonl", written)

    def counts(self) -> dict[str, int]:
        return {
            "completions": self.sampled,
            "kept": len(self.lines),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


def sample_liked(tools: Evaluator, prompts: Dataset, many: int, *, seed: int) -> RejectionSamples:
    """So many completions of the SFT policy, the prompts in turn, and what the reward likes of them.

    Raises ZooError where it likes none.
    """
    written: list[tuple[Any, str]] = []
    rewards: list[float] = []
    ended: list[bool] = []
    tokens = np.zeros(2, dtype=int)
    for start in range(0, many, _BLOCK):
        block = range(start, min(start + _BLOCK, many))
        _, asked, columns = repeated(prompts.select([place % len(prompts) for place in block]), 1)
        keys = [(_STREAM, place % len(prompts), place // len(prompts)) for place in block]
        desc = f"completions {start + 1} to {block[-1] + 1} of {many}"
        done = tools.sampled(tools.reference, asked, keys=keys, seed=seed, desc=desc)
        at = 0
        for batch in done.batches:
            rewards += tools.reward_of(batch, slice(at, at + len(batch)), asked, done.texts, columns)
            tokens += int(batch.prompt_mask.sum()), int(batch.mask.sum())
            at += len(batch)
        written += zip(asked, done.texts, strict=True)
        ended += done.ended
    mean = float(np.mean(rewards))
    lines = [
        {"prompt": prompt, "completion": wrap_completion(prompt, text)}
        for (prompt, text), paid, whole in zip(written, rewards, ended, strict=True)
        if whole and paid > mean
    ]
    if not lines:
        raise ZooError(
            f"Of {many} completions of the SFT policy {sum(ended)} ended, and none of these was paid more than the "
            f"mean of all, {mean:g}, so there is nothing to learn from: look at PPO's reward, or train SFT longer."
        )
    return RejectionSamples(lines, many, int(tokens[0]), int(tokens[1]))


def sft_again(context: RunContext, folder: Path, flags: Mapping[str, Any]) -> RunContext:
    """The run in `folder` whose SFT stage trained under these flags beside the run's own, on the run's data."""
    given = {stage: dict(keys) for stage, keys in context.flags.items()}
    given["sft"] = {**given.get("sft", {}), **flags}
    run = replace(
        context, directory=folder, base=context.directory, own=("sft",), flags=given, publish=False, restart=False
    )
    run_stage(run, "sft")
    return run


def trained_tokens(run: RunContext, rows: Dataset, tokenizer: Any) -> float:
    """What the finished SFT stage of a run trained on, of these rows; a packed batch is full."""
    args, last = run.settings("sft").trainer, run.record("sft").last_checkpoint()
    assert last is not None  # a finished stage has one
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if args.packing:
        return float(checkpoint_step(last) * batch * args.max_length)
    lengths = [len(tokenize_for_reward(sft_text(row, args.dataset_text_field), tokenizer, ended=True)) for row in rows]
    most = args.max_length or max(lengths)
    return float(checkpoint_step(last) * batch * np.mean(np.minimum(lengths, most)))
