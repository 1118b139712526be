"""The head of the comparison page: its verdict is the one that the card gives."""

import re
from pathlib import Path

from rlhf_zoo.app.page.head import header_html
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
