"""The keys of recipes and flags: how a dataclass declares a key, and the bounds of every numeric key."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ZooError

#: The largest number allowed, slightly below the largest float32, the type in which models compute.
MAX_FLOAT32 = 3e38


def option(default: Any, help: str) -> Any:
    """Declares a key as a field of a dataclass.

    Args:
        default: The key's default.
        help: The key's help text. `runs.settings.declared` reads both arguments from the source code of the dataclass.
    """
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Limit:
    """The bounds of a finite number x: low ≤ x ≤ high.

    Attributes:
        low: The lower bound.
        high: The upper bound.
        low_open: Whether the lower bound itself is excluded.
        high_open: Whether the upper bound itself is excluded.
        why: The reason for the bounds, which precedes the fix in the error. It is empty or ends with ", so ".
    """

    low: float = -MAX_FLOAT32
    high: float = MAX_FLOAT32
    low_open: bool = False
    high_open: bool = False
    why: str = ""

    def how_to_fix(self, number: float) -> str | None:
        """Returns how to fix a number, as the end of a sentence; None if it is within the bounds."""
        if isinstance(number, float) and not math.isfinite(number):
            expected = "a finite number"
        elif number < self.low or (self.low_open and number == self.low):
            expected = _describe_bound(self.low, self.low_open, "above")
        elif number > self.high or (self.high_open and number == self.high):
            expected = _describe_bound(self.high, self.high_open, "below")
        else:
            return None
        return f"{self.why}give {expected}."


def _describe_bound(bound: float, is_open: bool, side: str) -> str:
    if is_open:
        return "a positive number" if bound == 0 and side == "above" else f"a number {side} {bound:,}"
    return f"at {'least' if side == 'above' else 'most'} {bound:,}"


MAX_INT32 = 2**31 - 1
FINITE = Limit()
COUNT = Limit(1, MAX_INT32)
COUNT_OR_ZERO = Limit(0, MAX_INT32)
SEED = Limit(0, 2**32 - 1)  # the range of NumPy's seeds
STEPS = Limit(0, MAX_INT32)  # below 1, a share of the run; but eval_delay is in steps or epochs
POSITIVE = Limit(0, low_open=True)
NON_NEGATIVE = Limit(0)
UNIT_INTERVAL = Limit(0, 1)
BELOW_ONE = Limit(0, 1, high_open=True)
PROCESSES = Limit(0, 256)

#: Key of any stage or configuration -> its bounds. Any other key has the bounds of `FINITE`.
LIMITS: Mapping[str, Limit] = {
    "adam_beta1": BELOW_ONE,
    "adam_beta2": BELOW_ONE,
    "adam_epsilon": POSITIVE,
    "center_rewards_coefficient": NON_NEGATIVE,
    "checkpoint_prompts": COUNT_OR_ZERO,
    "checkpoint_samples": COUNT,
    "cliprange": POSITIVE,
    "cliprange_high": POSITIVE,
    "cliprange_sequence": POSITIVE,
    "cliprange_value": POSITIVE,
    "critic_learning_rate": NON_NEGATIVE,
    "critic_warmup_updates": COUNT_OR_ZERO,
    "data_seed": SEED,
    "dataloader_num_workers": PROCESSES,
    "dataloader_prefetch_factor": COUNT,
    "dataset_num_proc": Limit(1, PROCESSES.high),
    "ddp_bucket_cap_mb": COUNT,
    "ddp_timeout": COUNT,
    "dual_clip": Limit(1, low_open=True),
    "early_stop_kl": POSITIVE,
    "entropy_coef": NON_NEGATIVE,
    "eval_accumulation_steps": COUNT,
    "eval_delay": STEPS,
    "eval_steps": STEPS,
    "filter_samples": COUNT_OR_ZERO,
    "gamma": Limit(0, 1, low_open=True),
    "gradient_accumulation_steps": COUNT,
    "held_out_share": Limit(0, 1, low_open=True, high_open=True),
    "importance_sampling_cap": Limit(1),
    "judge_share": Limit(0, 1, low_open=True, high_open=True),
    "kl_coef": Limit(0, why="a negative β would pay the policy for leaving its reference, so "),
    "kl_horizon": COUNT,
    "kl_target": POSITIVE,
    "label_smoothing_factor": BELOW_ONE,
    "lam": UNIT_INTERVAL,
    "learning_rate": NON_NEGATIVE,
    "local_rollout_forward_batch_size": COUNT,
    "logging_steps": Limit(0, MAX_INT32, low_open=True),
    "lm_eval_fewshot": COUNT_OR_ZERO,
    "lm_eval_limit": COUNT,
    "lora_alpha": COUNT,
    "lora_dropout": BELOW_ONE,
    "lora_r": Limit(1, 2**16),
    "max_grad_norm": NON_NEGATIVE,
    "max_length": Limit(2, MAX_INT32, why="each token is predicted from those before it, so "),
    "max_prompt_length": COUNT,
    "max_rollout_batch_tokens": COUNT,
    "max_steps": Limit(-1, MAX_INT32),
    "max_tokens_per_micro_batch": COUNT,
    "neftune_noise_alpha": Limit(0, 1e6),
    "num_completions_to_print": COUNT,
    "num_generations": Limit(1, 2**16),
    "num_mini_batches": COUNT,
    "num_ppo_epochs": COUNT,
    "num_sample_generations": COUNT_OR_ZERO,
    "num_train_epochs": Limit(0, MAX_INT32),
    "pad_to_multiple_of": Limit(1, 2**13),
    "pairs_seed": SEED,
    "per_device_eval_batch_size": COUNT,
    "per_device_train_batch_size": COUNT,
    "prompts": COUNT,
    "ptx_coef": NON_NEGATIVE,
    "response_length": COUNT,
    "reward_ensemble_lambda": NON_NEGATIVE,
    "reward_timeout": POSITIVE,
    "response_length_min": COUNT,
    "push_steps": COUNT,
    "router_aux_loss_coef": NON_NEGATIVE,
    "samples": COUNT,
    "save_optimizer_limit": COUNT,
    "save_steps": STEPS,
    "save_total_limit": COUNT_OR_ZERO,
    "score_clip": POSITIVE,
    "score_samples": Limit(2, MAX_INT32),
    "seed": SEED,
    "simulated_pairs": COUNT,
    "simulated_test_pairs": COUNT,
    "stop_token_id": COUNT_OR_ZERO,
    # Logits divided by a smaller number would overflow float32.
    "temperature": Limit(1e-4, why="completions are sampled, so "),
    "torch_empty_cache_steps": COUNT,
    "total_episodes": COUNT,
    "truncate_after": COUNT_OR_ZERO,
    "vf_coef": NON_NEGATIVE,
    "vllm_gpu_memory_utilization": Limit(0, 1, low_open=True),
    "warmup_steps": STEPS,
    "weight_decay": NON_NEGATIVE,
}


def check_limits(name: str, value: Any, *, label: str = "") -> None:
    """Checks a value against the bounds of its key.

    Args:
        name: The key.
        value: A number, or a list of numbers. Any other value passes.
        label: The key's name in the error, such as --seed; by default `name`.

    Raises:
        ZooError: A number is out of bounds.
    """
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if fix := LIMITS.get(name, FINITE).how_to_fix(number):
            raise ZooError(f"{label or name} is {number}: {fix}")
