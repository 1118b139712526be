"""Maps between the tokens of a completion and its text, in the context of its prompt.

A SentencePiece-style tokenizer includes the space before a word in the word's token, and drops this space at the start
of a text. So a completion decoded alone loses its first space, and a completion encoded alone gains a space.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

# Tokenizers decode the bytes of an incomplete character to one replacement character, or to one for each byte.
_REPLACEMENT = "\ufffd"
_MAX_INCOMPLETE = 3  # bytes, because the longest UTF-8 character has four
#: The number of prompt tokens that are decoded before a completion, as context for the completion's first token.
_PROMPT_TOKENS_KEPT = 16
# Texts after which a completion is encoded if a single token spans the prompt's end and the completion's beginning.
_ANCHORS = ("", "\n", ".", "a")  # the empty text has no tokens, so it always gives a candidate


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
        The text of all tokens, without the prompt's text. A character that the prompt's last token begins belongs to
        the completion.
    """
    prompt_text, text = (_decode(tokenizer, tokens, keep) for tokens in (prompt, [*prompt, *ids]))
    if text.startswith(prompt_text):
        return text[len(prompt_text) :]
    # The prompt's end may decode differently: a character may span prompt and completion, or the decoder strips spaces.
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
    skipped_ids = special_ids(tokenizer) - set(keep)
    return str(tokenizer.decode([token for token in ids if token not in skipped_ids], skip_special_tokens=False))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids of the tokens that decoding skips."""
    # A tokenizer may mark further tokens as special, besides named tokens such as EOS and PAD.
    added_tokens: dict[int, AddedToken] = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token_id for token_id, token in added_tokens.items() if token.special)}


def encode_after(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], joined_ids: Sequence[int], completion: str
) -> list[int]:
    """Returns the tokens of a completion that follows its prompt.

    Args:
        tokenizer: The tokenizer of both.
        prompt: Token ids of the prompt.
        joined_ids: Token ids of prompt and completion, encoded as one text.
        completion: The completion's text.

    Returns:
        The ids in `joined_ids` after the prompt. If a token spans the prompt's end and the completion's beginning, the
        completion is encoded separately, so that `decode_after` returns its text.
    """
    if list(joined_ids[: len(prompt)]) == list(prompt):
        return list(joined_ids[len(prompt) :])
    # SentencePiece adds a space at the start of a text, but not after an anchor. Try several anchors, because a
    # tokenizer may merge an anchor and the completion's beginning into a single token.
    candidates = []
    for anchor in _ANCHORS:
        texts = anchor, anchor + completion
        anchor_ids, ids = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        if ids[: len(anchor_ids)] == anchor_ids:
            candidates.append(ids[len(anchor_ids) :])
    return next((ids for ids in candidates if decode_after(tokenizer, prompt, ids) == completion), candidates[0])


class TokenText:
    """A completion's tokens and the text that they add to the prompt, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(ids)
        self._prompt = list(prompt)
        self.text = self.prefix_text(len(self._ids))

    def prefix_text(self, count: int) -> str:
        """Decodes the first `count` tokens."""
        return decode_after(self._tokenizer, self._prompt, self._ids[:count])

    def completing_token(self, end: int) -> int:
        """Returns the position of the token that completes the first `end` characters of the text.

        A character that spans several tokens is complete with the last of them.
        """
        target = self.text[:end]
        # If a prefix has these characters, every longer prefix has them too, so bisection finds the first such prefix.
        return bisect_left(range(len(self._ids)), True, key=lambda last: self.prefix_text(last + 1).startswith(target))


class IncrementalDetokenizer:
    """Decodes a completion token by token. The joined pieces are the completion's text.

    A token alone does not determine its text: SentencePiece drops the space before a first token, and a token may be
    one byte of a character. So each token is decoded after the tokens before it, including those of the prompt. A
    character that spans several tokens belongs to the piece of its last token.

    Attributes:
        ids: The tokens so far.
        by_token: The text piece of each token, special tokens included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        self._special_ids = set(tokenizer.all_special_ids)
        # Each token is decoded after the tokens of the last piece, which begin at _start, so that the time per token is
        # the same in long texts. The first _emitted_length characters of the decoded text are already in pieces.
        self._tokens = self._prompt[-_PROMPT_TOKENS_KEPT:]
        self._start, self._next_start = 0, len(self._tokens)
        self._emitted_length = len(self._decode(0)) if self._tokens else 0
        self._visible_pieces: list[str] = []
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
        incomplete_length = min(len(decoded) - len(decoded.rstrip(_REPLACEMENT)), _MAX_INCOMPLETE)
        piece = decoded[self._emitted_length : len(decoded) - incomplete_length]
        self.by_token.append(piece)
        self._visible_pieces.append("" if token in self._special_ids else piece)
        if incomplete_length:
            self._emitted_length = max(self._emitted_length, len(decoded) - incomplete_length)
        else:
            self._start, self._next_start = self._next_start, len(self._tokens)
            self._emitted_length = len(self._decode(self._start))

    def finish(self) -> str:
        """Completes the last token's piece, which gets any bytes that form no character.

        Returns:
            The complete text after the prompt, without special tokens.
        """
        if self.ids:
            self.by_token[-1] += self._decode(self._start)[self._emitted_length :]
        return decode_after(self._tokenizer, self._prompt, self.ids)

    @property
    def text(self) -> str:
        """The text of all complete characters so far, without special tokens."""
        return "".join(self._visible_pieces)

    def _decode(self, start: int) -> str:
        return str(self._tokenizer.decode(self._tokens[start:]))
