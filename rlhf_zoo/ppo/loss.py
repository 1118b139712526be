"""The loss of PPO on one micro-batch, from what the models said and what the rollout holds."""

import torch
from torch import Tensor

from .. import functional as F
from ..modeling.logprobs import TokenLoss
from .actor_critic import ActorCriticOutput
from .config import PPOConfig
from .rollout import Advantages, MinibatchSize, Rollout

# |log ρ|: until the first optimizer step it is what the sampler and the training pass disagree by.
FIRST_PASS = "policy/logprob_mismatch"
# What is averaged over tokens also where the whole completion is one action.
PER_TOKEN = ("policy/approxkl", "objective/entropy", FIRST_PASS)


def policy_terms(
    args: PPOConfig,
    logprobs: Tensor,
    entropy: Tensor,
    rollout: Rollout,
    estimates: Advantages,
    size: MinibatchSize,
    *,
    kl_coef: float,
    exact_kl: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of L_π + β·KL_loss − c_e·H, each term where it is on. logprobs, entropy: (b, T)."""
    samples, level, mask = rollout.samples, args.action_level, estimates.mask
    # Against log π_old = 0, so that a completion's ratio is a sum of small differences, not a difference of large sums.
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
    log_ratio = (logprobs - samples.logprobs).detach()
    seen = {
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
        ref = F.actions(rollout.ref_logprobs - samples.logprobs, samples.mask, level=level)
        seen["loss/kl"] = (
            F.kl_loss(new, old, ref, estimator=args.kl_estimator)
            if exact_kl is None
            else F.actions(exact_kl, samples.mask, level=level)
        )
        loss = loss + kl_coef * _share(seen["loss/kl"], mask, size, args.loss_aggregation)
    return loss, seen


def token_loss(
    args: PPOConfig, rollout: Rollout, estimates: Advantages, size: MinibatchSize, *, kl_coef: float
) -> TokenLoss | None:
    """`policy_terms` as the chunked head takes it; None where a token's share hangs on more than its own log π."""
    exact = args.kl_in == "loss" and args.kl_estimator == "full"
    if exact or args.action_level == "sequence":
        return None

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return policy_terms(args, logprobs, entropy, rollout, estimates, size, kl_coef=kl_coef)[0]

    return loss


def micro_batch_loss(
    args: PPOConfig,
    said: ActorCriticOutput,
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
    mask = estimates.mask
    of_policy, seen = policy_terms(
        args, said.logprobs, said.entropy, rollout, estimates, size, kl_coef=kl_coef, exact_kl=said.exact_kl
    )
    value_loss, value_clipped = F.clipped_value_loss(
        said.values[:, : mask.shape[1]], estimates.values, estimates.returns, cliprange=args.cliprange_value
    )
    seen |= {"loss/value": value_loss, "value/clipfrac": value_clipped.float()}
    loss = args.vf_coef * _share(value_loss, mask, size, args.loss_aggregation)
    if not critic_only:
        loss = loss + (of_policy if said.policy_loss is None else said.policy_loss)
    return loss, {name: each.detach() for name, each in seen.items()}


def _share(loss: Tensor, mask: Tensor, size: MinibatchSize, mode: str) -> Tensor:
    return F.aggregate(loss, mask, tokens=size.actions, sequences=size.sequences, length=size.length, mode=mode)
