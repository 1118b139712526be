"""A published checkpoint as a recipe that can be run again. What its files say is a stranger's word: see `recipe_of`.

recipe.json holds what a stage's run was asked for (its own keys, those of recipe.yaml under `recipe`), rlhf_card.json
the commits that it started from.
"""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..hub.claims import RECIPE_FILE
from ..hub.connect import CLIENT, Hub
from ..hub.pull import split_revision
from ..hub.refs import resolve
from ..json_values import hub_id
from ..plugins import REWARDS, registered
from ..recipes import Recipe, is_repository_name
from ..record import StageRecord, read_json
from ..release.card import CARD_FILE
from ..runs.data import CORPORA
from ..runs.layout import CUTS, HOLDS_OUT
from ..runs.parents import reward_roles
from ..runs.settings import BESIDE_KEYS
from ..stage import PARENT_TITLES, STAGES

PREFERENCES = "rlhf_zoo.preferences"
# Where a run reports to, and what belongs to the machine or the account that it ran on: no result hangs on it.
NOT_OBEYED = (
    "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "hub_private_repo", "hub_revision", "resume_from_checkpoint", "log_level", "log_level_replica", "log_on_each_node",
    "trust_remote_code", "local_rank", "do_train", "do_eval", "do_predict", "attn_implementation",
)  # fmt: skip
# What reads files, or loads what is neither the model nor the data that the card names.
REFUSED = (
    "accelerator_config", "chat_template_path", "deepspeed", "fsdp", "fsdp_config", "model_init_kwargs",
    "parallelism_config",
)  # fmt: skip
# Under `ppo`: how a reward model's samples were sampled, and which prompts PPO held out of earlier stages.
_OF_PPO = ("response_length", "temperature", *CUTS, *HOLDS_OUT)
_MODELS = ("model_name_or_path", "reward_model_path", "value_model_name_or_path")
_OWN = ("rlhf_zoo.corpora", "rlhf_zoo.rewards")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Fields of a model's configuration by which transformers fetches code.
_CODE = re.compile(r"^_|auto_map|implementation|quantization|kernel|remote_code")


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

    recipe.json may be a stranger's, so it may choose numbers, and among what is installed: keys that report to
    somewhere are left out, and those that read files, fetch code or name a path are refused, as are names of Python
    objects that this package, an entry point or `allowed` does not vouch for. Raises ZooError for these and for a
    parent that was never published.
    """
    own = {key: value for key, value in published.resolved.items() if key not in (*BESIDE_KEYS, *NOT_OBEYED)}
    if refused := [key for key in REFUSED if own.get(key)]:
        raise ZooError(
            f"{published.where} says {refused[0]}, which may read files or load code, and no download may say that: "
            "copy the settings that you trust into a recipe of your own."
        )
    architecture = published.shared.get("architecture")
    if isinstance(architecture, Mapping) and (fields := [key for key in architecture if _CODE.search(str(key))]):
        raise ZooError(f"{published.where} sets architecture.{fields[0]}, by which code is fetched: it is not run.")
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
            _check_repository(published, "dataset_name of the stage ppo", str(data))
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
    """(key, name, group of entry points) of every Python object that the settings name and its stage would import."""
    if published.shared.get("corpus") is not None:
        yield "corpus", str(published.shared["corpus"]), CORPORA
    if published.stage == "reward" and published.resolved.get("preference") is not None:
        yield "preference", str(published.resolved["preference"]), PREFERENCES
    if published.stage == "ppo":
        functions = published.resolved.get("reward_funcs") or []
        for name in functions if isinstance(functions, list) else [functions]:
            yield "reward_funcs", str(name), REWARDS


def _check_names(published: Published, allowed: Sequence[str]) -> None:
    named = list(named_objects(published))
    if strange := [name for name in allowed if name not in [name for _, name, _ in named]]:
        listed = ", ".join(name for _, name, _ in named) or "nothing"
        raise ZooError(f"--allow_import names {strange[0]}, and {published.where} names {listed}: leave it out.")
    for key, name, group in named:
        if name not in allowed and not _vouched_for(name, group):
            raise ZooError(
                f"{published.where} takes its {key} from {name}, which is neither rlhf-zoo's own nor registered by an "
                f"installed package, and no code that a download names is imported unasked: add --allow_import "
                f"{name!r} if you trust it."
            )
    for key in _MODELS:
        value = published.resolved.get(key)
        for model in map(str, value if isinstance(value, list) else [value] if value is not None else []):
            if model not in STAGES:
                _check_repository(published, key, model.partition("@")[0])
    if (own := published.resolved.get("dataset_name")) is not None:
        _check_repository(published, f"dataset_name of the stage {published.stage}", str(own))
    if (data := published.shared.get("dataset_name")) is not None and published.shared.get("corpus") is None:
        _check_repository(published, "dataset_name", str(data))


def _vouched_for(name: str, group: str) -> bool:
    """Whether a name is of this package's corpora and rewards, or an entry point's.

    Not any name that such a module holds: module:attribute also reaches what it imported, such as os.
    """
    bare = name.partition("(")[0].strip()
    module, colon, attribute = bare.partition(":")
    if not colon:
        return bare in registered(group)
    if not _is_own(module) or attribute.startswith("_"):
        return False
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return False
    return callable(found) and _is_own(getattr(found, "__module__", ""))


def _is_own(module: str) -> bool:
    return module in _OWN or module.startswith(tuple(f"{own}." for own in _OWN))


def _check_repository(published: Published, key: str, name: str) -> None:
    if hub_id(name) is None:
        raise ZooError(
            f"{published.where} says that {key} is {name!r}, a path of the machine that published it: it cannot be "
            "made again from what was published."
        )
    if Path(name).exists():
        raise ZooError(
            f"{published.where} says that {key} is {name}, and a folder here has that name: run this in another "
            "directory."
        )


def _pinned(published: Published, role: str) -> str:
    at = published.parent(role)
    if at is None:
        raise ZooError(
            f"The {PARENT_TITLES[role]} of {published.name} was never published, or its card does not say at which "
            "commit: it cannot be made again."
        )
    return "@".join(at)
