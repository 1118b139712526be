"""Word lists: what counts as praise, as a hedge, as flattery, and which words carry no content.

The lists are short, English and ours; each file in ``words/`` says where its words come from. They need not be
complete: rates are compared with SFT's by the same list. For another language or field give lists of your own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files

from ..text import words

__all__ = ["Lexicons", "phrases"]

_SLOT = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True)
class Lexicons:
    """Lower-case words (`praise`, `function`) and phrases of one or more words (`hedges`, `flattery`)."""

    praise: frozenset[str]
    hedges: frozenset[str]
    flattery: frozenset[str]
    function: frozenset[str]

    @classmethod
    def default(cls) -> Lexicons:
        return _default()

    @cached_property
    def hedge_index(self) -> Mapping[str, Sequence[tuple[str, ...]]]:
        return _index(self.hedges)

    @cached_property
    def flattery_index(self) -> Mapping[str, Sequence[tuple[str, ...]]]:
        return _index(self.flattery)

    @cached_property
    def praise_index(self) -> Mapping[str, Sequence[tuple[str, ...]]]:
        return _index(self.praise)  # "top-notch" is three words to `words`


def phrases(tokens: Sequence[str], index: Mapping[str, Sequence[tuple[str, ...]]]) -> list[tuple[int, int]]:
    """Where phrases stand in the words of a text: (start, end) of each, none within another, the longest first."""
    found = []
    start = 0
    while start < len(tokens):
        for phrase in index.get(tokens[start], ()):
            end = start + len(phrase)
            if tuple(tokens[start:end]) == phrase:
                found.append((start, end))
                start = end - 1
                break
        start += 1
    return found


def _index(entries: Iterable[str]) -> dict[str, list[tuple[str, ...]]]:
    """Phrases by their first word, the longest first."""
    index: dict[str, list[tuple[str, ...]]] = {}
    for phrase in {tuple(words(entry)) for entry in entries} - {()}:
        index.setdefault(phrase[0], []).append(phrase)
    return {first: sorted(rest, key=lambda phrase: (-len(phrase), phrase)) for first, rest in index.items()}


def _spelled_out(line: str) -> list[str]:
    """A line with ``[a|b]`` in it as every phrase that it stands for."""
    parts = _SLOT.split(line)
    choices = [part.split("|") if place % 2 else [part] for place, part in enumerate(parts)]
    return [" ".join("".join(chosen).split()) for chosen in itertools.product(*choices)]


def _read(name: str) -> list[str]:
    text = files(__package__).joinpath("words", f"{name}.txt").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@lru_cache(maxsize=1)
def _default() -> Lexicons:
    flattery = [phrase for line in _read("flattery") for phrase in _spelled_out(line)]
    function = [word for line in _read("function") for word in line.split()]
    return Lexicons(
        praise=frozenset(_read("praise")),
        hedges=frozenset(_read("hedges")),
        flattery=frozenset(flattery),
        function=frozenset(function),
    )
