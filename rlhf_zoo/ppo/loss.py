"""The loss of PPO on one micro-batch, from the models' outputs and the rollout."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import functional as F
from .actor_critic import ActorCriticOutput
from .config import PPOConfig
from .minibatch import Minibatch, MinibatchSize

#: |log ρ|. Before the first optimizer step it is the mismatch between the sampler and the training pass.
LOGPROB_MISMATCH = "policy/logprob_mismatch"
#: Names of the terms that are averaged over tokens even if the completion is one action.
PER_TOKEN_TERMS = ("policy/approxkl", "objective/entropy", LOGPROB_MISMATCH)


@dataclass(frozen=True)
class PolicyLoss:
    """A micro-batch's share of L_π + β·KL_loss − c_e·H, without terms that are switched off.

    Attributes:
        args: The coefficients, clips and estimators.
        batch: The micro-batch.
        kl_coef: β.

    Source: arXiv:1707.06347, equations 7 and 9; arXiv:1909.08593, section 2.
    """

    args: PPOConfig
    batch: Minibatch
    kl_coef: float

    @property
    def is_separable_per_token(self) -> bool:
        """Whether the loss of a token depends only on its own log π and entropy.

        If so, the head's forward pass can compute the gradients chunk by chunk, and logits are computed only once. The
        ratio of a completion depends on all of its tokens, and an exact KL depends on the whole vocabulary.
        """
        uses_exact_kl = self.args.kl_in == "loss" and self.args.kl_estimator == "full"
        return not uses_exact_kl and self.args.action_level == "token"

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, exact_kl: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss, and the terms of the metrics before they are averaged.

        Args:
            logprobs: (b, T) in nats, log π of the response tokens at the sampling temperature.
            entropy: (b, T) in nats.
            exact_kl: (b, T) in nats, to the reference; None unless kl_estimator is "full".

        Returns:
            The scalar loss, and its terms by the metrics' names: (b, T) for the names in PER_TOKEN_TERMS, (b, A) for
            the others.
        """
        args, rollout, advantages, size = self.args, self.batch.rollout, self.batch.advantages, self.batch.size
        samples, level, mask = rollout.samples, args.action_level, advantages.mask
        # All log-probabilities are relative to log π_old, which is therefore 0. The log-ratio of a completion is then a
        # sum of small differences. A difference of large sums would lose precision.
        new_logprobs = F.sum_per_action(logprobs - samples.logprobs, samples.mask, level=level)
        old_logprobs = torch.zeros_like(new_logprobs)
        policy_loss, is_clipped = F.clipped_policy_loss(
            new_logprobs,
            old_logprobs,
            advantages.advantages,
            cliprange=args.cliprange if level == "token" else args.cliprange_sequence,
            cliprange_high=args.cliprange_high,
            dual_clip=args.dual_clip,
        )
        if args.importance_sampling_cap is not None and rollout.engine_logprobs is not None:
            policy_loss = policy_loss * F.importance_weights(
                samples.logprobs, rollout.engine_logprobs, samples.mask, cap=args.importance_sampling_cap, level=level
            )
        # Compute this per token even if the completion is one action, so that metrics of different runs are comparable.
        log_ratio = (logprobs - samples.logprobs).detach()
        terms = {
            "loss/policy": policy_loss,
            "objective/entropy": entropy,
            "policy/clipfrac": is_clipped.float(),
            "policy/approxkl": F.kl_penalty(samples.logprobs, logprobs.detach(), estimator="k3"),  # of KL(π_old ‖ π)
            "policy/ratio": new_logprobs.exp(),
            LOGPROB_MISMATCH: log_ratio.abs(),
        }
        loss = _share(policy_loss, mask, size, args.loss_aggregation)
        if args.entropy_coef:
            action_entropy = F.sum_per_action(entropy, samples.mask, level=level)
            loss = loss - args.entropy_coef * _share(action_entropy, mask, size, args.loss_aggregation)
        if args.kl_in == "loss":
            ref_logprobs = F.sum_per_action(rollout.ref_logprobs - samples.logprobs, samples.mask, level=level)
            terms["loss/kl"] = (
                F.kl_loss(new_logprobs, old_logprobs, ref_logprobs, estimator=args.kl_estimator)
                if exact_kl is None
                else F.sum_per_action(exact_kl, samples.mask, level=level)
            )
            loss = loss + self.kl_coef * _share(terms["loss/kl"], mask, size, args.loss_aggregation)
        return loss, terms


def micro_batch_loss(
    policy_loss: PolicyLoss, output: ActorCriticOutput, *, critic_only: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes a micro-batch's share of L = L_π + c_v·L_V + β·KL_loss − c_e·H, without terms that are switched off.

    Args:
        policy_loss: The policy's loss, with the micro-batch and the settings.
        output: The outputs of policy and critic. If they include the policy's loss, that loss is used.
        critic_only: Whether to return L_V alone, as during critic warm-up.

    Returns:
        The scalar loss, and its terms by the metrics' names, without gradients: (b, T) for the names in
        PER_TOKEN_TERMS, (b, A) for the others.
    """
    args, advantages, size = policy_loss.args, policy_loss.batch.advantages, policy_loss.batch.size
    mask = advantages.mask
    if output.policy_loss is None or output.policy_terms is None:
        actor_loss, terms = policy_loss(output.logprobs, output.entropy, output.exact_kl)
    else:
        actor_loss, terms = output.policy_loss, dict(output.policy_terms)
    value_loss, is_clipped = F.clipped_value_loss(
        output.values[:, : mask.shape[1]], advantages.values, advantages.returns, cliprange=args.cliprange_value
    )
    terms |= {"loss/value": value_loss, "value/clipfrac": is_clipped.float()}
    # The shares of all micro-batches add up to the minibatch's mean, so gradients do not depend on the split.
    loss = args.vf_coef * _share(value_loss, mask, size, args.loss_aggregation)
    if not critic_only:
        loss = loss + actor_loss
    return loss, {name: term.detach() for name, term in terms.items()}


def _share(loss: Tensor, mask: Tensor, size: MinibatchSize, mode: str) -> Tensor:
    return F.aggregate(
        loss, mask, token_count=size.actions, sequence_count=size.sequences, max_length=size.max_actions, mode=mode
    )
