"""Finds the runs of an ablation on the embedded Hub, through the real client."""

import json
import re
import time
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy
from thread_hub import ThreadHub
from zoo_process import free_port

from rlhf_zoo.errors import ZooError
from rlhf_zoo.publishing.catalog import ablation
from rlhf_zoo.publishing.catalog.index import list_checkpoints

SFT = {"repo": "local/toy-sft", "commit": "a" * 40}
OWN = "local/toy-ppo"


def card(beta: float | None = None, **fields: Any) -> dict[str, Any]:
    """The card of a PPO run; with beta None, the recipe does not set it."""
    settings = {"temperature": 0.9} | ({} if beta is None else {"kl_coef": beta})
    plain = {"stage": "ppo", "recipe": "toy", "seed": 1, "parents": {"sft": SFT, "reward": None}, "settings": settings}
    return {**plain, **fields}


def publish(hub: ThreadHub, repo: str, content: dict | str | None, *, steps: int = 2, tag: str = "ppo") -> None:
    """Pushes one tagged commit per step, then the card."""
    for step in (10, 20)[:steps]:
        commit = hub.push(repo, {"weights": str(step)})
        hub.api().create_tag(repo, tag=f"step-{step:06d}", revision=commit)
    files = {"README.md": f"---\ntags: {json.dumps(['rlhf-zoo', f'stage:{tag}'])}\n---\n"}
    if content is not None:
        files["rlhf_card.json"] = content if isinstance(content, str) else json.dumps(content)
    hub.push(repo, files)


def publish_later(hub: ThreadHub, repo: str, content: dict) -> None:
    """Publishes with a later date than the other repositories; the Hub's dates are whole seconds."""
    time.sleep(1.1)
    publish(hub, repo, content)


@pytest.fixture(scope="module")
def hub_with_runs(module_hub: ThreadHub) -> ThreadHub:
    """The runs of an ablation of OWN, and repositories that do not belong to it."""
    hub = module_hub
    publish(hub, OWN, card(main=True))
    publish(hub, "local/b02-ppo", card(0.2))
    publish(hub, "local/b0-ppo", card(0.0))
    publish(hub, "local/b02-seed2-ppo", card(0.2, seed=2))
    publish(hub, "local/same-beta-ppo", card(0.05, seed=3))
    publish(hub, "local/no-steps-ppo", card(0.5), steps=0)
    publish(hub, "local/hidden-ppo", card(1.0))
    hub.api().update_repo_settings("local/hidden-ppo", private=True)
    publish(hub, "local/other-recipe-ppo", card(0.3, recipe="another"))
    publish(hub, "local/other-commit-ppo", card(0.3, parents={"sft": {**SFT, "commit": "b" * 40}}))
    publish(hub, "local/other-sft-ppo", card(0.3, parents={"sft": {**SFT, "repo": "local/another"}}))
    publish(hub, "local/orphan-ppo", card(0.3, parents={}))
    publish(hub, "local/no-settings-ppo", card(settings="none"))
    publish(hub, "local/toy-sft", card(0.3, stage="sft"), tag="sft")
    publish(hub, "local/evil-ppo", card(0.3, stage="\x1b[31mreward"))
    publish(hub, "local/broken-ppo", "{")
    publish(hub, "team/elsewhere-ppo", card(0.3))
    return hub


@pytest.fixture
def runs_hub(hub_with_runs: ThreadHub, at_module_hub: ThreadHub) -> ThreadHub:
    return at_module_hub


def find(names: list[str] | None = None, repo: str = OWN, own: dict | None = None) -> ablation.Ablation:
    return ablation.find_runs(repo, card() if own is None else own, names=names)


def repo_names(result: ablation.Ablation) -> list[str]:
    return [run.listing["repo"] for run in result.runs]


@pytest.mark.parametrize("repo", [OWN, f"{OWN}@best", f"{OWN}@{'c' * 40}"])
def test_find_runs_lists_own_run_and_its_ablation(runs_hub: ThreadHub, repo: str) -> None:
    result = find(repo=repo)
    runs = dict(zip(repo_names(result), result.runs, strict=True))
    assert [(name, run.beta) for name, run in runs.items()] == [
        (OWN, 0.05), ("local/hidden-ppo", 1), ("local/no-steps-ppo", 0.5), ("local/b02-ppo", 0.2), ("local/b0-ppo", 0),
    ]  # fmt: skip
    assert result.problem == (
        f"Of the other runs of {OWN}, these are not shown: local/broken-ppo (has an rlhf_card.json that is not JSON)."
    )
    assert {name: run.steps for name, run in runs.items()} == {
        name: () if name == "local/no-steps-ppo" else (10, 20) for name in runs
    }
    assert [name for name, run in runs.items() if run.private] == ["local/hidden-ppo"]
    assert runs[OWN].card["main"] is True, "the card is from main, not from the checkpoint"
    for name in (OWN, "local/b0-ppo"):
        assert runs[name].listing == list_checkpoints(name)


def test_find_runs_treats_commits_with_equal_weights_as_one_sft_model(runs_hub: ThreadHub) -> None:
    """`best` and its step's tag are two commits with the same weights; other weights are another model."""
    commits = {
        name: runs_hub.push("based/base-sft", files)
        for name, files in {
            "step": {"model.safetensors": "1", "README.md": "step"},
            "best": {"README.md": "best"},
            "later": {"model.safetensors": "2"},
        }.items()
    }

    def parents_from(name: str) -> dict:
        return {"sft": {"repo": "based/base-sft", "commit": commits[name]}}

    for name, beta in (("step", 0.1), ("best", 0.0), ("later", 0.3)):
        publish(runs_hub, f"based/from-{name}-ppo", card(beta, recipe="based", parents=parents_from(name)))
    own: dict = {"repo": "based/from-step-ppo", "own": card(0.1, recipe="based", parents=parents_from("step"))}
    for names in (None, ["based/from-best-ppo"]):
        assert repo_names(find(names, **own)) == ["based/from-step-ppo", "based/from-best-ppo"]
    message = f"^based/from-later-ppo started from based/base-sft@{commits['later'][:10]}, but "
    with pytest.raises(ZooError, match=message):
        find(["based/from-later-ppo"], **own)


def test_find_runs_prefers_same_seed_then_newest_of_equal_betas(
    runs_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_later(runs_hub, "local/seed3-ppo", card(0.2, seed=3))
    try:
        repos = repo_names(find())
        assert "local/b02-ppo" in repos and "local/seed3-ppo" not in repos
        runs_hub.api().update_repo_settings("local/b02-ppo", private=True)
        monkeypatch.setenv("HF_TOKEN", "")  # without a token, private repositories are hidden
        assert repo_names(find()) == [OWN, "local/no-steps-ppo", "local/seed3-ppo", "local/b0-ppo"]
    finally:
        runs_hub.api().update_repo_settings("local/b02-ppo", private=False)
        runs_hub.api().delete_repo("local/seed3-ppo")


def test_find_runs_limits_cards_read_and_runs_shown(runs_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_later(runs_hub, "local/late-ppo", card(0.4))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(ablation, "MAX_CARDS", 1)
            result = find()
        assert repo_names(result) == [OWN, "local/late-ppo"]
        assert result.problem == (
            f"Of the other runs of {OWN}, only the 1 most recently changed of 14 models were read."
        )
    finally:
        runs_hub.api().delete_repo("local/late-ppo")
    monkeypatch.setattr(ablation, "MAX_RUNS", 3)
    result = find()
    assert len(result.runs) == 3 and "; only 2 of 4 are shown: name the runs that you want." in str(result.problem)


def test_find_runs_returns_exactly_named_runs(runs_hub: ThreadHub) -> None:
    requested = ["local/b02-seed2-ppo@best", f"local/same-beta-ppo@{'d' * 40}", OWN, "team/elsewhere-ppo",
             "local/b02-seed2-ppo", "local/other-recipe-ppo", "local/no-settings-ppo"]  # fmt: skip
    result, empty, own_only = find(requested), find([]), find([f"{OWN}@step-10"])
    assert [(run.repo, run.beta, run.steps) for run in result.runs] == [
        (OWN, 0.05, (10, 20)), ("local/b02-seed2-ppo", 0.2, (10, 20)), ("local/same-beta-ppo", 0.05, (10, 20)),
        ("team/elsewhere-ppo", 0.3, (10, 20)), ("local/other-recipe-ppo", 0.3, (10, 20)),
        ("local/no-settings-ppo", None, (10, 20)),
    ]  # fmt: skip
    assert repo_names(empty) == repo_names(own_only) == [OWN]
    assert result.problem is empty.problem is own_only.problem is None


SAME_SFT_HINT = f"but {OWN} started from local/toy-sft@aaaaaaaaaa: name a run with the same SFT model."


@pytest.mark.parametrize(
    ("repo", "message"),
    [
        ("local/none-ppo", "local/none-ppo is not on http"),
        ("a b", "Cannot look up a b on"),
        ("local/toy-sft", "local/toy-sft is a checkpoint of the stage sft, not of PPO: name the PPO repositories of"),
        ("local/evil-ppo", "local/evil-ppo is a checkpoint of the stage \N{REPLACEMENT CHARACTER}[31mreward, not of"),
        ("local/other-commit-ppo", f"local/other-commit-ppo started from local/toy-sft@bbbbbbbbbb, {SAME_SFT_HINT}"),
        ("local/other-sft-ppo", f"local/other-sft-ppo started from local/another@aaaaaaaaaa, {SAME_SFT_HINT}"),
        ("local/orphan-ppo", f"local/orphan-ppo does not name its SFT model, {SAME_SFT_HINT}"),
        (
            "local/broken-ppo",
            f"local/broken-ppo cannot be compared with {OWN} (has an rlhf_card.json that",
        ),
    ],
)
def test_find_runs_rejects_named_run_that_cannot_be_compared(runs_hub: ThreadHub, repo: str, message: str) -> None:
    with pytest.raises(ZooError, match=f"^{re.escape(message)}"):
        find([repo])


def test_find_runs_returns_only_own_run_when_card_is_incomplete(runs_hub: ThreadHub) -> None:
    orphan = {"repo": "local/orphan-ppo", "own": card(parents={})}
    for arguments in (orphan, {"repo": "local/no-settings-ppo", "own": card(settings="none")}):
        result = find(**arguments)
        assert repo_names(result) == [arguments["repo"]] and result.runs[0].steps == (10, 20)
        assert result.problem == (
            f"Of the other runs of {arguments['repo']}, none can be found, because its card lacks the SFT model, the "
            "recipe or the settings."
        )
    with pytest.raises(ZooError, match=r"^The card of local/orphan-ppo does not name its SFT model, so no run"):
        find(["local/b0-ppo"], **orphan)
    result = find(own={})
    assert repo_names(result)[0] == OWN and "local/b0-ppo" in repo_names(result), (
        "a checkpoint without a card uses the card of main"
    )


def test_find_runs_reports_hub_that_refuses_or_is_offline(runs_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with FaultProxy(runs_hub.url) as proxy:
        monkeypatch.setattr(constants, "ENDPOINT", proxy.url)
        proxy.inject(Fault("refuse", path=r"^/api/models\?", status=403, count=None))
        result = find()
        assert repo_names(result) == [OWN] and result.runs[0].steps == (10, 20)
        assert str(result.problem).startswith(f"Cannot list the other runs of {OWN} on {proxy.url} (")
        assert proxy.counts.faults == {"refuse 403": 1}
    with FaultProxy(runs_hub.url) as proxy:
        monkeypatch.setattr(constants, "ENDPOINT", proxy.url)
        proxy.inject(Fault("refuse", "refs", path="b0-ppo", status=403, count=None))
        result = find()
        assert "local/b0-ppo" not in repo_names(result) and "local/b02-ppo" in repo_names(result)
        assert "local/b0-ppo (Cannot list the checkpoints of local/b0-ppo on" in str(result.problem)
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    own = card(0.7)
    for offline_result in (find(own=own), find([], own=own)):
        (run,) = offline_result.runs
        assert (run.listing["repo"], run.steps, run.card, run.beta) == (OWN, (), own, 0.7)
        assert str(offline_result.problem).startswith(f"Cannot look up {OWN} on {nowhere} (")
    with pytest.raises(ZooError, match=f"^Cannot look up local/b0-ppo on {nowhere} "):
        find(["local/b0-ppo"])
