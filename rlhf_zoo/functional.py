"""Every formula of PPO for language models: pure tensors in, tensors out.

Shapes: B completions, T response positions, V tokens of the vocabulary, A actions. A is T if each token is an action,
and 1 if the whole completion is one. A mask (B, T) is True on sampled tokens up to and including EOS, starting at
position 0 and without gaps. Log-probabilities, under any model, are those of the sampled tokens at the sampling
temperature, in nats. Values outside the mask never matter.

"N+ 15" is detail 15 of "The N+ Implementation Details of RLHF with PPO" (arXiv:2403.17031).
"""

import torch
from torch import Tensor

__all__ = [
    "AGGREGATIONS", "ENSEMBLES", "LOSS_KL_ESTIMATORS", "REWARD_KL_ESTIMATORS", "aggregate",
    "clipped_policy_loss", "clipped_value_loss", "ensemble_scores", "entropy", "exact_kl", "explained_variance",
    "gae", "importance_weights", "kl_loss", "kl_penalty", "last_token", "leave_one_out", "log_softmax", "masked_mean",
    "masked_moments", "mean_and_std", "missing_eos_penalty", "missing_eos_score", "selected_logprobs", "shape_scores",
    "sum_per_action", "terminal_remainder", "token_rewards", "value_r2", "whiten", "zero_variance_groups",
]  # fmt: skip

REWARD_KL_ESTIMATORS = ("k1", "k3")
LOSS_KL_ESTIMATORS = ("k2", "k3", "k3_reverse", "full")
# exp overflows float32 above 88. Where a clip bounds the loss, the gradient would then be 0·∞ = NaN.
MAX_LOG_RATIO = 60.0
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-sum-norm")
ENSEMBLES = ("worst", "mean", "mean_minus_variance")


def selected_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at `tokens` in nats, (...), without keeping the whole log-softmax.

    Args:
        logits: (..., V), already divided by the temperature.
        tokens: (...) int64.
    """
    token_logits = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return token_logits - logits.logsumexp(-1)


def log_softmax(logits: Tensor) -> Tensor:
    """z − log Σ_v exp z_v in nats, (..., V).

    On a CPU, torch's own log_softmax adds up its sum in a few float32 accumulators, so its error grows with V: 1e-5 at
    262,144 tokens, where the error of logsumexp is 1e-6.

    Args:
        logits: (..., V), −inf allowed.
    """
    return logits - logits.logsumexp(-1, keepdim=True)


def entropy(logits: Tensor) -> Tensor:
    """H = −Σ_v p_v log p_v of softmax(logits) in nats, (...), with 0 log 0 = 0.

    Args:
        logits: (..., V), −inf allowed.
    """
    logps = log_softmax(logits)
    return -(logps.exp() * logps.clamp(min=torch.finfo(logps.dtype).min)).sum(-1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where the mask is True, a scalar; NaN for an empty mask.

    Args:
        x: Any shape.
        mask: Bool, of the same shape.
    """
    return x.masked_fill(~mask, 0).sum() / mask.sum()


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """(n, Σx, Σx²) over the mask, (3,) float64. These sums are not divided by n, so those of several processes add up.

    Args:
        x: Any shape.
        mask: Bool, of the same shape.
    """
    masked = x.masked_fill(~mask, 0).double()
    return torch.stack([mask.sum().double(), masked.sum(), masked.square().sum()])


def mean_and_std(moments: Tensor) -> tuple[Tensor, Tensor]:
    """(μ, σ) from the moments of a batch, with unbiased σ². σ is 0 for one element; μ and σ are NaN for none.

    Args:
        moments: (3,), from `masked_moments`.
    """
    n, total, square_sum = moments
    mean = total / n
    return mean, ((square_sum - n * mean.square()) / (n - 1).clamp(min=1)).clamp(min=0).sqrt()


def whiten(x: Tensor, mask: Tensor, moments: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(x − μ)/σ, with μ added back when `shift_mean` is False. Source: N+ 24 and 25.

    A single element becomes 0, or μ when `shift_mean` is False.

    Args:
        x: (B, T) or (B,).
        mask: (B, T) or (B,).
        moments: (3,), from `masked_moments` over the whole batch. σ² is the unbiased variance.
        shift_mean: Whether the result has mean 0.
        eps: Added to σ².

    Returns:
        The shape of x, 0 outside the mask.
    """
    mean, std = mean_and_std(moments)
    whitened = (x - mean.to(x.dtype)) * (std.square() + eps).rsqrt().to(x.dtype)
    if not shift_mean:
        whitened = whitened + mean.to(x.dtype)
    return whitened.masked_fill(~mask, 0)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: str) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) from sampled tokens, (B, T) in nats.

    k1 = log π − log π_ref is unbiased and may be negative. k2 = ½k1² is biased. k3 = e^(−k1) − 1 + k1 is unbiased,
    non-negative, and has a smaller variance. Source: Schulman, "Approximating KL divergence" (2020).

    Args:
        logprobs: (B, T) log π.
        ref_logprobs: (B, T) log π_ref.
        estimator: "k1", "k2" or "k3".

    Raises:
        ValueError: The estimator is unknown.
    """
    k1 = logprobs - ref_logprobs
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return 0.5 * k1.square()
    if estimator == "k3":
        return torch.expm1(-k1) + k1
    raise ValueError(f"unknown KL estimator {estimator!r}: choose 'k1', 'k2' or 'k3'")


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(π ‖ π_ref) = Σ_v p_v (log p_v − log q_v) of each next-token distribution in nats, (...).

    Args:
        logits: (..., V) of π, whose probabilities are p.
        ref_logits: (..., V) of π_ref, whose probabilities are q.
    """
    logps, ref_logps = log_softmax(logits), log_softmax(ref_logits)
    # Where p is 0, the term is 0. Without this mask its gradient would be 0·∞ = NaN.
    log_ratio = torch.where(logps.isneginf(), 0.0, logps - ref_logps)
    return (logps.exp() * log_ratio).sum(-1)


def kl_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, *, estimator: str) -> Tensor:
    """A loss for each action sampled from π_old, (B, A), whose gradient is that of a KL. ρ = π/π_old.

    k2: sg(ρ)·½k1², with sg for stop-gradient, has the gradient of KL(π ‖ π_ref). k3: ρ·k3, differentiated through ρ,
    has the same gradient. k3_reverse: sg(ρ)·k3, which is GRPO's loss on policy, has the gradient of KL(π_ref ‖ π). k1
    is refused: E[∇ log π] = 0, so its expected gradient is 0. If actions are tokens, the gradient ignores the effect of
    a token on later states; if actions are completions, it is exact. Source: Schulman (2020); arXiv:2402.03300, eq. 4.

    Args:
        logprobs: (B, A) log π.
        old_logprobs: (B, A) log π_old.
        ref_logprobs: (B, A) log π_ref.
        estimator: "k2", "k3" or "k3_reverse".

    Raises:
        ValueError: The estimator is unknown.
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))
    if estimator == "k2":
        return ratio.detach() * kl_penalty(logprobs, ref_logprobs, estimator="k2")
    if estimator == "k3":
        return ratio * kl_penalty(logprobs, ref_logprobs, estimator="k3")
    if estimator == "k3_reverse":
        return ratio.detach() * kl_penalty(logprobs, ref_logprobs, estimator="k3")
    raise ValueError(f"no KL loss from the estimator {estimator!r}: choose 'k2', 'k3' or 'k3_reverse'")


def sum_per_action(x: Tensor, mask: Tensor, *, level: str) -> Tensor:
    """Sums per-token values over each action. If a completion is one action, PPO is a bandit algorithm.

    Args:
        x: (B, T), one value per token.
        mask: (B, T).
        level: "token" leaves x unchanged; "sequence" treats a completion as one action.

    Returns:
        (B, T) at level "token"; Σ_t over the mask, (B, 1), at level "sequence".

    Raises:
        ValueError: The level is unknown.

    Source: Ahmadian et al., arXiv:2402.14740, §3.
    """
    if level == "token":
        return x
    if level == "sequence":
        return x.masked_fill(~mask, 0).sum(1, keepdim=True)
    raise ValueError(f"unknown action level {level!r}: choose 'token' or 'sequence'")


def last_token(mask: Tensor) -> Tensor:
    """Index of the last token in each row's mask, (B,) int64.

    Args:
        mask: (B, T), with at least one True in each row.
    """
    return mask.sum(-1) - 1


def ensemble_scores(scores: Tensor, *, how: str, penalty: float = 0.0) -> Tensor:
    """One score for each completion, (B,), from the scores of M reward models. s̄ = (1/M) Σ_m s_m.

    `mean`: s̄. `worst`: min_m s_m, worst-case optimization. `mean_minus_variance`: s̄ − λ·(1/M) Σ_m (s_m − s̄)²,
    uncertainty-weighted optimization. Source: Coste et al. 2023, arXiv:2310.02743.

    Args:
        scores: (M, B), all on the same scale.
        how: "worst", "mean" or "mean_minus_variance".
        penalty: λ of "mean_minus_variance".

    Raises:
        ValueError: `how` is unknown.
    """
    if how == "worst":
        return scores.amin(0)
    if how == "mean":
        return scores.mean(0)
    if how == "mean_minus_variance":
        return scores.mean(0) - penalty * scores.var(0, correction=0)
    raise ValueError(f"unknown ensemble {how!r}: choose 'worst', 'mean' or 'mean_minus_variance'")


def shape_scores(
    scores: Tensor, *, mean: Tensor | float = 0.0, std: Tensor | float = 1.0, clip: float | None = None
) -> Tensor:
    """Centers, scales, then clips: clamp((s − μ)/σ, ±clip), (B,). Source: arXiv:1909.08593, §2; N+ 23.

    Args:
        scores: (B,).
        mean: μ, in the units of the scores.
        std: σ, in the units of the scores.
        clip: In the units of the result; None for no bound.
    """
    shaped_scores = (scores - mean) / std
    return shaped_scores if clip is None else shaped_scores.clamp(-clip, clip)


def missing_eos_penalty(scores: Tensor, ended: Tensor, *, penalty: float | None) -> Tensor:
    """Subtracts `penalty` from the score of each response that did not end. Source: N+ 15.

    Args:
        scores: (B,).
        ended: (B,), bool.
        penalty: In the units of the scores; None subtracts nothing.
    """
    return scores if penalty is None else torch.where(ended, scores, scores - penalty)


def missing_eos_score(scores: Tensor, ended: Tensor, *, score: float | None) -> Tensor:
    """Replaces the score of each response that did not end. Source: N+ 15.

    Args:
        scores: (B,).
        ended: (B,), bool.
        score: The new score, −1 in the source; None replaces nothing.
    """
    return scores if score is None else torch.where(ended, scores, torch.full_like(scores, score))


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """r_t = score·1[t is the last token] − β·KL_t, (B, T), 0 outside the mask.

    Args:
        scores: (B,), each added once, on the last token in the mask.
        kl: (B, T) per token, in nats.
        mask: (B, T).
        kl_coef: β.

    Source: Ziegler et al., arXiv:1909.08593, eq. 2; Stiennon et al. 2020.
    """
    rewards = -kl_coef * kl.masked_fill(~mask, 0)
    return rewards.scatter_add(1, last_token(mask).unsqueeze(1), scores.to(rewards.dtype).unsqueeze(1))


def terminal_remainder(scores: Tensor, token_scores: Tensor, mask: Tensor) -> Tensor:
    """s − Σ_t d_t, (B,): the part of a score s that goes to the last token, if d_t goes to each token t.

    Then r_t = d_t + (s − Σ_u d_u)·1[t is the last token] − β·KL_t, and Σ_t r_t = s − β·Σ_t KL_t, however the score is
    spread over tokens.

    Args:
        scores: (B,) s.
        token_scores: (B, T) d.
        mask: (B, T).
    """
    return scores - token_scores.masked_fill(~mask, 0).sum(1)


def zero_variance_groups(scores: Tensor, *, size: int) -> Tensor:
    """Whether all completions of a prompt have the same score, so that none is better than another: (B / size,) bool.

    DAPO's dynamic sampling leaves such prompts out (arXiv:2503.14476, §3.2).

    Args:
        scores: (B,), with the scores of each prompt's completions adjacent.
        size: The number of completions of each prompt.
    """
    groups = scores.view(-1, size)
    return (groups == groups[:, :1]).all(1)


def leave_one_out(scores: Tensor, *, size: int) -> Tensor:
    """Each score minus the mean score of the prompt's other completions, as in RLOO (arXiv:2402.14740): (B,).

    Args:
        scores: (B,), with the scores of each prompt's completions adjacent.
        size: The number of completions of each prompt, at least 2.
    """
    groups = scores.view(-1, size)
    # A completion's own score must not be in its baseline, because it would bias the gradient.
    baseline = (groups.sum(1, keepdim=True) - groups) / (size - 1)
    return (groups - baseline).reshape(-1)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: Â_t = δ_t + γλ Â_{t+1}, with δ_t = r_t + γ V_{t+1} − V_t.

    Args:
        rewards: (B, T) r.
        values: (B, T) V, treated as 0 after the last token in the mask.
        mask: (B, T).
        gamma: γ.
        lam: λ.

    Returns:
        Advantages Â and returns Â + V, each (B, T) and 0 outside the mask.

    Source: Schulman et al., arXiv:1506.02438, §3.
    """
    rewards, values = rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)
    advantages = torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = (delta + gamma * lam * advantage) * mask[:, t]
        advantages[:, t] = advantage
        next_value = values[:, t]
    return advantages, advantages + values


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """−min(ρÂ, clip(ρ, 1−ε, 1+ε_high)Â), with ρ = exp(log π − log π_old).

    Args:
        logprobs: (B, A) log π.
        old_logprobs: (B, A) log π_old.
        advantages: (B, A) Â.
        cliprange: ε.
        cliprange_high: ε_high; None for ε. A value above ε is clip-higher (arXiv:2503.14476, §3.1).
        dual_clip: c > 1, which bounds the loss by −cÂ if Â < 0 (arXiv:1912.09729, §3); None for no bound.

    Returns:
        The loss per action, (B, A), and where a clip stops the gradient, (B, A) bool.

    Source: Schulman et al., arXiv:1707.06347, eq. 7.
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))
    high = cliprange if cliprange_high is None else cliprange_high
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - cliprange, 1 + high)
    loss, is_clipped = torch.maximum(unclipped_loss, clipped_loss), clipped_loss > unclipped_loss
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        exceeds_ceiling = (advantages < 0) & (loss > ceiling)
        loss, is_clipped = torch.where(exceeds_ceiling, ceiling, loss), is_clipped | exceeds_ceiling
    return loss, is_clipped


def importance_weights(logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, *, cap: float, level: str) -> Tensor:
    """min(π/π_engine, c) of each action, (B, A): truncated importance sampling (Ionides 2008), as in TRL.

    Args:
        logprobs: (B, T) log π, of the policy before the update.
        engine_logprobs: (B, T) log π_engine, of the engine that sampled the tokens.
        mask: (B, T).
        cap: c.
        level: As for `sum_per_action`.
    """
    return sum_per_action(logprobs - engine_logprobs, mask, level=level).clamp(max=MAX_LOG_RATIO).exp().clamp(max=cap)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float | None
) -> tuple[Tensor, Tensor]:
    """½·max((V−R)², (clip(V, V_old±ε_v)−R)²). Source: OpenAI baselines, ppo2.

    Args:
        values: (B, T) V.
        old_values: (B, T) V_old.
        returns: (B, T) R.
        cliprange: ε_v; None for no clip.

    Returns:
        The loss per token, (B, T), and where the clip stops the gradient, (B, T) bool.
    """
    unclipped_loss = (values - returns).square()
    if cliprange is None:
        return 0.5 * unclipped_loss, torch.zeros_like(unclipped_loss, dtype=torch.bool)
    clipped_values = values.clamp(old_values - cliprange, old_values + cliprange)
    clipped_loss = (clipped_values - returns).square()
    return 0.5 * torch.maximum(unclipped_loss, clipped_loss), clipped_loss > unclipped_loss


def aggregate(
    loss: Tensor,
    mask: Tensor,
    *,
    token_count: Tensor | float,
    sequence_count: Tensor | float = 1.0,
    max_length: int = 1,
    mode: str = "token-mean",
) -> Tensor:
    """A micro-batch's share of a minibatch's loss, a scalar. However rows are split, the shares add up to that loss.

    token-mean: Σ/token_count, where Σ sums over the mask. seq-mean-token-mean: the mean over sequences of the mean over
    tokens. seq-mean-token-sum: Σ/sequence_count. seq-sum-norm: Σ/(sequence_count·max_length), a constant divisor
    (arXiv:2503.20783, §3.2).

    Args:
        loss: (B, T) of the micro-batch.
        mask: (B, T) of the micro-batch.
        token_count: The number of tokens in the whole minibatch, over all processes.
        sequence_count: The number of sequences in the whole minibatch, over all processes.
        max_length: The maximum number of tokens in a response, for seq-sum-norm.
        mode: One of AGGREGATIONS.

    Raises:
        ValueError: The mode is unknown.
    """
    masked_loss = loss.masked_fill(~mask, 0)
    if mode == "token-mean":
        return masked_loss.sum() / token_count
    if mode == "seq-mean-token-mean":
        return (masked_loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / sequence_count
    if mode == "seq-mean-token-sum":
        return masked_loss.sum() / sequence_count
    if mode == "seq-sum-norm":
        return masked_loss.sum() / (sequence_count * max_length)
    raise ValueError(f"unknown aggregation {mode!r}: choose one of {', '.join(AGGREGATIONS)}")


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(R − V)/Var(R) over the mask: 1 for a perfect critic, 0 for a constant V, NaN for a constant R.

    Source: OpenAI baselines.

    Args:
        values: (B, T).
        returns: (B, T).
        mask: (B, T).
    """
    target, error = returns[mask].double(), (returns - values)[mask].double()
    variance = target.var(correction=0)
    return torch.where(variance > 0, 1 - error.var(correction=0) / variance, torch.nan)


def value_r2(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − mean((R − V)²)/Var(R) over the mask: how much V improves on the best constant.

    Unlike `explained_variance`, this counts a constant offset of V as an error. Both are NaN if the returns do not
    vary.

    Args:
        values: (B, T).
        returns: (B, T).
        mask: (B, T).
    """
    target, error = returns[mask].double(), (returns - values)[mask].double()
    variance = target.var(correction=0)
    return torch.where(variance > 0, 1 - error.square().mean() / variance, torch.nan)
