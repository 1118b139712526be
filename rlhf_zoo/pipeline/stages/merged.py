"""Merges adapters into their base, for later stages and for the published branch `merged`."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch

from ...fileio import read_json
from ...hub.client.publish import MERGED_MODEL
from ...modeling.loading import AS_SAVED, load_tokenizer
from ...modeling.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ...modeling.models import load_causal, load_classifier
from ...modeling.remote_code import copy_code
from ...modeling.special_tokens import add_pad_embedding, write_pad_id
from ...runs.context import RunContext
from ...runs.models import ParentCheckpoint
from ...runs.record import COMPLETE, write_complete
from ...runs.status_line import show_activity


def merged_model(context: RunContext, parent: ParentCheckpoint) -> Path:
    """Returns the folder of a policy. An adapter is merged into its base first, unless that was done before.

    If this run or its base run trained the adapter, the merged model is written into the adapter's folder, otherwise
    into the run directory.

    Args:
        context: The run.
        parent: The policy's checkpoint.
    """
    path = parent.path
    if not (path / ADAPTER_CONFIG).is_file():
        return path
    from_run = any(path.is_relative_to(folder) for folder in (context.directory, context.base) if folder is not None)
    weights_digest = hashlib.sha256((path / ADAPTER_WEIGHTS).read_bytes()).hexdigest()[:12]
    target = path / MERGED_MODEL if from_run else context.directory / MERGED_MODEL / weights_digest
    if not (target / COMPLETE).is_file():
        save_merged(path, target, dtype=context.settings("sft").model.dtype if from_run else "auto")
    return target


def merge_chosen(context: RunContext, checkpoint: Path) -> None:
    """Merges the adapter of the checkpoint that the verdict chose, if the run publishes a merged model.

    At the end of training only the last checkpoint was merged.

    Args:
        context: The run.
        checkpoint: Folder of the chosen checkpoint.
    """
    settings = context.settings("ppo")
    target = checkpoint / MERGED_MODEL
    if settings.release.push_merged and not (target / COMPLETE).is_file():
        save_merged(checkpoint, target, dtype=settings.model.dtype)


def save_merged(checkpoint: Path, target: Path, *, dtype: str) -> None:
    """Merges a checkpoint's adapter into its base, in float32, and saves the model with its tokenizer.

    Args:
        checkpoint: Folder of the adapter.
        target: The folder to write; an existing folder is replaced.
        dtype: The dtype of the saved weights; "auto" for the dtype of the base's weights on disk.
    """
    with show_activity(f"merging the adapter of {checkpoint.name} into its base"):
        shutil.rmtree(target, ignore_errors=True)
        tokenizer = load_tokenizer(checkpoint)
        is_classifier = read_json(checkpoint / ADAPTER_CONFIG).get("task_type") == "SEQ_CLS"
        load_model: Any = load_classifier if is_classifier else load_causal
        model = load_model(checkpoint)
        model.to(load_model(checkpoint, options=AS_SAVED).dtype if dtype == "auto" else getattr(torch, dtype))
        add_pad_embedding(model, tokenizer)
        write_pad_id(model, tokenizer)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        copy_code(target)
        write_complete(target)
