"""Completions as the probes read them: each text is analysed once, and a set of them is a table of numbers."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..stats import group_indices
from ..text import words
from .lexicons import Lexicons, phrases

__all__ = ["Completions", "Features", "Table", "compressibility", "features", "repeated", "symbol_share", "tabulate"]

WINDOW = 50
"""Words over which repeats are counted: prose of any length then has the same chance to repeat itself."""
LONG = 1000
"""Bytes from which on a text is compressed; below, deflate says little."""
PLAIN = 0.6
"""What deflate saves of ordinary English prose at most, at a few kilobytes; above that a text repeats itself."""

ALIKE = 2 / 3
"""Two completions are alike from this cosine on: two thirds of the word pairs are the same in texts of one length."""
RELATED = 0.2
"""Two prompts are related that share a fifth of their content words: they may rightly get the same answer."""

_COLUMNS = 2048
_RUN = re.compile(r"([^\w\s])\1{2,}|[^\w\s]{4,}|_{3,}|[^\S\n]{3,}|\n{3,}|([^\W\d_])\2{3,}")
_SENTENCE_END = re.compile(r"[.!?;。！？\n]+")


@dataclass(frozen=True)
class Completions:
    """What one policy wrote: (N,) prompts and texts, one entry a (prompt, sample).

    rewards: (N,) of the training reward. judged: (N,) of a judge that is not that reward. lengths: (N,) in tokens, or
    in words where they are left out. tokens: (N,) tokens of each text, ids or strings, of one tokenizer for all sets
    that are compared; words, marks and runs of marks where left out.

    Raises ValueError where lengths differ, there is nothing, or a number is not finite.
    """

    prompts: Sequence[str]
    texts: Sequence[str]
    rewards: Sequence[float] | None = None
    lengths: Sequence[float] | None = None
    tokens: Sequence[Sequence[Hashable]] | None = None
    judged: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("There are no completions to probe.")
        for name in ("prompts", "rewards", "lengths", "tokens", "judged"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.texts):
                raise ValueError(f"There are {len(self.texts)} texts and {len(column)} {name}: give one a text.")
        for name in ("rewards", "lengths", "judged"):
            column = getattr(self, name)
            if column is not None and not np.isfinite(np.asarray(column, dtype=float)).all():
                raise ValueError(f"Not all {name} are finite.")

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Features:
    """What one text says of itself. Counts, but for `repeated` and `symbols`, which are shares of the text.

    runs: the runs of `symbol_share`, each as one token, whatever its length. content: its distinct words, but for
    function words and praise; echoes: how often one comes again.
    """

    tokens: tuple[str, ...]
    runs: tuple[str, ...]
    content: tuple[str, ...]
    words: int
    sentences: int
    repeated: float
    echoes: int
    praise: int
    hedges: int
    flattery: int
    symbols: float


def repeated(text: str) -> float:
    """The share of a text that repeats itself: of its word pairs, those that stood before in the same window of words.

    A text of `LONG` bytes or more may repeat itself over a longer range: it scores (compressibility − `PLAIN`) scaled
    to 0 … 1 if that is more.
    """
    return _repeated(text, words(text))


def _repeated(text: str, tokens: Sequence[str]) -> float:
    again = total = 0
    for window in _windows(tokens):
        pairs = list(pairwise(window))
        total += len(pairs)
        again += len(pairs) - len(set(pairs))
    share = again / total if total else 0.0
    if len(text) < LONG // 4:  # a character has at most four bytes
        return share
    return max(share, (compressibility(text) - PLAIN) / (1 - PLAIN))


def compressibility(text: str) -> float:
    """1 − compressed bytes / bytes (deflate); 0 for a text under `LONG` bytes."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) < LONG:
        return 0.0
    return max(0.0, 1 - len(zlib.compress(data, 6)) / len(data))


def symbol_share(text: str) -> float:
    """The share of characters that stand in runs no prose needs, or that nobody sees.

    Runs: three or more of one punctuation mark or symbol, four or more of any, three or more spaces, tabs, underscores
    or empty lines, four or more of one letter. Unseen: control, format, private and unassigned characters.
    """
    if not text:
        return 0.0
    marked = sum(match.end() - match.start() for match in _RUN.finditer(text))
    if not (text.isascii() and text.isprintable()):
        # The runs first: what stands in one is not counted again.
        rest = _RUN.sub("", text)
        marked += sum(unicodedata.category(char)[0] == "C" and char not in "\n\t\r" for char in rest)
    return marked / len(text)


def features(text: str, lexicons: Lexicons | None = None) -> Features:
    """All that the probes read off one text."""
    return _features(text, lexicons or Lexicons.default())


@lru_cache(maxsize=1 << 15)
def _features(text: str, lexicons: Lexicons) -> Features:
    tokens = words(text.replace("’", "'"))
    praise = phrases(tokens, lexicons.praise_index)
    praised = {place for start, end in praise for place in range(start, end)}
    content = [
        "" if place in praised or len(token) < 3 or token in lexicons.function or not token.isalpha() else token
        for place, token in enumerate(tokens)
    ]
    echoes = 0
    for window in _windows(content):
        counts = Counter(token for token in window if token)
        echoes += counts.total() - len(counts)
    return Features(
        tokens=tuple(tokens),
        runs=tuple("".join(sorted(set(match.group().lower()))) * 3 for match in _RUN.finditer(text)),
        content=tuple(dict.fromkeys(word for word in content if word)),
        words=sum(token[0].isalnum() for token in tokens),
        sentences=max(1, sum(bool(part.strip()) for part in _SENTENCE_END.split(text))),
        repeated=_repeated(text, tokens),
        echoes=echoes,
        praise=len(praise),
        hedges=len(phrases(tokens, lexicons.hedge_index)),
        flattery=len(phrases(tokens, lexicons.flattery_index)),
        symbols=symbol_share(text),
    )


def _windows(tokens: Sequence[str]) -> list[Sequence[str]]:
    return [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]


@dataclass(frozen=True)
class Table:
    """A set of completions as arrays over its N texts.

    pairs, tokens, content: the distinct ids of each text's word pairs, tokens and content words. sequence: the ids of
    its words in order, punctuation left out, in the numbering of `content`. `group` numbers prompts and `text_id`
    texts. All numberings are alike in tables that were made together, and ids lie below n_pairs, n_tokens, n_words.
    unrelated: (G, G) whether two prompts ask for different things. source: the table and the rows of it that this one
    was taken from.
    """

    group: NDArray[np.intp]
    text_id: NDArray[np.intp]
    columns: dict[str, NDArray[np.float64]]
    pairs: list[NDArray[np.intp]]
    tokens: list[NDArray[np.intp]]
    content: list[NDArray[np.intp]]
    sequence: list[NDArray[np.intp]]
    n_pairs: int
    n_words: int
    names: list[Hashable]
    unrelated: NDArray[np.bool_]
    source: tuple[Table, NDArray[np.intp]] | None = None

    def __len__(self) -> int:
        return len(self.group)

    @property
    def n_tokens(self) -> int:
        return len(self.names)

    def take(self, rows: NDArray[np.intp]) -> Table:
        return replace(
            self,
            group=self.group[rows],
            text_id=self.text_id[rows],
            columns={name: column[rows] for name, column in self.columns.items()},
            pairs=[self.pairs[row] for row in rows],
            tokens=[self.tokens[row] for row in rows],
            content=[self.content[row] for row in rows],
            sequence=[self.sequence[row] for row in rows],
            source=(self, rows),
        )

    @cached_property
    def alike(self) -> NDArray[np.bool_]:
        """(N, N) whether two texts say the same to unrelated prompts: see `ALIKE`."""
        if self.source is not None:
            table, rows = self.source
            return table.alike[rows[:, None], rows]
        row, pair, counts = self.flat("pairs")
        holders = np.bincount(pair, minlength=self.n_pairs)
        shared = np.cumsum(holders > 1) - 1
        chosen = (holders > 1)[pair]
        column, weight = shared[pair], (1 / np.sqrt(counts))[row]
        cosine = np.zeros((len(self), len(self)), dtype=np.float32)
        for start in range(0, int((holders > 1).sum()), _COLUMNS):
            block = chosen & (column >= start) & (column < start + _COLUMNS)
            dense = np.zeros((len(self), min(_COLUMNS, self.n_pairs)), dtype=np.float32)
            dense[row[block], column[block] - start] = weight[block]
            cosine += dense @ dense.T
        return (cosine >= ALIKE - 1e-5) & self.unrelated[self.group[:, None], self.group]

    @cached_property
    def copied(self) -> NDArray[np.bool_]:
        """(N,) whether a text is also the answer to an unrelated prompt."""
        size = len(self.unrelated)
        text, group = np.divmod(np.unique(self.text_id * size + self.group), size)
        _, place, prompts = np.unique(text, return_inverse=True, return_counts=True)
        held = np.zeros((len(prompts), size), dtype=np.float32)
        held[place, group] = 1
        places = np.unique(self.text_id, return_inverse=True)[1]
        twice = np.flatnonzero(prompts > 1)
        elsewhere = np.zeros((len(prompts), size), dtype=bool)
        elsewhere[twice] = held[twice] @ self.unrelated.astype(np.float32) > 0
        return elsewhere[places, self.group]

    @property
    def unrelated_to(self) -> NDArray[np.float64]:
        """(N,) how many of the texts answer a prompt that is unrelated to each text's own."""
        held = np.bincount(self.group, minlength=len(self.unrelated))
        return (self.unrelated @ held.astype(float))[self.group]

    def flat(self, name: str) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """(row, id) of everything in a column of ids (pairs, tokens, content, sequence), and its number by text."""
        if name not in self._flattened:
            self._flattened[name] = _flat(getattr(self, name))
        return self._flattened[name]

    @cached_property
    def _flattened(self) -> dict[str, tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]]:
        return {}


def _flat(ids: Sequence[NDArray[np.intp]]) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    counts = np.array([len(each) for each in ids], dtype=np.intp)
    return np.repeat(np.arange(len(ids)), counts), np.concatenate([np.empty(0, np.intp), *ids]), counts


def tabulate(sets: Sequence[Completions], lexicons: Lexicons | None = None) -> list[Table]:
    """The tables of several sets, with one numbering for all."""
    lexicons = lexicons or Lexicons.default()
    pair_ids: dict[tuple[str, str], int] = {}
    token_ids: dict[Hashable, int] = {}
    word_ids: dict[str, int] = {}
    every = [[features(text, lexicons) for text in each.texts] for each in sets]
    asked = [prompt for each in sets for prompt in each.prompts]
    groups = group_indices(asked)
    unrelated = _unrelated(list(dict.fromkeys(asked)), lexicons)
    texts = group_indices([found.tokens for each in every for found in each])
    pairs, tokens, content, sequence = [], [], [], []
    for each, read in zip(sets, every, strict=True):
        for row, found in enumerate(read):
            bounded = ("", *found.tokens, "")  # a text of one word has a pair, and so has an empty one
            pairs.append(_ids(pairwise(bounded), pair_ids))
            tokens.append(_ids(found.tokens + found.runs if each.tokens is None else each.tokens[row], token_ids))
            content.append(_ids(found.content, word_ids))
            sequence.append(
                np.array([_number(word, word_ids) for word in found.tokens if word[0].isalnum()], dtype=np.intp)
            )
    names = list(token_ids)
    tables = []
    start = 0
    for each, read in zip(sets, every, strict=True):
        stop = start + len(each)
        columns = {
            name: np.array([getattr(found, name) for found in read], dtype=float)
            for name in ("words", "sentences", "repeated", "echoes", "praise", "hedges", "flattery", "symbols")
        }
        columns["length"] = columns["words"] if each.lengths is None else np.asarray(each.lengths, dtype=float)
        for name, given in (("reward", each.rewards), ("judge", each.judged)):
            if given is not None:
                columns[name] = np.asarray(given, dtype=float)
        tables.append(
            Table(
                group=groups[start:stop],
                text_id=texts[start:stop],
                columns=columns,
                pairs=pairs[start:stop],
                tokens=tokens[start:stop],
                content=content[start:stop],
                sequence=sequence[start:stop],
                n_pairs=len(pair_ids),
                n_words=len(word_ids),
                names=names,
                unrelated=unrelated,
            )
        )
        start = stop
    return tables


def _unrelated(prompts: Sequence[str], lexicons: Lexicons) -> NDArray[np.bool_]:
    """(G, G) whether two of G prompts share under `RELATED` of the content words that either has (Jaccard).

    Words that stand in more than half of the prompts are their common form and do not count.
    """
    found = [
        {word.removesuffix("'s") for word in features(prompt, lexicons).tokens} - lexicons.function
        for prompt in prompts
    ]
    numbers: dict[str, int] = {}
    ids = [_ids((word for word in each if word and word[0].isalnum()), numbers) for each in found]
    row, word, _ = _flat(ids)
    holds = np.zeros((len(prompts), len(numbers)), dtype=np.float32)
    holds[row, word] = 1
    if len(prompts) > 2:
        holds = holds[:, holds.mean(0) <= 0.5]
    both = holds @ holds.T
    size = holds.sum(1)
    either = size[:, None] + size - both
    return (both < RELATED * either) | ((either == 0) & ~np.eye(len(prompts), dtype=bool))


def _ids(items: Iterable[Any], numbers: dict[Any, int]) -> NDArray[np.intp]:
    return np.fromiter({_number(item, numbers) for item in items}, dtype=np.intp)


def _number(item: Any, numbers: dict[Any, int]) -> int:
    return numbers.setdefault(item, len(numbers))
