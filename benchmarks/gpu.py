"""Checks the trainer on a GPU: agreement with the CPU, precision, resuming, speed, memory and its tests.

    python benchmarks/gpu.py                         # every part, on the GPU of this machine: `make gpu`
    python benchmarks/gpu.py --device cpu --tiny     # a rehearsal without a GPU: the same parts, tiny models
    python benchmarks/gpu.py parity resume           # some parts
    python benchmarks/gpu.py --minutes 5             # the parts that fit into this time; the most important come first

Models have random weights, so nothing is downloaded; only the part smollm2 uses a real model, from .gpu/. The script
writes benchmarks/results/DATE-MACHINE.json after each part, so an interrupted run keeps its finished parts. A part that
runs again replaces its earlier figures. If a part fails, the file has its error and the exit code is 1.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

# cuBLAS reads it when it starts. Without it, `full_determinism` does not make matrix products deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if __name__ == "__main__":  # not in tests, which import this module
    os.environ["HF_HUB_OFFLINE"] = "1"

import plan_check
import torch
from datasets import Dataset
from gpu_processes import BF16, UPDATE_RATE, peer, profile, tests, update_part
from gpu_smollm2 import smollm2
from speed.points import BOS, EOS, PAD, word_tokenizer
from torch import Tensor
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_zoo import PPOConfig, PPOTrainer
from rlhf_zoo.modeling.logprobs import token_logprobs
from rlhf_zoo.modeling.sampling.cuda_graphs import CudaGraphs
from rlhf_zoo.modeling.sampling.sampler import Samples, SamplingRequest, Vocabulary, sample
from rlhf_zoo.ppo.engines import NativeEngine
from rlhf_zoo.ppo.rollout import Advantages, Rollout

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "numpy")
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 688, "vocab_size": 4096}  # fmt: skip
QWEN_05B = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "intermediate_size": 4864, "vocab_size": 151_936}  # fmt: skip
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
MATRIX_RATE = "TFLOP/s of bf16 matrices"


def build(kind: Any, shape: Mapping[str, int], *, seed: int, **fields: Any) -> Any:
    """Builds a model whose random weights depend only on the seed, and not on the device."""
    config = Qwen2Config(
        **{**shape, "max_position_embeddings": 1024, "tie_word_embeddings": True, "pad_token_id": PAD,
           "eos_token_id": EOS, "bos_token_id": BOS, **fields},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        model.model.norm.weight.fill_(5.0)  # else all logits would be nearly equal, and all tokens equally likely
    return model


def random_prompts(count: int, lengths: tuple[int, int], vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(lengths[0], lengths[1] + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, vocabulary, (size,), generator=generator).tolist() for size in sizes]


def make_trainer(kind: type[PPOTrainer], device: str, shape: Mapping[str, int], *, rows: int, **options: Any) -> Any:
    """Makes a trainer with random models (policy, reference, reward model and critic) and `rows` prompts."""
    critic = build(Qwen2ForSequenceClassification, shape, seed=1, num_labels=1)
    fields: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="gpu-"), "per_device_train_batch_size": 8, "num_mini_batches": 2,
        "num_ppo_epochs": 2, "max_steps": 1, "response_length": 48, "temperature": 1.0, "stop_token": None,
        "learning_rate": 1e-4, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 0,
        "use_cpu": device == "cpu",
    } | options  # fmt: skip
    trainer = kind(
        PPOConfig(**fields), word_tokenizer(shape["vocab_size"]), build(Qwen2ForCausalLM, shape, seed=0),
        ref_model=build(Qwen2ForCausalLM, shape, seed=2), reward_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": random_prompts(rows, (16, 32), shape["vocab_size"])}),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def copy_weights(trainer: PPOTrainer) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in trainer.actor.state_dict().items()}


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).double()


def relative_difference(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest difference, in units of the largest entry of `expected`."""
    expected, actual = expected.detach().cpu().double(), actual.detach().cpu().double()
    return float((expected - actual).abs().max() / expected.abs().max())


# Parts


class ReplayTrainer(PPOTrainer):
    """Trains on fixed completions instead of sampling, and records the tensors computed from them."""

    samples: Samples

    def rollout(self, rows: Any, *, stream: int) -> Rollout:
        return self.make_rollout(self.samples.to(self.args.device), recompute_logprobs=True)

    def run_epochs(self, model: Any, rollout: Rollout, advantages: Advantages) -> dict[str, float]:
        progress = super().run_epochs(model, rollout, advantages)
        self.recorded = {
            "log-probabilities": rollout.logprobs, "reference log-probabilities": rollout.ref_logprobs,
            "values": rollout.values, "scores": advantages.shaped_scores, "advantages": advantages.advantages,
            "returns": advantages.returns, "loss": torch.tensor(progress["loss"], device="cpu"),
        }  # fmt: skip
        return progress


def parity(device: str, tiny: bool) -> dict[str, Any]:
    """Compares an update in float32 on the device with the same update on the CPU, from equal weights and completions.

    The CPU is also compared with itself at another size of micro-batches, which shows the effect of summation order.
    """
    shape, size = (TINY, 16) if tiny else (SMALL, 32)
    source = build(Qwen2ForCausalLM, shape, seed=0)
    samples = sample(
        source, random_prompts(size, (16, 32), shape["vocab_size"]), keys=[(row,) for row in range(size)], seed=0,
        max_new_tokens=48, stop_ids=[EOS], pad_id=PAD,
    )  # fmt: skip
    result: dict[str, Any] = {"completions": size, "tokens": int(samples.mask.sum())}
    for optimizer, rate in (("sgd", 1e-2), ("adamw_torch", 1e-5)):
        runs = {}
        for name, place, micro in (("cpu", "cpu", 8), ("cpu again", "cpu", 4), ("device", device, 8)):
            trainer = make_trainer(
                ReplayTrainer, place, shape, rows=size, per_device_train_batch_size=micro, max_grad_norm=0.0,
                gradient_accumulation_steps=size // micro, optim=optimizer, learning_rate=rate, stop_token="eos",
                local_rollout_forward_batch_size=micro,
            )  # fmt: skip
            trainer.samples, before = samples, copy_weights(trainer)
            trainer.train()
            runs[name] = (trainer.recorded, flatten(before), flatten(copy_weights(trainer)))
        expected, before, after = runs["cpu"]
        for name in ("device", "cpu again"):
            actual, _, other_after = runs[name]
            difference = other_after - after
            result.setdefault(optimizer, {})[name] = {
                **{key: relative_difference(expected[key], actual[key]) for key in expected},
                "weights": float(difference.abs().max() / after.abs().max()),
                "change of the weights, by norm": float(difference.norm() / (after - before).norm()),
            }
    return result


def make_engine(device: str, has_graphs: bool = True) -> NativeEngine:
    """Makes the trainer's sampler. On a CPU nothing is captured, but the cache has a fixed size as with CUDA graphs."""
    if not has_graphs:
        return NativeEngine()
    return NativeEngine(CudaGraphs if device == "cuda" else lambda: lambda step: step)


def make_request(
    shape: Mapping[str, int], size: int, length: int, prompt_lengths: tuple[int, int], **options: Any
) -> SamplingRequest:
    prompts = random_prompts(size, prompt_lengths, shape["vocab_size"])
    return SamplingRequest(
        prompts, keys=[(row,) for row in range(size)], seed=0, max_new_tokens=length, pad_id=PAD, temperature=1.0,
        vocabulary=Vocabulary(shape["vocab_size"]), **options,
    )  # fmt: skip


def sampling(device: str, tiny: bool) -> dict[str, Any]:
    """Samples in float32, all at once and as a queue: compares completions with the CPU's, and times a second call.

    If rounding decides a token, the completion differs from there on.
    """
    shape, size, length = (TINY, 12, 12) if tiny else (SMALL, 64, 192)
    model = build(Qwen2ForCausalLM, shape, seed=0)
    stop_ids, queue_tokens = range(EOS, shape["vocab_size"], 150), size * (length + 128) // 3
    requests = {
        name: make_request(shape, size, length, (4, 96), stop_ids=stop_ids, max_tokens=tokens)
        for name, tokens in (("at once", None), ("queue", queue_tokens))
    }
    expected = make_engine("cpu", has_graphs=False)(model, requests["at once"])
    rows: dict[str, Any] = {}
    model = model.to(device)
    for kind, sampler in (("eager", make_engine(device, has_graphs=False)), ("graphs", make_engine(device))):
        for name, request in requests.items():
            sampler(model, request)
            start = time.perf_counter()
            actual = sampler(model, request).to("cpu")
            pairs = zip(expected.completion_id_lists(), actual.completion_id_lists(), strict=True)
            equal = torch.tensor([expected_tokens == tokens for expected_tokens, tokens in pairs])
            width = min(expected.logprobs.shape[1], actual.logprobs.shape[1])
            differences = (expected.logprobs[equal, :width] - actual.logprobs[equal, :width]).abs()
            rows[f"{kind}, {name}"] = {
                "seconds": time.perf_counter() - start, "equal completions": int(equal.sum()),
                "largest difference of log-probabilities": float(differences.max()) if len(differences) else None,
            }  # fmt: skip
    return {"completions": size, "tokens": int(expected.mask.sum()), **rows}


def mismatch(device: str, tiny: bool) -> dict[str, Any]:
    """Compares the sampler's log π (decoding with a cache) with a forward pass over complete rows, as in training."""
    shape, size, length = (TINY, 4, 12) if tiny else (QWEN_05B, 32, 256)
    request = make_request(shape, size, length, (16, 128), stop_ids=[])
    result: dict[str, Any] = {"completions": size, "response_length": length}
    for name, dtype, autocast in (
        ("float32", torch.float32, False),
        ("bf16 autocast", torch.float32, True),
        ("bf16 weights", torch.bfloat16, False),
    ):
        model = build(Qwen2ForCausalLM, shape, seed=0).to(device, dtype)
        with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
            samples = make_engine(device)(model, request)
            forward = token_logprobs(model, samples, batch_size=8)
            forward_by_4 = token_logprobs(model, samples, batch_size=4)
        log_ratio = (forward - samples.logprobs)[samples.mask].double()
        batch_effect = (forward - forward_by_4)[samples.mask].double().abs()
        result[name] = {
            "mean log-probability": float(samples.logprobs[samples.mask].mean()),
            "mean |log ratio|": float(log_ratio.abs().mean()),
            "p99 |log ratio|": float(log_ratio.abs().quantile(0.99)),
            "max |log ratio|": float(log_ratio.abs().max()),
            "share outside 0.8..1.2": float(((log_ratio.exp() - 1).abs() > 0.2).double().mean()),
            "mean k3, nats": float((log_ratio.expm1() - log_ratio).mean()),
            "batches of 8 against 4, mean": float(batch_effect.mean()),
            "batches of 8 against 4, max": float(batch_effect.max()),
        }
        del model
    return result


def resume(device: str, tiny: bool) -> dict[str, Any]:
    """Compares four updates with the same run again, and with a run that resumes after the second update."""
    shape = TINY if tiny else SMALL
    results: dict[str, Any] = {}
    environment = dict(os.environ)
    for name, settings in {
        "float32": {},
        "bf16": {"bf16": True},
        "float32, full_determinism": {"full_determinism": True},
    }.items():
        common = {"rows": 64, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "kl_target": 1.0, **settings}
        try:
            ends = []
            for origin in (None, None, "checkpoint"):
                trainer = make_trainer(PPOTrainer, device, shape, **common)
                if origin is None:
                    trainer.train()
                    saved = Path(trainer.args.output_dir) / "checkpoint-2"
                else:
                    trainer.train(resume_from_checkpoint=str(saved))
                ends.append((copy_weights(trainer), trainer.last_metrics))
        finally:
            # Undoes all settings of full_determinism, which would slow down the later parts.
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.deterministic = False
            os.environ.clear()
            os.environ.update(environment)
        (first, first_metrics), *later = ends
        results[name] = {
            run: {
                "bit-equal": all(torch.equal(first[key], weights[key]) for key in first),
                "largest difference of a weight": max(float((first[key] - weights[key]).abs().max()) for key in first),
                "equal metrics": metrics == first_metrics,
            }
            for run, (weights, metrics) in zip(("a second run", "resumed"), later, strict=True)
        }
    return results


def ceilings(device: str, tiny: bool) -> dict[str, Any]:
    """Measures the device's highest rates: bf16 matrix products, memory copies, and launches of small kernels."""
    size, floats = (256, 2**20) if tiny else (8192, 2**29)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    matrix = _time_call(device, lambda: left @ right, 3 if tiny else 200)
    source, target = (torch.zeros(floats, device=device) for _ in range(2))
    copy = _time_call(device, lambda: target.copy_(source), 10)
    small = torch.zeros(1, device=device)
    return {
        MATRIX_RATE: 2 * size**3 / matrix / 1e12,
        "copied GB a second, reads and writes": 8 * floats / copy / 1e9,
        "microseconds a small kernel": 1e6 * _time_call(device, lambda: small.add_(1), 1000),
    }


def _time_call(device: str, function: Callable[[], Any], calls: int) -> float:
    """Returns the mean seconds of a call, after one call for warm-up."""
    for count in (1, calls):
        start = time.perf_counter()
        for _ in range(count):
            function()
        if device == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def plan(device: str, tiny: bool) -> dict[str, Any]:
    """Compares the planner's memory with torch's peak, in each setting of benchmarks/plan_check.py except `nothing`."""
    names = ["nothing"] if tiny else [name for name in plan_check.SETTINGS if name != "nothing"]
    rows = {str(row.pop("setting")): row for row in plan_check.compare(names, device)}
    errors = [row["predicted_mib"] / row["measured_mib"] - 1 for row in rows.values()]
    return {**rows, "farthest apart": max(errors, key=abs)}


EAGER = (*BF16, "--set", json.dumps({"rollout_graphs": False}))
LARGE_PASSES = (*BF16, "--set", json.dumps({"max_tokens_per_micro_batch": 16_384}))
PARTS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "ceilings": ceilings,
    "c": update_part("c", {
        "bf16, graphs, 16,384 tokens a pass": LARGE_PASSES,
        "bf16, graphs, 16,384 tokens a pass, shared trunk": (*LARGE_PASSES, "--shared"), "bf16, graphs": BF16,
        "bf16, eager": EAGER,
    }),
    "sampling": sampling, "parity": parity, "mismatch": mismatch, "resume": resume, "plan": plan, "profile": profile,
    "1b": update_part("1b", {"bf16": BF16}), "8b-lora": update_part("8b-lora", {"bf16 weights": ()}), "trl": peer,
    "smollm2": smollm2, "tests": tests,
}  # fmt: skip
TIME_LIMITS = {"tests": 120.0}  # seconds


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if the body takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError("it took longer than the minutes that were left")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _add_rate_shares(parts: Mapping[str, Any]) -> None:
    """Adds to each update the share of the device's matrix rate that it reached."""
    for name in ("c", "1b"):
        for setting in parts.get(name, {}).values():
            if UPDATE_RATE in setting and MATRIX_RATE in parts.get("ceilings", {}):
                setting["share of the measured rate"] = setting[UPDATE_RATE] / parts["ceilings"][MATRIX_RATE]


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _has_failed(part: Mapping[str, Any]) -> bool:
    """Whether a part has an error or a failed test, at any depth."""
    return any(
        (name in ("error", "failed") and bool(value)) or (isinstance(value, dict) and _has_failed(value))
        for name, value in part.items()
    )


def print_report(figures: Any, title: str, depth: int = 0) -> None:
    indent = "  " * depth
    if isinstance(figures, dict):
        print(f"{indent}{title}")
        for name, child in figures.items():
            print_report(child, name, depth + 1)
    else:
        print(f"{indent}{title:<{44 - len(indent)}} {f'{figures:.4g}' if isinstance(figures, float) else figures}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use tiny models, for a rehearsal")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--minutes", type=float, default=15, help="end after about this many minutes (default: 15)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: give --device cpu --tiny to rehearse")
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"cpu-{platform.machine()}"
    slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    path = options.output or ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.is_file() else {"parts": {}, "seconds": {}}
    report: dict[str, Any] = {
        "date": f"{datetime.date.today()}", "machine": machine, "tiny": options.tiny,
        "python": platform.python_version(), "versions": {package: _version(package) for package in PACKAGES},
        "cuda": torch.version.cuda if options.device == "cuda" else None,
        "parts": before["parts"], "seconds": before["seconds"],
    }  # fmt: skip
    failed, deadline = False, time.monotonic() + 60 * options.minutes
    for name in options.parts or PARTS:
        start = time.perf_counter()
        if (left := deadline - time.monotonic()) <= 0:
            print(f"{name}: not begun, the {options.minutes:g} minutes are over")
            continue
        try:
            with time_limit(min(left, TIME_LIMITS.get(name, left))):
                report["parts"][name] = PARTS[name](options.device, options.tiny)
        except TimeoutError as error:
            report["parts"][name] = {"not run": str(error)}
        except Exception as error:  # the other parts still run
            traceback.print_exc()
            report["parts"][name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        failed |= _has_failed(report["parts"][name])
        _add_rate_shares(report["parts"])
        report["seconds"][name] = time.perf_counter() - start
        path.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report, str(path))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
