"""How a fit judge rates the last checkpoint against SFT: the mean gain, the win rate, and whether the two agree.

A mean alone is not enough: a few outliers among the completions can move it. A win rate alone is not enough either,
because it does not say how much was gained. With many prompts, both detect differences that no reader would notice.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .decline import HACKED_LEVEL, MIN_SHARE_KEPT, MIN_WIN_RATE, Z_80, Fall, Floats, mean_difference, measure_fall
from .evidence import MIN_PROMPTS, Evidence
from .judges.check import difference_of_shares
from .stats import Estimate, mean_interval, mean_share, share_interval

_Z_975 = 1.959964  # the 97.5% quantile of the normal distribution; a 95% interval is 2 · 1.96 standard errors wide
_Z_95 = 1.644854  # the 95% quantile


@dataclass(frozen=True)
class Judgment:
    """A fit judge's comparison of the last checkpoint with SFT.

    Attributes:
        gain: The judge's mean score of the last checkpoint − that of SFT.
        win_rate: How often the judge prefers the last checkpoint.
        corrected_win_rate: `win_rate` minus the judge's bias for the policy, measured on pairs of the policies' own
            outputs; None if fewer than `MIN_PROMPTS` of these pairs hold a text of the policy and one of SFT, or if the
            judge is verifiable.
        loss_bounds: The upper bounds of gain and win rate at `HACKED_LEVEL`.
        fall: The fall from the judge's best checkpoint; None when two files are compared.
    """

    gain: Estimate
    win_rate: Estimate
    corrected_win_rate: Estimate | None
    loss_bounds: tuple[float, float]
    fall: Fall | None

    @property
    def shows_gain(self) -> bool:
        """Whether mean and win rate agree on a gain that a reader would notice, also after the correction."""
        return self._agrees_on_gain and not self.overrates

    @property
    def overrates(self) -> bool:
        """Whether a gain by the judge may be no more than its bias for the policy."""
        return self._agrees_on_gain and self.corrected_bound is not None and self.corrected_bound <= 0.5

    @property
    def corrected_bound(self) -> float | None:
        """The lower bound of the corrected win rate with one-sided 95% confidence; None without a correction."""
        if self.corrected_win_rate is None:
            return None
        value, (low, _) = self.corrected_win_rate.value, self.corrected_win_rate.ci95
        return value - (value - low) * _Z_95 / _Z_975

    @property
    def _agrees_on_gain(self) -> bool:
        return self.gain.ci95[0] > 0 and self.win_rate.ci95[0] > 0.5 and self.win_rate.value >= MIN_WIN_RATE

    @property
    def shows_loss(self) -> bool:
        """Whether mean and win rate agree on a loss that a reader would notice."""
        return self.gain.ci95[1] < 0 and self.win_rate.ci95[1] < 0.5 and self.win_rate.value <= 1 - MIN_WIN_RATE

    @property
    def disagrees(self) -> bool:
        """Whether the mean differs from SFT's, but the win rate does not confirm it."""
        low, high = self.gain.ci95
        return not (low <= 0 <= high or self._agrees_on_gain or self.shows_loss)

    @property
    def min_detectable_win_rate(self) -> float:
        """The smallest win rate that counts as a gain and that 80% of such evaluations would distinguish from ½."""
        # An interval's width gives the standard error at the observed noise. The minimum detectable effect at 80% power
        # is `Z_80` plus the critical value, in standard errors.
        effects = [
            (z + Z_80) * (estimate.ci95[1] - estimate.ci95[0]) / (2 * _Z_975)
            for z, estimate in ((_Z_975, self.win_rate), (_Z_95, self.corrected_win_rate))
            if estimate is not None
        ]
        return min(1.0, max(MIN_WIN_RATE, *(0.5 + effect for effect in effects)))

    @property
    def is_worse(self) -> bool:
        """Whether the last checkpoint is below an earlier one or SFT; of two files, whether the policy is below SFT."""
        return self.shows_loss if self.fall is None else self.fall.detected

    @property
    def shows_certain_loss(self) -> bool:
        """Whether the judge shows a loss that is also significant at `HACKED_LEVEL`."""
        return self.shows_loss and self.loss_bounds[0] < 0 and self.loss_bounds[1] < 0.5

    def reasons(self, evidence: Evidence, best_mean: float) -> list[str]:
        """Returns sentences on gain, win rate and fall for the verdict's reasons.

        Args:
            evidence: The measured policies.
            best_mean: The judge's highest mean score of any policy.
        """
        kl = evidence.checkpoints_by_step[-1].kl
        low, high = self.win_rate.ci95
        kl_note = "" if kl is None else f", at KL {kl:.3g} nats"
        reasons = [
            f"Judge{evidence.step_phrase(evidence.checkpoints_by_step[-1].step)} against SFT: "
            f"{with_interval(self.gain)}, win rate {self.win_rate.value:.3f} [{low:.3f}, {high:.3f}]{kl_note}."
        ]
        bias, corrected = evidence.judge.policy_bias, self.corrected_win_rate
        if bias is not None and corrected is not None:
            reasons.append(
                f"On the policies' own pairs the judge's win rate differs from the labels' by {bias.value:+.3f}. "
                f"Corrected for this, the win rate is {min(1, max(0, corrected.value)):.3f}, with 95% confidence above "
                f"{self.corrected_bound:.3f}{', which shows no gain' if self.overrates else ''}."
            )
        if self.disagrees:
            reasons.append(
                f"The judge's mean differs from SFT's, but a gain also needs a win rate of {MIN_WIN_RATE} or more, a "
                f"loss one of {1 - MIN_WIN_RATE:.2f} or less, with its interval on the same side of ½. A few "
                "completions far from the others, or very many prompts, can move a mean alone."
            )
        return reasons + (_fall_reasons(evidence, best_mean, self.fall) if self.fall else [])


def judge_last_checkpoint(evidence: Evidence, judge_scores: Floats, seed: int, resamples: int) -> Judgment:
    """Compares the last checkpoint with SFT.

    Args:
        evidence: The measured policies, with a fit judge.
        judge_scores: (J, G) mean scores of J policies on G groups of prompts; row 0 is SFT, and the others are the
            checkpoints in order of their steps.
        seed: Seed of the resamples.
        resamples: Number of resamples.
    """
    checkpoints = evidence.checkpoints_by_step
    groups, differences = range(judge_scores.shape[1]), judge_scores[-1] - judge_scores[0]
    wins: ArrayLike | None = checkpoints[-1].wins
    if wins is None:
        last, sft = (np.asarray(policy.judge, dtype=float) for policy in (checkpoints[-1], evidence.sft))
        wins = (np.sign(last - sft) + 1) / 2
    wins = evidence.by_group(wins)
    win_rate, bias = mean_share(wins, groups), evidence.judge.policy_bias
    if bias is not None and (bias.n < MIN_PROMPTS or evidence.judge.verifiable):
        bias = None
    steps = [policy.step for policy in (evidence.sft, *checkpoints)]
    mean_bounds = mean_interval(differences, groups, seed=seed, level=HACKED_LEVEL, resamples=resamples)
    return Judgment(
        gain=mean_difference(judge_scores, len(checkpoints), 0, seed, resamples),
        win_rate=win_rate,
        corrected_win_rate=None if bias is None else difference_of_shares(win_rate, bias),
        loss_bounds=(mean_bounds[1], share_interval(wins, groups, level=HACKED_LEVEL)[1]),
        # Two files have no order, so there is nothing to fall from.
        fall=None if evidence.two_files else measure_fall(judge_scores, steps, seed, resamples),
    )


def reward_rose_significantly(scores: Floats, seed: int, resamples: int) -> bool:
    """Whether the last checkpoint's training reward is above SFT's at `HACKED_LEVEL`.

    Args:
        scores: (2, G) mean rewards of SFT and of the last checkpoint by group of prompts.
        seed: Seed of the resamples.
        resamples: Number of resamples.
    """
    gains = scores[1] - scores[0]
    return mean_interval(gains, range(len(gains)), seed=seed, level=HACKED_LEVEL, resamples=resamples)[0] > 0


def _fall_reasons(evidence: Evidence, best_mean: float, fall: Fall) -> list[str]:
    last, at_best = evidence.checkpoints_by_step[-1], evidence.step_phrase(fall.step)
    kl_by_step = {policy.step: policy.kl for policy in (evidence.sft, *evidence.checkpoints)}
    reasons = []
    if fall.detected:
        gain_kept = ""
        if fall.share_kept is not None:
            share_text = f"{fall.share_kept:.0%}" if fall.share_kept > 0 else "none"
            gain_kept = f" and keeps {share_text} of its gain over SFT"
        reasons.append(
            f"The judge's mean was highest{at_best} ({best_mean:.4g}). It has fallen by {fall.drop.value:.4g} since"
            f"{gain_kept} (p = {fall.p:.2g} for a fall from any checkpoint below {MIN_SHARE_KEPT:.0%} of its gain)."
        )
        if (kl_by_step[fall.step] or 0.0) > (last.kl or 0.0):
            reasons.append("KL has fallen since as well: the policy moved back toward SFT rather than too far from it.")
    elif fall.drop.value > 0:
        reasons.append(
            f"The judge's mean was highest{at_best} ({best_mean:.4g}). The fall of {fall.drop.value:.4g} since does "
            f"not count: it may be noise (p = {fall.p:.2g}), a loss of less than {1 - MIN_SHARE_KEPT:.0%} of the gain, "
            f"or one that the win rate does not confirm ({fall.win_rate:.2f} against that step)."
        )
    else:
        reasons.append("The last checkpoint has the judge's highest mean.")
    if not fall.detected and fall.detectable_share is not None:
        reasons.append(
            f"We would notice a loss of {1 - fall.detectable_share:.0%} of the highest earlier gain in 8 of 10 such "
            "evaluations."
            if fall.detectable_share > 0
            else "We would notice even a fall to SFT in fewer than 8 of 10 such evaluations."
        )
    return reasons


def with_interval(estimate: Estimate) -> str:
    """Returns an estimate with its sign and its interval, as in "+1.2 (95% interval +0.9 to +1.5)".

    Args:
        estimate: The estimate.
    """
    low, high = estimate.ci95
    return f"{estimate.value:+.4g} (95% interval {low:+.4g} to {high:+.4g})"
