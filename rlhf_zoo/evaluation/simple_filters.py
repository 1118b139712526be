"""Simple filters of the SFT policy's samples: how much of PPO's gain needs no PPO.

A filter draws several completions of the SFT policy and keeps one. It trains nothing, and asks no judge: it keeps the
completion with the highest reward, the longest or shortest one, or one without certain words. If a filter reaches PPO's
score by the judge, PPO only learned what the filter does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from ..modeling.words import is_word, words
from .frontier import win_shares
from .head_to_head import HeadToHead
from .measure import measure, repeat_prompts
from .overoptimization import expected_best_of_n
from .prompt_groups import number_prompts
from .stats import Estimate, bootstrap_mean, mean_share

Floats = NDArray[np.float64]
Kind = Literal["reward", "length", "words"]

STREAM = 12  # separates these random numbers from others under the same seed
MAX_WORDS = 20  # words that a filter may leave out
MAX_CANDIDATES = 1000  # words that are tried, the most frequent ones
MIN_WORD_SHARE = 0.005  # share of the samples; a rarer word decides too little to be worth a rule
MIN_WORD_GAIN = 0.01  # rise of the mean reward for which another word is left out, in the reward's std


@dataclass(frozen=True)
class Filter:
    """A filter, with its result on P prompts.

    Attributes:
        name: The name in tables.
        kind: What the filter chooses samples by.
        drawn: Samples of the SFT policy for each completion that is kept, on average.
        reward, judge, wins: (P,) expected reward, judge's score and win rate over SFT of the kept sample.
        words: The words that it leaves out.
    """

    name: str
    kind: Kind
    drawn: float
    reward: Floats
    judge: Floats
    wins: Floats
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class FilterScore:
    """A filter compared with PPO.

    Attributes:
        filter: The filter.
        reward, judge, win_rate: Its means over prompts.
        ppo_minus_this: The judge's mean score of PPO − that of the filter, paired by prompt.
    """

    filter: Filter
    reward: Estimate
    judge: Estimate
    win_rate: Estimate
    ppo_minus_this: Estimate

    @property
    def reaches_ppo(self) -> bool:
        """Whether the judge's mean score is at least PPO's."""
        return self.ppo_minus_this.value <= 0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.filter.name,
            "kind": self.filter.kind,
            "drawn": self.filter.drawn,
            "words": list(self.filter.words),
            "reward": self.reward.to_json(),
            "judge": self.judge.to_json(),
            "win_rate": self.win_rate.to_json(),
            "ppo_minus_this": self.ppo_minus_this.to_json(),
            "reaches_ppo": self.reaches_ppo,
        }


def score_filters(comparison: HeadToHead, rows: Dataset, *, samples_per_prompt: int) -> dict[str, Any]:
    """Scores filters of new samples of the SFT policy, on the prompts of a comparison.

    The judge scores every sample, since a filter's result is its expected value over the whole pool.

    Args:
        comparison: The measured policies.
        rows: The rows that `comparison` was sampled for.
        samples_per_prompt: Samples of the SFT policy for each row, at least 2.

    Returns:
        `samples`; the filters `tried`, those that draw least first; and the name of the `best`: the first filter that
        reaches PPO's mean score by the judge, or else the filter with the highest score.
    """
    _, prompts, columns = repeat_prompts(rows, samples_per_prompt)
    evaluator = comparison.evaluator.with_only_headline_judge
    pool = measure(
        evaluator.reference,
        evaluator,
        prompts,
        keys=[(STREAM, *divmod(index, samples_per_prompt)) for index in range(len(prompts))],
        seed=comparison.seed,
        desc="filtering SFT's samples",
        columns=columns,
    )
    judge = np.reshape(pool.judge_scores[comparison.judge_name], (-1, samples_per_prompt))
    sft, ppo = (
        np.reshape(
            comparison.measurements[side].judge_scores[comparison.judge_name], (-1, comparison.samples_per_prompt)
        )
        for side in ("sft", "ppo")
    )
    reward = np.reshape(pool.reward, (-1, samples_per_prompt))
    filters = make_filters(pool.completions, reward, judge, win_shares(judge, sft))
    groups = comparison.row_groups if comparison.row_groups is not None else number_prompts(rows["prompt"])
    scores = [_score_filter(candidate, ppo.mean(1), groups, seed=comparison.seed) for candidate in filters]
    highest = max(scores, key=lambda score: score.judge.value)
    best = next((score for score in scores if score.reaches_ppo), highest)
    return {"samples": samples_per_prompt, "tried": [score.to_json() for score in scores], "best": best.filter.name}


def make_filters(completions: Sequence[str], reward: Floats, judge: Floats, wins: Floats) -> list[Filter]:
    """Applies each filter to a pool of samples.

    Args:
        completions: (P · N,) the N samples of P prompts, those of a prompt adjacent.
        reward: (P, N) each sample's reward.
        judge: (P, N) each sample's score by the judge.
        wins: (P, N) each sample's share of wins over SFT's samples in the comparison.

    Returns:
        The filters, by increasing number of samples drawn.
    """
    return sorted(
        [
            *_best_of_n_filters(reward, judge, wins),
            *_length_filters(completions, reward, judge, wins),
            *_word_filter(completions, reward, judge, wins),
        ],
        key=lambda candidate: candidate.drawn,
    )


def _powers_of_two(limit: int) -> list[int]:
    return [2**power for power in range(1, limit.bit_length())]


def _best_of_n_filters(reward: Floats, judge: Floats, wins: Floats) -> Iterator[Filter]:
    sizes = _powers_of_two(reward.shape[1])
    expected_scores = [expected_best_of_n(reward, sizes, judge=values) for values in (reward, judge, wins)]
    for size, *values in zip(sizes, *expected_scores, strict=True):
        yield Filter(f"best of {size} by the reward", "reward", size, *values)


def _length_filters(completions: Sequence[str], reward: Floats, judge: Floats, wins: Floats) -> Iterator[Filter]:
    """Yields the longest of n samples, or the shortest if these have the higher reward."""
    lengths = np.reshape([float(len(words(text))) for text in completions], reward.shape)
    sizes = _powers_of_two(reward.shape[1])
    longest_reward, shortest_reward = (
        expected_best_of_n(sign * lengths, sizes[-1:], judge=reward).mean() for sign in (1, -1)
    )
    name, score = ("longest", lengths) if longest_reward >= shortest_reward else ("shortest", -lengths)
    expected_scores = [expected_best_of_n(score, sizes, judge=values) for values in (reward, judge, wins)]
    for size, *values in zip(sizes, *expected_scores, strict=True):
        yield Filter(f"{name} of {size}", "length", size, *values)


def _word_filter(completions: Sequence[str], reward: Floats, judge: Floats, wins: Floats) -> Iterator[Filter]:
    """Yields the filter that drops samples with certain words; if every sample of a prompt has one, it keeps all."""
    filter_words, is_kept = choose_words(completions, reward)
    if not filter_words:
        return
    is_kept[~is_kept.any(1)] = True
    weights = is_kept / is_kept.sum(1, keepdims=True)
    reward, judge, wins = ((weights * values).sum(1) for values in (reward, judge, wins))
    name = "without 1 word" if len(filter_words) == 1 else f"without any of {len(filter_words)} words"
    yield Filter(name, "words", float(1 / is_kept.mean()), reward, judge, wins, filter_words)


def choose_words(completions: Sequence[str], reward: Floats) -> tuple[tuple[str, ...], NDArray[np.bool_]]:
    """Chooses words whose absence goes with a higher reward, greedily, one word at a time.

    Args:
        completions: (P · N,) the samples, those of a prompt adjacent.
        reward: (P, N) their rewards.

    Returns:
        The words, and (P, N) whether each sample has none of them.
    """
    text_words = [{word for word in words(text) if is_word(word)} for text in completions]
    counts = Counter(word for word_set in text_words for word in word_set)
    frequent_words = [word for word, count in counts.items() if count >= MIN_WORD_SHARE * len(completions)]
    candidates = sorted(frequent_words, key=lambda word: (-counts[word], word))[:MAX_CANDIDATES]
    is_kept = np.ones(reward.shape, dtype=bool)
    chosen_words: list[str] = []
    if not candidates:
        return (), is_kept
    # (words, P, N): 1 where a sample has the word.
    has_word = np.array([[word in word_set for word_set in text_words] for word in candidates], dtype=np.float32)
    has_word = has_word.reshape(-1, *reward.shape)
    all_means, min_rise = reward.mean(1), MIN_WORD_GAIN * float(reward.std())
    best_mean = float(all_means.mean())
    while len(chosen_words) < MAX_WORDS:
        # (words, P): how many samples each prompt would keep without this word too, and the sum of their rewards.
        kept_counts = is_kept.sum(1) - np.einsum("wpn,pn->wp", has_word, is_kept.astype(float))
        kept_rewards = (is_kept * reward).sum(1) - np.einsum("wpn,pn->wp", has_word, is_kept * reward)
        # If every sample of a prompt has one of the words, all samples of that prompt are kept.
        means = np.where(kept_counts > 0.5, kept_rewards / np.maximum(kept_counts, 1), all_means).mean(1)
        index = int(np.argmax(means))
        if means[index] <= best_mean + min_rise:
            break
        best_mean = float(means[index])
        chosen_words.append(candidates[index])
        is_kept &= has_word[index] == 0
    return tuple(chosen_words), is_kept


def _score_filter(candidate: Filter, ppo_judge: Floats, groups: Sequence[Hashable], *, seed: int) -> FilterScore:
    return FilterScore(
        candidate,
        reward=bootstrap_mean(candidate.reward, groups, seed=seed),
        judge=bootstrap_mean(candidate.judge, groups, seed=seed),
        win_rate=mean_share(candidate.wins, groups),
        ppo_minus_this=bootstrap_mean(ppo_judge - candidate.judge, groups, seed=seed),
    )
