"""What a PPOTrainer is assembled from: rewards, critic, and the checks that need no training."""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError
from ..models import critic_from, is_peft, load_classifier
from ..rewards import RewardFunction, RewardModel, Rewards
from .config import PPOConfig

__all__ = ["build_critic", "build_rewards", "check_start", "check_tokens"]

# Far above what bf16 makes of equal models (hundredths of a nat), far below the KL of models that differ.
START_KL = 0.5


def check_tokens(tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> None:
    """Raises ZooError where tokenizer and policy cannot train: no EOS, no PAD apart from it, ids without embeddings."""
    if tokenizer.eos_token_id is None:
        raise ZooError("The tokenizer has no eos_token, so no completion could end: give it one.")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ZooError("The tokenizer has no pad_token other than its eos_token: add one, as PPO must tell them apart.")
    embeddings: Any = policy.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    if len(tokenizer) > rows:
        raise ZooError(
            f"The tokenizer has {len(tokenizer)} tokens and the policy {rows} embedding rows: resize them or use the "
            "policy's own tokenizer."
        )


def check_start(kl: float) -> None:
    """Raises ZooError if the first rollout of a run that begins at its reference has a KL, in nats per completion."""
    if not abs(kl) < START_KL:
        raise ZooError(
            f"The first rollout is {kl:.3g} nats a completion from the reference, though the run begins there, as when "
            "the policy's adapter was trained before: merge it into its base, or give ref_model."
        )


def build_rewards(
    reward_model: PreTrainedModel | str | None,
    reward_funcs: Any,
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_tokenizer: PreTrainedTokenizerBase,
) -> Rewards:
    """The reward model first, then the functions, as one weighted list. Raises ZooError for what is neither."""
    given = [] if reward_model is None else [reward_model]
    if reward_funcs is not None:
        given += reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    size = args.local_rollout_forward_batch_size
    ready: list[RewardModel | RewardFunction] = []
    for reward in given:
        if isinstance(reward, str):
            own = AutoTokenizer.from_pretrained(reward)
            ready.append(RewardModel(load_classifier(reward), own, tokenizer, batch_size=size))
        elif isinstance(reward, PreTrainedModel):
            ready.append(RewardModel(reward, reward_tokenizer, tokenizer, batch_size=size))
        elif callable(reward):
            ready.append(reward)
        else:
            raise ZooError(f"{reward!r} is no reward: give a model, a path or Hub id, or a function.")
    return Rewards(ready, weights=args.reward_weights)


def build_critic(value_model: PreTrainedModel | str | None, rewards: Rewards, policy: Any) -> PreTrainedModel:
    """The given critic, else one from the first reward model that reads the policy's tokens, else one from the policy.

    An adapter of the policy is merged into the critic's trunk.
    """
    if isinstance(value_model, PreTrainedModel):
        is_critic = type(value_model).__name__.endswith("ForTokenClassification")
        return value_model if is_critic else critic_from(value_model)
    if value_model is not None:
        return critic_from(value_model)
    sharing = [reward.model for reward in rewards.models if reward.shares_ids]
    if sharing:
        return critic_from(sharing[0])
    return critic_from(copy.deepcopy(policy).merge_and_unload() if is_peft(policy) else policy)
