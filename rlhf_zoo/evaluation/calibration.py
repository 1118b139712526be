"""How good a reward model is on held-out pairs: loss, margins, calibration, and what it makes of length.

A margin is score(chosen) − score(rejected), in the units in which the model was trained: there σ(margin) is the
probability that it gives to the chosen text (Bradley & Terry 1952), so margins of rescaled scores do not calibrate.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .stats import accuracy, bootstrap_mean, correlation, equal_parts, proportion

GUESS = float(np.log(2))  # nats per pair of a coin: the best constant guess, since the order of two texts says nothing


def pair_losses(margins: ArrayLike) -> NDArray[np.float64]:
    """−log σ(margin) of each pair (N,), in nats: what reward models minimise."""
    return np.logaddexp(0.0, -np.asarray(margins, dtype=float))


def histogram(values: ArrayLike, *, bins: int = 24) -> dict[str, list[Any]]:
    """Counts (bins,) of values (N,) between edges (bins + 1,); 0 is an edge where values lie on both sides of it."""
    sample = np.asarray(values, dtype=float)
    low, high = float(sample.min()), float(sample.max())
    if low < 0 < high:
        width = (high - low) / (bins - 1)  # one bin more, since 0 splits one
        edges = width * np.arange(np.floor(low / width), np.ceil(high / width) + 1)
        edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)  # rounding may leave the extremes outside
    else:
        edges = np.histogram_bin_edges(sample, bins=bins)
    counts, _ = np.histogram(sample, bins=edges)
    return {"edges": [float(edge) for edge in edges], "counts": [int(count) for count in counts]}


def reliability(margins: ArrayLike, *, bins: int = 10) -> list[dict[str, Any]]:
    """Confidence against the share of right answers, in `bins` equal parts of [½, 1]; empty ones are left out.

    The confidence in a pair is σ(|margin|), the probability of the side that the model prefers, and it is right where
    that side was chosen; a margin of 0 is half right. A curve over σ(margin) and both orders of each pair would be this
    one and its mirror image. Each bin: low, high, n, confidence and accuracy (means), ci95 of the accuracy (Wilson).
    """
    confidence, right = _answers(margins)
    place = _places(confidence, bins)
    return [
        {
            "low": 0.5 + part / (2 * bins),
            "high": 0.5 + (part + 1) / (2 * bins),
            "n": int(here.sum()),
            "confidence": float(confidence[here].mean()),
            **_accuracy(right[here]),
        }
        for part in range(bins)
        if (here := place == part).any()
    ]


def by_margin(margins: ArrayLike, *, parts: int = 5) -> list[dict[str, Any]]:
    """The share of right answers by how far apart the two scores are: parts of |margin| with about equally many pairs.

    Each part: low and high (|margin|, in the model's units), n, accuracy (a margin of 0 is half right), ci95 (Wilson).
    A model that knows what it says is right nearly always where its scores are far apart.
    """
    _, right = _answers(margins)
    apart = np.abs(np.asarray(margins, dtype=float))
    return [
        {
            "low": float(apart[here].min()),
            "high": float(apart[here].max()),
            "n": len(here),
            **_accuracy(right[here]),
        }
        for here in equal_parts(apart, parts)
    ]


def _accuracy(right: NDArray[np.float64]) -> dict[str, Any]:
    share, n = float(right.mean()), len(right)
    return {"accuracy": share, "ci95": list(proportion(round(share * n), n).ci95)}


def calibration_error(parts: Sequence[Mapping[str, Any]]) -> float:
    """Σ n_b/N · |accuracy_b − confidence_b| over the bins of `reliability`.   ECE: Naeini et al. 2015 (AAAI), §3."""
    total = sum(part["n"] for part in parts)
    return sum(part["n"] * abs(part["accuracy"] - part["confidence"]) for part in parts) / total


def calibration_error_by_chance(
    margins: ArrayLike, *, seed: int, bins: int = 10, draws: int = 1000
) -> tuple[float, float]:
    """(mean, 95th percentile) of the ECE that a perfectly calibrated model with these confidences would show.

    It is not 0, as finite bins scatter: answers are drawn right with the confidence's own probability.
    """
    confidence, _ = _answers(margins)
    place = _places(confidence, bins)
    rng = np.random.default_rng(seed)
    sums = np.bincount(place, weights=confidence, minlength=bins)
    errors = []
    for _ in range(draws):
        right = np.bincount(place, weights=rng.random(len(confidence)) < confidence, minlength=bins)
        errors.append(float(np.abs(right - sums).sum() / len(confidence)))
    return float(np.mean(errors)), float(np.quantile(errors, 0.95))


def calibration(margins: ArrayLike, *, seed: int, bins: int = 10) -> dict[str, Any]:
    """The reliability bins, their ECE, and the ECE that chance alone would show."""
    parts = reliability(margins, bins=bins)
    mean, high = calibration_error_by_chance(margins, seed=seed, bins=bins)
    return {"bins": parts, "ece": calibration_error(parts), "ece_by_chance": {"mean": mean, "high": high}}


def length_profile(scores: ArrayLike, lengths: ArrayLike, *, bins: int = 10) -> list[dict[str, Any]]:
    """Scores by length, in up to `bins` parts of about equally many texts; equal lengths share a part.

    Each part: low and high (lengths), n, mean, and the quartiles low_score and high_score.
    """
    score, length = np.asarray(scores, dtype=float), np.asarray(lengths, dtype=int)
    found = []
    for here in equal_parts(length, bins):
        low, high = np.quantile(score[here], [0.25, 0.75])
        found.append(
            {
                "low": int(length[here].min()),
                "high": int(length[here].max()),
                "n": len(here),
                "mean": float(score[here].mean()),
                "low_score": float(low),
                "high_score": float(high),
            }
        )
    return found


def preference_report(
    chosen: ArrayLike,
    rejected: ArrayLike,
    *,
    chosen_lengths: ArrayLike,
    rejected_lengths: ArrayLike,
    prompts: Sequence[Hashable],
    seed: int,
) -> dict[str, Any]:
    """What a card says of a reward model over N held-out pairs, as JSON.

    chosen, rejected: (N,) raw scores; lengths: (N,) tokens; prompts: (N,) the prompt of each pair. Intervals are over
    prompts; accuracy's is Wilson's where each prompt has one pair, and a tie counts as wrong. Lengths: Pearson and
    Spearman over all 2N texts; `longer_wins` is the share of pairs whose chosen side is the longer one, which is the
    accuracy of a model that knows nothing else, and `prefers_longer` the share in which this model scores the longer
    one higher (ties one half, in both). Raises ValueError where a score is not finite or there are no pairs.
    """
    good, bad = np.asarray(chosen, dtype=float), np.asarray(rejected, dtype=float)
    long_good, long_bad = np.asarray(chosen_lengths, dtype=int), np.asarray(rejected_lengths, dtype=int)
    margins = good - bad
    margin = bootstrap_mean(margins, prompts, seed=seed)
    loss = bootstrap_mean(pair_losses(margins), prompts, seed=seed)
    right = accuracy(margins > 0, prompts)
    scores, lengths = np.concatenate([good, bad]), np.concatenate([long_good, long_bad])
    texts = [*prompts, *prompts]
    by_rank = correlation(scores, lengths, texts, seed=seed, ranks=True)
    by_value = correlation(scores, lengths, texts, seed=seed)
    longer = np.sign(long_good - long_bad)
    return {
        "accuracy": right.value,
        "n": right.n,
        "prompts": len(set(prompts)),
        "ci95": list(right.ci95),
        "loss": loss.to_json(),
        "guess_loss": GUESS,
        "margin": {
            **margin.to_json(),
            "std": float(margins.std()),
            "histogram": histogram(margins),
            "accuracy": by_margin(margins),
        },
        "calibration": calibration(margins, seed=seed),
        "length": {
            "pearson": by_value.to_json() if by_value else None,
            "spearman": by_rank.to_json() if by_rank else None,
            "longer_wins": bootstrap_mean((longer + 1) / 2, prompts, seed=seed).to_json(),
            "prefers_longer": bootstrap_mean((longer * np.sign(margins) + 1) / 2, prompts, seed=seed).to_json(),
            "bins": length_profile(scores, lengths),
        },
    }


def _answers(margins: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(confidence, rightness) of each pair."""
    values = np.asarray(margins, dtype=float)
    return np.exp(-pair_losses(np.abs(values))), (np.sign(values) + 1) / 2


def _places(confidence: NDArray[np.float64], bins: int) -> NDArray[np.intp]:
    return np.minimum(((confidence - 0.5) * 2 * bins).astype(np.intp), bins - 1)
