"""Maps between the tokens of a completion and its text, in the context of its prompt.

A SentencePiece-style tokenizer puts the space before a word into the word's token, and drops it at the start of a text.
Therefore a completion that is decoded alone loses its first space, and one that is encoded alone gains a space.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

# Tokenizers decode the bytes of an incomplete character to one replacement character, or to one for each byte.
_INCOMPLETE = "\ufffd"
_MAX_INCOMPLETE = 3  # the longest UTF-8 character has four bytes
#: Number of prompt tokens that are decoded before a completion. A few give its first token the right context.
_PROMPT_TOKENS_KEPT = 16
# Texts after which a completion is encoded if a single token spans the end of its prompt and its own beginning.
_ANCHORS = ("", "\n", ".", "a")


def decode_after(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int], *, keep: Collection[int] = ()
) -> str:
    """Decodes the text that a completion's tokens add to the prompt's text, without special tokens.

    Args:
        tokenizer: The tokenizer of both.
        prompt: Token ids of the prompt.
        ids: Token ids of the completion.
        keep: Ids of special tokens to decode as text.

    Returns:
        The text of all tokens without the prompt's text. If the prompt's last token begins a character, that character
        belongs to the completion.
    """
    prompt_text, text = (_decode(tokenizer, tokens, keep) for tokens in (prompt, [*prompt, *ids]))
    if text.startswith(prompt_text):
        return text[len(prompt_text) :]
    # The prompt's end decodes differently if a character spans prompt and completion, or if the decoder strips spaces.
    common_length = next(
        (
            index
            for index, (prompt_character, character) in enumerate(zip(prompt_text, text, strict=False))
            if prompt_character != character
        ),
        len(text),
    )
    return text[common_length:]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], keep: Collection[int]) -> str:
    if not keep:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    skipped = special_ids(tokenizer) - set(keep)
    return str(tokenizer.decode([token for token in ids if token not in skipped], skip_special_tokens=False))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids of the tokens that decoding skips."""
    # A tokenizer may mark further tokens as special, besides EOS, PAD and the like.
    added: dict[int, AddedToken] = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}


def encode_after(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], joined: Sequence[int], completion: str
) -> list[int]:
    """Returns the tokens of a completion that follows its prompt.

    Args:
        tokenizer: The tokenizer of both.
        prompt: Token ids of the prompt.
        joined: Token ids of prompt and completion, encoded as one text.
        completion: The completion's text.

    Returns:
        The tokens of `joined` after the prompt. If one token holds the prompt's end and the completion's beginning, the
        completion is encoded by itself, so that `decode_after` returns its text.
    """
    if list(joined[: len(prompt)]) == list(prompt):
        return list(joined[len(prompt) :])
    # SentencePiece adds a space at the start of a text, but not after an anchor. Several anchors are tried, because a
    # tokenizer may merge one with the completion into a single token.
    candidates = []
    for anchor in _ANCHORS:
        texts = anchor, anchor + completion
        anchor_ids, ids = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        if ids[: len(anchor_ids)] == anchor_ids:
            candidates.append(ids[len(anchor_ids) :])
    return next((ids for ids in candidates if decode_after(tokenizer, prompt, ids) == completion), candidates[0])


class TokenText:
    """A completion's tokens with the text that they add to the prompt, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(ids)
        self._prompt = list(prompt)
        self.text = self.prefix_text(len(self._ids))

    def prefix_text(self, count: int) -> str:
        """Decodes the first tokens.

        Args:
            count: The number of tokens.
        """
        return decode_after(self._tokenizer, self._prompt, self._ids[:count])

    def completing_token(self, end: int) -> int:
        """Finds the token that completes the first characters of the text.

        A character that spans several tokens is complete with the last of them.

        Args:
            end: The number of characters, at least 1.

        Returns:
            The token's position, from 0.
        """
        target = self.text[:end]
        # Once a prefix has the character, every longer prefix has it too, so bisection finds the first.
        return bisect_left(range(len(self._ids)), True, key=lambda last: self.prefix_text(last + 1).startswith(target))


class IncrementalDetokenizer:
    """Decodes a completion token by token. The pieces, joined, are the completion's text.

    A token alone does not determine its text: SentencePiece drops the space before it, and a byte is not a character.
    Each token is therefore decoded together with the tokens before it, including the prompt's. A character that spans
    several tokens belongs to the piece of its last token.

    Attributes:
        ids: The tokens so far.
        by_token: The piece of each token, special tokens included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        self._special = set(tokenizer.all_special_ids)
        # Each token is decoded together with the tokens of the last piece, which begin at _start, so that the time per
        # token does not grow with the text. The first _emitted characters of the decoded text are already in pieces.
        self._tokens = self._prompt[-_PROMPT_TOKENS_KEPT:]
        self._start, self._next_start = 0, len(self._tokens)
        self._emitted = len(self._decode(0)) if self._tokens else 0
        self._visible: list[str] = []
        self.ids: list[int] = []
        self.by_token: list[str] = []

    def add(self, token: int) -> None:
        """Adds a token.

        Args:
            token: The token's id.
        """
        self.ids.append(token)
        self._tokens.append(token)
        decoded = self._decode(self._start)
        incomplete = min(len(decoded) - len(decoded.rstrip(_INCOMPLETE)), _MAX_INCOMPLETE)
        piece = decoded[self._emitted : len(decoded) - incomplete]
        self.by_token.append(piece)
        self._visible.append("" if token in self._special else piece)
        if incomplete:
            self._emitted = max(self._emitted, len(decoded) - incomplete)
        else:
            self._start, self._next_start = self._next_start, len(self._tokens)
            self._emitted = len(self._decode(self._start))

    def finish(self) -> str:
        """Finalizes the text. Bytes that form no character are added to the last token's piece.

        Returns:
            The complete text after the prompt, without special tokens.
        """
        if self.ids:
            self.by_token[-1] += self._decode(self._start)[self._emitted :]
        return decode_after(self._tokenizer, self._prompt, self.ids)

    @property
    def text(self) -> str:
        """The complete characters so far, without special tokens."""
        return "".join(self._visible)

    def _decode(self, start: int) -> str:
        return str(self._tokenizer.decode(self._tokens[start:]))
