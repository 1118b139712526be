"""Checks of a stage's model keys."""

from typing import Any

from ...errors import ZooError

DTYPES = ("float32", "bfloat16", "auto")
FOUR_BIT = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": None, "use_bnb_nested_quant": False}
STORAGES = ("uint8", "bfloat16", "float16", "float32")


def check_model(model: Any, stage: str, *, critic: str | None = None, shards: bool = False) -> None:
    """Checks, before anything trains, that a stage's model keys work together.

    Args:
        model: trl's ModelConfig.
        stage: Name of the stage.
        critic: What PPO's critic starts as: the key `critic`.
        shards: Whether fsdp2 is set.

    Raises:
        ZooError: A value does not work, alone or with another.
    """
    of = f"of the stage {stage}"
    if model.dtype == "float16":
        raise ZooError(f"dtype {of} is 'float16', in which gradients vanish and overflow: give bfloat16 or float32.")
    if model.dtype not in DTYPES:
        raise ZooError(f"dtype {of} is {model.dtype!r}: give one of {', '.join(DTYPES)}.")
    if model.attn_implementation is not None and "/" in model.attn_implementation:
        raise ZooError(
            f"attn_implementation {of} is {model.attn_implementation!r}, a kernel that would be downloaded and run: "
            "give one that transformers has, such as sdpa, eager or flash_attention_2."
        )
    if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        bits = "load_in_4bit" if model.load_in_4bit else "load_in_8bit"
        raise ZooError(
            f"{bits} {of} needs use_peft: weights in so few bits stand still, and an adapter trains on them."
        )
    if (model.load_in_4bit or model.load_in_8bit) and critic == "policy":
        raise ZooError(f"critic {of} is 'policy', and weights in few bits cannot be copied: give 'shared' or 'reward'.")
    if shards and model.use_peft:
        raise ZooError(f"fsdp2 {of} does not go with use_peft, as adapters have no shards: leave one of them out.")
    if stage == "sft" and model.use_peft and model.model_name_or_path is None:
        raise ZooError(
            "use_peft of the stage sft needs model_name_or_path: nothing could load an adapter on random weights."
        )
    four_bit_keys = [name for name, default in FOUR_BIT.items() if getattr(model, name) != default]
    if four_bit_keys and not model.load_in_4bit:
        raise ZooError(f"{four_bit_keys[0]} {of} needs load_in_4bit: set it, or leave {four_bit_keys[0]} out.")
    if model.bnb_4bit_quant_type not in ("nf4", "fp4"):
        raise ZooError(f"bnb_4bit_quant_type {of} is {model.bnb_4bit_quant_type!r}: give nf4 or fp4.")
    if model.bnb_4bit_quant_storage not in (None, *STORAGES):
        storage = model.bnb_4bit_quant_storage
        raise ZooError(f"bnb_4bit_quant_storage {of} is {storage!r}: give one of {', '.join(STORAGES)}.")
