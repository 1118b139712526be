"""GGUF files: weights that a model can be loaded from once they are unpacked."""

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ZooError

log = logging.getLogger(__name__)


def check_no_gguf(name: str | Path, *, key: str) -> None:
    """Checks that a recipe's model is not a GGUF file, nor a folder of GGUF files only.

    Args:
        name: A folder, a file, or a repository of a Hub.
        key: The key or flag that names it, such as --model.

    Raises:
        ZooError: It is a GGUF file or such a folder.
    """
    path = Path(name)
    files = [path] if path.suffix == ".gguf" else []
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
    if files:
        raise ZooError(
            f"{key} names {files[0]}, a GGUF file, and recipes train models in safetensors: save it unpacked in a "
            "folder (docs/models.md), and name that folder."
        )


def with_plain_weights(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Makes `from_pretrained` unpack the weights of a GGUF file, because packed ones cannot be saved.

    Args:
        kwargs: Keywords of `from_pretrained`.

    Returns:
        The keywords, with a quantization_config that unpacks if they have `gguf_file`.

    Raises:
        ZooError: The package gguf is not installed, or the keywords have a quantization_config too.
    """
    file = kwargs.get("gguf_file")
    if file is None:
        return dict(kwargs)
    if importlib.util.find_spec("gguf") is None:
        raise ZooError(
            f"gguf_file is {file}, and the package gguf is not installed: pip install gguf, or choose a model with "
            "safetensors."
        )
    if kwargs.get("quantization_config") is not None:
        raise ZooError(f"gguf_file ({file}) and quantization_config are both set: remove one of them.")
    from transformers import GgufConfig

    log.info("Unpacking the weights of %s. Checkpoints are saved as plain safetensors.", file)
    return {**kwargs, "quantization_config": GgufConfig(dequantize=True)}


def check_plain_weights(model: Any) -> None:
    """Checks that a model loaded from a GGUF file is unpacked, so that it trains and saves like any other.

    Args:
        model: The model. If transformers still takes its unpacked weights for quantized ones, that mark is removed.

    Raises:
        ZooError: Its weights are packed.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        return
    if quantizer.packed_modules:
        raise ZooError(
            "The model's weights are packed as in its GGUF file, so they can be neither trained nor saved: load it "
            "with quantization_config=GgufConfig(dequantize=True)."
        )
    quantizer.remove_quantization_config(model)
