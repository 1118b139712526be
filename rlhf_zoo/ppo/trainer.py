"""PPO for language models on `transformers.Trainer`.

One update, read aloud: prompts → `rollout` (sample, log-probs, values, reference) → `estimate` (scores, KL, GAE) →
`update` (epochs × minibatches) → metrics. Every formula stands in `rlhf_zoo.functional`.

A step of this trainer is one update: `global_step`, `save_steps`, schedules and tags count updates. Trainer keeps the
loop, precision, callbacks, logging, saving and resuming; it calls `training_step` once for each batch of prompts, and
the update with its own optimizer steps happens in the last call of a step. Checkpoints fall between updates.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from .. import functional as F
from ..data import PROMPT_INDEX, PROMPT_TOKENS, prepare_prompts
from ..errors import ZooError
from ..models import ActorCritic, Reference, disable_dropout, load_causal, response_values
from ..rewards import RewardFunction, Scored
from ..sampling import Samples, sample, token_logprobs
from .assembly import build_critic, build_rewards, check_start, check_tokens
from .config import PPOConfig
from .control import kl_controller
from .rollout import Advantages, Rollout, length_sorted

__all__ = ["PPO_STATE", "PPOTrainer"]

PPO_STATE = "ppo_state.json"
TRAIN_STREAM, EVAL_STREAM = 0, 1


class PPOTrainer(Trainer):
    """Proximal policy optimization of a language model (arXiv:1707.06347, arXiv:1909.08593, arXiv:2403.17031)."""

    args: PPOConfig
    processing_class: PreTrainedTokenizerBase

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: PreTrainedModel | str,
        ref_model: PreTrainedModel | None = None,
        reward_model: PreTrainedModel | str | None = None,
        train_dataset: Dataset | None = None,
        value_model: PreTrainedModel | str | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        eval_dataset: Dataset | None = None,
        optimizers: tuple = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
        *,
        reward_funcs: Sequence[RewardFunction | PreTrainedModel | str] | RewardFunction | None = None,
        reward_processing_class: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """
        processing_class: the policy's tokenizer. model: the SFT policy, or its path or Hub id. ref_model: what KL is
        measured against; None takes a frozen copy of the policy, or the policy with its adapter off. reward_model and
        reward_funcs: what scores completions; functions are called as TRL's GRPO calls them. value_model: the critic;
        None starts it from the (first) reward model, or from the policy where no reward is a model. train_dataset,
        eval_dataset: prompts in a column `prompt` (text or conversation), or token ids in `input_ids`.

        Raises ZooError for what cannot train: no reward, no prompts, PAD missing or equal to EOS, a prompt past the
        context.
        """
        if args.load_best_model_at_end:
            raise ZooError(
                "load_best_model_at_end does not work with PPO: pull the best checkpoint by its tag instead."
            )
        policy = load_causal(model) if isinstance(model, str) else model
        check_tokens(processing_class, policy)
        if peft_config is not None:
            from peft import get_peft_model

            policy = get_peft_model(policy, peft_config)
        disable_dropout(policy)
        self.reference = Reference(policy, ref_model)
        self.rewards = build_rewards(
            reward_model, reward_funcs, args, processing_class, reward_processing_class or processing_class
        )
        critic = build_critic(value_model, self.rewards, policy)
        self.controller = kl_controller(kl_coef=args.kl_coef, kl_target=args.kl_target, kl_horizon=args.kl_horizon)
        self._from_reference = ref_model is None
        self._waiting: list[dict] = []
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._episodes = 0
        context = getattr(policy.config, "max_position_embeddings", None)
        train_dataset, eval_dataset = (
            None
            if data is None
            else prepare_prompts(data, processing_class, context=context, room=args.response_length)
            for data in (train_dataset, eval_dataset)
        )
        local = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if train_dataset is not None and len(train_dataset) < local * args.world_size:
            raise ZooError(
                f"The prompt data set has {len(train_dataset)} rows and an update takes {local * args.world_size}: "
                "give more prompts or a smaller batch."
            )
        super().__init__(
            model=ActorCritic(policy, critic),
            args=args,
            data_collator=data_collator or _rows,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.reference.to(self.accelerator.device)
        for reward in self.rewards.models:
            reward.to(self.accelerator.device)

    # The algorithm

    def training_step(self, model: nn.Module, inputs: list[dict], num_items_in_batch: Any = None) -> Tensor:
        """Waits for the prompts of a whole step, then makes one PPO update. Returns its loss."""
        self._waiting += inputs
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        rows, self._waiting = self._waiting, []
        rollout = self.rollout(rows, stream=TRAIN_STREAM)
        kl = self._mean(rollout.kl)
        if self._from_reference:
            check_start(kl)
            self._from_reference = False
        estimates = self.estimate(rollout, rows)
        progress = self.update(model, rollout, estimates)
        self._observe(rollout, estimates, progress)
        self.controller = self.controller.update(kl, len(rows) * self.args.world_size)
        return torch.tensor(self._metrics["loss"][-1], device=self.args.device)

    @torch.no_grad()
    def rollout(self, rows: Sequence[Mapping], *, stream: int) -> Rollout:
        """Samples one completion a prompt, with log π, log π_ref and V of its tokens.

        Each row's random stream is keyed by (stream, update, prompt index): nothing else decides what it samples.
        """
        args, actor = self.args, self._actor
        actor.eval()
        step = self.state.global_step if stream == TRAIN_STREAM else 0
        with self.accelerator.autocast():
            samples = sample(
                actor.policy,
                [row[PROMPT_TOKENS] for row in rows],
                keys=[(stream, step, row[PROMPT_INDEX], 0) for row in rows],
                seed=args.seed,
                max_new_tokens=args.response_length,
                stop_ids=self._stop_ids,
                pad_id=self.processing_class.pad_token_id,
                temperature=args.temperature,
            )
            size = args.local_rollout_forward_batch_size
            if args.recompute_logprobs:
                logprobs = token_logprobs(actor.policy, samples, temperature=args.temperature, batch_size=size)
                samples = Samples(**{**vars(samples), "logprobs": logprobs})
            with self.reference.model() as reference:
                ref_logprobs = token_logprobs(reference, samples, temperature=args.temperature, batch_size=size)
            values = torch.zeros_like(ref_logprobs)
            for start, chunk in zip(range(0, len(samples), size), samples.chunks(size), strict=True):
                width = chunk.mask.shape[1]
                values[start : start + len(chunk), :width] = response_values(actor.value_model, chunk)
        return Rollout(samples, ref_logprobs, values.masked_fill(~samples.mask, 0))

    def estimate(self, rollout: Rollout, rows: Sequence[Mapping]) -> Advantages:
        """Scores, rewards per token, advantages and returns of a rollout."""
        args, mask = self.args, rollout.mask
        scored = self._score(rollout.samples, rows)
        scores = F.shape_scores(scored.total, clip=args.score_clip)
        scores = F.missing_eos_penalty(scores, rollout.samples.ended, penalty=args.missing_eos_penalty)
        kl = F.kl_penalty(rollout.logprobs, rollout.ref_logprobs, estimator=args.kl_estimator).masked_fill(~mask, 0)
        rewards = F.token_rewards(scores, kl, mask, kl_coef=self.controller.kl_coef)
        non_score = -self.controller.kl_coef * kl.sum(1)
        if args.whiten_rewards:
            rewards = F.whiten(rewards, mask, self._moments(rewards, mask), shift_mean=False)
        advantages, returns = F.gae(rewards, rollout.values, mask, gamma=args.gamma, lam=args.lam)
        if args.whiten_advantages:
            advantages = F.whiten(advantages, mask, self._moments(advantages, mask))
        return Advantages(scored, scores, non_score, rewards, advantages, returns)

    def update(self, model: nn.Module, rollout: Rollout, estimates: Advantages) -> dict[str, Tensor]:
        """Epochs × minibatches over a rollout, an optimizer step each. Returns token means of what was seen."""
        args = self.args
        model.train()
        shuffle = torch.Generator().manual_seed(args.seed * 1_000_003 + self.state.global_step)
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=args.device))
        norms = defaultdict(list)
        for _ in range(args.num_ppo_epochs):
            order = torch.randperm(len(rollout.samples), generator=shuffle).to(rollout.mask.device)
            # The last batch of a pass over the prompts may hold fewer completions than there are minibatches.
            for minibatch in torch.tensor_split(order, min(args.num_mini_batches, len(order))):
                tokens = self.accelerator.reduce(rollout.mask[minibatch].sum(), "sum")
                for rows in length_sorted(minibatch, rollout.mask, args.per_device_train_batch_size):
                    with self.compute_loss_context_manager():
                        loss = self._loss(model, rollout, estimates, rows, tokens, sums)
                    # Gradients are averaged over processes, and the loss is a share of the global token mean.
                    self.accelerator.backward(loss * args.world_size)
                for name, norm in self._optimizer_step(model).items():
                    norms[name].append(norm)
        means = self._token_means(sums)
        return means | {f"grad_norm/{name}": torch.stack(seen).mean() for name, seen in norms.items()}

    def _loss(
        self,
        model: nn.Module,
        rollout: Rollout,
        estimates: Advantages,
        rows: Tensor,
        tokens: Tensor,
        sums: dict[str, Tensor],
    ) -> Tensor:
        """This micro-batch's share of the minibatch's loss, L_π + c_v·L_V; adds what it saw to `sums`."""
        args = self.args
        samples = rollout.samples.rows(rows)
        mask, width = samples.mask, samples.mask.shape[1]
        advantages, returns = estimates.advantages[rows, :width], estimates.returns[rows, :width]
        logits, values = model(samples, args.temperature)
        logprobs = F.selected_logprobs(logits, samples.completion_ids)
        policy_loss, clipped = F.clipped_policy_loss(logprobs, samples.logprobs, advantages, cliprange=args.cliprange)
        value_loss, value_clipped = F.clipped_value_loss(
            values, rollout.values[rows, :width], returns, cliprange=args.cliprange_value
        )
        loss = F.aggregate(policy_loss, mask, tokens=tokens)
        loss = loss + args.vf_coef * F.aggregate(value_loss, mask, tokens=tokens)
        with torch.no_grad():
            log_ratio = logprobs - samples.logprobs
            for name, seen in (
                ("loss/policy", policy_loss),
                ("loss/value", value_loss),
                ("policy/clipfrac", clipped),
                ("value/clipfrac", value_clipped),
                ("policy/approxkl", torch.expm1(log_ratio) - log_ratio),
                ("policy/ratio", log_ratio.exp()),
                ("objective/entropy", F.entropy(logits)),
                ("tokens", torch.ones_like(logprobs)),
            ):
                sums[name] += seen.double().masked_fill(~mask, 0).sum()
        return loss

    def _optimizer_step(self, model: nn.Module) -> dict[str, Tensor]:
        """Clips policy and critic apart (one joint norm lets a noisy critic shrink the policy's step), then steps."""
        actor, norms = self._actor, {}
        limit = self.args.max_grad_norm or math.inf
        for name, part in (("policy", actor.policy), ("critic", actor.value_model)):
            parameters = [p for p in part.parameters() if p.requires_grad]
            norms[name] = self.accelerator.clip_grad_norm_(parameters, limit).detach()
        assert self.optimizer is not None
        self.optimizer.step()
        model.zero_grad()
        return norms

    # Scores, statistics over processes, metrics

    @property
    def _actor(self) -> ActorCritic:
        return self.accelerator.unwrap_model(self.model)

    @property
    def policy(self) -> PreTrainedModel:
        """The policy being trained."""
        return self._actor.policy

    @property
    def value_model(self) -> PreTrainedModel:
        """The critic being trained."""
        return self._actor.value_model

    @property
    def _stop_ids(self) -> list[int]:
        if self.args.stop_token_id is not None:
            return [self.args.stop_token_id]
        return [self.processing_class.eos_token_id] if self.args.stop_token == "eos" else []

    def _score(self, samples: Samples, rows: Sequence[Mapping]) -> Scored:
        tokenizer = self.processing_class
        completions = tokenizer.batch_decode(samples.token_lists(), skip_special_tokens=True)
        prompts = tokenizer.batch_decode([row[PROMPT_TOKENS] for row in rows], skip_special_tokens=True)
        columns: dict[str, Any] = {
            name: [row[name] for row in rows]
            for name in rows[0]
            if name not in ("prompt", PROMPT_TOKENS, PROMPT_INDEX, "completion", "completion_ids")
        }
        given = [row.get("prompt", prompt) for row, prompt in zip(rows, prompts, strict=True)]
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        said: list[Any] = [
            [{"role": "assistant", "content": completion}] if isinstance(prompt, list) else completion
            for prompt, completion in zip(given, completions, strict=True)
        ]
        return self.rewards(samples, given, said, texts, {**columns, "trainer_state": self.state})

    def _moments(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.accelerator.reduce(F.masked_moments(x, mask), "sum")

    def _mean(self, x: Tensor) -> float:
        """Mean of x over its real entries (not NaN) and over all processes; NaN if there is none."""
        n, total, _ = self._moments(x, ~x.isnan()).tolist()
        return total / n if n else math.nan

    def _everywhere(self, x: Tensor) -> Tensor:
        """The rows of all processes, (B, T) -> (B·processes, T of the longest)."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(x, dim=1))

    def _token_means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = sorted(sums)
        totals = self.accelerator.reduce(torch.stack([sums[name] for name in names]), "sum")
        by_name = dict(zip(names, totals, strict=True))
        tokens = by_name.pop("tokens")
        return {name: (total / tokens).float() for name, total in by_name.items()}

    def _observe(self, rollout: Rollout, estimates: Advantages, progress: Mapping[str, Tensor]) -> None:
        """Adds this update's metrics to what the next log line averages."""
        self._episodes += len(rollout.samples) * self.args.world_size
        metrics = {
            "loss": float(progress["loss/policy"] + self.args.vf_coef * progress["loss/value"]),
            **{name: self._mean(each) for name, each in self._describe(rollout, estimates).items()},
            "objective/non_score_reward": self._mean(estimates.non_score),
            "objective/rlhf_reward": self._mean(estimates.non_score + estimates.scores),
            "critic/explained_variance": float(
                F.explained_variance(
                    self._everywhere(rollout.values),
                    self._everywhere(estimates.returns),
                    self._everywhere(rollout.mask.long()).bool(),
                )
            ),
            "critic/value": self._mean(rollout.values.masked_fill(~rollout.mask, math.nan)),
            "critic/return": self._mean(estimates.returns.masked_fill(~rollout.mask, math.nan)),
            "kl_coef": self.controller.kl_coef,
            **{name: float(value) for name, value in progress.items()},
        }
        for name, value in metrics.items():
            self._metrics[name].append(value)

    def _describe(self, rollout: Rollout, estimates: Advantages) -> dict[str, Tensor]:
        """What each completion is like, (B,), NaN where it does not apply; shared by training and evaluation."""
        each = estimates.scored.each
        return {
            "objective/score": estimates.scored.total,
            "objective/shaped_score": estimates.scores,
            **{f"rewards/{name}": each[:, i] for i, name in enumerate(self.rewards.names)},
            "objective/kl": rollout.kl,
            "completions/length": rollout.mask.sum(1).float(),
            "completions/eos_rate": rollout.samples.ended.float(),
        }

    # What transformers.Trainer calls

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """One optimizer, with groups of their own for policy and critic: each has its learning rate."""
        if self.optimizer is None:
            args, actor = self.args, self._actor
            critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
            groups = []
            for part, rate in ((actor.policy, args.learning_rate), (actor.value_model, critic_rate)):
                decayed = set(self.get_decay_parameter_names(part))
                for decay in (True, False):
                    chosen = [p for n, p in part.named_parameters() if p.requires_grad and (n in decayed) == decay]
                    if chosen:
                        weight_decay = args.weight_decay if decay else 0.0
                        groups.append({"params": chosen, "lr": rate, "weight_decay": weight_decay})
            kind, kwargs = self.get_optimizer_cls_and_kwargs(args)
            self.optimizer = kind(groups, **kwargs)
        return self.optimizer

    def evaluate(
        self, eval_dataset: Dataset | None = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Samples held-out prompts, the same random streams each time, and reports score, KL, length and EOS rate."""
        if eval_dataset is not None and PROMPT_INDEX not in eval_dataset.column_names:
            context = getattr(self.policy.config, "max_position_embeddings", None)
            eval_dataset = prepare_prompts(
                eval_dataset, self.processing_class, context=context, room=self.args.response_length
            )
        seen: dict[str, list[Tensor]] = defaultdict(list)
        for rows in self.get_eval_dataloader(eval_dataset):
            rollout = self.rollout(rows, stream=EVAL_STREAM)
            for name, each in self._describe(rollout, self.estimate(rollout, rows)).items():
                # Over all processes, without the rows that only fill up the last batch.
                seen[name].append(self.accelerator.gather_for_metrics(each))
        metrics = {f"{metric_key_prefix}_{name}": float(torch.cat(each).nanmean()) for name, each in seen.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means of PPO's metrics over the updates since the last log line."""
        if "loss" in logs and self._metrics:
            # Trainer's own norm is read after the update has cleared the gradients: always 0. Its own loss forgets, on
            # resuming, the updates since the last log line: ours replaces it.
            logs.pop("grad_norm", None)
            logs = logs | {name: sum(seen) / len(seen) for name, seen in self._metrics.items()}
            logs["episodes"] = self._episodes
            self._metrics.clear()
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The policy as a plain checkpoint, with tokenizer, `critic/` and the KL controller's state beside it."""
        directory = Path(output_dir or self.args.output_dir or ".")
        if self.args.should_save:
            directory.mkdir(parents=True, exist_ok=True)
            self._actor.save_pretrained(directory)
            self.processing_class.save_pretrained(directory)
            state = {"kl_coef": self.controller.kl_coef, "episodes": self._episodes, "unlogged": dict(self._metrics)}
            (directory / PPO_STATE).write_text(json.dumps(state) + "\n")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's card, made of the policy: the pair of policy and critic has no configuration to read."""
        pair, self.model = self.model, self.policy
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            self.model = pair

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        directory = Path(resume_from_checkpoint)
        self._actor.load_checkpoint(directory)
        if not (directory / PPO_STATE).is_file():
            raise ZooError(f"{directory} holds no {PPO_STATE}: it is no PPO checkpoint, so PPO cannot go on from it.")
        state = json.loads((directory / PPO_STATE).read_text())
        self.controller = kl_controller(
            kl_coef=state["kl_coef"], kl_target=self.args.kl_target, kl_horizon=self.args.kl_horizon
        )
        self._from_reference = False
        self._episodes = state["episodes"]
        self._metrics = defaultdict(list, state["unlogged"])


def _rows(rows: list[Any]) -> Any:
    """Rewards want the rows as they are: nothing is stacked."""
    return rows
