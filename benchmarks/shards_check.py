"""The planner's memory of fsdp2 against two processes of one CPU: PPO of SmolLM2's shape with random weights.

    python benchmarks/shards_check.py    # 10 GiB; some ten minutes of two cores

Measured is the peak of each process (VmHWM), saving included, less what it held before its models (VmRSS).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHAPE = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
VOCABULARY, PROMPT = 49_152, 16
KEYS = {
    "bf16": False, "fsdp2": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "num_ppo_epochs": 1, "num_mini_batches": 1, "response_length": 32,
}  # fmt: skip


def planned() -> dict[str, int]:
    """MiB of each phase, by the planner."""
    from rlhf_zoo.planner.devices import parse_device
    from rlhf_zoo.planner.plan import make_plan
    from rlhf_zoo.recipes import Recipe

    shared = {"description": "A check.", "architecture": SHAPE, "tokenizer": {"vocab_size": VOCABULARY}}
    keys = {**KEYS, "critic": "policy", "reward_model_path": None, "reward_funcs": ["length"]}
    recipe = Recipe("check", ROOT, shared, {"sft": {}, "ppo": keys})
    [stage] = make_plan(recipe, parse_device("cpu:2"), prompt=PROMPT, stages=["ppo"], mends=False).stages
    return {name: round(need.total / 2**20) for name, need in stage.phases.items()}


def train() -> None:
    """In each process: two updates, each saved."""
    import torch
    import transformers
    from datasets import Dataset
    from speed.points import BOS, EOS, PAD, word_tokenizer
    from speed.side import resident

    from rlhf_zoo import PPOConfig, PPOTrainer, processes

    processes.join()
    transformers.utils.logging.set_verbosity_error()
    before = resident("VmRSS")
    fields = {name: value for name, value in SHAPE.items() if name != "model_type"}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS, **fields
    )
    torch.manual_seed(0)
    rows = torch.randint(4, VOCABULARY, (16, PROMPT)).tolist()
    keys = KEYS | {"per_device_train_batch_size": KEYS["per_device_train_batch_size"] // 2}
    args = PPOConfig(
        **keys, output_dir=os.environ["SHARDS_CHECK"], use_cpu=True, report_to=[], save_strategy="steps", save_steps=1,
        disable_tqdm=True, max_steps=2, stop_token=None, learning_rate=1e-6,
    )  # fmt: skip
    trainer = PPOTrainer(
        args, word_tokenizer(VOCABULARY), transformers.LlamaForCausalLM(config),
        reward_funcs=lambda completions, **_: [float(len(one)) for one in completions],
        train_dataset=Dataset.from_dict({"input_ids": rows}),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    print(json.dumps({"process": processes.rank(), "measured_mib": round(resident("VmHWM") - before)}), flush=True)


def main() -> None:
    if "SHARDS_CHECK" in os.environ:
        train()
        return
    print("planned, MiB:", planned())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(launch, env=os.environ | {"SHARDS_CHECK": folder}, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
