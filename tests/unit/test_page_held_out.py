"""Held-out prompts for a page: from the data of a run, which split, and what is left out."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_zoo.app.page import held_out
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.refs import Checkpoint
from rlhf_zoo.publishing.catalog.lineage import Lineage
from rlhf_zoo.runs.record import StageRecord

CARD = {"prompts": ["of the card", "of the card", 7]}


def lineage(folder: Path) -> Lineage:
    source = Checkpoint(str(folder), folder)
    return Lineage(source, source, None, CARD)


def run(tmp_path: Path, **splits: Sequence[object]) -> Path:
    """A stage's folder, with the data of its run beside it."""
    StageRecord(tmp_path / "ppo").write(stage="ppo", recipe="x", status="finished")
    for split, rows in splits.items():
        path = tmp_path / "data" / "prompts" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "ppo"


def taken(prompt: str) -> None:
    if "long" in prompt:
        raise ZooError("too long")


def test_validation_comes_before_test_and_the_card_comes_last(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": 4}, {"prompt": "a"}, {"prompt": "long"}, {"prompt": ["chat"]}, 3]
    both = run(tmp_path / "both", validation=rows, test=[{"prompt": "t"}])
    assert held_out.held_out_prompts(lineage(both), taken) == ["a", "b"]
    assert held_out.held_out_prompts(lineage(both / "checkpoint-4"), taken) == ["of the card"], "no such folder"
    (both / "checkpoint-4").mkdir()
    assert held_out.held_out_prompts(lineage(both / "checkpoint-4"), taken) == ["a", "b"]
    test = run(tmp_path / "test", test=[{"prompt": "t"}])
    assert held_out.held_out_prompts(lineage(test), taken) == ["t"]
    assert held_out.held_out_prompts(lineage(run(tmp_path / "none")), taken) == ["of the card"]
    broken = run(tmp_path / "broken", validation=[])
    (tmp_path / "broken" / "data" / "prompts" / "validation.jsonl").write_text("{")
    assert held_out.held_out_prompts(lineage(broken), taken) == ["of the card"]


def test_a_page_keeps_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "MOST", 3)
    folder = run(tmp_path, validation=[{"prompt": f"p{k}"} for k in range(9)])
    asked: list[str] = []
    assert held_out.held_out_prompts(lineage(folder), asked.append) == ["p0", "p1", "p2"]
    assert len(asked) == 3, "what is not kept is not tokenised"
