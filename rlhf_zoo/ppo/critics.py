"""Builds the critic that the user passes or the settings name."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_MAPPING, PreTrainedModel

from ..errors import ZooError
from ..modeling.critic import critic_from
from ..modeling.models import is_peft
from ..modeling.value_head import ValueHead
from ..rewards import RewardModel, Rewards
from .actor_critic import shared_value_head
from .config import PPOConfig


def statistics_options(args: PPOConfig) -> dict[str, bool]:
    """Returns the arguments of `RewardModel` that center and scale its scores by the statistics stored with it.

    Args:
        args: The settings.
    """
    return {"center": args.score_centering == "stored", "scale": args.score_scaling == "stored"}


def build_critic(
    value_model: Any, rewards: Rewards | None, policy: Any, args: PPOConfig, *, share_weights: bool = False
) -> PreTrainedModel | ValueHead:
    """Builds the critic.

    If the critic is a copy of the policy, the policy's adapter is merged into it. A quantized policy cannot be copied:
    with 'auto' the critic is a value head instead.

    Args:
        value_model: The user's critic; None for the critic that `args.critic` names. With 'auto' the critic starts as
            the first reward model that reads the policy's tokens and has one output, otherwise as the policy.
        rewards: The rewards, which may include a reward model to start from.
        policy: The policy.
        args: The settings.
        share_weights: Whether a critic made from a reward model shares the reward model's weights. It may if only an
            adapter and the head are trained.

    Returns:
        A token classifier, or a value head on the policy's trunk.

    Raises:
        ZooError: There is no model that the critic can start from, or value_model cannot be a critic.
    """
    options: dict[str, Any] = {**statistics_options(args)}
    if value_model is not None:
        if args.critic != "auto":
            raise ZooError(f"critic is {args.critic!r} and value_model is passed too: remove one of them.")
        if isinstance(value_model, PreTrainedModel) and type(value_model).__name__.endswith("ForTokenClassification"):
            if value_model.config.num_labels != 1:
                raise ZooError(
                    f"value_model has {value_model.config.num_labels} outputs per token, but a critic has one: pass a "
                    "model with num_labels=1."
                )
            return value_model
        if is_peft(value_model):
            return value_model
        if not isinstance(value_model, (PreTrainedModel, str, Path)):
            raise ZooError(
                f"value_model has the type {type(value_model).__name__}: pass a model, its path or its Hub id."
            )
        return critic_from(value_model, **options, weight=_reward_weight_of(value_model, rewards))
    if args.critic == "shared":
        return shared_value_head(policy)
    weighted_models = rewards.weighted_models if rewards is not None else []
    candidates = [(reward.model, weight) for reward, weight in weighted_models if _can_start_critic(reward)]
    if args.critic == "reward" and not candidates:
        raise ZooError(
            "critic is 'reward', but no reward model has one output and the policy's tokenizer: set it to 'policy'."
        )
    if candidates and args.critic != "policy":
        # Shared weights keep their type, and the critic's float32 head reads a bf16 trunk only under bf16 autocast.
        model, weight = candidates[0]
        can_share = args.bf16 or model.dtype == torch.float32
        return critic_from(model, **options, weight=weight, share=share_weights and can_share)
    if getattr(policy, "is_quantized", False):
        if args.critic == "policy":
            raise ZooError("critic is 'policy', whose quantized weights cannot be copied: set it to 'shared'.")
        return shared_value_head(policy)
    if not is_peft(policy):
        return critic_from(policy)
    merged_policy = copy.deepcopy(policy).merge_and_unload()
    base_weights = {
        name.replace(".base_layer", ""): weight for name, weight in policy.get_base_model().state_dict().items()
    }
    critic = critic_from(merged_policy)
    named_weights = merged_policy.state_dict().items()
    if not all(name in base_weights and torch.equal(weight, base_weights[name]) for name, weight in named_weights):
        critic.name_or_path = ""  # an adapter on merged weights must not name the policy's base as its own
    return critic


def _reward_weight_of(value_model: PreTrainedModel | str | Path, rewards: Rewards | None) -> float:
    """Returns the weight of the reward that uses the model `value_model`; 1 if there is none."""

    def source(model: Any) -> str:
        return str(getattr(model.config, "_name_or_path", "")) if isinstance(model, PreTrainedModel) else str(model)

    for reward, weight in rewards.weighted_models if rewards is not None else ():
        if reward.model is value_model or (source(value_model) and source(reward.model) == source(value_model)):
            return weight
    return 1.0


def _can_start_critic(reward: RewardModel) -> bool:
    """Whether a critic can start from this model: it reads the policy's ids and has one output on a known trunk."""
    return reward.shares_ids and reward.label is None and type(reward.model.config) in MODEL_MAPPING
