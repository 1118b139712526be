"""From a PPO checkpoint's card to its models. The Hub is simulated by folders; the e2e tests use a real one."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client import refs
from rlhf_zoo.hub.client.pull import PulledRevision
from rlhf_zoo.publishing.catalog.lineage import Lineage, find_lineage
from rlhf_zoo.runs.models import folder_lineage
from rlhf_zoo.runs.record import StageRecord

CARD: dict[str, Any] = {
    "stage": "ppo",
    "simulated": True,
    "parents": {
        "sft": {"repo": "local/x-sft", "commit": "a" * 40},
        "reward": {"repo": "local/x-reward", "commit": None},
        "data": {"repo": "local/x", "commit": "b" * 40},
    },
    "prompts": ["one", 2, "three"],
    "settings": {"temperature": 0.9, "response_length": "many"},
    "evaluation": {"ppo": {"kl": {"value": 4.2, "n": 540}}},
}


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """ask(card, sft=…) -> Lineage, on a Hub that has the repositories local/x-*."""
    known = {"local/x-ppo", f"local/x-sft@{'a' * 40}", "local/x-reward", "local/other"}

    def pull(name: str) -> Path:
        if name not in known:
            raise ZooError(f"There is no repository {name!r}.")
        folder = tmp_path / name.replace("/", "_")
        folder.mkdir(exist_ok=True)
        return folder

    def fetch(name: str, **_: Any) -> PulledRevision:
        repo, _at, revision = name.partition("@")
        return PulledRevision(repo, revision or "main", "c", pull(name), [])

    monkeypatch.setattr(refs, "fetch", fetch)

    def run(card: Any, ppo: str = "local/x-ppo", **flags: str) -> Lineage:
        if card is not None:
            text = card if isinstance(card, str) else json.dumps(card)
            (pull(ppo) / "rlhf_card.json").write_text(text)
        return find_lineage(ppo, **flags)

    return run


def test_lineage_finds_parents_at_their_commits(ask) -> None:
    lineage = ask(CARD)
    assert lineage.sft.name == f"local/x-sft@{'a' * 40}" and lineage.sft.path.is_dir()
    assert lineage.reward.name == "local/x-reward"
    assert lineage.prompts == ["one", "three"] and lineage.simulated and lineage.kl["value"] == 4.2
    assert lineage.setting("temperature", 1.0) == 0.9
    assert lineage.setting("response_length", 32) == 32


def test_lineage_finds_reward_models_of_ensemble(ask, tmp_path: Path) -> None:
    """From a Hub or beside the run of a folder; a card reaches nowhere else on this machine."""
    other = {"repo": "local/other", "commit": None}
    settings = {"reward_ensemble": "worst", "reward_ensemble_lambda": "much", "score_centering": "none"}
    card = {**CARD, "parents": {**CARD["parents"], "reward_2": other}, "settings": settings}
    lineage = ask(card)
    assert [source.name for source in lineage.rewards] == ["local/x-reward", "local/other"]
    assert lineage.reward_load_kwargs == {"ensemble": "worst", "penalty": None, "center": False, "scale": True}
    assert ask(card, reward="local/other").rewards == (lineage.rewards[1],)
    for folder in ("ensemble/seed-2/reward", "../secret", 3):
        parents = {**CARD["parents"], "reward_2": {"repo": None, "commit": None, "folder": folder}}
        with pytest.raises(ZooError, match="The reward model 2 of local/x-ppo was never published"):
            ask({**CARD, "parents": parents})
    record = StageRecord(tmp_path / "run/ensemble/seed-2/reward")
    checkpoint = record.checkpoint_path(4)
    checkpoint.mkdir(parents=True)
    record.mark_complete(checkpoint)
    record.write(stage="reward", status="finished")
    parents["reward_2"]["folder"] = "ensemble/seed-2/reward"
    for place in ("run/ppo", "run/ppo/checkpoint-9"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rlhf_card.json").write_text(json.dumps({**CARD, "parents": parents}))
        assert find_lineage(str(tmp_path / place)).rewards[1].path == checkpoint


def test_folder_of_run_and_of_stage_opens_chosen_checkpoint(ask, tmp_path: Path) -> None:
    """The card of a run on this machine is in the folder of its stage, and not in the checkpoint."""
    record = StageRecord(tmp_path / "run/ppo")
    record.write(stage="ppo", status="running")
    with pytest.raises(ZooError, match="run/ppo is the folder of a stage, but its chosen checkpoint is missing"):
        find_lineage(str(tmp_path / "run"))
    for step in (2, 3):
        record.checkpoint_path(step).mkdir(parents=True)
        record.mark_complete(record.checkpoint_path(step))
    (record.path / "rlhf_card.json").write_text(json.dumps(CARD))
    ask(CARD)  # downloads the parents
    for place in ("run", "run/ppo"):
        lineage = find_lineage(str(tmp_path / place))
        assert lineage.ppo.path == record.checkpoint_path(3), "the last one, until one is chosen"
        assert lineage.ppo.name == str(record.path) and lineage.prompts == ["one", "three"]
    record.write(stage="ppo", status="finished", chosen={"step": 2})
    assert find_lineage(str(record.path)).ppo.path == record.checkpoint_path(2)
    record.remove_checkpoint(record.checkpoint_path(2))
    (record.path / "config.json").write_text("{}")
    assert find_lineage(str(record.path)).ppo.path == record.path, "a pulled repository with a run.json"


@pytest.mark.attack
def test_own_run_finds_its_local_base_and_a_strangers_does_not(ask, tmp_path: Path) -> None:
    """PPO straight from a local model, such as an unpacked GGUF file: no card names its path, but the record does."""
    base = tmp_path / "chat.gguf"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"weights")
    parent = {"repo": None, "commit": None, **folder_lineage(base)}
    record = StageRecord(tmp_path / "run/ppo")
    record.checkpoint_path(2).mkdir(parents=True)
    record.mark_complete(record.checkpoint_path(2))
    record.write(stage="ppo", status="finished", parents={"sft": {**parent, "path": str(base)}})
    (record.path / "rlhf_card.json").write_text(json.dumps({"stage": "ppo", "parents": {"sft": parent}}))
    assert find_lineage(str(tmp_path / "run")).sft.path == base
    written = json.loads(record.run_file.read_text())
    record.run_file.write_text(json.dumps({**written, "signature": "0" * 64}))
    with pytest.raises(ZooError, match="was never published: name a copy of it with --sft"):
        find_lineage(str(tmp_path / "run"))
    record.run_file.write_text(json.dumps(written))
    (base / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ZooError, match="was never published: name a copy of it with --sft"):
        find_lineage(str(tmp_path / "run"))


def test_lineage_flags_override_card_and_accept_folders(ask, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    lineage = ask(CARD, sft=str(tmp_path / "mine"), reward="local/other")
    assert lineage.sft.path == tmp_path / "mine" and lineage.reward.name == "local/other"


@pytest.mark.attack
def test_lineage_ignores_local_folders_named_by_card(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "other").mkdir(parents=True)
    for role in ("sft", "reward"):
        parents = {**CARD["parents"], role: {"repo": "local/other", "commit": None}}
        source = getattr(ask({**CARD, "parents": parents}), role)
        assert (source.repo, source.path) == ("local/other", tmp_path / "local_other"), "that of the Hub"
    for commit in ({"a": 1}, ["x"], "../../..", "x" * 10_000, 5, True, "a\nb", ""):
        parents = {**CARD["parents"], "sft": {"repo": "local/x-sft", "commit": commit}}
        with pytest.raises(ZooError, match=r"The SFT (policy|model) of local/x-ppo has the invalid commit "):
            ask({**CARD, "parents": parents})


def test_lineage_has_none_for_missing_fields(ask) -> None:
    assert ask(CARD | {"parents": {"sft": CARD["parents"]["sft"]}}).reward is None
    lineage = ask(None, sft="local/other", ppo="local/other")
    assert lineage.reward is None and lineage.card == {} and lineage.prompts == [] and lineage.kl is None
    lineage = ask({"parents": [], "prompts": {"a": 1}, "settings": 3, "evaluation": {"ppo": 1}}, sft="local/other")
    assert lineage.prompts == [] and lineage.kl is None and lineage.setting("temperature", 1.0) == 1.0


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (None, "does not name the SFT model it started from: name it with --sft"),
        ({"stage": "sft"}, "is a checkpoint of the stage sft, not of PPO"),
        ("{", "local/x-ppo has an rlhf_card.json that is not JSON: publish its card again"),
        ("[]", "is not a JSON object"),
        (CARD | {"parents": {"sft": {"repo": None, "commit": None}}}, "SFT policy .* was never published: .* --sft"),
        (
            CARD | {"parents": {"sft": {"repo": "/etc/x", "commit": None}}},
            "SFT policy .* was never published: .* --sft",
        ),
        (CARD | {"parents": {"sft": {"repo": "local/gone", "commit": None}}}, "cannot be fetched .*gone.* with --sft"),
        (
            CARD | {"parents": CARD["parents"] | {"reward": {"repo": "local/gone", "commit": None}}},
            "reward model .* with --reward",
        ),
    ],
)
def test_lineage_rejects_cards_without_usable_parents(ask, card: Any, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        ask(card)
