"""Seconds of one PPO update of our trainer, on models with random weights.

    python benchmarks/update.py            # the point `eos`
    python benchmarks/update.py full --updates 10

Prints a JSON object: seconds per update (after one of warm-up), response tokens per update and peak memory. The
absolute figures move with the machine: run what is compared in turn, A B A B, and quote the ratio of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time

if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)

from rlhf_zoo import PPOConfig, PPOTrainer

PAD, EOS, BOS, UNK = range(4)
# A constant on the EOS logit makes response lengths geometric where responses end early.
POINTS = {
    "full": {"vocab": 4096, "batch": 32, "prompt": (16, 32), "response": 48, "eos_bias": 0.0},
    "eos": {"vocab": 4096, "batch": 32, "prompt": (16, 32), "response": 48, "eos_bias": 3.4},
    "wide": {"vocab": 50304, "batch": 32, "prompt": (16, 32), "response": 48, "eos_bias": 5.2},
    "long": {"vocab": 16384, "batch": 16, "prompt": (480, 512), "response": 128, "eos_bias": 4.4},
}


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One token a word, `size` in all."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS, "<unk>": UNK}
    vocabulary |= {f"t{i}": i for i in range(4, size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


class Biased(LlamaForCausalLM):
    """Adds `eos_bias` to the EOS logit."""

    eos_bias = 0.0

    def forward(self, *args, logits_to_keep=0, **kwargs):
        out = super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        if self.eos_bias:
            bias = torch.zeros(out.logits.shape[-1], dtype=out.logits.dtype, device=out.logits.device)
            bias[EOS] = self.eos_bias
            out.logits = out.logits + bias
        return out


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[float] = []

    def on_step_begin(self, *_, **__):
        self.started = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.started)

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "completions/length" in logs:
            self.tokens.append(logs["completions/length"] * args.per_device_train_batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("point", choices=POINTS, nargs="?", default="eos")
    parser.add_argument("--updates", type=int, default=5, help="counted updates, after one of warm-up")
    arguments = parser.parse_args()
    point = POINTS[arguments.point]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    shape = {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 688, "vocab_size": point["vocab"], "max_position_embeddings": 1024,
        "tie_word_embeddings": True, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS,
    }  # fmt: skip
    torch.manual_seed(0)
    policy = Biased(LlamaConfig(**shape))
    policy.eos_bias = point["eos_bias"]
    reward = LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1))
    generator = torch.Generator().manual_seed(1)
    low, high = point["prompt"]
    count = point["batch"] * (arguments.updates + 2)
    prompts = [
        torch.randint(4, point["vocab"], (int(torch.randint(low, high + 1, (1,), generator=generator)),),
                      generator=generator).tolist() for _ in range(count)
    ]  # fmt: skip
    ends = bool(point["eos_bias"])
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=point["batch"], num_mini_batches=1, num_ppo_epochs=4,
        total_episodes=point["batch"] * (arguments.updates + 1), response_length=point["response"], temperature=0.7,
        stop_token="eos" if ends else None, missing_eos_penalty=1.0 if ends else None, report_to=[],
        save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True, learning_rate=3e-6, seed=0,
    )  # fmt: skip
    clock = Clock()
    trainer = PPOTrainer(
        config, word_tokenizer(point["vocab"]), policy, reward_model=reward,
        train_dataset=Dataset.from_dict({"input_ids": prompts}), callbacks=[clock],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seconds = clock.seconds[1:]
    print(json.dumps({
        "point": arguments.point,
        "seconds_per_update": {"min": min(seconds), "median": statistics.median(seconds)},
        "response_tokens": statistics.median(clock.tokens[1:]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "threads": torch.get_num_threads(),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
