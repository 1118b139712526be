"""The planner's memory against real runs: each setting trains in a fresh process with random weights.

    python benchmarks/plan_check.py                  # a table of all settings; a quarter of an hour of two cores
    python benchmarks/plan_check.py separate lora    # some of them
    python benchmarks/evidence.py plan               # all of them, kept in docs/evidence/plan.json and rendered
    python benchmarks/plan_check.py --device cuda    # on a GPU, six at a time: `make gpu` keeps that

Measured on a CPU is the peak of the process (VmHWM), imports and all, as its user sees it; beside it stands what it
held before its models (VmRSS). On a GPU it is the peak of what torch has allocated there. Prompts have one length and
no answer ends early: the planner plans for the longest.
"""

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: How near a plan is to what was measured, as a share of that.
WITHIN = 0.10
_LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1376, "tie_word_embeddings": True, "max_position_embeddings": 1024,
}  # fmt: skip
_NARROW = {**_LLAMA, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
           "intermediate_size": 688}  # fmt: skip
_NEOX = {"model_type": "gpt_neox", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
         "intermediate_size": 2048, "max_position_embeddings": 1024}  # fmt: skip
_GPT2 = {"model_type": "gpt2", "n_embd": 512, "n_layer": 6, "n_head": 8}
_QWEN3 = {"model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
          "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536, "tie_word_embeddings": True}  # fmt: skip
_ROLLOUT = {
    "bf16": False,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_ppo_epochs": 1, "num_mini_batches": 2,
    "response_length": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """reward: whether a reward model of the same shape pays; else a function does."""

    stage: str
    architecture: Mapping[str, Any]
    vocabulary: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    prompt: int = 16
    reward: bool = True

    @property
    def all_keys(self) -> dict[str, Any]:
        own = _ROLLOUT if self.stage == "ppo" else {"bf16": False}
        paid = {} if self.reward or self.stage != "ppo" else {"reward_model_path": None, "reward_funcs": ["length"]}
        return {**own, **paid, **self.keys}


_LORA = {"use_peft": True, "lora_target_modules": ["all-linear"]}
_SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
_FEW = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "response_length": 16}
#: Critics of a table of models, critics and adapters: the policy's weights, the reward model's, a head on the policy.
_CRITICS: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "own critic": ({"critic": "policy"}, False), "critic of a reward model": ({}, True),
    "shared critic": ({"critic": "shared"}, False),
}  # fmt: skip
#: Models × critics × LoRA: what the long tier measures (tests/e2e/test_plan_memory.py).
TABLE = {
    f"{model}, {critic}{', LoRA' if lora else ''}": Setting(
        "ppo", architecture, vocabulary, {**_FEW, **keys, **lora}, reward=reward
    )
    for model, architecture, vocabulary in (("smollm2-135m", _SMOLLM2, 49_152), ("qwen3", _QWEN3, 50_000))
    for critic, (keys, reward) in _CRITICS.items()
    for lora in ({}, _LORA)
}
SETTINGS = {
    "nothing": Setting("ppo", {**_NARROW, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
                               "intermediate_size": 32, "num_hidden_layers": 1}, 64),
    "separate": Setting("ppo", _LLAMA, 32_000),
    "shared": Setting("ppo", {**_LLAMA, "num_hidden_layers": 12}, 32_000, {"critic": "shared"}),
    "bf16": Setting("ppo", _LLAMA, 32_000, {"bf16": True}),
    "no reference, a function": Setting("ppo", _LLAMA, 32_000, {"kl_coef": 0.0, "critic": "policy"}, reward=False),
    "large micro-batch": Setting("ppo", _NARROW, 8_192, {
        "max_tokens_per_micro_batch": 4_096, "per_device_train_batch_size": 16, "response_length": 48,
        "num_mini_batches": 1}),
    "checkpointing": Setting("ppo", {**_LLAMA, "num_hidden_layers": 4}, 32_000, {
        "max_tokens_per_micro_batch": 2_048, "per_device_train_batch_size": 16, "gradient_checkpointing": True}),
    "long cache": Setting("ppo", {**_NARROW, "hidden_size": 64, "num_hidden_layers": 64, "intermediate_size": 172},
                          2_048, {"per_device_train_batch_size": 96, "response_length": 32, "kl_coef": 0.0,
                                  "critic": "shared"}, prompt=64, reward=False),
    "wide vocabulary": Setting("ppo", {**_NARROW, "tie_word_embeddings": False}, 100_000),
    "lora": Setting("ppo", {**_LLAMA, "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12,
                            "intermediate_size": 2048, "num_hidden_layers": 12}, 32_000, _LORA),
    "gpt_neox": Setting("ppo", _NEOX, 32_000),
    "gpt2, sgd": Setting("ppo", {**_GPT2, "n_layer": 12}, 50_257, {"optim": "sgd"}),
    "qwen3": Setting("ppo", _QWEN3, 50_000),
    "sft": Setting("sft", {**_LLAMA, "num_hidden_layers": 12}, 50_000, {
        "max_length": 128, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False}),
    "reward": Setting("reward", {**_LLAMA, "num_hidden_layers": 12}, 32_000, {
        "max_length": 128, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False}),
}  # fmt: skip
KNOWN = {**SETTINGS, **TABLE}


def predicted(setting: Setting, device: str = "cpu") -> dict[str, Any]:
    """What the planner says: MiB, by phase."""
    from rlhf_zoo.pipeline.plan.devices import local_device
    from rlhf_zoo.pipeline.plan.plan import make_plan
    from rlhf_zoo.runs.recipe import Recipe

    shared = {"description": "A check.", "architecture": dict(setting.architecture),
              "tokenizer": {"vocab_size": setting.vocabulary}}  # fmt: skip
    stages = {"sft": {}, **({"reward": {}} if setting.reward else {}), setting.stage: setting.all_keys}
    recipe = Recipe("check", ROOT, shared, stages)
    [result] = make_plan(
        recipe,
        local_device(use_cpu=device == "cpu"),
        prompt_length=setting.prompt,
        stages=[setting.stage],
        suggest_changes=False,
    ).stages
    phases = {name: round(need.total / 2**20) for name, need in result.phases.items()}
    return {"predicted_mib": round(result.peak / 2**20), "worst_phase": result.worst_phase, "phases": phases}


def measured(name: str, device: str = "cpu") -> dict[str, Any]:
    """What a fresh process holds at most, and what it held before its models, MiB.

    Raises RuntimeError where it fails.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, "--device", device], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def train(setting: Setting, device: str) -> dict[str, Any]:
    """In a process of its own: trains two optimizer steps, the second beside the first one's moments."""
    import peft  # noqa: F401  # what the first update would import
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from speed.points import BOS, EOS, PAD, word_tokenizer
    from speed.side import resident

    from rlhf_zoo import PPOConfig, PPOTrainer

    transformers.utils.logging.set_verbosity_error()
    tokenizer = word_tokenizer(setting.vocabulary)
    keys = {
        name: value for name, value in setting.all_keys.items() if not name.startswith(("reward_", "lora_", "use_peft"))
    }
    keys |= {"output_dir": tempfile.mkdtemp(), "use_cpu": device == "cpu", "report_to": [], "save_strategy": "no",
             "disable_tqdm": True, "max_steps": 2 // keys.get("num_mini_batches", 1)}  # fmt: skip
    gc.collect()
    before = resident("VmRSS")
    fields = dict(setting.architecture)
    config = transformers.AutoConfig.for_model(
        fields.pop("model_type"), vocab_size=setting.vocabulary, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS,
        num_labels=1, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)

    def rows(count: int, length: int) -> list[list[int]]:
        return torch.randint(4, setting.vocabulary, (count, length), generator=generator).tolist()

    causal, classifier = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    made: Any
    if setting.stage == "ppo":
        peft_config = None
        if setting.keys.get("use_peft"):
            model_keys = {name: value for name, value in setting.keys.items() if name.startswith(("lora_", "use_peft"))}
            peft_config = trl.get_peft_config(trl.ModelConfig(**model_keys))
        args = PPOConfig(**keys, stop_token=None, learning_rate=1e-6)
        made = PPOTrainer(
            args, tokenizer, causal.from_config(config), peft_config=peft_config,
            reward_model=classifier.from_config(config) if setting.reward else None,
            reward_funcs=None if setting.reward else length,
            train_dataset=Dataset.from_dict({"input_ids": rows(2 * args.prompts_per_update, setting.prompt)}),
        )  # fmt: skip
    elif setting.stage == "sft":
        args = trl.SFTConfig(**keys)
        texts = {
            "input_ids": rows(2 * args.per_device_train_batch_size * args.gradient_accumulation_steps, args.max_length)
        }
        made = trl.SFTTrainer(
            causal.from_config(config), args, train_dataset=Dataset.from_dict(texts), processing_class=tokenizer
        )
    else:
        args = trl.RewardConfig(**keys)
        count = 2 * args.per_device_train_batch_size * args.gradient_accumulation_steps
        pairs = {side: rows(count, args.max_length) for side in ("chosen_ids", "rejected_ids")}
        made = trl.RewardTrainer(
            classifier.from_config(config), args, train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer
        )
    made.remove_callback(transformers.PrinterCallback)
    peaks: dict[str, float] = defaultdict(float)
    if device == "cuda" and setting.stage == "ppo":
        peaks_by_phase(made.phases, peaks)
    made.train()
    if device == "cpu":
        return {"measured_mib": round(resident("VmHWM")), "before_mib": round(before)}
    whole = max([torch.cuda.max_memory_allocated() / 2**20, *peaks.values()])
    return {"measured_mib": round(whole), "measured_phases": {name: round(mib) for name, mib in peaks.items()}}


def peaks_by_phase(phases: Any, peaks: dict[str, float]) -> None:
    """Fills `peaks` with the MiB that each phase of the trainer's updates comes to hold on the GPU."""
    import torch

    add_elapsed = phases._add_elapsed

    def seen() -> None:
        running = phases._running[-1] if phases._running else "rest"
        peaks[running] = max(peaks[running], torch.cuda.max_memory_allocated() / 2**20)
        torch.cuda.reset_peak_memory_stats()
        add_elapsed()

    phases._add_elapsed = seen


def length(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def within(row: Mapping[str, Any]) -> bool:
    """Whether the prediction is as near as is promised."""
    return bool(abs(row["predicted_mib"] - row["measured_mib"]) <= WITHIN * row["measured_mib"])


def line(row: Mapping[str, Any]) -> str:
    apart = row["predicted_mib"] / row["measured_mib"] - 1
    return (
        f"{row['setting']}: measured {row['measured_mib']:,} MiB, planned {row['predicted_mib']:,} ({apart:+.0%}, "
        f"{row['worst']}){'' if within(row) else ' OUTSIDE'}"
    )


def rows_of(names: Sequence[str], device: str = "cpu") -> Iterator[dict[str, Any]]:
    """What is planned and measured of each setting, on a GPU six at a time."""
    with ThreadPoolExecutor(1 if device == "cpu" else 6) as pool:
        for name, seen in zip(names, pool.map(functools.partial(measured, device=device), names), strict=True):
            yield {"setting": name, **predicted(KNOWN[name], device), **seen}


def check(names: Sequence[str]) -> dict[str, Any]:
    """The document that is kept."""
    import platform

    from rlhf_zoo.runs.context import environment_info

    rows = []
    for row in rows_of(names):
        rows.append(row)
        print(line(row), flush=True)
    known = environment_info()
    return {
        "schema": 1,
        "command": "python benchmarks/evidence.py plan",
        "machine": f"{platform.system()} {platform.machine()}, {os.environ.get('OMP_NUM_THREADS', '2')} threads",
        "versions": {name: known[name] for name in ("torch", "transformers", "trl")},
        "within": WITHIN,
        "settings": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=", ".join(KNOWN))
    parser.add_argument("--planned", action="store_true", help="run nothing: say what the planner says")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(KNOWN[options.child], options.device)))
        return
    if unknown := set(options.settings) - set(KNOWN):
        parser.error(f"no setting is called {', '.join(sorted(unknown))}: choose from {', '.join(KNOWN)}")
    names = options.settings or list(SETTINGS)
    if options.planned:
        for name in names:
            print(name, predicted(KNOWN[name], options.device))
        return
    good = True
    for row in rows_of(names, options.device):
        print(line(row), flush=True)
        good &= within(row)
    sys.exit(int(not good))


if __name__ == "__main__":
    main()
