"""Tokens as text: piece by piece while they come, and with every character that a page would hide made visible."""

import unicodedata
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..alignment import decode_behind

# What a tokenizer shows for bytes that are no character yet: one of three bytes, or one for each, by its kind.
INCOMPLETE = "\ufffd"
MOST_INCOMPLETE = 3
BEFORE = 16  # tokens of a prompt that a completion is decoded behind
# Joiners are part of emoji and of Arabic and Indic words.
JOINERS = "\u200c\u200d"


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


def visible_text(text: str) -> str:
    """`text` with a sign for each character that shows nothing, or changes how others are shown.

    Control characters but tab and line feed become their pictures (␀, ␛), others ⟨U+202E⟩: marks of direction, which
    turn text around; spaces of no width; halves of a character; what Unicode has not assigned.
    """
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    category, code = unicodedata.category(character), ord(character)
    if character in "\n\t" or character in JOINERS or category not in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp"):
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"
