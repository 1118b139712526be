"""Shrinks a recipe to a smoke test: miniatures of its models and data, and small values for its keys."""

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...hub.client.connect import Hub
from ...hub.client.publish import publish_files
from ...runs.recipe import Recipe, is_repository_name
from ...runs.settings.declared import default_of
from ...runs.settings.key_classes import check_architecture, check_download, effective_keys
from ...runs.settings.loading import BITSANDBYTES_OPTIMIZERS
from .models import make_family, save_model

#: Rows per split. The recipe's row patterns are repeated to fill a split.
ROWS_PER_SPLIT = 64
#: Value of held_out_share: the share of these rows that is enough for the evaluation.
HELD_OUT_SHARE = 0.1
#: Tokens per completion, long enough that some completions stop and others are truncated.
RESPONSE_LENGTH = 24
#: Stage -> key -> small value. The reward stage takes the values of sft.
SMALL_VALUES: Mapping[str, Mapping[str, Any]] = {
    "recipe": {
        "evaluation.prompts": 4, "evaluation.samples": 1, "evaluation.checkpoint_prompts": 2,
        "evaluation.checkpoint_samples": 1,
    },
    "sft": {
        "max_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 1, "save_strategy": "no", "eval_strategy": "no", "bf16": False, "use_cpu": True,
        "logging_steps": 1, "max_length": 512,
    },
    "ppo": {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_mini_batches": 2, "total_episodes": None, "max_steps": 2, "save_strategy": "steps", "save_steps": 1,
        "eval_strategy": "no", "bf16": False, "use_cpu": True, "num_ppo_epochs": 1,
    },
}  # fmt: skip


def small_flags(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Returns flags that train for a few steps on short texts on the CPU. All other keys stay as in the recipe.

    Args:
        recipe: The recipe. The flags also include `flags` in its zoo.yaml, written as on the command line.

    Returns:
        Stage -> key -> value; the stage "recipe" has the keys of recipe.yaml.
    """
    flags: dict[str, dict[str, Any]] = {"recipe": dict(SMALL_VALUES["recipe"])}
    has_bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None
    for stage, keys in recipe.stages.items():
        stage_flags = dict(SMALL_VALUES["ppo" if stage == "ppo" else "sft"])
        if keys.get("held_out_share") is not None:
            stage_flags["held_out_share"] = HELD_OUT_SHARE
        if stage == "reward":
            stage_flags["score_samples"] = 4
            stage_flags |= {"simulated_pairs": 16, "simulated_test_pairs": 8} if keys.get("simulated_pairs") else {}
        if stage == "ppo":
            stage_flags["response_length"] = min(
                keys.get("response_length", default_of("ppo", "response_length")), RESPONSE_LENGTH
            )
        if not has_bitsandbytes and any(word in str(keys.get("optim")) for word in BITSANDBYTES_OPTIMIZERS):
            stage_flags["optim"] = "adamw_torch"
        if not has_bitsandbytes and (keys.get("load_in_4bit") or keys.get("load_in_8bit")):
            stage_flags |= {"load_in_4bit": False, "load_in_8bit": False}
        if str(keys.get("attn_implementation")).startswith("flash"):
            stage_flags["attn_implementation"] = "sdpa"
        flags[stage] = stage_flags
    for key, value in (recipe.zoo.get("flags") or {}).items():
        stage, _, name = key.partition(".")
        if stage in flags and stage != "recipe":
            check_download(recipe, stage, {name: value}, {})
            flags[stage] |= effective_keys(recipe, stage, {name: value})
            continue
        section, section_key = (stage, name) if stage == "evaluation" and name else ("recipe", key)
        check_download(recipe, section, {section_key: value}, {})
        flags["recipe"][key] = value
    return flags


def publish_miniatures(recipe: Recipe, hub: Hub) -> list[str]:
    """Publishes miniatures of the recipe's models and data under the names that the recipe uses.

    Args:
        recipe: The recipe.
        hub: Where to publish them.

    Returns:
        The names of the repositories.

    Raises:
        ZooError: zoo.yaml does not describe a miniature.
    """
    models, data = recipe.zoo.get("models") or {}, recipe.zoo.get("data") or {}
    texts = [json.dumps(rows, ensure_ascii=False) for keys in data.values() for rows in keys["rows"]]
    with tempfile.TemporaryDirectory() as staging:
        for index, (name, keys) in enumerate(models.items()):
            family = make_family(keys, subject=name)
            if recipe.download_mark is not None:
                fields = {"model_type": family.model_type, **family.fields}
                check_architecture(fields, where=f"{recipe.yaml_file('zoo')}, which was downloaded,")
            folder = save_model(family, Path(staging) / f"model-{index}", texts)
            publish_files(folder, name, repo_type="model", message="A miniature", hub=hub)
        for index, (name, keys) in enumerate(data.items()):
            folder = write_data(keys, Path(staging) / f"data-{index}")
            publish_files(folder, name, repo_type="dataset", message="A miniature", hub=hub)
    return [*models, *data]


def write_data(keys: Mapping[str, Any], folder: Path) -> Path:
    """Writes a data set of `ROWS_PER_SPLIT` rows per split.

    Args:
        keys: `splits`, `config`, and `rows`: patterns in which {n} is the index of the row and {split} its split.
        folder: The new folder.

    Raises:
        ZooError: A split has a name that is not valid.
    """
    folder.mkdir()
    data_files = []
    for split in keys["splits"]:
        if not is_repository_name(str(split)):
            raise ZooError(f"zoo.yaml names a split {split!r:.200}: use letters, digits, '-', '_' and '.' only.")
        rows = [
            _fill_placeholders(keys["rows"][index % len(keys["rows"])], n=index, split=split)
            for index in range(ROWS_PER_SPLIT)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        data_files.append({"split": split, "path": f"{split}.jsonl"})
    front_matter = {"configs": [{"config_name": keys.get("config") or "default", "data_files": data_files}]}
    # The front matter is JSON, which is valid YAML.
    (folder / "README.md").write_text(f"---\n{json.dumps(front_matter)}\n---\n", encoding="utf-8")
    return folder


def _fill_placeholders(value: Any, **placeholders: object) -> Any:
    if isinstance(value, str):
        for name, text in placeholders.items():
            value = value.replace(f"{{{name}}}", str(text))
        return value
    if isinstance(value, Mapping):
        return {key: _fill_placeholders(item, **placeholders) for key, item in value.items()}
    return [_fill_placeholders(item, **placeholders) for item in value] if isinstance(value, list) else value
