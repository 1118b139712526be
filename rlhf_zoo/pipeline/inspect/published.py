"""A published checkpoint as a recipe that can be run again. What its files say is a stranger's word: see `recipe_of`.

recipe.json holds what a stage's run was asked for (its own keys, those of recipe.yaml under `recipe`), rlhf_card.json
the commits that it started from.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import hub_id, read_json
from ...hub.client.claims import RECIPE_FILE
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.pull import split_revision
from ...hub.client.refs import resolve
from ...publishing.cards.card import CARD_FILE
from ...publishing.catalog.card import Card
from ...runs.data.layout import CUTS, HOLDS_OUT
from ...runs.parents import reward_roles
from ...runs.recipe import Recipe, is_repository_name
from ...runs.record import StageRecord
from ...runs.registry import STAGES, parent_title
from ...runs.settings.key_classes import (
    GROUPS,
    SHARED_KEYS,
    STAGE_KEYS,
    Kind,
    check_architecture,
    check_key,
    check_repository,
    machine_keys,
)
from ...runs.settings.parse import BESIDE_KEYS, RecipeConfig, stage_keys
from ...runs.trusted_names import check_object

#: Of the machine or account that ran it: no result hangs on it, and it is left out.
NOT_OBEYED = machine_keys()
# Under `ppo`: how a reward model's samples were sampled, and which prompts PPO held out of earlier stages.
_OF_PPO = ("response_length", "temperature", *CUTS, *HOLDS_OUT)
_MODELS = ("model_name_or_path", "reward_model_path", "value_model_name_or_path")
_COMMIT = re.compile(r"[0-9a-f]{40}")
RECIPE_FIELDS = frozenset(RecipeConfig.__dataclass_fields__)
ALLOW = "--allow_import"


@dataclass(frozen=True)
class Published:
    """A checkpoint as it was fetched: name as the user wrote it, folder, commit (None: a folder), and its files."""

    name: str
    folder: Path
    commit: str | None
    card: Mapping[str, Any]
    resolved: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    @property
    def stage(self) -> str:
        return self.card["stage"]

    @property
    def step(self) -> int:
        return self.card["step"]

    @property
    def versions(self) -> Mapping[str, Any]:
        """What its card says that it ran with."""
        found = self.card.get("versions")
        return found if isinstance(found, Mapping) else {}

    @property
    def title(self) -> str:
        """For the name of a folder: NAMESPACE--NAME@REVISION."""
        if self.commit is None:
            return self.folder.resolve().name
        repo, revision = split_revision(self.name)
        return f"{repo.replace('/', '--')}@{(revision or self.commit[:10]).replace('/', '-')}"

    @property
    def shared(self) -> Mapping[str, Any]:
        return self.resolved["recipe"]

    @property
    def where(self) -> str:
        """What holds its settings, for messages."""
        return f"{RECIPE_FILE} of {self.name}"

    def parent(self, role: str) -> tuple[str, str] | None:
        """(repository, commit) of a parent, where the card names both."""
        found = self.card["parents"].get(role)
        found = found if isinstance(found, Mapping) else {}
        repo, commit = hub_id(found.get("repo")), found.get("commit")
        return (repo, commit) if repo and isinstance(commit, str) and _COMMIT.fullmatch(commit) else None


def fetch(name: str, hub: Hub = CLIENT) -> Published:
    """NAMESPACE/NAME[@REVISION] or a folder that was pulled. Raises ZooError where a file that is needed is missing."""
    found = resolve(name, hub, but=())
    folder = found.path
    for needed in (CARD_FILE, RECIPE_FILE, "metrics.jsonl"):
        if not (folder / needed).is_file():
            raise ZooError(
                f"{name} holds no {needed}, so it cannot be made again: give a checkpoint that rlhf-zoo published."
            )
    card, resolved = read_json(folder / CARD_FILE), read_json(folder / RECIPE_FILE)
    if not isinstance(card, dict) or not isinstance(card.get("parents"), dict) or card.get("stage") not in STAGES:
        raise ZooError(f"{CARD_FILE} of {name} names no stage and no parents: publish it again with this rlhf-zoo.")
    if not isinstance(resolved, dict) or not isinstance(resolved.get("recipe"), dict):
        raise ZooError(f"{RECIPE_FILE} of {name} holds no settings of a stage: publish it again with this rlhf-zoo.")
    if card.get("merged"):
        raise ZooError(f"{name} is an adapter merged into its base, which no training saved: give the adapter's tag.")
    if type(card.get("step")) is not int or card["step"] < 1:
        raise ZooError(f"{CARD_FILE} of {name} does not say its step: publish it again with this rlhf-zoo.")
    if not is_repository_name(str(card.get("recipe"))):
        raise ZooError(f"{CARD_FILE} of {name} names no recipe: publish it again with this rlhf-zoo.")
    return Published(name, folder, found.commit, card, resolved, StageRecord(folder).metrics())


@dataclass(frozen=True)
class _ReadFrom(Recipe):
    """A recipe that was read from one file, which is what messages name."""

    def source(self, stage: str) -> Path:
        return self.folder


def recipe_of(published: Published, allowed: Sequence[str] = ()) -> tuple[Recipe, dict[str, str]]:
    """The recipe that its recipe.json says, and stage -> REPOSITORY@COMMIT for the stages before it.

    allowed: names of Python objects outside this package, and registered by no package, that may be imported.

    recipe.json may be a stranger's, so it may choose numbers, and among what is installed: `key_classes` says of
    each key what it may hold, and which are left out or refused. Raises ZooError for what it may not hold, for names of
    Python objects that neither `trusted_names` nor `allowed` vouches for, and for a parent that was never published.
    """
    own = {key: value for key, value in published.resolved.items() if key not in (*BESIDE_KEYS, *NOT_OBEYED)}
    _check_keys(published, own)
    _check_names(published, allowed)
    stages: dict[str, dict[str, Any]] = {published.stage: {**own, "report_to": []}}
    pinned: dict[str, str] = {}
    if published.stage == "reward":
        if published.card.get("round") is not None:
            raise ZooError(
                f"{published.name} learned also from samples of an earlier round's PPO policy, so that it is made "
                "again with the rounds before it alone: `rlhf-zoo run RECIPE --rounds N`, as its card says."
            )
        pinned["sft"] = _pinned(published, "sft")
        stages["sft"] = {}
    elif published.stage == "ppo":
        models = {"sft": own.get("model_name_or_path") or "sft", **reward_roles(own.get("reward_model_path", "reward"))}
        found = {role: _pinned(published, role) for role in models}
        pinned = {role: at for role, at in found.items() if models[role] == role}
        stages |= {role: {} for role in pinned}
        begun = {role: role if role in pinned else at for role, at in found.items()}
        paid = [name for role, name in begun.items() if role != "sft"]
        if "sft" not in pinned:
            stages["ppo"] = {**stages["ppo"], "model_name_or_path": begun["sft"]}
        if paid and paid != ["reward"]:
            stages["ppo"] = {**stages["ppo"], "reward_model_path": paid if len(paid) > 1 else paid[0]}
    if published.stage != "ppo" and isinstance(of_ppo := published.resolved.get("ppo"), Mapping):
        stages["ppo"] = {key: of_ppo[key] for key in _OF_PPO if key in of_ppo}
        if of_ppo.get("held_out_share") is not None:  # beside which no split is taken
            stages["ppo"] |= {"dataset_test_split": None}
        if (data := of_ppo.get("dataset_name")) is not None:
            _check_data(published, "dataset_name of the stage ppo", data)
    stages = {stage: stages[stage] for stage in STAGES if stage in stages}
    shared = {key: value for key, value in published.shared.items() if key not in ("description", "evaluation")}
    shared["description"] = f"{published.name}, made again."
    if isinstance(asked := published.resolved.get("evaluation"), Mapping) and "dataset_test_split" in asked:
        shared["evaluation"] = {"dataset_test_split": asked["dataset_test_split"]}
    return _ReadFrom(published.card["recipe"], Path(published.where), shared, stages), pinned


def comparable(resolved: Mapping[str, Any], like: Published) -> dict[str, Any]:
    """The settings of a run in the terms of the published ones: names without commits, nothing that is not obeyed."""
    found = {key: value for key, value in resolved.items() if key not in NOT_OBEYED}
    for key in _MODELS:
        if key in found and found[key] != like.resolved.get(key) and "@" in str(found[key]):
            found[key] = like.resolved.get(key)
    return found


def named_objects(published: Published) -> Iterator[tuple[str, str, str]]:
    """(key, name, group of entry points) of every Python object that the settings name."""
    for kinds, settings in ((SHARED_KEYS, published.shared), (STAGE_KEYS, published.resolved)):
        for key, kind in kinds.items():
            if kind is Kind.OBJECT and (value := settings.get(key)) is not None:
                for name in value if isinstance(value, list) else [value]:
                    yield key, name if isinstance(name, str) else repr(name), GROUPS[key]


def _check_keys(published: Published, own: Mapping[str, Any]) -> None:
    """Raises ZooError for a key of the stage or of recipe.yaml that a download may not set, or not to that value.

    A key that neither takes is told by `stage_settings`, with the others of its kind.
    """
    taken = stage_keys(published.stage)
    for key, value in own.items():
        if key in taken or key in STAGE_KEYS:
            check_key(key, value, STAGE_KEYS, where=published.where)
    for key, value in published.shared.items():
        if key in RECIPE_FIELDS or key in SHARED_KEYS:
            check_key(key, value, SHARED_KEYS, where=published.where)
    check_architecture(published.shared.get("architecture"), where=published.where)


def _check_names(published: Published, allowed: Sequence[str]) -> None:
    named = list(named_objects(published))
    if strange := [name for name in allowed if name not in [name for _, name, _ in named]]:
        listed = ", ".join(name for _, name, _ in named) or "nothing"
        raise ZooError(f"{ALLOW} names {strange[0]}, and {published.where} names {listed}: leave it out.")
    for key, name, group in named:
        check_object(name, group, key=key, where=published.where, flag=ALLOW, allowed=allowed)
    for key in _MODELS:
        value = published.resolved.get(key)
        for model in map(str, value if isinstance(value, list) else [value] if value is not None else []):
            if model not in STAGES:
                check_repository(model, key=key, where=published.where)
                if revision := model.partition("@")[2]:
                    check_key(key, revision, {key: Kind.REVISION}, where=published.where)
    if (own := published.resolved.get("dataset_name")) is not None:
        _check_data(published, f"dataset_name of the stage {published.stage}", own)
    data = published.shared.get("dataset_name")
    if data is not None and published.shared.get("corpus") is None:
        _check_data(published, "dataset_name", data)
    elif hub_id(data) is not None:  # else a folder of the publisher's: `reproduce` takes the published data instead
        _check_namespace(published, "dataset_name", data)


def _check_data(published: Published, key: str, name: Any) -> None:
    check_repository(name, key=key, where=published.where)
    _check_namespace(published, key, name)


def _check_namespace(published: Published, key: str, name: Any) -> None:
    """Without a namespace the name of a data set could be that of a loader of `datasets`, such as json."""
    if "/" not in str(name):
        raise ZooError(f"{published.where} says that {key} is {name!r}, without a namespace: it is not loaded.")


def _pinned(published: Published, role: str) -> str:
    at = published.parent(role)
    if at is None:
        title = parent_title(role, on_base=Card(published.card).on_base)
        raise ZooError(
            f"The {title} of {published.name} was never published, or its card does not say at which commit: it cannot "
            "be made again."
        )
    return "@".join(at)
