"""PPO for language models on `transformers.Trainer`.

One update: prompts → `rollout` (sample, log-probs, values, reference) → `score` (rewards) → `compute_advantages` (KL,
GAE) → `run_epochs` (epochs × minibatches) → metrics. All formulas are in `rlhf_zoo.functional`. What Trainer calls
(optimizer, logging, saving, resuming) is in `rlhf_zoo.ppo.base`, sampling and scoring in `rollout_trainer`,
evaluation in `held_out`, and the methods for a custom training loop (`generate` and `step`) in `stepwise`.

One Trainer step is one PPO update: `global_step`, `save_steps`, the learning-rate schedule and checkpoint tags all
count updates. Trainer keeps the loop, precision, callbacks, logging, saving and resuming. It calls `training_step` once
for each batch of prompts. The last call of a step makes the update, with all of its optimizer steps. Checkpoints are
written between updates.
"""

import copy
import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from ..modeling.batches import count_tokens
from ..modeling.devices import row_too_large_error, try_or_free_memory
from ..modeling.fsdp import gather_tensor
from ..modeling.logprobs import response_logits
from ..modeling.reserved_columns import GENERATION_INDEX
from ..rewards import RewardScores
from .actor_critic import TextBatch
from .base import TRAIN_STREAM
from .distributed_update import gather_rollouts as gather_across_processes
from .distributed_update import split_samples, split_texts
from .guards import check_ratio, check_rewards, check_start_kl, warn_if_scores_identical, wrap_reward_errors
from .key_checks import CPU_TOKENS_PER_PASS
from .loss import PolicyLoss, micro_batch_loss
from .metrics import UpdateMetrics
from .minibatch import Minibatch
from .rollout import Advantages, Rollout, shape_reward_scores, shape_token_scores
from .stepwise import StepwiseTrainer

log = logging.getLogger(__name__)

#: The seed for PTX texts is the shuffle's seed, shifted left by this many bits. Unless `seed` is 0, no update of the
#: run shuffles with that seed.
TEXT_SEED_SHIFT = 12


class PPOTrainer(StepwiseTrainer):
    """Proximal policy optimization of a language model (arXiv:1707.06347, arXiv:1909.08593, arXiv:2403.17031).

    Each phase of an update is a method that a subclass may override.

    Args:
        args: The settings.
        processing_class: The policy's tokenizer.
        model: The SFT policy, its path or Hub id, a PeftModel, or a model with a value head, which is then the critic.
        ref_model: The reference for KL. If None and the settings need a reference, it is a frozen copy of the policy,
            or a PeftModel itself, with its adapter off or with `args.ref_adapter_name`.
        reward_model: The model that scores completions, or several, which `args.reward_ensemble` combines; None for
            none.
        train_dataset: Prompts in a column `prompt` (text or conversation), or token ids in `input_ids`, with their
            `attention_mask` if they are padded. If there are both columns, the policy reads `input_ids`, which must
            encode the same text. None for a custom training loop.
        value_model: The critic; None for the value head of `model` or, if it has none, the critic that `args.critic`
            names.
        eval_dataset: Held-out prompts, in the same form, or {name: data set}; None for no evaluation.
        peft_config: The configuration of a new adapter for the policy; None to add none.
        reward_funcs: Functions that score completions, called as in TRL's GRPO, or further reward models. Custom
            training loops need no rewards.
        reward_processing_class: The tokenizers of reward models that are passed as models; None for the policy's. A
            reward model that is passed as a path or Hub id brings its own.
        ptx_dataset: Pretraining texts for the PTX loss, which `args.ptx_coef` weights; not used if that is 0.

    Raises:
        ZooError: The parts cannot be trained together. For example, PAD is missing or equal to EOS, a prompt is longer
            than the context, or the critic or a reward model reads the policy's token ids but lacks embeddings.
    """

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collects the prompts of a step, and makes one PPO update once it has all of them.

        Args:
            model: Policy and critic, wrapped for training.
            inputs: A batch of prompts, as the data collator returns it.
            num_items_in_batch: As in Trainer; not used.

        Returns:
            The loss, a scalar; 0 while prompts are being collected.
        """
        batch = self.rows_from_batch(inputs, prompts_read=sum(self._prompts_per_batch) * self.args.world_size)
        # Only the last batch of an epoch contains filler prompts. Trainer prefetches a step's batches, so accelerate
        # reports the epoch's end for all of them, and `count_without_filler` would be wrong for the others.
        is_last_of_step = self.accelerator.sync_gradients
        prompt_count = self.count_without_filler(len(batch)) if is_last_of_step else len(batch)
        self._pending_prompts += batch[:prompt_count]
        self._prompts_per_batch.append(prompt_count)
        if not is_last_of_step:
            return torch.zeros((), device=self.args.device)
        # A process with only filler prompts still runs one of them, because the other processes would wait for this
        # process. `gather_rollouts` drops the filler prompt.
        prompts, self._pending_prompts = self._pending_prompts or batch[:1], []
        # All completions of a prompt are adjacent, because groups are formed by reshaping.
        prompt_rows = [
            {**row, GENERATION_INDEX: index} for row in prompts for index in range(self.args.num_generations)
        ]
        with self.phases.time_update():
            with self.phases("rollout"):
                rollout = self.rollout(prompt_rows, stream=TRAIN_STREAM)
            with self.phases("reward"), wrap_reward_errors():
                reward_scores = replace(self.score(rollout, prompt_rows), group_size=self.args.num_generations)
            with self.phases("update"):
                loss = self.ppo_update(model, *self.gather_rollouts(rollout, reward_scores))
        self.log_eval_samples()
        return loss

    def gather_rollouts(self, rollout: Rollout, reward_scores: RewardScores) -> tuple[Rollout, RewardScores]:
        """Joins the rollouts of all processes, in the order that a single process would produce.

        Args:
            rollout: The rollout of this process.
            reward_scores: The completions' scores.
        """
        prompts_per_batch, self._prompts_per_batch = self._prompts_per_batch, []
        if self.args.world_size == 1:
            return rollout, reward_scores
        # A custom training loop has no batches of prompts: all its completions are one batch, and each is a group.
        return gather_across_processes(rollout, reward_scores, prompts_per_batch or [len(rollout.samples)])

    def ppo_update(self, model: nn.Module, rollout: Rollout, reward_scores: RewardScores) -> Tensor:
        """Makes the PPO update for a scored rollout: advantages, epochs, metrics, β.

        Args:
            model: Policy and critic, wrapped for training.
            rollout: The rollout of all processes.
            reward_scores: The completions' scores.

        Returns:
            The loss, a scalar.
        """
        if not self._start_checked:
            if rollout.has_reference:
                check_start_kl(
                    rollout.logprobs,
                    rollout.ref_logprobs,
                    rollout.mask,
                    precision=self.precision,
                    starts_at_reference=self._starts_at_reference,
                )
            warn_if_scores_identical(reward_scores.total, subject="first update")
            self._start_checked = True
        # Update the running statistics first, because `compute_advantages` centers and scales with them.
        moments = self.moments(reward_scores.total).tolist()
        self.running_scores = self.running_scores.update(moments)
        advantages = self.compute_advantages(rollout, reward_scores)
        group_size = reward_scores.group_size
        has_zero_variance = F.zero_variance_groups(advantages.shaped_scores, size=group_size)
        if group_size > 1 and self.args.skip_equal_scores:
            indices = (~has_zero_variance).repeat_interleave(group_size).nonzero().squeeze(1)
            metrics = self.run_epochs_on_subset(model, rollout, reward_scores, indices)
        else:
            metrics = self.run_epochs(model, rollout, advantages)
        if group_size > 1:
            metrics["objective/equal_scores"] = self.mean(has_zero_variance.float())
        self.record_metrics(rollout, advantages, metrics)
        # Update β last, because the rewards of this rollout were computed with the old β.
        completion_count = int(moments[0])
        self.controller = self.controller.update(self.mean(rollout.kl), completion_count)
        return torch.tensor(metrics["loss"], device=self.args.device)

    def shape_scores(self, reward_scores: RewardScores, ended: Tensor) -> Tensor:
        """Centers, scales and clips scores, then corrects them for a missing end of sequence.

        Args:
            reward_scores: The scores of B completions.
            ended: (B,) bool.

        Returns:
            (B,).
        """
        return shape_reward_scores(reward_scores, ended, self.args, self.running_scores)

    def compute_advantages(self, rollout: Rollout, reward_scores: RewardScores) -> Advantages:
        """Computes rewards, advantages and returns, per token or, with action_level "sequence", per completion.

        Args:
            rollout: B completions.
            reward_scores: The completions' scores.

        Raises:
            ZooError: An override of `token_rewards` changed the sum of a completion's rewards.
        """
        args, token_mask = self.args, rollout.mask
        shaped_scores = self.shape_scores(reward_scores, rollout.samples.ended)
        # In an evaluation each prompt has a single completion, so there is no other to compare it with.
        centers_by_prompt = args.score_centering == "prompt" and reward_scores.group_size > 1
        scores = F.leave_one_out(shaped_scores, size=reward_scores.group_size) if centers_by_prompt else shaped_scores
        kl_in_reward = args.kl_in == "reward"
        # If the KL is in the loss, β is 0 here. `token_rewards` still takes a KL: k1, because `kl_penalty` lacks some
        # estimators of the loss.
        beta = self.controller.kl_coef if kl_in_reward else 0.0
        estimator = args.kl_estimator if kl_in_reward else "k1"
        kl = F.kl_penalty(rollout.logprobs, rollout.ref_logprobs, estimator=estimator).masked_fill(~token_mask, 0)
        kl = F.sum_per_action(kl, token_mask, level=args.action_level)
        # If a completion is one action, its value is V before the first token.
        action_mask, values = token_mask[:, : kl.shape[1]], rollout.values[:, : kl.shape[1]]
        token_scores = shape_token_scores(reward_scores, rollout.samples.ended, args, self.running_scores)
        if token_scores is not None:
            token_scores = F.sum_per_action(token_scores, token_mask, level=args.action_level)
        # The last token gets the rest of the score, so that a completion's rewards add up to its score.
        terminal_scores = scores if token_scores is None else F.terminal_remainder(scores, token_scores, action_mask)
        rewards = self.token_rewards(terminal_scores, kl, action_mask, kl_coef=beta)
        rewards = rewards if token_scores is None else rewards + token_scores
        check_rewards(rewards, scores, kl, action_mask, kl_coef=beta)
        if args.whiten_rewards:
            rewards = F.whiten(rewards, action_mask, self.moments(rewards, action_mask), shift_mean=False)
        advantages, returns = F.gae(rewards, values, action_mask, gamma=args.gamma, lam=args.lam)
        if args.whiten_advantages:
            advantages = F.whiten(advantages, action_mask, self.moments(advantages, action_mask))
        non_score = -beta * kl.sum(1)
        return Advantages(reward_scores, shaped_scores, non_score, rewards, values, advantages, returns, action_mask)

    def token_rewards(self, terminal_scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
        """Computes r_t of each action, without the per-token rewards that reward functions return.

        `compute_advantages` adds per-token rewards. An override may place a score elsewhere, but must not change the
        sum over a completion; `compute_advantages` checks the sum.

        Args:
            terminal_scores: (B,), the part of each score that goes to the last token.
            kl: (B, A) in nats.
            mask: (B, A).
            kl_coef: β.

        Returns:
            (B, A).
        """
        return F.token_rewards(terminal_scores, kl, mask, kl_coef=kl_coef)

    def run_epochs_on_subset(
        self, model: nn.Module, rollout: Rollout, reward_scores: RewardScores, indices: Tensor
    ) -> dict[str, float]:
        """Runs the epochs of an update on some completions of a rollout, as if only these had been sampled.

        Args:
            model: Policy and critic, wrapped for training.
            rollout: The rollout of all processes.
            reward_scores: The completions' scores.
            indices: (n,) int64, the completions. If there are none, no optimizer step is made.

        Returns:
            As for `run_epochs`.
        """
        if not len(indices):
            return {"loss": 0.0, "policy/epochs": 0.0}
        # Compute the advantages again, because whitening and the minibatch sizes depend on which completions are left.
        subset = rollout.select(indices)
        subset_scores = reward_scores.select(indices, width=subset.mask.shape[1])
        return self.run_epochs(model, subset, self.compute_advantages(subset, subset_scores))

    def run_epochs(self, model: nn.Module, rollout: Rollout, advantages: Advantages) -> dict[str, float]:
        """Makes all optimizer steps of an update: epochs × minibatches.

        Args:
            model: Policy and critic, wrapped for training.
            rollout: The rollout of all processes.
            advantages: The rollout's advantages and returns.

        Returns:
            Means of losses and other terms over all processes.
        """
        args = self.args
        model.train()
        # The seed depends on the step, so that a resumed run shuffles in the same way as an uninterrupted run.
        shuffle = torch.Generator().manual_seed(args.seed * 1_000_003 + self.state.global_step)
        # Texts have their own generator, so that they do not change how completions are shuffled.
        text_generator = torch.Generator().manual_seed(shuffle.initial_seed() << TEXT_SEED_SHIFT)
        metrics = UpdateMetrics(args.device)
        # There may be fewer completions than num_mini_batches, as at the end of the prompts or with skip_equal_scores.
        minibatch_count = min(args.num_mini_batches, len(rollout.samples))
        max_actions = args.response_length if args.action_level == "token" else 1
        for _ in range(args.num_ppo_epochs):
            # Shuffle on the CPU, because a GPU's generator would give a different order.
            order = torch.randperm(len(rollout.samples), generator=shuffle, device="cpu").to(rollout.mask.device)
            for indices in torch.tensor_split(order, minibatch_count):
                texts = None
                if self.text_source is not None:
                    texts = self.text_source.draw(len(indices), text_generator, args.device)
                batch = Minibatch.of(rollout, advantages, indices, max_actions=max_actions, texts=texts)
                self.train_on_minibatch(model, batch, metrics)
            approx_kl = metrics.end_epoch(self.sum_over_processes)
            # The factor 1.5 is from OpenAI's Spinning Up: KL may exceed the target, but not by much.
            if args.early_stop_kl is not None and approx_kl > 1.5 * args.early_stop_kl:
                break
        self.check_weights()
        return metrics.means(self.sum_over_processes)

    def train_on_minibatch(self, model: nn.Module, batch: Minibatch, metrics: UpdateMetrics) -> None:
        """Computes gradients of this process's share of a minibatch, by micro-batch, and makes one optimizer step.

        If a micro-batch does not fit into memory, the minibatch starts again with half as many tokens per micro-batch,
        and later minibatches keep that limit. If there are several processes, running out of memory ends the run,
        because all of them would have to agree on the new limit.

        Args:
            model: Policy and critic, wrapped for training.
            batch: The minibatch, of all processes.
            metrics: Accumulates the loss terms.

        Raises:
            ZooError: A single completion does not fit into memory, or ρ is not 1 before the first optimizer step.
            NotFinite: Log-probabilities are not finite, or too many optimizer steps in a row were skipped.
        """
        # Save the metrics, because the minibatch may have to start again.
        saved_metrics = copy.deepcopy(vars(metrics))
        while True:
            micro_batches = self.micro_batches(batch)
            if self.args.world_size > 1:
                self.accumulate(model, batch, micro_batches, metrics)
                break
            is_out_of_memory = try_or_free_memory(self.accumulate, model, batch, micro_batches, metrics) is None
            if not is_out_of_memory:
                break
            if max(map(len, micro_batches)) == 1:
                raise row_too_large_error()
            model.zero_grad()
            # The micro-batches that fit will be computed again, so remove what they added.
            vars(metrics).update(copy.deepcopy(saved_metrics))
            samples, packed = batch.rollout.samples, self.args.padding_free
            max_size = max(count_tokens(samples, indices, packed=packed) for indices in micro_batches)
            self.max_tokens_per_pass = max_size // 2
            log.warning("%d tokens do not fit into memory: continuing with %d at a time.", max_size, max_size // 2)
        self.check_step(metrics)
        if not metrics.steps:  # before the first optimizer step of an update, ρ must be 1
            check_ratio(metrics.first_pass_mismatch(self.sum_over_processes), precision=self.precision)
        metrics.record_step(self.optimizer_step(model))

    def micro_batches(self, batch: Minibatch) -> list[Tensor]:
        """Splits a minibatch into micro-batches, which run through the models one by one.

        Args:
            batch: The minibatch, of all processes.

        Returns:
            This process's micro-batches, as indices within the minibatch. Every process gets the same number of
            micro-batches, so some may be empty.
        """
        args = self.args
        return split_samples(
            batch.rollout.samples,
            max_rows=len(batch) if args.max_tokens_per_micro_batch else args.per_device_train_batch_size,
            max_tokens=self.max_tokens_per_pass,
            # At the default limit of a CPU in float32, keep the splits of earlier versions, for bitwise equal results.
            minimize_padding=self.max_tokens_per_pass != CPU_TOKENS_PER_PASS,
            packed=args.padding_free,
            process_index=args.process_index,
            num_processes=args.world_size,
        )

    def accumulate(
        self, model: nn.Module, batch: Minibatch, micro_batches: Sequence[Tensor], metrics: UpdateMetrics
    ) -> None:
        """Accumulates the gradients of this process's share of a minibatch.

        Args:
            model: Policy and critic, wrapped for training.
            batch: The minibatch, of all processes.
            micro_batches: The micro-batches of this process, as `micro_batches` returns them.
            metrics: Accumulates the loss terms.
        """
        args = self.args
        text_batches: list[TextBatch] = [] if batch.texts is None else split_texts(
            batch.texts, max_batches=len(micro_batches), process_index=args.process_index, num_processes=args.world_size
        )  # fmt: skip
        for number, (indices, text_batch) in enumerate(zip_longest(micro_batches, text_batches), start=1):
            # A process without completions uses one with weight 0, because the other processes wait for its gradients.
            is_empty = len(indices) == 0
            micro_batch_metrics = UpdateMetrics(args.device) if is_empty else metrics
            micro_batch = batch.micro_batch(torch.zeros_like(batch.indices[:1]) if is_empty else indices, text_batch)
            # Processes exchange gradients once per optimizer step, with the last micro-batch.
            with self.accelerator.no_sync(model) if number < len(micro_batches) else nullcontext():
                with self.compute_loss_context_manager():
                    loss = self.loss(model, micro_batch, micro_batch_metrics)
                if is_empty:
                    loss = loss * 0
                    metrics.register_keys(micro_batch_metrics)  # all processes must reduce the same keys
                metrics.add_loss(loss)
                # DDP averages gradients over processes, but the losses of all processes should add up.
                self.accelerator.backward(loss * args.world_size)

    def loss(self, model: nn.Module, batch: Minibatch, metrics: UpdateMetrics) -> Tensor:
        """Computes a micro-batch's share of the minibatch's loss.

        Args:
            model: Policy and critic, wrapped for training.
            batch: The micro-batch.
            metrics: Accumulates the loss terms.

        Returns:
            A scalar. The shares of all micro-batches and processes add up to the minibatch's loss.
        """
        args, samples, texts = self.args, batch.rollout.samples, batch.texts
        ref_logits = None
        if args.kl_in == "loss" and args.kl_estimator == "full":
            assert self.reference is not None  # checked with the settings
            with torch.no_grad(), self.reference.model() as reference:
                ref_logits = response_logits(reference, samples, temperature=args.temperature)
        policy_loss = PolicyLoss(args, batch, self.controller.kl_coef)
        output = model(
            samples,
            args.temperature,
            texts,
            ref_logits=ref_logits,
            entropy_requires_grad=args.entropy_coef > 0,
            # If possible, the head's forward pass computes the loss, so that each chunk of logits is computed once.
            policy_loss=policy_loss if policy_loss.is_separable_per_token and not self.is_critic_warmup else None,
        )
        loss, terms = micro_batch_loss(policy_loss, output, critic_only=self.is_critic_warmup)
        text_token_count = batch.size.text_tokens
        if texts is not None and output.text_logprobs is not None and text_token_count is not None:
            metrics.add_texts(-output.text_logprobs, texts.mask)
            if not self.is_critic_warmup:
                ptx_loss = F.aggregate(-output.text_logprobs, texts.mask, token_count=text_token_count)
                loss = loss + args.ptx_coef * ptx_loss
        metrics.add_terms(terms, samples.mask, batch.advantages.mask)
        return loss

    def optimizer_step(self, model: nn.Module) -> dict[str, Tensor]:
        """Clips the gradients of policy and critic separately and makes an optimizer step.

        With a joint norm, a noisy critic would shrink the policy's step. If the loss or a norm is not finite, all
        processes skip the optimizer step.

        Args:
            model: Policy and critic, wrapped for training.

        Returns:
            {"policy" or "critic": gradient norm before clipping}.

        Raises:
            NotFinite: Too many optimizer steps in a row were skipped.
        """
        actor, norms = self.actor, {}
        max_norm = self.args.max_grad_norm or math.inf
        # A shared trunk gets gradients from the critic, but must not change during warm-up either.
        if self.is_critic_warmup:
            for parameter in actor.policy.parameters():
                parameter.grad = None
        for name, module in (("policy", actor.policy), ("critic", actor.value_model)):
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            norms[name] = gather_tensor(self.accelerator.clip_grad_norm_(parameters, max_norm)).detach()
        assert self.optimizer is not None
        named_norms = {f"{name}'s gradient norm": norm for name, norm in norms.items()}
        self.guard.record(self.finite_on_all_processes(named_norms))
        if self.guard.should_step(step=self.state.global_step + 1, learning_rate=self.args.learning_rate):
            self.optimizer.step()
        model.zero_grad()
        return norms
