"""The words of a text, as rewards, probes and metrics count them.

A word is a run of letters and digits with inner apostrophes, lower-cased, and each punctuation mark is a word of its
own, so that a run of exclamation marks counts as the repetition that it is. Han, kana, Thai, Lao, Khmer and Burmese put
no spaces between words: there each character, with the marks that stand on it, is a word.
"""

import re
import unicodedata
from collections.abc import Sequence

_SCRIPTS = (
    "\u0e01-\u0e3e\u0e40-\u0eff"  # Thai, but for the baht sign, and Lao
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"  # Burmese, Khmer
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u302f\u3031-\u303c\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\U00020000-\U0003347f"
    "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001aff0-\U0001b16f"  # kana
)
_MARKS = "".join(
    chr(code) for code in (*range(0xE00, 0x18B0), *range(0x302A, 0x309B), *range(0xA9E0, 0xAA80))
    if unicodedata.category(chr(code)) in ("Mn", "Mc")
)  # fmt: skip
_UNSPACED = f"[{_SCRIPTS}][{_MARKS}]*"
_ASCII_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_SPACED_SIGN = rf"[^\W{_SCRIPTS}]"
_WORD = re.compile(rf"{_SPACED_SIGN}+(?:['’]{_SPACED_SIGN}+)*|{_UNSPACED}|[^\w\s]")
_PIECE = re.compile(rf"\s*(?:{_UNSPACED}|[^\s{_SCRIPTS}]+)")


def words(text: str) -> list[str]:
    """The words of a text, as this module counts them."""
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text.lower())


def unspaced(word: str) -> bool:
    """Whether it, or a text, begins with a character of a script that puts no spaces between words."""
    return re.match(_UNSPACED, word) is not None


def is_word(word: str) -> bool:
    """Whether it is a word or a symbol that says something, as emoji do; not a punctuation mark, nor one of ASCII."""
    return word[0].isalnum() or (not word.isascii() and unicodedata.category(word[0])[0] == "S")


def phrase(tokens: Sequence[str]) -> str:
    """Words in a row as a text may have them, which `words` reads again, with spaces where their script puts some."""
    return "".join(word if unspaced(word) else f" {word}" for word in tokens).removeprefix(" ")


def pattern(tokens: Sequence[str]) -> str:
    """A regular expression of words in a row, as texts have them: with any marks and spaces between."""
    whole = [word[0].isalnum() and not unspaced(word) for word in tokens]
    found = ""
    for k, word in enumerate(tokens):
        between = "" if k == 0 else r"\W+" if whole[k] and whole[k - 1] else r"\W*"
        escaped = re.escape(word)
        found += between + (rf"(?<!{_SPACED_SIGN}){escaped}(?!{_SPACED_SIGN})" if whole[k] else escaped)
    return found


def pieces(text: str) -> list[str]:
    """A text cut where a word can begin, before the spaces that stand there; its last spaces are left off."""
    return _PIECE.findall(text)
