"""Two rewards in the convention of TRL's GRPO: they take lists, and return a number for each completion.

`finished` is a function, which a recipe names. `Mentions` is a class, to which a recipe gives settings:

    reward_funcs:
      - finished
      - mentions(words=["battery", "price"])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Mentions", "finished"]


def finished(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Returns 1 if a completion ends like a sentence, 0 if it breaks off, and None if it is empty."""
    texts = [_text(completion).rstrip() for completion in completions]
    return [float(text.endswith((".", "!", "?"))) if text else None for text in texts]


@dataclass(frozen=True, kw_only=True)
class Mentions:
    """Returns the share of `words` that a completion mentions, in any case.

    It is a class because its objects can be pickled, unlike a function defined inside another function.
    """

    words: Sequence[str]
    __name__ = "mentions"  # the name in metrics: rewards/mentions

    def __post_init__(self) -> None:
        if isinstance(self.words, str) or not self.words:
            raise ValueError(f"words is {self.words!r}: give a list of words.")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [self._share(_text(completion).lower()) for completion in completions]

    def _share(self, text: str) -> float:
        used = set(re.findall(r"\w+", text))
        return sum(word.lower() in used for word in self.words) / len(self.words)


def _text(completion: Any) -> str:
    """Returns a completion's text. If prompts are conversations, a completion is a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
