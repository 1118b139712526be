"""Checks, before the first stage trains, the models that a recipe names: code, labels, tokenizers and lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.refusals import reason
from ...modeling.chat import tokenize_prompt
from ...modeling.chat_template import Prompt
from ...modeling.gguf import check_no_gguf, find_gguf
from ...modeling.loading import load_tokenizer
from ...modeling.model_files import find_model_files, read_json_object
from ...modeling.models import label_index, labels_of
from ...modeling.remote_code import is_code_trusted, needs_remote_code, untrusted_message
from ...modeling.special_tokens import ensure_own_pad, highest_id, train_tokenizer
from ...modeling.text_ids import switch_off_eos
from ...rewards.model import warn_truncated
from ..context import RunContext, stages_to_train
from ..data.cut_rows import CutRows, count_cut_rows
from ..data.layout import drop_long_prompts, has_conversations
from ..dataset import own_pairs_keys, text_column_of
from ..parents import reward_roles
from ..recipe import Recipe
from ..registry import REWARD_ROLES, STAGES, is_ensemble_member
from ..settings.parse import RecipeConfig, StageSettings
from .files import fetch_files
from .splits import local_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class NamedModel:
    """A model that a key of a recipe names.

    Attributes:
        key: The key, for messages.
        name: The value of the key: a folder or a Hub id.
        folder: A folder with the model's files, except perhaps its weights; None if the files cannot be loaded.
        problem: Why the files cannot be loaded; None if they can.
    """

    key: str
    name: str
    folder: Path | None
    problem: str | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json; {} if it has none."""
        path = None if self.folder is None else self.folder / "config.json"
        return read_json_object(path) if path is not None and path.is_file() else {}

    @property
    def context_length(self) -> int | None:
        """The model's context length in tokens; None if its configuration does not state it."""
        return context_length_of(self.config)


def context_length_of(config: Mapping[str, Any]) -> int | None:
    """Returns the context length that a model's configuration states, in tokens.

    Args:
        config: Content of config.json, or `architecture` of recipe.yaml.

    Returns:
        The number of tokens; None if the configuration does not state it.
    """
    text_config = config.get("text_config") or config
    lengths = [text_config.get(name) for name in ("max_position_embeddings", "n_positions")]
    return next((length for length in lengths if isinstance(length, int)), None)


def named_models(
    stages: Mapping[str, StageSettings], hub: Hub = DEFAULT_HUB, *, allow_missing: bool = False
) -> dict[str, NamedModel]:
    """Finds the models that stages name and that no stage of the recipe produces.

    Args:
        stages: Stage -> settings.
        hub: Where Hub ids are looked up.
        allow_missing: Whether to return a model that cannot be loaded without its files, instead of raising.

    Returns:
        {role: model}. The roles are policy (the model that PPO names, otherwise SFT's base model), reward, reward_2 and
        so on, and value.

    Raises:
        ZooError: A model cannot be loaded, or a reward model is a GGUF file.
    """
    models = {}
    for role, (key, name, revision) in _external_models(stages).items():
        if role in REWARD_ROLES:
            check_no_gguf(name, key=key)
        try:
            models[role] = NamedModel(key, name, fetch_files(name, revision, hub, fix=_missing_model_fix(key)))
        except ZooError as error:
            if not allow_missing:
                raise
            models[role] = NamedModel(key, name, None, reason(error.__cause__ or error))
    return models


def _external_models(stages: Mapping[str, StageSettings]) -> dict[str, tuple[str, str, str | None]]:
    """Returns {role: (key, name, revision)} of the models named by stages that no stage produces."""
    models: dict[str, tuple[str, str, str | None]] = {}
    if "sft" in stages and stages["sft"].model.model_name_or_path is not None:
        model = stages["sft"].model
        models["policy"] = "model_name_or_path of the stage sft", model.model_name_or_path, model.model_revision
    if "ppo" in stages:
        settings = stages["ppo"]
        rewards = reward_roles(settings.data.reward_model_path)
        keys = {
            "policy": ("model_name_or_path", settings.model.model_name_or_path),
            **{role: ("reward_model_path", name) for role, name in rewards.items()},
            "value": ("value_model_name_or_path", settings.data.value_model_name_or_path),
        }
        for role, (key, name) in keys.items():
            if name is not None and name not in ("sft", "reward", "ppo") and not is_ensemble_member(name):
                repo, _, revision = (name, "", "") if Path(name).is_dir() else name.partition("@")
                models[role] = f"{key} of the stage ppo", repo, revision or None
    return models


def uses_hub(recipe: Recipe, shared: RecipeConfig, stages: Mapping[str, StageSettings]) -> bool:
    """Whether a recipe names a model or a data set that is neither a local folder nor a local file.

    Args:
        recipe: The recipe.
        shared: The recipe's keys in recipe.yaml.
        stages: Stage -> settings.
    """
    models = [name for _, name, _ in _external_models(stages).values()]
    data: list[Any] = [shared, shared.evaluation.labeled_arguments, *(settings.data for settings in stages.values())]
    if (pairs_keys := own_pairs_keys(recipe, shared)) is not None:
        data.append(pairs_keys)
    names = [*models, *(keys.dataset_name for keys in data)]
    return not all(Path(name).exists() for name in names if name is not None)


def _missing_model_fix(key: str) -> str:
    """Returns the end of the error message for a model that cannot be found: what to do about the key that names it."""
    return f"check {key}, --hub and --source_hub."


def check_named_models(models: Mapping[str, NamedModel], stages: Mapping[str, StageSettings]) -> None:
    """Checks that the models' code is trusted and has the needed classes, and that labels and tokenizers fit.

    Args:
        models: Role -> model. A model without files is not checked.
        stages: Stage -> settings.

    Raises:
        ZooError: A model cannot be used.
    """
    for model in models.values():
        if needs_remote_code(model.config) and not is_code_trusted():
            raise ZooError(untrusted_message(f"The model {model.name}"))
    if "ppo" in stages:
        _check_label(models, stages["ppo"])
        _check_tokenizers(models, stages["ppo"])
    policy = models.get("policy")
    if policy is None or "reward" not in stages or not needs_remote_code(policy.config):
        return
    if "AutoModelForSequenceClassification" not in policy.config["auto_map"]:
        raise ZooError(
            f"The code of the model {policy.name} has no AutoModelForSequenceClassification, which the stage reward "
            "trains: remove reward.yaml, and set reward_model_path or reward_funcs in ppo.yaml."
        )


def _check_label(models: Mapping[str, NamedModel], ppo: StageSettings) -> None:
    """Checks that reward_label names an output of each reward model, and is set if a model has several outputs."""
    label = ppo.trainer.reward_label
    for role, name in reward_roles(ppo.data.reward_model_path).items():
        if name == "reward" or is_ensemble_member(name):  # the reward stage trains models with one output
            label_index({0: ""}, label, name="of the stage reward")
            continue
        model = models.get(role)
        labels = None if model is None or ppo.data.reward_model_loader is not None else labels_of(model.config)
        if model is not None and labels is not None:
            label_index(labels, label, name=model.name, label2id=model.config.get("label2id"))


def _check_tokenizers(models: Mapping[str, NamedModel], ppo: StageSettings) -> None:
    """Checks the tokenizers of PPO's policy and reward models, except those of models that a stage produces.

    A tokenizer must not pad with EOS, nor have more tokens than its model has embeddings.
    """
    pad_tokens = dict.fromkeys(REWARD_ROLES, (ppo.trainer.reward_pad_token, "reward_pad_token"))
    if ppo.model.model_name_or_path not in (None, *STAGES):  # the SFT stage sets the PAD of its own policy
        pad_tokens["policy"] = ppo.data.pad_token, "pad_token of the stage ppo"
    for role, (pad_token, key) in pad_tokens.items():
        model = models.get(role)
        if model is None or model.folder is None:
            continue
        owner = f"the {'policy' if role == 'policy' else 'reward model'} {model.name}"
        tokenizer = load_tokenizer(model.folder, name=model.name)
        ensure_own_pad(tokenizer, pad_token, subject=owner, key=key)
        vocab_size = (model.config.get("text_config") or model.config).get("vocab_size")
        max_id = highest_id(tokenizer)
        if isinstance(vocab_size, int) and vocab_size <= max_id:
            raise ZooError(
                f"The tokenizer of {owner} has ids up to {max_id}, but its config.json has vocab_size {vocab_size}: "
                "use the tokenizer that the model was trained with."
            )


def starting_models(context: RunContext) -> dict[str, NamedModel]:
    """Finds and checks the models that the stages still to be trained will load.

    Args:
        context: The run.

    Returns:
        Role -> model.

    Raises:
        ZooError: A model cannot be used.
    """
    stages = stages_to_train(context)
    models = named_models(stages, context.hub)
    check_named_models(models, stages)
    has_loader = "ppo" in stages and stages["ppo"].data.reward_model_loader is not None  # may read any file
    for role, model in models.items():
        if Path(model.name).is_dir() and not (has_loader and role in REWARD_ROLES):
            files = find_model_files(model.name)  # raises for pickles and for truncated weights
            if find_gguf(model.name) is None:
                files.require_weights()
    if "policy" not in models and context.record("sft").read().get("status") == "finished" and "sft" not in stages:
        path = context.checkpoint("sft").path
        models["policy"] = NamedModel("the stage sft", str(path), path)
    return models


def check_response_length(shared: RecipeConfig, ppo: StageSettings, policy: NamedModel | None) -> None:
    """Checks that an answer is shorter than the policy's context length.

    Args:
        shared: The keys of recipe.yaml.
        ppo: Settings of the PPO stage.
        policy: The policy; None for a model with random weights.

    Raises:
        ZooError: An answer alone fills the policy's context length.
    """
    context_length = policy.context_length if policy is not None else context_length_of(shared.architecture or {})
    response_length = ppo.trainer.response_length
    if context_length is not None and response_length >= context_length:
        raise ZooError(
            f"response_length of the stage ppo is {response_length}, but {_policy_name(policy)} reads {context_length} "
            "tokens, prompt and answer together: lower response_length."
        )


def check_prompt_lengths(context: RunContext, models: Mapping[str, NamedModel], prompts: Sequence[Prompt]) -> str:
    """Checks that PPO's prompts with their answers fit into the policy's context length.

    If SFT still has to train the tokenizer, the prompts are not measured.

    Args:
        context: The run.
        models: Role -> model.
        prompts: The prompts: texts or conversations.

    Returns:
        A description of the prompts' lengths, for the table of `rlhf-zoo doctor`.

    Raises:
        ZooError: A prompt with its answer does not fit, or too few prompts are left for an update.
    """
    settings, policy = context.settings("ppo"), models.get("policy")
    check_response_length(context.shared, settings, policy)
    if policy is None or policy.folder is None:
        return "SFT trains the tokenizer, so prompts are measured after it"
    max_prompt_length, response_length = settings.data.max_prompt_length, settings.trainer.response_length
    context_length = policy.context_length
    tokenizer = context.shared.chat.write_for_prompts(_tokenizer_of(context, policy), prompts)
    lengths = sorted(len(tokenize_prompt(prompt, tokenizer)) for prompt in prompts)
    fitting_lengths = [length for length in lengths if max_prompt_length is None or length <= max_prompt_length]
    if not fitting_lengths:
        raise ZooError(
            f"max_prompt_length of the stage ppo is {max_prompt_length}, but the shortest of {len(lengths)} prompts "
            f"has {lengths[0]} tokens: raise max_prompt_length."
        )
    longest, prompts_per_update = fitting_lengths[-1], settings.trainer.prompts_per_update
    if context_length is not None and longest + response_length > context_length:
        raise ZooError(
            f"response_length of the stage ppo is {response_length}, the longest prompt has {longest} tokens, but "
            f"{_policy_name(policy)} reads {context_length}: lower response_length, or set max_prompt_length to at "
            f"most {context_length - response_length}."
        )
    if len(fitting_lengths) < prompts_per_update <= len(lengths):
        raise ZooError(
            f"max_prompt_length of the stage ppo is {max_prompt_length}, which leaves {len(fitting_lengths)} of "
            f"{len(lengths)} prompts, but an update needs {prompts_per_update}: raise max_prompt_length, or make the "
            "batch smaller."
        )
    for reward in (models[role] for role in REWARD_ROLES if role in models):
        if reward.context_length is not None and longest + response_length > reward.context_length:
            warn_truncated(reward.name, reward.context_length)
    return (
        f"the longest of {len(fitting_lengths)} has {longest} tokens, and {longest + response_length} with its answer"
        + (f", of {context_length}" if context_length is not None else "")
    )


def policy_tokenizer(context: RunContext, policy: NamedModel | None) -> Any | None:
    """Returns a tokenizer that renders texts like the tokenizer of the SFT policy, even before SFT has trained it.

    Args:
        context: The run.
        policy: The policy; None for a model with random weights, whose tokenizer has no vocabulary yet.

    Returns:
        The tokenizer; None if it is unknown.
    """
    if policy is None:
        return None if context.shared.architecture is None else _tokenizer_of(context, None)
    return None if policy.folder is None else _tokenizer_of(context, policy)


def _tokenizer_of(context: RunContext, policy: NamedModel | None) -> Any:
    """Returns a policy's tokenizer with the chat template that SFT sets. `policy` is None for random weights."""
    tokenizer: PreTrainedTokenizerBase
    if policy is None:
        tokenizer = train_tokenizer([""], vocab_size=300, max_length=512)
    else:
        tokenizer = load_tokenizer(str(policy.folder), name=policy.name)
    if "sft" in context.recipe.stages:
        _set_template(tokenizer, context.settings("sft"), context.hub)
    return tokenizer


def _set_template(tokenizer: "PreTrainedTokenizerBase", sft: StageSettings, hub: Hub) -> None:
    """Sets the chat template that SFT's chat_template_path names, if any, as a tokenizer's template."""
    if sft.trainer.chat_template_path is not None:
        tokenizer.chat_template = _template_of(sft.trainer.chat_template_path, hub)


def count_rows_cut_by_sft(
    shared: RecipeConfig, sft: StageSettings, policy: NamedModel | None, hub: Hub
) -> CutRows | None:
    """Counts the rows that SFT's max_length will cut.

    Args:
        shared: The keys of recipe.yaml.
        sft: Settings of the SFT stage.
        policy: The model that SFT starts from; None for random weights.
        hub: Where Hub ids are looked up.

    Returns:
        The counts; None if max_length cuts nothing, or if the rows or the model's tokenizer are not on this machine.
    """
    if policy is None or policy.folder is None or (rows := local_rows(shared, sft, hub)) is None:
        return None
    tokenizer = load_tokenizer(str(policy.folder), name=policy.name)
    switch_off_eos(tokenizer)
    _set_template(tokenizer, sft, hub)
    if has_conversations(rows):
        shared.chat.write(tokenizer)
    rows = drop_long_prompts(rows, tokenizer, sft.data.max_prompt_length, subject=f"the stage {sft.stage}")[0]
    return count_cut_rows(rows, tokenizer, sft.trainer, text_column=text_column_of(sft))


def _template_of(path: str, hub: Hub) -> Any:
    """Returns the chat template of a file or a model."""
    if path.endswith((".jinja", ".j2")) or Path(path).is_file():
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ZooError(
                f"chat_template_path names {path}, which cannot be read ({error}): choose another file."
            ) from error
    folder = fetch_files(path, None, hub, fix=_missing_model_fix("chat_template_path"))
    return load_tokenizer(folder, name=path).chat_template


def _policy_name(policy: NamedModel | None) -> str:
    return "the architecture of recipe.yaml" if policy is None else f"the model {policy.name}"
