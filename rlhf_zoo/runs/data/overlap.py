"""Which prompts of one set of rows another set asks as well, however each of them writes a prompt.

Two rows ask the same where the user's words are the same: white space, case, Unicode form, a system turn and the
answers between turns do not count, nor does a text that `columns` puts around a value. A longer prompt is also found
within other words, such as a template that stands in the data themselves.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from ...modeling.chat import completion_text, is_conversation
from ...modeling.reserved_columns import ASKED

if TYPE_CHECKING:
    from datasets import Dataset

#: A prompt of as many words and characters, normalized, is also looked for within longer ones: fewer are a phrase that
#: many prompts share.
WORDS, CHARACTERS = 6, 20
_SCRIPTS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # of Chinese and Japanese, which part no words
_WORD = re.compile(rf"[{_SCRIPTS}]|[^\W{_SCRIPTS}]+|[^\w\s]")
#: Columns that say what is asked, the first that is there.
_ASKING = ("prompt", "messages", "text")
#: By which dialogues in one text, as those of Anthropic/hh-rlhf, part their turns.
_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


def normalized(text: str) -> str:
    """The words and marks of a text with one space between each, without regard to case or Unicode form."""
    folded = unicodedata.normalize("NFC", text).casefold()
    return " ".join(_WORD.findall(unicodedata.normalize("NFC", folded)))


@dataclass(frozen=True)
class Asked:
    """What a row asks, normalized.

    Attributes:
        wholes: All of it, as it is written and, where `columns` made the text, as the values in it.
        turns: The user's turns.
        parts: What is asked on the way: turns, values, and the shorter beginnings of several of them.
        told: Whether the row tells its prompt from its answer; a plain text does not.
    """

    wholes: tuple[str, ...]
    turns: tuple[str, ...]
    parts: frozenset[str]
    told: bool


def asked_in(row: Mapping[str, Any]) -> Asked:
    """What a row of any stage asks: its prompt, the user's turns of its conversation, else its whole text."""
    name = next((name for name in _ASKING if name in row), None)
    text = row[name] if name else next((value for key, value in row.items() if key != ASKED), "")
    spoken = _user_turns(text)
    turns = [normalized(turn) for turn in (spoken if spoken is not None else [str(text)])]
    values = [normalized(value) for value in row.get(ASKED) or ()]
    return Asked(
        wholes=tuple(dict.fromkeys(filter(None, (" ".join(filter(None, one)) for one in (turns, values))))),
        turns=tuple(filter(None, turns)),
        parts=frozenset(filter(None, (*turns, *values, *_beginnings(turns), *_beginnings(values)))),
        told=name in ("prompt", "messages") or spoken is not None,
    )


def whole_question(row: Mapping[str, Any]) -> str:
    """All that a row asks as it is written, normalized; "" where that is nothing."""
    return next(iter(asked_in(row).wholes), "")


def _user_turns(text: Any) -> list[str] | None:
    """The user's turns of a conversation, or of a dialogue in one text; None of another text."""
    if isinstance(text, str):
        pieces = _SPEAKER.split(text)
        speakers, said = pieces[1::2], pieces[2::2]
        if "Human" not in speakers or "Assistant" not in speakers:
            return None
        return [turn for speaker, turn in zip(speakers, said, strict=True) if speaker == "Human"]
    if not is_conversation(text):
        return None
    by_user = [turn for turn in text if turn["role"] == "user"]
    return [completion_text([turn]) for turn in by_user or text]


def _beginnings(turns: Sequence[str]) -> Iterator[str]:
    """The first two turns, the first three and so on, as long as they are too short to be looked for within others."""
    for beginning in accumulate(turns, lambda before, turn: f"{before} {turn}"):
        if is_long(beginning):
            return
        yield beginning


def is_long(text: str) -> bool:
    """Whether a normalized text is long enough to be looked for within others."""
    return len(text) >= CHARACTERS and text.count(" ") >= WORDS - 1


def _windows(text: str) -> list[int]:
    """The hashes of each WORDS neighbouring words of a normalized text."""
    words = text.split(" ")
    return [hash(window) for window in zip(*(words[first:] for first in range(WORDS)), strict=False)]


def _shared_start(texts: Sequence[list[str]]) -> int:
    """How many words all texts begin with; 0 of a single one."""
    if len(texts) < 2:
        return 0
    least, most = min(texts), max(texts)  # whatever these begin with, those between them do
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(least, most, strict=False)))


class Questions:
    """Prompts that others are compared with, each row's in turn, in time that grows with their words alone.

    A prompt within another shares all its windows of neighbouring words with it, so the rarest of them is looked up,
    and only what shares that one is compared.

    Args:
        rows: The rows that hold them.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._places: dict[str, list[int]] = {}
        self.all_long = True
        for place, row in enumerate(rows):
            wholes = asked_in(row).wholes
            for whole in wholes:
                self._places.setdefault(whole, []).append(place)
            self.all_long &= bool(wholes) and is_long(wholes[0])
        self._long = list(filter(is_long, self._places))
        self._with_window: dict[int, list[int]] = {}
        for index, text in enumerate(self._long):
            for window in set(_windows(text)):
                self._with_window.setdefault(window, []).append(index)
        self._by_rarest: dict[int, list[int]] = {}
        for index, text in enumerate(self._long):
            self._by_rarest.setdefault(self._rarest(_windows(text)), []).append(index)
        words = [text.split(" ") for text in self._long]
        self._first, self._last = _shared_start(words), _shared_start([one[::-1] for one in words])

    def _rarest(self, windows: Sequence[int]) -> int:
        return min(windows, key=lambda window: len(self._with_window[window]))

    def asked_by(self, row: Mapping[str, Any]) -> set[int]:
        """The places of those rows whose prompt this row asks, or has within its own, or whose prompt holds this row's.

        Args:
            row: A row of any stage.
        """
        asked = asked_in(row)
        names = {text for text in (*asked.wholes, *asked.parts) if text in self._places}
        if self._long:
            for text in filter(is_long, asked.wholes):
                names.update(self._within(text))
            for text in filter(is_long, {*asked.wholes, *asked.turns}):
                names.update(self._around(text))
        return {place for name in names for place in self._places[name]}

    def _within(self, text: str) -> Iterator[str]:
        """The prompts that stand in a longer text."""
        padded = f" {text} "
        for window in {window for window in _windows(text) if window in self._by_rarest}:
            for index in self._by_rarest[window]:
                if f" {self._long[index]} " in padded:
                    yield self._long[index]

    def _around(self, text: str) -> Iterator[str]:
        """The prompts in which a shorter text stands, but for the words that all of them begin or end with."""
        windows = _windows(text)
        if not all(window in self._with_window for window in windows):
            return
        length = text.count(" ") + 1
        for index in self._with_window[self._rarest(windows)]:
            before, found, _ = f" {self._long[index]} ".partition(f" {text} ")
            first, words = before.count(" "), self._long[index].count(" ") + 1
            if found and first < words - self._last and first + length > self._first:
                yield self._long[index]


@dataclass(frozen=True)
class Overlap:
    """What two sets of rows ask alike.

    Attributes:
        asked: Places of the prompts that the other rows ask as well.
        rows: Places of the rows that ask one of the prompts.
        told: Whether no further ones can be hidden: where the rows are texts that do not tell prompt from answer, a
            short prompt may stand in them.
    """

    asked: set[int]
    rows: set[int]
    told: bool


def overlap(prompts: Dataset | Sequence[Mapping[str, Any]], rows: Dataset | Sequence[Mapping[str, Any]]) -> Overlap:
    """Compares prompts with what a stage learns from.

    Args:
        prompts: Rows with the column `prompt`.
        rows: Rows as a stage reads them.
    """
    questions = Questions(_read(prompts))
    asked, asking, told = set[int](), set[int](), True
    for place, row in enumerate(_read(rows)):
        if places := questions.asked_by(row):
            asked |= places
            asking.add(place)
        told = told and (questions.all_long or asked_in(row).told)
    return Overlap(asked, asking, told)


def unmarked(rows: Dataset) -> Dataset:
    """The rows without the column that only comparisons read."""
    return rows.remove_columns(ASKED) if ASKED in rows.column_names else rows


def _read(rows: Dataset | Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The rows with the columns alone that say what is asked."""
    if isinstance(rows, Sequence):
        return rows
    known = [name for name in _ASKING if name in rows.column_names]
    names = (known or [name for name in rows.column_names if name != ASKED])[:1]
    found: Iterable[Mapping[str, Any]] = rows.select_columns([*names, *({ASKED} & set(rows.column_names))])
    return found
