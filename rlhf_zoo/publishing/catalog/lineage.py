"""Finds the models and data that a checkpoint came from, as its rlhf_card.json names them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ZooError
from ...evaluation.reward_load_settings import reward_load_kwargs
from ...fileio import get_nested, hub_id, int_or_none, is_finite
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.pull import find_revision, split_revision
from ...hub.client.refs import Checkpoint, resolve
from ...hub.client.refusals import client_errors, reason
from ...modeling.model_files import ADAPTER_CONFIG
from ...runs.checkpoint_choice import resolve_model
from ...runs.models import folder_lineage
from ...runs.record import StageRecord
from ...runs.registry import REWARD_ROLES, is_ensemble_member, parent_title
from ...runs.settings.declared import default_of
from ...runs.settings.key_classes import is_revision
from ..cards.card import CARD_FILE, card_json
from ..cards.estimates import estimate_at
from ..cards.facts import StageFacts
from .card import Card, CardParent, clean, download_card
from .family import Member, Node, family_tree

_MAX_LISTED = 12  # revisions in a message


class PromptsLocation(NamedTuple):
    """Configuration, column and evaluation split of the prompts in a data set. None is the data set's default."""

    configuration: str | None
    column: str
    split: str | None


@dataclass(frozen=True)
class Lineage:
    """A PPO checkpoint with its SFT and reward models.

    Attributes:
        ppo: The PPO checkpoint; with `find_policy`, any policy.
        sft: The SFT model; with `find_policy`, the model that the policy is compared with.
        reward: The reward model; None if PPO was trained without one, or if `find_policy` left it out.
        card: The checkpoint's rlhf_card.json, {} without one. It is not trusted.
        other_rewards: The other reward models of an ensemble.
    """

    ppo: Checkpoint
    sft: Checkpoint
    reward: Checkpoint | None
    card: Mapping[str, Any] = field(default_factory=dict)
    other_rewards: tuple[Checkpoint, ...] = ()

    @property
    def rewards(self) -> tuple[Checkpoint, ...]:
        """All reward models."""
        return () if self.reward is None else (self.reward, *self.other_rewards)

    @property
    def prompts(self) -> list[str]:
        """The held-out prompts of its evaluation."""
        return Card(self.card).prompts

    @property
    def simulated(self) -> bool:
        """Whether a program simulates the human preferences."""
        return Card(self.card).simulated is True

    @property
    def kl(self) -> Mapping[str, Any] | None:
        """KL to SFT over held-out completions, in nats per completion: {value, ci95, n}; None if not measured."""
        return estimate_at(self.card, "evaluation", "ppo", "kl")

    @property
    def reward_loader(self) -> str | None:
        """The code that loads its reward model, as its card names it. Import it only for the user's own runs."""
        loader = get_nested(self.card, "settings", "reward_model_loader")
        return loader if isinstance(loader, str) else None

    @property
    def prompts_location(self) -> PromptsLocation:
        """Where PPO's prompts are in its data set, according to the card."""
        return prompts_location(self.card.get("settings"))

    def setting(self, key: str, default: float) -> float:
        """Returns a number from the training settings.

        Args:
            key: A key of PPO's settings, such as temperature.
            default: The value if the card has no settings, or something other than a number for the key. A key that
                the settings lack has PPO's own default.
        """
        settings = self.card.get("settings")
        if not isinstance(settings, Mapping):
            return default
        value = settings.get(key, default_of("ppo", key))
        return value if is_finite(value) else default

    @property
    def reward_load_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `load_reward` for its reward models, from the card."""
        return reward_load_kwargs(get_nested(self.card, "settings"))

    @property
    def truncation_fields(self) -> dict[str, Any]:
        """How training truncated completions, as fields of `Truncation`; {} if it did not truncate."""
        # The card is not trusted, so values of another type count as unset, as does a minimum of 0.
        keys = ("response_length_min", "truncate_text", "truncate_after")
        shortest, text, after = (get_nested(self.card, "settings", key) for key in keys)
        truncation = {
            "shortest": max(shortest, 1) if int_or_none(shortest) else None,
            "text": text if isinstance(text, str) and text else None,
            "after": max(int_or_none(after) or 0, 0),
        }
        return truncation if truncation["shortest"] or truncation["text"] else {}


def prompts_location(settings: object) -> PromptsLocation:
    """Returns where PPO's prompts are in its data set.

    Args:
        settings: The settings of a run or of a card, which are not trusted.
    """
    configuration = settings.get("dataset_config", "prompts") if isinstance(settings, Mapping) else "prompts"
    column, split = get_nested(settings, "columns", "prompt"), get_nested(settings, "dataset_test_split")
    return PromptsLocation(
        configuration if isinstance(configuration, str) else None,
        column if isinstance(column, str) else "prompt",
        split if isinstance(split, str) else None,
    )


def find_lineage(ppo: str, *, sft: str | None = None, reward: str | None = None, hub: Hub = DEFAULT_HUB) -> Lineage:
    """Downloads a PPO checkpoint and its SFT and reward models, at the commits that its card names.

    Args:
        ppo: NAMESPACE/NAME[@TAG] or a folder; for a run or its PPO stage, the checkpoint that the stage chose.
        sft: SFT model; None for the card's.
        reward: Reward model; None for those that the card names.
        hub: The Hub to fetch from.

    Raises:
        ZooError: A model cannot be fetched, the checkpoint is not a PPO model, or nothing names its SFT model.
    """
    return find_policy(ppo, against=sft, reward=reward, only_ppo=True, hub=hub)


def find_policy(
    policy: str,
    *,
    against: str | None = None,
    reward: str | None = None,
    without_reward: bool = False,
    only_ppo: bool = False,
    hub: Hub = DEFAULT_HUB,
) -> Lineage:
    """Downloads any policy, the model to compare it with, and its reward models.

    Args:
        policy: NAMESPACE/NAME[@TAG] or a folder; for a run or its PPO stage, the checkpoint that the stage chose.
        against: The model to compare it with; None for the card's SFT model.
        reward: Reward model; None for those that the card names.
        without_reward: Whether to leave out the reward models that the card names.
        only_ppo: Whether to refuse checkpoints of other stages.
        hub: The Hub to fetch from.

    Raises:
        ZooError: A model cannot be fetched, or nothing names the model to compare with.
    """
    checkpoint = resolve_model(_ppo_stage_of_run(policy), hub)
    card = _read_card(checkpoint)
    if only_ppo and not card.is_ppo:
        raise ZooError(
            f"{policy} is a checkpoint of the stage {clean(str(card['stage']))}, not of PPO: pass the PPO model that "
            "was trained from it."
        )
    flag = "--sft" if only_ppo else "--against"
    reference = resolve_model(against, hub) if against is not None else _parent(checkpoint, card, "sft", flag, hub)
    if reference is None:
        model_files = (checkpoint.path / name for name in ("config.json", ADAPTER_CONFIG))
        if checkpoint.repo is None and not any(path.is_file() for path in model_files):
            raise ZooError(
                f"{checkpoint.name} holds no model: pass a run, such as runs/tiny-world, a checkpoint's folder, or "
                "NAMESPACE/NAME."
            )
        raise ZooError(f"{checkpoint.name} does not name the SFT model it started from: name it with {flag}.")
    if without_reward or reward is not None:
        return Lineage(checkpoint, reference, None if reward is None else resolve_model(reward, hub), card)
    parents = (_parent(checkpoint, card, role, "--reward", hub) for role in REWARD_ROLES)
    rewards = [parent for parent in parents if parent is not None]
    return Lineage(checkpoint, reference, rewards[0] if rewards else None, card, tuple(rewards[1:]))


def _ppo_stage_of_run(policy: str) -> str:
    """Returns the folder of the PPO stage for the folder of a run, and every other name as it is."""
    folder = Path(policy)
    is_run = (folder / "ppo" / "run.json").is_file() and not (folder / "run.json").is_file()
    return str(folder / "ppo") if is_run else str(policy)


def _read_card(checkpoint: Checkpoint) -> Card:
    # The card of a run on this machine is in the folder of its stage, which is then the checkpoint's name.
    folders = (checkpoint.path,) if checkpoint.repo is not None else (checkpoint.path, Path(checkpoint.name))
    path = next((folder / CARD_FILE for folder in folders if (folder / CARD_FILE).is_file()), None)
    if path is None:
        return Card()
    card, problem = Card.parse(path.read_bytes())
    if problem is not None:
        raise ZooError(f"{checkpoint.name} {problem}: publish its card again.")
    return card


def _parent(child: Checkpoint, card: Card, role: str, flag: str, hub: Hub) -> Checkpoint | None:
    """Fetches the parent that the card of `child` names; None if it names none. Messages propose `flag`."""
    parent = get_nested(card, "parents", role)
    if not isinstance(parent, Mapping):
        return None
    repo, commit = hub_id(parent.get("repo")), parent.get("commit")
    title = parent_title(role, from_base=card.started_from_base)
    if repo is None:
        folder = None
        if child.hub is None:
            folder = _ensemble_member(child.path, parent.get("folder")) or _recorded_folder(child.path, role)
        if folder is not None:
            return Checkpoint(str(folder), folder)
        raise ZooError(f"The {title} of {child.name} was never published: name a copy of it with {flag}.")
    if commit is not None and not is_revision(commit):
        raise ZooError(f"The {title} of {child.name} has the invalid commit {commit!r:.80}: name another with {flag}.")
    name = f"{repo}@{commit}" if commit else repo
    try:
        return resolve(name, hub, is_repository=True)
    except ZooError as error:
        problem = str(error).rstrip(".")
        raise ZooError(
            f"The {title} of {child.name} cannot be fetched ({problem}): name another with {flag}."
        ) from error


def _recorded_folder(checkpoint: Path, role: str) -> Path | None:
    """Finds the local model, such as an unpacked GGUF file, that one of this user's own runs recorded as a parent."""
    stage = next((folder for folder in (checkpoint, checkpoint.parent) if (folder / "run.json").is_file()), None)
    # Another user's run must not make this command read a local path.
    if stage is None or not (record := StageRecord(stage)).is_own():
        return None
    parent = (record.read().get("parents") or {}).get(role) or {}
    if not parent.get("path") or not parent.get("files"):
        return None
    folder = Path(parent["path"])
    return folder if folder.is_dir() and folder_lineage(folder)["files"] == parent["files"] else None


def _ensemble_member(checkpoint: Path, folder: Any) -> Path | None:
    """Finds a reward model of a local ensemble in the run directory, next to the PPO stage whose card names it."""
    # The card may come from another user, so only folders of an ensemble are looked up.
    if not isinstance(folder, str) or not is_ensemble_member(folder):
        return None
    runs = checkpoint.resolve().parents[:2]
    checkpoints = (StageRecord(run / folder).chosen_checkpoint() for run in runs if (run / folder).is_dir())
    return next((path for path in checkpoints if path is not None), None)


def find_family(name: str, hub: Hub = DEFAULT_HUB) -> Node:
    """Builds the family tree of a model.

    Args:
        name: NAMESPACE/NAME[@REVISION], or a folder: a run directory, the directory of a stage, or a pulled model.
        hub: The Hub to fetch from.

    Returns:
        The root's node. Parents that cannot be read are marked in the tree.

    Raises:
        ZooError: The model itself cannot be read.
    """

    def read(entry: CardParent) -> Member:
        return _read_repository(entry, hub) if entry.folder is None else _read_folder(entry.folder)

    folder = Path(name)
    if folder.is_dir():
        return family_tree(CardParent("", "model", folder=_card_folder(folder)), read)
    repo, revision = split_revision(name)
    if hub_id(repo) is None:
        raise ZooError(f"{name!r} is neither a repository nor a folder: write NAMESPACE/NAME or NAMESPACE/NAME@TAG.")
    root = CardParent("", "model", repo, revision)
    root_member = read(root)  # an unreadable root is an error, but an unreadable parent is only marked
    if root_member.problem is not None:
        raise ZooError(f"{name} on {hub.name} {root_member.problem}: check the name, the network, --hub and the token.")
    return family_tree(root, lambda entry: root_member if entry is root else read(entry))


def _card_folder(folder: Path) -> Path:
    """Returns the first folder with a run.json or a card: this one, or that of its stage ppo, reward or sft."""
    for candidate in (folder, *(folder / stage for stage in ("ppo", "reward", "sft"))):
        if (candidate / "run.json").is_file() or (candidate / CARD_FILE).is_file():
            return candidate
    raise ZooError(f"{folder} holds neither a run nor {CARD_FILE}: pass runs/RECIPE, or a pulled folder.")


def _read_folder(folder: Path) -> Member:
    record = StageRecord(folder)
    if not record.run_file.is_file():
        card = _read_card(Checkpoint(str(folder), folder))
        return Member(card=card, parents=card.parents)
    record.check_own()
    document = record.read()
    if document.get("stage") == "data":
        return Member(commit=(document.get("repo") or {}).get("commit"))
    card = Card(card_json(StageFacts.read(folder, None)))
    repo = document.get("repo") or {}
    tags = tuple(tag for tag, commit in (repo.get("tags") or {}).items() if commit == repo.get("commit"))
    parents = tuple(_sibling(folder, document, parent) for parent in card.parents)
    return Member(commit=repo.get("commit"), tags=tags, card=card, parents=parents)


def _sibling(folder: Path, document: Mapping[str, Any], parent: CardParent) -> CardParent:
    """Replaces an unpublished parent by its stage's directory in the same run, if the fingerprints are equal."""
    lineage = document.get("dataset") if parent.role == "data" else (document.get("parents") or {}).get(parent.role)
    sibling = StageRecord(folder.parent / parent.role)
    if parent.repo is not None or not lineage or sibling.read().get("fingerprint") != lineage.get("fingerprint"):
        return parent
    return CardParent(parent.role, parent.kind, folder=sibling.path, title=parent.title)


def _read_repository(entry: CardParent, hub: Hub) -> Member:
    """Reads a repository on a Hub, or on the Hub's source if the Hub lacks it. A failure becomes the `problem`."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    api = hub.api()
    repo, revisions = entry.repo or "", []
    try:
        refs = api.list_repo_refs(repo, repo_type=entry.kind)
        revisions = [ref.name for ref in (*refs.branches, *refs.tags)]
        # The `commit` of a tree's root may be a branch or tag, or the short form of its name.
        revision = None if entry.commit is None else find_revision(entry.commit, revisions) or entry.commit
        info = api.repo_info(repo, revision=revision, repo_type=entry.kind)
        tags = tuple(sorted(ref.name for ref in refs.tags if ref.target_commit == info.sha))
        card = problem = None
        names = {file.rfilename for file in getattr(info, "siblings", None) or []}
        if entry.kind == "model" and CARD_FILE in names:
            card, problem = download_card(repo, str(info.sha), hub)
            # A step's card is made before the reward model's report exists, so take the report from the card of `best`.
            best_commit = {ref.name: ref.target_commit for ref in refs.tags}.get("best")
            if card.stage == "reward" and not card.get("reward_model") and best_commit is not None:
                card = _with_report(card, repo, best_commit, hub)
    except GatedRepoError:
        return Member(problem="is gated, and this token may not read it")
    except RepositoryNotFoundError:
        member = None if hub.source_hub is None else _read_repository(entry, hub.source_hub)
        if member is not None and member.problem is None:
            return member
        return Member(problem="does not exist, or this token may not read it")
    except RevisionNotFoundError:
        listed_names = ", ".join(revisions[:_MAX_LISTED])
        remainder = f" and {len(revisions) - _MAX_LISTED} more" if len(revisions) > _MAX_LISTED else ""
        return Member(problem=f"has no revision {entry.commit!r}; it has {listed_names}{remainder}")
    except client_errors() as error:
        return Member(problem=f"cannot be read ({reason(error)})")
    parents = card.parents if card is not None else ()
    return Member(info.sha, tags, card=card if problem is None else None, problem=problem, parents=parents)


def _with_report(card: Card, repo: str, best_commit: str, hub: Hub) -> Card:
    """Returns a reward model's card, with the report from the card of `best` if both describe the same checkpoint."""
    best_card, _ = download_card(repo, best_commit, hub)
    is_same = best_card and all(best_card.get(key) == card.get(key) for key in ("fingerprint", "step"))
    return Card({**card, "reward_model": best_card.get("reward_model")}) if is_same else card
