"""A stage's model keys: which values work, how they load its model, and what must be installed for them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import ZooError

if TYPE_CHECKING:
    from ..model_files import Loading
    from .settings import StageSettings

DTYPES = ("float32", "bfloat16", "auto")
FOUR_BIT = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": None, "use_bnb_nested_quant": False}
STORAGES = ("uint8", "bfloat16", "float16", "float32")
# Of report_to, by the name of the module.
REPORTERS = ("clearml", "codecarbon", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "trackio", "wandb")
# Optimizers of transformers that bitsandbytes has.
BITS_OPTIMIZERS = ("8bit", "paged_", "ademamix")


def check_model(model: Any, stage: str, *, critic: str | None = None, shards: bool = False) -> None:
    """Raises ZooError, before anything trains, for model keys that do not work.

    model: trl's ModelConfig; critic: what PPO's critic begins as; shards: whether fsdp2 is set.
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
    given = [name for name, default in FOUR_BIT.items() if getattr(model, name) != default]
    if given and not model.load_in_4bit:
        raise ZooError(f"{given[0]} {of} needs load_in_4bit: set it, or leave {given[0]} out.")
    if model.bnb_4bit_quant_type not in ("nf4", "fp4"):
        raise ZooError(f"bnb_4bit_quant_type {of} is {model.bnb_4bit_quant_type!r}: give nf4 or fp4.")
    if model.bnb_4bit_quant_storage not in (None, *STORAGES):
        storage = model.bnb_4bit_quant_storage
        raise ZooError(f"bnb_4bit_quant_storage {of} is {storage!r}: give one of {', '.join(STORAGES)}.")


def loading_of(settings: StageSettings) -> Loading:
    """How the stage loads the model that it trains."""
    from transformers import BitsAndBytesConfig

    from ..model_files import Loading

    model, quantization = settings.model, None
    if model.load_in_8bit:
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    elif model.load_in_4bit:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype="bfloat16" if settings.trainer.bf16 else "float32",
            bnb_4bit_quant_type=model.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=model.use_bnb_nested_quant,
            bnb_4bit_quant_storage=model.bnb_4bit_quant_storage,
        )
    return Loading(dtype=model.dtype, attention=model.attn_implementation, quantization=quantization)


def check_installed(settings: StageSettings) -> None:
    """Raises ZooError where a key of the stage needs a package that this machine has not."""
    model, of = settings.model, f"of the stage {settings.stage}"
    optimizer = str(getattr(settings.trainer.optim, "value", settings.trainer.optim))
    needs: dict[str, tuple[str, str]] = {}
    if model.load_in_4bit or model.load_in_8bit:
        needs["load_in_4bit" if model.load_in_4bit else "load_in_8bit"] = ("bitsandbytes", "bitsandbytes")
    if any(word in optimizer for word in BITS_OPTIMIZERS) and "torchao" not in optimizer:
        needs[f"optim {optimizer}"] = ("bitsandbytes", "bitsandbytes")
    for number in "23":
        if model.attn_implementation == f"flash_attention_{number}":
            module = {"2": "flash_attn", "3": "flash_attn_interface"}[number]
            needs[f"attn_implementation {model.attn_implementation}"] = (module, "flash-attn")
    for name in settings.trainer.report_to or ():
        if name in REPORTERS:
            needs[f"report_to {name}"] = (name, name.replace("_", "-"))
    for key, (module, package) in needs.items():
        if importlib.util.find_spec(module) is None:
            raise ZooError(
                f"{key} {of} needs {package}, which is not installed: pip install {package}, or leave it out."
            )
