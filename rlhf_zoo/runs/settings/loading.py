"""Converts a stage's model keys to load options, and checks that the packages that its keys need are installed."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ...errors import ZooError
from .parse import StageSettings

if TYPE_CHECKING:
    from ...modeling.loading import LoadOptions

# Values of report_to that need a module of the same name.
_REPORTERS = ("clearml", "codecarbon", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "trackio", "wandb")
# Optimizers with one of these in their name need bitsandbytes, unless the name also has "torchao".
BITSANDBYTES_OPTIMIZERS = ("8bit", "paged_", "ademamix")


def stage_load_options(settings: StageSettings) -> LoadOptions:
    """Returns the options with which a stage loads the model that it trains.

    Args:
        settings: Settings of the stage.

    Returns:
        Weight type, attention implementation and quantization.
    """
    from transformers import BitsAndBytesConfig

    from ...modeling.loading import LoadOptions

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
    return LoadOptions(dtype=model.dtype, attention=model.attn_implementation, quantization=quantization)


def check_installed(settings: StageSettings) -> None:
    """Checks that the packages that a stage's keys need are installed.

    Args:
        settings: Settings of the stage.

    Raises:
        ZooError: A package is missing.
    """
    model, stage_text = settings.model, f"of the stage {settings.stage}"
    optimizer = str(getattr(settings.trainer.optim, "value", settings.trainer.optim))
    needed_packages: dict[str, tuple[str, str]] = {}  # key with its value -> (module, package)
    if model.load_in_4bit or model.load_in_8bit:
        needed_packages["load_in_4bit" if model.load_in_4bit else "load_in_8bit"] = ("bitsandbytes", "bitsandbytes")
    if any(mark in optimizer for mark in BITSANDBYTES_OPTIMIZERS) and "torchao" not in optimizer:
        needed_packages[f"optim {optimizer}"] = ("bitsandbytes", "bitsandbytes")
    for version, module in ((2, "flash_attn"), (3, "flash_attn_interface")):
        if model.attn_implementation == f"flash_attention_{version}":
            needed_packages[f"attn_implementation {model.attn_implementation}"] = (module, "flash-attn")
    for name in settings.trainer.report_to or ():
        if name in _REPORTERS:
            needed_packages[f"report_to {name}"] = (name, name.replace("_", "-"))
    for key, (module, package) in needed_packages.items():
        if importlib.util.find_spec(module) is None:
            raise ZooError(
                f"{key} {stage_text} needs {package}, which is not installed: run `pip install {package}`, or remove "
                "the key."
            )
