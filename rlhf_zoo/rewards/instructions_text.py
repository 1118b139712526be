"""Counts sentences and words in capitals, and detects languages, for the verifiers of instructions.

IFEval's own code counts sentences and words by NLTK's Punkt, whose model is downloaded at the first use. A reward must
not depend on a network, so both counts are rules here. They agree with Punkt on all but a few answers
(docs/rewards.md).
"""

import functools
import re
from typing import Any

from ..errors import ZooError

#: Words whose full stop ends no sentence, in lower case and without it.
ABBREVIATIONS = frozenset({
    "a.m", "adj", "al", "approx", "apr", "aug", "ave", "bros", "capt", "cf", "co", "col", "corp", "dec", "dept",
    "dr", "e.g", "ed", "est", "etc", "feb", "fig", "gen", "gov", "hon", "hr", "i.e", "inc", "jan", "jr", "lt",
    "ltd", "maj", "mar", "messrs", "mr", "mrs", "ms", "mt", "nov", "oct", "op", "p.m", "ph.d", "pp", "pres",
    "prof", "rep", "rev", "sen", "sep", "sept", "sgt", "sr", "st", "u.k", "u.n", "u.s", "u.s.a", "viz", "vol", "vs",
})  # fmt: skip
#: Words that begin a sentence even after an abbreviation, when they have a capital.
STARTERS = frozenset({
    "A", "After", "All", "An", "And", "As", "At", "But", "By", "Finally", "First", "For", "He", "Her", "His",
    "However", "I", "If", "In", "It", "Its", "My", "Next", "On", "One", "Our", "She", "So", "Some", "That",
    "The", "Their", "Then", "There", "These", "They", "This", "Those", "To", "We", "What", "When", "While", "With",
    "You", "Your",
})  # fmt: skip
_OPENING = "\"'“”‘’([{*_"
_CLOSING = "\"'“”‘’)]}*_:;,"
#: Punctuation that stands by itself between words. Hyphens, slashes and inner full stops do not divide a word.
_WORD = re.compile(r"[^\s,;:!?\"“”()\[\]{}<>*#`@%&$…]+")
_CONTRACTION = re.compile(r"(?:N'T|N’T|['’](?:S|M|D|LL|RE|VE))$")
#: langdetect reads no further than 10,000 characters.
_LONGEST = 10_000
_SEED = 0


def count_sentences(text: str) -> int:
    """Counts sentences: ends are "!", "?" and full stops that end no abbreviation; a line's end is none.

    Args:
        text: The text.

    Returns:
        The number, with the rest after the last end as a sentence.
    """
    tokens = text.split()
    count = 0
    for position, token in enumerate(tokens):
        following = tokens[position + 1].lstrip(_OPENING) if position + 1 < len(tokens) else None
        if following is None or _ends_sentence(token, following):
            count += 1
    return count


def _ends_sentence(token: str, following: str) -> bool:
    core = token.rstrip(_CLOSING)
    if core.endswith(("!", "?")):
        return True
    if core.endswith(("..", "…")):
        return following[:1].isupper()
    if not core.endswith("."):
        return False
    word = core[:-1].lstrip(_OPENING).lower()
    if word in ABBREVIATIONS or (len(word) == 1 and word.isalpha()):
        return following.rstrip(_CLOSING + ".") in STARTERS
    # An ordinal, as in "the 3. place", or a number, as in "no. 3".
    return not (word.isdigit() and following[:1].islower()) and not (word == "no" and following[:1].isdigit())


def count_capital_words(text: str) -> int:
    """Counts words without a lower-case letter. Both parts of a contraction count, as in Penn Treebank's tokens.

    Args:
        text: The text.

    Returns:
        The number.
    """
    count = 0
    for token in _WORD.findall(text):
        for word in token.split("--"):
            if word.isupper():
                contraction = _CONTRACTION.search(word)
                count += 2 if contraction and contraction.start() else 1
            elif word[-2:] in ("'s", "’s"):
                count += word[:-2].isupper()
    return count


@functools.cache
def _detector_factory() -> Any:
    try:
        from langdetect import detector_factory
    except ImportError as error:
        raise ZooError(
            'Instructions about the language of an answer need langdetect: `pip install "rlhf-zoo[ifeval]"`.'
        ) from error
    factory = detector_factory.DetectorFactory()
    factory.load_profile(detector_factory.PROFILES_DIRECTORY)
    return factory


def languages() -> frozenset[str]:
    """Returns the codes of the languages that `detect_language` can tell.

    Raises:
        ZooError: langdetect is not installed.
    """
    return frozenset(_detector_factory().get_lang_list())


@functools.lru_cache(maxsize=4096)
def detect_language(text: str) -> str | None:
    """Detects a text's language; None if it has no letters, or too few.

    langdetect draws at random, and its seed is a global of the process. So this uses a factory and a seed of its own: a
    text always has the same language, and nobody else's draws change.

    Args:
        text: The text.

    Raises:
        ZooError: langdetect is not installed.
    """
    factory = _detector_factory()
    from langdetect import LangDetectException

    detector = factory.create()
    detector.seed = _SEED
    detector.append(text[:_LONGEST])
    try:
        return detector.detect()
    except LangDetectException:
        return None
