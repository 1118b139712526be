"""Checks a stage's model keys."""

from typing import Any

from ...errors import ZooError

_DTYPES = ("float32", "bfloat16", "auto")
_FOUR_BIT_DEFAULTS = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": None, "use_bnb_nested_quant": False}
_QUANT_STORAGES = ("uint8", "bfloat16", "float16", "float32")


def check_model(model: Any, stage: str, *, critic: str | None = None, is_sharded: bool = False) -> None:
    """Checks that a stage's model keys are valid and work together.

    Args:
        model: trl's ModelConfig.
        stage: Name of the stage.
        critic: Value of PPO's key `critic`; None for other stages.
        is_sharded: Whether the stage sets fsdp2, which shards the model.

    Raises:
        ZooError: A value is not valid, or two keys contradict each other.
    """
    stage_text = f"of the stage {stage}"
    if model.dtype == "float16":
        raise ZooError(
            f"dtype {stage_text} is 'float16', in which gradients underflow and overflow: set bfloat16 or float32."
        )
    if model.dtype not in _DTYPES:
        raise ZooError(f"dtype {stage_text} is {model.dtype!r}: set one of {', '.join(_DTYPES)}.")
    if model.attn_implementation is not None and "/" in model.attn_implementation:
        raise ZooError(
            f"attn_implementation {stage_text} is {model.attn_implementation!r}, a kernel that would be downloaded and "
            "run: set one that transformers has, such as sdpa, eager or flash_attention_2."
        )
    if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        key = "load_in_4bit" if model.load_in_4bit else "load_in_8bit"
        raise ZooError(
            f"{key} {stage_text} needs use_peft: quantized weights cannot be trained, only an adapter on them."
        )
    if (model.load_in_4bit or model.load_in_8bit) and critic == "policy":
        raise ZooError(
            f"critic {stage_text} is 'policy', but quantized weights cannot be copied: set 'shared' or 'reward'."
        )
    if is_sharded and model.use_peft:
        raise ZooError(
            f"fsdp2 {stage_text} does not work with use_peft, because adapters are not sharded: remove one of them."
        )
    if stage == "sft" and model.use_peft and model.model_name_or_path is None:
        raise ZooError(
            "use_peft of the stage sft needs model_name_or_path: an adapter on random weights could not be loaded."
        )
    four_bit_keys = [name for name, default in _FOUR_BIT_DEFAULTS.items() if getattr(model, name) != default]
    if four_bit_keys and not model.load_in_4bit:
        raise ZooError(f"{four_bit_keys[0]} {stage_text} needs load_in_4bit: set it, or remove {four_bit_keys[0]}.")
    if model.bnb_4bit_quant_type not in ("nf4", "fp4"):
        raise ZooError(f"bnb_4bit_quant_type {stage_text} is {model.bnb_4bit_quant_type!r}: set nf4 or fp4.")
    if model.bnb_4bit_quant_storage not in (None, *_QUANT_STORAGES):
        storage = model.bnb_4bit_quant_storage
        raise ZooError(f"bnb_4bit_quant_storage {stage_text} is {storage!r}: set one of {', '.join(_QUANT_STORAGES)}.")
