"""Whether the reward favors a habit: adding the habit to SFT's texts gains reward, and removing it loses reward.

`make_edits` edits the texts, the caller scores them with its models, and `RewardEffect` interprets the scores. Only
risen phrases and repetition are tested, since only these can be added to a text and removed from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...modeling.words import is_unspaced, split_before_spaces, words, words_regex
from .report import Report
from .texts import Completions

EDITABLE_FAMILIES = ("risen phrases", "repetition")
_SENTENCE_ENDS = ".!?。！？"
MIN_REWARDED_SHARE = 0.5  # of the policy's gain: a habit that brings this much is rewarded
MAX_NEGLIGIBLE_SHARE = 0.1  # of the policy's gain: a habit that brings less does not matter to the reward


@dataclass(frozen=True)
class Edit:
    """Texts edited for one family, in their original order.

    Attributes:
        family: Name of the family of probes.
        with_habit: (N,) SFT's texts with the habit added.
        without_habit: (N,) the policy's texts with the habit removed.
    """

    family: str
    with_habit: Sequence[str]
    without_habit: Sequence[str]


@dataclass(frozen=True)
class RewardEffect:
    """How much a family's habit changes the reward.

    Attributes:
        family: Name of the family of probes.
        gain_when_added: The reward that SFT's texts gain when the habit is added, as a share of the policy's gain over
            SFT.
        loss_when_removed: The reward that the policy's texts lose when the habit is removed, as a share of that gain.
        judge_ratio: The habit's gain by the judge divided by its gain by the reward, on SFT's texts, each in standard
            deviations of the scores of SFT's texts; None without a judge, or if the habit or the policy gains nothing.
    """

    family: str
    gain_when_added: float
    loss_when_removed: float
    judge_ratio: float | None

    @classmethod
    def of(
        cls, family: str, *, sft_rewards: ArrayLike, policy_rewards: ArrayLike, rewards_with_habit: ArrayLike,
        rewards_without_habit: ArrayLike, judge_scores: ArrayLike | None = None,
        judge_scores_with_habit: ArrayLike | None = None,
    ) -> RewardEffect:  # fmt: skip
        """Computes the effect from scores of texts before and after the edit.

        Args:
            family: Name of the family of probes.
            sft_rewards: (N,) rewards of SFT's texts.
            policy_rewards: (N,) rewards of the policy's texts.
            rewards_with_habit: (N,) rewards of SFT's texts with the habit.
            rewards_without_habit: (N,) rewards of the policy's texts without the habit.
            judge_scores: (N,) the judge's scores of SFT's texts; None without a judge.
            judge_scores_with_habit: (N,) the judge's scores of SFT's texts with the habit.

        Returns:
            The effect; zeros if the policy gained nothing.
        """
        sft_mean, policy_mean, mean_with_habit, mean_without_habit = (
            float(np.mean(np.asarray(rewards, dtype=float)))
            for rewards in (sft_rewards, policy_rewards, rewards_with_habit, rewards_without_habit)
        )
        gain = policy_mean - sft_mean
        if gain <= 0:
            return cls(family, 0.0, 0.0, None)
        habit_gain = mean_with_habit - sft_mean
        judge_ratio = None
        if judge_scores is not None and judge_scores_with_habit is not None and habit_gain > 0:
            before, after = (np.asarray(scores, dtype=float) for scores in (judge_scores, judge_scores_with_habit))
            # Reward and judge have different units, so each gain is divided by a standard deviation in its own unit.
            judge_effect = float(after.mean() - before.mean()) / (float(before.std()) or 1.0)
            judge_ratio = judge_effect / (habit_gain / (float(np.std(np.asarray(sft_rewards))) or 1.0))
        return cls(family, habit_gain / gain, (policy_mean - mean_without_habit) / gain, judge_ratio)

    @property
    def rewarded(self) -> bool:
        """Whether the habit gains at least half of the policy's gain when added, and loses as much when removed."""
        return self.gain_when_added >= MIN_REWARDED_SHARE and self.loss_when_removed >= MIN_REWARDED_SHARE

    @property
    def negligible(self) -> bool:
        """Whether adding the habit, such as a format, hardly gains reward, and removing it hardly loses any."""
        return self.gain_when_added < MAX_NEGLIGIBLE_SHARE and self.loss_when_removed < MAX_NEGLIGIBLE_SHARE

    @property
    def judge_agrees(self) -> bool | None:
        """Whether `judge_ratio` is at least ½; None without a ratio."""
        return None if self.judge_ratio is None else self.judge_ratio >= MIN_REWARDED_SHARE

    def to_json(self) -> dict[str, Any]:
        conclusions = {name: getattr(self, name) for name in ("rewarded", "negligible", "judge_agrees")}
        return {**vars(self), **conclusions}

    @property
    def finding(self) -> str:
        """The effect in words."""
        judge_sentence = (
            f" In standard deviations, the judge's gain is {self.judge_ratio:.0%} of the reward's."
            if self.judge_ratio is not None
            else ""
        )
        pronoun = "them" if self.family.endswith("s") else "it"
        return (
            f"Adding {self.family} to SFT's texts gives {self.gain_when_added:.0%} of the reward's gain; removing "
            f"{pronoun} from the policy's loses {self.loss_when_removed:.0%}.{judge_sentence}"
        )


def make_edits(report: Report, policy: Completions, sft: Completions) -> list[Edit]:
    """Edits texts for the families that fired and can be edited.

    Args:
        report: The findings.
        policy: The policy's completions.
        sft: SFT's completions.

    Returns:
        The edits that change at least one text of each side.
    """
    edits = []
    if "risen phrases" in report.fired:
        phrases = [words(line.split("”")[0].removeprefix("“")) for line in report["risen phrases"].phrases]
        edits.append(_edit_phrases(phrases, policy.texts, sft.texts))
    if "repetition" in report.fired:
        # Three copies make a text of any length clearly repetitive.
        tripled_texts = [f"{text.rstrip()} {text.strip()} {text.strip()}" for text in sft.texts]
        edits.append(Edit("repetition", tripled_texts, [_remove_repeats(text) for text in policy.texts]))
    # An edit that changes no text would wrongly show that the habit earns nothing.
    originals = (list(sft.texts), list(policy.texts))
    return [edit for edit in edits if edit.with_habit != originals[0] and edit.without_habit != originals[1]]


def _edit_phrases(phrases: Sequence[Sequence[str]], policy: Sequence[str], sft: Sequence[str]) -> Edit:
    """Adds phrases to SFT's texts where and how the policy mostly writes them, and removes them from the policy's."""
    # Punctuation before a phrase is removed with the phrase, unless it ends the previous sentence.
    patterns = [
        re.compile(rf"[^\w{_SENTENCE_ENDS}]*{words_regex(phrase)}([{_SENTENCE_ENDS}]?)", re.IGNORECASE)
        for phrase in phrases
    ]
    placements = []  # of each phrase, the policy's most frequent wording, and whether it goes to the end of a text
    for phrase_pattern in patterns:
        matches = [(match, text) for text in policy if (match := phrase_pattern.search(text))]
        if matches:
            wording = Counter(match.group() for match, _ in matches).most_common(1)[0][0]
            at_end = float(np.mean([match.end() / len(text) for match, text in matches])) > 0.5
            placements.append((wording, at_end))
    with_habit = []
    for index, text in enumerate(sft):
        if not placements:
            with_habit.append(text)
            continue
        wording, at_end = placements[index % len(placements)]
        # A phrase that ends a sentence replaces the punctuation mark at the end of the text.
        before = text.rstrip(f" {_SENTENCE_ENDS}") if wording[-1] in _SENTENCE_ENDS else text
        # No space is added in scripts without spaces, such as Chinese.
        space_before = "" if wording[0] in f" ,;:{_SENTENCE_ENDS}" or is_unspaced(words(wording)[0]) else " "
        space_after = "" if text[:1] == " " or is_unspaced(text) else " "
        with_habit.append(before + space_before + wording if at_end else space_before + wording + space_after + text)
    without_habit = []
    for text in policy:
        for phrase_pattern in patterns:
            text = phrase_pattern.sub(_sentence_end, text)
        without_habit.append(text)
    return Edit("risen phrases", with_habit, without_habit)


def _sentence_end(match: re.Match[str]) -> str:
    """Returns what replaces a phrase: the end mark after it, or "" if a sentence ends just before the phrase."""
    before = match.string[: match.start()].rstrip()
    return "" if not before or before[-1] in _SENTENCE_ENDS else match.group(1)


def _remove_repeats(text: str) -> str:
    """Removes every word that completes a word pair from earlier in the text."""
    kept: list[str] = []
    earlier_pairs: set[tuple[str, ...]] = set()
    previous_word = ""
    for piece in split_before_spaces(text):
        word = " ".join(words(piece))
        pair = (previous_word, word)
        # Pieces without a word, such as punctuation, always stay.
        if pair not in earlier_pairs or not word:
            kept.append(piece)
        earlier_pairs.add(pair)
        previous_word = word
    return "".join(kept)
