"""Counts the prompts of the evaluation that the stages of a run also train on."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from datasets import Dataset

from ...errors import ZooError
from ...modeling.prompt_keys import count_distinct_prompts
from ...runs.context import RunContext
from ...runs.data.overlap import find_overlap
from ...runs.dataset import (
    HELD_OUT,
    evaluation_location,
    ptx_rows,
    stage_rows,
    stage_source,
    training_and_held_out_rows,
)
from ...runs.judge import with_trained_keys
from .pairs import open_pairs, training_pairs

log = logging.getLogger(__name__)


def count_trained_prompts(
    context: RunContext, prompts: Dataset, *, planned_stages: Collection[str] = ()
) -> dict[str, int | None]:
    """Counts the evaluation's prompts that each stage trains on, and warns if there are any.

    Args:
        context: The run.
        prompts: The prompts of the evaluation.
        planned_stages: Stages that will be trained. Other stages can be counted only if they are finished in this run
            directory.

    Returns:
        Stage -> number of distinct prompts that it trains on; None if they cannot be counted.
    """
    count_by_stage = {
        stage: _count_in_stage(context, stage, prompts, is_planned=stage in planned_stages)
        for stage in context.recipe.stages
    }
    if sum(count or 0 for count in count_by_stage.values()):
        counts = ", ".join(f"the stage {stage} trains on {count}" for stage, count in count_by_stage.items() if count)
        total = count_distinct_prompts(prompts["prompt"])
        log.warning("Of the evaluation's %d prompts %s: %s.", total, counts, _advice(context))
    return count_by_stage


def _advice(context: RunContext) -> str:
    """Returns advice on how to keep the evaluation's prompts out of training, for the end of a warning."""
    if evaluation_location(context)["held_out_share"] is not None:  # a stage that is trained now leaves the prompts out
        return "train these stages again with --restart to leave them out"
    if context.settings("ppo").data.held_out_share is not None:
        return (
            "set evaluation.dataset_test_split to another split, or to null to evaluate on the prompts that "
            "held_out_share of the stage ppo holds out"
        )
    return (
        "hold out a share of PPO's prompts (held_out_share of the stage ppo), or set evaluation.dataset_test_split to "
        "another split"
    )


def _count_in_stage(context: RunContext, stage: str, prompts: Dataset, *, is_planned: bool) -> int | None:
    document = {} if is_planned else context.record(stage).read()
    is_finished = document.get("status") == "finished"
    if not is_finished and not is_planned:
        return None
    try:
        stage_context = with_trained_keys(context, stage) if is_finished else context
        recorded_counts = document.get("left_out") or {} if is_finished else None
        training_sets = _training_sets(stage_context, stage, recorded_counts)
    except ZooError as error:
        log.info("Whether the stage %s trains on prompts of the evaluation is unknown: %s", stage, error)
        return None
    if training_sets is None:
        return None
    overlaps = [find_overlap(prompts, rows) for rows in training_sets]
    shared_rows = sorted(set[int]().union(*(result.prompt_indices for result in overlaps)))
    if not shared_rows and not all(result.is_complete for result in overlaps):
        return None
    return count_distinct_prompts(prompts.select(shared_rows)["prompt"])


def _training_sets(context: RunContext, stage: str, recorded_counts: Mapping[str, Any] | None) -> list[Dataset] | None:
    """Returns the data sets that a stage trains on; None for pairs that are not simulated yet.

    `recorded_counts` holds the counts of left-out rows that a finished stage recorded; None for a stage that will be
    trained. If a finished stage would now hold out another number of rows, it is assumed to have trained on all rows.
    """
    if stage == "reward":
        if recorded_counts is None and context.settings("reward").data.simulated_pairs is not None:
            return None
        stage_context, source = open_pairs(context)
        rows, counts = training_pairs(stage_context, source, keep_questions=True)
    else:
        stage_context, source = context, stage_source(context, stage)
        rows, _, counts = training_and_held_out_rows(context, stage, source, keep_questions=True)
    if recorded_counts is not None and recorded_counts.get(HELD_OUT) != counts.get(HELD_OUT):
        rows = stage_rows(stage_context, stage, source, stage_context.settings(stage).data.dataset_train_split)
    texts = ptx_rows(context, source) if stage == "ppo" else None
    return [rows] if texts is None else [rows, texts]
