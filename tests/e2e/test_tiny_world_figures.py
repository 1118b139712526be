"""tiny-world reproduces its committed figures."""

import json
from pathlib import Path

import pytest
from zoo_process import zoo


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_tiny_world_figures_match_evidence(tmp_path: Path) -> None:
    done = zoo("run", "tiny-world", "--ppo.eval_strategy", "no", home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "runs/tiny-world/summary.json").read_text())
    assert summary["win_rate"]["value"] >= 0.62
    assert summary["win_rate"]["ci95"][0] >= 0.57
    assert summary["win_rate"]["n"] >= 500
    assert summary["ppo"]["reward"] > summary["sft"]["reward"]
    assert summary["ppo"]["eos_rate"] > 0.9
    assert abs(summary["control"]["value"] - 0.5) < 0.1
    assert summary["peak_rss_mib"] <= 3 * 1024
