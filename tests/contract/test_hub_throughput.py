"""The benchmark of the embedded Hub runs; its figures are for people, and no test hangs on a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "hub_throughput.py"


@pytest.mark.full
def test_benchmark_runs(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--folder", str(tmp_path), "--size-mb", "5", "--rounds", "1"]
    figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert figures["size_bytes"] == 5 * 2**20
    assert set(figures["ratios"]) == {"download", "download_xet_on", "upload", "upload_xet_on"}
    assert all(seconds > 0 for seconds in figures["median_seconds"].values())
    assert list(tmp_path.iterdir()) == []
