"""Traces one completion token by token: log-probabilities, KL, rewards, values, advantages and ratios."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import functional as F
from ..errors import ZooError
from ..modeling.alignment import IncrementalDetokenizer
from ..modeling.chat import tokenize_prompt, wrap_prompt
from ..modeling.chat_template import Prompt
from ..modeling.logprobs import token_logprobs
from ..modeling.models import context_length_of, disable_dropout
from ..modeling.reserved_columns import PROMPT_TOKENS
from ..modeling.sampling.sampler import Samples, Vocabulary, sample
from ..modeling.value_head import ValueHead
from ..rewards import Rewards
from .actor_critic import ActorCritic
from .completions import decode_rows
from .config import PPOConfig
from .kl_controller import RunningScores
from .rollout import shape_reward_scores, shape_token_scores
from .token_checks import TokenConsumer, check_ids

#: The first part of a traced completion's random key.
TRACE_STREAM = 8
#: The fields of a trace that are copied from PPOConfig.
CONFIG_FIELDS = ("kl_in", "kl_estimator", "action_level", "gamma", "lam", "temperature")


@dataclass(frozen=True)
class TracedToken:
    """A sampled token with its log-probabilities, reward, value and advantage.

    If the completion is one action, its reward, value, delta, advantage and `clipped` are on the last token, and the
    other tokens have None. No number is whitened.

    Attributes:
        token: The token's text.
        token_id: The token's id.
        logprob, ref_logprob: log π and log π_ref, in nats.
        kl: k1 = log π − log π_ref, in nats.
        reward: r, the reward of the token's action.
        value: V of the state before the token's action.
        delta: δ = r + γV' − V.
        advantage: Â.
        ratio: ρ = π/π_old.
        clipped: Whether clipping sets this token's gradient to 0, given ρ and the sign of Â.
    """

    token: str
    token_id: int
    logprob: float
    ref_logprob: float
    kl: float
    reward: float | None
    value: float | None
    delta: float | None
    advantage: float | None
    ratio: float
    clipped: bool | None


@dataclass(frozen=True)
class Trace:
    """A completion, its tokens and its totals.

    Attributes:
        prompt: A text or a conversation.
        completion: The completion's text.
        tokens: The completion's tokens.
        scores: {name of a reward: score}; the score is None if the reward does not apply.
        score: The weighted sum of the scores that are not None.
        shaped_score: `score`, centered, scaled, clipped and corrected for a missing end, as in training.
        kl: Σ k1 in nats.
        kl_coef: β.
        kl_in: Where the KL penalty goes, "reward" or "loss".
        kl_estimator: As in PPOConfig.
        ratio: ∏ρ.
        cliprange: The lower and the upper bound of ρ, such as (0.8, 1.2).
        action_level, gamma, lam, temperature: As in PPOConfig.
        ended: Whether the completion ended by itself.
        length: The number of tokens in the completion.
        seed: The random seed of the sampling.
        max_new_tokens: The maximum number of tokens in a completion.
        whitening: Sentences about steps of training that need several completions, which are whitening and centering
            by prompt; "" if there are none.
    """

    prompt: Prompt
    completion: str
    tokens: tuple[TracedToken, ...]
    scores: Mapping[str, float | None]
    score: float
    shaped_score: float
    kl: float
    kl_coef: float
    kl_in: str
    kl_estimator: str
    ratio: float
    cliprange: tuple[float, float]
    action_level: str
    gamma: float
    lam: float
    ended: bool
    length: int
    seed: int
    temperature: float
    max_new_tokens: int
    whitening: str

    def to_json(self) -> dict[str, Any]:
        """Returns {prompt, completion, tokens, totals} as JSON types."""
        totals = asdict(self)
        fields = {name: totals.pop(name) for name in ("prompt", "completion", "tokens")}
        return {**fields, "tokens": list(fields["tokens"]), "totals": {**totals, "cliprange": list(self.cliprange)}}


@torch.no_grad()
def trace(
    prompt: Prompt,
    *,
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    critic: PreTrainedModel | ValueHead,
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    old: PreTrainedModel | None = None,
    kl_coef: float | None = None,
    running_scores: RunningScores | None = None,
    columns: Mapping[str, Any] | None = None,
    seed: int = 1,
) -> Trace:
    """Samples one completion from the policy, and computes the numbers of PPO for each of its tokens.

    Random numbers depend only on (seed, TRACE_STREAM, position). Log-probabilities come from forward passes over the
    same tokens at args.temperature, so equal models give exactly k1 = 0 and ρ = 1. Dropout is turned off in all models.

    Args:
        prompt: A text or a conversation.
        policy: The policy, which samples the completion.
        reference: The reference for KL.
        critic: The critic, which computes V.
        rewards: The rewards, which score the completion.
        tokenizer: The policy's tokenizer.
        args: The settings of the training.
        old: The policy in the denominator of ρ; None for the reference.
        kl_coef: β; None for args.kl_coef.
        running_scores: The running statistics for centering and scaling; None if there are no scores yet.
        columns: The prompt's other columns, for reward functions.
        seed: The random seed of the sampling.

    Raises:
        ZooError: The prompt cannot be sampled from, or the temperature is not a positive number.
    """
    if not 0 < args.temperature < math.inf:
        raise ZooError(f"The temperature is {args.temperature}: set it to a positive number.")
    actor_critic = ActorCritic(policy, critic).eval()
    for model in filter(None, (reference, old)):
        disable_dropout(model)
        model.eval()
    prompt = wrap_prompt(prompt, tokenizer)
    prompt_ids = _encode_prompt(prompt, policy, tokenizer, args.response_length)
    samples = _sample_completion(prompt_ids, policy, tokenizer, args, seed)
    logprobs, ref_logprobs, old_logprobs = (
        token_logprobs(model, samples, temperature=args.temperature) for model in (policy, reference, old or reference)
    )
    decoded = decode_rows(tokenizer, samples, [{**(columns or {}), "prompt": prompt, PROMPT_TOKENS: prompt_ids}])
    reward_scores = rewards(samples, decoded.prompts, decoded.completions, decoded.texts, decoded.columns)
    shaping = (reward_scores, samples.ended, args, running_scores or RunningScores())
    completion_scores, token_scores = shape_reward_scores(*shaping), shape_token_scores(*shaping)
    beta = args.kl_coef if kl_coef is None else kl_coef
    values = actor_critic.values(samples)
    action_columns = _action_columns(
        logprobs, ref_logprobs, completion_scores, token_scores, values, samples.mask, args, beta
    )
    action_columns["clipped"] = _find_clipped(logprobs, old_logprobs, action_columns["advantage"], samples.mask, args)
    token_columns = _token_columns(samples, logprobs, ref_logprobs, old_logprobs)
    tokens, completion = _traced_tokens(tokenizer, prompt_ids, token_columns, action_columns)
    scores = dict(zip(rewards.names, reward_scores.per_reward[0].tolist(), strict=True))
    return Trace(
        prompt=prompt,
        completion=completion,
        tokens=tokens,
        scores={name: None if math.isnan(score) else score for name, score in scores.items()},
        score=float(reward_scores.total[0]),
        shaped_score=float(completion_scores[0]),
        kl=math.fsum(token.kl for token in tokens),
        kl_coef=beta,
        ratio=float((logprobs - old_logprobs).sum().exp()),
        cliprange=_ratio_bounds(args),
        ended=bool(samples.ended[0]),
        length=len(tokens),
        seed=seed,
        **{name: getattr(args, name) for name in CONFIG_FIELDS},
        max_new_tokens=args.response_length,
        whitening=_describe_missing_steps(args),
    )


def _sample_completion(
    prompt_ids: list[int], policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: PPOConfig, seed: int
) -> Samples:
    """Samples one completion as training does."""
    keys = [(TRACE_STREAM,)]
    samples = sample(
        policy,
        [prompt_ids],
        keys=keys,
        seed=seed,
        max_new_tokens=args.response_length,
        stop_ids=args.stop_ids(tokenizer, policy),
        pad_id=0,  # not used, because a single row is not padded
        temperature=args.temperature,
        vocabulary=Vocabulary.of(tokenizer, policy),
    )
    return args.truncation(samples, tokenizer, seed=seed, keys=keys)


def _action_columns(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    token_scores: Tensor | None,
    values: Tensor,
    mask: Tensor,
    args: PPOConfig,
    kl_coef: float,
) -> dict[str, Tensor]:
    """Computes rewards, values, δ and advantages of A actions, (1, A), like `compute_advantages` without whitening."""
    level, kl_in_reward = args.action_level, args.kl_in == "reward"
    # If the KL is in the loss, β is 0 below, and cancels the KL, whatever its estimator.
    kl = F.kl_penalty(logprobs, ref_logprobs, estimator=args.kl_estimator if kl_in_reward else "k1")
    kl = F.sum_per_action(kl, mask, level=level)
    width = kl.shape[1]
    values, action_mask = values[:, :width], mask[:, :width]
    token_scores = None if token_scores is None else F.sum_per_action(token_scores, mask, level=level)
    terminal_scores = scores if token_scores is None else F.terminal_remainder(scores, token_scores, action_mask)
    rewards = F.token_rewards(terminal_scores, kl, action_mask, kl_coef=kl_coef if kl_in_reward else 0.0)
    rewards = rewards if token_scores is None else rewards + token_scores
    # With λ = 0 the generalized advantage is δ itself.
    deltas, _ = F.gae(rewards, values, action_mask, gamma=args.gamma, lam=0.0)
    advantages, _ = F.gae(rewards, values, action_mask, gamma=args.gamma, lam=args.lam)
    return {"reward": rewards, "value": values, "delta": deltas, "advantage": advantages}


def _token_columns(samples: Samples, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> dict[str, Tensor]:
    """Collects the numbers of each token, (1, T) each, which do not depend on action_level."""
    return {
        "token_id": samples.completion_ids,
        "logprob": logprobs,
        "ref_logprob": ref_logprobs,
        "kl": logprobs - ref_logprobs,
        "ratio": (logprobs - old_logprobs).exp(),
    }


def _cliprange(args: PPOConfig) -> float:
    return args.cliprange if args.action_level == "token" else args.cliprange_sequence


def _ratio_bounds(args: PPOConfig) -> tuple[float, float]:
    cliprange = _cliprange(args)
    return 1 - cliprange, 1 + (cliprange if args.cliprange_high is None else args.cliprange_high)


def _find_clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, args: PPOConfig) -> Tensor:
    """Returns whether clipping sets the gradient of each action to 0, (1, A) bool."""
    _, is_clipped = F.clipped_policy_loss(
        F.sum_per_action(logprobs, mask, level=args.action_level),
        F.sum_per_action(old_logprobs, mask, level=args.action_level),
        advantages,
        cliprange=_cliprange(args),
        cliprange_high=args.cliprange_high,
        dual_clip=args.dual_clip,
    )
    return is_clipped


def _traced_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    token_columns: Mapping[str, Tensor],
    action_columns: Mapping[str, Tensor],
) -> tuple[tuple[TracedToken, ...], str]:
    """Returns the traced tokens and the completion's text.

    Decodes the completion together with the prompt, because its first characters may depend on the prompt.
    """
    width = next(iter(action_columns.values())).shape[1]
    padding: list[None] = [None] * (token_columns["token_id"].shape[1] - width)
    columns = {
        **{name: column[0].tolist() for name, column in token_columns.items()},
        **{name: padding + column[0].tolist() for name, column in action_columns.items()},
    }
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
    for token_id in columns["token_id"]:
        detokenizer.add(token_id)
    completion = detokenizer.finish()
    tokens = tuple(
        TracedToken(token=piece, **dict(zip(columns, row, strict=True)))
        for piece, row in zip(detokenizer.by_token, zip(*columns.values(), strict=True), strict=True)
    )
    return tokens, completion


def _encode_prompt(
    prompt: Prompt, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> list[int]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ZooError("The prompt is empty: enter a text.")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ZooError("The prompt has half a character (a lone surrogate): remove it.") from error
    ids = tokenize_prompt(prompt, tokenizer)
    if not ids:
        raise ZooError("The tokenizer has no token for this prompt: write other characters.")
    context_length = context_length_of(policy)
    if context_length is not None and len(ids) + max_new_tokens > context_length:
        raise ZooError(
            f"The prompt has {len(ids)} tokens, and with {max_new_tokens} new tokens it exceeds the context of "
            f"{context_length}: shorten the prompt or request fewer new tokens."
        )
    check_ids([ids], TokenConsumer.of(policy))
    return ids


def _describe_missing_steps(args: PPOConfig) -> str:
    """Describes the steps of training that a trace lacks, because they need several completions."""
    sentences = []
    if args.score_centering == "prompt":
        sentences.append(
            "Training subtracts the mean score of the prompt's other completions, but a trace has only one: r, δ "
            "and Â are without this subtraction."
        )
    names = [name for name in ("rewards", "advantages") if getattr(args, f"whiten_{name}")]
    if names:
        sentences.append(
            f"Training whitens {' and '.join(names)} over a batch, which a single completion cannot show: r, V, δ "
            "and Â are before whitening, which can change the sign of an advantage near 0."
        )
    return " ".join(sentences)
