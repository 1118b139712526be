"""The judge of product remarks that is shown no label: what it prefers, and that labels make no difference to it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from rlhf_zoo.evaluation.judges.check import check_pairs
from rlhf_zoo.evaluation.judges.scalar import Judge
from rlhf_zoo.runs.corpora.product_remarks import prepare
from rlhf_zoo.runs.corpora.remark_judge import Orientation, TrigramModel, learn, tokens_of

OWN = Path(__file__).parents[2] / "recipes" / "product-remarks" / "own_pairs.jsonl"
PARTS = {1: ("great", "good", ("easy", "simple", "light")), 0: ("poor", "bad", ("hard", "slow", "heavy"))}


def _remark(rng: random.Random) -> str:
    *words, ways = PARTS[rng.randint(0, 1)]
    return f"{rng.choice(words)} {rng.choice(('zoom', 'screen', 'sound', 'price'))}, {rng.choice(ways)} to use"


RNG = random.Random(1)
REMARKS = [_remark(RNG) for _ in range(200)]


def test_remark_judge_prefers_natural_praise() -> None:
    judge = learn(REMARKS)
    assert isinstance(judge, Judge) and judge([], []) == []
    praise, blame, broken = judge(
        ["great sound,", "poor sound,", "great"], [" easy to use", " slow to use", " use to ,"]
    )
    assert praise > blame and praise > broken
    assert judge(["", "zoom"], ["great zoom", ""])[0] == judge(["great"], [" zoom"])[0], "the whole text is read"
    assert all(0 <= one <= 1 for one in judge(["", "?", "great"], ["", "!!", " unheard-of words"]))
    assert judge(["sound,"], [" easy to use"]) == learn(list(REMARKS))(["sound,"], [" easy to use"])
    assert "without their labels" in judge.description
    with pytest.raises(ValueError, match="too few"):
        learn(["great"])


def test_orientation_and_trigrams_match_hand_computation() -> None:
    orientation = Orientation([["great", "zoom"], ["great", "price"], ["bad", "price"]])
    # zoom: beside praise in 1 of 2 remarks, beside blame in 0 of 1; priors 4/3 and 2/3; price: 1 of 2 and 1 of 1.
    assert orientation(["zoom"]) == pytest.approx(np.log((1 + 4 / 3) / (2 / 3) / 2))
    assert orientation(["price"]) == pytest.approx(np.log((1 + 4 / 3) / (1 + 2 / 3) / 2)) and orientation([","]) == 0
    steps = TrigramModel([["a", "b"], ["a", "c"]])
    # After "<s> <s>" a follows always: 1 − 0.75/2 + 0.75/2 · p(a | <s>), and so on down to the unigrams.
    unigram = (2 - 0.75) / 6 + 0.75 * 4 / 6 * (1 / 5)
    bigram = (2 - 0.75) / 2 + 0.75 / 2 * unigram
    assert steps.logprobs(["a"])[0] == pytest.approx(np.log((2 - 0.75) / 2 + 0.75 / 2 * bigram))
    assert steps.weakest_link(["a", "b"]) > steps.weakest_link(["a", "a"]) > steps.weakest_link(["a", "a", "?"]) - 1e-9
    every = [np.exp(steps.logprobs(["a", word])[1]) for word in ("a", "b", "c")]
    assert sum(every) < 1, "what is left is for the end and for unknown words"


def test_remark_judge_orders_pairs_of_policies_as_documented(real_data: Path) -> None:
    """The figures of docs/evaluation.md, with room for another version of the text."""
    judge = learn([row["text"] for row in prepare(str(real_data / "pros_cons"), seed=1)["judge"]["train"]])
    rows = [json.loads(line) for line in OWN.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 200 and all(row["chosen"] != row["rejected"] for row in rows)
    prompts = [row["prompt"] for row in rows]
    sides = (judge(prompts, [row[side] for row in rows]) for side in ("chosen", "rejected"))
    found = check_pairs(*sides, prompts, are_probabilities=False, seed=1).accuracy
    assert found.value == pytest.approx(0.7775, abs=0.03) and found.ci95[0] > 0.6
    assert tokens_of("It's e-mail, 3x!") == ["it's", "e-mail", ",", "3x", "!"]
