"""Adapters merged into their base: what a later stage starts from, and what is published as the branch `merged`."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch

from ...fileio import read_json
from ...hub.client.publish import MERGED
from ...modeling.loading import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AS_SAVED, load_tokenizer
from ...modeling.models import load_causal, load_classifier
from ...modeling.remote_code import add_code
from ...modeling.special_tokens import make_room, name_pad
from ...runs.context import RunContext
from ...runs.models import ParentCheckpoint
from ...runs.record import COMPLETE, write_complete
from ...runs.status_line import doing


def whole_model(context: RunContext, parent: ParentCheckpoint) -> Path:
    """Returns the folder of a policy's weights as a plain checkpoint: its own, or one with its adapter merged.

    An adapter that is not merged yet is merged once: beside the adapter in this run, or into the run directory if the
    adapter came from elsewhere.

    Args:
        context: The run.
        parent: The policy's checkpoint.
    """
    path = parent.path
    if not (path / ADAPTER_CONFIG).is_file():
        return path
    inside = any(path.is_relative_to(folder) for folder in (context.directory, context.base) if folder is not None)
    weights = hashlib.sha256((path / ADAPTER_WEIGHTS).read_bytes()).hexdigest()[:12]
    target = path / MERGED if inside else context.directory / MERGED / weights
    if not (target / COMPLETE).is_file():
        save_merged(path, target, dtype=context.settings("sft").model.dtype if inside else "auto")
    return target


def save_merged(checkpoint: Path, target: Path, *, dtype: str) -> None:
    """Merges a checkpoint's adapter into its base, and writes the model with its tokenizer.

    Args:
        checkpoint: The folder of the adapter.
        target: The folder to write. What is there is deleted.
        dtype: What to save the weights in, that of the base while it trained; "auto" takes the one it was saved in. The
            merge itself is computed in float32.
    """
    with doing(f"merging the adapter of {checkpoint.name} into its base"):
        _save_merged(checkpoint, target, dtype=dtype)


def _save_merged(checkpoint: Path, target: Path, *, dtype: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    tokenizer = load_tokenizer(checkpoint)
    scores = read_json(checkpoint / ADAPTER_CONFIG).get("task_type") == "SEQ_CLS"
    load: Any = load_classifier if scores else load_causal
    model = load(checkpoint)
    model.to(load(checkpoint, how=AS_SAVED).dtype if dtype == "auto" else getattr(torch, dtype))
    make_room(model, tokenizer)
    name_pad(model, tokenizer)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    add_code(target)
    write_complete(target)
