"""compare.json and the Space's variables: what a comparison Space shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.space.chosen import CHOSEN, Chosen, chosen

PPO = f"me/toy-ppo@{'1' * 40}"
WHOLE = {"schema": 1, "ppo": PPO, "sft": "me/toy-sft@main", "reward": None, "votes": "me/votes",
         "runs": ["me/b02-ppo", f"me/b0-ppo@{'2' * 40}"], "hardware": "cpu-basic"}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PPO", "SFT", "REWARD", "VOTES", "RUNS"):
        monkeypatch.delenv(f"RLHF_ZOO_{name}", raising=False)


def written(folder: Path, content: Any) -> Path:
    (folder / CHOSEN).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def test_the_file(tmp_path: Path) -> None:
    assert chosen(written(tmp_path, WHOLE)) == Chosen(
        PPO, "me/toy-sft@main", None, "me/votes", ("me/b02-ppo", f"me/b0-ppo@{'2' * 40}")
    )
    assert chosen(written(tmp_path, {**WHOLE, "votes": None, "runs": []})) == Chosen(
        PPO, "me/toy-sft@main", None, None, ()
    )


def test_a_file_from_before_votes_and_runs(tmp_path: Path) -> None:
    old = {key: value for key, value in WHOLE.items() if key not in ("votes", "runs")}
    assert chosen(written(tmp_path, old)) == Chosen(PPO, "me/toy-sft@main", None, None, None)
    assert chosen(written(tmp_path, {"ppo": "me/toy-ppo", "more": 1})) == Chosen("me/toy-ppo")
    with pytest.raises(ZooError, match="'votes' is no place for votes on a Hub: give NAMESPACE/NAME"):
        chosen(written(tmp_path, {**WHOLE, "votes": "votes"}))
    with pytest.raises(ZooError, match="Set the Space's variable RLHF_ZOO_PPO to a PPO checkpoint"):
        chosen(tmp_path / "none")


def test_variables_take_the_place_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ZOO_PPO", "you/other-ppo")
    assert chosen(written(tmp_path, WHOLE)) == chosen(written(tmp_path, b"{")) == Chosen("you/other-ppo")
    monkeypatch.setenv("RLHF_ZOO_SFT", "you/other-sft")
    monkeypatch.setenv("RLHF_ZOO_REWARD", "")
    monkeypatch.setenv("RLHF_ZOO_VOTES", "you/votes")
    monkeypatch.setenv("RLHF_ZOO_RUNS", " you/a-ppo, you/b-ppo@best ,")
    assert chosen(tmp_path / "none") == Chosen(
        "you/other-ppo", "you/other-sft", None, "you/votes", ("you/a-ppo", "you/b-ppo@best")
    )


def test_votes_and_runs_count_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, WHOLE)
    monkeypatch.setenv("RLHF_ZOO_SFT", "you/other-sft")
    assert chosen(tmp_path).sft == "me/toy-sft@main", "it counts with RLHF_ZOO_PPO alone"
    monkeypatch.setenv("RLHF_ZOO_VOTES", "you/votes")
    assert chosen(tmp_path).votes == "you/votes" and chosen(tmp_path).runs == tuple(WHOLE["runs"])
    monkeypatch.setenv("RLHF_ZOO_VOTES", "")
    monkeypatch.setenv("RLHF_ZOO_RUNS", "you/a-ppo")
    assert chosen(tmp_path).votes == "me/votes" and chosen(tmp_path).runs == ("you/a-ppo",)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VOTES", "votes", "'votes' is no place for votes on a Hub: give NAMESPACE/NAME."),
        ("VOTES", "me/votes@main", "'me/votes@main' is no place for votes"),
        ("RUNS", "me/a-ppo, ../b", "RLHF_ZOO_RUNS names '../b', which no Hub has: write NAMESPACE/NAME, with commas"),
    ],
)
def test_variables_that_name_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"RLHF_ZOO_{name}", value)
    with pytest.raises(ZooError) as refused:
        chosen(written(tmp_path, WHOLE))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON ("),
        (b"[" * 100_000, "is not JSON ("),
        (b"[]", "holds no object: deploy the Space again."),
        ({**WHOLE, "schema": 2}, "has the schema 2, and this rlhf-zoo reads up to 1: install a newer one."),
        ({**WHOLE, "schema": "1"}, "has '1' under 'schema', which `rlhf-zoo space deploy` does not write there"),
        ({**WHOLE, "ppo": "../toy-ppo"}, "has '../toy-ppo' under 'ppo', which"),
        ({**WHOLE, "sft": ["me/toy-sft"]}, "has ['me/toy-sft'] under 'sft', which"),
        ({**WHOLE, "reward": ""}, "has '' under 'reward', which"),
        ({**WHOLE, "runs": [None]}, "has [None] under 'runs', which"),
    ],
)
def test_a_broken_file(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ZooError) as refused:
        chosen(written(tmp_path, content))
    said = str(refused.value)
    assert said.startswith(f"{tmp_path / CHOSEN} {message}") and said.endswith("."), said
