"""PPO: the SFT policy, trained against the reward model, on our own PPOTrainer."""

from __future__ import annotations

import time
from typing import Any

from ..errors import ZooError
from ..models import load_causal, load_classifier
from ..plugins import load_object
from .context import Checkpoint, RunContext
from .data import data_source
from .train import quiet, train_stage

__all__ = ["REWARDS", "run"]

REWARDS = "rlhf_zoo.rewards"


def _parent(context: RunContext, name: str) -> Checkpoint:
    """Another stage of this recipe by its name, else a path or Hub id."""
    if name in context.recipe.stages:
        return context.checkpoint(name)
    from pathlib import Path

    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if Path(name).is_dir():
        return Checkpoint(Path(name), {"repo": None, "commit": None, "path": str(name), "fingerprint": str(name)})
    repo, _, revision = name.partition("@")
    try:
        commit = HfApi().model_info(repo, revision=revision or None).sha
        path = snapshot_download(repo, revision=commit)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ZooError(
            f"{name!r} is no stage of {context.recipe.name}, no folder and no model on {context.hub.described}."
        ) from error
    return Checkpoint(Path(path), {"repo": repo, "commit": commit, "path": None, "fingerprint": commit})


def run(context: RunContext) -> bool:
    """Trains the policy with PPO. Returns False when it was trained already."""
    from transformers import AutoTokenizer, set_seed
    from trl import get_peft_config

    from ..ppo.trainer import PPOTrainer

    started = time.monotonic()
    settings = context.settings("ppo")
    quiet()
    source = data_source(context)
    data = settings.data
    if data.reward_model_path is None and not data.reward_funcs:
        raise ZooError(f"The stage ppo of {context.recipe.name} has no reward: give reward_model_path or reward_funcs.")
    functions = [load_object(name, group=REWARDS) for name in data.reward_funcs or []]
    parents = {"sft": _parent(context, settings.model.model_name_or_path or "sft")}
    if data.reward_model_path is not None:
        parents["reward"] = _parent(context, data.reward_model_path)

    def build() -> Any:
        tokenizer = AutoTokenizer.from_pretrained(parents["sft"].path)
        train = source.load(data.dataset_config, data.dataset_train_split, columns=["prompt"])
        held_out = None
        if data.dataset_test_split is not None:
            held_out = source.load(data.dataset_config, data.dataset_test_split, columns=["prompt"])
        set_seed(settings.trainer.seed)
        reward, reward_tokenizer = None, None
        if "reward" in parents:
            reward = load_classifier(parents["reward"].path)
            reward_tokenizer = AutoTokenizer.from_pretrained(parents["reward"].path)
        return PPOTrainer(
            args=settings.trainer,
            processing_class=tokenizer,
            model=load_causal(parents["sft"].path),
            reward_model=reward,
            reward_funcs=functions or None,
            reward_processing_class=reward_tokenizer,
            value_model=data.value_model_name_or_path,
            train_dataset=train,
            eval_dataset=held_out,
            peft_config=get_peft_config(settings.model),
        )

    return train_stage(context, settings, data=source.lineage, parents=parents, started=started, build=build)
