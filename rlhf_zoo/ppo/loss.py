"""The loss of PPO on one micro-batch, from what the models said and what the rollout holds."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import functional as F
from ..actor_critic import Said
from .config import PPOConfig
from .rollout import Advantages, MinibatchSize, Rollout

__all__ = ["FIRST_PASS", "PER_TOKEN", "micro_batch_loss"]

# |log ρ|: until the first optimizer step it is what the sampler and the training pass disagree by.
FIRST_PASS = "policy/logprob_mismatch"
# What is averaged over tokens also where the whole completion is one action.
PER_TOKEN = ("policy/approxkl", "objective/entropy", FIRST_PASS)


def micro_batch_loss(
    args: PPOConfig,
    said: Said,
    rollout: Rollout,
    estimates: Advantages,
    size: MinibatchSize,
    *,
    kl_coef: float,
    critic_only: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of L = L_π + c_v·L_V + β·KL_loss − c_e·H; its terms are given where they are on.

    said: by the models in training. critic_only leaves L_V alone. Returns the scalar, and what was seen by name: (b, T)
    for the names in PER_TOKEN, (b, A) for the others.
    """
    samples, level, mask = rollout.samples, args.action_level, estimates.mask
    # Against log π_old = 0, so that a completion's ratio is a sum of small differences, not a difference of large sums.
    new = F.actions(said.logprobs - samples.logprobs, samples.mask, level=level)
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
    value_loss, value_clipped = F.clipped_value_loss(
        said.values[:, : mask.shape[1]], estimates.values, estimates.returns, cliprange=args.cliprange_value
    )
    seen = {"loss/policy": policy_loss, "loss/value": value_loss, "objective/entropy": said.entropy}
    terms = {"loss/value": args.vf_coef}
    if not critic_only:
        terms |= {"loss/policy": 1.0, "objective/entropy": -args.entropy_coef}
    if args.kl_in == "loss":
        ref = F.actions(rollout.ref_logprobs - samples.logprobs, samples.mask, level=level)
        seen["loss/kl"] = (
            F.kl_loss(new, old, ref, estimator=args.kl_estimator)
            if said.exact_kl is None
            else F.actions(said.exact_kl, samples.mask, level=level)
        )
        terms["loss/kl"] = 0.0 if critic_only else kl_coef
    loss = torch.zeros((), device=mask.device)
    for name, weight in terms.items():
        if weight:
            term = F.actions(seen[name], samples.mask, level=level) if name in PER_TOKEN else seen[name]
            loss = loss + weight * _share(term, mask, size, args.loss_aggregation)
    log_ratio = (said.logprobs - samples.logprobs).detach()
    seen |= {
        "policy/clipfrac": clipped.float(),
        "value/clipfrac": value_clipped.float(),
        "policy/approxkl": torch.expm1(log_ratio) - log_ratio,
        "policy/ratio": (new - old).exp(),
        FIRST_PASS: log_ratio.abs(),
    }
    return loss, {name: each.detach() for name, each in seen.items()}


def _share(loss: Tensor, mask: Tensor, size: MinibatchSize, mode: str) -> Tensor:
    return F.aggregate(loss, mask, tokens=size.actions, sequences=size.sequences, length=size.length, mode=mode)
