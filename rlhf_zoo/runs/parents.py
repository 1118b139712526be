"""What PPO starts from: stages of its recipe, reward models of its ensemble, and models from elsewhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ZooError
from .context import RunContext
from .dataset import to_train
from .models import ParentCheckpoint, model_from_elsewhere
from .recipe import Recipe
from .record import StageRecord
from .registry import ENSEMBLE, MEMBER, REWARD_ROLES, STAGES, is_member
from .settings.parse import StageSettings


def parent(context: RunContext, name: str) -> ParentCheckpoint:
    """Another stage of this recipe by its name, a reward model of its ensemble, else a path or Hub id."""
    if name in context.recipe.stages:
        return context.checkpoint(name)
    if is_member(name):
        return member_checkpoint(context, name)
    custom = context.settings("ppo").data.reward_model_loader is not None
    return model_from_elsewhere(name, context.hub, recipe=context.recipe.name, whole=custom)


def parent_names(settings: StageSettings) -> dict[str, str]:
    """What PPO starts from: role -> a stage of the recipe, a path or a Hub id."""
    names = {"sft": settings.model.model_name_or_path or "sft"}
    names |= reward_roles(settings.data.reward_model_path)
    if settings.data.value_model_name_or_path is not None:
        names["value"] = settings.data.value_model_name_or_path
    return names


def check_parents(recipe: Recipe, ppo: StageSettings) -> None:
    """Raises ZooError where PPO starts from a stage that the recipe has not."""
    for role, name in parent_names(ppo).items():
        if name in STAGES and name not in recipe.stages:
            key = "model_name_or_path" if role == "sft" else "reward_model_path"
            raise ZooError(
                f"The stage ppo takes the model of the stage {name}, and the recipe {recipe.name} has no {name}.yaml: "
                f"add it, or say in ppo.yaml by {key} which model to take."
            )


def reward_names(path: Any) -> list[str]:
    """What `reward_model_path` names."""
    return [] if path is None else [path] if isinstance(path, str) else list(path)


def reward_roles(path: Any) -> dict[str, str]:
    """Role among a run's parents -> name, of what `reward_model_path` names. Raises ZooError for too many."""
    names = reward_names(path)
    if len(names) > len(REWARD_ROLES):
        raise ZooError(f"reward_model_path names {len(names)} reward models: give at most {len(REWARD_ROLES)}.")
    return dict(zip(REWARD_ROLES, names, strict=False))


def member_run(context: RunContext, seed: int) -> RunContext:
    """The run whose reward model lies in ENSEMBLE/seed-K."""
    base = context.base or context.directory
    return replace(context, directory=base / ENSEMBLE / f"seed-{seed}", base=base, own=("reward",))


def _of(context: RunContext, name: str) -> RunContext:
    match = MEMBER.fullmatch(name)
    assert match is not None  # `is_member` was asked
    return member_run(context, int(match[1]))


def is_trained(context: RunContext, name: str) -> bool:
    """Whether an ensemble's model, by its folder in the run directory, is finished."""
    return bool(_of(context, name).record("reward").read().get("status") == "finished")


def check_members(context: RunContext) -> None:
    """Raises ZooError, before anything trains, where PPO is to be paid by a model of an ensemble that is not there."""
    if "ppo" in to_train(context):
        for name in reward_names(context.settings("ppo").data.reward_model_path):
            if is_member(name):
                member_checkpoint(context, name)


def member_checkpoint(context: RunContext, name: str) -> ParentCheckpoint:
    """The finished checkpoint of an ensemble's model, by its folder in the run directory.

    Raises ZooError where it is not trained, or for another SFT policy than the run has now.
    """
    member = _of(context, name)
    record = member.record("reward")
    train = f"`rlhf-zoo ensemble {context.recipe.called} --seeds N` trains reward models of N seeds"
    if not is_trained(context, name):
        raise ZooError(f"reward_model_path names {name}, and {record.path} holds no finished reward model: {train}.")
    now = context.record("sft").read().get("fingerprint")
    sft = (record.read().get("parents") or {}).get("sft") or {}
    if now is not None and sft.get("fingerprint") not in (None, now):
        raise ZooError(
            f"The reward model in {record.path} is of another SFT policy than {context.record('sft').path}: {train} "
            "anew with --restart."
        )
    found = member.checkpoint("reward")
    return ParentCheckpoint(found.path, {**found.lineage, "path": f"{name}/{found.path.name}", "folder": name})


def member_beside(checkpoint: Path, folder: Any) -> Path | None:
    """The model of an ensemble that a run's card names as `folder`, beside the run's stage or its checkpoint, if any.

    A card is its publisher's word: nothing but an ensemble's folder is looked for.
    """
    if not isinstance(folder, str) or not is_member(folder):
        return None
    runs = checkpoint.resolve().parents[:2]
    found = (StageRecord(run / folder).chosen_checkpoint() for run in runs if (run / folder).is_dir())
    return next((path for path in found if path is not None), None)
