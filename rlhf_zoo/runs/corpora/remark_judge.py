"""A judge of product remarks that sees no labels: is a remark praise, and would a person have written it?

It is trained on buyers' remarks, pros and cons together, without their labels. The judge ranks a remark among the
buyers' remarks by two measures, each rank from 0 to 1, and its score is the mean of the two ranks:

- *orientation*: the log-odds of a word occurring with `PRAISE` rather than with `BLAME`, averaged over the remark's
  words (Turney and Littman 2003, arXiv:cs/0309034, §3.1);
- *weakest link*: log p of the least likely token, end included, by trigrams with absolute discounting (Ney, Essen and
  Kneser 1994). A buyer's own remark is scored by a model that was trained on the half of the remarks without it.

It detects complaints, broken words, and unnatural word sequences. It cannot tell whether a remark is true, specific, or
related to its opening beyond two words. A short stock phrase (", easy to use.") scores higher than most remarks that
people wrote. docs/evaluation.md compares this judge with others.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

PRAISE = frozenset({"good", "nice", "excellent", "great", "best", "superior", "perfect", "love"})
BLAME = frozenset({"bad", "poor", "terrible", "awful", "worst", "inferior", "horrible", "hate"})
ORDER = 3  # tokens in an n-gram
DISCOUNT = 0.75  # subtracted from each n-gram's count
_TOKEN = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_START, _END = "<s>", "</s>"

Tokens = Sequence[str]


def learn(texts: Sequence[str]) -> RemarkJudge:
    """Trains the judge on remarks. Training is deterministic.

    Args:
        texts: The remarks.

    Raises:
        ValueError: There are fewer than two remarks.
    """
    return RemarkJudge(texts)


class RemarkJudge:
    """Scores a remark by the mean of its two ranks among buyers' remarks, as the module describes.

    Args:
        texts: The remarks to learn from.

    Raises:
        ValueError: There are fewer than two remarks.
    """

    name = "remarks"

    def __init__(self, texts: Sequence[str]) -> None:
        if len(texts) < 2:
            raise ValueError(f"{len(texts)} remarks are too few to train on: at least two are needed.")
        remarks = [tokens_of(text) for text in texts]
        orientation = Orientation(remarks)
        # Each model scores the remarks that it was not trained on.
        halves = [TrigramModel(remarks[1::2]), TrigramModel(remarks[0::2])]
        weakest_links = [halves[index % 2].weakest_link(remark) for index, remark in enumerate(remarks)]
        self._measures: tuple[Callable[[Tokens], float], ...] = (orientation, TrigramModel(remarks).weakest_link)
        self._human_scores = np.sort([orientation(remark) for remark in remarks]), np.sort(weakest_links)

    @property
    def description(self) -> str:
        """A description of the judge for cards."""
        return (
            f"The mean of two ranks among {len(self._human_scores[0])} remarks that no other stage uses, without their "
            "labels: how often the words occur with eight words of praise rather than eight of blame, and how likely "
            "the least likely step is, by trigrams. It detects complaints, broken words and unnatural word sequences, "
            "but not whether a remark is true, specific or related to its opening, and it favors short stock phrases."
        )

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Scores completions.

        Args:
            prompts: The prompts.
            completions: The completion of each prompt.

        Returns:
            The mean rank of each prompt with its completion, 0 to 1.
        """
        texts = [tokens_of(prompt + completion) for prompt, completion in zip(prompts, completions, strict=True)]
        ranks = [
            _ranks([measure(text) for text in texts], human_scores)
            for measure, human_scores in zip(self._measures, self._human_scores, strict=True)
        ]
        return [float(rank) for rank in np.mean(ranks, axis=0)]


class Orientation:
    """Log-odds of a word occurring with `PRAISE` rather than with `BLAME`, averaged over the words of a remark."""

    def __init__(self, remarks: Sequence[Tokens]) -> None:
        word_counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        remark_counts = [0, 0]
        for remark in remarks:
            words = set(remark)
            has_praise, has_blame = not words.isdisjoint(PRAISE), not words.isdisjoint(BLAME)
            remark_counts[0] += has_praise
            remark_counts[1] += has_blame
            if has_praise != has_blame:  # a remark with both says nothing about its other words
                word_counts[has_blame].update(words)
        praise_count, blame_count = (max(1, count) for count in remark_counts)
        # Two pseudo-counts per word, split like the counts of all remarks, keep rare words near 0.
        prior = 2 * praise_count / (praise_count + blame_count), 2 * blame_count / (praise_count + blame_count)
        self._odds = {
            word: math.log(
                (word_counts[0][word] + prior[0]) / (word_counts[1][word] + prior[1]) * blame_count / praise_count
            )
            for word in {*word_counts[0], *word_counts[1]}
        }

    def __call__(self, remark: Tokens) -> float:
        """Returns the mean log-odds of a remark's words; 0 for a remark without words.

        Args:
            remark: The tokens of a remark.
        """
        odds = [self._odds.get(word, 0.0) for word in remark if word[0].isalnum()]
        return sum(odds) / len(odds) if odds else 0.0


class TrigramModel:
    """Trigrams, interpolated with shorter ones: p(w|h) = max(c(hw) − D, 0)/c(h) + D·T(h)/c(h)·p(w|h′).

    T(h) is the number of different words that follow h, and h′ is h without its first word.
    """

    def __init__(self, remarks: Iterable[Tokens]) -> None:
        counts: list[dict[tuple[str, ...], Counter[str]]] = [defaultdict(Counter) for _ in range(ORDER)]
        for remark in remarks:
            words = [*[_START] * (ORDER - 1), *remark, _END]
            for index in range(ORDER - 1, len(words)):
                for length in range(ORDER):
                    counts[length][tuple(words[index - length : index])][words[index]] += 1
        self._followers = [
            {history: (sum(followers.values()), followers) for history, followers in histories.items()}
            for histories in counts
        ]
        self._unknown_probability = 1 / (len(counts[0][()]) + 1)

    def weakest_link(self, remark: Tokens) -> float:
        """Returns log p of a remark's least likely token, in nats.

        Args:
            remark: The tokens of a remark.
        """
        return min(self.logprobs(remark))

    def logprobs(self, remark: Tokens) -> list[float]:
        """Returns log p of each token and of the end, in nats.

        Args:
            remark: The tokens of a remark.
        """
        words = [*[_START] * (ORDER - 1), *remark, _END]
        return [
            math.log(self._probability(words[index], words[index - ORDER + 1 : index]))
            for index in range(ORDER - 1, len(words))
        ]

    def _probability(self, word: str, history: Tokens) -> float:
        probability = self._unknown_probability
        for length, histories in enumerate(self._followers):
            total, counts = histories.get(tuple(history[len(history) - length :]), (0, Counter[str]()))
            if total:
                probability = max(counts[word] - DISCOUNT, 0) / total + DISCOUNT * len(counts) / total * probability
        return probability


def tokens_of(text: str) -> list[str]:
    """Splits a text into lower-cased words and marks.

    Args:
        text: A remark.
    """
    return _TOKEN.findall(text.lower())


def _ranks(values: ArrayLike, human_scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the share of human scores below each value; equal scores count as half below."""
    below, above = (np.searchsorted(human_scores, values, side) for side in ("left", "right"))
    return (below + above) / 2 / len(human_scores)
