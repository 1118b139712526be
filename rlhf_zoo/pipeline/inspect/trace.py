"""`rlhf-zoo trace`: finds a PPO checkpoint and its parents, on disk or on a Hub, and traces a completion."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ZooError
from ...fileio import get_nested, hub_id, int_or_none, read_json
from ...hub.client.claims import RECIPE_FILE
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.pull import split_revision
from ...hub.client.refs import Checkpoint, resolve
from ...hub.client.refusals import translate_hub_errors
from ...hub.client.run_signature import TRUST_RUN_FLAG
from ...hub.client.step_tags import tag_name, tagged_steps
from ...modeling.chat_template import Prompt
from ...modeling.critic import CRITIC_DIR
from ...modeling.devices import move_to_best_device
from ...modeling.integrity import check_integrity
from ...modeling.loading import load_tokenizer, silence_transformers
from ...modeling.models import load_causal
from ...modeling.text_ids import same_token_ids
from ...modeling.value_head import ValueHead
from ...plugins import REWARDS, load_object
from ...ppo.assembly import build_rewards
from ...ppo.checkpoint import PPO_STATE
from ...ppo.config import PPOConfig
from ...ppo.critics import build_critic
from ...ppo.kl_controller import RunningScores
from ...ppo.saved_critic import load_critic
from ...ppo.trace import Trace, trace
from ...publishing.catalog.lineage import find_lineage
from ...rewards import Rewards
from ...rewards.loading import load_reward_model
from ...runs.checkpoint_choice import resolve_model
from ...runs.record import StageRecord, checkpoint_step, is_checkpoint
from ...runs.registry import REWARD_ROLES, STAGES, is_ensemble_member
from ...runs.settings.key_classes import is_revision
from ...runs.settings.parse import recorded_settings
from ...runs.trusted_names import may_import

#: Keys of PPOConfig that a trace depends on.
TRAINER_KEYS = (
    "action_level", "cliprange", "cliprange_high", "cliprange_sequence", "critic", "dual_clip", "gamma", "kl_coef",
    "kl_estimator", "kl_in", "lam", "missing_eos_penalty", "missing_eos_score", "response_length",
    "response_length_min", "reward_ensemble", "reward_ensemble_lambda", "reward_label", "reward_output",
    "reward_pad_token", "reward_weights", "score_centering", "score_clip", "score_scaling", "stop_token",
    "stop_token_id", "temperature", "truncate_after", "truncate_text", "whiten_advantages", "whiten_rewards",
)  # fmt: skip
#: Keys of the stage's data that a trace depends on.
DATA_KEYS = ("reward_funcs", "reward_model_loader", "reward_model_path", "value_model_name_or_path")


@dataclass(frozen=True)
class TracedPolicy:
    """A policy to trace, and the models of its run.

    Attributes:
        policy: The policy.
        reference: The reference policy π_ref.
        reward_models: The reward models; () if the run had none.
        value_model: At step 0, the model that value_model_name_or_path names; None at later steps, or without the key.
        old: The policy π_old in the denominator of ρ; None for the reference.
        step: The step of the checkpoint; 0 for the policy that PPO started from, None if it is unknown.
        settings: The run's settings.
        settings_file: The file with the settings.
        is_trusted: Whether this user's rlhf-zoo wrote the settings or the user trusts the run, so that every Python
            object that they name may be imported. Otherwise `runs.trusted_names` decides.
    """

    policy: Checkpoint
    reference: Checkpoint
    reward_models: tuple[Checkpoint, ...]
    value_model: Checkpoint | None
    old: Checkpoint | None
    step: int | None
    settings: Mapping[str, Any]
    settings_file: Path
    is_trusted: bool

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def is_initial(self) -> bool:
        """Whether this is the policy that PPO started from. Its critic was never saved."""
        return self.step == 0


# Finding


def find_traced_policy(
    name: str,
    *,
    step: int | None = None,
    revision: str | None = None,
    old: str | None = None,
    sft: str | None = None,
    reward: str | None = None,
    without_reward: bool = False,
    sft_flag: str = "--sft",
    hub: Hub = DEFAULT_HUB,
) -> TracedPolicy:
    """Finds a PPO checkpoint and the models of its run.

    Args:
        name: A run directory, its PPO stage, a checkpoint in it, or NAMESPACE/NAME[@TAG].
        step: The step; 0 for the policy that PPO started from. None for a run's last step, or for the checkpoint at the
            repository's revision.
        revision: A branch, tag or commit of the repository; None for its default.
        old: The policy π_old: a step of the same run, a folder or a repository; None for the checkpoint before `step`,
            or the reference if there is none.
        sft: A folder or repository that replaces the run's reference, or None.
        reward: A folder or repository that replaces the run's reward models, or None.
        without_reward: Whether to leave out the reward models of a run directory.
        sft_flag: The command's flag for `sft`, for errors.
        hub: The Hub that has the repositories.

    Raises:
        ZooError: A checkpoint or file is missing, or PPO did not train the checkpoint.
    """
    path = Path(name)
    if path.is_dir():
        absolute_path = path.resolve()  # `Path(".").name` is empty
        has_state = (path / PPO_STATE).is_file()
        is_in_run = has_state and is_checkpoint(absolute_path) and (absolute_path.parent / "run.json").is_file()
        if is_in_run:
            if step is not None:
                raise ZooError(f"{name} is already the checkpoint of a step: remove --step.")
            path, step = absolute_path.parent, checkpoint_step(absolute_path)
        # Any other folder with PPO's state is a pulled repository, even if it also has a run.json.
        is_repository = has_state and not is_in_run
        stage_folder = path if (path / "run.json").is_file() else path / "ppo"
        if not is_repository and (stage_folder / "run.json").is_file():
            if revision is not None:
                raise ZooError(f"{name} is a run directory, which has no revisions: pass --step instead.")
            return _from_run(
                stage_folder, step=step, old=old, sft=sft, reward=reward, without_reward=without_reward,
                sft_flag=sft_flag, hub=hub,
            )  # fmt: skip
        if not is_repository:
            raise ZooError(f"{name} has neither a PPO run nor a PPO checkpoint: pass runs/RECIPE, or train PPO first.")
    return _from_repository(name, step=step, revision=revision, old=old, sft=sft, reward=reward, hub=hub)


def _from_run(
    stage_folder: Path,
    *,
    step: int | None,
    old: str | None,
    sft: str | None,
    reward: str | None,
    without_reward: bool,
    sft_flag: str,
    hub: Hub,
) -> TracedPolicy:
    record = StageRecord(stage_folder)
    document = record.read()
    if (stage := document.get("stage")) != "ppo":
        raise ZooError(f"{stage_folder} is the folder of the stage {stage}: pass the folder of the PPO stage.")
    names_by_step = {checkpoint_step(path): str(path) for path in record.checkpoints()}
    step = max(names_by_step, default=0) if step is None else step
    policy_name = _checkpoint_at(names_by_step, step, str(stage_folder)) if step else None
    old_name = _old_policy_name(names_by_step, step, old, str(stage_folder))
    parents = document.get("parents") or {}

    def find(role: str, remedy: str) -> Checkpoint:
        return _find_parent(stage_folder, document, role, hub, remedy=remedy)

    reference = find("sft", f"name it with {sft_flag}") if sft is None else _resolve_checkpoint(sft, hub)
    reward_roles = [] if without_reward else [role for role in REWARD_ROLES if parents.get(role)]
    reward_models = (
        [find(role, "name it with --reward") for role in reward_roles]
        if reward is None
        else [_resolve_checkpoint(reward, hub)]
    )
    return TracedPolicy(
        policy=reference if policy_name is None else _resolve_checkpoint(policy_name, hub),
        reference=reference,
        reward_models=tuple(reward_models),
        value_model=find("value", "trace a later step") if parents.get("value") and not step else None,
        old=None if old_name is None else _resolve_checkpoint(old_name, hub),
        step=step,
        settings=document.get("resolved") or {},
        settings_file=record.run_file,
        is_trusted=record.is_own(),
    )


def _from_repository(
    name: str, *, step: int | None, revision: str | None, old: str | None, sft: str | None, reward: str | None, hub: Hub
) -> TracedPolicy:
    is_local = Path(name).is_dir()
    repo, tag = (name, None) if is_local else split_revision(name)
    revisions = [option for option in (tag, revision, tag_name(step) if step else None) if option is not None]
    if len(revisions) > (0 if is_local else 1):
        raise ZooError(
            f"{name} is already the checkpoint of a step: remove --revision and --step."
            if is_local
            else f"{name} has more than one revision: pass only one of @TAG, --revision and --step."
        )
    full_name = f"{repo}@{revisions[0]}" if revisions else repo
    # `_read_tags` reads the steps from this Hub alone, so the policy must come from it too.
    policy = _resolve_checkpoint(full_name, hub, skip_source=True)
    path = policy.path
    for file in (PPO_STATE, RECIPE_FILE):
        if not (path / file).is_file():
            raise ZooError(
                f"{name} is not a PPO policy of rlhf-zoo (it has no {file}): pass a run directory of PPO, or the "
                "repository of a published run, such as NAMESPACE/RECIPE-ppo."
            )
    lineage = find_lineage(policy.name, sft=sft, reward=reward, hub=hub)
    card_step = int_or_none(lineage.card.get("step")) or 0
    settings = read_json(path / RECIPE_FILE)
    if not isinstance(settings, dict):
        raise ZooError(
            f"{RECIPE_FILE} of {name} does not hold a stage's settings: publish it again with this rlhf-zoo."
        )
    names_by_step = {} if is_local else {number: f"{repo}@{tag}" for number, tag in _read_tags(repo, hub).items()}
    is_initial = step == 0
    old_name = _old_policy_name(names_by_step, 0 if is_initial else card_step, old, repo)
    return TracedPolicy(
        policy=lineage.sft if is_initial else policy,
        reference=lineage.sft,
        reward_models=lineage.rewards,
        value_model=_find_published_value_model(lineage.card, hub) if is_initial else None,
        old=None if old_name is None else _resolve_checkpoint(old_name, hub),
        step=0 if is_initial else card_step or None,
        settings=settings,
        settings_file=path / RECIPE_FILE,
        is_trusted=False,
    )


def _find_published_value_model(card: Mapping[str, Any], hub: Hub) -> Checkpoint | None:
    """Finds the model that the critic started from, at its commit; None if the card does not name one."""
    repo, commit = (get_nested(card, "parents", "value", key) for key in ("repo", "commit"))
    return resolve(f"{repo}@{commit}", hub, is_repository=True) if hub_id(repo) and is_revision(commit) else None


def _read_tags(repo: str, hub: Hub) -> dict[int, str]:
    """Returns step -> tag of a repository's checkpoints."""
    with translate_hub_errors(f"The tags of {repo} cannot be read", "try again when the Hub answers."):
        tags = [ref.name for ref in hub.api().list_repo_refs(repo).tags]
    return tagged_steps(tags)


def _resolve_checkpoint(name: str, hub: Hub, *, skip_source: bool = False) -> Checkpoint:
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        checkpoint = resolve_model(name, hub, skip_source=skip_source)
    except ZooError as error:
        if not isinstance(error.__cause__, (HFValidationError, RepositoryNotFoundError)):
            raise
        raise ZooError(
            f"{name} is not a run directory, and {hub.name} has no repository of this name that this token may "
            "read: pass runs/RECIPE or NAMESPACE/NAME."
        ) from error
    if checkpoint.hub is None:
        check_integrity(checkpoint.path)
    return checkpoint


def _checkpoint_at(names_by_step: Mapping[int, str], step: int, where: str) -> str:
    if step not in names_by_step:
        other_steps = f" or one of {', '.join(map(str, sorted(names_by_step)))}" if names_by_step else ""
        raise ZooError(f"{where} has no checkpoint of step {step}: choose 0 (the start of PPO){other_steps}.")
    return names_by_step[step]


def _old_policy_name(names_by_step: Mapping[int, str], step: int, old: str | None, where: str) -> str | None:
    """Returns the name of π_old, which is `old` or by default the checkpoint before `step`; None for the reference."""
    if old is None:
        earlier_steps = [number for number in names_by_step if number < step]
        return names_by_step[max(earlier_steps)] if earlier_steps else None
    if old.isdecimal():  # a step of the same run
        return _checkpoint_at(names_by_step, int(old), where) if int(old) else None
    return old


def _find_parent(stage_folder: Path, document: Mapping[str, Any], role: str, hub: Hub, *, remedy: str) -> Checkpoint:
    """Finds the model of a role in PPO: in the run directory, at its recorded path, or on the Hub at its commit.

    Raises ZooError, with `remedy` as the end of the message, if the model is in none of these places.
    """
    lineage = (document.get("parents") or {}).get(role) or {}
    path, repo, commit = (lineage.get(key) for key in ("path", "repo", "commit"))
    if path:
        member_name = Path(path).parent.as_posix()
        value_source = (document.get("resolved") or {}).get("value_model_name_or_path")
        # The critic may have started from the model of another stage.
        stage = value_source if role == "value" and value_source in STAGES else role
        parent_folder = stage_folder.parent / (member_name if is_ensemble_member(member_name) else stage)
        # A stage that was trained again has another model under the same name.
        is_unchanged = StageRecord(parent_folder).read().get("fingerprint") == lineage.get("fingerprint")
        candidates = [parent_folder / Path(path).name] if is_unchanged else []
        # Another user's run must not make this command read a local path.
        candidates += [Path(path)] if StageRecord(stage_folder).is_own() else []
        if (folder := next(filter(Path.is_dir, candidates), None)) is not None:
            return _resolve_checkpoint(str(folder), hub)
    if repo and commit:
        return resolve(f"{repo}@{commit}", hub, is_repository=True)
    raise ZooError(
        f"The {role} model that {stage_folder} started from is neither in its run directory nor published: {remedy}."
    )


# Tracing


def trace_checkpoint(
    traced_policy: TracedPolicy,
    prompt: Prompt,
    *,
    seed: int = 1,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    columns: Mapping[str, Any] | None = None,
    reward_funcs: Sequence[str] = (),
) -> Trace:
    """Loads the models and traces a completion of a prompt.

    Args:
        traced_policy: The policy, and the models of its run.
        prompt: A text or a conversation.
        seed: Seed of the sampler.
        temperature: The sampling temperature; None for the run's own.
        max_new_tokens: Maximum number of tokens in the completion; None for the run's own limit.
        columns: The prompt's other columns, for reward functions; None if there are none.
        reward_funcs: The run's reward functions that may be imported although the run was downloaded.

    Raises:
        ZooError: A model cannot be loaded, is not trusted, or does not belong to the run.
    """
    silence_transformers()
    where = str(traced_policy.settings_file)
    data_settings = recorded_settings(traced_policy.settings, "ppo", DATA_KEYS, where=where)
    settings = recorded_settings(traced_policy.settings, "ppo", TRAINER_KEYS, where=where)
    functions, weights = _load_functions(traced_policy, data_settings, settings["reward_weights"], reward_funcs)
    settings |= {"reward_weights": weights}
    if len(traced_policy.reward_models) < 2:  # --reward may replace the run's ensemble by a single model
        settings |= {"reward_ensemble": None, "reward_ensemble_lambda": None}
    settings |= {} if temperature is None else {"temperature": temperature}
    settings |= {} if max_new_tokens is None else {"response_length": max_new_tokens}
    args = PPOConfig(output_dir=str(traced_policy.policy.path), report_to="none", **settings)
    tokenizer = tokenizer_of(traced_policy.policy)
    checkpoints = {"policy": traced_policy.policy, "reference": traced_policy.reference}
    checkpoints |= {"old": traced_policy.old} if traced_policy.old is not None else {}
    for checkpoint in checkpoints.values():
        if not same_token_ids(tokenizer, tokenizer_of(checkpoint)):
            raise ZooError(
                f"{checkpoint.name} has a different tokenizer from {traced_policy.name}, so their log-probabilities "
                "cannot be compared: choose a checkpoint of the same run."
            )
    policies = {role: load_causal(checkpoint.path) for role, checkpoint in checkpoints.items()}
    loader = data_settings["reward_model_loader"]
    reward_models = [
        _load_reward_model(traced_policy, checkpoint, loader, args) for checkpoint in traced_policy.reward_models
    ]
    tokenizers = [tokenizer_of(checkpoint) for checkpoint in traced_policy.reward_models]
    rewards = build_rewards(reward_models, functions, args, tokenizer, tokenizers)
    assert rewards is not None
    critic = _load_critic(traced_policy, data_settings["value_model_name_or_path"], policies["policy"], rewards, args)
    for model in (*policies.values(), critic, *(reward.model for reward in rewards.models)):
        move_to_best_device(model)
    kl_coef, running_scores = args.kl_coef, RunningScores()
    if not traced_policy.is_initial:
        kl_coef, running_scores = _read_state(traced_policy.policy.path / PPO_STATE)
    return trace(
        prompt,
        **policies,
        critic=critic,
        rewards=rewards,
        tokenizer=tokenizer,
        args=args,
        kl_coef=kl_coef,
        running_scores=running_scores,
        columns=columns,
        seed=seed,
    )


def _load_reward_model(
    traced_policy: TracedPolicy, checkpoint: Checkpoint, loader: str | None, args: PPOConfig
) -> PreTrainedModel:
    """Loads a reward model. Raises ZooError if a download names the code that loads it."""
    if loader is not None and not traced_policy.is_trusted:
        raise ZooError(
            f"The reward model of {traced_policy.name} is loaded by {loader}, but code that a download names is not "
            f"imported: trace a run directory of your own, add {TRUST_RUN_FLAG} if you trust the run, or trace a "
            "policy with another reward model."
        )
    return load_reward_model(checkpoint.path, label=args.reward_label, loader=loader)


def _load_functions(
    traced_policy: TracedPolicy,
    data_settings: Mapping[str, Any],
    weights: list[float] | None,
    allowed_names: Sequence[str],
) -> tuple[list[Any], list[float]]:
    """Returns the reward functions, and the weights of all rewards.

    Functions that a download names are imported only if `trusted_names` or the user allows it. A function with weight 0
    that may not be imported is left out.
    """
    names = data_settings["reward_funcs"] or []
    has_reward_model = data_settings["reward_model_path"] is not None
    if traced_policy.reward_models and not has_reward_model:
        raise ZooError(f"{traced_policy.name} was trained without a reward model: remove --reward.")
    if not traced_policy.reward_models and has_reward_model:
        raise ZooError(f"{traced_policy.name} does not record its reward model: name it with --reward.")
    model_count = int(has_reward_model)  # the model's weight comes before those of the functions
    reward_count = model_count + len(names)
    weights = [1.0] * reward_count if weights is None else weights
    if len(weights) != reward_count:
        counts = f"{len(weights)} reward_weights for {reward_count} rewards"
        raise ZooError(f"{traced_policy.settings_file} has {counts}: use another run.")
    if unknown_names := [name for name in allowed_names if name not in names]:
        raise ZooError(
            f"--reward_funcs names {unknown_names[0]}, but the reward functions of {traced_policy.name} are "
            f"{', '.join(names) or 'none'}: name one of these, or remove the option."
        )
    if traced_policy.is_trusted:
        return [load_object(name, group=REWARDS) for name in names], weights
    weight_by_name = dict(zip(names, weights[model_count:], strict=True))
    loadable_names = [name for name in names if name in allowed_names or may_import(name, REWARDS)]
    if refused_names := [name for name, weight in weight_by_name.items() if weight and name not in loadable_names]:
        is_run = traced_policy.settings_file.name == "run.json"
        hint = f", or {TRUST_RUN_FLAG} to allow all functions," if is_run else ""
        raise ZooError(
            f"{traced_policy.name} was also rewarded by {', '.join(refused_names)}, but code that a download names is "
            f"not imported unless you allow it: add --reward_funcs {shlex.quote(refused_names[0])}{hint} if you trust "
            "it."
        )
    functions = [load_object(name, group=REWARDS) for name in loadable_names]
    return functions, weights[:model_count] + [weight_by_name[name] for name in loadable_names]


def _load_critic(
    traced_policy: TracedPolicy,
    value_model_name: str | None,
    policy: PreTrainedModel,
    rewards: Rewards,
    args: PPOConfig,
) -> PreTrainedModel | ValueHead:
    """Loads the critic that was saved with the policy. At step 0, builds a new critic as PPO does."""
    if traced_policy.is_initial:
        if value_model_name is not None and traced_policy.value_model is None:
            raise ZooError(
                f"The critic of {traced_policy.name} started from {value_model_name} at an unknown commit: trace a "
                "later step."
            )
        value_model_path = None if traced_policy.value_model is None else traced_policy.value_model.path
        return build_critic(value_model_path, rewards, policy, args)
    critic = load_critic(traced_policy.policy.path, policy)
    if critic is None:
        raise ZooError(
            f"{traced_policy.name} has no critic in {CRITIC_DIR}/, and a trace shows its values: trace the run "
            "directory (`rlhf-zoo trace runs/RECIPE`), which has the critic, or train with `push_critic: true` in "
            "ppo.yaml, which publishes it."
        )
    return critic


def _read_state(path: Path) -> tuple[float, RunningScores]:
    """Reads β and the running score statistics of a checkpoint."""
    state = read_json(path)
    try:
        kl_coef, running_scores = float(state["kl_coef"]), RunningScores(*map(float, state.get("scores_seen", ())))
    except (KeyError, TypeError, ValueError) as error:
        raise ZooError(f"{path} was not written by PPO ({error}): use another checkpoint.") from error
    if not math.isfinite(kl_coef):
        raise ZooError(f"{path} has β = {kl_coef}: use another checkpoint.")
    return kl_coef, running_scores


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Loads a checkpoint's tokenizer.

    Args:
        checkpoint: The checkpoint, whose folder has the tokenizer.
    """
    return load_tokenizer(checkpoint.path, name=checkpoint.name)
