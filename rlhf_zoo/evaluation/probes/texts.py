"""Completions as the probes read them: two policies' texts for the same prompts, counted and never run."""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...modeling.words import is_word, words
from ..stats import group_indices

WINDOW = 50
"""Words over which repeats are counted: prose of any length then has the same chance to repeat itself."""
LONG = 1000
"""Bytes from which on a text is compressed; below, deflate says little."""
PLAIN = 0.6
"""What deflate saves of ordinary English prose at most, at a few kilobytes; above that a text repeats itself."""

_COLUMNS = 4096
_RUN = re.compile(r"([^\w\s])\1{2,}|[^\w\s]{4,}|_{3,}|[^\S\n]{3,}|\n{3,}|([^\W\d_])\2{3,}")


@dataclass(frozen=True)
class Completions:
    """What one policy wrote: (N,) prompts and texts, one entry a (prompt, sample).

    rewards: (N,) of the training reward. judged: (N,) of a judge that is not that reward. logprobs: (N,) lists, log p
    of each token of the text under the SFT model, nats. dependence: (N,) log p_SFT(text | its prompt) − log of the mean
    over its own and some other prompts, nats: 0 and below where the text might as well answer another prompt.

    Raises ValueError where lengths differ, there is nothing, or a number is not finite.
    """

    prompts: Sequence[str]
    texts: Sequence[str]
    rewards: Sequence[float] | None = None
    judged: Sequence[float] | None = None
    logprobs: Sequence[Sequence[float]] | None = None
    dependence: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("There are no completions to probe.")
        for name in ("prompts", "rewards", "judged", "logprobs", "dependence"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.texts):
                raise ValueError(f"There are {len(self.texts)} texts and {len(column)} {name}: give one a text.")
        for name in ("rewards", "judged", "dependence"):
            column = getattr(self, name)
            if column is not None and not np.isfinite(np.asarray(column, dtype=float)).all():
                raise ValueError(f"Not all {name} are finite.")

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Pair:
    """A policy and SFT on the G prompts that both answered: the rows of each, and of each row its prompt and words."""

    policy: Completions
    sft: Completions
    prompts: tuple[Sequence[str], Sequence[str]]
    rows: tuple[NDArray[np.intp], NDArray[np.intp]]
    groups: tuple[NDArray[np.intp], NDArray[np.intp]]
    tokens: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]

    @property
    def size(self) -> int:
        return len(self.prompts[0])

    @classmethod
    def of(cls, policy: Completions, sft: Completions, *, by_place: bool = False) -> Pair:
        """by_place: prompts that differ are paired in their order, as two draws of prompts from one set may be.

        Raises ValueError where they share no prompt.
        """
        sides = (policy, sft)
        asked = [list(dict.fromkeys(one.prompts)) for one in sides]
        there = set(asked[1])
        if by_place:
            size = min(map(len, asked))
            prompts = [each[:size] for each in asked]
        else:
            prompts = [[prompt for prompt in asked[0] if prompt in there]] * 2
        if not prompts[0]:
            raise ValueError("The two sets of completions share no prompt: sample both for the same prompts.")
        numbers = [{prompt: place for place, prompt in enumerate(each)} for each in prompts]
        rows = [
            np.array([i for i, prompt in enumerate(one.prompts) if prompt in number], dtype=np.intp)
            for one, number in zip(sides, numbers, strict=True)
        ]
        groups = [
            np.array([number[one.prompts[i]] for i in mine], dtype=np.intp)
            for one, number, mine in zip(sides, numbers, rows, strict=True)
        ]
        tokens = [
            [[word for word in words(one.texts[i]) if is_word(word)] for i in mine]
            for one, mine in zip(sides, rows, strict=True)
        ]
        return cls(
            policy, sft, (prompts[0], prompts[1]), (rows[0], rows[1]), (groups[0], groups[1]), (tokens[0], tokens[1])
        )

    def by_prompt(self, ours: Sequence[float], theirs: Sequence[float]) -> tuple[NDArray, NDArray]:
        """(G,) means of a number per completion, of the policy and of SFT."""
        policy, sft = (
            np.bincount(group, weights=np.asarray(values, dtype=float)) / np.bincount(group)
            for group, values in zip(self.groups, (ours, theirs), strict=True)
        )
        return policy, sft


def repeated(tokens: Sequence[str], text: str) -> float:
    """The share of a text that repeats itself: of its word pairs, those that stood before in the same window of words.

    A text of `LONG` bytes or more may repeat itself over a longer range: it scores (compressibility − `PLAIN`) scaled
    to 0 … 1 if that is more.
    """
    again = total = 0
    for start in range(0, len(tokens), WINDOW):
        pairs = list(pairwise(tokens[start : start + WINDOW]))
        total += len(pairs)
        again += len(pairs) - len(set(pairs))
    share = again / total if total else 0.0
    data = text.encode("utf-8", "surrogatepass") if len(text) >= LONG // 4 else b""
    if len(data) < LONG:
        return share
    return max(share, (1 - len(zlib.compress(data, 6)) / len(data) - PLAIN) / (1 - PLAIN))


def excess(tokens: Sequence[str], allowed: dict[str, float], longest: float) -> float:
    """The share of words beyond how often SFT says a word in one text (`allowed`, once for what it never says)."""
    room = max(1.0, len(tokens) / longest)
    over = (max(0.0, n - room * allowed.get(word, 1.0)) for word, n in Counter(tokens).items())
    return sum(over) / max(1, len(tokens))


def usual(texts: Sequence[Sequence[str]]) -> tuple[dict[str, float], float]:
    """Of SFT's texts: how often one says each word, where it says it, at the most (99%), and their length (95%)."""
    counts: dict[str, list[int]] = {}
    for tokens in texts:
        for word, n in Counter(tokens).items():
            counts.setdefault(word, []).append(n)
    longest = float(np.quantile([len(tokens) for tokens in texts], 0.95))
    most = {word: float(sorted(n)[math.ceil(0.99 * (len(n) - 1))]) for word, n in counts.items()}
    return most, max(1.0, longest)


def symbol_share(text: str) -> float:
    """The share of characters that stand in runs no prose needs, or that nobody sees.

    Runs: three or more of one punctuation mark or symbol, four or more of any, three or more spaces, tabs, underscores
    or empty lines, four or more of one letter. Unseen: control, format, private and unassigned characters.
    """
    if not text:
        return 0.0
    marked = sum(match.end() - match.start() for match in _RUN.finditer(text))
    if not (text.isascii() and text.isprintable()):
        rest = _RUN.sub("", text)  # what stands in a run is not counted again
        marked += sum(unicodedata.category(char)[0] == "C" and char not in "\n\t\r" for char in rest)
    return marked / len(text)


def slotted(own: Collection[str], tokens: Sequence[str]) -> list[str]:
    """A text with the words of its prompt (`own`), in a row of any length, as one open slot: its template is left."""
    marked = ["_" if token in own else token for token in tokens]
    return [token for i, token in enumerate(marked) if token != "_" or i == 0 or marked[i - 1] != "_"]


def holders(texts: Sequence[Sequence[str]], longest: int, *, fewest: int) -> dict[tuple[str, ...], NDArray[np.intp]]:
    """Phrases of up to `longest` words that at least `fewest` texts hold, each with the places of those texts."""
    flat = [word for tokens in texts for word in tokens]
    words, text = group_indices(flat), np.repeat(np.arange(len(texts)), [len(tokens) for tokens in texts])
    found: dict[tuple[str, ...], NDArray[np.intp]] = {}
    at, code = np.arange(len(flat)), words
    for length in range(1, longest + 1):
        # Of phrases one word shorter only those that are common themselves can be the beginning of one.
        pairs, first, own = np.unique(code * len(texts) + text[at], return_index=True, return_inverse=True)
        phrase, row = np.divmod(pairs, len(texts))
        starts = np.flatnonzero(np.diff(phrase, prepend=-1))
        sizes = np.diff(starts, append=len(phrase))
        enough = sizes >= max(1, fewest)
        for start, size in zip(starts[enough].tolist(), sizes[enough].tolist(), strict=True):
            place = int(at[first[start]])
            found[tuple(flat[place : place + length])] = row[start : start + size]
        number = np.repeat(np.arange(len(starts)), sizes)[own]
        goes_on = enough[number] & (at + length < len(flat))
        at, number = at[goes_on], number[goes_on]
        within = text[at + length] == text[at]
        at, number = at[within], number[within]
        code = number * (int(words.max(initial=0)) + 1) + words[at + length]
    return found


def likenesses(texts: Sequence[Sequence[str]], groups: NDArray[np.intp], size: int) -> NDArray[np.float64]:
    """(N,) the mean cosine of each text with the others of its group, 0 … size − 1, which have two texts or more."""
    sets = [{*pairwise(("", *tokens, ""))} for tokens in texts]
    found = np.zeros(len(texts))
    of = np.split(np.argsort(groups, kind="stable"), np.cumsum(np.bincount(groups, minlength=size))[:-1])
    for rows in map(np.ndarray.tolist, of):
        for place, a in enumerate(rows):
            for b in rows[:place]:
                cosine = len(sets[a] & sets[b]) / math.sqrt(len(sets[a]) * len(sets[b]))
                found[[a, b]] += cosine / (len(rows) - 1)
    return found


def cosines(texts: Sequence[Sequence[str]]) -> NDArray[np.float32]:
    """(N, N) cosine of the sets of word pairs of N texts; the ends of a text count as a word."""
    sets = [list({*pairwise(("", *tokens, ""))}) for tokens in texts]
    sizes = [len(each) for each in sets]
    columns = group_indices([pair for each in sets for pair in each])
    rows, weights = np.repeat(np.arange(len(sets)), sizes), np.repeat(1 / np.sqrt(sizes), sizes).astype(np.float32)
    shared = np.bincount(columns)[columns] > 1  # what one text alone holds makes no two alike
    rows, weights, columns = rows[shared], weights[shared], np.unique(columns[shared], return_inverse=True)[1]
    found = np.zeros((len(sets), len(sets)), dtype=np.float32)
    for start in range(0, last := int(columns.max(initial=-1)) + 1, _COLUMNS):
        block = (columns >= start) & (columns < start + _COLUMNS)
        held = np.zeros((len(sets), min(_COLUMNS, last - start)), dtype=np.float32)
        held[rows[block], columns[block] - start] = weights[block]
        found += held @ held.T
    np.fill_diagonal(found, 1.0)
    return found
