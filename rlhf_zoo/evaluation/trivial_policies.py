"""Policies that need no training, which a policy and its judge have to stand beside.

A constant writes one text after every prompt. Others are SFT's completions with the ending that PPO took to most, and
PPO's own completions dealt to other prompts. They are chosen on validation prompts, without a look at the judge, and
measured on test prompts. A judge by which a constant beats SFT can be won without reading the prompt, so that what it
says for a policy says little.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .stats import Estimate, WinRate

Kind = Literal["constant", "ending", "shuffled"]
CANDIDATES = 16  # of the reward's: those with the highest reward after their own prompts
ENDING = 6  # words of the longest ending
LEAST_RISE = 0.05  # of the share of completions; a smaller one is no habit
_LONGER = 0.8  # a longer ending is taken for a shorter one that holds most of its rise


@dataclass(frozen=True)
class TrivialPolicy:
    """A trivial policy before it is measured. text: what it writes, or appends; empty for shuffled prompts."""

    name: str
    kind: Kind
    text: str = ""


@dataclass(frozen=True)
class TrivialScore:
    """A trivial policy on test prompts, by the headline's judge. reward: None without a reward."""

    policy: TrivialPolicy
    judge: Estimate
    win_rate: WinRate
    reward: Estimate | None = None

    @property
    def beats_sft(self) -> bool:
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
    """All of them."""

    policies: Sequence[TrivialScore]

    @property
    def winning(self) -> TrivialScore | None:
        """The constant that beats SFT by most, if one does."""
        beating = [one for one in self.policies if one.policy.kind == "constant" and one.beats_sft]
        return max(beating, key=lambda one: one.win_rate.value, default=None)

    @property
    def winnable(self) -> bool:
        """Whether a constant beats SFT, by an interval above ½."""
        return self.winning is not None

    def to_json(self) -> dict[str, Any]:
        return {"winnable_by_a_constant": self.winnable, "policies": [one.to_json() for one in self.policies]}


def candidates(texts: Sequence[str], rewards: Sequence[float]) -> list[str]:
    """The texts that the reward scores highest after their own prompts, each once, at most `CANDIDATES`."""
    ordered = sorted(zip(rewards, texts, strict=True), key=lambda one: (-one[0], one[1]))
    return list(dict.fromkeys(text for _, text in ordered))[:CANDIDATES]


def choose(sft: Sequence[str], ppo: Sequence[str], *, favorite: str | None = None) -> list[TrivialPolicy]:
    """The trivial policies, from completions to validation prompts. favorite: the reward's, as a constant."""
    constants = {
        "SFT's most frequent completion": _most_frequent(sft),
        "PPO's most frequent completion": _most_frequent(ppo),
        "the reward's favorite completion": favorite,
    }
    chosen: dict[str, TrivialPolicy] = {}
    for name, text in constants.items():
        if text and text not in chosen:
            chosen[text] = TrivialPolicy(name, "constant", text)
    found = list(chosen.values())
    if ending := risen_ending(sft, ppo):
        found.append(TrivialPolicy("SFT with PPO's most risen ending", "ending", ending))
    return [*found, TrivialPolicy("PPO with prompts shuffled", "shuffled")]


def _most_frequent(texts: Sequence[str]) -> str | None:
    counted = Counter(text for text in texts if text.strip())
    return min(counted, key=lambda text: (-counted[text], text), default=None)


def risen_ending(sft: Sequence[str], ppo: Sequence[str]) -> str | None:
    """The ending of 1 to `ENDING` words whose share rose most from SFT to PPO; None where none rose.

    Of endings within one another the longest that has most of the rise: ", and i love it." rather than "it.".
    """
    rises: dict[int, tuple[float, str]] = {}
    for size in range(1, ENDING + 1):
        before, after = (Counter(filter(None, (_ending(text, size) for text in texts))) for texts in (sft, ppo))
        if after:
            rise = {text: after[text] / len(ppo) - before[text] / max(1, len(sft)) for text in after}
            text = min(rise, key=lambda one: (-rise[one], one))
            rises[size] = rise[text], text
    if not rises or (most := max(rise for rise, _ in rises.values())) < LEAST_RISE:
        return None
    return rises[max(size for size, (rise, _) in rises.items() if rise >= _LONGER * most)][1]


def _ending(text: str, size: int) -> str:
    """The last words with the space before them; empty where the text has no more than these."""
    words = text.split()
    return " " + " ".join(words[-size:]) if len(words) > size else ""


def with_ending(text: str, ending: str) -> str:
    """A text that goes on with an ending in the place of its full stop; one that ends so already stays."""
    return text if text.endswith(ending) else text.rstrip().rstrip(".!?") + "," + ending


def dealt(texts: Sequence[str], samples: int) -> list[str]:
    """Completions (prompts × samples, in the order of the prompts), each to the prompt after its own."""
    return [*texts[-samples:], *texts[:-samples]]
