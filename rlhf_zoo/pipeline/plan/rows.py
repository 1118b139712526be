"""Finds the number of rows that SFT and the reward model train on, and their steps, without a download.

This module imports neither torch nor datasets, so that a cached plan appears quickly.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...runs.recipe import Recipe
from ...runs.settings.declared import default_of
from ...runs.settings.key_classes import effective_keys
from .result import Plan, StagePlan

#: If a flag sets one of these keys, the number of rows in zoo.yaml may be wrong.
_DATA_KEYS = (
    "dataset_name", "dataset_revision", "dataset_config", "dataset_train_split", "corpus", "corpus_args", "columns",
    "held_out_share", "judge_share", "max_prompt_length", "max_length", "packing", "simulated_pairs",
)  # fmt: skip


def add_steps(
    plan: Plan, recipe: Recipe, flags: Mapping[str, Mapping[str, Any]], row_counts: Mapping[str, int]
) -> Plan:
    """Adds the number of steps to each stage whose number of rows is known, and an assumption that names its source.

    Args:
        plan: The plan.
        recipe: The recipe.
        flags: Stage -> key -> value, as for `make_plan`.
        row_counts: Stage -> number of rows that the stage trains on, from `--rows`.

    Returns:
        The plan. Stages whose keys set the number of steps are unchanged.

    Raises:
        ZooError: `row_counts` names a stage whose keys set the number of steps.
    """
    stages, assumptions = [], list(plan.assumptions)
    for stage in plan.stages:
        epochs = stage.batch.get("epochs")
        if epochs is None and stage.stage in row_counts:
            raise ZooError(
                f"--rows is set for {stage.stage}, but max_steps sets its steps: leave out --rows {stage.stage}, or "
                f"set --{stage.stage}.max_steps -1."
            )
        count_and_source = None if epochs is None else _find_row_count(recipe, flags, stage.stage, row_counts)
        if count_and_source is None:
            stages.append(stage)
            continue
        row_count, source = count_and_source
        batch = {**stage.batch, "updates": training_steps(stage, row_count, processes=plan.device.count)}
        stages.append(replace(stage, batch=batch))
        assumptions.append(f"{stage.stage} trains on {row_count:,} rows, {source}")
    return replace(plan, stages=stages, assumptions=assumptions)


def training_steps(stage: StagePlan, row_count: int, *, processes: int) -> int:
    """Returns the number of optimizer steps of SFT or the reward model, computed as in transformers' Trainer.

    Args:
        stage: The stage's plan.
        row_count: Number of rows that the stage trains on.
        processes: Number of processes that share a batch.
    """
    batch = stage.batch
    texts_per_row = 2 if stage.stage == "reward" else 1  # a pair has two texts, and `batch["rows"]` counts texts
    batches = math.ceil(row_count / (batch["rows"] // texts_per_row * processes))
    return math.ceil(batch["epochs"] * max(math.ceil(batches / batch["micro_batches"]), 1))


def _find_row_count(
    recipe: Recipe, flags: Mapping[str, Mapping[str, Any]], stage: str, row_counts: Mapping[str, int]
) -> tuple[int, str] | None:
    """Returns the number of rows that a stage trains on, and its source; None if the number is unknown."""
    if stage in row_counts:
        return row_counts[stage], "as --rows says"
    shared = {**recipe.shared, **flags.get("recipe", {})}
    keys = {**effective_keys(recipe, stage, recipe.stages[stage]), **flags.get(stage, {})}
    if keys.get("packing"):
        return None  # several texts share a row
    if isinstance(pair_count := keys.get("simulated_pairs"), int):
        return pair_count, "as the key simulated_pairs says"
    flag_keys = {*flags.get("recipe", {}), *flags.get(stage, {})}
    documented_count = (recipe.zoo.get("training_rows") or {}).get(stage)
    if isinstance(documented_count, int) and not flag_keys.intersection(_DATA_KEYS):
        return documented_count, "as the recipe's zoo.yaml says"
    name = keys.get("dataset_name") or shared.get("dataset_name")
    if shared.get("corpus") or not isinstance(name, str):
        return None
    config, split = (keys.get(key, default_of(stage, key)) for key in ("dataset_config", "dataset_train_split"))
    file = _find_jsonl(Path(name), config, split)
    if file is None:
        return None
    with file.open("rb") as lines:
        line_count = sum(1 for line in lines if line.strip())
    return (line_count, f"all lines of {file.name}, or fewer if prompts are held out") if line_count else None


def _find_jsonl(path: Path, config: str | None, split: str) -> Path | None:
    """Returns the .jsonl file with a split of a local data set; None if there is no such file."""
    if path.is_file():
        return path if path.suffix == ".jsonl" and config is None and split == "train" else None
    candidates = [path / f"{split}.jsonl", *([path / config / f"{split}.jsonl"] if config else [])]
    return next((file for file in reversed(candidates) if file.is_file()), None)
