"""Whether the judge of an evaluation is a reward that PPO was trained on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_run import make_context, make_recipe

from rlhf_zoo.evaluation.judges.panel import Panel
from rlhf_zoo.evaluation.judges.scalar import FunctionJudge
from rlhf_zoo.evaluation.measure import find_reward_judges

ANSWERED, JUDGE = "toy_run:answered", "toy_run:judge"


@pytest.mark.parametrize(
    ("judge", "ppo", "is_reward"),
    [
        (JUDGE, {"reward_model_path": "reward"}, False),
        (JUDGE, {"reward_model_path": "reward", "reward_funcs": [ANSWERED]}, False),
        (JUDGE, {"reward_model_path": "reward", "reward_funcs": [ANSWERED, JUDGE]}, True),
        (JUDGE, {"reward_model_path": "reward", "reward_funcs": [ANSWERED, JUDGE], "reward_weights": [1, 1, 0]}, False),
        (JUDGE, {"reward_funcs": [JUDGE], "reward_weights": [0.5]}, True),
        ("classifier", {"reward_funcs": [ANSWERED]}, False),
    ],
)
def test_reward_judges_finds_judge_used_as_reward(tmp_path: Path, judge: str, ppo: dict, is_reward: bool) -> None:
    make_recipe(tmp_path, ppo={"reward_model_path": None, **ppo}, shared={"evaluation": {"judge": judge}})
    named: Any = SimpleNamespace(name=judge) if judge == "classifier" else FunctionJudge(judge, name="the judge")
    tools: Any = SimpleNamespace(panel=Panel([named]), rewards=None)
    assert find_reward_judges(make_context(tmp_path), tools) == ({"the judge"} if is_reward else frozenset())
