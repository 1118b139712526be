"""Whether a habit is what the reward pays for: put into SFT's texts it must buy, out of the policy's it must lose.

`edits` makes the texts, whoever holds the models scores them, and `Payment` says what the scores mean. Only what can be
put into a text and taken out of it is tried: risen phrases and repetition.
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
    """SFT's texts with a family's habit put in, and the policy's with it taken out, in their order."""

    family: str
    put_in: Sequence[str]
    taken_out: Sequence[str]


@dataclass(frozen=True)
class Payment:
    """What a family's habit earns. bought: of SFT's texts with it, less without; lost: of the policy's, likewise.

    Rewards are shares of what the policy's gained over SFT's, the judge's part, in deviations of SFT's scores, is a
    share of the reward's in its own; None where nothing judges.
    """

    family: str
    bought: float
    lost: float
    judge: float | None

    @classmethod
    def of(
        cls, family: str, *, sft: ArrayLike, policy: ArrayLike, put_in: ArrayLike, taken_out: ArrayLike,
        judged: ArrayLike | None = None, judged_put_in: ArrayLike | None = None,
    ) -> Payment:  # fmt: skip
        """From rewards (N,) of SFT's and the policy's texts as they are and edited, and a judge's of SFT's."""
        a, b, more, less = (float(np.mean(np.asarray(each, dtype=float))) for each in (sft, policy, put_in, taken_out))
        gain = b - a
        if gain <= 0:
            return cls(family, 0.0, 0.0, None)
        judge = None
        if judged is not None and judged_put_in is not None and more > a:
            theirs = float(np.mean(np.asarray(judged_put_in, float)) - np.mean(np.asarray(judged, float)))
            judge = (
                theirs
                / (float(np.std(np.asarray(judged, float))) or 1.0)
                / ((more - a) / (float(np.std(np.asarray(sft))) or 1.0))
            )
        return cls(family, (more - a) / gain, (b - less) / gain, judge)

    @property
    def paid(self) -> bool:
        """Whether at least half of the reward's gain is bought with it, and lost without it."""
        return self.bought >= HALF and self.lost >= HALF

    @property
    def unpaid(self) -> bool:
        """Whether the reward has next to nothing for it: a format, an ending."""
        return self.bought < UNPAID and self.lost < UNPAID

    @property
    def deserved(self) -> bool | None:
        """Whether the judge gives half as much for it, in deviations; None where nothing judges."""
        return None if self.judge is None else self.judge >= HALF

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "paid": self.paid, "unpaid": self.unpaid, "deserved": self.deserved}

    @property
    def meaning(self) -> str:
        judge = "" if self.judge is None else f"; the judge gives {self.judge:.0%} as much for it, in deviations"
        return (
            f"{self.family.capitalize()}, put into SFT's texts, {'buy' if self.family.endswith('s') else 'buys'} "
            f"{self.bought:.0%} of the reward's gain; taken out of the policy's, {self.lost:.0%} is lost{judge}."
        )


def edits(report: Report, policy: Completions, sft: Completions) -> list[Edit]:
    """Of the families that are present and can be edited. One that changes nothing is left out: it measures nothing."""
    found = []
    if "risen phrases" in report.present:
        phrases = [words(said.split("”")[0].removeprefix("“")) for said in report["risen phrases"].about]
        found.append(_phrases(phrases, policy.texts, sft.texts))
    if "repetition" in report.present:
        again = [f"{text.rstrip()} {text.strip()} {text.strip()}" for text in sft.texts]
        found.append(Edit("repetition", again, [_once(text) for text in policy.texts]))
    as_they_are = (list(sft.texts), list(policy.texts))
    return [one for one in found if one.put_in != as_they_are[0] and one.taken_out != as_they_are[1]]


def _phrases(phrases: Sequence[Sequence[str]], policy: Sequence[str], sft: Sequence[str]) -> Edit:
    """As the policy writes them, marks included, where in a text it writes them most: its first half or its second."""
    # What stands before a phrase goes with it, but for the end of the sentence before; its own end stays.
    patterns = [re.compile(rf"[^\w{_ENDS}]*{pattern(one)}([{_ENDS}]?)", re.IGNORECASE) for one in phrases]
    said, late = [], []
    for one in patterns:
        matches = [(match, text) for text in policy if (match := one.search(text))]
        if matches:
            said.append(Counter(match.group() for match, _ in matches).most_common(1)[0][0])
            late.append(float(np.mean([match.end() / len(text) for match, text in matches])) > 0.5)
    put_in = []
    for place, text in enumerate(sft):
        if not said:
            put_in.append(text)
            continue
        phrase, at_end = said[place % len(said)], late[place % len(said)]
        before = text.rstrip(f" {_ENDS}") if phrase[-1] in _ENDS else text
        lead = "" if phrase[0] in f" ,;:{_ENDS}" or unspaced(words(phrase)[0]) else " "
        apart = "" if text[:1] == " " or unspaced(text) else " "
        put_in.append(before + lead + phrase if at_end else lead + phrase + apart + text)
    taken_out = []
    for text in policy:
        for one in patterns:
            text = one.sub(_end, text)
        taken_out.append(text)
    return Edit("risen phrases", put_in, taken_out)


def _end(match: re.Match[str]) -> str:
    """What stays of a phrase that is taken out: its sentence's end, where none stands before it."""
    before = match.string[: match.start()].rstrip()
    return "" if not before or before[-1] in _ENDS else match.group(1)


def _once(text: str) -> str:
    """A text without the words that end a word pair which stood in it before."""
    kept: list[str] = []
    seen: set[tuple[str, ...]] = set()
    before = ""
    for piece in pieces(text):
        plain = " ".join(words(piece))
        pair = (before, plain)
        if pair not in seen or not plain:
            kept.append(piece)
        seen.add(pair)
        before = plain
    return "".join(kept)
