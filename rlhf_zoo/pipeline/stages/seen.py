"""How many of the evaluation's prompts the stages of a run train on."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from datasets import Dataset

from ...errors import ZooError
from ...modeling.prompt_keys import count_distinct_prompts
from ...runs.context import RunContext
from ...runs.data.overlap import overlap
from ...runs.dataset import HELD_OUT, evaluated_part, parts, ptx_rows, stage_rows, stage_source
from ...runs.judge import as_trained
from .pairs import open_pairs, training_pairs

log = logging.getLogger(__name__)


def prompts_seen(context: RunContext, prompts: Dataset, *, planned: Collection[str] = ()) -> dict[str, int | None]:
    """Counts the evaluation's prompts that each stage of a run trains on, and says which stages do.

    Args:
        context: The run.
        prompts: Those of the evaluation.
        planned: Stages that will be trained, as the run says. Of others that this run directory does not hold
            finished, nobody knows the data.

    Returns:
        Of each stage, how many different prompts it trains on too; None where that cannot be told.
    """
    count_by_stage = {
        stage: _seen_by(context, stage, prompts, planned=stage in planned) for stage in context.recipe.stages
    }
    if sum(count or 0 for count in count_by_stage.values()):
        counts = ", ".join(f"the stage {stage} trains on {count}" for stage, count in count_by_stage.items() if count)
        log.warning(
            "Of the evaluation's %d prompts %s: %s.", count_distinct_prompts(prompts["prompt"]), counts, _mend(context)
        )
    return count_by_stage


def _mend(context: RunContext) -> str:
    """What keeps the evaluation's prompts out of training, of what the recipe does not do yet."""
    if evaluated_part(context)["held_out_share"] is not None:  # so they are left out of whatever is trained from now on
        return "train these stages again (--restart), and they leave them out"
    if context.settings("ppo").data.held_out_share is not None:
        return (
            "set evaluation.dataset_test_split to null, and it takes what held_out_share of the stage ppo holds out, "
            "or name another split there"
        )
    return (
        "hold a share of PPO's prompts out (held_out_share of the stage ppo), or name another split "
        "(evaluation.dataset_test_split)"
    )


def _seen_by(context: RunContext, stage: str, prompts: Dataset, *, planned: bool) -> int | None:
    document = {} if planned else context.record(stage).read()
    finished = document.get("status") == "finished"
    if not finished and not planned:
        return None
    try:
        run = as_trained(context, stage) if finished else context
        learned = _learned(run, stage, document.get("left_out") or {} if finished else None)
    except ZooError as error:
        log.info("Whether the stage %s trains on prompts of the evaluation cannot be told: %s", stage, error)
        return None
    if learned is None:
        return None
    overlaps = [overlap(prompts, rows) for rows in learned]
    repeated = sorted(set[int]().union(*(each.asked for each in overlaps)))
    if not repeated and not all(each.told for each in overlaps):
        return None
    return count_distinct_prompts(prompts.select(repeated)["prompt"])


def _learned(context: RunContext, stage: str, left_out: Mapping[str, Any] | None) -> list[Dataset] | None:
    """What a stage learns from; None of pairs that are still to be made, of prompts of PPO's.

    left_out: what a finished stage left out. Where that is not what it would leave out now, it learned from all rows.
    """
    if stage == "reward":
        if left_out is None and context.settings("reward").data.simulated_pairs is not None:
            return None
        owner, source = open_pairs(context)
        rows, leaves_out = training_pairs(owner, source, marked=True)
    else:
        owner, source = context, stage_source(context, stage)
        rows, _, leaves_out = parts(context, stage, source, marked=True)
    if left_out is not None and left_out.get(HELD_OUT) != leaves_out.get(HELD_OUT):
        rows = stage_rows(owner, stage, source, owner.settings(stage).data.dataset_train_split)
    texts = ptx_rows(context, source) if stage == "ppo" else None
    return [rows] if texts is None else [rows, texts]
