"""The loss of PPO on one micro-batch, from what the models say now and what the rollout holds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import functional as F
from .actor_critic import ActorCriticOutput
from .config import PPOConfig
from .minibatch import Minibatch, MinibatchSize

# |log ρ|: until the first optimizer step it is what the sampler and the training pass disagree by.
FIRST_PASS = "policy/logprob_mismatch"
# What is averaged over tokens also where the whole completion is one action.
PER_TOKEN = ("policy/approxkl", "objective/entropy", FIRST_PASS)


@dataclass(frozen=True)
class PolicyLoss:
    """A micro-batch's share of L_π + β·KL_loss − c_e·H, each term where it is on.

    Attributes:
        args: the coefficients, clips and estimators.
        batch: the micro-batch.
        kl_coef: β.

    Source: arXiv:1707.06347, equations 7 and 9; arXiv:1909.08593, section 2.
    """

    args: PPOConfig
    batch: Minibatch
    kl_coef: float

    @property
    def by_token(self) -> bool:
        """Whether each token's share depends on its own log π and entropy alone.

        Only then can the head's forward pass make the gradients, chunk by chunk, and the logits are made once. The
        ratio of a completion is of all its tokens, and an exact KL of the whole vocabulary.
        """
        exact = self.args.kl_in == "loss" and self.args.kl_estimator == "full"
        return not exact and self.args.action_level == "token"

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, exact_kl: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and its terms before they are averaged.

        Args:
            logprobs: (b, T) in nats, log π of the response tokens at the sampling temperature.
            entropy: (b, T) in nats.
            exact_kl: (b, T) in nats, to the reference; used by kl_estimator "full" alone.

        Returns:
            The scalar, and its terms by the metrics' names: (b, T) for the names in PER_TOKEN, (b, A) for the others.
        """
        args, rollout, estimates, size = self.args, self.batch.rollout, self.batch.estimates, self.batch.size
        samples, level, mask = rollout.samples, args.action_level, estimates.mask
        # Against log π_old = 0, so that a completion's ratio is a sum of small differences, not a difference of large
        # sums.
        new = F.actions(logprobs - samples.logprobs, samples.mask, level=level)
        old = torch.zeros_like(new)
        policy_loss, clipped = F.clipped_policy_loss(
            new,
            old,
            estimates.advantages,
            cliprange=args.cliprange if level == "token" else args.cliprange_sequence,
            cliprange_high=args.cliprange_high,
            dual_clip=args.dual_clip,
        )
        if args.importance_sampling_cap is not None and rollout.engine_logprobs is not None:
            policy_loss = policy_loss * F.importance_weights(
                samples.logprobs,
                rollout.engine_logprobs,
                samples.mask,
                cap=args.importance_sampling_cap,
                level=level,
            )
        # By token also where the completion is the action, so that metrics of different runs can be compared.
        log_ratio = (logprobs - samples.logprobs).detach()
        terms = {
            "loss/policy": policy_loss,
            "objective/entropy": entropy,
            "policy/clipfrac": clipped.float(),
            "policy/approxkl": torch.expm1(log_ratio) - log_ratio,
            "policy/ratio": new.exp(),
            FIRST_PASS: log_ratio.abs(),
        }
        loss = _share(policy_loss, mask, size, args.loss_aggregation)
        if args.entropy_coef:
            bonus = F.actions(entropy, samples.mask, level=level)
            loss = loss - args.entropy_coef * _share(bonus, mask, size, args.loss_aggregation)
        if args.kl_in == "loss":
            # Measured from log π_old too, like the new log-probabilities.
            ref = F.actions(rollout.ref_logprobs - samples.logprobs, samples.mask, level=level)
            terms["loss/kl"] = (
                F.kl_loss(new, old, ref, estimator=args.kl_estimator)
                if exact_kl is None
                else F.actions(exact_kl, samples.mask, level=level)
            )
            loss = loss + self.kl_coef * _share(terms["loss/kl"], mask, size, args.loss_aggregation)
        return loss, terms


def micro_batch_loss(
    policy_loss: PolicyLoss, output: ActorCriticOutput, *, critic_only: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of L = L_π + c_v·L_V + β·KL_loss − c_e·H; each term where it is on.

    Args:
        policy_loss: of the policy, with the micro-batch and the settings.
        output: of the models in training. Where it holds the policy's loss already, that is taken.
        critic_only: whether L_V alone is returned, as while the critic warms up.

    Returns:
        The scalar, and its terms by the metrics' names, without gradients: (b, T) for the names in PER_TOKEN, (b, A)
        for the others.
    """
    args, estimates, size = policy_loss.args, policy_loss.batch.estimates, policy_loss.batch.size
    mask = estimates.mask
    if output.policy_loss is None or output.policy_terms is None:
        loss_of_policy, terms = policy_loss(output.logprobs, output.entropy, output.exact_kl)
    else:
        loss_of_policy, terms = output.policy_loss, dict(output.policy_terms)
    value_loss, value_clipped = F.clipped_value_loss(
        output.values[:, : mask.shape[1]], estimates.values, estimates.returns, cliprange=args.cliprange_value
    )
    terms |= {"loss/value": value_loss, "value/clipfrac": value_clipped.float()}
    loss = args.vf_coef * _share(value_loss, mask, size, args.loss_aggregation)
    if not critic_only:
        loss = loss + loss_of_policy
    return loss, {name: term.detach() for name, term in terms.items()}


def _share(loss: Tensor, mask: Tensor, size: MinibatchSize, mode: str) -> Tensor:
    return F.aggregate(loss, mask, tokens=size.actions, sequences=size.sequences, length=size.length, mode=mode)
