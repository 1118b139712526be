"""tiny-world comes near what the committed evidence shows, and proxy and truth part when β is 0."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run(directory: Path, home: Path, *words: str) -> dict:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"RLHF_ZOO_HOME": str(home)}
    command = [
        str(Path(sys.executable).parent / "rlhf-zoo"),
        "run",
        "tiny-world",
        "--output_dir",
        str(directory),
        *words,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((directory / "summary.json").read_text())


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_the_figures_of_the_recipe(tmp_path):
    summary = run(tmp_path / "kl", tmp_path / "home")
    assert summary["win_rate"]["value"] >= 0.70
    assert summary["win_rate"]["ci95"][0] >= 0.65
    assert summary["win_rate"]["n"] >= 500
    assert abs(summary["control"]["value"] - 0.5) < 0.1
    assert summary["peak_rss_mib"] <= 3 * 1024
    assert summary["ppo"]["eos_rate"] > 0.9
    for stage in ("data", "sft", "reward"):
        shutil.copytree(tmp_path / "kl" / stage, tmp_path / "cut" / stage)
    cut = run(tmp_path / "cut", tmp_path / "home-cut", "--ppo.kl_coef", "0", "--ppo.total_episodes", "7680")
    assert cut["ppo"]["kl"] > 2 * summary["ppo"]["kl"]
    assert cut["ppo"]["reward"] > summary["ppo"]["reward"] > summary["sft"]["reward"]
    assert cut["ppo"]["judge"] < summary["ppo"]["judge"] - 0.5
    gold = [row["rewards/gold"] for row in curve(tmp_path / "cut")]
    proxy = [row["rewards/reward_model"] for row in curve(tmp_path / "cut")]
    peak = max(range(len(gold)), key=gold.__getitem__)
    assert peak < len(gold) - 10
    assert sum(gold[-10:]) / 10 < gold[peak] - 0.5
    assert sum(proxy[-10:]) / 10 > proxy[peak]


def curve(directory: Path) -> list[dict]:
    rows = [json.loads(line) for line in (directory / "ppo" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "rewards/gold" in row]
