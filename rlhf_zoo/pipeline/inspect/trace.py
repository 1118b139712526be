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
from ...runs.registry import REWARD_ROLES, STAGES, is_member
from ...runs.settings.key_classes import is_revision
from ...runs.settings.parse import recorded_settings
from ...runs.trusted_names import may_import

#: Keys of PPOConfig that a trace depends on.
TRAINER_KEYS = (
    "action_level", "cliprange", "cliprange_high", "cliprange_sequence", "critic", "dual_clip", "gamma", "kl_coef",
    "kl_estimator", "kl_in", "lam", "missing_eos_penalty", "missing_eos_score", "response_length",
    "response_length_min", "reward_ensemble", "reward_ensemble_lambda", "reward_label", "reward_output",
    "reward_pad_token",
    "reward_weights", "score_centering", "score_clip", "score_scaling", "stop_token", "stop_token_id", "temperature",
    "truncate_after", "truncate_text", "whiten_advantages", "whiten_rewards",
)  # fmt: skip
#: Keys of the stage's data that a trace depends on.
DATA_KEYS = ("reward_funcs", "reward_model_loader", "reward_model_path", "value_model_name_or_path")


@dataclass(frozen=True)
class TracedPolicy:
    """A policy to trace, and the models of its run.

    Attributes:
        policy: The policy.
        reference: The reference policy π_ref.
        rewards: The reward models; () if the run had none.
        critic_start: At step 0, the model that value_model_name_or_path names; None at later steps, or without the key.
        old: The policy π_old in the denominator of ρ; None for the reference.
        step: The step of the checkpoint; 0 for the policy that PPO started from, None if it is unknown.
        resolved: The run's settings.
        settings_file: The file with the settings.
        is_trusted: Whether this user's rlhf-zoo wrote the settings, so that every Python object that they name may be
            imported. Otherwise `runs.trusted_names` decides.
    """

    policy: Checkpoint
    reference: Checkpoint
    rewards: tuple[Checkpoint, ...]
    critic_start: Checkpoint | None
    old: Checkpoint | None
    step: int | None
    resolved: Mapping[str, Any]
    settings_file: Path
    is_trusted: bool

    @property
    def is_start(self) -> bool:
        """Whether this is the policy that PPO started from, whose critic was never saved."""
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
        hub: The Hub that has the repositories.

    Raises:
        ZooError: A checkpoint or file is missing, or PPO did not train the checkpoint.
    """
    path = Path(name)
    if path.is_dir():
        has_state, absolute_path = (path / PPO_STATE).is_file(), path.resolve()  # `Path(".").name` is empty
        if has_state and is_checkpoint(absolute_path) and (absolute_path.parent / "run.json").is_file():
            if step is not None:
                raise ZooError(f"{name} is already the checkpoint of a step: remove --step.")
            path, step, has_state = absolute_path.parent, checkpoint_step(absolute_path), False
        stage = path if (path / "run.json").is_file() else path / "ppo"
        # A folder with PPO's state is a pulled repository, even if it also has a run.json.
        if not has_state and (stage / "run.json").is_file():
            if revision is not None:
                raise ZooError(f"{name} is a run directory, which has no revisions: pass --step instead.")
            return _from_run(stage, step=step, old=old, sft=sft, reward=reward, hub=hub)
        if not has_state:
            raise ZooError(f"{name} has neither a PPO run nor a PPO checkpoint: pass runs/RECIPE, or train PPO first.")
    return _from_repository(name, step=step, revision=revision, old=old, sft=sft, reward=reward, hub=hub)


def _from_run(
    stage: Path, *, step: int | None, old: str | None, sft: str | None, reward: str | None, hub: Hub
) -> TracedPolicy:
    record = StageRecord(stage)
    document = record.read()
    if document.get("stage") != "ppo":
        raise ZooError(f"{stage} has a run of the stage {document.get('stage')}: pass the folder of the PPO stage.")
    steps = {checkpoint_step(path): str(path) for path in record.checkpoints()}
    step = max(steps, default=0) if step is None else step
    name = _checkpoint_at(steps, step, str(stage)) if step else None
    old_name = _old_policy_name(steps, step, old, str(stage))
    reference = _resolve_checkpoint(sft, hub) if sft is not None else _find_parent(stage, document, "sft", hub)
    parents = document.get("parents") or {}
    scorers = (
        [_resolve_checkpoint(reward, hub)]
        if reward is not None
        else [_find_parent(stage, document, role, hub) for role in REWARD_ROLES if parents.get(role)]
    )
    return TracedPolicy(
        policy=reference if name is None else _resolve_checkpoint(name, hub),
        reference=reference,
        rewards=tuple(scorers),
        critic_start=_find_parent(stage, document, "value", hub) if parents.get("value") and not step else None,
        old=None if old_name is None else _resolve_checkpoint(old_name, hub),
        step=step,
        resolved=document.get("resolved") or {},
        settings_file=record.run_file,
        is_trusted=record.is_own(),
    )


def _from_repository(
    name: str,
    *,
    step: int | None,
    revision: str | None,
    old: str | None,
    sft: str | None,
    reward: str | None,
    hub: Hub,
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
    subject = _resolve_checkpoint(full_name, hub, skip_source=True)
    path = subject.path
    for required in (PPO_STATE, RECIPE_FILE):
        if not (path / required).is_file():
            raise ZooError(
                f"{name} is not a PPO policy of rlhf-zoo (it has no {required}): pass a run directory of PPO, or the "
                "repository of a published run, such as NAMESPACE/RECIPE-ppo."
            )
    lineage = find_lineage(subject.name, sft=sft, reward=reward, hub=hub)
    card_step = int_or_none(lineage.card.get("step")) or 0
    resolved = read_json(path / RECIPE_FILE)
    if not isinstance(resolved, dict):
        raise ZooError(
            f"{RECIPE_FILE} of {name} does not hold a stage's settings: publish it again with this rlhf-zoo."
        )
    steps = {} if is_local else {number: f"{repo}@{tag}" for number, tag in _read_tags(repo, hub).items()}
    is_start = step == 0
    old_name = _old_policy_name(steps, 0 if is_start else card_step, old, repo)
    return TracedPolicy(
        policy=lineage.sft if is_start else subject,
        reference=lineage.sft,
        rewards=lineage.rewards,
        critic_start=_find_published_value(lineage.card, hub) if is_start else None,
        old=None if old_name is None else _resolve_checkpoint(old_name, hub),
        step=0 if is_start else card_step or None,
        resolved=resolved,
        settings_file=path / RECIPE_FILE,
        is_trusted=False,
    )


def _find_published_value(card: Mapping[str, Any], hub: Hub) -> Checkpoint | None:
    """Finds the model that the critic started from, at its commit; None if the card does not name one."""
    parent = get_nested(card, "parents", "value") or {}
    repo, commit = (parent.get(key) if isinstance(parent, dict) else None for key in ("repo", "commit"))
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


def _checkpoint_at(steps: Mapping[int, str], step: int, where: str) -> str:
    if step not in steps:
        available = ", ".join(map(str, sorted(steps))) or "none"
        raise ZooError(f"{where} has no checkpoint of step {step}: it has {available}, and 0 is the start of PPO.")
    return steps[step]


def _old_policy_name(steps: Mapping[int, str], step: int, old: str | None, where: str) -> str | None:
    """Returns the name of π_old: `old` unless it is None, then the checkpoint before `step`; None for the reference."""
    if old is None:
        return steps[max(earlier_steps)] if (earlier_steps := [number for number in steps if number < step]) else None
    if old.isdecimal():
        return _checkpoint_at(steps, int(old), where) if int(old) else None
    return old


def _find_parent(stage: Path, document: Mapping[str, Any], role: str, hub: Hub) -> Checkpoint:
    """Finds the model of a role in PPO: in the run directory, at its recorded path, or on the Hub at its commit."""
    lineage = (document.get("parents") or {}).get(role) or {}
    path, repo, commit = (lineage.get(key) for key in ("path", "repo", "commit"))
    value_stage = (document.get("resolved") or {}).get("value_model_name_or_path")
    if role == "value" and value_stage in STAGES:  # the critic started from the model of a stage
        role = value_stage
    if path:
        folder_name = Path(path).parent.as_posix()
        stage_folder = stage.parent / (folder_name if is_member(folder_name) else role)
        # A stage that was trained again has another model under the same name.
        is_unchanged = StageRecord(stage_folder).read().get("fingerprint") == lineage.get("fingerprint")
        # Another user's run must not make this command read a local path.
        recorded_paths = [Path(path)] if StageRecord(stage).is_own() else []
        for folder in ([stage_folder / Path(path).name] if is_unchanged else []) + recorded_paths:
            if folder.is_dir():
                return _resolve_checkpoint(str(folder), hub)
    if repo and commit:
        return resolve(f"{repo}@{commit}", hub, is_repository=True)
    raise ZooError(
        f"The {role} model that {stage} started from is neither in its run directory nor published: name it with "
        f"--{'reward' if role in REWARD_ROLES else role}."
    )


# Tracing


def trace_checkpoint(
    subject: TracedPolicy,
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
        subject: The policy and the models of its run.
        prompt: A text or a conversation.
        seed: Seed of the sampler.
        temperature: The sampling temperature; None for the run's own.
        max_new_tokens: Maximum number of tokens in the completion; None for the run's own limit.
        columns: The prompt's other columns, for reward functions; None if there are none.
        reward_funcs: Reward functions of a download that the user allows to be imported.

    Raises:
        ZooError: A model cannot be loaded, is not trusted, or does not belong to the run.
    """
    silence_transformers()
    where = str(subject.settings_file)
    data = recorded_settings(subject.resolved, "ppo", DATA_KEYS, where=where)
    settings = recorded_settings(subject.resolved, "ppo", TRAINER_KEYS, where=where)
    functions, weights = _load_functions(subject, data, settings["reward_weights"], reward_funcs)
    settings |= {"reward_weights": weights}
    if len(subject.rewards) < 2:  # --reward may replace the run's ensemble by a single model
        settings |= {"reward_ensemble": None, "reward_ensemble_lambda": None}
    settings |= {} if temperature is None else {"temperature": temperature}
    settings |= {} if max_new_tokens is None else {"response_length": max_new_tokens}
    args = PPOConfig(output_dir=str(subject.policy.path), report_to="none", **settings)
    tokenizer = tokenizer_of(subject.policy)
    models = {"policy": subject.policy, "reference": subject.reference}
    models |= {"old": subject.old} if subject.old is not None else {}
    for checkpoint in models.values():
        if not same_token_ids(tokenizer, tokenizer_of(checkpoint)):
            raise ZooError(
                f"{checkpoint.name} has a different tokenizer from {subject.policy.name}, so their log-probabilities "
                "cannot be compared: choose a checkpoint of the same run."
            )
    loaded = {role: load_causal(checkpoint.path) for role, checkpoint in models.items()}
    scorers = [_load_scorer(subject, reward, data["reward_model_loader"], args) for reward in subject.rewards]
    tokenizers = [tokenizer_of(reward) for reward in subject.rewards]
    rewards = build_rewards(scorers, functions, args, tokenizer, tokenizers)
    assert rewards is not None
    critic = _load_critic(subject, data["value_model_name_or_path"], loaded["policy"], rewards, args)
    for model in (*loaded.values(), critic, *(reward.model for reward in rewards.models)):
        move_to_best_device(model)
    initial_state = args.kl_coef, RunningScores()
    kl_coef, scores = initial_state if subject.is_start else _read_state(subject.policy.path / PPO_STATE)
    return trace(
        prompt,
        **loaded,
        critic=critic,
        rewards=rewards,
        tokenizer=tokenizer,
        args=args,
        kl_coef=kl_coef,
        running_scores=scores,
        columns=columns,
        seed=seed,
    )


def _load_scorer(subject: TracedPolicy, reward: Checkpoint, loader: str | None, args: PPOConfig) -> PreTrainedModel:
    """Loads the reward model. Raises ZooError if a download names the code that loads it."""
    if loader is not None and not subject.is_trusted:
        raise ZooError(
            f"The reward model of {subject.policy.name} is loaded by {loader}, but code that a download names is not "
            f"imported: trace a run directory of your own, add {TRUST_RUN_FLAG} if you trust the run, or trace a "
            "policy with another reward model."
        )
    return load_reward_model(reward.path, label=args.reward_label, loader=loader)


def _load_functions(
    subject: TracedPolicy, data: Mapping[str, Any], weights: list[float] | None, allowed: Sequence[str]
) -> tuple[list[Any], list[float]]:
    """Loads the reward functions. Returns them, and the weights of all rewards.

    Functions that a download names are imported only if `trusted_names` or the user allows it. A function with weight 0
    that may not be imported is left out.
    """
    names = data["reward_funcs"] or []
    model = [] if data["reward_model_path"] is None else [data["reward_model_path"]]
    if subject.rewards and not model:
        raise ZooError(f"{subject.policy.name} was trained without a reward model: remove --reward.")
    if not subject.rewards and model:
        raise ZooError(f"{subject.policy.name} does not record its reward model: name it with --reward.")
    count = len(model) + len(names)
    weights = [1.0] * count if weights is None else weights
    if len(weights) != count:
        raise ZooError(
            f"{subject.settings_file} has {len(weights)} reward_weights for {count} rewards: use another run."
        )
    if unknown_names := [name for name in allowed if name not in names]:
        raise ZooError(
            f"--reward_funcs names {unknown_names[0]}, but the reward functions of {subject.policy.name} are "
            f"{', '.join(names) or 'none'}: name one of these, or remove the option."
        )
    if subject.is_trusted:
        return [load_object(name, group=REWARDS) for name in names], weights
    by_name = dict(zip(names, weights[len(model) :], strict=True))
    chosen = [name for name in names if name in allowed or may_import(name, REWARDS)]
    if missing := [name for name, weight in by_name.items() if weight and name not in chosen]:
        hint = f", or {TRUST_RUN_FLAG} to allow all functions," if subject.settings_file.name == "run.json" else ""
        raise ZooError(
            f"{subject.policy.name} was also rewarded by {', '.join(missing)}, but code that a download names is not "
            f"imported unless you allow it: add --reward_funcs {shlex.quote(missing[0])}{hint} if you trust it."
        )
    functions = [load_object(name, group=REWARDS) for name in chosen]
    return functions, weights[: len(model)] + [by_name[name] for name in chosen]


def _load_critic(
    subject: TracedPolicy, value_model: str | None, policy: PreTrainedModel, rewards: Rewards, args: PPOConfig
) -> PreTrainedModel | ValueHead:
    """Loads the critic that was saved with the policy. At step 0, builds a new critic as PPO does."""
    if subject.is_start:
        if value_model is not None and subject.critic_start is None:
            raise ZooError(
                f"The critic of {subject.policy.name} started from {value_model} at an unknown commit: trace a later "
                "step."
            )
        return build_critic(None if subject.critic_start is None else subject.critic_start.path, rewards, policy, args)
    if (critic := load_critic(subject.policy.path, policy)) is None:
        raise ZooError(
            f"{subject.policy.name} has no critic in {CRITIC_DIR}/, and a trace shows its values: trace the run "
            "directory (`rlhf-zoo trace runs/RECIPE`), which has the critic, or train with `push_critic: true` in "
            "ppo.yaml, which publishes it."
        )
    return critic


def _read_state(path: Path) -> tuple[float, RunningScores]:
    """Reads β and the running score statistics of a checkpoint."""
    state = read_json(path)
    try:
        kl_coef, scores = float(state["kl_coef"]), RunningScores(*map(float, state.get("scores_seen", ())))
    except (KeyError, TypeError, ValueError) as error:
        raise ZooError(f"{path} was not written by PPO ({error}): use another checkpoint.") from error
    if not math.isfinite(kl_coef):
        raise ZooError(f"{path} has β = {kl_coef}: use another checkpoint.")
    return kl_coef, scores


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Loads a checkpoint's tokenizer.

    Args:
        checkpoint: The checkpoint, whose folder has the tokenizer.
    """
    return load_tokenizer(checkpoint.path, name=checkpoint.name)
