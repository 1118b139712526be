"""The trainer on an accelerator: agreement with the CPU, precision, resuming, speed and memory, and its tests.

    python benchmarks/gpu.py                         # every part on the GPU that is there: `make gpu`
    python benchmarks/gpu.py --device cpu --tiny     # a rehearsal without one: the same parts, tiny models
    python benchmarks/gpu.py parity resume           # some parts

Models have random weights, so nothing is downloaded. Writes benchmarks/results/DATE-MACHINE.json after each part, so
that a run that is cut off leaves what it had, and parts that are run again replace what the file says of them. A part
that fails leaves its error there, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# cuBLAS reads it when it begins; without it nothing is deterministic under `full_determinism`.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from datasets import Dataset
from speed.points import BOS, EOS, PAD, word_tokenizer
from torch import Tensor
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_zoo import PPOConfig, PPOTrainer
from rlhf_zoo.logprobs import token_logprobs
from rlhf_zoo.ppo.rollout import Advantages, Rollout
from rlhf_zoo.sampling import Samples, sample

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "numpy")
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 688, "vocab_size": 4096}  # fmt: skip
QWEN_05B = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "intermediate_size": 4864, "vocab_size": 151_936}  # fmt: skip
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
TESTS = [
    *(f"tests/numerics/test_{name}.py" for name in (
        "goldens", "reference", "properties", "kl_estimators", "learning", "resume", "trl_parity", "gpu")),
    *(f"tests/unit/test_{name}.py" for name in (
        "trainer", "ppo_options", "peft", "sampling", "models", "guards", "compat", "value_head", "trl_defects",
        "rewards", "ppo_stage", "trace", "config")),
]  # fmt: skip
TESTS_SECONDS = 240
ON_CPU = "push_to_hub or pushed_and_pulled or the_command_and or the_script_prints"  # in processes that see no GPU


def build(kind: Any, shape: Mapping[str, int], *, seed: int, **fields: Any) -> Any:
    """A model with the same random weights on every device."""
    config = Qwen2Config(
        **{**shape, "max_position_embeddings": 1024, "tie_word_embeddings": True, "pad_token_id": PAD,
           "eos_token_id": EOS, "bos_token_id": BOS, **fields},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        model.model.norm.weight.fill_(5.0)  # random logits would be nearly equal, and every token as likely
    return model


def prompts(count: int, lengths: tuple[int, int], vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(lengths[0], lengths[1] + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, vocabulary, (size,), generator=generator).tolist() for size in sizes]


def trainer(kind: type[PPOTrainer], device: str, shape: Mapping[str, int], *, rows: int, **given: Any) -> Any:
    """A trainer of random models (policy, reference, reward model and critic), over `rows` prompts."""
    critic = build(Qwen2ForSequenceClassification, shape, seed=1, num_labels=1)
    fields: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="gpu-"), "per_device_train_batch_size": 8, "num_mini_batches": 2,
        "num_ppo_epochs": 2, "max_steps": 1, "response_length": 48, "temperature": 1.0, "stop_token": None,
        "learning_rate": 1e-4, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 0,
        "use_cpu": device == "cpu",
    } | given  # fmt: skip
    made = kind(
        PPOConfig(**fields), word_tokenizer(shape["vocab_size"]), build(Qwen2ForCausalLM, shape, seed=0),
        ref_model=build(Qwen2ForCausalLM, shape, seed=2), reward_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": prompts(rows, (16, 32), shape["vocab_size"])}),
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def weights(made: PPOTrainer) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in made.actor.state_dict().items()}


def flat(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()]).double()


def relative(one: Tensor, other: Tensor) -> float:
    """The largest difference, in units of the largest entry of `one`."""
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    return float((one - other).abs().max() / one.abs().max())


# Parts


class Replay(PPOTrainer):
    """Takes given completions instead of sampling, and keeps what it made of them."""

    given: Samples

    def rollout(self, rows: Any, *, stream: int) -> Rollout:
        samples = Samples(**{name: value.to(self.args.device) for name, value in vars(self.given).items()})
        return self.evaluated(samples, recompute=True)

    def update(self, model: Any, rollout: Rollout, estimates: Advantages) -> dict[str, float]:
        progress = super().update(model, rollout, estimates)
        self.seen = {
            "log-probabilities": rollout.logprobs, "reference log-probabilities": rollout.ref_logprobs,
            "values": rollout.values, "scores": estimates.scores, "advantages": estimates.advantages,
            "returns": estimates.returns, "loss": torch.tensor(progress["loss"], device="cpu"),
        }  # fmt: skip
        return progress


def parity(device: str, tiny: bool) -> dict[str, Any]:
    """One update in float32 from equal weights and completions: CPU against device, and CPU against itself.

    The CPU against itself takes micro-batches of another size, which is how far another order of sums goes.
    """
    shape, size = (TINY, 16) if tiny else (SMALL, 32)
    source = build(Qwen2ForCausalLM, shape, seed=0)
    given = sample(
        source, prompts(size, (16, 32), shape["vocab_size"]), keys=[(row,) for row in range(size)], seed=0,
        max_new_tokens=48, stop_ids=[EOS], pad_id=PAD,
    )  # fmt: skip
    found: dict[str, Any] = {"completions": size, "tokens": int(given.mask.sum())}
    for optimizer, rate in (("sgd", 1e-2), ("adamw_torch", 1e-5)):
        runs = {}
        for name, place, micro in (("cpu", "cpu", 8), ("cpu again", "cpu", 4), ("device", device, 8)):
            made = trainer(
                Replay, place, shape, rows=size, per_device_train_batch_size=micro, max_grad_norm=0.0,
                gradient_accumulation_steps=size // micro, optim=optimizer, learning_rate=rate, stop_token="eos",
                local_rollout_forward_batch_size=micro,
            )  # fmt: skip
            made.given, began = given, weights(made)
            made.train()
            runs[name] = (made.seen, began, weights(made))
        seen, began, ended = runs["cpu"]
        change = flat(ended) - flat(began)
        for name in ("device", "cpu again"):
            other_seen, _, other_ended = runs[name]
            difference = flat(other_ended) - flat(ended)
            found.setdefault(optimizer, {})[name] = {key: relative(seen[key], other_seen[key]) for key in seen} | {
                "weights": float(difference.abs().max() / flat(ended).abs().max()),
                "change of the weights, by norm": float(difference.norm() / change.norm()),
            }
    return found


def mismatch(device: str, tiny: bool) -> dict[str, Any]:
    """log π as the sampler says it (decoding with a cache) against a forward pass of whole rows, as in training."""
    shape, size, length = (TINY, 4, 12) if tiny else (QWEN_05B, 32, 256)
    asked = prompts(size, (16, 128), shape["vocab_size"])
    found: dict[str, Any] = {"completions": size, "response_length": length}
    for name, dtype, autocast in (
        ("float32", torch.float32, False),
        ("bf16 autocast", torch.float32, True),
        ("bf16 weights", torch.bfloat16, False),
    ):
        model = build(Qwen2ForCausalLM, shape, seed=0).to(device, dtype)
        with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
            drawn = sample(
                model, asked, keys=[(row,) for row in range(size)], seed=0, max_new_tokens=length, stop_ids=[],
                pad_id=PAD,
            )  # fmt: skip
            forward = token_logprobs(model, drawn, batch_size=8)
            others = token_logprobs(model, drawn, batch_size=4)
        log_ratio = (forward - drawn.logprobs)[drawn.mask].double()
        again = (forward - others)[drawn.mask].double().abs()
        found[name] = {
            "mean log-probability": float(drawn.logprobs[drawn.mask].mean()),
            "mean |log ratio|": float(log_ratio.abs().mean()),
            "p99 |log ratio|": float(log_ratio.abs().quantile(0.99)),
            "max |log ratio|": float(log_ratio.abs().max()),
            "smallest ratio": math.exp(float(log_ratio.min())),
            "largest ratio": math.exp(float(log_ratio.max())),
            "share outside 0.8..1.2": float(((log_ratio.exp() - 1).abs() > 0.2).double().mean()),
            "mean k3, nats": float((log_ratio.expm1() - log_ratio).mean()),
            "batches of 8 against 4, mean": float(again.mean()),
            "batches of 8 against 4, max": float(again.max()),
        }
        del model
    return found


def resume(device: str, tiny: bool) -> dict[str, Any]:
    """Four updates alone, the same once more, and the last two resumed from a checkpoint: the largest difference."""
    shape = TINY if tiny else SMALL
    found: dict[str, Any] = {}
    for name, given in {
        "float32": {},
        "bf16": {"bf16": True},
        "float32, full_determinism": {"full_determinism": True},
    }.items():
        common = {"rows": 64, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "kl_target": 1.0, **given}
        try:
            ends = []
            for origin in (None, None, "checkpoint"):
                made = trainer(PPOTrainer, device, shape, **common)
                if origin is None:
                    made.train()
                    saved = Path(made.args.output_dir) / "checkpoint-2"
                else:
                    made.train(resume_from_checkpoint=str(saved))
                ends.append((weights(made), made.last_metrics))
        finally:
            torch.use_deterministic_algorithms(False)
        (alone, metrics), *others = ends
        found[name] = {
            what: {
                "bit-equal": all(torch.equal(alone[key], end[key]) for key in alone),
                "largest difference of a weight": max(float((alone[key] - end[key]).abs().max()) for key in alone),
                "equal metrics": metrics == last,
            }
            for what, (end, last) in zip(("a second run", "resumed"), others, strict=True)
        }
    return found


class Timed(PPOTrainer):
    """Notes seconds and peak memory of each phase of an update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.phases: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._since = time.perf_counter()

    def mark(self, phase: str | None) -> None:
        """Ends a phase; None ends what is not counted."""
        peak = 0.0
        if self.args.device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        if phase is not None:
            self.phases[phase].append((now - self._since, peak))
        self._since = now

    def rollout(self, *args: Any, **kwargs: Any) -> Rollout:
        self.mark(None)
        return super().rollout(*args, **kwargs)

    def evaluated(self, *args: Any, **kwargs: Any) -> Rollout:
        self.mark("sample")
        made = super().evaluated(*args, **kwargs)
        self.mark("reference and values")
        return made

    def score(self, *args: Any, **kwargs: Any) -> Any:
        made = super().score(*args, **kwargs)
        self.mark("score")
        return made

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.mark("estimate")
        made = super().update(*args, **kwargs)
        self.mark("update")
        return made


def speed(device: str, tiny: bool) -> dict[str, Any]:
    """Seconds and peak memory of each phase of an update of 64 completions of 256 tokens, after one of warm-up."""
    shape, size, length, micro, updates = (TINY, 8, 8, 4, 2) if tiny else (QWEN_05B, 64, 256, 8, 2)
    found: dict[str, Any] = {"completions": size, "response_length": length, "micro-batch": micro}
    for name, given in {"bf16 autocast": {"bf16": True}, "float32": {}}.items():
        made = trainer(
            Timed, device, shape, rows=size, max_steps=updates, response_length=length, num_mini_batches=1,
            num_ppo_epochs=4, per_device_train_batch_size=micro, gradient_accumulation_steps=size // micro,
            local_rollout_forward_batch_size=2 * micro, learning_rate=3e-6, **given,
        )  # fmt: skip
        made.train()
        parameters = sum(parameter.numel() for parameter in made.policy.parameters())
        found[name] = {
            "parameters of the policy": parameters,
            "attention": made.policy.config._attn_implementation,
            "phases": {
                phase: {
                    "seconds": statistics.median(seconds for seconds, _ in seen[1:]),
                    "peak GiB": max(peak for _, peak in seen[1:]),
                }
                for phase, seen in made.phases.items()
            },
        }
        phases = found[name]["phases"]
        found[name]["seconds of an update"] = sum(each["seconds"] for each in phases.values())
        found[name]["sampled tokens a second"] = size * length / phases["sample"]["seconds"]
        del made
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def tests(device: str, tiny: bool) -> dict[str, Any]:
    """The trainer's tests with models and tensors on the device."""
    chosen = ["tests/unit/test_sampling.py"] if tiny else TESTS
    workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "--device", device, "-m", "not full", "-n", str(workers),
            "-k", f"not ({ON_CPU})", "--timeout", "120", "--tb=short", "--junitxml", str(report), *chosen,
        ]  # fmt: skip
        began = time.perf_counter()
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=TESTS_SECONDS, check=False)
        counts: dict[str, int] = defaultdict(int)
        failed, skipped = [], []
        for case in ET.parse(report).iter("testcase"):
            outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            counts[outcome] += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            if outcome == "skipped":
                skipped.append(name)
            elif outcome != "passed":
                failed.append(name)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "files": chosen, **counts, "failed": failed, "not run": skipped}


PARTS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "parity": parity, "mismatch": mismatch, "resume": resume, "speed": speed, "tests": tests,
}  # fmt: skip


def show(value: Any, title: str, depth: int = 0) -> None:
    pad = "  " * depth
    if isinstance(value, dict):
        print(f"{pad}{title}")
        for name, each in value.items():
            show(each, name, depth + 1)
    else:
        print(f"{pad}{title:<{44 - len(pad)}} {f'{value:.4g}' if isinstance(value, float) else value}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all if none is given")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to rehearse")
    parser.add_argument("--output", type=Path, help="the JSON file")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: give --device cpu --tiny to rehearse")
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"cpu-{platform.machine()}"
    slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    date = datetime.date.today().isoformat()
    path = arguments.output or ROOT / "benchmarks" / "results" / f"{date}-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.is_file() else {"parts": {}, "seconds": {}}
    report: dict[str, Any] = {
        "date": date, "machine": machine, "tiny": arguments.tiny, "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "cuda": torch.version.cuda if arguments.device == "cuda" else None,
        "parts": before["parts"], "seconds": before["seconds"],
    }  # fmt: skip
    broken = False
    for name in arguments.parts or PARTS:
        began = time.perf_counter()
        try:
            report["parts"][name] = PARTS[name](arguments.device, arguments.tiny)
        except Exception as error:  # the other parts have something to say too
            traceback.print_exc()
            report["parts"][name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        broken |= bool(report["parts"][name].get("error") or report["parts"][name].get("failed"))
        report["seconds"][name] = time.perf_counter() - began
        path.write_text(json.dumps(report, indent=1) + "\n")
    show(report, str(path))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
