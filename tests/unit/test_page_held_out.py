"""Held-out prompts for a page: from the data of a run, which split, and what is left out."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from thread_hub import ThreadHub

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


def test_held_out_prompts_prefer_validation_then_test_then_card(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": 4}, {"prompt": "a"}, {"prompt": "long"}, {"prompt": ["chat"]}, 3]
    both = run(tmp_path / "both", validation=rows, test=[{"prompt": "t"}])
    assert held_out.read_held_out_prompts(lineage(both), taken) == ["a", "b"]
    assert held_out.read_held_out_prompts(lineage(both / "checkpoint-4"), taken) == ["of the card"], "no such folder"
    (both / "checkpoint-4").mkdir()
    assert held_out.read_held_out_prompts(lineage(both / "checkpoint-4"), taken) == ["a", "b"]
    test = run(tmp_path / "test", test=[{"prompt": "t"}])
    assert held_out.read_held_out_prompts(lineage(test), taken) == ["t"]
    assert held_out.read_held_out_prompts(lineage(run(tmp_path / "none")), taken) == ["of the card"]
    broken = run(tmp_path / "broken", validation=[])
    (tmp_path / "broken" / "data" / "prompts" / "validation.jsonl").write_text("{")
    assert held_out.read_held_out_prompts(lineage(broken), taken) == ["of the card"]


def test_held_out_prompts_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "MAX_PROMPTS", 3)
    folder = run(tmp_path, validation=[{"prompt": f"p{k}"} for k in range(9)])
    asked: list[str] = []
    assert held_out.read_held_out_prompts(lineage(folder), asked.append) == ["p0", "p1", "p2"]
    assert len(asked) == 3, "what is not kept is not tokenised"


#: What a stranger's card would have the page read: a column of a file outside of any data.
SECRET = {"dataset_config": "../secret", "dataset_test_split": "x", "columns": {"prompt": "password"}}


@pytest.mark.attack
@pytest.mark.parametrize("configuration", ["../secret", "{here}/secret", "../runs/../secret"])
@pytest.mark.parametrize("place", ["repository", "folder"])
def test_card_cannot_read_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configuration: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "secret", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "secret" / "x.jsonl").write_text('{"password": "hunter2"}\n')
    settings = {**SECRET, "dataset_config": configuration.format(here=tmp_path)}
    card = {"parents": {"data": {"repo": "runs", "commit": "main"}}, "settings": settings, **CARD}
    source = Checkpoint("evil/ppo@best", tmp_path / "runs", "evil/ppo", "a" * 40)
    if place == "folder":
        StageRecord(tmp_path / "ppo").write(stage="ppo", recipe="x")
        source = Checkpoint(str(tmp_path / "ppo"), tmp_path / "ppo")
    assert held_out.read_held_out_prompts(Lineage(source, source, None, card), taken) == ["of the card"]


@pytest.mark.attack
def test_public_page_does_not_show_private_prompts(
    tmp_path: Path, thread_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card is its publisher's word, and may name a private data set of whoever serves the page."""
    api = thread_hub.api()
    for name in ("ppo", "own-ppo"):
        api.create_repo(f"local/{name}", private=name == "own-ppo")
    api.create_repo("local/secret", repo_type="dataset", private=True)
    monkeypatch.setattr(
        "rlhf_zoo.runs.data.sources.find_data",
        lambda *_: SimpleNamespace(load=lambda *_, **__: Dataset.from_list([{"prompt": "of the data"}])),
    )
    card = {"parents": {"data": {"repo": "local/secret", "commit": "main"}}, **CARD}

    def prompts(name: str) -> list[str]:
        source: Any = Checkpoint(name, tmp_path, *(() if Path(name).is_dir() else (name, "a" * 40)))
        return held_out.read_held_out_prompts(Lineage(source, source, None, card), taken)

    record = StageRecord(tmp_path / "ppo")
    record.write(stage="ppo", recipe="x")
    assert prompts("local/ppo") == ["of the card"]
    assert prompts("local/own-ppo") == ["of the data"]
    assert prompts(str(record.path)) == ["of the data"], "a run of this user's"
    record.run_file.write_text(json.dumps({**record.read(), "signature": "0" * 64}))
    assert prompts(str(record.path)) == ["of the card"], "a folder that was pulled"
    api.update_repo_settings("local/secret", repo_type="dataset", private=False)
    assert prompts("local/ppo") == prompts(str(record.path)) == ["of the data"]
