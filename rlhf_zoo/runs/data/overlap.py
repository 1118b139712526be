"""Finds the prompts that two sets of rows have in common, in whatever form each set writes them.

Two rows have the same question if the user's words are the same. White space, case, Unicode form, system turns, answers
between turns, and text that `columns` puts around a value are ignored. A long prompt is also found inside a longer
text, such as a template that the data set itself contains.
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

#: A normalized prompt with at least this many words and characters is also searched for inside longer texts. A shorter
#: one may be a phrase that many prompts share.
MIN_WORDS, MIN_CHARACTERS = 6, 20
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese and Japanese, written without spaces
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")
#: Columns that may hold the question, in order of preference.
_QUESTION_COLUMNS = ("prompt", "messages", "text")


def normalize_question(text: str) -> str:
    """Returns the words and marks of a text in one case and one Unicode form, separated by single spaces.

    Args:
        text: A prompt, turn or value.
    """
    folded_text = unicodedata.normalize("NFC", text).casefold()
    return " ".join(_WORD.findall(unicodedata.normalize("NFC", folded_text)))


@dataclass(frozen=True)
class Question:
    """The question of a row, normalized.

    Attributes:
        texts: The complete question as written. If `columns` made the text, also the filled-in values alone.
        turns: The user's turns, except empty ones.
        parts: Parts of the question: each turn, each value, and the first few turns or values while they are short.
        has_prompt: Whether the row separates its prompt from its answer; a plain text does not.
    """

    texts: tuple[str, ...]
    turns: tuple[str, ...]
    parts: frozenset[str]
    has_prompt: bool


def _extract_question(row: Mapping[str, Any]) -> Question:
    """Returns a row's question: its prompt, the user's turns of its conversation, or otherwise its complete text."""
    name = next((name for name in _QUESTION_COLUMNS if name in row), None)
    text = row[name] if name else next((value for key, value in row.items() if key != QUESTION), "")
    user_turns = _user_turns(text)
    turns = list(filter(None, map(normalize_question, [str(text)] if user_turns is None else user_turns)))
    values = list(filter(None, map(normalize_question, row.get(QUESTION) or ())))
    return Question(
        texts=tuple(dict.fromkeys(" ".join(pieces) for pieces in (turns, values) if pieces)),
        turns=tuple(turns),
        parts=frozenset((*turns, *values, *_beginnings(turns), *_beginnings(values))),
        has_prompt=name in ("prompt", "messages") or user_turns is not None,
    )


def question_text(row: Mapping[str, Any]) -> str:
    """Returns the complete question of a row as written, normalized; "" for a row without a question.

    Args:
        row: A row of any stage.
    """
    return next(iter(_extract_question(row).texts), "")


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
    user_turns = [turn for turn in text if turn["role"] == "user"]
    return [completion_text([turn]) for turn in user_turns or text]


def _beginnings(turns: Sequence[str]) -> Iterator[str]:
    """Yields the first turn, the first two turns and so on, until `_is_long` is true."""
    for beginning in accumulate(turns, lambda before, turn: f"{before} {turn}"):
        if _is_long(beginning):
            return
        yield beginning


def _is_long(text: str) -> bool:
    """Whether a normalized text is long enough to be searched for inside other texts."""
    return len(text) >= MIN_CHARACTERS and text.count(" ") >= MIN_WORDS - 1


def _window_hashes(text: str) -> list[int]:
    """Returns the hash of each sequence of MIN_WORDS consecutive words of a normalized text."""
    words = text.split(" ")
    return [hash(window) for window in zip(*(words[first:] for first in range(MIN_WORDS)), strict=False)]


def _count_shared_words(texts: Sequence[list[str]]) -> int:
    """Returns the number of words with which all texts begin; 0 for a single text."""
    if len(texts) < 2:
        return 0
    first, last = min(texts), max(texts)  # all texts between them in sorted order share their common beginning
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


class PromptIndex:
    """An index of prompts that finds the prompts of a row in time linear in the row's words.

    A text that contains a prompt has all of the prompt's windows of consecutive words. So it is enough to look up the
    rarest window of each prompt, and to compare only the texts that have this window.

    Args:
        rows: The rows that hold the prompts.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._prompts_by_text: dict[str, list[int]] = {}  # normalized question -> indices of the prompts that ask it
        self.has_only_long_prompts = True
        for prompt_index, row in enumerate(rows):
            texts = _extract_question(row).texts
            for text in texts:
                self._prompts_by_text.setdefault(text, []).append(prompt_index)
            self.has_only_long_prompts &= bool(texts) and _is_long(texts[0])
        self._long_texts = list(filter(_is_long, self._prompts_by_text))
        self._texts_by_window: dict[int, list[int]] = {}
        for index, text in enumerate(self._long_texts):
            for window in set(_window_hashes(text)):
                self._texts_by_window.setdefault(window, []).append(index)
        self._texts_by_rarest_window: dict[int, list[int]] = {}
        for index, text in enumerate(self._long_texts):
            self._texts_by_rarest_window.setdefault(self._rarest(_window_hashes(text)), []).append(index)
        words = [text.split(" ") for text in self._long_texts]
        self._shared_first = _count_shared_words(words)
        self._shared_last = _count_shared_words([text_words[::-1] for text_words in words])

    def _rarest(self, windows: Sequence[int]) -> int:
        return min(windows, key=lambda window: len(self._texts_by_window[window]))

    def find_in(self, row: Mapping[str, Any]) -> set[int]:
        """Returns the indices of the prompts that equal a row's question, are contained in it, or contain it.

        Args:
            row: A row of any stage.
        """
        question = _extract_question(row)
        matches = {text for text in (*question.texts, *question.parts) if text in self._prompts_by_text}
        if self._long_texts:
            for text in filter(_is_long, question.texts):
                matches.update(self._prompts_inside(text))
            for text in filter(_is_long, {*question.texts, *question.turns}):
                matches.update(self._prompts_around(text))
        return {prompt_index for text in matches for prompt_index in self._prompts_by_text[text]}

    def _prompts_inside(self, text: str) -> Iterator[str]:
        """Yields the prompts that a longer text contains."""
        padded_text = f" {text} "
        for window in {window for window in _window_hashes(text) if window in self._texts_by_rarest_window}:
            for index in self._texts_by_rarest_window[window]:
                if f" {self._long_texts[index]} " in padded_text:
                    yield self._long_texts[index]

    def _prompts_around(self, text: str) -> Iterator[str]:
        """Yields the prompts that contain a shorter text, unless it lies in the words that begin or end all prompts."""
        windows = _window_hashes(text)
        if not all(window in self._texts_by_window for window in windows):
            return
        length = text.count(" ") + 1
        for index in self._texts_by_window[self._rarest(windows)]:
            before, match, _ = f" {self._long_texts[index]} ".partition(f" {text} ")
            start, prompt_length = before.count(" "), self._long_texts[index].count(" ") + 1
            if match and start < prompt_length - self._shared_last and start + length > self._shared_first:
                yield self._long_texts[index]


@dataclass(frozen=True)
class Overlap:
    """The prompts that two sets of rows have in common.

    Attributes:
        prompt_indices: Indices of the prompts that at least one of the rows has.
        row_indices: Indices of the rows that have at least one of the prompts.
        is_complete: False if a prompt may have been missed, because a short prompt cannot be recognized in plain text.
    """

    prompt_indices: set[int]
    row_indices: set[int]
    is_complete: bool


def find_overlap(
    prompts: Dataset | Sequence[Mapping[str, Any]], rows: Dataset | Sequence[Mapping[str, Any]]
) -> Overlap:
    """Finds the prompts that also occur in the rows that a stage trains on, and the rows in which they occur.

    Args:
        prompts: Rows with the column `prompt`.
        rows: Rows as a stage reads them.
    """
    index = PromptIndex(_question_rows(prompts))
    prompt_indices, row_indices, is_complete = set[int](), set[int](), True
    for row_index, row in enumerate(_question_rows(rows)):
        if matches := index.find_in(row):
            prompt_indices |= matches
            row_indices.add(row_index)
        is_complete = is_complete and (index.has_only_long_prompts or _extract_question(row).has_prompt)
    return Overlap(prompt_indices, row_indices, is_complete)


def drop_question_column(rows: Dataset) -> Dataset:
    """Returns the rows without the column QUESTION, which only this module reads.

    Args:
        rows: Rows that `convert_rows` returned.
    """
    return rows.remove_columns(QUESTION) if QUESTION in rows.column_names else rows


def _question_rows(rows: Dataset | Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Returns the rows with only the columns that hold the question."""
    if isinstance(rows, Sequence):
        return rows
    question_columns = [name for name in _QUESTION_COLUMNS if name in rows.column_names]
    names = (question_columns or [name for name in rows.column_names if name != QUESTION])[:1]
    question_rows: Iterable[Mapping[str, Any]] = rows.select_columns([*names, *({QUESTION} & set(rows.column_names))])
    return question_rows
