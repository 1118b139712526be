"""Loads the reward stage's training pairs and held-out pairs."""

from datasets import Dataset

from ...runs.context import RunContext
from ...runs.data.hold_out import hold_out
from ...runs.data.overlap import drop_question_column
from ...runs.dataset import DataSource, stage_rows, stage_source, training_rows
from ...runs.pairs import find_named_pairs, run_on_pairs


def open_pairs(context: RunContext) -> tuple[RunContext, DataSource]:
    """Opens the data set of the reward model's pairs.

    Args:
        context: The run.

    Returns:
        The run to train the reward model in, and the data set. The run is `context`, or, if `--dataset_name` names a
        data set that has only pairs, a copy with the settings for that data set.
    """
    pairs = None if context.round is not None else find_named_pairs(context)  # a later round has its own pairs
    if pairs is None:
        return context, stage_source(context, "reward")
    return run_on_pairs(context, pairs), pairs.open(context.hub)


def training_pairs(
    context: RunContext, source: DataSource, *, keep_questions: bool = False
) -> tuple[Dataset, dict[str, int]]:
    """Returns the pairs to train on. The judge `same-labels` gets judge_share of them, and the reward model the others.

    Args:
        context: The run.
        source: The data set of the pairs.
        keep_questions: Whether to keep the column that `find_overlap` reads.

    Returns:
        The pairs, and the count of dropped rows that `training_rows` returns.
    """
    data_keys = context.settings("reward").data
    train, left_out = training_rows(context, "reward", source)
    if data_keys.held_out_share is not None:
        train = hold_out(train, data_keys.held_out_share)[0]
    if data_keys.judge_share is not None:
        reward_pairs, judge_pairs = hold_out(train, data_keys.judge_share)
        train = judge_pairs if context.trains_judge else reward_pairs
    return train if keep_questions else drop_question_column(train), left_out


def held_out_pairs(context: RunContext, source: DataSource) -> tuple[Dataset, str] | None:
    """Returns the pairs to measure accuracy on.

    Args:
        context: The run.
        source: The data set of the pairs.

    Returns:
        The pairs, and a name for them; None if no pairs are held out.
    """
    data_keys = context.settings("reward").data
    if data_keys.held_out_share is not None:
        split = data_keys.dataset_train_split
        _, held_out = hold_out(training_rows(context, "reward", source)[0], data_keys.held_out_share)
        return held_out, f"{split}, {data_keys.held_out_share:.0%} of prompts held out"
    if data_keys.dataset_test_split is None:
        return None
    return stage_rows(context, "reward", source, data_keys.dataset_test_split), data_keys.dataset_test_split
