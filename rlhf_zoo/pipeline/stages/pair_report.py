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
    """What run.json and the card say of a reward model, by its raw scores: only of these is σ(margin) a probability.

    utility: what drew the labels of simulated pairs, of prompt and completion; None where nobody knows it. A column
    `margin` of the pairs says how much better the chosen side is, 0 of a tie.
    """
    scorer = RewardModel(model, tokenizer, tokenizer, center=False, scale=False)
    scores = score_pairs(scorer, pairs)
    asked = [plain_text(prompt) for prompt in pairs["prompt"]]
    written = {side: [completion_text(one) for one in pairs[side]] for side in ("chosen", "rejected")}
    lengths = {
        f"{side}_lengths": [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        for side, texts in written.items()
    }
    report = preference_report(scores["chosen"], scores["rejected"], prompts=asked, seed=seed, **lengths)
    margins = np.subtract(scores["chosen"], scores["rejected"])
    gold = None
    if utility is not None:
        worth = {side: [utility(a + b) for a, b in zip(asked, texts, strict=True)] for side, texts in written.items()}
        gold = np.subtract(worth["chosen"], worth["rejected"])
    strength = _margin(pairs) if gold is None else gold
    tied = are_ties(written["chosen"], written["rejected"], strength)
    same = [a == b for a, b in zip(written["chosen"], written["rejected"], strict=True)]
    clear = np.flatnonzero(~tied)

    def of_clear(values: Any) -> Any:
        return None if values is None else [values[place] for place in clear]

    made = choices(asked, written["chosen"], written["rejected"], seed=seed, without=set(np.flatnonzero(tied).tolist()))
    best = None
    if utility is not None:
        best = [
            [worth["chosen"][one.pair], *(utility(asked[one.pair] + written["rejected"][place]) for place in one.wrong)]
            for one in made
        ]
    return {
        **report,
        "best_of_n": best_of_n(made, _scores_of(made, scorer, pairs, scores), asked, gold=best),
        "ties": ties(margins, tied, same, asked, seed=seed),
        "hard": hard_pairs(
            of_clear(margins),
            of_clear(written["chosen"]),
            of_clear(written["rejected"]),
            (of_clear(lengths["chosen_lengths"]), of_clear(lengths["rejected_lengths"])),
            of_clear(asked),
            strength=of_clear(strength),
            gold=of_clear(gold),
        )
        if len(clear)
        else None,
    }


def _margin(pairs: Dataset) -> list[float] | None:
    """The data's own word on how much better each chosen side is, where it has one for every pair."""
    found = list(pairs["margin"]) if "margin" in pairs.column_names else [None]
    known = [float(one) for one in found if finite(one)]
    return known if len(known) == len(found) else None


def _scores_of(
    made: Sequence[Choice], scorer: RewardModel, pairs: Dataset, scores: dict[str, list[float]]
) -> list[list[float]]:
    """(C, n) of each choice, the chosen completion's first; what was written for another prompt is read behind this."""
    prompts, rejected = list(pairs["prompt"]), list(pairs["rejected"])
    borrowed = [(one.pair, place) for one in made for place in one.wrong if prompts[place] != prompts[one.pair]]
    texts = [append_completion(prompts[pair], rejected[place]) for pair, place in borrowed]
    read = dict(zip(borrowed, scorer.score_texts(texts, ended=[True] * len(texts)).tolist(), strict=True))
    return [
        [scores["chosen"][one.pair], *(read.get((one.pair, place), scores["rejected"][place]) for place in one.wrong)]
        for one in made
    ]


def score_pairs(scorer: RewardModel, pairs: Dataset) -> dict[str, list[float]]:
    """Scores of both sides, chosen and rejected, each as a text that ended."""
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
    asked = sorted(overlap(held_out, learned).asked)
    known = set(map(_pair, learned))
    return {
        "prompts": count_distinct_prompts(held_out.select(asked)["prompt"]) if asks else None,
        "pairs": sum(_pair(row) in known for row in held_out),
    }


def _pair(row: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """What is the same of two rows that hold the same pair."""
    sides = frozenset(normalized(plain_text(row[side])) for side in ("chosen", "rejected"))
    return whole_question(row), sides
