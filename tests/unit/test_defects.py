"""Defects that a corpus detects: those of tiny-world, their shares, and invalid detectors."""

from types import SimpleNamespace

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.defects import corpus_defects, defect_figures
from rlhf_zoo.runs.corpora.tiny_world_2 import FACTS
from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.settings.parse import recipe_config

DEFECTS = corpus_defects(recipe_config(load_recipe("tiny-world"), {}))
TRUE = FACTS["radio", "battery"][1]
FALSE = next(facts[1] for (product, aspect), facts in FACTS.items() if aspect == "battery" and facts[1] != TRUE)


@pytest.mark.parametrize(
    ("completion", "false", "doubled"),
    [
        (f" {TRUE}.", False, False),
        (f" {FALSE}.", True, False),
        (f" {TRUE}, but it {TRUE}.", False, True),
        (f" {TRUE} {TRUE}.", False, True),
        (" is superb superb.", False, False),
        (" is superb, and it is superb.", False, True),
        (" is superb.", False, False),
        ("", False, False),
    ],
)
def test_tiny_world_detects_its_defects(completion: str, false: bool, doubled: bool) -> None:
    detected = {name: find(["the radio's battery"], [completion]) for name, find in DEFECTS.items()}
    assert detected == {"false statements": [false], "doubled clauses": [doubled]}


def test_other_recipes_have_no_defects() -> None:
    assert corpus_defects(recipe_config(load_recipe("tiny-sums"), {})) == {}
    assert corpus_defects(recipe_config(load_recipe("smollm2-ifeval"), {})) == {}


def comparison(sft: list[str], ppo: list[str]) -> SimpleNamespace:
    measurements = {"sft": SimpleNamespace(completions=sft), "ppo": SimpleNamespace(completions=ppo)}
    groups = [index // 2 for index in range(len(sft))]
    prompts = [f"prompt {group}" for group in groups]
    return SimpleNamespace(prompts=prompts, measurements=measurements, groups=groups, seed=1)


def test_defect_figures_give_shares_and_difference() -> None:
    measured = comparison(["x"] * 20 + ["y"] * 20, ["y"] * 30 + ["x"] * 10)
    figures = defect_figures({"a y": lambda _, texts: [text == "y" for text in texts]}, measured)["a y"]  # type: ignore[arg-type]
    assert [figures[key]["value"] for key in ("sft", "ppo", "difference")] == [0.5, 0.75, 0.25]
    assert figures["sft"]["ci95"][0] > 0.2 and figures["difference"]["n"] == 40


@pytest.mark.parametrize("values", [[True], [0.5, 0.0], ["yes", "no"]])
def test_defect_figures_reject_invalid_detector_values(values: list[object]) -> None:
    with pytest.raises(ZooError, match="The defect 'odd'"):
        defect_figures({"odd": lambda *_: values}, comparison(["x", "x"], ["x", "x"]))  # type: ignore[arg-type, return-value, dict-item]
