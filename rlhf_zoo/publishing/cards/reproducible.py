"""Predicts from a run's files whether `rlhf-zoo reproduce` can reproduce its checkpoint.

A card must not show the command for a checkpoint that `pipeline.inspect.published` would refuse.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...fileio import hub_id
from ...plugins import CORPORA, PREFERENCES, REWARDS, registered_names
from ...runs.registry import REWARD_ROLES, STAGES, parent_title
from .facts import StageFacts

#: Keys that can read files or load code, so a downloaded recipe must not set them.
_FILE_READING_KEYS = (
    "accelerator_config", "chat_template_path", "deepspeed", "fsdp", "fsdp_config", "model_init_kwargs",
    "parallelism_config", "reward_model_loader",
)  # fmt: skip
_MODEL_KEYS = ("model_name_or_path", "reward_model_path", "value_model_name_or_path")
_OWN_MODULES = ("rlhf_zoo.runs.corpora", "rlhf_zoo.rewards")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def obstacle(facts: StageFacts) -> str | None:
    """Returns why a checkpoint cannot be reproduced from published files.

    Args:
        facts: The facts of the stage.

    Returns:
        The first obstacle, as a clause that follows "because"; None if the checkpoint can be reproduced.
    """
    return next(_obstacles(facts), None)


def _obstacles(facts: StageFacts) -> Iterator[str]:
    settings = facts.settings
    recipe_settings = settings.get("recipe")
    recipe_settings = recipe_settings if isinstance(recipe_settings, Mapping) else {}
    if facts.merged:
        yield "training saves no adapter merged into its base"
    for key in _FILE_READING_KEYS:
        if settings.get(key):
            yield f"its recipe has {key}, which may read files or load code"
    for key, name, group in _named_objects(facts, settings, recipe_settings):
        if not _is_registered(name, group):
            yield f"its recipe takes {key} from {name}, which no installed package registers"
    for key in _MODEL_KEYS:
        names = settings.get(key)
        for model in names if isinstance(names, list) else [names]:
            if model is not None and model not in STAGES and hub_id(str(model).partition("@")[0]) is None:
                yield f"{key} is a local folder of the training machine"
    ppo_settings = settings.get("ppo")
    ppo_dataset = ppo_settings.get("dataset_name") if isinstance(ppo_settings, Mapping) else None
    sources = [settings.get("dataset_name"), ppo_dataset]
    if recipe_settings.get("corpus") is None or not _is_pinned(facts.parents.get("data")):
        sources.append(recipe_settings.get("dataset_name"))
    if any(name is not None and hub_id(name) is None for name in sources):
        yield "its data are in a local file or folder of the training machine"
    for role in ("sft", *REWARD_ROLES):
        if role in facts.parents and not _is_pinned(facts.parents[role]):
            yield f"its {parent_title(role, from_base=facts.ppo_starts_from_base)} is not published"
    if facts.stage == "reward" and facts.run.get("round"):
        yield "it was trained on samples of the PPO policy of an earlier round"


def _named_objects(
    facts: StageFacts, settings: Mapping[str, Any], recipe_settings: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yields (key, name, group of entry points) of the Python objects that the stage's settings name."""
    if recipe_settings.get("corpus") is not None:
        yield "corpus", str(recipe_settings["corpus"]), CORPORA
    if facts.stage == "reward" and settings.get("preference") is not None:
        yield "preference", str(settings["preference"]), PREFERENCES
    for name in facts.reward_function_weights if facts.stage == "ppo" else ():
        yield "reward_funcs", name, REWARDS


def _is_registered(name: str, group: str) -> bool:
    base_name = name.partition("(")[0].strip()
    return base_name.startswith(_OWN_MODULES) if ":" in base_name else base_name in registered_names(group)


def _is_pinned(parent: Mapping[str, Any] | None) -> bool:
    """Whether a parent is named by a repository and a full commit."""
    entry = parent or {}
    return hub_id(entry.get("repo")) is not None and _COMMIT.fullmatch(str(entry.get("commit"))) is not None
