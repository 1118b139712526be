"""TRL 0.x's PPOConfig, with its fields and defaults, and its conversion to ours."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ..config import PPOConfig as ZooPPOConfig
from ..guards import warn

#: Field of TRL that has no effect here -> the reason, or an alternative.
WITHOUT_EFFECT = {
    "tracker_kwargs": "configure the reporter by its environment variables, such as WANDB_PROJECT",
    "accelerator_kwargs": "accelerate is configured by `accelerate launch` and its environment variables",
    "compare_steps": "call push_to_hub() when you want to",
    "ratio_threshold": "the ratio is clipped, and early_stopping ends an update whose KL becomes too large",
    "optimize_device_cache": "emptying the device's cache between updates would free nothing",
    "optimize_cuda_cache": "emptying the device's cache between updates would free nothing",
}


# Not frozen, because scripts for TRL 0.x assign to the fields.
@dataclass
class ClassicPPOConfig:
    """TRL 0.x's fields, with the defaults of its last release, 0.11.

    A `step` takes `batch_size` completions and makes `ppo_epochs` passes over them, with an optimizer step for every
    `mini_batch_size × gradient_accumulation_steps` completions. The adaptive KL controller has its `target` in nats per
    completion and its `horizon` in completions. Some fields, such as `steps` and the names of models and data, are only
    for the script. Fields without effect here cause a warning.

    Raises:
        ZooError: A value is out of range or not supported.
    """

    exp_name: str | None = None
    seed: int = 0
    log_with: str | None = None
    task_name: str | None = None
    model_name: str | None = "gpt2"
    query_dataset: str | None = "stanfordnlp/imdb"
    reward_model: str | None = "sentiment-analysis:lvwerra/distilbert-imdb"
    remove_unused_columns: bool = True
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)
    project_kwargs: dict[str, Any] = field(default_factory=dict)
    tracker_project_name: str = "trl"
    push_to_hub_if_best_kwargs: dict[str, Any] = field(default_factory=dict)
    steps: int = 20000
    learning_rate: float = 1.41e-5
    adap_kl_ctrl: bool = True
    init_kl_coef: float = 0.2
    kl_penalty: str = "kl"
    target: float = 6.0
    horizon: float = 10000.0
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    batch_size: int = 128
    forward_batch_size: int | None = None
    mini_batch_size: int = 128
    gradient_accumulation_steps: int = 1
    ppo_epochs: int = 4
    max_grad_norm: float | None = None
    optimize_cuda_cache: bool | None = None
    optimize_device_cache: bool = False
    early_stopping: bool = False
    target_kl: float = 1.0
    compare_steps: int = 1
    ratio_threshold: float = 10.0
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None
    whiten_rewards: bool = False
    gradient_checkpointing: bool = False
    dataset_num_proc: int | None = None
    output_dir: str = "ppo"

    def __post_init__(self) -> None:
        # forward_batch_size is TRL's earlier, deprecated name of mini_batch_size.
        if self.forward_batch_size is not None:
            self.mini_batch_size = self.forward_batch_size
        self._check()
        for entry in dataclasses.fields(self):
            default = entry.default_factory() if callable(entry.default_factory) else entry.default
            if entry.name in WITHOUT_EFFECT and getattr(self, entry.name) not in (default, None):
                warn(f"{entry.name} has no effect here: {WITHOUT_EFFECT[entry.name]}.")

    def _check(self) -> None:
        if self.kl_penalty != "kl":
            raise ZooError(
                f"kl_penalty is {self.kl_penalty!r}, whose gradient through the reward is not that of a KL: use 'kl'."
            )
        if self.push_to_hub_if_best_kwargs:
            raise ZooError(
                "push_to_hub_if_best_kwargs is not supported, because the mean score of one batch does not show which "
                "model is best: call the trainer's push_to_hub()."
            )
        if self.batch_size % self.backward_batch_size:
            raise ZooError(
                f"batch_size {self.batch_size} is not a multiple of mini_batch_size × gradient_accumulation_steps, "
                f"{self.backward_batch_size}: change one of them."
            )

    @property
    def backward_batch_size(self) -> int:
        """Completions per optimizer step."""
        return self.mini_batch_size * self.gradient_accumulation_steps

    @property
    def total_ppo_epochs(self) -> int:
        """Updates that `steps` completions make."""
        return math.ceil(self.steps / self.batch_size)

    @property
    def logging_dir(self) -> Path:
        """The folder for a reporter that writes files."""
        return Path(self.project_kwargs.get("logging_dir") or self.output_dir) / self.tracker_project_name

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields by name. Entries of nested fields have paths as names: `project_kwargs/logging_dir`."""
        flat: dict[str, Any] = {}
        for name, value in vars(self).items():
            flat |= (
                {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
            )
        return flat

    def to_zoo_config(self) -> ZooPPOConfig:
        """Converts these settings to those of `rlhf_zoo.PPOTrainer`.

        Raises:
            ZooError: A value is out of range or not supported.
        """
        self._check()
        return ZooPPOConfig(
            output_dir=self.output_dir,
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=self.mini_batch_size,
            gradient_accumulation_steps=self.batch_size // self.mini_batch_size,
            num_mini_batches=self.batch_size // self.backward_batch_size,
            num_ppo_epochs=self.ppo_epochs,
            kl_coef=self.init_kl_coef,
            reference=True,
            kl_target=self.target if self.adap_kl_ctrl else None,
            kl_horizon=int(self.horizon),
            gamma=self.gamma,
            lam=self.lam,
            cliprange=self.cliprange,
            cliprange_value=self.cliprange_value,
            vf_coef=self.vf_coef,
            max_grad_norm=self.max_grad_norm or 0.0,  # 0 switches clipping off
            early_stop_kl=self.target_kl if self.early_stopping else None,
            # TRL reads use_score_norm only together with use_score_scaling.
            score_scaling="running" if self.use_score_scaling else "none",
            score_centering="running" if self.use_score_scaling and self.use_score_norm else "none",
            score_clip=self.score_clip,
            whiten_rewards=self.whiten_rewards,
            gradient_checkpointing=self.gradient_checkpointing or None,  # False would count as set
            temperature=1.0,
            seed=self.seed,
            report_to=[self.log_with] if self.log_with else [],
        )
