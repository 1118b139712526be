"""PPO for language models on `transformers.Trainer`.

One update: prompts → `rollout` (sample, log-probs, values, reference) → `score` (rewards) → `estimate` (KL, GAE) →
`update` (epochs × minibatches) → metrics. All formulas are in `rlhf_zoo.functional`. What Trainer calls
(optimizer, logging, saving, resuming) is in `rlhf_zoo.ppo.base`, sampling and scoring in `rollout_trainer`,
evaluation in `held_out`, and the user's own loop in `stepwise`.

A step of this trainer is one update: `global_step`, `save_steps`, schedules and tags count updates. Trainer keeps the
loop, precision, callbacks, logging, saving and resuming. It calls `training_step` once for each batch of prompts, and
the update with its own optimizer steps happens in the last call of a step. Checkpoints are written between updates.
"""

import copy
import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from ..modeling.batches import count_tokens
from ..modeling.devices import too_large, try_with_oom_fallback
from ..modeling.fsdp import gather_tensor
from ..modeling.logprobs import response_logits
from ..modeling.reserved_columns import GENERATION
from ..rewards import Scored
from .actor_critic import TextBatch
from .base import TRAIN_STREAM
from .config import TOKENS_ON_CPU
from .custom_loop import UserScores
from .distributed_update import gather_rollouts, split_samples, split_texts
from .guards import (
    check_ratio,
    check_rewards,
    check_start,
    warn_if_scores_identical,
    wrap_reward_errors,
)
from .loss import PolicyLoss, micro_batch_loss
from .metrics import Progress
from .minibatch import Minibatch
from .rollout import Advantages, Rollout, shaped_by_token, shaped_scores
from .stepwise import StepwiseTrainer

log = logging.getLogger(__name__)


class PPOTrainer(StepwiseTrainer):
    """Proximal policy optimization of a language model (arXiv:1707.06347, arXiv:1909.08593, arXiv:2403.17031).

    Each step of an update is a method that a subclass may override.

    Args:
        args: the settings.
        processing_class: the policy's tokenizer.
        model: the SFT policy, its path or Hub id, a PeftModel, or a model with a value head, which is then the critic.
        ref_model: the reference for KL; None for a frozen copy of the policy, or the policy with its adapter off.
        reward_model: scores completions; `args.reward_ensemble` combines several.
        train_dataset: prompts in a column `prompt` (text or conversation), or token ids in `input_ids`, with their
            `attention_mask` if they are padded. If there are both columns, the policy reads `input_ids`, which must
            encode the same text.
        value_model: the critic; None for the one that `args.critic` names.
        eval_dataset: held-out prompts, in the same form.
        peft_config: configures a new adapter of the policy.
        reward_funcs: score completions, called as TRL's GRPO calls them. The user's own loop needs no rewards.
        reward_processing_class: the reward models' tokenizers; None for the policy's.
        ptx_dataset: text for the language-model loss, with `args.ptx_coef`.

    Raises:
        ZooError: these cannot be trained together: PAD missing or equal to EOS, a prompt longer than the context, a
            critic or a reward that does not fit.
    """

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collects the prompts of a step, and makes one PPO update once it has all of them.

        Args:
            model: policy and critic, wrapped for training.
            inputs: a batch of prompts, as the data collator returns it.
            num_items_in_batch: as in Trainer; not used.

        Returns:
            The loss, a scalar; 0 while prompts are being collected.
        """
        batch = self.as_rows(inputs, before=sum(self._sizes) * self.args.world_size)
        # Trainer reads all batches of a step in advance, so only the last batch of a step can be the last of an epoch.
        real = self.not_filling(len(batch)) if self.accelerator.sync_gradients else len(batch)
        self._waiting += batch[:real]
        self._sizes.append(real)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        # A process that got only filler prompts still runs one of them, because the other processes would wait for it.
        # gather_rollouts drops it.
        prompts, self._waiting = self._waiting or batch[:1], []
        # All completions of a prompt are adjacent, because groups are formed by reshaping.
        rows = [{**row, GENERATION: n} for row in prompts for n in range(self.args.num_generations)]
        with self.phases.of_update():
            with self.phases("rollout"):
                rollout = self.rollout(rows, stream=TRAIN_STREAM)
            with self.phases("reward"), wrap_reward_errors():
                scored = self.score(rollout, rows)
            with self.phases("update"):
                loss = self.learn(model, *self.gather_rollouts(rollout, scored, group=self.args.num_generations))
        self.log_eval_samples()
        return loss

    def gather_rollouts(self, rollout: Rollout, scored: Scored, *, group: int = 1) -> tuple[Rollout, Scored]:
        """Joins the rollouts of all processes, in the order that a single process would produce.

        Args:
            rollout: of this process.
            scored: its rewards.
            group: completions of each prompt.
        """
        sizes, self._sizes = self._sizes, []
        if self.args.world_size == 1:
            return rollout, scored
        return gather_rollouts(rollout, scored, sizes=sizes or [len(rollout.samples)], group=group)

    def learn(self, model: nn.Module, rollout: Rollout, scored: Scored) -> Tensor:
        """Makes one update: advantages, epochs, metrics, β.

        Args:
            model: policy and critic, wrapped for training.
            rollout: of all processes.
            scored: its rewards.

        Returns:
            The loss, a scalar.
        """
        if not self._start_checked:
            if rollout.measured:
                check_start(
                    rollout.logprobs,
                    rollout.ref_logprobs,
                    rollout.mask,
                    precision=self.precision,
                    at_reference=self._from_reference,
                )
            warn_if_scores_identical(scored.total, subject="first update")
            self._start_checked = True
        # Before `estimate`, so that running centering and scaling include this rollout.
        moments = self.moments(scored.total).tolist()
        self.scores_seen = self.scores_seen.update(moments)
        estimates = self.estimate(rollout, scored)
        # In the user's own loop it is unknown which completions share a prompt.
        group = 1 if isinstance(scored, UserScores) else self.args.num_generations
        zero_variance = F.zero_variance_groups(estimates.scores, size=group)
        if group > 1 and self.args.skip_equal_scores:
            progress = self.update_from(
                model, rollout, scored, (~zero_variance).repeat_interleave(group).nonzero().squeeze(1)
            )
        else:
            progress = self.update(model, rollout, estimates)
        if group > 1:
            progress["objective/equal_scores"] = self.mean(zero_variance.float())
        self.observe(rollout, estimates, progress)
        # After the update, because the rewards of this rollout were computed with the old β.
        self.controller = self.controller.update(self.mean(rollout.kl), int(moments[0]))
        return torch.tensor(progress["loss"], device=self.args.device)

    def shape(self, scored: Scored, ended: Tensor) -> Tensor:
        """Centers, scales and clips scores, then corrects them for a missing end of sequence.

        Args:
            scored: the rewards of B completions.
            ended: (B,) bool.

        Returns:
            (B,).
        """
        return shaped_scores(scored, ended, self.args, self.scores_seen)

    def estimate(self, rollout: Rollout, scored: Scored) -> Advantages:
        """Computes rewards, advantages and returns, by token or with the completion as one action.

        Args:
            rollout: B completions.
            scored: their scores.

        Raises:
            ZooError: an override of `token_rewards` changed the sum of a completion's rewards.
        """
        args, tokens = self.args, rollout.mask
        scores = self.shape(scored, rollout.samples.ended)
        beta = self.controller.kl_coef if args.kl_in == "reward" else 0.0
        estimator = args.kl_estimator if args.kl_in == "reward" else "k1"
        kl = F.kl_penalty(rollout.logprobs, rollout.ref_logprobs, estimator=estimator).masked_fill(~tokens, 0)
        kl = F.actions(kl, tokens, level=args.action_level)
        mask, values = tokens[:, : kl.shape[1]], rollout.values[:, : kl.shape[1]]
        token_scores = shaped_by_token(scored, rollout.samples.ended, args, self.scores_seen)
        token_scores = None if token_scores is None else F.actions(token_scores, tokens, level=args.action_level)
        # The last token gets the rest of the score, so that a completion's rewards add up to its score.
        terminal_scores = scores if token_scores is None else F.terminal_remainder(scores, token_scores, mask)
        rewards = self.token_rewards(terminal_scores, kl, mask, kl_coef=beta)
        rewards = rewards if token_scores is None else rewards + token_scores
        check_rewards(rewards, scores, kl, mask, kl_coef=beta)
        if args.whiten_rewards:
            rewards = F.whiten(rewards, mask, self.moments(rewards, mask), shift_mean=False)
        advantages, returns = F.gae(rewards, values, mask, gamma=args.gamma, lam=args.lam)
        if args.whiten_advantages:
            advantages = F.whiten(advantages, mask, self.moments(advantages, mask))
        return Advantages(scored, scores, -beta * kl.sum(1), rewards, values, advantages, returns, mask)

    def token_rewards(self, scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
        """Computes r_t of each action, without the per-token rewards of reward functions.

        An override may place a score elsewhere, but must not change the sum over a completion. That is checked.

        Args:
            scores: (B,), the part of the score that goes to the last token.
            kl: (B, A) in nats.
            mask: (B, A).
            kl_coef: β.

        Returns:
            (B, A).
        """
        return F.token_rewards(scores, kl, mask, kl_coef=kl_coef)

    def update_from(self, model: nn.Module, rollout: Rollout, scored: Scored, rows: Tensor) -> dict[str, float]:
        """Makes an update from some rows of a rollout, as if only these had been sampled.

        Args:
            model: policy and critic, wrapped for training.
            rollout: of all processes.
            scored: its rewards.
            rows: (n,) int64; if it is empty, no optimizer step is made.

        Returns:
            Means over all processes.
        """
        if not len(rows):
            return {"loss": 0.0, "policy/epochs": 0.0}
        # Estimated again, because whitening and the minibatch sizes depend on the rows that are left.
        subset = rollout.rows(rows)
        return self.update(model, subset, self.estimate(subset, scored.rows(rows, width=subset.mask.shape[1])))

    def update(self, model: nn.Module, rollout: Rollout, estimates: Advantages) -> dict[str, float]:
        """Makes the optimizer steps of an update: epochs × minibatches.

        Args:
            model: policy and critic, wrapped for training.
            rollout: of all processes.
            estimates: its advantages and returns.

        Returns:
            Means of losses and other terms over all processes.
        """
        args = self.args
        model.train()
        # A function of the step, so that a resumed run shuffles as an uninterrupted one does.
        shuffle = torch.Generator().manual_seed(args.seed * 1_000_003 + self.state.global_step)
        # A separate generator, so that texts do not change how completions are shuffled.
        texts = torch.Generator().manual_seed(shuffle.initial_seed() << 12)
        progress = Progress(args.device)
        # The last batch of an epoch over the prompts may have fewer completions than num_mini_batches.
        minibatch_count = min(args.num_mini_batches, len(rollout.samples))
        length = args.response_length if args.action_level == "token" else 1
        for _ in range(args.num_ppo_epochs):
            # On the CPU, because a GPU's generator would give a different order.
            order = torch.randperm(len(rollout.samples), generator=shuffle, device="cpu").to(rollout.mask.device)
            for rows in torch.tensor_split(order, minibatch_count):
                text_batch = self.texts.draw(len(rows), texts, args.device) if self.texts is not None else None
                self.minibatch(model, Minibatch.of(rollout, estimates, rows, length=length, texts=text_batch), progress)
            drift = progress.end_epoch(self.total)
            # The factor 1.5 is from OpenAI's Spinning Up: KL may exceed the target, but not by much.
            if args.early_stop_kl is not None and drift > 1.5 * args.early_stop_kl:
                break
        self.check_weights()
        return progress.means(self.total)

    def minibatch(self, model: nn.Module, batch: Minibatch, progress: Progress) -> None:
        """Computes gradients of this process's share of a minibatch, by micro-batch, and makes one optimizer step.

        If a micro-batch does not fit into memory, the minibatch starts again with half as many tokens per micro-batch,
        and later ones keep that limit. Several processes would have to agree on it, so there the error ends the run.

        Args:
            model: policy and critic, wrapped for training.
            batch: the minibatch, of all processes.
            progress: gets the measurements.

        Raises:
            ZooError: a single row does not fit into memory.
        """
        # Restored if the minibatch has to start again.
        saved_progress = copy.deepcopy(vars(progress))
        while True:
            micro_batches = self.micro_batches(batch)
            if self.args.world_size > 1:
                self.accumulate(model, batch, micro_batches, progress)
                break
            if try_with_oom_fallback(self.accumulate, model, batch, micro_batches, progress) is not None:
                break
            if max(map(len, micro_batches)) == 1:
                raise too_large()
            model.zero_grad()
            # The micro-batches that did fit will be computed again, so what they added is undone.
            vars(progress).update(copy.deepcopy(saved_progress))
            samples, packed = batch.rollout.samples, self.args.padding_free
            largest = max(count_tokens(samples, rows, packed=packed) for rows in micro_batches)
            self.most_tokens = largest // 2
            log.warning("%d tokens do not fit into memory: continuing with %d at a time.", largest, self.most_tokens)
        self.check_step(progress)
        if not progress.steps:  # before the first optimizer step of an update, ρ must be 1
            check_ratio(progress.first_pass(self.total), precision=self.precision)
        progress.stepped(self.optimizer_step(model))

    def micro_batches(self, batch: Minibatch) -> list[Tensor]:
        """Splits a minibatch into micro-batches, which run through the models one by one.

        Args:
            batch: the minibatch, of all processes.

        Returns:
            This process's micro-batches, as row indices within the minibatch. Every process gets the same number of
            them, so some may be empty.
        """
        args = self.args
        return split_samples(
            batch.rollout.samples,
            size=len(batch) if args.max_tokens_per_micro_batch else args.per_device_train_batch_size,
            tokens=self.most_tokens,
            even=self.most_tokens != TOKENS_ON_CPU,  # the CPU default keeps the summation order of earlier versions
            packed=args.padding_free,
            process=args.process_index,
            processes=args.world_size,
        )

    def accumulate(
        self, model: nn.Module, batch: Minibatch, micro_batches: Sequence[Tensor], progress: Progress
    ) -> None:
        """Accumulates the gradients of this process's share of a minibatch.

        Args:
            model: policy and critic, wrapped for training.
            batch: the minibatch, of all processes.
            micro_batches: this process's, as `micro_batches` returns them.
            progress: gets the measurements.
        """
        args = self.args
        texts: list[TextBatch] = []
        if batch.texts is not None:
            texts = split_texts(
                batch.texts, parts=len(micro_batches), process=args.process_index, processes=args.world_size
            )
        for number, (rows, text) in enumerate(zip_longest(micro_batches, texts), start=1):
            # A process with no rows left computes one row with weight 0, because the others wait for its gradients.
            has_rows = len(rows) > 0
            measurements = progress if has_rows else Progress(args.device)
            micro_batch = batch.micro_batch(rows if has_rows else torch.zeros_like(batch.rows[:1]), text)
            # Processes exchange gradients once per optimizer step, with the last micro-batch.
            with self.accelerator.no_sync(model) if number < len(micro_batches) else nullcontext():
                with self.compute_loss_context_manager():
                    loss = self.loss(model, micro_batch, measurements)
                if not has_rows:
                    loss = loss * 0
                    progress.add_names(measurements)
                progress.add_loss(loss)
                # DDP averages gradients over processes, but the losses of all processes should add up.
                self.accelerator.backward(loss * args.world_size)

    def loss(self, model: nn.Module, batch: Minibatch, progress: Progress) -> Tensor:
        """Computes a micro-batch's share of the minibatch's loss.

        Args:
            model: policy and critic, wrapped for training.
            batch: the micro-batch.
            progress: gets the measurements.

        Returns:
            The scalar. The shares of all micro-batches and processes add up to the minibatch's loss.
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
            entropy_learns=args.entropy_coef > 0,
            # Computed in the forward pass if possible, so that each chunk of logits is computed only once.
            policy_loss=policy_loss if policy_loss.by_token and not self.warming_up else None,
        )
        loss, terms = micro_batch_loss(policy_loss, output, critic_only=self.warming_up)
        text_tokens = batch.size.text_tokens
        if texts is not None and output.text_logprobs is not None and text_tokens is not None:
            progress.add_texts(-output.text_logprobs, texts.mask)
            if not self.warming_up:
                loss = loss + args.ptx_coef * F.aggregate(-output.text_logprobs, texts.mask, tokens=text_tokens)
        progress.add(terms, samples.mask, batch.estimates.mask)
        return loss

    def optimizer_step(self, model: nn.Module) -> dict[str, Tensor]:
        """Clips the gradients of policy and critic separately and makes an optimizer step.

        With a joint norm, a noisy critic would shrink the policy's step. A step whose loss or norms are not finite is
        skipped in all processes.

        Args:
            model: policy and critic, wrapped for training.

        Returns:
            The norms before clipping, by name.

        Raises:
            NotFinite: several steps in a row were skipped.
        """
        actor, norms = self.actor, {}
        limit = self.args.max_grad_norm or math.inf
        # A shared trunk gets gradients from the critic, but must not move during warm-up either.
        if self.warming_up:
            for parameter in actor.policy.parameters():
                parameter.grad = None
        for name, part in (("policy", actor.policy), ("critic", actor.value_model)):
            parameters = [p for p in part.parameters() if p.requires_grad]
            norms[name] = gather_tensor(self.accelerator.clip_grad_norm_(parameters, limit)).detach()
        assert self.optimizer is not None
        self.guard.record(self.agreed({f"{name}'s gradient norm": norm for name, norm in norms.items()}))
        if self.guard.keep(step=self.state.global_step + 1, rate=self.args.learning_rate):
            self.optimizer.step()
        model.zero_grad()
        return norms
