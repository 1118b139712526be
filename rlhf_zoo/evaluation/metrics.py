"""Loads the metric modules of `metrics/`, which are in the format of `evaluate`, and computes their values.

`evaluate.load` copies a module's script into a cache and imports the copy. So a script holds only its description and
columns, and the computation is here. Errors are ValueErrors, as in `evaluate`.
"""

import runpy
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import ZooError
from ..plugins import did_you_mean
from .stats import Estimate, WinRate, bootstrap_mean, mean_share, proportion, win_rate
from .text import distinct_n_estimate

METRICS = ("distinct_n", "kl_divergence", "preference_accuracy", "win_rate")
KL_ESTIMATORS = ("k1", "k2", "k3")


def find_metric_folder(name: str) -> Path:
    """Locates the files of a metric module: in the wheel, else in the repository beside the package.

    Args:
        name: A name in `METRICS`.

    Raises:
        ZooError: There is no such metric, or this installation lacks its files.
    """
    if name not in METRICS:
        hint = did_you_mean(name, METRICS) or f": there are {', '.join(METRICS)}."
        raise ZooError(f"There is no metric {name!r}{hint}")
    package = Path(__file__).parents[1]
    folder = next(
        (root / name for root in (package / "_metrics", package.parent / "metrics") if (root / name).is_dir()), None
    )
    if folder is None:
        raise ZooError(f"This installation lacks the metric module {name}: reinstall rlhf-zoo.")
    return folder


def load_metric(name: str, config_name: str | None = None) -> Any:
    """Loads an `evaluate.Metric` from the file that came with the package, without contacting a Hub.

    Rows are kept in memory, so several processes need no lock. `evaluate.load` would copy the file into a cache, and
    might import an outdated copy from another cache if the process uses several Hubs.

    Args:
        name: A name in `METRICS`.
        config_name: "by_prompt" if rows have a column `prompts`; None if they do not.

    Raises:
        ZooError: As in `find_metric_folder`.
    """
    script = runpy.run_path(str(find_metric_folder(name) / f"{name}.py"))
    # A class is named after its module: `win_rate` holds WinRate.
    class_name = "".join(part.capitalize() for part in name.split("_"))
    return script[class_name](config_name=config_name, keep_in_memory=True)


@cache
def cached_metric(name: str) -> Any:
    """Returns a metric that is loaded only once per process; see `load_metric`.

    Args:
        name: A name in `METRICS`.
    """
    return load_metric(name)


def win_rate_of_scores(
    ours: ArrayLike, theirs: ArrayLike, prompts: Sequence[Hashable] | None = None, *, tolerance: float = 0.0
) -> WinRate:
    """Computes `stats.win_rate` from the scores of two sides on the same prompts.

    Args:
        ours: (N,) scores of the first side.
        theirs: (N,) scores of the second side.
        prompts: (N,) the prompt of each row; None if every row has a different prompt.
        tolerance: Scores at most this far apart tie.

    Returns:
        The win rate of the first side.

    Raises:
        ValueError: Lengths differ, there are no rows, or a score is not finite.
    """
    a, b = _check_sides(ours, theirs)
    return win_rate(a, b, _prompt_groups(prompts, len(a)), tolerance=tolerance)


def preference_accuracy(chosen: ArrayLike, rejected: ArrayLike, prompts: Sequence[Hashable] | None = None) -> Estimate:
    """Computes the share of pairs whose chosen side scores higher than the rejected one. A tie counts as wrong.

    Args:
        chosen: (N,) scores of the chosen sides.
        rejected: (N,) scores of the rejected sides.
        prompts: (N,) the prompt of each pair, for the interval of `stats.mean_share`; None for Wilson's over pairs.

    Raises:
        ValueError: Lengths differ, there are no pairs, or a score is not finite.
    """
    chosen_scores, rejected_scores = _check_sides(chosen, rejected)
    # If ties counted one half, a model that scores all texts alike would get one half.
    is_right = chosen_scores > rejected_scores
    if prompts is None:
        return proportion(int(is_right.sum()), len(is_right))
    return mean_share(is_right.astype(float), _prompt_groups(prompts, len(is_right)))


def distinct_n(texts: Sequence[str], prompts: Sequence[Hashable] | None = None, *, n: int = 2) -> Estimate:
    """Computes `text.distinct_n_estimate`.

    Args:
        texts: (N,) completions.
        prompts: (N,) the prompt of each text; None if every text has a different prompt.
        n: Words per n-gram.

    Returns:
        The share of distinct n-grams.

    Raises:
        ValueError: There are no texts, n is below 1, or lengths differ.
    """
    if len(texts) == 0:
        raise ValueError("There are no texts to count n-grams in: give at least one.")
    if n < 1:
        raise ValueError(f"An n-gram has at least one word, not {n}.")
    return distinct_n_estimate(list(texts), _prompt_groups(prompts, len(texts)), n)


def completion_kl(
    logprobs: Sequence[ArrayLike], ref_logprobs: Sequence[ArrayLike], *, estimator: str = "k1", level: str = "token"
) -> list[float]:
    """Estimates KL(π ‖ π_ref) from each completion, by `functional.kl_penalty`.

    Level "token" sums the estimates of the tokens. Level "sequence" sums the log-probabilities first and treats a
    completion as one action (`functional.sum_per_action`). At level "sequence", k3 exponentiates the sum of the
    log-ratios, so it is useless for long completions. For k1 both levels agree.

    Args:
        logprobs: For each of N completions of π, the log-probabilities of its T_i sampled tokens (T_i may differ), or
            one number for the whole completion.
        ref_logprobs: The same under π_ref.
        estimator: "k1", "k2" or "k3".
        level: "token" or "sequence".

    Returns:
        (N,) estimates, nats.

    Raises:
        ValueError: Lengths differ, a number is not finite, or the estimator or level is unknown.
    """
    # Importing torch takes seconds, and most metrics do not need it.
    import torch

    from ..functional import kl_penalty, sum_per_action

    if len(logprobs) != len(ref_logprobs):
        raise ValueError(
            f"There are {len(logprobs)} predictions and {len(ref_logprobs)} references: each completion needs both."
        )
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"There is no KL estimator {estimator!r}: choose one of {', '.join(KL_ESTIMATORS)}.")
    values = []
    for row, (ours, theirs) in enumerate(zip(logprobs, ref_logprobs, strict=True)):
        # One number for a whole completion counts as a completion of one action.
        arrays = [np.atleast_1d(np.asarray(array, dtype=float)) for array in (ours, theirs)]
        if arrays[0].shape != arrays[1].shape or arrays[0].ndim != 1:
            raise ValueError(
                f"Completion {row} has log-probabilities of shape {arrays[0].shape} in predictions and "
                f"{arrays[1].shape} in references: both need one for each token."
            )
        for array, name in zip(arrays, ("predictions", "references"), strict=True):
            if not np.isfinite(array).all():
                raise ValueError(
                    f"Completion {row} has a log-probability in {name} that is not finite: {array.tolist()[:5]} …"
                )
        pi, ref = (torch.from_numpy(array)[None] for array in arrays)
        if level == "sequence":
            mask = torch.ones_like(pi, dtype=torch.bool)
            # All tokens of the completion become one action, whose log-probability is their sum.
            pi, ref = sum_per_action(pi, mask, level=level), sum_per_action(ref, mask, level=level)
        elif level != "token":
            raise ValueError(f"There is no level {level!r}: choose 'token' or 'sequence'.")
        values.append(float(kl_penalty(pi, ref, estimator=estimator).sum()))
    return values


def kl_divergence(
    logprobs: Sequence[ArrayLike],
    ref_logprobs: Sequence[ArrayLike],
    prompts: Sequence[Hashable] | None = None,
    *,
    estimator: str = "k1",
    level: str = "token",
    seed: int = 0,
) -> Estimate:
    """Averages `completion_kl` over completions, with an interval that resamples prompts.

    Args:
        logprobs: As in `completion_kl`.
        ref_logprobs: As in `completion_kl`.
        prompts: (N,) the prompt of each completion; None if every completion has a different prompt.
        estimator: "k1", "k2" or "k3".
        level: "token" or "sequence".
        seed: Seed of the resamples.

    Returns:
        The mean KL, nats per completion.

    Raises:
        ValueError: As in `completion_kl`, or there are no completions.
    """
    values = completion_kl(logprobs, ref_logprobs, estimator=estimator, level=level)
    if not values:
        raise ValueError("There are no completions: give at least one.")
    return bootstrap_mean(values, _prompt_groups(prompts, len(values)), seed=seed)


def _prompt_groups(prompts: Sequence[Hashable] | None, size: int) -> list[Hashable]:
    if prompts is None:
        return list(range(size))
    if len(prompts) != size:
        raise ValueError(f"There are {size} rows and {len(prompts)} prompts: each row needs its prompt.")
    return list(prompts)


def _check_sides(predictions: ArrayLike, references: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    sides = []
    for side, name in ((predictions, "predictions"), (references, "references")):
        values = np.asarray(side, dtype=float)
        if values.ndim != 1 or len(values) == 0:
            raise ValueError(f"The {name} must be a flat list of at least one number, not of shape {values.shape}.")
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values)))
            raise ValueError(f"Row {row} of the {name} is {values[row]}: it must be a finite number.")
        sides.append(values)
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"There are {len(sides[0])} predictions and {len(sides[1])} references: each row needs both of them."
        )
    return sides[0], sides[1]
