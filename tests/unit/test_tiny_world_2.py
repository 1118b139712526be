"""The second gold utility: frozen, made of facts, bounded in what form costs, and won by no constant."""

import json
import math
from pathlib import Path
from statistics import fmean

import gold
import pytest
from figures import keep, pairs
from figures.experiments import GOLD

from rlhf_zoo.corpora import tiny_world, tiny_world_2
from rlhf_zoo.corpora.tiny_world_2 import FACTS, PARTS, explain, utility

PAIRS = json.loads(gold.PAIRS.read_text(encoding="utf-8"))
KEPT = keep.load(GOLD)
TRUE = FACTS["phone", "battery"][1]


def test_it_is_frozen_and_its_evidence_is_of_it() -> None:
    """200 pairs were ordered before anything was trained on it: a change makes another version."""
    assert gold.frozen(PAIRS) == KEPT["frozen"], "write version 3 rather than change version 2"
    for version, world in ((2, tiny_world_2), (1, tiny_world)):
        assert gold.agreement(PAIRS, world.utility)["value"] == pytest.approx(KEPT["agreement"][str(version)]["value"])
    assert len(PAIRS) == 200 and all(len(pair["ratings"]) == 3 for pair in PAIRS)
    assert sum("constant" in pair["sources"] for pair in PAIRS) >= 50
    assert KEPT["agreement"]["2"]["ci95"][0] > KEPT["agreement"]["1"]["ci95"][1]


def test_no_constant_and_no_template_comes_near_what_is_written_of_a_product() -> None:
    second, first = KEPT["worth"]["2"], KEPT["worth"]["1"]
    assert second["constant"]["value"] < second["templates"]["value"] < second["lines"] < second["informed"]
    assert second["constant"]["beats_lines"] < 0.5 < first["constant"]["beats_lines"]
    assert first["templates"]["value"] > first["lines"], "version 1 has them, and that is why there is a second"


def test_templates_of_a_runs_own_prompts_stand_beside_its_policies() -> None:
    runs = {run["seed"]: run for run in keep.load("tiny-world")["runs"]}
    found = KEPT["on_test_prompts"]
    assert [one["seed"] for one in found] == list(runs)
    for one in found:
        assert one["constant"]["value"] < runs[one["seed"]]["sft"]["judge"] < one["template"]
        assert (one["pairs"], one["prompts"]) == (24, 180)
    prompts = tiny_world_2.prepare(seed=3, lines=20)["prompts"]["test"][:180]
    constant = next(one for one in found if one["seed"] == 3)["constant"]
    assert fmean(utility(row["prompt"] + constant["text"]) for row in prompts) == pytest.approx(constant["value"], 1e-4)
    few = gold.on_test_prompts(3, 2)
    assert few["aspects"] == few["pairs"] == few["of_one_product"] == 2
    assert few["template"] > 0.8, "two products, whose facts it may state"


def test_intervals_by_what_a_prompt_names_are_wider_than_by_its_spelling(tmp_path: Path) -> None:
    """The judge says the same of all spellings, so that they tell no more than one."""
    prompts = [one for pair in pairs.NAMED[:6] for one in gold.subjects(*pair)]
    worth = {one: float(place) for place, pair in enumerate(pairs.NAMED[:6]) for one in gold.subjects(*pair)}
    rows = [{"prompt": one, "sft": {"judge": 2.5}, "ppo": {"judge": worth[one]}} for one in prompts]
    (tmp_path / "eval").mkdir()
    (tmp_path / "data" / "prompts").mkdir(parents=True)
    (tmp_path / "summary.json").write_text('{"seed": 3}')
    over = {"judge": [[2.5] * 48, [worth[one] for one in prompts]]}
    (tmp_path / "eval" / "over_training.json").write_text(json.dumps(over))
    for path in ("eval/samples.jsonl", "data/prompts/validation.jsonl"):
        (tmp_path / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = pairs.by_pair(tmp_path)
    assert found["win rate"]["by_pair"]["value"] == 0.5 and found["judge's gain"]["by_pair"]["value"] == 0
    for each in found.values():
        assert (each["by_prompt"]["groups"], each["by_pair"]["groups"]) == (48, 6)
        prompt, pair = (high - low for low, high in (each[by]["ci95"] for by in ("by_prompt", "by_pair")))
        assert pair > 1.8 * prompt
    row = pairs.pairs_table([{"command": "a", "by_pair": found}] * 2).splitlines()[3]
    assert row.startswith("| judge's gain | 0.00 | ") and row.endswith(" (6) | 0 of 2 |")


def test_what_a_remark_earns() -> None:
    found = explain(f"the phone's battery {TRUE}, and i love it.")
    assert found["told"] == 1.5 and found["backed"] == pytest.approx(0.4) and found["utility"] > 1.5
    assert math.fsum(found[part] for part in PARTS) == found["utility"]
    other = next(said[1] for (product, aspect), said in FACTS.items() if aspect == "battery" and said[1] != TRUE)
    assert utility(f"the phone's battery {other}.") < utility("the phone's battery is great.") < found["utility"]


def test_form_costs_a_bounded_amount() -> None:
    text = f"the phone's battery {TRUE}, and i love it."
    assert utility(text.upper()) == pytest.approx(utility(text) - 0.2)
    assert explain(f"{text} {' '.join('xq' + 'v' * n for n in range(12))}")["grammar"] == -1.5
    for text in ("", " ", "\n", "the phone", "zqx " * 500, "\U0001f600"):
        assert math.isfinite(utility(text))


def test_the_world_is_another_and_the_openings_are_the_same() -> None:
    first, second = (world.prepare(seed=3, lines=40) for world in (tiny_world, tiny_world_2))
    assert first["prompts"] == second["prompts"] and first["lines"] != second["lines"]
    assert second == tiny_world_2.prepare(seed=3, lines=40)
