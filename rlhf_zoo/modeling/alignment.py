"""Tokens of a completion and its text, always read behind the prompt.

A tokenizer of SentencePiece's kind writes the space before a word into the word's token, and leaves it out where a text
begins. So a completion that is decoded alone loses its first space, and one that is encoded alone gains one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a tokenizer shows for bytes that are no character yet: one of three bytes, or one for each, by its kind.
INCOMPLETE = "\ufffd"
MOST_INCOMPLETE = 3
BEFORE = 16  # tokens of a prompt that a completion is decoded behind
#: Texts behind which a completion is encoded where it cannot be told from its prompt's last token.
_ANCHORS = ("", "\n", ".", "a")


def decode_behind(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int], *, keep: Collection[int] = ()
) -> str:
    """The text that tokens add to that of the tokens before them, special tokens left out.

    Args:
        tokenizer: The one that both are of.
        prompt: Token ids of the prompt.
        ids: Token ids of the completion.
        keep: Special tokens that are text here.

    Returns:
        The text of all, less that of the prompt. A character that the prompt's last token begins is the completion's.
    """
    before, text = (_decode(tokenizer, some, keep) for some in (prompt, [*prompt, *ids]))
    if text.startswith(before):
        return text[len(before) :]
    # Bytes of one character on both sides, or white space that a decoder takes away, change the prompt's end.
    same = next(
        (place for place, (one, other) in enumerate(zip(before, text, strict=False)) if one != other), len(text)
    )
    return text[same:]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], keep: Collection[int]) -> str:
    if not keep:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    skipped = special_ids(tokenizer) - set(keep)
    return str(tokenizer.decode([index for index in ids if index not in skipped], skip_special_tokens=False))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that decoding leaves out."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}


def encode_behind(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], whole: Sequence[int], completion: str
) -> list[int]:
    """The tokens of a completion as it stands behind its prompt.

    Args:
        tokenizer: The one that encodes.
        prompt: Token ids of the prompt.
        whole: Token ids of prompt and completion as one text.
        completion: The completion's text.

    Returns:
        What `whole` has behind the prompt. Where a token of it holds the end of the prompt too, the completion's own
        tokens, chosen so that `decode_behind` gives back its text.
    """
    if list(whole[: len(prompt)]) == list(prompt):
        return list(whole[len(prompt) :])
    found = []
    for anchor in _ANCHORS:
        both = anchor, anchor + completion
        before, text = (list(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in both)
        if text[: len(before)] == before:
            found.append(text[len(before) :])
    return next((ids for ids in found if decode_behind(tokenizer, prompt, ids) == completion), found[0])


class TokenText:
    """A completion's tokens beside the text that they add to their prompt's, special tokens left out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(ids)
        self._prompt = list(prompt)
        self.text = self.first(len(self._ids))

    def first(self, count: int) -> str:
        """The text of the first `count` tokens."""
        return decode_behind(self._tokenizer, self._prompt, self._ids[:count])

    def completing(self, end: int) -> int:
        """The first token with which the text's first `end` characters are there, from 0; end: from 1.

        A character of several tokens is there with its last one.
        """
        wanted = self.text[:end]
        return bisect_left(range(len(self._ids)), True, key=lambda last: self.first(last + 1).startswith(wanted))


class Pieces:
    """The text that each token adds; joined, they are that of all. A character of several tokens is at its last one.

    One token alone does not say its text: sentencepiece drops the space before it, and a byte is no character. So
    each is decoded behind the tokens before it, the first ones behind the prompt's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        self._special = set(tokenizer.all_special_ids)
        # Tokens from _start on are decoded again with the next, and _shown characters of their text are out. _read:
        # where the tokens begin whose text went out last.
        self._all = self._prompt[-BEFORE:]
        self._start, self._read = 0, len(self._all)
        self._shown = len(self._decode(0)) if self._all else 0
        self._kept: list[str] = []
        self.ids: list[int] = []
        self.all: list[str] = []

    def add(self, token: int) -> None:
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
        """Shows at the last token what is still no character. Returns the whole text behind the prompt, without special
        tokens."""
        if self.ids:
            self.all[-1] += self._decode(self._start)[self._shown :]
        return decode_behind(self._tokenizer, self._prompt, self.ids)

    @property
    def text(self) -> str:
        """What is whole so far, special tokens left out."""
        return "".join(self._kept)

    def _decode(self, start: int) -> str:
        return str(self._tokenizer.decode(self._all[start:]))
