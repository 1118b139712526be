"""Rounds the weights of a checkpoint to a smaller dtype, for publishing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..fileio import read_json, write_json

if TYPE_CHECKING:
    import torch

INDEX_SUFFIX = ".safetensors.index.json"


def write_rounded(files: Mapping[str, Path], dtype: str, folder: Path) -> dict[str, Path]:
    """Writes rounded copies of weight files, and adapted copies of the files that name their dtype or size.

    Args:
        files: Path in the repository -> local path.
        dtype: Name of the torch dtype to round to, such as "bfloat16".
        folder: Folder for the copies.

    Returns:
        Path in the repository -> path of the copy.
    """
    import torch

    copies: dict[str, Path] = {}
    for name, path in files.items():
        target = folder / name
        if name.endswith(".safetensors"):
            target.parent.mkdir(parents=True, exist_ok=True)
            _round(path, target, getattr(torch, dtype))
        elif Path(name).name == "config.json":
            # The first entry adds the dtype to a configuration that names none.
            write_json(target, _with_dtype({"dtype": dtype, **read_json(path)}, dtype))
        elif name.endswith(INDEX_SUFFIX):
            index = read_json(path)
            index["metadata"].pop("total_size", None)  # the bytes before rounding; optional
            write_json(target, index)
        else:
            continue
        copies[name] = target
    return copies


def _round(path: Path, target: Path, dtype: torch.dtype) -> None:
    """Copies a weight file, and rounds the floating-point tensors that are wider than `dtype`."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as weights:
        tensors = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118
        metadata = weights.metadata()
    rounded_tensors = {
        key: tensor.to(dtype) if tensor.is_floating_point() and tensor.element_size() > dtype.itemsize else tensor
        for key, tensor in tensors.items()
    }
    save_file(rounded_tensors, target, metadata)


def _with_dtype(config: Any, dtype: str) -> Any:
    """Returns a model's configuration with another dtype, in its nested configurations too."""
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in ("dtype", "torch_dtype") else _with_dtype(value, dtype) for key, value in config.items()
    }
