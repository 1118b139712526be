"""Diversity and repetition of completions, in words.

`repetition`, within a completion, counts punctuation marks as words too, as `words.words` does. `distinct_n`, across
completions, splits at spaces. In a script without spaces, `distinct_n` counts a whole clause as one word: compare such
texts only with each other.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from ..modeling.words import words
from .stats import Estimate, group_indices, jackknife


def normalize_text(text: str) -> str:
    """Normalizes a text for comparison: lower case, single spaces.

    Args:
        text: Any text.
    """
    return " ".join(text.lower().split())


def ngrams(text_words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Lists all n-grams: runs of n consecutive words, in order.

    Args:
        text_words: The words of a text.
        n: Words per n-gram.

    Returns:
        The n-grams; an empty list if there are fewer than n words.
    """
    return list(zip(*(text_words[start:] for start in range(n)), strict=False))


def _plain_ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """Returns the n-grams of the lower-cased text split at spaces, the convention of published distinct-n figures."""
    return ngrams(text.lower().split(), n)


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Computes the number of distinct n-grams divided by the number of n-grams, over all texts together.

    Words are split at spaces, as in published figures, so "use." and "use," differ. The share falls as texts are added,
    because common n-grams recur. Compare only equal numbers of texts of similar length, such as the completions of two
    policies on the same prompts.

    Args:
        texts: The completions.
        n: Words per n-gram.

    Returns:
        A share from 0 to 1; 0 if there are no n-grams.

    Source: Li et al. 2016, section 5.2.
    """
    grams = [gram for text in texts for gram in _plain_ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def distinct_n_estimate(texts: Sequence[str], groups: Sequence[Hashable], n: int = 2) -> Estimate:
    """Computes `distinct_n` with a jackknife interval over prompts.

    A bootstrap would be biased: a prompt that is drawn twice adds no new n-gram, so every resample lies below the
    value. The interval holds for this number of texts only.

    Args:
        texts: (N,) completions.
        groups: (N,) the prompt of each text.
        n: Words per n-gram.

    Returns:
        The share; `n` is the number of texts.
    """
    value, leave_one_out = _leave_one_out(texts, groups, n)
    estimate = jackknife(value, leave_one_out, n=len(texts))
    # The jackknife's interval is symmetric and may leave [0, 1].
    low, high = estimate.ci95
    return Estimate(value, (max(low, 0.0), min(high, 1.0)), estimate.n)


def distinct_n_difference(
    ours: Sequence[str], theirs: Sequence[str], groups: Sequence[Hashable], n: int = 2
) -> Estimate:
    """Computes distinct_n(ours) − distinct_n(theirs), with a jackknife that leaves the same prompt out of both.

    Args:
        ours: (N,) completions of the first side.
        theirs: (N,) completions of the second side, to the same prompts.
        groups: (N,) the prompt of each pair of completions.
        n: Words per n-gram.
    """
    value, leave_one_out = _leave_one_out(ours, groups, n)
    other_value, other_leave_one_out = _leave_one_out(theirs, groups, n)
    return jackknife(value - other_value, np.subtract(leave_one_out, other_leave_one_out), n=len(groups))


def _leave_one_out(texts: Sequence[str], groups: Sequence[Hashable], n: int) -> tuple[float, list[float]]:
    """Returns distinct-n of all texts, and (G,) distinct-n without each group in turn, by first appearance."""
    counters: list[Counter[tuple[str, ...]]] = [Counter() for _ in set(groups)]
    for text, group in zip(texts, group_indices(groups), strict=True):
        counters[group].update(_plain_ngrams(text, n))
    # An n-gram that only one group has disappears when that group is left out, so no recount is needed.
    groups_with_gram = Counter(gram for counter in counters for gram in counter)
    total, distinct_count = sum(counter.total() for counter in counters), len(groups_with_gram)
    values = []
    for counter in counters:
        remaining = total - counter.total()
        unique_count = sum(groups_with_gram[gram] == 1 for gram in counter)
        values.append((distinct_count - unique_count) / remaining if remaining else 0.0)
    return distinct_count / total if total else 0.0, values


def repetition(text: str, n: int = 2) -> float:
    """Computes the share of a text's n-grams that repeat an earlier n-gram of the text: 1 − distinct / all.

    Args:
        text: A completion.
        n: Words per n-gram.

    Returns:
        A share from 0 to 1; 0 if there are no n-grams.

    Source: seq-rep-n of Welleck et al. 2019 (arXiv:1908.04319, section 6), in words and punctuation marks, and with
    n = 2 for short completions.
    """
    grams = ngrams(words(text), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
