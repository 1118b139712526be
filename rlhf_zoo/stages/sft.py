"""SFT: a policy that writes like the recipe's lines, on trl.SFTTrainer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ..finite import finite_steps
from ..hub.refusals import refusals_as
from ..model_files import load_tokenizer
from ..models import build_causal, load_causal
from ..runs.context import ParentCheckpoint, Publisher, RunContext
from ..runs.data import data_source
from ..runs.settings import StageSettings
from ..tokenizer import train_tokenizer
from .train import make_trainer, quiet, train_stage

__all__ = ["run"]


def run(context: RunContext, publisher: Publisher | None = None) -> bool:
    """Trains the SFT policy. Returns False when it was trained already."""
    from transformers import set_seed
    from trl import SFTTrainer, get_peft_config

    started = time.monotonic()
    settings = context.settings("sft")
    quiet()
    source = data_source(context, again=context.restart)
    data, shared = settings.data, settings.recipe
    field = settings.trainer.dataset_text_field
    base = _base(context, settings)
    parents = {"base": base} if base is not None else {}

    def build() -> Any:
        train = source.load(data.dataset_config, data.dataset_train_split, columns=[field])
        held_out = None
        if data.dataset_test_split is not None:
            held_out = source.load(data.dataset_config, data.dataset_test_split, columns=[field])
        set_seed(settings.trainer.seed)
        if settings.model.model_name_or_path is None:
            architecture = shared.architecture or {}
            tokenizer = train_tokenizer(
                train[field], max_length=architecture.get("max_position_embeddings", 512), **(shared.tokenizer or {})
            )
            model = build_causal(architecture, tokenizer)
        else:
            name = settings.model.model_name_or_path
            revision = base.lineage["commit"] if base is not None else settings.model.model_revision
            tokenizer = load_tokenizer(name, revision=revision)
            model = load_causal(name, revision=revision)
        return make_trainer(
            finite_steps(SFTTrainer),
            settings,
            model=model,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=get_peft_config(settings.model),
        )

    return train_stage(
        context, settings, data=source.lineage, parents=parents, started=started, build=build, publisher=publisher
    )


def _base(context: RunContext, settings: StageSettings) -> ParentCheckpoint | None:
    """The model of the Hub that SFT starts from, at the commit that its revision meant when the run began.

    None for random weights and for a folder. Raises ZooError where the Hub has no such model.
    """
    name, revision = settings.model.model_name_or_path, settings.model.model_revision
    if name is None or Path(name).is_dir():
        return None
    told = f"{name}@{revision}"
    before = (context.record("sft").read().get("parents") or {}).get("base") or {}
    if context.restart or before.get("fingerprint") != told:
        from huggingface_hub import HfApi

        what = f"The model {name} cannot be found on {context.hub.described}"
        with refusals_as(what, "check model_name_or_path, model_revision and --hub."):
            before = {"repo": name, "commit": HfApi().model_info(name, revision=revision).sha, "fingerprint": told}
    return ParentCheckpoint(Path(name), before)
