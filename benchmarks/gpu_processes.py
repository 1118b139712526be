"""The parts of gpu.py that run in separate processes: updates of large models, the profile, and the tests."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from speed.points import POINTS

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".gpu" / "peer"  # TRL 1.12.0, which the user installs there: docs/gpu.md
UPDATE_RATE = "TFLOP/s of the update's matrices"
BF16 = ("--bf16",)
NEEDS_CPU = "trace_command_prints"  # this test starts a process without a GPU
TESTS = [
    *(f"tests/numerics/test_{name}.py" for name in (
        "gpu", "reference", "goldens", "trl_parity", "details", "resume", "properties", "kl_estimators", "learning")),
    *(f"tests/unit/test_{name}.py" for name in (
        "trainer", "own_loop", "training_run", "phases", "ppo_options", "critic", "sampling", "sampling_queue",
        "logprobs", "nonfinite_steps", "limits", "peft", "models", "guards", "compat", "value_head", "trl_defects",
        "rewards", "reward_ensemble", "reward_forms", "samples_shown", "ppo_stage", "trace", "config")),
]  # fmt: skip


def run_module(*words: str, folders: Sequence[str] = (), **variables: str) -> dict[str, Any]:
    """Runs a module of benchmarks/ and returns the JSON object in its last line, or its error.

    Args:
        words: The module and its arguments.
        folders: Folders to import from before any others.
        variables: Further environment variables.
    """
    path = os.pathsep.join([*folders, *filter(None, sys.path)])
    process = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT / "benchmarks", env=os.environ | variables | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode:
        return {"error": (process.stderr.strip().splitlines() or ["it printed nothing"])[-1][:500]}
    document: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return document


def run_updates(point: str, settings: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Times one update at a point in each setting, whose first word is the module to run.

    When the time limit is reached, the remaining settings are skipped.
    """
    results: dict[str, Any] = {}
    for setting, words in settings.items():
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # so the child process can use this memory
        try:
            output = run_module(
                words[0], point, "--updates", "1", *words[1:], folders=[str(PEER)] if words[0] == "speed.peer" else [],
                PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", TRL_EXPERIMENTAL_SILENCE="1",
            )  # fmt: skip
        except TimeoutError as error:
            results[setting] = {"not run": str(error)}
            break
        if "error" not in output:
            last = output["updates"][-1]
            output = {
                "seconds": last["seconds"], **last["phases"], "response tokens": last["tokens"],
                "peak GiB": output.get("gpu_peak_gib", output["peak_mib"] / 1024),
            }  # fmt: skip
        results[setting] = output
    return results


def update_part(point: str, settings: Mapping[str, Sequence[str]]) -> Callable[[str, bool], dict[str, Any]]:
    """Returns a part that times this trainer's update at a point in each of the settings."""

    def part(device: str, tiny: bool) -> dict[str, Any]:
        name = ("tiny-lora" if POINTS[point].lora else "tiny") if tiny else point
        results = run_updates(name, {setting: ("speed.ours", *words) for setting, words in settings.items()})
        for setting, result in results.items():
            if "update" in result and not POINTS[point].lora:
                count, shared = POINTS[name].batch, "--shared" in settings[setting]
                flops = POINTS[name].update_flops(2 * count, shared) - POINTS[name].update_flops(count, shared)
                result[UPDATE_RATE] = flops / result["update"] / 1e12
        return results

    return part


def peer(device: str, tiny: bool) -> dict[str, Any]:
    """Times TRL 1.12.0 and this trainer on 64 completions of point c. TRL keeps all logits, so more do not fit."""
    if not (PEER / "trl").is_dir():
        return {"not run": f"TRL 1.12.0 is not in {PEER} (docs/gpu.md)"}
    return run_updates("tiny" if tiny else "c64", {
        "TRL 1.12.0": ("speed.peer",), "here": ("speed.ours",), "here, bf16": ("speed.ours", *BF16),
    })  # fmt: skip


def profile(device: str, tiny: bool) -> dict[str, Any]:
    """Measures the device's seconds by kind of operation, in an update of 64 completions of point c."""
    return run_module("speed.profile", "ours", "tiny" if tiny else "c64", *BF16)


def tests(device: str, tiny: bool) -> dict[str, Any]:
    """Runs the trainer's tests with models and tensors on the device."""
    files = ["tests/unit/test_sampling.py"] if tiny else TESTS
    with tempfile.TemporaryDirectory() as directory:
        report, stderr_file = Path(directory) / "report.xml", Path(directory) / "stderr"
        command = [
            sys.executable, "-m", "pytest", "-q", "--device", device, "-m", "not full", "-n", "auto",
            "-k", f"not ({NEEDS_CPU})", "--timeout", "120", "--tb=short", "--junitxml", str(report), *files,
        ]  # fmt: skip
        start, cut_off = time.perf_counter(), None
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with stderr_file.open("w") as stderr:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=stderr)
        try:
            process.wait()
        except TimeoutError as error:
            cut_off = str(error)
            process.send_signal(signal.SIGINT)  # pytest then still writes its report
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        if not report.is_file():
            raise RuntimeError(f"pytest wrote no report: {stderr_file.read_text().strip()[-300:]}")
        counts: Counter[str] = Counter()
        failed, skipped = [], []
        for case in ET.parse(report).iter("testcase"):
            outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            counts[outcome] += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            if outcome != "passed":
                (skipped if outcome == "skipped" else failed).append(name)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "files": files, **counts, "failed": failed, "not run": skipped, "cut off": cut_off}
