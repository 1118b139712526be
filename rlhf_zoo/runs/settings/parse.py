"""Checks a recipe's keys and converts them from YAML and flags to dataclasses."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ZooError, first_line
from ...fields import option
from ...modeling.chat_template import ChatSettings
from ...modeling.distributed import check_can_shard
from ...modeling.gguf import unpack_if_gguf
from ...plugins import SYNONYMS, did_you_mean
from ..checkpoint_choice import ReleaseArguments, check_release_rule
from ..data.batch_share import share_of_batch
from ..data.layout import DataArguments
from ..environment import apply_environment
from ..recipe import Recipe
from ..registry import STAGES
from .declared import RUN_KEYS, declared_keys, refused_keys
from .evaluation import EvaluationConfig
from .key_classes import check_download, effective_keys
from .model_keys import check_model
from .values import convert_keys, type_hints

#: Keys that may name a GGUF file. In a run's settings, they name the folder into which the file is unpacked.
_GGUF_KEYS = ("model_name_or_path", "value_model_name_or_path")


@dataclass(frozen=True)
class RecipeConfig:
    """The keys of recipe.yaml, which all stages share."""

    description: str = field(metadata={"help": "What the recipe shows, in one sentence."})
    license: str = option("apache-2.0", "License of the checkpoints, as the Hub names it.")
    language: str = option("en", "Language of the texts, as the Hub names it.")
    simulated: bool = option(False, "Whether a program simulates the human judges; cards say so.")
    attribution: str | None = option(None, "Whom to credit under the license of the data.")
    preferences: str | None = option(None, "Who labeled the preferences, in words for the card.")
    seed: int = option(1, "Seed of every stage, and of the data that the recipe makes.")
    dataset_name: str | None = option(None, "Data set on the Hub, or a file or folder; a stage may name its own.")
    dataset_revision: str | None = option(None, "Commit, branch or tag of dataset_name.")
    corpus: str | None = option(
        None, "module:attribute of a function that makes the data, from dataset_name if that is set."
    )
    corpus_args: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of `corpus`."})
    tokenizer: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "For a model with random weights: vocab_size of the tokenizer, which learns from SFT's texts."
        },
    )
    architecture: dict[str, Any] | None = field(
        default=None, metadata={"help": "For a model with random weights: keys of its transformers configuration."}
    )
    conversational: bool = option(False, "Whether texts are conversations, rendered by the chat template.")
    system_prompt: str | None = option(None, "System prompt of conversations that have none.")
    chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Further arguments of the chat template."}
    )
    strip_thoughts: bool = option(False, "Whether rewards and judges read answers without their <think> parts.")
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def chat(self) -> ChatSettings:
        """The settings by which conversations are rendered and answers are read."""
        return ChatSettings(self.system_prompt, self.chat_template_kwargs, self.strip_thoughts)


@dataclass(frozen=True)
class SFTArguments(DataArguments):
    """SFT's own keys: the texts that it learns from, and sharding."""

    dataset_config: str | None = option("lines", "Configuration of the data set.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str | None = option("validation", "Split to evaluate on.")
    fsdp2: bool = option(False, "Shard the model over the processes (docs/scale.md).")


@dataclass(frozen=True)
class RewardArguments(DataArguments):
    """The reward stage's own keys: its pairs, the samples that center and scale its scores, and sharding."""

    dataset_config: str | None = option("preferences", "Configuration of the data set.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str | None = option("test", "Split that accuracy is measured on.")
    dataset_validation_split: str | None = option(None, "Split to evaluate on during training.")
    simulated_pairs: int | None = option(
        None, "Number of training pairs to make: samples of the SFT model, labeled by `preference`."
    )
    simulated_test_pairs: int = option(500, "Number of pairs to make for the test split, if simulated_pairs is set.")
    pairs_seed: int | None = option(None, "Seed of simulated pairs; None takes the trainer's seed.")
    preference: str | None = option(
        None, "module:attribute of a function (text_a, text_b, rng) that returns 0 or 1, the index of the better text."
    )
    judge_share: float | None = option(
        None, "Share of the training prompts that is kept from the reward model, for the judge same-labels."
    )
    score_samples: int = option(
        512, "Number of SFT's samples that determine the mean and standard deviation of the scores."
    )
    fsdp2: bool = option(False, "Shard the model over the processes (docs/scale.md).")

    @property
    def evaluated_split(self) -> str | None:
        """The split that is evaluated during training."""
        return self.dataset_validation_split


@dataclass(frozen=True)
class PPOArguments(DataArguments):
    """PPO's own keys: its prompts, its rewards, and the model that the critic starts from."""

    dataset_config: str | None = option("prompts", "Configuration of the data set.")
    dataset_train_split: str = option("train", "Split with the training prompts.")
    dataset_test_split: str | None = option("validation", "Split to evaluate on.")
    reward_model_path: str | list[str] | None = field(
        default="reward",
        metadata={"help": "A path, a Hub id, or 'reward' for this recipe's own; several as a list (docs/rewards.md)."},
    )
    reward_model_loader: str | None = option(
        None, "module:attribute of a class or function that loads a reward model other than a classifier."
    )
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Reward functions as module:attribute or entry-point names."}
    )
    value_model_name_or_path: str | None = option(None, "Model that the critic starts from; None lets `critic` decide.")
    pad_token: str | None = option(
        None, "PAD token for a policy without an SFT stage whose tokenizer has no PAD token other than EOS."
    )
    ptx_dataset_config: str | None = option("lines", "Configuration with the texts of the pretraining loss (ptx_coef).")
    ptx_dataset_split: str = option("train", "Split with the texts of the pretraining loss (ptx_coef).")


@dataclass(frozen=True)
class StageSettings:
    """A stage's keys, checked and typed.

    Attributes:
        stage: Name of the stage.
        recipe: The keys of recipe.yaml.
        data: The stage's own keys (`SFTArguments`, `RewardArguments` or `PPOArguments`).
        trainer: The trainer's keys, a TrainingArguments.
        model: trl's ModelConfig.
        release: The keys that decide what is published.
        save_total_limit: The key of this name. The trainer does not get it, because it would delete unsent checkpoints.
        resolved: The keys that the recipe and flags set, except those that may differ when a run is resumed, and under
            "recipe" the keys of recipe.yaml. They are recorded, and their fingerprint identifies the run's settings.
    """

    stage: str
    recipe: RecipeConfig
    data: Any
    trainer: Any
    model: Any
    release: ReleaseArguments
    save_total_limit: int | None
    resolved: Mapping[str, Any]


def _dataclasses(stage: str) -> tuple[Any, ...]:
    from trl import ModelConfig

    load = STAGES[stage].load
    return load("arguments"), load("trainer"), ModelConfig, load("release")


def import_dataclasses() -> None:
    """Imports the dataclasses of all stages. Among them are trl's, whose import takes a second or more."""
    for stage in STAGES:
        _dataclasses(stage)


#: Keys of `StageSettings.resolved` and of run.json's `resolved` that are not keys of the stage.
NON_STAGE_KEYS = ("recipe", "ppo", "evaluation", "data", "parents")


def stage_keys(stage: str) -> dict[str, tuple[Any, Any, str]]:
    """Returns every key that a stage accepts.

    Args:
        stage: Name of the stage.

    Returns:
        Name -> (type, default, help).
    """
    excluded_names = refused_keys(stage).union(RUN_KEYS)
    entries = (entry for data_class in _dataclasses(stage) for entry in _keys_of(data_class).items())
    return {name: key for name, key in entries if name not in excluded_names}


def _keys_of(data_class: type) -> dict[str, tuple[Any, Any, str]]:
    """Returns the fields that a dataclass's constructor takes: name -> (type, default, help).

    The default is None if a default_factory makes it.
    """
    hints = type_hints(data_class)
    return {
        entry.name: (
            hints[entry.name],
            None if entry.default is dataclasses.MISSING else entry.default,
            entry.metadata.get("help", ""),
        )
        for entry in dataclasses.fields(data_class)
        if entry.init
    }


def recipe_config(recipe: Recipe, flags: Mapping[str, Any] | None = None) -> RecipeConfig:
    """Checks and converts the keys of recipe.yaml and the flags that override them.

    Args:
        recipe: The recipe.
        flags: Key of recipe.yaml -> value of its flag.

    Raises:
        ZooError: A key is unknown, missing or of the wrong type, or a download may not set it.
    """
    shared = dict(recipe.shared)
    source = str(recipe.yaml_file("recipe"))
    evaluation = shared.pop("evaluation", None) or {}
    if not isinstance(evaluation, dict):
        raise ZooError(f"evaluation in {source} is not a mapping: write its keys under it, indented.")
    check_download(recipe, "recipe", shared, flags or {})
    check_download(recipe, "evaluation", evaluation, {key.partition(".")[2]: None for key in flags or {}})
    hints, nested_hints = _recipe_hints()
    values = convert_keys(shared, hints, source, subject="recipe.yaml")
    values |= convert_keys({f"evaluation.{name}": value for name, value in evaluation.items()}, nested_hints, source)
    values |= _recipe_flags(flags or {})
    if "description" not in values:
        raise ZooError(f"{source} has no description: describe in one line what the recipe trains.")
    evaluation_config = EvaluationConfig(
        **{name.removeprefix("evaluation."): value for name, value in values.items() if name in nested_hints}
    )
    # These properties check their keys. Read them now, before anything is trained.
    _ = (
        evaluation_config.llm_settings,
        evaluation_config.labeled_arguments,
        evaluation_config.own_pairs_arguments,
        evaluation_config.reference_arguments,
    )
    shared_values = {name: value for name, value in values.items() if name in hints}
    config = RecipeConfig(**shared_values, evaluation=evaluation_config)
    _ = config.chat
    return config


def _recipe_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Checks and converts the flags of recipe.yaml's keys."""
    hints, nested_hints = _recipe_hints()
    all_hints = {**hints, **nested_hints}
    for name in flags:
        if name not in all_hints and name not in ("env", *RUN_KEYS):
            raise ZooError(f"--{name} is not a key of recipe.yaml{_suggest_flag(name, all_hints)}")
    return convert_keys(flags, all_hints, "the command's flags", flag="--")


def _recipe_hints() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the types of recipe.yaml's keys, and of those under `evaluation`."""
    hints = {name: hint for name, hint in type_hints(RecipeConfig).items() if name != "evaluation"}
    return hints, {f"evaluation.{name}": hint for name, hint in type_hints(EvaluationConfig).items()}


def _suggest_flag(name: str, hints: Mapping[str, Any]) -> str:
    """Returns the end of the message about an unknown flag without `STAGE.`: what to write instead."""
    flags = {key: key for key in hints}  # flag -> key without its prefix
    for stage in STAGES:
        flags |= {f"{stage}.{key}": key for key in declared_keys(stage)}
    flags |= {key: key.partition(".")[2] for key in hints if key.startswith("evaluation.")}
    if matches := [f"--{flag}" for flag, key in flags.items() if key == SYNONYMS.get(name, name)]:
        return f": write {' or '.join(matches)}."
    suggestion = did_you_mean(name, {*flags, *flags.values()})
    return suggestion or ": `rlhf-zoo recipes keys recipe` lists them, and a stage's key is written --STAGE.KEY."


def stage_settings(
    recipe: Recipe, stage: str, flags: Mapping[str, Any], *, shared_flags: Mapping[str, Any], output_dir: Path
) -> StageSettings:
    """Checks and converts a stage's keys: those of its YAML file, overridden by flags.

    Args:
        recipe: The recipe.
        stage: Name of the stage.
        flags: Key of the stage -> value of its flag.
        shared_flags: Key of recipe.yaml -> value of its flag.
        output_dir: The folder that the trainer writes to.

    Raises:
        ZooError: The recipe has no such stage, a key is unknown or has the wrong type, or keys do not work together.
    """
    if stage not in recipe.stages:
        raise ZooError(f"The recipe {recipe.name} has no {stage}.yaml, so it has no stage {stage!r}.")
    shared = recipe_config(recipe, shared_flags)
    apply_environment()
    keys = stage_keys(stage)
    hints = {name: hint for name, (hint, _, _) in keys.items()}
    defaults = {name: default for name, (_, default, _) in keys.items()}
    stage_text, refused_names = f"the stage {stage}", refused_keys(stage)
    check_download(recipe, stage, recipe.stages[stage], flags)
    file = str(recipe.yaml_file(stage))
    resolved = convert_keys(recipe.stages[stage], hints, file, subject=stage_text, refused_names=refused_names)
    resolved = effective_keys(recipe, stage, resolved)
    resolved |= convert_keys(
        flags, hints, "the command's flags", subject=stage_text, refused_names=refused_names, flag=f"--{stage}."
    )
    resolved |= {key: unpack_if_gguf(resolved[key]) for key in _GGUF_KEYS if resolved.get(key) is not None}
    resolved.setdefault("seed", shared.seed)
    if "report_to" in resolved and resolved["report_to"] is None:
        resolved["report_to"] = "none"  # the trainer's own value for "no reporting"
    # The description and the evaluation do not affect what a stage learns, so its fingerprint leaves them out.
    recipe_keys_in_fingerprint = dataclasses.asdict(shared)
    del recipe_keys_in_fingerprint["description"], recipe_keys_in_fingerprint["evaluation"]
    arguments = {name: value for name, value in resolved.items() if name != "save_total_limit"}
    for name in arguments:  # torch's Adam refuses an integer β; *_steps of 1 or more must stay integers
        if hints[name] is float and not name.endswith("_steps"):
            arguments[name] = float(arguments[name])
    arguments |= {"output_dir": str(output_dir), "disable_tqdm": True}
    arguments.setdefault("log_level_replica", "passive")  # all processes use the log level of the main process
    if arguments.get("bf16", defaults["bf16"]) is None and not arguments.get("use_cpu"):
        from ...modeling.devices import has_bfloat16

        arguments["bf16"] = has_bfloat16()  # trl reads None as true, and would refuse to train without a GPU
    arguments |= share_of_batch(defaults | arguments, stage)
    try:
        data, trainer, model, release = (
            data_class(**{name: value for name, value in arguments.items() if name in type_hints(data_class)})
            for data_class in _dataclasses(stage)
        )
    except (ValueError, TypeError, ImportError) as error:
        raise ZooError(
            f"The settings of the stage {stage} of {recipe.name} do not work: {first_line(error)}."
        ) from error
    _check_trainer(trainer, stage)
    check_model(model, stage, critic=getattr(trainer, "critic", None), is_sharded=bool(arguments.get("fsdp2")))
    check_combinations(stage, data, trainer, model, release)
    limit = resolved.get("save_total_limit")
    resolved["recipe"] = recipe_keys_in_fingerprint
    # A run may be resumed with other values of these keys, so its fingerprint leaves them out.
    for name in ("fsdp2", "offload_frozen", "reward_timeout"):
        resolved.pop(name, None)
    return StageSettings(stage, shared, data, trainer, model, release, limit, resolved)


def check_combinations(stage: str, data: Any, trainer: Any, model: Any, release: Any) -> None:
    """Checks that the keys of a stage work together.

    Args:
        stage: Name of the stage.
        data: The stage's own keys.
        trainer: The trainer's keys.
        model: trl's ModelConfig.
        release: The keys that decide what is published.

    Raises:
        ZooError: Two keys contradict each other, or one needs another.
    """
    if getattr(data, "fsdp2", False):
        from transformers.training_args import OptimizerNames

        if trainer.load_best_model_at_end:
            raise ZooError(
                f"load_best_model_at_end of the stage {stage} loads unsharded weights, unlike fsdp2: remove it."
            )
        check_can_shard(trainer.world_size, OptimizerNames(trainer.optim).value)
    check_release_rule(stage, release, trainer, evaluated_split=data.evaluated_split)
    if (
        trainer.eval_strategy != "no"
        and data.evaluated_split is None
        and (stage == "reward" or not data.held_out_share)
    ):
        split_keys = "dataset_validation_split" if stage == "reward" else "dataset_test_split or held_out_share"
        raise ZooError(
            f"eval_strategy of the stage {stage} is {trainer.eval_strategy.value}, but nothing is held out to evaluate "
            f"on: set {split_keys}, or eval_strategy to no."
        )
    if release.push_merged and not model.use_peft:
        raise ZooError(
            f"push_merged of the stage {stage} needs use_peft: without LoRA, the checkpoint is the complete model."
        )


def recorded_settings(settings: Mapping[str, Any], stage: str, names: Sequence[str], *, where: str) -> dict[str, Any]:
    """Returns some of a stage's keys as a run recorded them, with defaults for keys that the run did not set.

    Args:
        settings: Settings of run.json, or of a published recipe.json, which is not trusted. Only `names` are read.
        stage: Name of the stage.
        names: The keys to return.
        where: The source of the settings, for messages.

    Returns:
        Name -> typed value.

    Raises:
        ZooError: A value has the wrong type.
    """
    declarations = declared_keys(stage)
    values = {name: settings[name] for name in names if name in settings}
    hints = {name: declarations[name].type_hint for name in names}
    if None in hints.values():  # this type needs trl or transformers, whose import takes seconds
        hints = {name: stage_keys(stage)[name][0] for name in names}
    values = convert_keys(values, hints, where, subject=f"the stage {stage}")
    return {name: declarations[name].default for name in names} | values


def _check_trainer(trainer: Any, stage: str) -> None:
    """Raises ZooError for values that TrainingArguments accepts but that would make training fail."""
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    if trainer.max_steps == 0:
        raise ZooError(f"max_steps of the stage {stage} is 0: set at least 1, or -1 to use num_train_epochs.")
    if trainer.num_train_epochs <= 0 and trainer.max_steps <= 0:
        raise ZooError(
            f"num_train_epochs of the stage {stage} is {trainer.num_train_epochs} and max_steps is not set: make "
            "one of them positive."
        )
    try:
        get_reporting_integration_callbacks(trainer.report_to)
    except (ValueError, RuntimeError, ImportError) as error:
        raise ZooError(f"report_to of the stage {stage} does not work: {first_line(error)}.") from error


def parse_flags(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parses flags `--key value`, `--key=value` and bare `--key` (true), and groups them by stage.

    Args:
        arguments: The words of the command line.

    Returns:
        Stage -> key -> value. The stage '' has the keys that were written without `STAGE.`.

    Raises:
        ZooError: A word belongs to no flag, or a flag is set twice.
    """
    flags: dict[str, dict[str, Any]] = {stage: {} for stage in ("", *STAGES)}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ZooError(f"{word!r} belongs to no flag: write --key value.")
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("--"):
            values.append(words.pop(0))
        stage, dot, stage_key = name.partition(".")
        group, key = (stage, stage_key) if dot and stage in STAGES else ("", name)
        key = key.replace("-", "_")
        if key in flags[group]:
            raise ZooError(f"--{name} is set twice: keep one.")
        flags[group][key] = True if not values else values[0] if len(values) == 1 else values
    return flags


def recipe_keys() -> dict[str, tuple[Any, Any, str]]:
    """Returns recipe.yaml's keys: name -> (type, default, help). A key under `evaluation:` is named evaluation.KEY."""
    keys = {name: key for name, key in _keys_of(RecipeConfig).items() if name != "evaluation"}
    return keys | {f"evaluation.{name}": key for name, key in _keys_of(EvaluationConfig).items()}
