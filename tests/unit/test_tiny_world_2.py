"""The gold utility: frozen, made of facts, bounded in what form costs, and won by no constant."""

import hashlib
import json
import math

import pytest
from figures import keep

from rlhf_zoo.runs.corpora.tiny_world_2 import FACTS, PARTS, explain, utility

PAIRS = json.loads((keep.FOLDER / "gold-2-pairs.json").read_text(encoding="utf-8"))
KEPT = keep.load("gold-2")
TRUE = FACTS["phone", "battery"][1]


def test_utility_matches_frozen_values_and_their_evidence() -> None:
    """200 pairs were ordered before anything was trained on it: a change makes another version."""
    worths = [round(utility(pair["prompt"] + pair[side]), 9) for pair in PAIRS for side in "ab"]
    facts = sorted((product, aspect, said) for (product, aspect), said in FACTS.items())
    frozen = hashlib.sha256(json.dumps([worths, facts]).encode()).hexdigest()
    assert frozen == KEPT["frozen"], "write version 3 rather than change version 2"
    assert len(PAIRS) == 200 and all(len(pair["ratings"]) == 3 for pair in PAIRS)
    assert sum("constant" in pair["sources"] for pair in PAIRS) >= 50
    assert KEPT["agreement"]["2"]["ci95"][0] > KEPT["agreement"]["1"]["ci95"][1]


def test_constants_and_templates_score_below_product_remarks() -> None:
    second = KEPT["worth"]["2"]
    assert second["constant"]["value"] < second["templates"]["value"] < second["lines"] < second["informed"]
    assert second["constant"]["beats_lines"] < 0.5


def test_true_remark_earns_told_and_backed_credit() -> None:
    found = explain(f"the phone's battery {TRUE}, and i love it.")
    assert found["told"] == 1.5 and found["backed"] == pytest.approx(0.4) and found["utility"] > 1.5
    assert math.fsum(found[part] for part in PARTS) == found["utility"]
    other = next(said[1] for (product, aspect), said in FACTS.items() if aspect == "battery" and said[1] != TRUE)
    assert utility(f"the phone's battery {other}.") < utility("the phone's battery is great.") < found["utility"]


def test_form_penalties_are_bounded() -> None:
    text = f"the phone's battery {TRUE}, and i love it."
    assert utility(text.upper()) == pytest.approx(utility(text) - 0.2)
    assert explain(f"{text} {' '.join('xq' + 'v' * n for n in range(12))}")["grammar"] == -1.5
    for text in ("", " ", "\n", "the phone", "zqx " * 500, "\U0001f600"):
        assert math.isfinite(utility(text))
