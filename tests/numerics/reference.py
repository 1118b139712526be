"""A second implementation of PPO's formulas: float64, one token at a time, written only from the papers.

It is slow and literal on purpose. If a formula has two equal forms, this file uses the one that a fast version would
not: GAE as its defining sum over TD residuals, the clipped objective by the sign of the advantage, the variance in two
passes. It reads only entries inside the mask; results are 0 outside the mask.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def _masked_indices(mask: ArrayLike) -> Iterator[tuple[int, ...]]:
    flags = np.asarray(mask, dtype=bool)
    for index in np.ndindex(*flags.shape):
        if flags[index]:
            yield index


def _masked_values(x: ArrayLike, mask: ArrayLike) -> list[float]:
    array = np.asarray(x)
    return [float(array[index]) for index in _masked_indices(mask)]


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


def log_softmax(logits: ArrayLike) -> Array:
    """(..., V) -> (..., V)."""
    scores = np.asarray(logits, dtype=np.float64)
    out = np.zeros(scores.shape)
    for index in np.ndindex(*scores.shape[:-1]):
        out[index] = _log_softmax([float(s) for s in scores[index]])
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
    values = _masked_values(x, mask)
    return _mean(values) if values else math.nan


def masked_moments(x: ArrayLike, mask: ArrayLike) -> Array:
    """(n, Σx, Σx²)."""
    values = _masked_values(x, mask)
    return np.array([float(len(values)), math.fsum(values), math.fsum(v * v for v in values)])


def mean_and_std(x: ArrayLike, mask: ArrayLike) -> tuple[Array, Array]:
    """μ and the square root of the unbiased variance, from the numbers themselves; σ of a single number is 0."""
    values = _masked_values(x, mask)
    mean = _mean(values)
    spread = math.fsum((v - mean) ** 2 for v in values)
    return np.array(mean), np.array(math.sqrt(spread / (len(values) - 1)) if len(values) > 1 else 0.0)


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
    batch_values = _masked_values(x if batch is None else batch, mask if batch_mask is None else batch_mask)
    mean = _mean(batch_values)
    spread = math.fsum((v - mean) ** 2 for v in batch_values)
    variance = spread / (len(batch_values) - 1) if len(batch_values) > 1 else 0.0
    array = np.asarray(x, dtype=np.float64)
    out = np.zeros(array.shape)
    for index in _masked_indices(mask):
        out[index] = (array[index] - mean) / math.sqrt(variance + eps) + (0.0 if shift_mean else mean)
    return out


def kl_penalty(logprobs: ArrayLike, ref_logprobs: ArrayLike, *, estimator: str) -> Array:
    """Schulman (2020), in his words: r = q(x)/p(x); p samples (π), q is π_ref.

    k1 = −log r, k2 = (log r)²/2, k3 = (r − 1) − log r.
    """

    def k(p: float, q: float) -> float:
        log_r = q - p
        return {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.expm1(log_r) - log_r}[estimator]

    return _per_token(k, logprobs, ref_logprobs)


def exact_kl(logits: ArrayLike, ref_logits: ArrayLike) -> Array:
    """Kullback and Leibler (1951): the mean of log(p/q) under p. (..., V) twice -> (...)."""
    scores, ref_scores = np.asarray(logits, dtype=np.float64), np.asarray(ref_logits, dtype=np.float64)
    out = np.zeros(scores.shape[:-1])
    for index in np.ndindex(*out.shape):
        logps, logqs = _log_softmax([float(s) for s in scores[index]]), _log_softmax([*map(float, ref_scores[index])])
        out[index] = math.fsum(math.exp(lp) * (lp - lq) for lp, lq in zip(logps, logqs, strict=True))
    return out


def kl_loss(logprobs: ArrayLike, old_logprobs: ArrayLike, ref_logprobs: ArrayLike, *, estimator: str) -> Array:
    """Importance sampling of k2 or k3: the weight of an action of π_old under π is π/π_old. The value, no gradient."""
    kind = {"k2": "k2", "k3": "k3", "k3_reverse": "k3"}[estimator]
    weights = _per_token(lambda new, old: math.exp(new) / math.exp(old), logprobs, old_logprobs)
    return weights * kl_penalty(logprobs, ref_logprobs, estimator=kind)


def kl_loss_gradient(logprobs: ArrayLike, old_logprobs: ArrayLike, ref_logprobs: ArrayLike, *, estimator: str) -> Array:
    """d(loss)/d(log π) of each sampled action, derived on paper. Schulman (2020).

    ∇KL(π ‖ π_ref) = Σ π ∇log π · log(π/π_ref), as Σ π ∇log π = 0: an action of π_old pulls by (π/π_old)·log(π/π_ref).
    ∇KL(π_ref ‖ π) = −Σ π_ref ∇log π, and 0 = Σ π ∇log π may be added: it pulls by (π − π_ref)/π_old.
    """

    def action_gradient(new: float, old: float, ref: float) -> float:
        p, p_old, q = math.exp(new), math.exp(old), math.exp(ref)
        return (p - q) / p_old if estimator == "k3_reverse" else p / p_old * (new - ref)

    return _per_token(action_gradient, logprobs, old_logprobs, ref_logprobs)


def sum_per_action(x: ArrayLike, mask: ArrayLike, *, level: str) -> Array:
    """Ahmadian et al. (arXiv:2402.14740): log π(y|x) = Σ_t log π(y_t | x, y_<t), the completion one action."""
    array = np.asarray(x, dtype=np.float64)
    if level == "token":
        return array
    rows = np.asarray(mask, dtype=bool)
    return np.array([[math.fsum(float(v) for v in values[real])] for values, real in zip(array, rows, strict=True)])


def importance_weights(
    logprobs: ArrayLike, engine_logprobs: ArrayLike, mask: ArrayLike, *, cap: float, level: str
) -> Array:
    """Ionides (2008): min(π/π_engine, c) of each action."""
    if level == "sequence":
        return np.minimum(sequence_ratio(logprobs, engine_logprobs, mask), cap)
    out = np.zeros(np.asarray(mask).shape)
    for row, t in _masked_indices(mask):
        log_ratio = float(np.asarray(logprobs)[row, t]) - float(np.asarray(engine_logprobs)[row, t])
        out[row, t] = min(math.exp(log_ratio), cap)
    return out


def sequence_ratio(logprobs: ArrayLike, old_logprobs: ArrayLike, mask: ArrayLike) -> Array:
    """π(y|x)/π_old(y|x) as the product of the ratios of its tokens. (B, T) -> (B, 1)."""
    out = np.ones((len(np.asarray(mask)), 1))
    for row, t in _masked_indices(mask):
        out[row, 0] *= math.exp(float(np.asarray(logprobs)[row, t]) - float(np.asarray(old_logprobs)[row, t]))
    return out


def last_token(mask: ArrayLike) -> NDArray[np.int64]:
    return np.array([max(t for t, real in enumerate(row) if real) for row in np.asarray(mask)], dtype=np.int64)


def ensemble_scores(scores: ArrayLike, *, how: str, penalty: float) -> Array:
    """Coste et al. (arXiv:2310.02743): mean, worst-case and uncertainty-weighted optimization. (M, B) -> (B,)."""
    out = []
    for column in np.asarray(scores, dtype=np.float64).T:
        mean = math.fsum(map(float, column)) / len(column)
        variance = math.fsum((float(score) - mean) ** 2 for score in column) / len(column)
        out.append({"worst": min(column), "mean": mean, "mean_minus_variance": mean - penalty * variance}[how])
    return np.array(out)


def shape_scores(scores: ArrayLike, *, mean: ArrayLike = 0.0, std: ArrayLike = 1.0, clip: float | None = None) -> Array:
    """Ziegler et al. (arXiv:1909.08593) §2: scores of mean 0 and variance 1 by given statistics; then a bound."""
    center, scale = float(np.asarray(mean)), float(np.asarray(std))

    def shaped(score: float) -> float:
        standard = (score - center) / scale
        return standard if clip is None or abs(standard) <= clip else math.copysign(clip, standard)

    return _per_token(shaped, scores)


def missing_eos_penalty(scores: ArrayLike, ended: ArrayLike, *, penalty: float | None) -> Array:
    """N+ (arXiv:2403.17031), detail 15, as a subtraction."""
    return _per_token(lambda s, end: s if end or penalty is None else s - penalty, scores, ended)


def missing_eos_score(scores: ArrayLike, ended: ArrayLike, *, score: float | None) -> Array:
    """N+ (arXiv:2403.17031), detail 15, as the paper has it: one fixed score for a completion without EOS."""
    return _per_token(lambda s, end: s if end or score is None else score, scores, ended)


def terminal_remainder(scores: ArrayLike, by_token: ArrayLike, mask: ArrayLike) -> Array:
    scores, by_token, mask = np.asarray(scores), np.asarray(by_token), np.asarray(mask)
    return np.array([s - d[m].sum() for s, d, m in zip(scores, by_token, mask, strict=True)], dtype=scores.dtype)


def zero_variance_groups(scores: ArrayLike, *, size: int) -> Array:
    scores = np.asarray(scores)
    return np.array([len(set(scores[at : at + size].tolist())) == 1 for at in range(0, len(scores), size)], dtype=bool)


def leave_one_out(scores: ArrayLike, *, size: int) -> Array:
    scores = np.asarray(scores)
    groups = [scores[start : start + size] for start in range(0, len(scores), size)]
    return np.array([group[i] - np.delete(group, i).mean() for group in groups for i in range(size)])


def token_rewards(scores: ArrayLike, kl: ArrayLike, mask: ArrayLike, *, kl_coef: float) -> Array:
    """Ziegler et al. (arXiv:1909.08593) eq. 2 by token: R = r − β log(π/ρ), with r on the token that ends the text."""
    penalties, points = np.asarray(kl, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    ends = last_token(mask)
    out = np.zeros(penalties.shape)
    for row, t in _masked_indices(mask):
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
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Array, NDArray[np.bool_]]:
    """Schulman et al. (arXiv:1707.06347) eq. 7, by the sign of Â: a gain stops at (1+ε)Â, a loss at (1−ε)Â.

    Clip-higher (arXiv:2503.14476 §3.1) gives the gain a separate bound; dual clip (arXiv:1912.09729) bounds the ratio
    by c where Â < 0.
    """
    highest_gain = 1 + (cliprange if cliprange_high is None else cliprange_high)
    highest_loss = math.inf if dual_clip is None else dual_clip

    def bounds(advantage: float) -> tuple[float, float]:
        if advantage == 0:
            return 0.0, math.inf
        return (0.0, highest_gain) if advantage > 0 else (1 - cliprange, highest_loss)

    def loss(logp: float, old: float, advantage: float) -> float:
        lowest, highest = bounds(advantage)
        return -advantage * min(max(math.exp(logp - old), lowest), highest)

    def clipped(logp: float, old: float, advantage: float) -> float:
        lowest, highest = bounds(advantage)
        return float(not lowest <= math.exp(logp - old) <= highest)

    arrays = (logprobs, old_logprobs, advantages)
    return _per_token(loss, *arrays), _per_token(clipped, *arrays).astype(bool)


def clipped_value_loss(
    values: ArrayLike, old_values: ArrayLike, returns: ArrayLike, *, cliprange: float | None
) -> tuple[Array, NDArray[np.bool_]]:
    """OpenAI baselines ppo2: the worse of two squared errors, of V and of V clipped to V_old ± ε."""
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


def aggregate(
    loss: ArrayLike, mask: ArrayLike, *, token_count: float, sequence_count: float = 1.0, max_length: int = 1, mode: str
) -> float:
    """Sums the losses of tokens, each divided by the divisor of the mode.

    token-mean: DAPO (arXiv:2503.14476) §3.3. seq-mean-token-mean: GRPO (arXiv:2402.03300) eq. 3. seq-sum-norm: Liu et
    al. (arXiv:2503.20783) §3.2, whose divisor is a constant.
    """
    array, rows = np.asarray(loss, dtype=np.float64), np.asarray(mask, dtype=bool)
    divisor = {
        "token-mean": lambda row: token_count,
        "seq-mean-token-mean": lambda row: int(rows[row].sum()) * sequence_count,
        "seq-mean-token-sum": lambda row: sequence_count,
        "seq-sum-norm": lambda row: sequence_count * max_length,
    }[mode]
    return math.fsum(float(array[row, t]) / divisor(row) for row, t in _masked_indices(mask))


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> float:
    """1 − Var(R − V)/Var(R); NaN for returns that do not vary."""
    v, r = _masked_values(values, mask), _masked_values(returns, mask)

    def spread(xs: list[float]) -> float:
        mean = _mean(xs)
        return math.fsum((x - mean) ** 2 for x in xs)

    residual, total = spread([b - a for a, b in zip(v, r, strict=True)]), spread(r)
    return 1 - residual / total if total > 0 else math.nan


def value_r2(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> float:
    """1 − (squared error of V)/(squared error of the best constant, the mean of R); NaN if that has no error."""
    v, r = _masked_values(values, mask), _masked_values(returns, mask)
    mean = _mean(r) if r else math.nan
    error = math.fsum((target - value) ** 2 for target, value in zip(r, v, strict=True))
    constant_error = math.fsum((target - mean) ** 2 for target in r)
    return 1 - error / constant_error if constant_error > 0 else math.nan


def adaptive_kl(kl_coef: float, kl: float, episodes: int, *, target: float, horizon: int) -> float:
    """Ziegler et al. (arXiv:1909.08593) §2.2: e = clip((KL − target)/target, −0.2, 0.2); β ← β(1 + K·e·n)."""
    error = (kl - target) / target
    error = float(np.clip(error, -0.2, 0.2))
    return kl_coef + kl_coef * error * episodes / horizon
