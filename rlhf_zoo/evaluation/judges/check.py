"""Whether a judge may judge: what it makes of ordered pairs, how it errs beside the reward, and whether it is steady.

A judge that was trained and tested on labels that are swapped looks as good as another, so its own held-out accuracy
cannot tell; pairs that were put in order elsewhere can. Where nobody ordered any, a judge can still be compared with
itself: a coin does not agree with itself from one half of the samples to the other.

**Independence** is measured. A judge that fails where the training reward fails praises what exploits the reward. Of
the pairs that the reward orders wrongly and of the others, the judge errs in some; the excess is the difference. It is
not independent where the excess is at least `MARKED` (0.2) and above 0 by its interval, independent where the interval
lies below `MARKED`, and else nobody knows, as where either side has fewer than `FEWEST` (10) pairs. Pairs of the
policies' own outputs decide where they can, as their order is not from the labels that the reward learned, and they are
the texts that are judged; then the labeled ones. A wrong label counts against both and looks like a shared error, so
labels that a recipe draws with noise are to be settled before: see `settled`.
"""

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ..calibration import calibration
from ..stats import Estimate, WinRate, correlation, share, win_rate

Finding = Literal["agrees", "says nothing", "contradicts"]
MARKED = 0.2  # of the pairs: what the reward's errors bring in errors of the judge, that counts
FEWEST = 10  # pairs that the reward orders wrongly, and rightly; fewer say nothing of how errors go together
DRAWS, CLEAR = 25, 0.75  # of a noisy preference; the share of them that must agree for the pair to be settled
_SMALLEST = 1e-6  # of a probability, so that its log-odds are finite


@dataclass(frozen=True)
class SharedErrors:
    """Of judge and reward on the same ordered pairs, where each is right or wrong.

    correlation: of their errors (φ), None where one never errs; judge_errs: overall; where_reward_errs, _is_right:
    among the pairs that the reward orders so, None where there are none; excess: the first of these less the second.
    """

    correlation: Estimate | None
    judge_errs: Estimate
    where_reward_errs: Estimate | None
    where_reward_is_right: Estimate | None
    excess: Estimate | None

    @property
    def independent(self) -> bool | None:
        """By the rule of the module; None where it is not known."""
        wrong, right, excess = self.where_reward_errs, self.where_reward_is_right, self.excess
        if wrong is None or right is None or excess is None or min(wrong.n, right.n) < FEWEST:
            return None
        if excess.value >= MARKED and excess.ci95[0] > 0:
            return False
        return True if excess.ci95[1] < MARKED else None

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: one.to_json() if one else None for name, one in vars(self).items()},
            "independent": self.independent,
        }


@dataclass(frozen=True)
class PairCheck:
    """accuracy: the share of pairs whose chosen side the judge scores higher, a tie half, by prompts.

    calibration: of a judge whose scores are probabilities, by `calibration.calibration` over differences of log-odds;
    else None. with_reward: errors that it shares with the training reward, None where there is no other reward.
    """

    accuracy: WinRate
    calibration: dict[str, Any] | None = None
    with_reward: SharedErrors | None = None

    @property
    def finding(self) -> Finding:
        """By the 95% interval of the accuracy: above ½, below it, or neither."""
        low, high = self.accuracy.ci95
        return "agrees" if low > 0.5 else "contradicts" if high < 0.5 else "says nothing"

    @property
    def unfit(self) -> str | None:
        """Why the judge is none, a sentence; None where it may judge, which the verdict asks more for."""
        if self.finding != "contradicts":
            return None
        low, high = self.accuracy.ci95
        return (
            f"The judge contradicts the labels: it scores the chosen side higher in {self.accuracy.value:.3f} "
            f"[{low:.3f}, {high:.3f}] of {self.accuracy.n} labeled pairs; look for swapped labels, or too few "
            "steps, in what it learned."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy.to_json(),
            "finding": self.finding,
            "unfit": self.unfit,
            "calibration": self.calibration,
            **({"with_reward": self.with_reward.to_json()} if self.with_reward else {}),
        }


@dataclass(frozen=True)
class JudgeCheck:
    """What is found of a judge on labeled pairs, and on pairs of the policies' own outputs; None where there are none.

    same_labels: it learned from the labels that the training reward learned from.
    """

    labeled: PairCheck | None = None
    own: PairCheck | None = None
    same_labels: bool = False

    @property
    def independent(self) -> bool | None:
        """Of the training reward; None where that is not known."""
        if self.same_labels:
            return False
        for one in (self.own, self.labeled):
            if one is not None and one.with_reward is not None and one.with_reward.independent is not None:
                return one.with_reward.independent
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            **(self.labeled.to_json() if self.labeled else {}),
            **({"own": self.own.to_json()} if self.own else {}),
            "same_labels": self.same_labels,
            "independent": self.independent,
        }


def check_pairs(
    chosen: ArrayLike,
    rejected: ArrayLike,
    prompts: Sequence[Hashable],
    *,
    probabilities: bool,
    seed: int,
    reward_margins: ArrayLike | None = None,
) -> PairCheck:
    """Of a judge's scores of N ordered pairs; probabilities: whether they are P(good), 0 to 1.

    reward_margins: (N,) what the training reward gives the chosen side beyond the other. Raises ValueError where there
    are no pairs, lengths differ, or a score is not finite.
    """
    accuracy = win_rate(chosen, rejected, prompts)
    margins = np.subtract(np.asarray(chosen, dtype=float), np.asarray(rejected, dtype=float))
    shared = None if reward_margins is None else shared_errors(margins, reward_margins, prompts, seed=seed)
    if not probabilities:
        return PairCheck(accuracy, None, shared)
    good, bad = (np.clip(np.asarray(side, dtype=float), _SMALLEST, 1 - _SMALLEST) for side in (chosen, rejected))
    log_odds = np.log(good / (1 - good)) - np.log(bad / (1 - bad))
    return PairCheck(accuracy, calibration(log_odds, seed=seed), shared)


def shared_errors(judge: ArrayLike, reward: ArrayLike, prompts: Sequence[Hashable], *, seed: int) -> SharedErrors:
    """judge, reward: (N,) margins of the chosen side over the other; one of 0 or less is an error."""
    errs, reward_errs = (np.asarray(margins, dtype=float) <= 0 for margins in (judge, reward))

    def among(chosen: np.ndarray) -> Estimate | None:
        places = np.flatnonzero(chosen).tolist()
        return share(errs[places], [prompts[place] for place in places]) if places else None

    wrong, right = among(reward_errs), among(~reward_errs)
    every = among(np.ones(len(errs), dtype=bool))
    assert every is not None  # there is a pair, or the accuracy would have been refused
    return SharedErrors(
        correlation(errs.astype(float), reward_errs.astype(float), prompts, seed=seed),
        every,
        wrong,
        right,
        _apart(wrong, right) if wrong and right else None,
    )


def _apart(a: Estimate, b: Estimate) -> Estimate:
    """a − b of two separate shares, with the interval that squares and adds theirs (Newcombe 1998, method 10)."""
    value = a.value - b.value
    low = value - math.hypot(a.value - a.ci95[0], b.ci95[1] - b.value)
    high = value + math.hypot(a.ci95[1] - a.value, b.value - b.ci95[0])
    return Estimate(value, (low, high), a.n + b.n)


def settled(
    pairs: Sequence[tuple[str, str]], prefer: Callable[[str, str, random.Random], int], *, seed: int
) -> list[int | None]:
    """The side of each pair of whole texts that a noisy preference means: 0 or 1, None where it is near a toss-up.

    It is drawn `DRAWS` times. A label that was drawn once is wrong now and then, in the eyes of who made it as well:
    that judge, and every reward that learned well, would seem to err together.
    """
    rng = random.Random(seed)
    means = [sum(prefer(a, b, rng) for _ in range(DRAWS)) / DRAWS for a, b in pairs]
    return [1 if mean >= CLEAR else 0 if mean <= 1 - CLEAR else None for mean in means]


def split_half(scores: ArrayLike, prompts: Sequence[Hashable], *, seed: int) -> Estimate | None:
    """How far a judge agrees with itself: the rank correlation of its mean scores of two halves of the samples.

    scores: (R, S), a row for each policy and prompt, S samples each; prompts: (R,) the prompt of each row, the unit
    that is resampled. A coin has 0; so has a judge to whom all prompts and policies are alike. None where there are
    fewer than two samples, or a half does not vary.
    """
    sample = np.asarray(scores, dtype=float)
    if sample.ndim != 2 or sample.shape[1] < 2:
        return None
    halves = sample[:, 0::2].mean(1), sample[:, 1::2].mean(1)
    return correlation(*halves, prompts, seed=seed, ranks=True)
