"""How similar texts are by their words: to their own prompt, to other prompts, and to each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..stats import group_indices

#: Maximum number of prompts with which a text is compared.
MAX_OTHER_PROMPTS = 1200

_COLUMNS_AT_ONCE = 4096  # word pairs in one block of the matrix product


def prompt_ranks(
    texts: Sequence[Sequence[str]],
    prompt_ids: NDArray[np.intp],
    prompts: Sequence[Sequence[str]],
    questions: NDArray[np.intp],
) -> NDArray[np.float64]:
    """Computes how often a text shares more words with its own prompt than with another one; a tie counts one half.

    Rare words count more: the weight of a word is log(G / number of prompts with the word), relative to the norm of the
    prompt's weights. A text about its own prompt has a rank near 1, and a text about another prompt ½ on average,
    whatever its length.

    Args:
        texts: (N,) the words of each text.
        prompt_ids: (N,) the index of each text's prompt.
        prompts: (G,) the words of each prompt. The prompts must ask at least two questions.
        questions: (G,) the question of each prompt; prompts that ask the same question are not compared.

    Returns:
        (N,) ranks from 0 to 1; NaN for a text that shares no word with any prompt, or only words of weight 0.
    """
    prompt_words = [set(prompt) for prompt in prompts]
    counts = Counter(word for prompt_word_set in prompt_words for word in prompt_word_set)
    idf = {word: math.log(len(prompts) / count) for word, count in counts.items()}
    norms = np.array([math.sqrt(sum(idf[word] ** 2 for word in word_set)) or 1.0 for word_set in prompt_words])
    compared_ids = np.unique(np.linspace(0, len(prompts) - 1, min(len(prompts), MAX_OTHER_PROMPTS)).astype(int))
    columns_by_word: dict[str, list[int]] = {}
    for column, prompt_id in enumerate(compared_ids.tolist()):
        for word in prompt_words[prompt_id]:
            columns_by_word.setdefault(word, []).append(column)
    columns_and_weights = {word: (columns, idf[word] / norms[compared_ids[columns]])
                           for word, columns in columns_by_word.items() if idf[word]}  # fmt: skip
    ranks = np.full(len(texts), np.nan)
    for row, (text, prompt_id) in enumerate(zip(texts, prompt_ids.tolist(), strict=True)):
        text_words, scores = set(text), np.zeros(len(compared_ids))
        for word in text_words & columns_and_weights.keys():
            columns, weights = columns_and_weights[word]
            scores[columns] += weights
        own_score = sum(idf[word] for word in text_words & prompt_words[prompt_id]) / norms[prompt_id]
        other_scores = scores[questions[compared_ids] != questions[prompt_id]]
        if len(other_scores) and (own_score or scores.any()):
            ranks[row] = np.mean((np.sign(np.round(own_score - other_scores, 9)) + 1) / 2)
    return ranks


def mean_cosines(
    texts: Sequence[Sequence[str]], prompt_ids: NDArray[np.intp], prompt_count: int
) -> NDArray[np.float64]:
    """Computes each text's mean cosine with the other texts of its prompt, between their sets of word pairs.

    Args:
        texts: (N,) the words of each text.
        prompt_ids: (N,) the index of each text's prompt; each prompt needs at least two texts.
        prompt_count: Number of prompts.

    Returns:
        (N,) mean cosines.
    """
    # Empty words mark the ends, so that a text of one word has pairs too.
    sets = [{*pairwise(("", *text_words, ""))} for text_words in texts]
    means = np.zeros(len(texts))
    texts_per_prompt = np.bincount(prompt_ids, minlength=prompt_count)
    rows_by_prompt = np.split(np.argsort(prompt_ids, kind="stable"), np.cumsum(texts_per_prompt)[:-1])
    for rows in map(np.ndarray.tolist, rows_by_prompt):
        for index, a in enumerate(rows):
            for b in rows[:index]:
                cosine = len(sets[a] & sets[b]) / math.sqrt(len(sets[a]) * len(sets[b]))
                means[[a, b]] += cosine / (len(rows) - 1)
    return means


def cosines(texts: Sequence[Sequence[str]]) -> NDArray[np.float32]:
    """Computes the cosines between the sets of word pairs of all texts. Each end of a text counts as a word.

    Args:
        texts: (N,) the words of each text.

    Returns:
        (N, N) cosines.
    """
    sets = [list({*pairwise(("", *text_words, ""))}) for text_words in texts]
    sizes = [len(pairs) for pairs in sets]
    columns = group_indices([pair for pairs in sets for pair in pairs])
    rows, weights = np.repeat(np.arange(len(sets)), sizes), np.repeat(1 / np.sqrt(sizes), sizes).astype(np.float32)
    is_shared = np.bincount(columns)[columns] > 1  # a word pair in only one text cannot make two texts alike
    rows, weights = rows[is_shared], weights[is_shared]
    columns = np.unique(columns[is_shared], return_inverse=True)[1]
    column_count = int(columns.max(initial=-1)) + 1
    matrix = np.zeros((len(sets), len(sets)), dtype=np.float32)
    for start in range(0, column_count, _COLUMNS_AT_ONCE):
        # Blocks of columns bound the memory, however many word pairs there are.
        block = (columns >= start) & (columns < start + _COLUMNS_AT_ONCE)
        block_weights = np.zeros((len(sets), min(_COLUMNS_AT_ONCE, column_count - start)), dtype=np.float32)
        block_weights[rows[block], columns[block] - start] = weights[block]
        matrix += block_weights @ block_weights.T
    np.fill_diagonal(matrix, 1.0)
    return matrix
