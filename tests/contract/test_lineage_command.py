"""`rlhf-zoo lineage` against the embedded Hub and in run directories."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from thread_hub import ThreadHub
from zoo_process import free_port

from rlhf_zoo.cli import lineage as command
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.publishing.catalog.family import node_lines
from rlhf_zoo.publishing.catalog.lineage import find_family
from rlhf_zoo.runs.record import StageRecord, fingerprint

HOSTILE = "toy\x1b[31m\x9b31m\u202e [red]:warning:"


def publish(hub: ThreadHub, name: str, card: Any, *tags: str) -> dict[str, Any]:
    """Pushes local/NAME with this card (None: without one); returns its reference for other cards."""
    repo = f"local/{name}"
    file, text = ("notes.md", "# Notes") if card is None else ("rlhf_card.json", card)
    commit = hub.push(repo, {file: text if isinstance(text, str) else json.dumps(text)})
    for tag in tags:
        hub.api().create_tag(repo, tag=tag, revision=commit)
    return {"repo": repo, "commit": commit}


def card(stage: str, step: int, parents: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"stage": stage, "recipe": HOSTILE, "step": step, "parents": parents, **fields}


@pytest.fixture(scope="module")
def published(module_hub: ThreadHub) -> ThreadHub:
    """local/x-ppo with two commits and all its parents; local/y-ppo, most of whose parents are missing."""
    hub = module_hub
    data = {"repo": "local/x", "commit": hub.make("x", {"a.jsonl": "{}"}, kind="dataset")}
    sft = publish(hub, "x-sft", card("sft", 9, {"data": data}, checkpoints=[{"step": 9, "loss": 1.5}]), "step-000009")
    reward_card = card("reward", 6, {"sft": sft, "data": data}, reward_model={"accuracy": 0.75})
    parents = {"sft": sft, "reward": publish(hub, "x-reward", reward_card, "step-000006"), "data": data}
    publish(hub, "x-sft", card("sft", 18, {"data": data}), "step-000018")  # newer than the pinned commit
    publish(hub, "x-ppo", card("ppo", 20, parents, reward=0.5, kl=1.0), "step-000020")
    publish(hub, "x-ppo", card("ppo", 40, parents, reward=1.25, kl=3.5), "step-000040", "best")
    publish(hub, "invalid", "{")
    broken = {
        "sft": {"repo": "local/x-sft", "commit": "0" * 40},
        "reward": {"repo": "local/gone", "commit": "1" * 40},
        "data": {"repo": None, "commit": None},
        "base": publish(hub, "bare", None),
    }
    publish(hub, "y-ppo", card("ppo", 1, broken))
    publish(hub, "z-ppo", card("ppo", 1, {"sft": {"repo": "local/invalid", "commit": None}}))
    return hub


@pytest.fixture
def lineage(published: ThreadHub, at_module_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the command in this process; returns its stdout."""
    monkeypatch.setattr(command, "open_hub", lambda *_, **__: contextlib.nullcontext(DEFAULT_HUB))
    return lambda *arguments: CliRunner().invoke(command.lineage, arguments, catch_exceptions=False).stdout


def test_lineage_prints_tree_at_pinned_commits(lineage):
    printed = lineage("local/x-ppo@step-20")
    recipe = "toy\ufffd[31m\ufffd31m\ufffd [red]:warning:"
    printed_lines = [" ".join(line.replace("│", "").split()) for line in printed.splitlines()]
    nodes = [line.partition(" (")[0] for line in printed_lines if " (" in line and not line.startswith("stage")]
    assert nodes == [
        "this model: local/x-ppo @ step-000020",
        "├── SFT policy: local/x-sft @ step-000009",
        "└── data set: local/x",
        "├── reward model: local/x-reward @ step-000006",
        "├── SFT policy: local/x-sft @ step-000009",
        "└── data set: local/x",
        "└── data set: local/x",
    ]
    assert f"stage ppo, recipe {recipe}, step 20, reward 0.5, KL (nats) 1" in printed_lines
    assert f"stage reward, recipe {recipe}, step 6, held-out accuracy 0.75" in printed_lines
    assert printed_lines.count("drawn above") == 1
    assert not {"\x1b", "\x9b", "\u202e"} & set(printed)


def test_lineage_json_matches_tree(lineage, published):
    printed = lineage("local/x-ppo", "--json")
    document = json.loads(printed)
    assert (document["repo"], document["tags"], document["step"]) == ("local/x-ppo", ["best", "step-000040"], 40)
    assert document["commit"] == published.api().model_info("local/x-ppo").sha
    assert document["parents"][0]["step"] == 9 and document["parents"][0]["tags"] == ["step-000009"]
    assert not {"\x1b", "\x9b", "\u202e"} & set(printed)


def test_lineage_marks_missing_parents_in_tree(lineage):
    printed = lineage("local/y-ppo")
    for text in (
        "SFT policy: local/x-sft (0000000000)", f"has no revision '{'0' * 40}'; it has main, step-000009",
        "reward model: local/gone (1111111111)", "does not exist, or this token may not read it",
        "data set: never published", "base model: local/bare", "no card of rlhf-zoo",
    ):  # fmt: skip
        assert text in printed
    printed = lineage("local/z-ppo")
    assert "has an rlhf_card.json that is not JSON" in printed and "(no commit)" not in printed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("local/none", r"^local/none on http.* does not exist, or this token may not read it: check the name"),
        (
            "local/x-ppo@step-30",
            "has no revision 'step-30'; it has main, best, step-000020, step-000040: check the name",
        ),
        ("a/b/c", r"'a/b/c' is neither a repository nor a folder: write NAMESPACE/NAME or NAMESPACE/NAME@TAG\."),
        ("local/invalid", r"local/invalid on .* has an rlhf_card.json that is not JSON: check the name"),
    ],
)
def test_lineage_rejects_unreadable_root(lineage, name, message):
    with pytest.raises(ZooError, match=message):
        lineage(name)


def test_lineage_reports_unreachable_hub(lineage, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ZooError, match=r"^local/x on http://127\.0\.0\.1:.* cannot be read"):
        lineage("local/x")


# Folders


def write_stage(run: Path, name: str, **fields: Any) -> None:
    StageRecord(run / name).write(
        stage=name, recipe="toy", status="finished", resolved={}, fingerprint=fingerprint({name: 1}), **fields
    )
    StageRecord(run / name).append_metrics({"step": 3, "loss": 1.0, "objective/score": 0.5, "objective/kl": 2.0})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was never published."""
    references = {
        name: {"repo": None, "commit": None, "fingerprint": fingerprint({name: 1})} for name in ("sft", "data")
    }
    write_stage(tmp_path, "data")
    write_stage(tmp_path, "sft", parents={}, dataset=references["data"])
    write_stage(tmp_path, "ppo", parents={"sft": references["sft"]}, dataset=references["data"])
    return tmp_path


def test_lineage_follows_unpublished_run_on_disk(run):
    root = find_family(str(run))
    assert node_lines(root)[0] == f"this model: {run / 'ppo'}"
    assert node_lines(root)[1] == "stage ppo, recipe toy, step 3, reward 0.5, KL (nats) 2"
    sft, data = root.parents
    assert sft.entry.folder == run / "sft" and node_lines(sft)[1].startswith("stage sft, recipe toy, step 3")
    assert data.entry.folder == run / "data" and node_lines(data) == [f"data set: {run / 'data'}"]
    assert root.to_json()["folder"] == str(run / "ppo") and sft.parents[0].entry.folder == run / "data"


def test_lineage_treats_retrained_stage_as_another_model(run):
    StageRecord(run / "sft").write(fingerprint="another")
    assert node_lines(find_family(str(run / "ppo")).parents[0]) == ["SFT policy: never published"]


def test_lineage_ignores_local_paths_in_pulled_card(run):
    """Only a run's own record is followed on disk, because a downloaded card is not trusted."""
    pulled = run / "pulled"
    pulled.mkdir()
    parents = {"sft": {"repo": None, "commit": None, "folder": str(run / "sft"), "path": str(run / "sft")}}
    (pulled / "rlhf_card.json").write_text(json.dumps(card("ppo", 1, parents)))
    assert [node_lines(parent) for parent in find_family(str(pulled)).parents] == [["SFT policy: never published"]]


def test_lineage_rejects_folder_without_run_or_card(tmp_path):
    with pytest.raises(ZooError, match=r"holds neither a run nor rlhf_card\.json"):
        find_family(str(tmp_path))
