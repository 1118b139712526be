"""Finds the prompts that two sets of rows have in common, in whatever form each set writes them.

Two rows have the same question if the user's words are the same. White space, case, Unicode form, a system turn and the
answers between turns do not count, nor does a text that `columns` puts around a value. A longer prompt is also found
inside other text, such as a template in the data themselves.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from ...modeling.chat import completion_text
from ...modeling.chat_template import is_conversation
from ...modeling.reserved_columns import QUESTION
from .turns import SPEAKER

if TYPE_CHECKING:
    from datasets import Dataset

#: Fewest words and characters of a normalized prompt that is also searched for inside longer texts. A shorter one may
#: be a phrase that many prompts share.
WORDS, CHARACTERS = 6, 20
_SCRIPTS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese and Japanese, written without spaces
_WORD = re.compile(rf"[{_SCRIPTS}]|[^\W{_SCRIPTS}]+|[^\w\s]")
#: Columns that hold the question; the first one that a row has counts.
_ASKING = ("prompt", "messages", "text")


def normalized(text: str) -> str:
    """Returns the words and marks of a text, separated by single spaces, without differences of case and Unicode form.

    Args:
        text: The text.

    Returns:
        The normalized text.
    """
    folded = unicodedata.normalize("NFC", text).casefold()
    return " ".join(_WORD.findall(unicodedata.normalize("NFC", folded)))


@dataclass(frozen=True)
class Question:
    """The question of a row, normalized.

    Attributes:
        texts: The complete question as written and, if `columns` made the text, as the values in it.
        turns: The user's turns.
        parts: Parts of the question: turns, values, and short sequences of the first few of them.
        has_prompt: Whether the row separates its prompt from its answer; a plain text does not.
    """

    texts: tuple[str, ...]
    turns: tuple[str, ...]
    parts: frozenset[str]
    has_prompt: bool


def question_of(row: Mapping[str, Any]) -> Question:
    """Returns the question of a row of any stage: its prompt, its user's turns, or otherwise its complete text.

    Args:
        row: The row.

    Returns:
        The question.
    """
    name = next((name for name in _ASKING if name in row), None)
    text = row[name] if name else next((value for key, value in row.items() if key != QUESTION), "")
    user_turns = _user_turns(text)
    turns = [normalized(turn) for turn in (user_turns if user_turns is not None else [str(text)])]
    values = [normalized(value) for value in row.get(QUESTION) or ()]
    return Question(
        texts=tuple(dict.fromkeys(filter(None, (" ".join(filter(None, pieces)) for pieces in (turns, values))))),
        turns=tuple(filter(None, turns)),
        parts=frozenset(filter(None, (*turns, *values, *_beginnings(turns), *_beginnings(values)))),
        has_prompt=name in ("prompt", "messages") or user_turns is not None,
    )


def question_text(row: Mapping[str, Any]) -> str:
    """Returns the complete question of a row as written, normalized.

    Args:
        row: The row.

    Returns:
        The question; "" if there is none.
    """
    return next(iter(question_of(row).texts), "")


def _user_turns(text: Any) -> list[str] | None:
    """Returns the user's turns of a conversation, or of a dialogue written as one text; None for any other text."""
    if isinstance(text, str):
        pieces = SPEAKER.split(text)
        speakers, turns = pieces[1::2], pieces[2::2]
        if "Human" not in speakers or "Assistant" not in speakers:
            return None
        return [turn for speaker, turn in zip(speakers, turns, strict=True) if speaker == "Human"]
    if not is_conversation(text):
        return None
    by_user = [turn for turn in text if turn["role"] == "user"]
    return [completion_text([turn]) for turn in by_user or text]


def _beginnings(turns: Sequence[str]) -> Iterator[str]:
    """Yields the first turn, the first two and so on, as long as `is_long` is false."""
    for beginning in accumulate(turns, lambda before, turn: f"{before} {turn}"):
        if is_long(beginning):
            return
        yield beginning


def is_long(text: str) -> bool:
    """Whether a normalized text is long enough to be searched for within others.

    Args:
        text: The text.

    Returns:
        True if it is.
    """
    return len(text) >= CHARACTERS and text.count(" ") >= WORDS - 1


def _windows(text: str) -> list[int]:
    """Returns the hash of each run of WORDS consecutive words of a normalized text."""
    words = text.split(" ")
    return [hash(window) for window in zip(*(words[first:] for first in range(WORDS)), strict=False)]


def _shared_start(texts: Sequence[list[str]]) -> int:
    """Returns how many words all texts begin with; 0 for a single text."""
    if len(texts) < 2:
        return 0
    least, most = min(texts), max(texts)  # the texts between them in order share the same beginning
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(least, most, strict=False)))


class Questions:
    """Prompts to compare rows with, in time linear in the words of the rows.

    A longer text that contains a prompt has all windows of its consecutive words. So only the rarest window of each
    prompt is looked up, and only texts that have it are compared.

    Args:
        rows: The rows that hold the prompts.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._places: dict[str, list[int]] = {}
        self.all_long = True
        for place, row in enumerate(rows):
            texts = question_of(row).texts
            for text in texts:
                self._places.setdefault(text, []).append(place)
            self.all_long &= bool(texts) and is_long(texts[0])
        self._long = list(filter(is_long, self._places))
        self._with_window: dict[int, list[int]] = {}
        for index, text in enumerate(self._long):
            for window in set(_windows(text)):
                self._with_window.setdefault(window, []).append(index)
        self._by_rarest: dict[int, list[int]] = {}
        for index, text in enumerate(self._long):
            self._by_rarest.setdefault(self._rarest(_windows(text)), []).append(index)
        words = [text.split(" ") for text in self._long]
        self._shared_first, self._shared_last = (
            _shared_start(words),
            _shared_start([text_words[::-1] for text_words in words]),
        )

    def _rarest(self, windows: Sequence[int]) -> int:
        return min(windows, key=lambda window: len(self._with_window[window]))

    def places_in(self, row: Mapping[str, Any]) -> set[int]:
        """Returns the indices of the prompts that a row has.

        A prompt counts if it equals the row's question, is contained in that question, or contains it.

        Args:
            row: A row of any stage.

        Returns:
            The indices.
        """
        question = question_of(row)
        names = {text for text in (*question.texts, *question.parts) if text in self._places}
        if self._long:
            for text in filter(is_long, question.texts):
                names.update(self._contained_in(text))
            for text in filter(is_long, {*question.texts, *question.turns}):
                names.update(self._containing(text))
        return {place for name in names for place in self._places[name]}

    def _contained_in(self, text: str) -> Iterator[str]:
        """Yields the prompts that a longer text contains."""
        padded = f" {text} "
        for window in {window for window in _windows(text) if window in self._by_rarest}:
            for index in self._by_rarest[window]:
                if f" {self._long[index]} " in padded:
                    yield self._long[index]

    def _containing(self, text: str) -> Iterator[str]:
        """Yields the prompts that contain a shorter text, apart from the words that all prompts begin or end with."""
        windows = _windows(text)
        if not all(window in self._with_window for window in windows):
            return
        length = text.count(" ") + 1
        for index in self._with_window[self._rarest(windows)]:
            before, match, _ = f" {self._long[index]} ".partition(f" {text} ")
            first, words = before.count(" "), self._long[index].count(" ") + 1
            if match and first < words - self._shared_last and first + length > self._shared_first:
                yield self._long[index]


@dataclass(frozen=True)
class Overlap:
    """The prompts that two sets of rows have in common.

    Attributes:
        prompts: Indices of the prompts that the other rows also have.
        rows: Indices of the rows that have one of the prompts.
        is_complete: Whether no prompt can have been missed. In plain texts a short prompt cannot be recognized.
    """

    prompts: set[int]
    rows: set[int]
    is_complete: bool


def overlap(prompts: Dataset | Sequence[Mapping[str, Any]], rows: Dataset | Sequence[Mapping[str, Any]]) -> Overlap:
    """Compares prompts with the rows that a stage trains on.

    Args:
        prompts: Rows with the column `prompt`.
        rows: Rows as a stage reads them.

    Returns:
        The prompts in common.
    """
    questions = Questions(_read(prompts))
    common, with_prompt, is_complete = set[int](), set[int](), True
    for place, row in enumerate(_read(rows)):
        if places := questions.places_in(row):
            common |= places
            with_prompt.add(place)
        is_complete = is_complete and (questions.all_long or question_of(row).has_prompt)
    return Overlap(common, with_prompt, is_complete)


def unmarked(rows: Dataset) -> Dataset:
    """Removes the column that only this module's comparisons read.

    Args:
        rows: The rows.

    Returns:
        The rows without it.
    """
    return rows.remove_columns(QUESTION) if QUESTION in rows.column_names else rows


def _read(rows: Dataset | Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Returns the rows with only the columns that hold their question."""
    if isinstance(rows, Sequence):
        return rows
    question_columns = [name for name in _ASKING if name in rows.column_names]
    names = (question_columns or [name for name in rows.column_names if name != QUESTION])[:1]
    selected: Iterable[Mapping[str, Any]] = rows.select_columns([*names, *({QUESTION} & set(rows.column_names))])
    return selected
