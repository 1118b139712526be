"""`rlhf-zoo trace`: finds a PPO checkpoint and what belongs to it, on the disk or on a Hub, and traces a prompt."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ZooError
from ...fileio import at, hub_id, read_json
from ...hub.client.claims import RECIPE_FILE
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.publish import tag_name
from ...hub.client.pull import split_revision
from ...hub.client.refs import Checkpoint, resolve
from ...hub.client.refusals import refusals_as
from ...hub.client.run_signature import FLAG
from ...modeling.chat import display_text
from ...modeling.devices import on_device
from ...modeling.integrity import check_integrity
from ...modeling.loading import load_tokenizer
from ...modeling.models import CRITIC_DIR, load_causal
from ...modeling.value_head import ValueHead
from ...plugins import REWARDS, load_object
from ...ppo.assembly import build_critic, build_rewards
from ...ppo.base import PPO_STATE
from ...ppo.config import PPOConfig
from ...ppo.kl_controller import RunningScores
from ...ppo.saved_critic import load_critic
from ...ppo.trace import Trace, trace
from ...publishing.catalog.lineage import find_lineage
from ...rewards import Rewards
from ...rewards.loading import load_reward_model
from ...rewards.model import same_tokenizer
from ...runs.checkpoint_choice import resolve_model
from ...runs.record import StageRecord, checkpoint_step
from ...runs.registry import REWARD_ROLES, STAGES, is_member
from ...runs.settings.key_classes import is_revision
from ...runs.settings.parse import recorded_settings
from ...runs.trusted_names import is_vouched
from ..stages.train import quiet

# What a trace reads of a run's settings.
TRAINER_KEYS = (
    "action_level", "cliprange", "cliprange_high", "cliprange_sequence", "critic", "dual_clip", "gamma", "kl_coef",
    "kl_estimator", "kl_in", "lam", "missing_eos_penalty", "missing_eos_score", "response_length",
    "response_length_min", "reward_ensemble", "reward_ensemble_lambda", "reward_label", "reward_output",
    "reward_pad_token",
    "reward_weights", "score_centering", "score_clip", "score_scaling", "stop_token", "stop_token_id", "temperature",
    "truncate_after", "truncate_text", "whiten_advantages", "whiten_rewards",
)  # fmt: skip
DATA_KEYS = ("reward_funcs", "reward_model_loader", "reward_model_path", "value_model_name_or_path")
_STEP_TAG = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class TracedPolicy:
    """A policy to trace and what belongs to it.

    old: what ρ is measured against, None for the reference; rewards: () where the run had no reward model. resolved:
    the run's settings, which stand in `where`. trusted: whether this user's rlhf-zoo wrote them, so that whatever they
    name may be imported; of any other `trusted_names` says what may be.
    """

    policy: Checkpoint
    reference: Checkpoint
    rewards: tuple[Checkpoint, ...]
    value: Checkpoint | None
    old: Checkpoint | None
    step: int | None
    resolved: Mapping[str, Any]
    where: Path
    trusted: bool

    @property
    def begins(self) -> bool:
        """Whether this is the policy that PPO starts from, whose critic is not on the disk yet."""
        return self.step == 0


# Finding


def find(
    name: str,
    *,
    step: int | None = None,
    revision: str | None = None,
    old: str | None = None,
    sft: str | None = None,
    reward: str | None = None,
    hub: Hub = CLIENT,
) -> TracedPolicy:
    """The PPO checkpoint that `name` means: a run directory, its stage, a checkpoint of it, or NAMESPACE/NAME[@TAG].

    step: None is the last one, 0 the policy that PPO began with. old: a step of the same run, a folder or a repository;
    None is the checkpoint before. sft and reward take the place of what the run names. Raises ZooError for what is not
    there and for what PPO did not train.
    """
    path = Path(name)
    if path.is_dir():
        if (path.parent / "run.json").is_file() and (path / PPO_STATE).is_file():
            if step is not None:
                raise ZooError(f"{name} is the checkpoint of one step, and --step is given too: give one of them.")
            path, step = path.parent, checkpoint_step(path)
        stage = path if (path / "run.json").is_file() else path / "ppo"
        if (stage / "run.json").is_file():
            if revision is not None:
                raise ZooError(f"{name} is a run directory, which has no revisions: give --step instead.")
            return _of_run(stage, step=step, old=old, sft=sft, reward=reward, hub=hub)
        if not (path / PPO_STATE).is_file():
            raise ZooError(f"{name} holds no run of PPO and no checkpoint of one: give runs/RECIPE, or train it first.")
    return _of_repository(name, step=step, revision=revision, old=old, sft=sft, reward=reward, hub=hub)


def _of_run(
    stage: Path, *, step: int | None, old: str | None, sft: str | None, reward: str | None, hub: Hub
) -> TracedPolicy:
    record = StageRecord(stage)
    document = record.read()
    if document.get("stage") != "ppo":
        raise ZooError(f"{stage} holds a run of the stage {document.get('stage')}, and PPO's is traced: give its own.")
    steps = {checkpoint_step(path): str(path) for path in record.checkpoints()}
    step = max(steps, default=0) if step is None else step
    name = _at(steps, step, str(stage)) if step else None
    older = _older(steps, step, old, str(stage))
    reference = _named(sft, hub) if sft is not None else _parent(stage, document, "sft", hub)
    known = document.get("parents") or {}
    scorers = (
        [_named(reward, hub)]
        if reward is not None
        else [_parent(stage, document, role, hub) for role in REWARD_ROLES if known.get(role)]
    )
    return TracedPolicy(
        policy=reference if name is None else _named(name, hub),
        reference=reference,
        rewards=tuple(scorers),
        value=_parent(stage, document, "value", hub) if known.get("value") and not step else None,
        old=None if older is None else _named(older, hub),
        step=step,
        resolved=document.get("resolved") or {},
        where=record.run_file,
        trusted=record.is_own(),
    )


def _of_repository(
    name: str,
    *,
    step: int | None,
    revision: str | None,
    old: str | None,
    sft: str | None,
    reward: str | None,
    hub: Hub,
) -> TracedPolicy:
    local = Path(name).is_dir()
    repo, at = (name, None) if local else split_revision(name)
    asked = [given for given in (at, revision, tag_name(step) if step else None) if given is not None]
    if len(asked) > (0 if local else 1):
        raise ZooError(
            f"{name} is a checkpoint of one step: leave --revision and --step out."
            if local
            else f"{name} is asked for at more than one revision: give one of @TAG, --revision and --step."
        )
    whole = f"{repo}@{asked[0]}" if asked else repo
    subject = _named(whole, hub, own=True)
    path = subject.path
    for needed in (PPO_STATE, RECIPE_FILE):
        if not (path / needed).is_file():
            raise ZooError(
                f"{name} is no PPO policy of rlhf-zoo (it holds no {needed}): give a run directory of PPO, or the "
                "repository that one was published in, such as NAMESPACE/RECIPE-ppo."
            )
    lineage = find_lineage(whole, sft=sft, reward=reward, hub=hub)
    found = lineage.card.get("step")
    found = found if isinstance(found, int) else 0
    steps = {} if local else {one: f"{repo}@{tag}" for one, tag in _tags(repo, hub).items()}
    begins = step == 0
    older = _older(steps, 0 if begins else found, old, repo)
    return TracedPolicy(
        policy=lineage.sft if begins else subject,
        reference=lineage.sft,
        rewards=lineage.rewards,
        value=_published_value(lineage.card, hub) if begins else None,
        old=None if older is None else _named(older, hub),
        step=0 if begins else found or None,
        resolved=read_json(path / RECIPE_FILE),
        where=path / RECIPE_FILE,
        trusted=False,
    )


def _published_value(card: Mapping[str, Any], hub: Hub) -> Checkpoint | None:
    """Where the critic began, by a card that names a model for it, at the commit that it was trained from."""
    parent = at(card, "parents", "value") or {}
    repo, commit = (parent.get(key) if isinstance(parent, dict) else None for key in ("repo", "commit"))
    return resolve(f"{repo}@{commit}", hub, published=True) if hub_id(repo) and is_revision(commit) else None


def _tags(repo: str, hub: Hub) -> dict[int, str]:
    """Step -> tag of the checkpoints that a repository has."""
    with refusals_as(f"The tags of {repo} cannot be read", "try again when the Hub answers."):
        tags = [ref.name for ref in hub.api().list_repo_refs(repo).tags]
    return {int(match[1]): tag for tag in tags if (match := _STEP_TAG.fullmatch(tag))}


def _named(name: str, hub: Hub, *, own: bool = False) -> Checkpoint:
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        found = resolve_model(name, hub, own=own)
    except ZooError as error:
        if not isinstance(error.__cause__, (HFValidationError, RepositoryNotFoundError)):
            raise
        raise ZooError(
            f"{name} is no run directory, and {hub.name} has no repository of this name that this token may "
            "read: give runs/RECIPE or NAMESPACE/NAME."
        ) from error
    if found.hub is None:
        check_integrity(found.path)
    return found


def _at(steps: Mapping[int, str], step: int, where: str) -> str:
    if step not in steps:
        listed = ", ".join(map(str, sorted(steps))) or "none"
        raise ZooError(f"{where} has no checkpoint of step {step}: it has {listed}, and 0 is where PPO began.")
    return steps[step]


def _older(steps: Mapping[int, str], step: int, old: str | None, where: str) -> str | None:
    """The name of π_old: what `old` says, else the checkpoint before `step`; None for the reference."""
    if old is None:
        return steps[max(before)] if (before := [one for one in steps if one < step]) else None
    if old.isdecimal():
        return _at(steps, int(old), where) if int(old) else None
    return old


def _parent(stage: Path, document: Mapping[str, Any], role: str, hub: Hub) -> Checkpoint:
    """What PPO began with: beside it, where it lay, or on the Hub at the commit that run.json names."""
    lineage = (document.get("parents") or {}).get(role) or {}
    path, repo, commit = (lineage.get(key) for key in ("path", "repo", "commit"))
    named = (document.get("resolved") or {}).get("value_model_name_or_path")
    role = named if role == "value" and named in STAGES else role  # a stage's model
    if path:
        member = Path(path).parent.as_posix()
        home = stage.parent / (member if is_member(member) else role)
        # Trained again since, it is another model under the same name.
        same = StageRecord(home).read().get("fingerprint") == lineage.get("fingerprint")
        for folder in ([home / Path(path).name] if same else []) + [Path(path)]:
            if folder.is_dir():
                return _named(str(folder), hub)
    if repo and commit:
        return resolve(f"{repo}@{commit}", hub, published=True)
    raise ZooError(
        f"The {role} model that {stage} began with is neither beside it nor published: name it with "
        f"--{'reward' if role in REWARD_ROLES else role}."
    )


# Tracing


def trace_checkpoint(
    subject: TracedPolicy,
    prompt: str,
    *,
    seed: int = 1,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    columns: Mapping[str, Any] | None = None,
    reward_funcs: Sequence[str] = (),
) -> Trace:
    """Loads what `subject` names and traces a completion of `prompt`; None takes the run's own setting.

    columns: the prompt's other columns, for reward functions. reward_funcs: those of a download that may be imported.
    Raises ZooError for what cannot be loaded or does not belong together.
    """
    quiet()
    where = str(subject.where)
    data = recorded_settings(subject.resolved, "ppo", DATA_KEYS, where=where)
    settings = recorded_settings(subject.resolved, "ppo", TRAINER_KEYS, where=where)
    functions, weights = _functions(subject, data, settings["reward_weights"], reward_funcs)
    settings |= {"reward_weights": weights}
    if len(subject.rewards) < 2:  # --reward may name a single one in place of the run's
        settings |= {"reward_ensemble": None, "reward_ensemble_lambda": None}
    settings |= {} if temperature is None else {"temperature": temperature}
    settings |= {} if max_new_tokens is None else {"response_length": max_new_tokens}
    args = PPOConfig(output_dir=str(subject.policy.path), report_to="none", **settings)
    tokenizer = tokenizer_of(subject.policy)
    models = {"policy": subject.policy, "reference": subject.reference}
    models |= {"old": subject.old} if subject.old is not None else {}
    for one in models.values():
        if not same_tokenizer(tokenizer, tokenizer_of(one)):
            raise ZooError(
                f"{one.name} has another tokenizer than {subject.policy.name}, so its log-probabilities are of other "
                "tokens: give a checkpoint of the same run."
            )
    loaded = {role: load_causal(one.path) for role, one in models.items()}
    scorers = [_scorer(subject, one, data["reward_model_loader"], args) for one in subject.rewards]
    rewards = build_rewards(scorers, functions, args, tokenizer, [tokenizer_of(one) for one in subject.rewards])
    assert rewards is not None
    critic = _critic(subject, data["value_model_name_or_path"], loaded["policy"], rewards, args)
    for model in (*loaded.values(), critic, *(reward.model for reward in rewards.models)):
        on_device(model)
    kl_coef, seen = (args.kl_coef, RunningScores()) if subject.begins else _state(subject.policy.path / PPO_STATE)
    return trace(
        prompt,
        **loaded,
        critic=critic,
        rewards=rewards,
        tokenizer=tokenizer,
        args=args,
        kl_coef=kl_coef,
        scores_seen=seen,
        columns=columns,
        seed=seed,
    )


def _scorer(subject: TracedPolicy, reward: Checkpoint, loader: str | None, args: PPOConfig) -> PreTrainedModel:
    """The reward model. Raises ZooError where a download names the code that loads it."""
    if loader is not None and not subject.trusted:
        raise ZooError(
            f"{subject.policy.name} was scored by a reward model that {loader} loads, and no code that a download "
            f"names is imported: trace a run directory of your own, add {FLAG} if the directory is a run that you "
            "trust, or trace a policy with another reward model."
        )
    return load_reward_model(reward.path, label=args.reward_label, loader=loader)


def _functions(
    subject: TracedPolicy, data: Mapping[str, Any], weights: list[float] | None, allowed: Sequence[str]
) -> tuple[list[Any], list[float]]:
    """The reward functions and the weights of all rewards.

    A download's are imported only where `trusted_names` vouches for them or the user names them; those that it pays
    nothing for are left out otherwise.
    """
    names = data["reward_funcs"] or []
    model = [] if data["reward_model_path"] is None else [data["reward_model_path"]]
    if subject.rewards and not model:
        raise ZooError(f"{subject.policy.name} was trained without a reward model: leave --reward out.")
    if not subject.rewards and model:
        raise ZooError(f"{subject.policy.name} does not say which reward model scored it: name it with --reward.")
    count = len(model) + len(names)
    weights = [1.0] * count if weights is None else weights
    if len(weights) != count:
        raise ZooError(f"{subject.where} gives {len(weights)} reward_weights for {count} rewards: take another run.")
    if strange := [name for name in allowed if name not in names]:
        raise ZooError(
            f"--reward_funcs names {strange[0]}, and {subject.policy.name} was rewarded by "
            f"{', '.join(names) or 'none'}: write one of these, or leave it out."
        )
    if subject.trusted:
        return [load_object(name, group=REWARDS) for name in names], weights
    by_name = dict(zip(names, weights[len(model) :], strict=True))
    chosen = [name for name in names if name in allowed or is_vouched(name, REWARDS)]
    if missing := [name for name, weight in by_name.items() if weight and name not in chosen]:
        ours = f", or {FLAG} for all that this run names," if subject.where.name == "run.json" else ""
        raise ZooError(
            f"{subject.policy.name} was rewarded by {', '.join(missing)} too, and no code that a download names is "
            f"imported unasked: add --reward_funcs {shlex.quote(missing[0])}{ours} if you trust it."
        )
    return [load_object(name, group=REWARDS) for name in chosen], weights[: len(model)] + [by_name[n] for n in chosen]


def _critic(
    subject: TracedPolicy, value_model: str | None, policy: PreTrainedModel, rewards: Rewards, args: PPOConfig
) -> PreTrainedModel | ValueHead:
    """The critic that was saved with the policy; at the beginning, what PPO makes one of."""
    if subject.begins:
        if value_model is not None and subject.value is None:
            raise ZooError(
                f"{subject.policy.name} says that its critic began from {value_model}, and at which commit is not "
                "known: trace a later step."
            )
        return build_critic(None if subject.value is None else subject.value.path, rewards, policy, args)
    if (critic := load_critic(subject.policy.path, policy)) is None:
        raise ZooError(
            f"{subject.policy.name} has no critic in {CRITIC_DIR}/, and a trace shows its values: trace the run "
            "directory (`rlhf-zoo trace runs/RECIPE`), which keeps the critic, or train with `push_critic: true` in "
            "ppo.yaml, which publishes it."
        )
    return critic


def _state(path: Path) -> tuple[float, RunningScores]:
    """β and the running score statistics that a checkpoint was left with."""
    state = read_json(path)
    try:
        kl_coef, seen = float(state["kl_coef"]), RunningScores(*map(float, state.get("scores_seen", ())))
    except (KeyError, TypeError, ValueError) as error:
        raise ZooError(f"{path} is not what PPO writes there ({error}): take another checkpoint.") from error
    if not math.isfinite(kl_coef):
        raise ZooError(f"{path} says that β is {kl_coef}: take another checkpoint.")
    return kl_coef, seen


def tokenizer_of(one: Checkpoint) -> PreTrainedTokenizerBase:
    return load_tokenizer(one.path, name=one.name)


# Showing


def document(found: Trace, subject: TracedPolicy) -> dict[str, Any]:
    """What --json prints: prompt, completion, tokens, totals, and which checkpoints they are of."""
    roles = {"policy": subject.policy, "reference": subject.reference, "old": subject.old, "reward": None}
    roles |= dict(zip(REWARD_ROLES, subject.rewards, strict=False))
    names = {role: None if one is None else one.name for role, one in roles.items()}
    return {**found.to_json(), "models": {**names, "step": subject.step}}


def show(found: Trace, subject: TracedPolicy, console: Any) -> None:
    """Prints the table of tokens and the totals. What models and users wrote is never read as markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    old = subject.old.name if subject.old is not None else "the reference"
    console.print(Text(f"{subject.policy.name}{'' if subject.step is None else f', step {subject.step}'}"))
    console.print(Text(f"against {subject.reference.name} (π_ref) and {old} (π_old)"))
    console.print(Text(f"{display_text(found.prompt)!r} → {found.completion!r}"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("token", overflow="fold")
    for name in ("log π", "log π_ref", "KL k1", "r", "V", "δ", "Â", "ρ", "clip"):
        table.add_column(name, justify="right", no_wrap=True)
    for token in found.tokens:
        numbers = (
            token.logprob, token.ref_logprob, token.kl, token.reward, token.value, token.delta, token.advantage,
            token.ratio,
        )  # fmt: skip
        clip = "" if token.clipped is None else "yes" if token.clipped else "no"
        # repr shows spaces, and leaves a terminal no control character to obey.
        table.add_row(Text(repr(token.token)), *("" if x is None else f"{x:.3f}" for x in numbers), clip)
    console.print(table)
    for line in _totals(found):
        console.print(Text(line))


def _totals(found: Trace) -> list[str]:
    low, high = found.cliprange
    parts = ", ".join(
        f"{name} {'does not apply' if score is None else f'{score:.3f}'}" for name, score in found.scores.items()
    )
    where = "in the reward" if found.kl_in == "reward" else "in the loss, so r holds none of it"
    action = "each token is an action" if found.action_level == "token" else "the completion is one action"
    end = "ended by itself" if found.ended else f"did not end within {found.length}"
    return [
        f"score {found.score:.3f} ({parts}), paid as {found.shaped_score:.3f} by its last token",
        f"ΣKL {found.kl:.3f} nats, β {found.kl_coef:g} ({found.kl_estimator}, {where})",
        f"{found.length} tokens, {end}; temperature {found.temperature:g}, seed {found.seed}",
        f"∏ρ {found.ratio:.3f}, clipped outside [{low:g}, {high:g}]; {action}; γ {found.gamma:g}, λ {found.lam:g}",
        *([found.whitening] if found.whitening else []),
    ]
