"""Completions of two policies for the same prompts, and the numbers of single texts that the probes compare."""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...modeling.words import is_word, words
from ..stats import group_indices
from ..text import ngrams

#: Repeats are counted within windows of this many words, so long prose repeats itself no more than short prose.
REPEAT_WINDOW = 50
#: Texts of fewer bytes are not compressed, because they compress too little to show repetition.
MIN_COMPRESSED_BYTES = 1000
#: Deflate saves at most this share of a few kilobytes of ordinary English prose. More means that a text repeats itself.
PROSE_SAVING = 0.6
#: Shortest run of the prompt's words that is a quotation.
QUOTED_WORDS = 4
#: A text may use any word this often, since a result or a name may recur once.
FREE_USES = 2
#: Number of other prompts after which a text's likelihood is compared with that after its own prompt.
OTHER_PROMPTS = 8

_RUN = re.compile(r"([^\w\s])\1{2,}|[^\w\s]{4,}|_{3,}|[^\S\n]{3,}|\n{3,}|([^\W\d_])\2{3,}")
# Parts that cannot hold a sentence: JSON keys, escaped line breaks and tabs, and the numbers of list items.
_FORMAT = r"""(?<=[{,])\s*"[A-Za-z_][\w-]{0,30}"\s*:|\\[nrt](?![a-z])|^[^\S\n]*\d{1,3}[.)](?=[^\S\n]+\S)"""
# Tags such as <think>, code fences with their language, LaTeX commands. A tag that repeats at once is a loop rather
# than markup, so it stays.
_MARKUP = re.compile(
    r"(?P<tag></?[A-Za-z][\w:-]{0,30}(?:\s[^<>]{0,100})?/?>)(?!\s*(?P=tag))|^\s*```[\w+-]*|"
    + _FORMAT
    + r"|\\[A-Za-z]+",
    re.MULTILINE,
)

# In a JSON object each \n, \r and \t is an escape, also before a letter; elsewhere it may begin a LaTeX command.
_JSON_START = re.compile(r'\s*\{\s*"')
_ESCAPE = re.compile(r"\\(.)")

_LINE_ENDS_AND_TABS = {ord(char): None for char in "\n\t\r"}  # for `str.translate`, which then removes them

# The markup that `unmarked_words` removes. Tags with attributes stay, since attributes could hold a sentence.
_PLAIN_MARKUP = re.compile(r"</?[A-Za-z][\w:-]{0,30}/?>|" + _FORMAT, re.MULTILINE)


@dataclass(frozen=True)
class Completions:
    """What one policy wrote, one entry per (prompt, sample).

    Attributes:
        prompts: (N,) prompts.
        texts: (N,) completions.
        rewards: (N,) training rewards; None if unknown.
        judge_scores: (N,) scores of a judge other than the training reward; None without a judge.
        logprobs: (N,) lists, log p of each token of the text under the SFT model, nats; None if unknown.
        dependence: (N,) log p_SFT(text | its prompt) − log of the mean of p_SFT over its own and some other prompts,
            nats: 0 or below if the text might as well answer another prompt; None if unknown.
        verified: (N,) whether a program has verified that the answer is right. No probe counts the text of such an
            answer against the policy. None without such a program.
        conversations: (N,) the prompts as given, messages or texts, for a model's chat template; None if all are texts.
        groups: (N,) the group of each prompt, equal for prompts that ask the same question; None if each is its own.
        meaning_ranks: (N,) the share of the other prompts that are less similar to the text than its own prompt, by
            embeddings; NaN for a text without an embedding. None without an embedder.

    Raises:
        ValueError: Lengths differ, there are no texts, a number in `rewards`, `judge_scores` or `dependence` is not
            finite, or a prompt has two groups.
    """

    prompts: Sequence[str]
    texts: Sequence[str]
    rewards: Sequence[float] | None = None
    judge_scores: Sequence[float] | None = None
    logprobs: Sequence[Sequence[float]] | None = None
    dependence: Sequence[float] | None = None
    verified: Sequence[bool] | None = None
    conversations: Sequence[str | Sequence[Mapping[str, Any]]] | None = None
    groups: Sequence[Hashable] | None = None
    meaning_ranks: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("There are no completions to probe.")
        for name in (
            "prompts", "rewards", "judge_scores", "logprobs", "dependence", "verified", "conversations", "groups",
            "meaning_ranks",
        ):  # fmt: skip
            column = getattr(self, name)
            if column is not None and len(column) != len(self.texts):
                raise ValueError(f"There are {len(self.texts)} texts and {len(column)} {name}: give one per text.")
        for name in ("rewards", "judge_scores", "dependence"):
            column = getattr(self, name)
            if column is not None and not np.isfinite(np.asarray(column, dtype=float)).all():
                raise ValueError(f"Not all {name} are finite.")
        if self.groups is not None and len(set(zip(self.prompts, self.groups, strict=True))) > len(set(self.prompts)):
            raise ValueError("A prompt has two groups: give all completions of a prompt the same group.")

    @cached_property
    def group_by_prompt(self) -> dict[str, Hashable]:
        """The group of each prompt; the prompt itself if each is its own group."""
        return dict(zip(self.prompts, self.prompts if self.groups is None else self.groups, strict=True))

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Pair:
    """A policy and SFT on the G prompts that both answered. Each tuple holds the policy's value and SFT's.

    Attributes:
        policy: The policy's completions.
        sft: SFT's completions.
        prompts: (G,) the prompts; the two sides differ only if they were paired by position.
        rows: (N,) indices of the completions that are used.
        prompt_ids: (N,) the index of each row's prompt.
        questions: (G,) an integer for each prompt, equal for prompts that ask the same question.
        text_words: (N,) the words of each row.
        bodies: (N,) the texts of the rows without markup.
        body_words: (N,) the words of the bodies.
        counted: (N,) whether a row counts; verified answers do not.
    """

    policy: Completions
    sft: Completions
    prompts: tuple[Sequence[str], Sequence[str]]
    rows: tuple[NDArray[np.intp], NDArray[np.intp]]
    prompt_ids: tuple[NDArray[np.intp], NDArray[np.intp]]
    questions: NDArray[np.intp]
    text_words: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]
    bodies: tuple[Sequence[str], Sequence[str]]
    body_words: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]
    counted: tuple[NDArray[np.bool_], NDArray[np.bool_]]

    @property
    def prompt_count(self) -> int:
        """The number of prompts, G."""
        return len(self.prompts[0])

    @property
    def question_count(self) -> int:
        """The number of prompts that ask different things."""
        return int(self.questions.max()) + 1

    @classmethod
    def of(cls, policy: Completions, sft: Completions, *, by_position: bool = False) -> Pair:
        """Pairs the completions of two policies.

        Args:
            policy: The policy's completions.
            sft: SFT's completions.
            by_position: Whether to pair different prompts in order, for two random samples of one set of prompts. All
                prompts of a group are then replaced by its first prompt, since no group can be in two pairs.

        Raises:
            ValueError: The two share no prompt, or a prompt has different groups on the two sides.
        """
        if by_position:
            policy, sft = _use_first_prompt_of_group(policy), _use_first_prompt_of_group(sft)
        sides = (policy, sft)
        prompt_lists = [list(dict.fromkeys(side.prompts)) for side in sides]
        sft_prompts = set(prompt_lists[1])
        if by_position:
            count = min(map(len, prompt_lists))
            prompts = [side_prompts[:count] for side_prompts in prompt_lists]
        else:
            prompts = [[prompt for prompt in prompt_lists[0] if prompt in sft_prompts]] * 2
        if not prompts[0]:
            raise ValueError("The two sets of completions share no prompt: sample both for the same prompts.")
        indices = [{prompt: index for index, prompt in enumerate(side_prompts)} for side_prompts in prompts]
        rows = [
            np.array([i for i, prompt in enumerate(side.prompts) if prompt in index_by_prompt], dtype=np.intp)
            for side, index_by_prompt in zip(sides, indices, strict=True)
        ]
        prompt_ids = [
            np.array([index_by_prompt[side.prompts[i]] for i in side_rows], dtype=np.intp)
            for side, index_by_prompt, side_rows in zip(sides, indices, rows, strict=True)
        ]
        group_by_prompt, sft_group_by_prompt = (side.group_by_prompt for side in sides)
        if not by_position and any(group_by_prompt[prompt] != sft_group_by_prompt[prompt] for prompt in prompts[0]):
            raise ValueError("A prompt has different groups on the two sides: give it the same group on both.")
        questions = group_indices([group_by_prompt[prompt] for prompt in prompts[0]])
        text_words, bodies, body_words, counted = [], [], [], []
        for side, side_rows in zip(sides, rows, strict=True):
            text_words.append([plain_words(side.texts[i]) for i in side_rows])
            bodies.append([_MARKUP.sub(" ", _remove_escapes(side.texts[i])) for i in side_rows])
            # Few texts have markup, and splitting into words takes time.
            body_words.append(
                [
                    row_words if body == side.texts[i] else plain_words(body)
                    for i, row_words, body in zip(side_rows, text_words[-1], bodies[-1], strict=True)
                ]
            )
            verified = side.verified if side.verified is not None else [False] * len(side)
            counted.append(~np.asarray(verified, dtype=bool)[side_rows])
        return cls(
            policy,
            sft,
            (prompts[0], prompts[1]),
            (rows[0], rows[1]),
            (prompt_ids[0], prompt_ids[1]),
            questions,
            (text_words[0], text_words[1]),
            (bodies[0], bodies[1]),
            (body_words[0], body_words[1]),
            (counted[0], counted[1]),
        )

    def unmarked_words(self, side: int) -> list[Sequence[str]]:
        """Returns the words of each row without tags such as `<think>`, JSON keys, and the numbers of lists.

        Args:
            side: 0 for the policy, 1 for SFT.
        """
        texts = (self.policy, self.sft)[side].texts
        return [
            plain_words(_PLAIN_MARKUP.sub(" ", _remove_escapes(texts[row])))
            if _PLAIN_MARKUP.search(texts[row])
            else row_words
            for row, row_words in zip(self.rows[side], self.text_words[side], strict=True)
        ]

    def unquoted_words(self, side: int) -> list[list[str]]:
        """Returns the words of each body without its quotations from its prompt.

        Args:
            side: 0 for the policy, 1 for SFT.
        """
        quotable = [set(ngrams(plain_words(prompt), QUOTED_WORDS)) for prompt in self.prompts[side]]
        return [
            remove_quotations(text, quotable[prompt_id])
            for text, prompt_id in zip(self.body_words[side], self.prompt_ids[side].tolist(), strict=True)
        ]


def _use_first_prompt_of_group(side: Completions) -> Completions:
    """Replaces each prompt by the first prompt of its group."""
    if side.groups is None:
        return side
    first_prompts: dict[Hashable, str] = {}
    prompts_and_groups = zip(side.prompts, side.groups, strict=True)
    return replace(side, prompts=[first_prompts.setdefault(group, prompt) for prompt, group in prompts_and_groups])


def _remove_escapes(text: str) -> str:
    """Replaces the escaped line breaks and tabs of a JSON object by spaces; any other text stays as it is."""
    if not _JSON_START.match(text):
        return text
    return _ESCAPE.sub(lambda escape: " " if escape[1] in "nrt" else escape[0], text)


def plain_words(text: str) -> list[str]:
    """Splits a text into words, without punctuation."""
    return [word for word in words(text) if is_word(word)]


def remove_quotations(text_words: Sequence[str], quotable: Collection[tuple[str, ...]]) -> list[str]:
    """Leaves out the passages that a text quotes from its prompt. A repeated quotation is left out only once.

    Args:
        text_words: The text's words.
        quotable: All runs of `QUOTED_WORDS` words in the prompt.
    """
    is_quoted = np.zeros(len(text_words), dtype=bool)
    used_runs: set[tuple[str, ...]] = set()
    for start in range(len(text_words) - QUOTED_WORDS + 1):
        run = tuple(text_words[start : start + QUOTED_WORDS])
        if run in quotable and run not in used_runs:
            used_runs.add(run)
            is_quoted[start : start + QUOTED_WORDS] = True
    return [word for word, quoted in zip(text_words, is_quoted, strict=True) if not quoted]


def repeated_share(text_words: Sequence[str], text: str) -> float:
    """Computes the share of a text that repeats itself: word pairs that occurred earlier in the same window.

    A text of at least `MIN_COMPRESSED_BYTES` may repeat itself over a longer range. Its share is at least the saving by
    compression above `PROSE_SAVING`, scaled to 0 … 1.

    Args:
        text_words: The text's words.
        text: The text itself, to be compressed.

    Returns:
        A share from 0 to 1.
    """
    repeat_count = total = 0
    for start in range(0, len(text_words), REPEAT_WINDOW):
        # Pairs are compared within windows, since a long text repeats common pairs by chance.
        pairs = list(pairwise(text_words[start : start + REPEAT_WINDOW]))
        total += len(pairs)
        repeat_count += len(pairs) - len(set(pairs))
    share = repeat_count / total if total else 0.0
    # A character takes at most 4 bytes, so a short enough text is below `MIN_COMPRESSED_BYTES` without being encoded.
    encoded = text.encode("utf-8", "surrogatepass") if len(text) >= MIN_COMPRESSED_BYTES // 4 else b""
    if len(encoded) < MIN_COMPRESSED_BYTES:
        return share
    return max(share, (1 - len(zlib.compress(encoded, 6)) / len(encoded) - PROSE_SAVING) / (1 - PROSE_SAVING))


def excess_share(text_words: Sequence[str], max_uses: dict[str, float], long_length: float) -> float:
    """Computes the share of a text's words that exceed the number of times that SFT uses a word in one text.

    Args:
        text_words: The text's words.
        max_uses: How often SFT uses each word in one text; every word is allowed `FREE_USES` times.
        long_length: Number of words in SFT's long texts; a longer text is allowed proportionally more uses.

    Returns:
        A share from 0 to 1.
    """
    # A text twice as long may use each word twice as often.
    length_factor = max(1.0, len(text_words) / long_length)
    excess_counts = (
        max(0.0, n - length_factor * max(FREE_USES, max_uses.get(word, 0.0))) for word, n in Counter(text_words).items()
    )
    return sum(excess_counts) / max(1, len(text_words))


def word_usage(texts: Sequence[Sequence[str]]) -> tuple[dict[str, float], float]:
    """Measures how often SFT uses each word, and how long its long texts are.

    Args:
        texts: The words of each of SFT's texts.

    Returns:
        (uses, length): the uses of each word per text, among texts that use it (99% quantile); the words per text (95%
            quantile).
    """
    counts: dict[str, list[int]] = {}
    for text_words in texts:
        for word, n in Counter(text_words).items():
            counts.setdefault(word, []).append(n)
    # Quantiles rather than maxima, so that a single odd SFT text does not set the standard.
    long_length = float(np.quantile([len(text_words) for text_words in texts], 0.95))
    max_uses = {word: float(sorted(uses)[math.ceil(0.99 * (len(uses) - 1))]) for word, uses in counts.items()}
    return max_uses, max(1.0, long_length)


def symbol_share(text: str) -> float:
    """Computes the share of characters that are invisible or belong to runs that prose does not need.

    Runs: three or more of one punctuation mark or symbol, four or more of any, three or more spaces, tabs, underscores
    or line ends, four or more of one letter. Invisible: control, format, private and unassigned characters.

    Args:
        text: A completion.

    Returns:
        A share from 0 to 1.
    """
    if not text:
        return 0.0
    count = sum(match.end() - match.start() for match in _RUN.finditer(text))
    # Printable ASCII has no invisible characters; `translate` is much faster than a loop over the characters.
    if not (text.isascii() and text.translate(_LINE_ENDS_AND_TABS).isprintable()):
        remaining_text = _RUN.sub("", text)  # do not count characters of a run twice
        count += sum(unicodedata.category(char)[0] == "C" for char in remaining_text.translate(_LINE_ENDS_AND_TABS))
    return count / len(text)


def to_template(prompt_words: Collection[str], text_words: Sequence[str]) -> list[str]:
    """Replaces each run of the prompt's words in a text with one slot. The result is the text's template.

    Args:
        prompt_words: The prompt's words.
        text_words: The text's words.

    Returns:
        The other words, with "_" for each slot.
    """
    masked = ["_" if word in prompt_words else word for word in text_words]
    return [word for i, word in enumerate(masked) if word != "_" or i == 0 or masked[i - 1] != "_"]


def find_phrases(
    texts: Sequence[Sequence[str]], max_words: int, *, min_texts: int
) -> dict[tuple[str, ...], NDArray[np.intp]]:
    """Finds the phrases that many texts contain.

    Args:
        texts: The words of each text.
        max_words: Maximum number of words per phrase.
        min_texts: Minimum number of texts that contain a phrase.

    Returns:
        The phrases, each with the indices of its texts.
    """
    flat = [word for text_words in texts for word in text_words]
    word_ids, text_ids = group_indices(flat), np.repeat(np.arange(len(texts)), list(map(len, texts)))
    result: dict[tuple[str, ...], NDArray[np.intp]] = {}
    # Where phrases of the current length start in `flat`, and an integer for the phrase at each of these positions.
    positions, codes = np.arange(len(flat)), word_ids
    for length in range(1, max_words + 1):
        # Each distinct (phrase, text) as one integer, sorted, so that the texts of a phrase are adjacent.
        pairs, first_indices, pair_ids = np.unique(
            codes * len(texts) + text_ids[positions], return_index=True, return_inverse=True
        )
        phrase_codes, texts_of_phrases = np.divmod(pairs, len(texts))
        starts = np.flatnonzero(np.diff(phrase_codes, prepend=-1))
        sizes = np.diff(starts, append=len(phrase_codes))
        # A longer phrase is at most as common as its beginning, so rare beginnings are dropped for good.
        is_common = sizes >= max(1, min_texts)
        for start, size in zip(starts[is_common].tolist(), sizes[is_common].tolist(), strict=True):
            position = int(positions[first_indices[start]])
            result[tuple(flat[position : position + length])] = texts_of_phrases[start : start + size]
        phrase_ids = np.repeat(np.arange(len(starts)), sizes)[pair_ids]
        can_continue = is_common[phrase_ids] & (positions + length < len(flat))
        positions, phrase_ids = positions[can_continue], phrase_ids[can_continue]
        # A phrase must not continue into the next text.
        same_text = text_ids[positions + length] == text_ids[positions]
        positions, phrase_ids = positions[same_text], phrase_ids[same_text]
        # A phrase and its next word become one integer, so the next round sorts numbers rather than tuples.
        codes = phrase_ids * (int(word_ids.max(initial=0)) + 1) + word_ids[positions + length]
    return result
