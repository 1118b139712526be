"""Diversity and repetition of completions, in words.

Within a completion (`repetition`) a word is a run of letters and digits with inner apostrophes, lower-cased, and each
punctuation mark is a word of its own, so that a run of exclamation marks counts as the repetition that it is. Han,
kana, Thai, Lao, Khmer and Burmese put no spaces between words: there each character, with the marks that stand on it,
is a word. Across completions (`distinct_n`) words are what stands between spaces, so a script written without spaces
counts as one word per run: compare such texts with each other only.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence

from .stats import Estimate, group_indices, jackknife

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


def plain(text: str) -> str:
    """A text without what hardly tells it from another: case, and how much space stands where."""
    return " ".join(text.lower().split())


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n words, in order; none where there are fewer than n."""
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def _plain_ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """N-grams of what stands between spaces, lower-cased: the convention in which distinct-n is reported elsewhere."""
    return ngrams(text.lower().split(), n)


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Distinct n-grams over all n-grams, across the texts together; 0 where there are none. Li et al. 2016, §5.2.

    Its words are what stands between spaces, as in the field's reports, so "use." and "use," are two.

    It falls as texts are added, since common n-grams come again: compare only equal numbers of texts of like length,
    such as two policies on the same prompts.
    """
    every = [gram for text in texts for gram in _plain_ngrams(text, n)]
    return len(set(every)) / len(every) if every else 0.0


def distinct_n_estimate(texts: Sequence[str], groups: Sequence[Hashable], n: int = 2) -> Estimate:
    """`distinct_n` with a jackknife interval over groups (the prompt of each text); its n counts texts.

    A bootstrap would be wrong here: a prompt drawn twice brings no new n-gram, so every resample lies below the value.
    The interval is for this number of texts.
    """
    value, left_out = _distinct_left_out(texts, groups, n)
    estimate = jackknife(value, left_out, n=len(texts))
    low, high = estimate.ci95
    return Estimate(value, (max(low, 0.0), min(high, 1.0)), estimate.n)


def distinct_n_difference(
    ours: Sequence[str], theirs: Sequence[str], groups: Sequence[Hashable], n: int = 2
) -> Estimate:
    """`distinct_n` of ours less that of theirs, texts of the same prompts, each prompt left out of both at a time."""
    (first, without), (second, others) = (_distinct_left_out(texts, groups, n) for texts in (ours, theirs))
    left_out = [a - b for a, b in zip(without, others, strict=True)]
    return jackknife(first - second, left_out, n=len(groups))


def _distinct_left_out(texts: Sequence[str], groups: Sequence[Hashable], n: int) -> tuple[float, list[float]]:
    """Distinct-n of all texts, and of those that are left without each group, by first appearance."""
    index = group_indices(groups)
    counts: list[Counter[tuple[str, ...]]] = [Counter() for _ in set(groups)]
    for text, group in zip(texts, index, strict=True):
        counts[group].update(_plain_ngrams(text, n))
    holders = Counter(gram for count in counts for gram in count)
    total, distinct = sum(count.total() for count in counts), len(holders)
    left_out = []
    for count in counts:
        rest = total - count.total()
        own = sum(holders[gram] == 1 for gram in count)
        left_out.append((distinct - own) / rest if rest else 0.0)
    return distinct / total if total else 0.0, left_out


def repetition(text: str, n: int = 2) -> float:
    """The share of a text's n-grams that stood in it before: 1 − distinct / all; 0 where there are none.

    seq-rep-n of Welleck et al. 2019 (arXiv:1908.04319, §6), in words, and with n = 2 for short completions.
    """
    grams = ngrams(words(text), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
