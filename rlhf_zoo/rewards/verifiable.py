r"""Rewards computed by a program, without a model: for answers, formats, lengths and repetition.

Each reward is a frozen object that can be pickled. It is called as TRL's GRPO calls a reward function,
`reward(prompts=…, completions=…, **columns)`. A completion is a text, or a conversation whose last message counts. The
field `name` is the reward's name in metrics. A recipe names a ready-made reward (`reward_funcs: [numeric_match]`), or
sets fields in the form of a Python call with literal values. Quote the call if YAML would split or unescape it:

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

from ..errors import ZooError
from ..fileio import is_finite
from ..modeling.chat_template import Prompt
from ..modeling.reserved_columns import RESERVED, how_to_rename, withheld_columns
from .form import FormatMatch, Length, Repetition, SoftOverlong
from .read_number import read_number, text_after_marker
from .rule import Rule, last_message_text

__all__ = [
    "ExactMatch",
    "FormatMatch",
    "Length",
    "NumericMatch",
    "Repetition",
    "SoftOverlong",
    "Verifiable",
    "exact_match",
    "last_message_text",
    "length",
    "numeric_match",
    "read_number",
    "repetition",
]

# The marker before answers in GSM8K, arXiv:2110.14168.
_GSM8K_MARKER = "####"


@runtime_checkable
class Verifiable(Protocol):
    """A reward that checks whether an answer is right (1) or not (0), so it can also be a judge.

    Attributes:
        strict: A reward function that reads the answer only where it should be, for example after a marker.
        lenient: A reward function that finds the answer anywhere in the completion. If `strict` or `lenient` has a
            method `read(text)` that returns the answer or None, evaluations also report a majority vote over answers.
    """

    @property
    def strict(self) -> Any: ...

    @property
    def lenient(self) -> Any: ...


class AnswerRule(Rule):
    """A reward that reads the right answers from a column of the prompts."""

    column: str
    marker: str | None

    def __post_init__(self) -> None:
        if self.marker == "":
            raise self._field_error("marker", "a text, or leave it out")

    def check_columns(self, names: Iterable[str]) -> None:
        """Checks that the prompts have the column with the answers.

        Args:
            names: The names of the prompts' columns.

        Raises:
            ZooError: The prompts lack the column, or its name is reserved, so reward functions do not receive it.
        """
        names, column = list(names), self.column
        readable_names = [name for name in names if name not in RESERVED]
        if column in withheld_columns(names):
            raise ZooError(
                f"The reward {self.name} reads the column {column!r}, but that name is reserved, so the "
                f"column is not passed to reward functions: {how_to_rename(column)}, and set "
                f'{self.name}(column="given_{column}").'
            )
        if column not in readable_names:
            columns_text = ", ".join(map(repr, readable_names)) or "no columns but the prompt"
            raise ZooError(
                f"The reward {self.name} reads the column {column!r}, but the prompts have {columns_text}: set the "
                f'column of the answers, {self.name}(column="NAME").'
            )

    def answer_flags(self, rows: Any, *, subject: str) -> list[bool]:
        """Returns, for each row, whether it has an answer.

        Args:
            rows: A data set of prompts.
            subject: The data set's name in errors.

        Raises:
            ZooError: The column is missing, or an answer cannot be read.
        """
        self.check_columns(rows.column_names)
        answers = [_as_accepted_answers(answer) for answer in rows[self.column]]
        for row, accepted_answers in enumerate(answers):
            for answer in accepted_answers or ():
                try:
                    self._parse_answer(answer)
                except (TypeError, ValueError) as error:
                    raise ZooError(
                        f"The reward {self.name} cannot read the answer of row {row} of {subject} ({error}): "
                        f'correct it, or set the column of the answers, {self.name}(column="NAME").'
                    ) from error
        return [accepted_answers is not None for accepted_answers in answers]

    def _parse_answer(self, answer: Any) -> Any:
        """Converts an accepted answer to the form in which it is compared with completions."""
        raise NotImplementedError

    def _accepted_answers(self, columns: Mapping[str, Any]) -> list[list[Any] | None]:
        """Returns the accepted answers of each row; None for a row without an answer."""
        self.check_columns(columns)
        return [_as_accepted_answers(answer) for answer in columns[self.column]]


def _as_accepted_answers(answer: Any) -> list[Any] | None:
    answers = answer if isinstance(answer, (list, tuple)) else [answer]
    # In a column of numbers, a missing answer is NaN, which does not equal itself.
    return [accepted for accepted in answers if accepted is not None and accepted == accepted] or None


@dataclass(frozen=True, kw_only=True)
class ExactMatch(AnswerRule):
    """1 if a completion equals the row's answer, 0 if it does not, None if the row has no answer.

    A run of white space counts as one space. White space at the beginning and the end is ignored.

    Attributes:
        column: The column of the data set with the answer or a list of accepted answers. Answers that are not text are
            converted with `str` first.
        marker: A text before the answer, such as "Answer:"; None for no marker. In a completion, only the first line
            with text after the last marker counts, and a completion without the marker gets 0. An accepted answer is
            read in the same way, but need not contain the marker.
        ignore_case: Whether to ignore case.
        name: The name in metrics.

    Raises:
        ZooError: When called: the data set lacks the column.
    """

    column: str = "answer"
    marker: str | None = None
    ignore_case: bool = False
    name: str = "exact_match"

    @property
    def strict(self) -> ExactMatch:
        """Reads the answer after the marker; without a marker, the whole completion."""
        return self

    @property
    def lenient(self) -> ExactMatch:
        """Finds the answer anywhere in a completion as entire words, and ignores case."""
        return _ContainsMatch(column=self.column, marker=self.marker, ignore_case=True, name=self.name)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [
            None if answers is None else float(self._matches(last_message_text(completion), answers))
            for completion, answers in zip(completions, self._accepted_answers(columns), strict=True)
        ]

    def read(self, text: str) -> str | None:
        """Returns the answer in a text; None if the marker is missing.

        Args:
            text: A completion.
        """
        answer = text_after_marker(text, self.marker)
        return None if answer is None else self._normalize(answer)

    def _matches(self, text: str, answers: Sequence[Any]) -> bool:
        return self.read(text) in [self._parse_answer(answer) for answer in answers]

    def _parse_answer(self, answer: Any) -> str:
        answer = str(answer)
        text = text_after_marker(answer, self.marker)
        return self._normalize(answer if text is None else text)

    def _normalize(self, text: str) -> str:
        if self.marker is not None:
            text = text.strip().partition("\n")[0]
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


class _ContainsMatch(ExactMatch):
    read = None  # type: ignore[assignment]  # no majority vote, because a text may contain several answers

    def _matches(self, text: str, answers: Sequence[Any]) -> bool:
        text = " ".join(text.split()).casefold()
        accepted_answers = map(self._parse_answer, answers)
        return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) for answer in accepted_answers)


@dataclass(frozen=True, kw_only=True)
class NumericMatch(AnswerRule):
    """1 if a completion's number is the row's answer, 0 if it differs or is missing, None if the row has no answer.

    Logs the number in the extra column NAME/read, by the function `log_extra` that TRL passes to reward functions.

    Attributes:
        column: The column of the data set with a number, a text that `read_number` reads, or a list of these.
        marker: As for `read_number`. An accepted answer that lacks the marker is read as if `marker` were None.
        relative: The relative tolerance, `rel_tol` of `math.isclose`. The default only allows for rounding errors.
        absolute: The absolute tolerance, `abs_tol` of `math.isclose`.
        percent: "unit" ignores a % sign; "hundredth" reads "42%" as 0.42.
        name: The name in metrics.

    Raises:
        ZooError: When called: the data set lacks the column.
        ValueError: When called: an accepted answer has no number.
    """

    column: str = "answer"
    marker: str | None = None
    relative: float = 1e-9
    absolute: float = 0.0
    percent: Literal["unit", "hundredth"] = "unit"
    name: str = "numeric_match"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("relative", "absolute"):
            if not is_finite(getattr(self, field)) or getattr(self, field) < 0:
                raise self._field_error(field, "a tolerance of at least 0")
        self._check_choice("percent", "unit", "hundredth")

    @property
    def strict(self) -> NumericMatch:
        """Reads the first number after the marker, by default GSM8K's ####."""
        return self if self.marker is not None else replace(self, marker=_GSM8K_MARKER)

    @property
    def lenient(self) -> NumericMatch:
        r"""Reads the last number in the last \boxed{…}, or in the entire completion if nothing is boxed."""
        return replace(self, marker=None) if self.marker is not None else self

    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        numbers = [self.read(last_message_text(completion)) for completion in completions]
        if log_extra is not None:
            log_extra(f"{self.name}/read", list(numbers))
        return [
            None if answers is None else float(self._matches(number, answers))
            for number, answers in zip(numbers, self._accepted_answers(columns), strict=True)
        ]

    def read(self, text: str) -> float | None:
        """Reads the number that a text gives as its answer; None if it has no number.

        Args:
            text: A completion.
        """
        return read_number(text, marker=self.marker, percent=self.percent)

    def _matches(self, number: float | None, answers: Sequence[Any]) -> bool:
        accepted_numbers = [self._parse_answer(answer) for answer in answers]
        return number is not None and any(
            math.isclose(number, accepted, rel_tol=self.relative, abs_tol=self.absolute)
            for accepted in accepted_numbers
        )

    def _parse_answer(self, answer: Any) -> float:
        if not isinstance(answer, str):
            return float(answer)
        marker = self.marker if self.marker is not None and self.marker in answer else None
        number = read_number(answer, marker=marker, percent=self.percent)
        if number is None:
            raise ValueError(f"the column {self.column!r} holds {answer!r}, which has no number")
        return number


# Ready-made rewards, which entry points name.

exact_match = ExactMatch()
numeric_match = NumericMatch()
length = Length()
repetition = Repetition()
