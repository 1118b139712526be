"""Further rounds: who may label, what a round's pairs are, and what its reward stage is told."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_run import make_context, make_recipe, save_stage, save_start, trained_policy
from trainer_fixture import make_tokenizer

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.measure import make_evaluator
from rlhf_zoo.evaluation.votes.vote import ShownCompletion, Vote
from rlhf_zoo.fileio import write_json
from rlhf_zoo.pipeline.experiments.rounds import check_labeler
from rlhf_zoo.pipeline.stages.judges import check_on_pairs
from rlhf_zoo.pipeline.stages.pairs import held_out_pairs, training_pairs
from rlhf_zoo.pipeline.stages.round_pairs import make_pairs
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.dataset import stage_source
from rlhf_zoo.runs.rounds import round_fields, round_run, write_round_file

JUDGE = "toy_run:judge"
COMMIT = "c" * 40


def prefer_short(first: str, second: str, rng: Any) -> int:
    return int(len(second) < len(first))


def longer_first(prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[float]:
    return [1.0 if len(a) > len(b) else 0.0 if len(a) < len(b) else 0.5 for a, b in zip(first, second, strict=True)]


@pytest.fixture
def first(tmp_path: Path) -> RunContext:
    """A run whose stages are finished; what PPO made is what SFT made."""
    make_recipe(tmp_path)
    save_start(tmp_path)
    checkpoint, context = save_stage(tmp_path, "ppo", trained_policy(), make_tokenizer()), make_context(tmp_path)
    published = {"hub": context.hub.label, "repo": "local/toy-ppo", "commit": COMMIT, "tag": "step-000004"}
    write_json(checkpoint / "published.json", published)
    return context


def second(first: RunContext, labels: str) -> RunContext:
    return round_run(first, 2, labels, first.checkpoint("ppo"))


def pairs_of(this: RunContext) -> list[dict[str, Any]]:
    assert this.round is not None
    return [json.loads(line) for line in (this.round.folder / "preferences/train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("labels", "flags", "message"),
    [
        ("gold", {}, "uses `preference` of the stage reward, but the recipe does not set it"),
        ("same-labels", {}, "--labels same-labels would repeat the existing labels"),
        ("toy_run:nobody", {}, "There is no 'nobody' in the module 'toy_run'"),
        ("judge", {"reward_model_path": ["reward", "reward"]}, "its PPO uses ['reward', 'reward']"),
        ("rule:zzz", {}, "No installed package registers 'zzz'"),
    ],
)
def test_check_labeler_rejects_bad_labelers(
    first: RunContext, labels: str, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ZooError) as caught:
        check_labeler(replace(first, flags={"ppo": flags}), labels)
    assert message in str(caught.value)


def test_check_labeler_picks_default_labeler(first: RunContext) -> None:
    assert check_labeler(first, None) == check_labeler(first, "judge") == JUDGE
    known = replace(first, flags={"reward": {"preference": "test_rounds:prefer_short"}})
    assert check_labeler(known, None) == "gold" and check_labeler(known, "judge") == JUDGE
    stages = {name: keys for name, keys in first.recipe.stages.items() if name != "reward"}
    with pytest.raises(
        ZooError, match="--rounds needs the stages sft, reward and ppo, but the recipe toy has no stage reward"
    ):
        check_labeler(replace(first, recipe=replace(first.recipe, stages=stages)), None)


@pytest.mark.parametrize(
    ("labels", "longer"), [(JUDGE, True), ("pairs:test_rounds:longer_first", True), ("gold", False)]
)
def test_make_pairs_adds_new_pairs_to_older_ones(first: RunContext, labels: str, longer: bool) -> None:
    first = replace(first, flags={"reward": {"preference": "test_rounds:prefer_short"}})
    this = second(first, labels)
    made = make_pairs(this, first, count=30)
    rows = pairs_of(this)
    new = [row for row in rows if row["round"] == 2]
    assert (len(new), len(rows) - len(new)) == (made["new"], made["old"]) and made["old"] == 12 and 0 < len(new) <= 30
    lengths = [(len(row["chosen"]), len(row["rejected"])) for row in new]
    assert all(good > bad if longer else good <= bad for good, bad in lengths)
    data = this.settings("reward").data
    assert (data.dataset_config, data.dataset_test_split, data.held_out_share) == ("preferences", None, 0.1)
    source = stage_source(this, "reward")
    train, held_out = training_pairs(this, source)[0], held_out_pairs(this, source)
    assert held_out is not None and len(train) + len(held_out[0]) == len(rows)
    again = make_pairs(this, first, count=30)
    assert again == made, "they are made once"
    file = this.round.folder / "preferences" / "train.jsonl"
    before = file.read_bytes()
    file.write_bytes(before[: before.rindex(b"{")])
    with pytest.raises(ZooError, match=f"{this.round.folder} has changed since the round made it: .*remove"):
        stage_source(this, "reward")
    file.write_bytes(before)
    with pytest.raises(ZooError, match="made with a different value of 'pairs'"):
        make_pairs(this, first, count=31)


def test_labeler_must_not_share_labels_of_headline_judge(first: RunContext) -> None:
    flags = {"recipe": {"evaluation.judge": "same-labels"}, "reward": {"judge_share": 0.3}}
    first = replace(first, flags=flags)
    assert check_labeler(first, JUDGE) == JUDGE
    assert make_pairs(second(first, JUDGE), first, count=30)["new"] > 0
    with pytest.raises(ZooError, match="--labels judge, which is same-labels here, would repeat the existing labels"):
        check_labeler(first, None)


@pytest.mark.parametrize(("labels", "same"), [(JUDGE, True), ("gold", False)])
def test_judge_that_labeled_pairs_is_marked_same_labels(first: RunContext, labels: str, same: bool) -> None:
    first = replace(first, flags={"reward": {"preference": "test_rounds:prefer_short"}})
    this = second(first, labels)
    make_pairs(this, first, count=30)
    shutil.copytree(first.directory / "reward", this.directory / "reward")
    tools = make_evaluator(this, first.checkpoint("sft").path)
    [check] = check_on_pairs(this, tools, None).values()
    assert check.same_labels is same and check.labeled_check is not None


def test_third_round_includes_pairs_of_second_round(first: RunContext) -> None:
    this = second(first, JUDGE)
    made = make_pairs(this, first, count=12)
    third = round_run(first, 3, JUDGE, first.checkpoint("ppo"))
    assert make_pairs(third, this, count=12)["old"] == made["old"] + made["new"]
    assert {row["round"] for row in pairs_of(third)} == {1, 2, 3}


def test_votes_on_last_policy_become_pairs(first: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def vote(repo: str, verdict: str = "left", ended: bool = True) -> Vote:
        left = ShownCompletion("cd", "ppo", repo, COMMIT, "best", 1.0, ended)
        return Vote("ab", left, ShownCompletion("ce", "sft", ended=True), verdict, 1.0, 1.0, 1, 40)

    cast = [vote("local/toy-ppo"), vote("local/toy-ppo", "right"), vote("local/toy-ppo", "tie"), vote("local/other"),
            vote("local/toy-ppo", ended=False)]  # fmt: skip
    monkeypatch.setattr("rlhf_zoo.evaluation.votes.data.HubVotes.read", lambda self: cast)
    monkeypatch.setattr("rlhf_zoo.hub.client.weights._weight_ids", lambda origin, hub: frozenset({origin}))
    this = second(first, "votes:local/votes")
    make_pairs(this, first, count=30)
    new = [(row["chosen"], row["rejected"]) for row in pairs_of(this) if row["round"] == 2]
    assert new == [("cd", "ce"), ("ce", "cd")]
    monkeypatch.setattr("rlhf_zoo.evaluation.votes.data.HubVotes.read", lambda self: [vote("local/other")])
    with pytest.raises(ZooError, match=r"None of the 1 votes of local/votes decides .*, then run the same command"):
        make_pairs(replace(this, restart=True), first, count=30)


def test_round_names_its_repositories_and_parent_records(first: RunContext) -> None:
    this = second(replace(first, flags={"reward": {"simulated_pairs": 4, "max_steps": 2}, "ppo": {}}), "gold")
    assert this.flags["reward"] == {"max_steps": 2}, "its pairs are made, and the rest is as asked"
    assert this.repo("ppo") == "local/toy-round-2-ppo" and this.repo("sft") == "local/toy-sft"
    assert this.record("sft").path == first.record("sft").path and this.record("reward").path.parent == this.directory
    write_round_file(this)
    found = round_fields(this.directory)
    assert found["base"].resolve() == first.directory.resolve() and round_fields(first.directory) == {}
    assert (found["variant"], found["own_stages"]) == ("round-2", ("reward", "ppo", "eval"))
