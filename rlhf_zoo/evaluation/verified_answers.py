"""Marks the completions that a program accepted, and finds out whether the program can be trusted.

A program that accepts one text for prompts whose right answers differ is exploited. The right answers are known where
it also accepts completions of SFT that end in a number, as in sums: one text cannot be right for different numbers.
Labels such as "yes" are accepted for many prompts too, but do not end in numbers that differ.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace

from ..errors import ZooError
from .probes import Completions
from .probes.texts import plain_words
from .text import normalize_text

#: A program that checks answers gives few different rewards; a reward model gives nearly every answer its own.
MAX_VERIFIED_VALUES = 20
#: Smallest number of pairs of a recurring text and a prompt whose right answer SFT shows.
MIN_ANSWERS = 10
#: Right answers are numbers if at least this share of SFT's accepted completions ends in one.
MIN_NUMBER_SHARE = 0.9
#: A program is exploited if at least this share of the accepted completions of recurring texts must be wrong.
MIN_WRONG_SHARE = 0.5
_FINAL_NUMBER = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)\W*(?:</\w+>\W*)*$")
_MAX_QUOTE = 60  # characters of a text in a sentence


@dataclass(frozen=True)
class VerifiedSides:
    """Both sides' completions, with the right answers marked.

    Attributes:
        policy: The policy's completions.
        sft: SFT's completions.
        exploit_reason: A sentence on why the program cannot judge; None if no exploit was found.
    """

    policy: Completions
    sft: Completions
    exploit_reason: str | None


def mark_right_answers(policy: Completions, sft: Completions) -> VerifiedSides:
    """Marks the completions with the highest reward on either side as verified, if that reward is above 0.

    Texts that exploit the program are not marked.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.

    Raises:
        ZooError: The rewards are those of a model: nearly all of them differ.
    """
    rewards = [reward for side in (policy, sft) for reward in side.rewards or ()]
    value_count = len(set(rewards))
    if policy.rewards and sft.rewards and value_count > max(MAX_VERIFIED_VALUES, len(rewards) / 2):
        raise ZooError(
            f"--verifiable needs a program's reward, but this reward has {value_count} different values in "
            f"{len(rewards)} rows, like that of a reward model: leave --verifiable out, or name the program's column "
            "with --reward."
        )
    highest = max(rewards, default=0.0)
    policy, sft = (
        replace(side, verified=[reward == highest > 0 for reward in side.rewards]) if side.rewards else side
        for side in (policy, sft)
    )
    exploits = _find_exploits(policy, sft)
    if not exploits:
        return VerifiedSides(policy, sft, None)
    policy, sft = (_unmark(side, exploits) for side in (policy, sft))
    (text, count), more_count = exploits.most_common(1)[0], len(exploits) - 1
    quote = f"{text[:_MAX_QUOTE]} …" if len(text) > _MAX_QUOTE else text
    more_texts = f", and {more_count} other text{'s' if more_count > 1 else ''} likewise" if more_count else ""
    return VerifiedSides(
        policy,
        sft,
        f"The program is exploited, so it cannot judge: it accepts “{quote}” for {count} prompts whose right answers "
        f"differ, as SFT's answers there show{more_texts}.",
    )


def _unmark(side: Completions, exploits: Counter[str]) -> Completions:
    if side.verified is None:
        return side
    verified = [
        is_right and normalize_text(text) not in exploits
        for text, is_right in zip(side.texts, side.verified, strict=True)
    ]
    return replace(side, verified=verified)


def _find_exploits(policy: Completions, sft: Completions) -> Counter[str]:
    """Returns the texts that a program accepts for different right answers, with the number of their prompts."""
    sft_answers: dict[Hashable, str] = {}
    for prompt, text, is_right in zip(sft.prompts, sft.texts, sft.verified or (), strict=False):
        if is_right:
            sft_answers.setdefault(sft.group_by_prompt[prompt], text)
    # Text -> group of prompts -> SFT's right answer to them.
    answers_by_text: defaultdict[str, dict[Hashable, str]] = defaultdict(dict)
    for prompt, text, is_right in zip(policy.prompts, policy.texts, policy.verified or (), strict=False):
        group = policy.group_by_prompt[prompt]
        if is_right and group in sft_answers:
            answers_by_text[normalize_text(text)][group] = sft_answers[group]
    answers_by_recurring_text = {
        text: list(answers.values()) for text, answers in answers_by_text.items() if len(answers) > 1
    }
    answer_count = number_count = wrong_count = 0
    exploits: Counter[str] = Counter()
    for text, answers in answers_by_recurring_text.items():
        numbers = [match[1].replace(",", "") for answer in answers if (match := _FINAL_NUMBER.search(answer))]
        answer_count += len(answers)
        number_count += len(numbers)
        max_right = max(Counter(numbers).values(), default=len(answers))  # one text is right for one number
        if 2 * max_right <= len(answers) and not _is_in_most_answers(text, answers):
            wrong_count += len(answers) - max_right
            exploits[text] = len(answers)
    is_conclusive = answer_count >= MIN_ANSWERS and number_count >= MIN_NUMBER_SHARE * answer_count
    return exploits if is_conclusive and wrong_count >= MIN_WRONG_SHARE * answer_count else Counter()


def _is_in_most_answers(text: str, answers: list[str]) -> bool:
    """Whether most of SFT's right answers contain all words of the text, such as a number or "yes"."""
    text_words = set(plain_words(text))
    return bool(text_words) and 2 * sum(text_words <= set(plain_words(answer)) for answer in answers) > len(answers)
