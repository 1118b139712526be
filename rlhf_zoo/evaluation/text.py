"""Diversity and repetition of completions, in words.

Within a completion (`repetition`) words are those of `words.words`. Across completions (`distinct_n`) they are what
stands between spaces, so a script written without spaces counts as one word per run: compare such texts with each other
only.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from ..modeling.words import words
from .stats import Estimate, group_indices, jackknife


def plain(text: str) -> str:
    """A text without what hardly tells it from another: case, and how much space stands where."""
    return " ".join(text.lower().split())


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n words, in order; none where there are fewer than n."""
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def _plain_ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """N-grams of what stands between spaces, lower-cased: the convention in which distinct-n is reported elsewhere."""
    return ngrams(text.lower().split(), n)


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Distinct n-grams over all n-grams, across the texts together; 0 where there are none. Li et al. 2016, §5.2.

    Its words are what stands between spaces, as in the field's reports, so "use." and "use," are two.

    It falls as texts are added, since common n-grams come again: compare only equal numbers of texts of like length,
    such as two policies on the same prompts.
    """
    every = [gram for text in texts for gram in _plain_ngrams(text, n)]
    return len(set(every)) / len(every) if every else 0.0


def distinct_n_estimate(texts: Sequence[str], groups: Sequence[Hashable], n: int = 2) -> Estimate:
    """`distinct_n` with a jackknife interval over groups (the prompt of each text); its n counts texts.

    A bootstrap would be wrong here: a prompt drawn twice brings no new n-gram, so every resample lies below the value.
    The interval is for this number of texts.
    """
    value, left_out = _distinct_left_out(texts, groups, n)
    estimate = jackknife(value, left_out, n=len(texts))
    low, high = estimate.ci95
    return Estimate(value, (max(low, 0.0), min(high, 1.0)), estimate.n)


def distinct_n_difference(
    ours: Sequence[str], theirs: Sequence[str], groups: Sequence[Hashable], n: int = 2
) -> Estimate:
    """`distinct_n` of ours less that of theirs, texts of the same prompts, each prompt left out of both at a time."""
    (first, without), (second, others) = (_distinct_left_out(texts, groups, n) for texts in (ours, theirs))
    left_out = [a - b for a, b in zip(without, others, strict=True)]
    return jackknife(first - second, left_out, n=len(groups))


def _distinct_left_out(texts: Sequence[str], groups: Sequence[Hashable], n: int) -> tuple[float, list[float]]:
    """Distinct-n of all texts, and of those that are left without each group, by first appearance."""
    index = group_indices(groups)
    counts: list[Counter[tuple[str, ...]]] = [Counter() for _ in set(groups)]
    for text, group in zip(texts, index, strict=True):
        counts[group].update(_plain_ngrams(text, n))
    holders = Counter(gram for count in counts for gram in count)
    total, distinct = sum(count.total() for count in counts), len(holders)
    left_out = []
    for count in counts:
        rest = total - count.total()
        own = sum(holders[gram] == 1 for gram in count)
        left_out.append((distinct - own) / rest if rest else 0.0)
    return distinct / total if total else 0.0, left_out


def repetition(text: str, n: int = 2) -> float:
    """The share of a text's n-grams that stood in it before: 1 − distinct / all; 0 where there are none.

    seq-rep-n of Welleck et al. 2019 (arXiv:1908.04319, §6), in words, and with n = 2 for short completions.
    """
    grams = ngrams(words(text), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
