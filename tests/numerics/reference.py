"""PPO's formulas a second time: float64, one token at a time, written from the papers and from no other code.

It is slow and literal on purpose. Where a formula has two equal forms, this file uses the one that a fast version
would not: GAE as its defining sum over TD residuals, the clipped objective by the sign of the advantage, the variance
in two passes. Only entries inside the mask are ever read; what comes back is 0 outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def _inside(mask: ArrayLike) -> Iterator[tuple[int, ...]]:
    flags = np.asarray(mask, dtype=bool)
    for index in np.ndindex(*flags.shape):
        if flags[index]:
            yield index


def _picked(x: ArrayLike, mask: ArrayLike) -> list[float]:
    array = np.asarray(x)
    return [float(array[index]) for index in _inside(mask)]


def _mean(xs: list[float]) -> float:
    return math.fsum(xs) / len(xs)


def _log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    log_total = top + math.log(math.fsum(math.exp(logit - top) for logit in row))
    return [logit - log_total for logit in row]


def _per_token(formula: Callable[..., float], *arrays: ArrayLike) -> Array:
    stacked = [np.asarray(a, dtype=np.float64) for a in arrays]
    out = np.zeros(stacked[0].shape)
    for index in np.ndindex(*out.shape):
        out[index] = formula(*(float(a[index]) for a in stacked))
    return out


def selected_logprobs(logits: ArrayLike, tokens: ArrayLike) -> Array:
    """log softmax(logits) at `tokens`: (..., V), (...) -> (...)."""
    scores, picks = np.asarray(logits, dtype=np.float64), np.asarray(tokens)
    out = np.zeros(picks.shape)
    for index in np.ndindex(*picks.shape):
        out[index] = _log_softmax([float(s) for s in scores[index]])[int(picks[index])]
    return out


def entropy(logits: ArrayLike) -> Array:
    """−Σ p log p, with 0 log 0 = 0: (..., V) -> (...)."""
    scores = np.asarray(logits, dtype=np.float64)
    out = np.zeros(scores.shape[:-1])
    for index in np.ndindex(*out.shape):
        logps = _log_softmax([float(s) for s in scores[index]])
        out[index] = -math.fsum(math.exp(lp) * lp for lp in logps if lp > -math.inf)
    return out


def masked_mean(x: ArrayLike, mask: ArrayLike) -> float:
    picked = _picked(x, mask)
    return _mean(picked) if picked else math.nan


def masked_moments(x: ArrayLike, mask: ArrayLike) -> Array:
    """(n, Σx, Σx²)."""
    picked = _picked(x, mask)
    return np.array([float(len(picked)), math.fsum(picked), math.fsum(v * v for v in picked)])


def whiten(
    x: ArrayLike,
    mask: ArrayLike,
    *,
    batch: ArrayLike | None = None,
    batch_mask: ArrayLike | None = None,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Array:
    """N+ (arXiv:2403.17031), detail 25; `shift_mean=False` is detail 24. μ and σ are of `batch` (default: x itself)."""
    everything = _picked(x if batch is None else batch, mask if batch_mask is None else batch_mask)
    mean = _mean(everything)
    spread = math.fsum((v - mean) ** 2 for v in everything)
    variance = spread / (len(everything) - 1) if len(everything) > 1 else 0.0
    array = np.asarray(x, dtype=np.float64)
    out = np.zeros(array.shape)
    for index in _inside(mask):
        out[index] = (array[index] - mean) / math.sqrt(variance + eps) + (0.0 if shift_mean else mean)
    return out


def kl_penalty(logprobs: ArrayLike, ref_logprobs: ArrayLike, *, estimator: str) -> Array:
    """Schulman (2020), in his words: r = q(x)/p(x), k1 = −log r, k3 = (r − 1) − log r; p samples (π), q is π_ref."""

    def k(p: float, q: float) -> float:
        log_r = q - p
        return {"k1": -log_r, "k3": math.expm1(log_r) - log_r}[estimator]

    return _per_token(k, logprobs, ref_logprobs)


def last_token(mask: ArrayLike) -> NDArray[np.int64]:
    return np.array([max(t for t, real in enumerate(row) if real) for row in np.asarray(mask)], dtype=np.int64)


def shape_scores(scores: ArrayLike, *, clip: float | None = None) -> Array:
    """Ziegler et al. (arXiv:1909.08593)."""
    limit = math.inf if clip is None else clip
    return _per_token(lambda s: min(max(s, -limit), limit), scores)


def missing_eos_penalty(scores: ArrayLike, ended: ArrayLike, *, penalty: float | None) -> Array:
    """N+ (arXiv:2403.17031), detail 15, as a subtraction."""
    return _per_token(lambda s, end: s if end or penalty is None else s - penalty, scores, ended)


def token_rewards(scores: ArrayLike, kl: ArrayLike, mask: ArrayLike, *, kl_coef: float) -> Array:
    """Ziegler et al. (arXiv:1909.08593) eq. 2 by token: R = r − β log(π/ρ), with r on the token that ends the text."""
    penalties, points = np.asarray(kl, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    ends = last_token(mask)
    out = np.zeros(penalties.shape)
    for row, t in _inside(mask):
        out[row, t] = (points[row] if t == ends[row] else 0.0) - kl_coef * penalties[row, t]
    return out


def gae(rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Schulman et al. (arXiv:1506.02438) eq. 16: Â_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V(s_{t+1}) − V(s_t)."""
    r, v = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    advantages, returns = np.zeros(r.shape), np.zeros(r.shape)
    for row, flags in enumerate(np.asarray(mask, dtype=bool)):
        steps = [t for t, real in enumerate(flags) if real]
        state_values = [float(v[row, t]) for t in steps] + [0.0]
        deltas = [float(r[row, t]) + gamma * state_values[i + 1] - state_values[i] for i, t in enumerate(steps)]
        for i, t in enumerate(steps):
            advantage = math.fsum((gamma * lam) ** n * delta for n, delta in enumerate(deltas[i:]))
            advantages[row, t] = advantage
            returns[row, t] = advantage + state_values[i]
    return advantages, returns


def clipped_policy_loss(
    logprobs: ArrayLike, old_logprobs: ArrayLike, advantages: ArrayLike, *, cliprange: float
) -> tuple[Array, NDArray[np.bool_]]:
    """Schulman et al. (arXiv:1707.06347) eq. 7, by the sign of Â: a gain stops at (1+ε)Â, a loss at (1−ε)Â."""

    def held(ratio: float, advantage: float) -> bool:
        return ratio > 1 + cliprange if advantage > 0 else advantage < 0 and ratio < 1 - cliprange

    def loss(logp: float, old: float, advantage: float) -> float:
        ratio = math.exp(logp - old)
        if held(ratio, advantage):
            ratio = 1 + cliprange if advantage > 0 else 1 - cliprange
        return -ratio * advantage

    def clipped(logp: float, old: float, advantage: float) -> float:
        return float(held(math.exp(logp - old), advantage))

    arrays = (logprobs, old_logprobs, advantages)
    return _per_token(loss, *arrays), _per_token(clipped, *arrays).astype(bool)


def clipped_value_loss(
    values: ArrayLike, old_values: ArrayLike, returns: ArrayLike, *, cliprange: float | None
) -> tuple[Array, NDArray[np.bool_]]:
    """OpenAI baselines ppo2: the worse of two squared errors, of V and of V kept within ±ε of what it was."""
    limit = math.inf if cliprange is None else cliprange

    def errors(value: float, old: float, target: float) -> tuple[float, float]:
        near = old + math.copysign(min(abs(value - old), limit), value - old)
        return (value - target) ** 2, (near - target) ** 2

    def loss(value: float, old: float, target: float) -> float:
        return max(errors(value, old, target)) / 2

    def clipped(value: float, old: float, target: float) -> float:
        if abs(value - old) <= limit:
            return 0.0
        free, near = errors(value, old, target)
        return float(near > free)

    arrays = (values, old_values, returns)
    return _per_token(loss, *arrays), _per_token(clipped, *arrays).astype(bool)


def aggregate(loss: ArrayLike, mask: ArrayLike, *, tokens: float) -> float:
    return math.fsum(_picked(loss, mask)) / tokens


def approx_kl(logprobs: ArrayLike, old_logprobs: ArrayLike, mask: ArrayLike) -> float:
    """Schulman (2020): with samples of π_old, k3 of KL(π_old ‖ π) is (ρ − 1) − log ρ, ρ = π/π_old."""
    new, old = _picked(logprobs, mask), _picked(old_logprobs, mask)
    return _mean([math.expm1(n - o) - (n - o) for n, o in zip(new, old, strict=True)])


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> float:
    """1 − Var(R − V)/Var(R); NaN for returns that do not vary."""
    v, r = _picked(values, mask), _picked(returns, mask)

    def spread(xs: list[float]) -> float:
        middle = _mean(xs)
        return math.fsum((x - middle) ** 2 for x in xs)

    residual, total = spread([b - a for a, b in zip(v, r, strict=True)]), spread(r)
    return 1 - residual / total if total > 0 else math.nan


def adaptive_kl(kl_coef: float, kl: float, episodes: int, *, target: float, horizon: int) -> float:
    """Ziegler et al. (arXiv:1909.08593) §2.2: e = clip((KL − target)/target, −0.2, 0.2); β ← β(1 + K·e·n)."""
    error = (kl - target) / target
    error = float(np.clip(error, -0.2, 0.2))
    return kl_coef + kl_coef * error * episodes / horizon
