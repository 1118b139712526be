"""The planner's committed rates, its predictions beside what benchmarks/plan_check.py measured, and other models."""

import calibrate
import plan_check
import pytest
from figures import keep
from transformers import AutoConfig

from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline.plan.devices import parse_device
from rlhf_zoo.pipeline.plan.plan import parse_planner_keys
from rlhf_zoo.pipeline.plan.ppo import PPOModels, RewardModelSpec, ppo_plan
from rlhf_zoo.pipeline.plan.seconds import RATES_FILE
from rlhf_zoo.pipeline.plan.shapes import ModelShape


@pytest.mark.usefixtures("untraced")
def test_rates_file_matches_calibration():
    assert RATES_FILE.read_text(encoding="utf-8") == calibrate.render_rates(), "run `python benchmarks/calibrate.py`"


def test_planner_error_is_within_documented_bounds():
    kept = keep.load("plan")
    large = [row for row in kept["settings"] if row["measured_mib"] >= 1024]
    assert len(large) >= 12 and all(map(plan_check.is_within_tolerance, kept["settings"]))
    assert {row["setting"] for row in kept["settings"]} == set(plan_check.SETTINGS)
    page = (keep.FOLDER.parent / "plan.md").read_text(encoding="utf-8")
    for row in kept["settings"]:
        assert f"| {row['setting']} | {row['measured_mib']:,} | {row['predicted_mib']:,} |" in page


@pytest.mark.full
@pytest.mark.parametrize("row", keep.load("plan")["settings"], ids=lambda row: row["setting"])
def test_documented_predictions_are_of_this_planner(row):
    predicted = plan_check.predicted(plan_check.SETTINGS[row["setting"]])["predicted_mib"]
    assert predicted == pytest.approx(row["predicted_mib"], rel=0.01, abs=2)


@pytest.mark.parametrize(("kind", "known"), [("bloom", True), ("mamba", False)])
def test_other_model_kinds_are_planned_or_rejected_in_a_sentence(kind: str, known: bool) -> None:
    """One has no bound on its positions, one no attention."""
    shape = ModelShape(AutoConfig.for_model(kind, hidden_size=32, num_hidden_layers=2, vocab_size=100), "float32")
    models = PPOModels(
        policy=shape, reward_models=[RewardModelSpec(shape)], value_model=None, policy_is_unmodified=True
    )
    keys = parse_planner_keys("ppo", {}, where="here")
    if known:
        assert ppo_plan(keys, models, parse_device("cpu"), prompt_length=32).peak > 0
    else:
        with pytest.raises(ZooError, match=r"^A mamba has no attention, so the memory of its state is unknown\.$"):
            ppo_plan(keys, models, parse_device("cpu"), prompt_length=32)
