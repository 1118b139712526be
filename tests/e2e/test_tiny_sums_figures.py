"""tiny-sums comes near what the committed evidence shows of it: PPO finds out that showing its work pays."""

import json
from pathlib import Path

import pytest
import sums
from zoo_process import zoo


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_showing_the_work_pays(tmp_path: Path) -> None:
    done = zoo("run", "tiny-sums", home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "runs" / "tiny-sums"
    sums.measure(run, {})
    sft, ppo = (json.loads((run / "sums.json").read_text())[policy] for policy in ("SFT", "PPO"))
    assert sft["greedy"]["n"] == 1000
    assert ppo["greedy"]["value"] > sft["greedy"]["value"] + 0.4
    assert sft["greedy_work"]["value"] < 0.3 and ppo["greedy_work"]["value"] > 0.9
    evaluation = json.loads((run / "eval" / "evaluation.json").read_text())
    assert evaluation["verdict"] == "healthy" and evaluation["n"] == 16000
    answers = evaluation["judges"][evaluation["judge"]["name"]]["answers"]["strict"]
    assert answers["difference"]["value"] > 0.3
    assert answers["sft"]["majority_at"]["16"]["value"] > answers["sft"]["accuracy"]["value"] + 0.1
    assert json.loads((run / "summary.json").read_text())["peak_rss_mib"] <= 3 * 1024
