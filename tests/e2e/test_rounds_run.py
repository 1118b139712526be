"""`rlhf-zoo run --rounds` trains the reward model on samples of the last PPO policy, and runs PPO again."""

import json
from pathlib import Path

import pytest
from finished_run import Run
from json_keys import unexplained

from rlhf_zoo.cli import main as cli
from rlhf_zoo.errors import ZooError


def test_second_round_records_first_round(base: Run, tmp_path: Path) -> None:
    run = base.copy(tmp_path / "run")
    words = run.command("run", "--rounds", "2", "--round_pairs", "48")
    before = run.json("ppo", "run.json")
    done = run.zoo(*words, "--json")
    assert done.returncode == 0, done.stderr
    overview = json.loads(done.stdout)
    assert overview == run.json("rounds.json") and unexplained(overview) == []
    first, second = overview["rounds"]
    assert (first["round"], first["labels"], first["judge_minus_previous"]) == (1, None, None)
    assert (second["round"], second["labels"], second["repo"]) == (2, "gold", "local/tiny-world-round-2-ppo")
    assert 0 < second["pairs"]["new"] <= 48 and second["pairs"]["old"] > 0 and second["judge_minus_previous"]["n"] == 16
    assert run.json("ppo", "run.json") == before, "the first round is unchanged"

    reward, ppo = (run.json("round-2", stage, "run.json") for stage in ("reward", "ppo"))
    commit = before["repo"]["tags"]["best"]
    policy = reward["parents"]["ppo"]
    assert policy["repo"] == "local/tiny-world-ppo" and policy["commit"] in before["repo"]["tags"].values()
    assert reward["round"] == ppo["round"] and ppo["round"]["before"]["commit"] == policy["commit"]
    assert reward["dataset"]["repo"] == "local/tiny-world-round-2" and reward["dataset"]["commit"]
    assert ppo["parents"]["sft"]["repo"] == "local/tiny-world-sft" and commit
    card = json.loads((run.path / "round-2/ppo/rlhf_card.json").read_text())
    assert card["round"]["number"] == 2 and card["repo"] == "local/tiny-world-round-2-ppo"
    for stage in ("reward", "ppo"):
        text = (run.path / "round-2" / stage / "README.md").read_text()
        assert "| base model | none: random initial weights |" in text
        assert "**Round 2.**" in text and f"`local/tiny-world-ppo` at `{policy['commit']}`" in text

    tree = run.zoo("lineage", "local/tiny-world-round-2-ppo@best", "--hub", "local")
    assert tree.returncode == 0, tree.stderr
    for repo in ("tiny-world-round-2-reward", "tiny-world-ppo", "tiny-world-reward", "tiny-world-round-2 "):
        assert f"local/{repo}" in tree.stdout

    again = run.zoo(*words)
    assert again.returncode == 0, again.stderr
    assert "judge" in again.stdout and "by gold" in again.stdout
    assert run.json("round-2", "ppo", "run.json") == ppo, "a finished round is not trained again"
    other = run.zoo(*words, "--labels", "judge")
    assert other.returncode == 2 and "pairs that were made with a different value of 'labels': choose" in other.stderr
    rejected = run.zoo("reproduce", "local/tiny-world-round-2-reward@best", "--hub", "local")
    assert rejected.returncode == 2 and "also learned from samples of an earlier round's PPO policy" in rejected.stderr
    pushed = run.zoo("push", "run/round-2", "--hub", "local")
    assert pushed.returncode == 0 and "local/tiny-world-round-2-ppo: " in pushed.stdout, pushed.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--labels", "gold"], "--labels needs --rounds 2 or more"),
        (["--rounds", "2", "--labels", "judg"], "There is no judge 'judg', did you mean 'judge'?"),
        (
            ["--rounds", "2", "--labels", "nosuch"],
            "There is no judge 'nosuch': write gold, judge, classifier, KIND:NAME",
        ),
        (["--rounds", "2", "--labels", "reward:local/nobody"], "The judge reward:local/nobody cannot be found on"),
        (
            ["--rounds", "2", "--labels", "votes:nobody"],
            "'nobody' is not a repository for votes: use NAMESPACE/NAME.",
        ),
    ],
)
def test_invalid_labels_fail_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_ZOO_SOURCE_HUB", "none")
    with pytest.raises(ZooError) as caught:
        cli.cli.main(["run", "tiny-world", "--hub", "local", *words], standalone_mode=False)
    assert message in str(caught.value)
    assert not (tmp_path / "runs/tiny-world/sft").exists()
