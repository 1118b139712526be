"""What scores a completion later is what PPO saw: the same type, the same loader, the same rendering."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from toy_models import save_toys
from transformers import AutoModelForSequenceClassification

from rlhf_zoo.app.engine import Comparison
from rlhf_zoo.app.page import models as page_models
from rlhf_zoo.app.page.compare import _notes_html
from rlhf_zoo.hub.client.refs import Checkpoint
from rlhf_zoo.modeling.chat import display_text
from rlhf_zoo.pipeline.experiments import ensemble
from rlhf_zoo.pipeline.policy_eval import _published_labeled_arguments
from rlhf_zoo.publishing.catalog.lineage import Lineage
from rlhf_zoo.runs.record import StageRecord

ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How is it?"}]


def test_page_loads_reward_model_as_ppo_did(tmp_path: Path) -> None:
    toys = save_toys(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(toys.reward, dtype=torch.bfloat16)
    model.save_pretrained(toys.reward)
    read: list[Any] = []
    for loader in (None, "transformers:AutoModelForSequenceClassification"):
        made = Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=toys.reward, loader=loader, device="cpu")
        read.append(made._reward)
    assert [one.model.dtype for one in read] == [torch.bfloat16] * 2


@pytest.mark.parametrize("recorded", ["transformers:AutoModelForSequenceClassification", None])
def test_reward_model_loader_is_taken_only_from_local_record(
    recorded: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run in whose directory a card lies names it too: a card may have been put there."""
    toys, here = save_toys(tmp_path / "ppo"), recorded is not None
    StageRecord(toys.ppo).write(stage="ppo", resolved={"reward_model_loader": recorded})
    card = {"settings": {"reward_model_loader": "transformers:AutoModelForSequenceClassification"}}
    found = Lineage(Checkpoint(str(toys.ppo), toys.ppo), Checkpoint("", toys.sft), Checkpoint("", toys.reward), card)
    monkeypatch.setattr(page_models, "find_lineage", lambda *_, **__: found)
    monkeypatch.setattr(page_models, "_find_timeline_runs", lambda *_, **__: ([], None))
    page = page_models.PageModels.load(str(toys.ppo))
    assert page.comparison.has_reward_model == here
    assert ("downloaded code never runs" in _notes_html(page)) != here


def test_judge_scores_conversations_as_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = {"completion": "Fine.", "ended": True, "judge": 1.0, "kl": 0.0}
    row = {"prompt": display_text(ASKED), "sample": 0, "sft": side, "ppo": side}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "evaluation.json").write_text(
        '{"judge": {"name": "gold"}, "prompts": 1, "rows": 1, "samples_per_prompt": 1}'
    )
    parents = {"sft": {"fingerprint": "1"}}
    record = SimpleNamespace(path=tmp_path, read=lambda: {"status": "finished", "parents": parents})
    run = SimpleNamespace(
        checkpoint=lambda _: SimpleNamespace(path=tmp_path, lineage=parents["sft"]),
        record=lambda _: record,
        shared=SimpleNamespace(evaluation=SimpleNamespace(group=None)),
    )
    monkeypatch.setattr(ensemble, "evaluation_rows", lambda *_, **__: Dataset.from_dict({"prompt": [ASKED]}))
    monkeypatch.setattr(ensemble, "stage_source", lambda *_: None)
    texts, judge = ensemble._read_texts(run)  # type: ignore[arg-type]
    assert (judge, texts["ppo"].groups) == ("gold", [0])
    assert texts["ppo"].texts == [[*ASKED, {"role": "assistant", "content": "Fine."}]]


def test_labels_of_card_accept_only_hub_data_sets() -> None:
    def labels(**keys: Any) -> Any:
        card = {"evaluation": {"labeled": keys}}
        return _published_labeled_arguments(Lineage(Checkpoint("", Path()), Checkpoint("", Path()), None, card))

    assert labels(dataset_name="maker/reviews", dataset_config=None).dataset_name == "maker/reviews"
    assert labels(dataset_name="/etc").dataset_name is None


def test_display_text_shows_system_turns_and_labels_several_turns() -> None:
    turns = [*ASKED, {"role": "assistant", "content": "Good."}, {"role": "user", "content": "And now?"}]
    assert display_text(ASKED[1:]) == "How is it?"
    assert display_text(ASKED) == "System: Be kind.\n\nUser: How is it?"
    assert display_text(turns) == "System: Be kind.\n\nUser: How is it?\n\nAssistant: Good.\n\nUser: And now?"
    assert display_text("a text \n") == "a text \n"
