"""Rounds the weights of a checkpoint to a smaller type, for publishing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..fileio import read_json, write_json

INDEX = ".safetensors.index.json"


def rounded(files: Mapping[str, Path], dtype: str, folder: Path) -> dict[str, Path]:
    """Writes rounded copies of the weight files, and updates the files that name their type.

    Args:
        files: Path in the repository -> file.
        dtype: Name of the torch dtype to round to, such as "bfloat16".
        folder: Folder for the copies.

    Returns:
        Path in the repository -> copy.
    """
    import torch

    copies: dict[str, Path] = {}
    for name, path in files.items():
        target = folder / name
        if name.endswith(".safetensors"):
            target.parent.mkdir(parents=True, exist_ok=True)
            _round(path, target, getattr(torch, dtype))
        elif Path(name).name == "config.json":
            write_json(target, _of_type({"dtype": dtype, **read_json(path)}, dtype))
        elif name.endswith(INDEX):
            index = read_json(path)
            index["metadata"].pop("total_size", None)  # in bytes before rounding; nothing reads it
            write_json(target, index)
        else:
            continue
        copies[name] = target
    return copies


def _round(path: Path, target: Path, dtype: Any) -> None:
    """Rounds the floating-point tensors of a file to `dtype`; tensors that are not wider are unchanged."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as weights:
        tensors = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118
        metadata = weights.metadata()
    converted = {
        key: tensor.to(dtype) if tensor.is_floating_point() and tensor.element_size() > dtype.itemsize else tensor
        for key, tensor in tensors.items()
    }
    save_file(converted, target, metadata)


def _of_type(config: Any, dtype: str) -> Any:
    """Returns a model's configuration, including nested ones, with another dtype."""
    if not isinstance(config, dict):
        return config
    return {key: dtype if key in ("dtype", "torch_dtype") else _of_type(value, dtype) for key, value in config.items()}
