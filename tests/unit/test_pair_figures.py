"""Best of n, ties and hard pairs: hand values, what chance alone gives, and a model that only reads length."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_fixture import CHAT, LETTERS, make_reward_model, make_tokenizer

from rlhf_zoo.evaluation.choices import Choice, build_choices, choice_accuracy, choice_credits
from rlhf_zoo.evaluation.hard_pairs import are_ties, compare_ties, measure_hard_pairs, word_overlap
from rlhf_zoo.evaluation.text import normalize_text
from rlhf_zoo.pipeline.stages import pair_report
from rlhf_zoo.pipeline.stages.pair_report import held_out_report
from rlhf_zoo.rewards import RewardModel

# Best of n


def test_choices_take_own_rejected_texts_then_those_of_similar_prompts() -> None:
    prompts = ["a red car", "a red car", "a red bike", "my blue boat", "a red car"]
    chosen = ["good", "fine", "nice", "great", "well"]
    rejected = ["bad", "poor", "slow", "late", "Fine"]
    result = {one.pair: one for one in build_choices(prompts, chosen, rejected, seed=3)}
    # Of pair 0: its own, that of pair 1, and not "Fine", which was chosen for this prompt; then the bike's.
    assert result[0] == Choice(0, (0, 1, 2), borrowed_count=1)
    assert result[1] == Choice(1, (1, 0, 2), borrowed_count=1)
    assert result[3].wrong_pairs[0] == 3 and result[3].borrowed_count == 2 and 4 not in result[3].wrong_pairs
    assert result[2].wrong_pairs[0] == 2 and set(result[2].wrong_pairs[1:]) == {0, 1}, "cars, not the boat"
    assert not build_choices(prompts[:2], chosen[:2], rejected[:2], seed=1), "too few differ"
    assert {one.pair for one in build_choices(prompts, chosen, rejected, seed=1, ties={0})} == {1, 2, 3, 4}
    assert all(0 not in one.wrong_pairs for one in build_choices(prompts, chosen, rejected, seed=1, ties={0}))


texts = st.sampled_from(["A", "a", "b", " b", "c", "d", "e", "f"])
pairs_drawn = st.lists(st.tuples(st.sampled_from(["p q", "p r", "s", ""]), texts, texts), max_size=14)


@settings(deadline=None, max_examples=80)
@given(pairs_drawn, st.integers(2, 5), st.integers(0, 99))
def test_choices_hold_no_duplicate_or_chosen_text(rows: list[tuple[str, str, str]], n: int, seed: int) -> None:
    prompts, chosen, rejected = (list(side) for side in zip(*rows, strict=True)) if rows else ([], [], [])
    result = build_choices(prompts, chosen, rejected, seed=seed, candidate_count=n)
    assert result == build_choices(prompts, chosen, rejected, seed=seed, candidate_count=n)
    for one in result:
        wrong = [normalize_text(rejected[place]) for place in one.wrong_pairs]
        assert len({normalize_text(chosen[one.pair]), *wrong}) == n and one.wrong_pairs[0] == one.pair
        own = [prompts[place] == prompts[one.pair] for place in one.wrong_pairs]
        assert own == [True] * (n - 1 - one.borrowed_count) + [False] * one.borrowed_count
        here = {
            normalize_text(text) for prompt, text in zip(prompts, chosen, strict=True) if prompt == prompts[one.pair]
        }
        anywhere = set(map(normalize_text, chosen))
        borrowed = wrong[n - 1 - one.borrowed_count :]
        assert not here & set(wrong[1:]) and not anywhere & set(borrowed)


def test_credit_is_shared_among_ties() -> None:
    assert choice_credits([[2, 1, 0, 0], [1, 1, 0, 1], [0, 1, 0, 0], [5, 5, 5, 5]]).tolist() == [1, 1 / 3, 0, 1 / 4]


def test_random_scores_have_chance_accuracy() -> None:
    rng = np.random.default_rng(1)
    prompts = [f"p{place // 4}" for place in range(400)]
    made = build_choices(prompts, [f"good {n}" for n in range(400)], [f"bad {n}" for n in range(400)], seed=1)
    result = choice_accuracy(made, rng.random((400, 4)), prompts, gold=[[1, 0, 0, 0]] * 400)
    assert result is not None and result["chance"] == 0.25 and result["n"] == 400
    assert result["ci95"][0] < 0.25 < result["ci95"][1] and result["gold"]["value"] == 1
    assert result["borrowed"] == 0, "each prompt has four of its own"
    assert choice_accuracy([], [], []) is None


# Ties


def test_ties_have_zero_margin_or_equal_text() -> None:
    chosen, rejected = ["One two", "a", "b", "c"], ["one  two ", "b", "b", "d"]
    assert are_ties(chosen, rejected, None).tolist() == [True, False, True, False]
    assert are_ties(chosen, rejected, [1.0, 0.0, -2.0, 0.5]).tolist() == [True, True, True, False]


def test_ties_report_distance_without_equal_texts() -> None:
    tied, same = [True, True, True, False, False], [False, False, True, False, False]
    result = compare_ties([0.5, -1.5, 0.0, 3.0, -1.0], tied, same, "aabbc", seed=1)
    assert result is not None
    assert (result["n"], result["apart"]["value"], result["others"]["value"], result["ratio"]) == (2, 1.0, 2.0, 0.5)
    assert compare_ties([0.0, 1.0], [True, False], [True, False], "ab", seed=1) is None, "equal to the letter"
    every = compare_ties([1.0], [True], [False], "a", seed=1)
    assert every is not None and every["others"] is None is every["ratio"]


# Hard pairs


def test_overlap_counts_shared_words_with_multiplicity() -> None:
    assert word_overlap("the red red car", "The red boat") == 2 / 5  # the, red of the, red, red, car, boat
    assert (word_overlap("", ""), word_overlap("a", ""), word_overlap("a b", "b a")) == (1.0, 0.0, 1.0)


def test_accuracy_is_split_by_difficulty_and_length() -> None:
    chosen = ["a b c d", "a b c e", "a b f g", "a h i j", "k l", "m n", "o p", "q r"]
    rejected = ["a b c x", "a b c y", "a b x y", "a x y z", "s t", "u v", "w x", "y z"]
    margins = [-1.0, -1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    strength = [4.0, -3.0, 2.0, 2.5, 0.1, 0.2, 1.0, 1.1]
    result = measure_hard_pairs(
        margins, chosen, rejected, ([10, 10, 20, 20, 5, 5, 5, 5], [10, 11, 10, 10, 9, 9, 9, 9]), "aabbccdd",
        strength=strength, gold=strength,
    )  # fmt: skip
    first, *_, last = result["by_overlap"]
    assert (first["low"], first["high"], first["value"], first["n"], first["gold"]) == (0.6, 0.6, 0.0, 2, 0.5)
    assert (last["low"], last["value"]) == (0.0, 1.0)
    assert [part["value"] for part in result["by_strength"]] == [1.0, 1.0, 0.75, 0.0]
    assert [part["low"] for part in result["by_strength"]] == [0.1, 1.0, 2.0, 3.0]
    assert {name: (result[name]["value"], result[name]["n"]) for name in ("same_length", "chosen_longer")} == {
        "same_length": (0.0, 2), "chosen_longer": (0.75, 2),
    }  # fmt: skip
    alone = measure_hard_pairs([1.0], ["a"], ["b"], ([3], [3]), "a")
    assert alone["by_strength"] is None and alone["same_length"]["gold"] is None and alone["chosen_longer"] is None


def test_equal_length_pairs_expose_length_only_model() -> None:
    rng = np.random.default_rng(0)
    good = rng.integers(5, 40, 600)
    bad = np.where(rng.random(600) < 0.3, good, rng.integers(5, 40, 600))
    better = rng.random(600) < np.where(good > bad, 0.9, 0.1)  # the labels like length, too
    ours, theirs = np.where(better, good, bad), np.where(better, bad, good)
    noise = rng.normal(0, 1e-6, 600)
    result = measure_hard_pairs(ours - theirs + noise, ["x"] * 600, ["y"] * 600, (ours, theirs), list(range(600)))
    assert result["chosen_longer"]["value"] == 1 and result["chosen_shorter"]["value"] == 0
    low, high = result["same_length"]["ci95"]
    assert low < 0.6 and high > 0.4 and result["same_length"]["n"] > 100


# The stage


def report(
    rows: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, *, worth: Callable[[str], float], **given: Any
) -> dict[str, Any]:
    """Of a reward model that knows what texts are worth."""

    class Knows(RewardModel):
        def score_texts(self, texts: Any, *, ended: Any) -> Any:
            import torch

            assert all(ended) and len(texts) == len(ended)
            messages = [one if isinstance(one, str) else "".join(turn["content"] for turn in one) for one in texts]
            return torch.tensor([worth(text) for text in messages])

    monkeypatch.setattr(pair_report, "RewardModel", Knows)
    return held_out_report(make_reward_model(), make_tokenizer(LETTERS), Dataset.from_dict(rows), seed=1, **given)


ROWS = {
    "prompt": ["ab", "ab", "ab", "cd", "cd"],
    "chosen": ["ggg", "gg", "ggh", "hgg", "ggi"],
    "rejected": ["a", "b", "c", "a", "GGI"],
}


def conversations() -> dict[str, list[Any]]:
    return {
        name: [[{"role": "user" if name == "prompt" else "assistant", "content": text}] for text in column]
        for name, column in ROWS.items()
    }


def worth_of(text: str) -> float:
    return float(text.lower().count("g"))


@pytest.mark.parametrize("turns", [False, True])
def test_report_handles_texts_and_conversations_alike(turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    result = report(conversations() if turns else ROWS, monkeypatch, worth=worth_of)
    best = result["best_of_n"]
    # The fifth pair is a tie; of "cd" there is one rejected text, so two are borrowed from "ab".
    assert (best["value"], best["n"], best["gold"]) == (1.0, 4, None)
    assert best["borrowed"] == pytest.approx(2 / 12)
    assert result["ties"]["n"] == 1 and result["ties"]["apart"]["value"] == 0
    assert result["hard"]["by_strength"] is None and sum(part["n"] for part in result["hard"]["by_overlap"]) == 4


def test_simulated_pairs_are_checked_against_their_utility(monkeypatch: pytest.MonkeyPatch) -> None:
    result = report(ROWS, monkeypatch, worth=lambda text: -worth_of(text), utility=worth_of)
    assert (result["best_of_n"]["value"], result["best_of_n"]["gold"]["value"]) == (0.0, 1.0)
    parts = result["hard"]["by_strength"]
    assert [part["low"] for part in parts] == [2.0, 3.0] and {part["gold"] for part in parts} == {1.0}
    assert {part["value"] for part in parts} == {0.0}


def test_margin_column_defines_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    result = report({**ROWS, "margin": [0.0, 1.0, 2.0, 3.0, 4.0]}, monkeypatch, worth=worth_of)
    assert result["ties"]["n"] == 2, "the first by its margin, the last by its letters"
    assert [part["low"] for part in result["hard"]["by_strength"]] == [1.0, 2.0, 3.0]
    partly = report({**ROWS, "margin": [0.0, None, 2.0, 3.0, 4.0]}, monkeypatch, worth=worth_of)
    assert partly["ties"]["n"] == 1 and partly["hard"]["by_strength"] is None


def test_chat_template_applies_to_borrowed_candidates() -> None:
    """With a real model: nothing of it needs a text."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    result = held_out_report(make_reward_model(tokenizer), tokenizer, Dataset.from_dict(conversations()), seed=1)
    assert result["best_of_n"]["n"] == 4 and 0 <= result["best_of_n"]["value"] <= 1
