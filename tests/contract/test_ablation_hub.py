"""The runs of an ablation, found and named on the embedded Hub through the real client."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy
from hub_fixture import RunningHub, start_hub
from huggingface_hub import CommitOperationAdd

SFT = {"repo": "local/toy-sft", "commit": "a" * 40}
OWN = "local/toy-ppo"
# Prints {runs: [{listing, card, beta, private}], problem}, or {refused} for each list of names; null: they are found.
FIND = """
import json, sys
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub import ablation
repo, card, asked, limits = json.loads(sys.argv[1])
for name, value in limits.items():
    setattr(ablation, name, value)
for others in asked:
    try:
        found = ablation.find_runs(repo, card, others=others)
    except ZooError as error:
        print(json.dumps({"refused": str(error)}))
        continue
    runs = [{"listing": one.listing, "card": one.card, "beta": one.beta, "steps": one.steps, "private": one.private}
            for one in found.runs]
    print(json.dumps({"runs": runs, "problem": found.problem}))
"""
LISTING = """
import json, sys
from rlhf_zoo.hub.index import checkpoints
print(json.dumps(checkpoints(sys.argv[1])))
"""


def card(beta: float | None = None, **more: Any) -> dict[str, Any]:
    """Of a PPO run; beta None: the recipe does not set it."""
    settings = {"temperature": 0.9} | ({} if beta is None else {"kl_coef": beta})
    plain = {"stage": "ppo", "recipe": "toy", "seed": 1, "parents": {"sft": SFT, "reward": None}, "settings": settings}
    return {**plain, **more}


def publish(
    hub: RunningHub, repo: str, content: dict | bytes | None, *, steps: tuple[int, ...] = (10, 20), tag: str = "ppo"
) -> None:
    """A repository with a commit and a tag for each step, and the card on top of them."""
    api = hub.api()
    api.create_repo(repo)
    readme = f"---\ntags: {json.dumps(['rlhf-zoo', f'stage:{tag}'])}\n---\n".encode()
    for step in steps:
        made = api.create_commit(
            repo, [CommitOperationAdd("weights", str(step).encode())], commit_message=f"step {step}"
        )
        api.create_tag(repo, tag=f"step-{step:06d}", revision=made.oid)
    data = content if isinstance(content, bytes | None) else json.dumps(content).encode()
    files = {"README.md": readme, **({"rlhf_card.json": data} if data is not None else {})}
    api.create_commit(repo, [CommitOperationAdd(*one) for one in files.items()], commit_message="card")


def publish_later(hub: RunningHub, repo: str, content: dict) -> None:
    """Newer than the others: the Hub's dates are whole seconds."""
    time.sleep(1.1)
    publish(hub, repo, content)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """The runs of an ablation of OWN, and everything that is none of it."""
    hub = start_hub(tmp_path_factory.mktemp("server"))
    try:
        publish(hub, OWN, card(main=True))
        publish(hub, "local/b02-ppo", card(0.2))
        publish(hub, "local/b0-ppo", card(0.0))
        publish(hub, "local/b02-seed2-ppo", card(0.2, seed=2))
        publish(hub, "local/same-beta-ppo", card(0.05, seed=3))
        publish(hub, "local/no-steps-ppo", card(0.5), steps=())
        publish(hub, "local/hidden-ppo", card(1.0))
        hub.api().update_repo_settings("local/hidden-ppo", private=True)
        publish(hub, "local/other-recipe-ppo", card(0.3, recipe="another"))
        publish(hub, "local/other-commit-ppo", card(0.3, parents={"sft": {**SFT, "commit": "b" * 40}}))
        publish(hub, "local/other-sft-ppo", card(0.3, parents={"sft": {**SFT, "repo": "local/another"}}))
        publish(hub, "local/orphan-ppo", card(0.3, parents={}))
        publish(hub, "local/no-settings-ppo", card(settings="none"))
        publish(hub, "local/toy-sft", card(0.3, stage="sft"), tag="sft")
        publish(hub, "local/evil-ppo", card(0.3, stage="\x1b[31mreward"))
        publish(hub, "local/broken-ppo", b"{")
        publish(hub, "team/elsewhere-ppo", card(0.3))
        yield hub
    finally:
        hub.stop()
    assert "Traceback" not in hub.log.read_text(), hub.log.read_text()


def find(
    hub: RunningHub, *asked: list[str] | None, repo: str = OWN, own: dict | None = None, env: dict | None = None,
    **limits: int,
) -> list[dict[str, Any]]:  # fmt: skip
    told = json.dumps([repo, card() if own is None else own, list(asked), limits])
    said = hub.run(sys.executable, "-c", FIND, told, **(env or {}))
    return [json.loads(line) for line in said.splitlines()]


def names(found: dict[str, Any]) -> list[str]:
    return [run["listing"]["repo"] for run in found["runs"]]


@pytest.mark.parametrize("repo", [OWN, f"{OWN}@best", f"{OWN}@{'c' * 40}"])
def test_found(zoo: RunningHub, repo: str) -> None:
    (found,) = find(zoo, None, repo=repo)
    runs = {run["listing"]["repo"]: run for run in found["runs"]}
    assert [(name, run["beta"]) for name, run in runs.items()] == [
        (OWN, 0.05), ("local/hidden-ppo", 1), ("local/no-steps-ppo", 0.5), ("local/b02-ppo", 0.2), ("local/b0-ppo", 0),
    ]  # fmt: skip
    assert found["problem"] == (
        f"Of the runs beside {OWN}, these are left out: local/broken-ppo (its rlhf_card.json is not JSON)."
    )
    assert {name: run["steps"] for name, run in runs.items()} == {
        name: [] if name == "local/no-steps-ppo" else [10, 20] for name in runs
    }
    assert [name for name, run in runs.items() if run["private"]] == ["local/hidden-ppo"]
    assert runs[OWN]["card"]["main"] is True, "the card is main's, not the one of the checkpoint"
    for name in (OWN, "local/b0-ppo"):
        assert runs[name]["listing"] == json.loads(zoo.run(sys.executable, "-c", LISTING, name))


def test_commits_with_equal_weights_are_one_policy(zoo: RunningHub) -> None:
    """`best` and its step's tag are two commits of the same weights; where they differ, so do the policies."""
    api = zoo.api()
    api.create_repo("based/base-sft")
    made = {}
    for name, files in {
        "step": {"model.safetensors": b"1", "README.md": b"step"},
        "best": {"README.md": b"best"},
        "later": {"model.safetensors": b"2"},
    }.items():
        operations = [CommitOperationAdd(*one) for one in files.items()]
        made[name] = api.create_commit("based/base-sft", operations, commit_message=name).oid
    assert len(set(made.values())) == 3

    def from_(name: str) -> dict:
        return {"sft": {"repo": "based/base-sft", "commit": made[name]}}

    for name, beta in (("step", 0.1), ("best", 0.0), ("later", 0.3)):
        publish(zoo, f"based/from-{name}-ppo", card(beta, recipe="based", parents=from_(name)))
    own = card(0.1, recipe="based", parents=from_("step"))
    found, named, refused = find(
        zoo, None, ["based/from-best-ppo"], ["based/from-later-ppo"], repo="based/from-step-ppo", own=own
    )
    assert names(found) == names(named) == ["based/from-step-ppo", "based/from-best-ppo"]
    assert refused["refused"].startswith(f"based/from-later-ppo started from based/base-sft@{made['later'][:10]}, and ")


def test_of_one_beta_the_newest_stands_where_no_seed_is_the_same(zoo: RunningHub) -> None:
    publish_later(zoo, "local/seed3-ppo", card(0.2, seed=3))
    try:
        (found,) = find(zoo, None)
        assert "local/b02-ppo" in names(found) and "local/seed3-ppo" not in names(found)
        zoo.api().update_repo_settings("local/b02-ppo", private=True)
        (found,) = find(zoo, None, env={"HF_TOKEN": ""})  # who has none sees no private repository
        assert names(found) == [OWN, "local/no-steps-ppo", "local/seed3-ppo", "local/b0-ppo"]
    finally:
        zoo.api().update_repo_settings("local/b02-ppo", private=False)
        zoo.api().delete_repo("local/seed3-ppo")


def test_bounds(zoo: RunningHub) -> None:
    publish_later(zoo, "local/late-ppo", card(0.4))
    try:
        (found,) = find(zoo, None, MOST_LOOKED_AT=1)
        assert names(found) == [OWN, "local/late-ppo"]
        assert found["problem"] == (
            f"Of the runs beside {OWN}, only the 1 most recently changed of 14 models were looked at."
        )
    finally:
        zoo.api().delete_repo("local/late-ppo")
    (found,) = find(zoo, None, MOST_RUNS=3)
    assert len(names(found)) == 3
    assert "; only 2 of 4 are taken: name those that you want." in found["problem"]


def test_named(zoo: RunningHub) -> None:
    asked = ["local/b02-seed2-ppo@best", f"local/same-beta-ppo@{'d' * 40}", OWN, "team/elsewhere-ppo",
             "local/b02-seed2-ppo", "local/other-recipe-ppo", "local/no-settings-ppo"]  # fmt: skip
    found, none, itself = find(zoo, asked, [], [f"{OWN}@step-10"])
    assert names(found) == [OWN, "local/b02-seed2-ppo", "local/same-beta-ppo", "team/elsewhere-ppo",
                            "local/other-recipe-ppo", "local/no-settings-ppo"]  # fmt: skip
    assert [run["beta"] for run in found["runs"]] == [0.05, 0.2, 0.05, 0.3, 0.3, None]
    assert all(run["steps"] == [10, 20] for run in found["runs"])
    assert names(none) == names(itself) == [OWN]
    assert found["problem"] is none["problem"] is itself["problem"] is None


def test_refused(zoo: RunningHub) -> None:
    beside = f"and {OWN} started from local/toy-sft@aaaaaaaaaa: runs can be compared where these are the same, so name"
    wanted = {
        "local/none-ppo": f"local/none-ppo is not on {zoo.url}, or this token may not read it: check the names of the",
        "a b": "a b cannot be looked at on",
        "local/toy-sft": "local/toy-sft is a checkpoint of the stage sft, not of PPO: name the PPO repositories of",
        "local/evil-ppo": "local/evil-ppo is a checkpoint of the stage \N{REPLACEMENT CHARACTER}[31mreward, not of PPO",
        "local/other-commit-ppo": f"local/other-commit-ppo started from local/toy-sft@bbbbbbbbbb, {beside} another.",
        "local/other-sft-ppo": f"local/other-sft-ppo started from local/another@aaaaaaaaaa, {beside} another.",
        "local/orphan-ppo": f"local/orphan-ppo does not say which SFT model it started from, {beside} another.",
        "local/broken-ppo": f"local/broken-ppo is no run that can stand beside {OWN} (its rlhf_card.json is not JSON)",
    }
    found = find(zoo, *([name] for name in wanted))
    for said, start in zip(found, wanted.values(), strict=True):
        assert said["refused"].startswith(start) and said["refused"].endswith("."), said
    (said,) = find(zoo, ["local/b0-ppo"], repo="local/orphan-ppo", own=card(parents={}))
    assert said["refused"].startswith("local/orphan-ppo does not say which SFT model it started from, so that no run")


def test_a_card_that_says_too_little_finds_none(zoo: RunningHub) -> None:
    for repo, own in (("local/orphan-ppo", card(parents={})), ("local/no-settings-ppo", card(settings="none"))):
        (found,) = find(zoo, None, repo=repo, own=own)
        assert names(found) == [repo] and found["runs"][0]["steps"] == [10, 20]
        assert found["problem"] == (
            f"Of the runs beside {repo}, none can be found: its card lacks the SFT model, the recipe or the settings."
        )
    (found,) = find(zoo, None, own={})
    assert names(found)[0] == OWN and "local/b0-ppo" in names(found), "a checkpoint without a card has that of main"


def test_a_hub_that_does_not_list(zoo: RunningHub) -> None:
    with FaultProxy(zoo.url) as proxy:
        proxy.inject(Fault("refuse", path=r"^/api/models\?", status=403, count=None))
        (found,) = find(zoo, None, env={"HF_ENDPOINT": proxy.url})
        assert names(found) == [OWN] and found["runs"][0]["steps"] == [10, 20]
        assert found["problem"].startswith(f"The runs beside {OWN} cannot be listed on {proxy.url} (")
        assert proxy.counts.faults == {"refuse 403": 1}
    with FaultProxy(zoo.url) as proxy:
        proxy.inject(Fault("refuse", "refs", path="b0-ppo", status=403, count=None))
        (found,) = find(zoo, None, env={"HF_ENDPOINT": proxy.url})
        assert "local/b0-ppo" not in names(found) and "local/b02-ppo" in names(found)
        assert "local/b0-ppo (The checkpoints of local/b0-ppo cannot be listed on" in found["problem"]


def test_a_hub_that_is_away(zoo: RunningHub, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nowhere = f"http://127.0.0.1:{server.getsockname()[1]}"
    own = card(0.7)
    found, none, named = find(zoo, None, [], ["local/b0-ppo"], own=own, env={"HF_ENDPOINT": nowhere})
    for one in (found, none):
        assert names(one) == [OWN] and one["runs"][0]["steps"] == []
        assert one["runs"][0]["card"] == own and one["runs"][0]["beta"] == 0.7
        assert one["problem"].startswith(f"{OWN} cannot be looked at on {nowhere} (")
    assert named["refused"].startswith(f"local/b0-ppo cannot be looked at on {nowhere} (")
