"""Rollouts of the policy in training: sampled completions with log-probabilities, values and scores."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..modeling.batches import split_batches
from ..modeling.fsdp import unsharded
from ..modeling.logprobs import token_logprobs
from ..modeling.reserved_columns import GENERATION_INDEX, PROMPT_INDEX, PROMPT_TOKENS
from ..modeling.sampling.sampler import Samples, SamplingRequest
from ..rewards import RewardScores
from .base import EVAL_STREAM, BasePPOTrainer
from .guards import check_ends, check_logprobs, check_values
from .offload import on_device
from .rollout import Rollout


class RolloutTrainer(BasePPOTrainer):
    """Adds sampling, for training, evaluation and custom training loops, and scoring with the rewards."""

    @torch.no_grad()
    def rollout(self, rows: Sequence[Mapping], *, stream: int) -> Rollout:
        """Samples a completion for each row, with log π, log π_ref and V of its tokens.

        With the native engine, each row's random numbers depend only on the seed and on (stream, update, prompt index,
        completion index), so the samples do not depend on the batch size, the number of processes, or resuming.

        Args:
            rows: Prompts, with their token ids and their index in the data set.
            stream: The random stream: TRAIN_STREAM, EVAL_STREAM or CUSTOM_LOOP_STREAM, which share no random numbers.

        Raises:
            NotFinite: A log-probability or a value is not finite.
        """
        args, actor = self.args, self.actor
        actor.eval()
        # Each evaluation samples with the same random numbers, so only the policy can change its results.
        step = 0 if stream == EVAL_STREAM else self.state.global_step
        keys = [(stream, step, row[PROMPT_INDEX], row.get(GENERATION_INDEX, 0)) for row in rows]
        with self.accelerator.autocast(), unsharded(actor.policy):
            request = SamplingRequest(
                [row[PROMPT_TOKENS] for row in rows],
                keys=keys,
                seed=args.seed,
                max_new_tokens=args.response_length,
                stop_ids=self.stop_ids,
                pad_id=self.padding_id,
                temperature=args.temperature,
                vocabulary=self.vocabulary,
                max_tokens=args.max_rollout_batch_tokens,
                critic=actor.values_from_states if actor.shares_trunk and not args.recompute_logprobs else None,
            )
            samples = self.engine(actor.policy, request)
        check_ends(samples, self.stop_ids)
        samples = args.truncation(samples, self.processing_class, seed=args.seed, keys=keys)
        if args.rollout_engine == "native":
            return self.make_rollout(samples, recompute_logprobs=args.recompute_logprobs)
        # Another engine's log-probabilities differ from those of our forward pass, so recompute log π_old.
        rollout = self.make_rollout(samples, recompute_logprobs=True)
        return replace(rollout, engine_logprobs=samples.logprobs)

    @torch.no_grad()
    def make_rollout(self, samples: Samples, *, recompute_logprobs: bool) -> Rollout:
        """Adds log π_ref to samples, and V unless sampling has already computed it.

        Args:
            samples: B completions.
            recompute_logprobs: Whether a forward pass computes log π_old and V, even if the samples have them. If not,
                log π_old is the sampler's.

        Raises:
            NotFinite: A log-probability or a value is not finite.
        """
        args, actor = self.args, self.actor
        actor.eval()
        temperature, max_tokens = args.temperature, self.max_tokens_per_pass
        batch_size = args.local_rollout_forward_batch_size
        batching: Any = {"max_rows": batch_size, "max_tokens": max_tokens, "packed": args.padding_free}
        sampled_values = None if recompute_logprobs else samples.values
        samples = replace(samples, values=None)
        logprobs, values = (torch.zeros_like(samples.logprobs) for _ in range(2))
        with self.accelerator.autocast():
            policy = actor.policy if recompute_logprobs or actor.shares_trunk else None
            critic = None if actor.shares_trunk else actor.value_model
            with self.phases("values"), unsharded(policy, critic):
                for indices in split_batches(samples, **batching) if sampled_values is None else ():
                    batch = samples.select(indices)
                    batch_entries = indices, slice(batch.mask.shape[1])
                    if recompute_logprobs:
                        output = actor(batch, temperature)
                        logprobs[batch_entries], values[batch_entries] = output.logprobs, output.values
                    else:
                        values[batch_entries] = actor.values(batch)
            if recompute_logprobs:
                samples = replace(samples, logprobs=logprobs)
            values = values if sampled_values is None else sampled_values
            check_logprobs(samples.logprobs, samples.mask, subject="policy")
            # Without a reference every KL term is 0.
            ref_logprobs = samples.logprobs
            if self.reference is not None:
                separate_reference, device = self.reference.separate_model, self.accelerator.device
                with (
                    self.phases("reference"),
                    self.reference.model() as reference,
                    on_device(separate_reference, device=device),
                ):
                    ref_logprobs = token_logprobs(
                        reference, samples, temperature=temperature, batch_size=batch_size, max_tokens=max_tokens
                    )
                    check_logprobs(ref_logprobs, samples.mask, subject="reference")
                    self._reference_watch.check(
                        self.reference, samples, temperature=temperature, precision=self.precision
                    )
        check_values(values, samples.mask)
        values = values.masked_fill(~samples.mask, 0)
        return Rollout(samples, ref_logprobs, values, has_reference=self.reference is not None)

    def score(self, rollout: Rollout, rows: Sequence[Mapping]) -> RewardScores:
        """Scores each completion with the rewards.

        Args:
            rollout: B completions.
            rows: One data-set row for each completion, the row of its prompt.
        """
        decoded, reward_scores = self.decode_and_score(rollout, rows)
        self.keep_completions_table(decoded, rollout, reward_scores)
        return reward_scores
