"""The trainer on an accelerator: agreement with the CPU, precision, resuming, speed and memory, and its tests.

    python benchmarks/gpu.py                         # every part on the GPU that is there: `make gpu`
    python benchmarks/gpu.py --device cpu --tiny     # a rehearsal without one: the same parts, tiny models
    python benchmarks/gpu.py parity resume           # some parts
    python benchmarks/gpu.py --minutes 5             # what fits into so many; the most wanted parts come first

Models have random weights, so nothing is downloaded; the part smollm2 takes a real one from .gpu/. Writes
benchmarks/results/DATE-MACHINE.json after each part, so that a run that is cut off leaves what it had; parts that are
run again replace theirs. A part that fails leaves its error there, and the exit code is 1.
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

# cuBLAS reads it when it begins; without it nothing is deterministic under `full_determinism`.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if __name__ == "__main__":  # and not in tests, which import this
    os.environ["HF_HUB_OFFLINE"] = "1"

import plan_check
import torch
from datasets import Dataset
from gpu_processes import BF16, RATE, peer, profile, tests, update_part
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
MATRIX = "TFLOP/s of bf16 matrices"


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


def trainer(kind: type[PPOTrainer], device: str, shape: Mapping[str, int], *, rows: int, **options: Any) -> Any:
    """A trainer of random models (policy, reference, reward model and critic), over `rows` prompts."""
    critic = build(Qwen2ForSequenceClassification, shape, seed=1, num_labels=1)
    fields: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="gpu-"), "per_device_train_batch_size": 8, "num_mini_batches": 2,
        "num_ppo_epochs": 2, "max_steps": 1, "response_length": 48, "temperature": 1.0, "stop_token": None,
        "learning_rate": 1e-4, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 0,
        "use_cpu": device == "cpu",
    } | options  # fmt: skip
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
        return self.evaluate_samples(self.given.to(self.args.device), recompute=True)

    def run_epochs(self, model: Any, rollout: Rollout, estimates: Advantages) -> dict[str, float]:
        progress = super().run_epochs(model, rollout, estimates)
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
    result: dict[str, Any] = {"completions": size, "tokens": int(given.mask.sum())}
    for optimizer, rate in (("sgd", 1e-2), ("adamw_torch", 1e-5)):
        runs = {}
        for name, place, micro in (("cpu", "cpu", 8), ("cpu again", "cpu", 4), ("device", device, 8)):
            made = trainer(
                Replay, place, shape, rows=size, per_device_train_batch_size=micro, max_grad_norm=0.0,
                gradient_accumulation_steps=size // micro, optim=optimizer, learning_rate=rate, stop_token="eos",
                local_rollout_forward_batch_size=micro,
            )  # fmt: skip
            made.given, start = given, weights(made)
            made.train()
            runs[name] = (made.seen, start, weights(made))
        seen, start, ended = runs["cpu"]
        change = flat(ended) - flat(start)
        for name in ("device", "cpu again"):
            other_seen, _, other_ended = runs[name]
            difference = flat(other_ended) - flat(ended)
            result.setdefault(optimizer, {})[name] = {key: relative(seen[key], other_seen[key]) for key in seen} | {
                "weights": float(difference.abs().max() / flat(ended).abs().max()),
                "change of the weights, by norm": float(difference.norm() / change.norm()),
            }
    return result


def engine(device: str, graphs: bool = True) -> NativeEngine:
    """The trainer's sampler. A step on the CPU is its own capture, so that the cache of fixed size is rehearsed."""
    if not graphs:
        return NativeEngine()
    return NativeEngine(CudaGraphs if device == "cuda" else lambda: lambda step: step)


def request(
    shape: Mapping[str, int], size: int, length: int, lengths: tuple[int, int], **options: Any
) -> SamplingRequest:
    words = prompts(size, lengths, shape["vocab_size"])
    return SamplingRequest(
        words, keys=[(row,) for row in range(size)], seed=0, max_new_tokens=length, pad_id=PAD, temperature=1.0,
        vocabulary=Vocabulary(shape["vocab_size"]), **options,
    )  # fmt: skip


def sampling(device: str, tiny: bool) -> dict[str, Any]:
    """Completions in float32, all at once and as a queue: how many are those of the CPU, and seconds of a second call.

    A completion in which rounding decided one token differs from there on.
    """
    shape, size, length = (TINY, 12, 12) if tiny else (SMALL, 64, 192)
    model = build(Qwen2ForCausalLM, shape, seed=0)
    most = size * (length + 128) // 3
    asked = {
        name: request(shape, size, length, (4, 96), stop_ids=range(EOS, shape["vocab_size"], 150), max_tokens=tokens)
        for name, tokens in (("at once", None), ("queue", most))
    }
    expected = engine("cpu", graphs=False)(model, asked["at once"])
    rows: dict[str, Any] = {}
    model = model.to(device)
    for kind, sampler in (("eager", engine(device, graphs=False)), ("graphs", engine(device))):
        for name, each in asked.items():
            sampler(model, each)
            start = time.perf_counter()
            got = sampler(model, each).to("cpu")
            lists = list(zip(expected.token_lists(), got.token_lists(), strict=True))
            equal = torch.tensor([one == other for one, other in lists])
            width = min(expected.logprobs.shape[1], got.logprobs.shape[1])
            apart = (expected.logprobs[equal, :width] - got.logprobs[equal, :width]).abs()
            rows[f"{kind}, {name}"] = {
                "seconds": time.perf_counter() - start, "equal completions": int(equal.sum()),
                "largest difference of log-probabilities": float(apart.max()) if len(apart) else None,
            }  # fmt: skip
    return {"completions": size, "tokens": int(expected.mask.sum()), **rows}


def mismatch(device: str, tiny: bool) -> dict[str, Any]:
    """log π as the sampler says it (decoding with a cache) against a forward pass of whole rows, as in training."""
    shape, size, length = (TINY, 4, 12) if tiny else (QWEN_05B, 32, 256)
    asked = request(shape, size, length, (16, 128), stop_ids=[])
    result: dict[str, Any] = {"completions": size, "response_length": length}
    for name, dtype, autocast in (
        ("float32", torch.float32, False),
        ("bf16 autocast", torch.float32, True),
        ("bf16 weights", torch.bfloat16, False),
    ):
        model = build(Qwen2ForCausalLM, shape, seed=0).to(device, dtype)
        with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
            drawn = engine(device)(model, asked)
            forward = token_logprobs(model, drawn, batch_size=8)
            others = token_logprobs(model, drawn, batch_size=4)
        log_ratio = (forward - drawn.logprobs)[drawn.mask].double()
        again = (forward - others)[drawn.mask].double().abs()
        result[name] = {
            "mean log-probability": float(drawn.logprobs[drawn.mask].mean()),
            "mean |log ratio|": float(log_ratio.abs().mean()),
            "p99 |log ratio|": float(log_ratio.abs().quantile(0.99)),
            "max |log ratio|": float(log_ratio.abs().max()),
            "share outside 0.8..1.2": float(((log_ratio.exp() - 1).abs() > 0.2).double().mean()),
            "mean k3, nats": float((log_ratio.expm1() - log_ratio).mean()),
            "batches of 8 against 4, mean": float(again.mean()),
            "batches of 8 against 4, max": float(again.max()),
        }
        del model
    return result


def resume(device: str, tiny: bool) -> dict[str, Any]:
    """Four updates alone, the same once more, and the last two resumed from a checkpoint: the largest difference."""
    shape = TINY if tiny else SMALL
    results: dict[str, Any] = {}
    environment = dict(os.environ)
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
            # All that full_determinism sets: launches that block, too, would slow the parts behind this one.
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.deterministic = False
            os.environ.clear()
            os.environ.update(environment)
        (alone, metrics), *others = ends
        results[name] = {
            what: {
                "bit-equal": all(torch.equal(alone[key], end[key]) for key in alone),
                "largest difference of a weight": max(float((alone[key] - end[key]).abs().max()) for key in alone),
                "equal metrics": metrics == last,
            }
            for what, (end, last) in zip(("a second run", "resumed"), others, strict=True)
        }
    return results


def ceilings(device: str, tiny: bool) -> dict[str, Any]:
    """What the device reaches at best: matrices in bf16, memory, and starting kernels one after another."""
    size, many = (256, 2**20) if tiny else (8192, 2**29)
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    matrix = _seconds(device, lambda: one @ other, 3 if tiny else 200)
    source, target = (torch.zeros(many, device=device) for _ in range(2))
    copy = _seconds(device, lambda: target.copy_(source), 10)
    small = torch.zeros(1, device=device)
    return {
        MATRIX: 2 * size**3 / matrix / 1e12,
        "copied GB a second, reads and writes": 8 * many / copy / 1e9,
        "microseconds a small kernel": 1e6 * _seconds(device, lambda: small.add_(1), 1000),
    }


def _seconds(device: str, work: Callable[[], Any], times: int) -> float:
    """Of one call, after one of warm-up."""
    for count in (1, times):
        start = time.perf_counter()
        for _ in range(count):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def plan(device: str, tiny: bool) -> dict[str, Any]:
    """The planner's memory against what torch comes to hold, in settings of every kind (benchmarks/plan_check.py)."""
    names = ["nothing"] if tiny else [name for name in plan_check.SETTINGS if name != "nothing"]
    rows = {str(row.pop("setting")): row for row in plan_check.rows_of(names, device)}
    apart = {name: row["predicted_mib"] / row["measured_mib"] - 1 for name, row in rows.items()}
    return {**rows, "farthest apart": max(apart.values(), key=abs)}


EAGER = (*BF16, "--set", json.dumps({"rollout_graphs": False}))
LARGE = (*BF16, "--set", json.dumps({"max_tokens_per_micro_batch": 16_384}))
PARTS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "ceilings": ceilings,
    "c": update_part("c", {
        "bf16, graphs, 16,384 tokens a pass": LARGE,
        "bf16, graphs, 16,384 tokens a pass, shared trunk": (*LARGE, "--shared"), "bf16, graphs": BF16,
        "bf16, eager": EAGER,
    }),
    "sampling": sampling, "parity": parity, "mismatch": mismatch, "resume": resume, "plan": plan, "profile": profile,
    "1b": update_part("1b", {"bf16": BF16}), "8b-lora": update_part("8b-lora", {"bf16 weights": ()}), "trl": peer,
    "smollm2": smollm2, "tests": tests,
}  # fmt: skip
AT_MOST = {"tests": 120.0}  # seconds


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError where what stands in it takes longer."""

    def over(*_: Any) -> None:
        raise TimeoutError("it took longer than the minutes that were left")

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _share(parts: Mapping[str, Any]) -> None:
    """Adds to each update what part of the device's matrix rate it reached."""
    for name in ("c", "1b"):
        for setting in parts.get(name, {}).values():
            if RATE in setting and MATRIX in parts.get("ceilings", {}):
                setting["share of the measured rate"] = setting[RATE] / parts["ceilings"][MATRIX]


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _failed(part: Mapping[str, Any]) -> bool:
    """Whether a part, or what it consists of, says so."""
    return any(
        (name in ("error", "failed") and bool(value)) or (isinstance(value, dict) and _failed(value))
        for name, value in part.items()
    )


def show(value: Any, title: str, depth: int = 0) -> None:
    pad = "  " * depth
    if isinstance(value, dict):
        print(f"{pad}{title}")
        for name, each in value.items():
            show(each, name, depth + 1)
    else:
        print(f"{pad}{title:<{44 - len(pad)}} {f'{value:.4g}' if isinstance(value, float) else value}")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all if none is given")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to rehearse")
    parser.add_argument("--output", type=Path, help="the JSON file")
    parser.add_argument("--minutes", type=float, default=15, help="end after about so many")
    arguments = parser.parse_args(given)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: give --device cpu --tiny to rehearse")
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"cpu-{platform.machine()}"
    slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    path = arguments.output or ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.is_file() else {"parts": {}, "seconds": {}}
    report: dict[str, Any] = {
        "date": f"{datetime.date.today()}", "machine": machine, "tiny": arguments.tiny,
        "python": platform.python_version(), "versions": {package: _version(package) for package in PACKAGES},
        "cuda": torch.version.cuda if arguments.device == "cuda" else None,
        "parts": before["parts"], "seconds": before["seconds"],
    }  # fmt: skip
    broken, deadline = False, time.monotonic() + 60 * arguments.minutes
    for name in arguments.parts or PARTS:
        start = time.perf_counter()
        if (left := deadline - time.monotonic()) <= 0:
            print(f"{name}: not begun, the {arguments.minutes:g} minutes are over")
            continue
        try:
            with within(min(left, AT_MOST.get(name, left))):
                report["parts"][name] = PARTS[name](arguments.device, arguments.tiny)
        except TimeoutError as error:
            report["parts"][name] = {"not run": str(error)}
        except Exception as error:  # the other parts have something to say too
            traceback.print_exc()
            report["parts"][name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        broken |= _failed(report["parts"][name])
        _share(report["parts"])
        report["seconds"][name] = time.perf_counter() - start
        path.write_text(json.dumps(report, indent=1) + "\n")
    show(report, str(path))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
