"""Splits a text into words, as rewards, probes and metrics count them.

A word is a run of letters and digits with inner apostrophes, lower-cased. `words` lists each punctuation mark too, so a
run of exclamation marks counts as a repetition; `is_word` tells words from punctuation marks. Han, kana, Thai, Lao,
Khmer and Burmese have no spaces between words, so in these scripts each character, with its combining marks, is a word.
"""

import re
import unicodedata
from collections.abc import Sequence

_SCRIPTS = (
    "\u0e01-\u0e3e\u0e40-\u0eff"  # Thai without the baht sign, and Lao
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"  # Burmese, Khmer
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u302f\u3031-\u303c\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\U00020000-\U0003347f"
    "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001aff0-\U0001b16f"  # kana
)
# The combining marks of these scripts.
_MARKS = "".join(
    chr(code) for code in (*range(0xE00, 0x18B0), *range(0x302A, 0x309B), *range(0xA9E0, 0xAA80))
    if unicodedata.category(chr(code)) in ("Mn", "Mc")
)  # fmt: skip
_UNSPACED = f"[{_SCRIPTS}][{_MARKS}]*"
_ASCII_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_SPACED_CHARACTER = rf"[^\W{_SCRIPTS}]"
_WORD = re.compile(rf"{_SPACED_CHARACTER}+(?:['’]{_SPACED_CHARACTER}+)*|{_UNSPACED}|[^\w\s]")
_PIECE = re.compile(rf"\s*(?:{_UNSPACED}|[^\s{_SCRIPTS}]+)")


def words(text: str) -> list[str]:
    """Splits a text into words, lower-cased, and punctuation marks."""
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text.lower())


def is_unspaced(word: str) -> bool:
    """Whether a word begins in a script without spaces between words.

    Args:
        word: A word, or any text.
    """
    return re.match(_UNSPACED, word) is not None


def is_word(word: str) -> bool:
    """Whether an element of `words` is a word, a number or a symbol such as an emoji, not a punctuation mark.

    Args:
        word: An element of `words`.
    """
    return word[0].isalnum() or (not word.isascii() and unicodedata.category(word[0])[0] == "S")


def join_words(word_list: Sequence[str]) -> str:
    """Joins words into a text that `words` splits into the same words, with spaces where their script has them.

    Args:
        word_list: Elements of `words`.
    """
    return "".join(word if is_unspaced(word) else f" {word}" for word in word_list).removeprefix(" ")


def words_regex(word_list: Sequence[str]) -> str:
    """Makes a regular expression for consecutive words of a lower-cased text, whatever marks and spaces separate them.

    Args:
        word_list: Elements of `words`.
    """
    is_spaced = [word[0].isalnum() and not is_unspaced(word) for word in word_list]
    regex = ""
    for position, word in enumerate(word_list):
        # Without a separator, two words of a script with spaces would be a single word.
        separator = "" if position == 0 else r"\W+" if is_spaced[position] and is_spaced[position - 1] else r"\W*"
        escaped = re.escape(word)
        bounded = rf"(?<!{_SPACED_CHARACTER}){escaped}(?!{_SPACED_CHARACTER})"
        regex += separator + (bounded if is_spaced[position] else escaped)
    return regex


def split_before_spaces(text: str) -> list[str]:
    """Cuts a text before each run of white space, and at each character of a script without spaces.

    White space at the end of the text is dropped.
    """
    return _PIECE.findall(text)
