"""Rewards for the prose of a completion. Their lexicons and rules were not fitted to the labels of any training data.

`grammar` counts errors, `refuses` finds refusals, and `vader` measures sentiment. All three are for English.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

from ..errors import ZooError
from ..modeling.chat_template import Prompt
from .rule import Rule, last_message_text

#: Kinds of harper's findings that are matters of taste or dialect rather than errors.
IGNORED_KINDS = ("Enhancement", "Formatting", "Readability", "Redundancy", "Regionalism", "Style")
#: The lowest score of `grammar`, for an error in every word.
MIN_GRAMMAR = -100.0
#: The number of words at the beginning of a completion in which `refuses` looks for a phrase.
OPENING_WORDS = 20
#: Phrases of refusals, in lower case and without contractions.
REFUSALS = (
    "as an ai i", "as an ai assistant i", "as an ai language model i", "as a language model i", "i am just an ai",
    "i am only an ai", "i am sorry but i", "i apologize but i", "i cannot answer", "i cannot assist",
    "i cannot comply", "i cannot create", "i cannot discuss", "i cannot do that", "i cannot fulfill",
    "i cannot generate", "i cannot give you", "i cannot help", "i cannot in good conscience", "i cannot provide",
    "i cannot write", "i am not able to", "i am unable to", "i am not comfortable", "i will not be able to",
    "i will not help", "i will not provide", "i would rather not", "i do not feel comfortable", "i must decline",
    "i must refuse", "i have to decline",
)  # fmt: skip
# Refusals that apologize, in the same form: "sorry for that but I cannot", or nothing but "no sorry".
_APOLOGY = re.compile(
    " (sorry|apologize|apologies|afraid)(( for( [^ ]+){1,4})? but| that)? i (cannot|am not (allowed|going) to) "
    "|^ (no )?(i am )?((so|very|really) )?sorry $"
)
_CONTRACTIONS = {"can't": "cannot", "won't": "will not", "i'm": "i am", "i'd": "i would", "don't": "do not"}
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


@dataclass(frozen=True, kw_only=True)
class Grammar(Rule):
    """Minus the number of grammar and spelling errors per 100 words of a completion: at most 0, and at least −100.

    harper finds the errors. It reads English, and skips code in Markdown. An empty completion gets the worst score,
    because it would otherwise get the best. Starting a sentence with a lowercase letter is an error.

    Attributes:
        dialect: "american", "british", "australian", "canadian" or "indian".
        ignore: Kinds of harper's findings that do not count.
        name: The name in metrics.

    Raises:
        ZooError: When called: harper-py is not installed.
    """

    meaning: ClassVar[str] = "minus the errors of grammar and spelling for each 100 words"
    dialect: Literal["american", "british", "australian", "canadian", "indian"] = "american"
    ignore: Sequence[str] = IGNORED_KINDS
    name: str = "grammar"

    def __post_init__(self) -> None:
        self._check_choice("dialect", "american", "british", "australian", "canadian", "indian")
        if not isinstance(self.ignore, (list, tuple)) or not all(isinstance(kind, str) for kind in self.ignore):
            raise self._field_error("ignore", "a list of harper's kinds, such as ['Style', 'Capitalization']")

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [self._score(last_message_text(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        word_count = len(text.split())
        if not word_count:
            return MIN_GRAMMAR
        error_count = sum(finding.lint_kind not in self.ignore for finding in _linter(self.dialect).lint(text))
        return max(-100 * error_count / word_count, MIN_GRAMMAR) if error_count else 0.0


@dataclass(frozen=True, kw_only=True)
class Refuses(Rule):
    """1 if a completion refuses to answer, otherwise 0: its first 20 words contain one of REFUSALS or an apology.

    An apology counts if "I cannot" or "I am not allowed to" follows from it, or if the completion has no other word.
    Case, punctuation and contractions do not matter. A refusal with other phrases goes unnoticed.

    Attributes:
        name: The name in metrics.
    """

    meaning: ClassVar[str] = "1 for a refusal"
    name: str = "refuses"

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(_is_refusal(last_message_text(completion))) for completion in completions]


def _is_refusal(text: str) -> bool:
    lower_text = text[:1000].lower().replace("’", "'")  # a refusal is at the beginning
    words = " ".join(_CONTRACTIONS.get(word, word) for word in _WORD.findall(lower_text)).replace("can not", "cannot")
    opening = f" {' '.join(words.split()[:OPENING_WORDS])} "
    return any(f" {phrase} " in opening for phrase in REFUSALS) or _APOLOGY.search(opening) is not None


@dataclass(frozen=True, kw_only=True)
class Vader(Rule):
    """The sentiment of a completion from −1 (negative) to 1 (positive), by VADER's lexicon and rules; 0 without words.

    This is VADER's compound score. It was made for sentences; for long texts, it is often near −1 or 1.

    Attributes:
        name: The name in metrics.

    Raises:
        ZooError: When called: vaderSentiment is not installed.
    """

    meaning: ClassVar[str] = "the sentiment by VADER, from −1 to 1"
    name: str = "vader"

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [
            float(_analyzer().polarity_scores(last_message_text(completion))["compound"]) for completion in completions
        ]


@cache
def _linter(dialect: str) -> Any:
    try:
        import harper
    except ImportError as error:
        raise _missing_package("grammar", "harper-py") from error
    return harper.Linter(harper.Dialect[dialect.upper()])


@cache
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise _missing_package("vader", "vaderSentiment") from error
    return SentimentIntensityAnalyzer()


def _missing_package(reward: str, package: str) -> ZooError:
    return ZooError(f'The reward {reward} needs {package}: `pip install "rlhf-zoo[judges]"`.')


grammar = Grammar()
refuses = Refuses()
vader = Vader()
