"""Finds PPO's parents: the policy that it trains further, its reward models, and the model that its critic starts from.

The recipe's stages or `rlhf-zoo ensemble` train a parent, or it comes from elsewhere.
"""

from dataclasses import replace
from typing import Any

from ..errors import ZooError
from .context import RunContext, stages_to_train
from .models import ParentCheckpoint, model_from_elsewhere
from .recipe import Recipe
from .registry import ENSEMBLE, ENSEMBLE_MEMBER, REWARD_ROLES, STAGES, is_ensemble_member, reward_names
from .settings.parse import StageSettings


def find_parent(context: RunContext, name: str) -> ParentCheckpoint:
    """Finds a parent of PPO.

    Args:
        context: The run.
        name: A stage of the recipe, a reward model of its ensemble (ensemble/seed-K/reward), a path or a Hub id.

    Raises:
        ZooError: There is no such model, or its stage is not finished.
    """
    if name in context.recipe.stages:
        return context.checkpoint(name)
    if is_ensemble_member(name):
        return _member_checkpoint(context, name)
    has_loader = context.settings("ppo").data.reward_model_loader is not None
    return model_from_elsewhere(name, context.hub, recipe=context.recipe.name, all_files=has_loader)


def parent_names(settings: StageSettings) -> dict[str, str]:
    """Returns the names of PPO's parents.

    Args:
        settings: Settings of the PPO stage.

    Returns:
        Role ("sft", "reward", "reward_2" and so on, "value") -> a stage of the recipe, a reward model of the ensemble,
        a path or a Hub id.

    Raises:
        ZooError: Too many reward models are named.
    """
    names = {"sft": settings.model.model_name_or_path or "sft"}
    names |= reward_roles(settings.data.reward_model_path)
    if settings.data.value_model_name_or_path is not None:
        names["value"] = settings.data.value_model_name_or_path
    return names


def check_parents(recipe: Recipe, ppo: StageSettings) -> None:
    """Checks that the recipe has the stages that train PPO's parents.

    Args:
        recipe: The recipe.
        ppo: Settings of the PPO stage.

    Raises:
        ZooError: The recipe lacks such a stage.
    """
    for role, name in parent_names(ppo).items():
        if name in STAGES and name not in recipe.stages:
            key = "model_name_or_path" if role == "sft" else "reward_model_path"
            raise ZooError(
                f"The stage ppo starts from the model of the stage {name}, but the recipe {recipe.name} has no "
                f"{name}.yaml: add that file, or name another model by {key} in ppo.yaml."
            )


def reward_roles(reward_model_path: Any) -> dict[str, str]:
    """Assigns a role among the run's parents to each reward model that `reward_model_path` names.

    Args:
        reward_model_path: The value of the key: None, a name or a list of names.

    Returns:
        Role -> name, in the order of the names.

    Raises:
        ZooError: There are more names than roles.
    """
    names = reward_names(reward_model_path)
    if len(names) > len(REWARD_ROLES):
        raise ZooError(f"reward_model_path names {len(names)} reward models: set at most {len(REWARD_ROLES)}.")
    return dict(zip(REWARD_ROLES, names, strict=False))


def member_run(context: RunContext, seed: int) -> RunContext:
    """Returns the run that trains the ensemble's reward model of a seed, in ENSEMBLE/seed-K.

    Args:
        context: The run.
        seed: The seed K.
    """
    base = context.base or context.directory
    return replace(context, directory=base / ENSEMBLE / f"seed-{seed}", base=base, own_stages=("reward",))


def _run_of_member(context: RunContext, name: str) -> RunContext:
    match = ENSEMBLE_MEMBER.fullmatch(name)
    assert match is not None  # callers check `is_ensemble_member` first
    return member_run(context, int(match[1]))


def is_member_trained(context: RunContext, name: str) -> bool:
    """Whether a reward model of the ensemble is finished.

    Args:
        context: The run.
        name: The model's folder in the run directory, such as ensemble/seed-1/reward.
    """
    return bool(_run_of_member(context, name).record("reward").read().get("status") == "finished")


def check_members(context: RunContext) -> None:
    """Checks, before PPO trains, that the reward models that it takes from the ensemble are finished.

    Args:
        context: The run.

    Raises:
        ZooError: A reward model is missing, or was trained for another SFT policy.
    """
    if "ppo" in stages_to_train(context):
        for name in reward_names(context.settings("ppo").data.reward_model_path):
            if is_ensemble_member(name):
                _member_checkpoint(context, name)


def _member_checkpoint(context: RunContext, name: str) -> ParentCheckpoint:
    """Finds the finished checkpoint of a reward model of the ensemble."""
    member = _run_of_member(context, name)
    record = member.record("reward")
    train_hint = f"`{context.stage_command('ensemble', '--seeds', 'N')}` trains reward models of N seeds"
    if not is_member_trained(context, name):
        raise ZooError(f"reward_model_path names {name}, but {record.path} has no finished reward model: {train_hint}.")
    sft_fingerprint = context.record("sft").read().get("fingerprint")
    sft_lineage = (record.read().get("parents") or {}).get("sft") or {}
    if sft_fingerprint is not None and sft_lineage.get("fingerprint") not in (None, sft_fingerprint):
        raise ZooError(
            f"The reward model in {record.path} was trained from a different SFT policy than "
            f"{context.record('sft').path}: {train_hint} again with --restart."
        )
    checkpoint = member.checkpoint("reward")
    return ParentCheckpoint(
        checkpoint.path, {**checkpoint.lineage, "path": f"{name}/{checkpoint.path.name}", "folder": name}
    )
