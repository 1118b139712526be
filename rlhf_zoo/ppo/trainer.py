"""PPO for language models on `transformers.Trainer`.

One update, read aloud: prompts → `rollout` (sample, log-probs, values, reference) → `score` (rewards) → `estimate`
(KL, GAE) → `update` (epochs × minibatches) → metrics. Every formula stands in `rlhf_zoo.functional`; what Trainer needs
of us (optimizer, evaluation, saving, resuming) in `rlhf_zoo.ppo.base`.

A step of this trainer is one update: `global_step`, `save_steps`, schedules and tags count updates. Trainer keeps the
loop, precision, callbacks, logging, saving and resuming; it calls `training_step` once for each batch of prompts, and
the update with its own optimizer steps happens in the last call of a step. Checkpoints fall between updates.
"""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from ..errors import ZooError
from ..modeling.devices import too_large, try_with_oom_fallback
from ..modeling.fsdp import full, whole
from ..modeling.logprobs import in_batches, response_logits, token_logprobs, tokens_of
from ..modeling.reserved_columns import GENERATION, PROMPT_INDEX, PROMPT_TOKENS
from ..modeling.sampling.sampler import Samples, SamplingRequest
from ..rewards import Scored
from .actor_critic import TextBatch
from .base import EVAL_STREAM, LOOP_STREAM, TRAIN_STREAM, BasePPOTrainer
from .config import TOKENS_ON_CPU
from .custom_loop import GivenScores, given_samples, given_scored, prompt_row
from .distributed_update import shares, text_shares, together
from .guards import (
    check_ends,
    check_logprobs,
    check_ratio,
    check_rewards,
    check_start,
    check_values,
    unscored,
    warn_if_scores_identical,
)
from .loss import PolicyLoss, micro_batch_loss
from .metrics import Progress
from .minibatch import Minibatch
from .offload import at_hand
from .rollout import Advantages, Rollout, shaped_by_token, shaped_scores

log = logging.getLogger(__name__)


class PPOTrainer(BasePPOTrainer):
    """Proximal policy optimization of a language model (arXiv:1707.06347, arXiv:1909.08593, arXiv:2403.17031).

    Each step of an update is a method of its own that a subclass may override.

    Args:
        args: the settings.
        processing_class: the policy's tokenizer.
        model: the SFT policy, its path or Hub id, a PeftModel, or a model with a value head, which is then the critic.
        ref_model: what KL is measured to; None for a frozen copy of the policy, or the policy with its adapter off.
        reward_model: scores completions; of several, `args.reward_ensemble` makes one.
        train_dataset: prompts in a column `prompt` (text or conversation), or token ids in `input_ids`, with their
            `attention_mask` where they are padded. Where both columns are there, the policy reads `input_ids`, and they
            must be of the same text.
        value_model: the critic; None for the one that `args.critic` names.
        eval_dataset: held-out prompts, in the same form.
        peft_config: of an adapter to train on the policy.
        reward_funcs: score completions, called as TRL's GRPO calls them. A loop of one's own needs no reward at all.
        reward_processing_class: the reward models' tokenizers; None for the policy's.
        ptx_dataset: text for the language-model loss, with `args.ptx_coef`.

    Raises:
        ZooError: these cannot train together: PAD missing or equal to EOS, a prompt longer than the context, a critic
            or a reward that does not fit.
    """

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Waits for the prompts of a whole step, then makes one PPO update. Returns its loss."""
        batch = self.as_rows(inputs, before=sum(self._sizes) * self.args.world_size)
        # Trainer reads all batches of a step ahead, so only the step's last one may be the last of a pass.
        real = self.not_filling(len(batch)) if self.accelerator.sync_gradients else len(batch)
        self._waiting += batch[:real]
        self._sizes.append(real)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        # A process without a prompt of its own takes part with one that counts for nothing.
        prompts, self._waiting = self._waiting or batch[:1], []
        rows = [{**row, GENERATION: n} for row in prompts for n in range(self.args.num_generations)]
        with self.phases.of_update():
            with self.phases("rollout"):
                rollout = self.rollout(rows, stream=TRAIN_STREAM)
            with self.phases("reward"), unscored():
                scored = self.score(rollout, rows)
            with self.phases("update"):
                loss = self.learn(model, *self.gather_rollouts(rollout, scored, group=self.args.num_generations))
        self.log_eval_samples()
        return loss

    def gather_rollouts(self, rollout: Rollout, scored: Scored, *, group: int = 1) -> tuple[Rollout, Scored]:
        """Joins the rollouts of all processes, with `group` completions a prompt, in the order that one process has."""
        sizes, self._sizes = self._sizes, []
        if self.args.world_size == 1:
            return rollout, scored
        return together(rollout, scored, sizes=sizes or [len(rollout.samples)], group=group)

    def learn(self, model: nn.Module, rollout: Rollout, scored: Scored) -> Tensor:
        """Makes one update from all processes' rollout: advantages, epochs, metrics, β. Returns its loss."""
        if not self._begun:
            if rollout.measured:
                check_start(
                    rollout.logprobs,
                    rollout.ref_logprobs,
                    rollout.mask,
                    precision=self.precision,
                    at_reference=self._from_reference,
                )
            warn_if_scores_identical(scored.total, of="first update")
            self._begun = True
        moments = self.moments(scored.total).tolist()
        self.scores_seen = self.scores_seen.update(moments)
        estimates = self.estimate(rollout, scored)
        # In a loop of one's own nobody says which completions are of one prompt.
        group = 1 if isinstance(scored, GivenScores) else self.args.num_generations
        equal = F.zero_variance_groups(estimates.scores, size=group)
        if group > 1 and self.args.skip_equal_scores:
            progress = self.update_from(model, rollout, scored, (~equal).repeat_interleave(group).nonzero().squeeze(1))
        else:
            progress = self.update(model, rollout, estimates)
        if group > 1:
            progress["objective/equal_scores"] = self.mean(equal.float())
        self.observe(rollout, estimates, progress)
        self.controller = self.controller.update(self.mean(rollout.kl), int(moments[0]))
        return torch.tensor(progress["loss"], device=self.args.device)

    @torch.no_grad()
    def rollout(self, rows: Sequence[Mapping], *, stream: int) -> Rollout:
        """Samples a completion for each row, with log π, log π_ref and V of its tokens.

        Each row's random stream is keyed by (stream, update, prompt index, which completion of the prompt).
        Nothing else decides what it samples.

        Args:
            rows: prompts, with their token ids and their index in the data set.
            stream: keeps training, evaluation and a loop of one's own apart.

        Raises:
            NotFinite: a log-probability or a value is not finite.
        """
        args, actor = self.args, self.actor
        actor.eval()
        step = 0 if stream == EVAL_STREAM else self.state.global_step
        keys = [(stream, step, row[PROMPT_INDEX], row.get(GENERATION, 0)) for row in rows]
        with self.accelerator.autocast(), whole(actor.policy):
            request = SamplingRequest(
                [row[PROMPT_TOKENS] for row in rows],
                keys=keys,
                seed=args.seed,
                max_new_tokens=args.response_length,
                stop_ids=self.stop_ids,
                pad_id=self.fill_id,
                temperature=args.temperature,
                vocabulary=self.vocabulary,
                max_tokens=args.max_rollout_batch_tokens,
                critic=actor.value_of if actor.shared and not args.recompute_logprobs else None,
            )
            samples = self.engine(actor.policy, request)
        check_ends(samples, self.stop_ids)
        samples = args.truncation(samples, self.processing_class, seed=args.seed, keys=keys)
        if args.rollout_engine == "native":
            return self.evaluated(samples, recompute=args.recompute_logprobs)
        return replace(self.evaluated(samples, recompute=True), engine_logprobs=samples.logprobs)

    @torch.no_grad()
    def evaluated(self, samples: Samples, *, recompute: bool) -> Rollout:
        """Adds log π_ref, and V where sampling computed none; with `recompute` also log π_old, of a forward pass."""
        args, actor = self.args, self.actor
        actor.eval()
        temperature, budget = args.temperature, self.most_tokens
        size = args.local_rollout_forward_batch_size
        passes: Any = {"size": size, "tokens": budget, "end_to_end": args.padding_free}
        sampled_values, samples = None if recompute else samples.values, replace(samples, values=None)
        logprobs, values = (torch.zeros_like(samples.logprobs) for _ in range(2))
        with self.accelerator.autocast():
            running = actor.policy if recompute or actor.shared else None, None if actor.shared else actor.value_model
            with self.phases("values"), whole(*running):
                for rows in in_batches(samples, **passes) if sampled_values is None else ():
                    chosen = samples.rows(rows)
                    places = rows, slice(chosen.mask.shape[1])
                    if recompute:
                        output = actor(chosen, temperature)
                        logprobs[places], values[places] = output.logprobs, output.values
                    else:
                        values[places] = actor.values(chosen)
            if recompute:
                samples = replace(samples, logprobs=logprobs)
            values = values if sampled_values is None else sampled_values
            check_logprobs(samples.logprobs, samples.mask, of="policy")
            ref_logprobs = samples.logprobs
            if self.reference is not None:
                own, device = self.reference.own, self.accelerator.device
                with self.phases("reference"), self.reference.model() as reference, at_hand(own, device=device):
                    ref_logprobs = token_logprobs(
                        reference, samples, temperature=temperature, batch_size=size, tokens=budget
                    )
                    check_logprobs(ref_logprobs, samples.mask, of="reference")
                    self._watch.look(self.reference, samples, temperature=temperature, precision=self.precision)
        check_values(values, samples.mask)
        values = values.masked_fill(~samples.mask, 0)
        return Rollout(samples, ref_logprobs, values, measured=self.reference is not None)

    def score(self, rollout: Rollout, rows: Sequence[Mapping]) -> Scored:
        """Scores each completion by the rewards. Each has its prompt's row of the data set."""
        texts, scored = self.decode_and_score(rollout, rows)
        self.remember(texts, rollout, scored)
        return scored

    def shape(self, scored: Scored, ended: Tensor) -> Tensor:
        """Centers, scales and clips scores, then corrects them for a missing end of sequence. Returns (B,)."""
        return shaped_scores(scored, ended, self.args, self.scores_seen)

    def estimate(self, rollout: Rollout, scored: Scored) -> Advantages:
        """Rewards, advantages and returns of a scored rollout, by token or with the completion as one action."""
        args, tokens = self.args, rollout.mask
        scores = self.shape(scored, rollout.samples.ended)
        beta = self.controller.kl_coef if args.kl_in == "reward" else 0.0
        estimator = args.kl_estimator if args.kl_in == "reward" else "k1"
        kl = F.kl_penalty(rollout.logprobs, rollout.ref_logprobs, estimator=estimator).masked_fill(~tokens, 0)
        kl = F.actions(kl, tokens, level=args.action_level)
        mask, values = tokens[:, : kl.shape[1]], rollout.values[:, : kl.shape[1]]
        dense = shaped_by_token(scored, rollout.samples.ended, args, self.scores_seen)
        dense = None if dense is None else F.actions(dense, tokens, level=args.action_level)
        left = scores if dense is None else F.terminal_remainder(scores, dense, mask)
        rewards = self.token_rewards(left, kl, mask, kl_coef=beta)
        rewards = rewards if dense is None else rewards + dense
        check_rewards(rewards, scores, kl, mask, kl_coef=beta)
        if args.whiten_rewards:
            rewards = F.whiten(rewards, mask, self.moments(rewards, mask), shift_mean=False)
        advantages, returns = F.gae(rewards, values, mask, gamma=args.gamma, lam=args.lam)
        if args.whiten_advantages:
            advantages = F.whiten(advantages, mask, self.moments(advantages, mask))
        return Advantages(scored, scores, -beta * kl.sum(1), rewards, values, advantages, returns, mask)

    def token_rewards(self, scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
        """r_t of each action, without what reward functions pay by token.

        An override may place a score elsewhere. It may not change what a completion is paid in all: that is checked.

        Args:
            scores: (B,), what is left of them to pay at the end.
            kl: (B, A) in nats.
            mask: (B, A).
            kl_coef: β.

        Returns:
            (B, A).
        """
        return F.token_rewards(scores, kl, mask, kl_coef=kl_coef)

    def update_from(self, model: nn.Module, rollout: Rollout, scored: Scored, rows: Tensor) -> dict[str, float]:
        """`update` from some rows of a rollout alone, as if no others had been sampled; no step where there is none."""
        if not len(rows):
            return {"loss": 0.0, "policy/epochs": 0.0}
        chosen = rollout.rows(rows)
        return self.update(model, chosen, self.estimate(chosen, scored.rows(rows, width=chosen.mask.shape[1])))

    def update(self, model: nn.Module, rollout: Rollout, estimates: Advantages) -> dict[str, float]:
        """Makes the optimizer steps of an update: epochs × minibatches. Returns means over all processes."""
        args = self.args
        model.train()
        shuffle = torch.Generator().manual_seed(args.seed * 1_000_003 + self.state.global_step)
        # A stream of its own, so that texts do not change how completions are shuffled.
        texts = torch.Generator().manual_seed(shuffle.initial_seed() << 12)
        progress = Progress(args.device)
        # The last batch of a pass over the prompts may hold fewer completions than there are minibatches.
        parts = min(args.num_mini_batches, len(rollout.samples))
        length = args.response_length if args.action_level == "token" else 1
        for _ in range(args.num_ppo_epochs):
            order = torch.randperm(len(rollout.samples), generator=shuffle, device="cpu").to(rollout.mask.device)
            for rows in torch.tensor_split(order, parts):
                mixed = self.texts.draw(len(rows), texts, args.device) if self.texts is not None else None
                self.minibatch(model, Minibatch.of(rollout, estimates, rows, length=length, texts=mixed), progress)
            drift = progress.end_epoch(self.total)
            # The factor of OpenAI's Spinning Up: the target may be passed, but not by much.
            if args.early_stop_kl is not None and drift > 1.5 * args.early_stop_kl:
                break
        self.check_weights()
        return progress.means(self.total)

    def minibatch(self, model: nn.Module, batch: Minibatch, progress: Progress) -> None:
        """Makes the gradients of this process's share of a minibatch, by micro-batch, and one optimizer step.

        Where a micro-batch does not fit the memory, all begin anew with half as many tokens, from then on. Several
        processes would have to agree on it, so there the error ends the run.

        Args:
            model: policy and critic, as they are wrapped for training.
            batch: the minibatch, of all processes.
            progress: gets what was measured.

        Raises:
            ZooError: a single row does not fit the memory.
        """
        before = copy.deepcopy(vars(progress))
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
            # The micro-batches that did fit are computed again, so what they added is taken back.
            vars(progress).update(copy.deepcopy(before))
            samples, end_to_end = batch.rollout.samples, self.args.padding_free
            largest = max(tokens_of(samples, rows, end_to_end=end_to_end) for rows in micro_batches)
            self.most_tokens = largest // 2
            log.warning("%d tokens do not fit the memory: %d in a micro-batch from here on.", largest, self.most_tokens)
        self.look(progress)
        if not progress.steps:
            check_ratio(progress.first_pass(self.total), precision=self.precision)
        progress.stepped(self.optimizer_step(model))

    def micro_batches(self, batch: Minibatch) -> list[Tensor]:
        """Splits a minibatch into what goes through the models at a time.

        Returns:
            This process's micro-batches, as places of rows within the minibatch; as many in every process, so some may
            be empty.
        """
        args = self.args
        return shares(
            batch.rollout.samples,
            size=len(batch) if args.max_tokens_per_micro_batch else args.per_device_train_batch_size,
            tokens=self.most_tokens,
            even=self.most_tokens != TOKENS_ON_CPU,  # whose sums keep the order that runs before had
            end_to_end=args.padding_free,
            process=args.process_index,
            processes=args.world_size,
        )

    def accumulate(
        self, model: nn.Module, batch: Minibatch, micro_batches: Sequence[Tensor], progress: Progress
    ) -> None:
        """Adds up the gradients of this process's share of a minibatch, micro-batch by micro-batch.

        Args:
            model: policy and critic, as they are wrapped for training.
            batch: the minibatch, of all processes.
            micro_batches: this process's, as `micro_batches` returns them.
            progress: gets what was measured.
        """
        args = self.args
        texts: list[TextBatch] = []
        if batch.texts is not None:
            texts = text_shares(
                batch.texts, parts=len(micro_batches), process=args.process_index, processes=args.world_size
            )
        for number, (rows, text) in enumerate(zip_longest(micro_batches, texts), start=1):
            # A process without a row left takes part for the sake of the others, and counts for nothing.
            counts = len(rows) > 0
            measured = progress if counts else Progress(args.device)
            micro_batch = batch.micro_batch(rows if counts else torch.zeros_like(batch.rows[:1]), text)
            # Processes exchange gradients once an optimizer step: with the last micro-batch.
            with self.accelerator.no_sync(model) if number < len(micro_batches) else nullcontext():
                with self.compute_loss_context_manager():
                    loss = self.loss(model, micro_batch, measured)
                if not counts:
                    loss = loss * 0
                    progress.add_names(measured)
                progress.add_loss(loss)
                # They average gradients, and the loss is a share of the whole minibatch's.
                self.accelerator.backward(loss * args.world_size)

    def loss(self, model: nn.Module, batch: Minibatch, progress: Progress) -> Tensor:
        """A micro-batch's share of the minibatch's loss.

        Args:
            model: policy and critic, as they are wrapped for training.
            batch: the micro-batch.
            progress: gets what was measured.

        Returns:
            The scalar. Those of all micro-batches and processes add up to the minibatch's loss.
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
            # In the forward pass, where it can be: the head then makes each chunk of the logits once.
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
        """Clips policy and critic apart (one joint norm lets a noisy critic shrink the policy's step), then steps.

        A step whose loss or norms are not finite is skipped, in all processes. Returns the norms before clipping.
        """
        actor, norms = self.actor, {}
        limit = self.args.max_grad_norm or math.inf
        # A shared trunk gets gradients by way of the critic, and must not move either.
        if self.warming_up:
            for parameter in actor.policy.parameters():
                parameter.grad = None
        for name, part in (("policy", actor.policy), ("critic", actor.value_model)):
            parameters = [p for p in part.parameters() if p.requires_grad]
            norms[name] = full(self.accelerator.clip_grad_norm_(parameters, limit)).detach()
        assert self.optimizer is not None
        self.guard.look(self.agreed({f"{name}'s gradient norm": norm for name, norm in norms.items()}))
        if self.guard.keep(step=self.state.global_step + 1, rate=self.args.learning_rate):
            self.optimizer.step()
        model.zero_grad()
        return norms

    # For a loop of one's own

    def generate(self, prompts: Sequence[Any], *, num_generations: int = 1) -> list[Tensor]:
        """Samples completions at the training temperature.

        Args:
            prompts: texts, conversations or token ids.
            num_generations: completions of each prompt.

        Returns:
            1-D tensors of token ids, those of a prompt beside each other, without the prompt and with the
            end-of-sequence token where there is one.

        Raises:
            ZooError: there are no prompts, or one cannot be sampled from.
        """
        self.prepare_loop()
        if isinstance(prompts, str):
            raise ZooError("generate() got one text: give a list of prompts.")
        if not len(prompts) or num_generations < 1:
            raise ZooError(
                f"generate() got {len(prompts)} prompts and num_generations {num_generations}: give at least 1 of each."
            )
        rows = [
            {
                PROMPT_TOKENS: prompt_row(prompt, row, self),
                PROMPT_INDEX: self.index_here(self._generated + row),
                GENERATION: n,
            }
            for row, prompt in enumerate(prompts)
            for n in range(num_generations)
        ]
        self._generated += len(prompts)
        rollout = self.rollout(rows, stream=LOOP_STREAM)
        device = rollout.mask.device
        return [torch.tensor(ids, device=device) for ids in rollout.samples.token_lists()]

    def step(self, queries: Sequence[Any], responses: Sequence[Any], scores: Sequence[Any]) -> dict[str, float]:
        """Makes one PPO update from completions and scores of one's own: the same update that `train` makes.

        Args:
            queries: B texts or lists of token ids.
            responses: B texts or lists of token ids.
            scores: B numbers.

        Returns:
            This update's metrics, by the names of docs/metrics.md.

        Raises:
            ZooError: counts differ, a response is empty, or a score is not finite.
        """
        model = self.prepare_loop()
        samples = given_samples(queries, responses, self)
        rollout = self.evaluated(samples, recompute=True)
        self.learn(model, *self.gather_rollouts(rollout, given_scored(scores, samples)))
        self._metrics.clear()  # the caller has them: no log line of Trainer's will
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.state.global_step += 1
        return self.last_metrics
