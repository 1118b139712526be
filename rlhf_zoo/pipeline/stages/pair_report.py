"""Measures a reward model on held-out pairs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...evaluation.calibration import preference_report
from ...evaluation.choices import Choice, build_choices, choice_accuracy
from ...evaluation.hard_pairs import are_ties, compare_ties, measure_hard_pairs
from ...evaluation.prompt_groups import group_other_prompts
from ...fileio import is_finite
from ...modeling.chat import append_completion, completion_text, plain_text
from ...modeling.prompt_keys import count_distinct_prompts
from ...rewards import RewardModel
from ...runs.data.overlap import find_overlap, normalize_question, question_text


def held_out_report(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Dataset,
    *,
    seed: int,
    utility: Callable[[str], float] | None = None,
) -> dict[str, Any]:
    """Measures a reward model on held-out pairs, by raw scores, because P = σ(m) holds only for raw margins m.

    Args:
        model: The reward model.
        tokenizer: The reward model's tokenizer.
        pairs: The held-out pairs. An optional column `margin` says by how much the chosen side is better; 0 is a tie.
        seed: Seed of the bootstrap, and of the wrong completions in best-of-n.
        utility: Returns the utility of prompt + completion, which labeled the simulated pairs; None if unknown.

    Returns:
        The figures for run.json and the card.
    """
    reward_model = RewardModel(model, tokenizer, tokenizer, center=False, scale=False)
    scores = score_pairs(reward_model, pairs)
    prompts = [plain_text(prompt) for prompt in pairs["prompt"]]
    completions = {side: [completion_text(text) for text in pairs[side]] for side in ("chosen", "rejected")}
    lengths = {
        f"{side}_lengths": [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        for side, texts in completions.items()
    }
    groups = group_other_prompts(pairs["prompt"], None)
    report = preference_report(scores["chosen"], scores["rejected"], prompts=groups, seed=seed, **lengths)
    margins = np.subtract(scores["chosen"], scores["rejected"])
    gold_margins = None
    if utility is not None:
        utilities = {
            side: [utility(a + b) for a, b in zip(prompts, texts, strict=True)] for side, texts in completions.items()
        }
        gold_margins = np.subtract(utilities["chosen"], utilities["rejected"])
    labeled_margins = _margin_column(pairs) if gold_margins is None else gold_margins
    is_tie = are_ties(completions["chosen"], completions["rejected"], labeled_margins)
    equal_texts = [a == b for a, b in zip(completions["chosen"], completions["rejected"], strict=True)]
    untied_rows = np.flatnonzero(~is_tie)

    def select_untied(values: Any) -> Any:
        return None if values is None else [values[row] for row in untied_rows]

    choices = build_choices(
        prompts, completions["chosen"], completions["rejected"], seed=seed, ties=set(np.flatnonzero(is_tie).tolist())
    )
    gold_utilities = None
    if utility is not None:
        gold_utilities = [
            [
                utilities["chosen"][choice.pair],
                *(utility(prompts[choice.pair] + completions["rejected"][row]) for row in choice.wrong_pairs),
            ]
            for choice in choices
        ]
    return {
        **report,
        "best_of_n": choice_accuracy(
            choices, _score_choices(choices, reward_model, pairs, scores), groups, gold=gold_utilities
        ),
        "ties": compare_ties(margins, is_tie, equal_texts, groups, seed=seed),
        "hard": measure_hard_pairs(
            select_untied(margins),
            select_untied(completions["chosen"]),
            select_untied(completions["rejected"]),
            (select_untied(lengths["chosen_lengths"]), select_untied(lengths["rejected_lengths"])),
            select_untied(groups),
            strength=select_untied(labeled_margins),
            gold=select_untied(gold_margins),
        )
        if len(untied_rows)
        else None,
    }


def _margin_column(pairs: Dataset) -> list[float] | None:
    """Returns the column `margin`; None unless it has a number for every pair."""
    margins = list(pairs["margin"]) if "margin" in pairs.column_names else [None]
    numbers = [float(margin) for margin in margins if is_finite(margin)]
    return numbers if len(numbers) == len(margins) else None


def _score_choices(
    choices: Sequence[Choice], reward_model: RewardModel, pairs: Dataset, scores: dict[str, list[float]]
) -> list[list[float]]:
    """Returns scores (C, n) of C choices among n completions each, the chosen completion first.

    A completion that belongs to another prompt is scored after the prompt of the choice.
    """
    prompts, rejected = list(pairs["prompt"]), list(pairs["rejected"])
    pairs_to_score = [
        (choice.pair, row) for choice in choices for row in choice.wrong_pairs if prompts[row] != prompts[choice.pair]
    ]
    texts = [append_completion(prompts[pair], rejected[row]) for pair, row in pairs_to_score]
    text_scores = reward_model.score_texts(texts, ended=[True] * len(texts)).tolist()
    new_scores = dict(zip(pairs_to_score, text_scores, strict=True))
    return [
        [
            scores["chosen"][choice.pair],
            *(new_scores.get((choice.pair, row), scores["rejected"][row]) for row in choice.wrong_pairs),
        ]
        for choice in choices
    ]


def score_pairs(reward_model: RewardModel, pairs: Dataset) -> dict[str, list[float]]:
    """Scores both sides of each pair, as complete texts.

    Args:
        reward_model: The reward model.
        pairs: P pairs.

    Returns:
        {chosen: P scores, rejected: P scores}.
    """
    scores = {}
    for side in ("chosen", "rejected"):
        texts = [append_completion(prompt, text) for prompt, text in zip(pairs["prompt"], pairs[side], strict=True)]
        scores[side] = reward_model.score_texts(texts, ended=[True] * len(texts)).tolist()
    return scores


def count_trained_pairs(held_out_pairs: Dataset, training_pairs: Dataset) -> dict[str, int | None]:
    """Counts the held-out pairs that a reward model was trained on.

    Args:
        held_out_pairs: The pairs that the model is measured on.
        training_pairs: The pairs that the model was trained on.

    Returns:
        `prompts`: the number of distinct held-out prompts that were trained on, or None if the pairs have no prompts;
        `pairs`: the number of held-out pairs that were trained on, in either order of their sides.
    """
    has_prompts = any(question_text(row) for row in held_out_pairs)
    shared_rows = sorted(find_overlap(held_out_pairs, training_pairs).prompt_indices)
    training_keys = set(map(_pair_key, training_pairs))
    return {
        "prompts": count_distinct_prompts(held_out_pairs.select(shared_rows)["prompt"]) if has_prompts else None,
        "pairs": sum(_pair_key(row) in training_keys for row in held_out_pairs),
    }


def _pair_key(row: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """Returns a key that is equal for rows with the same prompt and the same sides in any order."""
    sides = frozenset(normalize_question(plain_text(row[side])) for side in ("chosen", "rejected"))
    return question_text(row), sides
