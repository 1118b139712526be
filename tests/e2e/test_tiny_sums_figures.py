"""tiny-sums reproduces its committed figures: PPO learns to show its work, which raises the reward."""

import json
from pathlib import Path

import pytest
import sums
from zoo_process import zoo

from rlhf_zoo.evaluation.head_to_head import read_lines
from rlhf_zoo.runs.record import StageRecord


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_tiny_sums_figures_match_evidence(tmp_path: Path) -> None:
    # A fifth of the recipe's 1,000 prompts: the differences are ten times larger than these can resolve.
    # Without evaluations during training: they do not change what PPO learns (tests/unit/test_training_run.py).
    flags = ("--evaluation.prompts", "200", "--ppo.eval_strategy", "no")
    done = zoo("run", "tiny-sums", *flags, home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "runs" / "tiny-sums"
    tests = read_lines(run / "data/prompts/test.jsonl")
    checkpoints = (StageRecord(run / stage).chosen_checkpoint() for stage in ("sft", "ppo"))
    (sft, sft_work), (ppo, ppo_work) = (sums.greedy(path, tests) for path in checkpoints)
    assert sft["n"] == 1000
    assert ppo["value"] > sft["value"] + 0.4
    assert sft_work["value"] < 0.3 and ppo_work["value"] > 0.9
    evaluation = json.loads((run / "eval" / "evaluation.json").read_text())
    assert evaluation["verdict"] == "healthy" and evaluation["n"] == 3200
    answers = evaluation["judges"][evaluation["judge"]["name"]]["answers"]["strict"]
    assert answers["difference"]["value"] > 0.3
    assert answers["sft"]["majority_at"]["16"]["value"] > answers["sft"]["accuracy"]["value"] + 0.1
    assert json.loads((run / "summary.json").read_text())["peak_rss_mib"] <= 3 * 1024
