"""Many visitors at the same time, as in the benchmark: no request fails or hangs, and no vote is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_SECONDS = 60.0  # seconds: far above every measured time, and below the timeout of a request


@pytest.mark.full
def test_page_serves_twenty_visitors(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/page_load.py", "--visitors", "20", "--seconds", "30"]
    done = subprocess.run([*command, "--json", str(figures)], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stderr[-2500:])
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(figures.read_text())
    assert set(report["actions"]) == {"compare", "step", "pair", "vote"} and not report["left_out"]
    for name, action in report["actions"].items():
        assert action["requests"] > 0 and not action["errors"] and action["queue_full"] == 0, (name, action)
        assert action["finished_seconds"]["max"] < MAX_SECONDS, (name, action)
    assert report["votes"]["sent"] == report["votes"]["stored"] > 0
