"""The ppo stage: trains the SFT policy to maximize reward models and reward functions, with PPOTrainer."""

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ZooError
from ...modeling.chat import wrap_completion
from ...modeling.generation_config import set_sampling
from ...modeling.loading import LoadOptions, load_tokenizer
from ...modeling.models import load_causal
from ...modeling.prompt_keys import describe_prompt_count
from ...modeling.reserved_columns import columns_for_functions
from ...modeling.special_tokens import ensure_own_pad
from ...plugins import REWARDS, load_object
from ...rewards import RewardFunction, Rewards
from ...rewards.ensemble import check_ensemble
from ...rewards.functions import Batch, NamedReward, call_functions, check_reward_count
from ...rewards.loading import find_loader, load_reward_model
from ...rewards.rule import last_message_text
from ...rewards.verifiable import AnswerRule
from ...runs.checkpoint_choice import REWARD_METRIC_PREFIX, metric_name
from ...runs.checks.conversations import check_conversations
from ...runs.context import Publisher, RunContext
from ...runs.data.layout import drop_long_prompts, has_conversations
from ...runs.dataset import DataSource, ptx_rows, stage_source, training_and_held_out_rows
from ...runs.models import ParentCheckpoint
from ...runs.parents import find_parent, parent_names, reward_roles
from ...runs.registry import REWARD_ROLES
from ...runs.settings.loading import stage_load_options
from ...runs.settings.parse import StageSettings
from .merged import merged_model
from .train import silence_libraries, train_stage

if TYPE_CHECKING:
    from ...ppo.trainer import PPOTrainer

log = logging.getLogger(__name__)

#: Number of prompts on which reward functions are tried before training.
TRIAL_PROMPTS = 2


def load_reward_functions(settings: StageSettings) -> list[RewardFunction]:
    """Loads the reward functions that the settings name, without loading a model.

    Args:
        settings: The stage's settings.

    Raises:
        ZooError: A name cannot be loaded, there is no reward, or the number of weights does not match.
    """
    data_keys = settings.data
    functions = [load_object(name, group=REWARDS) for name in data_keys.reward_funcs or []]
    model_names = list(reward_roles(data_keys.reward_model_path).values())
    check_ensemble(model_names, settings.trainer.reward_ensemble)
    if not model_names and not functions:
        raise ZooError("The stage ppo has no reward: set reward_model_path or reward_funcs.")
    model_keys = {
        "reward_label": settings.trainer.reward_label,
        "reward_pad_token": settings.trainer.reward_pad_token,
        "reward_model_loader": data_keys.reward_model_loader,
    }
    for key, value in model_keys.items():
        if value is not None and not model_names:
            raise ZooError(f"{key} of the stage ppo is {value!r}, but there is no reward model: set reward_model_path.")
    if data_keys.reward_model_loader is not None:
        find_loader(data_keys.reward_model_loader)
    # The reward models are not loaded here, so a placeholder stands for them in the lists of names and weights.
    placeholders = [_model_placeholder] if model_names else []
    rewards = Rewards([*placeholders, *functions], weights=settings.trainer.reward_weights)
    names = ["reward_model", *rewards.names[1:]] if model_names else rewards.names
    _check_release_metric(settings, names, rewards.weights)
    return functions


def load_reward_checkpoint(settings: StageSettings, path: Path) -> PreTrainedModel:
    """Loads a reward model.

    Args:
        settings: The stage's settings.
        path: Folder of the checkpoint.
    """
    options = LoadOptions(dtype="auto", attention=settings.model.attn_implementation)
    label, loader = settings.trainer.reward_label, settings.data.reward_model_loader
    return load_reward_model(path, label=label, loader=loader, options=options)


def _model_placeholder(completions: list[Any], **_: object) -> list[None]:
    return [None] * len(completions)


def load_data(context: RunContext, source: DataSource) -> dict[str, Any]:
    """Loads PPOTrainer's data sets: prompts with all their columns, and the texts for ptx_coef.

    Args:
        context: The run.
        source: PPO's data.

    Returns:
        Keyword of the trainer -> data set or None.
    """
    train, held_out, _ = training_and_held_out_rows(context, "ppo", source)
    return {"train_dataset": train, "eval_dataset": held_out, "ptx_dataset": ptx_rows(context, source)}


def check_answers(settings: StageSettings, functions: Sequence[Any], data: Mapping[str, Any]) -> str:
    """Checks the reference answers that reward functions read from columns of the prompts.

    Args:
        settings: The stage's settings.
        functions: The stage's reward functions.
        data: Data sets, by PPOTrainer's keywords.

    Returns:
        The names of these columns, for messages; "no reward reads answers" if there are none.

    Raises:
        ZooError: A column is missing, an answer cannot be read, or no reward applies to a row.
    """
    answer_rules = [function for function in functions if isinstance(function, AnswerRule)]
    only_answer_rules = len(answer_rules) == len(functions) and not reward_roles(settings.data.reward_model_path)
    for name, subject in (("train_dataset", "the prompts"), ("eval_dataset", "the prompts to evaluate on")):
        rows = data.get(name)
        if rows is None or not answer_rules:
            continue
        flags_by_rule = [rule.answer_flags(rows, subject=subject) for rule in answer_rules]
        answered_flags = [any(flags) for flags in zip(*flags_by_rule, strict=True)]
        if only_answer_rules and not all(answered_flags):
            columns = " or ".join(dict.fromkeys(repr(rule.column) for rule in answer_rules))
            raise ZooError(
                f"Row {answered_flags.index(False)} of {subject} has no answer in the column {columns}, and no other "
                "reward applies to it: write an answer, remove the row, or add a reward."
            )
    return ", ".join(rule.column for rule in answer_rules) or "no reward reads answers"


def try_functions(settings: StageSettings, functions: Sequence[RewardFunction], data: Mapping[str, Any]) -> None:
    """Calls the reward functions as the trainer will, on the first prompts and with the prompts' texts as completions.

    Args:
        settings: The stage's settings.
        functions: The stage's reward functions.
        data: Data sets, by PPOTrainer's keywords.

    Raises:
        ZooError: A function raises, or returns a list of the wrong length.
    """
    from transformers import TrainerState

    args, prompts = settings.trainer, data["train_dataset"]
    first_rows = prompts.select(range(min(TRIAL_PROMPTS, len(prompts)))).to_list()
    rows = [row for row in first_rows for _ in range(args.num_generations)]
    state = TrainerState(max_steps=max(args.max_steps, 1), num_train_epochs=max(round(args.num_train_epochs), 1))
    columns = {name: [row[name] for row in rows] for name in columns_for_functions(rows[0])}
    batch_prompts = [row["prompt"] for row in rows]
    completions = [wrap_completion(prompt, last_message_text(prompt)) for prompt in batch_prompts]
    names = Rewards(functions).names if functions else []
    rewards = [NamedReward(name, function) for name, function in zip(names, functions, strict=True)]
    batch = Batch(batch_prompts, completions, [[0] for _ in rows], columns, trainer_state=state)  # dummy token ids
    try:
        for name, values in call_functions(rewards, batch, timeout=args.reward_timeout).items():
            check_reward_count(name, values, batch)
    except ZooError as error:
        trial = "in a trial on the first prompts, with their texts as completions"
        raise ZooError(f"A reward function failed {trial}: {error}") from error.__cause__


def check_batch(settings: StageSettings, data: dict[str, Any]) -> str:
    """Checks that there are enough prompts for an update.

    Args:
        settings: The stage's settings.
        data: Data sets, by PPOTrainer's keywords.

    Returns:
        A description of an update's prompts, completions and minibatches, for messages.

    Raises:
        ZooError: There are too few prompts.
    """
    args, prompts = settings.trainer, data["train_dataset"]
    minimum = args.prompts_per_update
    if len(prompts) < minimum:
        raise ZooError(
            f"The prompt data set has {len(prompts)} rows, but an update needs {minimum}: use more prompts or a "
            "smaller batch."
        )
    return (
        f"{minimum} of {describe_prompt_count(prompts)} prompts per update, {args.episodes_per_update} completions in "
        f"{args.num_mini_batches} minibatches"
    )


def load_policy_tokenizer(context: RunContext, path: Path, data: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of the policy that PPO starts from, with the recipe's chat settings for conversations.

    Args:
        context: The run.
        path: Folder of the policy's checkpoint.
        data: Data sets, by PPOTrainer's keywords.
    """
    tokenizer = load_tokenizer(path)
    ensure_own_pad(
        tokenizer, context.settings("ppo").data.pad_token, subject="the policy", key="pad_token of the stage ppo"
    )
    return context.shared.chat.write_for_prompts(tokenizer, data["train_dataset"]["prompt"])


def drop_too_long_prompts(
    settings: StageSettings, tokenizer: PreTrainedTokenizerBase, data: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """Drops prompts that are longer than max_prompt_length.

    Args:
        settings: The stage's settings.
        tokenizer: The policy's tokenizer.
        data: Data sets, by PPOTrainer's keywords.

    Returns:
        The data sets with the remaining prompts, and the number of training prompts that were dropped.
    """
    limit, remaining, dropped_counts = settings.data.max_prompt_length, dict(data), {}
    for name, subject in (("train_dataset", "the prompts"), ("eval_dataset", "the prompts to evaluate on")):
        if data[name] is not None:
            remaining[name], dropped_counts[name] = drop_long_prompts(data[name], tokenizer, limit, subject=subject)
    return remaining, dropped_counts["train_dataset"]


def build_trainer(settings: StageSettings, functions: list[RewardFunction], **inputs: Any) -> "PPOTrainer":
    """Builds the stage's PPOTrainer.

    Args:
        settings: The stage's settings.
        functions: The stage's reward functions.
        **inputs: Models, tokenizers and data sets, by the trainer's keywords.
    """
    from trl import get_peft_config

    from ...ppo.trainer import PPOTrainer

    return PPOTrainer(
        args=copy.copy(settings.trainer),  # because a trainer changes its arguments
        reward_funcs=functions or None,
        peft_config=get_peft_config(settings.model),
        **inputs,
    )


def run(context: RunContext, publisher: Publisher | None = None) -> bool:
    """Trains the policy with PPO.

    Args:
        context: The run.
        publisher: Sends each checkpoint as it is saved; None if the run does not publish.

    Returns:
        Whether it trained: False if the stage was already finished.

    Raises:
        ZooError: The policy, the rewards, the prompts or the settings do not work.
        Stopped: Ctrl-C was pressed, and the finished steps are saved.
    """
    from transformers import set_seed

    start_time = time.monotonic()
    settings = context.settings("ppo")
    if "sft" in parent_names(settings).values():  # this run's stage sft trained a parent
        context.check_policy_keys_unchanged()
    silence_libraries()
    functions = load_reward_functions(settings)
    source = stage_source(context, "ppo")
    parents = {role: find_parent(context, name) for role, name in parent_names(settings).items()}
    left_out_counts: dict[str, int] = {}

    def build() -> "PPOTrainer":
        data = load_data(context, source)
        check_answers(settings, functions, data)
        # The role "sft" is the model that PPO starts from, even if no SFT stage trained it.
        tokenizer = load_policy_tokenizer(context, parents["sft"].path, data)
        if not context.preflight_passed and has_conversations(data["train_dataset"]):
            check_conversations(context, "ppo", source, tokenizer)
        data, dropped_count = drop_too_long_prompts(settings, tokenizer, data)
        left_out_counts.update({"max_prompt_length": dropped_count} if dropped_count else {})
        set_seed(settings.trainer.seed)
        models = _load_models(context, settings, parents)
        # Set the seed again: loading may have drawn random numbers, and the trainer now initializes an adapter.
        set_seed(settings.trainer.seed)
        return build_trainer(settings, functions, processing_class=tokenizer, **models, **data)

    return train_stage(
        context,
        settings,
        data_lineage=source.lineage,
        parents=parents,
        start_time=start_time,
        build=build,
        publisher=publisher,
        final_fields=_truncation_field,
        left_out_counts=left_out_counts,
    )


def _load_models(
    context: RunContext, settings: StageSettings, parents: Mapping[str, ParentCheckpoint]
) -> dict[str, Any]:
    """Loads the policy, and the reward models with their tokenizers. Returns them by the trainer's keywords."""
    paths = [parents[role].path for role in REWARD_ROLES if role in parents]
    policy = load_causal(merged_model(context, parents["sft"]), options=stage_load_options(settings))
    set_sampling(policy, temperature=settings.trainer.temperature)
    return {
        "model": policy,
        "reward_model": [load_reward_checkpoint(settings, path) for path in paths] or None,
        "reward_processing_class": [load_tokenizer(path) for path in paths] or None,
        "value_model": parents["value"].path if "value" in parents else None,
    }


def _truncation_field(trainer: Any, _: Path) -> dict[str, Any]:
    """Returns how often a reward model truncated a text, as a field of run.json; {} if never."""
    count = sum(model.truncated_count for model in trainer.rewards.models)
    if count:
        log.warning("%d times a text was longer than the context of a reward model, which read only its end.", count)
    return {"reward_cut": count} if count else {}


def _check_release_metric(settings: StageSettings, names: list[str], weights: list[float]) -> None:
    """Raises ZooError if `release: best` would choose by a reward that is missing or that PPO maximizes."""
    metric = metric_name(settings.trainer) or ""
    if settings.release.release != "best" or not metric.startswith(REWARD_METRIC_PREFIX):
        return
    weight_by_name = dict(zip(names, weights, strict=True))
    name = metric.removeprefix(REWARD_METRIC_PREFIX)
    if name not in weight_by_name:
        raise ZooError(
            f"With release: best, the stage ppo would choose the checkpoint by {metric}, but there is no reward "
            f"{name}: name one of {', '.join(weight_by_name)} that has the weight 0."
        )
    if weight_by_name[name]:
        raise ZooError(
            f"With release: best, the stage ppo would choose the checkpoint by {metric}, which PPO maximizes: name a "
            "reward function that has the weight 0 in reward_weights."
        )
