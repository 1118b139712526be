"""A reward model on pairs that it did not learn from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from ...evaluation.best_of_n import Choice, best_of_n, choices
from ...evaluation.calibration import preference_report
from ...evaluation.hard_pairs import are_ties, hard_pairs, ties
from ...fileio import finite
from ...modeling.chat import append_completion, completion_text, plain_text
from ...modeling.prompt_keys import count_distinct_prompts
from ...rewards import RewardModel
from ...runs.data.overlap import normalized, overlap, whole_question


def held_out_report(
    model: Any, tokenizer: Any, pairs: Dataset, *, seed: int, utility: Callable[[str], float] | None = None
) -> dict[str, Any]:
    """Measures a reward model on held-out pairs, by its raw scores: only of these is σ(margin) a probability.

    Args:
        model: The reward model.
        tokenizer: Its tokenizer.
        pairs: The held-out pairs. A column `margin` says how much better the chosen side is, 0 of a tie.
        seed: Of the bootstrap, and of the wrong completions that best-of-n chooses among.
        utility: The score of prompt + completion that labeled simulated pairs; None where it is unknown.

    Returns:
        The figures for run.json and the card.
    """
    scorer = RewardModel(model, tokenizer, tokenizer, center=False, scale=False)
    scores = score_pairs(scorer, pairs)
    prompts = [plain_text(prompt) for prompt in pairs["prompt"]]
    written = {side: [completion_text(text) for text in pairs[side]] for side in ("chosen", "rejected")}
    lengths = {
        f"{side}_lengths": [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        for side, texts in written.items()
    }
    report = preference_report(scores["chosen"], scores["rejected"], prompts=prompts, seed=seed, **lengths)
    margins = np.subtract(scores["chosen"], scores["rejected"])
    gold = None
    if utility is not None:
        worth = {side: [utility(a + b) for a, b in zip(prompts, texts, strict=True)] for side, texts in written.items()}
        gold = np.subtract(worth["chosen"], worth["rejected"])
    strength = _margin(pairs) if gold is None else gold
    tied = are_ties(written["chosen"], written["rejected"], strength)
    same = [a == b for a, b in zip(written["chosen"], written["rejected"], strict=True)]
    clear = np.flatnonzero(~tied)

    def of_clear(values: Any) -> Any:
        return None if values is None else [values[place] for place in clear]

    made = choices(
        prompts, written["chosen"], written["rejected"], seed=seed, without=set(np.flatnonzero(tied).tolist())
    )
    best = None
    if utility is not None:
        best = [
            [
                worth["chosen"][choice.pair],
                *(utility(prompts[choice.pair] + written["rejected"][place]) for place in choice.wrong),
            ]
            for choice in made
        ]
    return {
        **report,
        "best_of_n": best_of_n(made, _scores_of(made, scorer, pairs, scores), prompts, gold=best),
        "ties": ties(margins, tied, same, prompts, seed=seed),
        "hard": hard_pairs(
            of_clear(margins),
            of_clear(written["chosen"]),
            of_clear(written["rejected"]),
            (of_clear(lengths["chosen_lengths"]), of_clear(lengths["rejected_lengths"])),
            of_clear(prompts),
            strength=of_clear(strength),
            gold=of_clear(gold),
        )
        if len(clear)
        else None,
    }


def _margin(pairs: Dataset) -> list[float] | None:
    """The data's own word on how much better each chosen side is, where it has one for every pair."""
    margins = list(pairs["margin"]) if "margin" in pairs.column_names else [None]
    numbers = [float(margin) for margin in margins if finite(margin)]
    return numbers if len(numbers) == len(margins) else None


def _scores_of(
    made: Sequence[Choice], scorer: RewardModel, pairs: Dataset, scores: dict[str, list[float]]
) -> list[list[float]]:
    """(C, n) of each choice, the chosen completion's first; what was written for another prompt is read behind this."""
    prompts, rejected = list(pairs["prompt"]), list(pairs["rejected"])
    borrowed = [
        (choice.pair, place) for choice in made for place in choice.wrong if prompts[place] != prompts[choice.pair]
    ]
    texts = [append_completion(prompts[pair], rejected[place]) for pair, place in borrowed]
    read = dict(zip(borrowed, scorer.score_texts(texts, ended=[True] * len(texts)).tolist(), strict=True))
    return [
        [
            scores["chosen"][choice.pair],
            *(read.get((choice.pair, place), scores["rejected"][place]) for place in choice.wrong),
        ]
        for choice in made
    ]


def score_pairs(scorer: RewardModel, pairs: Dataset) -> dict[str, list[float]]:
    """Scores both sides of each pair as texts that ended.

    Args:
        scorer: The reward model.
        pairs: P pairs.

    Returns:
        P scores each under `chosen` and `rejected`.
    """
    scores = {}
    for side in ("chosen", "rejected"):
        texts = [append_completion(prompt, text) for prompt, text in zip(pairs["prompt"], pairs[side], strict=True)]
        scores[side] = scorer.score_texts(texts, ended=[True] * len(texts)).tolist()
    return scores


def pairs_seen(held_out: Dataset, learned: Dataset) -> dict[str, int | None]:
    """How many of a reward model's held-out pairs it learned from.

    Args:
        held_out: The pairs that it is measured on.
        learned: Those that it learned from.

    Returns:
        `prompts`, how many different ones of the held-out pairs, None where these have no prompts; `pairs`, how many
        pairs, whichever side is the chosen one.
    """
    asks = any(whole_question(row) for row in held_out)
    asked_again = sorted(overlap(held_out, learned).asked)
    learned_pairs = set(map(_pair, learned))
    return {
        "prompts": count_distinct_prompts(held_out.select(asked_again)["prompt"]) if asks else None,
        "pairs": sum(_pair(row) in learned_pairs for row in held_out),
    }


def _pair(row: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """What is the same of two rows that hold the same pair."""
    sides = frozenset(normalized(plain_text(row[side])) for side in ("chosen", "rejected"))
    return whole_question(row), sides
