"""What a run needs of a GPU's memory, as far as a model's configuration says: weights, optimizer, cache, logits.

What a batch's activations take on top depends on the machine and its kernels: none is foretold here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2
#: Of a weight that trains, in float32: itself, its gradient, and AdamW's two moments.
TRAINED = 4 * FLOAT32


@dataclass(frozen=True)
class Shape:
    """Of a model: its parameters, those of an adapter on it, its vocabulary; cached: numbers that are a token's keys
    and values, over all layers."""

    parameters: int
    adapter: int
    vocabulary: int
    cached: int


def _trained(shape: Shape, *, lora: bool, held: int) -> int:
    """Bytes of a model that trains: whole, or under an adapter."""
    return held * shape.parameters + TRAINED * shape.adapter if lora else TRAINED * shape.parameters


def training_memory(shape: Shape, *, lora: bool, rows: int, tokens: int, held: int = FLOAT32) -> dict[str, int]:
    """Bytes by what they hold, in SFT; rows, tokens: of a micro-batch, 0 where a stage has no logits.

    held: bytes of a weight under an adapter.
    """
    return {
        "the model": _trained(shape, lora=lora, held=held),
        "a micro-batch's logits": FLOAT32 * rows * tokens * shape.vocabulary,
    }


def token_memory(shape: Shape, *, half: bool) -> int:
    """Bytes of the keys and values of a token."""
    return (BFLOAT16 if half else FLOAT32) * shape.cached


def ppo_memory(
    shape: Shape,
    *,
    lora: bool,
    reward: int,
    own: bool,
    cached: int,
    scored: int,
    half: bool,
    held: int = FLOAT32,
) -> Mapping[str, int]:
    """Bytes by what they hold, in PPO.

    reward: bytes of the reward model, 0 without one; own: whether it is the recipe's, so that under LoRA the critic is
    an adapter on it, and else on a copy of the policy. cached: tokens that sampling keeps at a time, at most
    max_rollout_batch_tokens; scored: tokens of answers in a micro-batch, at most max_tokens_per_micro_batch; half:
    whether models compute in bf16; held: bytes of a weight under an adapter.
    """
    trained = _trained(shape, lora=lora, held=held)
    return {
        "the policy": trained,
        "the critic": TRAINED * shape.adapter if lora and own else trained,
        "the reference": 0 if lora else FLOAT32 * shape.parameters,
        "the reward model": reward,
        "keys and values of a rollout": cached * token_memory(shape, half=half),
        "a micro-batch's logits": FLOAT32 * scored * shape.vocabulary,
    }
