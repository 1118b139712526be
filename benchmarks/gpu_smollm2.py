"""The part `smollm2` of gpu.py: five minutes of PPO on a real chat model, with IFEval before and after.

The model is a GGUF file in .gpu/, complete or in two halves, for machines that accept at most 64 MiB at a time. The
recipe is smollm2-ifeval in its full form, with the settings of "A run that keeps the text" on its page. IFEval's
prompts are ifeval/test.jsonl.gz in the folder RLHF_ZOO_DATA; they are never trained on.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_zoo.runs.record import StageRecord

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".gpu" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HALVES = ("aa", "ab")  # as `split -n 2 FILE FILE.` names them
TRAINING_SECONDS = 300.0  # then PPO gets SIGINT: it saves a checkpoint and stops
RECIPE = "smollm2-ifeval"
#: The recipe's rewards without `relevance`, whose model would have to be carried there too.
REWARD_FUNCS = """["instructions_followed", "length(unit='words', name='words')", "repetition(unit='words')"]"""
#: The run ends by the clock and not after a number of episodes, so the learning rate is constant.
FULL_FORM = (
    "--corpus_args", "{}", "--ppo.learning_rate", "2e-4", "--ppo.lr_scheduler_type", "constant",
    "--ppo.total_episodes", "1000000", "--ppo.gradient_accumulation_steps", "8", "--ppo.response_length", "256",
    "--ppo.kl_coef", "0.05", "--ppo.eval_strategy", "no", "--ppo.save_steps", "1000000", "--ppo.bf16", "true",
)  # fmt: skip
REHEARSAL = (
    "--ppo.total_episodes", "16", "--ppo.num_mini_batches", "1", "--ppo.num_ppo_epochs", "1", "--ppo.bf16", "false",
    "--ppo.response_length", "8", "--ppo.max_prompt_length", "1024", "--ppo.eval_strategy", "no",
)  # fmt: skip
REWARD = "rewards/instructions_followed"
METRICS = (REWARD, "objective/kl", "rewards/words", "rewards/repetition", "completions/length")


def smollm2(device: str, tiny: bool) -> dict[str, Any]:
    """Trains, and scores the policy before and after. A rehearsal makes one small update and scores four prompts."""
    prompts = Path(os.environ.get("RLHF_ZOO_DATA", "")) / "ifeval" / "test.jsonl.gz"
    if not prompts.is_file():
        return {"not run": "RLHF_ZOO_DATA names no folder that holds ifeval/test.jsonl.gz (docs/gpu.md)"}
    if (model := find_model(MODEL)) is None:
        return {"not run": f"{MODEL.name} is not in .gpu, neither complete nor in two halves (docs/gpu.md)"}
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        run = Path(folder) / "run"
        seconds = train(model, run, REHEARSAL if tiny else FULL_FORM, device)
        record = StageRecord(run / "ppo")
        checkpoint = record.last_checkpoint()
        rows = [row for row in record.metrics() if REWARD in row]
        if checkpoint is None or not rows:
            raise RuntimeError("PPO saved no checkpoint")
        result: dict[str, Any] = {"updates": len(rows), "seconds": seconds}
        for name, row in (("first update", rows[0]), ("last update", rows[-1])):
            result[name] = {key: row[key] for key in METRICS}
        for name, policy in (("before", model), ("after", checkpoint)):
            result[f"IFEval {name}"] = score(policy, prompts, Path(folder) / f"{name}.json", 4 if tiny else None)
    return result


def find_model(path: Path) -> Path | None:
    """Returns the model's file, joined from its halves if necessary; None if a half is missing."""
    halves = [path.with_name(f"{path.name}.{half}") for half in HALVES]
    if not path.is_file() and all(half.is_file() for half in halves):
        path.write_bytes(b"".join(half.read_bytes() for half in halves))
    return path if path.is_file() else None


def train(model: Path, run: Path, flags: Sequence[str], device: str) -> float:
    """Runs the recipe's PPO without a Hub, for at most `TRAINING_SECONDS`, and returns the seconds that it took."""
    command = [
        sys.executable, "-m", "rlhf_zoo.cli.main", "ppo", RECIPE, "--output_dir", str(run), "--source_hub", "none",
        "--ppo.model_name_or_path", str(model), "--ppo.reward_funcs", REWARD_FUNCS, "--ppo.reward_weights", "[1, 0, 1]",
        *flags,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    start, log = time.perf_counter(), run.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TRAINING_SECONDS)
            if stopped := process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
        finally:
            process.kill()
    if process.returncode and not stopped:
        raise RuntimeError(f"rlhf-zoo ppo failed: {log.read_text()[-1000:]}")
    return time.perf_counter() - start


def score(policy: Path, prompts: Path, output: Path, limit: int | None) -> dict[str, Any]:
    """Scores a policy's greedy answers on IFEval, in a separate process that frees the device afterwards."""
    command = [
        sys.executable, str(ROOT / "benchmarks" / "ifeval.py"), str(policy), "--prompts", str(prompts),
        "--output", str(output), "--batch", "128", *(() if limit is None else ("--limit", str(limit))),
    ]  # fmt: skip
    start = time.perf_counter()
    process = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"ifeval.py failed: {process.stderr[-1000:]}")
    figures = json.loads(output.read_text())
    kept = ("average", "prompt_strict", "instruction_strict", "words", "ended", "prompts")
    return {**{name: figures[name] for name in kept}, "seconds": time.perf_counter() - start}
