"""Two rewards in the convention of TRL's GRPO: called with lists, one number a completion comes back.

`finished` is a function and used as it is; `Mentions` is a class, so a recipe gives it settings:

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
    """1 where a completion ends like a sentence, 0 where it breaks off, None where it is empty."""
    texts = [_text(completion).rstrip() for completion in completions]
    return [float(text.endswith((".", "!", "?"))) if text else None for text in texts]


@dataclass(frozen=True, kw_only=True)
class Mentions:
    """The share of `words` that a completion mentions, whatever their case.

    An object of a module's own class can be pickled, which a function made inside another cannot.
    """

    words: Sequence[str]
    __name__ = "mentions"  # what metrics call it: rewards/mentions

    def __post_init__(self) -> None:
        if isinstance(self.words, str) or not self.words:
            raise ValueError(f"words is {self.words!r}: give a list of words.")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [self._share(_text(completion).lower()) for completion in completions]

    def _share(self, text: str) -> float:
        found = set(re.findall(r"\w+", text))
        return sum(word.lower() in found for word in self.words) / len(self.words)


def _text(completion: Any) -> str:
    """Completions are texts, or conversations (lists of messages) where the prompts are."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
