"""Turns a published checkpoint, whose files are not trusted, into a recipe that can be run again.

recipe.json holds the keys of the stage, and under `recipe` the keys of recipe.yaml. rlhf_card.json holds the commits
that the run started from.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import hub_id, read_json
from ...hub.client.claims import RECIPE_FILE
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.pull import split_revision
from ...hub.client.refs import resolve
from ...publishing.cards.card import CARD_FILE
from ...publishing.catalog.card import Card
from ...runs.judge import SAMPLING_KEYS
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
from ...runs.settings.parse import NON_STAGE_KEYS, RecipeConfig, stage_keys
from ...runs.trusted_names import check_object

#: Keys for the machine or account that ran the stage. They are ignored, because they do not affect results.
IGNORED_KEYS = machine_keys()
_MODEL_KEYS = ("model_name_or_path", "reward_model_path", "value_model_name_or_path")
_COMMIT = re.compile(r"[0-9a-f]{40}")
RECIPE_FIELDS = frozenset(RecipeConfig.__dataclass_fields__)
ALLOW_FLAG = "--allow_import"


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A published checkpoint that was fetched.

    Attributes:
        name: Name of the checkpoint, as the user wrote it.
        folder: The folder with the checkpoint's files.
        commit: The commit of the repository; None for a folder.
        card: Content of rlhf_card.json.
        settings: Content of recipe.json.
        metrics: The rows of metrics.jsonl.
    """

    name: str
    folder: Path
    commit: str | None
    card: Mapping[str, Any]
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    @property
    def stage(self) -> str:
        return self.card["stage"]

    @property
    def step(self) -> int:
        return self.card["step"]

    @property
    def versions(self) -> Mapping[str, Any]:
        """The versions that the card records."""
        versions = self.card.get("versions")
        return versions if isinstance(versions, Mapping) else {}

    @property
    def folder_name(self) -> str:
        """A folder name for this checkpoint: NAMESPACE--NAME@REVISION, or the name of the pulled folder."""
        if self.commit is None:
            return self.folder.resolve().name
        repo, revision = split_revision(self.name)
        return f"{repo.replace('/', '--')}@{(revision or self.commit[:10]).replace('/', '-')}"

    @property
    def shared(self) -> Mapping[str, Any]:
        return self.settings["recipe"]

    @property
    def where(self) -> str:
        """The file with the settings, for messages."""
        return f"{RECIPE_FILE} of {self.name}"

    def parent(self, role: str) -> tuple[str, str] | None:
        """Returns the repository and commit of a parent.

        Args:
            role: Role of the parent, such as sft, reward, value or data.

        Returns:
            (repository, commit); None if the card does not name both.
        """
        parent = self.card["parents"].get(role)
        parent = parent if isinstance(parent, Mapping) else {}
        repo, commit = hub_id(parent.get("repo")), parent.get("commit")
        return (repo, commit) if repo and isinstance(commit, str) and _COMMIT.fullmatch(commit) else None


def fetch_published(name: str, hub: Hub = DEFAULT_HUB) -> PublishedCheckpoint:
    """Fetches a published checkpoint.

    Args:
        name: NAMESPACE/NAME[@REVISION], or a folder that was pulled.
        hub: The Hub that has the repository.

    Raises:
        ZooError: A file is missing, or does not describe a checkpoint that rlhf-zoo published.
    """
    checkpoint = resolve(name, hub, ignore=())
    folder = checkpoint.path
    for file in (CARD_FILE, RECIPE_FILE, "metrics.jsonl"):
        if not (folder / file).is_file():
            raise ZooError(
                f"{name} has no {file}, so it cannot be reproduced: choose a checkpoint that rlhf-zoo published."
            )
    card, settings = read_json(folder / CARD_FILE), read_json(folder / RECIPE_FILE)
    if not isinstance(card, dict) or not isinstance(card.get("parents"), dict) or str(card.get("stage")) not in STAGES:
        raise ZooError(
            f"{CARD_FILE} of {name} does not name its stage and parents: publish it again with this rlhf-zoo."
        )
    if not isinstance(settings, dict) or not isinstance(settings.get("recipe"), dict):
        raise ZooError(
            f"{RECIPE_FILE} of {name} does not hold a stage's settings: publish it again with this rlhf-zoo."
        )
    if card.get("merged"):
        raise ZooError(f"{name} is a merged model, which was not trained in this form: name the tag of its adapter.")
    if type(card.get("step")) is not int or card["step"] < 1:
        raise ZooError(f"{CARD_FILE} of {name} does not name its step: publish it again with this rlhf-zoo.")
    if not is_repository_name(str(card.get("recipe"))):
        raise ZooError(f"{CARD_FILE} of {name} does not name its recipe: publish it again with this rlhf-zoo.")
    return PublishedCheckpoint(
        checkpoint.name, folder, checkpoint.commit, card, settings, StageRecord(folder).metrics()
    )


@dataclass(frozen=True)
class _OneFileRecipe(Recipe):
    """A recipe whose stages all come from a single file. For messages, `folder` holds the name of this file."""

    def yaml_file(self, stage: str) -> Path:
        return self.folder


def recipe_of(published: PublishedCheckpoint, allowed_names: Sequence[str] = ()) -> tuple[Recipe, dict[str, str]]:
    """Rebuilds the recipe of a published checkpoint.

    recipe.json is not trusted, so it may only set numbers, name repositories, and choose among installed code.
    `runs.settings.key_classes` defines what each key may hold, and which keys are ignored or refused.

    Args:
        published: The checkpoint.
        allowed_names: Names of Python objects that the user allows to be imported, although they are not known to be
            harmless.

    Returns:
        The recipe, and REPOSITORY@COMMIT for each earlier stage.

    Raises:
        ZooError: A key has a value that a download may not set, a Python object is not trusted, or a parent was never
            published.
    """
    stage_values = {
        key: value for key, value in published.settings.items() if key not in (*NON_STAGE_KEYS, *IGNORED_KEYS)
    }
    _check_keys(published, stage_values)
    _check_names(published, allowed_names)
    stages: dict[str, dict[str, Any]] = {published.stage: {**stage_values, "report_to": []}}
    pinned_by_stage: dict[str, str] = {}
    if published.stage == "reward":
        if published.card.get("round") is not None:
            raise ZooError(
                f"{published.name} also learned from samples of an earlier round's PPO policy, so it can only be "
                "reproduced with the rounds before it: `rlhf-zoo run RECIPE --rounds N`, as its card says."
            )
        pinned_by_stage["sft"] = _pinned_parent(published, "sft")
        stages["sft"] = {}
    elif published.stage == "ppo":
        published_names = {
            "sft": stage_values.get("model_name_or_path") or "sft",
            **reward_roles(stage_values.get("reward_model_path", "reward")),
        }
        pinned_by_role = {role: _pinned_parent(published, role) for role in published_names}
        # A model that a stage of the same recipe trained keeps the stage's name; others are named with their commits.
        pinned_by_stage = {role: pinned for role, pinned in pinned_by_role.items() if published_names[role] == role}
        stages |= {role: {} for role in pinned_by_stage}
        recipe_names = {role: role if role in pinned_by_stage else pinned for role, pinned in pinned_by_role.items()}
        reward_names = [name for role, name in recipe_names.items() if role != "sft"]
        if "sft" not in pinned_by_stage:
            stages["ppo"]["model_name_or_path"] = recipe_names["sft"]
        if reward_names and reward_names != ["reward"]:
            stages["ppo"]["reward_model_path"] = reward_names if len(reward_names) > 1 else reward_names[0]
    if published.stage != "ppo" and isinstance(ppo := published.settings.get("ppo"), Mapping):
        stages["ppo"] = {key: ppo[key] for key in SAMPLING_KEYS if key in ppo}
        if ppo.get("held_out_share") is not None:  # this key excludes a test split
            stages["ppo"] |= {"dataset_test_split": None}
        if (data := ppo.get("dataset_name")) is not None:
            _check_data(published, "dataset_name of the stage ppo", data)
    stages = {stage: stages[stage] for stage in STAGES if stage in stages}
    shared = {key: value for key, value in published.shared.items() if key not in ("description", "evaluation")}
    shared["description"] = f"A reproduction of {published.name}."
    if isinstance(evaluation := published.settings.get("evaluation"), Mapping) and "dataset_test_split" in evaluation:
        shared["evaluation"] = {"dataset_test_split": evaluation["dataset_test_split"]}
    return _OneFileRecipe(published.card["recipe"], Path(published.where), shared, stages), pinned_by_stage


def comparable_settings(run_settings: Mapping[str, Any], published: PublishedCheckpoint) -> dict[str, Any]:
    """Prepares a run's settings for a comparison with the published settings.

    Args:
        run_settings: The settings of the run.
        published: The published checkpoint.

    Returns:
        The settings without ignored keys. Names of models that end in @COMMIT are replaced by the published run's.
    """
    settings = {key: value for key, value in run_settings.items() if key not in IGNORED_KEYS}
    for key in _MODEL_KEYS:
        if key in settings and settings[key] != published.settings.get(key) and "@" in str(settings[key]):
            settings[key] = published.settings.get(key)
    return settings


def named_objects(published: PublishedCheckpoint) -> Iterator[tuple[str, str, str]]:
    """Yields the Python objects that the settings name.

    Args:
        published: The checkpoint.

    Yields:
        (key, name, group of entry points).
    """
    for kinds, settings in ((SHARED_KEYS, published.shared), (STAGE_KEYS, published.settings)):
        for key, kind in kinds.items():
            if kind is Kind.OBJECT and (value := settings.get(key)) is not None:
                for name in value if isinstance(value, list) else [value]:
                    yield key, name if isinstance(name, str) else repr(name), GROUPS[key]


def _check_keys(published: PublishedCheckpoint, stage_values: Mapping[str, Any]) -> None:
    """Raises ZooError if a download may not set a key, or may not set the key to the given value.

    `stage_settings` refuses unknown keys later.
    """
    accepted_keys = stage_keys(published.stage)
    for key, value in stage_values.items():
        if key in accepted_keys or key in STAGE_KEYS:
            check_key(key, value, STAGE_KEYS, where=published.where)
    for key, value in published.shared.items():
        if key in RECIPE_FIELDS or key in SHARED_KEYS:
            check_key(key, value, SHARED_KEYS, where=published.where)
    check_architecture(published.shared.get("architecture"), where=published.where)


def _check_names(published: PublishedCheckpoint, allowed_names: Sequence[str]) -> None:
    """Raises ZooError if a download names an object, model or data set that may not be loaded."""
    objects = list(named_objects(published))
    object_names = [name for _, name, _ in objects]
    if unknown_names := [name for name in allowed_names if name not in object_names]:
        values = ", ".join(object_names) or "nothing"
        raise ZooError(f"{ALLOW_FLAG} names {unknown_names[0]}, but {published.where} names {values}: remove it.")
    for key, name, group in objects:
        check_object(name, group, key=key, where=published.where, flag=ALLOW_FLAG, allowed_names=allowed_names)
    for key in _MODEL_KEYS:
        value = published.settings.get(key)
        names = value if isinstance(value, list) else [value]
        for model in map(str, [] if value is None else names):
            if model not in STAGES:
                check_repository(model, key=key, where=published.where)
                if revision := model.partition("@")[2]:
                    check_key(key, revision, {key: Kind.REVISION}, where=published.where)
    if (stage_data := published.settings.get("dataset_name")) is not None:
        _check_data(published, f"dataset_name of the stage {published.stage}", stage_data)
    data = published.shared.get("dataset_name")
    if data is not None and published.shared.get("corpus") is None:
        _check_data(published, "dataset_name", data)
    elif hub_id(data) is not None:  # for a folder of the publisher, `reproduce` uses the published data instead
        _check_namespace(published, "dataset_name", data)


def _check_data(published: PublishedCheckpoint, key: str, name: Any) -> None:
    check_repository(name, key=key, where=published.where)
    _check_namespace(published, key, name)


def _check_namespace(published: PublishedCheckpoint, key: str, name: Any) -> None:
    """Refuses a name without a namespace, because it could name a loader of `datasets`, such as json."""
    if "/" not in str(name):
        raise ZooError(
            f"{published.where} sets {key} to {name!r}, a name without a namespace, which is not loaded: choose "
            "another checkpoint."
        )


def _pinned_parent(published: PublishedCheckpoint, role: str) -> str:
    parent = published.parent(role)
    if parent is None:
        title = parent_title(role, from_base=Card(published.card).started_from_base)
        raise ZooError(
            f"The {title} of {published.name} was never published, or the card does not name its commit, so the "
            "checkpoint cannot be reproduced: choose another checkpoint."
        )
    return "@".join(parent)
