"""Compares the planner's memory with real runs: each setting trains in a fresh process with random weights.

    python benchmarks/plan_check.py                  # all settings; takes 15 minutes on two cores
    python benchmarks/plan_check.py separate lora    # some settings
    python benchmarks/plan_check.py --json docs/evidence/plan.json  # all settings, into the file of docs/plan.md
    python benchmarks/plan_check.py --device cuda    # on a GPU, six settings at a time, as in `make gpu`

On a CPU it measures the peak memory of the process (VmHWM), including its imports, and the memory before its models are
made (VmRSS). On a GPU it measures the peak of torch's allocations. All prompts have the same length and no answer ends
early, as the planner assumes.
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
#: The largest error of a plan, as a share of the measured memory.
TOLERANCE = 0.10
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
    """A stage to plan and to run, with random models.

    Attributes:
        stage: The stage.
        architecture: The configuration of all its models.
        vocabulary: The size of their vocabulary.
        keys: The stage's keys, besides the defaults of this script.
        prompt: The tokens of each prompt.
        reward: Whether PPO's reward is a model of the same shape, and not a function.
    """

    stage: str
    architecture: Mapping[str, Any]
    vocabulary: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    prompt: int = 16
    reward: bool = True

    @property
    def all_keys(self) -> dict[str, Any]:
        defaults = _ROLLOUT if self.stage == "ppo" else {"bf16": False}
        has_function = self.stage == "ppo" and not self.reward
        reward_keys = {"reward_model_path": None, "reward_funcs": ["length"]} if has_function else {}
        return {**defaults, **reward_keys, **self.keys}


_LORA = {"use_peft": True, "lora_target_modules": ["all-linear"]}
_SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
_FEW = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "response_length": 16}
#: Name of a critic -> its keys, and whether the reward is a model, from which the critic then starts.
_CRITICS: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "own critic": ({"critic": "policy"}, False), "critic of a reward model": ({}, True),
    "shared critic": ({"critic": "shared"}, False),
}  # fmt: skip
#: Models × critics × LoRA, half of which the long tier measures (tests/e2e/test_plan_memory.py).
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
ALL_SETTINGS = {**SETTINGS, **TABLE}


def predicted(setting: Setting, device: str = "cpu") -> dict[str, Any]:
    """Plans a setting: its peak and the memory of each phase, in MiB."""
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
    """Runs a setting in a fresh process: its peak memory, and on a CPU the memory before its models, in MiB.

    Raises:
        RuntimeError: The process fails.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    process = subprocess.run(
        [sys.executable, __file__, "--child", name, "--device", device], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"{name} failed:\n{process.stderr[-3000:]}")
    document: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return document


def train(setting: Setting, device: str) -> dict[str, Any]:
    """Trains two optimizer steps, as only the second has the optimizer's moments from its start."""
    import peft  # noqa: F401  # imported now, as the first update would import it
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from speed.points import BOS, EOS, PAD, word_tokenizer
    from speed.side import memory_mib

    from rlhf_zoo import PPOConfig, PPOTrainer

    transformers.utils.logging.set_verbosity_error()
    tokenizer = word_tokenizer(setting.vocabulary)
    keys = {
        name: value for name, value in setting.all_keys.items() if not name.startswith(("reward_", "lora_", "use_peft"))
    }
    keys |= {"output_dir": tempfile.mkdtemp(), "use_cpu": device == "cpu", "report_to": [], "save_strategy": "no",
             "disable_tqdm": True, "max_steps": 2 // keys.get("num_mini_batches", 1)}  # fmt: skip
    gc.collect()
    before = memory_mib("VmRSS")
    fields = dict(setting.architecture)
    config = transformers.AutoConfig.for_model(
        fields.pop("model_type"), vocab_size=setting.vocabulary, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS,
        num_labels=1, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)

    def random_rows(count: int, length: int) -> list[list[int]]:
        return torch.randint(4, setting.vocabulary, (count, length), generator=generator).tolist()

    causal, classifier = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    trainer: Any
    if setting.stage == "ppo":
        peft_config = None
        if setting.keys.get("use_peft"):
            model_keys = {name: value for name, value in setting.keys.items() if name.startswith(("lora_", "use_peft"))}
            peft_config = trl.get_peft_config(trl.ModelConfig(**model_keys))
        args = PPOConfig(**keys, stop_token=None, learning_rate=1e-6)
        trainer = PPOTrainer(
            args, tokenizer, causal.from_config(config), peft_config=peft_config,
            reward_model=classifier.from_config(config) if setting.reward else None,
            reward_funcs=None if setting.reward else length_reward,
            train_dataset=Dataset.from_dict({"input_ids": random_rows(2 * args.prompts_per_update, setting.prompt)}),
        )  # fmt: skip
    elif setting.stage == "sft":
        args = trl.SFTConfig(**keys)
        texts = {
            "input_ids": random_rows(
                2 * args.per_device_train_batch_size * args.gradient_accumulation_steps, args.max_length
            )
        }
        trainer = trl.SFTTrainer(
            causal.from_config(config), args, train_dataset=Dataset.from_dict(texts), processing_class=tokenizer
        )
    else:
        args = trl.RewardConfig(**keys)
        count = 2 * args.per_device_train_batch_size * args.gradient_accumulation_steps
        pairs = {side: random_rows(count, args.max_length) for side in ("chosen_ids", "rejected_ids")}
        trainer = trl.RewardTrainer(
            classifier.from_config(config), args, train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer
        )
    trainer.remove_callback(transformers.PrinterCallback)
    peaks: dict[str, float] = defaultdict(float)
    if device == "cuda" and setting.stage == "ppo":
        track_peaks(trainer.phases, peaks)
    trainer.train()
    if device == "cpu":
        return {"measured_mib": round(memory_mib("VmHWM")), "before_mib": round(before)}
    peak = max([torch.cuda.max_memory_allocated() / 2**20, *peaks.values()])
    return {"measured_mib": round(peak), "measured_phases": {name: round(mib) for name, mib in peaks.items()}}


def track_peaks(phases: Any, peaks: dict[str, float]) -> None:
    """Makes the trainer record in `peaks` the largest MiB that each phase allocates on the GPU."""
    import torch

    add_elapsed = phases._add_elapsed

    def record_peak() -> None:
        running = phases._running[-1] if phases._running else "rest"
        peaks[running] = max(peaks[running], torch.cuda.max_memory_allocated() / 2**20)
        torch.cuda.reset_peak_memory_stats()
        add_elapsed()

    phases._add_elapsed = record_peak


def length_reward(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def is_within_tolerance(row: Mapping[str, Any]) -> bool:
    """Whether the plan is close enough to the measurement."""
    return bool(abs(row["predicted_mib"] - row["measured_mib"]) <= TOLERANCE * row["measured_mib"])


def format_row(row: Mapping[str, Any]) -> str:
    error = row["predicted_mib"] / row["measured_mib"] - 1
    return (
        f"{row['setting']}: measured {row['measured_mib']:,} MiB, planned {row['predicted_mib']:,} ({error:+.0%}, "
        f"{row['worst_phase']}){'' if is_within_tolerance(row) else ' OUTSIDE'}"
    )


def compare(names: Sequence[str], device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Yields the plan and the measurement of each setting. On a GPU, six settings run at a time."""
    with ThreadPoolExecutor(1 if device == "cpu" else 6) as pool:
        for name, measurement in zip(names, pool.map(functools.partial(measured, device=device), names), strict=True):
            yield {"setting": name, **predicted(ALL_SETTINGS[name], device), **measurement}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=", ".join(ALL_SETTINGS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(ALL_SETTINGS[options.child], options.device)))
        return
    if unknown := set(options.settings) - set(ALL_SETTINGS):
        parser.error(f"unknown setting {', '.join(sorted(unknown))}: choose from {', '.join(ALL_SETTINGS)}")
    names = options.settings or list(SETTINGS)
    rows = []
    for row in compare(names, options.device):
        rows.append(row)
        print(format_row(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"settings": rows}, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(not all(map(is_within_tolerance, rows))))


if __name__ == "__main__":
    main()
