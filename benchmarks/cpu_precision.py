"""Prints the options that train in bfloat16, if this machine has no GPU and its CPU multiplies faster in bfloat16.

How many times as fast goes to stderr. The flags of /proc/cpuinfo do not tell: with `avx512_bf16`, an AMD EPYC
multiplies about four times as fast in bfloat16, and an Intel Xeon half as fast. On a GPU nothing is printed, since
`bf16: null` in a recipe uses bfloat16 there.

    rlhf-zoo run smollm2-ifeval $(python benchmarks/cpu_precision.py ppo)
"""

import argparse
import sys
import timeit

import torch

#: Casting weights costs time too, so a smaller gain in products is none in training.
MIN_SPEEDUP = 1.5
#: Tokens in a pass, and the sizes of SmolLM2-135M's largest layer.
TOKENS, HIDDEN, WIDE = 768, 576, 1536
#: Without it, transformers refuses bfloat16 on a CPU; and torch's own attention is slow there in bfloat16.
OPTIONS = {"bf16": "true", "use_cpu": "true", "attn_implementation": "eager"}


def seconds_per_product(dtype: torch.dtype) -> float:
    """Times the product of a pass's activations and a layer's weights, at its fastest: other processes disturb some."""
    activations, weights = torch.randn(TOKENS, HIDDEN).to(dtype), torch.randn(WIDE, HIDDEN).to(dtype)
    timer = timeit.Timer(lambda: torch.nn.functional.linear(activations, weights))
    return min(timer.repeat(repeat=100, number=1))


def training_options(stages: list[str], speedup: float) -> str:
    """Returns the options for `rlhf-zoo run`; empty if the speedup is too small.

    Args:
        stages: Stages of the recipe: sft, reward, ppo.
        speedup: Time of a product in float32, divided by its time in bfloat16.
    """
    if speedup < MIN_SPEEDUP:
        return ""
    return " ".join(f"--{stage}.{key} {value}" for stage in stages for key, value in OPTIONS.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=("sft", "reward", "ppo"), help="stages that the recipe has")
    stages = parser.parse_args().stages
    if not torch.accelerator.is_available():
        speedup = seconds_per_product(torch.float32) / seconds_per_product(torch.bfloat16)
        print(f"bfloat16: {speedup:.1f} times as fast as float32", file=sys.stderr)
        print(training_options(stages, speedup))


if __name__ == "__main__":
    main()
