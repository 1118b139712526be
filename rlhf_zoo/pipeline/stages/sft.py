"""The sft stage: trains a policy on the recipe's texts, with trl.SFTTrainer."""

import contextlib
import copy
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ...errors import ZooError
from ...hub.client.connect import Hub
from ...hub.client.pull import fetch, full_revision
from ...hub.client.refs import NOT_LOADED, hub_lineage, resolve, try_hub_then_source
from ...hub.client.refusals import translate_hub_errors, translate_lookup_errors
from ...modeling.chat import plain_text
from ...modeling.chat_template import check_answers_end
from ...modeling.loading import load_tokenizer
from ...modeling.models import build_causal, disable_router_logits, load_causal
from ...modeling.special_tokens import highest_id, set_up_padding, train_tokenizer
from ...modeling.text_ids import switch_off_eos, without_bos
from ...runs.checks.conversations import check_conversations
from ...runs.context import Publisher, RunContext
from ...runs.data.cut_rows import count_cut_rows
from ...runs.data.layout import drop_long_prompts, has_conversations, sft_text
from ...runs.data.sources import DataSource
from ...runs.dataset import data_source, stage_source, training_and_held_out_rows
from ...runs.models import ParentCheckpoint, folder_lineage
from ...runs.settings.loading import stage_load_options
from ...runs.settings.parse import StageSettings
from .train import silence_libraries, train_stage
from .trainers import make_trainer

log = logging.getLogger(__name__)


def run(context: RunContext, publisher: Publisher | None = None) -> bool:
    """Trains the SFT policy.

    Args:
        context: The run.
        publisher: Sends each checkpoint as it is saved; None if the run does not publish.

    Returns:
        Whether it trained: False if the stage was already finished.

    Raises:
        ZooError: The base model, the data or the settings do not work.
        Stopped: Ctrl-C was pressed, and the finished steps are saved.
    """
    from transformers import set_seed
    from trl import SFTTrainer

    start_time = time.monotonic()
    settings = context.settings("sft")
    silence_libraries()
    opened_source = data_source(context, refresh=context.restart) if settings.data.dataset_name is None else None
    source = stage_source(context, "sft", opened_source)
    base = _find_base(context, settings)
    adapter = _adapter_config(settings, base)
    left_out_counts: dict[str, int] = {}
    cut_rows: dict[str, int] = {}

    def build() -> Trainer:
        train, held_out, counts = training_and_held_out_rows(context, "sft", source)
        set_seed(settings.trainer.seed)
        model, tokenizer = _model_and_tokenizer(context, settings, base, train)
        trainer_settings = _set_up_tokenizer(context, settings, source, model, tokenizer, train)
        train, dropped_count = _usable_rows(train, settings, tokenizer, subject=source.location)
        left_out_counts.update(counts | ({"max_prompt_length": dropped_count} if dropped_count else {}))
        if held_out is not None:
            held_out, _ = _usable_rows(held_out, settings, tokenizer, subject=source.location)
        cut_report = count_cut_rows(
            train, tokenizer, trainer_settings.trainer, text_column=settings.trainer.dataset_text_field
        )
        if cut_report is not None and cut_report.cut:
            log.warning("%s.", cut_report.sentence)
            cut_rows.update(asdict(cut_report))
        trainer = make_trainer(
            SFTTrainer,
            trainer_settings,
            model=model,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=adapter,
        )
        removed_count = 0 if trainer.args.packing else len(train) - len(trainer.train_dataset)
        if removed_count > 0:
            message = "%d of %d rows are left out, because max_length, %s, leaves no token of their answers."
            log.warning(message, removed_count, len(train), trainer.args.max_length)
            left_out_counts["max_length"] = removed_count
        disable_router_logits(trainer.model)  # trl turns them on
        return trainer

    return train_stage(
        context,
        settings,
        data_lineage=source.lineage,
        parents={"base": base} if base is not None else {},
        start_time=start_time,
        build=build,
        publisher=publisher,
        left_out_counts=left_out_counts,
        cut_rows=cut_rows,
    )


def _adapter_config(settings: StageSettings, base: ParentCheckpoint | None) -> Any:
    """Returns the configuration of the adapter to train; None if no adapter is trained."""
    from trl import get_peft_config

    adapter = get_peft_config(settings.model)
    if adapter is not None and base is not None and base.lineage["commit"]:
        adapter.revision = base.lineage["commit"]  # peft saves this commit as the base's revision
    return adapter


def _set_up_tokenizer(
    context: RunContext,
    settings: StageSettings,
    source: DataSource,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
) -> StageSettings:
    """Sets the tokenizer's special tokens and template, and returns settings that keep trl from changing them."""
    if (warning := switch_off_eos(tokenizer)) is not None:
        log.warning("%s", warning)
    settings = _set_template(settings, model, tokenizer, context.hub)
    pad_token, eos_token = settings.trainer.pad_token, settings.trainer.eos_token
    if (warning := set_up_padding(tokenizer, model, pad_token=pad_token, eos_token=eos_token)) is not None:
        log.warning("%s", warning)
    if has_conversations(train):
        _set_up_chat(context, source, settings, tokenizer)
    return settings


def _usable_rows(
    rows: Dataset, settings: StageSettings, tokenizer: PreTrainedTokenizerBase, *, subject: str
) -> tuple[Dataset, int]:
    """Drops rows over max_prompt_length and removes a second BOS. Returns the rows, and how many were dropped."""
    rows, dropped_count = drop_long_prompts(rows, tokenizer, settings.data.max_prompt_length, subject=subject)
    return remove_second_bos(rows, tokenizer, settings.trainer.dataset_text_field), dropped_count


def _model_and_tokenizer(
    context: RunContext, settings: StageSettings, base: ParentCheckpoint | None, train: Dataset
) -> tuple[Any, Any]:
    """Loads the base model and its tokenizer. Without a base, makes random weights and trains a tokenizer on the rows.

    Raises:
        ZooError: The base has fewer embeddings than its tokenizer has tokens.
    """
    shared, options = settings.recipe, stage_load_options(settings)
    if base is None:
        architecture = shared.architecture or {}
        tokenizer = train_tokenizer(
            [plain_text(sft_text(row, settings.trainer.dataset_text_field)) for row in train],
            max_length=architecture.get("max_position_embeddings", 512),
            **(shared.tokenizer or {}),
        )
        return build_causal(architecture, tokenizer, options=options), tokenizer
    path = resolve(base.path, context.hub, revision=base.lineage["commit"]).path
    tokenizer = load_tokenizer(path)
    model = load_causal(path, options=options)
    embeddings: Any = model.get_input_embeddings()
    embedding_count, max_id = len(embeddings.weight), highest_id(tokenizer)
    if max_id >= embedding_count:
        raise ZooError(
            f"{base.path} has {embedding_count} embedding rows, but its tokenizer has the token {max_id}: use a model "
            "with the tokenizer that it was trained with."
        )
    return model, tokenizer


def _set_up_chat(
    context: RunContext, source: DataSource, settings: StageSettings, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Writes the recipe's chat settings into the tokenizer's template.

    Raises:
        ZooError: The template refuses a conversation of the data, or ends answers without a token that SFT can teach.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    assistant_only = settings.trainer.assistant_only_loss
    if assistant_only and not has_generation_markers(tokenizer.chat_template or ""):
        with contextlib.suppress(ValueError):  # trl knows only some templates; the trainer reports an unknown one
            tokenizer.chat_template = get_training_chat_template(tokenizer)
    settings.recipe.chat.write(tokenizer)
    check_conversations(context, "sft", source, tokenizer)
    if not _ppo_sets_stops(context):
        check_answers_end(tokenizer, assistant_only=assistant_only)


def _ppo_sets_stops(context: RunContext) -> bool:
    """Whether PPO has its own stop tokens or stop texts, so that SFT need not teach the model to end answers."""
    if "ppo" not in context.recipe.stages:
        return False
    ppo = context.settings("ppo").trainer
    return ppo.configured_stop_ids is not None or ppo.truncate_text is not None


def remove_second_bos(rows: Dataset, tokenizer: PreTrainedTokenizerBase, *names: str) -> Dataset:
    """Removes the BOS at the beginning of texts if the tokenizer adds another BOS.

    Args:
        rows: Rows with texts in the named columns or in `prompt`. Other values stay as they are.
        tokenizer: The tokenizer that will read the texts.
        *names: Columns of texts.

    Returns:
        The rows, unchanged if no text begins with a second BOS.
    """
    columns = [name for name in ("prompt", *names) if name in rows.column_names and isinstance(rows[0][name], str)]
    if not any(without_bos(text, tokenizer) != text for name in columns for text in rows[name]):
        return rows
    return rows.map(lambda row: {name: without_bos(row[name], tokenizer) for name in columns})


def _set_template(
    settings: StageSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, hub: Hub
) -> StageSettings:
    """Sets the template that chat_template_path names, as trl would, and returns settings without that key.

    trl would set the template only later, but the recipe's chat settings must be written into it.
    """
    name = settings.trainer.chat_template_path
    if name is None:
        return settings
    if name.endswith((".jinja", ".j2")):
        try:
            tokenizer.chat_template = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ZooError(f"chat_template_path names {name}, which cannot be read ({error}): name a file.") from error
    else:
        from trl import clone_chat_template

        with translate_hub_errors(
            f"The chat template of {name} cannot be loaded", "check chat_template_path and --hub."
        ):
            path = resolve(name, hub, ignore=(*NOT_LOADED, "*.safetensors")).path
            load_tokenizer(path, name=name)  # refuses remote code; trl would ask on the terminal whether to run it
            clone_chat_template(model, tokenizer, str(path))
    trainer = copy.copy(settings.trainer)
    trainer.chat_template_path = None
    return replace(settings, trainer=trainer)


def _find_base(context: RunContext, settings: StageSettings) -> ParentCheckpoint | None:
    """Finds the model that SFT starts from; None for random weights. Raises ZooError if no Hub has it.

    The path of a model on a Hub is its name, and its commit is the one to which its revision pointed when the run
    started. A folder is identified by the digest of its files.
    """
    name, revision = settings.model.model_name_or_path, settings.model.model_revision
    if name is None:
        return None
    record = context.record("sft")
    recorded_base = {} if context.restart else (record.read().get("parents") or {}).get("base") or {}
    if (folder := Path(name)).is_dir():
        return ParentCheckpoint(folder, {"repo": None, "commit": None, "fingerprint": None, **folder_lineage(folder)})
    name_at_revision = f"{name}@{revision}"
    if recorded_base.get("fingerprint") == name_at_revision:
        return ParentCheckpoint(Path(name), recorded_base)

    def commit_on(hub: Hub) -> str:
        if hub.offline:
            return fetch(f"{name}@{revision or 'main'}", hub=hub, ignore=NOT_LOADED).commit
        advice = f"check model_name_or_path, model_revision and {hub.flag}."
        with translate_lookup_errors(f"The model {name}", hub, advice, repo=name):
            return str(hub.api().model_info(name, revision=full_revision(name, revision, hub)).sha)

    hub, commit = try_hub_then_source(name, context.hub, commit_on)
    lineage = {"repo": name, "commit": commit, "fingerprint": name_at_revision, **hub_lineage(hub, context.hub)}
    return ParentCheckpoint(Path(name), lineage)
