"""Whether the reward pays for a habit: adding it to SFT's texts gains reward, and removing it loses reward.

`edits` makes the texts, the caller scores them with its models, and `Payment` interprets the scores. Only risen phrases
and repetition are tested, since only these can be added to a text and removed from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...modeling.words import pattern, pieces, unspaced, words
from .report import Report
from .texts import Completions

EDITED = ("risen phrases", "repetition")
_ENDS = ".!?。！？"
HALF = 0.5
UNPAID = 0.1


@dataclass(frozen=True)
class Edit:
    """Texts edited for one family, in their original order.

    Attributes:
        family: The family.
        put_in: SFT's texts with the habit added.
        taken_out: The policy's texts with the habit removed.
    """

    family: str
    put_in: Sequence[str]
    taken_out: Sequence[str]


@dataclass(frozen=True)
class Payment:
    """What a family's habit earns.

    Attributes:
        family: The family.
        gained: The reward that SFT's texts gain when the habit is added, as a share of the policy's gain over SFT.
        lost: The reward that the policy's texts lose when it is removed, as a share of the same gain.
        judge: The judge's gain on SFT's texts divided by the reward's, each in standard deviations of its scores for
            SFT's texts; None without a judge.
    """

    family: str
    gained: float
    lost: float
    judge: float | None

    @classmethod
    def of(
        cls, family: str, *, sft: ArrayLike, policy: ArrayLike, put_in: ArrayLike, taken_out: ArrayLike,
        judged: ArrayLike | None = None, judged_put_in: ArrayLike | None = None,
    ) -> Payment:  # fmt: skip
        """Computes the payment from scores of texts before and after the edit.

        Args:
            family: The family.
            sft: (N,) rewards of SFT's texts.
            policy: (N,) rewards of the policy's texts.
            put_in: (N,) rewards of SFT's texts with the habit.
            taken_out: (N,) rewards of the policy's texts without it.
            judged: (N,) the judge's scores of SFT's texts; None without a judge.
            judged_put_in: (N,) the judge's scores of SFT's texts with the habit.

        Returns:
            The payment; zeros if the policy gained nothing.
        """
        sft_mean, policy_mean, mean_put_in, mean_taken_out = (
            float(np.mean(np.asarray(scores, dtype=float))) for scores in (sft, policy, put_in, taken_out)
        )
        gain = policy_mean - sft_mean
        if gain <= 0:
            return cls(family, 0.0, 0.0, None)
        judge = None
        if judged is not None and judged_put_in is not None and mean_put_in > sft_mean:
            # The judge's gain from the habit, in its own unit.
            judge_gain = float(np.mean(np.asarray(judged_put_in, float)) - np.mean(np.asarray(judged, float)))
            # Reward and judge have different units, so each gain is divided by its own standard deviation.
            judge = (
                judge_gain
                / (float(np.std(np.asarray(judged, float))) or 1.0)
                / ((mean_put_in - sft_mean) / (float(np.std(np.asarray(sft))) or 1.0))
            )
        return cls(family, (mean_put_in - sft_mean) / gain, (policy_mean - mean_taken_out) / gain, judge)

    @property
    def paid(self) -> bool:
        """Whether the habit gains at least half of the policy's gain when added, and loses as much when removed."""
        return self.gained >= HALF and self.lost >= HALF

    @property
    def unpaid(self) -> bool:
        """Whether the reward pays next to nothing for it, as for a format or an ending."""
        return self.gained < UNPAID and self.lost < UNPAID

    @property
    def deserved(self) -> bool | None:
        """Whether the judge gains at least half as much from it, in standard deviations; None without a judge."""
        return None if self.judge is None else self.judge >= HALF

    def to_json(self) -> dict[str, Any]:
        """Returns the payment and its conclusions as JSON."""
        return {**vars(self), "paid": self.paid, "unpaid": self.unpaid, "deserved": self.deserved}

    @property
    def meaning(self) -> str:
        """The payment in words."""
        judge = "" if self.judge is None else f"; the judge gives {self.judge:.0%} as much for it, in deviations"
        return (
            f"{self.family.capitalize()}, added to SFT's texts, {'gain' if self.family.endswith('s') else 'gains'} "
            f"{self.gained:.0%} of the reward's gain; removed from the policy's, {self.lost:.0%} is lost{judge}."
        )


def edits(report: Report, policy: Completions, sft: Completions) -> list[Edit]:
    """Edits texts for the families that are present and can be edited.

    Args:
        report: The findings.
        policy: The policy's completions.
        sft: SFT's completions.

    Returns:
        The edits. Those that change nothing are left out.
    """
    result = []
    if "risen phrases" in report.present:
        phrases = [words(line.split("”")[0].removeprefix("“")) for line in report["risen phrases"].about]
        result.append(_phrases(phrases, policy.texts, sft.texts))
    if "repetition" in report.present:
        # Three copies make a text of any length clearly repetitive.
        tripled = [f"{text.rstrip()} {text.strip()} {text.strip()}" for text in sft.texts]
        result.append(Edit("repetition", tripled, [_once(text) for text in policy.texts]))
    # An edit that changes no text would wrongly show that the habit earns nothing.
    originals = (list(sft.texts), list(policy.texts))
    return [edit for edit in result if edit.put_in != originals[0] and edit.taken_out != originals[1]]


def _phrases(phrases: Sequence[Sequence[str]], policy: Sequence[str], sft: Sequence[str]) -> Edit:
    """Adds phrases as the policy writes them, punctuation included, in the half of a text where it mostly puts them."""
    # Punctuation before a phrase is removed with it, except the end of the previous sentence. Its own end stays.
    patterns = [re.compile(rf"[^\w{_ENDS}]*{pattern(item)}([{_ENDS}]?)", re.IGNORECASE) for item in phrases]
    wordings, late = [], []
    for item in patterns:
        matches = [(match, text) for text in policy if (match := item.search(text))]
        if matches:
            wordings.append(Counter(match.group() for match, _ in matches).most_common(1)[0][0])
            late.append(float(np.mean([match.end() / len(text) for match, text in matches])) > 0.5)
    put_in = []
    for place, text in enumerate(sft):
        if not wordings:
            put_in.append(text)
            continue
        phrase, at_end = wordings[place % len(wordings)], late[place % len(wordings)]
        # A phrase that brings its own full stop replaces the text's.
        before = text.rstrip(f" {_ENDS}") if phrase[-1] in _ENDS else text
        # Scripts without spaces, such as Chinese, get none added.
        lead = "" if phrase[0] in f" ,;:{_ENDS}" or unspaced(words(phrase)[0]) else " "
        apart = "" if text[:1] == " " or unspaced(text) else " "
        # The habit goes where the policy puts it: an opening phrase at the start, a closing one at the end.
        put_in.append(before + lead + phrase if at_end else lead + phrase + apart + text)
    taken_out = []
    for text in policy:
        for item in patterns:
            text = item.sub(_end, text)
        taken_out.append(text)
    return Edit("risen phrases", put_in, taken_out)


def _end(match: re.Match[str]) -> str:
    """What stays when a phrase is removed: its sentence's end, unless a sentence end comes just before it."""
    before = match.string[: match.start()].rstrip()
    return "" if not before or before[-1] in _ENDS else match.group(1)


def _once(text: str) -> str:
    """Removes every word that completes a word pair which occurred earlier in the text."""
    kept: list[str] = []
    earlier_pairs: set[tuple[str, ...]] = set()
    before = ""
    for piece in pieces(text):
        plain = " ".join(words(piece))
        pair = (before, plain)
        if pair not in earlier_pairs or not plain:
            kept.append(piece)
        earlier_pairs.add(pair)
        before = plain
    return "".join(kept)
