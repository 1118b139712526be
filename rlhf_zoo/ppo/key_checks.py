"""Checks PPO's keys against one another and finds the values of unset keys, without importing the trainers' packages.

`args` is a PPOConfig, or any object with the same attributes.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import ZooError
from ..fields import check_limits
from ..functional import AGGREGATIONS, ENSEMBLES, LOSS_KL_ESTIMATORS, REWARD_KL_ESTIMATORS
from ..rewards.model import REWARD_OUTPUTS

#: Tokens per pass on a CPU. A larger pass needs more memory. In bf16 it saves time, because each pass casts all weights
#: (docs/performance.md).
CPU_TOKENS_PER_PASS, CPU_BF16_TOKENS_PER_PASS = 512, 2048
#: Key -> its allowed values.
CHOICES = {
    "kl_in": ("reward", "loss"),
    "action_level": ("token", "sequence"),
    "loss_aggregation": AGGREGATIONS,
    "rollout_engine": ("native", "transformers", "vllm"),
    "vllm_mode": ("colocate", "server"),
    "critic": ("auto", "reward", "policy", "shared"),
    "score_centering": ("stored", "running", "prompt", "none"),
    "score_scaling": ("stored", "running", "none"),
    "reward_output": REWARD_OUTPUTS,
    "reward_ensemble": (None, *ENSEMBLES),
}
#: (kl_in, kl_estimator) -> why this estimator does not work there.
KL_ESTIMATOR_PROBLEMS = {
    ("reward", "k2"): "it is biased, and its expected gradient through the reward is not that of a KL",
    ("reward", "k3_reverse"): "it is meaningful only in the loss, by its gradient",
    ("reward", "full"): "an exact KL is not a property of the sampled token, so it cannot be that token's reward",
    ("loss", "k1"): "its expected gradient is 0, E[∇ log π] = 0, so it would not constrain the policy",
}


def check_keys(args: Any, defaults: Mapping[str, Any]) -> None:
    """Checks the range of every key, and that no keys contradict each other.

    Args:
        args: The keys.
        defaults: Key -> default, for every key.

    Raises:
        ZooError: A value is out of range, or keys contradict each other.
    """
    _check_values(args, defaults)
    _check_kl(args)
    _check_frozen_models(args)
    _check_engine(args, defaults)


def check_update(args: Any, episode_count: int) -> None:
    """Checks the keys that depend on the size of an update.

    Args:
        args: The keys.
        episode_count: The number of completions in one update, over all processes.

    Raises:
        ZooError: The update cannot be divided into minibatches, or is too large for `kl_horizon`.
    """
    if episode_count % args.num_mini_batches:
        raise ZooError(
            f"num_mini_batches {args.num_mini_batches} does not divide the rollout of {episode_count} "
            "completions (per_device_train_batch_size × gradient_accumulation_steps × num_generations × processes): "
            "change one of them."
        )
    if args.kl_target is not None and episode_count > 5 * args.kl_horizon:
        raise ZooError(
            f"kl_horizon {args.kl_horizon} is less than a fifth of an update's {episode_count} "
            "episodes, so β could become negative: raise kl_horizon."
        )


def _check_values(args: Any, defaults: Mapping[str, Any]) -> None:
    for name in defaults:
        check_limits(name, getattr(args, name, None))
    for name, choices in CHOICES.items():
        if getattr(args, name) not in choices:
            raise ZooError(
                f"{name} is {getattr(args, name)!r}: choose one of {', '.join(map(repr, filter(None, choices)))}."
            )
    if args.stop_token not in ("eos", None):
        raise ZooError(f"stop_token is {args.stop_token!r}: set it to 'eos', or set stop_token_id instead.")
    if args.fp16:
        raise ZooError(
            "fp16 scales gradients for one optimizer step per update, but PPO makes several: use bf16 instead."
        )
    for name, neutral in {"label_smoothing_factor": 0, "neftune_noise_alpha": None}.items():
        if getattr(args, name) != neutral:
            raise ZooError(f"{name} is {getattr(args, name)}, which has no meaning in PPO: remove it.")
    _check_completions(args)
    if args.reward_label is None and args.reward_output != "logit":
        raise ZooError(f"reward_output is {args.reward_output!r}, which needs a label: set reward_label.")
    if args.reward_ensemble_lambda is not None and args.reward_ensemble != "mean_minus_variance":
        raise ZooError(
            f"reward_ensemble_lambda is {args.reward_ensemble_lambda}, but reward_ensemble is "
            f"{args.reward_ensemble!r}: only 'mean_minus_variance' has a λ; use that or remove the key."
        )
    if args.missing_eos_penalty is not None and args.missing_eos_score is not None:
        raise ZooError("missing_eos_penalty subtracts and missing_eos_score replaces: set only one of them.")


def _check_completions(args: Any) -> None:
    if args.response_length_min is not None and args.response_length_min > args.response_length:
        raise ZooError(
            f"response_length_min is {args.response_length_min}, but response_length is only {args.response_length}: "
            "lower response_length_min."
        )
    if args.truncate_text == "":
        raise ZooError("truncate_text is empty: set a text, or remove the key.")
    if args.truncate_text is None and args.truncate_after:
        raise ZooError(f"truncate_after is {args.truncate_after}, but there is no truncate_text: set that too.")
    if args.truncate_after >= args.response_length:
        raise ZooError(
            f"truncate_after is {args.truncate_after} and response_length {args.response_length}, so nothing would be "
            "cut: lower truncate_after."
        )
    for setting, is_set in {
        "skip_equal_scores": args.skip_equal_scores, "score_centering 'prompt'": args.score_centering == "prompt"
    }.items():  # fmt: skip
        if is_set and args.num_generations < 2:
            raise ZooError(
                f"{setting} compares the completions of a prompt, but num_generations is 1: set it to at least 2."
            )


def _check_engine(args: Any, defaults: Mapping[str, Any]) -> None:
    engine = args.rollout_engine
    if engine == "native" and args.importance_sampling_cap is not None:
        raise ZooError(
            "importance_sampling_cap corrects for another engine, but rollout_engine is 'native', whose "
            "log-probabilities are the trainer's: remove it."
        )
    if engine != "native" and not args.rollout_graphs:
        raise ZooError(f"rollout_graphs is for the native engine, but rollout_engine is {engine!r}: remove it.")
    if engine == "transformers" and args.padding_free:
        raise ZooError(
            "padding_free needs its own attention, which rollout_engine 'transformers' does not have: remove it."
        )
    if engine == "vllm" and args.max_rollout_batch_tokens is not None:
        raise ZooError(
            "max_rollout_batch_tokens limits the cache of the other engines: use vllm_gpu_memory_utilization for vLLM."
        )
    if engine != "native" and args.fsdp2:
        raise ZooError(f"rollout_engine {engine!r} does not support weights sharded by fsdp2: remove one of them.")
    vllm_keys = {name: default for name, default in defaults.items() if name.startswith("vllm_")}
    changed_keys = [name for name, default in vllm_keys.items() if getattr(args, name) != default]
    if changed_keys and engine != "vllm":
        raise ZooError(f"{changed_keys[0]} is for vLLM, but rollout_engine is {engine!r}: remove it, or use 'vllm'.")
    if (args.vllm_mode == "server") != (args.vllm_server_base_url is not None):
        raise ZooError(
            f"vllm_mode is {args.vllm_mode!r}, but vllm_server_base_url is {args.vllm_server_base_url!r}: set the URL "
            "for a server, and only for a server."
        )
    colocated_only = {"vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_enforce_eager"}.intersection(
        changed_keys
    )
    if args.vllm_mode == "server" and colocated_only:
        raise ZooError(
            f"{min(colocated_only)} is for a colocated vLLM, but vllm_mode is 'server': set it on the server."
        )


def default_tokens_per_pass(*, on_cpu: bool, bf16: bool) -> int | None:
    """Returns the default limit on tokens in a forward pass; None (no limit) on a GPU.

    Args:
        on_cpu: Whether the run computes on a CPU.
        bf16: Whether the run computes in bfloat16.
    """
    if not on_cpu:
        return None
    return CPU_BF16_TOKENS_PER_PASS if bf16 else CPU_TOKENS_PER_PASS


def has_reference(args: Any, *, has_ref_model: bool) -> bool:
    """Whether a run keeps a reference for KL.

    Args:
        args: The keys.
        has_ref_model: Whether the user passes a reference model.
    """
    if args.reference is not None:
        return bool(args.reference)
    has_penalty = args.kl_coef != 0 or args.kl_target is not None or args.kl_in == "loss"
    selects_by_kl = str(args.metric_for_best_model).endswith("objective/kl")
    return bool(has_ref_model or args.ref_load_in_8bit or args.ref_adapter_name or selects_by_kl or has_penalty)


def _check_frozen_models(args: Any) -> None:
    offload_conflicts = {
        "fsdp2, whose shards cannot be moved": args.fsdp2,
        "ref_load_in_8bit, whose weights cannot be moved": args.ref_load_in_8bit,
        "kl_estimator 'full', for which the reference runs in every micro-batch": args.kl_estimator == "full",
    }
    if args.offload_frozen and any(offload_conflicts.values()):
        conflict = next(reason for reason, is_set in offload_conflicts.items() if is_set)
        raise ZooError(f"offload_frozen cannot be combined with {conflict}: remove one of them.")
    if args.reference is not False:
        return
    if args.kl_coef != 0 or args.kl_target is not None:
        setting = f"kl_target is {args.kl_target}" if args.kl_target is not None else f"kl_coef is {args.kl_coef}"
        raise ZooError(
            f"reference is false, but {setting}, which needs a reference: set kl_coef to 0, or reference to true."
        )
    if args.kl_in == "loss":
        raise ZooError("reference is false, but kl_in 'loss' needs a reference: remove kl_in.")
    for key in ("ref_load_in_8bit", "ref_adapter_name"):
        if getattr(args, key):
            raise ZooError(f"reference is false, but {key} configures a reference: remove one of them.")
    if str(args.metric_for_best_model).endswith("objective/kl"):
        raise ZooError("reference is false, so metric_for_best_model cannot be objective/kl: choose another metric.")


def _check_kl(args: Any) -> None:
    estimators = REWARD_KL_ESTIMATORS if args.kl_in == "reward" else LOSS_KL_ESTIMATORS
    if args.kl_estimator not in estimators:
        choices = " or ".join(map(repr, estimators))
        why = KL_ESTIMATOR_PROBLEMS.get((args.kl_in, args.kl_estimator))
        if why is None:
            raise ZooError(f"kl_estimator {args.kl_estimator!r} does not exist: use {choices}.")
        raise ZooError(
            f"kl_estimator {args.kl_estimator!r} does not work in the {args.kl_in}, because {why}: use {choices}, or "
            "change kl_in."
        )
