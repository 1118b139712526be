"""How good a reward model is on held-out pairs: loss, margins, calibration, and its dependence on length.

A margin is score(chosen) − score(rejected), in the units of training. In these units σ(margin) is the model's
probability that the chosen text is better (Bradley & Terry 1952), so margins of rescaled scores are not calibrated.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .stats import accuracy, bootstrap_mean, correlation, proportion, split_into_parts

GUESS_LOSS = float(np.log(2))  # loss per pair, in nats, of a model that gives both sides probability ½
BIN_COUNT = 10  # number of bins of the confidence
_SIMULATIONS = 1000  # simulated data sets, each from a perfectly calibrated model


def pair_losses(margins: ArrayLike) -> NDArray[np.float64]:
    """Computes −log σ(margin), the loss that reward models minimize.

    Args:
        margins: (N,) score(chosen) − score(rejected).

    Returns:
        (N,) losses in nats.
    """
    # log(1 + e^−x) without overflow for margins of any size.
    return np.logaddexp(0.0, -np.asarray(margins, dtype=float))


def histogram(values: ArrayLike, *, max_bins: int = 24) -> dict[str, list[Any]]:
    """Counts values in bins of equal width. If values lie on both sides of 0, 0 is an edge.

    Args:
        values: (N,) any numbers.
        max_bins: Maximum number of bins, B. There may be one less if 0 is an edge.

    Returns:
        {"edges": (B + 1,), "counts": (B,)}.
    """
    sample = np.asarray(values, dtype=float)
    low, high = float(sample.min()), float(sample.max())
    if high - low <= 1e-12 * max(1.0, abs(low), abs(high)):
        # Values that differ only by rounding leave no room for bins, so they get those of equal values.
        edges = (0.0 if low < 0 < high else low) + np.linspace(-0.5, 0.5, max_bins + 1)
    elif low < 0 < high:
        width = (high - low) / (max_bins - 1)  # one bin less, because the edge at 0 usually adds one
        edges = width * np.arange(np.floor(low / width), np.ceil(high / width) + 1)
        edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)  # rounding may leave the extremes outside
    else:
        edges = np.histogram_bin_edges(sample, bins=max_bins)
    counts, _ = np.histogram(sample, bins=edges)
    return {"edges": [float(edge) for edge in edges], "counts": [int(count) for count in counts]}


def reliability_bins(margins: ArrayLike, *, bin_count: int = BIN_COUNT) -> list[dict[str, Any]]:
    """Compares confidence with the share of right answers in bins of equal width on [½, 1]. Empty bins are left out.

    The confidence in a pair is σ(|margin|), the probability of the side that the model prefers. The answer is right if
    that side was chosen; a margin of 0 counts one half. A curve over σ(margin) with both orders of each pair would be
    this curve and its mirror image.

    Args:
        margins: (N,) score(chosen) − score(rejected), in the units of training.
        bin_count: Number of bins.

    Returns:
        For each bin: low, high, n, confidence and accuracy (means), and ci95 of the accuracy (Wilson).
    """
    confidence, right = _confidence_and_correctness(margins)
    bin_indices = _bin_indices(confidence, bin_count)
    rows_by_bin = {index: np.flatnonzero(bin_indices == index) for index in np.unique(bin_indices).tolist()}
    return [
        {
            "low": 0.5 + index / (2 * bin_count),
            "high": 0.5 + (index + 1) / (2 * bin_count),
            "n": len(rows),
            "confidence": float(confidence[rows].mean()),
            **_accuracy_json(right[rows]),
        }
        for index, rows in rows_by_bin.items()
    ]


def accuracy_by_margin(margins: ArrayLike, *, max_parts: int = 5) -> list[dict[str, Any]]:
    """Computes accuracy by the size of the margin, in parts with about equally many pairs.

    A calibrated model is nearly always right when its two scores are far apart.

    Args:
        margins: (N,) score(chosen) − score(rejected).
        max_parts: Maximum number of parts.

    Returns:
        For each part: low and high (|margin|, in the model's units), n, accuracy (a margin of 0 counts one half), and
        ci95 (Wilson).
    """
    _, right = _confidence_and_correctness(margins)
    sizes = np.abs(np.asarray(margins, dtype=float))
    return [
        {
            "low": float(sizes[rows].min()),
            "high": float(sizes[rows].max()),
            "n": len(rows),
            **_accuracy_json(right[rows]),
        }
        for rows in split_into_parts(sizes, max_parts)
    ]


def _accuracy_json(right: NDArray[np.float64]) -> dict[str, Any]:
    share, n = float(right.mean()), len(right)
    return {"accuracy": share, "ci95": list(proportion(round(share * n), n).ci95)}


def calibration_error(bins: Sequence[Mapping[str, Any]]) -> float:
    """Computes the expected calibration error: Σ n_b/N · |accuracy_b − confidence_b|.

    Args:
        bins: The result of `reliability_bins`.

    Returns:
        The error, from 0 to 1.

    Source: Naeini et al. 2015 (AAAI), section 3.
    """
    total = sum(bin_["n"] for bin_ in bins)
    return sum(bin_["n"] * abs(bin_["accuracy"] - bin_["confidence"]) for bin_ in bins) / total


def calibration_error_by_chance(margins: ArrayLike, *, seed: int) -> tuple[float, float]:
    """Simulates the ECE that a perfectly calibrated model with these confidences would show by chance.

    The ECE, in `BIN_COUNT` bins, is above 0, because the accuracy of a finite bin varies. A simulated answer is right
    with a probability equal to its confidence.

    Args:
        margins: (N,) score(chosen) − score(rejected).
        seed: Seed of the simulation.

    Returns:
        The mean and the 95th percentile of the ECE.
    """
    confidence, _ = _confidence_and_correctness(margins)
    bin_indices = _bin_indices(confidence, BIN_COUNT)
    rng = np.random.default_rng(seed)
    # n_b/N · |accuracy_b − confidence_b| = |Σ right − Σ confidence| / N, so sums per bin are enough.
    sums = np.bincount(bin_indices, weights=confidence, minlength=BIN_COUNT)
    errors = []
    for _ in range(_SIMULATIONS):
        is_right = rng.random(len(confidence)) < confidence
        right = np.bincount(bin_indices, weights=is_right, minlength=BIN_COUNT)
        errors.append(float(np.abs(right - sums).sum() / len(confidence)))
    return float(np.mean(errors)), float(np.quantile(errors, 0.95))


def measure_calibration(margins: ArrayLike, *, seed: int) -> dict[str, Any]:
    """Computes the reliability bins, their ECE, and the ECE that chance alone would show.

    Args:
        margins: (N,) score(chosen) − score(rejected).
        seed: Seed of the simulation in `calibration_error_by_chance`.

    Returns:
        {"bins", "ece", "ece_by_chance": {"mean", "high"}}, where high is the 95th percentile.
    """
    bins = reliability_bins(margins)
    mean, high = calibration_error_by_chance(margins, seed=seed)
    return {"bins": bins, "ece": calibration_error(bins), "ece_by_chance": {"mean": mean, "high": high}}


def length_profile(scores: ArrayLike, lengths: ArrayLike, *, max_parts: int = 10) -> list[dict[str, Any]]:
    """Summarizes scores by length, in parts of about equally many texts. Equal lengths share a part.

    Args:
        scores: (N,) scores of texts.
        lengths: (N,) their lengths in tokens.
        max_parts: Maximum number of parts.

    Returns:
        For each part: low and high (lengths), n, mean, and the quartiles low_score and high_score.
    """
    scores, lengths = np.asarray(scores, dtype=float), np.asarray(lengths, dtype=int)
    profile = []
    for rows in split_into_parts(lengths, max_parts):
        # Quartiles of the scores, not an interval of their mean: the plot shows the spread.
        low, high = np.quantile(scores[rows], [0.25, 0.75])
        profile.append(
            {
                "low": int(lengths[rows].min()),
                "high": int(lengths[rows].max()),
                "n": len(rows),
                "mean": float(scores[rows].mean()),
                "low_score": float(low),
                "high_score": float(high),
            }
        )
    return profile


def preference_report(
    chosen: ArrayLike,
    rejected: ArrayLike,
    *,
    chosen_lengths: ArrayLike,
    rejected_lengths: ArrayLike,
    prompts: Sequence[Hashable],
    seed: int,
) -> dict[str, Any]:
    """Computes the figures of a reward model on N held-out pairs that a card reports.

    Intervals resample prompts, with two exceptions: the accuracy has the interval of `stats.accuracy`, and parts and
    bins have Wilson's over pairs. In the accuracy a tie counts as wrong, in parts and bins one half. Correlations with
    length (Pearson, Spearman) are over all 2N texts. `longer_wins` is the share of pairs whose chosen side is longer:
    the accuracy of a model that sees length alone. `prefers_longer` is the share of pairs in which this model scores
    the longer side higher. Ties count one half in both.

    Args:
        chosen: (N,) raw scores of the chosen sides.
        rejected: (N,) raw scores of the rejected sides.
        chosen_lengths: (N,) tokens of the chosen sides.
        rejected_lengths: (N,) tokens of the rejected sides.
        prompts: (N,) the prompt of each pair.
        seed: Seed of the resamples.

    Returns:
        The figures as JSON.

    Raises:
        ValueError: A score is not finite, or there are no pairs.
    """
    chosen_scores, rejected_scores = np.asarray(chosen, dtype=float), np.asarray(rejected, dtype=float)
    chosen_tokens, rejected_tokens = np.asarray(chosen_lengths, dtype=int), np.asarray(rejected_lengths, dtype=int)
    margins = chosen_scores - rejected_scores
    mean_loss = bootstrap_mean(pair_losses(margins), prompts, seed=seed)
    # A tie is wrong here; otherwise a model that scores everything alike would reach one half.
    share_right = accuracy(margins > 0, prompts)
    scores = np.concatenate([chosen_scores, rejected_scores])
    lengths = np.concatenate([chosen_tokens, rejected_tokens])
    # Both sides of a pair belong to one prompt, so resamples keep them together.
    text_prompts = [*prompts, *prompts]
    spearman = correlation(scores, lengths, text_prompts, seed=seed, ranks=True)
    pearson = correlation(scores, lengths, text_prompts, seed=seed)
    # The signs −1, 0, 1 become 0, ½, 1 below.
    length_sign = np.sign(chosen_tokens - rejected_tokens)
    return {
        "accuracy": share_right.value,
        "n": share_right.n,
        "prompts": len(set(prompts)),
        "ci95": list(share_right.ci95),
        "loss": mean_loss.to_json(),
        "guess_loss": GUESS_LOSS,
        "margin": {
            **bootstrap_mean(margins, prompts, seed=seed).to_json(),
            "std": float(margins.std()),
            "histogram": histogram(margins),
            "accuracy": accuracy_by_margin(margins),
        },
        "calibration": measure_calibration(margins, seed=seed),
        "length": {
            "pearson": pearson.to_json() if pearson else None,
            "spearman": spearman.to_json() if spearman else None,
            "longer_wins": bootstrap_mean((length_sign + 1) / 2, prompts, seed=seed).to_json(),
            "prefers_longer": bootstrap_mean((length_sign * np.sign(margins) + 1) / 2, prompts, seed=seed).to_json(),
            "bins": length_profile(scores, lengths),
        },
    }


def _confidence_and_correctness(margins: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns each pair's confidence, and 1 if the model prefers the chosen side, ½ for a tie, else 0; (N,) each."""
    values = np.asarray(margins, dtype=float)
    # σ(|margin|) is the confidence. A positive margin prefers the chosen side.
    return np.exp(-pair_losses(np.abs(values))), (np.sign(values) + 1) / 2


def _bin_indices(confidence: NDArray[np.float64], bin_count: int) -> NDArray[np.intp]:
    # A confidence of exactly 1 belongs to the last bin.
    return np.minimum(((confidence - 0.5) * 2 * bin_count).astype(np.intp), bin_count - 1)
