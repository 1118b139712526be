"""Splits texts into the words that rewards, probes and metrics count.

A word is a lower-cased run of letters and digits with inner apostrophes. `words` also lists each punctuation mark, so a
run of exclamation marks counts as a repetition; `is_word` tells words from punctuation marks. Han, kana, Thai, Lao,
Khmer and Burmese have no spaces between words, so in these scripts each character, with its combining marks, is a word.
"""

import re
import unicodedata
from collections.abc import Sequence

# The scripts without spaces between words, as character ranges for regular expressions.
_UNSPACED_SCRIPTS = (
    "\u0e01-\u0e3e\u0e40-\u0eff"  # Thai without the baht sign, and Lao
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"  # Burmese, Khmer
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u302f\u3031-\u303c\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\U00020000-\U0003347f"
    "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001aff0-\U0001b16f"  # kana
)
_COMBINING_MARKS = "".join(
    chr(code) for code in (*range(0xE00, 0x18B0), *range(0x302A, 0x309B), *range(0xA9E0, 0xAA80))
    if unicodedata.category(chr(code)) in ("Mn", "Mc")
)  # fmt: skip
_UNSPACED_WORD = f"[{_UNSPACED_SCRIPTS}][{_COMBINING_MARKS}]*"
_ASCII_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_SPACED_CHARACTER = rf"[^\W{_UNSPACED_SCRIPTS}]"
_WORD = re.compile(rf"{_SPACED_CHARACTER}+(?:['’]{_SPACED_CHARACTER}+)*|{_UNSPACED_WORD}|[^\w\s]")
_PIECE = re.compile(rf"\s*(?:{_UNSPACED_WORD}|[^\s{_UNSPACED_SCRIPTS}]+)")


def words(text: str) -> list[str]:
    """Splits a text into lower-cased words and single punctuation marks; `is_word` tells them apart."""
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text.lower())


def is_unspaced(word: str) -> bool:
    """Whether a word begins in a script without spaces between words.

    Args:
        word: A word, or any text.
    """
    return re.match(_UNSPACED_WORD, word) is not None


def is_word(word: str) -> bool:
    """Whether an element of `words` is a word, a number or a symbol such as an emoji, not punctuation.

    Args:
        word: An element of `words`.
    """
    return word[0].isalnum() or (not word.isascii() and unicodedata.category(word[0])[0] == "S")


def join_words(word_list: Sequence[str]) -> str:
    """Joins words with the spaces of their script. `words` splits the result into the same words.

    Args:
        word_list: Elements of `words`.
    """
    return "".join(word if is_unspaced(word) else f" {word}" for word in word_list).removeprefix(" ")


def words_regex(word_list: Sequence[str]) -> str:
    """Makes a regular expression that finds consecutive words in a lower-cased text, with any marks between them.

    Args:
        word_list: Elements of `words`.
    """
    is_spaced = [word[0].isalnum() and not is_unspaced(word) for word in word_list]
    regex = ""
    for position, word in enumerate(word_list):
        # Two words of a script with spaces need a separator. Without it, they would be a single word.
        if position > 0:
            regex += r"\W+" if is_spaced[position] and is_spaced[position - 1] else r"\W*"
        word_regex = re.escape(word)
        bounded_regex = rf"(?<!{_SPACED_CHARACTER}){word_regex}(?!{_SPACED_CHARACTER})"
        regex += bounded_regex if is_spaced[position] else word_regex
    return regex


def split_before_spaces(text: str) -> list[str]:
    """Splits a text before each run of white space, and before each word of a script without spaces.

    Drops white space at the end of the text.
    """
    return _PIECE.findall(text)
