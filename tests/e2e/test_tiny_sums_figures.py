"""tiny-sums comes near what the committed evidence shows of it: PPO finds out that showing its work pays."""

import json
from pathlib import Path

import pytest
import sums
from zoo_process import zoo

from rlhf_zoo.record import StageRecord


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_showing_the_work_pays(tmp_path: Path) -> None:
    done = zoo("run", "tiny-sums", home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "runs" / "tiny-sums"
    tests, longer = (
        [json.loads(line) for line in (run / "data" / name / "test.jsonl").read_text().splitlines()]
        for name in ("prompts", "longer")
    )
    sft, ppo = (
        sums.figures(StageRecord(run / stage).chosen_checkpoint(), tests, longer, samples=1) for stage in ("sft", "ppo")
    )
    assert sft["greedy"]["n"] == 1000
    assert ppo["greedy"]["value"] > sft["greedy"]["value"] + 0.4
    assert ppo["sampled"]["value"] > sft["sampled"]["value"] + 0.3
    assert sft["greedy_work"]["value"] < 0.3 and ppo["greedy_work"]["value"] > 0.9
    evaluation = json.loads((run / "eval" / "evaluation.json").read_text())
    assert evaluation["verdict"] == "healthy"
    assert json.loads((run / "summary.json").read_text())["peak_rss_mib"] <= 3 * 1024
