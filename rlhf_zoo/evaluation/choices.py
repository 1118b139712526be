"""Measures how often a reward model ranks the right completion first among several, on the run's own pairs.

RewardBench 2 uses one chosen and three rejected completions per prompt, so random guessing is right in a quarter of the
cases, not in half of them as with pairs (Malik et al. 2025, arXiv:2506.01937). A pair has only one rejected completion.
The other wrong candidates are rejected completions of the same prompt in other held-out pairs. If these are too few,
more come from the most similar other prompts and are scored as completions of this one. The labels only say that the
chosen completion beats its own rejected one. That it beats the other candidates too is an assumption.
"""

import random
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..modeling.words import words
from .stats import mean_share
from .text import normalize_text

CANDIDATE_COUNT = 4  # completions per choice
MAX_CHOICES = 500
MAX_SEARCHED_PROMPTS = 1000  # other prompts that are searched for similar ones


@dataclass(frozen=True)
class Choice:
    """The chosen completion of a pair among wrong candidates.

    Attributes:
        pair: Index of the pair whose chosen completion is the right one.
        wrong_pairs: Indices of the pairs whose rejected completions are the wrong candidates, the pair's own first.
        borrowed_count: How many of the wrong candidates, the last ones, were written for another prompt.
    """

    pair: int
    wrong_pairs: tuple[int, ...]
    borrowed_count: int


def build_choices(
    prompts: Sequence[str],
    chosen: Sequence[str],
    rejected: Sequence[str],
    *,
    seed: int,
    candidate_count: int = CANDIDATE_COUNT,
    ties: Collection[int] = (),
) -> list[Choice]:
    """Builds one choice for each pair, or for `MAX_CHOICES` randomly drawn pairs if there are more.

    Texts are compared in lower case, with single spaces. Apart from the pair's own rejected text, a wrong candidate is
    never a text that was chosen for this prompt. A candidate from another prompt is never a text that was chosen for
    any prompt. No candidate occurs twice.

    Args:
        prompts: (N,) the prompt of each pair.
        chosen: (N,) the chosen completion of each pair.
        rejected: (N,) the rejected completion of each pair.
        seed: Seed of the draws.
        candidate_count: Completions per choice, the right one included.
        ties: Indices of the pairs that are ties. They are left out, because neither side is right.

    Returns:
        The choices. Pairs with too few distinct wrong candidates are left out, so the list may be empty.
    """
    rng = random.Random(seed)
    right_texts, wrong_texts = list(map(normalize_text, chosen)), list(map(normalize_text, rejected))
    chosen_by_prompt: dict[str, set[str]] = defaultdict(set)
    pairs_by_prompt: dict[str, list[int]] = defaultdict(list)
    for pair, prompt in enumerate(prompts):
        # The chosen text of a tie cannot be a wrong candidate either; ties have no other use here.
        chosen_by_prompt[prompt].add(right_texts[pair])
        if pair not in ties:
            pairs_by_prompt[prompt].append(pair)
    # Without ties, and without pairs whose two texts are the same.
    selected_pairs = [
        pair for pairs in pairs_by_prompt.values() for pair in pairs if wrong_texts[pair] != right_texts[pair]
    ]
    if len(selected_pairs) > MAX_CHOICES:
        selected_pairs = rng.sample(selected_pairs, MAX_CHOICES)
    searched_prompts = list(pairs_by_prompt)
    # Similarity is computed with every searched prompt, so their number is bounded.
    if len(searched_prompts) > MAX_SEARCHED_PROMPTS:
        searched_prompts = rng.sample(searched_prompts, MAX_SEARCHED_PROMPTS)
    # A text chosen for another prompt may answer this one well too, so it cannot serve as a wrong candidate.
    chosen_anywhere = set(right_texts)
    all_prompts = {*searched_prompts, *(prompts[pair] for pair in selected_pairs)}
    words_by_prompt = {prompt: set(words(prompt)) for prompt in all_prompts}

    def add_candidates(wrong_pairs: list[int], pairs: Sequence[int], excluded_texts: set[str]) -> None:
        for other in rng.sample(pairs, len(pairs)):
            if len(wrong_pairs) < candidate_count - 1 and wrong_texts[other] not in excluded_texts:
                wrong_pairs.append(other)
                excluded_texts.add(wrong_texts[other])

    choices = []
    for pair in sorted(selected_pairs):
        wrong_pairs, excluded_texts = [pair], {wrong_texts[pair], *chosen_by_prompt[prompts[pair]]}
        add_candidates(wrong_pairs, pairs_by_prompt[prompts[pair]], excluded_texts)
        own_count = len(wrong_pairs)
        if own_count < candidate_count - 1:
            excluded_texts |= chosen_anywhere
            own_words = words_by_prompt[prompts[pair]]
            # The random number breaks ties between equally similar prompts.
            ranking = {
                prompt: (-_jaccard_index(own_words, words_by_prompt[prompt]), rng.random())
                for prompt in searched_prompts
            }
            for prompt in sorted(ranking, key=ranking.__getitem__):
                if prompt != prompts[pair]:
                    add_candidates(wrong_pairs, pairs_by_prompt[prompt], excluded_texts)
                if len(wrong_pairs) == candidate_count - 1:
                    break
        if len(wrong_pairs) == candidate_count - 1:
            choices.append(Choice(pair, tuple(wrong_pairs), len(wrong_pairs) - own_count))
    return choices


def _jaccard_index(a: set[str], b: set[str]) -> float:
    return len(a & b) / max(len(a | b), 1)


def choice_credits(scores: ArrayLike) -> NDArray[np.float64]:
    """Credits each choice: 1/k if the right completion is one of the k with the highest score (usually k = 1), else 0.

    Args:
        scores: (C, n) scores of each choice's candidates, the right one first.

    Returns:
        (C,) credits from 0 to 1.
    """
    table = np.asarray(scores, dtype=float)
    # Ties share the credit, so that a model with constant scores does not beat chance.
    highest = table == table.max(axis=1, keepdims=True)
    return highest[:, 0] / highest.sum(axis=1)


def choice_accuracy(
    choices: Sequence[Choice], scores: ArrayLike, prompts: Sequence[Hashable], *, gold: ArrayLike | None = None
) -> dict[str, Any] | None:
    """Computes how often the right completion of C choices scores highest.

    Args:
        choices: The C choices.
        scores: (C, n) scores of each choice's candidates, the chosen completion first.
        prompts: (N,) the prompt of each pair, for the interval of `stats.mean_share`.
        gold: (C, n) utilities of the same texts, if the labels were drawn from a known utility.

    Returns:
        The figures as JSON; None if there are no choices.
    """
    if not choices:
        return None
    table = np.asarray(scores, dtype=float)
    groups = [prompts[choice.pair] for choice in choices]
    return {
        "candidates": table.shape[1],
        "chance": 1 / table.shape[1],
        **mean_share(choice_credits(table), groups).to_json(),
        "borrowed": sum(choice.borrowed_count for choice in choices) / (len(choices) * (table.shape[1] - 1)),
        "gold": None if gold is None else mean_share(choice_credits(gold), groups).to_json(),
    }
