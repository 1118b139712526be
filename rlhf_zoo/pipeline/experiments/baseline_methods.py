"""Makes and measures each baseline: samples of the SFT policy, or a policy that is trained further.

More SFT is either SFT for twice as long, or rejection fine-tuning (Yuan et al. 2023, arXiv:2308.01825), which learns
from the SFT policy's own completions with a high reward. Both are variants of the recipe's SFT stage and can be resumed
like any stage.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ZooError
from ...evaluation.compute import Compute, sft_compute
from ...evaluation.head_to_head import random_keys
from ...evaluation.judges.panel import score_completions
from ...evaluation.measure import Evaluator, PolicyMeasurements, measure, repeat_prompts
from ...fileio import write_text
from ...modeling.chat import display_text, tokenize_for_reward, wrap_answer
from ...modeling.loading import load_tokenizer
from ...modeling.models import load_causal
from ...modeling.text_ids import switch_off_eos
from ...runs.context import RunContext
from ...runs.data.layout import sft_text
from ...runs.dataset import stage_source, training_and_held_out_rows
from ...runs.record import StageRecord, checkpoint_step, fingerprint, first_difference
from ...runs.settings.parse import StageSettings
from ..run_recipe import run_stage
from ..stages.merged import merged_model
from .baseline import FOLDER, METHODS_WITH_BETA, FinishedRun, Method, TrainedMethod, default_betas
from .baseline_trainers import (
    TrainerSetup,
    dpo_arguments,
    rloo_arguments,
    rollout_sizes,
    train_dpo,
    train_rloo,
    warmup_optimizer_steps,
)
from .runner import open_part, with_keys

#: The first part of a completion's random key: in a best-of-n pool, and in the samples of rejection fine-tuning.
POOL_STREAM, SAMPLES_STREAM = 9, 10
#: Folder of the training data of rejection fine-tuning.
SAMPLES_FOLDER = "lines"
_PROMPTS_PER_WRITE = 8  # best-of-n writes the scores of this many prompts' pools at a time
_COMPLETIONS_PER_BATCH = 1024  # rejection fine-tuning draws this many completions at a time


def run_method(
    run: FinishedRun,
    method: Method,
    *,
    betas: Sequence[float] | None,
    seed_count: int,
    learning_rate: float | None,
    pool_size: int,
    restart: bool,
) -> None:
    """Runs every part of a method that is not finished.

    Args:
        run: The run that the method is compared with.
        method: Name of the method.
        betas: Values of β for DPO and RLOO; None for `default_betas`.
        seed_count: Number of policies to train for each β, with consecutive seeds from the recipe's.
        learning_rate: The learning rate; None for PPO's, or for SFT's in the method "sft".
        pool_size: Number of samples per prompt for best-of-n.
        restart: Whether to repeat finished parts.
    """
    if method == "best-of-n":
        _run_best_of_n(run, pool_size, restart)
        return
    first_seed = run.context.shared.seed
    beta_values = (default_betas(run.context) if betas is None else betas) if method in METHODS_WITH_BETA else [None]
    for beta in beta_values:
        for seed in range(first_seed, first_seed + seed_count):
            _train_and_measure(run, method, seed, beta, learning_rate, restart)


def _run_best_of_n(run: FinishedRun, pool_size: int, restart: bool) -> None:
    """Samples and scores a pool of completions of each held-out prompt, except prompts that were scored before.

    A row of metrics.jsonl has the keys step (the index of the prompt), and reward, judge and length, each a list.
    """
    settings = run.part_settings(pool=pool_size)
    with open_part(run.context, run.folder / "best-of-n", settings, stage=FOLDER, restart=restart) as record:
        if record is not None:
            scored_indices = {row["step"] for row in record.metrics()}
            indices = [index for index in range(len(run.rows)) if index not in scored_indices]
            for start in range(0, len(indices), _PROMPTS_PER_WRITE):
                _score_pools(run, indices[start : start + _PROMPTS_PER_WRITE], pool_size, record)


def _score_pools(run: FinishedRun, indices: Sequence[int], pool_size: int, record: StageRecord) -> None:
    evaluator = run.evaluator
    _, prompts, columns = repeat_prompts(run.rows.select(indices), pool_size)
    keys = [(POOL_STREAM, index, sample) for index in indices for sample in range(pool_size)]
    desc = f"pools of prompts {indices[0] + 1} to {indices[-1] + 1}"
    samples = evaluator.sample(evaluator.reference, prompts, keys=keys, seed=run.context.shared.seed, desc=desc)
    rewards: list[float] = []
    for batch in samples.batches:
        batch_rows = slice(len(rewards), len(rewards) + len(batch))
        rewards += evaluator.score_batch(batch, batch_rows, prompts, samples.texts, columns)
    judge_scores = score_completions(evaluator.judge, prompts, samples.texts, columns)
    for position, index in enumerate(indices):
        pool_slice = slice(position * pool_size, (position + 1) * pool_size)
        record.append_metrics(
            {
                "step": index,
                "reward": rewards[pool_slice],
                "judge": judge_scores[pool_slice],
                "length": samples.lengths[pool_slice],
            }
        )


def _train_and_measure(
    run: FinishedRun, method: TrainedMethod, seed: int, beta: float | None, learning_rate: float | None, restart: bool
) -> None:
    """Trains and measures a policy, unless this part is finished."""
    arguments = _trainer_arguments(run, method, learning_rate)
    beta_key = {} if beta is None else {"beta": beta}
    settings = run.part_settings(method=method, **beta_key, seed=seed, arguments=arguments)
    name = f"seed-{seed}" if beta is None else f"beta-{beta:g}-seed-{seed}"
    folder = run.folder / method / name
    if restart:
        StageRecord(folder / "sft").clear()
    elif beta is None:  # DPO and RLOO keep no policy that could be measured again
        _mark_for_new_measurement(StageRecord(folder), settings)
    with open_part(run.context, folder, settings, stage=FOLDER, restart=restart) as record:
        if record is None:
            return
        record.metrics_file.unlink(missing_ok=True)  # trl's trainers do not resume, so training starts over
        if method == "dpo" or method == "rloo":
            assert beta is not None
            policy, compute = _train_by_trl(run, method, beta, seed, arguments, record)
        else:
            policy, compute = _train_by_sft(run, method, seed, arguments, record)
        measurements = _measure(run, policy, desc=f"evaluating {method} {name.replace('-', ' ')}")
        write_text(record.path / "samples.jsonl", _samples_to_jsonl(run, measurements))
        record.write(**beta_key, seed=seed, compute=compute.to_json())


def _mark_for_new_measurement(record: StageRecord, current: Mapping[str, Any]) -> None:
    """If only the evaluation has changed, marks a policy as not measured, so that it is measured without training."""
    previous = record.read().get("resolved") or {}
    evaluation_keys = ("evaluation", "evaluation_seed")
    training_settings = [
        {key: value for key, value in settings.items() if key not in evaluation_keys}
        for settings in (previous, current)
    ]
    if previous and first_difference(*training_settings) is None and first_difference(previous, current) is not None:
        record.write(status="interrupted", resolved=dict(current), fingerprint=fingerprint(current))


def _trainer_arguments(run: FinishedRun, method: TrainedMethod, learning_rate: float | None) -> dict[str, Any]:
    settings = run.context.settings
    if method == "dpo":
        arguments = dpo_arguments(settings("ppo"), settings("reward"), learning_rate=learning_rate)
    elif method == "rloo":
        arguments = rloo_arguments(settings("ppo"), episodes=run.episodes, learning_rate=learning_rate)
    elif method == "rejection":
        arguments = _rejection_arguments(
            settings("ppo"), settings("sft"), run.update_count, learning_rate=learning_rate
        )
    else:
        arguments = _longer_sft_arguments(settings("sft"), learning_rate=learning_rate)
    return {name: getattr(value, "value", value) for name, value in arguments.items()}  # enums as text


def _train_by_sft(
    run: FinishedRun, method: Literal["sft", "rejection"], seed: int, arguments: Mapping[str, Any], record: StageRecord
) -> tuple[PreTrainedModel, Compute]:
    context, flags = run.context, {**arguments, "seed": seed}
    if method == "rejection":
        if "sampled" not in record.read():
            lines, counts = draw_samples(run.evaluator, run.load_prompts(), run.episodes, seed=seed)
            write_text(record.path / SAMPLES_FOLDER / "train.jsonl", _to_jsonl(lines))
            StageRecord(record.path / "sft").clear()  # an earlier policy was trained on other samples
            record.write(sampled=counts)
        sft_folder = merged_model(context, run.checkpoints["sft"])
        flags |= {"model_name_or_path": str(sft_folder), "dataset_name": str(record.path / SAMPLES_FOLDER)}
    sft_run = run_sft_variant(context, record.path, flags)
    policy = load_causal(sft_run.checkpoint("sft").path)
    rows = training_and_held_out_rows(sft_run, "sft", stage_source(sft_run, "sft"))[0]
    tokens = count_trained_tokens(sft_run, rows, run.evaluator.tokenizer)
    if method == "sft":  # half of the tokens are those of the run's own SFT, whose compute counts for no method
        return policy, sft_compute(run.matrix_sizes, trained_tokens=tokens / 2)
    counts = record.read()["sampled"]
    token_counts = {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}
    return policy, sft_compute(run.matrix_sizes, trained_tokens=tokens, **token_counts)


def _train_by_trl(
    run: FinishedRun,
    method: Literal["dpo", "rloo"],
    beta: float,
    seed: int,
    arguments: Mapping[str, Any],
    record: StageRecord,
) -> tuple[PreTrainedModel, Compute]:
    from transformers import set_seed
    from trl import get_peft_config

    ppo = run.context.settings("ppo")
    sft_folder, label = run.checkpoints["sft"].path, f"{method} β={beta:g} seed {seed}"
    tokenizer = load_tokenizer(sft_folder)
    switch_off_eos(tokenizer)  # otherwise trl would get prompts with an EOS from the tokenizer
    setup = TrainerSetup(sft_folder, tokenizer, beta, seed, record, label, get_peft_config(ppo.model))
    set_seed(seed)
    if method == "dpo":
        return train_dpo(setup, run.load_pairs(), arguments=arguments, matrix_sizes=run.matrix_sizes)
    return train_rloo(
        setup,
        run.load_prompts(),
        run.rewards,
        arguments=arguments,
        matrix_sizes=run.matrix_sizes,
        missing_eos={"penalty": ppo.trainer.missing_eos_penalty, "score": ppo.trainer.missing_eos_score},
        score_clip=ppo.trainer.score_clip,
    )


@torch.no_grad()
def _measure(run: FinishedRun, policy: PreTrainedModel, *, desc: str) -> PolicyMeasurements:
    """Measures a policy as the eval stage measures PPO: with the same prompts, random keys and seed."""
    _, prompts, columns = repeat_prompts(run.rows, run.samples_per_prompt)
    keys, seed = random_keys(len(prompts), run.samples_per_prompt), run.context.shared.seed
    return measure(policy, run.evaluator, prompts, keys=keys, seed=seed, desc=desc, columns=columns)


def _samples_to_jsonl(run: FinishedRun, measurements: PolicyMeasurements) -> str:
    per_prompt = run.samples_per_prompt
    prompts = [display_text(prompt) for prompt in run.rows["prompt"] for _ in range(per_prompt)]
    return _to_jsonl(
        {"prompt": prompt, "sample": index % per_prompt, **measurements.row(index, run.judge_name)}
        for index, prompt in enumerate(prompts)
    )


def _to_jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _longer_sft_arguments(sft: StageSettings, *, learning_rate: float | None) -> dict[str, Any]:
    """Returns flags of SFT that double its number of steps."""
    args = sft.trainer
    key = "max_steps" if args.max_steps > 0 else "num_train_epochs"
    return {key: 2 * getattr(args, key), **({} if learning_rate is None else {"learning_rate": learning_rate})}


def _rejection_arguments(
    ppo: StageSettings, sft: StageSettings, update_count: int, *, learning_rate: float | None
) -> dict[str, Any]:
    """Returns flags of SFT that give it PPO's number of optimizer steps and minibatch size."""
    args = ppo.trainer
    rollout_size, steps_per_pass = rollout_sizes(args)
    batch_size = rollout_size // steps_per_pass
    micro_batch_size = math.gcd(batch_size, sft.trainer.per_device_train_batch_size)
    max_steps = update_count * steps_per_pass * args.num_ppo_epochs
    return {
        "learning_rate": args.learning_rate if learning_rate is None else learning_rate,
        "lr_scheduler_type": args.lr_scheduler_type,
        "warmup_steps": warmup_optimizer_steps(args),
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": batch_size // micro_batch_size,
        "max_steps": max_steps,
        "save_strategy": "steps",
        "save_steps": max_steps,
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


def draw_samples(
    evaluator: Evaluator, prompts: Dataset, count: int, *, seed: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Draws completions of the SFT policy, and keeps those that ended and have a reward above the mean reward.

    Args:
        evaluator: The evaluator, with the SFT policy as its reference.
        prompts: The prompts. If there are fewer than `count`, they repeat from the first.
        count: Number of completions to draw.
        seed: Seed of the samples.

    Returns:
        The kept completions as rows of SFT's data, and the numbers of completions and tokens for run.json.

    Raises:
        ZooError: No completion is kept.
    """
    completions: list[tuple[Any, str]] = []
    rewards: list[float] = []
    ended: list[bool] = []
    prompt_tokens = completion_tokens = 0
    for start in range(0, count, _COMPLETIONS_PER_BATCH):
        indices = range(start, min(start + _COMPLETIONS_PER_BATCH, count))
        _, batch_prompts, columns = repeat_prompts(prompts.select([index % len(prompts) for index in indices]), 1)
        keys = [(SAMPLES_STREAM, index % len(prompts), index // len(prompts)) for index in indices]
        desc = f"completions {start + 1} to {indices[-1] + 1} of {count}"
        samples = evaluator.sample(evaluator.reference, batch_prompts, keys=keys, seed=seed, desc=desc)
        offset = 0
        for batch in samples.batches:
            rewards += evaluator.score_batch(
                batch, slice(offset, offset + len(batch)), batch_prompts, samples.texts, columns
            )
            prompt_tokens += int(batch.prompt_mask.sum())
            completion_tokens += int(batch.mask.sum())
            offset += len(batch)
        completions += zip(batch_prompts, samples.texts, strict=True)
        ended += samples.ended
    mean_reward = float(np.mean(rewards))
    lines = [
        {"prompt": prompt, "completion": wrap_answer(prompt, text)}
        for (prompt, text), reward, has_ended in zip(completions, rewards, ended, strict=True)
        if has_ended and reward > mean_reward
    ]
    if not lines:
        raise ZooError(
            f"Of {count} completions of the SFT policy {sum(ended)} ended, but none of these has a reward above the "
            f"mean of all, {mean_reward:g}, so there is nothing to learn from: check PPO's reward, or train SFT longer."
        )
    token_counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return lines, {"completions": count, "kept": len(lines), **token_counts}


def run_sft_variant(context: RunContext, folder: Path, flags: Mapping[str, Any]) -> RunContext:
    """Runs the SFT stage with other flags, in a new run.

    Args:
        context: The run.
        folder: The new run's directory.
        flags: Flags of SFT, which override the run's own.

    Returns:
        The new run, which shares the run's data.
    """
    base, flags = context.directory, with_keys(context.flags, "sft", flags)
    run = replace(context, directory=folder, base=base, own_stages=("sft",), flags=flags, publish=False, restart=False)
    run_stage(run, "sft")
    return run


def count_trained_tokens(run: RunContext, rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> float:
    """Estimates the number of tokens that a finished SFT stage trained on, by its steps and the mean length of rows.

    Args:
        run: The run.
        rows: The stage's training rows.
        tokenizer: The policy's tokenizer.
    """
    args, checkpoint = run.settings("sft").trainer, run.record("sft").last_checkpoint()
    assert checkpoint is not None  # a finished stage has a checkpoint
    row_count = checkpoint_step(checkpoint) * args.per_device_train_batch_size * args.gradient_accumulation_steps
    if args.packing:  # packing fills every row to max_length
        return float(row_count * args.max_length)
    lengths = [len(tokenize_for_reward(sft_text(row, args.dataset_text_field), tokenizer, ended=True)) for row in rows]
    max_length = args.max_length or max(lengths)
    return float(row_count * np.mean(np.minimum(lengths, max_length)))
