"""benchmarks/evidence.py: rows of tables that only some recipes have. tests/contract/test_evidence.py has the rest."""

from card_run import reward_report
from figures import keep, tables

RECIPES = ("remarks-count", "arguments")
REMARKS = keep.load("product-remarks")["runs"][0]


def patch_kept_runs(monkeypatch, *runs):
    monkeypatch.setattr(keep, "load", lambda name: {"runs": list(runs)} if name in RECIPES else {})


def test_table_of_rule_shows_both_readings_and_no_reward_model(monkeypatch):
    def right(sft, ppo):
        return {side: {"accuracy": {"value": value}} for side, value in (("sft", sft), ("ppo", ppo))}

    answers = {"strict": right(0.8, 0.9), "lenient": right(0.85, 0.9)}
    run = {**REMARKS, "reward_model": None, "seed": 1}
    run["judges"] = {"rule:count": {**run["judges"]["remarks"], "answers": answers}}
    patch_kept_runs(monkeypatch, run, {**run, "seed": 2}, {**run, "seed": 3})
    shown = tables.TABLES["remarks-count"]()
    assert "| right answers, read strict | 0.800 | 0.900 |" in shown
    assert "| right answers, read lenient | 0.850 | 0.900 |" in shown
    assert "Reward model" not in shown and "win rate over SFT, by the rule:count" in shown


def test_kept_reward_model_includes_length_rule():
    report = reward_report()
    pairs = {"value": 0.25, "ci95": [0.2, 0.3], "n": 40, "gold": None}
    report["hard"] = {"chosen_longer": {**pairs, "value": 0.9}, "chosen_shorter": pairs, "same_length": None}
    kept = keep.reward_model_figures(report)
    assert kept["accuracy"] == report["accuracy"] and kept["longer_wins"] == report["length"]["longer_wins"]
