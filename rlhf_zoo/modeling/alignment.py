"""The tokens of a completion and its text, always read after the prompt.

A tokenizer of SentencePiece's kind writes the space before a word into the word's token, and leaves it out where a text
begins. So a completion that is decoded alone loses its first space, and one that is encoded alone gains one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What tokenizers decode incomplete characters to: one for up to three bytes, or one for each byte.
INCOMPLETE = "\ufffd"
MOST_INCOMPLETE = 3
#: Tokens of the prompt with which pieces of a completion are decoded.
BEFORE = 16
#: Texts after which a completion is encoded if a token holds both its beginning and the end of its prompt.
_ANCHORS = ("", "\n", ".", "a")


def decode_behind(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int], *, keep: Collection[int] = ()
) -> str:
    """Decodes the text that a completion's tokens add to the prompt's text, without special tokens.

    Args:
        tokenizer: Of both.
        prompt: Token ids of the prompt.
        ids: Token ids of the completion.
        keep: Special tokens to decode as text.

    Returns:
        The text of all tokens, without that of the prompt. A character that the prompt's last token begins belongs to
        the completion.
    """
    before, text = (_decode(tokenizer, some, keep) for some in (prompt, [*prompt, *ids]))
    if text.startswith(before):
        return text[len(before) :]
    # The prompt's end decodes differently if a character's bytes are on both sides, or the decoder strips spaces.
    same = next(
        (place for place, (left, right) in enumerate(zip(before, text, strict=False)) if left != right), len(text)
    )
    return text[same:]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], keep: Collection[int]) -> str:
    if not keep:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    skipped = special_ids(tokenizer) - set(keep)
    return str(tokenizer.decode([index for index in ids if index not in skipped], skip_special_tokens=False))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids of the tokens that decoding leaves out.

    Args:
        tokenizer: Any tokenizer.
    """
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}


def encode_behind(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], both: Sequence[int], completion: str
) -> list[int]:
    """Returns the tokens of a completion that follows its prompt.

    Args:
        tokenizer: Of both.
        prompt: Token ids of the prompt.
        both: Token ids of prompt and completion, encoded as one text.
        completion: The completion's text.

    Returns:
        What `both` has after the prompt. Where one of its tokens also holds the end of the prompt, the completion is
        encoded by itself, so that `decode_behind` gives back its text.
    """
    if list(both[: len(prompt)]) == list(prompt):
        return list(both[len(prompt) :])
    # Where a text starts, SentencePiece adds a space; after an anchor it does not.
    candidates = []
    for anchor in _ANCHORS:
        texts = anchor, anchor + completion
        before, text = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        if text[: len(before)] == before:
            candidates.append(text[len(before) :])
    return next((ids for ids in candidates if decode_behind(tokenizer, prompt, ids) == completion), candidates[0])


class TokenText:
    """A completion's tokens with the text that they add to the prompt's, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(ids)
        self._prompt = list(prompt)
        self.text = self.first(len(self._ids))

    def first(self, count: int) -> str:
        """Returns the text of the first tokens.

        Args:
            count: How many tokens.
        """
        return decode_behind(self._tokenizer, self._prompt, self._ids[:count])

    def completing(self, end: int) -> int:
        """Finds the token with which the beginning of the text is complete.

        A character of several tokens is complete with its last one.

        Args:
            end: How many characters, from 1.

        Returns:
            The token's position, from 0.
        """
        wanted = self.text[:end]
        return bisect_left(range(len(self._ids)), True, key=lambda last: self.first(last + 1).startswith(wanted))


class Pieces:
    """The text that each token adds, token by token. Joined, the pieces are the whole text.

    One token alone does not determine its text: SentencePiece drops the space before it, and a byte is no character. So
    each token is decoded after those before it, the first ones after the prompt's. A character of several tokens
    appears with its last one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        self._special = set(tokenizer.all_special_ids)
        # Tokens from _start on are decoded again with the next token, and the first _shown characters of their text
        # are out already. _read: where the tokens begin whose text went out last.
        self._all = self._prompt[-BEFORE:]
        self._start, self._read = 0, len(self._all)
        self._shown = len(self._decode(0)) if self._all else 0
        self._kept: list[str] = []
        self.ids: list[int] = []
        self.all: list[str] = []

    def add(self, token: int) -> None:
        """Adds a token.

        Args:
            token: Its id.
        """
        self.ids.append(token)
        self._all.append(token)
        now = self._decode(self._start)
        held = min(len(now) - len(now.rstrip(INCOMPLETE)), MOST_INCOMPLETE)
        piece = now[self._shown : len(now) - held]
        self.all.append(piece)
        self._kept.append("" if token in self._special else piece)
        if held:
            self._shown = max(self._shown, len(now) - held)
        else:
            self._start, self._read = self._read, len(self._all)
            self._shown = len(self._decode(self._start))

    def finish(self) -> str:
        """Ends the text: bytes that form no character appear with the last token.

        Returns:
            The whole text after the prompt, without special tokens.
        """
        if self.ids:
            self.all[-1] += self._decode(self._start)[self._shown :]
        return decode_behind(self._tokenizer, self._prompt, self.ids)

    @property
    def text(self) -> str:
        """The complete characters so far, without special tokens."""
        return "".join(self._kept)

    def _decode(self, start: int) -> str:
        return str(self._tokenizer.decode(self._all[start:]))
