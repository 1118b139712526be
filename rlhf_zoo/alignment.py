"""Which token of a completion holds which character of its text."""

from bisect import bisect_left
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TokenText:
    """A completion's tokens beside their text, special tokens left out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(ids)
        self.text = self.first(len(self._ids))

    def first(self, count: int) -> str:
        """The text of the first `count` tokens."""
        return str(self._tokenizer.decode(self._ids[:count], skip_special_tokens=True))

    def completing(self, end: int) -> int:
        """The first token with which the text's first `end` characters are there, from 0; end: from 1.

        A character of several tokens is there with its last one.
        """
        wanted = self.text[:end]
        return bisect_left(range(len(self._ids)), True, key=lambda last: self.first(last + 1).startswith(wanted))
