"""Policies that need no training, as baselines for a policy and for its judge.

A constant writes the same text after every prompt. The others are SFT's completions with the ending whose share rose
most under PPO, and PPO's own completions shuffled among prompts. They are chosen on validation prompts without the
judge, and measured on test prompts. If a judge prefers a constant to SFT, a policy can win without reading the prompt,
so the judge's preference means little.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .stats import Estimate, WinRate

Kind = Literal["constant", "ending", "shuffled"]
MAX_CANDIDATES = 16  # texts with the highest reward after their own prompts
MAX_ENDING_WORDS = 6
MIN_RISE = 0.05  # in the share of completions; a smaller rise is not a habit
_MIN_RISE_KEPT = 0.8  # share of the largest rise that a longer ending must have to replace a shorter one


@dataclass(frozen=True)
class TrivialPolicy:
    """A trivial policy before it is measured.

    Attributes:
        name: The name in tables.
        kind: "constant", "ending" or "shuffled".
        text: What it writes, or appends; empty for shuffled completions.
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
        win_rate: Against SFT, by that judge.
        reward: The mean reward; None without a reward.
    """

    policy: TrivialPolicy
    judge: Estimate
    win_rate: WinRate
    reward: Estimate | None = None

    @property
    def beats_sft(self) -> bool:
        """Whether the judge prefers it to SFT, with the interval above ½."""
        return self.win_rate.ci95[0] > 0.5

    def to_json(self) -> dict[str, Any]:
        """Returns the policy and its scores as JSON."""
        return {
            **vars(self.policy),
            "judge": self.judge.to_json(),
            "win_rate": self.win_rate.to_json(),
            "reward": self.reward.to_json() if self.reward else None,
            "beats_sft": self.beats_sft,
        }


@dataclass(frozen=True)
class TrivialScores:
    """The scores of all trivial policies.

    Attributes:
        policies: The scores.
    """

    policies: Sequence[TrivialScore]

    @property
    def winnable(self) -> bool:
        """Whether a constant beats SFT, with an interval above ½."""
        return any(score.policy.kind == "constant" and score.beats_sft for score in self.policies)

    def to_json(self) -> dict[str, Any]:
        """Returns all scores, and whether a constant wins, as JSON."""
        return {"winnable_by_a_constant": self.winnable, "policies": [score.to_json() for score in self.policies]}


def candidates(texts: Sequence[str], rewards: Sequence[float]) -> list[str]:
    """Selects the texts that the reward scores highest after their own prompts.

    Args:
        texts: (N,) completions.
        rewards: (N,) rewards.

    Returns:
        At most `MAX_CANDIDATES` distinct texts, highest first.
    """
    # Ties are broken by the text, so the choice does not depend on the order of the samples.
    ordered = sorted(zip(rewards, texts, strict=True), key=lambda pair: (-pair[0], pair[1]))
    return list(dict.fromkeys(text for _, text in ordered))[:MAX_CANDIDATES]


def choose(sft: Sequence[str], ppo: Sequence[str], *, favorite: str | None = None) -> list[TrivialPolicy]:
    """Chooses the trivial policies from completions to validation prompts.

    Args:
        sft: SFT's completions.
        ppo: PPO's completions.
        favorite: The reward's favorite text, as another constant; None without a reward.

    Returns:
        The policies, constants first.
    """
    constants = {
        "SFT's most frequent completion": _most_frequent(sft),
        "PPO's most frequent completion": _most_frequent(ppo),
        "the reward's favorite completion": favorite,
    }
    chosen: dict[str, TrivialPolicy] = {}
    for name, text in constants.items():
        if text and text not in chosen:
            chosen[text] = TrivialPolicy(name, "constant", text)
    policies = list(chosen.values())
    if ending := risen_ending(sft, ppo):
        policies.append(TrivialPolicy("SFT with PPO's most risen ending", "ending", ending))
    return [*policies, TrivialPolicy("PPO with prompts shuffled", "shuffled")]


def _most_frequent(texts: Sequence[str]) -> str | None:
    # Always writing nothing is not a policy worth comparing.
    counted = Counter(text for text in texts if text.strip())
    return min(counted, key=lambda text: (-counted[text], text), default=None)


def risen_ending(sft: Sequence[str], ppo: Sequence[str]) -> str | None:
    """Finds the ending of 1 to `MAX_ENDING_WORDS` words whose share rose most from SFT to PPO.

    Of nested endings, the longest that keeps most of the rise is taken: ", and i love it." rather than "it.".

    Args:
        sft: SFT's completions.
        ppo: PPO's completions.

    Returns:
        The ending with the space before it; None if none rose by `MIN_RISE`.
    """
    rises: dict[int, tuple[float, str]] = {}
    for size in range(1, MAX_ENDING_WORDS + 1):
        # A whole text is not an ending: `_ending` returns "" for it.
        before, after = (Counter(filter(None, (_ending(text, size) for text in texts))) for texts in (sft, ppo))
        if after:
            # Shares rather than counts, since the two sides may differ in number.
            rise = {text: after[text] / len(ppo) - before[text] / max(1, len(sft)) for text in after}
            text = min(rise, key=lambda ending: (-rise[ending], ending))
            rises[size] = rise[text], text
    if not rises or (largest := max(rise for rise, _ in rises.values())) < MIN_RISE:
        return None
    return rises[max(size for size, (rise, _) in rises.items() if rise >= _MIN_RISE_KEPT * largest)][1]


def _ending(text: str, size: int) -> str:
    """Returns the last words with the space before them; empty if the text has no other words."""
    words = text.split()
    return " " + " ".join(words[-size:]) if len(words) > size else ""


def with_ending(text: str, ending: str) -> str:
    """Appends an ending to a text in place of its final punctuation, unless the text already ends with it.

    Args:
        text: A completion.
        ending: The ending, with its leading space.

    Returns:
        The new text.
    """
    return text if text.endswith(ending) else text.rstrip().rstrip(".!?") + "," + ending


def shift_by_prompt(texts: Sequence[str], samples: int) -> list[str]:
    """Gives each prompt the completions of the prompt before it.

    Args:
        texts: (prompts · samples,) completions in the order of the prompts.
        samples: Completions per prompt.

    Returns:
        The same texts, shifted by one prompt.
    """
    # A shift, not a shuffle, so that no prompt keeps its own completions.
    return [*texts[-samples:], *texts[:-samples]]
