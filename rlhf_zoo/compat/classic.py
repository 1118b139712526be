"""The step-wise loop of TRL 0.x (its tutorials): generate, score yourself, step.

    config = PPOConfig(init_kl_coef=0.2, target=6.0, batch_size=16)
    trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collator)
    for batch in trainer.dataloader:
        responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=20, do_sample=True)
        stats = trainer.step(batch["input_ids"], responses, rewards)
        trainer.log_stats(stats, batch, rewards)

The names are TRL's; the update is `rlhf_zoo.PPOTrainer.step`. docs/from-trl.md lists what is different on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, set_seed
from trl import create_reference_model

from ..errors import ZooError
from ..ppo.config import PPOConfig as ZooPPOConfig
from ..ppo.trainer import PPOTrainer as ZooPPOTrainer
from ..value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "create_reference_model",
    "set_seed",
]


class LengthSampler:
    """Draws a whole number from [min_value, max_value) at each call."""

    def __init__(self, min_value: int, max_value: int) -> None:
        if not 0 <= min_value < max_value:
            raise ZooError(f"LengthSampler got {min_value} and {max_value}: the second must be the larger.")
        self.values = range(min_value, max_value)

    def __call__(self) -> int:
        return random.choice(self.values)


@dataclass(frozen=True)
class PPOConfig:
    """TRL 0.x's fields, with its defaults.

    A `step` takes `batch_size` completions and makes `ppo_epochs` passes over them, an optimizer step for every
    `mini_batch_size × gradient_accumulation_steps` of them. target and horizon: of the adaptive KL controller, in nats
    per completion and in completions. `model_name`, `steps`, `task_name` and `query_dataset` are for the script to use.
    """

    model_name: str | None = None
    task_name: str | None = None
    query_dataset: str | None = None
    steps: int = 20000
    learning_rate: float = 1.41e-5
    adap_kl_ctrl: bool = True
    init_kl_coef: float = 0.2
    kl_penalty: str = "kl"
    target: float = 6.0
    horizon: int = 10000
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    batch_size: int = 128
    mini_batch_size: int = 128
    gradient_accumulation_steps: int = 1
    ppo_epochs: int = 4
    max_grad_norm: float | None = None
    early_stopping: bool = False
    target_kl: float = 1.0
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None
    whiten_rewards: bool = False
    seed: int = 0
    log_with: str | None = None
    project_kwargs: Mapping[str, Any] | None = None
    output_dir: str = "ppo"

    def modern(self) -> ZooPPOConfig:
        """The same settings for `rlhf_zoo.PPOTrainer`. Raises ZooError for those that cannot be right there."""
        if self.kl_penalty != "kl":
            raise ZooError(
                f"kl_penalty is {self.kl_penalty!r}: its gradient through the reward is that of no KL; give 'kl'."
            )
        step = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % step:
            raise ZooError(
                f"batch_size {self.batch_size} is no multiple of mini_batch_size × gradient_accumulation_steps, {step}:"
                " change one of them."
            )
        return ZooPPOConfig(
            output_dir=(self.project_kwargs or {}).get("logging_dir", self.output_dir),
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=self.mini_batch_size,
            gradient_accumulation_steps=self.batch_size // self.mini_batch_size,
            num_mini_batches=self.batch_size // step,
            num_ppo_epochs=self.ppo_epochs,
            kl_coef=self.init_kl_coef,
            kl_target=self.target if self.adap_kl_ctrl else None,
            kl_horizon=self.horizon,
            gamma=self.gamma,
            lam=self.lam,
            cliprange=self.cliprange,
            cliprange_value=self.cliprange_value,
            vf_coef=self.vf_coef,
            max_grad_norm=self.max_grad_norm or 0.0,
            early_stop_kl=self.target_kl if self.early_stopping else None,
            score_scaling="running" if self.use_score_scaling else "none",
            score_centering="running" if self.use_score_scaling and self.use_score_norm else "none",
            score_clip=self.score_clip,
            whiten_rewards=self.whiten_rewards,
            temperature=1.0,
            seed=self.seed,
            report_to=[self.log_with] if self.log_with else [],
        )


class _Loop(ZooPPOTrainer):
    """Completions come with their lengths, so PAD may be EOS, as the tutorials have it."""

    pad_apart = False


class PPOTrainer:
    """TRL 0.x's trainer: `generate`, `step`, `log_stats`, and the model with its value head as it was given."""

    def __init__(
        self,
        config: PPOConfig,
        model: AutoModelForCausalLMWithValueHead,
        ref_model: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Any = None,
    ) -> None:
        """dataset: what `dataloader` gives in shuffled batches of batch_size. num_shared_layers: None copies them all.

        Raises ZooError for a model without a value head, an encoder-decoder, and a missing tokenizer.
        """
        if isinstance(model, AutoModelForSeq2SeqLMWithValueHead):
            raise ZooError("PPO rolls out decoder-only models: one with an encoder cannot be trained here.")
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise ZooError(
                f"The model is a {type(model).__name__}, without a value head: wrap it by "
                "AutoModelForCausalLMWithValueHead.from_pretrained."
            )
        if tokenizer is None:
            raise ZooError("The trainer has no tokenizer: give the model's.")
        if ref_model is None and num_shared_layers is not None:
            ref_model = create_reference_model(model.pretrained_model, num_shared_layers=num_shared_layers)
        set_seed(config.seed)
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self._trainer = _Loop(
            args=config.modern(),
            processing_class=tokenizer,
            model=model,
            ref_model=ref_model,
            optimizers=(optimizer, lr_scheduler),
        )
        self.dataset = dataset
        self.dataloader = None
        if dataset is not None:
            shuffled = torch.Generator().manual_seed(config.seed)
            loader: Any = DataLoader(
                dataset,
                batch_size=config.batch_size,
                collate_fn=data_collator,
                shuffle=True,
                drop_last=True,
                generator=shuffled,
            )
            self.dataloader = loader

    @property
    def accelerator(self) -> Any:
        return self._trainer.accelerator

    @property
    def current_device(self) -> torch.device:
        return self._trainer.args.device

    @property
    def ref_model(self) -> Any:
        return self._trainer.reference.own

    @torch.no_grad()
    def generate(
        self,
        query_tensor: Tensor | Sequence[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        **generation_kwargs: Any,
    ) -> Any:
        """`model.generate` over one query, a 1-D tensor, or over a list of them, `batch_size` at a time.

        Returns (1, L) for one query; for a list, a list of 1-D tensors without padding, with their prompts unless
        `return_prompt` is False. A response holds its end-of-sequence token.
        """
        single = isinstance(query_tensor, Tensor)
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        found: list[Tensor] = []
        for start in range(0, len(queries), batch_size):
            if length_sampler is not None:
                generation_kwargs["max_new_tokens"] = length_sampler()
            found += self._generated(queries[start : start + batch_size], return_prompt, generation_kwargs)
        return found[0].unsqueeze(0) if single else found

    def _generated(self, queries: list[Tensor], return_prompt: bool, kwargs: Mapping[str, Any]) -> list[Tensor]:
        width = max(len(query) for query in queries)
        fill, device = self._trainer.fill_id, self.current_device
        ids = torch.stack([torch.cat([q.new_full((width - len(q),), fill), q]) for q in queries]).to(device)
        mask = torch.stack([torch.arange(width) >= width - len(q) for q in queries]).long().to(device)
        was_training = self.model.training
        self.model.eval()
        out = self.model.generate(input_ids=ids, attention_mask=mask, **{"pad_token_id": fill, **kwargs})
        self.model.train(was_training)
        eos = kwargs.get("eos_token_id", self.tokenizer.eos_token_id)
        ends = torch.tensor(eos if isinstance(eos, (list, tuple)) else [-1 if eos is None else eos], device=device)
        found = []
        for query, row in zip(queries, out[:, width:], strict=True):
            end = torch.isin(row, ends).nonzero()
            response = row[: int(end[0]) + 1] if len(end) else row
            found.append(torch.cat([query.to(device), response]) if return_prompt else response)
        return found

    def step(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Sequence[Any], response_masks: Any = None
    ) -> dict[str, float]:
        """One PPO update over `batch_size` completions. Returns TRL 0.x's statistics by their names."""
        if response_masks is not None:
            raise ZooError("response_masks is not supported: every token of a response was the policy's choice.")
        if len(queries) != self.config.batch_size:
            raise ZooError(f"step() got {len(queries)} queries and batch_size is {self.config.batch_size}.")
        beta = self._trainer.controller.kl_coef
        seen = self._trainer.step(queries, responses, scores)
        numbers = torch.tensor([float(score) for score in scores])
        lengths = [torch.tensor([float(len(ids)) for ids in each]) for each in (queries, responses)]
        return {
            "objective/kl": seen["objective/kl"],
            "objective/kl_coef": beta,
            "objective/entropy": seen["objective/entropy"] * seen["completions/length"],
            "ppo/mean_non_score_reward": seen["objective/non_score_reward"] / seen["completions/length"],
            "ppo/mean_scores": float(numbers.mean()),
            "ppo/std_scores": float(numbers.std()) if len(numbers) > 1 else 0.0,
            "ppo/loss/policy": seen["loss/policy"],
            "ppo/loss/value": seen["loss/value"],
            "ppo/loss/total": seen["loss"],
            "ppo/policy/entropy": seen["objective/entropy"],
            "ppo/policy/approxkl": seen["policy/approxkl"],
            "ppo/policy/clipfrac": seen["policy/clipfrac"],
            "ppo/val/clipfrac": seen["value/clipfrac"],
            "ppo/val/mean": seen["critic/value"],
            "ppo/returns/mean": seen["critic/return"],
            "ppo/val/var_explained": seen.get("critic/explained_variance", float("nan")),
            "ppo/learning_rate": self._trainer.get_learning_rates()[0],
            "tokens/queries_len_mean": float(lengths[0].mean()),
            "tokens/responses_len_mean": float(lengths[1].mean()),
        }

    def log_stats(
        self, stats: Mapping[str, float], batch: Mapping[str, Any], rewards: Sequence[Any], columns_to_log: Any = None
    ) -> None:
        """Sends the statistics of a step, with `env/reward_mean` and `env/reward_std`, to what `log_with` names."""
        numbers = torch.tensor([float(reward) for reward in rewards])
        more = {"env/reward_mean": float(numbers.mean()), "env/reward_std": float(numbers.std(correction=0))}
        self._trainer.log({**stats, **more})

    @property
    def log_history(self) -> list[dict[str, float]]:
        """What `log_stats` sent so far, by step."""
        return self._trainer.state.log_history

    def save_pretrained(self, directory: str | Path) -> None:
        """Model with value head, and tokenizer."""
        self.model.save_pretrained(str(directory))
        self.tokenizer.save_pretrained(str(directory))

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> None:
        """Model with value head, and tokenizer."""
        self.model.push_to_hub(repo_id, **kwargs)
        self.tokenizer.push_to_hub(repo_id, **kwargs)
