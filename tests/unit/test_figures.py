"""benchmarks/evidence.py: the share of the possible gain, and rows that some recipes have; what is kept of runs:
tests/contract/test_evidence.py."""

import pytest
from card_run import reward_report
from figures import gain, keep, tables

from rlhf_zoo.errors import ZooError

RECIPES = ("remarks-count", "arguments")
REMARKS = keep.load("product-remarks")["runs"][0]


@pytest.mark.parametrize(
    ("sft", "checkpoints", "recommended", "best_step", "shares"),
    [
        (-0.5, {10: 1.0, 20: 1.5, 30: 0.5}, 10, 20, (0.75, 0.5)),
        (0.0, {10: 1.0, 20: -3.0}, None, 10, (0, -3)),  # nothing is recommended: nothing is gained
        (1.0, {10: 0.5, 20: 3.0}, 10, 20, (-0.25, 1)),
        (1.0, {10: 1.0, 20: 0.0}, 10, 10, (None, None)),  # none above SFT
        (0.0, {20: 1.0, 10: 1.0}, 20, 10, (1, 1)),  # of equal ones the first
    ],
)
def test_the_share_of_the_gain(sft, checkpoints, recommended, best_step, shares):
    found = gain.share_of_gain(sft, checkpoints, recommended)
    assert (found.best_step, (found.share, found.last_share)) == (best_step, shares)


def test_a_recommended_step_must_have_been_measured():
    with pytest.raises(ZooError, match="Step 30 is recommended and was not measured"):
        gain.share_of_gain(0.0, {10: 1.0}, 30)


def kept_as(monkeypatch, *runs):
    monkeypatch.setattr(keep, "load", lambda name: {"runs": list(runs)} if name in RECIPES else {})


def test_of_a_rule_that_checks_answers_the_table_has_both_readings_and_no_reward_model(monkeypatch):
    def right(sft, ppo):
        return {side: {"accuracy": {"value": value}} for side, value in (("sft", sft), ("ppo", ppo))}

    answers = {"strict": right(0.8, 0.9), "lenient": right(0.85, 0.9)}
    run = {**REMARKS, "reward_model": None, "seed": 1}
    run["judges"] = {"rule:count": {**run["judges"]["remarks"], "answers": answers}}
    kept_as(monkeypatch, run, {**run, "seed": 2}, {**run, "seed": 3})
    shown = tables.TABLES["remarks-count"]()
    assert "| right answers, read strict | 0.800 | 0.900 |" in shown
    assert "| right answers, read lenient | 0.850 | 0.900 |" in shown
    assert "Reward model" not in shown and "win rate over SFT, by the rule:count" in shown


def test_a_reward_model_is_read_beside_the_longer_text(monkeypatch):
    report = reward_report()
    pairs = {"value": 0.25, "ci95": [0.2, 0.3], "n": 40, "gold": None}
    report["hard"] = {"chosen_longer": {**pairs, "value": 0.9}, "chosen_shorter": pairs, "same_length": None}
    found = keep.reward_model(report)
    assert found["accuracy"] == report["accuracy"] and found["longer_wins"] == report["length"]["longer_wins"]
    kept_as(monkeypatch, *({**REMARKS, "reward_model": found, "seed": seed} for seed in (1, 2, 3)))
    shown = tables.TABLES["arguments-length"]()
    rule = f"{report['length']['longer_wins']['value']:.3f}"
    assert f"| all | {report['n']} | {report['accuracy']:.3f} | {rule} |" in shown
    assert "| the chosen one is the longer | 40 | 0.900 | 1 |" in shown
    assert "| the chosen one is the shorter | 40 | 0.250 | 0 |" in shown and "within a tenth" not in shown
