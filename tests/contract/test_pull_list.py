"""`rlhf-zoo pull --list`: the checkpoints of a repository, by their tags and the card."""

import json
from collections.abc import Mapping
from typing import Any

import test_pull
from test_pull import REPO
from thread_hub import ThreadHub

pull = test_pull.pull
CARD = {
    "stage": "ppo", "recipe": "toy", "step": 40,
    "checkpoints": [
        {"step": 4, "tag": "step-000004", "commit": None, "reward": 0.5, "kl": 1.25},
        {"step": 40, "tag": "step-000040", "commit": None, "reward": 2.0, "kl": None},
        {"step": 99, "tag": "step-000099", "commit": "f" * 40, "reward": 9.0, "kl": 9.0},
    ],
}  # fmt: skip


def card_repo(hub: ThreadHub, repo: str, card: Mapping[str, Any] | None, steps: tuple[int, ...] = (4, 40)) -> None:
    for step in steps:
        hub.push(repo, {"config.json": str(step).encode()})
        hub.api().create_tag(repo, tag=f"step-{step:06d}")
    if card is not None:
        hub.push(repo, {"rlhf_card.json": json.dumps(card).encode()})
        hub.api().create_tag(repo, tag="best")


def test_pull_list_shows_checkpoints(thread_hub, pull):
    card_repo(thread_hub, REPO, CARD)
    api = thread_hub.api()
    api.create_tag(REPO, tag="v1")
    document = json.loads(pull(REPO, "--list", "--json").stdout)
    assert (document["repo"], document["stage"], document["recipe"], document["note"]) == (REPO, "ppo", "toy", None)
    tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(REPO).tags}
    assert [(row["revision"], row["step"], row["also"], row["metrics"]) for row in document["checkpoints"]] == [
        ("step-000004", 4, [], {"reward": 0.5, "kl": 1.25}),
        ("step-000040", 40, ["best", "main"], {"reward": 2.0}),
        ("v1", None, [], {}),
    ]
    dates = {commit.commit_id: commit.created_at for commit in api.list_repo_commits(REPO)}
    for row in document["checkpoints"]:
        assert row["commit"] == tags[row["revision"]]
        assert row["date"] == dates[row["commit"]].isoformat(timespec="seconds")
    lines = [line.split() for line in pull(REPO, "--list").stdout.splitlines() if line.strip()]
    assert lines[:2] == [
        ["local/toy-ppo,", "ppo,", "recipe", "toy"], ["revision", "step", "reward", "kl", "commit", "date", "also"],
    ]  # fmt: skip
    day = document["checkpoints"][0]["date"][:10]
    assert ["step-000004", "4", "0.500", "1.250", tags["step-000004"][:10], day] in lines
    assert ["step-000040", "40", "2.000", tags["step-000040"][:10], day, "best", "main"] in lines


def test_pull_list_marks_chosen_step_as_best(thread_hub, pull):
    card_repo(thread_hub, REPO, {**CARD, "chosen": {"step": 4, "rule": "a rule"}})
    rows = json.loads(pull(REPO, "--list", "--json").stdout)["checkpoints"]
    assert [(row["step"], row["also"]) for row in rows] == [(4, ["best"]), (40, ["main"])]


def test_pull_list_shows_other_stages_and_missing_card(thread_hub, pull):
    sft = {"stage": "sft", "recipe": "toy", "step": 4, "checkpoints": [{"tag": "step-000004", "eval_loss": 0.25}]}
    card_repo(thread_hub, "local/toy-sft", sft, (4,))
    (row,) = json.loads(pull("local/toy-sft", "--list", "--json").stdout)["checkpoints"]
    assert row["metrics"] == {"eval_loss": 0.25}
    assert "eval_loss" in pull("local/toy-sft", "--list").stdout
    card_repo(thread_hub, "local/bare", None)
    document = json.loads(pull("local/bare", "--list", "--json").stdout)
    assert document["note"] == "has no rlhf_card.json" and document["stage"] is None
    assert [(row["revision"], row["metrics"]) for row in document["checkpoints"]] == [
        ("step-000004", {}), ("step-000040", {}), ("main", {}),
    ]  # fmt: skip
    assert pull("local/bare", "--list").exit_code == 0


def test_pull_list_escapes_text_of_card(thread_hub, pull):
    evil = "\x1b]0;owned\x07[bold]x"
    row = {"tag": "step-000004", evil: 1.0, "reward": evil, "kl": 10**400}
    card_repo(thread_hub, REPO, {"stage": evil, "recipe": evil, "step": evil, "checkpoints": [row, evil, None]}, (4,))
    result = pull(REPO, "--list")
    assert result.exit_code == 0 and "\x1b" not in result.output and "[bold]x" in result.stdout
