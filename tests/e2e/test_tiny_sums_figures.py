"""tiny-sums reproduces its committed figures: PPO learns to show its work, which raises the reward."""

import json
from pathlib import Path

import pytest
from zoo_process import zoo


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_tiny_sums_figures_match_evidence(tmp_path: Path) -> None:
    # A fifth of the recipe's 1,000 prompts: the differences are ten times larger than these can resolve.
    # Without evaluations during training: they do not change what PPO learns (tests/unit/test_training_run.py).
    flags = ("--evaluation.prompts", "200", "--ppo.eval_strategy", "no")
    done = zoo("run", "tiny-sums", *flags, home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "runs" / "tiny-sums"
    evaluation = json.loads((run / "eval" / "evaluation.json").read_text())
    work = evaluation["judges"]["rule:rlhf_zoo.runs.corpora.tiny_sums:shows_work"]
    assert work["sft"]["value"] < 0.4 and work["ppo"]["value"] > 0.9
    assert evaluation["verdict"] == "healthy" and evaluation["n"] == 3200
    answers = evaluation["judges"][evaluation["judge"]["name"]]["answers"]["strict"]
    assert answers["difference"]["value"] > 0.3
    assert answers["sft"]["majority_at"]["16"]["value"] > answers["sft"]["accuracy"]["value"] + 0.1
    assert json.loads((run / "summary.json").read_text())["peak_rss_mib"] <= 3 * 1024
