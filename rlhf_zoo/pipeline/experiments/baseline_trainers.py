"""DPO and RLOO by trl's trainers, from the SFT policy of a run, on the run's own pairs, prompts and reward.

RLOO uses PPO's prompts, number of completions, temperature, rollout size, reward, penalty for a missing EOS, passes and
optimizer steps. DPO learns from the reward model's pairs, with the reward model's batch size and epochs. Both use PPO's
learning rate for the policy unless --learning_rate is set.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from ... import functional as F
from ...errors import ZooError
from ...evaluation.compute import Compute, dpo_compute, rloo_compute
from ...evaluation.text_logprobs import build_samples
from ...modeling.chat import (
    append_completion,
    decode_completions,
    has_answer_prefix,
    move_answer_prefix,
    wrap_completion,
)
from ...modeling.model_files import ADAPTER_CONFIG
from ...modeling.models import is_peft, load_causal
from ...modeling.reserved_columns import withheld_columns
from ...modeling.special_tokens import stop_ids
from ...rewards import Rewards
from ...runs.record import StageRecord
from ...runs.settings.parse import StageSettings
from ..stages.callbacks import ProgressCallback
from ..stages.sft import remove_second_bos

#: Completions per prompt in RLOO if PPO samples only one. A completion's baseline is the mean score of the other
#: completions (Ahmadian et al. 2024 use 2 or 4).
DEFAULT_GROUP_SIZE = 4
_OPTIMIZER_KEYS = (
    "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "lr_scheduler_type",
    "lr_scheduler_kwargs", "bf16", "fp16", "use_cpu",
)  # fmt: skip


@dataclass(frozen=True)
class TrainerSetup:
    """The SFT policy that a trainer starts from, and the options that DPO and RLOO share.

    Attributes:
        sft_folder: Folder of the SFT policy.
        tokenizer: The policy's tokenizer.
        beta: Coefficient of the KL penalty.
        seed: Seed of the trainer.
        record: The record to which metrics are written.
        desc: Label of the progress bar.
        peft_config: Configuration of the adapter to train; None trains all weights.
    """

    sft_folder: Path
    tokenizer: PreTrainedTokenizerBase
    beta: float
    seed: int
    record: StageRecord
    desc: str
    peft_config: Any = None


def dpo_arguments(ppo: StageSettings, reward: StageSettings, *, learning_rate: float | None) -> dict[str, Any]:
    """Returns the fields of DPOConfig, without β and seed.

    Args:
        ppo: Settings of the PPO stage.
        reward: Settings of the reward stage, whose batches, epochs and schedule DPO uses.
        learning_rate: The learning rate; None for PPO's.
    """
    args = reward.trainer
    keys = (
        *_OPTIMIZER_KEYS, "warmup_steps", "num_train_epochs", "max_steps", "per_device_train_batch_size",
        "gradient_accumulation_steps", "max_length",
    )  # fmt: skip
    return {
        **{key: getattr(args, key) for key in keys},
        "learning_rate": ppo.trainer.learning_rate if learning_rate is None else learning_rate,
    }


def rloo_arguments(ppo: StageSettings, *, episodes: int, learning_rate: float | None) -> dict[str, Any]:
    """Returns the fields of RLOOConfig, without β and seed, from the corresponding keys of PPO.

    Args:
        ppo: Settings of the PPO stage.
        episodes: Number of completions that PPO sampled. RLOO samples this number, rounded up to full rollouts.
        learning_rate: The learning rate; None for PPO's.

    Raises:
        ZooError: A rollout of PPO cannot be divided into RLOO's groups, or PPO truncates its completions.
    """
    args = ppo.trainer
    if args.truncation:
        raise ZooError(
            "PPO truncates its completions (truncate_text or response_length_min), but RLOO cannot: compare with dpo "
            "or best-of-n."
        )
    rollout_size, steps_per_pass = rollout_sizes(args)
    group_size = args.num_generations if args.num_generations > 1 else DEFAULT_GROUP_SIZE
    if rollout_size % group_size:
        raise ZooError(
            f"RLOO compares {group_size} completions of a prompt, but a rollout has {rollout_size}, not a multiple: "
            "change per_device_train_batch_size of the stage ppo."
        )
    micro_batch_size = math.gcd(rollout_size // steps_per_pass, args.per_device_train_batch_size)
    micro_batch_count = rollout_size // micro_batch_size
    return {
        **{name: getattr(args, name) for name in _OPTIMIZER_KEYS},
        "warmup_steps": warmup_optimizer_steps(args),
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": micro_batch_count // steps_per_pass,
        "steps_per_generation": micro_batch_count,
        "num_generations": group_size,
        "num_iterations": args.num_ppo_epochs,
        "max_steps": math.ceil(episodes / rollout_size) * steps_per_pass * args.num_ppo_epochs,
        "max_completion_length": args.response_length,
        "temperature": args.temperature,
        "learning_rate": args.learning_rate if learning_rate is None else learning_rate,
    }


def rollout_sizes(args: Any) -> tuple[int, int]:
    """Returns the number of completions in a rollout of PPO, and of a baseline's optimizer steps in a pass over it.

    If num_mini_batches does not divide the rollout, a pass is a single step.

    Args:
        args: A PPOConfig.
    """
    rollout_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_generations
    return rollout_size, args.num_mini_batches if rollout_size % args.num_mini_batches == 0 else 1


def warmup_optimizer_steps(args: Any) -> float:
    """Converts PPO's warm-up from updates to optimizer steps. A value below 1, a share of all steps, stays as it is.

    Args:
        args: A PPOConfig.
    """
    steps_per_update = rollout_sizes(args)[1] * args.num_ppo_epochs
    return float(args.warmup_steps if args.warmup_steps < 1 else args.warmup_steps * steps_per_update)


def train_dpo(
    setup: TrainerSetup, pairs: Dataset, *, arguments: Mapping[str, Any], matrix_sizes: Mapping[str, int]
) -> tuple[PreTrainedModel, Compute]:
    """Trains a policy by DPO.

    Args:
        setup: The SFT policy, and shared options.
        pairs: Rows of prompt, chosen and rejected.
        arguments: Fields of DPOConfig.
        matrix_sizes: Role -> number of parameters in matrices.

    Returns:
        The policy, and the compute of its training.
    """
    from trl import DPOConfig, DPOTrainer

    rows = remove_second_bos(pairs.select_columns(["prompt", "chosen", "rejected"]), setup.tokenizer)
    if any(map(has_answer_prefix, rows["prompt"])):
        rows = Dataset.from_list([_move_prefix_to_answers(row) for row in rows])
    trainer, policy = _train(setup, DPOTrainer, DPOConfig, rows, arguments)
    names = ("prompt_ids", "prompt_ids", "chosen_ids", "rejected_ids")  # each side includes the prompt
    pair_tokens = sum(len(ids) for name in names for ids in trainer.train_dataset[name])
    return policy, dpo_compute(matrix_sizes, pair_tokens=pair_tokens, epochs=float(trainer.state.epoch or 0.0))


def _move_prefix_to_answers(row: Mapping[str, Any]) -> dict[str, Any]:
    (prompt, chosen), (_, rejected) = (move_answer_prefix(row["prompt"], row[side]) for side in ("chosen", "rejected"))
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def train_rloo(
    setup: TrainerSetup,
    prompts: Dataset,
    rewards: Rewards,
    *,
    arguments: Mapping[str, Any],
    matrix_sizes: Mapping[str, int],
    missing_eos: Mapping[str, float | None],
    score_clip: float | None,
) -> tuple[PreTrainedModel, Compute]:
    """Trains a policy by RLOO.

    Args:
        setup: The SFT policy, and shared options.
        prompts: Rows of prompts, with the columns that reward functions read.
        rewards: PPO's reward.
        arguments: Fields of RLOOConfig.
        matrix_sizes: Role -> number of parameters in matrices.
        missing_eos: PPO's `penalty` and `score` for a completion that did not end.
        score_clip: PPO's score_clip.

    Returns:
        The policy, and the compute of its training.

    Raises:
        ZooError: A prompt ends with an assistant turn.
    """
    from trl import RLOOConfig, RLOOTrainer

    if any(map(has_answer_prefix, prompts["prompt"])):
        raise ZooError(
            "Some prompts end in the assistant's turn. PPO continues that turn, but trl's RLOO would close it and open "
            "another: compare with dpo or best-of-n."
        )
    prompts = remove_second_bos(prompts, setup.tokenizer)
    prompts = prompts.remove_columns(withheld_columns(prompts.column_names))
    counter = TokenCounter()
    reward = ppo_reward(rewards, setup.tokenizer, counter, missing_eos=missing_eos, score_clip=score_clip)
    _, policy = _train(
        setup, RLOOTrainer, RLOOConfig, prompts, {**arguments, "disable_dropout": True}, reward_funcs=reward
    )
    # At β = 0, trl computes no KL and runs no reference.
    roles = [role for role in matrix_sizes if role != "reference" or setup.beta > 0]
    compute = rloo_compute(
        {role: matrix_sizes[role] for role in roles},
        prompt_tokens=counter.prompt_tokens,
        completion_tokens=counter.completion_tokens,
        iterations=arguments["num_iterations"],
    )
    return policy, compute


def _train(
    setup: TrainerSetup,
    trainer_class: Any,
    config_class: Any,
    rows: Dataset,
    arguments: Mapping[str, Any],
    **trainer_options: Any,
) -> tuple[Any, PreTrainedModel]:
    """Trains with one of trl's trainers. Returns the trainer and the policy."""
    with tempfile.TemporaryDirectory() as scratch_folder:
        sft_folder = _path_for_trl(setup.sft_folder, Path(scratch_folder) / "sft")
        trainer = trainer_class(
            model=load_causal(sft_folder),
            args=config_class(
                output_dir=scratch_folder,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                gradient_checkpointing=False,
                logging_steps=5,
                beta=setup.beta,
                seed=setup.seed,
                **arguments,
            ),
            train_dataset=rows,
            processing_class=setup.tokenizer,
            callbacks=[ProgressCallback(setup.record, setup.desc)],
            peft_config=setup.peft_config,
            **trainer_options,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer, _unwrapped_policy(trainer, sft_folder)


def _path_for_trl(path: Path, target: Path) -> Path:
    """Returns the folder from which trl loads policy and reference. An adapter is merged into its base in `target`."""
    if not (path / ADAPTER_CONFIG).is_file():
        return path
    load_causal(path).save_pretrained(target)
    return target


def _unwrapped_policy(trainer: Any, sft_folder: Path) -> PreTrainedModel:
    """Returns a new model with the trained weights, without the wrappers of trl and accelerate."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if is_peft(policy):
        policy = policy.merge_and_unload()
    model = load_causal(sft_folder)
    model.load_state_dict(policy.state_dict())
    return model.eval()


@dataclass
class TokenCounter:
    """Numbers of tokens in all sampled batches."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


def ppo_reward(
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase,
    counter: TokenCounter,
    *,
    missing_eos: Mapping[str, float | None],
    score_clip: float | None,
) -> Callable[..., list[float]]:
    """Wraps PPO's scoring of completions as a reward function for trl.

    Args:
        rewards: PPO's reward.
        tokenizer: The policy's tokenizer.
        counter: The counter to which the tokens of each batch are added.
        missing_eos: PPO's `penalty` and `score` for a completion that did not end.
        score_clip: PPO's score_clip.
    """

    def reward(
        prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[list[int]], **columns: Any
    ) -> list[float]:
        samples = build_samples(prompts, completion_ids, tokenizer, stop_ids(None, tokenizer))
        counter.prompt_tokens += int(samples.prompt_mask.sum())
        counter.completion_tokens += int(samples.mask.sum())
        # trl decodes completions without their prompts, which loses the space before the first word.
        answers = decode_completions(tokenizer, prompts, samples.prompt_id_lists(), completion_ids)
        completions = [wrap_completion(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        texts = [append_completion(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        state = columns.get("trainer_state")
        scores = rewards(samples, prompts, completions, texts, columns, trainer_state=state).total
        scores = F.shape_scores(scores, mean=0.0, std=1.0, clip=score_clip)
        scores = F.missing_eos_penalty(scores, samples.ended, penalty=missing_eos["penalty"])
        scores = F.missing_eos_score(scores, samples.ended, score=missing_eos["score"])
        return [float(score) for score in scores]

    return reward
