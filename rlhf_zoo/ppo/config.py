"""PPOConfig: TrainingArguments plus PPO's settings, named as in TRL 1.12's PPOConfig."""

from dataclasses import dataclass, field, fields
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.training_args import OptimizerNames

from ..errors import ZooError
from ..fields import check_limits, option
from ..functional import AGGREGATIONS, ENSEMBLES, KL_IN_LOSS, KL_IN_REWARD
from ..modeling.devices import has_bfloat16
from ..modeling.distributed import check_shards
from ..modeling.sampling.truncation import Truncation
from ..modeling.special_tokens import stop_ids
from ..rewards.model import REWARD_OUTPUTS

#: Tokens per pass on a CPU. More would cost memory; in bf16 each pass casts all weights (docs/performance.md).
CPU_TOKENS_PER_PASS, CPU_BF16_TOKENS_PER_PASS = 512, 2048
#: Keys that take one of a few values.
ONE_OF = {
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
#: Why an estimator does not work in the reward or in the loss.
NO_KL_ESTIMATOR = {
    ("reward", "k2"): "it is biased, and its expected gradient through the reward is not that of a KL",
    ("reward", "k3_reverse"): "it is a gradient for the loss",
    ("reward", "full"): "an exact KL is not a property of the sampled token, so it cannot be paid out for it",
    ("loss", "k1"): "its expected gradient is 0, E[∇ log π] = 0, so it would not constrain the policy",
}


@dataclass
class PPOConfig(TrainingArguments):
    """Configuration of `PPOTrainer`.

    A step is one PPO update. In each update a process reads `per_device_train_batch_size × gradient_accumulation_steps`
    prompts, samples `num_generations` completions for each, and runs the models over `per_device_train_batch_size` of
    them at a time.

    Raises:
        ZooError: A value is out of range, or keys contradict each other.
    """

    learning_rate: float = option(3e-6, "Learning rate of the policy (TRL's default).")
    critic_learning_rate: float | None = option(None, "Learning rate of the critic; None takes the policy's.")
    logging_steps: float = option(1, "Log every so many updates.")
    remove_unused_columns: bool = option(False, "Drop columns that the model's forward does not take; keep it False.")
    dataset_num_proc: int | None = option(None, "Processes that tokenize the prompts.")
    bf16: bool | None = option(  # type: ignore[assignment]  # as in trl, whose configurations accept None too
        False, "Compute in bfloat16, weights in float32; None: where the machine's GPU has it."
    )
    total_episodes: int | None = option(
        None, "Completions to sample in all; sets max_steps, rounded up to whole updates."
    )
    num_ppo_epochs: int = option(4, "Passes over each rollout.")
    num_mini_batches: int = option(1, "Optimizer steps a pass.")
    num_generations: int = option(1, "Completions of each prompt.")
    response_length: int = option(53, "Most tokens of a completion.")
    response_length_min: int | None = option(
        None, "Draw the most tokens of each completion from here to response_length; None draws none."
    )
    truncate_text: str | None = option(None, "A text behind which a completion is cut, and counts as ended.")
    truncate_after: int = option(0, "Tokens behind which truncate_text is looked for.")
    skip_equal_scores: bool = option(
        False, "Learn nothing from prompts whose completions all score the same (num_generations from 2)."
    )
    temperature: float = option(0.7, "Sampling temperature; log-probabilities are at it.")
    stop_token: str | None = option(
        "eos", "'eos' ends a completion at the tokenizer's EOS; None runs to response_length."
    )
    stop_token_id: int | None = option(None, "Another id that ends a completion.")
    score_centering: str = option(
        "stored",
        "Mean to subtract: 'stored' with a reward model, 'running' over all scores so far, 'prompt' over the prompt's "
        "other completions (num_generations from 2), or 'none'.",
    )
    score_scaling: str = option(
        "stored", "Deviation divided by: 'stored' with a reward model, 'running' over all scores, or 'none'."
    )
    score_clip: float | None = option(None, "Clip scores to ± this, after centering and scaling, before any penalty.")
    missing_eos_penalty: float | None = option(None, "Subtracted from the score of a completion that did not end.")
    missing_eos_score: float | None = option(
        None, "Replaces the score of a completion that did not end (-1 in the N+ paper)."
    )
    reward_label: str | None = option(
        None, "Which output of a reward model of several labels is the score, by its name."
    )
    reward_output: str = option("logit", "What of this output: its 'logit', or its 'logprob' among the labels.")
    reward_pad_token: str | None = option(
        None, "The PAD of a reward model whose tokenizer has none apart from EOS: one of its tokens."
    )
    reward_ensemble: str | None = option(
        None, "How several reward models make one score: 'worst', 'mean' or 'mean_minus_variance'."
    )
    reward_ensemble_lambda: float | None = option(
        None, "λ of mean_minus_variance, the weight of the models' variance; None is 0.5."
    )
    reward_weights: list[float] | None = field(default=None, metadata={"help": "One weight a reward; None is all 1."})
    reward_timeout: float | None = option(
        None, "Seconds that a reward function may take for a batch of completions; None waits forever."
    )
    kl_coef: float = option(0.05, "β, the weight of the KL penalty.")
    reference: bool | None = option(
        None, "Hold the policy that KL is measured against; None does unless kl_coef is 0 and no key asks."
    )
    kl_in: str = option("reward", "Where the KL penalty goes: 'reward' (RLHF) or 'loss' (as in GRPO).")
    kl_estimator: str = option(
        "k1",
        "In the reward: k1 (unbiased), or k3 as TRL has it (its gradient is not that of the KL). In the "
        "loss: k2 or k3 (gradient of KL(π‖ref)), full (exact, over the vocabulary), k3_reverse (of KL(ref‖π), as "
        "GRPO).",
    )
    kl_target: float | None = option(None, "Adaptive β: the KL to hold, in nats per completion; None keeps β fixed.")
    kl_horizon: int = option(10_000, "Adaptive β: episodes over which it adapts.")
    action_level: str = option("token", "An action is a 'token', or the whole completion: 'sequence' (a bandit).")
    gamma: float = option(1.0, "Discount.")
    lam: float = option(0.95, "λ of the advantage estimator: 0 is TD, 1 is Monte-Carlo.")
    whiten_rewards: bool = option(False, "Divide rewards by their deviation, mean kept.")
    whiten_advantages: bool = option(True, "Whiten advantages over the whole batch.")
    cliprange: float = option(0.2, "ε of the policy's ratio clip, for tokens.")
    cliprange_high: float | None = option(
        None, "Upper ε of the ratio clip (clip-higher, 0.28 in DAPO); None takes the lower."
    )
    cliprange_sequence: float = option(
        0.5, "ε where the action is a sequence: a product of 50 ratios leaves 0.2 at once."
    )
    dual_clip: float | None = option(
        None, "c > 1 bounds the loss of a bad action by c times its advantage; None is off."
    )
    cliprange_value: float | None = option(0.2, "ε_v of the value clip; None clips nothing.")
    vf_coef: float = option(0.1, "c_v, the weight of the value loss.")
    entropy_coef: float = option(0.0, "c_e, the weight of the entropy bonus.")
    ptx_coef: float = option(0.0, "γ_ptx, the weight of the PTX loss on ptx_dataset (InstructGPT: 27.8).")
    loss_aggregation: str = option(
        "token-mean",
        "How a minibatch's losses are averaged: token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-sum-norm.",
    )
    early_stop_kl: float | None = option(
        None, "Stop a rollout's epochs once its KL to the sampling policy passes 1.5 of it, nats a token."
    )
    critic: str = option(
        "auto", "Where the critic starts: 'reward' model, 'policy' copy, 'shared' (head on the policy)."
    )
    critic_warmup_updates: int = option(0, "First updates, in which only the critic learns.")
    critic_lora: bool = option(True, "With peft_config the critic trains an adapter as well.")
    merge_adapter: bool = option(False, "save_model and push_to_hub write a LoRA policy merged into its base.")
    ref_load_in_8bit: bool = option(False, "Hold the reference in 8 bit (needs bitsandbytes).")
    offload_frozen: bool = option(False, "Reference and reward models wait on the CPU while they do not run.")
    model_adapter_name: str | None = option(None, "The adapter of a PeftModel to train.")
    ref_adapter_name: str | None = option(
        None, "The adapter of a PeftModel that is the reference; None switches adapters off."
    )
    rollout_engine: str = option(
        "native", "What samples: 'native', 'transformers' (continuous batching) or 'vllm' (docs/engines.md)."
    )
    rollout_graphs: bool = option(True, "On a GPU the native engine decodes with CUDA graphs (docs/engines.md).")
    max_rollout_batch_tokens: int | None = option(
        None, "Most tokens, padding included, that sampling caches at a time; None: of all rows."
    )
    importance_sampling_cap: float | None = option(
        None, "Weight tokens by π/π_engine, at most this (2 to 3), where another engine samples; None: 1."
    )
    vllm_mode: str = option("colocate", "vLLM on the trainer's GPU ('colocate'), or a running 'server'.")
    vllm_server_base_url: str | None = option(None, "Where the vLLM server answers.")
    vllm_gpu_memory_utilization: float = option(0.3, "Share of the GPU's memory for a colocated vLLM.")
    vllm_enable_sleep_mode: bool = option(False, "A colocated vLLM gives its memory back while the policy learns.")
    vllm_enforce_eager: bool = option(
        False, "A colocated vLLM starts without compiled code and CUDA graphs: sooner ready, slower."
    )
    recompute_logprobs: bool = option(
        False, "Take log π_old, and V of a shared critic, from a forward pass instead of from the sampler."
    )
    local_rollout_forward_batch_size: int = option(64, "Rows a forward pass outside the update.")
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Tokens of a forward pass, padding included, rows alike in length; in the update instead of "
        "per_device_train_batch_size rows, elsewhere beside the rows. None: beside the rows 512 on a CPU and 2048 "
        "in bf16 there, the rows alone on a GPU.",
    )
    padding_free: bool = option(
        False, "Rows of a forward pass of policy, critic and reference lie end to end, without padding."
    )
    fsdp2: bool = option(False, "Shard policy, critic, reference and reward model over the processes (docs/scale.md).")
    log_completions: bool = option(False, "At each log line, show and save a table of completions with their scores.")
    num_completions_to_print: int = option(8, "Rows of a table of completions.")
    num_sample_generations: int = option(0, "How often in a run generate_completions() shows held-out samples.")

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_kl(self)
        _check_reference(self)
        _check_engine(self)
        if self.bf16 is None:
            self.bf16 = not self.use_cpu and has_bfloat16()
        super().__post_init__()
        self.mixed_precision = "bf16" if self.bf16 else "no"  # has priority over ACCELERATE_MIXED_PRECISION
        if self.episodes_per_update % self.num_mini_batches:
            raise ZooError(
                f"num_mini_batches {self.num_mini_batches} does not divide the rollout of {self.episodes_per_update} "
                "completions (per_device_train_batch_size × gradient_accumulation_steps × num_generations): change one "
                "of them."
            )
        if self.fsdp2:
            check_shards(self.world_size, OptimizerNames(self.optim).value)
        if self.offload_frozen and self.device.type == "cpu":
            raise ZooError("offload_frozen keeps models on the CPU, and this run computes there: remove it.")
        if self.kl_target is not None and self.episodes_per_update > 5 * self.kl_horizon:
            raise ZooError(
                f"kl_horizon {self.kl_horizon} is less than a fifth of an update's {self.episodes_per_update} "
                "episodes, so β could become negative: raise kl_horizon."
            )
        if self.total_episodes is not None:
            updates = -(-self.total_episodes // self.episodes_per_update)
            if self.max_steps not in (-1, updates):
                raise ZooError(
                    f"total_episodes {self.total_episodes} makes {updates} updates and max_steps is {self.max_steps}: "
                    "remove one of them."
                )
            self.max_steps = updates

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase, policy: Any) -> list[int]:
        """Returns the tokens that end a completion; none if all completions have response_length tokens.

        Args:
            tokenizer: The policy's.
            policy: The policy.
        """
        return stop_ids(policy, tokenizer) if self.own_stops is None else self.own_stops

    @property
    def own_stops(self) -> list[int] | None:
        """The end tokens that the settings name, possibly none; None if the policy's own end tokens apply."""
        if self.stop_token_id is not None:
            return [self.stop_token_id]
        return None if self.stop_token == "eos" else []

    @property
    def truncation(self) -> Truncation:
        """How completions are cut after sampling."""
        return Truncation(self.response_length, self.response_length_min, self.truncate_text, self.truncate_after)

    @property
    def prompts_per_update(self) -> int:
        """Prompts of one update in one process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def max_tokens_per_pass(self) -> int | None:
        """The most tokens of a forward pass, padding included; None if only the number of rows is limited."""
        return self.max_tokens_per_micro_batch or default_batch_tokens(
            cpu=self.device.type == "cpu", bf16=bool(self.bf16)
        )

    @property
    def episodes_per_update(self) -> int:
        """Completions of one update in all processes."""
        return self.prompts_per_update * self.num_generations * self.world_size


def _check_ranges(args: Any) -> None:
    for entry in fields(args):
        check_limits(entry.name, getattr(args, entry.name, None))
    for name, choices in ONE_OF.items():
        if getattr(args, name) not in choices:
            raise ZooError(
                f"{name} is {getattr(args, name)!r}: choose one of {', '.join(map(repr, filter(None, choices)))}."
            )
    if args.stop_token not in ("eos", None):
        raise ZooError(f"stop_token is {args.stop_token!r}: set it to 'eos', or set stop_token_id instead.")
    if args.fp16:
        raise ZooError(
            "fp16 scales gradients for one optimizer step per update, and PPO makes several: use bf16 instead."
        )
    for name, neutral in {"label_smoothing_factor": 0, "neftune_noise_alpha": None}.items():
        if getattr(args, name) != neutral:
            raise ZooError(f"{name} is {getattr(args, name)}, which has no meaning in PPO: remove it.")
    _check_completions(args)
    if args.reward_label is None and args.reward_output != "logit":
        raise ZooError(f"reward_output is {args.reward_output!r}, which needs a label: set reward_label.")
    if args.reward_ensemble_lambda is not None and args.reward_ensemble != "mean_minus_variance":
        raise ZooError(
            f"reward_ensemble_lambda is {args.reward_ensemble_lambda}, and reward_ensemble {args.reward_ensemble!r}: "
            "only 'mean_minus_variance' has a λ; use that or remove the key."
        )
    if args.missing_eos_penalty is not None and args.missing_eos_score is not None:
        raise ZooError("missing_eos_penalty subtracts and missing_eos_score replaces: set only one of them.")


def _check_completions(args: Any) -> None:
    if args.response_length_min is not None and args.response_length_min > args.response_length:
        raise ZooError(
            f"response_length_min is {args.response_length_min} and response_length {args.response_length}: it must "
            "not be larger."
        )
    if args.truncate_text == "":
        raise ZooError("truncate_text is empty: set a text, or remove the key.")
    if args.truncate_text is None and args.truncate_after:
        raise ZooError(f"truncate_after is {args.truncate_after}, and nothing is cut there: set truncate_text too.")
    if args.truncate_after >= args.response_length:
        raise ZooError(
            f"truncate_after is {args.truncate_after} and response_length {args.response_length}, so nothing would be "
            "cut: lower truncate_after."
        )
    if args.skip_equal_scores and args.num_generations < 2:
        raise ZooError(
            "skip_equal_scores compares the completions of a prompt, but num_generations is 1: set it to at least 2."
        )
    if args.score_centering == "prompt" and args.num_generations < 2:
        raise ZooError(
            "score_centering 'prompt' compares the completions of a prompt, but num_generations is 1: set it to at "
            "least 2."
        )


def _check_engine(args: Any) -> None:
    engine = args.rollout_engine
    if engine == "native" and args.importance_sampling_cap is not None:
        raise ZooError(
            "importance_sampling_cap corrects for another engine, and rollout_engine is 'native', whose "
            "log-probabilities are the trainer's: remove it."
        )
    if engine != "native" and not args.rollout_graphs:
        raise ZooError(f"rollout_graphs is for the native engine, and rollout_engine is {engine!r}: remove it.")
    if engine == "transformers" and args.padding_free:
        raise ZooError(
            "padding_free needs its own attention, which rollout_engine 'transformers' does not have: remove it."
        )
    if engine == "vllm" and args.max_rollout_batch_tokens is not None:
        raise ZooError(
            "max_rollout_batch_tokens bounds the cache of the other engines: use vllm_gpu_memory_utilization for vLLM."
        )
    if engine != "native" and args.fsdp2:
        raise ZooError(f"rollout_engine {engine!r} does not support weights sharded by fsdp2: remove one of them.")
    declared = {entry.name: entry.default for entry in fields(args) if entry.name.startswith("vllm_")}
    changed = [name for name, default in declared.items() if getattr(args, name) != default]
    if changed and engine != "vllm":
        raise ZooError(f"{changed[0]} is for vLLM, and rollout_engine is {engine!r}: remove it, or use 'vllm'.")
    if (args.vllm_mode == "server") != (args.vllm_server_base_url is not None):
        raise ZooError(
            f"vllm_mode is {args.vllm_mode!r} and vllm_server_base_url {args.vllm_server_base_url!r}: set the URL for "
            "a server, and only for a server."
        )
    colocated_only = {"vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_enforce_eager"}.intersection(
        changed
    )
    if args.vllm_mode == "server" and colocated_only:
        raise ZooError(
            f"{min(colocated_only)} is for a colocated vLLM, and vllm_mode is 'server': set it on the server."
        )


def default_batch_tokens(*, cpu: bool, bf16: bool) -> int | None:
    """Returns the default number of tokens of a forward pass; None (no bound) on a GPU.

    Args:
        cpu: Whether the run computes on a CPU.
        bf16: Whether it computes in bfloat16.
    """
    return (CPU_BF16_TOKENS_PER_PASS if bf16 else CPU_TOKENS_PER_PASS) if cpu else None


def holds_reference(args: Any, *, has_ref_model: bool) -> bool:
    """Whether a run has a reference.

    Args:
        args: A PPOConfig, or the keys of one.
        has_ref_model: Whether the user passes a reference model.
    """
    if args.reference is not None:
        return bool(args.reference)
    needed = args.ref_load_in_8bit or args.ref_adapter_name or str(args.metric_for_best_model).endswith("objective/kl")
    penalized = args.kl_coef != 0 or args.kl_target is not None or args.kl_in == "loss"
    return bool(has_ref_model or needed or penalized)


def _check_reference(args: Any) -> None:
    conflicts = {
        "fsdp2, whose shards cannot be moved": args.fsdp2,
        "ref_load_in_8bit, whose weights cannot be moved": args.ref_load_in_8bit,
        "kl_estimator 'full', for which the reference runs in every micro-batch": args.kl_estimator == "full",
    }
    if args.offload_frozen and any(conflicts.values()):
        conflict = next(reason for reason, is_set in conflicts.items() if is_set)
        raise ZooError(f"offload_frozen cannot be combined with {conflict}: remove one of them.")
    if args.reference is not False:
        return
    if args.kl_coef != 0 or args.kl_target is not None:
        setting = f"kl_target is {args.kl_target}" if args.kl_target is not None else f"kl_coef is {args.kl_coef}"
        raise ZooError(
            f"reference is false, and {setting}, which needs a reference: set kl_coef to 0, or reference to true."
        )
    if args.kl_in == "loss":
        raise ZooError("reference is false, and kl_in 'loss' needs a reference: remove kl_in.")
    for key in ("ref_load_in_8bit", "ref_adapter_name"):
        if getattr(args, key):
            raise ZooError(f"reference is false, and {key} configures a reference: remove one of them.")
    if str(args.metric_for_best_model).endswith("objective/kl"):
        raise ZooError("reference is false, so metric_for_best_model cannot be objective/kl: choose another metric.")


def _check_kl(args: Any) -> None:
    estimators = KL_IN_REWARD if args.kl_in == "reward" else KL_IN_LOSS
    if args.kl_estimator not in estimators:
        why = NO_KL_ESTIMATOR.get((args.kl_in, args.kl_estimator), "there is no such estimator")
        raise ZooError(
            f"kl_estimator {args.kl_estimator!r} does not work in the {args.kl_in}, because {why}: use "
            f"{' or '.join(map(repr, estimators))}, or change kl_in."
        )
