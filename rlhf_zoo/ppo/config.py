"""PPOConfig: TrainingArguments plus what PPO adds, under the names that TRL 1.12's PPOConfig gave them."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..errors import ZooError

__all__ = ["PPOConfig"]


@dataclass
class PPOConfig(TrainingArguments):
    """Configuration of `PPOTrainer`.

    A step is one PPO update. A process rolls out `per_device_train_batch_size × gradient_accumulation_steps`
    completions an update and runs the models over `per_device_train_batch_size` of them at a time. Raises ZooError for
    values that cannot be right.
    """

    learning_rate: float = field(default=3e-6, metadata={"help": "Learning rate of the policy (TRL's default)."})
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the critic; None takes the policy's."}
    )
    logging_steps: float = field(default=1, metadata={"help": "Log every so many updates."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Drop the columns that the model's forward does not name; keep it False."}
    )
    total_episodes: int | None = field(
        default=None, metadata={"help": "Completions to sample in all; sets max_steps, rounded up to whole updates."}
    )
    num_ppo_epochs: int = field(default=4, metadata={"help": "Passes over each rollout."})
    num_mini_batches: int = field(default=1, metadata={"help": "Optimizer steps a pass."})
    response_length: int = field(default=53, metadata={"help": "Most tokens of a completion."})
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature; log-probabilities are at it."})
    stop_token: str | None = field(
        default="eos",
        metadata={"help": "'eos' ends a completion at the tokenizer's EOS; None runs to response_length."},
    )
    stop_token_id: int | None = field(default=None, metadata={"help": "Another id that ends a completion."})
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score of a completion that did not end."}
    )
    score_clip: float | None = field(default=None, metadata={"help": "Clip scores to ± this before any penalty."})
    reward_weights: list[float] | None = field(default=None, metadata={"help": "One weight a reward; None is all 1."})
    kl_coef: float = field(default=0.05, metadata={"help": "β, the weight of the KL penalty in the reward."})
    kl_estimator: str = field(
        default="k1", metadata={"help": "k1 (unbiased), or k3 as TRL has it (its gradient is not that of the KL)."}
    )
    kl_target: float | None = field(
        default=None, metadata={"help": "Adaptive β: the KL to hold, in nats per completion; None keeps β fixed."}
    )
    kl_horizon: int = field(default=10_000, metadata={"help": "Adaptive β: episodes over which it adapts."})
    gamma: float = field(default=1.0, metadata={"help": "Discount."})
    lam: float = field(default=0.95, metadata={"help": "λ of the advantage estimator: 0 is TD, 1 is Monte-Carlo."})
    whiten_rewards: bool = field(default=False, metadata={"help": "Divide rewards by their deviation, mean kept."})
    whiten_advantages: bool = field(default=True, metadata={"help": "Whiten advantages over the whole batch."})
    cliprange: float = field(default=0.2, metadata={"help": "ε of the policy's ratio clip."})
    cliprange_value: float | None = field(default=0.2, metadata={"help": "ε_v of the value clip; None clips nothing."})
    vf_coef: float = field(default=0.1, metadata={"help": "c_v, the weight of the value loss."})
    recompute_logprobs: bool = field(
        default=False, metadata={"help": "Take log π_old from a forward pass instead of from the sampler."}
    )
    local_rollout_forward_batch_size: int = field(
        default=64, metadata={"help": "Rows a forward pass outside the update."}
    )

    def __post_init__(self) -> None:
        for name, low in (
            ("num_ppo_epochs", 1),
            ("num_mini_batches", 1),
            ("response_length", 1),
            ("kl_horizon", 1),
            ("local_rollout_forward_batch_size", 1),
            ("total_episodes", 1),
            ("per_device_train_batch_size", 1),
            ("gradient_accumulation_steps", 1),
            ("vf_coef", 0),
        ):
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise ZooError(f"{name} is {getattr(self, name)}: give at least {low}.")
        for name in ("cliprange", "cliprange_value", "score_clip"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ZooError(f"{name} is {getattr(self, name)}: give a positive number.")
        if self.fp16:
            raise ZooError(
                "fp16 scales gradients for one optimizer step an update, and PPO makes several: give bf16 instead."
            )
        if self.temperature <= 0:
            raise ZooError(f"temperature is {self.temperature}: PPO samples, so give a positive one.")
        if self.kl_estimator not in ("k1", "k3"):
            raise ZooError(f"kl_estimator is {self.kl_estimator!r}: give 'k1' or 'k3'.")
        if self.kl_coef < 0:
            raise ZooError(f"kl_coef is {self.kl_coef}: a negative β would pay the policy for leaving its reference.")
        if self.kl_target is not None and self.kl_target <= 0:
            raise ZooError(f"kl_target is {self.kl_target}: give a positive number of nats per completion.")
        if not 0 < self.gamma <= 1 or not 0 <= self.lam <= 1:
            raise ZooError(f"gamma {self.gamma} and lam {self.lam} must lie in (0, 1] and [0, 1].")
        if self.stop_token not in ("eos", None):
            raise ZooError(f"stop_token is {self.stop_token!r}: give 'eos', or leave it out and give stop_token_id.")
        local = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if local % self.num_mini_batches:
            raise ZooError(
                f"num_mini_batches {self.num_mini_batches} does not divide the rollout of {local} completions "
                "(per_device_train_batch_size × gradient_accumulation_steps): change one of them."
            )
        super().__post_init__()
        if self.kl_target is not None and local * self.world_size > 5 * self.kl_horizon:
            raise ZooError(
                f"kl_horizon {self.kl_horizon} is below a fifth of an update's {local * self.world_size} episodes, so "
                "β could turn negative: raise kl_horizon."
            )
        if self.total_episodes is not None:
            updates = -(-self.total_episodes // (local * self.world_size))
            if self.max_steps not in (-1, updates):
                raise ZooError(
                    f"total_episodes {self.total_episodes} makes {updates} updates and max_steps is {self.max_steps}: "
                    "give one of them."
                )
            self.max_steps = updates
