"""Trivial policies, which need no training, as baselines for a policy and for its judge.

A constant writes the same text after every prompt. The other trivial policies are SFT's completions with the ending
whose share rose most under PPO, and PPO's own completions shuffled among prompts. They are chosen on validation prompts
without the judge, and measured on test prompts. If a judge prefers a constant to SFT, a policy can win without reading
the prompt, so the judge's preference means little.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .stats import Estimate, WinRate

Kind = Literal["constant", "ending", "shuffled"]
MAX_CANDIDATES = 16  # texts that may become the reward's favorite completion
MAX_ENDING_WORDS = 6
MIN_RISE = 0.05  # smallest rise of an ending's share of completions that counts as a habit
_MIN_RISE_KEPT = 0.8  # a longer ending replaces a shorter one if its rise is at least this share of the largest rise


@dataclass(frozen=True)
class TrivialPolicy:
    """A trivial policy before it is measured.

    Attributes:
        name: The name in tables.
        kind: "constant", "ending" or "shuffled".
        text: The text that it writes or appends; empty for shuffled completions.
    """

    name: str
    kind: Kind
    text: str = ""


@dataclass(frozen=True)
class TrivialScore:
    """A trivial policy on test prompts.

    Attributes:
        policy: The policy that was scored.
        judge: The headline judge's mean score.
        win_rate: The win rate over SFT by that judge.
        reward: The mean reward; None without a reward.
    """

    policy: TrivialPolicy
    judge: Estimate
    win_rate: WinRate
    reward: Estimate | None = None

    @property
    def beats_sft(self) -> bool:
        """Whether the judge prefers the policy to SFT: the interval of the win rate is above ½."""
        return self.win_rate.ci95[0] > 0.5

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self.policy),
            "judge": self.judge.to_json(),
            "win_rate": self.win_rate.to_json(),
            "reward": self.reward.to_json() if self.reward else None,
            "beats_sft": self.beats_sft,
        }


@dataclass(frozen=True)
class TrivialScores:
    """The scores of all trivial policies."""

    scores: Sequence[TrivialScore]

    @property
    def winnable(self) -> bool:
        """Whether a constant beats SFT."""
        return any(score.policy.kind == "constant" and score.beats_sft for score in self.scores)

    def to_json(self) -> dict[str, Any]:
        return {"winnable_by_a_constant": self.winnable, "policies": [score.to_json() for score in self.scores]}


def select_candidates(texts: Sequence[str], rewards: Sequence[float]) -> list[str]:
    """Selects the texts that the reward scores highest after their own prompts.

    Args:
        texts: (N,) completions.
        rewards: (N,) rewards.

    Returns:
        At most `MAX_CANDIDATES` distinct texts, in order of falling reward.
    """
    # Ties are broken by the text, so the result does not depend on the order of the samples.
    ranking = sorted(zip(rewards, texts, strict=True), key=lambda pair: (-pair[0], pair[1]))
    return list(dict.fromkeys(text for _, text in ranking))[:MAX_CANDIDATES]


def choose_policies(sft: Sequence[str], ppo: Sequence[str], *, favorite: str | None = None) -> list[TrivialPolicy]:
    """Chooses the trivial policies from completions to validation prompts.

    Args:
        sft: SFT's completions.
        ppo: PPO's completions.
        favorite: The text with the highest mean reward over all prompts, as another constant; None without a reward.

    Returns:
        The policies, constants first.
    """
    named_texts = (
        _most_frequent(sft, policy="SFT"),
        _most_frequent(ppo, policy="PPO"),
        ("the reward's favorite completion", favorite),
    )
    constants: dict[str, TrivialPolicy] = {}
    for name, text in named_texts:
        if text:
            constants.setdefault(text, TrivialPolicy(name, "constant", text))
    policies = list(constants.values())
    if ending := find_risen_ending(sft, ppo):
        policies.append(TrivialPolicy("SFT with PPO's most risen ending", "ending", ending))
    return [*policies, TrivialPolicy("PPO with prompts shuffled", "shuffled")]


def _most_frequent(texts: Sequence[str], *, policy: str) -> tuple[str, str | None]:
    """Returns (name, text) of a policy's most frequent completion; its text is None if all are empty."""
    # The empty text is not a useful constant.
    counts = Counter(text for text in texts if text.strip())
    text = min(counts, key=lambda candidate: (-counts[candidate], candidate), default=None)
    recurs = text is not None and counts[text] > 1
    return f"{policy}'s most frequent completion" if recurs else f"one of {policy}'s completions", text


def find_risen_ending(sft: Sequence[str], ppo: Sequence[str]) -> str | None:
    """Finds the ending of 1 to `MAX_ENDING_WORDS` words whose share rose most from SFT to PPO.

    Of the most risen endings of each size, it returns the longest that rose by at least `_MIN_RISE_KEPT` of the largest
    rise: ", and i love it." rather than "it.".

    Args:
        sft: SFT's completions.
        ppo: PPO's completions.

    Returns:
        The ending, beginning with a space; None if no share rose by `MIN_RISE`.
    """
    rises: dict[int, tuple[float, str]] = {}
    for size in range(1, MAX_ENDING_WORDS + 1):
        # A text that has no other words is not an ending: `_last_words` returns "" for it.
        sft_counts, ppo_counts = (
            Counter(filter(None, (_last_words(text, size) for text in texts))) for texts in (sft, ppo)
        )
        if ppo_counts:
            # Shares rather than counts, because the numbers of completions may differ.
            rise_by_ending = {
                ending: count / len(ppo) - sft_counts[ending] / max(1, len(sft)) for ending, count in ppo_counts.items()
            }
            top_ending = min(rise_by_ending, key=lambda ending: (-rise_by_ending[ending], ending))
            rises[size] = rise_by_ending[top_ending], top_ending
    largest_rise = max((rise for rise, _ in rises.values()), default=0.0)
    if largest_rise < MIN_RISE:
        return None
    return rises[max(size for size, (rise, _) in rises.items() if rise >= _MIN_RISE_KEPT * largest_rise)][1]


def _last_words(text: str, size: int) -> str:
    """Returns the last `size` words, beginning with a space; empty if the text has no other words."""
    words = text.split()
    return " " + " ".join(words[-size:]) if len(words) > size else ""


def append_ending(text: str, ending: str) -> str:
    """Replaces a text's final punctuation with a comma and an ending, unless the text already has the ending.

    Args:
        text: A completion.
        ending: The ending, with its leading space.
    """
    return text if text.endswith(ending) else text.rstrip().rstrip(".!?") + "," + ending


def shift_by_prompt(texts: Sequence[str], samples_per_prompt: int) -> list[str]:
    """Gives each prompt the completions of the prompt before it.

    Args:
        texts: (N,) completions in the order of the prompts.
        samples_per_prompt: Completions per prompt.

    Returns:
        The same texts, shifted by one prompt.
    """
    # A shift, not a shuffle, so that no prompt keeps its own completions.
    return [*texts[-samples_per_prompt:], *texts[:-samples_per_prompt]]
