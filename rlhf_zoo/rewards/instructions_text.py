"""Counts sentences and words in capitals, and detects languages, for the verifiers of instructions.

IFEval's own code counts with NLTK's Punkt model, which is downloaded on first use. A reward must not depend on a
network, so the functions here count by rules. They agree with Punkt on all but a few answers (docs/rewards.md).
"""

import functools
import re
from typing import Any

from ..errors import ZooError

#: Abbreviations in lower case, without their last period, which does not end a sentence.
ABBREVIATIONS = frozenset({
    "a.m", "adj", "al", "approx", "apr", "aug", "ave", "bros", "capt", "cf", "co", "col", "corp", "dec", "dept",
    "dr", "e.g", "ed", "est", "etc", "feb", "fig", "gen", "gov", "hon", "hr", "i.e", "inc", "jan", "jr", "lt",
    "ltd", "maj", "mar", "messrs", "mr", "mrs", "ms", "mt", "nov", "oct", "op", "p.m", "ph.d", "pp", "pres",
    "prof", "rep", "rev", "sen", "sep", "sept", "sgt", "sr", "st", "u.k", "u.n", "u.s", "u.s.a", "viz", "vol", "vs",
})  # fmt: skip
#: Capitalized words that begin a sentence even after an abbreviation.
SENTENCE_STARTERS = frozenset({
    "A", "After", "All", "An", "And", "As", "At", "But", "By", "Finally", "First", "For", "He", "Her", "His",
    "However", "I", "If", "In", "It", "Its", "My", "Next", "On", "One", "Our", "She", "So", "Some", "That",
    "The", "Their", "Then", "There", "These", "They", "This", "Those", "To", "We", "What", "When", "While", "With",
    "You", "Your",
})  # fmt: skip
_OPENING = "\"'“”‘’([{*_"
_CLOSING = "\"'“”‘’)]}*_:;,"
#: A word: anything between white space and punctuation. Hyphens, slashes and inner periods do not divide a word.
_WORD = re.compile(r"[^\s,;:!?\"“”()\[\]{}<>*#`@%&$…]+")
_CONTRACTION = re.compile(r"(?:N'T|N’T|['’](?:S|M|D|LL|RE|VE))$")
#: The number of characters of a text that langdetect reads.
_MAX_CHARACTERS = 10_000
_SEED = 0


def count_sentences(text: str) -> int:
    """Counts sentences. "!", "?" and a period that is not part of an abbreviation end a sentence; a line end does not.

    An ellipsis ends a sentence only before a capital letter. Text after the last end counts as another sentence.
    """
    tokens = text.split()
    count = 0
    for position, token in enumerate(tokens):
        next_token = tokens[position + 1].lstrip(_OPENING) if position + 1 < len(tokens) else None
        if next_token is None or _ends_sentence(token, next_token):
            count += 1
    return count


def _ends_sentence(token: str, next_token: str) -> bool:
    core = token.rstrip(_CLOSING)
    if core.endswith(("!", "?")):
        return True
    if core.endswith(("..", "…")):
        return next_token[:1].isupper()
    if not core.endswith("."):
        return False
    word = core[:-1].lstrip(_OPENING).lower()
    if word in ABBREVIATIONS or (len(word) == 1 and word.isalpha()):
        return next_token.rstrip(_CLOSING + ".") in SENTENCE_STARTERS
    # The period of an ordinal such as "3. place", or of "no. 3", does not end a sentence.
    return not (word.isdigit() and next_token[:1].islower()) and not (word == "no" and next_token[:1].isdigit())


def count_capital_words(text: str) -> int:
    """Counts words in capitals. "CAN'T" counts as two words, as in the Penn Treebank, and "NASA's" as one."""
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


@functools.lru_cache(maxsize=4096)
def detect_language(text: str) -> str | None:
    """Returns the code of a text's language; None if the text has too few letters.

    langdetect draws random numbers, with a seed that is global to the process. This function has its own factory and
    seed, so it always returns the same language for a text, and does not change what other callers of langdetect get.

    Args:
        text: The text.

    Raises:
        ZooError: langdetect is not installed.
    """
    factory = _detector_factory()
    from langdetect import LangDetectException

    detector = factory.create()
    detector.seed = _SEED
    detector.append(text[:_MAX_CHARACTERS])
    try:
        return detector.detect()
    except LangDetectException:
        return None
