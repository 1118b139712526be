"""Diversity and repetition of completions, in words.

`repetition`, within a completion, counts punctuation marks as words too, as `words.words` does. `distinct_n`, across
completions, splits at spaces. In a script without spaces, `distinct_n` counts a whole clause as one word: compare such
texts only with each other.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from ..modeling.words import words
from .stats import Estimate, group_indices, jackknife


def normalize_text(text: str) -> str:
    """Normalizes a text for comparison: lower case, single spaces.

    Args:
        text: Any text.
    """
    return " ".join(text.lower().split())


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Lists all n-grams: runs of n consecutive words, in order.

    Args:
        tokens: The words.
        n: Words per n-gram.

    Returns:
        The n-grams; an empty list if there are fewer than n words.
    """
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


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
    value, left_out = _distinct_left_out(texts, groups, n)
    estimate = jackknife(value, left_out, n=len(texts))
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
        groups: (N,) the prompt of each row.
        n: Words per n-gram.
    """
    (value, values_left_out), (other_value, others_left_out) = (
        _distinct_left_out(texts, groups, n) for texts in (ours, theirs)
    )
    left_out = [a - b for a, b in zip(values_left_out, others_left_out, strict=True)]
    return jackknife(value - other_value, left_out, n=len(groups))


def _distinct_left_out(texts: Sequence[str], groups: Sequence[Hashable], n: int) -> tuple[float, list[float]]:
    """Returns distinct-n of all texts, and (G,) distinct-n without each group in turn, by first appearance."""
    index = group_indices(groups)
    counts: list[Counter[tuple[str, ...]]] = [Counter() for _ in set(groups)]
    for text, group in zip(texts, index, strict=True):
        counts[group].update(_plain_ngrams(text, n))
    # An n-gram that only one group has disappears when that group is left out, so no recount is needed.
    groups_with = Counter(gram for count in counts for gram in count)
    total, distinct = sum(count.total() for count in counts), len(groups_with)
    left_out = []
    for count in counts:
        remaining = total - count.total()
        only_here = sum(groups_with[gram] == 1 for gram in count)
        left_out.append((distinct - only_here) / remaining if remaining else 0.0)
    return distinct / total if total else 0.0, left_out


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
