"""Rules for the form of a completion: pattern, length and repetition."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex

from ..errors import ZooError
from ..fileio import int_or_none, is_finite
from ..modeling.chat_template import Prompt
from ..modeling.words import words
from .rule import Rule, last_message_text


@dataclass(frozen=True, kw_only=True)
class FormatMatch(Rule):
    """1 if a completion, without white space at its ends, matches a regular expression; otherwise 0.

    A pattern with overlapping repeats, such as (a|aa)+$, can backtrack almost forever. So matching uses the package
    `regex`, which stops after `timeout`. An error that names the row then ends the run, because a silent 0 would make
    rewards depend on the machine's speed. The limit applies to each completion, but not to the compilation of the
    pattern. Patterns come from the user, never from a download.

    Attributes:
        pattern: A pattern in the syntax of `re`. Flags are part of it, such as "(?s)" to let a dot match line ends too.
        how: "fullmatch" if the whole completion must match, "search" if any part may.
        timeout: The limit for one completion, in seconds.
        name: The name in metrics.

    Raises:
        ZooError: The pattern is not a regular expression, or another field is invalid.
    """

    pattern: str
    how: Literal["fullmatch", "search"] = "fullmatch"
    timeout: float = 1.0
    name: str = "format_match"

    def __post_init__(self) -> None:
        try:
            regex.compile(self.pattern)
        except (regex.error, TypeError) as error:
            raise self._field_error("pattern", f"a regular expression ({error})") from error
        self._check_choice("how", "fullmatch", "search")
        if not is_finite(self.timeout) or self.timeout <= 0:
            raise self._field_error("timeout", "a positive number of seconds")

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(self._matches(last_message_text(completion).strip())) for completion in completions]

    def _matches(self, text: str) -> bool:
        matcher = regex.fullmatch if self.how == "fullmatch" else regex.search
        try:
            return matcher(self.pattern, text, timeout=self.timeout) is not None
        except TimeoutError as error:
            raise TimeoutError(
                f"the pattern {self.pattern!r} took more than {self.timeout:g} s on a completion of {len(text)} "
                "characters, as patterns with overlapping repeats may"
            ) from error


Unit = Literal["tokens", "words", "characters"]


def _measure_lengths(reward: Rule, unit: Unit, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[int]:
    if unit == "tokens":
        return [len(ids) for ids in _token_ids(reward, columns)]
    texts = [last_message_text(completion) for completion in completions]
    return [len(text.split()) if unit == "words" else len(text) for text in texts]


def _token_ids(reward: Rule, columns: Mapping[str, Any]) -> Sequence[Sequence[int]]:
    if columns.get("completion_ids") is None:
        raise ZooError(f"The reward {reward.name} counts tokens but got none: set its unit to 'words'.")
    return columns["completion_ids"]


@dataclass(frozen=True, kw_only=True)
class Length(Rule):
    """The length of a completion; with a target, −|length − target| / target, but at least −1.

    Without a target, give the reward the weight 0 to only log lengths, or a small negative weight to prefer short
    completions.

    Attributes:
        target: The target length; None for no target.
        unit: "tokens" (including the end-of-sequence token), "words" (separated by white space), or "characters".
        name: The name in metrics.
    """

    target: int | None = None
    unit: Unit = "tokens"
    name: str = "length"

    def __post_init__(self) -> None:
        if self.target is not None:
            self._check_positive_integer("target")
        self._check_choice("unit", "tokens", "words", "characters")

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        lengths = _measure_lengths(self, self.unit, completions, columns)
        if self.target is None:
            return [float(length) for length in lengths]
        return [max(-abs(length - self.target) / self.target, -1.0) for length in lengths]


@dataclass(frozen=True, kw_only=True)
class SoftOverlong(Rule):
    """0 up to a length of limit − margin, then decreasing linearly to −1 at the limit, and −1 beyond the limit.

    Attributes:
        limit: The length at which the reward reaches −1, in `unit`.
        margin: The range over which the reward decreases, in `unit`. If it is 0, every length up to the limit gets 0.
        unit: As for `Length`.
        name: The name in metrics.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """

    limit: int
    margin: int = 0
    unit: Unit = "tokens"
    name: str = "soft_overlong"

    def __post_init__(self) -> None:
        self._check_positive_integer("limit")
        if int_or_none(self.margin) is None or not 0 <= self.margin <= self.limit:
            raise self._field_error("margin", f"a whole number from 0 to the limit, {self.limit}")
        self._check_choice("unit", "tokens", "words", "characters")

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [self._penalty(length) for length in _measure_lengths(self, self.unit, completions, columns)]

    def _penalty(self, length: int) -> float:
        if length <= self.limit - self.margin:
            return 0.0
        return (self.limit - self.margin - length) / self.margin if length <= self.limit else -1.0


@dataclass(frozen=True, kw_only=True)
class Repetition(Rule):
    """Minus the share of a completion's n-grams that repeat earlier n-grams: distinct / all − 1; 0 without n-grams.

    Attributes:
        n: The length of an n-gram, in `unit`.
        unit: "tokens", or "words" as `modeling.words` splits them.
        name: The name in metrics.

    Source: −seq-rep-n of Welleck et al. 2019, arXiv:1908.04319, §6, where n = 4.
    """

    n: int = 4
    unit: Literal["tokens", "words"] = "tokens"
    name: str = "repetition"

    def __post_init__(self) -> None:
        self._check_positive_integer("n")
        self._check_choice("unit", "tokens", "words")

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if self.unit == "tokens":
            return [self._penalty(ids) for ids in _token_ids(self, columns)]
        return [self._penalty(words(last_message_text(completion))) for completion in completions]

    def _penalty(self, items: Sequence[Any]) -> float:
        ngrams = [tuple(items[start : start + self.n]) for start in range(len(items) - self.n + 1)]
        return len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0
