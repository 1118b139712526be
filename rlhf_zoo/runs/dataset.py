"""Loads the rows that each stage of a run reads, for training, evaluation and judges."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import datasets

from ..errors import ZooError
from ..fileio import read_json
from ..modeling import distributed
from ..modeling.loading import load_tokenizer
from .context import RunContext
from .corpus_data import corpus_source
from .data.columns import keep_rows_above
from .data.digests import check_unchanged, digest
from .data.hold_out import drop_rows_with_prompts, hold_out, split_by_prompt
from .data.layout import Form, convert_rows, drop_long_prompts, put_distinct_prompts_first
from .data.overlap import drop_question_column
from .data.sources import DataSource, find_data
from .recipe import Recipe
from .settings.evaluation import LabeledArguments, OwnPairsArguments
from .settings.parse import RecipeConfig, StageSettings

#: Key under `left_out` in run.json for the number of rows of a stage that were dropped because PPO holds out their
#: prompts.
HELD_OUT = "held_out_by_ppo"
#: Records the sources and lineage of a round's pairs. The pairs themselves are .jsonl files in the same folder.
PAIRS_RECORD_FILE = "made.json"


def stage_source(context: RunContext, stage: str, source: DataSource | None = None) -> DataSource:
    """Opens a stage's data: the data set that the stage names, otherwise the recipe's.

    In later rounds the reward stage reads the round's pairs.

    Args:
        context: The run.
        stage: Name of the stage.
        source: The recipe's data, if already open. With None, it is opened if the stage names no data set.

    Raises:
        ZooError: A local file has changed since the stage trained on it, or a round's pairs have changed.
    """
    if stage == "reward" and context.round is not None:
        folder = context.round.folder
        lineage = read_json(folder / PAIRS_RECORD_FILE)["lineage"]
        if digest(folder, ".jsonl") != lineage["fingerprint"]:
            raise ZooError(
                f"{folder} has changed since the round made it: restore it, or remove {folder.parent} to start the "
                "round again."
            )
        return DataSource(str(folder), None, lineage)
    data_args, record = context.settings(stage).data, context.record(stage)
    recorded_lineage = None if context.restart else record.read().get("dataset")
    if data_args.dataset_name is not None:
        name, revision = data_args.dataset_name, data_args.dataset_revision
        source = find_data(name, revision, context.hub, recorded_lineage=recorded_lineage)
    elif source is None:
        source = data_source(context)
    if record.has_trained:
        check_unchanged(f"The data set {source.location}", source.lineage, recorded_lineage)
    return source


def check_same_data(context: RunContext, stage: str) -> None:
    """Checks that a stage reads the same local data that earlier stages trained on.

    Args:
        context: The run.
        stage: The stage; "eval" reads PPO's data.

    Raises:
        ZooError: The files of a data set differ from those that an earlier stage recorded.
    """
    earlier_records = [context.record(name) for name in takewhile(lambda name: name != stage, context.recipe.stages)]
    earlier_datasets = {
        record.path.name: record.read().get("dataset") or {} for record in earlier_records if record.has_trained
    }
    if not any(dataset.get("files") for dataset in earlier_datasets.values()):
        return
    data_stage = "ppo" if stage == "eval" else stage
    if data_stage == "reward" and context.round is not None:  # the stage reads pairs that the run itself made
        return
    source = stage_source(context, data_stage)
    files = source.lineage.get("files")
    for name, dataset in earlier_datasets.items():
        # The fingerprint covers only name and revision, so the files of a local data set may still have changed.
        is_same_dataset = dataset.get("fingerprint") == source.lineage.get("fingerprint")
        if is_same_dataset and dataset.get("files", files) != files:
            raise ZooError(
                f"The data set {source.location} has changed since the stage {name} trained on it: restore it, choose "
                f"another --output_dir, or train that stage again with `{context.stage_command(name, '--restart')}`."
            )


def stage_rows(context: RunContext, stage: str, source: DataSource, split: str) -> datasets.Dataset:
    """Loads a split of a stage's data.

    Args:
        context: The run.
        stage: Name of the stage.
        source: The stage's data.
        split: Name of the split.

    Raises:
        ZooError: A column is missing, or a row cannot be read.
    """
    settings = context.settings(stage)
    return _load_split(context, source, settings.data, split, form=FORMS[stage], text_column=text_column_of(settings))


#: The form in which each stage reads rows.
FORMS: Mapping[str, Form] = {"sft": "texts", "reward": "pairs", "ppo": "prompts"}


def text_column_of(settings: StageSettings) -> str:
    """Returns the column of plain texts that a stage reads.

    Args:
        settings: The stage's settings.
    """
    return str(getattr(settings.trainer, "dataset_text_field", "text"))


def _load_split(
    context: RunContext, source: DataSource, data_args: Any, split: str, *, form: Form, text_column: str = "text"
) -> datasets.Dataset:
    """Loads a split and converts its rows to `form`, with the recipe's data keys in `data_args`."""
    rows = source.load(data_args.dataset_config, split, columns=[])  # `convert_rows` checks the columns
    config = f", configuration {data_args.dataset_config}" if data_args.dataset_config else ""
    subject = f"The data set {source.location}{config}, split {split},"
    return convert_rows(
        keep_rows_above(rows, data_args.keep_above, subject=subject),
        form,
        columns=data_args.columns,
        as_chat=context.shared.conversational,
        text_column=text_column,
        subject=subject,
    )


def training_rows(context: RunContext, stage: str, source: DataSource) -> tuple[datasets.Dataset, dict[str, int]]:
    """Loads the training split. For stages other than PPO, drops the rows whose prompts PPO holds out.

    Args:
        context: The run.
        stage: Name of the stage.
        source: The stage's data.

    Returns:
        The rows, and {HELD_OUT: number of dropped rows}; {} for the stage "ppo", or if PPO holds nothing out, or if the
        number is unknown.
    """
    rows = stage_rows(context, stage, source, context.settings(stage).data.dataset_train_split)
    if stage == "ppo" or "ppo" not in context.recipe.stages:
        return rows, {}
    return drop_held_out_prompts(context, rows, subject=f"the stage {stage}")


def drop_held_out_prompts(
    context: RunContext, rows: datasets.Dataset, *, subject: str
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Drops the rows whose prompts PPO's held_out_share holds out.

    Args:
        context: The run.
        rows: Rows of any stage.
        subject: What to call the rows, in messages.

    Returns:
        The remaining rows, and {HELD_OUT: number of dropped rows}; {} if PPO holds nothing out, or if the number is
        unknown.
    """
    data_args = context.settings("ppo").data
    if data_args.held_out_share is None:
        return rows, {}
    prompts = stage_rows(context, "ppo", stage_source(context, "ppo"), data_args.dataset_train_split)
    test, validation, _ = _split_ppo_rows(context, prompts)
    held_out = datasets.concatenate_datasets([test, validation])
    remaining_rows, dropped_count = drop_rows_with_prompts(rows, held_out, subject=subject)
    if dropped_count:
        reason = "PPO holds their prompts out, to monitor training and to evaluate"
        context.warn_once(f"{dropped_count} of {len(rows)} rows of {subject} are left out: {reason}.")
    return remaining_rows, {} if dropped_count is None else {HELD_OUT: dropped_count}


def _split_ppo_rows(context: RunContext, rows: datasets.Dataset) -> list[datasets.Dataset]:
    """Splits PPO's training split by held_out_share into rows for the final evaluation, validation and training.

    If the final evaluation reads a split of its own, it does not need the first part, so validation gets both parts.
    """
    test, validation, train = split_by_prompt(rows, context.settings("ppo").data.held_out_share, part_count=2)
    if context.shared.evaluation.dataset_test_split is not None:
        validation = datasets.concatenate_datasets([test, validation])
    return [test, validation, train]


def training_and_held_out_rows(
    context: RunContext, stage: str, source: DataSource, *, keep_questions: bool = False
) -> tuple[datasets.Dataset, datasets.Dataset | None, dict[str, int]]:
    """Loads the rows that the SFT or PPO stage trains on, and those held out for evaluation.

    Args:
        context: The run.
        stage: "sft" or "ppo".
        source: The stage's data.
        keep_questions: Whether the training rows keep the column that `find_overlap` reads.

    Returns:
        Rows to train on, rows to evaluate on during training or None, and the count of dropped rows that
        `training_rows` returns.
    """
    data_args = context.settings(stage).data
    train, dropped_counts = training_rows(context, stage, source)
    held_out = None
    if data_args.held_out_share is not None and stage == "ppo":
        test, held_out, train = _split_ppo_rows(context, train)
        held_out_prompts = datasets.concatenate_datasets([test, held_out])
        prompt_count = len(train)
        train, dropped_count = drop_rows_with_prompts(train, held_out_prompts, subject="the stage ppo")
        if dropped_count:
            context.warn_once(
                f"{dropped_count} of {prompt_count} prompts of PPO are left out: they contain a held-out prompt."
            )
    elif data_args.held_out_share is not None:
        train, held_out = hold_out(train, data_args.held_out_share)
    elif data_args.dataset_test_split is not None:
        held_out = stage_rows(context, stage, source, data_args.dataset_test_split)
    held_out = None if held_out is None else drop_question_column(held_out)
    return train if keep_questions else drop_question_column(train), held_out, dropped_counts


def ptx_rows(context: RunContext, source: DataSource) -> datasets.Dataset | None:
    """Loads the texts for PPO's pretraining loss (ptx_coef), except those whose prompts PPO holds out.

    Args:
        context: The run.
        source: PPO's data.

    Returns:
        The texts; None if ptx_coef is 0.
    """
    settings = context.settings("ppo")
    if not settings.trainer.ptx_coef > 0:
        return None
    data_args, keys = settings.data, {"configuration": "ptx_dataset_config", "split": "ptx_dataset_split"}
    texts = source.load(data_args.ptx_dataset_config, data_args.ptx_dataset_split, columns=[], keys=keys)
    return drop_held_out_prompts(context, texts, subject="the PTX data set")[0]


def evaluation_rows(
    context: RunContext, source: DataSource, part: str = "test", *, policy_folder: Path | None = None
) -> datasets.Dataset:
    """Loads the prompts for an evaluation from PPO's data, in the order of `put_distinct_prompts_first`.

    Args:
        context: The run.
        source: PPO's data.
        part: "test" for the final evaluation, "validation" for the choice of a checkpoint.
        policy_folder: The SFT policy, whose tokenizer counts tokens for max_prompt_length; None keeps all prompts.

    Raises:
        ZooError: A row cannot be read, or all prompts are too long.
    """
    location, data_args = evaluation_location(context, part), context.settings("ppo").data
    rows = stage_rows(context, "ppo", source, location["split"])
    if location["held_out_share"] is not None:
        rows = _split_ppo_rows(context, rows)[0 if part == "test" else 1]
    rows = put_distinct_prompts_first(rows)
    if policy_folder is None or data_args.max_prompt_length is None:
        return rows
    tokenizer = context.shared.chat.write_for_prompts(load_tokenizer(policy_folder), rows["prompt"])
    return drop_long_prompts(
        rows, tokenizer, data_args.max_prompt_length, subject=f"the evaluation's prompts ({part})"
    )[0]


def evaluation_location(context: RunContext, part: str = "test") -> dict[str, Any]:
    """Returns where `evaluation_rows` finds its prompts.

    Args:
        context: The run.
        part: "test" or "validation".

    Returns:
        {config, split, held_out_share}. The share is None if the split is not the training split.
    """
    data_args = context.settings("ppo").data
    split, share = evaluation_split(context.shared, data_args, part)
    return {"config": data_args.dataset_config, "split": split, "held_out_share": share}


def evaluation_split(shared: RecipeConfig, data_args: Any, part: str = "test") -> tuple[str, float | None]:
    """Returns the split that `evaluation_rows` loads.

    Args:
        shared: The keys of recipe.yaml, which all stages share.
        data_args: PPO's data arguments, whose dataset_test_split is the split for "validation".
        part: "test" or "validation".

    Returns:
        The split and held_out_share; the share is None unless the split is the training split.
    """
    test_split = shared.evaluation.dataset_test_split
    if data_args.held_out_share is not None and (part == "validation" or test_split is None):
        return data_args.dataset_train_split, data_args.held_out_share
    return (test_split or "test") if part == "test" else data_args.dataset_test_split or "validation", None


def labeled_rows(context: RunContext) -> datasets.Dataset:
    """Loads the texts and labels for the judge `classifier`.

    Args:
        context: The run.

    Returns:
        Rows of the data set that the recipe names for the judge, otherwise of the recipe's own data.
    """
    return _load_for_judge(context, context.shared.evaluation.labeled_arguments, "labeled")[0]


def own_pairs(context: RunContext) -> tuple[datasets.Dataset, DataSource] | None:
    """Loads labeled pairs of the policies' own outputs.

    Args:
        context: The run.

    Returns:
        The pairs and their source; None if the recipe names no such pairs.
    """
    data_args = own_pairs_keys(context.recipe, context.shared)
    return None if data_args is None else _load_for_judge(context, data_args, "pairs")


def _load_for_judge(
    context: RunContext, data_args: LabeledArguments, form: Form
) -> tuple[datasets.Dataset, DataSource]:
    if data_args.dataset_name is None:
        source = data_source(context)
    else:
        source = find_data(data_args.dataset_name, data_args.dataset_revision, context.hub)
    return _load_split(context, source, data_args, data_args.dataset_train_split, form=form), source


def own_pairs_keys(recipe: Recipe, shared: RecipeConfig) -> OwnPairsArguments | None:
    """Returns the keys under `evaluation.own_pairs`, with the path of a `dataset_name` that is next to recipe.yaml.

    Args:
        recipe: The recipe.
        shared: The keys of recipe.yaml, which all stages share.

    Returns:
        The keys; None if the recipe does not set `own_pairs`.
    """
    data_args = shared.evaluation.own_pairs_arguments
    if data_args is None or data_args.dataset_name is None:
        return data_args
    path = recipe.folder / data_args.dataset_name
    return replace(data_args, dataset_name=str(path)) if path.exists() else data_args


def data_source(context: RunContext, *, refresh: bool = False) -> DataSource:
    """Opens the recipe's data: what its corpus prepares, or the data set that it names.

    Args:
        context: The run.
        refresh: Whether to prepare or look up the data again, even if this run directory already has data.

    Raises:
        ZooError: The recipe has no corpus and no data set, or the run directory has another run's data and --restart is
            not set.
    """
    with distributed.main_process_first():
        return _data_source(context, refresh=refresh and distributed.is_main_process())


def _data_source(context: RunContext, *, refresh: bool) -> DataSource:
    shared = context.shared
    if shared.corpus is not None:
        return corpus_source(context, refresh=refresh)
    if shared.dataset_name is None:
        raise ZooError(f"The recipe {context.recipe.name} names no data set: set --dataset_name.")
    return _named_source(context, shared.dataset_name, refresh=refresh)


def _named_source(context: RunContext, name: str, *, refresh: bool) -> DataSource:
    """Finds the data set that the recipe names, at the commit to which its revision pointed when this run started."""
    record = context.record("data")
    document = record.read()
    recorded_lineage = {**(document.get("dataset") or {}), "fingerprint": document.get("fingerprint")}
    revision, usable_lineage = context.shared.dataset_revision, None if refresh else recorded_lineage
    source = find_data(name, revision, context.hub, recorded_lineage=usable_lineage)
    data_fingerprint = source.lineage["fingerprint"]
    is_pinned = source.lineage["repo"] and source.lineage["commit"] and source.outage is None
    if is_pinned and (refresh or recorded_lineage["fingerprint"] != data_fingerprint):
        lineage = {key: value for key, value in source.lineage.items() if key != "fingerprint"}
        record.write(
            stage="data", recipe=context.recipe.name, status="named", fingerprint=data_fingerprint, dataset=lineage
        )
    return source
