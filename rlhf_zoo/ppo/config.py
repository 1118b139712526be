"""PPOConfig: TrainingArguments plus PPO's settings, named as in TRL 1.12's PPOConfig."""

from dataclasses import dataclass, field, fields
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.training_args import OptimizerNames

from ..errors import ZooError
from ..fields import option
from ..modeling.devices import has_bfloat16
from ..modeling.distributed import check_can_shard
from ..modeling.sampling.truncation import Truncation
from ..modeling.special_tokens import stop_ids
from .key_checks import check_keys, check_update, default_tokens_per_pass


@dataclass
class PPOConfig(TrainingArguments):
    """Configuration of `PPOTrainer`.

    A step is one PPO update. In each update a process reads `per_device_train_batch_size × gradient_accumulation_steps`
    prompts and samples `num_generations` completions for each. It learns from micro-batches of at most
    `per_device_train_batch_size` completions, unless `max_tokens_per_micro_batch` is set.

    Raises:
        ZooError: A value is out of range, or keys contradict each other.
    """

    learning_rate: float = option(3e-6, "Learning rate of the policy (TRL's default).")
    critic_learning_rate: float | None = option(None, "Learning rate of the critic; None: the policy's.")
    logging_steps: float = option(1, "Updates per log line.")
    remove_unused_columns: bool = option(False, "Drop columns that the model's forward does not take; keep it False.")
    dataset_num_proc: int | None = option(None, "Processes that tokenize the prompts.")
    bf16: bool | None = option(  # type: ignore[assignment]  # as in trl, whose configurations accept None too
        False, "Compute in bfloat16 with float32 weights; None: do so if the machine's GPU supports it."
    )
    total_episodes: int | None = option(
        None, "Total number of completions to sample; sets max_steps, rounded up to whole updates."
    )
    num_ppo_epochs: int = option(4, "Passes over each rollout.")
    num_mini_batches: int = option(1, "Optimizer steps per pass.")
    num_generations: int = option(1, "Completions per prompt.")
    response_length: int = option(53, "Maximum number of tokens in a completion.")
    response_length_min: int | None = option(
        None, "Draw each completion's maximum length from this to response_length; None: response_length for all."
    )
    truncate_text: str | None = option(None, "Text that ends a completion; what follows it is cut off.")
    truncate_after: int = option(0, "Look for truncate_text only after this many tokens.")
    skip_equal_scores: bool = option(
        False, "Skip prompts whose completions all have the same score. Needs num_generations of 2 or more."
    )
    temperature: float = option(0.7, "Sampling temperature; log-probabilities use it too.")
    stop_token: str | None = option(
        "eos", "'eos' ends a completion at the tokenizer's EOS; None runs to response_length."
    )
    stop_token_id: int | None = option(None, "Id of the token that ends a completion, instead of stop_token.")
    score_centering: str = option(
        "stored",
        "Mean to subtract: 'stored' (the one saved with the reward model), 'running' (of all scores so far), 'prompt' "
        "(of the prompt's other completions; needs num_generations of 2 or more), or 'none'.",
    )
    score_scaling: str = option(
        "stored",
        "Standard deviation to divide by: 'stored' (the one saved with the reward model), 'running' (of all scores so "
        "far), or 'none'.",
    )
    score_clip: float | None = option(None, "Clip scores to ± this, after centering and scaling but before penalties.")
    missing_eos_penalty: float | None = option(None, "Subtracted from the score of a completion that did not end.")
    missing_eos_score: float | None = option(
        None, "Replaces the score of a completion that did not end (-1 in arXiv:2403.17031)."
    )
    reward_label: str | None = option(None, "Label whose output is the score, for a reward model with several labels.")
    reward_output: str = option("logit", "The score of a label: its 'logit', or its 'logprob' over the labels.")
    reward_pad_token: str | None = option(
        None, "Token to use as PAD for a reward model whose tokenizer has no PAD, or pads with EOS."
    )
    reward_ensemble: str | None = option(
        None, "How to combine the scores of several reward models: 'worst', 'mean' or 'mean_minus_variance'."
    )
    reward_ensemble_lambda: float | None = option(
        None, "λ of mean_minus_variance, the weight of the variance between models; None: 0.5."
    )
    reward_weights: list[float] | None = field(default=None, metadata={"help": "One weight per reward; None: all 1."})
    reward_timeout: float | None = option(
        None, "Seconds that a reward function may take for a batch of completions; None waits forever."
    )
    kl_coef: float = option(0.05, "β, the weight of the KL penalty.")
    reference: bool | None = option(
        None, "Keep a reference policy for KL; None: keep one unless kl_coef is 0 and no other key needs it."
    )
    kl_in: str = option("reward", "Where the KL penalty goes: 'reward' (RLHF) or 'loss' (as in GRPO).")
    kl_estimator: str = option(
        "k1",
        "In the reward: k1 (unbiased), or k3 as in TRL (its gradient is not that of the KL). In the loss: k2 or k3 "
        "(gradient of KL(π‖ref)), full (exact, over the vocabulary), k3_reverse (gradient of KL(ref‖π), as in GRPO).",
    )
    kl_target: float | None = option(None, "Adaptive β: the KL to hold, in nats per completion; None keeps β fixed.")
    kl_horizon: int = option(10_000, "Adaptive β: episodes over which it adapts.")
    action_level: str = option("token", "What an action is: a 'token', or the whole completion, 'sequence' (a bandit).")
    gamma: float = option(1.0, "Discount.")
    lam: float = option(0.95, "λ of the advantage estimator: 0 is TD, 1 is Monte-Carlo.")
    whiten_rewards: bool = option(False, "Divide rewards by their standard deviation, without changing their mean.")
    whiten_advantages: bool = option(True, "Whiten advantages over the whole batch.")
    cliprange: float = option(0.2, "ε of the policy's ratio clip if the action is a token.")
    cliprange_high: float | None = option(
        None, "Upper ε of the ratio clip (clip-higher, 0.28 in DAPO); None: the same as the lower ε."
    )
    cliprange_sequence: float = option(
        0.5, "ε if the action is a sequence: a product of 50 ratios soon differs from 1 by more than 0.2."
    )
    dual_clip: float | None = option(
        None, "c > 1 bounds the loss of an action with a negative advantage by c·|advantage|; None: no bound."
    )
    cliprange_value: float | None = option(0.2, "ε_v of the value clip; None: no clipping.")
    vf_coef: float = option(0.1, "c_v, the weight of the value loss.")
    entropy_coef: float = option(0.0, "c_e, the weight of the entropy bonus.")
    ptx_coef: float = option(0.0, "γ_ptx, the weight of the PTX loss on ptx_dataset (InstructGPT: 27.8).")
    loss_aggregation: str = option(
        "token-mean",
        "How a minibatch's losses are averaged: token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-sum-norm.",
    )
    early_stop_kl: float | None = option(
        None, "Stop an update's epochs once KL to the sampling policy exceeds 1.5 times this, in nats per token."
    )
    critic: str = option(
        "auto",
        "What the critic starts from: 'reward' (the reward model), 'policy' (a copy), 'shared' (a head on the policy's "
        "trunk), or 'auto' (the reward model if it reads the policy's tokens, otherwise a copy of the policy).",
    )
    critic_warmup_updates: int = option(0, "Number of initial updates in which only the critic is trained.")
    critic_lora: bool = option(True, "With peft_config, train an adapter for the critic too.")
    merge_adapter: bool = option(False, "save_model and push_to_hub write a LoRA policy merged into its base.")
    ref_load_in_8bit: bool = option(False, "Load the reference in 8 bit (needs bitsandbytes).")
    offload_frozen: bool = option(False, "Keep reference and reward models on the CPU while they are not used.")
    model_adapter_name: str | None = option(None, "The name of the adapter to train, if the model is a PeftModel.")
    ref_adapter_name: str | None = option(
        None, "The adapter of a PeftModel that makes it the reference; None: the PeftModel without adapters."
    )
    rollout_engine: str = option(
        "native",
        "What samples completions: 'native', 'transformers' (continuous batching) or 'vllm' (docs/engines.md).",
    )
    rollout_graphs: bool = option(True, "On a GPU, decode with CUDA graphs in the native engine (docs/engines.md).")
    max_rollout_batch_tokens: int | None = option(
        None, "Maximum number of tokens in the sampler's cache, padding included; None: no limit."
    )
    importance_sampling_cap: float | None = option(
        None, "If another engine samples, weight tokens by π/π_engine, capped at this (2 to 3); None: no weights."
    )
    vllm_mode: str = option("colocate", "Where vLLM runs: on the trainer's GPU ('colocate'), or as a 'server'.")
    vllm_server_base_url: str | None = option(None, "URL of the vLLM server.")
    vllm_gpu_memory_utilization: float = option(0.3, "Share of the GPU's memory for a colocated vLLM.")
    vllm_enable_sleep_mode: bool = option(False, "A colocated vLLM frees its memory while the policy learns.")
    vllm_enforce_eager: bool = option(
        False, "A colocated vLLM runs without compiled code and CUDA graphs: it starts sooner, but samples slower."
    )
    recompute_logprobs: bool = option(
        False, "Take log π_old, and V of a shared critic, from a forward pass instead of from the sampler."
    )
    local_rollout_forward_batch_size: int = option(64, "Rows per forward pass outside the update.")
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Maximum number of tokens in a forward pass over rows of similar length, padding included. In the update it "
        "replaces the limit on rows, per_device_train_batch_size; elsewhere both limits apply. None: on a CPU 512, or "
        "2048 in bf16, together with the limit on rows; on a GPU only the limit on rows.",
    )
    padding_free: bool = option(
        False, "Pack the rows of a forward pass of policy, critic and reference without padding."
    )
    fsdp2: bool = option(False, "Shard policy, critic, reference and reward model over the processes (docs/scale.md).")
    log_completions: bool = option(False, "At each log line, show and save a table of completions with their scores.")
    num_completions_to_print: int = option(8, "Rows in a table of completions.")
    num_sample_generations: int = option(0, "How many times per run generate_completions() shows held-out samples.")

    def __post_init__(self) -> None:
        check_keys(self, {entry.name: entry.default for entry in fields(self)})
        if self.bf16 is None:
            self.bf16 = not self.use_cpu and has_bfloat16()
        super().__post_init__()
        self.mixed_precision = "bf16" if self.bf16 else "no"  # has priority over ACCELERATE_MIXED_PRECISION
        check_update(self, self.episodes_per_update)
        if self.fsdp2:
            check_can_shard(self.world_size, OptimizerNames(self.optim).value)
        if self.offload_frozen and self.device.type == "cpu":
            raise ZooError("offload_frozen keeps models on the CPU, but this run computes there anyway: remove it.")
        if self.total_episodes is not None:
            updates = -(-self.total_episodes // self.episodes_per_update)
            if self.max_steps not in (-1, updates):
                raise ZooError(
                    f"total_episodes {self.total_episodes} makes {updates} updates, but max_steps is {self.max_steps}: "
                    "remove one of them."
                )
            self.max_steps = updates

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase, policy: Any) -> list[int]:
        """Returns the ids of the tokens that end a completion; [] if all completions have response_length tokens.

        Args:
            tokenizer: The policy's tokenizer.
            policy: The policy, whose generation config may name more end tokens.
        """
        return stop_ids(policy, tokenizer) if self.configured_stop_ids is None else self.configured_stop_ids

    @property
    def configured_stop_ids(self) -> list[int] | None:
        """The ids of the end tokens that the settings name, possibly []; None if the policy's own end tokens apply."""
        if self.stop_token_id is not None:
            return [self.stop_token_id]
        return None if self.stop_token == "eos" else []

    @property
    def truncation(self) -> Truncation:
        """How completions are cut after sampling."""
        return Truncation(self.response_length, self.response_length_min, self.truncate_text, self.truncate_after)

    @property
    def prompts_per_update(self) -> int:
        """Number of prompts in one update, summed over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def max_tokens_per_pass(self) -> int | None:
        """The maximum number of tokens in a forward pass, padding included; None if only rows are limited."""
        return self.max_tokens_per_micro_batch or default_tokens_per_pass(
            on_cpu=self.device.type == "cpu", bf16=bool(self.bf16)
        )

    @property
    def episodes_per_update(self) -> int:
        """Number of completions in one update, summed over all processes."""
        return self.prompts_per_update * self.num_generations
