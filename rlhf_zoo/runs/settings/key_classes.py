"""Decides what a downloaded recipe may set: every key is classified here, and an unclassified key is refused.

A published recipe.json holds keys of a stage and of recipe.yaml. transformers, trl and accelerate read some of them as
paths, addresses, or names of code or kernels. If a new version adds a key, `tests/unit/test_payloads.py` fails until
the key is classified.
"""

import logging
import os
import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import hub_id
from ...hub.client.downloads import RECIPE_MARK
from ...hub.client.links import find_outward_link, is_inside
from ...plugins import CORPORA, PREFERENCES, REWARDS
from ..recipe import Recipe
from ..registry import LORA, QUANTIZATION, is_ensemble_member
from ..trusted_names import LOADERS, holds_only_numbers, may_import, may_use_judge

log = logging.getLogger(__name__)


class Kind(Enum):
    """What a key may hold in a download.

    Attributes:
        PLAIN: A number, a boolean, one of a few words, or a text that is only compared or shown.
        NUMBERS: A mapping of numbers and booleans.
        WORDS: A mapping of numbers, booleans and single words.
        REVISION: A revision of a repository.
        REPOSITORY: The id of a repository, never a path.
        OBJECT: The name of a Python object that `trusted_names` accepts or the user allowed.
        NESTED: A mapping of settings, which are classified one by one.
        MACHINE: A setting of the author's machine or account, on which no training depends. A stage ignores it.
        REFUSED: Nothing: the key reads files, downloads code or contacts a host.
    """

    PLAIN = "plain"
    NUMBERS = "numbers"
    WORDS = "words"
    REVISION = "revision"
    REPOSITORY = "repository"
    OBJECT = "object"
    NESTED = "nested"
    MACHINE = "machine"
    REFUSED = "refused"


def _kind_by_key(kinds: Mapping[Kind, str]) -> dict[str, Kind]:
    return {name: kind for kind, names in kinds.items() for name in names.split()}


#: Keys of sft.yaml, reward.yaml and ppo.yaml.
STAGE_KEYS: Mapping[str, Kind] = _kind_by_key(
    {
        Kind.PLAIN: " ".join((*QUANTIZATION, *LORA))
        + """
        dataset_config dataset_train_split dataset_test_split dataset_validation_split ptx_dataset_config
        ptx_dataset_split held_out_share max_prompt_length simulated_pairs simulated_test_pairs pairs_seed judge_share
        score_samples columns keep_above dataset_text_field shuffle_dataset fsdp2
        per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps eval_accumulation_steps
        num_train_epochs max_steps total_episodes learning_rate critic_learning_rate
        lr_scheduler_type warmup_steps optim optim_args optim_target_modules weight_decay adam_beta1 adam_beta2
        adam_epsilon max_grad_norm label_smoothing_factor average_tokens_across_devices neftune_noise_alpha
        router_aux_loss_coef center_rewards_coefficient disable_dropout loss_type completion_only_loss
        assistant_only_loss max_length truncation_mode packing packing_strategy eval_packing padding_free
        pad_to_multiple_of eos_token pad_token
        bf16 fp16 bf16_full_eval fp16_full_eval tf32 use_cpu dtype activation_checkpointing gradient_checkpointing
        activation_offloading torch_compile torch_compile_mode use_liger_kernel use_cache torch_empty_cache_steps
        full_determinism seed data_seed
        logging_strategy logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen
        eval_strategy eval_steps eval_delay eval_on_start prediction_loss_only eval_do_concat_batches
        eval_use_gather_object include_for_metrics batch_eval_metrics
        save_strategy save_steps save_total_limit save_only_model load_best_model_at_end metric_for_best_model
        greater_is_better ignore_data_skip release push_optimizer push_merged push_steps push_dtype push_critic
        save_optimizer_limit
        dataloader_drop_last remove_unused_columns label_names train_sampling_strategy length_column_name
        num_ppo_epochs num_mini_batches num_generations response_length response_length_min truncate_text truncate_after
        skip_equal_scores temperature stop_token stop_token_id score_centering score_scaling score_clip
        missing_eos_penalty missing_eos_score reward_label reward_output reward_pad_token reward_ensemble
        reward_ensemble_lambda reward_weights reward_timeout
        kl_coef reference kl_in kl_estimator kl_target kl_horizon action_level gamma lam whiten_rewards
        whiten_advantages cliprange cliprange_high cliprange_sequence dual_clip cliprange_value vf_coef entropy_coef
        ptx_coef loss_aggregation early_stop_kl critic critic_warmup_updates critic_lora merge_adapter ref_load_in_8bit
        offload_frozen model_adapter_name ref_adapter_name rollout_engine rollout_graphs max_rollout_batch_tokens
        importance_sampling_cap vllm_mode vllm_gpu_memory_utilization vllm_enable_sleep_mode vllm_enforce_eager
        recompute_logprobs
        local_rollout_forward_batch_size max_tokens_per_micro_batch log_completions num_completions_to_print
        num_sample_generations
        """,
        Kind.NUMBERS: """
        activation_checkpointing_kwargs gradient_checkpointing_kwargs liger_kernel_config dataset_kwargs
        """,
        Kind.WORDS: "lr_scheduler_kwargs",
        Kind.REVISION: "dataset_revision model_revision",
        Kind.REPOSITORY: "dataset_name model_name_or_path reward_model_path value_model_name_or_path",
        Kind.OBJECT: "preference reward_funcs reward_model_loader",
        Kind.MACHINE: """
        report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id hub_private_repo
        hub_revision resume_from_checkpoint log_level log_level_replica log_on_each_node trust_remote_code local_rank
        do_train do_eval do_predict attn_implementation dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
        dataset_num_proc ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
        ddp_timeout debug skip_memory_metrics enable_jit_checkpoint restore_callback_states_from_checkpoint
        save_on_each_node
        """,
        Kind.REFUSED: """
        accelerator_config chat_template_path deepspeed fsdp fsdp_config model_init_kwargs parallelism_config
        torch_compile_backend vllm_server_base_url
        """,
    }
)
#: Keys of recipe.yaml. `EVALUATION_KEYS` has the keys under `evaluation`.
SHARED_KEYS: Mapping[str, Kind] = _kind_by_key(
    {
        Kind.PLAIN: """
        description license language simulated attribution preferences seed conversational system_prompt
        chat_template_kwargs strip_thoughts
        """,
        Kind.NUMBERS: "corpus_args tokenizer",
        Kind.REVISION: "dataset_revision",
        Kind.REPOSITORY: "dataset_name",
        Kind.OBJECT: "corpus",
        Kind.NESTED: "architecture evaluation",
    }
)
#: Keys of `evaluation` in recipe.yaml. Unlike a stage's, its MACHINE keys take effect in a downloaded recipe, so
#: `check_download` checks those that name judges, tasks, data sets or files.
EVALUATION_KEYS: Mapping[str, Kind] = _kind_by_key(
    {
        Kind.PLAIN: "dataset_test_split",
        Kind.MACHINE: """
        prompts samples judge judge_name judge_description lexicon checkpoint_prompts checkpoint_samples
        filter_samples group judges llm labeled own_pairs reference lm_eval lm_eval_limit lm_eval_fewshot
        """,
    }
)

#: Key of the kind OBJECT -> the group of entry points in which its name is looked up.
GROUPS: Mapping[str, str] = {
    "corpus": CORPORA, "preference": PREFERENCES, "reward_funcs": REWARDS, "reward_model_loader": LOADERS
}  # fmt: skip
#: Keys under `evaluation` that name a data set. A path is first looked up next to recipe.yaml.
_EVALUATION_DATA_KEYS = ("labeled", "own_pairs")
#: Kinds of judges whose argument is a model or a data set.
_JUDGE_KINDS_WITH_SOURCE = ("reward", "votes")
# Name of a registered task of lm-evaluation-harness. Any other text may be the path of a file, which can name code.
_TASK_NAME = re.compile(r"[\w-]+", re.ASCII)
_WORD = re.compile(r"[\w.+-]{0,64}", re.ASCII)
_REVISION = re.compile(r"[\w][\w./+-]{0,255}", re.ASCII)
# Fields of a model's configuration that may make transformers download code.
_CODE_FIELD = re.compile(r"^_|auto_map|implementation|quantization|kernel|remote_code|backbone|pretrained|custom")


def machine_keys() -> tuple[str, ...]:
    """Returns the stage keys that are ignored in a downloaded recipe."""
    return tuple(name for name, kind in STAGE_KEYS.items() if kind is Kind.MACHINE)


def without_machine_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Drops settings of the author's machine or account from the keys of a stage.

    Args:
        keys: Key -> value.
    """
    return {name: value for name, value in keys.items() if STAGE_KEYS.get(name) is not Kind.MACHINE}


def effective_keys(recipe: Recipe, stage: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a recipe's stage that take effect.

    A download's keys for its author's machine or account have no effect, because they could send the user's runs to the
    author's account or Space. The user's flags and the defaults apply instead.

    Args:
        recipe: The recipe.
        stage: Name of a stage.
        keys: The keys that the recipe sets for the stage.

    Returns:
        The keys that take effect. A warning names the ignored keys.
    """
    if recipe.download_mark is None:
        return dict(keys)
    remaining_keys = without_machine_keys(keys)
    ignored_names = tuple(sorted(name for name in keys.keys() - remaining_keys.keys() if keys[name] is not None))
    if ignored_names:
        _warn_of_ignored_keys(recipe.yaml_file(stage), stage, ignored_names)
    return remaining_keys


@cache
def _warn_of_ignored_keys(file: Path, stage: str, names: tuple[str, ...]) -> None:
    subject = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
    fix = f"configure your own machine and account by flags such as --{stage}.{names[0]}"
    log.warning("%s was downloaded, so its %s ignored: %s.", file, subject, fix)


def check_key(name: str, value: Any, kinds: Mapping[str, Kind], *, where: str) -> None:
    """Checks that a download may set a key to a value, by the key's kind.

    The caller checks keys of the kinds REPOSITORY and OBJECT, because only the caller knows the repository and which
    names the user allowed. Keys of the kind NESTED have separate checks.

    Args:
        name: A key of a stage or of recipe.yaml.
        value: The key's value.
        kinds: Key -> kind, such as `STAGE_KEYS`.
        where: The source of the settings, for messages.

    Raises:
        ZooError: The key is refused or not classified, or its kind does not allow the value.
    """
    kind = kinds.get(name)
    if kind is None:
        raise ZooError(
            f"{where} sets {name}, which is not on the list of keys that a downloaded recipe may set: copy the "
            "settings that you trust into your own recipe."
        )
    if kind is Kind.REFUSED and value:
        raise ZooError(
            f"{where} sets {name}, which may read files or load code and is not allowed in a downloaded recipe: copy "
            "the settings that you trust into your own recipe."
        )
    is_allowed = {Kind.NUMBERS: holds_only_numbers, Kind.WORDS: _holds_numbers_and_words}.get(kind)
    if is_allowed is not None and value is not None and not (isinstance(value, Mapping) and is_allowed(value)):
        raise ZooError(
            f"{where} sets {name} to something other than {'numbers and words' if kind is Kind.WORDS else 'numbers'}, "
            "which a downloaded recipe may not do: copy the settings that you trust into your own recipe."
        )
    if kind is Kind.REVISION and value is not None and not is_revision(value):
        raise ZooError(
            f"{where} sets {name} to {value!r}, which is not a branch, tag or commit: set one in your own copy."
        )


def check_download(recipe: Recipe, file: str, keys: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Checks that a downloaded recipe sets only what a download may set. Other recipes pass.

    Args:
        recipe: The recipe.
        file: "recipe", "evaluation" for the keys under `evaluation`, or a stage.
        keys: Key -> value that the file sets.
        flags: Key -> value of its flag. Such keys are not checked, because their values come from the user.

    Raises:
        ZooError: The recipe names code, sets a judge that imports code or costs money, sets a key that a download may
            not set, or names a model, data set or file that is on this machine but not in the recipe's folder.
    """
    if recipe.download_mark is None:
        return
    is_copy = recipe.download_mark.name == RECIPE_MARK
    mark = recipe.download_mark if is_copy else f"{RECIPE_MARK} from a copy that `rlhf-zoo recipes copy` makes"
    where = f"{recipe.yaml_file('recipe' if file == 'evaluation' else file)}, which was downloaded,"
    fix = f"read the recipe, and remove {mark} if you trust it"
    kinds = {"recipe": SHARED_KEYS, "evaluation": EVALUATION_KEYS}.get(file, STAGE_KEYS)
    for key, value in keys.items():
        if value is None or key in flags or key not in kinds:  # unknown keys are reported later, all together
            continue
        kind = kinds[key]
        names = [str(item) for item in (value if isinstance(value, list) else [value])]
        if kind is Kind.OBJECT:
            forbidden_names = [name for name in names if not may_import(name, GROUPS[key])]
        elif file == "evaluation":
            judges = [name for name in names if not may_use_judge(name)] if key in ("judge", "judges") else []
            tasks = names if key == "lm_eval" else []
            tasks = [name for name in tasks if not _TASK_NAME.fullmatch(name) or Path(name).exists()]
            forbidden_names = judges or tasks
        else:
            forbidden_names = names if kind is Kind.REFUSED and value else []
        if forbidden_names:
            raise ZooError(f"{where} sets {key}: {forbidden_names[0]}, which may load code or cost money: {fix}.")
        for name in _named_sources(recipe, file, key, value):
            if not _may_name_source(recipe, key, name):
                key_path = f"{key} under evaluation" if file == "evaluation" else key
                raise ZooError(
                    f"{where} sets {key_path}: {name!r:.200}, but it may only name repositories on the Hub and files "
                    f"in its own folder: {fix}."
                )
        if key == "architecture":
            check_architecture(value, where=where)
        elif kind in (Kind.NUMBERS, Kind.WORDS, Kind.REVISION) and file != "evaluation":
            check_key(key, value, kinds, where=where)


def _named_sources(recipe: Recipe, file: str, key: str, value: Any) -> list[Any]:
    """Returns the models, data sets and files that a key names, except models that the recipe's own stages train."""
    if file == "evaluation":
        if key in _EVALUATION_DATA_KEYS:
            name = value.get("dataset_name") if isinstance(value, Mapping) else value
            return [] if name is None else [name]
        if key in ("judge", "judges"):
            judges = [str(name).partition(":") for name in (value if isinstance(value, list) else [value])]
            return [source for judge_kind, _, source in judges if judge_kind in _JUDGE_KINDS_WITH_SOURCE]
        return [value] if key == "lexicon" else []
    kinds = SHARED_KEYS if file == "recipe" else STAGE_KEYS
    if kinds.get(key) is not Kind.REPOSITORY:
        return []
    names = value if isinstance(value, list) else [value]
    if file != "ppo" or key == "dataset_name":
        return names
    return [
        name for name in names if not (isinstance(name, str) and (name in recipe.stages or is_ensemble_member(name)))
    ]


def _may_name_source(recipe: Recipe, key: str, name: Any) -> bool:
    """Whether a downloaded recipe may name a model, data set or file. A local file takes precedence over the Hub."""
    if not isinstance(name, str):
        return False
    model = name.rpartition("#")[0] or name  # a judge's argument may be MODEL#LABEL
    repo = model.partition("@")[0]
    paths = [Path(name), Path(model), Path(repo)]
    if key in _EVALUATION_DATA_KEYS:
        paths.insert(0, recipe.folder / name)
    folders = [folder for folder in (recipe.folder, recipe.base) if folder is not None]
    existing_paths = [path for path in paths if os.path.lexists(path)]
    if not existing_paths:
        return hub_id(repo) is not None
    return all(
        any(is_inside(path, folder) for folder in folders) and find_outward_link(path, include_hidden=True) is None
        for path in existing_paths
    )


def check_repository(name: Any, *, key: str, where: str) -> None:
    """Checks that downloaded settings name a model or data set by its id on the Hub, not by a local path.

    Args:
        name: The name, which may end in @REVISION.
        key: The key that holds the name.
        where: The source of the settings, for messages.

    Raises:
        ZooError: The name is not the id of a repository, or a local file has this name and would be read instead.
    """
    repo = name.partition("@")[0] if isinstance(name, str) else name
    if hub_id(repo) is None:
        raise ZooError(
            f"{where} sets {key} to {name!r:.200}, a path on the machine that published it: what was published "
            "is not enough to reproduce it."
        )
    if os.path.lexists(repo) or os.path.lexists(name):
        raise ZooError(
            f"{where} sets {key} to {name}, and a local folder has the same name: run the command in another directory."
        )


def is_revision(value: Any) -> bool:
    """Whether a value may be a branch, tag or commit. It then cannot lead out of a cache's folder.

    Args:
        value: A downloaded value of any type.
    """
    return isinstance(value, str) and _REVISION.fullmatch(value) is not None and ".." not in value


def check_architecture(fields: Any, *, where: str) -> None:
    """Checks that a downloaded model configuration does not make transformers download code.

    Args:
        fields: The value of `architecture` in recipe.yaml.
        where: The source of the fields, for messages.

    Raises:
        ZooError: The name of a field suggests that it loads code, or a field with more than numbers is unknown to the
            family's configuration or holds a text that is not a single word.
    """
    if not isinstance(fields, Mapping):
        return
    word_fields = _word_fields(fields.get("model_type"))
    for name, value in fields.items():
        harmful_key = _harmful_key(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)  # such as conv_kernel: 4
        is_harmless = holds_only_numbers(value) or (name in word_fields and harmful_key is None)
        if is_number or (is_harmless and not _CODE_FIELD.search(name)):
            continue
        path = f"{name}.{harmful_key}" if harmful_key else name
        raise ZooError(f"{where} sets architecture.{path}, which may load code: remove it in your own copy.")


def _harmful_key(value: Any) -> str | None:
    """Returns the first harmful key of a mapping, "" if the value itself is harmful, and None if it is harmless."""
    if isinstance(value, Mapping):
        return next((str(key) for key, item in value.items() if not _holds_numbers_and_words({key: item})), None)
    return None if _holds_numbers_and_words(value) else ""


def _word_fields(family: Any) -> frozenset[str]:
    """Returns the fields of a family's configuration that may hold words: only model_type if the family is unknown."""
    from transformers import CONFIG_MAPPING

    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        return frozenset({"model_type"})
    configuration: Any = CONFIG_MAPPING[family]
    return frozenset({"model_type", *configuration.__dataclass_fields__, *(configuration.attribute_map or ())})


def _holds_numbers_and_words(value: Any) -> bool:
    """Whether a value holds only numbers and single words, and no key that may make transformers download code."""
    if isinstance(value, Mapping):
        has_safe_keys = all(
            isinstance(key, str) and _WORD.fullmatch(key) and not _CODE_FIELD.search(key) for key in value
        )
        return has_safe_keys and all(map(_holds_numbers_and_words, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_holds_numbers_and_words, value))
    return _WORD.fullmatch(value) is not None if isinstance(value, str) else holds_only_numbers(value)
