r"""Rewards that a program can check: answers, formats, lengths, repetition. They use no model.

Each is a frozen object that is called as TRL's GRPO calls a reward function, `reward(prompts=…, completions=…,
**columns)`. A completion is a text or a conversation, of which the last message counts. The object can be pickled, and
the metrics use its `name`. A recipe names the ready-made ones (`reward_funcs: [numeric_match]`), or sets their fields
as in a Python call with literal values, quoted where YAML would split or unescape it:

    reward_funcs:
      - numeric_match(column="solution", absolute=0.01)
      - 'format_match(pattern=r"(?s)<think>.*</think>\s*<answer>.*</answer>")'
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import regex

from ..errors import ZooError
from ..fileio import finite, whole
from ..modeling.reserved_columns import RESERVED, how_to_rename, withheld
from ..modeling.words import words
from .read_number import after_marker, read_number

__all__ = [
    "ExactMatch",
    "FormatMatch",
    "Length",
    "NumericMatch",
    "Repetition",
    "SoftOverlong",
    "Verifiable",
    "exact_match",
    "length",
    "numeric_match",
    "read_number",
    "repetition",
    "text_of",
]

GSM8K = "####"  # stands before the answer in GSM8K, arXiv:2110.14168


def text_of(message: Any) -> str:
    """Returns the text of a completion or a prompt.

    Args:
        message: A text, or a conversation, of which the last message counts. Typed parts of its content are joined if
            they are text; no content (a bare tool call) is the empty text.
    """
    if isinstance(message, str):
        return message
    content = message[-1].get("content") if message else None
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content)


@runtime_checkable
class Verifiable(Protocol):
    """A reward that says whether an answer is right, 1 or 0, so that it can also judge what it rewards.

    Attributes:
        strict: The reward that reads the answer only in its proper place.
        lenient: The reward that reads the answer wherever it stands. If one of the two has a method `read(text)`, which
            returns the answer or None, answers are also put to a majority vote.
    """

    @property
    def strict(self) -> Any: ...

    @property
    def lenient(self) -> Any: ...


class _Named:
    """A reward that the metrics know by its field `name`."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def _refuse(self, field: str, wanted: str) -> ZooError:
        return ZooError(f"{field} of the reward {self.name} is {getattr(self, field)!r}: give {wanted}.")

    def _check_count(self, field: str) -> None:
        value = whole(getattr(self, field))
        if value is None or value < 1:
            raise self._refuse(field, "a whole number from 1")

    def _check_marker(self) -> None:
        if getattr(self, "marker", None) == "":
            raise self._refuse("marker", "a text, or leave it out")

    def _check_choice(self, field: str, *known: str) -> None:
        if getattr(self, field) not in known:
            *others, last = map(repr, known)
            raise self._refuse(field, f"{', '.join(others)} or {last}")


class Answered(_Named):
    """A reward that reads the right answers from a column of the prompts."""

    column: str

    def check_columns(self, names: Iterable[str]) -> None:
        """Checks that the prompts have the column with the answers.

        Args:
            names: Their columns.

        Raises:
            ZooError: They lack it, or reward functions get no column of that name.
        """
        names, column = list(names), self.column
        others = [name for name in names if name not in RESERVED]
        if column in withheld(names):
            raise ZooError(
                f"The reward {self.name} reads the column {column!r}, and reward functions get no column of that name: "
                f"{how_to_rename(column)}, and name it, {self.name}(column=…)."
            )
        if column not in others:
            named = ", ".join(map(repr, others)) or "no columns but the prompt"
            raise ZooError(
                f"The reward {self.name} reads the column {column!r}, and the prompts have {named}: name the column of "
                f"the answers, {self.name}(column=…)."
            )

    def answered(self, rows: Any, *, of: str) -> list[bool]:
        """Says which rows have an answer.

        Args:
            rows: A data set of prompts.
            of: What errors call it.

        Raises:
            ZooError: The column is missing, or an answer cannot be read.
        """
        self.check_columns(rows.column_names)
        answers = [_accepted(answer) for answer in rows[self.column]]
        for place, accepted in enumerate(answers):
            for each in accepted or ():
                try:
                    self._wanted(each)
                except (TypeError, ValueError) as error:
                    raise ZooError(
                        f"The reward {self.name} cannot read the answer of row {place} of {of} ({error}): mend it, or "
                        f"name the column of the answers, {self.name}(column=…)."
                    ) from error
        return [accepted is not None for accepted in answers]

    def _wanted(self, answer: Any) -> Any:
        """An accepted answer in the form that completions are compared with."""
        raise NotImplementedError

    def _answers(self, columns: Mapping[str, Any]) -> list[list[Any] | None]:
        """The accepted answers of each row, None where the row has none."""
        self.check_columns(columns)
        return [_accepted(answer) for answer in columns[self.column]]


def _accepted(answer: Any) -> list[Any] | None:
    answers = answer if isinstance(answer, (list, tuple)) else [answer]
    # A number that is missing is NaN in a column of numbers.
    return [each for each in answers if each is not None and each == each] or None


# Answers


@dataclass(frozen=True, kw_only=True)
class ExactMatch(Answered):
    """1 where a completion is the row's answer, 0 where it is not, None where the row has no answer.

    Runs of white space count as one space, and outer white space is ignored.

    Attributes:
        column: Of the data set, holds the answer or a list of accepted ones. Anything but text is compared as `str`
            writes it.
        marker: A text before the answer, such as "Answer:". Only the rest of the line after its last occurrence counts,
            in the completion (without it, 0) and in an answer that holds it. None for no marker.
        ignore_case: Whether case is ignored.
        name: What metrics call it.

    Raises:
        ZooError: When called: the data set lacks the column.
    """

    column: str = "answer"
    marker: str | None = None
    ignore_case: bool = False
    name: str = "exact_match"

    def __post_init__(self) -> None:
        self._check_marker()

    @property
    def strict(self) -> ExactMatch:
        """Reads the answer after the marker, or the whole completion."""
        return self

    @property
    def lenient(self) -> ExactMatch:
        """Finds the answer anywhere among a completion's words, whatever its case."""
        return _Contains(column=self.column, marker=self.marker, ignore_case=True, name=self.name)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [
            None if answers is None else float(self._matches(text_of(completion), answers))
            for completion, answers in zip(completions, self._answers(columns), strict=True)
        ]

    def read(self, text: str) -> str | None:
        """Reads the answer of a text; None where the marker is missing.

        Args:
            text: A completion.
        """
        answer = after_marker(text, self.marker)
        return None if answer is None else self._plain(answer)

    def _matches(self, text: str, answers: Sequence[Any]) -> bool:
        return self.read(text) in [self._wanted(each) for each in answers]

    def _wanted(self, answer: Any) -> str:
        answer = str(answer)
        marked = after_marker(answer, self.marker)
        return self._plain(answer if marked is None else marked)

    def _plain(self, text: str) -> str:
        if self.marker is not None:
            text = text.strip().partition("\n")[0]
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


class _Contains(ExactMatch):
    read = None  # type: ignore[assignment]  # many answers may stand in a text

    def _matches(self, text: str, answers: Sequence[Any]) -> bool:
        plain = " ".join(text.split()).casefold()
        wanted = (self._wanted(each) for each in answers)
        return any(re.search(rf"(?<!\w){re.escape(each)}(?!\w)", plain) for each in wanted)


@dataclass(frozen=True, kw_only=True)
class NumericMatch(Answered):
    """1 where a completion's number is the row's answer, 0 where it is another or none, None where the row has none.

    Logs the number that was read as the extra column NAME/read.

    Attributes:
        column: Of the data set, holds a number, a text that `read_number` reads, or a list of accepted ones.
        marker: As for `read_number`. An answer without the marker is read without it.
        relative: The relative tolerance, `rel_tol` of `math.isclose`. The default allows for rounding alone.
        absolute: The absolute tolerance, `abs_tol` of `math.isclose`.
        percent: As for `read_number`.
        name: What metrics call it.

    Raises:
        ZooError: When called: the data set lacks the column.
        ValueError: When called: an answer holds no number.
    """

    column: str = "answer"
    marker: str | None = None
    relative: float = 1e-9
    absolute: float = 0.0
    percent: Literal["unit", "hundredth"] = "unit"
    name: str = "numeric_match"

    def __post_init__(self) -> None:
        self._check_marker()
        for field in ("relative", "absolute"):
            if not finite(getattr(self, field)) or getattr(self, field) < 0:
                raise self._refuse(field, "a tolerance, a number from 0")
        self._check_choice("percent", "unit", "hundredth")

    @property
    def strict(self) -> NumericMatch:
        """Reads the first number after the marker, which is GSM8K's where it has none of its own."""
        return self if self.marker is not None else replace(self, marker=GSM8K)

    @property
    def lenient(self) -> NumericMatch:
        """Reads the last number of a completion, or of its last box."""
        return replace(self, marker=None) if self.marker is not None else self

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        numbers = [self.read(text_of(text)) for text in completions]
        if log_extra is not None:
            log_extra(f"{self.name}/read", list(numbers))
        return [
            None if answers is None else float(self._matches(number, answers))
            for number, answers in zip(numbers, self._answers(columns), strict=True)
        ]

    def read(self, text: str) -> float | None:
        """Reads the number that a text answers with; None where there is none.

        Args:
            text: A completion.
        """
        return read_number(text, marker=self.marker, percent=self.percent)

    def _matches(self, number: float | None, answers: Sequence[Any]) -> bool:
        wanted = [self._wanted(answer) for answer in answers]
        return number is not None and any(
            math.isclose(number, each, rel_tol=self.relative, abs_tol=self.absolute) for each in wanted
        )

    def _wanted(self, answer: Any) -> float:
        if not isinstance(answer, str):
            return float(answer)
        marker = self.marker if self.marker is not None and self.marker in answer else None
        number = read_number(answer, marker=marker, percent=self.percent)
        if number is None:
            raise ValueError(f"the column {self.column!r} holds {answer!r}, and there is no number in it")
        return number


# Form


@dataclass(frozen=True, kw_only=True)
class FormatMatch(_Named):
    """1 where a completion has the form of a regular expression, else 0. Outer white space is ignored.

    A pattern whose repeats overlap, such as (a|aa)+$, can backtrack for longer than any run lasts. So the package
    `regex` does the matching, which stops at `timeout`: a TimeoutError then ends the run and names the row, because a
    silent 0 would make rewards depend on the machine's speed. The limit holds for each completion, and does not cover
    the compilation of the pattern. Patterns come from the user, never from a download.

    Attributes:
        pattern: In the syntax of `re`, with flags inside, such as "(?s)" for a dot that matches line ends too.
        how: "fullmatch" wants the whole completion to match, "search" a part of it.
        timeout: Seconds for one completion.
        name: What metrics call it.

    Raises:
        ZooError: The pattern is no regular expression.
    """

    pattern: str
    how: Literal["fullmatch", "search"] = "fullmatch"
    timeout: float = 1.0
    name: str = "format_match"

    def __post_init__(self) -> None:
        try:
            regex.compile(self.pattern)
        except (regex.error, TypeError) as error:
            raise self._refuse("pattern", f"a regular expression ({error})") from error
        self._check_choice("how", "fullmatch", "search")
        if not finite(self.timeout) or self.timeout <= 0:
            raise self._refuse("timeout", "a positive number of seconds")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(self._matches(text_of(completion).strip())) for completion in completions]

    def _matches(self, text: str) -> bool:
        match = regex.fullmatch if self.how == "fullmatch" else regex.search
        try:
            return match(self.pattern, text, timeout=self.timeout) is not None
        except TimeoutError as error:
            raise TimeoutError(
                f"the pattern {self.pattern!r} took more than {self.timeout:g} s on a completion of {len(text)} "
                "characters, as overlapping repeats do"
            ) from error


Unit = Literal["tokens", "words", "characters"]


def _lengths(reward: _Named, unit: Unit, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[int]:
    if unit == "tokens":
        return [len(ids) for ids in _token_ids(reward, columns)]
    texts = [text_of(completion) for completion in completions]
    return [len(text.split()) if unit == "words" else len(text) for text in texts]


def _token_ids(reward: _Named, columns: Mapping[str, Any]) -> Sequence[Sequence[int]]:
    if columns.get("completion_ids") is None:
        raise ZooError(f"The reward {reward.name} counts tokens and was given none: set its unit to 'words'.")
    return columns["completion_ids"]


@dataclass(frozen=True, kw_only=True)
class Length(_Named):
    """The length of a completion; with a target −|length − target| / target, and −1 at worst.

    Without a target it pays for length as such. Log it with weight 0, or give it a small weight, below 0 for short
    completions.

    Attributes:
        target: The wanted length; None for none.
        unit: "tokens" (the end-of-sequence token counts), "words" between white space, or "characters".
        name: What metrics call it.
    """

    target: int | None = None
    unit: Unit = "tokens"
    name: str = "length"

    def __post_init__(self) -> None:
        if self.target is not None:
            self._check_count("target")
        self._check_choice("unit", "tokens", "words", "characters")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        lengths = _lengths(self, self.unit, completions, columns)
        if self.target is None:
            return [float(length) for length in lengths]
        return [max(-abs(length - self.target) / self.target, -1.0) for length in lengths]


@dataclass(frozen=True, kw_only=True)
class SoftOverlong(_Named):
    """0 up to limit − margin, falling linearly to −1 at the limit, and −1 beyond.

    Attributes:
        limit: In `unit`.
        margin: In `unit`. With 0 every length up to the limit is free.
        unit: As for `Length`.
        name: What metrics call it.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """

    limit: int
    margin: int = 0
    unit: Unit = "tokens"
    name: str = "soft_overlong"

    def __post_init__(self) -> None:
        self._check_count("limit")
        if whole(self.margin) is None or not 0 <= self.margin <= self.limit:
            raise self._refuse("margin", f"a whole number from 0 to the limit, {self.limit}")
        self._check_choice("unit", "tokens", "words", "characters")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [self._penalty(length) for length in _lengths(self, self.unit, completions, columns)]

    def _penalty(self, length: int) -> float:
        if length <= self.limit - self.margin:
            return 0.0
        return (self.limit - self.margin - length) / self.margin if length <= self.limit else -1.0


@dataclass(frozen=True, kw_only=True)
class Repetition(_Named):
    """Minus the share of a completion's n-grams that occurred in it before: distinct / all − 1; 0 where it has none.

    Attributes:
        n: Length of an n-gram.
        unit: "tokens", or "words" as `modeling.words` counts them.
        name: What metrics call it.

    Source: −seq-rep-n of Welleck et al. 2019, arXiv:1908.04319, §6, with its n of 4.
    """

    n: int = 4
    unit: Literal["tokens", "words"] = "tokens"
    name: str = "repetition"

    def __post_init__(self) -> None:
        self._check_count("n")
        self._check_choice("unit", "tokens", "words")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        rows: Sequence[Sequence[Any]]
        if self.unit == "tokens":
            rows = _token_ids(self, columns)
        else:
            rows = [words(text_of(completion)) for completion in completions]
        return [self._penalty(row) for row in rows]

    def _penalty(self, row: Sequence[Any]) -> float:
        grams = [tuple(row[start : start + self.n]) for start in range(len(row) - self.n + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0


# Ready-made, as entry points name them

exact_match = ExactMatch()
numeric_match = NumericMatch()
length = Length()
repetition = Repetition()
