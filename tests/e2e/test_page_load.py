"""Many visitors at the same time, by the benchmark itself: no request fails, none waits for ever, no vote is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 60.0  # seconds: far above what was ever seen, and below what a request may take at all


@pytest.mark.full
def test_page_serves_twenty_visitors(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/page_load.py", "--visitors", "20", "--seconds", "30"]
    done = subprocess.run([*command, "--json", str(figures)], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stderr[-2500:])
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(figures.read_text())
    assert set(found["actions"]) == {"compare", "step", "pair", "vote"} and not found["left_out"]
    for name, action in found["actions"].items():
        assert action["requests"] > 0 and not action["errors"] and action["queue_full"] == 0, (name, action)
        assert action["finished_seconds"]["max"] < LONGEST, (name, action)
    assert found["votes"]["sent"] == found["votes"]["stored"] > 0
