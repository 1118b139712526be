"""The head of the comparison page: its verdict is the one that the card gives."""

import re
from pathlib import Path

from rlhf_zoo.app.page.head import header_html, link_preview
from rlhf_zoo.hub.client.refs import Checkpoint
from rlhf_zoo.publishing.catalog.lineage import Lineage


def head_of(step: int) -> str:
    """The text of the head over a checkpoint of a run that was hacked in the end, after a healthy step 20."""
    over = {"verdict": "hacked", "step": 40, "at_recommended": {"verdict": "healthy", "step": 20}}
    card = {"stage": "ppo", "step": step, "evaluation": {"over_training": over, "recommended": 20}}
    model = Checkpoint("a/b", Path("b"))
    return re.sub(r"<[^>]+>", "", header_html(Lineage(model, model, None, card)))


def test_head_of_recommended_step_has_verdict_on_that_step() -> None:
    assert "Verdict: healthy · use step 20" in head_of(20)


def test_head_of_another_step_has_verdict_on_last_step() -> None:
    assert "Verdict at step 40: hacked · use step 20" in head_of(30)
    assert "Verdict: hacked · use step 20" in head_of(40)


def test_head_calls_base_model_by_its_name() -> None:
    win_rate = {"value": 0.5, "ci95": [0.4, 0.6], "n": 9}
    heads = []
    for name in ("sft", "maker/chat"):
        card = {"stage": "ppo", "settings": {"model_name_or_path": name}, "evaluation": {"win_rate": win_rate}}
        model = Checkpoint("a/b", Path("b"))
        lineage = Lineage(model, model, None, card)
        heads.append(re.sub(r"<[^>]+>", "", header_html(lineage)) + link_preview(lineage)[0])
    assert "win rate over SFT 0.5" in heads[0] and "SFT a/b" in heads[0] and heads[0].startswith("SFT and PPO, side")
    assert heads[0].endswith("b: SFT and PPO, side by side")
    assert "win rate over the base model 0.5" in heads[1] and "base model a/b" in heads[1] and "SFT" not in heads[1]
    assert heads[1].startswith("The base and PPO, side") and heads[1].endswith("b: the base and PPO, side by side")
